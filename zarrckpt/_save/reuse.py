"""Reuse the unchanged chunks of an earlier checkpoint, the base, by a copy in the store instead of a put.

A chunk is unchanged if the crc32c of each of its subchunks and the CRC-64/NVME of its object equal those in the tables
of the base. These are at least 96 bits. The new checkpoint has its own objects, and does not need the base afterwards.

If the base was removed and another checkpoint saved at its url, a copy may have other bytes. So each rank reads the
root document of the base again after its last copy. If it has changed, the copies are read and compared.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from zarrckpt._commit.stored_documents import is_stored, parse_root_document
from zarrckpt._errors import CheckpointError, ObjectNotFoundError, log
from zarrckpt._format.chunk_codec import ChunkEncoder, Elements
from zarrckpt._format.chunk_layout import RawArray
from zarrckpt._format.crc64 import crc64
from zarrckpt._format.documents import NODE, ArrayNode, join
from zarrckpt._format.grid import Grid, Ints
from zarrckpt._format.root import CHECKSUMS, DIGESTS, Root, Table, table_node
from zarrckpt._format.sealed import is_save_id
from zarrckpt._format.wire import record
from zarrckpt._jobs import BytesBudget, run_jobs
from zarrckpt._plan.plan import Layout, PlanOptions
from zarrckpt._plan.rank_plan import ChunkPlan
from zarrckpt._read.catalog import Catalog
from zarrckpt._save.request import SaveRequest
from zarrckpt._store import Store, StoreSpec
from zarrckpt._store._base import Reuse, version_of


@record
@dataclass(frozen=True)
class SentBase:
    """The base of a save and the numbers of its chunks, as the coordinator sends them to all ranks.

    ``paths`` are the arrays that the save may reuse. ``chunks`` has the number of chunks of each array, and
    ``subchunks`` the number of subchunks of one of its chunks (int64). ``digests`` (uint64) and ``checksums`` (uint32)
    have the numbers of all these chunks and subchunks, one array after the other.
    """

    name: str
    """The folder of the base in the run's folder, or "" if the caller chose the base."""
    save_id: str
    tree: str
    version: str
    """A digest of the root document."""
    saves: int
    """The number of saves since the last one that wrote every chunk."""
    paths: tuple[str, ...]
    chunks: np.ndarray[Any, Any]
    subchunks: np.ndarray[Any, Any]
    digests: np.ndarray[Any, Any]
    checksums: np.ndarray[Any, Any]

    def __post_init__(self) -> None:
        if not is_save_id(self.save_id) or self.tree not in ("", f"@{self.save_id}"):
            raise ValueError(f"the tree {self.tree!r:.100} does not belong to the base {self.save_id!r:.100}")
        if self.name in (".", "..") or "/" in self.name:
            raise ValueError(f"{self.name!r:.100} is not the name of a folder of the run")
        counts = len(self.digests), len(self.checksums)
        if len(self.paths) != len(self.chunks) or counts != (self.chunks.sum(), (self.chunks * self.subchunks).sum()):
            raise ValueError("the numbers of chunks of the base do not match its digests")


@dataclass(frozen=True)
class StoredBase:
    """A base whose root document the coordinator has read."""

    spec: StoreSpec
    name: str
    """As in :class:`SentBase`."""
    version: str
    root: Root
    digests: Table

    @property
    def grids(self) -> dict[str, Grid]:
        """The chunk grids of the tensors by path."""
        return {node.path: node.grid for node in self.root.tensors.values()}

    @property
    def saves(self) -> int:
        """The number of saves since the last one that wrote every chunk, including the new save."""
        return 1 if self.root.reused is None else self.root.reused.saves + 1


def find_base(request: SaveRequest) -> StoredBase | None:
    """Read the root document of a save's base. One request if the save has a base. Only the coordinator calls it.

    If the base cannot be used, return None and log the reason. Raises no CheckpointError.
    """
    if (found := request.base_to_read()) is None:
        return None
    spec, name = found
    try:
        data = spec.open().get(NODE)
        root = parse_root_document(data, spec.url)
    except ObjectNotFoundError:
        log.warning("%s has no checkpoint to reuse: all chunks are written", spec.url)
        return None
    except CheckpointError as err:
        _warn_of_base(spec, err)
        return None
    if root.digests is None:
        log.info("%s has no digests of chunks: all chunks are written", spec.url)
        return None
    return StoredBase(spec, name, version_of(data), root, root.digests)


def with_grids(options: PlanOptions, base: StoredBase | None) -> PlanOptions:
    """Return the options of a plan that keeps the chunk grids of a base."""
    return dataclasses.replace(options, grids={} if base is None else base.grids)


def read_base(base: StoredBase | None, full_every: int | None, layout: Layout) -> SentBase | None:
    """Read the tables of a base for a save of this layout. Two requests at a time.

    If the base cannot be used, or ``full_every`` (the option ``reuse_full_every``) excludes it, return None and log
    damage. Raises no CheckpointError.
    """
    if base is None or (full_every is not None and base.saves >= full_every):
        return None
    catalog = Catalog(base.spec, base.root)
    tables = ((CHECKSUMS, base.root.checksums), (DIGESTS, base.digests))
    try:
        checksums, digests = run_jobs((partial(catalog.read_table, *table) for table in tables), len(tables))
    except CheckpointError as err:
        _warn_of_base(base.spec, err)
        return None
    return _sent_base(base, layout, checksums, digests)


def _warn_of_base(spec: StoreSpec, error: CheckpointError) -> None:
    log.warning("%s cannot be reused, and all chunks are written: %s", spec.url, error)


def _sent_base(base: StoredBase, layout: Layout, checksums: RawArray, digests: RawArray) -> SentBase:
    """Return the part of a base that a save of this layout may reuse: equal tensors, and all blobs of equal names."""
    tensors = {node.path: node for node in layout.tensors.values()}
    blobs = {path for fqn, path in layout.node_paths.items() if fqn not in layout.tensors}
    nodes, chosen_digests, chosen_checksums = [], [digests[:0]], [checksums[:0]]
    chunk = subchunk = 0
    for node in base.root.arrays():
        chunks, subchunks = node.grid.num_chunks, node.grid.num_subchunks
        if tensors.get(node.path) == node or node.path in blobs:
            nodes.append(node)
            chosen_digests.append(digests[chunk : chunk + chunks])
            chosen_checksums.append(checksums[subchunk : subchunk + subchunks])
        chunk, subchunk = chunk + chunks, subchunk + subchunks
    return SentBase(
        base.name,
        base.root.save_id,
        base.root.tree,
        base.version,
        base.saves,
        tuple(node.path for node in nodes),
        np.array([node.grid.num_chunks for node in nodes], "<i8"),
        np.array([node.grid.subchunks_per_chunk for node in nodes], "<i8"),
        np.concatenate(chosen_digests),
        np.concatenate(chosen_checksums),
    )


@dataclass(frozen=True)
class _ArrayNumbers:
    """The numbers of one array of the base: a digest for each chunk, and a row of checksums."""

    digests: RawArray
    checksums: RawArray


class BaseChunks:
    """The numbers of the chunks of a base, by array."""

    def __init__(self, sent: SentBase) -> None:
        self._arrays: dict[str, _ArrayNumbers] = {}
        chunk = subchunk = 0
        for path, chunks, per_chunk in zip(sent.paths, sent.chunks.tolist(), sent.subchunks.tolist(), strict=True):
            checksums = sent.checksums[subchunk : subchunk + chunks * per_chunk].reshape(chunks, per_chunk)
            self._arrays[path] = _ArrayNumbers(sent.digests[chunk : chunk + chunks], checksums)
            chunk, subchunk = chunk + chunks, subchunk + chunks * per_chunk

    def encode_unchanged(
        self, node: ArrayNode, index: Ints, elements: Elements, budget: BytesBudget
    ) -> ChunkEncoder | None:
        """Return the encoder of a chunk after it has encoded it, or None if the chunk differs from that of the base."""
        numbers, number = self._arrays.get(node.path), node.grid.chunk_number(index)
        if numbers is None or number >= len(numbers.digests):
            return None
        encoder = ChunkEncoder(node, elements, digested=True)
        with budget.take(*encoder.memory(in_parts=True)) as scratch:
            equal = encoder.equals(numbers.checksums[number], int(numbers.digests[number]), scratch)
        return encoder if equal else None


@dataclass(frozen=True)
class StoredChunk:
    """A chunk of the new checkpoint, and how it was made."""

    encoder: ChunkEncoder
    reuse: Reuse | None = None
    """None if the chunk was written."""


@dataclass(frozen=True)
class ReusedObject:
    """A chunk that was copied or linked. It has no reference to the chunk's elements, which would stay in memory."""

    key: str
    nbytes: int
    digest: int
    chunk: ChunkPlan | None
    """The plan of the chunk if this rank can write it again: all its pieces are items of the rank."""


class ReusableChunks:
    """The chunks of a base that the save of one rank may reuse. Used by many threads."""

    def __init__(self, store: Store, base: Store, sent: SentBase) -> None:
        self._store = store
        self._base = base
        self._sent = sent
        self._numbers = BaseChunks(sent)
        self._reused: list[ReusedObject] = []
        self._lock = threading.Lock()

    def reuse(
        self, key: str, node: ArrayNode, index: Ints, elements: Elements, budget: BytesBudget, chunk: ChunkPlan | None
    ) -> StoredChunk | None:
        """Copy or link a chunk if it is unchanged. Returns None if it must be written.

        ``chunk`` is that of :class:`ReusedObject`. Without it, one more small request makes it very unlikely that the
        copy has other bytes.
        """
        with self._store.encoders:
            encoder = self._numbers.encode_unchanged(node, index, elements, budget)
        if encoder is None:
            return None
        source = join(self._sent.tree, node.chunk_key(index))
        reuse = self._store.reuse(self._base, source, key, encoder.nbytes)
        if reuse is None or (chunk is None and not self._has_tables()):
            return None
        with self._lock:
            self._reused.append(ReusedObject(key, encoder.nbytes, encoder.digest, chunk))
        return StoredChunk(encoder, reuse)

    def find_changed(self, budget: BytesBudget) -> Sequence[ReusedObject]:
        """Return the reused chunks whose objects have other bytes. One request if the base is unchanged.

        Otherwise reads every reused chunk.
        """
        if not self._reused or self._is_unchanged():
            return []
        log.warning("%s has changed during the save: copies of its chunks are read and compared", self._base.url)
        jobs = (partial(self._is_copy, reused, budget) for reused in self._reused)
        equal = run_jobs(jobs, self._store.useful_concurrency)
        return [reused for reused, same in zip(self._reused, equal, strict=True) if not same]

    def _is_unchanged(self) -> bool:
        try:
            return version_of(self._base.get(NODE)) == self._sent.version
        except CheckpointError:
            return False

    def _has_tables(self) -> bool:
        """Whether the base still has its tables. Its chunks are replaced only after their removal."""
        try:
            return is_stored(self._base, join(table_node(self._sent.save_id, DIGESTS, 0).path, NODE))
        except CheckpointError:
            return False

    def _is_copy(self, reused: ReusedObject, budget: BytesBudget) -> bool:
        with budget.hold(reused.nbytes):
            try:
                return crc64(self._store.read(reused.key, 0, reused.nbytes)) == reused.digest
            except CheckpointError:
                return False
