"""Exact histograms of numbers that arrive in parts, in any order, in one pass and bounded memory.

The width of the bins is a power of two, and their edges are multiples of it. So two neighbouring bins make one bin of
twice the width. Each part is counted as finely as its own range allows. The sum of the parts is equal to the histogram
of all numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from zarrckpt._inspect.sums import NumberArray

FINE = 1 << 15
"""Maximum number of bins while parts are counted. A page shows fewer, but it also shows the bulk alone."""

_DIGITS = 25
"""The minimum width of bins is the largest value over 2 ** _DIGITS. So numbers of bins are exact, and a constant has a
bin too."""

_LEAST = -1074
"""The smallest exponent, that of the smallest positive float. Zeros alone have it, so they can join any histogram."""


@dataclass(frozen=True)
class Histogram:
    """``counts[i]`` is the number of x with ``first + i <= x / 2 ** exponent < first + i + 1``.

    The first and the last bin are not empty.
    """

    exponent: int
    first: int
    counts: NumberArray

    @classmethod
    def of(cls, values: NumberArray, low: float, high: float, *, max_bins: int = FINE) -> Histogram:
        """Count finite float64 values or integers of 64 bits. Their minimum is ``low``, their maximum ``high``."""
        exponent = _exponent(low, high, max_bins)
        first, last = _bin_of(low, exponent), _bin_of(high, exponent)
        if values.dtype.kind == "f":
            bins = np.floor(np.ldexp(values, -exponent)).astype(np.int64)
        else:
            bins = (values >> min(exponent, 63)).astype(np.int64)
        bins -= first
        return cls(exponent, first, np.bincount(bins, minlength=last - first + 1))

    def coarser(self, exponent: int) -> Histogram:
        """Return the same numbers in bins of the width ``2 ** exponent``, which must not be finer."""
        by = min(exponent - self.exponent, 62)
        if not by:
            return self
        bins = (np.arange(len(self.counts)) + self.first) >> by
        first = int(bins[0])
        counts = np.bincount(bins - first, weights=self.counts).astype(np.int64)
        return Histogram(exponent, first, counts)

    def within(self, max_bins: int) -> Histogram:
        """Return the same numbers in at most ``max_bins`` bins."""
        by = max(0, math.ceil(math.log2(len(self.counts) / max_bins)))
        found = self.coarser(self.exponent + by)
        # There can be one bin more, because edges are multiples of the width.
        return found if len(found.counts) <= max_bins else found.coarser(found.exponent + 1)

    def plus(self, other: Histogram, max_bins: int = FINE) -> Histogram:
        """Return the numbers of both."""
        exponent = max(self.exponent, other.exponent)
        one, two = self.coarser(exponent), other.coarser(exponent)
        while max(one.end, two.end) - min(one.first, two.first) > max_bins:
            exponent += 1
            one, two = one.coarser(exponent), two.coarser(exponent)
        first = min(one.first, two.first)
        counts = np.zeros(max(one.end, two.end) - first, np.int64)
        for part in (one, two):
            counts[part.first - first : part.end - first] += part.counts
        return Histogram(exponent, first, counts)

    def json(self) -> list[Any]:
        return [self.exponent, self.first, self.counts.tolist()]

    @property
    def end(self) -> int:
        """The number of the bin behind the last one."""
        return self.first + len(self.counts)

    def beyond(self, low: float, high: float) -> int:
        """Return how many numbers are in bins that are completely below ``low`` or above ``high``."""
        edges = np.ldexp(np.arange(self.first, self.end + 1, dtype=np.float64), self.exponent)
        return int(self.counts[(edges[1:] <= low) | (edges[:-1] > high)].sum())

    def bulk(self, share: float, max_bins: int) -> tuple[Histogram, int, int] | None:
        """Return the middle of the numbers, without ``share`` of them at each end.

        Returns (the middle in at most ``max_bins`` bins, numbers below, numbers above), or None if the middle takes at
        least a quarter of the range, because then the whole histogram shows it well.
        """
        reached = np.cumsum(self.counts)
        total = int(reached[-1])
        begin = int(np.searchsorted(reached, total * share, "right"))
        end = int(np.searchsorted(reached, total * (1 - share), "left")) + 1
        if 4 * (end - begin) >= len(self.counts):
            return None
        middle = Histogram(self.exponent, self.first + begin, self.counts[begin:end]).within(max_bins)
        # The outer coarse bins extend beyond the middle, so the numbers in the rest of these bins are added.
        wider = middle.exponent - self.exponent
        begin = max((middle.first << wider) - self.first, 0)
        end = min((middle.end << wider) - self.first, len(self.counts))
        shown = Histogram(self.exponent, self.first + begin, self.counts[begin:end]).coarser(middle.exponent)
        return shown, int(self.counts[:begin].sum()), int(self.counts[end:].sum())


def _exponent(low: float, high: float, max_bins: int) -> int:
    """Return the smallest exponent that needs at most ``max_bins`` bins.

    It grows with the range, so the bins of a part are never coarser than those of the whole.
    """
    largest = max(abs(low), abs(high))
    if isinstance(largest, int):
        exponent = max(largest.bit_length() - _DIGITS, 0)
    else:
        exponent = max(math.frexp(largest)[1] - _DIGITS, _LEAST) if largest else _LEAST
    while _bin_of(high, exponent) - _bin_of(low, exponent) >= max_bins:
        exponent += 1
    return exponent


def _bin_of(value: float, exponent: int) -> int:
    return value >> exponent if isinstance(value, int) else math.floor(math.ldexp(value, -exponent))
