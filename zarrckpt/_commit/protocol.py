"""Begin, commit, replace, clean: the order of operations that makes a checkpoint appear at once or not at all.

Every attempt writes keys that no other attempt ever uses. The first one at a url claims the canonical
paths; every later one writes below ``@<its id>``. The root document, put last and conditionally, names
the tree that it stands for. ``docs/explanation/commit.md`` has the reasons and the crash table.
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

_LEVELS = 3
"""In how many folders above a url a save looks for a claim before it begins: one request for each, all at once."""

_INSIDE = 8
"""In how many folders above a url that does not open a root document is looked for."""

_NUMBER = re.compile(r"(?:.*\D)?(\d+)", re.ASCII | re.DOTALL)

_LOOKED_INTO = 200
"""How many folders are looked into at most for an error's text."""

_LOOKS = 5
"""How often what saves left is read until no save has committed meanwhile."""

_DELETED_AT_ONCE = 1000
"""How many objects a clean-up deletes before it checks again whether it may: S3 takes that many in one request."""

_LISTINGS = 3
"""How often a clean-up lists again until nothing is left, before it leaves the rest to the next one."""


def new_id() -> str:
    """A save id: random, never used before."""
    return uuid.uuid4().hex


@dataclass(frozen=True)
class Attempt:
    """One save from begin to commit. Lives on the coordinator only."""

    marker: Marker
    base: Versioned | None
    """The root document that was there at begin; the commit replaces exactly this one."""
    history: tuple[str, ...]
    older: tuple[Marker, ...]
    """The attempts whose markers were listed before this one's commit: the only ones it may clean."""
    unmarked: tuple[str, ...] = ()
    """The ids of attempts that had no marker then: they were killed while they put it, or are putting it."""

    @property
    def save_id(self) -> str:
        return self.marker.save_id

    @property
    def tree(self) -> str:
        return self.marker.tree

    @property
    def base_id(self) -> str:
        """The save that was there at begin, or ""."""
        return self.history[0] if self.history else ""


def load_root(store: Store) -> Root:
    """Read and validate the committed root document. One request, some more where nothing is committed.

    Raises CheckpointNotFoundError saying what is there instead: nothing, a save or a removal that has not ended, other
    checkpoints below.
    """
    return load_root_document(store)[1]


def load_root_document(store: Store) -> tuple[bytes, Root]:
    """Read the committed root document: its bytes, and the root. As :func:`load_root`."""
    try:
        document = store.get(NODE)
        return document, parse_committed(document, store.url)
    except ObjectNotFoundError as err:
        raise CheckpointNotFoundError(_checkpoint_above(store) or _why_absent(store)) from err
    except ForeignObjectsError as err:
        if found := _folder_of_checkpoints(store):
            raise ForeignObjectsError(f"{err}; {found}") from err
        if found := _checkpoint_above(store):
            raise ForeignObjectsError(found) from err
        raise


def read_root(store: Store) -> Root:
    """Read and validate the committed root document. One request. Raises ObjectNotFoundError where there is none."""
    return parse_committed(store.get(NODE), store.url)


def _why_absent(store: Store) -> str:
    """Why nothing opens at a url without a root document."""
    begun, ended, found = is_stored(store, CLAIM_KEY), False, ""
    try:
        attempt_ids = _attempt_ids(store)
        if REMOVED in attempt_ids:
            return f"the checkpoint at {store.url} is being removed: {_finish_removal(store)}"
        if not begun and (found := _folder_of_checkpoints(store)):
            return f"{store.url} is no checkpoint: {found}. Use that one, or list them: zarrckpt ls {store.url}"
        markers = run_jobs((partial(_marker, store, save_id) for save_id in attempt_ids), store.max_concurrency)
        ended = bool(markers) and all(marker is not None and marker.failed for marker in markers)
    except StorageError as err:
        if isinstance(err.__cause__, FileNotFoundError) or NO_BUCKET in str(err):
            # A missing bucket: its objects look like missing ones, and nothing may be begun anew because of it.
            raise
        found = f"check the path. A listing fails, too: {err}"
    if begun:
        return (
            f"the save at {store.url} "
            f"{'has failed' if ended else 'was begun but never committed (or it is still running)'}; "
            "load an earlier checkpoint, or save again: leftovers do not block a new save"
        )
    return f"nothing is committed at {store.url}: no {NODE} there; {found or 'check the path'}"


def _finish_removal(store: Store) -> str:
    return f"zarrckpt.recover (zarrckpt recover {store.url}) finishes a removal that was broken off"


def was_removed(store: Store) -> bool:
    """Whether a checkpoint whose root document is gone was removed, and not lost. One request or two."""
    # In this order: a removal deletes its record last, so where the record is gone, the claim is gone, too.
    return REMOVED in _attempt_ids(store) or not is_stored(store, CLAIM_KEY)


@dataclass(frozen=True)
class Below:
    """A folder right below another one, in which a checkpoint is, or a save was begun."""

    name: str
    root: Root | None = None
    """None where nothing is committed, and where what is there is damaged."""
    damage: CheckpointError | None = None
    """Why it cannot be opened: a StorageError if it cannot be read, and so may be no checkpoint at all."""

    @property
    def unreadable(self) -> bool:
        """Whether the folder could not be read."""
        return isinstance(self.damage, StorageError)


def checkpoints_below(store: Store, names: Iterable[str] | None = None, *, unfinished: bool = False) -> list[Below]:
    """The checkpoints in folders right below a url: in all of them, or in those with some names. In order of names.

    Folders that cannot be read are among them, see :attr:`Below.unreadable`; only a failure of the listing itself is
    raised. A request for each folder; with ``unfinished``, which adds those where nothing is committed, another one for
    each of these and of those that are no checkpoints.
    """
    folders = list_below(store).folders if names is None else names
    looks = (partial(_below, store, name, unfinished) for name in folders if not name.startswith("@"))
    return [found for found in run_jobs(looks, store.max_concurrency) if found is not None]


def _below(store: Store, name: str, unfinished: bool) -> Below | None:
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
    """Whether checkpoints, or saves that were begun, are in folders right below a url. Requests as above."""
    return any(not below.unreadable for below in checkpoints_below(store, unfinished=True))


def find_begun(store: Store, names: Iterable[str]) -> list[Below]:
    """The folders right below a url, of those with some names, in which saves were begun, or that cannot be read.

    Roots are not read. A request for each folder.
    """

    def look(name: str) -> Below | None:
        try:
            store.refuse_broken_link(name)
            return Below(name) if any(store.list_dir(f"{name}/{RESERVED_GROUP}")) else None
        except StorageError as err:
            return Below(name, damage=err)

    return [found for found in run_jobs((partial(look, name) for name in names), store.max_concurrency) if found]


def newest(found: Iterable[Below]) -> Below | None:
    """The checkpoint whose folder ends in the greatest number; of those without one, that which was committed last."""
    committed: list[tuple[tuple[int, str, str], Below]] = []
    for item in found:
        if item.root is not None:
            number = number_in(item.name)
            order = (-1, item.root.created, item.name) if number is None else (number, "", item.name)
            committed.append((order, item))
    return max(committed, key=lambda pair: pair[0])[1] if committed else None


def number_in(name: str) -> int | None:
    """The number with which a folder's name ends: its step, whatever the words before it; None for none."""
    match = _NUMBER.fullmatch(name)
    return None if match is None else int(match[1])


def _folder_of_checkpoints(store: Store) -> str:
    """That a url holds checkpoints, and which is the newest, for an error; "" where there are none right below."""
    try:
        folders = list_below(store).folders
        # Where there are very many, those with the greatest numbers.
        below = checkpoints_below(store, sorted(folders, key=_natural)[-_LOOKED_INTO:], unfinished=True)
    except StorageError:
        return ""
    found = [item for item in below if not item.unreadable]
    # First those that may be of a step.
    unread = sorted((item.name for item in below if item.unreadable), key=lambda name: number_in(name) is None)
    more = f"{', '.join(map(repr, unread[:5]))}{' and more' * (len(unread) > 5)} there cannot be read" * bool(unread)
    if not found:
        return more
    last = newest(found)
    which = "none of them is committed" if last is None else f"the newest is {join(store.url, one_line(last.name))}"
    return f"it is a folder of {len(found)} checkpoint{'s'[: len(found) > 1]}; {which}{'; ' * bool(more)}{more}"


def _checkpoint_above(store: Store) -> str:
    """That a url is inside a checkpoint, and how to name what is there; "" where it is not, as far as can be seen."""
    names = store.url.split("/")

    def root(levels: int) -> Root | None:
        try:
            return parse_root(store.get_above(levels, NODE), "a root document")
        except CheckpointError:
            return None

    # Not in the root of a filesystem.
    looks = (partial(root, levels) for levels in range(1, min(_INSIDE, len(names) - 1)))
    for levels, found in enumerate(run_jobs(looks, _INSIDE), 1):
        if found is not None:
            outer, inner = "/".join(names[:-levels]), [name for name in names[-levels:] if not is_tree(name)]
            part = ".".join(inner)
            known = any(fqn == part or fqn.startswith(f"{part}.") for fqn in found.entries)
            how = f": zarrckpt ls {outer} {part}, or in Python zarrckpt.open({outer!r})[...] and keys={part!r}"
            return f"{store.url} lies inside the checkpoint {outer}; name that{how if known else ''}"
    return ""


def _natural(name: str) -> list[tuple[int, str]]:
    """Orders names as people do: "step-9" before "step-10"."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


def parse_committed(data: bytes, url: str) -> Root:
    """The root of stored bytes; errors name the url."""
    return parse_root(data, f"the root document {one_line(join(url, NODE))}")


def begin(store: Store, marker: Marker, *, overwrite: bool) -> Attempt:
    """Claim the right to write, and leave the marker. Called by the coordinator, before any chunk is written.

    ``marker`` lists the nodes to come; its tree is chosen here. Costs 9 requests, one more for each earlier attempt,
    and three to overwrite; of a distant store, 3 to 7 round trips. Raises CheckpointExistsError where a checkpoint is
    committed and ``overwrite`` is false, CheckpointPinnedError where it is pinned, ForeignObjectsError where anything
    but checkpoints of this package is stored below the url, and where it lies inside a checkpoint,
    CheckpointRemovedError where a removal has not ended.
    """
    seen = _look(store, above=_LEVELS)
    if seen.inside is not None:
        raise seen.inside
    if seen.removal:
        raise CheckpointRemovedError(
            f"a removal of what is at {store.url} has begun and not ended: {_finish_removal(store)}, then save again"
        )
    root = None if seen.base is None else _base_root(store, seen.base, overwrite)
    if root is not None and not overwrite:
        raise _exists_error(store, root)
    older = _markers_of_all(store, root, seen)
    first = not seen.claimed and _put_claim(store, marker.save_id)
    # An attempt that began beside a removal may have the canonical tree, and its claim be gone.
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
        # After a power cut, no chunk may be there without the marker: nobody could tell whose it is.
        store.sync(keys)
        if seen.base is not None:
            # After the marker is put: a pin is put before markers are looked for, so one of the two sees the other.
            refuse_pinned(store)
    except BaseException:
        abandon(store, attempt)
        raise
    return attempt


def refuse_committed(store: Store) -> None:
    """Raise what :func:`begin` would for a committed root document, without ``overwrite``. One request."""
    base = _current_root(store)
    root = None if base is None else _base_root(store, base, damaged=False)
    if root is not None:
        raise _exists_error(store, root)


@dataclass(frozen=True)
class _Seen:
    """What was stored at a url before an attempt's first put."""

    base: Versioned | None
    claimed: bool
    names: set[str]
    attempt_ids: list[str]
    in_order: bool
    """Whether each of these was read after the one before it."""
    inside: ForeignObjectsError | None
    """Why no save may be made here: a checkpoint in one of the folders above the url that were looked at."""

    @property
    def removal(self) -> bool:
        """Whether a removal is recorded that has not ended."""
        return REMOVED in self.attempt_ids


def _look(store: Store, *, above: int = 0) -> _Seen:
    """Read the root, the claim and the listings: all at once, since each waits for a distant store.

    ``above``: in how many folders above the url a claim is looked for.
    """
    reads: list[Callable[[Store], Any]] = [_current_root, _claimed, _top_names, _attempt_ids]
    reads += [partial(_inside, levels=levels) for levels in range(1, above + 1)]
    # Local files are read before a thread has started.
    at_once = 1 if store.is_local else len(reads)
    base, claimed, names, attempt_ids, *inside = run_jobs([partial(read, store) for read in reads], at_once)
    refused = next((error for error in inside if error is not None), None)
    return _Seen(base, claimed, names, attempt_ids, in_order=False, inside=refused)


def refuse_inside(store: Store) -> None:
    """Raise ForeignObjectsError for a url inside a checkpoint, as a save there would. Three small requests or more."""
    looks = [partial(_inside, store, levels) for levels in range(1, _LEVELS + 1)]
    for error in run_jobs(looks, 1 if store.is_local else len(looks)):
        if error is not None:
            raise error


def _inside(store: Store, levels: int) -> ForeignObjectsError | None:
    """Why no save may be made below the folder that is ``levels`` above a url; None where one may.

    One small request, two more where there is a claim.

    The reasons: a checkpoint is there; or a save was begun there that writes, if it runs, below a folder of the url's
    name.
    """
    try:
        claimant = parse_claim(store.get_above(levels, CLAIM_KEY), "the claim above")
    except CheckpointError:
        # There is none. Or this process may not read there: that is no reason not to save here.
        return None
    outer, name = store.url.rsplit("/", levels)[:2]
    outer = outer or "/"
    try:
        parse_root(store.get_above(levels, NODE), "the root above")
        return ForeignObjectsError(
            f"{store.url} lies inside the checkpoint at {outer}, which could not be replaced or removed any more. "
            f"Nothing was changed; save to a path beside it, or remove that one first: zarrckpt rm {outer}"
        )
    except CheckpointError:
        pass
    try:
        # Only the claimant writes what is not below a tree of its own.
        marker = parse_marker(store.get_above(levels, marker_key(claimant)), "the marker above")
    except CheckpointError:
        return None
    if marker.tree or name not in marker.top_names():
        return None
    return ForeignObjectsError(
        f"{store.url} lies inside {outer}, where a save was begun that writes {name!r}, too. Nothing was changed; "
        f"save to another path, or, if no save to {outer} is running: zarrckpt recover {outer} --stopped"
    )


def _attempt_ids(store: Store) -> list[str]:
    """The ids of all attempts that have left something; :data:`REMOVED` is among them where a removal is recorded."""
    names = store.list_dir(RESERVED_GROUP)[1]
    # A folder may be there without its document.
    recorded = REMOVED in names and is_stored(store, REMOVAL_KEY)
    return [*filter(is_save_id, names), *([REMOVED] if recorded else [])]


def get_if_stored(store: Store, key: str) -> bytes | None:
    """A small object; None where it is not there. One request."""
    try:
        return store.get(key)
    except ObjectNotFoundError:
        return None


def is_stored(store: Store, key: str) -> bool:
    """Whether a small object is there. One request."""
    return get_if_stored(store, key) is not None


def _current_root(store: Store) -> Versioned | None:
    return _versioned_if_stored(store, NODE)


def _versioned_if_stored(store: Store, key: str) -> Versioned | None:
    try:
        return store.get_versioned(key)
    except ObjectNotFoundError:
        return None


def _base_root(store: Store, base: Versioned, damaged: bool) -> Root | None:
    """The root that was found; None where it is damaged, and ``damaged`` says that this is no obstacle."""
    try:
        return parse_committed(base.data, store.url)
    except CorruptCheckpointError as err:
        if not damaged:
            raise CorruptCheckpointError(f"{err}; overwrite=True replaces it, zarrckpt.remove deletes it") from err
        return None
    except ForeignObjectsError:
        # Beside a claim it was the root of a checkpoint, until another program replaced it.
        if not (damaged and is_stored(store, CLAIM_KEY)):
            raise
        return None


def _exists_error(store: Store, root: Root) -> CheckpointExistsError:
    return CheckpointExistsError(
        f"Checkpoint already exists at {store.url} (save {root.save_id[:8]}, {root.created}); "
        "save to another path, or pass overwrite=True"
    )


def _claimed(store: Store) -> bool:
    try:
        parse_claim(store.get(CLAIM_KEY), f"the claim {join(store.url, CLAIM_KEY)}")
    except ObjectNotFoundError:
        return False
    except (CorruptCheckpointError, ForeignObjectsError):
        return True  # whoever put it: the canonical tree is not free
    return True


def _put_claim(store: Store, save_id: str) -> bool:
    try:
        store.create(CLAIM_KEY, claim_bytes(save_id))
    except ObjectExistsError:
        return False
    return True


def _marker(store: Store, save_id: str) -> Marker | None:
    key = marker_key(save_id)
    try:
        marker = parse_marker(store.get(key), f"the marker {join(store.url, key)}")
        # The marker of another attempt, which somebody has copied here, names nothing of this one.
        return marker if marker.save_id == save_id else None
    except ObjectNotFoundError:
        return None  # its attempt was cleaned between the listing and the read, or left only tables behind
    except (CorruptCheckpointError, ForeignObjectsError):
        return None  # damaged: it names nothing that could be trusted, so what is there stays


def _markers_of_all(store: Store, root: Root | None, seen: _Seen, *, folder: bool = False) -> list[Marker]:
    """The markers of all attempts; the root stands in for a lost one of its own.

    Raises ForeignObjectsError for objects that are of none of them: a checkpoint needs a place of its own, otherwise a
    later clean-up could not tell what is whose. With ``folder``, anything may be beside other checkpoints if nothing is
    committed at the url.
    """
    if seen.base is not None and not seen.in_order:
        # Listed again after the root was read: the attempt that wrote it may have begun in between.
        return _markers_of_all(store, root, _in_order(store, seen), folder=folder)
    reads = (partial(_marker, store, save_id) for save_id in seen.attempt_ids if save_id != REMOVED)
    markers = [marker for marker in run_jobs(reads, store.max_concurrency) if marker is not None]
    if root is not None and root.save_id not in {marker.save_id for marker in markers}:
        markers.append(marker_of(root))
    # A tree without a marker is left of an attempt that was cleaned: a repeated put has arrived after that.
    known = {RESERVED_GROUP, NODE, *filter(is_tree, seen.names)} | ({RUN_GROUP} if folder else set())
    for marker in markers:
        known |= marker.top_names()
    foreign = seen.names - known
    if foreign and not seen.in_order:
        return _markers_of_all(store, root, _in_order(store, seen), folder=folder)
    if foreign and folder and seen.base is None and holds_checkpoints(store):
        # A save was begun by mistake in the folder of a run: what else is there is not its own, and stays.
        return markers
    if foreign:
        # It may have been cleaned in between, with its marker.
        foreign = _present(store, foreign)
    if foreign:
        raise _foreign_error(store, foreign, committed=seen.base is not None, begun=store.holds(RESERVED_GROUP))
    return markers


def _foreign_error(store: Store, names: set[str], *, committed: bool, begun: bool) -> ForeignObjectsError:
    """The error for names at a url that no save wrote: other checkpoints, beside one of its own or not, or else."""
    own = committed or begun
    if not own and (found := _folder_of_checkpoints(store)):
        return ForeignObjectsError(
            f"{store.url} is no checkpoint: {found}. Nothing was changed: name one of them, or save to a new path below"
        )
    if not own and RUN_GROUP in names:
        return ForeignObjectsError(
            f"{store.url} is the folder of a run without checkpoints. Nothing was changed; save to a path below"
        )
    looked_into = sorted(names, key=_natural)[-_LOOKED_INTO:] if own else []
    inner = [below for below in checkpoints_below(store, looked_into, unfinished=True) if not below.unreadable]
    if inner:
        url = join(store.url, one_line(inner[0].name))
        more = f" (and {len(inner) - 1} more)" if len(inner) > 1 else ""
        if not committed:
            return ForeignObjectsError(
                f"a save was begun at {store.url} and did not commit, and below it is a checkpoint, {inner[0].name!r}"
                f"{more}. Nothing was changed; if no save to {store.url} is running, make it a folder of checkpoints "
                f"again: zarrckpt recover {store.url} --stopped"
            )
        return ForeignObjectsError(
            f"{store.url} holds another checkpoint, {inner[0].name!r}{more}, below its own. Nothing was changed: copy "
            f"it elsewhere (zarrckpt cp {url} OTHER), if it is to be kept, and remove it here (zarrckpt rm {url})"
        )
    shown = ", ".join(map(repr, sorted(names)[:5])) + ("" if len(names) <= 5 else f" and {len(names) - 5} more")
    return ForeignObjectsError(
        f"{store.url} holds what no zarrckpt save wrote: {shown}; nothing was changed: "
        "save to a path of its own, for example a sub-folder"
    )


def _in_order(store: Store, seen: _Seen) -> _Seen:
    """The same with listings of now: attempts after names, since whatever was listed has its marker by then."""
    names = _top_names(store)
    return dataclasses.replace(seen, names=names, attempt_ids=_attempt_ids(store), in_order=True)


def _top_names(store: Store) -> set[str]:
    objects, folders = store.list_dir()
    return {*objects, *folders}


def _present(store: Store, names: set[str]) -> set[str]:
    """Those of these names that are at the url, less folders with nothing in them."""
    objects, folders = store.list_dir()
    return {*names.intersection(objects), *(name for name in folders if name in names and store.holds(name))}


def commit(store: Store, attempt: Attempt, root: Root) -> None:
    """Put the root document, conditionally: from now on the checkpoint exists. Called by the coordinator.

    Everything that it names must be stored and durable already. Raises CheckpointExistsError where another save
    committed since :func:`begin`. Where the root was refused for good, what the attempt wrote is removed; after any
    other failure nothing is, since the root may have been put, or be on its way.
    """
    data = root.to_bytes()
    try:
        if attempt.base is None:
            store.create(NODE, data)
        else:
            store.replace(NODE, data, attempt.base.version)
    except StorageError as err:
        winner = _winner(store)
        # This root was put and the answer was lost; another save may have replaced it since. Both are successes.
        if winner is not None and attempt.save_id in (winner.save_id, *winner.history):
            return store.sync([NODE])
        if winner is not None and winner.save_id != attempt.base_id:
            abandon(store, attempt, lost=True)
            raise _lost_error(store, attempt.save_id, winner) from err
        # A full disk has refused it for good.
        if is_full(err):
            abandon(store, attempt)
        raise


def tables_of(save_id: str, numbers: Mapping[str, RawArray]) -> tuple[dict[str, Table], dict[str, Sequence[Buffer]]]:
    """A save's tables, for its root, and the objects that hold them, by key."""
    tables: dict[str, Table] = {}
    puts: dict[str, Sequence[Buffer]] = {}
    for name, table in numbers.items():
        tables[name] = Table(len(table), crc32c(table))
        node = table_node(save_id, name, len(table))
        puts[join(node.path, NODE)] = [node.document_bytes()]
        if len(table):
            puts[node.chunk_key((0,))] = encode_chunk(node, table)[0]
    return tables, puts


def _winner(store: Store) -> Root | None:
    """What is committed after a failure; None for nothing, and for what cannot be read."""
    try:
        return read_root(store)
    except CheckpointError:
        return None


def _lost_error(store: Store, save_id: str, winner: Root) -> CheckpointExistsError:
    return CheckpointExistsError(
        f"Checkpoint already exists at {store.url}: save {winner.save_id[:8]} committed while this one "
        f"({save_id[:8]}) was being written; nothing of it was changed"
    )


@contextmanager
def losing_is_named(store: Store, save_id: Callable[[], str], base_id: Callable[[], str]) -> Iterator[None]:
    """A storage failure as CheckpointExistsError where another save has committed since the attempt began.

    The winner's clean-up takes the objects of the others away while they may still be writing. ``base_id`` tells the
    save that was there at begin, or "", and ``save_id`` this one; where the attempt has failed to begin, they raise
    why. One request, after a failure only.
    """
    try:
        yield
    except StorageError as err:
        base = base_id()
        winner = _winner(store)
        if winner is None or winner.save_id == base or save_id() in (winner.save_id, *winner.history):
            raise
        raise _lost_error(store, save_id(), winner) from err


@dataclass(frozen=True)
class Leftovers:
    """What is stored at a url, for those who clean up there."""

    root_bytes: bytes | None
    root: Root | None
    """None where nothing is committed, and where what is there is damaged."""
    claimed: bool
    markers: list[Marker]
    probes: list[str]
    """Keys of objects on which a store's conditional puts were tried."""
    pins: list[str]
    """Keys of what pins the checkpoint, or pinned one that is gone."""
    removal: bool = False
    """Whether a removal is recorded that has not ended."""

    @property
    def begun(self) -> bool:
        """Whether any save ever began."""
        return self.root_bytes is not None or self.claimed or bool(self.markers or self.pins) or self.removal

    @property
    def others(self) -> list[Marker]:
        """The markers of all attempts but the committed one."""
        return [marker for marker in self.markers if self.root is None or marker.save_id != self.root.save_id]

    def may_commit(self, marker: Marker) -> bool:
        """Whether an attempt, if it still runs, could commit: what it is to replace is what is there."""
        return not marker.failed and marker.base == ("" if self.root is None else self.root.save_id)


def leftovers(store: Store, *, damaged: bool = False, folder: bool = False) -> Leftovers:
    """Read what saves left. With ``damaged``, and where a removal is recorded, a damaged root counts as none.

    With ``folder``, anything may be beside other checkpoints below the url, if nothing is committed at it.

    Raises ForeignObjectsError where anything else is there, CorruptCheckpointError for a damaged root, StorageError
    where one save after the other commits meanwhile.
    """
    for _ in range(_LOOKS):
        seen = _in_order(store, _look(store))
        root = None if seen.base is None else _base_root(store, seen.base, damaged or seen.removal)
        markers = _markers_of_all(store, root, seen, folder=folder and not seen.removal)
        probes = [f"{RESERVED_GROUP}/{name}" for name in store.list_dir(RESERVED_GROUP)[0] if name.startswith(PROBE)]
        root_bytes = None if seen.base is None else seen.base.data
        # Markers tell who could still commit only beside the root that they were read with: a save that commits in
        # between changes that.
        if root_bytes == get_if_stored(store, NODE):
            return Leftovers(root_bytes, root, seen.claimed, markers, probes, pin_keys(store), seen.removal)
    raise StorageError(f"other saves to {store.url} commit all the time: try again when they have ended")


def pins(store: Store) -> list[Pin]:
    """What pins the checkpoint at a url, the oldest first. A listing, and a request for each pin."""

    def read(pin_id: str) -> Pin | None:
        key = pin_key(pin_id)
        try:
            pin = parse_pin(store.get(key), f"the pin {join(store.url, key)}")
        except ObjectNotFoundError:
            return None
        except (CorruptCheckpointError, ForeignObjectsError):
            pin = None
        # Somebody needed the checkpoint, even where it is not known who.
        return pin if pin is not None and pin.pin_id == pin_id else Pin(pin_id, "a damaged pin", "")

    ids = filter(is_save_id, store.list_dir(f"{RESERVED_GROUP}/{PINS}")[1])
    found = run_jobs((partial(read, pin_id) for pin_id in ids), store.max_concurrency)
    return sorted((one for one in found if one is not None), key=lambda one: one.created)


def pin_keys(store: Store) -> list[str]:
    """The keys of all pins at a url, and of their group. One listing."""
    return [info.key for info in store.list(f"{RESERVED_GROUP}/{PINS}") if is_pin_key(info.key)]


def refuse_pinned(store: Store) -> None:
    """Raise CheckpointPinnedError where the checkpoint at a url is pinned."""
    if found := pins(store):
        shown = "; ".join(f"{one.note!r:.200} (pin {one.pin_id}, {one.created})" for one in found[:3])
        raise CheckpointPinnedError(
            f"the checkpoint at {store.url} is pinned, and is neither removed nor replaced: {shown}; if it is not "
            f"needed any more: zarrckpt.unpin({store.url!r}, {found[0].pin_id!r})"
        )


class RemovalEndedError(Exception):
    """A removal has ended, or another process goes on with it. Never seen by callers of the package."""


def record_removal(store: Store, record: bytes, *, begun: bool) -> tuple[bytes | None, bool]:
    """Record, before anything is deleted, that all of a url is to be: no save begins there from now on.

    The record of a removal that has not ended is replaced, and whoever made that stops: of several, only the last one
    deletes, after it has looked for pins itself. ``begun``: only such a removal is gone on with, and RemovalEndedError
    raised where there is none any more.

    Returns the record that stands: this one; an earlier one that cannot be replaced; or None where none can be put,
    since the disk is full, or only deletions are allowed: then a removal is what helps. And whether no removal was
    recorded before.
    """
    for _ in range(_LOOKS):
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
    raise StorageError(f"others remove what is at {store.url} all the time: try again when they have ended")


def removal_record(store: Store) -> bytes | None:
    """The record of a removal that has not ended; None for none. One request."""
    return get_if_stored(store, REMOVAL_KEY)


def check_removal(store: Store, removal: bytes | None) -> None:
    """Raise RemovalEndedError once the record of a removal is gone, or another's; None: there was none. One request."""
    if removal is not None and removal_record(store) != removal:
        raise RemovalEndedError


def delete_root(store: Store, root_bytes: bytes | None, removal: bytes | None) -> None:
    """Delete the root document, if it still is what was found, in a removal with some record.

    Raises CheckpointPinnedError where it is pinned.
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
    """Delete what other attempts left: only keys that their markers name. Returns the number of objects deleted.

    ``finished`` are the ids of attempts that write no more; their markers go too. Those of the others stay, since a
    late rank may still write what they name. Nothing that a marker of ``spared`` names is deleted, whatever another one
    says. With ``removal``, the record of one, raises RemovalEndedError before it deletes anything once that is gone: a
    save may have begun since. Called by the coordinator after its own commit.
    """
    done = {*finished}
    deleted = 0
    for marker in markers:
        tops = marker.top_names()
        deleted += _delete_named(store, marker, tops, spared, removal)
        for _ in range(_LISTINGS if marker.save_id in done else 0):
            # A listing may be stale, and what it lacks would be nobody's without the marker.
            tops &= _top_names(store)
            more = _delete_named(store, marker, tops, spared, removal)
            deleted += more
            if not more:
                # Last: after a crash in between, the next clean-up still knows what to look for.
                store.delete([marker_key(marker.save_id)])
                break
    return deleted


def clean_after(store: Store, attempt: Attempt) -> None:
    """Delete what an attempt that has committed replaced, and what others left. Warns where that fails."""
    replaced = attempt.base_id
    try:
        clean(store, attempt.older, finished=[replaced] if replaced else [], spared=[attempt.marker])
        if attempt.unmarked:
            # Whoever still writes there begins its file again.
            store.sweep(f"{RESERVED_GROUP}/{save_id}" for save_id in attempt.unmarked)
    except CheckpointError as err:
        # It is committed: that must not look like a failure.
        warnings.warn(
            f"the checkpoint at {store.url} is saved, but objects of earlier ones could not be removed; the next "
            f"save there tries again: {err}",
            stacklevel=2,
        )


def _delete_named(
    store: Store, marker: Marker, tops: Iterable[str], spared: Sequence[Marker], removal: bytes | None
) -> int:
    """Delete what a marker names below some names, and its attempt's tables. Returns the number of objects found."""
    keys = _named_keys(store, marker, tops, spared)
    for start in range(0, len(keys), _DELETED_AT_ONCE):
        check_removal(store, removal)
        store.delete(keys[start : start + _DELETED_AT_ONCE])
    store.sweep(marker.folders())
    return len(keys)


def _named_keys(store: Store, marker: Marker, tops: Iterable[str], spared: Sequence[Marker]) -> list[str]:
    """The stored keys that a marker names below some names, and none of ``spared`` does, and its attempt's tables."""
    # A flat state has a folder for each entry: one listing after the other would take long.
    reads = (partial(_named, store, marker, top, spared) for top in sorted(tops))
    keys = [key for listing in run_jobs(reads, store.max_concurrency) for key in listing]
    return keys + [info.key for info in store.list(f"{RESERVED_GROUP}/{marker.save_id}") if is_table_key(info.key)]


def _named(store: Store, marker: Marker, top: str, spared: Sequence[Marker]) -> list[str]:
    """The stored keys below a folder that a marker names, and none of ``spared`` does."""
    stored = [info.key for info in store.list(top)]
    keys = [key for key in stored if marker.names_key(key)]
    # Another checkpoint may be inside, whose root document has the name of a group's document.
    inner = {key.partition(f"/{RESERVED_GROUP}/")[0] for key in stored if f"/{RESERVED_GROUP}/" in key}
    if inner:
        keys = [key for key in keys if not any(key.startswith(f"{folder}/") for folder in inner)]
    return [key for key in keys if not any(other.names_key(key) for other in spared)]


def count_stored(store: Store, marker: Marker, spared: Sequence[Marker]) -> int:
    """How many objects are stored that a marker names, and none of ``spared`` does."""
    return len(_named_keys(store, marker, marker.top_names() & _top_names(store), spared))


def sweep(store: Store) -> None:
    """Remove what is left of writes of root, claim and markers that a crash cut short. No save may be running."""
    pins = [f"{PINS}/{pin_id}" for pin_id in store.list_dir(f"{RESERVED_GROUP}/{PINS}")[1]]
    names = (REMOVED, *_attempt_ids(store), *pins, PINS)
    store.sweep(["", RESERVED_GROUP, *(f"{RESERVED_GROUP}/{name}" for name in names)])


def abandon(store: Store, attempt: Attempt, *, lost: bool = False) -> None:
    """Remove what an attempt wrote that will never commit. Called by its coordinator. Raises no CheckpointError.

    Its marker stays, and says now that it has failed: requests that got no answer may still arrive, and ranks that are
    cut off may still write. ``lost``: all of its ranks have ended, and what is committed is another save's. Then a tree
    of its own goes with the marker; of the canonical tree nothing but the marker tells what is whose.
    """
    try:
        clean(store, [attempt.marker], finished=[attempt.save_id] if lost and attempt.tree else [])
        if not lost:
            store.put(marker_key(attempt.save_id), [dataclasses.replace(attempt.marker, failed=True).to_bytes()])
    except CheckpointError:
        return  # the error that ended the attempt matters more; the next save, or recover, cleans up
