"""A job dies, or a store fails, at every single operation of a run: the next job resumes at the newest checkpoint."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from harness import managed
from harness.crashes import crashed, state
from harness.faulty_store import FAIL, FAIL_AFTER, STOP, STOP_AFTER, Fault, at
from harness.managed import Watched, folders, manager, name, restored, sound, watched

import zarrckpt
from zarrckpt import Keep

EVERY_FAULT = os.environ.get("ZARRCKPT_CRASHES") == "all"
KEEP = Keep(newest=2, best=1, metric="loss")


@pytest.fixture(scope="module", params=["folder", "zip"])
def before(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return a run with the steps 5 (the best), 10, 20, and the leftovers of a save of step 30."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(managed, "saved_format", request.param)
        yield _run_with_leftovers(tmp_path_factory.mktemp("before") / "run")


def _run_with_leftovers(run: Path) -> Path:
    with watched(run) as watch, manager(run, keep=KEEP) as job:
        for step, loss in ((5, 0.1), (10, 3.0), (20, 2.0)):
            job.save(step, state(step), {"loss": loss})
        watch.rule = lambda call: STOP if call.verb == "create" and call.key == f"{name(30)}/zarr.json" else None
        assert crashed(lambda: job.save(30, state(30))) is not None
    assert folders(run) == {name(step) for step in (5, 10, 20, 30)}
    return run


def _cycle(job: zarrckpt.CheckpointManager, committed: list[int]) -> None:
    """Run a job: it resumes and saves 40. So 10 and the leftovers of 30 are deleted."""
    assert restored(job) == 20
    job.save(40, state(40), {"loss": 1.0})
    committed.append(40)


def _after(run: Path, watch: Watched, job: zarrckpt.CheckpointManager) -> None:
    """Save some more steps, of which one may fail, and check that no leftovers of it stay.

    Except for a folder of a save that was killed right before its commit: it may be a checkpoint whose root was lost.
    """
    crashed(partial(job.save, 50, state(50), {"loss": 5.0}))
    watch.rule = lambda _: None
    for step in (70, 80):
        job.save(step, state(step), {"loss": 5.0})
    job.close()
    expected = {name(step) for step in (5, 70, 80)}
    killed = folders(run) - expected
    assert folders(run) >= expected and killed <= {"step-00000030", "step-00000040"}
    for folder in killed:
        assert [*(run / folder).glob("@zarrckpt/*/checksums/zarr.json")] and not (run / folder / "zarr.json").exists()
    assert sound(run) == job.steps() == [5, 70, 80]
    zarrckpt.recover(run, stopped=True)
    assert folders(run) == expected


def _dies(run: Path, watch: Watched) -> None:
    job, committed = manager(run, keep=KEEP), [20]
    crashed(lambda: _cycle(job, committed))
    with suppress(zarrckpt.CheckpointError):
        job.close()
    watch.begin_anew()
    # The checkpoints themselves show which steps exist.
    newest = max(sound(run))
    assert newest in (20, 40) and newest >= committed[-1]
    with manager(run, keep=KEEP) as following:
        assert restored(following) == newest
        _after(run, watch, following)


def _goes_on(run: Path, watch: Watched) -> None:
    job, committed = manager(run, keep=KEEP), [20]
    crashed(lambda: _cycle(job, committed))
    _after(run, watch, job)


WHAT: dict[Fault, Callable[[Path, Watched], None]] = {
    STOP: _dies, STOP_AFTER: _dies, FAIL: _goes_on, FAIL_AFTER: _goes_on
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.filterwarnings("ignore:.* is damaged and was skipped:UserWarning")
@pytest.mark.parametrize("fault", WHAT, ids=lambda fault: fault.value)
def test_a_crash_at_every_operation_loses_no_checkpoint(fault: Fault, before: Path, tmp_path: Path) -> None:
    # Each fault at a fourth of all operations, and each operation with one fault. A fourth of that with archives.
    first, apart = (0, 1) if EVERY_FAULT else ([*WHAT].index(fault), len(WHAT))
    apart *= 4 if managed.saved_format == "zip" and not EVERY_FAULT else 1
    for number in itertools.count(first, apart):
        run = tmp_path / str(number)
        shutil.copytree(before, run)
        with watched(run) as watch:
            met: list[str] = []

            def rule(call: object, number: int = number, met: list[str] = met) -> Fault | None:
                found = at(number, fault)(call)  # type: ignore[arg-type]
                if found is not None:
                    met.append(str(call))
                return found

            watch.rule = rule
            try:
                WHAT[fault](run, watch)
            except BaseException as err:
                err.add_note(f"{fault.value} at {met}")
                raise
        shutil.rmtree(run)
        if not met:
            break
    assert number > 80


_PROGRAM = """
import atexit, sys, time
# Before the package has hooks of its own: the last one to be called.
atexit.register(lambda: print(time.monotonic() - done))
import torch, zarrckpt
from zarrckpt import Keep
run = sys.argv[1]
manager = zarrckpt.CheckpointManager(run, keep=Keep(newest=1), save_every=1)
state = {"w": torch.zeros(1 << 20), "step": 0}
manager.restore(state)
for step in range(1, 6):
    state["w"] += 1
    state["step"] = step
    manager.step(step, state)
done = time.monotonic()
"""


def test_a_job_without_close_loses_no_checkpoint(tmp_path: Path) -> None:
    """The save in the background is finished. Expired checkpoints are deleted later."""
    run = tmp_path / "run"
    ended = subprocess.run([sys.executable, "-c", _PROGRAM, str(run)], capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert float(ended.stdout) < 4
    checkpoint = zarrckpt.open(zarrckpt.latest(run) or "")
    assert checkpoint["step"] == 5 and checkpoint["w"][0] == 5 and checkpoint.verify()
    with manager(run, keep=Keep(newest=1)) as job:
        assert job.restore({"step": 0}, keys="step") == 5
        job.save(6, state(6))
    assert folders(run) == {name(6)}
