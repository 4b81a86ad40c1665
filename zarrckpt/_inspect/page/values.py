"""Compute the statistics of tensors, and of differences between tensors, for a page. Every chunk is read once."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from zarrckpt._format.documents import ArrayNode, Json
from zarrckpt._format.grid import Box, Ints
from zarrckpt._inspect.differences import DifferenceSums, choose_wider, dtypes_of
from zarrckpt._inspect.page.histogram import Histogram
from zarrckpt._inspect.stats import Moments, blocks, gather_chunks, position_in, read_part, to_reals
from zarrckpt._inspect.sums import NumberArray
from zarrckpt._jobs import Progress
from zarrckpt._read.catalog import Catalog

SHOWN_BINS = 64
EXTREMES = 4
"""Number of smallest and of largest values that are shown, with their positions."""
_TAIL = 0.001
_FAR = 6
"""Distance from the mean, in standard deviations, beyond which elements are counted as outliers."""
_MAX_BROKEN = 4096
"""Maximum number of chunks with NaN or inf that are listed."""

_PAGE_BLOCK = 1 << 18
"""Elements per block. Each block has its own histogram, so smaller blocks would take more time."""

Extreme = tuple[float, Ints]
"""A value and its position."""


_MAX_INTEGER = 2**53
"""Integers from this number on are stored as texts, because JavaScript's numbers have 53 bits."""


@dataclass(frozen=True)
class PageStats:
    """The JSON of the statistics of the tensors of each side, and the differences of tensors that both sides have."""

    looks: tuple[dict[str, Json], ...]
    differences: dict[str, Json]

    def is_broken(self, fqn: str) -> bool:
        """Whether a tensor has NaN or inf on any side."""
        return any(any(side[fqn]["stats"][1:3]) for side in self.looks if fqn in side)


def number_json(value: float) -> float | str | None:
    """Return a number for JSON, unrounded. NaN becomes None, infinities and large integers become texts."""
    if isinstance(value, int):
        return value if abs(value) < _MAX_INTEGER else str(value)
    if math.isnan(value):
        return None
    return value if math.isfinite(value) else str(value)


class TensorGatherer:
    """Collects the statistics of one tensor from its parts, in any order."""

    def __init__(self, node: ArrayNode) -> None:
        self._node = node
        self._moments = Moments()
        self._histogram: Histogram | None = None
        self._low: list[Extreme] = []
        self._high: list[Extreme] = []
        self._broken: dict[int, tuple[int, Ints]] = {}

    def take(self, values: NumberArray, begin: int, box: Box) -> None:
        """Add elements of a box, as :func:`to_reals` returns them.

        ``begin`` is the number of the first element in the box, in C order.
        """
        moments = Moments()
        moments.add(values)
        self._moments.join(moments)
        finite = None if moments.finite == moments.count else np.isfinite(values)
        if finite is not None:
            self._note_broken(box, moments.count - moments.finite, position_in(box, begin + int(np.argmin(finite))))
        if not moments.finite:
            return
        found = Histogram.of(values if finite is None else values[finite], moments.low, moments.high)
        self._histogram = found if self._histogram is None else self._histogram.plus(found)
        self._low = _extremes_of(self._low, moments.low, values, finite, begin, box, 1)
        self._high = _extremes_of(self._high, moments.high, values, finite, begin, box, -1)

    def _note_broken(self, box: Box, count: int, position: Ints) -> None:
        grid = self._node.grid
        chunk = grid.chunk_number(tuple(o // n for o, n in zip(box.offset, grid.chunk_shape, strict=True)))
        before, first = self._broken.get(chunk, (0, position))
        self._broken[chunk] = (before + count, first)

    def join(self, other: TensorGatherer) -> None:
        """Add the statistics of another part of the tensor."""
        self._moments.join(other._moments)
        if other._histogram is not None:
            mine = self._histogram
            self._histogram = other._histogram if mine is None else mine.plus(other._histogram)
        self._low = sorted([*self._low, *other._low])[:EXTREMES]
        self._high = sorted([*self._high, *other._high], key=_greatest_first)[:EXTREMES]
        self._broken |= other._broken

    def json(self) -> Json:
        """Return the statistics for the page. For complex numbers, those of their absolute values.

        ``histogram`` has at most SHOWN_BINS bins, ``bulk`` is as :meth:`Histogram.bulk` returns it. ``low`` and
        ``high`` are the extreme values, each with its position and its distance from the mean in standard deviations.
        ``beyond`` counts elements further than six of them, at the histogram's full resolution. ``broken`` has the
        numbers of chunks, in C order, with their counts of NaN and inf, and ``first_broken`` the position of the first.
        """
        stats, fine = self._moments.stats(), self._histogram
        found: Json = {"stats": [number_json(value) for value in dataclasses.astuple(stats)]}
        if self._broken:
            broken = sorted(self._broken.items())[:_MAX_BROKEN]
            found["broken"] = [(chunk, count) for chunk, (count, _) in broken]
            found["first_broken"] = broken[0][1][1]
        if fine is None:
            return found
        mean, std = self._moments.mean, self._moments.std
        for name, items in (("low", self._low), ("high", self._high)):
            sigmas = (round(float((Fraction(value) - mean) / Fraction(std)), 4) if std else None for value, _ in items)
            found[name] = [(number_json(item[0]), item[1], sigma) for item, sigma in zip(items, sigmas, strict=True)]
        far = _FAR * stats.std
        found["beyond"] = fine.beyond(stats.mean - far, stats.mean + far) if far else 0
        found["histogram"] = fine.within(SHOWN_BINS).json()
        if (bulk := fine.bulk(_TAIL, SHOWN_BINS)) is not None:
            found["bulk"] = [*bulk[0].json(), *bulk[1:]]
        return found


def _greatest_first(item: Extreme) -> tuple[float, Ints]:
    return -item[0], item[1]


def _extremes_of(
    kept: list[Extreme],
    best: float,
    values: NumberArray,
    finite: NumberArray | None,
    begin: int,
    box: Box,
    sign: int,
) -> list[Extreme]:
    """Return the extremes of those kept so far and of a block.

    ``best`` is the block's most extreme value. Most blocks add nothing, so it is compared first. ``finite`` is the mask
    of finite elements, or None if all are.
    """
    if len(kept) == EXTREMES and sign * kept[-1][0] <= sign * best:
        return kept
    few = min(EXTREMES, len(values))
    ordered = values if finite is None else np.where(finite, values, sign * np.inf)
    indices = np.argpartition(ordered, few - 1)[:few] if sign > 0 else np.argpartition(ordered, -few)[-few:]
    found = [(values[i].item(), position_in(box, begin + int(i))) for i in indices if finite is None or finite[i]]
    return sorted([*kept, *found], key=lambda item: (sign * item[0], item[1]))[:EXTREMES]


class _Sides:
    """The statistics of one tensor of one checkpoint, or of two, then with the differences."""

    def __init__(self, nodes: Sequence[ArrayNode]) -> None:
        self.gatherers = [TensorGatherer(node) for node in nodes]
        self.differences = DifferenceSums()

    def join(self, other: _Sides) -> None:
        for mine, theirs in zip(self.gatherers, other.gatherers, strict=True):
            mine.join(theirs)
        self.differences.join(other.differences)


def read_numbers(
    catalogs: Sequence[Catalog],
    tensors: Sequence[Mapping[str, ArrayNode]],
    same: Collection[str],
    progress: Progress | None,
) -> PageStats:
    """Read all tensors of each catalog once, in bounded memory, and compare those in ``same``.

    Elements of these that are NaN or inf are counted by the chunks of the wider tensor. Errors as in ``read``.
    """
    both = tuple(range(len(catalogs)))
    nodes = {(fqn, both): choose_wider(catalogs[0], catalogs[-1], fqn) for fqn in same}
    for side, found in enumerate(tensors):
        nodes |= {(fqn, (side,)): node for fqn, node in found.items() if fqn not in same}

    def new(key: _Key) -> _Sides:
        return _Sides([catalogs[side].root.tensors[key[0]] for side in key[1]])

    def look(found: _Sides, key: _Key, box: Box) -> None:
        begin = 0
        for block in blocks(*(read_part(catalogs[side], key[0], box) for side in key[1]), size=_PAGE_BLOCK):
            if len(block) > 1:
                found.differences.add(block[0], block[1], begin, box)
            for gatherer, values in zip(found.gatherers, block, strict=True):
                gatherer.take(to_reals(values), begin, box)
            begin += len(block[0])

    def finish(key: _Key, part: _Sides) -> tuple[list[Json], Json]:
        dtypes = dtypes_of(catalogs[key[1][0]], catalogs[key[1][-1]], key[0])
        measures = vars(part.differences.difference(dtypes))
        numbers = {
            name: number_json(value) if isinstance(value, int | float) else value for name, value in measures.items()
        }
        return [gatherer.json() for gatherer in part.gatherers], numbers

    numbers = PageStats(tuple({} for _ in catalogs), {})
    for (fqn, sides), (looks, differing) in gather_chunks(catalogs[0], nodes, new, look, finish, progress).items():
        for side, shown in zip(sides, looks, strict=True):
            numbers.looks[side][fqn] = shown
        if len(sides) > 1:
            numbers.differences[fqn] = differing
    return numbers


_Key = tuple[str, tuple[int, ...]]
"""A tensor's name, and the numbers of its catalogs."""
