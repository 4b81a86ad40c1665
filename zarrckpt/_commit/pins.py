"""``pin`` and ``unpin``: keep a checkpoint from being removed or replaced. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from zarrckpt._commit import protocol
from zarrckpt._commit.marker import PINS, Pin, pin_key
from zarrckpt._errors import CheckpointError, CheckpointRemovedError, CheckpointReplacedError, ObjectExistsError
from zarrckpt._format.documents import NODE, group_document, join
from zarrckpt._format.json_values import dumps
from zarrckpt._format.root import RESERVED_GROUP, Root
from zarrckpt._format.sealed import is_save_id, now
from zarrckpt._store import Store, StoreSpec, Url


def pin(
    url: Url,
    note: str = "",
    *,
    storage_options: Mapping[str, Any] | None = None,
) -> str:
    """Keep the checkpoint at a url from being removed or replaced; return the pin's id, for :func:`unpin`.

    A removal, or a save with ``overwrite=True``, raises CheckpointPinnedError as long as any pin is there. Pins are
    objects beside the checkpoint, so they hold for every process that uses this package; nothing holds back who deletes
    objects in another way.

    Args:
        url: of a committed checkpoint.
        note: who needs it, and what for: shown to whoever would remove it.

    The other arguments are those of :func:`open`. About 12 requests. Raises CheckpointNotFoundError where nothing is
    committed; CheckpointRemovedError where the checkpoint is being removed, and CheckpointReplacedError where a save
    has been begun that may replace it: it is not pinned then.
    """
    if not isinstance(note, str):
        raise TypeError(f"note must be a str, got a {type(note).__name__}")
    place = StoreSpec(url, storage_options).open()
    pin_id = protocol.new_id()
    put_pin(place, protocol.load_root(place), pin_id, note)
    return pin_id


def put_pin(place: Store, root: Root, pin_id: str, note: str) -> None:
    """Pin the checkpoint whose root was read just now, under an id; a pin with that id is no error."""
    own = Pin(pin_id, note, now())
    key = pin_key(pin_id)
    try:
        with suppress(ObjectExistsError):
            place.create(key, own.to_bytes())
        place.sync([key])
        # A removal puts its record, and a replacing save its marker, before it looks for pins: one sees the other.
        _refuse_endangered(place, root)
        # Only now, when no removal is running: it would leave this document behind.
        place.put(join(RESERVED_GROUP, PINS, NODE), [dumps(group_document())])
    except BaseException:
        with suppress(CheckpointError):
            place.delete([key])
        raise


def _refuse_endangered(place: Store, root: Root) -> None:
    found = protocol.leftovers(place)
    if found.removal or found.root_bytes is None:
        raise CheckpointRemovedError(f"the checkpoint at {place.url} is being removed, or is gone: pin another one")
    if found.root is None or found.root.save_id != root.save_id:
        raise CheckpointReplacedError(f"the checkpoint at {place.url} was replaced meanwhile: pin it again")
    if rivals := [marker for marker in found.others if found.may_commit(marker)]:
        raise CheckpointReplacedError(
            f"save {rivals[0].save_id}, begun {rivals[0].started}, is to replace the checkpoint at {place.url}: pin it "
            f"when that has ended, or, if no save is running: zarrckpt recover {place.url} --stopped"
        )


def unpin(
    url: Url,
    pin_id: str,
    *,
    storage_options: Mapping[str, Any] | None = None,
) -> None:
    """Delete a pin of the checkpoint at a url; one that is gone is no error. One request.

    ``pin_id`` is what :func:`pin` returned. The other arguments are those of :func:`open`.
    """
    if not is_save_id(pin_id):
        raise CheckpointError(f"{pin_id!r:.80} is no pin's id: zarrckpt.pin returns 32 hexadecimal digits")
    StoreSpec(url, storage_options).open().delete([pin_key(pin_id)])
