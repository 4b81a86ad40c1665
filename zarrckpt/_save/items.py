"""The parts of tensors that one rank writes or sends, as views or copies in CPU memory."""

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
    """The source of a rank's tensors and values: its state, or a planner of DCP."""

    @property
    def own_memory(self) -> bool:
        """Whether the memory of each tensor stays valid as long as the source, so that views of it may be kept."""

    def tensor(self, fqn: str, box: Box) -> Any:
        """Return the tensor of a box of an array. A tensor of a stack lacks the first dimension."""

    def value(self, fqn: str) -> Any:
        """Return the value of a non-tensor entry."""


class Items:
    """The tensors of one rank's items (boxes of arrays), by their index in ``RankPlan.items``. Many threads use it."""

    def __init__(self, plan: RankPlan, source: Source) -> None:
        self._items = plan.items
        self._arrays = plan.arrays
        self._source = source
        self._last: tuple[int, torch.Tensor | None] = (-1, None)
        self._in_memory: set[int] = set()
        """The items whose tensors are in CPU memory, so that their parts are views."""
        self._raw: dict[int, RawArray] = {}
        """The raw elements of items in the state's memory. They are sliced with numpy, because each torch call
        releases the GIL and then waits until other threads release it."""
        self.shared: dict[int, int] = {}
        """The items whose memory other items have, too (tied weights), and the number of the first of these."""

    def prepare(self) -> set[torch.device]:
        """Compare every tensor with the plan and return the tensors' devices. Call it once, before other methods.

        Raises CheckpointError with the fqn if a tensor differs, and UnsupportedValueError if it has no plain memory.
        """
        devices = set()
        first: dict[object, int] = {}
        for index, (fqn, box) in enumerate(self._items):
            tensor = self._resolve(index)
            if (fault := memory_fault(tensor)) is not None:
                raise UnsupportedValueError(f"{fqn!r} {fault}")
            self._expect(fqn, box, tensor)
            devices.add(tensor.device)
            if self._source.own_memory and tensor.nbytes:
                form = (tensor.shape, tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg())
                other = first.setdefault((tensor.device, tensor.data_ptr(), form), index)
                if other != index:
                    self.shared |= {index: other, other: other}
            if tensor.device.type == "cpu":
                self._in_memory.add(index)
                if self._source.own_memory and not (tensor.is_conj() or tensor.is_neg()):
                    raw = raw_tensor(fqn, tensor)
                    self._raw[index] = raw[None] if self._is_stacked(index, tensor) else raw
        return devices

    def _expect(self, fqn: str, box: Box, tensor: torch.Tensor) -> None:
        """Raise CheckpointError if a tensor's shape or dtype is not the planned one."""
        dtype = torch_dtype(self._arrays[fqn])
        if tuple(tensor.shape) not in (box.shape, box.shape[1:]) or tensor.dtype != dtype:
            raise CheckpointError(
                f"{fqn!r}: this rank planned a piece of shape {box.shape} and {dtype} at {box.offset}, but its "
                f"tensor has shape {tuple(tensor.shape)} and {tensor.dtype}. Do not change the state during the save"
            )

    def name_memory(self, box: Box, index: int | None) -> object:
        """Return a name for the memory of a box of an item, equal for tied items. None if no other item has it."""
        if index is None or index not in self.shared:
            return None
        origin = self._items[index][1].offset
        return self.shared[index], tuple(a - b for a, b in zip(box.offset, origin, strict=True)), box.shape

    def nbytes(self, index: int, box: Box) -> int:
        """Return the size in bytes of a box of an item."""
        return box.size * self._arrays[self._items[index][0]].dtype.itemsize

    def view(self, index: int, box: Box) -> RawArray | None:
        """Return a view of the raw elements of a box of an item, or None if its tensor is not in CPU memory."""
        if index not in self._in_memory:
            return None
        if (raw := self._raw.get(index)) is not None:
            part: RawArray = raw[box.region(self._items[index][1].offset)]
            return part
        return raw_tensor(self._items[index][0], self._part(index, box))

    def copy(self, index: int, box: Box, out: RawArray) -> None:
        """Copy the raw elements of a box of an item to ``out``, which has the shape of the box.

        From a GPU to contiguous memory, this is one direct copy.
        """
        if (view := self.view(index, box)) is not None:
            out[...] = view
            return
        part = self._part(index, box)
        if out.flags.c_contiguous:
            host = torch.from_numpy(out.reshape(-1).view(np.uint8)).view(part.dtype).reshape(part.shape)
            host.copy_(part.resolve_conj().resolve_neg())
        else:
            out[...] = raw_tensor(self._items[index][0], part)

    def _part(self, index: int, box: Box) -> torch.Tensor:
        tensor = self._resolve(index)
        tensor = tensor[None] if self._is_stacked(index, tensor) else tensor
        return tensor[box.slices(self._items[index][1].offset)]

    def _is_stacked(self, index: int, tensor: torch.Tensor) -> bool:
        """Whether an item's tensor is one of several along the first axis of its array."""
        return tensor.ndim < len(self._items[index][1].shape)

    def _resolve(self, index: int) -> torch.Tensor:
        """Return an item's tensor. The last one is kept, because a planner may compute it again on each call."""
        last, kept = self._last
        if last == index and kept is not None:
            return kept
        fqn, box = self._items[index]
        tensor = self._source.tensor(fqn, box)
        if not isinstance(tensor, torch.Tensor):
            raise CheckpointError(
                f"{fqn!r} was planned as a tensor, but is a {type(tensor).__name__}. Do not change the state during "
                "the save"
            )
        tensor = plain_tensor(tensor)
        self._last = (index, tensor)
        return tensor
