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
    runs = [
        _spans(n, mesh, coordinate, [cut if cut and cut.dim == d else None for cut in cuts])
        for d, n in enumerate(shape)
    ]
    held = []
    for parts in itertools.product(*map(_with_starts, runs)):
        box = Box(tuple(offset for offset, _, _ in parts), tuple(length for _, length, _ in parts))
        if box.size:
            held.append(LocalBox(box, tuple(start for _, _, start in parts)))
    return held


@record
class Sharding(NamedTuple):
    """A mesh of ranks, and the cuts of a tensor over it."""

    ranks: Ints
    """The ranks in the default process group, in C order of the mesh."""
    mesh: Ints
    """The sizes of the mesh."""
    cuts: tuple[Cut | None, ...]
    """The cut of each mesh dimension; None if it replicates the tensor."""


class CutMesh(NamedTuple):
    """The sizes of a mesh, and the cut of each of its dimensions (None: replicated)."""

    sizes: Ints
    cuts: tuple[Cut | None, ...]


@lru_cache(maxsize=512)
def mesh_boxes(shape: Ints, mesh: CutMesh) -> list[tuple[Box, ...]]:
    """Return the boxes at each coordinate of a mesh, in C order of the coordinates.

    Coordinates that differ only along replicating dimensions have the same boxes, which are computed once.
    """
    if 0 in shape:
        return [(Box((0,) * len(shape), shape),)] * math.prod(mesh.sizes)
    by_dim = [_mesh_runs(dim, n, mesh) for dim, n in enumerate(shape)]
    known: dict[tuple[int, ...], tuple[Box, ...]] = {}
    found = []
    for runs in zip(*by_dim, strict=True) if by_dim else [()] * math.prod(mesh.sizes):
        key = tuple(map(id, runs))
        if key not in known:
            held = (Box(*zip(*part, strict=True)) if part else Box((), ()) for part in itertools.product(*runs))
            known[key] = tuple(box for box in held if box.size)
        found.append(known[key])
    return found


def _mesh_runs(dim: int, n: int, mesh: CutMesh) -> list[list[Span]]:
    """Return the spans of one tensor dimension at each coordinate of a mesh, in C order. Equal spans are one object."""
    cuts = tuple(cut if cut is not None and cut.dim == dim else None for cut in mesh.cuts)
    places = [range(size) if cut else (0,) * size for size, cut in zip(mesh.sizes, cuts, strict=True)]
    known: dict[Ints, list[Span]] = {}
    found = []
    for place in itertools.product(*places):
        if place not in known:
            known[place] = _spans(n, mesh.sizes, place, cuts)
        found.append(known[place])
    return found


def _with_starts(runs: Sequence[Span]) -> list[tuple[int, int, int]]:
    out, start = [], 0
    for offset, length in runs:
        out.append((offset, length, start))
        start += length
    return out


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
    runs = [(0, n)]
    for m, cut in enumerate(cuts):
        if cut is not None:
            runs = _interleaved(runs, mesh[m], coordinate[m], cut.factor)
    return runs


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
        for place in range(len(order) + 1):
            if before == cut.factor:
                order.insert(place, m)
                break
            if place < len(order):
                before *= mesh[order[place]]
        else:
            return None
    return order


def _interleaved(runs: list[Span], parts: int, mine: int, factor: int) -> list[Span]:
    """Apply torch's ``_StridedShard``: cut into ``factor`` pieces and each into ``parts``; keep one part of each."""
    total = sum(length for _, length in runs)
    outer = -(-total // factor)
    out: list[Span] = []
    for piece in range(factor):
        begin, end = min(piece * outer, total), min((piece + 1) * outer, total)
        inner = -(-(end - begin) // parts)
        out += _cut_out(runs, min(begin + mine * inner, end), min(begin + (mine + 1) * inner, end))
    return _joined(out)


def _joined(runs: list[Span]) -> list[Span]:
    """Join spans that follow one another without a gap."""
    out: list[Span] = []
    for offset, length in runs:
        if out and sum(out[-1]) == offset:
            out[-1] = (out[-1][0], out[-1][1] + length)
        else:
            out.append((offset, length))
    return out


def _cut_out(runs: list[Span], begin: int, end: int) -> list[Span]:
    """Return the spans of positions begin to end in the concatenation of spans."""
    out: list[Span] = []
    at = 0
    for offset, length in runs:
        lo, hi = max(begin, at), min(end, at + length)
        if lo < hi:
            out.append((offset + lo - at, hi - lo))
        at += length
    return out
