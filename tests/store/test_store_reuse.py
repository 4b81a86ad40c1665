"""Objects that are made from others without sending them: links and clones of files, copies in object stores."""

from __future__ import annotations

import dataclasses
import errno
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.crashes import Disk
from harness.s3_server import Request, S3Server, Strike
from harness.store_servers import S3Place

import zarrckpt
from zarrckpt._store import Store, _local, _local_commit, _optional, open_store
from zarrckpt._store._optional import OptionalRequests

ON = zarrckpt.SaveOptions(reuse="on", durable=False, max_chunk_bytes=1 << 18, concurrency=1)
FROZEN, ADAPTER = 4 * ((1 << 18) + 4), 1 << 12
"""Bytes of the chunks that never change, and of the other tensor."""


def state(number: int) -> dict[str, Any]:
    """Return 4 chunks that never change, and one that does."""
    frozen = torch.arange(1 << 18, dtype=torch.float32).reshape(16, -1)
    return {"frozen": frozen, "adapter": torch.full((ADAPTER // 4,), float(number)), "step": number}


def check(url: Any, number: int, **options: Any) -> None:
    found = {**state(0), "frozen": torch.zeros(16, 1 << 14)}
    zarrckpt.load(found, url, **options)
    expected = state(number)
    assert all(torch.equal(found[name], expected[name]) for name in ("frozen", "adapter")) and found["step"] == number
    zarrckpt.open(url, **options).verify().raise_if_damaged()


# -- the verb


def reuse(store: Store, base: Store, source_key: str, key: str, nbytes: int) -> bool:
    """Link or copy an object, and return whether that was done."""
    if store.copies_from(base):
        return store.copy_from(base, source_key, key, nbytes, OptionalRequests())
    file = store.open_linkable(base, source_key, key)
    if isinstance(file, str):
        return False
    with file:
        return file.size == nbytes and store.link(file, key)


@pytest.fixture(params=["local", "s3", "memory", "fsspec"])
def places(request: pytest.FixtureRequest, tmp_path: Path, s3_stub: S3Server) -> tuple[Store, Store]:
    """Return two folders of one store."""
    if request.param == "local":
        return open_store(tmp_path / "base", durable=False), open_store(tmp_path / "new", durable=False)
    if request.param == "memory":
        return open_store(f"memory://{tmp_path.name}/base"), open_store(f"memory://{tmp_path.name}/new")
    place = s3_stub.bucket()
    options = place.fsspec_options if request.param == "fsspec" else place.storage_options
    urls = (place.url("base"), place.url("new"))
    return tuple(open_store(url, storage_options=options) for url in urls)  # type: ignore[return-value]


def test_a_reused_object_has_the_same_bytes(places: tuple[Store, Store]) -> None:
    base, new = places
    base.put("w/c.0", [b"base"])
    if reuse(new, base, "w/c.0", "v/c.1", 4):
        assert new.get("v/c.1") == b"base"
        # A second try, after the answer to the first was lost.
        assert reuse(new, base, "w/c.0", "v/c.1", 4)
    else:
        assert not new.holds("v")
    new.put("v/c.1", [b"other bytes"])
    assert (new.get("v/c.1"), base.get("w/c.0")) == (b"other bytes", b"base")
    new.delete(["v/c.1"])
    assert base.get("w/c.0") == b"base"


def test_absent_objects_and_other_sizes_are_not_reused(places: tuple[Store, Store]) -> None:
    base, new = places
    base.put("w/c.0", [b"base"])
    base.put("w/c.1/below", [b"base"])
    for key, nbytes in (("w/c.0", 5), ("w/c.0", 3), ("w/c.2", 4), ("w/c.1", 4), ("x/c.0/c.0", 4)):
        assert not reuse(new, base, key, "v/c.0", nbytes)
        new.put("v/c.0", [b"mine"])
        assert new.get("v/c.0") == b"mine"
    assert base.get("w/c.0") == b"base"


def test_a_read_only_store_reuses_nothing(tmp_path: Path) -> None:
    base = open_store(tmp_path)
    base.put("w", [b"base"])
    base.refuse_changes()
    with pytest.raises(zarrckpt.StorageError, match="read-only"):
        base.copy_from(base, "w", "v", 4, OptionalRequests())


def test_other_stores_are_never_copied_from(tmp_path: Path, s3_stub: S3Server) -> None:
    place, other = s3_stub.bucket(), s3_stub.bucket()
    stores = [open_store(tmp_path), open_store("memory://one")]
    stores += [open_store(p.url("a"), storage_options=p.storage_options) for p in (place, other)]
    for store in stores:
        store.put("w", [b"base"])
    for store in stores:
        assert not any(reuse(store, base, "w", "v", 4) for base in stores if base is not store)
        assert not store.holds("v")
    assert not [request for request in s3_stub.requests if request.kind == "copy"]


# -- files


@pytest.fixture
def base(tmp_path: Path) -> Path:
    zarrckpt.save(state(1), tmp_path / "base", options=ON)
    return tmp_path / "base"


def links(folder: Path) -> list[int]:
    return [(folder / "frozen" / f"c.{number}.0").stat().st_nlink for number in range(4)]


def test_links_have_the_present_time(base: Path, tmp_path: Path) -> None:
    for path in base.rglob("*"):
        os.utime(path, (10**9, 10**9))
    zarrckpt.save(state(2), tmp_path / "new", base=base, options=ON)
    assert links(tmp_path / "new") == [2] * 4
    assert all(path.stat().st_mtime > 10**9 for path in (tmp_path / "new").rglob("*"))


class RefusedLinks:
    """Replaces ``os`` on a filesystem that refuses links, or has too many of one file."""

    def __init__(self, code: int) -> None:
        self._code = code

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def link(self, source: str, path: str, **options: Any) -> None:
        raise OSError(self._code, os.strerror(self._code), source, None, path)


@pytest.mark.parametrize("code", [errno.EPERM, errno.EMLINK, errno.ENOTSUP])
def test_without_links_files_are_written(
    code: int, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_local_commit, "os", RefusedLinks(code))
    report = zarrckpt.save(state(2), tmp_path / "new", base=base, options=ON)
    assert report.sent_bytes == report.nbytes and links(base) == links(tmp_path / "new") == [1] * 4
    check(tmp_path / "new", 2)


def test_a_pipe_in_the_base_is_not_reused(base: Path, tmp_path: Path) -> None:
    chunk = base / "frozen" / "c.0.0"
    chunk.unlink()
    os.mkfifo(chunk)
    zarrckpt.save(state(2), tmp_path / "new", base=base, options=ON)
    check(tmp_path / "new", 2)


@pytest.fixture
def other_disk(tmp_path: Path) -> Iterator[Path]:
    disks = ("/dev/shm", "/tmp", "/var/tmp")
    folder = tempfile.mkdtemp(dir=next(disk for disk in disks if os.stat(disk).st_dev != os.stat(tmp_path).st_dev))
    yield Path(folder)
    shutil.rmtree(folder)


def test_a_base_on_another_disk_is_not_linked(base: Path, other_disk: Path) -> None:
    report = zarrckpt.save(state(2), other_disk / "new", base=base, options=ON)
    assert report.sent_bytes == report.nbytes
    check(other_disk / "new", 2)


def test_a_symbolic_link_in_the_base_is_not_reused(base: Path, tmp_path: Path) -> None:
    chunk = base / "frozen" / "c.0.0"
    chunk.rename(tmp_path / "moved")
    chunk.symlink_to(tmp_path / "moved")
    report = zarrckpt.save(state(2), tmp_path / "new", base=base, options=ON)
    assert report.linked_bytes == FROZEN * 3 // 4
    assert not (tmp_path / "new" / "frozen" / "c.0.0").is_symlink()


@pytest.mark.parametrize("durable", [True, False])
def test_linked_files_are_synced_if_durable(
    durable: bool, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The base was saved without a sync."""
    disk = Disk()
    with monkeypatch.context() as patch:
        patch.setattr(_local, "os", disk)
        patch.setattr(_local_commit, "os", disk)
        zarrckpt.save(state(2), tmp_path / "new", base=base, options=dataclasses.replace(ON, durable=durable))
    frozen = str(tmp_path / "new" / "frozen")
    linked = [event.path for event in disk.events if event.verb == "link" and event.path.startswith(frozen)]
    synced = {event.path for event in disk.events if event.verb == "fsync"}
    assert len(linked) == 4 and {*linked} & synced == ({*linked} if durable else set())
    assert not durable or frozen in synced


# -- copies in S3


@dataclasses.dataclass
class Bucket:
    """A bucket with a base, and saves to it whose requests are counted."""

    stub: S3Server
    place: S3Place
    concurrency: int = 1

    @property
    def arguments(self) -> dict[str, Any]:
        return {"storage_options": {**self.place.storage_options, "retry_config": RETRY}}

    def save(self, number: int, base: str | None = None) -> tuple[zarrckpt.SaveReport, dict[str, Any]]:
        self.stub.log.reset()
        source = None if base is None else self.place.url(base)
        url = self.place.url(f"run/{number}")
        options = dataclasses.replace(ON, concurrency=self.concurrency)
        report = zarrckpt.save(state(number), url, base=source, options=options, **self.arguments)
        stats = self.stub.log.stats()
        check(url, number, **self.arguments)
        return report, stats


RETRY = {"max_retries": 4, "backoff": {"init_backoff": 0.01, "max_backoff": 0.02, "base": 2}}


@pytest.fixture
def bucket(s3_stub: S3Server) -> Bucket:
    return Bucket(s3_stub, s3_stub.bucket())


def test_a_server_receives_only_changed_chunks(bucket: Bucket) -> None:
    bucket.save(1)
    _, whole = bucket.save(2)
    report, stats = bucket.save(3, "run/1")
    assert (report.copied_bytes, report.base) == (FROZEN, bucket.place.url("run/1"))
    assert whole["bytes_in"] > FROZEN and stats["bytes_in"] < ADAPTER + (20 << 10)
    # The root and two tables of the base are read, and its root again. Each copy has its size read.
    expected = dict(whole["requests"])
    expected["put"] -= 4
    expected |= {"copy": 4, "head": expected.get("head", 0) + 4, "get": expected.get("get", 0) + 4}
    assert stats["requests"] == expected


def test_busy_copies_are_repeated_once(bucket: Bucket) -> None:
    bucket.save(1)
    bucket.stub.faults.strike = Strike("copy", 503, "SlowDown", spared=1)
    report, stats = bucket.save(2, "run/1")
    assert report.copied_bytes == FROZEN and stats["requests"]["copy"] == 5
    bucket.stub.faults.failed_copies = 1
    report, stats = bucket.save(3, "run/2")
    assert report.copied_bytes == FROZEN and stats["requests"]["copy"] == 5
    bucket.stub.faults.failed_copies = 2
    report, stats = bucket.save(4, "run/3")
    assert report.copied_bytes == 0 and stats["requests"]["copy"] == 2


FOR_GOOD = [(403, "AccessDenied"), (403, "InvalidObjectState"), (405, "MethodNotAllowed"), (501, "NotImplemented")]
FOR_ONE_SAVE = [(400, "InvalidRequest"), (409, "OperationAborted"), (500, "InternalError"), (503, "SlowDown")]


@pytest.mark.parametrize("kind", ["copy", "head"])
@pytest.mark.parametrize("refusal", [*FOR_GOOD, *FOR_ONE_SAVE])
def test_refused_copies_are_puts_after_one_warning(
    refusal: tuple[int, str], kind: str, bucket: Bucket, caplog: pytest.LogCaptureFixture
) -> None:
    bucket.concurrency = 4
    bucket.save(1)
    bucket.stub.faults.refused[kind] = refusal
    caplog.clear()
    report, stats = bucket.save(2, "run/1")
    assert report.sent_bytes == report.nbytes and not report.base
    (record,) = (record for record in caplog.records if record.levelname == "WARNING")
    assert record.getMessage() == report.base_problem and "cannot be copied" in report.base_problem
    assert str(refusal[0]) in report.base_problem or refusal[1] in report.base_problem
    assert stats["requests"]["copy"] <= 8 and stats["bytes_in"] > FROZEN
    bucket.stub.faults.refused.clear()
    caplog.clear()
    report, stats = bucket.save(3, "run/1")
    for_good = refusal in FOR_GOOD
    assert report.copied_bytes == (0 if for_good else FROZEN) and ("copy" in stats["requests"]) != for_good
    assert "cannot be copied" in report.base_problem or not for_good
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def _copies(request: Request) -> bool:
    return request.kind == "copy"


def _sizes_of_copies(request: Request) -> bool:
    return request.kind == "head" and "/frozen/" in request.path


def _root_of_the_base(request: Request) -> bool:
    return request.kind == "get" and request.path.endswith("run/1/zarr.json")


def _tables_of_the_base(request: Request) -> bool:
    return request.kind == "get" and "run/1/@zarrckpt/" in request.path


@pytest.mark.parametrize("stalls", [_copies, _sizes_of_copies, _root_of_the_base, _tables_of_the_base])
@pytest.mark.parametrize("spared", [0, 1])
def test_optional_requests_without_an_answer_are_given_up(
    stalls: Callable[[Request], bool],
    spared: int,
    bucket: Bucket,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(_optional, "_SECONDS", 0.5)
    bucket.concurrency = 4
    bucket.save(1)
    left = [spared]

    def delay(request: Request) -> float:
        if stalls(request):
            left[0] -= 1
        return 3.0 if stalls(request) and left[0] < 0 else 0.0

    bucket.stub.faults.delay = delay
    caplog.clear()
    began = time.monotonic()
    url = bucket.place.url("run/2")
    report = zarrckpt.save(state(2), url, base=bucket.place.url("run/1"), options=ON, **bucket.arguments)
    took = time.monotonic() - began
    bucket.stub.faults.delay = lambda request: 0.0
    warnings = [record for record in caplog.records if record.levelname == "WARNING"]
    assert took < 2.5 and len(warnings) == 1 and (report.base_problem or report.base)
    if stalls is _root_of_the_base and spared:
        # The root is read again after the last copy. Then the copies are read instead.
        assert report.copied_bytes == FROZEN
    else:
        assert report.copied_bytes <= spared * FROZEN // 4
    check(url, 2, **bucket.arguments)


@pytest.mark.parametrize("spared", [0, 2])
def test_copies_that_were_not_made_are_put(spared: int, bucket: Bucket) -> None:
    """The server closes the connection, so it is not known whether the copy was made."""
    bucket.save(1)
    left = [spared]

    def drop(request: Request) -> float:
        if request.kind == "copy":
            left[0] -= 1
            bucket.stub.faults.dropped = ("copy",) if left[0] < 0 else ()
        return 0.0

    bucket.stub.faults.delay = drop
    report, _ = bucket.save(2, "run/1")
    assert report.copied_bytes == spared * FROZEN // 4


def test_copies_with_lost_answers_are_complete(bucket: Bucket) -> None:
    bucket.save(1)
    bucket.stub.faults.strike = Strike("copy", spared=2)
    report, _ = bucket.save(2, "run/1")
    assert report.copied_bytes == FROZEN


def test_truncated_copies_are_found_by_their_size(bucket: Bucket) -> None:
    bucket.save(1)
    bucket.stub.faults.cut_copies = True
    report, _ = bucket.save(2, "run/1")
    assert report.sent_bytes == report.nbytes


def test_a_base_in_another_bucket_is_not_copied(bucket: Bucket, s3_stub: S3Server) -> None:
    other = Bucket(s3_stub, s3_stub.bucket())
    other.save(1)
    url = bucket.place.url("run/2")
    report = zarrckpt.save(state(2), url, base=other.place.url("run/1"), options=ON, **bucket.arguments)
    assert report.sent_bytes == report.nbytes
    check(url, 2, **bucket.arguments)


@pytest.mark.parametrize("server", ["moto_bucket", pytest.param("ceph_bucket", marks=pytest.mark.ceph)])
def test_other_servers_copy_chunks(server: str, request: pytest.FixtureRequest) -> None:
    place: S3Place = request.getfixturevalue(server)
    options = {"storage_options": place.storage_options}
    zarrckpt.save(state(1), place.url("1"), options=ON, **options)
    report = zarrckpt.save(state(2), place.url("2"), base=place.url("1"), options=ON, **options)
    assert (report.copied_bytes, report.base) == (FROZEN, place.url("1"))
    zarrckpt.remove(place.url("1"), **options)
    check(place.url("2"), 2, **options)
    report = zarrckpt.save(state(3), place.url("3"), base=place.url("1"), options=ON, **options)
    assert report.sent_bytes == report.nbytes
