"""One handler of signals for all managers of a process. No torch."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any

from zarrckpt._errors import log
from zarrckpt._runs import child_signals
from zarrckpt._runs.child_signals import SAME_SECONDS
from zarrckpt._runs.wakeup import Wakeup


class Watch:
    """The signals that one manager handles."""

    def __init__(self, numbers: frozenset[int], on_signal: Callable[[str], None]) -> None:
        """``on_signal`` is called with the signal's name, in any thread."""
        self.numbers = numbers
        self.on_signal = on_signal
        self.first: float | None = None
        """The monotonic time of the first signal, or None."""


def note_signal(watches: Sequence[Watch], number: int, now: float) -> tuple[list[Watch], bool]:
    """Return the watches for which this is the first signal, and whether the process must end. No I/O.

    The process ends at a watch's second signal if it arrives more than ``SAME_SECONDS`` after the first.
    """
    concerned = [watch for watch in watches if number in watch.numbers]
    must_end = any(watch.first is not None and now - watch.first > SAME_SECONDS for watch in concerned)
    fresh = [watch for watch in concerned if watch.first is None]
    for watch in fresh:
        watch.first = now
    return fresh, must_end


class Handler:
    """The handler of one signal, and the handler that it replaced."""

    def __init__(self, dispatcher: Dispatcher, number: int) -> None:
        self._dispatcher = dispatcher
        self.previous: Any = signal.getsignal(number)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        call_previous = self._dispatcher.handle(number)
        # Python's own handler of Ctrl-C would end the training loop before it saves.
        if call_previous and callable(self.previous) and self.previous is not signal.default_int_handler:
            self.previous(number, frame)


class Dispatcher:
    """The signal handlers of this process, shared by all watches. They are removed with the last watch."""

    def __init__(self) -> None:
        self._open: list[Watch] = []
        """The watches that are not closed."""
        self._wakeup: Wakeup | None = None

    def _numbers(self) -> set[int]:
        """Return the numbers of the signals that at least one watch handles."""
        return {number for watch in [*self._open] for number in watch.numbers}

    def watch(self, names: Sequence[str], on_signal: Callable[[str], None]) -> Watch:
        """Handle these signals: call ``on_signal`` with the name of the first one that arrives, in any thread.

        Raises ValueError for an unknown signal, and outside the main thread.
        """
        unknown = [name for name in names if name not in signal.Signals.__members__ or name in ("SIGKILL", "SIGSTOP")]
        if unknown:
            raise ValueError(f"signals must be names that can be handled, such as 'SIGTERM', got {unknown[0]!r}")
        if not _is_main_thread():
            raise ValueError(
                "signals can be handled only if the manager is created in the main thread: create it there, or pass "
                "signals=()"
            )
        watch = Watch(frozenset(signal.Signals[name].value for name in names), on_signal)
        if self._wakeup is None:
            self._wakeup = Wakeup(self._arrived)
        self._open.append(watch)
        self._wakeup.begin()
        for number in watch.numbers:
            if not self._is_ours(number):
                signal.signal(number, Handler(self, number))
        child_signals.set_handled(self._numbers())
        return watch

    def close(self, watch: Watch) -> None:
        """End a watch, and restore the previous handlers of signals that no other watch handles.

        Outside the main thread, they are restored later, by the next call in the main thread or when the signal
        arrives.
        """
        with suppress(ValueError):  # It may be closed already.
            self._open.remove(watch)
        child_signals.set_handled(self._numbers())
        if _is_main_thread():
            self._put_back_all()
            if self._wakeup is not None and not self._numbers():
                self._wakeup.end()

    def handle(self, number: int) -> bool:
        """Process a signal in the main thread. Return whether the previous handler must be called."""
        if number in self._numbers():
            if self._wakeup is not None and not self._wakeup.is_set():
                self._arrived(number)
        elif self._is_ours(number):
            # The last watch was closed in another thread, which cannot restore the previous handler.
            self._put_back(number)
            if not self._is_ours(number):
                signal.raise_signal(number)
                return False
        return True

    def leave_in_child(self) -> set[int]:
        """Restore the previous handlers in a forked child. Return the signals that the parent handles."""
        handled = self._numbers()
        if self._wakeup is not None:
            self._wakeup.leave_in_child()
        self._open = []
        self._put_back_all()
        return handled

    def _is_ours(self, number: int) -> bool:
        return isinstance(signal.getsignal(number), Handler)

    def _put_back_all(self) -> None:
        for number in signal.valid_signals():
            self._put_back(number)

    def _put_back(self, number: int) -> None:
        # A handler that was set after ours stays. None stands for a handler that was not set by Python.
        while number not in self._numbers() and isinstance(handler := signal.getsignal(number), Handler):
            if handler.previous is None:
                return
            signal.signal(number, handler.previous)

    def _arrived(self, number: int) -> None:
        now = time.monotonic()
        fresh, must_end = note_signal([*self._open], number, now)
        if must_end:
            name = signal.Signals(number).name
            log.warning("%s arrived a second time: the process ends at once", name)
            child_signals.set_handled(set())
            # Not by an exception, because the main thread may never return from C code. The exit status is the one that
            # a shell reports for a process that was ended by a signal.
            os._exit(128 + number)
        if number in self._numbers():
            child_signals.note_arrival(number, now)
        for watch in fresh:
            watch.on_signal(signal.Signals(number).name)


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


dispatcher = Dispatcher()


def _begin_child_signals() -> None:
    global dispatcher
    parent, dispatcher = dispatcher, Dispatcher()
    child_signals.begin_in_child(parent.leave_in_child())


os.register_at_fork(after_in_child=_begin_child_signals)
