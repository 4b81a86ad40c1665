"""Copies that were broken off, at any operation or by SIGKILL, and are resumed: nothing twice, nothing mixed up."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from store_servers import S3Place

import zarrckpt
from zarrckpt import testing
from zarrckpt.cli import main

CHANGES: dict[str, dict[str, Any]] = {
    "as it is": {},
    "other chunks": {"max_chunk_bytes": 1500},
    "cast and compressed": {"dtype": "bfloat16", "compression": "zstd"},
}


@pytest.fixture(params=CHANGES.values(), ids=list(CHANGES))
def changes(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Options of a copy."""
    options: dict[str, Any] = request.param
    return options


@pytest.fixture
def one(tmp_path: Path) -> zarrckpt.Checkpoint:
    """A checkpoint of some tensors in several chunks, and a blob."""
    torch.manual_seed(0)
    state = {"m": {"w": torch.randn(60, 100), "i": torch.arange(3000)}, "b": b"x" * 100_000, "step": 3}
    zarrckpt.save(state, tmp_path / "one", max_chunk_bytes=1000)
    return zarrckpt.open(tmp_path / "one")


@pytest.fixture(autouse=True)
def _record_always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zarrckpt._resuming._SECONDS", 0.0)
    monkeypatch.setattr("zarrckpt._resuming._SHARE", 0.0)


def _one_at_a_time(store: testing.FaultyStore) -> testing.FaultyStore:
    """Operations then come in one order, and are always as many."""
    store.max_concurrency = 1
    return store


def _chunks(store: testing.FaultyStore) -> list[str]:
    """The chunks that were put."""
    keys = [call.key for call in store.calls if call.verb == "put" and call.key.rpartition("/")[2].startswith("c")]
    return sorted(key for key in keys if not key.startswith("@zarrckpt"))


def _broken_off(ckpt: zarrckpt.Checkpoint, place: Path, after: int, changes: dict[str, Any], **options: Any) -> str:
    """A copy whose process dies after it has put some chunks; its id."""
    put = 0

    def rule(call: testing.Call) -> testing.Fault | None:
        nonlocal put
        put += call.verb == "put" and "/c" in call.key and not call.key.startswith("@zarrckpt")
        return testing.STOP if put > after else None

    store = _one_at_a_time(testing.FaultyStore(place, rule))
    before = {path.name for path in (place / "@zarrckpt").glob("*") if path.is_dir()}
    with pytest.raises(testing.Stopped):
        ckpt.copy_to(store=store, **changes, **options)
    (found,) = {path.name for path in (place / "@zarrckpt").glob("*") if path.is_dir()} - before
    return found


def _same(one: zarrckpt.Checkpoint, place: Path, changes: dict[str, Any]) -> zarrckpt.Checkpoint:
    """Whether a place holds just what a copy that was never broken off holds."""
    two = zarrckpt.open(place)
    two.verify().raise_if_damaged()
    fresh = place.parent / f"fresh-{time.monotonic_ns()}"
    one.copy_to(fresh, **changes)
    assert zarrckpt.open(fresh).diff(two)
    tables = [
        {n.path: c.checksums(n).tolist() for n in c.root.arrays()}
        for c in (two._catalog, zarrckpt.open(fresh)._catalog)
    ]
    assert tables[0] == tables[1]
    assert not list(place.glob("@zarrckpt/*/done/*"))
    return two


def test_what_is_there_is_not_copied_again(tmp_path: Path, one: zarrckpt.Checkpoint, changes: dict[str, Any]) -> None:
    save_id = _broken_off(one, tmp_path / "two", 4, changes)
    with pytest.raises(zarrckpt.CheckpointNotFoundError):
        zarrckpt.open(tmp_path / "two")
    there = {str(path.relative_to(tmp_path / "two")) for path in (tmp_path / "two").glob("[mb]/**/c*")}
    store = testing.FaultyStore(tmp_path / "two")
    report = one.copy_to(store=store, resume=True, **changes)
    assert report.reused == len(there) == 4 and report.save_id == save_id and not there & {*_chunks(store)}
    assert len(_chunks(store)) == report.objects - 4
    two = _same(one, tmp_path / "two", changes)
    assert two.tree == "" and two.save_id == save_id
    assert zarrckpt.recover(tmp_path / "two", stopped=True).objects == 0


def test_resuming_what_is_committed_does_nothing(
    tmp_path: Path, one: zarrckpt.Checkpoint, changes: dict[str, Any]
) -> None:
    first = one.copy_to(tmp_path / "two", resume=True, **changes)
    for options in ({}, {"overwrite": True}):
        store = testing.FaultyStore(tmp_path / "two")
        report = one.copy_to(store=store, resume=True, **changes, **options)
        assert (report.save_id, report.nbytes, report.reused) == (first.save_id, first.nbytes, first.objects)
        assert not {call.verb for call in store.calls} & testing.WRITES
    with pytest.raises(zarrckpt.CheckpointExistsError):
        one.copy_to(tmp_path / "two", resume=True, compression="blosc")


def test_other_copies_are_not_gone_on_with(tmp_path: Path, one: zarrckpt.Checkpoint, changes: dict[str, Any]) -> None:
    place, saved = tmp_path / "two", tmp_path / "other"
    old = _broken_off(one, place, 6, changes)
    zarrckpt.save(
        {"m": {"w": torch.zeros(60, 100), "i": torch.arange(3000)}, "b": b"y", "step": 3}, saved, max_chunk_bytes=4000
    )
    others: list[tuple[zarrckpt.Checkpoint, dict[str, Any]]] = [
        (zarrckpt.open(saved), changes),
        (one.select("m"), changes),
        (one, {**changes, "chunks": (30, 20)}),
        (one, {**changes, "dtype": "float16"}),
        (one, {**changes, "compression": {"name": "zstd", "level": 3}}),
    ]
    before = {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}
    for ckpt, options in others:
        # Each dies before it commits: the first one is as it was.
        new = _broken_off(ckpt, place, 1, {**options, "resume": True})
        assert new != old and all(path.read_bytes() == data for path, data in before.items())
    # Without resume it is left alone, too.
    _broken_off(one, place, 1, changes)
    assert all(path.read_bytes() == data for path, data in before.items())
    report = one.copy_to(place, resume=True, **changes)
    assert report.save_id == old and report.reused == 6
    _same(one, place, changes)


def test_a_copy_without_resume_is_another_one(
    tmp_path: Path, one: zarrckpt.Checkpoint, changes: dict[str, Any]
) -> None:
    old = _broken_off(one, tmp_path / "two", 4, changes)
    report = one.copy_to(tmp_path / "two", **changes)
    assert report.save_id != old and report.reused == 0
    two = _same(one, tmp_path / "two", changes)
    assert two.tree == f"@{report.save_id}" and not list((tmp_path / "two").glob("m/**/c*"))
    assert one.copy_to(tmp_path / "two", resume=True, **changes).save_id == report.save_id


@pytest.mark.parametrize("damage", ["flipped", "short", "swapped", "gone", "record"])
def test_damaged_chunks_are_made_again(
    tmp_path: Path, one: zarrckpt.Checkpoint, changes: dict[str, Any], damage: str
) -> None:
    _broken_off(one, tmp_path / "two", 12, changes)
    first, second, *_ = sorted((tmp_path / "two" / "m" / "w").glob("c*")) or sorted((tmp_path / "two").glob("m/*/c*"))
    data, other = first.read_bytes(), second.read_bytes()
    if damage == "flipped":
        first.write_bytes(data[:20] + bytes([data[20] ^ 4]) + data[21:])
    elif damage == "short":
        first.write_bytes(data[:-3])
    elif damage == "swapped":
        first.write_bytes(other)
        second.write_bytes(data)
    elif damage == "gone":
        first.unlink()
    for record in (tmp_path / "two").glob("@zarrckpt/*/done/c.0") if damage == "record" else []:
        record.write_bytes(record.read_bytes()[::-1])
    report = one.copy_to(tmp_path / "two", resume=True, **changes)
    assert report.reused == {"swapped": 10, "record": report.reused}.get(damage, 11)
    assert damage != "record" or report.reused in (1, 12)  # the blob, whose checksums are the source's
    _same(one, tmp_path / "two", changes)


def test_overflows_of_before_count(tmp_path: Path) -> None:
    zarrckpt.save({"w": torch.full((4000,), 1e6)}, tmp_path / "one", max_chunk_bytes=4000)
    one, cast = zarrckpt.open(tmp_path / "one"), {"dtype": "float16"}
    _broken_off(one, tmp_path / "two", 2, cast)
    with pytest.warns(UserWarning):
        report = one.copy_to(tmp_path / "two", resume=True, **cast)  # type: ignore[arg-type]
    assert report.reused == 2 and report.overflowed == {"w": 4000}


@pytest.mark.parametrize("changes", [CHANGES["as it is"], CHANGES["cast and compressed"]], ids=["plain", "made anew"])
def test_a_copy_that_dies_anywhere_is_resumed(tmp_path: Path, changes: dict[str, Any]) -> None:
    zarrckpt.save({"w": torch.ones(3), "b": {"c": torch.zeros(2)}}, tmp_path / "one")
    one = zarrckpt.open(tmp_path / "one")
    counted = _one_at_a_time(testing.FaultyStore(tmp_path / "count"))
    one.copy_to(store=counted, **changes)
    for number in range(len(counted.calls)):
        place = tmp_path / str(number)
        fault = testing.STOP if number % 2 else testing.STOP_AFTER
        with pytest.raises(testing.Stopped):
            one.copy_to(store=_one_at_a_time(testing.FaultyStore(place, testing.at(number, fault))), **changes)
        report = one.copy_to(place, resume=True, **changes)
        two = zarrckpt.open(place)
        two.verify().raise_if_damaged()
        assert list(two) == list(one) and two.save_id == report.save_id
        assert zarrckpt.recover(place).kept == ()


def test_failures_leave_a_record(tmp_path: Path, one: zarrckpt.Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zarrckpt._resuming._SECONDS", 1000.0)
    changes = CHANGES["cast and compressed"]
    keys: list[str] = []

    def rule(call: testing.Call) -> testing.Fault | None:
        keys.extend([call.key] * (call.verb == "put" and call.key.startswith("m/w/c")))
        return testing.FAIL if keys[4:] and call.key == keys[4] else None

    store = _one_at_a_time(testing.FaultyStore(tmp_path / "two", rule))
    with pytest.raises(zarrckpt.StorageError):
        one.copy_to(store=store, **changes)
    assert one.copy_to(tmp_path / "two", resume=True, **changes).reused >= 4
    _same(one, tmp_path / "two", changes)


def test_over_a_checkpoint(tmp_path: Path, one: zarrckpt.Checkpoint, changes: dict[str, Any]) -> None:
    zarrckpt.save({"old": torch.ones(3)}, tmp_path / "two")
    save_id = _broken_off(one, tmp_path / "two", 5, changes, overwrite=True)
    assert list(zarrckpt.open(tmp_path / "two")) == ["old"]
    with pytest.raises(zarrckpt.CheckpointExistsError):
        one.copy_to(tmp_path / "two", resume=True, **changes)
    report = one.copy_to(tmp_path / "two", resume=True, overwrite=True, **changes)
    assert report.save_id == save_id and report.reused == 5
    assert _same(one, tmp_path / "two", changes).tree == f"@{save_id}"
    assert not (tmp_path / "two" / "old").exists()


def test_a_save_that_committed_meanwhile_ends_it(
    tmp_path: Path, one: zarrckpt.Checkpoint, changes: dict[str, Any]
) -> None:
    old = _broken_off(one, tmp_path / "two", 5, changes)
    zarrckpt.save({"w": torch.ones(3)}, tmp_path / "two")
    with pytest.raises(zarrckpt.CheckpointExistsError):
        one.copy_to(tmp_path / "two", resume=True, **changes)
    assert zarrckpt.open(tmp_path / "two").verify()
    report = one.copy_to(tmp_path / "two", resume=True, overwrite=True, **changes)
    assert report.save_id != old and report.reused == 0
    _same(one, tmp_path / "two", changes)


def test_a_save_that_commits_while_it_runs_ends_it(
    tmp_path: Path, one: zarrckpt.Checkpoint, changes: dict[str, Any]
) -> None:
    _broken_off(one, tmp_path / "two", 5, changes)
    begun: list[testing.Call] = []

    def rule(call: testing.Call) -> None:
        if call.verb == "put" and call.key.startswith("m/w/c") and not begun:
            begun.append(call)
            zarrckpt.save({"w": torch.ones(3)}, tmp_path / "two")

    with pytest.raises(zarrckpt.CheckpointExistsError):
        one.copy_to(store=testing.FaultyStore(tmp_path / "two", rule), resume=True, **changes)
    assert begun and zarrckpt.open(tmp_path / "two").verify() and list(zarrckpt.open(tmp_path / "two")) == ["w"]
    # What it wrote after the winner's clean-up is gone as well.
    assert not list((tmp_path / "two").glob("m/**/c*"))


@pytest.mark.parametrize("late", ["tables", "root"])
def test_two_who_resume_commit_once(
    tmp_path: Path, one: zarrckpt.Checkpoint, changes: dict[str, Any], late: str
) -> None:
    """One stops before its tables, or its root, until the other has committed, and all its puts come again."""
    save_id = _broken_off(one, tmp_path / "two", 5, changes)
    committed: list[bytes] = []

    def rule(call: testing.Call) -> None:
        if not committed and (call.verb == "create" if late == "root" else "/checksums/" in call.key):
            one.copy_to(tmp_path / "two", resume=True, **changes)
            committed.append((tmp_path / "two" / "zarr.json").read_bytes())

    report = one.copy_to(store=testing.FaultyStore(tmp_path / "two", rule), resume=True, **changes)
    assert report.save_id == save_id and committed == [(tmp_path / "two" / "zarr.json").read_bytes()]
    _same(one, tmp_path / "two", changes)
    assert zarrckpt.recover(tmp_path / "two", stopped=True).objects == 0


def test_races_of_two_who_resume(tmp_path: Path, one: zarrckpt.Checkpoint, changes: dict[str, Any]) -> None:
    for number in range(3):
        place = tmp_path / str(number)
        save_id = _broken_off(one, place, 3, changes)
        found: list[str] = []

        def resume(place: Path = place, found: list[str] = found) -> None:
            found.append(one.copy_to(place, resume=True, **changes).save_id)

        threads = [threading.Thread(target=resume) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [save_id, save_id]
        _same(one, place, changes)


def test_it_is_replaced_while_another_one_works_on_it(tmp_path: Path, one: zarrckpt.Checkpoint) -> None:
    _broken_off(one, tmp_path / "two", 5, {})
    done: list[str] = []

    def rule(call: testing.Call) -> None:
        if call.verb == "put" and call.key.startswith("m/w/c") and not done:
            done.append(one.copy_to(tmp_path / "two", resume=True).save_id)
            zarrckpt.save({"w": torch.ones(3)}, tmp_path / "two", overwrite=True)

    store = testing.FaultyStore(tmp_path / "two", rule)
    with contextlib.suppress(zarrckpt.StorageError):  # what it found is gone; or, if it had put all, it was committed
        assert one.copy_to(store=store, resume=True).save_id == done[0]
    assert list(zarrckpt.open(tmp_path / "two")) == ["w"] and not (tmp_path / "two" / "m").exists()
    zarrckpt.save({"w": torch.zeros(3)}, tmp_path / "two", overwrite=True)  # nothing is nobody's


def test_clean_ups_know_the_record(tmp_path: Path, one: zarrckpt.Checkpoint) -> None:
    for number in range(2):
        _broken_off(one, tmp_path / "two", 5, CHANGES["other chunks"])
        assert len(list((tmp_path / "two").glob("@zarrckpt/*/done/c.0"))) == number + 1
    zarrckpt.recover(tmp_path / "two", stopped=True)
    assert [path.name for path in (tmp_path / "two").rglob("*") if path.is_file()] == ["zarr.json"]  # the claim


def test_on_s3(tmp_path: Path, one: zarrckpt.Checkpoint, moto_bucket: S3Place) -> None:
    changes, url, options = CHANGES["cast and compressed"], moto_bucket.url("resumed"), moto_bucket.storage_options
    rule = testing.writes(22, testing.STOP)
    with pytest.raises(testing.Stopped):
        one.copy_to(store=testing.FaultyStore(url, rule, storage_options=options), **changes)
    report = one.copy_to(url, storage_options=options, resume=True, **changes)
    assert 0 < report.reused < report.objects
    assert zarrckpt.open(url, storage_options=options).verify()


SLOW = """
import sys, time
import zarrckpt
from zarrckpt import _resuming, testing

_resuming._SECONDS = _resuming._SHARE = 0.0
slow = testing.FaultyStore(sys.argv[2], lambda call: time.sleep(0.02))
zarrckpt.open(sys.argv[1]).copy_to(store=slow, resume=True, dtype=sys.argv[3] or None)
"""


def test_helper_files_go(tmp_path: Path, one: zarrckpt.Checkpoint) -> None:
    _broken_off(one, tmp_path / "two", 5, {})
    helper = tmp_path / "two" / "m" / "w" / f".zarrckpt-{'0' * 16}.part"
    helper.write_bytes(b"half a chunk")
    one.copy_to(tmp_path / "two", resume=True)
    assert not helper.exists() and zarrckpt.open(tmp_path / "two").verify()


@pytest.mark.parametrize("dtype", ["", "bfloat16"])
def test_killed_in_the_midst_of_it(tmp_path: Path, one: zarrckpt.Checkpoint, dtype: str) -> None:
    place = tmp_path / "two"
    arguments = ["cp", one.url, str(place), "--resume", "--json", *(["--dtype", dtype] if dtype else [])]
    for wanted in (4, 10):
        process = subprocess.Popen([sys.executable, "-c", SLOW, one.url, str(place), dtype])
        # The one after it is being written.
        while len(list(place.glob("m/w/c*"))) < wanted and process.poll() is None:
            time.sleep(0.005)
        os.kill(process.pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    found = CliRunner().invoke(main, arguments, catch_exceptions=False)
    report = json.loads(found.stdout)
    assert report["objects"] > report["reused"] >= 9
    _same(one, place, {"dtype": dtype} if dtype else {})
    found = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert json.loads(found.stdout)["save_id"] == report["save_id"]
    assert "were there already" in CliRunner().invoke(main, [a for a in arguments if a != "--json"]).stdout


def test_who_is_broken_off_learns_how_to_go_on(
    tmp_path: Path, one: zarrckpt.Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = testing.FaultyStore(tmp_path / "two", testing.writes(20, testing.FAIL))
    with monkeypatch.context() as patch:
        # The command line's target fails.
        real = zarrckpt.Checkpoint.copy_to
        patch.setattr(zarrckpt.Checkpoint, "copy_to", lambda ckpt, url, **kw: real(ckpt, store=opened, **kw))
        found = CliRunner().invoke(main, ["cp", one.url, str(tmp_path / "two")])
    assert found.exit_code == 3 and "injected" in found.stderr and "--resume" in found.stderr
    found = CliRunner().invoke(main, ["cp", one.url, str(tmp_path / "two"), "--resume"])
    assert found.exit_code == 0 and "were there already" in found.stdout
    assert CliRunner().invoke(main, ["doctor", str(tmp_path / "two")]).exit_code == 0
