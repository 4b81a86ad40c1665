"""Read the documents of saves at a url: the root document, the claim and the markers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zarrckpt._commit.marker import CLAIM_KEY, REMOVAL_KEY, REMOVED, Claim, Marker, marker_key
from zarrckpt._errors import CorruptCheckpointError, ForeignObjectsError, ObjectNotFoundError, one_line
from zarrckpt._format.documents import NODE, join
from zarrckpt._format.parsing import parse_root
from zarrckpt._format.root import RESERVED_GROUP, Root
from zarrckpt._format.sealed import is_save_id, parse_sealed

if TYPE_CHECKING:
    from zarrckpt._store import Store
    from zarrckpt._store._base import VersionedObject


def parse_root_document(data: bytes, url: str) -> Root:
    """Parse and validate the bytes of a root document. Errors name the url."""
    return parse_root(data, f"the root document {one_line(join(url, NODE))}")


def read_root(store: Store) -> Root:
    """Read and validate the committed root document. One request. Raises ObjectNotFoundError if there is none."""
    return parse_root_document(store.get(NODE), store.url)


def get_if_stored(store: Store, key: str) -> bytes | None:
    """Return the bytes of a small object, or None if it does not exist. One request."""
    try:
        return store.get(key)
    except ObjectNotFoundError:
        return None


def is_stored(store: Store, key: str) -> bool:
    """Whether a small object exists. One request."""
    return get_if_stored(store, key) is not None


def get_versioned_if_stored(store: Store, key: str) -> VersionedObject | None:
    """Return a small object and its version, or None if it does not exist. Cost as :meth:`Store.get_versioned`."""
    try:
        return store.get_versioned(key)
    except ObjectNotFoundError:
        return None


def parse_committed(store: Store, committed_document: VersionedObject | None, *, allow_damaged: bool) -> Root | None:
    """Return the root of a document, or None if there is none, or if it is damaged and ``allow_damaged`` is true.

    Raises CorruptCheckpointError or ForeignObjectsError otherwise.
    """
    if committed_document is None:
        return None
    try:
        return parse_root_document(committed_document.data, store.url)
    except CorruptCheckpointError as err:
        if not allow_damaged:
            raise CorruptCheckpointError(f"{err}. overwrite=True replaces it, zarrckpt.remove deletes it") from err
        return None
    except ForeignObjectsError:
        # If there is a claim, another program has replaced the root document of a checkpoint.
        if not (allow_damaged and is_stored(store, CLAIM_KEY)):
            raise
        return None


def is_claimed(store: Store) -> bool:
    """Whether an attempt has, or may have, claimed the canonical tree. One request."""
    try:
        parse_sealed(Claim, store.get(CLAIM_KEY), f"the claim {join(store.url, CLAIM_KEY)}")
    except ObjectNotFoundError:
        return False
    except (CorruptCheckpointError, ForeignObjectsError):
        return True  # The claim cannot be read, so another attempt may have the canonical tree.
    return True


def list_attempt_ids(store: Store) -> tuple[list[str], bool]:
    """Return the ids of all attempts with objects at the url, and whether a removal has begun and not ended.

    One listing, and one request if there is a folder of a removal.
    """
    _, names = store.list_dir(RESERVED_GROUP)
    # The folder of a removal may exist without its document.
    return [*filter(is_save_id, names)], REMOVED in names and is_stored(store, REMOVAL_KEY)


def read_marker(store: Store, save_id: str) -> Marker | None:
    """Return the marker of an attempt, or None if it is missing, damaged or a copy of another one. One request."""
    key = marker_key(save_id)
    try:
        marker = parse_sealed(Marker, store.get(key), f"the marker {join(store.url, key)}")
        # A copy of another attempt's marker does not list this attempt's objects.
        return marker if marker.save_id == save_id else None
    except ObjectNotFoundError:
        return None  # The attempt was cleaned up after the listing, or only its tables are left.
    except (CorruptCheckpointError, ForeignObjectsError):
        return None  # A damaged marker cannot be trusted, so the attempt's objects are not deleted.


def was_removed(store: Store) -> bool:
    """Whether a checkpoint without its root document was removed rather than damaged. One or two requests."""
    # The record is read first: a removal deletes it last, so without a record the claim is gone too.
    _, removal = list_attempt_ids(store)
    return removal or not is_stored(store, CLAIM_KEY)
