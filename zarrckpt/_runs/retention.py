"""Delete a run's superfluous checkpoints in a background thread on the coordinator. No torch."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from zarrckpt._commit.contents import UrlContents, read_contents
from zarrckpt._commit.listings import list_below
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
from zarrckpt._format.documents import NODE
from zarrckpt._format.metadata import run_of
from zarrckpt._jobs import run_jobs
from zarrckpt._runs.keep import Keep
from zarrckpt._runs.record import Ownership
from zarrckpt._runs.steps import is_own, read_folder, step_of
from zarrckpt._store import Store, StoreSpec

_END_SECONDS = 5.0
"""Seconds for which the end of the process waits for deletions if the manager was not closed."""

_ROOTS_READ_AT_ONCE = 64
"""Maximum number of root documents, of a few MB each, in memory at a time."""

_MAX_SUPERFLUOUS = 2
"""Maximum number of superfluous checkpoints after a commit, without those that cannot be deleted."""

_AWAITED_DELETIONS = 3
"""Maximum number of deletions for which a save waits: one more than a commit makes necessary."""

_LOGGED_SECONDS = 10.0
"""Seconds for which a save waits for deletions before the wait is logged."""


_Known = tuple[int, Mapping[str, Any]]
"""The step and the metadata of a checkpoint."""


class Retention:
    """The known checkpoints of a run, and the thread that deletes those that no rule keeps.

    Pinned checkpoints and checkpoints that do not belong to this run are never deleted. Leftovers of this run's saves
    that did not commit are deleted after the commit of a later step, with and without rules.
    """

    def __init__(
        self, spec: StoreSpec, keep: Keep | None, ownership: Ownership, unpin_source: Callable[[], None]
    ) -> None:
        """``unpin_source`` is called in the thread after each commit of the run."""
        self._spec = spec
        self._keep = keep
        self._ownership = ownership
        self._unpin_source = unpin_source
        self._unread: set[str] = set()
        self._own: dict[str, _Known] = {}
        """The step and the metadata of the run's committed checkpoints, by name."""
        self._begun: dict[str, int] = {}
        """The steps of saves that have not committed, by name."""
        self._ignored: set[str] = set()
        """The names of damaged checkpoints. They do not count for the rules and are not deleted."""
        self._pinned: dict[str, None] = {}
        """The names of checkpoints that were pinned at the last try to delete them, the latest try last."""
        self._refused: dict[str, None] = {}
        """The names of checkpoints whose deletion failed at the last try, the latest try last."""
        self._logged: set[str] = set()
        self._changed = threading.Condition()
        self._awaited = 0
        """The maximum number of deletions for which the next save waits."""
        self._skips_waits = False
        self._due = False
        self._working = False
        self._ended = False
        self._thread: threading.Thread | None = None
        _alive.add(self)

    def note_folders(self, names: Iterable[str]) -> None:
        """Record the folders of steps that exist when this job begins. They are read after the next commit."""
        with self._changed:
            self._unread |= {*names} - self._own.keys()

    def ignore(self, names: Iterable[str]) -> None:
        """Exclude these damaged checkpoints from the rules and from deletion."""
        with self._changed:
            self._ignored |= {*names}

    def knows_metric(self, name: str) -> bool:
        """Whether a known checkpoint of the run has a metric of this name."""
        with self._changed:
            return any(name in metadata for _, metadata in self._own.values())

    def note_begin(self, name: str, step: int) -> None:
        """Record that a save of this job begins."""
        with self._changed:
            self._begun[name] = step

    def note_commit(self, name: str, step: int, metadata: Mapping[str, Any]) -> None:
        """Record a commit of this job, and start the deletion of superfluous checkpoints in the background."""
        with self._changed:
            self._begun.pop(name, None)
            for names in (self._unread, self._ignored):
                names.discard(name)
            for held_back in (self._pinned, self._refused):
                held_back.pop(name, None)
            self._own[name] = step, metadata
            self._due, self._awaited = True, _AWAITED_DELETIONS
            if self._thread is None and not self._ended:
                self._thread = threading.Thread(target=self._work, name="zarrckpt-retention", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def forget(self, name: str) -> None:
        """Forget a checkpoint that was removed."""
        with self._changed:
            for known in (self._own, self._begun, self._pinned, self._refused):
                known.pop(name, None)
            self._unread.discard(name)

    def wait_for_deletions(self, timeout: float) -> None:
        """Wait at most ``timeout`` seconds until a commit leaves at most 2 superfluous checkpoints.

        Those that are pinned or cannot be deleted do not count. If there were more of them before, each save waits for
        some deletions, so that their number falls.
        """
        # A commit makes the oldest of the newest checkpoints superfluous, and the worst of the best ones.
        added = 2 if self._keep is not None and self._keep.best else 1

        def may_save() -> bool:
            if self._ended or self._skips_waits or self._awaited <= 0 or not (self._due or self._working):
                return True
            waiting = {*self._superfluous()} - self._pinned.keys() - self._refused.keys()
            return len(waiting) + added <= _MAX_SUPERFLUOUS

        with self._changed:
            if self._changed.wait_for(may_save, min(timeout, _LOGGED_SECONDS)):
                return
            self._log_once("saves wait", "a save waits, because deletions take longer than the time between saves")
            if not self._changed.wait_for(may_save, max(timeout - _LOGGED_SECONDS, 0)):
                self._log_once("no wait", f"deletions took more than {timeout:.0f} s. Saves begin without them")

    def skip_waits(self) -> None:
        """Let saves begin without a wait for deletions, because this process will end."""
        with self._changed:
            self._skips_waits = True
            self._changed.notify_all()

    def settle(self, timeout: float) -> None:
        """Wait at most ``timeout`` seconds for running deletions. No save of this job may be running."""
        with self._changed:
            self._changed.wait_for(lambda: not self._working and (self._ended or not self._due), timeout)

    def end(self, timeout: float) -> None:
        """Wait at most ``timeout`` seconds for running deletions. No deletion begins after that.

        The next job, or ``recover``, finishes an interrupted deletion.
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
                self._delete_superfluous()
            except RunTakenOverError as err:
                self._log_once("taken over", f"this job deletes no more checkpoints: {_error_text(err)}")
                self._ended = True
            except Exception as err:
                # When the process ends, the next job continues the deletion.
                if not self._ended:
                    text = f"superfluous checkpoints could not be deleted: {_error_text(err)}"
                    self._log_once(type(err).__name__, f"{text}. The next save tries again")
            finally:
                with self._changed:
                    self._working = False
                    self._changed.notify_all()

    def _delete_superfluous(self) -> None:
        """Delete all superfluous checkpoints, including those of commits during this call."""
        with suppress(CheckpointError):
            # If this fails, the source stays pinned until the next commit.
            self._unpin_source()
        with suppress(StorageError):
            self._forget_removed()
        tried: set[str] = set()
        read: set[str] = set()
        while True:
            # A checkpoint that is superfluous among the known ones is also superfluous among all.
            while (name := self._next(tried)) is not None:
                tried.add(name)
                if not self._try_delete(name):
                    self._awaited = 0  # The store may refuse all deletions, so saves do not wait.
            if not self._read_folders(read):
                break
        for name in self._held_back(tried):
            # A failed deletion is slow, so one failure after each commit is enough.
            if self._due or self._ended or not self._try_delete(name):
                return

    def _next(self, tried: set[str]) -> str | None:
        """The superfluous checkpoint to delete next, or None."""
        with self._changed:
            known = tried | self._pinned.keys() | self._refused.keys()
            return None if self._ended else next((name for name in self._superfluous() if name not in known), None)

    def _forget_removed(self) -> None:
        """Forget checkpoints that users have removed. Only existing ones count for the rules."""
        with self._changed:
            known = {*self._own}
        if self._keep is not None and len(known) > self._keep.newest:
            for name in known - {*list_below(self._spec.open()).folders}:
                self.forget(name)

    def _held_back(self, tried: set[str]) -> list[str]:
        """Return the superfluous checkpoints that were pinned or refused, to try them again."""
        with self._changed:
            superfluous = {*self._superfluous()} - tried
            return [name for name in (*self._pinned, *self._refused) if name in superfluous]

    def _superfluous(self) -> list[str]:
        """Return the names of superfluous checkpoints and leftovers, by ascending step. Call it with the lock held."""
        own = {name: known for name, known in self._own.items() if name not in self._ignored}
        metrics = {step: metadata for step, metadata in own.values()}
        kept: Collection[int] = metrics if self._keep is None else self._keep.reasons(metrics)
        newest = max(metrics, default=-1)
        found = [(step, name) for name, (step, _) in own.items() if step not in kept]
        found += [(step, name) for name, step in self._begun.items() if step < newest]
        return [name for _, name in sorted(found)]

    def _try_delete(self, name: str) -> bool:
        """Delete a checkpoint or the leftovers of a save, unless it is pinned. Return False if the deletion failed."""
        # Errors of this check do not depend on the checkpoint, so they are raised.
        self._ownership.check()
        pinned, refused = False, False
        try:
            pinned = (name in self._pinned and self._is_pinned(name)) or not self._delete(name)
        except CheckpointError as err:
            refused = True
            if not self._ended:
                self._log_once(name, f"{name} could not be deleted: {_error_text(err)}. Later saves try again")
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
        return bool(list_pins(self._spec.child(name).open()))

    def _read_folders(self, read: set[str]) -> bool:
        """Read some of the folders that existed when this job began. Return False if all of them were read."""
        with self._changed:
            names = sorted(self._unread - read)[:_ROOTS_READ_AT_ONCE]
        if not names or self._ended:
            return False
        read.update(names)
        store = self._spec.open()
        run_jobs((partial(self._read_folder, store, name) for name in names), store.max_concurrency)
        return True

    def _read_folder(self, store: Store, name: str) -> None:
        """Record a checkpoint of this run (if there are rules) or an unfinished save in a folder."""
        step = step_of(name)
        assert step is not None
        # The checkpoint behind a link is outside the run's folder, so it is restored but not deleted.
        if store.is_local and os.path.islink(os.path.join(store.url, name)):
            with self._changed:
                self._unread.discard(name)
            return
        try:
            # Without rules, root documents are not read, because they may be large and numerous.
            must_read = self._keep is not None or not _has_root(store, name)
            below = read_folder(store, name) if must_read else None
            if must_read and below is None and store.is_local:
                # An interrupted removal may have left an empty folder.
                self._spec.child(name).open().remove_folder()
        except StorageError as err:
            self._log_once(name, f"{name} could not be read, so it is neither counted nor deleted: {_error_text(err)}")
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
        """Delete a checkpoint or the leftovers of a save. Return False if it is pinned.

        A checkpoint that does not belong to this run is not deleted, only forgotten.
        """
        store = self._spec.child(name).open()
        found = read_contents(store, damaged=True)
        if found.root is not None and name in self._begun and self._is_own(found):
            # The save has committed but the answer was lost. Now the rules decide whether it is kept.
            with self._changed:
                self._own[name] = self._begun.pop(name), found.root.metadata
                self._due = True
            return True
        if found.begun and self._is_own(found):
            if list_pins(store):
                return False
            try:
                objects = remove_all(store, found)
            except CheckpointPinnedError:
                return False  # It was pinned after the check.
            log.info("deleted %s, because no rule keeps it: %d objects", store.url, objects)
        elif not found.begun:
            # All objects were deleted already. On a local disk, the folder may be left.
            store.remove_folder()
        self.forget(name)
        return True

    def _is_own(self, found: UrlContents) -> bool:
        run = self._ownership.record.run
        if found.root is not None:
            # The marker is checked too, because a copy of a checkpoint has the same root document.
            saves = [marker for marker in found.markers if marker.save_id == found.root.save_id]
            return run_of(found.root.metadata) == run and all(marker.run == run for marker in saves)
        # An interrupted removal is finished even if another process began it. A claim without a marker counts as this
        # run's, because no chunks were written for it.
        return found.root_bytes is None and (found.removal or all(marker.run == run for marker in found.markers))

    def _log_once(self, key: str, text: str) -> None:
        """Log a warning, unless one with the same key has been logged."""
        if key not in self._logged:
            self._logged.add(key)
            log.warning("the run %s: %s", self._spec.url, text)


def _error_text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _has_root(store: Store, name: str) -> bool:
    """Whether a folder has a root document. One request for one byte."""
    try:
        store.read(f"{name}/{NODE}", 0, 1)
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
