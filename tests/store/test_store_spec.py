"""The recipe of a store: picklable without secrets, opened once per process, new clients in forked children."""

from __future__ import annotations

import copy
import pickle
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import obstore
import pytest
import torch
import zarr
from harness.faulty_store import FaultyStore
from harness.forks import in_forked_child
from harness.internals import StoreSpec, open_store
from harness.s3_server import S3Server
from harness.store_servers import S3Place
from hypothesis import given, settings
from hypothesis import strategies as st

import zarrckpt
from zarrckpt import StorageError

SECRET = "hunter2-very-secret"


SECRET_OPTIONS: list[dict[str, Any]] = [
    {"key": SECRET, "secret": SECRET, "token": SECRET},
    {"access_key_id": SECRET, "secret_access_key": SECRET, "session_token": SECRET},
    {"aws_secret_access_key": SECRET, "AWS_SESSION_TOKEN": SECRET},
    {"client_kwargs": {"aws_secret_access_key": SECRET, "aws_access_key_id": SECRET}},
    {"s3_additional_kwargs": {"SSECustomerKey": SECRET.encode(), "SSECustomerAlgorithm": "AES256"}},
    {"client_options": {"default_headers": {"Authorization": f"Bearer {SECRET}"}}},
    {"client_options": {"proxy_url": f"http://user:{SECRET}@proxy:3128"}},
    {"account_key": SECRET, "sas_token": f"sv=1&sig={SECRET}", "connection_string": f"AccountKey={SECRET}"},
    {"token": {"private_key": SECRET, "client_email": "x@y"}},
    {"password": SECRET, "passwd": SECRET, "client_secret": SECRET},
    {"credential": SECRET, "credentials": [SECRET]},
]


@pytest.mark.parametrize("options", SECRET_OPTIONS, ids=lambda options: next(iter(options)))
def test_neither_pickle_nor_repr_contains_a_secret(options: dict[str, Any]) -> None:
    spec = StoreSpec("s3://bucket/run", storage_options=options)
    for text in (pickle.dumps(spec), repr(spec).encode(), str(spec).encode(), pickle.dumps({"a": [spec]})):
        assert SECRET.encode() not in text
    with pytest.raises(StorageError, match=r"secrets are not pickled.*environment") as caught:
        pickle.loads(pickle.dumps(spec)).open()
    assert SECRET not in str(caught.value)


NAMES = (
    "token access_token api_key apikey X-Api-Key X-Auth Authorization Proxy-Authorization auth password client_secret"
)
NAMES += " sig X-Amz-Signature X-Goog-Credential Cookie sas access%5Ftoken"

PLACES: list[tuple[str, dict[str, Any]]] = [
    ("http://127.0.0.1:1/x?a=b&{name}={secret}", {}),
    ("http://127.0.0.1:1/x?{name}={secret}#{name}={secret}", {}),
    ("simplecache::http://127.0.0.1:1/x?{name}={secret}", {}),
    ("sftp://user:{secret}@127.0.0.1:1/x", {}),
    ("memory://x", {"client_kwargs": {"headers": {"{name}": "{secret}"}}}),
    ("memory://x", {"{name}": ["{secret}"]}),
    ("s3://bucket", {"default_headers": {"{name}": "{secret}"}}),
    ("s3://bucket", {"client_options": {"default_headers": {"{name}": b"{secret}"}}}),
    ("s3://bucket", {"proxy_url": "user:{secret}@proxy:3128"}),
    ("s3://bucket", {"proxy_url": "http://user:{secret}@proxy:3128"}),
    ("s3://bucket", {"endpoint_url": "user:{secret}@host:9000"}),
    ("s3://bucket", {"endpoint_url": "host?{name}={secret}"}),
    ("s3://bucket", {"client_options": "proxy?{name}={secret}"}),
]


def filled(item: Any, name: str, secret: str) -> Any:
    """Return the place with a name and a secret in it."""
    if isinstance(item, dict):
        return {filled(key, name, secret): filled(value, name, secret) for key, value in item.items()}
    if isinstance(item, list):
        return [filled(value, name, secret) for value in item]
    if isinstance(item, bytes):
        return filled(item.decode(), name, secret).encode()
    return item.replace("{name}", name).replace("{secret}", secret)


@settings(max_examples=200)
@given(
    st.sampled_from(PLACES),
    st.sampled_from(NAMES.split()),
    st.from_regex(r"[a-zA-Z][a-zA-Z0-9/+=._~-]{9,19}", fullmatch=True),
)
def test_no_output_shows_a_secret(place: tuple[str, dict[str, Any]], name: str, secret: str) -> None:
    url, options = filled(place[0], name, secret), filled(place[1], name, secret)
    spec = StoreSpec(url, storage_options=options)
    texts = [spec.url, str(spec), repr(spec), str(pickle.dumps(spec))]
    for one in (spec, pickle.loads(pickle.dumps(spec))):
        try:
            store = one.open()
            texts.append(store.url)
            if url.startswith("http"):
                store.get("k")
        except StorageError:
            texts.append(traceback.format_exc())
    assert not [text for text in texts if secret in text or quote(secret, safe="") in text]


def test_options_without_secrets_survive_pickling() -> None:
    options = {
        "endpoint_url": "http://host:9000",
        "client_kwargs": {"region_name": "eu-west-1"},
        "profile": "research",
        "anon": False,
        "server_side_encryption": "aws:kms",
        "sse_kms_key_id": "arn:aws:kms:eu:1:key/2",
        "s3_additional_kwargs": {"SSEKMSKeyId": "arn:aws:kms:eu:1:key/2", "BucketKeyEnabled": True},
        "web_identity_token_file": "/var/run/token",
        "token": None,
        "tags": {"team": "a"},
        "retry_config": {"max_retries": 2},
    }
    spec = StoreSpec("s3://bucket/run", storage_options=options, durable=False)
    copied = pickle.loads(pickle.dumps(spec))
    assert copied.url == "s3://bucket/run"
    assert copied._durable is False
    assert copied._options == options
    assert (
        pickle.loads(pickle.dumps(StoreSpec("gs://b", storage_options={"token": "anon"})))._options["token"] == "anon"
    )


def test_a_password_in_the_url_is_not_pickled() -> None:
    spec = StoreSpec(f"sftp://user:{SECRET}@host/run")
    data = pickle.dumps(spec)
    assert SECRET.encode() not in data
    copied = pickle.loads(data)
    assert copied.url == "sftp://***@host/run"
    with pytest.raises(StorageError, match="secrets are not pickled"):
        copied.open()


def test_copies_within_a_process_keep_everything() -> None:
    memory = zarr.storage.MemoryStore()
    zarrckpt.save({"step": 3}, memory)
    assert copy.deepcopy(zarrckpt.open(memory))["step"] == 3


class Provider:
    """A credential provider that pickles."""

    def __call__(self) -> dict[str, Any]:
        return {"access_key_id": "test", "secret_access_key": "testsecret", "token": None, "expires_at": None}


def test_a_picklable_provider_goes_along(s3_stub: S3Server) -> None:
    options = {"endpoint_url": s3_stub.endpoint, "region": "eu-west-1"}
    spec = StoreSpec("s3://bucket/run", {**options, "credential_provider": Provider()})
    store = pickle.loads(pickle.dumps(spec)).open()
    store.put("k", [b"x"])
    assert store.get("k") == b"x"
    assert "Credential=test/" in s3_stub.requests[-1].headers["authorization"]


def test_an_unpicklable_provider_is_a_storage_error() -> None:
    spec = StoreSpec("s3://bucket/run", storage_options={"credential_provider": lambda: {}})
    with pytest.raises(StorageError, match="credential_provider cannot be pickled"):
        pickle.dumps(spec)


def test_opens_lazily_and_after_pickling(tmp_path: Path) -> None:
    spec = StoreSpec(tmp_path / "run")
    copied = pickle.loads(pickle.dumps(spec))
    copied.open().put("k", [b"x"])
    assert spec.open().get("k") == b"x"
    assert not pickle.loads(pickle.dumps(copied))._opened


def test_at_and_child(tmp_path: Path) -> None:
    spec = StoreSpec(None, storage_options={"endpoint_url": "http://h"})
    assert spec.url == ""
    with pytest.raises(StorageError, match="no url"):
        spec.open()
    moved = spec.at(Path("s3://bucket/run"))
    assert moved.url == "s3://bucket/run"
    assert moved.child("step-7").url == "s3://bucket/run/step-7"
    assert moved.child("step-7")._options == {"endpoint_url": "http://h"}
    assert StoreSpec(tmp_path).child("a/b").url == str(tmp_path / "a/b")


# -- ready stores


def test_paths_inside_a_ready_store() -> None:
    memory = zarr.storage.MemoryStore()
    run = zarr.storage.StorePath(memory, "run")
    StoreSpec(zarr.storage.StorePath(memory, "run/step-1")).open().put("k", [b"x"])
    StoreSpec(memory).at("/run/step-2/").open().put("k", [b"xx"])
    StoreSpec(run).child("step-3").open().put("k", [b"xxx"])
    root = open_store(memory)
    assert {item.key: item.size for item in root.list()} == {"run/step-1/k": 1, "run/step-2/k": 2, "run/step-3/k": 3}
    assert StoreSpec(run).url == "MemoryStore/run"
    assert StoreSpec(run).at("x").open().url == "MemoryStore/run/x"
    with pytest.raises(StorageError, match="path in that store"):
        StoreSpec(memory).at("s3://bucket/run")


def test_a_local_zarr_store_becomes_a_local_path(tmp_path: Path) -> None:
    spec = StoreSpec(zarr.storage.StorePath(zarr.storage.LocalStore(tmp_path), "run"))
    assert spec.url == str(tmp_path / "run")
    spec.open().create("k", b"x")
    assert (tmp_path / "run/k").read_bytes() == b"x"
    assert pickle.loads(pickle.dumps(spec)).open().get("k") == b"x"
    assert type(spec.open()) is type(open_store(tmp_path))


def test_an_obstore_store_keeps_its_options(moto_bucket: S3Place) -> None:
    from obstore.store import S3Store

    inner = S3Store(
        moto_bucket.bucket,
        prefix="some/prefix",
        endpoint=moto_bucket.endpoint,
        access_key_id="test",
        secret_access_key=SECRET,
        region="us-east-1",
        client_options={"allow_http": True},
    )
    in_zarr = zarr.storage.StorePath(zarr.storage.ObjectStore(inner), "run")
    for spec in (StoreSpec(inner).child("run"), StoreSpec(in_zarr)):
        assert spec.url == moto_bucket.url("some/prefix/run")
        spec.open().put("k", [b"x"])
        found = moto_bucket.client().get_object(Bucket=moto_bucket.bucket, Key="some/prefix/run/k")
        assert found["Body"].read() == b"x"
        assert SECRET.encode() not in pickle.dumps(spec)
        with pytest.raises(StorageError, match="secrets are not pickled"):
            pickle.loads(pickle.dumps(spec)).open()


def test_the_endpoint_that_counts_of_an_obstore_store(s3_stub: S3Server) -> None:
    from obstore.store import S3Store

    options: dict[str, Any] = {"access_key_id": "k", "secret_access_key": "s", "client_options": {"allow_http": True}}
    endpoints = {"endpoint": "http://127.0.0.1:1", "aws_endpoint_url_s3": s3_stub.endpoint}
    open_store(S3Store("bucket", prefix="run", region="us-east-1", **endpoints, **options)).put("k", [b"x"])
    assert list(s3_stub.objects) == ["bucket/run/k"]


def test_an_fsspec_zarr_store_keeps_its_filesystem(moto_bucket: S3Place) -> None:
    ready = zarr.storage.FsspecStore.from_url(moto_bucket.url("pre fix"), storage_options=moto_bucket.s3fs_options)
    spec = StoreSpec(zarr.storage.StorePath(ready, "run"))
    store = spec.open()
    assert type(store).__name__ == "FsspecStore"
    store.create("k", b"x")
    found = moto_bucket.client().get_object(Bucket=moto_bucket.bucket, Key="pre fix/run/k")
    assert found["Body"].read() == b"x"
    assert b"testsecret" not in pickle.dumps(spec)


def test_memory_stores_cannot_be_pickled() -> None:
    memory = StoreSpec(zarr.storage.StorePath(zarr.storage.MemoryStore(), "run"))
    with pytest.raises(StorageError, match="lives in this process's memory"):
        pickle.dumps(memory)
    spec = pickle.loads(pickle.dumps(StoreSpec("memory://run")))
    spec.open().put("k", [b"x"])

    def in_child() -> None:
        with pytest.raises(StorageError, match="memory of another process"):
            spec.open()

    assert in_forked_child(in_child) == ""


def test_other_objects_are_refused(tmp_path: Path) -> None:
    wrong: Any
    for wrong in (object(), b"/tmp/run", 7, {}, zarr.storage.StorePath(FaultyStore(tmp_path), "run")):  # type: ignore[arg-type]
        with pytest.raises(StorageError, match="expected a url, a path, a zarr store"):
            StoreSpec(wrong)
    with pytest.raises(StorageError, match="belong to a url"):
        StoreSpec(zarr.storage.MemoryStore(), {"key": "x"})
    with pytest.raises(StorageError, match="through obstore"):
        StoreSpec("memory://x", storage_options={"credential_provider": Provider()}).open()
    with pytest.raises(StorageError, match="must be a callable, got a str"):
        StoreSpec("s3://bucket/run", {"credential_provider": "from_vault"})


def a_place(kind: str, folder: Path) -> Callable[[bool], Any]:
    """Return a function that makes ready stores of one place, read-only or not."""
    if kind == "local":
        return lambda read_only: zarr.storage.LocalStore(folder, read_only=read_only)
    if kind == "obstore":
        ready = obstore.store.LocalStore(folder)
        return lambda read_only: zarr.storage.ObjectStore(ready, read_only=read_only)
    if kind == "fsspec":
        return lambda read_only: zarr.storage.FsspecStore.from_url(f"memory:/{folder}", read_only=read_only)
    objects: dict[str, Any] = {}
    return lambda read_only: zarr.storage.MemoryStore(objects, read_only=read_only)


@pytest.mark.parametrize("kind", ["local", "obstore", "fsspec", "memory"])
def test_a_read_only_store_is_read_and_never_changed(kind: str, tmp_path: Path) -> None:
    place = a_place(kind, tmp_path)
    ready = place(False)
    own, there = partial(zarr.storage.StorePath, ready), partial(zarr.storage.StorePath, place(True))
    state = {"w": torch.ones(3)}
    zarrckpt.save(state, own("run"))
    zarrckpt.save(state, own("pinned"))
    pin_id = zarrckpt.pin(own("pinned"))
    before = {info.key: info.size for info in open_store(ready).list()}
    calls: list[Callable[[], Any]] = [
        lambda: zarrckpt.save(state, there("new")),
        lambda: zarrckpt.save(state, there("run"), overwrite=True),
        lambda: zarrckpt.remove(there("run")),
        lambda: zarrckpt.recover(there("run"), stopped=True),
        lambda: zarrckpt.pin(there("run")),
        lambda: zarrckpt.unpin(there("pinned"), pin_id),
        lambda: zarrckpt.copy(own("run"), there("copy")),
    ]
    for call in calls:
        with pytest.raises(StorageError):
            call()
    assert {info.key: info.size for info in open_store(ready).list()} == before
    assert zarrckpt.open(there("run"))["w"][:].tolist() == [1, 1, 1]
    assert zarrckpt.open(there("run")).verify()


# -- forked children


def test_an_object_store_raises_in_a_forked_child(moto_bucket: S3Place) -> None:
    spec = StoreSpec(moto_bucket.url("run"), storage_options=moto_bucket.storage_options)
    store = spec.open()
    store.put("k", [b"x"])
    url, options = moto_bucket.url("saved"), moto_bucket.storage_options
    zarrckpt.save({"w": torch.zeros(3)}, url, storage_options=options)
    remote = zarrckpt.open(url, storage_options=options)["w"]
    assert remote[:].tolist() == [0, 0, 0]

    for use in (
        lambda: store.get("k"),
        lambda: store.put("k", [b"y"]),
        lambda: store.list_dir(),
        lambda: spec.open(),
        lambda: spec.child("x").open(),
        lambda: remote[:],
    ):
        answer = in_forked_child(use)
        assert answer.startswith("StorageError: this process was forked"), answer
        assert "spawn" in answer
    assert store.get("k") == b"x"


def test_a_store_on_s3fs_works_in_a_forked_child(moto_bucket: S3Place) -> None:
    store = open_store(moto_bucket.url("run"), storage_options=moto_bucket.fsspec_options)
    store.put("k", [b"x"])

    def use() -> None:
        assert store.get("k") == b"x"
        store.put("from-child", [b"y"])

    assert in_forked_child(use) == ""
    assert store.get("from-child") == b"y"


def test_concurrency_bounds_useful_transfers(tmp_path: Path) -> None:
    for spec in (
        StoreSpec(tmp_path, concurrency=1),
        StoreSpec(FaultyStore(tmp_path), concurrency=1),
        StoreSpec("s3://bucket/run", storage_options={"anon": True}, concurrency=1),
    ):
        assert spec.open().useful_concurrency() == 1
