"""The example for Ray Train on two ranks, with a stub of the part of Ray's interface that it uses."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
from harness import ROOT
from harness.ranks import run_ranks

import zarrckpt


class WorkerLost(Exception):
    """Stands for the failure after which Ray calls the function again."""


class StubRay:
    """Keeps the last reported folder, as Ray Train does for one run."""

    def __init__(self, storage: Path, reports: int) -> None:
        self.folder, self.reports = storage / "last", reports
        self.Checkpoint = SimpleNamespace(from_directory=lambda folder: folder)

    def report(self, metrics: dict[str, Any], checkpoint: str | None) -> None:
        assert (checkpoint is not None) == (dist.get_rank() == 0)
        if checkpoint is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            shutil.copytree(checkpoint, self.folder)
        dist.barrier()
        self.reports -= 1
        if self.reports == 0:
            raise WorkerLost

    def get_checkpoint(self) -> Any:
        @contextmanager
        def as_directory() -> Any:
            yield str(self.folder)

        return SimpleNamespace(as_directory=as_directory) if self.folder.exists() else None


def _train(run: str, reports: int) -> str:
    """Train until Ray has this many reports, at most to the end. Return the kind of end."""
    stub = StubRay(Path(run).parent, reports)
    modules = {
        "ray": SimpleNamespace(train=stub),
        "ray.train": stub,
        "ray.train.torch": SimpleNamespace(TorchTrainer=None),
    }
    sys.path.insert(0, str(ROOT / "examples"))
    sys.modules.pop("ray_train", None)
    with patch.dict(sys.modules, modules):
        try:
            importlib.import_module("ray_train").train({"run": run, "steps": 40, "every": 10})
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        finally:
            sys.path.remove(str(ROOT / "examples"))
    return "finished"


def test_a_run_under_ray_resumes_from_the_reported_step(tmp_path: Path) -> None:
    run, reported = tmp_path / "run", tmp_path / "last" / "zarrckpt.json"
    assert run_ranks(_train, str(run), 2, world_size=2) == ["WorkerLost: "] * 2
    assert json.loads(reported.read_text()) == {"url": f"{run}/step-00000020", "step": 20}
    assert (
        run_ranks(_train, str(run), 9, world_size=2) == ["finished"] * 2
    )  # from step 0 on, its saves would be refused
    assert json.loads(reported.read_text())["step"] == 40
    assert zarrckpt.latest(run) == f"{run}/step-00000040"


@pytest.mark.parametrize(
    ("stored", "error"),
    [
        ({"url": "/elsewhere/step-00000010", "step": 10}, "ValueError: the checkpoint in Ray's storage names"),
        ({"url": "{run}/step-00000010", "step": 10}, "RuntimeError: {run} has no checkpoint after step 0, but step 10"),
    ],
)
def test_a_wrong_url_in_rays_storage_is_refused(stored: dict[str, Any], error: str, tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    (tmp_path / "last").mkdir()
    (tmp_path / "last" / "zarrckpt.json").write_text(json.dumps(stored).replace("{run}", run))
    for said in run_ranks(_train, run, 9, world_size=2):
        assert said.startswith(error.replace("{run}", run))
