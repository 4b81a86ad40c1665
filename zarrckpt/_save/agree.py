"""The agreement of all ranks on one save plan. Each rank describes its state and computes the whole plan.

1. Each rank sends the digest of its description, and the name of the plan that it kept from the last save of the same
   state. If all ranks kept the same plan and their replicas are equal, this plan is used again.
2. One rank per distinct digest sends its description. The coordinator sends all descriptions to all ranks.
3. Each rank sends the digest of the plan that it computed, and digests of its replicas. If replicas differ, one more
   round compares them part by part, and the lowest rank's contents are saved. Then the coordinator begins the attempt.
"""

from __future__ import annotations

import dataclasses
import hashlib
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from zarrckpt._errors import CheckpointError, UnsupportedLayoutError, warn
from zarrckpt._format.sealed import is_save_id
from zarrckpt._format.wire import record
from zarrckpt._plan.all_descriptions import AllDescriptions, DescriptionRequest
from zarrckpt._plan.description import Description
from zarrckpt._plan.global_state import ReplicaPart, gather_state
from zarrckpt._plan.group_numbers import GroupNumbers
from zarrckpt._plan.plan import Layout, PlanOptions, SavePlan, plan_save
from zarrckpt._plan.rank_plan import RankPlan
from zarrckpt._ranks.rounds import Rounds
from zarrckpt._save.base import SentBase
from zarrckpt._state.local_state import LocalState

A = TypeVar("A")
"""The attempt, as the coordinator sends it. Calls without an attempt, such as ``plan_report``, use another type."""

Replicas = Mapping[bytes, Sequence[ReplicaPart]]
"""The parts that this rank holds together with others, by the ranks that hold them (see ``GlobalState.replicas``)."""

_NO_PLAN = bytes(8)
_DIGEST_BYTES = 16
_PRIME = (1 << 61) - 1


@record
@dataclass(frozen=True)
class SentAttempt:
    """An attempt, as the coordinator sends it to all ranks."""

    save_id: str
    tree: str
    """The key prefix of the attempt's objects."""
    replaced_id: str
    """The save id of the checkpoint that this one replaces, or ''."""
    host: str
    """The name of the coordinator's host."""
    digested: bool = False
    """Whether the save stores digests of its chunks, so that later saves can reuse them."""
    base: SentBase | None = None
    """The checkpoint whose chunks the save may reuse."""
    archive: Mapping[str, int] = field(default_factory=dict)
    """If the checkpoint is an archive, the byte offset of the first entry of each array, by path."""

    def __post_init__(self) -> None:
        if not is_save_id(self.save_id) or self.tree not in ("", f"@{self.save_id}"):
            raise ValueError(f"the tree {self.tree!r:.100} does not belong to the attempt {self.save_id!r:.100}")


@dataclass(frozen=True)
class AgreedPlan(Generic[A]):
    """A plan that all ranks have computed, and the attempt that the coordinator began with it."""

    state: LocalState
    plan: SavePlan
    rank_plan: RankPlan
    attempt: A


@dataclass(frozen=True)
class _KeptPlan:
    """A plan that a rank keeps for the next save of the same state."""

    name: bytes
    """8 bytes, equal on all ranks that have the plan."""
    digest: bytes
    """The digest of this rank's description."""
    options: PlanOptions
    plan: SavePlan
    rank_plan: RankPlan
    replicas: Replicas
    group_numbers: GroupNumbers


_kept_plans: dict[tuple[int, ...], tuple[Callable[[], object], _KeptPlan]] = {}
"""The last plan of each process group, by its members, and the default process group at that time."""


class _Hello(NamedTuple):
    """The first message of a rank, 32 bytes."""

    digest: bytes
    """The digest of the rank's description."""
    plan_name: bytes
    """The name of the plan that the rank keeps for this description, or zeros."""
    balance: int
    """A number that sums to 0 over all ranks if the replicas in this plan are equal: see :func:`_balance`."""

    def packed(self) -> bytes:
        """Return the message as bytes."""
        return self.digest + self.plan_name + self.balance.to_bytes(8, "little")

    @classmethod
    def unpacked(cls, data: bytes) -> _Hello:
        """Return the message that these bytes encode."""
        plan_name = data[_DIGEST_BYTES : _DIGEST_BYTES + len(_NO_PLAN)]
        return cls(data[:_DIGEST_BYTES], plan_name, int.from_bytes(data[-8:], "little"))


@record
@dataclass(frozen=True)
class _BeginAnswer(Generic[A]):
    """The coordinator's answer if the plan is agreed and the attempt has begun."""

    attempt: A


@record
@dataclass(frozen=True)
class _CompareAnswer:
    """The replicas that the next round compares, and those that are known to differ."""

    in_detail: frozenset[bytes] = frozenset()
    """The names of the groups of ranks that are compared part by part. Other groups are compared by one digest each."""
    saved_rank: Mapping[ReplicaPart, int] = field(default_factory=dict)
    """The parts that differ, and the rank whose contents are saved."""
    differing: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """The fqns of these parts, and the ranks that hold them."""
    ended: bool = False
    """Whether all replicas have been compared."""


class _GroupDigest(NamedTuple):
    """The name of a group of ranks, and a digest of the replicas that its ranks hold. 8 bytes each."""

    name: bytes
    digest: bytes

    def packed(self) -> bytes:
        """Return the digest as 16 bytes."""
        return self.name + self.digest

    @classmethod
    def unpacked(cls, data: bytes) -> Iterator[_GroupDigest]:
        """Yield the digests that these bytes encode."""
        return map(cls._make, struct.iter_unpack("8s8s", data))


@record
class _PlanDigests(NamedTuple):
    """The digests that a rank sends after it has computed the plan."""

    plan: bytes
    """The digest of the plan."""
    groups: bytes
    """For each group of ranks with replicas, the packed :class:`_GroupDigest`."""
    details: Mapping[ReplicaPart, bytes]
    """One digest per part, if the round compares parts."""


def agree(
    rounds: Rounds, read_state: Callable[[], LocalState], options: PlanOptions, begin: Callable[[Layout], A]
) -> AgreedPlan[A]:
    """Agree on a plan with all ranks. The coordinator then calls ``begin`` and sends its result to all ranks.

    An error of ``read_state`` or ``begin`` on one rank is raised on all. Raises UnsupportedLayoutError if the ranks'
    parts of a tensor do not fit together. The coordinator warns if ranks hold different contents under one name.
    """
    if rounds.size > 1:
        return _Agreement(rounds, read_state, options, begin).reach()
    # A single process has no other rank to compare digests with.
    state = read_state()
    plan = plan_alone(state, options, rounds.members)
    return AgreedPlan(state, plan, plan.rank_plan(0), begin(plan.layout))


def plan_alone(state: LocalState, options: PlanOptions, members: tuple[int, ...]) -> SavePlan:
    """Return the plan of a process that saves alone.

    Raises UnsupportedLayoutError if the process holds only parts of a tensor.
    """
    state.refuse_partial_tensors()
    return plan_save(gather_state(AllDescriptions([state.description()], np.zeros(1, np.int64), members)), options)


class _Agreement(Generic[A]):
    def __init__(
        self, rounds: Rounds, read_state: Callable[[], LocalState], options: PlanOptions, begin: Callable[[Layout], A]
    ) -> None:
        self._rounds = rounds
        self._read_state = read_state
        self._options = options
        self._begin = begin
        known = _kept_plans.get(rounds.members)
        # Under a new default process group, the kept plans of the ranks may differ.
        self._last = known[1] if known is not None and known[0] is rounds.world else None
        # Set on each rank by its calls in the rounds.
        self._state: LocalState
        self._description: Description
        self._plan: SavePlan
        self._rank_plan: RankPlan
        self._replicas: Replicas
        self._group_numbers: GroupNumbers

    def reach(self) -> AgreedPlan[A]:
        """Make the rounds that the module's docstring describes."""
        first = self._rounds.merge(
            "the digests of their states", on_each_rank=self._make_hello, on_coordinator=self._answer_to_hellos
        )
        if isinstance(first, _BeginAnswer):
            assert self._last is not None
            return AgreedPlan(self._state, self._last.plan, self._last.rank_plan, first.attempt)
        packed, options = self._rounds.merge(
            "the descriptions of their states",
            on_each_rank=partial(self._requested_description, first),
            on_coordinator=self._answer_to_descriptions,
        )
        gathered = AllDescriptions.from_packed(packed, first.numbers, self._rounds.members)
        compare = _CompareAnswer()
        while True:
            answer = self._rounds.merge(
                "their plans",
                on_each_rank=partial(self._compute_plan, gathered, options, compare),
                on_coordinator=partial(self._answer_to_plans, gathered, compare),
            )
            if isinstance(answer, _BeginAnswer):
                break
            compare = answer
        # A plan of differing replicas depends on their contents, so it is not kept.
        if not compare.saved_rank and not self._plan.state.differing:
            name = _plan_name(gathered, options, self._plan)
            digest = self._description.digest
            kept = _KeptPlan(name, digest, options, self._plan, self._rank_plan, self._replicas, self._group_numbers)
            _kept_plans[self._rounds.members] = (self._rounds.world, kept)
        return AgreedPlan(self._state, self._plan, self._rank_plan, answer.attempt)

    # -- all ranks

    def _make_hello(self) -> bytes:
        self._state = self._read_state()
        self._description = self._state.description()
        digest = self._description.digest
        if self._last is None or self._last.digest != digest:
            return _Hello(digest, _NO_PLAN, 0).packed()
        self._state.renumber_groups(self._last.group_numbers)
        balance = _balance(self._state, self._last.replicas, self._rounds.rank)
        return _Hello(digest, self._last.name, balance).packed()

    def _requested_description(self, request: DescriptionRequest) -> tuple[str, bytes] | None:
        """Return the version that packed the description, and the description, if this rank is to send it."""
        own = self._description
        return (own.version, own.packed) if self._rounds.rank in request.senders else None

    def _compute_plan(self, gathered: AllDescriptions, options: PlanOptions, compare: _CompareAnswer) -> _PlanDigests:
        """Compute the plan and return its digest, with digests of the replicas that ``compare`` names."""
        if compare.in_detail:
            groups = (parts for ranks, parts in self._replicas.items() if _group_name(ranks) in compare.in_detail)
            details = {part: self._state.digest(part) for parts in groups for part in parts}
            return _PlanDigests(self._plan.digest, b"", details)
        state = gather_state(gathered, compare.saved_rank)
        self._group_numbers = gathered.group_numbers(int(gathered.numbers[self._rounds.rank]))
        self._state.renumber_groups(self._group_numbers)
        self._plan = plan_save(state, options)
        self._rank_plan = self._plan.rank_plan(self._rounds.rank)
        self._replicas = state.replicas(self._rounds.rank)
        replicas = {} if compare.ended else self._replicas
        digests = (_GroupDigest(_group_name(ranks), self._state.digest_of_parts(replicas[ranks])) for ranks in replicas)
        packed = b"".join(digest.packed() for digest in digests)
        return _PlanDigests(self._plan.digest, packed, {})

    # -- the coordinator

    def _answer_to_hellos(self, packed: Sequence[bytes]) -> _BeginAnswer[A] | DescriptionRequest:
        hellos, last = [_Hello.unpacked(data) for data in packed], self._last
        known = last is not None and self._serves(last) and {hello.plan_name for hello in hellos} == {last.name}
        # If the sum is not 0, the ranks hold the same parts as before, but replicas differ.
        if last is not None and known and sum(hello.balance for hello in hellos) % _PRIME == 0:
            return _BeginAnswer(self._begin(last.plan.layout))
        return DescriptionRequest.from_digests([hello.digest for hello in hellos])

    def _serves(self, last: _KeptPlan) -> bool:
        """Whether a kept plan is the plan of these options. Its grids may be those of a base without that base."""
        same = dataclasses.replace(last.options, grids={}) == dataclasses.replace(self._options, grids={})
        return same and last.plan.keeps(self._options.grids)

    def _answer_to_descriptions(self, sent: Sequence[tuple[str, bytes] | None]) -> tuple[list[bytes], PlanOptions]:
        described = [one for one in sent if one is not None]
        versions = sorted({version for version, _ in described})
        if len(versions) > 1:
            raise CheckpointError(
                f"the ranks have different versions of zarrckpt, {versions}: install the same version on all ranks"
            )
        return [packed for _, packed in described], self._options

    def _answer_to_plans(
        self, gathered: AllDescriptions, compare: _CompareAnswer, found: Sequence[_PlanDigests]
    ) -> _BeginAnswer[A] | _CompareAnswer:
        others = [rank for rank, checked in enumerate(found) if checked.plan != found[0].plan]
        if others:
            raise CheckpointError(
                f"ranks {[self._rounds.members[rank] for rank in others]} computed a different plan than rank "
                f"{self._rounds.members[0]} from the same descriptions. Nothing was written. Install the same versions "
                "of Python, numpy and zarrckpt on all ranks"
            )
        if not compare.ended:
            if compare.in_detail:
                saved_rank, differing = differing_parts([checked.details for checked in found])
                return _CompareAnswer(saved_rank=saved_rank, differing=differing, ended=True)
            if unlike := _unlike_groups([checked.groups for checked in found]):
                return _CompareAnswer(in_detail=unlike)
        contents: dict[str, Sequence[int]] = {**self._plan.state.differing, **compare.differing}
        _refuse_numbered_parameters(gathered, contents)
        warn_of_differing(contents)
        return _BeginAnswer(self._begin(self._plan.layout))


def _group_name(ranks: bytes) -> bytes:
    return hashlib.blake2b(ranks, digest_size=8).digest()


def _balance(state: LocalState, replicas: Replicas, rank: int) -> int:
    """Return this rank's summand of a sum over all ranks that is 0 if the replicas in each group are equal.

    In a group of n ranks, the first multiplies its digest by 1 - n, and the others add theirs once.
    """
    balance = 0
    for ranks, parts in replicas.items():
        digest = hashlib.blake2b(_group_name(ranks) + state.digest_of_parts(parts), digest_size=8).digest()
        positions = np.frombuffer(ranks, np.int64)
        balance += int.from_bytes(digest, "little") * (1 - len(positions) if positions[0] == rank else 1)
    return balance % _PRIME


def _unlike_groups(packed: Iterable[bytes]) -> frozenset[bytes]:
    """Return the names of the groups of ranks whose replicas differ."""
    distinct = {digest for own in packed for digest in _GroupDigest.unpacked(own)}
    return frozenset(name for name, count in Counter(digest.name for digest in distinct).items() if count > 1)


def differing_parts(
    details: Sequence[Mapping[ReplicaPart, bytes]],
) -> tuple[dict[ReplicaPart, int], dict[str, list[int]]]:
    """Compare the digests of parts between ranks.

    Returns the parts that differ with the lowest rank that holds each, and their fqns with all ranks that hold them.
    """
    found: dict[ReplicaPart, dict[int, bytes]] = {}
    for rank, own in enumerate(details):
        for part, digest in own.items():
            found.setdefault(part, {})[rank] = digest
    saved_rank, differing = {}, dict[str, set[int]]()
    for part, digests in found.items():
        if len({*digests.values()}) > 1:
            saved_rank[part] = min(digests)
            differing.setdefault(part[0], set()).update(digests)
    return saved_rank, {fqn: sorted(ranks) for fqn, ranks in differing.items()}


def _plan_name(gathered: AllDescriptions, options: PlanOptions, plan: SavePlan) -> bytes:
    digests = [description.digest for description in gathered.descriptions]
    inputs = repr((digests, gathered.numbers.tolist(), options)).encode()
    return hashlib.blake2b(inputs + plan.digest, digest_size=len(_NO_PLAN)).digest()


def _refuse_numbered_parameters(gathered: AllDescriptions, differing: Mapping[str, Sequence[int]]) -> None:
    """Raise UnsupportedLayoutError for optimizers that differ between ranks and identify parameters only by number.

    If all ranks describe the same state, their optimizer state dicts may be replicas that drifted. These get only a
    warning.
    """
    by_number = {
        group.optimizer
        for description in gathered.descriptions
        for group in description.groups
        if group.by_number and (group.class_name or len(gathered.descriptions) > 1)
    }
    for name in sorted(by_number):
        own = {fqn: ranks for fqn, ranks in differing.items() if not name or fqn.startswith(f"{name}.")}
        if own:
            raise UnsupportedLayoutError(
                f"{name!r}: {len(own)} entries of this optimizer differ between ranks: {_format_differing(own)}. Its "
                "parameters have only numbers, so the parameters of different ranks cannot be distinguished. Nothing "
                "was written. Add the module that it trains to the state, or save every rank's optimizer with "
                "zarrckpt.PerRank(optimizer)"
            )


def warn_of_differing(differing: Mapping[str, Sequence[int]]) -> None:
    """Warn if ranks hold different contents under one fqn."""
    if not differing:
        return
    warn(
        f"{len(differing)} entries differ between ranks: {_format_differing(differing)}. For each entry, the contents "
        "of the lowest of these ranks are saved. To save every rank's value, wrap it in zarrckpt.PerRank(value)"
    )


def _format_differing(differing: Mapping[str, Sequence[int]]) -> str:
    shown = ", ".join(f"{fqn!r} (ranks {', '.join(map(str, ranks))})" for fqn, ranks in list(differing.items())[:10])
    return f"{shown} and {len(differing) - 10} more" if len(differing) > 10 else shown
