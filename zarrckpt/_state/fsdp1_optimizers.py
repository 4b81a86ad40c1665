"""State dicts of optimizers of FSDP1, by torch's own functions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from zarrckpt._ranks.torch_private import is_over_tensor_parallelism
from zarrckpt._state.torch_kinds import fsdp1_modules, is_dtensor


def fsdp1_state(optimizer: Optimizer, module: nn.Module) -> dict[str, Any]:
    """Return the state dict of an optimizer of FSDP1. Collective."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    with no_first_step(optimizer):
        return dict(get_optimizer_state_dict(module, optimizer))


@contextmanager
def no_first_step(optimizer: Optimizer) -> Iterator[None]:
    """Prevent torch's functions from making a step of an optimizer without state.

    They make it if no parameter has a gradient, and drop the gradients afterwards.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    lone = None if any(p.grad is not None for p in parameters) or not parameters else parameters[0]
    try:
        if lone is not None:
            lone.grad = torch.zeros_like(lone)
        yield
    finally:
        if lone is not None:
            lone.grad = None


@contextmanager
def trainable(optimizer: Optimizer) -> Iterator[None]:
    """Make all parameters trainable temporarily, because torch's function ignores state of frozen ones."""
    frozen = [p for group in optimizer.param_groups for p in group["params"] if not p.requires_grad]
    try:
        for parameter in frozen:
            parameter.requires_grad_(True)
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


def with_tp_shards(module: nn.Module, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state dict with this rank's TP shards instead of DTensors of FSDP1 over TP. Collective.

    From DTensors, torch 2.13 would gather all dimensions of the mesh, and then select this rank's elements by their
    numbers in the TP shard. These are silently the elements of other ranks.
    """
    if not any(map(is_over_tensor_parallelism, fsdp1_modules(module))):
        return state_dict
    from torch.distributed.tensor import Replicate

    def tp_shard(value: Any) -> Any:
        if not is_dtensor(value) or value.device_mesh.ndim < 2:
            return value
        placements = [*[Replicate()] * (value.device_mesh.ndim - 1), value.placements[-1]]
        return value.redistribute(placements=placements).to_local()

    # Sorted, because ranks have the names in different orders, and each tensor needs a collective.
    state = {
        name: {slot: tp_shard(value) for slot, value in sorted(slots.items())}
        for name, slots in sorted(state_dict["state"].items())
    }
    return {**state_dict, "state": state}
