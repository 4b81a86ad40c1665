"""Several processes write one archive: the same bytes as a folder, one winner, and no leftovers after failures."""

from __future__ import annotations

import os
import resource
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness.crashes import all_files, crashed
from harness.internals import open_store
from harness.merging import MergingOptions
from harness.ranks import RankError, all_ranks_raise, run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import zarrckpt
from zarrckpt._commit import attempts
from zarrckpt._store._zip_local import LocalPart

NAME = "x.zarr.zip"
SHAPES = {"rows": (10, 7), "cols": (6, 301), "moves": (64, 1100), "whole": (33,), "empty": (0, 3)}
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")


def _whole(name: str, value: int) -> torch.Tensor:
    return torch.arange(int(np.prod(SHAPES[name])), dtype=torch.float32).reshape(SHAPES[name]) * value


def _state(value: int, other: bool = False) -> dict[str, Any]:
    """Return a state of uneven shards, replicated tensors and blobs on all ranks; with ``other``, sharded otherwise."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    ways = {"rows": Shard(0), "cols": Shard(1), "moves": Shard(0), "whole": Replicate(), "empty": Shard(1)}
    torch.manual_seed(value)
    model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Linear(5, 3))
    fully_shard(model, mesh=mesh)
    tensors: dict[str, Any] = {}
    for name, way in ways.items():
        way = Shard(1 - way.dim) if other and isinstance(way, Shard) else way
        tensors[name] = distribute_tensor(_whole(name, value), mesh, [way], src_data_rank=None)
    blobs = {f"blob{number}": bytes([value, number]) * (number * 700) for number in range(5)}
    own = zarrckpt.PerRank({"rng": bytes([dist.get_rank()]) * 99, "t": torch.full((3,), float(dist.get_rank()))})
    return {**tensors, **blobs, "model": model.state_dict(), "own": own, "step": value}


def _load(url: str, value: int) -> None:
    target = _state(0, other=True)
    zarrckpt.load(target, url)
    for name in SHAPES:
        assert torch.equal(target[name].full_tensor(), _whole(name, value)), name
    expected = _state(value)
    for name, tensor in expected["model"].items():
        assert torch.equal(target["model"][name].full_tensor(), tensor.full_tensor()), name
    assert target["blob4"] == expected["blob4"] and target["step"] == value


def _save_all(folder: str, options: zarrckpt.SaveOptions) -> int:
    """Save in all ways and load each checkpoint. Return the number of open files that were left."""
    zarrckpt.save(_state(2), f"{folder}/folder", options=options)
    zarrckpt.save(_state(1), f"{folder}/{NAME}", options=options)
    zarrckpt.save(_state(2), f"{folder}/{NAME}", options=options, overwrite=True)
    zarrckpt.async_save(_state(2), f"{folder}/async.zarr.zip", options=options).result()
    state = {name: value for name, value in _state(2).items() if name != "own"}
    writer = zarrckpt.ZarrStorageWriter(f"{folder}/dcp.zarr.zip", options=options, overwrite=True)
    for _ in range(2):
        dcp.save(state, storage_writer=writer, planner=zarrckpt.ZarrSavePlanner())
    for name in (NAME, "async.zarr.zip"):
        _load(f"{folder}/{name}", 2)
    return sum("zarr.zip" in _target(name) for name in os.listdir("/proc/self/fd"))


def _target(descriptor: str) -> str:
    with suppress(OSError):
        return os.readlink(f"/proc/self/fd/{descriptor}")
    return ""


def _objects(url: Path) -> dict[str, bytes]:
    store = open_store(str(url))
    keys = [info.key for info in store.list()]
    return {key: store.get(key) for key in keys if not key.startswith("@") and key != "zarr.json"}


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (2, MergingOptions(min_piece_bytes=1 << 30, fill_bytes=1 << 16, max_chunk_bytes=1 << 16)),
        (4, MergingOptions(min_piece_bytes=0)),
        (4, zarrckpt.SaveOptions(compression="zstd", durable=False)),
    ],
)
def test_ranks_write_the_same_bytes_as_in_a_folder(ranks: int, options: zarrckpt.SaveOptions, tmp_path: Path) -> None:
    """With pieces that move between ranks, with separate chunks, and with chunks of unknown sizes."""
    assert run_ranks(_save_all, str(tmp_path), options, world_size=ranks) == [0] * ranks
    names = {NAME, "async.zarr.zip", "dcp.zarr.zip"}
    assert {name for name in os.listdir(tmp_path) if name != "folder"} == names
    expected = _objects(tmp_path / "folder")
    for name in names:
        checkpoint = zarrckpt.open(tmp_path / name)
        assert checkpoint.verify().damages == () and checkpoint["step"] == 2
        if name != "dcp.zarr.zip":
            assert _objects(tmp_path / name) == expected
        assert checkpoint["blob3"] == zarrckpt.open(tmp_path / "folder")["blob3"]


def _fail(url: str, failing: int, way: str, options: zarrckpt.SaveOptions | None) -> None:
    """Save, but one rank's files are limited to 4 KiB, or its process dies after its last byte."""
    limits, end = resource.getrlimit(resource.RLIMIT_FSIZE), LocalPart.end
    state = _state(3)
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == failing:
            if way == "limit":
                resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 12, limits[1]))
            elif way == "dies":
                patch.setattr(LocalPart, "end", lambda part: (end(part), os._exit(1)))
            else:
                patch.setattr(attempts, "commit", lambda *_: os._exit(1))
        try:
            zarrckpt.save(state, url, overwrite=True, options=options)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def _save(url: str, value: int) -> None:
    zarrckpt.save(_state(value), url, overwrite=True)


@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_fails_leaves_the_old_archive(failing: int, compression: str | None, tmp_path: Path) -> None:
    url, options = str(tmp_path / NAME), zarrckpt.SaveOptions(compression=compression)
    for kept in (set(), {NAME}):
        all_ranks_raise(zarrckpt.StorageError, _fail, url, failing, "limit", options, world_size=2)
        assert all_files(tmp_path) == (kept, set())
        if not kept:
            run_ranks(_save, url, 1, world_size=2)
    assert zarrckpt.open(url)["step"] == 1 and zarrckpt.open(url).verify()


@pytest.mark.parametrize(("way", "failing"), [("dies", 1), ("dies", 0), ("commit", 0)])
def test_a_rank_that_dies_leaves_the_old_archive(way: str, failing: int, tmp_path: Path) -> None:
    url = str(tmp_path / NAME)
    run_ranks(_save, url, 1, world_size=2)
    with pytest.raises(RankError, match="the process died"):
        run_ranks(_fail, url, failing, way, None, world_size=2)
    assert zarrckpt.open(url)["step"] == 1 and zarrckpt.open(url).verify()
    left = all_files(tmp_path)[0]
    assert zarrckpt.recover(url).objects == 0 and all_files(tmp_path)[0] == left
    if failing:
        run_ranks(_save, url, 4, world_size=2)
        assert zarrckpt.open(url)["step"] == 4
    else:
        assert len(zarrckpt.recover(url, stopped=True).removed) == 1
    assert all_files(tmp_path) == ({NAME}, set()) and zarrckpt.open(url).verify()


def _race(folder: str, number: int, overwrite: bool) -> tuple[str, int]:
    value = int(os.environ["RANK"])
    state = {f"w{value}-{i}": torch.full((4, 1000), float(value)) for i in range(6)} | {"blob": bytes([value]) * 9999}

    def save() -> None:
        report = zarrckpt.save(state, f"{folder}/{number}.zarr.zip", overwrite=overwrite)
        saved.append(report.save_id)

    saved: list[str] = []
    error = crashed(save)
    assert saved or isinstance(error, zarrckpt.CheckpointExistsError), error
    return "".join(saved), value


def _races(folder: str, overwrite: bool) -> list[tuple[str, int]]:
    return [_race(folder, number, overwrite) for number in range(12)]


@pytest.mark.parametrize("overwrite", [False, True])
def test_of_racing_processes_one_creates_the_archive(overwrite: bool, tmp_path: Path) -> None:
    """With ``overwrite``, several may win one after the other."""
    if overwrite:
        for number in range(12):
            zarrckpt.save({"w": torch.ones(3)}, tmp_path / f"{number}.zarr.zip")
    answers = run_ranks(_races, str(tmp_path), overwrite, world_size=4, group=False)
    for number in range(12):
        checkpoint = zarrckpt.open(tmp_path / f"{number}.zarr.zip")
        winners = {saved: value for saved, value in (answer[number] for answer in answers) if saved}
        value = winners[checkpoint.save_id]
        assert checkpoint.verify() and checkpoint["blob"] == bytes([value]) * 9999
        assert len(winners) == 1 or overwrite
    files, empty = all_files(tmp_path)
    assert files == {f"{number}.zarr.zip" for number in range(12)}, files
    assert not empty
