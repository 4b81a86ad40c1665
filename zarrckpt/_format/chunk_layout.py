"""Where a chunk's subchunks are in its object, and whether they are what was saved.

Layout, see ``docs/reference/format.md``: the subchunks in C order, each its elements (or what they are compressed to)
and their crc32c. An object with subchunks ends with the index of ``sharding_indexed`` and its crc32c.

Elements travel as raw bits (unsigned integers or voids of the same size), never as numbers, so NaN payloads and types
that numpy does not know arrive unchanged.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Any

import numpy as np

from zarrckpt._format.compression import DecodeError, most_stored
from zarrckpt._format.crc32c import crc32c
from zarrckpt._format.documents import ArrayNode
from zarrckpt._format.grid import Ints

RawArray = np.ndarray[Any, np.dtype[Any]]
"""Elements as raw bits, see :func:`raw_dtype`."""

CRC_BYTES = 4
INDEX_BYTES = 16
"""Of the index, for each subchunk: its byte offset and its length."""

_RAW: dict[int, np.dtype[Any]] = {
    np.dtype(name).itemsize: np.dtype(name) for name in ("u1", "<u2", "<u4", "<u8", "V16")
}


def raw_dtype(itemsize: int) -> np.dtype[Any]:
    """The numpy type that stands for any element of that many bytes."""
    return _RAW[itemsize]


def bytes_of(array: RawArray) -> RawArray:
    """A flat view of a contiguous array's bytes (numpy refuses it for empty and 0-d arrays as they are)."""
    return array.reshape(-1).view(np.uint8)


def crc_bytes(crc: int) -> bytes:
    """A checksum as it is stored."""
    return crc.to_bytes(CRC_BYTES, "little")


def stored_crc(data: RawArray) -> int | None:
    """The checksum at the end of some bytes; None where the bytes before it have another one."""
    own = int.from_bytes(data[-CRC_BYTES:].tobytes(), "little")
    return own if crc32c(data[:-CRC_BYTES]) == own else None


def subchunk_bytes(node: ArrayNode) -> int:
    """The bytes of one subchunk's elements (of the whole chunk's, where there are no subchunks)."""
    return node.grid.subchunk_size * node.dtype.itemsize


def most_subchunk_stored(node: ArrayNode) -> int:
    """The bytes that one subchunk is stored in, its checksum included: at most, where it is compressed."""
    nbytes = subchunk_bytes(node)
    return CRC_BYTES + (nbytes if node.compression is None else most_stored(nbytes))


def chunk_index(node: ArrayNode, begins: Sequence[int]) -> bytes:
    """The index of a chunk's object, (byte offset, length) of each subchunk, and its checksum; b"" without subchunks.

    ``begins`` has where the subchunks begin, and where the last one ends.
    """
    if node.grid.subchunk_shape is None:
        return b""
    ends = np.array(begins, "<u8")
    index = np.stack([ends[:-1], np.diff(ends)], axis=1).tobytes()
    return index + crc_bytes(crc32c(index))


def index_bytes(node: ArrayNode) -> int:
    """The size of :func:`chunk_index`."""
    return 0 if node.grid.subchunk_shape is None else node.grid.subchunks_per_chunk * INDEX_BYTES + CRC_BYTES


def chunk_object_bytes(node: ArrayNode) -> int:
    """The size of every chunk object of an array that is not compressed."""
    data = math.prod(node.grid.chunk_shape) * node.dtype.itemsize
    return data + node.grid.subchunks_per_chunk * CRC_BYTES + index_bytes(node)


def most_chunk_object_bytes(node: ArrayNode) -> int:
    """Return the largest size of a chunk object of an array, compressed or not."""
    return node.grid.subchunks_per_chunk * most_subchunk_stored(node) + index_bytes(node)


class ChunkTable:
    """What the tables say of one chunk.

    Args:
        node: its array.
        checksums: of its subchunks, in C order.
        sizes: their stored sizes in the same order, where they are compressed; else their places are arithmetic.
    """

    def __init__(self, node: ArrayNode, checksums: RawArray, sizes: RawArray | None = None) -> None:
        self._node = node
        self.checksums = checksums
        self._begins: Sequence[int]
        if sizes is None:
            stored = subchunk_bytes(node) + CRC_BYTES
            self._begins = range(0, (len(checksums) + 1) * stored, stored)
        else:
            self._begins = [0, *itertools.accumulate(sizes.tolist())]

    @classmethod
    def of(cls, node: ArrayNode, chunk: Ints, checksums: RawArray, sizes: RawArray | None = None) -> ChunkTable:
        """One chunk's part of an array's parts of the tables."""
        count = node.grid.subchunks_per_chunk
        first = node.grid.chunk_number(chunk) * count
        own = slice(first, first + count)
        return cls(node, checksums[own], None if sizes is None else sizes[own])

    def begin(self, number: int) -> int:
        """Where in the object a subchunk begins; for the number of subchunks, where the last one ends."""
        return self._begins[number]

    @property
    def object_size(self) -> int:
        """The size of the chunk's object in bytes."""
        return self._begins[-1] + index_bytes(self._node)

    def holds(self, number: int, stored: RawArray) -> bool:
        """Whether bytes (a subchunk as it is stored) are those that were saved under that number."""
        return bool(stored_crc(stored) == self.checksums[number])

    def check(self, byte_offset: int, stored: RawArray) -> bool:
        """Whether a part of the object is what was saved, as far as it holds whole subchunks, or the whole index.

        Compressed ones also say of themselves how long they are: somebody else decompresses them, and believes that.
        """
        begins, end = self._begins, byte_offset + len(stored)
        for number in range(bisect_left(begins, byte_offset), bisect_right(begins, end) - 1):
            part = stored[begins[number] - byte_offset : begins[number + 1] - byte_offset]
            if not self.holds(number, part) or not says_its_size(self._node, part):
                return False
        if byte_offset > begins[-1] or end != self.object_size:
            return True
        return stored[begins[-1] - byte_offset :].tobytes() == chunk_index(self._node, begins)

    def whole(self, start: int, stop: int) -> tuple[int, int]:
        """Where the subchunks (or the index) begin and end that hold the bytes from ``start`` to ``stop``."""
        begins = self._begins
        begin = begins[bisect_right(begins, start) - 1]
        return begin, self.object_size if stop > begins[-1] else begins[bisect_left(begins, stop)]


def says_its_size(node: ArrayNode, stored: RawArray) -> bool:
    """Whether the data of a stored subchunk, where they are compressed, say that they decompress to its elements."""
    try:
        if node.compression is not None:
            node.compression.expect(stored[:-CRC_BYTES], subchunk_bytes(node))
    except DecodeError:
        return False
    return True
