"""Save and load on local disk, beside DCP's own FileSystem writer and reader, alternating in one run.

Prints medians in GB/s and the ratio to the peer. ``python benchmarks/save_load.py --help``.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable

import torch
import torch.distributed.checkpoint as dcp

import zarrckpt

State = dict[str, torch.Tensor]
Contender = tuple[str, Callable[[State, str], object], Callable[[State, str], object]]


def contenders() -> list[Contender]:
    """(name, save, load) of each; the first one is the peer that ratios refer to."""
    return [
        (
            "DCP FileSystem",
            lambda state, path: dcp.save(state, storage_writer=dcp.FileSystemWriter(path)),
            lambda state, path: dcp.load(state, storage_reader=dcp.FileSystemReader(path)),
        ),
        (
            "DCP FileSystem, 2 threads, no sync",
            lambda state, path: dcp.save(
                state, storage_writer=dcp.FileSystemWriter(path, thread_count=2, sync_files=False)
            ),
            lambda state, path: dcp.load(state, storage_reader=dcp.FileSystemReader(path)),
        ),
        ("zarrckpt", zarrckpt.save, zarrckpt.load),
        ("zarrckpt, durable=False", lambda state, path: zarrckpt.save(state, path, durable=False), zarrckpt.load),
    ]


def transformer_like(gigabytes: float) -> State:
    """Weights of the shapes that a transformer has, float32, of about that size."""
    state: State = {}
    layer = 0
    while sum(tensor.nbytes for tensor in state.values()) < gigabytes * 1e9:
        state[f"layers.{layer}.attention.weight"] = torch.randn(2048, 2048)
        state[f"layers.{layer}.mlp.weight"] = torch.randn(8192, 2048)
        state[f"layers.{layer}.norm.weight"] = torch.ones(2048)
        layer += 1
    return state


def measure(state: State, folder: str, rounds: int) -> dict[str, tuple[list[float], list[float]]]:
    """Seconds of every round's save and load, by contender."""
    times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name, _, _ in contenders()}
    for number in range(rounds):
        for name, save, load in contenders():
            path = os.path.join(folder, f"{number}-{name.replace(' ', '-')}")
            target = {key: torch.empty_like(tensor) for key, tensor in state.items()}
            for tensor in target.values():
                tensor.zero_()  # touched, so that the load does not pay for the pages
            began = time.perf_counter()
            save(state, path)
            saved = time.perf_counter()
            load(target, path)
            loaded = time.perf_counter()
            assert all(torch.equal(target[key], state[key]) for key in state), name
            times[name][0].append(saved - began)
            times[name][1].append(loaded - saved)
            shutil.rmtree(path)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0, help="size of the state (default 1.0)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds, of which the median counts (default 5)")
    parser.add_argument("--folder", help="where to write (default: a temporary folder)")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", category=UserWarning)  # DCP's, about the missing process group
    state = transformer_like(args.gigabytes)
    size = sum(tensor.nbytes for tensor in state.values()) / 1e9
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        times = measure(state, folder, args.rounds)
    print(f"{size:.2f} GB in {len(state)} tensors, one process, {os.cpu_count()} cores, median of {args.rounds}")
    print(f"{'':36}{'save GB/s':>10}{'ratio':>7}{'load GB/s':>11}{'ratio':>7}")
    speeds = {name: [size / statistics.median(column) for column in columns] for name, columns in times.items()}
    peer = next(iter(speeds.values()))
    for name, (save, load) in speeds.items():
        print(f"{name:36}{save:10.2f}{save / peer[0]:7.2f}{load:11.2f}{load / peer[1]:7.2f}")


if __name__ == "__main__":
    main()
