"""A bound on the memory of one save or load, and its buffers, which are used again."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

MAPPED = 1 << 20
"""Memory of so many bytes is the system's own, not the allocator's."""


def plain_bytes(nbytes: int) -> Bytes:
    """Memory that is not set to anything, or all zeros; the system has it back as soon as it is let go.

    That is not so with the allocator's: it keeps what is let go, for each thread.
    """
    if nbytes < MAPPED:
        return np.empty(nbytes, np.uint8)
    try:
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as err:
        # As the allocator says it.
        raise MemoryError(f"{nbytes} bytes cannot be allocated: {err}") from err
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # As numpy does: one fault for 2 MiB, where the kernel has that.
        with suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)


class BytesBudget:
    """A semaphore in bytes, which lends memory too. A job larger than the whole budget waits until it is alone.

    Memory that was lent before is lent again where it fits: new memory costs the system as much time, page by page, as
    copying a chunk does. What is kept for that counts as used.
    """

    def __init__(self, limit: int, allocate: Callable[[int], Bytes] = plain_bytes) -> None:
        self.limit = limit
        self._allocate = allocate
        self._held = 0
        self._free: list[Bytes] = []
        self._changed = threading.Condition()

    @contextmanager
    def hold(self, nbytes: int) -> Iterator[None]:
        """Count memory of somebody else's."""
        need = min(nbytes, self.limit)
        with self._changed:
            self._reserve(need)
            self._give_back()
        try:
            yield
        finally:
            self._release(need)

    @contextmanager
    def take(self, nbytes: int, beside: int = 0) -> Iterator[Bytes]:
        """Lend memory of that many bytes, with whatever is in it, and count ``beside`` bytes of somebody else's.

        A job takes all that it needs at once: jobs that hold some and wait for more could wait for each other.
        """
        size = _rounded(nbytes)
        need = min(size + beside, self.limit)
        with self._changed:
            self._reserve(need)
            memory = self._kept(size)
            self._give_back()
        try:
            if memory is None:
                memory = self._allocate(size)
            yield memory[:nbytes]
        finally:
            self._release(need, memory)

    def _reserve(self, need: int) -> None:
        self._changed.wait_for(lambda: self._held + need <= self.limit)
        self._held += need

    def _release(self, need: int, memory: Bytes | None = None) -> None:
        with self._changed:
            self._held -= need
            if memory is not None:
                self._free.append(memory)
            self._give_back()
            self._changed.notify_all()

    def _kept(self, size: int) -> Bytes | None:
        for place, memory in enumerate(self._free):
            if len(memory) == size:
                return self._free.pop(place)
        return None

    def _give_back(self) -> None:
        """Return free memory to the system until what is held and kept is within the limit."""
        kept = sum(map(len, self._free))
        while self._free and self._held + kept > self.limit:
            kept -= len(self._free.pop(0))


def _rounded(nbytes: int) -> int:
    """Up to an eighth more: there are few sizes then, and memory fits again."""
    step = max(1024, 1 << max(0, nbytes.bit_length() - 4))
    return -(-nbytes // step) * step
