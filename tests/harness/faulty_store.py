"""A store whose operations fail on purpose, as a rule chooses.

    store = FaultyStore("s3://bucket/run/step-7", at(17, STOP))
    zarrckpt.save(state, store)                                          # raises Stopped at operation 17

A :class:`FaultyStore` wraps a url or a store, and calls the rule before each operation. Pass the store instead of a
url. Torch is not needed.
"""

from __future__ import annotations

import enum
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from harness.internals import Buffer, Listing, ObjectInfo, Store, VersionedObject, open_store
from zarrckpt import StorageError
from zarrckpt._store import Url
from zarrckpt._store._linkable import LinkableFile
from zarrckpt._store._optional import OptionalRequests

T = TypeVar("T")


class Stopped(BaseException):
    """Raised in place of the process's death. Every later call to the same store raises it, too."""


class Fault(enum.Enum):
    """The way in which an operation fails."""

    FAIL = "fail"
    """Raise StorageError without doing the operation."""
    FAIL_AFTER = "fail after"
    """Do the operation, then raise StorageError, as if the response was lost."""
    STOP = "stop"
    """Raise :class:`Stopped` without doing this or any later operation."""
    STOP_AFTER = "stop after"
    """Do the operation, then raise :class:`Stopped`, also for all later operations."""
    SHORTEN = "shorten"
    """Return only the first half of the bytes that are read. Writes and listings succeed."""
    LOSE = "lose"
    """Omit the last entry of a listing, as if the listing was stale. Other operations succeed."""


FAIL, FAIL_AFTER, STOP, STOP_AFTER = Fault.FAIL, Fault.FAIL_AFTER, Fault.STOP, Fault.STOP_AFTER
SHORTEN, LOSE = Fault.SHORTEN, Fault.LOSE


@dataclass(frozen=True)
class Call:
    """One operation on a store: its number, counted from 0, its verb, and its key or listed folder.

    A key in a folder above the url begins with one ``../`` per level.
    """

    number: int
    verb: str
    key: str


Rule = Callable[[Call], Fault | None]
"""Return the fault of an operation, or None if it succeeds. Called from many threads, one at a time."""

WRITES = frozenset({"put", "reuse", "create", "replace", "delete", "sweep", "sync"})


def never(call: Call) -> Fault | None:
    """Return None: no operation fails. Use this rule to count operations."""
    return None


def at(number: int, fault: Fault) -> Rule:
    """Return a rule for the operation with this number, counted from 0."""
    return lambda call: fault if call.number == number else None


def writes(number: int, fault: Fault) -> Rule:
    """Return a rule for the operation with this number, counted from 0 over writes, deletions and syncs."""
    count = itertools.count()
    return lambda call: fault if call.verb in WRITES and next(count) == number else None


class FaultyStore(Store):
    """A store whose operations fail as a rule chooses. It can be used by many threads of one process.

    A put counts as one operation, even if it needs several requests. The same holds for a deletion of many keys, a
    sync and a listing. It has 30 methods because it wraps each operation of a store.

    Args:
        url: the local path, url or store to wrap.
        rule: the function that chooses the fault of each operation.
        storage_options: as for :func:`zarrckpt.save`.
        durable: sync written files to disk, as in :class:`zarrckpt.SaveOptions`.
    """

    def __init__(
        self,
        url: Url,
        rule: Rule = never,
        *,
        storage_options: Mapping[str, Any] | None = None,
        durable: bool = True,
    ) -> None:
        self._inner = open_store(url, storage_options=storage_options, durable=durable)
        self.url = self._inner.url
        self.is_local = self._inner.is_local
        self.is_archive = self._inner.is_archive
        self.lists_all = self._inner.lists_all
        self.max_concurrency = self._inner.max_concurrency
        self.calls: list[Call] = []
        """All operations that were called, also those that failed."""
        self._rule = rule
        self._stopped = False
        self._lock = threading.Lock()
        # In a folder they do nothing, so they do not count.
        for verb in ("begin_archive", "begin_part", "end_part", "add_parts") if self.is_archive else ():
            setattr(self, verb, partial(self._on_archive, verb))
        for name in ("close_part", "first_bytes", "record_faults"):
            setattr(self, name, getattr(self._inner, name))

    @property
    def beside_training(self) -> bool:
        return self._inner.beside_training

    @beside_training.setter
    def beside_training(self, now: bool) -> None:
        self._inner.beside_training = now

    def useful_concurrency(self) -> int:
        return min(self.max_concurrency, self._inner.useful_concurrency())

    def get(self, key: str) -> bytes:
        return self._read("get", key, lambda: self._inner.get(key))

    def get_above(self, levels: int, key: str) -> bytes:
        return self._read("get", f"{'../' * levels}{key}", lambda: self._inner.get_above(levels, key))

    def get_versioned(self, key: str) -> VersionedObject:
        return self._call("get", key, lambda: self._inner.get_versioned(key))

    def read_into(self, key: str, byte_offset: int, buffer: memoryview) -> None:
        buffer[:] = self._exactly(key, byte_offset, len(buffer))

    def read(self, key: str, byte_offset: int, nbytes: int) -> memoryview:
        return memoryview(self._exactly(key, byte_offset, nbytes))

    def put(self, key: str, buffers: Sequence[Buffer]) -> None:
        self._call("put", key, lambda: self._inner.put(key, buffers))

    def put_parts(self, key: str, groups: Callable[[], Iterable[Sequence[Buffer]]]) -> None:
        self._call("put", key, lambda: self._inner.put_parts(key, groups))

    def copies_from(self, source: Store) -> bool:
        return self._inner.copies_from(_inner_of(source))

    def copy_from(self, source: Store, source_key: str, key: str, nbytes: int, optional: OptionalRequests) -> bool:
        inner = _inner_of(source)
        return self._call("reuse", key, lambda: self._inner.copy_from(inner, source_key, key, nbytes, optional))

    def open_linkable(self, source: Store, source_key: str, key: str) -> LinkableFile | str:
        return self._inner.open_linkable(_inner_of(source), source_key, key)

    def link(self, file: LinkableFile, key: str) -> bool:
        return self._call("reuse", key, lambda: self._inner.link(file, key))

    def create(self, key: str, data: bytes) -> None:
        self._call("create", key, lambda: self._inner.create(key, data))

    def replace(self, key: str, data: bytes, version: Any) -> None:
        self._call("replace", key, lambda: self._inner.replace(key, data, version))

    def delete(self, keys: Iterable[str]) -> None:
        names = [*keys]
        self._call("delete", ", ".join(names), lambda: self._inner.delete(names))

    def sweep(self, folders: Iterable[str]) -> None:
        names = [*folders]
        self._call("sweep", ", ".join(names), lambda: self._inner.sweep(names))

    def remove_folder(self, folder: str = "") -> None:
        self._call("sweep", folder, lambda: self._inner.remove_folder(folder))

    def _on_archive(self, verb: str, *args: Any) -> Any:
        return self._call("archive", verb, lambda: getattr(self._inner, verb)(*args))

    def size(self, key: str) -> int:
        return self._call("read", key, lambda: self._inner.size(key))

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        found = self._call("list", prefix, lambda: [*self._inner.list(prefix)])
        return iter(found)

    def list_dir(self, prefix: str = "") -> Listing:
        return self._call("list", prefix, lambda: self._inner.list_dir(prefix))

    def holds(self, folder: str) -> bool:
        return self._call("list", folder, lambda: self._inner.holds(folder))

    def refuse_broken_link(self, folder: str) -> None:
        self._inner.refuse_broken_link(folder)

    def refresh(self, folder: str) -> None:
        self._inner.refresh(folder)

    def sync(self, keys: Iterable[str]) -> None:
        names = [*keys]
        self._call("sync", ", ".join(names), lambda: self._inner.sync(names))

    def failure(self, what: str, error: BaseException) -> StorageError:
        return self._inner.failure(what, error)

    # -- inside

    def _exactly(self, key: str, byte_offset: int, nbytes: int) -> bytes:
        def work() -> bytes:
            return bytes(self._inner.read(key, byte_offset, nbytes))

        data = self._read("read", key, work)
        if len(data) != nbytes:
            raise StorageError(
                f"read of {key!r} in {self.url} returned {len(data)} bytes, expected {nbytes} (injected)"
            )
        return data

    def _read(self, verb: str, key: str, work: Callable[[], bytes]) -> bytes:
        fault = self._ask(verb, key)
        data = self._do(fault, verb, key, work)
        return data[: len(data) // 2] if fault is SHORTEN else data

    def _call(self, verb: str, key: str, work: Callable[[], T]) -> T:
        fault = self._ask(verb, key)
        found = self._do(fault, verb, key, work)
        return _without_last(found) if fault is LOSE and verb == "list" else found

    def _ask(self, verb: str, key: str) -> Fault | None:
        with self._lock:
            if self._stopped:
                raise Stopped
            call = Call(len(self.calls), verb, key)
            self.calls.append(call)
            fault = self._rule(call)
            self._stopped = fault in (STOP, STOP_AFTER)
        return fault

    def _do(self, fault: Fault | None, verb: str, key: str, work: Callable[[], T]) -> T:
        if fault is STOP:
            raise Stopped
        if fault is FAIL:
            raise StorageError(f"{verb} of {key!r} in {self.url} failed (injected)")
        try:
            found = work()
        finally:
            # An error of the wrapped store, such as "not found", is a response that can be lost, too.
            if fault is STOP_AFTER:
                raise Stopped
            if fault is FAIL_AFTER:
                raise StorageError(f"the response to {verb} of {key!r} in {self.url} was lost (injected)")
        return found


def _inner_of(store: Store) -> Store:
    return store._inner if isinstance(store, FaultyStore) else store


def _without_last(found: Any) -> Any:
    """Return a listing without its last entry. A bool is returned unchanged.

    The listing is a list of objects, or a pair of objects and folders.
    """
    if isinstance(found, bool):
        return found
    if isinstance(found, tuple):
        objects, folders = found
        return (objects, folders[:-1]) if folders else (objects[:-1], folders)
    return found[:-1]
