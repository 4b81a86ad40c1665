"""Plans that are used again: training saves the same tensors in the same sharding every time.

Every rank keeps its part of the last plan, and a fingerprint of what it had to save then. If it has the same again it
names that plan instead of sending its items. If all ranks name one plan, and the coordinator still knows it, each of
them does what it did; only digests of what is saved, and the attempt's ticket, are new. If some name another plan, or
send their items, the coordinator plans anew with the items that it has kept of the others.

A plan is of no attempt and of no url. Where the coordinator does not know what a rank names (another process has taken
its place), the save begins again without: that is what :class:`PlanForgottenError` is for.
"""

from __future__ import annotations

import dataclasses
import hashlib
import pickle
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch.distributed as dist
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from zarrckpt._digests import NO_DIGEST, empty_dicts
from zarrckpt._errors import CheckpointError
from zarrckpt._holdings import Pairs, compared
from zarrckpt._mail import Facts
from zarrckpt._plan import Layout, SavePlans
from zarrckpt._plan_items import KnownItems, LazyItems, RankItems, SentPaths
from zarrckpt._rank_plan import RankPlan

_KEPT = 2
"""Plans of a group that the coordinator keeps: the last one, and the one before, which some ranks may still name."""


class PlanForgottenError(CheckpointError):
    """Ranks named a plan that the coordinator does not know: the save must begin again, with all items."""


@dataclass(frozen=True)
class _Own:
    """A rank's part of a plan."""

    key: str
    fingerprint: bytes
    plan: RankPlan
    items: Sequence[WriteItem]


@dataclass(frozen=True)
class KeptPlan:
    """What the coordinator keeps of a plan."""

    key: str
    members: tuple[int, ...]
    options: object
    held: Sequence[RankItems]
    paths: Sequence[Any]
    pairs: Pairs
    layout: Layout
    moves: bool


@dataclass
class Memory:
    """What one process keeps for the saves of one group of ranks."""

    own: _Own | None = None
    plans: dict[str, KeptPlan] = field(default_factory=dict)


_memories: dict[tuple[int, ...], tuple[object, Memory]] = {}


def memory_of(group: dist.ProcessGroup | None) -> Memory:
    """What this process keeps for a group. Of ranks that joined anew nothing is known."""
    default = dist.group.WORLD
    members = tuple(dist.get_process_group_ranks(group or default))
    known = _memories.get(members)
    if known is None or known[0] is not default:
        known = _memories[members] = (default, Memory())
    return known[1]


class PlanReuse:
    """One save's use of the memory. The same calls on every rank; the middle ones on the coordinator only."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._own: _Own | None = None
        self._fingerprint = b""

    def forget(self) -> None:
        """Send all items the next time."""
        self._memory.own = None

    # -- all ranks

    def shortened(self, plan: SavePlan) -> SavePlan:
        """A rank's plan as it is sent: with the name of the last plan instead of items, if they are the same."""
        self._own = None
        facts: Facts = plan.storage_data
        if facts.notes is None or not facts.notes.lazy:
            return plan  # to be looked at by a planner that is not ours
        self._fingerprint = _fingerprint(plan)
        last = self._memory.own
        if last is None or last.fingerprint != self._fingerprint:
            return plan
        self._own = last
        items: Any = KnownItems(last.key, facts.rank)
        facts = dataclasses.replace(facts, items=items)
        return dataclasses.replace(plan, items=items, planner_data=None, storage_data=facts)

    # -- the coordinator

    def restored(self, plans: Sequence[SavePlan]) -> list[SavePlan]:
        """All ranks' plans with their items. Raises PlanForgottenError."""
        return [self._restored(place, plan) for place, plan in enumerate(plans)]

    def _restored(self, place: int, plan: SavePlan) -> SavePlan:
        if not isinstance(plan.items, KnownItems):
            return plan
        known = self._memory.plans.get(plan.items.key)
        if known is None or known.members[place : place + 1] != (plan.items.rank,):
            raise PlanForgottenError(f"rank {plan.items.rank} names a plan that the coordinator does not know")
        items: Any = LazyItems(known.held[place].table)
        facts = dataclasses.replace(plan.storage_data, items=items)
        return dataclasses.replace(plan, items=items, planner_data=known.paths[place], storage_data=facts)

    def again(self, plans: Sequence[SavePlan], told: Sequence[Facts], options: object) -> KeptPlan | None:
        """The plan that all ranks name; None where it is not to be used, since something is not as it was."""
        keys = {plan.items.key if isinstance(plan.items, KnownItems) else "" for plan in plans}
        known = self._memory.plans.get(keys.pop())
        if keys or known is None or known.members != tuple(fact.rank for fact in told) or known.options != options:
            return None
        digests = np.concatenate([_digests(fact) for fact in told])
        first, second = known.pairs
        # Else who holds what is as before, but not that they hold the same.
        return known if (digests[first] == digests[second]).all() else None

    def keep(
        self,
        plans: Sequence[SavePlan],
        told: Sequence[Facts],
        options: object,
        held: Sequence[RankItems],
        planned: SavePlans,
    ) -> str:
        """Keep a new plan, if it is made from what a fingerprint tells; return its key, or nothing."""
        if planned.differing or not all(isinstance(plan.items, LazyItems) for plan in plans):
            return ""
        members, paths = tuple(fact.rank for fact in told), [plan.planner_data for plan in plans]
        key = uuid.uuid4().hex
        pairs = compared(held)
        self._memory.plans[key] = KeptPlan(key, members, options, held, paths, pairs, planned.layout, planned.moves)
        for old in [*self._memory.plans][:-_KEPT]:
            del self._memory.plans[old]
        return key

    # -- all ranks

    def arrived(
        self, key: str, plan: RankPlan | None, items: Sequence[WriteItem]
    ) -> tuple[RankPlan, Sequence[WriteItem]]:
        """A rank's plan and items: those that came, which are kept if they have a key, or the ones kept."""
        if plan is None:
            assert self._own is not None and self._own.key == key
            return self._own.plan, self._own.items
        self._memory.own = _Own(key, self._fingerprint, plan, items) if key else None
        return plan, items


def _digests(fact: Facts) -> Any:
    assert fact.notes is not None
    return fact.notes.digests


def _fingerprint(plan: SavePlan) -> bytes:
    """Of all that a plan is made from, but for digests: of these only whether there are any, and of empty dicts."""
    facts: Facts = plan.storage_data
    table, digests = plan.items.table, _digests(facts)  # type: ignore[attr-defined]
    parts = [
        table.schema.packed,
        pickle.dumps([tuple(box) for box in table.boxes]),
        table.box.tobytes(),
        plan.planner_data.packed if isinstance(plan.planner_data, SentPaths) else pickle.dumps(plan.planner_data),
        (digests == NO_DIGEST).tobytes(),
        np.isin(digests, empty_dicts()).tobytes(),
        str(facts.notes.lowest_rank_saves if facts.notes else None).encode(),
    ]
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()
