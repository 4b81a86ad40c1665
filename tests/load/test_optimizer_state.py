"""The state of optimizers whose parameters have names without the module, of other classes, and of no parameter."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.ranks import run_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import zarrckpt

State = dict[str, Any]


class Net(nn.Module):
    """Layers of equal shapes, in any order. On two ranks of FSDP2, one bias of a head has no elements on rank 1."""

    def __init__(self, names: str) -> None:
        super().__init__()
        for name in names:
            self.add_module(name, nn.Linear(4, 4))
        self.head, self.other = nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(3 * self.a(x) + self.b(x).square()) + 2 * self.other(self.a(x))


def build(
    names: str, seed: int, make: Callable[[Any], torch.optim.Optimizer] = torch.optim.AdamW
) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    net = Net(names)
    return net, make([*net.parameters()])


def train(net: nn.Module, optim: torch.optim.Optimizer, steps: int = 2) -> list[float]:
    losses = []
    for step in range(steps):
        torch.manual_seed(step)
        optim.zero_grad()
        loss = net(torch.randn(8, 4)).square().mean()
        loss.backward()
        optim.step()
        losses.append(loss.item())
    return losses


def state_of(optim: torch.optim.Optimizer, net: nn.Module) -> dict[str, Any]:
    return {name: optim.state[parameter] for name, parameter in sorted(net.named_parameters())}


FORMS: dict[str, Callable[[nn.Module, torch.optim.Optimizer], State]] = {
    "module": lambda net, optim: {"model": net, "optim": optim},
    "dict": lambda net, optim: {"model": net.state_dict(), "optim": optim},
    "nested": lambda net, optim: {"train": {"model": {"net": net.state_dict(), "step": 1}}, "optim": optim},
    "with another module": lambda net, optim: {"model": net.state_dict(), "teacher": nn.Linear(2, 2), "optim": optim},
}


@pytest.mark.parametrize("saved", FORMS)
def test_state_follows_its_layer_without_the_module(saved: str, tmp_path: Path) -> None:
    net, optim = build("ab", 0)
    train(net, optim)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        zarrckpt.save(FORMS[saved](net, optim), tmp_path / "c")
    for form in FORMS if saved in ("module", "dict") else ("dict", "module"):
        other, fresh = build("ba", 1)
        keys = None if form == saved else "optim"
        zarrckpt.load(FORMS[form](other, fresh), tmp_path / "c", keys=keys)
        torch.testing.assert_close(state_of(fresh, other), state_of(optim, net), rtol=0, atol=0)


def test_named_state_loads_in_order_without_the_module(tmp_path: Path) -> None:
    net, optim = build("ab", 0)
    train(net, optim)
    zarrckpt.save({"model": net.state_dict(), "optim": optim}, tmp_path / "c")
    other, fresh = build("ab", 1)
    zarrckpt.load({"optim": fresh}, tmp_path / "c")
    torch.testing.assert_close(state_of(fresh, other), state_of(optim, net), rtol=0, atol=0)
    unlike = torch.optim.AdamW([*other.parameters()][::-1])
    with pytest.raises(zarrckpt.KeyMismatchError, match=r"'optim\.state\.a\.weight.* shape \(4, 4\)"):
        zarrckpt.load({"optim": unlike}, tmp_path / "c")
    part = torch.optim.AdamW([other.head.weight])  # type: ignore[union-attr,list-item]
    with pytest.raises(zarrckpt.KeyMismatchError, match=r"'optim' has named.*groups of \[8\].*\[1\].*the module"):
        zarrckpt.load({"optim": part}, tmp_path / "c")
    assert not unlike.state and not part.state


def test_one_vector_for_all_parameters_needs_their_order(tmp_path: Path) -> None:
    net, optim = build("ab", 0)
    optim = torch.optim.LBFGS(net.parameters())
    train_lbfgs(net, optim)
    zarrckpt.save({"model": net, "optim": optim}, tmp_path / "c")
    for names in ("ba", "ab"):
        other, _ = build(names, 1)
        fresh = torch.optim.LBFGS(other.parameters())
        if names == "ba":
            with pytest.raises(zarrckpt.KeyMismatchError, match=r"'optim\.state\.a\.weight\.d' is one vector for all"):
                zarrckpt.load({"model": other, "optim": fresh}, tmp_path / "c")
            assert not torch.equal(other.head.weight, net.head.weight) and not fresh.state  # type: ignore[union-attr,arg-type]
    zarrckpt.load({"model": other, "optim": fresh}, tmp_path / "c")
    assert train_lbfgs(other, fresh) == train_lbfgs(net, optim)


def train_lbfgs(net: nn.Module, optim: torch.optim.LBFGS) -> float:
    def closure() -> torch.Tensor:
        optim.zero_grad()
        loss = net(torch.ones(1, 4)).square().mean()
        loss.backward()
        return loss

    return float(optim.step(closure))


def test_names_given_to_an_optimizer_are_saved_without_its_module(tmp_path: Path) -> None:
    net = Net("ab")
    optim = torch.optim.AdamW(net.named_parameters())
    train(net, optim)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        zarrckpt.save({"optim": optim}, tmp_path / "c")
    other, fresh = build("ba", 1)
    zarrckpt.load({"model": other, "optim": fresh}, tmp_path / "c", keys="optim")
    torch.testing.assert_close(state_of(fresh, other), state_of(optim, net), rtol=0, atol=0)


def _without_elements() -> State:
    empty = nn.ModuleDict({"a": nn.Linear(0, 3), "b": nn.Linear(0, 3)})
    return {"model": empty.state_dict(), "optim": torch.optim.SGD(empty.parameters(), momentum=0.9)}


def _on_meta() -> State:
    net = nn.Linear(2, 2, device="meta")
    return {"model": net.state_dict(), "optim": torch.optim.SGD(net.parameters(), momentum=0.9)}


def _one_memory() -> State:
    weight = torch.ones(3)
    optim = torch.optim.SGD([nn.Parameter(weight), nn.Parameter(weight)], momentum=0.9)
    return {"model": {"a": weight, "b": weight}, "optim": optim}


@pytest.mark.parametrize("make", [_without_elements, _on_meta, _one_memory])
def test_a_save_warns_of_parameters_without_names(make: Callable[[], State], tmp_path: Path) -> None:
    state = make()
    if make is _on_meta:
        state["model"] = {}
    with pytest.warns(UserWarning, match="'optim': the parameters of the SGD are saved with numbers"):
        zarrckpt.save(state, tmp_path / "c")
    groups = zarrckpt.open(tmp_path / "c")["optim.param_groups.0.params"]
    assert groups == [*range(len(state["optim"].param_groups[0]["params"]))]


def test_tied_and_renamed_parameters_of_a_state_dict(tmp_path: Path) -> None:
    net, optim = build("ab", 0)
    net.b.weight = net.a.weight  # type: ignore[union-attr]
    optim = torch.optim.AdamW(net.parameters())
    train(net, optim)
    zarrckpt.save({"model": net.state_dict(), "optim": optim}, tmp_path / "c")
    other, _ = build("ba", 1)
    other.a.weight = other.b.weight  # type: ignore[union-attr]
    fresh = torch.optim.AdamW(other.parameters())
    zarrckpt.load({"model": other.state_dict(), "optim": fresh}, tmp_path / "c")
    assert torch.equal(fresh.state[other.a.weight]["exp_avg"], optim.state[net.a.weight]["exp_avg"])  # type: ignore[union-attr,index]
    renamed = nn.ModuleDict({"c": nn.Linear(4, 4)})
    half = torch.optim.AdamW(renamed.parameters())
    state = {"model": renamed.state_dict(), "optim": half}
    zarrckpt.load(state, tmp_path / "c", rename={"model.a": "model.c"}, keys=["model.c.*", "optim.state.c.*"])
    assert torch.equal(half.state[renamed["c"].bias]["exp_avg"], optim.state[net.a.bias]["exp_avg"])  # type: ignore[union-attr,index]


def _sharded(kind: str, names: str, seed: int, make: Any = torch.optim.AdamW) -> tuple[nn.Module, Any]:
    torch.manual_seed(seed)
    net: nn.Module = fully_shard(Net(names)) if kind == "fsdp2" else DistributedDataParallel(Net(names))
    return net, ZeroRedundancyOptimizer(net.parameters(), make) if kind == "zero" else make(net.parameters())


def _over_ranks(folder: str) -> None:
    for kind in ("fsdp2", "zero"):
        net, optim = _sharded(kind, "ab", 0)
        train(net, optim)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="'optim'")
            zarrckpt.save({"model": net.state_dict(), "optim": optim}, f"{folder}/{kind}")
        expected = train(net, optim)
        for form in ("dict", "module"):
            other, fresh = _sharded(kind, "ba", 1)
            rename = {"model.module": "model"} if form == "module" and kind == "zero" else None
            zarrckpt.load(FORMS[form](other, fresh), f"{folder}/{kind}", rename=rename)
            assert train(other, fresh) == pytest.approx(expected, rel=1e-6), (kind, form)
        other, unlike = _sharded(kind, "ba", 1, torch.optim.RMSprop)
        with pytest.raises(zarrckpt.KeyMismatchError, match=r"'optim' was saved by AdamW.*into RMSprop"):
            zarrckpt.load({"model": other.state_dict(), "optim": unlike}, f"{folder}/{kind}")


def _zero_with_a_key(folder: str) -> None:
    net, optim = _sharded("zero", "ab", 0, Madgrad)
    train(net, optim)
    zarrckpt.save({"model": net, "optim": optim}, f"{folder}/c")
    other, fresh = _sharded("plain", "ab", 1, Madgrad)
    zarrckpt.load({"model": other, "optim": fresh}, f"{folder}/c")
    assert fresh.state["k"].tolist() == [2]
    other, fresh = _sharded("zero", "ab", 1, Madgrad)
    with pytest.raises(zarrckpt.KeyMismatchError, match=r"'optim\.state\.k'"):
        zarrckpt.load({"model": other, "optim": fresh}, f"{folder}/c")


def _sharded_states(folder: str) -> None:
    _over_ranks(folder)
    _zero_with_a_key(folder)


def test_sharded_optimizers_need_no_module_in_the_state(tmp_path: Path) -> None:
    run_ranks(_sharded_states, str(tmp_path), world_size=2)


# -- another class


class Own(torch.optim.Optimizer):
    slot = "m"

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        torch.optim.Optimizer.__init__(self, parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            kept = self.state[parameter].setdefault(self.slot, torch.zeros_like(parameter))
            parameter.sub_(kept.add_(parameter.grad), alpha=self.param_groups[0]["lr"])


class Renamed(torch.optim.Optimizer):
    slot, __init__, step = Own.slot, Own.__init__, Own.step  # type: ignore[assignment]


class Unlike(Renamed):
    slot = "v"


class Averaging(torch.optim.AdamW):
    """Has more state than AdamW, which it creates when it is missing."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter].setdefault("average", parameter.detach().clone())
        return loss


class Wrapper(torch.optim.Optimizer):
    """As Accelerate's and others."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    param_groups = property(lambda self: self.optimizer.param_groups)  # type: ignore[assignment]
    state = property(lambda self: self.optimizer.state)  # type: ignore[assignment]

    def state_dict(self) -> Any:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.optimizer.load_state_dict(state_dict)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


CLASSES: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adam": lambda p: torch.optim.Adam(p, amsgrad=True),
    "SGD": lambda p: torch.optim.SGD(p, momentum=0.9),
    "SGD without state": torch.optim.SGD,
    **{name: getattr(torch.optim, name) for name in ("AdamW", "NAdam", "RMSprop", "Adamax", "Adagrad", "LBFGS")},
    **{kind.__name__: kind for kind in (Own, Renamed, Unlike, Averaging)},
    "wrapped AdamW": lambda p: Wrapper(torch.optim.AdamW(p)),
    "wrapped SGD": lambda p: Wrapper(torch.optim.SGD(p, momentum=0.9)),
}
OTHER_CLASSES = [
    ("SGD", "AdamW"),
    ("SGD without state", "AdamW"),
    ("AdamW", "SGD"),
    ("AdamW", "SGD without state"),
    ("AdamW", "NAdam"),
    ("AdamW", "RMSprop"),
    ("AdamW", "Adamax"),
    ("AdamW", "Adagrad"),
    ("AdamW", "LBFGS"),
    ("Own", "AdamW"),
    ("Own", "Unlike"),
    ("wrapped SGD", "wrapped AdamW"),
]
LIKE_CLASSES = [
    ("Adam", "AdamW"),
    ("AdamW", "Adam"),
    ("AdamW", "Averaging"),
    ("Averaging", "AdamW"),
    ("Own", "Renamed"),
    ("Adagrad", "Adagrad"),
    ("wrapped AdamW", "AdamW"),
    ("AdamW", "wrapped AdamW"),
]


def _is_unchanged(state: State, call: Callable[[], Any]) -> bool:
    before = {name: value.clone() for name, value in state["model"].state_dict().items()}, str(state["optim"].state)
    call()
    now = state["model"].state_dict(), str(state["optim"].state)
    return all(torch.equal(value, now[0][name]) for name, value in before[0].items()) and now[1] == before[1]


@pytest.mark.parametrize(("saved", "used"), OTHER_CLASSES)
def test_state_of_another_class_is_refused_before_the_load(saved: str, used: str, tmp_path: Path) -> None:
    net, optim = build("ab", 0, CLASSES[saved])
    train(net, optim)
    zarrckpt.save({"model": net, "optim": optim}, tmp_path / "c")
    for steps in (0, 0 if used == "LBFGS" else 1):
        other, unlike = build("ab", 1, CLASSES[used])
        train(other, unlike, steps)
        state = {"model": other, "optim": unlike}
        names = saved.removeprefix("wrapped ").partition(" ")[0], used.removeprefix("wrapped ").partition(" ")[0]
        numbers = torch.get_rng_state()

        def refuse(state: State = state, names: tuple[str, str] = names) -> None:
            for strict in (True, False):
                with pytest.raises(zarrckpt.KeyMismatchError, match=f"'optim' was saved by {names[0]}.* {names[1]}"):
                    zarrckpt.load(state, tmp_path / "c", strict=strict)

        assert _is_unchanged(state, refuse)
        assert torch.equal(torch.get_rng_state(), numbers)
        zarrckpt.load(state, tmp_path / "c", keys="model")


@pytest.mark.parametrize(("saved", "used"), LIKE_CLASSES)
def test_classes_with_the_same_state_load(saved: str, used: str, tmp_path: Path) -> None:
    net, optim = build("ab", 0, CLASSES[saved])
    train(net, optim)
    zarrckpt.save({"model": net, "optim": optim}, tmp_path / "c")
    for steps in (0, 1):
        other, fresh = build("ab", 1, CLASSES[used])
        train(other, fresh, steps)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore" if used in ("Adam", "Renamed") or saved == "Averaging" else "error")
            zarrckpt.load({"model": other, "optim": fresh}, tmp_path / "c")
        torch.testing.assert_close(state_of(fresh, other), state_of(optim, net), rtol=0, atol=0)
        train(other, fresh)


def test_adamw_keeps_its_weight_decay(tmp_path: Path) -> None:
    net, optim = build("ab", 0, lambda p: torch.optim.Adam(p, weight_decay=0.1))
    train(net, optim)
    zarrckpt.save({"model": net, "optim": optim}, tmp_path / "c")
    other, fresh = build("ab", 1)
    with pytest.warns(UserWarning, match="'optim': AdamW keeps decoupled_weight_decay=True"):
        zarrckpt.load({"model": other, "optim": fresh}, tmp_path / "c")
    assert fresh.param_groups[0]["decoupled_weight_decay"] and fresh.param_groups[0]["weight_decay"] == 0.1


@pytest.mark.parametrize(
    ("saved", "used", "error"),
    [
        ("SGD", "AdamW", "whose state differs"),
        ("AdamW", "SGD", "whose state differs"),
        ("AdamW", "RMSprop", "whose state differs"),
        ("AdamW", "NAdam", "KeyError.*mu_product"),
    ],
)
def test_another_class_is_found_without_the_name_of_the_saved_one(
    saved: str, used: str, error: str, tmp_path: Path
) -> None:
    net, optim = build("ab", 0, CLASSES[saved])
    train(net, optim)
    torch.save({"model": net.state_dict(), "optim": optim.state_dict()}, tmp_path / "x.pt")
    zarrckpt.import_checkpoint(tmp_path / "x.pt", tmp_path / "c")
    state = dict(zip(("model", "optim"), build("ab", 1, CLASSES[used]), strict=True))

    def refuse() -> None:
        with pytest.raises(zarrckpt.KeyMismatchError, match=f"'optim' was saved.*{used}.*{error}"):
            zarrckpt.load(state, tmp_path / "c")

    assert _is_unchanged(state, refuse)


def test_the_class_follows_renames_and_copies(tmp_path: Path) -> None:
    net, optim = build("ab", 0, CLASSES["SGD"])
    train(net, optim)
    zarrckpt.save({"model": net, "a": {"optim": optim}}, tmp_path / "c")
    zarrckpt.copy(zarrckpt.open(tmp_path / "c").select("a.*"), tmp_path / "copy")
    other, unlike = build("ab", 1)
    for url, rename in (("c", {"a.optim": "o"}), ("copy", {"a": "o"})):
        state: State = {"model": other, "o": unlike if url == "c" else {"optim": unlike}}
        with pytest.raises(zarrckpt.KeyMismatchError, match=r"'o(\.optim)?' was saved by SGD.*AdamW"):
            zarrckpt.load(state, tmp_path / url, rename=rename, keys="o")
    # Renamed to the keys of the other class, the state is loaded.
    fresh = Renamed([*other.parameters()])
    state = {"model": other, "a": {"optim": fresh}}
    with pytest.warns(UserWarning, match="saved by SGD and is loaded into Renamed"):
        zarrckpt.load(state, tmp_path / "c", rename=lambda name: name.replace("momentum_buffer", "m"))
    expected = [slots["momentum_buffer"] for slots in optim.state.values()]
    torch.testing.assert_close([slots["m"] for slots in fresh.state.values()], expected, rtol=0, atol=0)


# -- state of no parameter


class Madgrad(torch.optim.SGD):
    """Keeps a counter in its state under a key that is no parameter."""

    def step(self, closure: Any = None) -> Any:
        self.state.setdefault("k", torch.zeros(1, dtype=torch.long)).add_(1)  # type: ignore[arg-type,call-overload]
        return super().step(closure)


class Emo(torch.optim.SGD):
    """Keeps values and a tensor in a dict."""

    def step(self, closure: Any = None) -> Any:
        emo = self.state.setdefault("emo", {"short": 0.5, "list": [1, 2], "deep": {}})  # type: ignore[arg-type]
        emo["short"] += 1
        emo["deep"]["mean"] = torch.full((3,), emo["short"])
        return super().step(closure)


class Trac(torch.optim.SGD):
    """Refers to parameters by number, and refuses other shapes."""

    def step(self, closure: Any = None) -> Any:
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        self.state.setdefault("trac", {i: p.detach().clone() for i, p in enumerate(parameters)})  # type: ignore[arg-type]
        return super().step(closure)

    def load_state_dict(self, state_dict: Any) -> None:
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for number, reference in state_dict["state"].get("trac", {}).items():
            if reference.shape != parameters[number].shape:
                raise ValueError("TRAC state does not match")
        super().load_state_dict(state_dict)


class Beside(torch.optim.SGD):
    """Keeps entries beside the state and the groups, from the first step on."""

    warmup: Any = None

    def step(self, closure: Any = None) -> Any:
        self.warmup = {"step": 1 + (self.warmup or {"step": 0})["step"], "scale": torch.tensor([0.25])}
        return super().step(closure)

    def state_dict(self) -> Any:
        return {**super().state_dict(), **({} if self.warmup is None else {"warmup": self.warmup})}

    def load_state_dict(self, state_dict: Any) -> None:
        self.warmup = state_dict.get("warmup")
        super().load_state_dict({key: state_dict[key] for key in ("state", "param_groups")})


class Slow(torch.optim.SGD):
    """Keeps a list with a tensor for each parameter beside the state, from the start."""

    def __init__(self, parameters: Any, **options: Any) -> None:
        super().__init__(parameters, **options)
        self.slow = [parameter.detach().clone() for parameter in self.param_groups[0]["params"]]

    def state_dict(self) -> Any:
        return {**super().state_dict(), "slow": self.slow}

    def load_state_dict(self, state_dict: Any) -> None:
        self.slow = state_dict["slow"]
        super().load_state_dict({key: state_dict[key] for key in ("state", "param_groups")})


def momentum(kind: Any) -> Callable[[Any], Any]:
    return lambda parameters: kind(parameters, lr=0.1, momentum=0.9)


@pytest.mark.parametrize("form", ["module", "dict"])
@pytest.mark.parametrize("kind", [Madgrad, Emo, Trac, Beside, Slow])
def test_state_of_no_parameter_is_restored(kind: Any, form: str, tmp_path: Path) -> None:
    net, optim = build("ab", 0, momentum(kind))
    start = FORMS[form](net, optim)
    zarrckpt.save(start, tmp_path / "start")
    train(net, optim, 3)
    zarrckpt.save(FORMS[form](net, optim), tmp_path / "c")
    torch.save({"model": net.state_dict(), "optim": optim.state_dict()}, tmp_path / "x.pt")
    zarrckpt.import_checkpoint(tmp_path / "x.pt", tmp_path / "file")
    saved = optim.state_dict()
    for url, steps in (("c", 0), ("c", 1), ("file", 0)):
        other, fresh = build("ab", 1, momentum(kind))
        train(other, fresh, steps)
        zarrckpt.load(FORMS[form](other, fresh), tmp_path / url)
        torch.testing.assert_close(fresh.state_dict(), saved, rtol=0, atol=0)
    if kind not in (Beside, Slow):
        zarrckpt.load(FORMS[form](other, fresh), tmp_path / "start")
        assert not fresh.state_dict()["state"]


class Closed(Madgrad):
    def load_state_dict(self, state_dict: Any) -> None:
        if "k" in state_dict["state"]:
            raise ValueError("unknown key")
        super().load_state_dict(state_dict)


class Dropping(Madgrad):
    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        self.state.pop("k", None)  # type: ignore[call-overload]


class Large(Madgrad):
    def step(self, closure: Any = None) -> Any:
        self.state["k"] = torch.zeros((16 << 20) + 1, dtype=torch.uint8)  # type: ignore[index,assignment]
        return super().step(closure)


@pytest.mark.parametrize("kind", [Closed, Dropping, Large])
def test_state_of_no_parameter_that_a_class_refuses_is_named(kind: Any, tmp_path: Path) -> None:
    net, optim = build("ab", 0, momentum(kind))
    train(net, optim)
    zarrckpt.save({"model": net, "optim": optim}, tmp_path / "c")
    state = dict(zip(("model", "optim"), build("ba", 1, momentum(kind)), strict=True))

    def refuse() -> None:
        with pytest.raises(zarrckpt.KeyMismatchError, match=r"'optim\.state\.k' is in the checkpoint"):
            zarrckpt.load(state, tmp_path / "c")

    assert _is_unchanged(state, refuse)


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("kind", [Trac, Slow])
def test_numbers_of_parameters_are_refused_in_another_order(kind: Any, steps: int, tmp_path: Path) -> None:
    net, optim = build("ab", 0, momentum(kind))
    train(net, optim)
    zarrckpt.save({"model": net, "optim": optim}, tmp_path / "c")
    other, fresh = build("ba", 1, momentum(kind))
    train(other, fresh, steps)
    state = {"model": other, "optim": fresh}
    name = r"state\.trac\.0" if kind is Trac else r"slow\.0"

    def refuse() -> None:
        with pytest.raises(zarrckpt.KeyMismatchError, match=rf"'optim\.{name}' has a number"):
            zarrckpt.load(state, tmp_path / "c")

    assert _is_unchanged(state, refuse)


def test_a_key_of_no_parameter_that_is_a_parameter_s_name_is_refused(tmp_path: Path) -> None:
    net, optim = build("ab", 0, momentum(Madgrad))
    train(net, optim)
    optim.state["a.weight"] = {"x": 1}  # type: ignore[index]
    with pytest.raises(zarrckpt.UnsupportedValueError, match=r"\['a\.weight'\]"):
        zarrckpt.save({"model": net, "optim": optim}, tmp_path / "c")
