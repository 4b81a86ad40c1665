"""Fill one rank's tensors: what other ranks need too is fetched by one of them and handed on, the rest by itself."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial

import numpy as np
import torch
from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem

from zarrckpt import _codec
from zarrckpt._catalog import Catalog
from zarrckpt._crew import run
from zarrckpt._errors import KeyMismatchError, UnsupportedLayoutError
from zarrckpt._exchange import Channel, Joining, PeerLost, entered
from zarrckpt._grid import Box, Ints, intersect
from zarrckpt._memory import BytesBudget
from zarrckpt._messages import cut, lengths
from zarrckpt._sharing import Run, ShareRound, Shares
from zarrckpt._tensors import OVERLAPS, CopiedTensor, can_view, overlaps, raw_view, torch_dtype, transfer_memory
from zarrckpt._transfer import (
    ChunkRead,
    Job,
    Progress,
    chunk_jobs,
    deliver,
    fetch,
    places_in,
    requests,
    unpacking_bytes,
)


class _Target:
    """The memory that one read item fills: the tensor's own where it can be seen as raw CPU memory, else by copies."""

    def __init__(self, catalog: Catalog, item: ReadItem, planner: LoadPlanner) -> None:
        self.fqn = item.storage_index.fqn
        self.box = item_box(item)
        self._catalog = catalog
        self._item = item
        self._planner = planner
        self._node = catalog.root.tensors[self.fqn]
        self._stored = self._node.under(catalog.root.tree)
        self._tensor = planner.resolve_tensor(item)
        if tuple(self._tensor.shape) != self.box.shape:
            raise UnsupportedLayoutError(
                f"{self.fqn!r}: DCP's planner says that this rank holds a piece of shape {self.box.shape}, but it "
                f"holds {tuple(self._tensor.shape)}: load with zarrckpt.load, or with "
                "planner=zarrckpt.ZarrLoadPlanner()"
            )
        if overlaps(self._tensor):
            raise KeyMismatchError(f"{self.fqn!r} {OVERLAPS}")
        # Now, not for each chunk: every call to torch gives the interpreter's lock away, for which threads then wait.
        self._memory = self._raw_memory()

    @property
    def device(self) -> torch.device:
        return self._tensor.device

    @property
    def nbytes(self) -> int:
        return self.box.size * self._node.dtype.itemsize

    def read(self, wanted: Run) -> ChunkRead | None:
        """A run as a request of this target; None where the target needs nothing of its chunk."""
        if intersect(self._node.grid.chunk_box(wanted.chunk), self.box) is None:
            return None
        table = self._catalog.chunk_table(self._node, wanted.chunk)
        return ChunkRead(self._stored, wanted.chunk, wanted.first, wanted.cells, self.box, self._memory, table)

    def jobs(self, chunk: Ints, memory: BytesBudget) -> list[Job]:
        """What fills this target's part of a chunk that no other target here needs."""
        table = self._catalog.chunk_table(self._node, chunk)
        return chunk_jobs(self._catalog.store, self._stored, chunk, self.box, self._memory, table, memory)

    def _raw_memory(self) -> _codec.Target:
        dtype = torch_dtype(self._node)
        tensor = self._tensor.detach()
        return raw_view(tensor) if can_view(tensor, dtype) else CopiedTensor(tensor, dtype)

    def finish(self) -> None:
        self._planner.commit_tensor(self._item, self._tensor)


def item_box(item: ReadItem) -> Box:
    """The region of the stored tensor that an item asks for."""
    return Box(tuple(item.storage_offsets), tuple(item.lengths))


class TensorReads:
    """The tensor reads of one rank in one load."""

    def __init__(
        self,
        catalog: Catalog,
        items: Sequence[ReadItem],
        planner: LoadPlanner,
        max_inflight_bytes: int,
        progress: Progress | None,
    ) -> None:
        self._catalog = catalog
        self._limit = max_inflight_bytes
        self._progress = progress
        self._targets: dict[str, list[_Target]] = {}
        for item in items:
            self._targets.setdefault(item.storage_index.fqn, []).append(_Target(catalog, item, planner))
        self._delivered: dict[tuple[str, Ints], set[int]] = {}
        """By fqn and chunk, the places of subchunks that came with what ranks share."""
        self._lock = threading.Lock()
        self._total = sum(target.nbytes for target in self._all())
        self._done = 0
        self.bytes_read = 0
        """Bytes that this rank has fetched."""

    def _all(self) -> Iterator[_Target]:
        return (target for targets in self._targets.values() for target in targets)

    def read(self, concurrency: int, shares: Shares | None, joining: Joining | None) -> None:
        """Fill all targets. Raises CorruptCheckpointError naming array and object."""
        # What still writes to the targets must have ended.
        self._memory = transfer_memory(self._limit, {target.device for target in self._all()})
        if joining is not None:
            self._share(concurrency, shares, joining)
        run(self._own_jobs(), self._catalog.store.useful_concurrency)
        for target in self._all():
            target.finish()

    def _own_jobs(self) -> Iterator[Callable[[], None]]:
        """What this rank fetches for itself alone; a subchunk that several of its boxes share, once."""
        for fqn, targets in self._targets.items():
            node = self._catalog.root.tensors[fqn]
            self._catalog.refuse_uncounted(node)
            wanting: dict[Ints, list[_Target]] = {}
            for target in targets:
                for chunk in node.grid.chunks_of(target.box):
                    wanting.setdefault(chunk, []).append(target)
            for chunk, those in wanting.items():
                delivered = self._delivered.get((fqn, chunk))
                if len(those) == 1 and not delivered:
                    for job in those[0].jobs(chunk, self._memory):
                        yield partial(self._counted, job)
                    continue
                places = {place for target in those for place in places_in(node.grid, chunk, target.box)}
                for first, cells in requests(node, sorted(places - (delivered or set())), self._memory):
                    yield partial(self._read_run, Run(fqn, chunk, first, cells))

    def _counted(self, job: Job) -> None:
        self._count(*job())

    def _read_run(self, wanted: Run) -> None:
        nbytes = self.nbytes(wanted)
        with self._memory.take(nbytes + self._unpacking_bytes(wanted)) as memory:
            self.fetch_run(wanted, memory[:nbytes])
            self._deliver_run(wanted, memory[:nbytes], memory[nbytes:])

    def _reads_of(self, wanted: Run) -> list[ChunkRead]:
        """A run as a request of each target here that needs something of its chunk."""
        reads = (target.read(wanted) for target in self._targets.get(wanted.fqn, ()))
        return [read for read in reads if read is not None]

    def fetch_run(self, wanted: Run, stored: _codec.RawArray) -> None:
        """Fetch a run, unchecked. Raises PeerLost where this rank does not need it, as it was planned to."""
        reads = self._reads_of(wanted)
        if not reads:
            raise PeerLost("this rank's planner has changed the plan that its part was made for")
        fetch(self._catalog.store, reads[0], stored)
        self._count(len(stored), 0)

    def _deliver_run(self, wanted: Run, stored: _codec.RawArray, scratch: _codec.RawArray) -> None:
        """Check a run and copy it into all targets here that need it."""
        for read in self._reads_of(wanted):
            self._count(0, deliver(self._catalog.store, read, stored, scratch))

    def _count(self, fetched: int, filled: int) -> None:
        with self._lock:
            self.bytes_read += fetched
            self._done += filled
            if self._progress is not None and filled:
                self._progress(self._done, self._total)

    # -- together with other ranks

    def _share(self, concurrency: int, shares: Shares | None, joining: Joining) -> None:
        """Fetch what this rank is to hand on, hand it on, and take what others have fetched.

        Ends early where a peer is lost: what has not been delivered then, this rank fetches by itself.
        """
        pool = ThreadPoolExecutor(concurrency, thread_name_prefix="zarrckpt")
        try:
            with suppress(PeerLost), entered(joining) as channel:
                if shares is None:
                    raise PeerLost("this rank was not told its part")
                self._rounds(pool, shares, channel)
        finally:
            # After the channel is closed: the others need not wait for what is being fetched here.
            pool.shutdown(cancel_futures=True)

    def _rounds(self, pool: ThreadPoolExecutor, shares: Shares, channel: Channel) -> None:
        """One round after the other; while its messages are on their way, the next round's are fetched."""
        steps = list(shares.items())
        ahead = _Fetched(self, pool, steps[0][1]) if steps else None
        for place, (number, step) in enumerate(steps):
            assert ahead is not None
            fetched = ahead
            fetched.wait()
            ahead = _Fetched(self, pool, steps[place + 1][1]) if place + 1 < len(steps) else None
            parts = [(source, self.nbytes(wanted)) for wanted, source in step.receives]
            received = cut(channel.swap(fetched.messages(), lengths(parts), number), parts)
            stored = [*fetched.parts(), *zip((wanted for wanted, _ in step.receives), received, strict=True)]
            for job in [pool.submit(self._take_shared, wanted, data) for wanted, data in stored]:
                job.result()

    def _take_shared(self, wanted: Run, stored: _codec.RawArray) -> None:
        """Deliver a run, whoever fetched it, and note that this rank need not."""
        with self._memory.take(self._unpacking_bytes(wanted)) as scratch:
            self._deliver_run(wanted, stored, scratch)
        with self._lock:
            places = self._delivered.setdefault((wanted.fqn, wanted.chunk), set())
            places.update(range(wanted.first, wanted.first + wanted.cells))

    def nbytes(self, wanted: Run) -> int:
        """The stored size of a run."""
        node = self._catalog.root.tensors[wanted.fqn]
        if node.compression is None:
            return wanted.nbytes(node)
        table = self._catalog.chunk_table(node, wanted.chunk)
        return table.begin(wanted.first + wanted.cells) - table.begin(wanted.first)

    def _unpacking_bytes(self, wanted: Run) -> int:
        return unpacking_bytes(self._catalog.root.tensors[wanted.fqn])


class _Fetched:
    """What one rank fetches for a round: one buffer, so that receivers of the same runs get the same message."""

    def __init__(self, reads: TensorReads, pool: ThreadPoolExecutor, step: ShareRound) -> None:
        self._step = step
        ends = np.cumsum([0, *(reads.nbytes(wanted) for wanted, _ in step.reads)]).tolist()
        self._buffer: _codec.RawArray = np.empty(ends[-1], np.uint8)
        self._spans = list(itertools.pairwise(ends))
        self._jobs: list[Future[None]] = [pool.submit(reads.fetch_run, wanted, part) for wanted, part in self.parts()]

    def wait(self) -> None:
        """Until all is here. Raises what a request raised."""
        for job in self._jobs:
            job.result()

    def parts(self) -> Iterator[tuple[Run, _codec.RawArray]]:
        """The runs and their bytes."""
        for (wanted, _), (begin, end) in zip(self._step.reads, self._spans, strict=True):
            yield wanted, self._buffer[begin:end]

    def messages(self) -> dict[int, _codec.RawArray]:
        """The bytes for each other rank: a part of the buffer itself where that is one."""
        spans: dict[int, list[tuple[int, int]]] = {}
        for (_, others), (begin, end) in zip(self._step.reads, self._spans, strict=True):
            for rank in others:
                mine = spans.setdefault(rank, [])
                if mine and mine[-1][1] == begin:
                    mine[-1] = (mine[-1][0], end)
                else:
                    mine.append((begin, end))
        parts = {rank: [self._buffer[begin:end] for begin, end in mine] for rank, mine in spans.items()}
        return {rank: own[0] if len(own) == 1 else np.concatenate(own) for rank, own in parts.items()}
