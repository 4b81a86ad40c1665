"""Compare the names of weights with those of models of transformers, which are built on the meta device."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import accelerate
import transformers
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter
from transformers.initialization import no_init_weights
from transformers.models.auto import modeling_auto

import zarrckpt
from zarrckpt.integrations._lora import peft_names


def build_on_meta(make: Callable[[Any], Any], config: Any) -> Any:
    """Return a model whose parameters are on the meta device.

    Its buffers are not: the constructor computes those that are not saved, such as rotary frequencies.
    """
    with accelerate.init_empty_weights(include_buffers=False), no_init_weights():
        model = make(config)
    model.tie_weights()
    return model


def _models_on_meta(config: Any) -> Iterator[Any]:
    """Yield a model of the class that a configuration names, or one of each class for its type if it names none."""
    classes = dict.fromkeys((config.architectures or ())[:1])
    if not classes:
        tables = [table for name, table in vars(modeling_auto).items() if name.endswith("_MAPPING_NAMES")]
        for found in (table.get(config.model_type, ()) for table in tables):
            classes |= dict.fromkeys([found] if isinstance(found, str) else found)
    for name in classes:
        kind = getattr(transformers, str(name), None)
        if inspect.isclass(kind) and issubclass(kind, PreTrainedModel):
            try:
                yield build_on_meta(kind, copy.deepcopy(config))
            except Exception:  # The class may need another package, or another type of configuration.
                continue


def check_names(ckpt: zarrckpt.Checkpoint, prefix: str, config: Any, names: Mapping[str, str]) -> Any:
    """Return a model on the meta device whose weights have these names. None if its class is not known.

    Raises KeyMismatchError if there is no such model. A configuration without a class also accepts further names.
    """
    best: Any = None
    if getattr(config, "quantization_config", None) is None:
        for model in _models_on_meta(config):
            found = (*find_differences(model, names), model)
            if best is None or [*map(len, found[:2])] < [*map(len, best[:2])]:
                best = found
            if not found[0] and not found[1]:
                break
    if best is None:
        if peft_names(names):
            raise name_mismatch(ckpt, prefix, config, names, [], [*names], _ADAPTER_STEP)
        return None
    missing, unexpected, model = best
    if missing or unexpected:
        missing, unexpected = find_differences(model, _rename_as_loads(model, names))
    if missing or (unexpected and config.architectures):
        raise name_mismatch(ckpt, prefix, model, names, missing, unexpected, _ADAPTER_STEP)
    return model


def _rename_as_loads(model: Any, names: Iterable[str]) -> dict[str, str]:
    """Return new name -> name as ``from_pretrained`` renames weights, for example of experts and of older versions."""
    # In transformers, converters see the names that the renamings return.
    transforms = sorted(get_model_conversion_mapping(model), key=lambda one: isinstance(one, WeightConverter))
    found = {}
    for name in names:
        new = name
        for transform in transforms:
            new, _ = transform.rename_source_key(new)
        found[new] = name
    return found


_ADAPTER_STEP = "pass peft_config=model.peft_config to export the adapter, and merge=True to export the merged model"


def find_differences(model: nn.Module, names: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Return the missing and the unexpected names of weights. A tied weight needs one of its names."""
    state = model.state_dict(keep_vars=True)
    present = {id(tensor) for name, tensor in state.items() if name in names}
    missing = [name for name, tensor in state.items() if name not in names and id(tensor) not in present]
    return missing, [name for name in names if name not in state]


def name_mismatch(
    ckpt: zarrckpt.Checkpoint,
    prefix: str,
    model: Any,
    names: Iterable[str],
    missing: list[str],
    unexpected: list[str],
    step: str,
) -> zarrckpt.KeyMismatchError:
    """Return the error. ``step`` is the next step for a model with adapters."""
    peft = bool(peft_names(names))
    return zarrckpt.KeyMismatchError(
        f"{ckpt.url}: the entries below {prefix!r} do not match {type(model).__name__} with this configuration: "
        f"{len(missing)} weights are missing ({missing[:5]}) and {len(unexpected)} are unexpected ({unexpected[:5]}). "
        + (f"The names are those of a PEFT model, such as LoRA: {step}" if peft else "Check prefix= and config=")
    )
