"""S3 servers that do not list in the order of the keys, and directory buckets of S3 Express One Zone."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from harness.directory_bucket import BUCKET, DirectoryBucket
from harness.s3_server import S3Server, Strike
from harness.store_servers import make_certificate, server_context

import zarrckpt
from zarrckpt import StorageError
from zarrckpt._store import open_store

NUMBER = 3_500
"""Number of objects, more than three answers and three batches of a listing."""


@pytest.fixture
def express(tmp_path: Path) -> Iterator[DirectoryBucket]:
    make_certificate(tmp_path)
    with DirectoryBucket(server_context(tmp_path)) as server:
        yield server


def fill(stub: S3Server, bucket: str) -> set[str]:
    """Put many objects, and return their keys."""
    keys = {f"{number % 7}/{number}" for number in range(NUMBER)}
    for key in keys:
        stub.put_object(f"{bucket}/run/{key}", b"x")
    return keys


@pytest.mark.parametrize("unordered", [False, True])
@pytest.mark.parametrize("spared", [1, 3])
def test_an_interrupted_listing_is_complete(unordered: bool, spared: int, s3_stub: S3Server) -> None:
    """In another order than that of the keys, the keys after the last one are not the rest of the listing."""
    place = s3_stub.bucket()
    keys, s3_stub.faults.unordered = fill(s3_stub, place.bucket), unordered
    s3_stub.faults.strike = Strike("list", 400, "InvalidRequest", spared=spared)
    listed = [info.key for info in open_store(place.url("run"), storage_options=place.storage_options).list()]
    assert s3_stub.faults.strike is None
    assert len(listed) == len(keys) and {*listed} == keys


def test_a_listing_that_fails_again_is_an_error(s3_stub: S3Server) -> None:
    place = s3_stub.bucket()
    fill(s3_stub, place.bucket)
    listing = open_store(place.url("run"), storage_options=place.storage_options).list()
    next(listing)
    s3_stub.faults.refused["list"] = (400, "InvalidRequest")
    with pytest.raises(StorageError, match="InvalidRequest"):
        list(listing)


def test_a_run_in_a_directory_bucket(express: DirectoryBucket) -> None:
    url, options = f"s3://{BUCKET}/run", express.storage_options
    express.faults.page = 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(1, 5):
            with zarrckpt.CheckpointManager(
                url, keep=zarrckpt.Keep(newest=2), save_every=1, storage_options=options
            ) as manager:
                manager.restore({"w": torch.zeros(5)})
                manager.step(step, {"w": torch.full((5,), float(step))})
        newest = zarrckpt.latest(url, storage_options=options)
        assert newest is not None
        zarrckpt.save({"w": torch.ones(5)}, newest, overwrite=True, storage_options=options)
        target = {"w": torch.zeros(5)}
        zarrckpt.load(target, newest, storage_options=options)
        zarrckpt.open(newest, storage_options=options).verify()
        assert target["w"].tolist() == [1.0] * 5 and manager.steps() == [3, 4]
        for step in (3, 4):
            zarrckpt.remove(f"{url}/step-{step:08}", storage_options=options)
    assert [path for path in express.objects if "step-" in path] == []
    # The conditions of its puts were tested, as those of servers other than Amazon's.
    assert any("probe-" in request.path for request in express.requests)
