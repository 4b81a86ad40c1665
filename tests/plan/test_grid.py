"""Boxes and grids against numpy and against brute force."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from harness.internals import Box, Grid, intersect, is_consecutive, ravel, unravel
from harness.subchunk_shapes import subchunks_of
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from zarrckpt._plan.chunking import (
    ANY_SUBCHUNK,
    MAX_CHUNK_BYTES,
    SUBCHUNK_ABOVE,
    USUAL_SUBCHUNK,
    choose_grid,
    subchunk_shape,
)

Ints = tuple[int, ...]


@st.composite
def boxes_in(draw: st.DrawFn, shape: Ints) -> Box:
    starts = tuple(draw(st.integers(0, n)) for n in shape)
    return Box(starts, tuple(draw(st.integers(0, n - start)) for n, start in zip(shape, starts, strict=True)))


@st.composite
def grids(draw: st.DrawFn) -> Grid:
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
    chunk = tuple(draw(st.integers(1, 9)) for _ in shape)
    return Grid(shape, chunk, draw(subchunks_of(chunk)))


def cells(box: Box) -> set[Ints]:
    return set(itertools.product(*(range(o, o + n) for o, n in zip(*box, strict=True))))


@given(st.data(), st.lists(st.integers(0, 6), max_size=3).map(tuple))
def test_intersect_returns_the_shared_cells(data: st.DataObject, shape: Ints) -> None:
    one, other = data.draw(boxes_in(shape)), data.draw(boxes_in(shape))
    shared = intersect(one, other)
    assert (set() if shared is None else cells(shared)) == cells(one) & cells(other)


@given(st.data(), grids())
def test_chunks_of_a_box(data: st.DataObject, grid: Grid) -> None:
    box = data.draw(boxes_in(grid.shape))
    every = list(itertools.product(*map(range, grid.counts)))
    assert len(every) == grid.num_chunks
    assert [grid.chunk_number(index) for index in every] == list(range(grid.num_chunks))
    assert list(grid.chunks_of(box)) == [index for index in every if cells(grid.chunk_box(index)) & cells(box)]


@given(grids())
def test_chunks_cover_the_array_once(grid: Grid) -> None:
    times = np.zeros(grid.shape, int)
    for index in itertools.product(*map(range, grid.counts)):
        times[grid.chunk_box(index).slices()] += 1
    assert (times == 1).all()


@given(st.data(), grids())
def test_subchunks_of_a_box(data: st.DataObject, grid: Grid) -> None:
    box = data.draw(boxes_in(grid.chunk_shape))
    numbers = range(grid.subchunks_per_chunk)
    found = [number for number in numbers if intersect(grid.subchunk_box(number), box) and box.size]
    assert grid.subchunks_of(box) == found
    assert grid.num_subchunks == grid.num_chunks * len(numbers)


@given(grids())
def test_subchunks_are_consecutive_elements_of_a_chunk(grid: Grid) -> None:
    assert grid.subchunk_shape is None or is_consecutive(grid.chunk_shape, grid.subchunk_shape)
    elements = np.arange(math.prod(grid.chunk_shape)).reshape(grid.chunk_shape)
    runs = [elements[grid.subchunk_box(number).slices()].reshape(-1) for number in range(grid.subchunks_per_chunk)]
    assert np.concatenate(runs).tolist() == list(range(elements.size))


@given(st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple), st.data())
def test_consecutive_elements_are_recognised(chunk: Ints, data: st.DataObject) -> None:
    sub = tuple(data.draw(st.sampled_from([k for k in range(1, n + 1) if n % k == 0])) for n in chunk)
    elements = np.arange(math.prod(chunk)).reshape(chunk)
    first = elements[tuple(slice(0, k) for k in sub)].reshape(-1)
    assert is_consecutive(chunk, sub) == (first.tolist() == list(range(first.size)))


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_ravel_equals_numpys(counts: list[int], data: st.DataObject) -> None:
    index = tuple(data.draw(st.integers(0, n - 1)) for n in counts)
    assert ravel(index, counts) == np.ravel_multi_index(index, counts)
    assert unravel(ravel(index, counts), counts) == index


def torch_chunks(n: int, parts: int) -> list[tuple[int, int]]:
    """Return (offset, size) of ``torch.chunk``, which gives fewer parts if the last would be empty."""
    sizes = [len(part) for part in torch.arange(n).chunk(parts)]
    return list(zip([0, *itertools.accumulate(sizes)], sizes, strict=False))


@st.composite
def sharded(draw: st.DrawFn) -> tuple[Ints, list[Box]]:
    shape = tuple(draw(st.lists(st.integers(1, 5000), min_size=1, max_size=3)))
    parts = [torch_chunks(n, draw(st.integers(1, 9))) for n in shape]
    boxes = [Box(*map(tuple, zip(*dims, strict=True))) for dims in itertools.product(*parts)]
    return shape, draw(st.permutations(boxes))


def check_cover(grid: Grid, itemsize: int) -> None:
    """Check that subchunks are runs of sensible sizes that divide chunks, with little padding beyond the array."""
    nbytes = math.prod(grid.chunk_shape) * itemsize
    if grid.subchunk_shape is None:
        return
    assert nbytes > SUBCHUNK_ABOVE
    assert all(c % s == 0 for c, s in zip(grid.chunk_shape, grid.subchunk_shape, strict=True))
    assert is_consecutive(grid.chunk_shape, grid.subchunk_shape) and grid.subchunks_per_chunk > 1
    assert ANY_SUBCHUNK[0] <= math.prod(grid.subchunk_shape) * itemsize <= ANY_SUBCHUNK[1]


def misplaced(grid: Grid, boxes: list[Box]) -> int:
    """Return the maximum distance of a box's edges from a chunk's, in elements along a dimension."""
    edges = (
        (edge, chunk)
        for box in boxes
        for offset, extent, n, chunk in zip(*box, grid.shape, grid.chunk_shape, strict=True)
        for edge in (offset, offset + extent)
        if edge < n
    )
    return max((min(edge % chunk, -edge % chunk) for edge, chunk in edges), default=0)


def check_fit(grid: Grid, boxes: list[Box]) -> None:
    """Check that every box is a union of whole chunks, clipped at the array's end only."""
    assert misplaced(grid, boxes) == 0


@given(sharded(), st.sampled_from([1, 2, 4, 8, 16]))
def test_torchs_shards_are_one_chunk_each(case: tuple[Ints, list[Box]], itemsize: int) -> None:
    """Except if their extents divide into no subchunks."""
    shape, boxes = case
    total = math.prod(shape) * itemsize
    grid = choose_grid(shape, boxes, itemsize, max_chunk_bytes=max(total, 1))
    check_cover(grid, itemsize)
    step = tuple(max(box.shape[dim] for box in boxes) for dim in range(len(shape)))
    if math.prod(step) * itemsize <= USUAL_SUBCHUNK[1]:
        # So small ones keep their extents along the dimensions that are cut.
        assert all(c == s or s == n for c, s, n in zip(grid.chunk_shape, step, shape, strict=True))
    assert all(s <= c <= s + s // 16 for c, s in zip(grid.chunk_shape, step, strict=True))
    assert math.prod(grid.chunk_shape) <= math.prod(step) * 17 / 16
    if grid.chunk_shape == step:
        check_fit(grid, boxes)
        assert {grid.chunk_box(index) for box in boxes for index in grid.chunks_of(box)} == set(boxes)


@given(sharded(), st.sampled_from([1, 2, 4, 8, 16]), st.integers(4, 27))
def test_large_chunks_are_divided(case: tuple[Ints, list[Box]], itemsize: int, limit_bits: int) -> None:
    (shape, boxes), limit = case, 1 << limit_bits
    step = tuple(max(box.shape[dim] for box in boxes) for dim in range(len(shape)))
    grid = choose_grid(shape, boxes, itemsize, max_chunk_bytes=limit)
    check_cover(grid, itemsize)
    nbytes = math.prod(grid.chunk_shape) * itemsize
    if math.prod(step) * itemsize > limit:
        # Not far below the limit either, or there would be too many objects.
        assert nbytes * 16 >= limit
    # Rounded up for subchunks.
    assert nbytes <= max(limit, math.prod(step) * itemsize) * 17 / 16
    if len(boxes) == 1:
        assert nbytes <= limit * 17 / 16


@settings(max_examples=120)
@given(st.lists(st.integers(1, 40_000), min_size=1, max_size=3).map(tuple), st.sampled_from([1, 2, 4, 8, 16]))
def test_an_uncut_array_has_usual_subchunks(shape: Ints, itemsize: int) -> None:
    grid = choose_grid(shape, [Box((0,) * len(shape), shape)], itemsize)
    check_cover(grid, itemsize)
    nbytes = math.prod(grid.chunk_shape) * itemsize
    assert nbytes <= MAX_CHUNK_BYTES * 17 / 16
    for n, chunk, count in zip(shape, grid.chunk_shape, grid.counts, strict=True):
        assert (chunk * count - n) * 16 <= n + 16 * count, "padding, and what equal parts round up"
    if nbytes > 16 << 20:
        assert grid.subchunk_shape is not None
        sub = math.prod(grid.subchunk_shape) * itemsize
        assert USUAL_SUBCHUNK[0] <= sub <= USUAL_SUBCHUNK[1]


def rows(n: int, parts: int, columns: int) -> list[Box]:
    return [Box((offset, 0), (size, columns)) for offset, size in torch_chunks(n, parts)]


@pytest.mark.parametrize(
    ("shape", "boxes"),
    [
        # A vocabulary with one added token: 16001 rows are prime. One chunk per row would be 32001 objects.
        ((32001, 4096), rows(32001, 2, 4096)),
        ((128259, 4096), rows(128259, 7, 4096)),
        ((50257, 4096), rows(50257, 4, 4096)),
        ((4096, 32001), [Box((0, 0), (4096, 16001)), Box((0, 16001), (4096, 16000))]),
        ((65536, 4099), [Box((0, 0), (65536, 4099))]),
        # GPT-2's on six ranks: 8377 rows each, a prime.
        ((50257, 768), rows(50257, 6, 768)),
        ((51866, 1280), rows(51866, 4, 1280)),
        # A vector of a prime length for each rank.
        ((200_000_014,), [Box((0,), (100_000_007,)), Box((100_000_007,), (100_000_007,))]),
    ],
)
def test_awkward_sizes_need_few_objects_and_move_little(shape: Ints, boxes: list[Box]) -> None:
    grid = choose_grid(shape, boxes, 4)
    check_cover(grid, 4)
    assert math.prod(grid.chunk_shape) * 4 <= MAX_CHUNK_BYTES * 17 / 16
    assert grid.num_chunks <= 8 * max(len(boxes), math.prod(shape) * 4 / MAX_CHUNK_BYTES)
    assert grid.subchunk_shape is not None
    # At most 1/50 of the longest extent moves to the owner of the next chunk.
    assert misplaced(grid, boxes) * 50 <= max(max(box.shape) for box in boxes)


@pytest.mark.parametrize(
    "cuts",
    [
        [0, 31, 52, 83, 100],
        [0, 500, 999, 1499, 2000],
    ],
)
def test_oddly_cut_rows_share_objects(cuts: list[int]) -> None:
    boxes = [Box((a, 0), (b - a, 4)) for a, b in itertools.pairwise(cuts)]
    assert choose_grid((cuts[-1], 4), boxes, 4).num_chunks == 1


@given(st.lists(st.integers(1, 60), min_size=1, max_size=8), st.sampled_from([1, 4]))
def test_any_cut_has_few_chunks(sizes: list[int], itemsize: int) -> None:
    starts = [0, *itertools.accumulate(sizes)]
    boxes = [Box((start,), (size,)) for start, size in zip(starts, sizes, strict=False)]
    assert choose_grid((starts[-1],), boxes, itemsize).num_chunks <= 4 * len(boxes)


@given(st.lists(st.integers(0, 5), max_size=3).map(tuple))
def test_an_array_without_elements_has_no_chunks(shape: Ints) -> None:
    assume(0 in shape)
    grid = choose_grid(shape, [], 4)
    assert all(c >= 1 for c in grid.chunk_shape) and grid.num_chunks == grid.num_subchunks == 0


def test_a_scalar_is_one_chunk() -> None:
    grid = choose_grid((), [Box((), ())], 8)
    assert grid == Grid((), ()) and grid.num_chunks == 1 and list(grid.chunks_of(Box((), ()))) == [()]


@settings(max_examples=120)
@given(st.lists(st.integers(1, 3000), min_size=1, max_size=4).map(tuple), st.sampled_from([1, 2, 4, 8, 16]))
def test_a_given_chunk_keeps_its_shape(chunk: Ints, itemsize: int) -> None:
    """A copy with ``chunks=`` has these chunks exactly."""
    check_cover(Grid(chunk, chunk, subchunk_shape(chunk, itemsize)), itemsize)
