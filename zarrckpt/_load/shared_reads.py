"""The plan by which ranks share reads: which rank fetches each subchunk, and when it sends it to other ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from zarrckpt._format.chunk_codec import elements_of
from zarrckpt._format.chunk_layout import max_stored_subchunk_bytes, subchunk_bytes
from zarrckpt._format.documents import ArrayNode
from zarrckpt._format.grid import Box, Ints, intersect
from zarrckpt._plan.geometry import BoxOnRanks, Numbers, RankNumbers
from zarrckpt._plan.owners import schedule
from zarrckpt._read.chunks import READ_BYTES, neighbours, subchunks_in

_MIN_RANGE_BYTES = 1 << 20
"""The minimum length of ranges. The more ranks need one, the shorter it is, so that all of them fetch in each round."""


class SubchunkRange(NamedTuple):
    """Consecutive subchunks of one chunk, by their numbers in it."""

    fqn: str
    chunk: Ints
    numbers: range


class SharedMessage(NamedTuple):
    """The elements that one rank sends to other ranks in one round: the overlaps of ranges and boxes."""

    ranks: RankNumbers
    """The receiving ranks. In a receiver's plan, the sending rank. Messages between two ranks keep their order."""
    parts: list[tuple[SubchunkRange, Box]]


@dataclass
class ShareRound:
    """The part of one rank in one round: the ranges that it fetches, and the messages that it sends and receives."""

    reads: list[SubchunkRange] = field(default_factory=list)
    sends: list[SharedMessage] = field(default_factory=list)
    receives: list[SharedMessage] = field(default_factory=list)


Shares = Mapping[int, ShareRound]
"""One rank's rounds, by number."""


class _NeededRange(NamedTuple):
    """A range that several ranks need. It is the same for all tensors with one grid and equal boxes."""

    chunk: Ints
    numbers: range
    boxes: tuple[BoxOnRanks, ...]
    """The boxes that overlap the range."""
    ranks: Numbers
    """The ranks that need the range, ascending."""
    needed_bytes: Numbers
    """The bytes of the range that each of these ranks needs."""
    unshared_bytes: Numbers
    """The bytes of boxes that only this rank fills. If it fetches the range, it sends these to no rank."""
    total_bytes: int
    """The bytes of all boxes' overlaps."""


def plan_shares(
    own: Iterable[int],
    nodes: Mapping[str, ArrayNode],
    boxes: Mapping[str, Sequence[BoxOnRanks]],
    world_size: int,
    limit: int,
) -> dict[int, Shares]:
    """Distribute the reads that several ranks need, and return the parts of the ranks in ``own``. No I/O.

    ``boxes`` has the boxes that ranks are to fill, by fqn. In one round a rank needs at most ``limit`` bytes of memory,
    or has a single range. Each rank asks only for its own part, because the parts of thousands of ranks would need too
    much memory.
    """
    # Sorted by ranks, so that ranges that the same ranks need are in the same rounds.
    rows = sorted(_shared_ranges(nodes, boxes, limit), key=lambda row: row[2])
    loads = np.zeros(world_size, np.int64)
    needs: list[tuple[Numbers, Numbers]] = []
    readers = []
    for fqn, needed, ranks in rows:
        stored = len(needed.numbers) * max_stored_subchunk_bytes(nodes[fqn])
        index = int(loads[needed.ranks].argmin())
        loads[ranks[index]] += stored
        need = needed.needed_bytes.copy()
        need[index] = stored + needed.total_bytes - needed.unshared_bytes[index]
        needs.append((needed.ranks, need))
        readers.append(ranks[index])
    shares: dict[int, dict[int, ShareRound]] = {rank: {} for rank in own}
    messages: dict[tuple[int, int, RankNumbers], SharedMessage] = {}
    for (fqn, needed, needing), reader, number in zip(rows, readers, schedule(needs, world_size, limit), strict=True):
        if shares.keys().isdisjoint(needing):
            continue
        subchunks = SubchunkRange(fqn, needed.chunk, needed.numbers)
        if reader in shares:
            shares[reader].setdefault(number, ShareRound()).reads.append(subchunks)
        for box, ranks in needed.boxes:
            receivers = tuple(rank for rank in ranks if rank != reader)
            own_receivers = [rank for rank in receivers if rank in shares]
            if not own_receivers and not (receivers and reader in shares):
                continue
            message = messages.get((number, reader, receivers))
            if message is None:
                message = messages[number, reader, receivers] = SharedMessage(receivers, [])
                if reader in shares:
                    shares[reader][number].sends.append(message)
                for rank in own_receivers:
                    received = SharedMessage((reader,), message.parts)
                    shares[rank].setdefault(number, ShareRound()).receives.append(received)
            message.parts.append((subchunks, box))
    return {rank: dict(sorted(rounds.items())) for rank, rounds in shares.items()}


def _shared_ranges(
    nodes: Mapping[str, ArrayNode], boxes: Mapping[str, Sequence[BoxOnRanks]], limit: int
) -> Iterator[tuple[str, _NeededRange, RankNumbers]]:
    """Yield the ranges that more than one rank needs, with these ranks in ascending order."""
    # Many tensors (layers, moments of an optimizer) have the same grid and boxes, so the ranges are computed once.
    known: dict[object, list[tuple[_NeededRange, RankNumbers]]] = {}
    numbers = _numbers_of(boxes.values())
    for fqn, own in boxes.items():
        node = nodes[fqn]
        key = (node.grid, node.dtype.itemsize, node.compression, numbers[id(own)])
        if key not in known:
            known[key] = list(_ranges_in(node, own, limit))
        for needed, ranks in known[key]:
            yield fqn, needed, ranks


def _numbers_of(lists: Iterable[Sequence[BoxOnRanks]]) -> dict[int, int]:
    """Return a number for each list, by its ``id()``. Equal lists get the same number."""
    numbers: dict[tuple[BoxOnRanks, ...], int] = {}
    return {
        key: numbers.setdefault(tuple(boxes), len(numbers)) for key, boxes in {id(one): one for one in lists}.items()
    }


def _ranges_in(node: ArrayNode, boxes: Sequence[BoxOnRanks], limit: int) -> Iterator[tuple[_NeededRange, RankNumbers]]:
    in_chunk: dict[Ints, list[BoxOnRanks]] = {}
    for row in boxes:
        for chunk in node.grid.chunks_of(row.box):
            in_chunk.setdefault(chunk, []).append(row)
    for chunk, rows in in_chunk.items():
        needing: dict[int, list[int]] = {}
        for index, row in enumerate(rows):
            for number in subchunks_in(node.grid, chunk, row.box):
                needing.setdefault(number, []).append(index)
        by_need: dict[tuple[int, ...], list[int]] = {}
        for number in sorted(needing):
            by_need.setdefault(tuple(needing[number]), []).append(number)
        for indices, numbers in by_need.items():
            overlapping = tuple(rows[index] for index in indices)
            ranks = tuple(sorted({rank for row in overlapping for rank in row.ranks}))
            if len(ranks) == 1:
                continue
            longest = min(READ_BYTES, limit, max(_MIN_RANGE_BYTES, limit // len(ranks)))
            for found in neighbours(numbers, max(1, longest // subchunk_bytes(node))):
                yield _needed_range(node, chunk, found, overlapping, np.array(ranks, np.int64)), ranks


def _needed_range(
    node: ArrayNode, chunk: Ints, numbers: range, boxes: tuple[BoxOnRanks, ...], ranks: Numbers
) -> _NeededRange:
    needed, unshared, total = np.zeros(len(ranks), np.int64), np.zeros(len(ranks), np.int64), 0
    for row in boxes:
        nbytes = overlap_bytes(node, chunk, numbers, row.box)
        indices = np.searchsorted(ranks, row.ranks)
        needed[indices] += nbytes
        total += nbytes
        if len(row.ranks) == 1:
            unshared[indices] += nbytes
    return _NeededRange(chunk, numbers, boxes, ranks, needed, unshared, total)


def overlap_bytes(node: ArrayNode, chunk: Ints, numbers: Iterable[int], box: Box) -> int:
    """Return the bytes of a box that lie in these subchunks of a chunk."""
    shared = (intersect(elements_of(node, chunk, number), box) for number in numbers)
    return sum(0 if part is None else part.size for part in shared) * node.dtype.itemsize


def boxes_of_ranks(targets: Sequence[Iterable[tuple[str, Box]]]) -> dict[str, list[BoxOnRanks]]:
    """Return the boxes to fill by fqn, each with the ranks that fill it. ``targets`` has each rank's boxes."""
    ranks_of: dict[str, dict[Box, list[int]]] = {}
    for rank, own in enumerate(targets):
        for fqn, box in own:
            ranks = ranks_of.setdefault(fqn, {}).setdefault(box, [])
            if box.size and ranks[-1:] != [rank]:
                ranks.append(rank)
    return {
        fqn: [BoxOnRanks(box, tuple(ranks)) for box, ranks in boxes.items() if ranks] for fqn, boxes in ranks_of.items()
    }
