"""Messages between ranks as bytes: plain values, arrays of numbers, and records that are registered here.

A message cannot select code to run. The name of a record is looked up in a table, and its fields are checked against
the annotations of its class. A message has the length of a JSON tree in 4 bytes, the tree, and then the bytes of all
byte strings and arrays in the order of the tree.

==================== ============================================
Python               JSON
==================== ============================================
None, bool, int, str unchanged
float                unchanged, also ``Infinity``; a NaN is ``["n", its 16 hexadecimal digits]``
list, tuple          ``["l", item, ...]``, ``["t", item, ...]``
dict                 ``["d", key, value, key, value, ...]``
set, frozenset       ``["s", item, ...]``, ``["f", item, ...]``
bytes                ``["b", length]``
array                ``["a", dtype, length of each axis, ...]``
record               ``[name, field, ...]``
==================== ============================================
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import struct
import sys
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import lru_cache, partial
from typing import Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from zarrckpt._errors import CheckpointError
from zarrckpt._format.hashes import hashes_collide

T = TypeVar("T")

MAX_MESSAGE_BYTES = 2**32 - 1
"""Maximum size of a message in bytes."""

_MAX_LEVELS = 160
"""Maximum nesting of a message. It is more than the 128 levels of a JSON value in a checkpoint."""

_TREE_LENGTH = struct.Struct("<I")
_SCALARS = frozenset({type(None), bool, int, float, str})
_DTYPE = re.compile(r"[<>|](?:b1|[iu][1248]|f[248])")
_TREE_ENCODER = json.JSONEncoder(separators=(",", ":"), check_circular=False)


class _Record(NamedTuple):
    """A registered class. Its objects may be in messages."""

    name: str
    fields_of: Callable[[Any], Sequence[Any]]
    make: Callable[..., Any]
    """Returns an object with these fields. Raises an error if they are not valid."""


_by_name: dict[str, _Record] = {}
_by_class: dict[type, _Record] = {}


def record(
    cls: type[T], fields_of: Callable[[T], Sequence[Any]] | None = None, make: Callable[..., T] | None = None
) -> type[T]:
    """Register a dataclass or a NamedTuple, so that its objects may be in messages. Return the class.

    Received fields are checked against the annotations. Other classes, and classes with further checks, need
    ``fields_of``, which returns the fields of an object, and ``make``, which returns an object with these fields.
    """
    found = _Record(
        cls.__name__, fields_of or partial(_attributes, _field_names(cls)), make or partial(_checked_object, cls)
    )
    _by_name[found.name] = _by_class[cls] = found
    return cls


def _field_names(cls: Any) -> Sequence[str]:
    return cls._fields if issubclass(cls, tuple) else [field.name for field in dataclasses.fields(cls)]


def _attributes(names: Sequence[str], value: object) -> list[Any]:
    return [getattr(value, name) for name in names]


def _checked_object(cls: Any, *fields: Any) -> Any:
    names, checks = _field_checks(cls)
    if len(fields) != len(names):
        raise ValueError(f"found a {cls.__name__} with {len(fields)} fields, expected {len(names)}")
    for name, check, field in zip(names, checks, fields, strict=True):
        if not check(field):
            raise ValueError(f"found a {type(field).__name__} that is not valid as {name} of a {cls.__name__}")
    return cls(*fields)


# -- encode


def encode(value: object) -> bytes:
    """Return the bytes of a value. Raises CheckpointError for an object of a class that is not registered."""
    raw: list[Any] = []
    text = _TREE_ENCODER.encode(_tree_of(value, raw, _MAX_LEVELS)).encode()
    length = _TREE_LENGTH.size + len(text) + sum(map(len, raw))
    if length > MAX_MESSAGE_BYTES:
        raise CheckpointError(f"a message to another rank has {length} bytes, expected at most {MAX_MESSAGE_BYTES}")
    return b"".join((_TREE_LENGTH.pack(len(text)), text, *raw))


def _tree_of(value: Any, raw: list[Any], levels: int) -> Any:
    kind = type(value)
    if kind in _SCALARS:
        return ["n", struct.pack(">d", value).hex()] if value != value else value
    if levels == 0:
        raise CheckpointError(f"a message to another rank is nested deeper than {_MAX_LEVELS} levels")
    if kind is bytes:
        raw.append(value)
        return ["b", len(value)]
    levels -= 1
    if kind is tuple:
        return ["t", *_trees_of(value, raw, levels)]
    if kind is list:
        return ["l", *_trees_of(value, raw, levels)]
    if kind is dict:
        return ["d", *_trees_of([part for item in value.items() for part in item], raw, levels)]
    known = _by_class.get(kind)
    if known is not None:
        return [known.name, *_trees_of(known.fields_of(value), raw, levels)]
    return _other_tree(value, raw, levels)


def _trees_of(items: Collection[Any], raw: list[Any], levels: int) -> Collection[Any]:
    if _SCALARS.issuperset(map(type, items)) and all(item == item for item in items):
        return items
    return [_tree_of(item, raw, levels) for item in items]


def _other_tree(value: Any, raw: list[Any], levels: int) -> Any:
    if isinstance(value, set | frozenset):
        return ["f" if isinstance(value, frozenset) else "s", *_trees_of(value, raw, levels)]
    if (numpy := sys.modules.get("numpy")) is not None:
        if isinstance(value, numpy.generic) and type(value.item()) in _SCALARS:
            return value.item()
        if type(value) is numpy.ndarray and _DTYPE.fullmatch(value.dtype.str):
            raw.append(numpy.ascontiguousarray(value).reshape(-1).view(numpy.uint8))
            return ["a", value.dtype.str, *value.shape]
    # Subclasses in the values of a caller, such as torch.Size and defaultdict.
    for plain in (str, int, float, list, dict, *(() if hasattr(value, "_fields") else (tuple,))):
        if isinstance(value, plain):
            return _tree_of(plain(value), raw, levels)
    raise CheckpointError(f"a {type(value).__name__} cannot be sent to another rank")


# -- decode


def decode(data: bytes, expected: Any = Any) -> Any:
    """Return the value of an encoded message. ``expected`` is its type, as in annotations.

    Raises CheckpointError for all other bytes. Time and memory are proportional to the number of bytes.
    """
    try:
        return _decoded(data, expected)
    except Exception as err:  # also RecursionError, MemoryError, and errors of a record's class
        raise CheckpointError(f"not a message of zarrckpt: {str(err) or type(err).__name__:.500}") from None


def _decoded(data: bytes, expected: Any) -> Any:
    end = _TREE_LENGTH.size + _TREE_LENGTH.unpack_from(data)[0]
    if end > len(data):
        raise ValueError(f"found {len(data)} bytes, expected at least {end}")
    tree = json.loads(str(data[_TREE_LENGTH.size : end], "utf-8"))
    reader = _Reader(data, end)
    value = reader.value(tree, _MAX_LEVELS)
    if reader.at != len(data):
        raise ValueError(f"found {len(data) - reader.at} bytes after the end of the message")
    if not type_check(expected)(value):
        raise ValueError(f"found a {type(value).__name__}, expected a {expected}")
    return value


class _Reader:
    """Decodes values from a tree and the bytes after it."""

    def __init__(self, data: bytes, at: int) -> None:
        self._data = data
        self.at = at

    def value(self, tree: Any, levels: int) -> Any:
        if type(tree) is not list:
            if type(tree) in _SCALARS:
                return tree
            raise ValueError("found a JSON object")
        if not tree or type(tree[0]) is not str:
            raise ValueError("found a list without a tag")
        if levels == 0:
            raise ValueError(f"nested deeper than {_MAX_LEVELS} levels")
        tag = tree[0]
        if tag == "b":
            return self._bytes(*tree[1:])
        if tag == "n":
            return self._nan(*tree[1:])
        if tag == "a":
            return self._array(*tree[1:])
        del tree[0]
        if not _SCALARS.issuperset(map(type, tree)):
            tree = [self.value(item, levels - 1) for item in tree]
        if tag == "t":
            return tuple(tree)
        if tag == "l":
            return tree
        if tag == "d":
            return dict(zip(_checked_keys(tree[::2]), tree[1::2], strict=True))
        if tag == "f" or tag == "s":
            return (frozenset if tag == "f" else set)(_checked_keys(tree))
        if tag not in _by_name:
            raise ValueError(f"found an unknown record {tag!r:.100}")
        return _by_name[tag].make(*tree)

    def _bytes(self, length: Any) -> bytes:
        begin = self._skip(length)
        return self._data[begin : self.at]

    def _nan(self, digits: Any) -> float:
        if type(digits) is not str or len(digits) != 16:
            raise ValueError("malformed NaN")
        (value,) = struct.unpack(">d", bytes.fromhex(digits))
        return float(value)

    def _array(self, name: Any, *shape: Any) -> Any:
        counts = len(shape) <= 32 and all(type(n) is int and 0 <= n < 2**63 for n in shape)
        if type(name) is not str or not _DTYPE.fullmatch(name) or not counts:
            raise ValueError("malformed array")
        import numpy as np

        dtype, count = np.dtype(name), math.prod(shape)
        begin = self._skip(count * dtype.itemsize)
        return np.frombuffer(self._data, dtype, count, begin).reshape(shape).copy() if count else np.empty(shape, dtype)

    def _skip(self, length: Any) -> int:
        """Move the position forward by this number of bytes. Return the position before."""
        begin, left = self.at, len(self._data) - self.at
        if type(length) is not int or not 0 <= length <= left:
            raise ValueError(f"found {left} bytes, expected {length!r:.100}")
        self.at += length
        return begin


def _checked_keys(keys: list[Any]) -> list[Any]:
    if not set(map(type, keys)) <= {str, bytes} and hashes_collide(keys):
        raise ValueError("found too many keys with the same hash")
    return keys


# -- types

Check = Callable[[Any], bool]


@lru_cache(maxsize=1024)
def _field_checks(cls: Any) -> tuple[Sequence[str], Sequence[Check]]:
    names, hints = _field_names(cls), get_type_hints(cls)
    return names, [type_check(hints[name]) for name in names]


@lru_cache(maxsize=1024)
def type_check(hint: Any) -> Check:
    """Return a function that checks whether a value has an annotated type."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return _either([*map(type_check, args)])
    if origin is Literal:
        return lambda value: any(type(value) is type(arg) and value == arg for arg in args)
    if origin is tuple:
        return _tuple_check(args)
    if origin in (list, Sequence, set, frozenset, AbstractSet):
        kinds: Any = {list: list, Sequence: list | tuple}.get(origin, set | frozenset)
        return _collection_check(kinds, _all_check(args[0]))
    if origin in (dict, Mapping):
        keys, values = _all_check(args[0]), _all_check(args[1])
        return lambda value: type(value) is dict and keys(value) and values(value.values())
    if hint is Any or hint is object or isinstance(hint, TypeVar):
        return lambda value: True
    cls: Any = type(None) if hint is None else origin or hint
    if cls is float:
        return lambda value: type(value) in (float, int)
    return lambda value: type(value) is cls


def _either(checks: list[Check]) -> Check:
    first, *others = checks
    if not others:
        return first
    second = _either(others)
    return lambda value: first(value) or second(value)


def _collection_check(kinds: Any, check: Check) -> Check:
    return lambda value: isinstance(value, kinds) and check(value)


def _tuple_check(args: tuple[Any, ...]) -> Check:
    if len(args) == 2 and args[1] is Ellipsis:
        return _collection_check(tuple, _all_check(args[0]))
    checks = [*map(type_check, args)]
    return lambda value: (
        type(value) is tuple
        and len(value) == len(checks)
        and all(check(item) for check, item in zip(checks, value, strict=True))
    )


def _all_check(hint: Any) -> Check:
    """Return a function that checks whether all items of a collection have a type."""
    if isinstance(hint, type) and hint not in (Any, object, float):
        only = frozenset({hint}).issuperset
        return lambda items: only(map(type, items))
    check = type_check(hint)
    return lambda items: all(map(check, items))
