"""``CheckpointManager``: save and delete a run's checkpoints, resume from the newest, and save before pre-emption."""

from __future__ import annotations

import dataclasses
import operator
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
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
    CheckpointReplacedError,
    CorruptCheckpointError,
    log,
    warn,
)
from zarrckpt._jobs import check_limits
from zarrckpt._load.steps import LoadRequest, load_on_ranks
from zarrckpt._options import LoadOptions, SaveOptions, checked_options
from zarrckpt._ranks.calls import call_on_coordinator
from zarrckpt._ranks.group import Ranks, global_rank
from zarrckpt._ranks.rounds import open_rounds
from zarrckpt._reports import LoadReport, SaveReport
from zarrckpt._runs import signals as process_signals
from zarrckpt._runs.coordinator import ChosenCheckpoint, RunCoordinator
from zarrckpt._runs.folders import name_of, refuse_unreadable, skip_warning, step_folders
from zarrckpt._runs.keep import Keep, checked_metrics
from zarrckpt._runs.preemption import Preemption
from zarrckpt._runs.saving import Format, StepSaver, StepState
from zarrckpt._runs.schedule import StepSequence
from zarrckpt._save.background import SaveFuture
from zarrckpt._state import objects
from zarrckpt._store import Store, StoreSpec, Url

_PIN = pin_id_of("CheckpointManager.pin")

_GONE = (CheckpointRemovedError, CheckpointNotFoundError, CheckpointReplacedError)

_MAX_OTHER_LOADS = 3
"""Maximum number of other checkpoints that are loaded with ``read_only`` after one that was removed meanwhile."""


class CheckpointManager:
    """A manager of the checkpoints of one training run in one folder: it saves, deletes, finds and restores them.

    Every rank creates a manager, after ``init_process_group``, and all ranks make the same calls in the same order.
    Without ``torch.distributed``, one process creates it. The folder has one checkpoint for each saved step, named
    ``step-00000500`` or ``step-00000500.zarr.zip`` and so on, and the run's document, ``@run/zarr.json``.

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
            background, after the save that makes them expire. Default: all are kept. Only checkpoints of this run are
            deleted, and no pinned ones. If more than two expired checkpoints would exist after a save, the save first
            waits for deletions.
        format: ``"folder"`` (default), or ``"zip"`` to save each checkpoint as an archive, one file. Archives reuse no
            chunks of earlier checkpoints. In object stores, only one process can write an archive. A run may have
            checkpoints of both formats.
        save_every: :meth:`step` saves each time it reaches a multiple of this number. Default: only before pre-emption.
        read_only: only read the run, for example to evaluate it while another job trains. :meth:`restore` does not take
            over the run, no signals are handled, and calls that write raise CheckpointError. Other arguments about
            saves are ignored.
        signals: names of the signals that announce pre-emption (default: ``SIGTERM``). A signal on any rank leads to a
            save of the same step on all ranks. A second signal, more than a second after the first, ends its process at
            once. The previous handlers are called too, and :meth:`close` restores them. The manager must be created in
            the main thread, except with ``()``, which handles no signals.
        notice: a callable without arguments that returns True if the cloud provider has announced that it will stop
            this machine. A thread of each rank calls it about once a second.
        grace: the seconds after a signal or notice within which the save must end (default 25, because torchrun kills
            after 30). They must suffice for two steps of training and a save.
        background: whether to save with :func:`async_save` (default) or with :func:`save`, which needs no copy in
            memory but blocks the training.
        init_from: the url of another run's checkpoint from which this run begins if it has no checkpoint (a fork). It
            is pinned until this run has a checkpoint. On local disks, the first save links its unchanged chunks; in
            object stores it copies them only with ``SaveOptions(reuse="on")``. A restarted job with another
            ``init_from``, or without one, leaves the pin and warns. ``storage_options`` apply to this url too.
        init_keys: the keys to load from ``init_from``, as ``keys`` of :func:`load`, for example ``"model"`` for the
            weights. Default: all.
        process_group: the ranks that save together (default: all).
        no_dist: save from this process only, as in :func:`save`.
        storage_options: as in :func:`save`.
        options: the layout and the transfer of bytes in all saves, and ``on_event``, see :class:`SaveOptions`.

    A ``with`` block closes the manager at its end. The constructor makes no request. Raises TypeError and ValueError
    for invalid arguments, and StorageError if several ranks pass ``format="zip"`` for an object store.
    """

    # Above 250 lines, because most of them describe arguments, costs and errors.

    def __init__(
        self,
        url: Url,
        *,
        keep: Keep | None = None,
        format: Format = "folder",
        save_every: int | None = None,
        read_only: bool = False,
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
        self._init_from, self._init_keys = StoreSpec(init_from, storage_options), init_keys
        self._ranks = Ranks(process_group, no_dist=no_dist)
        on_event = self._options.on_event
        self._read_only = read_only
        self._coordinator = RunCoordinator(
            self._spec, keep, self._init_from, on_event, global_rank(), read_only=read_only
        )
        self._saver = StepSaver(
            self._spec, self._options, self._ranks, self._coordinator, format=format, background=background
        )
        self._steps = StepSequence(save_every)
        self._last_report: LoadReport | None = None
        self._preempted = False
        self._closed = False
        """Whether close() was called."""
        self._ended = False
        """Whether close() has also waited for the last save."""
        self._pid = os.getpid()
        self._signal_watch: process_signals.Watch | None = None
        """The registration of this manager's signals, or None if it handles none."""
        self._preemption: Preemption | None = None
        if (signals or notice is not None) and not read_only:
            self._preemption = preemption = Preemption(
                self._ranks, f"the run {self._spec.url}", self._options.timeout, grace, notice
            )
            try:
                if signals:
                    self._signal_watch = process_signals.dispatcher.watch(signals, preemption.note_notice)
                    # A manager that is garbage-collected without close() must not handle signals any more.
                    weakref.finalize(self, _end_watch, self._signal_watch).atexit = False
            except BaseException:
                preemption.close()
                raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except CheckpointError as err:
            if error is None:
                raise
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
        folder is not writable, the checkpoint is loaded with a warning. With ``read_only``, the run is not taken over.
        If its job then deletes the checkpoint during the load, the newest one is loaded instead, at most three times.

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
        objects.refuse_swapped_arguments(state, self._spec.url, "restore")
        references = sys.getrefcount(state)  # on its own line, because arguments of another call would be counted too
        unreferenced = objects.find_unreferenced_dicts(state, references)
        if rewind:
            self._refuse_if_read_only()
        if rewind and step is None:
            raise ValueError("rewind=True needs a step to return to: restore(state, step=..., rewind=True)")
        step = None if step is None else operator.index(step)
        self.wait()
        self._last_report = None
        options = checked_options(options, LoadOptions)
        if options.on_event is None:
            options = dataclasses.replace(options, on_event=self._options.on_event)
        # Without a url, because the coordinator chooses the checkpoint.
        request = LoadRequest.from_arguments(
            None,
            options,
            strict=strict,
            keys=keys,
            rename=rename,
            allow_pickle=allow_pickle,
            allow_cast=allow_cast,
            unreferenced=unreferenced,
        )
        restored_step = self._restore(state, request, step, rewind=rewind)
        self._steps.restart(restored_step)
        self._saver.restart()
        return restored_step

    def _restore(self, state: dict[str, Any], request: LoadRequest, step: int | None, *, rewind: bool) -> int | None:
        """Load the checkpoint that the coordinator chooses, or another one if that is damaged. Return its step."""
        is_damaged = False
        removed: list[CheckpointError] = []
        while True:
            chosen = self._choose(step, request.options.timeout, rewind=rewind, is_damaged=is_damaged)
            if not chosen.name:
                if removed:
                    # Parts of it are in the state already.
                    raise removed[-1]
                return self._restore_init_from(state, request, chosen)
            spec = self._spec.child(chosen.name)
            try:
                found = dataclasses.replace(request, spec=spec, step=chosen.step)
                self._last_report = load_on_ranks(state, found, self._ranks)
                return chosen.step
            except (CorruptCheckpointError, *_GONE) as err:
                if chosen.step is None or (step is not None and not chosen.has_alternative):
                    raise
                is_damaged = not (self._read_only and isinstance(err, _GONE))
                if is_damaged:
                    which = "the checkpoint before it" if step is None else "another one of this step"
                    warn(f"{spec.url} cannot be restored, so {which} is restored instead: {type(err).__name__}: {err}")
                elif len(removed) == _MAX_OTHER_LOADS:
                    raise
                else:
                    removed.append(err)
                    log.info("%s was removed during its restore, so the newest is restored: %s", spec.url, err)

    def _choose(self, step: int | None, timeout: float, *, rewind: bool, is_damaged: bool) -> ChosenCheckpoint:
        """Let the coordinator choose a checkpoint, and another one if the last one is damaged."""
        with open_rounds(self._ranks, f"the restore of {self._spec.url}", timeout) as rounds:
            report = rounds.report_alive
            choose = partial(self._coordinator.choose, step, timeout, report, rewind=rewind, is_damaged=is_damaged)
            return call_on_coordinator(rounds, "the checkpoint to restore", choose)

    def _restore_init_from(self, state: dict[str, Any], request: LoadRequest, chosen: ChosenCheckpoint) -> int | None:
        """Load the checkpoint of ``init_from``, if it was given. Return its step, or None if only a part is loaded."""
        if not chosen.is_origin:
            return None
        keys = [self._init_keys] if isinstance(self._init_keys, str) else self._init_keys
        patterns = request.keys if keys is None else [*keys]
        request = dataclasses.replace(request, spec=self._init_from, keys=patterns)
        self._last_report = load_on_ranks(state, request, self._ranks)
        self._saver.begin_from(self._init_from)
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
        given = StepState(self._checked_step(step), state, metrics, metadata)
        checked_metrics(metrics)  # at each step, so that an invalid metric is found before a save is due
        self._steps.begin(given.step)
        future = self._saver.future_of(given.step)
        if self._preemption is not None and not self._preempted and self._preemption.reach_step(given.step):
            self._preempted = True
            future = self._saver.save_before_preemption(given, self._preemption)
        elif future is None and self._steps.is_due(given.step):
            future = self._saver.save(given)
        self._steps.end(given.step)
        return future

    def _checked_step(self, step: int) -> int:
        self._refuse_other_process()
        self._refuse_if_read_only()
        step = operator.index(step)
        if self._closed:
            raise ValueError(f"the manager of the run {self._spec.url} is closed: create another one")
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
        more for the first checkpoint of a run. Unchanged chunks of the last checkpoint are reused, see ``reuse`` of
        :class:`SaveOptions`. This costs four requests, and in object stores two per chunk instead of its put.
        """
        given = StepState(self._checked_step(step), state, metrics, metadata)
        self._steps.refuse_earlier(given.step)
        future = self._saver.save(given)
        self._steps.note_save(given.step)
        return future

    def wait(self) -> SaveReport | None:
        """Wait for the running save, and return its report, or None if there is no save. All ranks call it.

        Raises the error of the save, once: if :meth:`step`, :meth:`save` or :meth:`restore` has raised it, this method
        does not raise it again.
        """
        self._refuse_other_process()
        return self._saver.wait()

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
            if self._saver.has_ended:
                self._end()

    def _end(self) -> None:
        """Restore the signal handlers and wait for deletions, after the last save."""
        self._ended = True
        if self._signal_watch is not None:
            _end_watch(self._signal_watch)
        if self._preemption is not None and self._preemption.noticed is not None and not self._preempted:
            self._preempted = True
            last = self._saver.last_step
            newest = "from before this job" if last is None else f"of step {last}"
            log.warning(
                "the run %s: a notice of pre-emption arrived after step %d, the last call of step(), so no checkpoint "
                "was saved for it. The newest checkpoint is %s",
                self._spec.url,
                self._steps.last,
                newest,
            )
        self._coordinator.retention.end(0.0 if self._preempted else self._options.timeout)

    def _refuse_other_process(self) -> None:
        if self._pid != os.getpid():
            raise CheckpointError(
                f"this manager of the run {self._spec.url} was created in another process ({self._pid}), from "
                "which this one was forked: create a manager in this process"
            )

    def _refuse_if_read_only(self) -> None:
        if self._read_only:
            raise CheckpointError(
                f"this manager of the run {self._spec.url} was created with read_only=True, so it does not save, pin "
                "or remove: create a manager without read_only in the job that trains"
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
        steps = step_folders(list_below(store).folders)
        found = find_checkpoints(store, steps)
        unreadable = [below for below in found if below.unreadable]
        if len(unreadable) == len(found):
            refuse_unreadable(store, unreadable)
        for below in unreadable:
            warn(skip_warning(store, below))
        return sorted({steps[below.name] for below in found if below.root is not None})

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
        """Return the store of a step's checkpoint, to pin it. The step in its name need not have leading zeros."""
        self._refuse_if_read_only()
        step = operator.index(step)
        padded = self._spec.child(name_of(step, self._saver.suffix)).open()
        store = self._spec.open()
        steps = step_folders(list_below(store).folders)
        found = find_checkpoints(store, [name for name in steps if steps[name] == step])
        refuse_unreadable(store, found)
        sound = [below.name for below in found if below.root is not None]
        return self._spec.child(sound[-1]).open() if sound else padded


def _end_watch(watch: process_signals.Watch) -> None:
    process_signals.dispatcher.close(watch)
