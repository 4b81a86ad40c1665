"""Streams, pinned memory and random states of this process's accelerator: CUDA, ROCm, XPU, NPU, MPS or another one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from zarrckpt._errors import log


def is_accelerator(device: torch.device) -> bool:
    """Whether a device is of the type that :mod:`torch.accelerator` controls. Copies from others are synchronous."""
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and device.type == accelerator.type


def initialized_module() -> Any:
    """Return the accelerator's module, such as torch.cuda, or None if this process has not initialised it."""
    if (accelerator := torch.accelerator.current_accelerator()) is None:
        return None
    module = torch.get_device_module(accelerator)
    # torch.mps has no such function.
    is_initialized = getattr(module, "is_initialized", torch.accelerator.is_available)
    return module if is_initialized() else None


def current_streams() -> list[torch.Stream]:
    """Return the calling thread's current stream of each device."""
    count = 0 if initialized_module() is None else torch.accelerator.device_count()
    return [torch.accelerator.current_stream(device) for device in range(count)]


def wait_for_streams(devices: Iterable[torch.device]) -> None:
    """Wait for the work that is queued on the calling thread's current streams of these devices."""
    for device in filter(is_accelerator, devices):
        # An event ends before work that other threads queue later. On MPS, a stream itself cannot be waited for.
        torch.accelerator.current_stream(device).record_event().synchronize()


def allocate_pinned(allocate: Callable[..., torch.Tensor]) -> torch.Tensor:
    """Return ``allocate(pin_memory=True)``, or the same in pageable memory if there is no pinned memory (left)."""
    try:
        pinned = allocate(pin_memory=True)
        if pinned.device.type == "cpu":
            return pinned
        reason = f"torch {torch.__version__} allocates it on {pinned.device}"  # MPS before torch 2.15
    except RuntimeError as err:
        reason = str(err)
    if not _logged:
        _logged.append(reason)
        log.warning("pinned memory cannot be allocated, so copies from and to devices are slower: %s", reason)
    return allocate(pin_memory=False)


_logged: list[str] = []
"""The reason that was logged. It is logged once per process."""


def random_states(device: torch.device) -> list[torch.Tensor] | None:
    """Return the random states of all devices of a type, or None if it has no generators of its own."""
    module = torch.get_device_module(device)
    if hasattr(module, "get_rng_state_all"):
        states: list[torch.Tensor] = module.get_rng_state_all()
        return states
    # torch.mps has one device.
    return [module.get_rng_state()] if hasattr(module, "get_rng_state") else None
