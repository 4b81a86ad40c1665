"""Load files of ``torch.save`` from untrusted sources. torch is imported when it is needed."""

from __future__ import annotations

import contextlib
import io
import pickle
import threading
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, BinaryIO

from zarrckpt._forks import ForkSafeLock

ARCHIVE = b"PK\x03\x04"
"""The first bytes of a file of ``torch.save``."""

MAX_FILE_DEPTH = 100
"""Maximum nesting of containers in an imported file."""

ALLOW = "allow safe types with torch.serialization.add_safe_globals, or run all code of the file with allow_pickle=True"
"""The next step in errors about refused types."""

# The check of sparse tensors is a setting of the whole process. Each load enables it and then restores it. The lock is
# reentrant, because a load may run code of the file that loads another file.
_SWITCH = ForkSafeLock(threading.RLock)


class _LimitedReads(io.RawIOBase):
    """A file of ``torch.save`` that ends after reads of twice its size, and of some headers.

    torch ignores case when it searches a member. So a pickle of 1 MB can name one member a million times.
    """

    def __init__(self, file: BinaryIO, file_bytes: int) -> None:
        self._file, self._left = file, 2 * file_bytes + 2**20

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def readinto(self, buffer: Any, /) -> int:
        # torch replaces errors that are raised here by an unrelated one.
        data = self._file.read(min(len(buffer), self._left))
        self._left -= len(data)
        buffer[: len(data)] = data
        return len(data)


def load_torch(
    source: str | BinaryIO, *, weights_only: bool = True, mmap: bool = False, refused: Sequence[str] = ()
) -> Any:
    """Load a file of ``torch.save`` to the CPU. Checks the indices of sparse tensors, because torch trusts them.

    Objects of the ``refused`` types become a :class:`RefusedObject`, and no code of these types runs.

    Raises ValueError for an archive with compressed members, and if members are larger than the file or read several
    times. Also raises the errors of ``torch.load``, which can be any error for bad input.
    """
    import torch

    file_bytes = _refuse_compressed(source)
    file: Any = source if isinstance(source, str) else _LimitedReads(source, file_bytes)
    check_sparse_tensors: Any = torch.sparse.check_sparse_tensor_invariants
    stand_ins: list[Any] = []
    for name in refused:
        own = {"refused_name": name, "_thread": threading.get_ident()}
        stand_ins.append((RefusedType("RefusedObject", (RefusedObject,), own), name))
    with _SWITCH, check_sparse_tensors(), torch.serialization.safe_globals(stand_ins):
        return torch.load(file, map_location="cpu", mmap=mmap, weights_only=weights_only)


def refused_types(source: str | BinaryIO) -> list[str]:
    """Return the names of types and functions in a file that torch does not load by default.

    Types of ``torch.serialization.add_safe_globals`` are not among them. The result is empty if the names cannot be
    found, for example in a damaged file and in torch's older formats.
    """
    import torch

    with contextlib.suppress(Exception):  # a parser on any input
        _refuse_compressed(source)
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(source))
    return []


class RefusedType(type):
    """The type of :class:`RefusedObject` and its subclasses. Each takes the place of a refused type."""

    def __eq__(cls, other: object) -> bool:
        # torch sets items only in dicts, and compares types with ``==``. So a subclass of dict can have a stand-in.
        return cls is other or other is dict

    __hash__ = type.__hash__


class RefusedObject(metaclass=RefusedType):
    """An object in place of one that torch refuses to load. Calls in the file create it, and it ignores all data."""

    refused_name = ""
    _thread = 0

    def __new__(cls, *args: object) -> Any:
        if cls._thread != threading.get_ident():
            # While this thread loads a file, torch.load in other threads finds the stand-ins too.
            raise pickle.UnpicklingError(f"{cls.refused_name}: see torch.serialization.add_safe_globals")
        stand_in = super().__new__(cls)
        return [stand_in] if cls.refused_name == DEQUE else stand_in  # torch appends items only to lists

    def __setstate__(self, state: object) -> None: ...

    def __setitem__(self, key: object, value: object) -> None: ...


DEQUE = "collections.deque"
"""The refused type whose stand-in is in a list, before the items."""


def refuse_expanded(value: object, file_bytes: int) -> None:
    """Raise ValueError for a value that is larger than its file, before anything tries to save the value.

    1 KB can describe a tensor of terabytes, whose elements overlap as after ``expand``. It can describe containers with
    many copies of others, and containers that are nested too deeply for Python.
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
                    f"found a tensor of shape {tuple(value.shape)} in a file of {file_bytes} bytes. Its elements "
                    "overlap. Save a clone of it"
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
                f"found containers nested more than {MAX_FILE_DEPTH} deep, or more entries than the file's "
                f"{file_bytes} bytes"
            )
        found += [(item, depth + 1) for item in inner]


def _refuse_compressed(source: str | BinaryIO) -> int:
    """Return a file's size in bytes. Raises ValueError for an archive with compressed members, or with larger ones.

    Python shows whether members are compressed, and torch the sizes that it will read. They may find two directories.
    """
    import torch

    if isinstance(source, str):
        with open(source, "rb") as file:
            return _refuse_compressed(file)
    begin = source.tell()
    file_bytes = source.seek(0, io.SEEK_END)
    source.seek(begin)
    head = source.read(len(ARCHIVE))
    source.seek(begin)
    if head != ARCHIVE:  # torch's older formats, which have no members
        return file_bytes
    try:
        with zipfile.ZipFile(source) as archive:
            members = archive.infolist()
        source.seek(begin)
        reader = torch._C.PyTorchFileReader(source)
        total = sum(map(reader.get_record_size, reader.get_all_records()))
    except Exception as err:  # a parser on any input
        raise ValueError(f"the archive is damaged: {type(err).__name__}: {err}") from err
    stored = all(item.compress_type == zipfile.ZIP_STORED and item.file_size == item.compress_size for item in members)
    if not stored or total > file_bytes:
        raise ValueError(
            f"the archive of {file_bytes} bytes has compressed members ({total} bytes in all): torch.save writes none"
        )
    source.seek(begin)
    return file_bytes
