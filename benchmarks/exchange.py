"""Cost and gain of the exchange between ranks: saves with and without merging, loads with and without shared reads.

    python benchmarks/exchange.py save           pieces of 64 KiB to 4 MiB, merged or one object for each
    python benchmarks/exchange.py load           replicas, and columns of saved rows: fetched once, or by every rank

Each runs on a local folder and on the same folder with a delay: 25 ms per request and 90 MB/s per connection, about
those of S3. Prints medians in seconds, and the ratio. All ranks are processes on this machine.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from zarr.core.buffer import Buffer
from zarr.storage import LocalStore

import zarrckpt

DELAY, RATE = 0.025, 90e6


class DelayedStore(LocalStore):
    """Files with the delay of an object store, for any number of concurrent requests."""

    async def get(self, *args: Any, **kwargs: Any) -> Buffer | None:
        found = await super().get(*args, **kwargs)
        await asyncio.sleep(DELAY + (len(found) / RATE if found is not None else 0))
        return found

    async def set(self, key: str, value: Buffer) -> None:
        await super().set(key, value)
        await asyncio.sleep(DELAY + len(value) / RATE)

    async def set_if_not_exists(self, key: str, value: Buffer) -> None:
        await super().set_if_not_exists(key, value)
        await asyncio.sleep(DELAY)


def place(folder: str, delayed: bool) -> Any:
    """Return the folder, or a delayed store of it."""
    return DelayedStore(folder) if delayed else folder


def seconds(call: Callable[[int], object], rounds: int) -> float:
    """Return the median time of a call on all ranks."""
    times = []
    for number in range(rounds):
        dist.barrier()
        began = time.perf_counter()
        call(number)
        dist.barrier()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def row(*cells: object) -> None:
    if dist.get_rank() == 0:
        print("| " + " | ".join(str(cell) for cell in cells) + " |", flush=True)


def save_once(
    state: dict[str, Any], base: str, delayed: bool, least: int, reports: list[zarrckpt.SaveReport], number: int
) -> None:
    reports.append(
        zarrckpt.save(
            state,
            place(f"{base}-{number}", delayed),
            options=zarrckpt.SaveOptions(min_piece_bytes=least, durable=False),
        )
    )


def saves(folder: str, rounds: int, megabytes: int) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    row("store", "piece", "objects", "an object each, s", "objects, merged", "merged, s", "ratio")
    row(*["---"] * 7)
    for delayed in (False, True):
        for kib in (64, 256, 1024, 4096):
            count = max(1, megabytes * 1024 // (kib * dist.get_world_size()))
            state = {
                f"w{i}": DTensor.from_local(torch.randn(kib, 256), mesh, [Shard(0)], run_check=False)
                for i in range(count)
            }
            found = []
            for name, least in (("each", 0), ("merged", 1 << 40)):
                reports: list[zarrckpt.SaveReport] = []

                base = f"{folder}/{delayed}-{kib}-{name}"
                save = partial(save_once, state, base, delayed, least, reports)
                found += [seconds(save, rounds), reports[-1].objects]
            each, objects, merged, fewer = found
            where = "delayed" if delayed else "local"
            row(where, f"{kib} KiB", objects, f"{each:.2f}", fewer, f"{merged:.2f}", f"{each / merged:.2f}")


def load_once(state: dict[str, Any], source: Any, share: bool, fetched: list[int], _: int) -> None:
    fetched.append(zarrckpt.load(state, source, options=zarrckpt.LoadOptions(share_reads=share)).nbytes)


def loads(folder: str, rounds: int, megabytes: int) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    row("what", "store", "every rank, s", "fetched, MB", "once, s", "fetched, MB", "ratio")
    row(*["---"] * 7)
    for what in ("replicas", "columns of rows"):
        whole = {f"w{i}": torch.zeros(1024, 1024) for i in range(megabytes // 4)}
        saved, state = (
            (whole, whole)
            if what == "replicas"
            else [
                {name: distribute_tensor(tensor, mesh, [Shard(dim)]) for name, tensor in whole.items()}
                for dim in (0, 1)
            ]
        )
        zarrckpt.save(saved, f"{folder}/{what}", options=zarrckpt.SaveOptions(durable=False, min_piece_bytes=0))
        for delayed in (False, True):
            source = place(f"{folder}/{what}", delayed)
            found = []
            for share in (False, True):
                fetched: list[int] = []

                took = seconds(partial(load_once, state, source, share, fetched), rounds)
                total = torch.tensor(fetched[-1])
                dist.all_reduce(total)
                found += [took, int(total) / 1e6]
            every, all_bytes, once, fewer = found
            where = "delayed" if delayed else "local"
            row(what, where, f"{every:.2f}", f"{all_bytes:.0f}", f"{once:.2f}", f"{fewer:.0f}", f"{every / once:.2f}")


def work(rank: int, ranks: int, folder: str, what: str, rounds: int, megabytes: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=ranks)
    (saves if what == "save" else loads)(folder, rounds, megabytes)
    dist.barrier()
    os._exit(0)  # torch 2.13: a gloo process sometimes aborts at the interpreter's exit


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("what", choices=["save", "load"])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--megabytes", type=int, default=200, help="of the state")
    parser.add_argument("--folder", help="an existing folder on the disk to measure (default: a temporary one)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        options = (args.ranks, folder, args.what, args.rounds, args.megabytes)
        mp.start_processes(work, options, args.ranks, start_method="spawn")


if __name__ == "__main__":
    main()
