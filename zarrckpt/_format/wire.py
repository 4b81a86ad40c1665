"""Messages between ranks as MessagePack: plain values, arrays of numbers, and records that are registered here.

A message cannot select code to run. None, bool, int, float, str, bytes, list and dict are those of MessagePack. All
other values are a MessagePack array: an extension with the name of a registered class, and then its fields. Received
fields are checked against the annotations of the class.
"""

from __future__ import annotations

import dataclasses
import re
import types
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import lru_cache, partial
from typing import Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

import msgpack
import numpy as np

from zarrckpt._errors import CheckpointError
from zarrckpt._format.hashes import hashes_collide

T = TypeVar("T")
Check = Callable[[Any], bool]

MAX_MESSAGE_BYTES = 2**32 - 1
"""Maximum size of a message in bytes."""

_DTYPE = re.compile(r"[<>|](?:b1|[iu][1248]|f[248])")


class _Record(NamedTuple):
    """A registered class. Its objects may be in messages."""

    tag: msgpack.ExtType
    fields_of: Callable[[Any], Sequence[Any]]
    make: Callable[..., Any]
    """Returns an object with these fields. Raises an error if they are not valid."""


_by_name: dict[bytes, _Record] = {}
_by_class: dict[type, _Record] = {}


def record(
    cls: type[T], fields_of: Callable[[T], Sequence[Any]] | None = None, make: Callable[..., T] | None = None
) -> type[T]:
    """Register a dataclass or a NamedTuple, so that its objects may be in messages. Return the class.

    Received fields are checked against the annotations. Other classes, and classes with further checks, need
    ``fields_of``, which returns the fields of an object, and ``make``, which returns an object with these fields.
    """
    name = cls.__name__.encode()
    fields_of = fields_of or partial(_fields, _field_names(cls))
    found = _Record(msgpack.ExtType(0, name), fields_of, make or partial(checked_object, cls))
    _by_name[name] = _by_class[cls] = found
    return cls


def checked_object(cls: Any, *fields: Any) -> Any:
    """Return an object of a dataclass or NamedTuple. Raises ValueError if a field has another type than annotated."""
    for (name, check), field in zip(_field_checks(cls), fields, strict=True):
        if not check(field):
            raise ValueError(f"found a {type(field).__name__} that is not valid as {name} of a {cls.__name__}")
    return cls(*fields)


@lru_cache(maxsize=1024)
def _field_checks(cls: Any) -> Sequence[tuple[str, Check]]:
    hints = get_type_hints(cls)
    return [(name, type_check(hints[name])) for name in _field_names(cls)]


def _field_names(cls: Any) -> Sequence[str]:
    return cls._fields if issubclass(cls, tuple) else [field.name for field in dataclasses.fields(cls)]


def _fields(names: Sequence[str], value: object) -> Sequence[Any]:
    return [getattr(value, name) for name in names]


def encode(value: object) -> bytes:
    """Return the bytes of a value. Raises CheckpointError for an object of a class that is not registered."""
    try:
        data: bytes = msgpack.packb(value, default=_tagged, strict_types=True, unicode_errors="surrogatepass")
    except (TypeError, ValueError, OverflowError) as err:
        raise CheckpointError(f"a message to another rank cannot be encoded: {err}") from None
    if len(data) > MAX_MESSAGE_BYTES:
        raise CheckpointError(f"a message to another rank has {len(data)} bytes, expected at most {MAX_MESSAGE_BYTES}")
    return data


def decode(data: bytes, is_valid: Check | None = None) -> Any:
    """Return the value of an encoded message. ``is_valid`` checks its type (see :func:`type_check`).

    Raises CheckpointError for all other bytes. Time and memory are proportional to the number of bytes.
    """
    try:
        value = msgpack.unpackb(
            data,
            ext_hook=_found_record,
            list_hook=_restored,
            object_pairs_hook=_checked_dict,
            strict_map_key=False,
            unicode_errors="surrogatepass",
        )
        if is_valid is not None and not is_valid(value):
            raise ValueError(f"found a {type(value).__name__} of another form than expected")
    except Exception as err:  # also MemoryError, and errors of a record's class
        raise CheckpointError(f"not a message of zarrckpt: {str(err) or type(err).__name__:.500}") from None
    return value


def _tagged(value: Any) -> Any:
    """Return a value that MessagePack has no type for as tagged fields, or as a plain value."""
    found = _by_class.get(type(value))
    if found is None:
        if isinstance(value, np.generic):
            return value.item()
        # Subclasses in the values of a caller, such as torch.Size and defaultdict. Other NamedTuples are refused.
        bases = [cls for cls in (str, int, float, list, dict, set, frozenset, tuple) if isinstance(value, cls)]
        if not bases or hasattr(value, "_fields"):
            raise TypeError(f"a {type(value).__name__} cannot be sent to another rank")
        found = _by_class.get(bases[0])
        if found is None:
            return bases[0](value)
    return [found.tag, *found.fields_of(value)]


def _found_record(code: int, name: bytes) -> _Record:
    if name not in _by_name:
        raise ValueError(f"found an unknown record {name!r:.100}")
    return _by_name[name]


def _restored(items: list[Any]) -> Any:
    return items[0].make(*items[1:]) if items and type(items[0]) is _Record else items


def _checked_dict(items: Sequence[tuple[Any, Any]]) -> dict[Any, Any]:
    _checked_keys([key for key, _ in items])
    return dict(items)


def _checked_keys(keys: Sequence[Any]) -> Sequence[Any]:
    if not {*map(type, keys)} <= {str, bytes} and hashes_collide(keys):
        raise ValueError("found too many keys with the same hash")
    return keys


def _array_fields(array: np.ndarray[Any, Any]) -> Sequence[Any]:
    if not _DTYPE.fullmatch(array.dtype.str):
        raise TypeError(f"an array of dtype {array.dtype} cannot be sent to another rank")
    return array.dtype.str, [*array.shape], np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _checked_array(dtype: str, shape: list[int], data: bytes) -> np.ndarray[Any, Any]:
    if type(data) is not bytes or not _DTYPE.fullmatch(dtype):
        raise ValueError("malformed array")
    array: np.ndarray[Any, Any] = np.ndarray(shape, dtype, data)
    if array.nbytes != len(data):
        raise ValueError(f"found {len(data)} bytes of an array, expected {array.nbytes}")
    return array.copy()


record(tuple, list, lambda *items: items)
record(set, list, lambda *items: {*_checked_keys(items)})
record(frozenset, list, lambda *items: frozenset(_checked_keys(items)))
record(int, lambda value: [str(value)], lambda digits: int(digits))  # above 64 bits; Python limits the digits
record(np.ndarray, _array_fields, _checked_array)


# -- types

_KINDS: Mapping[Any, tuple[type, ...]] = {
    None: (type(None),),
    float: (float, int),
    Sequence: (list, tuple),
    AbstractSet: (set, frozenset),
    Mapping: (dict,),
}


@lru_cache(maxsize=1024)
def type_check(hint: Any) -> Check:
    """Return a function that checks whether a value has an annotated type."""
    cls, args = get_origin(hint) or hint, get_args(hint)
    if cls in (Any, object) or isinstance(cls, TypeVar):
        return lambda value: True
    if cls in (Union, types.UnionType):
        first, *others = map(type_check, args)
        return lambda value: first(value) or any(check(value) for check in others)
    if cls is Literal:
        return lambda value: type(value) is str and value in args
    if cls is tuple and args[1:] != (...,):
        checks = [*map(type_check, args)]
        return lambda value: (
            type(value) is tuple
            and len(value) == len(checks)
            and all(check(item) for check, item in zip(checks, value, strict=True))
        )
    kinds = _KINDS.get(cls, (cls,))
    if not args or cls is np.ndarray:
        return lambda value: type(value) in kinds
    check = type_check(args[0])
    if dict in kinds:
        check_value = type_check(args[1])
        return lambda value: type(value) is dict and all(map(check, value)) and all(map(check_value, value.values()))
    return lambda value: isinstance(value, kinds) and all(map(check, value))
