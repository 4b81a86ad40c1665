"""Documents that carry their own checksum: the root, the claim, markers, records, pins.

Each is the document of a Zarr group with the attribute ``zarrckpt``, whose first member is the checksum of the whole.
Bytes in and out, and typed access to the members; no I/O.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

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

_SEAL = b'{"zarr_format":3,"node_type":"group","attributes":{"zarrckpt":{"crc32c":"'
"""How the bytes begin; the 8 digits of their checksum follow."""
_UNSEALED = "00000000"
_ID = re.compile(r"[0-9a-f]{32}")
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", re.ASCII)


def sealed_bytes(members: Json, attributes: Json | None = None, more: Json | None = None) -> bytes:
    """A document as it is stored. ``attributes`` are those beside ours, ``more`` are members of the document.

    Raises UnsupportedValueError if readers would refuse its number of arrays and objects.
    """
    own = {"crc32c": _UNSEALED, "format": FORMAT, **members}
    data = dumps(group_document({ATTRIBUTE: own, **(attributes or {})}) | (more or {}))
    if is_dense(data):
        raise UnsupportedValueError(
            f"the values of the state have too many lists and dicts for one document of {len(data):,} bytes: save long "
            "lists as tensors or NumPy arrays"
        )
    return _seal(data)


def _seal(data: bytes) -> bytes:
    """The bytes with the right checksum in its place: that of the bytes with zeros there."""
    rest = data[len(_SEAL) + len(_UNSEALED) :]
    return _SEAL + b"%08x" % crc32c(_SEAL + _UNSEALED.encode() + rest) + rest


def parse_sealed(data: bytes, where: str) -> tuple[Json, Members]:
    """A stored document, and the members of our attribute. ``where`` names it in errors.

    Raises CorruptCheckpointError where its checksum is another one, or where it is no strict JSON;
    ForeignObjectsError where another program wrote it; UnsupportedFormatError for a version or feature that this
    package does not know.
    """
    sealed = data.startswith(_SEAL)
    if sealed and _seal(data) != data:
        raise CorruptCheckpointError(
            f"{where} is not what was saved: its checksum differs; it was damaged, or edited by another program"
        )
    if is_dense(data):
        raise CorruptCheckpointError(f"{where} has more arrays and objects than any document of this size")
    document = parse_document(data, where)
    attributes = document.get("attributes")
    own = attributes.get(ATTRIBUTE) if isinstance(attributes, dict) else None
    if not isinstance(own, dict) or "format" not in own:
        raise ForeignObjectsError(f"{where} was not written by zarrckpt: it has no {ATTRIBUTE!r} attribute")
    features = own.get("features", [])
    if type(own["format"]) is not int or own["format"] != FORMAT or features != []:
        raise UnsupportedFormatError(
            f"{where} has format {own['format']!r:.40} with features {features!r:.200}; this zarrckpt reads "
            f"format {FORMAT} without features: upgrade zarrckpt"
        )
    if not sealed:
        raise CorruptCheckpointError(f"{where} does not begin with its checksum")
    return document, Members(own, where)


class Members:
    """The members of a JSON object by name and type: each miss is damage that names the member."""

    def __init__(self, own: Json, where: str) -> None:
        self.own = own
        self.where = where

    def fail(self, name: str, value: object, expected: str) -> CorruptCheckpointError:
        """The error for a member that is something else."""
        return CorruptCheckpointError(f"{self.where}: {name} is {value!r:.80}, expected {expected}")

    def text(self, name: str) -> str:
        value = self.own.get(name)
        if not isinstance(value, str):
            raise self.fail(name, value, "a string")
        return value

    def time(self, name: str) -> str:
        value = self.own.get(name)
        if not isinstance(value, str) or not _TIME.fullmatch(value):
            raise self.fail(name, value, "a time such as 2026-11-21T15:01:31.597454Z")
        return value

    def mapping(self, name: str) -> Json:
        value = self.own.get(name)
        if not isinstance(value, dict):
            raise self.fail(name, value, "an object")
        return value

    def sequence(self, name: str) -> list[Any]:
        value = self.own.get(name)
        if not isinstance(value, list):
            raise self.fail(name, value, "a list")
        return value

    def save_id(self, name: str) -> str:
        return self.as_save_id(name, self.own.get(name))

    def count(self, name: str, least: int = 0) -> int:
        value = self.own.get(name)
        if type(value) is not int or not least <= value < 2**63:
            raise self.fail(name, value, f"a whole number from {least} on")
        return value

    def exactly(self, *names: str) -> None:
        """Refuse members of other names, or fewer."""
        if self.own.keys() != {*names}:
            raise self.fail("what it has", sorted(self.own), f"exactly {sorted(names)}")

    def as_save_id(self, name: str, value: Any) -> str:
        """A value that must be a save id."""
        if not isinstance(value, str) or not is_save_id(value):
            raise self.fail(name, value, "a save id of 32 hexadecimal digits")
        return value


def nesting_bounded(parse: Callable[[bytes, str], T]) -> Callable[[bytes, str], T]:
    """Nesting that the JSON parser has just taken may be too deep for what shows or compares it."""

    @wraps(parse)
    def bounded(data: bytes, where: str) -> T:
        try:
            return parse(data, where)
        except RecursionError as err:
            raise CorruptCheckpointError(f"{where} is nested deeper than any document of this format") from err

    return bounded


def is_save_id(name: str) -> bool:
    """Whether a name is a save id."""
    return _ID.fullmatch(name) is not None


def is_tree(name: str) -> bool:
    """Whether a name is that of a tree that is not the canonical one."""
    return name.startswith("@") and is_save_id(name[1:])


def now() -> str:
    """The time in UTC, ISO 8601, to the microsecond: texts sort as times do."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
