"""Saves before pre-emption: signals, notices, and the ranks' agreement on a step."""

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
from harness import ROOT
from harness.faulty_store import Call
from harness.managed import watched
from harness.ranks import run_ranks

import zarrckpt

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")

FAST = zarrckpt.SaveOptions(timeout=60.0, durable=False)


@contextmanager
def managed(run: Any, **arguments: Any) -> Iterator[zarrckpt.CheckpointManager]:
    manager = zarrckpt.CheckpointManager(run, options=FAST, **arguments)
    try:
        yield manager
    finally:
        manager.close()


def until(done: Callable[[], bool], seconds: float = 10.0) -> bool:
    """Wait for a condition that another thread or process causes."""
    end = time.monotonic() + seconds
    while not done() and time.monotonic() < end:
        time.sleep(0.01)
    return done()


def trained(manager: zarrckpt.CheckpointManager, state: dict[str, Any], first: int = 1, pause: float = 0.005) -> int:
    """Train until pre-emption. Return the step."""
    for step in range(first, first + 10_000):
        time.sleep(pause)
        state["step"] = step
        manager.step(step, state)
        if manager.preempted:
            return step
    raise AssertionError("never pre-empted")


# -- under torchrun


def test_random_signals_stop_all_ranks_at_one_step_that_is_resumed(tmp_path: Path) -> None:
    command = [sys.executable, "tools/signal_campaign.py", "--signals=2", "--episodes=2", "--seed=605"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 signals in 1 jobs" in done.stdout


# -- one process


def test_a_signal_saves_the_next_step_and_restores_handlers(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("background", [False, True])
def test_a_step_that_was_saved_already_is_not_saved_again(background: bool, tmp_path: Path) -> None:
    state = {"w": torch.ones(8)}
    with managed(tmp_path, background=background) as manager:
        assert manager.step(2, state) is None
        future = manager.save(3, state)
        os.kill(os.getpid(), signal.SIGTERM)
        assert until(lambda: manager._preemption is not None and manager._preemption._agreed)
        assert manager.step(3, state) is future and manager.preempted
        assert manager.steps() == [3]


def test_a_signal_before_the_first_step_saves_that(tmp_path: Path) -> None:
    with managed(tmp_path, signals=("SIGUSR1",)) as manager:
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0.1)
        future = manager.step(0, {"step": 0})
        assert manager.preempted and future is not None and future.done()
    assert manager.steps() == [0]


def test_an_earlier_wakeup_descriptor_gets_its_signals(tmp_path: Path) -> None:
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


def forked_child() -> int:
    """Fork a child that sleeps. Return its process id."""
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    return child


def test_a_signal_that_only_a_forked_child_gets_ends_it(tmp_path: Path) -> None:
    with managed(tmp_path, signals=("SIGTERM",)) as manager:
        child = forked_child()
        time.sleep(0.1)
        os.kill(child, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
        time.sleep(0.1)
        assert manager.step(1, {}) is None and not manager.preempted


def test_a_forked_child_ignores_what_its_parent_handles(tmp_path: Path) -> None:
    with managed(tmp_path, signals=("SIGUSR1",)) as manager:
        child = forked_child()
        time.sleep(0.1)
        for process in (child, os.getpid()):
            os.kill(process, signal.SIGUSR1)
        trained(manager, {})
        time.sleep(1.5)
        assert os.waitpid(child, os.WNOHANG) == (0, 0)
    # From now on it ends at once.
    os.kill(child, signal.SIGUSR1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGUSR1


@pytest.mark.parametrize("replaced", [False, True])
@pytest.mark.parametrize("first", [0, 1])
def test_managers_are_closed_in_any_order(tmp_path: Path, first: int, replaced: bool) -> None:
    before = signal.getsignal(signal.SIGUSR1), signal.set_wakeup_fd(-1)
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write)
    managers = [zarrckpt.CheckpointManager(tmp_path / str(n), signals=("SIGUSR1",), options=FAST) for n in (1, 2)]
    # The descriptor's owner closes it, and its number is used for a file.
    os.close(write)
    file = os.open(tmp_path / "file", os.O_CREAT | os.O_RDWR)
    assert file == write
    if replaced:
        del managers[first]
    else:
        managers.pop(first).close()
    os.kill(os.getpid(), signal.SIGUSR1)
    trained(managers[0], {})
    managers[0].close()
    assert (signal.getsignal(signal.SIGUSR1), signal.set_wakeup_fd(-1)) == before
    assert os.read(file, 10) == b"" and signal.SIGUSR1 in os.read(read, 10)
    for descriptor in (read, file):
        os.close(descriptor)


def test_a_later_handler_stays(tmp_path: Path) -> None:
    came: list[int] = []
    try:
        with managed(tmp_path / "1", signals=("SIGUSR1",)):
            ours = signal.getsignal(signal.SIGUSR1)

            def later(number: int, frame: Any) -> None:
                came.append(number)
                assert callable(ours)
                ours(number, frame)

            signal.signal(signal.SIGUSR1, later)
            with managed(tmp_path / "2", signals=("SIGUSR1",)) as manager:
                os.kill(os.getpid(), signal.SIGUSR1)
                trained(manager, {})
        assert signal.getsignal(signal.SIGUSR1) is later and came == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Let SIGINT raise KeyboardInterrupt. A shell starts its background jobs with SIGINT ignored."""
    earlier = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, earlier)


@pytest.mark.usefixtures("interruptible")
def test_a_manager_closed_in_a_thread_restores_the_signal(tmp_path: Path) -> None:
    manager = zarrckpt.CheckpointManager(tmp_path, signals=("SIGINT",), options=FAST)
    thread = threading.Thread(target=manager.close)
    thread.start()
    thread.join()
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_event_loops_wakeup_descriptor_loses_no_signal(tmp_path: Path) -> None:
    with managed(tmp_path, signals=("SIGUSR1",)) as manager:

        async def loop() -> None:
            asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, lambda: None)

        asyncio.run(loop())
        os.kill(os.getpid(), signal.SIGUSR1)
        trained(manager, {})


@contextmanager
def held_commit(run: Path) -> Iterator[threading.Event]:
    """Hold the commit of saves in a run until the event is set."""
    released = threading.Event()

    def wait_before_commit(call: Call) -> None:
        if call.verb == "create" and call.key.startswith("step-") and call.key.count("/") == 1:
            released.wait(30)

    with watched(run) as watch:
        watch.rule = wait_before_commit
        yield released


def test_a_signal_while_it_closes_does_not_end_the_last_save(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with held_commit(tmp_path) as released:
        manager = zarrckpt.CheckpointManager(tmp_path, signals=("SIGUSR1",), save_every=1, options=FAST)
        future = manager.step(1, {"w": torch.ones(3)})
        assert future is not None and not future.done()
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        threading.Timer(0.6, released.set).start()
        manager.close()
    assert future.done() and manager.steps() == [1]
    # It came after the last step: no further one is saved, and that is logged.
    assert manager.preempted
    assert "step 1" in caplog.records[-1].getMessage() and caplog.records[-1].levelno == logging.WARNING


@pytest.mark.usefixtures("interruptible")
def test_an_interrupted_wait_does_not_forget_the_save(tmp_path: Path) -> None:
    with held_commit(tmp_path) as released:
        manager = zarrckpt.CheckpointManager(tmp_path, signals=("SIGUSR1",), save_every=1, options=FAST)
        future = manager.step(1, {"w": torch.ones(3)})
        assert future is not None
        for interrupted in (lambda: manager.step(2, {}), manager.wait, manager.close):
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
            with pytest.raises(KeyboardInterrupt):
                interrupted()
            assert not future.done()
        released.set()
        manager.close()
    assert future.done() and manager.steps() == [1]
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


WORKERS = """
import sys, time, torch, zarrckpt
import torch.distributed as dist
from torch.utils.data import DataLoader

def main():
    dist.init_process_group("gloo")
    manager = zarrckpt.CheckpointManager(sys.argv[1])
    arguments = dict(num_workers=1, persistent_workers=True)
    loaders = [DataLoader(torch.arange(10**6), multiprocessing_context="fork", **arguments)]
    if dist.get_rank() == 0:
        init = zarrckpt.WorkerInit()
        spawned = DataLoader(torch.arange(10**6), multiprocessing_context="spawn", worker_init_fn=init, **arguments)
        loaders.append(spawned)
    for step, _ in enumerate(zip(*loaders), 1):
        time.sleep(0.01)
        manager.step(step, {"step": step})
        if step == 5:
            print("training", flush=True)
        if manager.preempted:
            break
    manager.close()
    print("stopped", flush=True)
    # The workers go at the end, also the ones that ignore a signal of the group.

if __name__ == "__main__":
    main()
"""


def test_workers_of_data_loaders_live_until_the_save(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(WORKERS)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    command += ["--nproc-per-node=2", str(script), str(tmp_path / "run")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with open(tmp_path / "log", "w") as log:
        job = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
    written = (tmp_path / "log").read_text
    try:
        assert until(lambda: written().count("training") == 2, 90), written()
        job.terminate()
        job.wait(60)
    finally:
        job.kill()
    assert written().count("stopped") == 2 and "DataLoader worker" not in written(), written()
    with managed(tmp_path / "run", signals=()) as manager:
        assert manager.restore({"step": 0}) is not None


def test_signals_that_cannot_be_handled_are_refused(tmp_path: Path) -> None:
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


def test_a_notice_counts_as_a_signal_and_its_error_is_logged_once(
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
        process.terminate()  # a signal that a scheduler sends beside torchrun's is not a second request
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
    """Return the state with an entry that takes a while to be saved, also in the background."""

    class Slow:
        def __reduce__(self) -> tuple[Any, ...]:
            time.sleep(seconds)
            return (int, (3,))

    return {**state, "slow": Slow()}


@pytest.mark.filterwarnings("ignore:.*pickle.*:UserWarning")
@pytest.mark.parametrize("background", [True, False])
def test_a_running_save_ends_before_the_preemption_save(tmp_path: Path, background: bool) -> None:
    with managed(tmp_path, signals=("SIGUSR1",), save_every=1000, background=background) as manager:
        under_way = manager.step(1000, slowly({"w": torch.ones(3)}, 0.5))
        assert under_way is not None and under_way.done() != background
        under_way.copied(10)
        os.kill(os.getpid(), signal.SIGUSR1)
        stopped = trained(manager, {"w": torch.ones(3)}, 1001)
        assert under_way.done()
    assert manager.steps() == [1000, stopped]


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
def test_an_earlier_failed_save_does_not_prevent_the_last_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
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
    """Run ranks that synchronise from time to time. One gets a signal or a notice."""
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
        # It reaches no further step.
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(1.0)
        os._exit(1)
    began = time.monotonic()
    with pytest.raises(zarrckpt.CheckpointError):
        trained(manager, {}, 10)
    manager.close()
    assert time.monotonic() - began < 15, "the grace period bounds the wait, not the timeout"
    return None


def test_a_rank_lost_before_the_agreed_step_ends_the_others_soon(tmp_path: Path) -> None:
    with pytest.raises(AssertionError) as caught:
        run_ranks(_lost, str(tmp_path), world_size=3)
    failures = caught.value.failures  # type: ignore[attr-defined]
    assert [*failures] == [2], caught.value


def _left(run: str) -> Any:
    """Let one rank close its manager before another gets the signal."""
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
