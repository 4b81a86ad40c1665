"""Ranged gets from S3 over plain HTTP, received straight into the memory where the bytes belong.

obstore hands out an answer in memory of its own, piece by piece; to copy it from there costs more than receiving it
(``python -m benchmarks --only gets``). So the many large reads of a load go over :mod:`http.client`. All else stays
with obstore: it finds the credentials and signs the urls, and what the server answers other than with the bytes that
were asked for is asked again through it, so that it alone tells what is wrong. And all that goes over TLS: Python's
gives the interpreter's lock away for every 16 KiB, and is slower the more threads wait for it; obstore needs no lock.
"""

from __future__ import annotations

import http.client
import os
import socket
import struct
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from urllib.parse import SplitResult, urlsplit

from zarrckpt._store._options import Translated, is_plain_http
from zarrckpt._store._s3_options import is_set

CONNECT_SECONDS = 5.0
"""As obstore's own default."""

_BUSY = frozenset((408, 429, 500, 502, 503, 504))
"""The answers that may be others the next time."""

_CLIENT = frozenset(("allow_http", "allow_invalid_certificates", "connect_timeout", "read_timeout", "root_certificate"))
_CLIENT |= {"http1_only", "pool_idle_timeout", "pool_max_idle_per_host", "timeout"}
"""The options of obstore's HTTP client that are followed here, or that change nothing."""

_HEADERS = ("request_payer", "s3_express", "sse_customer_key_base64")
"""The settings whose requests need more than a signed url."""


_SYSTEM_WAITS = os.name == "posix"
"""Whether a call can be left to the system until all its bytes have come, and no longer than a socket's limit."""


class TransferError(Exception):
    """The server was busy, or the connection broke: the same request may succeed the next time."""


@dataclass
class DirectReads:
    """Ranged gets over connections of our own. Safe for many threads; of no use in a forked child."""

    sign: Callable[[str], str]
    """The signed url of a key's GET."""
    connect: Callable[[SplitResult], http.client.HTTPConnection]
    usable: bool = True
    _idle: list[http.client.HTTPConnection] = field(default_factory=list)
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
        wanted = {"Range": f"bytes={byte_offset}-{byte_offset + len(buffer) - 1}"}
        try:
            connection, answer = self._answer(url, wanted)
            return self._received(connection, answer, buffer)
        except (OSError, http.client.HTTPException) as error:
            raise TransferError(f"{type(error).__name__}: {error}") from error

    def _received(
        self, connection: http.client.HTTPConnection, answer: http.client.HTTPResponse, buffer: memoryview
    ) -> int | None:
        """As :func:`_receive`; the connection is kept for the next request where nothing is left on it."""
        keep = False
        try:
            whole = _receive(connection.sock, answer, buffer)
            keep = whole == len(buffer) and not answer.will_close
            return whole
        finally:
            if keep:
                with self._lock:
                    self._idle.append(connection)
            else:
                connection.close()

    def _answer(
        self, url: SplitResult, headers: Mapping[str, str]
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        target = f"{url.path}?{url.query}" if url.query else url.path
        while True:
            with self._lock:
                used = self._idle.pop() if self._idle else None
            connection = used or self.connect(url)
            try:
                connection.request("GET", target, headers=headers)
                return connection, connection.getresponse()
            except ConnectionError:
                connection.close()
                if used is None:
                    raise
                # The server had closed it meanwhile, as servers do: there is another one.
            except BaseException:
                connection.close()
                raise


def _receive(sock: socket.socket | None, answer: http.client.HTTPResponse, buffer: memoryview) -> int | None:
    if answer.status in _BUSY:
        raise TransferError(f"the server answered {answer.status} {answer.reason}")
    if answer.status == http.client.REQUESTED_RANGE_NOT_SATISFIABLE:
        return 0
    if answer.status != http.client.PARTIAL_CONTENT or answer.length is None or answer.length > len(buffer):
        return None
    if answer.length < len(buffer):
        return answer.length
    done = _fill(sock, answer, buffer)
    if done < len(buffer):
        raise TransferError(f"the connection was closed after {done} of {len(buffer)} bytes")
    answer.close()
    return done


def _fill(sock: socket.socket | None, answer: http.client.HTTPResponse, buffer: memoryview) -> int:
    """Fill ``buffer`` with an answer's bytes; return how many came before the connection's end."""
    if sock is None or not _SYSTEM_WAITS:
        # None where the connection ends with this answer, as http.client has it.
        return _until_full(buffer, answer.readinto)
    # All but what came with the headers with one call, not one for each packet or so: each gives the interpreter's lock
    # away, and waits for it again.
    done = answer.readinto(buffer[: len(answer.peek())])
    limit = sock.gettimeout()
    sock.settimeout(None)
    try:
        return done + _until_full(buffer[done:], lambda rest: sock.recv_into(rest, 0, socket.MSG_WAITALL))
    except BlockingIOError as error:
        raise TimeoutError(f"nothing came for {limit} seconds") from error
    finally:
        sock.settimeout(limit)


def _until_full(buffer: memoryview, receive: Callable[[memoryview], int]) -> int:
    done = 0
    while done < len(buffer) and (count := receive(buffer[done:])):
        done += count
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

    def __call__(self, url: SplitResult) -> http.client.HTTPConnection:
        assert url.hostname is not None
        connection = http.client.HTTPConnection(url.hostname, url.port, timeout=self._connect_seconds)
        connection.connect()
        connection.sock.settimeout(self._answer_seconds)
        if self._answer_seconds is not None and _SYSTEM_WAITS:
            seconds, rest = divmod(self._answer_seconds, 1)
            limit = struct.pack("ll", int(seconds), int(rest * 1e6))
            connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        return connection


def _seconds(value: Any) -> float | None:
    return value.total_seconds() if isinstance(value, timedelta) else None


def _behind_a_proxy() -> bool:
    proxies = ("http_proxy", "https_proxy", "all_proxy")
    return any(value for name, value in os.environ.items() if name.lower() in proxies)


def _close(idle: list[http.client.HTTPConnection]) -> None:
    for connection in idle:
        connection.close()
