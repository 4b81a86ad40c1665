"""The rounds of an exchange: pack what others write, receive what this rank writes, two rounds in memory at most."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from zarrckpt._chunk_layout import RawArray, raw_dtype
from zarrckpt._errors import CheckpointError
from zarrckpt._grid import Box
from zarrckpt._messages import cut, is_intact, message_bytes, new_message, seal

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
        self._stopped = False

    def rounds(self) -> Iterator[tuple[int, list[tuple[ChunkPlan, Received]]]]:
        """Swap one round after the other; give its number, and the chunks that can be written then.

        Every chunk must become a job passed through :meth:`counted`: a round begins when the jobs of the last but one
        are done. No further one begins after :meth:`stop`. Raises PeerLost.
        """
        before: list[int] = []
        for number, step in self._plan.rounds.items():
            if len(before) > 1:
                self._wait_for(before[-2])
            if self._stopped:
                # Now, and not after all rounds: the others need not go on.
                return
            self._left[number] = len(step.chunks)
            sizes = self._receives(step)
            sources = [(rank, message_bytes(parts)) for rank, parts in sizes.items()]
            messages = self._channel.swap(self._messages(step), sources, number)
            received = {
                rank: self._opened(rank, data, sizes[rank]) for (rank, _), data in zip(sources, messages, strict=True)
            }
            yield number, [(chunk, _taken(chunk, received)) for chunk in step.chunks]
            before.append(number)

    def counted(self, number: int, job: Callable[[], None]) -> Callable[[], None]:
        """A job of a round, whose end is noted."""

        def run() -> None:
            try:
                job()
            finally:
                with self._changed:
                    self._left[number] -= 1
                    self._changed.notify_all()

        return run

    def stop(self) -> None:
        """Wait for no job any more: one has failed, perhaps of another kind, and those that are queued never begin."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def _wait_for(self, number: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._left[number] == 0)

    def _messages(self, step: Round) -> list[tuple[int, RawArray]]:
        """One message to each receiver, the parts in the order of the plan."""
        parts: dict[int, list[tuple[int, Box]]] = {}
        for sending in step.sends:
            parts.setdefault(sending.to, []).append((sending.item, sending.box))
        return [(to, self._packed(rows)) for to, rows in parts.items()]

    def _packed(self, parts: list[tuple[int, Box]]) -> RawArray:
        sizes = [self._pieces.nbytes(*part) for part in parts]
        message = new_message(sum(sizes))
        for (item, box), out in zip(parts, cut(message, sizes), strict=True):
            self._pieces.copy(item, box, out.view(raw_dtype(len(out) // box.size)).reshape(box.shape))
        return seal(message)

    def _receives(self, step: Round) -> dict[int, list[int]]:
        """The bytes of the parts that each rank sends in a round, in the order of this rank's chunks."""
        sizes: dict[int, list[int]] = {}
        for chunk in step.chunks:
            itemsize = self._plan.arrays[chunk.fqn].dtype.itemsize
            for part in chunk.parts:
                if part.source is not None:
                    sizes.setdefault(part.source, []).append(part.box.size * itemsize)
        return sizes

    def _opened(self, rank: int, message: RawArray, sizes: list[int]) -> Iterator[RawArray]:
        """The parts of a message. Raises CheckpointError where it has not arrived as it was sent."""
        if not is_intact(message):
            members = self._channel.mesh.members
            raise CheckpointError(
                f"what rank {members[rank]} sent to rank {members[self._channel.rank]} has arrived altered: its "
                "checksum differs. Nothing is committed; look at the network between them, and save again"
            )
        return cut(message, sizes)


def _taken(chunk: ChunkPlan, received: Mapping[int, Iterator[RawArray]]) -> Received:
    return {place: next(received[part.source]) for place, part in enumerate(chunk.parts) if part.source is not None}
