"""Which rank writes each chunk, and which pieces move to it: integers only, the same on every rank.

Every chunk has one owner. It is a rank that holds much of the chunk, and among those one with little to write so far;
so what several ranks hold alike is dealt over them by chunks. A rank that holds nothing of a chunk may own it where its
pieces move anyway, and those that hold much have enough to write. Every rank computes all owners, and then its own
part. So what holds for one tensor is computed once for its *kind*: all tensors of one grid that are held alike.

A large model on many ranks has millions of pieces. So they are columns: an object's attributes are arrays.
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
"""Small chunks whose pieces move do so together, up to about so many bytes: a message costs as much as 100 KB."""


_SLACK = 16
"""A rank has enough to write where it has the mean of all and a 16th more."""

_LITTLE = 64
"""Chunks are little where a 64th of what a rank writes in the mean is more: what they cost is requests, not bytes."""


class BoxOnRanks(NamedTuple):
    """A box of a tensor, and the ranks that hold it."""

    box: Box
    ranks: RankNumbers


class Holders:
    """The boxes of a tensor, or of many tensors alike, and the ranks that hold each (one at least), in columns."""

    def __init__(self, held: Iterable[BoxOnRanks]) -> None:
        rows = [(box, ranks) for box, ranks in held]
        self.boxes = tuple(box for box, _ in rows)
        self.first: Numbers = np.cumsum([0, *(len(ranks) for _, ranks in rows)], dtype=np.int64)
        """Where the ranks of each box begin; one more than there are boxes."""
        self.ranks: Numbers = np.array([rank for _, ranks in rows for rank in ranks], np.int64)

    def ranks_of(self, number: int) -> Numbers:
        """The ranks that hold a box."""
        return self.ranks[self.first[number] : self.first[number + 1]]

    def boxes_of(self, rank: int) -> Numbers:
        """The numbers of the boxes that a rank holds."""
        found: Numbers = np.searchsorted(self.first, np.flatnonzero(self.ranks == rank), side="right") - 1
        return found

    @cached_property
    def alone(self) -> bool:
        """Whether each box is held by one rank."""
        return len(self.ranks) == len(self.boxes)


@dataclass(frozen=True)
class Spread:
    """One tensor over the ranks: its grid, the boxes held of it, the bytes of an element."""

    name: str
    grid: Grid
    itemsize: int
    held: Holders
    whole: bool = False
    """Whether one rank must write all of it: its replicas may differ, and a mixture of them is what no rank had."""


class ChunkPieces:
    """The chunks of a grid, in the order in which the boxes touch them, and what each box has of each chunk."""

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
        """The place of each chunk in the grid, in C order."""
        order = np.argsort(chunk, kind="stable")
        self.chunk: Numbers = chunk[order]
        """The chunk of each piece, by its position here."""
        self.first: Numbers = np.searchsorted(self.chunk, np.arange(len(chunks) + 1))
        """Where the pieces of each chunk begin; one more than there are chunks."""
        held, cells = held[order], cells[order]
        self.held: Numbers = held
        """The number of each piece's box."""
        self.offset: Numbers = np.maximum(cells * step, offset[held])
        self.shape: Numbers = np.minimum((cells + 1) * step, end[held]) - self.offset
        self.size: Numbers = self.shape.prod(axis=1)
        """The elements of each piece."""

    def __len__(self) -> int:
        """How many chunks there are."""
        return len(self.number)

    @cached_property
    def elements(self) -> Numbers:
        """The elements of each chunk."""
        return _sums(self.chunk, self.size, len(self))

    @cached_property
    def single(self) -> bool:
        """Whether each chunk is one piece."""
        return len(self.held) == len(self)


def _within(counts: Numbers) -> Numbers:
    """0, 1, ... for each of the counts."""
    begins = np.cumsum(counts) - counts
    return np.arange(counts.sum()) - np.repeat(begins, counts)


def _unravel(numbers: Numbers, extents: Numbers) -> Numbers:
    """The cells with these numbers in C order, each in a grid of its own."""
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
    """Where each different number appears first, in that order; and for each number its place in that order."""
    _, appears, group = np.unique(numbers, return_index=True, return_inverse=True)
    place = np.empty(len(appears), np.int64)
    place[np.argsort(appears)] = np.arange(len(appears))
    return np.sort(appears), place[group.reshape(-1)]


def _sums(numbers: Numbers, values: Numbers, length: int) -> Numbers:
    """The sum of the values of each number. Exact: below 2**53."""
    return np.bincount(numbers, values, minlength=length).astype(np.int64)


class Candidates(NamedTuple):
    """The ranks that may own a chunk: those that hold at least half as much of it as any rank does."""

    ranks: Numbers
    held: Numbers
    """How many of its elements each of them holds."""


@dataclass(frozen=True, eq=False)
class Geometry:
    """What holds for all tensors with one grid that are held alike: chunks, pieces, and who may own them."""

    pieces: ChunkPieces
    held: Holders
    candidates: Sequence[Candidates]
    """Those of each chunk."""
    only: Numbers
    """For each chunk its one candidate, or -1."""

    @classmethod
    def of(cls, grid: Grid, held: Holders) -> Geometry:
        """The geometry of a grid and boxes."""
        pieces = ChunkPieces(grid, held.boxes)
        candidates = [_candidates(pieces, held, number) for number in range(len(pieces))]
        only = np.array([ranks[0] if len(ranks) == 1 else -1 for ranks, _ in candidates], np.int64)
        return cls(pieces, held, candidates, only)

    def parts_of(self, chunk: int) -> range:
        """The pieces of a chunk, by their numbers."""
        return range(int(self.pieces.first[chunk]), int(self.pieces.first[chunk + 1]))

    def source(self, tensor: int, piece: int, owner: int) -> int:
        """The rank that a piece comes from: the owner of its chunk where it has it, else the holders in turn."""
        ranks = self.held.ranks_of(int(self.pieces.held[piece]))
        if len(ranks) == 1 or (ranks != owner).all():
            return int(ranks[(tensor + piece) % len(ranks)])
        return owner

    def sources(self, tensors: Numbers, chunk: int, owners: Numbers) -> Numbers:
        """The same for all pieces of a chunk in these tensors with these owners: a row per tensor."""
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
        """The candidates that hold all of a chunk: where one of these owns it, nothing moves."""
        ranks, held = self.candidates[chunk]
        found: Numbers = ranks[held == self.pieces.elements[chunk]]
        return found

    def moves_anyway(self, chunk: int) -> bool:
        """Whether nobody holds all of a chunk: something of it moves, whoever owns it."""
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
    """Tensors with one geometry, of which a chunk has the same bytes in each."""

    geometry: Geometry
    tensors: Numbers
    """By number, ascending."""
    nbytes: Numbers
    """The bytes of each chunk."""
    whole: bool
    chunks: Numbers
    """The number of each chunk among those of the save: a row per tensor, a column per chunk of the kind."""

    def piece_bytes(self, chunk: int) -> Numbers:
        """The bytes of each piece of a chunk."""
        parts, pieces = self.geometry.parts_of(chunk), self.geometry.pieces
        itemsize = self.nbytes[chunk] // pieces.elements[chunk]
        found: Numbers = pieces.size[parts.start : parts.stop] * itemsize
        return found


class Moves(NamedTuple):
    """The pieces of one chunk in some tensors of a kind."""

    owners: Numbers
    """The owner of the chunk in each tensor."""
    sources: Numbers
    """One row per tensor, one column per piece. A piece does not move where its source is the owner."""
    nbytes: Numbers
    """The bytes of each piece."""


class Dealt:
    """Every chunk of a save: the tensors in their order, of each its chunks in the order of its geometry."""

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
        """Where the chunks of each tensor begin; one more than there are tensors."""
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
        """The number of the bundle in which the pieces of a chunk move; -1 where all of them are with the owner.

        Bundles are in the order of the chunks: every rank sends and receives in that order, so none waits in a circle.
        """
        moves = np.zeros(len(self.owner), np.bool_)
        for kind, chunk, moving in self._moving():
            moves[kind.chunks[:, chunk]] = moving
        found: Numbers = np.full(len(self.owner), -1)
        ends = np.cumsum(self.nbytes[moves])
        found[moves] = (ends - self.nbytes[moves]) // BUNDLE_BYTES
        return found

    def rank_bytes(self) -> list[int]:
        """What each rank writes."""
        written: list[int] = _sums(self.owner, self.nbytes, self.world_size).tolist()
        return written

    def moves(self) -> Iterator[Moves]:
        """The pieces that move, and others of the same chunks."""
        for kind, chunk, moving in self._moving():
            if moving.any():
                owners = self.owner[kind.chunks[moving, chunk]]
                sources = kind.geometry.sources(kind.tensors[moving], chunk, owners)
                yield Moves(owners, sources, kind.piece_bytes(chunk))

    def _moving(self) -> Iterator[tuple[TensorKind, int, NDArray[np.bool_]]]:
        """The chunks of each kind, with the tensors in which something of a chunk moves."""
        for kind in self.kinds:
            for chunk in range(len(kind.geometry.pieces)):
                yield kind, chunk, ~np.isin(self.owner[kind.chunks[:, chunk]], kind.geometry.with_all(chunk))

    def moved_bytes(self, hosts: Numbers | None = None) -> int:
        """What goes from one rank to another; with the number of each rank's host, from one host to another."""
        places = np.arange(self.world_size) if hosts is None else hosts
        return sum(
            int(((places[sources] != places[owners][:, None]) * nbytes).sum())
            for owners, sources, nbytes in self.moves()
        )

    def peers(self) -> NDArray[np.bool_]:
        """Which ranks hand each other pieces, whichever way: a row and a column per rank."""
        found = np.zeros((self.world_size, self.world_size), np.bool_)
        for owners, sources, _ in self.moves():
            found[sources, owners[:, None]] = True
        found |= found.T
        np.fill_diagonal(found, False)
        return found

    def merged(self) -> int:
        """How many chunks are of several pieces."""
        return sum(len(kind.tensors) * int((np.diff(kind.geometry.pieces.first) > 1).sum()) for kind in self.kinds)


def deal(spreads: Iterable[Spread], world_size: int) -> Dealt:
    """The owner of every chunk, in the order of the tensors and their chunks.

    Chunks that only one rank can own come first, then those with a choice, largest first: each to the candidate with
    the least to write. The chunks with one place in all tensors of a kind are dealt together. Once all candidates have
    enough to write, what moves anyway goes to any ranks with room. What is little goes to the candidates in turn.
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
            owners = np.append(owners, _with_room(loads, nbytes, count - len(owners), enough))
        dealt.owner[kind.chunks[:, chunks]] = owners[:, None]
    return dealt


def _least_loaded(loads: Numbers, candidates: Numbers, nbytes: int, count: int, enough: int | None = None) -> Numbers:
    """The owners of so many chunks of a size: one after the other, the candidate with the least. Adds to the loads.

    No more owners once all candidates would have more than enough.
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
    """The owners of so many chunks of a size: the candidates in turn, from the least loaded on. Adds to the loads."""
    order = np.argsort(loads[candidates], kind="stable")
    owners: Numbers = np.resize(candidates[order], count)
    np.add.at(loads, owners, nbytes)
    return owners


def _with_room(loads: Numbers, nbytes: int, count: int, enough: int) -> Numbers:
    """The owners of so many chunks of a size among all ranks: from the least loaded on, each of as many as fit.

    So few ranks own what comes from the same ranks. Adds to the loads.
    """
    ranks = np.argsort(loads, kind="stable")[:count]
    room = np.maximum(enough - loads[ranks], 0) // nbytes
    owners: Numbers = np.repeat(ranks, room)[:count]
    np.add.at(loads, owners, nbytes)
    if len(owners) < count:
        rest = _least_loaded(loads, np.arange(len(loads)), nbytes, count - len(owners))
        owners = np.append(owners, rest)
    return owners


def schedule(needs: Iterable[tuple[Numbers, Numbers]], world_size: int, limit: int) -> list[int]:
    """The round of an exchange in which each transfer takes place, from the bytes that it takes of ranks' memory.

    ``needs`` has the ranks of each transfer, each once, and the bytes of each. In one round no rank
    needs more than ``limit`` bytes, or else has a single transfer.
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
