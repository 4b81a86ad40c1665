"""Ranged gets from S3 over plain HTTP, received straight into the memory where the bytes belong.

obstore hands out an answer in memory of its own, piece by piece; to copy it from there costs more than receiving it
(``python -m benchmarks --only gets``). So the many large reads of a load go over connections of our own. All else stays
with obstore: it finds the credentials and signs the urls, and what the server answers other than with the bytes that
were asked for is asked again through it, so that it alone tells what is wrong. And all that goes over TLS: Python's
gives the interpreter's lock away for every 16 KiB, and is slower the more threads wait for it; obstore needs no lock.
"""

from __future__ import annotations

import os
import re
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from urllib.parse import SplitResult, urlsplit

from zarrckpt._store._options import Translated, is_plain_http
from zarrckpt._store._s3_options import is_set
from zarrckpt._store._wire import Answer, Connection, NotHttpError

CONNECT_SECONDS = 5.0
"""As obstore's own default."""

IDLE_SECONDS = 90.0
"""As obstore's own default. What lies between may have forgotten an older connection, and tell nobody."""

_PARTIAL, _LATE, _BEHIND_THE_END = 206, 408, 416
_BUSY = frozenset((_LATE, 429, 500, 502, 503, 504))
"""The answers that may be others the next time."""

_CLIENT = frozenset(("allow_http", "allow_invalid_certificates", "connect_timeout", "read_timeout", "root_certificate"))
_CLIENT |= {"http1_only", "pool_idle_timeout", "pool_max_idle_per_host", "timeout"}
"""The options of obstore's HTTP client that are followed here, or that change nothing."""

_DURATIONS = ("connect_timeout", "read_timeout", "timeout", "pool_idle_timeout")

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION = re.compile(r"(?:\d{1,12} *(?:ms|s|m|h) *)+")

_HEADERS = ("request_payer", "s3_express", "sse_customer_key_base64")
"""The settings whose requests need more than a signed url."""


class TransferError(Exception):
    """The server was busy, or the connection broke: the same request may succeed the next time."""


@dataclass
class DirectReads:
    """Ranged gets over connections of our own. Safe for many threads; of no use in a forked child."""

    sign: Callable[[str], str]
    """The signed url of a key's GET."""
    connect: Callable[[SplitResult], Connection]
    idle_seconds: float = IDLE_SECONDS
    """Connections that have waited longer are not used again."""
    usable: bool = True
    _idle: deque[tuple[float, Connection]] = field(default_factory=deque)
    """And since when, the longest first."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        weakref.finalize(self, _close, self._idle)

    def give_up(self) -> None:
        """This server answers obstore, and not us: no further request comes here."""
        self.usable = False

    def read_into(self, key: str, byte_offset: int, buffer: memoryview) -> int | None:
        """Fill ``buffer`` with an object's bytes; return how many the object has of them.

        None where the server answers anything else: obstore may ask then. Raises TransferError. One request.
        """
        url = urlsplit(self.sign(key))
        try:
            connection, answer = self._asked(url, byte_offset, byte_offset + len(buffer) - 1)
            return self._received(connection, answer, byte_offset, buffer)
        except (OSError, NotHttpError) as error:
            raise TransferError(f"{type(error).__name__}: {error}") from error

    def _received(self, connection: Connection, answer: Answer, first: int, buffer: memoryview) -> int | None:
        """As :func:`_receive`; the connection is kept for the next request where nothing is left on it."""
        keep = False
        try:
            whole = _receive(connection, answer, first, buffer)
            keep = whole == len(buffer) and answer.keeps
            return whole
        finally:
            if keep:
                with self._lock:
                    self._idle.append((time.monotonic(), connection))
            else:
                connection.close()

    def _asked(self, url: SplitResult, first: int, last: int) -> tuple[Connection, Answer]:
        target = f"{url.path}?{url.query}" if url.query else url.path
        host = url.netloc.rpartition("@")[2]
        while True:
            used = self._idle_one()
            connection = used or self.connect(url)
            try:
                answer = connection.get(host, target, first, last)
                if used is None or answer.status != _LATE:
                    return connection, answer
                connection.close()  # that was said before it was asked
            except (ConnectionError, NotHttpError):
                connection.close()
                if used is None:
                    raise
                # The server had closed it meanwhile, as servers do, some with words of their own: there is another one.
            except BaseException:
                connection.close()
                raise

    def _idle_one(self) -> Connection | None:
        """The connection that was used last, if any waits; those that have waited too long are closed."""
        oldest = time.monotonic() - self.idle_seconds
        with self._lock:
            while self._idle and self._idle[0][0] < oldest:
                self._idle.popleft()[1].close()
            return self._idle.pop()[1] if self._idle else None


def _receive(connection: Connection, answer: Answer, first: int, buffer: memoryview) -> int | None:
    if answer.status in _BUSY:
        raise TransferError(f"the server answered {answer.status} {answer.reason}")
    if answer.status == _BEHIND_THE_END:
        return 0
    if answer.status != _PARTIAL or answer.first != first or answer.length is None or answer.length > len(buffer):
        return None
    if answer.length < len(buffer):
        # Less than was asked for is the object's end, or a server's own limit.
        return answer.length if first + answer.length == answer.total else None
    done = connection.receive_into(buffer)
    if done < len(buffer):
        raise TransferError(f"the connection was closed after {done} of {len(buffer)} bytes")
    return done


def direct_reads(sign: Callable[[str], str], out: Translated) -> DirectReads | None:
    """Direct reads with the settings of an S3 client; None for TLS, and where they ask for what can't be done here."""
    if not is_plain_http(out.config.get("endpoint")):
        return None
    if out.client.keys() - _CLIENT or any(is_set(out, name) for name in _HEADERS) or _behind_a_proxy():
        return None
    given = {name: _seconds(out.client[name]) for name in _DURATIONS if out.client.get(name) is not None}
    seconds = {name: value for name, value in given.items() if value is not None}
    if len(seconds) < len(given):
        return None
    return DirectReads(sign, _Connector(seconds), seconds.get("pool_idle_timeout", IDLE_SECONDS))


class _Connector:
    """Opens connections with the settings of obstore's HTTP client."""

    def __init__(self, seconds: Mapping[str, float]) -> None:
        self._connect_seconds = seconds.get("connect_timeout") or CONNECT_SECONDS
        self._answer_seconds, self._silent_seconds = seconds.get("timeout"), seconds.get("read_timeout")

    def __call__(self, url: SplitResult) -> Connection:
        assert url.hostname is not None
        address = (url.hostname, url.port or 80)
        return Connection(address, self._connect_seconds, self._answer_seconds, self._silent_seconds)


def _seconds(value: Any) -> float | None:
    """A duration as obstore takes them, or writes them (``"1m 30s"``); None where it is in other words."""
    if isinstance(value, timedelta):
        return value.total_seconds()
    text = str(value)
    if not _DURATION.fullmatch(text):
        return None
    return sum(int(count) * _UNITS[unit] for count, unit in re.findall(r"(\d+) *(ms|s|m|h)", text))


def _behind_a_proxy() -> bool:
    proxies = ("http_proxy", "https_proxy", "all_proxy")
    return any(value for name, value in os.environ.items() if name.lower() in proxies)


def _close(idle: deque[tuple[float, Connection]]) -> None:
    for _, connection in idle:
        connection.close()
