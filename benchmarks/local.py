"""Save and load on local files: large tensors, a real model's state, many small ones; one process, and four ranks."""

from __future__ import annotations

import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks import limits
from benchmarks.measure import Options, alternate, fresh, ranks, seconds, warm
from benchmarks.results import Results, Speed, faster

LIMIT = "plain parallel files"
SAME_BYTES = "plain parallel files, with subchunks and checksums"
SYNCED = "plain parallel files, synced"
SAME_FILES = "a plain loop, the same folders and files"
SAME_SYNCED = "a plain loop, the same folders and files, synced"
DURABLE, QUICK = "zarrckpt", "zarrckpt, durable=False"
DCP, DCP_QUICK = "DCP FileSystem", "DCP FileSystem, 2 threads, no sync"

Goal = tuple[str, str, str, float]
"""The contender, its peer, "save" or "load", and the goal: the least ratio of their rates."""


@dataclass(frozen=True)
class Condition:
    """One group of measurements: the state, the number of processes, and the goals."""

    group: str
    state: str
    goals: tuple[Goal, ...]
    world: int = 1


CONDITIONS = [
    Condition(
        "local, 1 process",
        "large",
        (
            (DURABLE, DCP, "save", 4.0),
            (QUICK, DCP_QUICK, "save", 1.5),
            (QUICK, LIMIT, "save", 0.75),
            (DURABLE, DCP, "load", 8.0),
            (DURABLE, LIMIT, "load", 0.6),
        ),
    ),
    Condition(
        "local, GPT-2 with AdamW, 592 tensors",
        "gpt2",
        (
            (DURABLE, DCP, "save", 2.0),
            (QUICK, SAME_FILES, "save", 0.8),
            (QUICK, DCP_QUICK, "save", 1.0),
            (DURABLE, DCP, "load", 4.0),
        ),
    ),
    Condition(
        "local, 1,000 tensors of 16 KiB",
        "small",
        ((QUICK, SAME_FILES, "save", 0.8), (DURABLE, SAME_SYNCED, "save", 0.8)),
    ),
    Condition(
        "local, 4 processes",
        "large",
        ((DURABLE, DCP, "save", 2.0), (QUICK, DCP_QUICK, "save", 2.0), (DURABLE, DCP, "load", 3.0)),
        world=4,
    ),
]


def run(options: Options) -> Results:
    return measure_each(options, CONDITIONS, _measure)


def measure_each(options: Options, conditions: Sequence[Condition], measure: Callable[..., Results]) -> Results:
    """Measure each condition in new processes. ``measure`` is called with the options and the condition."""
    found = Results()
    for condition in conditions:
        if condition.world == 1:
            found.add(fresh(measure, options, condition))
        else:
            found.add(ranks(measure, condition.world, options, condition))
    return found


def _contenders(condition: Condition, state: Any, folder: str) -> Iterator[Any]:
    from benchmarks.peers import Contender, local_contenders, ours

    threads = max(1, (os.cpu_count() or 1) // condition.world)

    def plain(sync: bool) -> Any:
        return lambda state, path: limits.write_files(state, f"{path}/{_rank()}", threads, sync)

    def load(target: Any, path: str) -> None:
        limits.read_files(target, f"{path}/{_rank()}", threads)

    def same_bytes(state: Any, path: str) -> None:
        limits.write_subchunks(state, f"{path}/{_rank()}", threads)

    def same_bytes_back(target: Any, path: str) -> None:
        limits.read_subchunks(target, f"{path}/{_rank()}", threads)

    for contender in local_contenders(condition.world):
        # The other contenders are measured with large arrays only.
        if condition.state == "large" or contender.needs in ("zarrckpt", "torch"):
            yield contender
    if condition.state == "large":
        copy = limits.MemoryCopy(state)
        yield Contender(LIMIT, "os", plain(False), load, "limit")
        yield Contender(SYNCED, "os", plain(True), load, "limit")
        yield Contender(SAME_BYTES, "os", same_bytes, same_bytes_back, "limit")
        yield Contender("memory copy", "os", copy.save, copy.load, "limit")
    else:
        ours()[0](state, f"{folder}/once")
        for name, sync in ((SAME_FILES, False), (SAME_SYNCED, True)):
            yield Contender(name, "os", limits.SameFiles(f"{folder}/once", sync).save, None, "limit")
        shutil.rmtree(f"{folder}/once")


def _rank() -> int:
    return int(os.environ.get("RANK", 0))


def _measure(options: Options, condition: Condition) -> Results:
    return compare(options, condition, _contenders)


def compare(options: Options, condition: Condition, make: Callable[[Any, Any, str], Iterable[Any]]) -> Results:
    """Let contenders save and load the state of a condition in turn.

    ``make`` returns the contenders for the condition, the state and a folder.
    """
    from benchmarks import state as states

    warnings.filterwarnings("ignore")
    world = condition.world
    state: Any = states.of_kind(condition.state, options.gigabytes, options.dtype)
    if world > 1:
        state = states.sharded(state)
    target = states.like(state)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        folder = _agreed(folder, world)
        contenders = list(make(condition, state, folder))
        calls = {c.name: _round(c, state, target, folder, world) for c in contenders if c.installed}
        times = alternate(calls, options.rounds)
    size = states.nbytes(state)
    speeds = []
    for c in contenders:
        pairs = times.get(c.name, [])
        loaded = [pair[1] for pair in pairs if pair[1] is not None]
        speeds.append(Speed(condition.group, c.name, c.kind, size, [pair[0] for pair in pairs], loaded))
    return Results(speeds, [faster(speeds, *goal) for goal in condition.goals])


def _agreed(folder: str, world: int) -> str:
    """Return the first rank's folder."""
    if world == 1:
        return folder
    import torch.distributed as dist

    given = [folder]
    dist.broadcast_object_list(given, src=0)
    return given[0]


def _barrier(world: int) -> None:
    if world > 1:
        import torch.distributed as dist

        dist.barrier()


def _all_ranks(call: Callable[[], object], world: int) -> float:
    """Return the seconds until the last rank has finished."""

    def together() -> None:
        call()
        _barrier(world)

    return seconds(together)


def _round(
    contender: Any, state: Any, target: Any, folder: str, world: int
) -> Callable[[int], tuple[float, float | None]]:
    """Return a function that saves, loads and compares once, and returns the seconds of both, over all ranks."""
    from benchmarks import state as states

    def once(number: int) -> tuple[float, float | None]:
        path = f"{folder}/{number}-{contender.name.replace(' ', '-')}"
        states.clear(target)
        if _rank() == 0:
            os.sync()  # no contender waits for the writes of another one
        _barrier(world)
        _warm(state, f"{folder}/warm-{_rank()}", states.nbytes(state) // world)
        _barrier(world)
        saved, loaded = _all_ranks(lambda: contender.save(state, path), world), None
        if contender.load is not None:
            loaded = _all_ranks(lambda: contender.load(target, path), world)
            if not states.equal(target, state):
                raise RuntimeError(f"{contender.name} loaded other data than it saved")
        _barrier(world)
        if _rank() == 0:
            shutil.rmtree(path, ignore_errors=True)  # a copy in memory has no folder
        return saved, loaded

    return once


def _warm(state: Any, path: str, nbytes: int) -> None:
    """Use the memory that buffers and the file cache will get, see :func:`warm`."""
    warm(nbytes)
    limits.write_files(state, path, 1)
    shutil.rmtree(path)
