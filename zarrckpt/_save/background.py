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
from zarrckpt._jobs import Progress, in_thread
from zarrckpt._options import SaveOptions
from zarrckpt._ranks.group import Ranks
from zarrckpt._ranks.rounds import joined
from zarrckpt._reports import SaveReport
from zarrckpt._save.request import SaveRequest
from zarrckpt._save.run import RankSave, save_in_rounds
from zarrckpt._save.staging import Stager, streams_in_use
from zarrckpt._state import objects
from zarrckpt._state.local_state import LocalState
from zarrckpt._store import Url


class SaveFuture(Future[SaveReport]):
    """The future of a background save: its report, and when the state may change.

    It cannot be cancelled: the other ranks would wait.
    """

    def __init__(self, url: str) -> None:
        super().__init__()
        self._url = url
        self._asked = False
        self._copied = threading.Event()
        self._outcome: SaveReport | BaseException | None = None
        self.set_running_or_notify_cancel()
        _futures.add(self)

    def copied(self, timeout: float | None = None) -> None:
        """Wait until the state has been copied, or the copy has failed: from then on the state may change.

        Raises TimeoutError after ``timeout`` seconds, and nothing else: errors of the save come from ``result()``.
        """
        if not self._copied.wait(timeout):
            raise TimeoutError(f"the state of the background save to {self._url} was not copied within {timeout:g} s")

    def set_copied(self) -> None:
        """From now on the state may change. Called by the save."""
        self._copied.set()

    def result(self, timeout: float | None = None) -> SaveReport:
        self.exception(timeout)
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        error = super().exception(timeout)
        self._asked = True
        return error

    def run(self, save: Callable[[], SaveReport]) -> None:
        """Make the save, in the background's thread."""
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
        """End the future in a forked child, with an error if the parent's save is under way."""
        super().__init__()
        self._copied = threading.Event()
        self._asked = True
        outcome = self._outcome
        if outcome is None:
            outcome = CheckpointError(
                f"the background save to {self._url} is made by another process, from which this one was forked: ask "
                "its future there"
            )
        self._set_outcome(outcome)

    def unasked_failure(self) -> str | None:
        """Wait for the end; return the error in one text, once, if no caller has asked the future for it."""
        if self._asked or (error := self.exception()) is None:
            return None
        return f"the background save to {self._url} failed: {type(error).__name__}: {error}"


_futures: weakref.WeakSet[SaveFuture] = weakref.WeakSet()


def _renew_futures() -> None:
    for future in [*_futures]:
        future.renew_in_child()


os.register_at_fork(after_in_child=_renew_futures)


class _Saver:
    """The one background save of a process at a time, with what it keeps between saves."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stager = Stager()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="zarrckpt-async")
        self._last: SaveFuture | None = None

    def save(
        self, state: Mapping[str, Any], request: SaveRequest, ranks: Ranks, keep_buffers: bool, copy_in_background: bool
    ) -> SaveFuture:
        with self._lock:
            self.finish()
            url = request.spec.url
            future = SaveFuture(url)
            call = joined(ranks, f"the background save to {url}", request.options.timeout, lane="background")
            with contextlib.ExitStack() as stack:
                rounds = stack.enter_context(call)
                look = request.refuse_committed if rounds.rank == 0 else lambda: None
                with in_thread(look) as looked:
                    copies = [self._copy_of(state, keep_buffers, copy_in_background)]
                rounds.merge("their copies of the state", lambda: None, lambda _: looked())
                # The background goes on with the same connections: the process group may be destroyed before it ends.
                connected = stack.pop_all()

            def read_state() -> LocalState:
                try:
                    # The copier refers to the state, and must not outlive its call.
                    copied = copies.pop()()
                finally:
                    future.set_copied()
                return LocalState.from_plain_state(copied)

            def save() -> SaveReport:
                with connected:
                    return save_in_rounds(rounds, read_state, RankSave(request, background=True))

            if not copy_in_background:
                future.set_copied()
            self._last = future
            try:
                self._thread.submit(future.run, save)
            except RuntimeError:  # the interpreter is ending
                with connected:
                    raise
            return future

    def _copy_of(self, state: Mapping[str, Any], keep: bool, in_background: bool) -> Callable[[], dict[Any, Any]]:
        """What returns the copy of a state, or raises its error: in the background, where that reaches all ranks."""
        try:
            # In this thread: state dicts may be made with collectives.
            plain = objects.for_save(state).state
            if in_background:
                return partial(self._stager.stage, plain, keep=keep, streams=streams_in_use())
            copied = self._stager.stage(plain, keep=keep)
            return lambda: copied
        except Exception as err:
            failure = err

        def fail() -> NoReturn:
            raise failure

        return fail

    def finish(self) -> None:
        """Wait for the save under way, if any. Log its error if no caller has asked for it."""
        if self._last is not None and (failure := self._last.unasked_failure()) is not None:
            log.error("%s", failure)

    def wait(self) -> None:
        """Wait for the save under way, if any."""
        if self._last is not None:
            Future.exception(self._last)

    def report_end(self) -> None:
        """Write the error of the last save to the log and to stderr if no caller has asked for it."""
        if self._last is not None and (failure := self._last.unasked_failure()) is not None:
            # Without handlers, logging itself would write a second line to stderr.
            if log.hasHandlers():
                log.error("%s", failure)
            print(printable(f"zarrckpt: {failure}"), file=sys.stderr, flush=True)


_savers: dict[int, _Saver] = {}


def _at_end(method: Callable[[_Saver], None]) -> None:
    saver = _savers.get(os.getpid())
    if saver is not None:
        method(saver)


# Not atexit: that comes after concurrent.futures has stopped taking jobs, and a save under way has some to give.
# Registered after the hook of concurrent.futures, this one runs before it.
threading._register_atexit(partial(_at_end, _Saver.wait))  # type: ignore[attr-defined]
# Hooks that were registered later run before this one: its line is among the last.
atexit.register(_at_end, _Saver.report_end)


def async_save(
    state: Mapping[str, Any],
    url: Url,
    *,
    overwrite: bool = False,
    metadata: Mapping[str, Any] | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    options: SaveOptions | None = None,
    progress: Progress | None = None,
    keep_buffers: bool = True,
    copy_in_background: bool = False,
) -> SaveFuture:
    """Copy a state to CPU memory, return, and save the copy in the background.

    Training is held up for the copy only, and for the end of the previous background save if that still runs: there are
    never two at once. Beside its copy the coordinator asks the store whether a checkpoint is committed there (one
    request, none with ``overwrite``), and all ranks wait for its answer. The background has connections of its own,
    made by the first call and kept: no collective runs on the group that trains. At the end of the process a save under
    way is finished. Requests and bytes are otherwise those of :func:`zarrckpt.save`; memory for the copy, as much as
    this rank's part of the state takes, comes on top.

    Args:
        state: a nested dict of modules, optimizers, other Stateful objects, tensors, DTensors, ShardedTensors and any
            Python values, which are encoded in the call. It may change, and the process group may be destroyed, as soon
            as the call returns; with ``copy_in_background``, as soon as ``future.copied()`` does.
        url: where to: a local path, ``file://``, ``s3://``, ``gs://``, ``az://``, or any fsspec url; or a ready zarr or
            obstore store, with ``zarr.storage.StorePath(store, "run/step-7")`` for a path in one.
        overwrite: replace a committed checkpoint at that url; the old one stays readable until the new one is
            committed. False, the default: CheckpointExistsError.
        metadata: what to keep with the checkpoint, for people and programs that choose among several: a dict of JSON
            types such as ``{"step": 7, "val_loss": 2.1}``, at most 64 KiB. Tensors and numpy values of one element are
            taken as numbers. ``Checkpoint.metadata``, ``zarrckpt info`` and ``ls`` show it. The coordinator's counts.
        process_group: the ranks that save together (default: all); each of them calls, the others do not.
        no_dist: this process saves alone, as in :func:`zarrckpt.save`.
        storage_options: options of the store by name, as fsspec or obstore take them, such as ``endpoint_url``
            (``docs/how-to/stores.md``); default: what the environment says. ``credential_provider``, for tokens that
            expire: a picklable callable that returns fresh credentials. An unknown name is a StorageError.
        options: how bytes are laid out and moved, see :class:`SaveOptions`. Its ``timeout`` holds for this
            call and for the background each.
        progress: called on each rank as ``progress(bytes_done, bytes_total)``, in the background's threads.
        keep_buffers: keep the memory of the copy for the next call, which then takes about a third of the time: new
            memory is slow to touch, and slower to pin (default). False frees it, when this save is done.
        copy_in_background: return before the state is copied. It must not change until ``future.copied()`` has
            returned, which belongs before the optimizer's next step. False, the default: it is copied on return.

    Raises CheckpointExistsError at once, on all ranks, where a checkpoint is committed and ``overwrite`` is false.

    Returns a :class:`SaveFuture` of :class:`SaveReport`; its ``result()`` raises what else :func:`zarrckpt.save` would,
    the same on all ranks, what cannot be saved included. An error for which no one has asked the future is logged
    (logger ``zarrckpt``) by the next call. At the end of the process it is logged and written to stderr, as one line;
    the exit status stays as it is. The save cannot be cancelled.

    The call itself raises TypeError and ValueError for arguments that make no sense, such as a ``process_group``
    without this rank, StorageError for an unknown option of the store, and CheckpointError where a rank does not come.
    """
    objects.refuse_swapped(state, url, "async_save")
    ranks = Ranks(process_group, no_dist)
    if no_dist:
        objects.refuse_objects_of_ranks(state)
    request = SaveRequest.from_arguments(
        url,
        options,
        overwrite=overwrite,
        metadata=metadata,
        storage_options=storage_options,
        progress=progress,
    )
    return save_in_background(state, request, ranks, keep_buffers, copy_in_background)


def save_in_background(
    state: Mapping[str, Any],
    request: SaveRequest,
    ranks: Ranks,
    keep_buffers: bool = True,
    copy_in_background: bool = False,
) -> SaveFuture:
    """Copy a state, return, and save the copy: :func:`async_save` with its arguments checked."""
    # By process: a forked child has neither the thread nor the group.
    saver = _savers.get(os.getpid()) or _savers.setdefault(os.getpid(), _Saver())
    return saver.save(state, request, ranks, keep_buffers, copy_in_background)
