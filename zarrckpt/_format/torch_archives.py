"""Loading what ``torch.save`` wrote, from a source that is not trusted. torch is imported when it is needed."""

from __future__ import annotations

import threading
import zipfile
from collections.abc import Iterable, Mapping
from typing import Any, BinaryIO

from zarrckpt._forks import ForkSafeLock

ARCHIVE = b"PK\x03\x04"
"""The first bytes of a file of ``torch.save``."""

MAX_FILE_DEPTH = 100
"""Levels of containers in an imported file."""

# The check of sparse tensors is a switch of the whole process, which each load turns on and back. A load may run code
# of a checkpoint that loads another one.
_SWITCH = ForkSafeLock(threading.RLock)


def load_torch(source: str | BinaryIO, *, weights_only: bool = True, mmap: bool = False) -> Any:
    """Load a file of ``torch.save`` to the CPU. Indices of sparse tensors are checked: torch itself trusts them.

    Raises ValueError for an archive with compressed members, which could be a thousand times larger than the file, and
    what ``torch.load`` raises: with bad input, any error.
    """
    import torch

    _refuse_compressed(source)
    check_sparse_tensors: Any = torch.sparse.check_sparse_tensor_invariants
    with _SWITCH, check_sparse_tensors():
        return torch.load(source, map_location="cpu", mmap=mmap, weights_only=weights_only)


def refuse_expanded(value: object, file_bytes: int) -> None:
    """Raise ValueError for a value that is larger than the file that holds it, so that nobody tries to save it.

    1 KB can describe a tensor of terabytes, whose elements overlap as after ``expand``; containers that hold others
    many times; and containers nested so deeply that Python cannot walk through them.
    """
    import torch

    nodes, found = 0, [(value, 0)]
    while found:
        value, depth = found.pop()
        nodes += 1
        if isinstance(value, torch.Tensor):
            is_stored = value.layout is torch.strided and not value.is_meta
            if is_stored and value.numel() * value.element_size() > file_bytes:
                raise ValueError(
                    f"a tensor of the shape {tuple(value.shape)} in {file_bytes} bytes: its elements overlap; save a "
                    "clone of it"
                )
            continue
        if isinstance(value, Mapping):
            inner: Iterable[object] = value.values()
        elif isinstance(value, list | tuple):
            inner = value
        else:
            continue
        if depth == MAX_FILE_DEPTH or nodes + len(found) > file_bytes:
            raise ValueError(
                f"containers nested more than {MAX_FILE_DEPTH} deep, or more entries than {file_bytes} bytes"
            )
        found += [(item, depth + 1) for item in inner]


def _refuse_compressed(source: str | BinaryIO) -> None:
    if isinstance(source, str):
        with open(source, "rb") as file:
            return _refuse_compressed(file)
    begin = source.tell()
    head = source.read(len(ARCHIVE))
    source.seek(begin)
    if head != ARCHIVE:  # torch's older formats, which have no members
        return None
    try:
        with zipfile.ZipFile(source) as archive:
            members = archive.infolist()
    except Exception as err:  # a parser on any input
        raise ValueError(f"its archive is damaged: {type(err).__name__}: {err}") from err
    for member in members:
        if member.compress_type != zipfile.ZIP_STORED or member.file_size != member.compress_size:
            raise ValueError(f"its member {member.filename!r} is compressed, which torch.save does not do")
    source.seek(begin)
    return None
