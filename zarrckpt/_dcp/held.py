"""Sharded tensors as DCP's planners take them: with the hooks that give write items and boxes."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from zarrckpt._format.grid import Box
from zarrckpt._state.local_boxes import HeldTensor


class DcpTensor:
    """Takes a sharded tensor's place in a planner's flat state: DCP asks it for write items and for boxes."""

    def __init__(self, held: HeldTensor) -> None:
        self.held = held

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.held.dtype)
        return [
            WriteItem(
                MetadataIndex(fqn, torch.Size(box.offset)),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk_of(box), properties, torch.Size(self.held.shape)),
            )
            for box in self.held.boxes
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [chunk_of(box) for box in self.held.boxes]


def chunk_of(box: Box) -> ChunkStorageMetadata:
    """A box as DCP knows it."""
    return ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.shape))
