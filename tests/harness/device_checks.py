"""Checks of saves and loads that run on any accelerator. Each gets a device and a folder."""

from __future__ import annotations

import torch

import zarrckpt
from harness.bits import bits
from harness.internals import DTYPES
from harness.random_tensors import random_tensor


def round_trip(device: torch.device, folder: str) -> None:
    """Save tensors of all dtypes, with many strides, and load them to the same devices. All bits are equal."""
    on_cpu = {name: random_tensor(name, (7, 5, 3)) for name in DTYPES}
    big = torch.randn(64, 32, 3)
    views = {"transposed": big.permute(2, 0, 1), "strided": big[::2, :, 1:], "permuted": big[::3].transpose(0, 1)}
    on_cpu |= {"scalar": torch.tensor(1.5), "empty": torch.empty(0, 4)}
    state = {name: tensor.to(device) for name, tensor in on_cpu.items()} | {"on_cpu": torch.arange(9)}
    whole = big.to(device)
    state |= {name: whole.as_strided(v.shape, v.stride(), v.storage_offset()) for name, v in views.items()}
    state["tied"] = state["float32"]
    zarrckpt.save(state, f"{folder}/a")
    zarrckpt.async_save(state, f"{folder}/b").result(timeout=60)
    for url in (f"{folder}/a", f"{folder}/b"):
        targets = {name: torch.empty_like(tensor) for name, tensor in state.items()}
        zarrckpt.load(targets, url)
        for name, tensor in (on_cpu | views).items():
            assert targets[name].device == state[name].device and bits(targets[name].cpu()) == bits(tensor), name
        assert torch.equal(targets["on_cpu"], torch.arange(9))
        for name, tensor in zarrckpt.open(url).iter_tensors([*views], device=device):
            assert tensor.device.type == device.type and bits(tensor.cpu()) == bits(views[name]), name
            assert tensor.stride() == torch.empty_like(views[name]).stride(), name


def _trained(device: torch.device, seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(9, 5, device=device), torch.nn.Linear(5, 3))
    optim = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
    model[1](model[0](torch.randn(4, 9).to(device)).cpu()).sum().backward()
    optim.step()
    return model, optim


def resume_on_two_devices(device: torch.device, folder: str) -> None:
    """Save and load a model and its optimizer, with one layer on the device and one on the CPU."""
    model, optim = _trained(device, 1)
    zarrckpt.async_save({"model": model, "optim": optim}, f"{folder}/a").result(timeout=60)
    model2, optim2 = _trained(device, 2)
    zarrckpt.load({"model": model2, "optim": optim2}, f"{folder}/a")
    assert [parameter.device.type for parameter in model2.parameters()] == [device.type] * 2 + ["cpu"] * 2
    for one, other in zip(model.parameters(), model2.parameters(), strict=True):
        saved, found = optim.state[one], optim2.state[other]
        assert torch.equal(one.cpu(), other.cpu()) and found["exp_avg"].device == other.device
        assert all(torch.equal(saved[key].cpu(), found[key].cpu()) for key in ("step", "exp_avg", "exp_avg_sq"))


def train_beside_saves(device: torch.device, folder: str, *, elements: int = 1 << 18) -> None:
    """Change tensors on the device as soon as ``async_save`` permits it, on a stream of their own."""
    futures = []
    with torch.Stream(device):
        state = {f"w{i}": torch.zeros(elements, device=device) for i in range(8)}
        for turn in range(6):
            for number, tensor in enumerate(state.values()):
                tensor.fill_(8 * turn + number)
            future = zarrckpt.async_save(state, f"{folder}/{turn}", copy_in_background=turn % 2 == 1)
            future.copied()
            for tensor in state.values():
                tensor.fill_(-1)
            futures.append(future)
    for turn, future in enumerate(futures):
        future.result(timeout=60)
        saved = zarrckpt.open(f"{folder}/{turn}")
        assert all((saved[f"w{i}"][:] == 8 * turn + i).all() for i in range(8)), turn
