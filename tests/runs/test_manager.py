"""``CheckpointManager``: the checkpoints that it keeps and finds, the run that owns them, and saves that it refuses."""

from __future__ import annotations

import enum
import json
import logging
import math
import os
import random
import re
import shutil
import signal
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from harness.crashes import state
from harness.faulty_store import FAIL, FAIL_AFTER, STOP, Call, Fault, FaultyStore, Stopped
from harness.internals import LocalStore
from harness.managed import (
    RUN,
    damage_chunk,
    damage_root,
    folders,
    manager,
    name,
    restored,
    run_id,
    sound,
    watched,
)
from harness.s3_server import S3Server
from harness.store_servers import S3Place

import zarrckpt
from zarrckpt import Keep
from zarrckpt._format.sealed import _seal
from zarrckpt._save import finish
from zarrckpt._store._conditional_puts import _known_support
from zarrckpt._store._local_commit import write_temp


def saved(run: Path, *steps: int, **arguments: Any) -> None:
    """Run a job that restores, saves some steps, and ends."""
    with manager(run, **arguments) as job:
        job.restore(state(0))
        for step in steps:
            job.save(step, state(step))


# -- kept checkpoints


Known = dict[int, float | None]
"""The metric of each checkpoint as a number, None without one."""


def survivors(there: Known, rules: dict[str, Any], pinned: set[int]) -> set[int]:
    """Return the checkpoints that must be kept, computed without the package."""
    kept = {step for step in there if sum(other > step for other in there) < rules["newest"]} | (pinned & {*there})
    kept |= {step for step in there if rules["every_steps"] and step % rules["every_steps"] == 0}
    for step, value in there.items():
        if value is not None and math.isfinite(value):
            better = 0
            for other, of_other in there.items():
                if of_other is not None and math.isfinite(of_other):
                    wins = of_other < value if rules["mode"] == "min" else of_other > value
                    better += wins or (of_other == value and other > step)
            if better < rules["best"]:
                kept.add(step)
    return kept


def drawn_metric(chance: random.Random) -> tuple[dict[str, Any], float | None]:
    """Return metrics as a user may give them, and the number of "loss"."""
    number = chance.choice([0, 1, 2, 0.5, -1.5, 2.0, 1e300, -0.0, math.inf, -math.inf])
    forms: list[Callable[[Any], Any]] = [
        lambda value: value,
        float,
        lambda value: torch.tensor(float(value), dtype=torch.float64, requires_grad=True),
        lambda value: torch.full((1, 1), value, dtype=torch.float64),
        np.float64,
        lambda value: np.array([value], dtype="f8"),
    ]
    if math.isfinite(number) and abs(number) < 100:
        forms += [np.float32, lambda value: torch.tensor(value, dtype=torch.bfloat16)]
    none: list[Any] = [None, math.nan, np.float32("nan"), torch.tensor(math.nan)]
    kind = chance.random()
    if kind < 0.15:
        return {"accuracy": 1.0}, None
    if kind < 0.35:
        return {"loss": chance.choice(none)}, None
    return {"loss": chance.choice(forms)(number), "other": 3}, float(number)


def drawn_rules(chance: random.Random) -> dict[str, Any]:
    best = chance.choice([0, 0, 1, 2, 3])
    return {
        "newest": chance.choice([1, 1, 2, 3]),
        "best": best,
        "metric": "loss" if best or chance.random() < 0.5 else None,
        "mode": chance.choice(["min", "max"]),
        "every_steps": chance.choice([None, None, 2, 5, 10]),
    }


@pytest.mark.filterwarnings("ignore:.* keeps the best by the metric:UserWarning")
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_what_is_kept_is_what_a_model_says(seed: int, background: bool, tmp_path: Path) -> None:
    """Random steps, metrics, rules and pins, over several jobs, and in half of the tests both formats."""
    chance = random.Random(seed)
    there: Known = {}
    pinned: set[int] = set()
    rules = drawn_rules(chance)
    for _ in range(4):
        if chance.random() < 0.3:
            rules = drawn_rules(chance)
        every = chance.choice([1, 1, 3, 10])
        form = "zip" if seed > 2 and chance.random() < 0.5 else "folder"
        job = manager(tmp_path, keep=Keep(**rules), save_every=every, background=background, format=form)
        last = restored(job)
        assert last == max(there, default=None)
        for step in sorted(there):
            if chance.random() < 0.3:
                if step in pinned:
                    job.unpin(step)
                    pinned.remove(step)
                else:
                    job.pin(step, "wanted")
                    pinned.add(step)
        committed = False
        if last is None and chance.random() < 0.5:
            job.save(0, state(0), {"loss": 2})
            there[0], committed = 2.0, True
        step = 0 if last is None else last
        for _ in range(chance.randint(0, 7)):
            before, step = step, step + chance.choice([1, 1, 2, 3, 7])
            metrics, value = drawn_metric(chance)
            due = any(number % every == 0 for number in range(before + 1, step + 1))
            if chance.random() < 0.2:
                future, due = job.save(step, state(step), metrics), True
            else:
                future = job.step(step, state(step), metrics)
            assert (future is not None) == due
            if due:
                there[step], committed = value, True
        job.close()
        if committed:
            there = {step: there[step] for step in survivors(there, rules, pinned)}
            pinned &= {*there}
        assert job.steps() == sorted(there), (seed, rules)
        assert {found.removesuffix(".zarr.zip") for found in folders(tmp_path)} == {name(step) for step in there}
    assert sound(tmp_path) == sorted(there)


def test_metrics_and_metadata_are_in_the_checkpoint(tmp_path: Path) -> None:
    with manager(tmp_path) as job:
        job.save(3, state(3), {"loss": torch.tensor(0.5), "n": np.int64(4), "none": None}, {"who": "me"})
    found = dict(zarrckpt.open(tmp_path / name(3)).metadata)
    assert found.pop("zarrckpt.run").keys() == {"id", "job"}
    assert found == {"step": 3, "loss": 0.5, "n": 4, "none": None, "who": "me"}


@pytest.mark.usefixtures("each_format")
def test_without_rules_all_but_failed_saves_are_kept(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2)
    with watched(tmp_path) as watch, manager(tmp_path) as job:
        job.restore(state(0))
        watch.rule = lambda call: FAIL if call.key == f"{name(3)}/zarr.json" and call.verb == "create" else None
        with pytest.raises(zarrckpt.StorageError):
            job.save(3, state(3))
        assert name(3) in folders(tmp_path)
        job.save(4, state(4))
    assert sound(tmp_path) == [1, 2, 4] and folders(tmp_path) == {name(1), name(2), name(4)}


def test_without_rules_leftovers_of_earlier_jobs_are_deleted(tmp_path: Path) -> None:
    """Leftovers of a killed save and of an interrupted deletion. No root document is read for that."""
    run, aside = tmp_path / "run", tmp_path / "aside"
    saved(run, 10, 20)
    with watched(run) as watch, manager(run) as job:
        watch.rule = lambda call: STOP if call.key.startswith(f"{name(30)}/") and "/c" in call.key else None
        with pytest.raises(Stopped):
            job.save(30, state(30))
    shutil.move(run / name(30), aside)
    saved(run, 40)
    shutil.move(aside, run / name(30))
    removing = FaultyStore(run / name(10), lambda call: STOP if call.verb == "delete" and "/c" in call.key else None)
    with pytest.raises(Stopped):
        zarrckpt.remove(removing)
    zarrckpt.save(state(5), run / name(5))
    with watched(run) as watch:
        saved(run, 50)
        assert ("get", f"{name(20)}/zarr.json") not in watch.calls
    assert folders(run) == {name(step) for step in (5, 20, 40, 50)} and sound(run) == [5, 20, 40, 50]


# -- the checkpoint that is found


def test_restore_of_an_empty_folder_returns_none(tmp_path: Path) -> None:
    with manager(tmp_path / "run") as job:
        assert job.restore(state(0)) is None and job.steps() == []
        job.save(1, state(1))
        assert job.steps() == [1]


def test_the_greatest_step_is_the_newest_despite_clocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path, 9)
    monkeypatch.setattr(finish, "now", lambda: "2001-01-01T00:00:00.000000Z")
    saved(tmp_path, 10, 100)
    created = [zarrckpt.open(tmp_path / name(step)).info.created for step in (9, 10)]
    assert created[0] > created[1]
    with manager(tmp_path) as job:
        assert restored(job) == 100
    assert zarrckpt.latest(tmp_path) == str(tmp_path / name(100))


@pytest.mark.usefixtures("each_format")
@pytest.mark.parametrize(("mode", "at_best"), [("min", 30), ("max", 50)])
def test_best_finds_the_best_finite_metric(tmp_path: Path, mode: Any, at_best: int) -> None:
    with pytest.warns(UserWarning, match="step-60"):
        assert zarrckpt.best(tmp_path, "loss", mode) is None
        losses: dict[int, Any] = {10: 0.5, 20: math.nan, 30: 0.5, 40: None, 50: 2, 55: -math.inf, 56: math.inf}
        with manager(tmp_path / "run") as job:
            for step, loss in losses.items():
                job.save(step, state(step), {"loss": loss})
        zarrckpt.save(state(9), tmp_path / "run" / "step-70", metadata={"accuracy": 1.0})
        zarrckpt.save(state(9), tmp_path / "run" / "step-60", metadata={"loss": -9.0})
        (tmp_path / "run" / "step-60" / "zarr.json").write_bytes(b"{}x")
        assert zarrckpt.best(str(tmp_path / "run"), "loss", mode) == str(tmp_path / "run" / name(at_best))
        with pytest.warns(UserWarning, match="did you mean 'loss'"):
            assert zarrckpt.best(tmp_path / "run", "los") is None
        # Retention keeps the same one.
        with manager(tmp_path / "run", keep=Keep(best=1, metric="loss", mode=mode)) as job:
            job.save(80, state(80), {"loss": math.inf if mode == "max" else -math.inf})
        assert zarrckpt.best(tmp_path / "run", "loss", mode) == str(tmp_path / "run" / name(at_best))
        assert folders(tmp_path / "run") == {name(at_best), "step-60", "step-70", name(80)}
    huge = {1: {"loss": -(10**400)}, 2: {"loss": 10**400}, 3: {"loss": True}, 4: {"loss": "1"}, 5: {}}
    kept = Keep(best=5, metric="loss", mode=mode).reasons(huge)
    assert sorted(kept) == [1, 2, 5] and kept[1 if mode == "min" else 2] == ["best 1"]
    with pytest.raises(ValueError, match="mode"):
        zarrckpt.best(tmp_path / "run", "loss", "least")  # type: ignore[arg-type]


def test_step_names_without_padding_are_read(tmp_path: Path) -> None:
    for step in (9, 10, 100):
        zarrckpt.save(state(step), tmp_path / f"step-{step}")
    with manager(tmp_path, keep=Keep(newest=1)) as job:
        assert job.steps() == [9, 10, 100] and restored(job) == 100
        assert restored(job, step=9) == 9
        job.pin(10)
        with pytest.raises(zarrckpt.CheckpointPinnedError):
            zarrckpt.remove(tmp_path / "step-10")
        job.unpin(10)
        with pytest.raises(zarrckpt.CheckpointExistsError):
            job.save(100, state(100))
        job.save(101, state(101))
    # They belong to no run, so they stay.
    assert folders(tmp_path) == {"step-9", "step-10", "step-100", name(101)}


@pytest.mark.usefixtures("each_format")
@pytest.mark.filterwarnings("ignore:.*step:UserWarning")
@pytest.mark.parametrize("damage", [damage_root, damage_chunk])
def test_damaged_checkpoints_are_skipped(damage: Callable[[Path], None], tmp_path: Path) -> None:
    saved(tmp_path, 10, 20, 30)
    for broken, expected in ((30, 20), (20, 10)):
        damage(tmp_path / name(broken))
        with manager(tmp_path) as job, pytest.warns(UserWarning, match=name(broken)):
            assert restored(job) == expected
    damage(tmp_path / name(10))
    with manager(tmp_path) as job, pytest.warns(UserWarning), pytest.raises(zarrckpt.CorruptCheckpointError):
        job.restore(state(0))
    with manager(tmp_path) as job, pytest.raises(zarrckpt.CorruptCheckpointError):
        job.restore(state(0), step=20)


def foreign_root(folder: Path) -> None:
    """Replace the root document by another program's."""
    (folder / "zarr.json").write_text("{}")


def lost_root(folder: Path) -> None:
    """Delete the root document."""
    (folder / "zarr.json").unlink()


def lost_root_and_run(folder: Path) -> None:
    """Delete the root document, and the run's."""
    lost_root(folder)
    shutil.rmtree(folder.parent / "@run", ignore_errors=True)


@pytest.mark.filterwarnings("ignore:.* is damaged and was skipped:UserWarning")
@pytest.mark.parametrize("damage", [foreign_root, lost_root, lost_root_and_run, damage_root])
def test_a_run_begins_anew_only_if_none_was_committed(damage: Callable[[Path], None], tmp_path: Path) -> None:
    saved(tmp_path, 10, 20, 30)
    damage(tmp_path / name(30))
    with manager(tmp_path) as job, pytest.warns(UserWarning, match=rf"{name(30)} is damaged and was skipped"):
        assert restored(job) == 20
    with pytest.warns(UserWarning, match=rf"{name(30)} is damaged and was skipped"):
        assert zarrckpt.latest(tmp_path) == str(tmp_path / name(20))
    damage(tmp_path / name(10))
    damage(tmp_path / name(20))
    files = {path for path in tmp_path.rglob("*") if "@run" not in path.parts}
    with manager(tmp_path) as job, pytest.raises(zarrckpt.CorruptCheckpointError) as raised:
        job.restore(state(0))
    assert all(name(step) in str(raised.value) for step in (10, 20, 30))
    assert zarrckpt.latest(tmp_path) is None
    # A job that saves all the same loses nothing.
    with manager(tmp_path, keep=Keep()) as job:
        job.save(40, state(40))
    assert files <= {*tmp_path.rglob("*")} and sound_but(tmp_path, 10, 20, 30) == [40]


def test_a_run_whose_checkpoints_are_missing_is_an_error(tmp_path: Path) -> None:
    saved(tmp_path, 10)
    shutil.rmtree(tmp_path / name(10))
    with manager(tmp_path) as job, pytest.raises(zarrckpt.CheckpointNotFoundError, match=RUN):
        job.restore(state(0))
    (tmp_path / RUN).unlink()
    with manager(tmp_path) as job:
        assert restored(job) is None


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("restores", [False, True])
@pytest.mark.parametrize("damage", [foreign_root, lost_root, damage_root])
def test_a_damaged_step_is_saved_again(
    damage: Callable[[Path], None], restores: bool, background: bool, tmp_path: Path
) -> None:
    saved(tmp_path, 10, 20)
    damage(tmp_path / name(20))
    with manager(tmp_path, keep=Keep(), background=background) as job, pytest.warns(UserWarning, match=name(20)):
        assert not restores or restored(job) == 10
        job.save(20, state(20)).result()
    assert folders(tmp_path) == {name(20)} and sound(tmp_path) == [20]


@pytest.mark.usefixtures("each_format")
@pytest.mark.filterwarnings("ignore:.*step-00000020.* is damaged and was skipped:UserWarning")
def test_a_save_replaces_only_damage_of_its_run(tmp_path: Path) -> None:
    """Another run's damaged checkpoint stays, a pinned one too, and one that is repaired before the save."""
    run, other, root = tmp_path / "run", tmp_path / "other", tmp_path / "run" / name(20)
    saved(run, 10)
    if not name(0).endswith("zip"):  # A damaged archive does not name its run.
        saved(other, 20)
        shutil.copytree(other / name(20), root)
        damage_root(root)
        for restores in (False, True):
            with manager(run) as job:
                assert not restores or restored(job) == 10
                with pytest.raises(zarrckpt.ForeignObjectsError, match=f"{name(20)}.*zarrckpt rm") as raised:
                    job.save(20, state(20))
                assert "overwrite" not in str(raised.value)
        zarrckpt.remove(root)
    saved(run, 20)
    zarrckpt.pin(root)
    whole = tmp_path / "whole"
    (shutil.copy if root.is_file() else shutil.copytree)(root, whole)
    damage_root(root)
    with manager(run) as job:
        assert restored(job) == 10
        with pytest.raises(zarrckpt.CheckpointPinnedError):
            job.save(20, state(20))
        if root.is_file():
            shutil.copy(whole, root)
        else:
            shutil.copy(whole / "zarr.json", root / "zarr.json")
        with pytest.raises(zarrckpt.CheckpointExistsError, match=name(20)) as exists:
            job.save(20, state(200))
        assert "overwrite" not in str(exists.value)
    assert sound(run) == [10, 20]


@pytest.mark.parametrize("stopped", [False, True])
@pytest.mark.parametrize("left", ["claim", "part of a claim", "claim and part of a marker", "no file"])
def test_leftovers_without_a_marker_are_removed(left: str, stopped: bool, tmp_path: Path) -> None:
    """By the commit of a later step, and by recover(stopped=True), but not by recover()."""
    saved(tmp_path, 5)
    group = tmp_path / name(10) / "@zarrckpt"
    marker = group / ("0" * 31 + "1") / "zarr.json"
    (marker.parent if "marker" in left else group).mkdir(parents=True)
    if left.startswith("claim"):
        shutil.copy(tmp_path / name(5) / "@zarrckpt" / "zarr.json", group)
    if "part" in left:
        target = marker if "marker" in left else group / "zarr.json"
        write_temp(str(target), [[memoryview(b"{")]], unique="marker" not in left, sync=False)
    logs = tmp_path / "step-logs"
    logs.mkdir()
    zarrckpt.recover(tmp_path)
    assert group.exists()
    if stopped:
        zarrckpt.recover(tmp_path, stopped=True)
    else:
        saved(tmp_path, 16)
    logs.rmdir()
    assert not group.parent.exists() and sound(tmp_path) == ([5] if stopped else [5, 16])


@pytest.mark.filterwarnings("ignore:.* is damaged and was skipped:UserWarning")
def test_a_save_that_was_killed_right_before_its_commit(tmp_path: Path) -> None:
    """Without a sound checkpoint, the run begins. Later jobs never delete leftovers of the killed saves."""
    for step in (10, 20):
        with watched(tmp_path) as watch, manager(tmp_path, keep=Keep()) as job:
            watch.rule = lambda call: STOP if call.verb == "create" and call.key.endswith("0/zarr.json") else None
            assert restored(job) is None
            with pytest.raises(Stopped):
                job.save(step, state(step))
            watch.begin_anew()
    saved(tmp_path, 30, 40, keep=Keep())
    assert folders(tmp_path) == {name(10), name(20), name(40)}
    with manager(tmp_path) as job:
        assert restored(job) == 40 and job.steps() == [40]
    assert len(zarrckpt.recover(tmp_path).kept) == 2
    assert len(zarrckpt.recover(tmp_path, stopped=True).removed) == 2
    assert folders(tmp_path) == {name(40)} and sound(tmp_path) == [40]


def test_links_to_folders_are_checkpoints_and_stay(tmp_path: Path) -> None:
    run, disk = tmp_path / "run", tmp_path / "disk"
    saved(run, 10, 20)
    disk.mkdir()
    for step in (10, 20):
        (run / name(step)).rename(disk / name(step))
        (run / name(step)).symlink_to(disk / name(step))
    (run / name(25)).symlink_to(run / name(25))
    with manager(run, keep=Keep()) as job:
        assert restored(job) == 20 and job.steps() == [10, 20]
        assert zarrckpt.latest(run) == str(run / name(20))
        job.save(30, state(30))
        job.save(40, state(40))
    assert sound(disk) == [10, 20] and folders(run) == {name(step) for step in (10, 20, 25, 40)}


def test_the_url_of_a_checkpoint_is_refused_as_a_run(tmp_path: Path) -> None:
    with pytest.raises(Stopped):
        zarrckpt.save(state(3), FaultyStore(tmp_path / "begun", lambda call: STOP if "/c." in call.key else None))
    for damage in (lambda _: None, damage_root, foreign_root, lost_root):
        url = tmp_path / getattr(damage, "__name__", "")
        zarrckpt.save(state(3), url)
        damage(url)
        for folder in (url, tmp_path / "begun") if damage is not lost_root else (url,):
            files = {*folder.rglob("*")}
            for action in (lambda job: job.restore(state(0)), lambda job: job.save(4, state(4))):
                with manager(folder) as job, pytest.raises(zarrckpt.ForeignObjectsError, match=str(folder)):
                    action(job)
            assert {*folder.rglob("*")} == files
    zarrckpt.save(state(3), tmp_path / "sound")
    with manager(tmp_path / "sound" / "deep") as job, pytest.raises(zarrckpt.ForeignObjectsError, match="lies inside"):
        job.restore(state(0))
    zarrckpt.save(state(4), tmp_path / "sound", overwrite=True)
    assert zarrckpt.remove(tmp_path / "sound") > 0


@pytest.mark.usefixtures("each_format")
@pytest.mark.parametrize("damage", [damage_root, damage_chunk])
def test_an_intact_checkpoint_is_never_deleted_for_a_damaged_one(
    damage: Callable[[Path], None], tmp_path: Path
) -> None:
    saved(tmp_path, 10, 20, 30)
    damage(tmp_path / name(30))
    with watched(tmp_path) as watch, manager(tmp_path, keep=Keep(newest=1)) as job:
        with pytest.warns(UserWarning):
            assert restored(job) == 20
        watch.rule = lambda call: FAIL if name(22) in call.key else None
        with pytest.raises(zarrckpt.StorageError):
            job.save(22, state(22))
        assert 20 in sound_but(tmp_path, 30)
        watch.rule = lambda _: None
        job.save(25, state(25))
    # Not counted, and not deleted.
    assert folders(tmp_path) == {name(25), name(30)}
    with manager(tmp_path, keep=Keep(newest=1)) as job:
        with pytest.warns(UserWarning):
            assert restored(job) == 25
        job.save(30, state(30))
    assert folders(tmp_path) == {name(30)} and sound(tmp_path) == [30]


def sound_but(run: Path, *broken: int) -> list[int]:
    """Return the result of :func:`sound` without some steps."""
    for step in broken:
        (run / name(step)).rename(run.parent / f"aside-{step}-{run.name}")
    found = sound(run)
    for step in broken:
        (run.parent / f"aside-{step}-{run.name}").rename(run / name(step))
    return found


@pytest.mark.parametrize("damage", [damage_root, damage_chunk, foreign_root, lost_root])
def test_a_step_is_restored_from_its_intact_folder(damage: Callable[[Path], None], tmp_path: Path) -> None:
    saved(tmp_path, 10)
    for folder in ("step-10", "step-010"):
        shutil.copytree(tmp_path / name(10), tmp_path / folder)
        damage(tmp_path / folder)
    with manager(tmp_path) as job, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert restored(job, step=10) == restored(job) == 10
    damage(tmp_path / name(10))
    with manager(tmp_path) as job, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(zarrckpt.CheckpointError, match=r"step-0*10"):
            job.restore(state(0), step=10)


@pytest.mark.parametrize("damage", [damage_root, damage_chunk])
def test_a_damaged_folder_hides_no_other_of_its_step(damage: Callable[[Path], None], tmp_path: Path) -> None:
    zarrckpt.save(state(90), tmp_path / "step-90")
    zarrckpt.save(state(100), tmp_path / "step-100")
    damage(tmp_path / "step-100")
    with manager(tmp_path) as job:
        with pytest.warns(UserWarning, match="step-100"):
            assert restored(job) == 90
        job.save(100, state(100))
    with manager(tmp_path, keep=Keep(newest=1)) as job:
        with pytest.warns(UserWarning, match="step-100"):
            assert restored(job) == 100
        job.save(110, state(110))
    assert folders(tmp_path) == {"step-90", "step-100", name(110)}


def test_a_newer_format_is_not_damage(tmp_path: Path) -> None:
    saved(tmp_path, 10, 20)
    root = tmp_path / name(20) / "zarr.json"
    newer = root.read_bytes().replace(b'"format":1,', b'"format":99,')
    assert newer != root.read_bytes()
    root.write_bytes(_seal(newer))
    with manager(tmp_path) as job, pytest.raises(zarrckpt.UnsupportedFormatError, match=name(20)):
        job.restore(state(0))


@pytest.mark.parametrize("keep", [None, Keep(newest=3)])
def test_a_stale_listing_loses_nothing(keep: Keep | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path, 10, 20, 30)
    zarrckpt.remove(tmp_path / name(30))
    listed = LocalStore.list_dir

    def stale(store: LocalStore, prefix: str = "") -> tuple[list[str], list[str]]:
        objects, below = listed(store, prefix)
        if not prefix and store.url == str(tmp_path):
            below = [folder for folder in below if folder not in hidden] + [name(30)]
        return objects, below

    monkeypatch.setattr(LocalStore, "list_dir", stale)
    hidden: set[str] = set()
    with manager(tmp_path) as job:
        assert restored(job) == 20, "one that is listed and gone is passed over"
    hidden.add(name(20))
    with manager(tmp_path, keep=keep) as job:
        assert restored(job) == 10
        with pytest.raises(zarrckpt.CheckpointExistsError, match=name(20)):
            job.save(20, state(2000))
        job.save(21, state(21))
    hidden.clear()
    assert zarrckpt.open(tmp_path / name(20))["step"] == 20
    with manager(tmp_path) as job:
        assert restored(job) == 21


@pytest.mark.usefixtures("each_format")
@pytest.mark.filterwarnings("ignore:.*step-00000020 is damaged and was skipped:UserWarning")
def test_an_unfinished_save_is_not_restored(tmp_path: Path) -> None:
    saved(tmp_path, 10)
    with watched(tmp_path) as watch, manager(tmp_path) as job:
        watch.rule = lambda call: FAIL if call.verb == "create" and call.key == f"{name(20)}/zarr.json" else None
        with pytest.raises(zarrckpt.StorageError):
            job.save(20, state(20))
    with manager(tmp_path, keep=Keep()) as job:
        assert job.steps() == [10] and restored(job) == 10
        with pytest.raises(zarrckpt.CheckpointNotFoundError, match="20"):
            job.restore(state(0), step=20)
        job.save(20, state(20))
    assert folders(tmp_path) == {name(20)} and sound(tmp_path) == [20]


@pytest.mark.usefixtures("each_format")
def test_a_given_step_is_restored(tmp_path: Path) -> None:
    saved(tmp_path, 10, 20, 30)
    with manager(tmp_path, keep=Keep(newest=5)) as job:
        with pytest.raises(zarrckpt.CheckpointNotFoundError, match=r"15.*10, 20, 30"):
            job.restore(state(0), step=15)
        with pytest.raises(ValueError, match="rewind"):
            job.restore(state(0), rewind=True)
        with pytest.warns(UserWarning, match="30"):
            assert restored(job, step=10) == 10
        assert job.step(15, state(15)) is None
        with pytest.raises(zarrckpt.CheckpointExistsError, match="30"):
            job.save(20, state(20))
        target = state(0)
        assert job.restore(target, keys="deep") == 30
        assert int(target["deep"]["er"]["n"]) == 30 and torch.equal(target["w"], state(0)["w"])
    assert sound(tmp_path) == [10, 20, 30]


@pytest.mark.usefixtures("each_format")
def test_rewind_removes_later_steps(tmp_path: Path) -> None:
    saved(tmp_path, 10, 20, 30, 40)
    gone: list[str] = []

    def note(call: Call) -> None:
        if call.verb == "delete" and call.key.endswith("/zarr.json") and call.key.count("/") == 1:
            gone.append(call.key.split("/")[0])

    with watched(tmp_path) as watch, manager(tmp_path, keep=Keep(newest=2)) as job:
        watch.rule = note
        assert restored(job, step=20, rewind=True) == 20
        # The last one first: at every moment, the newest checkpoint is an existing step.
        assert gone == [name(40), name(30)]
        assert job.steps() == [10, 20]
        job.save(21, state(21))
    assert folders(tmp_path) == {name(20), name(21)} and sound(tmp_path) == [20, 21]


@pytest.mark.usefixtures("each_format")
@pytest.mark.parametrize("background", [False, True])
def test_rewind_during_deletions_saves_later_steps_again(background: bool, tmp_path: Path) -> None:
    """The same manager goes back while it deletes. The steps after that are saved again."""
    with watched(tmp_path) as watch, manager(tmp_path, keep=Keep(newest=2), background=background) as job:

        def wait(call: Call) -> None:
            if threading.current_thread().name == "zarrckpt-retention" and call.key.startswith(name(2)):
                time.sleep(0.01)

        for step in (1, 2, 3, 4):
            watch.rule = wait if step == 4 else watch.rule
            job.save(step, state(step))
        assert restored(job, step=3, rewind=True) == 3
        assert job.save(4, state(4)).result().objects > 0
    assert folders(tmp_path) == {name(3), name(4)} and sound(tmp_path) == [3, 4]


def test_rewind_to_a_step_that_is_being_deleted(tmp_path: Path) -> None:
    with watched(tmp_path) as watch, manager(tmp_path, keep=Keep(newest=2)) as job:

        def wait(call: Call) -> None:
            if threading.current_thread().name == "zarrckpt-retention":
                time.sleep(0.01)

        watch.rule = wait
        for step in (1, 2, 3):
            job.save(step, state(step))
        with pytest.raises(zarrckpt.CheckpointNotFoundError):
            job.restore(state(0), step=1, rewind=True)
        assert sound(tmp_path) == [2, 3]


@pytest.mark.parametrize("pinned", [False, True])
def test_rewind_removes_all_later_steps_or_none(pinned: bool, tmp_path: Path) -> None:
    run = tmp_path / "run"
    saved(run, 10, 20, 40)
    saved(tmp_path / "other", 30)
    if pinned:
        zarrckpt.pin(run / name(20))
        zarrckpt.save(state(30), run / name(30))
        zarrckpt.remove(run / name(30))
    else:
        shutil.copytree(tmp_path / "other" / name(30), run / name(30))
    before = sound(run)
    expected = zarrckpt.CheckpointPinnedError if pinned else zarrckpt.ForeignObjectsError
    with manager(run) as job, pytest.raises(expected, match=name(20) if pinned else name(30)):
        job.restore(state(0), step=10, rewind=True)
    assert sound(run) == before


@pytest.mark.usefixtures("each_format")
@pytest.mark.parametrize("copied", ["another name", "by cp", "damaged"])
def test_rewind_removes_no_copy(copied: str, tmp_path: Path) -> None:
    """What retention does not delete, a return to an earlier step does not delete either."""
    saved(tmp_path, 10, 20)
    copy = tmp_path / name(20).replace("-000000", "-")
    if copied == "by cp":
        zarrckpt.copy(tmp_path / name(20), tmp_path / "aside")
        zarrckpt.remove(tmp_path / name(20))
        copy = tmp_path / name(20)
        zarrckpt.copy(tmp_path / "aside", copy)
    else:
        (shutil.copy if copy.name.endswith("zip") else shutil.copytree)(tmp_path / name(20), copy)
    if copied == "damaged":
        damage_root(copy)
    elif copied == "by cp" and copy.name.endswith("zip"):
        return  # An archive has no marker that names the run.
    files = {*tmp_path.rglob("*")}
    with manager(tmp_path) as job, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(zarrckpt.ForeignObjectsError, match=copy.name):
            job.restore(state(0), step=10, rewind=True)
    assert {*tmp_path.rglob("*")} == files


@pytest.mark.parametrize("of_the_run", [True, False])
def test_rewind_while_another_process_saves(of_the_run: bool, tmp_path: Path) -> None:
    """A save of the run fails, even if the step is saved again meanwhile. A save of another program is not touched."""
    saved(tmp_path, 10)
    with watched(tmp_path) as watch, manager(tmp_path) as old, manager(tmp_path) as new:
        old.restore(state(0))

        def go_back(call: Call) -> None:
            if call.verb == "put" and call.key.startswith(f"{name(40)}/w/c."):
                watch.rule = lambda _: None
                if not of_the_run:
                    with pytest.raises(zarrckpt.ForeignObjectsError, match=rf"{name(40)}.*--stopped"):
                        new.restore(state(0), step=10, rewind=True)
                    return
                assert restored(new, step=10, rewind=True) == 10
                new.save(40, state(40))

        watch.rule = go_back
        if of_the_run:
            with pytest.raises(zarrckpt.RunTakenOverError):
                old.save(40, {**state(41), "step": 41})
        else:
            zarrckpt.save(state(40), tmp_path / name(40), options=zarrckpt.SaveOptions(max_chunk_bytes=8))
    assert watch.rule is not go_back and sound(tmp_path) == [10, 40]


@pytest.mark.parametrize("rewind", [True, False])
def test_a_commit_after_a_takeover_is_an_error(rewind: bool, tmp_path: Path) -> None:
    """The other job has found an unfinished save. It goes back, or deletes the leftovers."""
    saved(tmp_path, 10, 20)
    with watched(tmp_path) as watch, manager(tmp_path) as old:
        old.restore(state(0))

        def take(call: Call) -> None:
            if call.verb == "create" and call.key == f"{name(40)}/zarr.json":
                watch.rule = lambda _: None
                with manager(tmp_path) as new:
                    restored(new, step=10 if rewind else 20, rewind=rewind)
                    new.save(50, state(50))

        watch.rule = take
        with pytest.raises(zarrckpt.RunTakenOverError, match=name(40)):
            old.save(40, state(40))
    assert zarrckpt.latest(tmp_path) == str(tmp_path / name(50))


# -- number of requests


def _requests(stub: S3Server, action: Callable[[], Any]) -> list[str]:
    before = len(stub.requests)
    action()
    return [f"{request.method} {request.target}" for request in stub.requests[before:]]


@pytest.mark.parametrize("count", [3, 1203])
def test_requests_to_s3_do_not_grow_with_the_number_of_checkpoints(count: int, s3_stub: S3Server) -> None:
    place = s3_stub.bucket()
    url, options = place.url("run"), place.storage_options
    with manager(url, storage_options=options) as job:
        job.save(5000, state(5000))
    root = s3_stub.objects[f"{place.bucket}/run/{name(5000)}/zarr.json"]
    for step in range(1, count):
        s3_stub.put_object(f"{place.bucket}/run/{name(step)}/zarr.json", root.data)
    pages = math.ceil((count + 1) / s3_stub.faults.page)
    load = _requests(s3_stub, lambda: zarrckpt.load(state(0), f"{url}/{name(5000)}", storage_options=options))
    with manager(url, storage_options=options) as job:
        target = state(0)
        made = _requests(s3_stub, lambda: job.restore(target))
        assert target["step"] == 5000
    assert len(made) == pages + 3 + len(load), "\n".join(made)
    assert sum("list-type" in text for text in made) == pages + sum("list-type" in text for text in load)
    found = []
    made = _requests(s3_stub, lambda: found.append(zarrckpt.latest(url, storage_options=options)))
    assert len(made) == pages + 1 and found == [f"{url}/{name(5000)}"]


def test_thousands_of_old_checkpoints(tmp_path: Path) -> None:
    run = tmp_path / "run"
    zarrckpt.save(state(0), tmp_path / "plain")
    saved(run, 20_000)
    for step in range(3_000):
        (run / name(step)).mkdir()
        os.link(tmp_path / "plain" / "zarr.json", run / name(step) / "zarr.json")
    with watched(run) as watch, manager(run, keep=Keep(newest=1)) as job:
        assert restored(job) == 20_000
        assert [call for call in watch.calls if not call[1].startswith(f"{name(20_000)}/")] == [
            ("list", ""), ("get", RUN), ("put", RUN), ("sync", RUN)
        ]  # fmt: skip
        assert watch.calls.count(("get", f"{name(20_000)}/zarr.json")) == 2
        watch.calls.clear()
        assert zarrckpt.latest(run) == str(run / name(20_000))
        assert watch.calls == [("list", ""), ("get", f"{name(20_000)}/zarr.json")]
        job.save(20_001, state(20_001))
    assert len(folders(run)) == 3_001 and name(20_000) not in folders(run)


@pytest.mark.usefixtures("each_format")
def test_a_run_on_s3(moto_bucket: S3Place) -> None:
    """On a real server: keep, find, fork, and go back."""
    options = {"storage_options": moto_bucket.storage_options}
    run, fork = moto_bucket.url("run"), moto_bucket.url("fork")
    with manager(run, keep=Keep(newest=1, best=1, metric="loss"), background=True, save_every=1, **options) as job:
        assert restored(job) is None
        for step, loss in enumerate((3, 1, 2, 4, 5), 1):
            job.step(step, state(step), {"loss": loss})
    assert job.steps() == [2, 5]
    with manager(fork, init_from=f"{run}/{name(5)}", keep=Keep(), **options) as job:
        assert restored(job) == 5
        with pytest.raises(zarrckpt.CheckpointPinnedError):
            zarrckpt.remove(f"{run}/{name(5)}", **options)
        job.save(6, state(6))
    with manager(run, **options) as job:
        assert restored(job, step=2, rewind=True) == 2
    keys = {item["Key"] for item in moto_bucket.client().list_objects_v2(Bucket=moto_bucket.bucket)["Contents"]}
    assert {"/".join(key.split("/")[:2]) for key in keys} == {
        f"run/{name(2)}",
        "run/@run",
        f"fork/{name(6)}",
        "fork/@run",
    }


# -- owners of the run


@pytest.mark.usefixtures("each_format")
def test_a_replaced_job_cannot_save(tmp_path: Path) -> None:
    with manager(tmp_path, keep=Keep()) as old, manager(tmp_path, keep=Keep()) as new:
        old.restore(state(0))
        old.save(10, state(10))
        assert restored(new) == 10
        for _ in range(2):
            with pytest.raises(zarrckpt.RunTakenOverError, match=str(tmp_path)):
                old.save(20, state(20))
        with pytest.raises(zarrckpt.RunTakenOverError):
            old.restore(state(0))
        assert folders(tmp_path) == {name(10)}
        new.save(20, state(20))
    assert sound(tmp_path) == [20]


@pytest.mark.usefixtures("each_format")
@pytest.mark.parametrize("background", [False, True])
def test_a_takeover_before_the_commit_fails_the_save(background: bool, tmp_path: Path) -> None:
    with watched(tmp_path) as watch, manager(tmp_path, background=background) as old, manager(tmp_path) as new:
        old.restore(state(0))

        def take(call: Call) -> None:
            if call.verb == "put" and call.key.startswith(f"{name(10)}/w/c."):
                watch.rule = lambda _: None
                new.restore(state(0))

        watch.rule = take
        with pytest.raises(zarrckpt.RunTakenOverError):
            old.save(10, state(10)).result()
        if background:
            with pytest.raises(zarrckpt.RunTakenOverError):
                old.wait()
        assert new.steps() == []
        new.save(10, state(10))
    assert sound(tmp_path) == [10]


@pytest.mark.usefixtures("each_format")
def test_a_takeover_before_a_deletion_keeps_the_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Between two deletions, and after one more commit. Then the old job no longer deletes."""
    saved(tmp_path, 10)
    deleting, committed = threading.Event(), threading.Event()
    with watched(tmp_path) as watch, manager(tmp_path, keep=Keep()) as old, manager(tmp_path) as new:
        old.restore(state(0))

        def rule(call: Call) -> None:
            if threading.current_thread().name != "zarrckpt-retention":
                return
            if call.key.startswith(f"{name(10)}/@zarrckpt"):
                deleting.set()
                committed.wait(60)
            elif call.key == RUN and committed.is_set():
                watch.rule = lambda _: None
                new.restore(state(0))

        watch.rule = rule
        old.save(20, state(20))
        assert deleting.wait(60)
        old.save(30, state(30))
        committed.set()
        begin = time.monotonic()
        old.close()
        assert time.monotonic() - begin < 30
        assert watch.rule is not rule and new.steps() == [20, 30]
    assert [record.levelname for record in caplog.records] == ["WARNING"]


@pytest.mark.usefixtures("each_format")
def test_the_last_of_two_simultaneous_jobs_continues(tmp_path: Path) -> None:
    """Both read the same document: the job that puts last continues and detects the other."""
    saved(tmp_path, 10)
    with watched(tmp_path) as watch, manager(tmp_path) as one, manager(tmp_path) as other:

        def take(call: Call) -> None:
            if call.key == RUN and call.verb == "put":
                watch.rule = lambda _: None
                assert restored(other) == 10

        watch.rule = take
        assert restored(one) == 10
        with pytest.raises(zarrckpt.RunTakenOverError):
            other.save(20, state(20))
        one.save(20, state(20))
    assert sound(tmp_path) == [10, 20]


def test_checkpoints_of_other_runs_stay(tmp_path: Path) -> None:
    run = tmp_path / "run"
    saved(tmp_path / "other", 7)
    saved(run, 10)
    zarrckpt.save(state(5), run / name(5))
    zarrckpt.save(state(8), run / "best")
    stopping = FaultyStore(run / name(6), lambda call: STOP if call.key.endswith("/c") else None)
    with pytest.raises(Stopped):
        zarrckpt.save(state(6), stopping)
    shutil.copytree(tmp_path / "other" / name(7), run / name(7))
    saved(run, 20, 30, keep=Keep())
    assert folders(run) == {name(5), name(6), name(7), name(30), "best"}
    # They are not counted either: neither as the newest, nor as the best.
    with manager(tmp_path / "other") as job:
        job.save(90, state(90), {"loss": 0})
    shutil.copytree(tmp_path / "other" / name(90), run / name(90))
    with manager(run, keep=Keep(best=1, metric="loss")) as job:
        assert restored(job, step=90) == 90
        for step, loss in ((100, 2), (110, 1), (120, 3)):
            job.save(step, state(step), {"loss": loss})
    assert folders(run) == {name(5), name(6), name(7), name(90), name(110), name(120), "best"}


def test_copies_in_the_folder_are_not_deleted(tmp_path: Path) -> None:
    saved(tmp_path, 10, 20)
    shutil.copytree(tmp_path / name(10), tmp_path / name(15))
    shutil.copytree(tmp_path / name(10), tmp_path / "step-10")
    zarrckpt.copy(tmp_path / name(10), tmp_path / "aside")
    zarrckpt.remove(tmp_path / name(10))
    zarrckpt.copy(tmp_path / "aside", tmp_path / name(10))
    saved(tmp_path, 30, 40, keep=Keep())
    assert folders(tmp_path) == {name(10), name(15), "step-10", "aside", name(40)}
    # Nor do they count.
    shutil.copytree(tmp_path / name(10), tmp_path / name(60))
    saved(tmp_path, 70, keep=Keep(newest=2))
    assert folders(tmp_path) >= {name(40), name(60), name(70)}


@pytest.mark.parametrize("removed", [zarrckpt.remove, shutil.rmtree])
def test_a_best_checkpoint_removed_by_hand_does_not_count(removed: Callable[[Path], Any], tmp_path: Path) -> None:
    with manager(tmp_path, keep=Keep(newest=1, best=1, metric="loss")) as job:
        for step, loss in ((1, 0.1), (2, 0.5)):
            job.save(step, state(step), {"loss": loss})
        removed(tmp_path / name(1))
        job.save(3, state(3), {"loss": 3.0})
        job.save(4, state(4), {"loss": 4.0})
    assert sound(tmp_path) == [2, 4]


def test_a_run_keeps_its_id(tmp_path: Path) -> None:
    run, copy = tmp_path / "run", tmp_path / "copy"
    saved(run, 10)
    saved(run, 20)
    saved(tmp_path / "other", 10)
    assert run_id(run / name(10)) == run_id(run / name(20)) != run_id(tmp_path / "other" / name(10))
    # Checkpoints that were moved to another folder, without the run's document.
    copy.mkdir()
    shutil.copytree(run / name(20), copy / name(20))
    saved(copy, 30, keep=Keep())
    assert run_id(copy / name(30)) == run_id(run / name(10)) and folders(copy) == {name(30)}


def test_a_damaged_document_of_a_run(tmp_path: Path) -> None:
    saved(tmp_path, 10)
    before = run_id(tmp_path / name(10))
    document = tmp_path / RUN
    document.write_bytes(document.read_bytes()[:-20])
    for action in (lambda job: job.restore(state(0)), lambda job: job.save(20, state(20))):
        with manager(tmp_path) as job, pytest.raises(zarrckpt.CorruptCheckpointError, match=RUN):
            action(job)
    document.unlink()
    saved(tmp_path, 20)
    assert run_id(tmp_path / name(20)) == before


# -- forks


def is_pinned(url: Path) -> bool:
    """Whether a checkpoint is pinned. Checked by removing a copy of it."""
    copy = url.parent.parent / "copy"
    shutil.copytree(url, copy)
    try:
        zarrckpt.remove(copy)
    except zarrckpt.CheckpointPinnedError:
        return True
    finally:
        shutil.rmtree(copy, ignore_errors=True)
    return False


def test_a_fork_pins_its_source_until_its_first_save(tmp_path: Path) -> None:
    saved(tmp_path / "run", 100)
    source, fork = tmp_path / "run" / name(100), tmp_path / "fork"
    with manager(fork, init_from=source, keep=Keep(), save_every=10) as job:
        assert restored(job) == 100 and is_pinned(source)
        assert job.step(105, state(105)) is None
        job.step(110, state(110))
    assert not is_pinned(source) and run_id(fork / name(110)) != run_id(source)
    # From now on the fork continues from its own checkpoint, and no checkpoint is pinned.
    with manager(fork, init_from=source) as job:
        assert restored(job) == 110 and not is_pinned(source)
    assert sound(tmp_path / "run") == [100]


def test_init_keys_loads_a_part(tmp_path: Path) -> None:
    saved(tmp_path / "run", 100)
    with manager(tmp_path / "fork", init_from=tmp_path / "run" / name(100), init_keys="deep") as job:
        target = state(0)
        assert job.restore(target) is None
        assert int(target["deep"]["er"]["n"]) == 100 and torch.equal(target["w"], state(0)["w"])
        job.save(1, state(1))
    assert sound(tmp_path / "fork") == [1]


@pytest.mark.filterwarnings("error")
def test_a_fork_whose_first_job_dies(tmp_path: Path) -> None:
    """The next job releases the source that it is given. The job after that has nothing to warn about."""
    saved(tmp_path / "run", 100)
    source, fork = tmp_path / "run" / name(100), tmp_path / "fork"
    with manager(fork, init_from=source) as dead:
        restored(dead)
    assert is_pinned(source)
    with manager(fork, init_from=source, keep=Keep()) as job:
        assert restored(job) == 100 and is_pinned(source)
        job.save(101, state(101))
    assert not is_pinned(source)
    with manager(fork) as job:
        assert restored(job) == 101


@pytest.mark.parametrize("other", [True, False])
def test_a_restarted_fork_warns_of_a_pin_that_stays(other: bool, tmp_path: Path) -> None:
    saved(tmp_path / "run", 100, 200)
    first, second, fork = tmp_path / "run" / name(100), tmp_path / "run" / name(200), tmp_path / "fork"
    with manager(fork, init_from=first) as dead:
        restored(dead)
    with manager(fork, init_from=second if other else None) as job:
        with pytest.warns(UserWarning, match="zarrckpt.unpin") as warned:
            assert restored(job) == (200 if other else None)
        job.save(201, state(201))
    assert is_pinned(first) and not is_pinned(second)
    (text,) = [str(one.message) for one in warned]
    eval(text[text.index("zarrckpt.unpin") :])
    assert not is_pinned(first)


def test_a_copy_of_a_fork_leaves_the_pin_of_the_first(tmp_path: Path) -> None:
    saved(tmp_path / "run", 100)
    source, fork, copy = tmp_path / "run" / name(100), tmp_path / "fork", tmp_path / "copied"
    with manager(fork, init_from=source) as job:
        restored(job)
        shutil.copytree(fork, copy)
        with manager(copy, init_from=source) as other:
            with pytest.warns(UserWarning, match="copied"):
                restored(other)
            other.save(101, state(101))
        assert is_pinned(source)
        job.save(101, state(101))
    assert not is_pinned(source)


@pytest.mark.filterwarnings("always")
def test_no_text_of_a_run_document_is_opened(tmp_path: Path) -> None:
    run, victim = tmp_path / "run", tmp_path / "victim" / name(7)
    saved(tmp_path / "victim", 7)
    pin = zarrckpt.pin(victim)
    saved(run, 1)
    document = run / RUN
    for source in (str(victim), f"reference://::file://{victim}", "\x1b[2J\u202e\x9b" + "x" * 5000):
        own = f',"source":{json.dumps(source)},"pin":"{pin}"}}}}}}'
        document.write_bytes(_seal(document.read_bytes().removesuffix(b"}}}") + own.encode()))
        with watched(tmp_path / "victim") as watch, manager(run) as job:
            with pytest.warns(UserWarning, match=pin) as warned:
                job.restore(state(0))
            job.save((last := max(job.steps())) + 1, state(last + 1))
        assert watch.calls == [] and str(warned[0].message).isprintable() and len(str(warned[0].message)) < 5000
        assert is_pinned(victim) and b"source" not in document.read_bytes()


def test_a_fork_on_s3_whose_first_job_dies(s3_stub: S3Server) -> None:
    place = s3_stub.bucket()
    options = {"storage_options": place.storage_options}
    source = place.url(f"run/{name(100)}")
    zarrckpt.save(state(100), source, **options)
    with manager(place.url("fork"), init_from=source, **options) as dead:
        restored(dead)
    with manager(place.url("fork"), init_from=source, keep=Keep(), **options) as job:
        job.save(101, state(101))
    assert zarrckpt.remove(source, **options) > 0


def test_a_source_that_cannot_be_pinned(tmp_path: Path) -> None:
    saved(tmp_path / "run", 100)
    source = zarr.storage.LocalStore(tmp_path / "run" / name(100), read_only=True)
    with manager(tmp_path / "fork", init_from=source) as job:
        with pytest.warns(UserWarning, match=name(100)):
            assert restored(job) == 100
        job.save(101, state(101))
    with (
        manager(tmp_path / "fork2", init_from=tmp_path / "nothing") as job,
        pytest.raises(zarrckpt.CheckpointNotFoundError, match="nothing"),
    ):
        job.restore(state(0))


def test_a_run_that_may_only_be_read_is_restored(tmp_path: Path) -> None:
    """Only a save fails. Another job that continues the run is not stopped."""
    saved(tmp_path / "run", 90, 100)
    folder = zarr.storage.LocalStore(tmp_path / "run", read_only=True)
    message = r"CheckpointManager\('.*run', read_only=True\)"
    with manager(folder) as job, manager(tmp_path / "run") as other:
        assert restored(other) == 100
        with pytest.warns(UserWarning, match=message):
            assert restored(job) == 100
        with pytest.raises(zarrckpt.StorageError, match=message):
            job.save(101, state(101))
        with pytest.raises(zarrckpt.StorageError, match=message):
            job.restore(state(0), step=90, rewind=True)
        other.save(101, state(101))
    with manager(tmp_path / "fork", init_from=tmp_path / "run" / name(90)) as job:
        assert restored(job) == 90


# -- managers that only read


@pytest.mark.usefixtures("each_format")
def test_an_evaluation_does_not_end_the_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with manager(tmp_path) as job:
        assert restored(job) is None
        handler = signal.getsignal(signal.SIGTERM)
        with watched(tmp_path) as watch:
            arguments: dict[str, Any] = {"read_only": True, "signals": ("SIGTERM",), "keep": Keep(), "save_every": 1}
            with manager(tmp_path, **arguments) as evaluation:
                assert restored(evaluation) is None
                for step in (1, 2):
                    job.save(step, state(step), {"loss": step})
                    watch.calls.clear()
                    assert restored(evaluation) == step and signal.getsignal(signal.SIGTERM) is handler
                    assert {verb for verb, _ in watch.calls} <= {"get", "read", "list"}
                watch.calls.clear()
                assert restored(evaluation, step=1) == 1 and evaluation.steps() == [1, 2]
                calls: list[Callable[[], Any]] = [
                    lambda: evaluation.save(3, state(3)),
                    lambda: evaluation.step(3, state(3)),
                    lambda: evaluation.pin(2),
                    lambda: evaluation.unpin(2),
                    lambda: evaluation.restore(state(0), step=1, rewind=True),
                ]
                for call in calls:
                    with pytest.raises(zarrckpt.CheckpointError, match=r"read_only=True"):
                        call()
                assert evaluation.wait() is None
            assert {verb for verb, _ in watch.calls} <= {"get", "read", "list"}
        job.save(3, state(3))
        caplog.set_level(logging.INFO)
        with manager(tmp_path) as other:
            assert restored(other) == 3
        assert [record.levelname for record in caplog.records if "took over the run" in record.getMessage()] == ["INFO"]
        with pytest.raises(zarrckpt.RunTakenOverError, match=r"only evaluates, use .*read_only=True"):
            job.save(4, state(4))


@pytest.mark.parametrize("deletions", [1, 3, 4])
def test_an_evaluation_loads_the_next_checkpoint_if_one_is_deleted(deletions: int, tmp_path: Path) -> None:
    with watched(tmp_path) as watch, manager(tmp_path, keep=Keep()) as job:
        job.save(1, state(1))
        with manager(tmp_path, read_only=True) as evaluation:
            newest = 1

            def delete(call: Call) -> None:
                nonlocal newest
                if call.verb == "read" and call.key == f"{name(newest)}/w/c.0.0" and newest <= deletions:
                    newest += 1
                    job.save(newest, state(newest), {"loss": 1})
                    job._coordinator.retention.settle(60)

            watch.rule = delete
            if deletions <= 3:
                assert restored(evaluation) == deletions + 1
            else:
                with pytest.raises(zarrckpt.CheckpointRemovedError, match=name(4)):
                    evaluation.restore(state(0))


def test_an_evaluation_never_returns_none_after_a_partial_load(tmp_path: Path) -> None:
    """The folder has no document of a run, and its only checkpoint is removed during the load."""
    zarrckpt.save(state(1), tmp_path / name(1))
    with watched(tmp_path) as watch, manager(tmp_path, read_only=True) as evaluation:

        def remove(call: Call) -> None:
            if call.verb == "read" and "/w" in call.key:
                watch.rule = lambda _: None
                zarrckpt.remove(tmp_path / name(1))

        watch.rule = remove
        with pytest.raises(zarrckpt.CheckpointRemovedError):
            evaluation.restore(state(0))
    assert not (tmp_path / "@run").exists()


# -- saves


class Untouchable:
    """A tensor of one element on a device that must not be waited for."""

    dtype = torch.float32
    size = 1
    read = 0

    def numel(self) -> int:
        return 1

    def item(self) -> float:
        self.read += 1
        return 0.25


def test_metrics_are_checked_at_once_and_read_when_they_are_saved(tmp_path: Path) -> None:
    with manager(tmp_path, save_every=10) as job:
        loss = Untouchable()
        assert job.step(1, state(1), {"loss": loss}) is None and loss.read == 0
        no_numbers: list[Any] = ["0.5", True, [1], {"a": 1}, torch.ones(2), torch.tensor(True), torch.tensor(1j)]
        no_numbers += [np.ones(3), np.bool_(True), np.array("x"), b"1", object(), 1j, torch.zeros(0)]
        for number, value in enumerate(no_numbers, 2):
            assert number < 20
            with pytest.raises(TypeError, match="loss"):
                job.step(number, state(number), {"loss": value})
        with pytest.raises(TypeError, match="metrics"):
            job.step(20, state(20), 0.5)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="7"):
            job.step(21, state(21), {7: 0.5})  # type: ignore[dict-item]
        assert folders(tmp_path) == set()
        job.step(22, state(22), {"loss": loss})
        job.step(25, state(25), {"loss": loss})
        assert loss.read == 1
    assert zarrckpt.open(tmp_path / name(22)).metadata["loss"] == 0.25


class Level(enum.IntEnum):
    ONE = 1


class Loss(float):
    pass


def test_metrics_that_are_accepted_can_be_saved(tmp_path: Path) -> None:
    values: list[tuple[Any, float]] = [(Level.ONE, 1), (Loss(0.5), 0.5), (np.longdouble(0.5), 0.5), (2**511, 2**511)]
    values += [(np.float16(2), 2.0), (np.array([[3]], "g"), 3.0)]
    wrong: list[tuple[str, Any]] = [("loss", 2**600), ("loss", torch.empty(1, device="meta")), ("step", 1)]
    wrong += [("$loss", 1), ("zarrckpt.loss", 1), ("\ud800", 1)]
    with manager(tmp_path, save_every=100) as job:
        for step, (metric, value) in enumerate(wrong, 1):
            with pytest.raises((TypeError, ValueError), match=re.escape(repr(metric)[1:-1])):
                job.step(step, state(step), {metric: value})
        for step, (given, expected) in enumerate(values, 10):
            job.save(step, state(step), {"loss": given}, {"other": given})
            found = zarrckpt.open(tmp_path / name(step)).metadata
            assert found["loss"] == found["other"] == expected


def test_a_metric_that_no_save_has_is_refused(tmp_path: Path) -> None:
    rules = Keep(best=1, metric="val_loss")
    with manager(tmp_path, keep=rules) as job:
        with pytest.warns(UserWarning, match=r"'val_loss'.*'loss'"):
            job.save(1, state(1), {"loss": 1})
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for step in range(2, 5):
                job.save(step, state(step), {"loss": 1})
        job.save(5, state(5))  # without any metric, as before pre-emption
        with pytest.raises(zarrckpt.CheckpointError, match="'val_loss'"):
            job.save(6, state(6), {"loss": 1})
        job.save(6, state(6), {"loss": 1, "val_loss": None})
        job.save(7, state(7), {"loss": 1})
    with manager(tmp_path, keep=Keep(newest=20, best=1, metric="loss")) as job, warnings.catch_warnings():
        job.save(8, state(8), {"loss": 1})
        warnings.simplefilter("ignore")
        for step in range(9, 20):
            job.save(step, state(step), {"accuracy": 1})


def test_steps_ascend(tmp_path: Path) -> None:
    with manager(tmp_path, save_every=10) as job:
        assert [job.step(step, state(step)) is not None for step in (0, 3, 9, 10, 11, 19, 35, 39, 40)] == [
            False, False, False, True, False, False, True, False, True
        ]  # fmt: skip
        for step in (40, 39, -1):
            with pytest.raises(ValueError, match=str(step)):
                job.step(step, state(step))
        with pytest.raises(ValueError, match="5"):
            job.save(5, state(5))
        with pytest.raises(TypeError):
            job.step(41.5, state(41))  # type: ignore[arg-type]
        again = job.save(41, state(41))
        assert job.save(41, state(41)) is again
        assert job.steps() == [10, 35, 40, 41]
    with manager(tmp_path) as job:
        with pytest.raises(zarrckpt.CheckpointExistsError, match="41"):
            job.save(41, state(41))
        with pytest.raises(ValueError):
            job.save(-1, state(0))
    assert sound(tmp_path) == [10, 35, 40, 41]


def test_names_in_both_metrics_and_metadata_are_refused(tmp_path: Path) -> None:
    with manager(tmp_path) as job:
        for metrics, metadata in (({"a": 1}, {"a": 2}), ({}, {"step": 3}), ({"step": 3}, None)):
            with pytest.raises(ValueError, match="'a'" if metadata == {"a": 2} else "'step'"):
                job.save(3, state(3), metrics, metadata)
        job.save(3, state(3))


@pytest.mark.parametrize("background", [False, True])
def test_step_returns_the_existing_save_of_its_step(background: bool, tmp_path: Path) -> None:
    with manager(tmp_path, save_every=1, background=background) as job:
        first = job.save(3, state(3))
        assert job.step(3, state(300)) is first
        with pytest.raises(ValueError):
            job.step(3, state(3))
        assert job.step(4, state(4)) is job.save(4, state(400))
        assert restored(job, step=3, rewind=True) == 3
        with pytest.raises(ValueError):
            job.step(3, state(3))
    assert sound(tmp_path) == [3]


@pytest.mark.parametrize("background", [False, True])
def test_a_failed_step_is_saved_by_the_same_call(background: bool, tmp_path: Path) -> None:
    with watched(tmp_path) as watch, manager(tmp_path, save_every=10, background=background) as job:
        watch.rule = lambda call: FAIL if call.verb == "put" and call.key.startswith(f"{name(10)}/w/") else None
        with pytest.raises(zarrckpt.StorageError):
            job.step(10, state(10))
            job.wait()
        watch.rule = lambda _: None
        future = job.save(10, state(10)) if background else job.step(10, state(10))
        assert future is not None and future.result().objects > 0
    assert sound(tmp_path) == [10]


def test_a_job_may_restart_before_the_first_checkpoint(tmp_path: Path) -> None:
    with manager(tmp_path, save_every=10) as job:
        for _ in range(2):
            assert restored(job) is None
            assert [job.step(step, state(step)) for step in (1, 2, 3)] == [None] * 3
    saved(tmp_path / "source", 100)
    with manager(tmp_path / "fork", init_from=tmp_path / "source" / name(100), init_keys="deep", save_every=10) as job:
        for _ in range(2):
            assert job.restore(state(0)) is None
            assert job.step(1, state(1)) is None
    assert zarrckpt.recover(tmp_path / "fork").objects == 0


def test_a_closed_manager_is_an_error(tmp_path: Path) -> None:
    with manager(tmp_path, save_every=1) as job:
        job.step(1, state(1))
    job.close()
    for action in (lambda: job.step(2, state(2)), lambda: job.save(2, state(2)), lambda: job.save(1, state(1))):
        with pytest.raises(ValueError, match="closed"):
            action()
    assert job.steps() == [1]


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    wrong: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (TypeError, "keep", {"keep": 3}),
        (ValueError, "save_every", {"save_every": 0}),
        (TypeError, "signals", {"signals": "SIGTERM"}),
        (ValueError, "SIGNOTHING", {"signals": ("SIGNOTHING",)}),
        (ValueError, "SIGKILL", {"signals": ("SIGKILL",)}),
        (ValueError, "grace", {"grace": 0}),
    ]
    for error, match, arguments in wrong:
        with pytest.raises(error, match=match):
            manager(tmp_path / "run", **arguments)
    rules: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (ValueError, "newest", {"newest": 0}),
        (ValueError, "metric", {"best": 1}),
        (ValueError, "mode", {"mode": "least"}),
        (TypeError, "metric", {"metric": 3}),
        (ValueError, "every_steps", {"every_steps": 0}),
    ]
    for error, match, arguments in rules:
        with pytest.raises(error, match=match):
            Keep(**arguments)
    assert not (tmp_path / "run").exists()


def test_a_failed_background_save_is_raised_when_the_next_one_is_due(tmp_path: Path) -> None:
    with watched(tmp_path) as watch, manager(tmp_path, save_every=10, background=True, keep=Keep()) as job:

        def fail(call: Call) -> Fault | None:
            return FAIL if call.verb == "put" and call.key.startswith(f"{name(10)}/w/") else None

        watch.rule = fail
        future = job.step(10, state(10))
        assert future is not None and isinstance(future.exception(), zarrckpt.StorageError)
        assert job.step(15, state(15)) is None
        with pytest.raises(zarrckpt.StorageError, match=name(10)):
            job.step(20, state(20))
        # The same call again saves it: one failure costs one checkpoint.
        assert job.step(20, state(20)) is not None
        with pytest.raises(ValueError):
            job.step(20, state(20))
        assert job.step(25, state(25)) is None
        job.step(30, state(30))
        assert job.wait() is not None and job.wait() is None
    # The leftovers of the failed save are deleted, too.
    assert folders(tmp_path) == {name(30)}
    with watched(tmp_path) as watch:
        job = manager(tmp_path, background=True)
        watch.rule = lambda call: FAIL if call.verb == "put" and name(40) in call.key else None
        job.save(40, state(40))
        with pytest.raises(zarrckpt.StorageError, match=name(40)):
            job.close()
        job.close()


# -- deletions that fail


def test_a_checkpoint_that_cannot_be_deleted_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The others are deleted all the same. The failing one is deleted once the store allows it."""
    caplog.set_level(logging.WARNING)
    with watched(tmp_path) as watch, manager(tmp_path, keep=Keep()) as job:
        for refused, first, left in (({1, 3}, 1, {1, 3, 6}), ({*range(20)}, 7, {1, 3, *range(6, 12)})):

            def rule(call: Call, refused: set[int] = refused) -> Fault | None:
                return FAIL if call.verb == "delete" and any(name(step) in call.key for step in refused) else None

            watch.rule = rule
            for step in range(first, max(left) + 1):
                job.save(step, state(step))
                assert restored(job) == step  # it waits for deletions
            assert {*job.steps()} == left
        watch.rule = lambda _: None
        job.save(12, state(12))
    assert folders(tmp_path) == {name(12)}
    logged = [record.getMessage() for record in caplog.records]
    assert [sum(name(step) in text for text in logged) for step in (1, 3, 6, 7, 8, 9, 10)] == [1] * len(logged)
    # In the next job some of them cannot even be read.
    saved(tmp_path, 13, 14, 15)
    with watched(tmp_path) as watch, manager(tmp_path, keep=Keep()) as job:
        watch.rule = lambda call: FAIL if call.key.startswith(f"{name(13)}/") else None
        job.save(16, state(16))
    assert folders(tmp_path) == {name(13), name(16)} and name(13) in caplog.messages[-1]


RULES: dict[str, Any] = {"newest": 2, "best": 0, "metric": "loss", "mode": "min", "every_steps": None}


@pytest.mark.parametrize(("before", "pins", "best"), [(0, 0, 0), (0, 4, 2), (9, 0, 0)])
def test_at_most_two_expired_checkpoints_exist(before: int, pins: int, best: int, tmp_path: Path) -> None:
    """A deletion takes longer than a save here. Checkpoints from earlier jobs become fewer."""
    rules = {**RULES, "best": best}
    there: Known = dict.fromkeys(range(before))
    saved(tmp_path, *there)
    with watched(tmp_path) as watch, manager(tmp_path, keep=Keep(**rules)) as job:
        watch.rule = lambda _: time.sleep(0.001 * (threading.current_thread().name == "zarrckpt-retention"))
        for step in range(before, before + 20):
            value = there[step] = float(step % 7)
            job.save(step, state(step), {"loss": value})
            if step < pins:
                job.pin(step)
            expired = len(folders(tmp_path)) - len(survivors(there, rules, {*range(pins)}))
            # Earlier checkpoints are detected after the first commit, and become fewer from then on.
            assert expired <= (before + 3 if before and step < before + 19 else 2), step
    assert folders(tmp_path) == {name(step) for step in survivors(there, rules, {*range(pins)})}


@pytest.mark.usefixtures("each_format")
def test_a_save_before_preemption_waits_for_no_deletion(tmp_path: Path) -> None:
    """Neither does the save that already waits when the signal arrives."""
    go_on = threading.Event()
    with watched(tmp_path) as watch, manager(tmp_path, keep=Keep(), background=True, signals=("SIGUSR1",)) as job:

        def hold_deletions(call: Call) -> None:
            if call.verb == "delete":
                go_on.wait(60)

        watch.rule = hold_deletions
        for step in (1, 2, 3, 4):
            future = job.save(step, state(step))
        assert not future.done()
        os.kill(os.getpid(), signal.SIGUSR1)
        step = 5
        while not job.preempted:
            job.step(step, state(step))
            step += 1
        go_on.set()
    assert job.steps()[-1] == step - 1


@pytest.mark.parametrize("status", [403, 503])
def test_a_server_that_refuses_deletions(status: int, s3_stub: S3Server, caplog: pytest.LogCaptureFixture) -> None:
    place = s3_stub.bucket()
    quick = {"retry_config": {"max_retries": 1, "retry_timeout": 5}}
    arguments: dict[str, Any] = {"storage_options": {**place.storage_options, **quick}, "keep": Keep()}
    with manager(place.url("run"), **arguments) as job:
        job.save(1, state(1))
        s3_stub.faults.refuse_deletes = status
        job.save(2, state(2))
        job.save(3, state(3))
    assert job.steps() == [1, 2, 3] and len(caplog.records) == 2
    with manager(place.url("run"), **arguments) as job:
        # The first conditional put of this process.
        _known_support.clear()
        assert restored(job) == 3
        s3_stub.faults.refuse_deletes = 0
        job.save(4, state(4))
    assert {key.split("/")[2] for key in s3_stub.objects if key.startswith(place.bucket)} == {name(4), "@run"}
    assert zarrckpt.latest(place.url("run"), storage_options=place.storage_options) == place.url(f"run/{name(4)}")


@pytest.mark.usefixtures("each_format")
@pytest.mark.parametrize("keep", [None, Keep(newest=2), Keep(newest=1)])
def test_a_commit_whose_answer_is_lost_succeeds(keep: Keep | None, tmp_path: Path) -> None:
    """The save raised an error, but its checkpoint exists, and counts."""
    with watched(tmp_path) as watch, manager(tmp_path, keep=keep) as job:
        job.save(1, state(1))
        lost: list[Call] = []

        def rule(call: Call) -> Fault | None:
            lost.extend([call] if call.verb == "create" and call.key == f"{name(2)}/zarr.json" else [])
            if call in lost:
                return FAIL_AFTER
            return FAIL if lost and name(2) in call.key else None

        watch.rule = rule
        with pytest.raises(zarrckpt.StorageError):
            job.save(2, state(2))
        watch.rule = lambda _: None
        assert sound(tmp_path) == [1, 2]
        job.save(3, state(3))
    expected = {None: [1, 2, 3], Keep(newest=2): [2, 3], Keep(newest=1): [3]}[keep]
    assert sound(tmp_path) == expected and folders(tmp_path) == {name(step) for step in expected}


def test_a_full_disk_fails_only_one_save(small_disk: Path) -> None:
    run = small_disk / "run"
    large = {"w": torch.rand(1_500_000)}
    with manager(run, keep=Keep(), options=zarrckpt.SaveOptions(durable=False)) as job:
        job.save(1, state(1))
        with pytest.raises(zarrckpt.StorageError, match="disk is full"):
            job.save(2, large)
        job.save(3, state(3))
    assert folders(run) == {name(3)} and sound(run) == [3]


@pytest.mark.usefixtures("each_format")
def test_readers_of_a_deleted_checkpoint_get_an_error(tmp_path: Path) -> None:
    with manager(tmp_path, keep=Keep()) as job:
        job.save(1, state(1))
        reader = zarrckpt.open(tmp_path / name(1))
        job.save(2, state(2))
    with pytest.raises(zarrckpt.CheckpointRemovedError, match=name(1)):
        reader.read()
