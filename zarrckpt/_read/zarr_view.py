"""A Zarr store that checks every chunk against the table of checksums, and raises an error for a missing chunk."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from zarr.abc.store import OffsetByteRequest, RangeByteRequest, SuffixByteRequest

from zarrckpt._errors import CheckpointError, CorruptCheckpointError, ObjectNotFoundError, StorageError
from zarrckpt._format.documents import NODE, ArrayNode
from zarrckpt._format.grid import Ints
from zarrckpt._format.json_values import dumps
from zarrckpt._store import _failures
from zarrckpt._store._zarr_readers import ReadOnlyStore

if TYPE_CHECKING:
    from zarr.abc.store import ByteRequest, Store
    from zarr.core.buffer import Buffer, BufferPrototype

    from zarrckpt._read.catalog import Catalog


class StrictStore(ReadOnlyStore):
    """The store through which zarr-python reads a checkpoint that :func:`zarrckpt.open` has opened.

    zarr-python reads a missing chunk as fill values, and does not notice if two chunks are exchanged. This store raises
    CorruptCheckpointError with the object's key for both, and for any altered or short chunk. If another save has been
    committed at the url since, it raises CheckpointReplacedError. Documents come from the root that was opened.

    Only the methods below call the inner store. Every other reading method of ``zarr.abc.store.Store`` calls
    :meth:`get`.
    """

    def __init__(self, store: Store, catalog: Catalog) -> None:
        super().__init__(store)
        self._catalog = catalog
        self._nodes = {node.under(catalog.root.tree).path: node for node in catalog.root.arrays()}

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, StrictStore) or self._inner != other._inner:
            return False
        return self._catalog.root.save_id == other._catalog.root.save_id

    def __hash__(self) -> int:
        return hash((type(self), self._catalog.root.save_id))

    def __str__(self) -> str:
        return self._catalog.store.url  # zarr arrays show it as their address

    def __reduce__(self) -> tuple[object, ...]:
        # The process that unpickles opens the store again, with its own client.
        return (reopen, (self._catalog,))

    async def get(self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None) -> Buffer | None:
        """Return an object or a part of it. Raises CorruptCheckpointError for a chunk that differs from the save."""
        document = self._documents.get(key) if key.endswith(NODE) else None
        if document is not None:
            start, stop = _extent(byte_range, len(document))
            return prototype.buffer.from_bytes(document[start:stop])
        path, _, name = key.rpartition("/")
        node = self._nodes.get(path)
        chunk = None if node is None else _chunk(node, name)
        if node is None or chunk is None:
            return await self._get(key, prototype, byte_range)
        try:
            value = await self._get(key, prototype, byte_range)
        except ObjectNotFoundError:
            value = None  # zarr's local store raises this if the folder of the url is missing
        except Exception:
            # Some stores raise for a range behind the end of an object. The object's size shows whether it is short.
            if not await self._has_other_size(node, chunk, key):
                raise
            value = prototype.buffer.from_bytes(b"")
        # In a thread, because it may wait for a request, and zarr's own stores run on this event loop.
        unchecked = await asyncio.to_thread(self._check, node, chunk, byte_range, value)
        if unchecked is None:
            return value
        # A part of a subchunk has no checksum, so the whole subchunk is read.
        whole, part = unchecked
        value = await self.get(key, prototype, whole)
        return None if value is None else value[part]

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
        found: bool = await self._hide_secrets(f"looking for {key!r}", self._inner.exists(key))
        return found

    async def getsize(self, key: str) -> int:
        """Return an object's size, by the store's cheapest request for it."""
        size: int = await self._hide_secrets(f"reading the size of {key!r}", self._inner.getsize(key))
        return size

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        """Yield the keys that begin with a prefix."""
        keys = self._inner.list_prefix(prefix)
        while (key := await self._hide_secrets(f"listing {prefix!r}", anext(keys, None))) is not None:
            yield key

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        """Yield the names directly below a folder."""
        names = self._inner.list_dir(prefix)
        while (name := await self._hide_secrets(f"listing {prefix!r}", anext(names, None))) is not None:
            yield name

    @cached_property
    def _documents(self) -> dict[str, bytes]:
        """Key -> document of each node, built from the root. The stored documents may belong to a later save."""
        root = self._catalog.root
        nodes = root.documents()
        return {NODE: root.to_bytes()} | {f"{path}/{NODE}": dumps(document) for path, document in nodes.items()}

    async def _get(self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None) -> Buffer | None:
        value: Buffer | None = await self._hide_secrets(f"reading {key!r}", self._inner.get(key, prototype, byte_range))
        return value

    async def _hide_secrets(self, what: str, answer: Awaitable[Any]) -> Any:
        """Await an answer of the store. Raises StorageError for the client's errors, whose texts may have secrets."""
        failure: StorageError
        try:
            return await answer
        except CheckpointError:
            raise
        except FileNotFoundError as error:
            failure = ObjectNotFoundError(str(self._catalog.store.failure(what, error)))
        except Exception as error:
            failure = self._catalog.store.failure(what, error)
        # Outside of the handler, because the exception's context would keep the client's own text.
        raise failure

    async def _has_other_size(self, node: ArrayNode, chunk: Ints, key: str) -> bool:
        try:
            table = await asyncio.to_thread(self._catalog.chunk_table, node, chunk)
            return await self.getsize(key) != table.object_size
        except Exception:
            return False  # the store fails in general, and the first error has the reason

    def _check(
        self, node: ArrayNode, chunk: Ints, byte_range: ByteRequest | None, value: Buffer | None
    ) -> tuple[RangeByteRequest, slice] | None:
        """Raise CorruptCheckpointError for a part of a chunk that differs from the save. May request the tables.

        Returns None if the whole part was checked. Otherwise returns the range of whole subchunks to read instead, and
        the position of the part in this range.
        """
        with self._catalog.explaining_damage():
            key = node.under(self._catalog.root.tree).chunk_key(chunk)
            where = f"chunk {key!r} of array {node.path!r} in {self._catalog.store.url}"
            if value is None:
                raise CorruptCheckpointError(f"{where} is missing")
            table = self._catalog.chunk_table(node, chunk)
            start, stop = _extent(byte_range, table.object_size)
            stored = np.asarray(value.as_numpy_array()).view(np.uint8)
            # Not for the other kinds of ranges: an object that is too long makes their answers longer too.
            if len(stored) > stop - start and isinstance(byte_range, RangeByteRequest | SuffixByteRequest):
                raise _failures.ranges_ignored(key, self._catalog.store.url, stop - start, len(stored))
            if len(stored) != stop - start or not table.check(start, stored):
                raise CorruptCheckpointError(f"{where} is damaged: its size or a checksum differs")
            begin, end = table.whole(start, stop)
        if (begin, end) == (start, stop):
            return None
        return RangeByteRequest(begin, end), slice(start - begin, stop - begin)


def reopen(catalog: Catalog) -> StrictStore:
    """Return the Zarr store of a checkpoint."""
    return StrictStore(catalog.store.zarr_store(), catalog)


def _chunk(node: ArrayNode, name: str) -> Ints | None:
    """Return the chunk of an array that an object's name below the array denotes, or None if it is not a chunk."""
    letter, *numbers = name.split(".")
    counts = node.grid.counts
    if letter != "c" or len(numbers) != len(counts) or not all(map(str.isdecimal, numbers)):
        return None
    chunk = tuple(map(int, numbers))
    return chunk if all(index < count for index, count in zip(chunk, counts, strict=True)) else None


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
