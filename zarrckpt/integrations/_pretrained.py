"""Load models of transformers from training checkpoints, and export checkpoints as folders for ``from_pretrained``."""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import CONFIG_MAPPING, GenerationConfig

import zarrckpt
from zarrckpt._convert.safetensors import is_model_file, write_safetensors
from zarrckpt._errors import warn
from zarrckpt._format.chunk_layout import RawArray
from zarrckpt._store import StoreSpec
from zarrckpt._store._url import parse
from zarrckpt._store._whole_files import local_path, new_files, refuse_existing, relative_files, upload_files
from zarrckpt.integrations import _lora
from zarrckpt.integrations._model_names import build_on_meta, check_names, find_differences, name_mismatch
from zarrckpt.integrations._trainer_state import as_json_value

DESCRIPTIONS = "trainer"
"""The entry of a checkpoint that contains the texts ``config``, ``generation_config`` and ``peft_config``."""


def load_pretrained(
    model_class: Any,
    url: str | os.PathLike[str],
    *,
    prefix: str = "model",
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    config: Any = None,
    no_dist: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    options: zarrckpt.LoadOptions | None = None,
) -> Any:
    """Build a model of transformers and load its weights from a training checkpoint with any sharding.

    The parameters begin on the meta device. Then memory is allocated once, in the final dtype and on the final device,
    and loaded chunk by chunk. Memory beyond the model is limited by :class:`zarrckpt.LoadOptions`. The model is in
    evaluation mode, as after ``from_pretrained``. All ranks call it, and each returns a whole model. The costs are
    those of :func:`zarrckpt.load` and one more request per rank.

    Args:
        model_class: the class of the model, such as ``LlamaForCausalLM`` or ``AutoModelForCausalLM``.
        url: the url of a checkpoint that ``ZarrTrainer``, :func:`zarrckpt.save` or another caller saved.
        prefix: the model's key in the saved state: ``"model"`` for ``{"model": model}``.
        dtype: the dtype of floating-point parameters and buffers. Default: the dtype in which each was saved.
        device: the device of parameters and buffers. Default: the CPU.
        config: the model's configuration. Default: the one that ``ZarrTrainer`` saved, without members that name code
            or a repository, such as ``auto_map`` and ``attn_implementation``.
        no_dist: load in this process only, as in :func:`zarrckpt.load`.
        storage_options, options: as in :func:`zarrckpt.load`.

    A model with a LoRA adapter has other names: merge it with :func:`export_pretrained`, and load the folder with
    ``from_pretrained``.

    Raises ValueError if there is no configuration. Raises KeyMismatchError for missing and unexpected weights and for
    wrong shapes. Raises the errors of :func:`zarrckpt.load`.
    """
    ckpt = zarrckpt.open(url, storage_options=storage_options)
    config = _config_of(ckpt, config)
    make = model_class.from_config if hasattr(model_class, "from_config") else model_class
    model = build_on_meta(make, config)
    names = {fqn.removeprefix(f"{prefix}."): fqn for fqn in ckpt.tensors if fqn.startswith(f"{prefix}.")}
    missing, unexpected = find_differences(model, names)
    if missing or unexpected:
        step = "merge it with export_pretrained(..., merge=True), and load that folder with from_pretrained"
        raise name_mismatch(ckpt, prefix, model, names, missing, unexpected, step)
    saved = {name: getattr(torch, str(ckpt.entry(fqn).dtype)) for name, fqn in names.items()}
    _allocate(model, saved, dtype, torch.device("cpu" if device is None else device))
    state = model.state_dict()
    target: Any = {name: state[name] for name in names}
    for part in reversed(prefix.split(".")):
        target = {part: target}
    zarrckpt.load(target, url, allow_cast=True, no_dist=no_dist, storage_options=storage_options, options=options)
    return model.eval()


def export_pretrained(
    url: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    prefix: str = "model",
    dtype: torch.dtype | str | None = None,
    config: Any = None,
    generation_config: Any = None,
    peft_config: Any = None,
    merge: bool = False,
    tokenizer: Any = None,
    max_file_bytes: int = 5_000_000_000,
    overwrite: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    folder_options: Mapping[str, Any] | None = None,
) -> Any:
    """Write a checkpoint's model to a local folder or a url, in the format of ``from_pretrained``.

    It writes safetensors files with their index, ``config.json``, ``generation_config.json`` and the tokenizer's files.
    No memory is allocated for the model. The memory limit is that of :func:`zarrckpt.to_safetensors`. Tied weights are
    written once. One process calls it. Names are compared with those of the configuration's class, or of all classes
    for its type if it has no ``architectures``. They are not compared for custom classes and for quantised models.

    For a url, all files are written to a temporary local folder below ``TMPDIR`` and then uploaded one after the other:
    first the weights, last ``config.json`` and other small files. An interrupted upload leaves some of the files. Then
    export again with ``overwrite=True``.

    For a PEFT model that ``ZarrTrainer`` saved, or with ``peft_config``, it writes the adapters and the tokenizer's
    files instead, for ``PeftModel.from_pretrained``: ``adapter_model.safetensors`` and ``adapter_config.json``.
    Adapters other than ``default`` go to folders with their names. This works for adapters whose weights have the
    adapter's name in their names, such as LoRA.

    With ``merge=True`` it writes the base model with the LoRA adapter merged, as PEFT's ``merge_and_unload`` returns
    it. Each adapted weight is read and merged alone, in memory for about three times its size. Linear layers,
    embeddings and ``modules_to_save`` are supported. DoRA, other types of adapters, several adapters, quantised base
    models and adapted tied weights are refused.

    Args:
        url, prefix: as in :func:`load_pretrained`.
        folder: a local path, or a url such as ``s3://bucket/model``. It is created if it does not exist.
        dtype: the dtype of floating-point weights, such as ``torch.bfloat16``, as in
            :func:`zarrckpt.copy`. Default: as saved.
        config, generation_config: the model's configurations. Default: those that ``ZarrTrainer`` saved.
        peft_config: the configuration of the adapter, or ``model.peft_config``. Default: the one that ``ZarrTrainer``
            saved.
        merge: write the merged model instead of the adapter.
        tokenizer: a tokenizer or processor with ``save_pretrained``. Default: no tokenizer is written.
        max_file_bytes: as in :func:`zarrckpt.to_safetensors`.
        overwrite: replace existing files. Default: a file that would be replaced is a StorageError.
        storage_options: as in :func:`zarrckpt.load`.
        folder_options: the ``storage_options`` of ``folder`` if it is a url. Default: those of the checkpoint.

    Returns the :class:`ExportReport` of the weights, or None for adapters. Raises ValueError if there is no
    configuration, KeyMismatchError for missing and unexpected weights, UnsupportedValueError for other adapters,
    CorruptCheckpointError for a saved configuration that transformers rejects, StorageError, and the errors of
    :func:`zarrckpt.to_safetensors`.
    """
    ckpt = zarrckpt.open(url, storage_options=storage_options)
    name = None if dtype is None else str(dtype).removeprefix("torch.")
    configs = _adapter_configs(ckpt, peft_config)
    has_adapters = bool(configs) and not merge
    if not has_adapters:
        config = _config_of(ckpt, config)
        weights = _plan_weights(ckpt, prefix, config, configs if merge else None)

    def write(local_folder: str) -> Any:
        if tokenizer is not None:
            tokenizer.save_pretrained(local_folder)
        if has_adapters:
            return _export_adapters(ckpt, prefix, Path(local_folder), name, configs)
        return _export_model(ckpt, local_folder, config, generation_config, weights, name, max_file_bytes)

    def is_replaced(key: str) -> bool:
        return key.endswith(_ADAPTER_FILES[0]) if has_adapters else is_model_file(key)

    file_names = _ADAPTER_FILES if has_adapters else _MODEL_FILES
    if parse(folder).kind == "local":
        target = local_path(folder)
        if not overwrite:  # Check before weights are copied. new_files checks the other files at the end.
            present = os.listdir(target) if os.path.isdir(target) else ()
            refuse_existing(os.path.join(target, key) for key in present if is_replaced(key) or key in file_names)
        with new_files(target, overwrite=overwrite, replaces=None if has_adapters else is_model_file) as part:
            report = write(part)
        return None if report is None else dataclasses.replace(report, folder=target)
    store = StoreSpec(folder, storage_options if folder_options is None else folder_options).open()
    keys = {file.key for file in store.list()}
    _refuse_keys(store, overwrite, (key for key in keys if is_replaced(key) or key in file_names))
    with tempfile.TemporaryDirectory() as local:
        report = write(local)
        _refuse_keys(store, overwrite, keys & {*relative_files(local)})
        store.delete([*filter(is_replaced, keys)])
        upload_files(local, store)
    return None if report is None else dataclasses.replace(report, folder=store.url)


_ADAPTER_FILES = ("adapter_model.safetensors", "adapter_config.json")
_MODEL_FILES = ("config.json", "generation_config.json")


def _refuse_keys(store: Any, overwrite: bool, found: Iterable[str]) -> None:
    for key in found if not overwrite else ():
        raise zarrckpt.StorageError(f"{key!r} already exists in {store.url}: pass overwrite=True, or another folder")


_Weights = tuple[dict[str, str], dict[str, Callable[[], RawArray]]]
"""The weights to write as fqn -> name, and functions that return the merged ones, by fqn."""


def _plan_weights(ckpt: zarrckpt.Checkpoint, prefix: str, config: Any, merged: Mapping[str, Any] | None) -> _Weights:
    """Choose the weights of an export. ``merged`` has the configurations of adapters, or is None without a merge."""
    names = {fqn: fqn.removeprefix(f"{prefix}.") for fqn in ckpt.select(prefix).tensors}
    changed: dict[str, Callable[[], RawArray]] = {}
    if merged is None:
        model = check_names(ckpt, prefix, config, {name: fqn for fqn, name in names.items()})
    else:
        names, factors, adapter_config = _lora.plan_merge(ckpt, names, merged)
        model = check_names(ckpt, prefix, config, {name: fqn for fqn, name in names.items()})
        if model is None:
            raise zarrckpt.UnsupportedValueError(
                f"{ckpt.url}: merge=True requires a configuration of a class of transformers that is not quantised, "
                f"found {type(config).__name__} of {config.architectures}. Use PEFT's merge_and_unload"
            )
        changed = _lora.merged_weights(ckpt, model, names, factors, adapter_config)
        state = model.state_dict(keep_vars=True)
        uses = Counter(map(id, state.values()))
        own = [name for fqn, name in names.items() if fqn in changed or ".modules_to_save." in fqn]
        if tied := [name for name in own if uses[id(state.get(name))] > 1]:
            raise zarrckpt.UnsupportedValueError(
                f"{ckpt.url}: merge=True does not support adapters of tied weights: {tied[:3]}. Use PEFT's "
                "merge_and_unload"
            )
    pairs = _tied_names(model, config)
    present = {*names.values()}
    return {fqn: name for fqn, name in names.items() if pairs.get(name) not in present}, changed


def _export_model(
    ckpt: zarrckpt.Checkpoint,
    folder: str,
    config: Any,
    generation_config: Any,
    weights: _Weights,
    dtype: str | None,
    max_file_bytes: int,
) -> Any:
    names, changed = weights
    report = write_safetensors(ckpt, names, folder, dtype, max_file_bytes, changed=changed)
    # from_pretrained creates the model in the dtype of its configuration.
    floating = Counter(kind for fqn in names if "float" in (kind := str(ckpt.entry(fqn).dtype)))
    own_dtype = dtype or (floating.most_common(1)[0][0] if floating else None)
    described = config.to_dict() if own_dtype is None else {**config.to_dict(), "dtype": own_dtype}
    type(config).from_dict(described).save_pretrained(folder)
    entry = f"{DESCRIPTIONS}.generation_config"
    if generation_config is None and entry in ckpt:
        generation_config = _from_document(ckpt, entry, GenerationConfig.from_dict)
    if generation_config is not None:
        generation_config.save_pretrained(folder)
    return report


def _tied_names(model: Any, config: Any) -> dict[str, str]:
    """Return name -> source of the weights that a model shares with other weights."""
    tied = getattr(model, "_tied_weights_keys", None) if getattr(config, "tie_word_embeddings", False) else None
    return dict(tied) if isinstance(tied, dict) else {}


def _adapter_configs(ckpt: zarrckpt.Checkpoint, given: Any) -> dict[str, Any]:
    """Return the configuration of each adapter: those of an argument, or else those in the checkpoint."""
    entry = f"{DESCRIPTIONS}.peft_config"
    if given is None:
        return _from_document(ckpt, entry, dict) if entry in ckpt else {}
    if hasattr(given, "to_dict"):
        adapters = _lora.adapter_names(ckpt)
        given = dict.fromkeys(adapters if len(adapters) == 1 else ["default"], given)
    plain = {name: one.to_dict() if hasattr(one, "to_dict") else one for name, one in given.items()}
    return dict(json.loads(json.dumps(plain, default=as_json_value)))


def _export_adapters(
    ckpt: zarrckpt.Checkpoint, prefix: str, folder: Path, dtype: str | None, configs: Mapping[str, Any]
) -> None:
    for adapter, config in configs.items():
        if not isinstance(config, dict) or adapter in ("", ".", "..") or not {*adapter}.isdisjoint("/\\\0"):
            raise zarrckpt.CorruptCheckpointError(
                f"{ckpt.url}: found a configuration of the adapter {adapter!r}, expected a JSON object and a valid name"
            )
        own_folder = folder if adapter == "default" else folder / adapter
        names = {name: fqn for fqn in ckpt.tensors if (name := _name_in_adapter(fqn, prefix, adapter))}
        if not names or any(name.startswith("prompt_encoder.") for name in names):  # PEFT has other names for prompts
            raise zarrckpt.UnsupportedValueError(
                f"{ckpt.url}: the adapter {adapter!r} ({config.get('peft_type')}) cannot be exported, because its "
                f"weights below {prefix!r} do not have the names of PEFT's files. Resume the training, then call "
                "model.save_pretrained"
            )
        found = ckpt.load(names.values())
        for part in prefix.split("."):
            found = found[part]
        tensors = {name: found[fqn.removeprefix(f"{prefix}.")] for name, fqn in names.items()}
        if dtype is not None:
            kind = getattr(torch, dtype)
            tensors = {name: t.to(kind) if t.is_floating_point() and t.ndim else t for name, t in tensors.items()}
        own_folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, own_folder / _ADAPTER_FILES[0], metadata={"format": "pt"})
        (own_folder / _ADAPTER_FILES[1]).write_text(json.dumps(_kept_members(ckpt, config), indent=2))


def _name_in_adapter(fqn: str, prefix: str, adapter: str) -> str | None:
    """Return a weight's name in PEFT's files, without the adapter's name. None for weights of the base model."""
    before, own, after = fqn.removeprefix(f"{prefix}.").rpartition(f".{adapter}")
    if not own or not fqn.startswith(f"{prefix}.") or (after and not after.startswith(".")):
        return None
    if before.endswith(".lora_magnitude_vector"):
        return before
    return before.removesuffix(".modules_to_save") + after


def _config_of(ckpt: zarrckpt.Checkpoint, config: Any) -> Any:
    """Return ``config``, or the saved configuration of the model if it is None."""
    if config is not None:
        return config
    entry = f"{DESCRIPTIONS}.config"
    if entry not in ckpt:
        raise ValueError(f"{ckpt.url} does not contain a model configuration: pass config=")
    return _from_document(ckpt, entry, lambda found: CONFIG_MAPPING[found["model_type"]].from_dict(found))


def _from_document(ckpt: zarrckpt.Checkpoint, entry: str, make: Callable[[dict[str, Any]], Any]) -> Any:
    """Build an object from a JSON document in the checkpoint. Raises CorruptCheckpointError if that fails."""
    try:
        document = _without_code(json.loads(ckpt[entry]))
        if not isinstance(document, dict):
            raise TypeError(f"expected a JSON object, found {type(document).__name__}")
        return make(document)
    except zarrckpt.CheckpointError:
        raise
    except Exception as err:  # Parsers and constructors of configurations raise many types of errors.
        raise zarrckpt.CorruptCheckpointError(
            f"{ckpt.url}: {entry!r} is not a configuration that this version of transformers accepts: "
            f"{type(err).__name__}: {err!s:.200}"
        ) from err


_NAMES_OF_CODE = {
    *("attn_implementation", "auto_map", "code_revision", "custom_pipelines", "experts_implementation"),
    *("kernel_config", "name_or_path", "trust_remote_code", "use_kernels"),
}
"""Members of a configuration that name code or a repository. transformers would download it from the Hub and run it."""


def _without_code(value: Any) -> Any:
    """Return a saved configuration without members that name code, at any depth."""
    if isinstance(value, list):
        return [_without_code(item) for item in value]
    if not isinstance(value, dict):
        return value
    names = {name: name.removeprefix("_").removesuffix("_internal") for name in value}
    return {name: _without_code(item) for name, item in value.items() if names[name] not in _NAMES_OF_CODE}


_KEPT_TEXTS = {
    *("alpha_pattern", "base_model_name_or_path", "bias", "block_size_pattern", "config_A_B", "config_C", "config_D_E"),
    *("decomposition_method", "exclude_modules", "feedforward_modules", "init_lora_weights", "init_weights"),
    *("lambda_pattern", "layer_replication", "layers_pattern", "mask_type", "modules_to_save", "n_frequency_pattern"),
    *("peft_type", "peft_version", "rank_pattern", "revision", "target_modules", "target_parameters", "task_type"),
    *("trainable_token_indices", "variant", "wavelet_family"),
}
"""Members of an adapter's configuration that are exported although they contain texts, since they name no code."""


def _kept_members(ckpt: zarrckpt.Checkpoint, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the members of an adapter's configuration that cannot name code: numbers, and the known texts."""
    kept = {name: value for name, value in config.items() if name in _KEPT_TEXTS or _is_number(value)}
    # Every configuration of LoRA has this text.
    left = [name for name, value in config.items() if name not in kept and value not in ({}, "", "megatron.core")]
    if left:
        warn(
            f"{ckpt.url}: the members {sorted(left)} of the adapter's configuration were not exported, since they may "
            "name code. If the adapter needs them, and you trust the checkpoint, add them to adapter_config.json"
        )
    return {**kept, "inference_mode": True}


def _is_number(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_number, value))
    return value is None or isinstance(value, bool | int | float)


def _allocate(
    model: nn.Module, saved: Mapping[str, torch.dtype], dtype: torch.dtype | None, device: torch.device
) -> None:
    """Allocate the parameters and move the buffers to a device, in the given dtype or that of the saved values."""

    def kind_of(name: str, tensor: torch.Tensor) -> torch.dtype:
        saved_dtype = saved.get(name, tensor.dtype)
        return dtype if dtype is not None and saved_dtype.is_floating_point else saved_dtype

    persistent = model.state_dict().keys()
    allocated: dict[int, nn.Parameter] = {}
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        for name, parameter in [*module.named_parameters(recurse=False, remove_duplicate=False)]:
            if id(parameter) not in allocated:  # Tied parameters share one allocation.
                memory = torch.empty_like(parameter, device=device, dtype=kind_of(prefix + name, parameter))
                allocated[id(parameter)] = nn.Parameter(memory, requires_grad=parameter.requires_grad)
            setattr(module, name, allocated[id(parameter)])
        for name, buffer in [*module.named_buffers(recurse=False, remove_duplicate=False)]:
            kind = kind_of(prefix + name, buffer) if prefix + name in persistent else buffer.dtype
            setattr(module, name, buffer.to(device, kind))
