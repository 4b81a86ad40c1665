"""To safetensors and from other libraries' files: bits, names, layout, with these libraries' own loaders."""

from __future__ import annotations

import json
import os
import resource
import shutil
import sys
import threading
import zipfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from harness.bits import bits
from harness.store_servers import S3Place
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import zarrckpt
from zarrckpt.cli import main

FLOATS = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
INTEGERS = ("int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64", "bool")


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return {name: bits(tensor) for name, tensor in one.items()} == {name: bits(other[name]) for name in other}


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    found = {f"a.{name}": torch.randn(7, 5).to(getattr(torch, name)) for name in FLOATS}
    found |= {f"b.{name}": torch.randint(0, 2, (3, 2, 3)).to(getattr(torch, name)) for name in INTEGERS}
    found |= {"c.empty": torch.zeros(0, 4), "c.scalar": torch.tensor(2.5), "c.nan": torch.tensor([float("nan"), -0.0])}
    return {**found, "c.large": torch.randn(900, 700)}


def test_every_dtype_round_trips_through_safetensors(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    zarrckpt.save(
        {"model": tensors, "step": 3}, tmp_path / "one", options=zarrckpt.SaveOptions(max_chunk_bytes=1 << 19)
    )
    report = zarrckpt.to_safetensors(tmp_path / "one", tmp_path / "out", "model", strip="model")
    assert report.files == ("model.safetensors",) and report.tensors == len(tensors)
    assert same(load_file(tmp_path / "out" / "model.safetensors"), tensors)
    zarrckpt.import_checkpoint(tmp_path / "out" / "model.safetensors", tmp_path / "two", prefix="model")
    assert same(zarrckpt.open(tmp_path / "two").load()["model"], tensors)
    assert zarrckpt.diff(tmp_path / "one", tmp_path / "two", "model")


def test_several_files_have_an_index_and_bounded_sizes(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    state = {f"{i}.w": torch.randn(100, 25) for i in range(9)} | {"head": torch.randn(100, 250)}
    zarrckpt.save(state, tmp_path / "one")
    seen: list[tuple[int, int]] = []
    ckpt = zarrckpt.open(tmp_path / "one")
    report = zarrckpt.to_safetensors(
        ckpt, tmp_path / "out", max_file_bytes=30_000, progress=lambda *done: seen.append(done)
    )
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == ckpt.nbytes == seen[-1][0] == seen[-1][1]
    found = {}
    for name in report.files[:-1]:
        with safe_open(tmp_path / "out" / name, framework="pt") as file:
            part = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - it is no mapping
        assert all(index["weight_map"][key] == name for key in part)
        assert len(part) == 1 or sum(tensor.nbytes for tensor in part.values()) <= 30_000
        found |= part
    assert same(found, state)
    zarrckpt.import_checkpoint(tmp_path / "out", tmp_path / "two", options=zarrckpt.SaveOptions(compression="zstd"))
    assert zarrckpt.diff(ckpt, zarrckpt.open(tmp_path / "two"))


@pytest.mark.parametrize(
    ("state", "strip"),
    [
        ({"w": torch.ones(1), "z": torch.ones(2, dtype=torch.complex128)}, ""),
        ({"w": torch.ones(1), "__metadata__": torch.ones(2)}, ""),
        ({"a": {"w": torch.ones(1), "__metadata__": torch.ones(2)}}, "a"),
        ({"a": {"w": torch.ones(1)}, "w": torch.ones(1)}, "a"),
    ],
)
def test_values_unsupported_by_safetensors_are_refused_before_a_write(
    tmp_path: Path, state: dict[str, Any], strip: str
) -> None:
    zarrckpt.save(state, tmp_path / "one")
    with pytest.raises(zarrckpt.UnsupportedValueError):
        zarrckpt.to_safetensors(tmp_path / "one", tmp_path / "out", strip=strip)
    assert not (tmp_path / "out").exists()


WAYS_OUT = {"to_safetensors": "x.safetensors", "to_torch_save": "x.pt", "to_dcp": "dcp"}


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_exports_and_imports_on_s3(
    tmp_path: Path, moto_bucket: S3Place, tensors: dict[str, torch.Tensor], compression: Any
) -> None:
    tensors = {name: tensors[name] for name in ("a.bfloat16", "c.empty", "c.scalar", "c.large")}
    options: dict[str, Any] = {"storage_options": moto_bucket.storage_options}
    zarrckpt.save(
        tensors,
        moto_bucket.url("one"),
        options=zarrckpt.SaveOptions(max_chunk_bytes=1 << 18, compression=compression),
        **options,
    )
    for method, name in WAYS_OUT.items():
        getattr(zarrckpt, method)(moto_bucket.url("one"), tmp_path / name, max_inflight_bytes=1 << 19, **options)
        zarrckpt.import_checkpoint(
            tmp_path / name, moto_bucket.url(name), options=zarrckpt.SaveOptions(compression=compression), **options
        )
        assert zarrckpt.diff(moto_bucket.url("one"), moto_bucket.url(name), **options)


def test_casts_to_safetensors_keep_counters(tmp_path: Path) -> None:
    torch.manual_seed(0)
    big = torch.randn(900, 70)
    state = {"w": big, "half": torch.randn(5).half(), "n": torch.arange(3), "step": torch.tensor(257.0)}
    zarrckpt.save(state | {"far": torch.tensor([1e30, 1.0])}, tmp_path / "one")
    ckpt = zarrckpt.open(tmp_path / "one")
    with pytest.warns(UserWarning, match="'far': 1 finite"):
        report = zarrckpt.to_safetensors(ckpt, tmp_path / "out", dtype="float16", max_inflight_bytes=60_000)
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(found["w"], big.half()) and torch.equal(found["half"], state["half"])
    assert found["step"].dtype is torch.float32 and found["n"].dtype is torch.int64 and report.uncast == ("step",)
    assert report.nbytes == sum(tensor.nbytes for tensor in found.values()) and report.overflowed == {"far": 1}
    cast = CliRunner().invoke(main, ["export", str(tmp_path / "one"), str(tmp_path / "x"), "--dtype", "w=bfloat16"])
    assert cast.exit_code == 0 and load_file(tmp_path / "x" / "model.safetensors")["w"].dtype is torch.bfloat16
    wrong = CliRunner().invoke(main, ["export", str(tmp_path / "one"), str(tmp_path / "x.pt"), "--dtype", "bfloat16"])
    assert wrong.exit_code == 2 and "zarrckpt cp --dtype" in wrong.stderr


def contents(target: Path) -> dict[str, bytes]:
    files = [target] if target.is_file() else [path for path in target.rglob("*") if path.is_file()]
    return {path.name: path.read_bytes() for path in files}


@pytest.mark.parametrize(("method", "name"), [*WAYS_OUT.items(), ("to_safetensors", "folder")])
def test_an_export_is_replaced_only_with_overwrite_and_whole(tmp_path: Path, method: str, name: str) -> None:
    """Damage in the last of several tensors leaves the old export, or none."""
    export, target = getattr(zarrckpt, method), tmp_path / name
    limits: dict[str, Any] = {"max_file_bytes": 1200} if name == "folder" else {}
    for place, factor in (("one", 1), ("two", 2), ("bad", 3)):
        zarrckpt.save({key: torch.ones(300) * factor for key in "uv"}, tmp_path / place)
    (tmp_path / "bad" / "v" / "c.0").write_bytes(b"x" * 1204)
    with pytest.raises(zarrckpt.CorruptCheckpointError):
        export(tmp_path / "bad", target, **limits)
    assert not target.exists() or not contents(target)
    export(tmp_path / "one", target, **limits)
    before = contents(target)
    with pytest.raises(zarrckpt.StorageError):
        export(tmp_path / "two", target, **limits)
    with pytest.raises(zarrckpt.CorruptCheckpointError):
        export(tmp_path / "bad", target, overwrite=True, **limits)
    assert contents(target) == before
    export(tmp_path / "two", target, overwrite=True, **limits)
    assert _import_sums(target) == {600.0}
    assert {path.name for path in tmp_path.iterdir()} == {"one", "two", "bad", name}


@pytest.mark.parametrize("method", WAYS_OUT)
def test_tied_weights_stay_equal_under_each_name(tmp_path: Path, method: str) -> None:
    model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(9, 4), "head": torch.nn.Linear(4, 9, bias=False)})
    model["head"].weight = model["embed"].weight
    zarrckpt.save({"model": model}, tmp_path / "one")
    getattr(zarrckpt, method)(tmp_path / "one", target := tmp_path / WAYS_OUT[method], strip="model")
    zarrckpt.import_checkpoint(target, tmp_path / "two")
    assert same(zarrckpt.open(tmp_path / "two").load(), dict(model.state_dict()))


def test_exports_name_targets_that_cannot_be_written(tmp_path: Path) -> None:
    zarrckpt.save({"w": torch.ones(300)}, tmp_path / "one")
    (tmp_path / "file").touch()
    for target in ("s3://bucket/x.pt", "/proc/none/x.pt", tmp_path / "file" / "y.pt"):
        with pytest.raises(zarrckpt.StorageError):
            zarrckpt.to_torch_save(tmp_path / "one", target)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))  # as on a full disk
    try:
        with pytest.raises(zarrckpt.StorageError):
            zarrckpt.to_torch_save(tmp_path / "one", tmp_path / "full.pt")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert {path.name for path in tmp_path.iterdir()} == {"one", "file"}


@pytest.mark.parametrize("method", WAYS_OUT)
def test_an_interrupted_export_leaves_no_file_and_can_be_repeated(tmp_path: Path, method: str) -> None:
    zarrckpt.save({"w": torch.randn(90, 100)}, tmp_path / "one", options=zarrckpt.SaveOptions(max_chunk_bytes=1 << 14))
    export, target = partial(getattr(zarrckpt, method), tmp_path / "one"), tmp_path / WAYS_OUT[method]

    def stop(done: int, total: int) -> None:
        assert total == 36_000 and not target.exists()
        if done > 9000:
            raise KeyboardInterrupt

    for overwrite in (False, True):
        with pytest.raises(KeyboardInterrupt):
            export(target, overwrite=overwrite, max_inflight_bytes=1 << 14, progress=stop)
        assert [path.name for path in tmp_path.iterdir()] == ["one"]
    export(target)
    zarrckpt.import_checkpoint(target, tmp_path / "two")
    assert zarrckpt.diff(tmp_path / "one", tmp_path / "two")
    assert {path.name for path in tmp_path.iterdir()} == {"one", "two", target.name}


@pytest.mark.parametrize("method", [*WAYS_OUT, "report"])
def test_exports_keep_files_beside_their_target(tmp_path: Path, method: str) -> None:
    """A user's own file of another name, and links that were planted to get a file elsewhere overwritten."""
    zarrckpt.save({"w": torch.ones(3)}, tmp_path / "one")
    export = partial(getattr(zarrckpt, method), tmp_path / "one")
    victim, name = tmp_path / "victim", WAYS_OUT.get(method, "page.html")
    victim.mkdir()
    for number, plant in enumerate((Path.write_text, Path.symlink_to)):
        target = tmp_path / f"{number}" / name
        target.parent.mkdir()
        plant(target.parent / f"{name}.part", str(victim / "file"))
        export(target)
        target.unlink() if target.is_file() else shutil.rmtree(target)
        assert [path.name for path in target.parent.iterdir()] == [f"{name}.part"]
        target.symlink_to(victim)
        with pytest.raises(zarrckpt.StorageError):
            export(target)
    assert (tmp_path / "0" / f"{name}.part").read_text() == str(victim / "file") and not [*victim.iterdir()]


@pytest.mark.parametrize(("method", "name"), [*WAYS_OUT.items(), ("to_safetensors", "folder")])
def test_one_of_two_exports_to_one_target_wins(tmp_path: Path, method: str, name: str) -> None:
    state = {f"{i}.w": torch.ones(1000) for i in range(3)}
    for number, factor in (("one", 1), ("two", 2)):
        zarrckpt.save({key: tensor * factor for key, tensor in state.items()}, tmp_path / number)
    limits: dict[str, Any] = {"max_file_bytes": 4000} if name == "folder" else {}
    one, two = (partial(getattr(zarrckpt, method), tmp_path / number) for number in ("one", "two"))

    def export_the_other(done: int, total: int) -> None:
        two(tmp_path / name, overwrite=True, **limits)

    one(tmp_path / name, overwrite=True, progress=export_the_other, **limits)
    assert _import_sums(tmp_path / name) == {1000.0}
    shutil.rmtree(tmp_path / name) if (tmp_path / name).is_dir() else (tmp_path / name).unlink()
    with pytest.raises(zarrckpt.StorageError, match="exists"):
        one(tmp_path / name, progress=export_the_other, **limits)
    assert _import_sums(tmp_path / name) == {2000.0}
    assert {path.name for path in tmp_path.iterdir()} == {"one", "two", name}


def _import_sums(target: Path) -> set[float]:
    zarrckpt.import_checkpoint(target, f"memory://{target}", overwrite=True)
    return {float(tensor.sum()) for tensor in zarrckpt.open(f"memory://{target}").load().values()}


def test_files_of_two_exports_do_not_mix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One export begins when the other one has renamed its first file."""
    for number in (1, 2):
        zarrckpt.save({f"{i}": torch.full((10,), float(number)) for i in range(3)}, tmp_path / f"{number}")
    one, two = (partial(zarrckpt.to_safetensors, tmp_path / f"{number}") for number in (1, 2))
    limits: dict[str, Any] = {"max_file_bytes": 40, "overwrite": True}
    other = threading.Thread(target=lambda: two(tmp_path / "out", **limits))
    replace = os.replace

    def replace_and_let_the_other_begin(old: str, new: str) -> None:
        replace(old, new)
        if other.ident is None and "00001-of" in new:
            other.start()
            other.join(0.5)

    monkeypatch.setattr(os, "replace", replace_and_let_the_other_begin)
    one(tmp_path / "out", **limits)
    other.join()
    found = [load_file(path) for path in (tmp_path / "out").glob("*.safetensors")]
    assert len(found) == 3 and len({float(tensor[0]) for part in found for tensor in part.values()}) == 1


def _export(tmp_path: Path, name: str, state: dict[str, Any], **options: Any) -> dict[str, bytes]:
    """Export a state to the folder ``out``. Return the contents of the folder."""
    zarrckpt.save(state, tmp_path / name)
    zarrckpt.to_safetensors(tmp_path / name, tmp_path / "out", **options)
    return {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}


def test_an_export_replaces_only_an_earlier_export(tmp_path: Path) -> None:
    many = _export(tmp_path, "one", {f"{i}.w": torch.randn(50) for i in range(3)}, max_file_bytes=200)
    assert len(many) == 4
    (tmp_path / "out" / "config.json").write_text("{}")
    save_file({"other": torch.ones(1)}, tmp_path / "out" / "adapter.safetensors")
    with pytest.raises(zarrckpt.StorageError):  # a loader would read the earlier index
        _export(tmp_path, "two", {"v": torch.ones(2)})
    found = _export(tmp_path, "three", {"v": torch.ones(2)}, overwrite=True)
    assert set(found) == {"model.safetensors", "config.json", "adapter.safetensors"}
    found = _export(tmp_path, "four", {"v": torch.ones(2), "w": torch.zeros(2)}, overwrite=True, max_file_bytes=9)
    assert "model.safetensors" not in found and len(found) == 5
    zarrckpt.import_checkpoint(tmp_path / "out", tmp_path / "back")
    assert set(zarrckpt.open(tmp_path / "back")) == {"v", "w"}


def test_an_export_to_a_file_name_writes_one_file(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    zarrckpt.save(
        {**tensors, "e8": torch.ones(3).to(torch.float8_e8m0fnu)},
        tmp_path / "one",
        options=zarrckpt.SaveOptions(max_chunk_bytes=1 << 17),
    )
    ckpt = zarrckpt.open(tmp_path / "one")
    limits: dict[str, Any] = {"max_file_bytes": 1, "max_inflight_bytes": 1 << 17}
    report = zarrckpt.to_safetensors(ckpt, tmp_path / "new" / "weights.safetensors", **limits)
    assert (report.folder, report.files) == (str(tmp_path / "new"), ("weights.safetensors",))
    assert same(load_file(tmp_path / "new" / "weights.safetensors"), ckpt.load())
    with pytest.raises(zarrckpt.StorageError):
        zarrckpt.to_safetensors(ckpt, tmp_path / "new" / "weights.safetensors")
    zarrckpt.to_safetensors(ckpt, tmp_path / "new" / "weights.safetensors", "c.nan", overwrite=True)
    assert list(load_file(tmp_path / "new" / "weights.safetensors")) == ["c.nan"]
    zarrckpt.save({"step": 1}, tmp_path / "two")
    with pytest.raises(zarrckpt.KeyMismatchError):
        zarrckpt.to_safetensors(tmp_path / "two", tmp_path / "none.safetensors")


def test_files_of_torch_save_are_imported(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    model[1].weight = model[0].weight
    optim = torch.optim.Adam(model.parameters())
    model(torch.ones(4)).sum().backward()
    optim.step()
    torch.save({"model": model.state_dict(), "optim": optim.state_dict(), "t": tensors, "step": 4}, tmp_path / "x.pt")
    zarrckpt.import_checkpoint(tmp_path / "x.pt", tmp_path / "one")
    found = zarrckpt.open(tmp_path / "one").load()
    assert same(found["t"], tensors) and found["step"] == 4
    assert same(found["model"], dict(model.state_dict()))
    moments = optim.state_dict()["state"][0]
    assert torch.equal(found["optim"]["state"][0]["exp_avg"], moments["exp_avg"])
    torch.save({"w": torch.ones(2), "code": Path("x")}, tmp_path / "y.pt")
    with pytest.raises(zarrckpt.UnsafeValueError):
        zarrckpt.import_checkpoint(tmp_path / "y.pt", tmp_path / "two")
    zarrckpt.import_checkpoint(tmp_path / "y.pt", tmp_path / "two", keys=("w",), allow_pickle=True)
    assert list(zarrckpt.open(tmp_path / "two")) == ["w"]


def _deflate(path: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)


def _doubled(levels: int) -> dict[str, Any]:
    value: dict[str, Any] = {"w": torch.ones(1)}
    for _ in range(levels):
        value = {"a": value, "b": value}
    return value


def _nested(levels: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(levels):
        value = {"a": value}
    return value


SPARSE = torch.sparse_coo_tensor(torch.tensor([[100]]), torch.ones(1), (3,), check_invariants=False)
"""An element outside of the shape: torch reads and writes out of bounds."""

INDEX = "model.safetensors.index.json"
BAD_FOLDERS: dict[str, dict[str, Any]] = {
    "empty": {},
    "index": {INDEX: {"weight_map": {"w": "gone.safetensors"}}},
    "escape": {INDEX: {"weight_map": {"w": "../outside.safetensors"}}},
    "nul": {INDEX: {"weight_map": {"w": "a\0.safetensors"}}},
    "number": {INDEX: {"weight_map": {"w": 3}}},
    "mixed types": {INDEX: {"weight_map": {"w": 3, "v": "a.safetensors"}}, "a.safetensors": ["w", "v"]},
    "list": {INDEX: {"weight_map": [1, 2]}},
    "text": {INDEX: "weights"},
    "deep": {INDEX: b"[" * 100_000},
    "encoding": {INDEX: b"\xff\xfe"},
    "folder as index": {INDEX: None},
    "lacks": {INDEX: {"weight_map": {"w": "a.safetensors", "v": "a.safetensors"}}, "a.safetensors": ["w"]},
    "twice": {"a.safetensors": ["w"], "b.safetensors": ["w"]},
    "diffusers": {
        "diffusion_pytorch_model.safetensors.index.json": {"weight_map": {"w": "a.safetensors", "v": "b.safetensors"}},
        "a.safetensors": ["w"],
    },
    "variant": {
        "model.safetensors.index.fp16.json": {"weight_map": {"w": "a.safetensors", "v": "b.safetensors"}},
        "a.safetensors": ["w"],
    },
    "first missing": {"model-00002-of-00003.safetensors": ["w"], "model-00003-of-00003.safetensors": ["v"]},
    "last missing": {"model-00001-of-00003.safetensors": ["w"], "model-00002-of-00003.safetensors": ["v"]},
    "far more missing": {"model-00001-of-99999999.safetensors": ["w"]},
    "numbered variant": {"model.fp16-00001-of-00002.safetensors": ["w"]},
    "adapter": {"model.safetensors": ["w"], "adapter_model.safetensors": ["w.lora_A"]},
    "adapter beside an index": {
        INDEX: {"weight_map": {"w": "a.safetensors"}},
        "a.safetensors": ["w"],
        "adapter_model.safetensors": ["w.lora_A"],
    },
}


def _make_folder(folder: Path, files: dict[str, Any]) -> None:
    folder.mkdir()
    for name, content in files.items():
        if content is None:
            (folder / name).mkdir()
        elif isinstance(content, bytes):
            (folder / name).write_bytes(content)
        elif name.endswith(".json"):
            (folder / name).write_text(json.dumps(content))
        else:
            save_file({key: torch.ones(3) for key in content}, folder / name)


@pytest.mark.parametrize("kind", BAD_FOLDERS)
def test_incomplete_folders_are_refused_before_a_save(tmp_path: Path, kind: str) -> None:
    save_file({"w": torch.ones(100)}, tmp_path / "outside.safetensors")
    _make_folder(tmp_path / "in", BAD_FOLDERS[kind])
    with pytest.raises(zarrckpt.CheckpointError) as caught:
        zarrckpt.import_checkpoint(tmp_path / "in", tmp_path / "one")
    assert isinstance(caught.value, zarrckpt.CorruptCheckpointError) or kind == "empty"
    assert str(tmp_path / "in") in str(caught.value) and not (tmp_path / "one").exists()


def test_complete_folders_of_all_kinds_are_imported(tmp_path: Path) -> None:
    index = {"weight_map": {"w": "m-00001-of-00002.safetensors", "v": "m-00002-of-00002.safetensors"}}
    files: dict[str, Any] = {name: [key] for key, name in index["weight_map"].items()}
    other = {"pytorch_model.bin.index.json": {"weight_map": {"w": "pytorch_model-00001-of-00001.bin"}}}
    complete: list[dict[str, Any]] = [
        *(files, {**files, INDEX: index}, {**files, "m.safetensors.index.fp16.json": index}, {**files, **other}),
        {**files, INDEX: index, "consolidated.safetensors": ["w", "v"]},
        {"m-00000-of-00002.safetensors": ["w"], "m-00001-of-00002.safetensors": ["v"]},
        {"adapter_model.safetensors": ["w", "v"]},
    ]
    for number, content in enumerate(complete):
        _make_folder(tmp_path / f"{number}", content)
        zarrckpt.import_checkpoint(tmp_path / f"{number}", tmp_path / "one", overwrite=True)
        assert {*zarrckpt.open(tmp_path / "one")} == {"w", "v"}


def _dcp_pieces(folder: Path, files: dict[str, int]) -> None:
    """Write one row of a tensor to each file, as ``HuggingFaceStorageWriter(save_distributed=True)``."""
    folder.mkdir()
    for name, row in files.items():
        info = json.dumps({"w": {"saved_offsets": [row, 0]}})
        save_file({"w": torch.full((1, 3), float(row))}, folder / name, {"DCP_SHARDING_INFO": info, "format": "pt"})


def test_files_of_one_rank_are_never_imported_as_whole_tensors(tmp_path: Path) -> None:
    shards = [f"shard-0000{number}-model-00001-of-00001.safetensors" for number in (1, 2)]
    _dcp_pieces(tmp_path / "all", {shards[0]: 0, shards[1]: 1})
    _dcp_pieces(tmp_path / "first", {shards[0]: 0})
    _dcp_pieces(tmp_path / "last", {shards[1]: 1})
    _dcp_pieces(tmp_path / "renamed", {"model.safetensors": 0})
    _dcp_pieces(tmp_path / "subset", {"shard-00001-model-00002-of-00005.safetensors": 0})
    _dcp_pieces(tmp_path / "mixed", {shards[0]: 0})
    save_file({"v": torch.ones(3)}, tmp_path / "mixed" / "model.safetensors")
    # Two ranks replaced each other's file, and the index has the size of both pieces.
    _dcp_pieces(tmp_path / "replaced", {"model-00001-of-00001.safetensors": 0})
    index = {"metadata": {"total_size": 24}, "weight_map": {"w": "model-00001-of-00001.safetensors"}}
    (tmp_path / "replaced" / INDEX).write_text(json.dumps(index))
    _make_folder(tmp_path / "rank", {"model_rank0.safetensors": ["w"]})
    _make_folder(tmp_path / "vllm", {"model-rank-1-part-0.safetensors": ["w"]})
    for folder in [*tmp_path.iterdir()]:
        for source in (folder, *folder.glob("*shard*"), *folder.glob("*rank*")):
            with pytest.raises(zarrckpt.UnsupportedLayoutError, match="pieces"):
                zarrckpt.import_checkpoint(source, tmp_path / "one")
    assert not (tmp_path / "one").exists()


def test_whole_tensors_of_dcps_safetensors_writer_are_imported(tmp_path: Path) -> None:
    state = {"w": torch.arange(6.0).reshape(2, 3), "v": torch.ones(2, dtype=torch.bfloat16)}
    writer = partial(dcp.HuggingFaceStorageWriter, fqn_to_index_mapping={"w": 1, "v": 2})
    dcp.save(state, storage_writer=writer(str(tmp_path / "whole")), no_dist=True)
    joined = writer(str(tmp_path / "joined"), save_distributed=True, enable_consolidation=True)
    dcp.save(state, storage_writer=joined, no_dist=True)
    for name in ("whole", "joined"):
        zarrckpt.import_checkpoint(tmp_path / name, tmp_path / "one", overwrite=True)
        assert same(zarrckpt.open(tmp_path / "one").load(), state)
    save_file(state, tmp_path / "lora_rank16.safetensors")
    zarrckpt.import_checkpoint(tmp_path / "lora_rank16.safetensors", tmp_path / "one", overwrite=True)


BAD_FILES: dict[str, Any] = {
    "list": [torch.ones(2)],
    "expanded": {"w": torch.zeros(1).expand(2**40)},
    "expanded in a list": {"w": [torch.zeros(1).expand(2**40)]},
    "deflated": {"w": torch.ones(10)},
    "doubled": _doubled(50),
    "nested": _nested(5000),
    "sparse": {"w": SPARSE},
    "sparse in a value": {"w": (SPARSE, 1)},
}


@pytest.mark.parametrize("kind", ["absent", "cut", *BAD_FILES])
def test_bad_files_are_refused_before_a_save(tmp_path: Path, kind: str) -> None:
    source = tmp_path / ("x.safetensors" if kind in ("absent", "cut") else "x.pt")
    if kind == "cut":
        save_file({"w": torch.ones(100)}, source)
        source.write_bytes(source.read_bytes()[:-9])
    elif kind != "absent":
        limit = sys.getrecursionlimit()
        sys.setrecursionlimit(100_000)  # to write it
        torch.save(BAD_FILES[kind], source)
        sys.setrecursionlimit(limit)
    if kind == "deflated":
        _deflate(source)
    with pytest.raises(zarrckpt.CheckpointError, match="x\\."):
        zarrckpt.import_checkpoint(source, tmp_path / "one")
    assert not (tmp_path / "one").exists()


def test_slightly_expanded_tensors_are_imported(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(1).expand(20), "v": torch.arange(12).expand(2, 12)}, tmp_path / "x.pt")
    zarrckpt.import_checkpoint(tmp_path / "x.pt", tmp_path / "one")
    found = zarrckpt.open(tmp_path / "one").load()
    assert torch.equal(found["w"], torch.ones(20)) and found["v"].sum() == 132


def test_the_terminal_chooses_a_format_by_the_name(tmp_path: Path) -> None:
    def run(*arguments: object, code: int = 0) -> str:
        done = CliRunner().invoke(main, list(map(str, arguments)), catch_exceptions=False)
        assert done.exit_code == code, done.output
        return done.output

    torch.manual_seed(0)
    state = {"model": {"w": torch.randn(4, 3), "b": torch.ones(3)}, "optim": {"m": torch.ones(2)}, "step": 5}
    zarrckpt.save(state, tmp_path / "one")
    for name in ("a.pt", "b.pth", "c.bin"):
        assert "3 tensors, 1 value" in run("export", tmp_path / "one", tmp_path / name)
        assert torch.load(tmp_path / name)["step"] == 5
    run("export", tmp_path / "one", tmp_path / "a.pt", code=3)
    run("export", tmp_path / "one", tmp_path / "a.pt", "--overwrite", "--exclude", "optim")
    assert list(torch.load(tmp_path / "a.pt")) == ["model", "step"]
    run("export", tmp_path / "one", tmp_path / "file", "model", "--strip", "model", "--format", "torch")
    assert same(torch.load(tmp_path / "file"), state["model"])  # type: ignore[arg-type]
    run("export", tmp_path / "one", tmp_path / "w.safetensors", "model")
    assert set(load_file(tmp_path / "w.safetensors")) == {"model.w", "model.b"}
    run("export", tmp_path / "one", tmp_path / "dcp", "--format", "dcp")
    assert (tmp_path / "dcp" / ".metadata").exists()
    for source in ("b.pth", "dcp"):
        run("import", tmp_path / source, tmp_path / f"{source}.back")
        run("diff", tmp_path / "one", tmp_path / f"{source}.back")
    (tmp_path / "empty").mkdir()
    run("import", tmp_path / "dcp", tmp_path / "dcp.back", code=3)
    run("import", tmp_path / "w.safetensors", tmp_path / "p", "--prefix", "a")
    assert set(zarrckpt.open(tmp_path / "p")) == {"a.model.w", "a.model.b"}
    found = run("export", tmp_path / "one", tmp_path / "out", "model", "--strip", "model", "--json")
    assert json.loads(found)["tensors"] == 2 and run("export", tmp_path / "one", tmp_path / "out", code=3)
    run("import", tmp_path / "empty", tmp_path / "two", code=3)
    run("export", tmp_path / "one", "s3://bucket/x.pt", code=3)
    run("export", tmp_path / "one", tmp_path / "x", "--format", "gguf", code=2)
