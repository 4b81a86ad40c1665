"""The interface of all stores: synchronous calls on objects below one url.

Implementations must be thread-safe. Keys are relative to the checkpoint's url. Their parts are separated by "/", and
they neither begin nor end with "/".
"""

from __future__ import annotations

import abc
import hashlib
import logging
import os
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from zarrckpt._errors import CheckpointError, StorageError, log
from zarrckpt._forks import ForkSafeLock
from zarrckpt._jobs import plain_bytes
from zarrckpt._store import _failures
from zarrckpt._store._archive import ArchivePart, Places

if TYPE_CHECKING:
    from zarrckpt._store._linkable import LinkableFile
    from zarrckpt._store._optional import OptionalRequests

T = TypeVar("T")

Listing = tuple[list[str], list[str]]
"""The names of (objects, folders) right below one folder, each sorted."""

Reader = Callable[[int, Sequence[memoryview]], None]
"""A function that fills buffers, one after the other, with an object's bytes from a byte offset on."""

Buffer = bytes | bytearray | memoryview
"""Data to write: any C-contiguous buffer of bytes. It must not change until the call returns."""


def _own_processors() -> int:
    """Return the number of processors per rank if the ranks of this machine share them equally."""
    every = os.cpu_count() or 1
    own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else every
    if own < every:
        return own
    # torchrun sets this variable.
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, every // int(ranks)) if ranks.isdecimal() and int(ranks) else every


_SMALL_BYTES = 64 << 10
"""Below this mean size, entries of a local archive are transferred by one thread."""

BESIDE_TRAINING = max(1, min(2, _own_processors() - 1))
"""Number of threads that process bytes during training. One processor is left to the training thread.

More threads would slow training down. Each takes the interpreter's lock thousands of times a second, and the training
thread releases it at every operation of torch.
"""

_ENCODERS = ForkSafeLock(partial(threading.Semaphore, min(4, os.cpu_count() or 1)))
_FEW_ENCODERS = ForkSafeLock(partial(threading.Semaphore, BESIDE_TRAINING))


def check_key(key: str) -> str:
    """Return ``key`` unchanged if it is a valid key below the url. Raise StorageError otherwise.

    Stored documents contain keys too, so a ``..`` must never reach a filesystem.
    """
    if "\0" in key or any(part in ("", ".", "..") for part in key.split("/")):
        raise StorageError(
            f"{key!r} is not a key below the url: expected names separated by single '/', none of them "
            "empty, '.' or '..'. The document that contains it is damaged or was not written by zarrckpt"
        )
    return key


def is_system_file(key: str) -> bool:
    """Whether an object is one that operating systems add to folders, and that belongs to no checkpoint."""
    name = key.rpartition("/")[2]
    return name.startswith("._") or name in (".DS_Store", "Thumbs.db", "desktop.ini")


def byte_views(buffers: Sequence[Buffer]) -> list[memoryview]:
    """Return the buffers as flat byte views without copying. Empty buffers are left out."""
    # An empty multi-dimensional view cannot be cast.
    views = (memoryview(buffer) for buffer in buffers)
    return [view.cast("B") for view in views if view.nbytes]


def version_of(data: bytes) -> str:
    """Return a digest of the content as the version, for stores without versions."""
    return hashlib.sha256(data).hexdigest()


@dataclass(frozen=True)
class ObjectInfo:
    """One stored object: its key and its size in bytes."""

    key: str
    size: int


@dataclass(frozen=True)
class VersionedObject:
    """An object's bytes and its version for :meth:`Store.replace`. Versions are opaque and valid for one store only."""

    data: bytes
    version: Any


class Store(abc.ABC):
    """Objects under one url.

    Calls raise :class:`~zarrckpt.ObjectNotFoundError` for an absent object and :class:`~zarrckpt.ObjectExistsError` if
    the condition of a put does not hold. All other failures are a :class:`~zarrckpt.StorageError` that names the
    operation, the key and the url. Its cause is the client's error. Errors never contain a credential.

    It has many methods because each is an operation that some kind of store implements in another way. Most of them
    have an implementation here.
    """

    url: str
    """The user's url, normalised and without credentials, for messages."""

    is_local = False
    """Whether objects are files that this machine keeps in its file cache.

    If so, :meth:`put_parts` and :meth:`reader` move bytes directly from and to the caller's memory.
    """

    is_archive = False
    """Whether the url is that of an archive, one file. Then each attempt has an archive of its own until its commit."""

    lists_all: bool = True
    """Whether :meth:`list` finds every object with its size. If not, call :meth:`size` for each object."""

    max_concurrency: int = 16
    """Maximum number of concurrent transfers (puts and reads)."""

    on_repeat: Callable[[str, Exception, bool], None] | None = None
    """Called before a request is repeated after a transient failure, in the thread that makes the request.

    The arguments are the operation, the failure as a StorageError, and whether the server asked for fewer requests. The
    function must not raise. Repeats within a client are not reported: with obstore those of listings, of the parts of
    an upload and of copies without replacement, with fsspec all.
    """

    beside_training = False
    """Whether training runs in another thread. If so, :data:`BESIDE_TRAINING` threads process bytes."""

    def useful_concurrency(self) -> int:
        """Return the number of threads for transfers that also encode, decode or check data.

        It is at most :attr:`max_concurrency`.
        """
        return self.max_concurrency

    @property
    def encoders(self) -> ForkSafeLock:
        """A semaphore that bounds how many whole objects are encoded at once, so that the first uploads start early."""
        return _FEW_ENCODERS if self.beside_training else _ENCODERS

    client_errors: type[Exception] = Exception
    """The client's exceptions, which :meth:`call` translates to this package's errors."""
    secrets: Sequence[str] = ()
    """Texts that no error may contain."""
    proxy: str = ""
    """The proxy of the requests and the setting that names it, for messages; "" if there is none."""

    def hint(self, what: str, error: BaseException) -> str:
        """Return the next step after a client's error in an operation, or "" for none."""
        return ""

    def failure(self, what: str, error: BaseException) -> StorageError:
        """Translate a client's error: name the operation, the url, the reason and the next step, without secrets."""
        return _failures.storage_error(what, self.url, error, self.secrets, self.hint(what, error), self.proxy)

    def report_repeat(self, what: str, error: BaseException) -> None:
        """Report a client's error after which the request is repeated."""
        if self.on_repeat is None and not log.isEnabledFor(logging.DEBUG):
            return
        failure = self.failure(what, error)
        log.debug("a request is repeated: %s", failure)
        if self.on_repeat is not None:
            self.on_repeat(what, failure, _failures.is_throttling(error))

    def call(self, what: str, request: Callable[[], T], key: str | None = None) -> T:
        """Call the client and translate its errors. If ``key`` is given, an absent file means an absent object."""
        try:
            return request()
        except CheckpointError:
            raise
        except BaseException as error:
            if not isinstance(error, self.client_errors) and not _failures.is_panic(error):
                raise
            if key is not None and isinstance(error, _failures.ABSENT):
                failure: StorageError = _failures.not_found(key, self.url, error, self.secrets)
            else:
                failure = self.failure(what, error)
        # Outside the handler, because an exception's context would keep the client's text with its secrets.
        raise failure

    def refuse_changes(self) -> None:
        """Make the store read-only: every call that would change objects raises StorageError from now on."""

        def refuse(*_: Any) -> NoReturn:
            raise StorageError(f"{self.url}: this store was opened read-only. Pass a store that can be written to")

        for verb in ("put", "put_parts", "copy_from", "link", "create", "replace", "delete", "sweep", "remove_folder"):
            setattr(self, verb, refuse)

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{type(self).__name__} holds a live client. Pickle the StoreSpec that opened it")

    @abc.abstractmethod
    def get(self, key: str) -> bytes:
        """Return a whole object. One request.

        Local files, S3, Google Cloud Storage and Azure read at most :data:`MAX_WHOLE_BYTES` bytes.
        """

    def size(self, key: str) -> int:
        """Return an object's size in bytes. One request. By default it reads the whole object."""
        return len(self.get(key))

    def get_bounded(self, key: str, max_bytes: int) -> bytes:
        """Return a whole object. Raise :class:`~zarrckpt.CorruptCheckpointError` if it is longer than ``max_bytes``.

        One request. From local files, S3, Google Cloud Storage and Azure no more bytes are read. Other stores read the
        whole object before they compare its size.
        """
        data = self.get(key)
        if len(data) > max_bytes:
            raise _failures.long_object(key, self.url, max_bytes)
        return data

    def get_optional(self, key: str, max_bytes: int, optional: OptionalRequests) -> bytes:
        """Return a whole object as :meth:`get_bounded` does, but within the time of optional requests.

        Only S3, Google Cloud Storage and Azure limit the time.
        """
        return self.get_bounded(key, max_bytes)

    def get_above(self, levels: int, key: str) -> bytes:
        """Return an object of the folder that is ``levels`` (at least 1) levels above the url, in the same store.

        One request. Raises ObjectNotFoundError if the object is absent. If that folder is outside the store, no request
        is made.
        """
        raise _failures.not_found(f"{'../' * levels}{key}", self.url)

    def first_bytes(self, nbytes: int) -> bytes:
        """Return at most ``nbytes`` first bytes of the object that has the url as its name, or b"" without one.

        One request, or none if the store has no such objects. A failure counts as no object.
        """
        return b""

    def get_versioned(self, key: str) -> VersionedObject:
        """Return a whole object and its version. One request."""
        data = self.get(key)
        return VersionedObject(data, version_of(data))

    def version(self, key: str) -> Any:
        """Return an object's version. One request, which reads the object if the store has no e-tags."""
        return self.get_versioned(key).version

    @abc.abstractmethod
    def read_into(self, key: str, byte_offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` (writable, format "B") with the object's bytes from ``byte_offset`` on.

        Raises :class:`~zarrckpt.CorruptCheckpointError`, which names the object, if the object ends earlier. One
        request; none for an empty buffer.
        """

    def read(self, key: str, byte_offset: int, nbytes: int) -> memoryview:
        """Return ``nbytes`` of the object from ``byte_offset`` on, without a copy if the client's memory holds them.

        Errors and cost are those of :meth:`read_into`.
        """
        buffer = plain_bytes(nbytes).data
        self.read_into(key, byte_offset, buffer)
        return buffer.toreadonly()

    def threads_for(self, nbytes: int, objects: int) -> int | Callable[[], int]:
        """Return the number of threads to transfer objects of ``nbytes`` in total, or a function that returns it.

        One thread writes or reads few small files, and any number of small entries of a local archive, because threads
        would only wait for the interpreter's lock.
        """
        small = objects if self.is_archive else 1 if objects <= 2 else 0
        return 1 if self.is_local and nbytes < small * _SMALL_BYTES else self.useful_concurrency

    def keep_open(self) -> AbstractContextManager[None]:
        """Return a context in which an archive is opened once for the reads of many entries."""
        return nullcontext()

    def reader(self, key: str) -> AbstractContextManager[Reader]:
        """Return a context manager for several reads of one object. It yields a :data:`Reader`.

        Errors are those of :meth:`read_into`. One request per buffer.
        """

        def read(byte_offset: int, buffers: Sequence[memoryview]) -> None:
            for buffer in buffers:
                self.read_into(key, byte_offset, buffer)
                byte_offset += len(buffer)

        return nullcontext(read)

    @abc.abstractmethod
    def put(self, key: str, buffers: Sequence[Buffer]) -> None:
        """Write an object that consists of the buffers in order, and replace an old one. Readers never see a part."""

    def put_parts(self, key: str, groups: Callable[[], Iterable[Sequence[Buffer]]]) -> None:
        """Write an object of an attempt that is not committed yet, from groups of buffers that are made one by one.

        A local file is written group by group, so the memory of a group may be reused when the next one is requested.
        Readers may see a part of the file, but no reader opens an attempt before it is committed. Other stores collect
        all groups of an object before they put it, for a few objects at once (:attr:`encoders`).

        ``groups`` returns the groups of buffers. It is called once per try.
        """
        with self.encoders:
            buffers = [buffer for group in groups() for buffer in group]
        self.put(key, buffers)

    def begin_archive(self, save_id: str, planned_bytes: int) -> None:  # noqa: B027 - only archives need it
        """Create the unfinished archive of an attempt, whose marker has been put. Called on the coordinator.

        The file has the size of the planned entries from the beginning. So no NFS client takes a page of it to be
        beyond the end of the file, and fills the page with zeros where other ranks write.
        """

    def begin_part(self, save_id: str, places: Places) -> None:  # noqa: B027 - only archives need it
        """Open the unfinished archive of an attempt, into which all ranks put entries. Called on each rank.

        ``places`` has the planned place of each entry of known size that this rank puts; on the coordinator, of all
        ranks. :meth:`begin_archive` must have returned.
        """

    def end_part(self) -> ArchivePart | None:
        """Sync and close the archive on this rank, and return the entries that the rank has put."""
        return None

    def close_part(self) -> None:  # noqa: B027 - only archives need it
        """Close the archive on this rank, after a success or a failure."""

    def add_parts(self, parts: Sequence[ArchivePart], keys: Iterable[str]) -> None:  # noqa: B027 - only archives need it
        """Add the entries of all ranks to the archive of the attempt. Called on the coordinator.

        Raises IncompleteSaveError if one of the ``keys`` was not put exactly once, or another key was put.
        """

    def begin_record_checks(self) -> None:  # noqa: B027 - only archives need it
        """Begin to check the records of entries that are read in order, until :meth:`record_faults`."""

    def record_faults(self, keys: Collection[str]) -> Iterable[tuple[str, str]]:
        """Return the key of each entry whose records in the archive are damaged, and the fault. "" for the archive.

        Entries that are not among ``keys`` are also faults.
        """
        return ()

    def copies_from(self, source: Store) -> bool:
        """Whether :meth:`copy_from` may succeed for objects of another store. No request."""
        return False

    def copy_from(self, source: Store, source_key: str, key: str, nbytes: int, optional: OptionalRequests) -> bool:
        """Make an object of an uncommitted attempt from one of ``nbytes`` bytes in another store, in the server.

        Return False if the server does not copy it, or if the source is absent or has another size. Then the caller
        puts the object. Two requests in S3 and Google Cloud Storage, which copy within one bucket. After a failure
        no more requests of ``optional`` are made, and a warning gives the reason.
        """
        return False

    def open_linkable(self, source: Store, source_key: str, key: str) -> LinkableFile | str:
        """Open a file of another store (or of this one) that may become ``key`` by a link. The caller closes it.

        Return the reason if there is none: the file is absent or special, or differs from a new file in its owner,
        group or mode, or other users may write to it.
        """
        return "only local files can be linked"

    def link(self, file: LinkableFile, key: str) -> bool:
        """Make an object of an uncommitted attempt from an open file. Return False if it is not possible."""
        return False

    @abc.abstractmethod
    def create(self, key: str, data: bytes) -> None:
        """Write an object only if none exists under the key. It is durable on return. Exactly one of racing calls wins.

        If the answer to a put is lost, its retry finds the object that it wrote itself. So an existing object is read
        and compared before a conflict is raised, and ``data`` must be unique to the caller. On a server that ignores
        conditions the call reads before it puts, which excludes no race. One UserWarning per store reports this.
        """

    @abc.abstractmethod
    def replace(self, key: str, data: bytes, version: Any) -> None:
        """Write an object only if its present version is ``version`` (of :meth:`get_versioned`).

        It is durable on return. An absent object is a conflict as well. Lost answers, and servers that ignore
        conditions, are treated as in :meth:`create`.
        """

    @abc.abstractmethod
    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects. Absent ones are no error. Local folders below the url that become empty are removed too."""

    def sweep(self, folders: Iterable[str]) -> None:  # noqa: B027 - only local files need it
        """Remove files of writes that a crash interrupted, directly in these folders ("" for the root).

        Folders that are empty are removed, too. Such files are not objects, and no listing contains them. Stores
        whose interrupted puts leave no files do nothing. No conditional put may be in progress in these folders. Other
        puts in progress start again.
        """

    def remove_folder(self, folder: str = "") -> None:  # noqa: B027 - only local files need it
        """Remove a folder ("" for that of the url) without objects. Its files of interrupted writes are removed, too.

        Nothing is removed if it is a link or a mount point. Puts in progress start again.
        """

    @abc.abstractmethod
    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Yield every object below the folder ``prefix`` ("" for all), at any depth, in any order.

        Two kinds of names are not objects: those that end in "/", which consoles create for empty folders, and files
        that NFS clients keep after their deletion. obstore lists a name that ends in "/" without the "/", as an empty
        object.
        """

    @abc.abstractmethod
    def list_dir(self, prefix: str = "") -> Listing:
        """Return the names directly below the folder ``prefix``: (objects, folders), sorted; ([], []) if absent."""

    def holds(self, folder: str) -> bool:
        """Whether a folder contains an object at any depth. One request."""
        return any(True for _ in self.list(folder))

    def refuse_broken_link(self, folder: str) -> None:  # noqa: B027 - object stores have no links
        """Raise StorageError if a folder is a link whose target is missing: its disk may only be unmounted."""

    def refresh(self, folder: str) -> None:  # noqa: B027 - object stores do not cache names
        """Make a network filesystem look again for new entries of a folder, since it caches that names are absent."""

    def sync(self, keys: Iterable[str]) -> None:  # noqa: B027 - puts to object stores are durable on return
        """Return when these objects and the folders that contain them are durable, that is, survive a power cut."""
