"""All other protocols, through the synchronous calls of an fsspec filesystem.

Conditional puts are exact on S3 through s3fs (If-None-Match, If-Match) and in memory (a lock). Create-only puts are
also exact on Google Cloud and Azure. On every other filesystem the store reads, then puts, and warns.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import inspect
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, TypeVar
from urllib.parse import quote, unquote

import fsspec

from zarrckpt._errors import StorageError
from zarrckpt._forks import ForkSafeLock
from zarrckpt._store import _failures
from zarrckpt._store._base import Buffer, Listing, ObjectInfo, VersionedObject, byte_views
from zarrckpt._store._client_store import ClientStore
from zarrckpt._store._conditional_puts import ConditionSupport, NoConditionsError
from zarrckpt._store._local_commit import is_silly_name
from zarrckpt._store._renewal import Renewal
from zarrckpt._store._secrets import redact_url, secret_values
from zarrckpt._store._url import CLOUD, RESOLVERS, is_chain, split_query

T = TypeVar("T")

_S3 = {"s3", "s3a"}
# Those with a mode="create" that the server checks.
_CREATES = _S3 | {"gcs", "gs", "abfs", "abfss", "az", "adl"}
_HTTP = {"http", "https"}
# Stores without folders: a put is atomic, and no folder must be made (s3fs would make a bucket instead).
_FLAT = _CREATES | _HTTP | {"oss", "oci", "tos", "memory"}
# HDFS cannot rename over a file. webhdfs raises no error for it, and hdfs raises the same error for every failure.
_HDFS = {"hdfs", "webhdfs"}

_RESOLVING_MODULES = {
    "fsspec.archive",
    "fsspec.generic",
    *(f"fsspec.implementations.{name}" for name in ("asyn_wrapper", "cached", "chained", "dask", "dirfs", "reference")),
}
"""Modules of filesystems that open other urls, under any protocol."""

_SIGN_IN_OPTIONS = ("key", "secret", "token", "username", "password", "session", "aws_access_key_id")
"""Options of s3fs and (the last one) of its client that hold credentials."""

_TRIES = 5
_PART = ".zarrckpt-part"

# Makes the check and the write atomic in memory, because the process has one memory filesystem. On filesystems without
# conditions, at least the threads of one process exclude each other.
_LOCK = ForkSafeLock()


class FsspecStore(ClientStore):
    """Objects below a folder of an fsspec filesystem."""

    # The bucket's name, or the empty text before the first "/" of an absolute path.
    lowest_levels = 1

    def __init__(self, address: str, options: Mapping[str, Any]) -> None:
        secrets = secret_values({**options, "url": address})
        super().__init__(redact_url(address), "", ConditionSupport(), _LOCK, secrets)
        self._address, self._protocol, self._options = address, _protocol_of(address), dict(options)
        _, self._query = split_query(address)
        if self._query:
            # Otherwise the client encodes the query again, and a signature may no longer fit.
            self._options.setdefault("encoded", True)
        self._chains = self._options.pop("allow_chains", False)
        self._signs, self._renewal = False, Renewal(None)
        fs, root = self.call("opening the store", self._open)
        self._folder = split_query(root.rstrip("/"))[0].rstrip("/")
        names = {fs.protocol} if isinstance(fs.protocol, str) else set(fs.protocol)
        self._s3, self._memory, self._http = bool(names & _S3), "memory" in names, bool(names & _HTTP)
        self._flat, self._hdfs = bool(names & _FLAT), bool(names & _HDFS)
        # From 2026.3 on, s3fs requests the size before a whole read, and splits large ones.
        splits = self._s3 and "max_concurrency" in inspect.signature(fs._cat_file).parameters
        self._whole = {"max_concurrency": 1} if splits else {}
        self._signs = self._s3 and not self._options.get("anon")
        given = {**(self._options.get("client_kwargs") or {}), **self._options}
        self._fixed_credentials = next((name for name in _SIGN_IN_OPTIONS if given.get(name)), None)
        self._renewal = Renewal(self._renew if self._signs and not self._fixed_credentials else None)
        # All threads share an asynchronous filesystem. Others, such as sftp, serve one thread at a time.
        shared = fs.async_impl or self._memory
        self._opened: Any = SimpleNamespace() if shared else threading.local()
        self._opened.fs, self._opened.pid = fs, os.getpid()
        self.max_concurrency, self.lists_all = self.max_concurrency if shared else 8, not self._http
        creates, matches = None if names & _CREATES else False, None if self._s3 else False
        self._conditions = ConditionSupport(True, True) if self._memory else ConditionSupport(creates, matches)

    # -- the filesystem

    @property
    def _fs(self) -> Any:
        opened = self._opened
        if getattr(opened, "pid", None) != os.getpid():
            # A new thread, or a fork: connections and event loops do not survive it.
            opened.fs, opened.pid = self._open()[0], os.getpid()
        return opened.fs

    def _open(self, **more: Any) -> tuple[Any, str]:
        """Return the filesystem and the root's path. fsspec keeps one for each process and, if necessary, thread."""
        if not isinstance(self._chains, bool):
            raise StorageError(f"the option allow_chains must be True or False, got {self._chains!r}")
        if not self._chains:
            _refuse_chain(self._address)
        options = {**self._options, **more}
        if self._protocol in _S3:
            options["config_kwargs"] = {"http_session_cls": _session_class(), **(options.get("config_kwargs") or {})}
        if self._chains:
            fs, path = fsspec.core.url_to_fs(self._address, **options)
            return fs, path
        # url_to_fs would split a name that contains "::".
        kind = fsspec.get_filesystem_class(self._protocol)
        return kind(**{**kind._get_kwargs_from_urls(self._address), **options}), kind._strip_protocol(self._address)

    def _renew(self) -> None:
        # fsspec would return the same filesystem again.
        self._opened.fs = self._open(skip_instance_cache=True)[0]

    # -- names

    def name(self, key: str) -> str:
        if self._query:
            # A "%" is that of the user's url, which is encoded.
            return quote(super().name(key), safe="/:%") + self._query
        return super().name(key)

    def folder(self, prefix: str) -> str:
        return super().name(prefix) if prefix else self._folder

    # -- reads

    def get_named(self, name: str, max_bytes: int) -> bytes:
        return bytes(self._fs.cat_file(name, **self._whole))

    def get_versioned(self, key: str) -> VersionedObject:
        if not self._s3:
            return super().get_versioned(key)

        def request() -> VersionedObject:
            answer = self._ask_s3("get_object", key)
            return VersionedObject(fsspec.asyn.sync(self._fs.loop, answer["Body"].read), answer["ETag"])

        return self.call(f"reading {key!r}", request, key)

    def version(self, key: str) -> Any:
        if not self._s3:
            return super().version(key)
        return self.call(f"reading {key!r}", lambda: self._ask_s3("head_object", key)["ETag"], key)

    def _ask_s3(self, method: str, key: str) -> Any:
        bucket, name, _ = self._fs.split_path(self.name(key))
        return self._fs.call_s3(method, Bucket=bucket, Key=name)

    def fetch_named(self, name: str, start: int, end: int) -> bytes:
        return bytes(self._fs.cat_file(name, start=start, end=end))

    def size_named(self, name: str) -> int:
        fs = self._fs
        fs.invalidate_cache()
        try:
            size = fs.info(name)["size"]
        except FileNotFoundError:
            # A web server may have failed, or may not send sizes. Reading the object decides.
            if not self._http:
                raise
            size = None
        return len(fs.cat_file(name)) if size is None else int(size)

    # -- changes

    def put(self, key: str, buffers: Sequence[Buffer]) -> None:
        data = buffers[0] if len(buffers) == 1 and isinstance(buffers[0], bytes) else b"".join(byte_views(buffers))
        self.call(f"writing {key!r}", lambda: self._write(self.name(key), data))

    def put_if_absent(self, key: str, data: bytes) -> bool:
        return self._put_in_memory(key, data, None) if self._memory else self._put_if(key, data, mode="create")

    def put_if_version(self, key: str, data: bytes, version: Any) -> bool:
        if self._memory:
            return self._put_in_memory(key, data, version)
        if self._put_if(key, data, IfMatch=version):
            return True
        found = self.read_if_any(key)
        # Refused although the version is unchanged: Ceph compares the e-tag without quotes. The server still decides.
        unchanged = found is not None and found.version == version
        return unchanged and self._put_if(key, data, IfMatch=str(version).strip('"'))

    def _put_in_memory(self, key: str, data: bytes, version: Any) -> bool:
        with _LOCK:
            found = self.read_if_any(key)
            matches = bool((found and found.version) == version)
            if matches:
                self.put(key, [data])
            return matches

    def _put_if(self, key: str, data: bytes, **condition: Any) -> bool:
        def request() -> bool:
            try:
                self._write(self.name(key), data, **condition)
            except Exception as error:
                if _is_refusal(error, condition):
                    return False
                known = self._conditions.matches if "IfMatch" in condition else self._conditions.creates
                if known is None and _failures.not_implemented(error):
                    raise NoConditionsError(f"{self.url}: the server has no conditional puts") from None
                raise
            return True

        return self.call(f"writing {key!r} conditionally", request)

    def _write(self, path: str, data: bytes, **condition: Any) -> None:
        """Write a whole object. If the filesystem permits it, readers see the old or the new object, never a part."""
        fs = self._fs
        if self._flat:
            fs.pipe_file(path, data, **condition)
            return
        # The base class renames by copying, which is not safer than writing in place.
        renames = type(fs).mv is not fsspec.AbstractFileSystem.mv
        temp = f"{path}.{uuid.uuid4().hex}{_PART}" if renames else path
        try:
            fs.pipe_file(temp, data)
        except FileNotFoundError:
            _make_folder(fs, path.rpartition("/")[0])
            fs.pipe_file(temp, data)
        if renames:
            self._rename(fs, temp, path)

    def _rename(self, fs: Any, temp: str, path: str) -> None:
        try:
            if self._hdfs and fs.exists(path):
                raise FileExistsError(path)
            fs.mv(temp, path)
            return
        except BaseException as error:
            if not isinstance(error, FileExistsError) and getattr(error, "errno", None) != errno.EEXIST:
                with contextlib.suppress(Exception):
                    self.delete_named(temp)
                raise
        # SMB, for example, cannot rename over a file. For a moment there is none under this name.
        self.delete_named(path)
        try:
            fs.mv(temp, path)
        except Exception as error:
            raise OSError(f"{error}. The new file was kept as {temp}: rename it to {path}") from error

    def delete_named(self, name: str) -> None:
        fs = self._fs
        try:
            fs.rm_file(name)
        except FileNotFoundError:
            return
        except NotImplementedError:
            if fs.exists(name):
                fs.rm(name)

    # -- listings

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        for name, info in self._listed(prefix, "find"):
            if info["type"] == "file":
                yield ObjectInfo(f"{prefix}/{name}" if prefix else name, int(info["size"] or 0))

    def list_dir(self, prefix: str = "") -> Listing:
        found: tuple[set[str], set[str]] = (set(), set())
        for name, info in self._listed(prefix, "ls"):
            found[info["type"] == "directory"].add(name)
        return sorted(found[0]), sorted(found[1])

    def _listed(self, prefix: str, method: str) -> Iterator[tuple[str, Any]]:
        """List a folder by a method of the filesystem. Yield the names below it, and what the filesystem returns."""
        start = self.folder(prefix)

        def request() -> Any:
            fs = self._fs
            # Many filesystems cache listings, and other processes write here.
            fs.invalidate_cache()
            try:
                found = getattr(fs, method)(start, detail=True)
            except (FileNotFoundError, NotADirectoryError):
                return ()
            return found.items() if isinstance(found, dict) else [(info["name"], info) for info in found]

        for path, info in self.call(f"listing {prefix!r}", request):
            # No objects are helper files of a write, files that NFS keeps after their deletion, and names of folders.
            helper = path.endswith((_PART, "/")) or is_silly_name(path.rpartition("/")[2])
            name = path[len(start) + 1 :].rstrip("/") if path.startswith(f"{start}/") else ""
            if self._http:
                # The links of a web page are encoded, and those with "?" sort it.
                name = unquote(name.partition("?")[0].removeprefix("./"))
            if name and (info["type"] == "directory" or not helper):
                yield name, info

    # -- errors

    def call(self, what: str, request: Callable[[], T], key: str | None = None) -> T:
        return super().call(what, lambda: self._renewal.call(request), key)

    def hint(self, what: str, error: BaseException) -> str:
        hints = [_failures.permission_hint(CLOUD.get(self._protocol, ""), what, error)]
        if self._signs and _failures.refuses_credentials(error):
            hints.append(self.renewal_hint(self._fixed_credentials, self._renewal.error))
        return ". ".join(filter(None, hints)) or _next_step(error, signed=bool(self._query))


def _next_step(error: BaseException, *, signed: bool) -> str:
    """Return the next step after an error, from a url with a signature or without one."""
    if isinstance(error, ImportError):
        package = (getattr(error.__cause__, "name", None) or error.name or "").partition(".")[0]
        package = "'zarrckpt[s3fs]'" if package == "s3fs" else package or "PACKAGE"
        return f"Install the package for this protocol: pip install {package}"
    if isinstance(error, ValueError) and "Protocol not known" in str(error):
        return "Known are s3, gs, az and file, and those of fsspec, such as memory, sftp, ftp, smb, hdfs, http"
    if signed and getattr(error, "status", None) == 403:
        return (
            "The server refuses the query of the url for this object. Most presigned urls are for one object: sign "
            "the url of an archive (.zarr.zip), or use a signature for all objects below the folder"
        )
    if isinstance(error, PermissionError):
        return "Check the credentials and their permissions"
    if isinstance(error, FileNotFoundError):
        return "Check that the bucket or folder exists"
    return "Check the url, the options and the network"


def _refuse_chain(address: str) -> None:
    """Raise StorageError for a url whose filesystem opens other urls, since stored files may choose these urls."""
    protocol = _protocol_of(address)
    resolves = protocol in RESOLVERS or is_chain(address)
    if not resolves:
        bases = inspect.getmro(fsspec.get_filesystem_class(protocol))
        resolves = any(base.__module__ in _RESOLVING_MODULES for base in bases)
    if resolves:
        raise StorageError(
            f"{redact_url(address)!r} is opened through other urls, which can run code or read local files: expected a "
            'url of one protocol, without "::". If you trust all files there, pass '
            "storage_options={'backend': 'fsspec', 'allow_chains': True}"
        )


def _protocol_of(address: str) -> str:
    protocol, url, _ = address.partition("::")[0].partition("://")
    return protocol.lower() if url else "file"


@functools.cache
def _session_class() -> type:
    """Return a class with which s3fs follows no redirects. These would send the session token to other hosts."""
    from aiobotocore.httpsession import AIOHTTPSession  # type: ignore[import-untyped]

    class Direct:
        """An aiohttp session that fails on a redirect, unless its answer names the bucket's region, which s3fs uses."""

        def __init__(self, session: Any) -> None:
            self._session = session

        async def request(self, *args: Any, **options: Any) -> Any:
            answer = await self._session.request(*args, **options, allow_redirects=False)
            found = answer.headers
            if 300 < answer.status < 400 and "location" in found and "x-amz-bucket-region" not in found:
                answer.close()
                raise StorageError("the server redirects the request, which s3fs must not follow")
            return answer

    class DirectSession(AIOHTTPSession):  # type: ignore[misc]
        async def _get_session(self, proxy_url: str | None) -> Direct:
            return Direct(await super()._get_session(proxy_url))

    return DirectSession


def _is_refusal(error: BaseException, condition: Mapping[str, Any]) -> bool:
    """Whether the server refused the condition. s3fs has a distinct error for one case, and keeps answers as causes."""
    if isinstance(error, FileExistsError):
        return True
    if isinstance(error, FileNotFoundError):
        return "IfMatch" in condition
    answer = getattr(error.__cause__ or error, "response", None)
    status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode") if isinstance(answer, Mapping) else None
    return status in (409, 412)


def _make_folder(fs: Any, folder: str) -> None:
    """Make a folder and those above it. ``makedirs`` of sftp fails if another thread or process makes one of them."""
    for attempt in range(_TRIES):
        with contextlib.suppress(Exception) if attempt < _TRIES - 1 else contextlib.nullcontext():
            fs.makedirs(folder, exist_ok=True)
            return
        time.sleep(0.01 * 2**attempt)
