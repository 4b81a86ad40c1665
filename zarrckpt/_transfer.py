"""Run chunk jobs: many at a time, within a memory bound, first failure wins."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from zarrckpt import _codec
from zarrckpt._chunk_table import ChunkTable, chunk_table
from zarrckpt._compression import DecodeError
from zarrckpt._crc32c import crc32c
from zarrckpt._errors import CorruptCheckpointError, ObjectNotFoundError
from zarrckpt._grid import Box, Grid, Ints, intersect
from zarrckpt._memory import BytesBudget

if TYPE_CHECKING:
    from zarrckpt._codec import RawArray, Target
    from zarrckpt._documents import ArrayNode
    from zarrckpt._store import Reader, Store

T = TypeVar("T")

Progress = Callable[[int, int], None]
"""Called with the bytes done and the bytes in all, one call at a time."""

DEFAULT_MAX_INFLIGHT_BYTES = 512 << 20
DEFAULT_CONCURRENCY = 16
READ_BYTES = 8 << 20
"""Neighbouring subchunks are fetched together up to this many bytes a request."""


def check_limits(least: int = 1, /, **limits: int) -> None:
    """Refuse limits that are no integers, or too small. Raises TypeError and ValueError naming the argument."""
    for name, value in limits.items():
        if not isinstance(value, int):
            raise TypeError(f"{name} must be an int, got {value!r} of type {type(value).__name__}")
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")


def run(jobs: Iterable[Callable[[], T]], concurrency: int) -> list[T]:
    """Run jobs on threads; return their results in order. The first error stops what has not begun."""
    failures: list[BaseException] = []
    room = threading.Semaphore(2 * concurrency)

    def call(job: Callable[[], T]) -> T:
        try:
            return job()
        except BaseException as err:
            failures.append(err)
            raise
        finally:
            room.release()

    futures: list[Future[T]] = []
    pool = ThreadPoolExecutor(concurrency, thread_name_prefix="zarrckpt")
    try:
        for job in jobs:
            # Jobs are drawn as threads come free: a generator then never holds more than these alive.
            room.acquire()
            if failures:
                break
            futures.append(pool.submit(call, job))
        wait(futures, return_when=FIRST_EXCEPTION)
    finally:
        pool.shutdown(cancel_futures=True)
    if failures:
        raise failures[0]
    return [future.result() for future in futures]


@dataclass(frozen=True)
class ChunkRead:
    """Subchunks of one chunk that a target needs: neighbours in storage, fetched with one request."""

    node: ArrayNode
    chunk: Ints
    first: int
    count: int
    box: Box
    target: Target
    table: ChunkTable

    @property
    def nbytes(self) -> int:
        return self.table.begin(self.first + self.count) - self.byte_offset

    @property
    def byte_offset(self) -> int:
        """Where in the chunk's object they begin."""
        return self.table.begin(self.first)


def plan_reads(
    node: ArrayNode, box: Box, target: Target, checksums: RawArray, sizes: RawArray | None = None
) -> Iterator[ChunkRead]:
    """The requests that fill ``target`` (raw elements, the box's shape) with a box of a stored array.

    ``checksums`` and ``sizes`` are the array's parts of the tables. Nothing outside the box is fetched but what shares
    a subchunk with it.
    """
    grid = node.grid
    longest = max(1, READ_BYTES // _codec.subchunk_bytes(grid, node.dtype.itemsize))
    for chunk in grid.chunks_of(box):
        table = chunk_table(grid, node.dtype.itemsize, chunk, checksums, sizes)
        for first, count in _codec.runs(places_in(grid, chunk, box), longest):
            yield ChunkRead(node, chunk, first, count, box, target, table)


def places_in(grid: Grid, chunk: Ints, box: Box) -> list[int]:
    """The places, counted from a chunk object's begin, of its subchunks that share elements with a box, sorted."""
    origin = tuple(c * n for c, n in zip(chunk, grid.chunk_shape, strict=True))
    shared = intersect(Box(origin, grid.chunk_shape), box)
    if shared is None:
        return []
    inside = Box(tuple(s - o for s, o in zip(shared.offset, origin, strict=True)), shared.shape)
    return sorted(_codec.subchunk_place(grid, cell) for cell in grid.subchunks_of(inside))


def unpacking_bytes(node: ArrayNode) -> int:
    """The scratch memory that :func:`deliver` needs: for a subchunk's elements, where the array is compressed."""
    if node.compression is None:
        return 0
    return _codec.subchunk_bytes(node.grid, node.dtype.itemsize) - _codec.CRC_BYTES


def read_chunk(store: Store, read: ChunkRead, memory: BytesBudget) -> tuple[int, int]:
    """Fetch, check and copy one :class:`ChunkRead`; return the bytes fetched and the bytes filled. One request.

    Raises CorruptCheckpointError naming the array and the object for an absent, short or altered object.
    """
    if read.node.compression is not None:
        nbytes = read.nbytes
        with memory.take(nbytes + unpacking_bytes(read.node)) as both:
            fetch(store, read, both[:nbytes])
            return nbytes, deliver(store, read, both[:nbytes], both[nbytes:])
    if store.is_local:
        return read.nbytes, _stream(store, read, memory)
    with memory.hold(read.nbytes):
        with _missing_is_damage(store, read):
            stored = store.read(_key(read), read.byte_offset, read.nbytes)
        return read.nbytes, deliver(store, read, np.frombuffer(stored, np.uint8))


def fetch(store: Store, read: ChunkRead, stored: RawArray) -> None:
    """Fill bytes with stored subchunks, unchecked. One request. Raises CorruptCheckpointError for an absent object."""
    with _missing_is_damage(store, read):
        store.read_into(_key(read), read.byte_offset, stored.data)


def _stream(store: Store, read: ChunkRead, memory: BytesBudget) -> int:
    """Read a few subchunks after the others from a file, straight to their places where those are in one piece."""
    grid = read.node.grid
    size = _codec.subchunk_bytes(grid, read.node.dtype.itemsize)
    filled = 0
    with _missing_is_damage(store, read), store.reader(_key(read)) as file, ExitStack() as scratch:
        block: RawArray | None = None
        for place, count in _codec.stripes(grid, size, read.first, read.count):
            straight = _codec.places_of(grid, read.chunk, place, count, read.box, read.target)
            if straight is not None:
                filled += _read_straight(store, file, read, place, straight)
                continue
            if block is None:
                block = scratch.enter_context(memory.take(max(size, _codec.BLOCK_BYTES)))
            part = block[: count * size]
            file(place * size, [part.data])
            filled += _unpack(store, read, place, part)
    return filled


def _read_straight(store: Store, file: Reader, read: ChunkRead, place: int, targets: Sequence[RawArray]) -> int:
    """Fill the memory of neighbouring subchunks, block by block, so that each is checked while it is in the cache."""
    size = _codec.subchunk_bytes(read.node.grid, read.node.dtype.itemsize)
    wanted = _codec.expected(read.node.grid, place, len(targets), read.table.checksums)
    own = bytearray(_codec.CRC_BYTES)
    for i, target in enumerate(targets):
        crc = 0
        for begin in range(0, len(target), _codec.BLOCK_BYTES):
            block = target[begin : begin + _codec.BLOCK_BYTES]
            tail = [memoryview(own)] if begin + len(block) == len(target) else []
            file((place + i) * size + begin, [block.data, *tail])
            crc = crc32c(block, crc)
        if crc != wanted[i] or crc != int.from_bytes(own, "little"):
            raise _altered(store, read, place + i)
    return sum(map(len, targets))


def deliver(store: Store, read: ChunkRead, stored: RawArray, scratch: RawArray | None = None) -> int:
    """Check stored subchunks and copy them into the target; return the bytes filled. No requests.

    ``scratch`` has :func:`unpacking_bytes`. Raises CorruptCheckpointError naming the array and the object where the
    subchunks are not what was saved.
    """
    if read.node.compression is not None:
        assert scratch is not None
        return sum(_decompress(store, read, read.first + i, stored, scratch) for i in range(read.count))
    grid = read.node.grid
    size = _codec.subchunk_bytes(grid, read.node.dtype.itemsize)
    filled = 0
    for place, count in _codec.stripes(grid, size, read.first, read.count):
        begin = (place - read.first) * size
        filled += _unpack(store, read, place, stored[begin : begin + count * size])
    return filled


def _unpack(store: Store, read: ChunkRead, place: int, stored: RawArray) -> int:
    size = _codec.subchunk_bytes(read.node.grid, read.node.dtype.itemsize)
    rows = stored.reshape(-1, size)
    table = read.table.checksums
    filled, bad = _codec.unpack(read.node.grid, read.chunk, place, rows, table, read.box, read.target)
    if bad >= 0:
        raise _altered(store, read, bad)
    return filled


def _decompress(store: Store, read: ChunkRead, place: int, stored: RawArray, scratch: RawArray) -> int:
    """Check one of the compressed subchunks of a request and decompress it, straight into the target if that may be."""
    begin, end = read.table.begin(place), read.table.begin(place + 1)
    part = stored[begin - read.byte_offset : end - read.byte_offset]
    if _codec.checked(part) != read.table.checksum(place):
        raise _altered(store, read, place)
    grid, compression = read.node.grid, read.node.compression
    straight = _codec.places_of(grid, read.chunk, place, 1, read.box, read.target)
    assert compression is not None
    try:
        compression.decode(part[: -_codec.CRC_BYTES], scratch if straight is None else straight[0])
    except DecodeError as err:
        raise CorruptCheckpointError(
            f"chunk {_key(read)!r} of array {read.node.path!r} in {store.url} is not what was saved: "
            f"bytes {begin}-{end} do not decompress: {err}"
        ) from err
    if straight is not None:
        return len(straight[0])
    cells = scratch.view(read.target.dtype).reshape(1, *(grid.subchunk_shape or grid.chunk_shape))
    return _codec.copy_cells(grid, read.chunk, place, cells, read.box, read.target)


def _key(read: ChunkRead) -> str:
    return read.node.chunk_key(read.chunk)


@contextmanager
def _missing_is_damage(store: Store, read: ChunkRead) -> Iterator[None]:
    try:
        yield
    except ObjectNotFoundError as err:
        raise CorruptCheckpointError(
            f"chunk {_key(read)!r} of array {read.node.path!r} is missing in {store.url}"
        ) from err


def _altered(store: Store, read: ChunkRead, place: int) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"chunk {_key(read)!r} of array {read.node.path!r} in {store.url} is not what was saved: the checksum of bytes "
        f"{read.table.begin(place)}-{read.table.begin(place + 1)} differs"
    )


def read_box(
    store: Store, node: ArrayNode, checksums: RawArray, box: Box | None = None, *, sizes: RawArray | None = None
) -> RawArray:
    """A box of a stored array (default: all of it) as raw elements, read in the calling thread."""
    whole = box if box is not None else Box((0,) * len(node.grid.shape), node.grid.shape)
    target: np.ndarray[Any, Any] = np.empty(whole.shape, _codec.raw_dtype(node.dtype.itemsize))
    memory = BytesBudget(DEFAULT_MAX_INFLIGHT_BYTES)
    for read in plan_reads(node, whole, target, checksums, sizes):
        read_chunk(store, read, memory)
    return target
