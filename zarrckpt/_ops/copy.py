"""``copy``: copy a checkpoint, or a part of it, to another url. All data is checked and then committed. No torch.

Chunks of unchanged arrays are copied as they are stored. Chunks of changed arrays are encoded again (``_ops.rechunk``).
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from zarrckpt._commit import attempts
from zarrckpt._commit.chunks import encode_tables
from zarrckpt._commit.marker import marker_of, new_id
from zarrckpt._errors import CheckpointExistsError, CorruptCheckpointError, ObjectNotFoundError
from zarrckpt._format.chunk_layout import RawArray, chunk_object_bytes
from zarrckpt._format.compression import CompressionOption
from zarrckpt._format.documents import GROUP_DOCUMENT, NODE, ArrayNode, join
from zarrckpt._format.grid import Ints
from zarrckpt._format.module_versions import begins_one
from zarrckpt._format.root import CHECKSUMS, SIZES, WRITERS, Root, parent_groups
from zarrckpt._format.sealed import now
from zarrckpt._jobs import DEFAULT_MAX_INFLIGHT_BYTES, ByteCounter, BytesBudget, Progress, check_limits, run_jobs
from zarrckpt._ops.copy_plan import KEEP, ChunksOption, changed, parse_changes
from zarrckpt._ops.rechunk import EncodedChunk, choose_writers, rewrite_chunk
from zarrckpt._plan.archive_places import place_in_order
from zarrckpt._read.casts import DTypeOption, warn_of_overflow
from zarrckpt._read.catalog import Catalog
from zarrckpt._read.selection import catalog_of, open_selection
from zarrckpt._reports import CopyReport
from zarrckpt._store import Buffer, Store, StoreSpec, Url

if TYPE_CHECKING:
    from zarrckpt._checkpoint import Checkpoint


def copy(
    source: Checkpoint | Url,
    url: Url,
    *,
    overwrite: bool = False,
    chunks: ChunksOption = None,
    max_chunk_bytes: int | None = None,
    dtype: DTypeOption = None,
    compression: CompressionOption = KEEP,
    portable_dtypes: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    max_inflight_bytes: int = DEFAULT_MAX_INFLIGHT_BYTES,
    progress: Progress | None = None,
) -> CopyReport:
    """Copy a checkpoint, or a part of one, to another url in any store, also with other chunks or dtypes.

    All data are compared with their checksums, and the copy is committed like a save. It has a new save id. Chunks of
    tensors that no option changes are copied byte for byte.

    Args:
        source: an open checkpoint, a part of one, or the url of a checkpoint. If the source needs
            ``storage_options``, pass ``zarrckpt.open(source, storage_options=...)``.
        url: the url of the copy, as in :func:`save`.
        overwrite: replace an existing checkpoint at the url.
        chunks: a chunk shape for all tensors with this number of dimensions, or a mapping from patterns to shapes (the
            first match is used). -1 stands for a whole dimension.
        max_chunk_bytes: give all other tensors the chunks of a :func:`save` by one process with this limit.
        dtype: a dtype for floating tensors, such as ``"bfloat16"``, or a mapping from patterns of
            :meth:`Checkpoint.select` to dtypes (the first match is used). Casts follow torch's rule
            (``docs/reference/casts.md``). Finite values beyond the range of the dtype are counted in the report, with a
            UserWarning. These keep their dtype: float8_e8m0fnu, tensors that are not floating, and numbers that a
            training counts with or is configured by: tensors named ``step``, ``global_step`` or ``iteration``, 0-d
            tensors, and tensors of one element without ``weight`` or ``bias`` as a part of the name. The report's
            ``uncast`` lists them. A mapping casts one of them if it has its full name: ``{"model.scale": "bfloat16"}``.
        compression: the compression of all tensors, as in :class:`SaveOptions`. None removes it, ``"keep"`` keeps it.
        portable_dtypes: as in :class:`SaveOptions`. Tensors that are stored as integers already stay so.
        storage_options: options of the store of ``url``, not of the source, as in :func:`save`.
        max_inflight_bytes: maximum memory in bytes (default 512 MiB, at least one chunk and its source data).
        progress: as for :func:`save`.

    Raises CheckpointExistsError, ForeignObjectsError, CorruptCheckpointError (then nothing is committed),
    CheckpointReplacedError and StorageError. Raises KeyMismatchError for a pattern that matches no tensor, and
    TypeError and ValueError for wrong options. Costs two requests per unchanged chunk and two per array. For other
    chunks, only the necessary parts of the source are read.
    """
    part = open_selection(source)
    catalog = catalog_of(part)
    changes = parse_changes(
        catalog.root,
        part,
        part.url,
        chunks=chunks,
        max_chunk_bytes=max_chunk_bytes,
        dtype=dtype,
        compression=compression,
        portable_dtypes=portable_dtypes,
    )
    target = StoreSpec(url, storage_options).open()
    began = time.monotonic()
    check_limits(max_inflight_bytes=max_inflight_bytes)
    _refuse_claims(catalog, part, new_grids=bool(changes.chunks) or max_chunk_bytes is not None)
    root = dataclasses.replace(changed(select_entries(catalog.root, list(part)), changes), save_id=new_id(), tree="")
    marker = msgspec.structs.replace(marker_of(root), started=now())
    attempt = attempts.begin(target, marker, overwrite=overwrite)
    root = dataclasses.replace(root, tree=attempt.tree, history=attempt.history)
    running = _Copy(catalog, root, target, max_inflight_bytes, progress)
    try:
        with attempts.report_lost_commit(target, attempt):
            running.run()
            root = running.finish()
    except BaseException as err:
        target.close_part()
        attempts.abandon(target, attempt, lost=isinstance(err, CheckpointExistsError))
        raise
    attempts.commit(target, attempt, root)
    attempts.clean_up(target, attempt)
    report = running.report(began, changes.casts.uncast)
    warn_of_overflow(report.overflowed)
    return report


def _refuse_claims(source: Catalog, names: Iterable[str], *, new_grids: bool) -> None:
    """Raise CorruptCheckpointError for arrays that the source cannot store, before lists of their chunks are made.

    Makes a request for the tables if there are many chunks. If arrays get new grids, makes one for each large array.
    """
    nodes = [node for name in names if (node := source.root.array(name)) is not None]
    source.refuse_too_many_chunks(*nodes)
    with source.explaining_damage():
        for node in nodes if new_grids else []:
            source.stored_array(node).refuse_unstored()


def select_entries(root: Root, names: Sequence[str]) -> Root:
    """Return a root with some of the entries, and with the containers above them."""
    entries = {fqn: root.entries[fqn] for fqn in names}
    stacks = {fqn: root.stacks[fqn] for fqn in entries if fqn in root.stacks}
    optimizers = {
        fqn: name for fqn, name in root.optimizers.items() if any(one.startswith(f"{fqn}.") for one in entries)
    }
    part = dataclasses.replace(root, entries=entries, stacks=stacks, optimizers=optimizers)
    paths = [part.node_path(fqn) for fqn in entries]
    above = parent_groups(paths)
    keys = {path: key for path, key in root.keys.items() if path in above.union(paths)}
    containers = {path: kind for path, kind in root.containers.items() if path in above}
    ascending = sorted(entries)
    versions = {name: own for name, own in root.versions.items() if begins_one(name, ascending)}
    return dataclasses.replace(part, keys=keys, containers=containers, versions=versions)


class _EncodedArray:
    """An array whose chunks are encoded again, with its parts of the tables, which are filled chunk by chunk."""

    def __init__(self, old: ArrayNode, node: ArrayNode) -> None:
        self.old = old
        self.node = node
        self.checksums = np.zeros((node.grid.num_chunks, int(np.prod(node.grid.sub_counts))), "<u4")
        self.sizes = None if node.compression is None else np.zeros_like(self.checksums)
        self.overflowed = 0

    def add(self, number: int, chunk: EncodedChunk) -> None:
        """Add a stored chunk with a number in C order."""
        self.checksums[number] = chunk.checksums
        if self.sizes is not None:
            self.sizes[number] = chunk.sizes
        self.overflowed += chunk.overflowed


class _Copy:
    """A running copy. It puts chunks and documents, then the tables."""

    def __init__(
        self, source: Catalog, root: Root, target: Store, max_inflight_bytes: int, progress: Progress | None
    ) -> None:
        self._source = source
        self._root = root
        self._target = target
        self._budget = BytesBudget(max_inflight_bytes)
        self._progress = progress
        self._lock = threading.Lock()
        self._keys: list[str] = []
        self._nbytes = 0
        old = {node.path: node for node in source.root.arrays()}
        # Arrays that differ only in ``portable`` have the same bytes and another type's name in the document.
        self._encoded = {
            node.path: _EncodedArray(old[node.path], node)
            for node in root.arrays()
            if node._replace(portable=old[node.path].portable) != old[node.path]
        }

    def run(self) -> None:
        """Put all chunks and documents."""
        with self._source.explaining_damage():
            self._target.begin_part(self._root.save_id, place_in_order(self._known_sizes()))
        chunks = [(node, chunk) for node in self._root.arrays() for chunk in node.grid.chunks_of(node.grid.whole)]
        with self._source.explaining_damage():
            self._tally = ByteCounter(sum(self._expected(*item) for item in chunks), self._progress)
            jobs: list[Callable[[], None]] = [*self._documents(), *(partial(self._chunk, *item) for item in chunks)]
            run_jobs(jobs, min(self._source.store.max_concurrency, self._target.max_concurrency))
        self._target.sync(self._keys)

    def _known_sizes(self) -> Iterator[tuple[str, int]]:
        """Yield the keys and sizes of the chunk objects whose sizes are known before they are written."""
        for node in sorted(self._root.arrays() if self._target.is_archive else [], key=lambda node: node.path):
            for chunk in node.grid.chunks_of(node.grid.whole):
                if node.path not in self._encoded:
                    yield node.chunk_key(chunk), self._source.chunk_table(node, chunk).object_size
                elif node.compression is None:
                    yield node.chunk_key(chunk), chunk_object_bytes(node)

    def finish(self) -> Root:
        """Put the tables and return the root to commit."""
        if (part := self._target.end_part()) is not None:
            arrays = self._root.arrays()
            keys = (node.chunk_key(chunk) for node in arrays for chunk in node.grid.chunks_of(node.grid.whole))
            self._target.add_parts([part], keys)
        tables, puts = encode_tables(self._root.save_id, self._numbers())
        run_jobs(
            (partial(self._target.put, key, buffers) for key, buffers in puts.items()), self._target.max_concurrency
        )
        self._target.sync(puts)
        return dataclasses.replace(
            self._root,
            created=now(),
            checksums=tables[CHECKSUMS],
            sizes=tables.get(SIZES),
            digests=None,
            reused=None,
        )

    def report(self, began: float, uncast: tuple[str, ...]) -> CopyReport:
        """Return the report of the copy."""
        names = {node.path: fqn for fqn, node in self._root.tensors.items()}
        lost = {names[path]: encoded.overflowed for path, encoded in self._encoded.items() if encoded.overflowed}
        objects = sum(node.grid.num_chunks for node in self._root.arrays())
        done, seconds = self._nbytes, time.monotonic() - began
        saved = (self._target.url, self._root.save_id, done, objects, (done,), seconds)
        return CopyReport(*saved, overflowed=lost, uncast=uncast)

    def _expected(self, node: ArrayNode, chunk: Ints) -> int:
        """Return a chunk's bytes for the progress: its object's size, or the size of its elements if it is encoded."""
        if node.path in self._encoded:
            return node.grid.chunk_box(chunk).size * node.dtype.itemsize
        return self._source.chunk_table(node, chunk).object_size

    def _documents(self) -> Iterator[Callable[[], None]]:
        for path in self._root.groups():
            yield partial(self._put, join(path, NODE), [GROUP_DOCUMENT])
        for node in self._root.arrays():
            yield partial(self._put, join(self._root.tree, node.path, NODE), [node.document_bytes()])

    def _put(self, key: str, buffers: Sequence[Buffer]) -> None:
        self._target.put(key, buffers)
        with self._lock:
            self._keys.append(key)

    def _chunk(self, node: ArrayNode, chunk: Ints) -> None:
        key = join(self._root.tree, node.chunk_key(chunk))
        encoded = self._encoded.get(node.path)
        nbytes = self._copy_chunk(node, chunk, key) if encoded is None else self._rewrite_chunk(encoded, chunk, key)
        with self._lock:
            self._keys.append(key)
            self._nbytes += nbytes
        self._tally.add(self._expected(node, chunk))

    def _copy_chunk(self, node: ArrayNode, chunk: Ints, key: str) -> int:
        """Read a chunk, check it against the table and put it. Returns its size in bytes."""
        array = self._source.stored_array(node)
        table, stored = array.table(chunk), array.node.chunk_key(chunk)
        size = table.object_size
        with self._budget.hold(size):
            try:
                data = array.store.read(stored, 0, size)
            except ObjectNotFoundError as err:
                raise array.missing_error(chunk) from err
            if not table.check(0, np.frombuffer(data, np.uint8)):
                raise CorruptCheckpointError(
                    f"chunk {stored!r} of array {node.path!r} in {array.store.url} is damaged: its checksum differs. "
                    "The copy was not committed"
                )
            self._target.put(key, [data])
        return size

    def _rewrite_chunk(self, encoded: _EncodedArray, chunk: Ints, key: str) -> int:
        """Read a chunk's box, encode it and put it. Returns the size of its object in bytes."""
        found = rewrite_chunk(self._source, encoded.old, encoded.node, chunk, self._target, key, self._budget)
        with self._lock:
            encoded.add(encoded.node.grid.chunk_number(chunk), found)
        return found.nbytes

    def _numbers(self) -> dict[str, RawArray]:
        """Return the elements of each table. Unchanged arrays have the source's elements."""
        parts: dict[str, list[RawArray]] = {CHECKSUMS: [], WRITERS: []}
        writers = self._source.writers_by_path()
        for node in self._root.arrays():
            encoded = self._encoded.get(node.path)
            if encoded is None:
                crcs, ranks, sizes = self._source.checksums(node), writers[node.path], self._source.sizes(node)
            else:
                crcs, ranks = encoded.checksums, choose_writers(encoded.old, node, writers[node.path])
                sizes = encoded.sizes
            parts[CHECKSUMS].append(crcs.reshape(-1))
            parts[WRITERS].append(ranks.reshape(-1))
            if sizes is not None:
                parts.setdefault(SIZES, []).append(sizes.reshape(-1))
        return {name: np.concatenate([np.zeros(0, "<u4"), *arrays]) for name, arrays in parts.items()}
