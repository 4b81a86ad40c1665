"""Which subchunks several ranks need, which of them fetches each, and when it hands on what the others need."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from zarrckpt._format.chunk_codec import elements_of
from zarrckpt._format.chunk_layout import max_stored_subchunk_bytes, subchunk_bytes
from zarrckpt._format.documents import ArrayNode
from zarrckpt._format.grid import Box, Ints, intersect
from zarrckpt._plan.owners import BoxOnRanks, Numbers, RankNumbers, schedule
from zarrckpt._read.chunks import READ_BYTES, neighbours, subchunks_in

_LEAST_RUN_BYTES = 1 << 20
"""Where many ranks need the same, runs are shorter, so that all of them fetch in every round; but not below this."""


class SubchunkRun(NamedTuple):
    """Neighbouring subchunks of one chunk, by their numbers in it."""

    fqn: str
    chunk: Ints
    numbers: range


class SharedMessage(NamedTuple):
    """What goes from one rank to others in one round: for each run the elements that a box has of it."""

    ranks: RankNumbers
    """The ranks that receive it; for a receiver, the one that sends it. Messages between two ranks keep their order."""
    parts: list[tuple[SubchunkRun, Box]]


@dataclass
class ShareRound:
    """What one rank does in one round: what it fetches, what it sends to others of that, and what it receives."""

    reads: list[SubchunkRun] = field(default_factory=list)
    sends: list[SharedMessage] = field(default_factory=list)
    receives: list[SharedMessage] = field(default_factory=list)


Shares = Mapping[int, ShareRound]
"""One rank's rounds, by number."""


class _Wanted(NamedTuple):
    """A run of one geometry, which several ranks need."""

    chunk: Ints
    numbers: range
    held: tuple[BoxOnRanks, ...]
    """The boxes that they fill with it."""
    ranks: Numbers
    """The ranks that need it, ascending."""
    taken: Numbers
    """The bytes that each of them takes of it."""
    kept: Numbers
    """The bytes that each need not hand on, if it fetches the run: those of boxes that no other rank fills."""
    handed: int
    """The bytes of all boxes."""


def plan_shares(
    own: Iterable[int],
    nodes: Mapping[str, ArrayNode],
    wanted: Mapping[str, Sequence[BoxOnRanks]],
    world_size: int,
    limit: int,
) -> dict[int, Shares]:
    """Deal what several ranks want over all of them; return the parts of the ranks in ``own``. No I/O.

    ``wanted`` has the boxes that ranks are to fill, by fqn. In one round no rank holds more than ``limit`` bytes, or it
    holds one run. The parts of thousands of ranks would fill the memory, so a rank asks for its own.
    """
    # Sorted by ranks: what the same ranks need comes one after the other, so that they take part in the same rounds.
    rows = sorted(_shared_runs(nodes, wanted, limit), key=lambda row: row[2])
    loads = np.zeros(world_size, np.int64)
    needs: list[tuple[Numbers, Numbers]] = []
    readers = []
    for fqn, want, ranks in rows:
        stored = len(want.numbers) * max_stored_subchunk_bytes(nodes[fqn])
        place = int(loads[want.ranks].argmin())
        loads[ranks[place]] += stored
        need = want.taken.copy()
        need[place] = stored + want.handed - want.kept[place]
        needs.append((want.ranks, need))
        readers.append(ranks[place])
    shares: dict[int, dict[int, ShareRound]] = {rank: {} for rank in own}
    messages: dict[tuple[int, int, RankNumbers], SharedMessage] = {}
    for (fqn, want, needing), reader, number in zip(rows, readers, schedule(needs, world_size, limit), strict=True):
        if shares.keys().isdisjoint(needing):
            continue
        run = SubchunkRun(fqn, want.chunk, want.numbers)
        if reader in shares:
            shares[reader].setdefault(number, ShareRound()).reads.append(run)
        for box, ranks in want.held:
            receivers = tuple(rank for rank in ranks if rank != reader)
            theirs = [rank for rank in receivers if rank in shares]
            if not theirs and not (receivers and reader in shares):
                continue
            message = messages.get((number, reader, receivers))
            if message is None:
                message = messages[number, reader, receivers] = SharedMessage(receivers, [])
                if reader in shares:
                    shares[reader][number].sends.append(message)
                for rank in theirs:
                    received = SharedMessage((reader,), message.parts)
                    shares[rank].setdefault(number, ShareRound()).receives.append(received)
            message.parts.append((run, box))
    return {rank: dict(sorted(rounds.items())) for rank, rounds in shares.items()}


def _shared_runs(
    nodes: Mapping[str, ArrayNode], wanted: Mapping[str, Sequence[BoxOnRanks]], limit: int
) -> Iterator[tuple[str, _Wanted, RankNumbers]]:
    """Runs that more than one rank needs, and these ranks, ascending."""
    # Layers are alike, and an optimizer's moments: what holds for one tensor holds for all with its grid and boxes.
    known: dict[object, list[tuple[_Wanted, RankNumbers]]] = {}
    alike = _numbers_of(wanted.values())
    for fqn, held in wanted.items():
        node = nodes[fqn]
        key = (node.grid, node.dtype.itemsize, node.compression, alike[id(held)])
        if key not in known:
            known[key] = list(_runs_of(node, held, limit))
        for want, ranks in known[key]:
            yield fqn, want, ranks


def _numbers_of(lists: Iterable[Sequence[BoxOnRanks]]) -> dict[int, int]:
    """A number for each list, by its identity: the same for equal lists."""
    numbers: dict[tuple[BoxOnRanks, ...], int] = {}
    return {key: numbers.setdefault(tuple(held), len(numbers)) for key, held in {id(one): one for one in lists}.items()}


def _runs_of(node: ArrayNode, held: Sequence[BoxOnRanks], limit: int) -> Iterator[tuple[_Wanted, RankNumbers]]:
    in_chunk: dict[Ints, list[BoxOnRanks]] = {}
    for want in held:
        for chunk in node.grid.chunks_of(want.box):
            in_chunk.setdefault(chunk, []).append(want)
    for chunk, wants in in_chunk.items():
        needing: dict[int, list[int]] = {}
        for place, want in enumerate(wants):
            for number in subchunks_in(node.grid, chunk, want.box):
                needing.setdefault(number, []).append(place)
        alike: dict[tuple[int, ...], list[int]] = {}
        for number in sorted(needing):
            alike.setdefault(tuple(needing[number]), []).append(number)
        for places, numbers in alike.items():
            theirs = tuple(wants[place] for place in places)
            ranks = tuple(sorted({rank for want in theirs for rank in want.ranks}))
            if len(ranks) == 1:
                continue
            longest = min(READ_BYTES, limit, max(_LEAST_RUN_BYTES, limit // len(ranks)))
            for run in neighbours(numbers, max(1, longest // subchunk_bytes(node))):
                yield _wanted(node, chunk, run, theirs, np.array(ranks, np.int64)), ranks


def _wanted(node: ArrayNode, chunk: Ints, run: range, theirs: tuple[BoxOnRanks, ...], ranks: Numbers) -> _Wanted:
    taken, kept, handed = np.zeros(len(ranks), np.int64), np.zeros(len(ranks), np.int64), 0
    for want in theirs:
        nbytes = handed_bytes(node, chunk, run, want.box)
        places = np.searchsorted(ranks, want.ranks)
        taken[places] += nbytes
        handed += nbytes
        if len(want.ranks) == 1:
            kept[places] += nbytes
    return _Wanted(chunk, run, theirs, ranks, taken, kept, handed)


def handed_bytes(node: ArrayNode, chunk: Ints, numbers: Iterable[int], box: Box) -> int:
    """The bytes that a box has of some subchunks."""
    shared = (intersect(elements_of(node, chunk, number), box) for number in numbers)
    return sum(0 if part is None else part.size for part in shared) * node.dtype.itemsize


def wanted_boxes(targets: Sequence[Iterable[tuple[str, Box]]]) -> dict[str, list[BoxOnRanks]]:
    """Who wants which box, by fqn, from each rank's targets."""
    ranks_of: dict[str, dict[Box, list[int]]] = {}
    for rank, own in enumerate(targets):
        for fqn, box in own:
            ranks = ranks_of.setdefault(fqn, {}).setdefault(box, [])
            if box.size and ranks[-1:] != [rank]:
                ranks.append(rank)
    return {
        fqn: [BoxOnRanks(box, tuple(ranks)) for box, ranks in boxes.items() if ranks] for fqn, boxes in ranks_of.items()
    }
