"""The benchmarks' own S3 server, against boto3 and zarrckpt, and a run of the benchmark command. Nothing is timed."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from botocore.config import Config
from botocore.exceptions import ClientError

import zarrckpt
from benchmarks.report import write_page
from benchmarks.results import Figure, Results, Speed
from benchmarks.s3_objects import Entry, round_trips
from benchmarks.s3_server import Served, served

ROOT = Path(__file__).parent.parent
BUCKET = "bench"

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served() as running:
        yield running


@pytest.fixture
def client(server: Served) -> Any:
    server.clear(BUCKET)
    server.reset()
    return client_of(server)


def client_of(server: Served, **options: Any) -> Any:
    import boto3

    return boto3.client(
        "s3",
        endpoint_url=server.endpoint,
        aws_access_key_id="any",
        aws_secret_access_key="any",
        region_name="us-east-1",
        config=Config(retries={"total_max_attempts": 1}, **options),
    )


def read(client: Any, key: str, **options: Any) -> bytes:
    data: bytes = client.get_object(Bucket=BUCKET, Key=key, **options)["Body"].read()
    return data


def code_of(call: Any, *args: Any, **options: Any) -> str:
    with pytest.raises(ClientError) as caught:
        call(*args, **options)
    code: str = caught.value.response["Error"]["Code"]
    return code


def test_objects_and_ranges(client: Any) -> None:
    data = bytes(range(256)) * 5000
    client.put_object(Bucket=BUCKET, Key="a/ä & b", Body=data)
    assert read(client, "a/ä & b") == data
    assert read(client, "a/ä & b", Range="bytes=7-9") == data[7:10]
    assert read(client, "a/ä & b", Range="bytes=1279990-") == data[-10:]
    assert read(client, "a/ä & b", Range="bytes=-3") == data[-3:]
    assert read(client, "a/ä & b", Range="bytes=1279990-9999999") == data[-10:]
    assert code_of(read, client, "a/ä & b", Range="bytes=1280000-") == "InvalidRange"
    head = client.head_object(Bucket=BUCKET, Key="a/ä & b")
    assert head["ContentLength"] == len(data)
    client.delete_object(Bucket=BUCKET, Key="a/ä & b")
    assert code_of(read, client, "a/ä & b") == "NoSuchKey"
    client.put_object(Bucket=BUCKET, Key="empty", Body=b"")
    assert read(client, "empty") == b""


def test_conditional_puts(client: Any) -> None:
    put = client.put_object
    first = put(Bucket=BUCKET, Key="k", Body=b"1", IfNoneMatch="*")["ETag"]
    assert code_of(put, Bucket=BUCKET, Key="k", Body=b"2", IfNoneMatch="*") == "PreconditionFailed"
    assert read(client, "k") == b"1"
    second = put(Bucket=BUCKET, Key="k", Body=b"3", IfMatch=first)["ETag"]
    assert second != first
    assert code_of(put, Bucket=BUCKET, Key="k", Body=b"4", IfMatch=first) == "PreconditionFailed"
    assert code_of(put, Bucket=BUCKET, Key="none", Body=b"4", IfMatch=first) == "NoSuchKey"
    assert read(client, "k", IfMatch=second) == b"3"
    assert code_of(read, client, "k", IfMatch=first) == "PreconditionFailed"


def test_multipart_uploads(client: Any) -> None:
    parts = [b"a" * (5 << 20), b"b" * (5 << 20), b"c" * 17]
    upload = client.create_multipart_upload(Bucket=BUCKET, Key="m")["UploadId"]
    where = {"Bucket": BUCKET, "Key": "m", "UploadId": upload}
    done = []
    for number in (3, 1, 2):
        etag = client.upload_part(**where, PartNumber=number, Body=parts[number - 1])["ETag"]
        done.append({"PartNumber": number, "ETag": etag})
    assert code_of(read, client, "m") == "NoSuchKey"
    done.sort(key=lambda part: part["PartNumber"])
    client.complete_multipart_upload(**where, MultipartUpload={"Parts": done})
    assert read(client, "m") == b"".join(parts)
    across = f"bytes={(5 << 20) - 2}-{(10 << 20) + 1}"
    assert read(client, "m", Range=across) == b"aa" + parts[1] + b"cc"
    other = client.create_multipart_upload(Bucket=BUCKET, Key="n")["UploadId"]
    client.abort_multipart_upload(Bucket=BUCKET, Key="n", UploadId=other)
    assert code_of(client.upload_part, Bucket=BUCKET, Key="n", UploadId=other, PartNumber=1) == "NoSuchUpload"


def test_listings_and_bulk_delete(client: Any) -> None:
    keys = [f"l/{folder}/{number}" for folder in "ab" for number in range(3)] + ["l/x", "other"]
    for key in keys:
        client.put_object(Bucket=BUCKET, Key=key, Body=b"123")
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, PaginationConfig={"PageSize": 3})
    found = [[item["Key"] for item in page["Contents"]] for page in pages]
    assert found == [keys[:3], keys[3:6], keys[6:]]
    listed = client.list_objects_v2(Bucket=BUCKET, Prefix="l/", Delimiter="/")
    assert [item["Prefix"] for item in listed["CommonPrefixes"]] == ["l/a/", "l/b/"]
    assert [(item["Key"], item["Size"]) for item in listed["Contents"]] == [("l/x", 3)]
    client.copy_object(Bucket=BUCKET, Key="copy", CopySource={"Bucket": BUCKET, "Key": "l/x"})
    assert read(client, "copy") == b"123"
    client.delete_objects(Bucket=BUCKET, Delete={"Objects": [{"Key": key} for key in keys[:-1]]})
    assert [item["Key"] for item in client.list_objects_v2(Bucket=BUCKET)["Contents"]] == ["copy", "other"]


def test_counts(client: Any, server: Served) -> None:
    client.put_object(Bucket=BUCKET, Key="k", Body=b"12345")
    read(client, "k", Range="bytes=0-2")
    read(client, "k", Range="bytes=1-1")
    stats = server.stats()
    assert stats["requests"] == {"PUT": 1, "GET": 2}
    assert (stats["bytes_in"], stats["bytes_out"], stats["round_trips"]) == (5, 4, 3)
    server.reset()
    assert server.stats()["requests"] == {}


def test_round_trips_are_requests_in_line() -> None:
    def at(began: float, ended: float) -> Entry:
        return Entry(began, ended, "GET", "k", 0, 0, 200)

    assert round_trips([at(0, 1), at(0.1, 1.1), at(0.2, 1.2)]) == 1
    assert round_trips([at(0, 1), at(0.5, 1.5), at(1.2, 2.2), at(2.3, 3)]) == 3


def test_latency_bandwidth_and_throttling() -> None:
    with served(latency=0.05, bandwidth=10e6) as slow:
        client = client_of(slow)
        began = time.monotonic()
        client.put_object(Bucket=BUCKET, Key="k", Body=bytes(1_000_000))
        assert time.monotonic() - began >= 0.15 - 0.06  # the first half megabyte may come with the head
        began = time.monotonic()
        read(client, "k")
        assert time.monotonic() - began >= 0.15 - 0.06
    with served(throttle=1.0) as busy:
        assert code_of(client_of(busy).put_object, Bucket=BUCKET, Key="k", Body=b"") == "SlowDown"


@pytest.mark.parametrize("faults", [{}, {"throttle": 0.3}])
def test_zarrckpt_saves_and_loads(server: Served, faults: dict[str, float]) -> None:
    state = {"w": torch.randn(300, 700), "deep": {"v": torch.arange(50)}, "step": 3}
    target = {"w": torch.zeros(300, 700), "deep": {"v": torch.zeros(50, dtype=torch.int64)}, "step": 0}
    with served(**faults) as place:
        url, options = f"s3://{BUCKET}/run", place.storage_options
        zarrckpt.save(state, url, storage_options=options)
        zarrckpt.load(target, url, storage_options=options)
        with pytest.raises(zarrckpt.CheckpointExistsError):
            zarrckpt.save(state, url, storage_options=options)
        assert ("503" in place.stats()["statuses"]) == bool(faults)
    assert torch.equal(target["w"], state["w"])
    assert torch.equal(target["deep"]["v"], state["deep"]["v"])  # type: ignore[index]
    assert target["step"] == 3


def test_the_command_writes_tables_and_json(tmp_path: Path) -> None:
    page, data = tmp_path / "speed.md", tmp_path / "found.json"
    page.write_text("# Mine\n\nabove\n\n<!-- benchmarks: begin -->\nold\n<!-- benchmarks: end -->\n\nbelow\n")
    command = [sys.executable, "-m", "benchmarks", "--quick", "--gigabytes", "0.001", "--folder", str(tmp_path)]
    command += ["--only", "startup", "subchunks", "--json", str(data), "--page", str(page)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = {figure["what"]: figure for figure in json.loads(data.read_text())["figures"]}
    # The figure itself is a difference of two times, and may be anything.
    assert found["import zarrckpt, beyond an empty process"]["note"].startswith("loads none of")
    text = page.read_text()
    assert text.startswith("# Mine\n\nabove\n") and text.endswith("<!-- benchmarks: end -->\n\nbelow\n")
    assert "old" not in text and "| import zarrckpt, beyond an empty process |" in text
    assert "### Cost of subchunks" in done.stdout


def test_tables_show_missed_goals_and_missing_peers(tmp_path: Path) -> None:
    ours = Speed("a group", "zarrckpt", "ours", 10**9, [1.0, 2.0, 9.0], [0.5])
    speeds = [ours, Speed("a group", "absent", "peer", 10**9)]
    goals = [Figure("f", "high", 3.0, "x", 2.0), Figure("f", "low", 3.0, "x", 2.0, most=True), Figure("f", "none", 1.0)]
    write_page(Results(speeds, goals), "heading", tmp_path / "page.md")
    text = (tmp_path / "page.md").read_text()
    assert "| **zarrckpt** | 0.50 | 1.00x | 2.00 | 1.00x |" in text
    assert "| absent | not installed |" in text
    assert "| high | 3.00 x | at least 2.00 x | yes |" in text
    assert "| low | 3.00 x | at most 2.00 x | **no** |" in text
    assert "| none | 1.00 |  |  |" in text
