"""One connection to a plain HTTP/1.1 server that is asked for ranges of objects, one after the other.

It knows of an answer what a ranged get needs: the status, the length, whether another request may follow, and the
bytes, which it receives straight into memory. :mod:`http.client` would know all of HTTP, in so much Python that a
request takes half a millisecond of the interpreter's lock, as long as to receive a MiB.
"""

from __future__ import annotations

import os
import re
import socket
import struct
import time
from dataclasses import dataclass

_SYSTEM_WAITS = os.name == "posix"
"""Whether a call can be left to the system until all its bytes have come, and no longer than a socket's limit."""

_HEAD_BYTES = 1 << 16
"""No answer has a longer head."""

_DIGITS = 20
"""No length has so many."""

_PACKET = 4096
"""So much is received at once until the head has ended. What comes of the body with it is copied once more."""

_RANGE = re.compile(rb"bytes +(\d{1,19})-(\d{1,19})/(\d{1,19}|\*)", re.IGNORECASE)

_STATUS = re.compile(rb"HTTP/1\.([01]) +(\d{3})(?: +([^\r\n]*))?")


class NotHttpError(Exception):
    """What came is no answer of an HTTP/1 server."""


@dataclass(frozen=True)
class Answer:
    """The head of an answer."""

    status: int
    reason: str
    length: int | None
    """The bytes of the body; None where they are encoded, or the head does not say how many they are."""
    keeps: bool
    """Whether the server waits for another request, once the body has been received."""
    first: int | None = None
    """Where the body begins in the object; None where the answer does not say it."""
    total: int | None = None
    """The bytes of the object; None where the answer does not say it."""


class Connection:
    """Connected when it is made. Raises OSError where the server is gone or silent; used by one thread at a time.

    Args:
        address: the server's name or address, and its port.
        connect_seconds: how long to wait for a connection.
        answer_seconds: how long a request may take, to the last byte of its answer; None: forever.
        silent_seconds: how long the server may send nothing; None: as long as the request may take.
    """

    def __init__(
        self,
        address: tuple[str, int],
        connect_seconds: float,
        answer_seconds: float | None,
        silent_seconds: float | None = None,
    ) -> None:
        self._socket: socket.socket | None = socket.create_connection(address, connect_seconds)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.settimeout(None)
        self._answer_seconds, self._silent_seconds = answer_seconds, silent_seconds
        self._ends: float | None = None
        self._rest = b""
        """What came of the body with the head."""

    @property
    def closed(self) -> bool:
        return self._socket is None

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def get(self, host: str, target: str, first: int, last: int) -> Answer:
        """Ask for the bytes ``first`` to ``last`` of a path, and receive the head of the answer.

        ``host`` is the header of that name. Raises ConnectionError where the server has closed the connection, or sent
        more than the last answer's length; NotHttpError.
        """
        assert self._socket is not None
        if self._rest:
            raise ConnectionResetError("the server sent more than it had announced")
        self._ends = None if self._answer_seconds is None else time.monotonic() + self._answer_seconds
        self._limit()
        request = f"GET {target} HTTP/1.1\r\nHost: {host}\r\nAccept-Encoding: identity\r\nRange: bytes={first}-{last}"
        self._socket.sendall(f"{request}\r\n\r\n".encode("ascii"))
        head = b""
        while b"\r\n\r\n" not in head:
            if len(head) > _HEAD_BYTES:
                raise NotHttpError(f"no end of the answer's head within {_HEAD_BYTES} bytes")
            more = self._received(_PACKET)
            if not more:
                raise ConnectionResetError("the connection was closed before the answer")
            head += more
        head, _, self._rest = head.partition(b"\r\n\r\n")
        return _parsed(head)

    def receive_into(self, buffer: memoryview) -> int:
        """Fill memory with what follows of the body; return how many bytes came before the connection's end."""
        assert self._socket is not None
        done = min(len(self._rest), len(buffer))
        buffer[:done] = self._rest[:done]
        self._rest = self._rest[done:]
        # All with one call, not one for each packet or so: each gives the interpreter's lock away, and waits for it.
        flags = socket.MSG_WAITALL if _SYSTEM_WAITS else 0
        try:
            while done < len(buffer):
                # Anew for each call: a server that trickles would never be late else.
                self._limit()
                count = self._socket.recv_into(buffer[done:], 0, flags)
                if not count:
                    break
                done += count
        except BlockingIOError as error:
            raise self._silent() from error
        return done

    def _received(self, most: int) -> bytes:
        assert self._socket is not None
        self._limit()
        try:
            return self._socket.recv(most)
        except BlockingIOError as error:
            raise self._silent() from error

    def _limit(self) -> None:
        """Let the next call wait as long as the server may be silent, and no longer than the request may take."""
        assert self._socket is not None
        left = None if self._ends is None else self._ends - time.monotonic()
        if left is not None and left <= 0:
            raise self._silent()
        limit = min((seconds for seconds in (left, self._silent_seconds) if seconds is not None), default=None)
        if limit is None:
            return
        if not _SYSTEM_WAITS:
            self._socket.settimeout(limit)
            return
        # Of no time at all the system would make forever.
        seconds, rest = divmod(max(1, int(limit * 1e6)), 1_000_000)
        for name in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self._socket.setsockopt(socket.SOL_SOCKET, name, struct.pack("ll", seconds, rest))

    def _silent(self) -> TimeoutError:
        limits = {"no whole answer within": self._answer_seconds, "nothing for": self._silent_seconds}
        said = [f"{what} {seconds} seconds" for what, seconds in limits.items() if seconds is not None]
        return TimeoutError(" or ".join(said))


def _parsed(head: bytes) -> Answer:
    line, *fields = head.split(b"\r\n")
    status = _STATUS.fullmatch(line)
    if status is None:
        raise NotHttpError(f"the answer begins with {line[:40]!r}")
    lengths, plain, keeps = set(), True, status[1] == b"1"
    part: re.Match[bytes] | None = None
    for field in fields:
        name, _, value = field.partition(b":")
        match name.lower():
            case b"content-length":
                lengths.add(value.strip())
            case b"transfer-encoding" | b"content-encoding":
                plain = False
            case b"content-range":
                part = _RANGE.fullmatch(value.strip())
            case b"connection":
                keeps &= b"close" not in value.lower()
    text = lengths.pop() if plain and len(lengths) == 1 else b""
    length = int(text) if text.isdigit() and len(text) < _DIGITS else None
    first, total = (None, None) if part is None else (int(part[1]), None if part[3] == b"*" else int(part[3]))
    return Answer(int(status[2]), (status[3] or b"").decode("latin-1"), length, keeps, first, total)
