"""Decode the ``.metadata`` of ``torch.distributed.checkpoint`` (DCP), which is a pickle, without pickle.

Python's unpickler is unsafe even if it is restricted to some classes: it sets attributes of these classes, allocates
as much memory as a file claims, and can hash or print nested tuples for hours. The decoder here is the one that pickle
has in Python, with only the opcodes and classes that DCP writes. It calls none of the classes. The file size bounds its
work and memory.
"""

from __future__ import annotations

import dataclasses
import io
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorProperties

from zarrckpt._errors import UnsafeValueError
from zarrckpt._format.state_path import CONTAINERS, StatePath, is_key, is_unicode
from zarrckpt._format.torch_archives import MAX_FILE_DEPTH

MAX_METADATA_BYTES = 1 << 30
_WORK_PER_BYTE = 16
_MAX_DIMENSIONS = 1000


@dataclasses.dataclass
class FilePart:
    """The location of an entry in a file, like DCP's ``_StorageInfo``."""

    relative_path: str
    offset: int
    length: int
    transform_descriptors: list[str] | None = None


_RECORDS: tuple[Any, ...] = (
    *(dcp.BytesStorageMetadata, dcp.ChunkStorageMetadata, FilePart, Metadata, MetadataIndex, dcp.StorageMeta),
    *(TensorProperties, dcp.TensorStorageMetadata),
)
_FIELDS = {record: {field.name for field in dataclasses.fields(record)} for record in _RECORDS}

_METADATA_MODULE = "torch.distributed.checkpoint.metadata"
_CLASSES: dict[tuple[str, str], Any] = {
    **{(_METADATA_MODULE, record.__name__): record for record in _RECORDS if record is not FilePart},
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): FilePart,
    ("torch.distributed._shard.sharded_tensor.metadata", "TensorProperties"): TensorProperties,
}
"""Classes that the decoder creates without a call, and whose fields it sets."""

_NOT_NEEDED = {
    (_METADATA_MODULE, "_MEM_FORMAT_ENCODING"),
    ("torch.distributed._shard.sharded_tensor.metadata", "MEM_FORMAT_ENCODING"),
    ("torch.serialization", "_get_layout"),
}
"""Classes and functions whose results are not needed, and become None. Paths become None too."""


def decode_metadata(data: bytes) -> Any:
    """Return the contents of a ``.metadata`` file. :func:`check_metadata` checks them.

    Takes about 1 s per 2 MB. Raises UnsafeValueError for a class that is not DCP's. Damage can raise any error.
    """
    if len(data) > MAX_METADATA_BYTES:
        raise ValueError(f"{len(data)} bytes, expected at most {MAX_METADATA_BYTES}")
    return _Decoder(data).load()


class _Global:
    """The name of a class or function in the pickle, which is neither imported nor called."""

    __slots__ = ("make",)

    def __init__(self, make: Callable[[tuple[Any, ...]], Any]) -> None:
        self.make = make


class _Decoder(pickle._Unpickler):
    """Python's decoder of pickles, without the opcodes that DCP does not write."""

    stack: list[Any]
    pop_mark: Callable[[], list[Any]]

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self._work_left = len(data) * _WORK_PER_BYTE

    def find_class(self, module: str, name: str) -> Any:
        """Return the dtype with this name, or a replacement for the class or function."""
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        return _Global(self._maker(module, name))

    def _maker(self, module: str, name: str) -> Callable[[tuple[Any, ...]], Any]:
        if (record := _CLASSES.get((module, name))) is not None:
            return lambda arguments: record.__new__(record)
        if (module, name) in _NOT_NEEDED or (module.split(".")[0] == "pathlib" and name.endswith("Path")):
            return lambda arguments: None
        if (module, name) == ("torch", "Size"):
            return self._size
        if (module, name) == ("collections", "OrderedDict"):
            return lambda arguments: {}
        if (module, name) == ("zarrckpt._format.state_path", "StatePath"):
            return self._state_path
        raise UnsafeValueError(
            f"the metadata need {module}.{name}, which does not belong to DCP: if you trust the folder, "
            "allow_pickle=True loads it and runs its code"
        )

    def set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set_items([key, value])

    def set_items(self) -> None:
        self._set_items(self.pop_mark())

    def _set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not dict or len(items) % 2:
            raise ValueError(f"keys and values for a {type(target).__name__}")
        for key, value in zip(items[::2], items[1::2], strict=True):
            is_index = type(key) is MetadataIndex and _is_index(key)
            if type(key) not in (str, int) and not is_index:
                raise ValueError(f"a {type(key).__name__} as a key")
            target[key] = value

    def call(self) -> None:
        arguments, found = self.stack.pop(), self.stack.pop()
        if type(found) is not _Global or type(arguments) is not tuple:
            raise ValueError(f"a call of a {type(found).__name__}")
        self.stack.append(found.make(arguments))

    def build(self) -> None:
        """Set the fields of a record that the decoder has created."""
        state, target = self.stack.pop(), self.stack[-1]
        if type(target) is TensorProperties and type(state) is tuple and state:
            state = {"dtype": state[0]}
        fields = _FIELDS.get(type(target))
        if fields is None or type(state) is not dict:
            raise ValueError(f"a state for a {type(target).__name__}")
        for name in fields & state.keys():
            object.__setattr__(target, name, state[name])

    def _spend(self, work: int) -> None:
        self._work_left -= work
        if self._work_left < 0:
            raise ValueError("it uses the same objects too often")

    def _size(self, arguments: tuple[Any, ...]) -> torch.Size:
        (sizes,) = arguments
        if type(sizes) is not tuple or len(sizes) > _MAX_DIMENSIONS:
            raise ValueError("a torch.Size that does not consist of integers")
        self._spend(len(sizes))
        if not all(type(size) is int and 0 <= size < 1 << 63 for size in sizes):
            raise ValueError("a torch.Size that does not consist of integers")
        return torch.Size(sizes)

    def _state_path(self, arguments: tuple[Any, ...]) -> StatePath:
        keys, containers, ranks, rank_at = arguments
        if not all(type(part) is tuple for part in (keys, containers, ranks)) or len(keys) > MAX_FILE_DEPTH:
            raise ValueError("a StatePath that does not consist of keys")
        self._spend(len(keys) + len(ranks) + sum(len(key) for key in keys if type(key) is tuple))
        for key in keys:
            is_flat = type(key) is not tuple or not any(type(part) is tuple for part in key)
            if not is_flat or not is_key(key):
                raise ValueError(f"a StatePath with a {type(key).__name__} as a key")
        is_known = all(type(name) is str and name in CONTAINERS for name in containers)
        is_ranked = rank_at is None or (type(rank_at) is int and 0 <= rank_at < len(keys))
        if not is_known or not is_ranked or not all(type(rank) is int for rank in ranks):
            raise ValueError("a StatePath of unknown containers or ranks")
        return StatePath(keys, containers, ranks, rank_at)


_OPCODES = (
    *("PROTO", "FRAME", "STOP", "MARK", "NONE", "NEWTRUE", "NEWFALSE"),
    *("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"),
    *("BINUNICODE", "SHORT_BINUNICODE", "BINBYTES", "SHORT_BINBYTES"),
    *("EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "TUPLE", "APPEND", "APPENDS"),
    *("BINPUT", "LONG_BINPUT", "MEMOIZE", "BINGET", "LONG_BINGET", "GLOBAL", "STACK_GLOBAL"),
)
"""The names of the opcodes that are decoded as pickle does. Other opcodes are errors."""
_CHANGED: dict[str, Callable[[Any], None]] = {
    "SETITEM": _Decoder.set_item,
    "SETITEMS": _Decoder.set_items,
    "REDUCE": _Decoder.call,
    "NEWOBJ": _Decoder.call,
    "BUILD": _Decoder.build,
}
_Decoder.dispatch = {
    **{getattr(pickle, name)[0]: pickle._Unpickler.dispatch[getattr(pickle, name)[0]] for name in _OPCODES},
    **{getattr(pickle, name)[0]: method for name, method in _CHANGED.items()},
}


def check_metadata(found: object) -> Metadata:
    """Return DCP's metadata if each part has the expected type. Raises ValueError."""
    if not isinstance(found, Metadata):
        raise ValueError(f"it holds a {type(found).__name__}, expected Metadata")
    entries, locations = getattr(found, "state_dict_metadata", None), getattr(found, "storage_data", None)
    if not isinstance(entries, Mapping) or not isinstance(locations, Mapping | None):
        raise ValueError("it has no entries")
    checked: dict[int, set[int]] = {}  # the dimensions of lists of chunks by id, because entries can share a list
    for fqn, entry in entries.items():
        if type(fqn) is not str or not is_unicode(fqn):
            raise ValueError(f"a {type(fqn).__name__} as the name of an entry")
        if not isinstance(entry, dcp.BytesStorageMetadata) and not _is_tensor(entry, checked):
            raise ValueError(f"{fqn!r:.200} is neither a tensor nor a value")
    for index, location in (locations or {}).items():
        if not _is_index(index) or not _is_location(location):
            raise ValueError(f"the location of {getattr(index, 'fqn', None)!r:.200} is not a part of a file")
    return found


def read_paths(metadata: Metadata) -> dict[str, StatePath]:
    """Return the path of each entry in the saved state dict, by fqn. Raises ValueError."""
    known = getattr(metadata, "planner_data", None)
    nested: Mapping[Any, Any] = known if isinstance(known, Mapping) else {}
    found: dict[str, StatePath] = {}
    for fqn in metadata.state_dict_metadata:
        path = nested.get(fqn, (fqn,))
        is_path = isinstance(path, tuple) and 0 < len(path) <= MAX_FILE_DEPTH
        if not is_path or not all(type(part) in (str, int) and is_key(part) for part in path):
            raise ValueError(f"the path of {fqn!r:.200} is not a tuple of names and positions")
        found[fqn] = StatePath.of(path)
    return found


def _is_index(index: object) -> bool:
    offset = getattr(index, "offset", None)
    return (
        isinstance(index, MetadataIndex)
        and type(getattr(index, "fqn", None)) is str
        and (offset is None or isinstance(offset, torch.Size))
    )


def _is_location(location: object) -> bool:
    numbers = [getattr(location, name, None) for name in ("offset", "length")]
    transforms = getattr(location, "transform_descriptors", None) or ()
    return (
        type(getattr(location, "relative_path", None)) is str
        and all(isinstance(number, int) and number >= 0 for number in numbers)
        and isinstance(transforms, list | tuple)
        and all(type(name) is str for name in transforms)
    )


def _is_tensor(entry: object, checked: dict[int, set[int]]) -> bool:
    size, chunks = getattr(entry, "size", None), getattr(entry, "chunks", None)
    if not isinstance(entry, dcp.TensorStorageMetadata) or not isinstance(size, torch.Size) or type(chunks) is not list:
        return False
    if not isinstance(getattr(getattr(entry, "properties", None), "dtype", None), torch.dtype):
        return False
    if id(chunks) not in checked:
        boxes = [(getattr(chunk, "offsets", None), getattr(chunk, "sizes", None)) for chunk in chunks]
        if not all(isinstance(part, torch.Size) for box in boxes for part in box):
            return False
        checked[id(chunks)] = {len(part) for box in boxes for part in box if part is not None}
    return checked[id(chunks)] <= {len(size)}
