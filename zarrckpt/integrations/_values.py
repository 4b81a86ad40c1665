"""Read and restore random number generators and files as data, and other functions that integrations share."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

import zarrckpt
from zarrckpt._errors import log
from zarrckpt._state.accelerators import random_states
from zarrckpt._state.torch_kinds import is_sharded


def random_state(device: torch.device) -> dict[str, Any]:
    """Return the random state of Python, NumPy, torch, and all devices of the given device's type, as data."""
    version, numbers, gauss = random.getstate()
    numpy: Any = np.random.get_state(legacy=False)
    if "key" in numpy["state"]:
        numpy["state"]["key"] = torch.from_numpy(numpy["state"]["key"].astype(np.int64))
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        # A tensor, because the tensors of all ranks are stored as one array.
        "python": {"version": version, "numbers": torch.tensor(numbers, device="cpu"), "gauss": gauss},
        "numpy": numpy,
    }
    if (states := random_states(device)) is not None:
        state["device"] = states
    return state


def set_random_state(device: torch.device, state: dict[str, Any]) -> None:
    """Restore a state of :func:`random_state`. Devices that this process does not have are ignored."""
    torch.set_rng_state(state["torch"])
    python, numpy = state["python"], state["numpy"]
    random.setstate((python["version"], tuple(python["numbers"].tolist()), python["gauss"]))
    if "key" in numpy["state"]:
        numpy = {**numpy, "state": {**numpy["state"], "key": numpy["state"]["key"].numpy().astype(np.uint32)}}
    np.random.set_state(numpy)
    if hasattr(module := torch.get_device_module(device), "set_rng_state"):
        for i, own in enumerate(state.get("device", ())[: module.device_count()]):
            module.set_rng_state(own, i)


def read_files(folder: str) -> dict[str, torch.Tensor]:
    """Return the bytes of each file below a folder, by its path in the folder."""
    files = [path for path in Path(folder).rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): torch.from_numpy(np.fromfile(path, np.uint8)) for path in files}


def write_files(folder: str, files: Mapping[str, torch.Tensor]) -> None:
    """Write files that :func:`read_files` returned.

    Raises CorruptCheckpointError if a path lies outside of the folder, or if the content is not bytes.
    """
    if not isinstance(files, Mapping):
        raise zarrckpt.CorruptCheckpointError(
            f"the hooks' files in the checkpoint are a {type(files).__name__}, expected a dict of files"
        )
    for name, content in files.items():
        path, is_file = Path(folder, str(name)), isinstance(content, torch.Tensor) and content.dtype == torch.uint8
        try:
            if not is_file or not path.resolve().is_relative_to(Path(folder).resolve()):
                raise ValueError("expected bytes and a path inside the folder")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.numpy().data)
        except (OSError, ValueError) as err:
            raise zarrckpt.CorruptCheckpointError(
                f"the checkpoint's file {name!r:.200} cannot be written to a temporary folder: {err}"
            ) from err


def loads_in_place(part: Any, state: Any = None) -> bool:
    """Whether an object is loaded in place: a module, optimizer or scheduler, or an object with sharded state."""
    if isinstance(part, nn.Module | Optimizer | LRScheduler):
        return True
    return holds_sharded(part.state_dict() if state is None else state)


def holds_sharded(state: Any) -> bool:
    """Whether a value is or contains a sharded tensor or a PerRank, of which each rank has its own part."""
    if isinstance(state, Mapping | list):
        return any(map(holds_sharded, state.values() if isinstance(state, Mapping) else state))
    return is_sharded(state) or isinstance(state, zarrckpt.PerRank)


def with_digests(options: zarrckpt.SaveOptions | None) -> zarrckpt.SaveOptions:
    """Return the options of a save that is a base of later ones, unless they exclude this."""
    options = options or zarrckpt.SaveOptions()
    return dataclasses.replace(options, reuse="on") if options.reuse == "auto" else options


def remove_or_log(url: str, storage_options: Mapping[str, Any] | None) -> bool:
    """Delete an expired checkpoint. If it cannot be deleted or is pinned, log a warning and leave it.

    Returns False if no checkpoint was at the url.
    """
    try:
        zarrckpt.remove(url, storage_options=storage_options)
    except zarrckpt.CheckpointNotFoundError:
        return False
    except zarrckpt.CheckpointError as err:
        log.warning("the expired checkpoint %s could not be removed: %s: %s", url, type(err).__name__, err)
    return True
