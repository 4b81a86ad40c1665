"""A Zarr store in which an absent chunk is damage, not fill values, and every chunk is checked against the table."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
from zarr.abc.store import OffsetByteRequest, RangeByteRequest, SuffixByteRequest
from zarr.storage import WrapperStore

from zarrckpt._documents import NODE, ArrayNode
from zarrckpt._errors import CheckpointError, CorruptCheckpointError, ObjectNotFoundError, StorageError

if TYPE_CHECKING:
    from zarr.abc.store import ByteRequest, Store
    from zarr.core.buffer import Buffer, BufferPrototype

    from zarrckpt._catalog import Catalog
    from zarrckpt._chunk_table import ChunkTable


class StrictStore(WrapperStore[Any]):
    """What :func:`zarrckpt.open` gives to zarr-python.

    zarr-python reads an absent chunk as fill values, and cannot tell a chunk from another one in its place. Here
    both, and any altered or short chunk, raise CorruptCheckpointError that names the object, or CheckpointReplacedError
    where another save has been committed at the url since.
    """

    def __init__(self, store: Store, catalog: Catalog) -> None:
        super().__init__(store)
        self._catalog = catalog
        self._nodes = {node.under(catalog.root.tree).path: node for node in catalog.root.arrays()}

    def __str__(self) -> str:
        return self._catalog.store.url  # arrays show it as their place

    def __reduce__(self) -> tuple[object, ...]:
        # The store anew, and with it a client of the process that unpickles.
        return (reopen, (self._catalog,))

    def _with_store(self, store: Any) -> StrictStore:
        return StrictStore(store, self._catalog)

    async def get(self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None) -> Buffer | None:
        """An object or a part of it. Raises for a chunk that is not what was saved."""
        path, _, name = key.rpartition("/")
        node = self._nodes.get(path)
        if node is None or name == NODE:
            return await self._get(key, prototype, byte_range)
        try:
            value = await self._get(key, prototype, byte_range)
        except ObjectNotFoundError:
            value = None  # zarr's own local store says so where the url's folder is gone
        except Exception:
            # Some stores raise for a range behind the end of an object: only its size tells.
            if not await self._has_other_size(node, key):
                raise
            value = prototype.buffer.from_bytes(b"")
        # In a thread: it may wait for a request, and zarr's own stores answer on this loop.
        await asyncio.to_thread(self._check, node, key, byte_range, value)
        return value

    async def _get(self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None) -> Buffer | None:
        value: Buffer | None = await self._asked(f"reading {key!r}", self._store.get(key, prototype, byte_range))
        return value

    async def getsize(self, key: str) -> int:
        """An object's size by the store's own cheapest way."""
        size: int = await self._asked(f"asking for the size of {key!r}", self._store.getsize(key))
        return size

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

    async def _has_other_size(self, node: ArrayNode, key: str) -> bool:
        try:
            table = await asyncio.to_thread(self._table, node, key)
            return await self.getsize(key) != table.object_size
        except Exception:
            return False  # the store fails altogether; the first error says why

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> list[Buffer | None]:
        """Several parts of objects, each checked as in :meth:`get`."""
        return [*await asyncio.gather(*(self.get(key, prototype, part) for key, part in key_ranges))]

    def _check(self, node: ArrayNode, key: str, byte_range: ByteRequest | None, value: Buffer | None) -> None:
        with self._catalog.guard():
            where = f"chunk {key!r} of array {node.path!r} in {self._catalog.store.url}"
            if value is None:
                raise CorruptCheckpointError(f"{where} is missing")
            table = self._table(node, key)
            start, stop = _extent(byte_range, table.object_size)
            stored = np.asarray(value.as_numpy_array()).view(np.uint8)
            if len(stored) != stop - start or not table.check(start, stored, node.compression):
                raise CorruptCheckpointError(f"{where} is not what was saved: its size or a checksum differs")

    def _table(self, node: ArrayNode, key: str) -> ChunkTable:
        """What the tables say of a chunk. May wait for a request."""
        return self._catalog.chunk_table(node, tuple(map(int, key.rpartition("/")[2].split(".")[1:])))


def reopen(catalog: Catalog) -> StrictStore:
    """The Zarr store of a checkpoint."""
    return StrictStore(catalog.store.zarr_store(), catalog)


def _extent(byte_range: ByteRequest | None, size: int) -> tuple[int, int]:
    """The bytes, from and to, that a request asks for in an object of a known size."""
    if isinstance(byte_range, RangeByteRequest):
        return byte_range.start, min(byte_range.end, size)
    if isinstance(byte_range, OffsetByteRequest):
        return byte_range.offset, size
    if isinstance(byte_range, SuffixByteRequest):
        return max(size - byte_range.suffix, 0), size
    return 0, size
