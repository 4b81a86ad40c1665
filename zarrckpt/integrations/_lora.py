"""Merge a LoRA adapter into its base model, one weight at a time, with the arithmetic of PEFT. PEFT is not needed."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

import zarrckpt
from zarrckpt._format.chunk_layout import RawArray, raw_dtype

_ROOT = "base_model.model."
"""The beginning of all names in a ``PeftModel``."""

_PEFT_NAME = re.compile(
    r"^base_model\.model\.|(^|\.)(base_layer|modules_to_save|original_module|token_adapter|lora_\w+)(\.|$)"
)
_FACTOR = re.compile(r"(.+)\.lora_(?:([AB])\.([^.]+)\.weight|embedding_([AB])\.([^.]+))")
"""Names of the two factors of an adapted weight: the module, the factor and the adapter."""

_TRAINED_MODULE = re.compile(r"(.+)\.modules_to_save\.([^.]+)\.(.+)")
"""Names of the weights of a module that was trained as a whole: the module, the adapter and the rest."""

_MERGED_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)

_IGNORED_MEMBERS = {
    *("peft_type", "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"),
    *("inference_mode", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "lora_dropout"),
    *("modules_to_save", "bias", "init_lora_weights", "fan_in_fan_out", "megatron_core", "qalora_group_size"),
    *("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"),
}
"""Members of a ``LoraConfig`` that change no merged weight, or that :func:`_scaling` uses. All others must be unset."""


def peft_names(names: Iterable[str]) -> list[str]:
    """Return the names that only models with adapters have."""
    return [name for name in names if _PEFT_NAME.search(name)]


def adapter_names(names: Iterable[str]) -> list[str]:
    """Return the names of the adapters with LoRA factors."""
    found = filter(None, map(_FACTOR.fullmatch, names))
    return [*dict.fromkeys(factor[3] or factor[5] for factor in found)]


def plan_merge(
    ckpt: zarrckpt.Checkpoint, names: Mapping[str, str], configs: Mapping[str, Any]
) -> tuple[dict[str, str], dict[str, dict[str, str]], Mapping[str, Any]]:
    """Return the entries of the base model as fqn -> name, the factors by module, and the adapter's configuration.

    Args:
        ckpt: the checkpoint.
        names: fqn -> name in the model with the adapter.
        configs: adapter -> configuration.

    Raises UnsupportedValueError, with names, for all that cannot be merged.
    """
    base: dict[str, str] = {}
    factors: dict[str, dict[str, str]] = {}
    adapters = dict.fromkeys(adapter_names(names.values()))
    for fqn, name in names.items():
        name = name.removeprefix(_ROOT)
        if factor := _FACTOR.fullmatch(name):
            factors.setdefault(factor[1], {})[factor[2] or factor[4]] = fqn
        elif trained := _TRAINED_MODULE.fullmatch(name):
            adapters[trained[2]] = None
            base[fqn] = f"{trained[1]}.{trained[3]}"
        elif ".original_module." not in name:
            base[fqn] = re.sub(r"\.base_layer\.(?=[^.]+$)", ".", name)
    if len(adapters) != 1 or not factors:
        raise zarrckpt.UnsupportedValueError(
            f"{ckpt.url}: merge=True requires a model with one LoRA adapter, found {len(adapters)} adapters: "
            f"{[*adapters][:5]}. Without merge=True, export_pretrained writes each to a folder"
        )
    others = [name for name, count in Counter(base.values()).items() if count > 1] + peft_names(base.values())
    if others:
        raise zarrckpt.UnsupportedValueError(
            f"{ckpt.url}: merge=True does not support {others[:3]}, as DoRA and quantised base models have. Merge it "
            "with PEFT's merge_and_unload"
        )
    if lost := sorted({f"{module}.weight" for module in factors} - {*base.values()}):
        raise zarrckpt.UnsupportedValueError(
            f"{ckpt.url}: merge=True requires the base model, and {lost[0]!r} is not in the checkpoint "
            "(adapters_only=True?). Export the adapter, and merge it with PEFT's merge_and_unload"
        )
    [adapter] = adapters
    if adapter not in configs:
        raise ValueError(
            f"{ckpt.url}: the scaling of the adapter {adapter!r} is in its configuration, which was not saved (found "
            f"{[*configs]}): pass peft_config=model.peft_config"
        )
    config = configs[adapter] if isinstance(configs[adapter], dict) else {}
    unmerged = [member for member, value in config.items() if value and member not in _IGNORED_MEMBERS]
    if config.get("peft_type") != "LORA" or unmerged:
        raise zarrckpt.UnsupportedValueError(
            f"{ckpt.url}: merge=True does not support the adapter {adapter!r} of type {config.get('peft_type')!r} "
            f"with {unmerged or 'it'}. Merge it with PEFT's merge_and_unload"
        )
    return base, factors, config


def merged_weights(
    ckpt: zarrckpt.Checkpoint,
    model: nn.Module,
    base: Mapping[str, str],
    factors: Mapping[str, Mapping[str, str]],
    config: Mapping[str, Any],
) -> dict[str, Callable[[], RawArray]]:
    """Return functions that read and merge one adapted weight each, by the weight's fqn.

    Raises UnsupportedValueError for modules that are neither linear nor embeddings, and for other dtypes and shapes.
    """
    found: dict[str, Callable[[], RawArray]] = {}
    fqns, modules = {name: fqn for fqn, name in base.items()}, dict(model.named_modules())
    for module, pair in factors.items():
        weight = fqns[f"{module}.weight"]
        kind = modules.get(module)
        entries = [ckpt.entry(fqn) for fqn in (weight, *(pair[letter] for letter in "AB" if letter in pair))]
        shapes = [tuple(entry.shape or ()) for entry in entries]
        rank, scaling = _scaling(ckpt, config, module)
        is_transposed = isinstance(kind, Conv1D | nn.Embedding)
        rows, columns = (*shapes[0], 0, 0)[:2][:: -1 if is_transposed else 1]
        expected = [(rank, columns), (rows, rank)]
        dtypes = [getattr(torch, str(entry.dtype)) for entry in entries]
        if (
            not isinstance(kind, nn.Linear | Conv1D | nn.Embedding)
            or shapes[1:] != expected
            or not {*dtypes} <= {*_MERGED_DTYPES}
        ):
            raise zarrckpt.UnsupportedValueError(
                f"{ckpt.url}: merge=True does not support {module!r}, a {type(kind).__name__} of {dtypes[0]} and shape "
                f"{shapes[0]}: expected a linear layer or an embedding of floating numbers, with factors of the shapes "
                f"{expected}, found {shapes[1:]}. Merge it with PEFT's merge_and_unload"
            )
        found[weight] = partial(_merge, ckpt, (weight, pair["A"], pair["B"]), scaling, kind)
    return found


def _scaling(ckpt: zarrckpt.Checkpoint, config: Mapping[str, Any], module: str) -> tuple[int, float]:
    """Return the rank and the scaling of a module's adapter. A pattern is a regular expression for the name's end."""
    try:
        rank, alpha = (
            next(
                (value for key, value in (config.get(patterns) or {}).items() if re.match(rf"(.*\.)?({key})$", module)),
                config[default],
            )
            for patterns, default in (("rank_pattern", "r"), ("alpha_pattern", "lora_alpha"))
        )
        return rank, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    except Exception as err:  # The configuration can be any JSON.
        raise zarrckpt.CorruptCheckpointError(
            f"{ckpt.url}: the configuration of the adapter is not that of LoRA: {type(err).__name__}: {err!s:.200}"
        ) from err


def _merge(ckpt: zarrckpt.Checkpoint, fqns: tuple[str, str, str], scaling: float, kind: nn.Module | None) -> RawArray:
    """Return the elements of a merged weight, rounded where PEFT rounds."""
    tensors = dict(ckpt.iter_tensors(fqns))
    weight, first, second = (tensors.pop(fqn) for fqn in fqns)
    dtype = second.dtype
    if dtype.itemsize == 2:
        first, second = first.float(), second.float()
    delta = (second @ first).mul_(scaling).to(dtype)
    if isinstance(kind, nn.Embedding):
        delta = delta.to(weight.dtype)
    weight += delta.T if isinstance(kind, Conv1D | nn.Embedding) else delta
    if not weight.isfinite().all():
        raise zarrckpt.UnsupportedValueError(
            f"{ckpt.url}: the merged {fqns[0]!r} has NaN or infinite elements. Check the adapter, or export it without "
            "merge=True"
        )
    raw: Any = {2: torch.int16, 4: torch.int32, 8: torch.int64}[weight.itemsize]
    elements: RawArray = weight.view(raw).numpy().view(raw_dtype(weight.itemsize))
    return elements
