"""The local store: atomic, durable, race-free, and with clear errors if the filesystem refuses."""

from __future__ import annotations

import errno
import multiprocessing
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness.internals import Store

from zarrckpt import ObjectExistsError, StorageError
from zarrckpt._store import ObjectInfo, StoreSpec, _local_commit, open_store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path / "root")


def files_below(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def failing(number: int) -> Callable[..., Any]:
    def call(*args: object, **options: object) -> Any:
        raise OSError(number, os.strerror(number))

    return call


# -- files


def test_an_object_is_a_file_of_that_name(store: Store, tmp_path: Path) -> None:
    store.put("model/w/c.0", [b"ab", b"cd"])
    store.create("zarr.json", b"{}")
    assert files_below(tmp_path / "root") == {"model/w/c.0", "zarr.json"}
    assert (tmp_path / "root/model/w/c.0").read_bytes() == b"abcd"


def test_a_reader_never_sees_a_part(store: Store) -> None:
    contents = [bytes([letter]) * 300_000 for letter in b"ab"]
    store.put("k", [contents[0]])
    done = threading.Event()
    seen: set[bytes] = set()

    def read() -> None:
        while not done.is_set():
            seen.add(store.get("k"))

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(200):
        store.put("k", [contents[number % 2]])
    done.set()
    reader.join()
    assert seen <= set(contents)


def test_short_writes_and_reads_are_continued(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    whole_write, whole_read = os.writev, os.preadv
    monkeypatch.setattr(os, "writev", lambda file, views: whole_write(file, [views[0][:7]]))
    monkeypatch.setattr(os, "preadv", lambda file, views, offset: whole_read(file, [views[0][:5]], offset))
    store.put("k", [b"0123456789", b"abc", b"defghijklmnop"])
    store.read_into("k", 8, memoryview(found := bytearray(12)))
    assert bytes(found) == b"89abcdefghij"


def test_a_failed_write_leaves_only_the_old_object(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put("k", [b"old"])
    whole_close = os.close

    def close(file: int) -> None:
        # On a network filesystem, after a write that failed. The first error is the reason.
        whole_close(file)
        raise OSError(errno.EIO, "late")

    with monkeypatch.context() as broken:
        broken.setattr(os, "writev", failing(errno.ENOSPC))
        broken.setattr(os, "close", close)
        for write in (lambda: store.put("k", [b"new"]), lambda: store.create("other", b"new")):
            with pytest.raises(StorageError, match=r"(?s)/root/.*disk is full.*save elsewhere"):
                write()
    assert store.get("k") == b"old"
    assert files_below(tmp_path / "root") == {"k"}


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs /proc")
def test_a_filesystem_without_new_files_is_named() -> None:
    with pytest.raises(StorageError, match=r"No such file or directory: '/proc/ckpt.*as /proc is.*another path"):
        open_store("/proc/ckpt").put("k", [b"new"])


def test_leftovers_of_a_crash_are_no_objects_and_deleted_with_the_key(store: Store, tmp_path: Path) -> None:
    (tmp_path / "root/a").mkdir(parents=True)
    part = _local_commit.write_temp(str(tmp_path / "root/a/k"), [[memoryview(b"half")]], unique=False, sync=False)
    assert Path(part).exists()
    assert [*store.list()] == []
    assert store.list_dir("a") == ([], [])
    store.put("a/k", [b"whole"])
    assert [*store.list()] == [ObjectInfo("a/k", 5)]
    store.delete(["a/k"])
    assert not (tmp_path / "root/a").exists()


def test_long_names_fit(store: Store) -> None:
    name = "n" * 255
    store.put(name, [b"x"])
    store.create(f"folder/{name}", b"y")
    store.replace(f"folder/{name}", b"z", store.get_versioned(f"folder/{name}").version)
    assert {item.key for item in store.list()} == {name, f"folder/{name}"}


def test_only_empty_folders_are_removed(store: Store, tmp_path: Path) -> None:
    for key in ("a/b/c/1", "a/b/2", "d/3"):
        store.put(key, [b"x"])
    (tmp_path / "root/a/foreign").mkdir()
    store.delete(["a/b/c/1", "d/3"])
    assert store.list_dir() == ([], ["a"])
    assert store.list_dir("a") == ([], ["b", "foreign"])
    store.delete(["a/b/2"])
    assert store.list_dir("a") == ([], ["foreign"])
    assert (tmp_path / "root").is_dir()
    store.put("a/b/c/1", [b"again"])
    assert store.get("a/b/c/1") == b"again"


@pytest.mark.parametrize("key", ["/".join(["n" * 250] * 20), "k/below/a/file"], ids=["too long", "below a file"])
def test_impossible_keys_are_absent(store: Store, key: str) -> None:
    store.put("k", [b"x"])
    with pytest.raises(StorageError):
        store.put(key, [b"x"])
    assert store.list_dir(key) == ([], []) and [*store.list(key)] == []
    store.delete([key])
    store.sweep([key])
    assert [*store.list()] == [ObjectInfo("k", 1)]


def test_links_to_folders_are_not_followed(store: Store, tmp_path: Path) -> None:
    store.put("k", [b"x"])
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/precious").write_bytes(b"y")
    (tmp_path / "root/link").symlink_to(tmp_path / "outside")
    (tmp_path / "root/dangling").symlink_to(tmp_path / "nowhere")
    assert not any("precious" in item.key for item in store.list())
    assert {item.key for item in store.list()} >= {"k", "dangling"}


# -- conditional writes


def test_create_without_hard_links_still_has_one_winner(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "link", failing(errno.EPERM))
    store.create("k", b"first")
    with pytest.raises(ObjectExistsError):
        store.create("k", b"second")
    assert store.get("k") == b"first"
    assert files_below(tmp_path / "root") == {"k"}


def test_create_without_hard_links_removes_a_failed_write(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.writev
    calls: list[int] = []

    def second_fails(file: int, views: Any) -> int:
        calls.append(file)
        return write(file, views) if len(calls) == 1 else failing(errno.ENOSPC)()

    monkeypatch.setattr(os, "link", failing(errno.EPERM))
    monkeypatch.setattr(os, "writev", second_fails)
    with pytest.raises(StorageError, match="disk is full"):
        store.create("k", b"first")
    assert files_below(tmp_path / "root") == set()


def test_a_link_whose_answer_was_lost_is_a_success(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = os.link

    def lossy(source: str, target: str) -> None:
        link(source, target)
        raise FileExistsError(errno.EEXIST, "repeated by the NFS client")

    monkeypatch.setattr(os, "link", lossy)
    store.create("k", b"mine")
    assert store.get("k") == b"mine"
    # Even if the content is the same.
    assert _local_commit.create_file(str(tmp_path / "root/other"), b"")


def _attempt(root: str, verb: str, version: Any, number: int, gate: Any) -> bool:
    store = open_store(root)
    gate.wait()
    try:
        if verb == "create":
            store.create("k", b"by %d" % number)
        else:
            store.replace("k", b"replaced by %d" % number, version)
    except ObjectExistsError:
        return False
    return True


@pytest.mark.parametrize("verb", ["create", "replace"])
def test_processes_have_one_winner(verb: str, tmp_path: Path) -> None:
    store = open_store(tmp_path)
    version = None
    if verb == "replace":
        store.create("k", b"first")
        version = store.get_versioned("k").version
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager, context.Pool(3) as pool:
        gate = manager.Barrier(3)
        won = pool.starmap(_attempt, [(str(tmp_path), verb, version, number, gate) for number in range(3)])
    assert won.count(True) == 1
    assert store.get("k").endswith(b"by %d" % won.index(True))
    assert files_below(tmp_path) == {"k"}


def test_a_lock_that_a_crash_left_does_not_block(store: Store, tmp_path: Path) -> None:
    store.create("k", b"1")
    Path(_local_commit.helper_name(str(tmp_path / "root/k"), "lock")).touch()
    store.replace("k", b"2", store.get_versioned("k").version)
    assert files_below(tmp_path / "root") == {"k"}


def _hold_lock(path: str, held: Any, release: Any) -> None:
    with _local_commit.locked(path):
        held.set()
        release.wait(20)


def test_a_lock_that_is_not_released_is_an_error(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_local_commit, "_LOCK_SECONDS", 0.2)
    store.create("k", b"1")
    context = multiprocessing.get_context("spawn")
    held, release = context.Event(), context.Event()
    holder = context.Process(target=_hold_lock, args=(str(tmp_path / "root/k"), held, release))
    holder.start()
    assert held.wait(20)
    with pytest.raises(StorageError, match="another process held the lock"):
        store.replace("k", b"2", store.get_versioned("k").version)
    release.set()
    holder.join()
    store.replace("k", b"2", store.get_versioned("k").version)


def test_a_filesystem_without_locks_warns(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.create("k", b"1")
    monkeypatch.setattr(_local_commit.fcntl, "lockf", failing(errno.ENOLCK))
    with pytest.warns(UserWarning, match="best effort"):
        store.replace("k", b"2", store.get_versioned("k").version)
    assert store.get("k") == b"2"


# -- durability


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths that were synced, in order."""
    paths: list[str] = []
    sync = os.fsync

    def record(file: int) -> None:
        paths.append(os.readlink(f"/proc/self/fd/{file}"))
        sync(file)

    monkeypatch.setattr(os, "fsync", record)
    return paths


def test_sync_reaches_the_files_and_every_folder_that_names_them(tmp_path: Path, synced: list[str]) -> None:
    store = open_store(tmp_path / "made/too/root")
    store.put("a/b/k", [b"x"])
    store.sync(["a/b/k"])
    root = tmp_path / "made/too/root"
    expected = [root / "a/b/k", root / "a/b", root / "a", root, root.parent, root.parent.parent, tmp_path]
    assert set(synced) == {str(path) for path in expected}
    assert synced[0] == str(root / "a/b/k")


def test_conditional_puts_are_durable_on_return(tmp_path: Path, synced: list[str]) -> None:
    store = open_store(tmp_path / "root", durable=False)
    store.put("k", [b"x"])
    store.sync(["k"])
    assert synced == []
    store.create("zarr.json", b"1")
    assert synced[0].endswith(".part")
    assert {str(tmp_path / "root"), str(tmp_path)} <= set(synced[1:])
    synced.clear()
    store.replace("zarr.json", b"2", store.get_versioned("zarr.json").version)
    assert synced[0].endswith(".part")
    assert synced[1:] == [str(tmp_path / "root")]  # the folder above has not changed since


def test_a_folder_whose_sync_failed_is_synced_again(
    tmp_path: Path, synced: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, sync = open_store(tmp_path), os.fsync

    def refuse(file: int) -> None:
        if os.readlink(f"/proc/self/fd/{file}") == str(tmp_path / "a"):
            raise OSError(errno.EIO, "no")
        sync(file)

    with monkeypatch.context() as patch, pytest.raises(StorageError, match="syncing"):
        patch.setattr(os, "fsync", refuse)
        store.create("a/k", b"1")
    store.create("a/k", b"1")
    assert str(tmp_path / "a") in synced
    synced.clear()
    store.sync(["a/k"])
    assert synced == [str(tmp_path / "a/k")]
    store.delete(["a/k"])
    store.put("a/k", [b"1"])
    store.sync(["a/k"])
    assert {str(tmp_path / "a"), str(tmp_path)} <= set(synced)  # both were changed: "a" was removed, and made again


def test_a_failed_sync_is_an_error(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", failing(errno.EIO))
    store.put("k", [b"x"])
    with pytest.raises(StorageError, match="syncing"):
        store.sync(["k"])


def test_files_of_other_stores_are_synced_too(tmp_path: Path, synced: list[str]) -> None:
    open_store(tmp_path, durable=False).put("k", [b"x"])
    assert synced == []
    open_store(tmp_path).sync(["k"])
    assert synced[0] == str(tmp_path / "k")


# -- refusals of the filesystem


@pytest.mark.parametrize(
    ("number", "step"),
    [
        (errno.EACCES, "check the owner and the mode"),
        (errno.EROFS, "read-only"),
        (errno.EDQUOT, "quota"),
        (errno.EMFILE, "ulimit"),
        (errno.ESTALE, "network filesystem"),
    ],
)
def test_refusals_name_the_path_and_the_next_step(
    number: int, step: str, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put("k", [b"x"])
    monkeypatch.setattr(os, "open", failing(number))
    with pytest.raises(StorageError, match=f"(?s)root/k.*{step}") as caught:
        store.put("k", [b"x"])
    assert isinstance(caught.value.__cause__, OSError)


def test_a_file_instead_of_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    for root in (tmp_path / "file", tmp_path / "file/below"):
        with pytest.raises(StorageError, match="A file has the name of a folder"):
            open_store(root).put("k", [b"x"])
    with pytest.raises(StorageError, match="too long"):
        open_store(tmp_path / ("n" * 300)).put("k", [b"x"])


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/data/ckpt", ""),
        ("/mnt/bucket/run/k", "mountpoint-s3"),
        ("/mnt/bucket", "mountpoint-s3"),
        ("/mnt/bucket2/k", ""),
        ("/mnt/with space/k", "blobfuse2"),
        ("/mnt/with space/local/k", ""),
        ("/mnt/ssh/k", ""),
    ],
)
def test_bucket_mounts_are_recognised(path: str, kind: str) -> None:
    mountinfo = """\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 22 0:40 / /mnt/bucket rw,nosuid shared:2 - fuse mountpoint-s3 rw,user_id=0
31 22 0:41 / /mnt/with\\040space rw - fuse.blobfuse2 blobfuse2 rw
32 31 8:2 / /mnt/with\\040space/local rw - xfs /dev/sdb rw
33 22 0:42 / /mnt/ssh rw - fuse.sshfs user@host:/ rw
"""
    assert _local_commit.bucket_mount(path, mountinfo) == kind


def test_a_bucket_mount_is_refused_before_a_commit(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_local_commit, "bucket_mount", lambda path, mountinfo: "mountpoint-s3")
    with pytest.raises(StorageError, match=r"mountpoint-s3.*s3://"):
        store.create("zarr.json", b"x")
    assert files_below(tmp_path) == set()


def test_paths_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    spec = StoreSpec("run/step-1")
    monkeypatch.chdir("/")
    spec.open().put("k", [b"x"])
    assert (tmp_path / "run/step-1/k").read_bytes() == b"x"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert StoreSpec("~/home").url == str(tmp_path / "home")
