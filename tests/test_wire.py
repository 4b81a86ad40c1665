"""Answers of HTTP servers as they come over a connection: whole, in pieces, odd, or not at all."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence

import pytest
from s3_stub import LONG, S3Stub

from zarrckpt import StorageError
from zarrckpt._store import open_store
from zarrckpt._store._wire import Answer, Connection, NotHttpError

BODY = os.urandom(1 << 20)
LENGTH = b"Content-Length: %d\r\n" % len(BODY)


class Scripted:
    """A server that sends the same packets whatever it is asked, and remembers the requests."""

    def __init__(self, packets: Sequence[bytes], *, closes: bool = False, pause: float = 0.0) -> None:
        self.requests: list[bytes] = []
        self.connections = 0
        self._packets, self._closes, self._pause = packets, closes, pause
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._listener.getsockname()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self.connections += 1
                threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with connection, contextlib.suppress(OSError):
            request = b""
            while more := connection.recv(1 << 16):
                request += more
                if not request.endswith(b"\r\n\r\n"):
                    continue
                self.requests.append(request)
                request = b""
                for packet in self._packets:
                    connection.sendall(packet)
                    time.sleep(self._pause)
                if self._closes:
                    return

    def close(self) -> None:
        self._listener.close()


@contextlib.contextmanager
def asked(*packets: bytes, closes: bool = False) -> Iterator[tuple[Connection, Scripted]]:
    server = Scripted(packets, closes=closes)
    connection = Connection(server.address, 5, 5)
    try:
        yield connection, server
    finally:
        connection.close()
        server.close()


def get(connection: Connection) -> Answer:
    return connection.get("host:1", "/bucket/key?X-Amz-Signature=1", 5, 5 + len(BODY) - 1)


HEAD = b"HTTP/1.1 206 Partial Content\r\n" + LENGTH
WHOLE = HEAD + b"\r\n" + BODY


@pytest.mark.parametrize(
    "packets",
    [
        [WHOLE],
        [HEAD, b"\r\n", BODY],
        [bytes([byte]) for byte in HEAD] + [b"\r", b"\n", BODY[:1], BODY[1:]],
        [b"HTTP/1.1 206 \r\nx-Other: 1\r\ncontent-LENGTH:%d\r\nConnection: keep-alive\r\n\r\n" % len(BODY), BODY],
    ],
    ids=["at once", "in packets", "in bytes", "in other words"],
)
def test_one_answer_after_the_other(packets: list[bytes]) -> None:
    with asked(*packets) as (connection, server):
        for _ in range(2):
            answer = get(connection)
            assert (answer.status, answer.length, answer.keeps) == (206, len(BODY), True)
            buffer = bytearray(len(BODY))
            assert connection.receive_into(memoryview(buffer)) == len(BODY)
            assert buffer == BODY
        assert server.connections == 1
        lines = server.requests[0].decode().split("\r\n")
        assert lines[0] == "GET /bucket/key?X-Amz-Signature=1 HTTP/1.1"
        assert {"Host: host:1", f"Range: bytes=5-{5 + len(BODY) - 1}"} <= {*lines}


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\n", (200, None, True)),
        (b"HTTP/1.0 206 Partial\r\nContent-Length: 5\r\n\r\n", (206, 5, False)),
        (b"HTTP/1.1 206 P\r\nContent-Length: 5\r\nConnection: Close\r\n\r\n", (206, 5, False)),
        (b"HTTP/1.1 206 P\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n", (206, None, True)),
        (b"HTTP/1.1 206 P\r\nContent-Length: 5\r\nContent-Length: 5\r\n\r\n", (206, 5, True)),
        (b"HTTP/1.1 206 P\r\nContent-Length: -5\r\n\r\n", (206, None, True)),
        (b"HTTP/1.1 206 P\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n", (206, None, True)),
        (b"HTTP/1.1 206 P\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n", (206, None, True)),
        (b"HTTP/1.1 206 P\r\nContent-Length: 5\r\nContent-Encoding: gzip\r\n\r\n", (206, None, True)),
        (b"HTTP/1.1 503 Slow Down\r\nTransfer-Encoding: chunked\r\n\r\n", (503, None, True)),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 206 P\r\n\r\n", (100, None, True)),
    ],
)
def test_heads(head: bytes, expected: tuple[int, int | None, bool]) -> None:
    with asked(head) as (connection, _):
        answer = get(connection)
        assert (answer.status, answer.length, answer.keeps) == expected


@pytest.mark.parametrize("packet", [b"SSH-2.0-x\r\n\r\n", b"\r\n\r\n", b"HTTP/2 200\r\n\r\n", b"x" * (1 << 17)])
def test_what_is_no_answer(packet: bytes) -> None:
    with asked(packet) as (connection, _), pytest.raises(NotHttpError):
        get(connection)


@pytest.mark.parametrize("packets", [[], [b"HTTP/1.1 206 P"]], ids=["at once", "within the head"])
def test_a_server_that_hangs_up(packets: list[bytes]) -> None:
    with asked(*packets, closes=True) as (connection, _), pytest.raises(ConnectionError):
        get(connection)


def test_a_body_that_ends_early() -> None:
    with asked(WHOLE[:-100], closes=True) as (connection, _):
        get(connection)
        buffer = bytearray(len(BODY))
        assert connection.receive_into(memoryview(buffer)) == len(BODY) - 100
        assert buffer[:-100] == BODY[:-100]


def test_a_server_that_sends_more_than_it_says() -> None:
    with asked(b"HTTP/1.1 206 P\r\nContent-Length: 5\r\n\r\n123456") as (connection, _):
        get(connection)
        buffer = bytearray(5)
        assert connection.receive_into(memoryview(buffer)) == 5 and buffer == b"12345"
        # What is left would be taken for the next answer's begin.
        with pytest.raises(ConnectionError):
            get(connection)


def test_a_server_that_says_nothing() -> None:
    server = Scripted([])
    connection = Connection(server.address, 5, 0.2)
    with pytest.raises(TimeoutError):
        get(connection)
    connection.close()
    server.close()


@pytest.mark.parametrize("within", ["head", "body"])
def test_a_server_that_trickles(within: str) -> None:
    begin = HEAD + (b"x-Other: " if within == "head" else b"\r\n")
    # A minute of bytes, each of them in time.
    server = Scripted([begin, *[b"1"] * int(LONG / 0.1)], pause=0.1)
    connection, began = Connection(server.address, 5, 1.0), time.monotonic()
    with pytest.raises(TimeoutError):
        connection.receive_into(memoryview(bytearray(get(connection).length or 0)))
    assert time.monotonic() - began < LONG / 2
    connection.close()
    server.close()


def test_how_long_a_server_may_be_silent() -> None:
    server = Scripted([HEAD + b"\r\n", BODY[:7], BODY[7:]], pause=0.2)
    connection = Connection(server.address, 5, None, 10)
    assert get(connection).length == len(BODY)
    assert connection.receive_into(memoryview(bytearray(len(BODY)))) == len(BODY)
    connection.close()
    server.close()
    server = Scripted([HEAD + b"\r\n", BODY[:7]])
    connection = Connection(server.address, 5, None, 0.2)
    get(connection)
    with pytest.raises(TimeoutError):
        connection.receive_into(memoryview(bytearray(len(BODY))))
    connection.close()
    server.close()


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (b"bytes 5-9/20", (5, 20)),
        (b"Bytes  5-9/*", (5, None)),
        (b"bytes */20", (None, None)),
        (b"bytes=5-9/20", (None, None)),
        (b"items 5-9/20", (None, None)),
        (b"bytes " + b"9" * 5000 + b"-9/20", (None, None)),
    ],
)
def test_where_an_answer_begins(value: bytes, expected: tuple[int | None, int | None]) -> None:
    with asked(b"HTTP/1.1 206 P\r\nContent-Length: 5\r\ncontent-range: " + value + b"\r\n\r\n") as (connection, _):
        answer = get(connection)
        assert (answer.first, answer.total) == expected


def test_no_s3_server_at_all(s3_stub: S3Stub) -> None:
    server = Scripted([b"SSH-2.0-x\r\n\r\n"], closes=True)
    options = {**s3_stub.bucket().storage_options, "endpoint_url": f"http://127.0.0.1:{server.address[1]}"}
    store = open_store("s3://bucket/run", storage_options={**options, "retry_config": {"max_retries": 0}})
    with pytest.raises(StorageError, match="c/0"):
        store.read("c/0", 0, len(BODY))
    server.close()
