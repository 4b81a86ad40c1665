"""Hugging Face Accelerate: what an ``Accelerator`` keeps, saved and loaded by zarrckpt."""

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
from zarrckpt.integrations._data import loose_parts, objects_in, refuse_objects
from zarrckpt.integrations._framework import require

require("accelerate", "1.15", "2", "accelerate")

from accelerate import Accelerator, DistributedType  # noqa: E402

from zarrckpt.integrations._accelerate_parts import (  # noqa: E402
    files_of_hooks,
    give_to_hooks,
    loader_state,
    restore_loader,
    state_dict,
)

_HAVE_THEIR_OWN = (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA)
_last_saves: weakref.WeakKeyDictionary[Any, zarrckpt.SaveFuture] = weakref.WeakKeyDictionary()


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
    """Save what ``accelerator.save_state`` saves, as one checkpoint. Called on all ranks.

    The hooks of ``register_save_state_pre_hook`` are called with a local folder, and the files that they write there
    are a part of the checkpoint; what they take off ``weights`` is saved all the same. Costs what
    :func:`zarrckpt.save` costs, or :func:`zarrckpt.async_save`.

    Args:
        accelerator: after ``prepare`` and ``register_for_checkpointing``.
        url: where to, as in :func:`zarrckpt.save`. Default: ``<project_dir>/checkpoints/checkpoint_<iteration>``, with
            the project's ``automatic_checkpoint_naming``. Then the one that ``total_limit`` leaves no place for is
            deleted when this one is committed: in the background, by the next call.
        background: return when the state is copied, and write while training goes on.
        overwrite, metadata, storage_options, options: as in :func:`zarrckpt.save`. Accelerate does not know the
            training's step: ``metadata={"step": step}`` lets ``zarrckpt ls`` and ``info`` show it.
        allow_pickle: pickle what is no data. Default: UnsupportedValueError, which names it.

    Returns the future of the save, which has ended unless ``background`` is true. What went wrong in the background is
    raised by the future's ``result()``, to be called at the end of training, or by the next call.

    Raises what :func:`zarrckpt.save` raises; ValueError without a url and without automatic naming;
    UnsupportedValueError for values that are no data, and for DeepSpeed, Megatron-LM and XLA.
    """
    if (last := _last_saves.pop(accelerator, None)) is not None:
        last.result()
    project, iteration = accelerator.project_configuration, accelerator.save_iteration
    named = "" if url else f"{_checkpoints_of(accelerator)}/checkpoint_"
    state = state_of(accelerator, allow_pickle=allow_pickle)
    project.iteration += 1
    save = zarrckpt.async_save if background else zarrckpt.save
    url = url or f"{named}{iteration}"
    saved = save(state, url, overwrite=overwrite, metadata=metadata, storage_options=storage_options, options=options)
    # What is saved in the background is no replacement yet.
    superfluous = iteration - (project.total_limit or iteration + 1) - background
    if named and superfluous >= 0 and accelerator.is_main_process:
        _values.remove_or_log(f"{named}{superfluous}", storage_options)
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

    Costs what :func:`zarrckpt.load` costs. The hooks of ``register_load_state_pre_hook`` are called with a local folder
    that has the files of the save's hooks, after the models are loaded.

    Args:
        accelerator: prepared as at the save; the models may be sharded in another way.
        url: where from, as in :func:`zarrckpt.load`. The newest in a folder: ``zarrckpt.latest(folder)``. Default: the
            newest that ``automatic_checkpoint_naming`` has named.
        strict: what the checkpoint lacks, and what the accelerator has nothing for, is an error (default).
        dataloaders: False leaves the data loaders as they are. Needed for stateful ones on another number of processes.
        allow_pickle, allow_cast, storage_options, options: as in :func:`zarrckpt.load`.

    Returns the report of the load.

    Raises what :func:`zarrckpt.load` raises. When all is read, KeyMismatchError where other objects were prepared or
    registered at the save, or for stateful data loaders on another number of processes.
    """
    if url is None:
        url = zarrckpt.latest(folder := _checkpoints_of(accelerator), storage_options=storage_options)
        if url is None:
            raise zarrckpt.CheckpointNotFoundError(f"{folder} has no checkpoint: the first save_state makes one")
    with restoring(accelerator, strict=strict, dataloaders=dataloaders) as state:
        return zarrckpt.load(
            state,
            url,
            strict=strict,
            allow_pickle=allow_pickle,
            allow_cast=allow_cast,
            storage_options=storage_options,
            options=options,
        )


def state_of(accelerator: Accelerator, *, allow_pickle: bool = False) -> dict[str, Any]:
    """What :func:`save_state` saves, as a state for ``CheckpointManager.step``. To load: :func:`restoring`.

    Made once, after everything is prepared and registered, and passed to each save, which reads it anew and calls the
    hooks. Makes no request; any one rank may call it. Arguments and errors are those of :func:`save_state`.
    """
    state = _filled_parts(accelerator)
    for name, part in state.items():
        if not isinstance(part, nn.Module | Optimizer):
            state[name] = _Read(partial(state_dict, name, part, allow_pickle))
    custom = accelerator._custom_objects
    return state | {
        "accelerate": _Read(lambda: _own_state(accelerator, allow_pickle)),
        "custom": {str(i): _custom(f"custom.{i}", part, allow_pickle) for i, part in enumerate(custom)},
        "hooks": _Read(partial(files_of_hooks, accelerator)),
        "loader": {
            str(i): _Read(partial(loader_state, f"loader.{i}", loader, allow_pickle))
            for i, loader in enumerate(accelerator._dataloaders)
        },
        "rng": zarrckpt.PerRank(_Read(lambda: _values.random_state(accelerator.device))),
    }


@contextmanager
def restoring(accelerator: Accelerator, *, strict: bool = True, dataloaders: bool = True) -> Iterator[dict[str, Any]]:
    """A state to load into; the accelerator takes what was loaded at the end of the ``with`` block. On all ranks.

    .. code-block:: python

        with restoring(accelerator) as state:
            step = manager.restore(state)

    Models, optimizers, schedulers and the scaler are filled in place; so are registered objects that are modules,
    optimizers or schedulers, or sharded. Other ones are given what they gave at the save. Where nothing was loaded, or
    the block raises, nothing is given. A rank whose number was not there at the save keeps its random numbers.
    Arguments, and errors at the end of the block, are those of :func:`load_state`.
    """
    custom = accelerator._custom_objects
    loaders = accelerator._dataloaders if dataloaders else []
    state = _filled_parts(accelerator) | {
        "accelerate": None,
        "custom": {str(i): {"state": part} if _values.is_filled(part) else None for i, part in enumerate(custom)},
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
                f"the checkpoint is of {saved['kept']}, and this accelerator has {own['kept']}: prepare and register "
                "the same as at the save, or load with strict=False"
            )
        for name in ("step", "iteration"):  # the iteration becomes a part of the next url
            if type(saved[name]) is not int:
                raise zarrckpt.CorruptCheckpointError(f"the saved {name} is {saved[name]!r:.80}: expected an integer")
        accelerator.step = saved["step"]
        accelerator.project_configuration.iteration = saved["iteration"]
        for i, loader in enumerate(loaders):
            restore_loader(loader, state["loader"][str(i)], saved["processes"], own["processes"])
    for i, part in enumerate(custom):
        found = state["custom"][str(i)]
        if found is not None and found.get("state") is not part:
            part.load_state_dict(found["state"] if "state" in found else found["whole"][0])
    if state["hooks"] is not None:
        give_to_hooks(accelerator, state["hooks"])
    if state["rng"].value is not None:
        _values.set_random_state(accelerator.device, state["rng"].value)


def _checkpoints_of(accelerator: Accelerator) -> str:
    """The folder in which Accelerate would name checkpoints itself."""
    if not accelerator.project_configuration.automatic_checkpoint_naming or accelerator.project_dir is None:
        raise ValueError("pass a url, or ProjectConfiguration(project_dir=..., automatic_checkpoint_naming=True)")
    return join_url(accelerator.project_dir, "checkpoints")


class _Read:
    """What is read anew for each save."""

    def __init__(self, read: Callable[[], dict[str, Any]]) -> None:
        self.state_dict = read

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise zarrckpt.UnsupportedValueError("state_of() is to save only: load `with restoring(accelerator) as state`")


def _filled_parts(accelerator: Accelerator) -> dict[str, Any]:
    """What is loaded in place, by the names that Accelerate has for the files: ``optimizer``, ``optimizer_1``, ..."""
    if accelerator.distributed_type in _HAVE_THEIR_OWN:
        kind = accelerator.distributed_type.value
        raise zarrckpt.UnsupportedValueError(f"{kind} has checkpoints of its own: call accelerator.save_state")
    models, scaler = accelerator._models, accelerator.scaler
    kinds = {
        # Several in one module: an optimizer may train parameters of more than one.
        "model": [nn.ModuleList(models)] if len(models) > 1 else models,
        "optimizer": [wrapped.optimizer for wrapped in accelerator._optimizers],
        "scheduler": accelerator._schedulers,
        "scaler": [] if scaler is None else [scaler],
    }
    return {f"{kind}_{i}" if i else kind: part for kind, parts in kinds.items() for i, part in enumerate(parts)}


def _own_state(accelerator: Accelerator, allow_pickle: bool) -> dict[str, Any]:
    """The accelerator's own values. What models and optimizers keep that is no data is refused, too."""
    parts = _filled_parts(accelerator).items()
    loose = {name: loose_parts(part) for name, part in parts if isinstance(part, nn.Module | Optimizer)}
    refuse_objects(objects_in(loose, allow_pickle=allow_pickle))
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
        filled = _values.is_filled(part, state)
        opaque = [*objects_in(state, name, exact=not filled)]
        refuse_objects([] if allow_pickle else opaque)
        # A tuple is kept as one value.
        return {"whole": (state,)} if opaque and not filled else {"state": state}

    return _Read(read)
