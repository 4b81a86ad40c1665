"""Whole tensors of an open checkpoint as numpy arrays, all their chunks side by side. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from zarrckpt._errors import KeyMismatchError
from zarrckpt._format.chunk_layout import raw_dtype
from zarrckpt._format.documents import ArrayNode
from zarrckpt._format.grid import Box
from zarrckpt._jobs import BytesBudget, Progress, Tally, run
from zarrckpt._read.catalog import Catalog
from zarrckpt._read.chunks import Job, chunk_jobs, new_array

Array = np.ndarray[Any, np.dtype[Any]]


def read_arrays(
    catalog: Catalog,
    fqns: Sequence[str],
    max_inflight_bytes: int,
    progress: Progress | None,
    out: Mapping[str, Any] | None = None,
) -> dict[str, Array]:
    """Read tensors: name -> array. One request for the table of checksums, then those for the chunks.

    ``out`` is memory that is filled, see :meth:`Checkpoint.read`.
    """
    nodes = {fqn: catalog.root.tensors[fqn] for fqn in fqns}
    if out is not None:
        arrays = _given(nodes, out)
        raw = {fqn: array.view(raw_dtype(nodes[fqn].dtype.itemsize)) for fqn, array in arrays.items()}
    else:
        with catalog.guard():
            raw = {fqn: _new_array(catalog, node) for fqn, node in nodes.items()}
        arrays = {fqn: array.view(nodes[fqn].dtype.numpy) for fqn, array in raw.items()}
    memory = BytesBudget(max_inflight_bytes)
    tally = Tally(sum(array.nbytes for array in raw.values()), progress)

    def counted(job: Job) -> None:
        tally.add(job()[1])

    def jobs() -> Iterator[Callable[[], None]]:
        for fqn, node in nodes.items():
            box = Box((0,) * len(node.grid.shape), node.grid.shape)
            stored = node.under(catalog.root.tree)
            for chunk in node.grid.chunks_of(box):
                table = catalog.chunk_table(node, chunk)
                for job in chunk_jobs(catalog.store, stored, chunk, box, raw[fqn], table, memory):
                    yield partial(counted, job)

    with catalog.guard():
        run(jobs(), catalog.store.useful_concurrency)
    return arrays


def _new_array(catalog: Catalog, node: ArrayNode) -> Array:
    stored = node.under(catalog.root.tree)
    return new_array(catalog.store, stored, catalog.checksums(node), catalog.sizes(node))


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
