"""Read-only Zarr stores for other libraries: zarr's own, with additional checks and renewed credentials."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from zarr.abc.store import ByteRequest, OffsetByteRequest, Store
from zarr.core.buffer import Buffer, BufferPrototype
from zarr.storage import LocalStore, ObjectStore

from zarrckpt._errors import StorageError
from zarrckpt._store._failures import ABSENT, refuses_credentials
from zarrckpt._store._fork import check_fork
from zarrckpt._store._regular_files import check_regular

if TYPE_CHECKING:
    from zarrckpt._store._obstore_client import Bucket

T = TypeVar("T")


class ReadOnlyStore(Store):
    """A read-only Zarr store on another one. Only subclasses forward calls to the inner store."""

    supports_writes = False
    supports_deletes = False

    def __init__(self, store: Store) -> None:
        super().__init__(read_only=True)
        self._inner = store

    @property
    def supports_listing(self) -> bool:
        return self._inner.supports_listing

    def with_read_only(self, read_only: bool = False) -> Store:
        if not read_only:
            raise ValueError("this store is read-only, expected read_only=True")
        return self

    async def set(self, key: str, value: Buffer) -> None:
        self._check_writable()

    async def delete(self, key: str) -> None:
        self._check_writable()

    def list(self) -> AsyncIterator[str]:
        return self.list_prefix("")


class PrefixStore(ReadOnlyStore):
    """The part of a Zarr store below a path ("" for the whole store). The store is opened if it was not."""

    def __init__(self, store: Store, path: str) -> None:
        super().__init__(store)
        self._path = path

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PrefixStore) and (self._inner, self._path) == (other._inner, other._path)

    def __hash__(self) -> int:
        return hash((type(self), self._path))

    def __str__(self) -> str:
        return f"{type(self._inner).__name__}/{self._path}".rstrip("/")

    async def get(self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None) -> Buffer | None:
        return await (await self._opened()).get(self._full(key), prototype, byte_range)

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> list[Buffer | None]:
        inside = [(self._full(key), byte_range) for key, byte_range in key_ranges]
        return await (await self._opened()).get_partial_values(prototype, inside)

    async def exists(self, key: str) -> bool:
        return await (await self._opened()).exists(self._full(key))

    async def getsize(self, key: str) -> int:
        return await (await self._opened()).getsize(self._full(key))

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        async for key in (await self._opened()).list_prefix(self._full(prefix)):
            yield key[len(self._full("")) :]

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        async for name in (await self._opened()).list_dir(self._full(prefix)):
            yield name

    async def _opened(self) -> Store:
        await self._inner._ensure_open()
        return self._inner

    def _full(self, key: str) -> str:
        return f"{self._path}/{key}" if self._path else key


class RegularFilesStore(LocalStore):
    """zarr's store on a local folder. It raises for a FIFO or a device, which could block or never end."""

    async def get(
        self, key: str, prototype: BufferPrototype | None = None, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        with suppress(OSError):  # zarr's own call raises it, or returns None for an absent file
            await asyncio.to_thread(check_regular, str(self.root / key))
        return await super().get(key, prototype, byte_range)


class ClientReadStore(PrefixStore):
    """zarr's store on a prefix of a bucket, read with obstore. Raises in a forked child, where obstore would hang.

    If the server refuses the credentials, each call reads them again once, like other reads of the bucket.
    """

    def __init__(self, bucket: Bucket, prefix: str) -> None:
        self._bucket, self._client = bucket, bucket.persistent
        super().__init__(ObjectStore(self._client, read_only=True), prefix)

    async def get(self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None) -> Buffer | None:
        if byte_range is not None and not isinstance(byte_range, OffsetByteRequest):
            return await self._ask(partial(super().get, key, prototype, byte_range))
        return await self._ask(partial(self._get, key, prototype, byte_range))

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> list[Buffer | None]:
        return await self._ask(partial(super().get_partial_values, prototype, [*key_ranges]))

    async def exists(self, key: str) -> bool:
        return await self._ask(partial(super().exists, key))

    async def getsize(self, key: str) -> int:
        return await self._ask(partial(super().getsize, key))

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        for key in await self._ask(partial(_collect, super().list_prefix, prefix)):
            yield key

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        for name in await self._ask(partial(_collect, super().list_dir, prefix)):
            yield name

    async def _get(self, key: str, prototype: BufferPrototype, tail: OffsetByteRequest | None) -> Buffer | None:
        """Return an object, or its bytes from an offset on."""
        check_fork()
        import obstore

        options: Any = {} if tail is None else {"range": {"offset": tail.offset}}
        try:
            answer = await obstore.get_async(self._bucket.persistent, self._full(key), options=options)
            # As a stream, because obstore would allocate any size that the server announces for a whole object.
            start, end = answer.range
            data = await anext(answer.stream(min_chunk_size=end - start + 1), b"")
        except ABSENT:
            return None
        if len(data) > end - start:
            raise StorageError(
                f"reading {key!r} failed: the server sends more than the {end - start} bytes that it announces. Check "
                "the endpoint and the server"
            )
        return prototype.buffer.from_bytes(bytes(data))

    async def _ask(self, call: Callable[[], Awaitable[T]]) -> T:
        generation = self._bucket.generation
        try:
            return await call()
        except Exception as error:
            # The source of the credentials may be a slow program.
            if not refuses_credentials(error) or not await asyncio.to_thread(self._bucket.renew, generation):
                raise
        return await call()

    async def _opened(self) -> Store:
        check_fork()
        if self._client is not self._bucket.persistent:
            self._client = self._bucket.persistent
            self._inner = ObjectStore(self._client, read_only=True)
        return await super()._opened()


async def _collect(ask: Callable[[str], AsyncIterator[str]], prefix: str) -> list[str]:
    return [name async for name in ask(prefix)]
