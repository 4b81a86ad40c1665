"""Child processes: forked, from a fork server, and spawned. None uses locks, threads or sockets of its parent."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import ROOT
from harness.ranks import run_ranks

import zarrckpt
from zarrckpt import _forks

FAST = zarrckpt.SaveOptions(timeout=60.0, durable=False)
STATE = {"w": torch.arange(6.0)}


@contextmanager
def locks_are_held() -> Iterator[None]:
    """Hold all locks of the package in another thread during the block."""
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with ExitStack() as stack:
            for lock in [*_forks._locks]:
                stack.enter_context(lock)
            held.set()
            done.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(60)
    try:
        yield
    finally:
        done.set()
        thread.join()


def raised(call: Callable[[], object]) -> str:
    try:
        call()
    except Exception as err:
        return type(err).__name__
    return ""


def use(folder: Path, checkpoint: Any, array: Any, inherited: dict[str, Any]) -> dict[str, str]:
    """Use objects of the parent in a child. Return the names of the errors."""
    manager, saved, saving = (inherited.get(name) for name in ("manager", "saved", "saving"))
    assert checkpoint["w"][:].tolist() == array[:].tolist() == STATE["w"].tolist()
    url = str(folder / f"child-{os.getpid()}")
    with zarrckpt.CheckpointManager(url, keep=zarrckpt.Keep(newest=1), save_every=1, options=FAST) as fresh:
        for step in (1, 2, 3):
            fresh.step(step, STATE)
    assert fresh.steps()[-1] == 3 and zarrckpt.async_save(STATE, f"{url}/alone", options=FAST).result()
    if not inherited:
        return {}
    assert saved.result().url and saved.done()
    calls: dict[str, Callable[[], object]] = {
        "restore": lambda: manager.restore({}),
        "step": lambda: manager.step(9, {}),
        "save": lambda: manager.save(9, {}),
        "wait": manager.wait,
        "close": manager.close,
        "result": saving.result,
        "exception": lambda: (_ for _ in ()).throw(saving.exception()),
    }
    assert saving.done() and saving.copied() is None
    return {name: raised(call) for name, call in calls.items()}


def answer(pipe: Any, *objects: Any) -> None:
    pipe.send(use(*objects))


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_a_forked_child_works_alone_or_raises_at_once(tmp_path: Path, method: str) -> None:
    zarrckpt.save(STATE, tmp_path / "first", options=FAST)
    checkpoint = zarrckpt.open(tmp_path / "first")
    array = checkpoint["w"]
    manager = zarrckpt.CheckpointManager(tmp_path / "run", keep=zarrckpt.Keep(newest=1), options=FAST)
    saved = manager.save(1, STATE)
    saved.result()
    saving = zarrckpt.SaveFuture("unfinished")
    inherited = {"manager": manager, "saved": saved, "saving": saving} if method == "fork" else {}
    context: Any = multiprocessing.get_context(method)
    here, there = context.Pipe()
    with locks_are_held() if method == "fork" else ExitStack():
        child = context.Process(target=answer, args=(there, tmp_path, checkpoint, array, inherited))
        child.start()
        there.close()
        assert here.poll(60), "the child hangs"
        answers = here.recv()
        child.join(60)
    assert child.exitcode == 0
    assert {*answers.values()} == ({"CheckpointError"} if inherited else set())
    if method != "fork":
        with pytest.raises(TypeError, match="CheckpointManager"):
            context.Process(target=answer, args=(manager,)).start()
    manager.close()


def _forked(folder: str) -> str:
    """Save on all ranks, then in a forked child, which must not use the connections of its parent."""
    zarrckpt.save(STATE, f"{folder}/all", options=FAST)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        found = raised(lambda: zarrckpt.save(STATE, f"{folder}/child", options=FAST))
        zarrckpt.save(STATE, f"{folder}/child-{os.getpid()}", no_dist=True, options=FAST)
        # As at the end of a process.
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        os.write(write, found.encode())
        os._exit(0)
    os.close(write)
    with open(read) as file:
        found = file.read()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    dist.barrier()
    zarrckpt.save(STATE, f"{folder}/again", options=FAST)
    return found


def test_a_forked_child_uses_no_connection_of_a_rank(tmp_path: Path) -> None:
    assert run_ranks(_forked, str(tmp_path), world_size=2) == ["CheckpointError"] * 2


LOADERS = """
import sys, torch, zarrckpt
from torch.utils.data import DataLoader
manager = zarrckpt.CheckpointManager(sys.argv[1], keep=zarrckpt.Keep(newest=1), save_every=1)
state = {"w": torch.ones(200_000)}
for step in range(1, 31):
    manager.step(step, state)
    if step % 4:
        manager.wait()
    assert len([*DataLoader(range(4), num_workers=1, multiprocessing_context="fork")]) == 4
manager.close()
"""


def test_workers_that_are_forked_during_saves_end_without_a_wait(tmp_path: Path) -> None:
    # 30 workers. A worker that waits for its parent's deletions takes 5 s to end.
    command = [sys.executable, "-c", LOADERS, str(tmp_path / "run")]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True, timeout=90)
