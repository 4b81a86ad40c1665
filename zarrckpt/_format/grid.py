"""Boxes and chunk grids: the geometry of a tensor, in integers only.

A *box* is a half-open region of a tensor. A *chunk* is a cell of an array's regular grid and one stored
object. A *subchunk* is a cell inside a chunk. Everything here is exact and free of I/O.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from zarrckpt._format.wire import record

Ints = tuple[int, ...]


@record
class Box(NamedTuple):
    """A half-open region ``[offset, offset + shape)`` of a tensor, in elements."""

    offset: Ints
    shape: Ints

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    def slices(self, origin: Sequence[int] | None = None) -> tuple[slice, ...]:
        """Index of this region in an array that begins at ``origin`` (default: at zero)."""
        start = origin if origin is not None else (0,) * len(self.offset)
        return tuple(slice(o - b, o - b + n) for o, n, b in zip(self.offset, self.shape, start, strict=True))

    def region(self, origin: Sequence[int] | None = None) -> tuple[Any, ...]:
        """As :meth:`slices`, and an ellipsis: so that what it takes of an array without dimensions is a view, too."""
        return (*self.slices(origin), ...)


def intersect(a: Box, b: Box) -> Box | None:
    """The region that two boxes share, or None. Zero-dimensional boxes share their one element."""
    lo = tuple(map(max, a.offset, b.offset))
    hi = tuple(min(ao + an, bo + bn) for ao, an, bo, bn in zip(*a, *b, strict=True))
    shape = tuple(h - start for start, h in zip(lo, hi, strict=True))
    return None if any(n <= 0 for n in shape) else Box(lo, shape)


@record
class Grid(NamedTuple):
    """A regular chunk grid: the array's shape, its chunks' shape, and their subchunks' shape if they have any."""

    shape: Ints
    chunk_shape: Ints
    subchunk_shape: Ints | None = None

    @property
    def whole(self) -> Box:
        """The box of all elements."""
        return Box((0,) * len(self.shape), self.shape)

    @property
    def counts(self) -> Ints:
        """The number of chunks along each dimension; zero where the array has no elements."""
        return _counts(self.shape, self.chunk_shape)

    @property
    def num_chunks(self) -> int:
        return math.prod(self.counts)

    @property
    def sub_counts(self) -> Ints:
        """The number of subchunks of one chunk along each dimension (1 each where there are none)."""
        return _counts(self.chunk_shape, self.subchunk_shape or self.chunk_shape)

    @property
    def subchunks_per_chunk(self) -> int:
        """The number of subchunks of one chunk; 1 where there are none."""
        return math.prod(self.sub_counts)

    @property
    def num_subchunks(self) -> int:
        """Subchunks of the whole array: the number of checksums that it has in the checksum table."""
        return self.num_chunks * self.subchunks_per_chunk

    @property
    def subchunk_size(self) -> int:
        """The number of elements of one subchunk; of the whole chunk where there are none."""
        return math.prod(self.subchunk_shape or self.chunk_shape)

    def chunk_box(self, index: Ints) -> Box:
        """The part of the array that a chunk holds: clipped at the array's end."""
        return _cell_box(index, self.chunk_shape, self.shape)

    def chunk_number(self, index: Ints) -> int:
        """The chunk's place in C order."""
        return ravel(index, self.counts)

    def chunks_of(self, box: Box) -> Iterator[Ints]:
        """Indices of the chunks that overlap a box, in C order."""
        yield from _cells_of(box, self.chunk_shape)

    def subchunk_box(self, number: int) -> Box:
        """The subchunk with a number in C order; the offset counts from the chunk's begin."""
        if self.subchunk_shape is None:
            return Box((0,) * len(self.shape), self.chunk_shape)
        return _cell_box(unravel(number, self.sub_counts), self.subchunk_shape, self.chunk_shape)

    def subchunks_of(self, box: Box) -> list[int]:
        """Which of one chunk's subchunks overlap a box given relative to the chunk: their numbers, ascending."""
        counts = self.sub_counts
        return [ravel(cell, counts) for cell in _cells_of(box, self.subchunk_shape or self.chunk_shape)]


@functools.lru_cache(4096)
def _counts(shape: Ints, cell: Ints) -> Ints:
    """The number of cells along each dimension. Kept: a model has few shapes, and asks for each many times."""
    return tuple(-(-n // c) for n, c in zip(shape, cell, strict=True))


def is_run(chunk: Ints, sub: Ints) -> bool:
    """Whether subchunks of a shape, which divides the chunk's, are runs of its elements in C order."""
    cut = next((dim for dim, n in enumerate(sub) if n > 1), len(sub))
    return sub[cut + 1 :] == chunk[cut + 1 :]


def ravel(index: Sequence[int], counts: Sequence[int]) -> int:
    """The number of a cell in C order (last dimension fastest)."""
    number = 0
    for i, n in zip(index, counts, strict=True):
        number = number * n + i
    return number


def unravel(number: int, counts: Sequence[int]) -> Ints:
    """The cell with a number in C order."""
    index = []
    for n in reversed(counts):
        number, i = divmod(number, n)
        index.append(i)
    return tuple(reversed(index))


def _cell_box(index: Ints, cell: Ints, limit: Ints) -> Box:
    offset = tuple(i * c for i, c in zip(index, cell, strict=True))
    return Box(offset, tuple(min(c, n - o) for c, n, o in zip(cell, limit, offset, strict=True)))


def _cells_of(box: Box, cell: Ints) -> Iterator[Ints]:
    if box.size == 0:
        return
    yield from itertools.product(*_ranges_of(box, cell))


def _ranges_of(box: Box, cell: Ints) -> list[range]:
    """The cells that a box overlaps, along each dimension."""
    return [range(o // c, -(-(o + n) // c)) for o, n, c in zip(*box, cell, strict=True)]
