"""What the numbers in a tensor look like, and how those of two checkpoints differ: chunk by chunk. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np

from zarrckpt._format.documents import ArrayNode
from zarrckpt._format.grid import Box
from zarrckpt._jobs import DEFAULT_MAX_INFLIGHT_BYTES, BytesBudget, Progress, Tally, run_jobs
from zarrckpt._read.catalog import Catalog

P = TypeVar("P")
NumberArray = np.ndarray[Any, np.dtype[Any]]

_BLOCK = 1 << 18
"""So many elements are looked at at once: as doubles they stay in the processor's cache."""
_CHUNKS_AT_ONCE = 8


@dataclass(frozen=True)
class TensorStats:
    """The numbers of one tensor; of complex ones, of their absolute values. NaN where there is nothing to say.

    ``min``, ``max``, ``mean``, ``std`` (of the population), ``norm`` (the root of the sum of squares) are those of the
    finite elements.
    """

    count: int = 0
    nan: int = 0
    inf: int = 0
    zeros: int = 0
    min: float = math.nan
    max: float = math.nan
    mean: float = math.nan
    std: float = math.nan
    norm: float = math.nan


@dataclass(frozen=True)
class TensorDifference:
    """How one tensor differs between two checkpoints; NaN where there is nothing to say.

    ``unequal`` elements have other bits; where the dtypes differ, they are other numbers (NaN equals NaN, 0.0 is not
    -0.0). ``max_abs`` and ``max_rel`` are the greatest difference, and that over the greater of the two absolute
    values, of elements that are finite in both; ``cosine`` is that of the angle between both tensors as vectors;
    ``rel_norm`` is the norm of their difference over the norm of the first. These measures leave out ``not_finite`` of
    the unequal elements: those that are NaN or infinite in one tensor or in both.

    ``dtypes`` are those of both tensors. Where they differ, ``beyond_rounding`` of the unequal elements are not
    explained by a cast: neither value is the other one rounded to nearest even, or one is finite and the other is not.
    In tensors of one dtype, that is all unequal elements.
    """

    count: int
    unequal: int
    not_finite: int
    max_abs: float
    max_rel: float
    cosine: float
    rel_norm: float
    beyond_rounding: int
    dtypes: tuple[str, str]

    @property
    def equal(self) -> bool:
        """Whether both tensors have one dtype and the same bits."""
        return not self.unequal and self.dtypes[0] == self.dtypes[1]


@dataclass
class Moments:
    """Counts and moments of a part of a tensor. Means are shifted as parts are merged, so that nothing cancels."""

    count: int = 0
    nan: int = 0
    inf: int = 0
    zeros: int = 0
    finite: int = 0
    low: float = math.inf
    high: float = -math.inf
    mean: float = 0.0
    squares: float = 0.0
    """The sum of the squared distances from the mean."""

    @classmethod
    def of(cls, values: NumberArray) -> Moments:
        finite, nan = values, 0
        if np.count_nonzero(is_finite := np.isfinite(values)) < len(values):
            finite, nan = values[is_finite], int(np.count_nonzero(np.isnan(values)))
        zeros = len(values) - int(np.count_nonzero(values))
        found = cls(len(values), nan, len(values) - nan - len(finite), zeros, len(finite))
        if len(finite):
            found.low, found.high, found.mean = float(finite.min()), float(finite.max()), float(finite.mean())
            apart = finite - found.mean
            found.squares = float(apart @ apart)
        return found

    def add(self, other: Moments) -> None:
        self.count += other.count
        self.nan += other.nan
        self.inf += other.inf
        self.zeros += other.zeros
        self.low, self.high = min(self.low, other.low), max(self.high, other.high)
        if not other.finite:
            return
        finite = self.finite + other.finite
        apart = other.mean - self.mean
        self.squares += other.squares + apart * apart * self.finite * other.finite / finite
        self.mean += apart * other.finite / finite
        self.finite = finite

    def stats(self) -> TensorStats:
        if not self.finite:
            return TensorStats(self.count, self.nan, self.inf, self.zeros)
        std = math.sqrt(self.squares / self.finite)
        norm = math.sqrt(self.squares + self.mean * self.mean * self.finite)
        return TensorStats(self.count, self.nan, self.inf, self.zeros, self.low, self.high, self.mean, std, norm)


def tensor_stats(catalog: Catalog, fqns: Iterable[str], progress: Progress | None = None) -> dict[str, TensorStats]:
    """Look at every number of some tensors, in bounded memory. Errors as in ``Checkpoint.read``."""

    def look(fqn: str, box: Box) -> Moments:
        moments = Moments()
        for (block,) in blocks(read_part(catalog, fqn, box)):
            moments.add(Moments.of(doubles(block)))
        return moments

    found = {fqn: Moments() for fqn in fqns}
    for fqn, moments in by_chunks(catalog, {fqn: catalog.root.tensors[fqn] for fqn in found}, look, progress):
        found[fqn].add(moments)
    return {fqn: moments.stats() for fqn, moments in found.items()}


@dataclass
class Sums:
    """What a part of two tensors adds to their difference."""

    count: int = 0
    unequal: int = 0
    not_finite: int = 0
    beyond_rounding: int = 0
    max_abs: float = math.nan
    max_rel: float = math.nan
    products: float = 0.0
    ones: float = 0.0
    others: float = 0.0
    apart: float = 0.0

    def add(self, one: NumberArray, other: NumberArray) -> None:
        self.count += one.size
        unequal, beyond_rounding = _unequal(one, other)
        a, b = _vector(one), _vector(other)
        both = np.isfinite(a) & np.isfinite(b)
        self.unequal += int(np.count_nonzero(unequal))
        self.not_finite += int(np.count_nonzero(unequal & ~both))
        self.beyond_rounding += int(np.count_nonzero(beyond_rounding))
        a, b = a[both], b[both]
        if len(a):
            apart, size = np.abs(a - b), np.maximum(np.abs(a), np.abs(b))
            rel = np.divide(apart, size, out=np.zeros_like(apart), where=size > 0)
            self.merge(float(apart.max()), float(rel.max()))
            self.apart += float(apart @ apart)
            self.products += float(np.vdot(a, b).real)
            self.ones += float(np.vdot(a, a).real)
            self.others += float(np.vdot(b, b).real)

    def merge(self, max_abs: float, max_rel: float) -> None:
        self.max_abs = float(np.fmax(self.max_abs, max_abs))
        self.max_rel = float(np.fmax(self.max_rel, max_rel))

    def join(self, other: Sums) -> None:
        self.count += other.count
        self.unequal += other.unequal
        self.not_finite += other.not_finite
        self.beyond_rounding += other.beyond_rounding
        self.merge(other.max_abs, other.max_rel)
        self.products += other.products
        self.ones += other.ones
        self.others += other.others
        self.apart += other.apart

    def difference(self, dtypes: tuple[str, str]) -> TensorDifference:
        length = math.sqrt(self.ones) * math.sqrt(self.others)
        cosine = self.products / length if length else math.nan
        measures = self.max_abs, self.max_rel, cosine, self._rel_norm()
        return TensorDifference(self.count, self.unequal, self.not_finite, *measures, self.beyond_rounding, dtypes)

    def _rel_norm(self) -> float:
        if not self.apart:
            return math.nan if math.isnan(self.max_abs) else 0.0
        return math.sqrt(self.apart) / math.sqrt(self.ones) if self.ones else math.inf


def tensor_differences(
    one: Catalog, other: Catalog, fqns: Iterable[str], progress: Progress | None = None
) -> dict[str, TensorDifference]:
    """Compare tensors that :func:`comparable` takes, whatever their chunks; memory is bounded."""

    def look(fqn: str, box: Box) -> Sums:
        sums = Sums()
        for a, b in blocks(read_part(one, fqn, box), read_part(other, fqn, box)):
            sums.add(a, b)
        return sums

    found = {fqn: Sums() for fqn in fqns}
    for fqn, sums in by_chunks(one, {fqn: wider(one, other, fqn) for fqn in found}, look, progress):
        found[fqn].join(sums)
    return {fqn: sums.difference(dtypes_of(one, other, fqn)) for fqn, sums in found.items()}


def comparable(one: ArrayNode, other: ArrayNode) -> bool:
    """Whether two tensors have one shape, and numbers that can be compared: one dtype, or two of a floating kind."""
    a, b = one.dtype, other.dtype
    return one.grid.shape == other.grid.shape and (a == b or (a.kind == b.kind and a.kind in ("float", "complex")))


def wider(one: Catalog, other: Catalog, fqn: str) -> ArrayNode:
    """Of two tensors the one whose elements take more memory; the first, where they take as much."""
    nodes = one.root.tensors[fqn], other.root.tensors[fqn]
    return max(nodes, key=lambda node: node.dtype.itemsize)


def dtypes_of(one: Catalog, other: Catalog, fqn: str) -> tuple[str, str]:
    return one.root.tensors[fqn].dtype.name, other.root.tensors[fqn].dtype.name


def by_chunks(
    catalog: Catalog, nodes: Mapping[str, ArrayNode], look: Callable[[str, Box], P], progress: Progress | None
) -> list[tuple[str, P]]:
    """What ``look`` makes of the box of every chunk of some nodes: as many at a time as fit in memory.

    There is room for two tensors of the nodes' dtypes.
    """
    memory = BytesBudget(DEFAULT_MAX_INFLIGHT_BYTES)
    tally = Tally(sum(node.nbytes for node in nodes.values()), progress)

    def job(fqn: str, box: Box) -> tuple[str, P]:
        nbytes = box.size * nodes[fqn].dtype.itemsize
        # Sums of doubles can be beyond doubles: then they are inf, or NaN, and no warning says more.
        with memory.hold(2 * nbytes), np.errstate(over="ignore", invalid="ignore"):
            found = look(fqn, box)
        tally.add(nbytes)
        return fqn, found

    jobs = (
        partial(job, fqn, node.grid.chunk_box(chunk))
        for fqn, node in nodes.items()
        for chunk in node.grid.chunks_of(node.grid.whole)
    )
    with catalog.explaining_damage():
        return run_jobs(jobs, min(_CHUNKS_AT_ONCE, catalog.store.max_concurrency))


def read_part(catalog: Catalog, fqn: str, box: Box) -> NumberArray:
    node = catalog.root.tensors[fqn]
    return catalog.stored(node).read(box).reshape(-1).view(node.dtype.numpy)


def blocks(*arrays: NumberArray) -> Iterator[tuple[NumberArray, ...]]:
    for begin in range(0, len(arrays[0]), _BLOCK):
        yield tuple(array[begin : begin + _BLOCK] for array in arrays)


def _unequal(one: NumberArray, other: NumberArray) -> tuple[NumberArray, NumberArray]:
    """Which elements differ, and which of those by more than the rounding of a cast."""
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
    return np.logical_or.reduce(differ, axis=1), np.logical_or.reduce(apart, axis=1)


def _floats_in_rows(values: NumberArray) -> NumberArray:
    """Floating numbers one in a row; of complex ones both parts in a row."""
    dtype = values.real.dtype
    return values.view(dtype).reshape(len(values), -1)


def _differ(one: NumberArray, other: NumberArray) -> NumberArray:
    """Where numbers of one dtype are not the same, NaN apart."""
    words = np.dtype(f"u{one.dtype.itemsize}")
    differ: NumberArray = (one.view(words) != other.view(words)) & ~(np.isnan(one) & np.isnan(other))
    return differ


def _is_cast(values: NumberArray, found: NumberArray) -> NumberArray:
    """Where ``found`` is what a cast makes of ``values``: directly or, as some libraries do, by way of float32."""
    same = ~_differ(values.astype(found.dtype), found)
    if values.dtype == np.float64:
        same |= ~_differ(values.astype(np.float32).astype(found.dtype), found)
    return same


def _vector(values: NumberArray) -> NumberArray:
    """Numbers as doubles; complex ones as complex ones of doubles."""
    return values.astype(np.complex128) if values.dtype.kind == "c" else doubles(values)


def doubles(values: NumberArray) -> NumberArray:
    if values.dtype.kind == "c":
        return np.abs(values).astype(np.float64)
    with np.errstate(invalid="ignore"):
        return values.astype(np.float64)


@dataclass(frozen=True)
class Difference:
    """How a checkpoint differs from another one, see ``Checkpoint.diff``. True where it does not."""

    only_here: tuple[str, ...]
    only_there: tuple[str, ...]
    changed: dict[str, tuple[str, str]]
    """Values that differ, and tensors whose numbers cannot be compared, as texts: here and there."""
    tensors: dict[str, TensorDifference]
    """The tensors that both have with one shape, and with one dtype or two of a floating kind."""

    def __bool__(self) -> bool:
        some = self.only_here or self.only_there or self.changed
        return not some and all(item.equal for item in self.tensors.values())
