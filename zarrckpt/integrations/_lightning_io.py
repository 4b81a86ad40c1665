"""What Lightning's Trainer and Fabric have in common here: the plugin for checkpoints, and saves on all ranks."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import Any, NamedTuple

import torch
from lightning.fabric.plugins import CheckpointIO

import zarrckpt
from zarrckpt.integrations._data import loose_parts, objects_in, refuse_objects, with_plain_parameters
from zarrckpt.integrations._values import remove_or_log

ROOT = "/zarr.json"
"""What follows a checkpoint's url in that of its root document."""
_OBJECTS = "lightning.objects"
"""The member of a checkpoint's metadata that says which of its top level were modules and optimizers."""
_ALLOW = "save_hyperparameters(ignore=[...]) or ZarrCheckpointIO(allow_pickle=True)"
OPTIMIZER = re.compile(r"optimizer_\d+")
"""The key of an optimizer in a checkpoint of the Trainer, saved on all ranks."""


class ZarrCheckpointIO(CheckpointIO):  # type: ignore[misc]
    """Lightning's plugin for checkpoints: ``Trainer(plugins=[ZarrCheckpointIO()])``, and the same for ``Fabric``.

    By itself it is for one device and DDP, where Lightning saves on rank 0 alone and every rank reads all of a
    checkpoint. The strategies of this module save and load sharded models on all ranks, with its settings.

    Saves replace what is committed at their url, as Lightning's do; the old one stays readable until then. What a
    checkpoint holds beside models and optimizers must be data: numbers, strings, tensors, NumPy arrays, and dicts,
    lists, tuples and sets of them. Anything else is an UnsupportedValueError of the save that names it.

    Args:
        background: save a copy in the background (:func:`zarrckpt.async_save`). A save first waits for the one before,
            and raises its errors; so does the end of ``fit``. A checkpoint that ModelCheckpoint removes goes when the
            save that made it superfluous has committed, and stays if that failed. Default: training waits.
        allow_pickle: also save what is no data, as pickles, and load such checkpoints, which can run any code that
            they hold. Objects that have a state dict (a loss in the hyperparameters) are refused all the same.
        storage_options: options of the store, as for :func:`zarrckpt.save`. ModelCheckpoint looks at its folder with
            fsspec, which knows only the environment's.
        options: a :class:`zarrckpt.SaveOptions`.
    """

    def __init__(
        self,
        *,
        background: bool = False,
        allow_pickle: bool = False,
        storage_options: Mapping[str, Any] | None = None,
        options: zarrckpt.SaveOptions | None = None,
    ) -> None:
        self.background = background
        self.allow_pickle = allow_pickle
        self.storage_options = storage_options
        self.options = options
        self._future: zarrckpt.SaveFuture | None = None
        self._removals: list[threading.Thread] = []

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | PurePath, storage_options: Mapping[str, Any] | None = None
    ) -> None:
        """Save a checkpoint. Called on rank 0 alone. Raises what :func:`zarrckpt.save` does."""
        checkpoint = with_plain_parameters(checkpoint)
        refuse_objects(self.faults(checkpoint), _ALLOW)
        self.save(checkpoint, _url_of(path), place_in_run(checkpoint), no_dist=True, storage_options=storage_options)

    def load_checkpoint(
        self, path: str | PurePath, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a whole checkpoint, one of a sharded strategy, too; each rank that calls reads all of it.

        Args:
            map_location: a device, or its name, where the tensors are to be; anything else: the CPU.
            weights_only: True refuses pickles whatever ``allow_pickle`` says.
        """
        self.wait()
        allow_pickle = self.allow_pickle and not weights_only
        found = zarrckpt.open(_url_of(path), storage_options=self.storage_options, allow_pickle=allow_pickle)
        checkpoint = found.load(device=map_location if isinstance(map_location, str | torch.device) else "cpu")
        for key, value in checkpoint.items():
            if isinstance(value, dict) and value.keys() >= {"state", "param_groups"}:
                checkpoint[key] = _numbered(value)
        optimizers = sorted(filter(OPTIMIZER.fullmatch, checkpoint), key=lambda key: int(key.rpartition("_")[2]))
        if optimizers and "pytorch-lightning_version" in checkpoint:
            checkpoint["optimizer_states"] = [checkpoint.pop(key) for key in optimizers]
        return checkpoint

    def remove_checkpoint(self, path: str | PurePath) -> None:
        """Delete a checkpoint. Called on rank 0 alone. One that cannot be deleted, or is pinned, stays, and is logged.

        Beside a save in the background it returns at once: a thread waits for that save.
        """
        url, future = _url_of(path), self._future
        if future is None:
            remove_or_log(url, self.storage_options)
            return

        def remove_when_committed() -> None:
            if future.exception() is None:
                remove_or_log(url, self.storage_options)

        self._removals.append(threading.Thread(target=remove_when_committed, name="zarrckpt-remove"))
        self._removals[-1].start()

    def teardown(self) -> None:
        """Lightning calls it at the end of ``fit``, also where that failed: as :meth:`wait`."""
        self.wait()

    def wait(self) -> None:
        """Wait for the save in the background, and raise its errors; without one return at once.

        With ``Fabric``, call it before the process ends, on every rank that saves: Fabric has no end of its own.
        """
        future, self._future = self._future, None
        removals, self._removals = self._removals, []
        if future is not None:
            future.result()
        for removal in removals:
            removal.join()

    def save(
        self,
        state: Mapping[str, Any],
        url: str,
        metadata: dict[str, Any],
        *,
        no_dist: bool,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        """Save a state with these settings, after the save in the background if there is one; for the strategies."""
        self.wait()
        own = {**(self.storage_options or {}), **(storage_options or {})} or None
        call = zarrckpt.async_save if self.background else zarrckpt.save
        made = call(
            state, url, overwrite=True, metadata=metadata, no_dist=no_dist, storage_options=own, options=self.options
        )
        self._future = made if isinstance(made, zarrckpt.SaveFuture) else None

    def faults(self, state: Mapping[str, Any]) -> list[str]:
        """What in a state is no data, by name, as far as these settings refuse it."""
        return [*objects_in(state, allow_pickle=self.allow_pickle)]


class _Contents(NamedTuple):
    """What is at the top level of a checkpoint."""

    keys: list[str]
    objects: list[str]
    """Those that were modules and optimizers, where the checkpoint says so."""
    numbered: list[str]
    """Those that hold optimizers whose parameters have numbers: saved on one device, or by DDP."""


class Sharded:
    """What the strategies have in common: saves and loads on all ranks."""

    broadcast: Callable[[Any], Any]
    is_global_zero: bool
    takes_numbers = True
    """Whether optimizers load by the numbers of their parameters. Those of FSDP1 are flat: each rank has other ones."""
    _checkpoint_io: ZarrCheckpointIO | None

    @property
    def checkpoint_io(self) -> ZarrCheckpointIO:
        """The plugin whose settings the strategy uses."""
        if self._checkpoint_io is None:
            self._checkpoint_io = ZarrCheckpointIO()
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        if not isinstance(io, ZarrCheckpointIO):
            raise TypeError(f"{type(self).__name__} saves with a ZarrCheckpointIO, got a {type(io).__name__}")
        self._checkpoint_io = io

    def _save(
        self,
        objects: Mapping[str, Any],
        rest: Mapping[str, Any],
        path: str | PurePath,
        metadata: dict[str, Any],
        storage_options: Mapping[str, Any] | None,
    ) -> None:
        """Save objects of which each rank has a part, and the rest as rank 0 has it."""
        parts = {key: loose_parts(value) for key, value in objects.items()} if self.is_global_zero else {}
        faults = self.checkpoint_io.faults({**rest, **parts}) if self.is_global_zero else []
        url, faults = self.broadcast((_url_of(path), faults))
        refuse_objects(faults, _ALLOW)
        rest = rest if self.is_global_zero else _parts_in(rest)
        metadata = {**metadata, _OBJECTS: sorted(objects)}
        self.checkpoint_io.save({**objects, **rest}, url, metadata, no_dist=False, storage_options=storage_options)

    def _contents(self, path: str | PurePath) -> tuple[str, _Contents]:
        """The url to load from, and what is there: rank 0 looks."""
        url = _url_of(path)
        found: _Contents | Exception | None = None
        self.checkpoint_io.wait()
        if self.is_global_zero:
            try:
                found = _contents_of(zarrckpt.open(url, storage_options=self.checkpoint_io.storage_options))
            except zarrckpt.CheckpointError as err:
                found = err
        url, found = self.broadcast((url, found))
        if isinstance(found, Exception):
            raise found
        return url, found

    def _load(
        self,
        state: dict[str, Any],
        url: str,
        weights_only: bool | None,
        strict: bool = True,
        keys: list[str] | None = None,
    ) -> None:
        own = self.checkpoint_io
        zarrckpt.load(
            state,
            url,
            strict=strict,
            keys=keys,
            allow_pickle=own.allow_pickle and not weights_only,
            storage_options=own.storage_options,
        )

    def _load_numbered(self, state: dict[str, Any], url: str, weights_only: bool | None) -> None:
        """Load optimizers that were saved on one device or by DDP: without the module, parameters have numbers."""
        if not self.takes_numbers:
            raise zarrckpt.UnsupportedLayoutError(
                f"{url} was saved on one device or by DDP: the optimizer's parameters have numbers there, and FSDP1 "
                "needs their names. FSDP2 (ModelParallelStrategy) loads it"
            )
        self._load(state, url, weights_only)


def _url_of(path: str | PurePath) -> str:
    url = str(path)
    if isinstance(path, PurePath):
        url = re.sub("^([a-z][a-z0-9+.-]+):/(?!/)", r"\1://", url)  # a Path has one slash of two
    return url.removesuffix(ROOT)


def place_in_run(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """What of a Trainer's checkpoint is to be seen without loading it."""
    names = {"global_step": "step", "epoch": "epoch"}
    return {name: checkpoint[key] for key, name in names.items() if type(checkpoint.get(key)) is int}


def _contents_of(checkpoint: zarrckpt.Checkpoint) -> _Contents:
    paths = [checkpoint.path(fqn) for fqn in checkpoint]
    numbered = [str(path[0]) for path in paths if len(path) > 2 and path[1] == "state" and isinstance(path[2], int)]
    objects = checkpoint.metadata.get(_OBJECTS, [])
    return _Contents([*dict.fromkeys(str(path[0]) for path in paths)], objects, [*dict.fromkeys(numbered)])


def _numbered(optimizer: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's state dict with numbers for its parameters, as one device has them; they had names or numbers."""
    names = [name for group in optimizer["param_groups"] for name in group["params"]]
    numbers = {name: number for number, name in enumerate(names)}
    return {
        **optimizer,
        "state": {numbers.get(name, name): slots for name, slots in optimizer["state"].items()},
        "param_groups": [
            {**group, "params": [numbers[name] for name in group["params"]]} for group in optimizer["param_groups"]
        ],
    }


def _parts_in(rest: Mapping[str, Any]) -> dict[str, Any]:
    """What of a state each rank has to save: sharded tensors, and what a PerRank holds."""

    def shared(value: Any) -> bool:
        if isinstance(value, Mapping | list):
            return any(map(shared, value.values() if isinstance(value, Mapping) else value))
        sharded = isinstance(value, torch.Tensor) and type(value) not in (torch.Tensor, torch.nn.Parameter)
        return sharded or isinstance(value, zarrckpt.PerRank)

    return {
        key: _parts_in(value) if isinstance(value, Mapping) else value for key, value in rest.items() if shared(value)
    }
