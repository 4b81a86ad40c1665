"""Files that are mapped into memory: read as they are used, and not kept once they have been."""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterable

import torch

from zarrckpt._transfer import Progress

_STEP_BYTES = 64 << 20
"""After so many bytes of progress, pages are given back."""

_PAGEOUT = 21
"""Linux's MADV_PAGEOUT (5.4 and newer): the pages go, and nothing that was written to them is lost."""


class MappedFiles:
    """The memory of mapped files.

    The system takes such pages back by itself when memory is short. Giving them back before keeps this process small,
    and what others have in memory where it is.
    """

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] = []

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        """The memory from the first to the last of a file's tensors."""
        storages = [tensor.untyped_storage() for tensor in tensors if tensor.is_cpu and tensor.layout == torch.strided]
        places = [(storage.data_ptr(), storage.nbytes()) for storage in storages if storage.nbytes()]
        if places:
            begin = min(place for place, _ in places)
            self._ranges.append((begin, max(place + nbytes for place, nbytes in places)))

    def give_back(self) -> None:
        """Let the pages go that have been read; they are read again where they are used again."""
        if sys.platform != "linux":
            return
        madvise = ctypes.CDLL(None).madvise
        for begin, end in self._ranges:
            start = begin - begin % mmap.PAGESIZE
            # An older kernel refuses: then they stay until memory is short.
            madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _PAGEOUT)

    def follow(self, progress: Progress | None) -> Progress:
        """A progress callback that gives pages back now and then, around another one."""
        last = 0

        def follow(done: int, total: int) -> None:
            nonlocal last
            if done - last >= _STEP_BYTES:
                last = done
                self.give_back()
            if progress is not None:
                progress(done, total)

        return follow
