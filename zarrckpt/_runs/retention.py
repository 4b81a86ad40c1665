"""Deletes what a run keeps no longer, in a thread of the coordinator. No torch."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from zarrckpt._commit import protocol
from zarrckpt._commit.protocol import Leftovers
from zarrckpt._errors import CheckpointError, CheckpointPinnedError, RunTakenOverError, StorageError, log
from zarrckpt._format.metadata import run_of
from zarrckpt._jobs import run_jobs
from zarrckpt._ops.recover import remove_found
from zarrckpt._runs.keep import Keep
from zarrckpt._runs.record import Ownership
from zarrckpt._runs.steps import is_own, look_into, step_of
from zarrckpt._store import StoreSpec

_END_SECONDS = 5.0
"""How long the end of the process waits for deletions, where nobody has closed their manager."""

_READ_AT_ONCE = 64
"""So many root documents, of a few MB each, are held at a time."""


_Known = tuple[int, Mapping[str, Any]]
"""The step and the metadata of a checkpoint."""


class Retention:
    """What is known of a run's own checkpoints, and the thread that deletes those that no rule keeps.

    A checkpoint of another run, one without a run, and one that is pinned are never deleted. What saves of this run
    have left that never committed goes when a later step is committed.
    """

    def __init__(self, spec: StoreSpec, keep: Keep | None, ownership: Ownership, release: Callable[[], None]) -> None:
        """``release``: called, in the thread, once the run has a checkpoint of its own."""
        self._spec = spec
        self._keep = keep
        self._ownership = ownership
        self._release = release
        self._unread: set[str] = set()
        self._own: dict[str, _Known] = {}
        """The step and the metadata of the run's committed checkpoints, by name."""
        self._begun: dict[str, int] = {}
        """The steps of saves that have not committed, by name."""
        self._spared: set[str] = set()
        """The names of damaged checkpoints, which nobody counts, and nobody deletes."""
        self._said: set[str] = set()
        self._changed = threading.Condition()
        self._saving = False
        self._due = False
        self._working = False
        self._ended = False
        self._thread: threading.Thread | None = None
        _alive.add(self)

    def found(self, names: Iterable[str]) -> None:
        """The folders of steps that are there when this job begins: they are looked into after the next commit."""
        with self._changed:
            self._unread |= {*names} - self._own.keys()

    def spare(self, names: Iterable[str]) -> None:
        """Leave these damaged checkpoints alone: they count for no rule."""
        with self._changed:
            self._spared |= {*names}

    def knows_metric(self, name: str) -> bool:
        """Whether a checkpoint of the run that was looked into has a metric of this name."""
        with self._changed:
            return any(name in metadata for _, metadata in self._own.values())

    def begun(self, name: str, step: int) -> None:
        """A save of this job begins."""
        with self._changed:
            self._begun[name] = step
            self._saving = True

    def committed(self, name: str, step: int, metadata: Mapping[str, Any]) -> None:
        """A save of this job has committed: what it makes superfluous is deleted from now on, in the background."""
        with self._changed:
            self._begun.pop(name, None)
            self._unread.discard(name)
            self._spared.discard(name)
            self._own[name] = step, metadata
            self._saving, self._due = False, True
            if self._thread is None and not self._ended:
                self._thread = threading.Thread(target=self._work, name="zarrckpt-retention", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def gone(self, name: str) -> None:
        """A checkpoint was removed otherwise."""
        with self._changed:
            self._own.pop(name, None)
            self._begun.pop(name, None)
            self._unread.discard(name)

    def settle(self, timeout: float) -> None:
        """Wait for deletions under way, at most so many seconds. No save of this job may be under way."""
        with self._changed:
            self._saving = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._working and (self._ended or not self._due), timeout)

    def end(self, timeout: float) -> None:
        """Wait for deletions under way, at most so many seconds; none is begun after that.

        One that is broken off is finished by the next job, or by ``recover``.
        """
        self.settle(timeout)
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._due or self._ended)
                if self._ended:
                    return
                self._due, self._working = False, True
            try:
                self._pass()
            except RunTakenOverError as err:
                self._say("nothing is deleted any more", err)
                self._ended = True
            except Exception as err:
                # Where the process has ended it nothing is wrong: the next job goes on with it.
                if not self._ended:
                    self._say("what is not kept any more could not be deleted; the next save tries again", err)
            finally:
                with self._changed:
                    self._working = False
                    self._changed.notify_all()

    def _pass(self) -> None:
        self._read()
        with self._changed:
            own = {name: known for name, known in self._own.items() if name not in self._spared}
            begun = dict(self._begun)
        with suppress(CheckpointError):
            # It stays pinned until the next time.
            self._release()
        if self._keep is not None and len(own) > self._keep.newest:
            own = self._still_there(own)
        kept = None if self._keep is None else self._keep.reasons({step: metadata for step, metadata in own.values()})
        newest = max((step for step, _ in own.values()), default=-1)
        unfinished = [(step, name) for name, step in begun.items() if step < newest]
        superfluous = [(step, name) for name, (step, _) in own.items() if kept is not None and step not in kept]
        for place, (_, name) in enumerate(sorted(unfinished + superfluous)):
            if place:
                # One after each commit, so that they are never more and more; others only while no save is under way.
                with self._changed:
                    self._changed.wait_for(lambda: self._ended or not self._saving)
            if self._ended:
                return
            try:
                self._delete(name)
            except (RunTakenOverError, StorageError):
                raise  # the next one would meet the same
            except CheckpointError as err:
                self._say(f"{name} could not be deleted", err)

    def _still_there(self, own: dict[str, _Known]) -> dict[str, _Known]:
        """Return those that were not removed by hand: only checkpoints that are there count for the rules."""
        there = {*self._spec.open().list_dir()[1]}
        for name in own.keys() - there:
            self.gone(name)
        return {name: known for name, known in own.items() if name in there}

    def _read(self) -> None:
        """Look into the folders that were there: which are checkpoints of this run, and which were never finished."""
        with self._changed:
            unread = sorted(self._unread)
        for start in range(0, len(unread), _READ_AT_ONCE):
            names = unread[start : start + _READ_AT_ONCE]
            store = self._spec.open()
            looked = run_jobs((partial(look_into, store, name) for name in names), store.max_concurrency)
            found = [below for below in looked if below is not None]
            for below in found:
                step = step_of(below.name)
                assert step is not None
                # What is behind a link lies elsewhere: it is restored, and not deleted.
                linked = store.is_local and os.path.islink(os.path.join(store.url, below.name))
                with self._changed:
                    if linked:
                        continue
                    if below.root is not None and is_own(below.name, below.root, self._ownership.record.run):
                        self._own[below.name] = step, below.root.metadata
                    elif below.root is None and below.damage is None:
                        self._begun[below.name] = step
            if store.is_local:
                # A removal that was broken off right before its end has left an empty folder.
                for name in {*names} - {below.name for below in found}:
                    self._spec.child(name).open().remove_folder()
            with self._changed:
                self._unread -= {*names}
            if self._ended:
                return

    def _delete(self, name: str) -> None:
        """Delete a checkpoint, or what is left of a save. It stays where it is pinned, or not of this run."""
        self._ownership.check()
        place = self._spec.child(name).open()
        found = protocol.leftovers(place, damaged=True)
        if found.root is not None and name in self._begun and self._is_own(found):
            # It has committed after all, and the answer was lost: the next pass counts it.
            with self._changed:
                self._own[name] = self._begun.pop(name), found.root.metadata
                self._due = True
            return
        if found.begun and self._is_own(found):
            if protocol.pins(place):
                return
            try:
                objects = remove_found(place, found)
            except CheckpointPinnedError:
                return  # pinned just now
            log.info("deleted %s, which is not kept any more: %d objects", place.url, objects)
        elif not found.begun:
            # All is deleted but, of local files, the folder itself.
            place.remove_folder()
        self.gone(name)

    def _is_own(self, found: Leftovers) -> bool:
        run = self._ownership.record.run
        if found.root is not None:
            # Its root document alone may be that of a copy, which no save of the run has made.
            saves = [marker for marker in found.markers if marker.save_id == found.root.save_id]
            return run_of(found.root.metadata) == run and all(marker.run == run for marker in saves)
        # A removal that was broken off is gone on with, whoever began it; a claim without a marker is no one's, and
        # nothing was written under it.
        return found.root_bytes is None and (found.removal or all(marker.run == run for marker in found.markers))

    def _say(self, what: str, error: Exception) -> None:
        """Log a failure, the first of its kind."""
        kind = type(error).__name__
        if kind not in self._said:
            self._said.add(kind)
            log.warning("the run %s: %s: %s: %s", self._spec.url, what, kind, error)


_alive: weakref.WeakSet[Retention] = weakref.WeakSet()


def _forget_retentions() -> None:
    # The child has no deletions, and another thread may have held their locks when it was forked.
    global _alive
    _alive = weakref.WeakSet()


os.register_at_fork(after_in_child=_forget_retentions)


def _end_deletions() -> None:
    until = time.monotonic() + _END_SECONDS
    for retention in [*_alive]:
        retention.end(max(0.0, until - time.monotonic()))


# Not atexit: that comes after concurrent.futures has stopped taking jobs, and a deletion has some to give.
threading._register_atexit(_end_deletions)  # type: ignore[attr-defined]
