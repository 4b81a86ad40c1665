"""Sums over blocks of numbers that neither round, overflow nor underflow when blocks are added up.

Sums of integers are Python integers. Sums of floats are fractions: each block is summed in float64, scaled if squares
would leave its range, and blocks are added without rounding.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np

NumberArray = np.ndarray[Any, np.dtype[Any]]
Exact = int | Fraction

_LIMB = 16
"""Number of bits of a limb. In a block of at most 2^20 elements, sums of products of two limbs are exact in float64."""

_SAFE_EXPONENT = 400
"""Up to this binary exponent, squares of values, and of others 2^-60 times as large, are in the range of float64."""

Scaled = tuple[NumberArray, int]
"""float64 values and a binary exponent: the numbers are ``values * 2 ** exponent``."""


def scale(values: NumberArray, largest: float) -> Scaled:
    """Scale values whose squares would leave the range of float64. ``largest`` is the greatest absolute value."""
    exponent = math.frexp(largest)[1]
    if abs(exponent) <= _SAFE_EXPONENT:
        return values, 0
    return np.ldexp(values, -exponent), exponent


def dot(one: Scaled, other: Scaled) -> Fraction:
    """Return the sum of products."""
    return _shifted(Fraction(float(one[0] @ other[0])), one[1] + other[1])


def sum_floats(values: NumberArray, low: float, high: float) -> tuple[Fraction, Fraction]:
    """Return the sum and the sum of squares of finite float64 values from ``low`` to ``high``."""
    scaled, exponent = scale(values, max(-low, high))
    mean = float(scaled.mean())
    distances = scaled - mean
    # The mean is rounded, and the sum of the distances corrects it.
    rest, count, center = Fraction(float(distances.sum())), len(values), Fraction(mean)
    total = count * center + rest
    squares = Fraction(float(distances @ distances)) + center * (total + rest)
    return _shifted(total, exponent), _shifted(squares, 2 * exponent)


def sum_integers(values: NumberArray) -> tuple[int, int]:
    """Return the sum and the sum of squares of int64 or uint64 values."""
    limbs = _limbs(values)
    total = sum(int(row.sum()) << _LIMB * index for index, row in enumerate(limbs))
    return total, _dot_limbs(limbs, limbs)


def dot_integers(one: NumberArray, other: NumberArray) -> int:
    """Return the sum of products of int64 or uint64 values."""
    return _dot_limbs(_limbs(one), _limbs(other))


def _limbs(values: NumberArray) -> NumberArray:
    """Cut integers into rows of 16 bits, as float64. The last row has the sign."""
    bits = max(abs(int(values.min())), abs(int(values.max()))).bit_length()
    rows = np.empty((bits // _LIMB + 1, len(values)))
    for index in range(len(rows) - 1):
        rows[index] = (values >> _LIMB * index) & 0xFFFF
    rows[-1] = values >> _LIMB * (len(rows) - 1)
    return rows


def _dot_limbs(one: NumberArray, other: NumberArray) -> int:
    products = (one @ other.T).tolist()
    return sum(int(x) << _LIMB * (i + j) for i, row in enumerate(products) for j, x in enumerate(row))


def _shifted(value: Fraction, exponent: int) -> Fraction:
    return value * Fraction(2) ** exponent if exponent else value


def root(square: Exact) -> float:
    """Return the square root of a number of any size: inf if it exceeds float64, 0.0 if the number is not positive."""
    if square <= 0:
        return 0.0
    number = Fraction(square)
    half = (number.numerator.bit_length() - number.denominator.bit_length()) // 2
    try:
        return math.ldexp(math.sqrt(number / Fraction(4) ** half), half)
    except OverflowError:
        return math.inf
