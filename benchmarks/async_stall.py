"""How long ``async_save`` keeps the training loop, against one copy of the state, and what it costs the steps after."""

from __future__ import annotations

import statistics
import tempfile
import time
import warnings
from typing import Any

from benchmarks.measure import Options, fresh, seconds
from benchmarks.results import Figure, Results

GROUP = "async save"


def run(options: Options) -> Results:
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        return fresh(_measure, options, folder)


def _measure(options: Options, folder: str) -> Results:
    import shutil

    import torch

    import zarrckpt
    from benchmarks import state as states

    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)  # as torchrun has it
    state: dict[str, Any] = states.make_state(options.gigabytes, options.dtype)
    copy = states.like(state)
    step = _training(states)
    alone = statistics.median(step() for _ in range(20))
    stalls, copies, beside, whole = [], [], [], []
    for number in range(options.rounds + 1):
        copies.append(seconds(lambda: [copy[name].copy_(tensor) for name, tensor in state.items()]))
        began = time.perf_counter()
        future = zarrckpt.async_save(state, f"{folder}/{number}", durable=False)
        stalls.append(time.perf_counter() - began)
        while not future.done():
            beside.append(step())
        future.result()
        whole.append(time.perf_counter() - began)
        shutil.rmtree(f"{folder}/{number}")
    one = statistics.median(copies[1:])
    slower = statistics.mean(beside) / alone if beside else None
    return Results(
        figures=[
            Figure(GROUP, "stall, in copies of the state", statistics.median(stalls[1:]) / one, "", 1.3, most=True),
            Figure(GROUP, "the first stall, which allocates the staging area", stalls[0] / one),
            Figure(GROUP, "one copy of the state", one, "s"),
            Figure(GROUP, "call to commit", statistics.median(whole[1:]), "s"),
            Figure(GROUP, "a training step (one thread) beside the background part, against alone", slower, "x"),
        ]
    )


def _training(states: Any) -> Any:
    """A step of many small operations, of the interpreter and of torch: the seconds that it took."""
    import torch

    weights = [torch.randn(64, 64) for _ in range(32)]
    given = torch.randn(16, 64)

    def step() -> float:
        began = time.perf_counter()
        flow = given
        for _ in range(4):
            for weight in weights:
                flow = torch.tanh(flow @ weight)
        return time.perf_counter() - began

    return step
