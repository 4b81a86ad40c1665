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

_KEPT = frozenset({type(None), bool, int, float, complex, str, bytes, bytearray, io.BytesIO})


def refuse_objects(faults: Iterable[str], advice: str) -> None:
    """Raise UnsupportedValueError for what is no data, all at once, if there is any."""
    if faults := sorted(faults):
        raise zarrckpt.UnsupportedValueError(
            f"a checkpoint holds data, and this is none: {'; '.join(faults)}. {advice}"
        )


def objects_in(value: Any, name: str) -> Iterator[tuple[str, bool]]:
    """What is no data below a name: in words, and whether a save would take it apart, since it has a state dict."""
    if isinstance(value, torch.Tensor) or _is_kept(value):
        return
    if isinstance(value, zarrckpt.PerRank):
        if not has_state(value.value):
            yield from objects_in(value.value, name)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from objects_in(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list) and any(isinstance(item, torch.Tensor | Mapping | list) for item in value):
        for place, item in enumerate(value):
            yield from objects_in(item, f"{name}.{place}")
    elif (parts := has_state(value)) or not _torch_loads(value):
        yield f"{name!r} is a {type(value).__module__}.{type(value).__qualname__}", parts


def _is_kept(value: Any) -> bool:
    """Whether a value is kept as it is, with all that is inside: as JSON, or as an array."""
    if type(value) in _KEPT:
        return True
    if type(value) in (list, tuple, set, frozenset):
        return all(map(_is_kept, value))
    if type(value) in (dict, OrderedDict):
        return all(map(_is_kept, value)) and all(map(_is_kept, value.values()))
    return (type(value) is np.ndarray or isinstance(value, np.generic)) and not value.dtype.hasobject


def _torch_loads(value: Any) -> bool:
    """Whether torch loads a value without pickle's powers: types and sizes, tuples of tensors."""
    stream = io.BytesIO()
    with suppress(Exception):  # no, whatever the error is
        torch.save(value, stream)
        stream.seek(0)
        return type(torch.load(stream, map_location="cpu", weights_only=True)) is type(value)
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
    """A checkpoint of Lightning in which hyperparameters of OmegaConf are dicts, and their type its name."""
    kind = checkpoint.get("hparams_type")
    if not isinstance(kind, type) or not kind.__module__.startswith("omegaconf."):
        return checkpoint
    of_omegaconf = sys.modules["omegaconf"].OmegaConf
    configs = {key: value for key, value in checkpoint.items() if of_omegaconf.is_config(value)}
    plain = {key: of_omegaconf.to_container(value) for key, value in configs.items()}
    return {**checkpoint, **plain, "hparams_type": f"{kind.__module__}.{kind.__qualname__}"}
