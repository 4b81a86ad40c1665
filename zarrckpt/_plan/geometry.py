"""Holders of boxes, and the pieces into which a chunk grid cuts the boxes, with integers only.

A large model on many ranks has millions of pieces, so classes hold them in columns: each attribute is an array.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from zarrckpt._format.grid import Box, Grid, Ints

RankNumbers = tuple[int, ...]
Numbers = NDArray[np.int64]


class BoxOnRanks(NamedTuple):
    """A box of a tensor, and the ranks that hold it."""

    box: Box
    ranks: RankNumbers


class Holders:
    """The boxes of one tensor or of many equally sharded ones, and the ranks that hold each box, in columns."""

    def __init__(self, rows: Sequence[BoxOnRanks]) -> None:
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
    def are_single(self) -> bool:
        """Whether exactly one rank holds each box."""
        return len(self.ranks) == len(self.boxes)


class GridPieces:
    """The chunks of a grid in the order in which the boxes touch them, and the pieces of each chunk, in columns.

    ``number`` and ``elements`` have one row for each chunk. ``chunk``, ``box``, ``offset``, ``shape`` and ``size`` have
    one row for each piece.
    """

    def __init__(self, grid: Grid, boxes: Sequence[Box]) -> None:
        ndim = len(grid.shape)
        offset = np.array([box.offset for box in boxes], np.int64).reshape(len(boxes), ndim)
        end = offset + np.array([box.shape for box in boxes], np.int64).reshape(len(boxes), ndim)
        step = np.array(grid.chunk_shape, np.int64)
        low, extents = offset // step, -(-end // step) - offset // step
        extents[(end == offset).any(axis=1)] = 0
        counts = extents.prod(axis=1)
        box = np.repeat(np.arange(len(boxes)), counts)
        cells = low[box] + _unravel(_within(counts), extents[box])
        numbers = _ravel(cells, grid.counts)
        chunks, chunk = number_by_appearance(numbers)
        self.number: Numbers = numbers[chunks]
        """The number of each chunk in the grid, in C order."""
        order = np.argsort(chunk, kind="stable")
        self.chunk: Numbers = chunk[order]
        """The chunk of each piece, as an index into ``number``."""
        self.first: Numbers = np.searchsorted(self.chunk, np.arange(len(chunks) + 1))
        """The index at which the pieces of each chunk begin, and the end."""
        box, cells = box[order], cells[order]
        self.box: Numbers = box
        """The number of each piece's box."""
        self.offset: Numbers = np.maximum(cells * step, offset[box])
        self.shape: Numbers = np.minimum((cells + 1) * step, end[box]) - self.offset
        self.size: Numbers = self.shape.prod(axis=1)
        """The number of elements of each piece."""

    def __len__(self) -> int:
        """Return the number of chunks."""
        return len(self.number)

    @cached_property
    def elements(self) -> Numbers:
        """The number of elements of each chunk that the pieces hold."""
        return sum_by_number(self.chunk, self.size, len(self))

    @cached_property
    def single(self) -> bool:
        """Whether every chunk has exactly one piece."""
        return len(self.box) == len(self)


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


def number_by_appearance(numbers: Numbers) -> tuple[Numbers, Numbers]:
    """Return the index of the first appearance of each distinct number, in order, and each number's rank in it."""
    _, appears, group = np.unique(numbers, return_index=True, return_inverse=True)
    position = np.empty(len(appears), np.int64)
    position[np.argsort(appears)] = np.arange(len(appears))
    return np.sort(appears), position[group]


def sum_by_number(numbers: Numbers, values: Numbers, length: int) -> Numbers:
    """Return the sum of the values of each number. It is exact below 2**53."""
    return np.bincount(numbers, values, minlength=length).astype(np.int64)


class Candidates(NamedTuple):
    """The ranks that may own a chunk: those that hold at least half as much of it as any rank does."""

    ranks: Numbers
    elements: Numbers
    """The number of elements of the chunk that each of them holds."""


@dataclass(frozen=True, eq=False)
class Geometry:
    """The chunks, pieces and candidate owners that all tensors with one grid and one set of holders share."""

    pieces: GridPieces
    holders: Holders
    candidates: Sequence[Candidates]
    """The candidates of each chunk."""
    single_candidate: Numbers
    """The single candidate of each chunk, or -1 if there are several."""

    @classmethod
    def of(cls, grid: Grid, holders: Holders) -> Geometry:
        """Return the geometry of a grid and its holders."""
        pieces = GridPieces(grid, holders.boxes)
        candidates = [_candidates(pieces, holders, number) for number in range(len(pieces))]
        single_candidate = np.array([ranks[0] if len(ranks) == 1 else -1 for ranks, _ in candidates], np.int64)
        return cls(pieces, holders, candidates, single_candidate)

    def pieces_of(self, chunk: int) -> range:
        """Return the numbers of a chunk's pieces."""
        return range(int(self.pieces.first[chunk]), int(self.pieces.first[chunk + 1]))

    def source(self, tensor: int, piece: int, owner: int) -> int:
        """Return the rank that supplies a piece: the chunk's owner if it holds the piece, otherwise holders in turn."""
        ranks = self.holders.ranks_of(int(self.pieces.box[piece]))
        if len(ranks) == 1 or (ranks != owner).all():
            return int(ranks[(tensor + piece) % len(ranks)])
        return owner

    def sources(self, tensors: Numbers, chunk: int, owners: Numbers) -> Numbers:
        """Return the sources of all pieces of a chunk in these tensors with these owners, one row per tensor."""
        own = self.pieces_of(chunk)
        boxes = self.pieces.box[own.start : own.stop]
        first = self.holders.first[boxes]
        turn = (tensors[:, None] + np.arange(own.start, own.stop)) % (self.holders.first[boxes + 1] - first)
        found: Numbers = self.holders.ranks[first + turn]
        for owner in [] if self.holders.are_single else np.unique(owners).tolist():
            held = np.isin(boxes, self.holders.boxes_of(owner))
            found[np.ix_(owners == owner, held)] = owner
        return found

    def whole_holders(self, chunk: int) -> Numbers:
        """Return the candidates that hold the whole chunk. If one of them owns it, no piece moves."""
        ranks, elements = self.candidates[chunk]
        found: Numbers = ranks[elements == self.pieces.elements[chunk]]
        return found

    def moves_anyway(self, chunk: int) -> bool:
        """Whether no rank holds the whole chunk, so that a piece moves for every choice of the owner."""
        return not len(self.whole_holders(chunk))


def _candidates(pieces: GridPieces, holders: Holders, chunk: int) -> Candidates:
    own = slice(int(pieces.first[chunk]), int(pieces.first[chunk + 1]))
    boxes, sizes = pieces.box[own], pieces.size[own]
    if len(boxes) == 1:
        ranks = holders.ranks_of(int(boxes[0]))
        return Candidates(ranks, np.broadcast_to(sizes[0], ranks.shape))
    counts = holders.first[boxes + 1] - holders.first[boxes]
    ranks_of_pieces = holders.ranks[np.repeat(holders.first[boxes], counts) + _within(counts)]
    ranks, group = np.unique(ranks_of_pieces, return_inverse=True)
    elements = sum_by_number(group, np.repeat(sizes, counts), len(ranks))
    large = 2 * elements >= elements.max()
    return Candidates(ranks[large], elements[large])
