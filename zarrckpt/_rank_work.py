"""What one rank writes: its tensors' chunks, its values and blobs, its share of the node documents."""

from __future__ import annotations

import io
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from zarrckpt import _codec, _values
from zarrckpt._chunking import MAX_CHUNK_BYTES
from zarrckpt._codec import RawArray
from zarrckpt._documents import NODE, ArrayNode, Json, dumps, join
from zarrckpt._dtypes import by_name
from zarrckpt._errors import CheckpointError
from zarrckpt._exchange import Channel, Joining, PeerLost, entered
from zarrckpt._grid import Box, Grid, Ints
from zarrckpt._holdings import item_box
from zarrckpt._plan import ChunkPlan, RankPlan, expect_piece
from zarrckpt._root import BlobEntry, ValueEntry
from zarrckpt._store import Store
from zarrckpt._swap import Received, Swap
from zarrckpt._tensors import raw_tensor, torch_dtype
from zarrckpt._transfer import BytesBudget, Progress, run


@dataclass(frozen=True)
class ArrayResult:
    """What one rank wrote of one array: chunk numbers (int64), and their subchunks' checksums (uint32, C order)."""

    chunks: np.ndarray[Any, Any]
    checksums: np.ndarray[Any, Any]
    nbytes: int


@dataclass(frozen=True)
class ObjectResult:
    """What became of a non-tensor entry: its JSON value, or a blob and the chunks that hold it."""

    value: ValueEntry | None = None
    blob: BlobEntry | None = None
    array: ArrayResult | None = None


@dataclass(frozen=True)
class LostPeer:
    """In place of results: this rank stopped, since another one failed or is gone."""

    reason: str


@dataclass
class _Written:
    """Results of one tensor, gathered from its chunk jobs in whatever order they end."""

    chunks: list[int] = field(default_factory=list)
    checksums: list[int] = field(default_factory=list)
    nbytes: int = 0

    def add(self, number: int, checksums: Sequence[int], nbytes: int) -> None:
        self.chunks.append(number)
        self.checksums.extend(checksums)
        self.nbytes += nbytes

    def result(self) -> ArrayResult:
        return ArrayResult(np.array(self.chunks, "<i8"), np.array(self.checksums, "<u4"), self.nbytes)


class RankWork:
    """The writes of one rank in one save."""

    def __init__(
        self,
        store: Store,
        tree: str,
        plan: RankPlan,
        items: Sequence[WriteItem],
        planner: SavePlanner,
        max_inflight_bytes: int,
        progress: Progress | None,
    ) -> None:
        self._store = store
        self._tree = tree
        self._plan = plan
        self._items = items
        self._planner = planner
        # What moves between ranks may take the other half: a quarter for each of two rounds.
        self._budget = BytesBudget(max(1, max_inflight_bytes // 2 if plan.rounds else max_inflight_bytes))
        self._progress = progress
        self._lock = threading.Lock()
        self._keys: list[str] = []
        self._written: dict[str, _Written] = {}
        self._done = self._total = 0
        self._last: tuple[int, torch.Tensor | None] = (-1, None)
        self._in_memory: set[int | None] = set()
        """Items whose tensors are in CPU memory: their parts are views."""

    def write(self, concurrency: int, joining: Joining | None) -> list[WriteResult]:
        """Write everything and make it durable; one result an entry that this rank has written something of.

        ``joining`` is the mesh that pieces move on. Where a peer is lost, the only result is a :class:`LostPeer`: it is
        the peer's error that counts.
        """
        if joining is None:
            return self._write(concurrency, None)
        try:
            # First of all, so that the others hear of whatever fails here.
            with entered(joining) as channel:
                return self._write(concurrency, channel)
        except PeerLost as err:
            return [WriteResult(MetadataIndex(""), 0, LostPeer(str(err)))]

    def _write(self, concurrency: int, channel: Channel | None) -> list[WriteResult]:
        objects = [item for item in self._items if item.type == WriteItemType.BYTE_IO]
        for place, item in enumerate(self._items):
            if item.type != WriteItemType.BYTE_IO:
                tensor = self._resolve(place)
                expect_piece(item, tensor, torch_dtype(self._plan.arrays[item.index.fqn]))
                if tensor.device.type == "cpu":
                    self._in_memory.add(place)
        rounds = self._plan.rounds.values()
        chunks = [*self._plan.chunks, *(chunk for round in rounds for chunk in round.chunks)]
        self._written = {chunk.fqn: _Written() for chunk in chunks}
        self._total = sum(self._chunk_bytes(chunk) for chunk in chunks)
        # Values first: what can't be kept is found before gigabytes are on their way.
        written = run((partial(self._write_object, item) for item in objects), concurrency)
        results: dict[str, Any] = {item.index.fqn: result for item, result in zip(objects, written, strict=True)}
        run(self._jobs(concurrency, channel), concurrency)
        self._store.sync(self._keys)
        results |= {fqn: part.result() for fqn, part in self._written.items()}
        return [WriteResult(MetadataIndex(fqn), getattr(res, "nbytes", 0), res) for fqn, res in results.items()]

    def _jobs(self, concurrency: int, channel: Channel | None) -> Iterator[Callable[[], None]]:
        """Jobs for the threads. Drawn in the calling thread, which swaps pieces in between: others wait for those."""
        for path, document in self._plan.documents.items():
            yield partial(self._put_document, path, document)
        own = (partial(self._put_chunk, chunk, {}) for chunk in self._plan.chunks)
        yield from itertools.islice(own, concurrency)
        if channel is not None:
            swap = Swap(channel, self._plan, self._take)
            for number, chunks in swap.rounds():
                while chunks:
                    # Not kept here: what was received is freed with its job.
                    yield swap.counted(number, partial(self._put_chunk, *chunks.pop()))
                yield from itertools.islice(own, concurrency)
        yield from own

    def _resolve(self, place: int) -> torch.Tensor:
        """An item's tensor. The last one is kept, since a planner may make it anew, for each of an item's chunks."""
        last, kept = self._last
        if last == place and kept is not None:
            return kept
        item = self._items[place]
        tensor = self._planner.resolve_data(item)
        if not isinstance(tensor, torch.Tensor):
            raise CheckpointError(f"{item.index.fqn!r} was planned as a tensor, but is a {type(tensor).__name__}")
        tensor = tensor.detach()
        self._last = (place, tensor)
        return tensor

    def _take(self, place: int, box: Box) -> RawArray:
        """A part of one of this rank's items: cut on the tensor's own device, then raw elements."""
        item = self._items[place]
        return raw_tensor(item.index.fqn, self._resolve(place)[box.slices(item_box(item).offset)])

    def _chunk_bytes(self, chunk: ChunkPlan) -> int:
        node = self._plan.arrays[chunk.fqn]
        return node.grid.chunk_box(chunk.cell).size * node.dtype.itemsize

    def _put_chunk(self, chunk: ChunkPlan, received: Received) -> None:
        node = self._plan.arrays[chunk.fqn]
        with self._budget.hold(self._memory(chunk, node)):
            nbytes, checksums = self._put_array_chunk(node, chunk.cell, self._assembled(chunk, node, received))
        with self._lock:
            self._written[chunk.fqn].add(node.grid.chunk_number(chunk.cell), checksums, nbytes)
            self._done += self._chunk_bytes(chunk)
            if self._progress is not None:
                self._progress(self._done, self._total)

    def _memory(self, chunk: ChunkPlan, node: ArrayNode) -> int:
        """The bytes that a chunk takes while it is put: its buffers, and what they are made from if that is no view."""
        size = _codec.chunk_object_size(node.grid, node.dtype.itemsize)
        (item, *others) = (part.item for part in chunk.parts)
        is_view = not others and item in self._in_memory
        return size if is_view or node.grid.subchunk_shape is None else 2 * size

    def _assembled(self, chunk: ChunkPlan, node: ArrayNode, received: Received) -> RawArray:
        """The elements of a chunk: a view of this rank's own where all are in one item, else put together."""
        first = chunk.parts[0]
        if len(chunk.parts) == 1 and first.item is not None:
            return self._take(first.item, first.box)
        whole = node.grid.chunk_box(chunk.cell)
        out: RawArray = np.empty(whole.shape, _codec.raw_dtype(node.dtype.itemsize))
        for place, part in enumerate(chunk.parts):
            piece = received[place] if part.item is None else self._take(part.item, part.box)
            out[part.box.slices(whole.offset)] = piece.view(out.dtype).reshape(part.box.shape)
        return out

    def _put_array_chunk(self, node: ArrayNode, chunk: Ints, raw: RawArray) -> tuple[int, list[int]]:
        buffers, checksums = _codec.encode_chunk(node.grid, raw)
        self._put(join(self._tree, node.chunk_key(chunk)), buffers)
        return sum(len(buffer) for buffer in buffers), checksums

    def _put_document(self, path: str, document: Json) -> None:
        self._put(join(self._tree, path, NODE), [dumps(document)])

    def _put(self, key: str, buffers: Sequence[memoryview | bytes]) -> None:
        self._store.put(key, buffers)
        with self._lock:
            self._keys.append(key)

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
            nbytes, checksums = self._put_array_chunk(node, chunk, payload[node.grid.chunk_box(chunk).slices()])
            written.add(node.grid.chunk_number(chunk), checksums, nbytes)
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
    if (
        isinstance(planner, DefaultSavePlanner)
        and type(planner).transform_object is DefaultSavePlanner.transform_object
        and type(planner).resolve_data is DefaultSavePlanner.resolve_data
    ):
        return planner.lookup_object(item.index)
    data = planner.resolve_data(item)
    if isinstance(data, io.BytesIO):
        data.seek(0)
        try:
            return torch.load(data, weights_only=True)
        except Exception:  # any bytes at all may be in there; then they are kept as they are
            data.seek(0)
    return data
