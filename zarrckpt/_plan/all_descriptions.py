"""The descriptions of all ranks: each different one once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from zarrckpt._format.wire import record
from zarrckpt._plan.description import DescribedEntry, Description
from zarrckpt._plan.group_numbers import GroupNumbers, renumber_groups, renumbered
from zarrckpt._plan.owners import Numbers


@record
@dataclass(frozen=True)
class Asked:
    """Which ranks are to send their descriptions: the lowest of those that have one digest."""

    senders: frozenset[int]
    given: Numbers
    """The number of each rank's description, by its position in the group."""

    @classmethod
    def by(cls, digests: Sequence[bytes]) -> Asked:
        """From the digest of each rank's description."""
        first: dict[bytes, int] = {}
        for rank, digest in enumerate(digests):
            first.setdefault(digest, rank)
        numbers = {digest: number for number, digest in enumerate(first)}
        # A small type: this goes to every rank.
        given = np.array([numbers[digest] for digest in digests], np.min_scalar_type(len(first)))
        return cls(frozenset(first.values()), given)


@dataclass(frozen=True)
class AllDescriptions:
    """The descriptions of all ranks: the different ones, and which of them each rank gave."""

    descriptions: Sequence[Description]
    given: Numbers
    """The number of each rank's description, by its position in the group."""
    members: Sequence[int]
    """The ranks' numbers in the default process group, by position."""

    @classmethod
    def sent(cls, packed: Iterable[bytes], given: Numbers, members: Sequence[int]) -> AllDescriptions:
        """From the packed descriptions of those that were asked, in the order of their ranks."""
        return cls([Description.unpacked(data) for data in packed], given, members)

    def ranks_of(self, description: int) -> Numbers:
        """The positions of the ranks that gave a description."""
        found: Numbers = np.flatnonzero(self.given == description)
        return found

    @property
    def in_order(self) -> list[int]:
        """The numbers of the descriptions, as the lowest ranks gave them."""
        numbers, first = np.unique(self.given, return_index=True)
        return [int(numbers[place]) for place in np.argsort(first)]

    @cached_property
    def _group_numbers(self) -> dict[int, GroupNumbers]:
        first = {number: self.members[int(self.ranks_of(number)[0])] for number in self.in_order}
        by_rank = renumber_groups({rank: self.descriptions[number].groups for number, rank in first.items()})
        return {number: by_rank[rank] for number, rank in first.items() if rank in by_rank}

    def group_numbers(self, description: int) -> GroupNumbers:
        """Return the numbers that parameter groups of a description have in the checkpoint, if they are others.

        Raises UnsupportedLayoutError if ranks have different groups, and no names of parameters.
        """
        return self._group_numbers.get(description, {})

    def entries(self, description: int) -> Iterator[DescribedEntry]:
        """Yield the entries of a description under their names in the checkpoint."""
        numbers = self.group_numbers(description)
        for entry in self.descriptions[description].entries:
            path = renumbered(entry.path, numbers) if numbers else entry.path
            if path is not None:
                yield entry._replace(path=path) if numbers else entry
