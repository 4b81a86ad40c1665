"""Servers that redirect, announce, list or complain without bounds: no secret leaks, memory and time stay bounded."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import s3fs
import torch
from harness.internals import Store, open_store
from harness.s3_server import S3Server

import zarrckpt
from zarrckpt import CorruptCheckpointError, StorageError

CUSTOMER_KEY = base64.b64encode(bytes(range(32))).decode()
SECRETS: dict[str, dict[str, Any]] = {
    "session token": {"token": "session-token"},
    "customer key": {"sse_customer_key_base64": CUSTOMER_KEY, "server_side_encryption": "sse-c"},
    "header": {"default_headers": {"x-secret": "header"}},
}
REQUESTS: dict[str, Callable[[Store], Any]] = {
    "get": lambda store: store.get("k"),
    "read": lambda store: store.read("k", 0, 4),
    "read much": lambda store: store.read("k", 0, 2**20),
    "list": lambda store: [*store.list()],
    "list_dir": lambda store: store.list_dir(),
    "delete": lambda store: store.delete(["k"]),
    "put": lambda store: store.put("k", [b"data"]),
}


@pytest.fixture
def other_host() -> Iterator[S3Server]:
    """A server under another host's name than the first one's."""
    with S3Server() as stub:
        yield stub


def make_store(stub: S3Server, **options: Any) -> Store:
    place = stub.bucket()
    return open_store(place.url("run"), storage_options={**place.storage_options, **options})


def name_of_localhost(stub: S3Server) -> str:
    return stub.endpoint.replace("127.0.0.1", "localhost")


@pytest.mark.parametrize("request_name", REQUESTS)
def test_another_host_gets_no_request(request_name: str, s3_stub: S3Server, other_host: S3Server) -> None:
    store = make_store(s3_stub, **{name: value for given in SECRETS.values() for name, value in given.items()})
    s3_stub.faults.redirect_to = name_of_localhost(other_host)
    with pytest.raises(StorageError, match="redirects the request" if request_name != "put" else "302"):
        REQUESTS[request_name](store)
    assert other_host.connections == 0


def test_s3fs_follows_no_redirect(s3_stub: S3Server, other_host: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    place = s3_stub.bucket()
    options = {**place.fsspec_options, "token": "session-token", "config_kwargs": {"retries": {"max_attempts": 0}}}
    store = open_store(place.url("run"), storage_options=options)
    s3_stub.faults.redirect_to = name_of_localhost(other_host)
    with pytest.raises(StorageError, match="redirects"):
        store.get("k")
    assert other_host.connections == 0


def test_a_first_read_notices_a_redirect_soon(s3_stub: S3Server, other_host: S3Server) -> None:
    store = make_store(s3_stub)
    store.put("k", [b"x"])  # the server has answered
    s3_stub.faults.redirect_to = name_of_localhost(other_host)
    s3_stub.requests.clear()
    with pytest.raises(StorageError, match="redirect_hosts"):
        store.get("k")
    assert len(s3_stub.requests) <= 5


def test_allowed_hosts_are_redirected_to(s3_stub: S3Server, other_host: S3Server) -> None:
    for allowed in (["localhost"], "example.com, localhost", "*"):
        store = make_store(s3_stub, redirect_hosts=allowed)
        store.put("k", [b"data"])
        other_host.objects.update(s3_stub.objects)
        s3_stub.faults.redirect_to = name_of_localhost(other_host)
        assert store.get("k") == bytes(store.read("k", 0, 4)) == b"data"
        assert "authorization" not in other_host.requests[-1].headers
        s3_stub.faults.redirect_to = ""
    assert "127.0.0.1" not in other_host.requests[-1].headers["host"]


@pytest.mark.parametrize("allowed_by", ["option", "variable", "proxy"])
@pytest.mark.parametrize("secret", SECRETS)
def test_secrets_and_redirects_exclude_each_other(
    secret: str, allowed_by: str, s3_stub: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = dict(SECRETS[secret])
    if allowed_by == "option":
        options["redirect_hosts"] = "localhost"
    elif allowed_by == "variable":
        monkeypatch.setenv("ZARRCKPT_REDIRECT_HOSTS", "localhost")
    else:
        options["proxy_url"] = s3_stub.endpoint
    with pytest.raises(StorageError, match="redirect"):
        make_store(s3_stub, **options)


def test_a_provider_gives_no_token_where_redirects_lead_out(s3_stub: S3Server) -> None:
    given: dict[str, Any] = {"access_key_id": "a", "secret_access_key": "b", "expires_at": None}
    options = {"endpoint_url": s3_stub.endpoint, "redirect_hosts": "*", "credential_provider": lambda: given}
    store = open_store(s3_stub.bucket().url("run"), storage_options=options)
    store.put("k", [b"x"])
    given["token"] = "session-token"
    store = open_store(s3_stub.bucket().url("run"), storage_options=options)
    with pytest.raises(StorageError, match="session token"):
        store.put("k", [b"x"])
    assert len(s3_stub.requests) == 1


# -- bodies


@pytest.mark.parametrize("fault", ["announced", "endless"])
def test_bodies_longer_than_expected_are_refused(fault: str, s3_stub: S3Server) -> None:
    reads: list[Callable[[Store], Any]] = [lambda store: store.get("k"), lambda store: store.get_versioned("k")]
    if fault == "endless":
        # The server's announced length of a range is not used: the length is known.
        reads += [lambda store: store.read("k", 0, 100), lambda store: store.read("k", 0, 2**20)]
    # A client for each read: on a kept connection, the rest of a body would precede the next answer.
    stores = [make_store(s3_stub) for _ in reads]
    for store in stores:
        store.put("k", [bytes(2**20)])
    if fault == "announced":
        s3_stub.faults.announced = 2**40
    else:
        s3_stub.faults.endless = True
    for store, read in zip(stores, reads, strict=True):
        with pytest.raises((CorruptCheckpointError, StorageError), match="announces"):
            read(store)


def test_a_longer_table_is_damage(s3_stub: S3Server) -> None:
    place = s3_stub.bucket()
    url, options = place.url("run/step-1"), place.storage_options
    zarrckpt.save({"w": torch.arange(10.0)}, url, storage_options=options)
    table = next(name for name in s3_stub.objects if "checksums" in name and not name.endswith("zarr.json"))
    s3_stub.put_object(table, s3_stub.objects[table].data + bytes(100))
    with pytest.raises(CorruptCheckpointError, match="checksums"):
        zarrckpt.load({"w": torch.zeros(10)}, url, storage_options=options)


# -- listings

TRUNCATED = (
    "<ListBucketResult><IsTruncated>true</IsTruncated><NextContinuationToken>again</NextContinuationToken>{}"
    "</ListBucketResult>"
)
OBJECT = "<Contents><Key>run/{:04}</Key><Size>1</Size><LastModified>2026-01-01T00:00:00Z</LastModified></Contents>"


@pytest.mark.parametrize("entries", [0, 1000])
def test_listings_without_end_are_given_up(entries: int, s3_stub: S3Server) -> None:
    store = make_store(s3_stub, timeout=1, retry_config={"retry_timeout": 1})
    s3_stub.faults.listing = TRUNCATED.format("".join(map(OBJECT.format, range(entries)))).encode()
    for request in (lambda: [*store.list()], store.list_dir):
        with pytest.raises(StorageError, match="listing"):
            request()
    sent = len(s3_stub.requests)
    time.sleep(0.3)
    assert len(s3_stub.requests) <= sent + 1


NO_LISTINGS = {
    "login": b"<!DOCTYPE html><html><head><title>Sign in</title></head><body><p>Sign in</p></body></html>",
    "error": b"<Error><Code>InternalFailure</Code><Message>try later</Message></Error>",
    "other": b"<Thing><Other>1</Other></Thing>",
}


@pytest.mark.parametrize("answer", NO_LISTINGS)
def test_an_answer_that_is_no_listing_is_no_empty_run(answer: str, s3_stub: S3Server) -> None:
    place = s3_stub.bucket()
    url, options = place.url("run"), place.storage_options
    with zarrckpt.CheckpointManager(url, save_every=1, storage_options=options) as manager:
        manager.step(1, {"step": 1})
    checkpoint = zarrckpt.latest(url, storage_options=options)
    assert checkpoint is not None
    s3_stub.faults.listing = NO_LISTINGS[answer]
    with pytest.raises(StorageError, match="listing"):
        zarrckpt.latest(url, storage_options=options)
    manager = zarrckpt.CheckpointManager(url, save_every=1, storage_options=options)
    with pytest.raises(StorageError, match="listing"):
        manager.restore({"step": 0})
    for quick in (True, False):
        with pytest.raises(StorageError, match="listing"):
            zarrckpt.open(checkpoint, storage_options=options).verify(quick=quick)


# -- error texts


@pytest.mark.parametrize("piece", ["<Error>", "<StringToSign>", "<?xml ", "://a:", "<html>", "Bearer  "])
def test_long_error_texts_are_cut_before_they_are_cleaned(piece: str, s3_stub: S3Server) -> None:
    store = make_store(s3_stub, secret="a-secret-of-the-user")
    s3_stub.faults.refusal = f"{piece * 40_000}<Message>a-secret-of-the-user</Message>"
    with pytest.raises(StorageError) as caught:
        store.get("k")
    assert len(str(caught.value)) < 2000
    assert "a-secret-of-the-user" not in f"{caught.value} {caught.value.__cause__!r}"
