"""The places of chunks in an archive. They follow from the plan, because the size of each chunk object is known."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from typing import NamedTuple

import numpy as np

from zarrckpt._format.chunk_layout import chunk_object_bytes
from zarrckpt._format.documents import ArrayNode
from zarrckpt._format.grid import Ints
from zarrckpt._store._archive import Place
from zarrckpt._store._zip_format import ALIGNMENT, data_offset, header_bytes


@dataclass(frozen=True)
class ArchivePlan:
    """The byte offset of the first entry of each array in an archive. Arrays are sorted by path."""

    starts: Mapping[str, int]
    """By path. Compressed arrays are not included, since the sizes of their chunks are not known."""
    end: int = 0
    """The end of the last entry."""

    def places(self, node: ArrayNode, chunks: Iterable[Ints]) -> Iterator[tuple[str, Place]]:
        """Yield the key and the place of chunks of an array. Yields none of a compressed array."""
        if node.compression is None:
            entries = _Entries.of(node, self.starts[node.path])
            for index in chunks:
                yield node.chunk_key(index), Place(entries.header_offset(node.grid.chunk_number(index)), entries.size)


def plan_archive(nodes: Iterable[ArrayNode]) -> ArchivePlan:
    """Return the places of all chunks of these arrays."""
    starts: dict[str, int] = {}
    end = 0
    for node in sorted(nodes, key=lambda node: node.path):
        if node.compression is None:
            starts[node.path] = end
            end = _Entries.of(node, end).header_offset(node.grid.num_chunks)
    return ArchivePlan(starts, end)


class _Entries(NamedTuple):
    """The entries of the chunks of an array, one after the other, in C order."""

    start: int
    """The offset of the first local header."""
    data: int
    """The offset of the first chunk."""
    size: int
    """The size of each chunk object in bytes."""
    ends: Sequence[int]
    """The offset after each chunk, relative to the first chunk."""

    @classmethod
    def of(cls, node: ArrayNode, start: int) -> _Entries:
        size, first = chunk_object_bytes(node), node.chunk_key((0,) * len(node.grid.counts))
        fixed = len(first.encode()) - len(node.grid.counts)
        return cls(start, data_offset(first, size, start), size, _ends(fixed, node.grid.counts, size))

    def header_offset(self, number: int) -> int:
        """Return the offset of the local header of a chunk. The number after the last one gives the end."""
        return self.data + self.ends[number - 1] if number else self.start


@lru_cache(1024)
def _ends(fixed: int, counts: Ints, size: int) -> Sequence[int]:
    """Return :attr:`_Entries.ends`. ``fixed`` is the size of a key without the digits of the chunk's index.

    Cached, because many layers have arrays of the same shape, with keys of the same size.
    """
    digits = [np.array([len(str(i)) for i in range(count)], np.int64) for count in counts]
    names = fixed + reduce(np.add.outer, digits, np.zeros((), np.int64)).reshape(-1)
    # Each entry begins where the data of the one before ends, and its data at a multiple of the alignment.
    steps = -(-(size + names + header_bytes(0, size)) // ALIGNMENT) * ALIGNMENT
    return (np.cumsum(steps) - steps[:1] + size).data


def place_in_order(sizes: Iterable[tuple[str, int]]) -> dict[str, Place]:
    """Return the places of entries one after the other, from their keys and sizes in bytes."""
    places: dict[str, Place] = {}
    end = 0
    for key, size in sizes:
        places[key] = Place(end, size)
        end = data_offset(key, size, end) + size
    return places
