"""Tensors as raw memory: the only place where torch's bits become numpy's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from zarrckpt._errors import UnsupportedValueError
from zarrckpt._format.chunk_layout import RawArray, raw_dtype
from zarrckpt._format.documents import ArrayNode
from zarrckpt._jobs import Bytes, BytesBudget

OVERLAPS = "is an expanded view, several elements of which share one place in memory: load into a clone() of it"

META = "is on the meta device: it has no data; materialise it (to_empty) first"

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
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) and hasattr(tensor, "__tensor_flatten__"):
        raise UnsupportedValueError(
            f"{fqn!r} is a {type(tensor).__name__}, a wrapper around other tensors: save its parts, or .dequantize() it"
        )
    refuse_meta(fqn, tensor)
    try:
        return raw_view(tensor.detach().resolve_conj().resolve_neg().cpu())
    except (RuntimeError, TypeError, KeyError) as err:
        raise UnsupportedValueError(f"{fqn!r}: a {tensor.dtype} tensor has no plain memory to save: {err}") from err


def refuse_meta(fqn: str, tensor: torch.Tensor) -> None:
    """Raise UnsupportedValueError for a tensor without data."""
    if tensor.is_meta:
        raise UnsupportedValueError(f"{fqn!r} {META}")


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


def overlaps(tensor: torch.Tensor) -> bool:
    """Whether several elements of a tensor are one place in memory, as after ``expand``: it can't be filled."""
    return any(n > 1 and stride == 0 for n, stride in zip(tensor.shape, tensor.stride(), strict=True))


def torch_dtype(node: ArrayNode) -> torch.dtype:
    """The torch dtype of a stored array."""
    dtype: torch.dtype = getattr(torch, node.dtype.name)
    return dtype
