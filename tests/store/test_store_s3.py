"""S3 by obstore and by s3fs: options, credentials, faults of servers, and errors without secrets."""

from __future__ import annotations

import base64
import datetime
import os
import re
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import obstore
import pytest
import s3fs
import torch
from harness.s3_server import LONG, Faults, S3Server
from harness.store_servers import S3Place, free_port
from obstore import exceptions as client_errors

import zarrckpt
from zarrckpt import ObjectExistsError, ObjectNotFoundError, StorageError
from zarrckpt._store import Store, _obstore, _obstore_client, _options, open_store
from zarrckpt._store._url import parse

QUICK = {"retry_config": {"max_retries": 1, "retry_timeout": 5}}


def stub_store(stub: S3Server, path: str = "run", **options: Any) -> Store:
    place = stub.bucket()
    given = place.s3fs_options if options.get("backend") == "fsspec" else place.storage_options
    return open_store(place.url(path), storage_options={**given, **options})


@pytest.fixture(params=["obstore", "fsspec"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


# -- servers that ignore conditions


@pytest.mark.parametrize("how", ["ignores", "refuses"])
class TestSloppyServer:
    """A server that ignores the condition of a put, or refuses all puts with one: best effort, with one warning."""

    @pytest.fixture
    def store(self, how: str, backend: str, s3_stub: S3Server, sloppy_bucket: S3Place) -> Store:
        s3_stub.faults.no_conditions = True
        place = sloppy_bucket if how == "ignores" else s3_stub.bucket()
        options = place.storage_options if backend == "obstore" else place.fsspec_options
        return open_store(place.url("run"), storage_options=options)

    def test_without_conditions_create_checks_and_warns_once(self, store: Store) -> None:
        with pytest.warns(UserWarning, match="best effort") as caught:
            store.create("claim", b"mine")
            for key in ("claim", "claim"):
                with pytest.raises(ObjectExistsError):
                    store.create(key, b"theirs")
            store.create("root", b"mine")
        assert len(caught) == 1
        assert store.get("claim") == store.get("root") == b"mine"

    def test_the_first_create_does_not_replace_an_object(self, store: Store) -> None:
        store.put("root", [b"committed by another"])
        with pytest.raises(ObjectExistsError):
            store.create("root", b"mine")
        assert store.get("root") == b"committed by another"

    def test_without_conditions_replace_checks_and_leaves_no_probe(self, store: Store) -> None:
        with pytest.warns(UserWarning, match="best effort") as caught:
            store.create("root", b"1")
            seen = store.get_versioned("root")
            store.replace("root", b"2", seen.version)
            with pytest.raises(ObjectExistsError):
                store.replace("root", b"3", seen.version)
        assert len(caught) == 1
        assert store.get("root") == b"2"
        assert [item.key for item in store.list()] == ["root"]

    def test_threads_of_one_process_still_have_one_winner(self, store: Store) -> None:
        def create(number: int) -> bool:
            try:
                store.create("root", b"%d" % number)
            except ObjectExistsError:
                return False
            return True

        with pytest.warns(UserWarning, match="best effort"), ThreadPoolExecutor(12) as pool:
            assert list(pool.map(create, range(12))).count(True) == 1


def test_a_server_that_is_busy_at_the_first_condition_is_waited_for(s3_stub: S3Server) -> None:
    store = stub_store(s3_stub, retry_config={"backoff": {"init_backoff": 0.01, "max_backoff": 0.1}})
    store.put("other", [b"x"])
    s3_stub.faults.server_errors = 6
    store.create("root", b"1")
    with pytest.raises(ObjectExistsError):
        store.create("root", b"2")


def test_an_honest_server_is_not_warned_about(backend: str, s3_stub: S3Server) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        store = stub_store(s3_stub, backend=backend)
        store.create("root", b"1")
        store.replace("root", b"2", store.get_versioned("root").version)
    assert [item.key for item in store.list()] == ["root"]


def test_learning_costs_a_few_requests_once(s3_stub: S3Server) -> None:
    def methods() -> list[str]:
        seen = [request.method for request in s3_stub.requests]
        s3_stub.requests.clear()
        return seen

    store = stub_store(s3_stub)
    store.create("claim", b"1")
    assert methods() == ["GET", "PUT", "PUT"]
    store.create("root", b"1")
    assert methods() == ["PUT"]
    version = store.get_versioned("root").version
    assert methods() == ["GET"]
    store.replace("root", b"2", version)
    assert len(methods()) <= 8
    version = store.get_versioned("root").version
    methods()
    store.replace("root", b"3", version)
    assert methods() == ["PUT"]


def test_amazon_itself_is_trusted_without_trying(s3_stub: S3Server) -> None:
    options = {"key": "k", "secret": "s", "endpoint_url": "http://s3.eu-west-1.amazonaws.com"}
    store = open_store("s3://bucket/run", storage_options={**options, "proxy_url": s3_stub.endpoint})
    store.create("root", b"1")
    assert [request.method for request in s3_stub.requests] == ["PUT"]
    with pytest.raises(ObjectExistsError):
        store.create("root", b"2")


def test_a_server_that_refuses_every_if_match_gets_best_effort(backend: str, s3_stub: S3Server) -> None:
    store = stub_store(s3_stub, backend=backend)
    store.create("root", b"1")
    s3_stub.faults.refuse_matches = True
    seen = store.get_versioned("root")
    with pytest.warns(UserWarning, match="best effort"):
        store.replace("root", b"2", seen.version)
    assert store.get("root") == b"2"
    with pytest.raises(ObjectExistsError):
        store.replace("root", b"3", seen.version)
    assert [item.key for item in store.list()] == ["root"]


# -- lost answers and servers in trouble


def test_a_lost_answer_is_no_conflict(backend: str, s3_stub: S3Server) -> None:
    store = stub_store(s3_stub, backend=backend)
    store.create("first", b"1")
    s3_stub.faults.lose_answers = 1
    store.create("root", b"mine, unique")
    assert store.get("root") == b"mine, unique"
    seen = store.get_versioned("root")
    s3_stub.faults.lose_answers = 1
    store.replace("root", b"mine again, unique", seen.version)
    assert store.get("root") == b"mine again, unique"
    s3_stub.faults.lose_answers = 1
    store.put("chunk", [b"data"])
    assert store.get("chunk") == b"data"


def test_a_lost_answer_does_not_hide_a_real_conflict(s3_stub: S3Server) -> None:
    store = stub_store(s3_stub)
    store.create("root", b"theirs")
    s3_stub.faults.lose_answers = 1
    with pytest.raises(ObjectExistsError):
        store.create("root", b"mine")
    assert store.get("root") == b"theirs"


def test_retries_are_bounded(s3_stub: S3Server) -> None:
    store = stub_store(s3_stub, **QUICK)
    s3_stub.faults.server_errors = 100
    with pytest.raises(StorageError, match="503"):
        store.put("k", [b"x"])
    assert len(s3_stub.requests) == 2


def test_a_request_that_cannot_succeed_is_given_up_at_once(s3_stub: S3Server) -> None:
    store = stub_store(s3_stub)
    s3_stub.faults.refusal, s3_stub.faults.refusal_status = "<Error><Code>InvalidArgument</Code></Error>", 400
    for call in (lambda: store.put("k", [b"x"]), lambda: store.get("k"), lambda: store.read("k", 0, 1)):
        s3_stub.requests.clear()
        with pytest.raises(StorageError, match="InvalidArgument"):
            call()
        assert len(s3_stub.requests) <= 9


def test_e_tags_without_quotes(backend: str, s3_stub: S3Server) -> None:
    store = stub_store(s3_stub, backend=backend)
    s3_stub.faults.bare_e_tags = True
    store.create("root", b"1")
    seen = store.get_versioned("root")
    store.replace("root", b"2", seen.version)
    with pytest.raises(ObjectExistsError):
        store.replace("root", b"3", seen.version)
    assert store.get("root") == b"2"


def test_listings_of_many_pages(backend: str, s3_stub: S3Server) -> None:
    s3_stub.faults.page = 3
    store = stub_store(s3_stub, backend=backend)
    keys = {f"{folder}/{number}" for folder in ("a", "b") for number in range(5)}
    for key in keys | {"x", "y"}:
        store.put(key, [b"z"])
    assert {item.key for item in store.list()} == keys | {"x", "y"}
    assert store.list_dir() == (["x", "y"], ["a", "b"])
    assert store.list_dir("a") == ([str(number) for number in range(5)], [])


# -- errors


def everything_in(error: BaseException) -> str:
    """Return all texts that a log of the error can show: its traceback, and every linked exception."""
    texts = traceback.format_exception(error)
    seen: list[BaseException] = []
    todo: list[BaseException | None] = [error]
    while todo:
        item = todo.pop()
        if item is not None and item not in seen:
            seen.append(item)
            texts += [str(item), repr(item)]
            todo += [item.__cause__, item.__context__]
    return "\n".join(texts)


def test_errors_say_what_the_server_said(s3_stub: S3Server) -> None:
    s3_stub.faults.refusal = (
        '<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>AccountProblem</Code>'
        "<Message>Pay &amp; try again</Message><RequestId>4F1</RequestId></Error>"
    )
    with pytest.raises(StorageError, match="AccountProblem: Pay & try again") as caught:
        stub_store(s3_stub).get("k")
    assert "<" not in str(caught.value)


def test_errors_never_quote_credentials(backend: str, s3_stub: S3Server) -> None:
    key, secret, token = "AKIAEXAMPLEEXAMPLE", "wJalrXUtnFEMI+K7/MDENG", "FwoGZXIvYXdzE-session"
    options = {"key": key, "secret": secret, "token": token, "backend": backend}
    store = stub_store(s3_stub, **options)
    s3_stub.faults.refusal = (
        "<Error><Code>SignatureDoesNotMatch</Code><Message>The signature does not match</Message>"
        f"<AWSAccessKeyId>{key}</AWSAccessKeyId><StringToSign>AWS4 {key}</StringToSign>"
        f"<CanonicalRequest>PUT\nx-amz-security-token:{token}\n</CanonicalRequest>"
        f"<Detail>{secret} {token} sig={secret}</Detail></Error>"
    )
    calls = [
        lambda: store.get("k"),
        lambda: store.put("k", [b"x"]),
        lambda: store.create("k", b"x"),
        lambda: store.read_into("k", 0, memoryview(bytearray(3))),
        lambda: store.list_dir(),
        lambda: [*store.list()],
    ]
    for call in calls:
        with pytest.raises(StorageError, match="failed") as caught:
            call()
        shown = everything_in(caught.value)
        for hidden in (key, secret, token):
            assert hidden not in shown
        assert store.url in str(caught.value)


def test_credentials_of_a_provider_are_not_quoted(s3_stub: S3Server) -> None:
    def provider() -> dict[str, Any]:
        raise RuntimeError("cannot renew: Authorization: Bearer abc.def.ghi")

    place = s3_stub.bucket()
    store = open_store(
        place.url(), storage_options={"endpoint_url": place.endpoint, **QUICK, "credential_provider": provider}
    )
    with pytest.raises(StorageError, match="cannot renew") as caught:
        store.get("k")
    assert "abc.def.ghi" not in everything_in(caught.value)


@pytest.mark.parametrize("server", ["moto", pytest.param("ceph", marks=pytest.mark.ceph)])
def test_a_missing_bucket_is_named(server: str, backend: str, request: pytest.FixtureRequest) -> None:
    endpoint = request.getfixturevalue(f"{server}_endpoint")
    place = S3Place(endpoint, "no-such-bucket-anywhere")
    options = place.storage_options if backend == "obstore" else place.fsspec_options
    store = open_store(place.url("run"), storage_options=options)
    for write in (lambda: store.put("k", [b"x"]), lambda: store.create("k", b"x")):
        with pytest.raises(StorageError, match=r"(?s)no-such-bucket-anywhere.*bucket.*exists") as caught:
            write()
        assert not isinstance(caught.value, ObjectExistsError | ObjectNotFoundError)
    with pytest.raises(ObjectNotFoundError):
        store.get("k")
    if backend == "obstore":
        with pytest.raises(StorageError, match="NoSuchBucket"):
            store.list_dir()


@pytest.mark.ceph
def test_wrong_credentials_are_refused_clearly(backend: str, ceph_bucket: S3Place) -> None:
    options = ceph_bucket.storage_options if backend == "obstore" else ceph_bucket.fsspec_options
    store = open_store(ceph_bucket.url("run"), storage_options={**options, "secret": "wrong-secret-123"})
    for call in (lambda: store.get("k"), lambda: store.put("k", [b"x"]), lambda: store.create("k", b"x")):
        with pytest.raises(StorageError, match="Check the credentials") as caught:
            call()
        assert not isinstance(caught.value, FileNotFoundError | FileExistsError)
        assert "wrong-secret-123" not in everything_in(caught.value)


def test_an_unreachable_endpoint_fails_soon(backend: str) -> None:
    place = S3Place(f"http://127.0.0.1:{free_port()}", "bucket", secret="secret-of-mine")
    once = {**place.fsspec_options, "config_kwargs": {"retries": {"max_attempts": 0}}}
    options = {**place.storage_options, **QUICK} if backend == "obstore" else once
    store = open_store(place.url("run"), storage_options=options)
    began = time.monotonic()
    with pytest.raises(StorageError, match="Check the") as caught:
        store.get("k")
    assert time.monotonic() - began < LONG
    assert "secret-of-mine" not in everything_in(caught.value)


WRONG_ADDRESSES = {
    "refused": r"http://127\.0\.0\.1:\d+ refuses connections",
    "unknown": r"the host of http://x+\.invalid is not known",
    "TLS to plain HTTP": r"https://127\.0\.0\.1:\d+ does not speak TLS.*http://",
    "plain HTTP to TLS": r"http://127\.0\.0\.1:\d+ (closed|does not answer in HTTP).*https://",
    "unknown certificate": r"certificate of https://127\.0\.0\.1:\d+ is not trusted",
    "silent": r"http://127\.0\.0\.1:\d+ accepts connections but does not answer",
    "bucket": r"127\.0\.0\.1:\d+ has no such bucket",
}


@pytest.fixture
def silent_port() -> Iterator[int]:
    """Yield a port that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=100) as server:
        yield server.getsockname()[1]


def test_a_connection_that_is_closed_before_it_is_used_is_no_answer(s3_stub: S3Server) -> None:
    # A rare case: the server closes the connection at that very moment. This is obstore's error then.
    closed = client_errors.GenericError('hyper::Error(Canceled, "connection was not ready")')
    store = stub_store(s3_stub)
    with patch.object(obstore, "get", side_effect=closed) as get:
        with pytest.raises(StorageError, match="closed the connection"):
            store.get("k")
        assert get.call_count == 1


@pytest.mark.parametrize("wrong", WRONG_ADDRESSES)
def test_each_wrong_address_has_its_own_message(
    wrong: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(_obstore_client._FIRST_RETRY, "max_retries", 1)
    match wrong:
        case "refused":
            endpoint = f"http://127.0.0.1:{free_port()}"
        case "unknown":
            # A name of this length cannot exist. It is refused without a request to a name server, which may be slow.
            endpoint = f"http://{'x' * 64}.invalid"
        case "TLS to plain HTTP":
            endpoint = request.getfixturevalue("s3_stub").endpoint.replace("http:", "https:")
        case "plain HTTP to TLS":
            endpoint = request.getfixturevalue("tls_stub").endpoint.replace("https:", "http:")
        case "unknown certificate":
            endpoint = request.getfixturevalue("tls_stub").endpoint
        case "silent":
            monkeypatch.setattr(_obstore_client, "_FIRST_ANSWER", datetime.timedelta(milliseconds=200))
            endpoint = f"http://127.0.0.1:{request.getfixturevalue('silent_port')}"
        case _:
            endpoint = request.getfixturevalue("moto_endpoint")
    place = S3Place(endpoint, "no-such-bucket-either", secret="secret-of-mine")
    where: dict[str, Any] = {"storage_options": place.storage_options}
    calls: list[Callable[[], Any]] = [
        lambda: zarrckpt.open(place.url("run"), **where),
        lambda: zarrckpt.latest(place.url("runs"), **where),
        lambda: zarrckpt.save({"w": torch.ones(3)}, place.url("run"), **where),
        lambda: zarrckpt.remove(place.url("run"), **where),
        lambda: open_store(place.url("run"), **where).list_dir(),
        lambda: [*open_store(place.url("run"), **where).list()],
    ]
    for call in calls:
        with pytest.raises(zarrckpt.CheckpointError, match=WRONG_ADDRESSES[wrong]) as caught:
            call()
        assert not isinstance(caught.value, zarrckpt.CheckpointNotFoundError)
        assert "GenericError" not in str(caught.value) and "secret-of-mine" not in everything_in(caught.value)


def test_a_web_page_is_not_quoted(s3_stub: S3Server) -> None:
    s3_stub.faults.refusal = "<!DOCTYPE html><html><head><title>Sign in</title></head><body>a page</body></html>"
    with pytest.raises(StorageError, match="web page: Sign in") as caught:
        stub_store(s3_stub).get("k")
    assert "<" not in str(caught.value)


WRONG_VALUES = [{"retry_config": 3}, {"retry_config": {"max_retries": "x"}}, {"retry_config": {"retry_timeout": "5"}}]
WRONG_VALUES += [{"timeout": "abc"}, {"connect_timeout": True}, {"retry_config": {"backoff": "x"}}]
WRONG_VALUES += [{"retry_config": {"backoff": {"init_backoff": "1s"}}}]


@pytest.mark.parametrize("options", WRONG_VALUES, ids=str)
def test_a_wrong_value_of_an_option_is_named(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(StorageError, match=f"option {name}.*expected"):
        zarrckpt.open("s3://b/x", storage_options={"key": "x", "secret": "x", **options})


def test_only_a_server_that_never_answered_is_given_up_soon(s3_stub: S3Server) -> None:
    store, faults = stub_store(s3_stub), s3_stub.faults
    for call in (lambda: store.get("k"), store.list_dir):
        faults.resets, s3_stub.connections = 1000, 0
        with pytest.raises(StorageError, match="closed the connection"):
            call()
        assert s3_stub.connections < 15
    faults.resets, faults.hang_up = 2, True
    store.put("k", [b"x"])
    for call in (lambda: store.get("k"), store.list_dir):
        faults.resets = 3
        call()
    # The caller's retry_config holds from the first request on.
    pauses = {"init_backoff": datetime.timedelta(milliseconds=1), "max_backoff": datetime.timedelta(milliseconds=9)}
    with S3Server(Faults(resets=12)) as fresh:
        stub_store(fresh, retry_config={"max_retries": 20, "backoff": {**pauses, "base": 2}}).put("k", [b"x"])


# -- options


def put_headers(stub: S3Server, **options: Any) -> dict[str, str]:
    """Return the headers with which an object arrives under these options."""
    store = stub_store(stub, **options)
    store.put("k", [b"x"])
    assert store.get("k") == b"x"
    return next(request.headers for request in stub.requests if request.method == "PUT")


def test_sse_kms(s3_stub: S3Server) -> None:
    options = {"server_side_encryption": "aws:kms", "sse_kms_key_id": "the-key", "sse_bucket_key_enabled": True}
    headers = put_headers(s3_stub, **options)
    assert headers["x-amz-server-side-encryption"] == "aws:kms"
    assert headers["x-amz-server-side-encryption-aws-kms-key-id"] == "the-key"
    assert headers["x-amz-server-side-encryption-bucket-key-enabled"] == "true"


def test_sse_with_a_customer_key(s3_stub: S3Server) -> None:
    key = base64.b64encode(b"0" * 32).decode()
    headers = put_headers(s3_stub, server_side_encryption="sse-c", sse_customer_key_base64=key)
    assert headers["x-amz-server-side-encryption-customer-algorithm"] == "AES256"
    read = s3_stub.requests[-1]
    assert read.method == "GET"
    assert "x-amz-server-side-encryption-customer-key" in read.headers


def test_requester_pays(s3_stub: S3Server) -> None:
    assert put_headers(s3_stub, request_payer=True)["x-amz-request-payer"] == "requester"
    assert s3_stub.requests[-1].headers["x-amz-request-payer"] == "requester"


@pytest.mark.parametrize("how", ["put", "create", "multipart"])
def test_storage_class_and_tags(how: str, s3_stub: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    store = stub_store(s3_stub, storage_class="STANDARD_IA", tags={"team": "a b", "run": "7"})
    if how == "create":
        store.create("k", b"x")
    else:
        monkeypatch.setattr(_obstore, "SPLIT", 10 if how == "multipart" else 2**20)
        store.put("k", [b"x" * 20])
    sent = next(request.headers for request in s3_stub.requests if request.kind in ("put", "begin"))
    assert sent["x-amz-storage-class"] == "STANDARD_IA"
    assert sorted(sent["x-amz-tagging"].split("&")) in (["run=7", "team=a%20b"], ["run=7", "team=a+b"])


def test_anonymous_requests_are_not_signed(s3_stub: S3Server) -> None:
    store = open_store("s3://public/run", storage_options={"anon": True, "endpoint_url": s3_stub.endpoint})
    with pytest.raises(ObjectNotFoundError):
        store.get("k")
    assert "authorization" not in s3_stub.requests[-1].headers


def test_given_keys_do_not_mix_with_a_token_of_the_environment(
    s3_stub: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "of-the-environment")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "token-of-the-environment")
    headers = put_headers(s3_stub)
    assert "Credential=test/" in headers["authorization"]
    assert "x-amz-security-token" not in headers
    s3_stub.requests.clear()
    assert put_headers(s3_stub, token="mine")["x-amz-security-token"] == "mine"


def test_a_missing_profile_is_named() -> None:
    with pytest.raises(StorageError, match="'nobody'"):
        open_store("s3://bucket/run", storage_options={"profile": "nobody"})


def test_a_profile_is_read_again_before_its_credentials_expire(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process, config = tmp_path / "process", tmp_path / "config"
    process.write_text(
        "#!/bin/sh\necho x >> $0.calls\nends=$(date -u -d '5 minutes' +%Y-%m-%dT%H:%M:%SZ)\n"
        'echo \'{"Version": 1, "SecretAccessKey": "s", "AccessKeyId": "key-\'$(wc -l < $0.calls)\'", '
        '"Expiration": "\'$ends\'"}\'\n'
    )
    process.chmod(0o755)
    config.write_text(f"[profile p]\ncredential_process = {process}\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    provider = _options.translate(parse("s3://bucket"), {"profile": "p"}, None).credential_provider
    assert provider is not None
    first, second = provider(), provider()
    assert first["access_key_id"].startswith("key-") and first["access_key_id"] != second["access_key_id"]
    assert first["expires_at"] < datetime.datetime.now(datetime.UTC) + datetime.timedelta(minutes=10)


def test_a_profile_without_boto3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "boto3", None)
    monkeypatch.delitem(sys.modules, "obstore.auth.boto3", raising=False)
    with pytest.raises(StorageError, match="pip install boto3"):
        open_store("s3://bucket", storage_options={"profile": "p"})
    # Only the machine's role is left, which obstore requests itself.
    open_store("s3://bucket")
    (tmp_path / "credentials").touch()
    for name, value in (("AWS_PROFILE", "p"), ("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))):
        with monkeypatch.context() as patched, pytest.raises(StorageError, match="pip install boto3"):
            patched.setenv(name, value)
            open_store("s3://bucket")


def test_missing_credentials_are_named_at_once() -> None:
    began = time.monotonic()
    with pytest.raises(StorageError, match=r"no AWS credentials were found.*AWS_PROFILE.*anon"):
        open_store("s3://bucket/run")
    assert time.monotonic() - began < LONG


def test_a_provider_is_asked_again_when_its_credentials_expire(s3_stub: S3Server) -> None:
    asked: list[int] = []

    def provider() -> dict[str, Any]:
        asked.append(len(asked))
        expires = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=1)
        return {"access_key_id": f"key-{len(asked)}", "secret_access_key": "s", "token": "t", "expires_at": expires}

    store = open_store(
        "s3://bucket/run", storage_options={"endpoint_url": s3_stub.endpoint, "credential_provider": provider}
    )
    store.put("k", [b"x"])
    time.sleep(1.1)
    store.put("k", [b"x"])
    assert len(asked) >= 2
    assert f"Credential=key-{len(asked)}/" in s3_stub.requests[-1].headers["authorization"]


def test_a_proxy_is_used(s3_stub: S3Server) -> None:
    stub_store(s3_stub, endpoint_url="http://unreachable.invalid", proxy_url=s3_stub.endpoint).put("k", [b"x"])
    assert re.fullmatch(r"http://unreachable\.invalid/stub-\w+/run/k", s3_stub.requests[-1].target)


@pytest.mark.parametrize("how", ["path", "pem", "environment", "unverified"])
def test_an_own_certificate_authority(
    how: str, tls_stub: S3Server, certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(certificate.parent))
    options: dict[str, Any] = {
        "path": {"root_certificate": f"~/{certificate.name}"},
        "pem": {"client_options": {"root_certificate": certificate.read_bytes()}},
        "environment": {},
        "unverified": {"allow_invalid_certificates": True},
    }[how]
    if how == "environment":
        monkeypatch.setenv("AWS_CA_BUNDLE", str(certificate))
    store = stub_store(tls_stub, **options)
    store.put("k", [b"x"])
    assert store.get("k") == b"x"


def test_an_unknown_certificate_authority_is_refused(tls_stub: S3Server) -> None:
    with pytest.raises(StorageError):
        stub_store(tls_stub, **QUICK).put("k", [b"x"])
    with pytest.raises(StorageError, match=r"/no/such\.pem"):
        stub_store(tls_stub, root_certificate="/no/such.pem")


HASH = r"[0-9a-f]{64}"
UNSIGNED = "UNSIGNED-PAYLOAD"


@pytest.mark.parametrize(
    ("options", "variable", "over_tls", "over_http"),
    [
        ({}, None, UNSIGNED, UNSIGNED),
        ({"unsigned_payload": False}, None, HASH, HASH),
        ({"unsigned_payload": True}, None, UNSIGNED, UNSIGNED),
        ({}, "false", HASH, HASH),
    ],
)
def test_options_decide_whether_payloads_are_hashed(
    options: dict[str, Any],
    variable: str | None,
    over_tls: str,
    over_http: str,
    s3_stub: S3Server,
    tls_stub: S3Server,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if variable is not None:
        monkeypatch.setenv("AWS_UNSIGNED_PAYLOAD", variable)
    for stub, sent in ((tls_stub, over_tls), (s3_stub, over_http)):
        headers = put_headers(stub, allow_invalid_certificates=True, **options)
        assert re.fullmatch(sent, headers["x-amz-content-sha256"])


@pytest.mark.parametrize(
    ("endpoint", "payload"),
    [
        ("http://10.1.2.3:9000", HASH),
        ("http://minio.internal", HASH),
        ("http://127.0.0.1.example.com", HASH),
        ("http://127.0.0.2:9000", UNSIGNED),
        ("http://[::1]:9000", UNSIGNED),
        ("http://LOCALHOST", UNSIGNED),
    ],
)
def test_payloads_are_hashed_by_default_where_others_may_listen(
    endpoint: str, payload: str, s3_stub: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    # With a proxy, any address will do.
    sent = put_headers(s3_stub, endpoint_url=endpoint, proxy_url=s3_stub.endpoint)
    assert re.fullmatch(payload, sent["x-amz-content-sha256"])


def test_virtual_hosts_put_the_bucket_into_the_host(s3_stub: S3Server) -> None:
    options = {"key": "k", "secret": "s", "proxy_url": s3_stub.endpoint, "virtual_hosted_style_request": True}
    for endpoint in ("http://s3.invalid", "http://bucket.s3.invalid/"):
        store = open_store("s3://bucket/run", storage_options={**options, "endpoint_url": endpoint})
        store.put("k", [b"x"])
        assert s3_stub.requests[-1].target == "http://bucket.s3.invalid/run/k"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"regoin": "x"}, "'regoin'.*not known.*'backend': 'fsspec'"),
        ({"client_options": {"time_out": 3}}, r"client_options\['time_out'\]"),
        ({"client_options": "{}"}, "client_options.*mapping"),
        ({"retry_config": {"retries": 3}}, "max_retries"),
        ({"retry_config": {"backoff": {"bas": 9}}}, "'bas'"),
        ({"region": ["x"]}, "option region"),
        ({"key": ["x"], "secret": "s"}, "option key"),
        ({"client_kwargs": {"region_name": "x"}}, "client_kwargs is a dict.*'backend': 'fsspec'"),
        ({"s3_additional_kwargs": {"ACL": "private"}}, "s3_additional_kwargs.*'backend': 'fsspec'"),
        ({"client_kwargs": "{}"}, "client_kwargs"),
        ({"use_listings_cache": False}, "use_listings_cache.*'backend': 'fsspec'"),
        ({"session": object()}, "session.*'backend': 'fsspec'"),
        ({"completely_different": 1}, "completely_different.*'backend': 'fsspec'"),
        ({"region": "a", "aws_region": "b"}, "'region' and 'aws_region'"),
        ({"endpoint_url": "minio:9000"}, "http://"),
        ({"server_side_encryption": "nonsense"}, "nonsense"),
        ({"key": "only half"}, "only one of key and secret"),
        ({"token": "alone", "anon": False}, "a token without them"),
    ],
)
def test_unsupported_options_are_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(StorageError, match=reason):
        open_store("s3://bucket", storage_options={"anon": "key" not in options, **options})


KEYS = {"key": "k", "secret": "s"}


@pytest.mark.parametrize(
    ("url", "options", "names"),
    [
        ("s3://b", {"anon": True, **KEYS}, ("anon", "key")),
        ("s3://b", {"skip_signature": "true", "profile": "p"}, ("skip_signature", "profile")),
        ("s3://b", {"profile": "p", **KEYS, "anon": False}, ("profile", "key")),
        ("s3://b", {"token": "t", "profile": "p"}, ("token", "profile")),
        ("s3://b", {"web_identity_token_file": "f", **KEYS}, ("web_identity_token_file", "key")),
        ("s3://b", {"provider": dict, **KEYS}, ("credential_provider", "key")),
        ("s3://b", {"provider": dict, "profile": "p"}, ("credential_provider", "profile")),
        ("s3://b", {"provider": dict, "anon": True}, ("credential_provider", "anon")),
        ("gs://b", {"provider": dict, "token": "anon"}, ("credential_provider", "token")),
        ("gs://b", {"anon": True, "bearer_token": "t"}, ("anon", "bearer_token")),
        ("az://b", {"anon": True, "account_key": "a2V5"}, ("anon", "account_key")),
        ("az://b", {"sas_token": "sig=x", "access_key": "a2V5"}, ("sas_token", "access_key")),
        ("az://b", {"provider": dict, "sas_key": "sig=x"}, ("credential_provider", "sas_key")),
        ("abfss://c@one.dfs.core.windows.net/x", {"account_name": "two"}, ("one", "two")),
    ],
)
def test_two_sources_of_credentials_are_refused(url: str, options: dict[str, Any], names: tuple[str, str]) -> None:
    options = dict(options)
    with pytest.raises(StorageError) as caught:
        open_store(url, storage_options={**options, "credential_provider": options.pop("provider", None)})
    assert all(repr(name) in str(caught.value) for name in names)


@pytest.mark.parametrize("way", ["keys", "profile", "provider", None])
def test_what_the_caller_says_beats_an_environment_that_signs_nothing(
    way: str | None, s3_stub: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config").write_text("[profile p]\naws_access_key_id = k\naws_secret_access_key = s\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    options = {"keys": KEYS, "profile": {"profile": "p"}}.get(str(way), {})
    credentials = {"access_key_id": "k", "secret_access_key": "s", "token": None, "expires_at": None}
    provider = (lambda: credentials) if way == "provider" else None
    options = {**options, "endpoint_url": s3_stub.endpoint}
    open_store("s3://bucket", storage_options={**options, "credential_provider": provider}).put("k", [b"x"])
    assert ("authorization" in s3_stub.requests[-1].headers) == (way is not None)


def test_options_reach_s3fs_as_they_are(moto_bucket: S3Place) -> None:
    options = {**moto_bucket.fsspec_options, "s3_additional_kwargs": {"Metadata": {"origin": "here"}}}
    open_store(moto_bucket.url("run"), storage_options=options).put("k", [b"x"])
    found = moto_bucket.client().head_object(Bucket=moto_bucket.bucket, Key="run/k")
    assert found["Metadata"] == {"origin": "here"}


def test_an_s3fs_without_split_reads_works(moto_bucket: S3Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before 2026.3, s3fs has no option for that."""
    read = s3fs.S3FileSystem._cat_file

    async def cat_file(self: Any, path: str, version_id: Any = None, start: Any = None, end: Any = None) -> Any:
        return await read(self, path, version_id=version_id, start=start, end=end)

    monkeypatch.setattr(s3fs.S3FileSystem, "_cat_file", cat_file)
    s3fs.S3FileSystem.clear_instance_cache()
    store = open_store(moto_bucket.url("run"), storage_options=moto_bucket.fsspec_options)
    store.put("k", [b"x"])
    assert store.get("k") == b"x"
    s3fs.S3FileSystem.clear_instance_cache()


def test_large_objects_go_up_in_parts(s3_stub: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_obstore, "SPLIT", 8 * 2**20)
    monkeypatch.setattr(_obstore, "PART", 5 * 2**20)
    store = stub_store(s3_stub)
    data = os.urandom(2**20)
    store.put("small", [data] * 7)
    assert [request.method for request in s3_stub.requests] == ["PUT"]
    s3_stub.requests.clear()
    store.put("big", [data] * 13)
    parts = [int(r.headers["content-length"]) for r in s3_stub.requests if "partNumber" in r.target]
    # All but the last have one size, as Cloudflare R2 requires.
    assert sorted(parts) == [3 * 2**20, 5 * 2**20, 5 * 2**20]
    assert store.get("big") == data * 13
