"""Copies of a state in CPU memory, made quickly: training waits for them.

Nothing is planned or checked here. The copy of a state has its containers, and is planned as the state would be;
what cannot be saved stands in it as it is, for the save to refuse.
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from zarrckpt._format.values import EncodedValue
from zarrckpt._jobs import run_jobs
from zarrckpt._state.digests import is_parameter_list
from zarrckpt._state.flatten import OwnRank, entered
from zarrckpt._state.local_boxes import HeldDTensor, HeldParts, HeldPieces, has_box_attributes, held_of
from zarrckpt._state.tensors import memory_fault, plain_tensor
from zarrckpt._state.torch_kinds import is_dtensor, is_sharded_tensor

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
_ATOMS = frozenset({int, float, bool, str, bytes, type(None)})

_MOST_THREADS = 4
"""A few threads of copying are as fast as the memory."""

_BATCH_BYTES = 16 << 20
"""What a thread copies at a time."""

_SHARED_BYTES = 1 << 20
"""From this size on it is worth looking whether a tensor is the same memory as another one, as tied weights are."""


class Stager:
    """Copies states, one after the other. The buffers of a copy are used again by the next one."""

    def __init__(self) -> None:
        self.buffers: dict[str, _Buffer] = {}
        """What the last copy is in, by flat name."""

    def stage(
        self, state: Mapping[Any, Any], *, keep: bool = True, streams: Sequence[torch.cuda.Stream] = ()
    ) -> dict[Any, Any]:
        """A copy of a state of plain containers, tensors and values, valid until the next call.

        Tensors are copied into buffers of their layout, pinned where they come from CUDA; DTensors and other sharded
        tensors become holders of what this rank has of them. Values are encoded as they are saved. Waits for the
        devices. Takes the time of one copy of all bytes, and about 2 us a tensor.

        Args:
            keep: use the buffers again for the next copy. Otherwise they are freed with the returned state.
            streams: those that fill the state, where that is not this thread: the copies come after what they do.
        """
        copies = _Copies(self.buffers)
        self.buffers = {}
        with contextlib.ExitStack() as modes:
            for stream in streams:
                modes.enter_context(torch.cuda.stream(stream))
            # In inference mode the buffers could be filled only in that mode again.
            modes.enter_context(torch.inference_mode(False))
            modes.enter_context(torch.no_grad())
            staged: dict[Any, Any] = copies.of(state, "")
            copies.run(_copy_in_threads)
        if keep:
            self.buffers = copies.buffers
        return staged


_Tensors = list[torch.Tensor]

_Buffer = tuple[tuple[object, ...], torch.Tensor]
"""Shape, strides, dtype and device of what it was made for, and a buffer."""


class _Copies:
    """One staging: takes a state apart, finds a buffer for each tensor, then copies all at once."""

    def __init__(self, kept: dict[str, _Buffer]) -> None:
        self._kept = kept
        self.buffers: dict[str, _Buffer] = {}
        self._shared: dict[object, torch.Tensor] = {}
        self._targets: _Tensors = []
        self._sources: _Tensors = []
        self._from_devices: dict[torch.device, tuple[_Tensors, _Tensors]] = {}

    def of(self, value: Any, name: str) -> Any:
        """What stands for a value in the copy. Its tensors are filled by :meth:`run`."""
        kind = type(value)
        if kind in _PLAIN and not has_box_attributes(value):
            return self._tensor(value, name)
        if kind in _ATOMS:
            return value
        if isinstance(value, Mapping) and (value or not name):
            copied = {key: self.of(item, f"{name}.{key}") for key, item in value.items()}
            return kind(copied) if kind in (OrderedDict, OwnRank) else copied
        if isinstance(value, list) and entered(value):
            return [self.of(item, f"{name}.{place}") for place, item in enumerate(value)]
        if isinstance(value, torch.Tensor) or hasattr(value, "__create_write_items__"):
            return self._other_tensor(value, name)
        if isinstance(value, list) and is_parameter_list(name[1:]):
            return copy.copy(value)  # for the description, which compares the groups of all ranks
        return EncodedValue.of(name[1:], value)

    def _other_tensor(self, tensor: torch.Tensor, name: str) -> Any:
        if is_sharded_tensor(tensor) or hasattr(tensor, "__create_write_items__"):
            return self._sharded(tensor, name)
        if has_box_attributes(tensor):
            copied = self._tensor(tensor, name)
            return tensor if copied is tensor else HeldParts(name[1:], tensor, copied)
        return self._tensor(plain_tensor(tensor), name)

    def _sharded(self, tensor: Any, name: str) -> Any:
        if is_dtensor(tensor) and any(placement.is_partial() for placement in tensor.placements):
            return tensor  # for the save to refuse
        held = held_of(name[1:], tensor)
        if isinstance(held, HeldPieces):
            return held.copied(lambda box, piece: self._tensor(piece, f"{name}@{box.offset}"))
        local = tensor.to_local()
        copied = self.of(local, name)
        return tensor if copied is local else HeldDTensor(name[1:], tensor, copied)

    def _tensor(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """The buffer that a tensor is copied into: one for all names of the same memory."""
        if memory_fault(tensor) is not None:
            return tensor  # for the save to refuse
        form = (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        memory: object = None
        if tensor.nbytes >= _SHARED_BYTES:
            memory = (form, tensor.data_ptr(), tensor.is_conj(), tensor.is_neg())
            if memory in self._shared:
                return self._shared[memory]
        kept = self._kept.pop(name, None)
        if kept is None or kept[0] != form:
            kept = None  # free it before there is another one
            # With the same strides, a copy is one run through memory.
            buffer = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda, requires_grad=False)
            kept = (form, buffer)
        self.buffers[name] = kept
        if memory is not None:
            self._shared[memory] = kept[1]
        targets, sources = (self._targets, self._sources) if tensor.is_cpu else self._on(tensor.device)
        targets.append(kept[1])
        sources.append(tensor)
        return kept[1]

    def _on(self, device: torch.device) -> tuple[_Tensors, _Tensors]:
        """The copies to make from a device."""
        return self._from_devices.setdefault(device, ([], []))

    def run(self, copy_on_cpu: Callable[[_Tensors, _Tensors], None]) -> None:
        """Fill the buffers; they are filled on return."""
        for device, (targets, sources) in self._from_devices.items():
            # Only CUDA's copies are waited for.
            _copy(targets, sources, non_blocking=device.type == "cuda")
        if self._targets:
            copy_on_cpu(self._targets, self._sources)
        for device in self._from_devices:
            if device.type == "cuda":
                # Not the stream: others may have given it more to do.
                torch.cuda.current_stream(device).record_event().synchronize()


def _copy_in_threads(targets: _Tensors, sources: _Tensors) -> None:
    """Copy between CPU tensors, with several threads where that is faster: torch copies without the interpreter."""
    threads = min(_MOST_THREADS, _cpus())
    # Otherwise torch has threads of its own for each copy.
    alone = torch.get_num_threads() == 1
    if not alone or threads == 1 or sum(target.nbytes for target in targets) < 2 * _BATCH_BYTES:
        _copy(targets, sources)
        return
    run_jobs((partial(_copy, *batch) for batch in _batches(targets, sources)), threads)


def _copy(targets: _Tensors, sources: _Tensors, *, non_blocking: bool = False) -> None:
    with torch.no_grad():  # each thread has its own mode
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source, non_blocking=non_blocking)


def _batches(targets: _Tensors, sources: _Tensors) -> Iterator[tuple[_Tensors, _Tensors]]:
    """Copies of about ``_BATCH_BYTES`` each; what is larger and lies in one run of memory is cut."""
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


def streams_in_use() -> list[torch.cuda.Stream]:
    """The streams of the calling thread, of each GPU, where it uses any."""
    if not torch.cuda.is_available():
        return []
    return [torch.cuda.current_stream(device) for device in range(torch.cuda.device_count())]


def _cpus() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
