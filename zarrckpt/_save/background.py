"""``async_save``: copy the state, return, and save the copy in the background."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, NoReturn

import torch.distributed as dist

from zarrckpt._errors import CheckpointError, log, printable
from zarrckpt._events import EventSender
from zarrckpt._jobs import Progress, in_thread
from zarrckpt._options import SaveOptions
from zarrckpt._ranks.calls import call_on_coordinator
from zarrckpt._ranks.group import Ranks, global_rank
from zarrckpt._ranks.rounds import open_rounds
from zarrckpt._reports import SaveReport
from zarrckpt._save.request import SaveRequest
from zarrckpt._save.staging import Stager
from zarrckpt._save.steps import RankSave, save_in_rounds
from zarrckpt._state import objects
from zarrckpt._state.accelerators import current_streams
from zarrckpt._state.local_state import LocalState
from zarrckpt._store import Url


class SaveFuture(Future[SaveReport]):
    """The future of a background save. Its result is the report, and :meth:`copied` waits until the state may change.

    It cannot be cancelled, because the other ranks would wait.
    """

    def __init__(self, url: str) -> None:
        super().__init__()
        self._url = url
        self._reported = False
        """Whether a caller has asked for the outcome, so that an error need not be logged."""
        self._copied = threading.Event()
        self._outcome: SaveReport | BaseException | None = None
        self.set_running_or_notify_cancel()
        _futures.add(self)

    def copied(self, timeout: float | None = None) -> None:
        """Wait until the state has been copied or the copy has failed. After that, the state may change.

        Raises TimeoutError after ``timeout`` seconds. Errors of the save are raised by ``result()`` only.
        """
        if not self._copied.wait(timeout):
            raise TimeoutError(f"the state of the background save to {self._url} was not copied within {timeout:g} s")

    def set_copied(self) -> None:
        """Allow changes of the state. Called by the save."""
        self._copied.set()

    def result(self, timeout: float | None = None) -> SaveReport:
        self.exception(timeout)
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        error = super().exception(timeout)
        self._reported = True
        return error

    def run(self, save: Callable[[], SaveReport]) -> None:
        """Make the save and set its outcome. Called in the background thread."""
        try:
            outcome: SaveReport | BaseException = save()
        except BaseException as err:
            outcome = err
        self._set_outcome(outcome)

    def _set_outcome(self, outcome: SaveReport | BaseException) -> None:
        self._outcome = outcome
        self.set_copied()
        if isinstance(outcome, BaseException):
            self.set_exception(outcome)
        else:
            self.set_result(outcome)

    def renew_in_child(self) -> None:
        """End the future in a forked child, with an error if the parent's save has not ended."""
        super().__init__()
        self._copied = threading.Event()
        self._reported = True
        outcome = self._outcome
        if outcome is None:
            outcome = CheckpointError(
                f"the background save to {self._url} runs in the process from which this one was forked. Wait for its "
                "future there"
            )
        self._set_outcome(outcome)

    def unreported_failure(self) -> str | None:
        """Wait for the save, and return its error as text if it was not reported. Then it counts as reported."""
        if self._reported or (error := self.exception()) is None:
            return None
        return f"the background save to {self._url} failed: {type(error).__name__}: {error}"


def wait_unreported(future: SaveFuture, timeout: float | None = None) -> BaseException | None:
    """Wait for a save and return its error. Unlike ``exception()``, this does not count as a report to the caller.

    So :meth:`SaveFuture.unreported_failure` still returns the error. Raises TimeoutError after ``timeout`` seconds.
    """
    return Future.exception(future, timeout)


_futures: weakref.WeakSet[SaveFuture] = weakref.WeakSet()


def _renew_futures() -> None:
    for future in [*_futures]:
        future.renew_in_child()


os.register_at_fork(after_in_child=_renew_futures)


class _BackgroundSaver:
    """The background saves of a process, one at a time, and the buffers and the thread that they share."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stager = Stager()
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="zarrckpt-async")
        self._last: SaveFuture | None = None

    def save(
        self,
        state: Mapping[str, Any],
        request: SaveRequest,
        ranks: Ranks,
        *,
        keep_buffers: bool,
        copy_in_background: bool,
    ) -> SaveFuture:
        """Copy the state, or begin to copy it, and begin its save. Waits for the previous save."""
        with self._lock:
            events = request.begin_events(global_rank())
            self.finish()
            url = request.spec.url
            future = SaveFuture(url)
            call = open_rounds(ranks, f"the background save to {url}", request.options.timeout, queue="background")
            with events.sending_failure(), contextlib.ExitStack() as stack:
                rounds = stack.enter_context(call)
                check = request.refuse_committed if rounds.rank == 0 else lambda: None
                with in_thread(check) as wait_for_check:
                    copies = [self._copy_of(state, events, keep=keep_buffers, in_background=copy_in_background)]
                call_on_coordinator(rounds, "their copies of the state", wait_for_check)
                # The background save uses the same connections, because the process group may be destroyed meanwhile.
                connected = stack.pop_all()

            def read_state() -> LocalState:
                try:
                    # The callable refers to the state. Drop it after the call so that the state can be freed.
                    copied = copies.pop()()
                finally:
                    future.set_copied()
                if copy_in_background:
                    events.send("staged", nbytes=self._stager.copied_bytes)
                return LocalState.from_plain_state(copied)

            def make() -> SaveReport:
                with events.sending_failure(), connected:
                    save = RankSave(request, events, background=True)
                    report = save_in_rounds(rounds, read_state, save)
                save.send_committed(report)
                return report

            if not copy_in_background:
                future.set_copied()
            self._last = future
            try:
                self._executor.submit(future.run, make)
            except RuntimeError:  # The interpreter is shutting down.
                with events.sending_failure(), connected:
                    raise
            return future

    def _copy_of(
        self, state: Mapping[str, Any], events: EventSender, *, keep: bool, in_background: bool
    ) -> Callable[[], dict[Any, Any]]:
        """Return a callable that returns the copy of a state, or raises the error of the copy.

        It is called in the background save, which raises the error on all ranks.
        """
        try:
            # Take state dicts in this thread, because they may need collectives.
            plain = objects.convert_for_save(state).state
            if in_background:
                return partial(self._stager.stage, plain, keep=keep, streams=current_streams())
            copied = self._stager.stage(plain, keep=keep)
            events.send("staged", nbytes=self._stager.copied_bytes)
            return lambda: copied
        except Exception as err:
            failure = err

        def fail() -> NoReturn:
            raise failure

        return fail

    def wait(self) -> None:
        """Wait for the current save, if any."""
        if self._last is not None:
            wait_unreported(self._last)

    def finish(self, *, at_exit: bool = False) -> None:
        """Wait for the current save, if any. Log its error if no caller has asked for it; at exit, also to stderr."""
        if self._last is None or (failure := self._last.unreported_failure()) is None:
            return
        # Without handlers, logging itself would write a second line to stderr.
        if not at_exit or log.hasHandlers():
            log.error("%s", failure)
        if at_exit:
            print(printable(f"zarrckpt: {failure}"), file=sys.stderr, flush=True)


_savers: dict[int, _BackgroundSaver] = {}


def _at_end(method: Callable[[_BackgroundSaver], None]) -> None:
    saver = _savers.get(os.getpid())
    if saver is not None:
        method(saver)


# atexit hooks run after concurrent.futures has stopped accepting jobs, but an unfinished save still submits jobs. This
# hook runs before the hook of concurrent.futures, because it is registered later.
threading._register_atexit(partial(_at_end, _BackgroundSaver.wait))  # type: ignore[attr-defined]
# Hooks that are registered later run earlier, so this line is among the last on stderr.
atexit.register(_at_end, partial(_BackgroundSaver.finish, at_exit=True))


def async_save(
    state: Mapping[str, Any],
    url: Url,
    *,
    overwrite: bool = False,
    metadata: Mapping[str, Any] | None = None,
    base: Url | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    options: SaveOptions | None = None,
    progress: Progress | None = None,
    keep_buffers: bool = True,
    copy_in_background: bool = False,
) -> SaveFuture:
    """Copy a state to CPU memory, return, and save the copy in the background.

    Training waits only for the copy, and for the previous background save if it has not ended. Two saves never run at
    the same time. During the copy, the coordinator checks for a committed checkpoint (one request, none with
    ``overwrite``), and all ranks wait for the result. The first call opens connections between the ranks and keeps them
    for later calls. No collective runs on the training group. A process waits for an unfinished save before it exits.
    Requests and bytes are otherwise those of :func:`zarrckpt.save`. The copy needs additional memory of the size of
    this rank's part of the state.

    Args:
        state: as for :func:`zarrckpt.save`. Values are encoded during the copy. After the call the state may change,
            and the process group may be destroyed. With ``copy_in_background`` the state may change after
            ``future.copied()``.
        url: the url of the new checkpoint, as for :func:`zarrckpt.save`.
        overwrite: replace a committed checkpoint at this url (default False: raise CheckpointExistsError).
        metadata: a dict of JSON types to store with the checkpoint, as for :func:`zarrckpt.save`.
        base: an earlier checkpoint whose unchanged chunks are reused, as for :func:`zarrckpt.save`.
        process_group: the ranks that save together (default: all). Each rank of the group must call it.
        no_dist: save this process alone, as in :func:`zarrckpt.save`.
        storage_options: options of the store by name, as for :func:`zarrckpt.save`.
        options: as for :func:`zarrckpt.save`. Its ``timeout`` applies separately to this call and to the background
            save.
        progress: as for :func:`zarrckpt.save`, called in background threads.
        keep_buffers: keep the memory of the copy for the next call (default). The next copy then takes about a third
            of the time, because allocating and pinning memory is slow. False frees the memory after this save.
        copy_in_background: return before the state is copied. Then call ``future.copied()`` before the next optimizer
            step, because the state must not change until it returns. Default False: the state is copied on return.

    Raises CheckpointExistsError at once, on all ranks, if a checkpoint is committed and ``overwrite`` is false. Raises
    TypeError and ValueError for invalid arguments, such as a ``process_group`` without this rank. Raises StorageError
    for an unknown option of the store, and CheckpointError if a rank does not join the call within the timeout.

    Returns a :class:`SaveFuture` of a :class:`SaveReport`. Its ``result()`` raises the other errors of
    :func:`zarrckpt.save`, equally on all ranks, including errors for entries that cannot be saved. If no caller asks
    the future for its error, the next call logs it (logger ``zarrckpt``). At the end of the process it is logged and
    written to stderr as one line, and the exit status does not change. The save cannot be cancelled.
    """
    objects.refuse_swapped_arguments(state, url, "async_save")
    ranks = Ranks(process_group, no_dist=no_dist)
    if no_dist:
        objects.refuse_collective_objects(state)
    request = SaveRequest.from_arguments(
        url,
        options,
        overwrite=overwrite,
        metadata=metadata,
        storage_options=storage_options,
        progress=progress,
        base=base,
    )
    return save_in_background(state, request, ranks, keep_buffers=keep_buffers, copy_in_background=copy_in_background)


def save_in_background(
    state: Mapping[str, Any],
    request: SaveRequest,
    ranks: Ranks,
    *,
    keep_buffers: bool = True,
    copy_in_background: bool = False,
) -> SaveFuture:
    """Copy a state, return, and save the copy in the background, as :func:`async_save`, with checked arguments."""
    # One saver per process, because a forked child has neither the thread nor the connections.
    saver = _savers.get(os.getpid()) or _savers.setdefault(os.getpid(), _BackgroundSaver())
    return saver.save(state, request, ranks, keep_buffers=keep_buffers, copy_in_background=copy_in_background)
