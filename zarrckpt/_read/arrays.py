"""Read tensors of an open checkpoint into memory, whole as numpy arrays or box by box. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np

from zarrckpt._errors import KeyMismatchError
from zarrckpt._format.chunk_codec import BoxTarget
from zarrckpt._format.chunk_layout import RawArray, raw_dtype
from zarrckpt._format.documents import ArrayNode
from zarrckpt._format.grid import Box, product
from zarrckpt._jobs import ByteCounter, BytesBudget, Progress, run_jobs
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
    targets: Iterable[BoxTarget],
    max_inflight_bytes: int,
    progress: Progress | None = None,
) -> None:
    """Fill a target (raw elements, the box's shape) with each box, and read the chunks of all boxes in parallel.

    One request for the table of checksums, unless it was read before, then the requests for the chunks.
    """
    budget = BytesBudget(max_inflight_bytes)
    tally = ByteCounter(sum(box.nbytes for box in boxes), progress)

    def counted(job: Job) -> None:
        tally.add(job()[1])

    jobs = (
        partial(counted, job)
        for (node, box), target in zip(boxes, targets, strict=True)
        if box.size  # a box without elements does not need the table either
        for job in catalog.stored_array(node).box_jobs(box, target, budget)
    )
    store = catalog.store
    with catalog.explaining_damage(), store.keep_open():
        run_jobs(jobs, store.threads_for(tally.total, len(boxes)))


def read_arrays(
    catalog: Catalog,
    fqns: Sequence[str],
    max_inflight_bytes: int,
    progress: Progress | None,
    out: Mapping[str, Any] | None = None,
) -> dict[str, Array]:
    """Read tensors and return fqn -> array. ``out`` is memory to fill, see :meth:`Checkpoint.read`."""
    nodes = {fqn: catalog.root.tensors[fqn] for fqn in fqns}
    if out is not None:
        arrays = _check_out(nodes, out)
        raw = {fqn: array.view(raw_dtype(nodes[fqn].dtype.itemsize)) for fqn, array in arrays.items()}
    else:
        with catalog.explaining_damage():
            raw = {fqn: catalog.stored_array(node).new_memory() for fqn, node in nodes.items()}
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
    """Yield parts of tensors as (fqn, raw elements), one tensor after the other, each tensor in C order.

    Parts are read in batches that need about ``max_bytes`` of memory: parts of one large tensor, or several small
    tensors. The chunks of a batch are read in parallel. Tensors without elements have no part. Errors as in
    ``Checkpoint.read``.
    """
    nodes = {fqn: catalog.root.tensors[fqn] for fqn in fqns}
    for node in nodes.values():
        catalog.refuse_implausible_size(node)
    half = max(1, max_bytes // 2)  # the other half is for the requests under way
    boxes = (
        (fqn, StoredBox(node, box))
        for fqn, node in nodes.items()
        for box in _contiguous_boxes(node, node.grid.whole, half)
    )
    for batch in batches(boxes, lambda item: item[1].nbytes, half):
        names = [fqn for fqn, _ in batch]
        arrays = read_boxes(catalog, [box for _, box in batch], half)
        while arrays:
            # Without a reference here, the caller frees each part after use.
            yield names.pop(0), arrays.pop(0)


def batches(items: Iterable[T], nbytes_of: Callable[[T], int], max_bytes: int) -> Iterator[list[T]]:
    """Yield the items in order, in lists of at most ``max_bytes`` each. A larger item has its own list."""
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
    """Yield the boxes of a tensor's chunks, cut into parts of at most ``max_bytes``.

    A tensor without elements yields one empty box.
    """
    grid = node.grid
    if not grid.num_chunks:
        yield grid.whole
    for chunk in grid.chunks_of(grid.whole):
        yield from _contiguous_boxes(node, grid.chunk_box(chunk), max_bytes)


def _contiguous_boxes(node: ArrayNode, whole: Box, max_bytes: int) -> Iterator[Box]:
    """Yield boxes that together are a box of a tensor, in C order, each contiguous and at most ``max_bytes``."""
    shape, itemsize = whole.shape, node.dtype.itemsize
    if not whole.size:
        return
    if not shape:
        yield whole
        return
    inner = [math.prod(shape[axis + 1 :]) * itemsize for axis in range(len(shape))]
    axis = next((axis for axis, nbytes in enumerate(inner) if nbytes <= max_bytes), len(shape) - 1)
    step = _aligned_rows(node, axis, max(1, max_bytes // inner[axis]))
    for outer in product([*map(range, shape[:axis])]):
        for begin in range(0, shape[axis], step):
            rows = min(step, shape[axis] - begin)
            inside = (*outer, begin, *(0,) * (len(shape) - axis - 1))
            offset = tuple(map(sum, zip(whole.offset, inside, strict=True)))
            yield Box(offset, (*(1,) * axis, rows, *shape[axis + 1 :]))


def _aligned_rows(node: ArrayNode, axis: int, step: int) -> int:
    """Return ``step`` rounded down to rows of whole chunks if possible, otherwise to rows of whole subchunks."""
    for shape in (node.grid.chunk_shape, node.grid.subchunk_shape or node.grid.chunk_shape):
        if step >= shape[axis]:
            return step - step % shape[axis]
    return step


def _check_out(nodes: Mapping[str, ArrayNode], out: Mapping[str, Any]) -> dict[str, Array]:
    """Return the caller's memory for tensors as arrays. Raises one error for all memory that does not fit."""
    lacking = [fqn for fqn in nodes if fqn not in out]
    if lacking:
        raise KeyMismatchError(f"out has no memory for {lacking[:5]}: pass memory for every tensor that is read")
    arrays = {fqn: _memory_of(fqn, out[fqn]) for fqn in nodes}
    odd = [
        f"  {fqn!r}: memory of shape {array.shape}, {array.dtype}, expected {node.grid.shape}, {node.dtype.name}"
        for (fqn, node), array in zip(nodes.items(), arrays.values(), strict=True)
        if array.shape != node.grid.shape or array.dtype not in (node.dtype.numpy, node.dtype.portable.numpy)
    ]
    if odd:
        raise KeyMismatchError("out has memory that does not fit the tensors. Nothing was read:\n" + "\n".join(odd))
    return arrays


def _memory_of(fqn: str, given: Any) -> Array:
    """Return the caller's memory as an array. Raises TypeError, or ValueError for read-only memory."""
    try:
        array: Array = given if isinstance(given, np.ndarray) else np.asarray(memoryview(given))
    except (TypeError, ValueError) as err:
        raise TypeError(
            f"out[{fqn!r}] is a {type(given).__name__}, which has no buffer of numbers ({err}): pass a numpy array, or "
            "the .numpy() of a torch CPU tensor"
        ) from err
    if not array.flags.writeable:
        raise ValueError(f"out[{fqn!r}] is read-only: pass writable memory, for example a copy of it")
    return array
