"""The layout of a chunk object, and the checks of its parts against the tables of the checkpoint.

An object has the subchunks in C order, each followed by the crc32c of its bytes. These are the elements, or the
compressed elements. An object with subchunks ends with the index of ``sharding_indexed`` and its crc32c. See
``docs/reference/format.md``.

Elements are copied as raw bits (unsigned integers or voids of the same size), never as numbers. So NaN payloads do not
change, and numpy need not support the type.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Any

import numpy as np

from zarrckpt._format.compression import DecodeError, max_compressed_bytes
from zarrckpt._format.crc32c import crc32c
from zarrckpt._format.documents import ArrayNode
from zarrckpt._format.grid import Ints

RawArray = np.ndarray[Any, np.dtype[Any]]
"""Elements as raw bits, see :func:`raw_dtype`."""

CRC_BYTES = 4
INDEX_BYTES = 16
"""Size of one subchunk's entry in the index: its byte offset and its length, 8 bytes each."""

_RAW: dict[int, np.dtype[Any]] = {
    np.dtype(name).itemsize: np.dtype(name) for name in ("u1", "<u2", "<u4", "<u8", "V16")
}


def raw_dtype(itemsize: int) -> np.dtype[Any]:
    """Return the numpy type for the raw bits of elements of this size in bytes."""
    return _RAW[itemsize]


def bytes_of(array: RawArray) -> RawArray:
    """Return a flat view of the bytes of a contiguous array. numpy cannot view empty and 0-d arrays as they are."""
    return array.reshape(-1).view(np.uint8)


def crc_bytes(crc: int) -> bytes:
    """Return the stored form of a checksum: 4 bytes, little-endian."""
    return crc.to_bytes(CRC_BYTES, "little")


def stored_crc(data: RawArray) -> int | None:
    """Return the checksum at the end of stored bytes, or None if the bytes before it do not match."""
    own = int.from_bytes(data[-CRC_BYTES:].tobytes(), "little")
    return own if crc32c(data[:-CRC_BYTES]) == own else None


def subchunk_bytes(node: ArrayNode) -> int:
    """Return the bytes of the elements of one subchunk, or of the whole chunk if it has no subchunks."""
    return node.grid.subchunk_size * node.dtype.itemsize


def max_stored_subchunk_bytes(node: ArrayNode) -> int:
    """Return the stored size of one subchunk in bytes, including its checksum. An upper bound if it is compressed."""
    nbytes = subchunk_bytes(node)
    return CRC_BYTES + (nbytes if node.compression is None else max_compressed_bytes(nbytes))


def encode_chunk_index(node: ArrayNode, begins: Sequence[int]) -> bytes:
    """Return the index of a chunk object and its checksum, or b"" if the chunk has no subchunks.

    The index has the byte offset and the length of each subchunk. ``begins`` has the byte offset of each subchunk, and
    the end of the last one.
    """
    if node.grid.subchunk_shape is None:
        return b""
    ends = np.array(begins, "<u8")
    index = np.stack([ends[:-1], np.diff(ends)], axis=1).tobytes()
    return index + crc_bytes(crc32c(index))


def index_bytes(node: ArrayNode) -> int:
    """Return the size of :func:`encode_chunk_index` in bytes."""
    return 0 if node.grid.subchunk_shape is None else node.grid.subchunks_per_chunk * INDEX_BYTES + CRC_BYTES


def chunk_object_bytes(node: ArrayNode) -> int:
    """Return the size in bytes of every chunk object of an array without compression."""
    data = math.prod(node.grid.chunk_shape) * node.dtype.itemsize
    return data + node.grid.subchunks_per_chunk * CRC_BYTES + index_bytes(node)


def max_chunk_object_bytes(node: ArrayNode) -> int:
    """Return an upper bound in bytes for the size of a chunk object of an array, compressed or not."""
    return node.grid.subchunks_per_chunk * max_stored_subchunk_bytes(node) + index_bytes(node)


class ChunkTable:
    """The part of the tables that describes one chunk.

    Args:
        node: the array of the chunk.
        checksums: the checksums of its subchunks, in C order.
        sizes: the stored sizes of its subchunks in the same order, if the array is compressed. Without compression all
            subchunks have the same size.
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
    def of(cls, node: ArrayNode, index: Ints, checksums: RawArray, sizes: RawArray | None = None) -> ChunkTable:
        """Return the table of one chunk. ``checksums`` and ``sizes`` have the elements of the whole array."""
        count = node.grid.subchunks_per_chunk
        first = node.grid.chunk_number(index) * count
        own = slice(first, first + count)
        return cls(node, checksums[own], None if sizes is None else sizes[own])

    def begin(self, number: int) -> int:
        """Return the byte offset of a subchunk in the object. The number after the last one gives the end."""
        return self._begins[number]

    @property
    def object_size(self) -> int:
        """The size of the chunk's object in bytes."""
        return self._begins[-1] + index_bytes(self._node)

    def matches(self, number: int, stored: RawArray) -> bool:
        """Whether the bytes of a stored subchunk match their own checksum and the one in the table."""
        return bool(stored_crc(stored) == self.checksums[number])

    def check(self, byte_offset: int, stored: RawArray) -> bool:
        """Whether a part of the object is as it was saved: all whole subchunks in it, and the index if it is included.

        Also checks the decompressed size stored in a compressed subchunk, because zarr-python trusts it.
        """
        begins, end = self._begins, byte_offset + len(stored)
        for number in range(bisect_left(begins, byte_offset), bisect_right(begins, end) - 1):
            part = stored[begins[number] - byte_offset : begins[number + 1] - byte_offset]
            if not self.matches(number, part) or not stored_size_is_right(self._node, part):
                return False
        if byte_offset > begins[-1] or end != self.object_size:
            return True
        return stored[begins[-1] - byte_offset :].tobytes() == encode_chunk_index(self._node, begins)

    def align(self, start: int, stop: int) -> tuple[int, int]:
        """Return the begin and end of the subchunks and index that contain the bytes from ``start`` to ``stop``."""
        begins = self._begins
        begin = begins[bisect_right(begins, start) - 1]
        return begin, self.object_size if stop > begins[-1] else begins[bisect_left(begins, stop)]


def stored_size_is_right(node: ArrayNode, stored: RawArray) -> bool:
    """Whether the decompressed size stored in a compressed subchunk is right. True if the array is not compressed."""
    try:
        if node.compression is not None:
            node.compression.expect(stored[:-CRC_BYTES], subchunk_bytes(node))
    except DecodeError:
        return False
    return True
