"""``metadata``: a user's values are restored, shown, and copied with the checkpoint."""

from __future__ import annotations

import json
import math
import re
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from harness.ranks import run_ranks

import zarrckpt
from zarrckpt._format.metadata import MAX_RUN_METADATA
from zarrckpt.cli import main

STATE = {"w": torch.arange(4.0), "step": 1}
METADATA: dict[str, Any] = {
    **{"step": 7, "val_loss": 2.125, "whole": 3.0, "big": 2**70, "nan": math.nan, "none": None, "yes": True},
    **{"name": 'ü "x" \ud800', "nested": {"list": [1, [2.5, "a"], {}], "": []}},
}


def same(one: Any, other: Any) -> bool:
    return repr(one) == repr(other)  # 1, 1.0 and True differ, a NaN equals itself, and the order counts


@pytest.mark.parametrize("how", ["save", "async_save", "dcp"])
def test_metadata_is_saved_and_read(how: str, tmp_path: Path) -> None:
    if how == "dcp":
        dcp.save(STATE, storage_writer=zarrckpt.ZarrStorageWriter(tmp_path / "a", metadata=METADATA), no_dist=True)
    elif how == "save":
        zarrckpt.save(STATE, tmp_path / "a", metadata=METADATA)
    else:
        zarrckpt.async_save(STATE, tmp_path / "a", metadata=METADATA).result(60)
    ckpt = zarrckpt.open(tmp_path / "a")
    assert same(ckpt.metadata, METADATA) and ckpt.verify()
    ckpt.metadata["nested"]["list"].append(5)  # a copy
    assert same(ckpt.metadata, METADATA) and same(zarrckpt.open(tmp_path / "a").metadata, METADATA)
    zarrckpt.copy(ckpt, tmp_path / "b", dtype="bfloat16")
    assert same(zarrckpt.open(tmp_path / "b").metadata, METADATA)
    zarrckpt.save(STATE, tmp_path / "a", overwrite=True)
    assert zarrckpt.open(tmp_path / "a").metadata == {}


def test_metrics_are_numbers(tmp_path: Path) -> None:
    """A loss can be of torch, numpy, or in a tuple or another mapping."""
    metadata = OrderedDict(
        loss=torch.tensor(1.5, requires_grad=True), bf=torch.tensor([2.0]).bfloat16(), n=np.int64(3), f=np.float32(0.5)
    )
    zarrckpt.save(STATE, tmp_path / "a", metadata=metadata | {"shape": (1, 2), "b": np.bool_(True)})
    expected = {"loss": 1.5, "bf": 2.0, "n": 3, "f": 0.5, "shape": [1, 2], "b": True}
    assert same(zarrckpt.open(tmp_path / "a").metadata, expected)


def loop() -> dict[str, Any]:
    nested: dict[str, Any] = {}
    nested["again"] = nested
    return nested


def doubling() -> dict[str, Any]:
    nested: Any = []
    for _ in range(30):
        nested = [nested, nested]
    return {"a": nested}


REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "no dict": ([1], TypeError, "got a list"),
    "an object": ({"a": [{"b": object()}]}, TypeError, r"metadata\['a'\]\[0\]\['b'\] is a object"),
    "bytes": ({"a": b"x"}, TypeError, r"metadata\['a'\] is a bytes"),
    "a vector": ({"a": torch.zeros(2)}, TypeError, r"metadata\['a'\] is a Tensor"),
    "a complex number": ({"a": 1j}, TypeError, "complex"),
    "a key that is no string": ({"a": {1: 2}}, TypeError, "the key 1"),
    "a key that begins with $": ({"$a": 1}, TypeError, r"'\$a'"),
    "a key that is no Unicode": ({"\ud800": 1}, TypeError, "Unicode"),
    "a reserved name": ({"zarrckpt.step": 1}, ValueError, r"'zarrckpt\.step'.*reserved"),
    "too much": ({"a": "x" * 70_000}, ValueError, "70,008 bytes"),
    "twice itself": (doubling(), ValueError, "values"),
    "a loop": (loop(), ValueError, "nests deeper"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_metadata_is_refused(name: str, tmp_path: Path) -> None:
    metadata, error, text = REFUSED[name]
    for save in (zarrckpt.save, zarrckpt.async_save):
        with pytest.raises(error, match=text):
            save(STATE, tmp_path / "a", metadata=metadata)
    assert not (tmp_path / "a").exists()


def _on_ranks(folder: str) -> None:
    import torch.distributed as dist

    zarrckpt.save(STATE, folder, metadata={"rank": dist.get_rank()})


def test_rank_0s_metadata_is_saved(tmp_path: Path) -> None:
    run_ranks(_on_ranks, str(tmp_path / "a"), world_size=2)
    assert zarrckpt.open(tmp_path / "a").metadata == {"rank": 0}


def test_metadata_is_shown_by_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def output(*arguments: str) -> str:
        with pytest.raises(SystemExit) as end:
            main([*arguments])
        assert end.value.code in (0, None)
        return capsys.readouterr().out

    for step, loss in ((100, 2.5), (200, 2.25)):
        zarrckpt.save({"w": torch.zeros(3)}, tmp_path / f"run/{step}", metadata={"step": step, "val_loss": loss})
    assert zarrckpt.open(tmp_path / "run/100").info.step == 100
    shown = output("info", str(tmp_path / "run/200"))
    assert "val_loss" in shown and "2.25" in shown
    listed = output("ls", str(tmp_path / "run")).splitlines()
    assert [line.split()[-1] for line in listed] == ["2.5", "2.25"]
    places = json.loads(output("ls", "--json", str(tmp_path / "run")))
    assert [row["metadata"] for row in places] == [{"step": 100, "val_loss": 2.5}, {"step": 200, "val_loss": 2.25}]
    zarrckpt.report(tmp_path / "run/200", tmp_path / "page.html")
    assert re.search('"val_loss": ?"2.25"', (tmp_path / "page.html").read_text())


def test_metrics_and_metadata_share_one_limit(tmp_path: Path) -> None:
    """Metrics and metadata that fit one by one, but not together, are refused before anything is stored."""
    manager = zarrckpt.CheckpointManager(tmp_path, signals=(), background=False)
    room = MAX_RUN_METADATA - len('{"step":1,"note":""}')
    for size, metrics in ((room + 1, {}), (40_000, {"m" * 30_000: 1.0})):
        with pytest.raises(ValueError, match=r"metadata has .* bytes"):
            manager.save(1, {"w": 1}, metrics, {"note": "x" * size})
    manager.save(1, {"w": 1}, metadata={"note": "x" * room})
    manager.close()
    assert len(zarrckpt.open(tmp_path / "step-00000001").metadata["note"]) == room
