"""Hugging Face's Storage Buckets, through a stand-in for their S3 gateway: redirects, and a path in the endpoint."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import zarr
from click.testing import CliRunner
from harness.hub_gateway import NAMESPACE, HubGateway
from harness.internals import open_store
from harness.store_servers import S3Place

import zarrckpt
from zarrckpt import StorageError
from zarrckpt.cli import main

WHOLE = torch.arange(6 * 2**20, dtype=torch.float64).reshape(-1, 2)
"""48 MiB: chunks that are uploaded in parts."""


@pytest.fixture(autouse=True)
def _no_warnings() -> Iterator[None]:
    """A store whose conditional puts hold gets no "best effort" warning."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*best effort", category=UserWarning)
        yield


@pytest.mark.parametrize("e_tags", ["other", "same", "none"])
def test_conditions_hold_for_any_e_tag_of_a_redirected_read(e_tags: str, hub_gateway: HubGateway) -> None:
    hub_gateway.edge_e_tags = e_tags
    place = hub_gateway.bucket()
    store = open_store(place.url("run"), storage_options=place.storage_options)
    store.create("root", b"1")
    seen = store.get_versioned("root")
    store.replace("root", b"2", seen.version)
    store.replace("root", b"2", seen.version)  # an answer was lost: the object is already this writer's
    with pytest.raises(StorageError, match="not the version that was read"):
        store.replace("root", b"3", seen.version)
    store.delete(["root"])
    with pytest.raises(StorageError, match="not the version that was read"):
        store.replace("root", b"3", seen.version)
    assert [item.key for item in store.list()] == []


def test_an_object_changed_during_the_e_tag_request_stays(
    hub_gateway: HubGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = hub_gateway.bucket()
    store: Any = open_store(place.url("run"), storage_options=place.storage_options)
    store.create("root", b"1")
    seen = store.get_versioned("root")
    store.replace("root", b"2", seen.version)
    own_e_tag, seen = store._own_e_tag, store.get_versioned("root")

    def changed_after_the_look(key: str) -> str:
        e_tag: str = own_e_tag(key)
        store.put(key, [b"another's"])
        return e_tag

    def changed_before_it(key: str) -> str:
        store.put(key, [b"another's, too"])
        e_tag: str = own_e_tag(key)
        return e_tag

    for look in (changed_after_the_look, changed_before_it):
        monkeypatch.setattr(store, "_own_e_tag", look)
        with pytest.raises(StorageError, match="not the version that was read"):
            store.replace("root", b"3", seen.version)
        seen = store.get_versioned("root")
    assert seen.data == b"another's, too"


def test_the_gateway_works_by_options(hub_gateway: HubGateway, tmp_path: Path) -> None:
    place = hub_gateway.bucket()
    url, options = place.url("run/step-1"), place.storage_options
    state = {"w": WHOLE.clone(), "step": 1}
    zarrckpt.async_save(state, url, storage_options=options).result()
    puts = [request for request in hub_gateway.requests if request.method == "PUT"]
    assert any("partNumber" in request.target for request in puts)
    assert not [name for request in puts for name in request.headers if name.startswith(("x-amz-meta", "x-amz-tag"))]
    latest = zarrckpt.latest(place.url("run"), storage_options=options)
    assert latest == url
    checkpoint = zarrckpt.open(url, storage_options=options)
    # By plain zarr-python through s3fs. The gateway answers it without a redirect.
    checksums = dict.fromkeys(["request_checksum_calculation", "response_checksum_validation"], "when_required")
    group = zarr.open_group(url, mode="r", storage_options={**place.s3fs_options, "config_kwargs": checksums})
    assert torch.equal(torch.from_numpy(group["w"][-3:]), WHOLE[-3:])
    zarrckpt.copy(checkpoint, place.url("run/step-2"), storage_options=options)
    zarrckpt.copy(checkpoint, tmp_path / "copy")
    zarrckpt.to_safetensors(checkpoint, tmp_path / "weights")
    zarrckpt.save(state, place.url("run/step-1"), storage_options=options, overwrite=True)
    zarrckpt.remove(place.url("run/step-2"), storage_options=options)
    zarrckpt.load(target := {"w": torch.zeros_like(WHOLE), "step": 0}, url, storage_options=options)
    assert target["step"] == 1 and torch.equal(target["w"], WHOLE)
    assert {request.method for request in hub_gateway.edge.requests} == {"GET"}
    words = [part for name, value in options.items() for part in ("-o", f"{name}={json.dumps(value)}")]
    for command, where in (("ls", place.url("run")), ("info", url), ("verify", url)):
        answer = CliRunner().invoke(main, [command, where, *words])
        assert answer.exit_code == 0, answer.output


def test_the_namespace_may_be_the_bucket(hub_gateway: HubGateway) -> None:
    place = hub_gateway.bucket()
    options = {**place.storage_options, "endpoint_url": hub_gateway.endpoint}
    url = f"s3://{NAMESPACE}/{place.bucket}/run"
    zarrckpt.save({"step": 1}, url, storage_options=options)
    assert zarrckpt.open(f"{place.url('run')}", storage_options=place.storage_options)["step"] == 1
    assert zarrckpt.open(url, storage_options=options)["step"] == 1


def test_no_error_shows_the_signature_of_a_redirect(hub_gateway: HubGateway) -> None:
    place = hub_gateway.bucket()
    quick = {"retry_config": {"max_retries": 0, "retry_timeout": 5}}
    store = open_store(place.url("run"), storage_options={**place.storage_options, **quick})
    store.put("k", [os.urandom(100)])
    hub_gateway.edge.faults.refusal = "no"
    with pytest.raises(StorageError) as caught:
        store.get("k")
    assert hub_gateway.edge.signature not in f"{caught.value} {caught.value.__cause__!r}"


def test_no_name_makes_a_key_that_the_gateway_refuses(hub_bucket: S3Place) -> None:
    url, options = hub_bucket.url("run"), hub_bucket.storage_options
    state = {name: number for number, name in enumerate(["back\\slash", "ends..", "a/../b", "./x", "x//y", "/y/"])}
    zarrckpt.save({**state, "deep": {name: torch.ones(1) for name in state}}, url, storage_options=options)
    checkpoint = zarrckpt.open(url, storage_options=options)
    assert {name: checkpoint[name] for name in state} == state
    checkpoint.verify()
    with pytest.raises(StorageError, match="writing"):
        open_store(url, storage_options=options).put("back\\slash", [b"x"])
