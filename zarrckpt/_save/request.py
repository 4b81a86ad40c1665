"""What a save is asked to do: the arguments of ``save``, checked."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from zarrckpt._commit import protocol
from zarrckpt._errors import StorageError
from zarrckpt._format.metadata import checked_metadata
from zarrckpt._jobs import Progress
from zarrckpt._options import SaveOptions, checked_options
from zarrckpt._store import StoreSpec, Url


class Run(Protocol):
    """The run that a save belongs to. Used on the coordinator only; any of these may raise why it may not save."""

    def wait_for_room(self) -> None:
        """Called before the first :meth:`begin` that puts something follows; may wait."""

    def begin(self) -> str:
        """Called before anything is put, more than once. Returns the run's id."""

    def metadata(self) -> Mapping[str, Any]:
        """What the run adds to the checkpoint's metadata."""

    def check(self) -> None:
        """Called right before the commit."""

    def committed(self) -> None:
        """Called right after the commit. Raises RunTakenOverError if another job may have removed the checkpoint."""


@dataclass(frozen=True)
class SaveRequest:
    """Where to save, and how. Pickles without clients and without secrets."""

    spec: StoreSpec
    overwrite: bool
    metadata: Mapping[str, Any]
    options: SaveOptions
    progress: Progress | None
    run: Run | None = None

    @classmethod
    def from_arguments(
        cls,
        url: Url | None,
        options: SaveOptions | None = None,
        *,
        overwrite: bool = False,
        metadata: Mapping[str, Any] | None = None,
        storage_options: Mapping[str, Any] | None = None,
        progress: Progress | None = None,
    ) -> SaveRequest:
        """From the arguments of :func:`zarrckpt.save`. Raises TypeError and ValueError naming the argument."""
        options = checked_options(options, SaveOptions)
        spec = StoreSpec(url, storage_options, options.durable, options.concurrency)
        return cls(spec, overwrite, checked_metadata(metadata), options, progress)

    def refuse_committed(self) -> None:
        """Raise what a save would where a checkpoint is committed that it must not overwrite. One request.

        Or where its run may not go on. A store that does not answer is left for the save to meet: it may be there again
        by then.
        """
        with suppress(StorageError):
            if self.run is not None:
                self.run.begin()
            if not self.overwrite:
                protocol.refuse_committed(self.spec.open())
