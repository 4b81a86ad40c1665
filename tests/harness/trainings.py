"""Trainings to interrupt: a model of every kind with Adam, a Stateful object, and a record of tensors and bytes."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from harness import models

# The state dicts of "fsdp1" hold ShardedTensors, those of the other sharded kinds DTensors.
KINDS = ("plain", "ddp", "fsdp1", "fsdp1_mesh", "fsdp1_hsdp", "fsdp1_tp", "fsdp2", "hsdp", "fsdp2_tp")
TWO_DIMENSIONS = ("fsdp1_hsdp", "fsdp1_tp", "hsdp", "fsdp2_tp")
"""Kinds with a mesh of two dimensions. They need four ranks."""


class Dice:
    """A Stateful object."""

    def __init__(self, seed: int) -> None:
        self.faces = torch.rand(10, 10, generator=torch.Generator().manual_seed(seed))
        self.seed = seed

    def state_dict(self) -> dict[str, Any]:
        return {"faces": self.faces, "seed": self.seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.faces, self.seed = state["faces"], state["seed"]


@dataclass
class Record:
    """The state of the training itself: tensors, and a ``BytesIO`` with bytes that torch saved."""

    step: int = 0
    losses: list[float] = field(default_factory=list)

    def state_dict(self) -> dict[str, Any]:
        losses = io.BytesIO()
        torch.save(self.losses, losses)
        last = self.losses[-1] if self.losses else float("nan")
        return {
            "step": torch.tensor(self.step, dtype=torch.int32),
            "last": torch.tensor(last, dtype=torch.float64),
            "losses": losses,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert isinstance(state["losses"], io.BytesIO)
        state["losses"].seek(0)
        self.step, self.losses = int(state["step"]), torch.load(state["losses"], weights_only=True)
        assert self.losses[-1:] == [float(state["last"])]


@dataclass
class Training:
    """One rank's part of a training, in float64. All ranks see the same batches."""

    model: nn.Module
    optim: torch.optim.Optimizer
    dice: Dice
    record: Record = field(default_factory=Record)

    @property
    def objects(self) -> dict[str, Any]:
        """Return the state for ``zarrckpt.save``."""
        return {"model": self.model, "optim": self.optim, "dice": self.dice, "record": self.record}

    @property
    def dicts(self) -> dict[str, Any]:
        """Return the state for ``dcp.save``."""
        model, optim = get_state_dict(self.model, self.optim)
        return {**self.objects, "model": model, "optim": optim}

    def take(self, state: dict[str, Any]) -> None:
        """Set the model's and the optimizer's state that was loaded into ``dicts``."""
        set_state_dict(self.model, self.optim, model_state_dict=state["model"], optim_state_dict=state["optim"])

    def train(self, steps: int = 1) -> list[float]:
        """Train some steps. Return all losses so far. Batch and dropout depend on the number of the step only."""
        for _ in range(steps):
            torch.manual_seed(self.record.step)
            tokens = torch.randint(0, 10, (12,))
            loss = nn.functional.cross_entropy(self.model(tokens), (tokens + 1) % 10)
            loss.backward()
            self.optim.step()
            self.optim.zero_grad()
            self.record.step += 1
            self.record.losses.append(loss.item())
        return [*self.record.losses]

    def snapshot(self) -> dict[str, Any]:
        """Return all of the state as full arrays and plain values. Collective."""
        state = self.dicts
        return models.snapshot(
            {
                **{name: state[name] for name in ("model", "optim")},
                "dice": self.dice.state_dict(),
                "record": {"step": self.record.step, "losses": [*self.record.losses]},
            }
        )


def make(kind: str, *, seed: int = 0, lr: float = 1e-2, backend: Callable[..., Any] | None = None) -> Training:
    """Return a training that has made no step yet. With a ``backend``, its model is compiled."""
    torch.manual_seed(seed)
    net = models.Net().double()
    del net.unused  # a fresh optimizer would have state for it, which the checkpoint lacks
    model = _parallel(kind, net)
    if backend is not None:
        model = torch.compile(model, backend=backend)
    return Training(model, torch.optim.Adam(model.parameters(), lr=lr), Dice(seed))


def _parallel(kind: str, net: nn.Module) -> nn.Module:
    world = dist.get_world_size() if dist.is_initialized() else 1
    options: dict[str, Any] = {"device_id": torch.device("cpu"), "use_orig_params": True}
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(net)
    if kind == "fsdp1_mesh":
        return FullyShardedDataParallel(net, device_mesh=init_device_mesh("cpu", (world,)), **options)
    if kind == "fsdp1_hsdp":
        mesh = init_device_mesh("cpu", (2, world // 2))
        hybrid = ShardingStrategy.HYBRID_SHARD
        return FullyShardedDataParallel(net, device_mesh=mesh, sharding_strategy=hybrid, **options)
    if kind == "fsdp1_tp":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(net, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        return FullyShardedDataParallel(net, device_mesh=mesh["dp"], **options)
    return models.parallel(kind, net)


class Compiler:
    """A backend of ``torch.compile`` that runs graphs unchanged, and counts them."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        self.graphs += 1
        return graph.forward


@contextmanager
def compiler() -> Iterator[Compiler]:
    """Yield a fresh compiler. Compiled code is not shared with earlier or later ones."""
    torch._dynamo.reset()
    try:
        yield Compiler()
    finally:
        torch._dynamo.reset()
