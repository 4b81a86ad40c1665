"""Find values that cannot be saved as data, so that they are refused by name before anything is written.

Data are numbers, text, bytes, tensors, NumPy arrays, and lists, tuples, sets and dicts of these.
"""

from __future__ import annotations

import io
import sys
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import torch

import zarrckpt
from zarrckpt._format.torch_archives import load_torch

_DATA_TYPES = frozenset({type(None), bool, int, float, complex, str, bytes, bytearray, io.BytesIO})


def refuse_non_data(found: Iterable[str], allow: str = "allow_pickle=True, at the save and at the load") -> None:
    """Raise one UnsupportedValueError that names all values found by :func:`find_non_data`, if there are any.

    ``allow`` is the code with which a user can save them anyway. It becomes part of the message.
    """
    if faults := sorted({*found}):
        raise zarrckpt.UnsupportedValueError(
            f"cannot be saved as data: {'; '.join(faults)}. Convert it to numbers, text, tensors or arrays, leave it "
            f"out, or use {allow}"
        )


def find_non_data(value: Any, name: str = "", *, allow_pickle: bool = False, exact: bool = False) -> Iterator[str]:
    """Yield a text for each value that is not data, with its name and class.

    With ``allow_pickle``, yield only objects that have a state dict: a save would store that instead of a pickle.
    With ``exact``, also yield mappings of other classes than dict and OrderedDict, because they load as these.
    """
    if isinstance(value, torch.Tensor) or _is_data(value):
        return
    if isinstance(value, zarrckpt.PerRank):
        if not has_state(value.value):
            yield from find_non_data(value.value, name, allow_pickle=allow_pickle, exact=exact)
    elif type(value) in (dict, OrderedDict) or (isinstance(value, Mapping) and not exact):
        for key, item in value.items():
            yield from find_non_data(
                item, f"{name}.{key}" if name else str(key), allow_pickle=allow_pickle, exact=exact
            )
    elif isinstance(value, list) and any(isinstance(item, torch.Tensor | Mapping | list) for item in value):
        for index, item in enumerate(value):
            yield from find_non_data(item, f"{name}.{index}", allow_pickle=allow_pickle, exact=exact)
    elif has_state(value) or not (allow_pickle or (_torch_loads(value) and not isinstance(value, Mapping))):
        inside = value if type(value) in (list, tuple, set, frozenset) else ()
        found = [text for item in inside for text in find_non_data(item, name)]
        yield from found or [f"{name!r} is or has a {type(value).__module__}.{type(value).__qualname__}"]


def _is_data(value: Any) -> bool:
    """Whether a value and everything inside it can be stored as JSON or as an array."""
    if type(value) in _DATA_TYPES:
        return True
    if type(value) in (list, tuple, set, frozenset):
        return {*map(type, value)} <= _DATA_TYPES or all(map(_is_data, value))
    if type(value) in (dict, OrderedDict):
        return all(map(_is_data, value)) and all(map(_is_data, value.values()))
    return (type(value) is np.ndarray or isinstance(value, np.generic)) and not value.dtype.hasobject


def _torch_loads(value: Any) -> bool:
    """Whether torch can save a value and load it without running code: dtypes, sizes, tuples of tensors."""
    stream = io.BytesIO()
    with suppress(Exception):  # Any error means that the answer is no.
        torch.save(value, stream)
        stream.seek(0)
        return type(load_torch(stream)) is type(value)
    return False


def state_to_check(value: Any) -> Any:
    """Return the state of a model or an optimizer that may hold objects. Not collective.

    This is the state dict of an optimizer and the extra state of a model's modules. Other values are returned as they
    are.
    """
    if isinstance(value, torch.optim.Optimizer):
        return value.state_dict()
    if not isinstance(value, torch.nn.Module):
        return value
    extra = torch.nn.Module.get_extra_state
    modules = {name: module for name, module in value.named_modules() if type(module).get_extra_state is not extra}
    return {name: module.get_extra_state() for name, module in modules.items()}


def has_state(value: Any) -> bool:
    """Whether a value has ``state_dict`` and ``load_state_dict``."""
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def with_plain_parameters(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return a Lightning checkpoint with OmegaConf hyperparameters as dicts and their type as the type's name.

    This covers the hyperparameters of the module and of the data module.
    """
    types = {key: checkpoint.get(key) for key in ("hparams_type", "datamodule_hparams_type")}
    named = {
        key: f"{kind.__module__}.{kind.__qualname__}"
        for key, kind in types.items()
        if isinstance(kind, type) and kind.__module__.startswith("omegaconf.")
    }
    if not named:
        return checkpoint
    of_omegaconf = sys.modules["omegaconf"].OmegaConf
    configs = {key: value for key, value in checkpoint.items() if of_omegaconf.is_config(value)}
    return {**checkpoint, **{key: of_omegaconf.to_container(value) for key, value in configs.items()}, **named}
