"""A whole save as planned: which array each tensor becomes, which rank writes which chunk. The same on every rank."""

from __future__ import annotations

import gc
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

from zarrckpt._commit.marker import Marker
from zarrckpt._format import names
from zarrckpt._format.compression import Compression
from zarrckpt._format.documents import ArrayNode, compressible
from zarrckpt._format.grid import Box, Grid, Ints
from zarrckpt._format.root import parent_groups
from zarrckpt._format.state_path import StatePath
from zarrckpt._format.wire import record
from zarrckpt._plan.chunking import (
    MAX_CHUNK_BYTES,
    choose_grid,
    default_fill_bytes,
    default_min_piece_bytes,
)
from zarrckpt._plan.holders import GlobalState, GlobalTensor
from zarrckpt._plan.owners import Dealt, Holders, Spread, deal
from zarrckpt._plan.rank_plan import RankPlan, rank_plan


@dataclass(frozen=True)
class Layout:
    """The whole checkpoint as planned: every entry's place in the state dict and in the tree."""

    paths: Mapping[str, StatePath]
    node_paths: Mapping[str, str]
    tensors: Mapping[str, ArrayNode]
    objects: frozenset[str]
    """fqns of non-tensor entries; whether each becomes a value or a blob is known when it is written."""
    world_size: int

    def marker(self, save_id: str, started: str) -> Marker:
        """What an attempt with this layout may write."""
        arrays = sorted([*(n.path for n in self.tensors.values()), *(self.node_paths[f] for f in self.objects)])
        return Marker(save_id, "", tuple(arrays), tuple(sorted(parent_groups(arrays))), started)


@record
@dataclass(frozen=True)
class Sizes:
    """The numbers of bytes that steer a plan, see :class:`zarrckpt.SaveOptions`. None: chosen from ranks and state."""

    max_chunk: int = MAX_CHUNK_BYTES
    min_piece: int | None = None
    fill: int | None = None


@record
@dataclass(frozen=True)
class PlanOptions:
    """What the coordinator decides for all ranks."""

    compression: Compression | None = None
    sizes: Sizes = Sizes()


@dataclass(frozen=True)
class SavePlan:
    """A whole save as planned."""

    state: GlobalState
    layout: Layout
    dealt: Dealt
    writers: Mapping[str, int]
    """Non-tensor entries, with the rank that writes each."""

    @property
    def moves(self) -> bool:
        """Whether any piece moves between ranks."""
        return bool((self.dealt.bundle >= 0).any())

    def part(self, rank: int) -> RankPlan:
        """What one rank does."""
        paths = {fqn: self.layout.node_paths[fqn] for fqn, writer in self.writers.items() if writer == rank}
        return rank_plan(rank, self.layout.tensors, self.dealt, paths)

    @cached_property
    def digest(self) -> bytes:
        """16 bytes of all that ranks must have computed alike."""
        nodes = [(fqn, n.path, n.grid, n.dtype.name, n.compression) for fqn, n in self.layout.tensors.items()]
        told = repr((nodes, sorted(self.writers.items()), [*self.layout.node_paths.items()]))
        made = hashlib.blake2b(told.encode("utf-8", "surrogatepass"), digest_size=16)
        made.update(self.dealt.owner.astype("<i8").tobytes())
        return made.digest()


def plan_save(state: GlobalState, options: PlanOptions) -> SavePlan:
    """Lay out a checkpoint from what all ranks hold, and choose the rank that writes each chunk and each value.

    No I/O. Every rank calls it with the same arguments.
    """
    with _no_collection():
        by_path = names.unique_paths([tuple(path) for path in state.paths.values()])
        node_paths = {fqn: by_path[tuple(path)] for fqn, path in state.paths.items()}
        grids = _Grids(options.sizes, state)
        tensors: dict[str, ArrayNode] = {}
        spreads = []
        for fqn, tensor in state.tensors.items():
            grid = grids.of(tensor)
            chosen = options.compression if compressible(grid, tensor.dtype) else None
            tensors[fqn] = ArrayNode(node_paths[fqn], grid, tensor.dtype, compression=chosen)
            spreads.append(Spread(fqn, grid, tensor.dtype.itemsize, tensor.held, tensor.whole))
        layout = Layout(state.paths, node_paths, tensors, frozenset(state.values), state.ranks)
        # In turn: they are small, and whoever writes them all would be the last.
        writers = {fqn: int(ranks[turn % len(ranks)]) for turn, (fqn, ranks) in enumerate(state.values.items())}
        return SavePlan(state, layout, deal(spreads, state.ranks), writers)


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


class _Grids:
    """The grids of tensors: the same for the same boxes, so that thousands of alike layers are looked at once."""

    def __init__(self, sizes: Sizes, state: GlobalState) -> None:
        total = sum(math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in state.tensors.values())
        self._max_chunk = sizes.max_chunk
        self._min_piece = default_min_piece_bytes(state.ranks) if sizes.min_piece is None else sizes.min_piece
        self._fill = default_fill_bytes(total, state.ranks) if sizes.fill is None else sizes.fill
        self._known: dict[tuple[Ints, int, Sequence[Box]], Grid] = {}
        self._alike: dict[tuple[Holders, int], Grid] = {}

    def of(self, tensor: GlobalTensor) -> Grid:
        """The grid of a tensor."""
        key = (tensor.held, tensor.dtype.itemsize)
        if key not in self._alike:
            self._alike[key] = self._of_boxes(tensor)
        return self._alike[key]

    def _of_boxes(self, tensor: GlobalTensor) -> Grid:
        boxes = tensor.held.boxes
        key = (tensor.shape, tensor.dtype.itemsize, boxes)
        if key not in self._known:
            self._known[key] = choose_grid(
                tensor.shape,
                boxes,
                tensor.dtype.itemsize,
                max_chunk_bytes=self._max_chunk,
                min_piece_bytes=self._min_piece,
                fill_bytes=self._fill,
            )
        return self._known[key]
