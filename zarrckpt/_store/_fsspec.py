"""Every other protocol, through an fsspec filesystem's synchronous calls.

Conditional puts are exact on S3 through s3fs (If-None-Match, If-Match) and in memory (a lock); create-only
ones on Google Cloud and Azure as well. Every other filesystem gets check-then-put, with a warning.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from zarrckpt._errors import CheckpointError, ObjectNotFoundError, StorageError
from zarrckpt._store import _failures
from zarrckpt._store._base import Buffer, Listing, ObjectInfo, Store, Versioned
from zarrckpt._store._fsspec_filesystem import Filesystems, is_part, remove_file, write_file
from zarrckpt._store._guard import Guard, Honoured
from zarrckpt._store._keys import above, below, check_key, joined
from zarrckpt._store._local_commit import version_of
from zarrckpt._store._secrets import redact_url, secret_values

if TYPE_CHECKING:
    from zarr.abc.store import Store as ZarrStore

T = TypeVar("T")

_EXTRAS = {"s3fs": "'zarrckpt[s3fs]'"}
"""Packages that come with an extra of this one."""

_DELETES_AT_ONCE = 8
_READS = 5

# fsspec's memory filesystem is one per process, and checks before it writes: a lock makes both one step.
_MEMORY_LOCK = threading.Lock()
# For all the filesystems without conditions: threads of one process at least exclude each other.
_PLAIN_LOCK = threading.Lock()


class FsspecStore(Store):
    """Objects below a folder of an fsspec filesystem. A forked child gets a filesystem of its own."""

    def __init__(self, address: str, options: Mapping[str, Any]) -> None:
        self.url = redact_url(address)
        password = address.rpartition("@")[0].rpartition(":")[2]
        self._known = secret_values({**options, "url_password": password})
        own = {name: value for name, value in options.items() if name != "backend"}
        self._filesystems = self._own_errors("opening the store", lambda: Filesystems(address, own))
        self._traits = self._filesystems.traits
        self._guard = self._make_guard()

    def get(self, key: str) -> bytes:
        # s3fs would ask for the size first, to split a large read.
        whole = {"max_concurrency": 1} if self._traits.s3 else {}
        return self._read(key, lambda fs, path: bytes(fs.cat_file(path, **whole)))

    def get_above(self, levels: int, key: str) -> bytes:
        # The first name is the bucket, or what is before the first "/" of an absolute path.
        folder = above(self._path(""), levels)
        if not folder:
            return super().get_above(levels, key)
        path = below(folder, key)
        return self._read_path(f"{'../' * levels}{key}", path, lambda fs, path: bytes(fs.cat_file(path)))

    def get_versioned(self, key: str) -> Versioned:
        if not self._traits.s3:
            data = self.get(key)
            return Versioned(data, version_of(data))
        # s3fs gives no e-tag with the bytes: read between two looks at it.
        for _ in range(_READS):
            before, data, after = self._e_tag(key), self.get(key), self._e_tag(key)
            if before == after:
                return Versioned(data, before)
        raise StorageError(f"{key!r} in {self.url} changed at every attempt to read it; try again")

    def read_into(self, key: str, byte_offset: int, buffer: memoryview) -> None:
        size = len(buffer)
        if not size:
            return
        try:
            data = self._read(key, lambda fs, path: fs.cat_file(path, start=byte_offset, end=byte_offset + size))
        except ObjectNotFoundError:
            raise
        except StorageError:
            # A range behind the end is an error of no kind of its own.
            self._check_size(key, byte_offset + size)
            raise
        if len(data) != size:
            raise _failures.short_object(key, self.url, byte_offset + size, byte_offset + len(data))
        buffer[:] = data

    def put(self, key: str, buffers: Sequence[Buffer]) -> None:
        data = joined(buffers)
        self._run(f"writing {key!r}", lambda fs: self._write(fs, key, data))

    def create(self, key: str, data: bytes) -> None:
        self._guard.create(key, data)

    def replace(self, key: str, data: bytes, version: Any) -> None:
        self._guard.replace(key, data, version)

    def delete(self, keys: Iterable[str]) -> None:
        paths = [self._path(check_key(key)) for key in keys]

        def remove(path: str) -> None:
            self._run(f"deleting {path!r}", lambda fs: remove_file(fs, path))

        with ThreadPoolExecutor(max(1, min(_DELETES_AT_ONCE, len(paths))), "zarrckpt-delete") as pool:
            for _ in pool.map(remove, paths):
                pass

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        start, root = self._path(prefix), self._path("")

        def fetch(fs: Any) -> dict[str, Any]:
            # Listings are cached by many filesystems, and others write here.
            fs.invalidate_cache()
            try:
                return dict(fs.find(start, detail=True))
            except FileNotFoundError:
                return {}

        for path, info in self._run(f"listing {prefix!r}", fetch).items():
            # ``find`` of an object gives the object itself, and sftp's without a type.
            if path.startswith(f"{start}/") and info["type"] == "file" and not is_part(path):
                yield ObjectInfo(path[len(root) + 1 :], int(info["size"] or 0))

    def list_dir(self, prefix: str = "") -> Listing:
        start = self._path(prefix)

        def fetch(fs: Any) -> Sequence[Mapping[str, Any]]:
            fs.invalidate_cache()
            try:
                found: Sequence[Mapping[str, Any]] = fs.ls(start, detail=True)
                return found
            except (FileNotFoundError, NotADirectoryError):
                return []

        objects: set[str] = set()
        folders: set[str] = set()
        for info in self._run(f"listing {prefix!r}", fetch):
            path = info["name"].rstrip("/")
            if path.startswith(f"{start}/") and not is_part(path):
                (folders if info["type"] == "directory" else objects).add(path[len(start) + 1 :])
        return sorted(objects), sorted(folders)

    def sync(self, keys: Iterable[str]) -> None:
        """Nothing to do: what fsspec wrote is as durable as its filesystem makes it."""

    def failure(self, what: str, error: BaseException) -> StorageError:
        return _failures.storage_error(what, self.url, error, self._known, _hint(error))

    def zarr_store(self) -> ZarrStore:
        return self._own_errors("opening the store", self._filesystems.zarr_store)

    # -- what the guard needs

    def read_if_any(self, key: str) -> Versioned | None:
        try:
            return self.get_versioned(key)
        except ObjectNotFoundError:
            return None

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
        # Nothing changed, and still refused: Ceph compares the bare e-tag. The server still decides.
        unchanged = found is not None and found.version == version
        return unchanged and self._put_if(key, data, IfMatch=str(version).strip('"'))

    def _make_guard(self) -> Guard:
        if self._traits.memory:
            return Guard(self, Honoured(True, True))
        unknown = None if self._traits.creates else False
        return Guard(self, Honoured(unknown, None if self._traits.s3 else False), _PLAIN_LOCK)

    def _put_if(self, key: str, data: bytes, **condition: Any) -> bool:
        def call(fs: Any) -> bool:
            try:
                self._write(fs, key, data, **condition)
            except Exception as error:
                if _is_refusal(error, condition):
                    return False
                raise
            return True

        return self._run(f"writing {key!r} conditionally", call)

    def _e_tag(self, key: str) -> str:
        return str(self._read(key, lambda fs, path: fs.info(path, refresh=True)["ETag"]))

    # -- calls, with our own errors

    def _path(self, prefix: str) -> str:
        root = self._filesystems.root
        return f"{root}/{check_key(prefix)}" if prefix else root

    def _write(self, fs: Any, key: str, data: bytes, **condition: Any) -> None:
        write_file(fs, self._traits, self._path(check_key(key)), data, condition)

    def _check_size(self, key: str, needed: int) -> None:
        def size(fs: Any, path: str) -> int:
            fs.invalidate_cache()
            return int(fs.info(path)["size"])

        found = self._read(key, size)
        if found < needed:
            raise _failures.short_object(key, self.url, needed, found)

    def _read(self, key: str, call: Callable[[Any, str], T]) -> T:
        return self._read_path(key, self._path(check_key(key)), call)

    def _read_path(self, key: str, path: str, call: Callable[[Any, str], T]) -> T:
        def checked(fs: Any) -> T | ObjectNotFoundError:
            try:
                return call(fs, path)
            except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
                return _failures.not_found(key, self.url, error, self._known)
            except Exception as error:
                # sftp has one error for everything, folders included.
                if self._traits.flat or not fs.isdir(path):
                    raise
                return _failures.not_found(key, self.url, error, self._known)

        answer = self._run(f"reading {key!r}", checked)
        if isinstance(answer, ObjectNotFoundError):
            raise answer
        return answer

    def _run(self, what: str, call: Callable[[Any], T]) -> T:
        def lent() -> T:
            with self._filesystems.lend() as fs:
                return call(fs)

        return self._own_errors(what, lent)

    def _own_errors(self, what: str, call: Callable[[], T]) -> T:
        try:
            return call()
        except CheckpointError:
            raise
        except Exception as error:
            failure = self.failure(what, error)
        # Outside of the handler: an exception's context would keep the client's unscrubbed text.
        raise failure


def _is_refusal(error: BaseException, condition: Mapping[str, Any]) -> bool:
    """Whether the server refused the condition. s3fs keeps the answer in the cause, and names one of the cases only."""
    if not condition:
        return False
    if isinstance(error, FileExistsError):
        return True
    if isinstance(error, FileNotFoundError):
        return "IfMatch" in condition
    answer = getattr(error.__cause__ or error, "response", None)
    status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode") if isinstance(answer, Mapping) else None
    return status in (409, 412)


def _hint(error: BaseException) -> str:
    if isinstance(error, ImportError):
        package = (getattr(error.__cause__, "name", None) or error.name or "").partition(".")[0]
        return f"Install what this protocol needs: pip install {_EXTRAS.get(package, package) or 'PACKAGE'}"
    if isinstance(error, ValueError) and "Protocol not known" in str(error):
        return "Known are s3, gs, az and file, and those of fsspec, such as memory, sftp, ftp, smb, hdfs, http"
    if isinstance(error, PermissionError):
        return "Check the credentials, and what they allow"
    if isinstance(error, FileNotFoundError):
        return "Check that the bucket or folder exists"
    return "Check the url, the options and the network"
