"""Saves and loads of tensors on an accelerator, a device made for these tests (``harness/delayed_device.py``)."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from harness import delayed_device, device_checks
from harness.memory_peaks import peak_of
from harness.ranks import run_ranks, stop_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import zarrckpt
from zarrckpt._jobs import BytesBudget
from zarrckpt.integrations._values import random_state, set_random_state

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")

Run = Callable[..., Any]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Call a function with a folder and other arguments in a process with the device. Return its result."""
    library = delayed_device.build()
    stop_ranks()

    def call(function: Callable[..., Any], *args: Any) -> Any:
        arguments = (library, function, str(tmp_path_factory.mktemp("run")), *args)
        return run_ranks(_with_device, *arguments, world_size=1, group=False, timeout=60)[0]

    yield call
    stop_ranks()  # No other test may run in a process with the device.


def _with_device(library: str, function: Callable[..., Any], *args: Any) -> Any:
    delayed_device.register(library)
    torch.ops.delayed.limit_pinned(1 << 40)
    return function(*args)


def _on_device(folder: str, check: Callable[[torch.device, str], object]) -> None:
    check(torch.device("delayed", 1), folder)


def _release_later() -> None:
    threading.Timer(0.3, torch.ops.delayed.release).start()


def _loaded(url: str, name: str = "w") -> torch.Tensor:
    return torch.from_numpy(zarrckpt.open(url)[name][...])


# -- streams


def _overwrites_during_copy(folder: str) -> None:
    w, on_cpu = torch.arange(1e6).to("delayed"), torch.arange(5.0)
    for turn in range(3):  # The later turns use the buffers of the first.
        w.fill_(turn)
        torch.ops.delayed.hold()
        future = zarrckpt.async_save({"w": w, "on_cpu": on_cpu}, f"{folder}/{turn}", copy_in_background=True)
        with pytest.raises(TimeoutError, match="was not copied"):
            future.copied(timeout=0.05)
        torch.ops.delayed.release()
        future.copied()
        torch.ops.delayed.hold()
        w.fill_(-1)
        future.result(timeout=30)
        torch.ops.delayed.release()
        assert bool((_loaded(f"{folder}/{turn}") == turn).all())


def test_async_save_returns_before_the_device_copies(run: Run) -> None:
    run(_overwrites_during_copy)


def _produced_on_stream(folder: str, device: str, save: str) -> None:
    # Several tensors, so that the threads of a save copy some of them.
    new = [torch.arange(1e6) + i for i in range(8)]
    state, produced = [torch.zeros(1_000_000, device=device) for _ in new], [tensor.to(device) for tensor in new]
    other, url = torch.ones(1000, device="delayed:1"), f"{folder}/a"
    with torch.Stream(device):
        torch.ops.delayed.hold()
        for tensor, values in zip(state, produced, strict=True):
            tensor.copy_(values, non_blocking=True)
        _release_later()
        if save == "save":
            zarrckpt.save({"w": state, "other": other}, url)
        else:
            in_background = save == "background"
            future = zarrckpt.async_save({"w": state, "other": other}, url, copy_in_background=in_background)
            future.copied()
        for tensor in state:
            tensor.zero_()
    other.zero_()
    if save != "save":
        future.result(timeout=30)
    assert all(torch.equal(_loaded(url, f"w.{i}"), tensor) for i, tensor in enumerate(new))
    assert torch.equal(_loaded(url, "other"), torch.ones(1000))


@pytest.mark.parametrize("save", ["save", "async", "background"])
@pytest.mark.parametrize("device", ["delayed:0", "delayed:1"])
def test_copies_wait_for_the_stream_with_the_new_values(device: str, save: str, run: Run) -> None:
    run(_produced_on_stream, device, save)


def _load_after_queued_work(folder: str) -> None:
    saved = [torch.arange(1e6) + i for i in range(8)]
    zarrckpt.save({"w": saved}, f"{folder}/a")
    targets = [torch.zeros(1_000_000, device="delayed") for _ in saved]
    with torch.Stream("delayed"):
        torch.ops.delayed.hold()
        for target in targets:
            target.fill_(-1)
        _release_later()
        zarrckpt.load({"w": targets}, f"{folder}/a")
    torch.accelerator.synchronize()
    assert all(torch.equal(target.cpu(), tensor) for target, tensor in zip(targets, saved, strict=True))


def test_a_load_comes_after_work_that_is_queued(run: Run) -> None:
    run(_load_after_queued_work)


# -- values


def test_all_dtypes_and_strides_round_trip(run: Run) -> None:
    run(_on_device, device_checks.round_trip)


def test_models_on_two_kinds_of_devices_resume(run: Run) -> None:
    run(_on_device, device_checks.resume_on_two_devices)


def test_async_saves_beside_training_save_the_old_numbers(run: Run) -> None:
    run(_on_device, device_checks.train_beside_saves)


def _dtensors(folder: str) -> None:
    import torch.testing._internal.distributed.fake_pg  # registers the backend

    dist.init_process_group("delayed:fake", init_method=f"file://{folder}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("delayed", (1,))
        whole = torch.arange(6000.0).reshape(60, 100)
        state = {"w": distribute_tensor(whole.to("delayed"), mesh, [Shard(1)])}
        torch.ops.delayed.hold()
        _release_later()
        future = zarrckpt.async_save(state, f"{folder}/a")
        state["w"].to_local().zero_()
        future.result(timeout=30)
        target = {"w": DTensor.from_local(torch.zeros(60, 100, device="delayed"), mesh, [Shard(0)])}
        zarrckpt.load(target, f"{folder}/a")
        assert torch.equal(target["w"].to_local().cpu(), whole)
    finally:
        dist.destroy_process_group()


def test_dtensors_on_the_device_are_saved_and_loaded(run: Run) -> None:
    run(_dtensors)


# -- memory


def _bounded_memory(folder: str) -> tuple[int, int]:
    state, url = {f"w{i}": torch.randn(1 << 22) for i in range(8)}, f"{folder}/a"  # 128 MiB
    zarrckpt.save(state, url)
    targets = {name: torch.full_like(tensor, 7, device="delayed") for name, tensor in state.items()}
    torch.accelerator.synchronize()
    options = zarrckpt.LoadOptions(max_inflight_bytes=16 << 20, check_after="off")
    before = torch.ops.delayed.most_pinned()
    peak = peak_of(lambda: zarrckpt.load(targets, url, options=options))
    assert all(torch.equal(targets[name].cpu(), tensor) for name, tensor in state.items())
    return peak, torch.ops.delayed.most_pinned() - before


def test_a_load_to_the_device_is_bounded_in_host_memory(run: Run) -> None:
    peak, pinned = run(_bounded_memory)
    assert 0 < pinned <= 16 << 20 and peak < 48 << 20


def test_pinned_memory_counts_with_the_size_that_torch_allocates() -> None:
    sizes: list[int] = []
    budget = BytesBudget(40 << 20, lambda nbytes: sizes.append(nbytes) or np.empty(nbytes, np.uint8))
    with budget.take((8 << 20) + 32), budget.take(5000), budget.take(4096):
        assert sizes == [16 << 20, 8192, 4096]  # powers of two


class _Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def _without_pinned(folder: str) -> list[str]:
    messages = _Messages()
    logging.getLogger("zarrckpt").addHandler(messages)
    for limit in (20_000, 0):
        torch.ops.delayed.limit_pinned(limit)
        device_checks.round_trip(torch.device("delayed"), f"{folder}/{limit}")
    return messages.texts


def test_without_pinned_memory_pageable_memory_is_used(run: Run) -> None:
    messages = run(_without_pinned)
    assert len(messages) == 1 and "out of pinned memory" in messages[0]


# -- random numbers


class _Draws:
    calls = 0

    def state_dict(self) -> dict[str, Any]:
        self.calls += 1
        torch.get_device_module("delayed").manual_seed_all(self.calls)
        return {"x": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def _random_state(folder: str) -> None:
    device, draws = torch.device("delayed"), _Draws()
    module = torch.get_device_module(device)
    zarrckpt.save({"draws": _Draws()}, f"{folder}/a")
    module.manual_seed_all(9)
    saved = random_state(device)
    zarrckpt.load({"draws": draws}, f"{folder}/a")
    # The second call checks the loaded state.
    assert draws.calls == 2 and {*module.get_rng_state().tolist()} == {1}
    set_random_state(device, saved)
    assert {*module.get_rng_state().tolist()} == {9} and len(saved["device"]) == 2


def test_random_states_of_the_device_are_kept_and_restored(run: Run) -> None:
    run(_random_state)
