"""Comparisons to the last bit: of tensors, and of any values with their types."""

from __future__ import annotations

import io
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def bits(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], bytes]:
    """Return the name of a tensor's dtype, its shape, and its elements in C order."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    raw = (torch.view_as_real(flat) if flat.is_complex() else flat).view(torch.uint8)
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), raw.numpy().tobytes()


def same(one: Any, other: Any) -> bool:
    """Whether type and value are equal at all levels: 1 is not True, -0.0 not 0.0, and a NaN equals itself."""
    if type(one) is not type(other):
        return False
    if isinstance(one, float):
        return struct.pack(">d", one) == struct.pack(">d", other)
    if isinstance(one, complex):
        return same(one.real, other.real) and same(one.imag, other.imag)
    if isinstance(one, Mapping):
        return same(list(one.items()), list(other.items()))
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, set | frozenset):
        left = list(other)
        for item in one:
            match = next((index for index, candidate in enumerate(left) if same(item, candidate)), None)
            if match is None:
                return False
            del left[match]
        return not left
    if isinstance(one, io.BytesIO):
        return bool(one.getvalue() == other.getvalue())
    if isinstance(one, np.ndarray | np.generic):
        return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    if isinstance(one, torch.Tensor):
        return bits(one) == bits(other)
    return bool(one == other)
