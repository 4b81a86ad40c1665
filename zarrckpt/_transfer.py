"""Run chunk jobs: many at a time, within a memory bound, first failure wins."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from zarrckpt import _codec
from zarrckpt._errors import CorruptCheckpointError, ObjectNotFoundError
from zarrckpt._grid import Box, Grid, Ints, intersect, ravel, unravel_f

if TYPE_CHECKING:
    from zarrckpt._codec import RawArray, Target
    from zarrckpt._documents import ArrayNode
    from zarrckpt._store import Store

T = TypeVar("T")

Progress = Callable[[int, int], None]
"""Called with the bytes done and the bytes in all, one call at a time."""

DEFAULT_MAX_INFLIGHT_BYTES = 512 << 20
DEFAULT_CONCURRENCY = 16
READ_BYTES = 16 << 20
"""Neighbouring subchunks are fetched together up to this many bytes a request."""


def check_limits(least: int = 1, /, **limits: int) -> None:
    """Refuse limits that are no integers, or too small. Raises TypeError and ValueError naming the argument."""
    for name, value in limits.items():
        if not isinstance(value, int):
            raise TypeError(f"{name} must be an int, got {value!r} of type {type(value).__name__}")
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")


class BytesBudget:
    """A semaphore in bytes. A job larger than the whole budget waits until it is alone."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._used = 0
        self._changed = threading.Condition()

    @contextmanager
    def hold(self, nbytes: int) -> Iterator[None]:
        need = min(nbytes, self._limit)
        with self._changed:
            self._changed.wait_for(lambda: self._used + need <= self._limit)
            self._used += need
        try:
            yield
        finally:
            with self._changed:
                self._used -= need
                self._changed.notify_all()


def run(jobs: Iterable[Callable[[], T]], concurrency: int) -> list[T]:
    """Run jobs on threads; return their results in order. The first error stops what has not begun."""
    results: dict[int, T] = {}
    pending: dict[Future[T], int] = {}

    def collect(done: set[Future[T]]) -> None:
        for future in done:
            results[pending.pop(future)] = future.result()

    pool = ThreadPoolExecutor(concurrency, thread_name_prefix="zarrckpt")
    try:
        for number, job in enumerate(jobs):
            # Jobs are drawn as threads come free: a generator then never holds more than these alive.
            if len(pending) >= 2 * concurrency:
                collect(wait(pending, return_when=FIRST_COMPLETED).done)
            pending[pool.submit(job)] = number
        while pending:
            collect(wait(pending, return_when=FIRST_COMPLETED).done)
    finally:
        pool.shutdown(cancel_futures=True)
    return [results[i] for i in range(len(results))]


@dataclass(frozen=True)
class ChunkRead:
    """Subchunks of one chunk that a target needs: neighbours in storage, fetched with one request."""

    node: ArrayNode
    chunk: Ints
    first: int
    count: int
    box: Box
    target: Target
    table: RawArray

    @property
    def nbytes(self) -> int:
        return self.count * _codec.subchunk_bytes(self.node.grid, self.node.dtype.itemsize)


def plan_reads(node: ArrayNode, box: Box, target: Target, checksums: RawArray) -> Iterator[ChunkRead]:
    """The requests that fill ``target`` (raw elements, the box's shape) with a box of a stored array.

    ``checksums`` is the array's part of the checksum table. Nothing outside the box is fetched but what shares a
    subchunk with it.
    """
    grid = node.grid
    longest = max(1, READ_BYTES // _codec.subchunk_bytes(grid, node.dtype.itemsize))
    for chunk in grid.chunks_of(box):
        for first, count in _codec.runs(places_in(grid, chunk, box), longest):
            yield chunk_read(node, chunk, (first, count), box, target, checksums)


def places_in(grid: Grid, chunk: Ints, box: Box) -> list[int]:
    """The places, counted from a chunk object's begin, of its subchunks that share elements with a box, sorted."""
    origin = tuple(c * n for c, n in zip(chunk, grid.chunk_shape, strict=True))
    shared = intersect(Box(origin, grid.chunk_shape), box)
    if shared is None:
        return []
    inside = Box(tuple(s - o for s, o in zip(shared.offset, origin, strict=True)), shared.shape)
    return sorted(_codec.subchunk_place(grid, cell) for cell in grid.subchunks_of(inside))


def chunk_read(
    node: ArrayNode, chunk: Ints, run: tuple[int, int], box: Box, target: Target, checksums: RawArray
) -> ChunkRead:
    """The request for a run (first place, count) of one chunk's subchunks."""
    return ChunkRead(node, chunk, *run, box, target, chunk_checksums(node, chunk, checksums))


def chunk_checksums(node: ArrayNode, chunk: Ints, checksums: RawArray) -> RawArray:
    """One chunk's part of an array's part of the checksum table: its subchunks in C order."""
    per_chunk = math.prod(node.grid.sub_counts)
    first = node.grid.chunk_number(chunk) * per_chunk
    return checksums[first : first + per_chunk]


def read_chunk(store: Store, read: ChunkRead) -> tuple[int, int]:
    """Fetch, check and copy one :class:`ChunkRead`; return the bytes fetched and the bytes filled. One request.

    Raises CorruptCheckpointError naming the array and the object for an absent, short or altered object.
    """
    stored: RawArray = np.empty(read.nbytes, np.uint8)
    fetch(store, read, stored)
    return read.nbytes, deliver(store, read, stored)


def fetch(store: Store, read: ChunkRead, stored: RawArray) -> None:
    """Fill bytes with stored subchunks, unchecked. One request. Raises CorruptCheckpointError for an absent object."""
    key = read.node.chunk_key(read.chunk)
    size = _codec.subchunk_bytes(read.node.grid, read.node.dtype.itemsize)
    try:
        store.read_into(key, read.first * size, stored.data)
    except ObjectNotFoundError as err:
        raise CorruptCheckpointError(f"chunk {key!r} of array {read.node.path!r} is missing in {store.url}") from err


def deliver(store: Store, read: ChunkRead, stored: RawArray) -> int:
    """Check stored subchunks and copy them into the target; return the bytes filled. No requests.

    Raises CorruptCheckpointError naming the array and the object where they are not what was saved.
    """
    grid = read.node.grid
    size = _codec.subchunk_bytes(grid, read.node.dtype.itemsize)
    filled = 0
    for i in range(read.count):
        cell = unravel_f(read.first + i, grid.sub_counts)
        part = stored[i * size : (i + 1) * size]
        if not _codec.check_subchunk(part, int(read.table[ravel(cell, grid.sub_counts)])):
            raise CorruptCheckpointError(
                f"chunk {read.node.chunk_key(read.chunk)!r} of array {read.node.path!r} in {store.url} is not what was "
                f"saved: the checksum of bytes {(read.first + i) * size}-{(read.first + i + 1) * size} differs"
            )
        filled += _codec.copy_subchunk(grid, read.chunk, cell, part, read.box, read.target)
    return filled


def read_box(store: Store, node: ArrayNode, checksums: RawArray, box: Box | None = None) -> RawArray:
    """A box of a stored array (default: all of it) as raw elements, read in the calling thread."""
    whole = box if box is not None else Box((0,) * len(node.grid.shape), node.grid.shape)
    target: np.ndarray[Any, Any] = np.empty(whole.shape, _codec.raw_dtype(node.dtype.itemsize))
    for read in plan_reads(node, whole, target, checksums):
        read_chunk(store, read)
    return target
