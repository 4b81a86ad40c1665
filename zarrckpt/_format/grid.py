"""Boxes and chunk grids: the geometry of a tensor, in integers only, without I/O.

A *box* is a half-open region of a tensor. A *chunk* is a cell of an array's regular grid, and one stored object. A
*subchunk* is a cell inside a chunk.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from zarrckpt._format.wire import record

Ints = tuple[int, ...]

_COPIED_NUMBERS = 1 << 16


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
        """Return the index of this region in an array that begins at ``origin`` (default: zero)."""
        start = origin if origin is not None else (0,) * len(self.offset)
        return tuple(slice(o - b, o - b + n) for o, n, b in zip(self.offset, self.shape, start, strict=True))

    def region(self, origin: Sequence[int] | None = None) -> tuple[Any, ...]:
        """Return :meth:`slices` and an ellipsis. With it, an index into a 0-d array returns a view, not a scalar."""
        return (*self.slices(origin), ...)


def intersect(a: Box, b: Box) -> Box | None:
    """Return the region that two boxes share, or None. Zero-dimensional boxes share their one element."""
    lo = tuple(map(max, a.offset, b.offset))
    hi = tuple(min(ao + an, bo + bn) for ao, an, bo, bn in zip(*a, *b, strict=True))
    shape = tuple(h - start for start, h in zip(lo, hi, strict=True))
    return None if any(n <= 0 for n in shape) else Box(lo, shape)


@record
class Grid(NamedTuple):
    """A regular chunk grid: the shapes of the array, of its chunks, and of their subchunks if they have any."""

    shape: Ints
    chunk_shape: Ints
    subchunk_shape: Ints | None = None

    @property
    def whole(self) -> Box:
        """The box of all elements."""
        return Box((0,) * len(self.shape), self.shape)

    @property
    def counts(self) -> Ints:
        """The number of chunks along each dimension. It is zero if the array has no elements along the dimension."""
        return _counts(self.shape, self.chunk_shape)

    @property
    def num_chunks(self) -> int:
        return math.prod(self.counts)

    @property
    def sub_counts(self) -> Ints:
        """The number of subchunks of one chunk along each dimension (all 1 if there are none)."""
        return _counts(self.chunk_shape, self.subchunk_shape or self.chunk_shape)

    @property
    def subchunks_per_chunk(self) -> int:
        """The number of subchunks of one chunk, or 1 if there are none."""
        return 1 if self.subchunk_shape is None else math.prod(self.sub_counts)

    @property
    def num_subchunks(self) -> int:
        """The number of subchunks of the array, which is its number of checksums in the table."""
        return self.num_chunks * self.subchunks_per_chunk

    @property
    def subchunk_size(self) -> int:
        """The number of elements of one subchunk, or of the whole chunk if there are no subchunks."""
        return math.prod(self.subchunk_shape or self.chunk_shape)

    def chunk_box(self, index: Ints) -> Box:
        """Return the box of a chunk, clipped at the end of the array."""
        return _cell_box(index, self.chunk_shape, self.shape)

    def chunk_number(self, index: Ints) -> int:
        """Return the number of a chunk in C order."""
        return ravel(index, self.counts)

    def chunks_of(self, box: Box) -> Iterator[Ints]:
        """Return the indices of the chunks that overlap a box, in C order."""
        return _cells_of(box, self.chunk_shape)

    def subchunk_box(self, number: int) -> Box:
        """Return the box of the subchunk with this number in C order. The offset is relative to the chunk."""
        if self.subchunk_shape is None:
            return Box((0,) * len(self.shape), self.chunk_shape)
        return _cell_box(unravel(number, self.sub_counts), self.subchunk_shape, self.chunk_shape)

    def subchunks_of(self, box: Box) -> list[int]:
        """Return the numbers of the subchunks of one chunk that overlap a box, ascending. The box is relative to it."""
        counts = self.sub_counts
        return [ravel(cell, counts) for cell in _cells_of(box, self.subchunk_shape or self.chunk_shape)]


@functools.lru_cache(4096)
def _counts(shape: Ints, cell: Ints) -> Ints:
    """Return the number of cells along each dimension. Cached, because a model has few shapes, each used often."""
    return tuple(-(-n // c) for n, c in zip(shape, cell, strict=True))


def is_consecutive(chunk: Ints, sub: Ints) -> bool:
    """Whether each subchunk of this shape has consecutive elements of the chunk in C order. It divides the chunk."""
    cut = next((dim for dim, n in enumerate(sub) if n > 1), len(sub))
    return sub[cut + 1 :] == chunk[cut + 1 :]


def ravel(index: Sequence[int], counts: Sequence[int]) -> int:
    """Return the number of a cell in C order (last dimension fastest)."""
    number = 0
    for i, n in zip(index, counts, strict=True):
        number = number * n + i
    return number


def unravel(number: int, counts: Sequence[int]) -> Ints:
    """Return the cell with this number in C order."""
    index = []
    for n in reversed(counts):
        number, i = divmod(number, n)
        index.append(i)
    return tuple(reversed(index))


def _cell_box(index: Ints, cell: Ints, limit: Ints) -> Box:
    offset = tuple(map(operator.mul, index, cell))
    return Box(offset, tuple(map(min, cell, map(operator.sub, limit, offset))))


def _cells_of(box: Box, cell: Ints) -> Iterator[Ints]:
    if not box.size:
        return iter(())
    return product([range(o // c, -(-(o + n) // c)) for o, n, c in zip(*box, cell, strict=True)])


def product(ranges: Sequence[range]) -> Iterator[Ints]:
    """Return ``itertools.product`` of ranges. That would first copy them, so long ones are passed one by one.

    A damaged document can claim any number of chunks.
    """
    if max(map(len, ranges), default=0) <= _COPIED_NUMBERS:
        return itertools.product(*ranges)
    *outer, last = ranges
    return ((*first, number) for first in product(outer) for number in last)
