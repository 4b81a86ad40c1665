"""The plan of one rank in a save: the chunks that it writes, the pieces that it sends, its metadata documents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from zarrckpt._format.documents import GROUP_DOCUMENT, ArrayNode
from zarrckpt._format.grid import Box, Ints, unravel
from zarrckpt._format.root import parent_groups
from zarrckpt._plan.owners import ChunkOwners, TensorKind


class ChunkPiece(NamedTuple):
    """A piece of a chunk that this rank writes, from one of its own items or from another rank."""

    box: Box
    """The piece's box in the array."""
    item: int | None
    """The index of the item in :attr:`RankPlan.items`, or None if another rank sends the piece."""
    source: int | None
    """The rank that sends the piece, or None."""


class ChunkPlan(NamedTuple):
    """A chunk that this rank writes."""

    fqn: str
    chunk_index: Ints
    pieces: tuple[ChunkPiece, ...]


class SentPiece(NamedTuple):
    """A part of one of this rank's items that is sent to another rank."""

    to: int
    item: int
    box: Box


@dataclass
class Bundle:
    """The pieces of one bundle that this rank sends, and the chunks that it writes, both in the order of the plan."""

    sends: list[SentPiece] = field(default_factory=list)
    chunks: list[ChunkPlan] = field(default_factory=list)


@dataclass(frozen=True)
class RankPlan:
    """The plan of one rank in a save. It does not depend on the attempt or the url."""

    arrays: Mapping[str, ArrayNode]
    """Arrays of which this rank writes chunks or sends pieces, by fqn."""
    documents: Mapping[str, bytes]
    """Node documents that this rank writes, by path."""
    object_paths: Mapping[str, str]
    """Node paths of the values that this rank writes, by fqn."""
    items: Sequence[tuple[str, Box]]
    """Boxes of arrays that this rank holds, and writes or sends at least in part."""
    chunks: Sequence[ChunkPlan]
    """Chunks that this rank writes and holds all pieces of."""
    bundles: Mapping[int, Bundle]
    """Pieces that move between ranks, by number in ascending order."""

    def all_chunks(self) -> list[ChunkPlan]:
        """Return the chunks that this rank writes, also those with pieces of other ranks."""
        return [*self.chunks, *(chunk for bundle in self.bundles.values() for chunk in bundle.chunks)]


def make_rank_plan(
    rank: int, nodes: Mapping[str, ArrayNode], chunk_owners: ChunkOwners, object_paths: Mapping[str, str]
) -> RankPlan:
    """Return the plan of one rank. ``nodes`` are the arrays in the order of ``chunk_owners``."""
    builder = _RankPlanBuilder(rank, nodes, chunk_owners)
    for kind in chunk_owners.kinds:
        builder.add(kind)
    return RankPlan(
        {name: nodes[name] for name in builder.names()},
        _share_of_documents(nodes, rank, chunk_owners.world_size),
        object_paths,
        [*builder.items],
        [chunk for _, chunk in sorted(builder.chunks)],
        builder.bundles(),
    )


class _RankPlanBuilder:
    """Collects the chunks and sends of one rank, kind by kind."""

    def __init__(self, rank: int, nodes: Mapping[str, ArrayNode], chunk_owners: ChunkOwners) -> None:
        self._rank = rank
        self._names = [*nodes]
        self._chunk_owners = chunk_owners
        self.items: dict[tuple[str, Box], int] = {}
        self.chunks: list[tuple[int, ChunkPlan]] = []
        """Each with its number in the plan of all ranks."""
        self._merged: list[tuple[int, ChunkPlan]] = []
        self._sends: list[tuple[int, int, SentPiece]] = []

    def add(self, kind: TensorKind) -> None:
        """Add the chunks of a kind that this rank owns, and the pieces that it sends to other owners."""
        owners = self._chunk_owners.owner[kind.chunks]
        for row, chunk in zip(*(found.tolist() for found in np.nonzero(owners == self._rank)), strict=True):
            self._own(kind, row, chunk)
        if kind.geometry.pieces.single:
            return
        own = np.isin(kind.geometry.pieces.box, kind.geometry.holders.boxes_of(self._rank))
        for piece in np.flatnonzero(own).tolist():
            chunk = int(kind.geometry.pieces.chunk[piece])
            for row in np.flatnonzero(owners[:, chunk] != self._rank).tolist():
                self._send(kind, row, chunk, piece, int(owners[row, chunk]))

    def _own(self, kind: TensorKind, row: int, chunk: int) -> None:
        tensor, number = int(kind.tensors[row]), int(kind.chunks[row, chunk])
        name, grid = self._names[tensor], self._chunk_owners.tensors[tensor].grid
        pieces = []
        for piece in kind.geometry.pieces_of(chunk):
            box, source = _piece_box(kind, piece), kind.geometry.source(tensor, piece, self._rank)
            if source == self._rank:
                pieces.append(ChunkPiece(box, self._item(name, kind, piece), None))
            else:
                pieces.append(ChunkPiece(box, None, source))
        chunk_index = unravel(int(kind.geometry.pieces.number[chunk]), grid.counts)
        moves = any(piece.source is not None for piece in pieces)
        (self._merged if moves else self.chunks).append((number, ChunkPlan(name, chunk_index, tuple(pieces))))

    def _send(self, kind: TensorKind, row: int, chunk: int, piece: int, owner: int) -> None:
        tensor = int(kind.tensors[row])
        if kind.geometry.source(tensor, piece, owner) == self._rank:
            item = self._item(self._names[tensor], kind, piece)
            sending = SentPiece(owner, item, _piece_box(kind, piece))
            self._sends.append((int(kind.chunks[row, chunk]), piece, sending))

    def _item(self, name: str, kind: TensorKind, piece: int) -> int:
        box = kind.geometry.holders.boxes[int(kind.geometry.pieces.box[piece])]
        return self.items.setdefault((name, box), len(self.items))

    def names(self) -> dict[str, None]:
        """Return the names of the arrays of which this rank writes chunks or sends pieces.

        A rank can write chunks of an array of which only other ranks hold pieces.
        """
        written = (chunk.fqn for _, chunk in (*self.chunks, *self._merged))
        return dict.fromkeys([*(name for name, _ in self.items), *written])

    def bundles(self) -> dict[int, Bundle]:
        """Return the bundles. Sender and receiver order the pieces of a message by chunk, then by piece."""
        found: dict[int, Bundle] = {}
        bundle = self._chunk_owners.bundle
        for number, chunk in sorted(self._merged):
            found.setdefault(int(bundle[number]), Bundle()).chunks.append(chunk)
        for number, _, sending in sorted(self._sends):
            found.setdefault(int(bundle[number]), Bundle()).sends.append(sending)
        return dict(sorted(found.items()))


def _piece_box(kind: TensorKind, piece: int) -> Box:
    pieces = kind.geometry.pieces
    return Box(tuple(pieces.offset[piece].tolist()), tuple(pieces.shape[piece].tolist()))


def _share_of_documents(nodes: Mapping[str, ArrayNode], share: int, shares: int) -> dict[str, bytes]:
    """Return this rank's share of all node documents. They depend only on the plan, so ranks write equal shares."""
    arrays: dict[str, ArrayNode | None] = {node.path: node for node in nodes.values()}
    arrays |= dict.fromkeys(parent_groups(arrays))
    mine = {path: arrays[path] for path in sorted(arrays)[share::shares]}
    group = GROUP_DOCUMENT
    return {path: group if node is None else node.document_bytes() for path, node in mine.items()}
