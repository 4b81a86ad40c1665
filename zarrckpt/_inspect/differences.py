"""Compare the tensors of two checkpoints, chunk by chunk in bounded memory. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np

from zarrckpt._format.documents import ArrayNode
from zarrckpt._format.grid import Box, Ints
from zarrckpt._inspect.exact import Exact, NumberArray, Scaled, dot, dot_integers, root, scale
from zarrckpt._inspect.stats import blocks, doubles, map_chunks, position_in, read_part, to_reals
from zarrckpt._jobs import Progress
from zarrckpt._read.catalog import Catalog

Comparison = tuple[NumberArray, NumberArray, tuple[Exact, Exact, Exact, Exact]]
"""Absolute and relative differences of elements, and sums: of products, of both squares and of squared differences."""


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


_COUNTS = ("count", "unequal", "not_finite", "new_nan", "gone_nan", "common_nan", "beyond_rounding", "broken")
"""The members of :class:`DifferenceSums` that are added when parts are joined."""


@dataclass
class DifferenceSums:
    """The difference of a part of two tensors. Sums are exact, so parts can be joined in any order."""

    count: int = 0
    unequal: int = 0
    not_finite: int = 0
    new_nan: int = 0
    gone_nan: int = 0
    common_nan: int = 0
    beyond_rounding: int = 0
    broken: int = 0
    """Number of elements whose difference is not finite, without those that are NaN in both."""
    max_abs: float = math.nan
    max_rel: float = math.nan
    max_abs_at: Ints | None = None
    products: Exact = 0
    ones: Exact = 0
    others: Exact = 0
    apart: Exact = 0

    def add(self, one: NumberArray, other: NumberArray, begin: int, box: Box) -> None:
        """Compare elements of a box. ``begin`` is the number of the first element in the box, in C order."""
        for a, b in blocks(one, other):
            self._add_block(a, b, begin, box)
            begin += len(a)

    def _add_block(self, one: NumberArray, other: NumberArray, begin: int, box: Box) -> None:
        self.count += len(one)
        unequal, beyond_rounding = _unequal(one, other)
        self.unequal += int(np.count_nonzero(unequal))
        self.beyond_rounding += int(np.count_nonzero(beyond_rounding))
        indices = None
        if one.dtype.kind in "biu":
            apart, rel, sums = _compare_integers(to_reals(one), to_reals(other))
        else:
            a, b = _vector(one), _vector(other)
            if (indices := self._finite_indices(a, b, unequal)) is not None:
                a, b = a[indices], b[indices]
            if not len(a):
                return
            apart, rel, sums = _compare_floats(a, b, _is_wide(one.dtype) or _is_wide(other.dtype))
        first = int(apart.argmax())
        greatest, position = apart[first].item(), None
        if greatest > 0 and not self.max_abs >= greatest:
            position = position_in(box, begin + (first if indices is None else int(indices[first])))
        self._take(greatest, position, float(rel.max()), sums)

    def _finite_indices(self, a: NumberArray, b: NumberArray, unequal: NumberArray) -> NumberArray | None:
        """Count NaN, and return the indices of the elements that are finite in both, or None if all are."""
        both = np.isfinite(a) & np.isfinite(b)
        if both.all():
            return None
        here, there = np.isnan(a), np.isnan(b)
        self.new_nan += int(np.count_nonzero(there & ~here))
        self.gone_nan += int(np.count_nonzero(here & ~there))
        self.common_nan += int(np.count_nonzero(here & there))
        unequal = unequal & ~both
        self.not_finite += int(np.count_nonzero(unequal))
        self.broken += int(np.count_nonzero(unequal & ~(here & there)))
        return np.flatnonzero(both)

    def _take(self, max_abs: float, position: Ints | None, max_rel: float, sums: Iterable[Exact]) -> None:
        if not self.max_abs >= max_abs:
            self.max_abs, self.max_abs_at = max_abs, position
        elif self.max_abs == max_abs and position is not None and self.max_abs_at is not None:
            self.max_abs_at = min(self.max_abs_at, position)
        self.max_rel = float(np.fmax(self.max_rel, max_rel))
        products, ones, others, apart = sums
        self.products += products
        self.ones += ones
        self.others += others
        self.apart += apart

    def join(self, other: DifferenceSums) -> None:
        for name in _COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        if not math.isnan(other.max_abs):
            sums = other.products, other.ones, other.others, other.apart
            self._take(other.max_abs, other.max_abs_at, other.max_rel, sums)

    def _measures(self) -> Measures:
        counts = self.count, self.unequal, self.not_finite, self.new_nan, self.gone_nan, self.common_nan
        return Measures(*counts, self.max_abs, self.max_rel, self._cosine(), self._rel_norm())

    def difference(self, dtypes: tuple[str, str]) -> TensorDifference:
        return TensorDifference(
            **vars(self._measures()), max_abs_at=self.max_abs_at, beyond_rounding=self.beyond_rounding, dtypes=dtypes
        )

    def group_difference(self, tensors: int, changed: int) -> GroupDifference:
        return GroupDifference(**vars(self._measures()), tensors=tensors, changed=changed)

    def _cosine(self) -> float:
        if self.broken or not self.ones or not self.others:
            return math.nan
        size = min(root(Fraction(self.products) ** 2 / (Fraction(self.ones) * self.others)), 1.0)
        return size if self.products > 0 else -size

    def _rel_norm(self) -> float:
        if self.broken or math.isnan(self.max_abs):
            return math.nan
        if not self.apart:
            return 0.0
        return root(Fraction(self.apart) / self.ones) if self.ones else math.inf


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

    def look(fqn: str, box: Box) -> DifferenceSums:
        found = DifferenceSums()
        found.add(read_part(one, fqn, box), read_part(other, fqn, box), 0, box)
        return found

    sums = {fqn: DifferenceSums() for fqn in fqns}
    for fqn, part in map_chunks(one, {fqn: choose_wider(one, other, fqn) for fqn in sums}, look, progress):
        sums[fqn].join(part)
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


def _compare_integers(a: NumberArray, b: NumberArray) -> Comparison:
    """Compare int64 or uint64 values exactly. A difference can need all 64 bits."""
    apart = (np.maximum(a, b) - np.minimum(a, b)).view(np.uint64)
    size = np.maximum(np.abs(doubles(a)), np.abs(doubles(b)))
    ones = dot_integers(a, a)
    if not apart.any():
        return apart, np.zeros_like(size), (ones, ones, ones, 0)
    sums = dot_integers(a, b), ones, dot_integers(b, b), dot_integers(apart, apart)
    return apart, _ratio(doubles(apart), size), sums


def _compare_floats(a: NumberArray, b: NumberArray, wide: bool) -> Comparison:
    """Compare finite float64 or complex128 values. Without ``wide``, their squares must be in the range of float64."""
    apart, size = np.abs(a - b), np.maximum(np.abs(a), np.abs(b))
    rel = _ratio(apart, size)
    short, exponent = apart, 0
    if wide and not (np.isfinite(apart).all() and np.isfinite(size).all()):
        a4, b4 = a / 4, b / 4
        short, exponent = np.abs(a4 - b4), 2
        beyond = ~np.isfinite(apart) | ~np.isfinite(size)
        rel[beyond] = _ratio(short, np.maximum(np.abs(a4), np.abs(b4)))[beyond]

    def scaled(values: NumberArray) -> Scaled:
        values = values.view(np.float64)
        return scale(values, float(np.abs(values).max())) if wide else (values, 0)

    x, y, (z, more) = scaled(a), scaled(b), scaled(short)
    gap = z, more + exponent
    return apart, rel, (dot(x, y), dot(x, x), dot(y, y), dot(gap, gap))


def _ratio(part: NumberArray, whole: NumberArray) -> NumberArray:
    found: NumberArray = part / (whole + (whole == 0))  # if the whole is zero, the part is zero too
    return found


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


def _is_wide(dtype: np.dtype[Any]) -> bool:
    """Whether a float dtype has the range of float64."""
    return dtype.itemsize == (16 if dtype.kind == "c" else 8)


def _vector(values: NumberArray) -> NumberArray:
    """Return numbers as float64, or complex numbers as complex128."""
    return values.astype(np.complex128) if values.dtype.kind == "c" else doubles(values)
