"""Short digests of what each rank is about to save under a name, to see whether ranks agree on it.

DCP keeps one of several ranks' values, plain tensors and replicas, in silence. Digests travel with the plans, so that
the coordinator can name what differs.
"""

from __future__ import annotations

import functools
import hashlib
import io
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from zarrckpt import _json_values, _values
from zarrckpt._tensors import raw_tensor

NO_DIGEST = 0

_WHOLE_BYTES = 64 << 10
"""Tensors up to this size (RNG states among them) are digested whole, larger ones by a sample."""

_SAMPLE = 512

_PARAMETER_NAMES = re.compile(r"(^|\.)param_groups\.\d+\.params$")
"""What an optimizer's group calls its parameters: the ranks of a pipeline differ, and a load does not mind."""


def digests_of(plan: SavePlan, lookup: Callable[[MetadataIndex], Any]) -> dict[MetadataIndex, bytes]:
    """A digest of every item of a plan that has one. Copies at most 64 KiB of each tensor to the host."""
    compared = (item.index for item in plan.items if not _PARAMETER_NAMES.search(item.index.fqn))
    found = {index: _digest(index.fqn, lookup(index)) for index in compared}
    return {index: digest for index, digest in found.items() if digest is not None}


def as_numbers(digests: Mapping[MetadataIndex, bytes], items: Iterable[WriteItem]) -> NDArray[np.uint64]:
    """The digest of each item as a number; NO_DIGEST where it has none."""
    return np.array([_number(digests.get(item.index)) for item in items], np.uint64)


def _number(digest: bytes | None) -> int:
    return NO_DIGEST if digest is None else int.from_bytes(digest, "little") or 1


@functools.cache
def empty_dicts() -> NDArray[np.uint64]:
    """The numbers of the digests of empty dicts."""
    return np.array([_number(_digest("", {})), _number(_digest("", OrderedDict()))], np.uint64)


def _digest(fqn: str, value: Any) -> bytes | None:
    if isinstance(value, torch.Tensor):
        form: object = (str(value.dtype), tuple(value.shape))
        content = raw_tensor(fqn, _sample(value.detach())).tobytes()
    else:
        # Equal values have equal JSON, while their pickles may differ.
        form, content = _value_bytes(value)
        if form is None:
            return None
    return hashlib.blake2b(repr(form).encode() + b"\0" + content, digest_size=8).digest()


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """All of a small tensor, else elements spread over it: enough for tensors that drifted, not for one flipped bit."""
    if tensor.numel() * tensor.element_size() <= _WHOLE_BYTES:
        return tensor
    places = torch.linspace(0, tensor.numel() - 1, _SAMPLE, dtype=torch.float64, device=tensor.device).long()
    # By coordinates: flattening would copy a tensor that is not contiguous.
    return tensor[torch.unravel_index(places, tensor.shape)]


def _value_bytes(value: Any) -> tuple[str | None, bytes]:
    encoded = _values.encode_json(value)
    if encoded is not _values.NOT_JSON:
        return "json", _json_values.dumps({"value": encoded})
    if isinstance(value, bytes | bytearray):
        return type(value).__name__, bytes(value)
    if isinstance(value, io.BytesIO):
        return "BytesIO", value.getvalue()
    return None, b""
