"""Reuse the unchanged chunks of an earlier checkpoint, the base, by a link or a copy in the store instead of a put.

A local file is linked if its bytes are those of the chunk in memory. In an object store, a chunk is copied if the
crc32c of each of its subchunks and the CRC-64/NVME of its object equal those in the tables of the base. These are at
least 96 bits. The new checkpoint does not need the base afterwards.

If the base in an object store was removed and another checkpoint saved at its url, a copy may have other bytes. So each
rank reads the root document of the base again after its last copy. If it has changed, the copies are read and compared.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol

from zarrckpt._commit.chunks import put_chunk
from zarrckpt._errors import CheckpointError, log
from zarrckpt._format.chunk_codec import BLOCK_BYTES, ChunkEncoder, Elements
from zarrckpt._format.chunk_layout import RawArray, chunk_object_bytes, max_chunk_object_bytes
from zarrckpt._format.crc64 import crc64
from zarrckpt._format.documents import NODE, ArrayNode, join
from zarrckpt._format.grid import Ints
from zarrckpt._format.root import DIGESTS, table_node
from zarrckpt._jobs import BytesBudget, run_jobs
from zarrckpt._plan.rank_plan import ChunkPlan
from zarrckpt._save.base import BaseTables, SentBase
from zarrckpt._store import Buffer, Store
from zarrckpt._store._base import version_of
from zarrckpt._store._linkable import COMPARED_BYTES, LinkableFile
from zarrckpt._store._optional import OptionalRequests
from zarrckpt._store._regular_files import MAX_WHOLE_BYTES

MIN_SHARED_BYTES = 64 << 10
"""Minimum size in bytes of an object that is reused. Smaller ones are written, which costs no more."""

_SLOW_BYTES_PER_SECOND = 200e6
_SLOW_SECONDS = 0.5
"""If comparisons have taken this time at a lower rate, one chunk is written instead, to compare the rates."""


@dataclass(frozen=True)
class StoredChunk:
    """A chunk of the new checkpoint, and how it was made."""

    encoder: ChunkEncoder
    reuse: Literal["copied", "linked", "tied"] | None = None
    """None if the chunk was written. A "tied" one is a link to a chunk of the same save with the same memory."""


class BaseChunks(Protocol):
    """The chunks of a base that one rank may reuse. Used by many threads."""

    @property
    def problem(self) -> str:
        """The reason why chunks were written although the base has them, or ""."""

    def put(
        self, key: str, node: ArrayNode, index: Ints, elements: Elements, budget: BytesBudget, chunk: ChunkPlan | None
    ) -> StoredChunk:
        """Reuse a chunk if it is unchanged, otherwise put it. ``chunk`` is that of :class:`CopiedObject`."""

    def find_changed(self, budget: BytesBudget) -> Sequence[CopiedObject]:
        """Return the reused chunks whose objects have other bytes, after all chunks were put."""


@dataclass(frozen=True)
class CopiedObject:
    """A chunk that was copied. It has no reference to the chunk's elements, which would stay in memory."""

    key: str
    nbytes: int
    digest: int
    chunk: ChunkPlan | None
    """The plan of the chunk if this rank can write it again: all its pieces are items of the rank."""


class LinkedChunks:
    """The chunks of a base in local files. Each is read and compared with the memory, and linked if it is equal."""

    def __init__(self, store: Store, base: Store, sent: SentBase) -> None:
        self._store = store
        self._base = base
        self._tree = sent.tree
        self._paths = frozenset(sent.paths)
        self._lock = threading.Lock()
        self._bytes, self._seconds = 0, 0.0
        """The number of bytes that were compared, and the time for it, over all threads."""
        self._has_tried = False
        self._stopped = False
        self.problem = ""

    def put(
        self, key: str, node: ArrayNode, index: Ints, elements: Elements, budget: BytesBudget, chunk: ChunkPlan | None
    ) -> StoredChunk:
        with ExitStack() as held:
            file = self._open(key, node, index)
            if file is None:
                return StoredChunk(put_chunk(self._store, key, node, elements, budget))
            held.enter_context(file)
            encoder, scratch, memory = begin_comparison(node, elements, budget, held)
            groups = encoder.groups(scratch, BLOCK_BYTES)
            begun: list[Iterable[Sequence[Buffer]]] = []
            is_trial = False
            for number, group in enumerate(groups):
                equal = self._is_next(file, group, memory)
                if not equal or (is_trial := self._begin_trial()):
                    # The first group was encoded for nothing only if the chunk is encoded again.
                    begun = [itertools.chain([group], groups)] if not number else []
                    break
            else:
                if file.size == encoder.nbytes:
                    if self._store.link(file, key):
                        return StoredChunk(encoder, "linked")
                    self._stop(f"{file.path!r} cannot be linked")

            def parts() -> Iterable[Sequence[Buffer]]:
                nonlocal encoder
                if begun:
                    return begun.pop()
                encoder = ChunkEncoder(node, elements)
                return encoder.groups(scratch)

            began = time.perf_counter()
            self._store.put_parts(key, parts)
            if is_trial:
                self._store.sync([key])
                self._end_trial(encoder.nbytes, time.perf_counter() - began)
            return StoredChunk(encoder)

    def find_changed(self, budget: BytesBudget) -> Sequence[CopiedObject]:
        return ()

    def _open(self, key: str, node: ArrayNode, index: Ints) -> LinkableFile | None:
        """Open the file of a chunk in the base, if it may be linked."""
        if self._stopped or node.path not in self._paths or max_chunk_object_bytes(node) < MIN_SHARED_BYTES:
            return None
        file = self._store.open_linkable(self._base, join(self._tree, node.chunk_key(index)), key)
        if isinstance(file, str):
            self._note(file)
            return None
        usable = file.size >= MIN_SHARED_BYTES and (
            node.compression is not None or file.size == chunk_object_bytes(node)
        )
        if usable:
            return file
        with file:
            return None

    def _is_next(self, file: LinkableFile, group: Sequence[Buffer], memory: RawArray) -> bool:
        began = time.perf_counter()
        equal = file.has_next(group, memory)
        seconds = time.perf_counter() - began
        with self._lock:
            self._bytes += sum(map(len, group))
            self._seconds += seconds
        return equal

    def _begin_trial(self) -> bool:
        """Whether this chunk is written, because comparisons are slow and it is not known if writing is slower."""
        with self._lock:
            slow = self._seconds > _SLOW_SECONDS and self._bytes < _SLOW_BYTES_PER_SECOND * self._seconds
            if not slow or self._has_tried:
                return False
            self._has_tried = True
            return True

    def _end_trial(self, nbytes: int, seconds: float) -> None:
        if self._bytes * seconds < nbytes * self._seconds:
            self._stop("reading it takes longer than writing")

    def _stop(self, why: str) -> None:
        self._stopped = True
        self._note(why)

    def _note(self, why: str) -> None:
        with self._lock:
            if self.problem:
                return
            self.problem = f"chunks of {self._base.url} are not linked: {why}"
        log.info("%s", self.problem)


def begin_comparison(
    node: ArrayNode, elements: Elements, budget: BytesBudget, held: ExitStack
) -> tuple[ChunkEncoder, RawArray, RawArray]:
    """Return an encoder, its scratch memory, and memory for the file that it is compared with, until ``held`` ends."""
    encoder = ChunkEncoder(node, elements)
    nbytes, elsewhere = encoder.memory(in_parts=True)
    compared = min(COMPARED_BYTES, max(budget.limit // 8, 1 << 12))
    memory = held.enter_context(budget.take(nbytes + compared, elsewhere))
    return encoder, memory[:nbytes], memory[nbytes:]


def equals_file(base: Store, key: str, node: ArrayNode, elements: Elements, budget: BytesBudget) -> bool:
    """Whether a local file has the bytes of a chunk, and its size permits a link."""
    file = base.open_linkable(base, key, key)
    if isinstance(file, str):
        return False
    with ExitStack() as held:
        held.enter_context(file)
        encoder, scratch, memory = begin_comparison(node, elements, budget, held)
        equal = all(file.has_next(group, memory) for group in encoder.groups(scratch, BLOCK_BYTES))
        return equal and file.size == encoder.nbytes >= MIN_SHARED_BYTES


@dataclass(frozen=True)
class _ArrayNumbers:
    """The numbers of one array of the base: a digest for each chunk, and a row of checksums."""

    digests: RawArray
    checksums: RawArray


class NumberedChunks:
    """The numbers of the chunks of a base, by array."""

    def __init__(self, paths: Sequence[str], tables: BaseTables) -> None:
        self._arrays: dict[str, _ArrayNumbers] = {}
        chunk = subchunk = 0
        for path, chunks, per_chunk in zip(paths, tables.chunks.tolist(), tables.subchunks.tolist(), strict=True):
            checksums = tables.checksums[subchunk : subchunk + chunks * per_chunk].reshape(chunks, per_chunk)
            self._arrays[path] = _ArrayNumbers(tables.digests[chunk : chunk + chunks], checksums)
            chunk, subchunk = chunk + chunks, subchunk + chunks * per_chunk

    def encode_unchanged(
        self, node: ArrayNode, index: Ints, elements: Elements, budget: BytesBudget
    ) -> ChunkEncoder | None:
        """Return the encoder of a chunk after it has encoded it, or None if it differs from the base or is small."""
        numbers, number = self._arrays.get(node.path), node.grid.chunk_number(index)
        if numbers is None or number >= len(numbers.digests) or max_chunk_object_bytes(node) < MIN_SHARED_BYTES:
            return None
        encoder = ChunkEncoder(node, elements, digested=True)
        with budget.take(*encoder.memory(in_parts=True)) as scratch:
            equal = encoder.equals(numbers.checksums[number], int(numbers.digests[number]), scratch)
        return encoder if equal and encoder.nbytes >= MIN_SHARED_BYTES else None


class CopiedChunks:
    """The chunks of a base in an object store. The server copies those with equal numbers."""

    def __init__(
        self, store: Store, base: Store, sent: SentBase, tables: BaseTables, optional: OptionalRequests
    ) -> None:
        self._store = store
        self._optional = optional
        self._base = base
        self._sent = sent
        self._version = tables.version
        self._numbers = NumberedChunks(sent.paths, tables)
        self._copied: list[CopiedObject] = []
        self._lock = threading.Lock()

    @property
    def problem(self) -> str:
        return self._optional.problem

    def put(
        self, key: str, node: ArrayNode, index: Ints, elements: Elements, budget: BytesBudget, chunk: ChunkPlan | None
    ) -> StoredChunk:
        encoder = self._copy(key, node, index, elements, budget, chunk)
        if encoder is not None:
            return StoredChunk(encoder, "copied")
        return StoredChunk(put_chunk(self._store, key, node, elements, budget, digested=True))

    def _copy(
        self, key: str, node: ArrayNode, index: Ints, elements: Elements, budget: BytesBudget, chunk: ChunkPlan | None
    ) -> ChunkEncoder | None:
        """Copy a chunk if it is unchanged. Return None if it must be written.

        Without ``chunk``, one more small request makes it very unlikely that the copy has other bytes.
        """
        if self._optional.has_ended or not self._store.copies_from(self._base):
            return None
        with self._store.encoders:
            encoder = self._numbers.encode_unchanged(node, index, elements, budget)
        if encoder is None:
            return None
        source = join(self._sent.tree, node.chunk_key(index))
        copied = self._store.copy_from(self._base, source, key, encoder.nbytes, self._optional)
        if not copied or (chunk is None and not self._has_tables()):
            return None
        with self._lock:
            self._copied.append(CopiedObject(key, encoder.nbytes, encoder.digest, chunk))
        return encoder

    def find_changed(self, budget: BytesBudget) -> Sequence[CopiedObject]:
        """Return the copies with other bytes. One request if the base is unchanged. Otherwise reads every copy."""
        if not self._copied or self._is_unchanged():
            return []
        log.warning("%s has changed or cannot be read: the copies of its chunks are read and compared", self._base.url)
        jobs = (partial(self._is_copy, copied, budget) for copied in self._copied)
        equal = run_jobs(jobs, self._store.useful_concurrency)
        return [copied for copied, same in zip(self._copied, equal, strict=True) if not same]

    def _is_unchanged(self) -> bool:
        try:
            # The time of earlier requests may be used up, but reading all copies instead takes longer than this one.
            root = self._base.get_optional(NODE, MAX_WHOLE_BYTES, OptionalRequests())
            return version_of(root) == self._version
        except CheckpointError:
            return False

    def _has_tables(self) -> bool:
        """Whether the base still has its tables. Its chunks are replaced only after their removal."""
        key = join(table_node(self._sent.save_id, DIGESTS, 0).path, NODE)
        try:
            return bool(self._base.get_optional(key, MAX_WHOLE_BYTES, self._optional))
        except CheckpointError:
            return False

    def _is_copy(self, copied: CopiedObject, budget: BytesBudget) -> bool:
        with budget.hold(copied.nbytes):
            try:
                return crc64(self._store.read(copied.key, 0, copied.nbytes)) == copied.digest
            except CheckpointError:
                return False


def open_base(store: Store, base: Store, sent: SentBase, optional: OptionalRequests) -> BaseChunks:
    """Return the chunks that the save of one rank to a store may reuse."""
    if sent.tables is None:
        return LinkedChunks(store, base, sent)
    return CopiedChunks(store, base, sent, sent.tables, optional)
