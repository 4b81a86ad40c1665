"""Which names a pattern means: in ``load(keys=...)``, ``Checkpoint.select`` and on the command line."""

from __future__ import annotations

import difflib
import fnmatch
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
