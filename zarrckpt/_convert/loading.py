"""Load entries of an open checkpoint as new torch tensors and values, nested as they were saved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from zarrckpt._format.state_path import StatePath
from zarrckpt._jobs import Progress
from zarrckpt._read.selection import Selection, catalog_of
from zarrckpt._state.flatten import build
from zarrckpt._state.tensors import torch_dtype


def load_nested(
    entries: Selection,
    paths: Mapping[str, StatePath],
    device: Any,
    max_inflight_bytes: int,
    progress: Progress | None,
) -> dict[str, Any]:
    """Read entries into a nested state, see :meth:`Checkpoint.load`. ``paths`` is fqn -> path in the state.

    Tensors are read into CPU memory first, then moved to the device.
    """
    device = torch.device(device)  # a wrong name of a device fails before anything is read
    values = dict(entries.non_tensors)
    arrays = entries.tensors.read(max_inflight_bytes=max_inflight_bytes, progress=progress)
    nodes = catalog_of(entries).root.tensors
    for fqn in list(arrays):
        # One after the other, so that the CPU memory of each tensor is freed once it is on the device.
        array = arrays.pop(fqn)
        raw = torch.from_numpy(array.reshape(-1).view(np.uint8))
        values[fqn] = raw.view(torch_dtype(nodes[fqn])).reshape(array.shape).to(device)
    state: dict[str, Any] = build((path, values[fqn]) for fqn, path in paths.items()) if paths else {}
    return state
