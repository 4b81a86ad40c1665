"""What one rank holds of the tensors that are saved: cut, and copied out of wherever it is."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem, WriteItemType

from zarrckpt._chunk_layout import RawArray
from zarrckpt._errors import CheckpointError
from zarrckpt._grid import Box
from zarrckpt._plan import RankPlan, expect_piece
from zarrckpt._planner import ZarrSavePlanner, resolves_as_dcp
from zarrckpt._tensors import raw_tensor, refuse_meta, torch_dtype


class Pieces:
    """The tensors of one rank's items, by their position in its plan. Used by many threads."""

    def __init__(self, plan: RankPlan, items: Sequence[WriteItem], planner: SavePlanner) -> None:
        self._plan = plan
        self._items = items
        self._planner = planner
        self._last: tuple[int, torch.Tensor | None] = (-1, None)
        self._in_memory: set[int] = set()
        """Items whose tensors are in CPU memory: their parts are views."""
        self._raw: dict[int, RawArray] = {}
        """The raw elements of items that lie in the state's own memory. Numpy cuts them; each call to torch gives the
        interpreter's lock away, for which many threads wait."""

    def check(self) -> set[torch.device]:
        """Compare every tensor with what was planned; return where they are.

        Raises CheckpointError naming the fqn; UnsupportedValueError for a meta tensor, which DCP's planners let pass.
        """
        devices, plain = set(), _gives_the_states_own(self._planner)
        for place, item in enumerate(self._items):
            if item.type != WriteItemType.BYTE_IO:
                tensor = self._resolve(place)
                refuse_meta(item.index.fqn, tensor)
                expect_piece(item, tensor, torch_dtype(self._plan.item_node(place)))
                devices.add(tensor.device)
                if tensor.device.type == "cpu":
                    self._in_memory.add(place)
                    if plain and not (tensor.is_conj() or tensor.is_neg()):
                        raw = raw_tensor(item.index.fqn, tensor)
                        self._raw[place] = raw[None] if self._is_stacked(place, tensor) else raw
        return devices

    def nbytes(self, place: int, box: Box) -> int:
        """The size of a part of an item."""
        return box.size * self._plan.item_node(place).dtype.itemsize

    def view(self, place: int, box: Box) -> RawArray | None:
        """A part of an item as raw elements: a view of its own memory, None where it is on another device."""
        if place not in self._in_memory:
            return None
        if (raw := self._raw.get(place)) is not None:
            part: RawArray = raw[box.region(self._plan.item_box(place).offset)]
            return part
        return raw_tensor(self._items[place].index.fqn, self._part(place, box))

    def copy(self, place: int, box: Box, out: RawArray) -> None:
        """Copy a part of an item to memory of its shape, raw elements; from another device without a detour."""
        if (view := self.view(place, box)) is not None:
            out[...] = view
            return
        part = self._part(place, box)
        if out.flags.c_contiguous:
            host = torch.from_numpy(out.reshape(-1).view(np.uint8)).view(part.dtype).reshape(part.shape)
            host.copy_(part.resolve_conj().resolve_neg())
        else:
            out[...] = raw_tensor(self._items[place].index.fqn, part)

    def _part(self, place: int, box: Box) -> torch.Tensor:
        tensor = self._resolve(place)
        tensor = tensor[None] if self._is_stacked(place, tensor) else tensor
        return tensor[box.slices(self._plan.item_box(place).offset)]

    def _is_stacked(self, place: int, tensor: torch.Tensor) -> bool:
        """Whether an item's tensor is one of several along the first axis of its array."""
        return tensor.ndim < len(self._plan.item_box(place).shape)

    def _resolve(self, place: int) -> torch.Tensor:
        """An item's tensor. The last one is kept, since a planner may make it anew, for each of an item's chunks."""
        last, kept = self._last
        if last == place and kept is not None:
            return kept
        item = self._items[place]
        tensor = self._planner.resolve_data(item)
        if not isinstance(tensor, torch.Tensor):
            raise CheckpointError(f"{item.index.fqn!r} was planned as a tensor, but is a {type(tensor).__name__}")
        tensor = tensor.detach()
        self._last = (place, tensor)
        return tensor


def _gives_the_states_own(planner: SavePlanner) -> bool:
    """Whether a planner gives the tensors of the state, not what it makes of them, which nobody else keeps."""
    found = (DefaultSavePlanner.lookup_object, ZarrSavePlanner.lookup_object)
    return resolves_as_dcp(planner) and type(planner).lookup_object in found
