"""What subchunks cost: saves with them, in blocks and in rows, and without, and zarr-python's own read of all."""

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
from zarrckpt import _chunking
from zarrckpt._chunking import SUBCHUNKS, Subchunks

GROUP = "cost of subchunks"
WITHOUT = "without"


def run(options: Options) -> Results:
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        return fresh(_measure, options, folder)


def _measure(options: Options, folder: str) -> Results:
    from benchmarks import state as states

    warnings.filterwarnings("ignore")
    state: Any = states.make_state(options.gigabytes, options.dtype)
    target = states.like(state)
    calls = {shape: _round(state, target, folder, shape) for shape in SUBCHUNKS}
    calls[WITHOUT] = _round(state, target, folder, "blocks", 1 << 62)
    times = alternate(calls, max(3, options.rounds))
    figures = []
    for index, what in enumerate(("save", "zarrckpt.load", "zarr-python's whole read")):
        found = medians({name: [values[index] for values in rounds] for name, rounds in times.items()})
        for shape in SUBCHUNKS:
            goal = None if index == 1 or shape != "blocks" else 10.0
            more = 100 * (found[shape] / found[WITHOUT] - 1)
            name = what if shape == "blocks" else f'{what}, subchunks="{shape}"'
            figures.append(Figure(GROUP, f"{name}, more time than without", more, "%", goal, most=True))
    return Results(figures=figures)


def _round(
    state: Any, target: Any, folder: str, shape: Subchunks, above: int = _chunking.SUBCHUNK_ABOVE
) -> Callable[[int], tuple[float, ...]]:
    """Save, load, and read all with zarr-python; subchunks of a shape, only in chunks above that many bytes."""
    import zarrckpt
    from benchmarks import state as states

    def once(number: int) -> tuple[float, ...]:
        path = f"{folder}/{shape}-{above}"
        os.sync()
        with patch.object(_chunking, "SUBCHUNK_ABOVE", above):
            saved = seconds(lambda: zarrckpt.save(state, path, durable=False, subchunks=shape))
        loaded = seconds(lambda: zarrckpt.load(target, path))
        states.clear(target)
        read = seconds(lambda: _zarr_read(target, path))
        if not states.equal(target, state):
            raise RuntimeError("zarr-python read something else than was saved")
        shutil.rmtree(path)
        return saved, loaded, read

    return once


def _zarr_read(target: Any, path: str) -> None:
    """As a user of zarr-python would: a bare array of each tensor, into memory."""
    import torch
    import zarr

    import zarrckpt

    nodes = zarrckpt.open(path)
    group = zarr.open_group(path, mode="r", zarr_format=3)
    for name, tensor in target.items():
        found: Any = group[nodes.node_path(name)]
        if tensor.dtype == torch.bfloat16:
            tensor.view(torch.uint16).numpy()[...] = found[...].view("uint16")
        else:
            tensor.numpy()[...] = found[...]
