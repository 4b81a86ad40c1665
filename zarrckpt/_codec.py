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

from zarrckpt._cells import (
    CellBlock,
    block_at,
    blocks_by_rows,
    blocks_of,
    copy_part,
    in_array_order,
    parts_in_array_order,
)
from zarrckpt._crc32c import crc32c
from zarrckpt._grid import Box, Grid, Ints, intersect

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
"""About how much goes to the store together, where a chunk goes in parts: more would leave the cache in between.

No less than BLOCK_BYTES: what is copied at a time goes into the memory of what goes together."""


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
        every = self._crcs.size * self._stored
        if len(scratch) >= every:
            yield [self._by_rows(scratch[:every])]
            return
        used = taken = 0
        longest = max(1, BLOCK_BYTES // self._stored)
        for block in blocks_of(self._grid.sub_counts, self._sub, 0, self._crcs.size, longest):
            need = block.size * self._stored
            if used + need > len(scratch):
                yield [scratch[taken:used].data]
                used = taken = 0
            self._fill(scratch[used : used + need].reshape(*block.counts[::-1], self._stored), block)
            used += need
            if used - taken >= GROUP_BYTES:
                yield [scratch[taken:used].data]
                taken = used
        if used > taken:
            yield [scratch[taken:used].data]

    def _by_rows(self, scratch: RawArray) -> memoryview:
        """Put all subchunks into memory, in the order in which the piece has them in its own.

        Neighbours along its rows share pages, which the processor has then just looked up.
        """
        stored = scratch.reshape(*self._grid.sub_counts[::-1], self._stored)
        for block in blocks_by_rows(self._grid.sub_counts, self._sub, max(1, GROUP_BYTES // self._stored)):
            self._fill(stored[block.stored], block)
        return scratch.data

    def _fill(self, stored: RawArray, block: CellBlock) -> None:
        """Put a block of subchunks into memory, each with its checksum behind it.

        ``stored`` has the block's shape in subchunks with the axes reversed, and an axis of bytes.
        """
        cells = stored[..., :-CRC_BYTES].view(self._piece.dtype)
        part = self._piece[block.region]
        if part.shape == block.box.shape:
            elements = in_array_order(cells, block.counts, self._sub)
            elements[...] = part.reshape(elements.shape)
        else:
            # The array has ended.
            cells[...] = np.zeros((), cells.dtype)
            inside = Box((0,) * part.ndim, part.shape)
            for box, elements in parts_in_array_order(cells, block.counts, self._sub, inside):
                elements[...] = part[box.slices()].reshape(elements.shape)
        crcs = np.array([crc32c(stored[one][:-CRC_BYTES]) for one in np.ndindex(stored.shape[:-1])], "<u4")
        stored[..., -CRC_BYTES:] = crcs.view(np.uint8).reshape(*stored.shape[:-1], CRC_BYTES)
        self._crcs[block.stored] = crcs.reshape(stored.shape[:-1])


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
    if len(stored) == 1:
        # It may be a chunk of 128 MiB, and what it is compared with below would be made in as much memory.
        return -1 if checked(stored[0]) == wanted[0] else 0
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
    offset = _elements_of(grid, chunk, block_at(grid.sub_counts, sub, place)).offset
    inside = tuple(o - b for o, b in zip(offset, box.offset, strict=True))
    if any(o < 0 or o + n > m for o, n, m in zip(inside, sub, box.shape, strict=True)):
        return None
    # The ellipsis, so that a scalar stays a view.
    at: tuple[Any, ...] = (*(slice(o, o + n) for o, n in zip(inside, sub, strict=True)), ...)
    part = target[at]
    return bytes_of(part) if part.flags.c_contiguous else None


def unpack(
    grid: Grid, chunk: Ints, block: CellBlock, stored: RawArray, table: RawArray, box: Box, target: Target
) -> tuple[int, int]:
    """Check stored subchunks (a row each, without gaps) and copy what a wanted box shares with them.

    ``target`` has the box's shape; ``table`` is the chunk's part of the checksum table. Returns the number of bytes
    copied, and the place of the first subchunk that is not what was saved, else -1.
    """
    wrong = altered(stored, expected(block, table.reshape(grid.sub_counts)))
    if wrong >= 0:
        return 0, block.place + wrong
    cells = stored[:, :-CRC_BYTES].view(target.dtype).reshape(block.size, *(grid.subchunk_shape or grid.chunk_shape))
    return copy_cells(grid, chunk, block, cells, box, target), -1


def copy_cells(grid: Grid, chunk: Ints, block: CellBlock, cells: RawArray, box: Box, target: Target) -> int:
    """Copy what a wanted box shares with subchunks, given as elements: (number, *shape of one).

    Returns the number of bytes copied.
    """
    own = _elements_of(grid, chunk, block)
    shared = intersect(own, box)
    if shared is None:
        return 0
    at: tuple[Any, ...] = (*shared.slices(box.offset), ...)
    if isinstance(target, np.ndarray):
        inside = Box(tuple(s - o for s, o in zip(shared.offset, own.offset, strict=True)), shared.shape)
        copy_part(cells, block.counts, inside, target[at])
    elif block.size > 1:
        # Each lies in one piece as it is; together they would have to be copied here first.
        singles = (block_at(grid.sub_counts, cells.shape[1:], block.place + i) for i in range(block.size))
        for i, one in enumerate(singles):
            copy_cells(grid, chunk, one, cells[i : i + 1], box, target)
    else:
        target[at] = cells[0][(*shared.slices(own.offset), ...)]
    return shared.size * target.dtype.itemsize


def expected(block: CellBlock, table: RawArray) -> list[int]:
    """The checksums of subchunks in storage order; ``table`` has those of the chunk, with its shape in subchunks."""
    found: list[int] = table[block.cells].transpose().reshape(-1).tolist()
    return found


def _elements_of(grid: Grid, chunk: Ints, block: CellBlock) -> Box:
    """The elements of subchunks, counted from the array's begin."""
    offset = tuple(c * n + i for c, n, i in zip(chunk, grid.chunk_shape, block.box.offset, strict=True))
    return Box(offset, block.box.shape)


def runs(places: Sequence[int], longest: int) -> list[tuple[int, int]]:
    """Group sorted places into (first, count) runs of neighbours, none longer than ``longest``."""
    out: list[tuple[int, int]] = []
    for place in places:
        if out and out[-1][0] + out[-1][1] == place and out[-1][1] < longest:
            out[-1] = (out[-1][0], out[-1][1] + 1)
        else:
            out.append((place, 1))
    return out
