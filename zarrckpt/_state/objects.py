"""Convert modules, optimizers and other Stateful objects to plain nested state, and load them from it.

DCP's own rule for Stateful objects silently restores nothing into a fresh Adam, because a fresh optimizer has no state
keys. So this module handles modules and optimizers itself, under names that do not depend on wrappers of a module.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from zarrckpt._errors import UnsupportedValueError
from zarrckpt._format.module_versions import versions_of
from zarrckpt._ranks.group import global_rank
from zarrckpt._state.flatten import OwnRank, new_dict
from zarrckpt._state.modules import DictMatch, ModuleState, fsdp1_of, match_state_dict, parameter_names
from zarrckpt._state.optimizer_forms import has_torch_form
from zarrckpt._state.optimizers import OptimizerTarget, saved_state
from zarrckpt._state.per_rank import PerRank, refuse_sharded
from zarrckpt._state.random_state import kept_random_state
from zarrckpt._state.saved_entries import KeyPattern, RequestedEntries
from zarrckpt._state.torch_kinds import fsdp1_modules, is_zero_optimizer


@runtime_checkable
class Stateful(Protocol):
    """An object with a state dict. The protocol of ``torch.distributed.checkpoint.stateful``, which imports slowly."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state."""


Keys = tuple[Any, ...]
"""The position of an object in the state: a key or a list index for each level."""


RankOf = Callable[[str, PerRank], int | None]
"""Returns the rank whose number is in the names of a PerRank's entries, or None if the PerRank is left out.

It is called with the prefix of the PerRank's names, and the PerRank.
"""


@dataclass
class PlainState:
    """A user's state with every Module, Optimizer and Stateful object replaced by its state dict."""

    state: dict[Any, Any]
    restore_calls: list[tuple[Keys, Callable[[Any], None]]] = field(default_factory=list)
    """The position of each object's state dict, and the call that loads it into the object, in order."""
    exact_prefixes: list[str] = field(default_factory=list)
    """Name prefixes of modules and optimizers. Every entry of the checkpoint below them needs a target."""
    closed_dicts: set[str] = field(default_factory=set)
    """fqns of dicts that accept no new entries if they are empty: of modules, and of the state of optimizers."""
    optimizers: list[OptimizerTarget] = field(default_factory=list)
    modules: dict[str, ModuleState] = field(default_factory=dict)
    """The modules to load into, by name prefix."""
    stateful_prefixes: list[str] = field(default_factory=list)
    """Name prefixes of other Stateful objects. They can change the values that they load."""
    per_rank: set[str] = field(default_factory=set)
    """fqns of the values of PerRanks."""
    unreadable: dict[str, Exception] = field(default_factory=dict)
    """The errors of ``state_dict`` calls after a load, by the name prefix of the object."""
    unchecked: list[str] = field(default_factory=list)
    """Name prefixes of objects whose ``state_dict`` is not called after a load."""

    def is_of_stateful(self, fqn: str) -> bool:
        """Whether an entry belongs to a Stateful object that is neither a module nor an optimizer."""
        return any(f"{fqn}.".startswith(prefix) for prefix in self.stateful_prefixes)

    def restore_objects(self) -> None:
        """Load the state dicts into their objects, in the same order on all ranks."""
        for keys, restore in self.restore_calls:
            loaded: Any = self.state
            for key in keys:
                loaded = loaded[key]
            restore(loaded)


def convert_for_save(state: Mapping[Any, Any]) -> PlainState:
    """Return the state to save. An optimizer without a step is saved without state, and is not changed."""
    if isinstance(state, Mapping) and not holds_objects(state):
        return PlainState(new_dict(dict(state), False, versions_of(state)))
    return _Converter(state, None, lambda prefix, entry: global_rank()).convert()


def convert_for_load(state: Mapping[Any, Any], saved: RequestedEntries, rank_of: RankOf) -> PlainState:
    """Return the targets of a load, with memory for state that optimizers lack.

    Objects without requested entries stay objects in the plain state, and are not loaded. ``rank_of`` returns the rank
    whose state a PerRank loads, or None.
    """
    return _Converter(state, saved, rank_of).convert()


def convert_for_check(state: Mapping[Any, Any], loaded: PlainState, rank_of: RankOf) -> PlainState:
    """Return the state after a load, under the names of its targets. Converts only the loaded objects.

    Optimizers name their parameters as in the load. Collective if the state dicts of the objects are.
    """
    return _Converter(state, None, rank_of, loaded).convert()


_LEAVES = frozenset({int, float, bool, str, bytes, type(None), Tensor, nn.Parameter})
_NO_OBJECTS = _LEAVES | {list, dict, tuple}


class _Converter:
    """The conversion of one state: to save, to load into (with ``saved``), or after a load (with ``loaded``)."""

    def __init__(
        self,
        state: Mapping[Any, Any],
        saved: RequestedEntries | None,
        rank_of: RankOf,
        loaded: PlainState | None = None,
    ) -> None:
        if not isinstance(state, Mapping):
            raise UnsupportedValueError(
                f"the state is a {type(state).__name__}, expected a dict such as {{'model': model, 'step': step}}"
            )
        self._state, self._saved, self._rank_of, self._loaded = state, saved, rank_of, loaded
        self._modules = [value for value in _objects(state) if isinstance(value, nn.Module)]
        self._positions = None if loaded is None else {keys for keys, _ in loaded.restore_calls}
        """The positions of the loaded objects."""
        self._rank: int | None = None
        """The rank of the PerRank that is converted."""
        self._plain = PlainState({})

    def convert(self) -> PlainState:
        state = self._state
        converted = in_order(state, lambda key: self._convert(state[key], (key,)))
        self._plain.state = new_dict(converted, False, versions_of(state))
        return self._plain

    def _convert(self, value: Any, keys: Keys) -> Any:
        if type(value) in _LEAVES:
            return value
        if isinstance(value, PerRank):
            return self._convert_per_rank(value, keys)
        if is_object(value):
            return self._convert_object(value, keys) if self._takes_part(keys) else value
        if not holds_objects(value):
            return value
        if isinstance(value, Mapping):
            return in_order(value, lambda key: self._convert(value[key], (*keys, key)))
        if isinstance(value, list):
            return [self._convert(item, (*keys, i)) for i, item in enumerate(value)]
        raise UnsupportedValueError(
            f"{prefix_of(keys)[:-1]!r} is a tuple that contains modules, optimizers or other Stateful objects: use a "
            "list or a dict"
        )

    def _takes_part(self, keys: Keys) -> bool:
        if self._saved is not None and not self._saved.wants(prefix_of(keys)):
            return False
        return self._positions is None or keys in self._positions

    def _convert_per_rank(self, entry: PerRank, keys: Keys) -> dict[str, Any]:
        outer, prefix = self._rank, prefix_of(keys)
        # A PerRank inside another one belongs to the same rank.
        rank = self._rank_of(prefix, entry) if outer is None else outer
        if rank is None:
            return {}
        self._rank = rank
        self._plain.per_rank.add(f"{prefix}{rank}")
        value = self._convert(entry.value, (*keys, str(rank)))
        self._rank = outer
        refuse_sharded(f"{prefix}{rank}", value)
        return OwnRank({str(rank): value})

    def _convert_object(self, value: Any, keys: Keys) -> Any:
        if isinstance(value, nn.Module):
            return self._convert_module(value, keys)
        if isinstance(value, Optimizer) and has_torch_form(value):
            return self._convert_optimizer(value, keys)
        if self._loaded is None:
            return self._convert_stateful(value, keys)
        if holds_loader(value):
            self._plain.unchecked.append(prefix_of(keys))
            return value
        try:
            with kept_random_state():
                return self._convert_stateful(value, keys)
        except Exception as err:
            self._plain.unreadable[prefix_of(keys)] = err
            return value

    def _convert_module(self, module: nn.Module, keys: Keys) -> dict[str, Any]:
        state, prefix = ModuleState(module), prefix_of(keys)
        if self._saved is not None:
            state.resize(prefix, self._saved)
            self._plain.modules[prefix] = state
        self._plain.exact_prefixes.append(prefix)
        self._plain.closed_dicts.add(prefix[:-1])
        self._plain.restore_calls.append((keys, state.restore))
        return state.entries

    def _convert_optimizer(self, optimizer: Optimizer, keys: Keys) -> dict[str, Any]:
        if self._loaded is not None:
            return next(target for target in self._loaded.optimizers if target.keys == keys).current_state()
        owner = _owner_of(optimizer, self._modules, self._state)
        fsdp1 = fsdp1_of(owner) if isinstance(owner, nn.Module) else None
        names = None if owner is None else owner.names if isinstance(owner, DictMatch) else {}
        if isinstance(owner, nn.Module) and fsdp1 is None:
            names = parameter_names(owner, (p for group in optimizer.param_groups for p in group["params"]))
        if self._saved is None:
            return saved_state(prefix_of(keys), optimizer, names, fsdp1)
        target = OptimizerTarget(keys, optimizer, names, fsdp1, self._saved)
        self._plain.exact_prefixes.append(target.prefix)
        self._plain.closed_dicts.add(f"{target.prefix}state")
        self._plain.optimizers.append(target)
        self._plain.restore_calls.append((keys, target.restore))
        return target.state_dict

    def _convert_stateful(self, value: Stateful, keys: Keys) -> Any:
        self._plain.stateful_prefixes.append(prefix_of(keys))
        state_dict = value.state_dict()
        if not any(isinstance(item, PerRank) for item in _objects(state_dict)):
            self._plain.restore_calls.append((keys, value.load_state_dict))
            return state_dict
        converted = self._convert(state_dict, keys)
        self._plain.restore_calls.append((keys, lambda loaded: value.load_state_dict(put_loaded(state_dict, loaded))))
        return converted


def prefix_of(keys: Keys) -> str:
    """Return the common prefix of the fqns of entries below these keys."""
    return "".join(f"{key}." for key in keys)


def in_order(state: Mapping[Any, Any], make: Callable[[Any], Any]) -> dict[Any, Any]:
    """Return a dict of ``make(key)`` for each key, called in the same order on all ranks.

    State dicts of FSDP1 need collectives, which deadlock if ranks call them in different orders.
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
        yield from filter(is_object, value)  # They are refused later.
    elif is_object(value):
        yield value
        if isinstance(value, PerRank):
            yield from _objects(value.value)


def is_object(value: Any) -> bool:
    """Whether a value is an object with a state dict, or a PerRank."""
    # isinstance() of a protocol takes microseconds, too long for lists of a million numbers.
    return type(value) not in _NO_OBJECTS and isinstance(value, (nn.Module, Optimizer, PerRank, Stateful))


def holds_objects(value: Any) -> bool:
    """Whether a value is such an object, or a container that has one at any depth."""
    if type(value) in _LEAVES:
        return False
    if isinstance(value, Mapping):
        return any(map(holds_objects, value.values()))
    if isinstance(value, list):
        return any(map(holds_objects, value))
    return any(map(is_object, value)) if isinstance(value, tuple) else is_object(value)


def holds_loader(value: Any, depth: int = 2) -> bool:
    """Whether an object is a data loader, or has one in its attributes.

    ``state_dict`` of a loader begins its epoch, if it has not begun: samplers draw numbers, and workers start.
    """
    loader_class: Any = getattr(sys.modules.get("torch.utils.data"), "DataLoader", None)
    if loader_class is None:
        return False
    if isinstance(value, loader_class):
        return True
    attributes = getattr(value, "__dict__", None) if depth > 0 else None
    return isinstance(attributes, dict) and any(holds_loader(item, depth - 1) for item in attributes.values())


def put_loaded(target: Any, loaded: Any) -> Any:
    """Put loaded values into the user's state, keep its objects and containers, and return it.

    ``loaded`` is the part of a plain state that corresponds to the target.
    """
    if isinstance(target, PerRank):
        for value in loaded.values():  # one value, or none if the target is kept
            target.value = put_loaded(target.value, value)
        return target
    if is_object(target):
        return target
    if not holds_objects(target):
        return loaded
    if isinstance(target, list) and isinstance(loaded, list):
        padded = [*target, *[None] * len(loaded)]
        target[:] = [put_loaded(item, value) for item, value in zip(padded, loaded, strict=False)]
        return target
    if not (isinstance(target, MutableMapping) and isinstance(loaded, Mapping)):
        return loaded
    for key in target.keys() - loaded.keys():
        del target[key]
    for key, value in loaded.items():
        new = put_loaded(target.get(key), value)
        if key not in target or new is not target[key]:
            target[key] = new
    return target


def _owner_of(optimizer: Optimizer, modules: list[nn.Module], state: Mapping[Any, Any]) -> nn.Module | DictMatch | None:
    """Return the module, or else the dict of tensors, in the state that has all parameters of an optimizer.

    Returns None if there is neither, and the state has no module.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    trained = {*map(id, parameters)}
    for module in modules:
        if trained <= {id(p) for p in module.parameters()}:
            return module
    matched = match_state_dict(state, parameters)
    if matched is None and modules:
        raise UnsupportedValueError(
            f"no module in the state has all {len(trained)} parameters of the {type(optimizer).__name__}, so they have "
            "no names: put the module that it trains into the state, or pass optimizer.state_dict() instead"
        )
    return matched


def _count_references(argument: object) -> int:
    return sys.getrefcount(argument)


_UNREFERENCED = _count_references({})
"""The reference count of an argument that the caller holds no reference to."""


def find_unreferenced_dicts(state: Any, references: int) -> frozenset[str]:
    """Return the keys of plain dicts that only the state references, if only the call's argument references the state.

    What a load stores in them is lost when the call returns. ``references`` is ``sys.getrefcount(state)`` in the
    function that the user called, because the count depends on the depth of the call.
    """
    referenced: dict[str, Any] = {}
    counts_differ = _count_references(referenced) > _UNREFERENCED  # not in every version of Python
    if not isinstance(state, dict) or references > _UNREFERENCED or not counts_differ:
        return frozenset()
    return frozenset(key for key in state if isinstance(state[key], dict) and sys.getrefcount(state[key]) <= 2)


def optimizers_and_modules(state: Any) -> list[tuple[KeyPattern, KeyPattern]]:
    """Return the position of each optimizer of a state, and that of the module, or dict of tensors, that it trains.

    Optimizers are left out if the state has neither.
    """
    found: list[tuple[KeyPattern, Any]] = []

    def walk(value: Any, keys: KeyPattern) -> None:
        if isinstance(value, nn.Module | Optimizer):
            found.append((keys, value))
        elif isinstance(value, PerRank):
            walk(value.value, (*keys, None))
        elif isinstance(value, Mapping | list) and not isinstance(value, Stateful) and holds_objects(value):
            for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
                walk(item, (*keys, str(key)))

    walk(state, ())
    modules = [value for _, value in found if isinstance(value, nn.Module)]
    keys_of = {id(value): keys for keys, value in found}
    pairs = [(keys, _owner_of(value, modules, state)) for keys, value in found if isinstance(value, Optimizer)]
    return [
        (keys, owner.keys if isinstance(owner, DictMatch) else keys_of[id(owner)])
        for keys, owner in pairs
        if owner is not None
    ]


def refuse_swapped_arguments(state: Any, url: Any, call: str) -> None:
    """Raise UnsupportedValueError if the state and the url are swapped."""
    if isinstance(state, str | os.PathLike) and isinstance(url, Mapping):
        raise UnsupportedValueError(f"the arguments are in the wrong order: {call}(state, url)")


def refuse_collective_objects(state: Any) -> None:
    """Raise UnsupportedValueError for a module of FSDP1 or a ZeroRedundancyOptimizer, which one rank cannot save alone.

    The state dict of such a module is collective, so this rank would wait for the others. The optimizer's state is
    partitioned over the ranks.
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
                    f"{key!r} has {kind}, and its state dict needs all its ranks: call this without no_dist on all of "
                    "them"
                )
