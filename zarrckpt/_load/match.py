"""The match of a rank's targets with entries of a checkpoint. Keys, shapes and dtypes are checked before any read."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from zarrckpt._errors import CheckpointError, KeyMismatchError, UnsupportedValueError
from zarrckpt._format.grid import Box
from zarrckpt._format.matching import did_you_mean
from zarrckpt._format.module_versions import Versions, begins_one, module_name, put_versions
from zarrckpt._format.state_path import StatePath
from zarrckpt._load.containers import move_path, rebuild
from zarrckpt._load.fill import TensorTarget
from zarrckpt._load.rebuilt_containers import RebuiltContainers
from zarrckpt._state.flatten import copy_containers, flatten, get_leaf, set_leaf, stems
from zarrckpt._state.local_boxes import LocalBoxes, global_shape, local_tensors, to_local_boxes
from zarrckpt._state.local_state import PER_RANK_FAULT, format_lines
from zarrckpt._state.per_rank import PerRank, PerRankSources
from zarrckpt._state.saved_entries import SavedEntries, SavedTensor
from zarrckpt._state.tensors import new_tensor, new_tensor_like, plain_tensor, stride_order, target_fault
from zarrckpt._state.torch_kinds import is_dtensor

_SHAPES_STEP = "Shapes must match, so build the model with the checkpoint's sizes or leave these keys out"
_DTYPES_STEP = "allow_cast=True converts dtypes"
_ONE_SIDED_STEP = "strict=False skips keys that only the state or only the checkpoint has"


class _Difference(NamedTuple):
    """A difference between a target and the checkpoint, and the next step for its kind, or ""."""

    text: str
    next_step: str = ""


class StateMatch:
    """The targets of one rank in a plain state (without objects), and their entries in the checkpoint.

    Non-tensor targets are replaced by the saved values or containers. Tensor targets are filled in place. A load calls
    :meth:`check`, then :meth:`add_offered`, reads the entries of :meth:`tensors` and :meth:`value_names`, and then
    calls :meth:`finish`.

    Args:
        strict: raise KeyMismatchError for a target key that the checkpoint lacks. Otherwise the target is unchanged.
        allow_cast: convert to the target's dtype instead of raising KeyMismatchError.
        select: called with each flat name. Targets for which it returns false are unchanged.
        closed: flat names of dicts that load nothing if they are empty.
        containers: containers that get the entries that they lack (default: none).
        sources: the rank whose state each PerRank loads. Entries of other ranks need no target.
    """

    def __init__(
        self,
        saved: SavedEntries,
        state: Any,
        *,
        strict: bool = True,
        allow_cast: bool = False,
        select: Callable[[str], bool] = lambda fqn: True,
        closed: Collection[str] = (),
        containers: RebuiltContainers | None = None,
        sources: PerRankSources | None = None,
    ) -> None:
        self._state = state
        sources = sources or PerRankSources({})
        self.containers = containers = containers or RebuiltContainers({}, sources=sources)
        self._strict, self._allow_cast = strict, allow_cast
        entries = self._entries = saved.entries
        self._subtrees: dict[str, StatePath] = {}
        """The paths of targets that have a subtree in the checkpoint, by name."""
        self._stem_of: dict[str, str] = {}
        """The target of this kind that contains each entry of these subtrees."""
        flat, self._all_paths, own = flatten(state)
        paths = self._all_paths
        for fqn, leaf in flat.items():
            if isinstance(leaf, PerRank):
                raise UnsupportedValueError(f"{fqn!r} {PER_RANK_FAULT}")
        selected = {fqn: leaf for fqn, leaf in flat.items() if select(fqn)}
        # A module or optimizer with an empty state loads nothing.
        for fqn in selected.keys() & {*closed} - entries.keys():
            del selected[fqn]
        self._expand(selected, paths, saved)
        requested = sources.drop_other_names(filter(select, entries))
        containers.fit(flat, paths, selected, entries, requested, saved.paths)
        self.missing = sorted(selected.keys() - entries.keys())
        """The names of targets that the checkpoint lacks."""
        self.unexpected = sorted({*requested} - flat.keys() - selected.keys())
        """The names in the checkpoint that have no target on this rank."""
        self.loaded = sorted(selected.keys() & entries.keys())
        """The names in the checkpoint that have a target on this rank."""
        self._selected = selected
        self.versions, self.converted = _match_versions(
            saved.versions, saved.module_versions, {path.fqn: versions for path, versions in own.items()}, self.loaded
        )
        """The versions of modules by state dict after the load, and the flat names of modules with another version."""
        self.paths = {fqn: containers.added.get(fqn) or paths[fqn] for fqn in self.loaded}
        """The path in the state of each loaded entry."""
        self.leaves: dict[str, Any] = {}
        """The target of each entry by flat name, after :meth:`check`. For a sharded tensor, this rank's boxes."""

    def check(self, required: Callable[[str], bool] = lambda fqn: False) -> None:
        """Raise KeyMismatchError with all differences between targets and entries.

        ``required`` is called with each flat name in the checkpoint that has no target. If it returns true, the name is
        a difference.
        """
        self._refuse_differences(required)
        for fqn in self.loaded:
            self.leaves[fqn] = to_local_boxes(fqn, self._target(fqn, self._selected[fqn]))

    def add_offered(self, names: Iterable[str]) -> None:
        """Add offered entries of :attr:`containers` to the entries to load. Call it after :meth:`check`."""
        for fqn, path in self.containers.accept(names).items():
            self._selected[fqn], self.paths[fqn] = None, path
            self.leaves[fqn] = self._target(fqn, None)
        self.loaded = sorted(self.leaves)
        self.unexpected = [fqn for fqn in self.unexpected if fqn not in self._selected]

    def _expand(self, selected: dict[str, Any], paths: dict[str, StatePath], saved: SavedEntries) -> None:
        """Replace non-tensor targets that have a subtree in the checkpoint by the entries of this subtree."""
        absent = {fqn for fqn in selected if fqn not in self._entries and not isinstance(selected[fqn], torch.Tensor)}
        if not absent:
            return
        for fqn in self._entries:
            path = saved.paths[fqn]
            for depth in range(1, len(path)):
                stem = path.stem(depth)
                if stem in absent and (own := move_path(path, stem, paths[stem])) is not None:
                    self._subtrees[stem] = paths[stem]
                    self._stem_of[fqn] = stem
                    selected[fqn] = None
                    paths[fqn] = own
                    break
        for stem in self._subtrees:
            del selected[stem]

    def names_with_other_strides(self) -> list[str]:
        """Return the names of plain tensor targets with another order of strides than the saved tensors."""
        return [
            fqn
            for fqn, leaf in self.leaves.items()
            if isinstance(leaf, torch.Tensor)
            and (entry := self._entries[fqn]) is not None
            and stride_order(leaf) != entry.order
        ]

    def replace_by_new_tensors(self, fqns: Iterable[str]) -> None:
        """Replace tensor targets by new tensors, also in the state. Sharded tensors other than DTensors are kept."""
        copied: set[tuple[Any, ...]] = set()
        for fqn in fqns:
            leaf = self._selected[fqn]
            sharded = isinstance(self.leaves[fqn], LocalBoxes)
            if sharded and not is_dtensor(leaf):
                continue
            entry = self._entries[fqn]
            assert entry is not None
            new = new_tensor_like(leaf.detach() if sharded else plain_tensor(leaf), entry.order, leaf.dtype)
            copy_containers(self._state, self.paths[fqn], copied)
            set_leaf(self._state, self.paths[fqn], new)
            self._selected[fqn], self.leaves[fqn] = new, to_local_boxes(fqn, new)

    def is_converted(self, fqn: str) -> bool:
        """Whether an entry belongs to a module that converts it, because it was saved by another version."""
        return bool(self.converted) and ("" in self.converted or any(stem in self.converted for stem in stems(fqn)))

    def separate_converted(self, owners: tuple[str, ...], modules: tuple[str, ...]) -> None:
        """Prepare the state dicts of objects for their own conversion.

        Tensors are replaced by new ones, because a conversion may permute them. Entries of modules that are not loaded
        are removed, because they have the new form already. ``owners`` and ``modules`` are the name prefixes of objects
        and of modules. Call it after :meth:`check`.
        """
        names = [fqn for fqn in self._all_paths if fqn.startswith(owners) and self.is_converted(fqn)]
        loaded = [fqn for fqn in names if fqn in self.leaves]
        self.replace_by_new_tensors(fqn for fqn in loaded if isinstance(self._selected[fqn], torch.Tensor))
        for path in (self._all_paths[fqn] for fqn in names if fqn not in self.leaves):
            above = path.above(len(path) - 1)
            if f"{above.fqn}." in modules:
                del get_leaf(self._state, above)[path.keys[-1]]

    def _target(self, fqn: str, leaf: Any) -> Any:
        """Return the target itself, or a new CPU tensor if the entry is a tensor and the target is a value."""
        entry = self._entries[fqn]
        if entry is not None and not isinstance(leaf, torch.Tensor):
            return _new_tensor(fqn, entry)
        return leaf

    def _refuse_differences(self, required: Callable[[str], bool]) -> None:
        found = [self._difference(fqn, self._selected[fqn], self._entries[fqn]) for fqn in self.loaded]
        differences = [difference for difference in found if difference is not None]
        if self._strict:
            differences += [_Difference(f"{fqn!r} is not in the checkpoint", _ONE_SIDED_STEP) for fqn in self.missing]
            differences += [
                _Difference(without_target(fqn), _ONE_SIDED_STEP) for fqn in self.unexpected if required(fqn)
            ]
        if differences:
            needed = {difference.next_step for difference in differences}
            steps = [step for step in (_SHAPES_STEP, _DTYPES_STEP, _ONE_SIDED_STEP) if step in needed]
            steps.append("keys=[...] loads only the named entries")
            raise KeyMismatchError(
                f"{len(differences)} entries of the target and the checkpoint differ. Nothing was loaded:"
                f"{format_lines([difference.text for difference in differences])}\n"
                f"{self._close_names()}{'. '.join(steps)}"
            )

    def _close_names(self) -> str:
        """Return a hint with entries without a target whose names are similar to missing ones, or ''."""
        if not self._strict:
            return ""
        return did_you_mean(self.missing, self.unexpected, "rename= loads entries under other names")

    def _difference(self, fqn: str, leaf: Any, entry: SavedTensor | None) -> _Difference | None:
        if not isinstance(leaf, torch.Tensor):
            return None
        if (fault := next(filter(None, map(target_fault, local_tensors(leaf))), None)) is not None:
            return _Difference(f"{fqn!r} {fault}")
        shape = global_shape(leaf)
        if entry is None:
            return _Difference(
                f"{fqn!r} is a tensor of shape {shape} in the target, but a non-tensor value in the checkpoint"
            )
        if shape != entry.shape:
            return _Difference(f"{fqn!r} has shape {shape}, the checkpoint has {entry.shape}", _SHAPES_STEP)
        if leaf.dtype != entry.dtype and not self._allow_cast:
            return _Difference(f"{fqn!r} has dtype {leaf.dtype}, the checkpoint has {entry.dtype}", _DTYPES_STEP)
        return None

    # -- reads

    def tensors(self) -> Iterator[TensorTarget]:
        """Yield a target for each box of a tensor that this rank holds."""
        for fqn, leaf in self.leaves.items():
            if self._entries[fqn] is None:
                continue
            if isinstance(leaf, LocalBoxes):
                yield from (TensorTarget(fqn, box, leaf.tensor_at(box.offset), name=fqn) for box in leaf.boxes)
            else:
                yield TensorTarget(fqn, Box((0,) * leaf.ndim, tuple(leaf.shape)), plain_tensor(leaf), name=fqn)

    def value_names(self) -> list[str]:
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
            if self.containers.is_rebuilt(fqn):
                loaded[fqn] = target if is_filled else found[fqn]
            elif fqn in self._stem_of:
                below[self._stem_of[fqn]].append((self.paths[fqn], found[fqn]))
            elif not is_filled:
                path = self.paths[fqn]
                old = get_leaf(self._state, path)
                set_leaf(self._state, path, rebuild(old, [(path, found[fqn])], len(path), False, self.versions))
        for stem, rows in below.items():
            if rows:
                path = self._subtrees[stem]
                old = get_leaf(self._state, path)
                set_leaf(self._state, path, rebuild(old, rows, len(path), False, self.versions))
        if self.versions:
            self._put_versions(fqn for fqn in self.leaves if fqn not in loaded and fqn not in self._stem_of)
        self.containers.put(self._state, loaded, self.paths, self.versions)

    def _put_versions(self, fqns: Iterable[str]) -> None:
        """Give their versions to the state dicts in which entries were loaded in place."""
        left = dict(self.versions)
        for path in map(self.paths.__getitem__, fqns):
            for depth in range(len(path)):
                if (versions := left.pop(path.stem(depth), None)) is not None:
                    put_versions(get_leaf(self._state, path.above(depth)), versions)


def _match_versions(
    saved: Versions, modules: Mapping[str, int], own: Versions, loaded: Sequence[str]
) -> tuple[dict[str, Mapping[str, int]], set[str]]:
    """Return the versions of modules by state dict after a load, and the flat names of modules with another version.

    A module without a saved version, or without loaded entries, keeps its own.

    Args:
        saved, modules: the versions in the checkpoint, and the same by flat name.
        own: the versions in the state. loaded: the sorted names of the entries to load.
    """
    versions: dict[str, Mapping[str, int]] = dict(saved)
    converted = set()
    for name, before in own.items() if saved else ():
        after = {path: modules.get(module_name(name, path), version) for path, version in before.items()}
        for path in before:
            if after[path] != before[path]:
                if begins_one(module_name(name, path), loaded):
                    converted.add(module_name(name, path))
                else:
                    after[path] = before[path]
        versions[name] = {**saved.get(name, {}), **after}
    return versions, converted


def _new_tensor(fqn: str, entry: SavedTensor) -> torch.Tensor:
    try:
        return new_tensor(entry.shape, entry.order, entry.dtype)
    except RuntimeError as err:
        raise CheckpointError(
            f"{fqn!r} has shape {entry.shape} in the checkpoint, which needs more memory than can be allocated. Load "
            "it into a sharded tensor, or leave the key out"
        ) from err


def without_target(fqn: str) -> str:
    """Return the message for an entry that has no target."""
    return f"{fqn!r} is in the checkpoint and has no target"
