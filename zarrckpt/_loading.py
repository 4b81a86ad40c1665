"""Entries of an open checkpoint as new torch tensors and values, nested as they were saved."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from zarrckpt._arrays import read_arrays
from zarrckpt._catalog import Catalog
from zarrckpt._flatten import build
from zarrckpt._tensors import torch_dtype
from zarrckpt._transfer import DEFAULT_MAX_INFLIGHT_BYTES, Progress


def load_state(
    catalog: Catalog, fqns: Sequence[str], device: Any, *, allow_pickle: bool, progress: Progress | None
) -> dict[str, Any]:
    """Read entries, see :meth:`Checkpoint.load`. Tensors arrive in CPU memory first."""
    root, device = catalog.root, torch.device(device)  # a device that is none fails before anything is read
    values = {fqn: catalog.read_object(fqn, allow_pickle=allow_pickle) for fqn in fqns if fqn in root.objects}
    arrays = read_arrays(catalog, [fqn for fqn in fqns if fqn in root.tensors], DEFAULT_MAX_INFLIGHT_BYTES, progress)
    for fqn in list(arrays):
        # One after the other: what is on the device already is needed no more here.
        array = arrays.pop(fqn)
        raw = torch.from_numpy(array.reshape(-1).view(np.uint8))
        values[fqn] = raw.view(torch_dtype(root.tensors[fqn])).reshape(array.shape).to(device)
    state: dict[str, Any] = build((root.state_path(fqn), values[fqn]) for fqn in fqns) if fqns else {}
    return state
