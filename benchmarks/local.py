"""Save and load on local files: one process, and four ranks of which each holds a quarter of every tensor."""

from __future__ import annotations

import os
import shutil
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

from benchmarks import limits
from benchmarks.measure import Options, alternate, fresh, ranks, seconds, warm
from benchmarks.results import Figure, Results, Speed, faster

LIMIT = "plain parallel files"
SAME_BYTES = "plain parallel files, with subchunks and checksums"
SYNCED = "plain parallel files, synced"


def run(options: Options) -> Results:
    found = Results()
    for world in (1, 4):
        if world == 1:
            found.add(fresh(_measure, options, 1))
        else:
            found.add(ranks(_measure, world, options, world))
    return found


def _contenders(world: int, state: Any) -> list[Any]:
    from benchmarks.peers import Contender, local_contenders

    threads = max(1, (os.cpu_count() or 1) // world)

    def plain(sync: bool) -> Any:
        return lambda state, path: limits.write_files(state, f"{path}/{_rank()}", threads, sync)

    def load(target: Any, path: str) -> None:
        limits.read_files(target, f"{path}/{_rank()}", threads)

    def same_bytes(state: Any, path: str) -> None:
        limits.write_subchunks(state, f"{path}/{_rank()}", threads)

    def same_bytes_back(target: Any, path: str) -> None:
        limits.read_subchunks(target, f"{path}/{_rank()}", threads)

    copy = limits.MemoryCopy(state)
    return [
        *local_contenders(world),
        Contender(LIMIT, "os", plain(False), load, "limit"),
        Contender(SYNCED, "os", plain(True), load, "limit"),
        Contender(SAME_BYTES, "os", same_bytes, same_bytes_back, "limit"),
        Contender("memory copy", "os", copy.save, copy.load, "limit"),
    ]


def _rank() -> int:
    return int(os.environ.get("RANK", 0))


def _measure(options: Options, world: int) -> Results:
    from benchmarks import state as states

    warnings.filterwarnings("ignore")
    state: Any = states.make_state(options.gigabytes, options.dtype)
    if world > 1:
        state = states.sharded(state)
    target = states.like(state)
    group = "local, 1 process" if world == 1 else f"local, {world} processes"
    contenders = _contenders(world, state)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        folder = _agreed(folder, world)
        calls = {c.name: _round(c, state, target, folder, world) for c in contenders if c.installed}
        times = alternate(calls, options.rounds)
    size = states.nbytes(state)
    speeds = []
    for c in contenders:
        saved, loaded = ([pair[which] for pair in times.get(c.name, [])] for which in (0, 1))
        speeds.append(Speed(group, c.name, c.kind, size, saved, loaded))
    return Results(speeds, _figures(speeds))


def _agreed(folder: str, world: int) -> str:
    """The first rank's folder."""
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
    """Seconds until the last rank is through."""

    def together() -> None:
        call()
        _barrier(world)

    return seconds(together)


def _round(contender: Any, state: Any, target: Any, folder: str, world: int) -> Callable[[int], tuple[float, float]]:
    """Save, load and compare once; the seconds of both, over all ranks."""
    from benchmarks import state as states

    def once(number: int) -> tuple[float, float]:
        path = f"{folder}/{number}-{contender.name.replace(' ', '-')}"
        states.clear(target)
        if _rank() == 0:
            os.sync()  # nobody pays for what another left to be written
        _barrier(world)
        _warm(state, f"{folder}/warm-{_rank()}", states.nbytes(state) // world)
        _barrier(world)
        saved = _all_ranks(lambda: contender.save(state, path), world)
        loaded = _all_ranks(lambda: contender.load(target, path), world)
        if not states.equal(target, state):
            raise RuntimeError(f"{contender.name} loaded something else than it saved")
        _barrier(world)
        if _rank() == 0:
            shutil.rmtree(path, ignore_errors=True)  # a copy in memory has none
        return saved, loaded

    return once


def _warm(state: Any, path: str, nbytes: int) -> None:
    """Use the memory that buffers and the file cache are going to get, see :func:`warm`."""
    warm(nbytes)
    limits.write_files(state, path, 1)
    shutil.rmtree(path)


def _figures(speeds: list[Speed]) -> list[Figure]:
    quick, dcp, dcp_quick = "zarrckpt, durable=False", "DCP FileSystem", "DCP FileSystem, 2 threads, no sync"
    return [
        faster(speeds, "zarrckpt", dcp, "save", 2.0),
        faster(speeds, quick, dcp_quick, "save", 2.5),
        faster(speeds, quick, LIMIT, "save", 0.75),
        faster(speeds, "zarrckpt", dcp, "load", 6.0),
        faster(speeds, "zarrckpt", LIMIT, "load", 0.6),
        faster(speeds, quick, SAME_BYTES, "save", None),
        faster(speeds, "zarrckpt", SAME_BYTES, "load", None),
    ]
