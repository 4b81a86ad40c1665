"""What ``zarrckpt._plan.owners`` computes in columns, a chunk at a time: the same rule, written to be read.

Every chunk has one owner. It is a rank that holds much of the chunk, and among those the one with the fewest bytes to
write so far. Chunks that only one rank can own come first. Then come those with a choice, the largest first; and with
each chunk those of the same number in all tensors of its kind, in the order of the tensors.

Where nobody holds all of a chunk, something of it moves, whoever owns it. Then, once all that hold much have enough to
write, ranks with room for more own it, from the least loaded on, and each as many as it has room for.

What is little beside all that a rank writes goes to the candidates in turn that have not enough to write yet.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from zarrckpt._format.grid import Box, Grid, Ints, intersect
from zarrckpt._plan.owners import BoxOnRanks, RankNumbers


@dataclass(frozen=True)
class Spread:
    """One tensor over the ranks: its grid, the boxes held of it (replicas once), their ranks, bytes an element."""

    name: str
    grid: Grid
    itemsize: int
    held: Sequence[BoxOnRanks]
    whole: bool = False
    """Whether one rank must write all of it: its replicas may differ, and a mixture of them is what no rank had."""

    @property
    def kind(self) -> object:
        """The same for tensors of which the chunks of one number are dealt together."""
        return self.grid, tuple(self.held), self.itemsize, self.whole


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
    bundle: int = -1
    """With which other chunks its pieces move; -1 where all of them are with the owner."""

    @property
    def held(self) -> Mapping[int, int]:
        """How many of its elements each rank holds."""
        found: Counter[int] = Counter()
        for number, box in self.pieces:
            for rank in self.spread.held[number].ranks:
                found[rank] += box.size
        return found

    @property
    def candidates(self) -> RankNumbers:
        """The ranks that hold at least half as much of it as any rank does."""
        held = self.held
        return tuple(sorted(rank for rank, size in held.items() if 2 * size >= max(held.values())))

    @property
    def moves_anyway(self) -> bool:
        """Whether nobody holds all of it, and it need not be where the rest of its tensor is."""
        return not self.spread.whole and max(self.held.values()) < sum(box.size for _, box in self.pieces)

    @property
    def foreign(self) -> Iterator[tuple[int, Box]]:
        """(source, part) of the pieces that the owner has not."""
        return ((s, box) for s, (_, box) in zip(self.sources, self.pieces, strict=True) if s != self.owner)

    @property
    def moved(self) -> int:
        """Bytes that go to the owner."""
        return sum(box.size for _, box in self.foreign) * self.spread.itemsize


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


def deal(spreads: Sequence[Spread], world_size: int, bundle_bytes: int) -> list[Owned]:
    """The owner of every chunk, the source of every piece, and the bundles, in the order of tensors and chunks."""
    tensors = [_chunks_of(spread) for spread in spreads]
    loads = [0] * world_size
    choices = []
    for together in _dealt_together(tensors):
        candidates, nbytes = together[0][0].candidates, sum(chunk.nbytes for chunk in together[0])
        if len(candidates) == 1:
            _give(together, candidates, nbytes, loads)
        else:
            choices.append((nbytes, candidates, together))
    total = sum(chunk.nbytes for chunks in tensors for chunk in chunks)
    mean = total // world_size
    enough = mean * 17 // 16
    for nbytes, candidates, together in sorted(choices, key=lambda choice: -choice[0]):
        free = [rank for rank in candidates if loads[rank] < enough]
        if free and nbytes * math.ceil(len(together) / len(free)) * 64 <= mean:
            for unit, owner in zip(together, itertools.cycle(sorted(free, key=loads.__getitem__)), strict=False):
                _own(unit, owner, nbytes, loads)
            continue
        if together[0][0].moves_anyway:
            together = _give_until(together, candidates, nbytes, loads, enough)
            together = _give_to_ranks_with_room(together, nbytes, loads, enough)
            candidates = tuple(range(world_size))
        _give(together, candidates, nbytes, loads)
    for number, chunks in enumerate(tensors):
        _choose_sources(number, chunks)
    everything = [chunk for chunks in tensors for chunk in chunks]
    _bundle(everything, bundle_bytes)
    return everything


def _chunks_of(spread: Spread) -> list[Owned]:
    pieces = pieces_of(spread.grid, [held.box for held in spread.held])
    return [
        Owned(spread, index, parts, sum(box.size for _, box in parts) * spread.itemsize)
        for index, parts in pieces.items()
    ]


Unit = list[Owned]
"""Chunks that one rank writes: one, or all of a tensor that must be whole."""


def _dealt_together(tensors: Sequence[list[Owned]]) -> Iterator[list[Unit]]:
    """Of each kind and each number the units, one a tensor: all of one size, and with the same candidates."""
    kinds: dict[object, list[list[Unit]]] = {}
    for chunks in tensors:
        if chunks:
            units = [chunks] if chunks[0].spread.whole else [[chunk] for chunk in chunks]
            kinds.setdefault(chunks[0].spread.kind, []).append(units)
    for alike in kinds.values():
        yield from ([*units] for units in zip(*alike, strict=True))


def _give(units: Iterable[Unit], candidates: RankNumbers, nbytes: int, loads: list[int]) -> None:
    for unit in units:
        _own(unit, min(candidates, key=loads.__getitem__), nbytes, loads)


def _give_until(units: list[Unit], candidates: RankNumbers, nbytes: int, loads: list[int], enough: int) -> list[Unit]:
    """Give units to the candidates until none has room for one more. What is left."""
    left = [*units]
    while left and loads[owner := min(candidates, key=loads.__getitem__)] + nbytes <= enough:
        _own(left.pop(0), owner, nbytes, loads)
    return left


def _give_to_ranks_with_room(units: list[Unit], nbytes: int, loads: list[int], enough: int) -> list[Unit]:
    """Give units to any ranks with room, each as many as it has room for. What is left."""
    left = [*units]
    for rank in sorted(range(len(loads)), key=loads.__getitem__):
        while left and loads[rank] + nbytes <= enough:
            _own(left.pop(0), rank, nbytes, loads)
    return left


def _own(unit: Unit, owner: int, nbytes: int, loads: list[int]) -> None:
    loads[owner] += nbytes
    for chunk in unit:
        chunk.owner = owner


def _choose_sources(tensor: int, chunks: Iterable[Owned]) -> None:
    """The owner of the chunk, where it has a piece; else those that have it in turn, by tensor and piece."""
    pieces = ((chunk, number) for chunk in chunks for number, _ in chunk.pieces)
    for piece, (chunk, number) in enumerate(pieces):
        ranks = chunk.spread.held[number].ranks
        chunk.sources.append(chunk.owner if chunk.owner in ranks else ranks[(tensor + piece) % len(ranks)])


def _bundle(chunks: Iterable[Owned], bundle_bytes: int) -> None:
    """Chunks of which something moves follow each other; a bundle begins every so many bytes."""
    total = 0
    for chunk in chunks:
        if any(True for _ in chunk.foreign):
            chunk.bundle = total // bundle_bytes
            total += chunk.nbytes
