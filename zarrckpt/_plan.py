"""DCP plan items to chunk jobs: which array each tensor becomes, and which rank writes which chunk."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import WriteItem

from zarrckpt import _names
from zarrckpt._chunking import (
    MAX_CHUNK_BYTES,
    choose_grid,
    default_fill_bytes,
    default_min_piece_bytes,
)
from zarrckpt._compression import Compression
from zarrckpt._documents import ArrayNode, compressible
from zarrckpt._errors import CheckpointError
from zarrckpt._grid import Box, Grid, Ints
from zarrckpt._holdings import Holdings, TensorHolders, hold, item_box
from zarrckpt._markers import Marker
from zarrckpt._owners import Dealt, Numbers, Pieces, Spread, by_appearance, deal, schedule_chunks
from zarrckpt._plan_items import ChosenItems, RankItems
from zarrckpt._rank_plan import Arrays, Columns
from zarrckpt._rank_plan import ChunkPlan as ChunkPlan
from zarrckpt._rank_plan import RankPlan as RankPlan
from zarrckpt._rank_plan import Round as Round
from zarrckpt._root import parent_groups
from zarrckpt._stacks import stacked
from zarrckpt._state_path import StatePath
from zarrckpt._tensors import torch_dtype
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
    stack_of: Mapping[str, str] = field(default_factory=dict)
    """fqns of planned items that are in an entry of another name, see ``_stacks.Stacks``."""

    def marker(self, attempt: str, started: str) -> Marker:
        """What an attempt with this layout may write."""
        arrays = sorted([*(n.path for n in self.tensors.values()), *(self.node_paths[f] for f in self.objects)])
        return Marker(attempt, "", tuple(arrays), tuple(sorted(parent_groups(arrays))), started)


LEAST_FITTING = 16 << 20
"""For a smaller bound of memory, no smaller chunks are made: they would be too many."""


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
        # A chunk that is copied is in memory as a whole, but for local files; an eighth is for what is rounded up.
        fits = max(max_inflight - max_inflight // 8, LEAST_FITTING)
        return cls(min(max_chunk, fits), min_piece, fill, max(1, max_inflight // 4))


@dataclass(frozen=True)
class SavePlans:
    """A whole save as planned: the layout, and each rank's plan and items."""

    layout: Layout
    ranks: Sequence[RankPlan]
    items: Sequence[ChosenItems]
    dealt: Dealt
    differing: Mapping[str, Sequence[int]]
    """fqns of what ranks hold differently, and these ranks; the lowest one's is saved."""

    @property
    def moves(self) -> bool:
        """Whether any piece moves between ranks."""
        return bool((self.dealt.round >= 0).any())


def plan_save(
    ranks: Sequence[RankItems],
    paths: Mapping[str, StatePath],
    *,
    compression: Compression | None = None,
    sizes: Sizes | None = None,
) -> SavePlans:
    """Lay out a checkpoint from what every rank has, and say what each rank writes and sends.

    ``paths`` has each entry's place in the state dict, in its order. Called by the coordinator; no I/O. Raises
    UnsupportedLayoutError naming the fqn where the ranks' boxes overlap, or do not cover the tensor.
    """
    with _no_collection():
        return _plan_save(ranks, paths, compression, sizes or Sizes())


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


def _plan_save(
    ranks: Sequence[RankItems],
    paths: Mapping[str, StatePath],
    compression: Compression | None,
    sizes: Sizes,
) -> SavePlans:
    held = hold(ranks)
    fqns = {*held.tensors, *held.objects}
    # In the order of the state dict, which the plans themselves lose where replicas are dealt over ranks.
    ordered = [fqn for fqn in paths if fqn in fqns] + sorted(fqns - paths.keys())
    entries: Mapping[str, StatePath] = {fqn: paths.get(fqn) or StatePath.of((fqn,)) for fqn in ordered}
    stacks = stacked(held.tensors, entries)
    entries = stacks.paths
    by_path = _names.unique_paths([tuple(path) for path in entries.values()])
    node_paths = {fqn: by_path[tuple(path)] for fqn, path in entries.items()}
    grids = _Grids(sizes, held)
    tensors: dict[str, ArrayNode] = {}
    spreads = []
    for fqn, tensor in stacks.tensors.items():
        grid = grids.of(tensor)
        chosen = compression if compressible(grid, tensor.dtype) else None
        tensors[fqn] = ArrayNode(node_paths[fqn], grid, tensor.dtype, compression=chosen)
        spreads.append(Spread(fqn, grid, tensor.dtype.itemsize, tensor.held, tensor.whole))
    layout = Layout(entries, node_paths, tensors, frozenset(held.objects), len(ranks), held.hollow, stacks.stack_of)
    dealt = deal(spreads, len(ranks))
    schedule_chunks(dealt, sizes.per_round)
    planner = _RankPlanner(ranks, layout, held.objects, stacks.tensors, dealt)
    parts = [planner.part(rank) for rank in range(len(ranks))]
    return SavePlans(layout, [plan for plan, _ in parts], [items for _, items in parts], dealt, held.differing)


class _Grids:
    """The grids of tensors: the same for the same boxes, so that thousands of alike layers are looked at once."""

    def __init__(self, sizes: Sizes, held: Holdings) -> None:
        total = sum(math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in held.tensors.values())
        self._max_chunk = sizes.max_chunk
        self._min_piece = default_min_piece_bytes(held.ranks) if sizes.min_piece is None else sizes.min_piece
        self._fill = default_fill_bytes(total, held.ranks) if sizes.fill is None else sizes.fill
        self._known: dict[tuple[Ints, int, tuple[Box, ...]], Grid] = {}
        self._alike: dict[int, Grid] = {}

    def of(self, tensor: TensorHolders) -> Grid:
        """The grid of a tensor."""
        known = self._alike.get(id(tensor.held))
        if known is None:
            known = self._alike[id(tensor.held)] = self._of_boxes(tensor)
        return known

    def _of_boxes(self, tensor: TensorHolders) -> Grid:
        boxes = tensor.held.boxes
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


class _Rows:
    """Numbers, and where those of each rank are among them."""

    def __init__(self, ranks: Numbers, world_size: int) -> None:
        self._order = np.argsort(ranks, kind="stable")
        self._bounds = np.searchsorted(ranks[self._order], np.arange(world_size + 1)).tolist()

    def of(self, rank: int) -> Numbers:
        """Where a rank's are, in their order."""
        return self._order[self._bounds[rank] : self._bounds[rank + 1]]


class _RankPlanner:
    """Cuts a whole plan into the ranks' parts. A row a chunk or a piece, in the order of the tensors."""

    def __init__(
        self,
        ranks: Sequence[RankItems],
        layout: Layout,
        objects: Mapping[str, tuple[int, int]],
        tensors: Mapping[str, TensorHolders],
        dealt: Dealt,
    ) -> None:
        self._ranks = ranks
        self._layout = layout
        self._dealt = dealt
        self._arrays = Arrays(layout.tensors)
        stacks = {*layout.stack_of.values()}
        self._stacks = {number: t.held for number, t in enumerate(tensors.values()) if t.fqn in stacks}
        """The arrays, by number, in which a rank's item has another box than the rank knows."""
        self._objects: list[list[tuple[str, int]]] = [[] for _ in ranks]
        for fqn, (rank, place) in objects.items():
            self._objects[rank].append((fqn, place))
        rows = [*enumerate(zip(tensors.values(), dealt.geometries, dealt.sources, strict=True))]
        self._piece_array = _joined(np.full(len(g.pieces.held), number) for number, (_, g, _) in rows)
        self._piece_chunk = _joined(dealt.first[number] + g.pieces.chunk for number, (_, g, _) in rows)
        self._piece_source = _joined(dealt.sources)
        # The place among the source's items.
        self._piece_place = _joined(t.places[t.held.places(g.pieces.held, source)] for _, (t, g, source) in rows)
        self._piece_owner = dealt.owner[self._piece_chunk]
        self._piece_bounds = _bounds([geometry.pieces for geometry in dealt.geometries])
        self._chunk_array = np.repeat(np.arange(len(rows)), np.diff(dealt.first))
        self._chunk_cell = _joined(geometry.pieces.number for geometry in dealt.geometries)
        self._chunk_parts = _joined(np.diff(geometry.pieces.first) for geometry in dealt.geometries)
        self._written = _Rows(self._piece_owner, len(ranks))
        self._held = _Rows(self._piece_source, len(ranks))
        self._owned = _Rows(dealt.owner, len(ranks))

    def part(self, rank: int) -> tuple[RankPlan, ChosenItems]:
        """What one rank does, and the items that it does it with: those of values first."""
        table, objects = self._ranks[rank].table, self._objects[rank]
        held = self._held.of(rank)
        appears, item = by_appearance(self._piece_place[held])
        item += len(objects)
        places = np.append([place for _, place in objects], self._piece_place[held][appears]).astype(np.int64)
        arrays = np.append(np.full(len(objects), -1), self._piece_array[held][appears])
        columns = self._columns(rank, held, item)
        boxes, numbers = list(table.boxes), table.box[places]
        for place in np.flatnonzero(np.isin(arrays, [*self._stacks])).tolist():
            holders = self._stacks[int(arrays[place])]
            numbers[place] = len(boxes)
            boxes.append(holders.boxes[int(np.flatnonzero(holders.ranks == rank)[0])])
        plan = RankPlan(
            (rank, len(self._ranks)),
            self._arrays,
            columns,
            {fqn: self._layout.node_paths[fqn] for fqn, _ in objects},
            _small(arrays),
            boxes,
            numbers,
        )
        return plan, ChosenItems(table, _small(places))

    def _columns(self, rank: int, held: Numbers, item: Numbers) -> Columns:
        chunks, parts = self._owned.of(rank), self._written.of(rank)
        foreign = self._piece_source[parts] != rank
        # Both are in ascending order: what this rank both holds and writes.
        own_item = np.full(len(parts), -1)
        own_item[~foreign] = item[np.searchsorted(held, parts[~foreign])]
        sends = self._piece_owner[held] != rank
        sent = self._piece_chunk[held[sends]]
        columns = (
            self._chunk_array[chunks],
            self._chunk_cell[chunks],
            self._dealt.round[chunks],
            self._chunk_parts[chunks],
            np.where(foreign, self._piece_source[parts], -1),
            own_item,
            self._piece_bounds[parts[foreign]],
            self._dealt.round[sent],
            self._piece_owner[held[sends]],
            item[sends],
            self._chunk_cell[sent],
        )
        return Columns(*map(_small, columns))


def _joined(arrays: Iterable[Numbers]) -> Numbers:
    return np.concatenate([np.zeros(0, np.int64), *arrays])


def _bounds(pieces: Sequence[Pieces]) -> Numbers:
    """Offset and shape of every piece, a row each, as long as the most dimensions need."""
    dims = max((one.offset.shape[1] for one in pieces), default=0)
    padded: dict[int, Numbers] = {}
    for one in pieces:
        if id(one) not in padded:
            more = ((0, 0), (0, dims - one.offset.shape[1]))
            padded[id(one)] = np.hstack([np.pad(one.offset, more), np.pad(one.shape, more)])
    return np.concatenate([np.zeros((0, 2 * dims), np.int64), *(padded[id(one)] for one in pieces)])


def _small(numbers: Numbers) -> NDArray[Any]:
    """The same numbers in as few bytes as hold them."""
    least, most = int(numbers.min(initial=0)), int(numbers.max(initial=0))
    return numbers.astype(np.promote_types(np.min_scalar_type(least), np.min_scalar_type(min(-1, ~most))))


def describe(metadata: Metadata, layout: Layout) -> None:
    """Fill in DCP's metadata of a save: one box a tensor, since our reader can read any."""
    for fqn in layout.paths:
        node = layout.tensors.get(fqn)
        if node is None:
            metadata.state_dict_metadata[fqn] = BytesStorageMetadata()
            continue
        size = torch.Size(node.grid.shape)
        whole = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
        properties = TensorProperties(dtype=torch_dtype(node))
        metadata.state_dict_metadata[fqn] = TensorStorageMetadata(properties, size, [whole])
    metadata.planner_data = dict(layout.paths)


def expect_piece(item: WriteItem, tensor: torch.Tensor, dtype: torch.dtype) -> None:
    """A planner's data must be what its plan said, or it would fill the wrong region, or be read as other numbers."""
    box = item_box(item)
    if tuple(tensor.shape) != box.shape or tensor.dtype != dtype:
        raise CheckpointError(
            f"{item.index.fqn!r}: this rank planned a piece of shape {box.shape} and {dtype} at {box.offset}, but its "
            f"tensor has shape {tuple(tensor.shape)} and {tensor.dtype}; was the state changed after planning, or the "
            "plan cached from another state? Save without plan caching then"
        )
