"""The descriptions of all ranks, each distinct one once."""

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
    """The request for descriptions: of the ranks with equal digests, the lowest one sends."""

    senders: frozenset[int]
    given: Numbers
    """The number of each rank's description, by position in the group."""

    @classmethod
    def by(cls, digests: Sequence[bytes]) -> Asked:
        """Return the request for these digests, one per rank."""
        first: dict[bytes, int] = {}
        for rank, digest in enumerate(digests):
            first.setdefault(digest, rank)
        numbers = {digest: number for number, digest in enumerate(first)}
        # A small integer type, because this message goes to every rank.
        given = np.array([numbers[digest] for digest in digests], np.min_scalar_type(len(first)))
        return cls(frozenset(first.values()), given)


@dataclass(frozen=True)
class AllDescriptions:
    """The distinct descriptions, and the number of each rank's description."""

    descriptions: Sequence[Description]
    given: Numbers
    """The number of each rank's description, by position in the group."""
    members: Sequence[int]
    """The ranks in the default process group, by position in this group."""

    @classmethod
    def sent(cls, packed: Iterable[bytes], given: Numbers, members: Sequence[int]) -> AllDescriptions:
        """Return the descriptions from the packed ones of the requested ranks, in the order of ranks."""
        return cls([Description.unpacked(data) for data in packed], given, members)

    def ranks_of(self, description: int) -> Numbers:
        """Return the positions of the ranks with this description."""
        found: Numbers = np.flatnonzero(self.given == description)
        return found

    @property
    def in_order(self) -> list[int]:
        """The numbers of the descriptions, ordered by the lowest rank of each."""
        numbers, first = np.unique(self.given, return_index=True)
        return [int(numbers[place]) for place in np.argsort(first)]

    @cached_property
    def _group_numbers(self) -> dict[int, GroupNumbers]:
        first = {number: self.members[int(self.ranks_of(number)[0])] for number in self.in_order}
        by_rank = renumber_groups({rank: self.descriptions[number].groups for number, rank in first.items()})
        return {number: by_rank[rank] for number, rank in first.items() if rank in by_rank}

    def group_numbers(self, description: int) -> GroupNumbers:
        """Return the numbers of parameter groups in the checkpoint, for those whose number changes.

        Raises UnsupportedLayoutError if ranks have different groups and parameters have no names.
        """
        return self._group_numbers.get(description, {})

    def entries(self, description: int) -> Iterator[DescribedEntry]:
        """Yield the entries of a description under their names in the checkpoint."""
        numbers = self.group_numbers(description)
        for entry in self.descriptions[description].entries:
            path = renumbered(entry.path, numbers) if numbers else entry.path
            if path is not None:
                yield entry._replace(path=path) if numbers else entry
