"""Histograms of numbers that arrive in parts, in any order, in one pass and bounded memory: exact counts.

The width of the bins is a power of two, and their edges are multiples of it. So two bins of one width are one bin of
twice that width: counts of parts, each as fine as its own range allows, add up to what one look at all of it gives.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from zarrckpt._inspect.exact import NumberArray

FINE = 1 << 15
"""At most so many bins while parts are counted: more than a page shows, so that it can show the bulk alone."""

_DIGITS = 25
"""Bins are no finer than the largest value over 2 ** _DIGITS: their numbers are exact, and a constant has a width."""

_LEAST = -1074
"""The least exponent, that of zeros alone, so that they can join all others: what is least above zero."""


@dataclass(frozen=True)
class Histogram:
    """``counts[i]`` numbers x with ``first + i <= x / 2 ** exponent < first + i + 1``. Neither end is empty."""

    exponent: int
    first: int
    counts: NumberArray

    @classmethod
    def of(cls, values: NumberArray, low: float, high: float, *, most: int = FINE) -> Histogram:
        """Count float64 values, or integers of 64 bits, all finite, from ``low`` to ``high``; one at least."""
        exponent = _exponent(low, high, most)
        first, last = _place(low, exponent), _place(high, exponent)
        if values.dtype.kind == "f":
            places = np.floor(np.ldexp(values, -exponent)).astype(np.int64)
        else:
            places = (values >> min(exponent, 63)).astype(np.int64)
        places -= first
        return cls(exponent, first, np.bincount(places, minlength=last - first + 1))

    def coarser(self, exponent: int) -> Histogram:
        """The same numbers in bins of the width ``2 ** exponent``, which is not finer."""
        by = min(exponent - self.exponent, 62)
        if not by:
            return self
        places = (np.arange(len(self.counts)) + self.first) >> by
        first = int(places[0])
        counts = np.bincount(places - first, weights=self.counts).astype(np.int64)
        return Histogram(exponent, first, counts)

    def within(self, most: int) -> Histogram:
        """The same numbers in at most so many bins."""
        by = max(0, math.ceil(math.log2(len(self.counts) / most)))
        found = self.coarser(self.exponent + by)
        # Edges are multiples of the width: there can be one bin more than that.
        return found if len(found.counts) <= most else found.coarser(found.exponent + 1)

    def plus(self, other: Histogram, most: int = FINE) -> Histogram:
        """The numbers of both."""
        exponent = max(self.exponent, other.exponent)
        one, two = self.coarser(exponent), other.coarser(exponent)
        while max(one.end, two.end) - min(one.first, two.first) > most:
            exponent += 1
            one, two = one.coarser(exponent), two.coarser(exponent)
        first = min(one.first, two.first)
        counts = np.zeros(max(one.end, two.end) - first, np.int64)
        for part in (one, two):
            counts[part.first - first : part.end - first] += part.counts
        return Histogram(exponent, first, counts)

    @property
    def end(self) -> int:
        """The number of the bin behind the last one."""
        return self.first + len(self.counts)

    def beyond(self, low: float, high: float) -> int:
        """How many numbers are in bins that lie below ``low`` or above ``high`` as a whole."""
        edges = np.ldexp(np.arange(self.first, self.end + 1, dtype=np.float64), self.exponent)
        return int(self.counts[(edges[1:] <= low) | (edges[:-1] > high)].sum())

    def bulk(self, share: float, most: int) -> tuple[Histogram, int, int] | None:
        """The middle without ``share`` of the numbers at either end, where it takes less than a quarter of the range.

        In at most ``most`` bins, with how many numbers are below and above what they show; None where the whole
        histogram shows it well.
        """
        reached = np.cumsum(self.counts)
        total = int(reached[-1])
        begin = int(np.searchsorted(reached, total * share, "right"))
        end = int(np.searchsorted(reached, total * (1 - share), "left")) + 1
        if 4 * (end - begin) >= len(self.counts):
            return None
        middle = Histogram(self.exponent, self.first + begin, self.counts[begin:end]).within(most)
        # Coarser bins reach a little further than the middle: what else is in them is counted, too.
        wider = middle.exponent - self.exponent
        begin = max((middle.first << wider) - self.first, 0)
        end = min((middle.end << wider) - self.first, len(self.counts))
        shown = Histogram(self.exponent, self.first + begin, self.counts[begin:end]).coarser(middle.exponent)
        return shown, int(self.counts[:begin].sum()), int(self.counts[end:].sum())


def _exponent(low: float, high: float, most: int) -> int:
    """The least that needs no more than ``most`` bins. It grows with the range, so that parts fit into the whole."""
    largest = max(abs(low), abs(high))
    if isinstance(largest, int):
        exponent = max(largest.bit_length() - _DIGITS, 0)
    else:
        exponent = max(math.frexp(largest)[1] - _DIGITS, _LEAST) if largest else _LEAST
    while _place(high, exponent) - _place(low, exponent) >= most:
        exponent += 1
    return exponent


def _place(value: float, exponent: int) -> int:
    return value >> exponent if isinstance(value, int) else math.floor(math.ldexp(value, -exponent))
