"""``Checkpoint.iter_tensors``: read tensors one after the other, ahead of the caller, within a memory bound."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from zarrckpt._errors import CheckpointError
from zarrckpt._format.chunk_codec import BoxTarget
from zarrckpt._format.documents import ArrayNode
from zarrckpt._format.dtypes import DType
from zarrckpt._format.matching import select
from zarrckpt._jobs import ByteCounter, Progress, check_limits, plain_bytes
from zarrckpt._load.rename import Rename, check_rename, new_names, old_names
from zarrckpt._read.casts import CastTarget, DTypeOption, plan_casts, warn_of_overflow
from zarrckpt._read.catalog import Catalog
from zarrckpt._read.chunks import Job
from zarrckpt._read.selection import Selection, catalog_of
from zarrckpt._state.accelerators import wait_for_streams
from zarrckpt._state.tensors import CopiedTensor, new_tensor, permute_back, permute_shape, raw_view, transfer_memory


def iter_tensors(
    entries: Selection,
    keys: str | Iterable[str] | None,
    dtype: DTypeOption | torch.dtype,
    device: torch.device | str,
    rename: Rename | None,
    max_inflight_bytes: int,
    progress: Progress | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Check the arguments and return the iterator, see :meth:`Checkpoint.iter_tensors`."""
    check_limits(max_inflight_bytes=max_inflight_bytes)
    check_rename(rename)
    if (device := torch.device(device)).type == "meta":
        raise ValueError("device must have memory, got 'meta': Checkpoint.entry describes tensors without reading them")
    catalog, tensors = catalog_of(entries), catalog_of(entries).root.tensors
    stored = {fqn: fqn for fqn in entries} if rename is None else old_names(new_names([*entries], rename))
    stored = {name: fqn for name, fqn in stored.items() if fqn in tensors}
    if keys is not None:
        patterns = [keys] if isinstance(keys, str) else [*keys]
        stored = {name: stored[name] for name in select(stored, patterns, f"the tensors of {entries.url}")}
    option = str(dtype) if isinstance(dtype, torch.dtype) else dtype
    casts = plan_casts(catalog.root, stored.values(), entries.url, option).dtypes
    reads = {name: (tensors[fqn], casts.get(fqn, tensors[fqn].dtype)) for name, fqn in stored.items()}
    return _read_ahead(catalog, reads, device, max_inflight_bytes, progress)


class _PendingTensor:
    """A new tensor, and the jobs that fill it."""

    def __init__(self, name: str, node: ArrayNode, dtype: DType, device: torch.device) -> None:
        self.nbytes = node.grid.whole.size * dtype.itemsize
        self.jobs: list[Future[None]] = []
        self._name = name
        target: BoxTarget
        if device.type == "cpu":
            # Its jobs make no torch calls, which wait for the interpreter. Without the 1, empty memory has stride 0.
            memory = plain_bytes(self.nbytes or 1)[: self.nbytes]
            flat = torch.from_numpy(memory).view(getattr(torch, dtype.name))
            self._tensor = permute_back(flat.reshape(permute_shape(node.grid.shape, node.order)), node.order)
            target = raw_view(self._tensor)
        else:
            # The memory can be that of a dropped tensor which the caller's stream still uses. Jobs use other streams.
            wait_for_streams([device])
            self._tensor = new_tensor(node.grid.shape, node.order, getattr(torch, dtype.name), device)
            target = CopiedTensor(self._tensor, self._tensor.dtype)
        self._cast = None if dtype == node.dtype else CastTarget(node.dtype, dtype, target)
        self.target = target if self._cast is None else self._cast

    def wait(self) -> tuple[str, torch.Tensor]:
        """Wait until the tensor is filled, and return it with its name. Raises the errors of its jobs."""
        for job in self.jobs:
            job.result()
        if self._cast is not None and self._cast.overflowed:
            warn_of_overflow({self._name: self._cast.overflowed})
        return self._name, self._tensor


def _read_ahead(
    catalog: Catalog,
    reads: Mapping[str, tuple[ArrayNode, DType]],
    device: torch.device,
    limit: int,
    progress: Progress | None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield new tensors in the order of ``reads``, which has the array and the new dtype of each name.

    Half of the memory is for pending tensors, the other half for their requests. Only the caller's thread starts jobs,
    so no thread waits for a caller that asks for no more tensors.
    """
    process = os.getpid()
    ahead, budget = limit - limit // 2, transfer_memory(limit // 2, [device])
    tally = ByteCounter(sum(node.nbytes for node, _ in reads.values()), progress)
    waiting, pending, held = deque(reads.items()), deque[_PendingTensor](), 0

    def run(job: Job) -> None:
        tally.add(job()[1])

    def start_reads() -> None:
        nonlocal held
        while waiting:
            name, (node, dtype) = waiting[0]
            if pending and held + node.grid.whole.size * dtype.itemsize > ahead:
                break
            waiting.popleft()
            catalog.refuse_implausible_size(node)
            tensor = _PendingTensor(name, node, dtype, device)
            if tensor.nbytes:
                jobs = catalog.stored_array(node).box_jobs(node.grid.whole, tensor.target, budget)
                tensor.jobs = [pool.submit(run, job) for job in jobs]
            pending.append(tensor)
            held += tensor.nbytes

    pool = ThreadPoolExecutor(catalog.store.useful_concurrency(), "zarrckpt-read")
    try:
        with catalog.explaining_damage():
            start_reads()
        while pending:
            with catalog.explaining_damage():
                held -= pending[0].nbytes
                ready = [pending.popleft().wait()]
                start_reads()
            # Without a reference here, the caller frees each tensor after use.
            yield ready.pop()
            if os.getpid() != process:
                raise CheckpointError(
                    f"the iterator of the tensors of {catalog.store.url} was started before this process was forked: "
                    "call iter_tensors in this process"
                )
    finally:
        if os.getpid() == process:  # A forked child does not have the threads.
            pool.shutdown(cancel_futures=True)
