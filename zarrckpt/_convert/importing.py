"""Other libraries' files as checkpoints. Files are mapped into memory, so what is saved is read as it is written."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from zarrckpt._convert.safetensors import INDEX, SAFETENSORS_SUFFIX
from zarrckpt._errors import CheckpointNotFoundError, CorruptCheckpointError, UnsafeValueError, UnsupportedValueError
from zarrckpt._format.documents import NODE
from zarrckpt._format.matching import select
from zarrckpt._format.state_path import DICT, StatePath
from zarrckpt._jobs import Progress
from zarrckpt._options import SaveOptions
from zarrckpt._ranks.group import Ranks
from zarrckpt._reports import SaveReport
from zarrckpt._save.request import SaveRequest
from zarrckpt._save.run import run_save
from zarrckpt._state.flatten import flatten
from zarrckpt._state.local_state import LocalState
from zarrckpt._state.objects import for_save
from zarrckpt._store import Url
from zarrckpt._store._whole_files import local_path


def import_checkpoint(
    source: str | os.PathLike[str],
    url: Url,
    *,
    prefix: str = "",
    keys: tuple[str, ...] = (),
    allow_pickle: bool = False,
    overwrite: bool = False,
    metadata: Mapping[str, Any] | None = None,
    storage_options: Mapping[str, Any] | None = None,
    options: SaveOptions | None = None,
    progress: Progress | None = None,
) -> SaveReport:
    """Save what another library's files hold as a checkpoint. Runs in this process alone.

    Files are mapped into memory, and what is saved is read as it is written: what the process allocates does not grow
    with the model. The system takes the pages of such files back when memory is short.

    Args:
        source: a ``.safetensors`` file; a folder of them, with or without Hugging Face's index; a folder of
            ``torch.distributed.checkpoint``; or a file of ``torch.save``.
        url: where the checkpoint goes.
        prefix: a key below which everything is put (``"model"``).
        keys: only these, patterns as in :meth:`Checkpoint.select`.
        allow_pickle: values, and DCP's metadata, that hold other classes than torch's and Python's own run their code.
        progress: called as ``progress(bytes_done, bytes_total)``.

    The other arguments are those of :func:`save`; what it says of ranks does not apply.

    Tensors that share memory in a file of ``torch.save`` (tied weights) are saved under each of their names.

    Raises CheckpointNotFoundError, StorageError for a url as source, CorruptCheckpointError for a file that is not what
    it should be, UnsafeValueError, UnsupportedLayoutError where the pieces of a tensor leave gaps or overlap, and what
    :func:`save` raises.
    """
    path = Path(local_path(source))
    paths, leaf = _source(path, allow_pickle)
    wanted = select(paths, keys, str(path)) if keys else [*paths]
    above = prefix.split(".") if prefix else []
    entries = {fqn: leaf(fqn) for fqn in wanted}
    named = {fqn: _path_with(above, paths[fqn]) for fqn in wanted}
    flat = {named[fqn].fqn: entries[fqn] for fqn in wanted}
    request = SaveRequest.from_arguments(
        url,
        options,
        overwrite=overwrite,
        metadata=metadata,
        storage_options=storage_options,
        progress=progress,
    )
    ranks = Ranks(no_dist=True)
    return run_save(lambda: LocalState(flat, {path.fqn: path for path in named.values()}), request, ranks)


def _path_with(above: Sequence[str], path: StatePath) -> StatePath:
    return StatePath((*above, *path.keys), (*(DICT for _ in above), *path.containers))


_Source = tuple[Mapping[str, StatePath], Callable[[str], Any]]
"""Where each entry is to be, by flat name; and what gives an entry."""


def _source(path: Path, allow_pickle: bool) -> _Source:
    if path.is_dir() and (path / _DCP_METADATA).is_file():
        from zarrckpt._dcp.folder import DcpFolder  # it knows DCP's classes, which are slow to import

        folder = DcpFolder(path, allow_pickle=allow_pickle)
        return folder.paths, folder.leaf
    if path.is_dir():
        found = _merged_tensors(path)
    elif not path.is_file():
        raise CheckpointNotFoundError(f"there is no file {path}")
    elif path.suffix == SAFETENSORS_SUFFIX:
        found = _safetensors(path)
    else:
        leaves, paths = flatten(for_save(_torch_file(path, allow_pickle)).state)
        return paths, leaves.__getitem__
    return {name: StatePath((name,), (DICT,)) for name in found}, found.__getitem__


def _safetensors(path: Path) -> dict[str, torch.Tensor]:
    try:
        from safetensors import SafetensorError, safe_open
    except ModuleNotFoundError as err:
        raise ModuleNotFoundError("reading safetensors files needs safetensors: pip install safetensors") from err
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
    except SafetensorError as err:
        raise CorruptCheckpointError(f"{path} is no whole safetensors file: {err}") from err


def _merged_tensors(folder: Path) -> dict[str, torch.Tensor]:
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
        raise CheckpointNotFoundError(
            f"{folder} has neither safetensors files nor DCP's {_DCP_METADATA}{_instead(folder)}"
        )
    found: dict[str, torch.Tensor] = {}
    for name in names:
        path = folder / name
        if Path(name).name != name or not path.is_file():
            raise CorruptCheckpointError(f"{index} names {name!r}, which is no file of {folder}")
        for key, tensor in _safetensors(path).items():
            if wanted is None or wanted.get(key) == name:
                if key in found:
                    raise CorruptCheckpointError(f"two files in {folder} have a tensor {key!r}")
                found[key] = tensor
    missing = sorted({*(wanted or {})} - {*found})
    if missing:
        raise CorruptCheckpointError(f"{index} names {missing[:3]}, which its files lack")
    return found


def _instead(folder: Path) -> str:
    """What a folder seems to hold."""
    names = {path.name for path in folder.iterdir()}
    if any(name.endswith(".distcp") for name in names):
        return ", which its files of torch.distributed.checkpoint (DCP) need: was that save finished?"
    return ": this is a checkpoint; zarrckpt cp copies it" if NODE in names else ""


_DCP_METADATA = ".metadata"
"""The file that makes a folder one of DCP's."""

_ARCHIVE = b"PK\x03\x04"
"""How a file of ``torch.save`` begins."""

_PICKLE = b"\x80"
"""How files of ``torch.save`` before PyTorch 1.6 begin, which cannot be mapped; later ones are archives."""


def _torch_file(path: Path, allow_pickle: bool) -> dict[Any, Any]:
    with open(path, "rb") as file:
        head = file.read(len(_ARCHIVE))
    if head != _ARCHIVE and not head.startswith(_PICKLE):
        raise CorruptCheckpointError(f"{path} is neither a file of torch.save nor named as one of safetensors")
    try:
        found = torch.load(path, map_location="cpu", mmap=head == _ARCHIVE, weights_only=not allow_pickle)
    except pickle.UnpicklingError as err:
        raise UnsafeValueError(
            f"{path} holds more than tensors and plain values: allow_pickle=True runs its code, if you trust it"
        ) from err
    except (RuntimeError, ValueError, OSError, EOFError) as err:
        raise CorruptCheckpointError(f"{path} is no whole file of torch.save: {err}") from err
    if not isinstance(found, Mapping):
        raise UnsupportedValueError(f"{path} holds a {type(found).__name__}, expected a dict")
    return dict(found)
