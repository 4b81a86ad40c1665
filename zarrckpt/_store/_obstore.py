"""S3, Google Cloud Storage and Azure through obstore.

A put is one request. A put of a large object is a multipart upload with several parts at a time. Neither copies the
buffers. :class:`Bucket` repeats failed requests and reports that. obstore repeats the requests of listings and uploads.
Until a server has answered once, its address may be wrong. Until then, all requests except puts are repeated for about
a second, and their answer may take ten seconds.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import obstore
from obstore import exceptions as client_errors

from zarrckpt._errors import CorruptCheckpointError, ObjectNotFoundError, StorageError, log
from zarrckpt._jobs import run_jobs
from zarrckpt._store import _failures
from zarrckpt._store._base import Buffer, Listing, ObjectInfo, Store, VersionedObject, byte_views, version_of
from zarrckpt._store._client_store import DELETES_AT_ONCE, ClientStore
from zarrckpt._store._conditional_puts import NoConditionsError
from zarrckpt._store._machine_account import PUBLIC_STEP, SIGN_IN_STEPS
from zarrckpt._store._obstore_client import Client, wait_for
from zarrckpt._store._optional import OptionalRequests
from zarrckpt._store._regular_files import MAX_WHOLE_BYTES
from zarrckpt._store._upload_parts import PART, SPLIT

T = TypeVar("T")

_PAGE_OBJECTS = 1000
"""Number of objects per page of a listing, the same as in one answer of a server."""

_BULK_OBJECTS = 1000
"""Maximum number of objects that one request deletes."""

CONCURRENCY = 64
"""Number of concurrent transfers that a distant server needs. A near server needs fewer."""

_ASYNC_BYTES = 2**18
"""Size in bytes from which ranges are read asynchronously. For smaller ones the switch to the event loop costs more."""

_MAX_PUT_BYTES = 5 * 2**30
"""Maximum size in bytes of a put with one request. Servers accept no more."""

_PARTS_AT_ONCE = 8

_without_copies: set[str] = set()
"""The servers and buckets that have refused a copy for good. This process sends them no further copies."""


class ObstoreStore(ClientStore):
    """Objects below one prefix of a bucket. Thread-safe. In a forked child it raises StorageError."""

    max_concurrency = CONCURRENCY

    def __init__(self, client: Client, url: str) -> None:
        super().__init__(url, client.prefix, client.conditions, secrets=client.known_secrets)
        self._client = client
        self._bucket = client.bucket
        self.proxy = client.bucket.proxy

    def get_named(self, name: str, max_bytes: int) -> bytes:
        return _take_whole(obstore.get(self._bucket.single_client, name), name, max_bytes)

    def get_versioned(self, key: str) -> VersionedObject:
        def fetch() -> VersionedObject:
            answer = obstore.get(self._bucket.single_client, self.name(key))
            version = _version_in(answer.meta)
            data = _take_whole(answer, key, MAX_WHOLE_BYTES)
            return VersionedObject(data, version or version_of(data))

        return self.call(f"reading {key!r}", fetch, key)

    def version(self, key: str) -> Any:
        found = self.call(f"reading {key!r}", lambda: obstore.head(self._bucket.single_client, self.name(key)), key)
        return _version_in(found)

    def fetch_named(self, name: str, start: int, end: int) -> memoryview:
        options: Any = {"range": (start, end)}
        nbytes = end - start

        async def fetch_later() -> memoryview:
            answer = await obstore.get_async(self._bucket.single_client, name, options=options)
            return _checked_length(await anext(answer.stream(min_chunk_size=nbytes + 1), b""), name, nbytes)

        if nbytes >= _ASYNC_BYTES:
            return wait_for(fetch_later)
        answer = obstore.get(self._bucket.single_client, name, options=options)
        return _checked_length(next(answer.stream(min_chunk_size=nbytes + 1), b""), name, nbytes)

    def size_named(self, name: str) -> int:
        return int(obstore.head(self._bucket.single_client, name)["size"])

    def put(self, key: str, buffers: Sequence[Buffer]) -> None:
        views = byte_views(buffers) or [memoryview(b"")]
        what = f"writing {key!r}"
        if sum(map(len, views)) < SPLIT:
            self.call(what, lambda: self._put(key, views, use_multipart=False))
        else:
            super().call(what, lambda: self._put_split(key, views, partial(self.report_repeat, what)))

    def _put_split(self, key: str, views: Sequence[memoryview], report: Callable[[Exception], None]) -> None:
        # obstore reads one buffer at a time, and begins to send all parts in it at once.
        pieces = [view[at : at + PART] for view in views for at in range(0, len(view), PART)]
        # The part of the last buffer begins without regard to max_concurrency, so the last buffer is empty.
        pieces.append(memoryview(b""))
        at_once = max(1, self.max_concurrency // _PARTS_AT_ONCE)
        try:
            options = {"use_multipart": True, "chunk_size": PART, "max_concurrency": at_once}
            self._bucket.ask(partial(self._put, key, pieces, client="persistent", **options), report)
        except (client_errors.BaseError, FileNotFoundError) as error:
            if not _failures.hides_reason(error) or sum(map(len, views)) > _MAX_PUT_BYTES:
                raise
            # The reason is lost. A put with one request succeeds, or its error contains the reason.
            self._put(key, views, client="unrepeated", use_multipart=False)

    @property
    def max_upload_bytes(self) -> int:  # type: ignore[override]
        if self._conditions.copies is None:
            probe = f"@zarrckpt/probe-{uuid.uuid4().hex}"
            self.put(probe, [b"1"])
            made = partial(self.copy_new, probe, f"{probe}-2", OptionalRequests())
            try:
                self._conditions.copies = made() and not made()
            except StorageError:
                self._conditions.copies = False  # Ceph 16 refuses every conditional copy.
            with contextlib.suppress(StorageError):
                self.delete([probe, f"{probe}-2"])
        # Conditional copies lose the options of puts.
        usable = self._conditions.copies and self._bucket.copies_at_once and not self._client.put_options
        return _MAX_PUT_BYTES if usable else 0

    def open_upload(self, key: str) -> Any:
        client, name = self._bucket.persistent, self.name(key)
        return obstore.open_writer(client, name, buffer_size=PART, max_concurrency=_PARTS_AT_ONCE)

    def copy_new(self, source_key: str, key: str, optional: OptionalRequests | None = None) -> bool:
        client = self._bucket.series_client if optional is None else self._bucket.unrepeated
        what = f"copying {source_key!r} to {key!r}"

        async def copy() -> bool:
            try:
                await obstore.copy_async(client, self.name(source_key), self.name(key), overwrite=False)
            except client_errors.AlreadyExistsError as error:
                if _failures.is_passing(error):
                    raise
                return False
            return True

        return self.call(what, lambda: wait_for(copy)) if optional is None else self._ask(what, copy, optional)

    def get_optional(self, key: str, max_bytes: int, optional: OptionalRequests) -> bytes:
        async def fetch() -> bytes:
            answer = await obstore.get_async(self._bucket.unrepeated, self.name(key))
            nbytes = _announced(answer, key, max_bytes)
            return bytes(_checked_length(await anext(answer.stream(min_chunk_size=nbytes + 1), b""), key, nbytes))

        return self._ask(f"reading {key!r}", fetch, optional, key)

    def copies_from(self, source: Store) -> bool:
        if not (isinstance(source, ObstoreStore) and self._bucket.copies_at_once):
            return False
        return source._bucket.server == self._bucket.server and self._bucket.server not in _without_copies

    def copy_from(self, source: Store, source_key: str, key: str, nbytes: int, optional: OptionalRequests) -> bool:
        if optional.has_ended or not (isinstance(source, ObstoreStore) and self.copies_from(source)):
            return False
        name, found = self.name(key), source.name(source_key)
        try:
            what = f"copying {found!r} to {key!r}"
            self._ask(what, lambda: obstore.copy_async(self._bucket.unrepeated, found, name), optional, source_key)
            what = f"reading the size of {key!r}"
            copy = self._ask(what, lambda: obstore.head_async(self._bucket.unrepeated, name), optional, key)
        except ObjectNotFoundError:
            return False
        except StorageError as error:
            # The put that follows shows whether the server can be reached.
            if _failures.refuses_for_good(error):
                _without_copies.add(self._bucket.server)
            if optional.end(f"{self.url}: objects cannot be copied and are written instead: {error}"):
                log.warning("%s", optional.problem)
            return False
        return bool(copy["size"] == nbytes)

    def _ask(self, what: str, ask: Callable[[], Awaitable[T]], optional: OptionalRequests, key: str | None = None) -> T:
        return super().call(what, lambda: self._bucket.ask_optional(ask, optional), key)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        return self._put_mode(key, data, "create", f"creating {key!r}")

    def put_if_version(self, key: str, data: bytes, version: Any) -> bool:
        what = f"replacing {key!r}"
        read: dict[str, Any] = version if isinstance(version, dict) else {}
        if read and self._put_mode(key, data, read, what):
            return True
        current, e_tag = self._own_e_tag(key), str(read.get("e_tag", ""))
        # Read after that request: if the object had changed before it, this read finds another version.
        found = self.read_if_any(key)
        # If the version is unchanged, the put was refused for another reason. Reads may be redirected to a server with
        # other e-tags or none. Ceph compares the e-tag without quotes. The server still decides.
        other = current if current != e_tag else current.strip('"')
        if found is None or found.version != version or other in ("", e_tag):
            return False
        return self._put_mode(key, data, {**read, "e_tag": other}, what)

    def _own_e_tag(self, key: str) -> str:
        """Return the e-tag of an object on the server itself, or "" for none. One request, never redirected."""
        with contextlib.suppress(ObjectNotFoundError):
            meta = self.call(f"reading {key!r}", lambda: obstore.head(self._bucket.single_client, self.name(key)), key)
            return str(meta.get("e_tag") or "")
        return ""

    def _put(self, key: str, data: Any, *, client: str = "put_client", **options: Any) -> None:
        # By name, because renewed credentials need new clients.
        obstore.put(getattr(self._bucket, client), self.name(key), data, **self._client.put_options, **options)

    def _put_mode(self, key: str, data: bytes, mode: Any, what: str) -> bool:
        def put() -> bool:
            try:
                self._put(key, data, mode=mode, use_multipart=False)
            except (client_errors.AlreadyExistsError, client_errors.PreconditionError) as error:
                if _failures.is_passing(error):
                    raise
                return False
            return True

        try:
            return self.call(what, put)
        except StorageError as error:
            known = self._conditions.creates if mode == "create" else self._conditions.matches
            if known is None and _failures.not_implemented(error):
                raise NoConditionsError(str(error)) from None
            raise

    def delete(self, keys: Iterable[str]) -> None:
        if not self._client.bulk_delete:
            return super().delete(keys)

        def delete(names: list[str]) -> None:
            obstore.delete(self._bucket.single_client, names)

        names = [self.name(key) for key in keys]
        batches = [names[begin : begin + _BULK_OBJECTS] for begin in range(0, len(names), _BULK_OBJECTS)]
        calls = (partial(self.call, f"deleting {len(some)} objects", partial(delete, some)) for some in batches)
        run_jobs(calls, min(DELETES_AT_ONCE, self.max_concurrency))

    def delete_named(self, name: str) -> None:
        try:
            obstore.delete(self._bucket.single_client, name)
        except FileNotFoundError:
            return

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        what = f"listing {prefix!r}"
        keys: set[str] = set()
        first_paths: set[str] = set()
        keys_of_last_try = 0

        def begin() -> tuple[Any, Any]:
            stream = obstore.list(self._bucket.series_client, self.folder(prefix) or None, chunk_size=_PAGE_OBJECTS)
            return stream, self._awaited_page(lambda: anext(stream, None))

        def go_on() -> tuple[Any, Any]:
            nonlocal keys_of_last_try
            try:
                return stream, self._awaited_page(lambda: anext(stream, None))
            except client_errors.BaseError:
                if len(keys) == keys_of_last_try:
                    raise
                # After an error the stream ends, and the rest of the listing would be missing. Begin again, not after
                # the last key: some servers do not list in order of the keys (directory buckets of S3, Storj). The
                # keys take about 130 bytes of memory each.
                keys_of_last_try = len(keys)
                first_paths.clear()
                return self.call(what, begin)

        stream, batch = self.call(what, begin)
        while batch:
            if batch[0]["path"] in first_paths:
                raise StorageError(
                    f"{what} in {self.url} failed: the server listed {batch[0]['path']!r} twice. Check the endpoint "
                    "and the server"
                )
            first_paths.add(batch[0]["path"])
            for item in batch:
                key = item["path"].removeprefix(f"{self._client.prefix}/")
                # The folder's name with a "/", which consoles create. obstore removes the "/".
                if item["path"] == self.folder(prefix) or key in keys:
                    continue
                keys.add(key)
                yield ObjectInfo(key, item["size"])
            stream, batch = super().call(what, go_on)

    def list_dir(self, prefix: str = "") -> Listing:
        def fetch() -> Any:
            folder = self.folder(prefix) or None
            return self._awaited_page(lambda: obstore.list_with_delimiter_async(self._bucket.series_client, folder))

        found = self.call(f"listing {prefix!r}", fetch)
        paths = (item["path"] for item in found["objects"] if item["path"] != self.folder(prefix))
        objects = sorted(path.rpartition("/")[2] for path in paths)
        return objects, sorted(path.rpartition("/")[2] for path in found["common_prefixes"])

    def holds(self, folder: str) -> bool:
        # Names of inner folders are listed as empty objects.
        return any(info.size for info in self.list(folder))

    def _awaited_page(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Wait for a part of a listing. obstore requests pages until the server names no further page."""
        try:
            return wait_for(ask, self._bucket.patience)
        except TimeoutError:
            raise StorageError(
                f"listing in {self.url} failed: it did not end within {self._bucket.patience:.0f} s. Check the "
                "endpoint and the server. To wait longer, pass timeout"
            ) from None

    def hint(self, what: str, error: BaseException) -> str:
        option, kind = self._client.fixed_credentials, self._bucket.kind
        if _failures.is_sign_in(error):
            return f"The machine's own account gives no credentials. {SIGN_IN_STEPS[kind]}{PUBLIC_STEP}"
        hints = [_failures.permission_hint(kind, what, error)]
        if (option or self._bucket.renewal.is_possible) and _failures.refuses_credentials(error):
            hints.append(self.renewal_hint(option, self._bucket.renewal.error))
        if any(hints):
            return ". ".join(filter(None, hints))
        if isinstance(error, client_errors.PermissionDeniedError | client_errors.UnauthenticatedError):
            return "Check the credentials and their permissions"
        if isinstance(error, FileNotFoundError):
            return "Check that the bucket (or container) exists, and that endpoint and region are those of the bucket"
        return "Check the endpoint, the region and the network. After a refusal check the credentials"

    def call(self, what: str, request: Callable[[], T], key: str | None = None) -> T:
        return super().call(what, partial(self._bucket.ask, request, partial(self.report_repeat, what)), key)


def _version_in(meta: Any) -> dict[str, Any]:
    # obstore refuses None as a part of the version.
    return {name: meta[name] for name in ("e_tag", "version") if meta.get(name) is not None}


def _take_whole(answer: Any, name: str, max_bytes: int) -> bytes:
    """Return the bytes of an answer of at most ``max_bytes``. obstore would allocate any announced size."""
    nbytes = _announced(answer, name, max_bytes)
    return bytes(_checked_length(next(answer.stream(min_chunk_size=nbytes + 1), b""), name, nbytes))


def _announced(answer: Any, name: str, max_bytes: int) -> int:
    """Return the number of bytes that a server announces. Raises CorruptCheckpointError if it is above the maximum."""
    nbytes: int = answer.meta["size"]
    if nbytes > max_bytes:
        raise CorruptCheckpointError(
            f"object {name!r} is too long: the server announces {nbytes} bytes, expected at most {max_bytes}"
        )
    return nbytes


def _checked_length(data: Any, name: str, nbytes: int) -> memoryview:
    """Raise StorageError for an answer that is longer than announced. A body in HTTP chunks may never end."""
    if len(data) > nbytes:
        raise StorageError(
            f"reading {name!r} failed: the server sends more than the {nbytes} bytes that it announces. Check the "
            "endpoint and the server"
        )
    return memoryview(data)
