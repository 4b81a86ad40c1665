"""Tensors as raw memory: the only place where torch's bits become numpy's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from zarrckpt._errors import UnsupportedValueError
from zarrckpt._format.chunk_layout import RawArray, raw_dtype
from zarrckpt._format.documents import ArrayNode
from zarrckpt._jobs import Bytes, BytesBudget
from zarrckpt._ranks.torch_private import INNER_TENSORS, detached_without_subclass, is_in_transform

OVERLAPS = "is an expanded view, or another one whose elements share memory: load into a clone() of it"

META = "is on the meta device: it has no data; materialise it (to_empty) first"

LAZY = "is a parameter of a lazy module, which has no shape before its first forward pass: make one"

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def raw_view(tensor: torch.Tensor) -> RawArray:
    """A CPU tensor's memory as raw elements, any strides: writing to the array writes to the tensor."""
    raw = raw_dtype(tensor.element_size())
    if tensor.dtype.is_complex:
        return tensor.numpy().view(raw)
    # By way of an integer type, since numpy has no bfloat16 or float8.
    view: np.ndarray[Any, Any] = tensor.view(_INTEGERS[tensor.element_size()]).numpy().view(raw)
    return view


def raw_tensor(fqn: str, tensor: torch.Tensor) -> RawArray:
    """A tensor's elements as raw bits in CPU memory; a view where that is possible.

    Resolves conjugate and negative views first: their bits are not yet what they show. Raises UnsupportedValueError
    naming the fqn for tensors without plain memory.
    """
    if (fault := memory_fault(tensor)) is not None:
        raise UnsupportedValueError(f"{fqn!r} {fault}")
    try:
        return raw_view(plain_tensor(tensor).resolve_conj().resolve_neg().cpu())
    except (RuntimeError, TypeError, KeyError) as err:
        raise UnsupportedValueError(f"{fqn!r}: a {tensor.dtype} tensor has no plain memory to save: {err}") from err


_TORCH_CLASSES = frozenset({torch.Tensor, torch.nn.Parameter})


def memory_fault(tensor: torch.Tensor) -> str | None:
    """Return the reason why a tensor can neither be saved nor filled, as the end of a sentence; None if it can be.

    Its elements must be in strided memory. A subclass with a ``__torch_dispatch__`` wraps other tensors: what is
    written to it may end in a temporary tensor.
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
            f"is a {kind.__name__}, a wrapper around other tensors: save and load the tensors that it wraps, or a "
            "plain tensor, such as .dequantize() returns"
        )
    if tensor.is_meta:
        return META
    if tensor.is_quantized:
        return f"is a quantized tensor ({tensor.dtype}): use .int_repr() with its scale, or .dequantize()"
    if is_in_transform(tensor):
        return "belongs to a transform of torch.func: save and load outside of it"
    return None


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether a tensor is of a class with a ``__torch_dispatch__``."""
    return type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def plain_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's elements as a detached view of class torch.Tensor; a tensor with a memory fault as it is.

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
    """Raw elements are copied into a tensor that :func:`raw_view` cannot give: one on another device, of another dtype.

    Piece by piece, in whatever thread brings them, so no second tensor of its size is needed.
    """

    def __init__(self, tensor: torch.Tensor, saved: torch.dtype) -> None:
        self._tensor = tensor
        self._saved = saved

    @property
    def dtype(self) -> np.dtype[Any]:
        """The raw type of the elements that are given."""
        return raw_dtype(self._saved.itemsize)

    def __setitem__(self, place: tuple[slice, ...], cells: RawArray, /) -> None:
        """Convert and copy the elements of one part; they are in place on return."""
        plain = np.require(cells, requirements=["C", "A", "W"])
        part = torch.from_numpy(plain.reshape(-1).view(np.uint8)).view(self._saved).reshape(plain.shape)
        # Inference mode belongs to threads, and its tensors change within it only.
        with torch.inference_mode(self._tensor.is_inference()):
            self._tensor[place].copy_(part)


def transfer_memory(limit: int, devices: Iterable[torch.device]) -> BytesBudget:
    """The memory for what goes from or to tensors on some devices: pinned, where a GPU copies.

    Waits for what the calling thread has given GPUs to do: other threads copy on streams of their own.
    """
    gpus = [device for device in devices if device.type == "cuda"]
    for gpu in gpus:
        torch.cuda.current_stream(gpu).synchronize()
    # A sixteenth is for what threads and clients take besides.
    limit -= limit // 16
    return BytesBudget(limit, pinned_bytes) if gpus else BytesBudget(limit)


def pinned_bytes(nbytes: int) -> Bytes:
    """Memory that a GPU copies to and from without the processor's help, about twice as fast as other memory."""
    pinned: Bytes = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True).numpy()
    return pinned


def target_fault(tensor: torch.Tensor) -> str | None:
    """Return the reason why a tensor cannot be filled, as the end of a sentence; None if it can be."""
    return memory_fault(tensor) or (OVERLAPS if _overlaps_itself(plain_tensor(tensor)) else None)


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether several elements of a tensor may share one place in memory, as after ``expand``."""
    if tensor.is_contiguous():
        return False
    reach = 0
    for stride, n in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if n > 1:
            if stride <= reach:
                return True
            reach += stride * (n - 1)
    return False


def torch_dtype(node: ArrayNode) -> torch.dtype:
    """The torch dtype of a stored array."""
    dtype: torch.dtype = getattr(torch, node.dtype.name)
    return dtype
