"""HTTP/1.1 over a socket for the tests' S3 server: heads, bodies directly into buffers, limited bandwidth."""

from __future__ import annotations

import socket
import ssl
import struct
import time
from collections.abc import Iterable

from harness.s3_objects import new_buffer

HEAD = 256 << 10
TLS_HANDSHAKE = 0x16
"""The first byte of a client that uses TLS."""
STEP = 512 << 10
"""Bytes that are sent over a connection of limited bandwidth between two sleeps."""


class Encrypted:
    """A socket with TLS. It ignores flags, which TLS does not support."""

    def __init__(self, connection: socket.socket, context: ssl.SSLContext) -> None:
        self._tls = context.wrap_socket(connection, server_side=True)
        self.close, self.setsockopt = self._tls.close, self._tls.setsockopt

    def recv_into(self, view: memoryview, nbytes: int = 0, flags: int = 0) -> int:
        return self._tls.recv_into(view)

    def sendall(self, data: bytes | memoryview, flags: int = 0) -> None:
        self._tls.sendall(data)


class Wire:
    """One connection. ``rate`` limits bodies to that many bytes a second each way; 0 is no limit."""

    def __init__(self, connection: socket.socket, rate: float = 0, context: ssl.SSLContext | None = None) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connection if context is None else Encrypted(connection, context)
        self.rate = rate
        self._buffer = bytearray(HEAD)
        self._begin = self._end = 0

    def head(self) -> tuple[str, str, dict[str, str]] | None:
        """Return method, target and headers of the next request, or None if the client has closed the connection."""
        while (stop := self._buffer.find(b"\r\n\r\n", self._begin, self._end)) < 0:
            if not self._more():
                return None
            if self._buffer[self._begin] == TLS_HANDSHAKE:
                self.socket.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                return None
        lines = bytes(self._buffer[self._begin : stop]).decode("latin-1").split("\r\n")
        self._begin = stop + 4
        method, target, _ = lines[0].split(" ", 2)
        pairs = (line.partition(":") for line in lines[1:])
        return method, target, {name.strip().lower(): value.strip() for name, _, value in pairs}

    def _more(self) -> bool:
        if self._begin:
            left = self._end - self._begin
            self._buffer[:left] = self._buffer[self._begin : self._end]
            self._begin, self._end = 0, left
        with memoryview(self._buffer) as view:
            got = self.socket.recv_into(view[self._end :])
        self._end += got
        return got > 0

    def line(self) -> bytes:
        """Return one line without its end."""
        while (stop := self._buffer.find(b"\r\n", self._begin, self._end)) < 0:
            if not self._more():
                raise ConnectionError("the client closed the connection within a line")
        found = bytes(self._buffer[self._begin : stop])
        self._begin = stop + 2
        return found

    def read_into(self, view: memoryview) -> None:
        """Fill the view: first with what came with the head, then directly from the socket."""
        here = min(len(view), self._end - self._begin)
        view[:here] = self._buffer[self._begin : self._begin + here]
        self._begin += here
        began, at = time.monotonic(), here
        step = STEP if self.rate else len(view)
        while at < len(view):
            got = self.socket.recv_into(view[at : at + step], 0, socket.MSG_WAITALL)
            if not got:
                raise ConnectionError("the client closed the connection within a body")
            at += got
            self._nap(began, at)

    def body(self, headers: dict[str, str]) -> memoryview:
        """Return the body of a request, without the framing of chunked transfer and of S3's aws-chunked."""
        signed = headers.get("x-amz-content-sha256", "").startswith("STREAMING-")
        framed = signed or "aws-chunked" in headers.get("content-encoding", "")
        if headers.get("transfer-encoding", "").lower() == "chunked":
            whole = self._unframe(None)
            return _unframed(whole) if framed else whole
        if framed and "x-amz-decoded-content-length" in headers:
            return self._unframe(int(headers["x-amz-decoded-content-length"]))
        view = new_buffer(int(headers.get("content-length", 0)))
        self.read_into(view)
        return view

    def _unframe(self, size: int | None) -> memoryview:
        """Read chunks, each after its length, and trailers. Use one buffer if the size is known."""
        pieces, at = [new_buffer(size)] if size is not None else [], 0
        while length := int(self.line().partition(b";")[0], 16):
            if size is None:
                pieces.append(new_buffer(length))
                self.read_into(pieces[-1])
            else:
                self.read_into(pieces[0][at : at + length])
            at += length
            self.line()
        while self.line():
            pass
        return pieces[0] if size is not None else memoryview(b"".join(pieces))

    def send(self, head: bytes, views: Iterable[memoryview] = ()) -> None:
        """Send a head and a body."""
        views = list(views)
        if sum(view.nbytes for view in views) < STEP and not self.rate:
            return self.socket.sendall(b"".join([head, *views]))
        self.socket.sendall(head, socket.MSG_MORE if views else 0)
        began, sent = time.monotonic(), 0
        for view in views:
            step = STEP if self.rate else max(1, view.nbytes)
            for at in range(0, view.nbytes, step):
                piece = view[at : at + step]
                self.socket.sendall(piece)
                sent += piece.nbytes
                self._nap(began, sent)

    def _nap(self, began: float, moved: int) -> None:
        if self.rate and (early := began + moved / self.rate - time.monotonic()) > 0:
            time.sleep(early)

    def reset(self) -> None:
        """End the connection with a reset instead of a proper end."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()


def _unframed(whole: memoryview) -> memoryview:
    """Return the body of aws-chunked data."""
    data, at = whole.tobytes(), 0
    pieces: list[bytes] = []
    while True:
        stop = data.index(b"\r\n", at)
        length = int(data[at:stop].partition(b";")[0], 16)
        if not length:
            return memoryview(b"".join(pieces))
        pieces.append(data[stop + 2 : stop + 2 + length])
        at = stop + 4 + length
