"""Filesystems of fsspec with the limits of sftp, SMB and HDFS: one thread at a time, no rename over a file."""

from __future__ import annotations

import errno
import os
import threading
import time
import uuid
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem
from harness.forks import in_forked_child
from harness.internals import Store, open_store

import zarrckpt
from zarrckpt import ObjectExistsError, StorageError


class StiffFileSystem(LocalFileSystem):  # type: ignore[misc]
    """Local files behind a connection that serves one thread at a time and does not rename over a file."""

    protocol = "stiff"
    local_file = False
    instances: ClassVar[set[int]] = set()

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.busy, self.pid = threading.Lock(), os.getpid()
        StiffFileSystem.instances.add(id(self))

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(LocalFileSystem._strip_protocol(path.removeprefix("stiff://")))

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        if self.pid != os.getpid():
            raise RuntimeError("a connection of another process")
        if not self.busy.acquire(blocking=False):
            raise RuntimeError("two threads at once on one connection")
        try:
            time.sleep(0.001)
            super().pipe_file(path, value, mode=mode, **options)
        finally:
            self.busy.release()

    def mv(self, path1: str, path2: str, **options: Any) -> None:
        if self.exists(path2):
            # Like SMB's client: no FileExistsError, but its number.
            raise Refused(errno.EEXIST, "the destination exists")
        self.rename(path1, path2)

    def rename(self, path1: str, path2: str) -> None:
        super().mv(path1, path2)


class Refused(OSError):
    pass


class HdfsFileSystem(StiffFileSystem):
    """The same with one error for everything."""

    protocol = ("stiff-hdfs", "hdfs")

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.removeprefix("stiff-hdfs://"))

    def mv(self, path1: str, path2: str, **options: Any) -> None:
        if self.exists(path2):
            raise OSError(errno.EIO, "rename failed")
        self.rename(path1, path2)


class WebHdfsFileSystem(HdfsFileSystem):
    """The same without an error if it did not rename."""

    protocol = ("stiff-webhdfs", "webhdfs")

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.removeprefix("stiff-webhdfs://"))

    def mv(self, path1: str, path2: str, **options: Any) -> None:
        if not self.exists(path2):
            self.rename(path1, path2)


STIFF = {"stiff": StiffFileSystem, "stiff-hdfs": HdfsFileSystem, "stiff-webhdfs": WebHdfsFileSystem}


@pytest.fixture(params=STIFF)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    fsspec.register_implementation(request.param, STIFF[request.param], clobber=True)
    return f"{request.param}://{tmp_path}/{uuid.uuid4().hex}"


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    StiffFileSystem.instances.clear()
    yield open_store(url)


def test_each_connection_serves_one_call_and_their_number_is_bounded(store: Store) -> None:
    def work(number: int) -> None:
        store.put(f"{number % 5}/{number}", [b"%d" % number])
        assert store.get(f"{number % 5}/{number}") == b"%d" % number

    with ThreadPoolExecutor(24) as pool:
        list(pool.map(work, range(200)))
    assert len([*store.list()]) == 200


def test_saves_and_loads_open_few_connections(url: str) -> None:
    torch = pytest.importorskip("torch", reason="make test-readers has no torch")
    state = {str(number): torch.full((2,), number) for number in range(40)}
    for kind in STIFF.values():
        kind.clear_instance_cache()
    StiffFileSystem.instances.clear()
    for step in range(3):
        zarrckpt.save(state, f"{url}/step-{step}")
        assert zarrckpt.open(f"{url}/step-{step}").load()["39"].tolist() == [39, 39]
    assert len(StiffFileSystem.instances) <= 2 * 8


def test_a_forked_child_opens_its_own_connection(store: Store) -> None:
    store.put("k", [b"x"])
    assert in_forked_child(lambda: store.put("from-child", [store.get("k")])) == ""
    assert store.get("from-child") == b"x"


def test_replaces_without_a_replacing_rename(store: Store) -> None:
    with pytest.warns(UserWarning, match="best effort"):
        store.create("root", b"1")
    seen = store.get_versioned("root")
    store.put("chunk", [b"old"])
    store.put("chunk", [b"new"])
    store.replace("root", b"2", seen.version)
    assert (store.get("root"), store.get("chunk")) == (b"2", b"new")
    with pytest.raises(ObjectExistsError):
        store.replace("root", b"3", seen.version)
    assert {item.key for item in store.list()} == {"root", "chunk"}


def test_a_write_that_fails_leaves_nothing(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put("k", [b"old"])

    def broken(self: Any, path1: str, path2: str, **options: Any) -> None:
        raise OSError("the connection is gone")

    for kind in STIFF.values():
        monkeypatch.setattr(kind, "mv", broken)
    with pytest.raises(StorageError, match="the connection is gone"):
        store.put("new", [b"new"])
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["k"]


@pytest.mark.parametrize("fault", ["fails", "was done", "is broken off"])
def test_an_overwrite_that_fails_keeps_the_new_object(
    store: Store, tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rename fails: alone, after its work, or by Ctrl-C."""
    rename = StiffFileSystem.rename

    def faulty(self: Any, path1: str, path2: str) -> None:
        if fault == "was done":
            rename(self, path1, path2)
        raise KeyboardInterrupt if fault == "is broken off" else OSError("the connection is gone")

    store.put("k", [b"old"])
    monkeypatch.setattr(StiffFileSystem, "rename", faulty)
    with pytest.raises(KeyboardInterrupt if fault == "is broken off" else StorageError) as caught:
        store.put("k", [b"new"])
    (kept,) = (path for path in tmp_path.rglob("*") if path.is_file())
    assert kept.read_bytes() == b"new"
    assert kept.name == "k" if fault == "was done" else fault == "is broken off" or str(kept) in str(caught.value)


def test_temporary_files_are_not_objects(store: Store, tmp_path: Path) -> None:
    store.put("a/k", [b"x"])
    (found,) = tmp_path.rglob("k")
    found.with_name(f"k.{uuid.uuid4().hex}.zarrckpt-part").write_bytes(b"half")
    assert [item.key for item in store.list()] == ["a/k"]
    assert store.list_dir("a") == (["k"], [])


def test_the_warning_is_issued_once(store: Store) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for key in ("a", "b", "c"):
            store.create(key, b"x")
            store.replace(key, b"y", store.get_versioned(key).version)
    assert len(caught) == 1


class MissingFileSystem(fsspec.AbstractFileSystem):  # type: ignore[misc]
    """A filesystem whose package is not installed."""

    protocol = "missing"

    def __init__(self, **options: Any) -> None:
        raise ImportError("Install missinglib to access this")


def test_a_missing_package_is_named() -> None:
    fsspec.register_implementation("missing", MissingFileSystem, clobber=True)
    with pytest.raises(StorageError, match=r"missinglib.*pip install"):
        open_store("missing://host/run")
