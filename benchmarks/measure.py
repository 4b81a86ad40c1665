"""Tools to measure: contenders in turn, round by round; medians; fresh processes; groups of ranks."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import multiprocessing
import os
import statistics
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Options:
    """Choices of the command line: size of the state, rounds for each median, the folder of files."""

    gigabytes: float = 1.0
    rounds: int = 5
    dtype: str = "float32"
    folder: str | None = None
    quick: bool = False


def seconds(call: Callable[[], object]) -> float:
    """Return the seconds that a call takes."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


class Took(NamedTuple):
    """Seconds of a call, and processor seconds of this process during the call."""

    seconds: float
    processor: float


def took(call: Callable[[], object]) -> Took:
    """Return the seconds of a call and of this process's processors, which matter if servers are on other machines."""
    began, before = time.perf_counter(), time.process_time()
    call()
    return Took(time.perf_counter() - began, time.process_time() - before)


@contextlib.contextmanager
def busy_thread(wanted: bool = True) -> Iterator[None]:
    """Run a Python thread that computes all the time, as a data loader does."""
    ended = threading.Event()

    def work() -> None:
        while not ended.is_set():
            sum(range(1000))

    thread = threading.Thread(target=work, daemon=True)
    if wanted:
        thread.start()
    try:
        yield
    finally:
        ended.set()


def trust(authority: str) -> bool:
    """Add an authority of certificates to the system's, for clients that trust no others.

    It is added in a new mount namespace, so that only this process has it. Return False if the system forbids that.
    """
    system = "/etc/ssl/certs/ca-certificates.crt"
    libc = ctypes.CDLL(None, use_errno=True)
    if not os.path.exists(system) or libc.unshare(0x00020000):  # CLONE_NEWNS
        return False
    with tempfile.NamedTemporaryFile(suffix=".crt", delete=False) as both:
        both.write(Path(system).read_bytes() + Path(authority).read_bytes())
    # MS_REC | MS_PRIVATE, which keeps other namespaces unchanged, then MS_BIND.
    made = not libc.mount(None, b"/", None, 0x44000, None)
    return made and not libc.mount(both.name.encode(), system.encode(), None, 0x1000, None)


def warm(nbytes: int) -> None:
    """Touch that much new memory, and free it.

    The host of a virtual machine may have taken back its free memory, and returns it page by page at a millisecond per
    MiB. Without this call the first contender after a pause would pay for that.
    """
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    for begin in range(0, nbytes, mmap.PAGESIZE):
        memory[begin] = 1
    memory.close()


def alternate(calls: dict[str, Callable[[int], T]], rounds: int) -> dict[str, list[T]]:
    """Call every contender once a round, beginning with another one each round. Return results by contender."""
    names = list(calls)
    found: dict[str, list[T]] = {name: [] for name in names}
    for number in range(rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            found[name].append(calls[name](number))
    return found


def medians(times: dict[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in times.items() if values}


def ratio(times: dict[str, list[float]], peer: str, ours: str) -> float | None:
    """Return the median of ``peer`` over that of ``ours``, or None if one is missing."""
    found = medians(times)
    return found[peer] / found[ours] if peer in found and ours in found else None


# -- processes


def fresh(function: Callable[..., T], *args: Any, env: dict[str, str] | None = None) -> T:
    """Call a module-level function in a new process, and raise the error that it raises."""
    found: list[T] = _spawn(function, args, 1, env or {}, group=False)
    return found[0]


def ranks(function: Callable[..., T], count: int, *args: Any, env: dict[str, str] | None = None) -> T:
    """Call a module-level function on that many processes of a gloo group. Return the first rank's result."""
    found: list[T] = _spawn(function, args, count, env or {}, group=True)
    return found[0]


def _spawn(function: Callable[..., T], args: Any, count: int, env: dict[str, str], group: bool) -> list[T]:
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        init = f"file://{folder}/store" if group else None
        pipes, processes = [], []
        for rank in range(count):
            here, there = context.Pipe(duplex=False)
            process = context.Process(target=_serve, args=(there, function, args, rank, count, init, env))
            process.start()
            there.close()
            pipes.append(here)
            processes.append(process)
        try:
            answers = [_received(pipe) for pipe in pipes]
        finally:
            for process in processes:
                process.join(10)
                process.kill()
    for rank, (error, _) in enumerate(answers):
        if error is not None:
            raise RuntimeError(f"rank {rank} of {function.__module__}.{function.__name__} failed\n{error}")
    return [answer for _, answer in answers]


def _received(pipe: Connection) -> tuple[str | None, Any]:
    try:
        answer: tuple[str | None, Any] = pipe.recv()
        return answer
    except EOFError:
        return "the process died", None


def _serve(
    pipe: Connection, function: Callable[..., Any], args: Any, rank: int, count: int, init: str | None, env: Any
) -> None:
    os.environ.update(env, RANK=str(rank), WORLD_SIZE=str(count))
    answer: tuple[str | None, Any]
    try:
        if init is not None:
            import torch
            import torch.distributed as dist

            torch.set_num_threads(1)
            dist.init_process_group("gloo", init_method=init, rank=rank, world_size=count)
        answer = (None, function(*args))
        if init is not None:
            dist.barrier()
    except BaseException:
        answer = (traceback.format_exc(), None)
    with contextlib.suppress(BrokenPipeError):
        pipe.send(answer)
    pipe.close()
    os._exit(0)  # a gloo process sometimes aborts at the interpreter's exit
