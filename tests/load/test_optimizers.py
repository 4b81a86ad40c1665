"""An optimizer's state is restored under every wrapper, bit for bit, with equal losses. Or the load names the rest."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness.ranks import all_ranks_raise, run_ranks
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    _patch_model_state_dict,
    _patch_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import zarrckpt


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.second = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


class Hidden(nn.Module):
    """Hides the module that it wraps from its state dict, as Lightning Fabric's wrapper does."""

    def __init__(self, module: nn.Module, original: nn.Module) -> None:
        super().__init__()
        self._forward_module = module
        self._original_module = original

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._forward_module(x)

    def state_dict(self, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        return self._original_module.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        return self._original_module.load_state_dict(state_dict, strict, assign)


class Forwarding(Hidden):
    """Also has the attributes of the module that it hides."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("_original_module"), name)


def compiled(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="eager")  # type: ignore[return-value]


def with_second(wrap: Callable[[nn.Module], nn.Module]) -> Callable[[Net], nn.Module]:
    def make(net: Net) -> nn.Module:
        net.second = wrap(net.second)  # type: ignore[assignment]
        return net

    return make


def fsdp1(net: nn.Module, *, flat: bool = False) -> nn.Module:
    return FullyShardedDataParallel(net, device_id=torch.device("cpu"), use_orig_params=not flat)


def fsdp2(net: Net) -> nn.Module:
    fully_shard(net.second)
    return fully_shard(net)


def hiding(wrap: Callable[[Any], nn.Module]) -> Callable[[Net], nn.Module]:
    return lambda net: Forwarding(wrap(net), net)


WRAPPERS: dict[str, Callable[[Net], nn.Module]] = {
    "plain": lambda net: net,
    "hidden": lambda net: Hidden(net, net),
    "forwarding": lambda net: Forwarding(net, net),
    "compiled": compiled,
    "compiled inside": with_second(compiled),
    "ddp": DistributedDataParallel,
    "ddp of compiled": lambda net: DistributedDataParallel(compiled(net)),
    "compiled ddp": lambda net: compiled(DistributedDataParallel(net)),
    "hidden ddp": hiding(DistributedDataParallel),
    "hidden compiled": hiding(compiled),
    "checkpointed": with_second(checkpoint_wrapper),
    "compiled and checkpointed": with_second(lambda module: checkpoint_wrapper(compiled(module))),
    "fsdp2": fsdp2,
    "hidden fsdp2": hiding(fsdp2),
    "compiled fsdp2": lambda net: compiled(fsdp2(net)),
    "fsdp1": fsdp1,
    "flat fsdp1": lambda net: fsdp1(net, flat=True),
    "hidden fsdp1": hiding(fsdp1),
    "compiled fsdp1": lambda net: compiled(fsdp1(net)),
}


def make(wrapper: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = WRAPPERS[wrapper](Net().double())
    return model, torch.optim.Adam(model.parameters(), lr=1e-2)


def train(model: nn.Module, optim: torch.optim.Optimizer, steps: range) -> list[float]:
    """Return the loss of each step. The batch depends on the step's number only."""
    losses = []
    for step in steps:
        torch.manual_seed(step)
        batch = torch.randn(8, 4, dtype=torch.float64)

        def closure(batch: torch.Tensor = batch) -> torch.Tensor:
            optim.zero_grad()
            loss = model(batch).square().mean()
            if loss.requires_grad:
                loss.backward()
            for parameter in model.parameters() if isinstance(optim, torch.optim.SparseAdam) else ():
                parameter.grad = None if parameter.grad is None else parameter.grad.to_sparse()
            return loss

        losses.append(optim.step(closure).item())  # type: ignore[union-attr]
    return losses


def moments(optim: torch.optim.Optimizer) -> list[Any]:
    """Return the state of each parameter and the options of each group, in the optimizer's order, as plain values."""

    def plain(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            full = value.full_tensor() if isinstance(value, DTensor) else value
            return str(full.dtype), full.detach().flatten().contiguous().view(torch.uint8).tolist()
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value

    parameters = [p for group in optim.param_groups for p in group["params"]]
    groups = [{key: plain(value) for key, value in group.items() if key != "params"} for group in optim.param_groups]
    return [groups, [plain(optim.state.get(p, {})) for p in parameters]]


def _wrappers_into_each_other(folder: str, pairs: list[tuple[str, str]]) -> None:
    warnings.simplefilter("ignore")
    expected: dict[str, list[float]] = {}
    for kind in dict(pairs):
        model, optim = make(kind, 0)
        train(model, optim, range(3))
        zarrckpt.save({"model": model, "optim": optim}, f"{folder}/{kind}")
        expected[kind] = train(model, optim, range(3, 6))
    for saved, target in pairs:
        model, optim = make(target, 1)
        zarrckpt.load({"model": model, "optim": optim}, f"{folder}/{saved}")
        assert train(model, optim, range(3, 6)) == pytest.approx(expected[saved], rel=1e-12), f"{saved} -> {target}"


def test_a_training_resumes_under_another_wrapper(tmp_path: Path) -> None:
    # Each into the next one, each from plain and into plain. So a name that differs anywhere is found.
    kinds = [*WRAPPERS]
    pairs = [*zip(kinds, [*kinds[1:], kinds[0]], strict=True)]
    pairs += [("plain", kind) for kind in kinds] + [(kind, "plain") for kind in kinds]
    run_ranks(_wrappers_into_each_other, str(tmp_path), [*dict.fromkeys(pairs)], world_size=2)


def _frozen_from_the_start(folder: str) -> None:
    for kind in ("fsdp1", "fsdp2"):
        model, optim = make(kind, 0)
        _freeze(model, {0, 1})
        train(model, optim, range(3))
        zarrckpt.save({"model": model, "optim": optim}, f"{folder}/{kind}, start")
        expected = train(model, optim, range(3, 6))
        model, optim = make(kind, 1)
        _freeze(model, {0, 1})
        zarrckpt.load({"model": model, "optim": optim}, f"{folder}/{kind}, start")
        assert train(model, optim, range(3, 6)) == pytest.approx(expected, rel=1e-12), kind


def _freeze_sharded(folder: str) -> None:
    _frozen_from_the_start(folder)
    for kind, in_place in itertools.product(("ddp", "fsdp1", "flat fsdp1", "fsdp2"), (True, False)):
        model, optim = make(kind, 0)
        train(model, optim, range(3))
        _freeze(model, {0})
        url = f"{folder}/{kind}, {in_place}"
        zarrckpt.save({"model": model, "optim": optim}, url)
        trained = [bool(slots) for slots in optim.state.values()]
        if not in_place:
            model, optim = make(kind, 1)
            _freeze(model, {0})
        zarrckpt.load({"model": model, "optim": optim}, url)
        assert [bool(slots) for slots in optim.state.values()] == trained, (kind, in_place)
        assert [p.requires_grad for p in model.parameters()] == [i > 0 for i, _ in enumerate(model.parameters())]


def test_frozen_parameters_keep_their_state_over_ranks(tmp_path: Path) -> None:
    run_ranks(_freeze_sharded, str(tmp_path), world_size=2)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adadelta": lambda groups: torch.optim.Adadelta(groups),
    "Adafactor": lambda groups: torch.optim.Adafactor(groups),
    "Adagrad": lambda groups: torch.optim.Adagrad(groups),
    "Adam": lambda groups: torch.optim.Adam(groups),
    "Adam, amsgrad": lambda groups: torch.optim.Adam(groups, amsgrad=True),
    "Adam, lr a tensor": lambda groups: torch.optim.Adam(groups, lr=torch.tensor(1e-3), foreach=False),
    "Adamax": lambda groups: torch.optim.Adamax(groups),
    "AdamW": lambda groups: torch.optim.AdamW(groups),
    "ASGD": lambda groups: torch.optim.ASGD(groups),
    "NAdam": lambda groups: torch.optim.NAdam(groups),
    "RAdam": lambda groups: torch.optim.RAdam(groups),
    "RMSprop": lambda groups: torch.optim.RMSprop(groups, centered=True, momentum=0.5),
    "Rprop": lambda groups: torch.optim.Rprop(groups),
    "SGD": lambda groups: torch.optim.SGD(groups, lr=1e-2),
    "SGD, momentum": lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9),
    "SparseAdam": lambda groups: torch.optim.SparseAdam(groups),
}
SHARDED_OPTIMIZERS = sorted(OPTIMIZERS.keys() - {"Adafactor", "Rprop", "SparseAdam"})  # these take no DTensors


def _optimizers_of_shards(folder: str) -> None:
    for name in SHARDED_OPTIMIZERS:
        model, _ = make("fsdp2", 0)
        optim = OPTIMIZERS[name](model.parameters())
        train(model, optim, range(3))
        zarrckpt.save({"model": model, "optim": optim}, f"{folder}/{name}")
        saved, expected = moments(optim), train(model, optim, range(3, 6))
        for kind in ("fsdp2", "plain"):
            model, _ = make(kind, 1)
            optim = OPTIMIZERS[name](model.parameters())
            zarrckpt.load({"model": model, "optim": optim}, f"{folder}/{name}")
            assert moments(optim) == saved, (name, kind)
            assert train(model, optim, range(3, 6)) == pytest.approx(expected, rel=1e-9), (name, kind)


def test_torchs_optimizers_resume_over_shards(tmp_path: Path) -> None:
    run_ranks(_optimizers_of_shards, str(tmp_path), world_size=2)


class Factored(torch.optim.Optimizer):
    """Has one number for each row of a parameter, the same on all ranks."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure()
        for parameter in self.param_groups[0]["params"]:
            rows = self.state[parameter].setdefault("rows", torch.zeros(parameter.shape[0]))
            rows += 1
        return loss


def _zero(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model, _ = make("ddp", seed)
    return model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1 / (seed + 1))


def _patched(seed: int, *, flat: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    model, optim = make("fsdp2", seed)
    _patch_model_state_dict(model)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    _patch_optimizer_state_dict(model, optimizers=(optim,), options=options)
    return model, optim


def _factored(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model, _ = make("fsdp2", seed)
    return model, Factored(parameter for parameter in model.parameters() if parameter.ndim == 2)


OTHER_FORMS: dict[str, Callable[[int], tuple[nn.Module, torch.optim.Optimizer]]] = {
    "zero": _zero,
    "patched": lambda seed: _patched(seed, flat=False),
    "patched and flat": lambda seed: _patched(seed, flat=True),
    "factored": _factored,
}


def _other_forms(folder: str) -> None:
    for kind, build in OTHER_FORMS.items():
        model, optim = build(0)
        train(model, optim, range(2))
        zarrckpt.save({"model": model, "optim": optim}, f"{folder}/{kind}")
        expected = train(model, optim, range(2, 4))
        model, optim = build(1)
        zarrckpt.load({"model": model, "optim": optim}, f"{folder}/{kind}")
        assert train(model, optim, range(2, 4)) == expected, kind
        if kind == "zero":
            with pytest.raises(zarrckpt.UnsupportedValueError, match="'optim' has a ZeroRedundancyOptimizer"):
                zarrckpt.save({"optim": optim}, f"{folder}/alone", no_dist=True)
        assert kind != "factored" or {slots["rows"][0].item() for slots in optim.state.values()} == {4}


def _zero_and_files(folder: str, expected: list[float]) -> None:
    """Load on another number of ranks than saved, and from an imported file of torch.save."""
    for kind, name in (("plain", "zero"), ("plain", "file"), ("fsdp2", "file"), ("zero", "file"), ("fsdp1", "file")):
        model, optim = _zero(1) if kind == "zero" else make(kind, 1)
        state = {"model": model, "optim": optim}
        if kind == "fsdp1":
            with pytest.raises(zarrckpt.KeyMismatchError, match="without FSDP1"):
                zarrckpt.load(state, f"{folder}/{name}")
            continue
        zarrckpt.load(state, f"{folder}/{name}")
        losses = train(model, optim, range(2, 4))
        assert losses == pytest.approx(expected, rel=1e-9) or name == "zero", (kind, name)
        if name == "zero":
            model, optim = _zero(1)
            zarrckpt.load({"model": model, "optim": optim}, f"{folder}/{name}")
            assert train(model, optim, range(2, 4)) == pytest.approx(losses, rel=1e-9)


def test_optimizers_of_other_forms_resume_over_ranks(tmp_path: Path) -> None:
    run_ranks(_other_forms, str(tmp_path), world_size=2)
    model, optim = make("plain", 0)
    train(model, optim, range(2))
    torch.save({"model": model.state_dict(), "optim": optim.state_dict()}, tmp_path / "file.pt")
    zarrckpt.import_checkpoint(tmp_path / "file.pt", tmp_path / "file")
    run_ranks(_zero_and_files, str(tmp_path), train(model, optim, range(2, 4)), world_size=3)


ALONE = ("plain", "hidden", "forwarding", "checkpointed")  # wrappers that need no other rank


@st.composite
def trainings(draw: st.DrawFn) -> dict[str, Any]:
    """Return a training: how a model is trained, partly frozen, saved, and loaded into another model or itself."""
    some = st.sets(st.integers(0, 5))
    return {
        "wrappers": draw(st.tuples(st.sampled_from(ALONE), st.sampled_from(ALONE))),
        "optimizer": draw(st.sampled_from([*OPTIMIZERS, "LBFGS"])),
        "groups": draw(st.lists(st.integers(0, 2), min_size=6, max_size=6)),
        "frozen at first": draw(some),
        "frozen later": draw(some),
        "tied": draw(st.booleans()),
        "target steps": draw(st.sampled_from([0, 0, 2])),
        "target frozen": draw(some),
        "in place": draw(st.booleans()),
        "without module": draw(st.booleans()),
    }


def _build(drawn: dict[str, Any], wrapper: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    net = Net().double()
    if drawn["tied"]:
        net.alias = net.second[0].weight
    model = WRAPPERS[wrapper](net)
    parameters = [*model.parameters()]
    if drawn["optimizer"] == "LBFGS":
        return model, torch.optim.LBFGS(parameters, max_iter=2)
    groups = [
        {"params": [p for p, place in zip(parameters, drawn["groups"], strict=True) if place == g]} for g in range(3)
    ]
    return model, OPTIMIZERS[drawn["optimizer"]](groups)


def _freeze(model: nn.Module, numbers: set[int]) -> None:
    for number, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(number not in numbers)


def _objects(drawn: dict[str, Any], model: nn.Module, optim: torch.optim.Optimizer) -> dict[str, Any]:
    return {"optim": optim} if drawn["without module"] else {"model": model, "optim": optim}


LBFGS_CHANGES = {
    # Its first step is a number in the checkpoint, and a tensor in the target.
    "wrappers": ("plain", "plain"),
    "optimizer": "LBFGS",
    "groups": [0] * 6,
    "frozen at first": {*range(6)},
    "frozen later": set(),
    "tied": False,
    "target steps": 0,
    "target frozen": set(),
    "in place": True,
    "without module": False,
}


@settings(max_examples=40)
@given(trainings())
@example(LBFGS_CHANGES)
def test_any_training_resumes(tmp_path_factory: pytest.TempPathFactory, drawn: dict[str, Any]) -> None:
    url = tmp_path_factory.mktemp("run") / "step-3"
    model, optim = _build(drawn, drawn["wrappers"][0], 0)
    _freeze(model, drawn["frozen at first"])
    train(model, optim, range(2))
    _freeze(model, drawn["frozen later"])
    train(model, optim, range(2, 3))
    zarrckpt.save(_objects(drawn, model, optim), url)
    saved, weights = moments(optim), [p.detach().clone() for p in model.parameters()]
    expected = train(model, optim, range(3, 6))
    if not drawn["in place"]:
        model, optim = _build(drawn, drawn["wrappers"][1], 1)
        _freeze(model, drawn["target frozen"])
        train(model, optim, range(drawn["target steps"]))
    report = zarrckpt.load(_objects(drawn, model, optim), url)
    assert report.loaded and not report.missing and not report.unexpected
    assert moments(optim) == saved
    if drawn["without module"]:
        for parameter, weight in zip(model.parameters(), weights, strict=True):
            parameter.data.copy_(weight)
    _freeze(model, drawn["frozen later"])
    assert train(model, optim, range(3, 6)) == expected


class Fused(nn.Module):
    """Saves one parameter as three entries, and joins them on load."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Parameter(torch.randn(6, 4))
        self._register_state_dict_hook(self._split)
        self.register_load_state_dict_pre_hook(self._join)

    @staticmethod
    def _split(module: nn.Module, state: Any, prefix: str, _: Any) -> None:
        whole = state.pop(f"{prefix}qkv")
        state |= {f"{prefix}{name}": part.clone() for name, part in zip("qkv", whole.chunk(3), strict=True)}

    @staticmethod
    def _join(module: nn.Module, state: Any, prefix: str, *_: Any) -> None:
        state[f"{prefix}qkv"] = torch.cat([state.pop(f"{prefix}{name}") for name in "qkv"])


class Renamed(nn.Module):
    """Has another name in its state dict. ``_fqn_modifiers`` gives it to torch's own functions."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.fusion = nn.Embedding(4, 3), nn.Embedding(2, 3)
        self._register_state_dict_hook(self._rename)
        self.register_load_state_dict_pre_hook(self._rename_back)

    @staticmethod
    def _rename(module: nn.Module, state: Any, prefix: str, _: Any) -> None:
        state[f"{prefix}weight"] = state.pop(f"{prefix}embedding.weight")

    @staticmethod
    def _rename_back(module: nn.Module, state: Any, prefix: str, *_: Any) -> None:
        state[f"{prefix}embedding.weight"] = state.pop(f"{prefix}weight")

    def _fqn_modifiers(self) -> dict[str, str]:
        return {"weight": "embedding"}


def _step(module: nn.Module, optim: torch.optim.Optimizer) -> None:
    for number, parameter in enumerate(module.parameters()):
        parameter.grad = torch.full_like(parameter, 0.1 * (number + 1))
    optim.step()


@pytest.mark.parametrize("kind", [Fused, Renamed])
def test_parameters_renamed_in_the_state_dict_are_matched(kind: type[nn.Module], tmp_path: Path) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        module = nn.Sequential(kind(), nn.Linear(2, 2))
        return module, torch.optim.Adam(module.parameters())

    module, optim = build()
    _step(module, optim)
    zarrckpt.save({"model": module, "optim": optim}, tmp_path / "c")
    other, target = build()
    zarrckpt.load({"model": other, "optim": target}, tmp_path / "c")
    assert moments(target) == moments(optim)
    for loaded, parameter in zip(other.parameters(), module.parameters(), strict=True):
        assert torch.equal(loaded, parameter)


def test_a_part_of_a_model_may_be_named_module(tmp_path: Path) -> None:
    """Only the "module" of DistributedDataParallel is left out of names."""
    model = nn.ModuleDict({"module": nn.Linear(2, 2)})
    zarrckpt.save({"model": model}, tmp_path / "one")
    assert {*zarrckpt.open(tmp_path / "one")} == {"model.module.weight", "model.module.bias"}


def test_entries_that_a_module_ignores_are_an_error(tmp_path: Path) -> None:
    class OneWay(Fused):
        @staticmethod
        def _join(module: nn.Module, state: Any, prefix: str, *_: Any) -> None:
            pass

    zarrckpt.save({"model": OneWay()}, tmp_path / "c")
    with pytest.raises(zarrckpt.KeyMismatchError, match="did not accept 3"):
        zarrckpt.load({"model": OneWay()}, tmp_path / "c")


def test_state_without_a_parameter_is_an_error_with_similar_names(tmp_path: Path) -> None:
    def build(name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
        module = nn.ModuleDict({name: nn.Linear(3, 2)})
        optim = torch.optim.Adam(module.parameters())
        return module, optim

    module, optim = build("decoder")
    _step(module, optim)
    zarrckpt.save({"model": module, "optim": optim}, tmp_path / "c")
    for name in ("encoder", "_forward_module_decoder"):
        other, target = build(name)
        with pytest.raises(zarrckpt.KeyMismatchError) as caught:
            zarrckpt.load({"model": other, "optim": target}, tmp_path / "c", keys="optim")
        assert "'optim.state.decoder.weight.exp_avg' is in the checkpoint and has no target" in str(caught.value)
        assert f"{name}.weight" in str(caught.value)
        assert not target.state
        report = zarrckpt.load({"model": other, "optim": target}, tmp_path / "c", keys="optim", strict=False)
        assert not [fqn for fqn in report.loaded if fqn.startswith("optim.state")]
        assert "optim.state.decoder.weight.exp_avg" in report.unexpected


def test_a_module_without_entries_gets_no_state(tmp_path: Path) -> None:
    zarrckpt.save({"act": {"weight": torch.ones(2)}}, tmp_path / "c")
    with pytest.raises(zarrckpt.KeyMismatchError, match=r"'act\.weight' is in the checkpoint and has no target"):
        zarrckpt.load({"act": nn.ReLU()}, tmp_path / "c")


def test_an_optimizer_that_drops_state_is_an_error(tmp_path: Path) -> None:
    class Forgetful(torch.optim.Adam):
        def load_state_dict(self, state_dict: Any) -> None:
            state = {number: {"step": slots["step"]} for number, slots in state_dict["state"].items()}
            super().load_state_dict({**state_dict, "state": state})

    module = nn.Linear(3, 2)
    optim = Forgetful(module.parameters())
    _step(module, optim)
    zarrckpt.save({"model": module, "optim": optim}, tmp_path / "c")
    with pytest.raises(zarrckpt.KeyMismatchError, match="dropped 4 loaded entries"):
        zarrckpt.load({"model": module, "optim": optim}, tmp_path / "c")


class Custom(torch.optim.Optimizer):
    """Has state of every form, in special names and types, and does more in a step than torch's optimizers do."""

    def __init__(self, parameters: Any, alpha: float = 0.1) -> None:
        super().__init__(parameters, {"alpha": alpha})
        self.steps = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps += 1
        for parameter in self.param_groups[0]["params"]:
            with torch.no_grad():
                parameter.mul_(0.9).add_(torch.randn_like(parameter))
            self.state[parameter] = {
                "average": torch.full_like(parameter, 1 / 3, dtype=torch.float32),
                "counts": torch.full((2,), 200, dtype=torch.uint8),
                "kind": "wide",
                "by.block": {0: torch.tensor([1 / 3]), "names": ["a", "b"]},
                3: torch.tensor([1048577]),
                "history": [torch.tensor([1 / 3]), None],
            }

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)


def test_state_of_any_form_is_restored(tmp_path: Path) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        module = nn.Linear(3, 2, dtype=torch.bfloat16)
        return module, Custom(module.parameters())

    module, optim = build()
    optim.step()
    zarrckpt.save({"model": module, "optim": optim}, tmp_path / "c")
    for steps in (0, 1):
        other, target = build()
        for _ in range(steps):
            target.step()
        zarrckpt.load({"model": other, "optim": target}, tmp_path / "c")
        assert moments(target) == moments(optim)


def _no_step_is_made(folder: str) -> None:
    for kind in ("plain", "ddp", "fsdp1", "flat fsdp1", "fsdp2"):
        model, _ = make(kind, 0)
        optim = Custom(model.parameters())
        before = [p.detach().clone() for p in model.parameters()]
        generator = torch.get_rng_state()
        state, url = {"model": model, "optim": optim}, f"{folder}/{kind}"
        zarrckpt.save(state, url)
        with pytest.raises(zarrckpt.KeyMismatchError):
            zarrckpt.load({**state, "more": torch.zeros(2)}, url)
        zarrckpt.load(state, url)
        assert optim.steps == 0 and not any(optim.state.values())
        assert torch.equal(generator, torch.get_rng_state())
        for parameter, old in zip(model.parameters(), before, strict=True):
            assert parameter.grad is None and torch.equal(_whole(parameter), _whole(old))


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def test_saves_and_loads_make_no_optimizer_step(tmp_path: Path) -> None:
    """A step of a fresh optimizer might change parameters, random numbers, or averages beside it."""
    run_ranks(_no_step_is_made, str(tmp_path), world_size=2)


def test_a_part_of_a_parameter_s_state_needs_the_rest(tmp_path: Path) -> None:
    model, optim = make("plain", 0)
    train(model, optim, range(2))
    zarrckpt.save({"model": model, "optim": optim}, tmp_path / "c")
    other, fresh = make("plain", 1)
    with pytest.raises(zarrckpt.KeyMismatchError, match=r"'optim.state.first.weight'.*without.*exp_avg_sq"):
        zarrckpt.load({"model": other, "optim": fresh}, tmp_path / "c", keys="*.exp_avg")
    assert not fresh.state


def test_state_flattened_before_the_save_loads(tmp_path: Path) -> None:
    """torch's ``flatten_optimizer_state_dict`` and torchtitan do so: one key holds all state of a name."""
    model, optim = make("plain", 0)
    train(model, optim, range(2))
    names = [name for name, _ in model.named_parameters()]
    state = zip(names, optim.state.values(), strict=True)
    flat = {f"state.{name}.{slot}": value for name, slots in state for slot, value in slots.items()}
    zarrckpt.save({"optim": flat}, tmp_path / "c")
    other, fresh = make("plain", 1)
    zarrckpt.load({"model": other, "optim": fresh}, tmp_path / "c", keys="optim.state")
    assert moments(fresh) == moments(optim)


def test_an_optimizer_keeps_its_loaded_state_if_a_later_object_fails(tmp_path: Path) -> None:
    class Refusing:
        def state_dict(self) -> dict[str, Any]:
            return {"x": 1}

        def load_state_dict(self, state: Any) -> None:
            raise ValueError("not this one")

    model, optim = make("plain", 0)
    train(model, optim, range(2))
    zarrckpt.save({"model": model, "optim": optim, "z": Refusing()}, tmp_path / "c")
    other, fresh = make("plain", 1)
    with pytest.raises(zarrckpt.CheckpointError, match="not this one"):
        zarrckpt.load({"model": other, "optim": fresh, "z": Refusing()}, tmp_path / "c")
    assert moments(fresh) == moments(optim)


def _groups(net: Net, *parts: tuple[int, ...], lrs: tuple[float, ...], momentum: float = 0.0) -> torch.optim.Optimizer:
    parameters = [*net.parameters()]
    pairs = zip(parts, lrs, strict=True)
    groups = [{"params": [parameters[i] for i in part], "lr": lr} for part, lr in pairs]
    return torch.optim.SGD(groups, momentum=momentum)


def test_parameter_groups_get_options_by_parameter_names(tmp_path: Path) -> None:
    zarrckpt.save(
        {"m": (net := Net()), "o": _groups(net, (), (0, 1), (2, 3, 4, 5), lrs=(0.5, 0.1, 0.2))}, tmp_path / "c"
    )
    for keys in (None, "o.param_groups.*.lr"):
        other = Net()
        target = _groups(other, (2, 3, 4, 5), (0, 1), (), lrs=(7.0, 8.0, 9.0))
        zarrckpt.load({"m": other, "o": target}, tmp_path / "c", keys=keys)
        assert [group["lr"] for group in target.param_groups] == [0.2, 0.1, 0.5]
    other = Net()
    target = _groups(other, (0,), (1, 2), (3, 4, 5), lrs=(7.0, 8.0, 9.0))
    with pytest.raises(zarrckpt.KeyMismatchError, match=r"'o.param_groups.1'.*2 groups.*'lr'"):
        zarrckpt.load({"m": other, "o": target}, tmp_path / "c")


STAGES: list[list[tuple[tuple[str, ...], dict[str, Any]]]] = [
    [(("embed.weight",), {"lr": 0.1}), (("embed.bias", "a.weight"), {"lr": 0.2, "weight_decay": 0.5})],
    [((), {"lr": 0.1}), (("b.weight",), {"lr": 0.2, "weight_decay": 0.5}), ((), {"lr": 0.3})],
    [(("d.bias",), {"lr": 0.3}), (("c.weight", "d.weight"), {"lr": 0.4, "nesterov": True}), (("c.bias",), {"lr": 0.1})],
]
"""Three stages of a pipeline. Their groups have other parameters and options, another order and number,
or are empty.
"""


def _stage(groups: list[tuple[tuple[str, ...], dict[str, Any]]], seed: int) -> dict[str, Any]:
    """Return a model of a stage's parameters, and an optimizer with its groups. Options are zero unless
    the seed is 0.
    """
    torch.manual_seed(seed)
    names = sorted(name for members, _ in groups for name in members)
    model = nn.ModuleDict({name.split(".")[0]: nn.Module() for name in names})
    for name in names:
        model[name.split(".")[0]].register_parameter(name.split(".")[1], nn.Parameter(torch.randn(3)))
    parameters = dict(model.named_parameters())
    kept = {"momentum": 0.9} if seed == 0 else {"momentum": 0.0}
    optim = torch.optim.SGD(
        [
            {"params": [parameters[name] for name in members], **kept, **(options if seed == 0 else {"lr": 0.0})}
            for members, options in groups
        ]
    )
    return {"model": model, "optim": optim}


def _options_by_name(state: dict[str, Any]) -> dict[str, dict[str, Any]]:
    names = {id(parameter): name for name, parameter in state["model"].named_parameters()}
    return {
        names[id(parameter)]: {key: value for key, value in group.items() if key != "params"}
        for group in state["optim"].param_groups
        for parameter in group["params"]
    }


def _pipeline(folder: str) -> dict[str, dict[str, Any]]:
    """Save stages in every way. Load them into stages and into groups of another order. Return the saved options."""
    rank = dist.get_rank()
    state = _stage(STAGES[rank], 0)
    with warnings.catch_warnings(), zarrckpt.CheckpointManager(f"{folder}/run") as manager:
        warnings.simplefilter("error")
        saves: list[tuple[str, Callable[[], Any]]] = [
            ("0", lambda: zarrckpt.save(state, f"{folder}/0")),
            ("1", lambda: zarrckpt.save(state, f"{folder}/1")),
            ("2", lambda: zarrckpt.async_save(state, f"{folder}/2").result()),
            ("run", lambda: manager.save(3, state).result()),
        ]
        for name, save in saves:
            for group in state["optim"].param_groups:
                group["lr"] += rank  # from the second save on, ranks repeat a plan
            _step(state["model"], state["optim"])
            save()
            for groups in (STAGES[rank], [*STAGES[rank][::-1], ((), {})]):
                other = _stage(groups, 1)
                url = f"{folder}/{name}"
                zarrckpt.load(other, zarrckpt.latest(url) if name == "run" else url)
                assert _options_by_name(other) == _options_by_name(state), (name, groups)
            dist.barrier()
    return _options_by_name(state)


def test_each_stage_of_a_pipeline_keeps_its_options(tmp_path: Path) -> None:
    found = run_ranks(_pipeline, str(tmp_path), world_size=3)
    saved = {name: options for rank in found for name, options in rank.items()}
    assert len({options["lr"] for options in saved.values()}) == 6
    state = _stage([((name,), {}) for name in reversed(saved)], 1)
    zarrckpt.load(state, zarrckpt.latest(tmp_path / "run"))
    assert _options_by_name(state) == saved


def _refused_stages(folder: str, kind: str) -> None:
    rank = dist.get_rank()
    state = _stage(STAGES[rank if kind == "names" else 0], 0)
    optim = state["optim"]
    if kind == "contents":
        optim.param_groups[0]["lr"] = rank
    if kind == "names":
        state["optim"] = optim.state_dict()
        for group, (members, _) in zip(state["optim"]["param_groups"], STAGES[rank], strict=True):
            group["params"] = [*members]
    zarrckpt.save({"optim": state["optim"]}, f"{folder}/{kind}")


@pytest.mark.parametrize("kind", ["names", "contents"])
def test_indistinguishable_stages_are_refused(tmp_path: Path, kind: str) -> None:
    message = all_ranks_raise(zarrckpt.UnsupportedLayoutError, _refused_stages, str(tmp_path), kind, world_size=2)
    assert "'optim'" in message and "PerRank" in message
    assert ("param_groups.0.lr" in message) == (kind == "contents")


def _experts(folder: str, sharded: bool) -> None:
    """Save experts of which that of rank 1 gets no token, and load them."""
    rank = dist.get_rank()
    weight = torch.ones(4, 2)
    if sharded:
        weight = distribute_tensor(weight, init_device_mesh("cpu", (2,)), [Shard(0)])
    model = nn.ParameterDict({"expert": nn.Parameter(weight)})
    optim = torch.optim.Adam(model.parameters())
    if rank == 0:
        model["expert"].grad = torch.ones_like(weight)
        optim.step()
    fresh = torch.optim.Adam(model.parameters())
    nn.init.ones_(model["expert"])
    zarrckpt.save({"model": model, "optim": optim}, f"{folder}/c")
    zarrckpt.load({"model": model, "optim": fresh}, f"{folder}/c")
    assert fresh.state[model["expert"]]["exp_avg"].eq(0.1).all()


def test_an_expert_may_lack_state_on_one_rank(tmp_path: Path) -> None:
    run_ranks(_experts, str(tmp_path), False, world_size=2)
    args = (str(tmp_path / "sharded"), True)
    message = all_ranks_raise(zarrckpt.UnsupportedLayoutError, _experts, *args, world_size=2)
    assert "'optim.state.expert.exp_avg'" in message and "ranks [1] have no entry" in message


def test_options_are_converted_to_the_optimizers_form(tmp_path: Path) -> None:
    module = nn.Linear(3, 2)
    optim = torch.optim.AdamW([{"params": [module.weight]}, {"params": [module.bias]}], lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optim, 1, 0.5)
    _step(module, optim)
    scheduler.step()
    first, second = optim.param_groups
    del first["maximize"]  # as of an older torch
    first["old"] = [torch.ones(2), {"a": 1}]
    second["lr"] = torch.tensor(0.25)
    zarrckpt.save({"m": module, "o": optim}, tmp_path / "c")
    tensor = torch.tensor(3.0, dtype=torch.float64)
    weight = {"params": [module.weight], "lr": tensor, "maximize": True, "new": 5}
    fresh = torch.optim.AdamW([weight, {"params": [module.bias], "lr": 3.0}])
    zarrckpt.load({"m": module, "o": fresh}, tmp_path / "c")
    one, two = fresh.param_groups
    assert isinstance(one["lr"], torch.Tensor) and one["lr"].dtype == torch.float64 and one["lr"] == 0.05
    assert type(two["lr"]) is float and two["lr"] == 0.25
    assert one["maximize"] is True and one["new"] == 5 and two["maximize"] is False
    assert one["old"][0].tolist() == [1, 1] and one["old"][1] == {"a": 1}
    assert [group["initial_lr"] for group in fresh.param_groups] == [0.1, 0.1]
    torch.optim.lr_scheduler.StepLR(fresh, 1, 0.5, last_epoch=0)
    _step(module, fresh)


def test_parameters_of_lazy_modules_are_named(tmp_path: Path) -> None:
    zarrckpt.save({"m": nn.Linear(3, 2)}, tmp_path / "c")
    lazy = nn.LazyLinear(2)
    state = {"m": lazy, "o": torch.optim.SGD(lazy.parameters())}
    with pytest.raises(zarrckpt.KeyMismatchError, match=r"'m\.weight' is a parameter of a lazy module"):
        zarrckpt.load(state, tmp_path / "c")
    with pytest.raises(zarrckpt.UnsupportedValueError, match=r"'m\.weight' is a parameter of a lazy module"):
        zarrckpt.save(state, tmp_path / "d")


def test_numbered_state_loads_only_into_the_same_parameters(tmp_path: Path) -> None:
    net, halves = Net(), ((0, 1), (2, 3, 4, 5))
    optim = _groups(net, *halves, lrs=(0.1, 0.2), momentum=0.9)
    _step(net, optim)
    torch.save({"model": net.state_dict(), "optim": optim.state_dict()}, tmp_path / "x.pt")
    zarrckpt.import_checkpoint(tmp_path / "x.pt", tmp_path / "c")
    state: dict[str, Any] = {"model": Net()}
    before = {name: value.clone() for name, value in state["model"].state_dict().items()}
    for parts, text in (
        (((0, 1, 2), (3, 4, 5)), r"groups of \[2, 4\] .* groups of \[3, 3\]"),
        (((1, 0), (2, 3, 4, 5)), r"'optim.state.0.momentum_buffer' has shape \(6, 4\).*'first.bias'"),
    ):
        state["optim"] = _groups(state["model"], *parts, lrs=(7.0, 8.0), momentum=0.9)
        for strict in (True, False):
            with pytest.raises(zarrckpt.KeyMismatchError, match=text):
                zarrckpt.load(state, tmp_path / "c", strict=strict)
        assert not state["optim"].state
        assert all(torch.equal(before[name], value) for name, value in state["model"].state_dict().items())
    state["optim"] = _groups(state["model"], *halves, lrs=(7.0, 8.0), momentum=0.9)
    zarrckpt.load(state, tmp_path / "c")
    assert moments(state["optim"]) == moments(optim)


def test_options_that_determine_the_state_are_loaded(tmp_path: Path) -> None:
    """A fresh optimizer gets the checkpoint's state, even if its own options would have made other state."""
    for name, saved, fresh in (
        ("on", {"amsgrad": True}, {"amsgrad": False}),
        ("off", {"amsgrad": False}, {"amsgrad": True}),
    ):
        module = nn.Linear(3, 2)
        optim = torch.optim.Adam(module.parameters(), **saved)
        _step(module, optim)
        zarrckpt.save({"model": module, "optim": optim}, tmp_path / name)
        other = nn.Linear(3, 2)
        target = torch.optim.Adam(other.parameters(), **fresh)
        zarrckpt.load({"model": other, "optim": target}, tmp_path / name)
        assert moments(target) == moments(optim)


def test_names_given_to_parameters_are_not_loaded(tmp_path: Path) -> None:
    named, plain = nn.Linear(3, 2), nn.Linear(3, 2)
    optim = torch.optim.Adam(named.named_parameters())
    bare = torch.optim.Adam(plain.parameters())
    for module, one in ((named, optim), (plain, bare)):
        _step(module, one)
    zarrckpt.save({"model": named, "optim": optim}, tmp_path / "named")
    zarrckpt.save({"model": plain, "optim": bare}, tmp_path / "bare")
    zarrckpt.load({"model": plain, "optim": bare}, tmp_path / "named")
    assert moments(bare)[1] == moments(optim)[1] and "param_names" not in bare.param_groups[0]
    zarrckpt.load({"model": named, "optim": optim}, tmp_path / "bare")
    assert optim.param_groups[0]["param_names"] == ["weight", "bias"]


def test_several_optimizers_of_one_module_resume(tmp_path: Path) -> None:
    def build(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        net = Net()
        optims = [torch.optim.Adam(net.first.parameters()), torch.optim.SGD(net.second.parameters(), momentum=0.9)]
        return {"model": net, "optims": optims}

    state = build(0)
    for optim in state["optims"]:
        _step(state["model"], optim)
    zarrckpt.save(state, tmp_path / "c")
    other = build(1)
    zarrckpt.load(other, tmp_path / "c")
    assert [moments(optim) for optim in other["optims"]] == [moments(optim) for optim in state["optims"]]


def test_a_stateful_without_state_gets_the_saved_state(tmp_path: Path) -> None:
    class Lazy:
        def __init__(self) -> None:
            self.state: dict[str, Any] = {}

        def state_dict(self) -> dict[str, Any]:
            return self.state

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.state = {**state}

    saved, fresh = Lazy(), Lazy()
    saved.state = {"mean": torch.arange(3.0), "count": 7}
    zarrckpt.save({"objects": [saved]}, tmp_path / "c")
    zarrckpt.load({"objects": [fresh]}, tmp_path / "c")
    assert fresh.state["count"] == 7
    assert torch.equal(fresh.state["mean"], torch.arange(3.0))
