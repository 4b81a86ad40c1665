"""Encode the elements of a chunk as the bytes of its object, and copy the elements of a subchunk to a target."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np

from zarrckpt._format.chunk_layout import (
    CRC_BYTES,
    RawArray,
    bytes_of,
    crc_bytes,
    encode_chunk_index,
    max_stored_subchunk_bytes,
    raw_dtype,
    subchunk_bytes,
)
from zarrckpt._format.crc32c import crc32c
from zarrckpt._format.crc64 import crc64
from zarrckpt._format.documents import ArrayNode
from zarrckpt._format.grid import Box, Ints, intersect

BLOCK_BYTES = 1 << 20
"""Block size for copy, checksum and write. It is chosen to fit the CPU cache."""

GROUP_BYTES = 2 << 20
"""Approximate bytes per write if a chunk is written in parts. More bytes would not stay in the CPU cache."""


class BoxTarget(Protocol):
    """Memory for the elements of a box: an array of raw elements, or an object that copies them to other memory."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """The raw type of the elements."""

    def __setitem__(self, region: tuple[slice, ...], elements: RawArray, /) -> None:
        """Write the elements of a region of the box."""


class Elements(Protocol):
    """The raw elements of a chunk in any memory. The offsets of boxes are relative to the chunk."""

    @property
    def shape(self) -> Ints:
        """The shape of the chunk, clipped at the end of the array."""

    def view(self, box: Box) -> RawArray | None:
        """Return a view of the elements of a box, with any strides, or None if they are in more than one array."""

    def copy(self, box: Box, out: RawArray) -> None:
        """Copy the elements of a box to an array of its shape."""


class ArrayElements:
    """The elements of a chunk in one array with any strides."""

    def __init__(self, array: RawArray) -> None:
        self._array = array
        self.shape = array.shape

    def view(self, box: Box) -> RawArray:
        part: RawArray = self._array[box.region()]
        return part

    def copy(self, box: Box, out: RawArray) -> None:
        out[...] = self.view(box)


class ChunkEncoder:
    """The bytes of one chunk object, in groups of buffers that are encoded one after the other.

    A subchunk that is contiguous in memory is not copied. At the end of the array, chunks are padded with zeros,
    because Zarr stores full chunks. With ``digested``, the encoder also computes the digest of the object.
    """

    def __init__(self, node: ArrayNode, elements: Elements, *, digested: bool = False) -> None:
        self._node = node
        self.digested = digested
        self._elements = elements
        self._inside = Box((0,) * len(elements.shape), elements.shape)
        self._boxes = [node.grid.subchunk_box(number) for number in range(node.grid.subchunks_per_chunk)]
        self._contiguous = [self._contiguous_bytes(box) for box in self._boxes]
        self.checksums: list[int] = []
        """The checksums of the stored subchunks, in C order. Complete, like the next three, after the last group."""
        self.sizes: list[int] = []
        """The stored sizes of the subchunks in bytes, in C order, including their checksums."""
        self.nbytes = 0
        """The size of the chunk object in bytes."""
        self.digest = 0
        """The CRC-64/NVME of the chunk object, or 0 if it was not requested."""

    def memory(self, *, in_parts: bool) -> tuple[int, int]:
        """Return the size of the scratch memory for :meth:`groups`, and the most that it allocates itself, in bytes.

        ``in_parts``: whether the caller writes each group before it requests the next one.
        """
        return _memory(self._node, sum(data is None for data in self._contiguous), in_parts)

    def groups(self, scratch: RawArray, group_bytes: int = GROUP_BYTES) -> Iterator[list[memoryview | bytes]]:
        """Yield the buffers of the chunk in groups of about ``group_bytes``. 0 gives a group for each block.

        If ``scratch`` is full, the group so far is yielded, and the next group overwrites the memory.
        """
        size = subchunk_bytes(self._node)
        group: list[memoryview | bytes] = []
        waiting = used = 0
        begins = [0]
        for box, contiguous in zip(self._boxes, self._contiguous, strict=True):
            data = contiguous
            if data is None:
                if used + size > len(scratch):
                    if group:
                        yield group
                    group, waiting, used = [], 0, 0
                data = self._copy(box, scratch[used : used + size])
                # After compression the copy is not needed any more.
                used += size if self._node.compression is None else 0
            crc = stored = 0
            for block in self._blocks(data):
                crc = crc32c(block, crc)
                self._add_to_digest(block)
                stored += len(block)
                waiting += len(block)
                group.append(block)
                if waiting >= group_bytes:
                    yield group
                    group, waiting = [], 0
            group.append(crc_bytes(crc))
            self._add_to_digest(group[-1])
            self.checksums.append(crc)
            self.sizes.append(stored + CRC_BYTES)
            begins.append(begins[-1] + self.sizes[-1])
            if waiting >= group_bytes:
                yield group
                group, waiting = [], 0
        group.append(encode_chunk_index(self._node, begins))
        self._add_to_digest(group[-1])
        self.nbytes = begins[-1] + len(group[-1])
        yield group

    def equals(self, checksums: RawArray, digest: int, scratch: RawArray) -> bool:
        """Whether the object has these checksums of subchunks and this digest. Stops at the first other checksum.

        The encoder must be ``digested``, and is used up.
        """
        expected = checksums.tolist()
        for _ in self.groups(scratch, 0):
            known = len(self.checksums)
            if self.checksums != expected[:known]:
                return False
        return len(self.checksums) == len(expected) and self.digest == digest

    def _add_to_digest(self, data: memoryview | bytes) -> None:
        if self.digested:
            self.digest = crc64(data, self.digest)

    def _contiguous_bytes(self, box: Box) -> RawArray | None:
        """Return a view of the bytes of a subchunk, or None if they are not contiguous in memory."""
        if box != self._inside and intersect(box, self._inside) != box:
            return None
        data = self._elements.view(box)
        return bytes_of(data) if data is not None and data.flags.c_contiguous else None

    def _copy(self, box: Box, out: RawArray) -> RawArray:
        """Copy the bytes of a subchunk to ``out``, with zeros beyond the end of the array, and return ``out``."""
        inside = intersect(box, self._inside)
        if inside != box:
            out[:] = 0
        if inside is not None:
            elements = out.view(raw_dtype(self._node.dtype.itemsize)).reshape(box.shape)
            self._elements.copy(inside, elements[inside.region(box.offset)])
        return out

    def _blocks(self, data: RawArray) -> Iterator[memoryview | bytes]:
        if self._node.compression is not None:
            yield self._node.compression.encode(data, self._node.dtype.itemsize)
            return
        for begin in range(0, len(data), BLOCK_BYTES):
            yield data[begin : begin + BLOCK_BYTES].data


def encode_chunk(node: ArrayNode, piece: RawArray) -> tuple[list[memoryview | bytes], list[int]]:
    """Return the buffers of a chunk object, and the checksums of its subchunks in C order.

    ``piece`` has the elements of the chunk. It may be clipped at the end of the array.
    """
    encoder = ChunkEncoder(node, ArrayElements(piece))
    groups = list(encoder.groups(np.empty(encoder.memory(in_parts=False)[0], np.uint8)))
    return [buffer for group in groups for buffer in group], encoder.checksums


def encoding_memory(node: ArrayNode, shape: Ints, *, in_parts: bool) -> tuple[int, int]:
    """Return the result of :meth:`ChunkEncoder.memory` for elements in one contiguous array of this shape."""
    whole = math.prod(n // s for n, s in zip(shape, node.grid.subchunk_shape or node.grid.chunk_shape, strict=True))
    return _memory(node, node.grid.subchunks_per_chunk - whole, in_parts)


def _memory(node: ArrayNode, copied: int, in_parts: bool) -> tuple[int, int]:
    size, count = subchunk_bytes(node), node.grid.subchunks_per_chunk
    if node.compression is not None:
        largest = max_stored_subchunk_bytes(node)
        return min(copied, 1) * size, min(count * largest, GROUP_BYTES + largest) if in_parts else count * largest
    return min(copied * size, max(size, GROUP_BYTES)) if in_parts else copied * size, 0


def find_contiguous_bytes(node: ArrayNode, index: Ints, number: int, box: Box, target: BoxTarget) -> RawArray | None:
    """Return a view of the bytes of a target that a subchunk fills, or None if they are not contiguous.

    The target has the shape of the box.
    """
    if not isinstance(target, np.ndarray):
        return None
    own = elements_of(node, index, number)
    if own == box:
        return bytes_of(target) if target.flags.c_contiguous else None
    inside = own.slices(box.offset)
    if any(part.start < 0 or part.stop > n for part, n in zip(inside, box.shape, strict=True)):
        return None
    part = target[own.region(box.offset)]
    return bytes_of(part) if part.flags.c_contiguous else None


def copy_shared(node: ArrayNode, index: Ints, number: int, data: RawArray, box: Box, target: BoxTarget) -> int:
    """Copy the elements that a subchunk shares with a box to a target of the box's shape. Return the bytes copied.

    ``data`` has the bytes of the elements of the subchunk.
    """
    own = elements_of(node, index, number)
    shared = intersect(own, box)
    if shared is None:
        return 0
    elements = data.view(target.dtype).reshape(own.shape)
    target[shared.region(box.offset)] = elements[shared.region(own.offset)]
    return shared.size * node.dtype.itemsize


def elements_of(node: ArrayNode, index: Ints, number: int) -> Box:
    """Return the box of a subchunk in the array, including padding."""
    grid = node.grid
    origin = tuple(map(operator.mul, index, grid.chunk_shape))
    if grid.subchunk_shape is None:
        return Box(origin, grid.chunk_shape)
    box = grid.subchunk_box(number)
    return Box(tuple(map(operator.add, origin, box.offset)), box.shape)
