"""Choose the rank that writes each chunk, and the pieces that move to it, with integers only and equally on all ranks.

Every chunk has one owner: of the ranks that hold most of the chunk, the one with the fewest bytes to write. So the
chunks of a replicated tensor are distributed over its holders. A rank that holds nothing of a chunk can own it if
pieces of the chunk must move anyway and the holders have enough to write. Every rank computes the owners of all chunks,
then its own plan. So results are computed once per *kind*: all tensors with the same grid and the same holders.

A large model on many ranks has millions of pieces, so classes hold them in columns: each attribute is an array.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from zarrckpt._format.grid import Box, Grid, Ints

RankNumbers = tuple[int, ...]
Numbers = NDArray[np.int64]

BUNDLE_BYTES = 8 << 20
"""Approximate size of a bundle of pieces that move together. A message costs as much time as about 100 KB."""


_SLACK = 16
"""A rank has enough to write if it exceeds the mean of all ranks by 1/16."""

_LITTLE = 64
"""A chunk is small if it is below 1/64 of the mean bytes per rank. It costs requests rather than bytes."""


class BoxOnRanks(NamedTuple):
    """A box of a tensor, and the ranks that hold it."""

    box: Box
    ranks: RankNumbers


class Holders:
    """The boxes of one tensor or of many equally sharded ones, and the ranks that hold each box, in columns."""

    def __init__(self, held: Iterable[BoxOnRanks]) -> None:
        rows = [(box, ranks) for box, ranks in held]
        self.boxes = tuple(box for box, _ in rows)
        self.first: Numbers = np.cumsum([0, *(len(ranks) for _, ranks in rows)], dtype=np.int64)
        """The index in ``ranks`` at which each box begins, and the end."""
        self.ranks: Numbers = np.array([rank for _, ranks in rows for rank in ranks], np.int64)

    def ranks_of(self, number: int) -> Numbers:
        """Return the ranks that hold a box."""
        return self.ranks[self.first[number] : self.first[number + 1]]

    def boxes_of(self, rank: int) -> Numbers:
        """Return the numbers of the boxes that a rank holds."""
        found: Numbers = np.searchsorted(self.first, np.flatnonzero(self.ranks == rank), side="right") - 1
        return found

    @cached_property
    def alone(self) -> bool:
        """Whether exactly one rank holds each box."""
        return len(self.ranks) == len(self.boxes)


@dataclass(frozen=True)
class Spread:
    """One tensor of the plan: its grid, its holders and the bytes of an element."""

    name: str
    grid: Grid
    itemsize: int
    held: Holders
    whole: bool = False
    """Whether one rank must write the whole tensor. Replicas may differ, and no rank had a mixture of them."""


class ChunkPieces:
    """The chunks of a grid in the order in which the boxes touch them, and the pieces of each chunk."""

    def __init__(self, grid: Grid, boxes: Sequence[Box]) -> None:
        ndim = len(grid.shape)
        offset = np.array([box.offset for box in boxes], np.int64).reshape(len(boxes), ndim)
        end = offset + np.array([box.shape for box in boxes], np.int64).reshape(len(boxes), ndim)
        step = np.array(grid.chunk_shape, np.int64)
        low, extents = offset // step, -(-end // step) - offset // step
        extents[(end == offset).any(axis=1)] = 0
        counts = extents.prod(axis=1)
        held = np.repeat(np.arange(len(boxes)), counts)
        cells = low[held] + _unravel(_within(counts), extents[held])
        numbers = _ravel(cells, grid.counts)
        chunks, chunk = by_appearance(numbers)
        self.number: Numbers = numbers[chunks]
        """The number of each chunk in the grid, in C order."""
        order = np.argsort(chunk, kind="stable")
        self.chunk: Numbers = chunk[order]
        """The chunk of each piece, as an index into ``number``."""
        self.first: Numbers = np.searchsorted(self.chunk, np.arange(len(chunks) + 1))
        """The index at which the pieces of each chunk begin, and the end."""
        held, cells = held[order], cells[order]
        self.held: Numbers = held
        """The number of each piece's box."""
        self.offset: Numbers = np.maximum(cells * step, offset[held])
        self.shape: Numbers = np.minimum((cells + 1) * step, end[held]) - self.offset
        self.size: Numbers = self.shape.prod(axis=1)
        """The number of elements of each piece."""

    def __len__(self) -> int:
        """Return the number of chunks."""
        return len(self.number)

    @cached_property
    def elements(self) -> Numbers:
        """The number of elements of each chunk that the pieces hold."""
        return _sums(self.chunk, self.size, len(self))

    @cached_property
    def single(self) -> bool:
        """Whether every chunk has exactly one piece."""
        return len(self.held) == len(self)


def _within(counts: Numbers) -> Numbers:
    """0, 1, ... for each of the counts."""
    begins = np.cumsum(counts) - counts
    return np.arange(counts.sum()) - np.repeat(begins, counts)


def _unravel(numbers: Numbers, extents: Numbers) -> Numbers:
    """Return the cells with these numbers in C order. Each number has its own grid, one row of ``extents``."""
    out = np.empty_like(extents)
    for dim in reversed(range(extents.shape[1])):
        out[:, dim] = numbers % extents[:, dim]
        numbers = numbers // extents[:, dim]
    return out


def _ravel(cells: Numbers, counts: Ints) -> Numbers:
    out = np.zeros(len(cells), np.int64)
    for dim, n in enumerate(counts):
        out = out * n + cells[:, dim]
    return out


def by_appearance(numbers: Numbers) -> tuple[Numbers, Numbers]:
    """Return the index of the first appearance of each distinct number, in order, and each number's rank in it."""
    _, appears, group = np.unique(numbers, return_index=True, return_inverse=True)
    place = np.empty(len(appears), np.int64)
    place[np.argsort(appears)] = np.arange(len(appears))
    return np.sort(appears), place[group.reshape(-1)]


def _sums(numbers: Numbers, values: Numbers, length: int) -> Numbers:
    """Return the sum of the values of each number. It is exact below 2**53."""
    return np.bincount(numbers, values, minlength=length).astype(np.int64)


class Candidates(NamedTuple):
    """The ranks that may own a chunk: those that hold at least half as much of it as any rank does."""

    ranks: Numbers
    held: Numbers
    """The number of elements of the chunk that each of them holds."""


@dataclass(frozen=True, eq=False)
class Geometry:
    """The chunks, pieces and candidate owners that all tensors with one grid and one set of holders share."""

    pieces: ChunkPieces
    held: Holders
    candidates: Sequence[Candidates]
    """The candidates of each chunk."""
    only: Numbers
    """The single candidate of each chunk, or -1 if there are several."""

    @classmethod
    def of(cls, grid: Grid, held: Holders) -> Geometry:
        """Return the geometry of a grid and its holders."""
        pieces = ChunkPieces(grid, held.boxes)
        candidates = [_candidates(pieces, held, number) for number in range(len(pieces))]
        only = np.array([ranks[0] if len(ranks) == 1 else -1 for ranks, _ in candidates], np.int64)
        return cls(pieces, held, candidates, only)

    def parts_of(self, chunk: int) -> range:
        """Return the numbers of a chunk's pieces."""
        return range(int(self.pieces.first[chunk]), int(self.pieces.first[chunk + 1]))

    def source(self, tensor: int, piece: int, owner: int) -> int:
        """Return the rank that supplies a piece: the chunk's owner if it holds the piece, otherwise holders in turn."""
        ranks = self.held.ranks_of(int(self.pieces.held[piece]))
        if len(ranks) == 1 or (ranks != owner).all():
            return int(ranks[(tensor + piece) % len(ranks)])
        return owner

    def sources(self, tensors: Numbers, chunk: int, owners: Numbers) -> Numbers:
        """Return the sources of all pieces of a chunk in these tensors with these owners, one row per tensor."""
        parts = self.parts_of(chunk)
        boxes = self.pieces.held[parts.start : parts.stop]
        first = self.held.first[boxes]
        turn = (tensors[:, None] + np.arange(parts.start, parts.stop)) % (self.held.first[boxes + 1] - first)
        found: Numbers = self.held.ranks[first + turn]
        for owner in [] if self.held.alone else np.unique(owners).tolist():
            own = np.isin(boxes, self.held.boxes_of(owner))
            found[np.ix_(owners == owner, own)] = owner
        return found

    def with_all(self, chunk: int) -> Numbers:
        """Return the candidates that hold the whole chunk. If one of them owns it, no piece moves."""
        ranks, held = self.candidates[chunk]
        found: Numbers = ranks[held == self.pieces.elements[chunk]]
        return found

    def moves_anyway(self, chunk: int) -> bool:
        """Whether no rank holds the whole chunk, so that a piece moves for every choice of the owner."""
        return not len(self.with_all(chunk))


def _candidates(pieces: ChunkPieces, held: Holders, chunk: int) -> Candidates:
    parts = range(pieces.first[chunk], pieces.first[chunk + 1])
    if len(parts) == 1:
        ranks = held.ranks_of(int(pieces.held[parts[0]]))
        return Candidates(ranks, np.broadcast_to(pieces.size[parts[0]], ranks.shape))
    boxes = pieces.held[parts.start : parts.stop]
    counts = held.first[boxes + 1] - held.first[boxes]
    holders = held.ranks[np.repeat(held.first[boxes], counts) + _within(counts)]
    ranks, group = np.unique(holders, return_inverse=True)
    sizes = _sums(group.reshape(-1), np.repeat(pieces.size[parts.start : parts.stop], counts), len(ranks))
    much = 2 * sizes >= sizes.max()
    return Candidates(ranks[much], sizes[much])


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

    def piece_bytes(self, chunk: int) -> Numbers:
        """Return the size in bytes of each piece of a chunk."""
        parts, pieces = self.geometry.parts_of(chunk), self.geometry.pieces
        itemsize = self.nbytes[chunk] // pieces.elements[chunk]
        found: Numbers = pieces.size[parts.start : parts.stop] * itemsize
        return found


class Moves(NamedTuple):
    """The pieces of one chunk in several tensors of a kind."""

    owners: Numbers
    """The owner of the chunk in each tensor."""
    sources: Numbers
    """One row per tensor, one column per piece. A piece whose source is the owner does not move."""
    nbytes: Numbers
    """The size of each piece in bytes."""


class Dealt:
    """All chunks of a save and their owners, ordered by tensor, then by chunk of its geometry."""

    def __init__(self, spreads: Iterable[Spread], world_size: int) -> None:
        self.spreads = list(spreads)
        self.world_size = world_size
        known: dict[tuple[Grid, Holders], Geometry] = {}
        alike: dict[tuple[Geometry, int, bool], list[int]] = {}
        self.geometries: list[Geometry] = []
        for number, spread in enumerate(self.spreads):
            key = (spread.grid, spread.held)
            if key not in known:
                known[key] = Geometry.of(spread.grid, spread.held)
            self.geometries.append(known[key])
            alike.setdefault((known[key], spread.itemsize, spread.whole), []).append(number)
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
        geometry, spread = self.geometries[number], self.spreads[number]
        chunks = self.first[tensors][:, None] + np.arange(len(geometry.pieces))
        return TensorKind(geometry, tensors, geometry.pieces.elements * spread.itemsize, spread.whole, chunks)

    @cached_property
    def bundle(self) -> Numbers:
        """The number of the bundle in which the pieces of a chunk move, or -1 if its owner holds them all.

        Bundles are in the order of the chunks. Every rank sends and receives in this order, which excludes deadlocks.
        """
        moves = np.zeros(len(self.owner), np.bool_)
        for kind, chunk, moving in self._moving():
            moves[kind.chunks[:, chunk]] = moving
        found: Numbers = np.full(len(self.owner), -1)
        ends = np.cumsum(self.nbytes[moves])
        found[moves] = (ends - self.nbytes[moves]) // BUNDLE_BYTES
        return found

    def rank_bytes(self) -> list[int]:
        """Return the number of bytes that each rank writes."""
        written: list[int] = _sums(self.owner, self.nbytes, self.world_size).tolist()
        return written

    def moves(self) -> Iterator[Moves]:
        """Yield the pieces of all chunks of which at least one piece moves."""
        for kind, chunk, moving in self._moving():
            if moving.any():
                owners = self.owner[kind.chunks[moving, chunk]]
                sources = kind.geometry.sources(kind.tensors[moving], chunk, owners)
                yield Moves(owners, sources, kind.piece_bytes(chunk))

    def _moving(self) -> Iterator[tuple[TensorKind, int, NDArray[np.bool_]]]:
        """Yield the chunks of each kind, with a mask of the tensors in which a piece of the chunk moves."""
        for kind in self.kinds:
            for chunk in range(len(kind.geometry.pieces)):
                yield kind, chunk, ~np.isin(self.owner[kind.chunks[:, chunk]], kind.geometry.with_all(chunk))

    def moved_bytes(self, hosts: Numbers | None = None) -> int:
        """Return the bytes that move between ranks, or between hosts if the host number of each rank is given."""
        places = np.arange(self.world_size) if hosts is None else hosts
        return sum(
            int(((places[sources] != places[owners][:, None]) * nbytes).sum())
            for owners, sources, nbytes in self.moves()
        )

    def peers(self) -> NDArray[np.bool_]:
        """Return a symmetric matrix over ranks: whether two ranks exchange pieces."""
        found = np.zeros((self.world_size, self.world_size), np.bool_)
        for owners, sources, _ in self.moves():
            found[sources, owners[:, None]] = True
        found |= found.T
        np.fill_diagonal(found, False)
        return found

    def merged(self) -> int:
        """Return the number of chunks with several pieces."""
        return sum(len(kind.tensors) * int((np.diff(kind.geometry.pieces.first) > 1).sum()) for kind in self.kinds)


def deal(spreads: Iterable[Spread], world_size: int) -> Dealt:
    """Choose the owner of every chunk.

    Chunks with a single candidate come first. Other chunks follow, the largest first, and go to the candidate with the
    fewest bytes to write. Chunks at the same position in all tensors of a kind are assigned together. When all
    candidates have enough to write, chunks whose pieces move anyway go to ranks that can take more. Small chunks go to
    the candidates in turn.
    """
    dealt = Dealt(spreads, world_size)
    loads = np.zeros(world_size, np.int64)
    choices: list[tuple[int, TensorKind, slice]] = []
    for kind in dealt.kinds:
        fixed = kind.geometry.only >= 0
        dealt.owner[kind.chunks[:, fixed]] = kind.geometry.only[fixed]
        loads += _sums(kind.geometry.only[fixed], kind.nbytes[fixed], world_size) * len(kind.tensors)
        open_ones = np.flatnonzero(~fixed)
        if kind.whole and len(open_ones):
            choices.append((int(kind.nbytes.sum()), kind, slice(0, len(kind.nbytes))))
            continue
        choices += [(int(kind.nbytes[chunk]), kind, slice(chunk, chunk + 1)) for chunk in open_ones.tolist()]
    choices.sort(key=lambda choice: -choice[0])
    mean = int(dealt.nbytes.sum()) // world_size
    enough = mean * (_SLACK + 1) // _SLACK
    for nbytes, kind, chunks in choices:
        candidates, count = kind.geometry.candidates[chunks.start].ranks, len(kind.tensors)
        free = candidates[loads[candidates] < enough]
        if len(free) and nbytes * -(-count // len(free)) * _LITTLE <= mean:
            dealt.owner[kind.chunks[:, chunks]] = _in_turn(loads, free, nbytes, count)[:, None]
            continue
        moves = not kind.whole and kind.geometry.moves_anyway(chunks.start)
        owners = _least_loaded(loads, candidates, nbytes, count, enough if moves else None)
        if len(owners) < count:
            owners = np.append(owners, _below_limit(loads, nbytes, count - len(owners), enough))
        dealt.owner[kind.chunks[:, chunks]] = owners[:, None]
    return dealt


def _least_loaded(loads: Numbers, candidates: Numbers, nbytes: int, count: int, enough: int | None = None) -> Numbers:
    """Return owners of ``count`` chunks of one size, each time the least loaded candidate, and update the loads.

    With ``enough``, the result is shorter if all candidates would exceed this load.
    """
    if count < len(candidates):
        candidates = np.sort(candidates[np.argsort(loads[candidates], kind="stable")[:count]])
    heap = [(load, place) for place, load in enumerate(loads[candidates].tolist())]
    heapq.heapify(heap)
    places: list[int] = []
    while len(places) < count and (enough is None or heap[0][0] + nbytes <= enough):
        load, place = heap[0]
        places.append(place)
        heapq.heapreplace(heap, (load + nbytes, place))
    owners: Numbers = candidates[np.array(places, np.int64)]
    np.add.at(loads, owners, nbytes)
    return owners


def _in_turn(loads: Numbers, candidates: Numbers, nbytes: int, count: int) -> Numbers:
    """Return owners of ``count`` chunks of one size: the candidates in turn, least loaded first; update the loads."""
    order = np.argsort(loads[candidates], kind="stable")
    owners: Numbers = np.resize(candidates[order], count)
    np.add.at(loads, owners, nbytes)
    return owners


def _below_limit(loads: Numbers, nbytes: int, count: int, enough: int) -> Numbers:
    """Return owners of ``count`` chunks of one size among all ranks, least loaded first, and update the loads.

    Each rank takes as many chunks as fit, so that chunks with the same sources have few owners.
    """
    ranks = np.argsort(loads, kind="stable")[:count]
    fitting = np.maximum(enough - loads[ranks], 0) // nbytes
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
