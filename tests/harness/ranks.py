"""Real processes with real gloo groups, kept for the whole test run because they start slowly.

``run_ranks(function, *args, world_size=4)`` calls a module-level ``function(*args)`` on each of that many processes
inside a fresh default process group, and returns the results by rank. An exception on any rank is raised here as
RankError with all tracebacks. ``group=False`` calls without a process group.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

TIMEOUT = 120.0
MOST_LOOPS = 2
"""A process that keeps more of gloo's event loops from earlier runs is replaced.

Each loop wakes a hundred times a second. Together they took a quarter of two cores. They stay if one of torch's futures
got an exception. It then holds its traceback forever, and so the state and its groups.
"""
context = get_context("forkserver")
# Imports that take seconds are made once, in the process from which all of them are forked.
context.set_forkserver_preload(
    [
        "torch._dynamo",
        "torch.distributed.checkpoint",
        "torch.distributed.fsdp",
        "zarr",
        "pytest",
        "hypothesis",
        "zarrckpt._api",
    ]
)


class RankError(AssertionError):
    """At least one rank raised. The message has every failed rank's traceback."""

    def __init__(self, failures: dict[int, tuple[BaseException | None, str]]) -> None:
        self.failures = failures
        super().__init__("\n".join(f"--- rank {rank}\n{text}" for rank, (_, text) in sorted(failures.items())))


def all_ranks_raise(
    error: type[BaseException], function: Callable[..., Any], *args: Any, world_size: int = 4, **options: Any
) -> str:
    """Check that ``function`` raises ``error`` on every rank, with one message. Return the message."""
    try:
        answers = run_ranks(function, *args, world_size=world_size, **options)
    except RankError as err:
        raised = [err.failures.get(rank, (None, ""))[0] for rank in range(world_size)]
        assert all(isinstance(exception, error) for exception in raised), str(err)
        assert len({str(exception) for exception in raised}) == 1, raised
        return str(raised[0])
    raise AssertionError(f"no rank raised; they returned {answers!r:.1000}")


class _Worker:
    def __init__(self) -> None:
        self.pipe, child = context.Pipe()
        descriptor, self._stacks = tempfile.mkstemp(prefix="zarrckpt-stacks-")
        os.close(descriptor)
        self.process = context.Process(target=_serve, args=(child, self._stacks), daemon=False)
        self.process.start()
        child.close()

    def stop(self) -> None:
        self.pipe.close()
        self.process.kill()
        self.process.join()
        os.unlink(self._stacks)

    def stacks(self) -> str:
        """Return the stacks of all its threads, to debug hangs."""
        assert self.process.pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGUSR1)
        time.sleep(0.5)
        return Path(self._stacks).read_text()


_workers: list[_Worker] = []


def run_ranks(
    function: Callable[..., Any],
    *args: Any,
    world_size: int = 4,
    group: bool = True,
    timeout: float = TIMEOUT,
    env: dict[str, str] | None = None,
) -> list[Any]:
    """Call ``function(*args)`` on every rank. See the module's docstring."""
    while len(_workers) < world_size:
        _workers.append(_Worker())
    workers = _workers[:world_size]
    with tempfile.TemporaryDirectory() as folder:
        init = f"file://{folder}/store" if group else None
        for rank, worker in enumerate(workers):
            worker.pipe.send((function, args, rank, world_size, init, env or {}))
        answers = _collect(workers, timeout)
    failures = {rank: answer[1] for rank, answer in answers.items() if answer[0] == "error"}
    if failures:
        raise RankError(failures)
    return [answers[rank][1] for rank in range(world_size)]


_DIED = ("error", (None, "the process died"))


def _collect(workers: list[_Worker], timeout: float) -> dict[int, Any]:
    """Return every rank's answer. A rank that has answered keeps its groups until all have, or until one has failed.
    gloo closes connections at once, also those of ranks that still connect. Ranks that wait for a failed rank must get
    an error.
    """
    answers: dict[int, Any] = {}
    waiting: dict[Connection, int] = {worker.pipe: rank for rank, worker in enumerate(workers)}
    held: dict[Connection, int] = {}
    leaving: dict[Connection, int] = {}
    loops = 0
    while waiting or leaving:
        ready = wait([*waiting, *leaving], timeout)
        if not ready:
            stuck = {
                rank: (None, f"no answer within {timeout} s\n{workers[rank].stacks()}")
                for rank in [*waiting.values(), *leaving.values()]
            }
            stop_ranks()
            raise RankError(stuck | {rank: answer[1] for rank, answer in answers.items() if answer[0] == "error"})
        for pipe in ready:
            assert isinstance(pipe, Connection)
            received = _received(pipe)
            if pipe in leaving:
                rank = leaving.pop(pipe)
                loops = max(loops, received if isinstance(received, int) else 0)
            else:
                rank = waiting.pop(pipe)
                answers[rank] = received
                held[pipe] = rank
            if received is _DIED:
                answers[rank] = _DIED
                held.pop(pipe, None)
        if not waiting or any(answer[0] == "error" for answer in answers.values()):
            for pipe in held:
                with contextlib.suppress(OSError):  # it has died since
                    pipe.send("leave")
            leaving |= held
            held = {}
    if _DIED in answers.values() or loops > MOST_LOOPS:
        stop_ranks()
    return answers


def _received(pipe: Connection) -> Any:
    try:
        return pipe.recv()
    except EOFError:
        return _DIED


def stop_ranks() -> None:
    """Kill all processes. The next run starts new ones."""
    while _workers:
        _workers.pop().stop()


def _serve(pipe: Connection, stacks: str) -> None:
    import torch

    gc.freeze()
    torch.set_num_threads(1)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, open(stacks, "w"))  # noqa: SIM115 - as long as the process lives
    while True:
        try:
            function, args, rank, world_size, init, env = pipe.recv()
        except EOFError:
            return
        before = dict(os.environ)
        os.environ.update(env, RANK=str(rank), WORLD_SIZE=str(world_size))
        try:
            answer: Any = ("ok", _call(function, args, rank, world_size, init))
        except BaseException as err:
            answer = ("error", (err, traceback.format_exc()))
        try:
            pipe.send(answer)
        except Exception as err:  # a result or an error that does not pickle
            pipe.send(("error", (None, f"{err!r} while sending {answer!r:.2000}")))
        assert pipe.recv() == "leave"
        if init is not None:
            _leave()
        os.environ.clear()
        os.environ.update(before)
        pipe.send(_gloo_loops())


def _call(function: Callable[..., Any], args: Any, rank: int, size: int, init: str | None) -> Any:
    import torch
    import torch.distributed as dist

    torch.manual_seed(0)
    if init is not None:
        dist.init_process_group("gloo", init_method=init, rank=rank, world_size=size, timeout=timedelta(seconds=60))
        dist.barrier()  # no rank starts, and so closes its connections, before all are connected
    return function(*args)


def _leave() -> None:
    import torch.distributed as dist

    with contextlib.suppress(Exception):
        dist.destroy_process_group()
    _forget_meshes()


def _gloo_loops() -> int:
    """Return the number of gloo's event loops in this process, 0 if the system does not show it."""
    found = 0
    for thread in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # it has ended since
            found += thread.read_text() == "gloo_tcp_loop\n"
    return found


def _forget_meshes() -> None:
    """Drop meshes that are kept for the next save or load, and empty DTensor's caches.

    The caches would take a mesh of this process group for an equal one of the next.
    """
    if "zarrckpt._ranks.mesh" in sys.modules:
        from zarrckpt._ranks import mesh

        mesh.close_all_meshes()
    if "zarrckpt._dcp.channel" in sys.modules:
        from zarrckpt._dcp import channel

        channel.forget_channels()
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor import DTensor, debug
        from torch.distributed.tensor._redistribute import _gen_transform_infos

        if hasattr(debug, "_clear_sharding_prop_cache"):
            debug._clear_sharding_prop_cache()
        else:  # torch 2.10
            DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear()
        _gen_transform_infos.cache_clear()


def idle_meshes() -> dict[tuple[tuple[int, ...], str], str]:
    """Return the names of the meshes that this rank could use again, by their members and kind of call.

    Called in one of the processes that these tests start.
    """
    from zarrckpt._ranks.mesh import _slots

    kept = {key: slot.mesh for key, slot in _slots.items() if slot.mesh is not None and slot.mesh.is_usable(None)}
    return {key: mesh._addresses.name for key, mesh in kept.items()}
