"""Cost of subchunks: saves and loads with and without them, and zarr-python's read of all tensors."""

from __future__ import annotations

import os
import shutil
import tempfile
import warnings
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

from benchmarks.measure import Options, alternate, fresh, medians, seconds
from benchmarks.results import Figure, Results
from zarrckpt._plan import chunking

GROUP = "cost of subchunks"
WITH, WITHOUT = "with", "without"


def run(options: Options) -> Results:
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        return fresh(_measure, options, folder)


def _measure(options: Options, folder: str) -> Results:
    from benchmarks import state as states

    warnings.filterwarnings("ignore")
    state: Any = states.make_state(options.gigabytes, options.dtype)
    target = states.like(state)
    calls = {
        WITH: _round(state, target, folder, chunking.SUBCHUNK_ABOVE),
        WITHOUT: _round(state, target, folder, 1 << 62),
    }
    times = alternate(calls, max(3, options.rounds))
    figures = []
    for index, (what, goal) in enumerate((("save", 10.0), ("zarrckpt.load", None), ("zarr-python's whole read", 35.0))):
        found = medians({name: [values[index] for values in rounds] for name, rounds in times.items()})
        more = 100 * (found[WITH] / found[WITHOUT] - 1)
        figures.append(Figure(GROUP, f"{what}, more time than without", more, "%", goal, most=True))
    return Results(figures=figures)


def _round(state: Any, target: Any, folder: str, above: int) -> Callable[[int], tuple[float, ...]]:
    """Save, load, and read all with zarr-python, with subchunks only in chunks above ``above`` bytes."""
    import zarrckpt
    from benchmarks import state as states

    def once(number: int) -> tuple[float, ...]:
        path = f"{folder}/{above}"
        os.sync()
        with patch.object(chunking, "SUBCHUNK_ABOVE", above):
            saved = seconds(lambda: zarrckpt.save(state, path, options=zarrckpt.SaveOptions(durable=False)))
        loaded = seconds(lambda: zarrckpt.load(target, path))
        states.clear(target)
        read = seconds(lambda: _zarr_read(target, path))
        if not states.equal(target, state):
            raise RuntimeError("the data read by zarr-python differs from the saved data")
        shutil.rmtree(path)
        return saved, loaded, read

    return once


def _zarr_read(target: Any, path: str) -> None:
    """Read each tensor as a plain array with zarr-python, into memory."""
    import torch
    import zarr

    import zarrckpt

    nodes = zarrckpt.open(path)
    group = zarr.open_group(path, mode="r", zarr_format=3)
    for name, tensor in target.items():
        found: Any = group[nodes.entry(name).node_path]
        if tensor.dtype == torch.bfloat16:
            tensor.view(torch.uint16).numpy()[...] = found[...].view("uint16")
        else:
            tensor.numpy()[...] = found[...]
