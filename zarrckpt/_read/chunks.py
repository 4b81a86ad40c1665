"""Read boxes of stored arrays by jobs that fetch, check and copy the needed subchunks within a memory bound."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from zarrckpt._errors import CheckpointError, CorruptCheckpointError, ObjectNotFoundError
from zarrckpt._format.chunk_codec import BLOCK_BYTES, BoxTarget, copy_shared, find_contiguous_bytes
from zarrckpt._format.chunk_layout import CRC_BYTES, ChunkTable, RawArray, raw_dtype, subchunk_bytes
from zarrckpt._format.compression import DecodeError
from zarrckpt._format.crc32c import crc32c
from zarrckpt._format.documents import ArrayNode
from zarrckpt._format.grid import Box, Grid, Ints, intersect
from zarrckpt._jobs import DEFAULT_MAX_INFLIGHT_BYTES, BytesBudget

if TYPE_CHECKING:
    from zarrckpt._store import Reader, Store

Job = Callable[[], tuple[int, int]]
"""Fetches stored bytes and fills a target. Returns the number of bytes fetched, and the number of bytes filled."""

LARGE_BYTES = 64 << 20
"""Memory for a larger array is not allocated before a request has shown that its first chunk is stored whole."""

FILE_BYTES = 32 << 20
"""Approximate number of bytes of a local chunk that one thread reads."""

READ_BYTES = 8 << 20
"""Maximum size of a request for neighbouring subchunks. It can be up to twice as large if the memory bound allows."""
_REQUESTS = 32
"""Number of requests that must fit into the memory bound if they are larger than READ_BYTES."""


class StoredArray(NamedTuple):
    """An array of a checkpoint, with its store and its parts of the tables."""

    store: Store
    node: ArrayNode
    """The node, with a path relative to the store's url."""
    checksums: RawArray
    """The checksums of all subchunks, with chunks and their subchunks in C order."""
    sizes: RawArray | None = None
    """The stored sizes of the subchunks in the same order, if the array is compressed."""

    def table(self, chunk_index: Ints) -> ChunkTable:
        """Return one chunk's part of the tables."""
        return ChunkTable.of(self.node, chunk_index, self.checksums, self.sizes)

    def box_jobs(self, box: Box, target: BoxTarget, budget: BytesBudget) -> Iterator[Job]:
        """Yield jobs that fill a target (raw elements, the box's shape) with a box of the array."""
        for chunk_index in self.node.grid.chunks_of(box):
            yield from self.chunk_jobs(chunk_index, box, target, budget)

    def chunk_jobs(self, chunk_index: Ints, box: Box, target: BoxTarget, budget: BytesBudget) -> list[Job]:
        """Return the jobs of :meth:`box_jobs` for one chunk. They fetch only subchunks that overlap the box."""
        node, table = self.node, self.table(chunk_index)
        numbers = subchunks_in(node.grid, chunk_index, box)
        ranges: Sequence[Sequence[int]]
        if self.store.is_local and node.compression is None:
            read, step = read_local, max(1, FILE_BYTES // subchunk_bytes(node))
            ranges = [numbers[begin : begin + step] for begin in range(0, len(numbers), step)]
        else:
            read, ranges = read_neighbours, request_ranges(node, numbers, budget)
        return [partial(read, StoredSubchunks(self, chunk_index, part, table), box, target, budget) for part in ranges]

    def read(self, box: Box | None = None) -> RawArray:
        """Read a box of the array (default: the whole array) in the calling thread. Returns raw elements."""
        target = self.new_memory() if box is None else box_memory(self.node, box)
        whole = self.node.grid.whole if box is None else box
        for job in self.box_jobs(whole, target, BytesBudget(DEFAULT_MAX_INFLIGHT_BYTES)):
            job()
        return target

    def new_memory(self) -> RawArray:
        """Allocate memory for the whole array, as raw elements.

        Raises the errors of :meth:`refuse_unstored`, and CheckpointError if the memory does not suffice.
        """
        self.refuse_unstored()
        try:
            return box_memory(self.node, self.node.grid.whole)
        except (MemoryError, ValueError) as err:
            raise CheckpointError(
                f"memory for array {self.node.path!r} in {self.store.url} ({self.node.nbytes:,} bytes) cannot be "
                "allocated: read it in parts, ckpt[name][begin:end]"
            ) from err

    def refuse_unstored(self) -> None:
        """Raise CorruptCheckpointError for an array above LARGE_BYTES whose first chunk is not stored whole.

        A damaged document can have any size. At most one request.
        """
        if self.node.nbytes > LARGE_BYTES:
            self.read_end_of_first_chunk()

    def read_end_of_first_chunk(self) -> None:
        """Read the end of the first chunk, with one request. Raises CorruptCheckpointError if it is not stored."""
        first = (0,) * len(self.node.grid.shape)
        try:
            self.store.read(self.node.chunk_key(first), self.table(first).object_size - CRC_BYTES, CRC_BYTES)
        except ObjectNotFoundError as err:
            raise self.missing_error(first) from err

    def missing_error(self, chunk_index: Ints) -> CorruptCheckpointError:
        """Return the error for a chunk that is not in the store."""
        key = self.node.chunk_key(chunk_index)
        return CorruptCheckpointError(f"chunk {key!r} of array {self.node.path!r} is missing in {self.store.url}")


class StoredSubchunks(NamedTuple):
    """Subchunks of one chunk that one job reads."""

    array: StoredArray
    chunk_index: Ints
    numbers: Sequence[int]
    """The subchunks' numbers, ascending. Without gaps if they are read with one request."""
    table: ChunkTable

    @property
    def node(self) -> ArrayNode:
        return self.array.node

    @property
    def key(self) -> str:
        return self.node.chunk_key(self.chunk_index)

    @property
    def nbytes(self) -> int:
        """The stored size of all subchunks, which must be neighbours."""
        return self.table.begin(self.numbers[-1] + 1) - self.table.begin(self.numbers[0])

    def each(self, stored: RawArray) -> Iterator[tuple[int, RawArray]]:
        """Yield the number and the stored bytes of each subchunk. ``stored`` has the bytes of all of them."""
        first = self.table.begin(self.numbers[0])
        for number in self.numbers:
            yield number, stored[self.table.begin(number) - first : self.table.begin(number + 1) - first]


def subchunks_in(grid: Grid, chunk_index: Ints, box: Box) -> list[int]:
    """Return the numbers of a chunk's subchunks that overlap a box, ascending.

    Without subchunks the chunk itself has number 0, and must overlap the box.
    """
    if grid.subchunk_shape is None:
        return [0]
    origin = tuple(c * n for c, n in zip(chunk_index, grid.chunk_shape, strict=True))
    shared = intersect(Box(origin, grid.chunk_shape), box)
    if shared is None:
        return []
    return grid.subchunks_of(Box(tuple(s - o for s, o in zip(shared.offset, origin, strict=True)), shared.shape))


def request_ranges(node: ArrayNode, numbers: Sequence[int], budget: BytesBudget) -> list[range]:
    """Return ascending numbers of subchunks as ranges of neighbours, each for one request."""
    request_bytes = min(2 * READ_BYTES, max(READ_BYTES, budget.limit // _REQUESTS))
    return neighbours(numbers, max(1, request_bytes // subchunk_bytes(node)))


def neighbours(numbers: Sequence[int], longest: int) -> list[range]:
    """Return ascending numbers as ranges without gaps, each at most ``longest`` long."""
    out: list[range] = []
    for number in numbers:
        if out and out[-1].stop == number and len(out[-1]) < longest:
            out[-1] = range(out[-1].start, number + 1)
        else:
            out.append(range(number, number + 1))
    return out


def read_local(part: StoredSubchunks, box: Box, target: BoxTarget, budget: BytesBudget) -> tuple[int, int]:
    """Fill a target from a local file. Returns the number of bytes read and of bytes filled.

    Subchunks are read directly into the target if their bytes are contiguous there. Raises CorruptCheckpointError with
    the array and the object's key for a missing, short or altered object.
    """
    array, node, size = part.array, part.node, subchunk_bytes(part.node)
    # The bytes of the target that each subchunk fills, or None if they are not contiguous.
    direct = [find_contiguous_bytes(node, part.chunk_index, number, box, target) for number in part.numbers]
    need = size if any(data is None for data in direct) else 0
    filled = 0
    try:
        with array.store.reader(part.key) as read_at, budget.take(need) as scratch:
            for number, data in zip(part.numbers, direct, strict=True):
                buffer = scratch if data is None else data
                if _read_checked(read_at, part.table.begin(number), buffer) != part.table.checksums[number]:
                    raise altered_error(part, number)
                filled += size if data is not None else copy_shared(node, part.chunk_index, number, buffer, box, target)
    except ObjectNotFoundError as err:
        raise array.missing_error(part.chunk_index) from err
    return len(part.numbers) * (size + CRC_BYTES), filled


def _read_checked(read_at: Reader, byte_offset: int, data: RawArray) -> int | None:
    """Fill memory with a subchunk. Returns its checksum, or None if the checksum stored behind it differs.

    Reads by blocks that fit into the CPU cache, so that a block's checksum is computed while it is there.
    """
    stored, crc, view = bytearray(CRC_BYTES), 0, data.data
    for begin in range(0, len(view), BLOCK_BYTES):
        block = view[begin : begin + BLOCK_BYTES]
        tail = [memoryview(stored)] if begin + len(block) == len(view) else []
        read_at(byte_offset + begin, [block, *tail])
        crc = crc32c(block, crc)
    return crc if crc == int.from_bytes(stored, "little") else None


def read_neighbours(part: StoredSubchunks, box: Box, target: BoxTarget, budget: BytesBudget) -> tuple[int, int]:
    """Fetch, check and copy neighbouring subchunks. Returns the number of bytes fetched and of bytes filled.

    One request. Raises CorruptCheckpointError with the array and the object's key for a missing, short or altered
    object.
    """
    node, filled = part.node, 0
    with fetch_in_budget(part, budget) as (stored, scratch):
        for number, data in part.each(stored):
            filled_bytes = find_contiguous_bytes(node, part.chunk_index, number, box, target)
            if filled_bytes is not None and node.compression is not None:
                filled += len(unpack(part, number, data, filled_bytes))
            else:
                # Without compression, the checked bytes are copied from the fetched ones in any case.
                elements = unpack(part, number, data, scratch)
                filled += copy_shared(node, part.chunk_index, number, elements, box, target)
    return part.nbytes, filled


def unpacking_bytes(node: ArrayNode) -> int:
    """Return the size of scratch memory for :func:`unpack`: a subchunk's elements, or 0 without compression."""
    return 0 if node.compression is None else subchunk_bytes(node)


@contextmanager
def fetch_in_budget(part: StoredSubchunks, budget: BytesBudget) -> Iterator[tuple[RawArray, RawArray]]:
    """Fetch neighbouring subchunks as they are stored, unchecked. One request.

    Yields their bytes, and scratch memory for :func:`unpack`. Raises CorruptCheckpointError for a missing object.
    """
    scratch = unpacking_bytes(part.node)
    if part.array.store.is_local:
        with budget.take(part.nbytes + scratch) as taken:
            fetch(part, taken[: part.nbytes])
            yield taken[: part.nbytes], taken[part.nbytes :]
    else:
        # The client allocates the memory of the bytes. At the end of a request it joins them to one buffer and briefly
        # has them twice. The quarter is for this, because only a few of the requests under way end at one time.
        with budget.take(scratch, part.nbytes + part.nbytes // 4) as taken:
            yield fetch(part), taken


def fetch(part: StoredSubchunks, stored: RawArray | None = None) -> RawArray:
    """Fetch neighbouring subchunks as they are stored, unchecked, into ``stored`` if it is given. One request.

    Raises CorruptCheckpointError for a missing object.
    """
    store, begin = part.array.store, part.table.begin(part.numbers[0])
    try:
        if stored is None:
            return np.frombuffer(store.read(part.key, begin, part.nbytes), np.uint8)
        store.read_into(part.key, begin, stored.data)
    except ObjectNotFoundError as err:
        raise part.array.missing_error(part.chunk_index) from err
    return stored


def unpack(part: StoredSubchunks, number: int, stored: RawArray, out: RawArray) -> RawArray:
    """Check a stored subchunk and return the bytes of its elements, decompressed into ``out``.

    Without compression, returns a view of ``stored`` and does not use ``out``. Raises CorruptCheckpointError with the
    array and the object's key if the subchunk differs from the save.
    """
    if not part.table.matches(number, stored):
        raise altered_error(part, number)
    if part.node.compression is None:
        return stored[:-CRC_BYTES]
    try:
        part.node.compression.decode(stored[:-CRC_BYTES], out)
    except DecodeError as err:
        raise CorruptCheckpointError(
            f"chunk {part.key!r} of array {part.node.path!r} in {part.array.store.url} is damaged: bytes "
            f"{part.table.begin(number)}-{part.table.begin(number + 1)} cannot be decompressed: {err}"
        ) from err
    return out


def altered_error(part: StoredSubchunks, number: int) -> CorruptCheckpointError:
    """Return the error for a subchunk that differs from the save."""
    return CorruptCheckpointError(
        f"chunk {part.key!r} of array {part.node.path!r} in {part.array.store.url} is damaged: the checksum "
        f"of bytes {part.table.begin(number)}-{part.table.begin(number + 1)} differs"
    )


def box_memory(node: ArrayNode, box: Box) -> RawArray:
    """Allocate memory for a box of a stored array, as raw elements."""
    return np.empty(box.shape, raw_dtype(node.dtype.itemsize))
