"""The checked arguments of ``save``."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from zarrckpt._commit import attempts
from zarrckpt._errors import CheckpointError, StorageError
from zarrckpt._events import EventSender
from zarrckpt._format.metadata import checked_metadata
from zarrckpt._jobs import Progress
from zarrckpt._options import SaveOptions, checked_options
from zarrckpt._store import StoreSpec, Url


class Run(Protocol):
    """The run that a save belongs to. Only the coordinator calls it. Each method raises if the run may not save."""

    @property
    def step(self) -> int:
        """The step that is saved. All ranks may read it."""

    def wait_for_deletions(self) -> None:
        """Wait until the run may store one more checkpoint. Called before the attempt begins."""

    def begin(self) -> str:
        """Take over the run if this job has not, and return its id. Called before the first put of the attempt.

        It may be called more than once per save.
        """

    def damaged_id(self) -> str:
        """Return the id of a damaged checkpoint that the save replaces, or "". Called after :meth:`begin`. No I/O."""

    def base_name(self) -> str:
        """Return the folder of the run's newest checkpoint, or "". No request."""

    def base_spec(self, name: str) -> StoreSpec:
        """Return the store of a checkpoint in a folder of the run. All ranks may call it."""

    def metadata(self) -> Mapping[str, Any]:
        """Return the entries that the run adds to the checkpoint's metadata."""

    def check(self) -> None:
        """Raise if the run may not commit. Called right before the commit."""

    def record_commit(self) -> None:
        """Record the commit and start the deletion of expired checkpoints. Called right after the commit.

        Raises RunTakenOverError if another job may have deleted objects of the checkpoint.
        """


@dataclass(frozen=True)
class SaveRequest:
    """The target and the options of a save. It is pickled without clients and secrets."""

    spec: StoreSpec
    overwrite: bool
    metadata: Mapping[str, Any]
    options: SaveOptions
    progress: Progress | None
    run: Run | None = None
    base: StoreSpec | None = None
    """The checkpoint whose chunks the caller wants to reuse; with a run, if the run has no checkpoint."""

    def begin_events(self, rank: int) -> EventSender:
        """Report that the save has begun on this rank, and return the sender of its other events."""
        step = None if self.run is None else self.run.step
        return EventSender.begin(self.options.on_event, "save", self.spec.url, rank, step)

    @property
    def digested(self) -> bool:
        """Whether the save stores digests of its chunks, for later saves that reuse them in an object store."""
        # A forecast has no url, but perhaps a base in the same store.
        spec = self.spec if self.spec.url else self.base
        if spec is not None and (spec.is_archive or spec.open().is_local):
            return False
        return self.options.reuse == "on" or self._reuses

    @property
    def _reuses(self) -> bool:
        is_off = self.spec.is_archive or self.options.reuse == "off"
        return not is_off and (self.run is not None or self.base is not None)

    def base_to_read(self) -> tuple[StoreSpec, str] | None:
        """Return the base of the save and its folder in the run, or None. Only the coordinator calls it."""
        if not self._reuses:
            return None
        if self.run is not None and (name := self.run.base_name()):
            return self.base_spec(name), name
        return None if self.base is None else (self.base, "")

    def base_spec(self, name: str) -> StoreSpec:
        """Return the store of the base that the coordinator has read. ``name`` is its folder in the run, or ""."""
        spec = self.base if self.run is None or not name else self.run.base_spec(name)
        if spec is None:
            raise CheckpointError(
                "rank 0 saves with a base, but this rank does not. Pass the same arguments on all ranks"
            )
        return spec

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
        base: Url | None = None,
    ) -> SaveRequest:
        """Check the arguments of :func:`zarrckpt.save`. Raises TypeError or ValueError with the argument's name.

        ``url`` is None for a writer of DCP that gets the url with each save.
        """
        options = checked_options(options, SaveOptions)
        spec = StoreSpec(url, storage_options, options.durable, options.concurrency)
        stored = None if base is None else StoreSpec(base, storage_options, options.durable, options.concurrency)
        return cls(spec, overwrite, checked_metadata(metadata), options, progress, base=stored)

    def refuse_committed(self) -> None:
        """Raise CheckpointExistsError if the save would fail because a checkpoint is committed. One request.

        With a run, begins the save there first, which raises if the run may not save. Ignores StorageError: the store
        may answer again when the save begins.
        """
        with suppress(StorageError):
            run_id, damaged_id = ("", "") if self.run is None else (self.run.begin(), self.run.damaged_id())
            if not self.overwrite:
                attempts.refuse_committed(self.spec.open(), run_id, damaged_id)
