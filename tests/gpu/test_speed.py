"""Seconds and GB/s of saves and loads of tensors on the accelerator, beside ``torch.save`` and DCP. Prints a table.

The state has GIGABYTES (default 4) of bfloat16. Files are in TMPDIR. Each figure is the median of three, after a first
run. The stall is the time until training may change the tensors.
"""

from __future__ import annotations

import functools
import os
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.torch_version import TorchVersion

import zarrckpt

GIGABYTES = float(os.environ.get("GIGABYTES", "4"))

Saved = tuple[Callable[[], object], Any]
"""A function that waits for the end of the stall, and the future of a save in the background, or None."""


def _no_stall() -> None:
    pass


def _ours(state: dict[str, Any], url: str, **options: Any) -> Saved:
    fast = zarrckpt.SaveOptions(durable=False)
    future = zarrckpt.async_save(state, url, options=fast, **options)
    return future.copied, future


def _dcp(state: dict[str, Any], url: str, make_stager: Callable[[], DefaultStager]) -> Saved:
    writer = dcp.FileSystemWriter(url, sync_files=False)
    response: Any = dcp.async_save(state, storage_writer=writer, async_stager=make_stager())
    if not hasattr(response, "staging_completion"):
        return _no_stall, response
    return response.staging_completion.result, response.upload_completion


def _savers(state: dict[str, Any]) -> dict[str, Callable[[str], Saved]]:
    """Return savers by name, with their functions that begin a save."""

    def alone(save: Callable[[str], object]) -> Callable[[str], Saved]:
        return lambda url: (save(url), (_no_stall, None))[1]

    def stagers(use_async_staging: bool) -> Callable[[], DefaultStager]:
        options = StagingOptions(
            use_async_staging=use_async_staging, use_shared_memory=False, use_non_blocking_copy=True
        )
        # async_save closes the stager and drops its buffers before torch 2.13.
        make = functools.partial(DefaultStager, options)
        return functools.cache(make) if TorchVersion(torch.__version__) >= (2, 13) else make

    pinned_stagers, async_stagers = stagers(False), stagers(True)
    fast = {"sync_files": False}
    return {
        "torch.save": alone(lambda url: (os.mkdir(url), torch.save(state, f"{url}/file"))),
        "zarrckpt.save": alone(lambda url: zarrckpt.save(state, url, options=zarrckpt.SaveOptions(durable=False))),
        "dcp.save": alone(lambda url: dcp.save(state, storage_writer=dcp.FileSystemWriter(url, **fast))),
        "zarrckpt.async_save": lambda url: _ours(state, url),
        "zarrckpt.async_save(copy_in_background=True)": lambda url: _ours(state, url, copy_in_background=True),
        "dcp.async_save, pinned memory": lambda url: _dcp(state, url, pinned_stagers),
        "dcp.async_save, async staging": lambda url: _dcp(state, url, async_stagers),
    }


def _training(device: torch.device) -> Callable[[], float]:
    """Return a step on the device, which returns its seconds."""
    side = 64 if device.type == "delayed" else 4096
    one, other = torch.randn(side, side).to(device), torch.randn(side, side).to(device)

    def step() -> float:
        began = time.perf_counter()
        for _ in range(8):
            torch.matmul(one, other)
        torch.accelerator.current_stream().synchronize()
        return time.perf_counter() - began

    return step


def _median(call: Callable[[int], tuple[float, ...]]) -> list[float]:
    call(0)
    return [statistics.median(values) for values in zip(*map(call, range(1, 4)), strict=True)]


@pytest.mark.usefixtures("group")
def test_speed(device: torch.device, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    count = 16
    elements = int(GIGABYTES * 1e9 / 2 / count)
    state = {f"w{i}": torch.randn(elements, device=device).bfloat16() for i in range(count)}
    nbytes = sum(tensor.nbytes for tensor in state.values())
    step = _training(device)
    step()
    alone = statistics.median(step() for _ in range(20))
    rows = [["save", "call, s", "stall, s", "whole, s", "GB/s", "training step beside it"]]
    for name, save in _savers(state).items():

        def one(turn: int, save: Callable[[str], Saved] = save) -> tuple[float, ...]:
            url = f"{tmp_path}/{turn}"
            torch.accelerator.synchronize()
            began = time.perf_counter()
            copied, future = save(url)
            called = time.perf_counter()
            copied()
            stalled = time.perf_counter()
            steps = [step()] if future is not None else [alone]
            while future is not None and not future.done():
                steps.append(step())
            if future is not None:
                future.result()
            ended = time.perf_counter() if future is not None else stalled
            shutil.rmtree(url)
            return called - began, stalled - began, ended - began, statistics.mean(steps) / alone

        call, stall, whole, slower = _median(one)
        rows.append([name, *(f"{value:.3f}" for value in (call, stall, whole)), f"{nbytes / whole / 1e9:.2f}"])
        rows[-1].append(f"{slower:.2f} x" if "async" in name else "")
    rows += [["load", "", "", "whole, s", "GB/s", ""]]
    url, targets = f"{tmp_path}/load", {name: torch.empty_like(tensor) for name, tensor in state.items()}
    os.mkdir(url)
    torch.save(state, f"{url}/file")
    zarrckpt.save(state, f"{url}/ours")
    dcp.save(state, checkpoint_id=f"{url}/dcp")

    def torch_load() -> None:
        for name, tensor in torch.load(f"{url}/file", map_location="cpu", weights_only=True).items():
            targets[name].copy_(tensor)

    loads: dict[str, Callable[[], object]] = {
        "torch.load, then copies to the device": torch_load,
        "zarrckpt.load": lambda: zarrckpt.load(targets, f"{url}/ours"),
        "dcp.load": lambda: dcp.load(targets, checkpoint_id=f"{url}/dcp"),
    }
    for name, load in loads.items():

        def timed(turn: int, load: Callable[[], object] = load) -> tuple[float]:
            began = time.perf_counter()
            load()
            torch.accelerator.synchronize()
            return (time.perf_counter() - began,)

        (whole,) = _median(timed)
        rows.append([name, "", "", f"{whole:.3f}", f"{nbytes / whole / 1e9:.2f}", ""])
    assert all(torch.equal(targets[name].cpu(), tensor.cpu()) for name, tensor in state.items())
    module = torch.get_device_module(device)
    card = module.get_device_name(device) if hasattr(module, "get_device_name") else device.type
    with capsys.disabled():
        print(f"\n{card}, torch {torch.__version__}, {nbytes / 1e9:.1f} GB of bfloat16, files in {tmp_path.parent}\n")
        for row in rows:
            print("| " + " | ".join(row) + " |")
