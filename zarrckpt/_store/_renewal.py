"""Credentials that are read again from their source after a server refused them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from zarrckpt._forks import ForkSafeLock
from zarrckpt._store._failures import refuses_credentials

T = TypeVar("T")


class Renewal:
    """Repeats requests with new credentials. Requests that fail at the same time share one renewal.

    ``renew`` replaces the credentials that requests use. It is None if they cannot change. Its error is kept for the
    message about the request.
    """

    def __init__(self, renew: Callable[[], None] | None) -> None:
        self._renew = renew
        self._lock = ForkSafeLock()
        self.count = 0
        """Number of times that the credentials were replaced."""
        self.error: Exception | None = None
        """The reason why the last renewal failed."""

    @property
    def is_possible(self) -> bool:
        return self._renew is not None

    def call(self, request: Callable[[], T]) -> T:
        """Make a request, and again with new credentials if the server refuses them."""
        count = self.count
        try:
            return request()
        except Exception as error:
            if self._renew is None or not refuses_credentials(error):
                raise
            with self._lock:
                if count == self.count:
                    self.error = _error_of(self._renew)
                    if self.error is not None:
                        raise
                    self.count += 1
        return request()


def _error_of(call: Callable[[], None]) -> Exception | None:
    try:
        call()
    except Exception as error:
        return error
    return None
