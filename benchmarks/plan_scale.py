"""Cost of planning saves and loads of large models on many ranks, without starting a rank.

    python -m benchmarks.plan_scale                                     "2214" (see MODELS) on 8 to 10,240 ranks
    python -m benchmarks.plan_scale --models 70B 405B --ranks 10240     other models and numbers of ranks
    python -m benchmarks.plan_scale --layouts hsdp-tp pipeline          see LAYOUTS; the default is FSDP x TP
    python -m benchmarks.plan_scale --min-piece-bytes 0                 small pieces are not merged
    python -m benchmarks.plan_scale --quick                             no processes for the work of a rank

Prints three tables: the planning of a save, its result, and the planning of a load. Descriptions and messages are made
and encoded as ranks do it. The work of a rank between two rounds (the whole plan, its digest, the digests of replicas,
the rank's part of the plan) is measured in a fresh process for the first, the middle and the last rank. Times are
processor times, so that other processes change them little. The loads are on the mesh that saved, with shared reads.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from harness.large_models import HOST, LAYOUTS, MODELS, Case
from harness.plan_traffic import moved_bytes, peers

from zarrckpt._format.documents import ArrayNode
from zarrckpt._format.wire import decode, encode
from zarrckpt._jobs import DEFAULT_MAX_INFLIGHT_BYTES
from zarrckpt._load.shared_reads import _shared_ranges, plan_shares
from zarrckpt._plan.all_descriptions import AllDescriptions
from zarrckpt._plan.description import Description
from zarrckpt._plan.geometry import Numbers
from zarrckpt._plan.global_state import GlobalState, gather_boxes, gather_state
from zarrckpt._plan.plan import PlanOptions, SavePlan, plan_save
from zarrckpt._ranks.call_group import FANOUT
from zarrckpt._ranks.control_messages import Message, decode_message, encode_message
from zarrckpt._save import agree
from zarrckpt._save.plan_report import report_of

# -- the work of a rank


class Work(NamedTuple):
    """Processor time and memory of one rank's work between two rounds."""

    seconds: float
    megabytes: float


def plan_in_process(packed: Sequence[bytes], numbers: Any, rank: int, options: PlanOptions) -> Work:
    """Compute one rank's plan from the received descriptions. Called in a fresh process."""
    before = peak_memory()
    began = time.process_time()
    state = gather_state(AllDescriptions.from_packed(packed, numbers, range(len(numbers))))
    plan = plan_save(state, options)
    state.replicas(rank)
    assert plan.digest and plan.rank_plan(rank)
    return Work(time.process_time() - began, peak_memory() - before)


def peak_memory() -> float:
    """Return the peak memory of this process in MB. (getrusage includes the parent's.)"""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024 / 1e6


def measure_ranks(gathered: AllDescriptions, options: PlanOptions) -> list[Work]:
    """Measure the planning of a save on the first, the middle and the last rank."""
    size = len(gathered.numbers)
    packed = [description.packed for description in gathered.descriptions]
    numbers = gathered.numbers.astype(np.min_scalar_type(len(packed)))
    found = []
    for rank in sorted({0, size // 2, size - 1}):
        with get_context("spawn").Pool(1) as pool:
            found.append(pool.apply(plan_in_process, (packed, numbers, rank, options)))
    return found


def share_in_process(
    packed: Sequence[bytes], numbers: Any, nodes: Mapping[str, ArrayNode], rank: int
) -> tuple[Work, int]:
    """Compute one rank's shared reads, and the number of shared requests of all ranks. Called in a fresh process."""
    before = peak_memory()
    began = time.process_time()
    boxes = gather_boxes(AllDescriptions.from_packed(packed, numbers, range(len(numbers))))
    limit = DEFAULT_MAX_INFLIGHT_BYTES // 4
    plan_shares((rank,), nodes, boxes, len(numbers), limit)
    work = Work(time.process_time() - began, peak_memory() - before)
    return work, sum(1 for _ in _shared_ranges(nodes, boxes, limit))


def measure_load(gathered: AllDescriptions, plan: SavePlan) -> tuple[Work, int]:
    """Measure the planning of a load of the tensors on the middle rank."""
    targets = [
        Description([entry for entry in description.entries if entry.kind == "tensor"], description.shardings)
        for description in gathered.descriptions
    ]
    packed = [description.packed for description in targets]
    with get_context("spawn").Pool(1) as pool:
        return pool.apply(share_in_process, (packed, gathered.numbers, plan.layout.tensors, len(gathered.numbers) // 2))


# -- the coordinator


class _Ranks:
    """The members of a process group, without connections. Replaces the rounds."""

    def __init__(self, size: int) -> None:
        self.rank, self.size, self.members = 0, size, tuple(range(size))


class Coordinator:
    """The coordinator's side of the rounds, with real messages. Counts bytes and processor time."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.received = 0
        self.sent = 0
        self.seconds = 0.0
        self._round = 0

    def decide(self, results: Sequence[Any], decide: Any) -> Any:
        """Make one round: the results of all ranks go up the tree, and the answer goes down."""
        self._round += 1
        below = [list(_below(child, self.size)) for child in _children(0, self.size)]
        items = [("result", encode(one)) for one in results]
        calls = "the save to s3://bucket/runs/step-001000"
        bodies = [
            ({place: items[place] for place in places}, {calls: places} if self._round == 1 else {}, False)
            for places in below
        ]
        messages = [encode_message(Message("results", 1, self._round, body)) for body in bodies]
        self.received += sum(map(len, messages))
        gc.collect()
        began = time.process_time()
        finals = {0: items[0]}
        for message in messages:
            finals.update(decode_message(message).body[0])
        answer = decide([decode(finals[place][1]) for place in range(self.size)])
        body = ("result", encode(answer), False)
        down = [encode_message(Message("answer", 1, self._round, body)) for _ in below]
        self.seconds += time.process_time() - began
        self.sent += sum(map(len, down))
        return answer


def _children(place: int, size: int) -> range:
    first = place * FANOUT + 1
    return range(min(first, size), min(first + FANOUT, size))


def _below(place: int, size: int) -> Iterator[int]:
    yield place
    for child in _children(place, size):
        yield from _below(child, size)


def _agreement(size: int) -> Any:
    began = ("3f1c6a0e9b7d4c52a8e0f6b1d2c3a495", "@trees/3f1c6a0e", "")
    made: Any = agree._Agreement(_Ranks(size), None, PlanOptions(), lambda layout: began)  # type: ignore[arg-type]
    made._last = None
    return made


def first_save(gathered: AllDescriptions, plan: SavePlan, groups: Sequence[bytes]) -> Coordinator:
    """Make the three rounds of a first save."""
    size = len(gathered.numbers)
    agreement, coordinator = _agreement(size), Coordinator(size)
    agreement._plan = plan
    digests = [description.digest for description in gathered.descriptions]
    hellos = [agree._Hello(digests[number], agree._NO_PLAN, 0).packed() for number in gathered.numbers.tolist()]
    request = coordinator.decide(hellos, agreement._answer_to_hellos)
    own = [gathered.descriptions[number] for number in gathered.numbers.tolist()]
    messages = [(own[rank].version, own[rank].packed) if rank in request.senders else None for rank in range(size)]
    coordinator.decide(messages, agreement._answer_to_descriptions)
    checks = [agree._PlanDigests(plan.digest, packed, {}) for packed in groups]
    began = coordinator.decide(checks, partial(agreement._answer_to_plans, gathered, agree._CompareAnswer()))
    assert isinstance(began, agree._BeginAnswer)
    return coordinator


def next_save(gathered: AllDescriptions, plan: SavePlan) -> tuple[Coordinator, int]:
    """Make the one round of a repeated save. Also return the size of the largest message of a rank."""
    size = len(gathered.numbers)
    agreement, coordinator = _agreement(size), Coordinator(size)
    digests = [description.digest for description in gathered.descriptions]
    agreement._last = agree._KeptPlan(b"the plan", digests[0], PlanOptions(), plan, plan.rank_plan(0), {}, {})
    # Random numbers whose sum is 0, like the digests of equal replicas.
    balances = [int.from_bytes(blake2b(b"%d" % rank, digest_size=8).digest(), "little") for rank in range(size - 1)]
    balances = [balance % agree._PRIME for balance in balances]
    balances.append(-sum(balances) % agree._PRIME)
    rows = zip(gathered.numbers.tolist(), balances, strict=True)
    hellos = [agree._Hello(digests[number], b"the plan", balance).packed() for number, balance in rows]
    began = coordinator.decide(hellos, agreement._answer_to_hellos)
    assert isinstance(began, agree._BeginAnswer)
    return coordinator, max(len(encode(hello)) for hello in hellos)


def group_digests_of(state: GlobalState) -> list[bytes]:
    """Return each rank's message about its replicas: the name and a digest of each group of ranks with equal boxes."""
    found: list[dict[bytes, None]] = [{} for _ in range(state.world_size)]
    for ranks in {ranks.tobytes(): ranks for ranks in state.compared.values()}.values():
        _add(found, ranks)
    for holders in {id(tensor.holders): tensor.holders for tensor in state.tensors.values()}.values():
        for number in range(len(holders.boxes) if not holders.are_single else 0):
            _add(found, holders.ranks_of(number))
    return [b"".join(name + bytes(8) for name in names) for names in found]


def _add(found: list[dict[bytes, None]], ranks: Numbers) -> None:
    if len(ranks) > 1:
        name = agree._group_name(ranks.tobytes())
        for rank in ranks.tolist():
            found[rank][name] = None


# -- the tables

PLANNING = [
    "model",
    "layout",
    "ranks",
    "entries",
    "descriptions",
    "to the coordinator, KB",
    "coordinator, s",
    "plan, s",
    "plan, MB",
    "again: bytes of a rank",
    "again, s",
]
RESULT = [
    "model",
    "layout",
    "ranks",
    "GB",
    "objects",
    "requests",
    "requests at 3,500/s, s",
    "requests, $",
    "max/mean written",
    "moved between ranks",
    "between hosts of 8",
    "connections of a rank: mean",
    "most",
    "of a host: most",
]
LOADS = ["model", "layout", "ranks", "plan, s", "plan, MB", "gets", "gets at 5,500/s, s"]


def measure(case: Case, options: PlanOptions, quick: bool) -> tuple[list[str], list[str], list[str]]:
    """Return a row of each table."""
    gathered = case.descriptions()
    state = gather_state(gathered)
    plan = plan_save(state, options)
    first = first_save(gathered, plan, group_digests_of(state))
    again, nbytes = next_save(gathered, plan)
    works = [] if quick else measure_ranks(gathered, options)
    name = [case.model, case.layout, f"{case.ranks:,}"]
    entries = len({entry.path for description in gathered.descriptions for entry in description.entries})
    planning = [*name, f"{entries:,}", str(len(gathered.descriptions)), f"{first.received / 1e3:,.0f}"]
    planning += [f"{first.seconds:.2f}", f"{max((work.seconds for work in works), default=0):.2f}"]
    planning += [f"{max((work.megabytes for work in works), default=0):.0f}", str(nbytes), f"{again.seconds:.2f}"]
    load, gets = (Work(0, 0), 0) if quick or case.layout == "per-rank" else measure_load(gathered, plan)
    loads = [*name, f"{load.seconds:.2f}", f"{load.megabytes:.0f}", f"{gets:,}", f"{gets / 5500:.1f}"]
    return planning, [*name, *results(plan)], loads


def results(plan: SavePlan) -> list[str]:
    """Return the cells of a plan: bytes, objects, costs, balance, connections."""
    report, ranks, chunk_owners = report_of(plan), plan.layout.world_size, plan.chunk_owners
    found = [f"{report.nbytes / 1e9:,.0f}", f"{report.objects:,}", f"{report.requests:,}"]
    found += [f"{report.requests / 3500:.1f}", f"{report.requests * 0.005 / 1000:.3f}"]
    found += [f"{report.largest_rank_bytes * ranks / report.nbytes:.3f}"]
    moved = (moved_bytes(chunk_owners), moved_bytes(chunk_owners, np.arange(ranks) // HOST))
    found += [f"{100 * nbytes / report.nbytes:.1f} %" for nbytes in moved]
    between = peers(chunk_owners)
    for rank in range(1, ranks):
        between[rank, (rank - 1) // FANOUT] = between[(rank - 1) // FANOUT, rank] = True
    connections = between.sum(axis=1)
    hosts = np.add.reduceat(connections, np.arange(0, len(connections), HOST))
    return [*found, f"{connections.mean():,.0f}", f"{connections.max():,}", f"{hosts.max():,}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--models", nargs="+", default=["2214"], choices=list(MODELS))
    parser.add_argument("--layouts", nargs="+", default=["fsdp-tp"], choices=LAYOUTS)
    parser.add_argument("--ranks", nargs="+", type=int, default=[8, 64, 512, 1024, 4096, 10240])
    parser.add_argument("--quick", action="store_true", help="do not measure the work of a rank")
    args = parser.parse_args()
    cases = [Case(*case) for case in itertools.product(args.models, args.layouts, args.ranks)]
    options = PlanOptions()
    rows = []
    for case in cases:
        rows.append(measure(case, options, args.quick))
        print(f"{case.model} {case.layout} {case.ranks}", file=sys.stderr, flush=True)
    for heads, table in zip((PLANNING, RESULT, LOADS), zip(*rows, strict=True), strict=True):
        print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
        print("".join(f"| {' | '.join(row)} |\n" for row in table))


if __name__ == "__main__":
    main()
