"""Time for which ``async_save`` stops the training loop, relative to one copy of the state, and its later slow-down."""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from benchmarks.measure import Options, fresh, seconds
from benchmarks.results import Figure, Results

GROUP = "async save"
PEER = "dcp.async_save"

Save = Callable[[str], Any]
"""Function that saves the state in the background and returns a future."""


class _Save(NamedTuple):
    """Seconds of the call, from the call to the commit, and lost to training; and the relative time of a step."""

    stall: float
    whole: float
    lost: float
    slower: float


def run(options: Options) -> Results:
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        return fresh(_measure, options, folder)


def _measure(options: Options, folder: str) -> Results:
    import torch
    import torch.distributed.checkpoint as dcp

    import zarrckpt
    from benchmarks import state as states

    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)  # torchrun's default
    state: dict[str, Any] = states.make_state(options.gigabytes, options.dtype)
    copy = states.like(state)
    step = _training(states)
    savers: dict[str, Save] = {
        "zarrckpt": lambda path: zarrckpt.async_save(state, path, options=zarrckpt.SaveOptions(durable=False)),
        PEER: lambda path: dcp.async_save(state, storage_writer=dcp.FileSystemWriter(path, sync_files=False)),
    }
    found: dict[str, list[_Save]] = {name: [] for name in savers}
    copies = []
    for number in range(options.rounds + 1):
        copies.append(seconds(lambda: [copy[name].copy_(tensor) for name, tensor in state.items()]))
        for name, save in savers.items():
            found[name].append(_one(save, f"{folder}/{number}", step))
    one = statistics.median(copies[1:])
    return Results(figures=[*_figures(found, one), Figure(GROUP, "one copy of the state", one, "s")])


def _one(save: Save, path: str, step: Callable[[], float]) -> _Save:
    alone = statistics.median(step() for _ in range(100))
    began = time.perf_counter()
    future = save(path)
    stall = time.perf_counter() - began
    beside = [step()]
    while not future.done():
        beside.append(step())
    future.result()
    whole = time.perf_counter() - began
    shutil.rmtree(path)
    lost = sum(beside) - len(beside) * alone
    return _Save(stall, whole, stall + lost, sum(beside) / alone / len(beside))


def _figures(found: dict[str, list[_Save]], one: float) -> Iterator[Figure]:
    for name, saves in found.items():
        goal = 1.3 if name == "zarrckpt" else None
        stall, whole, lost, slower = (statistics.median(values) for values in zip(*saves[1:], strict=True))
        yield Figure(GROUP, f"{name}: stall, in copies of the state", stall / one, "", goal, most=True)
        yield Figure(GROUP, f"{name}: the first stall, which allocates the staging area", saves[0].stall / one)
        yield Figure(GROUP, f"{name}: call to commit", whole, "s")
        beside = f"{name}: a training step beside the background part, against alone"
        yield Figure(GROUP, beside, slower, "x", None if goal is None else 1.1, most=True)
        yield Figure(GROUP, f"{name}: training time lost, stall and slower steps", lost, "s")
    lost, peers = (statistics.median(save.lost for save in found[name][1:]) for name in ("zarrckpt", PEER))
    yield Figure(GROUP, f"training time lost by {PEER} over zarrckpt's", peers / lost, "x", 2.0)


def _training(states: Any) -> Any:
    """Return a step of many small operations of the interpreter and of torch, which returns its seconds."""
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
