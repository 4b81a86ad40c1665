"""Which rank writes each chunk, which pieces move to it, and in which rounds: integers only.

Every chunk has one owner. It is a rank that holds much of the chunk, and among those the one with the fewest bytes to
write so far; so what several ranks hold alike is dealt over them by chunks.

A large model on many ranks has millions of pieces. So they are columns: an object's attributes are arrays, and what
holds for one tensor holds for all tensors that are held in the same boxes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from zarrckpt._grid import Box, Grid, Ints

Ranks = tuple[int, ...]
Numbers = NDArray[np.int64]

_FEW = 8
"""Up to so many candidates Python's own minimum is faster than numpy's."""


class Held(NamedTuple):
    """A box of a tensor, and the ranks that hold it."""

    box: Box
    ranks: Ranks


class Holders:
    """The boxes of a tensor, or of many tensors alike, and the ranks that hold each (one at least), in columns."""

    def __init__(self, held: Iterable[Held]) -> None:
        rows = [(box, ranks) for box, ranks in held]
        self.boxes = tuple(box for box, _ in rows)
        self.first: Numbers = np.cumsum([0, *(len(ranks) for _, ranks in rows)], dtype=np.int64)
        """Where the ranks of each box begin; one more than there are boxes."""
        self.ranks: Numbers = np.array([rank for _, ranks in rows for rank in ranks], np.int64)

    def ranks_of(self, number: int) -> Numbers:
        """The ranks that hold a box."""
        return self.ranks[self.first[number] : self.first[number + 1]]

    def places(self, boxes: Numbers, ranks: Numbers) -> Numbers:
        """Where in ``ranks`` these ranks are listed for these boxes. The ranks of each box are in ascending order."""
        if self.alone:
            return boxes
        world = int(self.ranks.max(initial=0)) + 1
        listed = np.repeat(np.arange(len(self.boxes)), np.diff(self.first)) * world + self.ranks
        found: Numbers = np.searchsorted(listed, boxes * world + ranks)
        return found

    @cached_property
    def alone(self) -> bool:
        """Whether each box is held by one rank."""
        return len(self.ranks) == len(self.boxes)


@dataclass(frozen=True)
class Spread:
    """One tensor over the ranks: its grid, the boxes held of it, bytes an element."""

    name: str
    grid: Grid
    itemsize: int
    held: Holders
    whole: bool = False
    """Whether one rank must write all of it: its replicas may differ, and a mixture of them is what no rank had."""


class Pieces:
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
        """Elements of each piece."""

    def __len__(self) -> int:
        """How many chunks there are."""
        return len(self.number)

    @cached_property
    def elements(self) -> Numbers:
        """Of each chunk."""
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


@dataclass(frozen=True)
class Geometry:
    """What holds for all tensors with one grid that are held alike: chunks, pieces, and who may own them."""

    pieces: Pieces
    held: Holders
    candidates: Sequence[Numbers]
    """For each chunk the ranks that hold at least half as much of it as any rank does."""
    only: Numbers
    """For each chunk its one candidate, or -1."""

    @classmethod
    def of(cls, grid: Grid, held: Holders) -> Geometry:
        """The geometry of a grid and boxes."""
        pieces = Pieces(grid, held.boxes)
        candidates = [_candidates(pieces, held, number) for number in range(len(pieces))]
        only = np.array([ranks[0] if len(ranks) == 1 else -1 for ranks in candidates], np.int64)
        return cls(pieces, held, candidates, only)

    @cached_property
    def one_each(self) -> bool:
        """Whether no rank can be the source of two pieces of one chunk."""
        if not self.held.alone:
            return False
        sources = np.stack([self.pieces.chunk, self.held.ranks[self.pieces.held]], axis=1)
        return len(np.unique(sources, axis=0)) == len(sources)


def _candidates(pieces: Pieces, held: Holders, chunk: int) -> Numbers:
    parts = range(pieces.first[chunk], pieces.first[chunk + 1])
    if len(parts) == 1:
        return held.ranks_of(int(pieces.held[parts[0]]))
    boxes = pieces.held[parts.start : parts.stop]
    counts = held.first[boxes + 1] - held.first[boxes]
    holders = held.ranks[np.repeat(held.first[boxes], counts) + _within(counts)]
    ranks, group = np.unique(holders, return_inverse=True)
    sizes = _sums(group.reshape(-1), np.repeat(pieces.size[parts.start : parts.stop], counts), len(ranks))
    chosen: Numbers = ranks[2 * sizes >= sizes.max()]
    return chosen


class Dealt:
    """Every chunk of a save: the tensors in their order, of each its chunks in the order of its geometry."""

    def __init__(self, spreads: Iterable[Spread], world_size: int) -> None:
        self.spreads = list(spreads)
        self.world_size = world_size
        known: dict[tuple[Grid, int], Geometry] = {}
        self.geometries: list[Geometry] = []
        for spread in self.spreads:
            key = (spread.grid, id(spread.held))
            if key not in known:
                known[key] = Geometry.of(spread.grid, spread.held)
            self.geometries.append(known[key])
        counts = [len(geometry.pieces) for geometry in self.geometries]
        self.first: Numbers = np.cumsum([0, *counts], dtype=np.int64)
        """Where the chunks of each tensor begin; one more than there are tensors."""
        self.nbytes: Numbers = _joined(
            [g.pieces.elements * s.itemsize for s, g in zip(self.spreads, self.geometries, strict=True)]
        )
        self.owner: Numbers = np.full(len(self.nbytes), -1)
        self.round: Numbers = np.full(len(self.nbytes), -1)
        """In which round of the exchange a chunk's pieces move; -1 where all of them are with the owner."""
        self.sources: list[Numbers] = []
        """For each tensor the rank that each piece comes from."""

    def rank_bytes(self) -> list[int]:
        """What each rank writes."""
        written: list[int] = _sums(self.owner, self.nbytes, self.world_size).tolist()
        return written

    def moved_bytes(self) -> int:
        """What goes from one rank to another."""
        rows = enumerate(zip(self.spreads, self.geometries, strict=True))
        return sum(
            int(geometry.pieces.size[self.sources[number] != self.owners_of(number)].sum()) * spread.itemsize
            for number, (spread, geometry) in rows
        )

    def merged(self) -> int:
        """How many chunks are of several pieces."""
        return sum(int((np.diff(geometry.pieces.first) > 1).sum()) for geometry in self.geometries)

    def chunks_of(self, tensor: int) -> slice:
        """Where the chunks of a tensor are."""
        return slice(int(self.first[tensor]), int(self.first[tensor + 1]))

    def owners_of(self, tensor: int) -> Numbers:
        """The owner of each piece's chunk."""
        owners: Numbers = self.owner[self.chunks_of(tensor)][self.geometries[tensor].pieces.chunk]
        return owners


def _joined(arrays: Sequence[Numbers]) -> Numbers:
    return np.concatenate([np.zeros(0, np.int64), *arrays])


def deal(spreads: Iterable[Spread], world_size: int) -> Dealt:
    """The owner of every chunk, and the source of every piece, in the order of the tensors and their chunks.

    Chunks that only one rank can own come first, then those with a choice, largest first: each to the rank with the
    least to write.
    """
    dealt = Dealt(spreads, world_size)
    loads = np.zeros(world_size, np.int64)
    choices: list[tuple[int, slice, Numbers]] = []
    for number, (spread, geometry) in enumerate(zip(dealt.spreads, dealt.geometries, strict=True)):
        own = dealt.chunks_of(number)
        if own.start == own.stop:
            continue
        if spread.whole:
            candidates = geometry.candidates[0]
            if len(candidates) > 1:
                choices.append((int(dealt.nbytes[own].sum()), own, candidates))
            else:
                dealt.owner[own] = candidates[0]
                loads[candidates[0]] += dealt.nbytes[own].sum()
            continue
        fixed = geometry.only >= 0
        dealt.owner[own] = geometry.only
        loads += _sums(geometry.only[fixed], dealt.nbytes[own][fixed], world_size)
        for chunk in np.flatnonzero(~fixed).tolist():
            place = own.start + chunk
            choices.append((int(dealt.nbytes[place]), slice(place, place + 1), geometry.candidates[chunk]))
    _choose_owners(dealt, choices, loads)
    _choose_sources(dealt)
    return dealt


def _choose_owners(dealt: Dealt, choices: list[tuple[int, slice, Numbers]], loads: Numbers) -> None:
    choices.sort(key=lambda choice: -choice[0])
    for nbytes, chunks, candidates in choices:
        if len(candidates) <= _FEW:
            owner = min(candidates.tolist(), key=loads.__getitem__)
        else:
            owner = int(candidates[loads[candidates].argmin()])
        loads[owner] += nbytes
        dealt.owner[chunks] = owner


def _choose_sources(dealt: Dealt) -> None:
    """The owner where it has a piece, else the rank that has it and sends least so far."""
    sent = np.zeros(dealt.world_size, np.int64)
    for number, (spread, geometry) in enumerate(zip(dealt.spreads, dealt.geometries, strict=True)):
        pieces, held = geometry.pieces, geometry.held
        owners = dealt.owners_of(number)
        if pieces.single:
            sources = owners  # it is a candidate, so it has all of the chunk
        elif held.alone:
            sources = held.ranks[pieces.held]
            moves = sources != owners
            sent += _sums(sources[moves], pieces.size[moves] * spread.itemsize, dealt.world_size)
        else:
            sources = np.empty_like(owners)
            for place, (box, owner) in enumerate(zip(pieces.held.tolist(), owners.tolist(), strict=True)):
                ranks = held.ranks_of(box)
                source = owner if owner in ranks else int(ranks[sent[ranks].argmin()])
                if source != owner:
                    sent[source] += pieces.size[place] * spread.itemsize
                sources[place] = source
        dealt.sources.append(sources)


def schedule(needs: Iterable[tuple[Numbers, Numbers | int]], world_size: int, limit: int) -> list[int]:
    """The round of an exchange in which each transfer takes place, from the bytes that it takes of ranks' memory.

    ``needs`` has the ranks of each transfer, each once, and the bytes of each (a number: of all alike). In one round no
    rank needs more than ``limit`` bytes, or else has a single transfer.
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


def schedule_chunks(dealt: Dealt, limit: int) -> None:
    """Put the chunks whose pieces move into rounds."""
    moving: list[int] = []
    dealt.round[moving] = schedule(_needs(dealt, moving), dealt.world_size, limit)


def _needs(dealt: Dealt, moving: list[int]) -> Iterator[tuple[Numbers, Numbers]]:
    """What chunks take of ranks' memory while their pieces move; their numbers are appended to ``moving``."""
    for number, (spread, geometry) in enumerate(zip(dealt.spreads, dealt.geometries, strict=True)):
        pieces, own = geometry.pieces, dealt.chunks_of(number)
        if pieces.single:
            continue
        moves = dealt.sources[number] != dealt.owners_of(number)
        sources, sizes = dealt.sources[number][moves], pieces.size[moves] * spread.itemsize
        bounds = np.searchsorted(pieces.chunk[moves], np.arange(len(pieces) + 1)).tolist()
        chunk_bytes = math.prod(spread.grid.chunk_shape) * spread.itemsize
        for chunk, owner in enumerate(dealt.owner[own].tolist()):
            begin, end = bounds[chunk], bounds[chunk + 1]
            if begin == end:
                continue
            ranks, nbytes = sources[begin:end], sizes[begin:end]
            if not geometry.one_each:
                ranks, group = np.unique(ranks, return_inverse=True)
                nbytes = _sums(group.reshape(-1), nbytes, len(ranks))
            moving.append(own.start + chunk)
            yield np.append(ranks, owner), np.append(nbytes, nbytes.sum() + chunk_bytes)
