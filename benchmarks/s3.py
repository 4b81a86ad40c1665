"""Save and load on S3, served from memory on the loopback: with no delay, and as slowly as a distant S3 answers.

Large tensors, where bytes are what takes time, and many small ones, where requests do.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from benchmarks import limits
from benchmarks.measure import Options, alternate, fresh, seconds, warm
from benchmarks.results import Figure, Results, Speed, faster
from benchmarks.s3_server import Served, served

LIMIT = "raw sockets"
BUCKET = "bench"
LITTLE = 1 << 20
DISTANT = {"latency": 0.025, "bandwidth": 90e6}
NEAR, FAR, SMALL = "S3, no delay", "S3, 25 ms, 90 MB/s a connection", "S3, no delay, many tensors of 16 KiB"
CONDITIONS: dict[str, dict[str, Any]] = {NEAR: {}, FAR: DISTANT, SMALL: {}}
GOALS: dict[str, dict[str, tuple[float | None, float | None]]] = {
    NEAR: {"s3torchconnector": (2.0, 3.0), "DCP + s3fs": (5.0, 8.0)},
    FAR: {"s3torchconnector": (1.7, 1.7), "DCP + s3fs": (12.0, 25.0)},
    SMALL: {"s3torchconnector": (None, None), "DCP + s3fs": (None, None)},
}


def run(options: Options) -> Results:
    found = Results()
    for group, conditions in CONDITIONS.items():
        with served(**conditions) as server:
            found.add(fresh(_measure, options, group, server, env=server.environment))
    return found


def _contenders(server: Served, group: str) -> list[Any]:
    from benchmarks.peers import Contender, s3_contenders

    connections = 32 if group == FAR else 4

    def put(state: Any, url: str) -> None:
        limits.raw_put(state, server.endpoint, url.removeprefix("s3://"), connections)

    def get(target: Any, url: str) -> None:
        limits.raw_get(target, server.endpoint, url.removeprefix("s3://"), connections)

    return [*s3_contenders(), Contender(LIMIT, "os", put, get, "limit")]


def _measure(options: Options, group: str, server: Served) -> Results:
    from benchmarks import state as states

    warnings.filterwarnings("ignore")
    distant, small, count = group == FAR, group == SMALL, 1000 if options.gigabytes >= 0.1 else 100
    state: Any = states.small_tensors(count) if small else states.make_state(options.gigabytes, options.dtype)
    target = states.like(state)
    contenders = _contenders(server, group)
    counts: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}
    # Modules are imported, threads started: what only the first save of a process pays. Far away a full round of it
    # takes minutes.
    little = {name: tensor for name, tensor in state.items() if tensor.nbytes <= LITTLE}
    first = (little, states.like(little)) if distant else (state, target)
    installed = [c for c in contenders if c.installed]
    for contender in installed:
        _round(contender, *first, server, counts)(-1)
    calls = {c.name: _round(c, state, target, server, counts) for c in installed}
    times = alternate(calls, min(options.rounds, 3) if distant else options.rounds)
    size = states.nbytes(state)
    speeds = []
    for c in contenders:
        saved, loaded = ([pair[which] for pair in times.get(c.name, [])] for which in (0, 1))
        speeds.append(Speed(group, c.name, c.kind, size, saved, loaded, *counts.get(c.name, ({}, {}))))
    return Results(speeds, _figures(group, speeds))


def _round(
    contender: Any, state: Any, target: Any, server: Served, counts: dict[str, Any]
) -> Callable[[int], tuple[float, float]]:
    """Save, load and compare once; the seconds of both, and what the server counted meanwhile."""
    from benchmarks import state as states

    def once(number: int) -> tuple[float, float]:
        url = f"s3://{BUCKET}/{number + 1}-{contender.name.replace(' ', '-').replace('+', 'and')}"
        states.clear(target)
        server.reset()
        warm(2 * states.nbytes(state))
        saved = seconds(lambda: contender.save(state, url))
        asked = server.stats()
        server.reset()
        loaded = seconds(lambda: contender.load(target, url))
        counts[contender.name] = (asked, server.stats())
        if not states.equal(target, state):
            raise RuntimeError(f"{contender.name} loaded something else than it saved")
        server.clear(BUCKET)
        return saved, loaded

    return once


def _figures(group: str, speeds: list[Speed]) -> list[Figure]:
    found = []
    others = [speed.name for speed in speeds if speed.kind == "ours" and speed.name != "zarrckpt"]
    for peer, goals in GOALS[group].items():
        for which, goal in zip(("save", "load"), goals, strict=True):
            found.append(faster(speeds, "zarrckpt", peer, which, goal))
            found += [faster(speeds, other, peer, which, None) for other in others]
    return found + [faster(speeds, "zarrckpt", LIMIT, which, None) for which in ("save", "load")]
