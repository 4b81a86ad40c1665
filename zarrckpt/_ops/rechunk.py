"""Write chunks of a copy that differ from the source: read the box, cast it if need be, encode and put it. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from zarrckpt._commit.chunks import put_chunk
from zarrckpt._format.chunk_codec import ArrayElements, encoding_memory
from zarrckpt._format.chunk_layout import max_stored_subchunk_bytes, raw_dtype
from zarrckpt._format.documents import ArrayNode
from zarrckpt._format.grid import Ints, intersect
from zarrckpt._jobs import BytesBudget, run_jobs
from zarrckpt._read.casts import CastTarget
from zarrckpt._read.catalog import Catalog
from zarrckpt._read.chunks import READ_BYTES, unpacking_bytes
from zarrckpt._store import Store

_READS_AT_ONCE = 8
"""Number of parallel reads for one chunk if the store is not local, because few large chunks fit into memory."""


@dataclass(frozen=True)
class EncodedChunk:
    """A stored chunk: its parts of the tables, its object's size, and the number of values that a cast lost."""

    checksums: Sequence[int]
    sizes: Sequence[int]
    nbytes: int
    overflowed: int = 0


def rewrite_chunk(
    source: Catalog, old: ArrayNode, new: ArrayNode, chunk_index: Ints, target: Store, key: str, budget: BytesBudget
) -> EncodedChunk:
    """Read the box of one chunk of a copy from the source, encode it and put it.

    Takes memory for the chunk, its encoding and the reads. Raises CorruptCheckpointError with the array and the
    object's key if the source is damaged.
    """
    box = new.grid.chunk_box(chunk_index)
    at_once = 1 if source.store.is_local else _READS_AT_ONCE
    reading = at_once * _reading_bytes(source.store, old)
    encoding = sum(encoding_memory(new, box.shape, in_parts=target.is_local))
    with budget.take(box.size * new.dtype.itemsize, reading + encoding) as taken:
        elements = taken.view(raw_dtype(new.dtype.itemsize)).reshape(box.shape)
        cast = None if old.dtype == new.dtype else CastTarget(old.dtype, new.dtype, elements)
        jobs = [*source.stored_array(old).box_jobs(box, elements if cast is None else cast, BytesBudget(reading))]
        run_jobs(jobs, min(at_once, len(jobs)))
        encoder = put_chunk(target, key, new, ArrayElements(elements), BytesBudget(encoding))
    return EncodedChunk(encoder.checksums, encoder.sizes, encoder.nbytes, cast.overflowed if cast is not None else 0)


def _reading_bytes(store: Store, node: ArrayNode) -> int:
    """Return the maximum memory of one read: neighbouring subchunks, or one subchunk of a local file."""
    one = max_stored_subchunk_bytes(node)
    if store.is_local and node.compression is None:
        return one
    return min(node.grid.subchunks_per_chunk * one, max(one, READ_BYTES)) + unpacking_bytes(node)


def choose_writers(old: ArrayNode, new: ArrayNode, writers: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the writer of each chunk of a copy: the rank that wrote most of its elements in the source.

    ``writers`` has the shape of the source's chunk grid, the result has the shape of the copy's. If ranks wrote equally
    many elements, the result is the lowest rank.
    """
    if old.grid.chunk_shape == new.grid.chunk_shape:
        return writers
    found = np.zeros(new.grid.counts, "<u4")
    for chunk_index in new.grid.chunks_of(new.grid.whole):
        box = new.grid.chunk_box(chunk_index)
        parts: dict[int, int] = {}
        for other in old.grid.chunks_of(box):
            shared, rank = intersect(old.grid.chunk_box(other), box), int(writers[other])
            parts[rank] = parts.get(rank, 0) + (0 if shared is None else shared.size)
        found[chunk_index] = min(parts, key=lambda rank: (-parts[rank], rank))
    return found
