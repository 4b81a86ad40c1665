"""Encode Python values as strict JSON, and decode them.

:func:`encode_json` encodes these Python types, and no subclasses of them, as JSON. :func:`decode_json` restores the
exact type and value. An object with a single member whose name begins with ``$`` is a *tagged form*. No other member
name begins with ``$``.

====================================== ===============================================================
Python                                 JSON
====================================== ===============================================================
None, bool, str, list                  null, true or false, string, array
str with a lone surrogate              ``{"$str": hex}``: its UTF-8 bytes, surrogates encoded too
int from -(2**53 - 1) to 2**53 - 1     number without fraction and exponent
other int                              ``{"$int": "-0x20000000000000"}``
finite float                           number with fraction or exponent; -0.0 is ``-0.0``
other float                            ``{"$float": "nan"}``, ``"inf"``, ``"-inf"``; a nan with other
                                       bits than 0x7ff8000000000000 is ``"0x"`` and its 16 digits
complex                                ``{"$complex": [real, imag]}``, two floats as above
tuple                                  ``{"$tuple": [item, ...]}``
set, frozenset                         ``{"$set": [item, ...]}``, ``{"$frozenset": [...]}``, in order
                                       of the items' JSON texts
dict with plain keys                   object with the same members in the same order; a plain key is
                                       a str that doesn't begin with ``$`` and has no lone surrogate
dict with other keys                   ``{"$dict": [[key, value], ...]}``; a key can be any value above
OrderedDict                            ``{"$ordereddict": [[key, value], ...]}``
====================================== ===============================================================

Hexadecimal digits are lowercase. Values nest at most 32 deep, so that the JSON has less than 128 levels, the limit of
some parsers. A value that contains itself has no JSON form. An object that occurs twice is restored as two equal
objects.
"""

from __future__ import annotations

import json
import math
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, cast

from zarrckpt._errors import CorruptCheckpointError
from zarrckpt._format.hashes import MAX_EQUAL_HASHES, hashes_collide
from zarrckpt._format.state_path import is_unicode

MAX_DEPTH: Final = 32
"""Maximum nesting of containers in a value."""

MAX_LEVELS: Final = 128
"""Maximum nesting of the JSON of a value, before it is decoded."""

MAX_JSON_VALUE: Final = 64 * 1024
"""Maximum bytes of JSON of a value in the root document. A larger value becomes a blob."""

_FREE_CONTAINERS = 1 << 20
_BYTES_PER_CONTAINER = 16
"""Minimum bytes of a document per array or object of JSON, beyond the free ones. Saves write about 35 bytes per one."""

NOT_JSON: Final = object()
"""The result of :func:`encode_json` for a value without a JSON form."""

_MAX_INT = 2**53 - 1
_NAN = struct.pack(">d", math.nan)

# Maximum number of items of containers that occur repeatedly, in total. It is enough for shared constants. It bounds
# values such as thirty times a = [a, a], which are small in memory and in a pickle but not in JSON.
_MAX_REPEATED = 2**20


def encode_json(value: object) -> object:
    """Return the JSON form of a value, as objects for ``json.dumps``, or NOT_JSON if it has none.

    Equal values of equal types have equal JSON, except for the order of a dict. Time grows with the size.
    """
    try:
        return Encoder().encode(value, 0)
    except NotJson:
        return NOT_JSON


def decode_json(obj: object) -> Any:
    """Return the value of a JSON form. ``obj`` is the result of ``json.loads``.

    Raises CorruptCheckpointError for anything that :func:`encode_json` cannot return. Runs no code of the checkpoint,
    and needs a small multiple of the memory of ``obj``.
    """
    return Decoder().decode(obj, 0)


def json_size(obj: object) -> int:
    """Return the bytes of a JSON form in compact ASCII. Costs one ``json.dumps``."""
    return len(dumps(obj))


class NotJson(Exception):
    """Raised for an item without a JSON form. It ends the encoding."""


class Encoder:
    """Encodes one value.

    ``attach`` returns the JSON form of an item of another type, or raises NotJson. Without ``attach``, each such item
    raises NotJson.
    """

    def __init__(self, attach: Callable[[object], object] | None = None) -> None:
        self._attach = attach
        self._seen: set[int] = set()
        self._repeated = 0

    def encode(self, value: object, depth: int) -> object:
        """Return the JSON form of an item inside ``depth`` containers. Raises NotJson."""
        if value is None or type(value) is bool:
            return value
        if type(value) is str:
            return value if is_unicode(value) else {"$str": value.encode("utf-8", "surrogatepass").hex()}
        if type(value) is int:
            return value if -_MAX_INT <= value <= _MAX_INT else {"$int": hex(value)}
        if type(value) is float:
            return _encode_float(value)
        if type(value) is complex:
            return {"$complex": [_encode_float(value.real), _encode_float(value.imag)]}
        if type(value) in (list, tuple, set, frozenset, dict, OrderedDict):
            return self._container(value, depth)
        if self._attach is None:
            raise NotJson
        return self._attach(value)

    def _container(self, value: Any, depth: int) -> object:
        self._check(value, depth)
        if isinstance(value, dict):
            return self._mapping(value, depth + 1)
        items = [self.encode(item, depth + 1) for item in value]
        if type(value) is list:
            return items
        if type(value) is not tuple:
            if hashes_collide(value):
                raise NotJson
            items.sort(key=dumps)  # the order of a set differs between processes
        return {f"${type(value).__name__}": items}

    def _mapping(self, value: dict[Any, Any], depth: int) -> object:
        if type(value) is dict and all(map(is_plain_key, value)):
            return {key: self.encode(item, depth) for key, item in value.items()}
        if hashes_collide(value):
            raise NotJson
        pairs = [[self.encode(key, depth), self.encode(item, depth)] for key, item in value.items()]
        return {"$dict" if type(value) is dict else "$ordereddict": pairs}

    def _check(self, value: Any, depth: int) -> None:
        if depth == MAX_DEPTH:  # also the end of a value that contains itself
            raise NotJson
        if id(value) in self._seen:
            self._repeated += 1 + len(value)
            if self._repeated > _MAX_REPEATED:
                raise NotJson
        self._seen.add(id(value))


def _encode_float(value: float) -> object:
    if math.isfinite(value):
        return value
    bits = struct.pack(">d", value)
    return {"$float": repr(value) if math.isinf(value) or bits == _NAN else f"0x{bits.hex()}"}


def is_plain_key(key: object) -> bool:
    """Whether a key of a dict can be the name of a JSON member."""
    return type(key) is str and not key.startswith("$") and is_unicode(key)


class Decoder:
    """Decodes JSON forms of untrusted documents.

    ``blob`` restores an item from the content of the tag ``$blob``. Without ``blob``, the tag is unknown.
    """

    def __init__(self, blob: Callable[[object], object] | None = None) -> None:
        self._blob = blob

    def decode(self, obj: object, depth: int) -> Any:
        """Return the value of an item inside ``depth`` containers. Raises CorruptCheckpointError."""
        if obj is None or type(obj) is bool or (type(obj) is str and is_unicode(obj)):
            return obj
        if type(obj) is int and -_MAX_INT <= obj <= _MAX_INT:
            return obj
        if type(obj) is float and math.isfinite(obj):
            return obj
        if isinstance(obj, list):
            return self._items(obj, depth, "a list")
        if not isinstance(obj, dict):
            raise malformed("a JSON value with numbers in range", obj)
        if len(obj) == 1:
            ((tag, content),) = obj.items()
            if isinstance(tag, str) and tag.startswith("$"):
                return self._tagged(tag, content, depth)
        return self._object(obj, depth)

    def _object(self, obj: dict[Any, Any], depth: int) -> dict[str, Any]:
        _check_depth(depth)
        for key in obj:
            if not is_plain_key(key):
                raise malformed("member names of Unicode characters that do not begin with '$'", key)
        return {key: self.decode(item, depth + 1) for key, item in obj.items()}

    def _tagged(self, tag: str, content: object, depth: int) -> Any:
        if tag in _SCALARS:
            return _decode_scalar(tag, content)
        if tag == "$tuple":
            return tuple(self._items(content, depth, tag))
        if tag == "$set":
            return self._unique(set, content, depth, tag)
        if tag == "$frozenset":
            return self._unique(frozenset, content, depth, tag)
        if tag in ("$dict", "$ordereddict"):
            return self._pairs(dict if tag == "$dict" else OrderedDict, content, depth, tag)
        if tag == "$blob" and self._blob is not None:
            return self._blob(content)
        raise malformed("a known tag", tag)

    def _items(self, content: object, depth: int, tag: str) -> list[Any]:
        _check_depth(depth)
        if type(content) is not list:
            raise malformed(f"an array for {tag}", content)
        return [self.decode(item, depth + 1) for item in content]

    def _unique(self, kind: Callable[[Iterable[Any]], Any], content: object, depth: int, tag: str) -> Any:
        items = self._items(content, depth, tag)
        try:
            _check_hashes(items, tag)
            unique = kind(items)
        except TypeError as err:
            raise CorruptCheckpointError(f"malformed JSON value: {tag}: {err}") from err
        texts = list(map(dumps, cast("list[object]", content)))
        if len(unique) != len(items) or texts != sorted(texts):
            raise malformed(f"different items for {tag}, in the order of their JSON texts", content)
        return unique

    def _pairs(self, kind: Callable[[Iterable[Any]], Any], content: object, depth: int, tag: str) -> Any:
        _check_depth(depth)
        if type(content) is not list or not all(type(pair) is list and len(pair) == 2 for pair in content):
            raise malformed(f"an array of pairs for {tag}", content)
        pairs = [(self.decode(key, depth + 1), self.decode(item, depth + 1)) for key, item in content]
        try:
            _check_hashes([key for key, _ in pairs], tag)
            mapping = kind(pairs)
        except TypeError as err:
            raise CorruptCheckpointError(f"malformed JSON value: {tag}: {err}") from err
        if len(mapping) != len(pairs):
            raise malformed(f"different keys for {tag}", content)
        if kind is dict and all(map(is_plain_key, mapping)):
            raise malformed("an object for a dict with plain keys", tag)
        return mapping


def _decode_scalar(tag: str, content: object) -> object:
    """Return the value of a tag without items. Accepts only the content that :func:`encode_json` returns for it."""
    try:
        value = _SCALARS[tag](content)
    except Exception as err:  # a parser on any input
        raise CorruptCheckpointError(f"malformed JSON value: {tag}: {err!s:.200}") from err
    if encode_json(value) != {tag: content}:
        raise malformed(f"the content of {tag} that is encoded for its value", content)
    return value


def _decode_float(content: Any) -> float:
    if content in ("nan", "inf", "-inf"):
        return float(content)
    number: float = struct.unpack(">d", bytes.fromhex(content.removeprefix("0x")))[0]
    return number


def _decode_complex(content: Any) -> complex:
    parts = (_decode_float(part["$float"]) if type(part) is dict else part for part in content)
    real, imag = parts
    if not type(real) is type(imag) is float:
        raise TypeError("found other types than float")
    return complex(real, imag)


_SCALARS: Final[Mapping[str, Callable[[Any], object]]] = {
    "$str": lambda content: bytes.fromhex(content).decode("utf-8", "surrogatepass"),
    "$int": lambda content: int(content, 16),
    "$float": _decode_float,
    "$complex": _decode_complex,
}


def _check_hashes(items: Sequence[object], tag: str) -> None:
    if hashes_collide(items):
        raise CorruptCheckpointError(
            f"malformed JSON value: found more than {MAX_EQUAL_HASHES} items of {tag} with the same hash, expected at "
            f"most {MAX_EQUAL_HASHES}"
        )


def _check_depth(depth: int) -> None:
    if depth >= MAX_DEPTH:
        raise CorruptCheckpointError(f"malformed JSON value: nested deeper than {MAX_DEPTH} levels")


def malformed(expected: str, found: object) -> CorruptCheckpointError:
    """Return the error for an unexpected part of a JSON form."""
    # No repr of a container, because it may be very long or nested too deeply.
    shown = f"{found!r:.80}" if isinstance(found, str) else f"a {type(found).__name__}"
    return CorruptCheckpointError(f"malformed JSON value: found {shown}, expected {expected}")


def dumps(obj: object) -> bytes:
    """Return strict JSON: compact, with ASCII characters only."""
    return _ENCODER.encode(obj).encode()


_ENCODER = json.JSONEncoder(allow_nan=False, separators=(",", ":"))


def is_bounded(obj: object, levels: int = MAX_LEVELS) -> bool:
    """Whether a JSON value can be decoded or written again without a RecursionError or infinite numbers."""
    if not isinstance(obj, dict | list):
        return type(obj) is not float or math.isfinite(obj)
    inner = obj.values() if isinstance(obj, dict) else obj
    return levels > 0 and all(is_bounded(item, levels - 1) for item in inner)


def is_dense(data: bytes) -> bool:
    """Whether a document has too many arrays and objects for its size, so that parsing could take 30 times its size.

    ``[]`` has 2 bytes in the document, but 64 bytes in memory.
    """
    return data.count(b"[") + data.count(b"{") > _FREE_CONTAINERS + len(data) // _BYTES_PER_CONTAINER


def loads(data: bytes | bytearray | memoryview) -> object:
    """Return the parsed value of strict JSON. Raises CorruptCheckpointError for anything else."""
    try:
        return json.loads(str(data, "utf-8"), parse_constant=_no_constant, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as err:
        raise CorruptCheckpointError(f"not valid JSON: {type(err).__name__}: {err}") from err


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a member name occurs twice")
    return found
