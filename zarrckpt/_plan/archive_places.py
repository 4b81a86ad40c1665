"""The places of chunks in an archive. They follow from the plan, because the size of each chunk object is known."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

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
            size = chunk_object_bytes(node)
            headers = _header_offsets(node, self.starts[node.path])
            for index in chunks:
                number = node.grid.chunk_number(index)
                yield node.chunk_key(index), Place(int(headers[number]), size)


def plan_archive(nodes: Iterable[ArrayNode]) -> ArchivePlan:
    """Return the places of all chunks of these arrays."""
    starts: dict[str, int] = {}
    end = 0
    for node in sorted(nodes, key=lambda node: node.path):
        if node.compression is None:
            starts[node.path] = end
            end = int(_header_offsets(node, end)[-1])
    return ArchivePlan(starts, end)


def _header_offsets(node: ArrayNode, start: int) -> np.ndarray[Any, Any]:
    """Return the offsets of the local headers of an array's chunks in C order, and the end of the last chunk."""
    size = chunk_object_bytes(node)
    if node.grid.num_chunks == 0:
        return np.array([start])
    prefix = len(node.chunk_key((0,) * len(node.grid.counts)).encode()) - len(node.grid.counts)
    digits = [np.array([len(str(i)) for i in range(count)]) for count in node.grid.counts]
    names = prefix + reduce(np.add.outer, digits, np.zeros((), np.int64)).reshape(-1)
    headers = names + header_bytes(0, size)
    steps = size + headers
    steps[0] = start + headers[0]
    # Each entry begins where the data of the one before ends, and its data at a multiple of the alignment.
    aligned = -(-steps // ALIGNMENT) * ALIGNMENT
    data = np.cumsum(aligned)
    return np.concatenate([[start], data + size])


def place_in_order(sizes: Iterable[tuple[str, int]]) -> dict[str, Place]:
    """Return the places of entries one after the other, from their keys and sizes in bytes."""
    places: dict[str, Place] = {}
    end = 0
    for key, size in sizes:
        places[key] = Place(end, size)
        end = data_offset(key, size, end) + size
    return places
