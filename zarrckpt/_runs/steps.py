"""Checkpoints by step: the names of their folders, and the newest of them. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from zarrckpt._commit import protocol
from zarrckpt._commit.marker import REMOVAL_KEY, REMOVED, Marker, is_table_key, marker_key, parse_marker
from zarrckpt._commit.protocol import Below, number_in
from zarrckpt._errors import CheckpointError, CorruptCheckpointError, ObjectNotFoundError, StorageError, one_line
from zarrckpt._format.documents import NODE, join
from zarrckpt._format.metadata import run_of
from zarrckpt._format.root import RESERVED_GROUP, Root
from zarrckpt._format.sealed import is_save_id
from zarrckpt._store import Store

_STEP = re.compile(r"step-(\d+)", re.ASCII)

_FOLDER_LOOKS = 5
"""How often a folder is read until it has not changed meanwhile."""

WIDTH = 8
"""Digits of a step in a name, with zeros in front: then listings of a store are in the order of steps."""


def name_of(step: int) -> str:
    """The folder of a step's checkpoint."""
    return f"step-{step:0{WIDTH}d}"


def is_name_of(name: str, step: object) -> bool:
    """Whether a manager has given this name to the checkpoint of a step, as its metadata says it."""
    return type(step) is int and step >= 0 and name == name_of(step)


def step_of(name: str) -> int | None:
    """The step of a folder that a :class:`CheckpointManager` has made, padded or not; None for others."""
    match = _STEP.fullmatch(name)
    return None if match is None else int(match[1])


@dataclass(frozen=True)
class Found:
    """A committed checkpoint of a run."""

    step: int
    name: str
    root: Root


def is_own(name: str, root: Root, run: str) -> bool:
    """Whether a checkpoint is one that a run has saved, and no copy of one under another name."""
    return run_of(root.metadata) == run and is_name_of(name, root.metadata.get("step"))


@dataclass(frozen=True)
class WithoutRoot(Below):
    """A folder with the tables of a save, and no root document.

    The save was killed right before its commit, or the root of a checkpoint was lost.
    """

    run: str = ""
    """The run that the save belongs to, as its marker says, or ""."""


def look_into(store: Store, name: str) -> Below | None:
    """Return the content of a step's folder; None if no save has left anything there.

    A root document of another program is damage, and so is a missing one beside the tables of a save. The result for an
    unfinished save, or removal, has neither root nor damage. One request for a committed checkpoint, else some more.
    """
    for _ in range(_FOLDER_LOOKS):
        try:
            return Below(name, protocol.parse_committed(store.get(f"{name}/{NODE}"), join(store.url, name)))
        except ObjectNotFoundError:
            pass
        except StorageError:
            raise
        except CheckpointError as err:
            return Below(name, damage=err)
        store.refuse_broken_link(name)
        found = _without_root(store, name)
        # A save that goes on may have committed since its root was looked for.
        if found is None or found.damage is None or not protocol.is_stored(store, f"{name}/{NODE}"):
            return found
    raise StorageError(
        f"{join(store.url, one_line(name))} changes whenever it is read: try again when its saves have ended"
    )


def _without_root(store: Store, name: str) -> Below | None:
    group = f"{name}/{RESERVED_GROUP}"
    objects, folders = store.list_dir(group)
    if REMOVED in folders and protocol.is_stored(store, f"{name}/{REMOVAL_KEY}"):
        return Below(name)
    for save_id in filter(is_save_id, folders):
        if any(is_table_key(info.key.removeprefix(f"{name}/")) for info in store.list(f"{group}/{save_id}")):
            marker = _stored_marker(store, name, save_id)
            if marker is None or not marker.failed:
                error = CorruptCheckpointError(
                    f"{join(store.url, one_line(name))} has the tables of the save {save_id} and no root document "
                    f"{NODE}: the save was killed right before its commit, or the root was deleted since"
                )
                return WithoutRoot(name, damage=error, run="" if marker is None else marker.run)
    return Below(name) if objects or folders else None


def _stored_marker(store: Store, name: str, save_id: str) -> Marker | None:
    try:
        return parse_marker(store.get(f"{name}/{marker_key(save_id)}"), "the marker")
    except StorageError as err:
        if isinstance(err, ObjectNotFoundError):
            return None
        raise
    except CheckpointError:
        return None


def newest_first(store: Store, names: Iterable[str]) -> Iterator[Below]:
    """Yield the checkpoints in folders with these names that end in a step, the greatest step first.

    Damaged ones are among them, see :func:`look_into`; unfinished saves are passed over. A request for each checkpoint.
    Raises StorageError at a folder that cannot be read, since its checkpoint would come next.
    """
    numbered = [(number, name) for name in names if (number := number_in(name)) is not None]
    for _, name in sorted(numbered, reverse=True):
        found: Below | None
        try:
            found = look_into(store, name)
        except StorageError as err:
            found = Below(name, damage=err)
            refuse_unreadable(store, [found])
        if found is not None and (found.root is not None or found.damage is not None):
            yield found


def newest_below(store: Store, names: Iterable[str]) -> tuple[str | None, list[Below]]:
    """The folder of the newest sound checkpoint, or None; and those passed over on the way, damaged or not readable.

    The newest has the greatest step in its name. Where none with a step is sound, it is the one that was committed last
    among those without.
    """
    damaged: list[Below] = []
    for below in newest_first(store, names):
        if below.root is not None:
            return below.name, damaged
        damaged.append(below)
    rest = protocol.checkpoints_below(store, [name for name in names if number_in(name) is None])
    last = protocol.newest(rest)
    if last is None:
        # The only checkpoint may be in one of them.
        refuse_unreadable(store, rest)
    return None if last is None else last.name, damaged + [below for below in rest if below.damage is not None]


def refuse_unreadable(store: Store, found: Iterable[Below]) -> None:
    """Raise StorageError for a folder that could not be read, unless its name is hidden, as those of trash cans are."""
    for below in found:
        if below.unreadable and not below.name.startswith("."):
            raise StorageError(
                f"{join(store.url, one_line(below.name))} cannot be read, and may hold the checkpoint that is looked "
                f"for: {below.damage}. Make it readable, move it elsewhere, or name another checkpoint"
            ) from below.damage


def passed_over(store: Store, below: Below) -> str:
    """Return the warning that a checkpoint was passed over that is damaged or cannot be read."""
    if below.unreadable:
        return f"{join(store.url, one_line(below.name))} is passed over, since it cannot be read: {below.damage}"
    return f"the checkpoint {join(store.url, one_line(below.name))} is passed over, since it is damaged: {below.damage}"
