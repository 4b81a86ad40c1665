"""A committed checkpoint as a reader sees it: the root, the checksum table, entries by name. No torch."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np

from zarrckpt import _codec, _commit, _values
from zarrckpt._documents import ArrayNode
from zarrckpt._errors import (
    CheckpointError,
    CheckpointReplacedError,
    CorruptCheckpointError,
    KeyMismatchError,
    ObjectNotFoundError,
)
from zarrckpt._grid import Ints
from zarrckpt._root import CHECKSUMS, WRITERS, Root, Table, ValueEntry, table_node
from zarrckpt._store import Store, StoreSpec
from zarrckpt._transfer import chunk_checksums, read_box


class Catalog:
    """One committed checkpoint, opened once: one request for the root, one for the checksums when first needed.

    A pickle holds the root and the recipe for the store; the copy opens the store anew, without asking for the root.
    """

    def __init__(self, spec: StoreSpec, root: Root | None = None) -> None:
        self._spec = spec
        self.store: Store = spec.open()
        self.root = root if root is not None else _commit.load_root(self.store)
        self._lock = threading.Lock()
        self._checksums: _codec.RawArray | None = None
        self._first: Mapping[str, int] | None = None

    def __reduce__(self) -> tuple[object, ...]:
        return (Catalog, (self._spec, self.root))

    def checksums(self, node: ArrayNode) -> _codec.RawArray:
        """An array's part of the checksum table (uint32, chunks and their subchunks in C order)."""
        with self._lock:
            if self._checksums is None:
                self._checksums = self.read_table(CHECKSUMS, self.root.checksums)
                self._first = self._places()
        assert self._first is not None
        first = self._first[node.path]
        return self._checksums[first : first + node.grid.num_subchunks]

    def chunk_checksums(self, node: ArrayNode, chunk: Ints) -> _codec.RawArray:
        """One chunk's part of the checksum table: its subchunks in C order."""
        return chunk_checksums(node, chunk, self.checksums(node))

    def _places(self) -> dict[str, int]:
        places, first = {}, 0
        for node in self.root.arrays():
            places[node.path] = first
            first += node.grid.num_subchunks
        return places

    def writers(self) -> dict[str, _codec.RawArray]:
        """Which rank wrote each chunk: node path -> uint32 array in the shape of the chunk grid. One request."""
        table = self.read_table(WRITERS, self.root.writers)
        out, first = {}, 0
        for node in self.root.arrays():
            count = math.prod(node.grid.counts)
            out[node.path] = table[first : first + count].reshape(node.grid.counts)
            first += count
        return out

    def read_table(self, name: str, table: Table) -> _codec.RawArray:
        """A table, checked against the root. Raises CorruptCheckpointError."""
        if table.length == 0:
            return np.zeros(0, "<u4")
        key = table_node(self.root.save_id, name, table.length).chunk_key((0,))
        with self.guard():
            try:
                data = self.store.get(key)
            except ObjectNotFoundError as err:
                raise CorruptCheckpointError(f"the {name} table {key!r} is missing in {self.store.url}") from err
            stored = np.frombuffer(data, np.uint8)
            whole = len(stored) == 4 * table.length + _codec.CRC_BYTES
            if not whole or not _codec.check_subchunk(stored, table.crc32c):
                raise CorruptCheckpointError(f"the {name} table {key!r} in {self.store.url} is not what was saved")
        return stored[: -_codec.CRC_BYTES].view("<u4")

    def read_object(self, fqn: str, *, allow_pickle: bool = False) -> object:
        """A non-tensor entry as the Python object that was saved.

        Raises UnsafeValueError for a pickled one unless ``allow_pickle``; KeyMismatchError for an unknown name.
        """
        entry = self.root.objects.get(fqn)
        if entry is None:
            raise KeyMismatchError(f"no value {fqn!r} in {self.store.url}")
        if isinstance(entry, ValueEntry):
            try:
                return _values.decode_json(entry.json)
            except CorruptCheckpointError as err:
                raise CorruptCheckpointError(f"value {fqn!r} in {self.store.url}: {err}") from err
        with self.guard():
            payload = read_box(self.store, entry.array.under(self.root.tree), self.checksums(entry.array))
        return _values.decode_blob(fqn, entry.encoding, entry.kind, payload.tobytes(), allow_pickle=allow_pickle)

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Tell damage from a checkpoint that was replaced while it was being read."""
        try:
            yield
        except CorruptCheckpointError as err:
            if self.replaced():
                raise CheckpointReplacedError(
                    f"the checkpoint at {self.store.url} (save {self.root.save_id[:8]}) was replaced while it was "
                    "being read: open it again"
                ) from err
            raise

    def replaced(self) -> bool:
        """Whether another save has been committed at the url since this one was opened. One request."""
        try:
            return _commit.load_root(self.store).save_id != self.root.save_id
        except CheckpointError:
            return False
