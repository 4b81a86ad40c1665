"""Options of an optimizer's parameter groups. A load finds them by the names of the parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from zarrckpt._errors import KeyMismatchError
from zarrckpt._state.torch_kinds import is_dtensor

Name = str | int
"""The name of a parameter in its module, or its number in the optimizer if the state has no module."""


class ParameterNames(list[Name]):
    """The names of the parameters of one group of an Optimizer, in the state to save, and the optimizer's class."""

    def __init__(self, names: Iterable[Name], class_name: str) -> None:
        super().__init__(names)
        self.class_name = class_name


def groups_with_options(
    prefix: str, own: Sequence[Mapping[str, Any]], loaded: Mapping[int, Mapping[str, Any]], *, complete: bool
) -> list[dict[str, Any]]:
    """Return an optimizer's groups with options from the loaded groups that share a parameter with them.

    A group that shares no parameter takes the options of the loaded group at its position, unless another group here
    has parameters of that loaded group. Options that were not loaded keep their values.

    Args:
        prefix: the beginning of the names of the optimizer's entries.
        own: the optimizer's groups, with names of parameters.
        loaded: groups of the checkpoint, by number.
        complete: whether ``loaded`` has all groups of the checkpoint.

    Raises KeyMismatchError for a group that gets no options, and for a group whose parameters were in several groups
    with different options.
    """
    own_names = {name for group in own for name in group["params"]}
    empty = {index: group for index, group in loaded.items() if not group.get("params", True)}
    groups: list[dict[str, Any]] = []
    for index, group in enumerate(own):
        names = group["params"]
        sources = [other for other in loaded.values() if not {*names}.isdisjoint(other.get("params", ()))]
        if not names and empty:
            sources = [empty.pop(index if index in empty else min(empty))]
        if not sources and index in loaded:
            is_free = not names or own_names.isdisjoint(loaded[index].get("params", ()))
            sources = [loaded[index]] if is_free else []
        if not sources and names and loaded and complete:
            raise KeyMismatchError(
                f"'{prefix}param_groups' has {len(own)} groups in the target and {len(loaded)} in the checkpoint, and "
                f"group {index} of the target shares no parameter with the groups of the checkpoint"
            )
        options = [_options(source) for source in sources]
        if differing := _differing(options):
            raise KeyMismatchError(
                f"'{prefix}param_groups.{index}' has parameters that were saved in {len(options)} groups with "
                f"different {differing}: build the groups as they were saved, or leave them out (keys=)"
            )
        found = {key: _as_own(group.get(key), value) for key, value in (options or [{}])[0].items()}
        groups.append({**_options(group), **found, "params": names})
    return groups


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a parameter group, with copies of tensors."""
    own = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    return {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in own.items()}


def _differing(options: list[dict[str, Any]]) -> list[str]:
    """Return the names of options whose values differ between groups."""
    first, names = options[0] if options else {}, {key for group in options for key in group}
    return sorted(key for key in names for group in options[1:] if not _equal(group.get(key), first.get(key)))


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return bool(one == other)


def _as_own(own: Any, loaded: Any) -> Any:
    """Return a loaded option in the type that it has in the optimizer, a tensor or a number."""
    is_number = type(own) in (bool, int, float)
    if isinstance(loaded, torch.Tensor):
        if is_dtensor(own):
            from torch.distributed.tensor import distribute_tensor

            # Every rank has read the whole tensor.
            return distribute_tensor(loaded.to(own.device), own.device_mesh, own.placements, src_data_rank=None)
        if isinstance(own, torch.Tensor):
            return loaded.to(own.device)
        return loaded.item() if is_number and loaded.ndim == 0 else loaded
    if isinstance(own, torch.Tensor) and type(loaded) in (int, float):
        return torch.full_like(own, loaded)
    if isinstance(loaded, dict) and isinstance(own, dict):
        return {key: _as_own(own.get(key), value) for key, value in loaded.items()}
    if type(loaded) in (list, tuple) and type(own) is type(loaded) and len(own) == len(loaded):
        return type(loaded)(_as_own(mine, value) for mine, value in zip(own, loaded, strict=True))
    return loaded
