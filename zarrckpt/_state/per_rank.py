"""State that differs on every rank, such as random number generators and data loaders."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from zarrckpt._errors import KeyMismatchError, UnsupportedValueError
from zarrckpt._format.state_path import RANKS, StatePath
from zarrckpt._ranks.group import global_rank
from zarrckpt._state.flatten import stems
from zarrckpt._state.torch_kinds import is_sharded

NewRanks = Literal["error", "wrap", "keep"]

_RANK = re.compile("0|[1-9][0-9]{0,8}")


@dataclass(eq=False)
class PerRank:
    """A part of a state that each rank saves for itself, for example ``{"rng": PerRank(torch.get_rng_state())}``.

    Without PerRank, an entry that several ranks hold is saved once. :func:`zarrckpt.save`, ``async_save`` and ``load``
    accept it at any depth of dicts and lists, and in the result of a Stateful's ``state_dict``. Ranks are numbered as
    in the default process group (0 without a group), also in sub-groups and with ``no_dist``.

    Tensors with the same shape and dtype on all ranks become one array, whose first axis is the rank: ``rng.ranks`` in
    ``zarrckpt.open(url)``, ``rng/ranks`` for other Zarr readers. :meth:`Checkpoint.entry` returns the rank of each
    element of this axis. Other tensors, and values, are entries of each rank, such as ``loader.3.epoch``. A load with
    the target ``{"rng": None}`` returns the dict of all of them.

    A load puts the state of this rank into ``value``. Tensors are filled in place and must have the saved shape, other
    values are replaced, dicts and lists get exactly the saved entries, and objects load their state. A target of None
    accepts any state.

    A load on a different number of ranks: a rank whose number was saved gets its own state. The state of other saved
    ranks stays in the checkpoint. For a rank without saved state, ``new_ranks`` decides. By default such a rank is an
    error, like a missing key (``strict=False`` keeps its values and reports them). Ranks that silently draw the same
    random numbers, or read the same data, do more harm than a failed load.

    A stack costs as much as any tensor. A value costs one entry of the root document per rank.

    Args:
        value: a tensor or value, a dict or list of them at any depth, a Stateful object, or a module or optimizer that
            is not sharded. A sharded tensor inside raises UnsupportedValueError: put it into the state without PerRank.
        new_ranks: the rule for a rank r without saved state. ``"error"`` raises; ``"wrap"`` loads the state of
            ``saved[r % len(saved)]``, with ``saved`` the saved ranks in ascending order; ``"keep"`` leaves the target
            unchanged. If no rank was saved, ``"wrap"`` raises too.

    A PerRank cannot be pickled. Calls that would pickle it raise UnsupportedValueError: ``dcp.save``, and tuples and
    other objects that contain it.
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
            "a PerRank is accepted only by zarrckpt.save, async_save and load, and only in dicts, lists and the "
            "state_dict of a Stateful; elsewhere use a dict with the rank as the key"
        )


@dataclass(frozen=True)
class StackElement:
    """The tensor of one rank in a stack: an element of the first axis."""

    stack: str
    """The fqn of the stack."""
    index: int
    """The index on the first axis."""
    path: StatePath
    """The state path of the rank's tensor, with the rank's number instead of RANKS."""


class PerRankSources:
    """The rank whose state each PerRank of one load takes, from the paths of the checkpoint's entries."""

    def __init__(self, paths: Mapping[str, StatePath]) -> None:
        self._rank = global_rank()
        self._saved: dict[str, list[int]] = {}
        """The ranks with saved state, by the prefix of the names."""
        self._next_steps: dict[str, str] = {}
        """The next step for each PerRank without saved state, by the name of its missing state."""
        self._chosen: set[str] = set()
        """The names of the states that PerRanks of this rank load."""
        self._not_chosen: set[str] = set()
        """The names of other ranks' states of the same PerRanks."""
        self._names = paths.keys()
        self.kept: set[str] = set()
        """fqns of the PerRanks that stay unchanged."""
        self.elements = self._own_elements(paths)
        """The elements of stacks that this rank loads, by the names of the rank's own tensors."""

    def _own_elements(self, paths: Mapping[str, StatePath]) -> dict[str, StackElement]:
        stacks = {fqn: path for fqn, path in paths.items() if path.ranks}
        for path in stacks.values():
            prefix = _prefix(path)
            self._saved[prefix] = sorted({*self._saved.get(prefix, ()), *path.ranks})
        for prefix, ranks in self._saved.items():
            self._saved[prefix] = sorted({*ranks, *_ranks_with_entries(self._names, prefix)})
        elements = {}
        for fqn, path in stacks.items():
            source = self._wrapped_rank(_prefix(path))
            if source in path.ranks:
                own = path.with_rank(str(source))
                elements[own.fqn] = StackElement(fqn, path.ranks.index(source), own)
        return elements

    def _ranks_below(self, prefix: str) -> list[int]:
        """Return the ranks with entries below a prefix, or with an element of a stack there, in ascending order."""
        if prefix not in self._saved:
            self._saved[prefix] = _ranks_with_entries(self._names, prefix)
        return self._saved[prefix]

    def _wrapped_rank(self, prefix: str) -> int | None:
        """Return the rank whose state this rank would load with ``"wrap"``, or None if no rank was saved."""
        saved = self._ranks_below(prefix)
        if self._rank in saved:
            return self._rank
        return saved[self._rank % len(saved)] if saved else None

    def choose_rank(self, prefix: str, entry: PerRank) -> int | None:
        """Choose and record the rank whose state is loaded into a PerRank. Return None if the PerRank is kept.

        For a PerRank that is an error, this is the rank itself, whose state is missing.
        """
        name, rank = prefix[:-1], self._rank
        saved, wrapped = self._ranks_below(prefix), self._wrapped_rank(prefix)
        source: int | None = rank
        if rank not in saved:
            if entry.new_ranks == "keep":
                self.kept.add(name)
                source = None
            elif entry.new_ranks == "wrap" and wrapped is not None:
                source = wrapped
            else:
                self._next_steps[f"{name}.{rank}"] = _next_step(name, rank, saved, wrapped)
        if source is not None:
            self._chosen.add(f"{prefix}{source}")
        self._not_chosen |= {f"{prefix}{other}" for other in (*saved, RANKS) if other != source}
        return source

    def drop_other_elements(self) -> None:
        """Drop the elements of stacks that no PerRank of the state loads. Call it after :meth:`choose_rank`."""
        self.elements = {name: element for name, element in self.elements.items() if self.is_chosen(name)}

    def is_chosen(self, name: str) -> bool:
        """Whether a name belongs to the state that a PerRank of this rank loads."""
        return any(stem in self._chosen for stem in stems(name))

    def explain_missing(self, error: KeyMismatchError, missing: Iterable[str]) -> KeyMismatchError:
        """Return an error about missing names, with the next step if a rank has no saved state."""
        lines = {self._next_steps[stem] for name in missing for stem in stems(name) if stem in self._next_steps}
        return KeyMismatchError("\n".join([str(error), *sorted(lines)])) if lines else error

    def drop_other_names(self, names: Iterable[str]) -> list[str]:
        """Return names without those of other ranks' state, which need no target on this rank."""
        if not self._not_chosen:
            return list(names)
        return [name for name in names if not any(stem in self._not_chosen for stem in stems(name))]


def _next_step(name: str, rank: int, saved: list[int], wrapped: int | None) -> str:
    keep = "new_ranks='keep' leaves the target as it is"
    if wrapped is None:
        return (
            f"{name!r} has no state of ranks in the checkpoint, so it was not saved as a PerRank: PerRank(..., {keep})"
        )
    return (
        f"{name!r} has the state of {len(saved)} ranks ({saved[0]} to {saved[-1]}), but this is rank {rank}: "
        f"PerRank(..., new_ranks='wrap') loads the state of rank {wrapped}, {keep}"
    )


def _prefix(path: StatePath) -> str:
    """Return the common prefix of the fqns of all ranks' entries at a path."""
    return "".join(f"{key}." for key in path[: path.rank_at])


def _ranks_with_entries(names: Iterable[str], prefix: str) -> list[int]:
    """Return the ranks with separate entries below a prefix, in ascending order."""
    parts = {name[len(prefix) :].partition(".")[0] for name in names if name.startswith(prefix)}
    return sorted(int(part) for part in parts if _RANK.fullmatch(part))


def refuse_sharded(name: str, value: object) -> None:
    """Raise UnsupportedValueError for a sharded tensor in a PerRank, because no rank holds all of it."""
    if is_sharded(value):
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
