"""Listings of folders, checked as far as that goes: a page that is no listing looks like an empty one to clients."""

from __future__ import annotations

from dataclasses import dataclass

from zarrckpt._errors import ObjectNotFoundError, StorageError
from zarrckpt._format.documents import NODE
from zarrckpt._format.root import RESERVED_GROUP, RUN_GROUP
from zarrckpt._store import Store

RUN_KEY = f"{RUN_GROUP}/{NODE}"
"""The run's own document."""

_OF_FILESYSTEMS = "lost+found"
"""A folder that filesystems make for themselves, and that only root may read."""


@dataclass(frozen=True)
class FolderListing:
    """The content of a folder that may hold checkpoints, or be one."""

    folders: list[str]
    """The names of the folders that may be checkpoints or runs, sorted."""
    has_root: bool
    """Whether a root document is there, of a checkpoint or of another program."""
    has_save: bool
    """Whether documents of a save are there, so that it is, or is to be, a checkpoint itself."""
    is_run: bool
    """Whether a run has a document there."""


def list_below(store: Store) -> FolderListing:
    """List the folder of a url: the one way for all that look for checkpoints below it.

    The pages of one listing; one more request if it is empty, or holds documents of a save. Raises StorageError if
    nothing is listed although the run's own document is there.
    """
    objects, folders = store.list_dir()
    if not objects and not folders and not store.is_local:
        refuse_false_listing(store, RUN_KEY)
    names = [name for name in folders if not name.startswith("@") and name != _OF_FILESYSTEMS]
    # A removal may have left the folder, empty.
    has_save = RESERVED_GROUP in folders and store.holds(RESERVED_GROUP)
    return FolderListing(names, NODE in objects, has_save, RUN_GROUP in folders)


def refuse_false_listing(store: Store, key: str) -> None:
    """Raise StorageError if an object that a listing lacks is there. One request."""
    try:
        store.get(key)
    except ObjectNotFoundError:
        return
    raise StorageError(
        f"listing {store.url} failed: the server's answer lacks {key!r}, which is there. It was no listing, but "
        "perhaps the page of a login or of a proxy: check the endpoint"
    )
