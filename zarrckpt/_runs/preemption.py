"""Agree with all ranks on the step to save before pre-emption, after one rank has received a notice.

A thread of each rank takes part in a separate call of all ranks, over separate connections. The training thread makes
no collective call and no request. It only records its current step, and waits at a step that is not agreed on yet.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from zarrckpt._errors import CheckpointError, log
from zarrckpt._ranks.calls import call_on_all
from zarrckpt._ranks.group import Ranks
from zarrckpt._ranks.mesh import is_ending, start_thread
from zarrckpt._ranks.rounds import Rounds, open_rounds
from zarrckpt._save.background import SaveFuture, wait_unreported

NOTICE_SECONDS = 1.0
"""Seconds between two calls of the user's callable for notices."""

_ALIVE_SECONDS = 2.0
"""Seconds between two signs of life that a rank sends while it waits for a notice."""

_RETRY_SECONDS = 30.0
"""Seconds until the ranks try to connect again after a failed or lost connection."""


class _Noticed(Exception):
    """This rank will be pre-empted. The message is sent to all ranks."""


class Preemption:
    """One rank's side of the agreement on the step to save before pre-emption."""

    def __init__(
        self, ranks: Ranks, run: str, timeout: float, grace: float, notice: Callable[[], bool] | None = None
    ) -> None:
        """Args:
        run: the name of the run in messages.
        timeout: seconds without a message from another rank after which it counts as lost.
        grace: seconds after a notice within which the ranks must agree.
        notice: the user's callable, which returns True if this machine will be taken away.
        """
        self._ranks = ranks
        self._grace = grace
        self._run = run
        self._timeout = timeout
        self._changed = threading.Condition()
        self._woken = threading.Event()
        self._reason: str | None = None
        """The reason for this rank's own pre-emption, or None."""
        self.noticed: float | None = None
        """The monotonic time at which this rank learned of a notice on any rank, or None."""
        self._current_step = -1
        self._proposed: int | None = None
        """The proposed step: the first step that is not smaller is saved if all ranks agree."""
        self._agreed = False
        self._error: CheckpointError | None = None
        self._closed = False
        self._process = os.getpid()
        # Without this, the end of the process would wait for the thread if close() was not called.
        atexit.register(self._close_at_exit)
        start_thread("zarrckpt-preemption", self._watch)
        if notice is not None:
            threading.Thread(target=self._poll_notice, args=(notice,), name="zarrckpt-notice", daemon=True).start()

    # -- the training thread

    def reach_step(self, step: int) -> bool:
        """Record this rank's current step. Return whether it is the step to save before pre-emption.

        While the ranks are still agreeing on this step, waits until they agree or fail, at most for the rest of the
        grace period. Raises CheckpointError if they do not agree.
        """
        with self._changed:
            self._current_step = step
            if self.noticed is None:
                return False
            while self._error is not None or (self._proposed is not None and step >= self._proposed):
                if self._error is not None:
                    raise self._error
                if self._agreed:
                    return True
                self._refuse_late()
                self._changed.wait(0.1)
            self._refuse_late()
            return False

    def seconds_left(self) -> float:
        """Return the seconds that are left of the grace period. Called after a notice."""
        assert self.noticed is not None
        return self.noticed + self._grace - time.monotonic()

    def wait_for(self, future: SaveFuture, step: int) -> None:
        """Wait for a save until the grace period ends. Raises CheckpointError if the save has not ended by then."""
        with suppress(TimeoutError):
            wait_unreported(future, max(0.0, self.seconds_left()))
        if not future.done():
            self.refuse_late_save(step)

    def refuse_late_save(self, step: int) -> None:
        """Raise CheckpointError if the grace period has ended before the save of a step."""
        if self.seconds_left() <= 0:
            raise CheckpointError(
                f"{self._run}: the save of step {step} before pre-emption did not end within the grace period. Pass a "
                "greater grace=... if there is more time, or save smaller checkpoints"
            )

    def _refuse_late(self) -> None:
        if self.seconds_left() < 0 and not self._agreed:
            raise CheckpointError(
                f"{self._run}: the ranks did not agree on a step to save within {self._grace:g} s after a notice of "
                "pre-emption, because a rank is lost or has not reached its next step. The newest checkpoint is the "
                "last committed one"
            )

    def close(self) -> None:
        """End the agreement, because this rank will not reach another step."""
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

    def note_notice(self, reason: str) -> None:
        """Record that this rank will be pre-empted."""
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
                with open_rounds(self._ranks, call, self._timeout, queue=call) as rounds:
                    if self._wait_for_notice(rounds):
                        self._agree(rounds)
                    return
            except Exception as err:
                if self._closed or is_ending():
                    return
                if self.noticed is not None:
                    self._fail(err)
                    return
                # Only logged, because training may continue. If it fails, its own errors are more precise.
                log.info("%s: notices of pre-emption do not reach other ranks at present: %s", self._run, err)
                self._woken.clear()
                self._woken.wait(_RETRY_SECONDS)

    def _wait_for_notice(self, rounds: Rounds) -> bool:
        """Wait for a notice on any rank, or until all ranks have closed. Return whether there was a notice."""

        def wait() -> None:
            while not self._woken.wait(_ALIVE_SECONDS):
                rounds.report_alive()
            if self._reason is not None and not self._closed:
                raise _Noticed(self._reason)

        try:
            call_on_all(rounds, "a notice of pre-emption", wait, self._woken.set)
            return False
        except _Noticed:
            return True
        except CheckpointError:
            # If all ranks have this error, a rank's wait() has raised it, and it raises only notices.
            if not rounds.error_is_shared:
                raise
            return True

    def _agree(self, rounds: Rounds) -> None:
        with self._changed:
            self.noticed = self.noticed or time.monotonic()
        ahead = 1
        while True:
            steps: list[int | None] = rounds.merge(
                "the current steps", on_each_rank=self._open_step, on_coordinator=list
            )
            known = [step for step in steps if step is not None]
            if len(known) < len(steps):
                raise CheckpointError(
                    f"{self._run}: a rank has closed its manager, so no step can be saved on all ranks before "
                    "pre-emption. The newest checkpoint is the last committed one"
                )
            proposed = max(known) + ahead
            if rounds.merge("a step to save", on_each_rank=partial(self._promise, proposed), on_coordinator=all):
                with self._changed:
                    self._agreed = True
                    self._changed.notify_all()
                return
            # Steps are short, and a rank has reached that step in the meantime.
            ahead *= 2

    def _open_step(self) -> int | None:
        """Return this rank's current step, or None if it is closed."""
        with self._changed:
            return None if self._closed else self._current_step

    def _promise(self, step: int) -> bool:
        """Promise to wait at a proposed step or at the first later one.

        Return False if this rank has already reached it, or will reach no further step.
        """
        with self._changed:
            self._proposed = step if self._current_step < step and not self._closed else None
            self._changed.notify_all()
            return self._proposed is not None

    def _fail(self, error: Exception) -> None:
        with self._changed:
            # Raised at the next step, so that no rank waits for this one.
            own = error if isinstance(error, CheckpointError) else CheckpointError(f"{type(error).__name__}: {error}")
            self._error = own
            self._changed.notify_all()

    def _poll_notice(self, notice: Callable[[], bool]) -> None:
        """Call the user's callable until it returns True or this rank is closed."""
        logged = False
        while not self._closed:
            try:
                if notice():
                    self.note_notice("notice() returned True, so this process will be pre-empted")
                    return
            except Exception as err:
                if not logged:
                    logged = True
                    log.warning("notice() failed and is called again: %s: %s", type(err).__name__, err)
            time.sleep(NOTICE_SECONDS)
