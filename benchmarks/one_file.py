"""A checkpoint in one file against a folder, DCP and safetensors: small tensors, GPT-2 with AdamW, large tensors."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.local import DCP, DCP_QUICK, QUICK, Condition, _agreed, _barrier, compare, measure_each
from benchmarks.measure import Options
from benchmarks.results import Figure, Results

ARCHIVE, ARCHIVE_QUICK = "one file", "one file, durable=False"
SAFETENSORS = "safetensors into the same memory"


@dataclass(frozen=True)
class ArchiveCondition(Condition):
    """A condition and the names of its contenders."""

    contenders: tuple[str, ...] = ()


CONDITIONS = [
    ArchiveCondition(
        "one file, 1,000 tensors of 16 KiB",
        "small",
        ((ARCHIVE_QUICK, DCP_QUICK, "save", 2.0), (ARCHIVE_QUICK, DCP_QUICK, "load", 3.0)),
        contenders=(ARCHIVE_QUICK, DCP_QUICK, QUICK),
    ),
    ArchiveCondition(
        "one file, GPT-2 with AdamW, 592 tensors",
        "gpt2",
        (
            (ARCHIVE, DCP, "save", 2.5),
            (ARCHIVE_QUICK, DCP_QUICK, "save", 1.3),
            (ARCHIVE, DCP, "load", 4.0),
        ),
        contenders=(ARCHIVE, ARCHIVE_QUICK, DCP, DCP_QUICK),
    ),
    ArchiveCondition(
        "one file, large tensors, 1 process",
        "large",
        (
            (ARCHIVE_QUICK, QUICK, "save", 0.9),
            (ARCHIVE_QUICK, DCP_QUICK, "save", 1.3),
            (ARCHIVE_QUICK, SAFETENSORS, "load", 0.8),
        ),
        contenders=(ARCHIVE_QUICK, QUICK, DCP_QUICK, SAFETENSORS),
    ),
    ArchiveCondition(
        "one file, large tensors, 4 processes",
        "large",
        ((ARCHIVE_QUICK, DCP_QUICK, "save", 1.5),),
        world=4,
        contenders=(ARCHIVE_QUICK, DCP_QUICK),
    ),
]


def run(options: Options) -> Results:
    return measure_each(options, CONDITIONS, _measure)


def _measure(options: Options, condition: ArchiveCondition) -> Results:
    found = compare(options, condition, _contenders)
    files = _count_files(options, condition.world)
    found.figures.append(Figure(condition.group, "files of a checkpoint", files, "", 1, most=True))
    return found


def _contenders(condition: ArchiveCondition, state: Any, folder: str) -> list[Any]:
    from benchmarks import peers

    def archive(durable: bool) -> tuple[Callable[..., None], Callable[..., None]]:
        save, load = peers.ours(durable)
        return lambda state, path: save(state, _name(path)), lambda target, path: load(target, _name(path))

    every = [
        peers.Contender(ARCHIVE, "zarrckpt", *archive(True), kind="ours"),
        peers.Contender(ARCHIVE_QUICK, "zarrckpt", *archive(False), kind="ours"),
        peers.Contender(QUICK, "zarrckpt", *peers.ours(durable=False), kind="ours"),
        peers.Contender(DCP, "torch", peers.dcp_save, peers.dcp_load),
        peers.Contender(DCP_QUICK, "torch", peers.dcp_save_fast, peers.dcp_load),
        peers.Contender(SAFETENSORS, "safetensors", peers.safetensors_save, peers.safetensors_load),
    ]
    return [contender for contender in every if contender.name in condition.contenders]


def _name(folder: str) -> str:
    """Return the path of the archive in a contender's folder."""
    os.makedirs(folder, exist_ok=True)
    return f"{folder}/step.zarr.zip"


def _count_files(options: Options, world: int) -> int:
    """Return the number of files and folders that a save of an archive leaves."""
    import zarrckpt
    from benchmarks import state as states

    state: Any = states.of_kind("small", options.gigabytes, options.dtype)
    with tempfile.TemporaryDirectory(dir=options.folder) as own:
        folder = _agreed(own, world)
        zarrckpt.save(state if world == 1 else states.sharded(state), _name(f"{folder}/files"))
        files = len(os.listdir(f"{folder}/files"))
        _barrier(world)  # the first rank removes the folder
    return files
