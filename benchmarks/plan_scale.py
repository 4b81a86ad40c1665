"""How the planning of a save grows with ranks and tensors: what the coordinator gets, and each rank's own part.

    python -m benchmarks.plan_scale                                     "2214" (see MODELS) on 8 to 10,240 ranks
    python -m benchmarks.plan_scale --models 70B 405B --ranks 10240     other models and worlds
    python -m benchmarks.plan_scale --layouts hsdp-tp pipeline          see LAYOUTS; the default is FSDP x TP
    python -m benchmarks.plan_scale --quick                             no processes for the ranks' own parts

No rank is started: descriptions are made here, as ranks make theirs, and messages are encoded as rounds send them. A
rank's own part (all that it does between two rounds: the whole plan, its digest, what is compared, its own piece of it)
is measured in a fresh process each, for the first, the middle and the last rank. Times are those of the processor, in
which other processes do not count. The last table is of loads on the mesh that saved, where ranks share their reads:
each rank computes which of them fetches what several need. Prints three tables.
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

# -- a rank's own part


class Part(NamedTuple):
    """What one rank's own part took."""

    seconds: float
    megabytes: float


def own_part(packed: Sequence[bytes], given: Any, rank: int) -> Part:
    """In a fresh process: from the descriptions as they came to what the rank is to do."""
    ranks = range(len(given))
    before = most_memory()
    began = time.process_time()
    gathered = AllDescriptions.from_packed(packed, given, ranks)
    held = gather_state(gathered)
    plan = plan_save(held, PlanOptions())
    held.replicas(rank)
    assert plan.digest and plan.rank_plan(rank)
    return Part(time.process_time() - began, most_memory() - before)


def most_memory() -> float:
    """The most memory that this process has had so far, in MB. (That of getrusage counts its parent's, too.)"""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024 / 1e6


def own_parts(gathered: AllDescriptions) -> list[Part]:
    """The first, the middle and the last rank's."""
    size = len(gathered.numbers)
    packed = [description.packed for description in gathered.descriptions]
    given = gathered.numbers.astype(np.min_scalar_type(len(packed)))
    found = []
    for rank in sorted({0, size // 2, size - 1}):
        with get_context("spawn").Pool(1) as pool:
            found.append(pool.apply(own_part, (packed, given, rank)))
    return found


def loads_part(packed: Sequence[bytes], given: Any, nodes: Mapping[str, ArrayNode], rank: int) -> tuple[Part, int]:
    """In a fresh process: what one rank computes in a load; and how many gets are of what several ranks need."""
    before = most_memory()
    began = time.process_time()
    gathered = AllDescriptions.from_packed(packed, given, range(len(given)))
    held, limit = gather_boxes(gathered), DEFAULT_MAX_INFLIGHT_BYTES // 4
    plan_shares((rank,), nodes, held, len(given), limit)
    part = Part(time.process_time() - began, most_memory() - before)
    return part, sum(1 for _ in _shared_ranges(nodes, held, limit))


def load_of(gathered: AllDescriptions, plan: SavePlan) -> tuple[Part, int]:
    """That of the middle rank, of a load of the tensors."""
    targets = [
        Description([entry for entry in description.entries if entry.kind == "tensor"], description.shardings)
        for description in gathered.descriptions
    ]
    packed = [description.packed for description in targets]
    with get_context("spawn").Pool(1) as pool:
        return pool.apply(loads_part, (packed, gathered.numbers, plan.layout.tensors, len(gathered.numbers) // 2))


# -- the coordinator


class _Ranks:
    """In place of rounds: who they are, and no more."""

    def __init__(self, size: int) -> None:
        self.rank, self.size, self.members = 0, size, tuple(range(size))


class Coordinator:
    """What reaches the coordinator, and what it does with that: its side of the rounds, with real messages."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.received = 0
        self.sent = 0
        self.seconds = 0.0
        self._round = 0

    def decide(self, results: Sequence[Any], decide: Any) -> Any:
        """One round: what all ranks say comes up the tree, and the answer goes down."""
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
    """All three rounds."""
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
    """The one round of a save of the same state; and the bytes of what a rank says."""
    size = len(gathered.numbers)
    agreement, coordinator = _agreement(size), Coordinator(size)
    digests = [description.digest for description in gathered.descriptions]
    agreement._last = agree._KeptPlan(b"the plan", digests[0], PlanOptions(), plan, plan.rank_plan(0), {}, {})
    # Random but for the last, as digests are; their sum is 0.
    balances = [int.from_bytes(blake2b(b"%d" % rank, digest_size=8).digest(), "little") for rank in range(size - 1)]
    balances = [balance % agree._PRIME for balance in balances]
    balances.append(-sum(balances) % agree._PRIME)
    rows = zip(gathered.numbers.tolist(), balances, strict=True)
    hellos = [agree._Hello(digests[number], b"the plan", balance).packed() for number, balance in rows]
    began = coordinator.decide(hellos, agreement._answer_to_hellos)
    assert isinstance(began, agree._BeginAnswer)
    return coordinator, max(len(encode(hello)) for hello in hellos)


def group_digests_of(held: GlobalState) -> list[bytes]:
    """What each rank says of what it holds alike with others: for each group its name, and a digest."""
    found: list[dict[bytes, None]] = [{} for _ in range(held.ranks)]
    for ranks in {ranks.tobytes(): ranks for ranks in held.compared.values()}.values():
        _add(found, ranks)
    for one in {id(tensor.holders): tensor.holders for tensor in held.tensors.values()}.values():
        for number in range(len(one.boxes) if not one.are_single else 0):
            _add(found, one.ranks_of(number))
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
    "its time, s",
    "a rank's own part, s",
    "MB",
    "again: bytes a rank",
    "the coordinator's time, s",
]
RESULT = [
    "model",
    "layout",
    "ranks",
    "GB",
    "objects",
    "puts",
    "puts at 3,500/s, s",
    "puts, $",
    "max/mean written",
    "moved",
    "between hosts",
    "connections of a rank, mean",
    "most",
    "of a host, most",
]
LOADS = ["model", "layout", "ranks", "a rank's own part, s", "MB", "gets of what ranks share", "at 5,500/s, s"]


def measure(case: Case, quick: bool) -> tuple[list[str], list[str], list[str]]:
    """A row of each table."""
    gathered = case.descriptions()
    held = gather_state(gathered)
    plan = plan_save(held, PlanOptions())
    first = first_save(gathered, plan, group_digests_of(held))
    again, nbytes = next_save(gathered, plan)
    parts = [] if quick else own_parts(gathered)
    name = [case.model, case.layout, f"{case.ranks:,}"]
    entries = len({entry.path for description in gathered.descriptions for entry in description.entries})
    planning = [*name, f"{entries:,}", str(len(gathered.descriptions)), f"{first.received / 1e3:,.0f}"]
    planning += [f"{first.seconds:.2f}", f"{max((part.seconds for part in parts), default=0):.2f}"]
    planning += [f"{max((part.megabytes for part in parts), default=0):.0f}", str(nbytes), f"{again.seconds:.2f}"]
    load, gets = (Part(0, 0), 0) if quick or case.layout == "per-rank" else load_of(gathered, plan)
    loads = [*name, f"{load.seconds:.2f}", f"{load.megabytes:.0f}", f"{gets:,}", f"{gets / 5500:.1f}"]
    return planning, [*name, *results(plan)], loads


def results(plan: SavePlan) -> list[str]:
    """What a plan comes to."""
    report = report_of(plan, range(plan.layout.world_size), HOST)
    found = [f"{report.nbytes / 1e9:,.0f}", f"{report.objects:,}", f"{report.puts:,}", f"{report.put_seconds():.1f}"]
    found += [f"{report.put_cost():.3f}", f"{report.balance:.3f}"]
    found += [f"{100 * moved / report.nbytes:.1f} %" for moved in (report.moved_bytes, report.host_bytes or 0)]
    connections = np.array(report.rank_connections)
    hosts = np.add.reduceat(connections, np.arange(0, len(connections), HOST))
    return [*found, f"{connections.mean():,.0f}", f"{connections.max():,}", f"{hosts.max():,}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--models", nargs="+", default=["2214"], choices=list(MODELS))
    parser.add_argument("--layouts", nargs="+", default=["fsdp-tp"], choices=LAYOUTS)
    parser.add_argument("--ranks", nargs="+", type=int, default=[8, 64, 512, 1024, 4096, 10240])
    parser.add_argument("--quick", action="store_true", help="do not measure the ranks' own parts")
    args = parser.parse_args()
    cases = [Case(*case) for case in itertools.product(args.models, args.layouts, args.ranks)]
    rows = []
    for case in cases:
        rows.append(measure(case, args.quick))
        print(f"{case.model} {case.layout} {case.ranks}", file=sys.stderr, flush=True)
    for heads, own in zip((PLANNING, RESULT, LOADS), zip(*rows, strict=True), strict=True):
        print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
        print("".join(f"| {' | '.join(row)} |\n" for row in own))


if __name__ == "__main__":
    main()
