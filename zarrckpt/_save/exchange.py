"""The exchange of pieces: send what others write, receive what this rank writes, within a bound of memory."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from zarrckpt._errors import CheckpointError
from zarrckpt._format.chunk_layout import RawArray, raw_dtype
from zarrckpt._format.grid import Box
from zarrckpt._plan.rank_plan import Bundle, ChunkPlan, RankPlan
from zarrckpt._ranks.messages import Channel, Pending, cut, is_intact, message_bytes, new_message, seal
from zarrckpt._save.items import Items

Received = Mapping[int, RawArray]
"""A chunk's parts that came from other ranks, by their position in the chunk's plan: flat bytes."""


@dataclass
class _Moving:
    """A bundle whose messages are on their way."""

    bundle: Bundle
    nbytes: int
    """The memory that it takes until its chunks are written and its messages sent."""
    sends: list[Pending] = field(default_factory=list)
    receives: dict[int, Pending] = field(default_factory=dict)
    """The messages that arrive, by the rank that sends them."""


class Exchange:
    """One rank's side of an exchange. Used in one thread; the jobs that it counts run in others.

    All ranks move bundles in one order, so the first that is not done can always go on: nobody waits in a circle.
    """

    def __init__(self, channel: Channel, plan: RankPlan, items: Items, limit: int) -> None:
        self._channel = channel
        self._plan = plan
        self._items = items
        self._limit = limit
        self._used = 0
        self._changed = threading.Condition()
        self._stopped = False

    def bundles(self) -> Iterator[list[tuple[ChunkPlan, Received]]]:
        """Move one bundle after the other; give the chunks that can be written then.

        Every chunk must become a job passed through :meth:`counted`. Bundles are on their way side by side while they
        fit in memory. Raises PeerLost.
        """
        moving: deque[_Moving] = deque()
        for bundle in self._plan.bundles.values():
            nbytes = self._memory_of(bundle)
            while moving and self._used + nbytes > self._limit:
                yield from self._ended(moving.popleft())
            self._wait_for_memory(nbytes)
            if self._stopped:
                return
            moving.append(self._begun(_Moving(bundle, nbytes)))
        while moving and not self._stopped:
            yield from self._ended(moving.popleft())

    def counted(self, nbytes: int, job: Callable[[], None]) -> Callable[[], None]:
        """A job that writes a chunk, and frees ``nbytes`` of memory when it ends."""

        def run() -> None:
            try:
                job()
            finally:
                self._free(nbytes)

        return run

    def stop(self) -> None:
        """Do not wait for jobs any more: one has failed, perhaps of another kind, and queued ones never begin."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def _free(self, nbytes: int) -> None:
        with self._changed:
            self._used -= nbytes
            self._changed.notify_all()

    def _wait_for_memory(self, nbytes: int) -> None:
        """Wait until ``nbytes`` fit, or all that was moved before is written: a bundle may be larger than the limit."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or not self._used or self._used + nbytes <= self._limit)

    def _memory_of(self, bundle: Bundle) -> int:
        sent = sum(self._items.nbytes(sending.item, sending.box) for sending in bundle.sends)
        return sent + sum(self.received_bytes(chunk) for chunk in bundle.chunks)

    def received_bytes(self, chunk: ChunkPlan) -> int:
        """The bytes of a chunk that others send."""
        itemsize = self._plan.arrays[chunk.fqn].dtype.itemsize
        return sum(part.box.size * itemsize for part in chunk.parts if part.source is not None)

    def _begun(self, moving: _Moving) -> _Moving:
        """Post all messages of a bundle: whatever order they end in, none waits for another."""
        for source, parts in self._receives(moving.bundle).items():
            moving.receives[source] = self._channel.recv(source, message_bytes(parts))
        for to, message in self._messages(moving.bundle):
            moving.sends.append(self._channel.send(to, message))
        with self._changed:
            self._used += moving.nbytes
        return moving

    def _ended(self, moving: _Moving) -> Iterator[list[tuple[ChunkPlan, Received]]]:
        sizes = self._receives(moving.bundle)
        received = {
            source: self._opened(source, handle.wait(), sizes[source]) for source, handle in moving.receives.items()
        }
        yield [(chunk, _taken(chunk, received)) for chunk in moving.bundle.chunks]
        for handle in moving.sends:
            handle.wait()
        self._free(moving.nbytes - sum(self.received_bytes(chunk) for chunk in moving.bundle.chunks))

    def _messages(self, bundle: Bundle) -> list[tuple[int, RawArray]]:
        """One message to each receiver, the parts in the order of the plan."""
        parts: dict[int, list[tuple[int, Box]]] = {}
        for sending in bundle.sends:
            parts.setdefault(sending.to, []).append((sending.item, sending.box))
        return [(to, self._packed(rows)) for to, rows in parts.items()]

    def _packed(self, parts: list[tuple[int, Box]]) -> RawArray:
        sizes = [self._items.nbytes(*part) for part in parts]
        message = new_message(sum(sizes))
        for (item, box), out in zip(parts, cut(message, sizes), strict=True):
            self._items.copy(item, box, out.view(raw_dtype(len(out) // box.size)).reshape(box.shape))
        return seal(message)

    def _receives(self, bundle: Bundle) -> dict[int, list[int]]:
        """The bytes of the parts that each rank sends in a bundle, in the order of this rank's chunks."""
        sizes: dict[int, list[int]] = {}
        for chunk in bundle.chunks:
            itemsize = self._plan.arrays[chunk.fqn].dtype.itemsize
            for part in chunk.parts:
                if part.source is not None:
                    sizes.setdefault(part.source, []).append(part.box.size * itemsize)
        return sizes

    def _opened(self, rank: int, message: RawArray, sizes: list[int]) -> Iterator[RawArray]:
        """The parts of a message. Raises CheckpointError where it has not arrived as it was sent."""
        if not is_intact(message):
            raise CheckpointError(
                f"what rank {rank} of the save sent has arrived altered: its checksum differs. Nothing is committed; "
                "look at the network between the ranks, and save again"
            )
        return cut(message, sizes)


def _taken(chunk: ChunkPlan, received: Mapping[int, Iterator[RawArray]]) -> Received:
    return {place: next(received[part.source]) for place, part in enumerate(chunk.parts) if part.source is not None}
