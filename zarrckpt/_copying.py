"""A checkpoint, or a part of it, copied elsewhere: the same chunks, checked on the way, committed as a save is.

No torch.
"""

from __future__ import annotations

import dataclasses
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np

from zarrckpt import _codec, _commit
from zarrckpt._catalog import Catalog
from zarrckpt._crc32c import crc32c
from zarrckpt._documents import NODE, ArrayNode, dumps, group_document, join
from zarrckpt._errors import CheckpointError, CorruptCheckpointError
from zarrckpt._grid import Ints
from zarrckpt._memory import BytesBudget
from zarrckpt._report import SaveReport
from zarrckpt._root import CHECKSUMS, SIZES, WRITERS, Marker, Root, Table, now, parent_groups, table_node
from zarrckpt._store import Buffer, Store
from zarrckpt._transfer import Progress, run


def copy_checkpoint(
    source: Catalog,
    names: Sequence[str],
    target: Store,
    *,
    overwrite: bool,
    max_inflight_bytes: int,
    progress: Progress | None,
) -> SaveReport:
    """Copy entries of a checkpoint, see :func:`zarrckpt.copy`."""
    began = time.monotonic()
    root = _part(source.root, names)
    arrays = tuple(node.path for node in root.arrays())
    groups = tuple(sorted(parent_groups(arrays)))
    marker = Marker(_commit.new_id(), "", arrays, groups, now())
    attempt = _commit.begin(target, marker, overwrite=overwrite)
    root = dataclasses.replace(root, save_id=attempt.save_id, tree=attempt.tree, history=attempt.history)
    with _commit.losing_is_named(target, attempt.save_id, attempt.base_id):
        copied = _Copy(source, root, target, max_inflight_bytes, progress)
        keys = copied.run()
        target.sync(keys)
        tables, puts = _tables(source, root)
        run((partial(target.put, key, buffers) for key, buffers in puts.items()), target.max_concurrency)
        target.sync(puts)
        _commit.commit(target, attempt, dataclasses.replace(root, created=now(), **tables))  # type: ignore[arg-type]
    _clean(target, attempt)
    chunks = sum(node.grid.num_chunks for node in root.arrays())
    return SaveReport(target.url, attempt.save_id, copied.done, chunks, (copied.done,), time.monotonic() - began)


def _clean(target: Store, attempt: _commit.Attempt) -> None:
    try:
        finished = [attempt.base_id] if attempt.base_id else []
        _commit.clean(target, attempt.older, finished=finished, committed=attempt.marker)
    except CheckpointError as err:
        warnings.warn(f"the copy at {target.url} is whole, but objects of earlier saves stay: {err}", stacklevel=4)


def _part(root: Root, names: Sequence[str]) -> Root:
    """The root of some entries: with the containers that still hold any."""
    entries = {fqn: root.entries[fqn] for fqn in names}
    kept = {fqn: keys for fqn, keys in root.keys.items() if fqn in entries}
    part = dataclasses.replace(root, entries=entries, keys=kept)
    paths = [part.node_path(fqn) for fqn in entries]
    above = parent_groups(paths) | {""}
    return dataclasses.replace(part, containers={path: kind for path, kind in root.containers.items() if path in above})


class _Copy:
    """Chunks and documents on their way."""

    def __init__(
        self, source: Catalog, root: Root, target: Store, max_inflight_bytes: int, progress: Progress | None
    ) -> None:
        self._source = source
        self._root = root
        self._target = target
        self._memory = BytesBudget(max_inflight_bytes)
        self._progress = progress
        self._lock = threading.Lock()
        self._total = 0
        self.done = 0
        """Bytes of chunk objects."""

    def run(self) -> list[str]:
        """Copy all; the keys that were written."""
        # An array without dimensions has one chunk, and an empty one none: numpy's rule, too.
        chunks = [(node, chunk) for node in self._root.arrays() for chunk in np.ndindex(*node.grid.counts)]
        self._total = sum(self._source.chunk_table(*item).object_size for item in chunks)
        jobs: list[Callable[[], str]] = [*self._documents(), *(partial(self._chunk, *item) for item in chunks)]
        with self._source.guard():
            return run(jobs, min(self._source.store.max_concurrency, self._target.max_concurrency))

    def _documents(self) -> Iterator[Callable[[], str]]:
        for path in self._root.groups():
            yield partial(self._put, join(path, NODE), [dumps(group_document())])
        for node in self._root.arrays():
            yield partial(self._put, join(self._root.tree, node.path, NODE), [dumps(node.document())])

    def _put(self, key: str, buffers: Sequence[Buffer]) -> str:
        self._target.put(key, buffers)
        return key

    def _chunk(self, node: ArrayNode, chunk: Ints) -> str:
        """Read a chunk, compare it with the table, write it."""
        table, key = self._source.chunk_table(node, chunk), node.chunk_key(chunk)
        size = table.object_size
        with self._memory.take(size) as memory:
            stored = join(self._source.root.tree, key)
            self._source.store.read_into(stored, 0, memory.data)
            if not table.check(0, memory, node.compression):
                raise CorruptCheckpointError(
                    f"chunk {stored!r} of array {node.path!r} in {self._source.store.url} is not what was saved; the "
                    "copy was not committed"
                )
            self._put(join(self._root.tree, key), [memory.data])
        with self._lock:
            self.done += size
            if self._progress is not None:
                self._progress(self.done, self._total)
        return join(self._root.tree, key)


def _tables(source: Catalog, root: Root) -> tuple[dict[str, Table | None], dict[str, Sequence[Buffer]]]:
    """The parts of the source's tables that the copied arrays have, as tables of the copy."""
    arrays, writers = root.arrays(), source.writers()
    compressed = [node for node in arrays if node.compression is not None]
    parts = {
        CHECKSUMS: [source.checksums(node) for node in arrays],
        WRITERS: [writers[node.path].reshape(-1) for node in arrays],
    }
    if compressed:
        sizes = [source.sizes(node) for node in compressed]
        parts[SIZES] = [part for part in sizes if part is not None]
    tables: dict[str, Table | None] = {CHECKSUMS: None, WRITERS: None, SIZES: None}
    puts: dict[str, Sequence[Buffer]] = {}
    for name, pieces in parts.items():
        table = np.concatenate([np.zeros(0, "<u4"), *pieces]).astype("<u4")
        tables[name] = Table(len(table), crc32c(table))
        node = table_node(root.save_id, name, len(table))
        puts[join(node.path, NODE)] = [dumps(node.document())]
        if len(table):
            puts[node.chunk_key((0,))] = _codec.encode_chunk(node.grid, table)[0]
    return tables, puts
