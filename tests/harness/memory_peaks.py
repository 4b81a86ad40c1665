"""Peak memory of a piece of code: of the process by Linux, and of Python's and numpy's objects."""

from __future__ import annotations

import gc
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

from zarrckpt import _jobs


def _status(name: str) -> int:
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith(name))


def peak_of(action: Callable[[], object]) -> int:
    """Return the maximum number of bytes by which the process grows while an action runs."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # begins a new peak
    before = _status("VmRSS")
    action()
    return _status("VmHWM") - before


def traced_peak_of(action: Callable[[], object]) -> int:
    """Return the maximum bytes of Python's objects and numpy's arrays while an action runs."""
    tracemalloc.start()
    try:
        with patch.object(_jobs, "MAPPED", 1 << 62):  # tracemalloc does not see memory that is mapped
            action()
        return tracemalloc.get_traced_memory()[1]
    finally:
        # Before CPython 3.12.9, a thread that frees memory while this stops crashes the process. A thread that was
        # joined may still be about to do so (https://github.com/python/cpython/issues/128679).
        time.sleep(0.3)
        tracemalloc.stop()
