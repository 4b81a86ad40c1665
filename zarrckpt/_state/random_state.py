"""The random number generators of this process."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def kept_random_state() -> Iterator[None]:
    """Restore the random number generators at the end, because some state_dict() methods draw random numbers."""
    numpy_random: Any = getattr(sys.modules.get("numpy"), "random", None)
    python, numpy = random.getstate(), None if numpy_random is None else numpy_random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python)
        if numpy_random is not None:
            numpy_random.set_state(numpy)
