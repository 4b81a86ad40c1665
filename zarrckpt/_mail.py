"""What ranks tell the coordinator with their plans, and what it tells them: by way of being unpickled.

A planner that caches plans passes on an earlier save's instead of what was sent. But DCP's gather and scatter still
unpickle everything that is sent, in the thread that needs it a moment later: so its arrival is what counts, and
unpickling puts it into that thread's inbox.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, WriteItem

from zarrckpt import _plan_items
from zarrckpt._distributed import global_rank
from zarrckpt._exchange import Channel, Joining, MeshId, take_idle


@dataclass(frozen=True)
class Notes:
    """What our save planner knows and DCP's plan has no place for."""

    digests: Mapping[MetadataIndex, bytes] | NDArray[np.uint64]
    """Of what each item stands for, see ``_digests``; on their way to the coordinator, in the order of the items."""
    lowest_rank_saves: bool
    """Whether replicas are all saved by the lowest rank that holds them, instead of being dealt."""
    lazy: bool = False
    """Whether the coordinator's planner leaves the items as they are, and merging them to the writer."""


@dataclass(frozen=True)
class Facts:
    """One rank, as the coordinator must know it. Items are those before DCP leaves all but one of the replicas out."""

    rank: int
    meshes: Mapping[tuple[int, ...], str]
    items: Sequence[WriteItem] = ()
    notes: Notes | None = None
    save_id: str = ""
    """Which save this rank is about to load."""

    def __reduce__(self) -> tuple[Any, ...]:
        # In a plan's pickle the items cost nothing: it has them already.
        return (_receive_facts, (self.rank, self.meshes, self.items, self.notes, self.save_id))


@dataclass(frozen=True)
class Ticket:
    """Which attempt a save belongs to, and the mesh on which pieces move, where any do. For a load: the mesh alone."""

    mesh: MeshId | None
    save_id: str = ""
    tree: str = ""
    base_id: str = ""

    def __reduce__(self) -> tuple[Any, ...]:
        return (_receive_ticket, (self.mesh, self.save_id, self.tree, self.base_id))


class _Inbox(threading.local):
    def __init__(self) -> None:
        self.facts: list[Facts] = []
        self.own: Facts | None = None
        self.ticket: Ticket | None = None
        self.joining: Joining | None = None
        self.offered: dict[tuple[int, ...], Channel] = {}
        """The idle meshes that the coordinator was told of, until its ticket says which is used."""


_inbox = _Inbox()


def _receive_facts(*fields: Any) -> Facts:
    facts = Facts(*fields)
    _inbox.facts.append(facts)
    return facts


def _receive_ticket(*fields: Any) -> Ticket:
    ticket = Ticket(*fields)
    accept(ticket)
    return ticket


def accept(ticket: Ticket) -> None:
    """Take a ticket for what this thread is about to write or read, and begin to join its mesh."""
    if _inbox.joining is not None:
        _inbox.joining.abandon()
    kept = _inbox.offered.pop(ticket.mesh.members, None) if ticket.mesh is not None else None
    _withdraw()
    _inbox.ticket = ticket
    _inbox.joining = Joining(ticket.mesh, kept) if ticket.mesh is not None else None


def _withdraw() -> None:
    """Make what was offered and not used idle again."""
    while _inbox.offered:
        _inbox.offered.popitem()[1].release()


# Before the idle meshes are let go of: this thread may hold one, too.
@atexit.register
def clear() -> None:
    """A new save or load begins in this thread."""
    if _inbox.joining is not None:
        _inbox.joining.abandon()
    _withdraw()
    _inbox.facts, _inbox.own, _inbox.ticket, _inbox.joining = [], None, None, None
    _plan_items.forget()


def own_facts(items: Sequence[WriteItem] = (), notes: Notes | None = None, save_id: str = "") -> Facts:
    """What this rank tells the coordinator. The meshes among it are this thread's until the ticket comes."""
    _withdraw()
    _inbox.offered = take_idle()
    meshes = {members: channel.mesh.name for members, channel in _inbox.offered.items()}
    _inbox.own = Facts(global_rank(), meshes, items, notes, save_id)
    return _inbox.own


def all_facts(plans: Sequence[SavePlan] | Sequence[LoadPlan]) -> list[Facts]:
    """What all ranks told, in their order. Called by the coordinator, once it has their plans."""
    if len(plans) == 1 and _inbox.own is not None:
        return [_inbox.own]  # a process alone is sent nothing
    return _inbox.facts


def ticket() -> Ticket | None:
    """The ticket that this thread was given last."""
    return _inbox.ticket


def joining() -> Joining | None:
    """The mesh that this thread is to take part in."""
    return _inbox.joining
