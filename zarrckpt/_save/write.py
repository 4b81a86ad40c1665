"""The writes of one rank: chunks of tensors, values, blobs, and its part of the node documents."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from zarrckpt._commit.chunks import put_chunk
from zarrckpt._errors import CheckpointError, IncompleteSaveError
from zarrckpt._format.chunk_codec import ArrayElements, Elements
from zarrckpt._format.chunk_layout import RawArray, raw_dtype
from zarrckpt._format.documents import NODE, ArrayNode, join
from zarrckpt._format.dtypes import by_name
from zarrckpt._format.grid import Box, Grid, Ints, intersect
from zarrckpt._format.root import BlobEntry, ValueEntry
from zarrckpt._format.values import EncodedValue
from zarrckpt._format.wire import record
from zarrckpt._jobs import BytesBudget, run_jobs
from zarrckpt._plan.chunking import MAX_CHUNK_BYTES
from zarrckpt._plan.rank_plan import ChunkPiece, ChunkPlan, RankPlan
from zarrckpt._ranks.errors import StoppedError
from zarrckpt._ranks.messages import Channel
from zarrckpt._save.agree import SentAttempt
from zarrckpt._save.exchange import Exchange, Received
from zarrckpt._save.items import Items, Source
from zarrckpt._save.request import SaveRequest
from zarrckpt._save.reuse import MIN_SHARED_BYTES, BaseChunks, StoredChunk
from zarrckpt._state.tensors import transfer_memory
from zarrckpt._store import Store
from zarrckpt._store._archive import ArchivePart


@record
@dataclass(frozen=True)
class ArrayResult:
    """The chunks of one array that one rank wrote: chunk numbers (int64) and subchunk checksums (uint32, C order).

    ``sizes`` has the stored sizes of these subchunks (uint32). It is empty if the array is not compressed. ``digests``
    has the digests of the chunks (uint64). It is empty if the save stores none. Of ``nbytes``, the bytes of all chunks,
    ``copied`` and ``linked`` were not written, but reused from ``reused`` chunks of the base. ``tied`` bytes are links
    to chunks of the same save.
    """

    chunks: np.ndarray[Any, Any]
    checksums: np.ndarray[Any, Any]
    sizes: np.ndarray[Any, Any]
    digests: np.ndarray[Any, Any]
    nbytes: int
    copied: int = 0
    linked: int = 0
    tied: int = 0
    reused: int = 0


@record
@dataclass(frozen=True)
class ObjectResult:
    """The stored form of a non-tensor entry: a JSON value, or a blob and the chunks that hold it."""

    value: ValueEntry | None = None
    blob: BlobEntry | None = None
    array: ArrayResult | None = None

    @property
    def nbytes(self) -> int:
        """The size in bytes of the entry's chunk objects."""
        return 0 if self.array is None else self.array.nbytes


@dataclass
class _Written:
    """The results of one tensor's chunk jobs, in the order in which the jobs ended."""

    chunks: list[int] = field(default_factory=list)
    checksums: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    digests: list[int] = field(default_factory=list)
    nbytes: int = 0
    reused: Counter[str] = field(default_factory=Counter)
    """The bytes of reused chunks, by :attr:`StoredChunk.reuse`."""
    reused_chunks: int = 0

    def add(self, node: ArrayNode, chunk_index: Ints, stored: StoredChunk) -> None:
        encoder = stored.encoder
        self.chunks.append(node.grid.chunk_number(chunk_index))
        self.checksums.extend(encoder.checksums)
        if node.compression is not None:
            self.sizes.extend(encoder.sizes)
        if encoder.digested:
            self.digests.append(encoder.digest)
        self.nbytes += encoder.nbytes
        if stored.reuse is not None:
            self.reused[stored.reuse] += encoder.nbytes
            self.reused_chunks += stored.reuse != "tied"

    def result(self) -> ArrayResult:
        return ArrayResult(
            np.array(self.chunks, "<i8"),
            np.array(self.checksums, "<u4"),
            np.array(self.sizes, "<u4"),
            np.array(self.digests, "<u8"),
            self.nbytes,
            self.reused["copied"],
            self.reused["linked"],
            self.reused["tied"],
            self.reused_chunks,
        )


EntryResults = Mapping[str, ObjectResult | ArrayResult]
"""The results of one rank, by fqn."""

record(ArchivePart)


@record
@dataclass(frozen=True)
class RankResults:
    """The entries that one rank has written, and its entries of the archive, if the checkpoint is one."""

    entries: EntryResults
    archive: ArchivePart | None = None


class PieceElements:
    """The elements of a chunk that has several pieces: items of this rank, and pieces that other ranks sent."""

    def __init__(self, chunk_box: Box, pieces: Sequence[ChunkPiece], items: Items, received: Received) -> None:
        self.shape = chunk_box.shape
        self._origin = np.array(chunk_box.offset, np.int64)
        self._pieces = pieces
        self._items = items
        self._received = received
        # Arrays instead of loops, because a chunk may have hundreds of pieces and of subchunks.
        self._begins = np.array([piece.box.offset for piece in pieces], np.int64) - self._origin
        self._ends = self._begins + np.array([piece.box.shape for piece in pieces], np.int64)
        self._memory: dict[int, RawArray | None] = {}
        """The elements of each piece that was used, by its index, or None if they are not in CPU memory."""

    def view(self, box: Box) -> RawArray | None:
        indices = self._sharing(box)
        if len(indices) != 1 or (memory := self._elements(indices[0])) is None:
            return None
        view: RawArray = memory[self._in_array(box).region(self._pieces[indices[0]].box.offset)]
        return view

    def copy(self, box: Box, out: RawArray) -> None:
        target = self._in_array(box)
        for index in self._sharing(box):
            piece, memory = self._pieces[index], self._elements(index)
            shared = intersect(piece.box, target)
            assert shared is not None
            region = out[shared.region(target.offset)]
            if memory is not None:
                region[...] = memory[shared.region(piece.box.offset)]
            elif piece.item is not None:
                self._items.copy(piece.item, shared, region)

    def _sharing(self, box: Box) -> list[int]:
        """Return the indices of the pieces that have elements of a box."""
        end = np.add(box.offset, box.shape)
        found = np.flatnonzero(((self._begins < end) & (self._ends > box.offset)).all(axis=1))
        indices: list[int] = found.tolist()
        return indices

    def _in_array(self, box: Box) -> Box:
        return Box(tuple((self._origin + box.offset).tolist()), box.shape)

    def _elements(self, index: int) -> RawArray | None:
        if index not in self._memory:
            piece = self._pieces[index]
            if piece.item is not None:
                self._memory[index] = self._items.view(piece.item, piece.box)
            else:
                data = self._received[index]
                elements = data.view(raw_dtype(len(data) // piece.box.size)).reshape(piece.box.shape)
                self._memory[index] = elements
        return self._memory[index]


def elements_of_chunk(node: ArrayNode, chunk: ChunkPlan, items: Items, received: Received) -> Elements:
    """Return the elements of a chunk. Most chunks are one piece, a part of an item in this rank's CPU memory."""
    if len(chunk.pieces) == 1 and (item := chunk.pieces[0].item) is not None:
        memory = items.view(item, chunk.pieces[0].box)
        if memory is not None:
            return ArrayElements(memory)
    return PieceElements(node.grid.chunk_box(chunk.chunk_index), chunk.pieces, items, received)


class RankWriter:
    """The writes of one rank in one save. ``base`` is None if no chunk can be reused."""

    def __init__(
        self,
        store: Store,
        attempt: SentAttempt,
        base: BaseChunks | None,
        plan: RankPlan,
        source: Source,
        request: SaveRequest,
        report_alive: Callable[[], None],
    ) -> None:
        self._store = store
        self._tree = attempt.tree
        self._digested = attempt.digested
        self._base = base
        self._plan = plan
        # In an archive, the coordinator writes all documents.
        self._documents = {} if store.is_archive else plan.documents
        self._source = source
        self._items = Items(plan, source)
        self._budget: BytesBudget
        # If pieces move between ranks, the exchange uses the other half.
        limit = request.options.max_inflight_bytes
        self._limit = max(1, limit // 2 if plan.bundles else limit)
        self._progress = request.progress
        self._report_alive = report_alive
        self._lock = threading.Lock()
        self._tied: dict[str, list[ChunkPlan]] = {}
        """By a chunk's key, the chunks of other tensors with the same memory. Local files become links to it."""
        self._keys: dict[str, None] = {}
        """The keys of all objects that were put or may have been put, in order."""
        self._written: dict[str, _Written] = {}
        self._done = self._total = 0
        self._exchange: Exchange | None = None
        self._stopped = False
        self.removal_failed = False
        """Whether the objects could not be deleted after a failure."""

    def write(self, channel: Channel | None) -> RankResults:
        """Write all objects of this rank, sync them, and return the result of each entry.

        ``channel`` moves pieces between ranks. It is None if no piece moves. Raises LostPeerError. After any error the
        written objects are deleted. This is safe, because the commit needs the results of all ranks.
        """
        try:
            return RankResults(self._write(channel), self._store.end_part())
        except BaseException:
            self.remove()
            raise

    def stop(self) -> None:
        """Make :meth:`write` end soon, with an error, because another rank failed. Called in a different thread."""
        self._stopped = True
        if self._exchange is not None:
            self._exchange.stop()

    def remove(self) -> None:
        """Delete the written objects. Call it only if the save cannot be committed and its threads have ended."""
        try:
            self._store.delete(self._keys)
        except CheckpointError:  # The caller raises the error that ended the save.
            self.removal_failed = True

    def _write(self, channel: Channel | None) -> dict[str, ObjectResult | ArrayResult]:
        self._budget = transfer_memory(self._limit, self._items.prepare())
        chunks = self._plan.all_chunks()
        own = self._without_tied(self._plan.chunks)
        self._written = {chunk.fqn: _Written() for chunk in chunks}
        self._total = sum(self._chunk_bytes(chunk) for chunk in chunks)
        # Write values first, so that a value that cannot be saved raises before tensors are written.
        paths = self._plan.object_paths
        objects = run_jobs((partial(self._write_object, *row) for row in paths.items()), self._store.max_concurrency)
        if channel is None:
            run_jobs(self._jobs(own), self._store.threads_for(self._total, len(chunks) + len(self._documents)))
        else:
            self._exchange = Exchange(channel, self._plan, self._items, self._limit)
            run_jobs(self._jobs(own), self._store.useful_concurrency, caller_draws=True, on_failure=self._exchange.stop)
        self._write_changed()
        self._store.sync(self._keys)
        return {
            **dict(zip(paths, objects, strict=True)),
            **{fqn: array.result() for fqn, array in self._written.items()},
        }

    def _without_tied(self, chunks: Sequence[ChunkPlan]) -> Sequence[ChunkPlan]:
        """Return the chunks without those that can be links to one of the others. These are kept in ``_tied``."""
        if not self._items.shared or not self._store.is_local or self._store.is_archive:
            return chunks
        keys: dict[object, str] = {}
        left = []
        for chunk in chunks:
            name = self._items.name_memory(*chunk.pieces[0][:2]) if len(chunk.pieces) == 1 else None
            if name is not None and self._chunk_bytes(chunk) >= MIN_SHARED_BYTES:
                node = self._plan.arrays[chunk.fqn]
                form = (name, node.grid.chunk_shape, node.grid.subchunk_shape, node.compression)
                key = self._key_of(chunk)
                if (first := keys.setdefault(form, key)) != key:
                    self._tied.setdefault(first, []).append(chunk)
                    continue
            left.append(chunk)
        return left

    def _jobs(self, own: Sequence[ChunkPlan]) -> Iterator[Callable[[], None]]:
        """Yield the jobs of this rank, with its ``own`` chunks. Raises StoppedError after :meth:`stop`."""
        for job in self._all_jobs(own):
            if self._stopped:
                raise StoppedError
            yield job
        if self._stopped:
            raise StoppedError

    def _all_jobs(self, chunks: Sequence[ChunkPlan]) -> Iterator[Callable[[], None]]:
        """Yield the jobs of this rank. With an exchange, the generator also moves pieces that other ranks wait for."""
        # Put the largest chunks first, so that no large one runs alone at the end.
        ordered = sorted(chunks, key=self._chunk_bytes, reverse=True)
        own = (partial(self._put_chunk, chunk, {}) for chunk in ordered)
        threads = self._store.useful_concurrency()
        # The first chunks are encoded while documents are put.
        yield from itertools.islice(own, threads // 2)
        for path, document in self._documents.items():
            yield partial(self._put_document, path, document)
        yield from itertools.islice(own, threads)
        if self._exchange is not None:
            for bundle in self._exchange.bundles():
                while bundle:
                    # Keep no reference here, so that the received pieces are freed with their job.
                    chunk, received = bundle.pop()
                    nbytes = self._exchange.received_bytes(chunk)
                    yield self._exchange.counted(nbytes, partial(self._put_chunk, chunk, received))
                    del received
                yield from itertools.islice(own, threads)
        yield from own

    def _chunk_bytes(self, chunk: ChunkPlan) -> int:
        node = self._plan.arrays[chunk.fqn]
        return node.grid.chunk_box(chunk.chunk_index).size * node.dtype.itemsize

    def _key_of(self, chunk: ChunkPlan) -> str:
        return join(self._tree, self._plan.arrays[chunk.fqn].chunk_key(chunk.chunk_index))

    def _put_chunk(self, chunk: ChunkPlan, received: Received) -> None:
        node, key = self._plan.arrays[chunk.fqn], self._key_of(chunk)
        elements = elements_of_chunk(node, chunk, self._items, received)
        stored = self._put_elements(key, node, chunk.chunk_index, elements, None if received else chunk)
        self._note_written(chunk, stored)
        for other in self._tied.pop(key, ()):
            if self._link_own(key, self._key_of(other)):
                self._note_written(other, StoredChunk(stored.encoder, stored.reuse or "tied"))
            else:
                self._put_chunk(other, {})

    def _link_own(self, key: str, new_key: str) -> bool:
        """Link a chunk of this save under the key of another one with the same memory."""
        file = self._store.open_linkable(self._store, key, new_key)
        if isinstance(file, str):
            return False
        with file:
            return file.size >= MIN_SHARED_BYTES and self._store.link(file, self._record_key(new_key))

    def _note_written(self, chunk: ChunkPlan, stored: StoredChunk) -> None:
        with self._lock:
            self._written[chunk.fqn].add(self._plan.arrays[chunk.fqn], chunk.chunk_index, stored)
            self._done += self._chunk_bytes(chunk)
            self._report_alive()
            if self._progress is not None:
                self._progress(self._done, self._total)

    def _put_elements(
        self, key: str, node: ArrayNode, chunk_index: Ints, elements: Elements, chunk: ChunkPlan | None = None
    ) -> StoredChunk:
        """Put or reuse a chunk. ``chunk`` is its plan if this rank can write it again."""
        self._record_key(key)
        if self._base is not None:
            return self._base.put(key, node, chunk_index, elements, self._budget, chunk)
        return StoredChunk(put_chunk(self._store, key, node, elements, self._budget, digested=self._digested))

    def _write_changed(self) -> None:
        """Write the chunks whose copies have other bytes, because the base was replaced while they were copied.

        Raises IncompleteSaveError for a chunk whose pieces are not in the memory of this rank any more.
        """
        for copied in () if self._base is None else self._base.find_changed(self._budget):
            if (chunk := copied.chunk) is None:
                raise IncompleteSaveError(
                    f"{copied.key!r} was copied from the base, which has changed since, and the copy differs or cannot "
                    "be read. Nothing was committed. Save again, without this base"
                )
            node = self._plan.arrays[chunk.fqn]
            elements = elements_of_chunk(node, chunk, self._items, {})
            encoder = put_chunk(self._store, copied.key, node, elements, self._budget, digested=True)
            if encoder.digest != copied.digest:
                raise CheckpointError(f"{chunk.fqn!r} changed during the save. Do not change the state during the save")

    def _put_document(self, path: str, document: bytes) -> None:
        self._store.put_parts(self._record_key(join(self._tree, path, NODE)), lambda: [[document]])

    def _record_key(self, key: str) -> str:
        """Record a key that is about to be put, and return it."""
        with self._lock:
            self._keys[key] = None
        return key

    def _write_object(self, fqn: str, path: str) -> ObjectResult:
        encoded = encode_value(self._source, fqn)
        blob = encoded.blob_to_store(fqn)
        if blob is None:
            return ObjectResult(value=ValueEntry(path, encoded.json))
        payload = np.frombuffer(blob.payload, np.uint8)
        node = blob_node(path, len(payload))
        written = _Written()
        for chunk_index in node.grid.chunks_of(node.grid.whole):
            elements = ArrayElements(payload[node.grid.chunk_box(chunk_index).slices()])
            key = join(self._tree, node.chunk_key(chunk_index))
            written.add(node, chunk_index, self._put_elements(key, node, chunk_index, elements))
        if not self._store.is_archive:
            self._put_document(path, node.document_bytes())
        return ObjectResult(blob=BlobEntry(node, blob.encoding, blob.kind), array=written.result())


def encode_value(source: Source, fqn: str) -> EncodedValue:
    """Return a value of a rank in its stored form."""
    value = source.value(fqn)
    return value if isinstance(value, EncodedValue) else EncodedValue.of(fqn, value)


def blob_node(path: str, nbytes: int) -> ArrayNode:
    """Return the array of a blob: one dimension, chunks of at most ``MAX_CHUNK_BYTES``."""
    return ArrayNode(path, Grid((nbytes,), (min(max(nbytes, 1), MAX_CHUNK_BYTES),)), by_name("uint8"))
