"""Locks that are free in a forked child. No torch."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any


class ForkSafeLock:
    """A lock (or semaphore) for ``with`` that is new in a forked child.

    Another thread can hold a lock when the process forks. This thread does not exist in the child, so the lock would
    never be released there.
    """

    def __init__(self, make: Callable[[], AbstractContextManager[Any]] = threading.Lock) -> None:
        self._make = make
        self._lock = make()
        _locks.add(self)

    def __enter__(self) -> None:
        self._lock.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.__exit__(kind, error, trace)

    def _renew(self) -> None:
        self._lock = self._make()


_locks: weakref.WeakSet[ForkSafeLock] = weakref.WeakSet()


def _renew_all() -> None:
    for lock in [*_locks]:
        lock._renew()


os.register_at_fork(after_in_child=_renew_all)
