"""The ranks of a call, and the tree along which their control messages are sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

FANOUT = 32
"""Maximum number of children of a rank in the tree. For up to 33 ranks, the tree is a star."""

WARN_SECONDS = 30.0
"""Seconds of waiting after which missing ranks are logged."""

ALONE = "If only one rank is to make this call, pass no_dist=True"
"""The next step for a call that other ranks do not make."""


@dataclass(frozen=True)
class CallGroup:
    """The ranks of a call (global numbers, in the order of their group), and the position of this rank."""

    members: tuple[int, ...]
    position: int
    queue: str
    """The name of a queue. Calls of the same ranks in one queue run one after the other, in several concurrently."""
    call: str
    timeout: float

    @property
    def rank(self) -> int:
        """The global number of this rank."""
        return self.members[self.position]

    def format_positions(self, positions: Sequence[int]) -> str:
        """Return a text such as "ranks 1, 2" for positions in the group."""
        return format_ranks([self.members[position] for position in positions])


def format_ranks(ranks: Sequence[int], limit: int = 16) -> str:
    """Return a text such as "rank 3" or "ranks 1, 2", with at most ``limit`` ranks."""
    more = f" and {len(ranks) - limit} more" if len(ranks) > limit else ""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks[:limit])) + more


class Tree:
    """The neighbours of one rank in the tree of a group. Position 0 is the root."""

    def __init__(self, position: int, size: int) -> None:
        self._size, self._fanout = size, FANOUT
        self.parent = None if position == 0 else (position - 1) // FANOUT
        self.children = self._children_of(position)
        self.edges = [*([] if self.parent is None else [self.parent]), *self.children]

    def branch(self, child: int) -> set[int]:
        """Return the position of a child and all positions below it, or an empty set if it is not a child."""
        found = {child} if child in self.children else set()
        level = [*found]
        while level:
            level = [below for position in level for below in self._children_of(position)]
            found.update(level)
        return found

    def _children_of(self, position: int) -> range:
        first = position * self._fanout + 1
        return range(min(first, self._size), min(first + self._fanout, self._size))
