"""Parts of objects read from S3: whole, short, cut, late, or with another answer than requested."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from harness.internals import Store, open_store
from harness.s3_server import LONG, S3Server
from harness.store_servers import S3Place

from zarrckpt import CorruptCheckpointError, ObjectNotFoundError, StorageError

DATA = os.urandom(3 << 20)
ONCE = {"retry_config": {"max_retries": 0}}


def store_of(place: S3Place, **options: Any) -> Store:
    store = open_store(place.url("run"), storage_options={**place.storage_options, **options})
    store.put("a b/c.0", [DATA])
    return store


def part(store: Store, begin: int = 1000, end: int = 2 << 20) -> bool:
    """Whether a part of the object is read as it was written."""
    return bytes(store.read("a b/c.0", begin, end - begin)) == DATA[begin:end]


@contextlib.contextmanager
def gives_up_soon() -> Iterator[None]:
    began = time.monotonic()
    with pytest.raises(StorageError, match=r"a b/c\.0"):
        yield
    assert time.monotonic() - began < LONG / 2


@pytest.mark.parametrize("bucket", ["moto_bucket", pytest.param("ceph_bucket", marks=pytest.mark.ceph)])
def test_ranges_of_every_size_are_read(bucket: str, request: pytest.FixtureRequest) -> None:
    store = store_of(request.getfixturevalue(bucket))
    assert part(store) and part(store, 0, len(DATA)) and part(store, 5, 6) and part(store, len(DATA) - 1, len(DATA))


def test_many_at_once(s3_stub: S3Server) -> None:
    store = store_of(s3_stub.bucket())
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(lambda number: part(store, number, 1 << 20), range(100)))
    # Connections are used again.
    assert s3_stub.connections < 30


@pytest.mark.parametrize("words", [b"", b"HTTP/1.1 408 Late\r\nContent-Length: 0\r\n\r\n"])
def test_connections_that_the_server_closes_after_an_answer(words: bytes, s3_stub: S3Server) -> None:
    store = store_of(s3_stub.bucket())
    s3_stub.faults.hang_up, s3_stub.faults.parting_words = True, words
    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(lambda number: part(store, number), range(20)))


def test_absent_and_short_objects(s3_stub: S3Server) -> None:
    store = store_of(s3_stub.bucket())
    with pytest.raises(ObjectNotFoundError):
        store.read("no/such", 0, 10)
    for nbytes in (1 << 20, 10):
        for begin in (len(DATA) - 5, len(DATA), len(DATA) + 5):
            s3_stub.requests.clear()
            sizes = rf"found {len(DATA)} bytes, expected at least {begin + nbytes}"
            with pytest.raises(CorruptCheckpointError, match=rf"a b/c\.0.*{sizes}"):
                store.read("a b/c.0", begin, nbytes)
            assert len(s3_stub.requests) <= 4
    assert part(store)


@pytest.mark.parametrize("fault", [{"other_ranges": True}, {"most_of_a_range": 1 << 20}, {"ignore_ranges": True}])
def test_other_ranges_than_asked_for_are_a_fault_of_the_server(fault: dict[str, Any], s3_stub: S3Server) -> None:
    store = store_of(s3_stub.bucket(), **ONCE)
    ((name, value),) = fault.items()
    setattr(s3_stub.faults, name, value)
    with pytest.raises(StorageError, match=r"a b/c\.0"):
        part(store)
    setattr(s3_stub.faults, name, None)
    assert part(store)


@pytest.mark.parametrize("fault", ["server_errors", "cut_bodies"])
def test_failures_are_repeated(fault: str, s3_stub: S3Server) -> None:
    store = store_of(s3_stub.bucket(), retry_config={"backoff": {"init_backoff": 0.01, "max_backoff": 0.1}})
    setattr(s3_stub.faults, fault, 4)
    assert part(store)
    assert getattr(s3_stub.faults, fault) == 0


def test_a_body_that_is_always_cut_is_an_error(s3_stub: S3Server) -> None:
    store = store_of(s3_stub.bucket(), retry_config={"max_retries": 2})
    s3_stub.faults.cut_bodies = 1000
    with pytest.raises(StorageError, match=r"a b/c\.0"):
        part(store)


@pytest.mark.parametrize("stub", ["s3_stub", "tls_stub"])
def test_a_server_that_hangs_falls_silent_or_trickles(stub: str, request: pytest.FixtureRequest) -> None:
    server: S3Server = request.getfixturevalue(stub)
    own = {**ONCE, "allow_invalid_certificates": True}
    store = store_of(server.bucket(), timeout=0.5, **own)
    # A slow answer is waited for...
    server.faults.pause_bodies = 0.1
    assert part(store)
    server.faults.pause_bodies = 0
    # ...but an answer that never comes is not.
    for fault, seconds in (("latency", LONG), ("pause_bodies", LONG), ("trickle", 0.1)):
        setattr(server.faults, fault, seconds)
        with gives_up_soon():
            part(store)
        setattr(server.faults, fault, 0)
        assert part(store)


def test_timeouts_of_reads_and_in_words(s3_stub: S3Server) -> None:
    for options in ({"timeout": "500ms"}, {"read_timeout": 0.5, "timeout": 2 * LONG}):
        s3_stub.faults.pause_bodies = 0
        store = store_of(s3_stub.bucket(), **options, **ONCE)
        s3_stub.faults.pause_bodies = LONG
        with gives_up_soon():
            part(store)


def test_what_is_no_http_server(s3_stub: S3Server) -> None:
    def greet(listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection:
                    connection.recv(1 << 16)
                    connection.sendall(b"SSH-2.0-x\r\n\r\n")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=greet, args=(listener,), daemon=True).start()
        endpoint = f"http://127.0.0.1:{listener.getsockname()[1]}"
        options = {**s3_stub.bucket().storage_options, "endpoint_url": endpoint, **ONCE}
        store = open_store("s3://bucket/run", storage_options=options)
        with pytest.raises(StorageError, match=r"c/0.*does not answer in HTTP"):
            store.read("c/0", 0, 1 << 20)
