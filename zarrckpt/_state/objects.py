"""Modules, optimizers and other Stateful objects to plain nested state, and back.

DCP's own rule for Stateful objects restores nothing of a fresh Adam, in silence: a fresh optimizer has no state
keys. So modules and optimizers are taken apart here, under names that hold for every wrapper of a module.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from zarrckpt._errors import UnsupportedValueError
from zarrckpt._ranks.group import global_rank
from zarrckpt._state.flatten import OwnRank
from zarrckpt._state.modules import ModuleState
from zarrckpt._state.optimizer_forms import has_torch_form
from zarrckpt._state.optimizers import OptimizerTarget, SavedEntries, saved_state
from zarrckpt._state.per_rank import PerRank, refuse_sharded
from zarrckpt._state.random_state import kept_random_state
from zarrckpt._state.torch_kinds import fsdp1_modules, is_zero_optimizer


@runtime_checkable
class Stateful(Protocol):
    """What has a state dict: the protocol of ``torch.distributed.checkpoint.stateful``, which is slow to import."""

    def state_dict(self) -> dict[str, Any]:
        """What to save."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take what was loaded."""


Keys = tuple[Any, ...]
"""Where an object stands in the state: a key or a list's position for each level."""


@dataclass
class PlainState:
    """A user's state with every Module, Optimizer and Stateful object replaced by its state dict."""

    state: dict[Any, Any]
    restore: list[tuple[Keys, Callable[[Any], None]]] = field(default_factory=list)
    """Where the state dict of each object stands, and what hands it back to the object after a load, in order."""
    exact: list[str] = field(default_factory=list)
    """Flat-name prefixes of modules and optimizers: below them every entry of the checkpoint needs a target."""
    closed: set[str] = field(default_factory=set)
    """Flat names of dicts that take nothing where they are empty: a module's, and that of an optimizer's state."""
    optimizers: list[OptimizerTarget] = field(default_factory=list)
    statefuls: list[str] = field(default_factory=list)
    """Flat-name prefixes of other Stateful objects: they may change what they take."""
    unreadable: dict[str, Exception] = field(default_factory=dict)
    """The errors of ``state_dict`` calls after a load, by the flat-name prefix of the object."""

    unasked: list[str] = field(default_factory=list)
    """Flat-name prefixes of objects whose ``state_dict`` is not called after a load."""

    def is_of_stateful(self, fqn: str) -> bool:
        """Whether an entry is of an object that may change what it takes: neither a module nor an optimizer."""
        return any(f"{fqn}.".startswith(prefix) for prefix in self.statefuls)

    per_rank: set[str] = field(default_factory=set)
    """Flat names of the values of PerRanks."""

    def give_back(self) -> None:
        """Objects take their loaded state dicts back, in one order on all ranks."""
        for keys, restore in self.restore:
            loaded: Any = self.state
            for key in keys:
                loaded = loaded[key]
            restore(loaded)


def for_save(state: Mapping[Any, Any]) -> PlainState:
    """The state to save. An optimizer that has made no step yet is saved as such, and is not changed."""
    if isinstance(state, Mapping) and not holds_objects(state):
        return PlainState(dict(state))
    return _convert(state, None, lambda prefix, entry: global_rank())


def for_load(state: Mapping[Any, Any], saved: SavedEntries, source: RankOf) -> PlainState:
    """The targets of a load: optimizers get memory for the state that they lack.

    Objects of which nothing is asked for are left alone, and stay as they are in the plain state. ``source`` says which
    rank's state a PerRank takes, if any.
    """
    return _convert(state, saved, source)


def for_check(state: Mapping[Any, Any], loaded: PlainState, source: RankOf) -> PlainState:
    """The state after a load, under the names of its targets. Only what was loaded into is converted.

    Optimizers name their parameters as in the load. Collective where the state dicts of the objects are.
    """
    return _convert(state, None, source, loaded)


_LEAVES = frozenset({int, float, bool, str, bytes, type(None), Tensor, nn.Parameter})
_NO_OBJECTS = _LEAVES | {list, dict, tuple}

RankOf = Callable[[str, PerRank], int | None]
"""The rank under whose number a PerRank at a flat-name prefix stands; None where it is left out."""


def _convert(
    state: Mapping[Any, Any], saved: SavedEntries | None, rank_of: RankOf, loaded: PlainState | None = None
) -> PlainState:
    """The plain state to save; if ``saved`` is given, to load into; if ``loaded`` is given, after that load."""
    if not isinstance(state, Mapping):
        raise UnsupportedValueError(
            f"the state is a {type(state).__name__}, expected a dict such as {{'model': model, 'step': step}}"
        )
    modules = [value for value in _objects(state) if isinstance(value, nn.Module)]
    plain = PlainState({})
    targets = None if loaded is None else {keys for keys, _ in loaded.restore}
    within: int | None = None

    def per_rank(entry: PerRank, keys: Keys) -> dict[str, Any]:
        nonlocal within
        around = within
        # Inside another PerRank it is of the same rank.
        rank = rank_of(prefix_of(keys), entry) if around is None else around
        if rank is None:
            return {}
        within = rank
        plain.per_rank.add(f"{prefix_of(keys)}{rank}")
        own = convert(entry.value, (*keys, str(rank)))
        within = around
        refuse_sharded(f"{prefix_of(keys)}{rank}", own)
        return OwnRank({str(rank): own})

    def convert(value: Any, keys: Keys) -> Any:
        if type(value) in _LEAVES:
            return value
        if isinstance(value, PerRank):
            return per_rank(value, keys)
        if is_object(value) and saved is not None and not saved.wants(prefix_of(keys)):
            return value
        if targets is not None and is_object(value) and keys not in targets:
            return value
        if isinstance(value, nn.Module):
            return _module(plain, keys, value, saved)
        if isinstance(value, Optimizer) and has_torch_form(value):
            if loaded is not None:
                return next(target for target in loaded.optimizers if target.keys == keys).current_state()
            return _optimizer(plain, keys, value, _module_of(value, modules), saved)
        if isinstance(value, Mapping) and not isinstance(value, Stateful):
            if not holds_objects(value):
                return value
            return in_order(value, lambda key: convert(value[key], (*keys, key)))
        if isinstance(value, list) and holds_objects(value):
            return [convert(item, (*keys, i)) for i, item in enumerate(value)]
        if isinstance(value, tuple) and any(map(is_object, value)):
            raise UnsupportedValueError(
                f"{prefix_of(keys)[:-1]!r} is a tuple of objects that are saved in parts: make it a list or a dict"
            )
        if loaded is not None and isinstance(value, Stateful) and holds_loader(value):
            plain.unasked.append(prefix_of(keys))
            return value
        if isinstance(value, Stateful):
            try:
                with nullcontext() if loaded is None else kept_random_state():
                    return _stateful(plain, keys, value, lambda item: convert(item, keys))
            except Exception as err:
                if loaded is None:
                    raise
                plain.unreadable[prefix_of(keys)] = err
        return value

    plain.state = in_order(state, lambda key: convert(state[key], (key,)))
    return plain


def prefix_of(keys: Keys) -> str:
    """What the flat names of entries below some keys begin with."""
    return "".join(f"{key}." for key in keys)


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


def holds_loader(value: Any, depth: int = 2) -> bool:
    """Whether an object is a data loader, or has one in its attributes.

    Calling ``state_dict`` of one that has not begun its epoch begins it: samplers draw, and workers start.
    """
    loader: Any = getattr(sys.modules.get("torch.utils.data"), "DataLoader", None)
    if loader is None or isinstance(value, loader):
        return loader is not None
    own = getattr(value, "__dict__", None)
    return depth > 0 and isinstance(own, dict) and any(holds_loader(item, depth - 1) for item in own.values())


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
    if isinstance(target, list) and isinstance(loaded, list):
        own = [*target, *[None] * len(loaded)]
        target[:] = [given_back(item, value) for item, value in zip(own, loaded, strict=False)]
        return target
    if not (isinstance(target, MutableMapping) and isinstance(loaded, Mapping)):
        return loaded
    for key in target.keys() - loaded.keys():
        del target[key]
    for key, value in loaded.items():
        back = given_back(target.get(key), value)
        if key not in target or back is not target[key]:
            target[key] = back
    return target


def _module(plain: PlainState, keys: Keys, module: nn.Module, saved: SavedEntries | None) -> dict[str, Any]:
    state = ModuleState(module)
    prefix = prefix_of(keys)
    if saved is not None:
        state.resize(prefix, saved)
    plain.exact.append(prefix)
    plain.closed.add(prefix[:-1])
    plain.restore.append((keys, state.restore))
    return state.entries


def _optimizer(
    plain: PlainState, keys: Keys, optimizer: Optimizer, module: nn.Module | None, saved: SavedEntries | None
) -> dict[str, Any]:
    if saved is None:
        return saved_state(optimizer, module)
    target = OptimizerTarget(keys, optimizer, module, saved)
    plain.exact.append(target.prefix)
    plain.closed.add(f"{target.prefix}state")
    plain.optimizers.append(target)
    plain.restore.append((keys, target.restore))
    return target.state_dict


def _stateful(plain: PlainState, keys: Keys, value: Stateful, convert: Callable[[Any], Any]) -> Any:
    plain.statefuls.append(prefix_of(keys))
    state_dict = value.state_dict()
    if not any(isinstance(item, PerRank) for item in _objects(state_dict)):
        plain.restore.append((keys, value.load_state_dict))
        return state_dict
    converted = convert(state_dict)
    plain.restore.append((keys, lambda loaded: value.load_state_dict(given_back(state_dict, loaded))))
    return converted


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


def _references(value: object) -> int:
    return sys.getrefcount(value)


_UNHELD = _references({})
"""What a function counts for an argument that its caller keeps no reference to."""


def droppable_keys(state: Any, references: int) -> frozenset[str]:
    """The keys of plain dicts that nothing holds but the state, if nothing but a call's argument holds the state.

    ``references`` is ``sys.getrefcount(state)`` in the function that the user called.
    """
    held: dict[str, Any] = {}
    if not isinstance(state, dict) or references > _UNHELD or _references(held) <= _UNHELD:
        return frozenset()
    return frozenset(key for key in state if isinstance(state[key], dict) and sys.getrefcount(state[key]) <= 2)


Levels = tuple[str | None, ...]
"""The keys that lead to an object; None for the number of a rank."""


def optimizers_and_modules(state: Any) -> list[tuple[Levels, Levels]]:
    """Return where each optimizer of a state stands, and where the module that it trains does."""
    found: list[tuple[Levels, Any]] = []

    def walk(value: Any, keys: Levels) -> None:
        if isinstance(value, nn.Module | Optimizer):
            found.append((keys, value))
        elif isinstance(value, PerRank):
            walk(value.value, (*keys, None))
        elif isinstance(value, Mapping | list) and not isinstance(value, Stateful) and holds_objects(value):
            for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
                walk(item, (*keys, str(key)))

    walk(state, ())
    modules = {id(value): keys for keys, value in found if isinstance(value, nn.Module)}
    own = [value for _, value in found if isinstance(value, nn.Module)]
    pairs = [(keys, _module_of(value, own)) for keys, value in found if isinstance(value, Optimizer)]
    return [(keys, modules[id(module)]) for keys, module in pairs if module is not None]


def rest_below(name: str, place: Levels) -> str | None:
    """Return the rest of a name below a place in the state; None if it is not there."""
    keys = name.split(".", len(place))
    is_there = len(keys) > len(place) and all(own in (None, key) for own, key in zip(place, keys, strict=False))
    return keys[-1] if is_there else None


def refuse_swapped(state: Any, url: Any, call: str) -> None:
    """Raise UnsupportedValueError where the url stands in the place of the state."""
    if isinstance(state, str | os.PathLike) and isinstance(url, Mapping):
        raise UnsupportedValueError(f"the arguments are in the wrong order: {call}(state, url)")


def refuse_objects_of_ranks(state: Any) -> None:
    """Raise UnsupportedValueError for a module of FSDP1 or a ZeroRedundancyOptimizer if one rank saves or loads alone.

    All ranks together make the state dict of such a module, so this one would wait for the others. The optimizer has a
    part of its state on each rank.
    """
    for key in state if isinstance(state, Mapping) else ():
        for value in _objects(state[key]):
            kind, groups = "", []
            if isinstance(value, nn.Module):
                kind = "a module of FSDP1 (FullyShardedDataParallel)"
                groups = [fsdp.process_group for fsdp in fsdp1_modules(value)]
            elif is_zero_optimizer(value):
                kind, groups = "a ZeroRedundancyOptimizer", [value.process_group]
            if any(dist.get_world_size(group) > 1 for group in groups):
                raise UnsupportedValueError(
                    f"{key!r} has {kind}, whose state dict needs all its ranks: leave no_dist out and call it on all "
                    "of them"
                )
