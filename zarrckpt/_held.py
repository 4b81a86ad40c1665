"""Sharded tensors as the boxes that this rank really holds, for our planners."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from zarrckpt._errors import UnsupportedLayoutError
from zarrckpt._grid import Box, Ints
from zarrckpt._shards import Cut, Held, held_boxes


class HeldTensor:
    """Takes a DTensor's place in a planner's flat state: DCP asks it for write items and for boxes.

    DTensor's own answers come from torch's rule for offsets, which is wrong for uneven FSDP2 x TP.

    Args:
        fqn: the DTensor's name, for errors. local: what stands for its local tensor, a copy say (default: itself).

    Making one is cheap; the boxes are found when they are first asked for. Raises UnsupportedLayoutError then where the
    local tensor has not the size that the placements say.
    """

    def __init__(self, fqn: str, tensor: DTensor, local: torch.Tensor | None = None) -> None:
        self._fqn = fqn
        self.shape = tuple(tensor.shape)
        self._mesh, self._placements = tensor.device_mesh, tensor.placements
        self._local = tensor.to_local().detach() if local is None else local

    @cached_property
    def _held(self) -> dict[Ints, Held]:
        """The boxes of this rank, by their global offsets."""
        found = {held.box.offset: held for held in _boxes_of(self.shape, self._mesh, self._placements)}
        elements = sum(held.box.size for held in found.values())
        if elements != (self._local.numel() if self._mesh.get_coordinate() is not None else 0):
            raise UnsupportedLayoutError(
                f"{self._fqn!r}: the placements {self._placements} on a mesh of {tuple(self._mesh.shape)} give this "
                f"rank {elements} elements of shape {self.shape}, but it holds {tuple(self._local.shape)}: "
                "redistribute() it, or use full_tensor()"
            )
        return found

    def piece(self, offset: Ints) -> torch.Tensor:
        """The local tensor's part that is the box at a global offset: a view."""
        held = self._held[offset]
        if not held.box.size:
            return self._local.new_empty(held.box.shape)
        return self._local[held.box.slices(_minus(held.box.offset, held.local))]

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self._local)
        return [
            WriteItem(
                MetadataIndex(fqn, held.box.offset),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(_chunk(held.box), properties, torch.Size(self.shape)),
            )
            for held in self._held.values()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [_chunk(held.box) for held in self._held.values()]


class HeldParts(HeldTensor):
    """Takes the place of a plain tensor that says which boxes of a global tensor are in it.

    That is torch 2.14's ``CheckpointableTensor``, see :func:`says_its_boxes`.

    Args:
        fqn: its name, for errors. local: what stands for its memory, a copy say (default: itself).

    Raises UnsupportedLayoutError, when its boxes are first asked for, where they are not within both tensors.
    """

    def __init__(self, fqn: str, tensor: Any, local: torch.Tensor | None = None) -> None:
        self._fqn = fqn
        self.shape = global_shape(tensor)
        self._said = [tensor.global_offsets, tensor.local_offsets, tensor.local_sizes]
        self._local = tensor.detach() if local is None else local

    @cached_property
    def _held(self) -> dict[Ints, Held]:
        if 0 in self.shape:
            return {(zero := (0,) * len(self.shape)): Held(Box(zero, self.shape), zero)}
        found: dict[Ints, Held] = {}
        shapes = (self.shape, tuple(self._local.shape))
        for row in itertools.zip_longest(*self._said, fillvalue=()):
            offset, local, sizes = (tuple(map(int, numbers)) for numbers in row)
            for start, shape in zip((offset, local), shapes, strict=True):
                if not len(start) == len(sizes) == len(shape) or any(
                    at < 0 or n < 0 or at + n > size for at, n, size in zip(start, sizes, shape, strict=True)
                ):
                    raise UnsupportedLayoutError(
                        f"{self._fqn!r}: its box of sizes {sizes} at the global offset {offset}, local offset {local}, "
                        f"is not within the shape {self.shape} and the local shape {shapes[1]}: correct global_shape, "
                        "global_offsets, local_offsets and local_sizes of the tensor"
                    )
            # An empty box may have the offset of another rank's.
            if 0 not in sizes:
                found[offset] = Held(Box(offset, sizes), local)
        return found


class HeldPieces(HeldTensor):
    """Takes the place of any other sharded tensor: the write items that it gave, and for each a tensor."""

    def __init__(self, pieces: Sequence[tuple[WriteItem, torch.Tensor]]) -> None:
        self._items = [item for item, _ in pieces]
        self._pieces = {tuple(item.index.offset or ()): piece for item, piece in pieces}

    def piece(self, offset: Ints) -> torch.Tensor:
        """The tensor of the item at a global offset."""
        return self._pieces[offset]

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        # An import may put them below another key.
        return [replace(item, index=replace(item.index, fqn=fqn)) for item in self._items]


_BOX_FIELDS = ("global_shape", "global_offsets", "local_offsets", "local_sizes")


def says_its_boxes(value: object) -> bool:
    """Whether a value is a tensor that says which boxes of a global tensor are in it: it has these four attributes."""
    return isinstance(value, torch.Tensor) and all(hasattr(value, name) for name in _BOX_FIELDS)


def global_shape(tensor: Any) -> Ints:
    """The shape of a tensor; of one that says its boxes, that of the global tensor."""
    return tuple(tensor.global_shape if says_its_boxes(tensor) else tensor.shape)


def _boxes_of(shape: Ints, mesh: DeviceMesh, placements: Sequence[Placement]) -> list[Held]:
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return []
    if 0 in shape:
        # Nothing to write, but an entry to keep: every rank names it, and DCP keeps one of them.
        zero = (0,) * len(shape)
        return [Held(Box(zero, shape), zero)]
    cuts = [
        Cut(placement.dim, int(getattr(placement, "split_factor", 1))) if hasattr(placement, "dim") else None
        for placement in placements
    ]
    return held_boxes(shape, tuple(mesh.shape), tuple(coordinate), cuts)


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.shape))


def _minus(a: Ints, b: Ints) -> Ints:
    return tuple(x - y for x, y in zip(a, b, strict=True))
