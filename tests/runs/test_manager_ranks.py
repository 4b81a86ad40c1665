"""``CheckpointManager`` and ``latest`` on several ranks: one reads the folder, all get the same result or error."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness.faulty_store import FAIL
from harness.managed import RUN, damage_root, folders, manager, name, run_id, watched
from harness.ranks import all_ranks_raise, run_ranks
from harness.uneven_states import full, mesh_of, sharded

import zarrckpt
from zarrckpt import Keep, PerRank


def _state(number: int) -> dict[str, Any]:
    """Return a tensor cut by rows over all ranks, a replicated one, a data loader's position of each
    rank, and a value.
    """
    mesh, rank = mesh_of(list(range(dist.get_world_size()))), dist.get_rank()
    return {
        "model": {"w": sharded(full((13, 3), number), mesh), "norm": torch.full((5,), float(number))},
        "loader": PerRank({"position": 1000 * number + rank}, new_ranks="wrap"),
        "epoch": number,
    }


def _resumed(job: zarrckpt.CheckpointManager, wrote: int, **arguments: Any) -> int | None:
    """Restore a checkpoint that ``wrote`` ranks have written, and check each bit that this rank holds."""
    target = _state(0)
    target["loader"] = PerRank({"position": -1}, new_ranks="wrap")
    step = job.restore(target, **arguments)
    if step is not None:
        expected = _state(step)
        assert torch.equal(target["model"]["w"].to_local(), expected["model"]["w"].to_local())
        assert torch.equal(target["model"]["norm"], expected["model"]["norm"]) and target["epoch"] == step
        assert target["loader"].value == {"position": 1000 * step + dist.get_rank() % wrote}
    return step


def _train(run: str, before: int | None, wrote: int, form: str, *steps: int) -> list[int | None]:
    keep = Keep(newest=2, best=1, metric="loss")
    with manager(run, keep=keep, background=True, save_every=10, format=form) as job:
        found = [_resumed(job, wrote)]
        assert found == [before]
        for step in steps:
            # A tensor whose number differs on each rank: the coordinator's is saved.
            future = job.step(step, _state(step), {"loss": torch.tensor(1.0 * step * (1 + 9 * dist.get_rank()))})
            assert (future is not None) == (step % 10 == 0)
    return found


def test_a_run_resumes_on_other_numbers_of_ranks(tmp_path: Path) -> None:
    """Each job chooses the format of its checkpoints."""
    run, before, wrote = str(tmp_path / "run"), None, 1
    for size, steps, form in ((4, (10, 15, 20, 30), "zip"), (2, (40, 41), "folder"), (3, (50,), "zip"), (4, (), "zip")):
        found = run_ranks(_train, run, before, wrote, form, *steps, world_size=size)
        assert found == [[before]] * size
        before, wrote = (max(step for step in steps if step % 10 == 0), size) if steps else (before, wrote)
        kept = {40: {10, 30, 40}, 30: {10, 20, 30}, 50: {10, 40, 50}}
        names = {name(step) + ("" if step == 40 else ".zarr.zip") for step in kept[before or 0]}
        assert folders(tmp_path / "run") == names
    assert len({run_id(tmp_path / "run" / found) for found in names}) == 1


def _fall_back(run: str) -> tuple[Any, ...]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with manager(run) as job:
            newest, older = _resumed(job, 2), _resumed(job, 2, step=10)
    warned = {name(step) for step in (30, 40) for found in caught if name(step) in str(found.message)}
    return newest, older, warned if dist.get_rank() == 0 else None


def test_damaged_checkpoints_are_skipped_on_all_ranks(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run_ranks(_train, str(run), None, 1, "folder", 10, world_size=2)
    run_ranks(_train, str(run), 10, 2, "folder", 20, world_size=2)
    run_ranks(_train, str(run), 20, 2, "folder", 30, world_size=2)
    shutil.copytree(run / name(30), run / name(40))
    damage_root(run / name(40))
    # Damage the part of one rank only.
    for chunk in (run / name(30)).rglob("w/c.1*"):
        chunk.write_bytes(chunk.read_bytes()[:-3])
    (first, second) = run_ranks(_fall_back, str(run), world_size=2)
    assert first[:2] == second[:2] == (20, 10) and first[2] == {name(30), name(40)}


def _evaluate(run: str) -> int | None:
    with manager(run, read_only=True) as job:
        step = _resumed(job, 2)
        with pytest.raises(zarrckpt.CheckpointError, match="read_only"):
            job.save(20, _state(20))
        return step


def test_all_ranks_restore_with_a_manager_that_only_reads(tmp_path: Path) -> None:
    run_ranks(_train, str(tmp_path), None, 1, "folder", 10, world_size=2)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert run_ranks(_evaluate, str(tmp_path), world_size=3) == [10, 10, 10]
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def _restore(run: str) -> int | None:
    with manager(run) as job:
        return job.restore(_state(0))


def _save_after_another_job(run: str) -> None:
    with manager(run) as old, manager(run) as new:
        old.restore(_state(0))
        new.restore(_state(0))
        old.save(20, _state(20))


def test_errors_of_the_coordinator_are_raised_on_all_ranks(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run_ranks(_train, str(run), None, 1, "folder", 10, world_size=3)
    message = all_ranks_raise(zarrckpt.RunTakenOverError, _save_after_another_job, str(run), world_size=3)
    assert str(run) in message and folders(run) == {name(10)}
    (run / name(10) / "zarr.json").rename(tmp_path / "aside")
    assert name(10) in all_ranks_raise(zarrckpt.CorruptCheckpointError, _restore, str(run), world_size=3)
    (run / RUN).write_bytes(b"{}")
    assert RUN in all_ranks_raise(zarrckpt.CheckpointError, _restore, str(run), world_size=3)


def _fail_once(run: str) -> list[str]:
    """Let a save in the background fail on one rank."""
    messages = []
    with watched(run) as watch, manager(run, background=True, save_every=10) as job:
        if dist.get_rank() == 1:
            watch.rule = lambda call: FAIL if call.verb == "put" and name(10) in call.key else None
        for step in (10, 13, 20, 25, 30):
            try:
                job.step(step, _state(step))
            except zarrckpt.StorageError as err:
                messages.append(f"{step}: {err}")
    return messages


def test_a_failed_save_is_raised_on_all_ranks_at_one_step(tmp_path: Path) -> None:
    messages = run_ranks(_fail_once, str(tmp_path), world_size=3)
    assert messages[0] == messages[1] == messages[2] and len(messages[0]) == 1
    assert messages[0][0].startswith("20: ") and name(10) in messages[0][0]
    assert zarrckpt.open(tmp_path / name(30))["epoch"] == 30 and not (tmp_path / name(20)).exists()


def _count(run: str) -> tuple[str | None, list[Any], int | None, list[Any]]:
    with watched(run) as watch:
        newest = zarrckpt.latest(run)
        looked = [*watch.calls]
        watch.calls.clear()
        with manager(run) as job:
            step = job.restore({"epoch": 0}, keys="epoch")
        folder = [call for call in watch.calls if not call[1].startswith(name(10))]
    return newest, looked, step, folder


def test_one_rank_lists_for_all(tmp_path: Path) -> None:
    run_ranks(_train, str(tmp_path), None, 1, "folder", 10, world_size=2)
    found = run_ranks(_count, str(tmp_path), world_size=4)
    assert [(newest, step) for newest, _, step, _ in found] == [(str(tmp_path / name(10)), 10)] * 4
    assert [len(looked) for _, looked, _, _ in found] == [2, 0, 0, 0]
    assert [len(folder) for *_, folder in found] == [4, 0, 0, 0]


def _one_rank_alone(run: str) -> list[int]:
    with manager(run) as job:
        job.save(1, _state(1))
        dist.barrier()
        if dist.get_rank() == 1:
            job.pin(1, "by one rank")
            with pytest.raises(zarrckpt.CheckpointPinnedError, match="by one rank"):
                zarrckpt.remove(f"{run}/{name(1)}")
            job.unpin(1)
            return job.steps()
    return [1]


def test_any_single_rank_may_list_and_pin(tmp_path: Path) -> None:
    assert run_ranks(_one_rank_alone, str(tmp_path), world_size=2) == [[1], [1]]
