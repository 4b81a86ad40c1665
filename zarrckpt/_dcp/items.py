"""Convert DCP's plans to descriptions, and use DCP's planners as sources of the data to write."""

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
from zarrckpt._plan.global_state import ReplicaPart
from zarrckpt._ranks.torch_private import merged_plans
from zarrckpt._state.digests import content_digest


@dataclass(frozen=True)
class PlannerData:
    """Data of our save planner that DCP's plan cannot carry."""

    digests: Mapping[MetadataIndex, bytes]
    """The digest of each item's contents."""
    lowest_rank_saves: bool
    """Whether the lowest rank that holds a replica writes it, instead of all holders in parts."""
    empty: frozenset[str]
    """The names of empty dicts."""
    versions: dict[str, dict[str, int]]
    """The versions of modules, as in a Description."""


@dataclass(frozen=True)
class RankItems:
    """Data of one rank for the coordinator, with all its items before DCP removes replicas."""

    rank: int
    items: Sequence[WriteItem]
    notes: PlannerData | None


def check_item(item: WriteItem) -> None:
    """Raise UnsupportedValueError for an item that cannot be saved."""
    if item.tensor_data is None:
        return
    properties = item.tensor_data.properties
    if properties.layout != torch.strided:
        raise UnsupportedValueError(
            f"{item.index.fqn!r} is a tensor with layout {properties.layout}, expected a strided (dense) tensor: "
            "convert it with .to_dense(), or save its parts"
        )
    try:
        dtypes.by_torch_name(str(properties.dtype))
    except UnsupportedValueError as err:
        raise UnsupportedValueError(f"{item.index.fqn!r}: {err}") from err


def restore_omitted_plans(plans: list[SavePlan]) -> list[SavePlan]:
    """Return the plans of all ranks after the planner's global step, including those that DCP's plan cache omits.

    Ranks always send whole plans, because our writer clears the cache of sent plans. But the cache also replaces
    unchanged merged plans by empty ones. Raises CheckpointError if the cache does not determine the omitted plans.
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


def describe_states(plans: Sequence[SavePlan]) -> tuple[AllDescriptions, list[dict[ReplicaPart, bytes]]]:
    """Return the descriptions of all ranks' states, and the digests of each rank's parts."""
    facts: list[RankItems] = [plan.storage_data for plan in plans]
    # A planner removes all replicas but one, and can also remove or add other items. So items are compared by index.
    kept = {item.index for plan in plans for item in plan.items}
    paths = _state_paths(plans)
    items = [_merged_items(plan.items, fact.items, kept) for plan, fact in zip(plans, facts, strict=True)]
    descriptions = [_description(own, paths, fact.notes) for own, fact in zip(items, facts, strict=True)]
    digests = [_digests(own, fact.notes) for own, fact in zip(items, facts, strict=True)]
    return AllDescriptions(descriptions, np.arange(len(plans)), [fact.rank for fact in facts]), digests


def _merged_items(
    planned: Sequence[WriteItem], before: Sequence[WriteItem], kept: set[MetadataIndex]
) -> list[WriteItem]:
    """Return a rank's items before the global step that remained on any rank, then the items that the step added."""
    known = {item.index for item in before}
    return [item for item in before if item.index in kept] + [item for item in planned if item.index not in known]


def _state_paths(plans: Sequence[SavePlan]) -> dict[str, StatePath]:
    """Return the state paths by fqn from DCP's ``planner_data``, which planners without flattening omit.

    They are in the order of the first rank. If paths differ, the last rank's is used.
    """
    found = [plan.planner_data for plan in plans if isinstance(plan.planner_data, Mapping)]
    return {fqn: StatePath.of(path) for one in found for fqn, path in one.items()}


def _description(items: Iterable[WriteItem], paths: Mapping[str, StatePath], notes: PlannerData | None) -> Description:
    by_name: dict[str, list[WriteItem]] = {}
    for item in items:
        by_name.setdefault(item.index.fqn, []).append(item)
    # Restore the order of the state dict, which plans lose when replicas are distributed over ranks.
    ordered = [fqn for fqn in paths if fqn in by_name] + sorted(by_name.keys() - paths.keys())
    entries = [_entry_of_item(paths.get(fqn) or StatePath.of((fqn,)), by_name[fqn], notes) for fqn in ordered]
    if notes is None:
        return Description(tuple(entries), (), compared=False)
    return Description(tuple(entries), (), True, notes.lowest_rank_saves, versions=notes.versions)


def _entry_of_item(path: StatePath, items: Sequence[WriteItem], notes: PlannerData | None) -> DescribedEntry:
    data = items[0].tensor_data
    if data is None:
        if notes is not None and items[0].index.fqn in notes.empty:
            return DescribedEntry(path, "empty")
        return DescribedEntry(path, "value" if notes is not None and items[0].index in notes.digests else "opaque")
    form = (tuple(data.size), str(data.properties.dtype))
    if items[0].type == WriteItemType.TENSOR:
        return DescribedEntry(path, "tensor", *form)
    return DescribedEntry(path, "tensor", *form, REPLICATED, tuple(item_box(item) for item in items))


def _digests(items: Iterable[WriteItem], notes: PlannerData | None) -> dict[ReplicaPart, bytes]:
    if notes is None:
        return {}
    return {
        (item.index.fqn, None if item.tensor_data is None else item_box(item).offset): notes.digests[item.index]
        for item in items
        if item.index in notes.digests
    }


def item_box(item: WriteItem) -> Box:
    """Return the box of the global tensor that an item holds. DCP calls it a chunk."""
    assert item.tensor_data is not None
    return Box(tuple(item.tensor_data.chunk.offsets), tuple(item.tensor_data.chunk.sizes))


def make_notes(
    plan: SavePlan, planner: DefaultSavePlanner, versions: dict[str, dict[str, int]], *, compared: bool
) -> PlannerData:
    """Return digests (if ranks are compared) and other notes of a plan's items.

    Copies at most 64 KiB of each tensor to the host.
    """
    found = {item.index: planner.lookup_object(item.index) for item in plan.items}
    digests = {index: content_digest(index.fqn, value) for index, value in found.items()} if compared else {}
    empty = frozenset(index.fqn for index, value in found.items() if isinstance(value, Mapping) and not value)
    known = {index: digest for index, digest in digests.items() if digest is not None}
    return PlannerData(known, planner.dedup_save_to_lowest_rank, empty, versions)


def resolves_as_dcp(planner: SavePlanner) -> bool:
    """Whether a planner resolves items exactly as DCP's default planner does."""
    return (
        isinstance(planner, DefaultSavePlanner)
        and type(planner).resolve_data is DefaultSavePlanner.resolve_data
        and type(planner).transform_object is DefaultSavePlanner.transform_object
    )


class PlannerSource:
    """A source of the data to write that resolves items with a DCP planner."""

    def __init__(self, planner: SavePlanner, items: Iterable[WriteItem], own_memory: bool) -> None:
        self._planner = planner
        self._items = {
            (item.index.fqn, None if item.tensor_data is None else item_box(item).offset): item for item in items
        }
        self.own_memory = own_memory

    def tensor(self, fqn: str, box: Box) -> Any:
        """Return the tensor of a box."""
        return self._planner.resolve_data(self._items[fqn, box.offset])

    def value(self, fqn: str) -> Any:
        """Return a non-tensor entry as an object.

        DCP's planners wrap every such object in ``torch.save`` bytes, even a BytesIO. So the object itself is looked up
        if the planner has not changed this rule. Other planners return bytes that only they understand.
        """
        item = self._items[fqn, None]
        if resolves_as_dcp(self._planner):
            return self._planner.lookup_object(item.index)  # type: ignore[attr-defined]
        data = self._planner.resolve_data(item)
        if isinstance(data, io.BytesIO):
            data.seek(0)
            try:
                return load_torch(data)
            except Exception:  # The bytes can be anything, and are then stored unchanged.
                data.seek(0)
        return data
