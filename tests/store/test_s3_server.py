"""The tests' S3 server, against boto3. Tests of the store prove the rest of it."""

from __future__ import annotations

from typing import Any

import pytest
from botocore.exceptions import ClientError
from harness.s3_objects import Entry, round_trips
from harness.s3_server import S3Server

BUCKET = "bench"


@pytest.fixture
def client(s3_stub: S3Server) -> Any:
    return s3_stub.bucket().client()


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


def test_round_trips_are_requests_in_a_row() -> None:
    def at(began: float, ended: float) -> Entry:
        return Entry(began, ended, "get", "k", 0, 0, 200)

    assert round_trips([at(0, 1), at(0.1, 1.1), at(0.2, 1.2)]) == 1
    assert round_trips([at(0, 1), at(0.5, 1.5), at(1.2, 2.2), at(2.3, 3)]) == 3
