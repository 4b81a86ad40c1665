"""The rounds of an exchange: pack what others write, receive what this rank writes, two rounds in memory at most."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np

from zarrckpt._codec import RawArray, raw_dtype
from zarrckpt._grid import Box
from zarrckpt._messages import Part, cut, lengths

if TYPE_CHECKING:
    from zarrckpt._exchange import Channel
    from zarrckpt._pieces import Pieces
    from zarrckpt._plan import ChunkPlan, RankPlan, Round

Received = Mapping[int, RawArray]
"""A chunk's parts that came from other ranks, by their position in the chunk's plan: flat bytes."""


class Swap:
    """One rank's side of an exchange. Used in one thread; the jobs that it counts run in others."""

    def __init__(self, channel: Channel, plan: RankPlan, pieces: Pieces) -> None:
        self._channel = channel
        self._plan = plan
        self._pieces = pieces
        self._left: dict[int, int] = {}
        self._changed = threading.Condition()
        self._failure: BaseException | None = None

    def rounds(self) -> Iterator[tuple[int, list[tuple[ChunkPlan, Received]]]]:
        """Swap one round after the other; give its number, and the chunks that can be written then.

        Every chunk must become a job passed through :meth:`counted`: a round begins when the jobs of the last but one
        are done. Raises PeerLost.
        """
        before: list[int] = []
        for number, step in self._plan.rounds.items():
            if len(before) > 1:
                self._wait_for(before[-2])
            if self._failure is not None:
                # Now, and not after all rounds: the others need not go on.
                raise self._failure
            self._left[number] = len(step.chunks)
            parts = self._parts(step)
            received = cut(self._channel.swap(self._messages(step), lengths(parts), number), parts)
            yield number, [(chunk, _taken(chunk, received)) for chunk in step.chunks]
            before.append(number)

    def counted(self, number: int, job: Callable[[], None]) -> Callable[[], None]:
        """A job of a round, whose end is noted."""

        def run() -> None:
            try:
                job()
            except BaseException as err:
                self._failure = err
                raise
            finally:
                with self._changed:
                    self._left[number] -= 1
                    self._changed.notify_all()

        return run

    def _wait_for(self, number: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._left[number] == 0)

    def _messages(self, step: Round) -> dict[int, RawArray]:
        """One message to each receiver, the parts in the order of the plan."""
        parts: dict[int, list[tuple[int, Box]]] = {}
        for sending in step.sends:
            parts.setdefault(sending.to, []).append((sending.item, sending.box))
        return {to: self._packed(rows) for to, rows in parts.items()}

    def _packed(self, parts: list[tuple[int, Box]]) -> RawArray:
        sizes = [self._pieces.nbytes(*part) for part in parts]
        out = np.empty(sum(sizes), np.uint8)
        at = 0
        for (item, box), nbytes in zip(parts, sizes, strict=True):
            raw = raw_dtype(nbytes // box.size)
            self._pieces.copy(item, box, out[at : at + nbytes].view(raw).reshape(box.shape))
            at += nbytes
        return out

    def _parts(self, step: Round) -> list[Part]:
        """What this rank receives in a round, in the order of its chunks."""
        return [
            (part.source, part.box.size * self._plan.arrays[chunk.fqn].dtype.itemsize)
            for chunk in step.chunks
            for part in chunk.parts
            if part.source is not None
        ]


def _taken(chunk: ChunkPlan, received: Iterator[RawArray]) -> Received:
    return {place: next(received) for place, part in enumerate(chunk.parts) if part.source is not None}
