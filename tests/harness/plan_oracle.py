"""The rule of ``zarrckpt._plan.owners``, written to be read: one chunk at a time instead of columns.

Every chunk has one owner. It is a rank that holds much of the chunk. Among those it is the one with the fewest bytes to
write so far. Chunks that only one rank can own come first. Then come those with a choice, the largest first. The chunks
of one number in all tensors of a kind are assigned together, in the order of the tensors.

If no rank holds all of a chunk, some pieces move in any case. So once all ranks that hold much of it have enough to
write, other ranks own it: the least loaded first, each as many chunks as it can take.

Chunks that are small compared to the bytes of a rank go in turn to the candidates that have not enough to write yet.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from harness.internals import Box, Grid, Ints, intersect
from zarrckpt._plan.geometry import BoxOnRanks, RankNumbers


@dataclass(frozen=True)
class PlannedTensor:
    """One tensor over the ranks: its grid, its boxes (replicas once), their ranks, and bytes per element."""

    name: str
    grid: Grid
    itemsize: int
    holders: Sequence[BoxOnRanks]
    whole: bool = False
    """Whether one rank must write all of it. Replicas may differ, and no rank had a mixture of them."""

    @property
    def kind(self) -> object:
        """A key of the tensors whose chunks of one number are assigned together."""
        return self.grid, tuple(self.holders), self.itemsize, self.whole


@dataclass
class Owned:
    """One chunk: its owner, its pieces, and the source rank of each piece."""

    tensor: PlannedTensor
    index: Ints
    pieces: Sequence[tuple[int, Box]]
    """(position in ``tensor.holders``, this box's part of the chunk)."""
    nbytes: int
    owner: int = -1
    sources: list[int] = field(default_factory=list)
    bundle: int = -1
    """The number of the bundle with which its pieces move, -1 if the owner has all of them."""

    @property
    def held(self) -> Mapping[int, int]:
        """The number of its elements that each rank holds."""
        found: Counter[int] = Counter()
        for number, box in self.pieces:
            for rank in self.tensor.holders[number].ranks:
                found[rank] += box.size
        return found

    @property
    def candidates(self) -> RankNumbers:
        """The ranks that hold at least half as much of it as any rank does."""
        held = self.held
        return tuple(sorted(rank for rank, size in held.items() if 2 * size >= max(held.values())))

    @property
    def moves_anyway(self) -> bool:
        """Whether no rank holds all of it, and it may be written apart from the rest of its tensor."""
        return not self.tensor.whole and max(self.held.values()) < sum(box.size for _, box in self.pieces)

    @property
    def foreign(self) -> Iterator[tuple[int, Box]]:
        """(source, part) of the pieces that the owner lacks."""
        return ((s, box) for s, (_, box) in zip(self.sources, self.pieces, strict=True) if s != self.owner)

    @property
    def moved(self) -> int:
        """Bytes that move to the owner."""
        return sum(box.size for _, box in self.foreign) * self.tensor.itemsize


Pieces = Mapping[Ints, Sequence[tuple[int, Box]]]


def pieces_of(grid: Grid, boxes: Sequence[Box]) -> Pieces:
    """Return for each chunk the boxes (by position) that share elements with it, and the shared parts."""
    found: dict[Ints, list[tuple[int, Box]]] = {}
    for number, box in enumerate(boxes):
        for index in grid.chunks_of(box):
            shared = intersect(grid.chunk_box(index), box)
            assert shared is not None
            found.setdefault(index, []).append((number, shared))
    return found


def choose_owners(planned: Sequence[PlannedTensor], world_size: int, bundle_bytes: int) -> list[Owned]:
    """Return the owner of every chunk, the source of every piece, and the bundles, in the order of
    tensors and chunks.
    """
    tensors = [_chunks_of(tensor) for tensor in planned]
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


def _chunks_of(tensor: PlannedTensor) -> list[Owned]:
    pieces = pieces_of(tensor.grid, [held.box for held in tensor.holders])
    return [
        Owned(tensor, index, parts, sum(box.size for _, box in parts) * tensor.itemsize)
        for index, parts in pieces.items()
    ]


Unit = list[Owned]
"""Chunks that one rank writes: one, or all of a tensor that must be whole."""


def _dealt_together(tensors: Sequence[list[Owned]]) -> Iterator[list[Unit]]:
    """Yield the units of each kind and number, one per tensor. They have one size and the same candidates."""
    kinds: dict[object, list[list[Unit]]] = {}
    for chunks in tensors:
        if chunks:
            units = [chunks] if chunks[0].tensor.whole else [[chunk] for chunk in chunks]
            kinds.setdefault(chunks[0].tensor.kind, []).append(units)
    for alike in kinds.values():
        yield from ([*units] for units in zip(*alike, strict=True))


def _give(units: Iterable[Unit], candidates: RankNumbers, nbytes: int, loads: list[int]) -> None:
    for unit in units:
        _own(unit, min(candidates, key=loads.__getitem__), nbytes, loads)


def _give_until(units: list[Unit], candidates: RankNumbers, nbytes: int, loads: list[int], enough: int) -> list[Unit]:
    """Assign units to the candidates until none can take one more. Return the rest."""
    left = [*units]
    while left and loads[owner := min(candidates, key=loads.__getitem__)] + nbytes <= enough:
        _own(left.pop(0), owner, nbytes, loads)
    return left


def _give_to_ranks_with_room(units: list[Unit], nbytes: int, loads: list[int], enough: int) -> list[Unit]:
    """Assign units to any ranks, each as many as it can take. Return the rest."""
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
    """Choose the owner as the source if it has the piece, else the ranks that have it in turn, by tensor and piece."""
    pieces = ((chunk, number) for chunk in chunks for number, _ in chunk.pieces)
    for piece, (chunk, number) in enumerate(pieces):
        ranks = chunk.tensor.holders[number].ranks
        chunk.sources.append(chunk.owner if chunk.owner in ranks else ranks[(tensor + piece) % len(ranks)])


def _bundle(chunks: Iterable[Owned], bundle_bytes: int) -> None:
    """Number the bundles of the chunks with moving pieces. A new bundle begins every ``bundle_bytes``."""
    total = 0
    for chunk in chunks:
        if any(True for _ in chunk.foreign):
            chunk.bundle = total // bundle_bytes
            total += chunk.nbytes
