"""Checkpoints by step: the names of their folders, and the newest of them. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from zarrckpt._commit.contents import is_of_run
from zarrckpt._commit.discovery import CheckpointFolder, find_checkpoints, find_newest, number_in
from zarrckpt._commit.listings import store_below
from zarrckpt._commit.marker import REMOVAL_KEY, REMOVED, Marker, is_table_key, marker_key
from zarrckpt._commit.stored_documents import is_stored, parse_root_document
from zarrckpt._errors import CheckpointError, CorruptCheckpointError, ObjectNotFoundError, StorageError, one_line
from zarrckpt._format.documents import NODE, join
from zarrckpt._format.root import RESERVED_GROUP, Root
from zarrckpt._format.sealed import is_save_id, parse_sealed
from zarrckpt._store import Store
from zarrckpt._store._archive import SUFFIX

_STEP = re.compile(r"step-(\d+)", re.ASCII)

_FOLDER_TRIES = 5
"""Maximum number of reads of a folder, repeated while saves change it."""

WIDTH = 8
"""Number of digits of a step in a name, with leading zeros, so that listings of a store are in the order of steps."""


def name_of(step: int, suffix: str = "") -> str:
    """Return the name of the folder of a step's checkpoint, or with the suffix of archives, of its archive."""
    return f"step-{step:0{WIDTH}d}{suffix}"


def is_name_of(name: str, step: object) -> bool:
    """Whether a manager would use this name for a checkpoint with this ``step`` in its metadata."""
    return type(step) is int and step >= 0 and name.removesuffix(SUFFIX) == name_of(step)


def step_of(name: str) -> int | None:
    """Return the step of a folder or archive named ``step-`` and a number, with or without leading zeros, or None."""
    match = _STEP.fullmatch(name.removesuffix(SUFFIX))
    return None if match is None else int(match[1])


def step_folders(names: Iterable[str]) -> dict[str, int]:
    """Return the step of each folder whose name is that of a step, in the order of the steps."""
    numbered = sorted((step, name) for name in names if (step := step_of(name)) is not None)
    return {name: step for step, name in numbered}


@dataclass(frozen=True)
class RunCheckpoint:
    """A committed checkpoint of a run."""

    step: int
    name: str
    root: Root


def is_own(name: str, root: Root | None, markers: Iterable[Marker], run_id: str) -> bool:
    """Whether saves of a run have written the checkpoint, or without its root the leftovers, under this name.

    A user's copy does not count: its name is another one, or its marker does not name the run.
    """
    step = step_of(name) if root is None else root.metadata.get("step")
    return is_name_of(name, step) and is_of_run(root, markers, run_id)


@dataclass(frozen=True)
class WithoutRoot(CheckpointFolder):
    """A folder with the tables of a save but no root document.

    The save was killed directly before its commit, or the root of a checkpoint was lost.
    """

    run_id: str = ""
    """The id of the run in the save's marker, or ""."""


def read_folder(store: Store, name: str) -> CheckpointFolder | None:
    """Return the checkpoint or the unfinished save in a step's folder, or None if there are no objects of a save.

    A root document of another program counts as damage, and so does a missing one if there are tables of a save. The
    result for an unfinished save or removal has neither root nor damage. One request for a committed checkpoint, and
    some more otherwise.
    """
    own, prefix = store_below(store, name)
    for _ in range(_FOLDER_TRIES):
        try:
            return CheckpointFolder(name, parse_root_document(own.get(f"{prefix}{NODE}"), join(store.url, name)))
        except ObjectNotFoundError:
            pass
        except StorageError:
            raise
        except CheckpointError as err:
            return CheckpointFolder(name, damage=err)
        store.refuse_broken_link(name)
        found = _without_root(own, prefix, name)
        # A running save may have committed after the first read of its root document.
        if found is None or found.damage is None or not is_stored(own, f"{prefix}{NODE}"):
            return found
    raise StorageError(
        f"reading {join(store.url, one_line(name))} failed: saves changed it during each of {_FOLDER_TRIES} tries. Try "
        "again when they have ended"
    )


def _without_root(store: Store, prefix: str, name: str) -> CheckpointFolder | None:
    """Describe a folder without a root document. ``prefix`` as in :func:`store_below`."""
    group = f"{prefix}{RESERVED_GROUP}"
    objects, folders = store.list_dir(group)
    if REMOVED in folders and is_stored(store, f"{prefix}{REMOVAL_KEY}"):
        return CheckpointFolder(name)
    for save_id in filter(is_save_id, folders):
        if any(is_table_key(info.key.removeprefix(prefix)) for info in store.list(f"{group}/{save_id}")):
            marker = _stored_marker(store, f"{prefix}{marker_key(save_id)}")
            if marker is None or not marker.failed:
                where = join(store.url, one_line(prefix.rstrip("/")))
                error = CorruptCheckpointError(
                    f"{where} has the tables of the save {save_id} but no root document {NODE}: the save is about to "
                    "commit, or was killed directly before its commit, or the root was deleted later"
                )
                return WithoutRoot(name, damage=error, run_id="" if marker is None else marker.run_id)
    return CheckpointFolder(name) if objects or folders else None


def _stored_marker(store: Store, key: str) -> Marker | None:
    try:
        return parse_sealed(Marker, store.get(key), "the marker")
    except StorageError as err:
        if isinstance(err, ObjectNotFoundError):
            return None
        raise
    except CheckpointError:
        return None


def newest_first(store: Store, names: Iterable[str]) -> Iterator[CheckpointFolder]:
    """Yield the checkpoints in the folders whose names end with a step, the greatest step first.

    Damaged ones are included, see :func:`read_folder`. Unfinished saves are skipped. One request for each checkpoint.
    Raises StorageError at a folder that cannot be read, because its checkpoint may be the next one.
    """
    numbered = [(number, name) for name in names if (number := number_in(name)) is not None]
    for _, name in sorted(numbered, reverse=True):
        found: CheckpointFolder | None
        try:
            found = read_folder(store, name)
        except StorageError as err:
            found = CheckpointFolder(name, damage=err)
            refuse_unreadable(store, [found])
        if found is not None and (found.root is not None or found.damage is not None):
            yield found


def newest_below(store: Store, names: Iterable[str]) -> tuple[str | None, list[CheckpointFolder]]:
    """Return the folder of the newest sound checkpoint, or None, and the damaged or unreadable ones that were skipped.

    The newest has the greatest step in its name. If no checkpoint with a step is sound, it is the one that was
    committed last among those without a step.
    """
    damaged: list[CheckpointFolder] = []
    for below in newest_first(store, names):
        if below.root is not None:
            return below.name, damaged
        damaged.append(below)
    rest = find_checkpoints(store, [name for name in names if number_in(name) is None])
    last = find_newest(rest)
    if last is None:
        # The only checkpoint may be in one of them.
        refuse_unreadable(store, rest)
    return None if last is None else last.name, damaged + [below for below in rest if below.damage is not None]


def refuse_unreadable(store: Store, found: Iterable[CheckpointFolder]) -> None:
    """Raise StorageError for a folder that could not be read."""
    for below in found:
        if below.unreadable:
            raise StorageError(
                f"{join(store.url, one_line(below.name))} cannot be read, but may have the requested checkpoint: "
                f"{below.damage}. Make it readable, move it elsewhere, or name another checkpoint"
            ) from below.damage


def skip_warning(store: Store, below: CheckpointFolder) -> str:
    """Return the text of the warning that a damaged or unreadable checkpoint was skipped."""
    if below.unreadable:
        return f"{join(store.url, one_line(below.name))} cannot be read and was skipped: {below.damage}"
    return f"the checkpoint {join(store.url, one_line(below.name))} is damaged and was skipped: {below.damage}"
