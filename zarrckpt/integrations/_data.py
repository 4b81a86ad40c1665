"""What is data, and so is kept without pickle; anything else is named before it is saved."""

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

_KEPT = frozenset({type(None), bool, int, float, complex, str, bytes, bytearray, io.BytesIO})


def refuse_objects(found: Iterable[str], allow: str = "allow_pickle=True, at the save and at the load") -> None:
    """Raise UnsupportedValueError for what :func:`objects_in` found, all at once, if that is anything.

    ``allow`` says what the user may write to save it all the same.
    """
    if faults := sorted({*found}):
        raise zarrckpt.UnsupportedValueError(
            f"a checkpoint holds data, and this is none: {'; '.join(faults)}. Keep its numbers, text, tensors or "
            f"arrays instead, leave it out, or use {allow}"
        )


def objects_in(value: Any, name: str = "", *, allow_pickle: bool = False, exact: bool = False) -> Iterator[str]:
    """What is no data below a name, in words.

    With ``allow_pickle`` only what a save would take apart, since it has a state dict; ``exact``: dicts of other
    classes than Python's own two are no data, since they come back as these.
    """
    if isinstance(value, torch.Tensor) or _is_kept(value):
        return
    if isinstance(value, zarrckpt.PerRank):
        if not has_state(value.value):
            yield from objects_in(value.value, name, allow_pickle=allow_pickle, exact=exact)
    elif type(value) in (dict, OrderedDict) or (isinstance(value, Mapping) and not exact):
        for key, item in value.items():
            yield from objects_in(item, f"{name}.{key}" if name else str(key), allow_pickle=allow_pickle, exact=exact)
    elif isinstance(value, list) and any(isinstance(item, torch.Tensor | Mapping | list) for item in value):
        for place, item in enumerate(value):
            yield from objects_in(item, f"{name}.{place}", allow_pickle=allow_pickle, exact=exact)
    elif has_state(value) or not (allow_pickle or (_torch_loads(value) and not isinstance(value, Mapping))):
        inside = value if type(value) in (list, tuple, set, frozenset) else ()
        found = [text for item in inside for text in objects_in(item, name)]
        yield from found or [f"{name!r} is or has a {type(value).__module__}.{type(value).__qualname__}"]


def _is_kept(value: Any) -> bool:
    """Whether a value is kept as it is, with all that is inside: as JSON, or as an array."""
    if type(value) in _KEPT:
        return True
    if type(value) in (list, tuple, set, frozenset):
        return {*map(type, value)} <= _KEPT or all(map(_is_kept, value))
    if type(value) in (dict, OrderedDict):
        return all(map(_is_kept, value)) and all(map(_is_kept, value.values()))
    return (type(value) is np.ndarray or isinstance(value, np.generic)) and not value.dtype.hasobject


def _torch_loads(value: Any) -> bool:
    """Whether torch loads a value without pickle's powers: types and sizes, tuples of tensors."""
    stream = io.BytesIO()
    with suppress(Exception):  # no, whatever the error is
        torch.save(value, stream)
        stream.seek(0)
        return type(load_torch(stream)) is type(value)
    return False


def loose_parts(value: Any) -> Any:
    """What a model or an optimizer brings beside its tensors, of all kinds. Not collective."""
    if isinstance(value, torch.optim.Optimizer):
        return value.state_dict()
    if not isinstance(value, torch.nn.Module):
        return value
    extra = torch.nn.Module.get_extra_state
    modules = {name: one for name, one in value.named_modules() if type(one).get_extra_state is not extra}
    return {name: one.get_extra_state() for name, one in modules.items()}


def has_state(value: Any) -> bool:
    """Whether a value has a state dict, and takes it back."""
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def with_plain_parameters(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint of Lightning in which hyperparameters of OmegaConf are dicts, and their type its name.

    Those of the module, and those of the data module.
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
