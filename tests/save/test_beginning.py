"""The begin of an attempt: the order of puts, and the errors raised."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from harness.faulty_store import FAIL, Call, Fault, FaultyStore
from harness.internals import in_thread
from harness.s3_server import S3Server

import zarrckpt

STATE = {"weights": {f"w{number}": torch.arange(1000.0) + number for number in range(4)}, "step": 7}


def is_marker(key: str) -> bool:
    return key.startswith("@zarrckpt/") and key.count("/") == 2 and key.endswith("/zarr.json")


def written(stub: S3Server, beginning: str) -> list[str]:
    """Return the keys that were put below a path, in the order of the requests."""
    targets = (request.target.partition("?")[0] for request in stub.requests if request.method == "PUT")
    return [target.partition(f"{beginning}/")[2].replace("%40", "@") for target in targets]


def test_nothing_is_put_before_the_marker(s3_stub: S3Server) -> None:
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


def test_a_checkpoint_that_exists_stops_a_save_before_its_first_put(s3_stub: S3Server) -> None:
    place = s3_stub.bucket()
    zarrckpt.save(STATE, place.url("run"), storage_options=place.storage_options)
    s3_stub.requests.clear()
    with pytest.raises(zarrckpt.CheckpointExistsError):
        zarrckpt.save(STATE, place.url("run"), storage_options=place.storage_options)
    assert {request.method for request in s3_stub.requests} == {"GET"}


def test_a_failed_marker_is_not_a_lost_race(tmp_path: Path) -> None:
    def rule(call: Call) -> Fault | None:
        return FAIL if call.verb == "put" and is_marker(call.key) else None

    zarrckpt.save(STATE, tmp_path / "run")
    store = FaultyStore(tmp_path / "run", rule)
    with pytest.raises(zarrckpt.StorageError) as raised:
        zarrckpt.save({**STATE, "step": 8}, store, overwrite=True)
    assert not isinstance(raised.value, zarrckpt.CheckpointExistsError)
    assert all(is_marker(call.key) for call in store.calls if call.verb == "put")
    assert zarrckpt.open(tmp_path / "run")["step"] == 7


def test_in_thread_works_without_a_free_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with in_thread(lambda: 7) as result:
        assert result() == 7
