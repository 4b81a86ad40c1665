"""S3, Google Cloud Storage and Azure through obstore.

A put is one request up to 64 MiB (no copy of its buffers), and above a multipart upload, which holds up
to 32 MiB more. Failed requests are repeated by obstore itself, within the bounds of ``retry_config``.
Where a server has no conditional puts, :mod:`zarrckpt._store._guard` takes over.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import obstore
from obstore import exceptions as client_errors

from zarrckpt._errors import CheckpointError, ObjectNotFoundError, StorageError
from zarrckpt._store import _azure_options, _failures, _gcs_options, _s3_options
from zarrckpt._store._base import Buffer, Listing, ObjectInfo, Store, Versioned
from zarrckpt._store._fork import check_fork
from zarrckpt._store._guard import Guard
from zarrckpt._store._keys import below, byte_views
from zarrckpt._store._options import Translated
from zarrckpt._store._secrets import redact_url, secret_values
from zarrckpt._store._url import Place

if TYPE_CHECKING:
    from zarr.abc.store import Store as ZarrStore

T = TypeVar("T")

SINGLE_PUT = 64 * 2**20
"""Larger objects go up in parts (bytes)."""

_PART = 16 * 2**20
_PARTS_AT_ONCE = 2
_DELETES_AT_ONCE = 16

_BUCKET_HINT = "Check that the bucket (or container) exists and that the endpoint and the region are its own"
_ACCESS_HINT = "Check the credentials, and what they allow"
_NETWORK_HINT = "Check the endpoint, the region and the network"


@dataclass(frozen=True)
class Client:
    """An obstore client and what goes with every call to it."""

    store: Any
    put_options: Mapping[str, Any] = field(default_factory=dict)
    honours_conditions: bool | None = None
    bulk_delete: bool = False
    known_secrets: Sequence[str] = ()


def open_client(place: Place, options: Mapping[str, Any], provider: Callable[..., Any] | None) -> Client:
    """Build the client of a parsed url. No request is made."""
    check_fork()
    known = secret_values(options)
    try:
        return _OPENERS[place.kind](place, options, provider, known)
    except CheckpointError:
        raise
    except Exception as error:
        failure = _failures.storage_error("opening the store", redact_url(place.address), error, known)
    raise failure


def _open_s3(place: Place, options: Mapping[str, Any], provider: Any, known: Sequence[str]) -> Client:
    out = _s3_options.translate(options, place.bucket, provider)
    store = obstore.store.S3Store(place.bucket, prefix=place.path or None, **_arguments(out))
    bulk = not out.config.get("disable_bulk_delete") and not os.environ.get("AWS_DISABLE_BULK_DELETE")
    return Client(store, _put_options(out), True if _s3_options.is_amazon(out) else None, bulk, known)


def _open_gcs(place: Place, options: Mapping[str, Any], provider: Any, known: Sequence[str]) -> Client:
    out = _gcs_options.translate(options, place.bucket, provider)
    store = obstore.store.GCSStore(place.bucket, prefix=place.path or None, **_arguments(out))
    return Client(store, _put_options(out), True, known_secrets=known)


def _open_azure(place: Place, options: Mapping[str, Any], provider: Any, known: Sequence[str]) -> Client:
    out = _azure_options.translate(options, place.account, provider)
    store = obstore.store.AzureStore(place.bucket, prefix=place.path or None, **_arguments(out))
    return Client(store, _put_options(out), True, known_secrets=known)


_OPENERS: dict[str, Callable[[Place, Mapping[str, Any], Any, Sequence[str]], Client]] = {
    "s3": _open_s3,
    "gs": _open_gcs,
    "az": _open_azure,
}


def _arguments(out: Translated) -> dict[str, Any]:
    return {
        "config": out.config,
        "client_options": out.client,
        "retry_config": out.retry,
        "credential_provider": out.credential_provider,
    }


def _put_options(out: Translated) -> dict[str, Any]:
    given = {"attributes": out.attributes, "tags": out.tags}
    return {name: value for name, value in given.items() if value}


class ObstoreStore(Store):
    """Objects below one prefix of a bucket. Safe for many threads; of no use in a forked child."""

    def __init__(self, client: Client, url: str) -> None:
        self.url = url
        self._client = client
        self._guard = Guard(self, client.honours_conditions, client.honours_conditions)

    def get(self, key: str) -> bytes:
        return self._read(key, lambda: obstore.get(self._client.store, below("", key)).bytes().to_bytes())

    def get_versioned(self, key: str) -> Versioned:
        def fetch() -> Versioned:
            answer = obstore.get(self._client.store, below("", key))
            # None is not taken back as a part of the version.
            version = {name: answer.meta[name] for name in ("e_tag", "version") if answer.meta.get(name) is not None}
            return Versioned(answer.bytes().to_bytes(), version)

        return self._read(key, fetch)

    def read_into(self, key: str, byte_offset: int, buffer: memoryview) -> None:
        size = len(buffer)
        if not size:
            return

        def fetch() -> memoryview:
            return memoryview(obstore.get_range(self._client.store, below("", key), start=byte_offset, length=size))

        try:
            data = self._read(key, fetch)
        except StorageError:
            # A range behind the end is an error of no kind of its own.
            self._check_size(key, byte_offset + size)
            raise
        if len(data) != size:
            raise _failures.short_object(key, self.url, byte_offset + size, byte_offset + len(data))
        buffer[:] = data

    def put(self, key: str, buffers: Sequence[Buffer]) -> None:
        views = byte_views(buffers) or [memoryview(b"")]
        parts: dict[str, Any] = {"use_multipart": False}
        if sum(map(len, views)) > SINGLE_PUT:
            parts = {"use_multipart": True, "chunk_size": _PART, "max_concurrency": _PARTS_AT_ONCE}
        self._run(f"writing {key!r}", lambda: self._put(key, views, **parts))

    def create(self, key: str, data: bytes) -> None:
        self._guard.create(key, data)

    def replace(self, key: str, data: bytes, version: Any) -> None:
        self._guard.replace(key, data, version)

    def delete(self, keys: Iterable[str]) -> None:
        names = [below("", key) for key in keys]
        if not names:
            return
        if self._client.bulk_delete:
            self._run(f"deleting {len(names)} objects", lambda: obstore.delete(self._client.store, names))
            return
        with ThreadPoolExecutor(min(_DELETES_AT_ONCE, len(names)), "zarrckpt-delete") as pool:
            for _ in pool.map(self._delete_one, names):
                pass

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        what = f"listing {prefix!r}"
        stream = self._run(what, lambda: obstore.list(self._client.store, below("", prefix) if prefix else None))
        while batch := self._run(what, lambda: next(stream, None)):
            for item in batch:
                yield ObjectInfo(item["path"], item["size"])

    def list_dir(self, prefix: str = "") -> Listing:
        def fetch() -> Any:
            return obstore.list_with_delimiter(self._client.store, below("", prefix) if prefix else None)

        found = self._run(f"listing {prefix!r}", fetch)
        objects = sorted(item["path"].rpartition("/")[2] for item in found["objects"])
        return objects, sorted(path.rpartition("/")[2] for path in found["common_prefixes"])

    def sync(self, keys: Iterable[str]) -> None:
        """Nothing to do: a put is durable when it returns."""

    def zarr_store(self) -> ZarrStore:
        check_fork()
        from zarrckpt._store._zarr_readers import ForkCheckedStore

        return ForkCheckedStore(self._client.store, read_only=True)

    # -- what the guard needs

    def read_if_any(self, key: str) -> Versioned | None:
        try:
            return self.get_versioned(key)
        except FileNotFoundError:
            return None

    def put_if_absent(self, key: str, data: bytes) -> bool:
        return self._run(f"creating {key!r}", lambda: self._put_mode(key, data, "create"))

    def put_if_version(self, key: str, data: bytes, version: Any) -> bool:
        what = f"replacing {key!r}"
        if self._run(what, lambda: self._put_mode(key, data, version)):
            return True
        e_tag = str(version.get("e_tag", ""))
        found = self.read_if_any(key)
        if found is None or found.version != version or not e_tag.startswith('"'):
            return False
        # Nothing changed, and still refused: Ceph compares the bare e-tag. The server still decides.
        return self._run(what, lambda: self._put_mode(key, data, {**version, "e_tag": e_tag.strip('"')}))

    # -- calls, with our own errors

    def _put(self, key: str, data: Any, **options: Any) -> None:
        obstore.put(self._client.store, below("", key), data, **self._client.put_options, **options)

    def _put_mode(self, key: str, data: bytes, mode: Any) -> bool:
        try:
            self._put(key, data, mode=mode, use_multipart=False)
        except (client_errors.AlreadyExistsError, client_errors.PreconditionError):
            return False
        return True

    def _delete_one(self, name: str) -> None:
        def call() -> None:
            try:
                obstore.delete(self._client.store, name)
            except FileNotFoundError:
                return

        self._run(f"deleting {name!r}", call)

    def _check_size(self, key: str, needed: int) -> None:
        size = int(self._read(key, lambda: obstore.head(self._client.store, below("", key))["size"]))
        if size < needed:
            raise _failures.short_object(key, self.url, needed, size)

    def _read(self, key: str, call: Callable[[], T]) -> T:
        def checked() -> T | ObjectNotFoundError:
            try:
                return call()
            except FileNotFoundError as error:
                return _failures.not_found(key, self.url, error, self._client.known_secrets)

        answer = self._run(f"reading {key!r}", checked)
        if isinstance(answer, ObjectNotFoundError):
            raise answer
        return answer

    def _run(self, what: str, call: Callable[[], T]) -> T:
        check_fork()
        try:
            return call()
        except CheckpointError:
            raise
        except Exception as error:
            failure = _failures.storage_error(what, self.url, error, self._client.known_secrets, _hint(error))
        # Outside of the handler: an exception's context would keep the client's unscrubbed text.
        raise failure


def _hint(error: Exception) -> str:
    if isinstance(error, client_errors.PermissionDeniedError | client_errors.UnauthenticatedError):
        return _ACCESS_HINT
    return _BUCKET_HINT if isinstance(error, FileNotFoundError) else _NETWORK_HINT
