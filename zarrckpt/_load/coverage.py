"""The check over all ranks that every entry that needs a target has one. The target may be on any rank.

The target of a pattern of ``keys`` or of a module's entry may be on another rank (pipeline stages, experts).
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from zarrckpt._errors import KeyMismatchError, warn
from zarrckpt._format.matching import did_you_mean
from zarrckpt._format.wire import record
from zarrckpt._load.match import without_target
from zarrckpt._load.object_match import ObjectMatch
from zarrckpt._state.flatten import flatten
from zarrckpt._state.local_state import format_lines

Mask = np.ndarray[Any, Any]
"""One bit for each entry of the checkpoint, in its order: 500 bytes for 4,000 entries."""


@record
@dataclass(frozen=True)
class Findings:
    """One rank's message to the coordinator about names that need a target on at least one rank."""

    idle: list[str]
    """The patterns of ``keys`` that match no target of this rank."""
    unmatched: Mask
    """The entries below this rank's modules and optimizers that have no target on this rank."""
    targets: Mask
    """The entries that have a target on this rank."""
    offered: Mask
    """The entries that this rank's containers load if no rank has a target for them."""


def find_coverage(object_match: ObjectMatch) -> Findings:
    """Return this rank's message to the coordinator."""
    state_match, entries = object_match.state_match, object_match.saved.entries
    return Findings(
        object_match.selection.idle_patterns([*state_match.loaded, *state_match.missing]),
        _mask(entries, filter(object_match.is_of_object, state_match.unexpected)),
        _mask(entries, state_match.loaded),
        _mask(entries, state_match.containers.offered),
    )


def check_coverage(object_match: ObjectMatch, found: Sequence[Findings], *, strict: bool) -> Mask:
    """If strict, raise KeyMismatchError for a pattern or a module's entry that has no target on any rank.

    ``object_match`` is the coordinator's. Returns the accepted offers: the offered entries that have no target on any
    rank. Each rank loads those that it has offered.
    """
    matched = np.bitwise_or.reduce([one.targets for one in found])
    if strict:
        _refuse_idle(object_match, found)
        _refuse_unmatched(object_match, np.bitwise_or.reduce([one.unmatched for one in found]) & ~matched)
    else:
        _warn_of_unloaded_objects(object_match, names_in(object_match, matched))
    accepted: Mask = np.bitwise_or.reduce([one.offered for one in found]) & ~matched
    return accepted


def names_in(object_match: ObjectMatch, mask: Mask) -> list[str]:
    """Return the names of the entries in a mask."""
    return [name for name, bit in zip(object_match.saved.entries, np.unpackbits(mask), strict=False) if bit]


def _refuse_idle(object_match: ObjectMatch, found: Sequence[Findings]) -> None:
    idle = [pattern for pattern in found[0].idle if all(pattern in one.idle for one in found)]
    if idle:
        raise KeyMismatchError(
            f"keys={idle} match no target in the state. Nothing was loaded. The state has, for example, "
            f"{sorted(flatten(object_match.plain.state)[0])[:5]}"
        )


def _refuse_unmatched(object_match: ObjectMatch, mask: Mask) -> None:
    if names := names_in(object_match, mask):
        shown = format_lines([without_target(name) for name in names])
        raise KeyMismatchError(
            f"{len(names)} entries of modules and optimizers in the checkpoint have no target on any rank. Nothing "
            f"was loaded:{shown}\n{_close_names(object_match, names)}"
            "strict=False skips these entries. keys=[...] loads only the named entries"
        )


def _warn_of_unloaded_objects(object_match: ObjectMatch, matched: list[str]) -> None:
    """Warn if a module or optimizer gets no entry, because the checkpoint may have it under a different name."""
    loaded = [*matched, *object_match.per_rank_sources.elements]
    for prefix in object_match.plain.exact_prefixes:
        lacks = any(name.startswith(prefix) for name in object_match.state_match.missing)
        if lacks and not any(name.startswith(prefix) for name in loaded):
            some = sorted({name.partition(".")[0] for name in object_match.saved.entries})[:5]
            warn(f"{prefix[:-1]!r} got none of its entries from the checkpoint, which has, for example, {some}")


def _close_names(object_match: ObjectMatch, names: list[str]) -> str:
    """Return a hint with parameters of the state whose names are similar to entries without a target, or ''."""
    close = {}
    for optimizer in object_match.plain.optimizers:
        stem = f"{optimizer.prefix}state."
        own = (name for name in names if name.startswith(stem))
        close.update({name: similar for name in own if (similar := optimizer.close_names(name))})
    shown = [f"\n  {name!r}: {', '.join(map(repr, own))}" for name, own in itertools.islice(close.items(), 5)]
    if shown:
        return f"Parameters of the state with similar names:{''.join(shown)}\n"
    return did_you_mean(names, object_match.state_match.loaded, "rename= loads entries under other names")


def _mask(entries: Collection[str], names: Iterable[str]) -> Mask:
    known = {*names}
    return np.packbits([entry in known for entry in entries]) if entries else np.zeros(0, np.uint8)
