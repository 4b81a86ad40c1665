"""What frameworks keep beside tensors, as data: random number generators, and files; what is loaded in place."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

import zarrckpt
from zarrckpt._errors import log


def random_state(device: torch.device) -> dict[str, Any]:
    """The generators of Python, NumPy and torch, and torch's of all devices of a kind, as data."""
    version, numbers, gauss = random.getstate()
    numpy: Any = np.random.get_state(legacy=False)
    if "key" in numpy["state"]:
        numpy["state"]["key"] = torch.from_numpy(numpy["state"]["key"].astype(np.int64))
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        # Tensors, since those of all ranks become one array.
        "python": {"version": version, "numbers": torch.tensor(numbers, device="cpu"), "gauss": gauss},
        "numpy": numpy,
    }
    if hasattr(module := torch.get_device_module(device), "get_rng_state_all"):
        state["device"] = module.get_rng_state_all()
    return state


def set_random_state(device: torch.device, state: dict[str, Any]) -> None:
    """Take back what :func:`random_state` gave; where there are fewer devices now, those of the first ones."""
    torch.set_rng_state(state["torch"])
    python, numpy = state["python"], state["numpy"]
    random.setstate((python["version"], tuple(python["numbers"].tolist()), python["gauss"]))
    if "key" in numpy["state"]:
        numpy = {**numpy, "state": {**numpy["state"], "key": numpy["state"]["key"].numpy().astype(np.uint32)}}
    np.random.set_state(numpy)
    if hasattr(module := torch.get_device_module(device), "get_rng_state_all"):
        for i, own in enumerate(state.get("device", ())[: module.device_count()]):
            module.set_rng_state(own, i)


def files_below(folder: str) -> dict[str, torch.Tensor]:
    """The bytes of each file, by its path in the folder."""
    files = [path for path in Path(folder).rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): torch.from_numpy(np.fromfile(path, np.uint8)) for path in files}


def write_files(folder: str, files: Mapping[str, torch.Tensor]) -> None:
    """Write what :func:`files_below` gave. Raises CorruptCheckpointError for a path that is no file in the folder."""
    if not isinstance(files, Mapping):
        raise zarrckpt.CorruptCheckpointError(f"the checkpoint has a {type(files).__name__} where files are expected")
    for name, content in files.items():
        path, is_file = Path(folder, str(name)), isinstance(content, torch.Tensor) and content.dtype == torch.uint8
        try:
            if not is_file or not path.resolve().is_relative_to(Path(folder).resolve()):
                raise ValueError("outside of the folder that it was saved from, or no bytes")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.numpy().data)
        except (OSError, ValueError) as err:
            raise zarrckpt.CorruptCheckpointError(f"the file {name!r:.200} of the checkpoint: {err}") from err


def is_filled(part: Any, state: Any = None) -> bool:
    """Whether an object is loaded in place: one of torch's classes, or one that ranks hold parts of."""
    if isinstance(part, nn.Module | Optimizer | LRScheduler):
        return True
    return _holds_parts(part.state_dict() if state is None else state)


def _holds_parts(state: Any) -> bool:
    if isinstance(state, Mapping | list):
        return any(map(_holds_parts, state.values() if isinstance(state, Mapping) else state))
    return isinstance(state, DTensor | zarrckpt.PerRank)


def remove_or_log(url: str, storage_options: Mapping[str, Any] | None) -> bool:
    """Delete a checkpoint that is superfluous. One that cannot be deleted, or is pinned, stays, and is logged.

    Returns whether one was there: False where it was never saved, or is gone already.
    """
    try:
        zarrckpt.remove(url, storage_options=storage_options)
    except zarrckpt.CheckpointNotFoundError:
        return False
    except zarrckpt.CheckpointError as err:
        log.warning("%s was to be removed, and is not: %s: %s", url, type(err).__name__, err)
    return True
