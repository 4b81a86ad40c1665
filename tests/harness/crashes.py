"""Shared parts of tests of crashes: small states, places to save to, and checks of a place afterwards."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

import zarrckpt
from harness.faulty_store import FAIL, FaultyStore, Rule, Stopped
from harness.internals import Store, open_store
from harness.one_at_a_time import Shelf, running

SAVING = zarrckpt.SaveOptions(max_chunk_bytes=48, concurrency=1)
"""Options of saves here: two chunks of "w", and one thread, so that operations run in one order."""


def state(value: int) -> dict[str, Any]:
    """Return a small state that shows its save: tensors, one in two chunks, a value, a blob, nested groups.

    Only "deep.b" never changes, so that a save with a base reuses it.
    """
    return {
        "w": torch.arange(24, dtype=torch.float32).reshape(6, 4) + 100 * value,
        "deep": {"b": torch.full((3,), 7, dtype=torch.bfloat16), "er": {"n": torch.tensor(value)}},
        "step": value,
        "blob": b"%d" % value * 3,
    }


@dataclass
class Place:
    """A url or a ready store to which checkpoints are saved, with its options."""

    url: Any
    storage_options: dict[str, Any] | None = None
    durable: bool = field(default=True, kw_only=True)

    @property
    def options(self) -> dict[str, Any]:
        """The arguments for any function of the package."""
        return {"url": self.url, "storage_options": self.storage_options}

    def save(self, value: int, *, overwrite: bool = False, reuse: bool = False) -> zarrckpt.SaveReport:
        """Save :func:`state` of a value, which is the number of the save as well.

        With ``reuse``, an overwrite reuses chunks of the checkpoint that it replaces.
        """
        running.number = value
        options = replace(SAVING, durable=self.durable, reuse="on" if reuse else "auto")
        base = self.url if reuse and overwrite else None
        return zarrckpt.save(state(value), **self.options, overwrite=overwrite, base=base, options=options)

    def faulty(self, rule: Rule) -> FaultyStore:
        """Return a store that fails at this place."""
        store = FaultyStore(rule=rule, **self.options, durable=self.durable)
        store.max_concurrency = 1
        return store

    def opened(self) -> Store:
        """Return the store without faults."""
        return open_store(**self.options, durable=False)

    def keys(self) -> set[str]:
        """Return the keys of all objects."""
        return {info.key for info in self.opened().list()}

    def objects(self) -> dict[str, bytes]:
        """Return all objects."""
        store = self.opened()
        return {info.key: store.get(info.key) for info in store.list()}

    def fill(self, objects: Mapping[str, bytes]) -> Place:
        """Store objects unchanged."""
        if isinstance(self.url, str) and "://" not in self.url:
            for key, data in objects.items():
                path = Path(self.url, key)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
        else:
            store = self.opened()
            with ThreadPoolExecutor(4) as pool:
                for _ in pool.map(lambda item: store.put(item[0], [item[1]]), objects.items()):
                    pass
        return self


def in_memory() -> Place:
    """Return an empty place in this process's memory."""
    return Place(Shelf({}).store)


def undeletable(url: str | Path) -> FaultyStore:
    """Return a store that deletes nothing. A save warns, and the replaced objects stay."""
    return FaultyStore(url, lambda call: FAIL if call.verb == "delete" else None)


def held(place: Place) -> int | None:
    """Return the value of the state that opens, None if none is committed. Check every value and byte."""
    try:
        checkpoint = zarrckpt.open(**place.options)
    except zarrckpt.CheckpointNotFoundError:
        return None
    value: int = checkpoint["step"]
    expected, arrays = state(value), checkpoint.read()
    assert np.array_equal(arrays["w"], expected["w"].numpy())
    assert (arrays["deep.b"].astype("f4") == 7).all() and arrays["deep.b"].shape == (3,)
    assert arrays["deep.er.n"] == value and checkpoint["blob"] == expected["blob"] and len(checkpoint) == 5
    checkpoint.verify().raise_if_damaged()
    return value


@cache
def _clean() -> tuple[frozenset[str], frozenset[str]]:
    """Return the keys that one clean save leaves at an empty place: below "@zarrckpt", with "ID" for its id, and
    others.
    """
    place = in_memory()
    own = f"@zarrckpt/{place.save(0).save_id}/"
    reserved = {key for key in place.keys() if key.startswith("@zarrckpt/")}  # noqa: SIM118 - it is no mapping
    tree = frozenset(place.keys() - reserved - {"zarr.json"})
    return frozenset(key.replace(own, "@zarrckpt/ID/") for key in reserved), tree


def needed(place: Place) -> set[str]:
    """Return exactly the keys of the committed checkpoint, derived from one clean save to an empty place."""
    checkpoint, (reserved, tree) = zarrckpt.open(**place.options), _clean()
    keys = {key.replace("/ID/", f"/{checkpoint.save_id}/") for key in reserved} | {"zarr.json"}
    if not checkpoint.info.tree:
        return keys | tree
    return keys | {f"{checkpoint.info.tree}/{key}" for key in (*tree, "zarr.json")}


def all_files(folder: str | os.PathLike[str]) -> tuple[set[str], set[str]]:
    """Return every file below a folder, including hidden ones, and every empty folder."""
    files, empty = set(), set()
    for path in Path(folder).rglob("*"):
        if path.is_dir():
            empty |= set() if any(path.iterdir()) else {str(path.relative_to(folder))}
        else:
            files.add(str(path.relative_to(folder)))
    return files, empty


def crashed(action: Callable[[], object]) -> BaseException | None:
    """Run an action that may fail, and return its error. Raise errors other than the package's and stops."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            action()
        except (zarrckpt.CheckpointError, Stopped) as err:
            return err
    return None


def next_save_is_whole(place: Place, value: int = 9) -> None:
    """Check that the next save commits, and that :func:`zarrckpt.recover` leaves only its checkpoint."""
    place.save(value, overwrite=True)
    zarrckpt.recover(**place.options, stopped=True)
    assert held(place) == value
    assert place.keys() == needed(place)
    if isinstance(place.url, str) and os.path.isdir(place.url):
        assert all_files(place.url) == (needed(place), set())


# -- system calls


class InLine:
    """An executor without threads: calls run in one order."""

    def __init__(self, *args: object) -> None:
        pass

    def __enter__(self) -> InLine:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def submit(self, work: Callable[..., Any], *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(work(*args))
        except BaseException as err:
            future.set_exception(err)
        return future

    map = staticmethod(map)


@dataclass(frozen=True)
class Event:
    """One system call that changes the disk, or an fsync. ``source`` is the source of a link or a rename."""

    verb: str
    path: str
    source: str = ""


class Disk:
    """Replaces ``os`` in the modules of local files. Records changes of the disk, and stops at one of these calls.

    Args:
        stop_at: the number of the first call, counted from 0, that is not made. No later change is made either.
        half: a write with that number first writes half of its bytes.
        short: every write accepts only half of its bytes, without an error.
    """

    def __init__(self, stop_at: int | None = None, *, half: bool = False, short: bool = False) -> None:
        self.events: list[Event] = []
        """In the order in which changes began and fsyncs ended."""
        self.changes = 0
        self.stopped = False
        self._stop_at, self._half, self._short = stop_at, half, short
        self._paths: dict[int, str] = {}
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def open(self, path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_CREAT and not os.path.lexists(path):
            self._change("open", path)
        file = os.open(path, flags, mode)
        with self._lock:
            self._paths[file] = path
        return file

    def writev(self, file: int, buffers: Sequence[memoryview]) -> int:
        return self._write(file, buffers, lambda parts: os.writev(file, parts))

    def pwritev(self, file: int, buffers: Sequence[memoryview], byte_offset: int) -> int:
        return self._write(file, buffers, lambda parts: os.pwritev(file, parts, byte_offset))

    def _write(
        self, file: int, buffers: Sequence[memoryview], write: Callable[[Sequence[bytes | memoryview]], int]
    ) -> int:
        data = b"".join(buffers)
        half = [data[: (len(data) + 1) // 2]]
        try:
            self._change("write", self._paths[file])
        except Stopped:
            if self._half and self.changes == self._stop_at:
                self._half = False
                write(half)
            raise
        return write(half if self._short else buffers)

    def copy_file_range(self, source: int, target: int, *numbers: int) -> int:
        self._change("write", self._paths[target], self._paths[source])
        return os.copy_file_range(source, target, *numbers)

    def ftruncate(self, file: int, nbytes: int) -> None:
        self._change("truncate", self._paths[file])
        os.ftruncate(file, nbytes)

    def fsync(self, file: int) -> None:
        """Record the call, and do not wait for the disk: no test cuts the power."""
        if self.stopped:
            raise Stopped
        with self._lock:
            self.events.append(Event("fsync", self._paths[file]))

    def link(self, source: str, path: str, *, follow_symlinks: bool = True) -> None:
        self._change("link", path, source)
        os.link(source, path, follow_symlinks=follow_symlinks)

    def replace(self, source: str, path: str) -> None:
        self._change("replace", path, source)
        os.replace(source, path)

    def unlink(self, path: str) -> None:
        if os.path.lexists(path):
            self._change("unlink", path)
        os.unlink(path)

    def rmdir(self, path: str) -> None:
        if os.path.isdir(path) and not os.listdir(path):
            self._change("rmdir", path)
        os.rmdir(path)

    def mkdir(self, path: str) -> None:
        if not os.path.lexists(path):
            self._change("mkdir", path)
        os.mkdir(path)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        parent = os.path.dirname(path)
        if parent and not os.path.exists(parent):
            self.makedirs(parent, exist_ok=True)
        if not os.path.lexists(path):
            self._change("mkdir", path)
        os.makedirs(path, exist_ok=exist_ok)

    def _change(self, verb: str, path: str, source: str = "") -> None:
        with self._lock:
            self.stopped = self.stopped or self.changes == self._stop_at
            if self.stopped:
                raise Stopped
            self.changes += 1
            self.events.append(Event(verb, path, source))
