"""Tensors as raw memory. Only this module converts torch's bits to numpy's."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from zarrckpt._errors import UnsupportedValueError
from zarrckpt._format.chunk_layout import RawArray, raw_dtype
from zarrckpt._format.documents import ArrayNode
from zarrckpt._format.dtypes import MAX_E4M3FN
from zarrckpt._format.grid import Ints
from zarrckpt._jobs import Bytes, BytesBudget
from zarrckpt._ranks.torch_private import INNER_TENSORS, detached_without_subclass, is_in_transform
from zarrckpt._state.accelerators import allocate_pinned, is_accelerator, wait_for_streams

OVERLAPS = "is an expanded view or another view with elements that share memory: load into a clone() of it"

META = (
    "is on the meta device, so it has no data: allocate its module with to_empty(), and compute the buffers with "
    "persistent=False, which to_empty() leaves uninitialized"
)

LAZY = "is a parameter of a lazy module without a shape: run a forward pass first"

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def raw_view(tensor: torch.Tensor) -> RawArray:
    """Return a view of a CPU tensor's memory as raw elements, with any strides. Writes go to the tensor."""
    raw = raw_dtype(tensor.element_size())
    if tensor.dtype.is_complex:
        return tensor.numpy().view(raw)
    # Through an integer type, because numpy has no bfloat16 or float8.
    view: np.ndarray[Any, Any] = tensor.view(_INTEGERS[tensor.element_size()]).numpy().view(raw)
    return view


def raw_tensor(fqn: str, tensor: torch.Tensor) -> RawArray:
    """Return a tensor's elements as raw bits in CPU memory, as a view if possible.

    Conjugate and negative views are resolved first, because their bits differ from their values. Raises
    UnsupportedValueError with the fqn for tensors without plain memory.
    """
    if (fault := memory_fault(tensor)) is not None:
        raise UnsupportedValueError(f"{fqn!r} {fault}")
    try:
        return raw_view(plain_tensor(tensor).resolve_conj().resolve_neg().cpu())
    except (RuntimeError, TypeError, KeyError) as err:
        raise UnsupportedValueError(f"{fqn!r}: a {tensor.dtype} tensor has no plain memory to save: {err}") from err


_TORCH_CLASSES = frozenset({torch.Tensor, torch.nn.Parameter})


def memory_fault(tensor: torch.Tensor) -> str | None:
    """Return the reason that a tensor can neither be saved nor filled, as the end of a sentence, or None.

    Its elements must be in strided memory. A subclass with ``__torch_dispatch__`` wraps other tensors, so writes to it
    can be lost in a temporary tensor.
    """
    kind = type(tensor)
    if kind not in _TORCH_CLASSES:
        if _inner_name(kind) is not None:
            return memory_fault(getattr(tensor, _inner_name(kind) or ""))
        if is_lazy(tensor):
            return LAZY
    if tensor.layout != torch.strided or tensor.is_nested:
        found = "is a nested tensor" if tensor.is_nested else f"has layout {tensor.layout}"
        return f"{found}, expected a strided tensor: use .to_dense(), or its parts"
    if is_wrapper(tensor):
        return (
            f"is a {kind.__name__}, a wrapper around other tensors: save and load the wrapped tensors, or a plain "
            "tensor such as the result of .dequantize()"
        )
    if tensor.is_meta:
        return META
    if tensor.is_quantized:
        return f"is a quantized tensor ({tensor.dtype}): use .int_repr() with its scale, or .dequantize()"
    if is_in_transform(tensor):
        return "belongs to a transform of torch.func: save and load outside the transform"
    return None


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether the class of a tensor overrides ``__torch_dispatch__``."""
    return type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def plain_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as a detached view of class torch.Tensor. A tensor with a memory fault is returned unchanged.

    Waits for the collective that fills an AsyncCollectiveTensor.
    """
    kind = type(tensor)
    if kind in _TORCH_CLASSES:
        return tensor.detach()
    if (name := _inner_name(kind)) is not None:
        if name == "elem":
            tensor.wait()  # type: ignore[attr-defined]
        return plain_tensor(getattr(tensor, name))
    if memory_fault(tensor) is not None:
        return tensor
    plain: torch.Tensor = detached_without_subclass(tensor)
    return plain


def _inner_name(kind: type) -> str | None:
    return INNER_TENSORS.get((kind.__module__, kind.__name__))


def can_view(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether :func:`raw_view` of a tensor can be filled with elements of ``dtype``."""
    return (
        tensor.dtype == dtype
        and tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and not (tensor.is_conj() or tensor.is_neg())
    )


class CopiedTensor:
    """Copies raw elements into a tensor without a :func:`raw_view`: on another device, or with another dtype.

    Threads copy one part after another, so no second tensor of the same size is needed.
    """

    def __init__(self, tensor: torch.Tensor, saved: torch.dtype) -> None:
        self._tensor = tensor
        self._saved = saved

    @property
    def dtype(self) -> np.dtype[Any]:
        """The raw numpy type of the elements to copy."""
        return raw_dtype(self._saved.itemsize)

    def __setitem__(self, region: tuple[slice, ...], elements: RawArray, /) -> None:
        """Convert and copy the elements of one part. The copy is complete on return."""
        plain = np.require(elements, requirements=["C", "A", "W"])
        part = torch.from_numpy(plain.reshape(-1).view(np.uint8)).view(self._saved).reshape(plain.shape)
        if self._tensor.dtype == torch.float8_e4m3fn and not part.is_complex():
            # As torch 2.13 does on CPUs: the result must not depend on the version or the device.
            part = part.float().clamp(-MAX_E4M3FN, MAX_E4M3FN)
        # Inference mode is set per thread, and inference tensors can only be changed within it.
        with torch.inference_mode(self._tensor.is_inference()):
            self._tensor[region].copy_(part)


def transfer_memory(limit: int, devices: Iterable[torch.device]) -> BytesBudget:
    """Return the memory budget for copies from and to tensors on these devices. It is pinned for accelerators.

    Waits for the calling thread's work on these devices, because other threads copy on other streams.
    """
    accelerators = [device for device in devices if is_accelerator(device)]
    wait_for_streams(accelerators)
    # 1/16 remains for other memory of threads and clients.
    limit -= limit // 16
    return BytesBudget(limit, pinned_bytes) if accelerators else BytesBudget(limit)


def pinned_bytes(nbytes: int) -> Bytes:
    """Return pinned memory if possible. An accelerator accesses it directly and copies about twice as fast."""
    pinned: Bytes = allocate_pinned(partial(torch.empty, nbytes, dtype=torch.uint8, device="cpu")).numpy()
    return pinned


def target_fault(tensor: torch.Tensor) -> str | None:
    """Return the reason that a tensor cannot be filled, as the end of a sentence, or None."""
    return memory_fault(tensor) or (OVERLAPS if _overlaps_itself(plain_tensor(tensor)) else None)


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether elements of a tensor can share memory, for example after ``expand``."""
    if tensor.is_contiguous():
        return False
    reach = 0
    for stride, n in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if n > 1:
            if stride <= reach:
                return True
            reach += stride * (n - 1)
    return False


def stride_order(tensor: torch.Tensor) -> Ints:
    """Return the dimensions of a tensor by descending stride, or () for C order and for expanded tensors."""
    return _stride_order(tuple(tensor.shape), tensor.stride())


@functools.lru_cache(1024)
def _stride_order(shape: Ints, strides: Ints) -> Ints:
    in_c_order = tuple(range(len(shape)))
    # A dimension of length 1 follows the dimension with the same stride, because it does not change the next stride.
    order = tuple(sorted(in_c_order, key=lambda axis: (-strides[axis], -shape[axis])))
    return () if order == in_c_order or 0 in strides else order


def new_tensor(shape: Ints, order: Ints, dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
    """Return a new tensor without values. Its strides descend in an order of dimensions; () is C order."""
    return permute_back(torch.empty(permute_shape(shape, order), dtype=dtype, device=device), order)


def new_tensor_like(tensor: torch.Tensor, order: Ints, dtype: torch.dtype) -> torch.Tensor:
    """Return a new tensor as :func:`new_tensor` does, on the device and with the sharding of another one."""
    like = tensor.permute(order) if order else tensor
    return permute_back(torch.empty_like(like, dtype=dtype, memory_format=torch.contiguous_format), order)


def permute_shape(shape: Ints, order: Ints) -> Ints:
    """Return the lengths of dimensions in the order of their strides."""
    return tuple(shape[axis] for axis in order) if order else shape


def permute_back(tensor: torch.Tensor, order: Ints) -> torch.Tensor:
    """Return a view of a tensor, whose dimensions are in the order of their strides, with the original order."""
    return tensor.permute([order.index(axis) for axis in range(tensor.ndim)]) if order else tensor


def torch_dtype(node: ArrayNode) -> torch.dtype:
    """Return the torch dtype of a stored array."""
    dtype: torch.dtype = getattr(torch, node.dtype.name)
    return dtype
