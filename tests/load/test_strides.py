"""New tensors get the order of strides that the saved tensors had, as after torch.load."""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import zarr
from harness.bits import bits
from harness.hostile import Forgery
from harness.ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import zarrckpt


def _tensors() -> dict[str, torch.Tensor]:
    """Return dense tensors with every order of strides, also with dimensions of length 1 and 0."""
    generator = torch.Generator().manual_seed(0)
    found = {}
    for shape in ((3, 4), (1, 5), (2, 3, 4), (4, 1, 3), (0, 3, 2), (8, 1, 3, 3), (2, 3, 1, 1)):
        for axes in itertools.permutations(range(len(shape))):
            whole = torch.randn(shape, generator=generator).permute(axes)
            found[f"{'x'.join(map(str, shape))}-{''.join(map(str, axes))}"] = whole
    image = torch.randn(4, 3, 2, 2, generator=generator)
    found["channels_last"] = image.to(memory_format=torch.channels_last)
    found["depthwise"] = torch.randn(8, 1, 3, 3).to(memory_format=torch.channels_last)
    found["volume"] = torch.randn(2, 3, 4, 2, 2).to(memory_format=torch.channels_last_3d)
    found["bfloat16"] = found["channels_last"].bfloat16()
    found["complex"] = torch.linalg.qr(torch.randn(5, 5, dtype=torch.complex64))[0]
    found["qr"] = torch.linalg.qr(torch.randn(6, 6, dtype=torch.float64))[0]
    found["scalar"] = torch.tensor(3.0)
    return found


def _layout(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {name: (tensor.stride(), bits(tensor)) for name, tensor in tensors.items()}


def _through_torch_save(value: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer)


def _loaded_as_values(url: str) -> dict[str, torch.Tensor]:
    state: dict[str, Any] = {"w": dict.fromkeys(_tensors())}
    zarrckpt.load(state, url)
    found: dict[str, torch.Tensor] = state["w"]
    return found


def _loaded_by_a_torch_file(url: str) -> dict[str, torch.Tensor]:
    zarrckpt.to_torch_save(url, f"{url}.pt")
    found: dict[str, torch.Tensor] = torch.load(f"{url}.pt")["w"]
    return found


def _imported(url: str) -> dict[str, torch.Tensor]:
    zarrckpt.to_torch_save(url, f"{url}.pt")
    zarrckpt.import_checkpoint(f"{url}.pt", f"{url}-imported")
    found: dict[str, torch.Tensor] = zarrckpt.open(f"{url}-imported").load()["w"]
    return found


def _copied(url: str) -> dict[str, torch.Tensor]:
    zarrckpt.copy(url, f"{url}-copy", max_chunk_bytes=64, portable_dtypes=True)
    found: dict[str, torch.Tensor] = zarrckpt.open(f"{url}-copy").load()["w"]
    return found


def _iterated(url: str) -> dict[str, torch.Tensor]:
    return {name.removeprefix("w."): tensor for name, tensor in zarrckpt.open(url).iter_tensors()}


@pytest.mark.parametrize("load", [_loaded_as_values, _loaded_by_a_torch_file, _imported, _copied, _iterated])
def test_new_tensors_have_the_saved_strides(tmp_path: Path, load: Callable[[str], dict[str, torch.Tensor]]) -> None:
    tensors, url = _tensors(), str(tmp_path / "ckpt")
    zarrckpt.save({"w": tensors}, url)
    expected = _layout(_through_torch_save(tensors))
    assert _layout(load(url)) == expected
    group = zarr.open_group(url, mode="r")["w"]
    assert isinstance(group, zarr.Group)
    for name in ("qr", "channels_last", "2x3x4-201"):
        assert group[name][...].tobytes() == bits(tensors[name])[2]  # type: ignore[index, union-attr]


def test_a_cast_and_an_async_save_keep_the_order_of_strides(tmp_path: Path) -> None:
    tensors = _tensors() | {"part": torch.randn(6, 8).t()[:3], "step": torch.randn(6, 8)[::2, ::3]}
    zarrckpt.save({"w": tensors}, str(tmp_path / "a"))
    zarrckpt.async_save({"w": tensors}, str(tmp_path / "b")).result()
    a, b = zarrckpt.open(str(tmp_path / "a")), zarrckpt.open(str(tmp_path / "b"))
    assert all(a[f"w.{name}"].attrs.asdict() == b[f"w.{name}"].attrs.asdict() for name in tensors)
    loaded = b.load()["w"]
    assert (loaded["part"].stride(), loaded["step"].stride()) == ((1, 3), (3, 1))
    cast = dict(a.iter_tensors(["w.qr", "w.channels_last"], dtype="bfloat16"))
    assert cast["w.qr"].stride() == (1, 6)
    assert cast["w.channels_last"].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    "order", [[0, 1], [1, 0, 2], [0, 0], [1], [], [1, 2], [True, 0], [1.0, 0], [-1, 0], "10", None, {"1": 0}, [[1], 0]]
)
def test_an_order_that_no_save_writes_is_refused(tmp_path: Path, order: Any) -> None:
    zarrckpt.save({"w": torch.zeros(4, 6).t()}, tmp_path / "ckpt")
    forgery = Forgery(tmp_path / "ckpt")
    assert forgery.nodes["w"]["attributes"] == {"zarrckpt": {"order": [1, 0]}}
    forgery.nodes["w"]["attributes"]["zarrckpt"]["order"] = order
    forgery.write()
    with pytest.raises(zarrckpt.UnsupportedFormatError, match="'w'"):
        zarrckpt.open(tmp_path / "ckpt")


class _Rotating(torch.optim.Optimizer):
    """Steps in the eigenbasis of the gradients, as SOAP does: its state is column-major from its second step on."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.05})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                assert parameter.grad is not None
                state, grad = self.state[parameter], parameter.grad.flatten(1)
                if not state:
                    state["gram"], state["basis"] = torch.zeros(len(grad), len(grad)), [torch.eye(len(grad))]
                    state["nested"] = {"mean": torch.zeros_like(parameter)}
                state["gram"].lerp_(grad @ grad.t(), 0.1)
                state["basis"][0] = torch.linalg.qr(state["gram"] @ state["basis"][0])[0]
                state["nested"]["mean"] = state["nested"]["mean"].lerp(parameter.grad, 0.1)
                turned = state["basis"][0] @ (state["basis"][0].t() @ state["nested"]["mean"].flatten(1))
                parameter.sub_(turned.view_as(parameter), alpha=group["lr"])


def _training() -> tuple[nn.Module, _Rotating]:
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 16, 3), nn.Flatten(), nn.Linear(16 * 36, 24)
    model = nn.Sequential(*layers).to(memory_format=torch.channels_last)
    return model, _Rotating([layers[0].weight, layers[2].weight])


def _train(model: nn.Module, optimizer: _Rotating, steps: range) -> list[float]:
    losses = []
    for step in steps:
        images = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = model(images.to(memory_format=torch.channels_last)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("steps_before_the_load", [0, 1])
def test_a_resumed_optimizer_computes_the_same_bits(tmp_path: Path, steps_before_the_load: int) -> None:
    model, optimizer = _training()
    _train(model, optimizer, range(3))
    zarrckpt.save({"model": model, "optim": optimizer}, str(tmp_path / "ckpt"))
    saved = _through_torch_save([model.state_dict(), optimizer.state_dict()])
    other = _training()
    other[0].load_state_dict(saved[0])
    other[1].load_state_dict(saved[1])
    resumed = _training()
    _train(*resumed, range(steps_before_the_load))
    zarrckpt.load({"model": resumed[0], "optim": resumed[1]}, str(tmp_path / "ckpt"))
    for mine, theirs in zip(resumed[1].state.values(), other[1].state.values(), strict=True):
        assert mine["basis"][0].stride() == theirs["basis"][0].stride() == (1, len(mine["gram"]))
        assert mine["nested"]["mean"].stride() == theirs["nested"]["mean"].stride()
    losses = [_train(*one, range(3, 8)) for one in ((model, optimizer), other, resumed)]
    assert losses[0] == losses[1] == losses[2]


class _Average:
    """A Stateful that keeps the tensors that it is passed."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def test_targets_in_place_keep_their_own_strides(tmp_path: Path) -> None:
    url, value = str(tmp_path / "ckpt"), torch.randn(4, 6).t()
    zarrckpt.save({"w": value, "layer": {"weight": value}, "average": _Average(value)}, url)
    target, layer, average = torch.zeros(6, 4), nn.Linear(4, 6, bias=False), _Average(torch.zeros(6, 4))
    zarrckpt.load({"w": target, "layer": layer, "average": average}, url)
    assert target.stride() == layer.weight.stride() == (4, 1)
    assert average.value.stride() == (1, 6)
    assert torch.equal(target, value) and torch.equal(layer.weight, value) and torch.equal(average.value, value)


def _save_sharded(url: str) -> None:
    mesh, rank = init_device_mesh("cpu", (dist.get_world_size(),)), dist.get_rank()

    def shard(local: torch.Tensor) -> DTensor:
        return DTensor.from_local(local, mesh, [Shard(0)], run_check=False)

    whole = torch.arange(24.0).reshape(4, 6)
    state = {
        "columns": shard(whole.t().contiguous().t() + 100 * rank),
        "differing": shard(whole if rank else whole.t().contiguous().t()),
        "replica": whole.t(),
        "own": zarrckpt.PerRank({"basis": whole.t() * rank}),
    }
    layer = nn.Linear(6, 8, bias=False)
    layer.weight = nn.Parameter(shard(whole))
    optimizer = torch.optim.SGD(layer.parameters(), momentum=0.9)
    optimizer.state[layer.weight] = {"momentum_buffer": state["columns"]}
    zarrckpt.save(state | {"layer": layer, "optim": optimizer}, url)
    fresh = torch.optim.SGD(layer.parameters(), momentum=0.9)
    own = zarrckpt.PerRank(None)
    zarrckpt.load({"layer": layer, "optim": fresh, "own": own}, url, keys=["layer", "optim", "own"])
    loaded = fresh.state[layer.weight]["momentum_buffer"]
    assert loaded.to_local().stride() == (1, 4)
    assert torch.equal(loaded.to_local(), state["columns"].to_local())
    assert own.value["basis"].stride() == (1, 6) and torch.equal(own.value["basis"], whole.t() * rank)


def test_sharded_tensors_keep_the_order_that_all_ranks_have(tmp_path: Path) -> None:
    run_ranks(_save_sharded, str(tmp_path / "ckpt"), world_size=2)
    loaded = zarrckpt.open(str(tmp_path / "ckpt")).load()
    assert (loaded["columns"].stride(), loaded["differing"].stride()) == ((1, 8), (6, 1))
    assert loaded["replica"].stride() == (1, 6)
    assert torch.equal(loaded["replica"], torch.arange(24.0).reshape(4, 6).t())
