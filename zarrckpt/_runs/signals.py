"""Signals as soon as they come, and the handlers that were there before. No torch.

Python calls a handler only when the main thread is back from C, where it may wait for a collective for minutes. The
number of a signal is written to a file descriptor at once, and read here in a thread.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any

from zarrckpt._errors import log

SAME_SECONDS = 1.0
"""Signals that come within this time are one: a scheduler and torchrun may both send theirs."""


class Signals:
    """Calls back at the first of some signals; a second one, later than ``SAME_SECONDS``, ends the process.

    For the main thread only, and for this process: a forked child has the handlers of before.
    """

    def __init__(self, names: Sequence[str], came: Callable[[str], None]) -> None:
        """``came`` is called with the signal's name, in a thread. Raises ValueError for an unknown name."""
        unknown = [name for name in names if name not in signal.Signals.__members__ or name in ("SIGKILL", "SIGSTOP")]
        if unknown:
            raise ValueError(
                f"signals: {unknown[0]!r} is no signal that can be handled: expected names such as 'SIGTERM'"
            )
        if names and threading.current_thread() is not threading.main_thread():
            raise ValueError(
                "signals can be handled only where the manager is made in the main thread: make it there, or pass "
                "signals=()"
            )
        self._came = came
        self._numbers = [signal.Signals[name] for name in names]
        self._first: float | None = None
        self._closed = False
        self._pid = os.getpid()
        if not names:
            return
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._fd_before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        # Known before the first of them can be called.
        self._before: dict[int, Any] = {number: signal.getsignal(number) for number in self._numbers}
        for number in self._numbers:
            signal.signal(number, self._handle)
        threading.Thread(target=self._read, name="zarrckpt-signals", daemon=True).start()
        _handling.add(self)

    def close(self) -> None:
        """Put back what was there before. In the main thread; elsewhere it does nothing."""
        if self._closed or not self._numbers or threading.current_thread() is not threading.main_thread():
            return
        self._closed = True
        for number, before in self._before.items():
            # Whoever has put another handler in the meantime keeps it; None is one that was not made in Python.
            if signal.getsignal(number) == self._handle and before is not None:
                signal.signal(number, before)
        now = signal.set_wakeup_fd(-1)
        if now == self._writer.fileno():
            now = self._fd_before
        if now != -1:
            signal.set_wakeup_fd(now, warn_on_full_buffer=False)
        if self._pid == os.getpid():
            self._writer.close()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        before = self._before[number]
        # Python's own for Ctrl-C would end the loop that is to save.
        if callable(before) and before is not signal.default_int_handler:
            before(number, frame)

    def _read(self) -> None:
        with self._reader:
            while data := self._reader.recv(64):
                if self._fd_before != -1:
                    with suppress(OSError):
                        os.write(self._fd_before, data)
                for number in data:
                    if number in self._numbers:
                        self._arrived(signal.Signals(number).name)

    def _arrived(self, name: str) -> None:
        now = time.monotonic()
        if self._first is None:
            self._first = now
            self._came(name)
        elif now - self._first > SAME_SECONDS:
            log.warning("%s came again: the process ends at once", name)
            # As a shell reports a process that a signal has ended. The main thread may be in C, and never come back.
            os._exit(128 + signal.Signals[name])


_handling: weakref.WeakSet[Signals] = weakref.WeakSet()


def _in_child() -> None:
    """A forked child, such as a data loader's worker, must not tell its signals to the parent's thread."""
    for signals in [*_handling]:
        signals.close()


os.register_at_fork(after_in_child=_in_child)
