"""Targets that share memory, and targets without plain memory: each is filled right or refused by name."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.utils._pytree as pytree
from harness.ranks import run_ranks
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor, all_reduce
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.masked import masked_tensor
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

import zarrckpt

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*prototype stage:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*quantize:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*lr_scheduler.step:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*epoch parameter:UserWarning"),
]

Load = Callable[[dict[str, Any], str], object]


def _dcp_load(state: dict[str, Any], url: str) -> None:
    dcp.load(state, storage_reader=zarrckpt.ZarrStorageReader(url, allow_cast=True))


def _dcp_load_planned(state: dict[str, Any], url: str) -> None:
    planner = zarrckpt.ZarrLoadPlanner(allow_cast=True)
    dcp.load(state, storage_reader=zarrckpt.ZarrStorageReader(url), planner=planner)


def _load(state: dict[str, Any], url: str) -> None:
    zarrckpt.load(state, url, allow_cast=True)


LOADS: list[Load] = [_load, _dcp_load, _dcp_load_planned]


def _refusal(load: Load, state: dict[str, Any], url: str) -> str:
    """Return the text of the error with which a load refuses its targets."""
    with pytest.raises((zarrckpt.KeyMismatchError, CheckpointException)) as caught:
        load(state, url)
    error = caught.value
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    assert isinstance(error, zarrckpt.KeyMismatchError)
    return str(error)


# -- targets that share memory


@pytest.mark.parametrize("load", LOADS)
def test_one_tensor_for_two_entries_needs_equal_contents(load: Load, tmp_path: Path) -> None:
    url, size = str(tmp_path / "run"), 90_000
    one, two = torch.full((size,), 1.0), torch.full((size,), 2.0)
    zarrckpt.save({"model": {"w": one}, "tied": {"w": one.clone()}, "ema": {"w": two}}, url)
    for _ in range(6):
        w = torch.zeros(size)
        load({"model": {"w": w}, "tied": {"w": w}}, url)
        assert torch.equal(w, one)
        w = torch.zeros(size)
        message = _refusal(load, {"model": {"w": w}, "ema": {"w": w}}, url)
        assert "'ema.w' and 'model.w'" in message
        assert not w.any()


class _Tied(nn.Module):
    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        if tied:
            self.b.weight = self.a.weight


def test_a_tied_module_loads_only_tied_weights(tmp_path: Path) -> None:
    urls = {tied: str(tmp_path / str(tied)) for tied in (True, False)}
    saved = {tied: _Tied(tied) for tied in urls}
    for tied, url in urls.items():
        zarrckpt.save({"model": saved[tied], "optim": torch.optim.AdamW(saved[tied].parameters())}, url)
    model = _Tied()
    zarrckpt.load({"model": model}, urls[True])
    assert model.a.weight is model.b.weight
    assert torch.equal(model.a.weight, saved[True].a.weight)
    assert "'model.a.weight' and 'model.b.weight'" in _refusal(_load, {"model": model}, urls[False])
    assert torch.equal(model.a.weight, saved[True].a.weight)
    zarrckpt.load({"model": model}, urls[False], keys="model.b.*")
    assert torch.equal(model.a.weight, saved[False].b.weight)


def _random_view(base: torch.Tensor, rng: random.Random) -> torch.Tensor:
    view = base.view(rng.choice([(60,), (4, 15), (3, 5, 4), (2, 30)]))
    for dim, n in enumerate(view.shape):
        begin = rng.randrange(n)
        view = view.narrow(dim, begin, rng.randint(begin + 1, n) - begin) if rng.random() < 0.8 else view
    view = view[..., ::2] if rng.random() < 0.3 else view
    return view.mT if view.ndim > 1 and rng.random() < 0.3 else view


def test_views_of_one_buffer_are_filled(tmp_path: Path) -> None:
    rng = random.Random(7)
    filled = refused = 0
    for number in range(40):
        source, place = torch.arange(60.0), torch.arange(60)
        seeds = [rng.random() for _ in range(rng.randint(2, 4))]
        views = {f"v{n}": _random_view(source, random.Random(seed)) for n, seed in enumerate(seeds)}
        places = [{*_random_view(place, random.Random(seed)).flatten().tolist()} for seed in seeds]
        shared = any(a & b for n, a in enumerate(places) for b in places[:n])
        dtype = rng.choice([torch.float32, torch.float64])
        for kind in ("equal", "other"):
            url = str(tmp_path / f"{number}{kind}")
            own = {k: v + 100.0 * n if kind == "other" else v for n, (k, v) in enumerate(views.items())}
            zarrckpt.save(own, url)
            base = torch.zeros(60, dtype=dtype)
            targets = {f"v{n}": _random_view(base, random.Random(seed)) for n, seed in enumerate(seeds)}
            if kind == "other" and shared:
                assert "share memory" in _refusal(_load, targets, url)
                assert not base.any()
                refused += 1
                continue
            _load(targets, url)
            assert all(torch.equal(targets[key].float(), value) for key, value in own.items())
            filled += 1
    assert filled > 40
    assert refused > 12


def test_interleaved_views_are_filled_in_place(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    heads, columns = torch.rand(3, 16, 4, 5), torch.rand(7, 900)
    state = {"heads": [*heads], "columns": [*columns.T], "even": columns[:, ::2], "odd": columns[:, 1]}
    zarrckpt.save(state, url)
    fused, matrix, other = torch.zeros(16, 3, 4, 5), torch.zeros(7, 900), torch.zeros(7, 900)
    targets = {"heads": [*fused.unbind(1)], "columns": [*matrix.T], "even": other[:, ::2], "odd": other[:, 1]}
    # Too little memory to compare their contents.
    zarrckpt.load(targets, url, options=zarrckpt.LoadOptions(max_inflight_bytes=2048))
    assert torch.equal(fused, heads.transpose(0, 1))
    assert torch.equal(matrix, columns)
    assert torch.equal(other[:, ::2], columns[:, ::2])
    assert torch.equal(other[:, 1], columns[:, 1])


class _Average:
    """A Stateful whose state holds one list twice, and a tensor of another object."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.now = self.before = [tensor, {"decay": 0.9}]

    def state_dict(self) -> dict[str, Any]:
        return {"now": self.now, "before": self.before}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.now, self.before = state_dict["now"], state_dict["before"]


def test_a_stateful_gets_its_own_content(tmp_path: Path) -> None:
    url, w = str(tmp_path / "run"), torch.zeros(900)
    saved, average = _Average(torch.full((900,), 2.0)), _Average(w)
    saved.before = [torch.full((900,), 3.0), {"decay": 0.9}]
    zarrckpt.save({"w": torch.full((900,), 1.0), "average": saved}, url)
    shared = average.now
    report = zarrckpt.load({"w": w, "average": average}, url)
    assert [float(tensor.unique()) for tensor in (w, average.now[0], average.before[0])] == [1.0, 2.0, 3.0]
    assert shared[0] is w
    assert not report.changed


def test_groups_that_share_a_learning_rate_tensor_get_their_own(tmp_path: Path) -> None:
    url = str(tmp_path / "run")

    def optimizer(*rates: torch.Tensor) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": [nn.Parameter(torch.ones(2))], "lr": rate} for rate in rates])

    zarrckpt.save({"optim": optimizer(torch.tensor(0.1), torch.tensor(0.2))}, url)
    rate = torch.tensor(0.5)
    fresh = optimizer(rate, rate)
    zarrckpt.load({"optim": fresh}, url)
    assert [round(float(group["lr"]), 3) for group in fresh.param_groups] == [0.1, 0.2]


def test_a_sequential_scheduler_with_tensor_rates_resumes(tmp_path: Path) -> None:
    def new() -> dict[str, Any]:
        groups = [{"params": [nn.Parameter(torch.ones(2))], "lr": torch.tensor(rate)} for rate in (0.1, 0.2)]
        optim = torch.optim.SGD(groups)
        parts = [LinearLR(optim, 0.1, total_iters=3), CosineAnnealingLR(optim, 8)]
        return {"optim": optim, "scheduler": SequentialLR(optim, parts, [3])}

    def rates(state: dict[str, Any]) -> list[float]:
        parts = [state["scheduler"], *state["scheduler"]._schedulers]
        last = [rate for part in parts for rate in part._last_lr]
        return [float(rate) for rate in [*last, *(group["lr"] for group in state["optim"].param_groups)]]

    state = new()
    for step in range(1, 7):
        state["optim"].step()
        state["scheduler"].step()
        zarrckpt.save(state, str(tmp_path / str(step)))
        for _ in range(5):
            fresh = new()
            zarrckpt.load(fresh, str(tmp_path / str(step)))
            assert rates(fresh) == rates(state)


class _Holder:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def state_dict(self) -> dict[str, Any]:
        return {"tensor": self.tensor}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.tensor = state_dict["tensor"]


def _shared_on_ranks(url: str, placement: Placement) -> None:
    mesh = init_device_mesh("cpu", (2,))
    numbers = torch.arange(40_000.0).reshape(200, 200)

    def sharded(tensor: torch.Tensor) -> DTensor:
        return distribute_tensor(tensor, mesh, [placement])

    zarrckpt.save({"a": sharded(numbers), "b": numbers, "c": sharded(-numbers), "d": {"tensor": -numbers}}, url)
    for share_reads in (True, False):
        options = zarrckpt.LoadOptions(share_reads=share_reads)
        for load in (
            lambda state, options=options: zarrckpt.load(state, url, options=options),
            lambda state, options=options: dcp.load(
                state, storage_reader=zarrckpt.ZarrStorageReader(url, options=options)
            ),
        ):
            target = sharded(torch.zeros(200, 200))
            load({"a": target, "b": target})
            assert torch.equal(target.full_tensor(), numbers)
        target, other = sharded(torch.zeros(200, 200)), sharded(torch.zeros(200, 200))
        # One rank's targets share memory.
        state = {"a": target, "c": target if dist.get_rank() else other}
        with pytest.raises(zarrckpt.KeyMismatchError, match="'a' and 'c'"):
            zarrckpt.load(state, url, options=options)
        assert not target.full_tensor().any()
        holder = _Holder(target)
        zarrckpt.load({"a": target, "d": holder}, url, options=options)
        assert torch.equal(target.full_tensor(), numbers)
        assert torch.equal(holder.tensor.full_tensor(), -numbers)  # type: ignore[attr-defined]
    _wrapped_on_ranks(url)


def _wrapped_on_ranks(url: str) -> None:
    """Load into local tensors that wrap others, and into results of collectives that were not waited for."""
    mesh = init_device_mesh("cpu", (2,))
    zarrckpt.save({"w": torch.full((4, 2), 9.0)}, f"{url}w")
    for load in LOADS:
        wrapper = _codes(2)
        target = DTensor.from_local(wrapper, mesh, [Shard(0)], run_check=False)
        assert "'w' is a _Codes" in _refusal(load, {"w": target}, f"{url}w")
        assert torch.equal(wrapper.codes, _codes(2).codes)
        for cut in (lambda tensor: tensor, lambda tensor: DTensor.from_local(tensor, mesh, run_check=False)):
            pending = all_reduce(torch.zeros(4, 2), "sum", mesh)
            assert isinstance(pending, AsyncCollectiveTensor)
            load({"w": cut(pending)}, f"{url}w")
            assert torch.equal(pending.wait(), torch.full((4, 2), 9.0))
    pending = all_reduce(torch.full((4, 2), 4.5), "sum", mesh)
    zarrckpt.save({"w": pending}, f"{url}p")
    zarrckpt.async_save({"w": pending}, f"{url}q").result()
    for saved in (f"{url}p", f"{url}q"):
        assert zarrckpt.open(saved)["w"][...].tolist() == [[9.0, 9.0]] * 4
    with pytest.raises(zarrckpt.UnsupportedValueError, match="'w' is a _Codes"):
        zarrckpt.save({"w": DTensor.from_local(_codes(2), mesh, [Shard(0)], run_check=False)}, f"{url}r")


@pytest.mark.parametrize("placement", [Shard(0), Replicate()])
def test_sharded_targets_in_one_memory_and_of_wrappers(placement: Placement, tmp_path: Path) -> None:
    run_ranks(_shared_on_ranks, str(tmp_path / "run"), placement, world_size=2)


def test_a_staged_copy_keeps_views_separate(tmp_path: Path) -> None:
    base = torch.rand(600_000)
    state = {"a": base, "b": base, "c": base[1:], "d": base.view(600, 1000).T, "e": base.view(600, 1000)[:, 1::2]}
    zarrckpt.async_save(state, str(tmp_path / "run")).result()
    saved = zarrckpt.open(str(tmp_path / "run"))
    assert all(torch.equal(torch.as_tensor(saved[key][...]), value) for key, value in state.items())


# -- targets without plain memory


class _Codes(torch.Tensor):
    """Whole numbers with a scale. Operations without an implementation use a temporary tensor of its values."""

    codes: torch.Tensor

    @staticmethod
    def __new__(cls, codes: torch.Tensor) -> _Codes:
        self: _Codes = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)
        self.codes = codes
        return self

    def dequantize(self) -> torch.Tensor:
        return self.codes.float() * 0.5

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.view.default):
            return cls(func(args[0].codes, *args[1:]))
        args, kwargs = pytree.tree_map_only(cls, cls.dequantize, (args, kwargs or {}))
        return func(*args, **kwargs)


def _codes(rows: int) -> _Codes:
    return _Codes(torch.full((rows, 2), 3, dtype=torch.int8))


class _Flattened(_Codes):
    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes"], None


class WeightWithDynamicFloat8CastTensor(torch.Tensor):
    """Like torchao's class of this name: a weight in full precision that FSDP2 casts before it gathers it."""

    _tensor: torch.Tensor
    __module__ = "torchao.float8.fsdp_utils"

    @staticmethod
    def __new__(cls, tensor: torch.Tensor) -> WeightWithDynamicFloat8CastTensor:
        self: WeightWithDynamicFloat8CastTensor = torch.Tensor._make_wrapper_subclass(
            cls, tensor.shape, strides=tensor.stride(), dtype=tensor.dtype
        )
        self._tensor = tensor
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map_only(cls, lambda one: one._tensor, (args, kwargs or {}))
        out = func(*args, **kwargs)
        keeps = (torch.ops.aten.detach.default, torch.ops.aten.empty_like.default, torch.ops.aten.copy_.default)
        return cls(out) if func in keeps else out


def _fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.zeros(4, 2)


REFUSED: dict[str, Callable[[], torch.Tensor]] = {
    "a _Codes": lambda: _codes(4),
    "a _Flattened": lambda: _Flattened(torch.full((4, 2), 3, dtype=torch.int8)),
    "a MaskedTensor": lambda: masked_tensor(torch.zeros(4, 2), torch.ones(4, 2, dtype=torch.bool)),
    "a FakeTensor": _fake,
    "a nested tensor": lambda: torch.nested.nested_tensor([torch.zeros(2)] * 4, layout=torch.jagged),
    "layout torch.sparse_coo": lambda: torch.zeros(4, 2).to_sparse(),
    "a quantized tensor": lambda: torch.quantize_per_tensor(torch.zeros(4, 2), 0.1, 0, torch.quint8),
    "a parameter of a lazy module": lambda: nn.UninitializedParameter(),
    "on the meta device": lambda: torch.zeros(4, 2, device="meta"),
}


@pytest.mark.parametrize("words", REFUSED)
def test_tensors_without_plain_memory_are_refused(words: str, tmp_path: Path) -> None:
    zarrckpt.save({"w": torch.full((4, 2), 9.0)}, str(tmp_path / "plain"))
    for load in LOADS[::2]:
        target = REFUSED[words]()
        message = _refusal(load, {"w": target}, str(tmp_path / "plain"))
        assert "'w' " in message
        assert words in message
        if isinstance(target, _Codes):
            assert torch.equal(target.dequantize(), torch.full((4, 2), 1.5))
    for save in (zarrckpt.save, lambda state, url: zarrckpt.async_save(state, url).result()):
        with pytest.raises(zarrckpt.UnsupportedValueError, match=words):
            save({"w": REFUSED[words]()}, str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_dcps_planner_refuses_wrappers_too(tmp_path: Path) -> None:
    zarrckpt.save({"w": torch.full((4, 2), 9.0)}, str(tmp_path / "plain"))
    target = _codes(4)
    assert "'w' is a _Codes" in _refusal(_dcp_load, {"w": target}, str(tmp_path / "plain"))
    assert torch.equal(target.codes, _codes(4).codes)
    with pytest.raises(CheckpointException) as caught:
        dcp.save({"w": target}, storage_writer=zarrckpt.ZarrStorageWriter(str(tmp_path / "run")))
    assert "'w' is a _Codes" in str(caught.value.failures[0][0])


def test_a_module_of_wrappers_is_refused(tmp_path: Path) -> None:
    zarrckpt.save({"model": nn.Linear(2, 4)}, str(tmp_path / "plain"))
    model = nn.Linear(2, 4)
    model.weight = nn.Parameter(_codes(4), requires_grad=False)
    bias = model.bias.clone()
    assert "'model.weight' is a _Codes" in _refusal(_load, {"model": model}, str(tmp_path / "plain"))
    assert torch.equal(model.bias, bias)


def test_weights_that_are_cast_to_float8_are_plain(tmp_path: Path) -> None:
    def new(value: float) -> dict[str, Any]:
        model = nn.Linear(2, 4, bias=False)
        model.weight = nn.Parameter(WeightWithDynamicFloat8CastTensor(torch.full((4, 2), value)))
        return {"model": model, "optim": torch.optim.AdamW(model.parameters())}

    state = new(9.0)
    state["model"].weight.grad = torch.ones(4, 2)
    state["optim"].step()
    zarrckpt.save(state, str(tmp_path / "0"))
    zarrckpt.async_save(state, str(tmp_path / "1")).result()
    weights = {"model": state["model"].state_dict()}
    dcp.save(weights, storage_writer=zarrckpt.ZarrStorageWriter(str(tmp_path / "2")))
    expected = state["model"].weight._tensor
    for name in ("0", "1"):
        fresh = new(0.0)
        zarrckpt.load(fresh, str(tmp_path / name))
        assert torch.equal(fresh["model"].weight._tensor, expected)
        (slots,) = fresh["optim"].state.values()
        assert type(slots["exp_avg"]) is torch.Tensor
        assert torch.equal(slots["exp_avg"], torch.full((4, 2), 0.1))
    for load in LOADS:
        fresh = new(0.0)
        load({"model": fresh["model"].state_dict()}, str(tmp_path / "2"))
        assert torch.equal(fresh["model"].weight._tensor, expected)


class _Guarded(torch.Tensor):
    """A subclass in plain memory whose views are made with its own method."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.detach, torch.Tensor.view, torch.Tensor.__getitem__, torch.Tensor.numpy):
            return torch.zeros(args[0].shape)
        return super().__torch_function__(func, types, args, kwargs or {})


def _inference(dtype: torch.dtype) -> torch.Tensor:
    with torch.inference_mode():
        return torch.zeros(4, 2, dtype=dtype)


FILLED: dict[str, Callable[[], torch.Tensor]] = {
    "function": lambda: torch.zeros(4, 2).as_subclass(_Guarded),
    "inference": lambda: _inference(torch.float32),
    "inference and cast": lambda: _inference(torch.float64),
    "negative": lambda: torch._neg_view(torch.zeros(4, 2)),
    "imaginary": lambda: torch.zeros(4, 2, dtype=torch.complex64).conj().imag,
    "conjugate": lambda: torch.zeros(4, 2, dtype=torch.complex64).conj(),
    "buffer": lambda: nn.Buffer(torch.zeros(4, 2)),
}


@pytest.mark.parametrize("kind", FILLED)
def test_unusual_tensors_are_filled(kind: str, tmp_path: Path) -> None:
    numbers = torch.arange(8.0).reshape(4, 2)
    zarrckpt.save({"w": numbers}, str(tmp_path / "run"))
    for load in LOADS:
        target = FILLED[kind]()
        load({"w": target}, str(tmp_path / "run"))
        with torch._C.DisableTorchFunctionSubclass():
            plain = target.detach()
        assert torch.equal(plain.resolve_conj().resolve_neg().to(torch.complex64), numbers.to(torch.complex64))
