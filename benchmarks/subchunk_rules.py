"""What rules for subchunks cost: bytes read after a change of mesh, and zarr-python's time for a whole array.

    python -m benchmarks.subchunk_rules          the weights of a Llama 3 8B layer, geometry only
    python -m benchmarks.subchunk_rules --zarr   zarr-python reads one array, stored with subchunks of several sizes

The first prints, for each rule, bytes read over bytes needed when a checkpoint of the one mesh is loaded on the other.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from unittest.mock import patch

from zarrckpt import _chunking
from zarrckpt._chunking import choose_grid, default_min_piece_bytes
from zarrckpt._grid import Box, Grid, Ints
from zarrckpt._transfer import places_in

Rule = Callable[[Ints, Ints, int], Ints | None]
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


_CHOSEN = _chunking.subchunk_shape


def none(shape: Ints, chunk: Ints, itemsize: int) -> Ints | None:
    return None


def whole_rows(shape: Ints, chunk: Ints, itemsize: int) -> Ints | None:
    """The library's rule for ``subchunks="rows"``."""
    return _CHOSEN(shape, chunk, itemsize, "rows")


def with_least(nbytes: int) -> Rule:
    """The library's rule with another least size."""

    def rule(shape: Ints, chunk: Ints, itemsize: int) -> Ints | None:
        with patch.object(_chunking, "MIN_SUBCHUNK_BYTES", nbytes):
            return _CHOSEN(shape, chunk, itemsize)

    return rule


RULES: dict[str, Rule] = {
    "none": none,
    "whole rows": whole_rows,
    "least 1 MiB": with_least(1 << 20),
    "least 512 KiB": with_least(512 << 10),
    "least 256 KiB": with_least(256 << 10),
    "the library's (128 KiB)": _CHOSEN,
}


def cut(shape: Ints, cuts: dict[int, int]) -> list[Box]:
    """The boxes of ``torch.chunk`` along each cut dimension."""
    parts = []
    for dim, n in enumerate(shape):
        step = -(-n // cuts.get(dim, 1))
        parts.append([(begin, min(step, n - begin)) for begin in range(0, n, step)])
    return [Box(*zip(*place, strict=True)) for place in itertools.product(*parts)]


def ratio(saved: Cuts, loaded: Cuts, itemsize: int) -> tuple[float, float]:
    """Bytes read over bytes needed, and subchunks a gigabyte."""
    needed = read = cells = 0
    for shape, parallel in LAYER.values():
        boxes = cut(shape, saved(parallel))
        grid: Grid = choose_grid(shape, boxes, itemsize, min_piece_bytes=default_min_piece_bytes(len(boxes)))
        cells += grid.num_subchunks
        for box in cut(shape, loaded(parallel)):
            places = sum(len(places_in(grid, chunk, box)) for chunk in grid.chunks_of(box))
            needed += box.size
            read += places * math.prod(grid.subchunk_shape or grid.chunk_shape)
    return read / needed, cells / (sum(math.prod(shape) for shape, _ in LAYER.values()) * itemsize / 1e9)


def geometry() -> None:
    for itemsize in (4, 2):
        print(f"\n| {8 * itemsize} bits: rule | " + " | ".join(CHANGES) + " | subchunks a GB |")
        print("|---" * (len(CHANGES) + 2) + "|")
        for name, rule in RULES.items():
            # Grids are asked for as by a save that says nothing of subchunks.
            with patch.object(_chunking, "subchunk_shape", lambda *asked, rule=rule: rule(*asked[:3])):
                found = [ratio(*change, itemsize) for change in CHANGES.values()]
            print(f"| {name} | " + " | ".join(f"{value:.2f}" for value, _ in found) + f" | {found[0][1]:.0f} |")


def zarr_reads(rounds: int) -> None:
    import numpy as np
    import zarr
    from zarr.codecs import BytesCodec, Crc32cCodec

    shape, chunk = (14336, 4096), (1792, 4096)
    subs: list[Ints | None] = [None, (448, 4096), (1792, 512), (448, 512), (224, 512)]
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
    print("| subchunks | KiB | GB/s | time, over that without |\n|---|---|---|---|")
    base = statistics.median(times[0])
    for sub, own in zip(subs, times, strict=True):
        size = math.prod(sub) * 4 // 1024 if sub else 0
        median = statistics.median(own)
        print(f"| {sub or 'none'} | {size} | {math.prod(shape) * 4e-9 / median:.2f} | {median / base:.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--zarr", action="store_true", help="measure zarr-python's reads instead")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    if args.zarr:
        zarr_reads(args.rounds)
    else:
        geometry()


if __name__ == "__main__":
    main()
