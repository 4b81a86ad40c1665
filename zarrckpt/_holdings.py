"""Who holds what: the items of all ranks, by tensor and by box, before anything is decided about them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from zarrckpt import _dtypes
from zarrckpt._chunking import overlapping
from zarrckpt._digests import disagreeing, is_empty_dict
from zarrckpt._errors import UnsupportedLayoutError, UnsupportedValueError
from zarrckpt._grid import Box, Ints
from zarrckpt._mail import Facts, Notes, own_facts
from zarrckpt._owners import Held


@dataclass
class TensorHolders:
    """One tensor: its boxes, and for each the ranks that hold it, with their items."""

    fqn: str
    shape: Ints
    torch_dtype: torch.dtype
    dtype: _dtypes.DType
    boxes: dict[Box, dict[int, WriteItem]] = field(default_factory=dict)
    whole: bool = False
    """Whether one rank must write all of it, see ``_owners.Spread``."""

    def spread(self) -> list[Held]:
        return [Held(box, tuple(ranks)) for box, ranks in self.boxes.items()]


@dataclass(frozen=True)
class Holdings:
    """The state of all ranks."""

    tensors: Mapping[str, TensorHolders]
    objects: Mapping[str, tuple[int, WriteItem]]
    """Non-tensor entries, with the rank that writes each."""
    ranks: int
    """How many ranks save."""
    differing: Mapping[str, Sequence[int]]
    """fqns of what ranks hold differently, and these ranks: only the lowest one's counts."""
    hollow: frozenset[str] = frozenset()
    """fqns of empty dicts that are no entries, since other ranks have what is in them."""


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


def with_facts(plan: SavePlan) -> SavePlan:
    """A rank's plan with what the coordinator must know. Raises UnsupportedValueError for what can't be saved."""
    for item in plan.items:
        check_item(item)
    notes = plan.storage_data if isinstance(plan.storage_data, Notes) else None
    return dataclasses.replace(plan, storage_data=own_facts(plan.items, notes))


def item_box(item: WriteItem) -> Box:
    """The region of the global tensor that an item holds (DCP calls it a chunk)."""
    assert item.tensor_data is not None
    return _box(tuple(item.tensor_data.chunk.offsets), tuple(item.tensor_data.chunk.sizes))


@lru_cache(maxsize=1 << 16)
def _box(offset: Ints, shape: Ints) -> Box:
    # A coordinator sees each box once for every layer and every moment of an optimizer.
    return Box(offset, shape)


def hold(facts: Sequence[Facts]) -> Holdings:
    """Gather what all ranks hold. Called by the coordinator; no I/O.

    Raises UnsupportedLayoutError naming the fqn where ranks have another shape, dtype or kind under one name, or boxes
    that overlap or leave gaps.
    """
    differing = disagreeing([fact.notes.digests if fact.notes else {} for fact in facts])
    tensors: dict[str, TensorHolders] = {}
    objects: dict[str, dict[int, WriteItem]] = {}
    for rank, fact in enumerate(facts):
        for item in fact.items:
            if differing and rank != min(differing.get(item.index, [rank])):
                continue
            if item.type == WriteItemType.BYTE_IO:
                objects.setdefault(item.index.fqn, {})[rank] = item
            else:
                _add(tensors, rank, item)
    hollow = _hollow(objects, facts)
    for fqn in hollow:
        del objects[fqn]
    for fqn in sorted(tensors.keys() & objects.keys()):
        raise UnsupportedLayoutError(
            f"{fqn!r} is a tensor on one rank and a value on rank {min(objects[fqn])}: give the two different names"
        )
    lowest = any(fact.notes is not None and fact.notes.lowest_rank_saves for fact in facts)
    covered: set[tuple[Ints, tuple[Box, ...]]] = set()
    for tensor in tensors.values():
        layout = (tensor.shape, tuple(tensor.boxes))
        if layout not in covered:  # layers are alike
            _check_cover(tensor)
            covered.add(layout)
        if lowest:
            tensor.boxes = {box: _first(ranks) for box, ranks in tensor.boxes.items()}
        tensor.whole = _may_differ(tensor, facts)
    return Holdings(tensors, _writers_of(objects, facts), len(facts), _by_fqn(differing), hollow)


def _hollow(objects: Mapping[str, Mapping[int, WriteItem]], facts: Sequence[Facts]) -> frozenset[str]:
    """Empty dicts of ranks whose share of a dict is nothing, where other ranks have its entries.

    A full state dict is rank 0's alone, and empty on the others: the same group, and no entry beside it.
    """
    empty = [
        fqn
        for fqn, items in objects.items()
        if all((notes := facts[r].notes) and is_empty_dict(notes.digests.get(i.index)) for r, i in items.items())
    ]
    names = [{item.index.fqn for item in fact.items} if empty else set() for fact in facts]
    return frozenset(
        fqn for fqn in empty if any(fqn not in own and any(n.startswith(f"{fqn}.") for n in own) for own in names)
    )


def _add(tensors: dict[str, TensorHolders], rank: int, item: WriteItem) -> None:
    data, fqn = item.tensor_data, item.index.fqn
    assert data is not None
    shape, dtype = data.size, data.properties.dtype
    known = tensors.get(fqn)
    if known is None:
        known = tensors[fqn] = TensorHolders(fqn, tuple(shape), dtype, _dtype(fqn, dtype))
    elif known.shape != shape or known.torch_dtype != dtype:
        raise UnsupportedLayoutError(
            f"{fqn!r} is {known.torch_dtype} {known.shape} on one rank and {dtype} {tuple(shape)} on rank {rank}: "
            "give the two different names"
        )
    box = item_box(item)
    if box.size:
        known.boxes.setdefault(box, {})[rank] = item


def _dtype(fqn: str, dtype: torch.dtype) -> _dtypes.DType:
    try:
        return _dtypes.by_torch_name(str(dtype))
    except UnsupportedValueError as err:
        raise UnsupportedValueError(f"{fqn!r}: {err}") from err


def _first(ranks: Mapping[int, WriteItem]) -> dict[int, WriteItem]:
    rank = min(ranks)
    return {rank: ranks[rank]}


def _check_cover(tensor: TensorHolders) -> None:
    """The boxes must tile the tensor: every element has one place that it comes from."""
    fqn, shape, boxes = tensor.fqn, tensor.shape, list(tensor.boxes)
    for box in boxes:
        if any(o < 0 or o + n > s for o, n, s in zip(*box, shape, strict=True)):
            raise UnsupportedLayoutError(f"a shard of {fqn!r} is outside its shape {shape}: {_shown([box])}")
    pair = overlapping(boxes)
    if pair is not None:
        raise UnsupportedLayoutError(f"shards of {fqn!r} (shape {shape}) overlap: {_shown(pair)}")
    size, found = Box((0,) * len(shape), shape).size, sum(box.size for box in boxes)
    if size != found:
        raise UnsupportedLayoutError(
            f"the shards of {fqn!r} hold {found} of the {size} elements of shape {shape}: {_shown(boxes)}; is a rank "
            "missing from the save, or its state dict without this key?"
        )


def _shown(boxes: Sequence[Box]) -> str:
    shown = [f"offset {box.offset} shape {box.shape}" for box in sorted(boxes)[:6]]
    return "; ".join(shown) + ("; ..." if len(boxes) > 6 else "")


def _may_differ(tensor: TensorHolders, facts: Sequence[Facts]) -> bool:
    """Whether ranks hold a plain tensor that nobody compared. DTensors' replicas are alike by their placements."""
    return any(
        len(ranks) > 1 and item.type == WriteItemType.TENSOR and facts[rank].notes is None
        for ranks in tensor.boxes.values()
        for rank, item in ranks.items()
    )


def _writers_of(
    objects: Mapping[str, Mapping[int, WriteItem]], facts: Sequence[Facts]
) -> dict[str, tuple[int, WriteItem]]:
    """Values that are known to be alike are dealt in turn; of the others the lowest rank's is taken."""
    chosen = {}
    for number, (fqn, holders) in enumerate(objects.items()):
        ranks = sorted(holders)
        compared = all((notes := facts[r].notes) is not None and holders[r].index in notes.digests for r in ranks)
        lowest = any((notes := facts[r].notes) is not None and notes.lowest_rank_saves for r in ranks)
        rank = ranks[number % len(ranks)] if compared and not lowest else ranks[0]
        chosen[fqn] = (rank, holders[rank])
    return chosen


def _by_fqn(differing: Mapping[MetadataIndex, Iterable[int]]) -> dict[str, list[int]]:
    ranks_of: dict[str, set[int]] = {}
    for index, ranks in differing.items():
        ranks_of.setdefault(index.fqn, set()).update(ranks)
    return {fqn: sorted(ranks) for fqn, ranks in ranks_of.items()}
