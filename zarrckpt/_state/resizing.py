"""Load targets for module entries that can change their shape in a load: extra state and resized tensors."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from zarrckpt._ranks.torch_private import submodule
from zarrckpt._state.flatten import flatten, new_dict
from zarrckpt._state.local_boxes import LocalBoxes, to_local_boxes
from zarrckpt._state.saved_entries import RequestedEntries
from zarrckpt._state.tensors import new_tensor


def takes(call: Callable[..., Any], *args: Any, **options: Any) -> bool:
    """Return whether a function can be called with these arguments. True if it has no signature."""
    try:
        signature = inspect.signature(call)
    except (TypeError, ValueError):
        return True
    try:
        signature.bind(*args, **options)
    except TypeError:
        return False
    return True


def is_resizable(value: Any) -> bool:
    """Return whether a value is a plain tensor that another one can replace: not sharded, wrapped or lazy."""
    return type(value) in (torch.Tensor, nn.Parameter) and not is_lazy(value) and to_local_boxes("", value) is value


def new_extra_state(fqn: str, value: Any, saved: RequestedEntries) -> Any:
    """Return a target for a module's extra state: a tensor with the saved shape and dtype, or None for any value.

    Extra state that has the saved shape and dtype already, or is sharded, stays the target.
    """
    leaves = flatten({fqn: value})[0]
    if any(isinstance(to_local_boxes(fqn, leaf), LocalBoxes) for leaf in leaves.values()):
        return value
    form = saved.tensor(fqn)
    if isinstance(value, torch.Tensor):
        fits = form is not None and (form.shape, form.dtype) == (tuple(value.shape), value.dtype)
        if fits or not is_resizable(value):
            return value
        return None if form is None else new_tensor(form.shape, form.order, form.dtype, value.device)
    names = {*saved.below(f"{fqn}.")} or {fqn}
    forms = {
        name: (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, torch.Tensor) else None
        for name, leaf in leaves.items()
    }
    return value if forms == {name: (form := saved.tensor(name)) and form[:2] for name in names} else None


def taken_shapes(module: nn.Module, others: Mapping[str, torch.Tensor]) -> set[str]:
    """Return the keys of a module's state dict for which it accepts the other shapes of ``others``.

    For each submodule that overrides ``_load_from_state_dict``, a copy without data tries to load these shapes.
    """
    owners: dict[int, tuple[nn.Module, dict[str, str]]] = {}
    for key in others:
        owner, name = _owner(module, key)
        if type(owner)._load_from_state_dict is not nn.Module._load_from_state_dict:
            owners.setdefault(id(owner), (owner, {}))[1][name] = key
    return {
        key
        for owner, keys in owners.values()
        if _loads(owner, {name: others[key].shape for name, key in keys.items()})
        for key in keys.values()
    }


def _owner(module: nn.Module, key: str) -> tuple[nn.Module, str]:
    """Return the innermost submodule that a key leads to, and the rest of the key."""
    head, _, rest = key.partition(".")
    inner = submodule(module, head)
    return (module, key) if inner is None or not rest else _owner(inner, rest)


def takes_older(module: nn.Module, tensors: Mapping[str, torch.Tensor], versions: Mapping[str, int]) -> bool:
    """Return whether a module loads tensors that other versions of its submodules saved, without missing ones.

    A copy without data tries it. ``versions`` are those of the submodules by their paths.
    """
    state_dict = new_dict({name: tensor.to("meta") for name, tensor in tensors.items()}, True, versions)
    try:
        result = _copy_without_data(module).load_state_dict(state_dict, strict=False)
        return all(key.endswith("_extra_state") for key in (*result.missing_keys, *result.unexpected_keys))
    except Exception:  # The module's own code raised: it does not accept these tensors.
        return False


def _loads(module: nn.Module, shapes: Mapping[str, torch.Size]) -> bool:
    try:
        trial = _copy_without_data(module)
        state = trial.state_dict()
        state.update({name: torch.empty_like(state[name], device="meta").new_empty(shapes[name]) for name in shapes})
        trial.load_state_dict(state, strict=False)
        loaded = trial.state_dict()
    except Exception:  # The module's own code raised: it does not accept these shapes.
        return False
    return all(loaded[name].shape == shape for name, shape in shapes.items())


def _copy_without_data(module: nn.Module) -> nn.Module:
    tensors = [*module.parameters(), *module.buffers()]
    # deepcopy uses the memo's meta tensors instead of the tensors, so the copy has no data.
    return copy.deepcopy(module, {id(tensor): _without_data(tensor) for tensor in tensors})


def _without_data(tensor: torch.Tensor) -> torch.Tensor:
    other = torch.empty_like(tensor.detach(), device="meta")
    return nn.Parameter(other, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else other
