"""Requests to object stores that fail: repeats, aborts, the next step in the error, and settings that none can hold."""

from __future__ import annotations

import datetime
import os
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
from harness.s3_server import S3Server, Strike

import zarrckpt
from zarrckpt import StorageError
from zarrckpt._store import Store, _conditional_puts, _obstore, _obstore_client, open_store

QUICK = {"retry_config": {"max_retries": 1, "retry_timeout": 5}}


def at(stub: S3Server, **options: Any) -> Store:
    place = stub.bucket()
    return open_store(place.url("run"), storage_options={**place.storage_options, **options})


def shown_by(error: BaseException) -> str:
    """All that a traceback of the error shows."""
    return "".join(traceback.format_exception(error))


# -- repeats


PAUSES = {
    "init_backoff": datetime.timedelta(milliseconds=1),
    "max_backoff": datetime.timedelta(milliseconds=9),
    "base": 2,
}
SOON = {"retry_config": {"max_retries": 3, "retry_timeout": 20, "backoff": PAUSES}}
BIG = os.urandom(2**21)


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects of a mebibyte go up in parts, and repeats come at once."""
    monkeypatch.setattr(_obstore, "SPLIT", 2**20)
    monkeypatch.setattr(_obstore, "PART", 2**19)
    monkeypatch.setattr(_obstore_client.random, "uniform", lambda *_: 0.0)


def requests_of(store: Store) -> list[tuple[str, Callable[[], object], int]]:
    """Each kind of request, a call of the store that makes it, and the requests of the kind that come before."""

    def checked(done: object) -> None:
        assert done

    def put_big() -> None:
        store.put("new-big", [BIG[:100], BIG[100:]])
        assert store.get("new-big") == BIG

    def read_behind() -> None:
        with pytest.raises(zarrckpt.CorruptCheckpointError):
            store.read("k", 5, 3)

    def replace() -> None:
        store.replace("k", b"x", store.get_versioned("k").version)
        assert store.get("k") == b"x"

    return [
        ("get", lambda: checked(store.get("k") == b"x"), 0),
        ("get", lambda: checked(store.get_versioned("k").data == b"x"), 0),
        ("get", lambda: checked(bytes(store.read("big", 3, 20)) == BIG[3:23]), 0),
        ("get", lambda: checked(bytes(store.read("big", 3, 2**19)) == BIG[3 : 2**19 + 3]), 0),
        ("head", read_behind, 0),
        ("put", lambda: store.put("k", [b"x"]), 0),
        ("put", lambda: store.create(f"new-{time.monotonic_ns()}", b"x"), 0),
        ("put", replace, 0),
        ("begin", put_big, 0),
        ("part", put_big, 0),
        ("part", put_big, 3),
        ("end", put_big, 0),
        ("bulk", lambda: store.delete(["a", "b"]), 0),
        *(
            ("list", call, spared)
            for spared in (0, 2)
            for call in (
                lambda: checked(len([*store.list("l")]) == 25),
                lambda: checked(len(store.list_dir("l")[0]) == 25),
            )
        ),
    ]


PASSING: list[dict[str, Any]] = [
    {"status": 400, "code": "RequestTimeout"},
    {"status": 400, "code": "IncompleteBody"},
    {"status": 400, "code": "ThrottlingException"},
    {"status": 403, "code": "RequestTimeTooSkewed"},
    {"status": 409, "code": "OperationAborted"},
    {"status": 409, "code": "ConditionalRequestConflict"},
    {"sent": 0.0},
    {"sent": 0.2},
    {"sent": 0.9},
]


@pytest.mark.parametrize("first", [False, True], ids=["later", "first"])
@pytest.mark.parametrize("fault", PASSING, ids=str)
def test_each_request_survives_a_failure_that_passes(
    fault: dict[str, Any], first: bool, parts: None, s3_stub: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the first request of a process, and the first ones with a condition."""
    monkeypatch.setattr(_obstore_client, "_answered", set())
    s3_stub.faults.page = 10
    place = s3_stub.bucket()

    def opened() -> Store:
        options = {} if first else SOON
        return open_store(place.url("run"), storage_options={**place.storage_options, **options})

    store = opened()
    for name in [f"l/{number:02}" for number in range(25)] + ["k"]:
        store.put(name, [b"x"])
    store.put("big", [BIG])
    for index, (kind, _, spared) in enumerate(requests_of(store)):
        if first:
            _obstore_client._answered.clear()
            monkeypatch.setattr(_conditional_puts, "_known_support", {})
            store = opened()
        s3_stub.faults.strike = Strike(kind, spared=spared, **fault)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            requests_of(store)[index][1]()
        assert s3_stub.faults.strike is None, kind


def test_a_lost_answer_to_the_probe_is_no_verdict(s3_stub: S3Server) -> None:
    store = at(s3_stub, **SOON)
    store.create("root", b"1")
    s3_stub.faults.strike = Strike("put", spared=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        store.replace("root", b"2", store.get_versioned("root").version)
    assert s3_stub.faults.strike is None and store.get("root") == b"2"


def test_a_repeat_is_signed_anew(s3_stub: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    store = at(s3_stub)
    store.put("first", [b"x"])
    s3_stub.requests.clear()
    monkeypatch.setattr(_obstore_client.random, "uniform", lambda *_: 1.1)
    s3_stub.faults.strike = Strike("put", 403, "RequestTimeTooSkewed")
    store.put("k", [b"x"])
    for name in ("x-amz-date", "authorization"):
        assert len({request.headers[name] for request in s3_stub.requests}) == 2


# -- aborts


@pytest.mark.parametrize("retries", [0, 3])
@pytest.mark.parametrize("abort", [(404, "NoSuchUpload"), (503, "AbortBusy"), None])
@pytest.mark.parametrize("part", [(400, "PartRefused"), (503, "PartBusy")])
def test_an_abort_never_replaces_its_reason(
    part: tuple[int, str], abort: tuple[int, str] | None, retries: int, parts: None, s3_stub: S3Server
) -> None:
    store = at(s3_stub, retry_config={**SOON["retry_config"], "max_retries": retries})
    s3_stub.faults.refused = {"part": part, "put": part, **({"abort": abort} if abort else {})}
    with pytest.raises(StorageError, match=part[1]) as caught:
        store.put("k", [BIG])
    assert not any(word in str(caught.value) for word in ("NoSuchUpload", "Abort"))
    assert len(s3_stub.requests) <= (1 + retries) * 5 * 4


def test_an_upload_whose_abort_fails_is_one_request(parts: None, s3_stub: S3Server) -> None:
    store = at(s3_stub, **SOON)
    s3_stub.faults.refused = {"part": (400, "PartRefused"), "abort": (404, "NoSuchUpload")}
    store.put("k", [BIG[:100], BIG[100:]])
    assert store.get("k") == BIG


# -- next steps


LOCKED = "Content-MD5 OR x-amz-checksum- HTTP header is required for Put Object requests with Object Lock parameters"
MOVED = "the region 'us-east-1' is wrong; expecting 'eu-west-1'"
NEXT_STEPS = [
    (400, f"<Code>InvalidRequest</Code><Message>{LOCKED}</Message>", "'checksum_algorithm': 'SHA256'"),
    (403, "<Code>RequestTimeTooSkewed</Code>", "set the clock"),
    (403, "<Code>QuotaExceeded</Code>", "quota.*remove old checkpoints"),
    (507, "", "quota.*remove old checkpoints"),
    (403, "<Code>InvalidObjectState</Code>", "archived.*restore"),
    (400, "<Code>ExpiredToken</Code>", "credentials.*expired"),
    (403, "<Code>InvalidToken</Code>", "credentials.*expired"),
    (400, f"<Code>AuthorizationHeaderMalformed</Code><Message>{MOVED}</Message>", "'region': 'eu-west-1'"),
    (400, "<Code>AuthorizationHeaderMalformed</Code><Region>eu-west-1</Region>", "'region': 'eu-west-1'"),
    # Without a Location, as S3 sends it.
    (301, "<Code>PermanentRedirect</Code>", "bucket is in another region"),
]


@pytest.mark.parametrize(("status", "words", "step"), NEXT_STEPS)
def test_each_code_has_a_next_step(status: int, words: str, step: str, s3_stub: S3Server) -> None:
    s3_stub.faults.refusal_status, s3_stub.faults.refusal = status, f"<Error>{words}</Error>"
    place = s3_stub.bucket()
    where: dict[str, Any] = {"storage_options": {**place.storage_options, **QUICK}}
    calls: list[Callable[[], object]] = [
        lambda: zarrckpt.save({"w": torch.ones(3)}, place.url("run"), **where),
        lambda: zarrckpt.open(place.url("run"), **where),
        lambda: zarrckpt.latest(place.url("runs"), **where),
        lambda: zarrckpt.remove(place.url("run"), **where),
    ]
    for call in calls:
        with pytest.raises(StorageError, match=step):
            call()


# -- settings


BAD_TEXTS = [
    "a\nb",
    "a\n",
    "a b",
    "\x00",
    "\x7f",
    "é",
    "",
    "/",
    "%zz",
    "http://h:x",
    "::",
    "\\",
    '"',
    "-1",
    "a" * 70000,
]
SENT_SETTINGS = {
    "s3": (
        "key secret token region endpoint_url proxy_url user_agent default_content_type storage_class sse_kms_key_id "
        "server_side_encryption default_headers header tags tag provider bucket virtual_host path"
    ),
    "gs": "bearer_token endpoint_url storage_class default_headers bucket path",
    "az": "account_name account_key token sas_token endpoint_url msi_endpoint storage_class account bucket path",
}


@pytest.mark.parametrize(
    ("cloud", "name"), [(cloud, name) for cloud in SENT_SETTINGS for name in SENT_SETTINGS[cloud].split()]
)
def test_no_setting_ends_with_a_panic(cloud: str, name: str, s3_stub: S3Server) -> None:
    """A panic of obstore is no Exception: what cannot be sent is an error of this package."""
    base: dict[str, dict[str, Any]] = {
        "s3": {"key": "k", "secret": "s", "region": "r"},
        "gs": {"bearer_token": "t"},
        "az": {"account_name": "a", "account_key": "a2V5"},
    }
    signs_in = ("token", "sas_token", "msi_endpoint") if cloud == "az" else ("provider",)
    for text in BAD_TEXTS:
        given = {} if name in signs_in else dict(base[cloud])
        if name in signs_in and cloud == "az":
            given["account_name"] = "a"
        options = {"endpoint_url": s3_stub.endpoint, "timeout": 2, **given}
        options |= {"retry_config": {"max_retries": 0, "retry_timeout": 2}}
        url = f"{cloud}://bucket/run"
        match name:
            case "bucket" | "virtual_host":
                url = f"{cloud}://{text}/run"
                options |= {} if name == "bucket" else {"virtual_hosted_style_request": True}
            case "account":
                del options["account_name"]
                url = f"az://container@{text}.dfs.core.windows.net/run"
            case "path":
                url += f"/{text}"
            case "default_headers" | "tags":
                options[name] = {"x-name": text}
            case "header" | "tag":
                options |= {"default_headers" if name == "header" else "tags": {text: "x"}}
            case "provider":
                found = {"access_key_id": text, "secret_access_key": "s", "token": text, "expires_at": None}
                options["credential_provider"] = lambda found=found: found
            case _:
                options[name] = text
        with suppress(zarrckpt.CheckpointError):
            store = open_store(url, storage_options=options)
            for call in (partial(store.put, "k", [b"x"]), partial(store.get, "k"), store.list_dir):
                with suppress(zarrckpt.CheckpointError):
                    call()


@pytest.mark.parametrize("option", ["token", "region", "storage_class", "default_headers"])
def test_a_control_character_is_named_with_its_option(option: str) -> None:
    value: Any = {"x-name": "secret-value\n"} if option == "default_headers" else "secret-value\n"
    with pytest.raises(StorageError, match=rf"option {option}.*control character .* 12") as caught:
        zarrckpt.open("s3://b/x", storage_options={"key": "x", "secret": "x", option: value})
    assert "secret-value" not in shown_by(caught.value)


@pytest.mark.parametrize(
    "endpoint", ["http://h:99999", "http://h:x", "http://h :80", "http://h\n", "http://[::1", "ftp://h"]
)
def test_an_invalid_endpoint_is_an_error(endpoint: str) -> None:
    with pytest.raises(StorageError, match="endpoint"):
        open_store("s3://bucket/run", storage_options={"endpoint_url": endpoint, "key": "k", "secret": "s"})
