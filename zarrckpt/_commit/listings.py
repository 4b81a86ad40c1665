"""Listings of folders, checked as far as that goes: a page that is no listing looks like an empty one to clients."""

from __future__ import annotations

from zarrckpt._errors import ObjectNotFoundError, StorageError
from zarrckpt._format.documents import NODE
from zarrckpt._format.root import RUN_GROUP
from zarrckpt._store import Store

RUN_KEY = f"{RUN_GROUP}/{NODE}"
"""The run's own document."""


def list_below(store: Store) -> tuple[list[str], list[str]]:
    """Return the names of the objects and the folders right below a url, sorted.

    The pages of one listing; one more request if empty. Raises StorageError if nothing is listed although the run's own
    document is there.
    """
    objects, folders = store.list_dir()
    if not objects and not folders and not store.is_local:
        refuse_false_listing(store, RUN_KEY)
    return objects, folders


def list_folders(store: Store) -> list[str]:
    """Return the names of the folders right below a url, as :func:`list_below` does."""
    return list_below(store)[1]


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
