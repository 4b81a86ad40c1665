"""The targets of ``load`` in the user's state (modules, optimizers and other objects), and checks over all ranks."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from zarrckpt._errors import KeyMismatchError, warn
from zarrckpt._format.grid import Box
from zarrckpt._format.matching import did_you_mean, hint, matches
from zarrckpt._format.state_path import DICT, LIST, StatePath
from zarrckpt._format.wire import record
from zarrckpt._load.fill import TensorTarget
from zarrckpt._load.match import Match, Saved, without_target
from zarrckpt._load.recheck import ReadEntries
from zarrckpt._load.whole import Roots, find_roots
from zarrckpt._plan.description import Description
from zarrckpt._plan.shards import Sharding
from zarrckpt._reports import count_text
from zarrckpt._state import objects
from zarrckpt._state.flatten import flatten
from zarrckpt._state.local_state import listed, tensor_entry
from zarrckpt._state.optimizers import SavedEntries, SavedTensor
from zarrckpt._state.per_rank import LoadedRanks, OwnPart

_GROUP = re.compile(r"(?:.*\.)?param_groups\.\d+\.")
"""The prefix of the names in an optimizer's parameter group."""


@record
@dataclasses.dataclass(frozen=True)
class Findings:
    """One rank's message to the coordinator about names that need a target on at least one rank.

    The target of a pattern or of a module's entry may be on another rank (pipeline stages, experts). Entries are bits
    of three masks over all entries of the checkpoint, in its order: 1,500 bytes per rank for 4,000 entries.
    """

    idle: list[str]
    """The patterns that match no target of this rank."""
    unmatched: np.ndarray[Any, Any]
    """The entries below this rank's modules and optimizers that have no target on this rank."""
    targets: np.ndarray[Any, Any]
    """The entries that have a target on this rank."""
    offered: np.ndarray[Any, Any]
    """The entries that this rank's containers load if no rank has a target for them."""


class ObjectMatch:
    """The targets of ``load``, including modules, optimizers and other Stateful objects through their state dicts.

    Args:
        keys: as for :func:`zarrckpt.load`. strict, allow_cast: as for :class:`Match`.

    Raises KeyMismatchError.
    """

    def __init__(
        self, saved: Saved, state: Mapping[str, Any], keys: Sequence[str] | None, *, strict: bool, allow_cast: bool
    ) -> None:
        self._saved = saved.entries
        """The entries of the checkpoint without the parts of stacks, which differ between ranks."""
        self._stored, self._parameters = saved.stored, saved.parameters
        self._strict = strict
        self._patterns = keys
        self._group_names: set[str] = set()
        self._ranks = LoadedRanks(saved.paths)
        known = _with_parts(saved, self._ranks.parts)
        self._refuse_idle_patterns({*known.entries})
        # An option of a group also needs the names of its parameters, which identify the group in the state.
        if keys is not None:
            groups = (_GROUP.match(name) for name in known.entries if self._is_asked_for(name))
            self._group_names = {f"{group[0]}params" for group in groups if group}
        asked = SavedEntries(
            known.entries,
            known.paths,
            self._is_asked_for,
            everything=keys is None,
            allow_cast=allow_cast,
            value=saved.value,
        )
        self.plain = objects.for_load(state, asked, self._ranks.source)
        for name in [name for name in self._ranks.parts if not self._ranks.is_own(name)]:
            del self._ranks.parts[name]
        self._match = Match(
            _with_parts(saved, self._ranks.parts),
            self.plain.state,
            strict=strict,
            allow_cast=allow_cast,
            select=self._is_asked_for,
            closed=self.plain.closed,
            roots=self._roots(allow_cast),
            mine=self._ranks.without_others,
        )
        self._check()
        if lost := sorted(self._match.roots.lost):
            warn(
                f"the checkpoint lacks {count_text(len(lost), 'tensor')} that Stateful objects and PerRanks of the "
                f"state have: {lost[:5]}. These objects get the saved state without the tensors"
            )

    def _roots(self, allow_cast: bool) -> Roots:
        exact = {prefix[:-1] for prefix in self.plain.exact}
        statefuls = {prefix[:-1] for prefix in self.plain.statefuls}
        return Roots(
            find_roots(self.plain.state, statefuls, self.plain.per_rank, exact),
            exact=exact,
            per_rank=self.plain.per_rank,
            strict=self._strict,
            allow_cast=allow_cast,
            is_own=self._ranks.is_own,
        )

    def _check(self) -> None:
        """Raise KeyMismatchError for differences on this rank.

        If there are any, the error also lists entries of modules and optimizers without a target on this rank.
        """
        try:
            self._match.check(self._is_own_of_an_object)
        except KeyMismatchError:
            try:
                self._match.check(self._is_of_an_object)
            except KeyMismatchError as err:
                raise self._ranks.explained(err, self.missing) from None

    @property
    def loaded(self) -> list[str]:
        """The names in the checkpoint that have a target on this rank, sorted."""
        return self._match.loaded

    @property
    def missing(self) -> list[str]:
        """The names of targets that the checkpoint lacks, sorted."""
        return self._match.missing

    @property
    def unexpected(self) -> list[str]:
        """The names in the checkpoint that have no target on this rank, sorted."""
        return self._ranks.without_others(self._match.unexpected)

    def take(self, mask: np.ndarray[Any, Any]) -> None:
        """Add entries that this rank's containers offered. ``mask`` is the result of :meth:`check_all`."""
        self._match.take(self._named(mask))

    def description(self) -> Description:
        """Return the boxes that this rank is to fill. Ranks exchange these to plan shared reads.

        Excludes parts of stacks, which each rank reads itself, and entries that :meth:`take` adds.
        """
        shardings: dict[Sharding, int] = {}
        entries = []
        for fqn, leaf in self._match.leaves.items():
            if fqn in self._ranks.parts or self._saved.get(fqn) is None:
                continue
            # Without a dtype: ranks may cast to different ones.
            entries.append(tensor_entry(StatePath((self.stored(fqn),), (DICT,)), leaf, "", shardings))
        return Description(tuple(entries), tuple(shardings))

    def tensors(self) -> Iterator[TensorTarget]:
        """Yield the tensors to fill."""
        for target in self._match.tensors():
            part = self._ranks.parts.get(target.fqn)
            target = target if part is None else _in_stack(target, part)
            yield dataclasses.replace(target, fqn=self.stored(target.fqn))

    def make_private(self, names: Iterable[str], *, optimizers: bool = False) -> None:
        """Replace targets of Stateful objects (or of optimizers) by new tensors. ``restore`` passes these to them."""
        owners = [target.prefix for target in self.plain.optimizers] if optimizers else self.plain.statefuls
        self._match.make_private(name for name in names if name.startswith(tuple(owners)))

    def values(self) -> list[str]:
        """Return the names of the entries to read that are not tensors."""
        return self._match.values()

    def record(self, read: ReadEntries, values: Mapping[str, object]) -> None:
        """Record all entries that were read. Call it before :meth:`restore`."""
        roots = self._match.roots
        moved = _lists_with_gaps(self._match.paths[fqn] for fqn in self._match.leaves)
        for fqn, leaf in {**self._match.leaves, **values}.items():
            path = self._match.paths[fqn]
            if moved and any(path[:depth] in moved for depth in range(len(path))):
                continue
            # A Stateful may ignore an entry that its state does not have.
            if not (fqn in roots.added or fqn in roots.offered) or not self.plain.is_of_stateful(fqn):
                read.record(fqn, leaf)

    def replaced(self) -> list[tuple[str, StatePath]]:
        """Return the entries that were stored in plain containers, with their paths.

        Excludes tensors that were filled in place and entries of objects.
        """
        own = [objects.prefix_of(keys) for keys, _ in self.plain.restore]
        rows = ((fqn, self._match.paths[fqn]) for fqn in self._match.replaced)
        return [(fqn, path) for fqn, path in rows if not any(f"{fqn}.".startswith(prefix) for prefix in own)]

    def current_state(self, state: Mapping[str, Any]) -> objects.PlainState:
        """Return the state after :meth:`restore`, with the names of the targets."""
        return objects.for_check(state, self.plain, self._ranks.source)

    def stored(self, name: str) -> str:
        """Return the name in the checkpoint of an entry."""
        return self._stored.get(name, name)

    def finish(self, values: Mapping[str, object]) -> None:
        """Store values and rebuilt subtrees in the plain state. Call it after all reads."""
        self._match.finish({name: self._with_new_names(name, value) for name, value in values.items()})

    def _with_new_names(self, name: str, value: object) -> object:
        """Rename the parameters of an optimizer's groups."""
        for levels, names in self._parameters.items():
            if isinstance(value, list) and objects.rest_below(name, (*levels, "param_groups")) is not None:
                return [names.get(item, item) if isinstance(item, str) else item for item in value]
        return value

    def restore(self, state: dict[str, Any]) -> None:
        """Pass the loaded state dicts to the objects, then store the other entries in the user's state."""
        self.plain.restore_objects()
        for key, loaded in self.plain.state.items():
            back = objects.put_loaded(state[key], loaded)
            if back is not state[key]:
                state[key] = back

    # -- checks over all ranks

    def findings(self) -> Findings:
        """Return this rank's message to the coordinator."""
        names = [*self.loaded, *self.missing]
        idle = [p for p in self._patterns or () if not any(matches(name, p) for name in names)]
        unmatched = _mask(self._saved, {name for name in self.unexpected if self._is_of_an_object(name)})
        offered = _mask(self._saved, self._match.roots.offered)
        return Findings(idle, unmatched, _mask(self._saved, {*self.loaded}), offered)

    def check_all(self, found: Sequence[Findings]) -> np.ndarray[Any, Any]:
        """If strict, raise KeyMismatchError for a pattern or a module's entry that has no target on any rank.

        Returns a mask of the entries that :meth:`take` adds on each rank that offered them.
        """
        if self._strict:
            self._refuse_left(found)
        else:
            self._warn_of_idle_objects(found)
        offered = np.bitwise_or.reduce([one.offered for one in found])
        mask: np.ndarray[Any, Any] = offered & ~np.bitwise_or.reduce([one.targets for one in found])
        return mask

    def _named(self, mask: np.ndarray[Any, Any]) -> list[str]:
        return [name for name, bit in zip(self._saved, np.unpackbits(mask), strict=False) if bit]

    def _refuse_left(self, found: Sequence[Findings]) -> None:
        idle = [p for p in self._patterns or () if all(p in one.idle for one in found)]
        if idle:
            raise KeyMismatchError(
                f"keys={idle} match no target in the state. Nothing was loaded. The state has, for example, "
                f"{sorted(flatten(self.plain.state)[0])[:5]}"
            )
        unmatched = np.bitwise_or.reduce([one.unmatched for one in found])
        left = unmatched & ~np.bitwise_or.reduce([one.targets for one in found])
        names = self._named(left)
        if names:
            shown = listed([without_target(name) for name in names])
            raise KeyMismatchError(
                f"{len(names)} entries of modules and optimizers in the checkpoint have no target on any rank. Nothing "
                f"was loaded:{shown}\n{self._close_names(names)}"
                "strict=False skips these entries. keys=[...] loads only the named entries"
            )

    def _warn_of_idle_objects(self, found: Sequence[Findings]) -> None:
        """Warn if a module or optimizer gets no entry, because the checkpoint may have it under a different name."""
        names = self._named(np.bitwise_or.reduce([one.targets for one in found]))
        names += self._ranks.parts
        for prefix in self.plain.exact:
            if any(map(_is_below(prefix), self.missing)) and not any(map(_is_below(prefix), names)):
                some = sorted({name.partition(".")[0] for name in self._saved})[:5]
                warn(f"{prefix[:-1]!r} got none of its entries from the checkpoint, which has, for example, {some}")

    def _close_names(self, names: list[str]) -> str:
        """Return a hint with parameters of the state whose names are similar to entries without a target, or ''."""
        for target in self.plain.optimizers:
            stem = f"{target.prefix}state."
            named = any(name.startswith(stem) and not name[len(stem) :].partition(".")[0].isdigit() for name in names)
            if named and all(isinstance(name, int) for group in target.groups for name in group):
                return (
                    f"Without its module in the state, the parameters of {target.prefix[:-1]!r} have only numbers, but "
                    "the checkpoint has names. To load it, put the module into the state, too\n"
                )
        close = {
            name: own
            for target in self.plain.optimizers
            for name in names
            if name.startswith(f"{target.prefix}state.") and (own := target.close_names(name))
        }
        shown = [f"\n  {name!r}: {', '.join(map(repr, own))}" for name, own in itertools.islice(close.items(), 5)]
        if shown:
            return f"Parameters of the state with similar names:{''.join(shown)}\n"
        return did_you_mean(names, self.loaded, "rename= loads entries under other names")

    # -- selected names

    def _is_asked_for(self, fqn: str) -> bool:
        if fqn in self._ranks.kept:
            return False
        if self._patterns is None or fqn in self._group_names:
            return True
        return any(matches(fqn, pattern) for pattern in self._patterns)

    def _is_own_of_an_object(self, fqn: str) -> bool:
        # No other rank can have the target of this rank's part of a stack.
        return fqn in self._ranks.parts and self._is_of_an_object(fqn)

    def _is_of_an_object(self, fqn: str) -> bool:
        return any(fqn.startswith(prefix) for prefix in self.plain.exact)

    def _refuse_idle_patterns(self, names: set[str]) -> None:
        idle = [p for p in self._patterns or () if not any(matches(name, p) for name in names)]
        if idle:
            raise KeyMismatchError(f"keys={idle} match nothing in the checkpoint: {hint(idle[0], sorted(names))}")


def _is_below(prefix: str) -> Callable[[str], bool]:
    return lambda name: name.startswith(prefix)


def _with_parts(saved: Saved, parts: Mapping[str, OwnPart]) -> Saved:
    """Return the entries of a checkpoint, with an additional entry for each of a rank's parts of stacks.

    A rank's entries have the order of the first rank's entries. A part follows its stack.
    """
    if not parts:
        return saved
    by_stack: dict[str, list[str]] = {}
    ranks: dict[str, str] = {}
    for name, part in parts.items():
        by_stack.setdefault(part.stack, []).append(name)
        level = part.path.rank_at
        assert level is not None
        ranks["".join(f"{key}." for key in part.path[:level])] = str(part.path[level])
    entries: dict[str, SavedTensor | None] = {}
    for name, entry in saved.entries.items():
        entries.setdefault(name, entry)
        for prefix, rank in ranks.items():
            other, _, rest = name.removeprefix(prefix).partition(".")
            own = f"{prefix}{rank}.{rest}"
            if name.startswith(prefix) and other.isdecimal() and own in saved.entries:
                entries.setdefault(own, saved.entries[own])
        for own in by_stack.get(name, ()):
            assert entry is not None
            entries[own] = SavedTensor(entry.shape[1:], entry.dtype)
    paths = {**saved.paths, **{name: part.path for name, part in parts.items()}}
    return dataclasses.replace(saved, entries=entries, paths=paths)


def _in_stack(target: TensorTarget, part: OwnPart) -> TensorTarget:
    """Return a target that fills the tensor of ``target`` from this rank's part of a stack."""
    box = Box((part.place, *target.box.offset), (1, *target.box.shape))
    return TensorTarget(part.stack, box, target.tensor[None], name=target.name)


def _lists_with_gaps(paths: Iterable[StatePath]) -> set[tuple[str | int, ...]]:
    """Return the paths of lists of which some indices are not loaded. If rebuilt, their items get other indices."""
    positions: dict[tuple[str | int, ...], set[str | int]] = {}
    for path in paths:
        for depth, container in enumerate(path.containers):
            if container == LIST:
                positions.setdefault(tuple(path[:depth]), set()).add(path[depth])
    return {path for path, found in positions.items() if found != {*range(len(found))}}


def _mask(entries: Collection[str], names: Iterable[str]) -> np.ndarray[Any, Any]:
    known = {*names}
    return np.packbits([entry in known for entry in entries]) if entries else np.zeros(0, np.uint8)
