"""S3, Google Cloud Storage and Azure through obstore.

A put is one request, and of a large object a multipart upload of several parts at once; neither copies its buffers.
obstore repeats what fails. Until a server has answered once, all but puts are repeated for a second at most, and wait
ten seconds for an answer: its address may be wrong.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import obstore
from obstore import exceptions as client_errors

from zarrckpt._errors import CorruptCheckpointError, ObjectNotFoundError, StorageError
from zarrckpt._store import _failures
from zarrckpt._store._base import MOST_WHOLE, Buffer, Listing, ObjectInfo, Versioned, byte_views, version_of
from zarrckpt._store._client_store import ClientStore
from zarrckpt._store._conditional_puts import NoConditionsError
from zarrckpt._store._fork import check_fork
from zarrckpt._store._obstore_client import Client, awaited

if TYPE_CHECKING:
    from zarr.abc.store import Store as ZarrStore

T = TypeVar("T")

_LISTED_AT_ONCE = 1000
"""Objects of a listing that are taken at a time: as many as a server sends in one answer."""

CONCURRENCY = 64
"""As many objects at once as a distant server needs; to one nearby the threads only wait for each other."""

SPLIT = 16 * 2**20
"""Objects from this size on go up in parts: a connection is seldom as fast as the line, and few fit in memory."""

_AWAITED = 2**18
"""Ranges from this size on are asked for asynchronously. For smaller ones the way to the event loop costs more."""

_MOST_OF_A_PUT = 5 * 2**30
"""No server takes more in one request."""

_PART = 8 * 2**20
_PARTS_AT_ONCE = 8


class ObstoreStore(ClientStore):
    """Objects below one prefix of a bucket. Safe for many threads; of no use in a forked child."""

    max_concurrency = CONCURRENCY

    def __init__(self, client: Client, url: str) -> None:
        super().__init__(url, client.prefix, client.honoured, secrets=client.known_secrets)
        self._client = client
        self._bucket = client.bucket

    def get_named(self, name: str, most: int) -> bytes:
        return self._bucket.read(lambda store: _take_whole(obstore.get(store, name), name, most))

    def get_versioned(self, key: str) -> Versioned:
        def fetch(store: Any) -> Versioned:
            answer = obstore.get(store, self.name(key))
            # None is not taken back as a part of the version.
            version = {name: answer.meta[name] for name in ("e_tag", "version") if answer.meta.get(name) is not None}
            data = _take_whole(answer, key, MOST_WHOLE)
            return Versioned(data, version or version_of(data))

        return self.call(f"reading {key!r}", lambda: self._bucket.read(fetch), key)

    def fetch_named(self, name: str, start: int, end: int) -> memoryview:
        options: Any = {"range": (start, end)}
        nbytes = end - start

        async def fetch_later(store: Any) -> memoryview:
            answer = await obstore.get_async(store, name, options=options)
            return _checked_length(await anext(answer.stream(min_chunk_size=nbytes + 1), b""), name, nbytes)

        def fetch(store: Any) -> memoryview:
            if nbytes >= _AWAITED:
                return awaited(partial(fetch_later, store))
            answer = obstore.get(store, name, options=options)
            return _checked_length(next(answer.stream(min_chunk_size=nbytes + 1), b""), name, nbytes)

        return self._bucket.read(fetch)

    def size_named(self, name: str) -> int:
        return int(obstore.head(self._bucket.store, name)["size"])

    def put(self, key: str, buffers: Sequence[Buffer]) -> None:
        views = byte_views(buffers) or [memoryview(b"")]
        what = f"writing {key!r}"
        if sum(map(len, views)) < SPLIT:
            self.call(what, lambda: self._put(key, views, use_multipart=False))
        else:
            super().call(what, lambda: self._put_split(key, views))

    def _put_split(self, key: str, views: Sequence[memoryview]) -> None:
        # obstore takes a buffer at a time, and begins all parts that are in it at once.
        pieces = [view[at : at + _PART] for view in views for at in range(0, len(view), _PART)]
        # It begins the last part without waiting for its turn; it does wait for that of a buffer after it.
        pieces.append(memoryview(b""))
        at_once = max(1, self.max_concurrency // _PARTS_AT_ONCE)
        try:
            self._ask(lambda: self._put(key, pieces, use_multipart=True, chunk_size=_PART, max_concurrency=at_once))
        except (client_errors.BaseError, FileNotFoundError) as error:
            if not _failures.hides_reason(error) or sum(map(len, views)) > _MOST_OF_A_PUT:
                raise
            # The reason is lost. One request succeeds, or fails with a reason of its own.
            self._put(key, views, client="unrepeated", use_multipart=False)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        return self._put_mode(key, data, "create", f"creating {key!r}")

    def put_if_version(self, key: str, data: bytes, version: Any) -> bool:
        what = f"replacing {key!r}"
        read: dict[str, Any] = version if isinstance(version, dict) else {}
        if read and self._put_mode(key, data, read, what):
            return True
        told, e_tag = self._own_e_tag(key), str(read.get("e_tag", ""))
        # After that look: had the object changed before it, this read would tell.
        found = self.read_if_any(key)
        # Nothing changed, and still refused: readers were sent on to a server that has e-tags of its own, or none; or
        # (Ceph) the bare e-tag is compared. The server still decides.
        other = told if told != e_tag else told.strip('"')
        if found is None or found.version != version or other in ("", e_tag):
            return False
        return self._put_mode(key, data, {**read, "e_tag": other}, what)

    def _own_e_tag(self, key: str) -> str:
        """The e-tag that the server itself gives an object; "" for none. One request, which is never sent on."""
        with contextlib.suppress(ObjectNotFoundError):
            meta = self.call(f"reading {key!r}", lambda: obstore.head(self._bucket.store, self.name(key)), key)
            return str(meta.get("e_tag") or "")
        return ""

    def _put(self, key: str, data: Any, *, client: str = "persistent", **options: Any) -> None:
        # By name: renewed credentials come with new clients.
        obstore.put(getattr(self._bucket, client), self.name(key), data, **self._client.put_options, **options)

    def _put_mode(self, key: str, data: bytes, mode: Any, what: str) -> bool:
        def put(client: str = "persistent") -> bool:
            try:
                self._put(key, data, client=client, mode=mode, use_multipart=False)
            except (client_errors.AlreadyExistsError, client_errors.PreconditionError) as error:
                if _failures.is_passing(error):
                    raise
                return False
            return True

        if (self._honoured.creates if mode == "create" else self._honoured.matches) is None:
            # Where a server has no conditions, obstore would ask for more than a minute.
            try:
                return self.call(what, partial(put, "impatient"))
            except StorageError as error:
                if _failures.not_implemented(error):
                    raise NoConditionsError(str(error)) from None
        return self.call(what, put)

    def delete(self, keys: Iterable[str]) -> None:
        if not self._client.bulk_delete:
            return super().delete(keys)
        if names := [self.name(key) for key in keys]:
            what = f"deleting {len(names)} objects"
            self.call(what, lambda: obstore.delete(self._bucket.store, names))

    def delete_named(self, name: str) -> None:
        try:
            obstore.delete(self._bucket.store, name)
        except FileNotFoundError:
            return

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        what, last = f"listing {prefix!r}", None

        def begin() -> tuple[Any, Any]:
            stream = obstore.list(
                self._bucket.store, self.folder(prefix) or None, offset=last, chunk_size=_LISTED_AT_ONCE
            )
            return stream, self._awaited_page(lambda: anext(stream, None))

        def go_on() -> tuple[Any, Any]:
            try:
                return stream, self._awaited_page(lambda: anext(stream, None))
            except client_errors.BaseError:
                # The stream is at its end then, and the rest would be missing.
                return self.call(what, begin)

        stream, batch = self.call(what, begin)
        first_paths: set[str] = set()
        while batch:
            if batch[0]["path"] in first_paths:
                raise StorageError(
                    f"{what} in {self.url} failed: the server lists {batch[0]['path']!r} again and again. Check the "
                    "endpoint and the server"
                )
            first_paths.add(batch[0]["path"])
            for item in batch:
                # The folder's own name with a "/", which consoles put: obstore strips that.
                if item["path"] == self.folder(prefix):
                    continue
                yield ObjectInfo(item["path"].removeprefix(f"{self._client.prefix}/"), item["size"])
            last = batch[-1]["path"]
            stream, batch = super().call(what, go_on)

    def list_dir(self, prefix: str = "") -> Listing:
        def fetch() -> Any:
            folder = self.folder(prefix) or None
            return self._awaited_page(lambda: obstore.list_with_delimiter_async(self._bucket.store, folder))

        found = self.call(f"listing {prefix!r}", fetch)
        paths = (item["path"] for item in found["objects"] if item["path"] != self.folder(prefix))
        objects = sorted(path.rpartition("/")[2] for path in paths)
        return objects, sorted(path.rpartition("/")[2] for path in found["common_prefixes"])

    def holds(self, folder: str) -> bool:
        # Names of inner folders are listed as objects of no bytes.
        return any(info.size for info in self.list(folder))

    def _awaited_page(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Wait for a part of a listing, which obstore asks for until the server names no further page."""
        try:
            return awaited(ask, self._bucket.patience)
        except TimeoutError:
            raise StorageError(
                f"a listing in {self.url} did not end within {self._bucket.patience:.0f} s, and was given up. Check "
                "the endpoint and the server; to wait longer, pass timeout"
            ) from None

    def zarr_store(self) -> ZarrStore:
        check_fork()
        from zarrckpt._store._zarr_readers import ClientReadStore

        return ClientReadStore(self._bucket, self._client.prefix)

    def hint(self, error: BaseException) -> str:
        option = self._client.fixed_credentials
        if (option or self._bucket.renewable) and _failures.refuses_credentials(error):
            return self.renewal_hint(option, self._bucket.renewal_error)
        if isinstance(error, client_errors.PermissionDeniedError | client_errors.UnauthenticatedError):
            return "Check the credentials, and what they allow"
        if isinstance(error, FileNotFoundError):
            return "Check that the bucket (or container) exists and that the endpoint and the region are its own"
        return "Check the endpoint, the region and the network, and after a refusal the credentials"

    def failure(self, what: str, error: BaseException) -> StorageError:
        # Where all requests go through a proxy, one that does not might not arrive.
        may_ask = not self._bucket.is_proxied
        return _failures.storage_error(what, self.url, error, self.secrets, self.hint(error), may_ask)

    def call(self, what: str, request: Callable[[], T], key: str | None = None) -> T:
        return super().call(what, partial(self._ask, request), key)

    def _ask(self, request: Callable[[], T]) -> T:
        """Make a request, and repeat it after failures that pass."""
        check_fork()
        return self._bucket.ask(request)


def _take_whole(answer: Any, name: str, most: int) -> bytes:
    """Return the bytes of an answer, if it announces at most ``most``. obstore would allocate what is announced."""
    nbytes = answer.meta["size"]
    if nbytes > most:
        raise CorruptCheckpointError(
            f"object {name!r} is too long: the server announces {nbytes} bytes, expected at most {most}"
        )
    return bytes(_checked_length(next(answer.stream(min_chunk_size=nbytes + 1), b""), name, nbytes))


def _checked_length(data: Any, name: str, nbytes: int) -> memoryview:
    """Refuse an answer that is longer than announced: a body in pieces has no end of its own."""
    if len(data) > nbytes:
        raise StorageError(
            f"reading {name!r} was given up: the server sends more than the {nbytes} bytes that it announces. Check "
            "the endpoint and the server"
        )
    return memoryview(data)
