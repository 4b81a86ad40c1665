"""The targets of ``load`` in a user's state: modules, optimizers and other objects, on one rank and on all."""

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
"""Prefix of the names of options of an optimizer's parameter group."""


@record
@dataclasses.dataclass(frozen=True)
class Findings:
    """What one rank tells the coordinator of a load, about names that need a target on some rank.

    A pattern, or an entry of a module, may have its target on another rank: the stages of a pipeline, experts. Entries
    are bits of two masks over all of the checkpoint's, in its order: 1,000 bytes per rank for 4,000 entries.
    """

    idle: list[str]
    """Patterns that match no target of this rank."""
    owed: np.ndarray[Any, Any]
    """Entries below its modules and optimizers for which it has no target."""
    targets: np.ndarray[Any, Any]
    """Entries for which it has one."""
    offered: np.ndarray[Any, Any]
    """Entries that its containers take if no rank has a target for them."""


class ObjectMatch:
    """The targets of ``load``: modules, optimizers and other Stateful objects too, through their state dicts.

    Args:
        keys: as for :func:`zarrckpt.load`. strict, allow_cast: as for :class:`Match`.

    Raises KeyMismatchError.
    """

    def __init__(
        self, saved: Saved, state: Mapping[str, Any], keys: Sequence[str] | None, *, strict: bool, allow_cast: bool
    ) -> None:
        self._saved = saved.entries
        """The checkpoint's own entries: without the parts of stacks, which differ between ranks."""
        self._stored, self._parameters = saved.stored, saved.parameters
        self._strict = strict
        self._patterns = keys
        self._group_names: set[str] = set()
        self._ranks = LoadedRanks(saved.paths)
        known = _with_parts(saved, self._ranks.parts)
        self._refuse_idle_patterns({*known.entries})
        # With an option of a group, the names of its parameters are needed: they tell which group here takes it.
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
                f"state have, and these get the saved state without them: {lost[:5]}"
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
        """What differs on this rank; and only then also its modules' entries that have no target here."""
        try:
            self._match.check(self._is_own_of_an_object)
        except KeyMismatchError:
            try:
                self._match.check(self._is_of_an_object)
            except KeyMismatchError as err:
                raise self._ranks.explained(err, self.missing) from None

    @property
    def loaded(self) -> list[str]:
        """The names that have a target here, sorted."""
        return self._match.loaded

    @property
    def missing(self) -> list[str]:
        """The names of targets that the checkpoint lacks, sorted."""
        return self._match.missing

    @property
    def unexpected(self) -> list[str]:
        """The names in the checkpoint that have no target here, sorted."""
        return self._ranks.without_others(self._match.unexpected)

    def take(self, mask: np.ndarray[Any, Any]) -> None:
        """Load entries, too, that containers here offer to take; the mask is that of :meth:`check_all`."""
        self._match.take(self._named(mask))

    def description(self) -> Description:
        """The boxes that this rank is to fill, as other ranks must know them to share what they read.

        Parts of stacks are not among them: each rank reads its own. Nor is what :meth:`take` adds.
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
        """The memory to fill."""
        for target in self._match.tensors():
            part = self._ranks.parts.get(target.fqn)
            target = target if part is None else _in_stack(target, part)
            yield dataclasses.replace(target, fqn=self.stored(target.fqn))

    def make_private(self, names: Iterable[str], *, optimizers: bool = False) -> None:
        """Give new tensors to those targets that a Stateful owns, or an optimizer: it takes back what it is given."""
        owners = [target.prefix for target in self.plain.optimizers] if optimizers else self.plain.statefuls
        self._match.make_private(name for name in names if name.startswith(tuple(owners)))

    def values(self) -> list[str]:
        """The entries to read that are no tensors."""
        return self._match.values()

    def record(self, read: ReadEntries, values: Mapping[str, object]) -> None:
        """Record all entries that were read, before objects take them."""
        roots = self._match.roots
        moved = _lists_with_gaps(self._match.paths[fqn] for fqn in self._match.leaves)
        for fqn, leaf in {**self._match.leaves, **values}.items():
            path = self._match.paths[fqn]
            if moved and any(path[:depth] in moved for depth in range(len(path))):
                continue
            # An object may have no use for an entry that its own state does not have.
            if not (fqn in roots.added or fqn in roots.offered) or not self.plain.is_of_stateful(fqn):
                read.record(fqn, leaf)

    def replaced(self) -> list[tuple[str, StatePath]]:
        """The entries that were put into plain containers, beside tensors that were filled in place; and their paths.

        Those of objects are not among them.
        """
        own = [objects.prefix_of(keys) for keys, _ in self.plain.restore]
        rows = ((fqn, self._match.paths[fqn]) for fqn in self._match.replaced)
        return [(fqn, path) for fqn, path in rows if not any(f"{fqn}.".startswith(prefix) for prefix in own)]

    def current_state(self, state: Mapping[str, Any]) -> objects.PlainState:
        """The state after :meth:`restore`, under the names of the targets."""
        return objects.for_check(state, self.plain, self._ranks.source)

    def stored(self, name: str) -> str:
        """Return the name in the checkpoint of an entry."""
        return self._stored.get(name, name)

    def finish(self, values: Mapping[str, object]) -> None:
        """Put values and rebuilt subtrees into the plain state, after everything was read."""
        self._match.finish({name: self._with_new_names(name, value) for name, value in values.items()})

    def _with_new_names(self, name: str, value: object) -> object:
        """Rename the parameters of an optimizer's groups."""
        for place, names in self._parameters.items():
            if isinstance(value, list) and objects.rest_below(name, (*place, "param_groups")) is not None:
                return [names.get(item, item) if isinstance(item, str) else item for item in value]
        return value

    def restore(self, state: dict[str, Any]) -> None:
        """Objects take their state dicts back; then the user's state has the rest."""
        self.plain.restore_objects()
        for key, loaded in self.plain.state.items():
            back = objects.put_loaded(state[key], loaded)
            if back is not state[key]:
                state[key] = back

    # -- what needs a target on some rank

    def findings(self) -> Findings:
        """What the coordinator must know of this rank's targets."""
        names = [*self.loaded, *self.missing]
        idle = [p for p in self._patterns or () if not any(matches(name, p) for name in names)]
        owed = _mask(self._saved, {name for name in self.unexpected if self._is_of_an_object(name)})
        offered = _mask(self._saved, self._match.roots.offered)
        return Findings(idle, owed, _mask(self._saved, {*self.loaded}), offered)

    def check_all(self, found: Sequence[Findings]) -> np.ndarray[Any, Any]:
        """Raise KeyMismatchError, if strict, for a pattern or a module's entry that has no target on any rank.

        Returns a mask of the entries that :meth:`take` is to add, on each rank that has offered them.
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
                f"keys={idle} match no target in the state, so nothing would be loaded for them; it has, for example, "
                f"{sorted(flatten(self.plain.state)[0])[:5]}"
            )
        owed = np.bitwise_or.reduce([one.owed for one in found])
        left = owed & ~np.bitwise_or.reduce([one.targets for one in found])
        names = self._named(left)
        if names:
            shown = listed([without_target(name) for name in names])
            raise KeyMismatchError(
                f"the modules and optimizers of the state lack {len(names)} of their entries in the checkpoint, on all "
                f"ranks; nothing was loaded:{shown}\n{self._close_names(names)}"
                "strict=False leaves these out, keys=[...] loads a part"
            )

    def _warn_of_idle_objects(self, found: Sequence[Findings]) -> None:
        """Warn of modules and optimizers that get nothing: the checkpoint may have them under other names."""
        names = self._named(np.bitwise_or.reduce([one.targets for one in found]))
        names += self._ranks.parts
        for prefix in self.plain.exact:
            if any(map(_is_below(prefix), self.missing)) and not any(map(_is_below(prefix), names)):
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
        if shown:
            return f"Parameters of the state with names like these:{''.join(shown)}\n"
        return did_you_mean(names, self.loaded, "rename= loads entries under other names")

    # -- what is asked for

    def _is_asked_for(self, fqn: str) -> bool:
        if fqn in self._ranks.kept:
            return False
        if self._patterns is None or fqn in self._group_names:
            return True
        return any(matches(fqn, pattern) for pattern in self._patterns)

    def _is_own_of_an_object(self, fqn: str) -> bool:
        # No other rank can have the target of what this one keeps for itself.
        return fqn in self._ranks.parts and self._is_of_an_object(fqn)

    def _is_of_an_object(self, fqn: str) -> bool:
        return any(fqn.startswith(prefix) for prefix in self.plain.exact)

    def _refuse_idle_patterns(self, names: set[str]) -> None:
        idle = [p for p in self._patterns or () if not any(matches(name, p) for name in names)]
        if idle:
            raise KeyMismatchError(f"keys={idle} match nothing in the checkpoint; {hint(idle[0], sorted(names))}")


def _is_below(prefix: str) -> Callable[[str], bool]:
    return lambda name: name.startswith(prefix)


def _with_parts(saved: Saved, parts: Mapping[str, OwnPart]) -> Saved:
    """The entries of a checkpoint, with an entry for each of a rank's parts of stacks.

    A rank's own entries come in the order of the first rank's, with a part in the place of its stack.
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
    """The target for a rank's part of a stack that fills the memory of its own tensor."""
    box = Box((part.place, *target.box.offset), (1, *target.box.shape))
    return TensorTarget(part.stack, box, target.tensor[None], name=target.name)


def _lists_with_gaps(paths: Iterable[StatePath]) -> set[tuple[str | int, ...]]:
    """The lists of which some positions are not loaded, by their paths: others move up if a list is made anew."""
    positions: dict[tuple[str | int, ...], set[str | int]] = {}
    for path in paths:
        for depth, container in enumerate(path.containers):
            if container == LIST:
                positions.setdefault(tuple(path[:depth]), set()).add(path[depth])
    return {path for path, found in positions.items() if found != {*range(len(found))}}


def _mask(entries: Collection[str], names: Iterable[str]) -> np.ndarray[Any, Any]:
    known = {*names}
    return np.packbits([entry in known for entry in entries]) if entries else np.zeros(0, np.uint8)
