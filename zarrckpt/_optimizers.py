"""An optimizer's state dict under the names of its parameters: to save, to load into, and back.

``torch.distributed.checkpoint.state_dict`` names parameters by their paths in a module, and what it does not find by
these it leaves out in silence. Here a parameter has the name of the same tensor in the module's state dict, and what
was loaded is counted in the end. FSDP1, whose parameters are flat, needs torch's functions.
"""

from __future__ import annotations

import bisect
import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from zarrckpt._errors import KeyMismatchError
from zarrckpt._modules import fsdp1_of, parameter_names

Name = str | int
"""Of a parameter: that in its module; its number in the optimizer where the state holds no module."""


class SavedEntries:
    """The entries of the checkpoint that a load asks for, with DCP's metadata of each."""

    def __init__(self, entries: Mapping[str, Any], is_asked_for: Callable[[str], bool], everything: bool) -> None:
        self._entries = entries
        self._names = sorted(filter(is_asked_for, entries))
        self._everything = everything
        self.is_asked_for = is_asked_for
        """Whether a load asks for entries of a name, if the checkpoint had it or not."""

    def wants(self, prefix: str) -> bool:
        """Whether an object whose entries begin with a prefix is to be loaded."""
        return self._everything or bool(self.below(prefix))

    def below(self, prefix: str) -> list[str]:
        """The names that begin with a prefix."""
        first = last = bisect.bisect_left(self._names, prefix)
        while last < len(self._names) and self._names[last].startswith(prefix):
            last += 1
        return self._names[first:last]

    def holds(self, fqn: str) -> bool:
        """Whether there is an entry of a name, or one below it."""
        return bool(self.below(f"{fqn}.")) or (fqn in self._entries and self.is_asked_for(fqn))

    def shape_of(self, fqn: str) -> torch.Size | None:
        """The shape of a tensor of that name; None where there is none."""
        entry = self._entries.get(fqn)
        return entry.size if isinstance(entry, TensorStorageMetadata) else None

    def dtype_of(self, fqn: str) -> torch.dtype:
        """The dtype of a tensor of that name."""
        dtype: torch.dtype = self._entries[fqn].properties.dtype
        return dtype


class _Parameters:
    """An optimizer's parameters by their numbers in its state dict, and the name of each."""

    def __init__(
        self,
        optimizer: Optimizer,
        module: nn.Module | None,
        choose: Callable[[list[str]], str] = lambda names: names[0],
    ) -> None:
        packed = optimizer.state_dict()["param_groups"]
        numbers = [number for group in packed for number in group["params"]]
        own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self.by_number: dict[int, torch.Tensor] = dict(zip(numbers, own, strict=True))
        self.names: dict[int, Name] = {number: number for number in self.by_number}
        if module is not None:
            names = parameter_names(module, own)
            self.names = {number: choose(names[id(parameter)]) for number, parameter in self.by_number.items()}

    def __iter__(self) -> Iterator[tuple[Name, torch.Tensor]]:
        return ((self.names[number], parameter) for number, parameter in self.by_number.items())

    def named(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """A state dict of the optimizer with names in place of numbers."""
        return _renamed(state_dict, self.names)

    def numbered(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """A state dict with the optimizer's numbers in place of names."""
        return _renamed(state_dict, {name: number for number, name in self.names.items()})


def _renamed(state_dict: Mapping[str, Any], names: Mapping[Any, Any]) -> dict[str, Any]:
    """A state dict with other names of parameters. What is kept for no parameter keeps its own."""
    return {
        **state_dict,
        "state": {
            names.get(key, key): slots
            for key, slots in state_dict["state"].items()
            if not (isinstance(slots, dict) and not slots)
        },
        "param_groups": [
            {**group, "params": [names[key] for key in group["params"]]} for group in state_dict["param_groups"]
        ],
    }


def saved_state(optimizer: Optimizer, module: nn.Module | None) -> dict[str, Any]:
    """The state dict to save. An optimizer that has made no step yet is saved as such, and is not changed."""
    fsdp1 = None if module is None else fsdp1_of(module)
    if fsdp1 is None:
        return _Parameters(optimizer, module).named(optimizer.state_dict())
    fresh = not optimizer.state
    state_dict = _fsdp1_state(optimizer, fsdp1)
    if fresh:
        # Getting the state dict made a first step with zero gradients, which would count as one.
        optimizer.state.clear()
        state_dict["state"] = {}
    return state_dict


class OptimizerTarget:
    """One optimizer's state dict to load into, and how the optimizer takes it back.

    A parameter ends with the state that it was saved with: one without state gets memory for what the checkpoint has,
    one for which the checkpoint has none loses its own.
    """

    state_dict: dict[str, Any]
    """By names. An entry that is None takes whatever the checkpoint has under its name."""

    def __init__(self, prefix: str, optimizer: Optimizer, module: nn.Module | None, saved: SavedEntries) -> None:
        self.prefix = prefix
        self._optimizer = optimizer
        self._fsdp1 = None if module is None else fsdp1_of(module)
        every = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._stateless = [parameter for parameter in every if not optimizer.state.get(parameter)]
        fresh = not optimizer.state
        if self._fsdp1 is not None:
            self.state_dict = _fsdp1_state(optimizer, self._fsdp1)
        else:
            self._allocate(module, saved)
        for name, slots in list(self.state_dict["state"].items()):
            stem = f"{prefix}state.{name}"
            if not saved.holds(stem) and (fresh or any(saved.is_asked_for(f"{stem}.{slot}") for slot in slots)):
                del self.state_dict["state"][name]
        self.groups = [group["params"] for group in self.state_dict["param_groups"]]

    def _allocate(self, module: nn.Module | None, saved: SavedEntries) -> None:
        """Set ``state_dict``, with memory for all that the checkpoint has."""

        def saved_name(names: list[str]) -> str:
            return next((name for name in names if saved.holds(f"{self.prefix}state.{name}")), names[0])

        self._parameters = _Parameters(self._optimizer, module, saved_name)
        wanted = {name: p for name, p in self._parameters if saved.holds(f"{self.prefix}state.{name}")}
        make_state(self._optimizer, [p for p in wanted.values() if not self._optimizer.state.get(p)])
        self.state_dict = self._parameters.named(self._optimizer.state_dict())
        state = self.state_dict["state"]
        for name, parameter in wanted.items():
            state[name] = _slots(f"{self.prefix}state.{name}.", parameter, state.get(name, {}), saved)
        for place, group in enumerate(self.state_dict["param_groups"]):
            # Like the numbers of its parameters, their names in an optimizer are its own.
            group.pop("param_names", None)
            if saved.holds(f"{self.prefix}param_groups.{place}.param_names"):
                group["param_names"] = None

    def restore(self, loaded: Mapping[str, Any]) -> None:
        """Have the optimizer take its loaded state dict. Raises KeyMismatchError for entries that it did not keep."""
        groups = _own_groups(self.prefix, self.groups, loaded["param_groups"])
        taken = {**loaded, "param_groups": groups}
        if self._fsdp1 is not None:
            sharded = _as_fsdp1_takes_it(self._fsdp1, taken)
            # strict=False: a parameter that never had a gradient has no state.
            options = StateDictOptions(strict=False)
            with _trainable(self._optimizer):
                set_optimizer_state_dict(self._fsdp1, self._optimizer, sharded, options=options)
            arrived = _fsdp1_state(self._optimizer, self._fsdp1)
        else:
            self._optimizer.load_state_dict(self._parameters.numbered(taken))
            self._keep_types(taken["state"])
            arrived = self._parameters.named(self._optimizer.state_dict())
        lost = [
            f"{self.prefix}state.{name}.{slot}"
            for name, slots in taken["state"].items()
            if isinstance(slots, dict)
            for slot in slots.keys() - arrived["state"].get(name, {}).keys()
        ]
        for place, (group, own) in enumerate(zip(groups, arrived["param_groups"], strict=True)):
            lost += [f"{self.prefix}param_groups.{place}.{key}" for key in group.keys() - own.keys()]
        if lost:
            raise KeyMismatchError(
                f"{self.prefix[:-1]!r}: load_state_dict() of the {type(self._optimizer).__name__} left out {len(lost)} "
                f"entries that were read, for example {sorted(lost)[:5]}; its state is undefined now"
            )

    def _keep_types(self, state: Mapping[Any, Any]) -> None:
        """Torch converts a parameter's state to the parameter's dtype, and strings to nonsense: undo that."""
        if type(self._optimizer).load_state_dict is not Optimizer.load_state_dict:
            return
        for name, parameter in self._parameters:
            arrived = self._optimizer.state.get(parameter, {})
            slots = state.get(name, {})
            for slot in slots.keys() & arrived.keys() - {"step"}:
                value = slots[slot]
                if isinstance(value, str):
                    arrived[slot] = value
                elif isinstance(value, torch.Tensor) and arrived[slot].dtype != value.dtype:
                    arrived[slot] = value.to(arrived[slot].device)

    def undo(self) -> None:
        """Take back what was made to load into: the load failed."""
        for parameter in self._stateless:
            self._optimizer.state.pop(parameter, None)

    def close_names(self, fqn: str) -> list[str]:
        """Own parameters whose names are like that of an entry of the checkpoint below this optimizer's state."""
        entry = fqn.removeprefix(f"{self.prefix}state.")
        own = [str(name) for group in self.groups for name in group]
        inside = [name for name in own if f".{name}." in f".{entry}." or f".{entry.rpartition('.')[0]}." in f".{name}."]
        return (inside or difflib.get_close_matches(entry.rpartition(".")[0], own))[:3]


def _slots(stem: str, parameter: torch.Tensor, state: Mapping[Any, Any], saved: SavedEntries) -> dict[Any, Any]:
    """The targets of a parameter's state below a stem: its own, as far as the checkpoint has them, and what it lacks.

    None stands for what is loaded as the checkpoint has it, on the CPU; of a DTensor that would be too much. LBFGS has
    lists as long as its history, and numbers that become tensors: these are loaded so, too.
    """
    slots: dict[Any, Any] = {}
    for slot, value in state.items():
        fqn = f"{stem}{slot}"
        if saved.holds(fqn):
            changes = isinstance(value, torch.Tensor) and value.shape not in (parameter.shape, saved.shape_of(fqn))
            slots[slot] = None if changes or isinstance(value, list) else value
        elif not saved.is_asked_for(fqn):
            slots[slot] = value
    present = {str(slot) for slot in slots}
    for fqn in saved.below(stem):
        slot = fqn.removeprefix(stem).partition(".")[0]
        if slot not in present:
            like = isinstance(parameter, DTensor) and saved.shape_of(fqn) == parameter.shape
            slots[slot] = torch.empty_like(parameter.detach(), dtype=saved.dtype_of(fqn)) if like else None
    return slots


def make_state(optimizer: Optimizer, parameters: Iterable[torch.Tensor]) -> None:
    """Have an optimizer make the state of some parameters, by a step with zero gradients; nothing else changes.

    Makes none with an optimizer that cannot step so: LBFGS needs a closure, SparseAdam sparse gradients.
    """
    parameters = list(parameters)
    if not parameters:
        return
    state = dict(optimizer.state)
    options = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    made: dict[Any, Any] = {}
    optimizer.state.clear()
    with _gradients_hidden(optimizer):
        try:
            for parameter in parameters:
                parameter.grad = torch.zeros_like(parameter)
            for group in optimizer.param_groups:
                for key in {"lr", "weight_decay"} & group.keys():
                    group[key] = torch.zeros_like(group[key]) if isinstance(group[key], torch.Tensor) else 0.0
            optimizer.step()
            made = dict(optimizer.state)
        except Exception:
            pass  # what can't be made is taken from the checkpoint as it is
        finally:
            for group, kept in zip(optimizer.param_groups, options, strict=True):
                for key in group.keys() - kept.keys() - {"params"}:
                    del group[key]
                group.update(kept)
            optimizer.state.clear()
            optimizer.state.update({**state, **made})


@contextmanager
def _gradients_hidden(optimizer: Optimizer) -> Iterator[None]:
    """Parameters have no gradients inside, and theirs again afterwards."""
    gradients = [(p, p.grad) for group in optimizer.param_groups for p in group["params"]]
    try:
        for parameter, _ in gradients:
            parameter.grad = None
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient


def _own_groups(prefix: str, names: list[list[Name]], loaded: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Loaded parameter groups for this rank's parameters: each as the first that names one of them, else by position.

    A checkpoint names a group's parameters as one rank had them. A stage of a pipeline may find none of its own there.
    Raises KeyMismatchError for a group too many.
    """
    groups = []
    for place, own in enumerate(names):
        sharing = [group for group in loaded if not {*own}.isdisjoint(group["params"])]
        if not sharing and place >= len(loaded):
            raise KeyMismatchError(
                f"'{prefix}param_groups' has {len(names)} groups in the target and {len(loaded)} in the checkpoint, "
                f"and group {place} shares no parameter with any of these"
            )
        group = {**(sharing or loaded[place:])[0], "params": own}
        group.pop("param_names", None)
        groups.append(group)
    return groups


def _fsdp1_state(optimizer: Optimizer, module: nn.Module) -> dict[str, Any]:
    """The state dict of an optimizer of FSDP1, made by a first step where there is none. Collective."""
    # Torch makes no state while there are gradients, and drops them when it does.
    with _gradients_hidden(optimizer), _trainable(optimizer):
        return dict(get_optimizer_state_dict(module, optimizer))


@contextmanager
def _trainable(optimizer: Optimizer) -> Iterator[None]:
    """No parameter is frozen inside: of those torch neither makes nor takes the state."""
    frozen = [p for group in optimizer.param_groups for p in group["params"] if not p.requires_grad]
    try:
        for parameter in frozen:
            parameter.requires_grad_(True)
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


def _as_fsdp1_takes_it(module: nn.Module, state_dict: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's state dict in which tensors of FSDP1 over TP are what this rank's TP shard holds. Collective.

    Given the DTensors, torch 2.13 gathers them over all dimensions of the mesh and then cuts out this rank's elements
    by their numbers in the TP shard: it takes other ranks' elements, in silence.
    """
    if not any(fsdp._fsdp_extension is not None for fsdp in FullyShardedDataParallel.fsdp_modules(module)):
        return state_dict

    def tp_shard(value: Any) -> Any:
        if not isinstance(value, DTensor) or value.device_mesh.ndim < 2:
            return value
        placements = [*[Replicate()] * (value.device_mesh.ndim - 1), value.placements[-1]]
        return value.redistribute(placements=placements).to_local()

    # Sorted: the names come in another order on each rank, and each tensor is a collective.
    state = {
        name: {slot: tp_shard(value) for slot, value in sorted(slots.items())}
        for name, slots in sorted(state_dict["state"].items())
    }
    return {**state_dict, "state": state}
