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
    UnsupportedLayoutError,
    UnsupportedValueError,
)
from zarrckpt._format.documents import NODE
from zarrckpt._format.json_values import loads
from zarrckpt._format.matching import select
from zarrckpt._format.state_path import DICT, StatePath
from zarrckpt._format.torch_archives import (
    ALLOW,
    ARCHIVE,
    DEQUE,
    RefusedObject,
    RefusedType,
    load_torch,
    refuse_expanded,
    refused_types,
)
from zarrckpt._format.values import find_instances
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
        allow_pickle: run the code of values and of DCP metadata that torch does not load by default. Without it, only
            values of types in ``torch.serialization.add_safe_globals`` are loaded too. ``keys`` can leave out others.
        progress: as for :func:`save`.

    The other arguments are those of :func:`save`.

    Tensors that share memory in a file of ``torch.save`` (tied weights) are saved under each of their names.

    Raises CheckpointNotFoundError, UnsafeValueError and the errors of :func:`save`. StorageError for a url as source,
    and for a file that cannot be read. CorruptCheckpointError for a damaged file, for one that cannot be mapped (a
    tensor larger than its file, compressed members), and for a folder without one of its files. UnsupportedLayoutError
    if the pieces of a tensor leave gaps or overlap, and for safetensors files of single ranks, whose tensors can be
    pieces of larger ones.
    """
    path = Path(local_path(source))
    try:
        paths, leaf, versions = _source(path, allow_pickle)
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
    new_paths = {path.fqn: path for path in named.values()}
    new_versions = {_path_with(above, path): own for path, own in versions.items()}
    return save_on_ranks(lambda: LocalState(flat, new_paths, new_versions), request, ranks)


def _path_with(above: Sequence[str], path: StatePath) -> StatePath:
    return StatePath((*above, *path.keys), (*(DICT for _ in above), *path.containers))


_Source = tuple[Mapping[str, StatePath], Callable[[str], Any], Mapping[StatePath, Mapping[str, int]]]
"""The path of each entry by fqn, a function that returns an entry, and the versions of modules of each state dict."""


def _source(path: Path, allow_pickle: bool) -> _Source:
    if path.is_dir() and (path / _DCP_METADATA).is_file():
        from zarrckpt._dcp.folder import DcpFolder  # here, because it imports DCP, which is slow

        folder = DcpFolder(path, allow_pickle=allow_pickle)
        return folder.paths, folder.leaf, {}
    if path.is_dir():
        found = _merged_tensors(path)
    elif not path.is_file():
        raise CheckpointNotFoundError(f"there is no file {path}")
    elif path.suffix == SAFETENSORS_SUFFIX:
        found, doubt = _safetensors(path)
        if doubt:
            raise UnsupportedLayoutError(f"{path} {doubt}")
    else:
        return _torch_file(path, allow_pickle)
    return {name: StatePath((name,), (DICT,)) for name in found}, found.__getitem__, {}


def _safetensors(path: Path) -> tuple[dict[str, torch.Tensor], str]:
    """Return the tensors of a file, and the reason why they can be pieces of larger tensors, or ""."""
    try:
        from safetensors import safe_open
    except ModuleNotFoundError as err:
        raise ModuleNotFoundError("reading safetensors files needs safetensors: pip install safetensors") from err
    try:
        with safe_open(path, framework="pt") as file:
            found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
            is_dcp = "DCP_SHARDING_INFO" in (file.metadata() or {})
    except OSError:
        raise
    except Exception as err:  # the parser can raise anything for damaged input
        raise CorruptCheckpointError(f"{path} is not a complete safetensors file: {err}") from err
    return found, _DCP_PIECES if is_dcp else _RANK_PIECES if _RANK_FILE.search(path.name) else ""


_DCP_PIECES = (
    "can have pieces of larger tensors, because DCP's HuggingFaceStorageWriter wrote it. It does not write the shapes "
    "of the tensors, so a lost piece could not be noticed. Load the pieces into the model with dcp.load and "
    "HuggingFaceStorageReader, and save the model; or write with enable_consolidation=True. Without save_distributed, "
    "import the whole folder with its index"
)
_RANK_PIECES = (
    "can have pieces of larger tensors, because its name has the number of a rank. Join the files with the library "
    "that wrote them, or rename the file if its tensors are whole"
)
_RANK_FILE = re.compile(r"(?i)^(?!.*lora).*(?<![a-z])rank[-_.]?\d|^shard-\d+-model-\d")
"""Names of files that each rank writes for itself, for example in vLLM and DCP. LoRA has ranks of another kind."""


def _merged_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a folder. Raises CorruptCheckpointError if a file or a tensor is missing.

    The indexes list the files and tensors. Files with numbered names must be complete. Raises UnsupportedLayoutError
    for files that can have pieces of tensors, unless an index has the size of all tensors.
    """
    present = {path.name for path in folder.iterdir() if path.is_file()}
    files = {name for name in present if name.endswith(SAFETENSORS_SUFFIX)}
    file_by_tensor: dict[str, str] = {}
    totals: list[object] = []
    for name in sorted(path.name for path in folder.glob("*.index*.json")):
        index, total = _read_index(folder, name, present)
        totals.append(total)
        for key, file in index.items():
            if file_by_tensor.setdefault(key, file) != file:
                raise CorruptCheckpointError(f"{folder / name} and another index in the folder list a tensor {key!r}")
    names = sorted({*file_by_tensor.values()} if file_by_tensor else files)
    if not names:
        raise CheckpointNotFoundError(
            f"{folder} has neither safetensors files nor DCP's {_DCP_METADATA}{_hint_for(folder)}"
        )
    loaded = {name: _safetensors(folder / name) for name in names}
    nbytes = sum(tensor.nbytes for tensors, _ in loaded.values() for tensor in tensors.values())
    for name, (_, doubt) in loaded.items():
        if doubt and nbytes not in totals:
            raise UnsupportedLayoutError(f"{folder / name} {doubt}")
    _refuse_gaps(folder, files)
    found: dict[str, torch.Tensor] = {}
    for name, (tensors, _) in loaded.items():
        for key, tensor in tensors.items():
            if not file_by_tensor or file_by_tensor.get(key) == name:
                if key in found:
                    raise CorruptCheckpointError(f"two files in {folder} have a tensor {key!r}")
                found[key] = tensor
    missing = sorted({*file_by_tensor} - {*found})
    if missing:
        raise CorruptCheckpointError(f"the index in {folder} lists tensors that no file has: {missing[:3]}")
    return found


def _read_index(folder: Path, name: str, present: set[str]) -> tuple[dict[str, str], object]:
    """Return tensor -> file from a Hugging Face index, and the number of bytes of all tensors that it has.

    The first is empty for an index of files in other formats.
    """
    path = folder / name
    if name not in present:
        raise CorruptCheckpointError(f"{path} is not a regular file, expected an index of safetensors files")
    try:
        document = loads(read_regular(str(path)))
    except CorruptCheckpointError as err:
        raise CorruptCheckpointError(f"{path} is not an index of safetensors files: {err}") from err
    document = document if isinstance(document, dict) else {}
    found = document.get("weight_map")
    if not isinstance(found, dict) or not all(isinstance(file, str) for file in found.values()):
        raise CorruptCheckpointError(f"{path} is not an index: expected a weight_map of tensor names to file names")
    if found and not any(file.endswith(SAFETENSORS_SUFFIX) for file in found.values()):
        return {}, None
    absent = sorted({*found.values()} - present)
    if absent:
        raise CorruptCheckpointError(f"{path} lists {absent[0]!r}, which is not a file in {folder}")
    metadata = document.get("metadata")
    return found, metadata.get("total_size") if isinstance(metadata, dict) else None


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


_MAX_REFUSED = 1000
"""Maximum number of refused types in a file that is imported without them."""


def _torch_file(path: Path, allow_pickle: bool) -> _Source:
    with open(open_regular(str(path)), "rb") as file:
        head = file.read(len(ARCHIVE))
    if head != ARCHIVE and not head.startswith(_PICKLE):
        raise CorruptCheckpointError(f"{path} is not a file of torch.save, and has no name of a safetensors file")
    refused: list[str] = []
    try:
        try:
            found = load_torch(str(path), mmap=head == ARCHIVE, weights_only=not allow_pickle)
        except pickle.UnpicklingError:
            refused = [] if allow_pickle else refused_types(str(path))
            if not 0 < len(refused) <= _MAX_REFUSED:
                raise
            found = load_torch(str(path), mmap=True, refused=refused)
        refuse_expanded(found, path.stat().st_size)
    except Exception as err:  # the parser can raise anything for damaged input
        if refused or (isinstance(err, pickle.UnpicklingError) and not allow_pickle):
            types = f"{', '.join(refused):.400}" or "more than tensors and plain values"
            raise UnsafeValueError(f"{path} needs {types}, and cannot be loaded without: {ALLOW}") from err
        if isinstance(err, ImportError | AttributeError):
            raise CheckpointError(f"{path} needs a class that cannot be imported: {err}") from err
        raise CorruptCheckpointError(
            f"{path} is not a complete file of torch.save: {type(err).__name__}: {err}"
        ) from err
    if isinstance(found, RefusedObject):
        raise UnsafeValueError(f"{path} is a {found.refused_name}, expected a dict: {ALLOW}")
    if not isinstance(found, Mapping):
        raise UnsupportedValueError(f"{path} has a {type(found).__name__}, expected a dict")
    return _loaded_entries(path, found, refused)


def _loaded_entries(path: Path, state: Mapping[Any, Any], refused: Sequence[str]) -> _Source:
    """Return the entries of a loaded file. Those with a refused type raise UnsafeValueError when they are used."""
    if refused:
        _replace_refused_containers(state)
    leaves, paths, versions = flatten(convert_for_save(state).state)
    needs = {fqn: _refused_in(leaf) for fqn, leaf in leaves.items()} if refused else {}

    def leaf(fqn: str) -> Any:
        if needs.get(fqn):
            others = [f"{other!r} ({types})" for other, types in needs.items() if types and other != fqn]
            also = f"; so do {', '.join(others[:5])}" if others else ""
            raise UnsafeValueError(
                f"the value {fqn!r} in {path} needs {needs[fqn]}, which torch does not load by default{also}: leave it "
                f"out with keys=, or {ALLOW}"
            )
        return leaves[fqn]

    return paths, leaf, versions


def _refused_in(value: object) -> str:
    """Return the names of the refused types in a value, or ""."""
    found = find_instances(value, (torch.Tensor, RefusedObject, RefusedType))
    return ", ".join(sorted({item.refused_name for item in found if not isinstance(item, torch.Tensor)}))


def _replace_refused_containers(container: Any) -> None:
    """Replace, at any depth, each dict with a refused key and each deque by the stand-in that it contains."""
    for key, item in [*(container.items() if isinstance(container, dict) else enumerate(container))]:
        if isinstance(item, dict | list):
            inside = [*item] if isinstance(item, dict) else item[:1]
            refused = [part for part in inside if isinstance(part, RefusedObject)]
            if refused and (isinstance(item, dict) or refused[0].refused_name == DEQUE):
                container[key] = refused[0]
            else:
                _replace_refused_containers(item)
