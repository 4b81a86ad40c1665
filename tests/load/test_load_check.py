"""After a load, the state is compared with the loaded one: objects with other contents are named."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from harness.ranks import run_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.optim import lr_scheduler

import zarrckpt


def _trained(model: nn.Module, lr: float | torch.Tensor = 0.1) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    return optimizer


class _Forgetful(nn.Linear):
    """Replaces its weight after each load_state_dict."""

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        with torch.no_grad():
            self.weight.fill_(0.125)


class _Restarting(torch.optim.AdamW):
    """Counts its steps from 1 after each load_state_dict."""

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        for slots in self.state.values():
            slots["step"] = torch.tensor(0.0)


class _FrozenDict(dict[str, Any]):
    """Accepts no other values."""

    def __setitem__(self, key: str, value: Any) -> None:
        pass


def _module() -> tuple[dict[str, Any], str]:
    return {"model": _Forgetful(8, 4)}, "model.weight"


def _optimizer() -> tuple[dict[str, Any], str]:
    model = nn.Linear(8, 4)
    _trained(model)
    optimizer = _Restarting(model.parameters())
    optimizer.load_state_dict(_trained(deepcopy(model)).state_dict())
    for slots in optimizer.state.values():
        slots["step"] = torch.tensor(7.0)
    return {"model": model, "optim": optimizer}, "optim.state.weight.step"


def _dict() -> tuple[dict[str, Any], str]:
    return {"counts": _FrozenDict(seen=3)}, "counts.seen"


@pytest.mark.parametrize("make", [_module, _optimizer, _dict])
def test_content_missing_from_objects_after_a_load_is_an_error(
    tmp_path: Path, make: Callable[[], tuple[dict[str, Any], str]]
) -> None:
    state, fqn = make()
    url = str(tmp_path / "ckpt")
    zarrckpt.save(state, url)
    if "counts" in state:
        state["counts"] = _FrozenDict(seen=0)
    with pytest.raises(zarrckpt.LoadMismatchError) as caught:
        zarrckpt.load(state, url)
    assert fqn in str(caught.value) and url in str(caught.value)
    with pytest.warns(UserWarning, match=fqn):
        assert fqn in zarrckpt.load(state, url, strict=False).changed
    assert not zarrckpt.load(state, url, options=zarrckpt.LoadOptions(check_after="off")).changed


class _Counter:
    """Counts from the next number after each load, and can lose entries."""

    def __init__(self, loses: bool = False) -> None:
        self.loses = loses
        self.count, self.weights = 0, torch.zeros(3)

    def state_dict(self) -> dict[str, Any]:
        if self.loses and self.count:
            return {"count": self.count}
        return {"count": self.count, "weights": self.weights}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count, self.weights = state_dict["count"] + 1, state_dict["weights"]


def test_changes_by_a_stateful_are_warned_of(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    manager = zarrckpt.CheckpointManager(url, background=False, signals=())
    manager.save(1, {"counter": _Counter(), "step": 1})
    assert manager.last_report is None
    with pytest.warns(UserWarning, match=r"counter\.count"):
        assert manager.restore({"counter": _Counter(), "step": 0}) == 1
    assert manager.last_report is not None and manager.last_report.changed == ("counter.count",)
    with pytest.raises(zarrckpt.LoadMismatchError, match=r"counter\.weights"):
        manager.restore({"counter": _Counter(loses=True), "step": 0})
    manager.close()


def test_a_full_check_finds_differences_that_a_sample_misses(tmp_path: Path) -> None:
    class Flips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1000, 100))

        def _load_from_state_dict(self, *args: Any) -> None:
            super()._load_from_state_dict(*args)
            with torch.no_grad():
                self.weight[1, 1] = 3

    state, url = {"model": Flips()}, str(tmp_path / "ckpt")
    zarrckpt.save(state, url)
    assert not zarrckpt.load(state, url).changed
    with pytest.raises(zarrckpt.LoadMismatchError):
        zarrckpt.load(state, url, options=zarrckpt.LoadOptions(check_after="full"))
    with pytest.raises(ValueError, match="check_after"):
        zarrckpt.LoadOptions(check_after="some")  # type: ignore[arg-type]


class _Random:
    """The random number generators of a process."""

    def state_dict(self) -> dict[str, Any]:
        return {"torch": torch.get_rng_state(), "numpy": np.random.get_state(), "python": random.getstate()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        torch.set_rng_state(state_dict["torch"])
        np.random.set_state(state_dict["numpy"])
        random.setstate(state_dict["python"])


class _Drawing:
    """Draws random numbers in each call of state_dict."""

    def state_dict(self) -> dict[str, Any]:
        torch.rand(1), np.random.rand(), random.random()
        return {"n": 1}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.out.weight = self.into.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.into(x))  # type: ignore[no-any-return]


def _whole_training(seed: int, dtype: torch.dtype, group_order: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(_Tied(), nn.BatchNorm1d(8), nn.Linear(8, 4)).to(dtype)
    head = {"params": [*model[2].parameters()], "lr": 0.5}
    rest = {"params": [*model[0].parameters(), *model[1].parameters()], "weight_decay": 0.0}
    optimizer = torch.optim.AdamW([rest, head][::group_order], lr=0.1)
    scheduler = lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.LinearLR(optimizer), lr_scheduler.LambdaLR(optimizer, lambda n: 0.9**n)], [2]
    )
    for _ in range(seed):
        optimizer.zero_grad()
        model(torch.rand(4, 8, dtype=dtype)).sum().backward()
        optimizer.step()
        scheduler.step()
    view = torch.zeros(6, 4).t()[1:3]
    return {
        "a": _Drawing(),
        "ema": torch.optim.swa_utils.AveragedModel(model),
        "list": [{"nan": float("nan")}, torch.full((2,), float(seed)), (1, 2)],
        "model": model,
        "optim": optimizer,
        "plateau": lr_scheduler.ReduceLROnPlateau(optimizer),
        "rng": zarrckpt.PerRank(_Random()),
        "scaler": torch.amp.GradScaler("cpu"),
        "scheduler": scheduler,
        "view": view.fill_(seed),
    }


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("cast", [False, True])
def test_the_comparison_raises_no_false_alarm(tmp_path: Path, full: bool, cast: bool) -> None:
    url = str(tmp_path / "ckpt")
    saved = _whole_training(3, torch.float32, 1)
    zarrckpt.save(saved, url)
    expected = torch.rand(3), np.random.rand(), random.random()
    target = _whole_training(5, torch.bfloat16 if cast else torch.float32, 1 if cast else -1)
    options = zarrckpt.LoadOptions(check_after="full" if full else "sample")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = zarrckpt.load(target, url, allow_cast=cast, options=options)
    assert not report.changed and not report.missing
    assert torch.equal(torch.rand(3), expected[0]), "the comparison draws no random numbers"
    assert (np.random.rand(), random.random()) == expected[1:]


def test_the_check_does_not_start_a_data_loaders_epoch(tmp_path: Path) -> None:
    class Loader(torch.utils.data.DataLoader[int]):
        begun = 0

        def state_dict(self) -> dict[str, Any]:
            self.begun += 1
            return {"n": 1}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.begun = 0

    class Holder:
        def __init__(self) -> None:
            self.loader = Loader([1, 2])  # type: ignore[arg-type]
            self.state_dict, self.load_state_dict = self.loader.state_dict, self.loader.load_state_dict

    state = {"plain": Loader([1, 2]), "held": Holder()}  # type: ignore[arg-type]
    zarrckpt.save(state, str(tmp_path / "ckpt"))
    zarrckpt.load(state, str(tmp_path / "ckpt"))
    assert state["plain"].begun == state["held"].loader.begun == 0  # type: ignore[attr-defined]


def test_a_dict_that_the_caller_drops_is_warned_of(tmp_path: Path) -> None:
    model = nn.Linear(8, 4)
    optimizer = _trained(model)
    url = str(tmp_path / "run")
    manager = zarrckpt.CheckpointManager(url, background=False, signals=())
    manager.save(1, {"model": model.state_dict(), "optim": optimizer.state_dict()})
    fresh = torch.optim.AdamW(model.parameters())
    step = f"{url}/step-00000001"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        held = {"model": model.state_dict(), "optim": fresh.state_dict()}
        manager.restore(held)
        held = {"model": model.state_dict(), "optim": fresh.state_dict()}
        zarrckpt.load(held, step)
        own = fresh.state_dict()
        zarrckpt.load({"model": model.state_dict(), "optim": own}, step)
        zarrckpt.load({"model": model.state_dict()}, step)
    for wrong in (
        lambda: zarrckpt.load({"model": model.state_dict(), "optim": fresh.state_dict()}, step),
        lambda: manager.restore({"model": model.state_dict(), "optim": fresh.state_dict()}),
    ):
        with pytest.warns(UserWarning, match=r"'optim' is a dict .*optim\.state\.0"):
            wrong()
    manager.close()


def _clear(tensor: torch.Tensor) -> None:
    tensor.data.zero_()


def _a_shard_of_one_rank_is_lost(url: str) -> str:
    model = nn.Linear(8, 6)
    fully_shard(model)
    optimizer = _trained(model)
    zarrckpt.save({"model": model, "optim": optimizer}, url)
    assert not zarrckpt.load({"model": model, "optim": optimizer}, url).changed
    if dist.get_rank() == 1:
        local = model.weight.to_local()  # type: ignore[operator]
        model.register_load_state_dict_post_hook(lambda module, keys: _clear(local))
    try:
        zarrckpt.load({"model": model, "optim": optimizer}, url)
    except zarrckpt.LoadMismatchError as err:
        return str(err)
    return ""


def test_one_rank_that_lost_its_shard_fails_all(tmp_path: Path) -> None:
    errors = run_ranks(_a_shard_of_one_rank_is_lost, str(tmp_path / "ckpt"), world_size=2)
    assert all("model.weight" in error for error in errors)
