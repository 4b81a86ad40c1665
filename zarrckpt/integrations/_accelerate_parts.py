"""Save and restore the data loaders of an ``Accelerator`` and the files of its hooks."""

from __future__ import annotations

from collections.abc import Mapping
from tempfile import TemporaryDirectory
from typing import Any

import torch
from accelerate import Accelerator, DistributedType
from accelerate.data_loader import SeedableRandomSampler

import zarrckpt
from zarrckpt.integrations import _values
from zarrckpt.integrations._data import find_non_data, refuse_non_data


def state_dict(name: str, part: Any, allow_pickle: bool) -> dict[str, Any]:
    """Return an object's state dict. Raises UnsupportedValueError if it has values that are not data."""
    state: dict[str, Any] = part.state_dict()
    refuse_non_data(find_non_data(state, name, allow_pickle=allow_pickle))
    return state


def _is_stateful(loader: Any) -> bool:
    return bool(getattr(loader, "use_stateful_dataloader", False))


def loader_state(name: str, loader: Any, allow_pickle: bool) -> dict[str, Any]:
    """Return the epoch of a data loader, the seed of its sampler, and its own state if it is stateful."""
    sampler = loader.get_sampler()
    seeded = isinstance(sampler, SeedableRandomSampler)
    # After the last batch the next epoch begins, but the loader counts it only when the next batch is requested.
    at_end = loader.end_of_dataloader and any(x is loader for x in loader.gradient_state.dataloader_references)
    state: dict[str, Any] = {
        "iteration": loader.iteration + at_end,
        "sampler": {"epoch": sampler.epoch, "initial_seed": sampler.initial_seed} if seeded else None,
    }
    if _is_stateful(loader):
        state["stateful"] = zarrckpt.PerRank(state_dict(name, loader, allow_pickle))
    return state


def restore_loader(loader: Any, saved: dict[str, Any], processes: int, processes_now: int) -> None:
    """Restore a state of :func:`loader_state`.

    Raises KeyMismatchError if the loader is stateful and the number of processes has changed.
    """
    if _is_stateful(loader) and processes != processes_now:
        raise zarrckpt.KeyMismatchError(
            f"the state of a stateful data loader was saved by {processes} processes, got {processes_now}. Load with "
            "dataloaders=False, then restart the epoch, or skip batches of a loader that is not stateful"
        )
    loader.iteration = saved["iteration"]
    if saved["sampler"] and isinstance(sampler := loader.get_sampler(), SeedableRandomSampler):
        sampler.epoch, sampler.initial_seed = saved["sampler"]["epoch"], saved["sampler"]["initial_seed"]
    if _is_stateful(loader) and saved["stateful"].value is not None:
        loader.load_state_dict(saved["stateful"].value)


def run_save_hooks(accelerator: Accelerator) -> dict[str, Any]:
    """Call the save hooks with a temporary folder. Returns the bytes of each file that they wrote, by its path."""
    hooks = [*accelerator._save_model_state_pre_hook.values()]
    # Accelerate passes no weights to hooks if it uses FSDP.
    models = accelerator._models if hooks and accelerator.distributed_type != DistributedType.FSDP else []
    weights = [accelerator.get_state_dict(model, unwrap=False) for model in models]
    with TemporaryDirectory() as folder:
        for hook in hooks:
            hook(accelerator._models, weights, folder)
        return _values.read_files(folder)


def run_load_hooks(accelerator: Accelerator, files: Mapping[str, torch.Tensor]) -> None:
    """Call the load hooks with a temporary folder that has the files of :func:`run_save_hooks`."""
    hooks = [*accelerator._load_model_state_pre_hook.values()]
    models = [] if accelerator.distributed_type == DistributedType.FSDP else [*accelerator._models]
    with TemporaryDirectory() as folder:
        _values.write_files(folder, files)
        for hook in hooks:
            hook(models, folder)
