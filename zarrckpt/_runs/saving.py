"""``StepSaver``: the saves of a run's steps, one at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

from zarrckpt._errors import StorageError, log
from zarrckpt._format.metadata import MAX_RUN_METADATA, checked_metadata
from zarrckpt._options import SaveOptions
from zarrckpt._ranks.group import Ranks
from zarrckpt._reports import SaveReport
from zarrckpt._runs.coordinator import RunCoordinator, RunSave
from zarrckpt._runs.folders import name_of
from zarrckpt._runs.keep import checked_metrics
from zarrckpt._runs.preemption import Preemption
from zarrckpt._save.background import SaveFuture, save_in_background, wait_unreported
from zarrckpt._save.request import SaveRequest
from zarrckpt._save.steps import save_on_ranks
from zarrckpt._state import objects
from zarrckpt._state.local_state import LocalState
from zarrckpt._store import StoreSpec
from zarrckpt._store._archive import SUFFIX

Format = Literal["folder", "zip"]

MIN_TIMEOUT_SECONDS = 5.0
"""Minimum timeout in seconds between the ranks of a save before pre-emption."""


@dataclass(frozen=True)
class StepState:
    """A step of the training, as it is passed to :meth:`CheckpointManager.step`."""

    step: int
    state: Mapping[str, Any]
    metrics: Mapping[str, Any] | None
    metadata: Mapping[str, Any] | None


class StepSaver:
    """Saves the steps of a run, one after the other. All ranks make the same calls."""

    def __init__(
        self,
        spec: StoreSpec,
        options: SaveOptions,
        ranks: Ranks,
        coordinator: RunCoordinator,
        *,
        format: Format,
        background: bool,
    ) -> None:
        """``spec`` is the run's folder. ``background`` is whether saves return before they have ended.

        Raises ValueError and StorageError if the run cannot have this format.
        """
        self._spec = spec
        self._options = options
        self._ranks = ranks
        self._coordinator = coordinator
        self.suffix = _suffix_of(format, spec, options, ranks)
        """The end of the names of checkpoints."""
        self._background = background
        self._origin: StoreSpec | None = None
        """The checkpoint of another run whose chunks the first save of this run reuses."""
        self._unreported: SaveFuture | None = None
        """The last save, until its end was awaited and its error raised or logged."""
        self._last: tuple[int, SaveFuture] | None = None
        """The step and the future of the last save."""

    @property
    def has_ended(self) -> bool:
        """Whether no save is running whose error could still be raised."""
        return self._unreported is None

    @property
    def last_step(self) -> int | None:
        """The step of the last save of this job, or None."""
        return None if self._last is None else self._last[0]

    def future_of(self, step: int) -> SaveFuture | None:
        """Return the future of a step's save, or None if there is none or :meth:`wait` has raised its error."""
        if self._last is None or self._last[0] != step:
            return None
        future = self._last[1]
        # Until the save has ended, some ranks may not know of a failure, but all ranks must do the same.
        return None if self._unreported is not future and _failed(future) else future

    def save(self, given: StepState) -> SaveFuture:
        """Save a step after the end of the last save, whose error is raised. A step is not saved twice."""
        if (saved := self.future_of(given.step)) is not None:
            wait_unreported(saved)
            if not _failed(saved):
                return saved
        self.wait()
        return self._begin(given)

    def save_before_preemption(self, given: StepState, preemption: Preemption) -> SaveFuture:
        """Save a step before pre-emption, after a running save. Raises CheckpointError when the grace period ends."""
        self._coordinator.retention.skip_waits()
        if self._unreported is not None:
            preemption.wait_for(self._unreported, given.step)
            if (error := self._unreported.exception()) is not None:
                # Logged only, so that this step is saved.
                log.error("the run %s: the previous save failed: %s: %s", self._spec.url, type(error).__name__, error)
            self._unreported = None
        if (saved := self.future_of(given.step)) is not None:
            return saved
        future = self._begin(given, preemption)
        preemption.wait_for(future, given.step)
        self._unreported = None
        future.result()
        return future

    def wait(self) -> SaveReport | None:
        """Wait for the last save, and return its report, or None. Raises its error, once."""
        if (future := self._unreported) is None:
            return None
        # Ctrl-C interrupts this wait but not the save, so the save is kept until it has ended.
        future.exception()
        self._unreported = None
        return future.result()

    def restart(self) -> None:
        """Continue after a restore. A step that is repeated then is saved again."""
        self._last = None

    def begin_from(self, origin: StoreSpec) -> None:
        """Reuse the chunks of a checkpoint of another run, if its files can be compared or the user wants it."""
        # In an object store, whoever can write to the base chooses the bytes of the new checkpoint.
        if self._options.reuse == "on" or origin.open().is_local:
            self._origin = origin

    def _begin(self, given: StepState, preemption: Preemption | None = None) -> SaveFuture:
        """Begin a save. With ``preemption``, it fails when the grace period ends."""
        request = self._request(given, preemption)
        objects.refuse_swapped_arguments(given.state, request.spec.url, "save")
        if self._background:
            future = save_in_background(given.state, request, self._ranks)
        else:
            future = SaveFuture(request.spec.url)
            # Outside of the future, so that this call raises the error.
            report = save_on_ranks(partial(LocalState.from_user_state, given.state), request, self._ranks)
            future.run(lambda: report)
        self._unreported, self._last = future, (given.step, future)
        return future

    def _request(self, given: StepState, preemption: Preemption | None) -> SaveRequest:
        name = name_of(given.step, self.suffix)
        step_and_metrics = {"step": given.step, **checked_metrics(given.metrics)}
        others = checked_metadata(given.metadata)
        if twice := sorted(step_and_metrics.keys() & others.keys()):
            raise ValueError(f"{twice[0]!r} was passed twice: as the step or a metric, and in metadata")
        metadata = checked_metadata({**step_and_metrics, **others}, MAX_RUN_METADATA)
        # A missing metric must not prevent the save before pre-emption.
        check_metric = bool(given.metrics) and preemption is None
        # Half of the time for which the other ranks wait for the coordinator.
        patience = self._options.timeout / 2
        run = RunSave(self._coordinator, given.step, name, metadata, patience, check_metric=check_metric)
        options, progress = self._options, None
        if preemption is not None:
            # Do not wait for a lost rank beyond the grace period.
            timeout = min(options.timeout, max(preemption.seconds_left(), MIN_TIMEOUT_SECONDS))
            options = dataclasses.replace(options, timeout=timeout)
            progress = partial(_refuse_late, preemption, given.step)
        return SaveRequest(self._spec.child(name), False, metadata, options, progress, run, self._origin)


def _suffix_of(format: Format, spec: StoreSpec, options: SaveOptions, ranks: Ranks) -> str:
    if format not in get_args(Format):
        raise ValueError(f"format must be one of {', '.join(get_args(Format))}, got {format!r}")
    if spec.is_archive:
        raise ValueError(f"a run needs a folder, but {spec.url!r} is the url of an archive: pass another url")
    if format == "folder":
        return ""
    if options.reuse == "on":
        raise ValueError(
            "reuse='on' cannot be used with format='zip', because only whole files and objects can be reused: pass "
            "reuse='auto' or format='folder'"
        )
    if ranks.size > 1 and not spec.open().is_local:
        raise StorageError(
            f"{spec.url}: in an object store, an archive is written by one process, but {ranks.size} ranks save. Use "
            "format='folder'"
        )
    return SUFFIX


def _refuse_late(preemption: Preemption, step: int, done: int, total: int) -> None:
    preemption.refuse_late_save(step)


def _failed(future: SaveFuture) -> bool:
    return future.done() and wait_unreported(future) is not None
