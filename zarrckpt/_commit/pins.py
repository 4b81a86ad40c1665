"""``pin`` and ``unpin``: protect a checkpoint from removal and replacement. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from zarrckpt._commit.contents import read_contents
from zarrckpt._commit.discovery import load_root
from zarrckpt._commit.marker import PINS, Pin, new_id, pin_key
from zarrckpt._errors import (
    CheckpointError,
    CheckpointPinnedError,
    CheckpointRemovedError,
    CheckpointReplacedError,
    CorruptCheckpointError,
    ForeignObjectsError,
    ObjectExistsError,
    ObjectNotFoundError,
)
from zarrckpt._format.documents import GROUP_DOCUMENT, NODE, join
from zarrckpt._format.root import RESERVED_GROUP, Root
from zarrckpt._format.sealed import is_save_id, now, parse_sealed
from zarrckpt._jobs import run_jobs
from zarrckpt._store import Store, StoreSpec, Url


def pin(
    url: Url,
    note: str = "",
    *,
    storage_options: Mapping[str, Any] | None = None,
) -> str:
    """Protect the checkpoint at a url from removal and replacement. Return the pin's id, for :func:`unpin`.

    A removal or a save with ``overwrite=True`` raises CheckpointPinnedError while the checkpoint has a pin. Pins are
    objects beside the checkpoint, so all processes that use this package respect them. They do not stop other programs
    that delete objects.

    Args:
        url: the url of a committed checkpoint.
        note: the reason for the pin, and who needs the checkpoint. It is shown in CheckpointPinnedError.

    The other arguments are those of :func:`open`. About 12 requests. Raises CheckpointNotFoundError if no checkpoint is
    committed, CheckpointRemovedError if it is being removed, and CheckpointReplacedError if a save that may replace it
    has begun. After an error, the checkpoint is not pinned.
    """
    if not isinstance(note, str):
        raise TypeError(f"note must be a str, got a {type(note).__name__}")
    store = StoreSpec(url, storage_options).open()
    pin_id = new_id()
    put_pin(store, load_root(store), pin_id, note)
    return pin_id


def put_pin(store: Store, root: Root, pin_id: str, note: str) -> None:
    """Pin the checkpoint at the store's url. An existing pin with this id is no error.

    ``root`` is the root that the caller has read. Raises CheckpointRemovedError or CheckpointReplacedError as
    :func:`pin` does.
    """
    own = Pin(pin_id, str(note), now())
    key = pin_key(pin_id)
    try:
        with suppress(ObjectExistsError):
            store.create(key, own.to_bytes())
        store.sync([key])
        # A removal puts its record, and a replacing save its marker, before it lists pins. So one of the two processes
        # finds the object of the other.
        _refuse_endangered(store, root)
        # Put last: a removal that runs at the same time would not delete this document. It makes a folder a Zarr group.
        if not store.is_archive:
            store.put(join(RESERVED_GROUP, PINS, NODE), [GROUP_DOCUMENT])
    except BaseException:
        with suppress(CheckpointError):
            store.delete([key])
        raise


def _refuse_endangered(store: Store, root: Root) -> None:
    """Raise an error if the checkpoint is being removed, was replaced, or may be replaced by a save that has begun."""
    found = read_contents(store)
    if found.removal or found.root_bytes is None:
        raise CheckpointRemovedError(
            f"the checkpoint at {store.url} was not pinned, because it was removed or is being removed: pin another "
            "checkpoint"
        )
    if found.root is None or found.root.save_id != root.save_id:
        raise CheckpointReplacedError(
            f"the checkpoint at {store.url} was not pinned, because another save replaced it: pin the new checkpoint"
        )
    if rivals := [marker for marker in found.others if found.may_commit(marker)]:
        raise CheckpointReplacedError(
            f"the checkpoint at {store.url} was not pinned, because save {rivals[0].save_id}, begun "
            f"{rivals[0].started}, may replace it: pin it after that save. If no save is running: zarrckpt recover "
            f"{store.url} --stopped"
        )


def unpin(
    url: Url,
    pin_id: str,
    *,
    storage_options: Mapping[str, Any] | None = None,
) -> None:
    """Delete a pin of the checkpoint at a url. A missing pin is no error. One request.

    ``pin_id`` is the id that :func:`pin` returned. The other arguments are those of :func:`open`.
    """
    if not is_save_id(pin_id):
        raise CheckpointError(f"{pin_id!r:.80} is no pin's id: pass the 32 hexadecimal digits from zarrckpt.pin")
    StoreSpec(url, storage_options).open().delete([pin_key(pin_id)])


def list_pins(store: Store) -> list[Pin]:
    """Return the pins of the checkpoint at a url, the oldest first. One listing, and one request for each pin."""

    def read(pin_id: str) -> Pin | None:
        key = pin_key(pin_id)
        try:
            pin = parse_sealed(Pin, store.get(key), f"the pin {join(store.url, key)}")
        except ObjectNotFoundError:
            return None
        except (CorruptCheckpointError, ForeignObjectsError):
            pin = None
        # A damaged pin still protects the checkpoint.
        return pin if pin is not None and pin.pin_id == pin_id else Pin(pin_id, "a damaged pin", "")

    ids = filter(is_save_id, store.list_dir(f"{RESERVED_GROUP}/{PINS}")[1])
    found = run_jobs((partial(read, pin_id) for pin_id in ids), store.max_concurrency)
    return sorted((one for one in found if one is not None), key=lambda one: one.created)


def refuse_pinned(store: Store) -> None:
    """Raise CheckpointPinnedError if the checkpoint at a url is pinned."""
    if found := list_pins(store):
        shown = ", ".join(f"{one.note!r:.200} (pin {one.pin_id}, {one.created})" for one in found[:3])
        raise CheckpointPinnedError(
            f"the checkpoint at {store.url} was neither removed nor replaced, because it is pinned: {shown}. If it is "
            f"not needed any more: zarrckpt.unpin({store.url!r}, {found[0].pin_id!r})"
        )
