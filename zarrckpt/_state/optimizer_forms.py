"""State dicts of optimizers in torch's own form, with numbers for parameters, possibly partitioned over ranks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from zarrckpt._errors import KeyMismatchError, UnsupportedValueError
from zarrckpt._state.group_options import Name
from zarrckpt._state.saved_entries import RequestedEntries
from zarrckpt._state.torch_kinds import is_zero_optimizer


def has_torch_form(optimizer: Optimizer) -> bool:
    """Return whether an optimizer's state dict has state by parameter, and groups of exactly its parameters.

    The result of ``flatten_optimizer_state_dict`` has not, nor has the combined state dict of several optimizers.
    """
    if type(optimizer).state_dict is Optimizer.state_dict and "state_dict" not in vars(optimizer):
        return True
    packed = state_dict_of(optimizer)
    groups = packed.get("param_groups")
    if not isinstance(packed.get("state"), Mapping) or not isinstance(groups, list):
        return False
    sizes = [len(group["params"]) if isinstance(group, Mapping) and "params" in group else None for group in groups]
    return sizes == [len(group) for group in _parameters_of(optimizer)]


def state_dict_of(optimizer: Optimizer) -> dict[str, Any]:
    """Return an optimizer's state dict, with only this rank's part if the optimizer partitions its state."""
    if not is_zero_optimizer(optimizer):
        return optimizer.state_dict()
    part = _local_optimizer(optimizer)
    # ZeroRedundancyOptimizer's own method returns the state of all ranks, which one rank must have gathered before.
    packed = Optimizer.state_dict(optimizer)
    numbers = _parameter_numbers(optimizer, packed)
    # A key that is no parameter is kept.
    return {**packed, "state": {numbers.get(id(key), key): slots for key, slots in part.state.items()}}


def held_here(optimizer: Optimizer, parameters: Mapping[Any, torch.Tensor]) -> dict[Any, torch.Tensor]:
    """Return the parameters of an optimizer whose state this rank keeps. The keys are arbitrary."""
    if not is_zero_optimizer(optimizer):
        return dict(parameters)
    own = {id(parameter) for group in _local_optimizer(optimizer).param_groups for parameter in group["params"]}
    return {key: parameter for key, parameter in parameters.items() if id(parameter) in own}


def _local_optimizer(optimizer: Any) -> Any:
    local = getattr(optimizer, "optim", None)
    if local is None:
        raise UnsupportedValueError(
            "a ZeroRedundancyOptimizer with overlap_with_ddp=True has no state before its first steps: "
            "train until it has built its partition, then save or load"
        )
    return local


def _parameter_numbers(optimizer: Optimizer, packed: Mapping[str, Any]) -> dict[int, int]:
    numbers = [number for group in packed["param_groups"] for number in group["params"]]
    own = itertools.chain(*_parameters_of(optimizer))
    return {id(parameter): number for number, parameter in zip(numbers, own, strict=True)}


def saved_groups(prefix: str, saved: RequestedEntries) -> list[list[Name]]:
    """Return the names or numbers of the parameters in each group of an optimizer in the checkpoint."""
    names = (f"{prefix}param_groups.{index}.params" for index in itertools.count())
    groups = [saved.value(name) for name in itertools.takewhile(saved.is_value, names)]
    return [group for group in groups if isinstance(group, list)]


def saved_order(
    prefix: str, depth: int, optimizer: Optimizer, saved: RequestedEntries, *, named: bool
) -> list[Name] | None:
    """Return the names or numbers of an optimizer's parameters in the checkpoint, if parameters are matched in order.

    They are if only the checkpoint or only the optimizer here (without its module, not ``named``) has names.
    ``optimizer.state_dict()`` has numbers, for example in an imported ``torch.save`` file. As in torch, parameters are
    in the order of the groups. ``depth`` is the number of keys before the optimizer's own. Raises KeyMismatchError if
    the groups have different sizes.
    """
    keys = saved.keys_below(f"{prefix}state.", depth + 1)
    # Return before the groups are read, because lists of parameter names are long.
    if named and keys and not any(str(key).isdecimal() for key in keys):
        return None
    groups = saved_groups(prefix, saved)
    names = [name for group in groups for name in group]
    numbered = all(isinstance(name, int) for name in names)
    if not names or (named and not numbered):
        return None
    sizes, own = ([len(group) for group in found] for found in (groups, _parameters_of(optimizer)))
    if sizes != own and not named and numbered:
        return None
    if sizes != own:
        raise KeyMismatchError(
            f"{prefix[:-1]!r} has {'numbered' if numbered else 'named'} parameters in the checkpoint, in groups of "
            f"{sizes} parameters, but the {type(optimizer).__name__} has groups of {own}"
            f"{'' if named else ', and without its module in the state its parameters have no names'}. Nothing was "
            "loaded. Build the optimizer with the same groups in the same order as when it was saved"
            f"{'' if numbered else ', put the module into the state'}, or load the other entries only (keys=)"
        )
    return names


def refuse_other_parameters(
    prefix: str,
    named: Mapping[Name, tuple[Any, torch.Tensor, Mapping[Any, Any]]],
    saved: RequestedEntries,
    *,
    exact: bool,
) -> None:
    """Raise KeyMismatchError if saved state does not fit the parameter that is at the same position in the optimizer.

    ``named`` has the name, the parameter and its state here, by name or number in the checkpoint. If not ``exact``,
    state of one dimension, or with a length of 1, fits too, as factored state has.
    """
    for own, (name, parameter, state) in named.items():
        stem = f"{prefix}state.{own}."
        for fqn in saved.below(stem):
            form = saved.tensor(fqn)
            value = state.get(fqn.removeprefix(stem), parameter)
            shapes = {tuple(parameter.shape), tuple(value.shape) if isinstance(value, torch.Tensor) else ()}
            # A single element can be a step or a factor of any parameter.
            if form is None or math.prod(form.shape) == 1 or form.shape in shapes:
                continue
            same = len(form.shape) == parameter.ndim
            factors = (
                all(n in (1, m) for n, m in zip(form.shape, parameter.shape, strict=True))
                if same
                else len(form.shape) == 1
            )
            if exact or not factors:
                raise KeyMismatchError(
                    f"{fqn!r} has shape {form.shape}, but the parameter of this optimizer at the same position, "
                    f"{name!r}, has shape {tuple(parameter.shape)}. Nothing was loaded. Pass the parameters to the "
                    "optimizer in the order in which they were saved. If the optimizer keeps state with another shape "
                    "than its parameter, make one step before the load"
                )


def refuse_other_order(prefix: str, parameters: Mapping[Name, torch.Tensor], saved: RequestedEntries) -> None:
    """Raise KeyMismatchError if saved state is one vector for all parameters, as LBFGS has, and their order differs."""
    n, stem = sum(p.numel() for p in parameters.values() if not is_lazy(p)), f"{prefix}state."
    forms = ((fqn, saved.tensor(fqn)) for fqn in saved.below(stem)) if len(parameters) > 1 else ()
    fqn = next((fqn for fqn, form in forms if form is not None and form.shape == (n,)), None)
    if fqn is None:
        return
    names = [name for group in saved_groups(prefix, saved) for name in group]
    if names != [*parameters]:
        raise KeyMismatchError(
            f"{fqn!r} is one vector for all parameters, in the order {names[:5]}, but the optimizer has the order "
            f"{[*parameters][:5]}. Nothing was loaded. Pass the parameters in the order in which they were saved"
        )


def _parameters_of(optimizer: Optimizer) -> list[list[torch.Tensor]]:
    return [group["params"] for group in optimizer.param_groups]
