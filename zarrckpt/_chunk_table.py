"""One chunk's part of the tables: where in its object each subchunk is, and whether it is what was saved."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from zarrckpt import _codec
from zarrckpt._codec import CRC_BYTES, RawArray
from zarrckpt._compression import Compression, DecodeError
from zarrckpt._grid import Grid, Ints, ravel, unravel_f


class ChunkTable:
    """What the tables say of one chunk.

    Args:
        checksums: of its subchunks, in C order. sizes: their stored sizes in the same order, where they are compressed;
        otherwise their places are arithmetic.
    """

    def __init__(self, grid: Grid, itemsize: int, checksums: RawArray, sizes: RawArray | None = None) -> None:
        self._grid = grid
        self._itemsize = itemsize
        self.checksums = checksums
        self._begins: Sequence[int] = _codec.plain_begins(grid, itemsize) if sizes is None else begins_of(grid, sizes)

    def begin(self, place: int) -> int:
        """Where in the object the subchunk with a place begins; for the number of subchunks, where the last ends."""
        return self._begins[place]

    def checksum(self, place: int) -> int:
        """The checksum of the stored subchunk with a place."""
        return int(self.checksums[ravel(unravel_f(place, self._grid.sub_counts), self._grid.sub_counts)])

    @property
    def object_size(self) -> int:
        """The size of the chunk's object in bytes."""
        index = 0 if self._grid.subchunk_shape is None else len(self.checksums) * 16 + CRC_BYTES
        return self._begins[-1] + index

    def check(self, byte_offset: int, stored: RawArray, compression: Compression | None) -> bool:
        """Whether a part of the object is what was saved, as far as it holds whole subchunks, or the whole index.

        Compressed ones also say of themselves how long they are: somebody else decompresses them, and believes that.
        """
        begins, end = self._begins, byte_offset + len(stored)
        for place in range(bisect_left(begins, byte_offset), bisect_right(begins, end) - 1):
            part = stored[begins[place] - byte_offset : begins[place + 1] - byte_offset]
            if _codec.checked(part) != self.checksum(place) or not self._says_its_size(part, compression):
                return False
        if byte_offset > begins[-1] or end != self.object_size:
            return True
        return stored[begins[-1] - byte_offset :].tobytes() == _codec.chunk_index(self._grid, begins)

    def whole(self, start: int, stop: int) -> tuple[int, int]:
        """Where the subchunks (or the index) begin and end that hold the bytes from ``start`` to ``stop``."""
        begins = self._begins
        begin = begins[bisect_right(begins, start) - 1]
        return begin, self.object_size if stop > begins[-1] else begins[bisect_left(begins, stop)]

    def _says_its_size(self, part: RawArray, compression: Compression | None) -> bool:
        nbytes = _codec.subchunk_bytes(self._grid, self._itemsize) - CRC_BYTES
        try:
            if compression is not None:
                compression.expect(part[:-CRC_BYTES], nbytes)
        except DecodeError:
            return False
        return True


def chunk_table(grid: Grid, itemsize: int, chunk: Ints, checksums: RawArray, sizes: RawArray | None) -> ChunkTable:
    """One chunk's part of an array's parts of the tables."""
    cells = math.prod(grid.sub_counts)
    first = grid.chunk_number(chunk) * cells
    own = slice(first, first + cells)
    return ChunkTable(grid, itemsize, checksums[own], None if sizes is None else sizes[own])


def begins_of(grid: Grid, sizes: RawArray) -> Sequence[int]:
    """Where the subchunks of a chunk's object begin, by place, and where the last one ends.

    ``sizes`` is the chunk's part of the table of sizes.
    """
    in_storage = sizes.reshape(grid.sub_counts).ravel(order="F")
    return [0, *itertools.accumulate(in_storage.tolist())]
