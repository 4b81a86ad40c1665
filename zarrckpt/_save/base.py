"""The base of a save, an earlier checkpoint: read by the coordinator, and sent to all ranks."""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from zarrckpt._commit.stored_documents import parse_root_document
from zarrckpt._errors import CheckpointError, ObjectNotFoundError, log
from zarrckpt._format.chunk_layout import RawArray
from zarrckpt._format.documents import NODE, ArrayNode
from zarrckpt._format.root import CHECKSUMS, DIGESTS, Root, Table, table_node
from zarrckpt._format.sealed import is_save_id
from zarrckpt._format.wire import record
from zarrckpt._jobs import run_jobs
from zarrckpt._plan.plan import Layout, PlanOptions
from zarrckpt._read.catalog import read_table
from zarrckpt._save.request import SaveRequest
from zarrckpt._store import Store, StoreSpec
from zarrckpt._store._base import version_of
from zarrckpt._store._optional import OptionalRequests
from zarrckpt._store._regular_files import MAX_WHOLE_BYTES


@record
@dataclass(frozen=True)
class BaseTables:
    """The numbers of a base's chunks in an object store, one array after the other.

    ``chunks`` has the number of chunks of each array, and ``subchunks`` the number of subchunks of one of its chunks
    (int64). ``digests`` (uint64) has a number for each chunk, ``checksums`` (uint32) for each subchunk.
    """

    version: str
    """A digest of the root document."""
    chunks: np.ndarray[Any, Any]
    subchunks: np.ndarray[Any, Any]
    digests: np.ndarray[Any, Any]
    checksums: np.ndarray[Any, Any]

    def __post_init__(self) -> None:
        counts = len(self.digests), len(self.checksums)
        if counts != (self.chunks.sum(), (self.chunks * self.subchunks).sum()):
            raise ValueError("the numbers of chunks of the base do not match its digests")


@record
@dataclass(frozen=True)
class SentBase:
    """The base of a save, as the coordinator sends it to all ranks."""

    name: str
    """The folder of the base in the run's folder, or "" if it is the request's own base."""
    save_id: str
    tree: str
    saves: int
    """The number of saves since the last one that wrote every chunk."""
    paths: tuple[str, ...]
    """The arrays that the save may reuse."""
    tables: BaseTables | None
    """None for local files, whose bytes are compared."""

    def __post_init__(self) -> None:
        if not is_save_id(self.save_id) or self.tree not in ("", f"@{self.save_id}"):
            raise ValueError(f"the tree {self.tree!r:.100} does not belong to the base {self.save_id!r:.100}")
        if self.name in (".", "..") or "/" in self.name:
            raise ValueError(f"{self.name!r:.100} is not the name of a folder of the run")
        if self.tables is not None and len(self.paths) != len(self.tables.chunks):
            raise ValueError("the arrays of the base do not match its numbers of chunks")


@dataclass(frozen=True)
class _StoredBase:
    """A base whose root document was read."""

    spec: StoreSpec
    store: Store
    name: str
    """As in :class:`SentBase`."""
    version: str
    root: Root
    linked: bool
    """Whether the chunks are local files, which are compared and linked."""

    @property
    def saves(self) -> int:
        """The number of saves since the last one that wrote every chunk, including the new save."""
        return 1 if self.root.reused is None else self.root.reused.saves + 1


class BaseReader:
    """Reads the base of a save on the coordinator. Raises no CheckpointError.

    Args:
        request: the save.
        store: the store of the new checkpoint.
    """

    def __init__(self, request: SaveRequest, store: Store) -> None:
        self._request = request
        self.optional = OptionalRequests()
        """The time that requests about the base may lose on this rank."""
        self._store = store
        self._base: _StoredBase | None = None
        self.problem = ""
        """The reason why the base cannot be used, or ""."""

    def plan_options(self) -> PlanOptions:
        """Return the options of a plan that keeps the chunk grids of the base. One request if there is a base."""
        self._find()
        grids = {} if self._base is None else {node.path: node.grid for node in self._base.root.tensors.values()}
        return dataclasses.replace(self._request.options.plan, grids=grids)

    def read(self, layout: Layout) -> SentBase | None:
        """Return the part of the base that a save of this layout may reuse. Two requests at a time for its tables."""
        if self._base is None and not self.problem and self._request.run is not None:
            # A run that was not restored knows its newest checkpoint only after it has begun.
            self._find()
        if (base := self._base) is None:
            return None
        full_every = self._request.options.reuse_full_every
        if full_every is not None and base.saves >= full_every:
            self.problem = f"reuse_full_every is {full_every}, and {base.saves} saves have reused chunks"
            return None
        tensors = {node.path: node for node in layout.tensors.values()}
        blobs = {path for fqn, path in layout.node_paths.items() if fqn not in layout.tensors}
        # Equal tensors, and all blobs of equal names.
        nodes = [n for n in base.root.arrays() if tensors.get(n.path) == n or n.path in blobs]
        try:
            tables = None if base.linked else _read_tables(base, nodes, self.optional)
        except CheckpointError as err:
            self._refuse(base.spec, str(err))
            return None
        paths = tuple(node.path for node in nodes)
        return SentBase(base.name, base.root.save_id, base.root.tree, base.saves, paths, tables)

    def _find(self) -> None:
        if (found := self._request.base_to_read()) is None:
            return
        spec, name = found
        if spec.is_archive:
            return self._refuse(spec, "it is an archive", logging.INFO)
        try:
            store = spec.open()
            linked = store.is_local and self._store.is_local
            if not linked and not self._store.copies_from(store):
                return self._refuse(spec, f"its objects cannot be copied to {self._store.url}", logging.INFO)
            data = store.get_optional(NODE, MAX_WHOLE_BYTES, self.optional)
            root = parse_root_document(data, spec.url)
        except ObjectNotFoundError:
            return self._refuse(spec, "it has no checkpoint")
        except CheckpointError as err:
            return self._refuse(spec, str(err))
        if root.digests is None and not linked:
            why = "it has no digests of its chunks. This save stores them, for later ones. To store them in every save"
            return self._refuse(spec, f"{why}, pass SaveOptions(reuse='on')")
        self._base = _StoredBase(spec, store, name, version_of(data), root, linked)

    def _refuse(self, spec: StoreSpec, why: str, level: int = logging.WARNING) -> None:
        self.problem = f"{spec.url} cannot be reused, and all chunks are written: {why}"
        log.log(level, "%s", self.problem)


def _read_tables(base: _StoredBase, nodes: list[ArrayNode], optional: OptionalRequests) -> BaseTables:
    """Read the tables of a base, and return the numbers of some of its arrays. Two requests at a time."""
    assert base.root.digests is not None

    def read(name: str, table: Table) -> RawArray:
        node = table_node(base.root.save_id, name, table.length)
        get = partial(base.store.get_optional, optional=optional)
        return read_table(node, table.crc32c, base.spec.url, get) if table.length else np.zeros(0, "<u4")

    tables = ((CHECKSUMS, base.root.checksums), (DIGESTS, base.root.digests))
    checksums, digests = run_jobs((partial(read, *table) for table in tables), len(tables))
    chosen = {node.path for node in nodes}
    chosen_digests, chosen_checksums = [digests[:0]], [checksums[:0]]
    chunk = subchunk = 0
    for node in base.root.arrays():
        chunks, subchunks = node.grid.num_chunks, node.grid.num_subchunks
        if node.path in chosen:
            chosen_digests.append(digests[chunk : chunk + chunks])
            chosen_checksums.append(checksums[subchunk : subchunk + subchunks])
        chunk, subchunk = chunk + chunks, subchunk + subchunks
    return BaseTables(
        base.version,
        np.array([node.grid.num_chunks for node in nodes], "<i8"),
        np.array([node.grid.subchunks_per_chunk for node in nodes], "<i8"),
        np.concatenate(chosen_digests),
        np.concatenate(chosen_checksums),
    )
