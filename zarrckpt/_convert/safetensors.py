"""Write tensors of a checkpoint as safetensors files, in bounded memory. No torch.

The format: https://github.com/huggingface/safetensors#format. A file has eight bytes with the length of a JSON header,
the header, then the bytes of each tensor. If there are several files, they get an index in Hugging Face's format.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zarrckpt._errors import UnsupportedValueError
from zarrckpt._format.documents import ArrayNode
from zarrckpt._format.dtypes import DType
from zarrckpt._jobs import Progress, Tally
from zarrckpt._read.arrays import batches, read_in_order
from zarrckpt._read.casts import Casts, cast_elements
from zarrckpt._read.catalog import Catalog
from zarrckpt._reports import ExportReport
from zarrckpt._store._whole_files import new_files, refuse_existing

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


def export_safetensors(
    catalog: Catalog,
    names: Mapping[str, str],
    target: str,
    casts: Casts,
    *,
    max_file_bytes: int,
    overwrite: bool,
    max_inflight_bytes: int,
    progress: Progress | None,
) -> ExportReport:
    """Write tensors, see ``Checkpoint.to_safetensors``. ``names`` is fqn -> name in the files."""
    tensors = {fqn: _Tensor(catalog.root.tensors[fqn], casts.dtypes.get(fqn)) for fqn in names}
    for fqn, tensor in tensors.items():
        if tensor.dtype.name not in _NAMES:
            raise UnsupportedValueError(
                f"{fqn!r} has dtype {tensor.dtype.name}, which safetensors does not support: export a part without it"
            )
        if names[fqn] == _METADATA:
            raise UnsupportedValueError(
                f"{fqn!r} would have the name {_METADATA!r}, which safetensors reserves: export a part without it"
            )
    folder, files = _files(tensors, target, max_file_bytes)
    written = [*files, *([INDEX] if len(files) > 1 else [])]
    replaces = None if target.endswith(SAFETENSORS_SUFFIX) else is_model_file
    if not overwrite:
        stale = filter(replaces, os.listdir(folder)) if replaces and os.path.isdir(folder) else ()
        refuse_existing(os.path.join(folder, name) for name in (*written, *stale))
    total = sum(tensor.nbytes for tensor in tensors.values())
    tally = Tally(total, progress)
    overflowed: Counter[str] = Counter()
    with new_files(folder, overwrite=overwrite, replaces=replaces) as part:
        for name, fqns in files.items():
            wanted = {fqn: tensors[fqn] for fqn in fqns}
            overflowed += _write(catalog, os.path.join(part, name), names, wanted, max_inflight_bytes, tally)
        if len(files) > 1:
            weight_map = {names[fqn]: name for name, fqns in files.items() for fqn in fqns}
            document = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
            Path(part, INDEX).write_text(json.dumps(document, indent=2))
    return ExportReport(folder, tuple(written), len(names), 0, total, dict(overflowed), casts.uncast)


class _Tensor:
    """A tensor in a file, with its shape and its dtype there."""

    def __init__(self, node: ArrayNode, dtype: DType | None) -> None:
        self.shape = node.grid.shape
        self.stored = node.dtype
        self.dtype = dtype or node.dtype
        self.nbytes = math.prod(self.shape) * self.dtype.itemsize


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
    catalog: Catalog,
    path: str,
    names: Mapping[str, str],
    tensors: Mapping[str, _Tensor],
    max_inflight_bytes: int,
    tally: Tally,
) -> Counter[str]:
    """Write one file. Returns the number of values of each tensor that a cast lost."""
    # Widest elements first, so that each tensor begins at a multiple of its element size.
    ordered = dict(sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize))
    overflowed: Counter[str] = Counter()
    with open(path, "xb") as file:
        file.write(_header(names, ordered))
        for fqn, array in read_in_order(catalog, ordered, max_inflight_bytes):
            tensor = ordered[fqn]
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
