"""``plan_report``: what a save would write, move and cost, before it is made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch.distributed as dist
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.utils import _DistWrapper

from zarrckpt import _mail
from zarrckpt._chunking import MAX_CHUNK_BYTES
from zarrckpt._distributed import Ranks, own_errors
from zarrckpt._gathered import all_items, state_paths
from zarrckpt._holdings import with_facts
from zarrckpt._mail import Facts
from zarrckpt._object_planners import ObjectSavePlanner
from zarrckpt._plan import SavePlans, Sizes, plan_save
from zarrckpt._report import PlanReport
from zarrckpt._root import parent_groups
from zarrckpt._state import refuse_fsdp1
from zarrckpt._transfer import DEFAULT_MAX_INFLIGHT_BYTES

_BESIDE = 5
"""Claim, marker, root, and a document for each of the two tables."""

_TABLE_CHUNKS = 2
"""One for each of the tables, unless there is nothing for them to hold."""


def plan_report(
    state: Mapping[str, Any],
    *,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    max_chunk_bytes: int = MAX_CHUNK_BYTES,
    min_piece_bytes: int | None = None,
    fill_bytes: int | None = None,
    max_inflight_bytes: int = DEFAULT_MAX_INFLIGHT_BYTES,
) -> PlanReport:
    """What :func:`save` would do with a state: objects, bytes by rank, bytes between ranks, cost of the puts.

    Every rank of the process group calls it. Plans as a save does and stops there: no request, no data moves. The
    arguments are those of :func:`save`; raises what it raises for them, and for a state that cannot be saved.
    """
    sizes = Sizes.checked(max_chunk_bytes, min_piece_bytes, fill_bytes, max_inflight_bytes)
    ranks = Ranks(process_group, no_dist)
    if no_dist:
        refuse_fsdp1(state)
    planner = ObjectSavePlanner(alone=ranks.alone)

    def local() -> SavePlan:
        planner.set_up_planner(cast("dict[str, Any]", state))
        return with_facts(planner.create_local_plan())

    def report(plans: list[SavePlan]) -> PlanReport:
        facts: list[Facts] = [plan.storage_data for plan in plans]
        return report_of(plan_save(all_items(plans, facts), state_paths(plans), sizes=sizes))

    _mail.clear()
    with own_errors(ranks):
        # With our own errors on all ranks, as in a save.
        return _DistWrapper(process_group, not ranks.alone, 0).all_reduce("plan", local, report)


def report_of(plans: SavePlans) -> PlanReport:
    """The report of a whole plan."""
    nodes, dealt = plans.layout.tensors.values(), plans.dealt
    beside = _BESIDE + _TABLE_CHUNKS * bool(len(dealt.owner))
    return PlanReport(
        ranks=plans.layout.world_size,
        tensors=len(nodes),
        nbytes=int(dealt.nbytes.sum()),
        objects=len(dealt.owner),
        documents=len(nodes) + len(parent_groups(node.path for node in nodes)) + beside,
        rank_bytes=tuple(dealt.rank_bytes()),
        moved_bytes=dealt.moved_bytes(),
        merged=dealt.merged(),
        rounds=int(dealt.round.max(initial=-1)) + 1,
    )
