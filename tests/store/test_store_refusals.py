"""Errors that name what is missing: credentials, an account, a permission, a proxy, inodes."""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness.internals import open_store
from harness.s3_server import Answer, Request, S3Server, xml
from harness.store_servers import free_port

import zarrckpt
from zarrckpt import StorageError

NO_ACCESS = "<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"


class ReadOnlyKeys(S3Server):
    """A server that refuses one kind of request as Amazon does: deletions of several objects inside a 200."""

    denied = ""
    text = NO_ACCESS
    inside = False

    def answer(self, request: Request, body: memoryview) -> Answer:
        if request.kind != self.denied:
            return super().answer(request, body)
        if self.inside:
            return xml(f"<DeleteResult>{self.text.replace('<Code>', '<Key>run/k</Key><Code>')}</DeleteResult>")
        return xml(self.text, 403)


@pytest.fixture
def server() -> Iterator[ReadOnlyKeys]:
    with ReadOnlyKeys() as stub:
        yield stub


@pytest.mark.parametrize("backend", ["obstore", "fsspec"])
@pytest.mark.parametrize(
    ("kind", "permission", "request_of"),
    [
        ("get", "s3:GetObject", lambda store: store.get("k")),
        ("head", "s3:GetObject", lambda store: store.size("k")),
        ("list", "s3:ListBucket", lambda store: store.list_dir()),
        ("put", "s3:PutObject", lambda store: store.put("k", [b"x"])),
        ("put", "s3:PutObject", lambda store: store.create("new", b"x")),
        ("delete", "s3:DeleteObject", lambda store: store.delete(["k"])),
    ],
    ids=["get", "head", "list", "put", "create", "delete"],
)
def test_a_refusal_names_the_permission(
    kind: str, permission: str, request_of: Callable[[Any], Any], backend: str, server: ReadOnlyKeys
) -> None:
    place = server.bucket()
    options = place.storage_options if backend == "obstore" else place.fsspec_options
    store = open_store(place.url("run"), storage_options=options)
    store.put("k", [b"x"])
    bulk = kind == "delete" and backend == "obstore"
    for server.inside in (False, True) if bulk else (False,):
        server.denied = "bulk" if bulk else kind
        with pytest.raises(StorageError, match=rf"permission {permission}\b") as caught:
            request_of(store)
        assert "endpoint" not in str(caught.value).partition(permission)[2]


@pytest.mark.parametrize(
    ("url", "text", "permission"),
    [
        ("s3://b/run", "is not authorized to perform: kms:Decrypt on resource", "kms:Decrypt"),
        ("gs://b/run", "does not have storage.objects.get access to the object", r"storage\.objects\.get"),
        ("gs://b/run", "Forbidden", r"storage\.objects\.get"),
        ("az://b@account.blob.core.windows.net/run", "", r"Microsoft\.Storage/\S+/blobs/read"),
    ],
)
def test_the_permission_has_the_providers_name(url: str, text: str, permission: str, s3_stub: S3Server) -> None:
    s3_stub.faults.refusal = f"<Error><Code>AccessDenied</Code><Message>User: x {text}</Message></Error>"
    own = {"s3": {"key": "a", "secret": "b", "region": "r"}, "gs": {"bearer_token": "t"}, "az": {"account_key": "YWJj"}}
    options = {"endpoint_url": s3_stub.endpoint, **own[url[:2]]}
    with pytest.raises(StorageError, match=f"need the permission {permission}[: ]"):
        zarrckpt.open(url, storage_options=options)


def test_a_cloud_without_credentials_fails_within_seconds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [*os.environ]:
        if name.startswith(("GOOGLE_", "AZURE_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("GCE_METADATA_HOST", f"127.0.0.1:{silent.getsockname()[1]}")
        began = time.monotonic()
        with pytest.raises(StorageError, match=r"no credentials for gs://b.*GOOGLE_APPLICATION_CREDENTIALS.*anon"):
            zarrckpt.latest("gs://b/run")
    assert time.monotonic() - began < 10  # 3 s without other load


@pytest.mark.parametrize("status", [403, 404])
def test_a_machine_without_an_account_is_named(
    status: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, s3_stub: S3Server
) -> None:
    s3_stub.faults.refusal, s3_stub.faults.refusal_status = "no account", status
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("GCE_METADATA_HOST", s3_stub.endpoint.removeprefix("http://"))
    began = time.monotonic()
    with pytest.raises(StorageError, match=r"own account gives no credentials.*storage_options=.*'token'"):
        zarrckpt.latest("gs://b/run")
    assert time.monotonic() - began < 10


def test_azure_without_an_account_names_both_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        StorageError, match=r"(?s)no storage account.*'account_name'.*AZURE_STORAGE_ACCOUNT_NAME"
    ) as found:
        zarrckpt.open("az://container/run")
    assert "'account_key'" in str(found.value) and "AZURE_STORAGE_SAS_TOKEN" in str(found.value)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "YWJj")
    with pytest.raises(StorageError, match="no storage account") as found:
        zarrckpt.open("az://container/run")
    assert "account_key" not in str(found.value)


@pytest.mark.parametrize("setting", ["HTTP_PROXY", "http_proxy", "ALL_PROXY", "proxy_url"])
def test_a_dead_proxy_is_named(setting: str, monkeypatch: pytest.MonkeyPatch, s3_stub: S3Server) -> None:
    place, options = s3_stub.bucket(), {}
    proxy = f"127.0.0.1:{free_port()}"
    if setting == "proxy_url":
        options = {"proxy_url": f"http://user:secret-word@{proxy}"}
    else:
        monkeypatch.setenv(setting, f"http://user:secret-word@{proxy}")
    state = {"w": torch.zeros(3)}
    with pytest.raises(StorageError, match=rf"through the proxy http://\S*{proxy} \(.*{setting}\)") as caught:
        zarrckpt.save(state, place.url("a"), storage_options={**place.storage_options, **options})
    assert "secret-word" not in str(caught.value)
    if setting != "proxy_url":
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        zarrckpt.save(state, place.url("a"), storage_options=place.storage_options)


def test_a_disk_without_inodes_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **options: object) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    state = {"w": torch.zeros(3)}
    monkeypatch.setattr(os, "mkdir", full)
    for free, words in ((0, "no free inodes"), (7, "disk is full")):
        found = SimpleNamespace(f_files=20, f_favail=free)
        monkeypatch.setattr(os, "statvfs", lambda path, found=found: found)
        with pytest.raises(StorageError, match=words):
            zarrckpt.save(state, tmp_path / "a")
