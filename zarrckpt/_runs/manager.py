"""``CheckpointManager``: keep a run's checkpoints, find the newest, resume, and save before pre-emption."""

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

from zarrckpt._commit import protocol
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
from zarrckpt._load.run import LoadRequest, run_load
from zarrckpt._options import LoadOptions, SaveOptions, checked_options
from zarrckpt._ranks.group import Ranks
from zarrckpt._ranks.rounds import joined
from zarrckpt._reports import LoadReport, SaveReport
from zarrckpt._runs import signals as process_signals
from zarrckpt._runs.coordinator import Chosen, Coordinator, RunSave
from zarrckpt._runs.keep import Keep, checked_metrics
from zarrckpt._runs.preemption import Preemption
from zarrckpt._runs.steps import name_of, passed_over, refuse_unreadable, step_of
from zarrckpt._save.background import SaveFuture, save_in_background
from zarrckpt._save.request import SaveRequest
from zarrckpt._save.run import run_save
from zarrckpt._state import objects
from zarrckpt._state.local_state import LocalState
from zarrckpt._store import Store, StoreSpec, Url

LEAST_SECONDS = 5.0
"""The ranks of a save before pre-emption wait for each other at least so long."""

_PIN = pin_id_of("CheckpointManager.pin")


class CheckpointManager:
    """The checkpoints of one training run, in one folder: saved, kept, found, and resumed from.

    Every rank makes one, after ``init_process_group``, and they make the same calls in the same order; without
    ``torch.distributed`` one process does. The folder has one checkpoint for each step that was saved,
    ``step-00000500`` and so on, made by :func:`save` or :func:`async_save`, and the run's document, ``@run/zarr.json``.

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
        url: the run's folder, as :func:`save` takes a url.
        keep: which checkpoints are kept, see :class:`Keep`; the others are deleted after the save that makes them
            superfluous, in the background. Default: all are kept. Only checkpoints of this run are ever deleted, and
            none that is pinned. A save waits for deletions before it begins if more than two checkpoints would be
            superfluous after it.
        save_every: :meth:`step` saves each time a multiple of this is reached. Default: only before pre-emption.
        signals: names of signals that announce pre-emption (default: ``SIGTERM``). One on any rank leads to one save of
            one step on all ranks. A second one, more than a second later, ends its process at once. Handlers that were
            there before are called, too; :meth:`close` puts them back. The manager is made in the main thread then.
            ``()``: none is handled.
        notice: a callable without arguments that says, by returning True, that this machine is to be taken away: for a
            cloud's notice. Asked about once a second, in a thread of each rank.
        grace: the seconds after a signal or notice within which the save is to have ended (default 25: torchrun kills
            after 30). They must hold two steps of training and a save.
        background: save with :func:`async_save` (default), or with :func:`save`: no copy in memory, training waits.
        init_from: the url of a checkpoint of another run to begin from, where this run has none: a fork. It is pinned
            until this run has a checkpoint of its own; a restarted job that has another ``init_from``, or none, leaves
            the pin, with a warning. ``storage_options`` are used for it, too.
        init_keys: load only these keys of it, as ``keys`` of :func:`load`: ``"model"`` for the weights. Default: all.
        process_group: the ranks that save together (default: all).
        no_dist: this process is alone, as in :func:`save`.
        storage_options: as in :func:`save`.
        options: how bytes are laid out and moved in all saves, see :class:`SaveOptions`.

    Used in a ``with`` block, it is closed at the end. Makes no request. Raises TypeError and ValueError for arguments
    that make no sense.
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
            raise TypeError(f"signals must be a sequence of names: ({signals!r},)")
        if not grace > 0:
            raise ValueError(f"grace must be more than 0 seconds, got {grace}")
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
        """The same before the last call of :meth:`step`."""
        self._done_step = -1
        """The step of the last call of :meth:`step` that raised nothing."""
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
                    self._watch = process_signals.dispatcher.watch(signals, watch.tell)
                    # A manager that is replaced before it is closed handles no signal any more.
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
        """Whether the save before pre-emption was made, or has failed: the loop is to end. The same on all ranks.

        It changes only in :meth:`step`, and in :meth:`close` on a rank that had a notice after its last step.
        """
        return self._preempted

    # -- to resume

    @property
    def last_report(self) -> LoadReport | None:
        """The :class:`LoadReport` of this rank's last :meth:`restore`; None if nothing was loaded."""
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
        """Load the run's newest checkpoint into a state, in place; return its step, None if nothing was committed yet.

        Called on all ranks, which get the same. The newest is the one with the greatest step. If it is damaged, or its
        root document is missing, the next older one is loaded instead, with a warning; if all are,
        CorruptCheckpointError lists them. From now on this job goes on with the run: another one that still does saves
        and deletes nothing there any more. If nothing can be put into the folder, the checkpoint is loaded all the
        same, with a warning. To read one of a run that a job goes on with, use :func:`latest` and :func:`load`.

        Where the run has no checkpoint and was given ``init_from``, that is loaded: the step is that checkpoint's, or
        None where ``init_keys`` chose a part of it.

        The coordinator looks, and tells the others: the pages of one listing and three requests, a few more for
        each checkpoint that is passed over, and for a run that has none. The load itself costs what :func:`load` costs.

        Args:
            state: as for :func:`load`.
            step: load the checkpoint of this step, not the newest, and no other one if it is damaged. Saves up to
                the newest step are refused then.
            rewind: with ``step``: remove all later checkpoints first, so that the run goes on from there. Where one of
                them is pinned, or not of this run, or a save of a later step that is not of this run may still commit,
                an error is raised and none is removed.
            keys: load a part, as in :func:`load`. Default: everything that has a target.
            rename: load entries under other names, as in :func:`load`.
            strict: as in :func:`load`: targets that the checkpoint lacks, and entries without a target, are an error.
            allow_pickle: also load values that were saved pickled, which can run any code. Default: UnsafeValueError.
            allow_cast: convert where dtypes differ, instead of raising (default False).
            options: how bytes are moved, see :class:`LoadOptions`.

        Raises CheckpointNotFoundError for a ``step`` that is not there, for an ``init_from`` that is not, and if all
        checkpoints of the run are gone; ForeignObjectsError for the url of a checkpoint, or of a part of one;
        with ``rewind`` CheckpointPinnedError and ForeignObjectsError; RunTakenOverError where another job has taken
        the run since an earlier call; StorageError for a folder of a later step that cannot be read; and what
        :func:`load` raises. An error on one rank is raised on all.
        """
        objects.refuse_swapped(state, self._spec.url, "restore")
        references = sys.getrefcount(state)
        droppable = objects.droppable_keys(state, references)
        if rewind and step is None:
            raise ValueError("rewind=True needs the step to go back to: restore(state, step=..., rewind=True)")
        step = None if step is None else operator.index(step)
        self.wait()
        self._last_report = None
        request = LoadRequest.from_arguments(
            None, options, strict=strict, keys=keys, rename=rename, allow_pickle=allow_pickle, allow_cast=allow_cast
        )
        request = dataclasses.replace(request, droppable=droppable)
        unreadable: frozenset[str] = frozenset()
        while True:
            chosen = self._chosen(step, rewind, unreadable, request.options.timeout)
            if not chosen.name:
                found = self._restore_source(state, request, chosen)
                self._go_on_from(found, chosen)
                return found
            spec = self._spec.child(chosen.name)
            try:
                self._last_report = run_load(state, dataclasses.replace(request, spec=spec), self._ranks)
            except (CorruptCheckpointError, CheckpointRemovedError, CheckpointNotFoundError) as err:
                if chosen.step is None or (step is not None and not chosen.others):
                    raise
                unreadable |= {chosen.name, *(chosen.damaged if step is None else ())}
                which = "the checkpoint before it" if step is None else "another one of this step"
                warn(f"{spec.url} is not restored, but {which}: {type(err).__name__}: {err}")
                continue
            self._go_on_from(chosen.step, chosen)
            return chosen.step

    def _go_on_from(self, step: int | None, chosen: Chosen) -> None:
        self._damaged = frozenset(chosen.damaged)
        # A step that is done anew is saved anew.
        self._last_step = self._step_before = self._done_step = -1 if step is None else step
        self._saved = None

    def _chosen(self, step: int | None, rewind: bool, unreadable: frozenset[str], timeout: float) -> Chosen:
        with joined(self._ranks, f"the restore of {self._spec.url}", timeout) as rounds:
            return rounds.merge(
                "which checkpoint they restore",
                lambda: None,
                lambda _: self._coordinator.choose(step, rewind, unreadable, timeout, rounds.progressed),
            )

    def _restore_source(self, state: dict[str, Any], request: LoadRequest, chosen: Chosen) -> int | None:
        if not chosen.from_source:
            return None
        keys = [self._source_keys] if isinstance(self._source_keys, str) else self._source_keys
        patterns = request.keys if keys is None else [*keys]
        request = dataclasses.replace(request, spec=self._source, keys=patterns)
        self._last_report = run_load(state, request, self._ranks)
        return None if keys is not None else chosen.step

    # -- to save

    def step(
        self,
        step: int,
        state: Mapping[str, Any],
        metrics: Mapping[str, Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> SaveFuture | None:
        """Say that a step is done: saves it where that is due, or where the ranks are to be pre-empted.

        Called on all ranks, after each step, with ascending numbers that are the same on all of them. If nothing is
        saved, it takes microseconds, and makes no request. The step that :meth:`save` has saved just now is not saved
        again. A step whose call raised an error may be passed again.

        Args:
            step: the number of steps that are done.
            state: as for :func:`save`.
            metrics: numbers by name, such as ``{"val_loss": 2.1}``: they go into the checkpoint's metadata, and
                :class:`Keep` chooses the best by one of them. Tensors and NumPy values of one element are numbers, too;
                they are read only where the step is saved. None is a metric that is not known. The coordinator's count.
            metadata: what else is to be kept with the checkpoint, as in :func:`save`. It has a member ``step`` and the
                metrics anyway.

        Returns the future of the save of this step, None if it was not saved. When ``preempted`` is true after the
        call, the save has ended.

        Raises TypeError for a metric that is no number, ValueError for one that cannot be stored, and for a step that
        is not greater than the last one. If a save is due: what went wrong in the one before, since that is the first
        moment that is the same on all ranks. Nothing is saved then, and the same call, made once more, saves the step.
        RunTakenOverError where another job goes on with the run; CheckpointExistsError where the run has a
        checkpoint of this step, or of a later one; and what :func:`save` raises, with ``background`` in the future.
        CheckpointError where the save before pre-emption failed, or did not end within the grace period.
        """
        again = step == self._last_step > self._done_step
        step = self._checked_step(step, self._last_step + (not again))
        checked_metrics(metrics)
        if not again:
            self._step_before, self._last_step = self._last_step, step
        future = None
        if self._preemption is not None and not self._preempted and self._preemption.came_to(step):
            future = self._save_preempted(step, state, metrics, metadata)
        elif (saved := self._future_of(step)) is not None:
            future = saved
        elif self._save_every is not None and step // self._save_every > max(self._step_before, 0) // self._save_every:
            future = self.save(step, state, metrics, metadata)
        self._done_step = step
        return future

    def _checked_step(self, step: int, least: int) -> int:
        self._refuse_other_process()
        step = operator.index(step)
        if self._closed:
            raise ValueError(f"the manager of the run {self._spec.url} is closed: make another one")
        if step < max(least, 0):
            raise ValueError(
                f"step {step} comes after step {self._last_step}: steps must ascend from 0 on. To go back in a run: "
                "restore(state, step=..., rewind=True)"
            )
        return step

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        metrics: Mapping[str, Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> SaveFuture:
        """Save a step, due or not; arguments, errors and callers as for :meth:`step`.

        A step that this manager has saved already, or is saving, is not saved again: this waits for the save, and
        returns its future. With ``background=False`` the save has ended when the call returns. Four requests more than
        :func:`save` makes, and two for the first checkpoint of a run.
        """
        step = self._checked_step(step, self._last_step)
        if self._saved is not None and self._saved[0] == step:
            # Before it has ended, a failure may be known on some ranks only, and all must do the same.
            Future.exception(self._saved[1])
            if not _failed(self._saved[1]):
                return self._saved[1]
        self.wait()
        return self._begin(step, state, metrics, metadata)

    def _future_of(self, step: int) -> SaveFuture | None:
        """Return the future of a step's save; None if there is none, or if :meth:`wait` has raised its error."""
        if self._saved is None or self._saved[0] != step:
            return None
        future = self._saved[1]
        # Under way, a failure may be known on some ranks only, and all must do the same.
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
            # No rank is waited for longer, be it that it is lost.
            timeout = min(self._options.timeout, max(self._preemption.left(), LEAST_SECONDS))
            options = dataclasses.replace(self._options, timeout=timeout)
            request = dataclasses.replace(request, options=options, progress=lambda _, __: self._refuse_late(step))
        objects.refuse_swapped(state, request.spec.url, "save")
        if self._background:
            future = save_in_background(state, request, self._ranks)
        else:
            future = SaveFuture(request.spec.url)
            report = run_save(partial(LocalState.from_user_state, state), request, self._ranks)
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
            raise ValueError(f"{twice[0]!r} is given twice: as the step or a metric, and in metadata")
        known = checked_metadata({**own, **others}, MAX_RUN_METADATA)
        # Deletions get half the time for which the other ranks wait for the coordinator.
        patience = self._options.timeout / 2
        # Before pre-emption a checkpoint is worth more than its metric.
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
        """Save within the grace period, after the save under way, if any."""
        assert self._preemption is not None
        self._preempted = True
        self._coordinator.retention.hurry_saves()
        if self._saving is not None:
            self._end_in_time(self._saving, step)
            if (error := self._saving.exception()) is not None:
                # It is no reason not to save now.
                log.error("the run %s: the save before failed: %s: %s", self._spec.url, type(error).__name__, error)
            self._saving = None
        if (saved := self._future_of(step)) is not None:
            return saved
        future = self._begin(step, state, metrics, metadata, in_time=True)
        self._end_in_time(future, step)
        self._saving = None
        future.result()
        return future

    def _end_in_time(self, future: SaveFuture, step: int) -> None:
        assert self._preemption is not None
        # Not SaveFuture's own: whoever is to ask for its error has not done so yet.
        with suppress(TimeoutError):
            Future.exception(future, max(0.0, self._preemption.left()))
        if not future.done():
            self._refuse_late(step)

    def _refuse_late(self, step: int) -> None:
        assert self._preemption is not None
        if self._preemption.left() <= 0:
            raise CheckpointError(
                f"the run {self._spec.url}: the save of step {step} before pre-emption did not end within the grace "
                "period. If there is more time than that, say so by grace=...; or let checkpoints be smaller"
            )

    def wait(self) -> SaveReport | None:
        """Wait for the save under way; return its report, None where there is none. Called on all ranks.

        Raises what went wrong in the save, once: as soon as :meth:`step`, :meth:`save`, :meth:`restore` or this has
        raised it, it is over.
        """
        self._refuse_other_process()
        if (saving := self._saving) is None:
            return None
        # An interrupt ends the wait, not the save: it is forgotten only when it is over.
        saving.exception()
        self._saving = None
        return saving.result()

    def close(self) -> None:
        """Wait for the save under way, and for deletions; put back the signals' handlers. Called on all ranks.

        Raises what went wrong in the save. Signals are handled until the save has ended: the first one does not end the
        process. If one came after the last :meth:`step`, no further step is saved: a warning is logged, and
        :attr:`preempted` is true. Ctrl-C ends the wait; the save goes on, and another ``close`` waits for it.
        Deletions are waited for as long as ``options.timeout`` says, and not at all after pre-emption: the next job, or
        ``recover``, finishes one that was broken off.
        """
        self._refuse_other_process()
        if self._ended:
            return
        self._closed = True
        if self._preemption is not None:
            self._preemption.close()
        # A signal that comes now leaves the save under way little time, and no save follows it.
        self._coordinator.retention.hurry_saves()
        try:
            self.wait()
        finally:
            if self._saving is None:
                self._end()

    def _end(self) -> None:
        """Give up what the manager holds, after its last save."""
        self._ended = True
        if self._watch is not None:
            _end_watch(self._watch)
        if self._preemption is not None and self._preemption.noticed is not None and not self._preempted:
            self._preempted = True
            newest = f"of step {self._saved[0]}" if self._saved is not None else "from before this job"
            log.warning(
                "the run %s: a notice of pre-emption came after step %d, the last call of step(), so nothing was saved "
                "for it: the newest checkpoint is %s",
                self._spec.url,
                self._last_step,
                newest,
            )
        self._coordinator.retention.end(0.0 if self._preempted else self._options.timeout)

    def _refuse_other_process(self) -> None:
        if self._process != os.getpid():
            raise CheckpointError(
                f"this manager of the run {self._spec.url} was made in another process ({self._process}), from which "
                "this one was forked: make a manager in this process"
            )

    def __reduce__(self) -> NoReturn:
        raise TypeError("a CheckpointManager cannot be pickled: make one in each process that saves or restores")

    # -- to look, and to keep

    def steps(self) -> list[int]:
        """The steps whose checkpoints are there and complete, ascending. Any one rank may call it.

        The pages of one listing, and a request for each folder of a step. Those of other runs in the folder are among
        them. A folder that cannot be read is left out, with a warning. Raises StorageError if no folder can be read.
        """
        store = self._spec.open()
        names = [name for name in list_below(store).folders if step_of(name) is not None]
        found = protocol.checkpoints_below(store, names)
        unreadable = [below for below in found if below.unreadable]
        if len(unreadable) == len(found):
            refuse_unreadable(store, unreadable)
        for below in unreadable:
            warn(passed_over(store, below))
        return sorted({step for below in found if below.root and (step := step_of(below.name)) is not None})

    def pin(self, step: int, note: str = "") -> None:
        """Keep the checkpoint of a step from being deleted and replaced, until :meth:`unpin`. Any one rank may call it.

        ``note`` says what for. The pages of one listing, and about 14 requests. Raises as :func:`pin`; a second pin of
        the same step is no error.
        """
        place = self._place(step)
        put_pin(place, protocol.load_root(place), _PIN, note or "pinned in its run")

    def unpin(self, step: int) -> None:
        """Take back :meth:`pin`; pins that others have put stay. Any one rank may call it.

        The checkpoint is deleted after the next save, where no rule keeps it. The pages of one listing, and two
        requests.
        """
        self._place(step).delete([pin_key(_PIN)])

    def _place(self, step: int) -> Store:
        """The store of a step's checkpoint, whose name may have been made without zeros in front."""
        step = operator.index(step)
        padded = self._spec.child(name_of(step)).open()
        store = self._spec.open()
        names = [name for name in list_below(store).folders if step_of(name) == step]
        found = protocol.checkpoints_below(store, names)
        refuse_unreadable(store, found)
        sound = [below.name for below in found if below.root is not None]
        return self._spec.child(sound[-1]).open() if sound else padded


def _end_watch(watch: process_signals.Watch) -> None:
    process_signals.dispatcher.close(watch)


def _failed(future: SaveFuture) -> bool:
    # Not SaveFuture's own: whoever is to ask for its error has not done so yet.
    return future.done() and Future.exception(future) is not None
