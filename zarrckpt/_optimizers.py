"""What torch's state dicts of optimizers need to be right: gradients, first steps, groups, FSDP1 over TP."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from zarrckpt._errors import KeyMismatchError, UnsupportedValueError


def own_groups(prefix: str, names: list[list[str]], loaded: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Loaded parameter groups for this rank's parameters: each as the first that names one of them, else by position.

    A checkpoint names a group's parameters as one rank had them. A stage of a pipeline may find none of its own there,
    and torch then leaves its group without a learning rate, in silence. Raises KeyMismatchError for a group too many.
    """
    groups = []
    for place, own in enumerate(names):
        sharing = [group for group in loaded if not {*own}.isdisjoint(group["params"])]
        if not sharing and place >= len(loaded):
            raise KeyMismatchError(
                f"'{prefix}param_groups' has {len(names)} groups in the target and {len(loaded)} in the checkpoint, "
                f"and group {place} shares no parameter with any of these"
            )
        groups.append({**(sharing or loaded[place:])[0], "params": own})
    return groups


def as_fsdp1_takes_it(module: nn.Module, state_dict: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's state dict in which tensors of FSDP1 over TP are what this rank's TP shard holds. Collective.

    Given the DTensors, torch 2.13 gathers them over all dimensions of the mesh and then cuts out this rank's elements
    by their numbers in the TP shard: it takes other ranks' elements, in silence.
    """
    if not any(fsdp._fsdp_extension is not None for fsdp in FullyShardedDataParallel.fsdp_modules(module)):
        return state_dict

    def tp_shard(value: Any) -> Any:
        if not isinstance(value, DTensor) or value.device_mesh.ndim < 2:
            return value
        placements = [*[Replicate()] * (value.device_mesh.ndim - 1), value.placements[-1]]
        return value.redistribute(placements=placements).to_local()

    # Sorted: the names come in another order on each rank, and each tensor is a collective.
    state = {
        name: {slot: tp_shard(value) for slot, value in sorted(slots.items())}
        for name, slots in sorted(state_dict["state"].items())
    }
    return {**state_dict, "state": state}


@contextmanager
def gradients_kept(optimizer: Optimizer) -> Iterator[None]:
    """Hide gradients: torch makes no optimizer state while there are any, and drops them when it does."""
    gradients = [(p, p.grad) for group in optimizer.param_groups for p in group["params"]]
    try:
        for parameter, _ in gradients:
            parameter.grad = None
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient


@contextmanager
def first_step_named(prefix: str, optimizer: Optimizer) -> Iterator[None]:
    """Say of an optimizer without state why a first step, which makes its state, failed: LBFGS needs a closure."""
    fresh = not optimizer.state
    try:
        yield
    except Exception as err:
        if not fresh:
            raise
        raise UnsupportedValueError(
            f"{prefix[:-1]!r}: the state of a {type(optimizer).__name__} that made no step yet could not be made, "
            f"step() without a closure failed with {type(err).__name__}: {err}; save optimizer.state_dict(), and give "
            "what a load puts into None to load_state_dict()"
        ) from err
