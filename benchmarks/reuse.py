"""Saves that reuse unchanged chunks of the checkpoint before: a LoRA training, and a state in which everything changes.

A save with a base is compared with a full save (``reuse="off"``) of the same state. Bytes and requests are those of the
server, or of the files that are not links.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from harness.s3_server import Served, served

from benchmarks.measure import Options, Took, alternate, fresh, ranks, took, warm
from benchmarks.results import Figure, Results
from benchmarks.s3 import BUCKET, DISTANT

GROUP = "unchanged chunks"
FROZEN_GIGABYTES = 1.4
"""Size of the frozen weights, in units of ``--gigabytes``."""
ADAPTERS = 10e6
"""Bytes of the adapters at 1 GB. Adam has two moments of this size."""
CHECKPOINTS = 10
RANKS, FEWER_RANKS = 4, 2
LOCAL_BYTES, S3_BYTES = 64 << 10, 256 << 10
"""Bytes that a save may write beyond those that change, by the goals."""


class _Pair(NamedTuple):
    """The time of a full save and of a save with a base, and the counts of both by a server."""

    full: Took
    reused: Took
    full_counts: dict[str, Any]
    counts: dict[str, Any]
    sent: int
    """Bytes of new files."""


def run(options: Options) -> Results:
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        figures += fresh(_lora_local, options, folder)
        figures += fresh(_all_changes, options, f"{folder}/changes", "local")
        ranks(_lora_ranks, RANKS, options, folder, RANKS)
        figures += ranks(_lora_ranks, RANKS, options, folder, RANKS, True)
        figures += ranks(_lora_ranks, FEWER_RANKS, options, folder, RANKS, True)
    for name, delay in (("no delay", {}), ("25 ms", DISTANT)):
        with served(**delay, tls=True) as server:
            figures += fresh(_lora_s3, options, server, f"S3 over TLS, {name}", env=server.environment)
            if not delay:
                url = f"s3://{BUCKET}/changes"
                figures += fresh(_all_changes, options, url, "S3 over TLS, no delay", server, env=server.environment)
    return Results(figures=figures)


# -- states


def _frozen(options: Options) -> dict[str, Any]:
    from benchmarks import state as states

    return states.make_state(FROZEN_GIGABYTES * options.gigabytes, options.dtype)


def _adapters(frozen: dict[str, Any], options: Options) -> dict[str, Any]:
    """Return two matrices for each query and value matrix, as PEFT does by default, and Adam's moments and steps."""
    import torch

    shapes = {name: tensor.shape for name, tensor in frozen.items() if name.endswith((".q.weight", ".v.weight"))}
    rank = max(1, round(ADAPTERS * options.gigabytes / 4 / sum(sum(shape) for shape in shapes.values())))
    generator = torch.Generator().manual_seed(1)
    state: dict[str, Any] = {}
    for name, (rows, columns) in shapes.items():
        for part, shape in (("lora_A", (rank, columns)), ("lora_B", (rows, rank))):
            for what in ("adapters", "optim.exp_avg", "optim.exp_avg_sq"):
                state[f"{what}.{name}.{part}"] = torch.empty(shape).uniform_(-1, 1, generator=generator)
            state[f"optim.step.{name}.{part}"] = torch.tensor(1.0)
    return state


def _train(state: dict[str, Any]) -> None:
    """Change every element of every tensor."""
    from benchmarks import state as states

    for tensor in state.values():
        states.local(tensor).mul_(1.001).add_(1e-3)


# -- one save of each kind in turn


def _pairs(
    frozen: dict[str, Any],
    changing: dict[str, Any],
    url: str,
    options: Options,
    *,
    base: str | None = None,
    server: Served | None = None,
    wait: Callable[[], object] = lambda: None,
) -> list[_Pair]:
    """Save both ways in each round, after a change of the state. The base is the save of the round before."""
    import zarrckpt
    from benchmarks import state as states

    state = {**frozen, **changing}
    on, off = zarrckpt.SaveOptions(reuse="on"), zarrckpt.SaveOptions(reuse="off")
    first = int(os.environ.get("RANK", 0)) == 0
    given = base is not None
    if base is None:
        base = f"{url}-base"
        zarrckpt.save(state, base, options=on)
    bases = [base]

    def save(path: str, reuse: bool) -> tuple[Took, dict[str, Any], int]:
        if first:
            if server is None:
                os.sync()
            warm(states.nbytes(state))
        if server is not None:
            server.reset()
        wait()

        def call() -> None:
            zarrckpt.save(state, path, options=on if reuse else off, base=bases[-1] if reuse else None)
            wait()

        time = took(call)
        counts = {} if server is None else server.stats()
        return time, counts, _new_bytes(path) if server is None and first else 0

    def full(number: int) -> tuple[Took, dict[str, Any], int]:
        found = save(f"{url}-full-{number}", reuse=False)
        if first:
            _remove(f"{url}-full-{number}", server)
        return found

    def reused(number: int) -> tuple[Took, dict[str, Any], int]:
        _train(changing)
        found = save(f"{url}-reused-{number}", reuse=True)
        if first and (bases[-1] != base or not given):
            _remove(bases[-1], server)
        bases.append(f"{url}-reused-{number}")
        return found

    full(-1)  # the first save of a process imports modules and opens connections
    found = alternate({"full": full, "reused": reused}, options.rounds)
    return [
        _Pair(one[0], other[0], one[1], other[1], other[2])
        for one, other in zip(found["full"], found["reused"], strict=True)
    ]


def _remove(path: str, server: Served | None) -> None:
    if server is None:
        shutil.rmtree(path)
    else:
        server.clear(BUCKET, path.removeprefix(f"s3://{BUCKET}/") + "/")


def _new_bytes(path: str) -> int:
    """Return the bytes of the files that are no links."""
    found = (file.stat() for file in Path(path).rglob("*") if file.is_file())
    return sum(file.st_size for file in found if file.st_nlink == 1)


def _disk_bytes(paths: list[str]) -> int:
    """Return the bytes that files take together. A file with several links counts once."""
    found = [file.stat() for path in paths for file in Path(path).rglob("*") if file.is_file()]
    return sum({file.st_ino: file.st_blocks * 512 for file in found}.values())


def _ratios(group: str, pairs: list[_Pair], time: float | None, processor: float | None) -> Iterator[Figure]:
    for what, attribute, goal in (("time", "seconds", time), ("processor time", "processor", processor)):
        found = [statistics.median(getattr(pair[which], attribute) for pair in pairs) for which in (0, 1)]
        note = f"{found[1]:.3f} s and {found[0]:.3f} s"
        name = f"{group}: {what} of a save with a base, against a full save"
        yield Figure(GROUP, name, found[1] / found[0], "x", goal, most=True, note=note)


def _written(group: str, sent: int, fixed: int, nbytes: int) -> Figure:
    """Return the bytes that were sent, less ``fixed`` bytes, over the ``nbytes`` that change."""
    name = f"{group}: bytes written, against those that change"
    note = f"less {fixed >> 10} KiB; {sent:,} bytes"
    return Figure(GROUP, name, (sent - fixed) / nbytes, "x", 1.05, most=True, note=note)


# -- the conditions


def _lora_local(options: Options, folder: str) -> list[Figure]:
    import zarrckpt
    from benchmarks import state as states

    warnings.filterwarnings("ignore")
    frozen = _frozen(options)
    changing = _adapters(frozen, options)
    nbytes = states.nbytes(changing)
    pairs = _pairs(frozen, changing, f"{folder}/lora", options)
    sent = max(pair.sent for pair in pairs)
    figures = [_written("LoRA, local", sent, LOCAL_BYTES, nbytes), *_ratios("LoRA, local", pairs, 0.2, None)]
    paths: list[str] = []
    on = zarrckpt.SaveOptions(reuse="on")
    for number in range(CHECKPOINTS):
        paths.append(f"{folder}/lora-ten-{number}")
        zarrckpt.save({**frozen, **changing}, paths[-1], options=on, base=paths[-2] if number else None)
        _train(changing)
    disk, expected = _disk_bytes(paths), states.nbytes(frozen) + CHECKPOINTS * nbytes
    what = f"LoRA, local: {CHECKPOINTS} checkpoints on disk, against one base and {CHECKPOINTS} of what changes"
    return [*figures, Figure(GROUP, what, disk / expected, "x", 1.05, most=True, note=f"{disk:,} bytes")]


def _lora_s3(options: Options, server: Served, group: str) -> list[Figure]:
    from benchmarks import state as states

    warnings.filterwarnings("ignore")
    frozen = _frozen(options)
    changing = _adapters(frozen, options)
    nbytes = states.nbytes(changing)
    pairs = _pairs(frozen, changing, f"s3://{BUCKET}/lora", options, server=server)
    sent = max(pair.counts["bytes_in"] for pair in pairs)
    requests = [sum(counts["requests"].values()) for counts in (pairs[-1].full_counts, pairs[-1].counts)]
    full = statistics.median(pair.full_counts["round_trips"] for pair in pairs)
    trips = statistics.median(pair.counts["round_trips"] for pair in pairs)
    more, note = f"LoRA, {group}: more round trips than a full save", f"{trips:g} and {full:g}"
    return [
        _written(f"LoRA, {group}", sent, S3_BYTES, nbytes),
        *_ratios(f"LoRA, {group}", pairs, 0.25, None),
        Figure(GROUP, f"LoRA, {group}: requests", requests[1], note=f"a full save: {requests[0]}"),
        Figure(GROUP, more, trips - full, "", 2, most=True, note=note),
    ]


def _all_changes(options: Options, url: str, group: str, server: Served | None = None) -> list[Figure]:
    from benchmarks import state as states

    warnings.filterwarnings("ignore")
    state = states.make_state(options.gigabytes, options.dtype)
    pairs = _pairs({}, state, url, options, server=server)
    return list(_ratios(f"everything changes, {group}", pairs, 1.02, 1.05))


def _lora_ranks(options: Options, folder: str, base_ranks: int, measured: bool = False) -> list[Figure]:
    """Save sharded as by FSDP2. The base is the save of ``base_ranks`` ranks, which is made first."""
    import torch.distributed as dist

    import zarrckpt
    from benchmarks import state as states

    warnings.filterwarnings("ignore")
    frozen = _frozen(options)
    adapters = _adapters(frozen, options)
    changing = {**adapters, **states.sharded({name: tensor for name, tensor in adapters.items() if tensor.dim()})}
    frozen, nbytes, world = states.sharded(frozen), states.nbytes(changing), dist.get_world_size()
    base = f"{folder}/ranks-base"
    if not measured:
        zarrckpt.save({**frozen, **changing}, base, options=zarrckpt.SaveOptions(reuse="on"))
        return []
    pairs = _pairs(frozen, changing, f"{folder}/ranks-{world}", options, base=base, wait=dist.barrier)
    group = f"LoRA, local, FSDP2, {world} ranks" + ("" if world == base_ranks else f" after {base_ranks}")
    return [_written(group, pairs[0].sent, LOCAL_BYTES, nbytes), *_ratios(group, pairs, 0.2, None)]
