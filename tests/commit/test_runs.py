"""Folders of checkpoints, and checkpoints inside checkpoints: refused calls, their messages, and listings."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import zarr
from click.testing import CliRunner, Result
from harness.crashes import Place
from harness.faulty_store import FAIL, STOP, Call, Fault, FaultyStore, Stopped, at
from harness.store_servers import S3Place

import zarrckpt
from zarrckpt.cli import main

STATE = {"model": {"w": torch.arange(6.0)}, "step": 7}


def run(*words: Any) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words])


@pytest.fixture(params=["local", "memory", "s3", "fsspec"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], Place]:
    """Return a function that makes places from paths below one folder."""
    if request.param == "local":
        return lambda path: Place(str(tmp_path / path))
    if request.param == "memory":
        store = zarr.storage.MemoryStore()
        return lambda path: Place(zarr.storage.StorePath(store, path))
    if request.param == "fsspec":
        return lambda path: Place(f"memory://{tmp_path.name}/{path}")
    bucket: S3Place = request.getfixturevalue("moto_bucket")
    return lambda path: Place(bucket.url(path), storage_options=bucket.storage_options)


# -- inside a checkpoint


def test_a_save_inside_a_checkpoint_is_refused_before_a_put(place: Callable[[str], Place]) -> None:
    outer = place("run/out")
    zarrckpt.save(STATE, **outer.options)
    before = outer.keys()
    for inner in ("run/out/best", "run/out/best/step-3", "run/out/a/b/c"):
        for overwrite in (False, True):
            with pytest.raises(zarrckpt.ForeignObjectsError, match=r"lies inside .*run/out\b") as raised:
                zarrckpt.save(STATE, **place(inner).options, overwrite=overwrite)
            assert "run/out/" in str(raised.value)  # its own url
    with pytest.raises(zarrckpt.ForeignObjectsError, match="lies inside"):
        zarrckpt.copy(zarrckpt.open(**outer.options), **place("run/out/copy").options)
    assert outer.keys() == before
    # Calls beside it, and calls on it, work as usual.
    zarrckpt.save(STATE, **place("run/other").options)
    zarrckpt.save(STATE, **outer.options, overwrite=True)
    assert zarrckpt.remove(**outer.options) > 0
    zarrckpt.save(STATE, **place("run/out/best").options)


def test_a_path_inside_a_checkpoint_names_it_and_the_part(place: Callable[[str], Place]) -> None:
    outer = place("run/out")
    for _ in range(2):
        # The second time the arrays are below "@...".
        zarrckpt.save({"model": {"a": {"w": torch.ones(2)}}}, **outer.options, overwrite=True)
        tree = zarrckpt.open(**outer.options).info.tree
        for inner, part in {"model": "model", "model/a/w": r"model\.a\.w", "none": None}.items():
            message = r"inside the checkpoint .*run/out: use that url" + (f".*keys='{part}'" if part else "$")
            for read in (zarrckpt.open, lambda **where: zarrckpt.load({}, **where)):
                with pytest.raises(zarrckpt.CheckpointError, match=message):
                    read(**place(f"run/out/{tree}/{inner}".replace("//", "/")).options)


def test_a_save_to_the_folder_of_a_run_is_refused(place: Callable[[str], Place]) -> None:
    """It does not commit: the run continues, and becomes a plain folder again."""
    folder, steps = place("run"), [place(f"run/step-{number}") for number in (1, 2)]
    with pytest.raises(BaseException):  # noqa: B017 - DCP wraps what stops it
        zarrckpt.save(STATE, folder.faulty(at(9, STOP)))
    for step in steps:
        zarrckpt.save(STATE, **step.options)
        zarrckpt.save(STATE, **step.options, overwrite=True)
    for action in (zarrckpt.remove, zarrckpt.recover):
        with pytest.raises(zarrckpt.ForeignObjectsError, match=r"save was begun.*zarrckpt recover .*run --stopped"):
            action(**folder.options)
    report = zarrckpt.recover(**folder.options, stopped=True)
    assert len(report.removed) == 1 and report.kept == ()
    assert len(zarrckpt.recover(**folder.options).checkpoints) == 2
    assert all(zarrckpt.open(**step.options).verify() for step in steps)
    assert {key.partition("/")[0] for key in folder.objects()} == {"step-1", "step-2"}


def test_a_save_below_an_unfinished_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BaseException):  # noqa: B017 - DCP wraps what stops it
        zarrckpt.save(STATE, FaultyStore(tmp_path / "run", at(9, STOP)))
    for inner in ("model", "model/best"):
        with pytest.raises(zarrckpt.ForeignObjectsError, match=f"zarrckpt recover {tmp_path / 'run'} --stopped"):
            zarrckpt.save(STATE, tmp_path / "run" / inner)
    zarrckpt.recover(tmp_path / "run", stopped=True)
    zarrckpt.save(STATE, tmp_path / "run" / "model")


def test_a_clean_up_keeps_a_checkpoint_below_one_of_its_keys(tmp_path: Path) -> None:
    """Both saves began at the same moment. A group's document has the name of the other one's root."""
    outer, inner = tmp_path / "run", tmp_path / "run" / "model"

    def rule(call: Call) -> Fault | None:
        if call.verb == "create" and call.key == "@zarrckpt/zarr.json":
            zarrckpt.save(STATE, inner)
        return STOP if call.verb == "put" and call.key.startswith("model/") else None

    with pytest.raises(Stopped):
        zarrckpt.save({"model": {"w": torch.zeros(6)}}, FaultyStore(outer, rule))
    zarrckpt.recover(outer, stopped=True)
    assert zarrckpt.open(inner).verify()


def test_an_unreadable_parent_folder_does_not_fail_a_save(tmp_path: Path) -> None:
    def rule(call: Call) -> Fault | None:
        return FAIL if call.key.startswith("../") else None

    store = FaultyStore(tmp_path / "run" / "step-1", rule)
    zarrckpt.save(STATE, store)
    assert [call.key for call in store.calls if call.key.startswith("../")]
    assert zarrckpt.open(tmp_path / "run" / "step-1")["step"] == 7


def test_a_checkpoint_may_be_at_the_top_of_a_store(moto_bucket: S3Place) -> None:
    store = zarr.storage.MemoryStore()
    for options in ({"url": store}, {"url": moto_bucket.url(), "storage_options": moto_bucket.storage_options}):
        zarrckpt.save(STATE, **options)
        assert zarrckpt.open(**options)["step"] == 7
    with pytest.raises(zarrckpt.ForeignObjectsError, match="lies inside"):
        zarrckpt.save(STATE, zarr.storage.StorePath(store, "run"))
    with pytest.raises(zarrckpt.ForeignObjectsError, match="lies inside"):
        zarrckpt.save(STATE, moto_bucket.url("run"), storage_options=moto_bucket.storage_options)


def test_the_error_for_nested_checkpoints_names_the_next_step(tmp_path: Path) -> None:
    """Moved folders, or saves before that was refused, create such checkpoints."""
    outer, inner = tmp_path / "out", tmp_path / "out" / "best"
    zarrckpt.save(STATE, outer)
    zarrckpt.save({"step": 8}, tmp_path / "elsewhere")
    shutil.move(tmp_path / "elsewhere", inner)
    actions: list[Callable[[], Any]] = [
        lambda: zarrckpt.save(STATE, outer, overwrite=True),
        lambda: zarrckpt.remove(outer),
        lambda: zarrckpt.recover(outer),
    ]
    for action in actions:
        with pytest.raises(zarrckpt.ForeignObjectsError, match=f"zarrckpt cp {inner}.*zarrckpt rm {inner}"):
            action()
    for words in (["doctor", outer], ["rm", outer, "--yes"], ["recover", outer]):
        found = run(*words)
        assert found.exit_code == 3 and f"zarrckpt rm {inner}" in found.stderr
    assert zarrckpt.open(outer).verify() and zarrckpt.open(inner).verify()
    assert run("cp", inner, tmp_path / "moved").exit_code == 0
    assert run("rm", inner, "--yes").exit_code == 0
    assert zarrckpt.remove(outer) and zarrckpt.open(tmp_path / "moved")["step"] == 8


# -- a folder of checkpoints


def test_a_folder_of_checkpoints_is_named_in_errors(place: Callable[[str], Place]) -> None:
    run_, newest = place("runs/one"), place("runs/one/step-10")
    for step in (10, 9):
        zarrckpt.save({**STATE, "step": step}, **place(f"runs/one/step-{step}").options)
    before = run_.keys()
    actions: dict[str, Callable[[], Any]] = {
        "save": lambda: zarrckpt.save(STATE, **run_.options),
        "overwrite": lambda: zarrckpt.save(STATE, **run_.options, overwrite=True),
        "load": lambda: zarrckpt.load({"step": 0}, **run_.options),
        "open": lambda: zarrckpt.open(**run_.options),
        "remove": lambda: zarrckpt.remove(**run_.options),
        "copy onto it": lambda: zarrckpt.copy(zarrckpt.open(**newest.options), **run_.options),
    }
    for name, action in actions.items():
        with pytest.raises(zarrckpt.CheckpointError, match=r"folder of \d checkpoints?.*the newest is .*step-10\b"):
            action()
        assert run_.keys() == before, name
    if isinstance(run_.url, str) and not run_.storage_options:
        for words in (["rm", "--yes"], ["info"], ["tree"], ["stats"]):
            found = run(words[0], run_.url, *words[1:])
            assert found.exit_code == 3 and f"the newest is {newest.url}" in found.stderr


def test_files_beside_checkpoints_are_ignored(tmp_path: Path) -> None:
    zarrckpt.save(STATE, tmp_path / "step-1")
    (tmp_path / "config.yaml").write_text("lr: 1")
    with pytest.raises(zarrckpt.ForeignObjectsError, match=r"folder of \d checkpoints?.*step-1"):
        zarrckpt.remove(tmp_path)
    (tmp_path / "zarr.json").write_text('{"zarr_format": 3, "node_type": "group", "attributes": {}}')
    with pytest.raises(zarrckpt.ForeignObjectsError, match=r"folder of \d checkpoints?.*step-1"):
        zarrckpt.open(tmp_path)


def test_ls_lists_the_checkpoints_of_a_folder(tmp_path: Path) -> None:
    for step in (10, 9):
        zarrckpt.save({**STATE, "step": step}, tmp_path / f"step-{step}")
    with pytest.raises(BaseException):  # noqa: B017 - DCP wraps what stops it
        zarrckpt.save(STATE, FaultyStore(tmp_path / "step-11", at(9, STOP)))
    zarrckpt.save(STATE, tmp_path / "step-12")
    (tmp_path / "step-12" / "zarr.json").write_text("{")
    (tmp_path / "logs").mkdir()
    rows = [line.split("\t") for line in run("ls", tmp_path).stdout.splitlines()]
    assert [(row[0], row[1], row[-1]) for row in rows] == [
        ("step-9", "9", "24 B"),
        ("step-10", "10", "24 B"),
        ("step-11", "", "unfinished"),
        ("step-12", "", "damaged"),
    ]
    listed = json.loads(run("ls", tmp_path, "--json").stdout)
    assert [item["url"] for item in listed] == [str(tmp_path / f"step-{step}") for step in (9, 10, 11, 12)]
    assert listed[0]["created"] == zarrckpt.open(tmp_path / "step-9").info.created and listed[1]["nbytes"] == 24
    assert [item["state"] for item in listed] == ["committed", "committed", "unfinished", "damaged"]
    # The output for a checkpoint is unchanged, and a pattern cannot match in a folder.
    assert run("ls", tmp_path / "step-9").stdout.startswith("model.w\t")
    assert run("ls", tmp_path, "model.*").exit_code == 3


def test_ls_lists_the_runs_of_a_folder(tmp_path: Path) -> None:
    for name, steps in {"a": (9, 10), "b": (3,)}.items():
        for step in steps:
            zarrckpt.save({**STATE, "step": step}, tmp_path / name / f"step-{step}", metadata={"loss": 1 / step})
    with pytest.raises(BaseException):  # noqa: B017 - DCP wraps what stops it
        zarrckpt.save(STATE, FaultyStore(tmp_path / "a" / "step-11", at(9, STOP)))
    begun = zarrckpt.CheckpointManager(tmp_path / "c", signals=())
    begun.restore(dict(STATE))
    (tmp_path / "logs" / "tensorboard").mkdir(parents=True)
    rows = [line.split("\t") for line in run("ls", tmp_path, "--header").stdout.splitlines()]
    assert [[row[0], row[1], row[2], row[4], row[5]] for row in rows] == [
        ["run", "newest", "step", "size", "loss"],
        ["a", "step-10", "10", "24 B", "0.1"],
        ["b", "step-3", "3", "24 B", "0.333333"],
        ["c", "", "", "no checkpoint", ""],
    ]
    listed = json.loads(run("ls", tmp_path, "--json").stdout)
    assert listed[0]["url"] == str(tmp_path / "a") and listed[0]["metadata"] == {"loss": 0.1}
    assert run("ls", tmp_path, "model.*").exit_code == run("ls", tmp_path / "logs").exit_code == 3


# -- folders that cannot be read


def forbid(monkeypatch: pytest.MonkeyPatch, *folders: Path) -> None:
    """Make some folders unreadable, also for root."""

    def refusing(call: Any) -> Any:
        def refuse(path: Any, *rest: Any, **more: Any) -> Any:
            if isinstance(path, str) and any(f"{path}/".startswith(f"{folder}/") for folder in folders):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
            return call(path, *rest, **more)

        return refuse

    monkeypatch.setattr(os, "open", refusing(os.open))
    monkeypatch.setattr(os, "scandir", refusing(os.scandir))


@pytest.mark.filterwarnings("ignore:.*was skipped:UserWarning")
def test_unreadable_folders_hide_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = tmp_path / "run"
    with pytest.raises(BaseException):  # noqa: B017 - DCP wraps what stops it
        zarrckpt.save(STATE, FaultyStore(runs, at(9, STOP)))
    zarrckpt.save(STATE, runs / "step-00000001")
    with zarrckpt.CheckpointManager(runs, signals=()) as job:
        assert job.restore(dict(STATE)) == 1
        job.save(2, STATE, metrics={"loss": 1})
    hidden = ("lost+found", "private", ".Trash-1000")
    for name in hidden:
        (runs / name).mkdir()
    shutil.copytree(runs / "step-00000002", runs / ".step-00000099")
    (runs / "loop").symlink_to("loop")
    (runs / "step-9").symlink_to("step-9")
    (runs / "nowhere").symlink_to("/nowhere/at/all")
    (runs / "self").symlink_to(".")
    (runs / "step-7").write_text("a file")
    os.mkfifo(runs / "step-8")
    with socket.socket(socket.AF_UNIX) as bound:
        monkeypatch.chdir(runs)
        bound.bind("step-10")
    forbid(monkeypatch, *(runs / name for name in hidden))
    # The save by mistake in their folder is removed.
    assert zarrckpt.recover(runs, stopped=True).checkpoints == () and not list(runs.glob("@zarrckpt/*"))

    newest = runs / "step-00000002"
    assert zarrckpt.latest(runs) == str(newest)
    with pytest.warns(UserWarning, match="nowhere cannot be read and was skipped"):
        assert zarrckpt.best(runs, "loss") == str(newest)
    with zarrckpt.CheckpointManager(runs, signals=()) as job:
        assert job.steps() == [1, 2] and job.restore(dict(STATE)) == 2
        job.save(3, STATE)
    newest = runs / "step-00000003"
    listed = json.loads(run("ls", runs, "--json").stdout)
    assert {row["name"]: row["state"] for row in listed} == {
        "step-00000001": "committed",
        "step-00000002": "committed",
        "step-00000003": "committed",
        "nowhere": "not readable",
        "private": "not readable",
    }
    assert str(runs / "private") in run("ls", runs).stderr
    assert [row["newest"] for row in json.loads(run("ls", tmp_path, "--json").stdout)] == [newest.name]
    found = run("doctor", runs)
    assert found.exit_code == 0 and f"the checkpoint {newest} of the run" in found.stderr
    for words in (["rm", "--yes"], ["info"]):
        found = run(words[0], runs, *words[1:])
        assert found.exit_code == 3 and f"the newest is {newest}." in found.stderr
        assert "'private' there cannot be read" in found.stderr
    report = zarrckpt.recover(runs, stopped=True)
    parts = {part.url.rpartition("/")[2]: part.error for part in report.checkpoints}
    assert [name for name, error in parts.items() if error] == ["nowhere", "private"]
    assert "Permission denied" in parts["private"] and parts["step-00000002"] == parts["step-00000003"] == ""
    with pytest.raises(zarrckpt.ForeignObjectsError, match=f"the newest is {newest}."):
        zarrckpt.save(STATE, runs)


@pytest.mark.parametrize("how", ["forbidden", "a link to a disk that is missing"])
def test_an_unreadable_newest_checkpoint_is_named(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs, last = tmp_path / "run", tmp_path / "run" / "step-00000003"
    with zarrckpt.CheckpointManager(runs, signals=()) as job:
        job.restore(dict(STATE))
        for step in (1, 2, 3):
            job.save(step, STATE, metrics={"loss": step})
    with monkeypatch.context() as patch:
        if how == "forbidden":
            forbid(patch, last)
        else:
            last.rename(runs / "disk")
            last.symlink_to(tmp_path / "missing" / "disk")
        job = zarrckpt.CheckpointManager(runs, signals=())
        for action in (lambda: zarrckpt.latest(runs), lambda: job.restore(dict(STATE)), lambda: job.pin(3)):
            with pytest.raises(zarrckpt.StorageError, match=f"{last} cannot be read, but may have.* move it elsewhere"):
                action()
        with pytest.warns(UserWarning, match=f"{last} cannot be read and was skipped"):
            assert job.steps() == [1, 2]
        with pytest.warns(UserWarning, match=f"{last} cannot be read and was skipped"):
            assert zarrckpt.best(runs, "loss") == str(runs / "step-00000001")
        found = run("ls", runs)
        assert found.exit_code == 0 and str(last) in found.stderr and f"{last.name}\t\t\tnot readable" in found.stdout
        assert "not readable" in run("ls", tmp_path).stdout and str(last) in run("doctor", runs).stderr
        job.close()
    if how != "forbidden":
        last.unlink()
        (runs / "disk").rename(last)
    assert zarrckpt.latest(runs) == str(last)


def test_latest_returns_none_only_if_no_checkpoint_can_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("lost+found", ".Trash-0", "final"):
        (tmp_path / name).mkdir()
    with monkeypatch.context() as patch:
        forbid(patch, tmp_path / "lost+found", tmp_path / ".Trash-0")
        assert zarrckpt.latest(tmp_path) is None
        assert zarrckpt.best(tmp_path, "loss") is None
    forbid(monkeypatch, tmp_path / "final")
    for find in (zarrckpt.latest, lambda folder: zarrckpt.best(folder, "loss")):
        with pytest.raises(zarrckpt.StorageError, match="final cannot be read"):
            find(tmp_path)


# -- recover


def test_recover_accepts_a_folder_of_checkpoints(place: Callable[[str], Place], tmp_path: Path) -> None:
    for step in (1, 2, 3):
        zarrckpt.save({**STATE, "step": step}, **place(f"run/step-{step}").options)

    def stops(call: Call) -> Fault | None:
        return STOP if call.verb == "replace" else None

    broken = FaultyStore(**place("run/step-2").options, rule=stops)
    with pytest.raises(Stopped):
        zarrckpt.save(STATE, broken, overwrite=True)
    report = zarrckpt.recover(**place("run").options)
    assert [part.url.rpartition("/")[2] for part in report.checkpoints] == ["step-1", "step-2", "step-3"]
    assert len(report.kept) == 1 and report.checkpoints[1].kept == report.kept and report.objects == 0
    report = zarrckpt.recover(**place("run").options, stopped=True)
    assert report.objects == report.checkpoints[1].objects > 0 and report.kept == ()
    for step in (1, 2, 3):
        assert zarrckpt.open(**place(f"run/step-{step}").options)["step"] == step
        keys = place(f"run/step-{step}").keys()
        assert not [key for key in keys if key.startswith("@") and not key.startswith("@zarrckpt/")]


def test_recover_continues_after_a_damaged_checkpoint(tmp_path: Path) -> None:
    for step in (1, 2):
        zarrckpt.save(STATE, tmp_path / f"step-{step}")
    (tmp_path / "step-1" / "zarr.json").write_text("{")
    with pytest.raises(BaseException):  # noqa: B017 - DCP wraps what stops it
        zarrckpt.save(STATE, FaultyStore(tmp_path / "step-2", at(12, STOP)), overwrite=True)
    report = zarrckpt.recover(tmp_path, stopped=True)
    assert "zarrckpt.remove deletes it" in report.checkpoints[0].error and not report.checkpoints[1].error
    assert report.objects > 0 and len(report.removed) == 1
    found = run("recover", tmp_path)
    assert found.exit_code == 3 and found.stderr.startswith("step-1: ")
    assert found.stdout == "step-2: nothing to delete\n"


# -- commands and functions on a run


@pytest.fixture
def losses(tmp_path: Path) -> Path:
    """Return the folder of a run with the losses 2, 1 and 3 at the steps 1, 2 and 3."""
    keep = zarrckpt.Keep(newest=2, best=1, metric="loss")
    with zarrckpt.CheckpointManager(tmp_path / "run", keep=keep, signals=(), background=False) as job:
        for step, loss in enumerate((2.0, 1.0, 3.0), 1):
            job.save(step, {**STATE, "step": step}, metrics={"loss": loss}, metadata={"epoch": 0, "note": "x"})
    return tmp_path / "run"


@pytest.mark.parametrize("command", ["verify", "doctor", "cp", "export"])
@pytest.mark.parametrize(
    ("options", "step"),
    [([], 3), (["--step", 2], 2), (["--best", "loss"], 2), (["--best", "loss", "--mode", "max"], 3)],
)
def test_commands_take_a_checkpoint_of_a_run(command: str, options: list[Any], step: int, losses: Path) -> None:
    chosen, out = losses / f"step-{step:08}", losses.parent / "out"
    found = run(command, losses, *([out] if command in ("cp", "export") else []), *options)
    assert found.exit_code == 0 and f"the checkpoint {chosen} of the run" in found.stderr
    if command == "cp":
        assert zarrckpt.open(out)["step"] == step
    elif command == "doctor":
        assert found.stdout.startswith(f"{chosen}: a checkpoint")
    elif command == "export":
        assert (out / "model.safetensors").exists()
    else:
        assert json.loads(run("verify", losses, *options, "--json").stdout)["url"] == str(chosen)


def test_commands_report_damage_in_a_run(losses: Path, tmp_path: Path) -> None:
    assert "has the step 7. List them: zarrckpt ls" in run("verify", losses, "--step", 7).stderr
    found = run("verify", losses, "--best", "los")
    assert found.exit_code == 3 and "did you mean 'loss'" in found.stderr and "has a finite 'los'" in found.stderr
    assert run("verify", losses, "--best", "loss", "--step", 1).exit_code == 2
    # A run in which nothing is damaged but the newest checkpoint is not whole.
    newest = losses / "step-00000003"
    (newest / "zarr.json").write_text("{")
    for command in ("verify", "doctor"):
        found = run(command, losses)
        assert found.exit_code == 1 and f"{newest} is damaged and was skipped" in found.stderr
        assert f"the checkpoint {losses / 'step-00000002'} of the run" in found.stderr
        assert run(command, losses, "--best", "loss").exit_code == 0
    # Not a run.
    (tmp_path / "empty").mkdir()
    for command in ("verify", "cp"):
        found = run(command, tmp_path / "empty", *([tmp_path / "out"] if command == "cp" else []))
        assert found.exit_code == 3 and "nothing is committed" in found.stderr
    zarrckpt.save(STATE, tmp_path / "one")
    zarrckpt.save(STATE, tmp_path / "one-inner")
    shutil.move(tmp_path / "one-inner", tmp_path / "one" / "inner")
    assert run("doctor", tmp_path / "one").exit_code == 3


def test_checkpoints_returns_what_ls_prints(losses: Path, tmp_path: Path) -> None:
    zarrckpt.copy(losses / "step-00000002", losses / "step-x")
    (losses / "step-00000004" / "@zarrckpt").mkdir(parents=True)
    (losses / "step-00000004" / "zarr.json").write_text("{")
    found = zarrckpt.checkpoints(losses)
    assert [(one.name, one.state, one.step, one.kept) for one in found] == [
        ("step-00000002", "committed", 2, ("newest", "best")),
        ("step-00000003", "committed", 3, ("newest",)),
        ("step-x", "committed", 2, ("not named by step",)),
        ("step-00000004", "damaged", None, None),
    ]
    assert [dict(one.metrics) for one in found] == [{"loss": 1.0}, {"loss": 3.0}, {"loss": 1.0}, {}]
    assert found[0].metadata == {"step": 2, "loss": 1.0, "epoch": 0, "note": "x"}
    assert "zarr.json" in found[3].error
    opened = zarrckpt.open(found[1].url)
    assert (opened.nbytes, opened.info.created) == (found[1].nbytes, found[1].created)
    assert json.loads(run("ls", losses, "--json").stdout) == json.loads(json.dumps([*map(dataclasses.asdict, found)]))
    assert zarrckpt.checkpoints(tmp_path / "absent") == []
    with pytest.warns(UserWarning, match="pass the folder that holds it"):
        assert zarrckpt.checkpoints(losses / "step-00000002") == []


def test_checkpoints_has_urls_that_open(place: Callable[[str], Place]) -> None:
    for step in (9, 10):
        zarrckpt.save({**STATE, "step": step}, **place(f"runs/one/step-{step}").options, metadata={"loss": 1 / step})
    folder = place("runs/one")
    options = {"storage_options": folder.storage_options}
    found = zarrckpt.checkpoints(folder.url, **options)
    assert [one.step for one in found] == [9, 10] and [one.kept for one in found] == [None, None]
    assert [one.metrics["loss"] for one in found] == [1 / 9, 0.1]
    if isinstance(folder.url, str):
        assert [zarrckpt.open(one.url, **options)["step"] for one in found] == [9, 10]


def test_ls_shows_the_metrics_of_a_user_first(tmp_path: Path) -> None:
    # As transformers' Trainer saves them, with rules for the steps that it chose as its best.
    keep = zarrckpt.Keep(newest=3, best=1, metric="best_step", mode="max")
    with zarrckpt.CheckpointManager(tmp_path / "run", keep=keep, signals=(), background=False) as job:
        for step in (1, 2):
            speeds = {"eval_runtime": 1.5, "eval_samples_per_second": 3.0}
            metrics = {**speeds, "eval_f1": 0.5, "eval_loss": 1 / step, "best_step": step}
            job.save(step, STATE, metrics, {"epoch": 0.5})
    columns = run("ls", tmp_path / "run", "--header").stdout.splitlines()[0].split("\t")
    assert columns[-5:] == ["eval_f1", "eval_loss", "eval_runtime", "eval_samples_per_second", "kept because"]
    columns = run("ls", tmp_path / "run", "--header", "--all").stdout.splitlines()[0].split("\t")
    assert columns[-3:] == ["best_step", "epoch", "kept because"]
