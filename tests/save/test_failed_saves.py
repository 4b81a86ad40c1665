"""A failed save removes what it wrote, unless it may be committed. Checks what stays, and what ``recover`` reports."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from harness.crashes import Place, all_files, held, state
from harness.faulty_store import FAIL, FAIL_AFTER, Call, Fault, FaultyStore
from harness.merging import MergingOptions
from harness.one_at_a_time import AskedStore, Op, Shelf
from harness.ranks import all_ranks_raise, run_ranks
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import zarrckpt
from zarrckpt import ZarrSavePlanner, ZarrStorageWriter
from zarrckpt._commit import shared_storage
from zarrckpt._store import _local_commit
from zarrckpt.cli import main

ROOT = "zarr.json"


def left(url: str | Path) -> set[str]:
    """Return the files below a url except claim and markers."""
    files = {str(path.relative_to(url)) for path in Path(url).rglob("*") if path.is_file()}
    return {name for name in files if not (name.startswith("@zarrckpt/") and name.endswith("zarr.json"))} | {
        name for name in files if name.count("/") > 2 and name.startswith("@zarrckpt/")
    }


# -- a full disk


def _weights(mib: float) -> dict[str, Any]:
    return {f"w{number}": torch.rand(int(mib * 2**18) // 8) for number in range(8)}


def test_a_full_disk_is_free_again(small_disk: Path) -> None:
    run = small_disk / "run"
    zarrckpt.save(_weights(1), run / "step-1")
    for _ in range(2):
        with pytest.raises(zarrckpt.StorageError, match="disk is full"):
            zarrckpt.save(_weights(5), run / "step-2")
        assert not left(run / "step-2")
        with pytest.raises(zarrckpt.StorageError, match="disk is full"):
            zarrckpt.save(_weights(5), run / "step-1", overwrite=True)
        assert zarrckpt.open(run / "step-1").verify()
    found = CliRunner().invoke(main, ["doctor", str(run / "step-2")]).stdout
    assert "failed" in found and "could still commit" not in found
    assert zarrckpt.recover(run).kept == ()
    zarrckpt.save(_weights(1), run / "step-1", overwrite=True)
    zarrckpt.save(_weights(1), run / "step-2")
    assert zarrckpt.latest(run) == str(run / "step-2")


def test_a_checkpoint_on_a_full_disk_can_be_removed(small_disk: Path) -> None:
    zarrckpt.save(_weights(1), small_disk / "a")
    filler = os.open(small_disk / "filler", os.O_WRONLY | os.O_CREAT)
    with pytest.raises(OSError):
        while True:
            os.write(filler, bytes(4096))
    os.close(filler)
    assert zarrckpt.remove(small_disk / "a") > 8
    assert not (small_disk / "a").exists()


def test_a_disk_full_at_the_commit_is_freed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store has answered: nothing was committed, and nothing will be."""
    create, replace = _local_commit.create_file, _local_commit.replace_file

    def full(path: str, *more: Any) -> bool:
        if path == str(tmp_path / "a" / ROOT):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        return (create if len(more) == 1 else replace)(path, *more)

    monkeypatch.setattr(_local_commit, "create_file", full)
    monkeypatch.setattr(_local_commit, "replace_file", full)
    with pytest.raises(zarrckpt.StorageError, match="disk is full"):
        zarrckpt.save(state(1), tmp_path / "a")
    assert not left(tmp_path / "a")
    monkeypatch.undo()
    zarrckpt.save(state(1), tmp_path / "a")
    before = left(tmp_path / "a")
    monkeypatch.setattr(_local_commit, "replace_file", full)
    with pytest.raises(zarrckpt.StorageError, match="disk is full"):
        zarrckpt.save(state(2), tmp_path / "a", overwrite=True)
    assert left(tmp_path / "a") == before and held(Place(str(tmp_path / "a"))) == 1


# -- one process, every operation


@pytest.mark.parametrize("by_dcp", [False, True])
@pytest.mark.parametrize("fault", [FAIL, FAIL_AFTER])
def test_objects_of_a_save_that_fails_before_the_root_are_removed(by_dcp: bool, fault: Fault, tmp_path: Path) -> None:
    place, number = Place(str(tmp_path / "a"), durable=False), 0
    place.save(1)
    before = left(place.url)
    while True:
        writes = 0

        def rule(call: Call, number: int = number) -> Fault | None:
            nonlocal writes
            writes += call.verb in ("put", "sync")
            return fault if writes == number + 1 and call.verb in ("put", "sync") else None

        store = FaultyStore(place.url, rule, durable=False)
        try:
            if by_dcp:
                writer = zarrckpt.ZarrStorageWriter(store, overwrite=True)
                dcp.save(state(2), storage_writer=writer, no_dist=True)
            else:
                zarrckpt.save(state(2), store, overwrite=True)
        except (zarrckpt.CheckpointError, dcp.api.CheckpointException):
            assert held(place) == 1 and left(place.url) == before, store.calls
            assert all_files(place.url)[1] == set()
            number += 1
        else:
            break
    assert number > 10 and zarrckpt.open(place.url)["step"] == 2


class LostAnswer:
    """A rule of FaultyStore: the put of the root fails, and so does each read that would find out."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        self.sent = False
        """Whether the put was made."""

    def __call__(self, call: Call) -> Fault | None:
        if call.key == ROOT and call.verb == "create":
            self.sent = True
            return self.fault
        return FAIL if self.sent and call.verb == "get" else None


@pytest.mark.parametrize("fault", [FAIL, FAIL_AFTER])
def test_no_object_is_removed_after_the_root_was_sent(fault: Fault, tmp_path: Path) -> None:
    """The answer to the put is lost, and the read that would find out fails."""
    rule = LostAnswer(fault)
    store = FaultyStore(tmp_path / "a", rule)
    with pytest.raises(zarrckpt.StorageError):
        zarrckpt.save(state(1), store)
    assert rule.sent and not [call for call in store.calls if call.verb == "delete"]
    assert held(Place(str(tmp_path / "a"))) == (1 if fault is FAIL_AFTER else None)
    report = zarrckpt.recover(tmp_path / "a")
    assert len(report.kept) == (0 if fault is FAIL_AFTER else 1) and report.objects == 0


def test_a_late_root_still_commits_a_whole_checkpoint() -> None:
    """Its first put is under way while its repeats are refused. The base still exists, so the put will succeed."""
    shelf, sent = Shelf({}), []

    def ask(op: Op) -> Any:
        if op.verb == "replace" and op.key == ROOT:
            sent.append(op)
            return False
        return shelf._answer(op)

    zarrckpt.save(state(1), shelf.store)
    with pytest.raises(zarrckpt.StorageError):
        zarrckpt.save(state(2), AskedStore(ask), overwrite=True)
    assert zarrckpt.open(shelf.store)["step"] == 1
    assert shelf._answer(sent[0])
    assert zarrckpt.open(shelf.store)["step"] == 2 and zarrckpt.open(shelf.store).verify()


def test_a_root_whose_folder_was_not_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The root exists, but its name may not survive a power cut. So the folder is synced before the save succeeds."""
    folder, sync, refused, synced = tmp_path / "a", os.fsync, [], []

    def once(file: int) -> None:
        if os.readlink(f"/proc/self/fd/{file}") == str(folder) and (folder / ROOT).exists():
            if not refused:
                refused.append(file)
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            synced.append(file)
        sync(file)

    monkeypatch.setattr(os, "fsync", once)
    zarrckpt.save(state(1), folder)
    assert refused and synced and held(Place(str(folder))) == 1


def test_doctor_and_open_after_a_save_that_failed(tmp_path: Path) -> None:
    def rule(call: Call) -> Fault | None:
        return FAIL if call.verb == "put" and "/checksums/" in call.key else None

    with pytest.raises(zarrckpt.StorageError):
        zarrckpt.save(state(1), FaultyStore(tmp_path / "a", rule))
    with pytest.raises(zarrckpt.CheckpointNotFoundError) as raised:
        zarrckpt.open(tmp_path / "a")
    assert "failed" in str(raised.value) and "running" not in str(raised.value)
    found = CliRunner().invoke(main, ["doctor", str(tmp_path / "a")])
    assert found.exit_code == 0 and "failed" in found.stdout
    assert [line.split()[4:5] for line in found.stdout.splitlines() if "run: " in line] == [["--stopped"]]
    # Objects that a rank writes after it was cut off.
    (tmp_path / "a" / "w").mkdir()
    (tmp_path / "a" / "w" / "c.0").write_bytes(b"late")
    found = CliRunner().invoke(main, ["doctor", str(tmp_path / "a")])
    assert found.exit_code == 1 and f"zarrckpt recover {tmp_path / 'a'}\n" in found.stdout
    assert zarrckpt.recover(tmp_path / "a").objects == 1
    assert CliRunner().invoke(main, ["doctor", str(tmp_path / "a")]).exit_code == 0
    zarrckpt.recover(tmp_path / "a", stopped=True)
    assert CliRunner().invoke(main, ["doctor", str(tmp_path / "a")]).stdout.endswith("Nothing to do.\n")


def test_recover_removes_leftovers_of_a_failed_save(tmp_path: Path) -> None:
    """The save's own deletions failed as well."""
    failed = []

    def rule(call: Call) -> Fault | None:
        failed.extend([call] if call.verb == "put" and "/checksums/" in call.key else [])
        return FAIL if failed and call.verb in ("put", "delete") else None

    with pytest.raises(zarrckpt.StorageError):
        zarrckpt.save(state(1), FaultyStore(tmp_path / "a", rule))
    assert left(tmp_path / "a")
    zarrckpt.save(state(2), tmp_path / "a")
    zarrckpt.recover(tmp_path / "a")
    assert held(Place(str(tmp_path / "a"))) == 2


def test_an_unreachable_store_gets_only_two_more_requests(tmp_path: Path) -> None:
    """The error must not wait for many requests that each run into their timeout."""
    gone: list[Call] = []

    def rule(call: Call) -> Fault | None:
        gone.extend([call] if gone or "/c." in call.key else [])
        return FAIL if gone else None

    store = FaultyStore(tmp_path / "a", rule)
    store.max_concurrency = 1
    with pytest.raises(zarrckpt.StorageError, match="put"):
        zarrckpt.save(state(1), store)
    # The failed put, the read whether another save has committed, and the deletion.
    assert sorted(call.verb for call in gone) == ["delete", "get", "put"]
    assert len(zarrckpt.recover(tmp_path / "a").kept) == 1


# -- several ranks


def _state(value: float) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.full((64 * dist.get_world_size(), 4096), value)
    return {f"w{number}": distribute_tensor(whole, mesh, [Shard(0)]) for number in range(4)} | {"step": int(value)}


def _save_with_a_limit(url: str, failing: int, small: bool) -> None:
    """Limit one rank's files to 64 KiB. The kernel refuses more, as a full quota does."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == failing:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        options = MergingOptions(min_piece_bytes=1 << 30, fill_bytes=1 << 20) if small else None
        zarrckpt.save(_state(2), url, overwrite=True, options=options)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def _save(url: str, value: float) -> None:
    zarrckpt.save(_state(value), url, overwrite=True)


@pytest.mark.parametrize(("ranks", "failing", "small"), [(2, 1, True), (4, 0, False), (4, 2, True)])
def test_one_rank_that_fails(ranks: int, failing: int, small: bool, tmp_path: Path) -> None:
    """With separate chunks, and with pieces that move between the ranks."""
    url = str(tmp_path / "a")
    for before in (None, 1):
        if before is not None:
            run_ranks(_save, url, 1.0, world_size=ranks)
        kept = left(url) if before is not None else set()
        all_ranks_raise(zarrckpt.StorageError, _save_with_a_limit, url, failing, small, world_size=ranks)
        assert left(url) == kept
        report = zarrckpt.recover(url)
        assert report.kept == ()
    assert zarrckpt.open(url)["step"] == 1 and zarrckpt.open(url).verify()
    run_ranks(_save, url, 3.0, world_size=ranks)
    assert zarrckpt.open(url)["step"] == 3


def _lose_the_answer(url: str, fault: Fault) -> list[str]:
    store = FaultyStore(url, LostAnswer(fault))
    try:
        zarrckpt.save(_state(1), store)
    except zarrckpt.StorageError:
        return [call.key for call in store.calls if call.verb == "delete"]
    raise AssertionError("it did not fail")


@pytest.mark.parametrize("fault", [FAIL, FAIL_AFTER])
def test_a_commit_whose_answer_is_lost_deletes_nothing_on_any_rank(fault: Fault, tmp_path: Path) -> None:
    assert run_ranks(_lose_the_answer, str(tmp_path / "a"), fault, world_size=2) == [[], []]
    assert len(left(tmp_path / "a")) > 8
    if fault is FAIL_AFTER:
        assert zarrckpt.open(tmp_path / "a").verify()
    else:
        assert len(zarrckpt.recover(tmp_path / "a").kept) == 1


def _save_by_dcp(url: str, failing: int) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == failing:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        dcp.save(_state(2), storage_writer=zarrckpt.ZarrStorageWriter(url, options=MergingOptions(min_piece_bytes=0)))
    except dcp.api.CheckpointException as err:
        assert sorted(err.failures) == [failing]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_rank_that_fails_under_dcp_removes_its_objects(tmp_path: Path) -> None:
    """DCP does not notify the others' writers. The next save deletes their objects."""
    url = tmp_path / "a"
    run_ranks(_save_by_dcp, str(url), 1, world_size=2)
    assert {path.name for path in url.rglob("w*/c.*")} == {"c.0.0"}
    run_ranks(_save, str(url), 3.0, world_size=2)
    assert zarrckpt.open(url).verify()


class _LateStore(FaultyStore):
    """A network filesystem that shows a new file late."""

    looks = 0

    def read_into(self, key: str, byte_offset: int, buffer: memoryview) -> None:
        self.looks += 1
        if self.looks < 4:
            raise zarrckpt.ObjectNotFoundError(key)
        super().read_into(key, byte_offset, buffer)


class _OwnDisk(FaultyStore):
    """The disk of one host, at a path that exists on all hosts."""

    def __init__(self, disk: Path) -> None:
        super().__init__(disk)
        self.url = "/mnt/disk/x.zarr.zip" if self.is_archive else "/mnt/disk"


def _save_to_own_disks(folder: str) -> list[str]:
    """Save with a different disk on each rank at one path, and a different server on each rank at one url."""
    rank = dist.get_rank()
    disk, state = Path(folder) / f"disk{rank}", {"w": torch.ones(1 << 20), "step": 1}
    errors = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_storage, "PATIENCE_SECONDS", 0.3)
        patch.setattr("socket.gethostname", lambda: f"host-{rank}")
        manager = zarrckpt.CheckpointManager("memory://run", signals=(), save_every=1)

        def by_dcp() -> None:
            dcp.save(state, storage_writer=ZarrStorageWriter("memory://dcp"), planner=ZarrSavePlanner())

        def by_manager() -> None:
            manager.step(1, state)
            manager.wait()

        calls: dict[str, Callable[[], object]] = {
            "/mnt/disk": lambda: zarrckpt.save(state, _OwnDisk(disk)),
            "/mnt/disk/x.zarr.zip": lambda: zarrckpt.save(state, _OwnDisk(disk / "x.zarr.zip")),
            "memory://run": by_manager,
            "memory://dcp": by_dcp,
        }
        for url, call in calls.items():
            with pytest.raises((zarrckpt.StorageError, CheckpointException)) as caught:
                call()
            text = str(caught.value)
            assert "host host-1" in text and "host host-0" in text and url in text, text
            errors.append(type(caught.value).__name__)
        manager.close()
        assert manager.steps() == [] and (rank == 0 or not disk.exists())
        patch.setattr(shared_storage, "PATIENCE_SECONDS", 60)
        late = _LateStore(Path(folder) / "late")
        assert zarrckpt.save(state, late).objects > 0 and late.looks == (0 if rank == 0 else 4)
    return errors


def test_a_save_to_separate_disks_of_hosts_names_them(tmp_path: Path) -> None:
    for errors in run_ranks(_save_to_own_disks, str(tmp_path), world_size=2):
        assert errors == ["StorageError"] * 3 + ["CheckpointException"]
    with pytest.raises(zarrckpt.CheckpointNotFoundError):
        zarrckpt.open(tmp_path / "disk0")
    assert zarrckpt.open(tmp_path / "late").verify().damages == ()
