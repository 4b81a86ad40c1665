"""Copies have the same bits at another url, and are committed like a save, or do not exist."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from harness.faulty_store import FAIL, STOP, STOP_AFTER, Call, FaultyStore, Stopped, at, writes
from harness.store_servers import S3Place

import zarrckpt
from zarrckpt.cli import main


def _state(value: float = 1.0) -> dict[str, Any]:
    torch.manual_seed(0)
    return {
        "model": {"w": torch.randn(800, 600) * value, "b": torch.randn(7).bfloat16(), "empty": torch.zeros(0, 3)},
        "list": [torch.tensor(value), {"x": 1}],
        3: "three",
        "blob": b"bytes" * 50_000,
    }


@pytest.mark.parametrize(
    "save",
    [
        zarrckpt.save,
        partial(zarrckpt.save, options=zarrckpt.SaveOptions(compression="zstd")),
        partial(zarrckpt.save, options=zarrckpt.SaveOptions(portable_dtypes=True)),
    ],
    ids=["", "zstd", "portable"],
)
def test_a_copy_equals_its_source(tmp_path: Path, save: Callable[..., Any]) -> None:
    save(_state(), tmp_path / "one")
    one = zarrckpt.open(tmp_path / "one")
    seen: list[tuple[int, int]] = []
    report = zarrckpt.copy(one, tmp_path / "two", progress=lambda *done: seen.append(done))
    two = zarrckpt.open(tmp_path / "two")
    assert two.verify() and zarrckpt.diff(one, two) and list(one) == list(two)
    assert seen[-1] == (report.nbytes, report.nbytes) and two.save_id == report.save_id != one.save_id
    assert str(one.load()) == str(two.load())
    target = {**_state(0.0), "blob": None, 3: None}
    zarrckpt.load(target, tmp_path / "two")
    assert torch.equal(target["model"]["w"], _state()["model"]["w"]) and target[3] == "three"
    assert (two.writers("model.w") == one.writers("model.w")).all()


def test_a_part_is_copied_to_s3_and_back(tmp_path: Path, moto_bucket: S3Place) -> None:
    zarrckpt.save(_state(), tmp_path / "one")
    zarrckpt.save(_state(2.0), tmp_path / "one", overwrite=True)  # a tree that is not the canonical one
    url, options = moto_bucket.url("copied"), moto_bucket.storage_options
    part = zarrckpt.open(tmp_path / "one").select("model", "list", exclude=["*.b"])
    zarrckpt.copy(part, url, storage_options=options)
    there = zarrckpt.open(url, storage_options=options)
    assert (
        list(there) == ["model.w", "model.empty", "list.0", "list.1.x"]
        and there.verify()
        and zarrckpt.diff(part, there)
    )
    assert there.load()["list"][1] == {"x": 1}
    zarrckpt.copy(there, tmp_path / "back")
    assert zarrckpt.open(tmp_path / "back").verify() and zarrckpt.diff(part, zarrckpt.open(tmp_path / "back"))


def test_an_existing_checkpoint_is_replaced_only_with_overwrite(tmp_path: Path) -> None:
    zarrckpt.save(_state(), tmp_path / "one")
    zarrckpt.save(_state(2.0), tmp_path / "two")
    one = zarrckpt.open(tmp_path / "one")
    with pytest.raises(zarrckpt.CheckpointExistsError):
        zarrckpt.copy(one, tmp_path / "two")
    zarrckpt.copy(one, tmp_path / "two", overwrite=True)
    assert zarrckpt.diff(one, zarrckpt.open(tmp_path / "two")) and zarrckpt.open(tmp_path / "two").verify()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    with pytest.raises(zarrckpt.ForeignObjectsError):
        zarrckpt.copy(one, tmp_path / "other")


def _one_at_a_time(store: FaultyStore) -> FaultyStore:
    """Make operations run in one order, and always the same number of them."""
    store.max_concurrency = 1
    return store


def _files(place: Path) -> set[str]:
    return {str(path.relative_to(place)) for path in place.rglob("*") if path.is_file()}


@pytest.fixture
def one(tmp_path: Path) -> zarrckpt.Checkpoint:
    """A checkpoint of some tensors in several chunks, and a blob."""
    torch.manual_seed(0)
    state = {"m": {"w": torch.randn(60, 100), "i": torch.arange(3000)}, "b": b"x" * 100_000, "step": 3}
    zarrckpt.save(state, tmp_path / "one", options=zarrckpt.SaveOptions(max_chunk_bytes=1000))
    return zarrckpt.open(tmp_path / "one")


MADE_ANEW: dict[str, Any] = {"dtype": "bfloat16", "compression": "zstd"}


@pytest.mark.parametrize("changes", [{}, MADE_ANEW], ids=["as it is", "made anew"])
def test_a_crash_of_a_copy_leaves_the_old_or_new_checkpoint(tmp_path: Path, changes: dict[str, Any]) -> None:
    small = {"w": torch.ones(3), "b": {"c": torch.zeros(2)}}
    zarrckpt.save(small, tmp_path / "one")
    one = zarrckpt.open(tmp_path / "one")
    counted = _one_at_a_time(FaultyStore(tmp_path / "count"))
    zarrckpt.copy(one, counted, **changes)
    (commit,) = (call.number for call in counted.calls if (call.verb, call.key) == ("create", "zarr.json"))
    for number in range(len(counted.calls)):
        place, fault = tmp_path / str(number), (STOP, STOP_AFTER)[number % 2]
        with pytest.raises(Stopped):
            zarrckpt.copy(one, _one_at_a_time(FaultyStore(place, at(number, fault))), **changes)
        if number < commit or (number == commit and fault == STOP):
            with pytest.raises(zarrckpt.CheckpointNotFoundError):
                zarrckpt.open(place)
            zarrckpt.copy(one, place, **changes)
        two = zarrckpt.open(place)
        assert zarrckpt.diff(tmp_path / "count", two) and two.verify()
        assert zarrckpt.recover(place, stopped=True).objects == 0


@pytest.mark.parametrize("over", ["nothing", "a checkpoint"])
@pytest.mark.parametrize("changes", [{}, MADE_ANEW], ids=["as it is", "made anew"])
def test_a_failed_copy_removes_its_objects(
    tmp_path: Path, one: zarrckpt.Checkpoint, over: str, changes: dict[str, Any]
) -> None:
    place = tmp_path / "two"
    if over != "nothing":
        zarrckpt.save({"w": torch.ones(3)}, place)
    before, chunks = _files(place), 0
    for number in (8, 20, 30):
        store = FaultyStore(place, writes(number, FAIL))
        with pytest.raises(zarrckpt.StorageError):
            zarrckpt.copy(one, store, overwrite=True, **changes)
        chunks += sum(call.verb == "put" and "/c" in call.key for call in store.calls)
        left = _files(place) - before - {"@zarrckpt/zarr.json"}
        assert all(key.startswith("@zarrckpt/") and key.count("/") == 2 for key in left), left  # markers
    assert chunks > 3
    zarrckpt.copy(one, place, overwrite=True, **changes)
    assert zarrckpt.open(place).verify() and "w/c.0" not in _files(place)


def test_a_save_that_commits_during_a_copy_wins(tmp_path: Path, one: zarrckpt.Checkpoint) -> None:
    begun: list[Call] = []

    def rule(call: Call) -> None:
        if call.verb == "put" and call.key.startswith("m/w/c") and not begun:
            begun.append(call)
            zarrckpt.save({"w": torch.ones(3)}, tmp_path / "two")

    with pytest.raises(zarrckpt.CheckpointExistsError):
        zarrckpt.copy(one, FaultyStore(tmp_path / "two", rule))
    assert begun and zarrckpt.open(tmp_path / "two").verify() and list(zarrckpt.open(tmp_path / "two")) == ["w"]
    # Objects that it wrote after the winner's clean-up are gone as well.
    assert not list((tmp_path / "two").glob("m/**/c*"))


SLOW = """
import sys, time
import zarrckpt
from harness.faulty_store import FaultyStore

slow = FaultyStore(sys.argv[2], lambda call: time.sleep(0.02))
zarrckpt.copy(sys.argv[1], slow)
"""


def test_a_killed_copy_can_be_repeated(tmp_path: Path, one: zarrckpt.Checkpoint) -> None:
    place = tmp_path / "two"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen([sys.executable, "-c", SLOW, one.url, str(place)], env=environment)
    while len(list(place.glob("m/w/c*"))) < 4 and process.poll() is None:
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    with pytest.raises(zarrckpt.CheckpointNotFoundError):
        zarrckpt.open(place)
    helper = place / "m" / "w" / f".zarrckpt-{'0' * 16}.part"
    helper.write_bytes(b"half a chunk")
    assert CliRunner().invoke(main, ["cp", one.url, str(place)]).exit_code == 0
    assert zarrckpt.open(place).verify() and zarrckpt.diff(one, zarrckpt.open(place))
    assert not (place / "m").exists() and zarrckpt.recover(place, stopped=True).objects == 0
