"""Removing a checkpoint: recorded first, and finished by any later call. Readers and saves in the meantime."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from harness.crashes import all_files
from harness.faulty_store import FAIL, FAIL_AFTER, STOP, Call, Fault, FaultyStore, Stopped
from harness.interleaving import Agent, Exploration, Faults, nothing_quiet
from harness.internals import Store, examine, open_store
from harness.one_at_a_time import Content, Judge, Shelf, committed_first, one_thread, read, running

import zarrckpt
from zarrckpt.cli import main

RECORD = "@zarrckpt/removed/zarr.json"
STATE = {"w": torch.arange(4000.0), "blob": b"x" * 10, "step": 7}


def crash_after(verb: str, key: str, url: Path) -> None:
    """Run a removal that ends after one operation on a key."""
    done = []

    def rule(call: Call) -> Fault | None:
        if done:
            return STOP
        done.extend([call] if call.verb == verb and call.key == key else [])
        return None

    with pytest.raises(Stopped):
        zarrckpt.remove(FaultyStore(url, rule))
    assert done


# -- the folder


def test_a_removed_checkpoint_leaves_no_folder(tmp_path: Path) -> None:
    zarrckpt.save(STATE, tmp_path / "run" / "step-1")
    assert zarrckpt.remove(tmp_path / "run" / "step-1") > 5
    assert (tmp_path / "run").is_dir() and not (tmp_path / "run" / "step-1").exists()
    assert zarrckpt.latest(tmp_path / "run") is None


def test_links_and_folders_with_other_files_stay(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    zarrckpt.save(STATE, tmp_path / "link")
    zarrckpt.remove(tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and all_files(tmp_path / "real") == (set(), set())
    assert (tmp_path / "real").is_dir()


@pytest.mark.filterwarnings("ignore:.* best effort:UserWarning")
@pytest.mark.parametrize("folder", ["", "w", "@zarrckpt/inner"])
@pytest.mark.parametrize("backend", ["local", "fsspec"])
def test_hidden_files_of_nfs_and_empty_folders_are_ignored(backend: str, folder: str, tmp_path: Path) -> None:
    """If a removed file is open, an NFS client renames it until it is closed."""
    run = tmp_path / "run"
    url, options = run / "step-1", {"storage_options": {"backend": "fsspec"} if backend == "fsspec" else None}
    place = str(url) if backend == "local" else f"file://{url}"
    silly = url / folder / ".nfs000000000123abcd00000001"
    zarrckpt.save(STATE, place, **options)
    silly.parent.mkdir(exist_ok=True)
    silly.write_text("still open")
    zarrckpt.save(STATE, place, overwrite=True, **options)
    zarrckpt.save(STATE, place, overwrite=True, **options)
    assert examine(place, **options).findings == () and zarrckpt.recover(place, stopped=True, **options).objects == 0
    assert zarrckpt.open(place, **options).verify() and zarrckpt.remove(place, **options) > 5
    assert all_files(url)[0] == {silly.relative_to(url).as_posix()} and silly.read_text() == "still open"
    assert zarrckpt.latest(run) is None and not zarrckpt.recover(run).objects
    zarrckpt.save(STATE, place, **options)
    zarrckpt.remove(place, **options)
    silly.unlink()
    (url / "somebody" / "made").mkdir(parents=True, exist_ok=True)
    assert zarrckpt.latest(run) is None and examine(place, **options).empty
    zarrckpt.save(STATE, place, **options)
    zarrckpt.save(STATE, place, overwrite=True, **options)
    zarrckpt.remove(place, **options)
    assert url.exists() == (backend == "fsspec")


SYSTEM_FILES = (".DS_Store", "._zarr.json", "Thumbs.db", "desktop.ini")


@pytest.mark.filterwarnings("ignore:.* best effort:UserWarning")
@pytest.mark.parametrize("backend", ["local", "fsspec", "s3"])
def test_files_of_operating_systems_are_ignored_and_deleted(
    backend: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    run, options = f"file://{tmp_path}/run", {}
    if backend == "s3":
        bucket = request.getfixturevalue("s3_stub").bucket()
        run, options = bucket.url("run"), bucket.storage_options
    elif backend == "fsspec":
        options = {"backend": "fsspec"}
    store = open_store(run, storage_options=options)
    args: dict[str, Any] = {"storage_options": options}

    store.put("step-1/.DS_Store", [b"Bud1"])
    for overwrite in (False, True):
        zarrckpt.save(STATE, f"{run}/step-1", overwrite=overwrite, **args)
        _add_system_files(store, *(f"step-1/@zarrckpt{name}" for name in ("", "/pins", "/removed")))
    store.put("._step-1.zarr.zip", [b"\0\5\26\7"])
    store.put(".step-2.zarr.zip.x7.zarr.zip", [b"PK"])  # as rsync names an unfinished copy
    assert (
        zarrckpt.latest(run, **args) == f"{run}/step-1".removeprefix("file://")
        and examine(f"{run}/step-1", **args).findings == ()
    )
    assert zarrckpt.open(f"{run}/step-1", **args).verify() and not zarrckpt.recover(run, stopped=True, **args).error
    zarrckpt.remove(f"{run}/step-1", **args)
    assert {info.key for info in store.list() if info.key.startswith("step-1")} == set()
    assert zarrckpt.latest(run, **args) is None

    # A save that was killed before its commit.
    zarrckpt.save(STATE, f"{run}/step-1", **args)
    _add_system_files(store, "step-1/@zarrckpt/pins")
    store.delete(["step-1/zarr.json"])
    zarrckpt.recover(f"{run}/step-1", stopped=True, **args)
    assert {info.key for info in store.list() if info.key.startswith("step-1")} == set()
    if backend == "local":
        assert not (tmp_path / "run/step-1").exists()


def _add_system_files(store: Store, *folders: str) -> None:
    for folder in {info.key.rpartition("/")[0] for info in store.list()}.union(folders):
        for name in SYSTEM_FILES:
            store.put(f"{folder}/{name}".lstrip("/"), [b"\0\5\26\7"])


def test_an_export_to_dcp_ignores_hidden_files_of_nfs(tmp_path: Path) -> None:
    zarrckpt.save(STATE, tmp_path / "a")
    (tmp_path / "dcp" / "empty").mkdir(parents=True)
    (tmp_path / "dcp" / ".nfs000000000123abcd00000001").write_text("still open")
    for overwrite in (False, True):
        zarrckpt.to_dcp(tmp_path / "a", tmp_path / "dcp", overwrite=overwrite)
        (tmp_path / "dcp" / ".nfs000000000123abcd00000002").write_text("still open")
    assert (tmp_path / "dcp" / ".metadata").exists()


def test_a_mount_point_stays(small_disk: Path) -> None:
    zarrckpt.save(STATE, small_disk)
    zarrckpt.remove(small_disk)
    assert os.path.ismount(small_disk) and all_files(small_disk) == (set(), set())


# -- readers


def test_readers_of_a_removed_checkpoint_get_an_error(tmp_path: Path) -> None:
    zarrckpt.save(STATE, tmp_path / "a")
    ckpt, other = zarrckpt.open(tmp_path / "a"), zarrckpt.open(tmp_path / "a")
    array = other["w"]
    zarrckpt.remove(tmp_path / "a")
    actions: list[Callable[[], Any]] = [
        lambda: ckpt["blob"],
        lambda: ckpt.read(["w"]),
        lambda: array[:10],
        lambda: ckpt.verify(),
        lambda: ckpt.stats(),
        lambda: ckpt.load(),
        lambda: zarrckpt.copy(ckpt, tmp_path / "b"),
    ]
    for action in actions:
        with pytest.raises(zarrckpt.CheckpointRemovedError, match="was removed"):
            action()
    with pytest.raises(zarrckpt.CheckpointNotFoundError):
        zarrckpt.open(tmp_path / "a")


def test_a_lost_root_is_damage_not_a_removal(tmp_path: Path) -> None:
    zarrckpt.save(STATE, tmp_path / "a")
    ckpt = zarrckpt.open(tmp_path / "a")
    (tmp_path / "a" / "zarr.json").unlink()
    (tmp_path / "a" / "w" / "c.0").unlink()
    with pytest.raises(zarrckpt.CorruptCheckpointError):
        ckpt.read(["w"])
    assert {damage.key for damage in ckpt.verify().damages} == {"zarr.json", "w/c.0"}


# -- an interrupted removal


@pytest.mark.parametrize("finish", [zarrckpt.recover, zarrckpt.remove])
def test_an_interrupted_removal_is_named_and_can_be_finished(finish: Callable[..., Any], tmp_path: Path) -> None:
    zarrckpt.save(STATE, tmp_path / "a")
    ckpt = zarrckpt.open(tmp_path / "a")
    crash_after("delete", "zarr.json", tmp_path / "a")
    with pytest.raises(zarrckpt.CheckpointNotFoundError, match=r"is being removed.*zarrckpt recover"):
        zarrckpt.open(tmp_path / "a")
    for overwrite in (False, True):
        with pytest.raises(zarrckpt.CheckpointRemovedError, match="zarrckpt recover"):
            zarrckpt.save(STATE, tmp_path / "a", overwrite=overwrite)
    found = CliRunner().invoke(main, ["doctor", str(tmp_path / "a")])
    assert found.exit_code == 1 and "removal" in found.stdout and f"zarrckpt recover {tmp_path / 'a'}\n" in found.stdout
    (tmp_path / "a" / "w" / "c.0").unlink()
    with pytest.raises(zarrckpt.CheckpointRemovedError):
        ckpt.read(["w"])
    finish(tmp_path / "a")
    assert not (tmp_path / "a").exists()
    zarrckpt.save(STATE, tmp_path / "a")
    assert zarrckpt.open(tmp_path / "a").info.tree == ""


def test_recover_finishes_a_recorded_removal(tmp_path: Path) -> None:
    zarrckpt.save(STATE, tmp_path / "a")
    crash_after("create", RECORD, tmp_path / "a")
    assert zarrckpt.open(tmp_path / "a").verify()
    with pytest.raises(zarrckpt.CheckpointRemovedError):
        zarrckpt.save(STATE, tmp_path / "a", overwrite=True)
    assert zarrckpt.recover(tmp_path / "a").objects > 5
    assert not (tmp_path / "a").exists()


def test_a_root_that_cannot_be_deleted_leaves_the_checkpoint(tmp_path: Path) -> None:
    def rule(call: Call) -> Fault | None:
        return FAIL if call.verb == "delete" and call.key == "zarr.json" else None

    zarrckpt.save(STATE, tmp_path / "a")
    with pytest.raises(zarrckpt.StorageError):
        zarrckpt.remove(FaultyStore(tmp_path / "a", rule))
    # No call treats it as a checkpoint to be removed.
    assert zarrckpt.recover(tmp_path / "a").objects == 0
    zarrckpt.save(STATE, tmp_path / "a", overwrite=True)
    assert zarrckpt.open(tmp_path / "a").verify()


def test_a_root_deletion_without_an_answer_can_be_repeated(tmp_path: Path) -> None:
    def rule(call: Call) -> Fault | None:
        return FAIL_AFTER if call.verb == "delete" and call.key == "zarr.json" else None

    zarrckpt.save(STATE, tmp_path / "a")
    with pytest.raises(zarrckpt.StorageError):
        zarrckpt.remove(FaultyStore(tmp_path / "a", rule))
    assert zarrckpt.recover(tmp_path / "a").objects > 5
    assert not (tmp_path / "a").exists()


def test_a_store_without_puts_still_removes(tmp_path: Path) -> None:
    """A server whose quota is used up: a removal frees space."""
    zarrckpt.save(STATE, tmp_path / "a")
    fails = FaultyStore(tmp_path / "a", lambda call: FAIL if call.verb in ("put", "create", "replace") else None)
    assert zarrckpt.remove(fails) > 5
    assert not (tmp_path / "a").exists()


# -- at the same time as others


def test_a_removal_stops_if_another_one_has_finished(tmp_path: Path) -> None:
    """``recover`` continues a running removal, and waits. The removal ends, and the next save begins and commits."""
    number = 0
    while True:
        url, asked = tmp_path / str(number), 0
        zarrckpt.save(STATE, url)
        crash_after("create", RECORD, url)

        def rule(call: Call, url: Path = url, number: int = number) -> None:
            nonlocal asked
            asked += call.verb != "delete"
            if call.verb != "delete" and asked == number + 1:
                with suppress(zarrckpt.CheckpointNotFoundError):
                    zarrckpt.remove(url)
                zarrckpt.save({**STATE, "step": 8}, url)

        zarrckpt.recover(FaultyStore(url, rule))
        if asked <= number:
            break
        assert zarrckpt.open(url)["step"] == 8 and zarrckpt.open(url).verify(), f"before request {number}"
        number += 1
    assert number > 20


def test_a_save_that_continues_after_a_removal(tmp_path: Path) -> None:
    """That is against the rules. Still, no later save finds its objects."""
    removed: list[int] = []

    def rule(call: Call) -> None:
        if call.verb == "put" and call.key.startswith("@zarrckpt/") and not removed:
            removed.append(zarrckpt.remove(tmp_path / "a"))

    zarrckpt.save(STATE, FaultyStore(tmp_path / "a", rule))
    assert removed == [1] and zarrckpt.open(tmp_path / "a").info.tree == ""

    def crash(call: Call) -> Fault | None:
        return STOP if call.verb == "replace" and call.key == "zarr.json" else None

    with pytest.raises(Stopped):
        zarrckpt.save({**STATE, "w": torch.zeros(4000)}, FaultyStore(tmp_path / "a", crash), overwrite=True)
    # Only its claim is gone, and the crashed save wrote elsewhere.
    found = zarrckpt.open(tmp_path / "a")
    assert found["w"][-1] == 3999 and {damage.key for damage in found.verify().damages} == {"@zarrckpt/zarr.json"}
    zarrckpt.save(STATE, tmp_path / "a", overwrite=True)
    assert zarrckpt.open(tmp_path / "a").verify()


def test_a_late_marker_names_no_object_of_a_later_save(tmp_path: Path) -> None:
    removed: list[int] = []

    def fail(call: Call) -> Fault | None:
        if call.verb == "put" and call.key == "w/c.0":
            return FAIL
        # The marker is put once more, with "failed".
        if call.verb == "put" and call.key.count("/") == 2 and (tmp_path / "a" / call.key).exists():
            removed.append(zarrckpt.remove(tmp_path / "a"))
        return None

    with pytest.raises(zarrckpt.StorageError):
        zarrckpt.save(STATE, FaultyStore(tmp_path / "a", fail))
    assert removed

    def recover(call: Call) -> None:
        if call.verb == "create" and call.key == "zarr.json":
            assert zarrckpt.recover(tmp_path / "a").objects == 0

    zarrckpt.save(STATE, FaultyStore(tmp_path / "a", recover))
    assert zarrckpt.recover(tmp_path / "a").objects == 0 and zarrckpt.open(tmp_path / "a").verify()


@pytest.mark.parametrize("over", [False, True])
@pytest.mark.parametrize("at", range(8))
def test_recover_keeps_concurrent_saves(over: bool, at: int, tmp_path: Path) -> None:
    """While it reads, one save commits. The next one begins, and continues when ``recover`` has ended."""
    url, asked = tmp_path / "a", 0
    if over:
        zarrckpt.save({**STATE, "step": 0}, url)
    else:
        url.mkdir()
    reports: list[Any] = []

    def second(call: Call) -> None:
        if call.verb == "replace" and call.key == "zarr.json":
            begun.set()
            ended.wait(60)

    def first(call: Call) -> None:
        nonlocal asked
        asked += 1
        if asked == at + 1:
            zarrckpt.save({**STATE, "step": 1}, url, overwrite=True)
            save.start()
            begun.wait(60)

    def run_second() -> None:
        zarrckpt.save({**STATE, "step": 2}, FaultyStore(url, second), overwrite=True)

    begun, ended, save = threading.Event(), threading.Event(), threading.Thread(target=run_second)
    reports.append(zarrckpt.recover(FaultyStore(url, first)))
    ended.set()
    save.join()
    assert zarrckpt.open(url)["step"] == 2 and zarrckpt.open(url).verify()


# -- every interleaving


def _remove(store: Store, number: int = 1) -> str:
    running.number = number
    try:
        zarrckpt.remove(store)
    except zarrckpt.CheckpointNotFoundError:
        return "nothing"
    return "removed"


def _remove_too(store: Store) -> str:
    return _remove(store, 2)


def _recover(store: Store) -> str:
    zarrckpt.recover(store)
    return "recovered"


def _read(store: Store) -> str:
    try:
        return read(store)
    except zarrckpt.CheckpointRemovedError:
        return "removed"


def _can_be_finished(content: Content) -> None:
    """Check that a save is refused or begins on nothing, and that one more removal, or ``recover``, leaves nothing."""
    recorded = RECORD in content
    for finish in (zarrckpt.remove, zarrckpt.recover) if recorded else (zarrckpt.remove,):
        shelf = Shelf(content)
        if recorded:
            with pytest.raises(zarrckpt.CheckpointRemovedError):
                zarrckpt.save({"step": 1}, shelf.store, overwrite=True)
            assert shelf.content == content
        if content:
            finish(shelf.store)
        assert not shelf.content


@pytest.mark.parametrize(
    "codes", [(_remove, _remove_too), (_remove, _recover), (_remove, _read), (_remove, _read, _read)]
)
def test_removals_and_readers_in_every_interleaving(codes: tuple[Callable[[Store], str], ...]) -> None:
    """Any of them may stop at any time: the stored objects can then be removed."""
    judge = Judge()
    with one_thread():
        base = committed_first()
        agents = [Agent(code) for code in codes]
        # Removals take some forty requests each, so only those with at most two interruptions.
        bound = None if _read in codes else 2
        exploration = Exploration(agents, base, Faults(), nothing_quiet, bound)

        def at_end(content: Content, ends: list[str]) -> None:
            assert not content
            assert "removed" in ends and {*ends} <= {"removed", "nothing", "recovered", "read 0"}

        def check(content: Content) -> None:
            judge.committed(content)
            _can_be_finished(content)

        found = exploration.run(check, at_end, 10**6)
    assert found.complete and found.states > 300
    assert {end for ends in found.outcomes for end in ends} >= {"removed"}


def test_remove_deletes_a_crashed_save(tmp_path: Path) -> None:
    def rule(call: Call) -> Fault | None:
        return STOP if call.verb == "create" and call.key == "zarr.json" else None

    with pytest.raises(Stopped):
        zarrckpt.save(STATE, FaultyStore(tmp_path / "a", rule))
    assert zarrckpt.remove(tmp_path / "a") > 5
    assert not (tmp_path / "a").exists()
