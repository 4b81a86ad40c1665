"""Lightning's checkpoints as Zarr hierarchies: Trainer and Fabric on one device, with DDP, FSDP2, TP and FSDP1.

Sharded strategies put the model and the optimizers into the state as they are, so any mesh loads them. What Lightning
keeps beside them (loops, callbacks, schedulers, hyperparameters) has Lightning's own names.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import Any, TypeVar, cast

import torch
from torch.optim import Optimizer

import zarrckpt
from zarrckpt._store._url import normalize
from zarrckpt.integrations import _framework

_framework.require("lightning", "2.6.6", "2.7", "lightning")

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
    ROOT,
    ZarrCheckpointIO,
    folder_text,
    place_in_run,
)
from zarrckpt.integrations._lightning_sharded import Sharded  # noqa: E402

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
    """Lightning's ModelCheckpoint, for folders in object stores: ``fit(ckpt_path="last")`` finds checkpoints there.

    Lightning's own forgets that they were at ``s3://``, and begins anew; and there it deletes what belongs to another
    run: the checkpoint from which this one has begun. This one also passes over checkpoints whose save was broken off,
    in any folder. The arguments are the same, and what ModelCheckpoint has kept in a checkpoint is taken over.

    ``fit`` raises TypeError if the Trainer would save with anything but :class:`ZarrCheckpointIO` or a strategy of this
    module.
    """

    def __init__(self, dirpath: str | PurePath | None = None, *others: Any, **named: Any) -> None:
        # Lightning would take "file://..." and Path("s3://...") for names of local folders.
        super().__init__(None if dirpath is None else normalize(dirpath), *others, **named)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Refuse a Trainer whose checkpoints are Lightning's own, on every rank, before training. Makes no request."""
        if stage == "fit":
            _require_zarr(trainer.strategy, self.dirpath)
        super().setup(trainer, pl_module, stage)
        if isinstance(plugin := trainer.strategy.checkpoint_io, ZarrCheckpointIO):
            # Only there may a checkpoint name others that Lightning opens and deletes.
            plugin.folders |= {folder_text(f"{one.dirpath}") for one in trainer.checkpoint_callbacks if one.dirpath}

    @property
    def state_key(self) -> str:
        """That of Lightning's own: a run can change from one to the other."""
        return str(super().state_key).removeprefix("Zarr")

    def state_dict(self) -> dict[str, Any]:
        """As Lightning's, and a sign that it is not Lightning's own."""
        return {**super().state_dict(), FINDS_LAST: True}

    def file_exists(self, filepath: Any, trainer: Any) -> bool:
        """Whether a name is taken, as rank 0 sees it: by a checkpoint, not by a save that was broken off."""
        if str(filepath) in self.best_k_models:  # it may be in the background
            return True
        taken = trainer.is_global_zero and self._is_checkpoint(str(filepath))
        return bool(trainer.strategy.reduce_boolean_decision(taken, all=False))

    def _find_last_checkpoints(self, trainer: Any) -> set[str]:
        self._fs.invalidate_cache()
        found = {path for path in super()._find_last_checkpoints(trainer) if self._is_checkpoint(path)}
        if getattr(self._fs, "local_file", False):
            return found
        # Lightning asks when each was modified, which stores know of objects only.
        roots = {path: f"{path}{ROOT}" for path in found}
        return {self._fs.unstrip_protocol(root if self._fs.exists(root) else path) for path, root in roots.items()}

    def _is_checkpoint(self, path: str) -> bool:
        """Whether there is a committed one, or one that Lightning's own plugin or strategies have saved."""
        self._fs.invalidate_cache()  # fsspec does not know what zarrckpt has written since
        return any(map(self._fs.exists, (f"{path}{ROOT}", f"{path}/meta.pt"))) or bool(self._fs.isfile(path))

    def _should_remove_checkpoint(self, trainer: Any, previous: str, current: str) -> bool:
        """In object stores, too, not what is outside this run's folder, nor what the Trainer has resumed from."""
        if not super()._should_remove_checkpoint(trainer, previous, current):
            return False
        own = f"{self.dirpath}".rstrip("/") + "/"
        resumed_from = str(trainer.ckpt_path or "").removesuffix(ROOT)
        return "://" not in previous or (previous.startswith(own) and previous != resumed_from)

    def _remove_checkpoint(self, trainer: Any, filepath: str) -> None:
        """The link is changed before what it leads to is removed."""
        if self.save_last == "link" and self._last_checkpoint_saved and self.last_model_path:
            self._link_checkpoint(trainer, self._last_checkpoint_saved, self.last_model_path)
        super()._remove_checkpoint(trainer, filepath)

    @staticmethod
    def _link_checkpoint(trainer: Any, filepath: str, linkpath: str) -> None:
        """For ``save_last="link"``: beside a save in the background, once it has committed."""
        plugin = trainer.strategy._checkpoint_io
        if not isinstance(plugin, ZarrCheckpointIO):
            ModelCheckpoint._link_checkpoint(trainer, filepath, linkpath)
        elif trainer.is_global_zero and filepath != linkpath:
            plugin.link_checkpoint(filepath, linkpath)


def _require_zarr(strategy: Any, folder: Any) -> None:
    """Raise TypeError if a strategy does not save and load with zarrckpt."""
    if isinstance(strategy, Sharded):
        return
    kind = type(strategy).__name__
    if type(strategy).load_checkpoint is not Strategy.load_checkpoint:
        raise TypeError(
            f"ZarrModelCheckpoint cannot save to {folder} with a {kind}, which writes and reads files of its own: use "
            "Trainer(strategy=ZarrModelParallelStrategy(...)), or ZarrFSDPStrategy(...)"
        )
    plugin = strategy.checkpoint_io
    while isinstance(plugin, _WrappingCheckpointIO):
        plugin = plugin.checkpoint_io
    if not isinstance(plugin, ZarrCheckpointIO):
        raise TypeError(
            f"ZarrModelCheckpoint cannot save to {folder} with a {type(plugin).__name__}, which writes pickles: use "
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
    """``Model.load_from_checkpoint`` for a url: build a LightningModule of its hyperparameters, with its weights.

    One process calls it, or each by itself; optimizers are not read. It holds the weights twice while it builds.

    Args:
        model: the class of the LightningModule (or LightningDataModule).
        url: of a checkpoint that the Trainer has saved with any strategy of this module.
        device: where the weights are to be.
        strict: as Lightning has it; default: the model's ``strict_loading``.
        storage_options, allow_pickle: as for :class:`ZarrCheckpointIO`.
        hyperparameters: arguments of the model's that replace those in the checkpoint.

    Raises what :func:`zarrckpt.open` does; UnsafeValueError without ``allow_pickle`` for hyperparameters that name code
    which builds the model (``_instantiator``, by LightningCLI); RuntimeError for a model with other weights.
    """
    found = zarrckpt.open(url, storage_options=storage_options, allow_pickle=allow_pickle)
    keys = {str(found.path(fqn)[0]) for fqn in found} - {"optimizer_states"}
    checkpoint = found.load(keys=[key for key in keys if not OPTIMIZER.fullmatch(key)])
    if not allow_pickle:
        _refuse_instantiators(checkpoint, found.url)
    stream = io.BytesIO()
    torch.save(checkpoint, stream)
    stream.seek(0)
    options = {} if strict is None else {"strict": strict}
    # Its bytes are made here: what the checkpoint may hold has been decided above.
    made = model.load_from_checkpoint(stream, map_location=device, weights_only=False, **options, **hyperparameters)  # type: ignore[attr-defined]
    return cast(_Module, made)


def _refuse_instantiators(checkpoint: Mapping[str, Any], url: str) -> None:
    """Raise UnsafeValueError for hyperparameters that name a function and classes for Lightning to import and call."""
    for key, parameters in checkpoint.items():
        # Lightning also takes a list of pairs.
        listed = isinstance(parameters, list | tuple | set | frozenset)
        pairs = [pair for pair in parameters if isinstance(pair, list | tuple) and pair] if listed else []
        if "_instantiator" in (parameters if isinstance(parameters, Mapping) else [pair[0] for pair in pairs]):
            raise zarrckpt.UnsafeValueError(
                f"{url}: {key!r} names code that builds the model (_instantiator), as LightningCLI saves it. If you "
                "trust the checkpoint, pass allow_pickle=True"
            )


class _TrainerSharded(Sharded):
    """Of the Trainer's strategies."""

    model: Any
    optimizers: list[Optimizer]
    lightning_module: Any
    _dumped: dict[str, Any]

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The model's state dict, sharded: nothing is gathered or copied. Collective with FSDP1."""
        from torch.distributed.checkpoint.state_dict import get_model_state_dict

        self._dumped = get_model_state_dict(self.model)
        return dict(self._dumped)

    def optimizer_state(self, optimizer: Any) -> Any:
        """The optimizer itself, which the save takes apart."""
        return getattr(optimizer, "_optimizer", optimizer)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | PurePath, storage_options: Mapping[str, Any] | None = None
    ) -> None:
        """Save what Lightning has put together; every rank calls. Raises what :func:`zarrckpt.save` does."""
        metadata, dumped = place_in_run(checkpoint), self.__dict__.pop("_dumped", {})
        weights, optimizers = checkpoint.pop("state_dict"), checkpoint.pop("optimizer_states", [])
        if weights.keys() == dumped.keys() and all(value is dumped[name] for name, value in weights.items()):
            weights = self.model  # with it zarrckpt knows the names of the optimizers' parameters
        else:  # a hook has changed what is to be saved
            from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

            optimizers = [get_optimizer_state_dict(self.model, optimizer) for optimizer in optimizers]
        objects = {"state_dict": weights} | {f"optimizer_{i}": optimizer for i, optimizer in enumerate(optimizers)}
        self._save(objects, with_plain_parameters(checkpoint), filepath, metadata, storage_options)

    def load_checkpoint(self, checkpoint_path: str | PurePath, weights_only: bool | None = None) -> dict[str, Any]:
        """Load the model, when fitting the optimizers, and return the rest; every rank calls."""
        url, found = self._contents(checkpoint_path)
        if found is None:
            return self.checkpoint_io.without_foreign_paths(super().load_checkpoint(url, weights_only), url)  # type: ignore[misc]
        fitting = self.lightning_module.trainer.state.fn == TrainerFn.FITTING
        optimizers: dict[str, Any] = {f"optimizer_{i}": one for i, one in enumerate(self.optimizers if fitting else [])}
        rest = {key: None for key in found.keys if not OPTIMIZER.fullmatch(key)}
        rest.pop("state_dict", None)
        if "optimizer_states" in rest:
            del rest["optimizer_states"]
            if optimizers:
                self._load_numbered({"optimizer_states": [*optimizers.values()]}, url, weights_only)
                optimizers = {}
        if not self.lightning_module.strict_loading:
            if optimizers:
                self._load({"state_dict": self.model, **optimizers}, url, weights_only, keys=[*optimizers])
            optimizers = {}
        state = {**rest, "state_dict": self.model, **optimizers}
        self._load(state, url, weights_only, strict=self.lightning_module.strict_loading)
        return self.checkpoint_io.without_foreign_paths({key: state[key] for key in rest}, url)

    def teardown(self) -> None:
        """Wait for the save in the background, too, and raise its errors."""
        try:
            self.checkpoint_io.teardown()
        finally:
            super().teardown()  # type: ignore[misc]


class ZarrModelParallelStrategy(_TrainerSharded, ModelParallelStrategy):  # type: ignore[misc]
    """Lightning's ModelParallelStrategy (FSDP2, tensor parallelism), with checkpoints as Zarr.

    The arguments are the same; ``save_distributed_checkpoint`` means nothing here. Settings come with
    ``Trainer(strategy=ZarrModelParallelStrategy(), plugins=[ZarrCheckpointIO(background=True)])``.
    """


class ZarrFSDPStrategy(_TrainerSharded, FSDPStrategy):  # type: ignore[misc]
    """Lightning's FSDPStrategy (FSDP1), with checkpoints as Zarr; as :class:`ZarrModelParallelStrategy`.

    The arguments are the same; ``state_dict_type`` means nothing here. It does not go on with optimizers that one
    device or DDP has saved: UnsupportedLayoutError.
    """

    takes_numbers = False


class _FabricSharded(Sharded):
    """Of Fabric's strategies."""

    def save_checkpoint(
        self,
        path: str | PurePath,
        state: dict[str, Any],
        storage_options: Mapping[str, Any] | None = None,
        filter: Mapping[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """Save a state, as ``Fabric.save`` calls it on every rank. A ``filter`` is refused, as Lightning does."""
        if filter:
            raise NotImplementedError(f"{type(self).__name__} saves whole models: leave out filter=")
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
        """Load into a state, in place, and return the rest, as ``Fabric.load`` calls it on every rank.

        The rest has no models and optimizers. ``Fabric.load_raw`` calls it with a model, whose weights are the
        whole checkpoint. Raises NotImplementedError for an optimizer alone.
        """
        url, found = self._contents(path)
        if found is None:
            return dict(super().load_checkpoint(url, state, strict, weights_only))  # type: ignore[misc]
        if isinstance(state, torch.nn.Module):
            from torch.distributed.checkpoint.state_dict import get_model_state_dict

            self._load(get_model_state_dict(state), url, weights_only, strict)
            return {}
        if not isinstance(state, dict) or not state:
            raise NotImplementedError(f"{type(self).__name__} loads a model, or a dict such as {{'model': model}}")
        numbered = {key: state[key] for key in found.numbered if isinstance(state.get(key), Optimizer)}
        rest = {key: None for key in found.keys if key not in state and key not in found.objects}
        target = {key: value for key, value in state.items() if key not in numbered} | rest
        if numbered:
            self._load_numbered(numbered, url, weights_only)
        self._load(target, url, weights_only, strict)
        state.update({key: target[key] for key in state if key not in numbered})
        return {key: target[key] for key in rest}


class ZarrFabricModelParallelStrategy(_FabricSharded, FabricModelParallelStrategy):  # type: ignore[misc]
    """Fabric's ModelParallelStrategy (FSDP2, tensor parallelism), with checkpoints as Zarr.

    The arguments are the same; ``save_distributed_checkpoint`` means nothing here. Settings come with
    ``Fabric(strategy=ZarrFabricModelParallelStrategy(...), plugins=[ZarrCheckpointIO(background=True)])``.
    """


class ZarrFabricFSDPStrategy(_FabricSharded, FabricFSDPStrategy):  # type: ignore[misc]
    """Fabric's FSDPStrategy (FSDP1), with checkpoints as Zarr; as :class:`ZarrFabricModelParallelStrategy`.

    It does not load optimizers that one device or DDP has saved: UnsupportedLayoutError.
    """

    takes_numbers = False
