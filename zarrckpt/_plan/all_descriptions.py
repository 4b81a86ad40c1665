"""The descriptions of all ranks, each distinct one once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from zarrckpt._format.wire import record
from zarrckpt._plan.description import DescribedEntry, Description
from zarrckpt._plan.geometry import Numbers
from zarrckpt._plan.group_numbers import GroupNumbers, renumber_groups, renumber_path


@record
@dataclass(frozen=True)
class DescriptionRequest:
    """The request for descriptions: of the ranks with equal digests, the lowest one sends."""

    senders: frozenset[int]
    numbers: Numbers
    """The number of each rank's description, by position in the group."""

    @classmethod
    def from_digests(cls, digests: Sequence[bytes]) -> DescriptionRequest:
        """Return the request for these digests, one per rank."""
        first: dict[bytes, int] = {}
        for rank, digest in enumerate(digests):
            first.setdefault(digest, rank)
        number_of = {digest: number for number, digest in enumerate(first)}
        # A small integer type, because this message goes to every rank.
        numbers = np.array([number_of[digest] for digest in digests], np.min_scalar_type(len(first)))
        return cls(frozenset(first.values()), numbers)


@dataclass(frozen=True)
class AllDescriptions:
    """The distinct descriptions, and the number of each rank's description."""

    descriptions: Sequence[Description]
    """In the order of the lowest rank that has each."""
    numbers: Numbers
    """The number of each rank's description, by position in the group."""
    members: Sequence[int]
    """The ranks in the default process group, by position in this group."""

    @classmethod
    def from_packed(cls, packed: Iterable[bytes], numbers: Numbers, members: Sequence[int]) -> AllDescriptions:
        """Return the descriptions from the packed ones of the requested ranks, in the order of ranks."""
        return cls([Description.unpacked(data) for data in packed], numbers, members)

    def ranks_of(self, description: int) -> Numbers:
        """Return the positions of the ranks with this description."""
        found: Numbers = np.flatnonzero(self.numbers == description)
        return found

    @cached_property
    def position(self) -> dict[int, int]:
        """The positions in the group by rank in the default process group."""
        return {rank: position for position, rank in enumerate(self.members)}

    @cached_property
    def _group_numbers(self) -> dict[int, GroupNumbers]:
        first = {number: self.members[int(self.ranks_of(number)[0])] for number in range(len(self.descriptions))}
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
            path = renumber_path(entry.path, numbers) if numbers else entry.path
            if path is not None:
                yield entry._replace(path=path) if numbers else entry
