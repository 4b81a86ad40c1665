"""Begin, commit, replace and clean up, in an order that makes a checkpoint appear as a whole or not at all.

Every attempt writes keys that no other attempt ever uses. The first attempt at a url claims the canonical paths. Every
later attempt writes below ``@<its id>``. The root document names the tree of its attempt. It is put last and
conditionally. ``docs/explanation/commit.md`` has the reasons and a table of crashes.
"""

from __future__ import annotations

import dataclasses
import re
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from zarrckpt._commit.listings import list_below
from zarrckpt._commit.marker import (
    CLAIM_KEY,
    PINS,
    PROBE,
    REMOVAL_KEY,
    REMOVED,
    Marker,
    Pin,
    claim_bytes,
    is_pin_key,
    is_table_key,
    marker_key,
    marker_of,
    parse_claim,
    parse_marker,
    parse_pin,
    pin_key,
)
from zarrckpt._errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CheckpointPinnedError,
    CheckpointRemovedError,
    CorruptCheckpointError,
    ForeignObjectsError,
    ObjectExistsError,
    ObjectNotFoundError,
    StorageError,
    one_line,
)
from zarrckpt._format.chunk_codec import encode_chunk
from zarrckpt._format.chunk_layout import RawArray
from zarrckpt._format.crc32c import crc32c
from zarrckpt._format.documents import NODE, group_document, join
from zarrckpt._format.json_values import dumps
from zarrckpt._format.root import HISTORY, RESERVED_GROUP, RUN_GROUP, Root, Table, parse_root, table_node
from zarrckpt._format.sealed import is_save_id, is_tree
from zarrckpt._jobs import run_jobs
from zarrckpt._store._failures import NO_BUCKET, is_full

if TYPE_CHECKING:
    from zarrckpt._store import Buffer, Store
    from zarrckpt._store._base import Versioned

_CLAIM_LEVELS = 3
"""Number of folders above a url in which a save looks for a claim before it begins. One parallel request for each."""

_ROOT_LEVELS = 8
"""Number of folders above a url in which an error's text looks for a root document."""

_NUMBER = re.compile(r"(?:.*\D)?(\d+)", re.ASCII | re.DOTALL)

_MAX_FOLDERS_READ = 200
"""Maximum number of folders that are read for an error's text."""

_CONTENTS_TRIES = 5
"""Maximum number of reads of a url's contents, repeated while other saves or removals change them."""

_DELETE_BATCH = 1000
"""Number of objects that a clean-up deletes between two checks for a newer removal. S3 deletes 1000 per request."""

_CLEAN_TRIES = 3
"""Maximum number of listings of a clean-up. It leaves objects that the last listing contains to the next clean-up."""


def new_id() -> str:
    """Return a new random save id."""
    return uuid.uuid4().hex


@dataclass(frozen=True)
class Attempt:
    """One save from begin to commit. Only the coordinator has it."""

    marker: Marker
    base: Versioned | None
    """The root document at begin, or None. The commit replaces exactly this version."""
    history: tuple[str, ...]
    older: tuple[Marker, ...]
    """The attempts whose markers were read at begin. This attempt may delete only their objects."""
    unmarked: tuple[str, ...] = ()
    """The ids of attempts without a marker at begin: they were killed while they put it, or are putting it."""

    @property
    def save_id(self) -> str:
        return self.marker.save_id

    @property
    def tree(self) -> str:
        return self.marker.tree

    @property
    def base_id(self) -> str:
        """The id of the save that was committed at begin, or ""."""
        return self.history[0] if self.history else ""


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
        return document, parse_committed(document, store.url)
    except ObjectNotFoundError as err:
        raise CheckpointNotFoundError(_checkpoint_above(store) or _absence_reason(store)) from err
    except ForeignObjectsError as err:
        if found := _folder_of_checkpoints(store):
            raise ForeignObjectsError(f"{err}. {found}") from err
        if found := _checkpoint_above(store):
            raise ForeignObjectsError(found) from err
        raise


def read_root(store: Store) -> Root:
    """Read and validate the committed root document. One request. Raises ObjectNotFoundError if there is none."""
    return parse_committed(store.get(NODE), store.url)


def _absence_reason(store: Store) -> str:
    """Return the reason that no checkpoint opens at a url without a root document, for an error."""
    begun, ended, found = is_stored(store, CLAIM_KEY), False, ""
    try:
        attempt_ids = _list_attempt_ids(store)
        if REMOVED in attempt_ids:
            return f"the checkpoint at {store.url} is being removed: {_finish_removal(store)}"
        if not begun and (found := _folder_of_checkpoints(store)):
            return f"{store.url} is no checkpoint. {found}. List them: zarrckpt ls {store.url}"
        markers = run_jobs((partial(_read_marker, store, save_id) for save_id in attempt_ids), store.max_concurrency)
        ended = bool(markers) and all(marker is not None and marker.failed for marker in markers)
    except StorageError as err:
        if isinstance(err.__cause__, FileNotFoundError) or NO_BUCKET in str(err):
            # The bucket is missing. A caller must not take this for a missing checkpoint and begin anew.
            raise
        found = f"A listing failed too: {err}"
    if begun:
        return (
            f"the save at {store.url} "
            f"{'has failed' if ended else 'was begun but never committed (or it is still running)'}. "
            "Load an earlier checkpoint, or save again: leftovers do not block a new save"
        )
    return f"nothing is committed at {store.url}, because it has no {NODE}: check the path{found and f'. {found}'}"


def _finish_removal(store: Store) -> str:
    """Return the next step after an unfinished removal, for an error."""
    return f"zarrckpt.recover (zarrckpt recover {store.url}) finishes an interrupted removal"


def was_removed(store: Store) -> bool:
    """Whether a checkpoint without its root document was removed rather than damaged. One or two requests."""
    # The record is read first: a removal deletes it last, so without a record the claim is gone too.
    return REMOVED in _list_attempt_ids(store) or not is_stored(store, CLAIM_KEY)


@dataclass(frozen=True)
class Below:
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


def checkpoints_below(store: Store, names: Iterable[str] | None = None, *, unfinished: bool = False) -> list[Below]:
    """Return the checkpoints in folders directly below a url, or in the folders ``names``, in the order of the names.

    Folders that cannot be read are included, see :attr:`Below.unreadable`. Only a failure of the listing itself is
    raised. With ``unfinished``, also return folders in which a save has begun but none has committed. One request for
    each folder, and with ``unfinished`` another one for each folder without a root document.
    """
    folders = list_below(store).folders if names is None else names
    reads = (partial(_read_below, store, name, unfinished) for name in folders if not name.startswith("@"))
    return [found for found in run_jobs(reads, store.max_concurrency) if found is not None]


def _read_below(store: Store, name: str, unfinished: bool) -> Below | None:
    try:
        try:
            return Below(name, parse_committed(store.get(f"{name}/{NODE}"), join(store.url, name)))
        except ObjectNotFoundError:
            store.refuse_broken_link(name)
            return Below(name) if unfinished and store.holds(f"{name}/{RESERVED_GROUP}") else None
    except ForeignObjectsError:
        return None
    except CheckpointError as err:
        return Below(name, damage=err)


def holds_checkpoints(store: Store) -> bool:
    """Whether folders directly below a url have checkpoints or saves that have begun. Requests as above."""
    return any(not below.unreadable for below in checkpoints_below(store, unfinished=True))


def find_begun(store: Store, names: Iterable[str]) -> list[Below]:
    """Return those of the folders ``names`` in which saves have begun, or that cannot be read.

    Does not read roots. One request for each folder.
    """

    def read(name: str) -> Below | None:
        try:
            store.refuse_broken_link(name)
            return Below(name) if any(store.list_dir(f"{name}/{RESERVED_GROUP}")) else None
        except StorageError as err:
            return Below(name, damage=err)

    return [found for found in run_jobs((partial(read, name) for name in names), store.max_concurrency) if found]


def newest(found: Iterable[Below]) -> Below | None:
    """Return the committed checkpoint whose folder name ends with the greatest number, or None.

    If no name ends with a number, return the checkpoint that was committed last.
    """
    committed: list[tuple[tuple[int, str, str], Below]] = []
    for item in found:
        if item.root is not None:
            number = number_in(item.name)
            order = (-1, item.root.created, item.name) if number is None else (number, "", item.name)
            committed.append((order, item))
    return max(committed, key=lambda pair: pair[0])[1] if committed else None


def number_in(name: str) -> int | None:
    """Return the last number in a folder's name, which is its step, or None if the name does not end with a number."""
    match = _NUMBER.fullmatch(name)
    return None if match is None else int(match[1])


def _folder_of_checkpoints(store: Store) -> str:
    """Return the number of checkpoints below a url and the newest one, for an error. "" if there are none."""
    try:
        folders = list_below(store).folders
        # If there are very many folders, only those with the greatest numbers are read.
        below = checkpoints_below(store, sorted(folders, key=_natural_order)[-_MAX_FOLDERS_READ:], unfinished=True)
    except StorageError:
        return ""
    found = [item for item in below if not item.unreadable]
    # Folders with a number first, because they may be steps.
    unread = sorted((item.name for item in below if item.unreadable), key=lambda name: number_in(name) is None)
    more = f"{', '.join(map(repr, unread[:5]))}{' and more' * (len(unread) > 5)} there cannot be read" * bool(unread)
    if not found:
        return more
    last = newest(found)
    which = "none of them is committed" if last is None else f"the newest is {join(store.url, one_line(last.name))}"
    return f"It is a folder of {len(found)} checkpoint{'s'[: len(found) > 1]}, {which}{'. ' * bool(more)}{more}"


def _checkpoint_above(store: Store) -> str:
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


def _natural_order(name: str) -> list[tuple[int, str]]:
    """Return a sort key that compares numbers in names by value: "step-9" is before "step-10"."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


def parse_committed(data: bytes, url: str) -> Root:
    """Parse and validate the bytes of a root document. Errors name the url."""
    return parse_root(data, f"the root document {one_line(join(url, NODE))}")


def begin(store: Store, marker: Marker, *, overwrite: bool) -> Attempt:
    """Begin an attempt: choose its tree and put its marker. The coordinator calls it before any chunk is written.

    ``marker`` lists the nodes that the attempt will write. Costs 9 requests, one more for each earlier attempt, and
    three more to overwrite, in 3 to 7 round trips. Raises CheckpointExistsError if a checkpoint is committed and
    ``overwrite`` is false, CheckpointPinnedError if it is pinned, ForeignObjectsError if the url is inside a checkpoint
    or has objects below it that this package did not write, CheckpointRemovedError if a removal has not ended.
    """
    seen = _read_contents(store, above=_CLAIM_LEVELS)
    if seen.inside is not None:
        raise seen.inside
    if seen.removal:
        raise CheckpointRemovedError(
            f"the checkpoint at {store.url} is being removed: {_finish_removal(store)}. Then save again"
        )
    root = None if seen.base is None else _base_root(store, seen.base, overwrite)
    if root is not None and not overwrite:
        raise _exists_error(store, root)
    older = _read_markers(store, root, seen)
    first = not seen.claimed and _put_claim(store, marker.save_id)
    # If an attempt began while a removal ran, it may have the canonical tree although its claim was deleted.
    tree = "" if first and all(earlier.tree for earlier in older) else f"@{marker.save_id}"
    base_id = "" if root is None else root.save_id
    own = dataclasses.replace(marker, tree=tree, base=base_id)
    history = () if root is None else (root.save_id, *root.history)[:HISTORY]
    unmarked = {*seen.attempt_ids} - {earlier.save_id for earlier in older}
    attempt = Attempt(own, seen.base, history, tuple(older), tuple(sorted(unmarked)))
    keys = [marker_key(own.save_id)]
    try:
        store.put(keys[0], [own.to_bytes()])
        if tree:
            keys.append(f"{tree}/{NODE}")
            store.put(keys[-1], [dumps(group_document())])
        # Without the marker, the chunks that are left after a power cut could not be assigned to this attempt.
        store.sync(keys)
        if seen.base is not None:
            # Checked after the marker is put: a pin is put before markers are read, so one of the two finds the other.
            refuse_pinned(store)
    except BaseException:
        abandon(store, attempt)
        raise
    return attempt


def refuse_committed(store: Store) -> None:
    """Raise the error of :func:`begin` without ``overwrite`` if a root document exists. One request."""
    base = _root_document(store)
    root = None if base is None else _base_root(store, base, damaged=False)
    if root is not None:
        raise _exists_error(store, root)


@dataclass(frozen=True)
class _UrlContents:
    """The objects at a url before an attempt's first put."""

    base: Versioned | None
    claimed: bool
    names: set[str]
    attempt_ids: list[str]
    in_order: bool
    """Whether ``names`` was read after ``base``, and ``attempt_ids`` after ``names``."""
    inside: ForeignObjectsError | None
    """The error for a save inside a checkpoint in one of the folders above the url, or None."""

    @property
    def removal(self) -> bool:
        """Whether a removal has begun and not ended."""
        return REMOVED in self.attempt_ids


def _read_contents(store: Store, *, above: int = 0) -> _UrlContents:
    """Read the root document, the claim and the listings in parallel, because each costs a round trip.

    ``above`` is the number of folders above the url in which a claim is looked for.
    """
    reads: list[Callable[[Store], Any]] = [_root_document, _is_claimed, _top_names, _list_attempt_ids]
    reads += [partial(_inside_error, levels=levels) for levels in range(1, above + 1)]
    # A local read takes less time than the start of a thread.
    at_once = 1 if store.is_local else len(reads)
    base, claimed, names, attempt_ids, *inside = run_jobs([partial(read, store) for read in reads], at_once)
    refused = next((error for error in inside if error is not None), None)
    return _UrlContents(base, claimed, names, attempt_ids, in_order=False, inside=refused)


def refuse_inside(store: Store) -> None:
    """Raise ForeignObjectsError if the url is inside a checkpoint, as :func:`begin` does. At least 3 small requests."""
    reads = [partial(_inside_error, store, levels) for levels in range(1, _CLAIM_LEVELS + 1)]
    for error in run_jobs(reads, 1 if store.is_local else len(reads)):
        if error is not None:
            raise error


def _inside_error(store: Store, levels: int) -> ForeignObjectsError | None:
    """Return the error for a save below the folder that is ``levels`` above the url, or None if it is allowed.

    It is not allowed if that folder has a checkpoint, or a save has begun there that writes below a folder with the
    name of the url. One small request, and two more if there is a claim.
    """
    try:
        claimant = parse_claim(store.get_above(levels, CLAIM_KEY), "the claim above")
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
        marker = parse_marker(store.get_above(levels, marker_key(claimant)), "the marker above")
    except CheckpointError:
        return None
    if marker.tree or name not in marker.top_names():
        return None
    return ForeignObjectsError(
        f"{store.url} lies inside {outer}, where a save was begun that also writes {name!r}. Nothing was changed. "
        f"Save to another path. If no save to {outer} is running: zarrckpt recover {outer} --stopped"
    )


def _list_attempt_ids(store: Store) -> list[str]:
    """Return the ids of all attempts with objects at the url, and :data:`REMOVED` if a removal has not ended."""
    names = store.list_dir(RESERVED_GROUP)[1]
    # The folder may exist without its document.
    recorded = REMOVED in names and is_stored(store, REMOVAL_KEY)
    return [*filter(is_save_id, names), *([REMOVED] if recorded else [])]


def get_if_stored(store: Store, key: str) -> bytes | None:
    """Return the bytes of a small object, or None if it does not exist. One request."""
    try:
        return store.get(key)
    except ObjectNotFoundError:
        return None


def is_stored(store: Store, key: str) -> bool:
    """Whether a small object exists. One request."""
    return get_if_stored(store, key) is not None


def _root_document(store: Store) -> Versioned | None:
    return _versioned_if_stored(store, NODE)


def _versioned_if_stored(store: Store, key: str) -> Versioned | None:
    try:
        return store.get_versioned(key)
    except ObjectNotFoundError:
        return None


def _base_root(store: Store, base: Versioned, damaged: bool) -> Root | None:
    """Return the root of a document, or None if it is damaged and ``damaged`` is true. Otherwise raise its error."""
    try:
        return parse_committed(base.data, store.url)
    except CorruptCheckpointError as err:
        if not damaged:
            raise CorruptCheckpointError(f"{err}. overwrite=True replaces it, zarrckpt.remove deletes it") from err
        return None
    except ForeignObjectsError:
        # If there is a claim, another program has replaced the root document of a checkpoint.
        if not (damaged and is_stored(store, CLAIM_KEY)):
            raise
        return None


def _exists_error(store: Store, root: Root) -> CheckpointExistsError:
    return CheckpointExistsError(
        f"Checkpoint already exists at {store.url} (save {root.save_id[:8]}, {root.created}): "
        "save to another path, or pass overwrite=True"
    )


def _is_claimed(store: Store) -> bool:
    try:
        parse_claim(store.get(CLAIM_KEY), f"the claim {join(store.url, CLAIM_KEY)}")
    except ObjectNotFoundError:
        return False
    except (CorruptCheckpointError, ForeignObjectsError):
        return True  # The claim cannot be read, so another attempt may have the canonical tree.
    return True


def _put_claim(store: Store, save_id: str) -> bool:
    try:
        store.create(CLAIM_KEY, claim_bytes(save_id))
    except ObjectExistsError:
        return False
    return True


def _read_marker(store: Store, save_id: str) -> Marker | None:
    key = marker_key(save_id)
    try:
        marker = parse_marker(store.get(key), f"the marker {join(store.url, key)}")
        # A copy of another attempt's marker does not list this attempt's objects.
        return marker if marker.save_id == save_id else None
    except ObjectNotFoundError:
        return None  # The attempt was cleaned up after the listing, or only its tables are left.
    except (CorruptCheckpointError, ForeignObjectsError):
        return None  # A damaged marker cannot be trusted, so the attempt's objects are not deleted.


def _read_markers(store: Store, root: Root | None, seen: _UrlContents, *, folder: bool = False) -> list[Marker]:
    """Return the markers of all attempts. If the committed attempt has none, the root replaces it.

    Raises ForeignObjectsError if there are objects of no attempt, because a later clean-up could not assign them. With
    ``folder``, any objects are allowed beside other checkpoints if none is committed at the url.
    """
    if seen.base is not None and not seen.in_order:
        # The attempt that wrote the root may have begun after the listings were read.
        return _read_markers(store, root, _in_order(store, seen), folder=folder)
    reads = (partial(_read_marker, store, save_id) for save_id in seen.attempt_ids if save_id != REMOVED)
    markers = [marker for marker in run_jobs(reads, store.max_concurrency) if marker is not None]
    if root is not None and root.save_id not in {marker.save_id for marker in markers}:
        markers.append(marker_of(root))
    # A tree without a marker belongs to an attempt that was cleaned up: a repeated put arrived later.
    known = {RESERVED_GROUP, NODE, *filter(is_tree, seen.names)} | ({RUN_GROUP} if folder else set())
    for marker in markers:
        known |= marker.top_names()
    foreign = seen.names - known
    if foreign and not seen.in_order:
        return _read_markers(store, root, _in_order(store, seen), folder=folder)
    if foreign and folder and seen.base is None and holds_checkpoints(store):
        # A save was begun by mistake in the folder of a run. Objects of others in that folder stay.
        return markers
    if foreign:
        # They may have been cleaned up after the listing, with their marker.
        foreign = _still_stored(store, foreign)
    if foreign:
        raise _foreign_error(store, foreign, committed=seen.base is not None, begun=store.holds(RESERVED_GROUP))
    return markers


def _foreign_error(store: Store, names: set[str], *, committed: bool, begun: bool) -> ForeignObjectsError:
    """Return the error for names at a url that do not belong to its attempts: other checkpoints, a run, or files."""
    own = committed or begun
    if not own and (found := _folder_of_checkpoints(store)):
        return ForeignObjectsError(
            f"{store.url} is no checkpoint. {found}. Nothing was changed. Use the url of one of them, or save to a new "
            "path below"
        )
    if not own and RUN_GROUP in names:
        return ForeignObjectsError(
            f"{store.url} is the folder of a run without checkpoints. Nothing was changed. Save to a path below"
        )
    last_names = sorted(names, key=_natural_order)[-_MAX_FOLDERS_READ:] if own else []
    inner = [below for below in checkpoints_below(store, last_names, unfinished=True) if not below.unreadable]
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
    shown = ", ".join(map(repr, sorted(names)[:5])) + ("" if len(names) <= 5 else f" and {len(names) - 5} more")
    return ForeignObjectsError(
        f"{store.url} has objects that no zarrckpt save wrote: {shown}. Nothing was changed. "
        "Save to another path, for example a new folder below"
    )


def _in_order(store: Store, seen: _UrlContents) -> _UrlContents:
    """Return the contents with new listings, first of the names and then of the attempts.

    An attempt puts its marker before its other objects, so the second listing has the attempts of all these names.
    """
    names = _top_names(store)
    return dataclasses.replace(seen, names=names, attempt_ids=_list_attempt_ids(store), in_order=True)


def _top_names(store: Store) -> set[str]:
    objects, folders = store.list_dir()
    return {*objects, *folders}


def _still_stored(store: Store, names: set[str]) -> set[str]:
    """Return the names that still exist at the url, without empty folders."""
    objects, folders = store.list_dir()
    return {*names.intersection(objects), *(name for name in folders if name in names and store.holds(name))}


def commit(store: Store, attempt: Attempt, root: Root) -> None:
    """Put the root document conditionally, so that the checkpoint exists. The coordinator calls it.

    All objects of the checkpoint must be stored and durable already. Raises CheckpointExistsError if another save has
    committed since :func:`begin`. If the root was refused permanently, the attempt's objects are deleted. After any
    other failure they stay, because the root may have been stored, or may still arrive.
    """
    data = root.to_bytes()
    try:
        if attempt.base is None:
            store.create(NODE, data)
        else:
            store.replace(NODE, data, attempt.base.version)
    except StorageError as err:
        winner = _read_winner(store)
        # The root was stored but the answer was lost. Even if another save has replaced it since, this is a success.
        if winner is not None and attempt.save_id in (winner.save_id, *winner.history):
            return store.sync([NODE])
        if winner is not None and winner.save_id != attempt.base_id:
            abandon(store, attempt, lost=True)
            raise _lost_error(store, attempt.save_id, winner) from err
        # A full disk has refused the root permanently.
        if is_full(err):
            abandon(store, attempt)
        raise


def tables_of(save_id: str, numbers: Mapping[str, RawArray]) -> tuple[dict[str, Table], dict[str, Sequence[Buffer]]]:
    """Return a save's tables for its root, and the objects to put for them, by key."""
    tables: dict[str, Table] = {}
    puts: dict[str, Sequence[Buffer]] = {}
    for name, table in numbers.items():
        tables[name] = Table(len(table), crc32c(table))
        node = table_node(save_id, name, len(table))
        puts[join(node.path, NODE)] = [node.document_bytes()]
        if len(table):
            puts[node.chunk_key((0,))] = encode_chunk(node, table)[0]
    return tables, puts


def _read_winner(store: Store) -> Root | None:
    """Return the root that is committed after a failure, or None if there is none or it cannot be read."""
    try:
        return read_root(store)
    except CheckpointError:
        return None


def _lost_error(store: Store, save_id: str, winner: Root) -> CheckpointExistsError:
    return CheckpointExistsError(
        f"Checkpoint already exists at {store.url}: save {winner.save_id[:8]} committed while this one "
        f"({save_id[:8]}) was being written. The other checkpoint was not changed: save to another path"
    )


@contextmanager
def report_lost_commit(store: Store, save_id: Callable[[], str], base_id: Callable[[], str]) -> Iterator[None]:
    """Raise CheckpointExistsError instead of StorageError if another save has committed since the attempt began.

    The clean-up of that save deletes the objects of other attempts, which may still be writing. ``save_id`` returns the
    id of this attempt, and ``base_id`` the id of the save that was committed at begin, or "". Both raise the error if
    begin failed. One request, after a failure only.
    """
    try:
        yield
    except StorageError as err:
        base = base_id()
        winner = _read_winner(store)
        if winner is None or winner.save_id == base or save_id() in (winner.save_id, *winner.history):
            raise
        raise _lost_error(store, save_id(), winner) from err


@dataclass(frozen=True)
class Leftovers:
    """The objects of saves, pins and removals at a url, for a clean-up."""

    root_bytes: bytes | None
    root: Root | None
    """The committed root, or None if none is committed or it is damaged."""
    claimed: bool
    markers: list[Marker]
    probes: list[str]
    """Keys of objects with which a store's conditional puts were tested."""
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
        return not marker.failed and marker.base == ("" if self.root is None else self.root.save_id)


def leftovers(store: Store, *, damaged: bool = False, folder: bool = False) -> Leftovers:
    """Return the objects of saves, pins and removals at a url.

    With ``damaged``, or if a removal has not ended, a damaged root counts as none. With ``folder``, any objects are
    allowed beside other checkpoints below the url if none is committed at it. Raises ForeignObjectsError for any other
    object, CorruptCheckpointError for a damaged root, StorageError if other saves commit during each of several reads.
    """
    for _ in range(_CONTENTS_TRIES):
        seen = _in_order(store, _read_contents(store))
        root = None if seen.base is None else _base_root(store, seen.base, damaged or seen.removal)
        markers = _read_markers(store, root, seen, folder=folder and not seen.removal)
        probes = [f"{RESERVED_GROUP}/{name}" for name in store.list_dir(RESERVED_GROUP)[0] if name.startswith(PROBE)]
        root_bytes = None if seen.base is None else seen.base.data
        # A save that commits in between changes which of the attempts could still commit.
        if root_bytes == get_if_stored(store, NODE):
            return Leftovers(root_bytes, root, seen.claimed, markers, probes, pin_keys(store), seen.removal)
    raise StorageError(
        f"reading {store.url} failed: other saves committed during each of {_CONTENTS_TRIES} tries. Try again when "
        "they have ended"
    )


def pins(store: Store) -> list[Pin]:
    """Return the pins of the checkpoint at a url, the oldest first. One listing, and one request for each pin."""

    def read(pin_id: str) -> Pin | None:
        key = pin_key(pin_id)
        try:
            pin = parse_pin(store.get(key), f"the pin {join(store.url, key)}")
        except ObjectNotFoundError:
            return None
        except (CorruptCheckpointError, ForeignObjectsError):
            pin = None
        # A damaged pin still protects the checkpoint.
        return pin if pin is not None and pin.pin_id == pin_id else Pin(pin_id, "a damaged pin", "")

    ids = filter(is_save_id, store.list_dir(f"{RESERVED_GROUP}/{PINS}")[1])
    found = run_jobs((partial(read, pin_id) for pin_id in ids), store.max_concurrency)
    return sorted((one for one in found if one is not None), key=lambda one: one.created)


def pin_keys(store: Store) -> list[str]:
    """Return the keys of all pins at a url and of their group. One listing."""
    return [info.key for info in store.list(f"{RESERVED_GROUP}/{PINS}") if is_pin_key(info.key)]


def refuse_pinned(store: Store) -> None:
    """Raise CheckpointPinnedError if the checkpoint at a url is pinned."""
    if found := pins(store):
        shown = ", ".join(f"{one.note!r:.200} (pin {one.pin_id}, {one.created})" for one in found[:3])
        raise CheckpointPinnedError(
            f"the checkpoint at {store.url} was neither removed nor replaced, because it is pinned: {shown}. If it is "
            f"not needed any more: zarrckpt.unpin({store.url!r}, {found[0].pin_id!r})"
        )


class RemovalEndedError(Exception):
    """A removal has ended, or another process has taken it over. It is always caught inside the package."""


def record_removal(store: Store, record: bytes, *, begun: bool) -> tuple[bytes | None, bool]:
    """Put the record of a removal before anything is deleted, so that no save begins at the url any more.

    Replaces the record of an unfinished removal, and the process that put that one stops. So of several processes only
    the last one deletes, after its own check for pins. With ``begun``, raises RemovalEndedError if there is no
    unfinished removal.

    Returns the valid record and whether no removal was recorded before. The valid record is ``record``, or an earlier
    one that cannot be replaced, or None. It is None if a put is impossible (the disk is full, or only deletions are
    permitted). The removal continues in that case, because it may free the disk.
    """
    for _ in range(_CONTENTS_TRIES):
        before = _versioned_if_stored(store, REMOVAL_KEY)
        if before is None and begun:
            raise RemovalEndedError
        try:
            if before is None:
                store.create(REMOVAL_KEY, record)
            else:
                store.replace(REMOVAL_KEY, record, before.version)
            store.sync([REMOVAL_KEY])
            return record, before is None
        except ObjectExistsError:
            begun = True
        except StorageError:
            return (None if before is None else before.data), False
    raise StorageError(
        f"the removal of {store.url} failed: other processes replaced its record during each of {_CONTENTS_TRIES} "
        "tries. Try again when they have ended"
    )


def removal_record(store: Store) -> bytes | None:
    """Return the record of an unfinished removal, or None. One request."""
    return get_if_stored(store, REMOVAL_KEY)


def check_removal(store: Store, removal: bytes | None) -> None:
    """Raise RemovalEndedError if the stored record is not ``removal``. One request, or none if ``removal`` is None."""
    if removal is not None and removal_record(store) != removal:
        raise RemovalEndedError


def delete_root(store: Store, root_bytes: bytes | None, removal: bytes | None) -> None:
    """Delete the root document if its bytes are still ``root_bytes``, for the removal whose record is ``removal``.

    Raises CheckpointPinnedError if the checkpoint is pinned, RemovalEndedError if another removal has taken over.
    """
    check_removal(store, removal)
    if root_bytes is not None:
        refuse_pinned(store)
    if root_bytes is not None and get_if_stored(store, NODE) == root_bytes:
        store.delete([NODE])


def clean(
    store: Store,
    markers: Iterable[Marker],
    *,
    finished: Iterable[str] = (),
    spared: Sequence[Marker] = (),
    removal: bytes | None = None,
) -> int:
    """Delete the objects that these markers name, and return the number of objects deleted.

    ``finished`` are the ids of attempts whose ranks have all ended, and their markers are deleted too. Other markers
    stay, because a late rank may still write objects that they name. Keys that a marker in ``spared`` names are never
    deleted. ``removal`` is the record of a removal: raises RemovalEndedError if it is gone or replaced, because a save
    may have begun since. Called by the coordinator after its commit, and by removals.
    """
    done = {*finished}
    deleted = 0
    for marker in markers:
        tops = marker.top_names()
        deleted += _delete_named(store, marker, tops, spared, removal)
        for _ in range(_CLEAN_TRIES if marker.save_id in done else 0):
            # A listing may be stale. Objects that it lacks could not be assigned to an attempt without the marker.
            tops &= _top_names(store)
            more = _delete_named(store, marker, tops, spared, removal)
            deleted += more
            if not more:
                # Deleted last, so that the next clean-up can continue after a crash.
                store.delete([marker_key(marker.save_id)])
                break
    return deleted


def clean_after(store: Store, attempt: Attempt) -> None:
    """Delete the checkpoint that a committed attempt replaced, and objects of earlier attempts. Warn if that fails."""
    replaced = attempt.base_id
    try:
        clean(store, attempt.older, finished=[replaced] if replaced else [], spared=[attempt.marker])
        if attempt.unmarked:
            # An attempt that still writes a file there repeats its put.
            store.sweep(f"{RESERVED_GROUP}/{save_id}" for save_id in attempt.unmarked)
    except CheckpointError as err:
        # The save has committed, so it must not fail.
        warnings.warn(
            f"the checkpoint at {store.url} is saved, but objects of earlier saves could not be removed: {err}. The "
            "next save to this url tries again",
            stacklevel=2,
        )


def _delete_named(
    store: Store, marker: Marker, tops: Iterable[str], spared: Sequence[Marker], removal: bytes | None
) -> int:
    """Delete the objects below ``tops`` that a marker names, and its attempt's tables. Return their number."""
    keys = _named_keys(store, marker, tops, spared)
    for start in range(0, len(keys), _DELETE_BATCH):
        check_removal(store, removal)
        store.delete(keys[start : start + _DELETE_BATCH])
    store.sweep(marker.folders())
    return len(keys)


def _named_keys(store: Store, marker: Marker, tops: Iterable[str], spared: Sequence[Marker]) -> list[str]:
    """Return the stored keys below ``tops`` that a marker names but ``spared`` does not, and its attempt's tables."""
    # Parallel, because a flat state has a folder for each entry.
    reads = (partial(_named_below, store, marker, top, spared) for top in sorted(tops))
    keys = [key for listing in run_jobs(reads, store.max_concurrency) for key in listing]
    return keys + [info.key for info in store.list(f"{RESERVED_GROUP}/{marker.save_id}") if is_table_key(info.key)]


def _named_below(store: Store, marker: Marker, top: str, spared: Sequence[Marker]) -> list[str]:
    """Return the stored keys below one folder that a marker names but no marker in ``spared`` does."""
    stored = [info.key for info in store.list(top)]
    keys = [key for key in stored if marker.names_key(key)]
    # Keys of other checkpoints inside are left out: their root documents have the same name as documents of groups.
    inner = {key.partition(f"/{RESERVED_GROUP}/")[0] for key in stored if f"/{RESERVED_GROUP}/" in key}
    if inner:
        keys = [key for key in keys if not any(key.startswith(f"{folder}/") for folder in inner)]
    return [key for key in keys if not any(other.names_key(key) for other in spared)]


def count_stored(store: Store, marker: Marker, spared: Sequence[Marker]) -> int:
    """Return the number of stored objects that a marker names but no marker in ``spared`` does."""
    return len(_named_keys(store, marker, marker.top_names() & _top_names(store), spared))


def sweep(store: Store) -> None:
    """Delete the temporary files of interrupted writes of root, claim, markers and pins. No save may be running."""
    pins = [f"{PINS}/{pin_id}" for pin_id in store.list_dir(f"{RESERVED_GROUP}/{PINS}")[1]]
    names = (REMOVED, *_list_attempt_ids(store), *pins, PINS)
    store.sweep(["", RESERVED_GROUP, *(f"{RESERVED_GROUP}/{name}" for name in names)])


def abandon(store: Store, attempt: Attempt, *, lost: bool = False) -> None:
    """Delete the objects of an attempt that will never commit. Its coordinator calls it. Raises no CheckpointError.

    The marker stays, now with ``failed``, because requests without an answer may still arrive and disconnected ranks
    may still write. ``lost`` is true if all ranks of the attempt have ended and another save has committed. Then the
    marker is deleted too if the attempt has its own tree. In the canonical tree, only markers show which attempt has
    written an object.
    """
    try:
        clean(store, [attempt.marker], finished=[attempt.save_id] if lost and attempt.tree else [])
        if not lost:
            store.put(marker_key(attempt.save_id), [dataclasses.replace(attempt.marker, failed=True).to_bytes()])
    except CheckpointError:
        return  # The caller raises the error that ended the attempt. The next save or recover cleans up.
