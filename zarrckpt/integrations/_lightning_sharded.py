"""What Lightning's strategies for sharded models have in common here: saves and loads on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import Any, NamedTuple

import torch
from lightning.fabric.plugins import CheckpointIO

import zarrckpt
from zarrckpt.integrations._data import loose_parts, refuse_objects
from zarrckpt.integrations._lightning_io import ALLOW, ZarrCheckpointIO, is_lightnings, make_way, url_of, warn_of_last

_OBJECTS = "lightning.objects"
"""The member of a checkpoint's metadata that says which of its top level were modules and optimizers."""


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
        if self.is_global_zero and not faults:
            warn_of_last(rest)
            make_way(url_of(path))
        url, faults = self.broadcast((url_of(path), faults))
        refuse_objects(faults, ALLOW)
        rest = rest if self.is_global_zero else _parts_in(rest)
        metadata = {**metadata, _OBJECTS: sorted(objects)}
        self.checkpoint_io.save({**objects, **rest}, url, metadata, no_dist=False, storage_options=storage_options)

    def _contents(self, path: str | PurePath) -> tuple[str, _Contents | None]:
        """The url to load from, and what is there: rank 0 looks. None: what Lightning's own strategy has saved."""
        url = url_of(path)
        found: _Contents | Exception | None = None
        self.checkpoint_io.wait()
        if self.is_global_zero:
            try:
                found = _contents_of(zarrckpt.open(url, storage_options=self.checkpoint_io.storage_options))
            except zarrckpt.CheckpointError as err:
                found = None if is_lightnings(url) else err
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


def _contents_of(checkpoint: zarrckpt.Checkpoint) -> _Contents:
    paths = [checkpoint.path(fqn) for fqn in checkpoint]
    numbered = [str(path[0]) for path in paths if len(path) > 2 and path[1] == "state" and isinstance(path[2], int)]
    objects = checkpoint.metadata.get(_OBJECTS, [])
    return _Contents([*dict.fromkeys(str(path[0]) for path in paths)], objects, [*dict.fromkeys(numbered)])


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
