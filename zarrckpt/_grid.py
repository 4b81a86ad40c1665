"""Boxes and chunk grids: the geometry of a tensor, in integers only.

A *box* is a half-open region of a tensor. A *chunk* is a cell of an array's regular grid and one stored
object. A *subchunk* is a cell inside a chunk. Everything here is exact and free of I/O.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

Ints = tuple[int, ...]

MAX_CHUNK_BYTES = 128 << 20
"""One stream to an object store is slow, so larger chunks would make one rank wait for one connection."""

SUBCHUNK_ABOVE = 16 << 20
"""Chunks above this many bytes carry subchunks, so that a partial read need not fetch all of them."""

MAX_SUBCHUNK_BYTES = 4 << 20
"""Small enough for partial reads, large enough that foreign readers are not slowed by many small requests."""

MIN_SUBCHUNK_BYTES = 128 << 10

_ODD_GRID_MIN_CHUNK = 1 << 20

_MAX_EXCESS = 8
"""A divisor this many times below the wanted extent is of no use: the cells would be too many and too small."""


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


def intersect(a: Box, b: Box) -> Box | None:
    """The region that two boxes share, or None. Zero-dimensional boxes share their one element."""
    lo = tuple(map(max, a.offset, b.offset))
    hi = tuple(min(ao + an, bo + bn) for ao, an, bo, bn in zip(*a, *b, strict=True))
    shape = tuple(h - start for start, h in zip(lo, hi, strict=True))
    return None if any(n <= 0 for n in shape) else Box(lo, shape)


class Grid(NamedTuple):
    """A regular chunk grid: the array's shape, its chunks' shape, and their subchunks' shape if they have any."""

    shape: Ints
    chunk_shape: Ints
    subchunk_shape: Ints | None = None

    @property
    def counts(self) -> Ints:
        """The number of chunks along each dimension; zero where the array has no elements."""
        return tuple(-(-n // c) for n, c in zip(self.shape, self.chunk_shape, strict=True))

    @property
    def num_chunks(self) -> int:
        return math.prod(self.counts)

    @property
    def sub_counts(self) -> Ints:
        """The number of subchunks of one chunk along each dimension (1 each where there are none)."""
        sub = self.subchunk_shape or self.chunk_shape
        return tuple(c // s for c, s in zip(self.chunk_shape, sub, strict=True))

    @property
    def num_subchunks(self) -> int:
        """Subchunks of the whole array: the number of checksums that it has in the checksum table."""
        return self.num_chunks * math.prod(self.sub_counts)

    def chunk_box(self, index: Ints) -> Box:
        """The part of the array that a chunk holds: clipped at the array's end."""
        return _cell_box(index, self.chunk_shape, self.shape)

    def chunk_number(self, index: Ints) -> int:
        """The chunk's place in C order."""
        return ravel(index, self.counts)

    def chunks_of(self, box: Box) -> Iterator[Ints]:
        """Indices of the chunks that overlap a box, in C order."""
        yield from _cells_of(box, self.chunk_shape)

    def subchunks_of(self, box: Box) -> Iterator[Ints]:
        """Indices of one chunk's subchunks that overlap a box given relative to the chunk, in C order."""
        yield from _cells_of(box, self.subchunk_shape or self.chunk_shape)


def ravel(index: Sequence[int], counts: Sequence[int]) -> int:
    """The number of a cell in C order (last dimension fastest)."""
    number = 0
    for i, n in zip(index, counts, strict=True):
        number = number * n + i
    return number


def ravel_f(index: Sequence[int], counts: Sequence[int]) -> int:
    """The number of a cell in Fortran order (first dimension fastest)."""
    return ravel(tuple(reversed(index)), tuple(reversed(counts)))


def unravel_f(number: int, counts: Sequence[int]) -> Ints:
    """The cell with a number in Fortran order."""
    index = []
    for n in counts:
        number, i = divmod(number, n)
        index.append(i)
    return tuple(index)


def _cell_box(index: Ints, cell: Ints, limit: Ints) -> Box:
    offset = tuple(i * c for i, c in zip(index, cell, strict=True))
    return Box(offset, tuple(min(c, n - o) for c, n, o in zip(cell, limit, offset, strict=True)))


def _cells_of(box: Box, cell: Ints) -> Iterator[Ints]:
    if box.size == 0:
        return
    ranges = (range(o // c, -(-(o + n) // c)) for o, n, c in zip(*box, cell, strict=True))
    yield from itertools.product(*ranges)


def fit_grid(shape: Ints, boxes: Iterable[Box], itemsize: int, max_chunk_bytes: int = MAX_CHUNK_BYTES) -> Grid | None:
    """The regular grid in which every box is made of whole chunks (clipped at the array's end), or None.

    ``torch.chunk`` cuts a dimension of n in w into steps of ceil(n / w), which *is* such a grid. Chunks above
    ``max_chunk_bytes`` are divided further, still along the boxes' edges, where a useful divisor allows it.
    """
    boxes = [b for b in boxes if b.size]
    steps = [_step(dim, shape[dim], boxes) for dim in range(len(shape))]
    chunk = tuple(step or max(n, 1) for step, n in zip(steps, shape, strict=True))
    grid = Grid(shape, chunk)
    # A greatest common divisor always exists, but rows cut at 0, 3, 5, 8 would give one object a row.
    odd = grid.num_chunks > 4 * max(len(boxes), 1) and math.prod(chunk) * itemsize < _ODD_GRID_MIN_CHUNK
    if odd:
        return None
    chunk = _divide(chunk, [step is None for step in steps], itemsize, max_chunk_bytes)
    return Grid(shape, chunk, subchunk_shape(shape, chunk, itemsize))


def _step(dim: int, n: int, boxes: Iterable[Box]) -> int | None:
    """The largest step of which every inner cut along a dimension is a multiple; None where nothing is cut."""
    cuts = {c for b in boxes for c in (b.offset[dim], b.offset[dim] + b.shape[dim]) if 0 < c < n}
    return math.gcd(*cuts) if cuts else None


def _divide(chunk: Ints, free: Sequence[bool], itemsize: int, limit: int) -> Ints:
    """Divide a chunk, first dimension first, until it is at most ``limit`` bytes.

    A dimension that no box cuts may be divided anywhere (``free``); one that is cut, by a divisor only. Where that
    has no useful one (16001 rows), the next dimension is divided, or the chunk stays larger than the limit.
    """
    out = list(chunk)
    for dim, extent in enumerate(chunk):
        total = math.prod(out) * itemsize
        if total <= limit:
            break
        wanted = max(1, limit * extent // total)
        even = _useful_divisor(extent, wanted)
        if free[dim] and (even is None or even * 2 < wanted):
            pieces = -(-extent // wanted)
            # A multiple of 64 has divisors that subchunks need.
            out[dim] = min(wanted, _round_up(-(-extent // pieces), 64 if wanted >= 128 else 1))
        else:
            out[dim] = even or extent
    return tuple(out)


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _largest_divisor(n: int, limit: int) -> int:
    """The largest divisor of n that is at most ``limit`` (at least 1)."""
    best = 1
    for small in range(1, math.isqrt(n) + 1):
        if n % small == 0:
            for divisor in (small, n // small):
                if best < divisor <= limit:
                    best = divisor
    return best


def _useful_divisor(n: int, wanted: int) -> int | None:
    """The largest divisor of n that is at most ``wanted``; None where that is far below."""
    best = _largest_divisor(n, wanted)
    return best if best * _MAX_EXCESS >= wanted else None


def subchunk_shape(shape: Ints, chunk: Ints, itemsize: int) -> Ints | None:
    """The subchunks of a chunk, or None for a chunk that is small or has no useful divisors.

    The last dimension is cut to about an eighth of the array's width, so that a column shard of eight reads
    its columns only; the others, first to last, until a subchunk is at most MAX_SUBCHUNK_BYTES. In storage the
    subchunks lie first dimension fastest, so that such a column stripe is one range of bytes.
    """
    if math.prod(chunk) * itemsize <= SUBCHUNK_ABOVE:
        return None
    sub = list(chunk)
    if len(chunk) > 1:
        sub[-1] = _useful_divisor(chunk[-1], max(64, shape[-1] // 8)) or chunk[-1]
    for dim in range(len(chunk)):
        total = math.prod(sub) * itemsize
        if total <= MAX_SUBCHUNK_BYTES:
            break
        sub[dim] = _useful_divisor(sub[dim], max(1, MAX_SUBCHUNK_BYTES * sub[dim] // total)) or sub[dim]
    return tuple(sub) if MIN_SUBCHUNK_BYTES <= math.prod(sub) * itemsize <= SUBCHUNK_ABOVE else None
