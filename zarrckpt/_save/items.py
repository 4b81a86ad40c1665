"""What one rank holds of the tensors that it writes or sends: cut, and copied out of wherever it is."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch

from zarrckpt._errors import CheckpointError, UnsupportedValueError
from zarrckpt._format.chunk_layout import RawArray
from zarrckpt._format.grid import Box
from zarrckpt._plan.rank_plan import RankPlan
from zarrckpt._state.tensors import memory_fault, plain_tensor, raw_tensor, torch_dtype


class Source(Protocol):
    """Where a rank's tensors and values come from: its state, or a planner of DCP."""

    @property
    def own_memory(self) -> bool:
        """Whether a tensor stays where it is for as long as the source does: parts of it may be views."""

    def tensor(self, fqn: str, box: Box) -> Any:
        """The memory of a box of an array; without the first dimension, where it is one of a stack."""

    def value(self, fqn: str) -> Any:
        """A non-tensor entry."""


class Items:
    """The tensors of one rank's items, by their position in its plan. Used by many threads."""

    def __init__(self, plan: RankPlan, source: Source) -> None:
        self._items = plan.items
        self._arrays = plan.arrays
        self._source = source
        self._last: tuple[int, torch.Tensor | None] = (-1, None)
        self._in_memory: set[int] = set()
        """Items whose tensors are in CPU memory: their parts are views."""
        self._raw: dict[int, RawArray] = {}
        """The raw elements of items that lie in the state's own memory. Numpy cuts them: each call to torch releases
        the interpreter's lock, and would then wait for it behind other threads."""

    def prepare(self) -> set[torch.device]:
        """Compare every tensor with what was planned; return their devices. Call it once, before the methods below.

        Raises CheckpointError naming the fqn; UnsupportedValueError for a tensor without plain memory.
        """
        devices = set()
        for place, (fqn, box) in enumerate(self._items):
            tensor = self._resolve(place)
            if (fault := memory_fault(tensor)) is not None:
                raise UnsupportedValueError(f"{fqn!r} {fault}")
            self._expect(fqn, box, tensor)
            devices.add(tensor.device)
            if tensor.device.type == "cpu":
                self._in_memory.add(place)
                if self._source.own_memory and not (tensor.is_conj() or tensor.is_neg()):
                    raw = raw_tensor(fqn, tensor)
                    self._raw[place] = raw[None] if self._is_stacked(place, tensor) else raw
        return devices

    def _expect(self, fqn: str, box: Box, tensor: torch.Tensor) -> None:
        """What is written must be what was planned, or it would fill the wrong region, or be read as other numbers."""
        dtype = torch_dtype(self._arrays[fqn])
        if tuple(tensor.shape) not in (box.shape, box.shape[1:]) or tensor.dtype != dtype:
            raise CheckpointError(
                f"{fqn!r}: this rank planned a piece of shape {box.shape} and {dtype} at {box.offset}, but its "
                f"tensor has shape {tuple(tensor.shape)} and {tensor.dtype}; was the state changed during the save?"
            )

    def nbytes(self, place: int, box: Box) -> int:
        """The size of a part of an item."""
        return box.size * self._arrays[self._items[place][0]].dtype.itemsize

    def view(self, place: int, box: Box) -> RawArray | None:
        """A part of an item as raw elements: a view of its own memory, None where it is on another device."""
        if place not in self._in_memory:
            return None
        if (raw := self._raw.get(place)) is not None:
            part: RawArray = raw[box.region(self._items[place][1].offset)]
            return part
        return raw_tensor(self._items[place][0], self._part(place, box))

    def copy(self, place: int, box: Box, out: RawArray) -> None:
        """Copy a part of an item, as raw elements, to memory of its shape; directly, where it is on another device."""
        if (view := self.view(place, box)) is not None:
            out[...] = view
            return
        part = self._part(place, box)
        if out.flags.c_contiguous:
            host = torch.from_numpy(out.reshape(-1).view(np.uint8)).view(part.dtype).reshape(part.shape)
            host.copy_(part.resolve_conj().resolve_neg())
        else:
            out[...] = raw_tensor(self._items[place][0], part)

    def _part(self, place: int, box: Box) -> torch.Tensor:
        tensor = self._resolve(place)
        tensor = tensor[None] if self._is_stacked(place, tensor) else tensor
        return tensor[box.slices(self._items[place][1].offset)]

    def _is_stacked(self, place: int, tensor: torch.Tensor) -> bool:
        """Whether an item's tensor is one of several along the first axis of its array."""
        return tensor.ndim < len(self._items[place][1].shape)

    def _resolve(self, place: int) -> torch.Tensor:
        """An item's tensor. The last one is kept, since a planner may make it anew, for each of an item's chunks."""
        last, kept = self._last
        if last == place and kept is not None:
            return kept
        fqn, box = self._items[place]
        tensor = self._source.tensor(fqn, box)
        if not isinstance(tensor, torch.Tensor):
            raise CheckpointError(f"{fqn!r} was planned as a tensor, but is a {type(tensor).__name__}")
        tensor = plain_tensor(tensor)
        self._last = (place, tensor)
        return tensor
