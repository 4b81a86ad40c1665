"""The planners of ``zarrckpt.save`` and ``load``: they take modules, optimizers and other Stateful objects.

The objects are taken apart inside DCP's first step and not before it: an error there, on one rank only, reaches all
of them instead of leaving the others in a collective that this rank never joins.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem

from zarrckpt import _state
from zarrckpt._errors import KeyMismatchError, warn
from zarrckpt._flatten import flatten
from zarrckpt._matching import matches
from zarrckpt._optimizers import SavedEntries
from zarrckpt._per_rank import LoadedRanks, OwnPart
from zarrckpt._planner import ZarrLoadPlanner, ZarrSavePlanner, listed, without_target
from zarrckpt._state_path import StatePath

_GROUP = re.compile(r"(?:.*\.)?param_groups\.\d+\.")
"""What the name of an option of an optimizer's parameter group begins with."""


@dataclasses.dataclass(frozen=True)
class _Findings:
    """What one rank tells the coordinator of a load, about names that no rank may be left without.

    A pattern, or an entry of a module, may have its target on another rank: the stages of a pipeline, experts. Entries
    are bits of a mask over all of the checkpoint's, in its order: 500 bytes a rank for 4,000 entries.
    """

    idle: list[str]
    """Patterns that match no target of this rank."""
    owed: np.ndarray[Any, Any]
    """Entries below its modules and optimizers for which it has no target."""
    targets: np.ndarray[Any, Any]
    """Entries for which it has one."""


class ObjectSavePlanner(ZarrSavePlanner):
    """Saves objects through their state dicts. ``alone``: see :class:`ZarrSavePlanner`'s attribute."""

    def __init__(self, *, alone: bool = False) -> None:
        super().__init__()
        self._alone = alone

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        super().set_up_planner(_state.for_save(state_dict).state, storage_meta, is_coordinator)


class ObjectLoadPlanner(ZarrLoadPlanner):
    """Loads into the state dicts of objects; ``plain`` then says how they take these back.

    Args:
        keys: as for :func:`zarrckpt.load`. strict, allow_cast: as for :class:`ZarrLoadPlanner`.
    """

    def __init__(self, keys: str | Iterable[str] | None, *, strict: bool, allow_cast: bool) -> None:
        super().__init__(strict=strict, allow_cast=allow_cast, select=self._is_asked_for, required=self._is_required)
        self.plain = _state.PlainState({})
        self._ranks = LoadedRanks({})
        self._saved: Mapping[str, Any] = {}
        """The checkpoint's own entries: without the parts of stacks, which differ between ranks."""
        self._patterns = [keys] if isinstance(keys, str) else None if keys is None else list(keys)
        self._differs = False
        self._group_names: set[str] = set()

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        assert metadata is not None
        self._saved = metadata.state_dict_metadata
        self._ranks = LoadedRanks(metadata.planner_data)
        metadata = _with_parts(metadata, self._ranks.parts)
        names = set(metadata.state_dict_metadata)
        self._refuse_idle_patterns(names)
        # Only by the names of its parameters does a group of the checkpoint tell whose options it has.
        if self._patterns is not None:
            groups = (_GROUP.match(name) for name in names if self._is_asked_for(name))
            self._group_names = {f"{group[0]}params" for group in groups if group}
        saved = SavedEntries(
            metadata, self._is_asked_for, everything=self._patterns is None, allow_cast=self.allow_cast
        )
        self.plain = _state.for_load(state_dict, saved, self._ranks.source, self.plain)
        idle = {name for name in self._ranks.parts if not self._ranks.is_own(name)}
        for name in idle:
            del metadata.state_dict_metadata[name], self._ranks.parts[name]
        try:
            super().set_up_planner(self.plain.state, metadata, is_coordinator)
        except KeyMismatchError as err:
            raise self._ranks.explained(err, self.missing) from None
        self.unexpected = self._ranks.without_others(self.unexpected)

    def _expand(self, selected: dict[str, Any], paths: dict[str, StatePath]) -> None:
        """As for any target; but the empty state of a module or an optimizer stands for nothing."""
        assert self.metadata is not None
        for fqn in self.plain.closed & selected.keys() - self.metadata.state_dict_metadata.keys():
            del selected[fqn]
        super()._expand(selected, paths)

    def _refuse(self, targets: Mapping[str, Any]) -> None:
        """What differs on this rank; only then also its modules' entries that have no target here."""
        try:
            super()._refuse(targets)
        except KeyMismatchError:
            self._differs = True
            super()._refuse(targets)

    def create_local_plan(self) -> LoadPlan:
        """This rank's plan, with its findings."""
        assert self.metadata is not None
        names = [*self.loaded, *self.missing]
        idle = [p for p in self._patterns or () if not any(matches(name, p) for name in names)]
        owed = _mask(self._saved, {name for name in self.unexpected if self._is_of_an_object(name)})
        findings = _Findings(idle, owed, _mask(self._saved, {*self.loaded}))
        plan = super().create_local_plan()
        for place, item in enumerate(plan.items):
            if (part := self._ranks.parts.get(item.storage_index.fqn)) is not None:
                plan.items[place] = _in_stack(item, part)
        return dataclasses.replace(plan, planner_data=findings)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """The memory of this rank's piece; where it is a part of a stack, with the stack's first axis."""
        tensor = super().lookup_tensor(index)
        return tensor[None] if index.fqn in self._ranks.parts else tensor

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Raises KeyMismatchError, if strict, for a pattern or a module's entry that has no target on any rank."""
        found = [plan.planner_data for plan in global_plan]
        if self.allow_partial_load:
            self._warn_of_idle_objects(found)
        else:
            self._refuse_left(found)
        return super().create_global_plan(global_plan)

    _steps_that_leave_items = (create_global_plan,)

    def _refuse_left(self, found: list[_Findings]) -> None:
        assert self.metadata is not None
        idle = [p for p in self._patterns or () if all(p in one.idle for one in found)]
        if idle:
            raise KeyMismatchError(
                f"keys={idle} match no target in the state, so nothing would be loaded for them; it has, for example, "
                f"{sorted(flatten(self.plain.state)[0])[:5]}"
            )
        owed = np.bitwise_or.reduce([one.owed for one in found])
        left = owed & ~np.bitwise_or.reduce([one.targets for one in found])
        names = [name for name, bit in zip(self._saved, np.unpackbits(left), strict=False) if bit]
        if names:
            shown = listed([without_target(name) for name in names])
            raise KeyMismatchError(
                f"the modules and optimizers of the state lack {len(names)} of their entries in the checkpoint, on all "
                f"ranks; nothing was loaded:{shown}\n{self._close_names(names)}"
                "strict=False leaves these out, keys=[...] loads a part"
            )

    def _warn_of_idle_objects(self, found: list[_Findings]) -> None:
        """Modules and optimizers that get nothing are none of the checkpoint's, by their names."""
        assert self.metadata is not None
        taken = np.unpackbits(np.bitwise_or.reduce([one.targets for one in found]))
        names = [name for name, bit in zip(self._saved, taken, strict=False) if bit]
        names += self._ranks.parts
        for prefix in self.plain.exact:
            if any(map(_below(prefix), self.missing)) and not any(map(_below(prefix), names)):
                some = sorted({name.partition(".")[0] for name in self._saved})[:5]
                warn(f"{prefix[:-1]!r} got none of its entries from the checkpoint, which has, for example, {some}")

    def _close_names(self, names: list[str]) -> str:
        """What the optimizers here call the parameters that entries without a target may be of."""
        for target in self.plain.optimizers:
            stem = f"{target.prefix}state."
            named = any(name.startswith(stem) and not name[len(stem) :].partition(".")[0].isdigit() for name in names)
            if named and all(isinstance(name, int) for group in target.groups for name in group):
                return (
                    f"Without its module in the state, the parameters of {target.prefix[:-1]!r} have only numbers, and "
                    "the checkpoint has names: put the module into the state, too\n"
                )
        close = {
            name: own
            for target in self.plain.optimizers
            for name in names
            if name.startswith(f"{target.prefix}state.") and (own := target.close_names(name))
        }
        shown = [f"\n  {name!r}: {', '.join(map(repr, own))}" for name, own in itertools.islice(close.items(), 5)]
        return f"Parameters of the state with names like these:{''.join(shown)}\n" if shown else ""

    def _is_asked_for(self, fqn: str) -> bool:
        if fqn in self._ranks.kept:
            return False
        if self._patterns is None or fqn in self._group_names:
            return True
        return any(matches(fqn, pattern) for pattern in self._patterns)

    def _is_required(self, fqn: str) -> bool:
        # Of what it keeps for itself, no other rank can have the target.
        return (self._differs or fqn in self._ranks.parts) and self._is_of_an_object(fqn)

    def _is_of_an_object(self, fqn: str) -> bool:
        return any(fqn.startswith(prefix) for prefix in self.plain.exact)

    def _refuse_idle_patterns(self, names: set[str]) -> None:
        idle = [p for p in self._patterns or () if not any(matches(name, p) for name in names)]
        if idle:
            raise KeyMismatchError(
                f"keys={idle} match nothing in the checkpoint; it has, for example, {sorted(names)[:5]}"
            )


def _below(prefix: str) -> Callable[[str], bool]:
    return lambda name: name.startswith(prefix)


def _with_parts(metadata: Metadata, parts: Mapping[str, OwnPart]) -> Metadata:
    """Metadata in which a rank's parts of stacks are entries of their own."""
    entries, paths = dict(metadata.state_dict_metadata), dict(metadata.planner_data)
    for name, part in parts.items():
        stack = entries[part.stack]
        assert isinstance(stack, TensorStorageMetadata)
        size = torch.Size(stack.size[1:])
        whole = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
        entries[name] = TensorStorageMetadata(stack.properties, size, [whole])
        paths[name] = part.path
    return dataclasses.replace(metadata, state_dict_metadata=entries, planner_data=paths)


def _in_stack(item: ReadItem, part: OwnPart) -> ReadItem:
    """What reads a rank's own tensor, as what reads its part of a stack."""
    return dataclasses.replace(
        item,
        dest_offsets=torch.Size([0, *item.dest_offsets]),
        storage_index=MetadataIndex(part.stack),
        storage_offsets=torch.Size([part.place, *item.storage_offsets]),
        lengths=torch.Size([1, *item.lengths]),
    )


def _mask(entries: Collection[str], names: set[str]) -> np.ndarray[Any, Any]:
    return np.packbits([entry in names for entry in entries]) if entries else np.zeros(0, np.uint8)
