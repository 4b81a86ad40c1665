"""Modules, optimizers and other Stateful objects to plain nested state, and back.

DCP's own rule for Stateful objects restores nothing of a fresh Adam, in silence: a fresh optimizer has no state
keys. So modules and optimizers go through ``torch.distributed.checkpoint.state_dict``, which gives canonical
names (compiled and wrapped models included) and makes the optimizer's state before a load.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    _init_optim_state,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.optim import Optimizer

from zarrckpt._distributed import global_rank
from zarrckpt._errors import UnsupportedValueError
from zarrckpt._optimizers import as_fsdp1_takes_it, first_step_named, gradients_kept, own_groups
from zarrckpt._per_rank import PerRank, refuse_sharded


@dataclass
class PlainState:
    """A user's state with every Module, Optimizer and Stateful object replaced by its state dict."""

    state: dict[Any, Any]
    restore: list[Callable[[], None]] = field(default_factory=list)
    """What hands the loaded state dicts back to their objects, to be called after a load, in order."""
    exact: list[str] = field(default_factory=list)
    """Flat-name prefixes of modules and optimizers: below them every entry of the checkpoint needs a target."""
    optimizers: list[OptimizerState] = field(default_factory=list)


@dataclass
class OptimizerState:
    """One optimizer's state dict while it is being loaded."""

    prefix: str
    optimizer: Optimizer
    state_dict: dict[str, Any]
    fresh: bool


def for_save(state: Mapping[Any, Any]) -> PlainState:
    """The state to save. An optimizer that has made no step yet is saved as such, and is not changed."""
    if isinstance(state, Mapping) and not holds_objects(state):
        return PlainState(dict(state))
    return _convert(state, _saved_optimizer, lambda prefix: True, lambda prefix, entry: global_rank(), PlainState({}))


def for_load(state: Mapping[Any, Any], wanted: Callable[[str], bool], source: RankOf, plain: PlainState) -> PlainState:
    """The targets of a load, gathered in ``plain`` (an empty one): fresh optimizers get their state allocated.

    Objects below whose flat-name prefix nothing is wanted are left alone, and stay as they are in the plain state.
    ``source`` says which rank's state a PerRank takes, if any.
    """
    return _convert(state, _loaded_optimizer, wanted, source, plain)


_LEAVES = frozenset({int, float, bool, str, bytes, type(None), Tensor, nn.Parameter})
_NO_OBJECTS = _LEAVES | {list, dict, tuple}

Convert = Callable[["PlainState", str, Optimizer, "nn.Module | None"], dict[str, Any]]
RankOf = Callable[[str, PerRank], int | None]
"""The rank under whose number a PerRank at a flat-name prefix stands; None where it is left out."""


def _convert(
    state: Mapping[Any, Any], optimizer: Convert, wanted: Callable[[str], bool], rank_of: RankOf, plain: PlainState
) -> PlainState:
    if not isinstance(state, Mapping):
        raise UnsupportedValueError(
            f"the state is a {type(state).__name__}, expected a dict such as {{'model': model, 'step': step}}"
        )
    modules = [value for value in _objects(state) if isinstance(value, nn.Module)]

    within: int | None = None

    def per_rank(entry: PerRank, prefix: str) -> dict[str, Any]:
        nonlocal within
        around = within
        # Inside another PerRank it is of the same rank.
        rank = rank_of(prefix, entry) if around is None else around
        if rank is None:
            return {}
        within = rank
        own = convert(entry.value, f"{prefix}{rank}.")
        within = around
        refuse_sharded(f"{prefix}{rank}", own)
        return {str(rank): own}

    def convert(value: Any, prefix: str) -> Any:
        if isinstance(value, PerRank):
            return per_rank(value, prefix)
        if is_object(value) and not wanted(prefix):
            return value
        if isinstance(value, nn.Module):
            return _module(plain, prefix, value)
        if isinstance(value, Optimizer):
            return optimizer(plain, prefix, value, _module_of(value, modules))
        if isinstance(value, Mapping) and not isinstance(value, Stateful):
            if not holds_objects(value):
                return value
            return in_order(value, lambda key: convert(value[key], f"{prefix}{key}."))
        if isinstance(value, list) and holds_objects(value):
            return [convert(item, f"{prefix}{i}.") for i, item in enumerate(value)]
        if isinstance(value, tuple) and any(map(is_object, value)):
            raise UnsupportedValueError(
                f"{prefix[:-1]!r} is a tuple of objects that are saved in parts: put them into a list or a dict"
            )
        if isinstance(value, Stateful):
            return _stateful(plain, value, lambda item: convert(item, prefix))
        return value

    plain.state = in_order(state, lambda key: convert(state[key], f"{key}."))
    return plain


def in_order(state: Mapping[Any, Any], make: Callable[[Any], Any]) -> dict[Any, Any]:
    """A dict of what ``make`` gives for each key, called in one order on all ranks, whatever order their dicts have.

    State dicts may be made and taken back with collectives (FSDP1 does): in another order on each rank they deadlock.
    """
    made = {key: make(key) for key in sorted(state, key=str)}
    return {key: made[key] for key in state}


def _objects(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield from _objects(value[key])
    elif isinstance(value, list):
        for item in value:
            yield from _objects(item)
    elif isinstance(value, tuple):
        yield from filter(is_object, value)  # which will be refused
    elif is_object(value):
        yield value
        if isinstance(value, PerRank):
            yield from _objects(value.value)


def is_object(value: Any) -> bool:
    """Whether a value is taken apart to be saved: what has a state dict, and PerRanks."""
    # Asking a protocol costs microseconds, which count in lists of a million numbers.
    return type(value) not in _NO_OBJECTS and isinstance(value, (nn.Module, Optimizer, PerRank, Stateful))


def holds_objects(value: Any) -> bool:
    """Whether a container holds, at any depth, what is taken apart to be saved."""
    if type(value) in _LEAVES:
        return False
    if isinstance(value, Mapping):
        return any(map(holds_objects, value.values()))
    if isinstance(value, list):
        return any(map(holds_objects, value))
    return any(map(is_object, value)) if isinstance(value, tuple) else is_object(value)


def given_back(target: Any, loaded: Any) -> Any:
    """What stands in the user's state after a load: the target's own objects and containers, holding loaded values.

    ``loaded`` is the part of a plain state that the target became.
    """
    if isinstance(target, PerRank):
        for value in loaded.values():  # one, or none where the target is left alone
            target.value = given_back(target.value, value)
        return target
    if is_object(target):
        return target
    if not holds_objects(target):
        return loaded
    for key, value in loaded.items() if isinstance(loaded, dict) else enumerate(loaded):
        back = given_back(target[key], value)
        if back is not target[key]:
            target[key] = back
    return target


def _module(plain: PlainState, prefix: str, module: nn.Module) -> dict[str, Any]:
    state_dict = get_model_state_dict(module)
    plain.exact.append(prefix)
    # strict=False: what is missing or unexpected was found and reported before the load.
    options = StateDictOptions(strict=False)
    plain.restore.append(lambda: void(set_model_state_dict(module, state_dict, options=options)))
    return state_dict


def void(_: object) -> None:
    """Drop a result."""


def _stateful(plain: PlainState, value: Stateful, convert: Callable[[Any], Any]) -> Any:
    state_dict = value.state_dict()
    if not any(isinstance(item, PerRank) for item in _objects(state_dict)):
        plain.restore.append(lambda: value.load_state_dict(state_dict))
        return state_dict
    taken = convert(state_dict)
    plain.restore.append(lambda: value.load_state_dict(given_back(state_dict, taken)))
    return taken


def _module_of(optimizer: Optimizer, modules: list[nn.Module]) -> nn.Module | None:
    """The module in the state that holds all of an optimizer's parameters; None where no module is in the state."""
    if not modules:
        return None
    wanted = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for module in modules:
        if wanted <= {id(p) for p in module.parameters()}:
            return module
    raise UnsupportedValueError(
        f"no module in the state holds all {len(wanted)} parameters of the {type(optimizer).__name__}, so they have no "
        "names: put the module that it trains into the state, or pass optimizer.state_dict() instead"
    )


def _saved_optimizer(plain: PlainState, prefix: str, optimizer: Optimizer, module: nn.Module | None) -> dict[str, Any]:
    if module is None:
        return optimizer.state_dict()
    fresh = not optimizer.state
    with gradients_kept(optimizer), first_step_named(prefix, optimizer):
        state_dict: dict[str, Any] = dict(get_optimizer_state_dict(module, optimizer))
    if fresh:
        # Getting the state dict made a first step with zero gradients, which would count as one.
        optimizer.state.clear()
        state_dict["state"] = {}
    return state_dict


def _loaded_optimizer(plain: PlainState, prefix: str, optimizer: Optimizer, module: nn.Module | None) -> dict[str, Any]:
    fresh = not optimizer.state
    with gradients_kept(optimizer), first_step_named(prefix, optimizer):
        if module is None:
            _init_optim_state(optimizer)
            state_dict = optimizer.state_dict()
        else:
            state_dict = dict(get_optimizer_state_dict(module, optimizer))
    plain.exact.append(prefix)
    plain.optimizers.append(OptimizerState(prefix, optimizer, state_dict, fresh))
    names = [group["params"] for group in state_dict["param_groups"]]

    def restore() -> None:
        if module is None:
            optimizer.load_state_dict(state_dict)
        else:
            state_dict["param_groups"] = own_groups(prefix, names, state_dict["param_groups"])
            taken = as_fsdp1_takes_it(module, state_dict)
            # strict=False: a parameter that never had a gradient has no state.
            set_optimizer_state_dict(module, optimizer, taken, options=StateDictOptions(strict=False))

    plain.restore.append(restore)
    return state_dict


def drop_unsaved(plain: PlainState, saved: set[str], asked_for: Callable[[str], bool]) -> None:
    """Remove the state of parameters for which nothing will be loaded, so that it ends as it was saved.

    A parameter that never had a gradient has no state, though a fresh optimizer was given one to load into. ``saved``
    are the names to load; what a trained optimizer has under names that nobody asked for stays.
    """
    names = sorted(saved)
    for entry in plain.optimizers:
        for name, slots in list(entry.state_dict["state"].items()):
            stem = f"{entry.prefix}state.{name}."
            place = bisect.bisect_left(names, stem)
            if place < len(names) and names[place].startswith(stem):
                continue
            if entry.fresh or any(asked_for(f"{stem}{slot}") for slot in slots):
                del entry.state_dict["state"][name]


def refuse_fsdp1(state: Any) -> None:
    """Raise UnsupportedValueError for a module of FSDP1 where one rank saves or loads alone.

    All its ranks together make its state dict, so this one would wait for the others.
    """
    for key in state if isinstance(state, Mapping) else ():
        for value in _objects(state[key]):
            within = FullyShardedDataParallel.fsdp_modules(value) if isinstance(value, nn.Module) else []
            if any(dist.get_world_size(fsdp.process_group) > 1 for fsdp in within):
                raise UnsupportedValueError(
                    f"{key!r} has a module of FSDP1 (FullyShardedDataParallel), whose state dict needs all its ranks: "
                    "leave no_dist out and call it on all of them"
                )
