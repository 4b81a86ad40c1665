"""Choose the chunk grid of a tensor from the boxes that the ranks hold, with integers only.

If the boxes are large and fit a regular grid, each box becomes one or more whole chunks, and no byte moves between
ranks. If they fit no regular grid, or are too small for one object each, a chunk spans several boxes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache

from zarrckpt._format.grid import Box, Grid, Ints

MAX_CHUNK_BYTES = 128 << 20
"""Largest chunk by default. One connection to an object store is slow, so a rank should write several chunks."""

SUBCHUNK_ABOVE = 1 << 20
"""Chunks above this many bytes have subchunks, so that a partial read does not fetch the whole chunk."""

SUBCHUNK_BYTES = 2 << 20
"""Preferred size of a subchunk. ``docs/explanation/chunks.md`` gives the reasons."""

USUAL_SUBCHUNK = (1 << 20, 4 << 20)
"""Smallest and largest size of a subchunk in bytes, if the extents allow it, with a little padding if necessary."""

ANY_SUBCHUNK = (256 << 10, 16 << 20)
"""The same limits if the extents do not allow it and rounding a chunk's extent up would move bytes between ranks."""

_PADDING = 16
"""A chunk's extent is rounded up by at most 1/16."""

_ODD_GRID_MIN_CHUNK = 1 << 20

_MAX_EXCESS = 8
"""A divisor more than this factor below the wanted extent is not used: it would give too many small chunks."""

FILL_BYTES = 32 << 20
"""Largest default size of chunks that span pieces of several ranks."""

_MIN_FILL_BYTES = 4 << 20

MAX_PIECES = 1024
"""Approximate maximum number of pieces in a chunk. The owner needs a connection to the holder of each piece."""


def default_min_piece_bytes(ranks: int) -> int:
    """Return the size in bytes below which pieces of several ranks are merged into one chunk by default.

    It grows with the number of ranks: an object store takes a fixed number of puts per second from all ranks together,
    but each rank adds bandwidth for sending pieces. ``docs/explanation/chunks.md`` has the reasons.
    """
    return min(ranks * (256 << 10), FILL_BYTES // 2)


def default_fill_bytes(total: int, ranks: int) -> int:
    """Return the default size in bytes of merged chunks. ``total`` is the number of bytes of all tensors.

    There are at least four chunks per rank, so that ranks can write equal amounts, and fewer if chunks would be smaller
    than 4 MiB. The size is 1/8 above the exact quotient. Otherwise a few extra chunks would remain, and some ranks
    would write one chunk more than the others.
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
    """Return the grid of a tensor that consists of these boxes (each replicated box once, no empty boxes).

    Every box is stored as whole chunks if the boxes fit a regular grid and have at least ``min_piece_bytes`` on
    average. Otherwise chunks of about ``fill_bytes`` span several boxes. If a box's extent has no divisor that suits
    subchunks, some of its rows go into the neighbouring chunk.
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
    """Return the largest common divisor of all inner cuts along a dimension, or None if no box cuts it.

    ``torch.chunk`` cuts a dimension of n into w steps of ceil(n / w), which is a regular grid.
    """
    cuts = {c for b in boxes for c in (b.offset[dim], b.offset[dim] + b.shape[dim]) if 0 < c < n}
    return math.gcd(*cuts) if cuts else None


def _fits(shape: Ints, chunk: Ints, boxes: int, itemsize: int) -> bool:
    """Whether a grid with all cuts of the boxes has few enough chunks. Cuts at 0, 3, 5, 8 give one chunk per row."""
    return Grid(shape, chunk).num_chunks <= 4 * max(boxes, 1) or math.prod(chunk) * itemsize >= _ODD_GRID_MIN_CHUNK


def _merge(shape: Ints, steps: Ints, itemsize: int, limit: int, boxes: int) -> Ints:
    """Return a chunk shape of several steps, merged from the last dimension on, of at most ``limit`` bytes."""
    chunk = list(steps)
    # Irregular cuts can divide one box into many steps.
    most = max(1, MAX_PIECES * math.prod(-(-n // step) for n, step in zip(shape, steps, strict=True)) // max(boxes, 1))
    for dim in reversed(range(len(shape))):
        full = -(-shape[dim] // steps[dim])
        fitting = max(1, min(limit // (math.prod(chunk) * itemsize), most))
        # Chunks of equal size instead of full chunks and a small last one.
        count = -(-full // -(-full // fitting)) if full else 1
        chunk[dim] = min(steps[dim] * count, max(shape[dim], 1))
        most //= count
    return tuple(chunk)


def _divide(chunk: Ints, free: Sequence[bool], itemsize: int, limit: int) -> Ints:
    """Divide a chunk into nearly equal parts of at most ``limit`` bytes, beginning with the first dimension.

    An extent is divided by a divisor if a suitable one is near. Along a dimension that boxes cut (not ``free``), a
    more distant divisor is accepted too, because then no byte moves between ranks.
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
    """Return the largest divisor of n that is at most ``limit``, which is at least 1."""
    small = [k for k in range(1, math.isqrt(n) + 1) if n % k == 0]
    return max(divisor for k in small for divisor in (k, n // k) if divisor <= limit)


def _with_subchunks(shape: Ints, chunk: Ints, steps: Ints, free: Sequence[bool], itemsize: int) -> Grid:
    """Return a grid with subchunks. Its chunks can be a little longer along the dimension that subchunks cut.

    If no box cuts the array along that dimension (``free``), longer chunks cost only padding. Otherwise some rows of
    each piece move to the owner of another chunk. ``steps`` are the distances between the cuts of the boxes.
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
        # Subchunks of a small chunk save little, and pieces would have to move for them.
        worth_moving = rounded if nbytes > USUAL_SUBCHUNK[1] else None
        found = rounded or exact if free[dim] else exact or worth_moving
    if found is None:
        return Grid(shape, chunk)
    count, sub = found
    return Grid(shape, (*chunk[:dim], sub[dim] * count, *chunk[dim + 1 :]), sub)


def subchunk_shape(chunk: Ints, itemsize: int) -> Ints | None:
    """Return the shape of a chunk's subchunks, or None if the chunk is small or no divisor gives a suitable size.

    The elements of a subchunk are contiguous in the chunk. So subchunks are written from the tensor's memory, and read
    into it, without a copy.
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
    """Return the number of subchunks along the dimension that they cut, and their shape; None if there is none.

    The choice minimises, in this order: the padding; the subchunks that cross the border of a piece; the distance from
    SUBCHUNK_BYTES.
    """
    dim = _cut_dimension(chunk, itemsize)
    extent, row = chunk[dim], math.prod(chunk[dim + 1 :]) * itemsize
    found = []
    # A chunk has at least two subchunks, and at least one per index of the dimensions before the cut one.
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
    """Return the first dimension whose rows are at most as large as a subchunk may be."""
    rows = (math.prod(chunk[dim + 1 :]) * itemsize for dim in range(len(chunk)))
    return next(dim for dim, row in enumerate(rows) if row <= USUAL_SUBCHUNK[1])


def _distance(size: int) -> int:
    """Return the ratio of a size and SUBCHUNK_BYTES, as an integer so that all ranks compute the same."""
    return (max(size, SUBCHUNK_BYTES) << 10) // min(size, SUBCHUNK_BYTES)
