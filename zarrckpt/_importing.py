"""Other libraries' files as checkpoints. Files are mapped into memory, so what is saved is read as it is written."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from zarrckpt._api import save
from zarrckpt._errors import CheckpointNotFoundError, CorruptCheckpointError, UnsafeValueError, UnsupportedValueError
from zarrckpt._matching import select
from zarrckpt._report import SaveReport
from zarrckpt._safetensors import INDEX


def import_checkpoint(
    source: str | os.PathLike[str],
    url: str | os.PathLike[str],
    *,
    prefix: str = "",
    keys: tuple[str, ...] = (),
    allow_pickle: bool = False,
    **options: Any,
) -> SaveReport:
    """Save what another library's file holds as a checkpoint. Runs in one process.

    Args:
        source: a ``.safetensors`` file; a folder of them, with or without Hugging Face's index; or a file of
            ``torch.save``. url: where the checkpoint goes. prefix: a key below which everything is put (``"model"``).
        keys: only these, patterns as in :meth:`Checkpoint.select`. allow_pickle: a file of ``torch.save`` that
            ``weights_only=True`` refuses runs its code. options: those of :func:`save`.

    Tensors that share memory in a file of ``torch.save`` (tied weights) are saved under each of their names.

    Raises CheckpointNotFoundError, CorruptCheckpointError for a file that is not what it should be, UnsafeValueError,
    and what :func:`save` raises.
    """
    path = Path(source)
    with ExitStack() as files:
        state = _state(path, files, allow_pickle)
        if keys:
            state = {name: state[name] for name in select(state, keys, str(path))}
        nested: Mapping[str, Any] = state
        for part in reversed(prefix.split(".") if prefix else []):
            nested = {part: nested}
        return save(nested, url, **options)


def _state(path: Path, files: ExitStack, allow_pickle: bool) -> dict[str, Any]:
    if path.is_dir():
        return _merged(path, files)
    if not path.is_file():
        raise CheckpointNotFoundError(f"there is no file {path}")
    if path.suffix == ".safetensors":
        return dict(_safetensors(path, files))
    return _torch_file(path, allow_pickle)


def _safetensors(path: Path, files: ExitStack) -> Iterator[tuple[str, torch.Tensor]]:
    try:
        from safetensors import SafetensorError, safe_open
    except ModuleNotFoundError as err:
        raise ModuleNotFoundError("reading safetensors files needs safetensors: pip install safetensors") from err
    try:
        file = files.enter_context(safe_open(path, framework="pt"))
        for name in file.keys():  # noqa: SIM118 - it is no mapping
            yield name, file.get_tensor(name)
    except SafetensorError as err:
        raise CorruptCheckpointError(f"{path} is no whole safetensors file: {err}") from err


def _merged(folder: Path, files: ExitStack) -> dict[str, Any]:
    """All tensors of a folder. Raises CorruptCheckpointError where its index says otherwise."""
    index = folder / INDEX
    wanted: dict[str, str] | None = None
    if index.exists():
        try:
            wanted = dict(json.loads(index.read_text())["weight_map"])
        except (ValueError, KeyError, TypeError) as err:
            raise CorruptCheckpointError(f"{index} is no index of safetensors files: {err!r}") from err
    names = sorted({*wanted.values()}) if wanted is not None else sorted(p.name for p in folder.glob("*.safetensors"))
    if not names:
        raise CheckpointNotFoundError(f"there is no safetensors file in {folder}")
    found: dict[str, Any] = {}
    for name in names:
        path = folder / name
        if Path(name).name != name or not path.is_file():
            raise CorruptCheckpointError(f"{index} names {name!r}, which is no file of {folder}")
        for key, tensor in _safetensors(path, files):
            if wanted is None or wanted.get(key) == name:
                if key in found:
                    raise CorruptCheckpointError(f"two files in {folder} have a tensor {key!r}")
                found[key] = tensor
    missing = sorted({*(wanted or {})} - {*found})
    if missing:
        raise CorruptCheckpointError(f"{index} names {missing[:3]}, which its files lack")
    return found


def _torch_file(path: Path, allow_pickle: bool) -> dict[str, Any]:
    try:
        found = torch.load(path, map_location="cpu", mmap=True, weights_only=not allow_pickle)
    except pickle.UnpicklingError as err:
        raise UnsafeValueError(
            f"{path} holds more than tensors and plain values: allow_pickle=True runs its code, if you trust it"
        ) from err
    except (RuntimeError, ValueError, OSError, EOFError) as err:
        raise CorruptCheckpointError(f"{path} is no whole file of torch.save: {err}") from err
    if not isinstance(found, Mapping):
        raise UnsupportedValueError(f"{path} holds a {type(found).__name__}, expected a dict")
    return dict(found)
