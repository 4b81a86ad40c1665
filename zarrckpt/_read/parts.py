"""Stored tensors part by part, in bounded memory: for writers of other formats. No torch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

from zarrckpt._format.chunk_layout import RawArray
from zarrckpt._format.documents import ArrayNode
from zarrckpt._format.grid import Box, Ints
from zarrckpt._jobs import BytesBudget, run
from zarrckpt._read.catalog import Catalog
from zarrckpt._read.chunks import Job, chunk_jobs, new_memory

T = TypeVar("T")


class TensorPart(NamedTuple):
    """A box of a stored tensor."""

    fqn: str
    box: Box


def parts_in_order(catalog: Catalog, fqns: Iterable[str], max_bytes: int) -> Iterator[tuple[TensorPart, RawArray]]:
    """The elements of tensors, one tensor after the other, each in C order: raw, in parts.

    What is read at once takes about ``max_bytes``: parts of one large tensor, or several small ones, all their chunks
    side by side. Tensors without elements have no part. Errors as in ``Checkpoint.read``.
    """
    wanted = list(fqns)
    for fqn in wanted:
        catalog.refuse_unstored(catalog.root.tensors[fqn])
    half = max(1, max_bytes // 2)  # the other half is for what is on its way
    parts = (TensorPart(fqn, box) for fqn in wanted for box in _boxes_of(catalog.root.tensors[fqn], half))
    for batch in batches(parts, partial(nbytes_of, catalog), half):
        arrays = read_parts(catalog, batch, half)
        for part in batch:
            # Not kept here: what has been written is freed.
            yield part, arrays.pop(0)


def batches(items: Iterable[T], nbytes_of: Callable[[T], int], max_bytes: int) -> Iterator[list[T]]:
    """Items in groups, in their order, each of at most so many bytes; a larger item is alone."""
    batch: list[T] = []
    size = 0
    for item in items:
        nbytes = nbytes_of(item)
        if batch and size + nbytes > max_bytes:
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += nbytes
    if batch:
        yield batch


def nbytes_of(catalog: Catalog, part: TensorPart) -> int:
    """The size of a part."""
    return part.box.size * catalog.root.tensors[part.fqn].dtype.itemsize


def read_parts(catalog: Catalog, parts: Sequence[TensorPart], max_inflight_bytes: int) -> list[RawArray]:
    """Read parts of tensors as raw elements, all their chunks side by side. Errors as in ``Checkpoint.read``."""
    nodes = [catalog.root.tensors[part.fqn] for part in parts]
    arrays = [new_memory(node, part.box) for part, node in zip(parts, nodes, strict=True)]
    memory = BytesBudget(max_inflight_bytes)

    def jobs() -> Iterator[Job]:
        for part, node, array in zip(parts, nodes, arrays, strict=True):
            stored = node.under(catalog.root.tree)
            for chunk in node.grid.chunks_of(part.box):
                table = catalog.chunk_table(node, chunk)
                yield from chunk_jobs(catalog.store, stored, chunk, part.box, array, table, memory)

    with catalog.guard():
        run(jobs(), catalog.store.useful_concurrency)
    return arrays


def stored_boxes(node: ArrayNode, max_bytes: int) -> Iterator[Box]:
    """The boxes of a tensor's chunks; of larger ones parts. A tensor without elements is one empty box."""
    grid = node.grid
    if 0 in grid.shape:
        yield Box((0,) * len(grid.shape), grid.shape)
    for chunk in itertools.product(*map(range, grid.counts)):
        whole = grid.chunk_box(chunk)
        for box in _contiguous_boxes(
            whole.shape, node.dtype.itemsize, max_bytes, lambda axis, step: _aligned_rows(node, axis, step)
        ):
            yield Box(tuple(map(sum, zip(whole.offset, box.offset, strict=True))), box.shape)


def _boxes_of(node: ArrayNode, max_bytes: int) -> Iterator[Box]:
    return _contiguous_boxes(
        node.grid.shape, node.dtype.itemsize, max_bytes, lambda axis, step: _aligned_rows(node, axis, step)
    )


def _aligned_rows(node: ArrayNode, axis: int, step: int) -> int:
    """So many rows or a few less: whole chunks where that is possible, else whole subchunks."""
    for shape in (node.grid.chunk_shape, node.grid.subchunk_shape or node.grid.chunk_shape):
        if step >= shape[axis]:
            return step - step % shape[axis]
    return step


def _contiguous_boxes(shape: Ints, itemsize: int, max_bytes: int, aligned: Callable[[int, int], int]) -> Iterator[Box]:
    """Boxes that cover a shape, each at most ``max_bytes`` and contiguous in C order, one after the other."""
    if 0 in shape:
        return
    if not shape:
        yield Box((), ())
        return
    inner = [math.prod(shape[axis + 1 :]) * itemsize for axis in range(len(shape))]
    axis = next((axis for axis, nbytes in enumerate(inner) if nbytes <= max_bytes), len(shape) - 1)
    step = aligned(axis, max(1, max_bytes // inner[axis]))
    for outer in itertools.product(*map(range, shape[:axis])):
        for begin in range(0, shape[axis], step):
            rows = min(step, shape[axis] - begin)
            offset = (*outer, begin, *(0,) * (len(shape) - axis - 1))
            yield Box(offset, (*(1,) * axis, rows, *shape[axis + 1 :]))
