"""``to_safetensors``: write tensors as safetensors files, in bounded memory. No torch.

The format: https://github.com/huggingface/safetensors#format. A file has eight bytes with the length of a JSON header,
the header, then the bytes of each tensor. If there are several files, they get an index in Hugging Face's format.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zarrckpt._errors import KeyMismatchError, UnsupportedValueError
from zarrckpt._format.chunk_layout import RawArray
from zarrckpt._format.documents import ArrayNode
from zarrckpt._format.dtypes import DType
from zarrckpt._jobs import ByteCounter, Progress
from zarrckpt._read.arrays import batches, read_in_order
from zarrckpt._read.casts import DTypeOption, cast_elements, plan_casts, warn_of_overflow
from zarrckpt._read.catalog import Catalog
from zarrckpt._read.export_paths import MAX_EXPORT_BYTES, export_paths
from zarrckpt._read.selection import Selection, catalog_of, open_selection
from zarrckpt._reports import ExportReport
from zarrckpt._store import Url
from zarrckpt._store._whole_files import local_path, new_files, refuse_existing

if TYPE_CHECKING:
    from zarrckpt._checkpoint import Checkpoint

INDEX = "model.safetensors.index.json"
SAFETENSORS_SUFFIX = ".safetensors"
_MODEL_FILE = re.compile(r"model(-\d+-of-\d+)?\.safetensors")
_ALIGNED = 8
_METADATA = "__metadata__"
"""The only key of the header that is not a tensor's name."""
_NAMES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2": "F8_E5M2",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "complex64": "C64",
}


def to_safetensors(
    source: Checkpoint | Url,
    target: str | os.PathLike[str],
    *patterns: str,
    strip: str = "",
    dtype: DTypeOption = None,
    max_file_bytes: int = 5_000_000_000,
    overwrite: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    max_inflight_bytes: int = MAX_EXPORT_BYTES,
    progress: Progress | None = None,
) -> ExportReport:
    """Write tensors as safetensors: one file, or several files with an index.

    Hugging Face's libraries and ``safetensors`` can load them. Files get their final names when all are complete.

    Args:
        source: an open checkpoint, a part of one, or the url of a checkpoint.
        target: a local folder, which is created if necessary, or the path of a single file that ends in
            ``.safetensors``.
        patterns: as in :meth:`Checkpoint.select` (default: all tensors).
        strip: a prefix to remove from names: ``"model"`` writes ``model.embed.weight`` as ``embed.weight``. Names
            without the prefix do not change.
        dtype: cast floating tensors, as in :func:`copy`. Its patterns match names in the checkpoint.
        max_file_bytes: maximum size of a file in bytes. Only a single tensor can exceed it.
        overwrite: replace the file, or the folder's ``model*.safetensors`` and their index.
        storage_options: options of the source's store if it is a url.
        max_inflight_bytes: maximum memory in bytes (default 128 MiB).
        progress: as for :func:`save`.

    Raises UnsupportedValueError for a dtype that safetensors lacks, for two tensors with one name, or for the name
    ``__metadata__``. Raises StorageError, also if such files exist, and the errors of :meth:`Checkpoint.read`.
    """
    part = open_selection(source, storage_options).select(*patterns).tensors
    names = {fqn: path.fqn for fqn, path in export_paths(part, strip).items()}
    return write_safetensors(part, names, target, dtype, max_file_bytes, overwrite, max_inflight_bytes, progress)


def write_safetensors(
    part: Selection,
    names: Mapping[str, str],
    target: str | os.PathLike[str],
    dtype: DTypeOption,
    max_file_bytes: int,
    overwrite: bool = False,
    max_inflight_bytes: int = MAX_EXPORT_BYTES,
    progress: Progress | None = None,
    changed: Mapping[str, Callable[[], RawArray]] | None = None,
) -> ExportReport:
    """Write tensors under new names, see :func:`to_safetensors`.

    Args:
        names: fqn -> name in the files.
        changed: fqn -> function that returns the tensor's elements, in place of the stored ones. The other arguments
            are those of :func:`to_safetensors`.
    """
    catalog = catalog_of(part)
    if not names:
        raise KeyMismatchError(
            f"the selected entries of {part.url} have no tensor, and safetensors files cannot hold values"
        )
    place, casts = local_path(target), plan_casts(catalog.root, names, part.url, dtype)
    tensors = {fqn: _Tensor(catalog.root.tensors[fqn], casts.dtypes.get(fqn)) for fqn in names}
    _check_names(names, tensors)
    folder, files = _files(tensors, place, max_file_bytes)
    written = [*files, *([INDEX] if len(files) > 1 else [])]
    replaces = None if place.endswith(SAFETENSORS_SUFFIX) else is_model_file
    if not overwrite:
        stale = filter(replaces, os.listdir(folder)) if replaces and os.path.isdir(folder) else ()
        refuse_existing(os.path.join(folder, name) for name in (*written, *stale))
    total = sum(tensor.nbytes for tensor in tensors.values())
    tally, overflowed = ByteCounter(total, progress), Counter[str]()
    with new_files(folder, overwrite=overwrite, replaces=replaces) as new:
        for name, fqns in files.items():
            # Widest elements first, so that each tensor begins at a multiple of its element size.
            own = dict(sorted(((fqn, tensors[fqn]) for fqn in fqns), key=lambda item: -item[1].dtype.itemsize))
            parts = _read_parts(catalog, own, max_inflight_bytes, changed or {})
            overflowed += _write(os.path.join(new, name), names, own, parts, tally)
        if len(files) > 1:
            weight_map = {names[fqn]: name for name, fqns in files.items() for fqn in fqns}
            document = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
            Path(new, INDEX).write_text(json.dumps(document, indent=2))
    warn_of_overflow(overflowed)
    return ExportReport(folder, tuple(written), len(names), 0, total, dict(overflowed), casts.uncast)


def _read_parts(
    catalog: Catalog, fqns: Iterable[str], max_bytes: int, changed: Mapping[str, Callable[[], RawArray]]
) -> Iterator[tuple[str, RawArray]]:
    """Yield parts of tensors as (fqn, raw elements), see :func:`read_in_order`. Changed tensors have one part."""
    for is_changed, group in itertools.groupby(fqns, changed.__contains__):
        if is_changed:
            yield from ((fqn, changed[fqn]()) for fqn in group)
        else:
            yield from read_in_order(catalog, group, max_bytes)


class _Tensor:
    """A tensor in a file, with its shape and its dtype there."""

    def __init__(self, node: ArrayNode, dtype: DType | None) -> None:
        self.shape = node.grid.shape
        self.stored = node.dtype
        self.dtype = dtype or node.dtype
        self.nbytes = math.prod(self.shape) * self.dtype.itemsize


def _check_names(names: Mapping[str, str], tensors: Mapping[str, _Tensor]) -> None:
    """Raise UnsupportedValueError for a dtype or a name that safetensors lacks."""
    for fqn, tensor in tensors.items():
        if tensor.dtype.name not in _NAMES:
            raise UnsupportedValueError(
                f"{fqn!r} has dtype {tensor.dtype.name}, which safetensors does not support: export a part without it"
            )
        if names[fqn] == _METADATA:
            raise UnsupportedValueError(
                f"{fqn!r} would have the name {_METADATA!r}, which safetensors reserves: export a part without it"
            )


def _files(tensors: Mapping[str, _Tensor], target: str, limit: int) -> tuple[str, dict[str, list[str]]]:
    """Return the folder, and the names of the tensors in each of its files."""
    if target.endswith(SAFETENSORS_SUFFIX):
        folder, name = os.path.split(target)
        return folder, {name: list(tensors)}
    parts = list(batches(tensors, lambda fqn: tensors[fqn].nbytes, limit))
    if len(parts) == 1:
        return target, {f"model{SAFETENSORS_SUFFIX}": parts[0]}
    width = max(5, len(str(len(parts))))
    return target, {
        f"model-{i + 1:0{width}}-of-{len(parts):0{width}}{SAFETENSORS_SUFFIX}": part for i, part in enumerate(parts)
    }


def is_model_file(name: str) -> bool:
    """Whether a file in a Hugging Face folder has weights of the model, or their index, by its name."""
    return name == INDEX or _MODEL_FILE.fullmatch(name) is not None


def _write(
    path: str,
    names: Mapping[str, str],
    tensors: Mapping[str, _Tensor],
    parts: Iterable[tuple[str, RawArray]],
    tally: ByteCounter,
) -> Counter[str]:
    """Write one file. Returns the number of values of each tensor that a cast lost."""
    overflowed: Counter[str] = Counter()
    with open(path, "xb") as file:
        file.write(_header(names, tensors))
        for fqn, array in parts:
            tensor = tensors[fqn]
            if tensor.dtype != tensor.stored:
                array, lost = cast_elements(array, tensor.stored, tensor.dtype)
                overflowed[fqn] += lost
            file.write(array.reshape(-1).view("u1").data)
            tally.add(array.nbytes)
    return +overflowed


def _header(names: Mapping[str, str], tensors: Mapping[str, _Tensor]) -> bytes:
    header: dict[str, Any] = {_METADATA: {"format": "pt"}}
    begin = 0
    for fqn, tensor in tensors.items():
        end = begin + tensor.nbytes
        header[names[fqn]] = {
            "dtype": _NAMES[tensor.dtype.name],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNED)
    return len(text).to_bytes(8, "little") + text
