"""Saves before pre-emption: signals, notices, and what the ranks agree on."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

import zarrckpt

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")

ROOT = Path(__file__).parent.parent
FAST = zarrckpt.SaveOptions(timeout=60.0, durable=False)


@contextmanager
def managed(run: Any, **arguments: Any) -> Iterator[zarrckpt.CheckpointManager]:
    manager = zarrckpt.CheckpointManager(run, options=FAST, **arguments)
    try:
        yield manager
    finally:
        manager.close()


def until(done: Callable[[], bool], seconds: float = 10.0) -> bool:
    """Wait for something that another thread or process does."""
    end = time.monotonic() + seconds
    while not done() and time.monotonic() < end:
        time.sleep(0.01)
    return done()


def trained(manager: zarrckpt.CheckpointManager, state: dict[str, Any], first: int = 1, pause: float = 0.005) -> int:
    """Train until pre-emption; return the step."""
    for step in range(first, first + 10_000):
        time.sleep(pause)
        state["step"] = step
        manager.step(step, state)
        if manager.preempted:
            return step
    raise AssertionError("never pre-empted")


# -- under torchrun


def test_signals_at_random_moments_stop_all_ranks_at_one_step_that_is_resumed(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.signal_campaign", "--signals=8", "--episodes=4", "--seed=7"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "8 signals in 2 jobs" in done.stdout


# -- one process


def test_a_signal_leads_to_a_save_of_the_next_step_and_handlers_come_back(tmp_path: Path) -> None:
    came: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: came.append(number))
    try:
        with managed(tmp_path / "run", signals=("SIGUSR1",)) as manager:
            for step in (1, 2):
                assert manager.step(step, {"step": step}) is None and not manager.preempted
            os.kill(os.getpid(), signal.SIGUSR1)
            assert trained(manager, {}, 3) <= 20
            assert manager.step(10_001, {}) is None, "it is saved once"
            assert came == [signal.SIGUSR1]
        os.kill(os.getpid(), signal.SIGUSR1)
        assert until(lambda: len(came) == 2)
    finally:
        signal.signal(signal.SIGUSR1, before)
    state = {"step": 0}
    zarrckpt.load(state, str(zarrckpt.latest(tmp_path / "run")))
    assert [state["step"]] == manager.steps()


def test_a_signal_before_the_first_step_saves_that(tmp_path: Path) -> None:
    with managed(tmp_path, signals=("SIGUSR1",)) as manager:
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0.1)
        future = manager.step(0, {"step": 0})
        assert manager.preempted and future is not None and future.done()
    assert manager.steps() == [0]


def test_a_wakeup_descriptor_of_before_gets_its_signals(tmp_path: Path) -> None:
    async def loop() -> int:
        came = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, came.set)
        with managed(tmp_path, signals=("SIGUSR1",)) as manager:
            os.kill(os.getpid(), signal.SIGUSR2)
            await asyncio.wait_for(came.wait(), 10)
            os.kill(os.getpid(), signal.SIGUSR1)
            stopped = trained(manager, {})
        came.clear()
        os.kill(os.getpid(), signal.SIGUSR2)
        await asyncio.wait_for(came.wait(), 10)
        return stopped

    assert asyncio.run(loop()) >= 1


def test_a_forked_child_that_gets_the_signal_is_not_the_parent(tmp_path: Path) -> None:
    with managed(tmp_path, signals=("SIGTERM",)) as manager:
        child = os.fork()
        if child == 0:  # as a worker of a data loader
            time.sleep(60)
            os._exit(0)
        time.sleep(0.1)
        os.kill(child, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
        time.sleep(0.1)
        assert manager.step(1, {}) is None and not manager.preempted


def test_what_cannot_be_handled_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    for names, error in ((("SIGTERM", "SIGKILL"), ValueError), (("SIGWHAT",), ValueError), ("SIGTERM", TypeError)):
        with pytest.raises(error):
            zarrckpt.CheckpointManager(tmp_path, signals=names)
    failed: list[BaseException] = []

    def elsewhere() -> None:
        try:
            zarrckpt.CheckpointManager(tmp_path)
        except ValueError as err:
            failed.append(err)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert failed and signal.getsignal(signal.SIGTERM) is before


def test_a_notice_counts_as_a_signal_and_its_error_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zarrckpt._runs.preemption.NOTICE_SECONDS", 0.02)
    asked: list[int] = []

    def notice() -> bool:
        asked.append(1)
        if len(asked) < 4:
            raise OSError("no answer from the metadata server")
        return len(asked) > 6

    with caplog.at_level(logging.WARNING, "zarrckpt"), managed(tmp_path, signals=(), notice=notice) as manager:
        trained(manager, {})
    assert len(asked) == 7
    assert sum("metadata server" in record.getMessage() for record in caplog.records) == 1


SLOW = """
import os, sys, time, threading, torch, zarrckpt
class Slow:
    def state_dict(self):
        print("saving", flush=True)
        time.sleep(60)
    def load_state_dict(self, state): pass
manager = zarrckpt.CheckpointManager(sys.argv[1], save_every=3)
state = {"w": torch.ones(3)}
for step in range(1, 10**6):
    if step == 5:
        state["slow"] = Slow()
        print("training", flush=True)
    time.sleep(0.01)
    manager.step(step, state)
"""


def test_a_second_signal_ends_the_process_at_once(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", SLOW, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "training\n"
        process.terminate()
        time.sleep(0.05)
        process.terminate()  # one that a scheduler sends beside torchrun's is no second one
        assert process.stdout.readline() == "saving\n"
        time.sleep(1.3)
        assert process.poll() is None
        process.terminate()
        assert process.wait(5) == 128 + signal.SIGTERM
    finally:
        process.kill()
    assert zarrckpt.latest(tmp_path / "run") == str(tmp_path / "run" / "step-00000003")
    with managed(tmp_path / "run", signals=()) as manager:
        assert manager.restore({"w": torch.zeros(3)}) == 3


IN_C = """
import datetime, os, sys, threading, time, torch.distributed as dist, logging, zarrckpt
logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stdout)
store = dist.TCPStore("127.0.0.1", 0, 1, True)
manager = zarrckpt.CheckpointManager(sys.argv[1])
threading.Timer(0.5, lambda: os.kill(os.getpid(), 15)).start()
try:
    store.wait(["never"], datetime.timedelta(seconds=3))
except dist.DistStoreError:
    print("back from C")
manager.step(1, {})
print(manager.preempted)
manager.close()
"""


def test_a_signal_is_seen_while_the_main_thread_is_in_c(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", IN_C, str(tmp_path)], capture_output=True, text=True, timeout=60)
    lines = done.stdout.splitlines()
    assert "SIGTERM" in lines[0] and lines[1:] == ["back from C", "True"], done.stdout + done.stderr


# -- within the grace period


def slowly(state: dict[str, Any], seconds: float) -> dict[str, Any]:
    """The state with an entry that takes a while to be saved, in the background too."""

    class Slow:
        def __reduce__(self) -> tuple[Any, ...]:
            time.sleep(seconds)
            return (int, (3,))

    return {**state, "slow": Slow()}


@pytest.mark.filterwarnings("ignore:.*pickle.*:UserWarning")
@pytest.mark.parametrize("background", [True, False])
def test_a_save_under_way_ends_before_the_one_before_pre_emption(tmp_path: Path, background: bool) -> None:
    with managed(tmp_path, signals=("SIGUSR1",), save_every=2, background=background) as manager:
        manager.step(1, {})
        under_way = manager.step(2, slowly({"w": torch.ones(3)}, 0.5))
        assert under_way is not None and under_way.done() != background
        under_way.copied(10)
        os.kill(os.getpid(), signal.SIGUSR1)
        stopped = trained(manager, {"w": torch.ones(3)}, 3)
        assert under_way.done()
    assert manager.steps() == [2, stopped]


@pytest.mark.filterwarnings("ignore:.*pickle.*:UserWarning")
@pytest.mark.parametrize("background", [True, False])
def test_a_save_that_takes_longer_than_the_grace_period_is_an_error(tmp_path: Path, background: bool) -> None:
    manager = zarrckpt.CheckpointManager(
        tmp_path, signals=("SIGUSR1",), save_every=2, grace=0.6, background=background, options=FAST
    )
    with contextlib.suppress(zarrckpt.CheckpointError), contextlib.closing(manager):
        manager.step(1, {})
        manager.step(2, {"w": torch.ones(3)})
        manager.wait()
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0.05)
        with pytest.raises(zarrckpt.CheckpointError, match="grace"):
            manager.step(3, slowly({"w": torch.ones(3)}, 1.5))
        assert manager.preempted
        manager.close()
        assert not background, "closing waits, and raises the error of the save that was not in time"
    assert manager.steps() == [2]


@pytest.mark.filterwarnings("ignore:.*pickle.*:UserWarning")
def test_a_save_that_failed_before_does_not_keep_from_saving_now(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with managed(tmp_path, signals=("SIGUSR1",), save_every=2) as manager:
        manager.step(1, {})
        failing = manager.step(2, {"w": torch.eye(3).to_sparse()})
        assert failing is not None
        os.kill(os.getpid(), signal.SIGUSR1)
        stopped = trained(manager, {"w": torch.ones(3)}, 3)
    assert manager.steps() == [stopped]
    assert any("sparse" in record.getMessage() for record in caplog.records)


# -- several ranks


def _told(run: str, who: int, kind: str) -> Any:
    """Ranks that synchronise now and then; one is told by a signal or a notice."""
    rank = dist.get_rank()
    begun = threading.Event()
    notice = (lambda: begun.is_set()) if kind == "notice" and rank == who else None
    state: dict[str, Any] = {"w": torch.ones(3), "step": 0}
    with managed(run, signals=("SIGUSR1",), notice=notice) as manager:
        for step in range(1, 100_000):
            if step % 3 == 0:
                dist.barrier()
            time.sleep(0.002 * rank)
            state["step"] = step
            manager.step(step, state)
            if step == 40 and rank == who:
                begun.set()
                if kind == "signal":
                    os.kill(os.getpid(), signal.SIGUSR1)
            if manager.preempted:
                return step, manager.steps()
    return None


@pytest.mark.parametrize(("who", "kind"), [(0, "signal"), (2, "signal"), (1, "notice")])
def test_ranks_at_different_steps_save_one(tmp_path: Path, who: int, kind: str) -> None:
    stopped = run_ranks(_told, str(tmp_path), who, kind, world_size=3)
    step = stopped[0][0]
    assert stopped == [(step, [step])] * 3 and step > 40


def _lost(run: str) -> Any:
    rank = dist.get_rank()
    manager = zarrckpt.CheckpointManager(run, signals=("SIGUSR1",), grace=5.0, options=FAST)
    for step in range(1, 10):
        dist.barrier()
        manager.step(step, {"step": step})
    if rank == 2:
        # It comes to no further step.
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(1.0)
        os._exit(1)
    began = time.monotonic()
    with pytest.raises(zarrckpt.CheckpointError):
        trained(manager, {}, 10)
    manager.close()
    assert time.monotonic() - began < 15, "the grace period bounds the wait, not the timeout"
    return None


def test_a_rank_that_is_lost_before_the_step_that_was_agreed_on_ends_the_others_soon(tmp_path: Path) -> None:
    with pytest.raises(AssertionError) as caught:
        run_ranks(_lost, str(tmp_path), world_size=3)
    failures = caught.value.failures  # type: ignore[attr-defined]
    assert [*failures] == [2], caught.value


def _left(run: str) -> Any:
    """One rank has closed its manager when another is told."""
    rank = dist.get_rank()
    manager = zarrckpt.CheckpointManager(run, signals=("SIGUSR1",), grace=5.0, options=FAST)
    for step in range(1, 5):
        manager.step(step, {"step": step})
    dist.barrier()
    if rank == 1:
        manager.close()
        dist.barrier()
        return True
    dist.barrier()
    os.kill(os.getpid(), signal.SIGUSR1)
    try:
        trained(manager, {}, 10)
    except zarrckpt.CheckpointError:
        return True
    finally:
        manager.close()
    return False


def test_a_rank_that_has_closed_its_manager_is_named_not_waited_for(tmp_path: Path) -> None:
    assert run_ranks(_left, str(tmp_path), world_size=2) == [True, True]
