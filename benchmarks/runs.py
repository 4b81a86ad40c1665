"""Cost of a ``CheckpointManager``: a step that saves nothing, and saves during the deletion of other checkpoints."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

from harness.s3_server import served

from benchmarks.measure import Options, alternate, fresh, ranks, ratio, warm
from benchmarks.results import Figure, Results

GROUP = "runs"
RANKS = 4
STEPS = 20_000
SAVES = 4
"""Saves per round. If only the newest checkpoint is kept, each save makes one expire."""


def run(options: Options) -> Results:
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        steps = ranks(_steps, RANKS, f"{folder}/steps", 1000 if options.quick else STEPS)
        local = fresh(_saves, options, f"{folder}/run")
        with served() as server:
            remote = fresh(_saves, options, "s3://bench/run", env=server.environment)
    figures = [
        Figure(GROUP, f"a step that saves nothing, {RANKS} ranks: median", steps[0], "us", 50, most=True),
        Figure(GROUP, f"a step that saves nothing, {RANKS} ranks: mean", steps[1], "us", 50, most=True),
    ]
    for where, (beside, more) in {"local": local, "S3, no delay": remote}.items():
        figures.append(
            Figure(GROUP, f"{where}: a save beside a deletion, against one without", beside, "x", 1.05, most=True)
        )
        figures.append(Figure(GROUP, f"{where}: a save of a manager, against zarrckpt.save", more, "x"))
    return Results(figures=figures)


def _steps(folder: str, steps: int) -> tuple[float, float]:
    """Return the microseconds of a call on rank 0, while all ranks watch for signals."""
    import zarrckpt

    manager = zarrckpt.CheckpointManager(folder, signals=("SIGTERM", "SIGUSR1"))
    state: dict[str, Any] = {}
    metrics = {"loss": 1.0}
    times = []
    for step in range(1, steps + 1):
        began = time.perf_counter()
        manager.step(step, state, metrics)
        times.append(time.perf_counter() - began)
        if step % 100 == 0:
            time.sleep(0.005)
    manager.close()
    return statistics.median(times) * 1e6, statistics.mean(times) * 1e6


def _saves(options: Options, url: str) -> tuple[float, float]:
    """Return the time of saves during deletions over that of saves without, and of a manager's over plain saves."""
    import zarrckpt
    from benchmarks import state as states

    warnings.filterwarnings("ignore")
    state: dict[str, Any] = states.make_state(options.gigabytes / 4, options.dtype)
    nbytes = sum(tensor.nbytes for tensor in state.values())
    without = zarrckpt.SaveOptions(durable=False)

    def managed(keep: zarrckpt.Keep | None, number: int) -> float:
        warm((SAVES + 2) * nbytes)
        folder = f"{url}-{keep is None}-{number}"
        manager = zarrckpt.CheckpointManager(folder, keep=keep, signals=(), background=False, options=without)
        manager.save(0, state)
        took = _timed(lambda step: manager.save(step, state))
        manager.close()
        for step in manager.steps():
            zarrckpt.remove(os.path.join(folder, f"step-{step:08d}"))
        return took

    def plain(number: int) -> float:
        warm((SAVES + 2) * nbytes)
        took = _timed(lambda step: zarrckpt.save(state, f"{url}-plain-{number}-{step}", options=without))
        for step in range(1, SAVES + 1):
            zarrckpt.remove(f"{url}-plain-{number}-{step}")
        return took

    times = alternate(
        {
            "deleting": lambda number: managed(zarrckpt.Keep(newest=1), number),
            "keeping": lambda number: managed(None, number),
            "plain": plain,
        },
        options.rounds,
    )
    beside, more = ratio(times, "deleting", "keeping"), ratio(times, "keeping", "plain")
    assert beside is not None and more is not None
    return beside, more


def _timed(save: Callable[[int], object]) -> float:
    """Return the seconds of saves. Each is followed by a pause of twice its time, in which deletions begin."""
    took = 0.0
    for step in range(1, SAVES + 1):
        began = time.perf_counter()
        save(step)
        took += time.perf_counter() - began
        time.sleep(2 * took / step)
    return took
