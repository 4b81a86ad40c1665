"""The one seam between zarrckpt and what holds the bytes.

Every store is used through these few synchronous verbs. Calls come from many threads at once; an
implementation must be safe for that. Keys are relative to the checkpoint's url, separated by "/",
and never begin or end with "/".
"""

from __future__ import annotations

import abc
import hashlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from zarrckpt._errors import CheckpointError, StorageError
from zarrckpt._forks import ForkSafeLock
from zarrckpt._jobs import plain_bytes
from zarrckpt._store import _failures

if TYPE_CHECKING:
    from zarr.abc.store import Store as ZarrStore

T = TypeVar("T")

Listing = tuple[list[str], list[str]]
"""The names of (objects, folders) right below one folder, each sorted."""

Reader = Callable[[int, Sequence[memoryview]], None]
"""Fills buffers with an object's bytes, one after the other, from a byte offset on."""

Buffer = bytes | bytearray | memoryview
"""What is written: any C-contiguous buffer of bytes. It must not change until the call returns."""


MOST_WHOLE = 2**30
"""Bytes of the longest object that is read as a whole: documents are much shorter."""


def _own_processors() -> int:
    """How many processors a process has, where the ranks of its machine share them alike."""
    every = os.cpu_count() or 1
    own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else every
    if own < every:
        return own
    # As torchrun says it.
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, every // int(ranks)) if ranks.isdecimal() and int(ranks) else every


BESIDE_TRAINING = max(1, min(2, _own_processors() - 1))
"""How many threads work on bytes while training runs in another one: it has a processor, and most of the interpreter.

Each such thread also takes the interpreter's lock thousands of times a second from training, which gives it away at
every operation of torch.
"""

_MAKERS = ForkSafeLock(partial(threading.Semaphore, min(4, os.cpu_count() or 1)))
_FEW_MAKERS = ForkSafeLock(partial(threading.Semaphore, BESIDE_TRAINING))


def check_key(key: str) -> str:
    """Return ``key`` unchanged if it names something below the url, and raise StorageError otherwise.

    Keys are read from stored documents too, so a ``..`` must never reach a filesystem.
    """
    if "\0" in key or any(part in ("", ".", "..") for part in key.split("/")):
        raise StorageError(
            f"{key!r} is not a key below the url: expected names separated by single '/', none of them "
            "empty, '.' or '..'; the document that names it is damaged or was not written by zarrckpt"
        )
    return key


def byte_views(buffers: Sequence[Buffer]) -> list[memoryview]:
    """The buffers as flat byte views, without copying; empty ones are left out."""
    # An empty multi-dimensional view cannot be cast, and has nothing to write anyway.
    views = (memoryview(buffer) for buffer in buffers)
    return [view.cast("B") for view in views if view.nbytes]


def version_of(data: bytes) -> str:
    """A version where the store tells none: a digest of the content."""
    return hashlib.sha256(data).hexdigest()


@dataclass(frozen=True)
class ObjectInfo:
    """One stored object: its key and its size in bytes."""

    key: str
    size: int


@dataclass(frozen=True)
class Versioned:
    """An object's bytes and the version that :meth:`Store.replace` takes (opaque, from this store only)."""

    data: bytes
    version: Any


class Store(abc.ABC):
    """Objects under one url.

    Errors: :class:`~zarrckpt.ObjectNotFoundError` for an absent object,
    :class:`~zarrckpt.ObjectExistsError` for a lost condition, any other failure as
    :class:`~zarrckpt.StorageError` that names the operation, the key and the url, with the client's own
    error as its cause, and never a credential.
    """

    url: str
    """What the user typed, normalised and without credentials: for messages."""

    is_local = False
    """Whether objects are files that this machine keeps in its file cache.

    Then :meth:`put_parts` and :meth:`reader` move bytes straight from and to the memory that they are given.
    """

    lists_all: bool = True
    """Whether :meth:`list` finds every object with its size. If not, ask for each one with :meth:`size`."""

    max_concurrency: int = 16
    """How many transfers (puts and reads) to run at once."""

    beside_training = False
    """Whether training goes on in another thread: then :data:`BESIDE_TRAINING` threads work on bytes."""

    def useful_concurrency(self) -> int:
        """How many transfers are worth being under way, with what is done to their bytes: at most the above."""
        return self.max_concurrency

    @property
    def makers(self) -> ForkSafeLock:
        """Of objects that are taken whole, so many are made at a time: the first are then on their way early."""
        return _FEW_MAKERS if self.beside_training else _MAKERS

    client_errors: type[Exception] = Exception
    """What :meth:`call` makes errors of this package's own of."""
    secrets: Sequence[str] = ()
    """Texts that no error may hold."""

    def hint(self, error: BaseException) -> str:
        """The next step after a client's error; "" for none."""
        return ""

    def failure(self, what: str, error: BaseException) -> StorageError:
        """A client's error as one of this package's own: what was done, where, why, the next step; never a secret."""
        return _failures.storage_error(what, self.url, error, self.secrets, self.hint(error))

    def call(self, what: str, request: Callable[[], T], key: str | None = None) -> T:
        """Call the client, with our own errors; with a ``key``, that of a missing file means this object."""
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
        # Outside of the handler: an exception's context would keep the client's unscrubbed text.
        raise failure

    def refuse_changes(self) -> None:
        """From now on every call that changes something raises StorageError, before it does."""

        def refuse(*_: Any) -> NoReturn:
            raise StorageError(f"{self.url}: this store was opened read-only: pass one that may be written to")

        for verb in ("put", "put_parts", "create", "replace", "delete", "sweep", "remove_folder"):
            setattr(self, verb, refuse)

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{type(self).__name__} holds a live client; pickle the StoreSpec that opened it")

    @abc.abstractmethod
    def get(self, key: str) -> bytes:
        """Return a whole object. One request.

        S3, Google Cloud Storage and Azure read at most :data:`MOST_WHOLE` bytes.
        """

    def size(self, key: str) -> int:
        """Return an object's size in bytes. One request, that for the whole object if the store has no other."""
        return len(self.get(key))

    def get_bounded(self, key: str, most: int) -> bytes:
        """Return a whole object; raise :class:`~zarrckpt.CorruptCheckpointError` if it has more than ``most`` bytes.

        S3, Google Cloud Storage and Azure read no more than that; other stores read the object first. One request.
        """
        data = self.get(key)
        if len(data) > most:
            raise _failures.long_object(key, self.url, most)
        return data

    def get_above(self, levels: int, key: str) -> bytes:
        """Return an object of the folder so many levels (from 1 on) above the url, in the same store. One request.

        Raises ObjectNotFoundError where it is absent, and without a request where the store ends below that folder.
        """
        raise _failures.not_found(f"{'../' * levels}{key}", self.url)

    def get_versioned(self, key: str) -> Versioned:
        """Return a whole object with its version. One request; three through s3fs, which tells no version with data."""
        data = self.get(key)
        return Versioned(data, version_of(data))

    @abc.abstractmethod
    def read_into(self, key: str, byte_offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` (writable, format "B") with the object's bytes from ``byte_offset`` on.

        An object that ends earlier raises :class:`~zarrckpt.CorruptCheckpointError` naming it. One request;
        none for an empty buffer.
        """

    def read(self, key: str, byte_offset: int, nbytes: int) -> memoryview:
        """Return ``nbytes`` of the object from ``byte_offset`` on, in the client's own memory where it has them there.

        Errors and cost as for :meth:`read_into`.
        """
        buffer = plain_bytes(nbytes).data
        self.read_into(key, byte_offset, buffer)
        return buffer.toreadonly()

    @contextmanager
    def reader(self, key: str) -> Iterator[Reader]:
        """Several reads of one object: a call that fills buffers, one after the other, from a byte offset on.

        Errors as in :meth:`read_into`. One request a buffer.
        """

        def read(byte_offset: int, buffers: Sequence[memoryview]) -> None:
            for buffer in buffers:
                self.read_into(key, byte_offset, buffer)
                byte_offset += len(buffer)

        yield read

    @abc.abstractmethod
    def put(self, key: str, buffers: Sequence[Buffer]) -> None:
        """Write an object, the buffers one after the other, replacing any old one. A reader never sees a part."""

    def put_parts(self, key: Callable[[], str], groups: Callable[[], Iterable[Sequence[Buffer]]]) -> None:
        """As :meth:`put`, of an object in an attempt's own tree, with buffers that are made one group after the other.

        Local files take each group before they ask for the next, so that its memory may be used again, and a reader may
        see a part of the file: nobody reads a tree before it is committed. Other stores take all groups first, of a few
        objects at a time. ``groups`` is called once for each try. ``key`` tells the key, and is asked once, when it is
        needed: it may wait for that.
        """
        with self.makers:
            buffers = [buffer for group in groups() for buffer in group]
            name = key()
        self.put(name, buffers)

    @abc.abstractmethod
    def create(self, key: str, data: bytes) -> None:
        """Write an object only where none is; durable on return. Exactly one of several racing calls wins.

        A retry whose first answer was lost meets its own object: the bytes are read back and compared
        before that is called a conflict (so ``data`` must be unique to the caller). A server that ignores
        conditions gets check-then-put instead, with one UserWarning per store that the guard is best effort.
        """

    @abc.abstractmethod
    def replace(self, key: str, data: bytes, version: Any) -> None:
        """Write an object only where ``version`` (of :meth:`get_versioned`) is what is there; durable on return.

        An absent object is a conflict as well. Lost answers, and servers that ignore conditions, as in
        :meth:`create`.
        """

    @abc.abstractmethod
    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects; absent ones are no error. Local folders left empty below the url go too."""

    def sweep(self, folders: Iterable[str]) -> None:  # noqa: B027 - there is nothing to do where objects are no files
        """Remove what writes that a crash cut short left right in these folders ("" for the root), and empty ones.

        Such files are no objects: no listing shows them. Does nothing where a put leaves nothing before its end.
        Conditional puts must not be under way in them; other puts begin again.
        """

    def remove_folder(self) -> None:  # noqa: B027 - there is nothing to do where objects are no files
        """Remove the url's own folder if it holds at most empty folders, is no link and no mount. Nothing above it."""

    @abc.abstractmethod
    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Every object whose key begins with the folder ``prefix`` ("" for all), at any depth, in no order.

        Names that end in "/", by which consoles show empty folders, and what NFS clients keep of deleted files, are no
        objects. obstore shows such a name without its "/", as an object of no bytes.
        """

    @abc.abstractmethod
    def list_dir(self, prefix: str = "") -> Listing:
        """The names right below the folder ``prefix``: (objects, folders), each sorted; ([], []) if absent."""

    def holds(self, folder: str) -> bool:
        """Whether anything is stored below a folder: empty folders at any depth are nothing. One request."""
        return any(True for _ in self.list(folder))

    def refuse_broken_link(self, folder: str) -> None:  # noqa: B027 - object stores have no links
        """Raise StorageError if a folder is a link that leads nowhere: what it stands for is not known to be absent."""

    def refresh(self, folder: str) -> None:  # noqa: B027 - object stores answer from what is stored
        """Make a network filesystem look again for what others have put in a folder: it caches absent names."""

    def sync(self, keys: Iterable[str]) -> None:  # noqa: B027 - where a put is durable when it returns
        """Return when these objects (and the folders that name them) survive a power cut."""

    @abc.abstractmethod
    def zarr_store(self) -> ZarrStore:
        """A read-only Zarr store on the same place, for zarr-python. Imports zarr."""
