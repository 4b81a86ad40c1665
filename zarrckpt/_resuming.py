"""Copies that were broken off: find one again, and what it has stored already. No torch.

A resumed copy is the same attempt, with its id and its tree. That is safe since its marker binds it to what is copied
and how: whoever works on it puts the same bytes under the same keys, however many do (``docs/explanation/commit.md``).
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from zarrckpt import _codec, _commit
from zarrckpt._chunk_table import ChunkTable
from zarrckpt._commit import Attempt, marker_key
from zarrckpt._crc32c import crc32c
from zarrckpt._documents import NODE, ArrayNode, dumps, join
from zarrckpt._errors import CorruptCheckpointError, ObjectNotFoundError
from zarrckpt._memory import BytesBudget
from zarrckpt._rechunking import MadeChunk
from zarrckpt._root import DONE, HISTORY, Marker, Root, table_node
from zarrckpt._store import Store
from zarrckpt._store._base import Versioned
from zarrckpt._verify import spans

_SECONDS = 0.5
"""How often the record of a copy is put, or less often where that takes long. What is made after it is made again."""

_SHARE = 20
"""Between two puts of the record pass so many times as long as the last one took."""


@dataclass(frozen=True)
class Found:
    """What a copy that is to be resumed finds: the attempt, or the root where such a copy is committed already."""

    attempt: Attempt | None = None
    committed: Root | None = None
    stored: Mapping[str, int] = field(default_factory=dict)
    """The keys of what the attempt has stored in its tree, and the sizes."""


def find(store: Store, digest: str, *, overwrite: bool) -> Found:
    """Look for a copy with this digest that was broken off, or is committed. The requests of ``recover``, and few more.

    Of several the one that has most is taken. Raises ForeignObjectsError as a save does.
    """
    left = _commit.leftovers(store, damaged=True)
    if left.removal:
        return Found()  # what begins anew is refused
    root = left.root
    if root is not None and any(m.attempt == root.save_id and m.copy == digest for m in left.markers):
        return Found(committed=root, stored=_stored(store, root.marker()))
    base = _versioned_root(store)
    same = (None if base is None else base.data) == left.root_bytes
    if not same or (base is not None and (root is None or not overwrite)):
        return Found()
    usable = [marker for marker in left.others if marker.copy == digest and left.may_commit(marker)]
    if not usable:
        return Found()
    listed = [_stored(store, marker) for marker in usable]
    stored, marker = max(zip(listed, usable, strict=True), key=lambda item: (sum(item[0].values()), item[1].started))
    history = () if root is None else (root.save_id, *root.history)[:HISTORY]
    # Its list, before more is written that it names.
    store.sync([marker_key(marker.attempt)])
    store.sweep(marker.folders())
    # The root was the same before and after they were listed: so none of them was begun on top of a commit of this very
    # attempt, which somebody else who works on it may make at any time.
    older = [item for item in left.markers if item.attempt != marker.attempt]
    return Found(Attempt(marker, base, history, tuple(older)), None, stored)


def _stored(store: Store, marker: Marker) -> dict[str, int]:
    """What an attempt has stored in its tree, a request for each 1,000 objects or so."""
    return {info.key: info.size for info in store.list(marker.tree) if marker.names_key(info.key)}


def _versioned_root(store: Store) -> Versioned | None:
    try:
        return store.get_versioned(NODE)
    except ObjectNotFoundError:
        return None


def is_listed(store: Store, attempt: Attempt) -> bool:
    """Whether an attempt's marker is there still: a clean-up takes it away with all that it names. One request."""
    return _commit.is_stored(store, marker_key(attempt.save_id))


class Record:
    """Which chunks a copy has made anew, and what they are: nobody knows their checksums beforehand.

    Two numbers a chunk, in a table of the attempt's: a checksum over the chunk's parts of the tables (0: not made), and
    how many values a cast lost. It is put every now and then. One of two who resume the same copy may put back an older
    one; what it lacks is made again.
    """

    def __init__(self, store: Store, save_id: str, chunks: int) -> None:
        self._store = store
        self._node = table_node(save_id, DONE, 2 * chunks)
        self._keys = [join(self._node.path, NODE), self._node.chunk_key((0,))]
        self._table = np.zeros((chunks, 2), "<u4")
        self._lock = threading.Lock()
        self._due = time.monotonic() + _SECONDS

    def read(self) -> None:
        """Take over what the last one who worked on the copy recorded; nothing, where that is damaged or absent."""
        try:
            data = np.frombuffer(self._store.get(self._keys[1]), np.uint8)
        except ObjectNotFoundError:
            return
        if len(data) == self._table.nbytes + _codec.CRC_BYTES and _codec.checked(data) is not None:
            self._table[:] = data[: -_codec.CRC_BYTES].view("<u4").reshape(-1, 2)

    def begin(self) -> None:
        """Put the table's document, so that other Zarr readers know what it is."""
        self._store.put(self._keys[0], [dumps(self._node.document())])

    def add(self, number: int, made: MadeChunk) -> None:
        """Note a chunk that has been put."""
        with self._lock:
            self._table[number] = fingerprint(made), min(made.overflowed, 2**32 - 1)
            due = time.monotonic() >= self._due
            if due:
                self._due = math.inf  # one at a time
        if due:
            began = time.monotonic()
            self.put()
            ended = time.monotonic()
            self._due = ended + max(_SECONDS, _SHARE * (ended - began))

    def put(self) -> None:
        """Put the table as it is now."""
        with self._lock:
            table = self._table.reshape(-1).copy()
        if len(table):
            self._store.put(self._keys[1], _codec.encode_chunk(self._node.grid, table)[0])

    def knows(self, number: int) -> bool:
        """Whether a chunk was made, as far as the record knows."""
        return bool(self._table[number, 0])

    def check(self, number: int, made: MadeChunk) -> MadeChunk | None:
        """A stored chunk, where it is the one that was recorded; with what the record knows of it besides."""
        recorded, overflowed = self._table[number].tolist()
        if fingerprint(made) != recorded:
            return None
        return MadeChunk(made.checksums, made.sizes, made.nbytes, overflowed)

    def delete(self) -> None:
        """Remove it: the copy is committed."""
        self._store.delete(self._keys)


def fingerprint(made: MadeChunk) -> int:
    """A number over what the tables say of a chunk; never 0."""
    return crc32c(np.array([*made.checksums, *made.sizes], "<u4")) or 1


def read_made(store: Store, key: str, size: int, node: ArrayNode, memory: BytesBudget) -> MadeChunk | None:
    """A chunk that is stored, if it is whole by its own checksums and index; else None. One request."""
    with memory.take(size) as data:
        try:
            store.read_into(key, 0, data.data)
        except (CorruptCheckpointError, ObjectNotFoundError):
            return None
        parts = spans(node, data) or []
        cells = [data[begin : begin + nbytes] for begin, nbytes in parts]
        if not cells or any(len(cell) <= _codec.CRC_BYTES for cell in cells):
            return None
        said = [int.from_bytes(cell[-_codec.CRC_BYTES :].tobytes(), "little") for cell in cells]
        sizes = [] if node.compression is None else [len(cell) for cell in cells]
        crcs, lengths = np.array(said, "<u4"), np.array(sizes, "<u4") if sizes else None
        table = ChunkTable(node.grid, node.dtype.itemsize, crcs, lengths)
        whole = table.object_size == size and table.check(0, data, node.compression)
    return MadeChunk(said, sizes, size) if whole else None
