"""All ranks learn that one of them is to be pre-empted, and agree on the step to save, while they train.

A thread of each rank is in a call of its own, over its own connections: no collective, and no request, is made in the
thread that trains. That one only says which step it has come to, and waits where all have agreed to.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable
from functools import partial

from zarrckpt._errors import CheckpointError, log
from zarrckpt._ranks.group import Ranks
from zarrckpt._ranks.mesh import is_ending, started
from zarrckpt._ranks.rounds import Rounds, joined

NOTICE_SECONDS = 1.0
"""How often the user's callable is asked whether this machine is to be taken away."""

_BEAT = 2.0
"""How often a rank says, while it waits for a notice, that it is still there."""

_PAUSE = 30.0
"""After the ranks could not be connected, or have lost each other, they try again so many seconds later."""


class _Noticed(Exception):
    """This rank was told that it is to be pre-empted. Its text crosses the ranks."""


class Preemption:
    """One rank's part in agreeing on the step that is saved before the ranks are pre-empted."""

    def __init__(
        self, ranks: Ranks, run: str, timeout: float, grace: float, notice: Callable[[], bool] | None = None
    ) -> None:
        """Args:
        run: names the run in messages.
        timeout: after so many seconds without a sign of another rank, it counts as lost.
        grace: within so many seconds of a notice the ranks must have agreed.
        notice: the user's callable.
        """
        self._ranks = ranks
        self._grace = grace
        self._run = run
        self._timeout = timeout
        self._changed = threading.Condition()
        self._woken = threading.Event()
        self._reason: str | None = None
        """Why this rank itself is to be pre-empted."""
        self.noticed: float | None = None
        """When this rank learned that some rank is, by the monotonic clock."""
        self._current = -1
        self._at: int | None = None
        """The first step from here on is the one to save, if all agree."""
        self._agreed = False
        self._error: CheckpointError | None = None
        self._closed = False
        self._process = os.getpid()
        # If it is not closed, the end of the process would wait for its thread.
        atexit.register(self._close_at_exit)
        started("zarrckpt-preemption", self._watch)
        if notice is not None:
            threading.Thread(target=self._ask, args=(notice,), name="zarrckpt-notice", daemon=True).start()

    # -- the thread that trains

    def came_to(self, step: int) -> bool:
        """Note that this rank has come to a step; return whether it is the one to save before pre-emption.

        Waits where ranks are still agreeing on this step: a moment, or until a rank is lost, and within the grace
        period. Raises CheckpointError where they don't agree.
        """
        with self._changed:
            self._current = step
            if self.noticed is None:
                return False
            while self._error is not None or (self._at is not None and step >= self._at):
                if self._error is not None:
                    raise self._error
                if self._agreed:
                    return True
                self._refuse_late()
                self._changed.wait(0.1)
            self._refuse_late()
            return False

    def left(self) -> float:
        """How many seconds of the grace period are left, once there was a notice."""
        assert self.noticed is not None
        return self.noticed + self._grace - time.monotonic()

    def _refuse_late(self) -> None:
        if self.left() < 0 and not self._agreed:
            raise CheckpointError(
                f"{self._run}: the ranks did not agree on a step to save within {self._grace:g} s after a notice of "
                "pre-emption: a rank is lost, or has not come to its next step. The newest checkpoint is the last that "
                "was committed"
            )

    def close(self) -> None:
        """Leave the agreement: this rank comes to no further step."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._woken.set()
        atexit.unregister(self._close_at_exit)

    def _close_at_exit(self) -> None:
        # A forked child inherits the hook, and perhaps a lock that a thread of its parent holds.
        if self._process == os.getpid():
            self.close()

    # -- any thread

    def tell(self, reason: str) -> None:
        """This rank is to be pre-empted."""
        with self._changed:
            if self._reason is not None:
                return
            self._reason = reason
            self.noticed = self.noticed or time.monotonic()
            closed = self._closed
        log.warning("%s: %s", reason, "no further step is saved" if closed else "the ranks agree on a step to save")
        self._woken.set()

    # -- the thread of the agreement

    def _watch(self) -> None:
        while not self._closed and not is_ending():
            self._woken.clear()
            if self._reason is not None:
                self._woken.set()
            try:
                call = f"the watch over {self._run}"
                with joined(self._ranks, call, self._timeout, lane=call) as rounds:
                    if self._wait_for_notice(rounds):
                        self._agree(rounds)
                    return
            except Exception as err:
                if self._closed or is_ending():
                    return
                if self.noticed is not None:
                    self._fail(err)
                    return
                # Training may go on all the same; if it does not, its own errors say more.
                log.info("%s: a signal on one rank is not seen by the others for now: %s", self._run, err)
                self._woken.clear()
                self._woken.wait(_PAUSE)

    def _wait_for_notice(self, rounds: Rounds) -> bool:
        """Wait until some rank is told, or all have closed. Whether one was."""

        def wait() -> None:
            while not self._woken.wait(_BEAT):
                rounds.progressed()
            if self._reason is not None and not self._closed:
                raise _Noticed(self._reason)

        try:
            rounds.merge("a signal", wait, lambda _: None, self._woken.set)
            return False
        except _Noticed:
            return True
        except CheckpointError:
            # The error of a rank's own work, which all have: only a notice is one.
            if not rounds.in_step:
                raise
            return True

    def _agree(self, rounds: Rounds) -> None:
        with self._changed:
            self.noticed = self.noticed or time.monotonic()
        ahead = 1
        while True:
            steps: list[int | None] = rounds.merge("the steps they have come to", self._step, list)
            known = [step for step in steps if step is not None]
            if len(known) < len(steps):
                raise CheckpointError(
                    f"{self._run}: a rank has closed its manager, so no step can be saved on all ranks before "
                    "pre-emption. The newest checkpoint is the last that was committed"
                )
            if rounds.merge("a step to save", partial(self._promise, max(known) + ahead), all):
                with self._changed:
                    self._agreed = True
                    self._changed.notify_all()
                return
            # A rank has come to it meanwhile: steps are short.
            ahead *= 2

    def _step(self) -> int | None:
        with self._changed:
            return None if self._closed else self._current

    def _promise(self, at: int) -> bool:
        """Promise to wait at a step, or at the first one after it; not possible once this rank has come to it."""
        with self._changed:
            self._at = at if self._current < at and not self._closed else None
            self._changed.notify_all()
            return self._at is not None

    def _fail(self, error: Exception) -> None:
        with self._changed:
            # Raised at the next step: nobody is to wait in vain.
            own = error if isinstance(error, CheckpointError) else CheckpointError(f"{type(error).__name__}: {error}")
            self._error = own
            self._changed.notify_all()

    def _ask(self, notice: Callable[[], bool]) -> None:
        """Ask the user's callable, until it says that this machine is to be taken away."""
        said = False
        while not self._closed:
            try:
                if notice():
                    self.tell("the notice says that this process is to be pre-empted")
                    return
            except Exception as err:
                if not said:
                    said = True
                    log.warning("the notice of a pre-emption could not be asked for: %s: %s", type(err).__name__, err)
            time.sleep(NOTICE_SECONDS)
