"""fsspec filesystems: what matters about each kind, and instances for many threads and for forked children."""

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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import fsspec

from zarrckpt._errors import StorageError
from zarrckpt._forks import ForkSafeLock
from zarrckpt._store._failures import refuses_credentials
from zarrckpt._store._secrets import redact_url
from zarrckpt._store._url import RESOLVERS, is_chain

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
# HDFS renames over no file; webhdfs does not even say so, and hdfs has one error for everything.
_HDFS = {"hdfs", "webhdfs"}

_RESOLVING_MODULES = {
    "fsspec.archive",
    "fsspec.generic",
    *(f"fsspec.implementations.{name}" for name in ("asyn_wrapper", "cached", "chained", "dask", "dirfs", "reference")),
}
"""Where the classes of filesystems that take other urls are, whatever protocol is registered for them."""

_REGION = "x-amz-bucket-region"

_SIGN_IN_OPTIONS = ("key", "secret", "token", "username", "password", "session", "aws_access_key_id")
"""Options of s3fs and, the last one, of its client."""

_CONNECTIONS = 8
_FSSPEC_TRIES = 5

_FSSPEC_PART = re.compile(r"\.[0-9a-f]{32}\.zarrckpt-part")


@dataclass(frozen=True)
class Traits:
    """What matters about a kind of filesystem."""

    s3: bool
    splits: bool
    """Large reads are split, after a request for the size, unless they are told not to: s3fs from 2026.3 on."""
    flat: bool
    """Without folders: a put is atomic."""
    creates: bool
    """``mode="create"`` is a condition on the server."""
    memory: bool
    shared: bool
    """One instance may serve all threads."""
    renames: bool
    hdfs: bool

    @classmethod
    def of(cls, fs: Any) -> Traits:
        """By the filesystem's protocols."""
        names = {fs.protocol} if isinstance(fs.protocol, str) else set(fs.protocol)
        s3 = bool(names & _S3)
        return cls(
            s3=s3,
            splits=s3 and "max_concurrency" in inspect.signature(fs._cat_file).parameters,
            flat=bool(names & _FLAT),
            creates=bool(names & _CREATES),
            memory="memory" in names,
            shared=bool(fs.async_impl or names & _SHARED),
            # The base class renames by copying, which is no better than writing in place.
            renames=type(fs).mv is not fsspec.AbstractFileSystem.mv,
            hdfs=bool(names & _HDFS),
        )


class Filesystems:
    """Instances of one filesystem: one for all threads, or, as for sftp, a few that are lent to one call each."""

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
        self._generation, self._renewing = 0, ForkSafeLock()
        self._begin(first)

    @property
    def fixed_credentials(self) -> str | None:
        """The option of s3fs that holds the credentials, which cannot be read again."""
        given = {**(self._options.get("client_kwargs") or {}), **self._options}
        return next((name for name in _SIGN_IN_OPTIONS if given.get(name)), None)

    @property
    def signs_for_s3(self) -> bool:
        """Whether requests have a signature of S3."""
        return self.traits.s3 and not self._options.get("anon")

    def ask(self, call: Callable[[], T]) -> T:
        """Make a call that borrows a filesystem; once more with new credentials if a server of S3 refuses these.

        Calls that fail at the same time share one renewal.
        """
        generation = self._generation
        try:
            return call()
        except Exception as error:
            if not self.signs_for_s3 or self.fixed_credentials or not refuses_credentials(error):
                raise
        with self._renewing:
            if generation == self._generation:
                # fsspec would return the same filesystem again.
                self._begin(self._open_shared(skip_instance_cache=True)[0])
                self._generation = generation + 1
        return call()

    def _begin(self, first: Any) -> None:
        idle: queue.LifoQueue[Any] = queue.LifoQueue()
        idle.put(first)
        self._slots, self._idle = threading.BoundedSemaphore(_CONNECTIONS), idle
        self._pid = os.getpid()

    @contextlib.contextmanager
    def lend(self) -> Iterator[Any]:
        """A filesystem that nobody else uses meanwhile, or one that may be shared."""
        if self._pid != os.getpid():
            # Connections and event loops do not survive a fork.
            self._begin(self._open())
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

    def zarr_store(self) -> ZarrStore:
        """zarr's own read-only store on the same place."""
        import asyncio

        from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper
        from zarr.storage import FsspecStore

        fs = self._open()
        if fs.async_impl:
            # s3fs would keep the credentials of an earlier one.
            fresh = {"skip_instance_cache": True} if self.traits.s3 else {}
            fs = type(fs)(*fs.storage_args, **{**fs.storage_options, "asynchronous": True, **fresh})
        else:
            one_at_a_time = None if self.traits.shared else asyncio.Semaphore(1)
            fs = AsyncFileSystemWrapper(fs, asynchronous=True, semaphore=one_at_a_time)
        return FsspecStore(fs, path=self.root, read_only=True)

    def _open(self) -> Any:
        return self._open_shared(**({} if self.traits.shared else {"skip_instance_cache": True}))[0]

    def _open_shared(self, **more: Any) -> tuple[Any, str]:
        """A filesystem and the path in it. Where chains are not allowed, "::" is a part of a name."""
        options = {**self._options, **more}
        if self._chains:
            fs, path = fsspec.core.url_to_fs(self._address, **options)
            return fs, path
        kind = fsspec.get_filesystem_class(_protocol_of(self._address))
        return kind(**{**kind._get_kwargs_from_urls(self._address), **options}), kind._strip_protocol(self._address)


def refuse_chain(address: str) -> None:
    """Raise StorageError for a url whose filesystem opens other urls: these may come from what is stored there."""
    protocol = _protocol_of(address)
    resolves = protocol in RESOLVERS or is_chain(address)
    if not resolves:
        bases = inspect.getmro(fsspec.get_filesystem_class(protocol))
        resolves = any(base.__module__ in _RESOLVING_MODULES for base in bases)
    if resolves:
        raise StorageError(
            f"{redact_url(address)!r} is opened through other urls, which can run code or read local files: expected a "
            'url of one protocol, without "::". If you trust all that is stored there, pass '
            "storage_options={'backend': 'fsspec', 'allow_chains': True}"
        )


def _protocol_of(address: str) -> str:
    protocol, url, _ = address.partition("::")[0].partition("://")
    return protocol.lower() if url else "file"


def _without_redirects(address: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Options for a filesystem; s3fs follows no redirects then, which would take the session token to other hosts."""
    if fsspec.utils.get_protocol(address) not in _S3:
        return dict(options)
    config = options.get("config_kwargs")
    return {**options, "config_kwargs": {"http_session_cls": _session_class(), **(config or {})}}


@functools.cache
def _session_class() -> type:
    from aiobotocore.httpsession import AIOHTTPSession  # type: ignore[import-untyped]

    class Direct:
        """An aiohttp session that fails with a redirect, unless that names a bucket's region: the client asks there."""

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


def is_part(path: str) -> bool:
    """Whether a path is a helper file of :func:`write_file`, and no object."""
    return _FSSPEC_PART.search(path) is not None


def write_file(fs: Any, traits: Traits, path: str, data: bytes, condition: Mapping[str, Any]) -> None:
    """Write a whole object so that readers see the old one or the new one, where the filesystem allows it."""
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
    """Delete an object; an absent one is no error."""
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
    """Give a file its name, in place of what is there. Where that fails, the old one stays, and ``temp`` goes."""
    try:
        if traits.hdfs and fs.exists(path):
            _swap(fs, temp, path)
            return
        try:
            fs.mv(temp, path)
        except OSError as error:
            # SMB, for one, renames over no file.
            if not isinstance(error, FileExistsError) and error.errno != errno.EEXIST:
                raise
            _swap(fs, temp, path)
    except BaseException:
        with contextlib.suppress(Exception):
            fs.rm(temp)
        raise


def _swap(fs: Any, temp: str, path: str) -> None:
    """Rename over a file where the filesystem does not: the old one goes aside, and comes back where that fails."""
    aside = _part_of(path)
    try:
        fs.mv(path, aside)
        fs.mv(temp, path)
        if not fs.exists(path):
            raise OSError(f"{temp} was not renamed")
    except BaseException as error:
        # What is there counts: a call that fails may have done its work.
        try:
            if not fs.exists(path):
                fs.mv(aside, path)
        except Exception:
            raise OSError(f"{error}; what was there is kept, rename it back: {aside}") from error
        raise
    with contextlib.suppress(Exception):
        fs.rm(aside)


def _make_folder(fs: Any, folder: str) -> None:
    """Make a folder and those above it, while other threads and processes do the same."""
    for attempt in range(_FSSPEC_TRIES):
        try:
            fs.makedirs(folder, exist_ok=True)
            return
        except Exception:
            # Not every ``makedirs`` minds a folder that appears between its look and its call.
            if fs.isdir(folder):
                return
            if attempt == _FSSPEC_TRIES - 1:
                raise
            time.sleep(0.01 * 2**attempt)
