"""``no_dist=True``: a save or load by one process, independent of any process group."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness.models import make_run
from harness.ranks import idle_meshes, run_ranks
from harness.torch_internals import agree
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import zarrckpt


def _traces() -> dict[str, Any]:
    """Return the traces that a collective, a group or a mesh would leave on this rank."""
    world = dist.distributed_c10d._world
    store = dist.distributed_c10d._get_default_store()
    return {
        "keys": store.num_keys(),
        "groups": (world.group_count, [*world.pg_names.values()]),
        "meshes": idle_meshes(),
        "collectives": {name: group._get_sequence_number_for_group() for group, name in world.pg_names.items()},
        "plans": dict(agree._kept_plans),
    }


def _trained(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.parallel.DistributedDataParallel(nn.Linear(3, 5))
    optim = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.ones(2, 3)).sum().backward()
    optim.step()
    return model, optim


def _state(model: nn.Module, optim: torch.optim.Optimizer, number: float) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    copied = distribute_tensor(torch.full((4,), number), mesh, [Replicate()], src_data_rank=None)
    own = zarrckpt.PerRank(torch.full((2,), number))
    return {
        "model": model,
        "optim": optim,
        "copied": copied,
        "own": own,
        "plain": torch.full((3,), number),
        "n": number,
    }


def _one_rank_alone(folder: str, who: int) -> None:
    """Call all functions on one rank, while the other one is in the next collective of the training program."""
    model, optim = _trained(0)
    fresh, fresh_optim = _trained(1)
    with torch.no_grad():
        for parameter in fresh.parameters():
            parameter.zero_()
    state, target = _state(model, optim, 7.0), _state(fresh, fresh_optim, 0.0)
    whole = torch.arange(8.0)
    sharded = distribute_tensor(torch.zeros(8), init_device_mesh("cpu", (2,)), [Shard(0)], src_data_rank=None)
    dist.barrier()
    if dist.get_rank() == who:
        before = _traces()
        assert zarrckpt.plan_report(state, no_dist=True).ranks == 1
        report = zarrckpt.save(state, f"{folder}/save", no_dist=True)
        assert len(report.rank_bytes) == 1
        zarrckpt.async_save(state, f"{folder}/async", no_dist=True).result(timeout=60)
        for url in (f"{folder}/save", f"{folder}/async"):
            assert zarrckpt.open(url).info.world_size == 1
            ckpt = zarrckpt.open(url)
            assert ckpt["own.ranks"][0, 0] == 7
            assert ckpt.entry("own.ranks").ranks == (who,), "a PerRank keeps the rank's number"
        assert not zarrckpt.load(target, f"{folder}/save", no_dist=True).missing
        for name, parameter in fresh.state_dict().items():
            assert torch.equal(parameter, model.state_dict()[name])
        moments = [next(iter(one.state.values()))["exp_avg"] for one in (optim, fresh_optim)]
        assert torch.equal(*moments) and target["n"] == 7 and target["own"].value[0] == 7
        assert target["copied"].to_local()[0] == 7
        zarrckpt.save({"w": whole}, f"{folder}/whole", no_dist=True)
        zarrckpt.load({"w": sharded}, f"{folder}/whole", no_dist=True)
        assert torch.equal(sharded.to_local(), whole.chunk(2)[who]), "of a DTensor its own part"
        torch.save({"w": whole}, f"{folder}/file.pt")
        assert len(zarrckpt.import_checkpoint(f"{folder}/file.pt", f"{folder}/imported").rank_bytes) == 1
        # Errors are this rank's, too, and do not name another one.
        for verb in (zarrckpt.save, zarrckpt.async_save):
            with pytest.raises(zarrckpt.CheckpointExistsError) as caught:
                verb(state, f"{folder}/save", no_dist=True)
            assert not getattr(caught.value, "__notes__", [])
        with pytest.raises(zarrckpt.CheckpointError, match=r"^RuntimeError: does not please me"):
            zarrckpt.save({"odd": _Fails()}, f"{folder}/odd", no_dist=True)
        with pytest.raises(zarrckpt.CheckpointNotFoundError):
            zarrckpt.load(target, f"{folder}/nothing", no_dist=True)
        assert _traces() == before
    dist.barrier()
    zarrckpt.save(_state(model, optim, 8.0), f"{folder}/all")
    assert zarrckpt.open(f"{folder}/all").info.world_size == 2


class _Fails:
    def state_dict(self) -> dict[str, Any]:
        raise RuntimeError("does not please me")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Never called."""


@pytest.mark.parametrize("who", [0, 1])
def test_one_rank_alone_waits_for_no_other(who: int, tmp_path: Path) -> None:
    run_ranks(_one_rank_alone, str(tmp_path), who, world_size=2, timeout=60)


def _each_rank_its_own(folder: str) -> None:
    """Save separately between collective saves, which keep a plan and a mesh. These are used again afterwards."""
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (3,))
    shared = {"w": distribute_tensor(torch.arange(7.0), mesh, [Shard(0)], src_data_rank=None)}
    zarrckpt.save(shared, f"{folder}/shared-1")
    before, kept = idle_meshes(), agree._kept_plans[0, 1, 2]
    assert [*before] == [((0, 1, 2), "foreground")]
    # The same names and forms as in the group's plan, but other numbers on each rank, which are not compared.
    own = {"w": torch.arange(7.0) + 100 * rank, "step": rank}
    for number in range(2):
        zarrckpt.async_save(own, f"{folder}/{number}/own-{rank}", no_dist=True).result(timeout=60)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            zarrckpt.save(own, f"{folder}/{number + 2}/own-{rank}", no_dist=True)
    zarrckpt.save(shared, f"{folder}/shared-2")
    assert idle_meshes() == before and agree._kept_plans[0, 1, 2] is kept
    for number in range(4):
        target = {"w": torch.zeros(7), "step": -1}
        zarrckpt.load(target, f"{folder}/{number}/own-{(rank + number) % 3}", no_dist=True)
        other = (rank + number) % 3
        assert torch.equal(target["w"], torch.arange(7.0) + 100 * other) and target["step"] == other


def test_each_rank_saves_and_loads_its_own_checkpoint(tmp_path: Path) -> None:
    run_ranks(_each_rank_its_own, str(tmp_path), world_size=3)
    for number in (1, 2):
        assert (zarrckpt.open(tmp_path / f"shared-{number}")["w"][:] == torch.arange(7.0).numpy()).all()


def _sharded(folder: str) -> None:
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    other = DeviceMesh("cpu", [2, 3])
    model = fully_shard(nn.Linear(4, 4), mesh=mesh["a"])
    fsdp1 = FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"))
    dist.barrier()
    if rank == 1:
        states: dict[str, Any] = {
            "dtensor": {
                "fine": torch.ones(2),
                "deep": {"w": distribute_tensor(torch.ones(8, 3), mesh, [Replicate(), Shard(1)], src_data_rank=None)},
            },
            "elsewhere": {"w": distribute_tensor(torch.ones(8), other, [Replicate()], src_data_rank=None)},
            "fsdp2": {"model": model},
        }
        names = {"dtensor": "'deep.w'", "elsewhere": "'w'", "fsdp2": "'model.weight'"}
        for name, state in states.items():
            with pytest.raises(zarrckpt.UnsupportedLayoutError, match=names[name]):
                zarrckpt.save(state, f"{folder}/{name}", no_dist=True)
            with pytest.raises(zarrckpt.UnsupportedLayoutError, match=names[name]):
                zarrckpt.async_save(state, f"{folder}/{name}", no_dist=True).result(timeout=60)
        for verb in (zarrckpt.save, zarrckpt.async_save, zarrckpt.load):
            with pytest.raises(zarrckpt.UnsupportedValueError, match="'model' has a module of FSDP1"):
                verb({"model": fsdp1}, f"{folder}/fsdp1", no_dist=True)
        for verb in (zarrckpt.save, zarrckpt.async_save, zarrckpt.load):
            with pytest.raises(ValueError, match="no_dist"):
                verb({}, f"{folder}/both", no_dist=True, process_group=dist.group.WORLD)
    dist.barrier()


def test_tensors_sharded_over_other_ranks_are_refused_by_name(tmp_path: Path) -> None:
    run_ranks(_sharded, str(tmp_path), world_size=4)
    assert not [*tmp_path.iterdir()]


def _load_own_part(url: str) -> None:
    """Load a sharded model and its optimizer on one rank alone. No step of torch's state dicts may be a collective."""
    run = make_run("fsdp2")
    run.train(1)
    zarrckpt.save(run.state, url)
    other = make_run("fsdp2", seed=4, lr=0.3)
    dist.barrier()
    if dist.get_rank() == 1:
        state = other.state
        zarrckpt.load(state, url, no_dist=True)
        other.resume(state)
    dist.barrier()
    pairs = [*zip(run.model.parameters(), other.model.parameters(), strict=True)]
    same = [torch.equal(_local(a), _local(b)) for a, b in pairs]
    if dist.get_rank() == 1:
        slots = [(value, other.optim.state[b][name]) for a, b in pairs for name, value in run.optim.state[a].items()]
        assert all(same) and slots and all(torch.equal(_local(a), _local(b)) for a, b in slots)
    else:
        assert not all(same)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def test_one_rank_loads_its_part_of_a_sharded_model(tmp_path: Path) -> None:
    run_ranks(_load_own_part, str(tmp_path / "one"), world_size=2, timeout=60)


def test_no_dist_has_no_effect_without_a_process_group(tmp_path: Path) -> None:
    zarrckpt.save({"w": torch.ones(2)}, tmp_path / "one", no_dist=True)
    target = {"w": torch.zeros(2)}
    zarrckpt.load(target, tmp_path / "one", no_dist=True)
    assert target["w"].sum() == 2
