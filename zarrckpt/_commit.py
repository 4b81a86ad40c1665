"""Begin, commit, replace, clean: the order of operations that makes a checkpoint appear at once or not at all.

Every attempt writes keys that no other attempt ever uses. The first one at a url claims the canonical
paths; every later one writes below ``@<its id>``. The root document, put last and conditionally, names
the tree that it stands for. ``docs/explanation/commit.md`` has the reasons and the crash table.
"""

from __future__ import annotations

import dataclasses
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from zarrckpt._codec import RawArray, encode_chunk
from zarrckpt._crc32c import crc32c
from zarrckpt._crew import run
from zarrckpt._documents import NODE, dumps, group_document, join
from zarrckpt._errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    ForeignObjectsError,
    ObjectExistsError,
    ObjectNotFoundError,
    StorageError,
)
from zarrckpt._root import (
    HISTORY,
    HOUSE,
    PROBE,
    Marker,
    Root,
    Table,
    claim_bytes,
    is_table_key,
    is_tree,
    parse_claim,
    parse_marker,
    parse_root,
    table_node,
)

if TYPE_CHECKING:
    from zarrckpt._store import Buffer, Store
    from zarrckpt._store._base import Versioned

CLAIM_KEY = f"{HOUSE}/{NODE}"

_LISTINGS = 3
"""How often a clean-up lists again until nothing is left, before it leaves the rest to the next one."""


def marker_key(attempt: str) -> str:
    """Where an attempt puts its marker."""
    return f"{HOUSE}/{attempt}/{NODE}"


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

    @property
    def save_id(self) -> str:
        return self.marker.attempt

    @property
    def tree(self) -> str:
        return self.marker.tree

    @property
    def base_id(self) -> str:
        """The save that was there at begin, or ""."""
        return self.history[0] if self.history else ""


def load_root(store: Store) -> Root:
    """Read and validate the committed root document. One request, two more where nothing is committed.

    Raises CheckpointNotFoundError saying whether nothing is there or an unfinished save is.
    """
    try:
        data = store.get(NODE)
    except ObjectNotFoundError as err:
        try:
            store.get(CLAIM_KEY)
        except ObjectNotFoundError:
            reason = f"nothing is committed at {store.url}: no {NODE} there; check the path{_why_absent(store)}"
        else:
            reason = (
                f"the save at {store.url} was begun but never committed (or it is still running); "
                "load an earlier checkpoint, or save again: leftovers do not block a new save"
            )
        raise CheckpointNotFoundError(reason) from err
    return parse_committed(data, store.url)


def _why_absent(store: Store) -> str:
    """What a listing says where nothing is found: a missing bucket looks like a missing object otherwise."""
    try:
        store.list_dir()
    except StorageError as err:
        return f". A listing fails, too: {err}"
    return ""


def parse_committed(data: bytes, url: str) -> Root:
    """The root of stored bytes; errors name the url."""
    return parse_root(data, f"the root document {join(url, NODE)}")


def begin(store: Store, marker: Marker, *, overwrite: bool) -> Attempt:
    """Claim the right to write, and leave the marker. Called by the coordinator, before any chunk is written.

    ``marker`` lists the nodes to come; its tree is chosen here. Costs 6 requests, one more for each earlier attempt,
    and two to overwrite; of a distant store, 3 to 6 round trips. Raises CheckpointExistsError where a checkpoint is
    committed and ``overwrite`` is false, and ForeignObjectsError where anything but checkpoints of this package is
    stored below the url.
    """
    seen = _look(store)
    root = None if seen.base is None else _base_root(store, seen.base, overwrite)
    if root is not None and not overwrite:
        raise _exists(store, root)
    older = _markers_of_all(store, root, seen)
    tree = "" if not seen.claimed and _put_claim(store, marker.attempt) else f"@{marker.attempt}"
    base_id = "" if root is None else root.save_id
    own = dataclasses.replace(marker, tree=tree, base=base_id)
    store.put(marker_key(own.attempt), [own.to_bytes()])
    keys = [marker_key(own.attempt)]
    if tree:
        keys.append(f"{tree}/{NODE}")
        store.put(keys[-1], [dumps(group_document())])
    # Chunks that outlive a power cut must not outlive their list: nobody could tell then whose they are.
    store.sync(keys)
    history = () if root is None else (root.save_id, *root.history)[:HISTORY]
    return Attempt(own, seen.base, history, tuple(older))


def refuse_committed(store: Store) -> None:
    """Raise what :func:`begin` would for a committed root document, without ``overwrite``. One request."""
    base = _current_root(store)
    root = None if base is None else _base_root(store, base, damaged=False)
    if root is not None:
        raise _exists(store, root)


@dataclass(frozen=True)
class _Seen:
    """What was stored at a url before an attempt's first put."""

    base: Versioned | None
    claimed: bool
    names: set[str]
    attempts: list[str]
    in_order: bool
    """Whether each of these was read after the one before it."""


def _look(store: Store) -> _Seen:
    """Read the root, the claim and the listings: all at once, since each waits for a distant store."""
    reads: list[Callable[[Store], Any]] = [_current_root, _claimed, _top_names, _attempts]
    base, claimed, names, attempts = run([partial(read, store) for read in reads], len(reads))
    return _Seen(base, claimed, names, attempts, in_order=False)


def _attempts(store: Store) -> list[str]:
    """The ids of all attempts that have left something."""
    return store.list_dir(HOUSE)[1]


def _current_root(store: Store) -> Versioned | None:
    try:
        return store.get_versioned(NODE)
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


def _exists(store: Store, root: Root) -> CheckpointExistsError:
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


def _marker(store: Store, attempt: str) -> Marker | None:
    key = marker_key(attempt)
    try:
        marker = parse_marker(store.get(key), f"the marker {join(store.url, key)}")
        # Another attempt's names nothing of this one: it was put here by somebody else.
        return marker if marker.attempt == attempt else None
    except ObjectNotFoundError:
        return None  # its attempt was cleaned between the listing and the read, or left only tables behind
    except (CorruptCheckpointError, ForeignObjectsError):
        return None  # damaged: it names nothing that could be trusted, so what is there stays


def _markers_of_all(store: Store, root: Root | None, seen: _Seen) -> list[Marker]:
    """The markers of all attempts; the root stands in for a lost one of its own.

    Raises ForeignObjectsError for objects that are of none of them: a checkpoint needs a place of its own, otherwise a
    later clean-up could not tell what is whose.
    """
    if seen.base is not None and not seen.in_order:
        # Listed again after the root was read: the attempt that wrote it may have begun in between.
        return _markers_of_all(store, root, _in_order(store, seen))
    reads = (partial(_marker, store, attempt) for attempt in seen.attempts)
    markers = [marker for marker in run(reads, store.max_concurrency) if marker is not None]
    if root is not None and root.save_id not in {marker.attempt for marker in markers}:
        markers.append(root.marker())
    # A tree without a marker is a cleaned one's, to which the network brought a put twice.
    known = {HOUSE, NODE, *filter(is_tree, seen.names)}
    for marker in markers:
        known |= marker.top_names()
    foreign = seen.names - known
    if foreign and not seen.in_order:
        return _markers_of_all(store, root, _in_order(store, seen))
    if foreign:
        # Or it was cleaned in between, with its marker.
        foreign &= _top_names(store)
    if foreign:
        shown = ", ".join(map(repr, sorted(foreign)[:5])) + (
            "" if len(foreign) <= 5 else f" and {len(foreign) - 5} more"
        )
        raise ForeignObjectsError(
            f"{store.url} holds what no zarrckpt save wrote: {shown}; nothing was changed: "
            "save to a path of its own, for example a sub-folder"
        )
    return markers


def _in_order(store: Store, seen: _Seen) -> _Seen:
    """The same with listings of now: attempts after names, since whatever was listed has its marker by then."""
    names = _top_names(store)
    return dataclasses.replace(seen, names=names, attempts=_attempts(store), in_order=True)


def _top_names(store: Store) -> set[str]:
    objects, folders = store.list_dir()
    return {*objects, *folders}


def commit(store: Store, attempt: Attempt, root: Root) -> None:
    """Put the root document, conditionally: from now on the checkpoint exists. Called by the coordinator.

    Everything that it names must be stored and durable already. Raises CheckpointExistsError where another save
    committed since :func:`begin`.
    """
    data = root.to_bytes()
    try:
        if attempt.base is None:
            store.create(NODE, data)
        else:
            store.replace(NODE, data, attempt.base.version)
    except StorageError as err:
        winner = _winner(store, err)
        # Ours was put and its answer was lost; perhaps another save has replaced it since: that is a success.
        if attempt.save_id in (winner.save_id, *winner.history):
            return store.sync([NODE])
        if isinstance(err, ObjectExistsError):
            raise _lost(store, attempt.save_id, winner) from err
        raise


def tables_of(save_id: str, numbers: Mapping[str, RawArray]) -> tuple[dict[str, Table], dict[str, Sequence[Buffer]]]:
    """A save's tables, for its root, and the objects that hold them, by key."""
    tables: dict[str, Table] = {}
    puts: dict[str, Sequence[Buffer]] = {}
    for name, table in numbers.items():
        tables[name] = Table(len(table), crc32c(table))
        node = table_node(save_id, name, len(table))
        puts[join(node.path, NODE)] = [dumps(node.document())]
        if len(table):
            puts[node.chunk_key((0,))] = encode_chunk(node.grid, table)[0]
    return tables, puts


def _winner(store: Store, err: StorageError) -> Root:
    """What is committed after a put of the root failed. Raises ``err`` where that cannot be read."""
    try:
        return load_root(store)
    except CheckpointError:
        raise err from None


def _lost(store: Store, save_id: str, winner: Root) -> CheckpointExistsError:
    return CheckpointExistsError(
        f"Checkpoint already exists at {store.url}: save {winner.save_id[:8]} committed while this one "
        f"({save_id[:8]}) was being written; nothing of it was changed"
    )


@contextmanager
def losing_is_named(store: Store, save_id: str, base_id: Callable[[], str]) -> Iterator[None]:
    """A storage failure as CheckpointExistsError where another save has committed since the attempt began.

    The winner's clean-up takes the objects of the others away while they may still be writing. ``base_id`` tells the
    save that was there at begin, or ""; where the attempt has failed to begin, it raises why. One request, after a
    failure only.
    """
    try:
        yield
    except StorageError as err:
        base = base_id()
        winner = _winner(store, err)
        if winner.save_id == base or save_id in (winner.save_id, *winner.history):
            raise
        raise _lost(store, save_id, winner) from err


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

    @property
    def begun(self) -> bool:
        """Whether any save ever began."""
        return self.root_bytes is not None or self.claimed or bool(self.markers)

    @property
    def others(self) -> list[Marker]:
        """The markers of all attempts but the committed one."""
        return [marker for marker in self.markers if self.root is None or marker.attempt != self.root.save_id]

    def may_commit(self, marker: Marker) -> bool:
        """Whether an attempt, if it still runs, could commit: what it is to replace is what is there."""
        return marker.base == ("" if self.root is None else self.root.save_id)


def leftovers(store: Store, *, damaged: bool = False) -> Leftovers:
    """Read what saves left. With ``damaged``, a root that is not what was saved counts as none.

    Raises ForeignObjectsError where anything else is there, CorruptCheckpointError for a damaged root.
    """
    seen = _in_order(store, _look(store))
    root = None if seen.base is None else _base_root(store, seen.base, damaged)
    markers = _markers_of_all(store, root, seen)
    probes = [f"{HOUSE}/{name}" for name in store.list_dir(HOUSE)[0] if name.startswith(PROBE)]
    return Leftovers(None if seen.base is None else seen.base.data, root, seen.claimed, markers, probes)


def clean(
    store: Store, markers: Iterable[Marker], *, finished: Iterable[str] = (), committed: Marker | None = None
) -> int:
    """Delete what other attempts left: only keys that their markers name. Returns the number of objects deleted.

    ``finished`` are the ids of attempts that write no more; their markers go too. Those of the others stay, since a
    late rank may still write what they name. Nothing that ``committed`` names is deleted, whatever another marker says.
    Called by the coordinator after its own commit.
    """
    done = {*finished}
    deleted = 0
    for marker in markers:
        tops = marker.top_names()
        deleted += _delete_named(store, marker, tops, committed)
        for _ in range(_LISTINGS if marker.attempt in done else 0):
            # A listing may be stale, and what it lacks would be nobody's without the marker.
            tops &= _top_names(store)
            more = _delete_named(store, marker, tops, committed)
            deleted += more
            if not more:
                # Last: after a crash in between, the next clean-up still knows what to look for.
                store.delete([marker_key(marker.attempt)])
                break
    return deleted


def clean_after(store: Store, attempt: Attempt, *, keep_replaced: bool = False) -> None:
    """Delete what an attempt that has committed replaced, and what others left. Warns where that fails."""
    replaced = attempt.base_id
    stale = [m for m in attempt.older if not (keep_replaced and m.attempt == replaced)]
    try:
        clean(store, stale, finished=[replaced] if replaced else [], committed=attempt.marker)
    except CheckpointError as err:
        # It is committed: that must not look like a failure.
        warnings.warn(
            f"the checkpoint at {store.url} is saved, but objects of earlier ones could not be removed; the next "
            f"save there tries again: {err}",
            stacklevel=2,
        )


def _delete_named(store: Store, marker: Marker, tops: Iterable[str], committed: Marker | None) -> int:
    """Delete what a marker names below some names, and its attempt's tables. Returns the number of objects found."""
    # A flat state has a folder an entry: one listing after the other would take long.
    reads = (partial(_named, store, marker, top, committed) for top in sorted(tops))
    keys = [key for listing in run(reads, store.max_concurrency) for key in listing]
    keys += [info.key for info in store.list(f"{HOUSE}/{marker.attempt}") if is_table_key(info.key)]
    store.delete(keys)
    store.sweep(marker.folders())
    return len(keys)


def _named(store: Store, marker: Marker, top: str, committed: Marker | None) -> list[str]:
    """The stored keys below a folder that a marker names, and that of what is committed does not."""
    keys = [info.key for info in store.list(top) if marker.names_key(info.key)]
    return keys if committed is None else [key for key in keys if not committed.names_key(key)]


def sweep(store: Store) -> None:
    """Remove what is left of writes of root, claim and markers that a crash cut short. No save may be running."""
    store.sweep(["", HOUSE, *(f"{HOUSE}/{attempt}" for attempt in _attempts(store))])


def abandon(store: Store, attempt: Attempt) -> None:
    """Remove what a lost attempt wrote, after all of its ranks have stopped writing. Never raises."""
    try:
        # Of the canonical tree nothing but the marker tells what is whose.
        clean(store, [attempt.marker], finished=[attempt.save_id] if attempt.tree else [])
    except CheckpointError:
        return  # the error that lost the attempt matters more; the next save cleans up
