"""Save and load the state of a Hugging Face ``Accelerator`` with zarrckpt."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer

import zarrckpt
from zarrckpt._store import join_url
from zarrckpt.integrations import _values
from zarrckpt.integrations._data import find_non_data, refuse_non_data, state_to_check
from zarrckpt.integrations._framework import require

require("accelerate")

from accelerate import Accelerator, DistributedType  # noqa: E402

from zarrckpt.integrations._accelerate_parts import (  # noqa: E402
    loader_state,
    restore_loader,
    run_load_hooks,
    run_save_hooks,
    state_dict,
)

_UNSUPPORTED_TYPES = (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA)
_last_saves: weakref.WeakKeyDictionary[Any, zarrckpt.SaveFuture] = weakref.WeakKeyDictionary()
_last_urls: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
"""The last checkpoint that each accelerator saved or loaded. The next save reuses its unchanged chunks."""


def save_state(
    accelerator: Accelerator,
    url: str | None = None,
    *,
    background: bool = False,
    overwrite: bool = False,
    metadata: Mapping[str, Any] | None = None,
    allow_pickle: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    options: zarrckpt.SaveOptions | None = None,
) -> zarrckpt.SaveFuture:
    """Save the state that ``accelerator.save_state`` saves, as one checkpoint. Called on all ranks.

    The hooks of ``register_save_state_pre_hook`` are called with a local folder, and the files that they write there
    become part of the checkpoint. Models are saved even if a hook removes their weights from ``weights``. The costs are
    those of :func:`zarrckpt.save` or :func:`zarrckpt.async_save`, with the last checkpoint that the accelerator saved
    or loaded as ``base``.

    Args:
        accelerator: the accelerator, after ``prepare`` and ``register_for_checkpointing``.
        url: the url of the new checkpoint, as in :func:`zarrckpt.save`. Default, if the project has
            ``automatic_checkpoint_naming``: ``<project_dir>/checkpoints/checkpoint_<iteration>``. Then the checkpoint
            that exceeds ``total_limit`` is deleted after the commit. With ``background=True`` the next call deletes it.
        background: return after the state was copied, and write while training continues.
        overwrite, metadata, storage_options, options: as in :func:`zarrckpt.save`. Accelerate has no training step:
            pass ``metadata={"step": step}`` if ``zarrckpt ls`` and ``info`` are to show it.
        allow_pickle: pickle values that are not data. Default: UnsupportedValueError with their names.

    Returns the future of the save. It is done unless ``background`` is true. Errors in the background are raised by its
    ``result()`` or by the next call. Call ``result()`` at the end of training.

    Raises the errors of :func:`zarrckpt.save`. Raises ValueError without a url if there is no automatic naming, and
    UnsupportedValueError for values that are not data and for DeepSpeed, Megatron-LM and XLA.
    """
    if (last := _last_saves.pop(accelerator, None)) is not None:
        last.result()
    project, iteration = accelerator.project_configuration, accelerator.save_iteration
    named = "" if url else f"{_checkpoints_of(accelerator)}/checkpoint_"
    state = state_of(accelerator, allow_pickle=allow_pickle)
    project.iteration += 1
    save = zarrckpt.async_save if background else zarrckpt.save
    url = url or f"{named}{iteration}"
    saved = save(
        state,
        url,
        overwrite=overwrite,
        metadata=metadata,
        base=_last_urls.get(accelerator),
        storage_options=storage_options,
        options=_values.with_digests(options),
    )
    _last_urls[accelerator] = url
    # A save in the background has not committed yet, so one more old checkpoint is kept.
    expired = iteration - (project.total_limit or iteration + 1) - background
    if named and expired >= 0 and accelerator.is_main_process:
        _values.remove_or_log(f"{named}{expired}", storage_options)
    if isinstance(saved, zarrckpt.SaveFuture):
        _last_saves[accelerator] = saved
        return saved
    done = zarrckpt.SaveFuture(saved.url)
    done.run(lambda: saved)
    return done


def load_state(
    accelerator: Accelerator,
    url: str | None = None,
    *,
    strict: bool = True,
    dataloaders: bool = True,
    allow_pickle: bool = False,
    allow_cast: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    options: zarrckpt.LoadOptions | None = None,
) -> zarrckpt.LoadReport:
    """Load a checkpoint of :func:`save_state`, on any number of processes. Called on all ranks.

    The costs are those of :func:`zarrckpt.load`. After the models are loaded, the hooks of
    ``register_load_state_pre_hook`` are called with a local folder that has the files of the save's hooks.

    Args:
        accelerator: the accelerator, prepared as for the save. The models may be sharded differently.
        url: the url of the checkpoint, as in :func:`zarrckpt.load`. ``zarrckpt.latest(folder)`` returns the newest in a
            folder. Default: the newest checkpoint that ``automatic_checkpoint_naming`` named.
        strict: whether entries that only the checkpoint or only the accelerator has are an error (default).
        dataloaders: False leaves the data loaders unchanged. Stateful data loaders need it if the number of processes
            has changed.
        allow_pickle, allow_cast, storage_options, options: as in :func:`zarrckpt.load`.

    Returns the report of the load.

    Raises the errors of :func:`zarrckpt.load`. After reading, raises KeyMismatchError if other numbers of objects were
    prepared or registered at the save. Raises it also for stateful data loaders if the number of processes has changed.
    """
    if url is None:
        url = zarrckpt.latest(folder := _checkpoints_of(accelerator), storage_options=storage_options)
        if url is None:
            raise zarrckpt.CheckpointNotFoundError(f"{folder} has no checkpoint: call save_state first, or pass a url")
    with restoring(accelerator, strict=strict, dataloaders=dataloaders) as state:
        report = zarrckpt.load(
            state,
            url,
            strict=strict,
            allow_pickle=allow_pickle,
            allow_cast=allow_cast,
            storage_options=storage_options,
            options=options,
        )
    _last_urls[accelerator] = url
    return report


def state_of(accelerator: Accelerator, *, allow_pickle: bool = False) -> dict[str, Any]:
    """Return the state that :func:`save_state` saves, for ``CheckpointManager.step``. To load, use :func:`restoring`.

    Call it once, after everything is prepared and registered, and pass the result to each save. Each save reads the
    current values and calls the hooks. The function makes no requests and is not collective. Arguments and errors are
    those of :func:`save_state`.
    """
    state = _parts_loaded_in_place(accelerator)
    for name, part in state.items():
        if not isinstance(part, nn.Module | Optimizer):
            state[name] = _StateReader(partial(state_dict, name, part, allow_pickle))
    custom = accelerator._custom_objects
    return state | {
        "accelerate": _StateReader(lambda: _own_state(accelerator, allow_pickle)),
        "custom": {str(i): _custom(f"custom.{i}", part, allow_pickle) for i, part in enumerate(custom)},
        "hooks": _StateReader(partial(run_save_hooks, accelerator)),
        "loader": {
            str(i): _StateReader(partial(loader_state, f"loader.{i}", loader, allow_pickle))
            for i, loader in enumerate(accelerator._dataloaders)
        },
        "rng": zarrckpt.PerRank(_StateReader(lambda: _values.random_state(accelerator.device))),
    }


@contextmanager
def restoring(accelerator: Accelerator, *, strict: bool = True, dataloaders: bool = True) -> Iterator[dict[str, Any]]:
    """Yield a state to load into, and restore the accelerator from it when the block ends. Called on all ranks.

    .. code-block:: python

        with restoring(accelerator) as state:
            step = manager.restore(state)

    Models, optimizers, schedulers and the scaler are loaded in place. So are registered objects that are modules,
    optimizers or schedulers, or that hold sharded tensors. Other registered objects get the saved state through
    ``load_state_dict`` at the end of the block. Without a load, or if the block raises, they are not changed. A rank
    that did not exist at the save keeps its random state. Arguments, and errors at the end of the block, are those of
    :func:`load_state`.
    """
    custom = accelerator._custom_objects
    loaders = accelerator._dataloaders if dataloaders else []
    state = _parts_loaded_in_place(accelerator) | {
        "accelerate": None,
        "custom": {str(i): {"state": part} if _values.loads_in_place(part) else None for i, part in enumerate(custom)},
        "hooks": None,
        "loader": {
            str(i): {"iteration": None, "sampler": None, "stateful": zarrckpt.PerRank(new_ranks="keep")}
            for i, _ in enumerate(loaders)
        },
        "rng": zarrckpt.PerRank(new_ranks="keep"),
    }
    yield state
    if (saved := state["accelerate"]) is not None:
        own = _own_state(accelerator, allow_pickle=True)
        if strict and saved["kept"] != own["kept"]:
            raise zarrckpt.KeyMismatchError(
                f"the checkpoint has {saved['kept']}, but this accelerator has {own['kept']}. Prepare and register the "
                "same objects as for the save, or load with strict=False"
            )
        for name in ("step", "iteration"):  # The iteration becomes part of the next url.
            if type(saved[name]) is not int:
                raise zarrckpt.CorruptCheckpointError(f"the saved {name} is {saved[name]!r:.80}, expected an integer")
        accelerator.step = saved["step"]
        accelerator.project_configuration.iteration = saved["iteration"]
        for i, loader in enumerate(loaders):
            restore_loader(loader, state["loader"][str(i)], saved["processes"], own["processes"])
    for i, part in enumerate(custom):
        found = state["custom"][str(i)]
        if found is not None and found.get("state") is not part:
            part.load_state_dict(found["state"] if "state" in found else found["whole"][0])
    if state["hooks"] is not None:
        run_load_hooks(accelerator, state["hooks"])
    if state["rng"].value is not None:
        _values.set_random_state(accelerator.device, state["rng"].value)


def _checkpoints_of(accelerator: Accelerator) -> str:
    """Return the folder of automatically named checkpoints. Raises ValueError without automatic naming."""
    if not accelerator.project_configuration.automatic_checkpoint_naming or accelerator.project_dir is None:
        raise ValueError(
            "url is required without automatic naming: pass it, or prepare the accelerator with "
            "ProjectConfiguration(project_dir=..., automatic_checkpoint_naming=True)"
        )
    return join_url(accelerator.project_dir, "checkpoints")


class _StateReader:
    """An object whose state is read by a function at each save."""

    def __init__(self, read: Callable[[], dict[str, Any]]) -> None:
        self.state_dict = read

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise zarrckpt.UnsupportedValueError(
            "cannot load into the result of state_of(): load inside `with restoring(accelerator) as state`"
        )


def _parts_loaded_in_place(accelerator: Accelerator) -> dict[str, Any]:
    """Return the objects that are loaded in place, by Accelerate's file names: ``optimizer``, ``optimizer_1``, ..."""
    if accelerator.distributed_type in _UNSUPPORTED_TYPES:
        kind = accelerator.distributed_type.value
        raise zarrckpt.UnsupportedValueError(
            f"{kind} is not supported, because it writes its own checkpoints: call accelerator.save_state"
        )
    models, scaler = accelerator._models, accelerator.scaler
    kinds = {
        # Several models become one module, because an optimizer may train parameters of more than one model.
        "model": [nn.ModuleList(models)] if len(models) > 1 else models,
        "optimizer": [wrapped.optimizer for wrapped in accelerator._optimizers],
        "scheduler": accelerator._schedulers,
        "scaler": [] if scaler is None else [scaler],
    }
    return {f"{kind}_{i}" if i else kind: part for kind, parts in kinds.items() for i, part in enumerate(parts)}


def _own_state(accelerator: Accelerator, allow_pickle: bool) -> dict[str, Any]:
    """Return the accelerator's counters. Raises UnsupportedValueError if models or optimizers hold objects."""
    parts = _parts_loaded_in_place(accelerator).items()
    loose = {name: state_to_check(part) for name, part in parts if isinstance(part, nn.Module | Optimizer)}
    refuse_non_data(find_non_data(loose, allow_pickle=allow_pickle))
    return {
        "step": accelerator.step,
        "iteration": accelerator.save_iteration,
        "processes": accelerator.num_processes,
        "kept": {
            "models": len(accelerator._models),
            "optimizers": len(accelerator._optimizers),
            "schedulers": len(accelerator._schedulers),
            "registered objects": len(accelerator._custom_objects),
        },
    }


def _custom(name: str, part: Any, allow_pickle: bool) -> Any:
    if isinstance(part, nn.Module | Optimizer):
        return {"state": part}

    def read() -> dict[str, Any]:
        state = part.state_dict()
        filled = _values.loads_in_place(part, state)
        opaque = [*find_non_data(state, name, exact=not filled)]
        refuse_non_data([] if allow_pickle else opaque)
        # A tuple is stored as one value, here as one pickle.
        return {"whole": (state,)} if opaque and not filled else {"state": state}

    return _StateReader(read)
