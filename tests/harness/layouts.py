"""Models under layouts whose keys, shards or meshes differ, for tests that load each of them into each other."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from harness.models import snapshot
from harness.ranks import run_ranks


@dataclass(frozen=True)
class Place:
    """The url for a test's checkpoints, and the environment in which the ranks can reach it."""

    url: str
    env: dict[str, str] = field(default_factory=dict)

    def run(self, function: Callable[..., Any], *args: Any, world_size: int = 4, **options: Any) -> list[Any]:
        """Call ``function(url, *args)`` on every rank."""
        return run_ranks(function, self.url, *args, world_size=world_size, env=self.env, **options)


# -- one model, laid out in many ways over four ranks

EVEN, UNEVEN = (5, 8, 4), (5, 10, 5)
"""Widths of its layers."""


def net(sizes: tuple[int, ...]) -> nn.Sequential:
    """Return linear layers of these widths, with ReLU between them."""
    layers = [nn.Linear(a, b) for a, b in itertools.pairwise(sizes)]
    return nn.Sequential(*(part for layer in layers for part in (layer, nn.ReLU())))


def laid_out(layout: str, sizes: tuple[int, ...], seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the model under fsdp1, hsdp1, fsdp2, hsdp2, tp, fsdp1_tp, fsdp2_tp or hsdp2_tp, and its optimizer."""
    torch.manual_seed(seed)
    model: nn.Module = net(sizes)
    name, _, tp = layout.partition("_")
    mesh = init_device_mesh("cpu", (4,))
    if name == "tp":
        _tensor_parallel(model, mesh)
    elif tp:
        hybrid = name == "hsdp2"
        names = ("replicate", "dp", "tp") if hybrid else ("dp", "tp")
        whole = init_device_mesh("cpu", (2, 1, 2) if hybrid else (2, 2), mesh_dim_names=names)
        _tensor_parallel(model, whole["tp"])
        mesh = whole["replicate", "dp"] if hybrid else whole["dp"]
    elif name.startswith("hsdp"):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "dp"))
    if name in ("fsdp2", "hsdp2"):
        fully_shard(model[2], mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif name in ("fsdp1", "hsdp1"):
        strategy = ShardingStrategy.HYBRID_SHARD if name == "hsdp1" else ShardingStrategy.FULL_SHARD
        cpu = torch.device("cpu")
        model = FullyShardedDataParallel(
            model, device_mesh=mesh, sharding_strategy=strategy, device_id=cpu, use_orig_params=True
        )
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


def _tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


# -- one model of which ranks hold different parts

PARTS = ("0", "1", "2", "3")


class Parts(nn.Module):
    """Some of the parts of a model, and the shared part if this rank has it."""

    def __init__(self, parts: tuple[str, ...], shared: bool, seed: int) -> None:
        super().__init__()
        self.parts = nn.ModuleDict()
        for part in parts:
            torch.manual_seed(100 * seed + int(part))
            self.parts[part] = nn.Linear(5, 5)
        torch.manual_seed(100 * seed + 99)
        self.shared = nn.Linear(5, 5) if shared else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.shared is None else self.shared(x)
        return torch.stack([part(x) for part in self.parts.values()]).sum()


def family(name: str, *, seed: int, lr: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the model's parts in one of these layouts, and their optimizer.

    They are pipeline stages (``stages``: one per rank, ``stages_dp``: two, each on two ranks), or ``experts`` beside
    shared layers. Or all are on every rank, sharded (``fsdp``) or ``plain``.
    """
    rank = dist.get_rank()
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "other"))
    half = PARTS[:2] if rank % 2 == 0 else PARTS[2:]
    if name == "stages":
        model = Parts((str(rank),), rank == 0, seed)
    elif name == "stages_dp":
        model = fully_shard(Parts(half, rank % 2 == 0, seed), mesh=square["dp"])
    elif name == "experts":
        model = Parts(half, True, seed)
        for part in model.parts.values():
            fully_shard(part, mesh=square["dp"])
        fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
    else:
        model = Parts(PARTS, True, seed)
        if name == "fsdp":
            fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
    return model, torch.optim.Adam(model.parameters(), lr=lr)


def gathered(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state of all ranks together: flat name -> full array or value. Collective."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, snapshot(state))
    return {name: value for one in everyone for name, value in one.items()}
