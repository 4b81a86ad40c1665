"""Tensors of a checkpoint as safetensors files, one tensor in memory at a time. No torch.

The format: https://github.com/huggingface/safetensors#format. Eight bytes with the length of a JSON header, the header,
the tensors' bytes one after the other. Several files get an index as Hugging Face has it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zarrckpt._arrays import read_arrays
from zarrckpt._catalog import Catalog
from zarrckpt._documents import ArrayNode
from zarrckpt._errors import StorageError, UnsupportedValueError
from zarrckpt._transfer import DEFAULT_MAX_INFLIGHT_BYTES, Progress

INDEX = "model.safetensors.index.json"
_ALIGNED = 8
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
    "complex64": "C64",
}


@dataclass(frozen=True)
class ExportReport:
    """What ``Checkpoint.to_safetensors`` wrote."""

    folder: str
    files: tuple[str, ...]
    tensors: int
    nbytes: int


def export(
    catalog: Catalog, names: Mapping[str, str], folder: str, max_file_bytes: int, progress: Progress | None
) -> ExportReport:
    """Write tensors, fqn -> name in the files, see ``Checkpoint.to_safetensors``."""
    nodes = {fqn: catalog.root.tensors[fqn] for fqn in names}
    for fqn, node in nodes.items():
        if node.dtype.name not in _NAMES:
            raise UnsupportedValueError(
                f"{fqn!r} is {node.dtype.name}, which safetensors has no name for: leave it out with keys="
            )
    files = _dealt(nodes, max_file_bytes)
    width = max(5, len(str(len(files))))
    paths = ["model.safetensors"]
    if len(files) > 1:
        paths = [f"model-{i + 1:0{width}}-of-{len(files):0{width}}.safetensors" for i in range(len(files))]
    total, done = sum(node.nbytes for node in nodes.values()), 0
    os.makedirs(folder, exist_ok=True)
    _refuse_existing(folder, [*paths, *([INDEX] if len(files) > 1 else [])])
    for path, fqns in zip(paths, files, strict=True):
        for nbytes in _write(catalog, os.path.join(folder, path), {fqn: names[fqn] for fqn in fqns}):
            done += nbytes
            if progress is not None:
                progress(done, total)
    if len(files) > 1:
        where = {names[fqn]: path for path, fqns in zip(paths, files, strict=True) for fqn in fqns}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        _put(os.path.join(folder, INDEX), json.dumps(index, indent=2).encode())
        paths.append(INDEX)
    return ExportReport(folder, tuple(paths), len(names), total)


def _refuse_existing(folder: str, names: Sequence[str]) -> None:
    found = [name for name in names if os.path.lexists(os.path.join(folder, name))]
    if found:
        raise StorageError(f"{folder} holds {found[0]!r} already; nothing was written: export to another folder")


def _dealt(nodes: Mapping[str, ArrayNode], limit: int) -> list[list[str]]:
    """Names by file, in their order; a tensor above the limit has a file of its own."""
    files: list[list[str]] = [[]]
    used = 0
    for fqn, node in nodes.items():
        if files[-1] and used + node.nbytes > limit:
            files.append([])
            used = 0
        files[-1].append(fqn)
        used += node.nbytes
    return files


def _write(catalog: Catalog, path: str, names: Mapping[str, str]) -> Iterator[int]:
    """Write one file under a name of its own until it is whole; yields the bytes of each tensor as it is written."""
    part = f"{path}.part"
    # Widest elements first: then each begins at a multiple of its size.
    ordered = sorted(names, key=lambda fqn: -catalog.root.tensors[fqn].dtype.itemsize)
    try:
        with open(part, "wb") as file:
            file.write(_header(catalog, {fqn: names[fqn] for fqn in ordered}))
            for fqn in ordered:
                array = read_arrays(catalog, [fqn], DEFAULT_MAX_INFLIGHT_BYTES, None)[fqn]
                file.write(array.reshape(-1).view("u1").data)
                yield array.nbytes
            file.flush()
            os.fsync(file.fileno())
        os.rename(part, path)
    except OSError as err:
        raise StorageError(f"writing {path} failed: {err.strerror or err}") from err
    finally:
        if os.path.exists(part):
            os.unlink(part)


def _header(catalog: Catalog, names: Mapping[str, str]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for fqn, name in names.items():
        node = catalog.root.tensors[fqn]
        end = begin + node.nbytes
        header[name] = {"dtype": _NAMES[node.dtype.name], "shape": list(node.grid.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNED)
    return len(text).to_bytes(8, "little") + text


def _put(path: str, data: bytes) -> None:
    try:
        with open(path, "xb") as file:
            file.write(data)
    except OSError as err:
        raise StorageError(f"writing {path} failed: {err.strerror or err}") from err
