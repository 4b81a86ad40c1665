"""The protocol of rounds without processes: its state machines, in every order of messages, losses and timeouts."""

from __future__ import annotations

import copy
import re
from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zarrckpt._format.wire import decode, encode
from zarrckpt._ranks import call_group, round_protocol
from zarrckpt._ranks.call_group import CallGroup, Tree
from zarrckpt._ranks.control_messages import FAILED, RESULT, Message, decode_message, encode_message
from zarrckpt._ranks.errors import Failure
from zarrckpt._ranks.round_protocol import Do, RoundProtocol, Send, Warn

TIMEOUT = 40.0
"""Seconds. The heartbeats are sent every ten."""

FIRST = 7
"""The global number of position 0, so that positions and ranks differ."""

LOST = b"lost"
"""The last entry of a closed connection."""


class Event(NamedTuple):
    """Something that can happen next: deliver a message, end work, decide, begin, or a fault of a rank."""

    kind: str
    rank: int
    peer: int = -1


@dataclass
class Plan:
    """A job: its size and the faults of its ranks."""

    size: int
    calls: int = 1
    rounds: int = 1
    fanout: int = 32
    failing: frozenset[tuple[int, int, int]] = frozenset()
    """(rank, call, round) of work that fails."""
    faults: tuple[tuple[str, int], ...] = ()
    """Faults that may happen at any time: kill, freeze, interrupt, or close the kept connections; with the rank."""
    names: tuple[str, ...] = ("a",) * 5
    """The call that each rank makes."""
    stoppable: bool = True
    pieces: bool = False
    """Whether ranks use pieces."""


@dataclass
class Rank:
    """The caller's thread of one rank and its driver."""

    state: str = "begin call"
    protocol: RoundProtocol | None = None
    mesh: int = -1
    """The number of the mesh, or -1."""
    call: int = 0
    calls_on_mesh: int = 0
    round: int = 0
    early: list[tuple[int, bytes]] = field(default_factory=list)
    """Messages of the next call."""
    interrupted: bool = False
    answers: dict[tuple[int, int], Any] = field(default_factory=dict)
    """The answer or the failures, by call and round."""
    broken: list[Failure] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def is_alive(self) -> bool:
        return self.state not in ("killed", "frozen", "ended")


class Job:
    """The ranks of a job, and the messages between them."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.now = 1000.0
        self.ranks = [Rank() for _ in range(plan.size)]
        self.queues: dict[tuple[int, int, int], deque[bytes]] = {}
        """Messages by mesh, sender and receiver."""
        self.meshes = 0
        self.faults = list(plan.faults)
        self.faulty: set[int] = set()
        self.failed: set[tuple[int, int, int]] = set()

    # -- what can happen next

    def events(self) -> list[Event]:
        faults = [Event(kind, number) for kind, number in self.faults if self._can_fail(kind, self.ranks[number])]
        return [*self.normal_events(), *faults]

    def _can_fail(self, kind: str, rank: Rank) -> bool:
        if kind == "close":
            return rank.state == "begin call" and rank.mesh >= 0
        return rank.is_alive and (kind != "interrupt" or rank.state != "begin call")

    def normal_events(self) -> list[Event]:
        found = []
        for number, rank in enumerate(self.ranks):
            if rank.state in ("begin call", "begin round", "working"):
                found.append(Event(rank.state, number))
                if rank.state == "begin call" and self._has_left(number):
                    found.append(Event(rank.state, number, 1))
            elif rank.state == "waiting" and rank.protocol is not None and rank.protocol.must_decide:
                found.append(Event("decide", number))
        if all(self._is_joining(rank) for rank in self.ranks):
            found.append(Event("connect", 0))
        for (mesh, sender, receiver), queue in self.queues.items():
            rank = self.ranks[receiver]
            if queue and rank.mesh == mesh and rank.protocol is not None and rank.is_alive:
                found.append(Event("deliver", receiver, sender))
        return found

    def _has_left(self, number: int) -> bool:
        """Whether a rank has left the kept connections, otherwise than by aborting the next call."""
        rank = self.ranks[number]
        queues = [queue for (mesh, _, to), queue in self.queues.items() if (mesh, to) == (rank.mesh, number)]
        messages = [decode_message(data) for queue in queues for data in queue if data != LOST]
        name = f"call {self.plan.names[number]} {rank.call + 1}"
        if any(m[:2] == ("abort", rank.calls_on_mesh + 1) and m.body[1] == name for m in messages):
            return False
        return any(LOST in queue for queue in queues)

    def _is_joining(self, rank: Rank) -> bool:
        return rank.state == "joining" or (rank.is_alive and rank.protocol is not None and rank.mesh < 0)

    # -- what happens

    def handle(self, event: Event) -> None:
        rank, protocol = self.ranks[event.rank], self.ranks[event.rank].protocol
        if event.kind == "begin call":
            self._begin_call(event.rank, event.peer == 1)
        elif event.kind == "connect":
            self._connect_all()
        elif event.kind == "close":
            self.faults.remove(("close", event.rank))
            self._close(event.rank)
        elif event.kind in ("kill", "freeze"):
            self._lose_rank(event.rank, event.kind)
        elif protocol is None:
            assert event.kind == "interrupt" and rank.state == "joining"
            self._note_fault(event.kind, event.rank)
            rank.state = "ended"
        else:
            self._pass(event, rank, protocol)
            if event.kind == "interrupt":
                self._end_call(event.rank, [])
                rank.state = "ended"
            else:
                self._perform(event.rank)
                self._wake(event.rank)

    def _pass(self, event: Event, rank: Rank, protocol: RoundProtocol) -> None:
        name = (rank.call, rank.round)
        if event.kind == "begin round":
            rank.round += 1
            rank.interrupted = False
            protocol.begin_round(f"round {rank.round}", self.plan.stoppable, self.now)
            rank.state = "begin round" if protocol.failures else "working"
        elif event.kind == "working":
            rank.state = "waiting"
            if (event.rank, *name) in self.plan.failing and not protocol.is_stopped:
                self.failed.add((event.rank, *name))
                protocol.end_work((FAILED, self._failure(event.rank)), self.plan.pieces, self.now)
            else:
                protocol.end_work((RESULT, encode([event.rank, *name])), self.plan.pieces, self.now)
        elif event.kind == "decide":
            results, failures = protocol.round.outcomes(self._group(event.rank))
            answer: Any = (FAILED, failures) if failures else (RESULT, encode([decode(data) for data in results]))
            protocol.end_round((*answer, protocol.round.used_channel))
        elif event.kind == "deliver":
            data = self.queues[rank.mesh, event.peer, event.rank].popleft()
            if data == LOST:
                protocol.lose(event.peer)
            else:
                message = decode_message(data)
                if message.call > rank.calls_on_mesh:
                    rank.early.append((event.peer, data))
                protocol.receive(event.peer, message, self.now)
        else:
            self._note_fault(event.kind, event.rank)
            protocol.break_off([self._failure(event.rank)], None, self._name(event.rank))
            self._perform(event.rank)

    def _begin_call(self, number: int, notices: bool) -> None:
        rank = self.ranks[number]
        rank.call += 1
        rank.round = 0
        if notices and self._has_left(number):
            self._close(number)
        if rank.mesh < 0:
            rank.state = "joining"
            return
        self._connect(number, kept=True)

    def _connect(self, number: int, *, kept: bool) -> None:
        rank = self.ranks[number]
        if rank.protocol is None:
            rank.protocol = RoundProtocol(self._group(number), self.now)
            rank.state = "begin round"
        rank.calls_on_mesh = rank.calls_on_mesh + 1 if kept else 1
        rank.protocol.connect(Tree(number, self.plan.size), rank.calls_on_mesh, kept, self.now)
        self._perform(number)

    def _connect_all(self) -> None:
        for number, rank in enumerate(self.ranks):
            rank.mesh = self.meshes
            for peer in Tree(number, self.plan.size).edges:
                self.queues[self.meshes, number, peer] = deque()
        self.meshes += 1
        for number in range(self.plan.size):
            self._connect(number, kept=False)

    def _perform(self, number: int) -> None:
        rank = self.ranks[number]
        assert rank.protocol is not None
        for action in rank.protocol.take_actions():
            if isinstance(action, Send):
                for peer in action.peers:
                    queue = self.queues[rank.mesh, number, peer]
                    if LOST not in queue:
                        queue.append(encode_message(action.message))
            elif isinstance(action, Warn):
                rank.warnings.append(action.text)
            elif action is Do.INTERRUPT_WORK:
                rank.interrupted = True
            elif action is Do.REJOIN:
                self._close(number)

    def _wake(self, number: int) -> None:
        """Let the caller's thread continue, as the driver does."""
        rank, protocol = self.ranks[number], self.ranks[number].protocol
        if protocol is None or rank.state not in ("begin round", "working", "waiting"):
            return
        answer = protocol.round.answer
        if rank.state == "waiting" and answer is not None:
            kind, body, _ = answer
            rank.answers[rank.call, rank.round] = decode(body) if kind == RESULT else body
            rank.state = "begin round"
            if kind == FAILED or rank.round == self.plan.rounds:
                self._end_call(number, [])
        elif protocol.failures and rank.state != "working" and not (rank.state == "waiting" and protocol.must_decide):
            self._end_call(number, protocol.failures)

    def _end_call(self, number: int, broken: list[Failure]) -> None:
        rank = self.ranks[number]
        assert rank.protocol is not None
        rank.broken += broken
        if rank.mesh >= 0 and rank.protocol.must_discard:
            self._close(number)
        elif rank.mesh >= 0:
            for peer, data in reversed(rank.early):
                self.queues[rank.mesh, peer, number].appendleft(data)
            rank.early.clear()
        rank.protocol = None
        rank.state = "begin call" if rank.call < self.plan.calls else "ended"

    def _close(self, number: int) -> None:
        rank = self.ranks[number]
        for (mesh, sender, _), queue in self.queues.items():
            if (mesh, sender) == (rank.mesh, number) and LOST not in queue:
                queue.append(LOST)
        rank.mesh = -1
        rank.early.clear()

    def _note_fault(self, kind: str, number: int) -> None:
        self.faults.remove((kind, number))
        self.faulty.add(number)

    def _lose_rank(self, number: int, kind: str) -> None:
        self._note_fault(kind, number)
        if kind == "kill":
            self._close(number)
        self.ranks[number].state = "killed" if kind == "kill" else "frozen"

    def _group(self, number: int) -> CallGroup:
        members = tuple(range(FIRST, FIRST + self.plan.size))
        return CallGroup(members, number, "", self._name(number), TIMEOUT)

    def _name(self, number: int) -> str:
        return f"call {self.plan.names[number]} {self.ranks[number].call}"

    def _failure(self, number: int) -> Failure:
        return Failure(FIRST + number, "StorageError", f"rank {FIRST + number} failed")

    # -- the end

    def run_to_end(self) -> None:
        """Deliver all messages, and let the time pass, until all ranks have ended. The timeouts end it."""
        end = self.now + 3 * (TIMEOUT + round_protocol.DRAIN_SECONDS)
        while True:
            while events := self.normal_events():
                self.handle(events[0])
            if not any(rank.is_alive for rank in self.ranks):
                return
            assert self.now < end, [rank.state for rank in self.ranks]
            # Only silent and absent ranks are waited for.
            assert any(rank.state == "frozen" or self._is_joining(rank) for rank in self.ranks)
            self.pass_time()

    def pass_time(self, seconds: float = 1.0) -> None:
        self.now += seconds
        for number, rank in enumerate(self.ranks):
            if rank.is_alive and rank.protocol is not None:
                rank.protocol.tick(self.now)
                self._perform(number)
                self._wake(number)
        alive = {number for number, rank in enumerate(self.ranks) if rank.is_alive}
        waiting = {number for number in alive if self._is_joining(self.ranks[number])}
        if waiting == alive and not self.normal_events():
            absent = [FIRST + number for number in range(self.plan.size) if number not in waiting]
            for number in waiting:
                self._fail_to_join(number, Failure.of_all_ranks(f"rank {absent} did not make this call"))

    def _fail_to_join(self, number: int, failure: Failure) -> None:
        rank = self.ranks[number]
        if rank.protocol is None:
            rank.broken.append(failure)
            rank.state = "begin call" if rank.call < self.plan.calls else "ended"
            return
        rank.protocol.break_off([failure])
        self._perform(number)
        self._wake(number)

    def check(self) -> None:
        """Check what the ranks that were not killed or frozen have returned or raised."""
        plan, everyone = self.plan, range(self.plan.size)
        left = [rank for rank in self.ranks if rank.state == "ended"]
        for call in range(1, plan.calls + 1):
            for number in range(1, plan.rounds + 1):
                answers = [rank.answers[call, number] for rank in left if (call, number) in rank.answers]
                assert all(answer == answers[0] for answer in answers), answers
                failed = sorted(rank for rank, *name in self.failed if name == [call, number])
                if answers and not failed and len(set(plan.names[: plan.size])) == 1:
                    assert answers[0] == [[rank, call, number] for rank in everyone], answers
                elif answers and failed:
                    assert [failure.rank for failure in answers[0]] == [FIRST + rank for rank in failed], answers
        # Errors that broke the connections name a rank at fault.
        at_fault = self.faulty | {rank for rank, *_ in self.failed}
        for rank in left:
            for failure in rank.broken:
                numbers = [int(found) for found in re.findall(r"\b\d+\b", failure.text.partition("(")[0])]
                named = {number - FIRST for number in numbers} & {*everyone}
                # A rank that failed because of another one is absent too.
                assert named & at_fault, (failure, at_fault)
                assert named <= at_fault or "did not make this call" in failure.text, (failure, at_fault)
        if not self.faulty:
            assert not any(rank.broken for rank in left), [rank.broken for rank in left]
            assert all(rank.answers == left[0].answers for rank in left)

    def fingerprint(self) -> str:
        states = []
        for rank in self.ranks:
            protocol = {} if rank.protocol is None else dict(vars(rank.protocol))
            protocol.pop("_tree", None)
            states.append((vars(rank) | {"protocol": protocol}, self.faults))
        return repr((states, self.queues))


def run_every_order(plan: Plan) -> None:
    """Run a plan in every order of its events."""
    seen: set[str] = set()
    jobs = [Job(plan)]
    while jobs:
        job = jobs.pop()
        for event in job.events():
            following = copy.deepcopy(job)
            following.handle(event)
            state = following.fingerprint()
            if state not in seen:
                seen.add(state)
                jobs.append(following)
        if not job.normal_events():
            job.run_to_end()
            job.check()


def _plan_with(fault: str, victim: int, **options: Any) -> Plan:
    if fault == "error":
        return Plan(failing=frozenset({(victim, 1, 1)}), **options)
    return Plan(faults=() if fault == "none" else ((fault, victim),), **options)


@pytest.mark.parametrize("fault", ["none", "error", "kill", "freeze", "interrupt"])
def test_every_order_of_two_ranks_and_two_rounds(fault: str) -> None:
    for victim in range(2):
        for stoppable in (True, False):
            run_every_order(_plan_with(fault, victim, size=2, rounds=2, stoppable=stoppable))


@pytest.mark.parametrize(("fault", "victim"), [("error", 2), ("kill", 1)])
def test_every_order_of_three_ranks_in_a_line(fault: str, victim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_group, "FANOUT", 1)
    run_every_order(_plan_with(fault, victim, size=3))


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    size, calls, rounds = draw(st.integers(2, 5)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    ranks = st.integers(0, size - 1)
    work = st.tuples(ranks, st.integers(1, calls), st.integers(1, rounds))
    faults = st.tuples(st.sampled_from(["kill", "freeze", "interrupt", "close"]), ranks)
    return Plan(
        size,
        calls,
        rounds,
        draw(st.sampled_from([1, 2, 32])),
        draw(st.frozensets(work, max_size=2)),
        tuple(draw(st.lists(faults, max_size=2, unique_by=lambda fault: fault[1]))),
        stoppable=draw(st.booleans()),
        pieces=draw(st.booleans()),
    )


def run(plan: Plan, choices: list[int]) -> Job:
    """Run a plan. The choices select the first events. The rest happens in a fixed order."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(call_group, "FANOUT", plan.fanout)
        job = Job(plan)
        for choice in choices:
            events = job.events()
            if not events:
                break
            job.handle(events[choice % len(events)])
        job.run_to_end()
        job.check()
    return job


@settings(max_examples=200)
@given(plans(), st.lists(st.integers(0, 59), max_size=200))
def test_any_order_of_up_to_five_ranks(plan: Plan, choices: list[int]) -> None:
    run(plan, choices)


def working(size: int, fanout: int, patch: pytest.MonkeyPatch, **options: Any) -> Job:
    """Return a job whose ranks are all at work in round 1 of a call."""
    patch.setattr(call_group, "FANOUT", fanout)
    job = Job(Plan(size, fanout=fanout, **options))
    while any(rank.state != "working" for rank in job.ranks):
        job.handle(next(event for event in job.normal_events() if event.kind != "working"))
    return job


def deliver_all(job: Job) -> None:
    while events := [event for event in job.normal_events() if event.kind == "deliver"]:
        job.handle(events[0])


def end_work(job: Job, *ranks: int) -> None:
    for rank in ranks:
        job.handle(Event("working", rank))
    deliver_all(job)


@pytest.mark.parametrize("fanout", [1, 2, 32])
@pytest.mark.parametrize("fault", ["error", "kill", "interrupt"])
def test_a_fault_interrupts_the_work_of_all_others(fault: str, fanout: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for victim in range(5):
        failing = frozenset({(victim, 1, 1)}) if fault == "error" else frozenset()
        job = working(5, fanout, monkeypatch, failing=failing, faults=((fault, victim),))
        job.handle(Event("working" if fault == "error" else fault, victim))
        deliver_all(job)
        assert all(rank.interrupted for number, rank in enumerate(job.ranks) if number != victim)
        job.run_to_end()
        job.check()


def test_the_error_of_a_rank_that_ends_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    job = working(4, 32, monkeypatch, failing=frozenset({(1, 1, 1)}), faults=(("kill", 1),))
    end_work(job, 1)
    job.handle(Event("kill", 1))
    job.run_to_end()
    for number in (0, 2, 3):
        (failure,) = job.ranks[number].answers.get((1, 1)) or job.ranks[number].broken
        assert failure.text == f"rank {FIRST + 1} failed"


def test_an_error_while_ranks_rejoin_interrupts_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    job = working(3, 32, monkeypatch, calls=2, failing=frozenset({(1, 2, 1)}), faults=(("close", 2),))
    end_work(job, 0, 1, 2)
    job.handle(Event("decide", 0))
    deliver_all(job)
    job.handle(Event("close", 2))
    for rank in (0, 1):
        job.handle(Event("begin call", rank))
        job.handle(Event("begin round", rank))
    deliver_all(job)
    end_work(job, 1)
    for event in (Event("begin call", 2), Event("connect", 0), Event("begin round", 2)):
        job.handle(event)
    deliver_all(job)
    assert job.ranks[0].interrupted and job.ranks[2].interrupted
    job.run_to_end()
    job.check()


def test_work_that_cannot_stop_is_done_and_all_its_errors_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    failing = frozenset({(1, 1, 1), (3, 1, 1)})
    job = working(4, 2, monkeypatch, failing=failing, stoppable=False)
    end_work(job, 1, 0, 2, 3)
    job.run_to_end()
    job.check()
    assert [failure.rank for failure in job.ranks[2].answers[1, 1]] == [FIRST + 1, FIRST + 3]


def test_after_an_error_others_wait_a_limited_time(monkeypatch: pytest.MonkeyPatch) -> None:
    job = working(4, 2, monkeypatch, failing=frozenset({(3, 1, 1)}))
    end_work(job, 3, 0, 1)
    begin = job.now
    while any(job.ranks[number].state == "waiting" for number in (0, 1, 3)):
        job.pass_time()
        job.ranks[2].protocol.has_progressed = True  # type: ignore[union-attr]
        deliver_all(job)
    assert job.now - begin == round_protocol.DRAIN_SECONDS + 1
    assert [rank.state for rank in job.ranks] == ["ended", "ended", "working", "ended"]
    assert {failure.rank for rank in job.ranks for failure in rank.broken} == {FIRST + 3}


@pytest.mark.parametrize("reports", [True, False])
def test_only_work_without_progress_is_given_up(reports: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    job = working(4, 2, monkeypatch)
    end_work(job, 0, 2, 3)
    for _ in range(int(3 * TIMEOUT)):
        job.pass_time()
        job.ranks[1].protocol.has_progressed = reports  # type: ignore[union-attr]
        deliver_all(job)
    if reports:
        end_work(job, 1)
    job.faulty = set() if reports else {1}
    job.run_to_end()
    job.check()
    assert all(bool(rank.broken) != reports for rank in job.ranks)


def test_the_log_names_missing_ranks_on_waiting_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    job = working(5, 2, monkeypatch)
    end_work(job, 0, 1, 2, 4)
    while job.now < 1000 + 35:
        job.pass_time()
        job.ranks[3].protocol.has_progressed = True  # type: ignore[union-attr]
        deliver_all(job)
    text = f"call a 1: waiting for rank {FIRST + 3} (round 1). {call_group.ALONE}"
    assert [rank.warnings for rank in job.ranks] == [[text], [text], [text], [], [text]]


@settings(max_examples=60)
@given(st.integers(2, 5), st.sampled_from([1, 2, 32]), st.lists(st.integers(0, 59), max_size=60), st.data())
def test_ranks_in_different_calls_all_name_them(
    size: int, fanout: int, choices: list[int], data: st.DataObject
) -> None:
    names = tuple(data.draw(st.permutations("ab" + "aab"[: size - 2])))
    job = run(Plan(size, fanout=fanout, names=names), choices)
    by_name = {
        name: call_group.format_ranks([FIRST + number for number in range(size) if names[number] == name])
        for name in dict.fromkeys(names)
    }
    text = "; ".join(f"{ranks} in 'call {name} 1'" for name, ranks in by_name.items())
    for rank in job.ranks:
        assert [text in failure.text for failure in rank.answers[1, 1]] == [True]


def test_a_rank_in_another_round_or_call_is_named() -> None:
    for call, number in ((1, 2), (2, 1)):
        protocol = RoundProtocol(CallGroup((4, 5), 0, "", "the call", TIMEOUT), 0.0)
        protocol.connect(Tree(0, 2), 1, False, 0.0)
        protocol.begin_round("a round", False, 0.0)
        protocol.receive(1, Message("error", call, number, Failure.of_all_ranks("")), 0.0)
        (failure,) = protocol.failures
        assert "rank 5 is in another round or call" in failure.text


def test_invalid_messages_break_the_connections() -> None:
    messages: list[tuple[str, Any]] = [
        ("answer", (RESULT, b"", False)),
        ("stop", None),
        ("results", ({}, {}, False)),
        ("results", ({0: (RESULT, b"")}, {}, False)),
        ("results", ({1: (RESULT, b"")}, {"a": [0]}, False)),
        ("unreadable", "a reason"),
    ]
    for kind, body in messages:
        protocol = RoundProtocol(CallGroup((4, 5), 0, "", "the call", TIMEOUT), 0.0)
        protocol.connect(Tree(0, 2), 1, False, 0.0)
        protocol.begin_round("a round", False, 0.0)
        protocol.receive(1, Message(kind, 1, 1, body), 0.0)
        assert protocol.must_discard and "a message of rank 5 (a round)" in protocol.failures[0].text, kind
