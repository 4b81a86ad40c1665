"""Urls and paths: never mangled, understood or refused with a reason."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import zarr

from zarrckpt._errors import StorageError
from zarrckpt._store import StoreSpec, join_url, open_store
from zarrckpt._store._url import Place, normalize, parse


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("s3://bucket/run/step-7", "s3://bucket/run/step-7"),
        ("s3://bucket/run/step-7//", "s3://bucket/run/step-7"),
        (Path("s3://bucket/run"), "s3://bucket/run"),
        (str(Path("gs://bucket/run")), "gs://bucket/run"),
        (Path("az://container/run"), "az://container/run"),
        (Path("abfss://c@account.dfs.core.windows.net/run"), "abfss://c@account.dfs.core.windows.net/run"),
        (Path("memory://run"), "memory://run"),
        (Path("sftp://host/run"), "sftp://host/run"),
        (Path("file:///tmp/run"), "/tmp/run"),
        ("file:///tmp/a%20b", "/tmp/a b"),
        (Path("/tmp/a b").as_uri(), "/tmp/a b"),
        ("file://localhost/tmp/run", "/tmp/run"),
        ("file:/tmp/run", "/tmp/run"),
        ("local:///tmp/run", "/tmp/run"),
        ("/tmp/run/", "/tmp/run"),
        ("/tmp/x/../run", "/tmp/run"),
        ("/tmp/per%20cent", "/tmp/per%20cent"),
        ("memory://", "memory://"),
        ("simplecache::s3://bucket/run", "simplecache::s3://bucket/run"),
    ],
)
def test_normalizes(typed: str | Path, expected: str) -> None:
    assert normalize(typed) == expected


def test_a_colon_is_no_protocol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert normalize("run:1/step") == str(tmp_path / "run:1/step")
    assert normalize("step:/x") == str(tmp_path / "step:/x")


@pytest.mark.parametrize(
    ("base", "name", "expected"),
    [
        ("s3://bucket", "run", "s3://bucket/run"),
        ("s3://bucket/", "run/step-7", "s3://bucket/run/step-7"),
        (Path("s3://bucket/run"), "step-7", "s3://bucket/run/step-7"),
        ("s3://bucket/a b#%", "c", "s3://bucket/a b#%/c"),
        ("/", "run", "/run"),
        ("/tmp", "a/b/", "/tmp/a/b"),
        ("/tmp", "", "/tmp"),
        (Path("/tmp"), "run", "/tmp/run"),
        ("memory://", "run", "memory://run"),
        ("memory://run", "x", "memory://run/x"),
        ("file:///tmp", "x", "/tmp/x"),
    ],
)
def test_joins(base: str | Path, name: str, expected: str) -> None:
    assert join_url(base, name) == expected


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("s3://bucket/a//b/", Place("s3", "s3://bucket/a//b", "bucket", "a//b")),
        ("s3a://bucket", Place("s3", "s3a://bucket", "bucket", "")),
        ("gcs://bucket/x", Place("gs", "gcs://bucket/x", "bucket", "x")),
        ("az://container/x", Place("az", "az://container/x", "container", "x")),
        (
            "abfss://c@acc.dfs.core.windows.net/x",
            Place("az", "abfss://c@acc.dfs.core.windows.net/x", "c", "x", "acc"),
        ),
        ("sftp://host/x", Place("fsspec", "sftp://host/x")),
        ("/tmp", Place("local", "/tmp", path="/tmp")),
    ],
)
def test_parses(typed: str, expected: Place) -> None:
    assert parse(typed) == expected


@pytest.mark.parametrize(
    ("typed", "reason"),
    [
        ("", "empty"),
        ("s3://", "names no bucket"),
        ("s3:///run", "names no bucket"),
        ("file://tmp/run", "three slashes"),
        (b"/tmp", "not bytes"),
        (7, "not int"),
    ],
)
def test_refuses(typed: str, reason: str) -> None:
    with pytest.raises(StorageError, match=reason):
        parse(typed)


@pytest.mark.parametrize("text", ["/tmp/a\0b", "/tmp/\ud800", "s3://b/\ud800", "memory://x\0y", "file:///tmp/a%00b"])
def test_text_that_names_nothing_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(StorageError):
        StoreSpec(text)
    with pytest.raises(StorageError):
        StoreSpec(zarr.storage.LocalStore(tmp_path)).at(text.rpartition("/")[2].replace("%00", "\0"))


def test_a_path_may_have_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = os.fsdecode(bytes(tmp_path) + b"/\xff")
    open_store(path).put("k", [b"x"])
    assert os.listdir(path) == ["k"]


@pytest.mark.parametrize(
    "options", [{5: 1}, "abc", [1], 7, {"client_options": {5: 1}}, {"tags": {5: [1]}, "x": {5: 1}}]
)
def test_options_that_are_no_table_of_names(options: Any) -> None:
    with pytest.raises(StorageError):
        open_store("s3://bucket", storage_options=options)


def test_bytes_paths_are_refused() -> None:
    class BytesPath(os.PathLike):  # type: ignore[type-arg]
        def __fspath__(self) -> bytes:
            return b"/tmp"

    with pytest.raises(StorageError, match="fsdecode"):
        parse(BytesPath())  # type: ignore[arg-type]


def test_credentials_in_a_bucket_url_are_refused_without_being_shown() -> None:
    for secret in ("hunter2secret", "hunter2/secret", "9hunter/2/secret"):
        with pytest.raises(StorageError, match="storage_options") as caught:
            open_store(f"s3://AKIAKEY:{secret}@bucket/run")
        assert "hunter" not in str(caught.value) and "secret" not in str(caught.value)
    with pytest.raises(StorageError, match="three slashes") as caught:
        open_store("file://user:hunter2secret@host/run")
    assert "hunter2secret" not in str(caught.value)


def test_a_port_is_no_password() -> None:
    assert StoreSpec("sftp://host:22/run@noon").url == "sftp://host:22/run@noon"


def test_a_password_in_a_url_is_never_shown() -> None:
    spec = StoreSpec("sftp://user:hunter2secret@host/run")
    assert (
        "hunter2secret" not in spec.url + repr(spec) + repr(spec.child("x")) + spec.at("sftp://u:hunter2secret@h/").url
    )


def test_an_unknown_protocol_is_an_error() -> None:
    with pytest.raises(StorageError, match="nosuch://x/y"):
        open_store("nosuch://x/y")


@pytest.mark.parametrize("url", ["s3://bucket", "memory://x", "/tmp/x"])
def test_a_backend_that_is_none_is_refused(url: str) -> None:
    for backend in ("boto", "", 7, *(["obstore"] if url != "s3://bucket" else [])):
        with pytest.raises(StorageError, match="fsspec"):
            open_store(url, storage_options={"backend": backend})


def test_local_paths_take_no_options(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="takes no storage_options"):
        open_store(tmp_path, storage_options={"key": "x"})
