"""Which regular grid a tensor is stored in, from the boxes that the ranks hold: integers only.

Where the boxes are large and fit a regular grid, each becomes whole chunks, so that no byte moves between ranks. Where
they fit none, or are too small to deserve an object each, a chunk spans several of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np

from zarrckpt._format.grid import Box, Grid, Ints

MAX_CHUNK_BYTES = 128 << 20
"""One stream to an object store is slow, so larger chunks would make one rank wait for one connection."""

SUBCHUNK_ABOVE = 1 << 20
"""Chunks above this many bytes have subchunks, so that a partial read need not fetch all of them."""

SUBCHUNK_BYTES = 2 << 20
"""About how large subchunks are. Why: ``docs/explanation/subchunks.md``."""

USUAL_SUBCHUNK = (1 << 20, 4 << 20)
"""Between these numbers of bytes, where the extents allow it, if need be with a little padding."""

ANY_SUBCHUNK = (256 << 10, 16 << 20)
"""Between these where they do not, and a chunk's extent cannot be rounded up without moving bytes."""

_PADDING = 16
"""A chunk's extent is rounded up by at most its 16th part."""

_ODD_GRID_MIN_CHUNK = 1 << 20

_MAX_EXCESS = 8
"""A divisor this many times below the wanted extent is of no use: the cells would be too many and too small."""

FILL_BYTES = 32 << 20
"""Chunks that span several ranks' pieces are about this large."""

_MIN_FILL_BYTES = 4 << 20

MOST_PIECES = 1024
"""A chunk spans about so many pieces at most: a connection to the holder of each is needed to put it together."""


def default_min_piece_bytes(ranks: int) -> int:
    """Below how many bytes pieces of several ranks are merged into one chunk, where the caller does not say.

    An object store takes a fixed number of puts a second for all ranks together, while each rank that joins brings the
    same bandwidth for handing pieces over: so what a piece may cost grows with the ranks. The figures behind it are in
    ``docs/explanation/exchange.md``.
    """
    return min(ranks * (256 << 10), FILL_BYTES // 2)


def default_fill_bytes(total: int, ranks: int) -> int:
    """About how large merged chunks are, where the caller does not say: ``total`` is the bytes of all tensors.

    Four per rank or more, so that the ranks can be given equal parts, and fewer where these would be below 4 MiB. An
    8th larger than just these: where there were a few chunks more, some ranks would write one more than the others.
    """
    mean = total // ranks
    if mean >= 4 * FILL_BYTES:
        return FILL_BYTES
    part = mean * 9 // 8
    count = min(4, max(1, part // _MIN_FILL_BYTES))
    return min(FILL_BYTES, max(part // count, _MIN_FILL_BYTES))


def choose_grid(
    shape: Ints,
    boxes: Sequence[Box],
    itemsize: int,
    *,
    max_chunk_bytes: int = MAX_CHUNK_BYTES,
    min_piece_bytes: int = 0,
    fill_bytes: int = FILL_BYTES,
) -> Grid:
    """The grid of a tensor whose pieces are these boxes (replicas once, empty ones left out).

    Every box is whole chunks if they fit a regular grid and have ``min_piece_bytes`` on average; otherwise chunks of
    about ``fill_bytes`` span several boxes. A box may be whole chunks but for some rows, where its own extent has no
    divisor that subchunks need.
    """
    steps = [_step(dim, n, boxes) for dim, n in enumerate(shape)]
    free = [step is None for step in steps]
    least = tuple(step or max(n, 1) for step, n in zip(steps, shape, strict=True))
    alone = len(boxes) < 2 or math.prod(shape) * itemsize >= min_piece_bytes * len(boxes)
    if alone and _fits(shape, least, len(boxes), itemsize):
        chunk = _divide(least, free, itemsize, max_chunk_bytes)
        return _with_subchunks(shape, chunk, chunk, free, itemsize)
    limit = min(fill_bytes, max_chunk_bytes)
    free = [True] * len(shape)
    chunk = _divide(_merge(shape, least, itemsize, limit, len(boxes)), free, itemsize, limit)
    return _with_subchunks(shape, chunk, least, free, itemsize)


def _step(dim: int, n: int, boxes: Iterable[Box]) -> int | None:
    """The largest step of which every inner cut along a dimension is a multiple; None where nothing is cut.

    ``torch.chunk`` cuts a dimension of n in w into steps of ceil(n / w): that is a regular grid.
    """
    cuts = {c for b in boxes for c in (b.offset[dim], b.offset[dim] + b.shape[dim]) if 0 < c < n}
    return math.gcd(*cuts) if cuts else None


def _fits(shape: Ints, chunk: Ints, boxes: int, itemsize: int) -> bool:
    """Whether a grid that has all cuts of the boxes is of use: rows cut at 0, 3, 5, 8 would give one object a row."""
    return Grid(shape, chunk).num_chunks <= 4 * max(boxes, 1) or math.prod(chunk) * itemsize >= _ODD_GRID_MIN_CHUNK


def _merge(shape: Ints, steps: Ints, itemsize: int, limit: int, boxes: int) -> Ints:
    """Steps of the boxes' cuts, put together, last dimension first, while they stay within ``limit`` bytes."""
    chunk = list(steps)
    # There may be many steps to a box: of cuts at odd places.
    most = max(1, MOST_PIECES * math.prod(-(-n // step) for n, step in zip(shape, steps, strict=True)) // max(boxes, 1))
    for dim in reversed(range(len(shape))):
        full = -(-shape[dim] // steps[dim])
        room = max(1, min(limit // (math.prod(chunk) * itemsize), most))
        # Chunks of one size, instead of full ones and a small rest.
        count = -(-full // -(-full // room)) if full else 1
        chunk[dim] = min(steps[dim] * count, max(shape[dim], 1))
        most //= count
    return tuple(chunk)


def _divide(chunk: Ints, free: Sequence[bool], itemsize: int, limit: int) -> Ints:
    """Divide a chunk, first dimension first, until it is at most ``limit`` bytes: into equal parts, or nearly so.

    By a divisor where one is near, and along a dimension that boxes cut (not ``free``) also where one is not so near:
    no byte moves then.
    """
    out = list(chunk)
    for dim, extent in enumerate(chunk):
        total = math.prod(out) * itemsize
        if total <= limit:
            break
        wanted = max(1, limit * extent // total)
        even = _largest_divisor(extent, wanted)
        near = even * (2 if free[dim] else _MAX_EXCESS) >= wanted
        out[dim] = even if near else -(-extent // -(-extent // wanted))
    return tuple(out)


@lru_cache(maxsize=4096)
def _largest_divisor(n: int, limit: int) -> int:
    """The largest divisor of n that is at most ``limit`` (at least 1)."""
    small = [k for k in range(1, math.isqrt(n) + 1) if n % k == 0]
    return max(divisor for k in small for divisor in (k, n // k) if divisor <= limit)


def _with_subchunks(shape: Ints, chunk: Ints, steps: Ints, free: Sequence[bool], itemsize: int) -> Grid:
    """A grid with subchunks, its chunks a little longer along the dimension that these cut, where it must be.

    Where nothing cuts the array along that dimension (``free``), that costs nothing but padding. Else some rows of
    each piece move to the owner of the next chunk. ``steps`` are those of the boxes' cuts.
    """
    nbytes = math.prod(chunk) * itemsize
    if nbytes <= SUBCHUNK_ABOVE:
        return Grid(shape, chunk)
    dim = _cut_dimension(chunk, itemsize)
    step = min(steps[dim], chunk[dim])
    found = _subchunks(chunk, itemsize, USUAL_SUBCHUNK, step)
    if found is None:
        exact = _subchunks(chunk, itemsize, ANY_SUBCHUNK, step)
        rounded = _subchunks(chunk, itemsize, USUAL_SUBCHUNK, step, padded=True)
        # Little is won by dividing what is small, and pieces would have to move for it.
        worth_moving = rounded if nbytes > USUAL_SUBCHUNK[1] else None
        found = rounded or exact if free[dim] else exact or worth_moving
    if found is None:
        return Grid(shape, chunk)
    count, sub = found
    return Grid(shape, (*chunk[:dim], sub[dim] * count, *chunk[dim + 1 :]), sub)


def subchunk_shape(chunk: Ints, itemsize: int) -> Ints | None:
    """The subchunks of a chunk, or None for a chunk that is small, or has no divisors for subchunks of such bytes.

    They are runs of elements that follow each other in the chunk: rows of all dimensions but those before the first
    one whose rows are short enough. What is cut so is written from the tensor's memory and read into it without a copy.
    """
    if math.prod(chunk) * itemsize <= SUBCHUNK_ABOVE:
        return None
    step = chunk[_cut_dimension(chunk, itemsize)]
    found = _subchunks(chunk, itemsize, USUAL_SUBCHUNK, step) or _subchunks(chunk, itemsize, ANY_SUBCHUNK, step)
    return None if found is None else found[1]


@lru_cache(maxsize=4096)
def _subchunks(
    chunk: Ints, itemsize: int, limits: tuple[int, int], step: int, *, padded: bool = False
) -> tuple[int, Ints] | None:
    """Into how many subchunks a chunk is cut along its cut dimension, and their shape.

    The least padding counts; then whether pieces consist of them, or they of pieces, or neither; then how near they are
    to SUBCHUNK_BYTES.
    """
    dim = _cut_dimension(chunk, itemsize)
    extent, row = chunk[dim], math.prod(chunk[dim + 1 :]) * itemsize
    found = []
    # At least two in the whole chunk, and at least one in a row of the cut dimension.
    for count in range(1 if math.prod(chunk[:dim]) > 1 else 2, extent * row // limits[0] + 1):
        rows = -(-extent // count)
        padding, size = rows * count - extent, rows * row
        if limits[0] <= size <= limits[1] and (padding * _PADDING <= extent if padded else padding == 0):
            across = 0 if step % rows == 0 else 1 if rows % step == 0 else 2
            found.append((padding, across, _distance(size), count, rows))
    if not found:
        return None
    *_, count, rows = min(found)
    return count, (*(1,) * dim, rows, *chunk[dim + 1 :])


def _cut_dimension(chunk: Ints, itemsize: int) -> int:
    """The first dimension whose rows have no more bytes than a subchunk may have."""
    rows = (math.prod(chunk[dim + 1 :]) * itemsize for dim in range(len(chunk)))
    return next(dim for dim, row in enumerate(rows) if row <= USUAL_SUBCHUNK[1])


def _distance(size: int) -> int:
    """How far a size is from SUBCHUNK_BYTES, as a ratio: in integers, so that all ranks find the same."""
    return (max(size, SUBCHUNK_BYTES) << 10) // min(size, SUBCHUNK_BYTES)


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
