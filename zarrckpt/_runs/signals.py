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

    def __init__(self, numbers: frozenset[int], came: Callable[[str], None]) -> None:
        """``came`` is called with the signal's name, in any thread."""
        self.numbers = numbers
        self.came = came
        self.first: float | None = None
        """The time of the first signal."""


class Watches:
    """The open watches of a process, and the effect of a signal on them. No I/O."""

    def __init__(self) -> None:
        self._open: list[Watch] = []

    def add(self, watch: Watch) -> None:
        self._open.append(watch)

    def remove(self, watch: Watch) -> None:
        """Remove a watch; one that is not open is no error."""
        with suppress(ValueError):
            self._open.remove(watch)

    def numbers(self) -> set[int]:
        """Return the signals that some watch handles."""
        return {number for watch in [*self._open] for number in watch.numbers}

    def arrive(self, number: int, now: float) -> tuple[list[Watch], bool]:
        """Return the watches that get their first signal, and whether the process must end.

        It ends at a watch's second signal, later than ``SAME_SECONDS`` after its first.
        """
        concerned = [watch for watch in [*self._open] if number in watch.numbers]
        must_end = any(watch.first is not None and now - watch.first > SAME_SECONDS for watch in concerned)
        fresh = [watch for watch in concerned if watch.first is None]
        for watch in fresh:
            watch.first = now
        return fresh, must_end


class Handler:
    """The handler of one signal, and the handler that it replaced."""

    def __init__(self, dispatcher: Dispatcher, number: int) -> None:
        self._dispatcher = dispatcher
        self.before: Any = signal.getsignal(number)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        passes_on = self._dispatcher.handle(number)
        # Python's own handler of Ctrl-C would end the loop that is to save.
        if passes_on and callable(self.before) and self.before is not signal.default_int_handler:
            self.before(number, frame)


class Dispatcher:
    """Handles the signals of all watches of this process, and stops when the last one is closed."""

    def __init__(self) -> None:
        self._watches = Watches()
        self._wakeup: Wakeup | None = None

    def watch(self, names: Sequence[str], came: Callable[[str], None]) -> Watch:
        """Call ``came`` with the name of the first of these signals, in any thread.

        Raises ValueError for an unknown signal, and outside the main thread.
        """
        unknown = [name for name in names if name not in signal.Signals.__members__ or name in ("SIGKILL", "SIGSTOP")]
        if unknown:
            raise ValueError(f"signals must be names such as 'SIGTERM', got {unknown[0]!r}, which cannot be handled")
        if not _is_main_thread():
            raise ValueError(
                "signals can be handled only if the manager is made in the main thread: make it there, or pass "
                "signals=()"
            )
        watch = Watch(frozenset(signal.Signals[name].value for name in names), came)
        if self._wakeup is None:
            self._wakeup = Wakeup(self._arrived)
        self._watches.add(watch)
        self._wakeup.begin()
        for number in watch.numbers:
            if not self._is_ours(number):
                signal.signal(number, Handler(self, number))
        child_signals.set_handled(self._watches.numbers())
        return watch

    def close(self, watch: Watch) -> None:
        """End a watch, and put back the handlers that no other one needs.

        Outside the main thread they are put back by the next call in the main thread, or when the signal comes.
        """
        self._watches.remove(watch)
        child_signals.set_handled(self._watches.numbers())
        if _is_main_thread():
            self._put_back_all()
            if self._wakeup is not None and not self._watches.numbers():
                self._wakeup.end()

    def handle(self, number: int) -> bool:
        """Take a signal in the main thread; return whether to call the handler of before."""
        if number in self._watches.numbers():
            if self._wakeup is not None and not self._wakeup.is_set():
                self._arrived(number)
        elif self._is_ours(number):
            # Its last watch was closed in another thread: only now the handler of before can be put back.
            self._put_back(number)
            if not self._is_ours(number):
                signal.raise_signal(number)
                return False
        return True

    def leave_in_child(self) -> set[int]:
        """Put back the handlers in a forked child; return the signals that the parent handles."""
        handled = self._watches.numbers()
        if self._wakeup is not None:
            self._wakeup.leave_in_child()
        self._watches = Watches()
        self._put_back_all()
        return handled

    def _is_ours(self, number: int) -> bool:
        return isinstance(signal.getsignal(number), Handler)

    def _put_back_all(self) -> None:
        for number in signal.valid_signals():
            self._put_back(number)

    def _put_back(self, number: int) -> None:
        # A handler that was set after ours stays. None is one that was not made in Python.
        while number not in self._watches.numbers() and isinstance(handler := signal.getsignal(number), Handler):
            if handler.before is None:
                return
            signal.signal(number, handler.before)

    def _arrived(self, number: int) -> None:
        now = time.monotonic()
        fresh, must_end = self._watches.arrive(number, now)
        if must_end:
            name = signal.Signals(number).name
            log.warning("%s came again: the process ends at once", name)
            child_signals.set_handled(set())
            # As a shell reports a process that a signal has ended. The main thread may be in C, and never come back.
            os._exit(128 + number)
        if number in self._watches.numbers():
            child_signals.note_arrival(number, now)
        for watch in fresh:
            watch.came(signal.Signals(number).name)


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


dispatcher = Dispatcher()


def _begin_child_signals() -> None:
    global dispatcher
    parent, dispatcher = dispatcher, Dispatcher()
    child_signals.begin_in_child(parent.leave_in_child())


os.register_at_fork(after_in_child=_begin_child_signals)
