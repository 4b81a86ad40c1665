"""Objects, bytes between ranks and balance of a save, planned for large models on many ranks; nothing is saved.

    python benchmarks/plan_sizes.py              1B, 8B and 70B with Adam on 8, 64 and 512 ranks, FSDP
    python benchmarks/plan_sizes.py --hsdp 8     the same, each weight on groups of 8 ranks, replicated over the groups

Prints a row for each, with and without merging of small pieces.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from zarrckpt._grid import Ints
from zarrckpt._plan import Sizes, plan_save
from zarrckpt._plan_items import ItemTable, RankItems
from zarrckpt._planning import report_of
from zarrckpt._shards import Cut, held_boxes

SIZES = {"1B": (2048, 16, 512, 8192), "8B": (4096, 32, 1024, 14336), "70B": (8192, 80, 1024, 28672)}
"""Width, layers, width of keys and values, width of the feed-forward part: those of Llama 3."""

VOCABULARY = 128256


def weights(model: str) -> dict[str, Ints]:
    """Names and shapes of a model's weights."""
    dim, layers, kv, ffn = SIZES[model]
    shapes: dict[str, Ints] = {"embed": (VOCABULARY, dim), "norm": (dim,)}
    if model != "1B":  # there the embedding is the output's weight, too
        shapes["output"] = (VOCABULARY, dim)
    for layer in range(layers):
        parts = {"q": (dim, dim), "k": (kv, dim), "v": (kv, dim), "o": (dim, dim), "n1": (dim,), "n2": (dim,)}
        parts |= {"gate": (ffn, dim), "up": (ffn, dim), "down": (dim, ffn)}
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in parts.items()}
    return shapes


def items_of(rank: int, mesh: Ints, shapes: dict[str, Ints]) -> list[WriteItem]:
    """What DCP plans for one rank: weights and moments in float32, replicated over the first mesh dimension."""
    properties = TensorProperties(dtype=torch.float32)
    place = (rank // mesh[1], rank % mesh[1])
    items = []
    for name, shape in shapes.items():
        boxes = [held.box for held in held_boxes(shape, mesh, place, [None, Cut(0)])]
        for kind in ("model", "optim.exp_avg", "optim.exp_avg_sq"):
            for box in boxes:
                chunk = ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.shape))
                data = TensorWriteData(chunk, properties, torch.Size(shape))
                index = MetadataIndex(f"{kind}.{name}", chunk.offsets)
                items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
    return items


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--hsdp", type=int, default=0, metavar="N", help="shard over groups of N ranks")
    parser.add_argument("--models", nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--ranks", nargs="+", type=int, default=[8, 64, 512])
    args = parser.parse_args()
    print("| model | ranks | merging | objects | moved between ranks | max/mean written | puts, $ | planning, s |")
    print("|---|---|---|---|---|---|---|---|")
    for model in args.models:
        shapes = weights(model)
        for ranks in args.ranks:
            group = min(args.hsdp or ranks, ranks)
            mesh = (ranks // group, group)
            tables = [ItemTable.of(items_of(rank, mesh, shapes)) for rank in range(ranks)]
            none = np.zeros(len(tables[0]), np.uint64)
            held = [RankItems(table, none[: len(table)], False, False) for table in tables]
            for name, least in (("no", 0), ("default", None)):
                began = time.perf_counter()
                report = report_of(plan_save(held, {}, sizes=Sizes(min_piece=least)))
                seconds = time.perf_counter() - began
                moved = 100 * report.moved_bytes / report.nbytes
                print(
                    f"| {model} | {ranks} | {name} | {report.objects:,} | {moved:.1f} % | {report.balance:.3f} | "
                    f"{report.put_cost():.3f} | {seconds:.1f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
