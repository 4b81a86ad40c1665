"""The table of ``docs/explanation/ranks.md``: saves of real processes in which one fails, dies or is silent."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from harness.ranks import all_ranks_raise, context, run_ranks
from harness.torch_internals import LocalState, RankSave
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import zarrckpt
from zarrckpt._plan.plan import SavePlan

WORLD = 4
TIMEOUT = 2.0
"""Timeout in seconds of saves in which a rank is silent."""


def state(value: float) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (WORLD,))
    rows = distribute_tensor(torch.full((64, 16), value), mesh, [Shard(0)])
    # Uneven: its pieces move between the ranks.
    uneven = distribute_tensor(torch.full((10, 16), value), mesh, [Shard(0)])
    # Another description for each value, because a save with a kept plan would skip the planning steps.
    return {"rows": rows, "uneven": uneven, "step": int(value), f"only{value}": None}


def check(url: str, value: float) -> None:
    checkpoint = zarrckpt.open(url)
    assert checkpoint["step"] == int(value) and (checkpoint["rows"][:] == value).all()
    assert (checkpoint["uneven"][:] == value).all()


@contextmanager
def before(cls: type, name: str, act: Callable[[], None]) -> Iterator[None]:
    """Call ``act`` before a step of a save, on this rank."""
    step = vars(cls)[name]
    inner = step.__func__ if isinstance(step, classmethod) else step

    def acting(*args: Any, **options: Any) -> Any:
        act()
        return inner(*args, **options)

    with patch.object(cls, name, classmethod(acting) if isinstance(step, classmethod) else acting):
        yield


STEPS: dict[str, tuple[type, str]] = {
    "describe": (LocalState, "from_user_state"),
    "plan": (SavePlan, "rank_plan"),
    "write": (RankSave, "write"),
    "finish": (RankSave, "finish"),
    "commit": (RankSave, "commit"),
}


# -- ranks that stay alive


def _named(url: str, rank: int) -> list[str]:
    """Return the error of a save. Check that it names a rank, and that no checkpoint is committed."""
    with pytest.raises(zarrckpt.CheckpointError) as caught:
        zarrckpt.save(state(1.0), url)
    texts = [str(caught.value), *getattr(caught.value, "__notes__", [])]
    assert f"rank {rank}" in " ".join(texts), texts
    with pytest.raises(zarrckpt.CheckpointNotFoundError):
        zarrckpt.open(url)
    return texts


def _fail(step: str) -> Callable[[], None]:
    def act() -> None:
        raise RuntimeError(f"no luck with {step}")

    return act


def _errors(folder: str) -> None:
    rank = dist.get_rank()
    for number, (step, failing) in enumerate(
        [("describe", 2), ("plan", 1), ("write", 3), ("write", 0), ("finish", 0), ("commit", 0)]
    ):
        cls, name = STEPS[step]
        url = f"{folder}/{step}-{failing}"
        if rank == failing:
            with before(cls, name, _fail(step)):
                began = time.monotonic()
                texts = _named(url, failing)
        else:
            began = time.monotonic()
            texts = _named(url, failing)
        assert f"no luck with {step}" in texts[0] and "failed ranks" in texts[0] and time.monotonic() - began < 20
        assert f"(failed ranks: {failing})" in texts[0], texts
        dist.barrier()
        # The next save works.
        zarrckpt.save(state(number), f"{url}-again")
        check(f"{url}-again", number)


def test_an_error_at_any_step_names_only_its_rank_on_all_ranks(tmp_path: Path) -> None:
    run_ranks(_errors, str(tmp_path), world_size=WORLD)


def _absences(folder: str) -> None:
    rank = dist.get_rank()
    mesh_of_all = state(0.0)  # made before a rank is absent
    zarrckpt.save(mesh_of_all, f"{folder}/first")
    for turn, connected in enumerate([True, False]):
        url = f"{folder}/absent-{turn}"
        if rank != 3:
            with pytest.raises(zarrckpt.CheckpointError, match="rank 3"):
                zarrckpt.save(mesh_of_all, url, options=zarrckpt.SaveOptions(timeout=TIMEOUT))
        dist.barrier()
        if turn == 1 or not connected:
            with pytest.raises(zarrckpt.CheckpointNotFoundError):
                zarrckpt.open(url)
    zarrckpt.save(mesh_of_all, f"{folder}/next")
    check(f"{folder}/next", 0.0)
    # In another call.
    with pytest.raises(zarrckpt.CheckpointError) as caught:
        if rank == 1:
            zarrckpt.load(mesh_of_all, f"{folder}/next")
        else:
            zarrckpt.save(mesh_of_all, f"{folder}/other")
    assert "rank 1" in str(caught.value)
    zarrckpt.save(mesh_of_all, f"{folder}/last")
    check(f"{folder}/last", 0.0)


def test_an_absent_rank_is_named(tmp_path: Path) -> None:
    run_ranks(_absences, str(tmp_path), world_size=WORLD)


def _other_plans(url: str) -> str:
    digest = property(lambda self: b"another plan" if dist.get_rank() == 2 else b"a plan")
    with patch.object(SavePlan, "digest", digest):
        (text, *_) = _named(url, 0)
    assert not any(name.startswith("c.") for _, _, files in os.walk(url) for name in files)
    return text


def test_ranks_with_different_plans_are_named_before_a_write(tmp_path: Path) -> None:
    for text in run_ranks(_other_plans, str(tmp_path / "one"), world_size=WORLD):
        assert "ranks [2]" in text


def _written_twice(url: str) -> None:
    part = SavePlan.rank_plan
    with patch.object(SavePlan, "rank_plan", lambda plan, rank: part(plan, 0)):
        # Not durable: a rank could sync the file by its name just when the other one has unlinked it to write it again.
        zarrckpt.save({"written_twice": torch.ones(3)}, url, options=zarrckpt.SaveOptions(durable=False))


def test_a_chunk_that_two_ranks_write_is_named(tmp_path: Path) -> None:
    text = all_ranks_raise(zarrckpt.IncompleteSaveError, _written_twice, str(tmp_path / "one"), world_size=2)
    assert "'written_twice', 0 were not written and 1 were written more than once" in text
    with pytest.raises(zarrckpt.CheckpointNotFoundError):
        zarrckpt.open(tmp_path / "one")


def _not_written(url: str) -> None:
    part = SavePlan.rank_plan
    with patch.object(SavePlan, "rank_plan", lambda plan, rank: replace(part(plan, rank), object_paths={})):
        zarrckpt.save({"not_written": 1, "w": torch.ones(3)}, url)


def test_a_value_that_no_rank_writes_is_named(tmp_path: Path) -> None:
    text = all_ranks_raise(zarrckpt.IncompleteSaveError, _not_written, str(tmp_path / "one"), world_size=2)
    assert "1 planned entries were not written (['not_written'])" in text


def _destroyed(folder: str) -> None:
    rank, init = dist.get_rank(), f"file://{folder}/again"
    kept = state(1.0)
    with before(RankSave, "write", dist.destroy_process_group):
        zarrckpt.save(kept, f"{folder}/one")
    check(f"{folder}/one", 1.0)
    dist.init_process_group("gloo", init_method=init, rank=rank, world_size=WORLD)
    zarrckpt.save(state(2.0), f"{folder}/two")
    check(f"{folder}/two", 2.0)


def test_a_save_survives_the_end_of_the_default_group(tmp_path: Path) -> None:
    run_ranks(_destroyed, str(tmp_path), world_size=WORLD)


# -- ranks that do not stay alive


@dataclass(frozen=True)
class Fault:
    rank: int
    step: str
    signal: int


def _save_with(fault: Fault, rank: int, folder: str, answers: Connection) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    zarrckpt.save(state(0.0), f"{folder}/warm")
    kept = state(1.0)
    answers.send("ready")

    def act() -> None:
        answers.send("acts")
        os.kill(os.getpid(), fault.signal)
        time.sleep(0.2)

    try:
        if rank == fault.rank:
            cls, name = STEPS[fault.step if fault.step != "committed" else "commit"]
            with _after_the_root(act) if fault.step == "committed" else before(cls, name, act):
                report = zarrckpt.save(kept, f"{folder}/one", options=zarrckpt.SaveOptions(timeout=TIMEOUT))
        else:
            report = zarrckpt.save(kept, f"{folder}/one", options=zarrckpt.SaveOptions(timeout=TIMEOUT))
        answers.send(("saved", report.save_id))
    except BaseException as err:
        answers.send((type(err).__name__, " ".join([str(err), *getattr(err, "__notes__", [])])))
    os._exit(0)


@contextmanager
def _after_the_root(act: Callable[[], None]) -> Iterator[None]:
    """On the coordinator, call ``act`` when the root document is put and no other rank has received that."""
    from zarrckpt._commit import attempts

    commit = attempts.commit

    def committed(*args: Any) -> None:
        commit(*args)
        act()

    with patch.object(attempts, "commit", committed):
        yield


def outcomes(fault: Fault, folder: Path, seconds: float) -> dict[int, tuple[str, str]]:
    """Return the outcome of the save on each rank that reports one within some seconds of the fault."""
    pipes, processes = {}, []
    for rank in range(WORLD):
        pipe, child = context.Pipe()
        process = context.Process(target=_save_with, args=(fault, rank, str(folder), child), daemon=True)
        process.start()
        child.close()
        pipes[pipe] = rank
        processes.append(process)
    found: dict[int, tuple[str, str]] = {}
    deadline = time.monotonic() + 60
    try:
        while pipes and (left := deadline - time.monotonic()) > 0:
            for pipe in wait([*pipes], left):
                assert isinstance(pipe, Connection)
                try:
                    answer = pipe.recv()
                except EOFError:
                    del pipes[pipe]
                    continue
                if answer == "acts":
                    deadline = time.monotonic() + seconds
                elif answer != "ready":
                    found[pipes.pop(pipe)] = answer
            if fault.signal != signal.SIGINT and {*pipes.values()} == {fault.rank}:
                break
    finally:
        for process in processes:
            process.kill()
            process.join()
    return found


@pytest.mark.parametrize(("rank", "step"), [(2, "describe"), (0, "plan"), (2, "write")])
def test_a_rank_that_is_killed_is_named_at_once(rank: int, step: str, tmp_path: Path) -> None:
    found = outcomes(Fault(rank, step, signal.SIGKILL), tmp_path, 5)
    assert found.keys() == {*range(WORLD)} - {rank}, found
    assert all(name != "saved" and f"rank {rank}" in text for name, text in found.values()), found
    with pytest.raises(zarrckpt.CheckpointNotFoundError):
        zarrckpt.open(tmp_path / "one")
    zarrckpt.save({"step": 1}, tmp_path / "one", overwrite=True)


def test_a_coordinator_that_dies_before_the_commit_fails_the_save(tmp_path: Path) -> None:
    found = outcomes(Fault(0, "commit", signal.SIGKILL), tmp_path, 10)
    assert found.keys() == {1, 2, 3} and all(name != "saved" and "rank 0" in text for name, text in found.values()), (
        found
    )
    with pytest.raises(zarrckpt.CheckpointNotFoundError):
        zarrckpt.open(tmp_path / "one")


def test_losing_the_coordinator_after_the_commit_is_a_success(tmp_path: Path) -> None:
    found = outcomes(Fault(0, "committed", signal.SIGKILL), tmp_path, 10)
    saved = zarrckpt.open(tmp_path / "one").save_id
    assert found == {rank: ("saved", saved) for rank in (1, 2, 3)}
    check(str(tmp_path / "one"), 1.0)


@pytest.mark.parametrize("rank", [1, 0])
def test_a_rank_that_is_stopped_is_named_after_the_timeout(rank: int, tmp_path: Path) -> None:
    found = outcomes(Fault(rank, "write", signal.SIGSTOP), tmp_path, 4 * TIMEOUT)
    assert found.keys() == {*range(WORLD)} - {rank}, found
    assert all(name != "saved" and f"rank {rank}" in text for name, text in found.values()), found


def test_an_interrupted_rank_ends_the_save_of_all(tmp_path: Path) -> None:
    found = outcomes(Fault(1, "write", signal.SIGINT), tmp_path, 10)
    assert found.pop(1)[0] == "KeyboardInterrupt"
    assert found.keys() == {0, 2, 3} and all("rank 1" in text for _, text in found.values()), found
    with pytest.raises(zarrckpt.CheckpointNotFoundError):
        zarrckpt.open(tmp_path / "one")
