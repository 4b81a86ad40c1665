"""A checkpoint, or a part of it, copied elsewhere: the same chunks, checked on the way, committed as a save is.

No torch.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np

from zarrckpt import _codec, _commit
from zarrckpt._catalog import Catalog
from zarrckpt._documents import NODE, ArrayNode, dumps, group_document, join
from zarrckpt._errors import CorruptCheckpointError
from zarrckpt._grid import Ints
from zarrckpt._memory import BytesBudget
from zarrckpt._report import SaveReport
from zarrckpt._root import CHECKSUMS, SIZES, WRITERS, Root, now, parent_groups
from zarrckpt._store import Buffer, Store
from zarrckpt._transfer import Progress, Tally, run


def copy_checkpoint(
    source: Catalog,
    names: Sequence[str],
    target: Store,
    *,
    overwrite: bool,
    max_inflight_bytes: int,
    progress: Progress | None,
) -> SaveReport:
    """Copy entries of a checkpoint, see :meth:`Checkpoint.copy_to`."""
    began = time.monotonic()
    root = dataclasses.replace(_part(source.root, names), save_id=_commit.new_id(), tree="", created=now())
    attempt = _commit.begin(target, root.marker(), overwrite=overwrite)
    root = dataclasses.replace(root, tree=attempt.tree, history=attempt.history)
    with _commit.losing_is_named(target, attempt.save_id, attempt.base_id):
        copied = _Copy(source, root, target, max_inflight_bytes, progress)
        keys = copied.run()
        target.sync(keys)
        tables, puts = _commit.tables_of(root.save_id, _numbers(source, root))
        run((partial(target.put, key, buffers) for key, buffers in puts.items()), target.max_concurrency)
        target.sync(puts)
        named = {"checksums": tables[CHECKSUMS], "writers": tables[WRITERS], "sizes": tables.get(SIZES)}
        _commit.commit(target, attempt, dataclasses.replace(root, created=now(), **named))  # type: ignore[arg-type]
    _commit.clean_after(target, attempt)
    chunks = sum(node.grid.num_chunks for node in root.arrays())
    return SaveReport(target.url, root.save_id, copied.done, chunks, (copied.done,), time.monotonic() - began)


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

    @property
    def done(self) -> int:
        """Bytes of chunk objects."""
        return self._tally.done

    def run(self) -> list[str]:
        """Copy all; the keys that were written."""
        # An array without dimensions has one chunk, and an empty one none: numpy's rule, too.
        chunks = [(node, chunk) for node in self._root.arrays() for chunk in np.ndindex(*node.grid.counts)]
        self._tally = Tally(sum(self._source.chunk_table(*item).object_size for item in chunks), self._progress)
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
        self._tally.add(size)
        return join(self._root.tree, key)


def _numbers(source: Catalog, root: Root) -> dict[str, _codec.RawArray]:
    """The parts of the source's tables that the copied arrays have."""
    arrays, writers = root.arrays(), source.writers()
    parts = {
        CHECKSUMS: [source.checksums(node) for node in arrays],
        WRITERS: [writers[node.path].reshape(-1) for node in arrays],
    }
    sizes = [found for node in arrays if (found := source.sizes(node)) is not None]
    if sizes:
        parts[SIZES] = sizes
    return {name: np.concatenate([np.zeros(0, "<u4"), *pieces]) for name, pieces in parts.items()}
