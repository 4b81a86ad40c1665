"""One rank's part of a save: the chunks that it writes, the pieces that it sends, its share of the documents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from zarrckpt._format.documents import ArrayNode, group_document
from zarrckpt._format.grid import Box, Ints, unravel
from zarrckpt._format.json_values import dumps
from zarrckpt._format.root import parent_groups
from zarrckpt._plan.owners import Dealt, TensorKind


class ChunkPiece(NamedTuple):
    """A part of a chunk that this rank writes: held in one of its own items, or sent by another rank."""

    box: Box
    item: int | None
    source: int | None


class ChunkPlan(NamedTuple):
    """A chunk that this rank writes."""

    fqn: str
    cell: Ints
    parts: tuple[ChunkPiece, ...]


class Sending(NamedTuple):
    """A part of one of this rank's items that another rank writes."""

    to: int
    item: int
    box: Box


@dataclass
class Bundle:
    """What this rank sends of one bundle of chunks, and the chunks of it that it writes, both in the plan's order."""

    sends: list[Sending] = field(default_factory=list)
    chunks: list[ChunkPlan] = field(default_factory=list)


@dataclass(frozen=True)
class RankPlan:
    """What one rank does in a save. It is of no attempt and of no url."""

    arrays: Mapping[str, ArrayNode]
    """The arrays that this rank writes or sends something of, by flat name."""
    documents: Mapping[str, bytes]
    """The node documents that this rank writes, by path."""
    object_paths: Mapping[str, str]
    """The node path of each value that this rank writes, by flat name."""
    items: Sequence[tuple[str, Box]]
    """The boxes of arrays that this rank holds and writes, or sends, something of."""
    chunks: Sequence[ChunkPlan]
    """The chunks that this rank has all pieces of."""
    bundles: Mapping[int, Bundle]
    """What moves between ranks, in ascending order."""


def rank_plan(rank: int, nodes: Mapping[str, ArrayNode], dealt: Dealt, object_paths: Mapping[str, str]) -> RankPlan:
    """Cut one rank's part out of a whole plan. ``nodes`` are the arrays in the order of ``dealt``."""
    part = _RankPart(rank, nodes, dealt)
    for kind in dealt.kinds:
        part.add(kind)
    return RankPlan(
        {name: nodes[name] for name in part.names()},
        _share_of_documents(nodes, rank, dealt.world_size),
        object_paths,
        [*part.items],
        [chunk for _, chunk in sorted(part.chunks)],
        part.bundles(),
    )


class _RankPart:
    """Gathers one rank's chunks and sends, kind by kind."""

    def __init__(self, rank: int, nodes: Mapping[str, ArrayNode], dealt: Dealt) -> None:
        self._rank = rank
        self._names = [*nodes]
        self._dealt = dealt
        self.items: dict[tuple[str, Box], int] = {}
        self.chunks: list[tuple[int, ChunkPlan]] = []
        """Each with its number in the whole plan."""
        self._merged: list[tuple[int, ChunkPlan]] = []
        self._sends: list[tuple[int, int, Sending]] = []

    def add(self, kind: TensorKind) -> None:
        """The chunks of a kind that this rank owns, and the pieces that it sends to other owners."""
        owners = self._dealt.owner[kind.chunks]
        for row, chunk in zip(*(found.tolist() for found in np.nonzero(owners == self._rank)), strict=True):
            self._own(kind, row, chunk)
        if kind.geometry.pieces.single:
            return
        own = np.isin(kind.geometry.pieces.held, kind.geometry.held.boxes_of(self._rank))
        for piece in np.flatnonzero(own).tolist():
            chunk = int(kind.geometry.pieces.chunk[piece])
            for row in np.flatnonzero(owners[:, chunk] != self._rank).tolist():
                self._send(kind, row, chunk, piece, int(owners[row, chunk]))

    def _own(self, kind: TensorKind, row: int, chunk: int) -> None:
        tensor, number = int(kind.tensors[row]), int(kind.chunks[row, chunk])
        name, grid = self._names[tensor], self._dealt.spreads[tensor].grid
        parts = []
        for piece in kind.geometry.parts_of(chunk):
            box, source = _piece_box(kind, piece), kind.geometry.source(tensor, piece, self._rank)
            if source == self._rank:
                parts.append(ChunkPiece(box, self._item(name, kind, piece), None))
            else:
                parts.append(ChunkPiece(box, None, source))
        cell = unravel(int(kind.geometry.pieces.number[chunk]), grid.counts)
        moves = any(part.source is not None for part in parts)
        (self._merged if moves else self.chunks).append((number, ChunkPlan(name, cell, tuple(parts))))

    def _send(self, kind: TensorKind, row: int, chunk: int, piece: int, owner: int) -> None:
        tensor = int(kind.tensors[row])
        if kind.geometry.source(tensor, piece, owner) == self._rank:
            item = self._item(self._names[tensor], kind, piece)
            sending = Sending(owner, item, _piece_box(kind, piece))
            self._sends.append((int(kind.chunks[row, chunk]), piece, sending))

    def _item(self, name: str, kind: TensorKind, piece: int) -> int:
        box = kind.geometry.held.boxes[int(kind.geometry.pieces.held[piece])]
        return self.items.setdefault((name, box), len(self.items))

    def names(self) -> dict[str, None]:
        """The names of the arrays that this rank sends or writes something of: it may write what only others hold."""
        written = (chunk.fqn for _, chunk in (*self.chunks, *self._merged))
        return dict.fromkeys([*(name for name, _ in self.items), *written])

    def bundles(self) -> dict[int, Bundle]:
        """What moves: sender and receiver have the parts of a message in one order, that of chunks and pieces."""
        found: dict[int, Bundle] = {}
        bundle = self._dealt.bundle
        for number, chunk in sorted(self._merged):
            found.setdefault(int(bundle[number]), Bundle()).chunks.append(chunk)
        for number, _, sending in sorted(self._sends):
            found.setdefault(int(bundle[number]), Bundle()).sends.append(sending)
        return dict(sorted(found.items()))


def _piece_box(kind: TensorKind, piece: int) -> Box:
    pieces = kind.geometry.pieces
    return Box(tuple(pieces.offset[piece].tolist()), tuple(pieces.shape[piece].tolist()))


def _share_of_documents(nodes: Mapping[str, ArrayNode], share: int, shares: int) -> dict[str, bytes]:
    """One of equal shares of all node documents: they depend on the plan only, so ranks write them side by side."""
    arrays: dict[str, ArrayNode | None] = {node.path: node for node in nodes.values()}
    arrays |= dict.fromkeys(parent_groups(arrays))
    mine = {path: arrays[path] for path in sorted(arrays)[share::shares]}
    group = dumps(group_document())
    return {path: group if node is None else node.document_bytes() for path, node in mine.items()}
