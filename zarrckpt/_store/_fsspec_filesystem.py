"""fsspec filesystems: the traits of each kind, and instances for threads and forked children."""

from __future__ import annotations

import contextlib
import errno
import functools
import inspect
import os
import queue
import re
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import fsspec

from zarrckpt._errors import StorageError
from zarrckpt._store._local_commit import is_silly_name
from zarrckpt._store._renewal import Renewal
from zarrckpt._store._secrets import redact_url
from zarrckpt._store._url import RESOLVERS, is_chain

_S3 = {"s3", "s3a"}
# Stores without folders: a put is atomic, and no folder must be made (s3fs would make a bucket instead).
_FLAT = _S3 | {"gcs", "gs", "abfs", "abfss", "az", "adl", "oss", "oci", "tos", "memory", "http", "https"}
# Those with a mode="create" that the server checks.
_CREATES = _S3 | {"gcs", "gs", "abfs", "abfss", "az", "adl"}
# Synchronous filesystems of which one instance may serve all threads.
_SHARED = {"memory", "file", "local"}
# HDFS cannot rename over a file. webhdfs raises no error for it, and hdfs raises the same error for every failure.
_HDFS = {"hdfs", "webhdfs"}

_RESOLVING_MODULES = {
    "fsspec.archive",
    "fsspec.generic",
    *(f"fsspec.implementations.{name}" for name in ("asyn_wrapper", "cached", "chained", "dask", "dirfs", "reference")),
}
"""Modules of filesystems that open other urls, under any protocol."""

_REGION = "x-amz-bucket-region"

_SIGN_IN_OPTIONS = ("key", "secret", "token", "username", "password", "session", "aws_access_key_id")
"""Options of s3fs and (the last one) of its client that hold credentials."""

_CONNECTIONS = 8
_FOLDER_TRIES = 5

_FSSPEC_PART = re.compile(r"\.[0-9a-f]{32}\.zarrckpt-part")


@dataclass(frozen=True)
class Traits:
    """Properties of a kind of filesystem."""

    s3: bool
    splits: bool
    """Whether large reads are split after a request for the size, unless max_concurrency=1 (s3fs from 2026.3 on)."""
    flat: bool
    """Whether there are no folders, so that a put is atomic."""
    creates: bool
    """Whether the server checks ``mode="create"``."""
    memory: bool
    http: bool
    """Whether listings are the links of a web page, percent-encoded and without sizes."""
    shared: bool
    """Whether one instance may serve all threads."""
    renames: bool
    hdfs: bool

    @classmethod
    def of(cls, fs: Any) -> Traits:
        """Return the traits of a filesystem, mainly by its protocols."""
        names = {fs.protocol} if isinstance(fs.protocol, str) else set(fs.protocol)
        s3 = bool(names & _S3)
        return cls(
            s3=s3,
            splits=s3 and "max_concurrency" in inspect.signature(fs._cat_file).parameters,
            flat=bool(names & _FLAT),
            creates=bool(names & _CREATES),
            memory="memory" in names,
            http=bool(names & {"http", "https"}),
            shared=bool(fs.async_impl or names & _SHARED),
            # The base class renames by copying, which is not safer than writing in place.
            renames=type(fs).mv is not fsspec.AbstractFileSystem.mv,
            hdfs=bool(names & _HDFS),
        )


class Filesystems:
    """Instances of one filesystem: one for all threads or, as for sftp, up to eight that are lent to one call each."""

    def __init__(self, address: str, options: Mapping[str, Any]) -> None:
        self._address = address
        options = dict(options)
        self._chains = options.pop("allow_chains", False)
        if not isinstance(self._chains, bool):
            raise StorageError(f"the option allow_chains must be True or False, got {self._chains!r}")
        if not self._chains:
            refuse_chain(address)
        self._options = _without_redirects(address, options)
        first, root = self._open_shared()
        self.root: str = root.rstrip("/")
        self.traits = Traits.of(first)
        self.renewal = Renewal(self._renew if self.signs_for_s3 and not self.fixed_credentials else None)
        self._use(first)

    @property
    def fixed_credentials(self) -> str | None:
        """The option of s3fs that holds the credentials, which cannot be read again."""
        given = {**(self._options.get("client_kwargs") or {}), **self._options}
        return next((name for name in _SIGN_IN_OPTIONS if given.get(name)), None)

    @property
    def signs_for_s3(self) -> bool:
        """Whether requests are signed for S3."""
        return self.traits.s3 and not self._options.get("anon")

    def _renew(self) -> None:
        # fsspec would return the same filesystem again.
        self._use(self._open_shared(skip_instance_cache=True)[0])

    def _use(self, first: Any) -> None:
        idle: queue.LifoQueue[Any] = queue.LifoQueue()
        idle.put(first)
        self._slots, self._idle = threading.BoundedSemaphore(_CONNECTIONS), idle
        self._pid = os.getpid()

    @contextlib.contextmanager
    def lend(self) -> Iterator[Any]:
        """Yield a filesystem that no other call uses in the block, or one that may be shared."""
        if self._pid != os.getpid():
            # Connections and event loops do not survive a fork.
            self._use(self._open())
        if self.traits.shared:
            yield self._idle.queue[0]
            return
        with self._slots:
            try:
                fs = self._idle.get_nowait()
            except queue.Empty:
                fs = self._open()
            try:
                yield fs
            finally:
                self._idle.put(fs)

    def _open(self) -> Any:
        return self._open_shared(**({} if self.traits.shared else {"skip_instance_cache": True}))[0]

    def _open_shared(self, **more: Any) -> tuple[Any, str]:
        """Return a filesystem and the path in it. If chains are not allowed, "::" is a part of a name."""
        options = {**self._options, **more}
        if self._chains:
            fs, path = fsspec.core.url_to_fs(self._address, **options)
            return fs, path
        kind = fsspec.get_filesystem_class(_protocol_of(self._address))
        return kind(**{**kind._get_kwargs_from_urls(self._address), **options}), kind._strip_protocol(self._address)


def refuse_chain(address: str) -> None:
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


def _without_redirects(address: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options with which s3fs follows no redirects. These would send the session token to other hosts."""
    if fsspec.utils.get_protocol(address) not in _S3:
        return dict(options)
    config = options.get("config_kwargs")
    return {**options, "config_kwargs": {"http_session_cls": _session_class(), **(config or {})}}


@functools.cache
def _session_class() -> type:
    from aiobotocore.httpsession import AIOHTTPSession  # type: ignore[import-untyped]

    class Direct:
        """An aiohttp session that fails on a redirect, unless its answer names the bucket's region, which s3fs uses."""

        def __init__(self, session: Any) -> None:
            self._session = session

        async def request(self, *args: Any, **options: Any) -> Any:
            answer = await self._session.request(*args, **options, allow_redirects=False)
            if 300 < answer.status < 400 and "location" in answer.headers and _REGION not in answer.headers:
                answer.close()
                raise StorageError("the server redirects the request, which s3fs must not follow")
            return answer

    class DirectSession(AIOHTTPSession):  # type: ignore[misc]
        async def _get_session(self, proxy_url: str | None) -> Direct:
            return Direct(await super()._get_session(proxy_url))

    return DirectSession


def is_no_object(path: str) -> bool:
    """Whether a path is a helper file of :func:`write_file`, one that NFS keeps of a deleted file, or a folder."""
    return _FSSPEC_PART.search(path) is not None or is_silly_name(path.rpartition("/")[2]) or path.endswith("/")


def write_file(fs: Any, traits: Traits, path: str, data: bytes, condition: Mapping[str, Any]) -> None:
    """Write a whole object. If the filesystem permits it, readers see the old or the new object, never a part."""
    if traits.flat:
        fs.pipe_file(path, data, **condition)
        return
    temp = _part_of(path) if traits.renames else path
    try:
        fs.pipe_file(temp, data)
    except FileNotFoundError:
        _make_folder(fs, path.rpartition("/")[0])
        fs.pipe_file(temp, data)
    if temp != path:
        _rename(fs, traits, temp, path)


def remove_file(fs: Any, path: str) -> None:
    """Delete an object. An absent one is no error."""
    try:
        fs.rm_file(path)
    except FileNotFoundError:
        return
    except NotImplementedError:
        if fs.exists(path):
            fs.rm(path)


def _part_of(path: str) -> str:
    return f"{path}.{uuid.uuid4().hex}.zarrckpt-part"


def _rename(fs: Any, traits: Traits, temp: str, path: str) -> None:
    """Rename a file and replace an old one. If this fails, keep the old file and remove ``temp``."""
    try:
        try:
            if traits.hdfs and fs.exists(path):
                raise FileExistsError(path)
            fs.mv(temp, path)
        except OSError as error:
            # Some filesystems, such as SMB, cannot rename over a file.
            if not isinstance(error, FileExistsError) and error.errno != errno.EEXIST:
                raise
            _swap(fs, temp, path)
    except BaseException:
        with contextlib.suppress(Exception):
            fs.rm(temp)
        raise


def _swap(fs: Any, temp: str, path: str) -> None:
    """Replace a file on a filesystem that cannot rename over one (HDFS, SMB).

    The old file is renamed first, and back if this fails, because the root document of a checkpoint must not be lost if
    an overwrite fails.
    """
    aside = _part_of(path)
    try:
        fs.mv(path, aside)
        fs.mv(temp, path)
        if not fs.exists(path):
            raise OSError(f"{temp} was not renamed")
    except BaseException as error:
        # A call that raises may still have done its work, so look at the files.
        try:
            if not fs.exists(path):
                fs.mv(aside, path)
        except Exception:
            raise OSError(f"{error}. The old file was kept as {aside}: rename it back") from error
        raise
    with contextlib.suppress(Exception):
        fs.rm(aside)


def _make_folder(fs: Any, folder: str) -> None:
    """Make a folder and those above it, while other threads and processes do the same."""
    for attempt in range(_FOLDER_TRIES):
        try:
            fs.makedirs(folder, exist_ok=True)
            return
        except Exception:
            # Some ``makedirs`` fail if the folder appears between their check and their call.
            if fs.isdir(folder):
                return
            if attempt == _FOLDER_TRIES - 1:
                raise
            time.sleep(0.01 * 2**attempt)
