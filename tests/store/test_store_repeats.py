"""Requests that are repeated: on_repeat is called with the operation, the failure, and whether to send fewer."""

from __future__ import annotations

import datetime
import threading
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness.s3_server import S3Server, Strike

import zarrckpt
from zarrckpt import StorageError
from zarrckpt._store import Store, open_store

PAUSES = {"init_backoff": datetime.timedelta(milliseconds=1), "max_backoff": datetime.timedelta(milliseconds=9)}
SOON = {"max_retries": 5, "backoff": {**PAUSES, "base": 2}}

Repeats = list[tuple[str, Exception, bool]]


def watched(stub: S3Server, **options: Any) -> tuple[Store, Repeats]:
    """Return a store that has an object "k", and the list to which its repeats are added."""
    place = stub.bucket()
    store = open_store(place.url("run"), storage_options={**place.storage_options, "retry_config": SOON, **options})
    store.put("k", [b"data"])
    repeats: Repeats = []
    store.on_repeat = lambda what, error, throttled: repeats.append((what, error, throttled))
    return store, repeats


CALLS: dict[str, tuple[Callable[[Store], object], str]] = {
    "get": (lambda store: store.get("k"), "reading 'k'"),
    "range": (lambda store: store.read("k", 1, 2), "reading 'k'"),
    "head": (lambda store: store.size("k"), "reading the size of 'k'"),
    "put": (lambda store: store.put("k2", [b"x"]), "writing 'k2'"),
    "create": (lambda store: store.create("k3", b"x"), "creating 'k3'"),
    "bulk": (lambda store: store.delete(["k2", "k3"]), "deleting 2 objects"),
}


def test_each_kind_of_request_reports_throttling(s3_stub: S3Server) -> None:
    store, repeats = watched(s3_stub)
    store.create("first", b"x")  # the server's support of conditions is known from here on
    for call, what in CALLS.values():
        s3_stub.faults.server_errors = 3
        call(store)
        assert [(found, throttled) for found, _, throttled in repeats] == [(what, True)] * 3
        for _, error, _ in repeats:
            assert isinstance(error, StorageError) and f"{what} in {store.url} failed" in str(error)
        repeats.clear()


ANSWERS = [(429, "x", True), (503, "x", True), (400, "SlowDown", True), (400, "ThrottlingException", True)]
ANSWERS += [(500, "x", False), (408, "x", False), (400, "RequestTimeout", False), (409, "OperationAborted", False)]
ANSWERS += [(0, "closed", False)]


@pytest.mark.parametrize(("status", "code", "throttled"), ANSWERS)
def test_throttling_differs_from_other_failures(status: int, code: str, throttled: bool, s3_stub: S3Server) -> None:
    store, repeats = watched(s3_stub)
    s3_stub.faults.strike = Strike("get", status, code)
    assert store.get("k") == b"data"
    assert [found for _, _, found in repeats] == [throttled]


def test_a_request_is_sent_as_often_as_retry_config_allows(s3_stub: S3Server) -> None:
    store, repeats = watched(s3_stub)
    for call in (lambda: store.get("k"), lambda: store.put("k", [b"x"])):
        s3_stub.requests.clear()
        repeats.clear()
        s3_stub.faults.throttle = 1.0
        with pytest.raises(StorageError, match="SlowDown"):
            call()
        assert len(s3_stub.requests) == 6 and len(repeats) == 5
    s3_stub.faults.throttle = 0.0
    s3_stub.requests.clear()
    s3_stub.faults.refused = {"put": (501, "NotImplemented")}
    with pytest.raises(StorageError, match="NotImplemented"):
        store.put("k", [b"x"])
    assert len(s3_stub.requests) == 1


def test_a_throttled_server_is_reported_until_it_recovers(s3_stub: S3Server) -> None:
    patient = {"max_retries": 1000, "retry_timeout": 60, "backoff": {**PAUSES, "base": 2}}
    store, repeats = watched(s3_stub, retry_config=patient)
    s3_stub.faults.throttle = 1.0
    recovery = threading.Timer(0.5, lambda: setattr(s3_stub.faults, "throttle", 0.0))
    recovery.start()
    try:
        store.put("k", [b"new"])
        assert store.get("k") == b"new"
    finally:
        recovery.join()
    assert repeats and all(throttled for _, _, throttled in repeats)


@pytest.mark.parametrize("path", ["run", "run.zarr.zip"])
def test_only_repeated_requests_of_a_save_and_load_send_events(path: str, s3_stub: S3Server) -> None:
    """Also those of an archive, whose requests another store makes."""
    place = s3_stub.bucket()
    where: dict[str, Any] = {"url": place.url(path), "storage_options": place.storage_options}
    events: list[zarrckpt.Event] = []
    state = {"w": torch.ones(3)}
    zarrckpt.save(state, **where, options=zarrckpt.SaveOptions(on_event=events.append))
    zarrckpt.load(state, **where, options=zarrckpt.LoadOptions(on_event=events.append))
    assert events and not any(event.kind in ("retried", "throttled") for event in events)
    s3_stub.faults.server_errors = 2
    zarrckpt.load(state, **where, options=zarrckpt.LoadOptions(on_event=events.append))
    assert [event.kind for event in events].count("throttled") == 2


def test_a_reported_failure_contains_no_secret(s3_stub: S3Server) -> None:
    store, repeats = watched(s3_stub, token="session-token-1")
    words = "testsecret session-token-1"
    s3_stub.faults.refusal_status = 503
    s3_stub.faults.refusal = f"<Error><Code>SlowDown</Code><Message>Slow {words}</Message></Error>"
    with pytest.raises(StorageError):
        store.get("k")
    assert len(repeats) == 5
    for what, error, _ in repeats:
        shown = what + repr(error) + "".join(traceback.format_exception(error))
        assert "Slow" in shown and not any(word in shown for word in words.split())
