"""Listings of folders, with a check of empty ones: to clients, an HTML page looks like an empty listing."""

from __future__ import annotations

from dataclasses import dataclass

from zarrckpt._errors import ObjectNotFoundError, StorageError
from zarrckpt._format.documents import NODE
from zarrckpt._format.root import RESERVED_GROUP, RUN_GROUP
from zarrckpt._store import Store
from zarrckpt._store._archive import is_archive_name
from zarrckpt._store._base import is_system_file
from zarrckpt._store._zip import ZipStore

RUN_KEY = f"{RUN_GROUP}/{NODE}"
"""The run's own document."""

_OF_FILESYSTEMS = "lost+found"
"""A folder that filesystems make for themselves, and that only root may read."""


@dataclass(frozen=True)
class FolderContents:
    """The names in a folder that may have checkpoints, or be a checkpoint."""

    folders: list[str]
    """The names of the folders and archives that may be checkpoints or runs, sorted."""
    objects: list[str]
    """The names of the objects, sorted."""
    has_save: bool
    """Whether documents of a save exist, so that the folder is a checkpoint, or a save to it has begun."""
    is_run: bool
    """Whether the document of a run exists."""

    @property
    def has_root(self) -> bool:
        """Whether a root document exists, of a checkpoint or of another program."""
        return NODE in self.objects


def list_below(store: Store) -> FolderContents:
    """List the folder of a url. All searches for checkpoints below a url use this function.

    One listing, and one more request if it is empty or has documents of a save. Raises StorageError if the listing is
    empty although the run's own document exists.
    """
    objects, folders = store.list_dir()
    if not objects and not folders and not store.is_local:
        refuse_false_listing(store, RUN_KEY)
    # A folder "@<name of an archive>" has the pins of the archive, or an unfinished one.
    names = {name.removeprefix("@") for name in folders if is_archive_name(name.removeprefix("@"))}
    names |= {name for name in (*folders, *filter(is_archive_name, objects)) if not name.startswith("@")}
    # A removal may have left an empty folder.
    has_save = RESERVED_GROUP in folders and store.holds(RESERVED_GROUP)
    # Tools for copies keep unfinished folders and archives under hidden names, and trash cans have such names.
    hidden = {name for name in names if name.startswith(".") or is_system_file(name)}
    return FolderContents(sorted(names - hidden - {_OF_FILESYSTEMS}), objects, has_save, RUN_GROUP in folders)


def store_below(store: Store, name: str) -> tuple[Store, str]:
    """Return the store of the checkpoint in a folder or an archive below a url, and the prefix of its keys there."""
    return (ZipStore(store, name), "") if is_archive_name(name) else (store, f"{name}/")


def refuse_false_listing(store: Store, key: str) -> None:
    """Raise StorageError if an object exists that the listing did not contain. One request."""
    try:
        store.get(key)
    except ObjectNotFoundError:
        return
    raise StorageError(
        f"listing {store.url} failed: the server's answer does not contain {key!r}, but that object exists. The answer "
        "may be the page of a login or of a proxy: check the endpoint"
    )
