"""Signals in the children of a process that handles them, such as the workers of a DataLoader. No torch.

A scheduler or torchrun sends a signal to all processes of a job. If a child ended at once, the training loop would fail
before it saves. So a child ignores a signal that its parent handles and has also received. Any other signal, for
example from ``Process.terminate``, ends the child as without a manager, ``SAME_SECONDS`` later.
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
"""Signals within this time in seconds count as one, because a scheduler and torchrun may both send a signal."""

_UNHANDLED, _HANDLED = 0.0, -math.inf
_ARRIVAL_POLL_SECONDS = 0.02

_own: Any = None
"""The time of the last signal by signal number. ``_HANDLED`` if none has arrived, ``_UNHANDLED`` if it is not handled.

Forked and spawned children of this process share this memory.
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
    """Publish that this process has received a signal that it handles."""
    _own_memory()[number] = now


def begin_in_child(handled: Collection[int]) -> None:
    """Ignore signals in this forked child.

    ``handled`` are the signals that the parent handles. Their previous handlers are restored already.
    """
    global _own, _child
    shared, _own = _own, None
    parent, _child = _child, None
    ignored = parent.leave() if parent is not None else set()
    if not handled and parent is not None:
        # The parent is itself a child, so both ignore the signals of the grandparent.
        handled, shared = ignored, parent.shared
    if handled:
        _child = ChildSignals(shared, handled)
        _child.install()
        # Imported here, because this module must run without torch.
        from zarrckpt._ranks.torch_private import call_in_data_loader_workers

        call_in_data_loader_workers(_install_in_worker)


class WorkerInit:
    """A ``worker_init_fn`` for spawned DataLoader workers, which then ignore the signals of a manager.

    .. code-block:: python

        loader = DataLoader(data, num_workers=2, multiprocessing_context="spawn", worker_init_fn=zarrckpt.WorkerInit())

    Forked workers do not need it. The workers must be started after the manager was created, because it determines the
    signals. A worker ignores a signal only if the process of the manager has received it too, so ``terminate`` still
    ends a worker.

    Args:
        then: a ``worker_init_fn`` to call afterwards, with the worker's number. It must be picklable for spawned
            workers.
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
    """Return a WorkerInit in a spawned process."""
    global _child
    if _child is None and handled:
        _child = ChildSignals(shared, handled)
    return WorkerInit(then)


def _install_in_worker() -> None:
    if _child is not None:
        _child.install(in_torch_worker=True)


class ChildSignals:
    """The signal handlers of a child process, and the thread that decides which signals end it."""

    def __init__(self, shared: Any, numbers: Collection[int]) -> None:
        """``shared`` is the memory of the process that handles these signals."""
        self.shared = shared
        self._previous: dict[int, Any] = {number: signal.getsignal(number) for number in numbers}
        self._ending: set[int] = set()
        self._in_torch_worker = False
        self._wakeup: Wakeup | None = None

    def install(self, in_torch_worker: bool = False) -> None:
        """Handle the signals. Call it in the main thread, and again if another library has replaced the handlers."""
        self._in_torch_worker |= in_torch_worker
        if self._wakeup is None:
            # The previous descriptor belongs to the parent.
            signal.set_wakeup_fd(-1)
            self._wakeup = Wakeup(self._arrived)
        self._wakeup.begin()
        for number in self._previous:
            signal.signal(number, self._handle)

    def leave(self) -> set[int]:
        """Restore the previous handlers in a child of this child. Return the signals that were ignored."""
        if self._wakeup is not None:
            self._wakeup.leave_in_child()
        ignored = {number for number in self._previous if signal.getsignal(number) == self._handle}
        for number in ignored:
            signal.signal(number, signal.SIG_DFL if self._previous[number] is None else self._previous[number])
        return ignored

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number in self._ending:
            if callable(self._previous[number]):
                self._previous[number](number, frame)
        elif self._wakeup is not None and not self._wakeup.is_set():
            self._arrived(number)

    def _arrived(self, number: int) -> None:
        # If another handler was set after ours, it alone handles the signal.
        if number in self._previous and signal.getsignal(number) == self._handle and not self._parent_got(number):
            self._end(number)

    def _parent_got(self, number: int) -> bool:
        """Whether the parent handles a signal and has received it within ``SAME_SECONDS`` of now."""
        now = time.monotonic()
        while (known := self.shared[number]) != _UNHANDLED:
            if abs(known - now) <= SAME_SECONDS:
                return True
            if time.monotonic() - now > SAME_SECONDS:
                return False
            time.sleep(_ARRIVAL_POLL_SECONDS)
        return False

    def _end(self, number: int) -> None:
        """Let the signal end the child as without a manager, even if the main thread never returns from C code."""
        before = self._previous[number]
        if number in self._ending or before == signal.SIG_IGN:
            return
        if self._in_torch_worker and number == signal.SIGTERM:
            # The same as torch's handler does when the DataLoader ends its workers.
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
        # Imported here, because it is only needed with a manager.
        from multiprocessing.sharedctypes import RawArray

        size = max(signal.valid_signals()) + 1
        try:
            _own = RawArray("d", size)
        except OSError:  # There is no folder for temporary files. Then children end as without a manager.
            _own = [_UNHANDLED] * size
        # This hook runs before the hook of multiprocessing, which ends children with SIGTERM, because it is registered
        # later.
        atexit.register(set_handled, ())
    return _own
