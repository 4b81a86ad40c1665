"""Which regular grid a tensor is stored in, from the boxes that the ranks hold: integers only.

Where the boxes are large and fit a regular grid, each becomes whole chunks, so that no byte moves between ranks. Where
they fit none, or are too small to deserve an object each, a chunk spans several of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Literal, get_args

import numpy as np

from zarrckpt._grid import Box, Grid, Ints

MAX_CHUNK_BYTES = 128 << 20
"""One stream to an object store is slow, so larger chunks would make one rank wait for one connection."""

SUBCHUNK_ABOVE = 1 << 20
"""Chunks above this many bytes carry subchunks, so that a partial read need not fetch all of them."""

MAX_SUBCHUNK_BYTES = 4 << 20
"""Small enough for partial reads, large enough that foreign readers are not slowed by many small requests."""

ODD_SUBCHUNK_BYTES = 16 << 20
"""Where extents have no useful divisors, subchunks may be this large."""

MIN_SUBCHUNK_BYTES = 128 << 10

Subchunks = Literal["blocks", "rows"]
"""How chunks are divided: into blocks of some rows and some columns, or into bands of whole rows."""

SUBCHUNKS: tuple[Subchunks, ...] = get_args(Subchunks)

_ODD_GRID_MIN_CHUNK = 1 << 20

_MAX_EXCESS = 8
"""A divisor this many times below the wanted extent is of no use: the cells would be too many and too small."""

FILL_BYTES = 32 << 20
"""Chunks that span several ranks' pieces are about this large."""

_MIN_FILL_BYTES = 4 << 20
_MERGED_SUBCHUNKS_ABOVE = 1 << 20
_MIN_MERGED_SUBCHUNK = 256 << 10


def default_min_piece_bytes(ranks: int) -> int:
    """Below how many bytes pieces of several ranks are merged into one chunk, where the caller does not say.

    An object store takes a fixed number of puts a second for all ranks together, while each rank that joins brings the
    same bandwidth for handing pieces over: so what a piece may cost grows with the ranks. The figures behind it are in
    ``docs/explanation/exchange.md``.
    """
    return min(ranks * (256 << 10), FILL_BYTES // 2)


def default_fill_bytes(total: int, ranks: int) -> int:
    """About how large merged chunks are, where the caller does not say: ``total`` is the bytes of all tensors.

    Four a rank or more, so that the ranks can be given equal parts, but none below 4 MiB.
    """
    return min(FILL_BYTES, max(total // (4 * ranks), _MIN_FILL_BYTES))


def choose_grid(
    shape: Ints,
    boxes: Sequence[Box],
    itemsize: int,
    *,
    max_chunk_bytes: int = MAX_CHUNK_BYTES,
    min_piece_bytes: int = 0,
    fill_bytes: int = FILL_BYTES,
    subchunks: Subchunks = "blocks",
) -> Grid:
    """The grid of a tensor whose pieces are these boxes (replicas once, empty ones left out).

    Every box is whole chunks if they fit a regular grid and have ``min_piece_bytes`` on average; otherwise chunks of
    about ``fill_bytes`` span several boxes.
    """
    aligned = fit_grid(shape, boxes, itemsize, max_chunk_bytes, subchunks)
    if aligned is not None and (len(boxes) < 2 or math.prod(shape) * itemsize >= min_piece_bytes * len(boxes)):
        return aligned
    return _merged_grid(shape, boxes, itemsize, min(fill_bytes, max_chunk_bytes), subchunks)


def _merged_grid(shape: Ints, boxes: Sequence[Box], itemsize: int, limit: int, subchunks: Subchunks) -> Grid:
    """Steps of the boxes' cuts, put together, last dimension first, while they stay within ``limit`` bytes."""
    steps = [_step(dim, n, boxes) or max(n, 1) for dim, n in enumerate(shape)]
    divided = math.prod(shape) * itemsize > _MERGED_SUBCHUNKS_ABOVE
    cells = [_wanted_cell(dim, step, boxes) for dim, step in enumerate(steps)] if divided else list(shape)
    chunk = list(steps)
    for dim in reversed(range(len(shape))):
        room = max(1, limit // (math.prod(chunk) * itemsize))
        chunk[dim] = _merged_extent(shape[dim], steps[dim], room, cells[dim])
    out = _divide(tuple(chunk), [True] * len(shape), itemsize, limit)
    return Grid(shape, out, _merged_subchunks(out, steps, cells, itemsize, subchunks))


def _wanted_cell(dim: int, step: int, boxes: Sequence[Box]) -> int:
    """The extent that subchunks of merged chunks should have: a step, or a quarter of a box where steps are tiny."""
    mean = sum(box.shape[dim] for box in boxes) // max(1, len(boxes))
    return step if step * _MAX_EXCESS >= mean else max(step, mean // 4)


def _merged_extent(n: int, step: int, room: int, cell: int) -> int:
    """How long merged chunks are along a dimension of n: at most ``room`` steps, and all alike."""
    full = -(-n // step)
    # Chunks of one size, instead of full ones and a small rest.
    count = -(-full // -(-full // room))
    if step < cell and count >= 128:
        # The boxes' cuts lie anywhere: a multiple of 64 has divisors that subchunks need.
        count = min(_round_up(count, 64), room // 64 * 64)
    extent = step * count
    if extent <= n:
        return extent
    # A little padding where subchunks would find no near divisor: a piece would be read with much else otherwise.
    return extent if (extent - n) * 16 <= n and 2 * _largest_divisor(n, cell) < cell else n


def _merged_subchunks(
    chunk: Ints, steps: Sequence[int], cells: Sequence[int], itemsize: int, subchunks: Subchunks
) -> Ints | None:
    """Subchunks like the pieces, so that who held a piece before reads little more than it again."""
    if math.prod(chunk) * itemsize <= _MERGED_SUBCHUNKS_ABOVE:
        return None
    sub = [_near(*extents) for extents in zip(chunk, steps, cells, strict=True)]
    if subchunks == "rows":
        sub[1:] = chunk[1:]
    for dim, extent in enumerate(sub):
        total = math.prod(sub) * itemsize
        if total > MAX_SUBCHUNK_BYTES:
            sub[dim] = _useful_divisor(extent, max(1, MAX_SUBCHUNK_BYTES * extent // total)) or extent
    for dim in reversed(range(len(chunk))):
        room = _MIN_MERGED_SUBCHUNK // (math.prod(sub) * itemsize)
        sub[dim] *= _largest_divisor(chunk[dim] // sub[dim], room)
    if len(chunk) > 1 and subchunks == "blocks":
        _cut(sub, len(chunk) - 1, max(64, chunk[-1] // 8), itemsize)
    return tuple(sub) if tuple(sub) != chunk else None


def _near(extent: int, step: int, cell: int) -> int:
    """A divisor of a chunk's extent near ``cell``, at a box's cuts if it can be; the extent where there is none."""
    if extent % step == 0:
        even = step * _largest_divisor(extent // step, cell // step)
        if even * _MAX_EXCESS >= cell:
            return even
    return _useful_divisor(extent, cell) or extent


def overlapping(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Two boxes that share elements, if any do."""
    if len(boxes) < 2:
        return None
    begin = np.array([box.offset for box in boxes], np.int64).reshape(len(boxes), -1)
    end = begin + np.array([box.shape for box in boxes], np.int64).reshape(len(boxes), -1)
    for number in range(1, len(boxes)):
        shared = (begin[:number] < end[number]) & (begin[number] < end[:number])
        hits = np.flatnonzero(shared.all(axis=1))
        if len(hits):
            return boxes[int(hits[0])], boxes[number]
    return None


def fit_grid(
    shape: Ints,
    boxes: Iterable[Box],
    itemsize: int,
    max_chunk_bytes: int = MAX_CHUNK_BYTES,
    subchunks: Subchunks = "blocks",
) -> Grid | None:
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
    return Grid(shape, chunk, subchunk_shape(shape, chunk, itemsize, subchunks))


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


@lru_cache(maxsize=4096)
def _divisors(n: int) -> tuple[int, ...]:
    """All divisors, ascending."""
    small = [k for k in range(1, math.isqrt(n) + 1) if n % k == 0]
    return tuple(sorted({*small, *(n // k for k in small)}))


def _largest_divisor(n: int, limit: int) -> int:
    """The largest divisor of n that is at most ``limit`` (at least 1)."""
    return max((divisor for divisor in _divisors(n) if divisor <= limit), default=1)


def _useful_divisor(n: int, wanted: int) -> int | None:
    """The largest divisor of n that is at most ``wanted``; None where that is far below."""
    best = _largest_divisor(n, wanted)
    return best if best * _MAX_EXCESS >= wanted else None


def subchunk_shape(shape: Ints, chunk: Ints, itemsize: int, subchunks: Subchunks = "blocks") -> Ints | None:
    """The subchunks of a chunk, or None for a chunk that is small or has no useful divisors.

    What other meshes read of a chunk is some of its columns, or fewer rows: so the last dimension is cut to an eighth
    of the array's width, then the first to a 64th of its height, then the others to an eighth, each as far as
    subchunks keep MIN_SUBCHUNK_BYTES. In storage the subchunks lie first dimension fastest, so that a column stripe is
    one range of bytes. With ``subchunks="rows"`` the first dimension alone is cut, and a band of rows is one piece of
    memory. Why these numbers: ``docs/explanation/subchunks.md``.
    """
    if math.prod(chunk) * itemsize <= SUBCHUNK_ABOVE:
        return None
    sub = list(chunk)
    last, columns = len(chunk) - 1, subchunks == "blocks"
    if last and columns:
        _cut(sub, last, max(64, shape[last] // 8), itemsize)
    _cut(sub, 0, max(1, shape[0] // 64) if last else MAX_SUBCHUNK_BYTES // itemsize, itemsize)
    if columns:
        for dim in range(1, last):
            _cut(sub, dim, max(1, shape[dim] // 8), itemsize)
    for dim, extent in enumerate(sub):
        total = math.prod(sub) * itemsize
        if total > MAX_SUBCHUNK_BYTES:
            sub[dim] = _useful_divisor(extent, max(1, MAX_SUBCHUNK_BYTES * extent // total)) or extent
    if MIN_SUBCHUNK_BYTES <= math.prod(sub) * itemsize <= ODD_SUBCHUNK_BYTES and tuple(sub) != chunk:
        return tuple(sub)
    # Rows that no useful number divides: columns may have one.
    return None if columns else subchunk_shape(shape, chunk, itemsize)


def _cut(sub: list[int], dim: int, wanted: int, itemsize: int) -> None:
    """Cut one dimension of subchunks to about ``wanted``, as far as they do not become too small."""
    rest = math.prod(sub) * itemsize // sub[dim]
    least = -(-MIN_SUBCHUNK_BYTES // rest)
    if wanted < least:
        # Rather the next larger divisor than too small a subchunk.
        sub[dim] = next(n for n in _divisors(sub[dim]) if n >= min(least, sub[dim]))
        return
    even = _useful_divisor(sub[dim], wanted)
    if even is not None and even >= least:
        sub[dim] = even
