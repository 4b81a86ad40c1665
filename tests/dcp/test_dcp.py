"""The writer and the reader under ``torch.distributed.checkpoint``: its planners, its async saves, its caches."""

from __future__ import annotations

import io
import math
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness.models import CachingStager, make_run, same, snapshot
from harness.ranks import run_ranks
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
)
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load_state_dict
from torch.distributed.checkpoint.state_dict_saver import save_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import zarrckpt
from zarrckpt import ZarrLoadPlanner, ZarrSavePlanner, ZarrStorageReader, ZarrStorageWriter

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")


def _sharded(shape: tuple[int, ...], value: float = 0.0, dim: int = 0) -> DTensor:
    """Return numbers that count up from ``value``, cut over all ranks. All are -1 if ``value`` is negative."""
    source = torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape) + value
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    source = torch.full_like(source, -1) if value < 0 else source
    return distribute_tensor(source, mesh, [Shard(dim)], src_data_rank=None)


def _whole(shape: tuple[int, ...], value: float = 0.0) -> torch.Tensor:
    return torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape) + value


# -- save and load, DCP's own planners

VALUES: dict[str, Any] = {
    "step": 7,
    "text": "x",
    "nothing": None,
    "float": float("inf"),
    "list": [1, 2, [3]],
    "tuple": (1, "a"),
    "bytes": b"abc",
    "deep": {"er": {"lr": 0.5}},
}


def _dcp_save(url: str, how: str) -> None:
    state = {"w": _sharded((10, 3)), "plain": torch.arange(5), "values": dict(VALUES), "io": io.BytesIO(b"hello")}
    state["values"][3] = "int key"
    state["values"]["ordered"] = OrderedDict(a=1)
    if how == "url":
        dcp.save(state, storage_writer=ZarrStorageWriter(url))
    elif how == "checkpoint_id":
        metadata = dcp.save(state, checkpoint_id=Path(url), storage_writer=ZarrStorageWriter())
        assert isinstance(metadata.storage_data, zarrckpt.SaveReport) and metadata.storage_data.url == url
    else:
        dcp.save(state, storage_writer=ZarrStorageWriter(url), planner=ZarrSavePlanner())


def _dcp_load(url: str, how: str) -> dict[str, Any]:
    values = dict.fromkeys([*VALUES, 3 if how == "planner" else "3"])
    state = {"w": _sharded((10, 3), -1, dim=1), "plain": torch.zeros(5, dtype=torch.int64), "io": None}
    state["values"] = values | {"deep": {"er": {"lr": None}}, "ordered": {"a": None}}
    if how == "url":
        dcp.load(state, storage_reader=ZarrStorageReader(url))
    elif how == "checkpoint_id":
        dcp.load(state, checkpoint_id=url, storage_reader=ZarrStorageReader())
    else:
        dcp.load(state, storage_reader=ZarrStorageReader(url), planner=ZarrLoadPlanner())
    assert torch.equal(state["w"].full_tensor(), _whole((10, 3)))
    assert torch.equal(state["plain"], torch.arange(5))
    assert isinstance(state["io"], io.BytesIO) and state["io"].getvalue() == b"hello"
    return state["values"]


@pytest.mark.parametrize("how", ["url", "checkpoint_id", "planner"])
def test_values_and_tensors_round_trip(how: str, tmp_path: Path) -> None:
    url = str(tmp_path / "one")
    run_ranks(_dcp_save, url, how)
    # By DCP's rules keys become strings. zarrckpt's planners keep them.
    key = 3 if how == "planner" else "3"
    expected = {**VALUES, key: "int key", "ordered": {"a": 1}}
    for world_size in (4, 3):
        for values in run_ranks(_dcp_load, url, how, world_size=world_size):
            assert values == expected and all(type(values[k]) is type(expected[k]) for k in expected)
    assert zarrckpt.open(url)["io"].getvalue() == b"hello"
    assert zarrckpt.open(url)["values.list"] == [1, 2, [3]]


def test_saves_work_without_a_process_group(tmp_path: Path) -> None:
    state = {"w": torch.arange(6.0), "step": 3}
    for name, options in {"none": {}, "no_dist": {"no_dist": True}}.items():
        dcp.save(state, storage_writer=ZarrStorageWriter(tmp_path / name), **options)
        target = {"w": torch.zeros(6), "step": 0}
        dcp.load(target, storage_reader=ZarrStorageReader(tmp_path / name), **options)
        assert torch.equal(target["w"], state["w"]) and target["step"] == 3


def _no_dist(folder: str) -> None:
    """Save on each rank separately, although there is a group."""
    rank = dist.get_rank()
    url = f"{folder}/{rank}"
    dcp.save({"w": torch.full((3,), rank)}, storage_writer=ZarrStorageWriter(url), no_dist=True)
    target = {"w": torch.full((3,), -1)}
    dcp.load(target, storage_reader=ZarrStorageReader(url), no_dist=True)
    assert target["w"].tolist() == [rank] * 3


def test_no_dist_saves_on_each_rank_alone(tmp_path: Path) -> None:
    run_ranks(_no_dist, str(tmp_path), world_size=2)


def _group_and_coordinator(folder: str) -> None:
    """Save with a process group of some ranks, and with the legacy calls and a coordinator that is not
    the first rank.
    """
    group = dist.new_group([1, 2, 3])
    if dist.get_rank() != 0:
        rows = torch.full((2, 3), float(dist.get_rank()))
        dcp.save({"w": rows}, storage_writer=ZarrStorageWriter(f"{folder}/group"), process_group=group)
        target = {"w": torch.zeros(2, 3)}
        dcp.load(target, storage_reader=ZarrStorageReader(f"{folder}/group"), process_group=group)
        assert target["w"].unique().tolist()[0] in (1, 2, 3)
    for coordinator in (1, 3):
        url = f"{folder}/coordinator-{coordinator}"
        state = {"w": _sharded((10, 3), 5.0), "who": "legacy"}
        save_state_dict(state, ZarrStorageWriter(url), coordinator_rank=coordinator)
        targets = {"w": _sharded((10, 3), -1, dim=1), "who": ""}
        load_state_dict(targets, ZarrStorageReader(url), coordinator_rank=coordinator)
        assert torch.equal(targets["w"].full_tensor(), _whole((10, 3), 5.0)) and targets["who"] == "legacy"


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_sub_groups_and_other_coordinators_work(tmp_path: Path) -> None:
    run_ranks(_group_and_coordinator, str(tmp_path))
    for coordinator in (1, 3):
        checkpoint = zarrckpt.open(tmp_path / f"coordinator-{coordinator}")
        assert checkpoint.info.world_size == 4 and (checkpoint["w"][:] == _whole((10, 3), 5.0).numpy()).all()
    assert zarrckpt.open(tmp_path / "group").info.world_size == 3


def _save_without_collectives(url: str) -> None:
    try:
        dcp.save({"w": torch.ones(2)}, storage_writer=ZarrStorageWriter(url), use_collectives=False)
    except BaseException as err:
        assert isinstance(err, ValueError) and "use_collectives=False" in str(err), repr(err)
        return
    raise AssertionError("saved without collectives")


def test_saving_without_collectives_is_refused_by_name(tmp_path: Path) -> None:
    run_ranks(_save_without_collectives, str(tmp_path / "one"), world_size=2)
    assert not (tmp_path / "one").exists()


def _save_meta(url: str) -> None:
    """Save tensors on the meta device with DCP's own planner, which does not check them: on one rank, and on all."""
    for where in ((1,), (0, 1)):
        state = {"fine": torch.ones(100), "meta": _sharded((10, 3))}
        if dist.get_rank() in where:
            state["deep"] = {"empty": torch.ones(2, device="meta")}
        try:
            dcp.save(state, storage_writer=ZarrStorageWriter(url))
        except CheckpointException as err:
            failures = {rank: error for rank, (error, _) in err.failures.items()}
            assert failures and {*failures} <= {*where}, failures
            assert all(isinstance(error, zarrckpt.UnsupportedValueError) for error in failures.values()), failures
            assert all("'deep.empty' is on the meta device" in str(error) for error in failures.values()), failures
        else:
            raise AssertionError("saved a tensor without data")


def test_meta_tensors_are_refused_by_name_before_a_chunk_is_put(tmp_path: Path) -> None:
    run_ranks(_save_meta, str(tmp_path / "one"), world_size=2)
    state = {"fine": torch.ones(100), "empty": torch.ones(2, device="meta")}
    with pytest.raises(CheckpointException, match="UnsupportedValueError: 'empty' is on the meta device"):
        dcp.save(state, storage_writer=ZarrStorageWriter(tmp_path / "two"), no_dist=True)
    assert {file.name for file in (tmp_path / "two").rglob("*") if file.is_file()} == {"zarr.json"}
    assert not [name for name in ("one", "two") if (tmp_path / name / "zarr.json").exists()]


# -- the same state by other calls


def _train(url: str, files: str) -> dict[str, Any]:
    """Save the state of a real run with this package and with DCP's own writer. Return it."""
    run = make_run("fsdp2")
    run.train(2)
    state = _run_state(run)
    dcp.save(state, storage_writer=ZarrStorageWriter(url))
    dcp.save(state, storage_writer=FileSystemWriter(files))
    return snapshot(state)


def _run_state(run: Any) -> dict[str, Any]:
    return {
        "model": get_model_state_dict(run.model),
        "optim": get_optimizer_state_dict(run.model, run.optim),
        "schedule": run.schedule.state_dict(),
        "step": run.step,
    }


def _load_both(url: str, files: str) -> list[dict[str, Any]]:
    loaded = []
    for reader in (ZarrStorageReader(url), FileSystemReader(files)):
        run = make_run("hsdp" if dist.get_world_size() == 4 else "fsdp2", seed=9, lr=0.3)
        state = _run_state(run)
        for parameter in list(state["optim"]["state"]):
            if parameter == "unused":  # it never had a gradient, so the checkpoint has no state for it
                del state["optim"]["state"][parameter]
        dcp.load(state, storage_reader=reader)
        loaded.append(snapshot(state))
    return loaded


def test_dcps_own_files_contain_the_same_values(tmp_path: Path) -> None:
    places = str(tmp_path / "zarr"), str(tmp_path / "files")
    saved = run_ranks(_train, *places)[0]
    for world_size in (4, 3):
        for ours, files in run_ranks(_load_both, *places, world_size=world_size):
            assert same(ours, files) == [] and same(saved, ours) == []


def _cross(folder: str) -> None:
    """Save with zarrckpt.save and load with dcp.load, then the reverse."""
    w, extra = _sharded((9, 4), 2.0), {"lr": 0.5, "names": ("a", "b")}
    zarrckpt.save({"w": w, "extra": extra}, f"{folder}/ours")
    target = {"w": _sharded((9, 4), -1, dim=1), "extra": {"lr": 0, "names": None}}
    dcp.load(target, storage_reader=ZarrStorageReader(f"{folder}/ours"))
    assert torch.equal(target["w"].full_tensor(), _whole((9, 4), 2.0)) and target["extra"] == extra
    dcp.save({"w": w, "extra": extra}, storage_writer=ZarrStorageWriter(f"{folder}/dcp"))
    target = {"w": torch.zeros(9, 4), "extra": None}
    zarrckpt.load(target, f"{folder}/dcp")
    assert torch.equal(target["w"], _whole((9, 4), 2.0)) and target["extra"] == extra


def test_each_api_reads_checkpoints_of_the_other(tmp_path: Path) -> None:
    run_ranks(_cross, str(tmp_path))


# -- third-party planners


class Halving(DefaultSavePlanner):
    """Transforms tensors."""

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        object = super().transform_object(write_item, object)
        return object / 2 if isinstance(object, torch.Tensor) else object


class Shouting(DefaultSavePlanner):
    """Transforms objects, in DCP's own form of bytes."""

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        if isinstance(object, str):
            object = object.upper()
        return super().transform_object(write_item, object)


class Scrambling(DefaultSavePlanner):
    """Turns objects into bytes that only its own loader understands."""

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        if write_item.type == WriteItemType.BYTE_IO:
            return io.BytesIO(bytes(255 - b for b in repr(object).encode()))
        return object


class Unscrambling(DefaultLoadPlanner):
    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        inner = torch.load(value, weights_only=False)
        data = inner.getvalue() if isinstance(inner, io.BytesIO) else inner
        self.original_state_dict[read_item.dest_index.fqn] = bytes(255 - b for b in data).decode()


class Narrowing(DefaultSavePlanner):
    """Resolves to another dtype than it planned."""

    dtype = torch.bfloat16

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        object = super().transform_object(write_item, object)
        return object.to(self.dtype) if isinstance(object, torch.Tensor) else object


def test_a_planner_that_transforms_tensors_works(tmp_path: Path) -> None:
    state = {"w": torch.tensor([2.0, 4.0]), "text": "quiet"}
    dcp.save(state, storage_writer=ZarrStorageWriter(tmp_path / "half"), planner=Halving())
    target = {"w": torch.zeros(2), "text": ""}
    dcp.load(target, storage_reader=ZarrStorageReader(tmp_path / "half"))
    assert target["w"].tolist() == [1, 2] and target["text"] == "quiet"
    dcp.save(state, storage_writer=ZarrStorageWriter(tmp_path / "loud"), planner=Shouting())
    dcp.load(target, storage_reader=ZarrStorageReader(tmp_path / "loud"))
    assert target["w"].tolist() == [2, 4] and target["text"] == "QUIET"
    dcp.save(state, storage_writer=ZarrStorageWriter(tmp_path / "odd"), planner=Scrambling())
    dcp.load(target, storage_reader=ZarrStorageReader(tmp_path / "odd"), planner=Unscrambling())
    assert target["text"] == "'quiet'"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int32, torch.float64])
def test_a_planner_that_resolves_to_another_dtype_is_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    planner = Narrowing()
    planner.dtype = dtype
    with pytest.raises(CheckpointException) as caught:
        dcp.save({"w": torch.ones(4)}, storage_writer=ZarrStorageWriter(tmp_path / "one"), planner=planner)
    error = caught.value.failures[0][0]
    assert isinstance(error, zarrckpt.CheckpointError) and "'w'" in str(error) and str(dtype) in str(error)
    with pytest.raises(zarrckpt.CheckpointNotFoundError):
        zarrckpt.open(tmp_path / "one")


# -- errors


def _errors_of(url: str, call: str) -> dict[int, tuple[str, str]]:
    """Return the class and message of every rank's failure."""
    targets = {"w": _sharded((8, 3) if call == "shape" else (8, 2), -1)}
    if call == "dtype":
        targets = {"w": torch.zeros(8, 2, dtype=torch.int32)}
    if call == "key":
        targets["other"] = torch.zeros(1)
    try:
        if call == "save":
            dcp.save(targets, storage_writer=ZarrStorageWriter(url))
        elif call == "sparse":
            odd = torch.eye(2).to_sparse() if dist.get_rank() == 1 else torch.eye(2)
            dcp.save({"odd": odd}, storage_writer=ZarrStorageWriter(url + "-other"))
        else:
            reader = ZarrStorageReader(url + "-none" if call == "absent" else url)
            dcp.load(targets, storage_reader=reader, planner=ZarrLoadPlanner() if call in ("shape", "key") else None)
    except CheckpointException as err:
        return {rank: (type(error).__name__, str(error)) for rank, (error, _) in err.failures.items()}
    raise AssertionError(f"{call} did not raise")


def test_errors_are_raised_as_this_packages_classes(tmp_path: Path) -> None:
    url = str(tmp_path / "one")
    zarrckpt.save({"w": _whole((8, 2))}, url)
    everyone = {0, 1, 2, 3}
    for call, name, text, ranks in [
        ("save", "CheckpointExistsError", "Checkpoint already exists", {0}),
        ("absent", "CheckpointNotFoundError", "nothing is committed", everyone),
        ("dtype", "KeyMismatchError", "torch.int32", everyone),
        ("shape", "KeyMismatchError", "(8, 3)", everyone),
        ("key", "KeyMismatchError", "'other'", everyone),
        ("sparse", "UnsupportedValueError", "'odd'", {1}),
    ]:
        for failures in run_ranks(_errors_of, url, call):
            assert failures.keys() == ranks, (call, failures)
            assert all(n == name and text in message for n, message in failures.values()), (call, failures)


# -- plan caching


def _no_cached_plans() -> None:
    for name in ("_cached_save_plan", "_cached_final_save_plan", "_cached_all_plans", "_cached_global_plan"):
        getattr(SavePlanner, name).clear()
    SavePlanner._cached_metadata.clear()


def _cached_save(state: dict[str, Any], url: str, planner: type = DefaultSavePlanner, **options: Any) -> None:
    dcp.save(state, storage_writer=ZarrStorageWriter(url, **options), planner=planner(enable_plan_caching=True))


def _check(url: str, state: dict[str, Any]) -> None:
    """Check that the checkpoint holds exactly this state: tensors and values by top-level name."""
    dist.barrier()
    checkpoint = zarrckpt.open(url)
    assert set(checkpoint) == set(state)
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            full = value.full_tensor() if isinstance(value, DTensor) else value
            assert (checkpoint[name][...] == full.numpy()).all(), name
        else:
            assert checkpoint[name] == value
    dist.barrier()


def _cached_saves(folder: str, planner: type) -> None:
    _no_cached_plans()
    state = {"w": _sharded((10, 3)), "b": torch.zeros(4), "step": 0, "blob": b"0"}
    for turn in range(3):
        state["w"] += turn
        state["b"] += turn
        state |= {"step": turn, "blob": bytes([turn])}
        _cached_save(state, f"{folder}/{turn}", planner)
        _check(f"{folder}/{turn}", state)
        _cached_save(state, f"{folder}/same", planner, overwrite=True)
        _check(f"{folder}/same", state)
    assert (planner is DefaultSavePlanner) == (planner.__name__ in SavePlanner._cached_final_save_plan)
    assert len({zarrckpt.open(f"{folder}/{turn}").save_id for turn in (0, 1, 2, "same")}) == 4


@pytest.mark.parametrize("planner", [DefaultSavePlanner, ZarrSavePlanner])
def test_cached_plans_save_current_values(planner: type, tmp_path: Path) -> None:
    run_ranks(_cached_saves, str(tmp_path), planner)


def _cached_changes(folder: str) -> None:
    """After any change between cached saves, on all ranks or on some, the next save is right."""
    _no_cached_plans()
    rank = dist.get_rank()
    states: list[dict[str, Any]] = [
        {"w": _sharded((8, 3)), "b": torch.zeros(4), "step": 1},
        {"w": _sharded((12, 3), 1.0), "b": torch.zeros(4), "step": 2},
        {"w": _sharded((12, 3), 2.0), "b": torch.ones(6), "step": 3},
        {"w": _sharded((12, 3), 3.0), "b": torch.ones(6), "step": 4, "more": torch.ones(2)},
        {"w": _sharded((12, 3), 4.0), "b": torch.ones(6), "step": 5},
        {"w": _sharded((12, 3), 5.0), "b": "no tensor", "step": 6},
        {"w": _sharded((12, 3), 6.0), "b": torch.ones(6), "step": torch.tensor(7)},
    ]
    for turn, state in enumerate(states):
        _cached_save(state, f"{folder}/{turn}")
        _check(f"{folder}/{turn}", state)
    only = {**states[-1], "only": torch.full((3,), 2.0)}
    _cached_save({k: v for k, v in only.items() if k != "only" or rank == 2}, f"{folder}/only")
    _check(f"{folder}/only", only)


def test_cached_plans_notice_changes(tmp_path: Path) -> None:
    run_ranks(_cached_changes, str(tmp_path))


def _cached_failures(folder: str) -> None:
    """A save that fails leaves no cached plan that would spoil the next."""
    _no_cached_plans()
    first = {"w": _sharded((8, 3), 1.0), "step": 1}
    zarrckpt.save(first, f"{folder}/taken")
    for attempt in range(2):
        try:
            _cached_save(first, f"{folder}/taken")
        except CheckpointException as err:
            assert isinstance(err.failures[0][0], zarrckpt.CheckpointExistsError), attempt
        else:
            raise AssertionError("saved over a checkpoint")
    _cached_save(first, f"{folder}/free")
    _check(f"{folder}/free", first)
    second = {"w": _sharded((12, 3), 2.0), "step": 2}
    try:
        _cached_save(second, f"{folder}/taken")
    except CheckpointException as err:
        assert isinstance(err.failures[0][0], zarrckpt.CheckpointExistsError)
    _cached_save(second, f"{folder}/free-2")
    _check(f"{folder}/free-2", second)
    dcp.save(first, storage_writer=ZarrStorageWriter(f"{folder}/uncached"))
    _check(f"{folder}/uncached", first)
    _cached_save(second, f"{folder}/free-3", ZarrSavePlanner)
    _cached_save(first, f"{folder}/free-4", ZarrSavePlanner)
    _check(f"{folder}/free-3", second)
    _check(f"{folder}/free-4", first)


def test_cached_plans_work_after_failures(tmp_path: Path) -> None:
    run_ranks(_cached_failures, str(tmp_path))


# -- asynchronous saves


def _wait(answer: Any) -> Any:
    """Return the metadata from any of DCP's kinds of async results."""
    return (answer if isinstance(answer, Future) else answer.upload_completion).result(timeout=60)


def _async_saves(folder: str) -> list[str]:
    """Continue the training while DCP saves in the background. The checkpoint has the state at the call."""
    stagers: dict[str, Callable[[], Any]] = {
        "none": lambda: None,
        "default": lambda: DefaultStager(StagingOptions(False, False, False, False)),
        "blocking": CachingStager,
    }
    urls = []
    for name, make in stagers.items():
        stager = make()
        state = {"w": _sharded((10, 3)), "b": torch.zeros(4), "step": 0, "text": "x"}
        for turn in range(2):
            state["w"].to_local().add_(turn)
            state |= {"b": state["b"] + turn, "step": turn}
            expected = {"w": state["w"].full_tensor(), "b": state["b"].clone(), "step": turn, "text": "x"}
            url = f"{folder}/{name}-{turn}"
            writer = ZarrStorageWriter(url)
            answer = dcp.async_save(state, storage_writer=writer, async_stager=stager)
            if not isinstance(answer, Future):
                answer.staging_completion.result(timeout=60)
            state["w"].to_local().fill_(-7)
            _wait(answer)
            _check(url, expected)
            urls.append(url)
            state["w"] = _sharded((10, 3), 5.0)
        if isinstance(stager, DefaultStager):
            stager.close()
    answer = dcp.async_save(state, storage_writer=ZarrStorageWriter(urls[0]))
    with pytest.raises(CheckpointException, match="Checkpoint already exists"):
        _wait(answer)
    return urls


def test_async_save(tmp_path: Path) -> None:
    for urls in run_ranks(_async_saves, str(tmp_path)):
        assert len(urls) == 6


def test_metadata_names_the_save_and_the_load(tmp_path: Path) -> None:
    writer, reader = zarrckpt.ZarrStorageWriter(tmp_path / "one"), zarrckpt.ZarrStorageReader(tmp_path / "one")
    dcp.save({"w": torch.ones(2)}, storage_writer=writer, no_dist=True)
    found = reader.read_metadata().storage_meta
    assert found is not None and str(found.checkpoint_id) == str(tmp_path / "one")
    assert found.save_id == writer.save_id == zarrckpt.open(tmp_path / "one").save_id
    assert found.load_id == reader.load_id is not None
    before = reader.load_id
    reader.reset()
    assert reader.load_id != before


def test_plan_caching_in_one_process_and_with_another_dtype(tmp_path: Path) -> None:
    _no_cached_plans()
    for number, dtype in enumerate((torch.float32, torch.float32, torch.int64, torch.int64)):
        planner = zarrckpt.ZarrSavePlanner(enable_plan_caching=True)
        writer = zarrckpt.ZarrStorageWriter(tmp_path / str(number))
        dcp.save(
            {"caching": {"w": torch.ones(4, 4, dtype=dtype)}}, storage_writer=writer, planner=planner, no_dist=True
        )
        assert zarrckpt.open(tmp_path / str(number))["caching.w"].dtype == str(dtype).removeprefix("torch.")
    _no_cached_plans()
