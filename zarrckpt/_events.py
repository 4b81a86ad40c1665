"""``Event``: the progress and the failures of saves, loads and deletions, for logs, metrics and trackers. No torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from zarrckpt._errors import log
from zarrckpt._reports import LoadReport, SaveReport, size_text

EventKind = Literal["begun", "staged", "written", "committed", "loaded", "deleted", "retried", "throttled", "failed"]

ENDS: frozenset[EventKind] = frozenset({"committed", "loaded", "deleted", "failed"})
"""The kinds that end an operation."""

Operation = Literal["save", "load", "delete"]


@dataclass(frozen=True, kw_only=True)
class Event:
    """A part of a save, a load or a deletion that has ended on this rank, for ``on_event`` of the options.

    ``kind`` is one of:

    - ``"begun"``: a save or a load has begun.
    - ``"staged"``: a background save has copied the state, ``nbytes`` bytes. If it was copied during the call,
      ``seconds`` is the time for which training waited, also for the previous save.
    - ``"written"``: this rank has written its part of a save, ``nbytes`` bytes with those of reused chunks.
    - ``"committed"``: the checkpoint is committed, with ``report`` and ``metadata``. ``nbytes`` is that of all ranks.
    - ``"loaded"``: a load has ended, with ``report``. This rank has read ``nbytes`` bytes.
    - ``"deleted"``: an expired checkpoint of a run was deleted. Other deletions, as by ``restore(rewind=True)`` and
      overwrites, send no event.
    - ``"retried"``: a request is sent again after ``error``.
    - ``"throttled"``: a request is sent again, because the store asked for fewer requests. Clients repeat listings and
      the parts of large uploads themselves, without an event; those of fsspec repeat all requests so.
    - ``"failed"``: the operation has failed with ``error``. A caller of the operation gets it, too.

    Args:
        kind: see above.
        operation: ``"save"``, ``"load"`` or ``"delete"``.
        url: the url of the checkpoint, without credentials.
        rank: this process's rank in the default process group, or 0 without a group.
        step: the step in a run, or None for other checkpoints.
        nbytes: a number of bytes, see above, or None.
        seconds: the time since the operation began on this rank.
        error: the error of ``"retried"``, ``"throttled"`` and ``"failed"``. Its text contains no credentials.
        report: the report of ``"committed"`` and ``"loaded"``, as the call returns it.
        metadata: the checkpoint's metadata as the caller passed it, with ``"committed"``: the step, metrics and others.
    """

    kind: EventKind
    operation: Operation
    url: str
    rank: int
    step: int | None = None
    nbytes: int | None = None
    seconds: float = 0.0
    error: BaseException | None = None
    report: SaveReport | LoadReport | None = None
    metadata: Mapping[str, Any] | None = None


OnEvent: TypeAlias = Callable[[Event], object]


class EventSender:
    """Sends the events of one operation on one rank to the caller's ``on_event``.

    Nothing is sent after the end of the operation. An error of ``on_event`` is logged, and never raised.
    """

    def __init__(
        self, on_event: OnEvent | None, operation: Operation, url: str, rank: int, step: int | None = None
    ) -> None:
        self._on_event = on_event
        self._operation: Operation = operation
        self._url = url
        self._rank = rank
        self._step = step
        self._began = time.monotonic()

    @classmethod
    def begin(
        cls, on_event: OnEvent | None, operation: Operation, url: str, rank: int, step: int | None = None
    ) -> EventSender:
        """Report that an operation has begun, and return the sender of its other events."""
        events = cls(on_event, operation, url, rank, step)
        events.send("begun")
        return events

    @property
    def seconds(self) -> float:
        """The time since the operation began."""
        return time.monotonic() - self._began

    def send(
        self,
        kind: EventKind,
        *,
        nbytes: int | None = None,
        error: BaseException | None = None,
        report: SaveReport | LoadReport | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        """Call ``on_event``, in this thread."""
        on_event = self._on_event
        if on_event is None:
            return
        if kind in ENDS:
            self._on_event = None
        event = Event(
            kind=kind,
            operation=self._operation,
            url=self._url,
            rank=self._rank,
            step=self._step,
            nbytes=nbytes,
            seconds=self.seconds,
            error=error,
            report=report,
            metadata=metadata,
        )
        try:
            on_event(event)
        except Exception as err:
            # Threads that send an event at this moment may log an error, too.
            self._on_event = None
            text = f"{type(err).__name__}: {err}"
            log.warning("on_event failed at %r and is not called again for %s: %s", kind, self._url, text)

    def send_loaded(self, nbytes: int, report: LoadReport | None = None, *, is_coordinator: bool) -> None:
        """Report the end of a load. Each rank sends an event, and the coordinator also logs it."""
        if is_coordinator:
            log.info("loaded %s: %s in %.2f s", self._url, size_text(nbytes), self.seconds)
        self.send("loaded", nbytes=nbytes, report=report)

    def send_repeat(self, what: str, error: Exception, throttled: bool) -> None:
        """Report that a request is sent again. A store calls it."""
        self.send("throttled" if throttled else "retried", error=error)

    @contextmanager
    def sending_failure(self) -> Iterator[None]:
        """Report an error of the block, and raise it."""
        try:
            yield
        except BaseException as err:
            self.send("failed", error=err)
            raise
