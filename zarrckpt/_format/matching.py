"""Select names by patterns, for ``load(keys=...)``, ``Checkpoint.select`` and the command line."""

from __future__ import annotations

import difflib
import fnmatch
import heapq
import itertools
from collections.abc import Iterable, Sequence

from zarrckpt._errors import KeyMismatchError


def matches(fqn: str, pattern: str) -> bool:
    """Whether a pattern is the name, its beginning up to a dot, or a glob pattern that matches it."""
    return fqn == pattern or fqn.startswith(f"{pattern}.") or fnmatch.fnmatchcase(fqn, pattern)


def select(names: Iterable[str], patterns: Sequence[str], where: str) -> list[str]:
    """Return the names that match at least one pattern, in the order of ``names``.

    Raises KeyMismatchError for a pattern without a match. Its message names ``where``, the source of the names.
    """
    known = list(names)
    unmatched = [pattern for pattern in patterns if not any(matches(name, pattern) for name in known)]
    if unmatched:
        verb = "matches" if len(unmatched) == 1 else "match"
        raise KeyMismatchError(f"{unmatched} {verb} nothing in {where}: {hint(unmatched[0], known)}")
    return [name for name in known if any(matches(name, pattern) for pattern in patterns)]


_MAX_SIMILAR, _MAX_COMPARED = 3, 300
"""Maximum number of wrong names with suggestions, and of names that each is compared with. Together about 0.1 s."""


def hint(name: str, names: Iterable[str]) -> str:
    """Return the end of an error message about a name that is not in ``names``: similar names, or examples."""
    known = list(names)
    below = [other for other in known if other.startswith(f"{name}.")]
    if below:
        some = ", ".join(below[:3]) + (", ..." if len(below) > 3 else "")
        return f"it is a group with {len(below):,} {'entry' if len(below) == 1 else 'entries'}: {some}"
    similar = [other for other in known if name in other][:3] if name else []
    similar = similar or _similar(name, dict.fromkeys([*(other.partition(".")[0] for other in known), *known]))
    if similar:
        return f"did you mean one of {similar}?" if len(similar) > 1 else f"did you mean {similar[0]!r}?"
    return f"there are {len(known):,} names, for example {known[:3]}" if known else "there are no names"


def did_you_mean(wrong: Iterable[str], known: Iterable[str], step: str) -> str:
    """Return message lines with the next step and known names similar to the wrong ones, or "" if there are none."""
    names = list(known)
    lines = []
    for name in itertools.islice(wrong, _MAX_SIMILAR):
        last = name.rpartition(".")[2]
        similar = _similar(name, (other for other in names if other.rpartition(".")[2] == last)) or _similar(
            name, names
        )
        lines += [f"\n  {name!r}: did you mean {' or '.join(map(repr, similar))}?"] if similar else []
    return f"Similar names ({step}):{''.join(lines)}\n" if lines else ""


def _similar(name: str, names: Iterable[str]) -> list[str]:
    # Only names of similar length, because others cannot be similar.
    nearest = heapq.nsmallest(_MAX_COMPARED, names, key=lambda other: abs(len(other) - len(name)))
    return difflib.get_close_matches(name, nearest, 2, 0.7)
