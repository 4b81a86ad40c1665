"""The random number generators of this process."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from zarrckpt._state.accelerators import initialized_module


@contextmanager
def kept_random_state() -> Iterator[None]:
    """Restore the random number generators at the end, because some state_dict() methods draw random numbers."""
    numpy_random: Any = getattr(sys.modules.get("numpy"), "random", None)
    python, numpy = random.getstate(), None if numpy_random is None else numpy_random.get_state()
    has_state = hasattr(initialized_module(), "get_rng_state")
    devices = [torch.accelerator.current_device_index()] if has_state else []
    accelerator = torch.accelerator.current_accelerator() if devices else None
    try:
        with torch.random.fork_rng(devices=devices, device_type=accelerator.type if accelerator else "cuda"):
            yield
    finally:
        random.setstate(python)
        if numpy_random is not None:
            numpy_random.set_state(numpy)
