"""State of which every rank has its own: random number generators, data loaders."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from zarrckpt._errors import KeyMismatchError, UnsupportedValueError
from zarrckpt._format.state_path import RANKS, StatePath
from zarrckpt._ranks.group import global_rank
from zarrckpt._state.torch_kinds import is_dtensor, is_sharded_tensor

NewRanks = Literal["error", "wrap", "keep"]

_RANK = re.compile("0|[1-9][0-9]{0,8}")


@dataclass(eq=False)
class PerRank:
    """A part of a state that each rank saves for itself: ``{"rng": PerRank(torch.get_rng_state())}``.

    Without it, what ranks hold under one name is saved once. :func:`zarrckpt.save`, ``async_save`` and ``load`` take it
    at any depth of a state's dicts and lists, and in what a Stateful's ``state_dict`` returns. Ranks are named by their
    numbers in the default process group (0 without a group), in sub-groups and with ``no_dist`` too.

    Tensors that have one shape and dtype on all ranks are one array, whose first axis is the rank: ``rng.ranks`` in
    ``zarrckpt.open(url)``, ``rng/ranks`` for other Zarr readers; :meth:`Checkpoint.ranks` tells which rank each element
    of that axis is. Tensors of other forms, and values, are entries of each rank: ``loader.3.epoch``. A load with the
    target ``{"rng": None}`` gives the dict of all of them.

    A load puts what this rank saved into ``value``: tensors are filled in place and must have the shape that was saved,
    other values are replaced, dicts and lists get the saved entries and no others, objects take their state back; a
    target of None takes whatever there is.

    On other ranks than at the save: a rank whose number was saved gets its own state; the state of ranks that are gone
    stays in the checkpoint; what a rank without saved state gets is said by ``new_ranks`` at the load. By default
    such a rank is an error, as a missing key is (``strict=False`` leaves its values alone and reports them): two ranks
    that silently draw the same random numbers, or read the same data, do more harm than a load that stops.

    A stack costs what any tensor does. A value costs an entry in the root document for each rank.

    Args:
        value: a tensor or value, a dict or list of them at any depth, a Stateful object, a module or optimizer that is
            not sharded. Sharded tensors inside are an UnsupportedValueError: they belong beside it, not inside.
        new_ranks: for a rank r without saved state: ``"error"``; ``"wrap"``, the state of ``saved[r % len(saved)]``,
            where ``saved`` are the saved ranks in ascending order; ``"keep"``, nothing: the target stays as it is.
            Where no rank's state was saved, ``"wrap"`` is an error as well.

    It can't be pickled, so what would keep it as a pickle raises UnsupportedValueError: ``dcp.save``, and tuples and
    other objects that hold it.
    """

    value: Any = None
    new_ranks: NewRanks = field(default="error", kw_only=True)

    def __post_init__(self) -> None:
        if self.new_ranks not in get_args(NewRanks):
            raise ValueError(f"new_ranks must be one of {', '.join(get_args(NewRanks))}, got {self.new_ranks!r}")

    def __copy__(self) -> PerRank:
        return PerRank(self.value, new_ranks=self.new_ranks)

    def __deepcopy__(self, memo: dict[int, Any]) -> PerRank:
        return PerRank(copy.deepcopy(self.value, memo), new_ranks=self.new_ranks)

    def __reduce__(self) -> tuple[object, ...]:
        raise UnsupportedValueError(
            "a PerRank is taken only by zarrckpt.save, async_save and load, and only in dicts, lists and what a "
            "Stateful's state_dict returns; elsewhere use a dict with the rank as the key"
        )


@dataclass(frozen=True)
class OwnPart:
    """What a stack has for one rank: an element of its first axis."""

    stack: str
    """The flat name of the entry."""
    place: int
    path: StatePath
    """Where the rank's own tensor sits, with its number in the place of RANKS."""


class LoadedRanks:
    """Whose state each PerRank of one load takes, by the paths of the checkpoint's entries."""

    def __init__(self, paths: Mapping[str, StatePath]) -> None:
        self._rank = global_rank()
        self._saved: dict[str, list[int]] = {}
        """By flat-name prefix the ranks whose state is below."""
        self._advice: dict[str, str] = {}
        self._others: set[str] = set()
        self._own: set[str] = set()
        self._names = paths.keys()
        self.kept: set[str] = set()
        """Flat names of the PerRanks for which nothing is loaded."""
        self.parts = self._own_parts(paths)
        """What stacks have for the rank whose state this one takes, by the names of that rank's own tensors."""

    def _own_parts(self, paths: Mapping[str, StatePath]) -> dict[str, OwnPart]:
        stacks = {fqn: path for fqn, path in paths.items() if path.ranks}
        for path in stacks.values():
            prefix = _prefix(path)
            self._saved[prefix] = sorted({*self._saved.get(prefix, ()), *path.ranks})
        for prefix, ranks in self._saved.items():
            self._saved[prefix] = sorted({*ranks, *_separate(self._names, prefix)})
        parts = {}
        for fqn, path in stacks.items():
            source = self._source(_prefix(path))
            if source in path.ranks:
                own = path.with_rank(str(source))
                parts[own.fqn] = OwnPart(fqn, path.ranks.index(source), own)
        return parts

    def _ranks_below(self, prefix: str) -> list[int]:
        """The ranks that have entries below a flat-name prefix, or a part in a stack there, in ascending order."""
        if prefix not in self._saved:
            self._saved[prefix] = _separate(self._names, prefix)
        return self._saved[prefix]

    def _source(self, prefix: str) -> int | None:
        """The rank whose state this one would take; None where no rank's is there."""
        saved = self._ranks_below(prefix)
        if self._rank in saved:
            return self._rank
        return saved[self._rank % len(saved)] if saved else None

    def source(self, prefix: str, entry: PerRank) -> int | None:
        """The rank whose subtree is loaded into an entry at a flat-name prefix; None where the entry is kept.

        An entry that is an error takes this rank's own subtree, which is missing.
        """
        name, rank = prefix[:-1], self._rank
        saved, wrapped = self._ranks_below(prefix), self._source(prefix)
        source: int | None = rank
        if rank not in saved:
            if entry.new_ranks == "keep":
                self.kept.add(name)
                source = None
            elif entry.new_ranks == "wrap" and wrapped is not None:
                source = wrapped
            else:
                self._advice[f"{name}.{rank}"] = _advice(name, rank, saved, wrapped)
        if source is not None:
            self._own.add(f"{prefix}{source}")
        self._others |= {f"{prefix}{other}" for other in (*saved, RANKS) if other != source}
        return source

    def is_own(self, name: str) -> bool:
        """Whether a name is of what some PerRank takes: of a part of a stack, or of an entry."""
        return any(stem in self._own for stem in _stems(name))

    def explained(self, error: KeyMismatchError, missing: Iterable[str]) -> KeyMismatchError:
        """An error about missing names, with what can be done where they are those of a rank without saved state."""
        lines = {self._advice[stem] for name in missing for stem in _stems(name) if stem in self._advice}
        return KeyMismatchError("\n".join([str(error), *sorted(lines)])) if lines else error

    def without_others(self, names: Iterable[str]) -> list[str]:
        """Names but those of other ranks' state, which need no target here."""
        if not self._others:
            return list(names)
        return [name for name in names if not any(stem in self._others for stem in _stems(name))]


def _advice(name: str, rank: int, saved: list[int], wrapped: int | None) -> str:
    keep = "new_ranks='keep' leaves the target as it is"
    if wrapped is None:
        return f"{name!r} has no rank's state in the checkpoint, so it was not saved as a PerRank: PerRank(..., {keep})"
    return (
        f"{name!r} has the state of {len(saved)} ranks ({saved[0]} to {saved[-1]}), and this is rank {rank}: "
        f"PerRank(..., new_ranks='wrap') takes that of rank {wrapped}, {keep}"
    )


def _stems(name: str) -> Iterable[str]:
    """The beginnings of a flat name up to each dot, and the name."""
    return (name[:place] for place, letter in enumerate(f"{name}.") if letter == ".")


def _prefix(path: StatePath) -> str:
    """What the flat names of all ranks' entries begin with, of the one at a path."""
    return "".join(f"{key}." for key in path[: path.rank_at])


def _separate(names: Iterable[str], prefix: str) -> list[int]:
    """The ranks that have entries of their own below a flat-name prefix, in ascending order."""
    parts = {name[len(prefix) :].partition(".")[0] for name in names if name.startswith(prefix)}
    return sorted(int(part) for part in parts if _RANK.fullmatch(part))


def refuse_sharded(name: str, value: object) -> None:
    """Raise UnsupportedValueError for a sharded tensor in one rank's own state: no rank has it alone."""
    if is_dtensor(value) or is_sharded_tensor(value):
        raise UnsupportedValueError(
            f"{name!r} is a {type(value).__name__} inside a PerRank: all ranks together save it, so put it, or the "
            "module or optimizer that it comes from, into the state without PerRank; or keep its local part"
        )
    if isinstance(value, Mapping):
        for key, item in value.items():
            refuse_sharded(f"{name}.{key}", item)
    elif isinstance(value, list):
        for position, item in enumerate(value):
            refuse_sharded(f"{name}.{position}", item)
