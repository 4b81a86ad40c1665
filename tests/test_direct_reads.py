"""Ranged gets from S3 over connections of our own: what goes over them, and what is left to obstore."""

from __future__ import annotations

import datetime
import gc
import os
import time
import traceback
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import obstore
import pytest
from s3_stub import LONG, S3Stub
from store_servers import S3Place

from zarrckpt import CorruptCheckpointError, ObjectNotFoundError, StorageError
from zarrckpt._store import Store, open_store
from zarrckpt._store._ready import describe

DATA = os.urandom(3 << 20)


def store_of(place: S3Place, **options: Any) -> Store:
    store = open_store(place.url("run"), storage_options={**place.storage_options, **options})
    store.put("a b/c.0", [DATA])
    return store


def part(store: Store, begin: int = 1000, end: int = 2 << 20) -> bool:
    """Whether a part of the object is read as it was written."""
    return bytes(store.read("a b/c.0", begin, end - begin)) == DATA[begin:end]


def ways(stub: S3Stub) -> list[str]:
    """How the gets of the server's objects came: ``direct``, ``obstore``."""
    gets = [item for item in stub.requests if item.method == "GET"]
    return ["obstore" if item.headers.get("user-agent", "").startswith("object_store") else "direct" for item in gets]


def only_direct(stub: S3Stub) -> bool:
    return {*ways(stub)} == {"direct"}


@pytest.mark.parametrize("bucket", ["moto_bucket", pytest.param("ceph_bucket", marks=pytest.mark.ceph)])
def test_servers_take_signed_urls(bucket: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_of(request.getfixturevalue(bucket))
    from zarrckpt._store import _obstore

    def no_get(*_: object, **__: object) -> None:
        raise AssertionError("obstore was asked")

    monkeypatch.setattr(_obstore.obstore, "get", no_get)
    assert part(store) and part(store, 0, len(DATA)) and part(store, 5, 6)


def test_few_bytes_are_left_to_obstore(s3_stub: S3Stub) -> None:
    store = store_of(s3_stub.bucket())
    s3_stub.requests.clear()
    assert part(store, 5, 6) and part(store, 100, 100 + (1 << 19)) and part(store, 100, 101 + (1 << 19))
    assert ways(s3_stub) == ["obstore", "obstore", "direct"]


def test_credentials_of_all_kinds(s3_stub: S3Stub) -> None:
    def provider() -> dict[str, Any]:
        return {"access_key_id": "PROVIDED", "secret_access_key": "s", "token": "t/+=", "expires_at": None}

    place = s3_stub.bucket()
    plain = {name: value for name, value in place.storage_options.items() if name not in ("key", "secret")}
    kinds: list[tuple[dict[str, Any], Callable[..., Any] | None, str]] = [
        ({"key": "GIVEN", "secret": "s"}, None, "X-Amz-Credential=GIVEN"),
        ({}, provider, "X-Amz-Security-Token=t%2F%2B%3D"),
        ({"anon": True}, None, ""),
    ]
    for options, given, expected in kinds:
        store = open_store(place.url("run"), storage_options={**plain, **options}, credential_provider=given)
        store.put("a b/c.0", [DATA])
        s3_stub.requests.clear()
        assert part(store) and only_direct(s3_stub)
        target = s3_stub.requests[-1].target
        assert expected in target if expected else "?" not in target


def test_many_at_once_use_connections_again(s3_stub: S3Stub) -> None:
    store = store_of(s3_stub.bucket())
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(lambda number: part(store, number, 1 << 20), range(100)))
    assert only_direct(s3_stub)
    idle = store._client.direct._idle  # type: ignore[attr-defined]
    assert 1 <= len(idle) <= 8


def test_connections_that_the_server_has_closed(s3_stub: S3Stub) -> None:
    store = store_of(s3_stub.bucket())
    s3_stub.faults.hang_up = True
    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(lambda number: part(store, number), range(20)))
    assert only_direct(s3_stub) and len(s3_stub.requests) == 21


@pytest.mark.parametrize("words", [b"HTTP/1.1 408 Late\r\nContent-Length: 0\r\n\r\n", b"bye\r\n\r\n"])
def test_a_server_that_hangs_up_with_words(words: bytes, s3_stub: S3Stub) -> None:
    store = store_of(s3_stub.bucket(), retry_config={"max_retries": 0})
    s3_stub.faults.parting_words = words
    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(lambda number: part(store, number), range(20)))
    assert only_direct(s3_stub) and len(s3_stub.requests) == 21


def test_connections_that_have_waited_long_are_not_used(s3_stub: S3Stub) -> None:
    for seconds, connections in ((0.2, 2), (60, 1)):
        store = store_of(s3_stub.bucket(), pool_idle_timeout=seconds)
        assert part(store)
        ((_, first),) = store._client.direct._idle  # type: ignore[attr-defined]
        before = s3_stub.connections
        time.sleep(0.3)
        assert part(store)
        assert s3_stub.connections == before + connections - 1
        assert first.closed == (connections == 2)


@pytest.mark.parametrize("fault", [{"other_ranges": True}, {"most_of_a_range": 1 << 20}])
def test_other_ranges_than_asked_for(fault: dict[str, Any], s3_stub: S3Stub) -> None:
    store = store_of(s3_stub.bucket(), retry_config={"max_retries": 0})
    s3_stub.requests.clear()
    for name, value in fault.items():
        setattr(s3_stub.faults, name, value)
    # As obstore says: a fault of the server, not of the object.
    with pytest.raises(StorageError):
        part(store)
    assert ways(s3_stub)[0] == "direct"
    for name in fault:
        setattr(s3_stub.faults, name, None)
    assert part(store) and ways(s3_stub)[-1] == "direct"


# Before the third attempt obstore asks whether the object is long enough.
@pytest.mark.parametrize(("fault", "too_many"), [("server_errors", 4), ("cut_bodies", 3)])
def test_failures_are_repeated(fault: str, too_many: int, s3_stub: S3Stub) -> None:
    store = store_of(s3_stub.bucket())
    s3_stub.requests.clear()
    setattr(s3_stub.faults, fault, 2)
    assert part(store)
    assert ways(s3_stub) == ["direct"] * 3
    # What lasts longer is obstore's.
    s3_stub.requests.clear()
    setattr(s3_stub.faults, fault, too_many)
    assert part(store)
    assert ways(s3_stub) == ["direct"] * 3 + ["obstore"]
    s3_stub.requests.clear()
    assert part(store) and only_direct(s3_stub)


@pytest.mark.parametrize("fault", ["refuse_signed_urls", "ignore_ranges"])
def test_servers_that_answer_otherwise_are_left_to_obstore(fault: str, s3_stub: S3Stub) -> None:
    store = store_of(s3_stub.bucket())
    s3_stub.requests.clear()
    setattr(s3_stub.faults, fault, True)
    if fault == "ignore_ranges":
        # obstore refuses such an answer, too.
        with pytest.raises(StorageError):
            part(store)
        assert "obstore" in ways(s3_stub)
        return
    assert part(store) and part(store)
    assert ways(s3_stub) == ["direct", "obstore", "obstore"]


def test_absent_and_short_objects(s3_stub: S3Stub) -> None:
    store = store_of(s3_stub.bucket())
    with pytest.raises(ObjectNotFoundError):
        store.read("no/such", 0, 10)
    for nbytes, most in ((1 << 20, 2), (10, 4)):  # the few go through obstore, which tells no range behind the end
        for begin in (len(DATA) - 5, len(DATA), len(DATA) + 5):
            s3_stub.requests.clear()
            with pytest.raises(CorruptCheckpointError, match=rf"a b/c\.0.*{begin + nbytes} bytes.*{len(DATA)} "):
                store.read("a b/c.0", begin, nbytes)
            assert len(s3_stub.requests) <= most
    assert part(store)
    assert ways(s3_stub)[-1] == "direct"


def test_a_server_that_hangs_is_given_up(s3_stub: S3Stub) -> None:
    store = store_of(s3_stub.bucket(), timeout=0.5, retry_config={"max_retries": 0})
    s3_stub.faults.stall_seconds = LONG
    began = time.monotonic()
    with pytest.raises(StorageError):
        part(store)
    assert time.monotonic() - began < LONG / 2


def test_timeouts_in_words_and_of_a_ready_store(s3_stub: S3Stub) -> None:
    place = s3_stub.bucket()
    options = {**place.storage_options, "retry_config": {"max_retries": 0}}
    ready = obstore.store.S3Store(
        place.bucket,
        prefix="run",
        client_options={"timeout": datetime.timedelta(seconds=1), "allow_http": True},
        config={
            "endpoint": place.endpoint,
            "access_key_id": "any",
            "secret_access_key": "any",
            "region": "us-east-1",
        },
        retry_config={"max_retries": 0},
    )
    described = describe(ready)
    stores = [
        open_store(place.url("run"), storage_options={**options, "timeout": "1s", "connect_timeout": "0m 2s"}),
        open_store(described.url, storage_options=described.options),
        # In words of obstore's alone: all is left to it.
        open_store(place.url("run"), storage_options={**options, "timeout": "1 second"}),
    ]
    assert [store._client.direct is not None for store in stores] == [True, True, False]  # type: ignore[attr-defined]
    stores[0].put("a b/c.0", [DATA])
    for store in stores:
        s3_stub.faults.stall_seconds = 0
        assert part(store)
        s3_stub.faults.stall_seconds = LONG
        began = time.monotonic()
        with pytest.raises(StorageError):
            part(store)
        assert time.monotonic() - began < LONG / 2


@pytest.mark.parametrize("stub", ["s3_stub", "tls_stub"])
def test_a_server_that_falls_silent_within_an_answer(stub: str, request: pytest.FixtureRequest) -> None:
    server: S3Stub = request.getfixturevalue(stub)
    store = store_of(server.bucket(), timeout=0.5, retry_config={"max_retries": 0}, verify=False)
    # What is slow is waited for...
    server.faults.pause_bodies = 0.1
    assert part(store)
    # ...and what never comes is not.
    server.faults.pause_bodies = LONG
    began = time.monotonic()
    with pytest.raises(StorageError):
        part(store)
    assert time.monotonic() - began < LONG / 2
    server.faults.pause_bodies = 0
    assert part(store)


def test_errors_do_not_show_signed_urls(s3_stub: S3Stub) -> None:
    store = store_of(s3_stub.bucket(), retry_config={"max_retries": 0})
    for fault in ("server_errors", "cut_bodies"):
        setattr(s3_stub.faults, fault, 1)
        with pytest.raises(StorageError, match=r"a b/c\.0") as caught:
            part(store)
        assert "X-Amz" not in "".join(traceback.format_exception(caught.value))


def test_tls_is_left_to_obstore(tls_stub: S3Stub, certificate: Path) -> None:
    store = store_of(tls_stub.bucket(), verify=str(certificate))
    assert part(store) and {*ways(tls_stub)} == {"obstore"}
    assert store._client.direct is None  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "options",
    [
        {"requester_pays": True},
        {"s3_additional_kwargs": {"SSECustomerAlgorithm": "AES256", "SSECustomerKey": b"k" * 32}},
        {"client_options": {"default_headers": {"x-own": "1"}}},
        {"HTTP_PROXY": "http://127.0.0.1:9"},
    ],
)
def test_settings_that_need_more_than_an_url(
    options: dict[str, Any], s3_stub: S3Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    if proxy := options.get("HTTP_PROXY"):
        monkeypatch.setenv("HTTP_PROXY", proxy)
        options = {}
    place = s3_stub.bucket()
    store = open_store(place.url("run"), storage_options={**place.storage_options, **options})
    assert store._client.direct is None  # type: ignore[attr-defined]


def test_connections_are_closed_with_the_store(s3_stub: S3Stub) -> None:
    store = store_of(s3_stub.bucket())
    assert part(store)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        ((_, connection),) = store._client.direct._idle  # type: ignore[attr-defined]
        del store
        gc.collect()
        assert connection.closed
