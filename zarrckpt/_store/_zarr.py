"""A store on a ready ``zarr.abc.store.Store``. It runs the asynchronous calls on zarr's event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from zarr.abc.store import RangeByteRequest
from zarr.abc.store import Store as ZarrStore
from zarr.core.buffer import default_buffer_prototype
from zarr.core.sync import sync as wait
from zarr.storage import FsspecStore, ObjectStore, WrapperStore

from zarrckpt._forks import ForkSafeLock
from zarrckpt._store._base import Buffer, Listing, ObjectInfo, byte_views
from zarrckpt._store._client_store import ClientStore
from zarrckpt._store._conditional_puts import ConditionSupport

T = TypeVar("T")

# Zarr's interface has no conditional puts with a result. This lock makes them exact within one process.
_LOCK = ForkSafeLock(threading.RLock)
_CALLS_AT_ONCE = 32


class WrappedZarrStore(ClientStore):
    """Objects below ``path`` ("" for the root) of a Zarr store.

    A store in memory (``in_memory``) exists in one process only, so its conditional puts are exact. Any other store of
    this kind reads, then puts, and warns.
    """

    def __init__(self, store: ZarrStore, path: str, in_memory: bool) -> None:
        url = f"{type(store).__name__}/{path}".rstrip("/")
        super().__init__(url, path, ConditionSupport(in_memory, in_memory), _LOCK)
        self._store = store
        self._in_memory = in_memory
        self.lists_all = _lists_all(store)
        self._buffers = default_buffer_prototype()

    def get_named(self, name: str, max_bytes: int) -> bytes:
        return self._get_part(name, None)

    def fetch_named(self, name: str, start: int, end: int) -> bytes:
        return self._get_part(name, RangeByteRequest(start, end))

    def _get_part(self, name: str, part: RangeByteRequest | None) -> bytes:
        answer = self._wait(lambda: self._store.get(name, self._buffers, part))
        if answer is None:
            raise FileNotFoundError(name)
        return answer.to_bytes()

    def size_named(self, name: str) -> int:
        return self._wait(lambda: self._store.getsize(name))

    def put(self, key: str, buffers: Sequence[Buffer]) -> None:
        # Always a copy, because a MemoryStore keeps the buffer and the caller may change its own.
        data = self._buffers.buffer.from_bytes(b"".join(byte_views(buffers)))
        self._waited(f"writing {key!r}", lambda: self._store.set(self.name(key), data))

    def put_if_absent(self, key: str, data: bytes) -> bool:
        with _LOCK:
            if self._in_memory and self.read_if_any(key) is not None:
                return False
            self.put(key, [data])
            return True

    def put_if_version(self, key: str, data: bytes, version: Any) -> bool:
        with _LOCK:
            found = self.read_if_any(key)
            if found is None or found.version != version:
                return False
            self.put(key, [data])
            return True

    def delete_named(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self._wait(lambda: self._store.delete(name))

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        start = self._start(prefix)

        async def fetch() -> list[tuple[str, int]]:
            keys = [key async for key in self._store.list_prefix(start) if key.startswith(start)]
            return [item for item in await _gather(self._sized(key) for key in keys) if item is not None]

        skip = len(self._start(""))
        for key, size in self._waited(f"listing {prefix!r}", fetch):
            yield ObjectInfo(key[skip:], size)

    def list_dir(self, prefix: str = "") -> Listing:
        start = self._start(prefix)

        async def fetch() -> list[tuple[str, bool]]:
            names = sorted({name.strip("/") async for name in self._store.list_dir(start.rstrip("/"))} - {""})
            are_objects = await _gather(self._store.exists(f"{start}{name}") for name in names)
            return list(zip(names, are_objects, strict=True))

        found = self._waited(f"listing {prefix!r}", fetch)
        return [name for name, is_object in found if is_object], [name for name, is_object in found if not is_object]

    def _start(self, prefix: str) -> str:
        """Return the prefix of the names of all objects below a folder."""
        return f"{self.folder(prefix)}/" if self.folder(prefix) else ""

    async def _sized(self, name: str) -> tuple[str, int] | None:
        try:
            return name, await self._store.getsize(name)
        except FileNotFoundError:
            return None

    def _wait(self, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        async def opened() -> T:
            await self._store._ensure_open()  # some stores fail before they are opened
            return await call()

        return wait(opened())

    def _waited(self, what: str, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        return self.call(what, lambda: self._wait(call))


def _lists_all(store: ZarrStore) -> bool:
    """Whether a store can list its objects. Stores over HTTP cannot: they have only web pages with links."""
    from obstore.store import HTTPStore

    while isinstance(store, WrapperStore):
        store = store._store
    if isinstance(store, FsspecStore):
        protocols = {store.fs.protocol} if isinstance(store.fs.protocol, str) else {*store.fs.protocol}
        return not protocols & {"http", "https"}
    if isinstance(store, ObjectStore) and isinstance(store.store, HTTPStore):
        return False
    return store.supports_listing


async def _gather(calls: Iterable[Awaitable[T]]) -> list[T]:
    """Return all results in order, with at most 32 calls at a time."""
    slots = asyncio.Semaphore(_CALLS_AT_ONCE)

    async def one(call: Awaitable[T]) -> T:
        async with slots:
            return await call

    return await asyncio.gather(*(one(call) for call in calls))
