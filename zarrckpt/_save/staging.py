"""Fast copies of a state in CPU memory. Training waits until they are made.

Nothing is planned or checked here. The copy has the same containers as the state, so its plan is the state's plan.
Entries that cannot be saved are kept without a copy, and the save raises the error.
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from zarrckpt._format.module_versions import versions_of
from zarrckpt._format.values import EncodedValue
from zarrckpt._jobs import run_jobs
from zarrckpt._save.reuse import MIN_SHARED_BYTES
from zarrckpt._state.accelerators import allocate_pinned, is_accelerator, wait_for_streams
from zarrckpt._state.digests import is_parameter_list
from zarrckpt._state.flatten import OwnRank, is_flattened, new_dict
from zarrckpt._state.local_boxes import AttributeBoxes, DTensorBoxes, SeparateBoxes, has_box_attributes, to_local_boxes
from zarrckpt._state.tensors import memory_fault, plain_tensor
from zarrckpt._state.torch_kinds import is_dtensor, is_sharded_tensor

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
_ATOMS = frozenset({int, float, bool, str, bytes, type(None)})

_MAX_COPY_THREADS = 4
"""The number of copying threads that saturate the memory bandwidth."""

_BATCH_BYTES = 16 << 20
"""The number of bytes that a thread copies per job."""

_SHARED_BYTES = MIN_SHARED_BYTES
"""Tensors of at least this size are checked for shared memory (tied weights). Smaller ones are copied once per name."""


class Stager:
    """A copier of states that reuses the buffers of the last copy for the next one."""

    def __init__(self) -> None:
        self.buffers: dict[str, _Buffer] = {}
        """The buffers of the last copy, by flat name."""
        self.copied_bytes = 0
        """The number of bytes in the last copy."""

    def stage(
        self, state: Mapping[Any, Any], *, keep: bool = True, streams: Sequence[torch.Stream] = ()
    ) -> dict[Any, Any]:
        """Return a copy of a state of plain containers, tensors and values. It is valid until the next call.

        Tensors are copied into buffers with the same strides, in pinned memory for tensors of an accelerator.
        DTensors and other sharded tensors become objects that hold this rank's parts. Other values are encoded for the
        save. Waits until the devices have copied. Takes the time of one copy of all bytes, plus about 2 us per tensor.

        Args:
            keep: reuse the buffers for the next copy. Otherwise they are freed with the returned state.
            streams: the streams that write the state, if another thread's. The copies are queued on these streams.
        """
        copies = _Copies(self.buffers)
        self.buffers = {}
        with contextlib.ExitStack() as modes:
            for stream in streams:
                # Entering the stream of a device that this process does not use would allocate memory on it.
                if stream != torch.accelerator.current_stream(stream.device_index):
                    modes.enter_context(stream)
            # Buffers made in inference mode can be written only in inference mode.
            modes.enter_context(torch.inference_mode(False))
            modes.enter_context(torch.no_grad())
            staged: dict[Any, Any] = copies.of(state, "")
            self.copied_bytes = copies.fill()
        if keep:
            self.buffers = copies.buffers
        return staged


_Tensors = list[torch.Tensor]

_Buffer = tuple[tuple[object, ...], torch.Tensor]
"""The shape, strides, dtype and device of the tensor that the buffer was made for, and the buffer."""


class _Copies:
    """One copy of a state: first choose a buffer for each tensor, then copy all tensors."""

    def __init__(self, kept: dict[str, _Buffer]) -> None:
        self._kept = kept
        self.buffers: dict[str, _Buffer] = {}
        self._shared: dict[object, torch.Tensor] = {}
        self._copies: dict[torch.device, tuple[_Tensors, _Tensors]] = {}
        """The buffers to fill and their sources, by the device of the sources."""

    def of(self, value: Any, name: str) -> Any:
        """Return the copy of a value. :meth:`fill` fills its tensors."""
        kind = type(value)
        if kind in _PLAIN and not has_box_attributes(value):
            return self._tensor(value, name)
        if kind in _ATOMS:
            return value
        if isinstance(value, Mapping) and (value or not name):
            copied = {key: self.of(item, f"{name}.{key}") for key, item in value.items()}
            versions = versions_of(value)
            return OwnRank(copied) if kind is OwnRank else new_dict(copied, kind is OrderedDict, versions)
        if isinstance(value, list) and is_flattened(value):
            return [self.of(item, f"{name}.{index}") for index, item in enumerate(value)]
        if isinstance(value, torch.Tensor) or hasattr(value, "__create_write_items__"):
            return self._other_tensor(value, name)
        if isinstance(value, list) and is_parameter_list(name[1:]):
            return copy.copy(value)  # The description compares the parameter groups of all ranks.
        return EncodedValue.of(name[1:], value)

    def _other_tensor(self, tensor: torch.Tensor, name: str) -> Any:
        if is_sharded_tensor(tensor) or hasattr(tensor, "__create_write_items__"):
            return self._sharded(tensor, name)
        if has_box_attributes(tensor):
            copied = self._tensor(tensor, name)
            return tensor if copied is tensor else AttributeBoxes(name[1:], tensor, copied)
        return self._tensor(plain_tensor(tensor), name)

    def _sharded(self, tensor: Any, name: str) -> Any:
        if is_dtensor(tensor) and any(placement.is_partial() for placement in tensor.placements):
            return tensor  # The save raises the error.
        boxes = to_local_boxes(name[1:], tensor)
        if isinstance(boxes, SeparateBoxes):
            return boxes.copied(lambda box, tensor: self._tensor(tensor, f"{name}@{box.offset}"))
        local = tensor.to_local()
        copied = self.of(local, name)
        return tensor if copied is local else DTensorBoxes(name[1:], tensor, copied)

    def _tensor(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """Return the buffer for a tensor: a single one for all names of the same memory."""
        if memory_fault(tensor) is not None:
            return tensor  # The save raises the error.
        form = (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        memory: object = None
        if tensor.nbytes >= _SHARED_BYTES:
            memory = (form, tensor.data_ptr(), tensor.is_conj(), tensor.is_neg())
            if memory in self._shared:
                return self._shared[memory]
        kept = self._kept.pop(name, None)
        if kept is None or kept[0] != form:
            kept = None  # Free the old buffer before the new one is allocated.
            # With equal strides, the copy is one pass over contiguous memory.
            allocate = partial(torch.empty_like, tensor, device="cpu", requires_grad=False)
            kept = (form, allocate_pinned(allocate) if is_accelerator(tensor.device) else allocate())
        self.buffers[name] = kept
        if memory is not None:
            self._shared[memory] = kept[1]
        targets, sources = self._copies.setdefault(tensor.device, ([], []))
        targets.append(kept[1])
        sources.append(tensor)
        return kept[1]

    def fill(self) -> int:
        """Fill the buffers, wait until they are filled, and return their number of bytes."""
        nbytes = sum(target.nbytes for targets, _ in self._copies.values() for target in targets)
        on_cpu = self._copies.pop(torch.device("cpu"), ([], []))
        for targets, sources in self._copies.values():
            _copy(targets, sources)
        _copy_in_threads(*on_cpu)
        wait_for_streams(self._copies)
        return nbytes


def _copy_in_threads(targets: _Tensors, sources: _Tensors) -> None:
    """Copy between CPU tensors, with several threads if that is faster. Torch releases the GIL during a copy."""
    threads = min(_MAX_COPY_THREADS, _cpus())
    # With more torch threads, torch itself splits each copy over threads.
    alone = torch.get_num_threads() == 1
    if not alone or threads == 1 or sum(target.nbytes for target in targets) < 2 * _BATCH_BYTES:
        _copy(targets, sources)
        return
    run_jobs((partial(_copy, *batch) for batch in _batches(targets, sources)), threads)


def _copy(targets: _Tensors, sources: _Tensors) -> None:
    """Copy tensors. Copies from an accelerator to pinned memory may end later."""
    with torch.no_grad():  # The mode is per thread.
        for target, source in zip(targets, sources, strict=True):
            # For other targets, torch may first copy to a temporary tensor, and read it before that copy has ended.
            direct = not source.is_cpu and target.is_contiguous() and target.is_pinned()
            target.copy_(source, non_blocking=direct)


def _batches(targets: _Tensors, sources: _Tensors) -> Iterator[tuple[_Tensors, _Tensors]]:
    """Yield batches of copies of about ``_BATCH_BYTES`` each. Larger contiguous tensors are cut."""
    to: _Tensors = []
    of: _Tensors = []
    size = 0
    for target, source in zip(targets, sources, strict=True):
        if target.nbytes > 2 * _BATCH_BYTES and target.is_contiguous() and source.is_contiguous():
            flat, other, step = target.view(-1), source.view(-1), _BATCH_BYTES // target.element_size()
            yield from (([flat[at : at + step]], [other[at : at + step]]) for at in range(0, len(flat), step))
            continue
        to.append(target)
        of.append(source)
        size += target.nbytes
        if size >= _BATCH_BYTES:
            yield to, of
            to, of, size = [], [], 0
    if to:
        yield to, of


def _cpus() -> int:
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
