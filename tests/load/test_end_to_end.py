"""Whole trainings: stopped after two steps, saved, loaded into a fresh one, and continued without a difference."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness.models import CachingStager, same
from harness.ranks import run_ranks
from harness.store_servers import S3Place
from harness.trainings import KINDS, TWO_DIMENSIONS, Dice, Training, compiler, make
from torch.distributed.checkpoint import _async_process_executor
from torch.distributed.checkpoint.staging import BlockingAsyncStager, DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import _patch_model_state_dict, _patch_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import zarrckpt
from zarrckpt import ZarrSavePlanner, ZarrStorageReader, ZarrStorageWriter
from zarrckpt._ranks import mesh as meshes

# -- ways to save and to load


def _save(training: Training, url: str) -> None:
    zarrckpt.save(training.objects, url)


def _load(training: Training, url: str) -> None:
    report = zarrckpt.load(training.objects, url)
    assert report.missing == report.unexpected == ()


def _dcp_save(training: Training, url: str) -> None:
    dcp.save(training.dicts, storage_writer=ZarrStorageWriter(url))


def _dcp_load(training: Training, url: str) -> None:
    state = training.dicts
    dcp.load(state, storage_reader=ZarrStorageReader(url))
    training.take(state)


def _patched_save(training: Training, url: str) -> None:
    """Save modules and optimizers whose own methods are patched to return the result of ``get_state_dict``."""
    _patch(training)
    dcp.save(training.objects, checkpoint_id=url, storage_writer=ZarrStorageWriter())


def _patched_load(training: Training, url: str) -> None:
    _patch(training)
    dcp.load(training.objects, checkpoint_id=url, storage_reader=ZarrStorageReader())


def _patch(training: Training) -> None:
    _patch_model_state_dict(training.model)
    _patch_optimizer_state_dict(training.model, optimizers=training.optim)


WAYS = {
    "zarrckpt": (_save, _load),
    "dcp": (_dcp_save, _dcp_load),
    "patched": (_patched_save, _patched_load),
}


# -- every kind of model, every way


def _interrupt(kind: str, place: str, names: Sequence[str] = ("zarrckpt", "dcp")) -> list[float]:
    """Save in these ways, continue, and let a fresh training continue from each. Return the losses."""
    ways = {name: WAYS[name] for name in names}
    losses = make(kind).train(4)
    training = make(kind)
    training.train(2)
    saved = training.snapshot()
    for way, (save, _) in ways.items():
        save(training, f"{place}/{way}")
    future = zarrckpt.async_save(training.objects, f"{place}/async")
    assert training.train(2) == losses
    future.result(timeout=60)
    for way, (_, load) in {**ways, "async": WAYS["zarrckpt"]}.items():
        fresh = make(kind, seed=7, lr=0.5)
        load(fresh, f"{place}/{way}")
        assert way != "async" or same(saved, fresh.snapshot()) == []
        assert torch.equal(fresh.dice.faces, training.dice.faces), way
        assert fresh.train(2) == losses, way
    return losses


@pytest.mark.parametrize("kind", KINDS)
def test_a_fresh_training_goes_on_with_the_same_losses(kind: str, tmp_path: Path) -> None:
    ranks = 4 if kind in TWO_DIMENSIONS else 2
    # torch's own set_optimizer_state_dict gives ranks of FSDP1 over TP each other's state.
    names = ("zarrckpt",) if kind == "fsdp1_tp" else ("zarrckpt", "dcp")
    for losses in run_ranks(_interrupt, kind, str(tmp_path), names, world_size=ranks):
        assert losses == pytest.approx(make("plain").train(4), rel=1e-9)


def _interrupt_compiled(kind: str, place: str) -> list[float]:
    """Do the same in every way for a compiled model. Its state dict shows no sign of that."""
    with compiler() as backend:
        training = make(kind, backend=backend)
        training.train(2)
        assert backend.graphs > 0
        for way, (save, _) in WAYS.items():
            save(training, f"{place}/{way}")
        losses = training.train(2)
        for way, compiled in {"zarrckpt": True, "patched": True, "dcp": False}.items():
            fresh = make(kind, seed=7, lr=0.5, backend=backend if compiled else None)
            WAYS[way][1](fresh, f"{place}/{way}")
            assert fresh.train(2) == losses, way
    return losses


@pytest.mark.parametrize(("kind", "ranks"), [("plain", 1), ("fsdp1", 2), ("fsdp2_tp", 2)])
def test_a_compiled_training_goes_on(kind: str, ranks: int, tmp_path: Path) -> None:
    for losses in run_ranks(_interrupt_compiled, kind, str(tmp_path), world_size=ranks):
        assert losses == pytest.approx(make("plain").train(4), rel=1e-9)
    for way in WAYS:
        assert not [name for name in zarrckpt.open(tmp_path / way) if "_orig_mod" in name]


# -- DCP's asynchronous saves


def _stagers(by: AsyncCheckpointerType) -> dict[str, Callable[[], Any]]:
    shared = by == AsyncCheckpointerType.PROCESS

    def default(in_thread: bool) -> DefaultStager:
        return DefaultStager(StagingOptions(False, shared, in_thread, False))

    stagers: dict[str, Callable[[], Any]] = {
        "buffers kept, in a thread": lambda: default(True),
        "nothing kept": BlockingAsyncStager,
        "staging area kept": CachingStager,
    }
    if by == AsyncCheckpointerType.THREAD:
        stagers |= {"DCP's own choice": lambda: None, "buffers kept": lambda: default(False)}
    return stagers


def _async_saves(places: dict[str, str], by: AsyncCheckpointerType) -> None:
    """Save twice with each stager while the training continues. Fresh trainings then continue from both."""
    # In a thread, use a separate group: collectives of both on one group would mix, and hang.
    group = dist.new_group(backend="gloo") if by == AsyncCheckpointerType.THREAD else None
    for kind, place in places.items():
        losses = make(kind).train(5)
        for name, make_stager in _stagers(by).items():
            stager, training, urls = make_stager(), make(kind), []
            training.train(1)
            for turn in range(2):
                training.train(1)
                urls.append(f"{place}/{name}/{turn}")
                _save_beside_training(training, urls[-1], stager, by, group)
            if stager is not None:
                stager.close()
            for url, load in zip(urls, (_load, _dcp_load), strict=True):
                fresh = make(kind, seed=7, lr=0.5)
                load(fresh, url)
                assert fresh.train(5 - fresh.record.step) == losses, (kind, url)
    _async_process_executor._CHECKPOINT_PROCESS = None  # ends the daemon


def _save_beside_training(
    training: Training, url: str, stager: Any, by: AsyncCheckpointerType, group: dist.ProcessGroup | None
) -> None:
    answer = dcp.async_save(
        training.dicts,
        storage_writer=ZarrStorageWriter(url),
        async_stager=stager,
        async_checkpointer_type=by,
        process_group=group,
    )
    if not isinstance(answer, Future):
        answer.staging_completion.result(timeout=60)
        answer = answer.upload_completion
    training.train(1)
    answer.result(timeout=90)


def test_dcps_async_saves_by_thread(tmp_path: Path) -> None:
    run_ranks(_async_saves, {"fsdp2": str(tmp_path)}, AsyncCheckpointerType.THREAD, world_size=2)


def test_dcps_async_saves_by_process(moto_bucket: S3Place) -> None:
    """The daemons find the S3 endpoint and the keys in the environment."""
    places = {"fsdp1_hsdp": moto_bucket.url("run")}
    env = {"MASTER_ADDR": "127.0.0.1", **moto_bucket.environment}
    run_ranks(_async_saves, places, AsyncCheckpointerType.PROCESS, env=env, world_size=2)


# -- background saves and process groups


def _collectives_beside(place: str) -> list[int]:
    """Save small uneven pieces slowly, while all ranks and half of them reduce all the time."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    source = torch.arange(30.0).reshape(10, 3)
    placements = [Shard(0), Shard(0)]
    state = {f"t{i}": distribute_tensor(source + i, mesh, placements, src_data_rank=None) for i in range(20)}
    own_group = dist.new_group(backend="gloo")

    def slowly(done: int, total: int) -> None:
        time.sleep(0.01)

    def by_dcp(url: str) -> Future[Any]:
        writer = ZarrStorageWriter(url, progress=slowly)
        answer = dcp.async_save(state, storage_writer=writer, planner=ZarrSavePlanner(), process_group=own_group)
        assert isinstance(answer, Future)
        return answer

    saves = (lambda url: zarrckpt.async_save(state, url, progress=slowly), by_dcp)
    rounds = []
    for turn, save in enumerate([*saves, *saves]):
        future = save(f"{place}/{turn}")
        rounds.append(_reduce_until_done(future, mesh))
        future.result()
    return rounds


def _reduce_until_done(future: Future[Any], mesh: DeviceMesh) -> int:
    rounds, done = 0, torch.zeros(1)
    while done < dist.get_world_size():
        for dim in ("tp", "dp"):
            part = torch.ones(1)
            dist.all_reduce(part, group=mesh[dim].get_group())
            assert part == 2
        done = torch.tensor([float(future.done())])
        dist.all_reduce(done)
        rounds += 1
    return rounds


def test_collectives_work_beside_background_saves(tmp_path: Path) -> None:
    assert min(min(rounds) for rounds in run_ranks(_collectives_beside, str(tmp_path), timeout=60)) > 5
    for turn in range(4):
        found = zarrckpt.open(tmp_path / str(turn))["t7"][:]
        assert (found == torch.arange(7.0, 37.0).reshape(10, 3).numpy()).all()


def _without_cpu_backend(folder: str) -> str:
    """Use a group as ``backend="nccl"`` makes it, with collectives only for tensors on a GPU. Return the error."""
    import torch.testing._internal.distributed.fake_pg  # registers the backend

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("cuda:fake", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    try:
        with pytest.raises(AssertionError, match="A CPU backend must be enabled for async save"):
            dcp.async_save({"w": torch.ones(3)}, storage_writer=ZarrStorageWriter(f"{folder}/dcp"))
        state = {"w": torch.arange(3.0), "ranks": {str(rank): rank}}
        report = zarrckpt.async_save(state, f"{folder}/ours").result(timeout=60)
        assert len(report.rank_bytes) == world_size
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "is_gloo_available", lambda: False)
            meshes.close_all_meshes()
            with pytest.raises(zarrckpt.CheckpointError) as caught:
                zarrckpt.async_save(state, f"{folder}/none")
        return str(caught.value)
    finally:
        dist.destroy_process_group()


def test_a_group_without_a_cpu_backend_saves(tmp_path: Path) -> None:
    """DCP refuses it. zarrckpt uses separate gloo connections, and raises an error if there is no gloo."""
    messages = run_ranks(_without_cpu_backend, str(tmp_path), group=False)
    assert len({*messages}) == 1 and "without gloo" in messages[0]
    saved = zarrckpt.open(tmp_path / "ours")
    assert saved["w"][:].tolist() == [0, 1, 2] and [saved[f"ranks.{rank}"] for rank in range(4)] == [0, 1, 2, 3]
    assert not (tmp_path / "dcp").exists() and not (tmp_path / "none").exists()


# -- entries that a load replaces


class _Watched(dict[str, Any]):
    """A dict that records which of its entries are set."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.replaced: list[str] = []

    def __setitem__(self, key: str, value: Any) -> None:
        self.replaced.append(key)
        super().__setitem__(key, value)


@pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")
def test_objects_are_loaded_in_place_and_values_are_replaced(tmp_path: Path) -> None:
    url, dice, values = tmp_path / "one", Dice(3), {"replicated": torch.rand(10), "list": [1, 2, 3, 4]}
    zarrckpt.save({"dice": dice, "values": values}, url)
    faces, replicated = dice.faces.clone(), values["replicated"].clone()
    for load in (zarrckpt.load, lambda state, url: dcp.load(state, storage_reader=ZarrStorageReader(url))):
        other, target = Dice(4), torch.zeros(10)
        state = _Watched({"dice": other, "values": {"replicated": target, "list": []}})
        load(state, url)
        assert state["dice"] is other and torch.equal(other.faces, faces) and other.seed == 3
        assert state["values"]["replicated"] is target and torch.equal(target, replicated)
        assert state["values"]["list"] == [1, 2, 3, 4] and "dice" not in state.replaced
