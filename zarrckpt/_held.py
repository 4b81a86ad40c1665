"""DTensors as the boxes that this rank really holds, for our planners."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from zarrckpt._errors import UnsupportedLayoutError
from zarrckpt._grid import Box, Ints
from zarrckpt._shards import Cut, Held, held_boxes


class HeldTensor:
    """Takes a DTensor's place in a planner's flat state: DCP asks it for write items and for boxes.

    DTensor's own answers come from torch's rule for offsets, which is wrong for uneven FSDP2 x TP. Raises
    UnsupportedLayoutError where the local tensor has not the size that the placements say.
    """

    def __init__(self, fqn: str, tensor: DTensor) -> None:
        self.shape = tuple(tensor.shape)
        self._local = tensor.to_local().detach()
        self._held = {held.box.offset: held for held in _boxes_of(tensor)}
        elements = sum(held.box.size for held in self._held.values())
        if elements != (self._local.numel() if tensor.device_mesh.get_coordinate() is not None else 0):
            raise UnsupportedLayoutError(
                f"{fqn!r}: the placements {tensor.placements} on a mesh of {tuple(tensor.device_mesh.shape)} give this "
                f"rank {elements} elements of shape {self.shape}, but it holds {tuple(self._local.shape)}: "
                "redistribute() it, or use full_tensor()"
            )

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


def _boxes_of(tensor: DTensor) -> list[Held]:
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return []
    shape = tuple(tensor.shape)
    if 0 in shape:
        # Nothing to write, but an entry to keep: every rank names it, and DCP keeps one of them.
        zero = (0,) * len(shape)
        return [Held(Box(zero, shape), zero)]
    cuts = [
        Cut(placement.dim, int(getattr(placement, "split_factor", 1))) if hasattr(placement, "dim") else None
        for placement in tensor.placements
    ]
    return held_boxes(shape, tuple(mesh.shape), tuple(coordinate), cuts)


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.shape))


def _minus(a: Ints, b: Ints) -> Ints:
    return tuple(x - y for x, y in zip(a, b, strict=True))
