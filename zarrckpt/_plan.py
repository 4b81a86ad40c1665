"""DCP plan items to chunk jobs: which array each tensor becomes, and which rank writes which chunk."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from zarrckpt import _names
from zarrckpt._chunking import MAX_CHUNK_BYTES, choose_grid, default_fill_bytes, default_min_piece_bytes
from zarrckpt._documents import ArrayNode, Json, group_document
from zarrckpt._errors import CheckpointError
from zarrckpt._grid import Box, Grid, Ints
from zarrckpt._holdings import Holdings, TensorHolders, hold, item_box
from zarrckpt._mail import Facts
from zarrckpt._owners import Owned, Spread, deal, schedule_chunks
from zarrckpt._root import Marker, parent_groups
from zarrckpt._state_path import StatePath
from zarrckpt._transfer import DEFAULT_MAX_INFLIGHT_BYTES, check_limits


@dataclass(frozen=True)
class Layout:
    """The whole checkpoint as planned: every entry's place in the state dict and in the tree."""

    paths: Mapping[str, StatePath]
    node_paths: Mapping[str, str]
    tensors: Mapping[str, ArrayNode]
    objects: frozenset[str]
    """fqns of non-tensor entries; whether each becomes a value or a blob is known when it is written."""
    world_size: int
    hollow: frozenset[str] = frozenset()
    """fqns of planned items that are no entries, see ``_holdings.Holdings``."""

    def marker(self, attempt: str, started: str) -> Marker:
        """What an attempt with this layout may write."""
        arrays = sorted([*(n.path for n in self.tensors.values()), *(self.node_paths[f] for f in self.objects)])
        return Marker(attempt, "", tuple(arrays), tuple(sorted(parent_groups(arrays))), started)


class Part(NamedTuple):
    """A part of a chunk that this rank writes: held in one of its own items, or sent by another rank."""

    box: Box
    item: int | None
    source: int | None


class ChunkPlan(NamedTuple):
    """A chunk that this rank writes."""

    fqn: str
    cell: Ints
    parts: tuple[Part, ...]


class Sending(NamedTuple):
    """A part of one of this rank's items that another rank writes."""

    to: int
    item: int
    box: Box


@dataclass
class Round:
    """What this rank sends in one round of the exchange, and the chunks that it can write after it."""

    sends: list[Sending] = field(default_factory=list)
    chunks: list[ChunkPlan] = field(default_factory=list)


@dataclass(frozen=True)
class RankPlan:
    """What one rank does. DCP may cache it with the plan, so it is of no one attempt.

    Items are named by their position in the plan's, which are those that this rank writes or sends something of.
    Parts arrive in the order in which the sender's plan has them.
    """

    arrays: Mapping[str, ArrayNode]
    object_paths: Mapping[str, str]
    documents: Mapping[str, Json]
    chunks: Sequence[ChunkPlan]
    rounds: Mapping[int, Round]


@dataclass(frozen=True)
class Sizes:
    """The numbers of bytes that steer a plan, see :class:`ZarrStorageWriter`. None: chosen from ranks and state."""

    max_chunk: int = MAX_CHUNK_BYTES
    min_piece: int | None = None
    fill: int | None = None
    per_round: int = DEFAULT_MAX_INFLIGHT_BYTES // 4
    """What a rank may hold for one round of the exchange."""

    @classmethod
    def checked(cls, max_chunk: int, min_piece: int | None, fill: int | None, max_inflight: int) -> Sizes:
        """From the arguments of a save. Raises TypeError and ValueError naming the argument."""
        check_limits(max_chunk_bytes=max_chunk, max_inflight_bytes=max_inflight)
        if fill is not None:
            check_limits(fill_bytes=fill)
        if min_piece is not None:
            check_limits(0, min_piece_bytes=min_piece)
        return cls(max_chunk, min_piece, fill, max(1, max_inflight // 4))


@dataclass(frozen=True)
class SavePlans:
    """A whole save as planned: the layout, and each rank's plan and items."""

    layout: Layout
    ranks: Sequence[RankPlan]
    items: Sequence[Sequence[WriteItem]]
    owned: Sequence[Owned]
    differing: Mapping[str, Sequence[int]]
    """fqns of what ranks hold differently, and these ranks; the lowest one's is saved."""

    @property
    def moves(self) -> bool:
        """Whether any piece moves between ranks."""
        return any(rank.rounds for rank in self.ranks)


def plan_save(
    plans: Sequence[SavePlan], facts: Sequence[Facts], *, portable_dtypes: bool = False, sizes: Sizes | None = None
) -> SavePlans:
    """Lay out a checkpoint from every rank's plan and facts, and say what each rank writes and sends.

    Called by the coordinator; no I/O. Raises UnsupportedLayoutError naming the fqn where the ranks' boxes overlap, or
    do not cover the tensor.
    """
    with _no_collection():
        return _plan_save(plans, facts, portable_dtypes, sizes or Sizes())


@contextmanager
def _no_collection() -> Iterator[None]:
    """Hold the garbage collector off: it would look through millions of live objects again and again."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _plan_save(plans: Sequence[SavePlan], facts: Sequence[Facts], portable_dtypes: bool, sizes: Sizes) -> SavePlans:
    held = hold(facts)
    paths = _state_paths(plans)
    fqns = {*held.tensors, *held.objects}
    # In the order of the state dict, which the plans themselves lose where replicas are dealt over ranks.
    ordered = [fqn for fqn in paths if fqn in fqns] + sorted(fqns - paths.keys())
    entries = {fqn: paths.get(fqn) or StatePath.of((fqn,)) for fqn in ordered}
    by_path = _names.unique_paths([tuple(path) for path in entries.values()])
    node_paths = {fqn: by_path[tuple(path)] for fqn, path in entries.items()}
    grids = _Grids(sizes, held)
    tensors: dict[str, ArrayNode] = {}
    spreads = []
    for fqn, tensor in held.tensors.items():
        grid = grids.of(tensor)
        portable = portable_dtypes and tensor.dtype.portable is not tensor.dtype
        tensors[fqn] = ArrayNode(node_paths[fqn], grid, tensor.dtype, portable=portable)
        spreads.append(Spread(fqn, grid, tensor.dtype.itemsize, tensor.spread(), tensor.whole))
    layout = Layout(entries, node_paths, tensors, frozenset(held.objects), len(plans), held.hollow)
    owned = deal(spreads, len(plans))
    schedule_chunks(owned, len(plans), sizes.per_round)
    ranks = [_RankPlanner(rank, layout, held) for rank in range(len(plans))]
    for chunk in owned:
        _deal_chunk(chunk, held.tensors[chunk.spread.name], ranks)
    documents = _deal_documents(tensors.values(), len(plans))
    return SavePlans(
        layout,
        [rank.plan(documents[number]) for number, rank in enumerate(ranks)],
        [rank.items for rank in ranks],
        owned,
        held.differing,
    )


def _state_paths(plans: Iterable[SavePlan]) -> dict[str, StatePath]:
    """fqn -> path from DCP's ``planner_data``, which a planner that does not flatten leaves out."""
    paths: dict[str, StatePath] = {}
    for plan in plans:
        if isinstance(plan.planner_data, Mapping):
            paths |= {fqn: StatePath.of(path) for fqn, path in plan.planner_data.items()}
    return paths


class _Grids:
    """The grids of tensors: the same for the same boxes, so that thousands of alike layers are looked at once."""

    def __init__(self, sizes: Sizes, held: Holdings) -> None:
        total = sum(math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in held.tensors.values())
        self._max_chunk = sizes.max_chunk
        self._min_piece = default_min_piece_bytes(held.ranks) if sizes.min_piece is None else sizes.min_piece
        self._fill = default_fill_bytes(total, held.ranks) if sizes.fill is None else sizes.fill
        self._known: dict[tuple[Ints, int, tuple[Box, ...]], Grid] = {}

    def of(self, tensor: TensorHolders) -> Grid:
        boxes = tuple(tensor.boxes)
        key = (tensor.shape, tensor.dtype.itemsize, boxes)
        grid = self._known.get(key)
        if grid is None:
            grid = self._known[key] = choose_grid(
                tensor.shape,
                boxes,
                tensor.dtype.itemsize,
                max_chunk_bytes=self._max_chunk,
                min_piece_bytes=self._min_piece,
                fill_bytes=self._fill,
            )
        return grid


class _RankPlanner:
    """One rank's plan in the making."""

    def __init__(self, rank: int, layout: Layout, held: Holdings) -> None:
        self._layout = layout
        own = {fqn: item for fqn, (writer, item) in held.objects.items() if writer == rank}
        self.items: list[WriteItem] = list(own.values())
        self._places: dict[int, int] = {}
        self._object_paths = {fqn: layout.node_paths[fqn] for fqn in own}
        self.chunks: list[ChunkPlan] = []
        self.rounds: dict[int, Round] = {}

    def place(self, item: WriteItem) -> int:
        """An item's position among this rank's items."""
        known = self._places.get(id(item))
        if known is None:
            known = self._places[id(item)] = len(self.items)
            self.items.append(item)
        return known

    def round(self, number: int) -> Round:
        return self.rounds.setdefault(number, Round())

    def plan(self, documents: Mapping[str, Json]) -> RankPlan:
        named = {item.index.fqn for item in self.items} - self._object_paths.keys()
        arrays = {fqn: self._layout.tensors[fqn] for fqn in named}
        return RankPlan(arrays, self._object_paths, documents, self.chunks, dict(sorted(self.rounds.items())))


def _deal_chunk(chunk: Owned, tensor: TensorHolders, ranks: Sequence[_RankPlanner]) -> None:
    """Enter one chunk into the plans of its owner and of the ranks that send to it."""
    owner = ranks[chunk.owner]
    boxes = chunk.spread.held
    parts = []
    for (number, box), source in zip(chunk.pieces, chunk.sources, strict=True):
        place = ranks[source].place(tensor.boxes[boxes[number].box][source])
        if source == chunk.owner:
            parts.append(Part(box, place, None))
        else:
            parts.append(Part(box, None, source))
            ranks[source].round(chunk.round).sends.append(Sending(chunk.owner, place, box))
    planned = ChunkPlan(chunk.spread.name, chunk.index, tuple(parts))
    if chunk.round < 0:
        owner.chunks.append(planned)
    else:
        owner.round(chunk.round).chunks.append(planned)


def _deal_documents(nodes: Iterable[ArrayNode], world_size: int) -> list[dict[str, Json]]:
    """Node documents depend on the plan only, so the ranks write them side by side: dealt in turn."""
    documents = {node.path: node.document() for node in nodes}
    documents |= {path: group_document() for path in parent_groups(documents)}
    dealt: list[dict[str, Json]] = [{} for _ in range(world_size)]
    for number, path in enumerate(sorted(documents)):
        dealt[number % world_size][path] = documents[path]
    return dealt


def expect_piece(item: WriteItem, tensor: torch.Tensor, dtype: torch.dtype) -> None:
    """A planner's data must be what its plan said, or it would fill the wrong region, or be read as other numbers."""
    box = item_box(item)
    if tuple(tensor.shape) != box.shape or tensor.dtype != dtype:
        raise CheckpointError(
            f"{item.index.fqn!r}: this rank planned a piece of shape {box.shape} and {dtype} at {box.offset}, but its "
            f"tensor has shape {tuple(tensor.shape)} and {tensor.dtype}; was the state changed after planning, or the "
            "plan cached from another state? Save without plan caching then"
        )
