"""The exchange of pieces between ranks within a memory limit. Each piece moves to the owner of its chunk."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from zarrckpt._errors import CheckpointError
from zarrckpt._format.chunk_layout import RawArray, raw_dtype
from zarrckpt._format.grid import Box
from zarrckpt._plan.rank_plan import Bundle, ChunkPlan, RankPlan
from zarrckpt._ranks.messages import Channel, PendingMessage, cut, is_intact, message_bytes, new_message, seal
from zarrckpt._save.items import Items

Received = Mapping[int, RawArray]
"""The pieces of a chunk that other ranks sent, as flat bytes, by their index in ``ChunkPlan.pieces``."""


@dataclass
class _BundleTransfer:
    """A bundle whose messages have been posted and have not all arrived."""

    bundle: Bundle
    nbytes: int
    """The bytes of memory that the bundle needs until its chunks are written and its messages are sent."""
    sends: list[PendingMessage] = field(default_factory=list)
    receives: dict[int, PendingMessage] = field(default_factory=dict)
    """The messages to receive, by sending rank."""


class Exchange:
    """One rank's side of an exchange. One thread uses it. Other threads run the jobs that :meth:`counted` returns.

    All ranks move bundles in the same order, so the first unfinished bundle can always continue. This excludes
    deadlocks.
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
        """Move the bundles in order. After each bundle, yield its chunks, which can then be written.

        The caller must make each chunk a job with :meth:`counted`, which frees the chunk's memory. Several bundles move
        at the same time if they fit into the memory limit. Raises LostPeerError.
        """
        moving: deque[_BundleTransfer] = deque()
        for bundle in self._plan.bundles.values():
            nbytes = sum(self._items.nbytes(sent.item, sent.box) for sent in bundle.sends)
            nbytes += sum(self.received_bytes(chunk) for chunk in bundle.chunks)
            while moving and self._used + nbytes > self._limit:
                yield from self._end_transfer(moving.popleft())
            self._wait_for_memory(nbytes)
            if self._stopped:
                return
            moving.append(self._begin_transfer(_BundleTransfer(bundle, nbytes)))
        while moving and not self._stopped:
            yield from self._end_transfer(moving.popleft())

    def counted(self, nbytes: int, job: Callable[[], None]) -> Callable[[], None]:
        """Return a job that runs ``job``, and counts ``nbytes`` of memory as free when it ends."""

        def run() -> None:
            try:
                job()
            finally:
                self._free(nbytes)

        return run

    def stop(self) -> None:
        """Stop waiting for jobs, because a job failed and the queued jobs will not run."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def _free(self, nbytes: int) -> None:
        with self._changed:
            self._used -= nbytes
            self._changed.notify_all()

    def _wait_for_memory(self, nbytes: int) -> None:
        """Wait until ``nbytes`` fit, or until no memory is used, because a bundle may be larger than the limit."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or not self._used or self._used + nbytes <= self._limit)

    def received_bytes(self, chunk: ChunkPlan) -> int:
        """Return the bytes of a chunk that other ranks send."""
        itemsize = self._plan.arrays[chunk.fqn].dtype.itemsize
        return sum(piece.box.size * itemsize for piece in chunk.pieces if piece.source is not None)

    def _begin_transfer(self, moving: _BundleTransfer) -> _BundleTransfer:
        """Post all messages of a bundle, so that they can arrive in any order."""
        for source, parts in self._receives(moving.bundle).items():
            moving.receives[source] = self._channel.recv(source, message_bytes(parts))
        for to, message in self._messages(moving.bundle):
            moving.sends.append(self._channel.send(to, message))
        with self._changed:
            self._used += moving.nbytes
        return moving

    def _end_transfer(self, moving: _BundleTransfer) -> Iterator[list[tuple[ChunkPlan, Received]]]:
        sizes = self._receives(moving.bundle)
        received = {
            source: self._open_message(source, handle.wait(), sizes[source])
            for source, handle in moving.receives.items()
        }
        yield [(chunk, _take_pieces(chunk, received)) for chunk in moving.bundle.chunks]
        for handle in moving.sends:
            handle.wait()
        self._free(moving.nbytes - sum(self.received_bytes(chunk) for chunk in moving.bundle.chunks))

    def _messages(self, bundle: Bundle) -> list[tuple[int, RawArray]]:
        """Return one message per receiver, with the pieces in the order of the plan."""
        parts: dict[int, list[tuple[int, Box]]] = {}
        for sending in bundle.sends:
            parts.setdefault(sending.to, []).append((sending.item, sending.box))
        return [(to, self._pack_message(rows)) for to, rows in parts.items()]

    def _pack_message(self, parts: list[tuple[int, Box]]) -> RawArray:
        sizes = [self._items.nbytes(*part) for part in parts]
        message = new_message(sum(sizes))
        for (item, box), out in zip(parts, cut(message, sizes), strict=True):
            self._items.copy(item, box, out.view(raw_dtype(len(out) // box.size)).reshape(box.shape))
        return seal(message)

    def _receives(self, bundle: Bundle) -> dict[int, list[int]]:
        """Return the sizes in bytes of a bundle's pieces by sending rank, in the order of this rank's chunks."""
        sizes: dict[int, list[int]] = {}
        for chunk in bundle.chunks:
            itemsize = self._plan.arrays[chunk.fqn].dtype.itemsize
            for piece in chunk.pieces:
                if piece.source is not None:
                    sizes.setdefault(piece.source, []).append(piece.box.size * itemsize)
        return sizes

    def _open_message(self, rank: int, message: RawArray, sizes: list[int]) -> Iterator[RawArray]:
        """Return the parts of a message. Raises CheckpointError if its checksum differs."""
        if not is_intact(message):
            raise CheckpointError(
                f"a message of rank {rank} of the save was altered on the network: its checksum differs. Nothing was "
                "committed. Check the network between the ranks, then save again"
            )
        return cut(message, sizes)


def _take_pieces(chunk: ChunkPlan, received: Mapping[int, Iterator[RawArray]]) -> Received:
    return {index: next(received[piece.source]) for index, piece in enumerate(chunk.pieces) if piece.source is not None}
