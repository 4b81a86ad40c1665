"""Read chunks: jobs that fetch, check and copy what a box needs of one, within a memory bound."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from zarrckpt import _codec
from zarrckpt._cells import CellBlock, block_at, blocks_of
from zarrckpt._chunk_table import ChunkTable, chunk_table
from zarrckpt._compression import DecodeError
from zarrckpt._errors import CheckpointError, CorruptCheckpointError, ObjectNotFoundError
from zarrckpt._grid import Box, Grid, Ints, intersect
from zarrckpt._memory import BytesBudget
from zarrckpt._streaming import ChunkStream, bands_of, parts_of, scratch_bytes

if TYPE_CHECKING:
    from zarrckpt._codec import RawArray, Target
    from zarrckpt._documents import ArrayNode
    from zarrckpt._store import Store

Job = Callable[[], tuple[int, int]]
"""Returns the bytes that it has fetched, and those that it has filled."""

Progress = Callable[[int, int], None]
"""Called with the bytes done and the bytes in all, one call at a time."""

DEFAULT_MAX_INFLIGHT_BYTES = 512 << 20
LARGE_BYTES = 64 << 20
"""A whole array of more bytes is not allocated before the store has shown that it holds one like it."""

STREAM_BYTES = 32 << 20
"""Of a chunk in a local file, about so much is one thread's."""

READ_BYTES = 8 << 20
"""Neighbouring subchunks are fetched together up to this many bytes a request, and twice that where memory allows."""
_REQUESTS = 32
"""So many requests are to fit in memory at once, where they are longer."""


class Tally:
    """Counts the bytes of jobs on many threads, and tells whoever follows them."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self.total = total
        self.done = 0
        self._progress = progress
        self._lock = threading.Lock()

    def add(self, nbytes: int) -> None:
        """So many more are done."""
        with self._lock:
            self.done += nbytes
            if self._progress is not None:
                self._progress(self.done, self.total)


def check_limits(least: int = 1, /, **limits: int) -> None:
    """Refuse limits that are no integers, or too small. Raises TypeError and ValueError naming the argument."""
    for name, value in limits.items():
        if not isinstance(value, int):
            raise TypeError(f"{name} must be an int, got {value!r} of type {type(value).__name__}")
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")


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


def chunk_jobs(
    store: Store, node: ArrayNode, chunk: Ints, box: Box, target: Target, table: ChunkTable, memory: BytesBudget
) -> list[Job]:
    """Jobs that fill a target (raw elements, the box's shape) with what a box has of a chunk.

    Nothing is fetched but what shares a subchunk with the box. Called for each of the box's chunks.
    """
    streamed = stream_jobs(store, node, chunk, box, target, table, memory)
    if streamed is not None:
        return streamed
    runs = requests(node, places_in(node.grid, chunk, box), memory)
    return [partial(read_chunk, store, ChunkRead(node, chunk, *part, box, target, table), memory) for part in runs]


def requests(node: ArrayNode, places: Sequence[int], memory: BytesBudget) -> list[tuple[int, int]]:
    """Sorted places of a chunk's subchunks as (first, count), each for one request."""
    most = min(2 * READ_BYTES, max(READ_BYTES, memory.limit // _REQUESTS))
    return _codec.runs(places, max(1, most // _codec.subchunk_bytes(node.grid, node.dtype.itemsize)))


def places_in(grid: Grid, chunk: Ints, box: Box) -> list[int]:
    """The places, counted from a chunk object's begin, of its subchunks that share elements with a box, sorted."""
    origin = tuple(c * n for c, n in zip(chunk, grid.chunk_shape, strict=True))
    shared = intersect(Box(origin, grid.chunk_shape), box)
    if shared is None:
        return []
    inside = Box(tuple(s - o for s, o in zip(shared.offset, origin, strict=True)), shared.shape)
    return grid.subchunk_places(inside)


def unpacking_bytes(node: ArrayNode) -> int:
    """The scratch memory that :func:`deliver` needs: for a subchunk's elements, where the array is compressed."""
    if node.compression is None:
        return 0
    return _codec.subchunk_bytes(node.grid, node.dtype.itemsize) - _codec.CRC_BYTES


def read_chunk(store: Store, read: ChunkRead, memory: BytesBudget) -> tuple[int, int]:
    """Fetch, check and copy one :class:`ChunkRead`; return the bytes fetched and the bytes filled. One request.

    Raises CorruptCheckpointError naming the array and the object for an absent, short or altered object.
    """
    nbytes = read.nbytes
    with memory.take(nbytes + unpacking_bytes(read.node)) as both:
        fetch(store, read, both[:nbytes])
        return nbytes, deliver(store, read, both[:nbytes], both[nbytes:])


def fetch(store: Store, read: ChunkRead, stored: RawArray) -> None:
    """Fill bytes with stored subchunks, unchecked. One request. Raises CorruptCheckpointError for an absent object."""
    with _missing_is_damage(store, read.node, read.chunk):
        store.read_into(_key(read), read.byte_offset, stored.data)


def stream_jobs(
    store: Store, node: ArrayNode, chunk: Ints, box: Box, target: Target, table: ChunkTable, memory: BytesBudget
) -> list[Job] | None:
    """Jobs that fill what a box needs of a chunk, straight from a local file; each returns as :func:`read_chunk`.

    None where that can't be: another store, compression, a target that is no memory, parts of cells.
    """
    if not store.is_local or node.compression is not None or not isinstance(target, np.ndarray):
        return None
    bands = bands_of(node.grid, chunk, box)
    if bands is None:
        return None
    whole = ChunkRead(node, chunk, 0, 0, box, target, table)

    def altered(place: int) -> NoReturn:
        raise _altered(store, whole, place)

    stream = ChunkStream(node.grid, bands, target, table.checksums, altered)
    need = scratch_bytes(bands, node.grid, target.dtype.itemsize)

    def job(rows: range) -> tuple[int, int]:
        with _missing_is_damage(store, node, chunk), store.reader(_key(whole)) as file, memory.take(need) as scratch:
            filled = stream.fill(file, rows, scratch)
        return len(rows) * need, filled

    parts = parts_of(bands, node.grid, target.dtype.itemsize, STREAM_BYTES)
    return [partial(job, rows) for rows in parts]


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
    # As many as may be with one call: to take turns with the interpreter costs more here than to leave the cache.
    sub = grid.subchunk_shape or grid.chunk_shape
    for block in blocks_of(grid.sub_counts, sub, read.first, read.count, read.count):
        begin = (block.place - read.first) * size
        filled += _unpack(store, read, block, stored[begin : begin + block.size * size].reshape(-1, size))
    return filled


def _unpack(store: Store, read: ChunkRead, block: CellBlock, stored: RawArray) -> int:
    grid, table = read.node.grid, read.table.checksums
    filled, bad = _codec.unpack(grid, read.chunk, block, stored, table, read.box, read.target)
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
    straight = _codec.place_of(grid, read.chunk, place, read.box, read.target)
    assert compression is not None
    try:
        compression.decode(part[: -_codec.CRC_BYTES], scratch if straight is None else straight)
    except DecodeError as err:
        raise CorruptCheckpointError(
            f"chunk {_key(read)!r} of array {read.node.path!r} in {store.url} is not what was saved: "
            f"bytes {begin}-{end} do not decompress: {err}"
        ) from err
    if straight is not None:
        return len(straight)
    sub = grid.subchunk_shape or grid.chunk_shape
    cells = scratch.view(read.target.dtype).reshape(1, *sub)
    return _codec.copy_cells(grid, read.chunk, block_at(grid.sub_counts, sub, place), cells, read.box, read.target)


def _key(read: ChunkRead) -> str:
    return read.node.chunk_key(read.chunk)


@contextmanager
def _missing_is_damage(store: Store, node: ArrayNode, chunk: Ints) -> Iterator[None]:
    try:
        yield
    except ObjectNotFoundError as err:
        raise CorruptCheckpointError(
            f"chunk {node.chunk_key(chunk)!r} of array {node.path!r} is missing in {store.url}"
        ) from err


def _altered(store: Store, read: ChunkRead, place: int) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"chunk {_key(read)!r} of array {read.node.path!r} in {store.url} is not what was saved: the checksum of bytes "
        f"{read.table.begin(place)}-{read.table.begin(place + 1)} differs"
    )


def raw_dtype(node: ArrayNode) -> np.dtype[Any]:
    """The numpy type of an array's raw elements."""
    return _codec.raw_dtype(node.dtype.itemsize)


def new_array(store: Store, node: ArrayNode, checksums: RawArray, sizes: RawArray | None = None) -> RawArray:
    """Memory for a whole stored array, raw elements. ``checksums`` and ``sizes`` are its parts of the tables.

    A document can claim any size: before much is allocated, one request looks for the end of the first chunk.
    Raises CorruptCheckpointError where that is not stored, CheckpointError where there is not so much memory.
    """
    if node.nbytes > LARGE_BYTES:
        look_for_end(store, node, checksums, sizes)
    try:
        return np.empty(node.grid.shape, raw_dtype(node))
    except (MemoryError, ValueError) as err:
        raise CheckpointError(
            f"array {node.path!r} in {store.url} has {node.nbytes:,} bytes, more than can be allocated here: read it "
            "in parts, ckpt[name][begin:end]"
        ) from err


def look_for_end(store: Store, node: ArrayNode, checksums: RawArray, sizes: RawArray | None) -> None:
    """One request for the end of an array's first chunk. Raises CorruptCheckpointError where that is not stored."""
    first = (0,) * len(node.grid.shape)
    end = chunk_table(node.grid, node.dtype.itemsize, first, checksums, sizes).object_size
    with _missing_is_damage(store, node, first):
        store.read(node.chunk_key(first), end - _codec.CRC_BYTES, _codec.CRC_BYTES)


def read_box(
    store: Store, node: ArrayNode, checksums: RawArray, box: Box | None = None, *, sizes: RawArray | None = None
) -> RawArray:
    """A box of a stored array (default: all of it) as raw elements, read in the calling thread."""
    whole = box if box is not None else Box((0,) * len(node.grid.shape), node.grid.shape)
    target = new_array(store, node, checksums, sizes) if box is None else np.empty(box.shape, raw_dtype(node))
    memory = BytesBudget(DEFAULT_MAX_INFLIGHT_BYTES)
    for chunk in node.grid.chunks_of(whole):
        table = chunk_table(node.grid, node.dtype.itemsize, chunk, checksums, sizes)
        for job in chunk_jobs(store, node, chunk, whole, target, table, memory):
            job()
    return target
