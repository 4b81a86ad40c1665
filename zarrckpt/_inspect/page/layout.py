"""Describe the chunk grids and writers of tensors for a page, once for all tensors with the same layout."""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from typing import Any

import numpy as np

from zarrckpt._format.documents import ArrayNode, Json
from zarrckpt._format.grid import Grid

Writers = np.ndarray[Any, np.dtype[Any]]
_MAX_SEQUENCES = 2048
"""Maximum number of sequences of writers. The page shows no writers for a tensor with more."""


class Layouts:
    """The distinct layouts of one checkpoint's tensors, by number."""

    def __init__(self, writers: Mapping[str, Writers]) -> None:
        self._writers = writers
        self._numbers: dict[tuple[object, ...], int] = {}
        self.found: list[Json] = []

    def number(self, node: ArrayNode) -> int:
        """Return the number of an array's layout."""
        writers = sequences(self._writers[node.path].reshape(-1))
        grid, compression = node.grid, node.compression.name if node.compression else None
        kind = (grid, node.dtype.name, node.portable, compression, writers)
        if kind not in self._numbers:
            self._numbers[kind] = len(self.found)
            self.found.append(
                {
                    "shape": grid.shape,
                    "dtype": node.dtype.name,
                    "chunk": grid.chunk_shape,
                    "subchunk": grid.subchunk_shape,
                    "compression": compression,
                    "portable": node.portable,
                    "nbytes": node.nbytes,
                    "chunks": grid.num_chunks,
                    "writers": writers,
                }
            )
        return self._numbers[kind]

    def rank_bytes(self, nodes: list[ArrayNode]) -> list[tuple[int, int]]:
        """Return (rank, bytes) for each rank that wrote elements of these arrays, ascending."""
        total: dict[int, int] = {}
        for node in nodes:
            ranks, indices = np.unique(self._writers[node.path].reshape(-1), return_inverse=True)
            sizes = np.bincount(indices, weights=chunk_elements(node.grid), minlength=len(ranks))
            for rank, size in zip(ranks.tolist(), sizes.tolist(), strict=True):
                total[rank] = total.get(rank, 0) + int(size) * node.dtype.itemsize
        return sorted(total.items())


def chunk_elements(grid: Grid) -> Writers:
    """Return the number of elements of each chunk within the array, in C order."""
    if not grid.num_chunks:  # an empty tensor can claim any number of chunks along the other dimensions
        return np.zeros(0, np.int64)
    sizes = np.ones(1, np.int64)
    for n, chunk, count in zip(grid.shape, grid.chunk_shape, grid.counts, strict=True):
        along = np.minimum(chunk, n - np.arange(count, dtype=np.int64) * chunk)
        sizes = np.multiply.outer(sizes, along).reshape(-1)
    return sizes


def sequences(ranks: Writers) -> tuple[tuple[int, int, int], ...] | None:
    """Return numbers as sequences (first, step, count), or None if there are more than 2,048.

    0, 1, 2, 3 is one sequence, and so is 5, 5, 5.
    """
    numbers = ranks.astype(np.int64)
    steps = np.diff(numbers)
    changes: list[int] = (np.flatnonzero(np.diff(steps)) + 1).tolist()
    found: list[tuple[int, int, int]] = []
    begin = 0
    while begin < len(numbers):
        if len(found) == _MAX_SEQUENCES:
            return None
        at = bisect.bisect_right(changes, begin)
        end = changes[at] + 1 if at < len(changes) else len(numbers)
        found.append((int(numbers[begin]), int(steps[begin]) if end - begin > 1 else 0, end - begin))
        begin = end
    return tuple(found)
