"""Which names a pattern means: in ``load(keys=...)``, ``Checkpoint.select`` and on the command line."""

from __future__ import annotations

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
        raise KeyMismatchError(f"{idle} match nothing in {where}; it has, for example, {known[:5]}")
    return [name for name in known if any(matches(name, pattern) for pattern in patterns)]
