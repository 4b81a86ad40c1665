"""Save and load on S3, served from memory on the loopback: with no delay, and with the delay of a distant S3.

First over TLS, as users do: large tensors, whose bytes take the time, and many small ones, whose requests do. Then
beside a Python thread that computes all the time, and without TLS.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from harness.s3_server import Served, served

from benchmarks import limits
from benchmarks.measure import Options, Took, alternate, busy_thread, fresh, took, trust, warm
from benchmarks.results import Figure, Results, Speed, faster

LIMIT = "raw sockets"
BUCKET = "bench"
LITTLE = 1 << 20
DISTANT = {"latency": 0.025, "bandwidth": 90e6}
CONNECTOR, S3FS = "s3torchconnector", "DCP + s3fs"

Goals = dict[str, tuple[float, float]]
"""Peer -> the least ratio of zarrckpt's rate to the peer's, for a save and for a load."""


@dataclass(frozen=True)
class Condition:
    """One group of measurements: the server's conditions, the state, and the goals."""

    group: str
    goals: Goals
    tls: bool = True
    distant: bool = False
    state: str = "large"
    busy: bool = False
    peers: tuple[str, ...] = ()
    """Peers that are measured; all if empty."""
    processor: tuple[float | None, float | None] | None = None
    """Goals for the client's processor seconds per GB, of a save and a load."""


CONDITIONS = [
    Condition("S3 over TLS, no delay", {CONNECTOR: (1.5, 1.4), S3FS: (5.0, 8.0)}, processor=(0.5, 0.9)),
    Condition("S3 over TLS, no delay, beside a busy thread", {CONNECTOR: (1.5, 1.4)}, busy=True, peers=(CONNECTOR,)),
    Condition("S3 over TLS, 25 ms, 90 MB/s per connection", {CONNECTOR: (1.5, 1.4)}, distant=True, peers=(CONNECTOR,)),
    Condition("S3 over TLS, no delay, many tensors of 16 KiB", {}, state="small", peers=(CONNECTOR, S3FS)),
    Condition("S3, no delay", {CONNECTOR: (2.0, 3.0), S3FS: (5.0, 8.0)}, tls=False),
    Condition("S3, no delay, GPT-2 with AdamW", {CONNECTOR: (2.0, 3.0)}, tls=False, state="gpt2", peers=(CONNECTOR,)),
    Condition(
        "S3, 25 ms, 90 MB/s per connection", {CONNECTOR: (1.7, 1.7)}, tls=False, distant=True, peers=(CONNECTOR,)
    ),
]


def run(options: Options) -> Results:
    found = Results()
    for condition in CONDITIONS:
        with served(**(DISTANT if condition.distant else {}), tls=condition.tls) as server:
            found.add(fresh(_measure, options, condition, server, env=server.environment))
    return found


def _contenders(server: Served, condition: Condition, trusted: bool) -> Iterator[Any]:
    from benchmarks.peers import SIGNED, Contender, s3_contenders

    for contender in s3_contenders():
        wanted = not condition.peers or contender.kind == "ours" or contender.name in condition.peers
        # Its client trusts only the system's authorities. Over TLS no payload is signed.
        possible = trusted or contender.name != CONNECTOR
        if wanted and possible and not (condition.tls and contender.name == SIGNED):
            yield contender
    if condition.tls:
        return
    connections = 32 if condition.distant else 4

    def put(state: Any, url: str) -> None:
        limits.raw_put(state, server.endpoint, url.removeprefix("s3://"), connections)

    def get(target: Any, url: str) -> None:
        limits.raw_get(target, server.endpoint, url.removeprefix("s3://"), connections)

    yield Contender(LIMIT, "os", put, get, "limit")


def _measure(options: Options, condition: Condition, server: Served) -> Results:
    trusted = server.authority is None or trust(server.authority)
    from benchmarks import state as states

    warnings.filterwarnings("ignore")
    state: Any = states.of_kind(condition.state, options.gigabytes, options.dtype)
    target = states.like(state)
    contenders = list(_contenders(server, condition, trusted))
    counts: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}
    # The first save of a process also imports modules and starts threads, so it is not measured. On a distant server a
    # full round takes minutes.
    little = {name: tensor for name, tensor in state.items() if tensor.nbytes <= LITTLE}
    first = (little, states.like(little)) if condition.distant else (state, target)
    installed = [c for c in contenders if c.installed]
    for contender in installed:
        _round(contender, *first, server, counts)(-1)
    calls = {c.name: _round(c, state, target, server, counts) for c in installed}
    with busy_thread(condition.busy):
        times = alternate(calls, min(options.rounds, 3) if condition.distant else options.rounds)
    size = states.nbytes(state)
    speeds = []
    for c in contenders:
        saves, loads = ([pair[which] for pair in times.get(c.name, [])] for which in (0, 1))
        seconds = [[one.seconds for one in calls] for calls in (saves, loads)]
        # Processor time would include that of the busy thread.
        processor = [[one.processor for one in calls if not condition.busy] for calls in (saves, loads)]
        asked = counts.get(c.name, ({}, {}))
        speeds.append(Speed(condition.group, c.name, c.kind, size, *seconds, *asked, *processor))
    return Results(speeds, list(_figures(condition, speeds)))


def _round(
    contender: Any, state: Any, target: Any, server: Served, counts: dict[str, Any]
) -> Callable[[int], tuple[Took, Took]]:
    """Return a function that saves, loads and compares once, returns both times, and keeps the server's counts."""
    from benchmarks import state as states

    def once(number: int) -> tuple[Took, Took]:
        url = f"s3://{BUCKET}/{number + 1}-{contender.name.replace(' ', '-').replace('+', 'and')}"
        states.clear(target)
        server.reset()
        warm(2 * states.nbytes(state))
        saved = took(lambda: contender.save(state, url))
        asked = server.stats()
        server.reset()
        loaded = took(lambda: contender.load(target, url))
        counts[contender.name] = (asked, server.stats())
        if not states.equal(target, state):
            raise RuntimeError(f"{contender.name} loaded other data than it saved")
        server.clear(BUCKET)
        return saved, loaded

    return once


def _figures(condition: Condition, speeds: list[Speed]) -> Iterator[Figure]:
    for peer, goals in condition.goals.items():
        if peer not in [speed.name for speed in speeds]:
            continue
        for which, goal in zip(("save", "load"), goals, strict=True):
            yield faster(speeds, "zarrckpt", peer, which, goal)
    for which, goal in zip(("save", "load"), condition.processor or (), strict=False):
        seconds = speeds[0].processor_a_gigabyte(which)
        yield Figure(condition.group, f"{which}: the client's processor time per GB", seconds, "s", goal, most=True)
