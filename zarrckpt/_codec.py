"""One chunk's bytes: encode a piece of a tensor, find and decode its subchunks.

Elements travel as raw bits (unsigned integers or voids of the same size), never as numbers, so NaN
payloads and types that numpy does not know arrive unchanged. Layout, see ``docs/reference/format.md``:
without subchunks ``data, crc32c``; with subchunks each one's ``data, crc32c`` (first dimension fastest),
then the index of ``sharding_indexed`` (C order, 16 bytes a subchunk) and its crc32c.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, Protocol

import google_crc32c
import numpy as np

from zarrckpt._grid import Box, Grid, Ints, intersect, ravel, ravel_f, unravel_f

RawArray = np.ndarray[Any, np.dtype[Any]]
"""Elements as raw bits, see :func:`raw_dtype`."""


class Target(Protocol):
    """What takes the elements of a box: an array of raw elements, or what passes them on to other memory."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """The raw type of the elements."""

    def __setitem__(self, place: tuple[slice, ...], cells: RawArray, /) -> None:
        """Take the elements of a part of the box."""


CRC_BYTES = 4
_RAW: dict[int, np.dtype[Any]] = {
    np.dtype(name).itemsize: np.dtype(name) for name in ("u1", "<u2", "<u4", "<u8", "V16")
}


def raw_dtype(itemsize: int) -> np.dtype[Any]:
    """The numpy type that stands for any element of that many bytes."""
    return _RAW[itemsize]


def crc32c(data: RawArray | bytes) -> int:
    """CRC-32C (Castagnoli) of a contiguous array's or bytes' memory."""
    return int(google_crc32c.value(data))


def _bytes_of(array: RawArray) -> RawArray:
    """A flat view of a contiguous array's bytes (numpy refuses it for empty and 0-d arrays as they are)."""
    return array.reshape(-1).view(np.uint8)


def _crc_buffer(crc: int) -> bytes:
    return crc.to_bytes(CRC_BYTES, "little")


def encode_chunk(grid: Grid, piece: RawArray) -> tuple[list[memoryview | bytes], list[int]]:
    """The buffers of one chunk object, and its subchunks' checksums in C order.

    ``piece`` holds the chunk's part of the array, raw elements, any strides; at the array's end it is smaller
    than the chunk and is padded with zeros, since Zarr stores full chunks. A contiguous full piece without
    subchunks is not copied: the first buffer is its own memory.
    """
    if piece.shape != grid.chunk_shape:
        padded = np.zeros(grid.chunk_shape, piece.dtype)
        padded[tuple(slice(0, n) for n in piece.shape)] = piece
        piece = padded
    if grid.subchunk_shape is None:
        data = _bytes_of(np.ascontiguousarray(piece))
        crc = crc32c(data)
        return [data.data, _crc_buffer(crc)], [crc]
    return _encode_subchunks(grid, grid.subchunk_shape, piece)


def _encode_subchunks(grid: Grid, sub: Ints, piece: RawArray) -> tuple[list[memoryview | bytes], list[int]]:
    counts = grid.sub_counts
    crcs = [0] * math.prod(counts)
    buffers: list[memoryview | bytes] = []
    for place in range(len(crcs)):
        cell = unravel_f(place, counts)
        at = tuple(slice(i * n, (i + 1) * n) for i, n in zip(cell, sub, strict=True))
        data = _bytes_of(np.ascontiguousarray(piece[at]))
        crc = crcs[ravel(cell, counts)] = crc32c(data)
        buffers += [data.data, _crc_buffer(crc)]
    return [*buffers, _index(grid, piece.dtype.itemsize)], crcs


def _index(grid: Grid, itemsize: int) -> bytes:
    """The index of every chunk with subchunks of an array, and its checksum: (byte offset, length) in C order."""
    counts, stored = grid.sub_counts, subchunk_bytes(grid, itemsize)
    cells = itertools.product(*map(range, counts))
    index = np.array([(ravel_f(cell, counts) * stored, stored) for cell in cells], "<u8").tobytes()
    return index + _crc_buffer(crc32c(index))


def chunk_object_size(grid: Grid, itemsize: int) -> int:
    """The size in bytes of every chunk object of an array."""
    cells = math.prod(grid.sub_counts)
    data = math.prod(grid.chunk_shape) * itemsize + cells * CRC_BYTES
    return data if grid.subchunk_shape is None else data + cells * 16 + CRC_BYTES


def subchunk_bytes(grid: Grid, itemsize: int) -> int:
    """The stored size of one subchunk (of the whole chunk where there are none), its checksum included."""
    return math.prod(grid.subchunk_shape or grid.chunk_shape) * itemsize + CRC_BYTES


def subchunk_place(grid: Grid, cell: Ints) -> int:
    """Which of a chunk's stored subchunks, counted from the object's begin, is a cell."""
    return ravel_f(cell, grid.sub_counts)


def check_subchunk(stored: RawArray, expected: int) -> bool:
    """Whether stored bytes (data, checksum) are what was saved: both their own checksum and the table's say so."""
    own = int.from_bytes(stored[-CRC_BYTES:].tobytes(), "little")
    return own == expected and crc32c(stored[:-CRC_BYTES]) == expected


def check_part(grid: Grid, itemsize: int, byte_offset: int, stored: RawArray, table: RawArray) -> bool:
    """Whether a part of a chunk object is what was saved, as far as it holds whole subchunks, or the whole index.

    ``table`` is the chunk's part of the checksum table.
    """
    size, counts = subchunk_bytes(grid, itemsize), grid.sub_counts
    end = byte_offset + len(stored)
    for place in range(-(-byte_offset // size), min(end // size, len(table))):
        start = place * size - byte_offset
        if not check_subchunk(stored[start : start + size], int(table[ravel(unravel_f(place, counts), counts)])):
            return False
    index_at = len(table) * size
    if grid.subchunk_shape is None or byte_offset > index_at or end != chunk_object_size(grid, itemsize):
        return True
    return stored[index_at - byte_offset :].tobytes() == _index(grid, itemsize)


def copy_subchunk(grid: Grid, chunk: Ints, cell: Ints, stored: RawArray, box: Box, target: Target) -> int:
    """Copy what a stored subchunk and a wanted box share into ``target``, which has the box's shape.

    Returns the number of bytes copied.
    """
    sub = grid.subchunk_shape or grid.chunk_shape
    offset = tuple(c * n + i * m for c, n, i, m in zip(chunk, grid.chunk_shape, cell, sub, strict=True))
    shared = intersect(Box(offset, sub), box)
    if shared is None:
        return 0
    cells = stored[:-CRC_BYTES].view(target.dtype).reshape(sub)
    target[shared.slices(box.offset)] = cells[shared.slices(offset)]
    return shared.size * target.dtype.itemsize


def runs(places: Sequence[int], longest: int) -> list[tuple[int, int]]:
    """Group sorted places into (first, count) runs of neighbours, none longer than ``longest``."""
    out: list[tuple[int, int]] = []
    for place in places:
        if out and out[-1][0] + out[-1][1] == place and out[-1][1] < longest:
            out[-1] = (out[-1][0], out[-1][1] + 1)
        else:
            out.append((place, 1))
    return out
