"""Boxes and grids against numpy and against brute force."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from benchmarks.subchunk_rules import Cuts, ratio, tensor_parallel, two_by_two
from benchmarks.subchunk_rules import rows as rows_of
from zarrckpt._chunking import (
    MAX_CHUNK_BYTES,
    MAX_SUBCHUNK_BYTES,
    MIN_SUBCHUNK_BYTES,
    ODD_SUBCHUNK_BYTES,
    SUBCHUNK_ABOVE,
    SUBCHUNKS,
    Subchunks,
    fit_grid,
    subchunk_shape,
)
from zarrckpt._grid import Box, Grid, intersect, ravel, ravel_f, unravel_f

Ints = tuple[int, ...]


@st.composite
def boxes_in(draw: st.DrawFn, shape: Ints) -> Box:
    starts = tuple(draw(st.integers(0, n)) for n in shape)
    return Box(starts, tuple(draw(st.integers(0, n - start)) for n, start in zip(shape, starts, strict=True)))


@st.composite
def grids(draw: st.DrawFn) -> Grid:
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
    sub = tuple(draw(st.integers(1, 3)) for _ in shape)
    chunk = tuple(s * draw(st.integers(1, 3)) for s in sub)
    return Grid(shape, chunk, draw(st.sampled_from([None, sub])))


def cells(box: Box) -> set[Ints]:
    return set(itertools.product(*(range(o, o + n) for o, n in zip(*box, strict=True))))


@settings(deadline=None)
@given(st.data(), st.lists(st.integers(0, 6), max_size=3).map(tuple))
def test_intersect_is_the_shared_cells(data: st.DataObject, shape: Ints) -> None:
    one, other = data.draw(boxes_in(shape)), data.draw(boxes_in(shape))
    shared = intersect(one, other)
    assert (set() if shared is None else cells(shared)) == cells(one) & cells(other)


@settings(deadline=None)
@given(st.data(), grids())
def test_chunks_of_a_box(data: st.DataObject, grid: Grid) -> None:
    box = data.draw(boxes_in(grid.shape))
    every = list(itertools.product(*map(range, grid.counts)))
    assert len(every) == grid.num_chunks
    assert [grid.chunk_number(index) for index in every] == list(range(grid.num_chunks))
    assert list(grid.chunks_of(box)) == [index for index in every if cells(grid.chunk_box(index)) & cells(box)]


@settings(deadline=None)
@given(grids())
def test_chunks_cover_the_array_once(grid: Grid) -> None:
    times = np.zeros(grid.shape, int)
    for index in itertools.product(*map(range, grid.counts)):
        times[grid.chunk_box(index).slices()] += 1
    assert (times == 1).all()


@settings(deadline=None)
@given(st.data(), grids())
def test_subchunks_of_a_box(data: st.DataObject, grid: Grid) -> None:
    box = data.draw(boxes_in(grid.chunk_shape))
    sub = grid.subchunk_shape or grid.chunk_shape
    found = [
        ravel_f(cell, grid.sub_counts)
        for cell in itertools.product(*map(range, grid.sub_counts))
        if intersect(Box(tuple(i * s for i, s in zip(cell, sub, strict=True)), sub), box) and box.size
    ]
    assert grid.subchunk_places(box) == sorted(found)
    assert grid.num_subchunks == grid.num_chunks * math.prod(grid.sub_counts)


@settings(deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_ravel_is_numpy_s(counts: list[int], data: st.DataObject) -> None:
    index = tuple(data.draw(st.integers(0, n - 1)) for n in counts)
    assert ravel(index, counts) == np.ravel_multi_index(index, counts)
    assert ravel_f(index, counts) == np.ravel_multi_index(index, counts, order="F")
    assert unravel_f(ravel_f(index, counts), counts) == index


def torch_chunks(n: int, parts: int) -> list[tuple[int, int]]:
    """(offset, size) of ``torch.chunk``, which gives fewer parts where the last would be empty."""
    sizes = [len(part) for part in torch.arange(n).chunk(parts)]
    return list(zip([0, *itertools.accumulate(sizes)], sizes, strict=False))


@st.composite
def sharded(draw: st.DrawFn) -> tuple[Ints, list[Box]]:
    shape = tuple(draw(st.lists(st.integers(1, 5000), min_size=1, max_size=3)))
    parts = [torch_chunks(n, draw(st.integers(1, 9))) for n in shape]
    boxes = [Box(*map(tuple, zip(*dims, strict=True))) for dims in itertools.product(*parts)]
    return shape, draw(st.permutations(boxes))


def check_fit(grid: Grid, boxes: list[Box]) -> None:
    """Every box is a union of whole chunks, clipped at the array's end only; subchunks divide chunks."""
    for box in boxes:
        for offset, extent, n, chunk in zip(*box, grid.shape, grid.chunk_shape, strict=True):
            assert offset % chunk == 0
            assert (offset + extent) % chunk == 0 or offset + extent == n
    if grid.subchunk_shape is not None:
        assert all(c % s == 0 for c, s in zip(grid.chunk_shape, grid.subchunk_shape, strict=True))


@settings(deadline=None)
@given(sharded(), st.sampled_from([1, 2, 4, 8, 16]))
def test_torch_s_shards_are_one_chunk_each(case: tuple[Ints, list[Box]], itemsize: int) -> None:
    shape, boxes = case
    total = math.prod(shape) * itemsize
    grid = fit_grid(shape, boxes, itemsize, max_chunk_bytes=max(total, 1))
    assert grid is not None
    check_fit(grid, boxes)
    assert grid.num_chunks == len(boxes)
    assert {grid.chunk_box(index) for box in boxes for index in grid.chunks_of(box)} == set(boxes)


@settings(deadline=None)
@given(sharded(), st.sampled_from([1, 2, 4, 8, 16]), st.integers(4, 27))
def test_large_chunks_are_divided(case: tuple[Ints, list[Box]], itemsize: int, limit_bits: int) -> None:
    (shape, boxes), limit = case, 1 << limit_bits
    whole = fit_grid(shape, boxes, itemsize, max_chunk_bytes=1 << 62)
    grid = fit_grid(shape, boxes, itemsize, max_chunk_bytes=limit)
    assert whole is not None and grid is not None
    check_fit(grid, boxes)
    nbytes = math.prod(grid.chunk_shape) * itemsize
    if grid.chunk_shape != whole.chunk_shape:
        # Not far below the limit either, or there would be too many objects.
        assert nbytes * 16 >= limit
    if len(boxes) == 1:
        assert nbytes <= limit


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(1, 40_000), min_size=1, max_size=3).map(tuple),
    st.sampled_from([1, 2, 4, 8, 16]),
    st.sampled_from(SUBCHUNKS),
)
def test_subchunks_are_neither_large_nor_tiny(shape: Ints, itemsize: int, subchunks: Subchunks) -> None:
    grid = fit_grid(shape, [Box((0,) * len(shape), shape)], itemsize, subchunks=subchunks)
    assert grid is not None
    nbytes = math.prod(grid.chunk_shape) * itemsize
    assert nbytes <= MAX_CHUNK_BYTES
    if nbytes <= SUBCHUNK_ABOVE:
        assert grid.subchunk_shape is None
    elif grid.subchunk_shape is not None:
        sub = math.prod(grid.subchunk_shape) * itemsize
        assert MIN_SUBCHUNK_BYTES <= sub <= ODD_SUBCHUNK_BYTES
        check_fit(grid, [])


def rows(n: int, parts: int, columns: int) -> list[Box]:
    return [Box((offset, 0), (size, columns)) for offset, size in torch_chunks(n, parts)]


@pytest.mark.parametrize(
    ("shape", "boxes"),
    [
        # A vocabulary with one added token: 16001 rows are prime, and one chunk a row would be 32001 objects.
        ((32001, 4096), rows(32001, 2, 4096)),
        ((128259, 4096), rows(128259, 7, 4096)),
        ((50257, 4096), rows(50257, 4, 4096)),
        ((4096, 32001), [Box((0, 0), (4096, 16001)), Box((0, 16001), (4096, 16000))]),
        ((65536, 4099), [Box((0, 0), (65536, 4099))]),
    ],
)
@pytest.mark.parametrize("subchunks", SUBCHUNKS)
def test_awkward_sizes_make_neither_many_objects_nor_huge_subchunks(
    shape: Ints, boxes: list[Box], subchunks: Subchunks
) -> None:
    grid = fit_grid(shape, boxes, 4, subchunks=subchunks)
    assert grid is not None
    check_fit(grid, boxes)
    assert math.prod(grid.chunk_shape) * 4 <= MAX_CHUNK_BYTES
    assert grid.num_chunks <= 8 * max(len(boxes), math.prod(shape) * 4 / MAX_CHUNK_BYTES)
    assert grid.subchunk_shape is not None
    assert math.prod(grid.subchunk_shape) * 4 <= MAX_SUBCHUNK_BYTES


def test_a_prime_vector_stays_whole() -> None:
    boxes = [Box((0,), (100_000_007,)), Box((100_000_007,), (100_000_007,))]
    grid = fit_grid((200_000_014,), boxes, 4)
    assert grid is not None and grid.num_chunks == 2


@pytest.mark.parametrize(
    "cuts",
    [
        [0, 31, 52, 83, 100],
        [0, 500, 999, 1499, 2000],
    ],
)
def test_odd_grids_are_refused(cuts: list[int]) -> None:
    boxes = [Box((a, 0), (b - a, 4)) for a, b in itertools.pairwise(cuts)]
    assert fit_grid((cuts[-1], 4), boxes, 4) is None


@settings(deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=8), st.sampled_from([1, 4]))
def test_any_cut_fits_or_is_refused(sizes: list[int], itemsize: int) -> None:
    starts = [0, *itertools.accumulate(sizes)]
    boxes = [Box((start,), (size,)) for start, size in zip(starts, sizes, strict=False)]
    grid = fit_grid((starts[-1],), boxes, itemsize)
    if grid is not None:
        check_fit(grid, boxes)
        assert grid.num_chunks <= 4 * len(boxes)
    else:
        assert math.gcd(*starts[:-1]) < max(sizes)


@settings(deadline=None)
@given(st.lists(st.integers(0, 5), max_size=3).map(tuple))
def test_an_array_without_elements_has_no_chunks(shape: Ints) -> None:
    assume(0 in shape)
    grid = fit_grid(shape, [Box((0,) * len(shape), shape)], 4)
    assert grid is not None
    assert all(c >= 1 for c in grid.chunk_shape) and grid.num_chunks == grid.num_subchunks == 0


def test_a_scalar_is_one_chunk() -> None:
    grid = fit_grid((), [Box((), ())], 8)
    assert grid == Grid((), ()) and grid.num_chunks == 1 and list(grid.chunks_of(Box((), ()))) == [()]


def test_empty_shards_do_not_count() -> None:
    boxes = [Box((0,), (1,)), Box((1,), (1,)), Box((2,), (0,)), Box((2,), (0,))]
    assert fit_grid((2,), boxes, 4) == Grid((2,), (1,))


def test_columns_are_cut_to_an_eighth_of_the_width() -> None:
    """A column shard of eight then reads nothing but its columns."""
    assert subchunk_shape((4096, 8192), (4096, 8192), 4) == (64, 1024)


@settings(deadline=None)
@given(st.integers(1, 64), st.integers(1, 64), st.sampled_from([1, 2, 3]), st.sampled_from([1, 2, 4, 8]))
def test_bands_of_rows_are_pieces_of_the_chunk_s_memory(height: int, width: int, kernel: int, itemsize: int) -> None:
    chunk = (64 * height, 64 * width, kernel)
    sub = subchunk_shape(chunk, chunk, itemsize, "rows")
    if sub is not None:
        assert sub[1:] == chunk[1:] and chunk[0] % sub[0] == 0
        assert math.prod(sub) * itemsize <= MAX_SUBCHUNK_BYTES


def test_rows_without_a_useful_divisor_give_way_to_columns() -> None:
    assert subchunk_shape((32003, 1024), (32003, 1024), 4, "rows") == (32003, 32)


@pytest.mark.parametrize("itemsize", [4, 2])
@pytest.mark.parametrize(
    ("saved", "loaded", "most"),
    [
        (rows_of(8), rows_of(4), 1.05),
        (rows_of(8), rows_of(6), 1.2),
        (rows_of(8), tensor_parallel(8), 1.1),
        (tensor_parallel(8), rows_of(8), 1.1),
        (two_by_two, rows_of(4), 1.1),
        (tensor_parallel(8), rows_of(64), 1.5),
    ],
    ids=["8 to 4", "8 to 6", "rows to columns", "columns to rows", "2x2 to 4", "columns to 64 rows"],
)
def test_another_mesh_reads_little_more_than_it_needs(saved: Cuts, loaded: Cuts, most: float, itemsize: int) -> None:
    """The weights of a Llama 3 8B layer."""
    assert ratio(saved, loaded, itemsize)[0] <= most
