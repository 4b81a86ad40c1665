"""An optimizer's state dict under the names of its parameters, to save it and to load into it.

``torch.distributed.checkpoint.state_dict`` names parameters by their paths in a module, and silently omits state that
it does not find by these names. Here, a parameter has the name of the same tensor in the module's state dict, and the
loaded entries are counted at the end. FSDP1 has flat parameters and needs torch's own functions.

A load is tried on a copy first if the class of the optimizer may refuse the state: state of another class, and state
that belongs to no parameter.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from zarrckpt._errors import CheckpointError, KeyMismatchError, UnsupportedValueError, warn
from zarrckpt._format.state_path import StatePath
from zarrckpt._state.flatten import build, stems
from zarrckpt._state.fsdp1_optimizers import fsdp1_state, no_first_step, trainable, with_tp_shards
from zarrckpt._state.group_options import Name, ParameterNames, groups_with_options
from zarrckpt._state.local_boxes import local_tensors
from zarrckpt._state.optimizer_extras import ExtraState
from zarrckpt._state.optimizer_forms import (
    held_here,
    refuse_other_order,
    refuse_other_parameters,
    saved_order,
    state_dict_of,
)
from zarrckpt._state.optimizer_trial import blank_tensor, slots_of_step, try_load, unwrapped
from zarrckpt._state.saved_entries import RequestedEntries
from zarrckpt._state.tensors import is_wrapper, new_tensor_like
from zarrckpt._state.torch_kinds import is_dtensor, is_sharded_tensor

_DECOUPLED = "decoupled_weight_decay"
"""The option that distinguishes AdamW from Adam. AdamW keeps its own value in a load."""

Names = Mapping[int, list[str]]
"""The names of parameters by ``id``. Tied parameters have several."""


class _Parameters:
    """An optimizer's parameters by their numbers in its state dict, with their names.

    ``names`` is None if the state has neither the module nor its state dict. Parameters then have the names that the
    optimizer was created with, or numbers.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        names: Names | None,
        choose: Callable[[list[str]], str] = lambda names: names[0],
    ) -> None:
        packed = state_dict_of(optimizer)["param_groups"]
        numbers = [number for group in packed for number in group["params"]]
        own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self.by_number: dict[int, torch.Tensor] = dict(zip(numbers, own, strict=True))
        self.names: dict[int, Name] = {number: number for number in self.by_number}
        if names is None:
            names = _given_names(optimizer)
        self.are_named = names is not None
        if names is not None:
            self.names = {number: choose(names[id(parameter)]) for number, parameter in self.by_number.items()}

    def __iter__(self) -> Iterator[tuple[Name, torch.Tensor]]:
        return ((self.names[number], parameter) for number, parameter in self.by_number.items())

    def take_order(self, order: list[Name], prefix: str, optimizer: Optimizer, saved: RequestedEntries) -> None:
        """Use names or numbers of the checkpoint in order. Raises KeyMismatchError if shapes of parameters differ."""
        named = {
            own: (name, parameter, optimizer.state.get(parameter, {}))
            for own, (name, parameter) in zip(order, self, strict=True)
        }
        refuse_other_parameters(prefix, named, saved, exact=self.are_named)
        self.names = dict(zip(self.by_number, order, strict=True))

    def named(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """Return a state dict of the optimizer with names instead of numbers."""
        return _renamed(state_dict, self.names)

    def numbered(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """Return a state dict with the optimizer's numbers instead of names."""
        return _renamed(state_dict, {name: number for number, name in self.names.items()})


def _renamed(state_dict: Mapping[str, Any], names: Mapping[Any, Any]) -> dict[str, Any]:
    """Return a state dict with other names of parameters. State that belongs to no parameter keeps its key."""
    filled = {key: slots for key, slots in state_dict["state"].items() if not (isinstance(slots, dict) and not slots)}
    state = {names.get(key, key): slots for key, slots in filled.items()}
    if len(state) != len(filled):
        both = sorted({*names.values()} & (filled.keys() - names.keys()), key=str)
        raise UnsupportedValueError(
            f"an optimizer has state under the keys {both[:5]}, which belong to no parameter but are names of "
            "parameters. Rename the keys, or pass optimizer.state_dict() instead"
        )
    return {
        **state_dict,
        "state": state,
        "param_groups": [
            {**group, "params": [names[key] for key in group["params"]]} for group in state_dict["param_groups"]
        ],
    }


def _given_names(optimizer: Optimizer) -> Names | None:
    """Return the names that an optimizer was created with (``named_parameters()``), or None."""
    groups = optimizer.param_groups
    given = [name for group in groups for name in group.get("param_names", ())]
    parameters = [parameter for group in groups for parameter in group["params"]]
    if len(given) != len(parameters) or len({*given}) != len(given):
        return None
    return {id(parameter): [name] for parameter, name in zip(parameters, given, strict=True)}


def saved_state(prefix: str, optimizer: Optimizer, names: Names | None, fsdp1: nn.Module | None) -> dict[str, Any]:
    """Return the state dict to save. Makes no optimizer step: an optimizer without state is saved without state.

    ``fsdp1`` is the module if FSDP1 shards it. Warns if parameters have only numbers.
    """
    if fsdp1 is not None:
        state = fsdp1_state(optimizer, fsdp1)
    else:
        parameters = _Parameters(optimizer, names)
        state = parameters.named(state_dict_of(optimizer))
        if parameters.by_number and not parameters.are_named:
            warn(
                f"{prefix[:-1]!r}: the parameters of the {type(optimizer).__name__} are saved with numbers, because "
                "the state has neither their module nor a dict of the same tensors (module.state_dict()). A load needs "
                "the same parameters in the same order. Put the module into the state to save their names"
            )
    class_name = type(unwrapped(optimizer)).__name__
    groups = [{**group, "params": ParameterNames(group["params"], class_name)} for group in state["param_groups"]]
    return {**state, "param_groups": groups}


class OptimizerTarget:
    """The state dict of one optimizer to load into, and the load into the optimizer.

    After the load, each parameter has exactly the state that it was saved with. The optimizer does not change before
    :meth:`restore`, and makes no step, because a step can have any effect.
    """

    state_dict: dict[str, Any]
    """The targets by name. None accepts any entry of the checkpoint."""

    def __init__(
        self,
        keys: tuple[Any, ...],
        optimizer: Optimizer,
        names: Names | None,
        fsdp1: nn.Module | None,
        saved: RequestedEntries,
    ) -> None:
        self.keys = keys
        self.prefix = "".join(f"{key}." for key in keys)
        self.given_groups: list[dict[str, Any]] = []
        """The parameter groups that :meth:`restore` passed to the optimizer."""
        self._optimizer = optimizer
        self._allow_cast = saved.allow_cast
        self._fsdp1 = fsdp1
        if fsdp1 is not None:
            if saved_order(self.prefix, len(keys), optimizer, saved, named=True) is not None:
                raise KeyMismatchError(
                    f"{self.prefix[:-1]!r} has numbered parameters in the checkpoint, but FSDP1 numbers them "
                    "differently. Nothing was loaded. Load it into the module and the optimizer without FSDP1, save "
                    "both, and load the new checkpoint"
                )
            self.state_dict = fsdp1_state(optimizer, fsdp1)
            from torch.distributed.checkpoint.state_dict import get_model_state_dict

            like: dict[str, Any] = get_model_state_dict(fsdp1)
            parameters = {name: like[name] for group in self.state_dict["param_groups"] for name in group["params"]}
        else:
            own = self._parameters = _Parameters(optimizer, names, self._saved_name(saved))
            order = saved_order(self.prefix, len(keys), optimizer, saved, named=own.are_named)
            if order is not None or not own.are_named:
                own.take_order(order or [*own.by_number], self.prefix, optimizer, saved)
            refuse_other_order(self.prefix, dict(own), saved)
            self.state_dict = self._parameters.named(state_dict_of(optimizer))
            parameters = held_here(optimizer, dict(self._parameters))
        state = self.state_dict["state"]
        for name, parameter in parameters.items():
            slots = _slots(f"{self.prefix}state.{name}", len(keys) + 2, parameter, state.pop(name, {}), saved)
            if slots:
                state[name] = slots
        self._own_groups: list[dict[str, Any]] = self.state_dict["param_groups"]
        self.groups = [group["params"] for group in self._own_groups]
        # All groups of the checkpoint are read, because their options are matched by the names of parameters in them.
        prefix, depth = f"{self.prefix}param_groups.", len(keys) + 1
        numbers = [number for number in saved.keys_below(prefix, depth) if str(number).isdecimal()]
        self.state_dict["param_groups"] = {
            int(number): dict.fromkeys(saved.keys_below(f"{prefix}{number}.", depth + 1)) for number in numbers
        }
        self._all_groups_are_read = not saved.left_out(prefix)
        self._match_class(saved, {slot for name in parameters for slot in state.get(name, ())})

    def _match_class(self, saved: RequestedEntries, slots: set[Any]) -> None:
        """Add targets for saved state that belongs to no parameter, if the class of the optimizer takes it.

        ``slots`` are the keys of the state of its parameters. Raises KeyMismatchError if another class saved the state,
        and this class creates other state or cannot load it.
        """
        own, other = unwrapped(self._optimizer), saved.optimizer_class(self.prefix)
        names = [name for group in self.groups for name in group]
        if other == type(own).__name__ and not saved.left_out(self.prefix):
            # As state of parameters, it is as in the checkpoint after the load.
            for key in self.state_dict["state"].keys() - {*names}:
                if not saved.holds(f"{self.prefix}state.{key}"):
                    del self.state_dict["state"][key]
        extra = ExtraState(self.keys, self.state_dict, names, saved)
        if (other == type(own).__name__ and not extra) or not saved.below(f"{self.prefix}state"):
            return
        given = self._blank_state(saved, {*names})
        if given is None:
            return
        if not other and type(own).__module__.startswith("torch.optim."):
            # Without a class, a step of torch's own classes proves only that no key of the state is used.
            own_slots = (slots_of_step(own, given["param_groups"]) or set()) - {"step"}
            if slots and own_slots and own_slots.isdisjoint(slots):
                raise self._other_class(other, "whose state differs")
        elif other and other not in {kind.__name__ for kind in type(own).__mro__}:
            created = slots_of_step(own, given["param_groups"])
            if created is None or not created <= slots or bool(created) != bool(slots):
                raise self._other_class(other, "whose state differs")
            warn(
                f"{self.prefix[:-1]!r} was saved by {other} and is loaded into {type(own).__name__}, whose state has "
                "the same keys"
            )
        if self._fsdp1 is not None:
            return
        after, err = try_load(self._optimizer, self._parameters.numbered(given))
        if isinstance(err, KeyError) and not extra:
            raise self._other_class(other, f"whose load_state_dict() raises KeyError: {err}") from err
        if extra and extra.is_in(after):
            device = next((parameter.device for _, parameter in self._parameters), torch.device("cpu"))
            extra.add_targets(self.state_dict, device)

    def _other_class(self, other: str, difference: str) -> KeyMismatchError:
        saved_by = f"saved by {other}" if other else "saved by an optimizer of another class or version"
        return KeyMismatchError(
            f"{self.prefix[:-1]!r} was {saved_by}, but is loaded into {type(unwrapped(self._optimizer)).__name__}, "
            f"{difference}. Nothing was loaded. Leave it out (keys=), give its state the expected names (rename=), or "
            "use the optimizer that saved it"
        )

    def _blank_state(self, saved: RequestedEntries, names: set[Name]) -> dict[str, Any] | None:
        """Return the state dict that the optimizer will be given, with zeros for tensors, or None if it is not known.

        It is not known if a part of it is not requested, or if it was flattened before the save.
        """
        if saved.left_out(self.prefix):
            return None
        rows: list[tuple[Any, Any]] = []
        own = {str(name) for name in names}
        try:
            for fqn in saved.below(self.prefix):
                form = saved.tensor(fqn)
                path = self._with_whole_name(saved.path(fqn), fqn, own)
                rows.append((path, saved.value(fqn) if form is None else blank_tensor(form.shape, form.dtype)))
        except CheckpointError:  # The load itself raises it, or allows pickles.
            return None
        given = build(rows, {}, len(self.keys))
        if not isinstance(given, dict) or not isinstance(given.get("param_groups"), list):
            return None
        groups = dict(enumerate(given["param_groups"]))
        options = groups_with_options(self.prefix, self._own_groups, groups, complete=self._all_groups_are_read)
        listed = {str(name) for group in groups.values() for name in group.get("params", ())}
        state = {
            key: slots for key, slots in given.get("state", {}).items() if str(key) in own or str(key) not in listed
        }
        return {**given, "state": state, "param_groups": options}

    def _with_whole_name(self, path: StatePath, fqn: str, names: Collection[str]) -> StatePath:
        """Return the path of an entry with one key for its parameter's name. A renamed entry can have several."""
        prefix, depth = f"{self.prefix}state.", len(self.keys) + 1
        name = next((stem for stem in stems(fqn.removeprefix(prefix)) if stem in names), None)
        if name is None or not fqn.startswith(prefix):
            return path
        end = next((end for end in range(depth, len(path)) if path.stem(end) == f"{prefix}{name}"), depth + 1)
        if end == depth + 1:
            return path
        keys = (*path.keys[:depth], name, *path.keys[end:])
        return StatePath(keys, (*path.containers[: depth + 1], *path.containers[end:]))

    def _saved_name(self, saved: RequestedEntries) -> Callable[[list[str]], str]:
        def choose(names: list[str]) -> str:
            return next((name for name in names if saved.holds(f"{self.prefix}state.{name}")), names[0])

        return choose

    def restore(self, loaded: Mapping[str, Any]) -> None:
        """Pass the loaded state dict to the optimizer. Raises KeyMismatchError for entries that it did not keep."""
        groups = groups_with_options(
            self.prefix, self._own_groups, loaded["param_groups"], complete=self._all_groups_are_read
        )
        taken = {**loaded, "param_groups": groups}
        # Copies, because the optimizer keeps and changes the groups that it gets.
        self.given_groups = [dict(group) for group in groups]
        self._load(taken)
        for given, group in zip(self.given_groups, self._optimizer.param_groups, strict=True):
            if given.get(_DECOUPLED, group.get(_DECOUPLED)) != group.get(_DECOUPLED):
                given[_DECOUPLED] = group[_DECOUPLED]
                if given.get("weight_decay"):
                    warn(
                        f"{self.prefix[:-1]!r}: {type(self._optimizer).__name__} keeps {_DECOUPLED}="
                        f"{group[_DECOUPLED]}, but the checkpoint has {not group[_DECOUPLED]}"
                    )

    def _load(self, taken: dict[str, Any]) -> None:
        if self._fsdp1 is None:
            self._optimizer.load_state_dict(self._parameters.numbered(taken))
            self._undo_casts((parameter, taken["state"].get(name, {})) for name, parameter in self._parameters)
            self._refuse_lost(taken, self._parameters.named(state_dict_of(self._optimizer)))
            return
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict

        given: dict[str, Any] = {}
        hook = self._optimizer.register_load_state_dict_pre_hook(lambda _, state_dict: given.update(state_dict))
        try:
            sharded = with_tp_shards(self._fsdp1, taken)
            # strict=False, because a parameter that never had a gradient has no state.
            options = StateDictOptions(strict=False)
            with no_first_step(self._optimizer), trainable(self._optimizer):
                set_optimizer_state_dict(self._fsdp1, self._optimizer, sharded, options=options)
        finally:
            hook.remove()
        parameters = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        self._undo_casts((parameter, given["state"].get(number, {})) for number, parameter in enumerate(parameters))

    def current_state(self) -> dict[str, Any]:
        """Return the optimizer's current state dict under the names of :attr:`state_dict`. Collective for FSDP1."""
        if self._fsdp1 is not None:
            return fsdp1_state(self._optimizer, self._fsdp1)
        return self._parameters.named(state_dict_of(self._optimizer))

    def _undo_casts(self, given: Iterable[tuple[torch.Tensor, Mapping[Any, Any]]]) -> None:
        """Restore loaded values of a parameter's state that ``Optimizer.load_state_dict`` converted."""
        for parameter, slots in given:
            arrived = self._optimizer.state.get(parameter, {})
            for slot in slots.keys() & arrived.keys() - {"step"}:
                arrived[slot] = _undo_cast(arrived[slot], slots[slot], self._allow_cast)

    def _refuse_lost(self, taken: Mapping[str, Any], arrived: Mapping[str, Any]) -> None:
        lost = [
            f"{self.prefix}state.{name}.{slot}"
            for name, slots in taken["state"].items()
            if isinstance(slots, dict)
            for slot in slots.keys() - arrived["state"].get(name, {}).keys()
        ]
        for index, (group, own) in enumerate(zip(taken["param_groups"], arrived["param_groups"], strict=True)):
            lost += [f"{self.prefix}param_groups.{index}.{key}" for key in group.keys() - own.keys()]
        if lost:
            raise KeyMismatchError(
                f"{self.prefix[:-1]!r}: load_state_dict() of the {type(self._optimizer).__name__} dropped {len(lost)} "
                f"loaded entries, for example {sorted(lost)[:5]}. The state of the optimizer is undefined now"
            )

    def close_names(self, fqn: str) -> list[str]:
        """Return up to three parameters with names similar to that of an entry of the checkpoint."""
        entry = fqn.removeprefix(f"{self.prefix}state.")
        own = [str(name) for group in self.groups for name in group]
        inside = [name for name in own if f".{name}." in f".{entry}." or f".{entry.rpartition('.')[0]}." in f".{name}."]
        return (inside or difflib.get_close_matches(entry.rpartition(".")[0], own))[:3]


def _slots(
    fqn: str, depth: int, parameter: torch.Tensor, state: Mapping[Any, Any], saved: RequestedEntries
) -> dict[Any, Any]:
    """Return the targets of a parameter's state: existing slots that the checkpoint has, and memory for missing slots.

    ``depth`` is the number of keys that lead to the slots. A slot of None is loaded with the checkpoint's shape and
    dtype on the CPU. This is for numbers and for slots that change their shape, such as the lists of LBFGS.
    """
    slots: dict[Any, Any] = {}
    for slot, value in state.items():
        if saved.holds(f"{fqn}.{slot}"):
            entry = saved.tensor(f"{fqn}.{slot}")
            in_place = not isinstance(value, torch.Tensor) or value.shape == parameter.shape
            fits = in_place or (entry is not None and entry.shape == value.shape)
            slots[slot] = value if fits and not isinstance(value, list) else None
        elif not saved.is_requested(f"{fqn}.{slot}"):
            slots[slot] = value
    if not state and (left := saved.left_out(f"{fqn}.")) and saved.below(f"{fqn}."):
        raise KeyMismatchError(
            f"keys= requests a part of {fqn!r} without {left[:3]}, but the optimizer has no state of this parameter "
            "yet. Nothing was loaded. Request the whole state of the parameter"
        )
    for slot in saved.keys_below(f"{fqn}.", depth):
        if slot not in slots:
            slots[slot] = _slot_memory(f"{fqn}.{slot}", parameter, saved)
    return slots


def _slot_memory(fqn: str, parameter: torch.Tensor, saved: RequestedEntries) -> torch.Tensor | None:
    """Return memory for an entry of a parameter without state, sharded like the parameter, or None.

    An entry with another shape than the parameter is loaded as a plain tensor on all ranks, because its sharding is
    unknown. FSDP1 has no such state and refuses the shape.
    """
    entry = saved.tensor(fqn)
    if entry is None or not entry.shape or is_lazy(parameter):
        return None
    if entry.shape != parameter.shape and not is_sharded_tensor(parameter):
        return None
    like = parameter.detach()
    if any(map(is_wrapper, local_tensors(parameter))):
        # zeros_like of a wrapped parameter is not wrapped, so optimizers create such state too.
        return torch.zeros_like(like, dtype=entry.dtype)
    if is_sharded_tensor(parameter):
        return torch.empty_like(like, dtype=entry.dtype)
    return new_tensor_like(like, entry.order, entry.dtype)


def _undo_cast(arrived: Any, loaded: Any, allow_cast: bool) -> Any:
    """Return a value of an optimizer's state without the conversions of torch's ``load_state_dict``.

    torch breaks strings, and casts tensors to the parameter's dtype. Casts are kept if the load allows them. Changes
    by the optimizer itself are kept too.
    """
    if isinstance(loaded, str):
        return loaded
    if isinstance(loaded, torch.Tensor) and isinstance(arrived, torch.Tensor):
        return loaded.to(arrived.device) if not allow_cast and _is_cast_of(arrived, loaded) else arrived
    if isinstance(loaded, dict) and isinstance(arrived, dict) and loaded.keys() == arrived.keys():
        return {key: _undo_cast(arrived[key], value, allow_cast) for key, value in loaded.items()}
    if type(loaded) in (list, tuple) and type(arrived) is type(loaded) and len(arrived) == len(loaded):
        pairs = zip(arrived, loaded, strict=True)
        return type(loaded)(_undo_cast(one, other, allow_cast) for one, other in pairs)
    return arrived


def _is_cast_of(arrived: torch.Tensor, loaded: torch.Tensor) -> bool:
    if arrived.dtype == loaded.dtype or arrived.shape != loaded.shape:
        return False
    cast = loaded.to(device=arrived.device, dtype=arrived.dtype)
    one, other = (part.to_local() if is_dtensor(part) else part for part in (arrived, cast))  # type: ignore[attr-defined]
    return torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)
