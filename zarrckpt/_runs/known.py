"""``KnownCheckpoints``: decide which checkpoints of a run have expired, and in which order to delete them.

No I/O, no threads, no torch. :mod:`zarrckpt._runs.retention` reports what happens in the store, and deletes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from enum import Enum
from typing import Any

from zarrckpt._errors import CheckpointError
from zarrckpt._runs.keep import Keep

_MAX_EXPIRED = 2
"""Maximum number of expired checkpoints after a commit, without those that cannot be deleted."""

_MAX_DELETIONS_TO_AWAIT = 3
"""Maximum number of deletions for which a save waits: one more than a commit makes necessary."""

_FOLDERS_AT_ONCE = 64
"""Maximum number of folders to read at a time. Each may have a root document of a few MB."""

_MAX_SAVES_WITHOUT_METRIC = 5
"""Number of saves without the metric of the rules at which a save is refused, if no checkpoint has the metric."""


class Deletion(Enum):
    """The result of an attempt to delete a checkpoint."""

    SETTLED = "settled"
    """Nothing is left to do for this folder."""
    PINNED = "pinned"
    FAILED = "failed"


class KnownCheckpoints:
    """The checkpoints of a run, the leftovers of its saves, and the folders that were not read yet, by name.

    A checkpoint expires if no rule keeps it. The leftovers of a save expire at the commit of a later step. Damaged
    checkpoints do not count for the rules and never expire.
    """

    def __init__(self, keep: Keep | None) -> None:
        self._keep = keep
        self._own: dict[str, tuple[int, Mapping[str, Any]]] = {}
        """The step and the metadata of the run's committed checkpoints."""
        self._begun: dict[str, int] = {}
        """The steps of saves that have not committed."""
        self._unread: set[str] = set()
        """Folders of steps from before this job."""
        self._damaged: set[str] = set()
        self._blocked: dict[str, Deletion] = {}
        """The checkpoints that could not be deleted, and the reason, the latest attempt last."""
        self._tried: set[str] = set()
        """The names that :meth:`take_expired` and :meth:`take_blocked` have returned in this series."""
        self._read: set[str] = set()
        """The names that :meth:`take_unread` has returned in this series."""
        self._deletions_to_await = 0
        """The maximum number of deletions for which the next save waits."""
        self._unseen_metric = None if keep is None or not keep.best else keep.metric
        """The metric of the rules until a save or a checkpoint has it, then None."""
        self._without_metric: set[int] = set()
        """The steps of saves without the metric of the rules."""

    # -- events

    def note_folders(self, names: Iterable[str]) -> None:
        """Record the folders of steps that exist when this job begins."""
        self._unread |= {*names} - self._own.keys()

    def note_damaged(self, names: Iterable[str]) -> None:
        self._damaged |= {*names}

    def note_read(self, name: str) -> None:
        """Record that a folder was read. Its content is recorded by :meth:`note_found` or :meth:`note_begin`."""
        self._unread.discard(name)

    def note_begin(self, name: str, step: int) -> None:
        """Record a save that has not committed."""
        self._begun[name] = step

    def note_commit(self, name: str, step: int, metadata: Mapping[str, Any]) -> None:
        """Record a commit of this job."""
        self.forget(name)
        self._damaged.discard(name)
        self._own[name] = step, metadata
        self._deletions_to_await = _MAX_DELETIONS_TO_AWAIT

    def note_found(self, name: str, step: int, metadata: Mapping[str, Any]) -> None:
        """Record a committed checkpoint of this run that was found in the store."""
        self._begun.pop(name, None)
        self._own[name] = step, metadata

    def note_deletion(self, name: str, result: Deletion) -> None:
        """Record an attempt to delete a checkpoint or leftovers. It does not remove the name, see :meth:`forget`."""
        self._blocked.pop(name, None)
        if result is Deletion.SETTLED:
            self._deletions_to_await -= 1
        else:
            self._blocked[name] = result

    def forget(self, name: str) -> None:
        """Forget a folder that was removed, or that does not count for the rules."""
        for known in (self._own, self._begun, self._blocked):
            known.pop(name, None)
        self._unread.discard(name)

    # -- decisions

    def begin_series(self) -> None:
        """Begin a series of deletions, in which each checkpoint is tried once and each folder is read once."""
        self._tried, self._read = set(), set()

    def take_expired(self) -> str | None:
        """Return the checkpoint or the leftovers to delete next, or None. It counts as tried."""
        skipped = self._tried | self._blocked.keys()
        return self._take_first(name for name in self._expired() if name not in skipped)

    def take_unread(self) -> list[str]:
        """Return some folders to read, because they may have expired checkpoints. They count as read."""
        names = sorted(self._unread - self._read)[:_FOLDERS_AT_ONCE]
        self._read.update(names)
        return names

    def take_blocked(self) -> str | None:
        """Return a checkpoint that could not be deleted, to try it again, or None. It counts as tried.

        Pinned ones come first, then those whose last attempt is the oldest.
        """
        expired = {*self._expired()} - self._tried
        names = sorted(self._blocked, key=lambda name: self._blocked[name] is not Deletion.PINNED)
        return self._take_first(name for name in names if name in expired)

    def _take_first(self, names: Iterable[str]) -> str | None:
        name = next(iter(names), None)
        if name is not None:
            self._tried.add(name)
        return name

    def stop_waits(self) -> None:
        """Let saves begin without a wait until the next commit."""
        self._deletions_to_await = 0

    def needs_no_wait(self) -> bool:
        """Whether the next save need not wait for deletions.

        Its commit leaves few expired checkpoints, or enough were deleted since the last commit.
        If earlier jobs have left many, each save waits for some deletions, so that their number falls.
        """
        # A commit makes the oldest of the newest checkpoints expire, and the worst of the best ones.
        added = 2 if self._keep is not None and self._keep.best else 1
        waiting = {*self._expired()} - self._blocked.keys()
        return self._deletions_to_await <= 0 or len(waiting) + added <= _MAX_EXPIRED

    def _expired(self) -> list[str]:
        """Return the names of expired checkpoints and leftovers, by ascending step."""
        sound = {name: known for name, known in self._own.items() if name not in self._damaged}
        metadata_of = {step: metadata for step, metadata in sound.values()}
        kept: Collection[int] = metadata_of if self._keep is None else self._keep.reasons(metadata_of)
        newest = max(metadata_of, default=-1)
        found = [(step, name) for name, (step, _) in sound.items() if step not in kept]
        found += [(step, name) for name, step in self._begun.items() if step < newest]
        return [name for _, name in sorted(found)]

    def may_be_gone(self) -> set[str]:
        """Return the checkpoints to look for in the folder, because only existing ones count for the rules.

        Empty if the rules keep all of them anyway.
        """
        return {*self._own} if self._keep is not None and len(self._own) > self._keep.newest else set()

    def has_begun(self, name: str) -> bool:
        """Whether a save to this folder has not committed, as far as this job knows."""
        return name in self._begun

    def was_pinned(self, name: str) -> bool:
        """Whether a checkpoint was pinned at the last attempt to delete it."""
        return self._blocked.get(name) is Deletion.PINNED

    def check_metric(self, url: str, step: int, names: Collection[str]) -> str:
        """Return a warning about the first save without the metric of the rules, "" otherwise.

        Raises CheckpointError after several such saves if no checkpoint has the metric, because its name may be wrong.

        Args:
            url: the url of the run, for the texts.
            step: the step of a save that begins.
            names: the names of the save's metrics.
        """
        metric = self._unseen_metric
        known = (names, *(metadata for _, metadata in self._own.values()))
        if metric is None or any(metric in some for some in known):
            self._unseen_metric = None
            return ""
        given = ", ".join(map(repr, sorted({*names} - {"step"})[:8]))
        text = (
            f"the run {url} keeps the best by the metric {metric!r}, but the save of step {step} has only {given}. "
            f"Pass {metric!r} in metrics (None if it is not known yet), or another name in Keep(metric=)"
        )
        is_first = not self._without_metric
        self._without_metric.add(step)
        if len(self._without_metric) >= _MAX_SAVES_WITHOUT_METRIC:
            raise CheckpointError(
                f"{text}. No checkpoint has it after {_MAX_SAVES_WITHOUT_METRIC} saves, so step {step} was not saved"
            )
        return text if is_first else ""
