"""Models of transformers from training checkpoints, and checkpoints as folders that ``from_pretrained`` takes."""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import accelerate
import torch
import transformers
from safetensors.torch import save_file
from torch import nn
from transformers import CONFIG_MAPPING, GenerationConfig
from transformers.initialization import no_init_weights

import zarrckpt
from zarrckpt._convert.safetensors import is_model_file
from zarrckpt._store import StoreSpec
from zarrckpt._store._url import parse
from zarrckpt._store._whole_files import local_path, new_files, refuse_existing, relative_files, upload_files

DESCRIPTIONS = "trainer"
"""Where a checkpoint has the texts ``config`` and ``generation_config``."""


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
    """Make a model of transformers and fill it from a training checkpoint, however that was sharded.

    The parameters begin on the meta device. Then memory is allocated once, in their dtype and on their device, and
    filled chunk by chunk: beside the model it takes what :class:`zarrckpt.LoadOptions` allows. The model is in
    evaluation mode, as after ``from_pretrained``. All ranks call it, and each gets a whole model. Costs what
    :func:`zarrckpt.load` costs, and one request a rank.

    Args:
        model_class: such as ``LlamaForCausalLM``, or ``AutoModelForCausalLM``.
        url: of a checkpoint, saved by ``ZarrTrainer`` or in any other way.
        prefix: the model's name in the state that was saved: of ``{"model": model}``, ``"model"``.
        dtype: of floating parameters and buffers. Default: each as it was saved.
        device: where parameters and buffers are to be. Default: the CPU.
        config: the model's configuration. Default: the one that ``ZarrTrainer`` has saved, without members that name
            code or a repository, such as ``auto_map`` and ``attn_implementation``.
        no_dist: this process loads alone, as in :func:`zarrckpt.load`.
        storage_options, options: as in :func:`zarrckpt.load`.

    Raises ValueError where no configuration is known; KeyMismatchError for weights that the checkpoint lacks, for those
    that the model has no place for, and for other shapes; and what :func:`zarrckpt.load` raises.
    """
    ckpt = zarrckpt.open(url, storage_options=storage_options)
    config = _config_of(ckpt, config)
    make = model_class.from_config if hasattr(model_class, "from_config") else model_class
    # Buffers are made for real: what is not saved of them (rotary frequencies) is computed by the constructor.
    with accelerate.init_empty_weights(include_buffers=False), no_init_weights():
        model = make(config)
    model.tie_weights()
    names = {fqn.removeprefix(f"{prefix}."): fqn for fqn in ckpt.tensors if fqn.startswith(f"{prefix}.")}
    saved = {name: getattr(torch, ckpt.summary(fqn)[1]) for name, fqn in names.items()}
    _allocate(model, saved, dtype, torch.device("cpu" if device is None else device))
    state = model.state_dict()
    tied = {tensor.data_ptr() for name, tensor in state.items() if name in names}
    missing = [name for name, tensor in state.items() if name not in names and tensor.data_ptr() not in tied]
    unexpected = [name for name in names if name not in state]
    if missing or unexpected:
        raise zarrckpt.KeyMismatchError(
            f"{ckpt.url}: what is below {prefix!r} is not a {type(model).__name__} of this configuration: it lacks "
            f"{missing[:5]}, and the model has no place for {unexpected[:5]} ({len(missing)} and {len(unexpected)})"
        )
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
    tokenizer: Any = None,
    max_file_bytes: int = 5_000_000_000,
    overwrite: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    folder_options: Mapping[str, Any] | None = None,
) -> Any:
    """Write a checkpoint's model as a folder that ``from_pretrained`` takes: on a local disk, or at a url.

    safetensors with their index, ``config.json``, ``generation_config.json`` and the tokenizer's files. Weights are
    copied in memory bounded as in :meth:`zarrckpt.Checkpoint.to_safetensors`; no model is made. Tied weights are
    written once, where the configuration names a class of transformers. One process calls it.

    For a url, files are written to a temporary local folder first, and uploaded when all are whole, one after the
    other: it takes that much space below ``TMPDIR``. The weights go up first, and ``config.json`` and other small
    files last. An upload that breaks off leaves a part: export again with ``overwrite=True``.

    Of a PEFT model that ``ZarrTrainer`` has saved, the adapters are written, as ``PeftModel.from_pretrained`` takes
    them (``adapter_model.safetensors``, ``adapter_config.json``; others than ``default`` in folders of their names),
    with the tokenizer's files. For adapters that have their name in those of their weights, as LoRA's do.

    Args:
        url, prefix: as in :func:`load_pretrained`.
        folder: made where it is absent; a local path, or a url such as ``s3://bucket/model``.
        dtype: of floating weights, as in :meth:`zarrckpt.Checkpoint.copy_to`: ``torch.bfloat16``. Default: as saved.
        config, generation_config: of the model. Default: those that ``ZarrTrainer`` has saved.
        tokenizer: or a processor: whatever has ``save_pretrained``. Default: none is written.
        max_file_bytes: as in :meth:`zarrckpt.Checkpoint.to_safetensors`.
        overwrite: replace files that are there. Without, one that would be replaced is a StorageError.
        storage_options: as in :func:`zarrckpt.load`.
        folder_options: the ``storage_options`` of a url as folder. Default: those of the checkpoint.

    Returns the :class:`ExportReport` of the weights; None for adapters. Raises ValueError where no configuration is
    known, UnsupportedValueError for other adapters, CorruptCheckpointError for a saved configuration that is none,
    StorageError, and what :meth:`zarrckpt.Checkpoint.to_safetensors` raises.
    """
    ckpt = zarrckpt.open(url, storage_options=storage_options)
    name = None if dtype is None else str(dtype).removeprefix("torch.")

    has_adapters = f"{DESCRIPTIONS}.peft_config" in ckpt

    def write(place: str) -> Any:
        if tokenizer is not None:
            tokenizer.save_pretrained(place)
        if has_adapters:
            return _export_adapters(ckpt, prefix, Path(place), name)
        model = _config_of(ckpt, config), generation_config
        return _export_model(ckpt, prefix, place, *model, dtype=name, max_file_bytes=max_file_bytes)

    def is_replaced(key: str) -> bool:
        return key.endswith(_ADAPTER_FILES[0]) if has_adapters else is_model_file(key)

    known = _ADAPTER_FILES if has_adapters else _MODEL_FILES
    if parse(folder).kind == "local":
        target = local_path(folder)
        if not overwrite:  # before weights are copied; others are looked for when all are written
            there = os.listdir(target) if os.path.isdir(target) else ()
            refuse_existing(os.path.join(target, key) for key in there if is_replaced(key) or key in known)
        with new_files(target, overwrite=overwrite, replaces=None if has_adapters else is_model_file) as part:
            report = write(part)
        return None if report is None else dataclasses.replace(report, folder=target)
    store = StoreSpec(folder, storage_options if folder_options is None else folder_options).open()
    keys = {file.key for file in store.list()}
    _refuse_keys(store, overwrite, (key for key in keys if is_replaced(key) or key in known))
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
        raise zarrckpt.StorageError(f"{key!r} exists in {store.url}: pass overwrite=True, or another folder")


def _export_model(
    ckpt: zarrckpt.Checkpoint,
    prefix: str,
    folder: str,
    config: Any,
    generation_config: Any,
    *,
    dtype: str | None,
    max_file_bytes: int,
) -> Any:
    weights = ckpt.select(prefix, exclude=_tied(ckpt, prefix, config))
    report = weights.to_safetensors(folder, strip=prefix, dtype=dtype, max_file_bytes=max_file_bytes)
    # from_pretrained makes the model in the dtype that the configuration says.
    floating = Counter(kind for fqn in ckpt.select(prefix).tensors if "float" in (kind := ckpt.summary(fqn)[1]))
    own = dtype or (floating.most_common(1)[0][0] if floating else None)
    described = config.to_dict() if own is None else {**config.to_dict(), "dtype": own}
    type(config).from_dict(described).save_pretrained(folder)
    text = f"{DESCRIPTIONS}.generation_config"
    if generation_config is None and text in ckpt:
        generation_config = _from_document(ckpt, text, GenerationConfig.from_dict)
    if generation_config is not None:
        generation_config.save_pretrained(folder)
    return report


def _tied(ckpt: zarrckpt.Checkpoint, prefix: str, config: Any) -> list[str]:
    """The weights that a model of this configuration has from others of the checkpoint."""
    kind = getattr(transformers, (config.architectures or [""])[0], None)
    tied = getattr(kind, "_tied_weights_keys", None) if config.tie_word_embeddings else None
    pairs = tied.items() if isinstance(tied, dict) else ()
    names = {f"{prefix}.{name}": f"{prefix}.{source}" for name, source in pairs}
    return [fqn for fqn, source in names.items() if fqn in ckpt and source in ckpt]


def _export_adapters(ckpt: zarrckpt.Checkpoint, prefix: str, folder: Path, dtype: str | None) -> None:
    text = f"{DESCRIPTIONS}.peft_config"
    for adapter, config in _from_document(ckpt, text, lambda found: found).items():
        if not isinstance(config, dict) or adapter in ("", ".", "..") or not {*adapter}.isdisjoint("/\\\0"):
            raise zarrckpt.CorruptCheckpointError(
                f"{ckpt.url}: {text!r} has the adapter {adapter!r}, expected the name of a folder and its configuration"
            )
        place = folder if adapter == "default" else folder / adapter
        names = {name: fqn for fqn in ckpt.tensors if (name := _name_in_adapter(fqn, prefix, adapter))}
        if not names:
            raise zarrckpt.UnsupportedValueError(
                f"{ckpt.url}: the adapter {adapter!r} ({config.get('peft_type')}) has no weights below {prefix!r} with "
                "its name in theirs: resume, and call model.save_pretrained"
            )
        found = ckpt.load(names.values())
        for part in prefix.split("."):
            found = found[part]
        tensors = {name: found[fqn.removeprefix(f"{prefix}.")] for name, fqn in names.items()}
        if dtype is not None:
            kind = getattr(torch, dtype)
            tensors = {name: t.to(kind) if t.is_floating_point() and t.ndim else t for name, t in tensors.items()}
        place.mkdir(parents=True, exist_ok=True)
        save_file(tensors, place / _ADAPTER_FILES[0], metadata={"format": "pt"})
        (place / _ADAPTER_FILES[1]).write_text(json.dumps({**config, "inference_mode": True}, indent=2))


def _name_in_adapter(fqn: str, prefix: str, adapter: str) -> str | None:
    """A weight's name in PEFT's files, which do not name the adapter; None for one of the base."""
    before, own, after = fqn.removeprefix(f"{prefix}.").rpartition(f".{adapter}")
    if not own or not fqn.startswith(f"{prefix}.") or (after and not after.startswith(".")):
        return None
    if before.endswith(".lora_magnitude_vector"):
        return before
    return before.removesuffix(".modules_to_save") + after


def _config_of(ckpt: zarrckpt.Checkpoint, config: Any) -> Any:
    """The configuration of a checkpoint's model, where none is given the one that was saved."""
    if config is not None:
        return config
    text = f"{DESCRIPTIONS}.config"
    if text not in ckpt:
        raise ValueError(f"{ckpt.url} has no configuration of a model: pass config=")
    return _from_document(ckpt, text, lambda known: CONFIG_MAPPING[known["model_type"]].from_dict(known))


def _from_document(ckpt: zarrckpt.Checkpoint, text: str, make: Callable[[dict[str, Any]], Any]) -> Any:
    """Make an object of a JSON document in the checkpoint. Raises CorruptCheckpointError if it is another one."""
    try:
        document = _without_code(json.loads(ckpt[text]))
        if not isinstance(document, dict):
            raise TypeError(f"a {type(document).__name__}, expected an object")
        return make(document)
    except zarrckpt.CheckpointError:
        raise
    except Exception as err:  # a parser on any input, and the constructor of any configuration
        raise zarrckpt.CorruptCheckpointError(
            f"{ckpt.url}: {text!r} is no configuration that this version of transformers takes: {type(err).__name__}: "
            f"{err!s:.200}"
        ) from err


_NAMES_OF_CODE = {
    *("attn_implementation", "auto_map", "code_revision", "custom_pipelines", "experts_implementation"),
    *("kernel_config", "name_or_path", "trust_remote_code", "use_kernels"),
}
"""Members of a configuration that name code or a repository, which transformers would fetch from the Hub and run."""


def _without_code(value: Any) -> Any:
    """Return a saved configuration without the members that name code, in all configurations inside it, too."""
    if isinstance(value, list):
        return [_without_code(item) for item in value]
    if not isinstance(value, dict):
        return value
    names = {name: name.removeprefix("_").removesuffix("_internal") for name in value}
    return {name: _without_code(item) for name, item in value.items() if names[name] not in _NAMES_OF_CODE}


def _allocate(
    model: nn.Module, saved: Mapping[str, torch.dtype], dtype: torch.dtype | None, device: torch.device
) -> None:
    """Give parameters memory, and put buffers on the device; in a dtype, or in that of their saved values."""

    def kind_of(name: str, tensor: torch.Tensor) -> torch.dtype:
        known = saved.get(name, tensor.dtype)
        return dtype if dtype is not None and known.is_floating_point else known

    persistent = model.state_dict().keys()
    made: dict[int, nn.Parameter] = {}
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        for name, parameter in [*module.named_parameters(recurse=False, remove_duplicate=False)]:
            if id(parameter) not in made:  # others are tied to it
                memory = torch.empty_like(parameter, device=device, dtype=kind_of(prefix + name, parameter))
                made[id(parameter)] = nn.Parameter(memory, requires_grad=parameter.requires_grad)
            setattr(module, name, made[id(parameter)])
        for name, buffer in [*module.named_buffers(recurse=False, remove_duplicate=False)]:
            kind = kind_of(prefix + name, buffer) if prefix + name in persistent else buffer.dtype
            setattr(module, name, buffer.to(device, kind))
