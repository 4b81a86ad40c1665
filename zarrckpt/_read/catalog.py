"""Open a committed checkpoint for reading: its root document, its tables and its entries by name. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np

from zarrckpt._commit.discovery import load_root
from zarrckpt._commit.stored_documents import read_root, was_removed
from zarrckpt._errors import (
    CheckpointError,
    CheckpointRemovedError,
    CheckpointReplacedError,
    CorruptCheckpointError,
    KeyMismatchError,
    ObjectNotFoundError,
)
from zarrckpt._forks import ForkSafeLock
from zarrckpt._format import json_values, values
from zarrckpt._format.chunk_layout import (
    CRC_BYTES,
    ChunkTable,
    RawArray,
    chunk_object_bytes,
    max_stored_subchunk_bytes,
    raw_dtype,
    stored_crc,
    subchunk_bytes,
)
from zarrckpt._format.documents import ArrayNode
from zarrckpt._format.grid import Ints
from zarrckpt._format.root import CHECKSUMS, SIZES, WRITERS, Root, Table, ValueEntry, table_node
from zarrckpt._jobs import run_jobs
from zarrckpt._read.chunks import LARGE_BYTES, StoredArray
from zarrckpt._store import Store, StoreSpec

UNCHECKED_SUBCHUNKS = 1 << 12
"""Number of subchunks that readers may put into a list before the length of the table is known."""

_Parts = Mapping[str, RawArray]
"""The parts of a table by node path."""


class _Tables(NamedTuple):
    """The tables of a checkpoint that readers need, cut into the parts of its arrays."""

    checksums: _Parts
    sizes: _Parts
    """Only of compressed arrays."""


class Catalog:
    """A committed checkpoint. Costs one request for the root, and one for the checksums when they are first needed.

    If an array is compressed, another request reads the stored sizes at the same time as the checksums.

    A pickle contains the root and the store's specification. The copy opens the store again, and does not read the
    root.
    """

    def __init__(self, spec: StoreSpec, root: Root | None = None) -> None:
        self._spec = spec
        self.root = root if root is not None else load_root(spec.open())
        self._lock = ForkSafeLock()
        self._tables: _Tables | None = None

    def __reduce__(self) -> tuple[object, ...]:
        return (Catalog, (self._spec, self.root))

    @property
    def store(self) -> Store:
        """The checkpoint's store. A forked child opens its own."""
        return self._spec.open()

    @cached_property
    def zarr_store(self) -> Any:
        """The read-only Zarr store of this checkpoint, for zarr-python and xarray."""
        from zarrckpt._read import zarr_dtypes  # noqa: F401 - importing it registers bfloat16 and float8
        from zarrckpt._read.zarr_view import StrictStore

        return StrictStore(self)

    def checksums(self, node: ArrayNode) -> RawArray:
        """Return an array's part of the table of checksums (uint32, chunks and their subchunks in C order)."""
        return self._read_tables().checksums[node.path]

    def checksum_of(self, node: ArrayNode) -> int | None:
        """Return the checksum of a tensor's elements, or None unless it is stored as one subchunk, uncompressed."""
        grid = node.grid
        if node.compression is not None or grid.chunk_shape != grid.shape or grid.num_subchunks != 1:
            return None
        return int(self.checksums(node)[0])

    def sizes(self, node: ArrayNode) -> RawArray | None:
        """Return a compressed array's stored sizes (uint32, ordered as the checksums), or None for other arrays."""
        return self._read_tables().sizes.get(node.path)

    def chunk_table(self, node: ArrayNode, chunk: Ints) -> ChunkTable:
        """Return one chunk's part of the checksums and sizes."""
        return self.stored_array(node).table(chunk)

    def stored_array(self, node: ArrayNode) -> StoredArray:
        """Return an array with its store, its path there and its parts of the tables."""
        tables = self._tables or self._read_tables()
        checksums, sizes = tables.checksums[node.path], tables.sizes.get(node.path)
        return StoredArray(self.store, node.under(self.root.tree), checksums, sizes)

    def _read_tables(self) -> _Tables:
        """Return the tables of checksums and sizes. The first call reads them, in parallel."""
        with self._lock, self.explaining_damage():
            if self._tables is None:
                tables = {CHECKSUMS: self.root.checksums, SIZES: self.root.sizes}
                jobs = {
                    name: partial(self.read_table, name, table) for name, table in tables.items() if table is not None
                }
                found = dict(zip(jobs, run_jobs(jobs.values(), len(jobs)), strict=True))
                compressed = [node for node in self.root.arrays() if node.compression is not None]
                sizes = _parts(found[SIZES], compressed) if compressed else {}
                for node in compressed:
                    self._check_sizes(node, sizes[node.path])
                self._tables = _Tables(_parts(found[CHECKSUMS], self.root.arrays()), sizes)
        return self._tables

    def _check_sizes(self, node: ArrayNode, sizes: RawArray) -> None:
        """Raise CorruptCheckpointError for impossible sizes, because readers allocate memory of these sizes."""
        largest = max_stored_subchunk_bytes(node)
        odd = sizes[(sizes <= CRC_BYTES) | (sizes > largest)]
        if len(odd):
            raise CorruptCheckpointError(
                f"the {SIZES} table in {self.store.url} has a size of {odd[0]} bytes for a subchunk of array "
                f"{node.path!r}, expected {CRC_BYTES + 1} to {largest}"
            )

    def stored_nbytes(self, node: ArrayNode) -> int:
        """Return the stored size of an array's chunks. No request, except for the tables if it is compressed."""
        nbytes = node.grid.num_chunks * chunk_object_bytes(node)
        sizes = self.sizes(node) if node.compression is not None else None
        if sizes is None:
            return nbytes
        # The index of a chunk has the same size with and without compression.
        plain = node.grid.num_subchunks * (subchunk_bytes(node) + CRC_BYTES)
        return nbytes - plain + int(sizes.sum(dtype=np.uint64))

    def refuse_too_many_chunks(self, *nodes: ArrayNode) -> None:
        """Raise CorruptCheckpointError if arrays have more chunks than the table has checksums.

        A damaged document can have any number of chunks, and readers build lists of them. Reads the tables for arrays
        of more than 4,096 subchunks together, and makes no other request.
        """
        if self._tables is None and sum(node.grid.num_subchunks for node in nodes) > UNCHECKED_SUBCHUNKS:
            # The root has the table's length for all of its arrays. The read fails if the table is shorter.
            self._read_tables()

    def refuse_implausible_size(self, node: ArrayNode) -> None:
        """Raise CorruptCheckpointError if an array is much larger than its stored chunks can be.

        Indexing a zarr.Array allocates the whole result before the first chunk is read. If this process cannot allocate
        the array, one request checks whether the first chunk is stored whole. Otherwise no request.
        """
        self.refuse_too_many_chunks(node)
        if node.nbytes <= LARGE_BYTES:
            return
        try:
            np.empty(node.nbytes, np.uint8)  # reserves addresses and touches no memory
        except (MemoryError, ValueError):
            with self.explaining_damage():
                self.stored_array(node).read_end_of_first_chunk()

    def writers_by_path(self) -> dict[str, RawArray]:
        """Return the rank that wrote each chunk: node path -> uint32 array, shaped as the chunk grid. One request."""
        table = self.read_writers_table()
        out, first = {}, 0
        for node in self.root.arrays():
            count = math.prod(node.grid.counts)
            out[node.path] = table[first : first + count].reshape(node.grid.counts)
            first += count
        return out

    def read_writers_table(self) -> RawArray:
        """Read the table of writers. Raises CorruptCheckpointError.

        The root has no checksum of this table, because it is only shown to people.
        """
        table = self._read_table(WRITERS, sum(node.grid.num_chunks for node in self.root.arrays()), None)
        if len(table) and table.max() >= self.root.world_size:
            raise CorruptCheckpointError(
                f"the table of writers in {self.store.url} names rank {table.max()}, expected a rank below "
                f"{self.root.world_size}"
            )
        return table

    def read_table(self, name: str, table: Table) -> RawArray:
        """Read a table and check it against the root. One request. Raises CorruptCheckpointError."""
        return self._read_table(name, table.length, table.crc32c)

    def _read_table(self, name: str, length: int, crc: int | None) -> RawArray:
        if length == 0:
            return np.zeros(0, "<u4")
        node = table_node(self.root.save_id, name, length)
        with self.explaining_damage():
            return read_table(node, crc, self.store.url, self.store.get_bounded)

    def read_non_tensor(self, fqn: str, *, allow_pickle: bool = False) -> object:
        """Return a non-tensor entry as the Python object that was saved.

        Raises UnsafeValueError for a pickled object unless ``allow_pickle``, KeyMismatchError for an unknown name.
        """
        entry = self.root.non_tensors.get(fqn)
        if entry is None:
            raise KeyMismatchError(f"there is no value {fqn!r} in {self.store.url}")
        if isinstance(entry, ValueEntry):
            try:
                return json_values.decode_json(entry.json)
            except CorruptCheckpointError as err:
                raise CorruptCheckpointError(f"value {fqn!r} in {self.store.url}: {err}") from err
        with self.explaining_damage():
            payload = self.stored_array(entry.array).read()
        return values.decode_blob(fqn, entry.encoding, entry.kind, payload.tobytes(), allow_pickle=allow_pickle)

    @contextmanager
    def explaining_damage(self) -> Iterator[None]:
        """Add the cause to errors of reading.

        Raises CheckpointReplacedError or CheckpointRemovedError instead of CorruptCheckpointError if the checkpoint was
        replaced or removed since it was opened. Adds the next step to other CorruptCheckpointErrors. Raises
        CheckpointError instead of MemoryError.
        """
        try:
            yield
        except CorruptCheckpointError as err:
            if (gone := self.replaced_or_removed()) is not None:
                raise gone from err
            step = f"List all damage: zarrckpt verify {self.store.url}. Load an earlier checkpoint"
            if step not in str(err):  # these blocks can be nested
                err.args = (f"{err}. {step}",)
            raise
        except MemoryError as err:
            raise CheckpointError(
                f"memory for reading {self.store.url} cannot be allocated ({err}). If the size is not plausible, the "
                "checkpoint is damaged"
            ) from err

    def replaced_or_removed(self) -> CheckpointError | None:
        """Return the error if the checkpoint was replaced or removed since it was opened. One or two requests."""
        where = f"the checkpoint at {self.store.url} (save {self.root.save_id[:8]})"
        try:
            if read_root(self.store).save_id != self.root.save_id:
                return CheckpointReplacedError(f"{where} was replaced while it was being read: open it again")
        except ObjectNotFoundError:
            with suppress(CheckpointError):
                if was_removed(self.store):
                    return CheckpointRemovedError(f"{where} was removed while it was being read: load another one")
        except CheckpointError:
            pass  # the root cannot be read, so there is no sign that it was replaced
        return None


def _parts(table: RawArray, nodes: Sequence[ArrayNode]) -> _Parts:
    """Cut a table with an element for each subchunk into the parts of its arrays."""
    parts, first = {}, 0
    for node in nodes:
        count = node.grid.num_subchunks
        parts[node.path] = table[first : first + count]
        first += count
    return parts


def read_table(node: ArrayNode, crc: int | None, url: str, get_bounded: Callable[[str, int], bytes]) -> RawArray:
    """Read a table that is not empty, and compare its checksum. One request. Raises CorruptCheckpointError."""
    key, nbytes = node.chunk_key((0,)), chunk_object_bytes(node)
    try:
        data = get_bounded(key, nbytes)
    except ObjectNotFoundError as err:
        raise CorruptCheckpointError(f"the table {key!r} is missing in {url}") from err
    stored = np.frombuffer(data, np.uint8)
    found = stored_crc(stored) if len(stored) == nbytes else None
    if found is None or (crc is not None and found != crc):
        raise CorruptCheckpointError(f"the table {key!r} in {url} is damaged: its size or checksum differs")
    return stored[:-CRC_BYTES].view(raw_dtype(node.dtype.itemsize))
