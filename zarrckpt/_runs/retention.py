"""Delete a run's expired checkpoints in a background thread on the coordinator. No torch."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from zarrckpt._commit.contents import read_contents
from zarrckpt._commit.listings import list_below, store_below
from zarrckpt._commit.pins import list_pins
from zarrckpt._commit.removal import remove_all
from zarrckpt._errors import (
    CheckpointError,
    CheckpointPinnedError,
    CorruptCheckpointError,
    ObjectNotFoundError,
    RunTakenOverError,
    StorageError,
    log,
)
from zarrckpt._events import EventSender, OnEvent
from zarrckpt._format.documents import NODE
from zarrckpt._jobs import run_jobs
from zarrckpt._runs.folders import is_own, read_folder, step_of
from zarrckpt._runs.keep import Keep
from zarrckpt._runs.known import Deletion, KnownCheckpoints
from zarrckpt._runs.record import Ownership
from zarrckpt._store import Store, StoreSpec

_END_SECONDS = 5.0
"""Seconds for which the end of the process waits for deletions if the manager was not closed."""

_LOGGED_SECONDS = 10.0
"""Seconds for which a save waits for deletions before the wait is logged."""


class Retention:
    """The thread that deletes the expired checkpoints of a run, and the waits of saves for it.

    :class:`KnownCheckpoints` decides which checkpoints have expired. Pinned checkpoints and checkpoints that do not
    belong to this run are never deleted. Leftovers of this run's saves that did not commit are deleted after the commit
    of a later step, with and without rules.
    """

    def __init__(
        self,
        spec: StoreSpec,
        keep: Keep | None,
        ownership: Ownership,
        unpin_origin: Callable[[], None],
        on_event: OnEvent | None,
        rank: int,
    ) -> None:
        """``unpin_origin`` is called in the thread of deletions after each commit of the run."""
        self._spec = spec
        self._keep = keep
        self._ownership = ownership
        self._unpin_origin = unpin_origin
        self._on_event = on_event
        self._rank = rank
        self._known = KnownCheckpoints(keep)
        self._changed = threading.Condition()
        """The lock of all attributes, and the signal that one of them has changed."""
        self._logged: set[str] = set()
        self._skips_waits = False
        self._due = False
        """Whether a commit was recorded since the last series of deletions began."""
        self._working = False
        """Whether a series of deletions is running."""
        self._ended = False
        """Whether no further deletion may begin."""
        self._thread: threading.Thread | None = None
        _alive.add(self)

    @contextmanager
    def lock_known(self) -> Iterator[KnownCheckpoints]:
        """Hold the lock, and yield the known checkpoints. Threads that wait for a change are woken afterwards."""
        with self._changed:
            yield self._known
            self._changed.notify_all()

    def delete_after_commit(self, name: str, step: int, metadata: Mapping[str, Any]) -> None:
        """Record a commit of this job, and start the deletion of expired checkpoints in the background."""
        with self.lock_known() as known:
            known.note_commit(name, step, metadata)
            self._due = True
            if self._thread is None and not self._ended:
                self._thread = threading.Thread(target=self._work, name="zarrckpt-retention", daemon=True)
                self._thread.start()

    def wait_for_deletions(self, timeout: float) -> None:
        """Wait at most ``timeout`` seconds until a commit leaves at most 2 expired checkpoints.

        Those that are pinned or cannot be deleted do not count.
        """

        def may_save() -> bool:
            if self._ended or self._skips_waits or not (self._due or self._working):
                return True
            return self._known.needs_no_wait()

        with self._changed:
            if self._changed.wait_for(may_save, min(timeout, _LOGGED_SECONDS)):
                return
            self._log_once("saves wait", "a save waits, because deletions take longer than the time between saves")
            if not self._changed.wait_for(may_save, max(timeout - _LOGGED_SECONDS, 0)):
                self._log_once("no wait", f"deletions took more than {timeout:.0f} s. Saves begin without them")

    def skip_waits(self) -> None:
        """Let saves begin without a wait for deletions, because this process will end."""
        with self.lock_known():
            self._skips_waits = True

    def settle(self, timeout: float) -> None:
        """Wait at most ``timeout`` seconds for running deletions. No save of this job may be running."""
        with self._changed:
            self._changed.wait_for(lambda: not self._working and (self._ended or not self._due), timeout)

    def end(self, timeout: float) -> None:
        """Wait at most ``timeout`` seconds for running deletions. No deletion begins after that.

        The next job, or ``recover``, finishes an interrupted deletion.
        """
        self.settle(timeout)
        with self.lock_known():
            self._ended = True

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._due or self._ended)
                if self._ended:
                    return
                self._due, self._working = False, True
            try:
                self._delete_expired()
            except RunTakenOverError as err:
                self._log_once("taken over", f"this job deletes no more checkpoints: {_error_text(err)}")
                self._ended = True
            except Exception as err:
                # When the process ends, the next job continues the deletion.
                if not self._ended:
                    text = f"expired checkpoints could not be deleted: {_error_text(err)}"
                    self._log_once(type(err).__name__, f"{text}. The next save tries again")
            finally:
                with self.lock_known():
                    self._working = False

    def _delete_expired(self) -> None:
        """Delete all expired checkpoints, including those of commits during this call."""
        with suppress(CheckpointError):
            # If this fails, the checkpoint from which the run began stays pinned until the next commit.
            self._unpin_origin()
        with suppress(StorageError):
            self._forget_removed()
        with self.lock_known() as known:
            known.begin_series()
        while not self._ended:
            # A checkpoint that has expired stays expired if more checkpoints are found, so delete it before reading
            # more folders.
            with self.lock_known() as known:
                name = known.take_expired()
                unread = known.take_unread() if name is None else []
            if name is not None:
                if not self._try_delete(name):
                    with self.lock_known() as known:
                        known.stop_waits()  # The store may refuse all deletions.
            elif unread:
                self._read_folders(unread)
            else:
                break
        # Retry blocked deletions, and stop at the first failure, because a failing request is slow.
        while not (self._due or self._ended):
            with self.lock_known() as known:
                name = known.take_blocked()
            if name is None or not self._try_delete(name):
                break

    def _forget_removed(self) -> None:
        """Forget checkpoints that users have removed."""
        with self.lock_known() as known:
            names = known.may_be_gone()
        gone = names - {*list_below(self._spec.open()).folders} if names else ()
        with self.lock_known() as known:
            for name in gone:
                known.forget(name)

    def _try_delete(self, name: str) -> bool:
        """Delete a checkpoint or the leftovers of a save, unless it is pinned. Return False if the deletion failed."""
        # Errors of this check do not depend on the checkpoint, so they are raised.
        self._ownership.check()
        url, step = self._spec.child(name).url, step_of(name)
        events = EventSender(self._on_event, "delete", url, self._rank, step)
        try:
            with events.sending_failure():
                result = self._delete(name, events)
        except CheckpointError as err:
            result = Deletion.FAILED
            if not self._ended:
                self._log_once(name, f"{name} could not be deleted: {_error_text(err)}. Later saves try again")
        with self.lock_known() as known:
            known.note_deletion(name, result)
        return result is not Deletion.FAILED

    def _read_folders(self, names: Sequence[str]) -> None:
        store = self._spec.open()
        run_jobs((partial(self._read_folder, store, name) for name in names), store.max_concurrency)

    def _read_folder(self, store: Store, name: str) -> None:
        """Record a checkpoint of this run (if there are rules) or an unfinished save in a folder."""
        step = step_of(name)
        assert step is not None
        below = None
        # The checkpoint behind a link is outside the run's folder, so it is restored but not deleted.
        if not (store.is_local and os.path.islink(os.path.join(store.url, name))):
            try:
                # Without rules, root documents are not read, because they may be large and numerous.
                must_read = self._keep is not None or not _has_root(store, name)
                below = read_folder(store, name) if must_read else None
                if must_read and below is None and store.is_local:
                    # An interrupted removal may have left an empty folder.
                    self._spec.child(name).open().remove_folder()
            except StorageError as err:
                text = f"{name} could not be read, so it is neither counted nor deleted: {_error_text(err)}"
                self._log_once(name, text)
                return
        with self.lock_known() as known:
            known.note_read(name)
            if (
                below is not None
                and below.root is not None
                and is_own(name, below.root, (), self._ownership.record.run_id)
            ):
                known.note_found(name, step, below.root.metadata)
            elif below is not None and below.root is None and below.damage is None:
                known.note_begin(name, step)

    def _delete(self, name: str, events: EventSender) -> Deletion:
        """Delete a checkpoint or the leftovers of a save, unless it is pinned.

        A checkpoint that does not belong to this run is not deleted, only forgotten.
        """
        store = self._spec.child(name).open()
        store.on_repeat = events.send_repeat
        with self.lock_known() as known:
            was_pinned, has_begun = known.was_pinned(name), known.has_begun(name)
        if was_pinned and list_pins(store):  # checked first, because it needs fewer requests than all contents
            return Deletion.PINNED
        found = read_contents(store, allow_damaged=True)
        is_own_save = is_own(name, found.root, found.markers, self._ownership.record.run_id)
        if found.root is None:
            # A damaged checkpoint is not deleted. An interrupted removal is finished even if another process began it.
            is_own_save = found.root_bytes is None and (found.removal or is_own_save)
        if found.root is not None and has_begun and is_own_save:
            # The save has committed but the answer was lost. Now the rules decide whether it is kept.
            with self.lock_known() as known:
                known.note_found(name, step_of(name) or 0, found.root.metadata)
                self._due = True
            return Deletion.SETTLED
        if found.begun and is_own_save:
            if list_pins(store):
                return Deletion.PINNED
            try:
                objects = remove_all(store, found)
            except CheckpointPinnedError:
                return Deletion.PINNED  # It was pinned after the check.
            if found.root is None:
                log.info("deleted the leftovers of an unfinished save at %s: %d objects", store.url, objects)
            else:
                log.info("deleted %s, because no rule keeps it: %d objects", store.url, objects)
                events.send("deleted")
        elif not found.begun:
            # All objects were deleted already. On a local disk, the folder may be left.
            store.remove_folder()
        with self.lock_known() as known:
            known.forget(name)
        return Deletion.SETTLED

    def _log_once(self, key: str, text: str) -> None:
        """Log a warning, unless one with the same key has been logged."""
        if key not in self._logged:
            self._logged.add(key)
            log.warning("the run %s: %s", self._spec.url, text)


def _error_text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _has_root(store: Store, name: str) -> bool:
    """Whether a folder has a root document. One request for one byte."""
    own, prefix = store_below(store, name)
    try:
        own.read(f"{prefix}{NODE}", 0, 1)
    except ObjectNotFoundError:
        return False
    except CorruptCheckpointError:
        pass  # The document is empty.
    return True


_alive: weakref.WeakSet[Retention] = weakref.WeakSet()


def _forget_retentions() -> None:
    # The child has no deletion threads, and another thread of the parent may have held their locks during the fork.
    global _alive
    _alive = weakref.WeakSet()


os.register_at_fork(after_in_child=_forget_retentions)


def _end_deletions() -> None:
    until = time.monotonic() + _END_SECONDS
    for retention in [*_alive]:
        retention.end(max(0.0, until - time.monotonic()))


# Not atexit, because its hooks run after concurrent.futures has stopped, and deletions use concurrent.futures.
threading._register_atexit(_end_deletions)  # type: ignore[attr-defined]
