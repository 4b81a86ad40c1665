"""The coordinator's work before a save of a large model on many ranks, through DCP's own calls.

Each rank's plan is made by the planner that a save would use, with a mesh that has that rank's coordinate. The plans
are pickled, as DCP gathers them. The coordinator's part is timed: it unpickles all plans, makes both global plans, and
pickles the answer to each rank. No tensor is saved. The documents' sizes come from real saves by up to eight ranks.
"""

from __future__ import annotations

import itertools
import os
import pickle
import statistics
import tempfile
import time
import warnings
from typing import Any
from unittest.mock import patch

from benchmarks.measure import Options, fresh, ranks
from benchmarks.results import Figure, Results

LAYERS = 82
WIDTHS = (4096, 1024, 14336)
SIZES = (8, 64, 256, 1024)
PATIENCE = 30.0
"""Seconds after which a planner is not measured with more ranks."""

GROUP = "planning"


def run(options: Options) -> Results:
    sizes, layers = ((8,), 2) if options.quick else (SIZES, LAYERS)
    found, times = Results(), {}
    for name in ("zarrckpt", "DCP default"):
        for count in sizes:
            with tempfile.TemporaryDirectory(dir=options.folder) as folder:
                asked = fresh(_plan, name, count, layers, folder)
            times[name, count] = asked["coordinator"]
            what = f"{name}, {asked['tensors']:,} tensors x {count:,} ranks, the coordinator's part"
            note = ", ".join(f"{part} {took:.2f} s" for part, took in asked["parts"].items())
            note += f"; {asked['received'] / 1e6:,.1f} MB of plans received, {asked['sent'] / 1e6:,.1f} MB sent"
            goal = 10.0 if name == "zarrckpt" and count == SIZES[-1] else None
            found.figures.append(Figure(GROUP, what, times[name, count], "s", goal, most=True, note=note))
            found.figures.append(Figure(GROUP, f"{name}, {count:,} ranks, a rank's own part", asked["rank"], "s"))
            if times[name, count] > PATIENCE:
                break
        if name == "zarrckpt" and (name, sizes[-1]) not in times:
            what = f"{name}, {sizes[-1]:,} ranks, the coordinator's part"
            found.figures.append(Figure(GROUP, what, None, "s", 10.0, most=True, note=f"not run: too slow at {count}"))
    both = [count for count in sizes if ("zarrckpt", count) in times and ("DCP default", count) in times]
    more = times["DCP default", both[-1]] / times["zarrckpt", both[-1]]
    what = f"zarrckpt against DCP default at {both[-1]:,} ranks, the coordinator's part"
    found.figures.append(Figure(GROUP, what, more, "x", None if options.quick else 10.0))
    found.add(_documents(options))
    return found


def _plan(name: str, count: int, layers: int, folder: str) -> dict[str, Any]:
    """Measure the plans of all ranks, one after the other, and then the coordinator's work."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    warnings.filterwarnings("ignore")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
    mesh = init_device_mesh("cpu", (count,))
    state = _state(mesh, count, layers)
    sent, took = [], []
    for rank in range(count):
        with patch.object(dist, "get_rank", lambda group=None, rank=rank: rank):
            mesh._coordinate_on_dim = (rank,)
            began = time.perf_counter()
            sent.append(pickle.dumps(_local_plan(*_pair(name, f"{folder}/save"), state)))
            took.append(time.perf_counter() - began)
    mesh._coordinate_on_dim = (0,)
    planner, writer = _pair(name, f"{folder}/save")
    _local_plan(planner, writer, state)
    found = _coordinate(planner, writer, sent)
    return found | {"tensors": len(state), "rank": statistics.median(took), "received": sum(map(len, sent))}


def _local_plan(planner: Any, writer: Any, state: dict[str, Any]) -> Any:
    planner.set_up_planner(state, None, True)
    writer.set_up_storage_writer(True)
    return writer.prepare_local_plan(planner.create_local_plan())


def _coordinate(planner: Any, writer: Any, sent: list[bytes]) -> dict[str, Any]:
    marks = [time.perf_counter()]
    plans = [pickle.loads(data) for data in sent]
    marks.append(time.perf_counter())
    plans, _ = planner.create_global_plan(plans)
    marks.append(time.perf_counter())
    plans = writer.prepare_global_plan(plans)
    marks.append(time.perf_counter())
    size = sum(len(pickle.dumps(plan)) for plan in plans)
    marks.append(time.perf_counter())
    names = ("unpickling", "create_global_plan", "prepare_global_plan", "pickling")
    parts = dict(zip(names, (after - before for before, after in itertools.pairwise(marks)), strict=True))
    return {"coordinator": marks[-1] - marks[0], "parts": parts, "sent": size}


def _pair(name: str, path: str) -> tuple[Any, Any]:
    import torch.distributed.checkpoint as dcp

    import zarrckpt

    if name == "zarrckpt":
        return zarrckpt.ZarrSavePlanner(), zarrckpt.ZarrStorageWriter(path)
    return dcp.DefaultSavePlanner(), dcp.FileSystemWriter(path)


def _state(mesh: Any, count: int, layers: int) -> dict[str, Any]:
    """Return one rank's weights and Adam's moments. All sizes divide evenly, and the memory is never touched."""
    import torch
    from torch.distributed.tensor import DTensor, Shard

    from benchmarks.state import layer_shapes

    state = {}
    for layer in range(layers):
        shapes = layer_shapes(*WIDTHS) | {"norm1": (WIDTHS[0],), "norm2": (WIDTHS[0],)}
        for name, shape in shapes.items():
            for kind in ("model", "optim.exp_avg", "optim.exp_avg_sq"):
                part = torch.empty((shape[0] // count, *shape[1:]))
                state[f"{kind}.layers.{layer}.{name}"] = DTensor.from_local(part, mesh, [Shard(0)], run_check=False)
    return state


# -- documents


def _documents(options: Options) -> Results:
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        sizes = ranks(_save, 8, folder)
    figures = []
    for name, by_ranks in sizes.items():
        text = ", ".join(f"{size:,} on {count}" for count, size in by_ranks.items())
        few, *_, many = by_ranks.values()
        figures.append(Figure(GROUP, f"{name}, bytes on 8 ranks over bytes on 1", many / few, "", note=f"{text} ranks"))
    return Results(figures=figures)


def _save(folder: str) -> dict[str, dict[int, int]]:
    """Return the bytes of the document that locates all tensors, by the number of ranks that saved."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    import zarrckpt

    warnings.filterwarnings("ignore")
    found: dict[str, dict[int, int]] = {"zarr.json of zarrckpt": {}, ".metadata of DCP": {}}
    for count in (1, 2, 4, 8):
        group = dist.new_group(list(range(count)))
        mesh = DeviceMesh("cpu", list(range(count)))
        if dist.get_rank() >= count:
            continue
        part = torch.ones(64 // count, 64)
        state = {f"layers.{n}.weight": DTensor.from_local(part, mesh, [Shard(0)], run_check=False) for n in range(100)}
        zarrckpt.save(state, f"{folder}/ours-{count}", options=zarrckpt.SaveOptions(durable=False), process_group=group)
        dcp.save(state, storage_writer=dcp.FileSystemWriter(f"{folder}/dcp-{count}"), process_group=group)
        found["zarr.json of zarrckpt"][count] = os.path.getsize(f"{folder}/ours-{count}/zarr.json")
        found[".metadata of DCP"][count] = os.path.getsize(f"{folder}/dcp-{count}/.metadata")
    return found
