"""Fill the tensors of one rank. A subchunk that several ranks need is fetched by one of them and sent to the others."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch

from zarrckpt._errors import KeyMismatchError, warn
from zarrckpt._format.chunk_codec import BoxTarget, copy_shared, elements_of
from zarrckpt._format.chunk_layout import RawArray, raw_dtype
from zarrckpt._format.grid import Box, Ints, intersect
from zarrckpt._jobs import Progress, in_thread, run_jobs
from zarrckpt._load.shared_reads import SharedMessage, ShareRound, Shares, SubchunkRange, overlap_bytes
from zarrckpt._ranks.errors import StoppedError
from zarrckpt._ranks.messages import Channel, cut, is_intact, message_bytes, new_message, seal
from zarrckpt._read.catalog import Catalog
from zarrckpt._read.chunks import (
    Job,
    StoredSubchunks,
    fetch,
    fetch_in_budget,
    request_ranges,
    subchunks_in,
    unpack,
    unpacking_bytes,
)
from zarrckpt._state.tensors import CopiedTensor, can_view, raw_view, target_fault, torch_dtype, transfer_memory


class TensorTarget(NamedTuple):
    """A tensor to fill with a box of an array."""

    fqn: str
    box: Box
    tensor: torch.Tensor
    on_filled: Callable[[], None] = lambda: None
    """Called when all tensors of the load are filled."""
    name: str = ""
    """The flat name of the target in the state, or '' if it is the fqn."""


_Pack = tuple[Box, RawArray]
"""A box that another rank fills, and the memory in the message for the overlap of the box with a range."""


class _PreparedTarget:
    """A tensor to fill: its memory if that is raw CPU memory, otherwise an adapter that copies to it."""

    def __init__(self, catalog: Catalog, target: TensorTarget) -> None:
        self.box, self.on_filled, self.device = target.box, target.on_filled, target.tensor.device
        if (fault := target_fault(target.tensor)) is not None:
            raise KeyMismatchError(f"{target.fqn!r} {fault}")
        node = catalog.root.tensors[target.fqn]
        self.nbytes = target.box.size * node.dtype.itemsize
        dtype, tensor = torch_dtype(node), target.tensor.detach()
        # Computed once, because each torch call releases the GIL and then waits until other threads release it.
        self.memory: BoxTarget = raw_view(tensor) if can_view(tensor, dtype) else CopiedTensor(tensor, dtype)


class TensorReads:
    """The tensor reads of one rank in one load."""

    def __init__(
        self,
        catalog: Catalog,
        targets: Iterable[TensorTarget],
        max_inflight_bytes: int,
        progress: Progress | None,
        report_alive: Callable[[], None] = lambda: None,
    ) -> None:
        self._catalog = catalog
        self._limit = max_inflight_bytes
        self._progress = progress
        self._report_alive = report_alive
        self._stopped = False
        self._targets: dict[str, list[_PreparedTarget]] = {}
        for target in targets:
            self._targets.setdefault(target.fqn, []).append(_PreparedTarget(catalog, target))
        self._delivered: dict[tuple[str, Ints, Box], set[int]] = {}
        """The numbers of the subchunks that :meth:`share` copied to targets, by fqn, chunk and box of the target."""
        self._lock = threading.Lock()
        self._total = sum(target.nbytes for target in self._all())
        self._done = 0
        # Waits for GPU work that still writes to the targets.
        self._budget = transfer_memory(self._limit, {target.device for target in self._all()})
        self.bytes_read = 0
        """The number of bytes that this rank has fetched."""

    def _all(self) -> Iterator[_PreparedTarget]:
        return (target for targets in self._targets.values() for target in targets)

    def read(self) -> None:
        """Read the elements that :meth:`share` did not deliver, and finish all targets.

        Raises CorruptCheckpointError with the array and the key.
        """
        store = self._catalog.store
        with store.keep_open():
            run_jobs(self._own_jobs(), store.threads_for(self._total, sum(map(len, self._targets.values()))))
        for target in self._all():
            target.on_filled()

    def stop(self) -> None:
        """Make :meth:`read` end soon, with an error, because another rank failed. Called in a different thread."""
        self._stopped = True

    def _own_jobs(self) -> Iterator[Callable[[], None]]:
        """Yield the jobs for elements that were not delivered. A subchunk that several targets need is fetched once."""
        for fqn, targets in self._targets.items():
            if self._stopped:
                raise StoppedError
            node = self._catalog.root.tensors[fqn]
            self._catalog.refuse_too_many_chunks(node)
            targets_of: dict[Ints, list[_PreparedTarget]] = {}
            for target in targets:
                for chunk in node.grid.chunks_of(target.box):
                    targets_of.setdefault(chunk, []).append(target)
            if not targets_of:
                continue
            array = self._catalog.stored_array(node)
            for chunk, in_chunk in targets_of.items():
                if len(in_chunk) == 1 and (fqn, chunk, in_chunk[0].box) not in self._delivered:
                    for job in array.chunk_jobs(chunk, in_chunk[0].box, in_chunk[0].memory, self._budget):
                        yield partial(self._count_job, job)
                    continue
                needing: dict[int, list[_PreparedTarget]] = {}
                for target in in_chunk:
                    delivered = self._delivered.get((fqn, chunk, target.box), set())
                    for number in {*subchunks_in(node.grid, chunk, target.box)} - delivered:
                        needing.setdefault(number, []).append(target)
                for numbers in request_ranges(node, sorted(needing), self._budget):
                    yield partial(self._read_range, SubchunkRange(fqn, chunk, numbers), needing)

    def _count_job(self, job: Job) -> None:
        self._count(*job())

    def _read_range(self, subchunks: SubchunkRange, needing: dict[int, list[_PreparedTarget]]) -> None:
        """Fetch consecutive subchunks, and copy each to the targets that need it."""
        part = self._part(subchunks)
        with fetch_in_budget(part, self._budget) as (stored, scratch):
            self._count(len(stored), 0)
            for number, one in part.each(stored):
                elements = unpack(part, number, one, scratch)
                for target in needing[number]:
                    self._copy(part, number, elements, target)

    def _part(self, subchunks: SubchunkRange) -> StoredSubchunks:
        array = self._catalog.stored_array(self._catalog.root.tensors[subchunks.fqn])
        return StoredSubchunks(array, subchunks.chunk, subchunks.numbers, array.table(subchunks.chunk))

    def _copy(self, part: StoredSubchunks, number: int, elements: RawArray, target: _PreparedTarget) -> None:
        self._count(0, copy_shared(part.node, part.chunk_index, number, elements, target.box, target.memory))

    def _count(self, fetched: int, filled: int) -> None:
        with self._lock:
            self.bytes_read += fetched
            self._done += filled
            self._report_alive()
            if self._progress is not None and filled:
                self._progress(self._done, self._total)

    # -- together with other ranks

    def share(self, shares: Shares, channel: Channel) -> None:
        """Fetch and send the ranges that other ranks need, and receive those that other ranks fetched, round by round.

        While the messages of a round are sent, the ranges of the next round are fetched. Raises LostPeerError.
        :meth:`read` does not read the delivered subchunks again.
        """
        steps = [*shares.values()]
        stored = self._fetch_ranges(steps[0] if steps else None)
        for index, step in enumerate(steps):
            if self._stopped:
                raise StoppedError
            # Copy the fetched ranges to own targets, and to the messages for other ranks.
            messages = [new_message(sum(self._sizes(message))) for message in step.sends]
            packs = self._packs(step, messages)
            self._run_jobs(
                partial(self._unpack, subchunks, data, packs.get(subchunks, ())) for subchunks, data in stored.items()
            )
            # Transfer the messages, and fetch the ranges of the next round in the meantime.
            following = steps[index + 1] if index + 1 < len(steps) else None
            with in_thread(partial(self._fetch_ranges, following), at_once=following is None) as stored_next:
                sealed = list(map(seal, messages))
                sends = [(rank, data) for data, sent in zip(sealed, step.sends, strict=True) for rank in sent.ranks]
                sources = [(message.ranks[0], message_bytes(self._sizes(message))) for message in step.receives]
                receives = [channel.recv(source, nbytes) for source, nbytes in sources]
                handles = [channel.send(rank, data) for rank, data in sends]
                received = [handle.wait() for handle in receives]
                for handle in handles:
                    handle.wait()
                self._run_jobs(partial(self._receive, *row) for row in zip(step.receives, received, strict=True))
                stored = stored_next()

    def _run_jobs(self, jobs: Iterable[Callable[[], None]]) -> None:
        run_jobs(jobs, self._catalog.store.useful_concurrency)

    def _fetch_ranges(self, step: ShareRound | None) -> dict[SubchunkRange, RawArray]:
        """Fetch and return the ranges of a round. None stands for the end, and returns an empty dict."""
        reads = [] if step is None else step.reads

        def fetch_range(subchunks: SubchunkRange) -> RawArray:
            if self._stopped:
                raise StoppedError
            stored = fetch(self._part(subchunks))
            self._count(len(stored), 0)
            return stored

        jobs = (partial(fetch_range, subchunks) for subchunks in reads)
        return dict(zip(reads, run_jobs(jobs, self._catalog.store.useful_concurrency), strict=True))

    def _sizes(self, message: SharedMessage) -> list[int]:
        """Return the size in bytes of each part of a message."""
        nodes = self._catalog.root.tensors
        return [
            overlap_bytes(nodes[subchunks.fqn], subchunks.chunk, subchunks.numbers, box)
            for subchunks, box in message.parts
        ]

    def _packs(self, step: ShareRound, messages: Sequence[RawArray]) -> dict[SubchunkRange, list[_Pack]]:
        """Return the boxes of other ranks by range, each with its memory in the messages to send."""
        packs: dict[SubchunkRange, list[_Pack]] = {}
        for message, data in zip(step.sends, messages, strict=True):
            for (subchunks, box), out in zip(message.parts, cut(data, self._sizes(message)), strict=True):
                packs.setdefault(subchunks, []).append((box, out))
        return packs

    def _unpack(self, subchunks: SubchunkRange, stored: RawArray, packs: Sequence[_Pack]) -> None:
        """Check a range that this rank fetched, copy it to its targets, and pack the elements for other ranks."""
        part, targets = self._part(subchunks), self._targets.get(subchunks.fqn, [])
        begins = [0] * len(packs)
        with self._budget.take(unpacking_bytes(part.node)) as scratch:
            for number, one in part.each(stored):
                elements = unpack(part, number, one, scratch)
                for target in targets:
                    self._copy(part, number, elements, target)
                for index, (box, out) in enumerate(packs):
                    shared = intersect(elements_of(part.node, part.chunk_index, number), box)
                    if shared is not None:
                        begin = begins[index]
                        begins[index] += shared.size * part.node.dtype.itemsize
                        packed = _as_elements(part, out[begin : begins[index]], shared)
                        copy_shared(part.node, part.chunk_index, number, elements, shared, packed)
        for target in targets:
            self._note(subchunks, target.box)

    def _receive(self, message: SharedMessage, data: RawArray) -> None:
        """Copy the elements of a message to the targets. If the message was altered, warn and copy nothing."""
        if not is_intact(data):
            source = message.ranks[0]
            warn(
                f"a message of rank {source} of the load was altered on the network: its checksum differs. Its "
                "elements are read from the store instead"
            )
            return
        for (subchunks, box), packed in zip(message.parts, cut(data, self._sizes(message)), strict=True):
            part, begin = self._part(subchunks), 0
            targets = [target for target in self._targets.get(subchunks.fqn, ()) if target.box == box]
            for number in subchunks.numbers:
                shared = intersect(elements_of(part.node, part.chunk_index, number), box)
                if shared is None:
                    continue
                end = begin + shared.size * part.node.dtype.itemsize
                for target in targets:
                    target.memory[shared.region(box.offset)] = _as_elements(part, packed[begin:end], shared)
                    self._count(0, end - begin)
                begin = end
            self._note(subchunks, box)

    def _note(self, subchunks: SubchunkRange, box: Box) -> None:
        """Record that the subchunks of a range were copied to all targets with this box."""
        with self._lock:
            self._delivered.setdefault((subchunks.fqn, subchunks.chunk, box), set()).update(subchunks.numbers)


def _as_elements(part: StoredSubchunks, data: RawArray, box: Box) -> RawArray:
    return data.view(raw_dtype(part.node.dtype.itemsize)).reshape(box.shape)
