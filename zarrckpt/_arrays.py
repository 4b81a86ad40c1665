"""Whole tensors of an open checkpoint as numpy arrays, all their chunks side by side. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from zarrckpt._catalog import Catalog
from zarrckpt._documents import ArrayNode
from zarrckpt._grid import Box
from zarrckpt._memory import BytesBudget
from zarrckpt._transfer import Job, Progress, Tally, chunk_jobs, new_array, run

Array = np.ndarray[Any, np.dtype[Any]]


def read_arrays(
    catalog: Catalog, fqns: Sequence[str], max_inflight_bytes: int, progress: Progress | None
) -> dict[str, Array]:
    """Read tensors: name -> array. One request for the table of checksums, then those for the chunks."""
    nodes = {fqn: catalog.root.tensors[fqn] for fqn in fqns}
    with catalog.guard():
        raw = {fqn: _new_array(catalog, node) for fqn, node in nodes.items()}
    memory = BytesBudget(max_inflight_bytes)
    tally = Tally(sum(array.nbytes for array in raw.values()), progress)

    def counted(job: Job) -> None:
        tally.add(job()[1])

    def jobs() -> Iterator[Callable[[], None]]:
        for fqn, node in nodes.items():
            box = Box((0,) * len(node.grid.shape), node.grid.shape)
            for chunk in node.grid.chunks_of(box):
                table = catalog.chunk_table(node, chunk)
                stored = node.under(catalog.root.tree)
                for job in chunk_jobs(catalog.store, stored, chunk, box, raw[fqn], table, memory):
                    yield partial(counted, job)

    with catalog.guard():
        run(jobs(), catalog.store.max_concurrency)
    return {fqn: array.view(nodes[fqn].dtype.numpy) for fqn, array in raw.items()}


def _new_array(catalog: Catalog, node: ArrayNode) -> Array:
    stored = node.under(catalog.root.tree)
    return new_array(catalog.store, stored, catalog.checksums(node), catalog.sizes(node))
