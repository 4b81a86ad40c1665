"""Every other protocol, through an fsspec filesystem's synchronous calls.

Conditional puts are exact on S3 through s3fs (If-None-Match, If-Match) and in memory (a lock); create-only
ones on Google Cloud and Azure as well. Every other filesystem gets check-then-put, with a warning.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import fsspec

from zarrckpt._errors import CheckpointError, ObjectNotFoundError, StorageError
from zarrckpt._store import _failures
from zarrckpt._store._base import Buffer, Listing, ObjectInfo, Store, Versioned
from zarrckpt._store._guard import Guard
from zarrckpt._store._keys import check_key, joined
from zarrckpt._store._local_commit import version_of
from zarrckpt._store._secrets import redact_url, secret_values

if TYPE_CHECKING:
    from zarr.abc.store import Store as ZarrStore

T = TypeVar("T")

_S3 = {"s3", "s3a"}
# Flat stores: a put is atomic, and there are no folders to make (s3fs would make a bucket instead).
_FLAT = _S3 | {"gcs", "gs", "abfs", "abfss", "az", "adl", "oss", "oci", "tos", "memory", "http", "https"}
# Those whose own mode="create" is a condition on the server.
_CREATES = _S3 | {"gcs", "gs", "abfs", "abfss", "az", "adl"}
# One instance may serve all threads, though it is not an asynchronous one.
_SHARED = {"memory", "file", "local"}

_DELETES_AT_ONCE = 16
_TRIES = 5
_PART = re.compile(r"\.[0-9a-f]{32}\.zarrckpt-part")

# fsspec's memory filesystem is one per process, and checks before it writes: a lock makes both one step.
_MEMORY_LOCK = threading.Lock()
# For all the filesystems without conditions: threads of one process at least exclude each other.
_PLAIN_LOCK = threading.Lock()


@dataclass(frozen=True)
class _Traits:
    """What matters about a kind of filesystem."""

    s3: bool
    flat: bool
    creates: bool
    memory: bool
    shared: bool
    renames: bool

    @classmethod
    def of(cls, fs: Any) -> _Traits:
        names = {fs.protocol} if isinstance(fs.protocol, str) else set(fs.protocol)
        # The base class renames by copying, which is no better than writing in place.
        renames = type(fs).mv is not fsspec.AbstractFileSystem.mv
        return cls(
            s3=bool(names & _S3),
            flat=bool(names & _FLAT),
            creates=bool(names & _CREATES),
            memory="memory" in names,
            shared=bool(fs.async_impl or names & _SHARED),
            renames=renames,
        )


class FsspecStore(Store):
    """Objects below a folder of an fsspec filesystem. A forked child gets a filesystem of its own."""

    def __init__(self, address: str, options: Mapping[str, Any]) -> None:
        self.url = redact_url(address)
        self._address = address
        self._options = {name: value for name, value in options.items() if name != "backend"}
        password = address.rpartition("@")[0].rpartition(":")[2]
        self._known = secret_values({**options, "url_password": password})
        self._shared: tuple[int, Any, str] | None = None
        self._per_thread = threading.local()
        self._traits = self._run("opening the store", lambda: _Traits.of(self._open()[1]))
        self._guard = self._make_guard()

    def get(self, key: str) -> bytes:
        # s3fs would ask for the size first, to split a large read.
        whole = {"max_concurrency": 1} if self._traits.s3 else {}
        return self._read(key, lambda fs, path: bytes(fs.cat_file(path, **whole)))

    def get_versioned(self, key: str) -> Versioned:
        if not self._traits.s3:
            data = self.get(key)
            return Versioned(data, version_of(data))
        # s3fs gives no e-tag with the bytes: read between two looks at it.
        for _ in range(_TRIES):
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
        self._run(f"writing {key!r}", lambda: self._write(key, data))

    def create(self, key: str, data: bytes) -> None:
        self._guard.create(key, data)

    def replace(self, key: str, data: bytes, version: Any) -> None:
        self._guard.replace(key, data, version)

    def delete(self, keys: Iterable[str]) -> None:
        names = [check_key(key) for key in keys]
        if len(names) > 1 and self._traits.shared:
            with ThreadPoolExecutor(min(_DELETES_AT_ONCE, len(names)), "zarrckpt-delete") as pool:
                for _ in pool.map(self._delete_one, names):
                    pass
        else:
            for name in names:
                self._delete_one(name)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        def fetch() -> dict[str, Any]:
            fs, path = self._locate(prefix, fresh=True)
            try:
                return dict(fs.find(path, detail=True))
            except FileNotFoundError:
                return {}

        root = self._folder("")
        for path, info in self._run(f"listing {prefix!r}", fetch).items():
            # ``find`` of an object gives the object itself, and sftp's without a type.
            if path.startswith(self._folder(prefix)) and info["type"] == "file" and not _PART.search(path):
                yield ObjectInfo(path[len(root) :], int(info["size"] or 0))

    def list_dir(self, prefix: str = "") -> Listing:
        def fetch() -> list[dict[str, Any]]:
            fs, path = self._locate(prefix, fresh=True)
            try:
                return list(fs.ls(path, detail=True))
            except (FileNotFoundError, NotADirectoryError):
                return []

        objects: set[str] = set()
        folders: set[str] = set()
        start = self._folder(prefix)
        for info in self._run(f"listing {prefix!r}", fetch):
            path = info["name"].rstrip("/")
            if path.startswith(start) and not _PART.search(path):
                (folders if info["type"] == "directory" else objects).add(path[len(start) :])
        return sorted(objects), sorted(folders)

    def sync(self, keys: Iterable[str]) -> None:
        """Nothing to do: what fsspec wrote is as durable as its filesystem makes it."""

    def zarr_store(self) -> ZarrStore:
        from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper
        from zarr.storage import FsspecStore as ZarrFsspecStore

        _, fs, root = self._open()
        if fs.async_impl:
            fs = type(fs)(*fs.storage_args, **{**fs.storage_options, "asynchronous": True})
        else:
            fs = AsyncFileSystemWrapper(fs, asynchronous=True)
        return ZarrFsspecStore(fs, path=root, read_only=True)

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
            return Guard(self, creates=True, matches=True)
        unknown = None if self._traits.creates else False
        return Guard(self, creates=unknown, matches=None if self._traits.s3 else False, lock=_PLAIN_LOCK)

    def _put_if(self, key: str, data: bytes, **condition: Any) -> bool:
        def call() -> bool:
            try:
                self._write(key, data, **condition)
            except Exception as error:
                if _is_refusal(error, condition):
                    return False
                raise
            return True

        return self._run(f"writing {key!r} conditionally", call)

    def _e_tag(self, key: str) -> str:
        return str(self._read(key, lambda fs, path: fs.info(path, refresh=True)["ETag"]))

    # -- the filesystem

    def _open(self) -> tuple[int, Any, str]:
        """(process id, filesystem, root path); opened once per process, or per thread where it must be."""
        opened = self._shared or getattr(self._per_thread, "opened", None)
        if opened is None or opened[0] != os.getpid():
            fs, root = fsspec.core.url_to_fs(self._address, **self._options)
            if not _Traits.of(fs).shared:
                # Such as sftp: a connection of its own for every thread, which ends with the thread.
                fs, root = fsspec.core.url_to_fs(self._address, **{**self._options, "skip_instance_cache": True})
            opened = (os.getpid(), fs, root.rstrip("/"))
            if _Traits.of(fs).shared:
                self._shared = opened
            else:
                self._per_thread.opened = opened
        return opened

    def _locate(self, key: str, fresh: bool = False) -> tuple[Any, str]:
        _, fs, root = self._open()
        if fresh:
            # Listings are cached by many filesystems, and others write here.
            fs.invalidate_cache()
        return fs, f"{root}/{check_key(key)}" if key else root

    def _folder(self, prefix: str) -> str:
        return f"{self._locate(prefix)[1]}/"

    def _write(self, key: str, data: bytes, **condition: Any) -> None:
        fs, path = self._locate(check_key(key))
        if self._traits.flat:
            fs.pipe_file(path, data, **condition)
            return
        temp = f"{path}.{uuid.uuid4().hex}.zarrckpt-part" if self._traits.renames else path
        try:
            fs.pipe_file(temp, data)
        except FileNotFoundError:
            _make_folder(fs, path.rpartition("/")[0])
            fs.pipe_file(temp, data)
        if temp != path:
            self._rename(fs, temp, path)

    def _rename(self, fs: Any, temp: str, path: str) -> None:
        try:
            try:
                fs.mv(temp, path)
            except Exception:
                if not fs.exists(path):
                    raise
                # HDFS does not rename over a file.
                fs.rm(path)
                fs.mv(temp, path)
        except Exception:
            with contextlib.suppress(Exception):
                fs.rm(temp)
            raise

    def _delete_one(self, key: str) -> None:
        def call() -> None:
            fs, path = self._locate(key)
            try:
                fs.rm_file(path)
            except FileNotFoundError:
                return
            except NotImplementedError:
                if fs.exists(path):
                    fs.rm(path)

        self._run(f"deleting {key!r}", call)

    def _check_size(self, key: str, needed: int) -> None:
        def size(fs: Any, path: str) -> int:
            fs.invalidate_cache()
            return int(fs.info(path)["size"])

        found = self._read(key, size)
        if found < needed:
            raise _failures.short_object(key, self.url, needed, found)

    # -- calls, with our own errors

    def _read(self, key: str, call: Callable[[Any, str], T]) -> T:
        def checked() -> T | ObjectNotFoundError:
            try:
                return call(*self._locate(check_key(key)))
            except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
                return _failures.not_found(key, self.url, error, self._known)
            except Exception as error:
                # sftp has one error for everything, folders included.
                fs, path = self._locate(key)
                if self._traits.flat or not fs.isdir(path):
                    raise
                return _failures.not_found(key, self.url, error, self._known)

        answer = self._run(f"reading {key!r}", checked)
        if isinstance(answer, ObjectNotFoundError):
            raise answer
        return answer

    def _run(self, what: str, call: Callable[[], T]) -> T:
        try:
            return call()
        except CheckpointError:
            raise
        except Exception as error:
            failure = _failures.storage_error(what, self.url, error, self._known, _hint(error))
        # Outside of the handler: an exception's context would keep the client's unscrubbed text.
        raise failure


def _make_folder(fs: Any, folder: str) -> None:
    """Make a folder and those above it, while other threads and processes do the same."""
    for attempt in range(_TRIES):
        try:
            fs.makedirs(folder, exist_ok=True)
            return
        except Exception:
            # Not every ``makedirs`` minds a folder that appears between its look and its call.
            if fs.isdir(folder):
                return
            if attempt == _TRIES - 1:
                raise
            time.sleep(0.01 * 2**attempt)


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


def _hint(error: Exception) -> str:
    if isinstance(error, ImportError):
        return "Install what this protocol needs, for example: pip install 'zarrckpt[s3fs]'"
    if isinstance(error, PermissionError):
        return "Check the credentials, and what they allow"
    if isinstance(error, FileNotFoundError):
        return "Check that the bucket or folder exists"
    return "Check the url, the options and the network"
