"""What ``zarrckpt._owners`` computes in columns, a chunk at a time: the same rules, written to be read.

Every chunk has one owner. It is a rank that holds much of the chunk, and among those the one with the fewest bytes to
write so far; so what several ranks hold alike is dealt over them by chunks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from zarrckpt._grid import Box, Grid, Ints, intersect
from zarrckpt._owners import Held, Ranks


@dataclass(frozen=True)
class Spread:
    """One tensor over the ranks: its grid, the boxes held of it (replicas once), their ranks, bytes an element."""

    name: str
    grid: Grid
    itemsize: int
    held: Sequence[Held]
    whole: bool = False
    """Whether one rank must write all of it: its replicas may differ, and a mixture of them is what no rank had."""


@dataclass
class Owned:
    """One chunk: who writes it, its pieces, and the rank that each comes from."""

    spread: Spread
    index: Ints
    pieces: Sequence[tuple[int, Box]]
    """(position in ``spread.held``, the part of the chunk that this box has)."""
    nbytes: int
    owner: int = -1
    sources: list[int] = field(default_factory=list)
    round: int = -1
    """In which round of the exchange its pieces move; -1 where all of them are with the owner."""

    def piece_bytes(self, box: Box) -> int:
        return box.size * self.spread.itemsize

    @property
    def foreign(self) -> Iterator[tuple[int, Box]]:
        """(source, part) of the pieces that the owner has not."""
        return ((s, box) for s, (_, box) in zip(self.sources, self.pieces, strict=True) if s != self.owner)


Pieces = Mapping[Ints, Sequence[tuple[int, Box]]]


def pieces_of(grid: Grid, boxes: Sequence[Box]) -> Pieces:
    """For each chunk, the boxes (by position) that share elements with it, and what they share."""
    found: dict[Ints, list[tuple[int, Box]]] = {}
    for number, box in enumerate(boxes):
        for index in grid.chunks_of(box):
            shared = intersect(grid.chunk_box(index), box)
            assert shared is not None
            found.setdefault(index, []).append((number, shared))
    return found


class _Geometries:
    """The pieces of grids, kept: the layers of a model, and an optimizer's moments, are alike."""

    def __init__(self) -> None:
        self._known: dict[tuple[Grid, tuple[Box, ...]], list[tuple[Ints, int, Sequence[tuple[int, Box]]]]] = {}

    def of(self, spread: Spread) -> list[tuple[Ints, int, Sequence[tuple[int, Box]]]]:
        """Chunks with their elements and pieces."""
        key = (spread.grid, tuple(held.box for held in spread.held))
        known = self._known.get(key)
        if known is None:
            pieces = pieces_of(spread.grid, key[1])
            known = self._known[key] = [
                (index, sum(box.size for _, box in parts), parts) for index, parts in pieces.items()
            ]
        return known


def deal(spreads: Iterable[Spread], world_size: int) -> list[Owned]:
    """The owner of every chunk, and the source of every piece, in the order of the tensors and their chunks.

    Chunks that only one rank can own come first, then those with a choice, largest first: each to the rank with the
    least to write.
    """
    loads = [0] * world_size
    chunks: list[Owned] = []
    open_choices: list[tuple[int, Ranks, list[Owned]]] = []
    geometries = _Geometries()
    for spread in spreads:
        mine = [
            Owned(spread, index, pieces, elements * spread.itemsize)
            for index, elements, pieces in geometries.of(spread)
        ]
        chunks += mine
        for group in [mine] if spread.whole and mine else [[chunk] for chunk in mine]:
            nbytes = group[0].nbytes if len(group) == 1 else sum(chunk.nbytes for chunk in group)
            candidates = _candidates(group[0])
            if len(candidates) == 1:
                _give(group, candidates[0], nbytes, loads)
            else:
                open_choices.append((nbytes, candidates, group))
    for nbytes, candidates, group in sorted(open_choices, key=lambda choice: -choice[0]):
        _give(group, min(candidates, key=loads.__getitem__), nbytes, loads)
    _choose_sources(chunks, world_size)
    return chunks


def _candidates(chunk: Owned) -> Ranks:
    """The ranks that hold at least half as much of a chunk as any rank does."""
    held = chunk.spread.held
    if len(chunk.pieces) == 1:
        return held[chunk.pieces[0][0]].ranks
    bytes_of: dict[int, int] = {}
    for number, box in chunk.pieces:
        for rank in held[number].ranks:
            bytes_of[rank] = bytes_of.get(rank, 0) + box.size
    most = max(bytes_of.values())
    return tuple(sorted(rank for rank, size in bytes_of.items() if 2 * size >= most))


def _give(group: Iterable[Owned], owner: int, nbytes: int, loads: list[int]) -> None:
    loads[owner] += nbytes
    for chunk in group:
        chunk.owner = owner


def _choose_sources(chunks: Iterable[Owned], world_size: int) -> None:
    sent = [0] * world_size
    for chunk in chunks:
        for number, box in chunk.pieces:
            ranks = chunk.spread.held[number].ranks
            source = chunk.owner if chunk.owner in ranks else min(ranks, key=sent.__getitem__)
            if source != chunk.owner:
                sent[source] += chunk.piece_bytes(box)
            chunk.sources.append(source)


def schedule(needs: Iterable[Mapping[int, int]], world_size: int, limit: int) -> list[int]:
    """The round of an exchange in which each transfer takes place, from the bytes that it takes of each rank's memory.

    In one round no rank needs more than ``limit`` bytes, or else has a single transfer.
    """
    current, used = [0] * world_size, [0] * world_size
    numbers = []
    for need in needs:
        number = max((current[rank] for rank in need), default=0)
        if any(current[r] == number and used[r] and used[r] + n > limit for r, n in need.items()):
            number += 1
        for rank, nbytes in need.items():
            if current[rank] < number:
                current[rank], used[rank] = number, 0
            used[rank] += nbytes
        numbers.append(number)
    return numbers


def schedule_chunks(chunks: Iterable[Owned], world_size: int, limit: int) -> None:
    """Put the chunks whose pieces move into rounds."""
    moving = [(chunk, need) for chunk in chunks if (need := _memory(chunk))]
    numbers = schedule((need for _, need in moving), world_size, limit)
    for (chunk, _), number in zip(moving, numbers, strict=True):
        chunk.round = number


def _memory(chunk: Owned) -> dict[int, int]:
    """What one chunk takes of each rank's memory while its pieces move; empty where none do."""
    need: dict[int, int] = {}
    for source, box in chunk.foreign:
        nbytes = chunk.piece_bytes(box)
        need[source] = need.get(source, 0) + nbytes
        need[chunk.owner] = need.get(chunk.owner, 0) + nbytes
    if need:
        need[chunk.owner] += math.prod(chunk.spread.grid.chunk_shape) * chunk.spread.itemsize
    return need
