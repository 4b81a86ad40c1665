"""Compute the boxes of a tensor that a rank holds from its mesh and placements, with integers only.

torch's own ``compute_local_shape_and_global_offset`` is wrong if two mesh dimensions cut one tensor dimension unevenly
(FSDP2 over tensor parallelism, 25 rows over 4 x 2). It cuts in the order of the mesh, but the tensor was cut in another
order. This module cuts in the true order whenever the placements determine it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from zarrckpt._format.grid import Box, Ints
from zarrckpt._format.wire import record


@record
class Cut(NamedTuple):
    """The cut of one mesh dimension: along tensor dimension ``dim``, in ``factor`` interleaved strides (1: none)."""

    dim: int
    factor: int = 1


Span = tuple[int, int]
"""(offset, length) of consecutive elements along one dimension."""


class LocalBox(NamedTuple):
    """A box of the global tensor, and its offset in the local tensor."""

    box: Box
    local: Ints


def held_boxes(shape: Ints, mesh: Ints, coordinate: Ints, cuts: Sequence[Cut | None]) -> list[LocalBox]:
    """Return the non-empty boxes that a rank holds, in the order of its local tensor.

    ``mesh`` has the sizes of the mesh, ``coordinate`` the rank's coordinate in it, and ``cuts`` one entry per mesh
    dimension (None: replicated). FSDP2, TP and their combinations give one box, interleaved strides several.
    """
    by_dim = []
    for dim, n in enumerate(shape):
        spans = _spans(n, mesh, coordinate, [cut if cut and cut.dim == dim else None for cut in cuts])
        starts = itertools.accumulate((length for _, length in spans), initial=0)
        by_dim.append([*zip(spans, starts, strict=False)])
    boxes = []
    for parts in itertools.product(*by_dim):
        box = Box(tuple(offset for (offset, _), _ in parts), tuple(length for (_, length), _ in parts))
        if box.size:
            boxes.append(LocalBox(box, tuple(start for _, start in parts)))
    return boxes


@record
class Sharding(NamedTuple):
    """A mesh of ranks, and the cuts of a tensor over it."""

    ranks: Ints
    """The ranks in the default process group, in C order of the mesh."""
    mesh: Ints
    """The sizes of the mesh."""
    cuts: tuple[Cut | None, ...]
    """The cut of each mesh dimension; None if it replicates the tensor."""


@lru_cache(maxsize=512)
def mesh_boxes(shape: Ints, mesh: Ints, cuts: tuple[Cut | None, ...]) -> list[tuple[Box, ...]]:
    """Return the boxes at each coordinate of a mesh, in C order of the coordinates. The arguments are as above.

    Coordinates that differ only along replicating dimensions have the same boxes, which are computed once.
    """
    if 0 in shape:
        return [(Box((0,) * len(shape), shape),)] * math.prod(mesh)
    by_dim = [_mesh_spans(dim, n, mesh, cuts) for dim, n in enumerate(shape)]
    known: dict[tuple[int, ...], tuple[Box, ...]] = {}
    found = []
    for spans in zip(*by_dim, strict=True) if by_dim else [()] * math.prod(mesh):
        key = tuple(map(id, spans))
        if key not in known:
            boxes = (Box(*zip(*part, strict=True)) if part else Box((), ()) for part in itertools.product(*spans))
            known[key] = tuple(box for box in boxes if box.size)
        found.append(known[key])
    return found


def _mesh_spans(dim: int, n: int, mesh: Ints, cuts: tuple[Cut | None, ...]) -> list[list[Span]]:
    """Return the spans of one tensor dimension at each coordinate of a mesh, in C order. Equal spans are one object."""
    cuts = tuple(cut if cut is not None and cut.dim == dim else None for cut in cuts)
    distinct = [range(size) if cut else (0,) * size for size, cut in zip(mesh, cuts, strict=True)]
    known: dict[Ints, list[Span]] = {}
    found = []
    for coordinate in itertools.product(*distinct):
        if coordinate not in known:
            known[coordinate] = _spans(n, mesh, coordinate, cuts)
        found.append(known[coordinate])
    return found


def _spans(n: int, mesh: Ints, coordinate: Ints, cuts: Sequence[Cut | None]) -> list[Span]:
    """Return the spans of a dimension of length n that remain after all cuts."""
    order = _true_order(mesh, tuple(cuts))
    if order is not None:
        offset, length = 0, n
        for m in order:
            step = -(-length // mesh[m])
            begin = min(step * coordinate[m], length)
            offset, length = offset + begin, min(step, length - begin)
        return [(offset, length)]
    spans = [(0, n)]
    for m, cut in enumerate(cuts):
        if cut is not None:
            spans = _interleave(spans, mesh[m], coordinate[m], cut.factor)
    return spans


@lru_cache(maxsize=512)
def _true_order(mesh: Ints, cuts: tuple[Cut | None, ...]) -> list[int] | None:
    """Return the mesh dimensions in the order of their cuts, outermost first, or None if strides interleave.

    A cut with a stride factor was made inside the cuts of later mesh dimensions whose sizes multiply to that factor.
    """
    order: list[int] = []
    for m in reversed(range(len(cuts))):
        cut = cuts[m]
        if cut is None:
            continue
        before = 1
        for index in range(len(order) + 1):
            if before == cut.factor:
                order.insert(index, m)
                break
            if index < len(order):
                before *= mesh[order[index]]
        else:
            return None
    return order


def _interleave(spans: list[Span], parts: int, mine: int, factor: int) -> list[Span]:
    """Apply torch's ``_StridedShard``: cut into ``factor`` pieces and each into ``parts``; keep one part of each."""
    total = sum(length for _, length in spans)
    outer = -(-total // factor)
    out: list[Span] = []
    for piece in range(factor):
        begin, end = min(piece * outer, total), min((piece + 1) * outer, total)
        inner = -(-(end - begin) // parts)
        out += _select_positions(spans, min(begin + mine * inner, end), min(begin + (mine + 1) * inner, end))
    return _join_spans(out)


def _join_spans(spans: list[Span]) -> list[Span]:
    """Join spans that follow one another without a gap."""
    out: list[Span] = []
    for offset, length in spans:
        if out and sum(out[-1]) == offset:
            out[-1] = (out[-1][0], out[-1][1] + length)
        else:
            out.append((offset, length))
    return out


def _select_positions(spans: list[Span], begin: int, end: int) -> list[Span]:
    """Return the spans of positions begin to end in the concatenation of spans."""
    out: list[Span] = []
    at = 0
    for offset, length in spans:
        lo, hi = max(begin, at), min(end, at + length)
        if lo < hi:
            out.append((offset + lo - at, hi - lo))
        at += length
    return out
