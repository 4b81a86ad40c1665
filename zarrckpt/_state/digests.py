"""Short digests of the contents that each rank is about to save, to check that ranks agree.

Entries that several ranks hold are saved once. The coordinator compares the digests and reports entries that differ.
"""

from __future__ import annotations

import hashlib
import io
import re
from typing import Any

import numpy as np
import torch

from zarrckpt._format import json_values
from zarrckpt._format.crc32c import crc32c
from zarrckpt._format.values import EncodedValue
from zarrckpt._state.tensors import plain_tensor, raw_tensor

_WHOLE_BYTES = 64 << 10
"""Tensors up to this size, such as RNG states, are digested as a whole, larger tensors by a sample."""

_SAMPLE = 512

_PARAMETER_NAMES = re.compile(r"(^|\.)param_groups\.\d+\.params$")
"""Lists of parameter names in an optimizer's groups. ``_plan.group_numbers`` compares them."""


def is_parameter_list(fqn: str) -> bool:
    """Whether an entry is the list of parameters of an optimizer's group."""
    return _PARAMETER_NAMES.search(fqn) is not None


def is_compared(fqn: str, value: Any) -> bool:
    """Whether a value has a digest, so that ranks can compare it."""
    return not is_parameter_list(fqn) and _value_bytes(value)[0] is not None


def content_digest(fqn: str, value: Any) -> bytes | None:
    """Return a digest of 8 bytes of an entry, or None if the entry is not compared.

    Copies at most 64 KiB of a tensor to the host.
    """
    if is_parameter_list(fqn):
        return None
    if isinstance(value, torch.Tensor):
        form: object = (str(value.dtype), tuple(value.shape))
        content = raw_tensor(fqn, _sample(plain_tensor(value))).tobytes()
    else:
        # Equal values have equal JSON, but their pickles can differ.
        form, content = _value_bytes(value)
        if form is None:
            return None
    return hashlib.blake2b(repr(form).encode() + b"\0" + content, digest_size=8).digest()


def is_digested_whole(tensor: torch.Tensor) -> bool:
    """Whether a digest or checksum of a tensor is that of all its elements, not of a sample."""
    return tensor.numel() * tensor.element_size() <= _WHOLE_BYTES


def tensor_checksum(fqn: str, tensor: torch.Tensor, *, full: bool) -> int:
    """Return a checksum of a tensor's elements: all of them if ``full`` or up to 64 KiB, otherwise a sample.

    It is faster than :func:`content_digest` and serves comparisons within one process. ``full`` copies the tensor to
    the host, and once more if it is not contiguous.
    """
    tensor = plain_tensor(tensor)
    if not full and not is_digested_whole(tensor):
        # An odd step does not stay in one column of a matrix.
        step = tensor.numel() // _SAMPLE | 1
        tensor = tensor.view(-1)[::step] if tensor.is_contiguous() else _sample(tensor)
    content = np.ascontiguousarray(raw_tensor(fqn, tensor))
    return crc32c(content.reshape(-1).view(np.uint8))


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """Return a small tensor itself, and evenly spaced elements of a larger one.

    A sample finds tensors that drifted apart, but not a single flipped bit.
    """
    if is_digested_whole(tensor):
        return tensor
    places = torch.linspace(0, tensor.numel() - 1, _SAMPLE, dtype=torch.float64, device=tensor.device).long()
    # Index by coordinates, because flattening copies a tensor that is not contiguous.
    return tensor[torch.unravel_index(places, tensor.shape)]


def _value_bytes(value: Any) -> tuple[str | None, bytes]:
    if isinstance(value, EncodedValue) and value.blob is not None:
        return (value.blob.kind, value.blob.payload) if value.blob.encoding == "raw" else (None, b"")
    encoded = value.json if isinstance(value, EncodedValue) else json_values.encode_json(value)
    if encoded is not json_values.NOT_JSON:
        return "json", json_values.dumps({"value": encoded})
    if isinstance(value, bytes | bytearray):
        return type(value).__name__, bytes(value)
    if isinstance(value, io.BytesIO) and not value.closed:
        return "BytesIO", value.getvalue()
    return None, b""
