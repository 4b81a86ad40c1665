"""The entries of a checkpoint as a load sees them, and those that it requests."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch

from zarrckpt._format.module_versions import Versions, flat_versions
from zarrckpt._format.state_path import StatePath

KeyPattern = tuple[str | None, ...]
"""The keys that lead to an object in a state. None matches the number of any rank."""


class SavedTensor(NamedTuple):
    """The shape and dtype of a tensor in a checkpoint."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    order: tuple[int, ...] = ()
    """The dimensions by descending stride of new tensors, or () for C order."""


@dataclass(frozen=True)
class SavedEntries:
    """The entries of a checkpoint in stored order, with their paths. An entry that is no tensor is None."""

    entries: Mapping[str, SavedTensor | None]
    paths: Mapping[str, StatePath]
    value: Callable[[str], object] = lambda fqn: None
    """Reads an entry that is not a tensor."""
    stored: Mapping[str, str] = field(default_factory=dict)
    """The names of renamed entries in the checkpoint, by new name."""
    parameters: Mapping[KeyPattern, Mapping[str, str]] = field(default_factory=dict)
    """The new names of each optimizer's renamed parameters by old name, by the keys of the optimizer in the state."""
    optimizers: Mapping[str, str] = field(default_factory=dict)
    """The names of the classes of optimizers, by their fqns in the checkpoint."""
    versions: Versions = field(default_factory=dict)
    """The versions of modules."""

    @cached_property
    def module_versions(self) -> dict[str, int]:
        """The versions of modules by flat name."""
        return flat_versions(self.versions)

    def stored_name(self, name: str) -> str:
        """Return the name in the checkpoint of an entry."""
        return self.stored.get(name, name)

    def rename_parameters(self, name: str, value: object) -> object:
        """Return the value of an entry. In the lists of an optimizer's groups, renamed parameters get new names."""
        for levels, names in self.parameters.items():
            if isinstance(value, list) and rest_below(name, (*levels, "param_groups")) is not None:
                return [names.get(item, item) if isinstance(item, str) else item for item in value]
        return value


class RequestedEntries:
    """The entries of a checkpoint that a load requests.

    Args:
        is_requested: whether the load requests entries with a name, even if the checkpoint has none.
        everything: whether the load requests all entries.
    """

    def __init__(
        self, saved: SavedEntries, is_requested: Callable[[str], bool], *, everything: bool, allow_cast: bool
    ) -> None:
        self._saved = saved
        self._names = sorted(filter(is_requested, saved.entries))
        self._left_out = sorted(saved.entries.keys() - {*self._names})
        self._everything = everything
        self.allow_cast = allow_cast
        self.is_requested = is_requested
        self.module_versions = saved.module_versions

    def wants(self, prefix: str) -> bool:
        """Whether the load requests an object whose entries begin with a prefix."""
        return self._everything or bool(self.below(prefix))

    def below(self, prefix: str) -> list[str]:
        """Return the requested names that begin with a prefix."""
        return _beginning_with(prefix, self._names)

    def left_out(self, prefix: str) -> list[str]:
        """Return the names of the checkpoint that begin with a prefix and are not requested."""
        return _beginning_with(prefix, self._left_out)

    def holds(self, fqn: str) -> bool:
        """Whether the load requests an existing entry with this name, or one below it."""
        return bool(self.below(f"{fqn}.")) or (fqn in self._saved.entries and self.is_requested(fqn))

    def keys_below(self, prefix: str, depth: int) -> list[Any]:
        """Return the keys of a saved dict at ``depth`` of the state. The names of its entries begin with the prefix."""
        found: dict[Any, None] = {}
        for fqn in self.below(prefix):
            keys = StatePath.of(self._saved.paths[fqn]).keys
            # A state that was flattened before the save has one key for a whole name.
            nested = len(keys) > depth and prefix == "".join(f"{key}." for key in keys[:depth])
            found[keys[depth] if nested else fqn.removeprefix(prefix).partition(".")[0]] = None
        return [*found]

    def is_value(self, fqn: str) -> bool:
        """Whether the checkpoint has a non-tensor entry with this name, requested or not."""
        return fqn in self._saved.entries and self._saved.entries[fqn] is None

    def value(self, fqn: str) -> object:
        """Read an entry that is not a tensor, requested or not. Renamed parameters in lists have new names."""
        return self._saved.rename_parameters(fqn, self._saved.value(fqn))

    def tensor(self, fqn: str) -> SavedTensor | None:
        """Return the form of the tensor with this name, or None."""
        return self._saved.entries.get(fqn)

    def path(self, fqn: str) -> StatePath:
        """Return the path of an entry in the state."""
        return StatePath.of(self._saved.paths[fqn])

    def optimizer_class(self, prefix: str) -> str:
        """Return the name of the class whose state begins with a prefix in the state, or "" if it is not stored."""
        stored = self._saved.stored_name(next(iter(self.below(prefix)), ""))
        above = [fqn for fqn in self._saved.optimizers if stored.startswith(f"{fqn}.")]
        return self._saved.optimizers[max(above, key=len)] if above else ""


def _beginning_with(prefix: str, names: list[str]) -> list[str]:
    first = last = bisect.bisect_left(names, prefix)
    while last < len(names) and names[last].startswith(prefix):
        last += 1
    return names[first:last]


def rest_below(name: str, levels: KeyPattern) -> str | None:
    """Return the rest of a name below a position in the state, or None if the name is not below it."""
    keys = name.split(".", len(levels))
    is_below = len(keys) > len(levels) and all(own in (None, key) for own, key in zip(levels, keys, strict=False))
    return keys[-1] if is_below else None
