"""Requirements of PyTorch's own checkpoint tests, applied to this storage through ``dcp.save`` and ``dcp.load``.

Four gloo processes save to local files, some to S3 and through fsspec. Loaded states are compared with the full
tensors, gathered without this package.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness.layouts import EVEN, UNEVEN, Place, family, gathered, laid_out, net
from harness.models import full_tensor, make_run, same, snapshot
from harness.store_servers import S3Place
from torch import nn
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed._shard.sharding_spec import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    ShardingSpec,
    ShardMetadata,
)
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, StateDictType, fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor, zeros
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import zarrckpt
from zarrckpt import ZarrLoadPlanner, ZarrSavePlanner, ZarrStorageReader, ZarrStorageWriter

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@pytest.fixture(params=["disk", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "disk":
        return Place(str(tmp_path / "run"))
    bucket: S3Place = request.getfixturevalue("moto_bucket")
    return Place(bucket.url("run"), bucket.environment)


@pytest.fixture
def disk(tmp_path: Path) -> Place:
    return Place(str(tmp_path / "run"))


def _save(state: dict[str, Any], url: str, planner: Any = None, **options: Any) -> None:
    dcp.save(state, storage_writer=ZarrStorageWriter(url, **options), planner=planner)


def _load(state: dict[str, Any], url: str, planner: Any = None, **options: Any) -> None:
    dcp.load(state, storage_reader=ZarrStorageReader(url, **options), planner=planner)


# -- the order of keys, empty states


class Gathering:
    """A Stateful object that loads its state with one kind of collective."""

    def __init__(self, kind: str, number: int = 0) -> None:
        self.kind = kind
        self.number = number

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        mine = torch.arange(2) + dist.get_rank()
        if self.kind == "gather":
            parts = [torch.zeros(2, dtype=torch.int64) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, mine)
            assert [int(part[0]) for part in parts] == list(range(dist.get_world_size()))
        else:
            dist.all_reduce(mine)
            assert int(mine[0]) == sum(range(dist.get_world_size()))
        self.number = state["number"]


def _other_orders(url: str) -> None:
    rank = dist.get_rank()

    def state(number: int) -> dict[str, Any]:
        named: dict[str, Any] = {"A": Gathering("gather", number), "B": Gathering("reduce", number)}
        named |= {"w": torch.full((3,), float(number)), "C": Gathering("gather", number)}
        return {key: named[key] for key in [*named][rank:] + [*named][:rank]}

    _save(state(3), url)
    loaded = state(0)
    _load(loaded, url)
    assert loaded["w"].eq(3).all() and [loaded[key].number for key in "ABC"] == [3, 3, 3]


def test_keys_in_another_order_on_each_rank_do_not_deadlock(disk: Place) -> None:
    disk.run(_other_orders)


def _empty(url: str) -> None:
    _save({}, url)
    _load({}, url)
    _save({}, url + "-planner", ZarrSavePlanner())
    _load({}, url + "-planner", ZarrLoadPlanner())
    some = {"w": torch.ones(3), "step": 4} if dist.is_initialized() and dist.get_rank() == 1 else {}
    _save(some, url + "-some")
    target = {key: torch.zeros(3) if key == "w" else 0 for key in some}
    _load(target, url + "-some")
    assert same(snapshot(target), snapshot(some)) == []


def test_empty_state_dicts_are_saved(place: Place) -> None:
    place.run(_empty)
    Place(place.url + "-alone", place.env).run(_empty, world_size=1, group=False)


# -- parts of a checkpoint, overwriting, loading in place


def _state(model: nn.Module, optim: torch.optim.Optimizer, **options: bool) -> dict[str, Any]:
    chosen = StateDictOptions(**options)
    return {
        "model": get_model_state_dict(model),
        "optim": get_optimizer_state_dict(model, optim, options=chosen),
    }


def _parts(url: str, kind: str) -> None:
    run = make_run(kind)
    run.train(2)
    saved = _state(run.model, run.optim)
    _save(saved, url)
    expected = {name: snapshot(saved[name]) for name in saved}

    fresh = make_run(kind, seed=3)
    model = get_model_state_dict(fresh.model)
    assert same(snapshot(model), expected["model"])
    _load({"model": model}, url)
    set_model_state_dict(fresh.model, model)
    assert same(snapshot(get_model_state_dict(fresh.model)), expected["model"]) == []
    assert not fresh.optim.state

    def by_keys(keys: Any) -> dict[str, Any]:
        return _load_state_dict_from_keys(keys, storage_reader=ZarrStorageReader(url))

    alone = by_keys("model")
    assert alone.keys() == {"model"} and same(snapshot(alone["model"]), expected["model"]) == []
    optim = by_keys("optim.state")["optim"]
    assert optim.keys() == {"state"} and same(snapshot(optim["state"]), snapshot(saved["optim"]["state"])) == []
    both = by_keys({"model", "optim.param_groups"})
    assert both["optim"].keys() == {"param_groups"} and both["optim"]["param_groups"] == saved["optim"]["param_groups"]


@pytest.mark.parametrize("kind", ["fsdp1", "fsdp2"])
def test_a_part_of_a_checkpoint_is_loaded(kind: str, disk: Place) -> None:
    disk.run(_parts, kind)


def _overwrite(url: str, **options: Any) -> None:
    def refused() -> None:
        with pytest.raises(CheckpointException, match="Checkpoint already exists"):
            _save({"w": torch.full((10,), -1.0)}, url, **options)

    def now() -> list[float]:
        target = {"w": torch.zeros(10)}
        _load(target, url, **options)
        return target["w"].unique().tolist()

    _save({"w": torch.full((10,), 1.0)}, url, **options)
    refused()
    assert now() == [1]
    _save({"w": torch.full((10,), 2.0)}, url, overwrite=True, **options)
    assert now() == [2]
    refused()
    assert now() == [2]


def test_overwriting_is_refused_or_allowed(place: Place) -> None:
    place.run(_overwrite)


def _in_place(url: str) -> None:
    run = make_run("fsdp2", lr=0.1)
    run.train(1)
    run.optim.param_groups[0]["lr"] = 0.125
    saved = _state(run.model, run.optim)
    _save(saved, url)
    other = make_run("fsdp2", seed=4, lr=0.2)
    other.train(1)
    target = _state(other.model, other.optim)
    model, optim = target["model"], target["optim"]
    tensors = {name: value for name, value in _flat(target).items() if isinstance(value, torch.Tensor)}
    places = {name: _local(value).data_ptr() for name, value in tensors.items()}
    _load(target, url)
    assert target["model"] is model and target["optim"] is optim
    assert all(_flat(target)[name] is value for name, value in tensors.items())
    assert {name: _local(value).data_ptr() for name, value in tensors.items()} == places
    lenient = StateDictOptions(strict=False)  # one parameter never had a gradient, and so has no state
    set_state_dict(other.model, other.optim, model_state_dict=model, optim_state_dict=optim, options=lenient)
    assert [group["lr"] for group in other.optim.param_groups] == [0.125, run.optim.param_groups[1]["lr"]]
    assert same(snapshot(_state(other.model, other.optim)), snapshot(saved)) == []


def _flat(state: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(state, Mapping):
        return {prefix: state}
    return {name: leaf for key, item in state.items() for name, leaf in _flat(item, f"{prefix}.{key}").items()}


def _local(value: torch.Tensor) -> torch.Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def test_loads_are_in_place_and_restore_the_learning_rate(disk: Place) -> None:
    disk.run(_in_place)


# -- one layout into another


Pairs = dict[str, tuple[str, ...]]

EVEN_PAIRS: Pairs = {"fsdp1": ("hsdp1",), "fsdp2": ("tp",), "tp": ("fsdp2_tp",)}
UNEVEN_PAIRS: Pairs = {  # torch cannot train with uneven tensor parallelism alone: that is a target only
    "fsdp1": ("fsdp2_tp",),
    "hsdp1": ("fsdp1",),
    "fsdp2": ("hsdp2", "fsdp1_tp"),
    "hsdp2": ("fsdp2",),
    "fsdp1_tp": ("hsdp1",),
    "fsdp2_tp": ("fsdp2_tp", "tp"),
    "hsdp2_tp": ("fsdp2",),
}


def _convert(url: str, sizes: tuple[int, ...], pairs: Pairs) -> None:
    # DCP's own planners use torch's rule for the offsets of DTensors. It is wrong if two mesh dimensions cut one
    # dimension unevenly.
    ours = sizes == UNEVEN
    for source, targets in pairs.items():
        model, optim = laid_out(source, sizes, seed=1)
        model(torch.ones(2, sizes[0])).pow(2).sum().backward()
        optim.step()
        state = _state(model, optim)
        saved = snapshot(state)
        _save(state, f"{url}/{source}", ZarrSavePlanner() if ours else None)
        for target in targets:
            other, other_optim = laid_out(target, sizes, seed=2)
            loaded = _state(other, other_optim)
            _load(loaded, f"{url}/{source}", ZarrLoadPlanner() if ours else None)
            assert same(snapshot(loaded), saved) == [], (source, target)
            set_model_state_dict(other, loaded["model"])
            set_optimizer_state_dict(other, other_optim, loaded["optim"])
            if target != "fsdp1_tp":  # in torch itself, its optimizer does not return the state that it loaded
                assert same(snapshot(_state(other, other_optim)), saved) == [], (source, target)


def test_even_layouts_load_into_each_other(disk: Place) -> None:
    disk.run(_convert, EVEN, EVEN_PAIRS)


def test_uneven_layouts_load_into_each_other(disk: Place) -> None:
    disk.run(_convert, UNEVEN, UNEVEN_PAIRS)


ONE_DIM = ([Shard(0)], [Replicate()])
TWO_DIMS = ([Replicate(), Replicate()], [Replicate(), Shard(0)], [Shard(0), Replicate()], [Shard(0), Shard(0)])


def _reshard(url: str) -> None:
    """Load every placement on one and on two mesh dimensions into every other, with DCP's own planners
    and older calls.
    """
    source = torch.arange(16.0).view(4, 4)
    meshes: list[tuple[DeviceMesh, tuple[list[Placement], ...]]] = [
        (init_device_mesh("cpu", (4,)), ONE_DIM),  # type: ignore[list-item]
        (init_device_mesh("cpu", (2, 2)), TWO_DIMS),  # type: ignore[list-item]
    ]
    layouts = [(mesh, placements) for mesh, many in meshes for placements in many]
    for number, (mesh, placements) in enumerate(layouts):
        state = {"w": distribute_tensor(source, mesh, placements)}
        dcp.save_state_dict(state, ZarrStorageWriter(f"{url}/{number}"), planner=DefaultSavePlanner())
        for other, wanted in layouts:
            target = {"w": zeros(4, 4, device_mesh=other, placements=wanted)}
            dcp.load_state_dict(target, ZarrStorageReader(f"{url}/{number}"), planner=DefaultLoadPlanner())
            assert torch.equal(target["w"].full_tensor(), source), (placements, wanted)
            back = target["w"].redistribute(other, [Replicate()] * other.ndim).redistribute(other, wanted)
            assert torch.equal(back.to_local(), target["w"].to_local())


def test_dtensors_load_into_other_placements(disk: Place) -> None:
    disk.run(_reshard)


class WithExtras(nn.Module):
    """A sharded and a replicated parameter, and extra state that holds a tensor."""

    def __init__(self, factor: int) -> None:
        super().__init__()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self.sharded = nn.Parameter(distribute_tensor(torch.arange(6.0) * factor, mesh, [Shard(0)]))
        self.replicated = nn.Parameter(distribute_tensor(torch.arange(4.0, 8.0) * factor, mesh, [Replicate()]))
        self.number, self.tensor = factor, torch.full((2,), float(factor))

    def get_extra_state(self) -> dict[str, Any]:
        return {"number": self.number, "tensor": self.tensor}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.number, self.tensor = state["number"], state["tensor"]


def _extras(url: str) -> None:
    saved, target = WithExtras(1), WithExtras(10)
    _save(saved.state_dict(), url)
    state = target.state_dict()
    _load(state, url)
    target.load_state_dict(state)
    assert target.number == 1 and target.tensor.tolist() == [1, 1]
    for one, other in zip(saved.parameters(), target.parameters(), strict=True):
        assert torch.equal(one.to_local(), other.to_local())


def test_extra_state_is_restored(disk: Place) -> None:
    disk.run(_extras)


# -- ShardedTensors


def _rows(ranks: list[int], sizes: list[int], width: int) -> EnumerableShardingSpec:
    offsets = [sum(sizes[:i]) for i in range(len(sizes))]
    shards = zip(ranks, offsets, sizes, strict=True)
    return EnumerableShardingSpec(
        [ShardMetadata([offset, 0], [size, width], f"rank:{rank}/cpu") for rank, offset, size in shards]
    )


def _specs(width: int) -> dict[str, ShardingSpec]:
    """Return specs for ten rows: several shards per rank, uneven ones, and ranks without any."""
    return {
        "rows": ChunkShardingSpec(0, [f"rank:{rank}/cpu" for rank in range(4)]),
        "columns": ChunkShardingSpec(1, [f"rank:{rank}/cpu" for rank in range(4)]),
        "two each": ChunkShardingSpec(0, [f"rank:{rank}/cpu" for rank in (0, 1, 1, 0, 3)]),
        "uneven": _rows([0, 1, 0, 3, 2], [2, 1, 3, 3, 1], width),
        "two ranks": _rows([2, 1], [8, 2], width),
    }


def _sharded_specs(url: str) -> None:
    specs = _specs(20)
    for name, spec in specs.items():
        plain = torch.rand(10, 20)
        dist.broadcast(plain, 0)
        state = {"sharded": sharded_tensor.rand(spec, 10, 20), "plain": plain}
        saved = {key: full_tensor(value) for key, value in state.items()}
        _save(state, f"{url}/{name}")
        for other, wanted in specs.items():
            # Each into the other kind, and the sharded one into another sharding.
            target = {"sharded": torch.zeros(10, 20), "plain": sharded_tensor.zeros(wanted, 10, 20)}
            _load(target, f"{url}/{name}")
            assert [key for key in saved if not torch.equal(full_tensor(target[key]), saved[key])] == [], (name, other)
            again = {"sharded": sharded_tensor.zeros(wanted, 10, 20)}
            _load(again, f"{url}/{name}")
            assert torch.equal(full_tensor(again["sharded"]), saved["sharded"]), (name, other)


def test_sharded_tensors_of_every_spec_load_into_every_other(disk: Place) -> None:
    disk.run(_sharded_specs)


def _sharded_optimizer(url: str, planners: tuple[type | None, ...] = (None,), **options: Any) -> None:
    """Save and load FSDP1 without a mesh, which has ShardedTensors. The optimizer's targets come from our metadata."""

    def make(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = FullyShardedDataParallel(net((8, 4, 7, 12)), device_id=torch.device("cpu"))
        FullyShardedDataParallel.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
        return model, torch.optim.Adam(model.parameters(), lr=0.1)

    model, optim = make(0)
    model(torch.ones(8, 8)).sum().backward()
    optim.step()
    saved = {"model": model.state_dict(), "optim": FullyShardedDataParallel.optim_state_dict(model, optim)}
    assert any(isinstance(value, ShardedTensor) for value in saved["model"].values())
    _save(saved, url, **options)
    for planner in planners:
        other, other_optim = make(1)
        state = {"model": other.state_dict()}
        assert same(snapshot(state["model"]), snapshot(saved["model"]))
        _load(state, url, planner and planner(), **options)
        other.load_state_dict(state["model"])
        reader = ZarrStorageReader(url, **options)
        loaded = load_sharded_optimizer_state_dict(state["model"], "optim", reader, planner and planner())
        flat = FullyShardedDataParallel.optim_state_dict_to_load(other, other_optim, loaded["optim"])
        other_optim.load_state_dict(flat)
        now = {
            "model": other.state_dict(),
            "optim": FullyShardedDataParallel.optim_state_dict(other, other_optim),
        }
        assert same(snapshot(now), snapshot(saved)) == []


def test_sharded_optimizer_state(disk: Place) -> None:
    disk.run(_sharded_optimizer, (None, DefaultLoadPlanner, ZarrLoadPlanner))


# -- fully_shard


class Mlp(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.down(torch.relu(self.up(x))))


def _longest(parameter: nn.Parameter) -> Shard:
    return Shard(max(range(parameter.dim()), key=lambda dim: parameter.shape[dim]))


def _mlps(dim: int, mesh: DeviceMesh, **options: Any) -> nn.Module:
    torch.manual_seed(dim)
    model = nn.Sequential(Mlp(dim), nn.Sequential(Mlp(dim), nn.Linear(dim, dim)), Mlp(dim))
    for part in model:
        fully_shard(part, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def _check_state_dict(model: nn.Module, url: str) -> None:
    """Check that a state dict's tensors are the parameters' own memory: saved and filled in place."""
    state = model.state_dict()  # first, because it shards parameters that a forward left whole
    with torch.no_grad():
        for parameter in model.parameters():
            torch.manual_seed(7 + parameter.device_mesh.get_coordinate()[-1])  # replicas are the same
            parameter.to_local().normal_()
    before = {name: parameter.to_local().clone() for name, parameter in model.named_parameters()}
    places = {name: value.to_local().data_ptr() for name, value in state.items()}
    assert places == {name: parameter.to_local().data_ptr() for name, parameter in model.named_parameters()}
    _save(state, url)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().fill_(-1)
    _load(state, url)
    assert places == {name: value.to_local().data_ptr() for name, value in state.items()}
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.to_local(), before[name]), name
    # And into other tensors, which the model then uses.
    fresh = {name: value.detach().clone().fill_(-2) for name, value in state.items()}
    _load(fresh, url, ZarrLoadPlanner())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().fill_(-1)
    model.load_state_dict(fresh)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.to_local(), before[name]), name


def _fully_shard(url: str, dims: tuple[int, ...], hybrid_dims: tuple[int, ...]) -> None:
    line = init_device_mesh("cpu", (4,))
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for dim in dims:
        _check_state_dict(_mlps(dim, line), f"{url}/{dim}")
        model = _mlps(dim, line, reshard_after_forward=False)
        model(torch.ones(2, dim))  # parameters stay whole after it. state_dict() shards them again
        _check_state_dict(model, f"{url}/{dim}-kept")
    for dim in hybrid_dims:
        options = {"shard_placement_fn": _longest} if dim == 16 else {}
        _check_state_dict(_mlps(dim, square, **options), f"{url}/hybrid-{dim}")


def test_fully_shard_state_dicts(disk: Place) -> None:
    disk.run(_fully_shard, (2, 3, 5), (3, 4, 16))


def _offloaded(url: str) -> None:
    """Load parameters on the meta device, offloaded to the CPU, piece by piece."""
    mesh = init_device_mesh("cpu", (4,))
    torch.manual_seed(0)
    source = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 6, bias=False))
    _save({"model": source.state_dict()}, url)
    for from_meta in (False, True):
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 6, bias=False))
        policy = CPUOffloadPolicy(pin_memory=False)
        for part in (*model, model):
            fully_shard(part, mesh=mesh, offload_policy=policy)
        for name, parameter in dict(model.named_parameters()).items():
            # DCP's own planner gives memory to targets on the meta device.
            piece = parameter if from_meta else torch.empty_like(parameter, device="cpu")
            state = {"model": {name: piece}}
            _load(state, url, None if from_meta else ZarrLoadPlanner())
            result = model.load_state_dict(state["model"], assign=True, strict=False)
            assert len(result.missing_keys) == 1 and result.unexpected_keys == []
        assert all(parameter.device.type == "cpu" for parameter in model.parameters())
        assert torch.equal(model(torch.ones(2, 4)), source(torch.ones(2, 4)))
        assert same(snapshot(model.state_dict()), snapshot(source.state_dict())) == []


def test_offloaded_meta_parameters_are_loaded_piece_by_piece(disk: Place) -> None:
    disk.run(_offloaded)


def _two_dims(url: str, rows: int) -> None:
    """Cut the rows of the first layer by both data and tensor parallelism."""
    torch.manual_seed(rows)
    source = nn.Sequential(nn.Linear(5, rows), nn.Linear(rows, 3))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = copy.deepcopy(source)
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    state = model.state_dict()
    _save(state, url, ZarrSavePlanner())
    whole = {name: torch.full_like(value, -1) for name, value in source.state_dict().items()}
    _load(whole, url)
    assert same(snapshot(whole), snapshot(source.state_dict())) == []
    held = {name: value.to_local().clone() for name, value in state.items()}
    with torch.no_grad():
        for value in state.values():
            value.to_local().fill_(-1)
    _load(state, url, ZarrLoadPlanner())
    assert [name for name, value in model.state_dict().items() if not torch.equal(value.to_local(), held[name])] == []


def _two_dims_all(url: str) -> None:
    for rows in (8, 10, 14, 9, 7, 5, 3):
        _two_dims(f"{url}/{rows}", rows)


def test_fully_shard_over_tensor_parallelism_of_uneven_rows(disk: Place) -> None:
    disk.run(_two_dims_all)


def _full_on_rank_0(url: str, planner: type) -> None:
    """Save a full state on rank 0 and an empty dict on the others, and load it."""
    full = StateDictOptions(full_state_dict=True, cpu_offload=True)
    model = make_run("fsdp2").model
    whole = snapshot(get_model_state_dict(model))
    state = {"model": get_model_state_dict(model, options=full)}
    assert bool(state["model"]) == (dist.get_rank() == 0)
    _save(state, url, planner())
    other = make_run("fsdp2", seed=3).model
    target = {"model": {name: torch.zeros_like(value) for name, value in state["model"].items()}}
    _load(target, url)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(other, target["model"], options=options)
    assert same(snapshot(get_model_state_dict(other)), whole) == []
    sharded = {"model": get_model_state_dict(make_run("fsdp2", seed=4).model)}
    _load(sharded, url)
    assert same(snapshot(sharded["model"]), whole) == []


@pytest.mark.parametrize("planner", [DefaultSavePlanner, ZarrSavePlanner])
def test_a_full_state_dict_on_rank_0(planner: type, disk: Place) -> None:
    disk.run(_full_on_rank_0, planner)


# -- fsspec


def test_saves_and_loads_work_through_fsspec(disk: Place) -> None:
    """Local files through fsspec."""
    options = {"storage_options": {"backend": "fsspec"}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _overwrite(f"file://{disk.url}/alone", **options)
    disk.run(_through_fsspec, options)


def test_saves_and_loads_work_through_s3fs(moto_bucket: S3Place) -> None:
    options = {"storage_options": moto_bucket.fsspec_options}
    Place(moto_bucket.url("run")).run(_through_fsspec, options)


def _through_fsspec(url: str, options: dict[str, Any]) -> None:
    url = url if "://" in url else f"file://{url}"
    _overwrite(f"{url}/overwritten", **options)
    _sharded_optimizer(f"{url}/optimizer", **options)


# -- different keys on each rank


def _families(url: str, pairs: Pairs) -> None:
    # Flattened, because a list of parameter groups would differ on each rank.
    flat = {"flatten_optimizer_state_dict": True}
    for source, targets in pairs.items():
        model, optim = family(source, seed=1, lr=0.1)
        model(torch.ones(2, 5)).backward()
        optim.step()
        saved = gathered(_state(model, optim, **flat))
        _save(_state(model, optim, **flat), f"{url}/{source}")
        for target in targets:
            other, other_optim = family(target, seed=2, lr=0.7)
            state = _state(other, other_optim, **flat)
            _load(state, f"{url}/{source}")
            set_model_state_dict(other, state["model"])
            options = StateDictOptions(flatten_optimizer_state_dict=True)
            set_optimizer_state_dict(other, other_optim, state["optim"], options=options)
            assert same(gathered(_state(other, other_optim, **flat)), saved) == [], (source, target)


def test_pipelines_and_experts_load_into_each_other(disk: Place) -> None:
    pairs = {
        "stages": ("stages", "fsdp", "experts"),
        "stages_dp": ("stages_dp", "plain"),
        "experts": ("experts", "fsdp", "stages_dp"),
        "fsdp": ("stages", "experts"),
        "plain": ("stages_dp",),
    }
    disk.run(_families, pairs)


def _stacked_experts(url: str) -> None:
    """Save experts as rows of one tensor, cut over the expert ranks, with columns over the data-parallel ones."""
    source = torch.arange(4.0 * 6 * 3).reshape(4, 6, 3)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    placed: dict[str, list[Placement]] = {
        "replicated": [Replicate(), Shard(0)],
        "sharded": [Shard(1), Shard(0)],
        "both": [Shard(0), Shard(0)],
    }
    state: dict[str, Any] = {name: distribute_tensor(source, mesh, places) for name, places in placed.items()}
    _save(state, url)
    for places in placed.values():
        target = {name: distribute_tensor(torch.zeros_like(source), mesh, places) for name in placed}
        _load(target, url)
        assert all(torch.equal(value.full_tensor(), source) for value in target.values())
    assert zarrckpt.open(url)["both"].shape == (4, 6, 3)


def test_experts_in_one_tensor(disk: Place) -> None:
    disk.run(_stacked_experts)
