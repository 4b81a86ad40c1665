"""Shared parts of tests of CheckpointManager: managers that clean up after themselves, and watched stores."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import zarrckpt
from harness.crashes import SAVING, Place, held, state
from harness.faulty_store import STOP, STOP_AFTER, Call, Fault, FaultyStore
from harness.internals import Store, StoreSpec
from zarrckpt._store._zip import ZipStore

RUN = "@run/zarr.json"
OPTIONS = zarrckpt.SaveOptions(max_chunk_bytes=SAVING.max_chunk_bytes, concurrency=1, durable=False)


saved_format: Any = "folder"
"""The format of managers' checkpoints. Tests that use the fixture ``each_format`` run with each of both."""


def manager(url: Any, **arguments: Any) -> zarrckpt.CheckpointManager:
    """Return a manager that by default handles no signal, saves in the foreground, and syncs nothing."""
    defaults = {"signals": (), "background": False, "options": OPTIONS, "format": saved_format}
    return zarrckpt.CheckpointManager(url, **{**defaults, **arguments})


def name(step: int) -> str:
    """Return the name of a step's folder or archive."""
    return f"step-{step:08d}" + (".zarr.zip" if saved_format == "zip" else "")


def folders(run: Path) -> set[str]:
    """Return the names of the checkpoints and of unfinished saves in a run's folder."""
    # "@" and the name of an archive is the folder of its pins and of unfinished saves to it.
    return {path.name.removeprefix("@") for path in run.iterdir()} - {"run"}


def restored(run: zarrckpt.CheckpointManager, **arguments: Any) -> int | None:
    """Restore and return the step. Check that the state is the one that was saved at that step."""
    target = state(0)
    target["deep"]["b"].zero_()
    step = run.restore(target, **arguments)
    expected = state(step or 0)
    if step is None:
        expected["deep"]["b"].zero_()
    assert torch.equal(target["w"], expected["w"]) and torch.equal(target["deep"]["b"], expected["deep"]["b"])
    assert torch.equal(target["deep"]["er"]["n"], expected["deep"]["er"]["n"])
    assert (target["step"], target["blob"]) == (expected["step"], expected["blob"])
    return step


def sound(run: Path) -> list[int]:
    """Return the steps of a run's folders in which every byte is as saved, without use of the manager."""
    steps = {name: int(name.removeprefix("step-").removesuffix(".zarr.zip")) for name in folders(run)}
    found = [(step, held(Place(str(run / name)))) for name, step in steps.items()]
    assert all(value in (None, step) for step, value in found)
    return sorted(step for step, value in found if value is not None)


def damage_root(folder: Path) -> None:
    """Cut the root document."""
    path = folder if folder.is_file() else folder / "zarr.json"
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


def damage_chunk(folder: Path) -> None:
    """Flip a bit of a chunk of "w"."""
    path = folder if folder.is_file() else next(folder.rglob("w/c.0.0"))
    data = bytearray(path.read_bytes())
    # In an archive, the chunk begins at the first multiple of 64 bytes after its name.
    place = (data.index(b"w/c.0.0") // 64 + 1) * 64 if folder.is_file() else 0
    data[place + 5] ^= 1
    path.write_bytes(data)


def run_id(folder: Path) -> str:
    """Return the id of the run in a checkpoint's metadata."""
    found: str = zarrckpt.open(folder).metadata["zarrckpt.run"]["id"]
    return found


class Watched:
    """All operations on the stores below a url, with keys relative to it. A rule decides their faults."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.calls: list[tuple[str, str]] = []
        self.rule: Callable[[Call], Fault | None] = lambda _: None
        self._life = 0
        self._stopped = False
        self._lock = threading.Lock()

    def begin_anew(self) -> None:
        """Treat the current jobs as dead: stores that are open make no further operations."""
        with self._lock:
            self._life += 1
            self._stopped = False
            self.calls = []
            self.rule = lambda _: None

    def stand_before(self, store: Store) -> FaultyStore:
        """Return a store that calls the rule before each operation."""
        life, below = self._life, store.url[len(self.url) :].strip("/")

        def ask(call: Call) -> Fault | None:
            with self._lock:
                if self._stopped or life != self._life:
                    return STOP
                known = Call(len(self.calls), call.verb, f"{below}/{call.key}".strip("/"))
                self.calls.append((known.verb, known.key))
            fault = self.rule(known)
            self._stopped |= fault in (STOP, STOP_AFTER)
            return fault

        watched = FaultyStore(store, ask)
        watched.max_concurrency = 1
        return watched


@contextmanager
def watched(url: Any) -> Iterator[Watched]:
    """Watch all stores below a url that are opened from now on."""
    watch, make = Watched(str(url)), StoreSpec._make

    def made(spec: StoreSpec) -> Store:
        store = make(spec)
        # A ready store is already watched.
        if isinstance(store, ZipStore):  # Only one of the archive and its folder is watched.
            store._parent = getattr(store._parent, "_inner", store._parent)
        return store if spec._store is not None or not store.url.startswith(watch.url) else watch.stand_before(store)

    with patch.object(StoreSpec, "_make", made):
        yield watch
