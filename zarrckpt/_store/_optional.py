"""Requests that a save can do without. They may cost it at most 10 seconds in all."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

from zarrckpt._store._failures import ABSENT, max_repeats

T = TypeVar("T")

_SECONDS = 10.0
_PAUSE_SECONDS = 0.2


class OptionalRequests:
    """The time that optional requests may lose: copies, and reads of the base of one save. Used by many threads.

    Requests that succeed, or find no object, cost nothing. A request that fails and may succeed soon is made once more.
    When the time is used up, requests that still wait are cancelled.
    """

    def __init__(self) -> None:
        self._left = _SECONDS
        self.problem = ""
        """The reason of :meth:`end`."""
        self._lock = threading.Lock()
        self._waiting: set[Future[Any]] = set()

    @property
    def has_ended(self) -> bool:
        """Whether no request is made any more."""
        return self._left <= 0

    def end(self, problem: str) -> bool:
        """Make no further request, and cancel those that wait. Return False if that was done before."""
        with self._lock:
            first, self.problem = not self.problem, self.problem or problem
        self._spend(_SECONDS)
        return first

    def ask(self, begin: Callable[[float], Future[T]]) -> T:
        """Return the result of a request. ``begin`` starts it with a limit in seconds.

        Raises TimeoutError if it is not answered in time, and the request's own error.
        """
        try:
            return self._ask_once(begin)
        except TimeoutError:
            raise
        except Exception as error:
            if isinstance(error, ABSENT) or not max_repeats(error):
                raise
        time.sleep(random.uniform(0, _PAUSE_SECONDS))
        return self._ask_once(begin)

    def _ask_once(self, begin: Callable[[float], Future[T]]) -> T:
        began = time.monotonic()
        with self._lock:
            if self.has_ended:
                raise TimeoutError(f"requests that can be left out have taken {_SECONDS:.0f} s without success")
            waiting = begin(self._left)
            self._waiting.add(waiting)
        try:
            return waiting.result()
        except ABSENT:
            raise
        except (CancelledError, TimeoutError):
            self._spend(time.monotonic() - began)
            raise TimeoutError(f"there was no answer within {_SECONDS:.0f} s") from None
        except BaseException:
            self._spend(time.monotonic() - began)
            raise
        finally:
            with self._lock:
                self._waiting.discard(waiting)

    def _spend(self, seconds: float) -> None:
        with self._lock:
            self._left -= seconds
            waiting = [*self._waiting] if self.has_ended else []
        for one in waiting:
            one.cancel()
