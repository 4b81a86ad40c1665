"""Try a load on a copy of an optimizer, to find the errors of its class before any target changes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from zarrckpt._state.optimizer_forms import state_dict_of
from zarrckpt._state.random_state import kept_random_state
from zarrckpt._state.torch_kinds import is_zero_optimizer


def unwrapped(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer that makes the steps of a wrapper, such as Accelerate's, or the optimizer itself.

    A wrapper has an optimizer of the same parameters as an attribute.
    """
    seen = [optimizer]
    while True:
        outer = seen[-1]
        own = [id(parameter) for group in outer.param_groups for parameter in group["params"]]
        for inner in vars(outer).values():
            if isinstance(inner, Optimizer) and all(inner is not one for one in seen):
                parameters = [id(parameter) for group in inner.param_groups for parameter in group["params"]]
                # ZeroRedundancyOptimizer's has only this rank's parameters.
                if parameters == own or is_zero_optimizer(outer):
                    seen.append(inner)
                    break
        else:
            return outer


def try_load(optimizer: Optimizer, state_dict: dict[str, Any]) -> tuple[Mapping[str, Any], Exception | None]:
    """Load a state dict into a copy of an optimizer.

    Returns the copy's state dict after the load, empty if there is none, and the error of the load.
    """
    try:
        copied = _copy(optimizer, _blank)
    except Exception:  # Any class may have attributes that cannot be copied.
        return {}, None
    try:
        with kept_random_state():
            copied.load_state_dict(state_dict)
            return state_dict_of(copied), None
    except Exception as err:
        return {}, err


def slots_of_step(optimizer: Optimizer, groups: Sequence[Mapping[str, Any]]) -> set[Any] | None:
    """Return the keys of the state that a step of an optimizer's copy creates, or None if the step fails.

    ``groups`` have options for the groups of the copy, whose parameters have few elements.
    """
    # Some classes create state before the first step, so they need the state that the optimizer has.
    created = _slots_of_step(optimizer, groups, fresh=True)
    return _slots_of_step(optimizer, groups, fresh=False) if created is None else created


def _slots_of_step(optimizer: Optimizer, groups: Sequence[Mapping[str, Any]], *, fresh: bool) -> set[Any] | None:
    try:
        copied = _copy(optimizer, _small)
        if fresh:
            copied.state.clear()
        for group, options in zip(copied.param_groups, groups, strict=True):
            known = group.keys() - {"params"}
            group.update({key: value for key, value in options.items() if key in known})
            for parameter in group["params"]:
                parameter.grad = torch.ones_like(parameter)
        with kept_random_state():
            type(copied).step(copied)
    except Exception:  # Of any class, for example because its step needs a closure.
        return None
    parameters = [parameter for group in copied.param_groups for parameter in group["params"]]
    return {slot for parameter in parameters for slot in copied.state.get(parameter, {})}


def _copy(optimizer: Optimizer, replace: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a copy of an optimizer with other parameters and state. Its methods change nothing else."""
    own = vars(optimizer)
    if own.keys() & {"state_dict", "load_state_dict"}:
        raise TypeError("its methods were replaced, and may refer to the optimizer")
    copied = type(optimizer).__new__(type(optimizer))
    memo: dict[int, Any] = {id(optimizer): copied}
    for one in (optimizer, *(value for value in own.values() if isinstance(value, Optimizer))):
        tensors = [parameter for group in one.param_groups for parameter in group["params"]]
        for slots in one.state.values():
            tensors += slots.values() if isinstance(slots, dict) else [slots]
        memo |= {id(tensor): replace(tensor) for tensor in tensors if isinstance(tensor, torch.Tensor)}
    # Modules can be large.
    memo |= {id(value): value for value in own.values() if isinstance(value, nn.Module)}
    # Schedulers replace ``step`` by a function that refers to the optimizer.
    attributes = {key: value for key, value in own.items() if not (callable(value) and hasattr(type(optimizer), key))}
    hooks = {key: type(value)() for key, value in attributes.items() if key.startswith("_optimizer_step_")}
    copied.__dict__.update(copy.deepcopy({**attributes, **hooks}, memo))
    return copied


def blank_tensor(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of zeros that takes the memory of one element."""
    return torch.zeros((), dtype=dtype, device="cpu").expand(tuple(shape))


def _blank(tensor: torch.Tensor) -> torch.Tensor:
    blank = blank_tensor(tensor.shape, tensor.dtype)
    return nn.Parameter(blank, requires_grad=False) if isinstance(tensor, nn.Parameter) else blank


def _small(tensor: torch.Tensor) -> torch.Tensor:
    shape = [min(n, 2) for n in tensor.shape]
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(torch.ones(shape, dtype=tensor.dtype, device=tensor.device), requires_grad=False)
    return torch.zeros(shape, dtype=tensor.dtype, device=tensor.device)
