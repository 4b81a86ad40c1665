"""Begin, commit and abandon an attempt, in an order that makes a checkpoint appear as a whole or not at all.

Every attempt writes keys that no other attempt ever uses. The first attempt at a url claims the canonical paths. Every
later attempt writes below ``@<its id>``. The root document names the tree of its attempt. It is put last and
conditionally. ``docs/explanation/commit.md`` has the reasons and a table of crashes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import msgspec

from zarrckpt._commit.contents import is_of_run, read_listings, read_markers
from zarrckpt._commit.discovery import removal_next_step
from zarrckpt._commit.marker import CLAIM_KEY, Claim, Marker, marker_key
from zarrckpt._commit.pins import refuse_pinned
from zarrckpt._commit.removal import delete_attempts
from zarrckpt._commit.stored_documents import get_versioned_if_stored, parse_committed, read_root
from zarrckpt._errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointRemovedError,
    ForeignObjectsError,
    ObjectExistsError,
    StorageError,
    log,
    warn,
)
from zarrckpt._format.documents import GROUP_DOCUMENT, NODE
from zarrckpt._format.root import HISTORY, RESERVED_GROUP, Root
from zarrckpt._store._archive import SUFFIX
from zarrckpt._store._failures import is_full

if TYPE_CHECKING:
    from zarrckpt._store import Store
    from zarrckpt._store._base import VersionedObject


class AttemptIds(Protocol):
    """The ids of an attempt, as all ranks of a save have them."""

    @property
    def save_id(self) -> str: ...

    @property
    def replaced_id(self) -> str:
        """The id of the save that was committed at begin, or ""."""


@dataclass(frozen=True)
class Attempt:
    """One save from begin to commit. Only the coordinator has it."""

    marker: Marker
    committed_document: VersionedObject | None
    """The root document at begin, or None. The commit replaces exactly this version."""
    history: tuple[str, ...]
    older: tuple[Marker, ...]
    """The attempts whose markers were read at begin. This attempt may delete only their objects."""
    unmarked: tuple[str, ...] = ()
    """The ids of attempts without a marker at begin: they were killed while they put it, or are putting it."""

    @property
    def save_id(self) -> str:
        return self.marker.save_id

    @property
    def tree(self) -> str:
        return self.marker.tree

    @property
    def replaced_id(self) -> str:
        """The id of the save that was committed at begin, or ""."""
        return self.history[0] if self.history else ""


def refuse_committed(store: Store, run_id: str, damaged_id: str) -> None:
    """Raise the error of :func:`begin` without ``overwrite`` if a root document exists. One request."""
    _refuse_root(store, get_versioned_if_stored(store, NODE), run_id, damaged_id)


def _refuse_root(store: Store, document: VersionedObject | None, run_id: str, damaged_id: str) -> Root | None:
    """Return the root of a damaged checkpoint that a save of a run replaces, or None if it cannot be read.

    Without a run, and for other checkpoints, raises CheckpointExistsError or CorruptCheckpointError.
    """
    root = parse_committed(store, document, allow_damaged=bool(run_id))
    if root is not None and root.save_id != damaged_id:
        how = "save to another path, or pass overwrite=True"
        if run_id:
            how = f"save a greater step, or if you do not need that checkpoint: zarrckpt rm {store.url}"
        raise CheckpointExistsError(
            f"Checkpoint already exists at {store.url} (save {root.save_id[:8]}, {root.created}): {how}"
        )
    return root


def begin(store: Store, marker: Marker, *, overwrite: bool, damaged_id: str = "", planned_bytes: int = 0) -> Attempt:
    """Begin an attempt: choose its tree and put its marker. The coordinator calls it before any chunk is written.

    Costs 9 requests, one more for each earlier attempt, and three more to overwrite, in 3 to 7 round trips.

    Args:
        marker: the nodes that the attempt will write. If it names a run, a checkpoint of this run whose root document
            is damaged is replaced.
        overwrite: replace any checkpoint.
        damaged_id: the id of a save of this run in whose data a load has found damage, or "". It is replaced.
        planned_bytes: for :meth:`Store.begin_archive`.

    Raises CheckpointExistsError if another checkpoint is committed, CheckpointPinnedError if it is pinned,
    ForeignObjectsError if the url is inside a checkpoint or has objects below it that this package did not write, or a
    damaged checkpoint that the run did not save, CheckpointRemovedError if a removal has not ended.
    """
    if store.url.lower().endswith(".zip") and not store.is_archive:
        warn(f"{store.url} becomes a folder, because only a name that ends with {SUFFIX!r} is that of an archive")
    seen = read_listings(store, to_save=True)
    if seen.removal:
        raise CheckpointRemovedError(
            f"the checkpoint at {store.url} is being removed: {removal_next_step(store)}. Then save again"
        )
    if overwrite:
        root = parse_committed(store, seen.committed_document, allow_damaged=True)
    else:
        root = _refuse_root(store, seen.committed_document, marker.run_id, damaged_id)
    older = read_markers(store, root, seen)
    if not overwrite and seen.committed_document is not None and not is_of_run(root, older, marker.run_id):
        raise ForeignObjectsError(
            f"the damaged checkpoint {store.url} was not saved by the run {marker.run_id}. Nothing was changed. Move "
            f"it elsewhere, or if you do not need it: zarrckpt rm {store.url}"
        )
    first = not seen.claimed and _put_claim(store, marker.save_id)
    # The first attempt has the canonical tree. An attempt that began during a removal may have it too, without a claim,
    # because the removal has deleted the claim. In an archive, each attempt has the canonical tree to itself.
    canonical = store.is_archive or (first and all(earlier.tree for earlier in older))
    tree = "" if canonical else f"@{marker.save_id}"
    replaced_id = "" if root is None else root.save_id
    own = msgspec.structs.replace(marker, tree=tree, replaced_id=replaced_id)
    history = () if root is None else (root.save_id, *root.history)[:HISTORY]
    unmarked = {*seen.attempt_ids} - {earlier.save_id for earlier in older}
    attempt = Attempt(own, seen.committed_document, history, tuple(older), tuple(sorted(unmarked)))
    keys = [marker_key(own.save_id)]
    try:
        with report_lost_commit(store, attempt):
            store.put(keys[0], [own.to_bytes()])
            store.begin_archive(own.save_id, planned_bytes)
            if tree:
                keys.append(f"{tree}/{NODE}")
                store.put(keys[-1], [GROUP_DOCUMENT])
            # Without the marker, the chunks that are left after a power cut could not be assigned to this attempt.
            store.sync(keys)
            if seen.committed_document is not None:
                # Checked after the marker is put. A pin is put before markers are read, so one of them finds the other.
                refuse_pinned(store)
    except BaseException:
        abandon(store, attempt)
        raise
    return attempt


def _put_claim(store: Store, save_id: str) -> bool:
    try:
        store.create(CLAIM_KEY, Claim(save_id).to_bytes())
    except ObjectExistsError:
        return False
    return True


def commit(store: Store, attempt: Attempt, root: Root) -> str:
    """Put the root document conditionally, so that the checkpoint exists. Return its SHA-256. The coordinator calls it.

    All objects of the checkpoint must be stored and durable already. Raises CheckpointExistsError if another save has
    committed since :func:`begin`. If the root was refused permanently, the attempt's objects are deleted. After any
    other failure they stay, because the root may have been stored, or may still arrive.
    """
    data = root.to_bytes()
    digest = hashlib.sha256(data).hexdigest()
    try:
        if attempt.committed_document is None:
            store.create(NODE, data)
        else:
            store.replace(NODE, data, attempt.committed_document.version)
    except StorageError as err:
        winner = _read_winner(store)
        # The root was stored but the answer was lost. Even if another save has replaced it since, this is a success.
        if winner is not None and _has_committed(attempt, winner):
            store.sync([NODE])
            return digest
        if winner is not None and winner.save_id != attempt.replaced_id:
            abandon(store, attempt, lost=True)
            raise _lost_error(store, attempt, winner) from err
        # A full disk has refused the root permanently.
        if is_full(err):
            abandon(store, attempt)
        raise
    return digest


@contextmanager
def report_lost_commit(store: Store, attempt: AttemptIds) -> Iterator[None]:
    """Raise CheckpointExistsError instead of StorageError if another save has committed since the attempt began.

    The clean-up of that save deletes the objects of other attempts, which may still be writing. One request, after a
    failure only.
    """
    try:
        yield
    except StorageError as err:
        winner = _read_winner(store)
        if winner is None or winner.save_id == attempt.replaced_id or _has_committed(attempt, winner):
            raise
        raise _lost_error(store, attempt, winner) from err


def _read_winner(store: Store) -> Root | None:
    """Return the root that is committed after a failure, or None if there is none or it cannot be read."""
    try:
        return read_root(store)
    except CheckpointError:
        return None


def _has_committed(attempt: AttemptIds, winner: Root) -> bool:
    """Whether an attempt has committed: the committed root is its own, or has replaced it."""
    return attempt.save_id in (winner.save_id, *winner.history)


def _lost_error(store: Store, attempt: AttemptIds, winner: Root) -> CheckpointExistsError:
    return CheckpointExistsError(
        f"Checkpoint already exists at {store.url}: save {winner.save_id[:8]} committed while this one "
        f"({attempt.save_id[:8]}) was being written. The other checkpoint was not changed: save to another path"
    )


def clean_up(store: Store, attempt: Attempt) -> None:
    """Delete the checkpoint that a committed attempt replaced, and objects of earlier attempts. Log if that fails."""
    try:
        delete_attempts(store, attempt.older, ended=[attempt.replaced_id], spared=[attempt.marker])
        if attempt.unmarked:
            # An attempt that still writes a file there repeats its put.
            store.sweep(f"{RESERVED_GROUP}/{save_id}" for save_id in attempt.unmarked)
    except CheckpointError as err:
        # The save has committed, so it must not fail, not even if a filter makes Python warnings errors.
        log.warning(
            "the checkpoint at %s is saved, but objects of earlier saves could not be removed: %s. The next save to "
            "this url tries again",
            store.url,
            err,
        )


def abandon(store: Store, attempt: Attempt, *, lost: bool = False) -> None:
    """Delete the objects of an attempt that will never commit. Its coordinator calls it. Raises no CheckpointError.

    The marker stays, now with ``failed``, because requests without an answer may still arrive and disconnected ranks
    may still write. ``lost`` is true if all ranks of the attempt have ended and another save has committed. Then the
    marker is deleted too if the attempt has its own tree. In the canonical tree, only markers show which attempt has
    written an object. Of an archive, nothing stays.
    """
    try:
        delete_attempts(store, [attempt.marker], ended=[attempt.save_id] if lost and attempt.tree else [])
        if not lost and not store.is_archive:
            store.put(marker_key(attempt.save_id), [msgspec.structs.replace(attempt.marker, failed=True).to_bytes()])
    except CheckpointError:
        return  # The caller raises the error that ended the attempt. The next save or recover cleans up.
