"""Nothing heavy is imported before it is used: the modules that are loaded after each step, in a separate process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import zarrckpt

ALL = {"torch", "zarr", "numpy", "obstore", "fsspec", "s3fs", "ml_dtypes", "google_crc32c", "asyncio", "xarray"}
CLIENTS = {"zarr", "numcodecs", "obstore", "fsspec", "s3fs", "ml_dtypes", "google_crc32c", "xarray"}
SLOW_TORCH = {"torch.distributed.checkpoint", "torch.distributed.tensor", "torch.distributed.fsdp", "sympy"}
"""Modules that take a second to import, and that plain tensors do not need."""

OPEN = "ckpt = zarrckpt.open(url); assert list(ckpt) == ['model.w', 'step', 'blob']"

STEPS = {
    "import zarrckpt": ALL,
    "import zarrckpt; str(zarrckpt.CheckpointError()); dir(zarrckpt)": ALL,
    f"import zarrckpt; {OPEN}; ckpt.tensors, ckpt.nbytes, ckpt.save_id, str(ckpt), ckpt['step'], ckpt['blob']": (
        ALL - {"numpy"}
    ),
    "import zarrckpt; assert zarrckpt.latest(folder) == zarrckpt.best(folder, 'loss') == url": ALL - {"numpy"},
    f"import zarrckpt; {OPEN}; assert ckpt['model.w'][0] == 1": {"torch", "obstore", "s3fs", "xarray"},
    "import zarrckpt, torch; state = {'w': torch.ones(3), 'n': 1}; new = folder + '-new'; zarrckpt.save(state, new); "
    "zarrckpt.async_save(state, new + '-async').result(); zarrckpt.load(state, new)": CLIENTS | SLOW_TORCH,
}

SCRIPT = """
import json, sys
url, folder = sys.argv[1:]
{step}
print(json.dumps(sorted(sys.modules)))
"""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    place = str(tmp_path_factory.mktemp("start-up") / "run" / "ckpt")
    zarrckpt.save({"model": {"w": torch.ones(3)}, "step": 7, "blob": b"bytes"}, place, metadata={"loss": 0.5})
    return place


@pytest.mark.parametrize("step", STEPS)
def test_unused_libraries_are_not_imported(step: str, url: str) -> None:
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT.format(step=step), url, str(Path(url).parent)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert not STEPS[step] & {*json.loads(ended.stdout)}
