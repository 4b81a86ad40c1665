"""Find checkpoints at a url, in the folders directly below it and in the folders above, and explain what is found."""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from zarrckpt._commit.foreign_files import describe_files, names_text
from zarrckpt._commit.listings import FolderContents, list_below, store_below
from zarrckpt._commit.marker import CLAIM_KEY, Claim, Marker, marker_key
from zarrckpt._commit.stored_documents import list_attempt_ids, parse_root_document, read_marker
from zarrckpt._errors import (
    CheckpointError,
    CheckpointNotFoundError,
    ForeignObjectsError,
    ObjectNotFoundError,
    StorageError,
    one_line,
)
from zarrckpt._format.documents import NODE, join
from zarrckpt._format.parsing import parse_root
from zarrckpt._format.root import RESERVED_GROUP, RUN_GROUP, Root
from zarrckpt._format.sealed import is_tree, parse_sealed
from zarrckpt._jobs import run_jobs
from zarrckpt._store._archive import SUFFIX

if TYPE_CHECKING:
    from zarrckpt._store import Store

CLAIM_LEVELS = range(1, 4)
"""Levels of the folders above a url in which a save looks for a claim, before it begins. One request for each."""

_ROOT_LEVELS = 8
"""Number of folders above a url in which an error's text looks for a root document."""

_NUMBER = re.compile(r"(?:.*\D)?(\d+)", re.ASCII | re.DOTALL)

_MAX_FOLDERS_READ = 200
"""Maximum number of folders that are read for an error's text."""


def load_root(store: Store) -> Root:
    """Read and validate the committed root document. One request, and some more if there is none.

    Raises CheckpointNotFoundError if there is none. The error's text names an unfinished save or removal, or the
    checkpoints in folders below.
    """
    return load_root_document(store)[1]


def load_root_document(store: Store) -> tuple[bytes, Root]:
    """Return the bytes of the committed root document, and the root, as :func:`load_root` does."""
    try:
        document = store.get(NODE)
        return document, parse_root_document(document, store.url)
    except ObjectNotFoundError as err:
        raise CheckpointNotFoundError(_explain_absence(store)) from err
    except ForeignObjectsError as err:
        if found := _describe_contents(store):
            raise ForeignObjectsError(f"{err}. {found}") from err
        if found := _describe_checkpoint_above(store):
            raise ForeignObjectsError(found) from err
        raise


def _explain_absence(store: Store) -> str:
    """Return the reason that no checkpoint opens at a url without a root document, for an error."""
    more = ""
    try:
        listed = list_below(store)
        if listed.has_save:
            return _explain_unfinished(store)
        if found := _describe_contents(store, listed):
            return f"{store.url} is no checkpoint. {found}"
        if listed.folders:
            more = f". It has {names_text(listed.folders)}. If these are runs, list them: zarrckpt ls {store.url}"
    except StorageError as err:
        if err.no_bucket or isinstance(err.__cause__, FileNotFoundError):
            # A caller must not take a missing bucket for a missing checkpoint and begin anew.
            raise
        more = f". A listing failed too: {err}"
    if above := _describe_checkpoint_above(store):
        return above
    return f"nothing is committed at {store.url}, because it has no {NODE}: check the path{more}"


def _explain_unfinished(store: Store) -> str:
    """Return the state of the saves or of the removal at a url without a root document, for an error."""
    attempt_ids, removal = list_attempt_ids(store)
    if removal:
        return f"the checkpoint at {store.url} is being removed: {removal_next_step(store)}"
    markers = run_jobs((partial(read_marker, store, save_id) for save_id in attempt_ids), store.max_concurrency)
    ended = bool(markers) and all(marker is not None and marker.failed for marker in markers)
    return (
        f"the save at {store.url} "
        f"{'has failed' if ended else 'was begun but never committed (or it is still running)'}. "
        "Load an earlier checkpoint, or save again: leftovers do not block a new save"
    )


def removal_next_step(store: Store) -> str:
    """Return the next step after an unfinished removal, for an error."""
    return f"zarrckpt.recover (zarrckpt recover {store.url}) finishes an interrupted removal"


@dataclass(frozen=True)
class CheckpointFolder:
    """A folder directly below another one, with a checkpoint or a save that has begun."""

    name: str
    root: Root | None = None
    """The root of the checkpoint, or None if none is committed or the root document is damaged."""
    damage: CheckpointError | None = None
    """The reason that it cannot be opened. A StorageError if it cannot be read, so it need not be a checkpoint."""

    @property
    def unreadable(self) -> bool:
        """Whether the folder could not be read."""
        return isinstance(self.damage, StorageError)


def find_checkpoints(
    store: Store, names: Iterable[str] | None = None, *, unfinished: bool = False
) -> list[CheckpointFolder]:
    """Return the checkpoints in folders directly below a url, or in the folders ``names``, in the order of the names.

    Folders that cannot be read are included, see :attr:`CheckpointFolder.unreadable`. Only a failure of the listing
    itself is raised. With ``unfinished``, also return folders in which a save has begun but none has committed. One
    request for each folder, and with ``unfinished`` another one for each folder without a root document. Archives count
    as folders, and cost two or three requests.
    """
    names = list_below(store).folders if names is None else names
    return _read_folders(store, names, read_roots=True, unfinished=unfinished)


def find_saves(store: Store, names: Iterable[str]) -> list[CheckpointFolder]:
    """Return those of the folders ``names`` in which saves have begun, or that cannot be read.

    Reads no roots but those of archives. One request for each folder.
    """
    return _read_folders(store, names, read_roots=False, unfinished=True)


def _read_folders(store: Store, names: Iterable[str], *, read_roots: bool, unfinished: bool) -> list[CheckpointFolder]:
    def read(name: str) -> CheckpointFolder | None:
        own, prefix = store_below(store, name)
        try:
            if read_roots or own.is_archive:
                with suppress(ObjectNotFoundError):
                    document = own.get(f"{prefix}{NODE}")
                    return CheckpointFolder(name, parse_root_document(document, join(store.url, name)))
            store.refuse_broken_link(name)
            return CheckpointFolder(name) if unfinished and own.holds(f"{prefix}{RESERVED_GROUP}") else None
        except ForeignObjectsError:
            return None
        except CheckpointError as err:
            return CheckpointFolder(name, damage=err)

    found = run_jobs((partial(read, name) for name in names if not name.startswith("@")), store.max_concurrency)
    return [one for one in found if one is not None]


def holds_checkpoints(store: Store) -> bool:
    """Whether folders directly below a url have checkpoints or saves that have begun.

    One listing, and one or two requests for each folder.
    """
    return any(not below.unreadable for below in find_checkpoints(store, unfinished=True))


def find_newest(found: Iterable[CheckpointFolder]) -> CheckpointFolder | None:
    """Return the committed checkpoint whose folder name ends with the greatest number, or None.

    If no name ends with a number, return the checkpoint that was committed last.
    """
    committed: list[tuple[tuple[int, str, str], CheckpointFolder]] = []
    for item in found:
        if item.root is not None:
            number = number_in(item.name)
            order = (-1, item.root.created, item.name) if number is None else (number, "", item.name)
            committed.append((order, item))
    return max(committed, key=lambda pair: pair[0])[1] if committed else None


def number_in(name: str) -> int | None:
    """Return the last number in a folder's name, which is its step, or None if the name does not end with a number."""
    match = _NUMBER.fullmatch(name.removesuffix(SUFFIX))
    return None if match is None else int(match[1])


def _last_number(name: str) -> int:
    return number_in(name) or 0


def _describe_contents(store: Store, listed: FolderContents | None = None) -> str:
    """Describe the checkpoints below a url, or other libraries' files there, with the next step. "" if there are none.

    One listing unless it is passed, and one request for each folder.
    """
    try:
        listed = listed or list_below(store)
        # If there are very many folders, only those with the greatest numbers are read.
        last_names = sorted(listed.folders, key=_last_number)[-_MAX_FOLDERS_READ:]
        below = find_checkpoints(store, last_names, unfinished=True)
    except StorageError:
        return ""
    found = [item for item in below if not item.unreadable]
    # Folders with a number first, because they may be steps.
    unread = sorted((item.name for item in below if item.unreadable), key=lambda name: number_in(name) is None)
    more = f"{names_text(unread)} there cannot be read" if unread else ""
    if not found:
        return more or describe_files(store, listed)
    checkpoints = "1 checkpoint" if len(found) == 1 else f"{len(found)} checkpoints"
    if (last := find_newest(found)) is None:
        return f"It is a folder of {checkpoints}, none of them is committed{more and f'. {more}'}"
    newest = join(store.url, one_line(last.name))
    return (
        f"It is a folder of {checkpoints}, the newest is {newest}.{more and f' {more}.'} Pass that url, or the result "
        f"of zarrckpt.latest({store.url!r}). List them: zarrckpt ls {store.url}"
    )


def _describe_checkpoint_above(store: Store) -> str:
    """Return the checkpoint that contains a url, and how to load that part, for an error. "" if none is found."""
    names = store.url.split("/")

    def root(levels: int) -> Root | None:
        try:
            return parse_root(store.get_above(levels, NODE), "a root document")
        except CheckpointError:
            return None

    # The root of a filesystem is not read.
    reads = (partial(root, levels) for levels in range(1, min(_ROOT_LEVELS, len(names) - 1)))
    for levels, found in enumerate(run_jobs(reads, _ROOT_LEVELS), 1):
        if found is not None:
            outer, inner = "/".join(names[:-levels]), [name for name in names[-levels:] if not is_tree(name)]
            part = ".".join(inner)
            known = any(fqn == part or fqn.startswith(f"{part}.") for fqn in found.entries)
            how = f": zarrckpt ls {outer} {part}, or in Python zarrckpt.open({outer!r})[...] and keys={part!r}"
            return f"{store.url} lies inside the checkpoint {outer}: use that url{how if known else ''}"
    return ""


def refuse_inside(store: Store) -> None:
    """Raise ForeignObjectsError if the url is inside a checkpoint, as a save does. At least 3 small requests."""
    reads = [partial(find_inside_error, store, levels) for levels in CLAIM_LEVELS]
    for error in filter(None, run_jobs(reads, 1 if store.is_local else len(reads))):
        raise error


def find_inside_error(store: Store, levels: int) -> ForeignObjectsError | None:
    """Return the error for a save below the folder that is ``levels`` above the url, or None if it is allowed.

    It is not allowed if that folder has a checkpoint, or a save has begun there that writes below a folder with the
    name of the url. One small request, and two more if there is a claim.
    """
    try:
        claimant = parse_sealed(Claim, store.get_above(levels, CLAIM_KEY), "the claim above").save_id
    except CheckpointError:
        # There is no claim, or this process has no permission to read that folder. Both allow a save.
        return None
    outer, name = store.url.rsplit("/", levels)[:2]
    outer = outer or "/"
    try:
        parse_root(store.get_above(levels, NODE), "the root above")
        return ForeignObjectsError(
            f"{store.url} lies inside the checkpoint at {outer}, so a save there would prevent that checkpoint's "
            "replacement and removal. Nothing was changed. Save to a path beside it, or remove that checkpoint first: "
            f"zarrckpt rm {outer}"
        )
    except CheckpointError:
        pass
    try:
        # All other attempts write below "@" and their id.
        marker = parse_sealed(Marker, store.get_above(levels, marker_key(claimant)), "the marker above")
    except CheckpointError:
        return None
    if marker.tree or name not in marker.top_names():
        return None
    return ForeignObjectsError(
        f"{store.url} lies inside {outer}, where a save was begun that also writes {name!r}. Nothing was changed. "
        f"Save to another path. If no save to {outer} is running: zarrckpt recover {outer} --stopped"
    )


def foreign_objects_error(store: Store, names: set[str], *, committed: bool, begun: bool) -> ForeignObjectsError:
    """Return the error for names at a url that do not belong to its attempts: other checkpoints, a run, or files."""
    own = committed or begun
    if not own and (found := _describe_contents(store)):
        return ForeignObjectsError(
            f"{store.url} is no checkpoint. {found}. Nothing was changed. To save, use another path"
        )
    if not own and RUN_GROUP in names:
        return ForeignObjectsError(
            f"{store.url} is the folder of a run without checkpoints. Nothing was changed. Save to a path below"
        )
    last_names = sorted(names, key=_last_number)[-_MAX_FOLDERS_READ:] if own else []
    inner = [below for below in find_checkpoints(store, last_names, unfinished=True) if not below.unreadable]
    if inner:
        url = join(store.url, one_line(inner[0].name))
        more = f" (and {len(inner) - 1} more)" if len(inner) > 1 else ""
        if not committed:
            return ForeignObjectsError(
                f"a save was begun at {store.url} and did not commit, and there is a checkpoint below: "
                f"{inner[0].name!r}{more}. Nothing was changed. If no save to {store.url} is running, remove the "
                f"leftovers of that save: zarrckpt recover {store.url} --stopped"
            )
        return ForeignObjectsError(
            f"{store.url} has a checkpoint and another one below: {inner[0].name!r}{more}. Nothing was changed. If you "
            f"need it, copy it (zarrckpt cp {url} OTHER). Then remove it (zarrckpt rm {url})"
        )
    return ForeignObjectsError(
        f"{store.url} has objects that no zarrckpt save wrote: {names_text(sorted(names))}. Nothing was changed. To "
        "save, use another path"
    )
