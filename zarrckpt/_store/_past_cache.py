"""Files written past the kernel's file cache (``O_DIRECT``).

What is written the usual way is copied into the file cache and from there to the disk, and a sync waits for the second
part. Past the cache the disk takes it from our memory: no page of the cache is needed, none that training uses is
thrown out for it, and hardly anything is left to sync. The price: who reads the file next reads it from the disk.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
from collections.abc import Iterable, Sequence

import numpy as np

BLOCK = 4096
"""Offsets, lengths and addresses are multiples of a disk's blocks, which are at most so long."""

STAGE = 4 << 20
"""Bytes a call: enough to keep a disk busy."""

LEAST = 1 << 20
"""Smaller files go the usual way: the calls would cost more than the copy."""

_own = threading.local()


def set_past_cache(file: int, on: bool) -> bool:
    """Make the writes of an open file go past the cache, or not; False where that is not to be had there."""
    if not hasattr(os, "O_DIRECT"):
        return False
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, flags | os.O_DIRECT if on else flags & ~os.O_DIRECT)
    except OSError:
        return False
    return True


def write(file: int, groups: Iterable[Sequence[memoryview]]) -> None:
    """Write buffers one after the other into a new file that is set to go past the cache."""
    stage = _stage()
    view = stage.data
    filled = offset = 0
    for buffer in (buffer for group in groups for buffer in group):
        source, done = np.frombuffer(buffer, np.uint8), 0
        while done < len(source):
            count = min(len(source) - done, STAGE - filled)
            stage[filled : filled + count] = source[done : done + count]
            filled, done = filled + count, done + count
            if filled == STAGE:
                _write_at(file, view, offset)
                filled, offset = 0, offset + STAGE
    whole = filled // BLOCK * BLOCK
    _write_at(file, view[:whole], offset)
    if filled > whole:
        # The end is no whole block.
        set_past_cache(file, False)
        _write_at(file, view[whole:filled], offset + whole)


def _write_at(file: int, view: memoryview, offset: int) -> None:
    done = 0
    while done < len(view):
        done += os.pwrite(file, view[done:], offset + done)


def _stage() -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Memory that begins at a page, one for each thread."""
    stage = getattr(_own, "stage", None)
    if stage is None:
        memory = mmap.mmap(-1, STAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        stage = _own.stage = np.frombuffer(memory, np.uint8)
    made: np.ndarray[tuple[int], np.dtype[np.uint8]] = stage
    return made
