"""The plans and facts of all ranks, those included that DCP's plan cache left out as unchanged."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem

from zarrckpt._digests import NO_DIGEST, as_numbers
from zarrckpt._errors import CheckpointError
from zarrckpt._mail import Facts, Notes
from zarrckpt._plan_items import ItemTable, LazyItems, RankItems, ReceivedItems, SentItems, SentPaths
from zarrckpt._state_path import StatePath


def whole_plans(plans: list[SavePlan]) -> list[SavePlan]:
    """The plans of all ranks, whatever the plan cache left out.

    A rank whose plan is left out would take the last plan that it got; but DCP fills its caches before a save is
    through, so after one that failed this may be the plan of another state. The coordinator has all plans in its cache
    and sends them all. Raises CheckpointError where the cache does not say which they are.
    """
    if all(plan.usable for plan in plans):
        return plans
    found = [
        cached
        for cached in SavePlanner._cached_global_plan.values()
        if len(cached) == len(plans)
        and all(whole.usable and (plan is whole or not plan.usable) for plan, whole in zip(plans, cached, strict=True))
    ]
    if len(found) != 1:
        raise CheckpointError(
            f"DCP's plan cache holds {len(found)} sets of plans for these {len(plans)} ranks, expected 1: with plan "
            "caching, use one planner class and one coordinator for all saves of a process"
        )
    return found[0]


def all_items(plans: Sequence[SavePlan], fresh: Sequence[Facts]) -> list[RankItems]:
    """What the ranks have to save, from their whole plans, and from what they told just now."""
    if all(_is_untouched(plan) for plan in plans):
        return [_rank_items(_known_table(p.items), told.notes) for p, told in zip(plans, fresh, strict=True)]
    # A planner leaves out all but one of the replicas, but may also leave out, or add, what it likes: it is asked by
    # name and offset.
    kept = {item.index for plan in plans for item in plan.items}
    return [_merged(plan, kept, told.notes) for plan, told in zip(plans, fresh, strict=True)]


def _is_untouched(plan: SavePlan) -> bool:
    """Whether a rank's items are those that it sent: our planner's global step leaves them to the writer."""
    return isinstance(plan.storage_data, Facts) and isinstance(plan.items, LazyItems)


def _known_table(items: Sequence[WriteItem]) -> ItemTable:
    if isinstance(items, SentItems | ReceivedItems | LazyItems):
        return items.table
    return ItemTable.of(items)


def _merged(plan: SavePlan, kept: set[MetadataIndex], notes: Notes | None) -> RankItems:
    """A rank's items before the planner's global step, of those that it left with any rank; then those it added."""
    before: Sequence[WriteItem] = plan.storage_data.items if isinstance(plan.storage_data, Facts) else ()
    known = {item.index for item in before}
    places = [place for place, item in enumerate(before) if item.index in kept]
    added = [item for item in plan.items if item.index not in known]
    table = _known_table(before)
    if notes is not None and not isinstance(notes.digests, Mapping):
        digests = np.append(notes.digests[places], np.full(len(added), NO_DIGEST, np.uint64))
        notes = dataclasses.replace(notes, digests=digests)
    if added:
        table = ItemTable.of([*(before[place] for place in places), *added])
    elif len(places) < len(table):
        table = table.take(places)
    return _rank_items(table, notes)


def _rank_items(table: ItemTable, notes: Notes | None) -> RankItems:
    if notes is None:
        return RankItems(table, np.full(len(table), NO_DIGEST, np.uint64), False, False)
    digests = notes.digests
    if isinstance(digests, Mapping):
        digests = as_numbers(digests, map(table.item, range(len(table))))
    return RankItems(table, digests, True, notes.lowest_rank_saves)


def state_paths(plans: Sequence[SavePlan]) -> dict[str, StatePath]:
    """fqn -> path from DCP's ``planner_data``, which a planner that does not flatten leaves out.

    In the order of the first rank's; of several paths the last rank's counts.
    """
    found = [plan.planner_data for plan in plans if isinstance(plan.planner_data, Mapping)]
    # Most ranks have the same ones, which arrive as one object.
    ordered = {id(one): one for one in found}
    counting = {id(one): one for one in reversed(found)}
    paths: dict[str, StatePath] = {}
    for one in [*ordered.values(), *reversed(counting.values())]:
        paths |= {fqn: StatePath.of(path) for fqn, path in one.items()}
    return paths


def sent_paths(plans: Sequence[SavePlan]) -> list[Any]:
    """The ``planner_data`` that goes back with each plan: packed once, and not to planners that leave it alone."""
    packed: dict[int, SentPaths] = {}
    sent: list[Any] = []
    for plan in plans:
        paths = plan.planner_data
        if isinstance(plan.items, LazyItems):
            paths = None
        elif type(paths) is dict and len(plans) > 1:
            paths = packed.get(id(paths)) or packed.setdefault(id(paths), SentPaths(paths))
        sent.append(paths)
    return sent
