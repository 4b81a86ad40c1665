"""One chunk's bytes: a piece of a tensor encoded, and a subchunk's elements copied to where they are wanted."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np

from zarrckpt._format.chunk_layout import (
    CRC_BYTES,
    RawArray,
    bytes_of,
    chunk_index,
    crc_bytes,
    most_subchunk_stored,
    raw_dtype,
    subchunk_bytes,
)
from zarrckpt._format.crc32c import crc32c
from zarrckpt._format.documents import ArrayNode
from zarrckpt._format.grid import Box, Ints, intersect

BLOCK_BYTES = 1 << 20
"""What is done to bytes in turn (copy, checksum, write) is done to so many at a time, while they are in the cache."""

GROUP_BYTES = 2 << 20
"""About how much goes to the store together, where a chunk goes in parts: more would leave the cache in between."""


class Target(Protocol):
    """What takes the elements of a box: an array of raw elements, or what passes them on to other memory."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """The raw type of the elements."""

    def __setitem__(self, place: tuple[slice, ...], cells: RawArray, /) -> None:
        """Take the elements of a part of the box."""


class Elements(Protocol):
    """The raw elements of a chunk, wherever they are. Boxes are counted from the chunk's begin."""

    @property
    def shape(self) -> Ints:
        """The chunk's own, less where the array has ended."""

    def view(self, box: Box) -> RawArray | None:
        """The elements of a box as they lie in memory, any strides; None where they do not lie in one array."""

    def copy(self, box: Box, out: RawArray) -> None:
        """Copy the elements of a box to memory of its shape."""


class ArrayElements:
    """The elements of a chunk that are one array, any strides."""

    def __init__(self, array: RawArray) -> None:
        self._array = array
        self.shape = array.shape

    def view(self, box: Box) -> RawArray:
        part: RawArray = self._array[box.region()]
        return part

    def copy(self, box: Box, out: RawArray) -> None:
        out[...] = self.view(box)


class ChunkEncoder:
    """The bytes of one chunk object, in groups of buffers that are made one after the other.

    A subchunk that lies in one piece in memory is not copied. At the array's end chunks are padded with zeros, since
    Zarr stores full ones.
    """

    def __init__(self, node: ArrayNode, elements: Elements) -> None:
        self._node = node
        self._elements = elements
        self._inside = Box((0,) * len(elements.shape), elements.shape)
        self._boxes = [node.grid.subchunk_box(number) for number in range(node.grid.subchunks_per_chunk)]
        self._straight = [self._in_one_piece(box) for box in self._boxes]
        self.checksums: list[int] = []
        """Of the stored subchunks, in C order; known, as the others are, when all groups have been made."""
        self.sizes: list[int] = []
        """The stored sizes of the subchunks, in C order, the bytes of their checksums included."""
        self.nbytes = 0

    def memory(self, *, in_parts: bool) -> tuple[int, int]:
        """The scratch memory that :meth:`groups` needs, and what it allocates by itself at most, in bytes.

        ``in_parts``: each group is taken before the next one is made.
        """
        return _memory(self._node, sum(data is None for data in self._straight), in_parts)

    def groups(self, scratch: RawArray) -> Iterator[list[memoryview | bytes]]:
        """The chunk's buffers. ``scratch`` is used anew when it is full, once the groups that lie there were taken."""
        size = subchunk_bytes(self._node)
        group: list[memoryview | bytes] = []
        waiting = used = 0
        begins = [0]
        for box, straight in zip(self._boxes, self._straight, strict=True):
            data = straight
            if data is None:
                if used + size > len(scratch):
                    if group:
                        yield group
                    group, waiting, used = [], 0, 0
                data = self._copied(box, scratch[used : used + size])
                # What is compressed is not needed any more.
                used += size if self._node.compression is None else 0
            crc = stored = 0
            for block in self._blocks(data):
                crc = crc32c(block, crc)
                stored += len(block)
                waiting += len(block)
                group.append(block)
                if waiting >= GROUP_BYTES:
                    yield group
                    group, waiting = [], 0
            group.append(crc_bytes(crc))
            self.checksums.append(crc)
            self.sizes.append(stored + CRC_BYTES)
            begins.append(begins[-1] + self.sizes[-1])
        group.append(chunk_index(self._node, begins))
        self.nbytes = begins[-1] + len(group[-1])
        yield group

    def _in_one_piece(self, box: Box) -> RawArray | None:
        """A subchunk's bytes as they lie in memory, where they lie there in one piece."""
        if box != self._inside and intersect(box, self._inside) != box:
            return None
        data = self._elements.view(box)
        return bytes_of(data) if data is not None and data.flags.c_contiguous else None

    def _copied(self, box: Box, out: RawArray) -> RawArray:
        """A subchunk's bytes in other memory, zeros where the array has ended."""
        inside = intersect(box, self._inside)
        if inside != box:
            out[:] = 0
        if inside is not None:
            cells = out.view(raw_dtype(self._node.dtype.itemsize)).reshape(box.shape)
            self._elements.copy(inside, cells[inside.region(box.offset)])
        return out

    def _blocks(self, data: RawArray) -> Iterator[memoryview | bytes]:
        if self._node.compression is not None:
            yield self._node.compression.encode(data, self._node.dtype.itemsize)
            return
        for begin in range(0, len(data), BLOCK_BYTES):
            yield data[begin : begin + BLOCK_BYTES].data


def encode_chunk(node: ArrayNode, piece: RawArray) -> tuple[list[memoryview | bytes], list[int]]:
    """The buffers of a chunk object, and its subchunks' checksums in C order; of an array, which may be clipped."""
    encoder = ChunkEncoder(node, ArrayElements(piece))
    groups = list(encoder.groups(np.empty(encoder.memory(in_parts=False)[0], np.uint8)))
    return [buffer for group in groups for buffer in group], encoder.checksums


def encoding_memory(node: ArrayNode, shape: Ints, *, in_parts: bool) -> tuple[int, int]:
    """What :meth:`ChunkEncoder.memory` will say of elements that lie in one piece, in an array of that shape."""
    whole = math.prod(n // s for n, s in zip(shape, node.grid.subchunk_shape or node.grid.chunk_shape, strict=True))
    return _memory(node, node.grid.subchunks_per_chunk - whole, in_parts)


def _memory(node: ArrayNode, copied: int, in_parts: bool) -> tuple[int, int]:
    size, count = subchunk_bytes(node), node.grid.subchunks_per_chunk
    if node.compression is not None:
        most = most_subchunk_stored(node)
        return min(copied, 1) * size, min(count * most, GROUP_BYTES + most) if in_parts else count * most
    return min(copied * size, max(size, GROUP_BYTES)) if in_parts else copied * size, 0


def straight_bytes(node: ArrayNode, chunk: Ints, number: int, box: Box, target: Target) -> RawArray | None:
    """The bytes of a target (which has the box's shape) that a subchunk fills, where it does that in one piece."""
    if not isinstance(target, np.ndarray):
        return None
    own = elements_of(node, chunk, number)
    if own == box:
        return bytes_of(target) if target.flags.c_contiguous else None
    inside = own.slices(box.offset)
    if any(part.start < 0 or part.stop > n for part, n in zip(inside, box.shape, strict=True)):
        return None
    part = target[own.region(box.offset)]
    return bytes_of(part) if part.flags.c_contiguous else None


def copy_shared(node: ArrayNode, chunk: Ints, number: int, data: RawArray, box: Box, target: Target) -> int:
    """Copy what a subchunk (its elements' bytes) shares with a box to a target of the box's shape; the bytes copied."""
    own = elements_of(node, chunk, number)
    shared = intersect(own, box)
    if shared is None:
        return 0
    cells = data.view(target.dtype).reshape(own.shape)
    target[shared.region(box.offset)] = cells[shared.region(own.offset)]
    return shared.size * node.dtype.itemsize


def elements_of(node: ArrayNode, chunk: Ints, number: int) -> Box:
    """A subchunk's elements, counted from the array's begin; padding included."""
    box = node.grid.subchunk_box(number)
    origin = tuple(c * n for c, n in zip(chunk, node.grid.chunk_shape, strict=True))
    if node.grid.subchunk_shape is None:
        return Box(origin, box.shape)
    return Box(tuple(map(sum, zip(origin, box.offset, strict=True))), box.shape)
