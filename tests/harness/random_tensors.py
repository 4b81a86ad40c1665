"""Tensors of any dtype with random bits."""

from __future__ import annotations

import math

import torch

from harness.internals import DTYPES


def random_tensor(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Return random bits, which include infinities, subnormals and NaNs of all kinds."""
    count, size = math.prod(shape), DTYPES[name].itemsize
    if name == "bool":
        return torch.randint(0, 2, shape).bool()
    raw = torch.randint(0, 256, (count * size,), dtype=torch.uint8)
    if name.startswith("complex"):
        part = torch.float32 if size == 8 else torch.float64
        return torch.view_as_complex(raw.view(part).reshape(count, 2)).reshape(shape)
    return raw.view(getattr(torch, name)).reshape(shape)
