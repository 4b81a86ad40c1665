"""From and to files of torch.save: bits, nesting, and torch's own loader."""

from __future__ import annotations

import argparse
import enum
import os
from collections import OrderedDict, defaultdict, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_convert_dcp import Code, bits

import zarrckpt

DTYPES = (
    *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2"),
    *("float8_e5m2fnuz", "float8_e8m0fnu", "complex64", "complex128"),
    *("int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64", "bool"),
)


def _state() -> dict[str, Any]:
    torch.manual_seed(0)
    tensors = {f"dtype.{name}": torch.randint(0, 2, (3, 2, 3)).to(getattr(torch, name)) for name in DTYPES}
    tensors |= {"empty": torch.zeros(0, 4), "scalar": torch.tensor(2.5), "nan": torch.tensor([float("nan"), -0.0])}
    return {
        "model": OrderedDict(tensors, large=torch.randn(300, 170), cube=torch.randn(7, 60, 50)),
        "optim": {"state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.randn(300, 170)}}, "param_groups": [{}]},
        "list": [torch.ones(2), 3, {"x": torch.ones(1)}],
        # A value that contains tensors. Two of them share memory.
        "rng": (torch.arange(9), [torch.ones(3), None]),
        "step": 12,
        "text": "a.b",
        "raw": b"bytes",
        "nothing": {},
    }


def test_every_value_round_trips_through_torch_save(tmp_path: Path) -> None:
    state = _state()
    shared = state["rng"][0]
    state["rng"] = (shared, shared[3:5], *state["rng"][1:])
    zarrckpt.save(state, tmp_path / "one", options=zarrckpt.SaveOptions(max_chunk_bytes=1 << 15))
    ckpt = zarrckpt.open(tmp_path / "one")
    seen: list[tuple[int, int]] = []
    limits: dict[str, Any] = {"max_inflight_bytes": 1 << 15, "progress": lambda *done: seen.append(done)}
    report = zarrckpt.to_torch_save(ckpt, tmp_path / "out" / "x.pt", **limits)
    assert (report.folder, report.files) == (str(tmp_path / "out"), ("x.pt",))
    assert seen[-1] == (report.nbytes, report.nbytes) and len(seen) > len(ckpt.tensors)
    assert (report.tensors, report.values) == (len(ckpt.tensors), len(ckpt.non_tensors))
    path = tmp_path / "out" / "x.pt"
    for options in ({}, {"mmap": True}, {"weights_only": False}):
        assert bits(torch.load(path, **options)) == bits(state)
    zarrckpt.import_checkpoint(path, tmp_path / "two")
    assert bits(zarrckpt.open(tmp_path / "two").load()) == bits(state)
    assert zarrckpt.diff(ckpt, zarrckpt.open(tmp_path / "two"))
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["x.pt"]


def test_exports_of_parts_strip_prefixes(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2))
    zarrckpt.save({"model": model, "step": 3, "list": [torch.ones(1), torch.zeros(1)]}, tmp_path / "one")
    ckpt = zarrckpt.open(tmp_path / "one")
    zarrckpt.to_torch_save(ckpt, tmp_path / "model.pt", "model", strip="model")
    assert bits(dict(torch.load(tmp_path / "model.pt"))) == bits(dict(model.state_dict()))
    zarrckpt.to_torch_save(ckpt, tmp_path / "layer.pt", "model.1", "step", strip="model.1")
    assert list(torch.load(tmp_path / "layer.pt")) == ["weight", "bias", "step"]
    zarrckpt.to_torch_save(ckpt, tmp_path / "list.pt", "list", strip="list")
    assert bits(torch.load(tmp_path / "list.pt")) == bits({0: torch.ones(1), 1: torch.zeros(1)})
    zarrckpt.save({"a": {"w": torch.ones(1)}, "w": {"x": torch.ones(1)}}, tmp_path / "two")
    for strip in ("a", "w"):
        ckpt = zarrckpt.open(tmp_path / "two")
        assert strip == "w" or list(zarrckpt.to_torch_save(ckpt.select("a"), tmp_path / "a.pt", strip="a").files) == [
            "a.pt"
        ]
    with pytest.raises(zarrckpt.UnsupportedValueError):
        zarrckpt.to_torch_save(ckpt, tmp_path / "b.pt", strip="a")
    assert not (tmp_path / "b.pt").exists()


def test_values_that_need_code_need_allow_pickle(tmp_path: Path) -> None:
    with pytest.warns(UserWarning):
        zarrckpt.save({"w": torch.ones(3), "code": Code(), "array": np.arange(3)}, tmp_path / "one")
    ckpt = zarrckpt.open(tmp_path / "one")
    with pytest.raises(zarrckpt.UnsafeValueError):
        zarrckpt.to_torch_save(ckpt, tmp_path / "x.pt")
    assert not list(tmp_path.glob("x.pt*"))
    ckpt = zarrckpt.open(tmp_path / "one", allow_pickle=True)
    zarrckpt.to_torch_save(ckpt, tmp_path / "x.pt")
    found = torch.load(tmp_path / "x.pt", weights_only=False)
    assert found["code"] == Code() and found["array"].tolist() == [0, 1, 2] and found["w"].sum() == 3


def test_patterns_of_an_import_mean_nested_names(tmp_path: Path) -> None:
    torch.save(_state(), tmp_path / "x.pt")
    keys = ("model.dtype.int8", "list.2", "*.exp_avg")
    zarrckpt.import_checkpoint(tmp_path / "x.pt", tmp_path / "one", keys=keys)
    found = zarrckpt.open(tmp_path / "one")
    assert set(found) == {"model.dtype.int8", "list.2.x", "optim.state.0.exp_avg"}
    assert list(found.load()["optim"]["state"]) == [0]


class Config(dict[str, Any]):
    pass


class Level(enum.Enum):
    LOW = 1


class RunsCode:
    """An object whose pickle calls a function when it is loaded."""

    def __reduce__(self) -> tuple[Any, ...]:
        return note_call, (1,), {"x": 1}


calls: list[object] = []


def note_call(value: object) -> None:
    calls.append(value)


REFUSED: dict[str, tuple[Any, str]] = {
    "namespace": (argparse.Namespace(lr=0.1), "argparse.Namespace"),
    "path": ([1, Path("x")], "pathlib.PosixPath"),
    "array": ((1, {"a": np.arange(3)}), "_reconstruct"),
    "enum as key": ({Level.LOW: torch.ones(2)}, "Level"),
    "dict": (Config(a=torch.ones(2)), "Config"),
    "defaultdict": (defaultdict(dict, a={"x": torch.ones(2)}), "collections.defaultdict"),
    "deque": (deque([torch.ones(2), torch.ones(1)]), "collections.deque"),
    "module": (torch.nn.Linear(2, 2), "Linear"),
    "class": (Level, "Level"),
    "code": (RunsCode(), "note_call"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_keys_leave_out_values_that_torch_refuses(tmp_path: Path, kind: str) -> None:
    value, name = REFUSED[kind]
    state = {"model": {"w": torch.arange(3)}, "args": {"v": value, "step": 4}, "other": Path("y")}
    torch.save(state, tmp_path / "x.pt")
    zarrckpt.import_checkpoint(tmp_path / "x.pt", tmp_path / "one", keys=("model", "args.step"))
    assert bits(zarrckpt.open(tmp_path / "one").load()) == bits({"model": state["model"], "args": {"step": 4}})
    for keys in ((), ("args",), ("*.v*",)):
        with pytest.raises(zarrckpt.UnsafeValueError, match=rf"'args\.v' .*{name}.*'other' \(pathlib") as caught:
            zarrckpt.import_checkpoint(tmp_path / "x.pt", tmp_path / "two", keys=keys)
        assert "keys=" in str(caught.value) and "add_safe_globals" in str(caught.value)
    assert not (tmp_path / "two").exists() and not calls


def test_types_that_torch_allows_are_imported(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2), "args": argparse.Namespace(lr=0.1), "other": Level.LOW}, tmp_path / "x.pt")
    allowed = torch.serialization.get_safe_globals()
    with torch.serialization.safe_globals([argparse.Namespace]):
        with pytest.raises(zarrckpt.UnsafeValueError, match="'other'"):
            zarrckpt.import_checkpoint(tmp_path / "x.pt", tmp_path / "one")
        zarrckpt.import_checkpoint(tmp_path / "x.pt", tmp_path / "one", keys=("w", "args"))
        assert zarrckpt.open(tmp_path / "one")["args"] == argparse.Namespace(lr=0.1)
    assert {*torch.serialization.get_safe_globals()} == {*allowed}


def test_files_that_load_only_as_a_whole_name_their_types(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2), "evil": os.getcwd}, tmp_path / "blocked.pt")  # torch blocks the module posix
    torch.save(argparse.Namespace(lr=0.1), tmp_path / "object.pt")
    old = {"w": torch.ones(2), "args": argparse.Namespace(lr=0.1)}
    torch.save(old, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    for name, found in (("blocked", "posix.getcwd"), ("object", "argparse.Namespace"), ("old", "more than tensors")):
        with pytest.raises(zarrckpt.UnsafeValueError, match=found):
            zarrckpt.import_checkpoint(tmp_path / f"{name}.pt", tmp_path / "one", keys=("w",))


def test_old_and_foreign_files_are_refused(tmp_path: Path) -> None:
    torch.save({"w": torch.arange(4)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    zarrckpt.import_checkpoint(tmp_path / "old.pt", tmp_path / "one")
    assert zarrckpt.open(tmp_path / "one")["w"][:].tolist() == [0, 1, 2, 3]
    for data in (b"", b"some text", (tmp_path / "one" / "zarr.json").read_bytes()):
        (tmp_path / "bad.pt").write_bytes(data)
        with pytest.raises(zarrckpt.CorruptCheckpointError):
            zarrckpt.import_checkpoint(tmp_path / "bad.pt", tmp_path / "two")
    torch.save({"w": torch.arange(400)}, tmp_path / "new.pt")
    (tmp_path / "bad.pt").write_bytes((tmp_path / "new.pt").read_bytes()[:-100])
    with pytest.raises(zarrckpt.CorruptCheckpointError):
        zarrckpt.import_checkpoint(tmp_path / "bad.pt", tmp_path / "two")
