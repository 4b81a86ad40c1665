"""Which names a pattern means: in ``load(keys=...)``, ``Checkpoint.select`` and on the command line."""

from __future__ import annotations

import difflib
import fnmatch
import heapq
import itertools
from collections.abc import Iterable, Sequence

from zarrckpt._errors import KeyMismatchError


def matches(fqn: str, pattern: str) -> bool:
    """Whether a pattern is a name, its beginning up to a dot, or a glob that it fits."""
    return fqn == pattern or fqn.startswith(f"{pattern}.") or fnmatch.fnmatchcase(fqn, pattern)


def select(names: Iterable[str], patterns: Sequence[str], where: str) -> list[str]:
    """The names that one of the patterns means, in their own order.

    Raises KeyMismatchError for a pattern that means none; ``where`` says of what.
    """
    known = list(names)
    idle = [pattern for pattern in patterns if not any(matches(name, pattern) for name in known)]
    if idle:
        raise KeyMismatchError(
            f"{idle} {'matches' if len(idle) == 1 else 'match'} nothing in {where}; {hint(idle[0], known)}"
        )
    return [name for name in known if any(matches(name, pattern) for pattern in patterns)]


_LOOKED_AT = 10_000
"""So many names are compared with a wrong one at most; it takes a second or so."""


def hint(name: str, names: Iterable[str]) -> str:
    """What somebody may have meant who wrote a name that is not among these: the end of an error's message."""
    known = list(names)
    below = [other for other in known if other.startswith(f"{name}.")]
    if below:
        some = ", ".join(below[:3]) + (", ..." if len(below) > 3 else "")
        return f"it is a group with {len(below):,} {'entry' if len(below) == 1 else 'entries'}: {some}"
    alike = [other for other in known if name in other][:3] if name else []
    if not alike:
        groups = dict.fromkeys(other.partition(".")[0] for other in known)
        alike = difflib.get_close_matches(name, [*groups, *known[:_LOOKED_AT]], 3)
    if alike:
        return f"did you mean one of {alike}?" if len(alike) > 1 else f"did you mean {alike[0]!r}?"
    return f"it has {len(known):,}, for example {known[:3]}" if known else "it has none"


_WRONG_NAMES, _COMPARED = 3, 300
"""The number of wrong names that get close ones, and of names that each is compared with: 0.1 s for all."""


def did_you_mean(wrong: Iterable[str], known: Iterable[str], step: str) -> str:
    """Return lines of a message with known names that are like wrong ones, and the next step; else an empty text."""
    by_last: dict[str, list[str]] = {}
    for name in known:
        by_last.setdefault(name.rpartition(".")[2], []).append(name)
    lines = []
    for name in itertools.islice(wrong, _WRONG_NAMES):
        alike = _most_alike(name, by_last.get(name.rpartition(".")[2], ()))
        alike = alike or _most_alike(name, itertools.chain.from_iterable(by_last.values()))
        lines += [f"\n  {name!r}: did you mean {' or '.join(map(repr, alike))}?"] if alike else []
    return f"Names without a counterpart that are alike ({step}):{''.join(lines)}\n" if lines else ""


def _most_alike(name: str, names: Iterable[str]) -> list[str]:
    # Names of about one length first: the others cannot be much alike.
    nearest = heapq.nsmallest(_COMPARED, names, key=lambda other: abs(len(other) - len(name)))
    return difflib.get_close_matches(name, nearest, 2, 0.75)
