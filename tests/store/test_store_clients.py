"""Clients of a bucket: stores share them, one after the other, except if they must not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from harness.internals import Store, open_store
from harness.s3_server import S3Server
from harness.store_servers import S3Place

from zarrckpt import StorageError


def signer(stub: S3Server) -> str:
    """Return the key that signed the last request."""
    return stub.requests[-1].headers["authorization"].partition("Credential=")[2].partition("/")[0]


def at(place: S3Place, path: str, **options: Any) -> Store:
    return open_store(place.url(path), storage_options={**place.storage_options, **options})


def test_the_next_store_of_a_bucket_uses_the_connections_of_the_last_one(s3_stub: S3Server) -> None:
    place = s3_stub.bucket()
    for number in range(9):
        store = at(place, f"run/step-{number}")
        store.put("k", [b"x"])
        assert store.get("k") == b"x"
    # Another connection if the one of the last answer is still in use.
    assert s3_stub.connections <= 3
    assert sorted(s3_stub.objects) == [f"{place.bucket}/run/step-{number}/k" for number in range(9)]


@pytest.mark.parametrize(
    "other",
    [
        {"key": "somebody"},
        {"secret": "another"},
        {"token": "t"},
        {"region": "eu-north-1"},
        {"client_options": {"default_headers": {"x-team": "b"}}},
        {"retry_config": {"max_retries": 1}},
    ],
    ids=lambda options: next(iter(options)),
)
def test_other_settings_get_clients_of_their_own(other: dict[str, Any], s3_stub: S3Server) -> None:
    place = s3_stub.bucket()
    at(place, "run").put("k", [b"x"])
    before = s3_stub.requests[-1].headers
    at(place, "run", **other).put("k", [b"x"])
    after = s3_stub.requests[-1].headers
    assert s3_stub.connections == 2
    at(place, "run").put("k", [b"x"])
    assert signer(s3_stub) == "test"
    if "key" in other:
        assert "Credential=somebody/" in after["authorization"]
    if "client_options" in other:
        assert "x-team" not in before and after["x-team"] == "b"


def test_keys_that_change_in_the_environment(s3_stub: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    place = s3_stub.bucket()
    for name, value in place.environment.items():
        monkeypatch.setenv(name, value)
    open_store(place.url("run")).put("k", [b"x"])
    assert signer(s3_stub) == "test"
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "rotated")
    open_store(place.url("run")).put("k", [b"x"])
    assert signer(s3_stub) == "rotated"
    monkeypatch.setenv("AWS_SESSION_TOKEN", "short-lived")
    open_store(place.url("run")).put("k", [b"x"])
    assert s3_stub.requests[-1].headers["x-amz-security-token"] == "short-lived"


def test_a_profile_that_was_changed_counts_for_the_next_store(
    s3_stub: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "config"
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    for key in ("first", "second"):
        config.write_text(
            f"[profile p]\nregion = eu-north-1\naws_access_key_id = {key}\n"
            f"aws_secret_access_key = s\nendpoint_url = {s3_stub.endpoint}\n"
        )
        open_store("s3://bucket/run", storage_options={"profile": "p"}).put("k", [b"x"])
        assert signer(s3_stub) == key


def test_a_provider_is_asked_by_every_store(s3_stub: S3Server) -> None:
    asked: list[int] = []

    def provider() -> dict[str, Any]:
        asked.append(1)
        # Like keys that expire at an unknown time.
        return {"access_key_id": f"key-{len(asked)}", "secret_access_key": "s", "token": None, "expires_at": None}

    options = {"endpoint_url": s3_stub.endpoint}
    for number in (1, 2):
        open_store("s3://bucket/run", storage_options={**options, "credential_provider": provider}).put("k", [b"x"])
        assert signer(s3_stub) == f"key-{number}"


def test_a_store_sees_nothing_of_its_neighbours(s3_stub: S3Server) -> None:
    place = s3_stub.bucket()
    for path in ("run", "run-2", "run/inner", "other", ""):
        at(place, path).put("zarr.json", [b"{}"])
    store = at(place, "run")
    assert sorted(info.key for info in store.list()) == ["inner/zarr.json", "zarr.json"]
    assert [info.key for info in store.list("inner")] == ["inner/zarr.json"]
    assert store.list_dir() == (["zarr.json"], ["inner"])
    assert at(place, "").list_dir() == (["zarr.json"], ["other", "run", "run-2"])
    store.delete(["zarr.json", "inner/zarr.json"])
    assert sorted(s3_stub.objects) == [f"{place.bucket}/{key}/zarr.json" for key in ("other", "run-2")] + [
        f"{place.bucket}/zarr.json"
    ]


@pytest.mark.parametrize("path", ["a//b", "a/../b", "./a", "a/..", "a\nb", "a\x7f"])
def test_paths_that_obstore_refuses_are_storage_errors(path: str) -> None:
    with pytest.raises(StorageError):
        open_store(f"s3://bucket/{path}", storage_options={"anon": True})
