"""Read the objects of saves, pins and removals at a url: before a save, a clean-up or a removal."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from zarrckpt._commit.discovery import CLAIM_LEVELS, find_inside_error, foreign_objects_error, holds_checkpoints
from zarrckpt._commit.marker import PINS, PROBE, Marker, is_pin_key, marker_of
from zarrckpt._commit.stored_documents import (
    get_versioned_if_stored,
    is_claimed,
    list_attempt_ids,
    parse_committed,
    read_marker,
)
from zarrckpt._errors import StorageError
from zarrckpt._format.documents import NODE
from zarrckpt._format.metadata import run_of
from zarrckpt._format.root import RESERVED_GROUP, RUN_GROUP, Root
from zarrckpt._format.sealed import is_tree
from zarrckpt._jobs import run_jobs
from zarrckpt._store._base import is_system_file

if TYPE_CHECKING:
    from zarrckpt._store import Store
    from zarrckpt._store._base import VersionedObject

_CONTENTS_TRIES = 5
"""Maximum number of reads of a url's contents, repeated while other saves or removals change them."""


@dataclass(frozen=True)
class UrlListings:
    """The root document and the names at a url, before the markers are read."""

    committed_document: VersionedObject | None
    claimed: bool
    names: set[str]
    attempt_ids: list[str]
    removal: bool
    """Whether a removal has begun and not ended."""
    in_order: bool
    """Whether ``names`` was read after ``committed_document``, and ``attempt_ids`` after ``names``."""


def read_listings(store: Store, *, to_save: bool = False) -> UrlListings:
    """Read the root document, the claim and the listings in parallel, because each costs a round trip.

    With ``to_save``, raises ForeignObjectsError if the url is inside a checkpoint, see :func:`refuse_inside`.
    """
    read_committed_document = partial(get_versioned_if_stored, key=NODE)
    reads: list[Callable[[Store], Any]] = [read_committed_document, is_claimed, list_top_names, list_attempt_ids]
    reads += [partial(find_inside_error, levels=levels) for levels in CLAIM_LEVELS if to_save]
    # A local read takes less time than the start of a thread.
    at_once = 1 if store.is_local else len(reads)
    committed_document, claimed, names, (attempt_ids, removal), *inside = run_jobs(
        [partial(read, store) for read in reads], at_once
    )
    for error in filter(None, inside):
        raise error
    return UrlListings(committed_document, claimed, names, attempt_ids, removal, in_order=False)


def _list_in_order(store: Store, seen: UrlListings) -> UrlListings:
    """Return the listings with new ones, first of the names and then of the attempts.

    An attempt puts its marker before its other objects, so every object in the first listing belongs to an attempt in
    the second.
    """
    names = list_top_names(store)
    attempt_ids, removal = list_attempt_ids(store)
    return dataclasses.replace(seen, names=names, attempt_ids=attempt_ids, removal=removal, in_order=True)


def list_top_names(store: Store) -> set[str]:
    """Return the names of the objects and folders directly below the url, none for an archive. One listing."""
    if store.is_archive:
        return set()  # An archive is replaced and deleted as a whole.
    objects, folders = store.list_dir()
    return {*objects, *folders}


def read_markers(
    store: Store, root: Root | None, seen: UrlListings, *, beside_checkpoints: bool = False
) -> list[Marker]:
    """Return the markers of all attempts. If the committed attempt has none, the root replaces it.

    Raises ForeignObjectsError if there are objects of no attempt, because a later clean-up could not assign them. With
    ``beside_checkpoints``, they are allowed in the folder of a run: if folders below the url have checkpoints, and none
    is committed at the url itself.
    """
    if seen.committed_document is not None and not seen.in_order:
        # The attempt that wrote the root may have begun after the listings were read.
        return read_markers(store, root, _list_in_order(store, seen), beside_checkpoints=beside_checkpoints)
    reads = (partial(read_marker, store, save_id) for save_id in seen.attempt_ids)
    markers = [marker for marker in run_jobs(reads, store.max_concurrency) if marker is not None]
    if root is not None and root.save_id not in {marker.save_id for marker in markers}:
        # In an archive, a root is never that of a copied folder, so the run in its metadata has saved it.
        marker = marker_of(root)
        markers.append(msgspec.structs.replace(marker, run_id=run_of(root.metadata)) if store.is_archive else marker)
    # A tree without a marker belongs to an attempt that was cleaned up: a repeated put arrived later.
    known = {RESERVED_GROUP, NODE, *filter(is_tree, seen.names), *filter(is_system_file, seen.names)}
    known |= {RUN_GROUP} if beside_checkpoints else set()
    for marker in markers:
        known |= marker.top_names()
    foreign = seen.names - known
    if foreign and not seen.in_order:
        return read_markers(store, root, _list_in_order(store, seen), beside_checkpoints=beside_checkpoints)
    if foreign and beside_checkpoints and seen.committed_document is None and holds_checkpoints(store):
        # A save was begun by mistake in the folder of a run. Objects of others in that folder stay.
        return markers
    if foreign:
        # They may have been cleaned up after the listing, with their marker.
        foreign = _still_stored(store, foreign)
    if foreign:
        raise foreign_objects_error(
            store, foreign, committed=seen.committed_document is not None, begun=store.holds(RESERVED_GROUP)
        )
    return markers


def _still_stored(store: Store, names: set[str]) -> set[str]:
    """Return the names that still exist at the url, without empty folders."""
    objects, folders = store.list_dir()
    return {*names.intersection(objects), *(name for name in folders if name in names and store.holds(name))}


@dataclass(frozen=True)
class UrlContents:
    """The objects of saves, pins and removals at a url, for a clean-up."""

    root_bytes: bytes | None
    root: Root | None
    """The committed root, or None if none is committed or it is damaged."""
    claimed: bool
    markers: list[Marker]
    probes: list[str]
    """Keys of objects with which a store's conditional puts were tested."""
    system_files: list[str]
    """Keys of files that operating systems have added, at the url and below the group of its saves."""
    pins: list[str]
    """Keys of the pins of the checkpoint, or of an earlier one that is gone."""
    removal: bool = False
    """Whether a removal has begun and not ended."""

    @property
    def begun(self) -> bool:
        """Whether any object shows that a save or a removal has begun here."""
        return self.root_bytes is not None or self.claimed or bool(self.markers or self.pins) or self.removal

    @property
    def others(self) -> list[Marker]:
        """The markers of all attempts except the committed one."""
        return [marker for marker in self.markers if self.root is None or marker.save_id != self.root.save_id]

    def may_commit(self, marker: Marker) -> bool:
        """Whether an attempt could commit if it still runs: the save that it replaces is still committed."""
        return not marker.failed and marker.replaced_id == ("" if self.root is None else self.root.save_id)


def is_of_run(root: Root | None, markers: Iterable[Marker], run_id: str) -> bool:
    """Whether saves of a run have written the checkpoint, or without its root the leftovers, at a url. No I/O.

    The marker counts too, because a copy that ``zarrckpt cp`` has made has the same root document.
    """
    if root is not None:
        markers = [marker for marker in markers if marker.save_id == root.save_id]
    return (root is None or run_of(root.metadata) == run_id) and all(marker.run_id == run_id for marker in markers)


def read_contents(store: Store, *, allow_damaged: bool = False, beside_checkpoints: bool = False) -> UrlContents:
    """Return the objects of saves, pins and removals at a url.

    With ``allow_damaged``, or if a removal has not ended, a damaged root counts as none. ``beside_checkpoints`` as in
    :func:`read_markers`. Raises ForeignObjectsError for any other object, CorruptCheckpointError for a damaged root,
    StorageError if other saves commit during each of several reads.
    """
    for _ in range(_CONTENTS_TRIES):
        seen = _list_in_order(store, read_listings(store))
        root = parse_committed(store, seen.committed_document, allow_damaged=allow_damaged or seen.removal)
        markers = read_markers(store, root, seen, beside_checkpoints=beside_checkpoints and not seen.removal)
        group = [info.key for info in store.list(RESERVED_GROUP)]
        probes = [key for key in group if key.startswith(f"{RESERVED_GROUP}/{PROBE}")]
        added = [*filter(is_system_file, (*group, *sorted(seen.names)))]
        root_bytes = None if seen.committed_document is None else seen.committed_document.data
        # A save that commits in between changes which of the attempts could still commit.
        again = get_versioned_if_stored(store, NODE)
        if root_bytes == (None if again is None else again.data):
            pins = list_pin_keys(store)
            return UrlContents(root_bytes, root, seen.claimed, markers, probes, added, pins, seen.removal)
    raise StorageError(
        f"reading {store.url} failed: other saves committed during each of {_CONTENTS_TRIES} tries. Try again when "
        "they have ended"
    )


def list_pin_keys(store: Store) -> list[str]:
    """Return the keys of all pins at a url and of their group. One listing."""
    return [info.key for info in store.list(f"{RESERVED_GROUP}/{PINS}") if is_pin_key(info.key)]
