"""The match of a rank's targets with entries of a checkpoint. Keys, shapes and dtypes are checked before any read."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch

from zarrckpt._errors import CheckpointError, KeyMismatchError, UnsupportedValueError
from zarrckpt._format.grid import Box
from zarrckpt._format.matching import did_you_mean
from zarrckpt._format.state_path import StatePath
from zarrckpt._load.fill import TensorTarget
from zarrckpt._load.whole import Roots, rebuilt, rooted
from zarrckpt._state import objects
from zarrckpt._state.flatten import copy_containers, flatten, get_leaf, set_leaf
from zarrckpt._state.local_boxes import HeldTensor, global_shape, held_of, local_tensors
from zarrckpt._state.local_state import PER_RANK, listed
from zarrckpt._state.optimizers import SavedTensor
from zarrckpt._state.per_rank import PerRank
from zarrckpt._state.tensors import plain_tensor, target_fault
from zarrckpt._state.torch_kinds import is_dtensor

_ONE_SIDED = "strict=False skips keys that only the state or only the checkpoint has"

_STEPS = {
    " has shape ": "Shapes must match, so build the model with the checkpoint's sizes or leave these keys out",
    " has dtype ": "allow_cast=True converts dtypes",
    " is not in the checkpoint": _ONE_SIDED,
    " has no target": _ONE_SIDED,
}
"""The next step for each kind of difference, by a text in its description."""


@dataclasses.dataclass(frozen=True)
class Saved:
    """The entries of a checkpoint in stored order, with their paths. An entry that is no tensor is None."""

    entries: Mapping[str, SavedTensor | None]
    paths: Mapping[str, StatePath]
    value: Callable[[str], object] = lambda fqn: None
    """Reads an entry that is not a tensor."""
    stored: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """The names of renamed entries in the checkpoint, by new name."""
    parameters: Mapping[objects.Levels, Mapping[str, str]] = dataclasses.field(default_factory=dict)
    """The new names of each optimizer's renamed parameters by old name, by the keys of the optimizer in the state."""


class Match:
    """The targets of one rank and their entries in the checkpoint.

    Non-tensor targets are replaced by the saved values or containers. Tensor targets are filled in place.

    Args:
        strict: raise KeyMismatchError for a target key that the checkpoint lacks. Otherwise the target is unchanged.
        allow_cast: convert to the target's dtype instead of raising KeyMismatchError.
        select: called with each flat name. Targets for which it returns false are unchanged.
        closed: flat names of dicts that load nothing if they are empty.
        roots: containers that get the entries that they lack (default: none).
        mine: given names in the checkpoint, returns those that do not belong to another rank.
    """

    def __init__(
        self,
        saved: Saved,
        state: Any,
        *,
        strict: bool = True,
        allow_cast: bool = False,
        select: Callable[[str], bool] = lambda fqn: True,
        closed: Collection[str] = (),
        roots: Roots | None = None,
        mine: Callable[[Iterable[str]], Iterable[str]] = lambda names: names,
    ) -> None:
        self._state = state
        self.roots = roots = roots or Roots({})
        self._strict, self._allow_cast = strict, allow_cast
        entries = self._entries = saved.entries
        flat, paths = flatten(state)
        for fqn, leaf in flat.items():
            if isinstance(leaf, PerRank):
                raise UnsupportedValueError(f"{fqn!r} {PER_RANK}")
        selected = {fqn: leaf for fqn, leaf in flat.items() if select(fqn)}
        # A module or optimizer with an empty state loads nothing.
        for fqn in selected.keys() & {*closed} - entries.keys():
            del selected[fqn]
        self._expand(selected, paths, saved)
        roots.fit(flat, paths, selected, entries, mine(filter(select, entries)), saved.paths)
        self.missing = sorted(selected.keys() - entries.keys())
        self.unexpected = sorted(filter(select, entries.keys() - flat.keys() - selected.keys()))
        self.loaded = sorted(selected.keys() & entries.keys())
        self._selected = selected
        self.paths = {fqn: roots.added.get(fqn) or paths[fqn] for fqn in self.loaded}
        """The path in the state of each loaded entry."""
        self.leaves: dict[str, Any] = {}
        """The target of each entry by flat name, after :meth:`check`. For a sharded tensor, the parts of this rank."""

    def check(self, required: Callable[[str], bool] = lambda fqn: False) -> None:
        """Raise KeyMismatchError with all differences between targets and entries.

        ``required`` is called with each flat name in the checkpoint that has no target. If it returns true, the name is
        a difference.
        """
        self._refuse({fqn: self._selected[fqn] for fqn in self.loaded}, required)
        for fqn in self.loaded:
            self.leaves[fqn] = held_of(fqn, self._target(fqn, self._selected[fqn]))

    def take(self, names: Iterable[str]) -> None:
        """Add offered entries of :attr:`roots` to the entries to load. Call it after :meth:`check`."""
        for fqn, path in self.roots.take(names).items():
            self._selected[fqn], self.paths[fqn] = None, path
            self.leaves[fqn] = self._target(fqn, None)
        self.loaded = sorted(self.leaves)
        self.unexpected = [fqn for fqn in self.unexpected if fqn not in self._selected]

    def _expand(self, selected: dict[str, Any], paths: dict[str, StatePath], saved: Saved) -> None:
        """Replace non-tensor targets that have a subtree in the checkpoint by the entries of this subtree."""
        absent = {fqn for fqn in selected if fqn not in self._entries and not isinstance(selected[fqn], torch.Tensor)}
        self._subtrees: dict[str, StatePath] = {}
        self._stem_of: dict[str, str] = {}
        if not absent:
            return
        for fqn in self._entries:
            path = saved.paths[fqn]
            for depth in range(1, len(path)):
                stem = ".".join(map(str, path[:depth]))
                if stem in absent and (own := rooted(path, stem, paths[stem])) is not None:
                    self._subtrees[stem] = paths[stem]
                    self._stem_of[fqn] = stem
                    selected[fqn] = None
                    paths[fqn] = own
                    break
        for stem in self._subtrees:
            del selected[stem]

    def make_private(self, fqns: Iterable[str]) -> None:
        """Replace tensor targets by new tensors, also in the state. Sharded tensors other than DTensors are kept."""
        copied: set[tuple[Any, ...]] = set()
        for fqn in fqns:
            leaf = self._selected[fqn]
            sharded = isinstance(self.leaves[fqn], HeldTensor)
            if sharded and not is_dtensor(leaf):
                continue
            new = torch.empty_like(leaf.detach() if sharded else plain_tensor(leaf))
            copy_containers(self._state, self.paths[fqn], copied)
            set_leaf(self._state, self.paths[fqn], new)
            self._selected[fqn], self.leaves[fqn] = new, held_of(fqn, new)

    def _target(self, fqn: str, leaf: Any) -> Any:
        """Return the target itself, or a new CPU tensor if the entry is a tensor and the target is a value."""
        entry = self._entries[fqn]
        if entry is not None and not isinstance(leaf, torch.Tensor):
            return _new_tensor(fqn, entry)
        return leaf

    def _refuse(self, targets: Mapping[str, Any], required: Callable[[str], bool]) -> None:
        faults = [fault for fqn, leaf in targets.items() if (fault := self._fault(fqn, leaf, self._entries[fqn]))]
        if self._strict:
            faults += [f"{fqn!r} is not in the checkpoint" for fqn in self.missing]
            faults += [without_target(fqn) for fqn in self.unexpected if required(fqn)]
        if faults:
            steps = {step: None for words, step in _STEPS.items() if any(words in fault for fault in faults)}
            raise KeyMismatchError(
                f"{len(faults)} entries of the target and the checkpoint differ. Nothing was loaded:{listed(faults)}\n"
                f"{self._close_names()}{'. '.join([*steps, 'keys=[...] loads only the named entries'])}"
            )

    def _close_names(self) -> str:
        """Return a hint with entries without a target whose names are similar to missing ones, or ''."""
        if not self._strict:
            return ""
        return did_you_mean(self.missing, self.unexpected, "rename= loads entries under other names")

    def _fault(self, fqn: str, leaf: Any, entry: SavedTensor | None) -> str | None:
        if not isinstance(leaf, torch.Tensor):
            return None
        if (fault := next(filter(None, map(target_fault, local_tensors(leaf))), None)) is not None:
            return f"{fqn!r} {fault}"
        shape = global_shape(leaf)
        if entry is None:
            return f"{fqn!r} is a tensor of shape {shape} in the target, but a non-tensor value in the checkpoint"
        if shape != entry.shape:
            return f"{fqn!r} has shape {shape}, the checkpoint has {entry.shape}"
        if leaf.dtype != entry.dtype and not self._allow_cast:
            return f"{fqn!r} has dtype {leaf.dtype}, the checkpoint has {entry.dtype}"
        return None

    # -- reads

    def tensors(self) -> Iterator[TensorTarget]:
        """Yield a target for each box of a tensor that this rank holds."""
        for fqn, leaf in self.leaves.items():
            if self._entries[fqn] is None:
                continue
            if isinstance(leaf, HeldTensor):
                yield from (TensorTarget(fqn, box, leaf.piece(box.offset), name=fqn) for box in leaf.boxes)
            else:
                yield TensorTarget(fqn, Box((0,) * leaf.ndim, tuple(leaf.shape)), plain_tensor(leaf), name=fqn)

    def values(self) -> list[str]:
        """Return the names of the entries to read that are not tensors."""
        return [fqn for fqn in self.leaves if self._entries[fqn] is None]

    @property
    def replaced(self) -> list[str]:
        """The names of the entries whose targets are not tensors, in the order of the checkpoint."""
        is_tensor = {fqn: isinstance(self._selected[fqn], torch.Tensor) for fqn in self.leaves}
        return [fqn for fqn in self._entries if is_tensor.get(fqn) is False]

    def finish(self, values: Mapping[str, object]) -> None:
        """Store the values and the rebuilt subtrees in the state. Call it after all reads."""
        found = {**self.leaves, **values}
        below: dict[str, list[tuple[StatePath, Any]]] = {stem: [] for stem in self._subtrees}
        loaded: dict[str, Any] = {}
        # In the order of the checkpoint, so that rebuilt dicts have the saved order.
        for fqn in self._entries:
            if fqn not in self.leaves:
                continue
            target = self._selected[fqn]
            is_filled = isinstance(target, torch.Tensor)
            if self.roots.is_rebuilt(fqn):
                loaded[fqn] = target if is_filled else found[fqn]
            elif fqn in self._stem_of:
                below[self._stem_of[fqn]].append((self.paths[fqn], found[fqn]))
            elif not is_filled:
                path = self.paths[fqn]
                old = get_leaf(self._state, path)
                set_leaf(self._state, path, rebuilt(old, [(path, found[fqn])], len(path), in_place=False))
        for stem, rows in below.items():
            if rows:
                path = self._subtrees[stem]
                old = get_leaf(self._state, path)
                set_leaf(self._state, path, rebuilt(old, rows, len(path), in_place=False))
        self.roots.put(self._state, loaded, self.paths)


def _new_tensor(fqn: str, entry: SavedTensor) -> torch.Tensor:
    try:
        # The default device may not be the CPU.
        return torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
    except RuntimeError as err:
        raise CheckpointError(
            f"{fqn!r} has shape {entry.shape} in the checkpoint, which needs more memory than can be allocated. Load "
            "it into a sharded tensor, or leave the key out"
        ) from err


def without_target(fqn: str) -> str:
    """Return the message for an entry that has no target."""
    return f"{fqn!r} is in the checkpoint and has no target"
