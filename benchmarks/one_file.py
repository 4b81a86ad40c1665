"""A checkpoint in one file against a folder, DCP and safetensors: small tensors, GPT-2 with AdamW, large tensors."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.local import DCP, DCP_QUICK, QUICK, Goal, _agreed, _round
from benchmarks.measure import Options, alternate, fresh, ranks
from benchmarks.results import Figure, Results, Speed, faster

ARCHIVE, ARCHIVE_QUICK = "one file", "one file, durable=False"
SAFETENSORS = "safetensors into the same memory"


@dataclass(frozen=True)
class Condition:
    """One group of measurements: the state, the contenders, the goals, and the number of processes."""

    group: str
    state: str
    contenders: tuple[str, ...]
    goals: tuple[Goal, ...]
    world: int = 1


CONDITIONS = [
    Condition(
        "one file, 1,000 tensors of 16 KiB",
        "small",
        (ARCHIVE_QUICK, DCP_QUICK, QUICK),
        ((ARCHIVE_QUICK, DCP_QUICK, "save", 2.0), (ARCHIVE_QUICK, DCP_QUICK, "load", 3.0)),
    ),
    Condition(
        "one file, GPT-2 with AdamW, 592 tensors",
        "gpt2",
        (ARCHIVE, ARCHIVE_QUICK, DCP, DCP_QUICK),
        (
            (ARCHIVE, DCP, "save", 2.5),
            (ARCHIVE_QUICK, DCP_QUICK, "save", 1.3),
            (ARCHIVE, DCP, "load", 4.0),
        ),
    ),
    Condition(
        "one file, large tensors, 1 process",
        "large",
        (ARCHIVE_QUICK, QUICK, DCP_QUICK, SAFETENSORS),
        (
            (ARCHIVE_QUICK, QUICK, "save", 0.9),
            (ARCHIVE_QUICK, DCP_QUICK, "save", 1.3),
            (ARCHIVE_QUICK, SAFETENSORS, "load", 0.8),
        ),
    ),
    Condition(
        "one file, large tensors, 4 processes",
        "large",
        (ARCHIVE_QUICK, DCP_QUICK),
        ((ARCHIVE_QUICK, DCP_QUICK, "save", 1.5),),
        world=4,
    ),
]


def run(options: Options) -> Results:
    found = Results()
    for condition in CONDITIONS:
        if condition.world == 1:
            found.add(fresh(_measure, options, condition))
        else:
            found.add(ranks(_measure, condition.world, options, condition))
    return found


def _contenders() -> list[Any]:
    from benchmarks import peers

    def archive(durable: bool) -> tuple[Callable[..., None], Callable[..., None]]:
        save, load = peers.ours(durable)
        return lambda state, path: save(state, _name(path)), lambda target, path: load(target, _name(path))

    return [
        peers.Contender(ARCHIVE, "zarrckpt", *archive(True), kind="ours"),
        peers.Contender(ARCHIVE_QUICK, "zarrckpt", *archive(False), kind="ours"),
        peers.Contender(QUICK, "zarrckpt", *peers.ours(durable=False), kind="ours"),
        peers.Contender(DCP, "torch", peers.dcp_save, peers.dcp_load),
        peers.Contender(DCP_QUICK, "torch", peers.dcp_save_fast, peers.dcp_load),
        peers.Contender(SAFETENSORS, "safetensors", peers.safetensors_save, peers.safetensors_load),
    ]


def _name(folder: str) -> str:
    """Return the path of the archive in a contender's folder."""
    os.makedirs(folder, exist_ok=True)
    return f"{folder}/step.zarr.zip"


def _measure(options: Options, condition: Condition) -> Results:
    from benchmarks import state as states

    warnings.filterwarnings("ignore")
    world = condition.world
    state: Any = states.of_kind(condition.state, options.gigabytes, options.dtype)
    if world > 1:
        state = states.sharded(state)
    target = states.like(state)
    contenders = [contender for contender in _contenders() if contender.name in condition.contenders]
    with tempfile.TemporaryDirectory(dir=options.folder) as own:
        folder = _agreed(own, world)
        calls = {c.name: _round(c, state, target, folder, world) for c in contenders if c.installed}
        times = alternate(calls, options.rounds)
        files = _count_files(state, folder, world)
    speeds = []
    for c in contenders:
        pairs = times.get(c.name, [])
        loads = [pair[1] for pair in pairs if pair[1] is not None]
        speeds.append(Speed(condition.group, c.name, c.kind, states.nbytes(state), [pair[0] for pair in pairs], loads))
    figures = [faster(speeds, *goal) for goal in condition.goals]
    figures.append(Figure(condition.group, "files of a checkpoint", files, "", 1, most=True))
    return Results(speeds, figures)


def _count_files(state: Any, folder: str, world: int) -> int:
    """Return the number of files and folders that a save of an archive leaves."""
    import zarrckpt

    zarrckpt.save(state, f"{_name(f'{folder}/files')}")
    if world > 1:
        import torch.distributed as dist

        dist.barrier()
    return len(os.listdir(f"{folder}/files"))
