"""A single process begins its attempt while it makes its first chunks: the order of puts, and the errors raised."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.s3_stub import S3Stub

import zarrckpt
from zarrckpt._commit import attempts, chunks
from zarrckpt._jobs import in_thread
from zarrckpt.testing import FAIL, Call, Fault, FaultyStore

STATE = {"weights": {f"w{number}": torch.arange(1000.0) + number for number in range(4)}, "step": 7}


def is_marker(key: str) -> bool:
    return key.startswith("@zarrckpt/") and key.count("/") == 2 and key.endswith("/zarr.json")


def written(stub: S3Stub, beginning: str) -> list[str]:
    """Return the keys that were put below a path, in the order of the requests."""
    targets = (request.target.partition("?")[0] for request in stub.requests if request.method == "PUT")
    return [target.partition(f"{beginning}/")[2].replace("%40", "@") for target in targets]


def test_nothing_is_put_before_the_marker(s3_stub: S3Stub) -> None:
    place = s3_stub.bucket()
    for overwrite in (False, True):
        s3_stub.requests.clear()
        zarrckpt.save(STATE, place.url("run"), storage_options=place.storage_options, overwrite=overwrite)
        keys = written(s3_stub, f"{place.bucket}/run")
        marker = next(at for at, key in enumerate(keys) if is_marker(key))
        # The first attempt's claim, put twice on a server that was not used before.
        assert set(keys[:marker]) == (set() if overwrite else {"@zarrckpt/zarr.json"})
        assert sum("/c." in key or "/c/" in key for key in keys[marker:]) >= 4
        # The root may follow a try of the server's conditional puts.
        assert keys[-1] == "zarr.json"


def test_chunks_are_made_before_the_attempt_has_begun(s3_stub: S3Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    place, made = s3_stub.bucket(), threading.Event()
    begin, new_encoder = attempts.begin, chunks.ChunkEncoder

    def late(*args: Any, **kwargs: Any) -> attempts.Attempt:
        assert made.wait(60)
        return begin(*args, **kwargs)

    def making(*args: Any) -> Any:
        made.set()
        return new_encoder(*args)

    monkeypatch.setattr(attempts, "begin", late)
    monkeypatch.setattr(chunks, "ChunkEncoder", making)
    zarrckpt.save(STATE, place.url("run"), storage_options=place.storage_options)
    found = zarrckpt.open(place.url("run"), storage_options=place.storage_options)
    assert found["weights.w3"][:].tolist() == [number + 3.0 for number in range(1000)]


def test_a_save_of_values_alone_waits_for_the_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = attempts.begin

    def late(*args: Any, **kwargs: Any) -> attempts.Attempt:
        threading.Event().wait(0.3)
        return begin(*args, **kwargs)

    monkeypatch.setattr(attempts, "begin", late)
    # No folder above it exists, and no chunk waits for one.
    zarrckpt.save({"step": 7}, tmp_path / "runs" / "one" / "step-7")
    assert zarrckpt.open(tmp_path / "runs" / "one" / "step-7")["step"] == 7


def test_a_checkpoint_that_exists_stops_a_save_before_its_first_put(s3_stub: S3Stub) -> None:
    place = s3_stub.bucket()
    zarrckpt.save(STATE, place.url("run"), storage_options=place.storage_options)
    s3_stub.requests.clear()
    with pytest.raises(zarrckpt.CheckpointExistsError):
        zarrckpt.save(STATE, place.url("run"), storage_options=place.storage_options)
    assert {request.method for request in s3_stub.requests} == {"GET"}


def test_a_marker_that_fails_is_no_lost_race(tmp_path: Path) -> None:
    def rule(call: Call) -> Fault | None:
        return FAIL if call.verb == "put" and is_marker(call.key) else None

    zarrckpt.save(STATE, tmp_path / "run")
    store = FaultyStore(tmp_path / "run", rule)
    with pytest.raises(zarrckpt.StorageError) as raised:
        zarrckpt.save({**STATE, "step": 8}, store, overwrite=True)
    assert not isinstance(raised.value, zarrckpt.CheckpointExistsError)
    assert all(is_marker(call.key) for call in store.calls if call.verb == "put")
    assert zarrckpt.open(tmp_path / "run")["step"] == 7


def test_a_value_that_cannot_be_saved_waits_for_the_begin(s3_stub: S3Stub) -> None:
    place = s3_stub.bucket()
    for _ in range(2):
        with pytest.raises(zarrckpt.UnsupportedValueError):
            zarrckpt.save({**STATE, "bad": lambda: 0}, place.url("run"), storage_options=place.storage_options)
        asked = len(s3_stub.requests)
        threading.Event().wait(0.2)
        # No request is made after the call has ended.
        assert len(s3_stub.requests) == asked


def test_a_call_beside_where_the_system_has_no_more_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with in_thread(lambda: 7) as result:
        assert result() == 7
