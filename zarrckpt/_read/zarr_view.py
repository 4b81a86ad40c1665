"""A Zarr store that checks every chunk against the table of checksums, and raises an error for a missing chunk."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextvars import ContextVar, copy_context
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from zarr.abc.store import OffsetByteRequest, RangeByteRequest, Store, SuffixByteRequest

from zarrckpt._errors import CheckpointError, CorruptCheckpointError, ObjectNotFoundError
from zarrckpt._format.documents import NODE, ArrayNode
from zarrckpt._format.grid import Ints
from zarrckpt._jobs import thread_pool

if TYPE_CHECKING:
    from zarr.abc.store import ByteRequest
    from zarr.core.buffer import Buffer, BufferPrototype

    from zarrckpt._read.catalog import Catalog

T = TypeVar("T")

_THREADS = 64
"""Maximum number of concurrent requests. zarr-python makes ten at a time by default."""
_depth = ContextVar("zarrckpt-zarr", default=0)
"""Number of calls of a StrictStore that wait for the current call.

It is above 0 if a checkpoint was opened through the StrictStore of another one. Calls at each depth have their own
threads, because all threads of one depth can wait for the next.
"""


class StrictStore(Store):
    """The read-only store through which zarr-python reads a checkpoint that :func:`zarrckpt.open` has opened.

    zarr-python reads a missing chunk as fill values, and does not notice if two chunks are exchanged. This store raises
    CorruptCheckpointError with the object's key for both, and for any altered or short chunk. If another save has been
    committed at the url since, it raises CheckpointReplacedError. Documents come from the root that was opened.

    Requests are calls of :class:`zarrckpt._store.Store` in threads.
    """

    supports_writes = False
    supports_deletes = False

    def __init__(self, catalog: Catalog) -> None:
        super().__init__(read_only=True)
        self._catalog = catalog
        self._nodes = {node.under(catalog.root.tree).path: node for node in catalog.root.arrays()}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StrictStore) and self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())

    def _identity(self) -> tuple[str, str]:
        return self._catalog.store.url, self._catalog.root.save_id

    def __str__(self) -> str:
        return self._catalog.store.url  # zarr arrays show it as their address

    def __reduce__(self) -> tuple[object, ...]:
        # The process that unpickles opens the store again, with its own client.
        return (StrictStore, (self._catalog,))

    @property
    def supports_listing(self) -> bool:
        return self._catalog.store.lists_all

    def with_read_only(self, read_only: bool = False) -> Store:
        if not read_only:
            raise ValueError("this store is read-only, expected read_only=True")
        return self

    async def set(self, key: str, value: Buffer) -> None:
        self._check_writable()

    async def delete(self, key: str) -> None:
        self._check_writable()

    async def get(self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None) -> Buffer | None:
        """Return an object or a part of it. Raises CorruptCheckpointError for a chunk that differs from the save."""
        data = await _in_thread(partial(self._read, key, byte_range))
        return None if data is None else prototype.buffer.from_bytes(data)

    async def get_ranges(
        self, key: str, byte_ranges: Sequence[ByteRequest | None], **options: Any
    ) -> AsyncIterator[Sequence[tuple[int, Buffer | None]]]:
        """Yield parts of an object, each checked as in :meth:`get`. Neighbours share a request (zarr >= 3.3)."""
        try:
            async for answers in super().get_ranges(key, byte_ranges, **options):  # type: ignore[misc,unused-ignore]
                yield answers
        except BaseExceptionGroup as group:
            failure = _own_error(group)
            if failure is None:
                raise
        else:
            return
        raise failure

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> list[Buffer | None]:
        """Return parts of objects, each checked as in :meth:`get`."""
        return [*await asyncio.gather(*(self.get(key, prototype, part) for key, part in key_ranges))]

    async def exists(self, key: str) -> bool:
        """Whether an object exists."""
        try:
            await self.getsize(key)
        except ObjectNotFoundError:
            return False
        return True

    async def getsize(self, key: str) -> int:
        """Return an object's size, by the store's cheapest request for it."""
        return await _in_thread(partial(self._catalog.store.size, key))

    def list(self) -> AsyncIterator[str]:
        """Yield all keys."""
        return self.list_prefix("")

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        """Yield the keys that begin with a prefix."""
        folder = prefix.rpartition("/")[0]
        for info in await _in_thread(lambda: [*self._catalog.store.list(folder)]):
            if info.key.startswith(prefix):
                yield info.key

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        """Yield the names directly below a folder."""
        objects, folders = await _in_thread(partial(self._catalog.store.list_dir, prefix.strip("/")))
        for name in (*objects, *folders):
            yield name

    @cached_property
    def _documents(self) -> dict[str, bytes]:
        """Key -> document of each node, built from the root. The stored documents may belong to a later save."""
        root = self._catalog.root
        return {NODE: root.to_bytes()} | {f"{path}/{NODE}": data for path, data in root.documents().items()}

    def _read(self, key: str, byte_range: ByteRequest | None) -> bytes | memoryview | None:
        """Return an object or a part of it, or None if it is absent and not a chunk. At most one request."""
        path, _, name = key.rpartition("/")
        node = self._nodes.get(path)
        chunk_index = None if node is None else _parse_chunk_name(node, name)
        if node is not None and chunk_index is not None:
            return self._read_chunk(node, chunk_index, byte_range)
        data = self._documents.get(key)
        if data is None:
            try:
                data = self._catalog.store.get(key)
            except ObjectNotFoundError:
                return None
        start, stop = _extent(byte_range, len(data))
        return data[start:stop]

    def _read_chunk(self, node: ArrayNode, chunk_index: Ints, byte_range: ByteRequest | None) -> memoryview:
        """Return a chunk object or a part of it. The first call also requests the tables."""
        with self._catalog.explaining_damage():
            array = self._catalog.stored_array(node)
            table, key = array.table(chunk_index), array.node.chunk_key(chunk_index)
            start, stop = _extent(byte_range, table.object_size)
            # A part of a subchunk has no checksum, so whole subchunks are read.
            begin, end = table.align(start, stop)
            try:
                if end - begin < table.object_size:
                    stored = array.store.read(key, begin, end - begin)
                else:  # without a range, which some web servers do not support
                    stored = memoryview(array.store.get_bounded(key, table.object_size))
            except ObjectNotFoundError as err:
                raise array.missing_error(chunk_index) from err
            if len(stored) != end - begin or not table.check(begin, np.frombuffer(stored, np.uint8)):
                raise CorruptCheckpointError(
                    f"chunk {key!r} of array {node.path!r} in {self._catalog.store.url} is damaged: its size or a "
                    "checksum differs"
                )
        return stored[start - begin : stop - begin]


async def _in_thread(call: Callable[[], T]) -> T:
    """Make a call in a thread, because it may wait for requests, and the event loop serves all of zarr's stores."""
    depth = _depth.get()

    def call_inside() -> T:
        _depth.set(depth + 1)
        return call()

    pool = thread_pool(f"zarrckpt-zarr-{depth}", _THREADS)
    return await asyncio.get_running_loop().run_in_executor(pool, copy_context().run, call_inside)


def _parse_chunk_name(node: ArrayNode, name: str) -> Ints | None:
    """Return the index of the chunk that a name below an array denotes, or None if it does not denote a chunk."""
    letter, *numbers = name.split(".")
    counts = node.grid.counts
    if letter != "c" or len(numbers) != len(counts) or not all(map(str.isdecimal, numbers)):
        return None
    chunk_index = tuple(map(int, numbers))
    return chunk_index if all(i < count for i, count in zip(chunk_index, counts, strict=True)) else None


def _own_error(group: BaseExceptionGroup) -> CheckpointError | None:
    """Return the first error of this package in a group, or None."""
    for error in group.exceptions:
        found = _own_error(error) if isinstance(error, BaseExceptionGroup) else error
        if isinstance(found, CheckpointError):
            return found
    return None


def _extent(byte_range: ByteRequest | None, size: int) -> tuple[int, int]:
    """Return the begin and the end of the bytes that a request reads from an object of a known size."""
    if isinstance(byte_range, RangeByteRequest):
        return byte_range.start, min(byte_range.end, size)
    if isinstance(byte_range, OffsetByteRequest):
        return byte_range.offset, size
    if isinstance(byte_range, SuffixByteRequest):
        return max(size - byte_range.suffix, 0), size
    return 0, size
