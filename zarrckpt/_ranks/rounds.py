"""Rounds: every rank sends a result, the coordinator decides, and every rank gets its answer or the same error.

The rules are in ``round_protocol.py``. This module drives them with threads, clocks and connections.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from zarrckpt._errors import CheckpointError, log
from zarrckpt._format.wire import decode, encode
from zarrckpt._ranks.call_group import CallGroup
from zarrckpt._ranks.control_messages import FAILED, RESULT, STOPPED, Answer, Item, Message
from zarrckpt._ranks.errors import Failure, raise_together, wrap_foreign_errors
from zarrckpt._ranks.group import Ranks, default_group, global_rank
from zarrckpt._ranks.mesh import Mesh, MeshSlot, connect_mesh, reserve_mesh, start_thread
from zarrckpt._ranks.pieces import MessageChannel
from zarrckpt._ranks.round_protocol import Action, Do, RoundProtocol, Send, Warn, unreadable_text

A = TypeVar("A")
B = TypeVar("B")


@contextlib.contextmanager
def open_rounds(ranks: Ranks, call: str, timeout: float, *, queue: str = "foreground") -> Iterator[Rounds]:
    """Yield the rounds of one call ('save to s3://..'), which all these ranks must make.

    ``timeout`` is the maximum time in seconds without an arrival or progress. Calls with different ``queue`` names run
    concurrently. Raises CheckpointError.
    """
    members = ranks.members
    call_group = CallGroup(members, members.index(global_rank()), queue, call, timeout)
    if len(members) == 1:
        with wrap_foreign_errors():
            yield Rounds(call_group, MeshSlot())
        return
    with reserve_mesh(call_group) as slot:
        rounds = Rounds(call_group, slot)
        try:
            rounds._connect(slot.mesh)
            start_thread("zarrckpt-watch", rounds._watch)
            yield rounds
        except BaseException as err:
            rounds._fail(err)
            raise
        finally:
            rounds._end()


class Rounds:
    """The rounds of one call on one rank. One thread at a time calls :meth:`merge`."""

    def __init__(self, call_group: CallGroup, slot: MeshSlot) -> None:
        self.rank = call_group.position
        """This process's position in the group. 0 is the coordinator."""
        self.size = len(call_group.members)
        self.members = call_group.members
        """The global numbers of the ranks."""
        self.world = default_group()
        """The default group at the beginning of the call, which can be destroyed before the end."""
        self._call_group = call_group
        self._slot = slot
        self._protocol = RoundProtocol(call_group, time.monotonic())
        self._changed = threading.Condition()
        """The lock of the protocol, and the signal that its state has changed."""
        self._ended = threading.Event()
        self._mesh: Mesh | None = None
        self._channel: MessageChannel | None = None
        self._stop: Callable[[], None] | None = None

    def merge(
        self,
        round_name: str,
        on_each_rank: Callable[[], A],
        on_coordinator: Callable[[list[A]], B],
        stop: Callable[[], None] | None = None,
    ) -> B:
        """Do one round, and return its answer on all ranks.

        Each rank calls ``on_each_rank()``. Then the coordinator calls ``on_coordinator(results by rank)``, which
        returns the answer. An error of any of these calls is raised on every rank, after the work of all ranks has
        ended. A single process raises errors as they are. ``_format.wire.encode`` must support results and answers.

        Args:
            round_name: the results that the coordinator waits for, in warnings and errors.
            stop: called once in another thread if another rank fails or is lost while this rank is in
                ``on_each_rank``. An error of ``on_each_rank`` is not reported then.
        """
        if self.size == 1:
            return on_coordinator([on_each_rank()])
        with self._protocol_events() as protocol:
            protocol.begin_round(round_name, is_stoppable=stop is not None, now=time.monotonic())
            self._stop = stop
        self._raise_if_broken()
        item, error = self._work(on_each_rank)
        with self._protocol_events() as protocol:
            protocol.end_work(item, used_channel=self._channel is not None, now=time.monotonic())
        answer = self._wait_for_answer()
        value: Any = None
        if answer is None:
            answer, value, error = self._decide(on_coordinator, error)
            with self._protocol_events() as protocol:
                protocol.end_round(answer)
        kind, body, _ = answer
        if kind == FAILED:
            raise_together(body, self._call_group.rank, error)
        return value if self.rank == 0 else self._decode(0, body)  # type: ignore[no-any-return]

    @property
    def error_is_shared(self) -> bool:
        """Whether the last error was the answer of a round, so that all ranks have it and their work has ended."""
        return self._protocol.error_is_shared

    def report_alive(self) -> None:
        """Report progress, so that the other ranks do not consider this rank silent. Any thread may call it often."""
        self._protocol.has_progressed = True

    def channel(self) -> MessageChannel:
        """Return the channel of this call. Not in its first round, when the connections can still be replaced."""
        with self._changed:
            if self._channel is None:
                self._channel = MessageChannel(self._mesh, self.report_alive, 2 * self._call_group.timeout)
                if self._protocol.failures or self._protocol.round.is_stopping:
                    self._channel.close()
            return self._channel

    # Steps of a round, in the caller's thread.

    def _work(self, on_each_rank: Callable[[], A]) -> tuple[Item, Exception | None]:
        if self._protocol.is_stopped:
            return (STOPPED, None), None
        try:
            return (RESULT, encode(on_each_rank())), None
        except Exception as err:
            return (FAILED, Failure.of_error(err, self._call_group.rank)), err

    def _wait_for_answer(self) -> Answer | None:
        """Wait for the answer, or for the results of all ranks. Raises the error that broke the connections."""
        with self._changed:
            while self._protocol.round.answer is None and not self._protocol.must_decide:
                self._raise_if_broken()
                self._changed.wait(1.0)
            return self._protocol.round.answer

    def _decide(
        self, on_coordinator: Callable[[list[A]], B], error: Exception | None
    ) -> tuple[Answer, Any, Exception | None]:
        """Return the coordinator's answer, its value, and this rank's error."""
        with self._changed:
            results, failures = self._protocol.round.outcomes(self._call_group)
            used_channel = self._protocol.round.used_channel
        value: Any = None
        if not failures:
            try:
                value = on_coordinator([self._decode(position, data) for position, data in enumerate(results)])
                return (RESULT, encode(value), used_channel), value, None
            except Exception as err:
                failures, error = [Failure.of_error(err, self._call_group.rank)], err
        return (FAILED, failures, used_channel), value, error

    def _decode(self, position: int, data: bytes) -> Any:
        """Return the decoded result of a rank. Raises CheckpointError with the rank."""
        try:
            return decode(data)
        except CheckpointError as err:
            raise CheckpointError(
                unreadable_text(self._call_group, self._protocol.round.name, position, str(err))
            ) from None

    def _raise_if_broken(self) -> None:
        if self._protocol.failures:
            raise_together(self._protocol.failures, self._call_group.rank, None)

    # Events, and the actions of the protocol.

    @contextlib.contextmanager
    def _protocol_events(self) -> Iterator[RoundProtocol]:
        """Yield the protocol for events, under the lock, and then perform its actions."""
        with self._changed:
            yield self._protocol
            for action in self._protocol.take_actions():
                self._perform(action)
            self._changed.notify_all()

    def _perform(self, action: Action) -> None:
        match action:
            case Send(peers, message) if self._mesh is not None:
                self._mesh.send(peers, message)
            case Warn(text):
                log.warning("%s", text)
            case Do.CLOSE_CHANNEL if self._channel is not None:
                self._channel.close()
            case Do.INTERRUPT_WORK if self._stop is not None:
                start_thread("zarrckpt-stop", self._stop)
                self._stop = None
            case Do.REJOIN if self._mesh is not None:
                start_thread("zarrckpt-join", self._rejoin, self._mesh)
                self._mesh = None

    def _receive(self, mesh: Mesh, peer: int, message: Message | None) -> None:
        with self._protocol_events() as protocol:
            if mesh is self._mesh and message is None:
                protocol.lose(peer)
            elif mesh is self._mesh and message is not None:
                protocol.receive(peer, message, time.monotonic())

    def _watch(self) -> None:
        while not self._ended.wait(min(1.0, self._call_group.timeout / 4)):
            with self._protocol_events() as protocol:
                protocol.tick(time.monotonic())

    # The connections.

    def _connect(self, kept: Mesh | None) -> None:
        mesh = kept or connect_mesh(self._call_group, self._ended.is_set)
        with self._protocol_events() as protocol:
            if self._ended.is_set():
                mesh.close()
                return
            self._slot.mesh = self._mesh = mesh
            mesh.begin_call()
            protocol.connect(mesh.tree, mesh.calls, kept=kept is not None, now=time.monotonic())
        mesh.attach(self._receive)

    def _rejoin(self, left: Mesh) -> None:
        left.close()
        try:
            self._connect(None)
        except Exception as err:
            with self._protocol_events() as protocol:
                protocol.break_off([Failure.of_error(err, None)])

    def _fail(self, error: BaseException) -> None:
        """Break the connections because of an error in the caller's block, unless all ranks have this error."""
        call, rank = self._call_group.call, self._call_group.rank
        failure = Failure.of_error(error, rank)
        if not isinstance(error, Exception):
            failure = Failure.of_all_ranks(f"{call}: rank {rank} was interrupted ({type(error).__name__})")
        elif self.error_is_shared:
            return
        with self._protocol_events() as protocol:
            protocol.break_off([failure], None, call)

    def _end(self) -> None:
        with self._changed:
            self._ended.set()
            mesh = self._mesh
        if self._channel is not None:
            self._channel.close()
        if mesh is not None:
            mesh.detach()
        if mesh is None or self._protocol.must_discard or not mesh.is_current():
            self._slot.clear()
