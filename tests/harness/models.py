"""A small model under every kind of parallelism, its training, and its state as plain arrays to compare.

All in float64, so that losses after a resume can be compared tightly between world sizes. Their reductions add up in
different orders.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed._state_dict_utils import _create_cpu_state_dict
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

KINDS = ("plain", "ddp", "fsdp2", "fsdp2_tp", "hsdp", "fsdp1", "compiled")


class Net(nn.Module):
    """Uneven sizes if the kind of parallelism allows them, one buffer, and one parameter without a gradient.

    Few different shapes: a DTensor of another shape takes each operation of an optimizer milliseconds more.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 8)
        self.up = nn.Linear(8, 8)
        self.down = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 13)
        self.unused = nn.Parameter(torch.ones(3, 2))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        hidden = nn.functional.dropout(self.embed(tokens), 0.3)
        return self.head(self.norm(hidden + self.down(torch.relu(self.up(hidden)))))


@dataclass
class Run:
    """The objects that a training run saves and resumes."""

    model: nn.Module
    optim: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    step: int = 0

    @property
    def state(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "optim": self.optim,
            "schedule": self.schedule,
            "step": self.step,
            "rng": {"torch": torch.get_rng_state(), "python": random.getstate()},
        }

    def resume(self, state: Mapping[str, Any]) -> None:
        """Set the values of a loaded ``state`` that are not loaded in place."""
        self.step = state["step"]
        torch.set_rng_state(state["rng"]["torch"])
        random.setstate(state["rng"]["python"])

    def train(self, steps: int) -> list[float]:
        """Return the loss of each step. All ranks see the same batch."""
        losses = []
        for _ in range(steps):
            tokens = torch.tensor([random.randrange(10) for _ in range(12)])
            loss = nn.functional.cross_entropy(self.model(tokens), (tokens + 1) % 10)
            self.optim.zero_grad()
            loss.backward()
            self.optim.step()
            self.schedule.step()
            self.step += 1
            losses.append(loss.item())
        return losses


def make_run(kind: str, *, seed: int = 0, lr: float = 1e-2) -> Run:
    """Return a fresh run. Other seeds and learning rates show that a resumed run got everything from the checkpoint."""
    torch.manual_seed(seed)
    random.seed(seed)
    model = parallel(kind, Net().double())
    optim = torch.optim.AdamW(
        [
            {"params": [p for n, p in model.named_parameters() if "norm" not in n]},
            {"params": [p for n, p in model.named_parameters() if "norm" in n], "weight_decay": 0.0},
        ],
        lr=lr,
    )
    return Run(model, optim, torch.optim.lr_scheduler.LinearLR(optim, 0.1, total_iters=7))


def parallel(kind: str, model: nn.Module) -> nn.Module:
    """Wrap or shard a model over all ranks of the default group."""
    if kind == "plain":
        return model
    if kind == "compiled":
        return torch.compile(model, backend="eager")  # type: ignore[return-value]
    if kind == "ddp":
        return DistributedDataParallel(model, find_unused_parameters=True)
    if kind == "fsdp1":
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    world = dist.get_world_size()
    if kind == "hsdp":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    elif kind == "fsdp2_tp":
        both = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(model, both["tp"], plan)
        mesh = both["dp"]
    else:
        mesh = init_device_mesh("cpu", (world,))
    for layer in (model.up, model.down):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def snapshot(state: Any, prefix: str = "") -> dict[str, Any]:
    """Return flat name -> full numpy array or value, of any nested state. Collective if it holds DTensors."""
    flat: dict[str, Any] = {}
    items = state.items() if isinstance(state, Mapping) else enumerate(state)
    for key, value in items:
        if isinstance(value, Mapping) or (isinstance(value, list) and value and isinstance(value[0], Mapping)):
            flat |= snapshot(value, f"{prefix}{key}.")
        elif isinstance(value, torch.Tensor):
            flat[f"{prefix}{key}"] = full_tensor(value).detach().numpy(force=True).copy()
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def full_tensor(value: torch.Tensor) -> torch.Tensor:
    """Return all of a tensor, from all ranks. Collective if it is sharded."""
    if isinstance(value, DTensor):
        return value.full_tensor()
    if not isinstance(value, ShardedTensor):
        return value
    whole = torch.zeros(value.size(), dtype=value.dtype)
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, [(s.metadata.shard_offsets, s.tensor.detach()) for s in value.local_shards()])
    for offsets, part in (piece for pieces in parts for piece in pieces):
        whole[tuple(slice(o, o + n) for o, n in zip(offsets, part.shape, strict=True))] = part
    return whole


def same(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return the names in which two snapshots differ in any bit."""
    differ = sorted(one.keys() ^ other.keys())
    for name in one.keys() & other.keys():
        a, b = one[name], other[name]
        if isinstance(a, np.ndarray):
            equal = (
                isinstance(b, np.ndarray) and a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
            )
        else:
            equal = type(a) is type(b) and a == b
        if not equal:
            differ.append(name)
    return differ


class CachingStager(BlockingAsyncStager):
    """DCP's stager that keeps its buffers, unpinned because pinning needs a GPU."""

    def __init__(self) -> None:
        super().__init__(cache_staged_state_dict=True)

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        if self.state_dict_cache is None:
            self.state_dict_cache = _create_cpu_state_dict(state_dict)
        return super().stage(state_dict)


class NewLayer(nn.Module):
    """Version 2, which transposes the weights of other versions."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.arange(9.0).view(3, 3))

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *others: Any) -> None:
        if metadata.get("version") != 2:
            state[f"{prefix}w"] = state[f"{prefix}w"].T
        super()._load_from_state_dict(state, prefix, metadata, *others)
