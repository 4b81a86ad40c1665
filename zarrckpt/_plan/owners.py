"""Choose the rank that writes each chunk, and the pieces that move to it, with integers only and equally on all ranks.

Every chunk has one owner: of the ranks that hold most of the chunk, the one with the fewest bytes to write. So the
chunks of a replicated tensor are distributed over its holders. A rank that holds no piece of a chunk can own it if
pieces move for every choice of owner and the chunk would raise each of these ranks above the load limit. Every rank
computes the owners of all chunks, then its own plan. So results are computed once per *kind*: all tensors with the same
grid and the same holders.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from zarrckpt._format.grid import Grid
from zarrckpt._plan.geometry import Geometry, Holders, Numbers, sum_by_number

BUNDLE_BYTES = 8 << 20
"""Approximate size of a bundle of pieces that move together. A message costs as much time as about 100 KB."""


_LOAD_MARGIN = 16
"""The load limit of a rank is the mean of all ranks plus 1/16."""

_SMALL_CHUNK_SHARE = 64
"""A chunk is small if it is below 1/64 of the mean bytes per rank. It costs requests rather than bytes."""


@dataclass(frozen=True)
class PlannedTensor:
    """One tensor of the plan: its grid, its holders and the bytes of an element."""

    name: str
    grid: Grid
    itemsize: int
    holders: Holders
    whole: bool = False
    """Whether one rank must write the whole tensor.

    One rank must write it if its replicas may differ, because chunks from several ranks would mix their contents.
    """


@dataclass(frozen=True)
class TensorKind:
    """Tensors with one geometry and one element size."""

    geometry: Geometry
    tensors: Numbers
    """Numbers of the tensors, ascending."""
    nbytes: Numbers
    """The size of each chunk in bytes."""
    whole: bool
    chunks: Numbers
    """The number of each chunk in the whole save: one row per tensor, one column per chunk of the kind."""


class ChunkOwners:
    """All chunks of a save and their owners, ordered by tensor, then by chunk of its geometry."""

    def __init__(self, tensors: Iterable[PlannedTensor], world_size: int) -> None:
        self.tensors = list(tensors)
        self.world_size = world_size
        known: dict[tuple[Grid, Holders], Geometry] = {}
        alike: dict[tuple[Geometry, int, bool], list[int]] = {}
        self.geometries: list[Geometry] = []
        for number, tensor in enumerate(self.tensors):
            key = (tensor.grid, tensor.holders)
            if key not in known:
                known[key] = Geometry.of(tensor.grid, tensor.holders)
            self.geometries.append(known[key])
            alike.setdefault((known[key], tensor.itemsize, tensor.whole), []).append(number)
        counts = [len(geometry.pieces) for geometry in self.geometries]
        self.first: Numbers = np.cumsum([0, *counts], dtype=np.int64)
        """The index at which the chunks of each tensor begin, and the end."""
        self.owner: Numbers = np.full(int(self.first[-1]), -1)
        """The rank that writes each chunk."""
        self.kinds = [self._kind(np.array(numbers, np.int64)) for numbers in alike.values()]
        self.nbytes: Numbers = np.zeros(len(self.owner), np.int64)
        for kind in self.kinds:
            self.nbytes[kind.chunks] = kind.nbytes

    def _kind(self, tensors: Numbers) -> TensorKind:
        number = int(tensors[0])
        geometry, tensor = self.geometries[number], self.tensors[number]
        chunks = self.first[tensors][:, None] + np.arange(len(geometry.pieces))
        return TensorKind(geometry, tensors, geometry.pieces.elements * tensor.itemsize, tensor.whole, chunks)

    @cached_property
    def bundle(self) -> Numbers:
        """The number of the bundle in which the pieces of a chunk move, or -1 if its owner holds them all.

        Bundles are in the order of the chunks. Every rank sends and receives in this order, which excludes deadlocks.
        """
        moves = np.zeros(len(self.owner), np.bool_)
        for kind, chunk, moving in self.moving():
            moves[kind.chunks[:, chunk]] = moving
        found: Numbers = np.full(len(self.owner), -1)
        ends = np.cumsum(self.nbytes[moves])
        found[moves] = (ends - self.nbytes[moves]) // BUNDLE_BYTES
        return found

    def rank_bytes(self) -> list[int]:
        """Return the number of bytes that each rank writes."""
        written: list[int] = sum_by_number(self.owner, self.nbytes, self.world_size).tolist()
        return written

    def moving(self) -> Iterator[tuple[TensorKind, int, NDArray[np.bool_]]]:
        """Yield the chunks of each kind, with a mask of the tensors in which a piece of the chunk moves."""
        for kind in self.kinds:
            for chunk in range(len(kind.geometry.pieces)):
                yield kind, chunk, ~np.isin(self.owner[kind.chunks[:, chunk]], kind.geometry.whole_holders(chunk))


def choose_owners(tensors: Iterable[PlannedTensor], world_size: int) -> ChunkOwners:
    """Choose the owner of every chunk.

    Chunks with a single candidate come first. Other chunks follow, the largest first, and go to the candidate with the
    fewest bytes to write. Chunks at the same position in all tensors of a kind are assigned together. When all
    candidates have reached the load limit, chunks whose pieces move for every owner go to ranks below it. Small chunks
    go to the candidates in turn.
    """
    chunk_owners = ChunkOwners(tensors, world_size)
    loads = np.zeros(world_size, np.int64)
    choices: list[tuple[int, TensorKind, slice]] = []
    for kind in chunk_owners.kinds:
        fixed = kind.geometry.single_candidate >= 0
        owners = kind.geometry.single_candidate[fixed]
        chunk_owners.owner[kind.chunks[:, fixed]] = owners
        loads += sum_by_number(owners, kind.nbytes[fixed], world_size) * len(kind.tensors)
        undecided = np.flatnonzero(~fixed)
        if kind.whole and len(undecided):
            choices.append((int(kind.nbytes.sum()), kind, slice(0, len(kind.nbytes))))
            continue
        choices += [(int(kind.nbytes[chunk]), kind, slice(chunk, chunk + 1)) for chunk in undecided.tolist()]
    choices.sort(key=lambda choice: -choice[0])
    mean = int(chunk_owners.nbytes.sum()) // world_size
    limit = mean * (_LOAD_MARGIN + 1) // _LOAD_MARGIN
    for nbytes, kind, chunks in choices:
        candidates, count = kind.geometry.candidates[chunks.start].ranks, len(kind.tensors)
        free = candidates[loads[candidates] < limit]
        if len(free) and nbytes * -(-count // len(free)) * _SMALL_CHUNK_SHARE <= mean:
            chunk_owners.owner[kind.chunks[:, chunks]] = _in_turn(loads, free, nbytes, count)[:, None]
            continue
        moves = not kind.whole and kind.geometry.moves_anyway(chunks.start)
        owners = _least_loaded(loads, candidates, nbytes, count, limit if moves else None)
        if len(owners) < count:
            owners = np.append(owners, _below_limit(loads, nbytes, count - len(owners), limit))
        chunk_owners.owner[kind.chunks[:, chunks]] = owners[:, None]
    return chunk_owners


def _least_loaded(loads: Numbers, candidates: Numbers, nbytes: int, count: int, limit: int | None = None) -> Numbers:
    """Return owners of ``count`` chunks of one size, each time the least loaded candidate, and update the loads.

    With ``limit``, the result is shorter if all candidates would exceed this load.
    """
    if count < len(candidates):
        candidates = np.sort(candidates[np.argsort(loads[candidates], kind="stable")[:count]])
    heap = [(load, index) for index, load in enumerate(loads[candidates].tolist())]
    heapq.heapify(heap)
    indices: list[int] = []
    while len(indices) < count and (limit is None or heap[0][0] + nbytes <= limit):
        load, index = heap[0]
        indices.append(index)
        heapq.heapreplace(heap, (load + nbytes, index))
    owners: Numbers = candidates[np.array(indices, np.int64)]
    np.add.at(loads, owners, nbytes)
    return owners


def _in_turn(loads: Numbers, candidates: Numbers, nbytes: int, count: int) -> Numbers:
    """Return owners of ``count`` chunks of one size: the candidates in turn, least loaded first; update the loads."""
    order = np.argsort(loads[candidates], kind="stable")
    owners: Numbers = np.resize(candidates[order], count)
    np.add.at(loads, owners, nbytes)
    return owners


def _below_limit(loads: Numbers, nbytes: int, count: int, limit: int) -> Numbers:
    """Return owners of ``count`` chunks of one size among all ranks, least loaded first, and update the loads.

    Each rank takes as many chunks as fit, so that chunks with the same sources have few owners.
    """
    ranks = np.argsort(loads, kind="stable")[:count]
    fitting = np.maximum(limit - loads[ranks], 0) // nbytes
    owners: Numbers = np.repeat(ranks, fitting)[:count]
    np.add.at(loads, owners, nbytes)
    if len(owners) < count:
        rest = _least_loaded(loads, np.arange(len(loads)), nbytes, count - len(owners))
        owners = np.append(owners, rest)
    return owners


def schedule(needs: Iterable[tuple[Numbers, Numbers]], world_size: int, limit: int) -> list[int]:
    """Return the round of each transfer of an exchange, so that ranks stay within a memory limit.

    ``needs`` has the ranks of each transfer without repetition, and the bytes that each of them needs. In one round a
    rank needs at most ``limit`` bytes, or has a single transfer.
    """
    current, used = np.zeros(world_size, np.int64), np.zeros(world_size, np.int64)
    numbers = []
    for ranks, nbytes in needs:
        theirs = current[ranks]
        number = int(theirs.max(initial=0))
        taken = np.where(theirs == number, used[ranks], 0)
        total = taken + nbytes
        if ((total > limit) & (taken > 0)).any():
            number += 1
            total = total - taken
        current[ranks], used[ranks] = number, total
        numbers.append(number)
    return numbers
