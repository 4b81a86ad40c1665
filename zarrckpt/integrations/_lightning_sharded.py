"""The base class of the Lightning strategies for sharded models, which save and load on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import Any, NamedTuple

from lightning.fabric.plugins import CheckpointIO

import zarrckpt
from zarrckpt.integrations._data import refuse_non_data, state_to_check
from zarrckpt.integrations._lightning_io import (
    PICKLE_HINT,
    ZarrCheckpointIO,
    is_saved_by_lightning,
    prepare_local_path,
    url_of,
    warn_of_last,
)
from zarrckpt.integrations._values import holds_sharded

_OBJECTS = "lightning.objects"
"""Key of a checkpoint's metadata: the top-level entries that were modules and optimizers."""


class _Contents(NamedTuple):
    """The top-level keys of a checkpoint."""

    keys: list[str]
    objects: list[str]
    """The keys of modules and optimizers. Empty if the checkpoint's metadata do not list them."""
    numbered: list[str]
    """The keys of optimizers whose parameters have numbers. They were saved on one device or with DDP."""


class ShardedStrategy:
    """Base class of the strategies: saves and loads on all ranks."""

    broadcast: Callable[[Any], Any]
    is_global_zero: bool
    loads_numbered = True
    """Whether optimizers can load by the numbers of their parameters. FSDP1 flattens and splits parameters."""
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
            raise TypeError(
                f"{type(self).__name__} needs a ZarrCheckpointIO as checkpoint plugin, got {type(io).__name__}"
            )
        self._checkpoint_io = io

    def _save(
        self,
        objects: Mapping[str, Any],
        rest: Mapping[str, Any],
        path: str | PurePath,
        metadata: dict[str, Any],
        storage_options: Mapping[str, Any] | None,
    ) -> None:
        """Save modules and optimizers (``objects``) from all ranks, and the rest from rank 0.

        Other ranks add sharded tensors and PerRank values of the rest.
        """
        faults: list[str] = []
        if self.is_global_zero:
            checked = {key: state_to_check(value) for key, value in objects.items()}
            faults = self.checkpoint_io.faults({**rest, **checked})
            if not faults:
                warn_of_last(rest)
                prepare_local_path(url_of(path))
        else:
            rest = _sharded_part(rest)
        url, faults = self.broadcast((url_of(path), faults))
        refuse_non_data(faults, PICKLE_HINT)
        metadata = {**metadata, _OBJECTS: sorted(objects)}
        self.checkpoint_io.save({**objects, **rest}, url, metadata, no_dist=False, storage_options=storage_options)

    def _contents(self, path: str | PurePath) -> tuple[str, _Contents | None]:
        """Return the url to load from and the contents of the checkpoint, which rank 0 reads.

        The contents are None if Lightning's own strategy saved the checkpoint.
        """
        url = url_of(path)
        found: _Contents | Exception | None = None
        self.checkpoint_io.wait()
        if self.is_global_zero:
            try:
                found = _contents_of(zarrckpt.open(url, storage_options=self.checkpoint_io.storage_options))
            except zarrckpt.CheckpointError as err:
                found = None if is_saved_by_lightning(url) else err
        url, found = self.broadcast((url, found))
        self.checkpoint_io.base = url
        if isinstance(found, Exception):
            raise found
        return url, found

    def _load(
        self,
        state: dict[str, Any],
        url: str,
        *,
        weights_only: bool | None,
        strict: bool = True,
        keys: list[str] | None = None,
        rename: dict[str, str] | None = None,
    ) -> None:
        plugin = self.checkpoint_io
        zarrckpt.load(
            state,
            url,
            strict=strict,
            keys=keys,
            rename=rename,
            allow_pickle=plugin.allow_pickle and not weights_only,
            storage_options=plugin.storage_options,
        )

    def _load_numbered(self, state: dict[str, Any], url: str, *, weights_only: bool | None) -> None:
        """Load optimizers that were saved on one device or with DDP, by the numbers of their parameters.

        The state has no module, because zarrckpt uses parameter names if it has one.
        """
        if not self.loads_numbered:
            raise zarrckpt.UnsupportedLayoutError(
                f"{url} cannot be loaded with FSDP1: it was saved on one device or with DDP, so the optimizer's "
                "parameters have numbers, and FSDP1 needs names. Use FSDP2 (ZarrModelParallelStrategy, or "
                "ZarrFabricModelParallelStrategy)"
            )
        self._load(state, url, weights_only=weights_only)


def _contents_of(checkpoint: zarrckpt.Checkpoint) -> _Contents:
    paths = [checkpoint.entry(fqn).keys for fqn in checkpoint]
    numbered = [str(path[0]) for path in paths if len(path) > 2 and path[1] == "state" and isinstance(path[2], int)]
    objects = checkpoint.metadata.get(_OBJECTS, [])
    return _Contents([*dict.fromkeys(str(path[0]) for path in paths)], objects, [*dict.fromkeys(numbered)])


def _sharded_part(rest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a state that each rank must save: sharded tensors and PerRank values."""
    parts = {key: value for key, value in rest.items() if holds_sharded(value)}
    return {key: _sharded_part(value) if isinstance(value, Mapping) else value for key, value in parts.items()}
