"""Compute the statistics of tensors, and of differences between tensors, for a page. Every chunk is read once."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np

from zarrckpt._format.documents import ArrayNode
from zarrckpt._format.grid import Box, Ints
from zarrckpt._inspect.differences import DifferenceSums, TensorDifference, choose_wider, dtypes_of
from zarrckpt._inspect.page.histogram import Histogram
from zarrckpt._inspect.stats import Moments, TensorStats, blocks, map_chunks, position_in, read_part, to_reals
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
        self._moments.add(moments)
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
        self._moments.add(other._moments)
        if other._histogram is not None:
            mine = self._histogram
            self._histogram = other._histogram if mine is None else mine.plus(other._histogram)
        self._low = sorted([*self._low, *other._low])[:EXTREMES]
        self._high = sorted([*self._high, *other._high], key=_greatest_first)[:EXTREMES]
        self._broken |= other._broken

    @property
    def complete(self) -> bool:
        """Whether all elements of the tensor were added."""
        return self._moments.count == self._node.nbytes // self._node.dtype.itemsize

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


class _Gatherers:
    """The tensors of one checkpoint that are being read. A complete tensor is reduced to its statistics."""

    def __init__(self, catalog: Catalog, fqns: Sequence[str]) -> None:
        self._catalog = catalog
        self._lock = threading.Lock()
        self._open: dict[str, TensorGatherer] = {}
        self.looks: dict[str, PageStats] = {}
        for fqn in fqns:
            if not self._node(fqn).nbytes:
                self.looks[fqn] = PageStats(TensorStats())

    def _node(self, fqn: str) -> ArrayNode:
        return self._catalog.root.tensors[fqn]

    def part(self, fqn: str) -> TensorGatherer:
        return TensorGatherer(self._node(fqn))

    def add(self, fqn: str, part: TensorGatherer) -> None:
        with self._lock:
            gatherer = self._open.setdefault(fqn, TensorGatherer(self._node(fqn)))
            gatherer.join(part)
            if gatherer.complete:
                self.looks[fqn] = self._open.pop(fqn).look()


def read_stats(
    catalogs: Sequence[Catalog], fqns: Sequence[str], progress: Progress | None
) -> tuple[list[dict[str, PageStats]], dict[str, TensorDifference]]:
    """Compute the statistics of tensors of one checkpoint, or of two, then with their differences.

    Each tensor is read once, in bounded memory. Elements that are NaN or inf are counted by the chunks of the
    wider tensor, for both checkpoints. Errors as in ``read``.
    """
    one, other = catalogs[0], catalogs[-1]
    gatherers = [_Gatherers(catalog, fqns) for catalog in catalogs]
    sums = {fqn: DifferenceSums() for fqn in fqns}

    def look(fqn: str, box: Box) -> DifferenceSums:
        parts, found, begin = [gatherer.part(fqn) for gatherer in gatherers], DifferenceSums(), 0
        for same in blocks(*(read_part(catalog, fqn, box) for catalog in catalogs), size=_PAGE_BLOCK):
            if len(catalogs) > 1:
                found.add(same[0], same[1], begin, box)
            for part, block in zip(parts, same, strict=True):
                part.take(to_reals(block), begin, box)
            begin += len(same[0])
        for gatherer, part in zip(gatherers, parts, strict=True):
            gatherer.add(fqn, part)
        return found

    for fqn, part in map_chunks(one, {fqn: choose_wider(one, other, fqn) for fqn in fqns}, look, progress):
        sums[fqn].join(part)
    compared = sums if len(catalogs) > 1 else {}
    differences = {fqn: part.difference(dtypes_of(one, other, fqn)) for fqn, part in compared.items()}
    return [gatherer.looks for gatherer in gatherers], differences
