"""Compare the tensors of two checkpoints, chunk by chunk in bounded memory. No torch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from operator import add
from typing import Any

import numpy as np

from zarrckpt._format.documents import ArrayNode
from zarrckpt._format.grid import Box, Ints
from zarrckpt._inspect.stats import blocks, doubles, gather_chunks, position_in, read_part, to_reals
from zarrckpt._inspect.sums import NumberArray, dot, root, shift
from zarrckpt._jobs import Progress
from zarrckpt._read.catalog import Catalog


@dataclass(frozen=True)
class Measures:
    """The distance between numbers of two checkpoints A and B. A measure is NaN if it is not defined.

    ``unequal`` counts the elements with different bits. If the dtypes differ, it counts different numbers, and NaN
    equals NaN, but 0.0 differs from -0.0. ``not_finite`` counts the unequal elements that are NaN or infinite in A or
    B. ``new_nan`` counts the elements that are NaN only in B, ``gone_nan`` only in A, ``common_nan`` in both.

    ``max_abs`` is the largest difference of elements that are finite in both, an exact integer for integers and bool.
    ``max_rel`` is the largest ratio of the difference to the larger of the two absolute values.

    ``cosine`` is the cosine of the angle between A and B as vectors. ``rel_norm`` is the norm of their difference over
    the norm of A, infinite if A is zero. Both are NaN if any element became or ceased to be NaN or infinite.
    """

    count: int
    unequal: int
    not_finite: int
    new_nan: int
    gone_nan: int
    common_nan: int
    max_abs: float
    max_rel: float
    cosine: float
    rel_norm: float


@dataclass(frozen=True)
class TensorDifference(Measures):
    """The difference of one tensor between two checkpoints, see :class:`Measures`.

    ``max_abs_at`` is the position of the element with the largest difference, the first one in C order. It is None if
    ``max_abs`` is not above 0.

    ``dtypes`` are the dtypes of both tensors. ``beyond_rounding`` counts the unequal elements that a cast does not
    explain: neither value is the other rounded to nearest even, or only one of them is finite. If the dtypes are equal,
    it counts all unequal elements.
    """

    max_abs_at: Ints | None
    beyond_rounding: int
    dtypes: tuple[str, str]

    @property
    def equal(self) -> bool:
        """Whether both tensors have one dtype and the same bits."""
        return not self.unequal and self.dtypes[0] == self.dtypes[1]


@dataclass(frozen=True)
class GroupDifference(Measures):
    """The difference of a group of ``tensors`` tensors as one vector. ``changed`` of them are not equal."""

    tensors: int
    changed: int


@dataclass(frozen=True)
class Difference:
    """The difference between two checkpoints, see :func:`zarrckpt.diff`. True if they are equal."""

    only_here: tuple[str, ...]
    only_there: tuple[str, ...]
    changed: dict[str, tuple[str, str]]
    """Name -> (text here, text there). Values that differ, tensors whose numbers cannot be compared, and names that are
    a tensor on one side and a value on the other. For a long value, the texts show the first element that differs, and
    its path."""
    tensors: dict[str, TensorDifference]
    """The tensors that both checkpoints have with one shape, and with one dtype or two dtypes of a floating kind."""
    groups: dict[str, GroupDifference] = field(default_factory=dict)
    """Totals of :attr:`tensors` by the first part of their names."""

    def __bool__(self) -> bool:
        some = self.only_here or self.only_there or self.changed
        return not some and all(item.equal for item in self.tensors.values())


_COUNTS = ("count", "unequal", "not_finite", "new_nan", "gone_nan", "common_nan")


class DifferenceSums:
    """The difference of a part of two tensors. Parts can be joined in any order."""

    def __init__(self) -> None:
        self.max_abs = self.max_rel = math.nan
        self.max_abs_at: Ints | None = None
        self._totals: Counter[str] = Counter()
        """The counts of :class:`TensorDifference`, and of elements that became or ceased to be NaN or infinite."""
        self._sums = (Fraction(),) * 4
        """Sums of products, of the squares of both tensors, and of the squares of differences."""

    def add(self, one: NumberArray, other: NumberArray, begin: int, box: Box) -> None:
        """Compare elements of a box. ``begin`` is the number of the first element in the box, in C order."""
        for a, b in blocks(one, other):
            self._add_block(a, b, begin, box)
            begin += len(a)

    def _add_block(self, one: NumberArray, other: NumberArray, begin: int, box: Box) -> None:
        unequal, beyond_rounding = _unequal(one, other)
        self._totals["count"] += len(one)
        self._count(unequal=unequal, beyond_rounding=beyond_rounding)
        numbers, indices = (one, other), None
        if one.dtype.kind not in "biu":
            a, b = numbers = _vector(one), _vector(other)
            both = np.isfinite(a) & np.isfinite(b)
            if not both.all():
                here, there, differ = np.isnan(a), np.isnan(b), unequal & ~both
                self._count(new_nan=there & ~here, gone_nan=here & ~there, common_nan=here & there)
                self._count(not_finite=differ, broken=differ & ~(here & there))
                indices = np.flatnonzero(both)
                numbers = a[indices], b[indices]
        if not len(numbers[0]):
            return
        apart, max_rel, sums = _compare(*numbers)
        max_abs, position = apart.max().item(), None
        if max_abs > 0 and not self.max_abs >= max_abs:
            first = int(apart.argmax())
            position = position_in(box, begin + (first if indices is None else int(indices[first])))
        self._take(max_abs, position, max_rel, sums)

    def _count(self, **masks: NumberArray) -> None:
        self._totals.update({name: int(np.count_nonzero(mask)) for name, mask in masks.items()})

    def _take(self, max_abs: float, position: Ints | None, max_rel: float, sums: Sequence[Fraction]) -> None:
        if not self.max_abs >= max_abs:
            self.max_abs, self.max_abs_at = max_abs, position
        elif self.max_abs == max_abs and position is not None and self.max_abs_at is not None:
            self.max_abs_at = min(self.max_abs_at, position)
        self.max_rel = float(np.fmax(self.max_rel, max_rel))
        self._sums = tuple(map(add, self._sums, sums))

    def join(self, other: DifferenceSums) -> None:
        self._totals.update(other._totals)
        if not math.isnan(other.max_abs):
            self._take(other.max_abs, other.max_abs_at, other.max_rel, other._sums)

    def _measures(self) -> dict[str, Any]:
        products, ones, others, apart = self._sums
        cosine = rel_norm = math.nan
        if not self._totals["broken"] and ones and others:
            size = min(root(products**2 / (ones * others)), 1.0)
            cosine = size if products > 0 else -size
        if not self._totals["broken"] and not math.isnan(self.max_abs):
            rel_norm = root(apart / ones) if ones else math.inf if apart else 0.0
        measures = {"max_abs": self.max_abs, "max_rel": self.max_rel, "cosine": cosine, "rel_norm": rel_norm}
        return {name: self._totals[name] for name in _COUNTS} | measures

    def difference(self, dtypes: tuple[str, str]) -> TensorDifference:
        beyond = self._totals["beyond_rounding"]
        return TensorDifference(**self._measures(), max_abs_at=self.max_abs_at, beyond_rounding=beyond, dtypes=dtypes)

    def group_difference(self, tensors: int, changed: int) -> GroupDifference:
        return GroupDifference(**self._measures(), tensors=tensors, changed=changed)


def group_differences(
    sums: Mapping[str, DifferenceSums], found: Mapping[str, TensorDifference]
) -> dict[str, GroupDifference]:
    """Return totals by the first part of the tensors' names."""
    totals: dict[str, DifferenceSums] = {}
    members: dict[str, list[str]] = {}
    for fqn, part in sums.items():
        group = fqn.partition(".")[0]
        members.setdefault(group, []).append(fqn)
        totals.setdefault(group, DifferenceSums()).join(part)
    return {
        group: totals[group].group_difference(len(fqns), sum(not found[fqn].equal for fqn in fqns))
        for group, fqns in members.items()
    }


def tensor_differences(
    one: Catalog, other: Catalog, fqns: Iterable[str], progress: Progress | None = None
) -> tuple[dict[str, TensorDifference], dict[str, GroupDifference]]:
    """Compare tensors for which :func:`comparable` is true, in bounded memory. Their chunks may differ.

    Returns the differences, and the totals of groups.
    """

    def look(found: DifferenceSums, fqn: str, box: Box) -> None:
        found.add(read_part(one, fqn, box), read_part(other, fqn, box), 0, box)

    nodes = {fqn: choose_wider(one, other, fqn) for fqn in fqns}
    sums = gather_chunks(one, nodes, lambda _: DifferenceSums(), look, lambda _, part: part, progress)
    found = {fqn: part.difference(dtypes_of(one, other, fqn)) for fqn, part in sums.items()}
    return found, group_differences(sums, found)


def comparable(one: ArrayNode, other: ArrayNode) -> bool:
    """Whether two tensors have one shape and comparable numbers: one dtype, or two dtypes of a floating kind."""
    a, b = one.dtype, other.dtype
    return one.grid.shape == other.grid.shape and (a == b or (a.kind == b.kind and a.kind in ("float", "complex")))


def choose_wider(one: Catalog, other: Catalog, fqn: str) -> ArrayNode:
    """Return the tensor with the larger elements, or the first one if they are equally large."""
    nodes = one.root.tensors[fqn], other.root.tensors[fqn]
    return max(nodes, key=lambda node: node.dtype.itemsize)


def dtypes_of(one: Catalog, other: Catalog, fqn: str) -> tuple[str, str]:
    return one.root.tensors[fqn].dtype.name, other.root.tensors[fqn].dtype.name


def _compare(a: NumberArray, b: NumberArray) -> tuple[NumberArray, float, tuple[Fraction, ...]]:
    """Compare finite float64 or complex128 values, or integers.

    Returns the absolute differences, exact for integers, the largest relative one, and the sums of
    :class:`DifferenceSums`.
    """
    if a.dtype.kind in "biu":
        a, b = to_reals(a), to_reals(b)
        gaps = (np.maximum(a, b) - np.minimum(a, b)).view(np.uint64)  # a difference can need all 64 bits
        a, b, apart = doubles(a), doubles(b), doubles(gaps)
    else:
        gaps = apart = np.abs(a - b)
    if not (max_abs := float(apart.max())):
        ones = dot(a.view(np.float64), a.view(np.float64))
        return gaps, 0.0, (ones, ones, ones, Fraction())
    exponent, size = 0, np.maximum(np.abs(a), np.abs(b))
    if not math.isfinite(max_abs + float(size.max())):  # beyond float64
        exponent, a, b = 4, a / 4, b / 4
        apart, size = np.abs(a - b), np.maximum(np.abs(a), np.abs(b))
    max_rel = float((apart / np.maximum(size, _LEAST)).max())
    x, y = a.view(np.float64), b.view(np.float64)
    return (
        gaps,
        max_rel,
        tuple(shift(total, exponent) for total in (dot(x, y), dot(x, x), dot(y, y), dot(apart, apart))),
    )


_LEAST = 5e-324
"""The smallest positive float. Where both numbers are zero, their difference is divided by it."""


def _unequal(one: NumberArray, other: NumberArray) -> tuple[NumberArray, NumberArray]:
    """Return two masks: the elements that differ, and those that differ by more than the rounding of a cast."""
    differ: NumberArray
    apart: NumberArray
    if one.dtype == other.dtype:
        words = np.dtype(f"u{min(one.dtype.itemsize, 8)}")
        differ = apart = (one.view(words) != other.view(words)).reshape(len(one), -1)
    else:
        one, other = _floats_in_rows(one), _floats_in_rows(other)
        a, b = doubles(one), doubles(other)
        differ = _differ(a, b)
        rounded = _is_cast(one, other) | _is_cast(other, one)
        apart = differ & (~rounded | (np.isfinite(a) != np.isfinite(b)))
    return _any_column(differ), _any_column(apart)


def _any_column(found: NumberArray) -> NumberArray:
    """Return a mask of the rows in which any column is true. There are one or two columns."""
    either: NumberArray = found[:, 0] if found.shape[1] == 1 else found[:, 0] | found[:, 1]
    return either


def _floats_in_rows(values: NumberArray) -> NumberArray:
    """Return floating numbers as rows of one number, or complex numbers as rows of two."""
    dtype = values.real.dtype
    return values.view(dtype).reshape(len(values), -1)


def _differ(one: NumberArray, other: NumberArray) -> NumberArray:
    """Return a mask of the numbers that differ, both of one dtype. NaN equals NaN."""
    words = np.dtype(f"u{one.dtype.itemsize}")
    differ: NumberArray = (one.view(words) != other.view(words)) & ~(np.isnan(one) & np.isnan(other))
    return differ


def _is_cast(values: NumberArray, found: NumberArray) -> NumberArray:
    """Return a mask of the elements for which ``found`` is the cast of ``values``.

    float64 may be cast directly, or through float32 as some libraries do.
    """
    same = ~_differ(values.astype(found.dtype), found)
    if values.dtype == np.float64:
        same |= ~_differ(values.astype(np.float32).astype(found.dtype), found)
    return same


def _vector(values: NumberArray) -> NumberArray:
    """Return numbers as float64, or complex numbers as complex128."""
    return values.astype(np.complex128) if values.dtype.kind == "c" else doubles(values)
