"""Signals as soon as they come. No torch.

Python calls a handler only when the main thread is back from C, where it may wait for a collective for minutes. The
number of a signal is written to a file descriptor at once, and read here in a thread.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable
from contextlib import suppress


class Wakeup:
    """Signal numbers as soon as they come, read in a thread, and forwarded to the wake-up descriptor of before.

    The socket lives as long as the process. A library that puts this descriptor back later than we close ours must not
    make Python write to a file that the user has opened since.
    """

    def __init__(self, arrived: Callable[[int], None]) -> None:
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._arrived = arrived
        self._before = -1
        self._copy = -1
        """A duplicate of the descriptor of before: its owner may close it, and its number may be used again."""
        self._copying = threading.RLock()
        threading.Thread(target=self._read, name="zarrckpt-signals", daemon=True).start()

    def begin(self) -> None:
        """Take over the wake-up descriptor. In the main thread."""
        now = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        if now not in (-1, self._writer.fileno()):
            self._forget_before()
            with suppress(OSError):
                self._before, self._copy = now, os.dup(now)

    def end(self) -> None:
        """Put back the descriptor of before, unless another one is set or its owner has closed it."""
        now = signal.set_wakeup_fd(-1)
        if now == self._writer.fileno():
            now = self._before if self._is_before_open() else -1
        if now != -1:
            with suppress(ValueError, OSError):
                signal.set_wakeup_fd(now, warn_on_full_buffer=False)
        self._forget_before()

    def is_set(self) -> bool:
        """Whether signals are written to this descriptor now. In the main thread."""
        now = signal.set_wakeup_fd(-1)
        if now != -1:
            with suppress(ValueError, OSError):
                signal.set_wakeup_fd(now, warn_on_full_buffer=False)
        return now == self._writer.fileno()

    def leave_in_child(self) -> None:
        """Stop writing to the parent's socket. In a forked child."""
        now = signal.set_wakeup_fd(-1)
        if now not in (-1, self._writer.fileno()):
            signal.set_wakeup_fd(now, warn_on_full_buffer=False)
        self._reader.close()
        self._writer.close()

    def _is_before_open(self) -> bool:
        try:
            return self._copy != -1 and os.path.sameopenfile(self._before, self._copy)
        except OSError:
            return False

    def _forget_before(self) -> None:
        with self._copying:
            copy, self._before, self._copy = self._copy, -1, -1
            if copy != -1:
                os.close(copy)

    def _read(self) -> None:
        while data := self._reader.recv(64):
            with self._copying, suppress(OSError):
                if self._copy != -1:
                    os.write(self._copy, data)
            for number in data:
                self._arrived(number)
