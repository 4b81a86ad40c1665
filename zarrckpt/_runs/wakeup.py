"""Immediate notice of signals. No torch.

Python calls a handler only when the main thread returns from C code, which may wait for a collective call for minutes.
But Python writes the number of a signal to a file descriptor at once, and a thread of this module reads it.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable
from contextlib import suppress


class Wakeup:
    """A thread that reads the numbers of signals at once, and forwards them to the previous wake-up descriptor.

    The socket stays open until the process ends. Otherwise a library that restores our descriptor after we have closed
    it could make Python write to a file that the user has opened since.
    """

    def __init__(self, arrived: Callable[[int], None]) -> None:
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._arrived = arrived
        self._previous = -1
        self._copy = -1
        """A duplicate of the previous descriptor, because its owner may close it and its number may be reused."""
        self._copying = threading.RLock()
        threading.Thread(target=self._read, name="zarrckpt-signals", daemon=True).start()

    def begin(self) -> None:
        """Replace the wake-up descriptor. Call it in the main thread."""
        now = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        if now not in (-1, self._writer.fileno()):
            self._forget_previous()
            with suppress(OSError):
                self._previous, self._copy = now, os.dup(now)

    def end(self) -> None:
        """Restore the previous descriptor, unless another one is set or the owner of the previous one has closed it."""
        now = signal.set_wakeup_fd(-1)
        if now == self._writer.fileno():
            now = self._previous if self._is_previous_open() else -1
        if now != -1:
            with suppress(ValueError, OSError):
                signal.set_wakeup_fd(now, warn_on_full_buffer=False)
        self._forget_previous()

    def is_set(self) -> bool:
        """Whether signals are written to this descriptor at present. Call it in the main thread."""
        now = signal.set_wakeup_fd(-1)
        if now != -1:
            with suppress(ValueError, OSError):
                signal.set_wakeup_fd(now, warn_on_full_buffer=False)
        return now == self._writer.fileno()

    def leave_in_child(self) -> None:
        """Stop writing to the parent's socket. Call it in a forked child."""
        now = signal.set_wakeup_fd(-1)
        if now not in (-1, self._writer.fileno()):
            signal.set_wakeup_fd(now, warn_on_full_buffer=False)
        self._reader.close()
        self._writer.close()

    def _is_previous_open(self) -> bool:
        try:
            return self._copy != -1 and os.path.sameopenfile(self._previous, self._copy)
        except OSError:
            return False

    def _forget_previous(self) -> None:
        with self._copying:
            copy, self._previous, self._copy = self._copy, -1, -1
            if copy != -1:
                os.close(copy)

    def _read(self) -> None:
        while data := self._reader.recv(64):
            with self._copying, suppress(OSError):
                if self._copy != -1:
                    os.write(self._copy, data)
            for number in data:
                self._arrived(number)
