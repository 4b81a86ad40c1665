"""``zarrckpt.load`` into every kind of target, from every kind of save, and the errors before it writes anything."""

from __future__ import annotations

import copy
import re
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness.crashes import undeletable
from harness.layouts import Place, family, gathered, net
from harness.models import same, snapshot
from harness.ranks import all_ranks_raise, run_ranks
from torch import nn
from torch.ao.quantization import (
    FakeQuantize,
    HistogramObserver,
    MovingAveragePerChannelMinMaxObserver,
    PerChannelMinMaxObserver,
)
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import ShardedTensor, init_from_local_shards
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper
from torch.distributed.tensor.placement_types import _StridedShard

import zarrckpt
from zarrckpt import PerRank


@pytest.fixture
def disk(tmp_path: Path) -> Place:
    return Place(str(tmp_path / "run"))


# -- one tensor into every kind of target

Make = Callable[[torch.Tensor], torch.Tensor]
"""From a whole tensor to this rank's part of it."""

SHAPES = [(10, 6), (3, 5)]


def _source(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape) + 0.5


def _strided_view(whole: torch.Tensor) -> torch.Tensor:
    rows, columns = whole.shape
    view = torch.zeros(2 * columns + 1, rows + 3)[1::2, 2 : 2 + rows].t()
    view.copy_(whole)
    return view


def _cut(mesh: DeviceMesh, *placements: Placement) -> Make:
    # src_data_rank=None: every rank has the source and takes its part without communication.
    return lambda whole: distribute_tensor(whole, mesh, placements, src_data_rank=None)


def _strided(mesh: DeviceMesh) -> Make:
    """Return a maker of rows cut by the second mesh dimension, then by the first: FSDP2 over tensor parallelism."""

    def make(whole: torch.Tensor) -> DTensor:
        local = _piece(_piece(whole, 2, mesh.get_local_rank(1)), 2, mesh.get_local_rank(0)).clone()
        placements = [_StridedShard(0, split_factor=2), Shard(0)]
        shape, stride = whole.shape, whole.stride()
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)

    return make


def _piece(rows: torch.Tensor, parts: int, number: int) -> torch.Tensor:
    pieces = rows.chunk(parts)
    return pieces[number] if number < len(pieces) else rows[:0]


def _sharded(owners: dict[int, int], dim: int) -> Make:
    """Return a maker of a ShardedTensor: pieces that begin at these offsets (if they exist), each on a rank."""

    def make(whole: torch.Tensor) -> ShardedTensor:
        begins = [begin for begin in owners if begin < whole.shape[dim]]
        ends = [*begins[1:], whole.shape[dim]]
        shards = []
        for begin, end in zip(begins, ends, strict=True):
            if owners[begin] == dist.get_rank():
                piece = whole.narrow(dim, begin, end - begin).clone()
                offset = [begin if d == dim else 0 for d in range(whole.dim())]
                shards.append(LocalShard.from_tensor_and_offsets(piece, offset, dist.get_rank()))
        return init_from_local_shards(shards, list(whole.shape))

    return make


def _kinds() -> dict[str, Make]:
    """Return every kind of target that this world has."""
    kinds: dict[str, Make] = {
        "plain": torch.clone,
        "view": _strided_view,
        "parameter": lambda whole: nn.Parameter(whole.clone()),
    }
    if not dist.is_initialized():
        return kinds
    world = dist.get_world_size()
    line = init_device_mesh("cpu", (world,))
    backwards = DeviceMesh("cpu", list(reversed(range(world))))
    kinds |= {
        "rows": _cut(line, Shard(0)),
        "columns": _cut(line, Shard(1)),
        "replicated": _cut(line, Replicate()),
        "backwards": _cut(backwards, Shard(0)),
        "uneven sharded": _sharded({0: 1, 4: 0, 5: world - 1, 8: 1}, 0),
        "sharded columns": _sharded({0: world - 1, 1: 0}, 1),
    }
    if world >= 3:
        kinds["some ranks"] = _cut(DeviceMesh("cpu", [2, 1]), Shard(0))
    if world == 4:
        square, mixed = init_device_mesh("cpu", (2, 2)), DeviceMesh("cpu", [[2, 0], [3, 1]])
        kinds |= {
            "blocks": _cut(square, Shard(1), Shard(0)),
            "hybrid": _cut(square, Replicate(), Shard(0)),
            "mixed": _cut(mixed, Shard(0), Shard(0)),
            "strided": _strided(square),
        }
    return kinds


def _held(tensor: torch.Tensor) -> list[torch.Tensor]:
    if isinstance(tensor, ShardedTensor):
        return [shard.tensor for shard in tensor.local_shards()]
    return [tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()]


def _save_kinds(url: str, shapes: list[tuple[int, ...]]) -> list[str]:
    kinds = _kinds()
    zarrckpt.save({kind: [make(_source(shape)) for shape in shapes] for kind, make in kinds.items()}, url)
    return [*kinds]


def _load_kinds(url: str, shapes: list[tuple[int, ...]], saved: list[str]) -> int:
    """Load all saved tensors into each kind of target, in place. Return the number of pairs of kinds."""
    kinds = _kinds()
    for kind in kinds:
        expected = [_held(kinds[kind](_source(shape))) for shape in shapes]
        state = {name: [kinds[kind](torch.full(shape, -1.0)) for shape in shapes] for name in saved}
        places = {name: [[t.data_ptr() for t in _held(target)] for target in state[name]] for name in saved}
        zarrckpt.load(state, url)
        for name, targets in state.items():
            for target, parts in zip(targets, expected, strict=True):
                same_parts = all(torch.equal(a, b) for a, b in zip(_held(target), parts, strict=True))
                assert same_parts, (name, kind, tuple(target.shape))
        assert places == {name: [[t.data_ptr() for t in _held(target)] for target in state[name]] for name in saved}
    values: dict[str, Any] = dict.fromkeys(saved)
    zarrckpt.load(values, url)
    for name in saved:
        assert all(torch.equal(t, _source(shape)) for t, shape in zip(values[name], shapes, strict=True)), name
    return len(saved) * len(kinds)


def test_every_kind_of_tensor_loads_into_every_other(disk: Place) -> None:
    saved = disk.run(_save_kinds, SHAPES)[0]
    assert len(saved) == 14
    assert disk.run(_load_kinds, SHAPES, saved) == [14 * 14] * 4
    assert disk.run(_load_kinds, SHAPES, saved, world_size=3) == [14 * 10] * 3
    assert disk.run(_load_kinds, SHAPES, saved, world_size=2) == [14 * 9] * 2
    assert _load_kinds(disk.url, SHAPES, saved) == 14 * 3


# -- modules on the meta device, offloaded ones

OFFLOAD = CPUOffloadPolicy(pin_memory=False)


def _small(policy: OffloadPolicy, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = net((5, 7, 3))
    fully_shard(model[0], mesh=mesh, offload_policy=policy)
    fully_shard(model, mesh=mesh, offload_policy=policy)
    return model, torch.optim.Adam(model.parameters(), lr=0.1 * seed)


def _whole(model: nn.Module, optim: torch.optim.Optimizer) -> dict[str, Any]:
    return snapshot({"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optim)})


def _offload(url: str) -> None:
    """Load offloaded and other modules, and state dicts that torch moved to the CPU, into each other."""
    for source in (OFFLOAD, OffloadPolicy()):
        model, optim = _small(source, 1)
        model(torch.ones(2, 5)).sum().backward()
        optim.step()
        saved = _whole(model, optim)
        zarrckpt.save({"model": model, "optim": optim}, url, overwrite=True)
        for target in (OFFLOAD, OffloadPolicy()):
            other, other_optim = _small(target, 2)
            zarrckpt.load({"model": other, "optim": other_optim}, url)
            assert same(_whole(other, other_optim), saved) == []
        for options in (StateDictOptions(cpu_offload=True), StateDictOptions(cpu_offload=True, full_state_dict=True)):
            other, other_optim = _small(target, 3)
            state = {
                "model": get_model_state_dict(other, options=options),
                "optim": get_optimizer_state_dict(other, other_optim, options=options),
            }
            zarrckpt.load(state, url)
            # With a full state dict, only rank 0 has targets. The others load every entry of the checkpoint.
            assert same(snapshot(state), saved) == []


def test_offloaded_modules_and_state_dicts_are_loaded(disk: Place) -> None:
    disk.run(_offload)


def _piece_by_piece(url: str) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for policy in (OFFLOAD, OffloadPolicy()):
        with torch.device("meta"):
            model = net((5, 7, 3))
        for part in (model[0], model):
            fully_shard(part, mesh=mesh, offload_policy=policy)
        parameters = dict(model.named_parameters())
        for name, parameter in parameters.items():
            pieces = {"model": {name: torch.empty_like(parameter, device="cpu")}}
            assert zarrckpt.load(pieces, url).loaded == (f"model.{name}",)
            result = model.load_state_dict(pieces["model"], assign=True, strict=False)
            assert len(result.missing_keys) == len(parameters) - 1 and not result.unexpected_keys
        torch.manual_seed(1)
        source = net((5, 7, 3))
        assert same(snapshot(model.state_dict()), snapshot(source.state_dict())) == []
        assert torch.equal(model(torch.ones(2, 5)), source(torch.ones(2, 5)))


def test_meta_modules_take_loaded_state_dicts(disk: Place) -> None:
    torch.manual_seed(1)
    source = net((5, 7, 3))
    zarrckpt.save({"model": source}, disk.url)
    with torch.device("meta"):
        model = net((5, 7, 3))
    state: dict[str, Any] = {"model": dict.fromkeys(model.state_dict())}
    zarrckpt.load(state, disk.url)
    model.load_state_dict(state["model"], assign=True)
    assert same(snapshot(model.state_dict()), snapshot(source.state_dict())) == []
    disk.run(_piece_by_piece)


@pytest.mark.parametrize("given", ["module", "state dict"])
def test_targets_on_the_meta_device_are_named(given: str, disk: Place) -> None:
    zarrckpt.save({"model": net((5, 7, 3)), "other": torch.ones(2)}, disk.url)
    with torch.device("meta"):
        model = net((5, 7, 3))
    other = torch.zeros(2)
    state = {"other": other, "model": model if given == "module" else model.state_dict()}
    with pytest.raises(zarrckpt.KeyMismatchError, match=r"'model\.0\.bias' is on the meta device") as caught:
        zarrckpt.load(state, disk.url)
    assert "'model.2.weight' is on the meta device" in str(caught.value) and not other.any()


class _WithBuffers(nn.Module):
    """A module with buffers of all kinds that no checkpoint has. ``spare`` is NaN by intention."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4)
        self.reset_buffers()
        self.register_buffer("spare", torch.full((2,), torch.nan), persistent=False)

    def reset_buffers(self) -> None:
        angles = torch.arange(4, device=self.proj.weight.device) / 8
        buffers = {"frequencies": angles, "rotations": torch.polar(torch.ones_like(angles), angles)}
        buffers |= {"mask": torch.full_like(angles, -torch.inf), "places": torch.arange(4), "none": angles[:0]}
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer, persistent=False)


@pytest.mark.filterwarnings("error")
def test_loads_warn_of_buffers_that_to_empty_left_without_values(disk: Place) -> None:
    zarrckpt.save({"model": _WithBuffers()}, disk.url)
    zarrckpt.load({"model": _WithBuffers()}, disk.url)
    with torch.device("meta"):
        allocated, reset, assigned = _WithBuffers(), _WithBuffers(), _WithBuffers()
    # Memory that is not initialized can hold anything.
    for model in (allocated, reset):
        model.to_empty(device="cpu")
        for buffer in model.buffers():
            buffer.fill_(torch.nan if buffer.is_floating_point() or buffer.is_complex() else 0)
    with pytest.warns(UserWarning, match=r"4 buffers.*'model\.frequencies', 'model\.mask', 'model\.rotations'"):
        zarrckpt.load({"model": allocated}, disk.url)
    reset.reset_buffers()
    reset.spare.zero_()
    zarrckpt.load({"model": reset}, disk.url)
    assigned.load_state_dict(allocated.state_dict(), assign=True)
    with pytest.warns(UserWarning, match=r"6 buffers on the meta device.*'model\.frequencies'"):
        zarrckpt.load({"model": assigned}, disk.url)


# -- modules whose entries change their shape, or that load in a special way


class Scales(nn.Linear):
    """Keeps its scales as extra state, and loads without ``strict``."""

    scales: Any = None

    def get_extra_state(self) -> Any:
        return self.scales

    def set_extra_state(self, state: Any) -> None:
        self.scales = state

    def load_state_dict(self, state_dict: Any) -> Any:  # type: ignore[override]
        return super().load_state_dict(state_dict)


@pytest.mark.parametrize(
    ("saved", "fresh"),
    [
        (torch.arange(9.0), torch.zeros(0, dtype=torch.float64)),
        (torch.zeros(0), torch.ones(3)),
        (torch.arange(9.0), None),
        (None, torch.ones(3)),
        ({"amax": torch.ones(2), "more": {"step": 1}}, {"amax": torch.zeros(1)}),
        ([{"amax": torch.ones(2)}, {"amax": torch.ones(3)}], [{"amax": torch.zeros(2)}]),
        ({}, {"amax": torch.zeros(1)}),
    ],
)
def test_extra_state_of_any_form_is_restored_whole(saved: Any, fresh: Any, disk: Place) -> None:
    source, target = Scales(3, 2), Scales(3, 2)
    source.scales, target.scales = saved, fresh
    zarrckpt.save({"model": source}, disk.url)
    zarrckpt.load({"model": target}, disk.url)
    assert same(snapshot({"x": saved}), snapshot({"x": target.scales})) == []
    assert torch.equal(source.weight, target.weight)


def test_modules_may_resize_their_buffers_on_loading(disk: Place) -> None:
    def observers() -> nn.ModuleDict:
        fake = FakeQuantize(MovingAveragePerChannelMinMaxObserver, quant_min=-128, quant_max=127, dtype=torch.qint8)
        return nn.ModuleDict({"a": PerChannelMinMaxObserver(), "b": HistogramObserver(), "c": fake})

    source, target = observers(), observers()
    for observer in source.values():
        observer(torch.randn(5, 7))
    zarrckpt.save({"model": source, "norm": nn.BatchNorm1d(3)}, disk.url)
    zarrckpt.load({"model": target}, disk.url, keys="model")
    assert same(snapshot(source.state_dict()), snapshot(target.state_dict())) == []
    fresh = observers()
    with pytest.raises(
        zarrckpt.KeyMismatchError, match=r"'norm.running_var' has shape \(4,\), the checkpoint has \(3,\)"
    ):
        zarrckpt.load({"model": fresh, "norm": nn.BatchNorm1d(4)}, disk.url)
    assert same(snapshot(observers().state_dict()), snapshot(fresh.state_dict())) == []


def _everything(number: int) -> dict[str, Any]:
    with torch.device("cpu"):
        model = nn.Linear(3, 2)
        optim = torch.optim.Adam(model.parameters())
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, number)
        if number:
            optim.step()
        own = PerRank({"rng": torch.full((5000,), number)})
        state = {"model": model, "optim": optim, "own": own, "x": torch.full((9000,), float(number))}
        return {**state, "pair": (torch.full((3,), number), 1)}


def _save_and_load_everything(folder: str) -> None:
    saved, mine = _everything(3), torch.device("cpu")
    zarrckpt.save(saved, f"{folder}/save")
    zarrckpt.async_save(saved, f"{folder}/async").result()
    with torch.device("cpu"):
        dcp.save({"x": saved["x"]}, checkpoint_id=f"{folder}/torch", no_dist=True)
        torch.save({"x": saved["x"]}, f"{folder}/file.pt")
    zarrckpt.import_checkpoint(f"{folder}/torch", f"{folder}/from torch")
    zarrckpt.import_checkpoint(f"{folder}/file.pt", f"{folder}/from file")
    dcp.save({"x": saved["x"]}, storage_writer=zarrckpt.ZarrStorageWriter(f"{folder}/dcp"), no_dist=True)
    for name in ("save", "async", "from torch", "from file", "dcp"):
        new: dict[str, Any] = {"x": None}
        zarrckpt.load(new, f"{folder}/{name}")
        target = {"x": torch.zeros(9000, device="cpu")}
        dcp.load(target, storage_reader=zarrckpt.ZarrStorageReader(f"{folder}/{name}"), no_dist=True)
        loaded = zarrckpt.open(f"{folder}/{name}").load("x")
        for found in (new, target, loaded):
            assert found["x"].device == mine and torch.equal(found["x"], saved["x"]), name
    fresh = _everything(0)
    zarrckpt.load(fresh, f"{folder}/save")
    for one, other in zip(fresh["optim"].state.values(), saved["optim"].state.values(), strict=True):
        assert torch.equal(one["exp_avg"], other["exp_avg"])
    assert torch.equal(fresh["own"].value["rng"], saved["own"].value["rng"])
    assert torch.equal(fresh["pair"][0], saved["pair"][0])


def test_default_devices_are_ignored(tmp_path: Path) -> None:
    with torch.device("meta"):
        _save_and_load_everything(str(tmp_path / "context"))
    torch.set_default_device("meta")
    try:
        _save_and_load_everything(str(tmp_path / "default"))
    finally:
        torch.set_default_device(None)


# -- objects: their order, their errors


class Gathering:
    """A Stateful object that makes and loads its state with one kind of collective."""

    def __init__(self, kind: str, number: int) -> None:
        self.kind = kind
        self.number = number

    def state_dict(self) -> dict[str, Any]:
        return {"number": self._common(self.number)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.number = self._common(state["number"])

    def _common(self, number: int) -> int:
        """Return the number, which all ranks must have here."""
        mine = torch.tensor([number])
        world = dist.get_world_size()
        if self.kind == "gather":
            parts = [torch.zeros(1, dtype=torch.int64) for _ in range(world)]
            dist.all_gather(parts, mine)
            assert [int(part) for part in parts] == [number] * world, (self.kind, parts, number)
        else:
            dist.all_reduce(mine)
            assert int(mine) == world * number, (self.kind, mine, number)
        return number


def _in_other_orders(url: str) -> None:
    """Save and load in other orders. FSDP1 makes its state dict with collectives as well."""
    rank = dist.get_rank()

    def turned(named: dict[Any, Any]) -> dict[Any, Any]:
        return {key: named[key] for key in [*named][rank:] + [*named][:rank]}

    def state(number: int) -> dict[str, Any]:
        torch.manual_seed(number)
        model = FullyShardedDataParallel(net((5, 7, 3)), device_id=torch.device("cpu"))
        inner = turned({"b": Gathering("reduce", number), "a": Gathering("gather", number + 1), 3: number})
        listed = [Gathering("gather", number + 2), {"x": Gathering("reduce", number + 3)}]
        named: dict[str, Any] = {"B": Gathering("reduce", number + 4), "inner": inner, "listed": listed}
        optim = torch.optim.Adam(model.parameters(), lr=number)
        return turned({"A": Gathering("gather", number + 5), "model": model, **named, "optim": optim})

    def numbers(loaded: dict[str, Any]) -> list[int]:
        inner, (first, second) = loaded["inner"], loaded["listed"]
        objects = [inner["b"], inner["a"], first, second["x"], loaded["B"], loaded["A"]]
        return [inner[3], *(one.number for one in objects)]

    saved = state(7)
    zarrckpt.save(saved, url)
    zarrckpt.async_save(saved, f"{url}-background").result()
    for where in (url, f"{url}-background"):
        loaded = state(20)
        zarrckpt.load(loaded, where)
        assert numbers(loaded) == [7, *range(7, 13)]
        assert loaded["optim"].param_groups[0]["lr"] == 7
        both = [snapshot(get_model_state_dict(one["model"])) for one in (loaded, saved)]
        assert same(*both) == []


def test_objects_in_another_order_on_each_rank_do_not_deadlock(disk: Place) -> None:
    disk.run(_in_other_orders)


class Picky:
    """Refuses its state on one rank."""

    def __init__(self, rank: int | None) -> None:
        self.rank = rank
        self.state = 0

    def state_dict(self) -> dict[str, Any]:
        return {"state": self.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.rank is not None and (not dist.is_initialized() or dist.get_rank() == self.rank):
            raise RuntimeError("this state does not please me")
        self.state = state["state"]


def _load_picky(url: str, rank: int) -> None:
    model = nn.Linear(2, 2)
    optim = torch.optim.Adam(model.parameters())
    try:
        zarrckpt.load({"picky": Picky(rank), "model": model, "optim": optim}, url)
    finally:
        # Objects before it have loaded their whole state.
        assert all(optim.state[parameter]["step"] == 1 for parameter in model.parameters())


@pytest.mark.parametrize("rank", [0, 2])
def test_an_object_that_refuses_its_state_on_one_rank_fails_all_loads(rank: int, disk: Place) -> None:
    model = nn.Linear(2, 2)
    optim = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optim.step()
    zarrckpt.save({"picky": Picky(None), "model": model, "optim": optim}, disk.url)
    message = all_ranks_raise(zarrckpt.CheckpointError, _load_picky, disk.url, rank)
    assert f"rank {rank} failed with RuntimeError" in message and "does not please me" in message
    with pytest.raises(zarrckpt.CheckpointError, match="does not please me") as caught:
        zarrckpt.load({"picky": Picky(0)}, disk.url)
    assert isinstance(caught.value.__cause__, RuntimeError)


# -- different keys on each rank


def _flat(model: nn.Module, optim: torch.optim.Optimizer) -> dict[str, Any]:
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    return {
        "model": get_model_state_dict(model),
        "optim": get_optimizer_state_dict(model, optim, options=options),
    }


def _families(url: str, pairs: dict[str, tuple[str, ...]]) -> None:
    for source, targets in pairs.items():
        model, optim = family(source, seed=1, lr=0.125)
        model(torch.ones(2, 5)).backward()
        optim.step()
        saved = gathered(_flat(model, optim))
        zarrckpt.save({"model": model, "optim": optim}, f"{url}/{source}")
        for target in targets:
            other, other_optim = family(target, seed=2, lr=0.5)
            report = zarrckpt.load({"model": other, "optim": other_optim}, f"{url}/{source}")
            assert report.missing == ()
            assert same(gathered(_flat(other, other_optim)), saved) == [], (source, target)
            assert other_optim.param_groups[0]["lr"] == 0.125 and "betas" in other_optim.param_groups[0]
            other_optim.step()


def test_stages_and_experts_load_into_each_other(disk: Place) -> None:
    pairs = {
        "stages": ("stages", "experts"),
        "stages_dp": ("fsdp", "stages_dp"),
        "experts": ("experts", "stages"),
        "fsdp": ("stages_dp", "experts"),
        "plain": ("stages",),
    }
    disk.run(_families, pairs)


def _load_stages(url: str, keys: str | None) -> tuple[str, ...]:
    model, _ = family("stages", seed=2, lr=0.5)
    before = snapshot(model.state_dict())
    state: dict[str, Any] = {"model": model}
    if dist.get_rank() == 3:
        state = {"step": 0}
    try:
        report = zarrckpt.load(state, url, keys=keys)
    except zarrckpt.KeyMismatchError:
        assert same(snapshot(model.state_dict()), before) == [] and state.get("step", 0) == 0
        raise
    return report.loaded


def test_entries_without_a_target_on_any_rank_are_named(disk: Place) -> None:
    names = [name for part in range(4) for name in (f"parts.{part}.weight", f"parts.{part}.bias")]
    tensors = {name: torch.ones(5, 5) if "weight" in name else torch.ones(5) for name in names}
    shared = {"shared.weight": torch.ones(5, 5), "shared.bias": torch.ones(5)}
    zarrckpt.save({"model": {**tensors, **shared}, "step": 3}, disk.url)
    message = all_ranks_raise(zarrckpt.KeyMismatchError, _load_stages, disk.url, None)
    assert re.findall(r"'([\w.]+)' is in the checkpoint and has no target", message) == [
        "model.parts.3.weight",
        "model.parts.3.bias",
    ]
    # A part for which only one rank has a target.
    loaded = disk.run(_load_stages, "model.parts.1")
    assert loaded == [(), ("model.parts.1.bias", "model.parts.1.weight"), (), ()]


def test_parameter_groups_match_by_parameter_names(disk: Place) -> None:
    """In another order than they were saved in."""

    def make(order: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(order)
        model = net((3, 4, 2))
        groups = [
            {"params": [p for name, p in model.named_parameters() if "weight" in name], "lr": 0.25 * order},
            {"params": [p for name, p in model.named_parameters() if "bias" in name], "lr": 0.5 * order},
        ]
        return model, torch.optim.Adam(groups[::order])

    model, optim = make(1)
    model(torch.ones(1, 3)).sum().backward()
    optim.step()
    zarrckpt.save({"model": model, "optim": optim}, disk.url)
    other, other_optim = make(-1)
    other_optim.param_groups[0]["lr"] = other_optim.param_groups[1]["lr"] = 3.0
    zarrckpt.load({"model": other, "optim": other_optim}, disk.url)
    assert [group["lr"] for group in other_optim.param_groups] == [0.5, 0.25]
    assert same(snapshot(_flat(other, other_optim)), snapshot(_flat(model, optim))) == []


# -- checks before anything is written


def _saved() -> dict[str, Any]:
    model = net((5, 7, 3))
    extra = {"list": [torch.ones(2), {"k": torch.ones(3)}], 7: "seven"}
    return {"model": model, "w": torch.ones(8, 3), "v": torch.ones(4), "value": {"step": 3}, "extra": extra}


def _faulty(rank: int) -> dict[str, Any]:
    """Return targets of which some are wrong, on one rank only."""
    wrong = not dist.is_initialized() or dist.get_rank() == rank
    good = {"list": [torch.zeros(2), {"k": torch.zeros(3)}], 7: ""}
    bad = {"list": [torch.zeros(3), {"k": torch.zeros(3, dtype=torch.int64)}], 7: "", "absent": 0}
    return {
        "v": torch.zeros(1).expand(4) if wrong else torch.zeros(4),
        "value": {"step": torch.zeros(()) if wrong else 0},
        "extra": bad if wrong else good,
        "w": torch.zeros(8, 3),
        "model": net((5, 8, 3)) if wrong else net((5, 7, 3)),
    }


FAULTS = (
    "'v' is an expanded view",
    "'value.step' is a tensor",
    "'extra.list.0' has shape (3,), the checkpoint has (2,)",
    "'extra.absent' is not in the checkpoint",
    "'model.0.weight' has shape (8, 5), the checkpoint has (7, 5)",
    "'model.2.weight' has shape (3, 8), the checkpoint has (3, 7)",
)
DTYPE = "'extra.list.1.k' has dtype torch.int64, the checkpoint has torch.float32"


def _load_faulty(url: str, rank: int, options: dict[str, Any]) -> None:
    state = _faulty(rank)
    before = snapshot({**state, "model": state["model"].state_dict()})
    try:
        zarrckpt.load(state, url, **options)
    finally:
        assert same(snapshot({**state, "model": state["model"].state_dict()}), before) == []


def test_all_mismatches_are_listed_before_a_write(disk: Place) -> None:
    zarrckpt.save(_saved(), disk.url)
    cases: list[tuple[dict[str, Any], tuple[str, ...], tuple[str, ...]]] = [
        ({}, (*FAULTS, DTYPE), ()),
        ({"allow_cast": True}, FAULTS, (DTYPE,)),
        ({"strict": False}, (*FAULTS[:3], DTYPE), (FAULTS[3],)),
        ({"keys": "extra.list"}, (FAULTS[2], DTYPE), (FAULTS[0], FAULTS[3], FAULTS[4])),
    ]
    for options, named, unnamed in cases:
        with pytest.raises(zarrckpt.KeyMismatchError) as caught:
            _load_faulty(disk.url, 0, options)
        for message in (
            str(caught.value),
            all_ranks_raise(zarrckpt.KeyMismatchError, _load_faulty, disk.url, 2, options),
        ):
            assert all(fault in message for fault in named), (options, message)
            assert not any(fault in message for fault in unnamed), (options, message)


# -- containers that are loaded whole


class Kept:
    """A Stateful whose state is any dict."""

    def __init__(self, state: dict[Any, Any]) -> None:
        self.first = self.state = state

    def state_dict(self) -> dict[Any, Any]:
        return self.state

    def load_state_dict(self, state: dict[Any, Any]) -> None:
        self.state = state


def _ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape)


STATES: dict[str, tuple[dict[Any, Any], dict[Any, Any]]] = {
    "more keys": ({"n": 1, "left": {"ids": [62, 63], "t": _ones(2)}}, {"n": 0}),
    "fewer keys": ({"n": 1}, {"n": 0, "left": {"ids": [1], "t": _ones(3)}}),
    "more items": ({"l": [_ones(2)] * 3, "d": [{"a": 1}, {"b": 2}]}, {"l": [_ones(2) * 0], "d": [{"a": 0}]}),
    "fewer items": ({"l": [_ones(2)], "d": [{"a": 1}]}, {"l": [_ones(2) * 0] * 3, "d": [{"a": 0}, {"b": _ones(1)}]}),
    "emptied": ({"d": {}, "l": []}, {"d": {"a": 1, "t": _ones(1)}, "l": [_ones(1), {"x": 1}]}),
    "nothing": ({}, {"t": _ones(2), "n": 1}),
    "values for dicts": ({"x": 5, "t": _ones(2)}, {"x": {"a": _ones(1)}, "t": {"b": 1}}),
    "dicts for values": ({"x": {"a": _ones(1)}, "y": {"b": 1}}, {"x": 5, "y": [1]}),
    "a list for a dict": ({"x": [{"a": 1}, _ones(1)]}, {"x": {"0": {"a": 3}, "k": 1}}),
    "a dict for a list": ({"x": {"0": {"a": 3}, "k": 1}}, {"x": [{"a": 1}, {}]}),
    "counters": ({"c": Counter("aab"), "d": defaultdict(list, k=[1])}, {"c": Counter(), "d": defaultdict(list)}),
    "no counts": ({"c": Counter(), "d": defaultdict(list)}, {"c": Counter("a"), "d": defaultdict(list, k=[1])}),
    "order": ({"o": OrderedDict(b=1, a=_ones(1))}, {"o": OrderedDict(a=_ones(1) * 0)}),
    "integer keys": ({"x": {1: 2, 3: {4: _ones(1)}}}, {"x": {1: 0}}),
}
"""A saved state, and the state of the target."""


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        alike = isinstance(other, dict) and list(one) == list(other)
        return alike and all(_is_equal(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return isinstance(other, list) and len(one) == len(other) and all(map(_is_equal, one, other))
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)


@pytest.mark.parametrize("name", STATES)
@pytest.mark.filterwarnings("ignore:the checkpoint lacks")
def test_statefuls_and_per_ranks_get_the_saved_state(name: str, disk: Place) -> None:
    saved, old = STATES[name]
    zarrckpt.save({"a": Kept(saved), "b": PerRank(Kept(saved)), "c": PerRank(saved)}, disk.url)
    stateful, inside, value = Kept(copy.deepcopy(old)), Kept(copy.deepcopy(old)), copy.deepcopy(old)
    state = {"a": stateful, "b": PerRank(inside), "c": PerRank(value)}
    report = zarrckpt.load(state, disk.url)
    for found in (stateful.state, inside.state, state["c"].value):
        assert _is_equal(saved, found), found
        assert all(type(found[key]) is type(old[key]) for key in found.keys() & {"c", "d", "o"})
    assert state["c"].value is value and report.missing == report.unexpected == ()
    # Not the object's own containers, which load_state_dict may clear first.
    assert stateful.state is not stateful.first


def test_a_stateful_gets_new_tensors_if_its_own_do_not_fit(disk: Place) -> None:
    saved = {"same": _ones(2), "shape": _ones(3), "dtype": torch.arange(2)}
    zarrckpt.save({"kept": Kept(saved)}, disk.url)
    for strict in (True, False):
        old = {"same": torch.zeros(2), "shape": torch.zeros(2), "dtype": torch.zeros(2), "lost": torch.zeros(1)}
        kept = Kept(old)
        with nullcontext() if not strict else pytest.warns(UserWarning, match=r"kept\.lost"):
            report = zarrckpt.load({"kept": kept}, disk.url, strict=strict)
        assert _is_equal(saved if strict else {**saved, "lost": old["lost"]}, kept.state)
        assert report.missing == (() if strict else ("kept.lost",))
        assert kept.state["same"] is old["same"] and not old["shape"].any() and not old["dtype"].any()
    with pytest.raises(zarrckpt.KeyMismatchError, match=r"'other\.same' is not in the checkpoint"):
        zarrckpt.load({"other": kept}, disk.url)


def test_plain_containers_get_missing_entries(disk: Place) -> None:
    record = {"lr": 1, "deep": {"a": {"x": _ones(1)}}, "l": [{"a": 1}, {"b": 2}], "h": [_ones(1)] * 3}
    weights = {"a.weight": _ones(2), "b.weight": _ones(3)}
    zarrckpt.save(
        {"record": record, "weights": weights, "app": {"w": weights, "n": 1, "model": nn.Linear(1, 1)}}, disk.url
    )
    mine: dict[str, Any] = {"lr": 0, "deep": {}, "l": [{"a": 0}], "h": [torch.zeros(1)]}
    first, part = mine["h"][0], {"a.weight": torch.zeros(2)}
    state: dict[str, Any] = {"record": mine, "weights": part, "app": {"n": 0}}
    report = zarrckpt.load(state, disk.url)
    assert state["record"] is mine and mine["h"][0] is first and _is_equal(record, mine)
    # A dict of only tensors, like a module's state, loads the entries that it names.
    assert [*part] == ["a.weight"] and "weights.b.weight" in report.unexpected
    mine["l"], mine["h"] = [{"a": 0}, {"a": 0}, {}], [torch.zeros(1)] * 4
    with pytest.raises(zarrckpt.KeyMismatchError, match=r"'record\.h\.3' is not in the checkpoint") as caught:
        zarrckpt.load(state, disk.url)
    assert "record.l.2" not in str(caught.value)
    zarrckpt.load(state, disk.url, keys="record.l")
    assert mine["l"] == record["l"]
    picked: dict[str, Any] = {"record": {"lr": 0}}
    zarrckpt.load(picked, disk.url, keys="record.lr")
    assert picked == {"record": {"lr": 1}}


def _grow(url: str) -> None:
    """Save and load a Stateful with a layer that differs on each rank. A new one has nothing else."""
    rank = dist.get_rank()
    saved = {"counts": {"a": 1}, f"layer{rank}": _ones(2) * rank, "mean": _ones(2)}
    zarrckpt.save({"stage": Kept(saved)}, url)
    kept = Kept({f"layer{rank}": torch.zeros(2)})
    report = zarrckpt.load({"stage": kept}, url)
    assert _is_equal(dict(sorted(kept.state.items())), saved)
    assert report.unexpected == (f"stage.layer{1 - rank}",) and "stage.mean" in report.loaded


def test_stages_in_statefuls_get_only_their_own_entries(disk: Place) -> None:
    disk.run(_grow, world_size=2)


# -- several boxes of one tensor on one rank


def _wrapped(source: torch.Tensor) -> DTensor:
    """Return a DTensor whose local part is a list of shards, as in torchrec: rows 2r and 2r + 1 of rank r."""
    rank = dist.get_rank()
    rows = [source[n : n + 1].clone() for n in (2 * rank, 2 * rank + 1)]
    local = LocalShardsWrapper(rows, [(2 * rank, 0), (2 * rank + 1, 0)])
    mesh = init_device_mesh("cpu", (4,))
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=source.shape, stride=source.stride())


def _save_and_load_wrapped(url: str) -> None:
    source = torch.arange(40.0).reshape(8, 5)
    zarrckpt.save({"table": _wrapped(source)}, url)
    whole, wrapped = torch.zeros(8, 5), _wrapped(torch.zeros(8, 5))
    zarrckpt.load({"table": whole}, url)
    report = zarrckpt.load({"table": wrapped}, url)
    rank = dist.get_rank()
    assert torch.equal(whole, source)
    assert torch.equal(torch.cat(wrapped.to_local().local_shards()), source[2 * rank : 2 * rank + 2])
    # One chunk of 160 bytes and a checksum, though it holds two boxes of this rank.
    assert report.nbytes == 164


def test_local_shards_of_one_dtensor_are_loaded(tmp_path: Path) -> None:
    run_ranks(_save_and_load_wrapped, str(tmp_path / "one"))


# -- ranks that open different saves


class _LateReader(zarrckpt.ZarrStorageReader):
    """On rank 1, opens the checkpoint after it was replaced."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._where = url

    def read_metadata(self) -> Any:
        found = super().read_metadata()
        dist.barrier()
        if dist.get_rank() == 0:
            writer = zarrckpt.ZarrStorageWriter(undeletable(self._where), overwrite=True)
            dcp.save({"w": torch.full((8,), 2.0)}, storage_writer=writer, no_dist=True)
        dist.barrier()
        return super().read_metadata() if dist.get_rank() == 1 else found


def _load_while_replaced(url: str) -> None:
    target = {"w": torch.zeros(8)}
    with pytest.raises(CheckpointException) as caught:
        dcp.load(target, storage_reader=_LateReader(url))
    errors = [error for error, _ in caught.value.failures.values()]
    assert errors and all(isinstance(error, zarrckpt.CheckpointReplacedError) for error in errors), errors
    assert target["w"].eq(0).all()


def test_ranks_that_open_different_saves_raise_an_error(tmp_path: Path) -> None:
    zarrckpt.save({"w": torch.ones(8)}, tmp_path / "one")
    run_ranks(_load_while_replaced, str(tmp_path / "one"), world_size=2)
