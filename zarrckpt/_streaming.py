"""Read a chunk from a local file straight into an array's memory, a band of rows after the other.

Memory is what limits this. So a band is read, checksummed and put in its place while it is in the processor's cache,
and its place is whole rows of the target, wherever its subchunks come from.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from zarrckpt._codec import BLOCK_BYTES, CRC_BYTES, RawArray, altered, bytes_of, said, subchunk_bytes
from zarrckpt._crc32c import crc32c
from zarrckpt._grid import Box, Grid, Ints, intersect, ravel_f

if TYPE_CHECKING:
    from zarrckpt._store import Reader

_MAX_DIMENSIONS = 32
"""Cells and the elements in them have a dimension each on the way, and numpy has 64."""

Altered = Callable[[int], NoReturn]
"""Raises the error for the subchunk with a place."""


@dataclass(frozen=True)
class Bands:
    """The subchunks of one chunk that a box needs, where they fill whole columns of cells: rows may be clipped."""

    rows: range
    """Of cells, along the first dimension."""
    columns: tuple[Ints, ...]
    """The cells of a row of them, by their indices along the other dimensions, in storage order."""
    columns_shape: Ints
    """How many they are along each of the other dimensions."""
    inside: Box
    """What chunk and box share, relative to the chunk."""
    target: Ints
    """Where that begins in the target."""

    @property
    def count(self) -> int:
        """The number of subchunks."""
        return len(self.rows) * len(self.columns)


def bands_of(grid: Grid, chunk: Ints, box: Box) -> Bands | None:
    """How a box needs a chunk; None where it needs parts of cells along another dimension than the first.

    None for arrays without dimensions too, and for those with too many.
    """
    if not 0 < len(grid.shape) <= _MAX_DIMENSIONS:
        return None
    sub = grid.subchunk_shape or grid.chunk_shape
    origin = tuple(c * n for c, n in zip(chunk, grid.chunk_shape, strict=True))
    shared = intersect(Box(origin, grid.chunk_shape), box)
    if shared is None:
        return None
    inside = Box(tuple(s - o for s, o in zip(shared.offset, origin, strict=True)), shared.shape)
    ends = tuple(o + n for o, n in zip(*inside, strict=True))
    if any(o % n or e % n for o, e, n in zip(inside.offset[1:], ends[1:], sub[1:], strict=True)):
        return None
    ranges = [range(o // n, -(-e // n)) for o, e, n in zip(inside.offset, ends, sub, strict=True)]
    columns = tuple(column[::-1] for column in itertools.product(*reversed(ranges[1:])))
    target = tuple(s - o for s, o in zip(shared.offset, box.offset, strict=True))
    return Bands(ranges[0], columns, tuple(map(len, ranges[1:])), inside, target)


def parts_of(bands: Bands, grid: Grid, itemsize: int, limit: int) -> list[range]:
    """The rows of cells, cut into parts of about ``limit`` bytes, so that threads can share a large chunk."""
    row = max(1, len(bands.columns)) * subchunk_bytes(grid, itemsize)
    step = max(1, limit // row)
    return [bands.rows[begin : begin + step] for begin in range(0, len(bands.rows), step)]


def scratch_bytes(bands: Bands, grid: Grid, itemsize: int) -> int:
    """The memory that :func:`stream` needs: for one row of cells."""
    return len(bands.columns) * subchunk_bytes(grid, itemsize)


class ChunkStream:
    """One chunk on its way from a file to a target, an array of the box's shape.

    ``checksums`` is the chunk's part of the checksum table. Several threads may fill different rows.
    """

    def __init__(self, grid: Grid, bands: Bands, target: RawArray, checksums: RawArray, altered: Altered) -> None:
        self._grid = grid
        self._bands = bands
        self._target = target
        self._altered = altered
        self._sub = grid.subchunk_shape or grid.chunk_shape
        self._stored = subchunk_bytes(grid, target.dtype.itemsize)
        columns: Any = [list(indices) for indices in zip(*bands.columns, strict=True)]
        table = checksums.reshape(grid.sub_counts)[(slice(None), *columns)]
        self._wanted: list[list[int]] = table.reshape(grid.sub_counts[0], -1).tolist()
        """The checksums by row of cells, in the order of the columns."""

    def fill(self, read: Reader, rows: range, scratch: RawArray) -> int:
        """Fill what some rows of cells have; return its bytes. ``scratch`` has :func:`scratch_bytes`."""
        region = self._target[self._region(rows)]
        straight = 0
        if len(self._bands.columns) == 1 and region.flags.c_contiguous:
            straight = self._straight(read, rows, region)
        self._by_rows(read, rows[straight:], scratch)
        return int(region.nbytes)

    def _by_rows(self, read: Reader, rows: range, scratch: RawArray) -> None:
        """Each row of cells by way of scratch memory."""
        columns, sub = self._bands.columns, self._sub
        block = scratch[: len(columns) * self._stored].reshape(-1, self._stored)
        cells = _as_rows(block, self._target.dtype, self._bands.columns_shape, sub)
        split = (-1, *itertools.chain.from_iterable(zip(self._bands.columns_shape, sub[1:], strict=True)))
        buffers = [[part.data] for part in block]
        offsets = [self._place(0, column) * self._stored for column in columns]
        for row in rows:
            for buffer, byte_offset in zip(buffers, offsets, strict=True):
                read(byte_offset + row * self._stored, buffer)
            wrong = altered(block, self._wanted[row])
            if wrong >= 0:
                self._altered(self._place(row, columns[wrong]))
            begin, end = self._clipped(range(row, row + 1))
            # Splitting dimensions gives a view, whatever the strides.
            part = self._target[self._region(range(row, row + 1))].reshape(split)
            part[...] = cells[begin - row * sub[0] : end - row * sub[0]]

    def _straight(self, read: Reader, rows: range, region: RawArray) -> int:
        """Cells that lie in one piece in the target, several with one call; returns the number of rows of them.

        There are none where the first is clipped, and a last one that is clipped is left out.
        """
        if self._bands.inside.offset[0] > rows.start * self._sub[0]:
            return 0
        flat, size = bytes_of(region), self._stored - CRC_BYTES
        count, longest = len(flat) // size, max(1, BLOCK_BYTES // self._stored)
        for begin in range(0, count, longest):
            some = range(begin, min(begin + longest, count))
            data, own = [flat[i * size : (i + 1) * size] for i in some], np.empty((len(some), CRC_BYTES), np.uint8)
            place = self._place(rows[begin], self._bands.columns[0])
            found = _read_cells(read, place * self._stored, data, own)
            for i, *crcs in zip(some, found, said(own), strict=True):
                if len({*crcs, self._wanted[rows[i]][0]}) > 1:
                    self._altered(self._place(rows[i], self._bands.columns[0]))
        return count

    def _place(self, row: int, column: Ints) -> int:
        return ravel_f((row, *column), self._grid.sub_counts)

    def _clipped(self, rows: range) -> tuple[int, int]:
        """The elements' rows, in the chunk, that rows of cells have in the box."""
        first, height = self._bands.inside.offset[0], self._sub[0]
        return max(first, rows.start * height), min(first + self._bands.inside.shape[0], rows.stop * height)

    def _region(self, rows: range) -> tuple[slice, ...]:
        """Where rows of cells are in the target."""
        bands, (begin, end) = self._bands, self._clipped(rows)
        shift = bands.target[0] - bands.inside.offset[0]
        others = (slice(o, o + n) for o, n in zip(bands.target[1:], bands.inside.shape[1:], strict=True))
        return (slice(begin + shift, end + shift), *others)


def _read_cells(read: Reader, byte_offset: int, data: Sequence[RawArray], own: RawArray) -> list[int]:
    """Fill memory with neighbouring subchunks and ``own`` with their checksums; return those that the data have."""
    if len(data[0]) <= BLOCK_BYTES:
        read(byte_offset, [part.data for pair in zip(data, own, strict=True) for part in pair])
        return [crc32c(part) for part in data]
    crc, whole = 0, data[0]
    for begin in range(0, len(whole), BLOCK_BYTES):
        block = whole[begin : begin + BLOCK_BYTES]
        tail = [own[0].data] if begin + len(block) == len(whole) else []
        read(byte_offset + begin, [block.data, *tail])
        crc = crc32c(block, crc)
    return [crc]


def _as_rows(block: RawArray, dtype: np.dtype[Any], columns: Ints, sub: Ints) -> RawArray:
    """Stored subchunks of a row of cells as elements: a view with the shape (rows, columns, width, ... ) of the target.

    Their order in memory is the last dimension's cells first; a dimension of cells and one of elements alternate.
    """
    dims = len(columns)
    cells = block[:, :-CRC_BYTES].view(dtype).reshape(*reversed(columns), *sub)
    axes = [dims, *itertools.chain.from_iterable((dims - k, dims + k) for k in range(1, dims + 1))]
    return cells.transpose(axes)
