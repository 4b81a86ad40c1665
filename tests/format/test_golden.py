"""Checkpoints that the first version of the format wrote open forever. Newer formats are refused with their number.

The files in ``golden/`` are never written again. ``make_golden.py`` describes their contents.
"""

from __future__ import annotations

import json
import shutil
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jsonschema
import make_golden as golden
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from harness.bits import bits, same
from harness.page_reader import PAGE, Reader
from harness.ranks import run_ranks

import zarrckpt
from zarrckpt import CheckpointError, UnsafeValueError, UnsupportedFormatError

_RANKS = {
    "rows": golden.bits("float32", golden.ROWS),
    "columns": golden.bits("bfloat16", golden.COLUMNS),
    "replica": golden.bits("int64", (3,)),
    "step": 3,
    "rng": {
        "0": {"seed": 0},
        "ranks": {"state": torch.stack([golden.bits("uint8", (6,), rank) for rank in range(golden.WORLD_SIZE)])},
        **{str(rank): {"seed": rank} for rank in range(1, golden.WORLD_SIZE)},
    },
    "read": {str(rank): golden.bits("int32", (rank + 1,)) for rank in range(golden.WORLD_SIZE)},
}
_OWN = [golden.own_state(rank) for rank in range(12)]
_MANY = {
    "0": {"seed": 0},
    "1": {"seed": 1},
    "ranks": {"state": torch.stack([own["state"] for own in _OWN if "state" in own])},
    **{str(rank): {"seed": rank} for rank in range(2, 12)},
}
EXPECTED: dict[str, dict[str, Any]] = {
    "plain": {
        **{"tensors": golden.tensors(), "values": golden.values(), "nested": golden.nested()},
        **{"pickle": golden.pickled(), "order": golden.ordered()},
    },
    "part": golden.part(),
    "portable": golden.portable(),
    "subchunks": golden.large(),
    "chunks": {"w": golden.bits("float32", (9, 7)), "x": golden.bits("uint8", (100,))},
    "zstd": golden.compressible(),
    "blosc": golden.compressible(),
    "overwritten": golden.trained(2),
    "many_ranks": {"rng": _MANY, "w": golden.pattern(701, 1024) + 1},
    "shuffled": golden.ordered(),
    "ranks": _RANKS,
    "ranks_merged": _RANKS,
}
METADATA: dict[str, Any] = {"plain": golden.METADATA, "part": golden.METADATA, "overwritten": {"step": 2}}


def blank(value: Any) -> Any:
    """Return a target like a state, with empty tensors and other values."""
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


def flat(value: Any, keys: tuple[Any, ...] = ()) -> dict[str, Any]:
    """Return the leaves of a state by fqn. A list of only values is one leaf, like an empty dict."""
    nested = isinstance(value, Mapping) and value
    if isinstance(value, list) and any(isinstance(item, torch.Tensor | Mapping | list) for item in value):
        nested, value = True, dict(enumerate(value))
    if not nested:
        return {".".join(map(str, keys)): value}
    return {fqn: leaf for key, below in value.items() for fqn, leaf in flat(below, (*keys, key)).items()}


def description(name: str) -> dict[str, Any]:
    """Return the JSON file beside a golden checkpoint."""
    found: dict[str, Any] = json.loads((golden.GOLDEN / f"{name}.json").read_bytes())
    return found


def tensors_of(reader: Reader) -> dict[str, tuple[str, list[int], str]]:
    """Return the name of the dtype, the shape and the SHA-256 of each tensor."""
    found = {fqn: reader.tensor(fqn) for fqn in reader.entries if reader.is_tensor(fqn)}
    return {fqn: (dtype, shape, golden.sha256(data)) for fqn, (dtype, shape, data) in found.items()}


def test_a_golden_checkpoint_of_each_kind_exists() -> None:
    assert {file.stem for file in golden.GOLDEN.glob("*.zip")} == set(golden.CHECKPOINTS) == set(EXPECTED)
    assert {file.stem for file in golden.GOLDEN.glob("*.json")} == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_golden_checkpoints_open_load_and_verify(name: str, tmp_path: Path) -> None:
    folder, expected = unpacked(name, tmp_path), EXPECTED[name]
    ckpt = zarrckpt.open(folder, allow_pickle=True)
    assert (ckpt.verify(), ckpt.verify(quick=True)) and not ckpt.verify().damages
    assert same(ckpt.metadata, METADATA.get(name, {}))
    # The whole state as new objects: names, keys, containers, order.
    target: dict[str, Any] = dict.fromkeys(expected)
    zarrckpt.load(target, folder, allow_pickle=True)
    assert same(target, expected)
    # Into existing targets, and each entry separately. (A list that has closed its gaps has other positions.)
    target = {key: blank(value) for key, value in expected.items()}
    if name != "part":
        zarrckpt.load(target, folder, allow_pickle=True)
        assert same(target, expected)
    arrays = ckpt.read()
    reader = Reader(folder)
    assert arrays and list(reader.entries) == list(ckpt) and same(reader.metadata, ckpt.metadata)
    for fqn, array in arrays.items():
        assert (array.dtype.name, list(array.shape), array.tobytes()) == reader.tensor(fqn), fqn
        lazy = np.asarray(ckpt[fqn][...])  # portable ones as the integers that hold them
        assert (lazy.shape, lazy.tobytes()) == (array.shape, array.tobytes()), fqn


@pytest.mark.parametrize("name", EXPECTED)
def test_golden_checkpoints_contain_the_recorded_values(name: str, tmp_path: Path) -> None:
    folder, described = unpacked(name, tmp_path), description(name)
    assert golden.description(folder) == described  # the library finds the same
    reader = Reader(folder)
    tensors = tensors_of(reader)
    # A part of a list closes its gaps. Fqns keep the positions.
    expected = flat(EXPECTED[name]) if name != "part" else {}
    for fqn, recorded in described["entries"].items():
        keys = tuple(key for _, key in reader.keys(fqn))
        assert same(keys, zarrckpt.open(folder).entry(fqn).keys) and ".".join(map(str, keys)) == fqn
        assert [container for container, _ in reader.keys(fqn)] == recorded["containers"]
        assert reader.ranks(fqn) == recorded.get("ranks", [])
        if "dtype" in recorded:
            assert (recorded["dtype"], recorded["shape"], recorded["sha256"]) == tensors[fqn]
        if isinstance(value := expected.pop(fqn, None), torch.Tensor):
            dtype, shape, data = bits(value)
            assert (recorded["dtype"], recorded["shape"], recorded["sha256"]) == (dtype, [*shape], golden.sha256(data))
        elif value is not None and "sha256" not in recorded:
            assert same(reader.value(fqn), value)
    assert not expected


WRONG_ORDERS = {
    "chunks in Fortran order": (
        "for cell in itertools.product(*map(range, counts)):",
        "for cell in sorted(itertools.product(*map(range, counts)), key=lambda cell: cell[::-1]):",
    ),
    "subchunks from the last": ("data + decode(part)", "decode(part) + data"),
    "elements in Fortran order": (".reshape(chunk)", '.reshape(chunk, order="F")'),
    "arrays as the root has them": ("in sorted(self.arrays)", "in self.arrays"),
    "arrays from the last": ("in sorted(self.arrays)", "in sorted(self.arrays, reverse=True)"),
    "arrays by component": ("in sorted(self.arrays)", 'in sorted(self.arrays, key=lambda path: path.split("/"))'),
    "arrays by UTF-16": ("in sorted(self.arrays)", 'in sorted(self.arrays, key=lambda path: path.encode("utf-16-be"))'),
    "arrays by lower case": ("in sorted(self.arrays)", "in sorted(self.arrays, key=str.lower)"),
    "big-endian": ("np.frombuffer(data, out.dtype)", "np.frombuffer(data, out.dtype).byteswap()"),
}


def differs(folder: Path, old: str = "", new: str = "") -> bool:
    """Whether the page's reader, with a text replaced, finds other tensors than the recorded ones."""
    recorded = description(folder.name)["entries"].items()
    saved = {fqn: (one["dtype"], one["shape"], one["sha256"]) for fqn, one in recorded if "dtype" in one}
    try:
        return tensors_of(Reader(folder, old, new)) != saved
    except (AssertionError, OSError):
        return True


def test_a_reader_with_another_order_fails(tmp_path: Path) -> None:
    folders = [unpacked(name, tmp_path) for name in EXPECTED]
    assert not any(map(differs, folders))
    for wrong, texts in WRONG_ORDERS.items():
        assert any(differs(folder, *texts) for folder in folders), wrong


def test_roots_have_the_published_schema(tmp_path: Path) -> None:
    schema = json.loads(PAGE.with_name("zarrckpt.schema.json").read_bytes())
    validator: Any = jsonschema.Draft202012Validator(schema)
    validator.check_schema(schema)
    for name in EXPECTED:
        root = json.loads((unpacked(name, tmp_path) / "zarr.json").read_bytes())
        validator.validate(root)
        for member in ("save_id", "entries", "tables"):
            less = json.loads(json.dumps(root))
            del less["attributes"]["zarrckpt"][member]
            assert not validator.is_valid(less)


def test_pickles_load_only_on_request(tmp_path: Path) -> None:
    folder = unpacked("plain", tmp_path)
    with pytest.raises(UnsafeValueError, match=r"pickle\.day"):
        zarrckpt.open(folder)["pickle.day"]
    assert zarrckpt.open(folder, allow_pickle=True)["pickle.day"] == golden.pickled()["day"]


def _load_on_two_ranks(folders: list[str]) -> list[dict[str, Any]]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    shapes = {"rows": (golden.ROWS, torch.float32), "columns": (golden.COLUMNS, torch.bfloat16)}
    found = []
    for folder in folders:
        state: dict[str, Any] = {
            name: distribute_tensor(torch.zeros(shape, dtype=dtype), mesh, [Shard(0)])
            for name, (shape, dtype) in shapes.items()
        }
        state |= {"replica": torch.zeros(3, dtype=torch.int64), "step": 0}
        state |= {"rng": zarrckpt.PerRank(None), "read": zarrckpt.PerRank(None)}
        zarrckpt.load(state, folder)
        whole = {name: getattr(value, "full_tensor", lambda value=value: value)() for name, value in state.items()}
        found.append(whole | {"rng": state["rng"].value, "read": state["read"].value})
    return found


def test_a_save_of_four_ranks_loads_on_two(tmp_path: Path) -> None:
    folders = [str(unpacked(name, tmp_path)) for name in ("ranks", "ranks_merged")]
    for rank, answers in enumerate(run_ranks(_load_on_two_ranks, folders, world_size=2)):
        rng = {"seed": rank, "state": golden.bits("uint8", (6,), rank)}
        for loaded in answers:
            assert same(loaded, {**{k: _RANKS[k] for k in loaded}, "rng": rng, "read": _RANKS["read"][str(rank)]})


def edited(folder: Path, change: dict[str, Any]) -> Path:
    """Put another root document, with a valid checksum."""
    document = json.loads((folder / "zarr.json").read_bytes())
    document["attributes"]["zarrckpt"].update(change)
    return golden.seal(folder, document)


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
def test_newer_formats_are_refused_by_name(change: dict[str, Any], named: str, tmp_path: Path) -> None:
    folder = edited(unpacked("overwritten", tmp_path), change)
    before = {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    refused = pytest.raises(UnsupportedFormatError, match=f"{named}.*Upgrade zarrckpt")
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


def test_edited_roots_with_unknown_members_open(tmp_path: Path) -> None:
    assert zarrckpt.open(edited(unpacked("overwritten", tmp_path), {"later": "addition"})).verify()


def test_golden_checkpoints_are_never_rewritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
