"""How many requests go to a server at once: more while that gives more throughput, fewer where it is too much.

A :class:`Gate` stands in front of a store's transfers. :class:`Pace` is its rule, arithmetic only: it looks at rounds,
each as many requests as are let through at once. A round without failures raises the limit, and the next one shows
whether that was worth it: requests that merely wait (for the network, for the server's disks) take no longer when
there are more of them, so more work is done in a second; where the machine or the line is busy already, they only
take longer, and the limit goes back. Failures lower the limit; a single one in a round may be an accident, and those
of requests that had begun before the limit was lowered last say nothing about the new one. It begins with few, and
with many as soon as the answers of the first round show that the server is far away.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

START = max(4, min(8, 2 * (os.cpu_count() or 1)))
"""Two a processor, as far as that goes: more threads than that only wait for each other, unless the server is slow."""
DISTANT = 48
"""The limit as soon as the first answers show that the server is far away: threads that wait cost nothing."""
LEAST = 4
MOST = 64

_NEAR = 0.005
"""An answer of a server nearby takes at most so many seconds..."""
_SLOW = 100e6
"""...and the time for its bytes, at so many a second."""
_TELLING = 2
"""So many answers say whether a server is near: the first one waits for a connection, too."""

_FIRST_STEP = 2.0
_STEP = 1.25
_LESS = 0.75
_ACCIDENTS = 1
"""Failures in a round that are no reason to lower the limit."""
_WORTH = 0.25
"""The share of a rise of the limit that must come back as throughput, or the limit goes back."""
_FIRST_REST = 8
_LONGEST_REST = 128


class Pace:
    """The limit of a :class:`Gate`, from how requests went. Not safe for threads; takes the time from its caller."""

    def __init__(self, start: int = START, least: int = LEAST, most: int = MOST) -> None:
        self.limit = start
        self._least, self._most = least, most
        self._step = _FIRST_STEP
        self._rest, self._next_rest = 0, _FIRST_REST
        self._before: tuple[int, float] | None = None
        """The limit and the throughput before the limit was raised last."""
        self._usual: dict[int, float] = {}
        """How long the first requests of a size took (by powers of two): what makes small and large ones comparable."""
        self._lowered = -1.0
        self._first = True
        """Whether the first round is not over."""
        self._answers, self._quickest = 0, math.inf
        """Of the first round: how many, and the shortest time that one took, without that for its bytes."""
        self.idle(0.0)

    def idle(self, now: float) -> None:
        """Nothing is under way: what is counted begins anew."""
        self._began = now
        self._work = 0.0
        self._count = self._failures = 0
        self._full = False

    def done(self, now: float, seconds: float, nbytes: int, ok: bool, full: bool, count: int = 1) -> None:
        """A request of ``nbytes`` (or ``count`` together) took ``seconds``; ``full``: no more were let through then."""
        if not ok:
            self._failures += now - seconds > self._lowered
            if self._failures > _ACCIDENTS:
                self._lower(now)
            return
        self._count += count
        self._work += count * self._usual.setdefault((nbytes // count).bit_length(), max(seconds, 1e-6))
        self._full |= full
        if self._first:
            self._look(seconds - nbytes / count / _SLOW)
        if self._count >= self.limit:
            self._end_round(now)

    def _look(self, waited: float) -> None:
        """An answer of the first round came after so many seconds, without those for its bytes."""
        self._answers += 1
        self._quickest = min(self._quickest, waited)
        if self._answers >= _TELLING and self._quickest > _NEAR:
            self._first, self.limit = False, max(self.limit, min(DISTANT, self._most))
            # This round has had both limits, and says nothing.
            self._rest = 1

    def _lower(self, now: float) -> None:
        self.limit = max(self._least, int(self.limit * _LESS))
        self._lowered, self._first = now, False
        self._before, self._step, self._rest = None, _STEP, 1
        self.idle(now)

    def _end_round(self, now: float) -> None:
        self._first = False
        throughput = self._work / max(now - self._began, 1e-6)
        if self._rest:
            self._rest -= 1
        elif self._full:
            self._judge(throughput)
        self.idle(now)

    def _judge(self, throughput: float) -> None:
        """Keep the last rise of the limit and try the next one, or take it back and rest."""
        if self._before is not None:
            limit, least = self._before
            if throughput < least * (1 + _WORTH * (self.limit / limit - 1)):
                self.limit, self._before, self._step = limit, None, _STEP
                self._rest, self._next_rest = self._next_rest, min(2 * self._next_rest, _LONGEST_REST)
                return
        self._before = (self.limit, throughput)
        self.limit = min(self._most, max(self.limit + 1, int(self.limit * self._step)))
        if self.limit == self._before[0]:
            self._before = None


@dataclass
class Slot:
    """A request's leave to go: ``count`` connections, at least one."""

    count: int
    failed: bool = False
    """Set by the holder where the server was busy, or did not answer."""


class Gate:
    """Lets a number of requests through at a time. Safe for threads.

    ``fixed`` is that number; None begins at :data:`START` and follows :class:`Pace`.
    """

    def __init__(self, fixed: int | None = None) -> None:
        self._pace = Pace() if fixed is None else None
        self._fixed = fixed or 0
        self._used = self._waiting = 0
        self._changed = threading.Condition()

    @property
    def fixed(self) -> bool:
        """Whether the limit was given, and stays."""
        return self._pace is None

    @property
    def limit(self) -> int:
        """How many requests may be under way now."""
        return self._fixed if self._pace is None else self._pace.limit

    @contextmanager
    def slot(self, nbytes: int, at_most: int = 1, at_least: int = 1) -> Iterator[Slot]:
        """Wait until a request of ``nbytes`` may go, on ``at_least`` connections, or on more that are free then.

        Where the limit is below ``at_least``, on as many as that.
        """
        slot = self._enter(at_most, at_least)
        began = time.monotonic()
        try:
            yield slot
        finally:
            self._leave(slot, time.monotonic() - began, nbytes)

    def _enter(self, at_most: int, at_least: int) -> Slot:
        with self._changed:
            self._waiting += 1
            try:
                while self.limit - self._used < min(at_least, self.limit):
                    self._changed.wait()
            except BaseException:
                # Interrupted, maybe when it had been woken: another one's turn.
                self._changed.notify()
                raise
            finally:
                self._waiting -= 1
            if self._pace is not None and not self._used:
                self._pace.idle(time.monotonic())
            slot = Slot(min(at_most, self.limit - self._used))
            self._used += slot.count
            return slot

    def _leave(self, slot: Slot, seconds: float, nbytes: int) -> None:
        with self._changed:
            full = self._used >= self.limit
            self._used -= slot.count
            if self._pace is not None:
                self._pace.done(time.monotonic(), seconds, nbytes, not slot.failed, full, slot.count)
            self._changed.notify(max(0, min(self._waiting, self.limit - self._used)))
