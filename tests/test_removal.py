"""Removing a checkpoint: recorded first, finished by whoever comes next; what readers and saves see meanwhile."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from crashes import all_files
from interleaving import Agent, Exploration, Faults, nothing_quiet
from one_at_a_time import Content, Judge, Shelf, committed_first, one_thread, read

import zarrckpt
from zarrckpt._store import Store
from zarrckpt.cli import main
from zarrckpt.testing import FAIL, STOP, Call, Fault, FaultyStore, Stopped

RECORD = "@zarrckpt/removed/zarr.json"
STATE = {"w": torch.arange(4000.0), "blob": b"x" * 10, "step": 7}


def crash_after(verb: str, key: str, url: Path) -> None:
    """A removal that ends after it has done something to a key."""
    done = []

    def rule(call: Call) -> Fault | None:
        if done:
            return STOP
        done.extend([call] if call.verb == verb and call.key == key else [])
        return None

    with pytest.raises(Stopped):
        zarrckpt.remove(store=FaultyStore(url, rule))
    assert done


# -- the folder


def test_a_removed_checkpoint_leaves_no_folder(tmp_path: Path) -> None:
    zarrckpt.save(STATE, tmp_path / "run" / "step-1")
    assert zarrckpt.remove(tmp_path / "run" / "step-1") > 5
    assert (tmp_path / "run").is_dir() and not (tmp_path / "run" / "step-1").exists()
    assert zarrckpt.latest(tmp_path / "run") is None


def test_a_folder_stays_that_is_a_link_or_holds_something(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    zarrckpt.save(STATE, tmp_path / "link")
    zarrckpt.remove(tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and all_files(tmp_path / "real") == (set(), set())
    assert (tmp_path / "real").is_dir()
    # What an NFS client leaves of a file that was removed while somebody had it open.
    zarrckpt.save(STATE, tmp_path / "nfs")
    silly = tmp_path / "nfs" / ".nfs000000000123abcd00000001"
    silly.write_text("still open")
    zarrckpt.save(STATE, tmp_path / "nfs", overwrite=True)
    zarrckpt.remove(tmp_path / "nfs")
    assert silly.exists() and all_files(tmp_path / "nfs") == ({silly.name}, set())
    zarrckpt.save(STATE, tmp_path / "nfs")


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    """A folder on which a filesystem is mounted."""
    folder = tmp_path / "mounted"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("this process may not mount")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def test_a_mount_stays(mounted: Path) -> None:
    zarrckpt.save(STATE, mounted)
    zarrckpt.remove(mounted)
    assert os.path.ismount(mounted) and all_files(mounted) == (set(), set())


# -- readers


def test_who_holds_a_removed_checkpoint_is_told(tmp_path: Path) -> None:
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
        lambda: ckpt.copy_to(tmp_path / "b"),
    ]
    for action in actions:
        with pytest.raises(zarrckpt.CheckpointRemovedError, match="was removed"):
            action()
    with pytest.raises(zarrckpt.CheckpointNotFoundError):
        zarrckpt.open(tmp_path / "a")


def test_a_root_that_is_lost_is_damage_and_no_removal(tmp_path: Path) -> None:
    zarrckpt.save(STATE, tmp_path / "a")
    ckpt = zarrckpt.open(tmp_path / "a")
    (tmp_path / "a" / "zarr.json").unlink()
    (tmp_path / "a" / "w" / "c.0").unlink()
    with pytest.raises(zarrckpt.CorruptCheckpointError):
        ckpt.read(["w"])
    assert {damage.key for damage in ckpt.verify().damages} == {"zarr.json", "w/c.0"}


# -- a removal that was broken off


@pytest.mark.parametrize("finish", [zarrckpt.recover, zarrckpt.remove])
def test_what_a_broken_removal_says_and_who_finishes_it(finish: Callable[..., Any], tmp_path: Path) -> None:
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
    assert zarrckpt.open(tmp_path / "a").tree == ""


def test_a_removal_that_was_only_recorded_is_finished_by_recover(tmp_path: Path) -> None:
    zarrckpt.save(STATE, tmp_path / "a")
    crash_after("put", RECORD, tmp_path / "a")
    assert zarrckpt.open(tmp_path / "a").verify()
    with pytest.raises(zarrckpt.CheckpointRemovedError):
        zarrckpt.save(STATE, tmp_path / "a", overwrite=True)
    assert zarrckpt.recover(tmp_path / "a").objects > 5
    assert not (tmp_path / "a").exists()


def test_what_fails_before_the_root_is_deleted_leaves_the_checkpoint(tmp_path: Path) -> None:
    zarrckpt.save(STATE, tmp_path / "a")
    fails = FaultyStore(tmp_path / "a", lambda call: FAIL if call.verb == "put" else None)
    with pytest.raises(zarrckpt.StorageError):
        zarrckpt.remove(store=fails)
    zarrckpt.save(STATE, tmp_path / "a", overwrite=True)


# -- every interleaving


def _remove(store: Store) -> str:
    try:
        zarrckpt.remove(store=store)
    except zarrckpt.CheckpointNotFoundError:
        return "nothing"
    return "removed"


def _read(store: Store) -> str:
    try:
        return read(store)
    except zarrckpt.CheckpointRemovedError:
        return "removed"


def _can_be_finished(content: Content) -> None:
    """A save is refused or begins on nothing; one more removal, or ``recover``, leaves nothing."""
    recorded = RECORD in content
    for finish in (zarrckpt.remove, zarrckpt.recover) if recorded else (zarrckpt.remove,):
        shelf = Shelf(content)
        if recorded:
            with pytest.raises(zarrckpt.CheckpointRemovedError):
                zarrckpt.save({"step": 1}, store=shelf.store, overwrite=True)
            assert shelf.content == content
        if content:
            finish(store=shelf.store)
        assert not shelf.content


@pytest.mark.parametrize("codes", [(_remove, _remove), (_remove, _read), (_remove, _read, _read)])
def test_removals_and_readers_in_every_interleaving(codes: tuple[Callable[[Store], str], ...]) -> None:
    """Any of them may stop at any time: what is stored then can be finished."""
    judge = Judge()
    with one_thread():
        base = committed_first()
        agents = [Agent(code) for code in codes]
        # Of removals, which take some forty requests each, those with at most two interruptions.
        bound = 2 if codes.count(_remove) > 1 else None
        exploration = Exploration(agents, base, Faults(), nothing_quiet, bound)

        def at_end(content: Content, ends: list[str]) -> None:
            assert not content
            assert "removed" in ends and {*ends} <= {"removed", "nothing", "read 0"}

        def check(content: Content) -> None:
            judge.committed(content)
            _can_be_finished(content)

        found = exploration.run(check, at_end, 10**6)
    assert found.complete and found.states > 300
    assert {end for ends in found.outcomes for end in ends} >= {"removed"}


def test_a_removal_of_a_crashed_save(tmp_path: Path) -> None:
    def rule(call: Call) -> Fault | None:
        return STOP if call.verb == "create" and call.key == "zarr.json" else None

    with pytest.raises(Stopped):
        zarrckpt.save(STATE, store=FaultyStore(tmp_path / "a", rule))
    assert zarrckpt.remove(tmp_path / "a") > 5
    assert not (tmp_path / "a").exists()
