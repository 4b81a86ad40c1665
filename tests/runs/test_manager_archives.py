"""``CheckpointManager(format="zip")``: folders of archives, their leftovers, and the commands that list them."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from harness.crashes import state
from harness.managed import OPTIONS, damage_root, folders, manager, restored, sound
from harness.ranks import RankError, all_ranks_raise, run_ranks
from harness.uneven_states import full, mesh_of, sharded

import zarrckpt
from zarrckpt import Keep
from zarrckpt._store import _zip_local
from zarrckpt._store._local_commit import write_temp
from zarrckpt.cli import main


def archive(step: int) -> str:
    return f"step-{step:08d}.zarr.zip"


def files(run: Path) -> set[str]:
    """Return the names in a run's folder, except its document's."""
    return {path.name for path in run.iterdir()} - {"@run"}


def saved(run: Path, *steps: int, **arguments: Any) -> None:
    with manager(run, **{"format": "zip", **arguments}) as job:
        job.restore(state(0))
        for step in steps:
            job.save(step, state(step), {"loss": 100.0 - step})


def command(*arguments: object) -> Any:
    """Return the JSON that a command prints."""
    return json.loads(CliRunner().invoke(main, [*map(str, arguments), "--json"], catch_exceptions=False).stdout)


def test_a_folder_of_archives_has_one_file_per_checkpoint(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2, 3, 4, keep=Keep(newest=2, every_steps=3))
    assert files(tmp_path) == {archive(3), archive(4)} and all((tmp_path / name).is_file() for name in files(tmp_path))
    assert zarrckpt.latest(tmp_path) == zarrckpt.best(tmp_path, "loss") == str(tmp_path / archive(4))
    with manager(tmp_path, format="zip") as job:
        job.pin(3, "needed")
        assert files(tmp_path) == {archive(3), archive(4), f"@{archive(3)}"}
        with pytest.raises(zarrckpt.CheckpointPinnedError, match="needed"):
            zarrckpt.remove(tmp_path / archive(3))
        job.unpin(3)
    assert files(tmp_path) == {archive(3), archive(4)} and sound(tmp_path) == [3, 4]


@pytest.mark.parametrize("stopped", [False, True])
def test_leftovers_beside_archives_are_removed(stopped: bool, tmp_path: Path) -> None:
    """Files of an interrupted write of a marker, and empty folders, as kills leave them."""
    saved(tmp_path, 5)
    for step in (10, 11, 12):
        marker = tmp_path / f"@{archive(step)}" / "@zarrckpt" / ("0" * 31 + "1") / "zarr.json"
        (marker.parents[2] if step == 12 else marker.parent).mkdir(parents=True)
        if step == 10:
            write_temp(str(marker), [[memoryview(b"{")]], unique=False, sync=False)
    zarrckpt.recover(tmp_path)
    assert len(files(tmp_path)) == 4
    if stopped:
        zarrckpt.recover(tmp_path, stopped=True)
    else:
        saved(tmp_path, 16)
    assert files(tmp_path) == {archive(step) for step in ((5,) if stopped else (5, 16))}


@pytest.mark.filterwarnings("ignore:.* is damaged and was skipped:UserWarning")
def test_a_run_may_change_its_format(tmp_path: Path) -> None:
    """Steps of both formats count for the rules, and each can be the newest, damaged or the one to return to."""
    keep = Keep(newest=3, best=1, metric="loss", mode="max")
    saved(tmp_path, 10, 20, keep=keep)
    saved(tmp_path, 30, 40, keep=keep, format="folder")
    assert folders(tmp_path) == {archive(10), archive(20), "step-00000030", "step-00000040"}
    saved(tmp_path, 50, keep=keep)
    assert folders(tmp_path) == {archive(10), archive(50), "step-00000030", "step-00000040"}
    damage_root(tmp_path / archive(50))
    with manager(tmp_path, keep=keep, format="zip") as job:
        assert restored(job) == 40
        job.save(50, state(50), {"loss": 0.0})
        assert restored(job, step=30, rewind=True) == 30
        assert files(tmp_path) == {archive(10), "step-00000030"}
        job.save(40, state(40), {"loss": 0.0})
    assert files(tmp_path) == {archive(10), "step-00000030", archive(40)} and sound(tmp_path) == [10, 30, 40]


def test_a_damaged_archive_is_replaced_by_a_save_of_its_step(tmp_path: Path) -> None:
    saved(tmp_path, 10, 20)
    damage_root(tmp_path / archive(20))
    with pytest.warns(UserWarning, match=f"{archive(20)} is damaged"):
        assert zarrckpt.latest(tmp_path) == str(tmp_path / archive(10))
    with manager(tmp_path, format="zip") as job, pytest.warns(UserWarning, match=archive(20)):
        assert restored(job) == 10
        job.save(20, state(20))
    assert sound(tmp_path) == [10, 20]
    (tmp_path / archive(10)).unlink()
    (tmp_path / archive(20)).unlink()
    with manager(tmp_path, format="zip") as job, pytest.raises(zarrckpt.CheckpointNotFoundError, match="@run"):
        job.restore(state(0))


@pytest.mark.parametrize("form", ["folder", "zip"])
def test_a_run_begins_from_an_archive_which_it_pins(form: Any, tmp_path: Path) -> None:
    saved(tmp_path / "first", 7)
    source = tmp_path / "first" / archive(7)
    with manager(tmp_path / "second", init_from=source, format=form) as job:
        assert job.restore(state(0)) == 7
        with pytest.raises(zarrckpt.CheckpointPinnedError):
            zarrckpt.remove(source)
        job.save(8, state(8))
    assert files(tmp_path / "first") == {archive(7)} and sound(tmp_path / "second") == [8]


def test_other_files_in_the_folder_stay(tmp_path: Path) -> None:
    saved(tmp_path, 10)
    other = [tmp_path / "notes.zip", tmp_path / ".zarr.zip", tmp_path / "step-5.zip"]
    for path in other:
        path.write_bytes(b"PK\5\6" + bytes(18))
    (tmp_path / "step-99.zarr.zip").mkdir()  # a folder with the name of an archive
    saved(tmp_path, 20, 30, keep=Keep(newest=1))
    assert all(path.exists() for path in other) and zarrckpt.latest(tmp_path) == str(tmp_path / archive(30))
    for url in (tmp_path, tmp_path / archive(30) / "inner"):
        with pytest.raises(
            (zarrckpt.ForeignObjectsError, zarrckpt.StorageError), match=r"the newest is|inside an archive"
        ):
            zarrckpt.save(state(1), url)
    assert zarrckpt.open(tmp_path / archive(30)).verify()


def test_formats_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    saved(tmp_path, 10)
    reuse = zarrckpt.SaveOptions(reuse="on")
    for error, url, arguments in (
        ("format must be", tmp_path, {"format": "tar"}),
        ("reuse='on'", tmp_path, {"format": "zip", "options": reuse}),
        ("needs a folder", tmp_path / archive(10), {}),
    ):
        with pytest.raises(ValueError, match=error):
            manager(url, **arguments)


# -- several ranks


def _state(number: int) -> dict[str, Any]:
    mesh = mesh_of([*range(dist.get_world_size())])
    return {"w": sharded(full((13, 3), number), mesh), "blob": b"%d" % number, "step": number}


def _dies_in_a_save(run: str) -> None:
    """Save a step. Then kill all ranks after each has written an entry of the next archive."""
    with manager(run, format="zip") as job:
        job.save(10, _state(10))
        write = _zip_local.LocalPart.write

        def write_and_die(*arguments: Any) -> None:
            write(*arguments)
            os.kill(os.getpid(), signal.SIGKILL)

        _zip_local.LocalPart.write = write_and_die  # type: ignore[method-assign]
        job.save(20, _state(20))


def _goes_on(run: str) -> None:
    with manager(run, format="zip", background=True, keep=Keep(newest=2)) as job:
        target = _state(0)
        assert job.restore(target) == 10 and torch.equal(target["w"].to_local(), _state(10)["w"].to_local())
        for step in (15, 30):
            job.save(step, _state(step))


def test_leftovers_of_killed_ranks_are_found_and_removed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with pytest.raises(RankError, match="died"):
        run_ranks(_dies_in_a_save, str(run), world_size=2)
    assert files(run) == {archive(10), f"@{archive(20)}"}
    rows = {row["name"]: row["state"] for row in command("ls", run)}
    assert rows == {archive(10): "committed", archive(20): "unfinished"}
    assert "could still commit" in command("doctor", run / archive(20))["findings"][0]
    with pytest.raises(zarrckpt.CheckpointNotFoundError, match="never committed"):
        zarrckpt.open(run / archive(20))
    kept = zarrckpt.recover(run)
    assert [len(report.kept) for report in kept.checkpoints] == [0, 1] and f"@{archive(20)}" in files(run)
    # A recovery leaves nothing, and neither does a job that continues with another number of ranks.
    copied = shutil.copytree(run, tmp_path / "copied")
    assert len(zarrckpt.recover(copied, stopped=True).removed) == 1 and files(copied) == {archive(10)}
    run_ranks(_goes_on, str(run), world_size=1)
    assert files(run) == {archive(15), archive(30)} and zarrckpt.open(run / archive(30))["step"] == 30


def _begin_in_an_object_store() -> None:
    zarrckpt.CheckpointManager("memory://run", format="zip", signals=(), options=OPTIONS)


def test_ranks_cannot_save_archives_to_an_object_store() -> None:
    assert "format='folder'" in all_ranks_raise(zarrckpt.StorageError, _begin_in_an_object_store, world_size=2)


def test_a_name_that_is_nearly_that_of_an_archive_is_named(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"x\.zip becomes a folder.*'\.zarr\.zip'"):
        zarrckpt.save(state(1), tmp_path / "x.zip", options=OPTIONS)
    assert zarrckpt.open(tmp_path / "x.zip").verify()
