"""Every kind of store keeps the same promises: one class of tests, run against each of them."""

from __future__ import annotations

import os
import threading
import time
import uuid
import zipfile
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from harness import GOLDEN
from harness.internals import Catalog, ObjectInfo, Store, StoreSpec
from harness.s3_server import S3Server
from harness.store_servers import S3Place
from zarr.core.sync import sync

from zarrckpt import (
    CorruptCheckpointError,
    ObjectExistsError,
    ObjectNotFoundError,
    StorageError,
)
from zarrckpt._read.zarr_view import StrictStore

KEYS = [
    "zarr.json",
    "model/layers.0.weight/c.0.0",
    "sp ace/a+b",
    "@zarrckpt/zarr.json",
    "per%cent/a%20b/%2F",
    "has#hash/x=y&z",
    "ünïcödé/日本語/🙂",
    "quotes'\"/(a)!$,;~^`{|}",
    "brackets/[a]<b>",
    "c",
]

BACKENDS = [
    "local",
    "obstore-moto",
    "s3fs-moto",
    "memory",
    "zarr-memory",
    "zarr-obstore-memory",
    "zarr-wrapped",
    "fsspec-folder",
    "obstore-gcs",
    "obstore-hub",
    "s3fs-hub",
    pytest.param("obstore-ceph", marks=pytest.mark.ceph),
    pytest.param("s3fs-ceph", marks=pytest.mark.ceph),
]

# Stores without conditional puts warn once.
BEST_EFFORT = {"zarr-wrapped", "fsspec-folder"}


def make_spec(backend: str, request: pytest.FixtureRequest, tmp_path: Path) -> StoreSpec:
    """Return a recipe for an empty place in the given kind of store, with a path that needs escapes."""
    path = f"run ü%20#/{uuid.uuid4().hex}"
    if backend == "local":
        return StoreSpec(tmp_path / path)
    if backend == "memory":
        return StoreSpec(f"memory://{path}")
    if backend == "fsspec-folder":
        return StoreSpec(tmp_path / path, storage_options={"backend": "fsspec"})
    if backend.startswith("zarr-"):
        return StoreSpec(zarr.storage.StorePath(make_zarr_store(backend, tmp_path), path))
    if backend == "obstore-gcs":
        stub: S3Server = request.getfixturevalue("s3_stub")
        return StoreSpec(f"gs://bucket/{path}", storage_options={"bearer_token": "t", "endpoint_url": stub.endpoint})
    client, _, server = backend.partition("-")
    place: S3Place = request.getfixturevalue(f"{server}_bucket")
    options = place.storage_options if client == "obstore" else place.fsspec_options
    return StoreSpec(place.url(path), storage_options=options)


def make_zarr_store(backend: str, tmp_path: Path) -> Any:
    if backend == "zarr-memory":
        return zarr.storage.MemoryStore()
    if backend == "zarr-obstore-memory":
        import obstore.store

        return zarr.storage.ObjectStore(obstore.store.MemoryStore())
    return zarr.storage.WrapperStore(zarr.storage.LocalStore(tmp_path / "wrapped"))


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def spec(backend: str, request: pytest.FixtureRequest, tmp_path: Path) -> StoreSpec:
    return make_spec(backend, request, tmp_path)


@pytest.fixture
def store(spec: StoreSpec) -> Store:
    return spec.open()


@pytest.fixture(autouse=True)
def _best_effort_warnings(request: pytest.FixtureRequest) -> Iterator[None]:
    """Ignore the warning for stores without conditional puts. For all others it fails the test."""
    import warnings

    with warnings.catch_warnings():
        callspec = getattr(request.node, "callspec", None)
        expected = callspec is not None and callspec.params.get("backend") in BEST_EFFORT
        warnings.filterwarnings("ignore" if expected else "error", message=".*best effort", category=UserWarning)
        yield


def race(count: int, work: Callable[[int], None]) -> list[BaseException | None]:
    """Run ``work(0..count-1)`` in threads that start together. Return what each one raised."""
    barrier = threading.Barrier(count)

    def run(number: int) -> BaseException | None:
        barrier.wait()
        try:
            work(number)
        except Exception as error:
            return error
        return None

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


class TestStore:
    """Promises of ``Store``, for every kind of store."""

    def test_gets_back_what_was_put_under_any_key(self, store: Store) -> None:
        for number, key in enumerate(KEYS):
            store.put(key, [f"content {number}".encode()])
        for number, key in enumerate(KEYS):
            assert store.get(key) == f"content {number}".encode()
        assert {item.key for item in store.list()} == set(KEYS)

    def test_joins_buffers_of_every_kind_in_order(self, store: Store) -> None:
        array = np.arange(6, dtype="<u4").reshape(2, 3)
        parts = [b"head", bytearray(b"-"), memoryview(array), memoryview(b""), memoryview(np.empty((0, 4))), b"tail"]
        store.put("k", parts)
        assert store.get("k") == b"head-" + array.tobytes() + b"tail"

    def test_joins_more_buffers_than_one_system_call_takes(self, store: Store) -> None:
        parts = [bytes([number % 251]) * 3 for number in range(2500)]
        store.put("k", parts)
        assert store.get("k") == b"".join(parts)

    def test_keeps_its_own_copy(self, store: Store) -> None:
        data = bytearray(b"first")
        store.put("k", [memoryview(data)])
        data[:] = b"other"
        assert store.get("k") == b"first"

    def test_puts_an_empty_object(self, store: Store) -> None:
        store.put("empty", [])
        store.put("also", [b""])
        assert store.get("empty") == store.get("also") == b""
        store.read_into("empty", 0, memoryview(bytearray()))
        assert set(store.list()) == {ObjectInfo("empty", 0), ObjectInfo("also", 0)}

    def test_puts_replace(self, store: Store) -> None:
        store.put("k", [b"a long first content"])
        with pytest.raises(ObjectExistsError):
            store.create("k", b"created")
        store.put("k", [b"short"])
        assert store.get("k") == b"short"
        assert [*store.list()] == [ObjectInfo("k", 5)]

    def test_reads_ranges_into_a_buffer(self, store: Store) -> None:
        store.put("k", [bytes(range(100))])
        target = bytearray(b"\xff" * 30)
        store.read_into("k", 40, memoryview(target)[5:25])
        assert bytes(target) == b"\xff" * 5 + bytes(range(40, 60)) + b"\xff" * 5
        store.read_into("k", 0, memoryview(whole := bytearray(100)))
        assert bytes(whole) == bytes(range(100))

    def test_reads_ranges_without_a_buffer(self, store: Store) -> None:
        store.put("k", [bytes(range(100))])
        found = store.read("k", 40, 20)
        assert found.tobytes() == bytes(range(40, 60))
        assert (found.readonly, found.format, found.ndim) == (True, "B", 1)
        assert store.read("k", 0, 100).tobytes() == bytes(range(100))
        assert store.read("k", 100, 0).tobytes() == b""

    @pytest.mark.parametrize("byte_offset", [5, 10, 500])
    def test_a_short_object_is_corrupt(self, store: Store, byte_offset: int) -> None:
        store.put("model/w/c.0", [b"0123456789"])
        with pytest.raises(CorruptCheckpointError, match=r"model/w/c\.0"):
            store.read_into("model/w/c.0", byte_offset, memoryview(bytearray(8)))
        with pytest.raises(CorruptCheckpointError, match=r"model/w/c\.0"):
            store.read("model/w/c.0", byte_offset, 8)

    def test_absent_objects_are_named(self, store: Store) -> None:
        store.put("there", [b"x"])
        for read in (
            lambda: store.get("model/absent"),
            lambda: store.get_versioned("model/absent"),
            lambda: store.read_into("model/absent", 0, memoryview(bytearray(3))),
            lambda: store.read("model/absent", 0, 3),
        ):
            with pytest.raises(ObjectNotFoundError, match="model/absent") as caught:
                read()
            assert isinstance(caught.value, FileNotFoundError)

    def test_a_folder_is_not_an_object(self, store: Store) -> None:
        store.put("folder/k", [b"x"])
        with pytest.raises(ObjectNotFoundError):
            store.get("folder")
        with pytest.raises(ObjectNotFoundError):
            store.read_into("folder", 0, memoryview(bytearray(1)))

    @pytest.mark.parametrize("key", ["", "/k", "k/", "a//b", "../k", "a/../k", ".", "a/./b", "nul\0"])
    def test_keys_never_leave_the_url(self, store: Store, key: str) -> None:
        for use in (
            lambda: store.get(key),
            lambda: store.put(key, [b"x"]),
            lambda: store.create(key, b"x"),
            lambda: store.delete([key]),
            lambda: store.read_into(key, 0, memoryview(bytearray(1))),
        ):
            with pytest.raises(StorageError):
                use()

    def test_a_large_object_survives(self, store: Store) -> None:
        block = np.random.default_rng(0).integers(0, 256, 3 * 2**20, dtype=np.uint8)
        store.put("big", [block.data] * 22 + [b"end"])
        size = 22 * block.size + 3
        assert [*store.list()] == [ObjectInfo("big", size)]
        for byte_offset, length in ((0, block.size), (7 * block.size, block.size), (size - 3, 3)):
            store.read_into("big", byte_offset, memoryview(found := bytearray(length)))
            assert bytes(found) == (b"end" if length == 3 else block.tobytes())

    def test_lists_the_objects_below_a_folder(self, store: Store) -> None:
        for key in ("zarr.json", "a/zarr.json", "a/b/c.0", "a/b/c.1", "ab/c.0", "d/e/f/g"):
            store.put(key, [key.encode()])
        assert {item.key: item.size for item in store.list("a")} == {"a/zarr.json": 11, "a/b/c.0": 7, "a/b/c.1": 7}
        assert {item.key for item in store.list("d/e")} == {"d/e/f/g"}
        assert len([*store.list()]) == 6
        assert [*store.list("absent")] == []
        assert [*store.list("zarr.json")] == []
        assert store.list_dir() == (["zarr.json"], ["a", "ab", "d"])
        assert store.list_dir("a") == (["zarr.json"], ["b"])
        assert store.list_dir("a/b") == (["c.0", "c.1"], [])
        assert store.list_dir("absent") == ([], [])
        assert store.list_dir("zarr.json") == ([], [])

    def test_lists_nothing_before_the_first_put(self, store: Store) -> None:
        assert [*store.list()] == []
        assert store.list_dir() == ([], [])

    def test_lists_objects_of_other_clients(self, spec: StoreSpec, store: Store) -> None:
        store.put("a/1", [b"x"])
        assert store.list_dir("a") == (["1"], [])
        spec.child("a").open().put("2", [b"xx"])
        assert store.list_dir("a") == (["1", "2"], [])
        assert {item.key for item in store.list()} == {"a/1", "a/2"}

    def test_lists_and_deletes_many(self, store: Store) -> None:
        keys = {f"p/{number:04d}" for number in range(60)}
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda key: store.put(key, [b"x"]), keys))
        assert {item.key for item in store.list()} == keys
        assert store.list_dir("p") == (sorted(name.removeprefix("p/") for name in keys), [])
        store.delete(keys)
        assert [*store.list()] == []

    def test_deletes_and_does_not_mind_absent_objects(self, store: Store) -> None:
        for key in KEYS:
            store.put(key, [b"x"])
        store.delete(["absent", *KEYS[1:], "absent/too"])
        assert {item.key for item in store.list()} == {KEYS[0]}
        store.delete([])
        store.delete(iter([KEYS[0]]))
        assert [*store.list()] == []
        with pytest.raises(ObjectNotFoundError):
            store.get(KEYS[0])

    def test_sync_returns(self, store: Store) -> None:
        store.put("a/b/c", [b"x"])
        store.put("d", [b"x"])
        store.sync(["a/b/c", "d"])
        assert store.get("a/b/c") == b"x"


class TestConditions:
    """Create-only and compare-and-swap, on which a commit depends."""

    def test_creates_once(self, store: Store) -> None:
        store.create("zarr.json", b"mine")
        with pytest.raises(ObjectExistsError, match=r"zarr\.json") as caught:
            store.create("zarr.json", b"theirs")
        assert isinstance(caught.value, FileExistsError)
        assert store.get("zarr.json") == b"mine"
        store.create("deep/folder/zarr.json", b"another")
        assert store.get("deep/folder/zarr.json") == b"another"
        assert {item.key for item in store.list()} == {"zarr.json", "deep/folder/zarr.json"}

    def test_finding_its_own_object_is_not_a_conflict(self, store: Store) -> None:
        store.create("k", b"unique to me")
        store.create("k", b"unique to me")
        assert store.get("k") == b"unique to me"

    def test_replaces_the_version_that_was_read(self, store: Store) -> None:
        store.create("k", b"first")
        seen = store.get_versioned("k")
        assert seen.data == b"first"
        store.replace("k", b"second", seen.version)
        assert store.get("k") == b"second"
        again = store.get_versioned("k")
        store.replace("k", b"third", again.version)
        for stale in (seen, again):
            with pytest.raises(ObjectExistsError, match="'k'"):
                store.replace("k", b"late", stale.version)
        assert store.get("k") == b"third"
        assert {item.key for item in store.list()} == {"k"}

    def test_does_not_replace_what_was_deleted(self, store: Store) -> None:
        store.create("k", b"first")
        seen = store.get_versioned("k")
        store.delete(["k"])
        with pytest.raises(ObjectExistsError):
            store.replace("k", b"second", seen.version)
        assert [*store.list()] == []

    def test_repeating_a_successful_replace_is_not_a_conflict(self, store: Store) -> None:
        store.create("k", b"first")
        seen = store.get_versioned("k")
        store.replace("k", b"second, unique", seen.version)
        store.replace("k", b"second, unique", seen.version)
        assert store.get("k") == b"second, unique"

    def test_of_many_creators_one_wins(self, store: Store) -> None:
        results = race(8, lambda number: store.create("claim", b"by %d" % number))
        (winner,) = (number for number, error in enumerate(results) if error is None)
        assert all(isinstance(error, ObjectExistsError) for error in results if error is not None), results
        assert store.get("claim") == b"by %d" % winner

    def test_of_many_replacers_one_wins(self, store: Store) -> None:
        store.create("root", b"the first")
        seen = store.get_versioned("root")
        results = race(8, lambda number: store.replace("root", b"by %d" % number, seen.version))
        (winner,) = (number for number, error in enumerate(results) if error is None)
        assert all(isinstance(error, ObjectExistsError) for error in results if error is not None), results
        assert store.get("root") == b"by %d" % winner

    def test_two_stores_of_one_url_see_each_other(self, spec: StoreSpec) -> None:
        first, second = spec.child("x").open(), spec.child("x").open()
        first.create("k", b"1")
        with pytest.raises(ObjectExistsError):
            second.create("k", b"2")
        second.replace("k", b"3", second.get_versioned("k").version)
        assert first.get("k") == b"3"


def test_memory_is_exact_even_with_slow_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    from fsspec.implementations.memory import MemoryFileSystem

    whole = MemoryFileSystem.cat_file

    def slow(self: Any, *args: Any, **options: Any) -> bytes:
        try:
            return whole(self, *args, **options)
        finally:
            time.sleep(0.005)

    store = StoreSpec(f"memory://{uuid.uuid4().hex}").open()
    monkeypatch.setattr(MemoryFileSystem, "cat_file", slow)
    assert race(10, lambda number: store.create("k", b"%d" % number)).count(None) == 1
    seen = store.get_versioned("k")
    assert race(10, lambda number: store.replace("k", b"again %d" % number, seen.version)).count(None) == 1


async def _collected(names: AsyncIterator[str]) -> list[str]:
    return [name async for name in names]


class TestForOthers:
    """Features that the rest of the package and other libraries use."""

    def test_serves_zarr_read_only(self, store: Store, spec: StoreSpec, tmp_path: Path) -> None:
        folder = tmp_path / "chunks"
        with zipfile.ZipFile(GOLDEN / "chunks.zip") as archive:
            archive.extractall(folder)
        for file in filter(Path.is_file, folder.rglob("*")):
            store.put(file.relative_to(folder).as_posix(), [file.read_bytes()])
        inside = StrictStore(Catalog(spec))
        found = zarr.open_group(inside, mode="r", zarr_format=3)
        np.testing.assert_array_equal(found["w"][1:], zarr.open_array(folder, path="w", mode="r")[1:])
        assert sorted(name for name, _ in found.members(max_depth=None)) == ["w", "x"]
        assert sorted(sync(_collected(inside.list_dir("x")))) == ["c.0", "c.1", "zarr.json"]
        assert sync(_collected(inside.list_prefix("w/c.1"))) == ["w/c.1.0"]
        assert sync(inside.exists("zarr.json")) and not sync(inside.exists("w/c"))
        with pytest.raises(ValueError, match="read-only"):
            found.create_group("new")

    def test_many_threads_use_one_store(self, store: Store) -> None:
        def work(number: int) -> None:
            data = os.urandom(10_000)
            store.put(f"t/{number % 7}/{number}", [data[:5000], data[5000:]])
            store.read_into(f"t/{number % 7}/{number}", 100, memoryview(found := bytearray(9000)))
            assert bytes(found) == data[100:9100]
            assert store.get(f"t/{number % 7}/{number}") == data
            if number % 2:
                store.delete([f"t/{number % 7}/{number}"])

        assert race(24, work) == [None] * 24
        assert len([*store.list()]) == 12

    def test_the_store_itself_is_not_pickled(self, store: Store) -> None:
        import pickle

        with pytest.raises(TypeError, match="StoreSpec"):
            pickle.dumps(store)

    def test_opens_once_per_process(self, spec: StoreSpec) -> None:
        assert spec.open() is spec.open()
