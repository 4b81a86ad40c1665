"""Tensors of an open checkpoint in memory: whole ones as numpy arrays, or box by box. No torch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np

from zarrckpt._errors import KeyMismatchError
from zarrckpt._format.chunk_codec import Target
from zarrckpt._format.chunk_layout import RawArray, raw_dtype
from zarrckpt._format.documents import ArrayNode
from zarrckpt._format.grid import Box
from zarrckpt._jobs import BytesBudget, Progress, Tally, run_jobs
from zarrckpt._read.catalog import Catalog
from zarrckpt._read.chunks import Job, box_memory

Array = np.ndarray[Any, np.dtype[Any]]
T = TypeVar("T")


class StoredBox(NamedTuple):
    """A box of a stored tensor."""

    node: ArrayNode
    box: Box

    @property
    def nbytes(self) -> int:
        return self.box.size * self.node.dtype.itemsize


def fill_boxes(
    catalog: Catalog,
    boxes: Sequence[StoredBox],
    targets: Iterable[Target],
    max_inflight_bytes: int,
    progress: Progress | None = None,
) -> None:
    """Fill a target (raw elements, the box's shape) with each box, all their chunks side by side.

    One request for the table of checksums, unless that was read before, then those for the chunks.
    """
    memory = BytesBudget(max_inflight_bytes)
    tally = Tally(sum(box.nbytes for box in boxes), progress)

    def counted(job: Job) -> None:
        tally.add(job()[1])

    jobs = (
        partial(counted, job)
        for (node, box), target in zip(boxes, targets, strict=True)
        if box.size  # what has no elements needs no table either
        for job in catalog.stored(node).box_jobs(box, target, memory)
    )
    with catalog.explaining_damage():
        run_jobs(jobs, catalog.store.useful_concurrency)


def read_arrays(
    catalog: Catalog,
    fqns: Sequence[str],
    max_inflight_bytes: int,
    progress: Progress | None,
    out: Mapping[str, Any] | None = None,
) -> dict[str, Array]:
    """Read tensors: name -> array. ``out`` is memory that is filled, see :meth:`Checkpoint.read`."""
    nodes = {fqn: catalog.root.tensors[fqn] for fqn in fqns}
    if out is not None:
        arrays = _given(nodes, out)
        raw = {fqn: array.view(raw_dtype(nodes[fqn].dtype.itemsize)) for fqn, array in arrays.items()}
    else:
        with catalog.explaining_damage():
            raw = {fqn: catalog.stored(node).new_memory() for fqn, node in nodes.items()}
        arrays = {fqn: array.view(nodes[fqn].dtype.numpy) for fqn, array in raw.items()}
    boxes = [StoredBox(node, node.grid.whole) for node in nodes.values()]
    fill_boxes(catalog, boxes, raw.values(), max_inflight_bytes, progress)
    return arrays


def read_boxes(catalog: Catalog, boxes: Sequence[StoredBox], max_inflight_bytes: int) -> list[RawArray]:
    """Read boxes of tensors as raw elements. Errors as in ``Checkpoint.read``."""
    arrays = [box_memory(*box) for box in boxes]
    fill_boxes(catalog, boxes, arrays, max_inflight_bytes)
    return arrays


def read_in_order(catalog: Catalog, fqns: Iterable[str], max_bytes: int) -> Iterator[tuple[str, RawArray]]:
    """Yield the names and elements of tensors, one tensor after the other, each in C order: raw, in parts.

    What is read at once takes about ``max_bytes``: parts of one large tensor, or several small ones, all their chunks
    side by side. Tensors without elements have no part. Errors as in ``Checkpoint.read``.
    """
    nodes = {fqn: catalog.root.tensors[fqn] for fqn in fqns}
    for node in nodes.values():
        catalog.refuse_unbacked_size(node)
    half = max(1, max_bytes // 2)  # the other half is for what is on its way
    boxes = (
        (fqn, StoredBox(node, box))
        for fqn, node in nodes.items()
        for box in _contiguous_boxes(node, node.grid.whole, half)
    )
    for batch in batches(boxes, lambda item: item[1].nbytes, half):
        names = [fqn for fqn, _ in batch]
        arrays = read_boxes(catalog, [box for _, box in batch], half)
        while arrays:
            # Not kept here: what has been written is freed.
            yield names.pop(0), arrays.pop(0)


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


def stored_boxes(node: ArrayNode, max_bytes: int) -> Iterator[Box]:
    """The boxes of a tensor's chunks; of larger ones parts. A tensor without elements is one empty box."""
    grid = node.grid
    if not grid.num_chunks:
        yield grid.whole
    for chunk in grid.chunks_of(grid.whole):
        yield from _contiguous_boxes(node, grid.chunk_box(chunk), max_bytes)


def _contiguous_boxes(node: ArrayNode, whole: Box, max_bytes: int) -> Iterator[Box]:
    """Boxes that cover a box of a tensor, each at most ``max_bytes`` and contiguous in it in C order, one by one."""
    shape, itemsize = whole.shape, node.dtype.itemsize
    if not whole.size:
        return
    if not shape:
        yield whole
        return
    inner = [math.prod(shape[axis + 1 :]) * itemsize for axis in range(len(shape))]
    axis = next((axis for axis, nbytes in enumerate(inner) if nbytes <= max_bytes), len(shape) - 1)
    step = _aligned_rows(node, axis, max(1, max_bytes // inner[axis]))
    for outer in itertools.product(*map(range, shape[:axis])):
        for begin in range(0, shape[axis], step):
            rows = min(step, shape[axis] - begin)
            inside = (*outer, begin, *(0,) * (len(shape) - axis - 1))
            offset = tuple(map(sum, zip(whole.offset, inside, strict=True)))
            yield Box(offset, (*(1,) * axis, rows, *shape[axis + 1 :]))


def _aligned_rows(node: ArrayNode, axis: int, step: int) -> int:
    """So many rows or a few less: whole chunks where that is possible, else whole subchunks."""
    for shape in (node.grid.chunk_shape, node.grid.subchunk_shape or node.grid.chunk_shape):
        if step >= shape[axis]:
            return step - step % shape[axis]
    return step


def _given(nodes: Mapping[str, ArrayNode], out: Mapping[str, Any]) -> dict[str, Array]:
    """The caller's memory for tensors as arrays. All that does not fit is listed, before any of it is touched."""
    lacking = [fqn for fqn in nodes if fqn not in out]
    if lacking:
        raise KeyMismatchError(f"out has no memory for {lacking[:5]}: every tensor that is read needs some")
    arrays = {fqn: _memory_of(fqn, out[fqn]) for fqn in nodes}
    odd = [
        f"  {fqn!r}: memory of shape {array.shape}, {array.dtype}; the tensor has {nodes[fqn].grid.shape}, "
        f"{nodes[fqn].dtype.name}"
        for fqn, array in arrays.items()
        if array.shape != nodes[fqn].grid.shape or array.dtype not in _dtypes_of(nodes[fqn])
    ]
    if odd:
        raise KeyMismatchError("what out holds does not fit, nothing was read:\n" + "\n".join(odd))
    return arrays


def _memory_of(fqn: str, given: Any) -> Array:
    """A view of writable memory."""
    try:
        array: Array = given if isinstance(given, np.ndarray) else np.asarray(memoryview(given))
    except (TypeError, ValueError) as err:
        raise TypeError(
            f"out[{fqn!r}] is of type {type(given).__name__}, which has no buffer of numbers ({err}): give a numpy "
            "array, of a torch CPU tensor its .numpy()"
        ) from err
    if not array.flags.writeable:
        raise ValueError(f"out[{fqn!r}] is read-only: give memory that can be filled, for example a copy of it")
    return array


def _dtypes_of(node: ArrayNode) -> list[np.dtype[Any]]:
    """The numpy types that memory for a tensor may have: its own, and where few know that, the unsigned integer's."""
    return [node.dtype.numpy, node.dtype.portable.numpy]
