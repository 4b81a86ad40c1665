"""Plain zarr-python finds the saved nodes, and the page about other readers names what they cannot do.

``test_readers_table.py`` compares the numbers that each library reads.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import tensorstore
import torch
from harness import ROOT, plain_readers
from harness.bits import bits
from harness.internals import DTYPES
from harness.random_tensors import random_tensor
from harness.s3_server import S3Server
from obstore.exceptions import NotSupportedError

import zarrckpt

RECIPES = ROOT / "docs" / "how-to" / "read.md"


@pytest.mark.parametrize("overwritten", [False, True])
def test_zarr_finds_the_nodes_of_the_root_by_listing(overwritten: bool, tmp_path: Path) -> None:
    """Plain zarr-python warns of no object."""
    url = str(tmp_path / "ck")
    state = {"a b": {"w": torch.ones(3), "deep": {"er": torch.ones(2)}}, "ünï✓": torch.ones(1)}
    for _ in range(1 + overwritten):
        zarrckpt.save(state, url, overwrite=True)
    ckpt = zarrckpt.open(url)
    paths = {ckpt.entry(fqn).node_path for fqn in ckpt}
    groups = {"/".join(path.split("/")[:depth]) for path in paths for depth in range(1, path.count("/") + 1)}
    (found,) = plain_readers.call(tmp_path, ("zarr_unconsolidated", {"url": url}))
    ours = {path for path in found if path.startswith("@zarrckpt")}
    assert {*found} - ours == paths | groups and bool(ckpt.info.tree) == overwritten
    assert len(ours) == 4  # the claim, the marker, two tables


def test_portable_dtypes_need_no_package(tmp_path: Path) -> None:
    url, state = str(tmp_path / "ck"), {name: random_tensor(name, (3, 4)) for name in DTYPES}
    zarrckpt.save(state, url, options=zarrckpt.SaveOptions(portable_dtypes=True))
    (found,) = plain_readers.call(tmp_path, ("zarr_without_the_package", {"url": url}))
    for name, tensor in state.items():
        _, shape, data = bits(tensor)
        assert found[name] == (DTYPES[name].portable.name, shape, data)


def test_bfloat16_fails_groups_without_the_package(tmp_path: Path) -> None:
    """The calls that ``docs/how-to/read.md`` names, and no others."""
    url, w = str(tmp_path / "ck"), torch.arange(3.0)
    zarrckpt.save({"plain": {"w": w}, "mixed": {"w": w, "half": w.bfloat16()}}, url)
    (found,) = plain_readers.call(tmp_path, ("calls_without_the_package", {"url": url}))
    works = {"zarr, use_consolidated", "zarr, array", "xarray, consolidated"}
    assert {name for name, answer in found.items() if answer == w.tolist()} == works
    assert {answer for name, answer in found.items() if name not in works} == {
        "No Zarr data type found that matches 'bfloat16'"
    }


@pytest.mark.parametrize("overwritten", [False, True])
def test_the_recipe_for_http_reads(overwritten: bool, tmp_path: Path, s3_stub: S3Server) -> None:
    """The code of ``docs/how-to/read.md``, at a server that serves ranges and at one that does not."""
    names = {"norm": torch.ones(16), "größe": torch.ones(2), "large": torch.ones(1100, 600)}
    for _ in range(1 + overwritten):
        zarrckpt.save({"model": names}, tmp_path / "ck", overwrite=True)
    for file in filter(Path.is_file, (tmp_path / "ck").rglob("*")):
        s3_stub.put_object(f"run/{file.relative_to(tmp_path / 'ck').as_posix()}", file.read_bytes())
    tree = zarrckpt.open(tmp_path / "ck").info.tree
    (recipe,) = re.findall(r"```python no-run\n(import.*?HTTPStore.*?)```", RECIPES.read_text(), re.DOTALL)
    found: dict[str, Any] = {}
    code = recipe.replace("https://example.org/run/step-100", f"{s3_stub.endpoint}/run")
    exec(code.replace("model/norm", f"{tree}/model/norm".lstrip("/")), found)
    group, model, url = found["group"], f"{tree}/model".lstrip("/"), found["url"]
    assert (found["norm"] == 1).all() and (found["same"] == 1).all() and found["norm"].shape == (16,)
    assert (group[f"{model}/größe"][...] == 1).all() and (group[f"{model}/large"][:3] == 1).all()
    assert (found["tree"][model]["large"][5:9].values == 1).all()
    assert (zarrckpt.open(url)["model.large"][:3] == 1).all()

    def by_tensorstore(name: str) -> Any:
        return tensorstore.open({"driver": "zarr3", "kvstore": f"{url}/{model}/{name}/"}, read=True).result()

    assert (by_tensorstore(quote("größe")).read().result() == 1).all()
    assert (by_tensorstore("large")[:3].read().result() == 1).all()
    s3_stub.faults.ignore_ranges = True
    with pytest.raises(NotSupportedError, match="Range"):
        group[f"{model}/large"][:3]
    with pytest.raises(ValueError, match="byte range"):
        by_tensorstore("large")[:3].read().result()
