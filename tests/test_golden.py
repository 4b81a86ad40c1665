"""Checkpoints that the first version of the format wrote read for ever, and newer ones are refused by name.

The files in ``golden/`` are never written again; ``make_golden.py`` says what is in them.
"""

from __future__ import annotations

import io
import json
import shutil
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import google_crc32c
import make_golden as golden
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from independent_reader import Reader
from ranks import run_ranks

import zarrckpt
from zarrckpt import CheckpointError, UnsafeValueError, UnsupportedFormatError

_COMPRESSED = {"w": golden.pattern(600, 512), "tensors": golden.tensors(), "npy": golden.values()["npy"], "step": 1}
_RANKS = {
    "rows": golden.bits("float32", golden.ROWS),
    "columns": golden.bits("bfloat16", golden.COLUMNS),
    "replica": golden.bits("int64", (3,)),
    "step": 3,
    "rng": {str(rank): {"seed": rank, "state": golden.bits("uint8", (6,), rank)} for rank in range(golden.WORLD_SIZE)},
}
EXPECTED: dict[str, dict[str, Any]] = {
    "plain": {
        **{"tensors": golden.tensors(), "values": golden.values(), "nested": golden.nested()},
        "pickle": golden.pickled(),
    },
    "portable": {"tensors": golden.tensors(), "step": 1},
    "subchunks": {"w": golden.pattern(600, 512), "small": golden.bits("int16", (7, 3))},
    "chunks": {"w": golden.bits("float32", (9, 7)), "x": golden.bits("uint8", (100,))},
    "zstd": _COMPRESSED,
    "blosc": _COMPRESSED,
    "overwritten": golden.trained(2),
    "ranks": _RANKS,
    "ranks_merged": _RANKS,
}


def raw(tensor: torch.Tensor) -> bytes:
    tensor = tensor.contiguous().reshape(-1)
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).view(torch.uint8).numpy().tobytes()


def same(one: Any, other: Any) -> bool:
    """Equal to the last bit and to the type, containers and their order included."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return (one.dtype, one.shape) == (other.dtype, other.shape) and raw(one) == raw(other)
    if isinstance(one, np.ndarray | np.generic):
        return (one.dtype, one.shape) == (other.dtype, other.shape) and one.tobytes() == other.tobytes()
    if isinstance(one, io.BytesIO):
        return one.getvalue() == other.getvalue()
    if isinstance(one, Mapping):
        pairs = zip(one.items(), other.items(), strict=False)
        return len(one) == len(other) and all(same(a, b) for pair in pairs for a, b in zip(*pair, strict=True))
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return repr(one) == repr(other) if isinstance(one, float | complex) else bool(one == other)


def blank(value: Any) -> Any:
    """A target like a state: its tensors empty, no value what it was."""
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    if isinstance(value, Mapping) and value:
        return type(value)((key, blank(item)) for key, item in value.items())
    if isinstance(value, list) and any(isinstance(item, torch.Tensor | Mapping) for item in value):
        return [blank(item) for item in value]
    return "unloaded"


def unpacked(name: str, folder: Path) -> Path:
    with zipfile.ZipFile(golden.GOLDEN / f"{name}.zip") as archive:
        archive.extractall(folder / name)
    return folder / name


def test_there_is_one_of_each_kind() -> None:
    assert {file.stem for file in golden.GOLDEN.glob("*.zip")} == set(golden.CHECKPOINTS) == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_it_opens_reads_loads_and_verifies(name: str, tmp_path: Path) -> None:
    folder, expected = unpacked(name, tmp_path), EXPECTED[name]
    ckpt = zarrckpt.open(folder, allow_pickle=True)
    assert (ckpt.verify(), ckpt.verify(quick=True)) and not ckpt.verify().damages
    # The whole state, made anew: names, keys, containers, order.
    target: dict[str, Any] = dict.fromkeys(expected)
    zarrckpt.load(target, folder, allow_pickle=True)
    assert same(target, expected)
    # Into what is there, and each entry by itself.
    target = {key: blank(value) for key, value in expected.items()}
    zarrckpt.load(target, folder, allow_pickle=True)
    assert same(target, expected)
    arrays = ckpt.read()
    reader = Reader(folder)  # which knows the format page alone
    assert arrays and list(reader.entries) == list(ckpt)
    for fqn, array in arrays.items():
        assert (array.dtype.name, list(array.shape), array.tobytes()) == reader.tensor(fqn), fqn
        lazy = np.asarray(ckpt[fqn][...])  # portable ones as the integers that hold them
        assert (lazy.shape, lazy.tobytes()) == (array.shape, array.tobytes()), fqn


def test_pickles_load_only_on_request(tmp_path: Path) -> None:
    folder = unpacked("plain", tmp_path)
    with pytest.raises(UnsafeValueError, match=r"pickle\.day"):
        zarrckpt.open(folder)["pickle.day"]
    assert zarrckpt.open(folder, allow_pickle=True)["pickle.day"] == golden.pickled()["day"]


def _load_on_two_ranks(folder: str) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    shapes = {"rows": (golden.ROWS, torch.float32), "columns": (golden.COLUMNS, torch.bfloat16)}
    state: dict[str, Any] = {
        name: distribute_tensor(torch.zeros(shape, dtype=dtype), mesh, [Shard(0)])
        for name, (shape, dtype) in shapes.items()
    }
    state |= {"replica": torch.zeros(3, dtype=torch.int64), "rng": zarrckpt.PerRank(None), "step": 0}
    zarrckpt.load(state, folder)
    return {name: getattr(value, "full_tensor", lambda value=value: value)() for name, value in state.items()} | {
        "rng": state["rng"].value
    }


def test_what_four_ranks_saved_loads_on_two(tmp_path: Path) -> None:
    for name in ("ranks", "ranks_merged"):
        for rank, loaded in enumerate(run_ranks(_load_on_two_ranks, str(unpacked(name, tmp_path)), world_size=2)):
            assert same(loaded, {**{k: _RANKS[k] for k in loaded}, "rng": _RANKS["rng"][str(rank)]})


def edited(folder: Path, change: dict[str, Any]) -> Path:
    """Another root document, with the right checksum."""
    document = json.loads((folder / "zarr.json").read_bytes())
    document["attributes"]["zarrckpt"].update(change, crc32c="00000000")
    data = json.dumps(document, separators=(",", ":")).encode()
    (folder / "zarr.json").write_bytes(data.replace(b"00000000", b"%08x" % google_crc32c.value(data), 1))
    return folder


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"format": 2}, "format 2"),
        ({"format": 1.0}, r"format 1\.0"),
        ({"format": True}, "format True"),
        ({"features": ["bricks"]}, "bricks"),
        ({"format": 2, "entries": [], "save_id": 5}, "format 2"),
    ],
)
def test_newer_ones_are_refused_by_name(change: dict[str, Any], named: str, tmp_path: Path) -> None:
    folder = edited(unpacked("overwritten", tmp_path), change)
    before = {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    refused = pytest.raises(UnsupportedFormatError, match=f"{named}.*upgrade zarrckpt")
    with refused:
        zarrckpt.open(folder)
    with refused:
        zarrckpt.load({"step": None}, folder)
    for overwrite in (False, True):
        with refused:
            zarrckpt.save({"step": 1}, folder, overwrite=overwrite)
    for clean in (zarrckpt.recover, zarrckpt.remove):
        with refused:
            clean(folder)
    with pytest.warns(UserWarning, match=named):
        assert zarrckpt.latest(tmp_path) is None
    with pytest.raises(dcp.api.CheckpointException, match=named):
        dcp.load({"step": torch.zeros(1)}, storage_reader=zarrckpt.ZarrStorageReader(folder), no_dist=True)
    assert {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()} == before


def test_the_edit_is_what_is_refused(tmp_path: Path) -> None:
    assert zarrckpt.open(edited(unpacked("overwritten", tmp_path), {"later": "addition"})).verify()


def test_an_existing_one_is_not_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(golden.GOLDEN, tmp_path / "golden")
    (tmp_path / "golden/chunks.zip").unlink()
    (tmp_path / "golden/zstd.zip").write_bytes(b"kept")
    monkeypatch.setattr(golden, "GOLDEN", tmp_path / "golden")
    monkeypatch.setattr(golden, "stop_ranks", lambda: None)
    before = {file.name: file.read_bytes() for file in (tmp_path / "golden").iterdir()}
    with warnings.catch_warnings():
        golden.main()
    after = {file.name: file.read_bytes() for file in (tmp_path / "golden").iterdir()}
    assert after.pop("chunks.zip") and after == before
    try:
        zarrckpt.open(unpacked("chunks", tmp_path)).verify().raise_if_damaged()
    except CheckpointError as err:
        raise AssertionError("what it writes does not verify") from err
