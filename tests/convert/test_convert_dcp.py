"""From and to folders of torch.distributed.checkpoint: written and read by its own classes, compared bit by bit."""

from __future__ import annotations

import os
import pickle
import tracemalloc
from collections import OrderedDict
from pathlib import Path, PurePath
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from harness.ranks import run_ranks
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import zarrckpt

DTYPES = (
    *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "complex64", "complex128"),
    *("int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64", "bool"),
)


def bits(value: Any) -> Any:
    """Return a comparison key: tensors as their bits, containers with their types and the order of their keys."""
    if isinstance(value, torch.Tensor):
        flat = value.detach().contiguous().reshape(-1)
        return value.dtype, tuple(value.shape), bytes(flat.view(torch.uint8).numpy())
    if isinstance(value, dict):
        return type(value), [(key, bits(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [bits(item) for item in value]
    return type(value), value


def _state() -> dict[str, Any]:
    torch.manual_seed(0)
    tensors: dict[str, Any] = {
        f"dtype.{name}": torch.randint(0, 2, (3, 2, 3)).to(getattr(torch, name)) for name in DTYPES
    }
    tensors |= {"empty": torch.zeros(0, 4), "scalar": torch.tensor(2.5), "nan": torch.tensor([float("nan"), -0.0])}
    return {
        "model": {**tensors, "large": torch.randn(300, 170), "strided": torch.randn(6, 8).t()},
        "optim": {"state": {"large": {"step": torch.tensor(3.0), "exp_avg": torch.randn(300, 170)}}},
        "list": [torch.ones(2), 3, {"x": torch.ones(1)}],
        "step": 12,
        "cfg": {"lr": 0.1, "betas": (0.9, 0.99), "name": "a.b"},
    }


def _dcp_save(state: dict[str, Any], folder: Path, **options: Any) -> None:
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder, **options), no_dist=True)


pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.mark.parametrize("options", [{}, {"thread_count": 2}, {"single_file_per_rank": False}])
def test_a_folder_of_dcp_is_imported(tmp_path: Path, options: dict[str, Any]) -> None:
    state = _state()
    _dcp_save(state, tmp_path / "dcp", **options)
    zarrckpt.import_checkpoint(tmp_path / "dcp", tmp_path / "one")
    ckpt = zarrckpt.open(tmp_path / "one")
    assert bits(dict(sorted(ckpt.load()["model"].items()))) == bits(dict(sorted(state["model"].items())))
    zarrckpt.save(state, tmp_path / "two")
    assert set(ckpt) == set(zarrckpt.open(tmp_path / "two")) and zarrckpt.diff(ckpt, zarrckpt.open(tmp_path / "two"))
    assert {fqn: ckpt.entry(fqn).keys for fqn in ckpt} == {
        fqn: zarrckpt.open(tmp_path / "two").entry(fqn).keys for fqn in ckpt
    }
    assert ckpt.verify()


def _sharded() -> dict[str, Any]:
    world = torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(1)
    return {
        "model": {
            "rows": distribute_tensor(torch.randn(37, 5), mesh["dp"], [Shard(0)]),
            "both": distribute_tensor(torch.randn(16, 12).bfloat16(), mesh, [Shard(0), Shard(1)]),
            "copies": distribute_tensor(torch.randn(4, 4), mesh, [Replicate(), Shard(1)]),
            "short": distribute_tensor(torch.randn(1, 9), mesh["dp"], [Shard(0)]),
        },
        "step": 7,
    }


def _full(state: dict[str, Any]) -> dict[str, Any]:
    return {name: tensor.full_tensor() for name, tensor in state["model"].items()}


def _save_sharded(folder: str) -> dict[str, Any]:
    state = _sharded()
    dcp.save(state, checkpoint_id=folder)
    return _full(state)


def _load_sharded(folder: str) -> tuple[dict[str, Any], int]:
    state = _sharded()
    for tensor in state["model"].values():
        assert isinstance(tensor, DTensor)
        tensor.to_local().zero_()
    state["step"] = 0
    dcp.load(state, checkpoint_id=folder)
    return _full(state), state["step"]


def test_shards_round_trip_through_dcp_on_another_mesh(tmp_path: Path) -> None:
    saved = run_ranks(_save_sharded, str(tmp_path / "dcp"), world_size=4)[0]
    assert len(list((tmp_path / "dcp").glob("*.distcp"))) > 1
    zarrckpt.import_checkpoint(tmp_path / "dcp", tmp_path / "one", options=zarrckpt.SaveOptions(compression="zstd"))
    ckpt = zarrckpt.open(tmp_path / "one")
    assert bits(dict(sorted(ckpt.load("model")["model"].items()))) == bits(dict(sorted(saved.items())))
    zarrckpt.to_dcp(ckpt, tmp_path / "back")
    for found, step in run_ranks(_load_sharded, str(tmp_path / "back"), world_size=2):
        assert bits(found) == bits(saved) and step == 7


def test_dcp_reads_exports(tmp_path: Path) -> None:
    state = {**_state(), "ordered": OrderedDict(w=torch.ones(2)), "int": {0: torch.ones(2)}, "none": {}}
    zarrckpt.save(state, tmp_path / "one", options=zarrckpt.SaveOptions(max_chunk_bytes=1 << 16))
    seen: list[tuple[int, int]] = []
    ckpt = zarrckpt.open(tmp_path / "one")
    report = zarrckpt.to_dcp(
        ckpt, tmp_path / "dcp", max_inflight_bytes=1 << 17, progress=lambda *done: seen.append(done)
    )
    files = sorted(path.name for path in (tmp_path / "dcp").iterdir())
    assert report.files == tuple(files) and len(files) > 4 and ".metadata" in files
    assert report.tensors == len(ckpt.tensors) and report.values == len(ckpt.non_tensors)
    assert seen[-1] == (report.nbytes, report.nbytes) == (ckpt.tensors.nbytes,) * 2
    assert all(path.stat().st_size < 1 << 17 for path in (tmp_path / "dcp").glob("*.distcp"))
    # Loaded into a state by DCP's own planner, and without one by its converter.
    target = {key: value for key, value in _state().items() if key != "list"}
    for tensor in target["model"].values():
        tensor.zero_()
    target |= {"step": 0, "cfg": {"lr": 0, "betas": None, "name": ""}}
    dcp.load(target, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert bits(target) == bits({key: state[key] for key in target})
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "x.pt")
    found = torch.load(tmp_path / "x.pt", weights_only=True)
    # DCP supports neither OrderedDict nor integer keys.
    expected = {**state, "ordered": {**state["ordered"]}, "int": {"0": torch.ones(2)}}
    assert {key: bits(value) for key, value in found.items()} == {key: bits(value) for key, value in expected.items()}


def test_exported_metadata_can_be_read_without_zarrckpt(tmp_path: Path) -> None:
    zarrckpt.save(_state(), tmp_path / "one")
    zarrckpt.to_dcp(tmp_path / "one", tmp_path / "dcp")
    assert b"zarrckpt" not in (tmp_path / "dcp" / ".metadata").read_bytes().replace(os.fsencode(tmp_path), b"")
    metadata = dcp.FileSystemReader(tmp_path / "dcp").read_metadata()
    assert metadata.storage_meta.checkpoint_id == str(tmp_path / "dcp")
    assert {type(path) for path in metadata.planner_data.values()} == {tuple}


def test_exports_and_imports_of_parts_with_prefixes(tmp_path: Path) -> None:
    _dcp_save(_state(), tmp_path / "dcp")
    zarrckpt.import_checkpoint(tmp_path / "dcp", tmp_path / "one", keys=("model.large", "list.2", "step"), prefix="a.b")
    ckpt = zarrckpt.open(tmp_path / "one")
    assert set(ckpt) == {"a.b.model.large", "a.b.list.2.x", "a.b.step"}
    assert ckpt.load()["a"]["b"]["step"] == 12
    zarrckpt.to_dcp(ckpt, tmp_path / "back", "a.b.model", strip="a.b")
    metadata = dcp.FileSystemReader(tmp_path / "back").read_metadata()
    assert metadata.planner_data == {"model.large": ("model", "large")}
    with pytest.raises(zarrckpt.KeyMismatchError):
        zarrckpt.import_checkpoint(tmp_path / "dcp", tmp_path / "two", keys=("nothing",))


def test_tensors_in_pieces_below_another_key(tmp_path: Path) -> None:
    weight = torch.randn(1000, 300)
    zarrckpt.save({"w": weight}, tmp_path / "one")
    zarrckpt.to_dcp(tmp_path / "one", tmp_path / "dcp", max_inflight_bytes=1 << 20)
    metadata = dcp.FileSystemReader(tmp_path / "dcp").read_metadata()
    assert len(metadata.state_dict_metadata["w"].chunks) > 2
    zarrckpt.import_checkpoint(tmp_path / "dcp", tmp_path / "two", prefix="model.part")
    assert torch.equal(torch.from_numpy(zarrckpt.open(tmp_path / "two")["model.part.w"][:]), weight)


def test_states_that_were_saved_flat_stay_flat(tmp_path: Path) -> None:
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    state = {"model.a": torch.ones(3), "nested": {"b": torch.ones(2)}}
    dcp.save(state, checkpoint_id=tmp_path / "dcp", planner=planner, no_dist=True)
    zarrckpt.import_checkpoint(tmp_path / "dcp", tmp_path / "one")
    found = zarrckpt.open(tmp_path / "one").load()
    assert bits(found["model.a"]) == bits(torch.ones(3)) and bits(found["nested"]) == bits({"b": torch.ones(2)})


class Code:
    """A class that weights_only does not allow."""

    def __eq__(self, other: object) -> bool:
        return type(other) is Code

    __hash__ = object.__hash__


def test_imports_run_code_only_if_allowed(tmp_path: Path) -> None:
    _dcp_save({"w": torch.ones(3), "code": Code()}, tmp_path / "dcp")
    with pytest.raises(zarrckpt.UnsafeValueError, match=r"'code' .*test_convert_dcp\.Code"):
        zarrckpt.import_checkpoint(tmp_path / "dcp", tmp_path / "one")
    assert not (tmp_path / "one").exists()
    zarrckpt.import_checkpoint(tmp_path / "dcp", tmp_path / "one", keys=("w",))
    with pytest.warns(UserWarning):
        zarrckpt.import_checkpoint(tmp_path / "dcp", tmp_path / "two", allow_pickle=True)
    with pytest.raises(zarrckpt.UnsafeValueError):
        zarrckpt.to_dcp(tmp_path / "two", tmp_path / "back")
    assert not (tmp_path / "back").exists()
    zarrckpt.to_dcp(zarrckpt.open(tmp_path / "two", allow_pickle=True), tmp_path / "back")
    target = {"code": None}
    dcp.load(target, checkpoint_id=tmp_path / "back", no_dist=True)
    assert target["code"] == Code()


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (os.environ["ZARRCKPT_TEST_EVIL"],)


def test_dcp_metadata_run_code_only_if_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZARRCKPT_TEST_EVIL", str(tmp_path / "ran"))
    _dcp_save({"w": torch.ones(3)}, tmp_path / "dcp")
    metadata = dcp.FileSystemReader(tmp_path / "dcp").read_metadata()
    metadata.storage_meta.modules = Evil()  # type: ignore[assignment]
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(zarrckpt.UnsafeValueError):
        zarrckpt.import_checkpoint(tmp_path / "dcp", tmp_path / "one")
    assert not (tmp_path / "ran").exists()
    zarrckpt.import_checkpoint(tmp_path / "dcp", tmp_path / "one", allow_pickle=True)
    assert (tmp_path / "ran").exists()


def _global(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


_NOTHING = b"N."
_PATH_CLASS = _global("pathlib", "PurePath")
_SIZE = _global("torch", "Size")
_NESTED_PAIRS = b")q\0" + b"".join(b"h%ch%c\x86q%c" % (i, i, i + 1) for i in range(40))
"""A tuple that holds one tuple twice, which holds another twice: 2 ** 40 of them to hash or to print."""
_METADATA = "torch.distributed.checkpoint.metadata"

BOMBS = {
    "a class gets an attribute": b"N}X\x0b\0\0\0__truediv__" + _PATH_CLASS + b"s\x86b.",
    "DCP's class gets an attribute": b"N}X\x08\0\0\0__init__Ns\x86b.",
    "a memo of gigabytes": b"Nr\xff\xff\xff\x0f" + _NOTHING,
    "a text of gigabytes": b"X\xff\xff\xff\x7fabc.",
    "nested pairs as a key": b"}" + _NESTED_PAIRS + b"Ns.",
    "nested pairs in a size": _SIZE + _NESTED_PAIRS + b"R.",
    "one tuple in many sizes": b"(" + b"K\1" * 900 + b"tq\0" + (_SIZE + b"h\0\x85R") * 9000 + b".",
    "nested lists": b"]" * 100_000 + b"a" * 99_999 + b".",
    "many objects": b"}" * 1_000_000 + b".",
    "a number of megabytes": b"\x8b\0\0\x10\0" + b"9" * (1 << 20) + b".",
    "metadata without fields": _global(_METADATA, "Metadata") + b")\x81.",
    "an index without fields": b"}" + _global(_METADATA, "MetadataIndex") + b")\x81Ns.",
    "an old protocol": pickle.dumps({"w": 1}, protocol=0),
    "cut": b"}q",
}


@pytest.mark.parametrize("kind", BOMBS)
def test_hostile_dcp_metadata_do_no_harm(tmp_path: Path, kind: str) -> None:
    (tmp_path / "dcp").mkdir()
    start = _PATH_CLASS if kind == "a class gets an attribute" else b""
    start = _global(_METADATA, "MetadataIndex") if kind.startswith("DCP") else start
    (tmp_path / "dcp" / ".metadata").write_bytes(b"\x80\x02" + start + BOMBS[kind])
    before = {cls: dict(vars(cls)) for cls in (PurePath, dcp.metadata.MetadataIndex)}
    tracemalloc.start()
    try:
        with pytest.raises(zarrckpt.CorruptCheckpointError, match="metadata"):
            zarrckpt.import_checkpoint(tmp_path / "dcp", tmp_path / "one")
        assert tracemalloc.get_traced_memory()[1] < 200 << 20
    finally:
        tracemalloc.stop()
    assert before == {cls: dict(vars(cls)) for cls in before}
    assert type(PurePath("a") / "b") is type(PurePath())


def _spoil(folder: Path, kind: str) -> None:
    metadata = dcp.FileSystemReader(folder).read_metadata()
    entry = metadata.state_dict_metadata["w"]
    index, info = next((index, info) for index, info in metadata.storage_data.items() if index.fqn == "w")
    file = folder / info.relative_path
    if kind == "cut":
        file.write_bytes(file.read_bytes()[:-30])
    elif kind == "gone":
        file.unlink()
    elif kind == "garbage":
        file.write_bytes(b"x" * file.stat().st_size)
    elif kind == "no metadata":
        (folder / ".metadata").unlink()
    elif kind == "bad metadata":
        (folder / ".metadata").write_bytes(b"\x80\x04nothing")
    elif kind == "outside":
        (folder.parent / "out.distcp").write_bytes(file.read_bytes())
        info.relative_path = "../out.distcp"
    elif kind == "not there":
        del metadata.storage_data[index]
    elif kind == "gap":
        del entry.chunks[-1]
    elif kind == "no boxes":
        entry.chunks.clear()
    elif kind == "overlap":
        entry.chunks.append(entry.chunks[0])
    elif kind == "transformed":
        info.transform_descriptors = ["stream.zstd/1"]
    elif kind == "no entry":
        metadata.state_dict_metadata["w"] = 3  # type: ignore[assignment]
    elif kind == "shape":
        entry.chunks[0].sizes = torch.Size([2, 3])
    elif kind == "dtype":
        entry.properties.dtype = torch.int32
    elif kind == "expanded":
        entry.size, entry.chunks = torch.Size([2**40]), [ChunkStorageMetadata(torch.Size([0]), torch.Size([2**40]))]
        torch.save(torch.zeros(1).expand(2**40), file)
        metadata.storage_data = {dcp.metadata.MetadataIndex("w", torch.Size([0])): info}
        info.offset, info.length = 0, file.stat().st_size
    elif kind == "sizes":
        entry.chunks[0].sizes = 3  # type: ignore[assignment]
    elif kind == "dimensions":
        entry.chunks[0].sizes = torch.Size([1])
    elif kind == "offset":
        info.offset = "0"
    elif kind == "path":
        metadata.planner_data["w"] = {"w": 1}
    elif kind == "name":
        info.relative_path = "a\0b"
    elif kind == "entry":
        metadata.state_dict_metadata[3] = entry  # type: ignore[index]
    if kind not in ("no metadata", "bad metadata"):
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))


KINDS = (
    *("cut", "gone", "garbage", "no metadata", "bad metadata", "outside", "not there", "gap", "no boxes", "overlap"),
    *("transformed", "no entry", "shape", "dtype", "expanded", "sizes", "dimensions", "offset", "path", "name"),
    "entry",
)


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_folders_are_refused_before_a_save(tmp_path: Path, kind: str) -> None:
    zarrckpt.save({"w": torch.randn(8, 4)}, tmp_path / "source", options=zarrckpt.SaveOptions(max_chunk_bytes=32))
    zarrckpt.to_dcp(tmp_path / "source", tmp_path / "dcp")
    assert len(dcp.FileSystemReader(tmp_path / "dcp").read_metadata().state_dict_metadata["w"].chunks) > 1
    _spoil(tmp_path / "dcp", kind)
    with pytest.raises(zarrckpt.CheckpointError):
        zarrckpt.import_checkpoint(tmp_path / "dcp", tmp_path / "one")
    with pytest.raises(zarrckpt.CheckpointNotFoundError):
        zarrckpt.open(tmp_path / "one")


def test_a_folder_with_other_files_is_not_replaced(tmp_path: Path) -> None:
    zarrckpt.save({"w": torch.ones(3)}, tmp_path / "one")
    (tmp_path / "dcp").mkdir()
    zarrckpt.to_dcp(tmp_path / "one", tmp_path / "dcp")
    (tmp_path / "dcp" / "notes.txt").write_text("mine")
    with pytest.raises(zarrckpt.StorageError):
        zarrckpt.to_dcp(tmp_path / "one", tmp_path / "dcp", overwrite=True)
    assert (tmp_path / "dcp" / "notes.txt").exists()
    assert {path.name for path in tmp_path.iterdir()} == {"one", "dcp"}


@pytest.mark.parametrize("error", [OSError(5, "input/output error"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("broken", [["aside"], ["in"], ["in", "back"]], ids="-".join)
def test_a_failed_rename_keeps_the_old_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: list[str], error: BaseException
) -> None:
    zarrckpt.save({"w": torch.ones(3)}, tmp_path / "one")
    target = tmp_path / "dcp"
    zarrckpt.to_dcp(tmp_path / "one", target)
    rename = os.rename

    def faulty(old: str, new: str) -> None:
        old, new = str(old), str(new)
        is_back = old.endswith(".replaced")
        is_in = new == str(target) and not is_back
        is_step = {"aside": new.endswith(".replaced"), "in": is_in, "back": is_back}
        if any(is_step[name] for name in broken):
            raise error
        rename(old, new)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", faulty)
        with pytest.raises((zarrckpt.CheckpointError, KeyboardInterrupt)):
            zarrckpt.to_dcp(tmp_path / "one", target, overwrite=True)
    if "back" in broken:
        (kept,) = (path for path in tmp_path.iterdir() if path.name.endswith(".replaced"))
        kept.rename(target)
    dcp.load(found := {"w": torch.zeros(3)}, checkpoint_id=target, no_dist=True)
    assert found["w"].sum() == 3
    assert {path.name for path in tmp_path.iterdir()} == {"one", "dcp"}
