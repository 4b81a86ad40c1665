"""Sums over blocks of numbers that neither overflow nor underflow when blocks are added up.

Each block is summed in float64, scaled if squares would leave its range. The sums of blocks are fractions, which are
added without rounding.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np

NumberArray = np.ndarray[Any, np.dtype[Any]]

_SAFE_EXPONENT = 400
"""Up to this binary exponent, squares of values, and of others 2^-60 times as large, are in the range of float64."""


def _scale(values: NumberArray, largest: float) -> tuple[NumberArray, int]:
    """Return values and a binary exponent, so that squares of values up to ``largest`` are in the range of float64."""
    exponent = math.frexp(largest)[1]
    return (values, 0) if abs(exponent) <= _SAFE_EXPONENT else (np.ldexp(values, -exponent), exponent)


def shift(value: Fraction, exponent: int) -> Fraction:
    return value * Fraction(2) ** exponent if exponent else value


def dot(one: NumberArray, other: NumberArray) -> Fraction:
    """Return the sum of products of finite float64 values."""
    found = float(one @ other)
    if 1e-280 < abs(found) < 1e280:
        return Fraction(found)
    (x, exponent), (y, more) = (_scale(values, float(np.abs(values).max())) for values in (one, other))
    return shift(Fraction(float(x @ y)), exponent + more)


def sum_powers(values: NumberArray, low: float, high: float) -> tuple[Fraction, Fraction]:
    """Return the sum and the sum of squares of finite float64, int64 or uint64 values from ``low`` to ``high``."""
    exponent = 0
    if isinstance(low, int):
        center, distances = Fraction(low), (values - low).view(np.uint64).astype(np.float64)
    else:
        values, exponent = _scale(values, max(-low, high))
        mean = float(values.mean())
        center, distances = Fraction(mean), values - mean
    # The center is not the exact mean, and the sum of the distances corrects it.
    rest = Fraction(float(distances.sum()))
    total = len(values) * center + rest
    squares = Fraction(float(distances @ distances)) + center * (total + rest)
    return shift(total, exponent), shift(squares, 2 * exponent)


def root(square: Fraction) -> float:
    """Return the square root of a number of any size: inf if it exceeds float64, 0.0 if the number is not positive."""
    if square <= 0:
        return 0.0
    half = (square.numerator.bit_length() - square.denominator.bit_length()) // 2
    try:
        return math.ldexp(math.sqrt(square / Fraction(4) ** half), half)
    except OverflowError:
        return math.inf
