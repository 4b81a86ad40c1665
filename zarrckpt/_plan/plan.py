"""The plan of a save: the array of each tensor and the rank that writes each chunk. Every rank computes the same."""

from __future__ import annotations

import gc
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property

from zarrckpt._commit.marker import Marker
from zarrckpt._errors import UnsupportedValueError
from zarrckpt._format import names
from zarrckpt._format.compression import Compression
from zarrckpt._format.documents import ArrayNode, compressible
from zarrckpt._format.grid import Box, Grid, Ints
from zarrckpt._format.hashes import MAX_EQUAL_HASHES, hashes_collide
from zarrckpt._format.module_versions import Versions
from zarrckpt._format.root import parent_groups
from zarrckpt._format.state_path import StatePath
from zarrckpt._format.wire import record
from zarrckpt._plan.chunking import (
    MAX_CHUNK_BYTES,
    choose_grid,
    default_fill_bytes,
    default_min_piece_bytes,
)
from zarrckpt._plan.geometry import Holders
from zarrckpt._plan.global_state import GlobalState
from zarrckpt._plan.owners import ChunkOwners, PlannedTensor, choose_owners
from zarrckpt._plan.rank_plan import RankPlan, make_rank_plan


@dataclass(frozen=True)
class Layout:
    """The planned checkpoint: the state path and the node path of every entry."""

    paths: Mapping[str, StatePath]
    node_paths: Mapping[str, str]
    tensors: Mapping[str, ArrayNode]
    non_tensors: frozenset[str]
    """fqns of non-tensor entries. Each becomes a value or a blob when it is written."""
    world_size: int
    optimizers: Mapping[str, str]
    """The names of the classes of optimizers, by fqn."""
    versions: Versions
    """The versions of modules."""
    keys: Mapping[str, object]
    """The key of each entry and container, by node path."""

    def marker(self, save_id: str, started: str) -> Marker:
        """Return the marker of an attempt with this layout. It lists the nodes that the attempt may write."""
        arrays = sorted([*(n.path for n in self.tensors.values()), *(self.node_paths[f] for f in self.non_tensors)])
        return Marker(save_id, "", "", started, tuple(arrays), tuple(sorted(parent_groups(arrays))))


@record
@dataclass(frozen=True)
class PlanOptions:
    """Options that the coordinator chooses for all ranks."""

    compression: Compression | None = None
    max_chunk_bytes: int = MAX_CHUNK_BYTES
    portable: bool = False
    """Whether types that few readers know are stored as unsigned integers of their size."""
    grids: Mapping[str, Grid] = field(default_factory=dict)
    """The chunk grids of a base by path. A tensor keeps its grid if each of its boxes consists of whole chunks."""

    def merging(self, nbytes: int, ranks: int) -> dict[str, int]:
        """Return the arguments of :func:`choose_grid` for merging pieces in a state of this size on these ranks."""
        return {"min_piece_bytes": default_min_piece_bytes(ranks), "fill_bytes": default_fill_bytes(nbytes, ranks)}


@dataclass(frozen=True)
class SavePlan:
    """The plan of a save over all ranks."""

    state: GlobalState
    layout: Layout
    chunk_owners: ChunkOwners
    writers: Mapping[str, int]
    """The rank that writes each non-tensor entry."""

    @property
    def moves_pieces(self) -> bool:
        """Whether any piece moves between ranks."""
        return bool((self.chunk_owners.bundle >= 0).any())

    def rank_plan(self, rank: int) -> RankPlan:
        """Return the plan of one rank."""
        paths = {fqn: self.layout.node_paths[fqn] for fqn, writer in self.writers.items() if writer == rank}
        return make_rank_plan(rank, self.layout.tensors, self.chunk_owners, paths)

    def keeps(self, grids: Mapping[str, Grid]) -> bool:
        """Whether every tensor has the grid of its path, if there is one for its shape."""
        nodes = self.layout.tensors.values()
        return all(
            node.grid == grid for node in nodes if (grid := grids.get(node.path)) and grid.shape == node.grid.shape
        )

    @cached_property
    def digest(self) -> bytes:
        """A digest of 16 bytes that must be equal on all ranks."""
        tensors = self.layout.tensors.items()
        nodes = [(fqn, n.path, n.grid, n.dtype.name, n.portable, n.compression, n.order) for fqn, n in tensors]
        text = repr((nodes, sorted(self.writers.items()), [*self.layout.node_paths.items()]))
        digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16)
        digest.update(self.chunk_owners.owner.astype("<i8").tobytes())
        return digest.digest()


def plan_save(state: GlobalState, options: PlanOptions) -> SavePlan:
    """Plan a checkpoint of the global state, and choose the rank that writes each chunk and each value.

    Every rank calls it with the same arguments. No I/O.
    """
    with _without_garbage_collection():
        by_path = names.unique_paths([tuple(path) for path in state.paths.values()])
        node_paths = {fqn: by_path[tuple(path)] for fqn, path in state.paths.items()}
        keys = _keys_by_path(state.paths, node_paths)
        total = sum(math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in state.tensors.values())
        sizes = {"max_chunk_bytes": options.max_chunk_bytes, **options.merging(total, state.world_size)}
        # Equal boxes give equal grids, so thousands of equal layers are computed once.
        grids: dict[tuple[Holders, int], Grid] = {}
        kept: dict[tuple[Holders, Grid], bool] = {}
        tensors: dict[str, ArrayNode] = {}
        planned = []
        for fqn, tensor in state.tensors.items():
            key = (tensor.holders, tensor.dtype.itemsize)
            if key not in grids:
                grids[key] = choose_grid(tensor.shape, tensor.holders.boxes, tensor.dtype.itemsize, **sizes)
            grid = grids[key]
            earlier = options.grids.get(node_paths[fqn])
            if earlier is not None and earlier != grid:
                holders = tensor.holders
                if (holders, earlier) not in kept:
                    largest = options.max_chunk_bytes // tensor.dtype.itemsize
                    kept[holders, earlier] = _can_keep(earlier, tensor.shape, holders.boxes, largest)
                grid = earlier if kept[holders, earlier] else grid
            chosen = options.compression if compressible(grid, tensor.dtype) else None
            portable = options.portable and not tensor.dtype.core
            tensors[fqn] = ArrayNode(node_paths[fqn], grid, tensor.dtype, portable, chosen, tensor.order)
            planned.append(PlannedTensor(fqn, grid, tensor.dtype.itemsize, tensor.holders, tensor.whole))
        shared = (state.world_size, state.optimizers, state.versions, keys)
        layout = Layout(state.paths, node_paths, tensors, frozenset(state.values), *shared)
        # Values are written by their ranks in turn, because one rank that wrote all of them would finish last.
        writers = {fqn: int(ranks[turn % len(ranks)]) for turn, (fqn, ranks) in enumerate(state.values.items())}
        return SavePlan(state, layout, choose_owners(planned, state.world_size), writers)


def _keys_by_path(paths: Mapping[str, StatePath], node_paths: Mapping[str, str]) -> dict[str, object]:
    """Return the key of each entry and container by its node path.

    Raises UnsupportedValueError for different keys with one name (0 and "0"), and for equal keys with two names (1 on
    one rank and True on another one), and for many keys with one hash, because readers refuse them.
    """
    keys: dict[str, object] = {}
    owners: dict[tuple[str, object], str] = {}
    for fqn, path in paths.items():
        above = ""
        for key, name in zip(path.keys, node_paths[fqn].split("/"), strict=True):
            node = f"{above}/{name}" if above else name
            if type(keys.setdefault(node, key)) is not type(key) or owners.setdefault((above, key), node) != node:
                raise UnsupportedValueError(
                    f"the state cannot be saved: entry {fqn!r:.200} contradicts another entry by the key "
                    f"{key!r:.80}. Keys such as 0 and '0' have one name: use one type of key"
                )
            above = node
    if not {str}.issuperset(map(type, keys.values())):
        whole: dict[str, tuple[object, ...]] = {"": ()}
        for (above, key), node in owners.items():  # those of containers are before those of their entries
            whole[node] = (*whole[above], key)
        if hashes_collide(whole.values()):
            raise UnsupportedValueError(
                f"the state cannot be saved: more than {MAX_EQUAL_HASHES} of its keys, with the levels above them, "
                "have the same hash. Rename some of them"
            )
    return keys


def _can_keep(grid: Grid, shape: Ints, boxes: Sequence[Box], largest: int) -> bool:
    """Whether each box consists of whole chunks of a grid, and a chunk has at most ``largest`` elements."""
    if grid.shape != shape or math.prod(grid.chunk_shape) > largest:
        return False
    return all(
        begin % step == 0 and ((begin + length) % step == 0 or begin + length == n)
        for box in boxes
        for begin, length, step, n in zip(box.offset, box.shape, grid.chunk_shape, shape, strict=True)
    )


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Disable the garbage collector, which would traverse millions of live objects repeatedly."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
