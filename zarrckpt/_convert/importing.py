"""Import files of other libraries as checkpoints. Files are mapped into memory and read while they are saved."""

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
from zarrckpt._save.steps import save_on_ranks
from zarrckpt._state.flatten import flatten
from zarrckpt._state.local_state import LocalState
from zarrckpt._state.objects import convert_for_save
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
    """Save the contents of another library's files as a checkpoint. Runs in this process only.

    Files are mapped into memory and read while they are saved. So the memory that the process allocates does not grow
    with the model. If memory is short, the system frees the pages of mapped files.

    Args:
        source: a ``.safetensors`` file, a folder of them (with or without Hugging Face's index), a folder of
            ``torch.distributed.checkpoint``, or a file of ``torch.save``.
        url: the url of the new checkpoint.
        prefix: a key below which all entries are saved (``"model"``).
        keys: patterns of the entries to import, as in :meth:`Checkpoint.select` (default: all).
        allow_pickle: run the code of values and of DCP metadata with classes that neither torch nor Python defines.
        progress: as for :func:`save`.

    The other arguments are those of :func:`save`.

    Tensors that share memory in a file of ``torch.save`` (tied weights) are saved under each of their names.

    Raises CheckpointNotFoundError, UnsafeValueError and the errors of :func:`save`. StorageError for a url as source,
    and for a file that cannot be read. CorruptCheckpointError for a damaged file, for one that cannot be mapped (a
    tensor larger than its file, compressed members), and for a folder without one of its files. UnsupportedLayoutError
    if the pieces of a tensor leave gaps or overlap.
    """
    path = Path(local_path(source))
    try:
        paths, leaf = _source(path, allow_pickle)
    except OSError as err:
        raise StorageError(f"reading {err.filename or path} failed: {err.strerror or err}") from err
    selected = select(paths, keys, str(path)) if keys else [*paths]
    above = prefix.split(".") if prefix else []
    entries = {fqn: leaf(fqn) for fqn in selected}
    named = {fqn: _path_with(above, paths[fqn]) for fqn in selected}
    flat = {named[fqn].fqn: entries[fqn] for fqn in selected}
    if len(flat) < len(selected):
        raise CorruptCheckpointError(f"{path} has two entries with one name")
    request = SaveRequest.from_arguments(
        url, options, overwrite=overwrite, metadata=metadata, storage_options=storage_options, progress=progress
    )
    ranks = Ranks(no_dist=True)
    return save_on_ranks(lambda: LocalState(flat, {path.fqn: path for path in named.values()}), request, ranks)


def _path_with(above: Sequence[str], path: StatePath) -> StatePath:
    return StatePath((*above, *path.keys), (*(DICT for _ in above), *path.containers))


_Source = tuple[Mapping[str, StatePath], Callable[[str], Any]]
"""The path of each entry by fqn, and a function that returns an entry."""


def _source(path: Path, allow_pickle: bool) -> _Source:
    if path.is_dir() and (path / _DCP_METADATA).is_file():
        from zarrckpt._dcp.folder import DcpFolder  # here, because it imports DCP, which is slow

        folder = DcpFolder(path, allow_pickle=allow_pickle)
        return folder.paths, folder.leaf
    if path.is_dir():
        found = _merged_tensors(path)
    elif not path.is_file():
        raise CheckpointNotFoundError(f"there is no file {path}")
    elif path.suffix == SAFETENSORS_SUFFIX:
        found = _safetensors(path)
    else:
        leaves, paths = flatten(convert_for_save(_torch_file(path, allow_pickle)).state)
        return paths, leaves.__getitem__
    return {name: StatePath((name,), (DICT,)) for name in found}, found.__getitem__


def _safetensors(path: Path) -> dict[str, torch.Tensor]:
    try:
        from safetensors import safe_open
    except ModuleNotFoundError as err:
        raise ModuleNotFoundError("reading safetensors files needs safetensors: pip install safetensors") from err
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except OSError:
        raise
    except Exception as err:  # the parser can raise anything for damaged input
        raise CorruptCheckpointError(f"{path} is not a complete safetensors file: {err}") from err


def _merged_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a folder. Raises CorruptCheckpointError if a file or a tensor is missing.

    The indexes list the files and tensors. Files with numbered names must be complete.
    """
    present = {path.name for path in folder.iterdir() if path.is_file()}
    files = {name for name in present if name.endswith(SAFETENSORS_SUFFIX)}
    _refuse_gaps(folder, files)
    file_by_tensor: dict[str, str] = {}
    for name in sorted(path.name for path in folder.glob("*.index*.json")):
        for key, file in _read_index(folder, name, present).items():
            if file_by_tensor.setdefault(key, file) != file:
                raise CorruptCheckpointError(f"{folder / name} and another index in the folder list a tensor {key!r}")
    names = sorted({*file_by_tensor.values()} if file_by_tensor else files)
    if not names:
        raise CheckpointNotFoundError(
            f"{folder} has neither safetensors files nor DCP's {_DCP_METADATA}{_hint_for(folder)}"
        )
    found: dict[str, torch.Tensor] = {}
    for name in names:
        for key, tensor in _safetensors(folder / name).items():
            if not file_by_tensor or file_by_tensor.get(key) == name:
                if key in found:
                    raise CorruptCheckpointError(f"two files in {folder} have a tensor {key!r}")
                found[key] = tensor
    missing = sorted({*file_by_tensor} - {*found})
    if missing:
        raise CorruptCheckpointError(f"the index in {folder} lists tensors that no file has: {missing[:3]}")
    return found


def _read_index(folder: Path, name: str, present: set[str]) -> dict[str, str]:
    """Return tensor -> file from a Hugging Face index. The result is empty for an index of files in other formats."""
    path = folder / name
    if name not in present:
        raise CorruptCheckpointError(f"{path} is not a regular file, expected an index of safetensors files")
    try:
        document = loads(read_regular(str(path)))
    except CorruptCheckpointError as err:
        raise CorruptCheckpointError(f"{path} is not an index of safetensors files: {err}") from err
    found = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(found, dict) or not all(isinstance(file, str) for file in found.values()):
        raise CorruptCheckpointError(f"{path} is not an index: expected a weight_map of tensor names to file names")
    if found and not any(file.endswith(SAFETENSORS_SUFFIX) for file in found.values()):
        return {}
    absent = sorted({*found.values()} - present)
    if absent:
        raise CorruptCheckpointError(f"{path} lists {absent[0]!r}, which is not a file in {folder}")
    return found


def _refuse_gaps(folder: Path, files: set[str]) -> None:
    """Raise CorruptCheckpointError if a numbered file is missing, or an adapter is mixed with other tensors."""
    numbers: dict[tuple[str, ...], set[int]] = {}
    for name in files:
        if part := _NUMBERED.fullmatch(name):
            numbers.setdefault((part[1], part[3], part[4]), set()).add(int(part[2]))
    for (before, total, after), found in numbers.items():
        first = min(found)  # some libraries count from 0
        if first > 1 or sum(number < first + int(total) for number in found) < int(total):
            raise CorruptCheckpointError(
                f"{folder} has {len(found)} of {int(total)} files {before}-*-of-{total}{after}: copy the others too"
            )
    adapters = {name for name in files if name.startswith("adapter_model")}
    if adapters and adapters != files:
        raise CorruptCheckpointError(
            f"{folder} has an adapter, {min(adapters)}, and other tensors, {min(files - adapters)}: import the files "
            "one by one"
        )


def _hint_for(folder: Path) -> str:
    """Return the end of an error about a folder of an unknown kind: a guess about its contents, or ""."""
    names = {path.name for path in folder.iterdir()}
    if any(name.endswith(".distcp") for name in names):
        return ", which its files of torch.distributed.checkpoint (DCP) need: was the save finished?"
    return ": this is a checkpoint, copy it with zarrckpt cp" if NODE in names else ""


_DCP_METADATA = ".metadata"
"""The file that every DCP folder has."""

_NUMBERED = re.compile(r"(.*)-(\d{1,9})-of-(\d{1,9})(\D.*)")
"""Names of the files of a model that is stored in several files."""

_PICKLE = b"\x80"
"""The first byte of files of ``torch.save`` before PyTorch 1.6, which cannot be mapped. Later files are archives."""


def _torch_file(path: Path, allow_pickle: bool) -> dict[Any, Any]:
    with open(open_regular(str(path)), "rb") as file:
        head = file.read(len(ARCHIVE))
    if head != ARCHIVE and not head.startswith(_PICKLE):
        raise CorruptCheckpointError(f"{path} is not a file of torch.save, and has no name of a safetensors file")
    try:
        found = load_torch(str(path), mmap=head == ARCHIVE, weights_only=not allow_pickle)
        refuse_expanded(found, path.stat().st_size)
    except pickle.UnpicklingError as err:
        raise UnsafeValueError(
            f"{path} has more than tensors and plain values. If you trust it, allow_pickle=True runs its code"
        ) from err
    except (ImportError, AttributeError) as err:
        raise CheckpointError(f"{path} needs a class that cannot be imported: {err}") from err
    except Exception as err:  # the parser can raise anything for damaged input
        raise CorruptCheckpointError(
            f"{path} is not a complete file of torch.save: {type(err).__name__}: {err}"
        ) from err
    if not isinstance(found, Mapping):
        raise UnsupportedValueError(f"{path} has a {type(found).__name__}, expected a dict")
    return dict(found)
