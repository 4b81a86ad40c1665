"""``CheckpointManager``: save and delete a run's checkpoints, resume from the newest, and save before pre-emption."""

from __future__ import annotations

import dataclasses
import operator
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any, NoReturn, Self

import torch.distributed as dist

from zarrckpt._commit.discovery import find_checkpoints, load_root
from zarrckpt._commit.listings import list_below
from zarrckpt._commit.marker import pin_id_of, pin_key
from zarrckpt._commit.pins import put_pin
from zarrckpt._errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointRemovedError,
    CorruptCheckpointError,
    log,
    warn,
)
from zarrckpt._format.metadata import MAX_RUN_METADATA, checked_metadata
from zarrckpt._jobs import check_limits
from zarrckpt._load.steps import LoadRequest, load_on_ranks
from zarrckpt._options import LoadOptions, SaveOptions, checked_options
from zarrckpt._ranks.group import Ranks
from zarrckpt._ranks.rounds import open_rounds
from zarrckpt._reports import LoadReport, SaveReport
from zarrckpt._runs import signals as process_signals
from zarrckpt._runs.coordinator import Chosen, Coordinator, RunSave
from zarrckpt._runs.keep import Keep, checked_metrics
from zarrckpt._runs.preemption import Preemption
from zarrckpt._runs.steps import name_of, refuse_unreadable, skip_warning, step_of
from zarrckpt._save.background import SaveFuture, save_in_background
from zarrckpt._save.request import SaveRequest
from zarrckpt._save.steps import save_on_ranks
from zarrckpt._state import objects
from zarrckpt._state.local_state import LocalState
from zarrckpt._store import Store, StoreSpec, Url

MIN_TIMEOUT_SECONDS = 5.0
"""Minimum timeout in seconds between the ranks of a save before pre-emption."""

_PIN = pin_id_of("CheckpointManager.pin")


class CheckpointManager:
    """A manager of the checkpoints of one training run in one folder: it saves, deletes, finds and restores them.

    Every rank creates a manager, after ``init_process_group``, and all ranks make the same calls in the same order.
    Without ``torch.distributed``, one process creates it. The folder has one checkpoint for each saved step, named
    ``step-00000500`` and so on, and the run's document, ``@run/zarr.json``.

    .. code-block:: python

        manager = zarrckpt.CheckpointManager("s3://bucket/run", keep=zarrckpt.Keep(newest=3), save_every=500)
        step = manager.restore(state)
        for step in range((step or 0) + 1, steps + 1):
            ...
            manager.step(step, state, metrics={"val_loss": loss})
            if manager.preempted:
                break
        manager.close()

    Args:
        url: the url of the run's folder, as for :func:`save`.
        keep: the rules that choose the checkpoints to keep, see :class:`Keep`. The others are deleted in the
            background, after the save that makes them superfluous. Default: all are kept. Only checkpoints of this run
            are deleted, and no pinned ones. If more than two checkpoints would be superfluous after a save, the save
            first waits for deletions.
        save_every: :meth:`step` saves each time it reaches a multiple of this number. Default: only before pre-emption.
        signals: names of the signals that announce pre-emption (default: ``SIGTERM``). A signal on any rank leads to a
            save of the same step on all ranks. A second signal, more than a second after the first, ends its process at
            once. The previous handlers are called too, and :meth:`close` restores them. The manager must be created in
            the main thread, except with ``()``, which handles no signals.
        notice: a callable without arguments that returns True if this machine will be taken away, as a cloud announces
            it. A thread of each rank calls it about once a second.
        grace: the seconds after a signal or notice within which the save must end (default 25, because torchrun kills
            after 30). They must suffice for two steps of training and a save.
        background: whether to save with :func:`async_save` (default) or with :func:`save`, which needs no copy in
            memory but blocks the training.
        init_from: the url of another run's checkpoint from which this run begins if it has no checkpoint (a fork). It
            is pinned until this run has a checkpoint. A restarted job with another ``init_from``, or without one,
            leaves the pin and warns. ``storage_options`` apply to this url too.
        init_keys: the keys to load from ``init_from``, as ``keys`` of :func:`load`, for example ``"model"`` for the
            weights. Default: all.
        process_group: the ranks that save together (default: all).
        no_dist: save from this process only, as in :func:`save`.
        storage_options: as in :func:`save`.
        options: the layout and the transfer of bytes in all saves, see :class:`SaveOptions`.

    A ``with`` block closes the manager at its end. The constructor makes no request. Raises TypeError and ValueError
    for invalid arguments.
    """

    def __init__(
        self,
        url: Url,
        *,
        keep: Keep | None = None,
        save_every: int | None = None,
        signals: Sequence[str] = ("SIGTERM",),
        notice: Callable[[], bool] | None = None,
        grace: float = 25.0,
        background: bool = True,
        init_from: Url | None = None,
        init_keys: str | Iterable[str] | None = None,
        process_group: dist.ProcessGroup | None = None,
        no_dist: bool = False,
        storage_options: Mapping[str, Any] | None = None,
        options: SaveOptions | None = None,
    ) -> None:
        if keep is not None and not isinstance(keep, Keep):
            raise TypeError(f"keep must be a zarrckpt.Keep, got a {type(keep).__name__}")
        if save_every is not None:
            check_limits(save_every=save_every)
        if isinstance(signals, str):
            raise TypeError(f"signals must be a sequence of names, got a str: pass ({signals!r},)")
        if not grace > 0:
            raise ValueError(f"grace must be greater than 0 seconds, got {grace}")
        self._options = checked_options(options, SaveOptions)
        self._spec = StoreSpec(url, storage_options, self._options.durable, self._options.concurrency)
        self._source, self._source_keys = StoreSpec(init_from, storage_options), init_keys
        self._ranks = Ranks(process_group, no_dist)
        self._coordinator = Coordinator(self._spec, keep, self._source)
        self._save_every = save_every
        self._background = background
        self._last_step = -1
        """The greatest step that was saved or passed to :meth:`step`."""
        self._step_before = -1
        """The value of ``_last_step`` before the last call of :meth:`step`."""
        self._done_step = -1
        """The step of the last call of :meth:`step` that raised no error."""
        self._last_report: LoadReport | None = None
        self._damaged: frozenset[str] = frozenset()
        self._saving: SaveFuture | None = None
        self._saved: tuple[int, SaveFuture] | None = None
        self._preempted = False
        self._closed = False
        self._ended = False
        self._process = os.getpid()
        self._watch: process_signals.Watch | None = None
        self._preemption: Preemption | None = None
        if signals or notice is not None:
            watch = Preemption(self._ranks, f"the run {self._spec.url}", self._options.timeout, grace, notice)
            self._preemption = watch
            try:
                if signals:
                    self._watch = process_signals.dispatcher.watch(signals, watch.note_notice)
                    # A manager that is garbage-collected without close() must not handle signals any more.
                    weakref.finalize(self, _end_watch, self._watch).atexit = False
            except BaseException:
                watch.close()
                raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        try:
            self.close()
        except CheckpointError as err:
            log.error("the run %s: %s: %s", self._spec.url, type(err).__name__, err)

    @property
    def preempted(self) -> bool:
        """Whether the save before pre-emption has ended or failed, so that the training loop should end.

        The same on all ranks. It changes only in :meth:`step`, and in :meth:`close` on a rank that received a notice
        after its last step.
        """
        return self._preempted

    # -- to resume

    @property
    def last_report(self) -> LoadReport | None:
        """The :class:`LoadReport` of this rank's last :meth:`restore`, or None if it loaded no checkpoint."""
        return self._last_report

    def restore(
        self,
        state: dict[str, Any],
        *,
        step: int | None = None,
        rewind: bool = False,
        keys: str | Iterable[str] | None = None,
        rename: Mapping[str, str] | Callable[[str], str] | None = None,
        strict: bool = True,
        allow_pickle: bool = False,
        allow_cast: bool = False,
        options: LoadOptions | None = None,
    ) -> int | None:
        """Load the run's newest checkpoint into a state in place. Return its step, or None if no checkpoint exists yet.

        All ranks call it and get the same result. The newest checkpoint has the greatest step. If it is damaged, or its
        root document is missing, the next older one is loaded with a warning. If all are damaged,
        CorruptCheckpointError lists them.

        This job takes over the run: another job that still uses the run can no longer save or delete there. If the
        folder is not writable, the checkpoint is loaded with a warning. To read a checkpoint of a run that another job
        uses, call :func:`latest` and :func:`load` instead.

        If the run has no checkpoint and ``init_from`` was given, that checkpoint is loaded. The result is its step, or
        None if ``init_keys`` selected a part of it.

        Only the coordinator reads the folder: all pages of one listing and three requests. A few more are needed for
        each skipped checkpoint, and for a run without checkpoints. The load costs the same as :func:`load`.

        Args:
            state: as for :func:`load`.
            step: load the checkpoint of this step instead of the newest. If it is damaged, no other step is loaded.
                Saves up to the newest step are then refused.
            rewind: with ``step``: first remove all later checkpoints, so that the run continues from this step. If one
                of them is pinned or does not belong to this run, an error is raised and none is removed. The same
                happens if a save of a later step that does not belong to this run may still commit.
            keys: load a part, as in :func:`load`. Default: everything that has a target.
            rename: load entries under other names, as in :func:`load`.
            strict: raise an error for targets that the checkpoint lacks and for entries without a target, as in
                :func:`load`.
            allow_pickle: also load values that were saved with pickle, which can run any code. Default:
                UnsafeValueError.
            allow_cast: convert dtypes that differ instead of raising an error (default False).
            options: the transfer of bytes, see :class:`LoadOptions`.

        Raises CheckpointNotFoundError if ``step`` or ``init_from`` does not exist, or all checkpoints of the run are
        gone. Raises ForeignObjectsError if the url is a checkpoint or inside one, RunTakenOverError if another job has
        taken over the run since an earlier call, StorageError if the folder of a later step cannot be read, and the
        errors of :func:`load`. With ``rewind`` also CheckpointPinnedError and ForeignObjectsError. An error on one rank
        is raised on all.
        """
        objects.refuse_swapped(state, self._spec.url, "restore")
        references = sys.getrefcount(state)
        droppable = objects.droppable_keys(state, references)
        if rewind and step is None:
            raise ValueError("rewind=True needs a step to return to: restore(state, step=..., rewind=True)")
        step = None if step is None else operator.index(step)
        self.wait()
        self._last_report = None
        request = LoadRequest.from_arguments(
            None, options, strict=strict, keys=keys, rename=rename, allow_pickle=allow_pickle, allow_cast=allow_cast
        )
        request = dataclasses.replace(request, droppable=droppable)
        unreadable: frozenset[str] = frozenset()
        while True:
            chosen = self._choose(step, rewind, unreadable, request.options.timeout)
            if not chosen.name:
                found = self._restore_source(state, request, chosen)
                self._continue_from(found, chosen)
                return found
            spec = self._spec.child(chosen.name)
            try:
                self._last_report = load_on_ranks(state, dataclasses.replace(request, spec=spec), self._ranks)
            except (CorruptCheckpointError, CheckpointRemovedError, CheckpointNotFoundError) as err:
                if chosen.step is None or (step is not None and not chosen.others):
                    raise
                unreadable |= {chosen.name, *(chosen.damaged if step is None else ())}
                which = "the checkpoint before it" if step is None else "another one of this step"
                warn(f"{spec.url} cannot be restored, so {which} is restored instead: {type(err).__name__}: {err}")
                continue
            self._continue_from(chosen.step, chosen)
            return chosen.step

    def _continue_from(self, step: int | None, chosen: Chosen) -> None:
        self._damaged = frozenset(chosen.damaged)
        # A step that is repeated after a restore is saved again.
        self._last_step = self._step_before = self._done_step = -1 if step is None else step
        self._saved = None

    def _choose(self, step: int | None, rewind: bool, unreadable: frozenset[str], timeout: float) -> Chosen:
        with open_rounds(self._ranks, f"the restore of {self._spec.url}", timeout) as rounds:
            return rounds.merge(
                "the checkpoint to restore",
                lambda: None,
                lambda _: self._coordinator.choose(step, rewind, unreadable, timeout, rounds.progressed),
            )

    def _restore_source(self, state: dict[str, Any], request: LoadRequest, chosen: Chosen) -> int | None:
        if not chosen.from_source:
            return None
        keys = [self._source_keys] if isinstance(self._source_keys, str) else self._source_keys
        patterns = request.keys if keys is None else [*keys]
        request = dataclasses.replace(request, spec=self._source, keys=patterns)
        self._last_report = load_on_ranks(state, request, self._ranks)
        return None if keys is not None else chosen.step

    # -- to save

    def step(
        self,
        step: int,
        state: Mapping[str, Any],
        metrics: Mapping[str, Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> SaveFuture | None:
        """Save a step that is done if a save is due, or if the ranks will be pre-empted.

        All ranks call it after each step, with ascending numbers that are the same on all ranks. If it saves no
        checkpoint, it takes microseconds and makes no request. A step that :meth:`save` has just saved is not saved
        again. If the call raises an error, the same step may be passed again.

        Args:
            step: the number of completed steps.
            state: as for :func:`save`.
            metrics: numbers by name, such as ``{"val_loss": 2.1}``. They are stored in the checkpoint's metadata, and
                :class:`Keep` selects the best checkpoints by one of them. Tensors and NumPy values of one element are
                allowed too, and are read only if the step is saved. None means that a metric is not known. If ranks
                pass different metrics, the coordinator's are saved.
            metadata: further metadata of the checkpoint, as in :func:`save`. The member ``step`` and the metrics are
                added to it.

        Returns the future of the save of this step, or None if it was not saved. If ``preempted`` is true after the
        call, the save has ended.

        Raises TypeError for a metric that is not a number, and ValueError for a metric that cannot be stored or a step
        that is not greater than the last one. If a save is due, raises the error of the previous save, because this is
        the first call at which all ranks can raise it. The step is not saved then. The same call, made again, saves it.

        Raises RunTakenOverError if another job has taken over the run, CheckpointExistsError if the run has a
        checkpoint of this step or a later one, and the errors of :func:`save` (with ``background``, in the future).
        Raises CheckpointError if the save before pre-emption failed or did not end within the grace period.
        """
        again = step == self._last_step > self._done_step
        step = self._checked_step(step, self._last_step + (not again))
        checked_metrics(metrics)
        if not again:
            self._step_before, self._last_step = self._last_step, step
        future = None
        if self._preemption is not None and not self._preempted and self._preemption.reach_step(step):
            future = self._save_preempted(step, state, metrics, metadata)
        elif (saved := self._future_of(step)) is not None:
            future = saved
        elif self._save_every is not None and step // self._save_every > max(self._step_before, 0) // self._save_every:
            future = self.save(step, state, metrics, metadata)
        self._done_step = step
        return future

    def _checked_step(self, step: int, minimum: int) -> int:
        self._refuse_other_process()
        step = operator.index(step)
        if self._closed:
            raise ValueError(f"the manager of the run {self._spec.url} is closed: create another one")
        if step < max(minimum, 0):
            raise ValueError(
                f"step must be at least {max(minimum, 0)}, got {step}, because steps must ascend. To return to an "
                "earlier step: restore(state, step=..., rewind=True)"
            )
        return step

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        metrics: Mapping[str, Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> SaveFuture:
        """Save a step, whether or not a save is due. All ranks call it, with arguments and errors as in :meth:`step`.

        If this manager has saved the step already, or is saving it, wait for that save and return its future. With
        ``background=False``, the save has ended when the call returns. Four more requests than :func:`save`, and two
        more for the first checkpoint of a run.
        """
        step = self._checked_step(step, self._last_step)
        if self._saved is not None and self._saved[0] == step:
            # Until the save has ended, some ranks may not know of a failure, but all ranks must do the same.
            Future.exception(self._saved[1])
            if not _failed(self._saved[1]):
                return self._saved[1]
        self.wait()
        return self._begin(step, state, metrics, metadata)

    def _future_of(self, step: int) -> SaveFuture | None:
        """Return the future of a step's save, or None if there is none or :meth:`wait` has raised its error."""
        if self._saved is None or self._saved[0] != step:
            return None
        future = self._saved[1]
        # Until the save has ended, some ranks may not know of a failure, but all ranks must do the same.
        return None if self._saving is not future and _failed(future) else future

    def _begin(
        self,
        step: int,
        state: Mapping[str, Any],
        metrics: Mapping[str, Any] | None,
        metadata: Mapping[str, Any] | None,
        in_time: bool = False,
    ) -> SaveFuture:
        request = self._request(step, metrics, metadata, in_time)
        if in_time:
            assert self._preemption is not None
            # Do not wait for a lost rank beyond the grace period.
            timeout = min(self._options.timeout, max(self._preemption.seconds_left(), MIN_TIMEOUT_SECONDS))
            options = dataclasses.replace(self._options, timeout=timeout)
            request = dataclasses.replace(request, options=options, progress=lambda _, __: self._refuse_late(step))
        objects.refuse_swapped(state, request.spec.url, "save")
        if self._background:
            future = save_in_background(state, request, self._ranks)
        else:
            future = SaveFuture(request.spec.url)
            report = save_on_ranks(partial(LocalState.from_user_state, state), request, self._ranks)
            future.run(lambda: report)
        self._saving, self._saved = future, (step, future)
        self._last_step = max(step, self._last_step)
        return future

    def _request(
        self, step: int, metrics: Mapping[str, Any] | None, metadata: Mapping[str, Any] | None, in_time: bool
    ) -> SaveRequest:
        name = name_of(step)
        own = {"step": step, **checked_metrics(metrics)}
        others = checked_metadata(metadata)
        if twice := sorted({"step", *(metrics or {})} & {*others}):
            raise ValueError(f"{twice[0]!r} was passed twice: as the step or a metric, and in metadata")
        known = checked_metadata({**own, **others}, MAX_RUN_METADATA)
        # Half of the time for which the other ranks wait for the coordinator.
        patience = self._options.timeout / 2
        # A missing metric must not prevent the save before pre-emption.
        check_metric = bool(metrics) and not in_time
        run = RunSave(self._coordinator, step, name, known, patience, check_metric=check_metric)
        return SaveRequest(self._spec.child(name), name in self._damaged, known, self._options, None, run)

    def _save_preempted(
        self,
        step: int,
        state: Mapping[str, Any],
        metrics: Mapping[str, Any] | None,
        metadata: Mapping[str, Any] | None,
    ) -> SaveFuture:
        """Save within the grace period. Waits for a save that is still running first."""
        assert self._preemption is not None
        self._preempted = True
        self._coordinator.retention.skip_waits()
        if self._saving is not None:
            self._wait_in_time(self._saving, step)
            if (error := self._saving.exception()) is not None:
                # Logged only, so that this step is saved.
                log.error("the run %s: the previous save failed: %s: %s", self._spec.url, type(error).__name__, error)
            self._saving = None
        if (saved := self._future_of(step)) is not None:
            return saved
        future = self._begin(step, state, metrics, metadata, in_time=True)
        self._wait_in_time(future, step)
        self._saving = None
        future.result()
        return future

    def _wait_in_time(self, future: SaveFuture, step: int) -> None:
        assert self._preemption is not None
        # SaveFuture.exception would count as a report of the error to the caller.
        with suppress(TimeoutError):
            Future.exception(future, max(0.0, self._preemption.seconds_left()))
        if not future.done():
            self._refuse_late(step)

    def _refuse_late(self, step: int) -> None:
        assert self._preemption is not None
        if self._preemption.seconds_left() <= 0:
            raise CheckpointError(
                f"the run {self._spec.url}: the save of step {step} before pre-emption did not end within the grace "
                "period. Pass a greater grace=... if there is more time, or save smaller checkpoints"
            )

    def wait(self) -> SaveReport | None:
        """Wait for the running save, and return its report, or None if there is no save. All ranks call it.

        Raises the error of the save, once: if :meth:`step`, :meth:`save` or :meth:`restore` has raised it, this method
        does not raise it again.
        """
        self._refuse_other_process()
        if (saving := self._saving) is None:
            return None
        # Ctrl-C interrupts this wait but not the save, so the save is kept until it has ended.
        saving.exception()
        self._saving = None
        return saving.result()

    def close(self) -> None:
        """Wait for the running save and for deletions, and restore the signal handlers. All ranks call it.

        Raises the error of the save. Signals are handled until the save has ended, so that the first signal does not
        end the process. If a signal arrives after the last :meth:`step`, no further step is saved. Then a warning is
        logged and :attr:`preempted` is true.

        Ctrl-C ends the wait but not the save, and another ``close`` waits for it. The wait for deletions takes at most
        ``options.timeout`` seconds, and 0 after pre-emption. The next job, or ``recover``, finishes an interrupted
        deletion.
        """
        self._refuse_other_process()
        if self._ended:
            return
        self._closed = True
        if self._preemption is not None:
            self._preemption.close()
        # A signal that arrives now leaves little time for the running save.
        self._coordinator.retention.skip_waits()
        try:
            self.wait()
        finally:
            if self._saving is None:
                self._end()

    def _end(self) -> None:
        """Restore the signal handlers and wait for deletions, after the last save."""
        self._ended = True
        if self._watch is not None:
            _end_watch(self._watch)
        if self._preemption is not None and self._preemption.noticed is not None and not self._preempted:
            self._preempted = True
            newest = f"of step {self._saved[0]}" if self._saved is not None else "from before this job"
            log.warning(
                "the run %s: a notice of pre-emption arrived after step %d, the last call of step(), so no checkpoint "
                "was saved for it. The newest checkpoint is %s",
                self._spec.url,
                self._last_step,
                newest,
            )
        self._coordinator.retention.end(0.0 if self._preempted else self._options.timeout)

    def _refuse_other_process(self) -> None:
        if self._process != os.getpid():
            raise CheckpointError(
                f"this manager of the run {self._spec.url} was created in another process ({self._process}), from "
                "which this one was forked: create a manager in this process"
            )

    def __reduce__(self) -> NoReturn:
        raise TypeError("a CheckpointManager cannot be pickled: create one in each process that saves or restores")

    # -- to list and to pin

    def steps(self) -> list[int]:
        """Return the steps of all committed checkpoints in the folder, ascending. A single rank may call it.

        Checkpoints of other runs in the folder are included. A folder that cannot be read is skipped with a warning.
        Costs all pages of one listing, and one request for each folder of a step. Raises StorageError if no folder can
        be read.
        """
        store = self._spec.open()
        names = [name for name in list_below(store).folders if step_of(name) is not None]
        found = find_checkpoints(store, names)
        unreadable = [below for below in found if below.unreadable]
        if len(unreadable) == len(found):
            refuse_unreadable(store, unreadable)
        for below in unreadable:
            warn(skip_warning(store, below))
        return sorted({step for below in found if below.root and (step := step_of(below.name)) is not None})

    def pin(self, step: int, note: str = "") -> None:
        """Protect the checkpoint of a step from deletion and replacement, until :meth:`unpin`.

        A single rank may call it. ``note`` is the reason for the pin. Costs all pages of one listing, and about 14
        requests. Raises the errors of :func:`pin`. A second pin of the same step is no error.
        """
        store = self._store_of(step)
        put_pin(store, load_root(store), _PIN, note or "pinned in its run")

    def unpin(self, step: int) -> None:
        """Delete the pin that :meth:`pin` has put. Other pins stay. A single rank may call it.

        If no rule keeps the checkpoint, it is deleted after the next save. Costs all pages of one listing, and two
        requests.
        """
        self._store_of(step).delete([pin_key(_PIN)])

    def _store_of(self, step: int) -> Store:
        """Return the store of a step's checkpoint. The step in its name need not have leading zeros."""
        step = operator.index(step)
        padded = self._spec.child(name_of(step)).open()
        store = self._spec.open()
        names = [name for name in list_below(store).folders if step_of(name) == step]
        found = find_checkpoints(store, names)
        refuse_unreadable(store, found)
        sound = [below.name for below in found if below.root is not None]
        return self._spec.child(sound[-1]).open() if sound else padded


def _end_watch(watch: process_signals.Watch) -> None:
    process_signals.dispatcher.close(watch)


def _failed(future: SaveFuture) -> bool:
    # SaveFuture.exception would count as a report of the error to the caller.
    return future.done() and Future.exception(future) is not None
