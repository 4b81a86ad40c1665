"""Saves and loads on the accelerator of this machine: ``make test-gpu``."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from harness import device_checks
from harness.memory_peaks import peak_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import zarrckpt


def test_all_dtypes_and_strides_round_trip(device: torch.device, tmp_path: Path) -> None:
    device_checks.round_trip(device, str(tmp_path))


def test_models_on_two_kinds_of_devices_resume(device: torch.device, tmp_path: Path) -> None:
    device_checks.resume_on_two_devices(device, str(tmp_path))


def test_async_saves_beside_training_save_the_old_numbers(device: torch.device, tmp_path: Path) -> None:
    elements = 1 << 18 if device.type == "delayed" else 1 << 25
    device_checks.train_beside_saves(device, str(tmp_path), elements=elements)


def test_a_load_to_the_device_is_bounded_in_host_memory(device: torch.device, tmp_path: Path) -> None:
    state = {f"w{i}": torch.randn(1 << 22, device=device).bfloat16() for i in range(64)}  # 512 MiB
    zarrckpt.save(state, tmp_path / "a")
    options = zarrckpt.LoadOptions(max_inflight_bytes=32 << 20, check_after="off")
    targets = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    torch.accelerator.synchronize()
    zarrckpt.load({"w0": targets["w0"]}, tmp_path / "a", options=options, keys=["w0"])  # libraries are loaded
    peak = peak_of(lambda: zarrckpt.load(targets, tmp_path / "a", options=options))
    assert peak < 128 << 20
    assert all(torch.equal(targets[name].cpu(), tensor.cpu()) for name, tensor in state.items())


def _sharded(device: torch.device, seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(256, 256, device=device, dtype=torch.bfloat16) for _ in range(4)]
    model = torch.nn.Sequential(*layers)
    mesh = init_device_mesh(device.type, (1,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh), torch.optim.AdamW(model.parameters(), lr=0.01)


def _steps(model: torch.nn.Module, optim: torch.optim.Optimizer, first: int, count: int) -> list[float]:
    losses = []
    for step in range(first, first + count):
        torch.manual_seed(step)
        loss = model(torch.randn(8, 256).to(next(model.parameters()).device, torch.bfloat16)).float().square().mean()
        loss.backward()
        optim.step()
        optim.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("copy_in_background", [False, True])
def test_fsdp2_resumes_from_a_background_save(copy_in_background: bool, device: torch.device, tmp_path: Path) -> None:
    model, optim = _sharded(device, 1)
    _steps(model, optim, 0, 3)
    state, url = {"model": model, "optim": optim}, tmp_path / "a"
    future = zarrckpt.async_save(state, url, copy_in_background=copy_in_background)
    future.copied()
    expected = _steps(model, optim, 3, 3)
    future.result(timeout=60)
    model, optim = _sharded(device, 2)
    zarrckpt.load({"model": model, "optim": optim}, url)
    assert _steps(model, optim, 3, 3) == expected
