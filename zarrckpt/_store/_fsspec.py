"""All other protocols, through the synchronous calls of an fsspec filesystem.

Conditional puts are exact on S3 through s3fs (If-None-Match, If-Match) and in memory (a lock). Create-only puts are
also exact on Google Cloud and Azure. On every other filesystem the store reads, then puts, and warns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar
from urllib.parse import quote, unquote

from zarrckpt._errors import StorageError
from zarrckpt._forks import ForkSafeLock
from zarrckpt._store import _failures
from zarrckpt._store._base import Buffer, Listing, ObjectInfo, VersionedObject, byte_views
from zarrckpt._store._client_store import ClientStore
from zarrckpt._store._conditional_puts import ConditionSupport, NoConditionsError
from zarrckpt._store._fsspec_filesystem import Filesystems, is_no_object, remove_file, write_file
from zarrckpt._store._secrets import redact_url, secret_values
from zarrckpt._store._url import CLOUD, split_query

T = TypeVar("T")

_EXTRAS = {"s3fs": "'zarrckpt[s3fs]'"}
"""Packages that an extra of zarrckpt installs, and the extra."""

_READ_TRIES = 5

# The process has one memory filesystem of fsspec. The lock makes the check and the write atomic.
_MEMORY_LOCK = ForkSafeLock()
# For all filesystems without conditions, so that at least the threads of one process exclude each other.
_PLAIN_LOCK = ForkSafeLock()


class FsspecStore(ClientStore):
    """Objects below a folder of an fsspec filesystem. A forked child opens a new filesystem."""

    # The bucket's name, or the empty text before the first "/" of an absolute path.
    lowest_levels = 1

    def __init__(self, address: str, options: Mapping[str, Any]) -> None:
        secrets = secret_values({**options, "url": address})
        super().__init__(redact_url(address), "", ConditionSupport(), _PLAIN_LOCK, secrets)
        _, self._query = split_query(address)
        if self._query:
            # Otherwise the client encodes the query again, and a signature may no longer fit.
            options = {"encoded": True, **options}
        self._filesystems = super().call("opening the store", lambda: Filesystems(address, options))
        self._traits = self._filesystems.traits
        self._folder = split_query(self._filesystems.root)[0].rstrip("/")
        self.lists_all = not self._traits.http
        traits = self._traits
        creates, matches = None if traits.creates else False, None if traits.s3 else False
        self._conditions = ConditionSupport(True, True) if traits.memory else ConditionSupport(creates, matches)

    def name(self, key: str) -> str:
        if self._query:
            # A "%" is that of the user's url, which is encoded.
            return quote(super().name(key), safe="/:%") + self._query
        return super().name(key)

    def folder(self, prefix: str) -> str:
        return super().name(prefix) if prefix else self._folder

    def get_named(self, name: str, max_bytes: int) -> bytes:
        whole = {"max_concurrency": 1} if self._traits.splits else {}
        return self._read(name, lambda fs: bytes(fs.cat_file(name, **whole)))

    def get_versioned(self, key: str) -> VersionedObject:
        if not self._traits.s3:
            return super().get_versioned(key)
        # s3fs returns bytes without an e-tag, so compare the e-tags before and after the read.
        for _ in range(_READ_TRIES):
            before, data, after = self._e_tag(key), self.get(key), self._e_tag(key)
            if before == after:
                return VersionedObject(data, before)
        raise StorageError(
            f"reading {key!r} in {self.url} failed: it changed during each of {_READ_TRIES} reads. Try again"
        )

    def version(self, key: str) -> Any:
        return self._e_tag(key) if self._traits.s3 else super().version(key)

    def fetch_named(self, name: str, start: int, end: int) -> bytes:
        return self._read(name, lambda fs: bytes(fs.cat_file(name, start=start, end=end)))

    def size_named(self, name: str) -> int:
        def size(fs: Any) -> int:
            fs.invalidate_cache()
            try:
                found = fs.info(name)["size"]
            except FileNotFoundError:
                # A web server may have failed, or may not send sizes. Reading the object decides.
                if not self._traits.http:
                    raise
                found = None
            return len(fs.cat_file(name)) if found is None else int(found)

        return self._read(name, size)

    def put(self, key: str, buffers: Sequence[Buffer]) -> None:
        data = buffers[0] if len(buffers) == 1 and isinstance(buffers[0], bytes) else b"".join(byte_views(buffers))
        self._lent(f"writing {key!r}", lambda fs: write_file(fs, self._traits, self.name(key), data, {}))

    def put_if_absent(self, key: str, data: bytes) -> bool:
        if self._traits.memory:
            with _MEMORY_LOCK:
                return self.read_if_any(key) is None and self._put_if(key, data)
        return self._put_if(key, data, **({"mode": "create"} if self._traits.creates else {}))

    def put_if_version(self, key: str, data: bytes, version: Any) -> bool:
        if self._traits.memory:
            with _MEMORY_LOCK:
                found = self.read_if_any(key)
                return found is not None and found.version == version and self._put_if(key, data)
        if self._put_if(key, data, IfMatch=version):
            return True
        found = self.read_if_any(key)
        # Refused although the version is unchanged: Ceph compares the e-tag without quotes. The server still decides.
        unchanged = found is not None and found.version == version
        return unchanged and self._put_if(key, data, IfMatch=str(version).strip('"'))

    def _put_if(self, key: str, data: bytes, **condition: Any) -> bool:
        def call(fs: Any) -> bool:
            try:
                write_file(fs, self._traits, self.name(key), data, condition)
            except Exception as error:
                if _is_refusal(error, condition):
                    return False
                known = self._conditions.matches if "IfMatch" in condition else self._conditions.creates
                if condition and known is None and _failures.not_implemented(error):
                    raise NoConditionsError(f"{self.url}: the server has no conditional puts") from None
                raise
            return True

        return self._lent(f"writing {key!r} conditionally", call)

    def _e_tag(self, key: str) -> str:
        name = self.name(key)
        return self.call(
            f"reading {key!r}", lambda: self._read(name, lambda fs: str(fs.info(name, refresh=True)["ETag"])), key
        )

    def delete_named(self, name: str) -> None:
        with self._filesystems.lend() as fs:
            remove_file(fs, name)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        start = self.folder(prefix)

        def fetch(fs: Any) -> dict[str, Any]:
            # Many filesystems cache listings, and other processes write here.
            fs.invalidate_cache()
            try:
                return dict(fs.find(start, detail=True))
            except FileNotFoundError:
                return {}

        for path, info in self._lent(f"listing {prefix!r}", fetch).items():
            # ``find`` of an object returns the object itself.
            if info["type"] == "file" and (name := self._name_below(start, path)):
                yield ObjectInfo(f"{prefix}/{name}" if prefix else name, int(info["size"] or 0))

    def list_dir(self, prefix: str = "") -> Listing:
        start = self.folder(prefix)

        def fetch(fs: Any) -> Sequence[Mapping[str, Any]]:
            fs.invalidate_cache()
            try:
                found: Sequence[Mapping[str, Any]] = fs.ls(start, detail=True)
                return found
            except (FileNotFoundError, NotADirectoryError):
                return []

        objects: set[str] = set()
        folders: set[str] = set()
        for info in self._lent(f"listing {prefix!r}", fetch):
            is_folder = info["type"] == "directory"
            if name := self._name_below(start, info["name"].rstrip("/"), is_folder=is_folder):
                (folders if is_folder else objects).add(name)
        return sorted(objects), sorted(folders)

    def _name_below(self, start: str, path: str, *, is_folder: bool = False) -> str:
        """Return the name of a listed path relative to a folder, or "" if it is not below it or is no object."""
        if not path.startswith(f"{start}/") or (is_no_object(path) and not is_folder):
            return ""
        name = path[len(start) + 1 :]
        if not self._traits.http:
            return name
        return unquote(name.partition("?")[0].removeprefix("./"))  # links with "?" sort the web page

    def call(self, what: str, request: Callable[[], T], key: str | None = None) -> T:
        return super().call(what, partial(self._filesystems.renewal.call, request), key)

    def hint(self, what: str, error: BaseException) -> str:
        filesystems = getattr(self, "_filesystems", None)  # none yet, if it could not be opened
        hints = [_failures.permission_hint(CLOUD.get(self.url.partition("://")[0].lower(), ""), what, error)]
        if filesystems is not None and filesystems.signs_for_s3 and _failures.refuses_credentials(error):
            hints.append(self.renewal_hint(filesystems.fixed_credentials, filesystems.renewal.error))
        if any(hints):
            return ". ".join(filter(None, hints))
        if isinstance(error, ImportError):
            package = (getattr(error.__cause__, "name", None) or error.name or "").partition(".")[0]
            return f"Install the package for this protocol: pip install {_EXTRAS.get(package, package) or 'PACKAGE'}"
        if isinstance(error, ValueError) and "Protocol not known" in str(error):
            return "Known are s3, gs, az and file, and those of fsspec, such as memory, sftp, ftp, smb, hdfs, http"
        if self._query and getattr(error, "status", None) == 403:
            return (
                "The server refuses the query of the url for this object. Most presigned urls are for one object: sign "
                "the url of an archive (.zarr.zip), or use a signature for all objects below the folder"
            )
        if isinstance(error, PermissionError):
            return "Check the credentials and their permissions"
        if isinstance(error, FileNotFoundError):
            return "Check that the bucket or folder exists"
        return "Check the url, the options and the network"

    def _read(self, name: str, call: Callable[[Any], T]) -> T:
        """Call with a lent filesystem. For a folder instead of a file, raise IsADirectoryError."""
        with self._filesystems.lend() as fs:
            try:
                return call(fs)
            except FileNotFoundError:
                raise
            except Exception as error:
                # sftp has the same error for every failure, folders included.
                if self._traits.flat or not fs.isdir(name):
                    raise
                raise IsADirectoryError(name) from error

    def _lent(self, what: str, call: Callable[[Any], T]) -> T:
        def lent() -> T:
            with self._filesystems.lend() as fs:
                return call(fs)

        return self.call(what, lent)


def _is_refusal(error: BaseException, condition: Mapping[str, Any]) -> bool:
    """Whether the server refused the condition. s3fs has a distinct error for one case, and keeps answers as causes."""
    if not condition:
        return False
    if isinstance(error, FileExistsError):
        return True
    if isinstance(error, FileNotFoundError):
        return "IfMatch" in condition
    answer = getattr(error.__cause__ or error, "response", None)
    status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode") if isinstance(answer, Mapping) else None
    return status in (409, 412)
