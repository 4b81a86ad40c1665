"""Other libraries' files as checkpoints. Files are mapped into memory, so what is saved is read as it is written."""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from zarrckpt._convert.safetensors import SAFETENSORS_SUFFIX
from zarrckpt._errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    StorageError,
    UnsafeValueError,
    UnsupportedValueError,
)
from zarrckpt._format.documents import NODE
from zarrckpt._format.json_values import loads
from zarrckpt._format.matching import select
from zarrckpt._format.state_path import DICT, StatePath
from zarrckpt._format.torch_archives import ARCHIVE, load_torch, refuse_expanded
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
from zarrckpt._store._regular_files import open_regular, read_regular
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

    Raises CheckpointNotFoundError; StorageError for a url as source and for a file that cannot be read;
    CorruptCheckpointError for a file that is not what it should be or could not be saved (a tensor larger than its
    file, compressed members), and for a folder without one of its files; UnsafeValueError; UnsupportedLayoutError where
    the pieces of a tensor leave gaps or overlap; and what :func:`save` raises.
    """
    path = Path(local_path(source))
    try:
        paths, leaf = _source(path, allow_pickle)
    except OSError as err:
        raise StorageError(f"reading {err.filename or path} failed: {err.strerror or err}") from err
    wanted = select(paths, keys, str(path)) if keys else [*paths]
    above = prefix.split(".") if prefix else []
    entries = {fqn: leaf(fqn) for fqn in wanted}
    named = {fqn: _path_with(above, paths[fqn]) for fqn in wanted}
    flat = {named[fqn].fqn: entries[fqn] for fqn in wanted}
    if len(flat) < len(wanted):
        raise CorruptCheckpointError(f"{path} has two entries of one name")
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
        from safetensors import safe_open
    except ModuleNotFoundError as err:
        raise ModuleNotFoundError("reading safetensors files needs safetensors: pip install safetensors") from err
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
    except OSError:
        raise
    except Exception as err:  # a parser on any input
        raise CorruptCheckpointError(f"{path} is no whole safetensors file: {err}") from err


def _merged_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a folder. Raises CorruptCheckpointError if its indexes or numbered names miss one."""
    present = {path.name for path in folder.iterdir() if path.is_file()}
    files = {name for name in present if name.endswith(SAFETENSORS_SUFFIX)}
    _refuse_gaps(folder, files)
    wanted: dict[str, str] = {}
    for name in sorted(path.name for path in folder.glob("*.index*.json")):
        for key, file in _read_index(folder, name, present).items():
            if wanted.setdefault(key, file) != file:
                raise CorruptCheckpointError(f"{folder / name} and another index there have a tensor {key!r}")
    names = sorted({*wanted.values()} if wanted else files)
    if not names:
        raise CheckpointNotFoundError(
            f"{folder} has neither safetensors files nor DCP's {_DCP_METADATA}{_instead(folder)}"
        )
    found: dict[str, torch.Tensor] = {}
    for name in names:
        for key, tensor in _safetensors(folder / name).items():
            if not wanted or wanted.get(key) == name:
                if key in found:
                    raise CorruptCheckpointError(f"two files in {folder} have a tensor {key!r}")
                found[key] = tensor
    missing = sorted({*wanted} - {*found})
    if missing:
        raise CorruptCheckpointError(f"the index in {folder} names {missing[:3]}, which its files lack")
    return found


def _read_index(folder: Path, name: str, present: set[str]) -> dict[str, str]:
    """Return tensor -> file of one of Hugging Face's indexes; nothing for an index of files of other formats."""
    path = folder / name
    if name not in present:
        raise CorruptCheckpointError(f"{path} is no regular file, expected an index of safetensors files")
    try:
        document = loads(read_regular(str(path)))
    except CorruptCheckpointError as err:
        raise CorruptCheckpointError(f"{path} is no index of safetensors files: {err}") from err
    found = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(found, dict) or not all(isinstance(file, str) for file in found.values()):
        raise CorruptCheckpointError(f"{path} is no index: found no weight_map of names to names of files")
    if found and not any(file.endswith(SAFETENSORS_SUFFIX) for file in found.values()):
        return {}
    absent = sorted({*found.values()} - present)
    if absent:
        raise CorruptCheckpointError(f"{path} names {absent[0]!r}, which is no file of {folder}")
    return found


def _refuse_gaps(folder: Path, files: set[str]) -> None:
    """Raise CorruptCheckpointError if one of several numbered files is missing, or files are of several models."""
    numbers: dict[tuple[str, ...], set[int]] = {}
    for name in files:
        if part := _NUMBERED.fullmatch(name):
            numbers.setdefault((part[1], part[3], part[4]), set()).add(int(part[2]))
    for (before, total, after), found in numbers.items():
        first = min(found)  # some count from 0
        if first > 1 or sum(number < first + int(total) for number in found) < int(total):
            raise CorruptCheckpointError(
                f"{folder} has {len(found)} of {int(total)} files {before}-*-of-{total}{after}: copy the others, too"
            )
    adapters = {name for name in files if name.startswith("adapter_model")}
    if adapters and adapters != files:
        raise CorruptCheckpointError(
            f"{folder} holds an adapter, {min(adapters)}, beside other tensors, {min(files - adapters)}: import the "
            "files one by one"
        )


def _instead(folder: Path) -> str:
    """What a folder seems to hold."""
    names = {path.name for path in folder.iterdir()}
    if any(name.endswith(".distcp") for name in names):
        return ", which its files of torch.distributed.checkpoint (DCP) need: was that save finished?"
    return ": this is a checkpoint; zarrckpt cp copies it" if NODE in names else ""


_DCP_METADATA = ".metadata"
"""The file that makes a folder one of DCP's."""

_NUMBERED = re.compile(r"(.*)-(\d{1,9})-of-(\d{1,9})(\D.*)")
"""Names of the files of a model that is stored in several."""

_PICKLE = b"\x80"
"""How files of ``torch.save`` before PyTorch 1.6 begin, which cannot be mapped; later ones are archives."""


def _torch_file(path: Path, allow_pickle: bool) -> dict[Any, Any]:
    with open(open_regular(str(path)), "rb") as file:
        head = file.read(len(ARCHIVE))
    if head != ARCHIVE and not head.startswith(_PICKLE):
        raise CorruptCheckpointError(f"{path} is neither a file of torch.save nor named as one of safetensors")
    try:
        found = load_torch(str(path), mmap=head == ARCHIVE, weights_only=not allow_pickle)
        refuse_expanded(found, path.stat().st_size)
    except pickle.UnpicklingError as err:
        raise UnsafeValueError(
            f"{path} holds more than tensors and plain values: allow_pickle=True runs its code, if you trust it"
        ) from err
    except (ImportError, AttributeError) as err:
        raise CheckpointError(f"{path} needs a class that does not exist in this program: {err}") from err
    except Exception as err:  # a parser on any input
        raise CorruptCheckpointError(f"{path} is no whole file of torch.save: {type(err).__name__}: {err}") from err
    if not isinstance(found, Mapping):
        raise UnsupportedValueError(f"{path} holds a {type(found).__name__}, expected a dict")
    return dict(found)
