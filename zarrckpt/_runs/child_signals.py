"""Signals in the children of a process that handles them, such as the workers of a DataLoader. No torch.

A scheduler or torchrun signals all processes of a job. A child that ended at once would break the loop that is to save.
So a child ignores a signal that its parent handles and has got, too. Another one, such as ``Process.terminate`` sends,
ends the child as it would without a manager, ``SAME_SECONDS`` later.
"""

from __future__ import annotations

import atexit
import ctypes
import math
import os
import signal
import time
from collections.abc import Callable, Collection
from types import FrameType
from typing import Any

from zarrckpt._runs.wakeup import Wakeup

SAME_SECONDS = 1.0
"""Signals that come within this time are one: a scheduler and torchrun may both send theirs."""

_UNHANDLED, _HANDLED = 0.0, -math.inf
_ARRIVAL_POLL_SECONDS = 0.02

_own: Any = None
"""By the number of a signal that this process handles: the time of the last one, ``_HANDLED`` or ``_UNHANDLED``.

Memory that its forked and spawned children share.
"""
_child: ChildSignals | None = None


def set_handled(numbers: Collection[int]) -> None:
    """Publish the signals that this process handles to its children."""
    if not numbers and _own is None:
        return
    for number, known in enumerate(_own_memory()):
        if (number in numbers) != (known != _UNHANDLED):
            _own[number] = _HANDLED if number in numbers else _UNHANDLED


def note_arrival(number: int, now: float) -> None:
    """Publish that this process has got a signal that it handles."""
    _own_memory()[number] = now


def begin_in_child(handled: Collection[int]) -> None:
    """Ignore signals in this forked child; ``handled``: those that the parent handles, whose handlers are put back."""
    global _own, _child
    shared, _own = _own, None
    parent, _child = _child, None
    ignored = parent.leave() if parent is not None else set()
    if not handled and parent is not None:
        # The parent is a child itself: both ignore what its parent handles.
        handled, shared = ignored, parent.shared
    if handled:
        _child = ChildSignals(shared, handled)
        _child.install()
        # Imported here: this module runs without torch.
        from zarrckpt._ranks.torch_private import call_in_data_loader_workers

        call_in_data_loader_workers(_install_in_worker)


class WorkerInit:
    """A ``worker_init_fn`` for DataLoader workers that are spawned: they ignore the signals of a manager.

    .. code-block:: python

        loader = DataLoader(data, num_workers=2, multiprocessing_context="spawn", worker_init_fn=zarrckpt.WorkerInit())

    Forked workers need none. The workers must be started after the manager is made: it decides which signals are
    ignored. A worker ignores a signal only if the process of the manager has got it, too, so ``terminate`` ends it.

    Args:
        then: a ``worker_init_fn`` to call after that, with the worker's number; picklable for spawned workers.
    """

    def __init__(self, then: Callable[[int], object] | None = None) -> None:
        self._then = then

    def __call__(self, worker: int) -> None:
        _install_in_worker()
        if self._then is not None:
            self._then(worker)

    def __reduce__(self) -> tuple[Any, ...]:
        from multiprocessing import context

        if context.get_spawning_popen() is None:
            return WorkerInit, (self._then,)
        handled = [number for number, known in enumerate(_own_memory()) if known != _UNHANDLED]
        return _worker_init, (self._then, _own, handled)


def _worker_init(then: Callable[[int], object] | None, shared: Any, handled: Collection[int]) -> WorkerInit:
    """Make a WorkerInit in a spawned process."""
    global _child
    if _child is None and handled:
        _child = ChildSignals(shared, handled)
    return WorkerInit(then)


def _install_in_worker() -> None:
    if _child is not None:
        _child.install(in_torch_worker=True)


class ChildSignals:
    """Handlers of a child process, and the thread that decides which signals end it."""

    def __init__(self, shared: Any, numbers: Collection[int]) -> None:
        """``shared`` is the memory of the process that handles these signals."""
        self.shared = shared
        self._before: dict[int, Any] = {number: signal.getsignal(number) for number in numbers}
        self._ending: set[int] = set()
        self._in_torch_worker = False
        self._wakeup: Wakeup | None = None

    def install(self, in_torch_worker: bool = False) -> None:
        """Handle the signals. In the main thread; again after another library has replaced the handlers."""
        self._in_torch_worker |= in_torch_worker
        if self._wakeup is None:
            # A descriptor of before belongs to the parent.
            signal.set_wakeup_fd(-1)
            self._wakeup = Wakeup(self._arrived)
        self._wakeup.begin()
        for number in self._before:
            signal.signal(number, self._handle)

    def leave(self) -> set[int]:
        """Put back the handlers, in a child of this child; return the signals that were ignored."""
        if self._wakeup is not None:
            self._wakeup.leave_in_child()
        ignored = {number for number in self._before if signal.getsignal(number) == self._handle}
        for number in ignored:
            signal.signal(number, signal.SIG_DFL if self._before[number] is None else self._before[number])
        return ignored

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number in self._ending:
            if callable(self._before[number]):
                self._before[number](number, frame)
        elif self._wakeup is not None and not self._wakeup.is_set():
            self._arrived(number)

    def _arrived(self, number: int) -> None:
        # A handler that was set after ours counts alone.
        if number in self._before and signal.getsignal(number) == self._handle and not self._parent_got(number):
            self._end(number)

    def _parent_got(self, number: int) -> bool:
        """Whether the parent handles a signal and has got it at about this time."""
        now = time.monotonic()
        while (known := self.shared[number]) != _UNHANDLED:
            if abs(known - now) <= SAME_SECONDS:
                return True
            if time.monotonic() - now > SAME_SECONDS:
                return False
            time.sleep(_ARRIVAL_POLL_SECONDS)
        return False

    def _end(self, number: int) -> None:
        """Do as the child would without a manager. The main thread may be in C, and never come back."""
        before = self._before[number]
        if number in self._ending or before == signal.SIG_IGN:
            return
        if self._in_torch_worker and number == signal.SIGTERM:
            # As torch's own handler does if the DataLoader ends its workers.
            os._exit(0)
        self._ending.add(number)
        if not callable(before):
            set_handler = ctypes.pythonapi.PyOS_setsig
            set_handler.argtypes, set_handler.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
            set_handler(number, None)
        os.kill(os.getpid(), number)


def _own_memory() -> Any:
    global _own
    if _own is None:
        # Imported here: imports without a manager need none of it.
        from multiprocessing.sharedctypes import RawArray

        size = max(signal.valid_signals()) + 1
        try:
            _own = RawArray("d", size)
        except OSError:  # no folder for temporary files: children then end as without a manager
            _own = [_UNHANDLED] * size
        # Before multiprocessing ends its children by SIGTERM and waits for them: later hooks run first.
        atexit.register(set_handled, ())
    return _own
