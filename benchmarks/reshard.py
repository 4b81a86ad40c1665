"""Bytes read over bytes needed if a checkpoint is loaded on another mesh, for the weights of a Llama's layer.

Real ranks save. "Together" are ranks that share reads, the default for object stores: up to eight ranks really load,
and the reads of more are planned. "Alone", and with DCP, one process reads for each rank of the new mesh, through DCP's
protocol of storage readers and without its collectives, so that 64 ranks fit one machine. Bytes are those that the
process requested from the kernel.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.measure import Options, fresh, ranks
from benchmarks.results import Figure, Results

LAYERS = {"8B, bfloat16": (4096, 1024, 14336, "bfloat16"), "1B, float32": (2048, 512, 8192, "float32")}
BY_COLUMNS = ("o", "down")
"""Weights that tensor parallelism cuts along their second dimension (row parallel); the others along the first."""


@dataclass(frozen=True)
class Mesh:
    """Sharding of every weight: over ``fsdp`` ranks along dimension 0, over ``tp`` ranks by tensor parallelism."""

    fsdp: int = 1
    tp: int = 1

    @property
    def ranks(self) -> int:
        return self.fsdp * self.tp

    def __str__(self) -> str:
        return f"fsdp{self.fsdp}-tp{self.tp}"


CHANGES = {
    "(8,) -> (4,)": (Mesh(fsdp=8), Mesh(fsdp=4)),
    "8 -> 6 rows": (Mesh(fsdp=8), Mesh(fsdp=6)),
    "FSDP8 -> TP8": (Mesh(fsdp=8), Mesh(tp=8)),
    "TP8 -> FSDP8": (Mesh(tp=8), Mesh(fsdp=8)),
    "(2, 2) -> (4,)": (Mesh(fsdp=2, tp=2), Mesh(fsdp=4)),
    "TP8 -> FSDP64": (Mesh(tp=8), Mesh(fsdp=64)),
}
GOAL = 1.1
"""Goal for ranks that share reads."""


def run(options: Options) -> Results:
    found = Results()
    layers = dict(list(LAYERS.items())[-1:]) if options.quick else LAYERS
    for name, layer in layers.items():
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            ranks(_save_all, 8, layer, folder)
            loaded = ranks(_load_all, 8, layer, folder)
            group = f"bytes read / needed, {name}"
            for change, (planned, sent, alone, dcp) in fresh(_read_all, layer, folder).items():
                shared = loaded.get(change, planned)
                planned_only = "" if change in loaded else "; planned"
                note = f"sent {sent:.2f}; alone {alone:.2f}; DCP FileSystem {dcp:.2f}{planned_only}"
                found.figures.append(Figure(group, change, shared, "", GOAL, most=True, note=note))
    return found


def _weights(layer: tuple[int, int, int, str]) -> dict[str, tuple[int, ...]]:
    from benchmarks.state import layer_shapes

    return layer_shapes(*layer[:3])


def _tp_dim(name: str) -> int:
    return 1 if name in BY_COLUMNS else 0


def _save_all(layer: tuple[int, int, int, str], folder: str) -> None:
    """Save the same weights on every source mesh, by zarrckpt and by DCP. Called on every rank."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import DeviceMesh

    import zarrckpt

    warnings.filterwarnings("ignore")
    for mesh in dict.fromkeys(source for source, _ in CHANGES.values()):
        members = list(range(mesh.ranks))
        group = dist.new_group(members)
        flat = mesh.fsdp == 1 or mesh.tp == 1
        grid = DeviceMesh("cpu", members if flat else [members[at : at + mesh.tp] for at in members[:: mesh.tp]])
        if dist.get_rank() < mesh.ranks:
            state = {name: _dtensor(name, shape, layer[3], mesh, grid) for name, shape in _weights(layer).items()}
            zarrckpt.save(
                state, f"{folder}/ours-{mesh}", options=zarrckpt.SaveOptions(durable=False), process_group=group
            )
            writer = dcp.FileSystemWriter(f"{folder}/dcp-{mesh}", sync_files=False)
            dcp.save(state, storage_writer=writer, process_group=group)


def _dtensor(name: str, shape: tuple[int, ...], dtype: str, mesh: Mesh, grid: Any) -> Any:
    """Return this rank's part of a weight, all ones. Every size divides evenly."""
    import torch
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    tp = Shard(_tp_dim(name))
    placements: list[Any] = [tp if mesh.tp > 1 else Shard(0)]
    if grid.ndim == 2:
        # FSDP2 cuts the parts of tensor parallelism. If both cut rows, the parts of one FSDP rank are not adjacent.
        placements = [Shard(0) if tp.dim else _StridedShard(0, split_factor=mesh.tp), tp]
    extent = list(shape)
    for size, placement in zip(grid.shape, placements, strict=True):
        extent[placement.dim] //= size
    part = torch.ones(extent, dtype=getattr(torch, dtype))
    return DTensor.from_local(part, grid, placements, run_check=False)


def _boxes(name: str, shape: tuple[int, ...], mesh: Mesh, rank: int) -> Iterable[tuple[list[int], list[int]]]:
    """Yield (offset, shape) of a rank's parts of a weight: whole rows or columns, cut as torch.chunk does."""
    dim = _tp_dim(name) if mesh.tp > 1 else 0
    step = -(-shape[dim] // mesh.ranks)
    begin, end = min(rank * step, shape[dim]), min((rank + 1) * step, shape[dim])
    if begin < end:
        offset, extent = [0] * len(shape), list(shape)
        offset[dim], extent[dim] = begin, end - begin
        yield offset, extent


def _load_all(layer: tuple[int, int, int, str], folder: str) -> dict[str, float]:
    """Load with shared reads on up to eight ranks. Return bytes fetched over bytes needed. Called on every rank."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard, zeros

    import zarrckpt

    warnings.filterwarnings("ignore")
    found = {}
    for change, (source, target) in CHANGES.items():
        if target.ranks > 8:
            continue
        members = list(range(target.ranks))
        group = dist.new_group(members)
        grid = DeviceMesh("cpu", members)
        if dist.get_rank() < target.ranks:
            dtype = getattr(torch, layer[3])
            cuts = {name: [Shard(_tp_dim(name) if target.tp > 1 else 0)] for name in _weights(layer)}
            state: dict[str, Any] = {
                name: zeros(shape, dtype=dtype, device_mesh=grid, placements=cuts[name])
                for name, shape in _weights(layer).items()
            }
            report = zarrckpt.load(
                state, f"{folder}/ours-{source}", options=zarrckpt.LoadOptions(share_reads=True), process_group=group
            )
            parts = [tensor.to_local() for tensor in state.values()]
            if not all(bool((part == 1).all()) for part in parts):
                raise RuntimeError("the loaded data differs from the saved data")
            total = torch.tensor([report.nbytes, sum(part.nbytes for part in parts)])
            dist.all_reduce(total, group=group)
            found[change] = int(total[0]) / int(total[1])
    return found


def _read_all(layer: tuple[int, int, int, str], folder: str) -> dict[str, tuple[float, float, float, float]]:
    """Return bytes over bytes needed for every change: fetched with shared reads, sent, read alone, read by DCP."""
    import torch.distributed.checkpoint as dcp

    import zarrckpt
    from benchmarks.subchunk_rules import fetched_together
    from zarrckpt._format.grid import Box

    warnings.filterwarnings("ignore")
    found = {}
    for change, (source, target) in CHANGES.items():
        ours = partial(zarrckpt.ZarrStorageReader, f"{folder}/ours-{source}")
        theirs = partial(dcp.FileSystemReader, f"{folder}/dcp-{source}")
        nodes = zarrckpt.open(f"{folder}/ours-{source}")._catalog.root.tensors
        boxes = [
            [
                (name, Box(tuple(offset), tuple(extent)))
                for name, shape in _weights(layer).items()
                for offset, extent in _boxes(name, shape, target, rank)
            ]
            for rank in range(target.ranks)
        ]
        needed = sum(node.nbytes for node in nodes.values())
        fetched, sent = fetched_together(nodes, boxes)
        # Some ranks represent all: DCP reads the whole of every piece of which it needs a row.
        few = range(0, target.ranks, max(1, target.ranks // 4))
        found[change] = (
            fetched / needed,
            sent / needed,
            _amplification(ours, range(target.ranks), layer, target),
            _amplification(theirs, few, layer, target),
        )
    return found


def _amplification(make_reader: Any, which: Iterable[int], layer: tuple[int, int, int, str], target: Mesh) -> float:
    """Return the bytes read over the bytes needed, each summed over ranks."""
    read = needed = 0
    for rank in which:
        boxes = {name: list(_boxes(name, shape, target, rank)) for name, shape in _weights(layer).items()}
        found = _read_rank(make_reader(), boxes)
        read, needed = read + found[0], needed + found[1]
    return read / needed


def _read_rank(reader: Any, boxes: dict[str, list[tuple[list[int], list[int]]]]) -> tuple[int, int]:
    """Return (bytes read, bytes needed) of one rank, by DCP's steps of a load with a plan of these boxes."""
    import torch
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
    from torch.distributed.checkpoint.planner import LoadPlan
    from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

    reader.reset()
    metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, True)
    items, targets = [], {}
    for name, held in boxes.items():
        entry = metadata.state_dict_metadata[name]
        chunks = [ChunkStorageMetadata(torch.Size(offset), torch.Size(shape)) for offset, shape in held]
        items += create_read_items_for_chunk_list(name, entry, chunks)
        for offset, shape in held:
            targets[name, tuple(offset)] = torch.empty(shape, dtype=entry.properties.dtype)
    plan = reader.prepare_global_plan([reader.prepare_local_plan(LoadPlan(items))])[0]
    before = _asked()
    reader.read_data(plan, _targets(targets)).wait()
    read = _asked() - before
    if not all(bool((tensor == 1).all()) for tensor in targets.values()):
        raise RuntimeError("the data read differs from the saved data")
    return read, sum(tensor.nbytes for tensor in targets.values())


def _targets(tensors: dict[Any, Any]) -> Any:
    """Return a load planner whose targets are these tensors, by name and offset."""
    from torch.distributed.checkpoint import DefaultLoadPlanner

    class Targets(DefaultLoadPlanner):
        def resolve_tensor(self, read_item: Any) -> Any:
            whole = tensors[read_item.dest_index.fqn, tuple(read_item.dest_index.offset)]
            for dim, (begin, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
                whole = whole.narrow(dim, begin, length)
            return whole

        def commit_tensor(self, read_item: Any, tensor: Any) -> None:
            pass

        def lookup_tensor(self, index: Any) -> Any:
            return tensors[index.fqn, tuple(index.offset)]

    return Targets()


def _asked() -> int:
    """Return the bytes that this process has read from files so far."""
    with open("/proc/self/io") as file:
        return int(file.readline().split()[1])
