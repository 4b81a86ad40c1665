"""The plans and facts of all ranks, those included that DCP's plan cache left out as unchanged."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem

from zarrckpt._errors import CheckpointError
from zarrckpt._mail import Facts


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


def whole_facts(plans: Sequence[SavePlan], fresh: Sequence[Facts]) -> list[Facts]:
    """What ranks told just now, with the items of whole plans: those that a planner's global step has not dropped.

    A planner leaves out all but one of the replicas, but may also leave out, or add, what it likes: it is asked by name
    and offset.
    """
    kept = {item.index for plan in plans for item in plan.items}
    facts = []
    for plan, told in zip(plans, fresh, strict=True):
        before: Sequence[WriteItem] = plan.storage_data.items if isinstance(plan.storage_data, Facts) else ()
        known = {item.index for item in before}
        items = [item for item in before if item.index in kept]
        items += [item for item in plan.items if item.index not in known]
        facts.append(dataclasses.replace(told, items=items))
    return facts
