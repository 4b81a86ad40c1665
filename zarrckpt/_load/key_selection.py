"""The entries of a checkpoint that the argument ``keys`` of a load requests."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence

from zarrckpt._errors import KeyMismatchError
from zarrckpt._format.matching import hint, matches

_GROUP = re.compile(r"(?:.*\.)?param_groups\.\d+\.")
"""The prefix of the names in an optimizer's parameter group."""


class KeySelection:
    """The patterns of ``keys``, or None for all entries. Raises KeyMismatchError if a pattern matches no name."""

    def __init__(self, patterns: Sequence[str] | None, names: Collection[str]) -> None:
        self._patterns = patterns
        if idle := self.idle_patterns(names):
            raise KeyMismatchError(f"keys={idle} match nothing in the checkpoint: {hint(idle[0], sorted(names))}")
        # An option of a group also needs the names of its parameters, which identify the group in the state.
        groups = (_GROUP.match(name) for name in names if self._matches(name)) if patterns is not None else ()
        self._group_names = {f"{group[0]}params" for group in groups if group}

    def requests(self, name: str) -> bool:
        """Whether an entry is requested."""
        return self._patterns is None or name in self._group_names or self._matches(name)

    def idle_patterns(self, names: Iterable[str]) -> list[str]:
        """Return the patterns that match none of the names."""
        known = [*names]
        return [pattern for pattern in self._patterns or () if not any(matches(name, pattern) for name in known)]

    def _matches(self, name: str) -> bool:
        return any(matches(name, pattern) for pattern in self._patterns or ())
