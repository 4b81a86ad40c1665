"""The accelerator that ``make test-gpu`` runs on, and a process group of one rank for it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The current device of torch's accelerator. With TEST_DEVICE=delayed, the device of ``harness.delayed_device``."""
    if os.environ.get("TEST_DEVICE") == "delayed":
        from harness import delayed_device

        delayed_device.register(delayed_device.build())
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        pytest.fail(f"make test-gpu needs an accelerator, but torch {torch.__version__} finds none on this machine")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


@pytest.fixture(scope="session")
def group(device: torch.device, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A process group of this process alone, with the device's own backend, such as NCCL, beside gloo."""
    backend = dist.get_default_backend_for_device(device.type)
    store = Path(tmp_path_factory.mktemp("group"), "store")
    dist.init_process_group(f"cpu:gloo,{device.type}:{backend}", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
