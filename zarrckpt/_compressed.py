"""The bytes of a compressed chunk, and of any chunk as its array has it.

Layout, see ``docs/reference/format.md``: as in ``_codec``, with subchunks of whatever size they are compressed to.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from zarrckpt._chunk_table import begins_of
from zarrckpt._codec import (
    CRC_BYTES,
    GROUP_BYTES,
    ChunkEncoder,
    RawArray,
    bytes_of,
    chunk_index,
    crc_buffer,
    scratch_bytes,
    subchunk_bytes,
)
from zarrckpt._compression import Compression, most_stored
from zarrckpt._crc32c import crc32c
from zarrckpt._documents import ArrayNode
from zarrckpt._grid import Grid, ravel, unravel_f


def encoding_bytes(grid: Grid, itemsize: int, in_parts: bool) -> int:
    """How much memory :class:`CompressedEncoder` takes at most: the chunk compressed, and one subchunk on its way."""
    size = subchunk_bytes(grid, itemsize) - CRC_BYTES
    most = most_stored(size) + CRC_BYTES
    kept = math.prod(grid.sub_counts) * most
    return size + most + (min(kept, GROUP_BYTES + most) if in_parts else kept)


class CompressedEncoder:
    """The bytes of one compressed chunk object, in groups of buffers made one after the other.

    ``piece`` is as for :class:`zarrckpt._codec.ChunkEncoder`.
    """

    def __init__(self, grid: Grid, piece: RawArray, compression: Compression) -> None:
        self._grid = grid
        self._piece = piece
        self._compression = compression
        self._sub = grid.subchunk_shape or grid.chunk_shape
        cells = math.prod(grid.sub_counts)
        self.checksums = [0] * cells
        """Of the compressed subchunks, in C order; known, as the others are, when all groups have been made."""
        self.sizes = [0] * cells
        """The stored sizes of the subchunks, in C order: their checksums' bytes count."""
        self.nbytes = 0

    def groups(self, scratch: RawArray | None = None) -> Iterator[list[memoryview | bytes]]:
        """The chunk's buffers, which are the caller's. No scratch memory is needed."""
        counts, itemsize = self._grid.sub_counts, self._piece.dtype.itemsize
        memory: RawArray | None = None
        group: list[memoryview | bytes] = []
        waiting = 0
        for place in range(len(self.checksums)):
            cell = unravel_f(place, counts)
            # The ellipsis, so that a scalar stays an array.
            at: tuple[Any, ...] = (*(slice(i * n, (i + 1) * n) for i, n in zip(cell, self._sub, strict=True)), ...)
            data = self._piece[at]
            if data.shape != self._sub or not data.flags.c_contiguous:
                memory = np.empty(self._sub, data.dtype) if memory is None else memory
                data = _padded(data, memory)
            stored = self._compression.encode(bytes_of(data), itemsize)
            crc, number = crc32c(stored), ravel(cell, counts)
            self.checksums[number], self.sizes[number] = crc, len(stored) + CRC_BYTES
            group += [stored, crc_buffer(crc)]
            waiting += len(stored)
            if waiting >= GROUP_BYTES:
                yield group
                group, waiting = [], 0
        begins = begins_of(self._grid, np.array(self.sizes))
        group.append(chunk_index(self._grid, begins))
        self.nbytes = begins[-1] + len(group[-1])
        yield group


def _padded(data: RawArray, memory: RawArray) -> RawArray:
    """A subchunk's elements in one piece, zeros where the array has ended."""
    if data.shape != memory.shape:
        memory[...] = np.zeros((), memory.dtype)
    memory[tuple(slice(0, n) for n in data.shape)] = data
    return memory


Encoder = ChunkEncoder | CompressedEncoder


def encoder_of(node: ArrayNode, piece: RawArray) -> Encoder:
    """What makes the bytes of one chunk of an array; ``piece`` is as for :class:`zarrckpt._codec.ChunkEncoder`."""
    if node.compression is None:
        return ChunkEncoder(node.grid, piece)
    return CompressedEncoder(node.grid, piece, node.compression)


def encoding_memory(node: ArrayNode, whole: bool, in_parts: bool) -> tuple[int, int]:
    """The scratch memory that an array's :func:`encoder_of` needs, and what it allocates by itself at most.

    ``whole`` and ``in_parts`` are as for :func:`zarrckpt._codec.scratch_bytes`.
    """
    if node.compression is None:
        return scratch_bytes(node.grid, node.dtype.itemsize, whole, in_parts=in_parts), 0
    return 0, encoding_bytes(node.grid, node.dtype.itemsize, in_parts)
