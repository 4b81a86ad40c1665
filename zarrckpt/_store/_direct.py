"""Ranged gets from S3, received straight into the memory where the bytes belong.

obstore hands out an answer in memory of its own, piece by piece; to copy it from there costs as much again as receiving
it (``python -m benchmarks --only gets``). So the many large reads of a load go over :mod:`http.client`. All else stays
with obstore: it finds the credentials and signs the urls, and what the server answers other than with the bytes that
were asked for is asked again through it, so that it alone tells what is wrong.
"""

from __future__ import annotations

import http.client
import os
import ssl
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from urllib.parse import SplitResult, urlsplit

from zarrckpt._store._options import Translated, is_true

CONNECT_SECONDS = 5.0
"""As obstore's own default."""

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
        except ssl.SSLCertVerificationError:
            # The system's certificates are not those that obstore goes by.
            return None
        except (OSError, http.client.HTTPException) as error:
            raise TransferError(f"{type(error).__name__}: {error}") from error
        try:
            whole = self._receive(answer, buffer)
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise TransferError(f"{type(error).__name__}: {error}") from error
        except BaseException:
            connection.close()
            raise
        if whole == len(buffer) and not answer.will_close:
            with self._lock:
                self._idle.append(connection)
        else:
            connection.close()
        return whole

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

    def _receive(self, answer: http.client.HTTPResponse, buffer: memoryview) -> int | None:
        if answer.status in _BUSY:
            raise TransferError(f"the server answered {answer.status} {answer.reason}")
        if answer.status == http.client.REQUESTED_RANGE_NOT_SATISFIABLE:
            return 0
        if answer.status != http.client.PARTIAL_CONTENT or answer.length is None or answer.length > len(buffer):
            return None
        if answer.length < len(buffer):
            return answer.length
        done = 0
        while done < len(buffer):
            count = answer.readinto(buffer[done:])
            if not count:
                raise TransferError(f"the connection was closed after {done} of {len(buffer)} bytes")
            done += count
        return done


def direct_reads(sign: Callable[[str], str], out: Translated) -> DirectReads | None:
    """Direct reads with the settings of an S3 client; None where they ask for what direct reads can't do."""
    if out.client.keys() - _CLIENT or any(is_set(out, name) for name in _HEADERS) or _behind_a_proxy():
        return None
    return DirectReads(sign, _Connector(out.client))


class _Connector:
    """Opens connections with the settings of obstore's HTTP client."""

    def __init__(self, client: Mapping[str, Any]) -> None:
        self._client = client
        self._connect_seconds = _seconds(client.get("connect_timeout")) or CONNECT_SECONDS
        limits = (_seconds(client.get(name)) for name in ("timeout", "read_timeout"))
        self._answer_seconds = min((limit for limit in limits if limit is not None), default=None)
        self._made: ssl.SSLContext | None = None
        self._lock = threading.Lock()

    def __call__(self, url: SplitResult) -> http.client.HTTPConnection:
        assert url.hostname is not None
        connection: http.client.HTTPConnection
        if url.scheme == "http":
            connection = http.client.HTTPConnection(url.hostname, url.port, timeout=self._connect_seconds)
        else:
            connection = http.client.HTTPSConnection(
                url.hostname, url.port, timeout=self._connect_seconds, context=self._context()
            )
        connection.connect()
        connection.sock.settimeout(self._answer_seconds)
        return connection

    def _context(self) -> ssl.SSLContext:
        """Made with the first connection: to read the system's certificates takes 20 ms."""
        with self._lock:
            if self._made is None:
                self._made = ssl.create_default_context()
                if certificate := self._client.get("root_certificate"):
                    self._made.load_verify_locations(cadata=certificate)
                if is_true(self._client.get("allow_invalid_certificates", False)):
                    self._made.check_hostname = False
                    self._made.verify_mode = ssl.CERT_NONE
            return self._made


def _seconds(value: Any) -> float | None:
    return value.total_seconds() if isinstance(value, timedelta) else None


def is_set(out: Translated, name: str) -> bool:
    """Whether a switch of the S3 client is on, or a value is given, by the options or by the environment."""
    value = out.config.get(name, os.environ.get(f"AWS_{name.upper()}"))
    return bool(value) and str(value).strip().lower() not in ("0", "false", "no", "off")


def _behind_a_proxy() -> bool:
    proxies = ("http_proxy", "https_proxy", "all_proxy")
    return any(value for name, value in os.environ.items() if name.lower() in proxies)


def _close(idle: list[http.client.HTTPConnection]) -> None:
    for connection in idle:
        connection.close()
