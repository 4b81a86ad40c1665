"""Delete the objects of attempts, or all objects at a url, in an order that another process can finish."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from zarrckpt._commit.contents import UrlContents, list_pin_keys, list_top_names, read_contents
from zarrckpt._commit.marker import (
    CLAIM_KEY,
    PINS,
    REMOVAL_KEY,
    REMOVED,
    Marker,
    RemovalRecord,
    is_table_key,
    marker_key,
    new_id,
)
from zarrckpt._commit.pins import refuse_pinned
from zarrckpt._commit.stored_documents import get_if_stored, get_versioned_if_stored, list_attempt_ids, read_root
from zarrckpt._errors import CheckpointError, ObjectExistsError, StorageError
from zarrckpt._format.documents import NODE
from zarrckpt._format.root import RESERVED_GROUP
from zarrckpt._format.sealed import now
from zarrckpt._jobs import run_jobs
from zarrckpt._store._base import is_system_file

if TYPE_CHECKING:
    from zarrckpt._store import Store

_DELETE_BATCH = 1000
"""Number of objects that a clean-up deletes between two checks for a newer removal. S3 deletes 1000 per request."""

_CLEAN_TRIES = 3
"""Maximum number of listings of a clean-up. It leaves objects that the last listing contains to the next clean-up."""

_RECORD_TRIES = 5
"""Maximum number of puts of a removal's record, repeated while other removals replace it."""


class _RemovalEndedError(Exception):
    """A removal has ended, or another process has taken it over. It is always caught in this module."""


def remove_all(store: Store, found: UrlContents) -> int:
    """Begin or continue the removal of all objects of saves at a url. Return the number of deleted objects.

    If several processes remove, the one that put its record last continues. The others stop when they see its record.
    Raises CheckpointPinnedError if the checkpoint is pinned, StorageError if the root document cannot be deleted. Then
    nothing was deleted.
    """
    own = RemovalRecord("" if found.root is None else found.root.save_id, new_id(), now()).to_bytes()
    objects = 0
    with suppress(_RemovalEndedError):
        record, is_first = _record_removal(store, own, begun=found.removal)
        try:
            # Read again, because no save begins after the record, so this result stays true.
            found = read_contents(store, allow_damaged=True)
            _delete_root(store, found.root_bytes, record)
        except CheckpointError:
            # An earlier removal may have seen no pin and be about to delete. Then the record must stay.
            if is_first:
                _delete_record(store, found, own)
            raise
        objects = len(found.markers) + (found.root_bytes is not None) + found.claimed
        ended = [marker.save_id for marker in found.markers]
        objects += delete_attempts(store, found.markers, ended=ended, removal=record)
        pins = list_pin_keys(store)
        _check_record(store, record)
        store.delete([*found.probes, *found.system_files, *pins, CLAIM_KEY])
        sweep_temporary_files(store)
        _check_record(store, record)
        # Last, because the record must exist as long as other objects are left.
        store.delete([REMOVAL_KEY])
        store.remove_folder()
    return objects


def _record_removal(store: Store, record: bytes, *, begun: bool) -> tuple[bytes | None, bool]:
    """Put the record of a removal before anything is deleted, so that no save begins at the url any more.

    Replaces the record of an unfinished removal, and the process that put that one stops. So of several processes only
    the last one deletes, after its own check for pins.

    Returns the valid record, and whether this call put the first one. If a put is impossible (the disk is full, or only
    deletions are permitted), the valid record is the earlier one, or None. The removal continues in that case, because
    it may free the disk.

    Args:
        begun: whether the caller has seen an unfinished removal. Raises _RemovalEndedError if it has ended since.
    """
    for _ in range(_RECORD_TRIES):
        before = get_versioned_if_stored(store, REMOVAL_KEY)
        if before is None and begun:
            raise _RemovalEndedError
        try:
            if before is None:
                store.create(REMOVAL_KEY, record)
            else:
                store.replace(REMOVAL_KEY, record, before.version)
            store.sync([REMOVAL_KEY])
            return record, before is None
        except ObjectExistsError:
            begun = True
        except StorageError:
            return (None if before is None else before.data), False
    raise StorageError(
        f"the removal of {store.url} failed: other processes replaced its record during each of {_RECORD_TRIES} "
        "tries. Try again when they have ended"
    )


def _check_record(store: Store, record: bytes | None) -> None:
    """Raise _RemovalEndedError if the stored record is not ``record``. One request, or none if ``record`` is None."""
    if record is not None and get_if_stored(store, REMOVAL_KEY) != record:
        raise _RemovalEndedError


def _delete_root(store: Store, root_bytes: bytes | None, record: bytes | None) -> None:
    """Delete the root document if its bytes are still ``root_bytes``, and the checkpoint is not pinned."""
    _check_record(store, record)
    if root_bytes is not None:
        refuse_pinned(store)
        found = get_versioned_if_stored(store, NODE)
        if found is not None and found.data == root_bytes:
            store.delete([NODE])


def _delete_record(store: Store, found: UrlContents, own: bytes) -> None:
    """Delete the record of a removal that has deleted nothing, if the checkpoint and the record are unchanged."""
    with suppress(CheckpointError):
        unchanged = found.root is None or read_root(store).save_id == found.root.save_id
        if unchanged and get_if_stored(store, REMOVAL_KEY) == own:
            store.delete([REMOVAL_KEY])


def delete_attempts(
    store: Store,
    markers: Iterable[Marker],
    *,
    ended: Iterable[str] = (),
    spared: Sequence[Marker] = (),
    removal: bytes | None = None,
) -> int:
    """Delete the objects that these markers name, and return the number of objects deleted.

    ``ended`` are the ids of attempts whose ranks have all ended, and their markers are deleted too. Other markers stay,
    unless they are of archives, because a late rank may still write objects that they name. Keys that a marker in
    ``spared`` names are never deleted. With ``removal``, the record of a removal, stops if it is gone or replaced,
    because a save may have begun since. Called by the coordinator after its commit, and by removals.
    """
    markers = [*markers]
    # A late rank can write only to files of an archive that is deleted, and to none that is new.
    ended_ids = {marker.save_id for marker in markers} if store.is_archive else {*ended}
    deleted = 0
    for marker in markers:
        tops = marker.top_names()
        deleted += _delete_named(store, marker, tops, spared, removal)
        for _ in range(_CLEAN_TRIES if marker.save_id in ended_ids else 0):
            # A listing may be stale. Objects that it lacks could not be assigned to an attempt without the marker.
            tops &= list_top_names(store)
            more = _delete_named(store, marker, tops, spared, removal)
            deleted += more
            if not more:
                # Deleted last, so that the next clean-up can continue after a crash.
                store.delete([marker_key(marker.save_id)])
                break
    return deleted


def _delete_named(
    store: Store, marker: Marker, tops: Iterable[str], spared: Sequence[Marker], removal: bytes | None
) -> int:
    """Delete the objects below ``tops`` that a marker names, and its attempt's tables. Return their number."""
    keys = _list_named(store, marker, tops, spared)
    for start in range(0, len(keys), _DELETE_BATCH):
        _check_record(store, removal)
        store.delete(keys[start : start + _DELETE_BATCH])
    store.sweep(marker.folders())
    return len(keys)


def _list_named(store: Store, marker: Marker, tops: Iterable[str], spared: Sequence[Marker]) -> list[str]:
    """Return the stored keys below ``tops`` that a marker names but ``spared`` does not, and its attempt's tables.

    If the checkpoint is an archive, return the keys of the attempt's unfinished archive.
    """
    own = f"{RESERVED_GROUP}/{marker.save_id}"
    if store.is_archive:
        keys = [info.key for info in store.list(own)]
        return [key for key in keys if not is_table_key(key) and key != marker_key(marker.save_id)]
    # Parallel, because a flat state has a folder for each entry.
    reads = (partial(_list_named_below, store, marker, top, spared) for top in sorted(tops))
    keys = [key for listing in run_jobs(reads, store.max_concurrency) for key in listing]
    return keys + [info.key for info in store.list(own) if is_table_key(info.key) or is_system_file(info.key)]


def _list_named_below(store: Store, marker: Marker, top: str, spared: Sequence[Marker]) -> list[str]:
    """Return the stored keys below one folder that a marker names but no marker in ``spared`` does.

    With those of files that operating systems have added, so that no folder stays for them.
    """
    stored = [info.key for info in store.list(top)]
    keys = [key for key in stored if marker.names_key(key) or is_system_file(key)]
    # Keys of other checkpoints inside are left out: their root documents have the same name as documents of groups.
    inner = {key.partition(f"/{RESERVED_GROUP}/")[0] for key in stored if f"/{RESERVED_GROUP}/" in key}
    if inner:
        keys = [key for key in keys if not any(key.startswith(f"{folder}/") for folder in inner)]
    return [key for key in keys if not any(other.names_key(key) for other in spared)]


def count_objects(store: Store, marker: Marker, spared: Sequence[Marker]) -> int:
    """Return the number of stored objects that a marker names but no marker in ``spared`` does."""
    return len(_list_named(store, marker, marker.top_names() & list_top_names(store), spared))


def sweep_temporary_files(store: Store) -> None:
    """Delete the temporary files of interrupted writes of root, claim, markers and pins. No save may be running."""
    pins = [f"{PINS}/{pin_id}" for pin_id in store.list_dir(f"{RESERVED_GROUP}/{PINS}")[1]]
    attempt_ids, _ = list_attempt_ids(store)
    names = (REMOVED, *attempt_ids, *pins, PINS)
    store.sweep(["", RESERVED_GROUP, *(f"{RESERVED_GROUP}/{name}" for name in names)])
