"""What one rank writes: its tensors' chunks, its values and blobs, its share of the node documents."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from zarrckpt import _codec, _values
from zarrckpt._documents import NODE, ArrayNode, Json, dumps, join
from zarrckpt._dtypes import by_name
from zarrckpt._errors import CheckpointError
from zarrckpt._grid import MAX_CHUNK_BYTES, Box, Grid, Ints
from zarrckpt._plan import RankPlan, expect_piece, item_box
from zarrckpt._root import BlobEntry, ValueEntry
from zarrckpt._store import Store
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


@dataclass
class _Written:
    """Results of one item, gathered from its chunk jobs in whatever order they end."""

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
        planner: SavePlanner,
        max_inflight_bytes: int,
        progress: Progress | None,
    ) -> None:
        self._store = store
        self._tree = tree
        self._plan = plan
        self._planner = planner
        self._budget = BytesBudget(max_inflight_bytes)
        self._progress = progress
        self._lock = threading.Lock()
        self._keys: list[str] = []
        self._done = self._total = 0

    def write(self, items: Sequence[WriteItem], concurrency: int) -> list[WriteResult]:
        """Write everything and make it durable; one result an item, in the items' order."""
        tensors = [item for item in items if item.type != WriteItemType.BYTE_IO]
        objects = [item for item in items if item.type == WriteItemType.BYTE_IO]
        for item in tensors:
            node = self._plan.arrays[item.index.fqn]
            expect_piece(item.index.fqn, self._resolve(item), item_box(item), torch_dtype(node))
            self._total += item_box(item).size * node.dtype.itemsize
        # Values first: what can't be kept is found before gigabytes are on their way.
        results: dict[int, Any] = {id(item): self._write_object(item) for item in objects}
        written = {id(item): _Written() for item in tensors}

        def jobs() -> Iterator[Callable[[], None]]:
            for path, document in self._plan.documents.items():
                yield partial(self._put_document, path, document)
            for item in tensors:
                yield from self._chunk_jobs(item, written[id(item)])

        run(jobs(), concurrency)
        self._store.sync(self._keys)
        results |= {number: part.result() for number, part in written.items()}
        return [WriteResult(item.index, getattr(results[id(item)], "nbytes", 0), results[id(item)]) for item in items]

    def _resolve(self, item: WriteItem) -> torch.Tensor:
        tensor = self._planner.resolve_data(item)
        if not isinstance(tensor, torch.Tensor):
            raise CheckpointError(f"{item.index.fqn!r} was planned as a tensor, but is a {type(tensor).__name__}")
        return tensor

    def _chunk_jobs(self, item: WriteItem, written: _Written) -> Iterator[Callable[[], None]]:
        node, box = self._plan.arrays[item.index.fqn], item_box(item)
        tensor = self._resolve(item).detach()
        for chunk in node.grid.chunks_of(box):
            # Cut on the tensor's own device: only what a chunk needs is copied to the host, in the job.
            piece = tensor[node.grid.chunk_box(chunk).slices(box.offset)]
            yield partial(self._put_chunk, item.index.fqn, node, chunk, piece, written)

    def _put_chunk(self, fqn: str, node: ArrayNode, chunk: Ints, piece: torch.Tensor, written: _Written) -> None:
        with self._budget.hold(_codec.chunk_object_size(node.grid, node.dtype.itemsize)):
            nbytes, checksums = self._put_array_chunk(node, chunk, raw_tensor(fqn, piece))
        with self._lock:
            written.add(node.grid.chunk_number(chunk), checksums, nbytes)
            self._done += piece.numel() * piece.element_size()
            if self._progress is not None:
                self._progress(self._done, self._total)

    def _put_array_chunk(self, node: ArrayNode, chunk: Ints, raw: _codec.RawArray) -> tuple[int, list[int]]:
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
