"""The boxes that a rank holds, compared with nested cutting in every order, and with torch's strided placement."""

from __future__ import annotations

import itertools
import math

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor.placement_types import _StridedShard

from zarrckpt._plan.shards import Cut, LocalBox, held_boxes, mesh_boxes

Ints = tuple[int, ...]


def _chunk(n: range, parts: int, mine: int) -> range:
    """Return one of torch.chunk's pieces of a range."""
    step = -(-len(n) // parts) or 1
    return n[mine * step : (mine + 1) * step]


def _indices(held: list[LocalBox], dim: int = 0) -> list[int]:
    return [i for h in held for i in range(h.box.offset[dim], h.box.offset[dim] + h.box.shape[dim])]


@given(
    n=st.integers(0, 60),
    mesh=st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple),
    data=st.data(),
)
def test_cuts_follow_the_order_of_sharding(n: int, mesh: Ints, data: st.DataObject) -> None:
    """As in FSDP2 over TP, several mesh dimensions cut a dimension, in any order."""
    order = data.draw(st.permutations(range(len(mesh))))
    # A placement's split factor shows which later mesh dimensions cut before it.
    cuts = [
        Cut(0, math.prod(mesh[k] for k in range(m + 1, len(mesh)) if order.index(k) < order.index(m)))
        for m in range(len(mesh))
    ]
    seen: list[int] = []
    for coordinate in itertools.product(*map(range, mesh)):
        expected = range(n)
        for m in order:
            expected = _chunk(expected, mesh[m], coordinate[m])
        held = held_boxes((n,), mesh, coordinate, cuts)
        assert _indices(held) == list(expected) and len(held) <= 1
        seen += expected
    assert sorted(seen) == list(range(n))


def test_a_case_that_torch_computes_wrongly() -> None:
    """25 rows over dp 4 x tp 2: rank 6 holds row 12 only."""
    held = held_boxes((25,), (4, 2), (3, 0), [Cut(0, 2), Cut(0)])
    assert _indices(held) == [12]


@given(n=st.integers(0, 80), parts=st.integers(1, 6), factor=st.integers(2, 5))
def test_strided_shards_are_several_boxes(n: int, parts: int, factor: int) -> None:
    shards, _ = _StridedShard(0, split_factor=factor)._split_tensor(torch.arange(n), parts, with_padding=False)
    for mine, expected in enumerate(shards):
        held = held_boxes((n,), (parts,), (mine,), [Cut(0, factor)])
        assert _indices(held) == expected.tolist()
        starts = [h.local[0] for h in held]
        assert starts == list(itertools.accumulate([0] + [h.box.shape[0] for h in held]))[:-1]


def test_several_dimensions_and_replicas() -> None:
    held = held_boxes((5, 6, 2), (2, 3, 2), (1, 2, 0), [Cut(0), Cut(1), None])
    assert held == held_boxes((5, 6, 2), (2, 3, 2), (1, 2, 1), [Cut(0), Cut(1), None])
    assert [(h.box.offset, h.box.shape, h.local) for h in held] == [((3, 4, 0), (2, 2, 2), (0, 0, 0))]
    assert held_boxes((), (2,), (1,), [None])[0].box.size == 1
    assert held_boxes((3,), (4,), (3,), [Cut(0)]) == []


@given(
    shape=st.lists(st.integers(1, 20), max_size=3).map(tuple),
    mesh=st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple),
    data=st.data(),
)
def test_boxes_of_all_coordinates_tile_the_tensor(shape: Ints, mesh: Ints, data: st.DataObject) -> None:
    """The result equals that of each coordinate alone."""
    cut = st.builds(Cut, st.integers(0, len(shape) - 1), st.integers(1, 4)) if shape else st.none()
    cuts = tuple(data.draw(st.none() | cut) for _ in mesh)
    expected = [
        tuple(held.box for held in held_boxes(shape, mesh, place, cuts))
        for place in itertools.product(*map(range, mesh))
    ]
    assert mesh_boxes(shape, mesh, cuts) == expected
