"""DCP plan items to chunk jobs: which array each tensor becomes, and which rank writes which chunk."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from zarrckpt import _dtypes, _names
from zarrckpt._documents import ArrayNode, Json, group_document
from zarrckpt._errors import CheckpointError, UnsupportedLayoutError, UnsupportedValueError
from zarrckpt._grid import MAX_CHUNK_BYTES, Box, Grid, fit_grid
from zarrckpt._root import Marker, parent_groups
from zarrckpt._state_path import StatePath


@dataclass(frozen=True)
class Layout:
    """The whole checkpoint as planned: every entry's place in the state dict and in the tree."""

    paths: Mapping[str, StatePath]
    node_paths: Mapping[str, str]
    tensors: Mapping[str, ArrayNode]
    objects: frozenset[str]
    """fqns of non-tensor entries; whether each becomes a value or a blob is known when it is written."""
    world_size: int

    def marker(self, attempt: str, started: str) -> Marker:
        """What an attempt with this layout may write."""
        arrays = sorted([*(n.path for n in self.tensors.values()), *(self.node_paths[f] for f in self.objects)])
        return Marker(attempt, "", tuple(arrays), tuple(sorted(parent_groups(arrays))), started)


@dataclass(frozen=True)
class RankPlan:
    """What one rank writes besides its items' data. DCP may cache it with the plan, so it is of no one attempt."""

    arrays: Mapping[str, ArrayNode]
    object_paths: Mapping[str, str]
    documents: Mapping[str, Json]


def item_box(item: WriteItem) -> Box:
    """The region of the global tensor that an item holds (DCP calls it a chunk)."""
    assert item.tensor_data is not None
    return Box(tuple(item.tensor_data.chunk.offsets), tuple(item.tensor_data.chunk.sizes))


def check_item(item: WriteItem) -> None:
    """Refuse what has no place in a checkpoint before anything is planned. Raises UnsupportedValueError."""
    if item.tensor_data is None:
        return
    properties = item.tensor_data.properties
    if properties.layout != torch.strided:
        raise UnsupportedValueError(
            f"{item.index.fqn!r} is a tensor with layout {properties.layout}; only strided (dense) tensors can be "
            "saved: convert it with .to_dense(), or save its parts"
        )
    _dtype(item.index.fqn, properties.dtype)


def _dtype(fqn: str, dtype: torch.dtype) -> _dtypes.DType:
    try:
        return _dtypes.by_torch_name(str(dtype))
    except UnsupportedValueError as err:
        raise UnsupportedValueError(f"{fqn!r}: {err}") from err


def plan_save(
    plans: Sequence[SavePlan],
    *,
    portable_dtypes: bool = False,
    max_chunk_bytes: int = MAX_CHUNK_BYTES,
) -> tuple[Layout, list[RankPlan]]:
    """Lay out a checkpoint from every rank's plan (replicas removed), and say what each rank writes.

    Called by the coordinator; no I/O. Raises UnsupportedLayoutError naming the fqn where the ranks' boxes do not fit a
    regular chunk grid, overlap, or do not cover the tensor.
    """
    paths = _state_paths(plans)
    fqns = {item.index.fqn for plan in plans for item in plan.items}
    # In the order of the state dict, which the plans themselves lose where replicas are dealt over ranks.
    ordered = [fqn for fqn in paths if fqn in fqns] + sorted(fqns - paths.keys())
    entries = {fqn: paths.get(fqn) or StatePath.of((fqn,)) for fqn in ordered}
    by_path = _names.unique_paths([tuple(path) for path in entries.values()])
    node_paths = {fqn: by_path[tuple(path)] for fqn, path in entries.items()}
    tensors = {
        fqn: _array_node(fqn, node_paths[fqn], items, portable_dtypes, max_chunk_bytes)
        for fqn, items in _tensor_items(plans).items()
    }
    layout = Layout(entries, node_paths, tensors, frozenset(fqns - tensors.keys()), len(plans))
    documents = _deal_documents(tensors.values(), len(plans))
    ranks = []
    for rank, plan in enumerate(plans):
        own = {item.index.fqn for item in plan.items}
        ranks.append(
            RankPlan(
                arrays={fqn: tensors[fqn] for fqn in own if fqn in tensors},
                object_paths={fqn: node_paths[fqn] for fqn in own if fqn not in tensors},
                documents=documents[rank],
            )
        )
    return layout, ranks


def _state_paths(plans: Iterable[SavePlan]) -> dict[str, StatePath]:
    """fqn -> path from DCP's ``planner_data``, which a planner that does not flatten leaves out."""
    paths: dict[str, StatePath] = {}
    for plan in plans:
        if isinstance(plan.planner_data, Mapping):
            paths |= {fqn: StatePath.of(path) for fqn, path in plan.planner_data.items()}
    return paths


def _tensor_items(plans: Iterable[SavePlan]) -> dict[str, list[WriteItem]]:
    items: dict[str, list[WriteItem]] = {}
    for plan in plans:
        for item in plan.items:
            if item.type != WriteItemType.BYTE_IO:
                items.setdefault(item.index.fqn, []).append(item)
    return items


def _array_node(
    fqn: str, path: str, items: Sequence[WriteItem], portable_dtypes: bool, max_chunk_bytes: int
) -> ArrayNode:
    first = items[0].tensor_data
    assert first is not None
    shape, torch_dtype = tuple(first.size), first.properties.dtype
    for item in items:
        data = item.tensor_data
        assert data is not None
        if tuple(data.size) != shape or data.properties.dtype != torch_dtype:
            raise UnsupportedLayoutError(
                f"{fqn!r} is {torch_dtype} {shape} on one rank and {data.properties.dtype} {tuple(data.size)} on "
                "another: give the two different names"
            )
    dtype = _dtype(fqn, torch_dtype)
    boxes = [box for item in items if (box := item_box(item)).size]
    grid = fit_grid(shape, boxes, dtype.itemsize, max_chunk_bytes)
    if grid is None:
        raise UnsupportedLayoutError(
            f"the shards of {fqn!r} (shape {shape}) do not fit a regular chunk grid: {_shown(boxes)}; "
            "shard it evenly, or save it from one rank (full_tensor())"
        )
    _check_cover(fqn, grid, boxes)
    return ArrayNode(path, grid, dtype, portable=portable_dtypes and dtype.portable is not dtype)


def _shown(boxes: Sequence[Box]) -> str:
    shown = [f"offset {box.offset} shape {box.shape}" for box in sorted(boxes)[:6]]
    return "; ".join(shown) + ("; ..." if len(boxes) > 6 else "")


def _check_cover(fqn: str, grid: Grid, boxes: Sequence[Box]) -> None:
    """Every chunk must have exactly one owner."""
    owned: set[tuple[int, ...]] = set()
    total = 0
    for box in boxes:
        if any(o < 0 or o + n > s for o, n, s in zip(*box, grid.shape, strict=True)):
            raise UnsupportedLayoutError(f"a shard of {fqn!r} is outside its shape {grid.shape}: {_shown([box])}")
        chunks = list(grid.chunks_of(box))
        owned.update(chunks)
        total += len(chunks)
    if total != len(owned):
        raise UnsupportedLayoutError(f"shards of {fqn!r} (shape {grid.shape}) overlap: {_shown(boxes)}")
    if len(owned) != grid.num_chunks:
        raise UnsupportedLayoutError(
            f"the shards of {fqn!r} cover {len(owned)} of {grid.num_chunks} chunks of shape {grid.chunk_shape}: "
            f"{_shown(boxes)}; is a rank missing from the save, or its state dict without this key?"
        )


def _deal_documents(nodes: Iterable[ArrayNode], world_size: int) -> list[dict[str, Json]]:
    """Node documents depend on the plan only, so the ranks write them side by side: dealt in turn."""
    documents = {node.path: node.document() for node in nodes}
    documents |= {path: group_document() for path in parent_groups(documents)}
    dealt: list[dict[str, Json]] = [{} for _ in range(world_size)]
    for number, path in enumerate(sorted(documents)):
        dealt[number % world_size][path] = documents[path]
    return dealt


def expect_piece(fqn: str, tensor: torch.Tensor, box: Box, dtype: torch.dtype) -> None:
    """A planner's data must be what its plan said, or it would fill the wrong region, or be read as other numbers."""
    if tuple(tensor.shape) != box.shape or tensor.dtype != dtype:
        raise CheckpointError(
            f"{fqn!r}: this rank planned a piece of shape {box.shape} and {dtype} at {box.offset}, but its tensor has "
            f"shape {tuple(tensor.shape)} and {tensor.dtype}; was the state changed after planning, or the plan cached "
            "from another state? Save without plan caching then"
        )
