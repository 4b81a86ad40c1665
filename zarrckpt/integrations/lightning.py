"""Checkpoints of Lightning's Trainer and Fabric, on one device and with DDP, FSDP2, tensor parallelism and FSDP1.

Sharded strategies put the model and optimizers themselves into the state, so that any mesh can load them. Other entries
(loops, callbacks, schedulers, hyperparameters) keep Lightning's names.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import Any, TypeVar, cast

import torch
from torch.optim import Optimizer

import zarrckpt
from zarrckpt._store._url import normalize
from zarrckpt.integrations import _framework

_framework.require("lightning")

from lightning.fabric.strategies import FSDPStrategy as FabricFSDPStrategy  # noqa: E402
from lightning.fabric.strategies import ModelParallelStrategy as FabricModelParallelStrategy  # noqa: E402
from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: E402
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO  # noqa: E402
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy, Strategy  # noqa: E402
from lightning.pytorch.trainer.states import TrainerFn  # noqa: E402

from zarrckpt.integrations._data import has_state, with_plain_parameters  # noqa: E402
from zarrckpt.integrations._lightning_io import (  # noqa: E402
    FINDS_LAST,
    OPTIMIZER,
    ROOT_SUFFIX,
    ZarrCheckpointIO,
    comparable_folder,
    run_metadata,
)
from zarrckpt.integrations._lightning_sharded import ShardedStrategy  # noqa: E402

__all__ = [
    "ZarrCheckpointIO",
    "ZarrFSDPStrategy",
    "ZarrFabricFSDPStrategy",
    "ZarrFabricModelParallelStrategy",
    "ZarrModelCheckpoint",
    "ZarrModelParallelStrategy",
    "load_from_checkpoint",
]

_Module = TypeVar("_Module")


class ZarrModelCheckpoint(ModelCheckpoint):  # type: ignore[misc]
    """Lightning's ModelCheckpoint for object stores: ``fit(ckpt_path="last")`` finds checkpoints there.

    In object stores, Lightning's own ModelCheckpoint drops the ``s3://`` of the url, so ``"last"`` starts at step 0. It
    also deletes the checkpoint from which a run was resumed, even if that belongs to another run. This class does
    neither, and ignores unfinished saves in any folder. The arguments are the same. It loads the saved state of
    Lightning's own class.

    ``fit`` raises TypeError unless the Trainer uses :class:`ZarrCheckpointIO` or a strategy of this module.
    """

    def __init__(self, dirpath: str | PurePath | None = None, *others: Any, **named: Any) -> None:
        # Lightning would create local folders named "file:" and "s3:" for "file://..." and Path("s3://...").
        super().__init__(None if dirpath is None else normalize(dirpath), *others, **named)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Raise TypeError on every rank, before training, if the Trainer does not save with zarrckpt. No requests."""
        if stage == "fit":
            _require_zarr(trainer.strategy, self.dirpath)
        super().setup(trainer, pl_module, stage)
        if isinstance(plugin := _plugin_of(trainer.strategy), ZarrCheckpointIO):
            # A checkpoint may name others only below these folders, because Lightning opens and deletes them.
            callbacks = [callback for callback in trainer.checkpoint_callbacks if callback.dirpath]
            plugin.folders |= {comparable_folder(f"{callback.dirpath}") for callback in callbacks}

    @property
    def state_key(self) -> str:
        """The key of Lightning's own ModelCheckpoint, so that each can load the state of the other."""
        return str(super().state_key).removeprefix("Zarr")

    def state_dict(self) -> dict[str, Any]:
        """Return the state of Lightning's ModelCheckpoint, and a key that marks it as this class."""
        return {**super().state_dict(), FINDS_LAST: True}

    def file_exists(self, filepath: Any, trainer: Any) -> bool:
        """Whether rank 0 finds a checkpoint at a path. Unfinished saves do not count."""
        if str(filepath) in self.best_k_models:  # Its save may still run in the background.
            return True
        taken = trainer.is_global_zero and self._is_checkpoint(str(filepath))
        return bool(trainer.strategy.reduce_boolean_decision(taken, all=False))

    def _find_last_checkpoints(self, trainer: Any) -> set[str]:
        self._fs.invalidate_cache()
        found = {path for path in super()._find_last_checkpoints(trainer) if self._is_checkpoint(path)}
        if getattr(self._fs, "local_file", False):
            return found
        # Lightning compares modification times. In object stores only objects have one, folders do not.
        roots = {path: f"{path}{ROOT_SUFFIX}" for path in found}
        return {self._fs.unstrip_protocol(root if self._fs.exists(root) else path) for path, root in roots.items()}

    def _is_checkpoint(self, path: str) -> bool:
        """Whether a path has a committed checkpoint, or one that Lightning's own plugin or strategies saved."""
        self._fs.invalidate_cache()  # zarrckpt may have written objects after fsspec listed the folder.
        return any(map(self._fs.exists, (f"{path}{ROOT_SUFFIX}", f"{path}/meta.pt"))) or bool(self._fs.isfile(path))

    def _should_remove_checkpoint(self, trainer: Any, previous: str, current: str) -> bool:
        """Whether to delete a checkpoint: never one outside of this run's folder or the one that was resumed from.

        Lightning itself checks this only for local folders.
        """
        if not super()._should_remove_checkpoint(trainer, previous, current):
            return False
        own = f"{self.dirpath}".rstrip("/") + "/"
        resumed_from = str(trainer.ckpt_path or "").removesuffix(ROOT_SUFFIX)
        return "://" not in previous or (previous.startswith(own) and previous != resumed_from)

    def _remove_checkpoint(self, trainer: Any, filepath: str) -> None:
        """Remove a checkpoint, after the link to the last checkpoint was updated: it may point to the removed one."""
        if self.save_last == "link" and self._last_checkpoint_saved and self.last_model_path:
            self._link_checkpoint(trainer, self._last_checkpoint_saved, self.last_model_path)
        super()._remove_checkpoint(trainer, filepath)

    @staticmethod
    def _link_checkpoint(trainer: Any, filepath: str, linkpath: str) -> None:
        """Link to the last checkpoint, for ``save_last="link"``. Waits for the commit of a save in the background."""
        # Not _plugin_of: a wrapper may save in its own thread (AsyncCheckpointIO), at the same time as link_checkpoint.
        plugin = trainer.strategy.checkpoint_io
        if not isinstance(plugin, ZarrCheckpointIO):
            ModelCheckpoint._link_checkpoint(trainer, filepath, linkpath)
        elif trainer.is_global_zero and filepath != linkpath:
            plugin.link_checkpoint(filepath, linkpath)


def _plugin_of(strategy: Any) -> Any:
    """Return the checkpoint plugin of a strategy, without wrappers such as Lightning's AsyncCheckpointIO."""
    plugin = strategy.checkpoint_io
    while isinstance(plugin, _WrappingCheckpointIO):
        plugin = plugin.checkpoint_io
    return plugin


def _require_zarr(strategy: Any, folder: Any) -> None:
    """Raise TypeError if a strategy does not save and load with zarrckpt."""
    if isinstance(strategy, ShardedStrategy):
        return
    kind = type(strategy).__name__
    # Strategies that write another format do not use the plugin, and each of them overrides load_checkpoint. Some that
    # use it override save_checkpoint too (XLA).
    if type(strategy).load_checkpoint is not Strategy.load_checkpoint:
        raise TypeError(
            f"ZarrModelCheckpoint cannot save to {folder} with {kind}, which writes another format. Use "
            "Trainer(strategy=ZarrModelParallelStrategy(...)) or ZarrFSDPStrategy(...)"
        )
    plugin = _plugin_of(strategy)
    if not isinstance(plugin, ZarrCheckpointIO):
        raise TypeError(
            f"ZarrModelCheckpoint cannot save to {folder} with {type(plugin).__name__}, which writes pickles. Use "
            "Trainer(plugins=[ZarrCheckpointIO()]), or Lightning's own ModelCheckpoint"
        )


def load_from_checkpoint(
    model: type[_Module],
    url: str | PurePath,
    *,
    device: str | torch.device = "cpu",
    strict: bool | None = None,
    storage_options: Mapping[str, Any] | None = None,
    allow_pickle: bool = False,
    **hyperparameters: Any,
) -> _Module:
    """Build a LightningModule from the hyperparameters in a checkpoint and load its weights.

    This is ``Model.load_from_checkpoint`` for a url. One process calls it, or several independently. Optimizers are not
    read. During the call, memory holds the weights twice.

    Args:
        model: the class of the LightningModule (or LightningDataModule).
        url: a checkpoint that a Trainer saved, with or without a strategy of this module.
        device: the device of the weights.
        strict: whether missing and unexpected weights are an error. Default: the model's ``strict_loading``.
        storage_options, allow_pickle: as for :class:`ZarrCheckpointIO`.
        hyperparameters: arguments of the model that replace those in the checkpoint.

    Raises the errors of :func:`zarrckpt.open`. Raises UnsafeValueError, unless ``allow_pickle`` is true, if the
    hyperparameters name code that builds the model (``_instantiator``, which LightningCLI saves). Raises RuntimeError
    if the weights do not match the model.
    """
    found = zarrckpt.open(url, storage_options=storage_options, allow_pickle=allow_pickle)
    keys = {str(found.entry(fqn).keys[0]) for fqn in found} - {"optimizer_states"}
    checkpoint = found.load(keys=[key for key in keys if not OPTIMIZER.fullmatch(key)])
    if not allow_pickle:
        _refuse_instantiators(checkpoint, found.url)
    stream = io.BytesIO()
    torch.save(checkpoint, stream)
    stream.seek(0)
    options = {} if strict is None else {"strict": strict}
    # The pickle was created here, from values that were checked above.
    loaded = model.load_from_checkpoint(stream, map_location=device, weights_only=False, **options, **hyperparameters)  # type: ignore[attr-defined]
    return cast(_Module, loaded)


def _refuse_instantiators(checkpoint: Mapping[str, Any], url: str) -> None:
    """Raise UnsafeValueError if hyperparameters name a function and classes that Lightning would import and call."""
    for key, parameters in checkpoint.items():
        # Lightning also accepts a list of pairs.
        listed = isinstance(parameters, list | tuple | set | frozenset)
        pairs = [pair for pair in parameters if isinstance(pair, list | tuple) and pair] if listed else []
        if "_instantiator" in (parameters if isinstance(parameters, Mapping) else [pair[0] for pair in pairs]):
            raise zarrckpt.UnsafeValueError(
                f"{url}: {key!r} names code that builds the model (_instantiator). LightningCLI saves such "
                "hyperparameters. If you trust the checkpoint, pass allow_pickle=True"
            )


class _TrainerStrategy(ShardedStrategy):
    """Base class of the Trainer's strategies."""

    model: Any
    optimizers: list[Optimizer]
    lightning_module: Any
    _given_weights: Mapping[str, Any] = {}
    """The weights that :meth:`lightning_module_state_dict` returned for the current save.

    Lightning calls it first, then the hooks that change the checkpoint, and then :meth:`save_checkpoint`, which
    compares the weights to detect hooks that replaced them.
    """

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the model's sharded state dict, without a gather or a copy. Collective with FSDP1."""
        from torch.distributed.checkpoint.state_dict import get_model_state_dict

        self._given_weights = get_model_state_dict(self.model)
        return copy.copy(self._given_weights)  # with the versions of modules

    def optimizer_state(self, optimizer: Any) -> Any:
        """Return the optimizer itself in place of its state. The save reads the state from it."""
        return getattr(optimizer, "_optimizer", optimizer)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | PurePath, storage_options: Mapping[str, Any] | None = None
    ) -> None:
        """Save the checkpoint that Lightning built. Called on all ranks. Raises the errors of :func:`zarrckpt.save`."""
        metadata = run_metadata(checkpoint, filepath)
        given, self._given_weights = self._given_weights, {}
        weights, optimizers = checkpoint.pop("state_dict"), checkpoint.pop("optimizer_states", [])
        if weights.keys() == given.keys() and all(value is given[name] for name, value in weights.items()):
            weights = self.model  # From the model, zarrckpt gets the names of the optimizers' parameters.
        else:  # A hook changed the weights in the checkpoint.
            from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

            optimizers = [get_optimizer_state_dict(self.model, optimizer) for optimizer in optimizers]
        objects = {"state_dict": weights} | {f"optimizer_{i}": optimizer for i, optimizer in enumerate(optimizers)}
        self._save(objects, with_plain_parameters(checkpoint), filepath, metadata, storage_options)

    def load_checkpoint(self, checkpoint_path: str | PurePath, weights_only: bool | None = None) -> dict[str, Any]:
        """Load the model, and the optimizers if the Trainer is fitting. Return the rest. Called on all ranks."""
        url, found = self._contents(checkpoint_path)
        if found is None:
            return self.checkpoint_io.without_foreign_paths(super().load_checkpoint(url, weights_only), url)  # type: ignore[misc]
        fitting = self.lightning_module.trainer.state.fn == TrainerFn.FITTING
        targets = self.optimizers if fitting else []
        optimizers: dict[str, Any] = {f"optimizer_{i}": optimizer for i, optimizer in enumerate(targets)}
        rest = {key: None for key in found.keys if key != "state_dict" and not OPTIMIZER.fullmatch(key)}
        if "optimizer_states" in rest:
            del rest["optimizer_states"]
            if optimizers:
                numbered = {"optimizer_states": [*optimizers.values()]}
                self._load_numbered(numbered, url, weights_only=weights_only)
                optimizers = {}
        if not self.lightning_module.strict_loading:
            if optimizers:
                # Optimizers are loaded strictly even if the model is not.
                state = {"state_dict": self.model, **optimizers}
                self._load(state, url, weights_only=weights_only, keys=[*optimizers])
            optimizers = {}
        state = {**rest, "state_dict": self.model, **optimizers}
        self._load(state, url, weights_only=weights_only, strict=self.lightning_module.strict_loading)
        return self.checkpoint_io.without_foreign_paths({key: state[key] for key in rest}, url)

    def teardown(self) -> None:
        """Wait for the save in the background, raise its errors, and tear down the strategy."""
        try:
            self.checkpoint_io.teardown()
        finally:
            super().teardown()  # type: ignore[misc]


class ZarrModelParallelStrategy(_TrainerStrategy, ModelParallelStrategy):  # type: ignore[misc]
    """Lightning's ModelParallelStrategy (FSDP2, tensor parallelism), with zarrckpt's checkpoints.

    The arguments are the same. ``save_distributed_checkpoint`` has no effect. Pass settings with the plugin:
    ``Trainer(strategy=ZarrModelParallelStrategy(), plugins=[ZarrCheckpointIO(background=True)])``.
    """


class ZarrFSDPStrategy(_TrainerStrategy, FSDPStrategy):  # type: ignore[misc]
    """Lightning's FSDPStrategy (FSDP1), with zarrckpt's checkpoints. Used as :class:`ZarrModelParallelStrategy`.

    The arguments are the same. ``state_dict_type`` has no effect. Optimizers that were saved on one device or with DDP
    cannot be loaded: UnsupportedLayoutError.
    """

    loads_numbered = False

    def __init__(self, *others: Any, **named: Any) -> None:
        super().__init__(*others, **named)
        if self._checkpoint_io is not None:
            self.checkpoint_io = self._checkpoint_io  # The setter raises TypeError for another plugin.


class _FabricStrategy(ShardedStrategy):
    """Base class of Fabric's strategies."""

    def save_checkpoint(
        self,
        path: str | PurePath,
        state: dict[str, Any],
        storage_options: Mapping[str, Any] | None = None,
        filter: Mapping[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """Save a state. ``Fabric.save`` calls it on every rank. Raises NotImplementedError for a ``filter``."""
        if filter:
            raise NotImplementedError(f"{type(self).__name__} cannot save parts of models: leave out filter=")
        objects = {key: value for key, value in state.items() if isinstance(value, torch.nn.Module | Optimizer)}
        plain = {key: value for key, value in state.items() if key not in objects}
        rest = {key: value.state_dict() if has_state(value) else value for key, value in plain.items()}
        self._save(objects, rest, path, {}, storage_options)

    def load_checkpoint(
        self,
        path: str | PurePath,
        state: dict[str, Any] | None = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Load into a state in place, and return the other entries. ``Fabric.load`` calls it on every rank.

        The other entries are those without models and optimizers. ``Fabric.load_raw`` passes a model as state: then
        the checkpoint must consist of that model's weights. Raises NotImplementedError for an optimizer as state.
        """
        url, found = self._contents(path)
        if found is None:
            return dict(super().load_checkpoint(url, state, strict, weights_only))  # type: ignore[misc]
        if isinstance(state, torch.nn.Module):
            self._load({"model": state}, url, weights_only=weights_only, strict=strict, rename={"": "model."})
            return {}
        if not isinstance(state, dict) or not state:
            raise NotImplementedError(
                f"{type(self).__name__} can load a model or a dict such as {{'model': model}}, "
                f"got {type(state).__name__}"
            )
        numbered = {key: state[key] for key in found.numbered if isinstance(state.get(key), Optimizer)}
        rest = {key: None for key in found.keys if key not in state and key not in found.objects}
        target = {key: value for key, value in state.items() if key not in numbered} | rest
        if numbered:
            self._load_numbered(numbered, url, weights_only=weights_only)
        self._load(target, url, weights_only=weights_only, strict=strict)
        state.update({key: target[key] for key in state if key not in numbered})
        return {key: target[key] for key in rest}


class ZarrFabricModelParallelStrategy(_FabricStrategy, FabricModelParallelStrategy):  # type: ignore[misc]
    """Fabric's ModelParallelStrategy (FSDP2, tensor parallelism), with zarrckpt's checkpoints.

    The arguments are the same. ``save_distributed_checkpoint`` has no effect. Pass settings with the plugin:
    ``Fabric(strategy=ZarrFabricModelParallelStrategy(...), plugins=[ZarrCheckpointIO(background=True)])``.
    """


class ZarrFabricFSDPStrategy(_FabricStrategy, FabricFSDPStrategy):  # type: ignore[misc]
    """Fabric's FSDPStrategy (FSDP1), with zarrckpt's checkpoints. Used as :class:`ZarrFabricModelParallelStrategy`.

    Optimizers that were saved on one device or with DDP cannot be loaded: UnsupportedLayoutError.
    """

    loads_numbered = False
