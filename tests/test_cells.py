"""Boxes of subchunks: how a run in storage is cut into them, and their elements in the array's order."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zarrckpt import _cells
from zarrckpt._grid import Box, Ints


@dataclass(frozen=True)
class Case:
    """A chunk, some of its subchunks in storage order, and how many of them a block may have."""

    counts: Ints
    sub: Ints
    first: int
    count: int
    longest: int

    @property
    def blocks(self) -> tuple[_cells.CellBlock, ...]:
        return _cells.blocks_of(self.counts, self.sub, self.first, self.count, self.longest)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    counts = tuple(draw(st.lists(st.integers(1, 4), max_size=4)))
    sub = tuple(draw(st.integers(1, 3)) for _ in counts)
    first = draw(st.integers(0, math.prod(counts) - 1))
    count = draw(st.integers(1, math.prod(counts) - first))
    return Case(counts, sub, first, count, draw(st.integers(1, 40)))


def stored(case: Case) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """A chunk's elements, each with its own number, and all its subchunks in storage order."""
    shape = tuple(n * m for n, m in zip(case.counts, case.sub, strict=True))
    chunk = np.arange(math.prod(shape)).reshape(shape)
    indices = [index[::-1] for index in np.ndindex(*reversed(case.counts))]
    parts = [tuple(slice(i * n, i * n + n) for i, n in zip(index, case.sub, strict=True)) for index in indices]
    return chunk, np.stack([chunk[part] for part in parts])


@given(cases())
def test_blocks_are_a_run_s_subchunks_in_order(case: Case) -> None:
    chunk, cells = stored(case)
    places = [place for block in case.blocks for place in range(block.place, block.place + block.size)]
    assert places == [*range(case.first, case.first + case.count)]
    numbers = np.arange(math.prod(case.counts)).reshape(case.counts[::-1]).transpose()
    for block in case.blocks:
        assert block.size == math.prod(block.counts) <= case.longest
        assert numbers[block.cells].transpose().reshape(-1).tolist() == [*range(block.place, block.place + block.size)]
        own = cells[block.place : block.place + block.size]
        assert set(chunk[block.region].reshape(-1).tolist()) == set(own.reshape(-1).tolist())
        assert chunk[block.region].shape == block.box.shape


@given(cases())
def test_blocks_by_rows_are_all_subchunks_in_the_array_s_order(case: Case) -> None:
    blocks = _cells.blocks_by_rows(case.counts, case.sub, case.longest)
    numbers = np.arange(math.prod(case.counts)).reshape(case.counts)
    found = [numbers[block.cells].reshape(-1).tolist() for block in blocks]
    assert [*itertools.chain(*found)] == [*range(numbers.size)]
    for block, own in zip(blocks, found, strict=True):
        assert block.size == math.prod(block.counts) == len(own) <= case.longest
        assert block == _cells.block_at(case.counts, case.sub, block.place, block.counts)


@given(cases(), st.data())
def test_a_part_of_a_block_is_numpy_s_slice(case: Case, data: st.DataObject) -> None:
    chunk, cells = stored(case)
    for block in case.blocks:
        ends = [sorted(data.draw(st.lists(st.integers(0, n), min_size=2, max_size=2))) for n in block.box.shape]
        inside = Box(tuple(begin for begin, _ in ends), tuple(end - begin for begin, end in ends))
        out = np.full(inside.shape, -1)
        # As rows of memory in which checksums lie in between.
        gaps = np.zeros((block.size, cells[0].size + 1), cells.dtype)
        gaps[:, :-1] = cells[block.place : block.place + block.size].reshape(block.size, -1)
        own = gaps[:, :-1].reshape(block.size, *case.sub)
        _cells.copy_part(own, block.counts, inside, out)
        assert out.tolist() == chunk[block.region][(*inside.slices(), ...)].tolist()


@pytest.mark.parametrize(
    ("counts", "longest", "blocks"),
    [
        ((2, 8), 16, [(2, 8)]),
        ((2, 8), 7, [(2, 3), (2, 3), (2, 2)]),
        ((8, 8), 7, [(4, 1)] * 16),
        ((8, 4), 17, [(8, 2)] * 2),
        ((3, 2, 5), 12, [(3, 2, 2), (3, 2, 2), (3, 2, 1)]),
    ],
)
def test_blocks_are_as_large_as_may_be_and_alike(counts: Ints, longest: int, blocks: list[Ints]) -> None:
    sub = tuple(1 for _ in counts)
    found = [block.counts for block in _cells.blocks_of(counts, sub, 0, math.prod(counts), longest)]
    assert found == blocks
    found = [block.counts[::-1] for block in _cells.blocks_by_rows(counts[::-1], sub, longest)]
    assert found == blocks


def test_many_dimensions() -> None:
    # numpy has 64, fewer than one for each of the array and one more where there are several subchunks along it.
    sub = (*(1 for _ in range(62)), 5)
    (block,) = _cells.blocks_of((*(1 for _ in range(61)), 2, 3), sub, 0, 6, 6)
    cells = np.arange(30).reshape(6, *sub)
    out = np.zeros(block.box.shape, cells.dtype)
    _cells.copy_part(cells, block.counts, Box((0,) * 63, block.box.shape), out)
    expected = [[*range(10 * j + 5 * i, 10 * j + 5 * i + 5)] for i in range(2) for j in range(3)]
    assert out.reshape(6, 5).tolist() == expected
