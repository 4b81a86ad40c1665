"""Read chunks: jobs that fetch, check and copy what a box needs of one, within a memory bound."""

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
class ChunkPart:
    """Some subchunks of one chunk, which are read together."""

    node: ArrayNode
    """Its path begins at the checkpoint's url."""
    chunk: Ints
    numbers: Sequence[int]
    """Ascending; without gaps, where they are read with one request."""
    table: ChunkTable

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


def chunk_jobs(
    store: Store, node: ArrayNode, chunk: Ints, box: Box, target: Target, table: ChunkTable, memory: BytesBudget
) -> list[Job]:
    """Jobs that fill a target (raw elements, the box's shape) with what a box has of a chunk.

    Nothing is fetched but what shares a subchunk with the box. Called for each of the box's chunks.
    """
    numbers = subchunks_in(node.grid, chunk, box)
    parts: Sequence[Sequence[int]] = runs_of(node, numbers, memory)
    read = read_run
    if store.is_local and node.compression is None:
        step = max(1, FILE_BYTES // subchunk_bytes(node))
        parts = [numbers[begin : begin + step] for begin in range(0, len(numbers), step)]
        read = read_local
    return [partial(read, store, ChunkPart(node, chunk, part, table), box, target, memory) for part in parts]


def subchunks_in(grid: Grid, chunk: Ints, box: Box) -> list[int]:
    """The numbers of a chunk's subchunks that share elements with a box, ascending."""
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


def read_local(store: Store, part: ChunkPart, box: Box, target: Target, memory: BytesBudget) -> tuple[int, int]:
    """Fill a target from a local file, straight where that may be; return the bytes read and the bytes filled.

    Raises CorruptCheckpointError naming the array and the object for an absent, short or altered object.
    """
    node, size = part.node, subchunk_bytes(part.node)
    straight = [straight_bytes(node, part.chunk, number, box, target) for number in part.numbers]
    need = size if any(memory is None for memory in straight) else 0
    filled = 0
    with missing_is_damage(store, node, part.chunk), store.reader(part.key) as file, memory.take(need) as scratch:
        for number, data in zip(part.numbers, straight, strict=True):
            read = scratch if data is None else data
            if _read_checked(file, part.table.begin(number), read) != part.table.checksums[number]:
                raise altered(store, part, number)
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


def read_run(store: Store, part: ChunkPart, box: Box, target: Target, memory: BytesBudget) -> tuple[int, int]:
    """Fetch, check and copy neighbouring subchunks; return the bytes fetched and the bytes filled. One request.

    Raises CorruptCheckpointError naming the array and the object for an absent, short or altered object.
    """
    nbytes = part.nbytes
    with memory.take(nbytes + unpacking_bytes(part.node)) as both:
        fetch(store, part, both[:nbytes])
        return nbytes, deliver(store, part, both[:nbytes], box, target, both[nbytes:])


def unpacking_bytes(node: ArrayNode) -> int:
    """The scratch memory that :func:`unpacked` needs: for a subchunk's elements, where the array is compressed."""
    return 0 if node.compression is None else subchunk_bytes(node)


def fetch(store: Store, part: ChunkPart, stored: RawArray) -> None:
    """Fill bytes with neighbouring subchunks as they are stored, unchecked. One request.

    Raises CorruptCheckpointError for an absent object.
    """
    with missing_is_damage(store, part.node, part.chunk):
        store.read_into(part.key, part.table.begin(part.numbers[0]), stored.data)


def deliver(store: Store, part: ChunkPart, stored: RawArray, box: Box, target: Target, scratch: RawArray) -> int:
    """Check neighbouring subchunks as they are stored, and copy them into a target; the bytes filled. No requests.

    ``scratch`` has :func:`unpacking_bytes`. Errors as in :func:`unpacked`.
    """
    filled = 0
    for number, data in part.each(stored):
        straight = straight_bytes(part.node, part.chunk, number, box, target)
        if straight is not None and part.node.compression is not None:
            filled += len(unpacked(store, part, number, data, straight))
        else:
            elements = unpacked(store, part, number, data, scratch)
            filled += copy_shared(part.node, part.chunk, number, elements, box, target)
    return filled


def unpacked(store: Store, part: ChunkPart, number: int, stored: RawArray, out: RawArray) -> RawArray:
    """A stored subchunk, checked: its elements' bytes, in their place or, where they are compressed, in ``out``.

    Raises CorruptCheckpointError naming the array and the object where it is not what was saved.
    """
    if not part.table.holds(number, stored):
        raise altered(store, part, number)
    if part.node.compression is None:
        return stored[:-CRC_BYTES]
    try:
        part.node.compression.decode(stored[:-CRC_BYTES], out)
    except DecodeError as err:
        raise CorruptCheckpointError(
            f"chunk {part.key!r} of array {part.node.path!r} in {store.url} is not what was saved: bytes "
            f"{part.table.begin(number)}-{part.table.begin(number + 1)} do not decompress: {err}"
        ) from err
    return out


@contextmanager
def missing_is_damage(store: Store, node: ArrayNode, chunk: Ints) -> Iterator[None]:
    """Raise CorruptCheckpointError in place of ObjectNotFoundError."""
    try:
        yield
    except ObjectNotFoundError as err:
        raise CorruptCheckpointError(
            f"chunk {node.chunk_key(chunk)!r} of array {node.path!r} is missing in {store.url}"
        ) from err


def altered(store: Store, part: ChunkPart, number: int) -> CorruptCheckpointError:
    """The error for a subchunk that is not what was saved."""
    return CorruptCheckpointError(
        f"chunk {part.key!r} of array {part.node.path!r} in {store.url} is not what was saved: the checksum of bytes "
        f"{part.table.begin(number)}-{part.table.begin(number + 1)} differs"
    )


def new_array(store: Store, node: ArrayNode, checksums: RawArray, sizes: RawArray | None = None) -> RawArray:
    """Memory for a whole stored array, raw elements. ``checksums`` and ``sizes`` are its parts of the tables.

    A document can claim any size: before much is allocated, one request looks for the end of the first chunk.
    Raises CorruptCheckpointError where that is not stored, CheckpointError where there is not so much memory.
    """
    if node.nbytes > LARGE_BYTES:
        look_for_end(store, node, checksums, sizes)
    try:
        return new_memory(node, Box((0,) * len(node.grid.shape), node.grid.shape))
    except (MemoryError, ValueError) as err:
        raise CheckpointError(
            f"array {node.path!r} in {store.url} has {node.nbytes:,} bytes, more than can be allocated here: read it "
            "in parts, ckpt[name][begin:end]"
        ) from err


def new_memory(node: ArrayNode, box: Box) -> RawArray:
    """Memory for a box of a stored array, raw elements."""
    return np.empty(box.shape, raw_dtype(node.dtype.itemsize))


def look_for_end(store: Store, node: ArrayNode, checksums: RawArray, sizes: RawArray | None) -> None:
    """One request for the end of an array's first chunk. Raises CorruptCheckpointError where that is not stored."""
    first = (0,) * len(node.grid.shape)
    end = ChunkTable.of(node, first, checksums, sizes).object_size
    with missing_is_damage(store, node, first):
        store.read(node.chunk_key(first), end - CRC_BYTES, CRC_BYTES)


def read_box(
    store: Store, node: ArrayNode, checksums: RawArray, box: Box | None = None, *, sizes: RawArray | None = None
) -> RawArray:
    """A box of a stored array (default: all of it) as raw elements, read in the calling thread."""
    whole = box if box is not None else Box((0,) * len(node.grid.shape), node.grid.shape)
    target = new_array(store, node, checksums, sizes) if box is None else new_memory(node, box)
    memory = BytesBudget(DEFAULT_MAX_INFLIGHT_BYTES)
    for chunk in node.grid.chunks_of(whole):
        table = ChunkTable.of(node, chunk, checksums, sizes)
        for job in chunk_jobs(store, node, chunk, whole, target, table, memory):
            job()
    return target
