"""Versions of modules: checkpoints keep them, and loads pass them to modules, which convert entries of other versions.

Oracles: the metadata of ``torch.load``, and ``torch.load`` with ``load_state_dict``.
"""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness.page_reader import Reader
from harness.ranks import all_ranks_raise, run_ranks
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import zarrckpt


class Layer(nn.Module):
    """Version 1."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.arange(9.0).view(3, 3))
        self.v = nn.Parameter(torch.full((3,), 7.0))


class NewLayer(Layer):
    """Version 2, with the transposed weight."""

    _version = 2

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *others: Any) -> None:
        if metadata.get("version") != 2 and f"{prefix}w" in state:
            state[f"{prefix}w"] = state[f"{prefix}w"].T
        super()._load_from_state_dict(state, prefix, metadata, *others)


class Net(nn.Module):
    def __init__(self, layer: type[Layer]) -> None:
        super().__init__()
        self.a = layer()
        self.act = nn.ReLU()
        self.seq = nn.Sequential(nn.BatchNorm1d(3), layer())


class Average:
    """A Stateful with the state dict of a module."""

    def __init__(self, layer: type[Layer]) -> None:
        self.net = Net(layer)

    def state_dict(self) -> dict[str, Any]:
        return {"net": self.net.state_dict(), "count": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.net.load_state_dict(state["net"])


def versions(state_dict: Any) -> dict[str, int]:
    assert all(row.keys() == {"version"} for row in state_dict._metadata.values())
    return {path: row["version"] for path, row in state_dict._metadata.items()}


NEW = versions(Net(NewLayer).state_dict())
OLD = versions(Net(Layer).state_dict())


def _opened(url: str, state: Any) -> Any:
    zarrckpt.save(state, url)
    return zarrckpt.open(url).load()


def _saved_in_background(url: str, state: Any) -> Any:
    zarrckpt.async_save(state, url).result()
    return zarrckpt.open(url).load()


def _copied(url: str, state: Any) -> Any:
    zarrckpt.save(state, url)
    zarrckpt.copy(url, f"{url}-copy", chunks=(2, 2), dtype="float64")
    return zarrckpt.open(f"{url}-copy").load()


def _exported(url: str, state: Any) -> Any:
    zarrckpt.save(state, url)
    zarrckpt.to_torch_save(url, f"{url}.pt")
    return torch.load(f"{url}.pt")


def _imported(url: str, state: Any) -> Any:
    torch.save(state, f"{url}.pt")
    zarrckpt.import_checkpoint(f"{url}.pt", url, prefix="up.above")
    return zarrckpt.open(url).load()["up"]["above"]


def _saved_by_dcp(url: str, state: Any) -> Any:
    dcp.save(state, storage_writer=zarrckpt.ZarrStorageWriter(url), planner=zarrckpt.ZarrSavePlanner())
    return zarrckpt.open(url).load()


def _loaded_without_target(url: str, state: Any) -> Any:
    zarrckpt.save({"state": state}, url)
    target: dict[str, Any] = {"state": None}
    zarrckpt.load(target, url)
    return target["state"]


@pytest.mark.parametrize(
    "way", [_opened, _saved_in_background, _copied, _exported, _imported, _saved_by_dcp, _loaded_without_target]
)
def test_state_dicts_come_back_with_their_versions(way: Callable[[str, Any], Any], tmp_path: Path) -> None:
    found = NEW | {"a": -3, "seq": 2**62}
    given = Net(NewLayer).state_dict()
    for path, version in found.items():
        given._metadata[path] = {"version": version, "assign_to_params_buffers": True}
    state = {"m": given, "deep": [{"x.y": Net(Layer).state_dict()}, {"none": OrderedDict(w=torch.ones(2))}]}
    back = way(str(tmp_path / "a"), state)
    assert versions(back["m"]) == found
    assert versions(back["deep"][0]["x.y"]) == OLD
    assert not hasattr(back["deep"][1]["none"], "_metadata")
    if way is not _saved_by_dcp:  # DCP passes a plain dict to the planner.
        assert versions(way(str(tmp_path / "top"), given)) == found


def test_the_format_page_describes_the_versions(tmp_path: Path) -> None:
    deep = NewLayer()
    for _ in range(130):
        deep = nn.Sequential(deep)  # type: ignore[assignment]
    state, url = {"m": Net(NewLayer).state_dict(), "deep": deep.state_dict()}, tmp_path / "c"
    del state["m"]._metadata["seq"]
    zarrckpt.save(state, url)
    reader, opened = Reader(url), zarrckpt.open(url).load()
    for name, given in state.items():
        assert reader.versions(name) == versions(opened[name]) == versions(given)
    assert reader.own["versions"]["m"] == {"a": 2, "act": 1, "seq": None, "seq.0": 2, "seq.1": 2}


def test_parts_of_state_dicts_have_their_versions(tmp_path: Path) -> None:
    url, file = str(tmp_path / "c"), tmp_path / "c.pt"
    zarrckpt.save({"m": Net(NewLayer), "rest": Average(NewLayer)}, url)
    opened = zarrckpt.open(url)
    assert versions(opened.load("m.seq")["m"]) == NEW
    assert versions(opened.load("rest")["rest"]["net"]) == NEW
    for strip, expected in (("m", NEW), ("m.seq", versions(Net(NewLayer).seq.state_dict()))):
        zarrckpt.to_torch_save(url, file, strip, strip=strip, overwrite=True)
        assert versions(torch.load(file)) == expected
    zarrckpt.copy(opened.select("m.a"), f"{url}-part")
    assert versions(zarrckpt.open(f"{url}-part").load()["m"])["a"] == 2
    target: dict[str, Any] = {"n": {"m": None}, "rest": Net(Layer).state_dict()}
    zarrckpt.load(target, url, rename={"m": "n.m", "rest.net": "rest"}, keys=["n", "rest.a", "rest.seq"])
    assert versions(target["n"]["m"]) == versions(target["rest"]) == NEW


def test_a_scripted_module_is_saved_and_loaded(tmp_path: Path) -> None:
    module = torch.jit.script(nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3)))
    zarrckpt.save({"m": module}, tmp_path / "c")
    other = torch.jit.script(nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3)))
    zarrckpt.load({"m": other}, tmp_path / "c")
    assert _equal(other, module)
    assert versions(zarrckpt.open(tmp_path / "c").load()["m"]) == versions(module.state_dict())


class Noting(NewLayer):
    """Adds a member to the metadata of its state dict, and needs it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_state_dict_post_hook(lambda module, state, prefix, metadata: metadata.update(heads=7))

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *others: Any) -> None:
        assert metadata["heads"] == 7
        super()._load_from_state_dict(state, prefix, metadata, *others)


@pytest.mark.parametrize("form", ["module", "state dict", "Stateful"])
def test_a_target_keeps_other_members_of_its_metadata(form: str, tmp_path: Path) -> None:
    old, new = Net(Layer), Net(Noting)
    zarrckpt.save({"m": {"net": old.state_dict(), "count": 1} if form == "Stateful" else old}, tmp_path / "c")
    average = Average(Noting)
    average.net = new
    loaded = copy.deepcopy(new.state_dict())
    target = {"module": new, "state dict": loaded, "Stateful": average}[form]
    with warnings.catch_warnings(record=True):  # of state dicts
        zarrckpt.load({"m": target}, tmp_path / "c")
    if form == "state dict":
        new.load_state_dict(loaded)
    assert _equal(new, _converted(old))


def test_versions_other_than_integers_are_named_and_left_out(tmp_path: Path) -> None:
    net = nn.Sequential(Layer(), Layer(), Layer())
    net[0]._version, net[1]._version, net[2]._version = "new", True, 1 << 70  # type: ignore[assignment]
    with pytest.warns(UserWarning, match="module '0' has the version 'new'"):
        zarrckpt.save({"m": net}, tmp_path / "c")
    assert versions(zarrckpt.open(tmp_path / "c").load()["m"]) == {"": 1}


def _converted(old: nn.Module) -> nn.Module:
    new = copy.deepcopy(old)
    for module in new.modules():
        if type(module) is Layer:
            module.w.data = module.w.data.T.clone()
    return new


def _equal(module: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(one, two) for one, two in zip(module.parameters(), other.parameters(), strict=True))


def _wrapped(kind: str, net: Net) -> nn.Module:
    if kind == "compiled":
        return torch.compile(net, backend="eager")  # type: ignore[return-value]
    if kind == "checkpointed":
        net.a = checkpoint_wrapper(net.a)
        net.seq[1] = torch.compile(checkpoint_wrapper(net.seq[1]), backend="eager")  # type: ignore[call-overload]
    return net


@pytest.mark.parametrize("kind", ["plain", "compiled", "checkpointed"])
def test_modules_convert_entries_of_another_version(kind: str, tmp_path: Path) -> None:
    """The check after the load lists them and is silent."""
    old, url = Net(Layer), str(tmp_path / "c")
    zarrckpt.save({"m": old, "average": Average(Layer), "one": zarrckpt.PerRank(old.a)}, url)
    net, average, one = Net(NewLayer), Average(NewLayer), NewLayer()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        state = {"m": _wrapped(kind, net), "average": average, "one": zarrckpt.PerRank(one)}
        report = zarrckpt.load(state, url)
    expected = _converted(old)
    assert _equal(net, expected) and _equal(average.net, expected) and _equal(one, expected.get_submodule("a"))
    assert report.changed == ("average.net.a.w", "average.net.seq.1.w", "m.a.w", "m.seq.1.w", "one.0.w")

    zarrckpt.save({"m": state["m"]}, f"{url}-new")
    other = Net(NewLayer)
    assert zarrckpt.load({"m": other}, f"{url}-new").changed == () and _equal(other, expected)
    other.load_state_dict(zarrckpt.open(f"{url}-new").load()["m"])
    assert _equal(other, expected)


def test_only_loaded_entries_are_converted(tmp_path: Path) -> None:
    old, url = Net(Layer), str(tmp_path / "c")
    zarrckpt.save({"m": old}, url)
    for keys, converted in ((["m.seq"], "seq.1"), (["m.a.w"], "a"), (["m.a.v"], None)):
        net = Net(NewLayer)
        zarrckpt.load({"m": net}, url, keys=keys)
        for path in ("a", "seq.1"):
            w = net.get_submodule(path).w
            assert torch.equal(w, old.a.w.T if path == converted else old.a.w), (keys, path)
    net = Net(NewLayer)
    zarrckpt.load({"x": nn.ModuleDict({"n": net})}, url, rename=lambda name: f"x.n.{name[2:]}")
    assert _equal(net, _converted(old))
    zarrckpt.load({"x": (part := NewLayer())}, url, rename={"m.a": "x"}, keys="x")
    assert torch.equal(part.w, old.a.w.T)
    with pytest.raises(zarrckpt.KeyMismatchError, match=r"'m' to 'a' and 'b'.*versions 1 and 2"):
        zarrckpt.save({"a": nn.ParameterDict({"w": torch.ones(2)}), "b": NewLayer()}, f"{url}2")
        zarrckpt.load({"m": None}, f"{url}2", rename={"a": "m", "b.v": "m.v", "b.w": "m.x"})


def test_versions_follow_keys_without_wrappers(tmp_path: Path) -> None:
    """torch removes wrappers from the keys of a state dict, but not from its metadata."""
    net, url = Net(Layer), str(tmp_path / "c")
    net.a = checkpoint_wrapper(net.a)
    compiled: Any = torch.compile(net, backend="eager")
    zarrckpt.save({"m": get_model_state_dict(compiled)}, url)
    loaded = zarrckpt.open(url).load()["m"]
    assert loaded.keys() == Net(Layer).state_dict().keys()
    assert versions(loaded).items() >= {path: version for path, version in OLD.items() if path != "act"}.items()
    new, other = Net(NewLayer), Net(NewLayer)
    zarrckpt.load({"m": new}, url)
    other.load_state_dict(loaded)
    assert _equal(new, _converted(Net(Layer))) and _equal(other, new)
    compiled.a._checkpoint_wrapped_module._version = 7
    zarrckpt.save({"m": (state := compiled.state_dict())}, url, overwrite=True)
    assert versions(zarrckpt.open(url).load()["m"]) == versions(state) | {"_orig_mod.a": 7}


def test_plain_state_dicts_are_filled_in_place_and_get_the_versions(tmp_path: Path) -> None:
    """A warning names modules of other versions, because torch cannot convert a tensor into its own memory."""
    url = str(tmp_path / "c")
    zarrckpt.save({"m": Net(Layer)}, url)
    target = Net(NewLayer).state_dict()
    memory = {name: tensor.data_ptr() for name, tensor in target.items()}
    with pytest.warns(UserWarning, match=r"\['m\.a', 'm\.seq\.1'\] in state dicts"):
        zarrckpt.load({"m": target}, url)
    assert {name: tensor.data_ptr() for name, tensor in target.items()} == memory
    assert versions(target) == OLD
    loaded = Net(NewLayer).state_dict()
    dcp.load({"m": loaded}, storage_reader=zarrckpt.ZarrStorageReader(url), planner=zarrckpt.ZarrLoadPlanner())
    assert versions(loaded) == OLD


def _swap(state: Any, prefix: str) -> None:
    state[f"{prefix}a"], state[f"{prefix}b"] = state[f"{prefix}b"], state[f"{prefix}a"]


def _in_place(state: Any, prefix: str) -> None:
    state[f"{prefix}a"].mul_(3)


def _transpose(state: Any, prefix: str) -> None:
    state[f"{prefix}w"] = state[f"{prefix}w"].T


def _split(state: Any, prefix: str) -> None:
    for name, part in zip("abc", state.pop(f"{prefix}abc").chunk(3), strict=True):
        state[f"{prefix}{name}"] = part


def _join(state: Any, prefix: str) -> None:
    state[f"{prefix}abc"] = torch.cat([state.pop(f"{prefix}{name}") for name in "abc"])


def _quantize(state: Any, prefix: str) -> None:
    weight = state.pop(f"{prefix}w")
    state[f"{prefix}scale"] = scale = weight.abs().max() / 127
    state[f"{prefix}q"] = (weight / scale).round().to(torch.int8)


def _rename_child(state: Any, prefix: str) -> None:
    for name in ("weight", "bias"):
        state[f"{prefix}new.{name}"] = state.pop(f"{prefix}old.{name}")


def _tensors(**shapes: tuple[int, ...]) -> Callable[[nn.Module], None]:
    def make(module: nn.Module) -> None:
        for name, shape in shapes.items():
            dtype = torch.int8 if name == "q" else torch.float32
            module.register_buffer(name, torch.randn(shape).to(dtype))

    return make


_CONVERSIONS: dict[str, tuple[Any, Any, Any]] = {
    "swap": (_tensors(a=(2, 2), b=(2, 2)), _tensors(a=(2, 2), b=(2, 2)), _swap),
    "in place": (_tensors(a=(2, 2), b=(2, 2)), _tensors(a=(2, 2), b=(2, 2)), _in_place),
    "shape": (_tensors(w=(4, 2)), _tensors(w=(2, 4)), _transpose),
    "split": (_tensors(abc=(6, 2)), _tensors(a=(2, 2), b=(2, 2), c=(2, 2)), _split),
    "join": (_tensors(a=(2, 2), b=(2, 2), c=(2, 2)), _tensors(abc=(6, 2)), _join),
    "quantize": (_tensors(w=(4, 2)), _tensors(q=(4, 2), scale=()), _quantize),
    "child": (
        lambda module: module.add_module("old", nn.Linear(2, 3)),
        lambda module: module.add_module("new", nn.Linear(2, 3)),
        _rename_child,
    ),
}


class Old(nn.Module):
    def __init__(self, make: Callable[[nn.Module], None]) -> None:
        super().__init__()
        make(self)


class Converting(Old):
    _version = 5

    def __init__(self, make: Callable[[nn.Module], None], convert: Callable[[Any, str], None]) -> None:
        super().__init__(make)
        self.convert = convert

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *others: Any) -> None:
        if metadata.get("version") == 1:
            self.convert(state, prefix)
        super()._load_from_state_dict(state, prefix, metadata, *others)


@pytest.mark.parametrize("kind", _CONVERSIONS)
def test_conversions_may_change_names_shapes_and_order(kind: str, tmp_path: Path) -> None:
    before, after, convert = _CONVERSIONS[kind]
    old, url = nn.Sequential(Old(before), torch.compile(Old(before), backend="eager")), str(tmp_path / "c")  # type: ignore[arg-type]
    modules = (Converting(after, convert) for _ in range(4))
    expected, new = (
        nn.Sequential(next(modules), torch.compile(next(modules), backend="eager"))  # type: ignore[arg-type]
        for _ in range(2)
    )
    zarrckpt.save({"m": old}, url)
    torch.save(old.state_dict(), f"{url}.pt")
    expected.load_state_dict(torch.load(f"{url}.pt"))
    report = zarrckpt.load({"m": new}, url)
    state = expected.state_dict()
    assert state.keys() == new.state_dict().keys()
    assert all(torch.equal(value, state[name]) for name, value in new.state_dict().items())
    assert report.changed and report.missing == report.unexpected == ()


def test_missing_entries_stay_errors_before_a_change(tmp_path: Path) -> None:
    """Even if a conversion would make them from nothing, as in BatchNorm before version 2."""
    old, url = nn.Sequential(nn.BatchNorm1d(3), Layer()), str(tmp_path / "c")
    state = old.state_dict()
    del state["0.num_batches_tracked"]
    state._metadata["0"]["version"] = 1
    zarrckpt.save({"m": state}, url)
    new = nn.Sequential(nn.BatchNorm1d(3), NewLayer())
    new[1].w.data.fill_(5)
    before = copy.deepcopy(new.state_dict())
    with pytest.raises(zarrckpt.KeyMismatchError, match=r"'m\.0\.num_batches_tracked' is not in the checkpoint"):
        zarrckpt.load({"m": new}, url)
    assert all(torch.equal(value, before[name]) for name, value in new.state_dict().items())
    zarrckpt.load({"m": new}, url, strict=False)
    assert torch.equal(new[1].w, old[1].w.T)


def test_checkpoints_without_versions_keep_those_of_the_module(tmp_path: Path) -> None:
    zarrckpt.save({"m": dict(Net(Layer).state_dict())}, tmp_path / "c")
    net = Net(NewLayer)
    assert zarrckpt.load({"m": net}, tmp_path / "c").changed == ()
    assert torch.equal(net.a.w, Layer().w)


# -- ranks


def _sharded(url: str) -> None:
    rank = dist.get_rank()
    stage = nn.ModuleDict({f"stage{rank}": NewLayer() if rank else Layer()})
    fsdp2, ddp = fully_shard(Net(NewLayer)), DistributedDataParallel(Net(NewLayer))
    fsdp1 = FullyShardedDataParallel(Net(NewLayer), device_id=torch.device("cpu"), use_orig_params=True)
    state = {"fsdp2": fsdp2, "ddp": ddp, "fsdp1": fsdp1, "stages": stage, "own": zarrckpt.PerRank(NewLayer())}
    zarrckpt.save(state, url)
    zarrckpt.save({name: Net(Layer) for name in ("fsdp2", "ddp", "fsdp1")}, f"{url}-old")
    found = zarrckpt.open(url).load()
    for name in ("fsdp2", "ddp", "fsdp1"):
        assert versions(found[name]) == NEW, name
    assert versions(found["stages"]) == {"": 1, "stage0": 1, "stage1": 2}
    assert versions(found["own"]["ranks"]) == {"": 2}

    report = zarrckpt.load({"fsdp2": fsdp2, "ddp": ddp}, f"{url}-old", keys=["fsdp2", "ddp"])
    assert report.changed == ("ddp.a.w", "ddp.seq.1.w", "fsdp2.a.w", "fsdp2.seq.1.w")
    expected = _converted(Net(Layer))
    assert _equal(ddp.module, expected)
    assert all(
        torch.equal(one.full_tensor(), two)  # type: ignore[attr-defined]
        for one, two in zip(fsdp2.parameters(), expected.parameters(), strict=True)
    )
    with pytest.raises(zarrckpt.UnsupportedLayoutError, match="FSDP1 cannot convert"):
        zarrckpt.load({"fsdp1": fsdp1}, f"{url}-old", keys="fsdp1")
    zarrckpt.load({"fsdp1": fsdp1}, url, keys="fsdp1")
    with FullyShardedDataParallel.summon_full_params(fsdp1):
        assert _equal(fsdp1, Net(NewLayer))
    own = NewLayer()
    zarrckpt.load({"own": zarrckpt.PerRank(own)}, url, keys="own")
    assert torch.equal(own.w, NewLayer().w)


def test_versions_of_ranks_are_merged(tmp_path: Path) -> None:
    run_ranks(_sharded, str(tmp_path / "c"), world_size=2)


def _conflicting(url: str) -> None:
    zarrckpt.save({"m": NewLayer() if dist.get_rank() else Layer()}, url)


def test_different_versions_on_ranks_are_refused_before_a_write(tmp_path: Path) -> None:
    message = all_ranks_raise(zarrckpt.UnsupportedLayoutError, _conflicting, str(tmp_path / "c"), world_size=2)
    assert message.startswith("module 'm' has version 2 on rank 1, but version 1 on a lower rank")
    assert not (tmp_path / "c").exists()
