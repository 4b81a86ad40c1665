"""Documents with their own checksum: the root, the claim, markers, records, pins.

Each is the document of a Zarr group with the attribute ``zarrckpt``. The attribute's first member is the checksum of
the whole document. This module encodes and parses them, and gives typed access to the members. No I/O.
"""

from __future__ import annotations

import datetime
import functools
import re
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any, Generic, Literal, TypeVar

import msgspec
from msgspec import Meta

from zarrckpt._errors import (
    CorruptCheckpointError,
    ForeignObjectsError,
    UnsupportedFormatError,
    UnsupportedValueError,
)
from zarrckpt._format.crc32c import crc32c
from zarrckpt._format.documents import ATTRIBUTE, Json, group_document, parse_document
from zarrckpt._format.json_values import dumps, is_dense

T = TypeVar("T")

FORMAT = 1

_BEGIN = b'{"zarr_format":3,"node_type":"group","attributes":{"zarrckpt":{'
_SEAL = _BEGIN + b'"crc32c":"'
"""The beginning of the bytes of each document. The 8 digits of the checksum follow."""
_UNSEALED = "00000000"
_ID = re.compile(r"[0-9a-f]{32}")
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", re.ASCII)

Id = Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z")]
"""The id of a save, a pin, a removal, a run or a job."""
IdOrEmpty = Annotated[str, Meta(pattern=r"^([0-9a-f]{32})?\Z")]
Time = Annotated[str, Meta(pattern=r"^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}\.[0-9]{6}Z\Z")]
"""A time such as 2026-11-21T15:01:31.597454Z."""


class Document(msgspec.Struct, frozen=True, omit_defaults=True):
    """The members of the attribute ``zarrckpt`` of a document, in the order in which they are stored.

    The checksum and the format precede them. Other members of stored documents are ignored.
    """

    def to_bytes(self) -> bytes:
        """Return the stored bytes of the document."""
        return _encode(_Group(3, "group", _Attributes(self)))


D = TypeVar("D", bound=Document)


class _Attributes(msgspec.Struct, Generic[D]):
    zarrckpt: D


class _Group(msgspec.Struct, Generic[D]):
    zarr_format: Literal[3]
    node_type: Literal["group"]
    attributes: _Attributes[D]


def _encode(group: _Group[Any]) -> bytes:
    try:
        data = msgspec.json.encode(group)
    except UnicodeEncodeError as err:
        raise UnsupportedValueError(f"a text with a lone surrogate cannot be stored: {err.object!r:.200}") from err
    return _seal(b'%s%s","format":%d,%s' % (_SEAL, _UNSEALED.encode(), FORMAT, data.removeprefix(_BEGIN)))


@functools.cache
def _decoder(kind: type[D]) -> msgspec.json.Decoder[_Group[D]]:
    return msgspec.json.Decoder(_Group[kind])  # type: ignore[valid-type]


def parse_sealed(kind: type[D], data: bytes, where: str) -> D:
    """Return the members of a stored document. ``where`` is its name in errors. Raises as :func:`parse_strictly`."""
    error: Exception | None = None
    try:
        group = _decoder(kind).decode(data)
        found: D = group.attributes.zarrckpt
        # These are the bytes that this package writes, so no member occurs twice, and the checksum is right.
        if _encode(group) == data:
            return found
    except (msgspec.MsgspecError, CorruptCheckpointError, UnicodeError, RecursionError) as err:
        error = err
    parse_strictly(data, where)
    if error is not None:
        raise CorruptCheckpointError(f"{where} is not a document of this format: {error}") from error
    return found


def sealed_bytes(members: Json, attributes: Json | None = None, more: Json | None = None) -> bytes:
    """Return the stored bytes of the root document.

    ``members`` are those of the attribute ``zarrckpt``, ``attributes`` the other attributes, and ``more`` further
    members of the document. Raises UnsupportedValueError if readers would refuse the number of arrays and objects.
    """
    own = {"crc32c": _UNSEALED, "format": FORMAT, **members}
    data = dumps(group_document({ATTRIBUTE: own, **(attributes or {})}) | (more or {}))
    if is_dense(data):
        raise UnsupportedValueError(
            f"the values of the state have too many lists and dicts for one document of {len(data):,} bytes. Save long "
            "lists as tensors or NumPy arrays"
        )
    return _seal(data)


def _seal(data: bytes) -> bytes:
    """Return the bytes with the right checksum. It is computed with zeros instead of its digits."""
    rest = data[len(_SEAL) + len(_UNSEALED) :]
    return _SEAL + b"%08x" % crc32c(_SEAL + _UNSEALED.encode() + rest) + rest


def parse_strictly(data: bytes, where: str) -> tuple[Json, Json]:
    """Return a stored document, and the members of its attribute ``zarrckpt``. ``where`` is its name in errors.

    Raises CorruptCheckpointError if the checksum differs or the document is not strict JSON, ForeignObjectsError if
    another program wrote it, and UnsupportedFormatError for an unknown version or feature.
    """
    sealed = data.startswith(_SEAL)
    if sealed and _seal(data) != data:
        raise CorruptCheckpointError(
            f"{where} is not what was saved: its checksum differs. It was damaged, or edited by another program"
        )
    if is_dense(data):
        raise CorruptCheckpointError(f"{where} has too many arrays and objects for a document of {len(data):,} bytes")
    document = parse_document(data, where)
    attributes = document.get("attributes")
    own = attributes.get(ATTRIBUTE) if isinstance(attributes, dict) else None
    if not isinstance(own, dict) or "format" not in own:
        raise ForeignObjectsError(f"{where} was not written by zarrckpt: it has no {ATTRIBUTE!r} attribute")
    features = own.get("features", [])
    if type(own["format"]) is not int or own["format"] != FORMAT or features != []:
        raise UnsupportedFormatError(
            f"{where} has format {own['format']!r:.40} with features {features!r:.200}. This version of zarrckpt reads "
            f"format {FORMAT} without features. Upgrade zarrckpt"
        )
    if not sealed:
        raise CorruptCheckpointError(f"{where} does not begin with its checksum")
    return document, own


class Members:
    """Typed access to the members of a JSON object. Raises CorruptCheckpointError with the name of a wrong member."""

    def __init__(self, own: Json, where: str) -> None:
        self.own = own
        self.where = where

    def fail(self, name: str, value: object, expected: str) -> CorruptCheckpointError:
        """Return the error for a member with an unexpected value."""
        return CorruptCheckpointError(f"{self.where}: {name} is {value!r:.80}, expected {expected}")

    def _typed(self, name: str, kind: type[T], expected: str) -> T:
        value = self.own.get(name)
        if not isinstance(value, kind):
            raise self.fail(name, value, expected)
        return value

    def text(self, name: str) -> str:
        return self._typed(name, str, "a string")

    def time(self, name: str) -> str:
        value = self.text(name)
        if not _TIME.fullmatch(value):
            raise self.fail(name, value, "a time such as 2026-11-21T15:01:31.597454Z")
        return value

    def mapping(self, name: str) -> Json:
        return self._typed(name, dict, "an object")

    def sequence(self, name: str) -> list[Any]:
        return self._typed(name, list, "a list")

    def save_id(self, name: str) -> str:
        return self.as_save_id(name, self.own.get(name))

    def count(self, name: str, minimum: int = 0) -> int:
        value = self.own.get(name)
        if type(value) is not int or not minimum <= value < 2**63:
            raise self.fail(name, value, f"an integer of at least {minimum}")
        return value

    def exactly(self, *names: str) -> None:
        """Raise CorruptCheckpointError unless the object has exactly the members with these names."""
        if self.own.keys() != {*names}:
            raise self.fail("the list of members", sorted(self.own), f"exactly {sorted(names)}")

    def as_save_id(self, name: str, value: Any) -> str:
        """Return a value that must be a save id."""
        if not isinstance(value, str) or not is_save_id(value):
            raise self.fail(name, value, "a save id of 32 hexadecimal digits")
        return value


def nesting_bounded(parse: Callable[[bytes, str], T]) -> Callable[[bytes, str], T]:
    """Return a parser that raises CorruptCheckpointError instead of RecursionError.

    The JSON parser accepts deeper nesting than the code that compares and shows values.
    """

    @wraps(parse)
    def bounded(data: bytes, where: str) -> T:
        try:
            return parse(data, where)
        except RecursionError as err:
            raise CorruptCheckpointError(f"{where} is nested too deeply for a document of this format") from err

    return bounded


def is_save_id(name: str) -> bool:
    """Whether a name is a save id."""
    return _ID.fullmatch(name) is not None


def is_tree(name: str) -> bool:
    """Whether a name is that of a tree other than the canonical one: "@" and a save id."""
    return name.startswith("@") and is_save_id(name[1:])


def now() -> str:
    """Return the current UTC time in ISO 8601 with microseconds. The texts sort in the order of time."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
