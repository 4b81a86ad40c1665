"""One chunk's bytes: encode a piece of a tensor, find and decode its subchunks.

Elements travel as raw bits (unsigned integers or voids of the same size), never as numbers, so NaN
payloads and types that numpy does not know arrive unchanged. Layout, see ``docs/reference/format.md``:
without subchunks ``data, crc32c``; with subchunks each one's ``data, crc32c`` (first dimension fastest),
then the index of ``sharding_indexed`` (C order, 16 bytes a subchunk) and its crc32c.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, Protocol

import numpy as np

from zarrckpt._crc32c import crc32c
from zarrckpt._grid import Box, Grid, Ints, intersect, ravel, unravel_f

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


def bytes_of(array: RawArray) -> RawArray:
    """A flat view of a contiguous array's bytes (numpy refuses it for empty and 0-d arrays as they are)."""
    return array.reshape(-1).view(np.uint8)


def crc_buffer(crc: int) -> bytes:
    """A checksum as it is stored."""
    return crc.to_bytes(CRC_BYTES, "little")


BLOCK_BYTES = 1 << 20
"""What is done to bytes in turn (copy, checksum, write) is done to so many at a time, while they are in the cache."""

GROUP_BYTES = 2 << 20
"""About how much goes to the store together, where a chunk goes in parts: more would leave the cache in between."""


def is_whole(grid: Grid, piece: RawArray) -> bool:
    """Whether a piece is a full chunk that lies in one piece in its memory."""
    return piece.shape == grid.chunk_shape and bool(piece.flags.c_contiguous)


def copies_any(grid: Grid, whole: bool) -> bool:
    """Whether a chunk's encoder copies its subchunks; ``whole`` is what :func:`is_whole` says of the elements."""
    # A band of whole rows lies in one piece.
    return not whole or (grid.subchunk_shape or grid.chunk_shape)[1:] != grid.chunk_shape[1:]


def scratch_bytes(grid: Grid, itemsize: int, whole: bool, *, in_parts: bool) -> int:
    """How much memory :class:`ChunkEncoder` needs: for all copies, or for those of one group, where they go in parts.

    ``whole`` is what :func:`is_whole` says of the elements.
    """
    if not copies_any(grid, whole):
        return 0
    stored = subchunk_bytes(grid, itemsize)
    every = math.prod(grid.sub_counts) * stored
    return min(every, max(stored, GROUP_BYTES)) if in_parts else every


class ChunkEncoder:
    """The bytes of one chunk object, in groups of buffers made one after the other, and its subchunks' checksums.

    ``piece`` holds the chunk's part of the array, raw elements, any strides; at the array's end it is smaller than the
    chunk and is padded with zeros, since Zarr stores full chunks. Subchunks that lie in one piece in its memory are not
    copied; the others are copied to scratch memory as they are stored, many with one call.
    """

    def __init__(self, grid: Grid, piece: RawArray) -> None:
        self._grid = grid
        self._piece = piece
        self._sub = grid.subchunk_shape or grid.chunk_shape
        self._stored = subchunk_bytes(grid, piece.dtype.itemsize)
        self._crcs: RawArray = np.zeros((grid.sub_counts or (1,))[::-1], "<u4")
        """In storage order."""
        self.nbytes = chunk_object_size(grid, piece.dtype.itemsize)

    @property
    def checksums(self) -> list[int]:
        """The subchunks' checksums in C order; known when all groups have been made."""
        found: list[int] = self._crcs.transpose().reshape(-1).tolist()
        return found

    def groups(self, scratch: RawArray) -> Iterator[list[memoryview | bytes]]:
        """The chunk's buffers. ``scratch`` is used anew when it is full, once the groups that lie there were taken."""
        copies = copies_any(self._grid, is_whole(self._grid, self._piece))
        yield from self._copied(scratch) if copies else self._straight()
        if self._grid.subchunk_shape is not None:
            yield [chunk_index(self._grid, plain_begins(self._grid, self._piece.dtype.itemsize))]

    def _straight(self) -> Iterator[list[memoryview | bytes]]:
        """Subchunk after subchunk from the piece's own memory."""
        flat, size = bytes_of(self._piece), self._stored - CRC_BYTES
        group: list[memoryview | bytes] = []
        used = 0
        for place in range(self._crcs.size):
            crc = 0
            for begin in range(0, size, BLOCK_BYTES):
                block = flat[place * size + begin : place * size + min(begin + BLOCK_BYTES, size)]
                crc = crc32c(block, crc)
                group.append(block.data)
                used += len(block)
                if used >= GROUP_BYTES and begin + BLOCK_BYTES < size:
                    yield group
                    group, used = [], 0
            self._crcs.reshape(-1)[place] = crc
            group.append(crc_buffer(crc))
            if used >= GROUP_BYTES:
                yield group
                group, used = [], 0
        if group:
            yield group

    def _copied(self, scratch: RawArray) -> Iterator[list[memoryview | bytes]]:
        used = taken = 0
        for place, count in stripes(self._grid, self._stored, 0, self._crcs.size):
            need = count * self._stored
            if used + need > len(scratch):
                yield [scratch[taken:used].data]
                used = taken = 0
            stored = scratch[used : used + need].reshape(count, self._stored)
            self._fill(stored, place)
            used += need
            if used - taken >= GROUP_BYTES:
                yield [scratch[taken:used].data]
                taken = used
        if used > taken:
            yield [scratch[taken:used].data]

    def _fill(self, stored: RawArray, place: int) -> None:
        """Put neighbouring subchunks of one stripe into memory, each with its checksum behind it."""
        count = len(stored)
        cell = unravel_f(place, self._grid.sub_counts)
        at = tuple(i * n for i, n in zip(cell, self._sub, strict=True))
        extent = (count * self._sub[0], *self._sub[1:]) if self._sub else ()
        region: tuple[Any, ...] = (*(slice(o, o + n) for o, n in zip(at, extent, strict=True)), ...)
        part = self._piece[region]
        cells = stored[:, :-CRC_BYTES].view(part.dtype).reshape(count, *self._sub)
        if part.shape == extent:
            cells[...] = part.reshape(count, *self._sub)
        else:
            cells[...] = np.zeros((), part.dtype)
            for i in range(-(-len(part) // self._sub[0])):
                rows = part[i * self._sub[0] : (i + 1) * self._sub[0]]
                inside: tuple[Any, ...] = (i, *(slice(0, n) for n in rows.shape))
                cells[inside] = rows
        crcs = [crc32c(row[:-CRC_BYTES]) for row in stored]
        stored[:, -CRC_BYTES:] = np.array(crcs, "<u4").view(np.uint8).reshape(count, CRC_BYTES)
        self._crcs.reshape(-1)[place : place + count] = crcs


def encode_chunk(grid: Grid, piece: RawArray) -> tuple[list[memoryview | bytes], list[int]]:
    """The buffers of one chunk object, and its subchunks' checksums in C order, see :class:`ChunkEncoder`."""
    encoder = ChunkEncoder(grid, piece)
    scratch = np.empty(scratch_bytes(grid, piece.dtype.itemsize, is_whole(grid, piece), in_parts=False), np.uint8)
    return [buffer for group in encoder.groups(scratch) for buffer in group], encoder.checksums


def plain_begins(grid: Grid, itemsize: int) -> range:
    """Where the subchunks of a chunk's object begin, by place, and where the last one ends."""
    stored = subchunk_bytes(grid, itemsize)
    return range(0, (math.prod(grid.sub_counts) + 1) * stored, stored)


def chunk_index(grid: Grid, begins: Sequence[int]) -> bytes:
    """The index of a chunk with subchunks, (byte offset, length) in C order, and its checksum; none without them.

    ``begins`` has where they begin, by place, and where the last one ends.
    """
    if grid.subchunk_shape is None:
        return b""
    ends = np.array(begins, "<u8")
    places = np.arange(len(ends) - 1).reshape(grid.sub_counts, order="F").reshape(-1)
    index = np.stack([ends[:-1], np.diff(ends)], axis=1)[places].tobytes()
    return index + crc_buffer(crc32c(index))


def chunk_object_size(grid: Grid, itemsize: int) -> int:
    """The size in bytes of every chunk object of an array."""
    cells = math.prod(grid.sub_counts)
    data = math.prod(grid.chunk_shape) * itemsize + cells * CRC_BYTES
    return data if grid.subchunk_shape is None else data + cells * 16 + CRC_BYTES


def subchunk_bytes(grid: Grid, itemsize: int) -> int:
    """The stored size of one subchunk (of the whole chunk where there are none), its checksum included."""
    return math.prod(grid.subchunk_shape or grid.chunk_shape) * itemsize + CRC_BYTES


def checked(stored: RawArray) -> int | None:
    """The checksum of a stored subchunk (data, checksum), None where the data have another one than it says."""
    own = int.from_bytes(stored[-CRC_BYTES:].tobytes(), "little")
    return own if crc32c(stored[:-CRC_BYTES]) == own else None


def altered(stored: RawArray, wanted: Sequence[int]) -> int:
    """The first of some stored subchunks (a row each, without gaps) that is not what was saved, else -1."""
    # All with one call: each gives the interpreter's lock away, and may have to wait for it.
    if crc32c(bytes_of(stored)) == _sealed_crc(*stored.shape) and said(stored[:, -CRC_BYTES:]) == wanted:
        return -1
    return next((i for i, row in enumerate(stored) if checked(row) != wanted[i]), -1)


@lru_cache(maxsize=1024)
def _sealed_crc(count: int, stored: int) -> int:
    """The checksum of that many neighbours of ``stored`` bytes, each with its own checksum at its end.

    It is the same for all data: behind a message its checksum takes the state of the polynomial division to a constant.
    """
    zeros = bytes(stored - CRC_BYTES)
    one = zeros + crc_buffer(crc32c(zeros))
    crc = 0
    for _ in range(count):
        crc = crc32c(one, crc)
    return crc


def said(stored: RawArray) -> list[int]:
    """Stored checksums, four bytes each, as numbers."""
    found: list[int] = np.ascontiguousarray(stored).view("<u4").reshape(-1).tolist()
    return found


def place_of(grid: Grid, chunk: Ints, place: int, box: Box, target: Target) -> RawArray | None:
    """The bytes of a target (which has the box's shape) that a subchunk fills, where it does that in one piece."""
    if not isinstance(target, np.ndarray):
        return None
    sub = grid.subchunk_shape or grid.chunk_shape
    offset = _cell_offset(grid, chunk, unravel_f(place, grid.sub_counts))
    inside = tuple(o - b for o, b in zip(offset, box.offset, strict=True))
    if any(o < 0 or o + n > m for o, n, m in zip(inside, sub, box.shape, strict=True)):
        return None
    # The ellipsis, so that a scalar stays a view.
    at: tuple[Any, ...] = (*(slice(o, o + n) for o, n in zip(inside, sub, strict=True)), ...)
    part = target[at]
    return bytes_of(part) if part.flags.c_contiguous else None


def unpack(
    grid: Grid, chunk: Ints, place: int, stored: RawArray, table: RawArray, box: Box, target: Target
) -> tuple[int, int]:
    """Check neighbouring stored subchunks of one stripe (a row each) and copy what a wanted box shares with them.

    ``target`` has the box's shape; ``table`` is the chunk's part of the checksum table. Returns the number of bytes
    copied, and the place of the first subchunk that is not what was saved, else -1.
    """
    sub, count = grid.subchunk_shape or grid.chunk_shape, len(stored)
    wrong = altered(stored, expected(grid, place, count, table))
    if wrong >= 0:
        return 0, place + wrong
    cells = stored[:, :-CRC_BYTES].view(target.dtype).reshape(count, *sub)
    return copy_cells(grid, chunk, place, cells, box, target), -1


def copy_cells(grid: Grid, chunk: Ints, place: int, cells: RawArray, box: Box, target: Target) -> int:
    """Copy what a wanted box shares with neighbouring subchunks of one stripe, given as elements.

    ``cells`` has a dimension more than the array, for the subchunks. Returns the number of bytes copied.
    """
    sub, count = grid.subchunk_shape or grid.chunk_shape, len(cells)
    offset = _cell_offset(grid, chunk, unravel_f(place, grid.sub_counts))
    extent = (count * sub[0], *sub[1:]) if sub else ()
    shared = intersect(Box(offset, extent), box)
    if shared is None:
        return 0
    if isinstance(target, np.ndarray) and shared.shape == extent:
        at: tuple[Any, ...] = (*shared.slices(box.offset), ...)
        # Splitting a dimension gives a view, whatever the strides.
        target[at].reshape(count, *sub)[...] = cells
    else:
        for i in range(count):
            own = Box((offset[0] + i * sub[0], *offset[1:]), sub) if sub else Box((), ())
            part = intersect(own, box)
            if part is not None:
                target[part.slices(box.offset)] = cells[i][part.slices(own.offset)]
    return shared.size * target.dtype.itemsize


def expected(grid: Grid, place: int, count: int, table: RawArray) -> list[int]:
    """The checksums that a chunk's part of the table has for neighbours of one stripe."""
    cell = unravel_f(place, grid.sub_counts)
    first, step = ravel(cell, grid.sub_counts), math.prod(grid.sub_counts[1:])
    found: list[int] = table[first :: max(1, step)][:count].tolist()
    return found


def stripes(grid: Grid, stored: int, first: int, count: int, most: int = BLOCK_BYTES) -> Iterator[tuple[int, int]]:
    """Cut a run of subchunks (of ``stored`` bytes each) into (place, count) of about ``most`` bytes.

    Those of one part differ along the first dimension only, so that one strided copy takes them all.
    """
    rows = grid.sub_counts[0] if grid.sub_counts else 1
    longest = max(1, most // stored)
    end = first + count
    while first < end:
        part = min(end - first, longest, rows - first % rows)
        yield first, part
        first += part


def _cell_offset(grid: Grid, chunk: Ints, cell: Ints) -> Ints:
    """Where in the array a subchunk begins."""
    sub = grid.subchunk_shape or grid.chunk_shape
    return tuple(c * n + i * m for c, n, i, m in zip(chunk, grid.chunk_shape, cell, sub, strict=True))


def runs(places: Sequence[int], longest: int) -> list[tuple[int, int]]:
    """Group sorted places into (first, count) runs of neighbours, none longer than ``longest``."""
    out: list[tuple[int, int]] = []
    for place in places:
        if out and out[-1][0] + out[-1][1] == place and out[-1][1] < longest:
            out[-1] = (out[-1][0], out[-1][1] + 1)
        else:
            out.append((place, 1))
    return out
