"""Compute the statistics of tensors, and of differences between tensors, for a page. Every chunk is read once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np

from zarrckpt._format.documents import ArrayNode
from zarrckpt._format.grid import Box, Ints
from zarrckpt._inspect.differences import DifferenceSums, TensorDifference, choose_wider, dtypes_of
from zarrckpt._inspect.page.histogram import Histogram
from zarrckpt._inspect.stats import Moments, TensorStats, blocks, gather_chunks, position_in, read_part, to_reals
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


@dataclass(frozen=True)
class PageStats:
    """The statistics of one tensor on a page. For complex numbers, those of their absolute values."""

    stats: TensorStats
    histogram: Histogram | None = None
    """At most SHOWN_BINS bins. None if no element is finite."""
    bulk: tuple[Histogram, int, int] | None = None
    """The middle of the values, see :meth:`Histogram.bulk`."""
    low: tuple[Extreme, ...] = ()
    """The smallest values, ascending."""
    high: tuple[Extreme, ...] = ()
    """The largest values, descending."""
    sigmas: Mapping[float, float] = field(default_factory=dict)
    """The distance of each of these values from the mean, in standard deviations. Empty if the deviation is 0."""
    beyond: int = 0
    """Number of elements further than six standard deviations from the mean, at the histogram's full resolution."""
    broken: Mapping[int, int] = field(default_factory=dict)
    """Number of a chunk, in C order -> number of its elements that are NaN or inf."""
    first_broken: Ints | None = None
    """The position of the first NaN or inf of the first chunk that has any."""


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
        moments = Moments.of(values)
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

    def look(self) -> PageStats:
        """Return the statistics."""
        stats, broken = self._moments.stats(), dict(sorted(self._broken.items())[:_MAX_BROKEN])
        counts = {chunk: count for chunk, (count, _) in broken.items()}
        first = next((position for _, position in broken.values()), None)
        fine = self._histogram
        if fine is None:
            return PageStats(stats, broken=counts, first_broken=first)
        return PageStats(
            stats,
            fine.within(SHOWN_BINS),
            fine.bulk(_TAIL, SHOWN_BINS),
            tuple(self._low),
            tuple(self._high),
            self._sigmas(),
            fine.beyond(stats.mean - _FAR * stats.std, stats.mean + _FAR * stats.std) if stats.std else 0,
            counts,
            first,
        )

    def _sigmas(self) -> dict[float, float]:
        mean, std = self._moments.mean, self._moments.std
        values = {value for value, _ in (*self._low, *self._high)}
        return {value: float((Fraction(value) - mean) / Fraction(std)) for value in values} if std else {}


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


def read_stats(
    catalogs: Sequence[Catalog], fqns: Sequence[str], progress: Progress | None
) -> tuple[list[dict[str, PageStats]], dict[str, TensorDifference]]:
    """Compute the statistics of tensors of one checkpoint, or of two, then with their differences.

    Each tensor is read once, in bounded memory. Elements that are NaN or inf are counted by the chunks of the
    wider tensor, for both checkpoints. Errors as in ``read``.
    """
    one, other = catalogs[0], catalogs[-1]

    def look(found: _Sides, fqn: str, box: Box) -> None:
        begin = 0
        for same in blocks(*(read_part(catalog, fqn, box) for catalog in catalogs), size=_PAGE_BLOCK):
            if len(catalogs) > 1:
                found.differences.add(same[0], same[1], begin, box)
            for gatherer, block in zip(found.gatherers, same, strict=True):
                gatherer.take(to_reals(block), begin, box)
            begin += len(same[0])

    def finish(fqn: str, part: _Sides) -> tuple[list[PageStats], TensorDifference]:
        return [gatherer.look() for gatherer in part.gatherers], part.differences.difference(dtypes_of(one, other, fqn))

    def new(fqn: str) -> _Sides:
        return _Sides([catalog.root.tensors[fqn] for catalog in catalogs])

    nodes = {fqn: choose_wider(one, other, fqn) for fqn in fqns}
    found = gather_chunks(one, nodes, new, look, finish, progress)
    looks = [{fqn: sides[number] for fqn, (sides, _) in found.items()} for number in range(len(catalogs))]
    return looks, {fqn: differing for fqn, (_, differing) in found.items()} if len(catalogs) > 1 else {}
