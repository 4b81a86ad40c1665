"""Recover, examine and remove a checkpoint: delete the objects that its saves wrote, and no others. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from zarrckpt._commit.contents import read_contents
from zarrckpt._commit.discovery import CheckpointFolder, find_saves
from zarrckpt._commit.foreign_files import describe_files
from zarrckpt._commit.listings import list_below
from zarrckpt._commit.marker import CLAIM_KEY, REMOVAL_KEY, marker_key, marker_of
from zarrckpt._commit.pins import list_pins
from zarrckpt._commit.removal import count_objects, delete_attempts, remove_all, sweep_temporary_files
from zarrckpt._commit.stored_documents import is_stored
from zarrckpt._errors import CheckpointError, CheckpointNotFoundError
from zarrckpt._format.root import RESERVED_GROUP
from zarrckpt._jobs import run_jobs
from zarrckpt._ops.verify import verify
from zarrckpt._read.catalog import Catalog
from zarrckpt._reports import count_text, time_text
from zarrckpt._store import Store, StoreSpec, Url

_FOLDERS_AT_ONCE = 4
"""Maximum number of folders that are recovered in parallel. Each recovery makes parallel requests itself."""


@dataclass(frozen=True)
class RecoverReport:
    """The result of :func:`recover` at a url."""

    url: str
    objects: int
    """The number of objects that were deleted."""
    removed: tuple[str, ...]
    """The ids of the saves whose objects were deleted."""
    kept: tuple[str, ...]
    """The ids of saves that may still be running, whose objects were kept."""
    checkpoints: tuple[RecoverReport, ...] = ()
    """A report of each checkpoint, by name, if the url is a folder of checkpoints. The numbers above are their sums."""
    error: str = ""
    """The reason why a checkpoint in a folder was not recovered."""


def recover(
    url: Url,
    *,
    stopped: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> RecoverReport:
    """Delete the objects of saves that never committed or were replaced. The committed checkpoint stays.

    One exception: if a removal was interrupted, it is finished, and the checkpoint is deleted. If the checkpoint is
    pinned, this raises CheckpointPinnedError, or cancels the removal if ``stopped``.

    The next save to the url does the same, so call this only if there will be no next save. Only keys that a save's own
    marker lists are deleted. A save that could still commit is kept: it has no record of a failure, and the
    checkpoint at the url has not changed since it began. Storage does not show whether such a save is still running.
    The claim stays, so a dead rank that still writes cannot write to keys of a later save. With ``stopped``, nothing
    stays at a url without a checkpoint.

    Args:
        url: the url of a checkpoint, or of a folder of checkpoints. In a folder, each checkpoint directly below it is
            recovered.
        stopped: pass True only if no save to this url is running anywhere. Saves that could still commit are deleted
            too, and the objects of a save that was begun by mistake in a folder of checkpoints. If a save is running
            nevertheless, the checkpoint that it commits is damaged.

    The other arguments are those of :func:`open`. Costs one listing for each name below the url that a marker lists.

    Raises ForeignObjectsError, before anything is deleted, if the url has objects that no save of this package wrote.
    Raises CorruptCheckpointError if the root document is damaged. In a folder of checkpoints, an error at one of them
    is in its report, and the others are recovered.
    """
    spec = StoreSpec(url, storage_options)
    store = spec.open()
    listed = list_below(store)
    begun = [] if listed.has_save else find_saves(store, listed.folders)
    if stopped and not listed.has_save:
        for name in {*listed.folders} - {below.name for below in begun}:
            _remove_empty_folder(spec.child(name).open())
    if all(below.unreadable for below in begun):
        if listed.is_run and not listed.has_save and not begun:
            return RecoverReport(spec.url, 0, (), ())  # a run without checkpoints
        return _recover_store(spec, stopped)
    reports = run_jobs((partial(_recovered_below, spec, below, stopped) for below in begun), _FOLDERS_AT_ONCE)
    return RecoverReport(
        spec.url,
        sum(report.objects for report in reports),
        tuple(save_id for report in reports for save_id in report.removed),
        tuple(save_id for report in reports for save_id in report.kept),
        tuple(reports),
    )


def _recovered_below(spec: StoreSpec, below: CheckpointFolder, stopped: bool) -> RecoverReport:
    """Recover a folder directly below a url. Errors are in the report."""
    child = spec.child(below.name)
    try:
        if below.damage is not None:
            raise below.damage
        return _recover_store(child, stopped)
    except CheckpointError as err:
        return RecoverReport(child.url, 0, (), (), error=str(err))


def _recover_store(spec: StoreSpec, stopped: bool) -> RecoverReport:
    store = spec.open()
    found = read_contents(store, beside_checkpoints=stopped)
    if stopped and not found.begun:
        _remove_empty_folder(store)
    if found.removal and stopped and found.root_bytes is not None and list_pins(store):
        # The removal was interrupted before it could see the pin, and has deleted nothing.
        store.delete([REMOVAL_KEY])
        found = read_contents(store, beside_checkpoints=True)
    if found.removal:
        removed = tuple(marker.save_id for marker in found.markers)
        return RecoverReport(store.url, remove_all(store, found), removed, ())
    dead = [marker for marker in found.others if stopped or not found.may_commit(marker)]
    kept = [marker.save_id for marker in found.others if marker not in dead]
    # Keys that a kept attempt lists are spared: one that began during a removal may share keys with a dead attempt.
    spared = [marker for marker in found.markers if marker not in dead]
    ended = [marker.save_id for marker in dead] if stopped else []
    objects = delete_attempts(store, dead, ended=ended, spared=spared)
    if store.is_archive and found.root is not None and is_stored(store, marker_key(found.root.save_id)):
        # A crash after the commit left the marker, and perhaps a second name of the archive.
        objects += 1 + delete_attempts(store, [marker_of(found.root)], ended=[found.root.save_id])
    if found.root_bytes is None:
        # These pins were put while the checkpoint was being removed.
        store.delete(found.pins)
    if stopped:
        claims = [CLAIM_KEY] if found.claimed and found.root_bytes is None else []
        store.delete([*found.probes, *claims, *([] if found.root_bytes else found.system_files)])
        objects += len(claims)
        sweep_temporary_files(store)
        if found.root_bytes is None and found.begun:
            store.remove_folder()
    return RecoverReport(store.url, objects, tuple(marker.save_id for marker in dead), tuple(kept))


def _remove_empty_folder(store: Store) -> None:
    """Remove the folder of a save that was killed before its first object was complete. No save may be running."""
    if store.is_local and (store.is_archive or RESERVED_GROUP in store.list_dir()[1]):
        store.remove_folder()


@dataclass(frozen=True)
class Examination:
    """The result of :func:`examine` at a url, as texts."""

    url: str
    state: str
    findings: tuple[str, ...]
    """Problems and leftovers."""
    advice: tuple[str, ...]
    """Commands to run."""
    notes: tuple[str, ...] = ()
    """Facts that are no problems, for example pins."""
    empty: bool = False
    """Whether the url has no objects of this package."""


def examine(
    url: Url,
    *,
    storage_options: Mapping[str, Any] | None = None,
) -> Examination:
    """Describe a url: its checkpoint, unfinished saves, leftovers, and damage that a listing shows. Reads no chunk.

    The arguments are those of :func:`open`. Raises ForeignObjectsError if the url has objects of other programs.
    """
    spec = StoreSpec(url, storage_options)
    store = spec.open()
    found = read_contents(store, allow_damaged=True)
    pinned = tuple(f"pinned: {one.note!r:.200} (pin {one.pin_id})" for one in list_pins(store))
    if found.removal:
        finding = "the removal has not ended: it is still running, or was interrupted"
        state = f"{store.url}: a checkpoint that is being removed"
        flag = " --stopped    (only if it is not running: the checkpoint is pinned, and stays)" if pinned else ""
        return Examination(store.url, state, (finding,), (f"zarrckpt recover {store.url}{flag}",), pinned)
    findings: list[str] = []
    advice: list[str] = []
    notes: list[str] = []
    if found.root is not None:
        ranks = count_text(found.root.world_size, "rank")
        state = f"{store.url}: a checkpoint, committed {time_text(found.root.created)} by {ranks}"
        report = verify(Catalog(spec, found.root), quick=True, max_inflight_bytes=1 << 28, progress=None)
        if not report:
            findings.append(f"{count_text(len(report.damages), 'object')} missing, or of a different size")
            advice.append(f"zarrckpt verify {store.url}")
    elif found.root_bytes is not None:
        # Without the id of the committed save, its objects cannot be distinguished from leftovers.
        state = f"{store.url}: a damaged checkpoint"
        findings.append("the root document is damaged: restore zarr.json from a copy, or save again")
        return Examination(store.url, state, tuple(findings), (f"zarrckpt rm {store.url}",), pinned)
    else:
        state = f"{store.url}: " + ("no checkpoint, but a save was begun" if found.begun else "no objects")
    dead = [marker for marker in found.others if not found.may_commit(marker)]
    others = [marker for marker in found.markers if marker not in dead]
    left = {marker.save_id: count_objects(store, marker, others) for marker in dead}
    for marker in found.others:
        what = f"save {marker.save_id}, begun {time_text(marker.started)}"
        ended = "failed" if marker.failed else "cannot commit any more, or was replaced"
        if marker.save_id not in left:
            findings.append(f"{what}, could still commit if it is running")
        elif left[marker.save_id]:
            findings.append(f"{what}, {ended}: {count_text(left[marker.save_id], 'object')} left")
        else:
            notes.append(f"{what}, {ended}: only its marker is left, because ranks that lost contact may still write")
    if found.probes:
        findings.append(f"{count_text(len(found.probes), 'object')} left of a test of the store's conditional puts")
    if any(left.values()):
        advice.append(f"zarrckpt recover {store.url}")
    if len(dead) < len(found.others) or notes or found.probes:
        advice.append(f"zarrckpt recover {store.url} --stopped    (only if no save to it is running)")
    empty = found.root is None and not found.begun
    if empty and (text := describe_files(store, list_below(store))):
        findings.append(text)
    return Examination(store.url, state, tuple(findings), tuple(advice), (*notes, *pinned), empty)


def remove(
    url: Url,
    *,
    storage_options: Mapping[str, Any] | None = None,
) -> int:
    """Delete the checkpoint at a url, even if it is damaged, with the objects of all its saves.

    Returns the number of objects that were deleted. First the removal is recorded, so that another :func:`remove` or
    :func:`recover` can finish it after a crash. Then the root document is deleted. From then on the checkpoint cannot
    be opened, and reads of an open one raise CheckpointRemovedError. Only keys that documents of saves list are
    deleted. On a local disk, the url's folder is deleted too, if it is empty then and neither a link nor a mount.

    No save to the url may be running or beginning, because it would commit objects that were deleted. A save that
    begins after the removal is recorded is refused. The arguments are those of :func:`open`.

    Raises CheckpointNotFoundError if no save ever began, ForeignObjectsError if the url has objects of other programs,
    CheckpointPinnedError if the checkpoint is pinned, StorageError if the root document cannot be deleted. Then nothing
    was deleted.
    """
    store = StoreSpec(url, storage_options).open()
    found = read_contents(store, allow_damaged=True)
    if not found.begun:
        raise CheckpointNotFoundError(f"there is no checkpoint at {store.url}, and no save was begun: check the path")
    return remove_all(store, found)
