"""Rounds: every rank sends a result, the coordinator decides, and every rank gets its answer or the same error.

There are two kinds of errors. An error in a rank's own work is sent to the coordinator at once. The other ranks stop
their work, and the error becomes the answer of the round; the connections stay open. A rank that is lost, silent,
interrupted or out of step breaks the mesh: the rank that notices it informs its neighbours, they inform theirs, and
every rank closes the mesh.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn, TypeVar

from zarrckpt._errors import CheckpointError, log
from zarrckpt._format.wire import decode, encode
from zarrckpt._ranks import joining
from zarrckpt._ranks.control_messages import FAILED, RESULT, STOPPED, UNREADABLE, Item, Message
from zarrckpt._ranks.errors import (
    Failure,
    StoppedByOthers,
    causes,
    cleaned,
    common,
    failure_of,
    raise_together,
)
from zarrckpt._ranks.group import Ranks, default_group, errors_as_ours, global_rank
from zarrckpt._ranks.joining import CallGroup, ranks_text
from zarrckpt._ranks.mesh import Mesh, MeshPlace, made, place_of, started
from zarrckpt._ranks.pieces import Pieces

DRAIN_SECONDS = 60.0
"""Seconds that the coordinator waits for the work of other ranks to end after an error."""

BEAT_SECONDS = 10.0

A = TypeVar("A")
B = TypeVar("B")


@contextlib.contextmanager
def joined(ranks: Ranks, call: str, timeout: float, *, queue: str = "foreground") -> Iterator[Rounds]:
    """Yield the rounds of one call ('save to s3://..'), which all these ranks must make.

    ``timeout`` is the maximum time in seconds without an arrival or progress. Calls with different ``queue`` names run
    concurrently. Raises CheckpointError.
    """
    members = ranks.members
    if len(members) == 1:
        with errors_as_ours():
            yield Alone(CallGroup(members, 0, queue, call, timeout))
        return
    call_group = CallGroup(members, members.index(global_rank()), queue, call, timeout)
    with place_of(call_group) as place:
        rounds = Rounds(call_group)
        try:
            rounds._enter(place)
            yield rounds
        except BaseException as err:
            rounds._leave(err)
            raise
        finally:
            rounds._end(place)


class Rounds:
    """The rounds of one call on one rank. One thread at a time calls :meth:`merge`."""

    def __init__(self, call_group: CallGroup) -> None:
        self.rank = call_group.position
        """This process's position in the group."""
        self.size = len(call_group.members)
        self.members = call_group.members
        """The global numbers of the ranks."""
        self.world = default_group()
        """The default group at the beginning of the call, which can be destroyed before the end."""
        self._call_group = call_group
        self._changed = threading.Condition()
        self._mesh: Mesh | None = None
        self._kept = False
        self._over = threading.Event()
        self._progress = False
        self._waiting = False
        self._broken: list[Failure] | None = None
        self._in_step = False
        self._discard = False
        self._gone: list[int] = []
        self._pieces: Pieces | None = None
        self._interval = min(BEAT_SECONDS, call_group.timeout / 4)
        self._ahead: list[tuple[int, Message]] = []
        self._number = 0
        self._open = False
        self._awaited = [call_group.members[0]]
        self._own: Item | None = None
        self._reset(call_group.call, None)
        self._new_edges()

    def merge(
        self,
        what: str,
        mine: Callable[[], A],
        decide: Callable[[list[A]], B],
        stop: Callable[[], None] | None = None,
    ) -> B:
        """Do one round: ``mine()`` on every rank, then ``decide(results by rank)`` on the coordinator.

        Returns the coordinator's answer on all ranks. An error in any of these calls is raised on every rank after the
        work of all ranks has ended. ``stop`` is called once in another thread if another rank fails or is lost while
        this rank is in ``mine``. An error of ``mine`` is not reported then. ``_format.wire.encode`` must support the
        results and answers.
        """
        self._begin(what, stop)
        item, error = self._work(mine)
        with self._changed:
            self._set_own(item)
            self._used |= self._pieces is not None
            self._since = time.monotonic()
            self._advance()
            self._wait(lambda: self._answer is not None or self._all_in())
            answer = self._answer
        value: Any = None
        if answer is None:
            answer, value, error = self._decided(decide, error)
        kind, body, used = answer
        if kind == RESULT:
            return value if self.rank == 0 else self._decoded(0, body)  # type: ignore[no-any-return]
        self._in_step = True
        self._discard = self._discard or used
        raise_together(body, self.members[self.rank], error)

    @property
    def in_step(self) -> bool:
        """Whether the last error was the answer of a round, so that all ranks have it and their work has ended."""
        return self._in_step

    def progressed(self) -> None:
        """Report progress, so that the other ranks do not consider this rank silent. Any thread may call it often."""
        self._progress = True

    def pieces(self) -> Pieces:
        """Return the pieces of this call. Not in its first round, when the connections can still be replaced."""
        with self._changed:
            if self._pieces is None:
                self._pieces = Pieces(self._mesh, self.progressed, 2 * self._call_group.timeout)
                if self._stopping or self._broken:
                    self._pieces.close()
            return self._pieces

    # The parts of a round, in the caller's thread.

    def _begin(self, what: str, stop: Callable[[], None] | None) -> None:
        with self._changed:
            self._in_step = False
            if self._broken:
                self._raise_broken()
            self._number += 1
            self._open = True
            self._reset(what, stop)
            ahead, self._ahead = self._ahead, []
            for peer, message in ahead:
                self._take(peer, message)
            for peer in self._gone:
                self._lost(peer)

    def _reset(self, what: str, stop: Callable[[], None] | None) -> None:
        self._what = what
        self._stop, self._stoppable = stop, stop is not None
        self._stopping = False
        self._drain: float | None = None
        self._own = None
        self._answer: tuple[str, Any, bool] | None = None
        self._failures: list[Failure] = []
        self._since = self._begun = time.monotonic()
        self._warned = False
        self._clear_arrived()

    def _clear_arrived(self) -> None:
        own = self._own
        self._arrived: set[int] = set()
        self._finals: dict[int, Item] = {} if own is None else {self.rank: own}
        self._calls: dict[str, list[int]] = {self._call_group.call: [self.rank]}
        self._used: bool = False
        self._sent = False
        self._reported: dict[int, list[int]] = {}

    def _work(self, mine: Callable[[], A]) -> tuple[Item, BaseException | None]:
        try:
            if self._is_to_stop():
                raise StoppedByOthers
            return (RESULT, encode(mine())), None
        except Exception as err:
            with self._changed:
                if self._is_to_stop():
                    return (STOPPED, None), None
                failure = failure_of(err, self.members[self.rank])
                item = (FAILED, failure)
                self._set_own(item)  # first, because this rank's own work needs no stop
                self._error_known(failure)
                return item, err

    def _is_to_stop(self) -> bool:
        """Whether this rank's work is not needed any more. Work without ``stop`` is always done on all ranks.

        Such work can contain collectives, and the set of failed ranks does not depend on which rank was first.
        """
        return self._broken is not None or (self._stopping and self._stoppable)

    def _set_own(self, item: Item) -> None:
        self._own = item
        self._finals[self.rank] = item

    def _decided(
        self, decide: Callable[[list[Any]], Any], error: BaseException | None
    ) -> tuple[tuple[str, Any, bool], Any, BaseException | None]:
        """Decide and send the answer on the coordinator. Return the answer, its value, and the coordinator's error."""
        value: Any = None
        failures = self._failed()
        if not failures:
            try:
                items = [self._finals[position][1] for position in range(self.size)]
                value = decide([self._decoded(position, item) for position, item in enumerate(items)])
                body = encode(value)
            except Exception as err:
                failures, error = [failure_of(err, self.members[self.rank])], err
        with self._changed:
            answer = (FAILED, causes(failures), self._used) if failures else (RESULT, body, self._used)
            self._answered(answer)
        return answer, value, error

    def _decoded(self, position: int, data: bytes) -> Any:
        """Return the decoded result of a rank. Raises CheckpointError with the rank."""
        try:
            return decode(data)
        except CheckpointError as err:
            raise CheckpointError(self._unreadable(position, str(err))) from None

    def _unreadable(self, position: int, reason: str) -> str:
        return (
            f"{self._call_group.call}: a message of rank {self.members[position]} ({self._what}) cannot be read: "
            f"{cleaned(reason, 1000)}. All ranks need the same version of zarrckpt, and no other process may access "
            "the store of the default process group"
        )

    def _failed(self) -> list[Failure]:
        failures = [item[1] for _, item in sorted(self._finals.items()) if item[0] == FAILED]
        if not failures and self._number == 1 and len(self._calls) > 1:
            calls = [
                f"{self._call_group.named(sorted(positions))} in {call!r:.1000}"
                for call, positions in sorted(self._calls.items(), key=lambda entry: min(entry[1]))
            ]
            return [
                common(
                    f"the ranks are in different calls: {'; '.join(calls)}. All ranks must make the same calls with "
                    "the same urls, in the same order"
                )
            ]
        return failures

    def _wait(self, done: Callable[[], bool]) -> None:
        """Wait for other ranks, under the lock. Raises the error that broke the mesh."""
        self._waiting = True
        try:
            while not done():
                if self._broken:
                    self._raise_broken()
                self._changed.wait(1.0)
        finally:
            self._waiting = False

    def _raise_broken(self) -> NoReturn:
        assert self._broken is not None
        raise_together(self._broken, self.members[self.rank], None)

    # Methods for other threads, under the lock: receive messages, notice losses, watch the time.

    def _received(self, mesh: Mesh, peer: int, message: Message | None) -> None:
        with self._changed:
            if mesh is not self._mesh:
                return
            if message is None:
                self._lost(peer)
            elif message.kind == UNREADABLE:
                self._refuse(peer, message.body)
            elif message.call == mesh.calls:
                self._seen[peer] = time.monotonic()
                self._here.add(peer)
                self._take(peer, message)
            elif message.call > mesh.calls:
                self._ahead.append((peer, message))
                if self._open and message.kind == "here":
                    self._break([self._out_of_step(peer)])

    def _take(self, peer: int, message: Message) -> None:
        kind, _, number, body = message
        if kind == "abort":
            self._break(body[0], peer, body[1])
        elif kind == "rejoin":
            self._anew(peer) if self._number <= 1 else self._lost(peer)
        elif kind == "beat":
            if peer == self._mesh_now().parent:
                self._awaited = body
            else:
                self._reported[peer] = body
        elif kind in ("answer", "stop") and peer != self._mesh_now().parent:
            self._refuse(peer, f"only the parent rank sends messages of kind {kind!r}")
        elif number > self._number:
            self._ahead.append((peer, message))
            if self._open and kind in ("final", "error", "answer"):
                self._break([self._out_of_step(peer)])
        elif number == self._number and self._open:
            if kind == "final":
                self._final(peer, *body)
            elif kind == "error":
                self._error_known(body)
            elif kind == "stop":
                self._stop_all(peer)
            elif kind == "answer":
                self._answered(body)

    def _final(self, peer: int, items: dict[int, Item], calls: dict[str, list[int]], used: bool) -> None:
        below = self._mesh_now().below(peer)
        if items.keys() != below or not all(below.issuperset(positions) for positions in calls.values()):
            self._refuse(peer, "its results are not those of the peer and the ranks below it in the tree")
            return
        self._arrived.add(peer)
        self._finals.update(items)
        for call, positions in calls.items():
            self._calls.setdefault(call, []).extend(positions)
        self._used |= used
        self._advance()

    def _all_in(self) -> bool:
        """Whether the coordinator has all results."""
        mesh = self._mesh
        return self.rank == 0 and mesh is not None and self._arrived.issuperset(mesh.children)

    def _advance(self) -> None:
        """Send the results of this rank and of the ranks below it when they are complete."""
        mesh = self._mesh
        if mesh is None or self._own is None or not self._arrived.issuperset(mesh.children):
            return
        if mesh.parent is not None and not self._sent:
            self._sent = True
            self._since = time.monotonic()
            calls = self._calls if self._number == 1 else {}
            self._send([mesh.parent], "final", (self._finals, calls, self._used))
        self._changed.notify_all()

    def _answered(self, answer: tuple[str, Any, bool]) -> None:
        if self._mesh is not None:
            self._send(self._mesh.children, "answer", answer)
        self._answer = answer
        self._open = False
        if answer[0] == FAILED and self._pieces is not None:
            self._pieces.close()
        self._changed.notify_all()

    def _error_known(self, failure: Failure) -> None:
        """Send a rank's error to the coordinator, which stops all ranks."""
        self._failures.append(failure)
        mesh = self._mesh
        if mesh is None:
            return
        if mesh.parent is not None:
            self._send([mesh.parent], "error", failure)
        elif not self._stopping:
            self._drain = time.monotonic() + DRAIN_SECONDS
            self._stop_all(None)

    def _stop_all(self, source: int | None) -> None:
        if not self._stopping:
            self._stopping = True
            if self._mesh is not None:
                self._send([child for child in self._mesh.children if child != source], "stop", None)
            self._stop_own()

    def _stop_own(self) -> None:
        if self._pieces is not None:
            self._pieces.close()
        stop, self._stop = self._stop, None
        if stop is not None and self._open and self._own is None:
            started("zarrckpt-stop", stop)

    def _break(self, failures: list[Failure], source: int | None = None, call: str | None = None) -> None:
        """Break the mesh: every rank raises these failures when its own work has ended.

        A rank that begins ``call`` later raises them too.
        """
        if self._broken:
            return
        self._broken = failures
        if self._mesh is not None:
            self._send([peer for peer in self._mesh.edges if peer != source], "abort", (failures, call))
        self._stop_own()
        self._changed.notify_all()

    def _lost(self, peer: int) -> None:
        if self._broken or self._over.is_set():
            return
        if self._kept and self._number <= 1 and peer not in self._here:
            # It left the mesh before this call, and can still take part in it.
            self._anew(peer)
            return
        if self._open and (self._all_in() if self.rank == 0 else self._sent and peer in self._arrived):
            # Its results have arrived, and the coordinator is deciding, so the round ends normally.
            self._gone.append(peer)
            self._discard = True
            return
        known = causes(self._failures)
        gone = common(
            f"{self._call_group.call}: the connection to rank {self.members[peer]} was lost ({self._what}). Its "
            "process ended or was killed, or its host is down. See its log"
        )
        self._break([failure for failure in known if not failure.lost] or [gone], None, self._call_group.call)

    def _refuse(self, peer: int, reason: str) -> None:
        """Break the mesh because of an invalid message of a peer."""
        self._break([common(self._unreadable(peer, reason))], None, self._call_group.call)

    def _out_of_step(self, peer: int) -> Failure:
        return common(
            f"{self._call_group.call}: rank {self.members[peer]} is in another round or call, but this rank, "
            f"{self.members[self.rank]}, is in {self._what!r}. All ranks must make the same calls in the same order"
        )

    def _send(self, to: Iterable[int], kind: str, body: Any) -> None:
        mesh = self._mesh_now()
        mesh.send(to, Message(kind, mesh.calls, self._number, body))

    def _mesh_now(self) -> Mesh:
        assert self._mesh is not None
        return self._mesh

    # The time: beats, silence, warnings.

    def _watch(self) -> None:
        beat = 0.0
        while not self._over.wait(min(1.0, self._interval)):
            with self._changed:
                now = time.monotonic()
                if self._mesh is None or self._broken:
                    continue
                if now >= beat:
                    beat = now + self._interval
                    self._beat(self._mesh)
                if self._open:
                    self._watch_others(self._mesh, now)

    def _beat(self, mesh: Mesh) -> None:
        """Send the neighbours a sign of progress or waiting, with the missing ranks."""
        if not (self._progress or self._waiting):
            return
        self._progress = False
        missing = self._missing(mesh)
        if mesh.parent is None:
            self._awaited = missing
        elif not self._sent:
            self._send([mesh.parent], "beat", missing[:32])
        self._send(mesh.children, "beat", self._awaited[:32])

    def _missing(self, mesh: Mesh) -> list[int]:
        """Return the ranks whose results are missing, of this rank and those below it in the tree."""
        missing = [self.members[self.rank]] if self._own is None else []
        for child in mesh.children:
            if child not in self._arrived:
                missing += self._reported.get(child) or [self.members[child]]
        return missing

    def _watch_others(self, mesh: Mesh, now: float) -> None:
        timeout = self._call_group.timeout
        expected = [child for child in mesh.children if child not in self._arrived]
        if mesh.parent is not None:
            # Also during this rank's own work, which is useless after the parent is lost.
            expected.append(mesh.parent)
        silent = [peer for peer in expected if now - max(self._since, self._seen.get(peer, 0.0)) > timeout]
        if silent:
            text = (
                f"{self._call_group.call}: {self._call_group.named(silent)} sent nothing for {timeout:g} s (expected "
                f"in {self._what!r}). It did not make this call, or it hangs or was stopped, or its host is down. See "
                "its log. If the call needs more time, set a larger timeout in SaveOptions or LoadOptions"
            )
            self._break([common(text)])
        elif self._drain is not None and now > self._drain:
            self._break(causes(self._failures))
        elif self._waiting and not self._warned and now - self._since > joining.WARN_SECONDS:
            self._warned = True
            whom = self._awaited if self._sent else self._missing(mesh)
            log.warning("%s: waiting for %s (%s)", self._call_group.call, ranks_text(whom), self._what)

    # The beginning and the end of a call, and the replacement of a kept mesh that a rank has left.

    def _enter(self, place: MeshPlace) -> None:
        self._place = place
        mesh = place.mesh
        self._kept = mesh is not None
        if mesh is None:
            mesh = place.mesh = made(self._call_group)
        self._use(mesh)
        started("zarrckpt-watch", self._watch)

    def _new_edges(self) -> None:
        self._seen: dict[int, float] = {}
        self._here: set[int] = set()

    def _use(self, mesh: Mesh) -> None:
        mesh.begin()
        with self._changed:
            self._mesh = mesh
            self._new_edges()
            self._send(mesh.edges, "here", None)
        mesh.attach(self._received)

    def _anew(self, source: int) -> None:
        """Leave the kept mesh together with the other ranks of this call, and join a new one."""
        mesh = self._mesh
        if mesh is None or self._broken or self._over.is_set():
            self._discard = True
            return
        self._send([peer for peer in mesh.edges if peer != source], "rejoin", None)
        self._mesh, self._kept = None, False
        started("zarrckpt-join", self._join_again, mesh)

    def _join_again(self, old: Mesh) -> None:
        old.close()
        try:
            mesh = made(self._call_group, self._over.is_set)
        except Exception as err:
            with self._changed:
                self._break([failure_of(err, None)])
            return
        with self._changed:
            if self._over.is_set():
                mesh.close()
                return
            self._place.mesh = mesh
            self._ahead.clear()
            self._clear_arrived()
            self._since = time.monotonic()
        self._use(mesh)
        with self._changed:
            if self._own is not None and self._own[0] == FAILED:
                self._error_known(self._own[1])
            self._advance()

    def _leave(self, error: BaseException) -> None:
        """End the call with an error of this rank's caller, and inform the other ranks unless all have the error."""
        if self._in_step and isinstance(error, Exception):
            return
        rank = self.members[self.rank]
        failure = failure_of(error, rank)
        if not isinstance(error, Exception):
            failure = common(f"{self._call_group.call}: rank {rank} was interrupted ({type(error).__name__})")
        with self._changed:
            self._break([failure], None, self._call_group.call)

    def _end(self, place: MeshPlace) -> None:
        with self._changed:
            self._over.set()
            mesh = self._mesh
        if self._pieces is not None:
            self._pieces.close()
        if mesh is not None:
            mesh.detach()
            mesh.put_back([(peer, message) for peer, message in self._ahead if message.call > mesh.calls])
        if mesh is None or self._broken or self._discard or not mesh.fit():
            place.clear()


class Alone(Rounds):
    """The rounds of a single process: no messages, and errors are raised directly."""

    def merge(
        self,
        what: str,
        mine: Callable[[], A],
        decide: Callable[[list[A]], B],
        stop: Callable[[], None] | None = None,
    ) -> B:
        return decide([mine()])
