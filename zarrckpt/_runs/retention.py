"""Deletes a run's superfluous checkpoints in a background thread on the coordinator. No torch."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from zarrckpt._commit import protocol
from zarrckpt._commit.listings import list_below
from zarrckpt._commit.protocol import Leftovers
from zarrckpt._errors import (
    CheckpointError,
    CheckpointPinnedError,
    CorruptCheckpointError,
    ObjectNotFoundError,
    RunTakenOverError,
    StorageError,
    log,
)
from zarrckpt._format.documents import NODE
from zarrckpt._format.metadata import run_of
from zarrckpt._jobs import run_jobs
from zarrckpt._ops.recover import remove_found
from zarrckpt._runs.keep import Keep
from zarrckpt._runs.record import Ownership
from zarrckpt._runs.steps import is_own, look_into, step_of
from zarrckpt._store import Store, StoreSpec

_END_SECONDS = 5.0
"""How long the end of the process waits for deletions, where nobody has closed their manager."""

_READ_AT_ONCE = 64
"""Maximum number of root documents, of a few MB each, that are held at a time."""

_MOST_SUPERFLUOUS = 2
"""Maximum number of superfluous checkpoints that a commit leaves, those aside that cannot be deleted."""

_AWAITED_DELETIONS = 3
"""Deletions after which a save goes on, however many are left: one more than a commit makes necessary."""

_LOGGED_SECONDS = 10.0
"""Seconds that a save waits for deletions before this is logged."""


_Known = tuple[int, Mapping[str, Any]]
"""The step and the metadata of a checkpoint."""


class Retention:
    """What is known of a run's own checkpoints, and the thread that deletes those that no rule keeps.

    A checkpoint of another run, one without a run, and one that is pinned are never deleted. Leftovers of saves of this
    run that never committed are deleted after the commit of a later step, with and without rules.
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
        self._pinned: dict[str, None] = {}
        self._refused: dict[str, None] = {}
        """The names of those that were pinned, or could not be deleted, at the last try; the last try comes last."""
        self._logged: set[str] = set()
        self._changed = threading.Condition()
        self._awaited = 0
        """The number of deletions for which the next save waits at most."""
        self._hurried = False
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

    def committed(self, name: str, step: int, metadata: Mapping[str, Any]) -> None:
        """A save of this job has committed: what it makes superfluous is deleted from now on, in the background."""
        with self._changed:
            self._begun.pop(name, None)
            for names in (self._unread, self._spared):
                names.discard(name)
            for held_back in (self._pinned, self._refused):
                held_back.pop(name, None)
            self._own[name] = step, metadata
            self._due, self._awaited = True, _AWAITED_DELETIONS
            if self._thread is None and not self._ended:
                self._thread = threading.Thread(target=self._work, name="zarrckpt-retention", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def gone(self, name: str) -> None:
        """A checkpoint was removed otherwise."""
        with self._changed:
            for known in (self._own, self._begun, self._pinned, self._refused):
                known.pop(name, None)
            self._unread.discard(name)

    def wait_for_room(self, timeout: float) -> None:
        """Wait, at most ``timeout`` seconds, until a commit cannot leave more than 2 superfluous checkpoints.

        Those that are pinned, or cannot be deleted, do not count. If more were there before, some deletions are waited
        for at each save, so that they become fewer.
        """
        # A commit makes the oldest of the newest ones superfluous, and the worst of the best.
        added = 2 if self._keep is not None and self._keep.best else 1

        def has_room() -> bool:
            if self._ended or self._hurried or self._awaited <= 0 or not (self._due or self._working):
                return True
            waiting = {*self._superfluous()} - self._pinned.keys() - self._refused.keys()
            return len(waiting) + added <= _MOST_SUPERFLUOUS

        with self._changed:
            if self._changed.wait_for(has_room, min(timeout, _LOGGED_SECONDS)):
                return
            self._log_once("saves wait", "a save waits, since deletions take longer than the time between saves")
            if not self._changed.wait_for(has_room, max(timeout - _LOGGED_SECONDS, 0)):
                self._log_once("saves go on", f"deletions took more than {timeout:.0f} s: saves go on without them")

    def hurry_saves(self) -> None:
        """Let no save wait for deletions any more, since this process is to end."""
        with self._changed:
            self._hurried = True
            self._changed.notify_all()

    def settle(self, timeout: float) -> None:
        """Wait for deletions under way, at most so many seconds. No save of this job may be under way."""
        with self._changed:
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
                self._log_once("taken over", f"nothing is deleted any more: {_cause(err)}")
                self._ended = True
            except Exception as err:
                # If the process has ended, the next job goes on with it.
                if not self._ended:
                    text = f"superfluous checkpoints could not be deleted; the next save tries again: {_cause(err)}"
                    self._log_once(type(err).__name__, text)
            finally:
                with self._changed:
                    self._working = False
                    self._changed.notify_all()

    def _pass(self) -> None:
        """Delete all superfluous checkpoints, also those of commits that are made meanwhile."""
        with suppress(CheckpointError):
            # It stays pinned until the next time.
            self._release()
        with suppress(StorageError):
            self._forget_removed()
        tried: set[str] = set()
        looked_into: set[str] = set()
        while True:
            # What the checkpoints that are known make superfluous, all of them make superfluous.
            while (name := self._next(tried)) is not None:
                tried.add(name)
                if not self._try(name):
                    self._awaited = 0  # the store may refuse all: no save waits for that
            if not self._read(looked_into):
                break
        for name in self._held_back(tried):
            # A refused one costs much: after each commit one failure is enough.
            if self._due or self._ended or not self._try(name):
                return

    def _next(self, tried: set[str]) -> str | None:
        """The superfluous checkpoint to delete next, or None."""
        with self._changed:
            known = tried | self._pinned.keys() | self._refused.keys()
            return None if self._ended else next((name for name in self._superfluous() if name not in known), None)

    def _forget_removed(self) -> None:
        """Forget checkpoints that were removed by hand: only those that are there count for the rules."""
        with self._changed:
            known = {*self._own}
        if self._keep is not None and len(known) > self._keep.newest:
            for name in known - {*list_below(self._spec.open()).folders}:
                self.gone(name)

    def _held_back(self, tried: set[str]) -> list[str]:
        """The superfluous checkpoints that were pinned or refused: they may be so no more."""
        with self._changed:
            superfluous = {*self._superfluous()} - tried
            return [name for name in (*self._pinned, *self._refused) if name in superfluous]

    def _superfluous(self) -> list[str]:
        """The names of superfluous checkpoints and leftovers, the least step first. Called with the lock held."""
        own = {name: known for name, known in self._own.items() if name not in self._spared}
        metrics = {step: metadata for step, metadata in own.values()}
        kept: Collection[int] = metrics if self._keep is None else self._keep.reasons(metrics)
        newest = max(metrics, default=-1)
        found = [(step, name) for name, (step, _) in own.items() if step not in kept]
        found += [(step, name) for name, step in self._begun.items() if step < newest]
        return [name for _, name in sorted(found)]

    def _try(self, name: str) -> bool:
        """Delete a checkpoint, or the leftovers of a save, unless it is pinned. False if it could not be deleted."""
        # Its errors do not concern the checkpoint: the next one would meet the same.
        self._ownership.check()
        pinned, refused = False, False
        try:
            pinned = (name in self._pinned and self._is_pinned(name)) or not self._delete(name)
        except CheckpointError as err:
            refused = True
            if not self._ended:
                self._log_once(
                    name, f"{name} could not be deleted, and is tried again after later saves: {_cause(err)}"
                )
        with self._changed:
            self._pinned.pop(name, None)
            self._refused.pop(name, None)
            if pinned:
                self._pinned[name] = None
            elif refused:
                self._refused[name] = None
            else:
                self._awaited -= 1
            self._changed.notify_all()
        return not refused

    def _is_pinned(self, name: str) -> bool:
        return bool(protocol.pins(self._spec.child(name).open()))

    def _read(self, looked_into: set[str]) -> bool:
        """Look into some folders that were there when this job began. False if all of them were looked into."""
        with self._changed:
            names = sorted(self._unread - looked_into)[:_READ_AT_ONCE]
        if not names or self._ended:
            return False
        looked_into.update(names)
        store = self._spec.open()
        run_jobs((partial(self._look_into, store, name) for name in names), store.max_concurrency)
        return True

    def _look_into(self, store: Store, name: str) -> None:
        """Find out whether a folder has a checkpoint of this run, if there are rules, or a save that never finished."""
        step = step_of(name)
        assert step is not None
        # What is behind a link lies elsewhere: it is restored, and not deleted.
        if store.is_local and os.path.islink(os.path.join(store.url, name)):
            with self._changed:
                self._unread.discard(name)
            return
        try:
            # Without rules root documents need not be read, which may be large and many.
            look = self._keep is not None or not _has_root(store, name)
            below = look_into(store, name) if look else None
            if look and below is None and store.is_local:
                # A removal that was broken off right before its end has left an empty folder.
                self._spec.child(name).open().remove_folder()
        except StorageError as err:
            self._log_once(name, f"{name} could not be read, so it is neither counted nor deleted: {_cause(err)}")
            return
        with self._changed:
            self._unread.discard(name)
            if below is None:
                return
            if below.root is not None and is_own(name, below.root, self._ownership.record.run):
                self._own[name] = step, below.root.metadata
            elif below.root is None and below.damage is None:
                self._begun[name] = step

    def _delete(self, name: str) -> bool:
        """Delete a checkpoint, or the leftovers of a save. False if it is pinned. It stays if it is not of this run."""
        place = self._spec.child(name).open()
        found = protocol.leftovers(place, damaged=True)
        if found.root is not None and name in self._begun and self._is_own(found):
            # It has committed after all, and the answer was lost: the rules decide about it.
            with self._changed:
                self._own[name] = self._begun.pop(name), found.root.metadata
                self._due = True
            return True
        if found.begun and self._is_own(found):
            if protocol.pins(place):
                return False
            try:
                objects = remove_found(place, found)
            except CheckpointPinnedError:
                return False  # pinned just now
            log.info("deleted %s, which is not kept any more: %d objects", place.url, objects)
        elif not found.begun:
            # All is deleted but, of local files, the folder itself.
            place.remove_folder()
        self.gone(name)
        return True

    def _is_own(self, found: Leftovers) -> bool:
        run = self._ownership.record.run
        if found.root is not None:
            # Its root document alone may be that of a copy, which no save of the run has made.
            saves = [marker for marker in found.markers if marker.save_id == found.root.save_id]
            return run_of(found.root.metadata) == run and all(marker.run == run for marker in saves)
        # A removal that was broken off is gone on with, whoever began it; a claim without a marker is no one's, and
        # nothing was written under it.
        return found.root_bytes is None and (found.removal or all(marker.run == run for marker in found.markers))

    def _log_once(self, key: str, text: str) -> None:
        """Log a warning, unless one with the same key was logged."""
        if key not in self._logged:
            self._logged.add(key)
            log.warning("the run %s: %s", self._spec.url, text)


def _cause(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _has_root(store: Store, name: str) -> bool:
    """Whether a root document is in a folder. One request of a byte."""
    try:
        store.read(f"{name}/{NODE}", 0, 1)
    except ObjectNotFoundError:
        return False
    except CorruptCheckpointError:
        pass  # an empty document
    return True


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
