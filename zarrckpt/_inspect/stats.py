"""Compute statistics of tensors, chunk by chunk in bounded memory. No torch."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Protocol, Self, TypeVar

import numpy as np

from zarrckpt._format.documents import ArrayNode
from zarrckpt._format.grid import Box, Ints, unravel
from zarrckpt._inspect.sums import NumberArray, root, sum_powers
from zarrckpt._jobs import DEFAULT_MAX_INFLIGHT_BYTES, ByteCounter, BytesBudget, Progress, run_jobs
from zarrckpt._read.catalog import Catalog

P = TypeVar("P", bound="Part")
R = TypeVar("R")
K = TypeVar("K", bound=Hashable)

_BLOCK = 1 << 13
"""Elements per block. As float64 they fit into the CPU cache, and BLAS starts no threads for this size."""
_CHUNKS_AT_ONCE = 8


@dataclass(frozen=True)
class TensorStats:
    """The statistics of one tensor. For complex numbers, those of their absolute values.

    ``min``, ``max``, ``mean``, ``std`` (of the population) and ``norm`` (the root of the sum of squares) are those of
    the finite elements, and NaN if there are none. ``min`` and ``max`` of integers and bool are exact integers. An
    absolute value beyond the range of float64 counts as the largest float64 if the complex number is finite.
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


@dataclass
class Moments:
    """Counts and moments of a part of a tensor. Parts can be added in any order."""

    count: int = 0
    nan: int = 0
    inf: int = 0
    zeros: int = 0
    finite: int = 0
    low: float = math.inf
    high: float = -math.inf
    total: Fraction = Fraction()
    squares: Fraction = Fraction()

    def add(self, values: NumberArray) -> None:
        """Add values, which are as :func:`to_reals` returns them."""
        for (block,) in blocks(values):
            self._add_block(block)

    def _add_block(self, values: NumberArray) -> None:
        finite = values
        if values.dtype.kind == "f" and np.count_nonzero(is_finite := np.isfinite(values)) < len(values):
            finite, nan = values[is_finite], int(np.count_nonzero(np.isnan(values)))
            self.nan += nan
            self.inf += len(values) - len(finite) - nan
        self.count += len(values)
        self.zeros += len(values) - int(np.count_nonzero(values))
        if len(finite):
            low, high = finite.min().item(), finite.max().item()
            self._add_finite(len(finite), low, high, *sum_powers(finite, low, high))

    def _add_finite(self, finite: int, low: float, high: float, total: Fraction, squares: Fraction) -> None:
        self.finite += finite
        self.low, self.high = min(self.low, low), max(self.high, high)
        self.total += total
        self.squares += squares

    def join(self, other: Moments) -> None:
        self.count += other.count
        self.nan += other.nan
        self.inf += other.inf
        self.zeros += other.zeros
        self._add_finite(other.finite, other.low, other.high, other.total, other.squares)

    @property
    def mean(self) -> Fraction:
        """The mean of the finite elements. There must be at least one."""
        return self.total / self.finite

    @property
    def std(self) -> float:
        """The standard deviation of the finite elements. 0.0 for a constant, whose sums are rounded."""
        return 0.0 if self.low == self.high else root(self.squares / self.finite - self.mean**2)

    def stats(self) -> TensorStats:
        if not self.finite:
            return TensorStats(self.count, self.nan, self.inf, self.zeros)
        mean = float(self.low if self.low == self.high else self.mean)
        found = self.low, self.high, mean, self.std, root(self.squares)
        return TensorStats(self.count, self.nan, self.inf, self.zeros, *found)


def tensor_stats(catalog: Catalog, fqns: Iterable[str], progress: Progress | None = None) -> dict[str, TensorStats]:
    """Compute the statistics of tensors. Reads all chunks, in bounded memory. Errors as in ``Checkpoint.read``."""

    def look(found: Moments, fqn: str, box: Box) -> None:
        for (block,) in blocks(read_part(catalog, fqn, box)):
            found.add(to_reals(block))

    nodes = {fqn: catalog.root.tensors[fqn] for fqn in fqns}
    return gather_chunks(catalog, nodes, lambda _: Moments(), look, lambda _, found: found.stats(), progress)


class Part(Protocol):
    """The numbers of a part of a tensor."""

    def join(self, other: Self, /) -> None: ...


def gather_chunks(
    catalog: Catalog,
    nodes: Mapping[K, ArrayNode],
    new: Callable[[K], P],
    look: Callable[[P, K, Box], None],
    finish: Callable[[K, P], R],
    progress: Progress | None,
) -> dict[K, R]:
    """Call ``look`` for the box of every chunk of the nodes, in parallel, and join the parts of each node.

    At most 8 calls run at a time, and fewer if the memory bound is reached. Each call may take memory for its box in
    two tensors of the node's dtype. Returns what ``finish`` returns for the joined parts. It is called as soon as a
    node is complete.
    """
    budget, lock = BytesBudget(DEFAULT_MAX_INFLIGHT_BYTES), threading.Lock()
    tally = ByteCounter(sum(node.nbytes for node in nodes.values()), progress)
    left = {key: node.grid.num_chunks for key, node in nodes.items()}
    parts: dict[K, P] = {}
    found = {key: finish(key, new(key)) for key, node in nodes.items() if not node.nbytes}

    def job(key: K, box: Box) -> None:
        nbytes = box.size * nodes[key].dtype.itemsize
        part = new(key)
        # Results beyond the range of float64 are inf or NaN, and numpy's warning would add no information.
        with budget.hold(2 * nbytes), np.errstate(over="ignore", invalid="ignore"):
            look(part, key, box)
            with lock:
                parts.setdefault(key, new(key)).join(part)
                left[key] -= 1
                if not left[key]:
                    found[key] = finish(key, parts.pop(key))
        tally.add(nbytes)

    jobs = (
        partial(job, key, node.grid.chunk_box(chunk))
        for key, node in nodes.items()
        if node.nbytes
        for chunk in node.grid.chunks_of(node.grid.whole)
    )
    run_jobs(jobs, min(_CHUNKS_AT_ONCE, catalog.store.max_concurrency))
    return {key: found[key] for key in nodes}


def read_part(catalog: Catalog, fqn: str, box: Box) -> NumberArray:
    """Read a box of a tensor as a flat array. Errors as in ``Checkpoint.read``."""
    node = catalog.root.tensors[fqn]
    # Here, because a comparison reads two checkpoints, and an error must name the damaged one.
    with catalog.explaining_damage():
        return catalog.stored_array(node).read(box).reshape(-1).view(node.dtype.numpy)


def blocks(*arrays: NumberArray, size: int = _BLOCK) -> Iterator[tuple[NumberArray, ...]]:
    """Cut arrays of one length into blocks of ``size`` elements."""
    for begin in range(0, len(arrays[0]), size):
        yield tuple(array[begin : begin + size] for array in arrays)


def to_reals(values: NumberArray) -> NumberArray:
    """Return floats as float64, integers and bool as int64 or uint64, and complex numbers as absolute values."""
    kind = values.dtype.kind
    if kind in "biu":
        return values.astype(np.uint64 if kind == "u" else np.int64)
    if kind != "c":
        return doubles(values)
    numbers = values.astype(np.complex128)
    size = np.abs(numbers)
    if np.isinf(size).any():
        size[np.isinf(size) & np.isfinite(numbers)] = np.finfo(np.float64).max
    return size


def doubles(values: NumberArray) -> NumberArray:
    """Return real numbers as float64."""
    with np.errstate(invalid="ignore"):
        return values.astype(np.float64)


def position_in(box: Box, number: int) -> Ints:
    """Return the position in the tensor of a box's element, from its number in the box in C order."""
    return tuple(o + i for o, i in zip(box.offset, unravel(number, box.shape), strict=True))
