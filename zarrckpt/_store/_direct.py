"""Ranged gets from S3 over plain HTTP, received straight into the memory where the bytes belong.

obstore hands out an answer in memory of its own, piece by piece; to copy it from there costs more than receiving it
(``python -m benchmarks --only gets``). So the many large reads of a load go over connections of our own. All else stays
with obstore: it finds the credentials and signs the urls, and what the server answers other than with the bytes that
were asked for is asked again through it, so that it alone tells what is wrong. And all that goes over TLS: Python's
gives the interpreter's lock away for every 16 KiB, and is slower the more threads wait for it; obstore needs no lock.
"""

from __future__ import annotations

import os
import threading
import weakref
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

_PARTIAL, _BEHIND_THE_END = 206, 416
_BUSY = frozenset((408, 429, 500, 502, 503, 504))
"""The answers that may be others the next time."""

_CLIENT = frozenset(("allow_http", "allow_invalid_certificates", "connect_timeout", "read_timeout", "root_certificate"))
_CLIENT |= {"http1_only", "pool_idle_timeout", "pool_max_idle_per_host", "timeout"}
"""The options of obstore's HTTP client that are followed here, or that change nothing."""

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
    usable: bool = True
    _idle: list[Connection] = field(default_factory=list)
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
            return self._received(connection, answer, buffer)
        except (OSError, NotHttpError) as error:
            raise TransferError(f"{type(error).__name__}: {error}") from error

    def _received(self, connection: Connection, answer: Answer, buffer: memoryview) -> int | None:
        """As :func:`_receive`; the connection is kept for the next request where nothing is left on it."""
        keep = False
        try:
            whole = _receive(connection, answer, buffer)
            keep = whole == len(buffer) and answer.keeps
            return whole
        finally:
            if keep:
                with self._lock:
                    self._idle.append(connection)
            else:
                connection.close()

    def _asked(self, url: SplitResult, first: int, last: int) -> tuple[Connection, Answer]:
        target = f"{url.path}?{url.query}" if url.query else url.path
        while True:
            with self._lock:
                used = self._idle.pop() if self._idle else None
            connection = used or self.connect(url)
            try:
                return connection, connection.get(url.netloc, target, first, last)
            except ConnectionError:
                connection.close()
                if used is None:
                    raise
                # The server had closed it meanwhile, as servers do: there is another one.
            except BaseException:
                connection.close()
                raise


def _receive(connection: Connection, answer: Answer, buffer: memoryview) -> int | None:
    if answer.status in _BUSY:
        raise TransferError(f"the server answered {answer.status} {answer.reason}")
    if answer.status == _BEHIND_THE_END:
        return 0
    if answer.status != _PARTIAL or answer.length is None or answer.length > len(buffer):
        return None
    if answer.length < len(buffer):
        return answer.length
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
    return DirectReads(sign, _Connector(out.client))


class _Connector:
    """Opens connections with the settings of obstore's HTTP client."""

    def __init__(self, client: Mapping[str, Any]) -> None:
        self._connect_seconds = _seconds(client.get("connect_timeout")) or CONNECT_SECONDS
        limits = (_seconds(client.get(name)) for name in ("timeout", "read_timeout"))
        self._answer_seconds = min((limit for limit in limits if limit is not None), default=None)

    def __call__(self, url: SplitResult) -> Connection:
        assert url.hostname is not None
        return Connection((url.hostname, url.port or 80), self._connect_seconds, self._answer_seconds)


def _seconds(value: Any) -> float | None:
    return value.total_seconds() if isinstance(value, timedelta) else None


def _behind_a_proxy() -> bool:
    proxies = ("http_proxy", "https_proxy", "all_proxy")
    return any(value for name, value in os.environ.items() if name.lower() in proxies)


def _close(idle: list[Connection]) -> None:
    for connection in idle:
        connection.close()
