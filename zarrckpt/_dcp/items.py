"""DCP's plans as descriptions, and its planners as sources of what is written."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from zarrckpt._errors import CheckpointError, UnsupportedValueError
from zarrckpt._format import dtypes
from zarrckpt._format.grid import Box
from zarrckpt._format.state_path import StatePath
from zarrckpt._format.torch_archives import load_torch
from zarrckpt._plan.all_descriptions import AllDescriptions
from zarrckpt._plan.description import REPLICATED, DescribedEntry, Description
from zarrckpt._plan.holders import ReplicaPart
from zarrckpt._ranks.torch_private import merged_plans
from zarrckpt._state.digests import content_digest


@dataclass(frozen=True)
class Notes:
    """What our save planner knows and DCP's plan has no place for."""

    digests: Mapping[MetadataIndex, bytes]
    """Of what each item stands for."""
    lowest_rank_saves: bool
    """Whether replicas are all saved by the lowest rank that holds them, instead of being dealt."""
    empty: frozenset[str]
    """The names of empty dicts."""


@dataclass(frozen=True)
class Facts:
    """One rank, as the coordinator must know it: with all of its items, before DCP leaves replicas out."""

    rank: int
    items: Sequence[WriteItem]
    notes: Notes | None


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
    try:
        dtypes.by_torch_name(str(properties.dtype))
    except UnsupportedValueError as err:
        raise UnsupportedValueError(f"{item.index.fqn!r}: {err}") from err


def whole_plans(plans: list[SavePlan]) -> list[SavePlan]:
    """The plans of all ranks after the planner's global step, those included that DCP's plan cache has left out.

    Ranks send whole plans each time, since our writer empties the cache of what they sent last. But of the merged plans
    the cache keeps those that are as they were, and gives empty ones in their place. Raises CheckpointError where it
    does not say which they are.
    """
    if all(plan.usable for plan in plans):
        return plans
    known: list[list[SavePlan]] = [cached for cached in merged_plans(SavePlanner).values() if len(cached) == len(plans)]
    found = [
        cached
        for cached in known
        if all(whole.usable and (plan is whole or not plan.usable) for plan, whole in zip(plans, cached, strict=True))
    ]
    if len(found) != 1:
        raise CheckpointError(
            f"DCP's plan cache holds {len(found)} sets of plans for these {len(plans)} ranks, expected 1: with plan "
            "caching, use one planner class and one coordinator for all saves of a process"
        )
    return found[0]


def descriptions_of(plans: Sequence[SavePlan]) -> tuple[AllDescriptions, list[dict[ReplicaPart, bytes]]]:
    """What all ranks have to save, as descriptions; and the digests of each rank's parts."""
    facts: list[Facts] = [plan.storage_data for plan in plans]
    # A planner leaves out all but one of the replicas, but may also leave out, or add, what it likes: it is asked by
    # name and offset.
    kept = {item.index for plan in plans for item in plan.items}
    paths = _state_paths(plans)
    items = [_merged_items(plan.items, fact.items, kept) for plan, fact in zip(plans, facts, strict=True)]
    descriptions = [_description(own, paths, fact.notes) for own, fact in zip(items, facts, strict=True)]
    digests = [_digests(own, fact.notes) for own, fact in zip(items, facts, strict=True)]
    return AllDescriptions(descriptions, np.arange(len(plans)), [fact.rank for fact in facts]), digests


def _merged_items(
    planned: Sequence[WriteItem], before: Sequence[WriteItem], kept: set[MetadataIndex]
) -> list[WriteItem]:
    """A rank's items before the planner's global step, of those that it left with any rank; then those it added."""
    known = {item.index for item in before}
    return [item for item in before if item.index in kept] + [item for item in planned if item.index not in known]


def _state_paths(plans: Sequence[SavePlan]) -> dict[str, StatePath]:
    """fqn -> path from DCP's ``planner_data``, which a planner that does not flatten leaves out.

    In the order of the first rank's; of several paths the last rank's counts.
    """
    found = [plan.planner_data for plan in plans if isinstance(plan.planner_data, Mapping)]
    return {fqn: StatePath.of(path) for one in found for fqn, path in one.items()}


def _description(items: Iterable[WriteItem], paths: Mapping[str, StatePath], notes: Notes | None) -> Description:
    by_name: dict[str, list[WriteItem]] = {}
    for item in items:
        by_name.setdefault(item.index.fqn, []).append(item)
    # In the order of the state dict, which the plans themselves lose where replicas are dealt over ranks.
    ordered = [fqn for fqn in paths if fqn in by_name] + sorted(by_name.keys() - paths.keys())
    entries = [_entry_of_item(paths.get(fqn) or StatePath.of((fqn,)), by_name[fqn], notes) for fqn in ordered]
    return Description(tuple(entries), (), notes is not None, notes is not None and notes.lowest_rank_saves)


def _entry_of_item(path: StatePath, items: Sequence[WriteItem], notes: Notes | None) -> DescribedEntry:
    data = items[0].tensor_data
    if data is None:
        if notes is not None and items[0].index.fqn in notes.empty:
            return DescribedEntry(path, "empty")
        return DescribedEntry(path, "value" if notes is not None and items[0].index in notes.digests else "opaque")
    form = (tuple(data.size), str(data.properties.dtype))
    if items[0].type == WriteItemType.TENSOR:
        return DescribedEntry(path, "tensor", *form)
    return DescribedEntry(path, "tensor", *form, REPLICATED, tuple(item_box(item) for item in items))


def _digests(items: Iterable[WriteItem], notes: Notes | None) -> dict[ReplicaPart, bytes]:
    if notes is None:
        return {}
    return {
        (item.index.fqn, None if item.tensor_data is None else item_box(item).offset): notes.digests[item.index]
        for item in items
        if item.index in notes.digests
    }


def item_box(item: WriteItem) -> Box:
    """The region of the global tensor that an item holds (DCP calls it a chunk)."""
    assert item.tensor_data is not None
    return Box(tuple(item.tensor_data.chunk.offsets), tuple(item.tensor_data.chunk.sizes))


def notes_of(plan: SavePlan, planner: DefaultSavePlanner) -> Notes:
    """The notes of a plan: digests of all its items that have one. Copies at most 64 KiB of each tensor to the host."""
    found = {item.index: planner.lookup_object(item.index) for item in plan.items}
    digests = {index: content_digest(index.fqn, value) for index, value in found.items()}
    empty = frozenset(index.fqn for index, value in found.items() if isinstance(value, Mapping) and not value)
    known = {index: digest for index, digest in digests.items() if digest is not None}
    return Notes(known, planner.dedup_save_to_lowest_rank, empty)


def resolves_as_dcp(planner: SavePlanner) -> bool:
    """Whether a planner makes nothing else of what it looks up than DCP's default one does."""
    return (
        isinstance(planner, DefaultSavePlanner)
        and type(planner).resolve_data is DefaultSavePlanner.resolve_data
        and type(planner).transform_object is DefaultSavePlanner.transform_object
    )


class PlannerSource:
    """What a planner of DCP gives for the items of a rank's plan."""

    def __init__(self, planner: SavePlanner, items: Iterable[WriteItem], own_memory: bool) -> None:
        self._planner = planner
        self._items = {
            (item.index.fqn, None if item.tensor_data is None else item_box(item).offset): item for item in items
        }
        self.own_memory = own_memory

    def tensor(self, fqn: str, box: Box) -> Any:
        """The tensor of a box."""
        return self._planner.resolve_data(self._items[fqn, box.offset])

    def value(self, fqn: str) -> Any:
        """A non-tensor entry as the object that it is.

        DCP's planners wrap every such object in ``torch.save`` bytes, a BytesIO too; so the object itself is asked for
        where the planner has not changed that rule. A planner with a rule of its own gives bytes that only it
        understands.
        """
        item = self._items[fqn, None]
        if resolves_as_dcp(self._planner):
            return self._planner.lookup_object(item.index)  # type: ignore[attr-defined]
        data = self._planner.resolve_data(item)
        if isinstance(data, io.BytesIO):
            data.seek(0)
            try:
                return load_torch(data)
            except Exception:  # any bytes at all may be in there; then they are kept as they are
                data.seek(0)
        return data
