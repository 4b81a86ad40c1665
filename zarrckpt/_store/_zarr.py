"""A ready ``zarr.abc.store.Store``: its asynchronous calls, run on zarr's own event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from zarr.abc.store import RangeByteRequest
from zarr.abc.store import Store as ZarrStore
from zarr.core.buffer import default_buffer_prototype
from zarr.core.sync import sync as wait

from zarrckpt._errors import CheckpointError, ObjectNotFoundError, StorageError
from zarrckpt._store import _failures
from zarrckpt._store._base import Buffer, Listing, ObjectInfo, Store, Versioned
from zarrckpt._store._guard import Guard, Honoured
from zarrckpt._store._keys import above, below, byte_views, check_key
from zarrckpt._store._local_commit import version_of
from zarrckpt._store._zarr_readers import PrefixStore

T = TypeVar("T")

# Zarr's interface has no conditional puts that tell who won; within one process a lock does.
_LOCK = threading.RLock()
_AT_ONCE = 32


class WrappedZarrStore(Store):
    """Objects below ``path`` ("" for the root) of a Zarr store.

    A store in memory lives in one process, so there conditional puts are exact (``in_memory``); any other
    store of this kind gets check-then-put, with a warning.
    """

    def __init__(self, store: ZarrStore, path: str, in_memory: bool) -> None:
        self.url = f"{type(store).__name__}/{path}".rstrip("/")
        self._store = store
        self._path = path
        self._exact = in_memory
        self._guard = Guard(self, Honoured(self._exact, self._exact), _LOCK)
        self._buffers = default_buffer_prototype()

    def get(self, key: str) -> bytes:
        return self._get(key, self._full(key))

    def get_above(self, levels: int, key: str) -> bytes:
        folder = above(self._path, levels)
        if folder is None:
            return super().get_above(levels, key)
        return self._get(f"{'../' * levels}{key}", below(folder, key))

    def _get(self, key: str, name: str) -> bytes:
        answer = self._run(f"reading {key!r}", lambda: self._store.get(name, self._buffers))
        if answer is None:
            raise _failures.not_found(key, self.url)
        return answer.to_bytes()

    def get_versioned(self, key: str) -> Versioned:
        data = self.get(key)
        return Versioned(data, version_of(data))

    def read_into(self, key: str, byte_offset: int, buffer: memoryview) -> None:
        end = byte_offset + len(buffer)
        if not len(buffer):
            return

        async def fetch() -> bytes | None:
            # A store may raise for a range behind the end, or return less: only the size tells for sure.
            try:
                found = await self._store.get(self._full(key), self._buffers, RangeByteRequest(byte_offset, end))
            except Exception:
                if await self._store.getsize(self._full(key)) >= end:
                    raise
                return b""
            return None if found is None else found.to_bytes()

        data = self._run(f"reading {key!r}", fetch)
        if data is None:
            raise _failures.not_found(key, self.url)
        if len(data) != len(buffer):
            raise _failures.short_object(key, self.url, end, byte_offset + len(data))
        buffer[:] = data

    def put(self, key: str, buffers: Sequence[Buffer]) -> None:
        # Always a copy: a MemoryStore keeps what it is given, and the caller's buffers are its own.
        data = self._buffers.buffer.from_bytes(b"".join(byte_views(buffers)))
        self._run(f"writing {key!r}", lambda: self._store.set(self._full(key), data))

    def create(self, key: str, data: bytes) -> None:
        self._guard.create(key, data)

    def replace(self, key: str, data: bytes, version: Any) -> None:
        self._guard.replace(key, data, version)

    def delete(self, keys: Iterable[str]) -> None:
        names = [self._full(key) for key in keys]

        async def remove() -> None:
            await _gather(self._delete_one(name) for name in names)

        self._run(f"deleting {len(names)} objects", remove)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        start = self._folder(prefix)

        async def fetch() -> list[tuple[str, int]]:
            keys = [key async for key in self._store.list_prefix(start) if key.startswith(start)]
            return [item for item in await _gather(self._sized(key) for key in keys) if item is not None]

        skip = len(self._folder(""))
        for key, size in self._run(f"listing {prefix!r}", fetch):
            yield ObjectInfo(key[skip:], size)

    def list_dir(self, prefix: str = "") -> Listing:
        start = self._folder(prefix)

        async def fetch() -> list[tuple[str, bool]]:
            names = sorted({name.strip("/") async for name in self._store.list_dir(start.rstrip("/"))} - {""})
            are_objects = await _gather(self._store.exists(f"{start}{name}") for name in names)
            return list(zip(names, are_objects, strict=True))

        found = self._run(f"listing {prefix!r}", fetch)
        return [name for name, is_object in found if is_object], [name for name, is_object in found if not is_object]

    def sync(self, keys: Iterable[str]) -> None:
        """Nothing to do: what the store wrote is as durable as it makes it."""

    def zarr_store(self) -> ZarrStore:
        return PrefixStore(self._store, self._path)

    # -- what the guard needs

    def read_if_any(self, key: str) -> Versioned | None:
        try:
            return self.get_versioned(key)
        except ObjectNotFoundError:
            return None

    def put_if_absent(self, key: str, data: bytes) -> bool:
        with _LOCK:
            if self._exact and self.read_if_any(key) is not None:
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

    # -- calls, with our own errors

    def _full(self, key: str) -> str:
        return below(self._path, key)

    def _folder(self, prefix: str) -> str:
        parts = [part for part in (self._path, check_key(prefix) if prefix else "") if part]
        return "/".join(parts) + "/" if parts else ""

    async def _delete_one(self, name: str) -> None:
        try:
            await self._store.delete(name)
        except FileNotFoundError:
            return

    async def _sized(self, key: str) -> tuple[str, int] | None:
        try:
            return key, await self._store.getsize(key)
        except FileNotFoundError:
            return None

    def failure(self, what: str, error: BaseException) -> StorageError:
        return _failures.storage_error(what, self.url, error, (), _hint(self._store, error))

    def _run(self, what: str, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        async def opened() -> T:
            await self._store._ensure_open()  # some stores have nothing to answer with before
            return await call()

        try:
            return wait(opened())
        except CheckpointError:
            raise
        except Exception as error:
            failure = self.failure(what, error)
        # Outside of the handler: an exception's context would keep the client's unscrubbed text.
        raise failure


async def _gather(calls: Iterable[Awaitable[T]]) -> list[T]:
    """All results in order, a bounded number of calls at a time."""
    slots = asyncio.Semaphore(_AT_ONCE)

    async def one(call: Awaitable[T]) -> T:
        async with slots:
            return await call

    return await asyncio.gather(*(one(call) for call in calls))


def _hint(store: ZarrStore, error: BaseException) -> str:
    refused = store.read_only and isinstance(error, ValueError)  # what zarr's stores raise for a write then
    return "The store was opened read-only: pass one that writes" if refused else ""
