"""Read boxes of stored arrays: jobs that fetch, check and copy what a box needs of a chunk, within a memory bound."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from zarrckpt._errors import CheckpointError, CorruptCheckpointError, ObjectNotFoundError
from zarrckpt._format.chunk_codec import BLOCK_BYTES, Target, copy_shared, straight_bytes
from zarrckpt._format.chunk_layout import CRC_BYTES, ChunkTable, RawArray, raw_dtype, subchunk_bytes
from zarrckpt._format.compression import DecodeError
from zarrckpt._format.crc32c import crc32c
from zarrckpt._format.documents import ArrayNode
from zarrckpt._format.grid import Box, Grid, Ints, intersect
from zarrckpt._jobs import DEFAULT_MAX_INFLIGHT_BYTES, BytesBudget

if TYPE_CHECKING:
    from zarrckpt._store import Reader, Store

Job = Callable[[], tuple[int, int]]
"""Returns the bytes that it has fetched, and those that it has filled."""


LARGE_BYTES = 64 << 20
"""A whole array of more bytes is not allocated before the store has shown that it holds one like it."""

FILE_BYTES = 32 << 20
"""Of a chunk in a local file, about so much is one thread's."""

READ_BYTES = 8 << 20
"""Neighbouring subchunks are fetched together up to this many bytes a request, and twice that where memory allows."""
_REQUESTS = 32
"""So many requests are to fit in memory at once, where they are longer."""


@dataclass(frozen=True)
class StoredArray:
    """An array of a checkpoint: where it is stored, and what the tables say of it."""

    store: Store
    node: ArrayNode
    """Its path begins at the store's url."""
    checksums: RawArray
    """Of all its subchunks, chunks and their subchunks in C order."""
    sizes: RawArray | None = None
    """Their stored sizes, where they are compressed."""

    def table(self, chunk: Ints) -> ChunkTable:
        """What the tables say of one chunk."""
        return ChunkTable.of(self.node, chunk, self.checksums, self.sizes)

    def box_jobs(self, box: Box, target: Target, memory: BytesBudget) -> Iterator[Job]:
        """Jobs that fill a target (raw elements, the box's shape) with a box of the array."""
        for chunk in self.node.grid.chunks_of(box):
            yield from self.chunk_jobs(chunk, box, target, memory)

    def chunk_jobs(self, chunk: Ints, box: Box, target: Target, memory: BytesBudget) -> list[Job]:
        """The jobs of :meth:`box_jobs` for one of the box's chunks.

        Nothing is fetched but what shares a subchunk with the box.
        """
        node, table = self.node, self.table(chunk)
        numbers = subchunks_in(node.grid, chunk, box)
        runs: Sequence[Sequence[int]] = runs_of(node, numbers, memory)
        read = read_run
        if self.store.is_local and node.compression is None:
            step = max(1, FILE_BYTES // subchunk_bytes(node))
            runs = [numbers[begin : begin + step] for begin in range(0, len(numbers), step)]
            read = read_local
        return [partial(read, ChunkPart(self, chunk, run, table), box, target, memory) for run in runs]

    def read(self, box: Box | None = None) -> RawArray:
        """A box of the array (default: all of it) as raw elements, read in the calling thread."""
        target = self.new_memory() if box is None else box_memory(self.node, box)
        whole = self.node.grid.whole if box is None else box
        for job in self.box_jobs(whole, target, BytesBudget(DEFAULT_MAX_INFLIGHT_BYTES)):
            job()
        return target

    def new_memory(self) -> RawArray:
        """Memory for the whole array, raw elements.

        A document can claim any size: before much is allocated, one request looks for the end of the first chunk.
        Raises CorruptCheckpointError where that is not stored, CheckpointError where there is not so much memory.
        """
        if self.node.nbytes > LARGE_BYTES:
            self.look_for_end()
        try:
            return box_memory(self.node, self.node.grid.whole)
        except (MemoryError, ValueError) as err:
            raise CheckpointError(
                f"array {self.node.path!r} in {self.store.url} has {self.node.nbytes:,} bytes, more than can be "
                "allocated here: read it in parts, ckpt[name][begin:end]"
            ) from err

    def look_for_end(self) -> None:
        """One request for the end of the first chunk. Raises CorruptCheckpointError where that is not stored."""
        first = (0,) * len(self.node.grid.shape)
        with self.missing_is_damage(first):
            self.store.read(self.node.chunk_key(first), self.table(first).object_size - CRC_BYTES, CRC_BYTES)

    @contextmanager
    def missing_is_damage(self, chunk: Ints) -> Iterator[None]:
        """Raise CorruptCheckpointError in place of ObjectNotFoundError."""
        try:
            yield
        except ObjectNotFoundError as err:
            key = self.node.chunk_key(chunk)
            raise CorruptCheckpointError(
                f"chunk {key!r} of array {self.node.path!r} is missing in {self.store.url}"
            ) from err


@dataclass(frozen=True)
class ChunkPart:
    """Some subchunks of one chunk, which are read together."""

    array: StoredArray
    chunk: Ints
    numbers: Sequence[int]
    """Ascending; without gaps, where they are read with one request."""
    table: ChunkTable

    @property
    def node(self) -> ArrayNode:
        return self.array.node

    @property
    def key(self) -> str:
        return self.node.chunk_key(self.chunk)

    @property
    def nbytes(self) -> int:
        """The stored size of neighbours."""
        return self.table.begin(self.numbers[-1] + 1) - self.table.begin(self.numbers[0])

    def each(self, stored: RawArray) -> Iterator[tuple[int, RawArray]]:
        """The number and the stored bytes of each of some neighbours; ``stored`` has those of all."""
        first = self.table.begin(self.numbers[0])
        for number in self.numbers:
            yield number, stored[self.table.begin(number) - first : self.table.begin(number + 1) - first]


def subchunks_in(grid: Grid, chunk: Ints, box: Box) -> list[int]:
    """The numbers of a chunk's subchunks that share elements with a box, which the chunk does; ascending."""
    if grid.subchunk_shape is None:
        return [0]
    origin = tuple(c * n for c, n in zip(chunk, grid.chunk_shape, strict=True))
    shared = intersect(Box(origin, grid.chunk_shape), box)
    if shared is None:
        return []
    return grid.subchunks_of(Box(tuple(s - o for s, o in zip(shared.offset, origin, strict=True)), shared.shape))


def runs_of(node: ArrayNode, numbers: Sequence[int], memory: BytesBudget) -> list[range]:
    """Ascending numbers of subchunks in runs of neighbours, each for one request."""
    most = min(2 * READ_BYTES, max(READ_BYTES, memory.limit // _REQUESTS))
    return neighbours(numbers, max(1, most // subchunk_bytes(node)))


def neighbours(numbers: Sequence[int], longest: int) -> list[range]:
    """Ascending numbers in runs without gaps, none longer than ``longest``."""
    out: list[range] = []
    for number in numbers:
        if out and out[-1].stop == number and len(out[-1]) < longest:
            out[-1] = range(out[-1].start, number + 1)
        else:
            out.append(range(number, number + 1))
    return out


def read_local(part: ChunkPart, box: Box, target: Target, memory: BytesBudget) -> tuple[int, int]:
    """Fill a target from a local file, straight where that may be; return the bytes read and the bytes filled.

    Raises CorruptCheckpointError naming the array and the object for an absent, short or altered object.
    """
    array, node, size = part.array, part.node, subchunk_bytes(part.node)
    straight = [straight_bytes(node, part.chunk, number, box, target) for number in part.numbers]
    need = size if any(memory is None for memory in straight) else 0
    filled = 0
    with array.missing_is_damage(part.chunk), array.store.reader(part.key) as file, memory.take(need) as scratch:
        for number, data in zip(part.numbers, straight, strict=True):
            read = scratch if data is None else data
            if _read_checked(file, part.table.begin(number), read) != part.table.checksums[number]:
                raise altered(part, number)
            filled += size if data is not None else copy_shared(node, part.chunk, number, read, box, target)
    return len(part.numbers) * (size + CRC_BYTES), filled


def _read_checked(file: Reader, byte_offset: int, data: RawArray) -> int | None:
    """Fill memory with a subchunk; its checksum, None where that is not the one that is stored behind it.

    Block by block, each while it is in the processor's cache.
    """
    stored, crc = np.empty(CRC_BYTES, np.uint8), 0
    for begin in range(0, len(data), BLOCK_BYTES):
        block = data[begin : begin + BLOCK_BYTES]
        tail = [stored.data] if begin + len(block) == len(data) else []
        file(byte_offset + begin, [block.data, *tail])
        crc = crc32c(block, crc)
    return crc if crc == int.from_bytes(stored.tobytes(), "little") else None


def read_run(part: ChunkPart, box: Box, target: Target, memory: BytesBudget) -> tuple[int, int]:
    """Fetch, check and copy neighbouring subchunks; return the bytes fetched and the bytes filled. One request.

    Raises CorruptCheckpointError naming the array and the object for an absent, short or altered object.
    """
    node, filled = part.node, 0
    with fetched(part, memory) as (stored, scratch):
        for number, data in part.each(stored):
            straight = straight_bytes(node, part.chunk, number, box, target)
            if straight is not None and node.compression is not None:
                filled += len(unpacked(part, number, data, straight))
            else:
                elements = unpacked(part, number, data, scratch)
                filled += copy_shared(node, part.chunk, number, elements, box, target)
    return part.nbytes, filled


def unpacking_bytes(node: ArrayNode) -> int:
    """The scratch memory that :func:`unpacked` needs: for a subchunk's elements, where the array is compressed."""
    return 0 if node.compression is None else subchunk_bytes(node)


@contextmanager
def fetched(part: ChunkPart, memory: BytesBudget) -> Iterator[tuple[RawArray, RawArray]]:
    """Neighbouring subchunks as they are stored, unchecked, and scratch memory for :func:`unpacked`. One request.

    Raises CorruptCheckpointError for an absent object.
    """
    scratch = unpacking_bytes(part.node)
    if part.array.store.is_local or memory.is_special:
        with memory.take(part.nbytes + scratch) as taken:
            fetch(part, taken[: part.nbytes])
            yield taken[: part.nbytes], taken[part.nbytes :]
    else:
        # They come in the client's own memory, and are copied from there. It joins what has come to one buffer at the
        # end of a request, and holds that twice for a moment: of those under way, a few at a time.
        with memory.take(scratch, part.nbytes + part.nbytes // 4) as taken:
            yield fetch(part), taken


def fetch(part: ChunkPart, stored: RawArray | None = None) -> RawArray:
    """Neighbouring subchunks as they are stored, unchecked; in the memory that is given. One request.

    Raises CorruptCheckpointError for an absent object.
    """
    store, begin = part.array.store, part.table.begin(part.numbers[0])
    with part.array.missing_is_damage(part.chunk):
        if stored is None:
            return np.frombuffer(store.read(part.key, begin, part.nbytes), np.uint8)
        store.read_into(part.key, begin, stored.data)
    return stored


def unpacked(part: ChunkPart, number: int, stored: RawArray, out: RawArray) -> RawArray:
    """A stored subchunk, checked: its elements' bytes, in their place or, where they are compressed, in ``out``.

    Raises CorruptCheckpointError naming the array and the object where it is not what was saved.
    """
    if not part.table.holds(number, stored):
        raise altered(part, number)
    if part.node.compression is None:
        return stored[:-CRC_BYTES]
    try:
        part.node.compression.decode(stored[:-CRC_BYTES], out)
    except DecodeError as err:
        raise CorruptCheckpointError(
            f"chunk {part.key!r} of array {part.node.path!r} in {part.array.store.url} is not what was saved: bytes "
            f"{part.table.begin(number)}-{part.table.begin(number + 1)} do not decompress: {err}"
        ) from err
    return out


def altered(part: ChunkPart, number: int) -> CorruptCheckpointError:
    """The error for a subchunk that is not what was saved."""
    return CorruptCheckpointError(
        f"chunk {part.key!r} of array {part.node.path!r} in {part.array.store.url} is not what was saved: the checksum "
        f"of bytes {part.table.begin(number)}-{part.table.begin(number + 1)} differs"
    )


def box_memory(node: ArrayNode, box: Box) -> RawArray:
    """Memory for a box of a stored array, raw elements."""
    return np.empty(box.shape, raw_dtype(node.dtype.itemsize))
