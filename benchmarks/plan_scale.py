"""What the coordinator of a save does between ranks' plans and their tasks, beside DCP's default planner.

    python benchmarks/plan_scale.py                2,200 tensors of a Llama-like model with Adam, FSDP over 8 to 1,024
    python benchmarks/plan_scale.py --dcp 64       DCP's planner up to 64 ranks only: it takes minutes at 1,024
    python benchmarks/plan_scale.py --groups 8     HSDP: each weight sharded over groups, replicated over 8 of them

Ranks are simulated: their plans are made here and pickled as DCP's gather does it. Timed is all that the coordinator
does from there: unpickling what was gathered, the planner's and the writer's global steps (for DCP the planner's alone:
dedup, metadata, validation), pickling what is scattered. "again" is a repeated save of the same state. Prints a table.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import pickle
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from zarrckpt import ZarrSavePlanner, ZarrStorageWriter, _mail, _plan
from zarrckpt._grid import Ints
from zarrckpt._kept_plans import Memory, PlanReuse
from zarrckpt._mail import Notes
from zarrckpt._plan_items import KnownItems
from zarrckpt._root import Root, Table
from zarrckpt._shards import Cut, held_boxes
from zarrckpt._state_path import StatePath

WIDTH, KEYS, FORWARD, VOCABULARY = 8192, 1024, 28672, 128256


def tensors(count: int) -> dict[str, Ints]:
    """Names and shapes of a Llama-like model's weights and Adam's two moments: as many as asked for."""
    weights: dict[str, Ints] = {"embed": (VOCABULARY, WIDTH), "norm": (WIDTH,), "output": (VOCABULARY, WIDTH)}
    layer = 0
    while 3 * len(weights) < count:
        parts = {"q": (WIDTH, WIDTH), "k": (KEYS, WIDTH), "v": (KEYS, WIDTH), "o": (WIDTH, WIDTH), "n1": (WIDTH,)}
        parts |= {"n2": (WIDTH,), "gate": (FORWARD, WIDTH), "up": (FORWARD, WIDTH), "down": (WIDTH, FORWARD)}
        weights |= {f"layers.{layer}.{name}": shape for name, shape in parts.items()}
        layer += 1
    kinds = {"model.": weights, "optim.state.exp_avg.": weights, "optim.state.exp_avg_sq.": weights}
    return dict([(kind + name, shape) for kind, own in kinds.items() for name, shape in own.items()][:count])


def items_of(rank: int, mesh: Ints, shapes: dict[str, Ints]) -> list[WriteItem]:
    """What DCP plans for one rank: float32, replicated over the first mesh dimension and sharded over the second."""
    place, known = (rank // mesh[1], rank % mesh[1]), dict[Ints, Any]()
    properties = TensorProperties(dtype=torch.float32)
    items = []
    for name, shape in shapes.items():
        if shape not in known:
            known[shape] = [held.box for held in held_boxes(shape, mesh, place, [None, Cut(0)])]
        for box in known[shape]:
            chunk = ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.shape))
            data = TensorWriteData(chunk, properties, torch.Size(shape))
            items.append(WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, tensor_data=data))
    return items


def sent_to_dcp(mesh: Ints, shapes: dict[str, Ints]) -> list[bytes]:
    """The plans of all ranks as DCP gathers them."""
    paths = {name: tuple(name.split(".")) for name in shapes}
    ranks = range(mesh[0] * mesh[1])
    return [pickle.dumps(SavePlan(items_of(rank, mesh, shapes), planner_data=paths)) for rank in ranks]


def sent_to_us(mesh: Ints, shapes: dict[str, Ints], writer: ZarrStorageWriter) -> list[bytes]:
    """The plans of all ranks as DCP gathers them, with our planner's notes and our writer's facts."""
    sent = []
    paths = {name: StatePath.of(name.split(".")) for name in shapes}
    for rank in range(mesh[0] * mesh[1]):
        items = items_of(rank, mesh, shapes)
        # Replicas are alike.
        digests = {
            item.index: hash((item.index.fqn, rank % mesh[1])).to_bytes(8, "little", signed=True) for item in items
        }
        plan = SavePlan(items, Notes(digests, False, True), paths)
        with patch.object(_mail, "global_rank", lambda rank=rank: rank):
            sent.append(pickle.dumps(writer.prepare_local_plan(plan)))
    return sent


def sent_again(sent: Sequence[bytes], key: str) -> list[bytes]:
    """What the same ranks send in the next save, when they name the plan that they have got."""
    again = []
    for data in sent:
        plan: SavePlan = pickle.loads(data)
        items: Any = KnownItems(key, plan.storage_data.rank)
        facts = dataclasses.replace(plan.storage_data, items=items)
        again.append(pickle.dumps(dataclasses.replace(plan, items=items, planner_data=None, storage_data=facts)))
    return again


def timed(steps: Callable[[], tuple[list[SavePlan], Metadata]]) -> tuple[float, list[bytes], Metadata]:
    """Seconds for steps and for pickling their plans; the pickles; DCP's metadata."""
    gc.collect()
    began = time.perf_counter()
    plans, metadata = steps()
    scattered = [pickle.dumps(plan) for plan in plans]
    return time.perf_counter() - began, scattered, metadata


def by_dcp(sent: Sequence[bytes]) -> tuple[list[SavePlan], Metadata]:
    """The coordinator's work with DCP's default planner."""
    planner = DefaultSavePlanner()
    planner.set_up_planner({}, is_coordinator=True)
    return planner.create_global_plan([pickle.loads(data) for data in sent])


def by_us(sent: Sequence[bytes], writer: ZarrStorageWriter) -> tuple[list[SavePlan], Metadata]:
    """The coordinator's work with our planner and writer, the attempt's beginning in an empty folder included."""
    planner = ZarrSavePlanner()
    planner.set_up_planner({}, is_coordinator=True)
    plans, metadata = planner.create_global_plan([pickle.loads(data) for data in sent])
    return writer.prepare_global_plan(plans), metadata


def root_bytes(writer: ZarrStorageWriter) -> int:
    """The size of the root document of a save as planned."""
    layout = writer._layout
    assert layout is not None
    root = Root("0" * 32, "", layout.tensors, Table(0, 0), world_size=layout.world_size)
    return len(root.to_bytes())


def begin(writer: ZarrStorageWriter, url: str, memory: Memory) -> None:
    """A save begins on the coordinator, as :func:`zarrckpt.save` does it."""
    writer.reset(url)
    writer.reuse_plans(PlanReuse(memory))
    writer.set_up_storage_writer(True)


def measure(ranks: int, groups: int, shapes: dict[str, Ints], with_dcp: bool) -> list[str]:
    """One row of the table."""
    mesh = (min(groups, ranks), ranks // min(groups, ranks))
    with tempfile.TemporaryDirectory() as folder:
        writer = ZarrStorageWriter(f"{folder}/save", durable=False)
        sent = sent_to_us(mesh, shapes, writer)
        memory = Memory()
        begin(writer, f"{folder}/save", memory)
        ours, scattered, metadata = timed(lambda: by_us(sent, writer))
        (key,) = memory.plans
        named = sent_again(sent, key)
        begin(writer, f"{folder}/again", memory)
        again, _, _ = timed(lambda: by_us(named, writer))
        document = root_bytes(writer)
        assert writer._layout is not None
        _plan.describe(metadata, writer._layout)
    row = [
        f"{ranks:,}",
        "-",
        f"{ours:.2f}",
        "-",
        f"{again:.2f}",
        _mb(sent),
        "-",
        _mb(scattered),
        "-",
        f"{document / 1e6:.2f}",
    ]
    row += [f"{len(pickle.dumps(metadata)) / 1e6:.2f}", "-"]
    del scattered, metadata
    if with_dcp:
        theirs = sent_to_dcp(mesh, shapes)
        seconds, scattered, metadata = timed(lambda: by_dcp(theirs))
        row[1], row[3] = f"{seconds:.2f}", f"{seconds / ours:.1f}"
        row[6], row[8], row[11] = _mb(theirs), _mb(scattered), f"{len(pickle.dumps(metadata)) / 1e6:.2f}"
    return row


def _mb(parts: Sequence[bytes]) -> str:
    return f"{sum(map(len, parts)) / 1e6:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--ranks", nargs="+", type=int, default=[8, 64, 256, 1024])
    parser.add_argument("--tensors", type=int, default=2200)
    parser.add_argument("--groups", type=int, default=1, metavar="N", help="replicate over N groups of ranks")
    parser.add_argument("--dcp", type=int, default=1024, metavar="N", help="DCP's planner for up to N ranks")
    args = parser.parse_args()
    shapes = tensors(args.tensors)
    gc.disable()  # it would look at all ranks' plans again and again; they are not what is measured
    heads = [
        "ranks",
        "DCP, s",
        "ours, s",
        "ratio",
        "again, s",
        "gathered, MB",
        "DCP",
        "scattered, MB",
        "DCP",
        "root document, MB",
    ]
    heads += ["metadata, MB", "DCP"]
    print(f"| {' | '.join(heads)} |")
    print(f"|{'---|' * len(heads)}")
    for ranks in args.ranks:
        print(f"| {' | '.join(measure(ranks, args.groups, shapes, ranks <= args.dcp))} |", flush=True)


if __name__ == "__main__":
    main()
