"""What one rank writes: its tensors' chunks, its values and blobs, its share of the node documents."""

from __future__ import annotations

import io
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from zarrckpt import _values
from zarrckpt._chunk_codec import ArrayElements, ChunkEncoder, Elements
from zarrckpt._chunk_layout import RawArray, raw_dtype
from zarrckpt._chunking import MAX_CHUNK_BYTES
from zarrckpt._crew import run
from zarrckpt._documents import NODE, ArrayNode, Json, join
from zarrckpt._dtypes import by_name
from zarrckpt._errors import CheckpointError
from zarrckpt._exchange import Channel, Joining, PeerLost, entered
from zarrckpt._grid import Box, Grid, Ints, intersect
from zarrckpt._json_values import dumps
from zarrckpt._pieces import Pieces
from zarrckpt._plan import ChunkPlan, RankPlan
from zarrckpt._planner import resolves_as_dcp
from zarrckpt._rank_plan import Part
from zarrckpt._root import BlobEntry, ValueEntry
from zarrckpt._store import Store
from zarrckpt._swap import Received, Swap
from zarrckpt._tensors import transfer_memory
from zarrckpt._transfer import Progress

Group = Sequence[memoryview | bytes]
"""Buffers of a chunk that go to the store together."""


@dataclass(frozen=True)
class ArrayResult:
    """What one rank wrote of one array: chunk numbers (int64), and their subchunks' checksums (uint32, C order).

    ``sizes`` are the stored sizes of these subchunks (uint32), of a compressed array only.
    """

    chunks: np.ndarray[Any, Any]
    checksums: np.ndarray[Any, Any]
    sizes: np.ndarray[Any, Any]
    nbytes: int


@dataclass(frozen=True)
class ObjectResult:
    """What became of a non-tensor entry: its JSON value, or a blob and the chunks that hold it."""

    value: ValueEntry | None = None
    blob: BlobEntry | None = None
    array: ArrayResult | None = None

    @property
    def nbytes(self) -> int:
        """The bytes of its chunk objects."""
        return 0 if self.array is None else self.array.nbytes


@dataclass(frozen=True)
class LostPeer:
    """In place of results: this rank stopped, since another one failed or is gone."""

    reason: str


@dataclass
class _Written:
    """Results of one tensor, gathered from its chunk jobs in whatever order they end."""

    chunks: list[int] = field(default_factory=list)
    checksums: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    nbytes: int = 0

    def add(self, node: ArrayNode, cell: Ints, encoder: ChunkEncoder) -> None:
        self.chunks.append(node.grid.chunk_number(cell))
        self.checksums.extend(encoder.checksums)
        if node.compression is not None:
            self.sizes.extend(encoder.sizes)
        self.nbytes += encoder.nbytes

    def result(self) -> ArrayResult:
        checksums, sizes = np.array(self.checksums, "<u4"), np.array(self.sizes, "<u4")
        return ArrayResult(np.array(self.chunks, "<i8"), checksums, sizes, self.nbytes)


class PartElements:
    """The elements of a chunk that lie in several places: in this rank's own items, and in what others sent."""

    def __init__(self, chunk: Box, parts: Sequence[Part], pieces: Pieces, received: Received) -> None:
        self.shape = chunk.shape
        self._origin = np.array(chunk.offset, np.int64)
        self._parts = parts
        self._pieces = pieces
        self._received = received
        # A chunk may have hundreds of parts, and as many subchunks.
        self._begins = np.array([part.box.offset for part in parts], np.int64) - self._origin
        self._ends = self._begins + np.array([part.box.shape for part in parts], np.int64)
        self._memory: dict[int, RawArray | None] = {}
        """By place, the elements of each part that was looked at; None where they are on another device."""

    def view(self, box: Box) -> RawArray | None:
        places = self._sharing(box)
        if len(places) != 1 or (memory := self._elements(places[0])) is None:
            return None
        view: RawArray = memory[self._in_array(box).region(self._parts[places[0]].box.offset)]
        return view

    def copy(self, box: Box, out: RawArray) -> None:
        wanted = self._in_array(box)
        for place in self._sharing(box):
            part, memory = self._parts[place], self._elements(place)
            shared = intersect(part.box, wanted)
            assert shared is not None
            region = out[shared.region(wanted.offset)]
            if memory is not None:
                region[...] = memory[shared.region(part.box.offset)]
            elif part.item is not None:
                self._pieces.copy(part.item, shared, region)

    def _sharing(self, box: Box) -> list[int]:
        """The places of the parts that have elements of a box."""
        end = np.add(box.offset, box.shape)
        found = np.flatnonzero(((self._begins < end) & (self._ends > box.offset)).all(axis=1))
        places: list[int] = found.tolist()
        return places

    def _in_array(self, box: Box) -> Box:
        return Box(tuple((self._origin + box.offset).tolist()), box.shape)

    def _elements(self, place: int) -> RawArray | None:
        if place not in self._memory:
            part = self._parts[place]
            if part.item is not None:
                self._memory[place] = self._pieces.view(part.item, part.box)
            else:
                data = self._received[place]
                cells = data.view(raw_dtype(len(data) // part.box.size)).reshape(part.box.shape)
                self._memory[place] = cells
        return self._memory[place]


class RankWork:
    """The writes of one rank in one save.

    ``tree`` tells the tree that they go to, and may wait for that: until then chunks are made, and nothing is put.
    """

    def __init__(
        self,
        store: Store,
        tree: Callable[[], str],
        plan: RankPlan,
        items: Sequence[WriteItem],
        planner: SavePlanner,
        max_inflight_bytes: int,
        progress: Progress | None,
    ) -> None:
        self._store = store
        self._tree = tree
        self._plan = plan
        self._objects = [item for item in items if item.type == WriteItemType.BYTE_IO]
        self._planner = planner
        self._pieces = Pieces(plan, items, planner)
        # What moves between ranks may take the other half: a quarter for each of two rounds.
        self._limit = max(1, max_inflight_bytes // 2 if plan.rounds else max_inflight_bytes)
        self._progress = progress
        self._lock = threading.Lock()
        self._keys: dict[str, None] = {}
        """Of all that was put, or may have been."""
        self._written: dict[str, _Written] = {}
        self._done = self._total = 0
        self.could_remove = True
        """False where what was put could not be deleted after a failure."""

    def write(self, joining: Joining | None) -> list[WriteResult]:
        """Write everything and make it durable; one result an entry that this rank has written something of.

        ``joining`` is the mesh that pieces move on. Where a peer is lost, the only result is a :class:`LostPeer`: it is
        the peer's error that counts. What was put is deleted then, and where anything fails here: the commit waits for
        all ranks.
        """
        try:
            if joining is None:
                return self._write(None)
            # First of all, so that the others hear of whatever fails here.
            with entered(joining) as channel:
                return self._write(channel)
        except PeerLost as err:
            self._remove()
            return [WriteResult(MetadataIndex(""), 0, LostPeer(str(err)))]
        except BaseException:
            self._remove()
            raise

    def _remove(self) -> None:
        """Delete what was put: this save will never be committed, and its threads have ended."""
        try:
            self._store.delete(self._keys)
        except CheckpointError:  # the error that ended the save matters more
            self.could_remove = False

    def _write(self, channel: Channel | None) -> list[WriteResult]:
        self._memory = transfer_memory(self._limit, self._pieces.check())
        rounds = self._plan.rounds.values()
        chunks = [*self._plan.chunks, *(chunk for round in rounds for chunk in round.chunks)]
        self._written = {chunk.fqn: _Written() for chunk in chunks}
        self._total = sum(self._chunk_bytes(chunk) for chunk in chunks)
        # Values first: what can't be kept is found before gigabytes are on their way.
        written = run((partial(self._write_object, item) for item in self._objects), self._store.max_concurrency)
        results: dict[str, ObjectResult | ArrayResult] = {
            item.index.fqn: result for item, result in zip(self._objects, written, strict=True)
        }
        concurrency = self._store.useful_concurrency
        if channel is None:
            run(self._jobs(None), concurrency)
        else:
            swap = Swap(channel, self._plan, self._pieces)
            run(self._jobs(swap), concurrency, drawn_here=True, stopping=swap.stop)
        # Also where nothing was put: what is synced is there only once the attempt has begun.
        self._tree()
        self._store.sync(self._keys)
        results |= {fqn: part.result() for fqn, part in self._written.items()}
        return [WriteResult(MetadataIndex(fqn), res.nbytes, res) for fqn, res in results.items()]

    def _jobs(self, swap: Swap | None) -> Iterator[Callable[[], None]]:
        """Jobs for the threads. With a swap, whoever draws them swaps pieces in between: others wait for those."""
        # The largest first, so that no large one is left alone at the end.
        ordered = sorted(self._plan.chunks, key=self._chunk_bytes, reverse=True)
        own = (partial(self._put_chunk, chunk, {}) for chunk in ordered)
        some = self._store.useful_concurrency()
        # The first are made while documents are on their way, and before it is known where to.
        yield from itertools.islice(own, some // 2)
        for path, document in self._plan.documents.items():
            yield partial(self._put_document, path, document)
        yield from itertools.islice(own, some)
        if swap is not None:
            for number, chunks in swap.rounds():
                while chunks:
                    # Not kept here: what was received is freed with its job.
                    yield swap.counted(number, partial(self._put_chunk, *chunks.pop()))
                yield from itertools.islice(own, some)
        yield from own

    def _chunk_bytes(self, chunk: ChunkPlan) -> int:
        node = self._plan.arrays[chunk.fqn]
        return node.grid.chunk_box(chunk.cell).size * node.dtype.itemsize

    def _put_chunk(self, chunk: ChunkPlan, received: Received) -> None:
        node = self._plan.arrays[chunk.fqn]
        elements = PartElements(node.grid.chunk_box(chunk.cell), chunk.parts, self._pieces, received)
        encoder = self._put_elements(node, chunk.cell, elements)
        with self._lock:
            self._written[chunk.fqn].add(node, chunk.cell, encoder)
            self._done += self._chunk_bytes(chunk)
            if self._progress is not None:
                self._progress(self._done, self._total)

    def _put_elements(self, node: ArrayNode, cell: Ints, elements: Elements) -> ChunkEncoder:
        """Put a chunk."""
        encoder: ChunkEncoder | None = None

        def key() -> str:
            return self._noted(join(self._tree(), node.chunk_key(cell)))

        with ExitStack() as held:

            def groups() -> Iterable[Group]:
                nonlocal encoder
                # Taken when the store asks for the bytes: by then it has freed the memory of chunks before.
                held.close()
                encoder = ChunkEncoder(node, elements)
                scratch = held.enter_context(self._memory.take(*encoder.memory(in_parts=self._store.is_local)))
                return encoder.groups(scratch)

            self._store.put_parts(key, groups)
        assert encoder is not None
        return encoder

    def _put_document(self, path: str, document: Json) -> None:
        self._store.put(self._noted(join(self._tree(), path, NODE)), [dumps(document)])

    def _noted(self, key: str) -> str:
        """A key that is about to be put."""
        with self._lock:
            self._keys[key] = None
        return key

    def _write_object(self, item: WriteItem) -> ObjectResult:
        fqn = item.index.fqn
        path = self._plan.object_paths[fqn]
        value = _lookup(self._planner, item)
        encoded = _values.encode_json(value)
        if encoded is not _values.NOT_JSON and _values.json_size(encoded) <= _values.MAX_JSON_VALUE:
            return ObjectResult(value=ValueEntry(path, encoded))
        blob = _values.encode_blob(fqn, value)
        payload = np.frombuffer(blob.payload, np.uint8)
        node = ArrayNode(path, blob_grid(len(payload)), by_name("uint8"))
        written = _Written()
        for chunk in node.grid.chunks_of(Box((0,), node.grid.shape)):
            elements = ArrayElements(payload[node.grid.chunk_box(chunk).slices()])
            encoder = self._put_elements(node, chunk, elements)
            written.add(node, chunk, encoder)
        self._put_document(path, node.document())
        return ObjectResult(blob=BlobEntry(node, blob.encoding, blob.kind), array=written.result())


def blob_grid(nbytes: int) -> Grid:
    """The grid of a blob: one dimension, one chunk as long as that is not too large."""
    return Grid((nbytes,), (min(max(nbytes, 1), MAX_CHUNK_BYTES),))


def _lookup(planner: SavePlanner, item: WriteItem) -> object:
    """A non-tensor entry as the object that it is.

    DCP's planners wrap every such object in ``torch.save`` bytes, a BytesIO too; so the object itself is asked for
    where the planner has not changed that rule. A planner with a rule of its own gives bytes that only it
    understands.
    """
    if resolves_as_dcp(planner):
        return planner.lookup_object(item.index)
    data = planner.resolve_data(item)
    if isinstance(data, io.BytesIO):
        data.seek(0)
        try:
            return torch.load(data, weights_only=True)
        except Exception:  # any bytes at all may be in there; then they are kept as they are
            data.seek(0)
    return data
