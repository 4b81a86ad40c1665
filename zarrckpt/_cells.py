"""Boxes of a chunk's subchunks, and their elements in the array's order.

In storage the first dimension is the fastest, in the array the last one: numpy copies a whole box of subchunks from one
order to the other with one call. How many calls there are matters more than what each copies: it gives the
interpreter's lock away, and waits for it afterwards where many threads work.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from zarrckpt._grid import Box, Ints, ravel_f, unravel, unravel_f

Elements = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class CellBlock:
    """A box of subchunks of one chunk."""

    place: int
    """Of the first one in storage."""
    counts: Ints
    """How many they are along each dimension."""
    size: int
    """How many they are."""
    cells: tuple[Any, ...]
    """Where they are among the chunk's subchunks: an index."""
    stored: tuple[Any, ...]
    """The same where the axes are in the order of storage, the first one last."""
    box: Box
    """Their elements, counted from the chunk's begin."""
    region: tuple[Any, ...]
    """The same as an index."""


@lru_cache(maxsize=1 << 12)
def block_at(chunk: Ints, sub: Ints, place: int, counts: Ints | None = None) -> CellBlock:
    """The block that begins at a place; default: of that subchunk alone.

    ``chunk`` has how many subchunks the chunk has along each dimension, ``sub`` the shape of one.
    """
    counts = counts or (1,) * len(chunk)
    cells = Box(unravel_f(place, chunk), counts)
    box = Box(*(tuple(i * n for i, n in zip(ints, sub, strict=True)) for ints in cells))
    index = cells.slices()
    # The ellipsis, so that a scalar stays an array.
    return CellBlock(place, counts, math.prod(counts), (*index, ...), (*index[::-1], ...), box, (*box.slices(), ...))


@lru_cache(maxsize=1 << 8)
def blocks_of(chunk: Ints, sub: Ints, first: int, count: int, longest: int) -> tuple[CellBlock, ...]:
    """Cut ``count`` neighbours in storage into such blocks, none of more than ``longest``; the rest as above."""
    out, end = [], first + count
    while first < end:
        out.append(block_at(chunk, sub, first, _extents(chunk, first, min(longest, end - first))))
        first += out[-1].size
    return tuple(out)


@lru_cache(maxsize=1 << 8)
def blocks_by_rows(chunk: Ints, sub: Ints, longest: int) -> tuple[CellBlock, ...]:
    """All subchunks of a chunk in blocks that follow each other in the array, none of more than ``longest``."""
    out, first, end = [], 0, math.prod(chunk)
    while first < end:
        counts = _extents(chunk[::-1], first, min(longest, end - first))[::-1]
        out.append(block_at(chunk, sub, ravel_f(unravel(first, chunk), chunk), counts))
        first += out[-1].size
    return tuple(out)


def _extents(chunk: Ints, place: int, limit: int) -> Ints:
    """The largest box of at most ``limit`` subchunks that begins at a place: full dimensions, then a part of one."""
    out = [1] * len(chunk)
    for dim, n in enumerate(chunk):
        place, inside = divmod(place, n)
        if inside or limit < n:
            rest = n - inside
            # Parts of one size, instead of full ones and a small rest.
            out[dim] = -(-rest // -(-rest // limit))
            break
        out[dim] = n
        limit //= n
    return tuple(out)


def in_array_order(cells: Elements, counts: Ints, sub: Ints) -> Elements:
    """A view of a block of subchunks, ``sub`` the shape of one, with the elements in the array's order.

    ``cells`` has them in the order of storage, with other memory between whole subchunks or not. The view may have
    several dimensions for one of the array, or none: memory of the block's shape is brought to the view's by
    :meth:`numpy.ndarray.reshape`, without a copy.
    """
    shape, axes = _order(counts, sub)
    return cells.reshape(shape).transpose(axes)


def parts_in_array_order(cells: Elements, counts: Ints, sub: Ints, inside: Box) -> Iterator[tuple[Box, Elements]]:
    """As :func:`in_array_order`, what a block has of a box, in parts: each one's own box, and a view of its elements.

    Both boxes are counted from the block's begin.
    """
    shape, axes = _order(counts, sub)
    grid, many, wide = cells.reshape(shape), _several(counts), _several(sub)
    for parts in itertools.product(*map(_segments, inside.offset, inside.shape, sub)):
        index: tuple[Any, ...] = (*(parts[dim][0] for dim in reversed(many)), *(parts[dim][1] for dim in wide), ...)
        offset = tuple(which.start * n + within.start for (which, within), n in zip(parts, sub, strict=True))
        extent = tuple((which.stop - which.start) * (within.stop - within.start) for which, within in parts)
        yield Box(offset, extent), grid[index].transpose(axes)


def copy_part(cells: Elements, counts: Ints, inside: Box, out: Elements) -> None:
    """Copy what a block of subchunks has of a box, counted from the block's begin, to memory of the box's shape.

    ``cells`` has the shape (number, *shape of one).
    """
    sub = cells.shape[1:]
    if inside.shape == tuple(i * n for i, n in zip(counts, sub, strict=True)):
        elements = in_array_order(cells, counts, sub)
        out.reshape(elements.shape)[...] = elements
    else:
        for part, elements in parts_in_array_order(cells, counts, sub, inside):
            region: tuple[Any, ...] = (*part.slices(inside.offset), ...)
            out[region].reshape(elements.shape)[...] = elements


@lru_cache(maxsize=1 << 12)
def _order(counts: Ints, sub: Ints) -> tuple[Ints, Ints]:
    """The shape of a block's subchunks, and which of its axes come after each other in the array."""
    many, wide = _several(counts), _several(sub)
    shape = (*(counts[dim] for dim in reversed(many)), *(sub[dim] for dim in wide))
    axes = []
    for dim in range(len(sub)):
        if dim in many:
            axes.append(len(many) - 1 - many.index(dim))
        if dim in wide:
            axes.append(len(many) + wide.index(dim))
    return shape, tuple(axes)


def _several(extents: Ints) -> list[int]:
    """The dimensions of an extent above 1: others need no axis of their own, of which numpy allows 64."""
    return [dim for dim, n in enumerate(extents) if n > 1]


def _segments(begin: int, length: int, size: int) -> list[tuple[slice, slice]]:
    """Cut ``length`` elements at the bounds of subchunks of ``size``: which subchunks, and which elements of each."""
    end, out = begin + length, []
    while begin < end:
        cell, first = divmod(begin, size)
        whole = 0 if first else (end - begin) // size
        last, stop = cell + max(1, whole), min(size, first + end - begin)
        out.append((slice(cell, last), slice(first, stop)))
        begin = (last - 1) * size + stop
    return out
