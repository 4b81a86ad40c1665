"""Multipart uploads that killed saves left on S3: found by ``doctor``, removed by ``recover`` and ``remove``."""

from __future__ import annotations

import builtins
import json
from typing import Any

import boto3
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from store_servers import S3Place

import zarrckpt
from zarrckpt import testing
from zarrckpt._store import open_store
from zarrckpt.cli import main


def client_of(place: S3Place) -> Any:
    options = place.storage_options
    return boto3.client(
        "s3",
        endpoint_url=place.endpoint,
        aws_access_key_id=options["key"],
        aws_secret_access_key=options["secret"],
        region_name="us-east-1",
    )


def arguments(options: dict[str, Any]) -> list[str]:
    """The options as the command line takes them."""
    return [f"-o{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in options.items()]


def begin_upload(place: S3Place, key: str) -> None:
    """What a process leaves that is killed while an object goes up in parts."""
    client = client_of(place)
    upload = client.create_multipart_upload(Bucket=place.bucket, Key=key)["UploadId"]
    client.upload_part(Bucket=place.bucket, Key=key, UploadId=upload, PartNumber=1, Body=bytes(5 << 20))


def unfinished(place: S3Place) -> list[str]:
    found = client_of(place).list_multipart_uploads(Bucket=place.bucket)
    return sorted(item["Key"] for item in found.get("Uploads", ()))


def killed_save(place: S3Place, path: str) -> str:
    """A save that dies before its first chunk; returns the key of a chunk that it would have written."""
    options = place.storage_options
    store = testing.FaultyStore(place.url(path), testing.writes(3, testing.STOP), storage_options=options)
    with pytest.raises(testing.Stopped):
        zarrckpt.save({"w": torch.ones(4)}, store=store)
    plain = open_store(place.url(path), storage_options=options)
    marker = next(info.key for info in plain.list("@zarrckpt") if info.key.endswith("zarr.json"))
    tree = json.loads(plain.get(marker))["attributes"]["zarrckpt"]["tree"]
    return "/".join(part for part in (path, tree, "w/c.0") if part)


@pytest.mark.parametrize("bucket", ["moto_bucket", pytest.param("ceph_bucket", marks=pytest.mark.ceph)])
def test_doctor_finds_and_recover_removes_them(bucket: str, request: pytest.FixtureRequest) -> None:
    place: S3Place = request.getfixturevalue(bucket)
    options = place.storage_options
    key = killed_save(place, "run/a")
    for name in (key, "run/a-other/w/c.0", "elsewhere"):
        begin_upload(place, name)
    given = arguments(options)
    found = CliRunner().invoke(main, ["doctor", place.url("run/a"), "--json", *given])
    assert found.exit_code == 1, found.output
    report = json.loads(found.stdout)
    assert report["uploads"] == 1 and any("--stopped" in line for line in report["advice"])
    # It could still be running.
    assert zarrckpt.recover(place.url("run/a"), storage_options=options).uploads == 0
    assert key in unfinished(place)
    assert zarrckpt.recover(place.url("run/a"), stopped=True, storage_options=options).uploads == 1
    assert unfinished(place) == sorted(["run/a-other/w/c.0", "elsewhere"])


def test_those_of_saves_that_can_commit_no_more_go_by_themselves(moto_bucket: S3Place) -> None:
    options = moto_bucket.storage_options
    key = killed_save(moto_bucket, "run")
    begin_upload(moto_bucket, key)
    zarrckpt.save({"w": torch.zeros(4)}, moto_bucket.url("run"), storage_options=options)
    begin_upload(moto_bucket, "run/w/c.99")
    report = zarrckpt.recover(moto_bucket.url("run"), storage_options=options)
    assert report.uploads is not None and key not in unfinished(moto_bucket)
    assert (zarrckpt.open(moto_bucket.url("run"), storage_options=options)["w"][:] == np.zeros(4)).all()


def test_remove_takes_them_along(moto_bucket: S3Place) -> None:
    options = moto_bucket.storage_options
    zarrckpt.save({"w": torch.zeros(4)}, moto_bucket.url("run"), storage_options=options)
    begin_upload(moto_bucket, "run/@x/w/c.0")
    begin_upload(moto_bucket, "running/w/c.0")
    zarrckpt.remove(moto_bucket.url("run"), storage_options=options)
    assert unfinished(moto_bucket) == ["running/w/c.0"]


def test_without_botocore_or_the_right_they_are_not_known(
    moto_bucket: S3Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = moto_bucket.storage_options
    zarrckpt.save({"w": torch.zeros(4)}, moto_bucket.url("run"), storage_options=options)
    plain = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("botocore"):
            raise ModuleNotFoundError(name)
        return plain(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    assert zarrckpt.recover(moto_bucket.url("run"), storage_options=options).uploads is None
    given = arguments(options)
    found = CliRunner().invoke(main, ["doctor", moto_bucket.url("run"), "--json", *given])
    assert found.exit_code == 0 and json.loads(found.stdout)["uploads"] is None


def test_local_files_have_none(tmp_path: Any) -> None:
    zarrckpt.save({"w": torch.zeros(4)}, tmp_path)
    assert zarrckpt.recover(tmp_path).uploads == 0
