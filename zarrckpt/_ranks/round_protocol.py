"""The protocol of rounds, as a state machine without I/O: events go in, actions come out.

In each round, the results of all ranks go up a tree to the coordinator (position 0), and its answer goes down. There
are two kinds of errors. An error in a rank's own work is sent to the coordinator at once. The other ranks stop their
work, and the error becomes the answer of the round; the connections stay open. A rank that is lost, silent, interrupted
or out of step breaks the connections: the rank that notices it informs its neighbours, they inform theirs, and the call
ends on every rank.

A driver (``rounds.py``) calls one method of :class:`RoundProtocol` for each event, and then performs the actions that
:meth:`RoundProtocol.take_actions` returns. Times are seconds of one clock, chosen by the driver.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from zarrckpt._ranks import call_group as call_groups
from zarrckpt._ranks.call_group import CallGroup, Tree, format_ranks
from zarrckpt._ranks.control_messages import FAILED, STOPPED, UNREADABLE, Answer, Item, Message
from zarrckpt._ranks.errors import Failure, escape_text, select_causes

DRAIN_SECONDS = 60.0
"""Seconds that the coordinator waits for the work of other ranks to end after an error."""

HEARTBEAT_SECONDS = 10.0

_MAX_NAMED = 32
"""Maximum number of missing ranks in a heartbeat."""


class Send(NamedTuple):
    """The action of sending a message to neighbours in the tree."""

    peers: tuple[int, ...]
    message: Message


class Warn(NamedTuple):
    """The action of logging a warning."""

    text: str


class Do(enum.Enum):
    """Actions without arguments."""

    CLOSE_CHANNEL = "close the channel, so that waits for pieces end"
    INTERRUPT_WORK = "call the stop function of this rank's work"
    REJOIN = "close the connections, join the ranks of the call anew, and connect again"


Action = Send | Warn | Do


@dataclass
class Round:
    """The state of one round on one rank."""

    name: str
    number: int
    since: float
    """The time of this rank's last transition: round begun, connections made, work ended, or results sent."""
    is_stoppable: bool = False
    is_open: bool = True
    is_stopping: bool = False
    """Whether a rank has failed, so that the others stop."""
    drain_end: float | None = None
    own: Item | None = None
    answer: Answer | None = None
    errors: list[Failure] = field(default_factory=list)
    """Errors that are known before the answer."""
    warned: bool = False
    # Results of this rank and of those below it, which arrived over the same connections.
    items: dict[int, Item] = field(default_factory=dict)
    calls: dict[str, list[int]] = field(default_factory=dict)
    """Positions by the text of the call that they are in."""
    arrived: set[int] = field(default_factory=set)
    """The children whose results have arrived."""
    reported: dict[int, list[int]] = field(default_factory=dict)
    """The missing ranks that children reported."""
    used_channel: bool = False
    sent: bool = False

    def forget_arrived(self, group: CallGroup) -> None:
        """Forget the results that arrived over earlier connections."""
        self.items = {} if self.own is None else {group.position: self.own}
        self.calls = {group.call: [group.position]}
        self.arrived, self.reported = set(), {}
        self.used_channel = self.sent = False

    def has_all(self, tree: Tree) -> bool:
        """Whether the results of all children have arrived."""
        return self.arrived.issuperset(tree.children)

    def add_results(
        self, peer: int, branch: set[int], body: tuple[dict[int, Item], dict[str, list[int]], bool]
    ) -> bool:
        """Add the results of a child and the ranks below it (``branch``). Return False if they are of other ranks."""
        items, calls, used_channel = body
        if not branch or items.keys() != branch or not all(branch.issuperset(ranks) for ranks in calls.values()):
            return False
        self.arrived.add(peer)
        self.items.update(items)
        for call, positions in calls.items():
            self.calls.setdefault(call, []).extend(positions)
        self.used_channel |= used_channel
        return True

    def outcomes(self, group: CallGroup) -> tuple[list[bytes], list[Failure]]:
        """Return the encoded results of all ranks in a complete round, and its failures."""
        items = [item for _, item in sorted(self.items.items())]
        failures = [content for kind, content in items if kind == FAILED]
        if not failures and self.number == 1 and len(self.calls) > 1:
            calls = [
                f"{group.format_positions(sorted(positions))} in {call!r:.1000}"
                for call, positions in sorted(self.calls.items(), key=lambda entry: min(entry[1]))
            ]
            text = f"the ranks are in different calls: {'; '.join(calls)}. All ranks must make the same calls with "
            failures = [Failure.of_all_ranks(f"{text}the same urls, in the same order")]
        return [content for _, content in items], select_causes(failures)

    def missing_ranks(self, group: CallGroup, tree: Tree) -> list[int]:
        """Return the ranks whose results are missing, of this rank and those below it in the tree."""
        missing = [group.rank] if self.own is None else []
        for child in tree.children:
            if child not in self.arrived:
                missing += self.reported.get(child) or [group.members[child]]
        return missing


class RoundProtocol:
    """The state of one call on one rank. The driver passes one event at a time.

    It is one large class because every event can change the round, the connections and the failures together.
    """

    def __init__(self, call_group: CallGroup, now: float) -> None:
        self.failures: list[Failure] = []
        """The failures that broke the connections. Once there are any, the call fails on every rank."""
        self.error_is_shared = False
        """Whether the last error was the answer of a round, so that all ranks have it and their work has ended."""
        self.has_progressed = False
        """Whether this rank's work made progress. The driver sets it at any time."""
        self.must_discard = False
        """Whether no other call can use the connections."""
        self.round = Round(call_group.call, 0, now, is_open=False)
        self._group = call_group
        self._tree = Tree(call_group.position, len(call_group.members))
        self._connected = False
        self._call_number = 0
        self._kept = False
        self._seen: dict[int, float] = {}
        """Times of the last messages of the neighbours in this call."""
        self._later: list[tuple[int, Message]] = []
        """Messages of later rounds and calls."""
        self._lost_late: list[int] = []
        """Neighbours that were lost after their results had arrived."""
        self._interval = min(HEARTBEAT_SECONDS, call_group.timeout / 4)
        self._next_heartbeat = 0.0
        self._awaited = [call_group.members[0]]
        """The ranks that the coordinator waits for, as far as known."""
        self._actions: list[Action] = []

    def take_actions(self) -> list[Action]:
        """Return the actions since the last call of this method, in their order."""
        actions, self._actions = self._actions, []
        return actions

    @property
    def must_decide(self) -> bool:
        """Whether this is the coordinator and it has the results of all ranks."""
        return self._group.position == 0 and self.round.own is not None and self.round.has_all(self._tree)

    @property
    def is_stopped(self) -> bool:
        """Whether this rank's work is not needed any more. Work that cannot be stopped is always done on all ranks.

        Such work can contain collectives, and the set of failed ranks does not depend on which rank was first.
        """
        return bool(self.failures) or (self.round.is_stopping and self.round.is_stoppable)

    # Events of this rank.

    def connect(self, tree: Tree, call_number: int, kept: bool, now: float) -> None:
        """Use new connections, or those of an earlier call (``kept``). ``call_number`` counts the calls on them."""
        self._tree, self._call_number, self._kept, self._connected = tree, call_number, kept, True
        self.round.since = now
        self._send(tree.edges, "hello", None)
        if self.round.is_stopping:
            self._send(tree.children, "stop", None)
        if self.round.own is not None and self.round.own[0] == FAILED and tree.parent is not None:
            self._send([tree.parent], "error", self.round.own[1])
        self._send_results(now)

    def begin_round(self, name: str, is_stoppable: bool, now: float) -> None:
        """Begin a round. ``is_stoppable`` is whether this rank's work can be interrupted."""
        self.error_is_shared = False
        if self.failures:
            return
        self.round = Round(name, self.round.number + 1, now, is_stoppable)
        self.round.forget_arrived(self._group)
        later, self._later = self._later, []
        lost, self._lost_late = self._lost_late, []
        for peer, message in later:
            self.receive(peer, message, now)
        for peer in lost:
            self.lose(peer)

    def end_work(self, item: Item, used_channel: bool, now: float) -> None:
        """End this rank's work in the round, with its result or its failure."""
        if item[0] == FAILED and self.is_stopped:
            item = (STOPPED, None)
        self.round.own = self.round.items[self._group.position] = item
        self.round.used_channel |= used_channel
        self.round.since = now
        if item[0] == FAILED:
            self._report_error(item[1], now)
        self._send_results(now)

    def end_round(self, answer: Answer) -> None:
        """End the round with the coordinator's answer: RESULT with encoded bytes, or FAILED with failures of ranks."""
        self._send(self._tree.children, "answer", answer)
        self.round.answer, self.round.is_open = answer, False
        if answer[0] == FAILED:
            self.error_is_shared = True
            self.must_discard |= answer[2]
            self._actions.append(Do.CLOSE_CHANNEL)

    def break_off(self, failures: list[Failure], source: int | None = None, call: str | None = None) -> None:
        """Break the connections: every rank raises these failures when its own work has ended.

        A rank that begins ``call`` later raises them too. The neighbour ``source`` has them already.
        """
        if self.failures:
            return
        self.failures, self.must_discard = failures, True
        self._send([peer for peer in self._tree.edges if peer != source], "abort", (failures, call))
        self._interrupt_work()

    def tick(self, now: float) -> None:
        """Send heartbeats, and detect silent ranks. Called about every second, or more often."""
        if not self._connected or self.failures:
            return
        is_waiting = self.round.is_open and self.round.own is not None and not self.must_decide
        if now >= self._next_heartbeat:
            self._next_heartbeat = now + self._interval
            if self.has_progressed or is_waiting:
                self._send_heartbeats()
        if self.round.is_open:
            self._check_silence(is_waiting, now)

    # Events of neighbours.

    def receive(self, peer: int, message: Message, now: float) -> None:
        """Handle a message of a neighbour."""
        kind, call, number, body = message
        in_round = kind in ("results", "error", "stop", "answer")
        if kind == UNREADABLE:
            self._refuse(peer, body)
        elif call > self._call_number or (call == self._call_number and in_round and number > self.round.number):
            self._later.append((peer, message))
            if self.round.is_open:
                self.break_off([Failure.of_all_ranks(_out_of_step_text(self._group, self.round.name, peer))])
        elif call == self._call_number:
            self._seen[peer] = now
            if not in_round:
                self._handle_outside_round(peer, kind, body)
            elif kind in ("answer", "stop") and peer != self._tree.parent:
                self._refuse(peer, f"only the parent rank sends messages of kind {kind!r}")
            elif number == self.round.number and self.round.is_open:
                self._handle_in_round(peer, kind, body, now)

    def lose(self, peer: int) -> None:
        """Handle the loss of the connection to a neighbour."""
        round = self.round
        if self.failures:
            return
        if self._kept and round.number <= 1 and peer not in self._seen:
            # It left the connections before this call, and can still take part in it.
            self._rejoin(peer)
        elif round.is_open and (
            round.has_all(self._tree) if self._group.position == 0 else round.sent and peer in round.arrived
        ):
            # Its results have arrived, and the coordinator is deciding, so the round ends normally.
            self._lost_late.append(peer)
            self.must_discard = True
        else:
            known = [failure for failure in select_causes(round.errors) if not failure.lost]
            gone = Failure.of_all_ranks(_loss_text(self._group, round.name, peer))
            self.break_off(known or [gone], None, self._group.call)

    def _handle_outside_round(self, peer: int, kind: str, body: Any) -> None:
        if kind == "abort":
            self.break_off(body[0], peer, body[1])
        elif kind == "rejoin" and self.round.number <= 1:
            self._rejoin(peer)
        elif kind == "rejoin":
            self.lose(peer)
        elif kind == "heartbeat" and peer == self._tree.parent:
            self._awaited = body
        elif kind == "heartbeat":
            self.round.reported[peer] = body

    def _handle_in_round(self, peer: int, kind: str, body: Any, now: float) -> None:
        if kind == "results":
            if self.round.add_results(peer, self._tree.branch(peer), body):
                self._send_results(now)
            else:
                self._refuse(peer, "its results are not those of the peer and the ranks below it in the tree")
        elif kind == "error":
            self._report_error(body, now)
        elif kind == "stop":
            self._stop(peer)
        else:
            self.end_round(body)

    # Steps of the protocol.

    def _send(self, peers: Iterable[int], kind: str, body: Any) -> None:
        to = tuple(peers)
        if to and self._connected:
            self._actions.append(Send(to, Message(kind, self._call_number, self.round.number, body)))

    def _send_results(self, now: float) -> None:
        """Send the results of this rank and of the ranks below it when they are complete."""
        round, parent = self.round, self._tree.parent
        if parent is None or not self._connected or round.sent:
            return
        if round.own is not None and round.has_all(self._tree):
            round.sent = True
            round.since = now
            calls = round.calls if round.number == 1 else {}
            self._send([parent], "results", (round.items, calls, round.used_channel))

    def _report_error(self, failure: Failure, now: float) -> None:
        """Send a rank's error to the coordinator, which stops all ranks."""
        if failure not in self.round.errors:
            self.round.errors.append(failure)
        if self._tree.parent is not None:
            self._send([self._tree.parent], "error", failure)
        elif not self.round.is_stopping:
            self.round.drain_end = now + DRAIN_SECONDS
            self._stop(None)

    def _stop(self, source: int | None) -> None:
        if not self.round.is_stopping:
            self.round.is_stopping = True
            self._send([child for child in self._tree.children if child != source], "stop", None)
            self._interrupt_work()

    def _interrupt_work(self) -> None:
        self._actions.append(Do.CLOSE_CHANNEL)
        if self.round.is_open and self.round.own is None:
            self._actions.append(Do.INTERRUPT_WORK)

    def _rejoin(self, source: int) -> None:
        """Leave the kept connections together with the other ranks of this call."""
        if self.failures or not self._connected:
            return
        self._send([peer for peer in self._tree.edges if peer != source], "rejoin", None)
        self._connected = self._kept = False
        self._seen, self._later, self._lost_late = {}, [], []
        self.round.forget_arrived(self._group)
        self._actions.append(Do.REJOIN)

    # Heartbeats and silence.

    def _send_heartbeats(self) -> None:
        """Send the neighbours a sign of progress or waiting, with the missing ranks."""
        self.has_progressed = False
        missing = self.round.missing_ranks(self._group, self._tree)
        if self._tree.parent is None:
            self._awaited = missing
        elif not self.round.sent:
            self._send([self._tree.parent], "heartbeat", missing[:_MAX_NAMED])
        self._send(self._tree.children, "heartbeat", self._awaited[:_MAX_NAMED])

    def _check_silence(self, is_waiting: bool, now: float) -> None:
        round, group = self.round, self._group
        # The parent also during this rank's own work, which is useless after the parent is lost.
        expected = [peer for peer in self._tree.edges if peer not in round.arrived]
        silent = [peer for peer in expected if now - max(round.since, self._seen.get(peer, 0.0)) > group.timeout]
        if silent:
            self.break_off([Failure.of_all_ranks(_silence_text(group, round.name, silent))])
        elif round.drain_end is not None and now > round.drain_end:
            self.break_off(select_causes(round.errors))
        elif is_waiting and not round.warned and now - round.since > call_groups.WARN_SECONDS:
            round.warned = True
            missing = self._awaited if round.sent else round.missing_ranks(group, self._tree)
            alone = f". {call_groups.ALONE}" if round.number == 1 else ""
            self._actions.append(Warn(f"{group.call}: waiting for {format_ranks(missing)} ({round.name}){alone}"))

    def _refuse(self, peer: int, reason: str) -> None:
        """Break the connections because of an invalid message of a peer."""
        self.break_off(
            [Failure.of_all_ranks(unreadable_text(self._group, self.round.name, peer, reason))], None, self._group.call
        )


def unreadable_text(group: CallGroup, round_name: str, position: int, reason: str) -> str:
    """Return the text of an error about a message of a rank."""
    return (
        f"{group.call}: a message of rank {group.members[position]} ({round_name}) cannot be read: "
        f"{escape_text(reason, 1000)}. All ranks need the same version of zarrckpt, and no other process may access "
        "the store of the default process group"
    )


def _out_of_step_text(group: CallGroup, round_name: str, position: int) -> str:
    return (
        f"{group.call}: rank {group.members[position]} is in another round or call, but this rank, {group.rank}, is "
        f"in {round_name!r}. All ranks must make the same calls in the same order"
    )


def _loss_text(group: CallGroup, round_name: str, position: int) -> str:
    return (
        f"{group.call}: the connection to rank {group.members[position]} was lost ({round_name}). Its process ended "
        "or was killed, or its host is down. See its log"
    )


def _silence_text(group: CallGroup, round_name: str, positions: list[int]) -> str:
    return (
        f"{group.call}: {group.format_positions(positions)} sent nothing for {group.timeout:g} s (expected in "
        f"{round_name!r}). It did not make this call, or it hangs or was stopped, or its host is down. See its log. If "
        "the call needs more time, set a larger timeout in SaveOptions or LoadOptions"
    )
