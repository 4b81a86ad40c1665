"""One key in a hundred from S3, 25 ms away: seconds, and the number of sequential round trips."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

from harness.s3_server import Served, served

from benchmarks.measure import Options, fresh, seconds
from benchmarks.results import Figure, Results
from benchmarks.s3 import DISTANT

GROUP = "1% of the keys from S3, 25 ms away"
KEYS, WIDTH = 1000, 128


def run(options: Options) -> Results:
    with served(**DISTANT, tls=True) as server:
        return fresh(_measure, options, server, env=server.environment)


def _measure(options: Options, server: Served) -> Results:
    import torch

    import zarrckpt
    from benchmarks import peers

    warnings.filterwarnings("ignore")
    count = KEYS // 10 if options.quick else KEYS
    state: dict[str, Any] = {f"layers.{number}.weight": torch.full((WIDTH, WIDTH), number) for number in range(count)}
    wanted = list(state)[:: count // max(10, count // 100)]
    url = "s3://bench/small"
    save, load = peers.ours()
    save(state, url)
    call = partial(load, _targets(state, wanted), url)
    figures = _asked(server, "zarrckpt.load of the keys, after its opening", call, goal=3, before=1)
    figures += _asked(server, "zarrckpt.load of all keys, after its opening", partial(load, state, url), before=1)
    figures += _opened(server, zarrckpt.open(url), wanted, state)
    if peers.Contender("", "s3fs", save, load).installed:
        peers.fsspec_save(state, "s3://bench/dcp")
        figures += _asked(
            server, "DCP + s3fs of the keys", lambda: peers.fsspec_load(_targets(state, wanted), "s3://bench/dcp")
        )
    return Results(figures=figures)


def _targets(state: dict[str, Any], wanted: list[str]) -> dict[str, Any]:
    from benchmarks import state as states

    return states.like({name: state[name] for name in wanted})


def _opened(server: Served, checkpoint: Any, wanted: list[str], state: dict[str, Any]) -> list[Figure]:
    """Measure the keys of an open checkpoint: in one call if it has one for several keys, else one by one."""
    found: dict[str, Any] = {}

    def read() -> None:
        if hasattr(checkpoint, "read"):
            found.update(checkpoint.read(wanted))
        else:
            found.update({name: checkpoint[name][...] for name in wanted})

    figures = _asked(server, "Checkpoint from zarrckpt.open, the keys", read, goal=3)
    if any((found[name] != state[name].numpy()).any() for name in wanted):
        raise RuntimeError("the values read differ from the saved values")
    return figures


def _asked(
    server: Served, what: str, call: Callable[[], object], goal: float | None = None, before: int = 0
) -> list[Figure]:
    """Measure the round trips of a call, without those before the first key, and its whole time."""
    server.reset()
    took = seconds(call)
    stats = server.stats()
    note = f"{sum(stats['requests'].values())} requests, {stats['bytes_out']:,} bytes"
    trips = Figure(GROUP, f"{what}: round trips", stats["round_trips"] - before, "", goal, most=True, note=note)
    return [trips, Figure(GROUP, f"{what.partition(',')[0]}: time", took, "s")]
