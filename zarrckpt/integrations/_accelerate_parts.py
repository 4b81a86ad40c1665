"""What an ``Accelerator`` keeps of data loaders and of hooks, as data."""

from __future__ import annotations

from collections.abc import Mapping
from tempfile import TemporaryDirectory
from typing import Any

import torch
from accelerate import Accelerator, DistributedType
from accelerate.data_loader import SeedableRandomSampler

import zarrckpt
from zarrckpt.integrations import _values
from zarrckpt.integrations._data import objects_in, refuse_objects


def state_dict(name: str, part: Any, allow_pickle: bool) -> dict[str, Any]:
    """A part's state. Raises UnsupportedValueError for what is no data in it."""
    state: dict[str, Any] = part.state_dict()
    refuse_objects(objects_in(state, name, allow_pickle=allow_pickle))
    return state


def _is_stateful(loader: Any) -> bool:
    return bool(getattr(loader, "use_stateful_dataloader", False))


def loader_state(name: str, loader: Any, allow_pickle: bool) -> dict[str, Any]:
    """Where a data loader is."""
    sampler = loader.get_sampler()
    seeded = isinstance(sampler, SeedableRandomSampler)
    # At the last batch the next one is of the next epoch, though the loader says so only when it is asked for it.
    at_end = loader.end_of_dataloader and any(x is loader for x in loader.gradient_state.dataloader_references)
    state: dict[str, Any] = {
        "iteration": loader.iteration + at_end,
        "sampler": {"epoch": sampler.epoch, "initial_seed": sampler.initial_seed} if seeded else None,
    }
    if _is_stateful(loader):
        state["stateful"] = zarrckpt.PerRank(state_dict(name, loader, allow_pickle))
    return state


def restore_loader(loader: Any, saved: dict[str, Any], processes: int, processes_now: int) -> None:
    """Take back what :func:`loader_state` gave. Raises KeyMismatchError for a stateful one of other processes."""
    if _is_stateful(loader) and processes != processes_now:
        raise zarrckpt.KeyMismatchError(
            f"a stateful data loader's state is of {processes} processes, and these are {processes_now}: load with "
            "dataloaders=False, and begin the epoch anew or skip batches of a loader that is not stateful"
        )
    loader.iteration = saved["iteration"]
    if saved["sampler"] and isinstance(sampler := loader.get_sampler(), SeedableRandomSampler):
        sampler.epoch, sampler.initial_seed = saved["sampler"]["epoch"], saved["sampler"]["initial_seed"]
    if _is_stateful(loader) and saved["stateful"].value is not None:
        loader.load_state_dict(saved["stateful"].value)


def files_of_hooks(accelerator: Accelerator) -> dict[str, Any]:
    """Have the hooks write into a folder. Returns the bytes of each file there, by its path."""
    hooks = [*accelerator._save_model_state_pre_hook.values()]
    # As Accelerate does: with FSDP they get no weights.
    models = accelerator._models if hooks and accelerator.distributed_type != DistributedType.FSDP else []
    weights = [accelerator.get_state_dict(model, unwrap=False) for model in models]
    with TemporaryDirectory() as folder:
        for hook in hooks:
            hook(accelerator._models, weights, folder)
        return _values.files_below(folder)


def give_to_hooks(accelerator: Accelerator, files: Mapping[str, torch.Tensor]) -> None:
    """Have the hooks read what :func:`files_of_hooks` gave."""
    hooks = [*accelerator._load_model_state_pre_hook.values()]
    models = [] if accelerator.distributed_type == DistributedType.FSDP else [*accelerator._models]
    with TemporaryDirectory() as folder:
        _values.write_files(folder, files)
        for hook in hooks:
            hook(models, folder)
