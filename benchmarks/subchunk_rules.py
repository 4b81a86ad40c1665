"""Cost of the size of subchunks: bytes read after a change of mesh, and zarr-python's time for a whole array.

    python -m benchmarks.subchunk_rules          the weights of a Llama 3 8B layer, geometry only
    python -m benchmarks.subchunk_rules --zarr   zarr-python reads one array, stored with subchunks of several sizes
    python -m benchmarks.subchunk_rules --shapes the rule over the shapes of many models and numbers of ranks

The first prints the bytes that a load on another mesh fetches, over the bytes that it fills: if each rank reads alone,
and if ranks share reads, with the bytes that they send to each other.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from unittest.mock import patch

from zarrckpt._format.chunk_layout import CRC_BYTES, subchunk_bytes
from zarrckpt._format.documents import ArrayNode
from zarrckpt._format.dtypes import by_name
from zarrckpt._format.grid import Box, Ints
from zarrckpt._load.shared_reads import boxes_of_ranks, overlap_bytes, plan_shares
from zarrckpt._plan import chunking
from zarrckpt._plan.chunking import choose_grid, default_min_piece_bytes
from zarrckpt._read.chunks import subchunks_in

Cuts = Callable[[int], dict[int, int]]

LAYER: dict[str, tuple[Ints, int]] = {
    # shape, and the dimension that tensor parallelism cuts
    "q": ((4096, 4096), 0),
    "k": ((1024, 4096), 0),
    "v": ((1024, 4096), 0),
    "o": ((4096, 4096), 1),
    "gate": ((14336, 4096), 0),
    "up": ((14336, 4096), 0),
    "down": ((4096, 14336), 1),
}


def rows(parts: int) -> Cuts:
    return lambda parallel: {0: parts}


def tensor_parallel(parts: int) -> Cuts:
    return lambda parallel: {parallel: parts}


def two_by_two(parallel: int) -> dict[int, int]:
    return {0: 4} if parallel == 0 else {0: 2, 1: 2}


CHANGES: dict[str, tuple[Cuts, Cuts]] = {
    "FSDP 8 to 4": (rows(8), rows(4)),
    "FSDP 8 to 6": (rows(8), rows(6)),
    "FSDP 8 to TP 8": (rows(8), tensor_parallel(8)),
    "TP 8 to FSDP 8": (tensor_parallel(8), rows(8)),
    "2x2 to 4": (two_by_two, rows(4)),
    "TP 8 to FSDP 64": (tensor_parallel(8), rows(64)),
}

SIZES = {"1 MiB": 1 << 20, "2 MiB": 2 << 20, "4 MiB": 4 << 20}


def cut(shape: Ints, cuts: dict[int, int]) -> list[Box]:
    """Return the boxes of ``torch.chunk`` along each cut dimension."""
    parts = []
    for dim, n in enumerate(shape):
        step = -(-n // cuts.get(dim, 1))
        parts.append([(begin, min(step, n - begin)) for begin in range(0, n, step)])
    return [Box(*zip(*place, strict=True)) for place in itertools.product(*parts)]


def layer(saved: Cuts, itemsize: int) -> dict[str, ArrayNode]:
    """Return the arrays of a layer that was saved with these cuts."""
    dtype = by_name({4: "float32", 2: "bfloat16"}[itemsize])
    nodes = {}
    for name, (shape, parallel) in LAYER.items():
        boxes = cut(shape, saved(parallel))
        grid = choose_grid(shape, boxes, itemsize, min_piece_bytes=default_min_piece_bytes(len(boxes)))
        nodes[name] = ArrayNode(name, grid, dtype)
    return nodes


def alone(saved: Cuts, loaded: Cuts, itemsize: int) -> float:
    """Return the bytes that ranks fetch that read alone, over the bytes that they fill."""
    needed = read = 0
    for name, node in layer(saved, itemsize).items():
        shape, parallel = LAYER[name]
        for box in cut(shape, loaded(parallel)):
            numbers = sum(len(subchunks_in(node.grid, chunk, box)) for chunk in node.grid.chunks_of(box))
            needed += box.size * itemsize
            read += numbers * (subchunk_bytes(node) + CRC_BYTES)
    return read / needed


def together(saved: Cuts, loaded: Cuts, itemsize: int) -> tuple[float, float]:
    """Return the bytes that ranks fetch and send that share reads, each over the bytes that they fill."""
    nodes = layer(saved, itemsize)
    pieces = {name: cut(LAYER[name][0], loaded(LAYER[name][1])) for name in nodes}
    ranks = max(map(len, pieces.values()))
    targets = [[(name, boxes[rank]) for name, boxes in pieces.items() if rank < len(boxes)] for rank in range(ranks)]
    needed = sum(math.prod(node.grid.shape) for node in nodes.values()) * itemsize
    fetched, sent = fetched_together(nodes, targets)
    return fetched / needed, sent / needed


def fetched_together(nodes: Mapping[str, ArrayNode], targets: Sequence[Sequence[tuple[str, Box]]]) -> tuple[int, int]:
    """Return the bytes that ranks with these targets fetch and send if they share reads."""
    shares = plan_shares(range(len(targets)), nodes, boxes_of_ranks(targets), len(targets), 128 << 20).values()
    fetched = sent = 0
    shared: dict[tuple[str, Ints], set[int]] = {}
    for step in (step for own in shares for step in own.values()):
        for run in step.reads:
            fetched += len(run.numbers) * (subchunk_bytes(nodes[run.fqn]) + CRC_BYTES)
            shared.setdefault((run.fqn, run.chunk), set()).update(run.numbers)
        for message in step.sends:
            sizes = (overlap_bytes(nodes[run.fqn], run.chunk, run.numbers, box) for run, box in message.parts)
            sent += len(message.ranks) * sum(sizes)
    # Each rank fetches the subchunks that only it needs.
    for name, box in (target for own in targets for target in own):
        node = nodes[name]
        for chunk in node.grid.chunks_of(box):
            own_numbers = {*subchunks_in(node.grid, chunk, box)} - shared.get((name, chunk), set())
            fetched += len(own_numbers) * (subchunk_bytes(node) + CRC_BYTES)
    return fetched, sent


def geometry() -> None:
    for itemsize in (4, 2):
        print(f"\n| {8 * itemsize} bits | " + " | ".join(CHANGES) + " | subchunks per GB |")
        print("|---" * (len(CHANGES) + 2) + "|")
        for name, nbytes in SIZES.items():
            chunking._subchunks.cache_clear()
            with patch.object(chunking, "SUBCHUNK_BYTES", nbytes):
                by_itself = [alone(*change, itemsize) for change in CHANGES.values()]
                shared = [together(*change, itemsize) for change in CHANGES.values()]
                nodes = layer(rows(8), itemsize)
            count = sum(node.grid.num_subchunks for node in nodes.values())
            count_a_gb = count / sum(node.nbytes for node in nodes.values()) * 1e9
            print(f"| {name}: alone | " + " | ".join(f"{value:.2f}" for value in by_itself) + f" | {count_a_gb:.0f} |")
            print(f"| {name}: together | " + " | ".join(f"{value:.2f}" for value, _ in shared) + " | |")
            print(f"| {name}: sent | " + " | ".join(f"{value:.2f}" for _, value in shared) + " | |")
        chunking._subchunks.cache_clear()


def zarr_reads(rounds: int) -> None:
    import numpy as np
    import zarr
    from zarr.codecs import BytesCodec, Crc32cCodec

    shape, chunk = (14336, 4096), (1792, 4096)
    subs: list[Ints | None] = [None, (896, 4096), (448, 4096), (256, 4096), (128, 4096), (64, 4096), (32, 4096)]
    with tempfile.TemporaryDirectory() as folder:
        arrays = []
        for number, sub in enumerate(subs):
            array = zarr.create_array(
                f"{folder}/{number}",
                shape=shape,
                dtype="float32",
                chunks=sub or chunk,
                shards=chunk if sub else None,
                compressors=[Crc32cCodec()],
                serializer=BytesCodec(),
                filters=[],
            )
            array[...] = np.random.default_rng(0).standard_normal(shape, "f4")
            arrays.append(array)
        times: list[list[float]] = [[] for _ in subs]
        for _ in range(rounds):
            for array, own in zip(arrays, times, strict=True):
                began = time.perf_counter()
                array[...]
                own.append(time.perf_counter() - began)
    print("| subchunks | MiB | GB/s | time relative to no subchunks |\n|---|---|---|---|")
    base = statistics.median(times[0])
    for sub, own in zip(subs, times, strict=True):
        size = math.prod(sub) * 4 / (1 << 20) if sub else 0
        median = statistics.median(own)
        print(f"| {sub or 'none'} | {size:g} | {math.prod(shape) * 4e-9 / median:.2f} | {median / base:.2f} |")


MODELS: dict[str, list[Ints]] = {
    "GPT-2": [(50257, 768), (1024, 768), (768, 2304), (768, 768), (768, 3072), (3072, 768)],
    "Whisper": [(51866, 1280), (1280, 1280), (5120, 1280), (1280, 128, 3), (1500, 1280)],
    "Llama 3 8B": [(128256, 4096), (4096, 4096), (1024, 4096), (14336, 4096), (4096, 14336)],
    "Llama 3 70B": [(8192, 8192), (1024, 8192), (28672, 8192), (8192, 28672), (128256, 8192)],
    "Mixtral": [(8, 14336, 4096), (8, 4096, 14336), (32000, 4096)],
    "BERT": [(30522, 1024), (1024, 1024), (4096, 1024)],
    "T5": [(32128, 768), (2048, 768)],
    "ResNet": [(2048, 512, 1, 1), (512, 512, 3, 3), (1000, 2048), (64, 3, 7, 7)],
    "Qwen 2.5": [(151936, 3584), (3584, 3584), (18944, 3584), (512, 3584)],
    "Gemma": [(256000, 3072), (24576, 3072)],
    "none, but odd": [(50262, 768), (50021, 1021), (1048577,), (10007, 10007)],
}
RANKS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 64)


def cuts_of(n: int, parts: int) -> list[tuple[int, int]]:
    """Return the offset and extent of each part, cut as by ``torch.chunk``."""
    step = -(-n // parts)
    return [(at, min(step, n - at)) for at in range(0, n, step)]


def moved_share(shape: Ints, parts: Ints, chunk: Ints) -> float:
    """Return the share of a tensor's elements that are not on the rank that holds most of their chunk."""
    stays = 1.0
    for n, count, extent in zip(shape, parts, chunk, strict=True):
        held = cuts_of(n, count)
        for_each = (
            max(min(at + extent, begin + size, n) - max(at, begin) for begin, size in held)
            for at in range(0, n, extent)
        )
        stays *= 1.0 if count == 1 else sum(for_each) / n
    return 1 - stays


def shapes() -> None:
    sizes, padded, moved = [], [], []
    without, total = [0, 0], 0
    for (model, own), itemsize, ranks in itertools.product(MODELS.items(), (4, 2), RANKS):
        for shape in own:
            cuts: list[Ints] = [(ranks,), (1, ranks), *([(ranks // 2, 2)] if ranks % 2 == 0 else [])]
            for cut in (one for one in cuts if len(one) <= len(shape)):
                parts = (*cut, *(1,) * (len(shape) - len(cut)))
                grids = itertools.product(*map(cuts_of, shape, parts))
                boxes = [Box(tuple(at for at, _ in one), tuple(n for _, n in one)) for one in grids]
                if math.prod(shape) * itemsize < len(boxes) << 20:
                    continue
                total += 1
                grid = choose_grid(shape, boxes, itemsize)
                stored = math.prod(grid.chunk_shape) * itemsize
                if grid.subchunk_shape is None:
                    without[stored > 4 << 20] += stored > 1 << 20
                else:
                    sizes.append(math.prod(grid.subchunk_shape) * itemsize)
                padded.append(grid.num_chunks * math.prod(grid.chunk_shape) / math.prod(shape))
                if any(at % n for box in boxes for at, n in zip(box.offset, grid.chunk_shape, strict=True)):
                    moved.append((moved_share(shape, parts, grid.chunk_shape), f"{model} {shape} over {cut}"))
    usual = sum(1 << 20 <= size <= 4 << 20 for size in sizes)
    print(f"{total} tensors with pieces of 1 MiB or more; subchunks {len(sizes)}, of 1 to 4 MiB {usual}")
    print(f"without, of 1 to 4 MiB: {without[0]}, above: {without[1]}; padding at most {max(padded) - 1:.1%}")
    mean = statistics.mean(share for share, _ in moved)
    print(f"rows move in {len(moved)} cases, on average {mean:.2%} of the tensor; the largest shares:")
    for share, what in sorted(moved, reverse=True)[:5]:
        print(f"  {share:.1%} of {what}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--zarr", action="store_true", help="measure zarr-python's reads instead")
    parser.add_argument("--shapes", action="store_true", help="the rule over many shapes instead")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    if args.zarr:
        zarr_reads(args.rounds)
    elif args.shapes:
        shapes()
    else:
        geometry()


if __name__ == "__main__":
    main()
