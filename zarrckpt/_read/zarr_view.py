"""A Zarr store in which an absent chunk is damage, not fill values, and every chunk is checked against the table."""

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
    """What :func:`zarrckpt.open` gives to zarr-python.

    zarr-python reads an absent chunk as fill values, and cannot tell a chunk from another one in its place. Here
    both, and any altered or short chunk, raise CorruptCheckpointError that names the object, or CheckpointReplacedError
    where another save has been committed at the url since. Documents come from the root that was opened.

    Whatever zarr-python reads in a way that is not written here goes through :meth:`get`, as ``zarr.abc.store.Store``
    has it: nothing is forwarded to the store inside but by the methods below.
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
        return self._catalog.store.url  # arrays show it as their place

    def __reduce__(self) -> tuple[object, ...]:
        # The store anew, and with it a client of the process that unpickles.
        return (reopen, (self._catalog,))

    async def get(self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None) -> Buffer | None:
        """An object or a part of it. Raises for a chunk that is not what was saved."""
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
            value = None  # zarr's own local store says so where the url's folder is gone
        except Exception:
            # Some stores raise for a range behind the end of an object: only its size tells.
            if not await self._has_other_size(node, chunk, key):
                raise
            value = prototype.buffer.from_bytes(b"")
        # In a thread: it may wait for a request, and zarr's own stores answer on this loop.
        unchecked = await asyncio.to_thread(self._check, node, chunk, byte_range, value)
        if unchecked is None:
            return value
        # A part of a subchunk has no checksum: all of the subchunk is read instead.
        whole, part = unchecked
        value = await self.get(key, prototype, whole)
        return None if value is None else value[part]

    async def get_ranges(
        self, key: str, byte_ranges: Sequence[ByteRequest | None], **options: Any
    ) -> AsyncIterator[Sequence[tuple[int, Buffer | None]]]:
        """Several parts of an object, near ones with one request (zarr >= 3.3), each checked as in :meth:`get`."""
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
        """Several parts of objects, each checked as in :meth:`get`."""
        return [*await asyncio.gather(*(self.get(key, prototype, part) for key, part in key_ranges))]

    async def exists(self, key: str) -> bool:
        """Whether there is an object."""
        found: bool = await self._asked(f"looking for {key!r}", self._inner.exists(key))
        return found

    async def getsize(self, key: str) -> int:
        """An object's size by the store's own cheapest way."""
        size: int = await self._asked(f"asking for the size of {key!r}", self._inner.getsize(key))
        return size

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        """The keys that begin with a prefix."""
        keys = self._inner.list_prefix(prefix)
        while (key := await self._asked(f"listing {prefix!r}", anext(keys, None))) is not None:
            yield key

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        """The names right below a folder."""
        names = self._inner.list_dir(prefix)
        while (name := await self._asked(f"listing {prefix!r}", anext(names, None))) is not None:
            yield name

    @cached_property
    def _documents(self) -> dict[str, bytes]:
        """Key -> document of each node, as the root has them: those that are stored may be another save's by now."""
        root = self._catalog.root
        nodes = root.documents()
        return {NODE: root.to_bytes()} | {f"{path}/{NODE}": dumps(document) for path, document in nodes.items()}

    async def _get(self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None) -> Buffer | None:
        value: Buffer | None = await self._asked(f"reading {key!r}", self._inner.get(key, prototype, byte_range))
        return value

    async def _asked(self, what: str, answer: Awaitable[Any]) -> Any:
        """An answer of the store. Its own errors become StorageError: they may quote credentials."""
        failure: StorageError
        try:
            return await answer
        except CheckpointError:
            raise
        except FileNotFoundError as error:
            failure = ObjectNotFoundError(str(self._catalog.store.failure(what, error)))
        except Exception as error:
            failure = self._catalog.store.failure(what, error)
        # Outside of the handler: an exception's context would keep the client's own text.
        raise failure

    async def _has_other_size(self, node: ArrayNode, chunk: Ints, key: str) -> bool:
        try:
            table = await asyncio.to_thread(self._catalog.chunk_table, node, chunk)
            return await self.getsize(key) != table.object_size
        except Exception:
            return False  # the store fails altogether; the first error says why

    def _check(
        self, node: ArrayNode, chunk: Ints, byte_range: ByteRequest | None, value: Buffer | None
    ) -> tuple[RangeByteRequest, slice] | None:
        """Raise for a part of a chunk that is not what was saved. May wait for a request for the tables.

        None: all of it was checked. Otherwise the whole subchunks to read instead, and where the part is in them.
        """
        with self._catalog.explaining_damage():
            key = node.under(self._catalog.root.tree).chunk_key(chunk)
            where = f"chunk {key!r} of array {node.path!r} in {self._catalog.store.url}"
            if value is None:
                raise CorruptCheckpointError(f"{where} is missing")
            table = self._catalog.chunk_table(node, chunk)
            start, stop = _extent(byte_range, table.object_size)
            stored = np.asarray(value.as_numpy_array()).view(np.uint8)
            # An object that is too long makes the other answers longer, too.
            if len(stored) > stop - start and isinstance(byte_range, RangeByteRequest | SuffixByteRequest):
                raise _failures.ranges_ignored(key, self._catalog.store.url, stop - start, len(stored))
            if len(stored) != stop - start or not table.check(start, stored):
                raise CorruptCheckpointError(f"{where} is not what was saved: its size or a checksum differs")
            begin, end = table.whole(start, stop)
        if (begin, end) == (start, stop):
            return None
        return RangeByteRequest(begin, end), slice(start - begin, stop - begin)


def reopen(catalog: Catalog) -> StrictStore:
    """The Zarr store of a checkpoint."""
    return StrictStore(catalog.store.zarr_store(), catalog)


def _chunk(node: ArrayNode, name: str) -> Ints | None:
    """Which chunk of an array an object with a name below it is; None for no chunk."""
    letter, *numbers = name.split(".")
    counts = node.grid.counts
    if letter != "c" or len(numbers) != len(counts) or not all(map(str.isdecimal, numbers)):
        return None
    chunk = tuple(map(int, numbers))
    return chunk if all(place < count for place, count in zip(chunk, counts, strict=True)) else None


def _own_error(group: BaseExceptionGroup) -> CheckpointError | None:
    """The first of this package's errors in a group."""
    for error in group.exceptions:
        found = _own_error(error) if isinstance(error, BaseExceptionGroup) else error
        if isinstance(found, CheckpointError):
            return found
    return None


def _extent(byte_range: ByteRequest | None, size: int) -> tuple[int, int]:
    """The bytes, from and to, that a request asks for in an object of a known size."""
    if isinstance(byte_range, RangeByteRequest):
        return byte_range.start, min(byte_range.end, size)
    if isinstance(byte_range, OffsetByteRequest):
        return byte_range.offset, size
    if isinstance(byte_range, SuffixByteRequest):
        return max(size - byte_range.suffix, 0), size
    return 0, size
