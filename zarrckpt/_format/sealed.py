"""Documents with their own checksum: the root, the claim, markers, records, pins.

Each is the document of a Zarr group with the attribute ``zarrckpt``. The attribute's first member is the checksum of
the whole document. A :class:`Document` declares the other members. No I/O.
"""

from __future__ import annotations

import datetime
import functools
import re
from typing import Annotated, Any, Generic, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from zarrckpt._errors import (
    CorruptCheckpointError,
    ForeignObjectsError,
    UnsupportedFormatError,
    UnsupportedValueError,
)
from zarrckpt._format.crc32c import crc32c
from zarrckpt._format.documents import ATTRIBUTE, parse_document
from zarrckpt._format.json_values import is_dense

FORMAT = 1

_SEAL = b'{"zarr_format":3,"node_type":"group","attributes":{"zarrckpt":{"crc32c":"'
"""The beginning of the bytes of each document. The 8 digits of the checksum follow."""
_UNSEALED = b"00000000"
_ID = re.compile(r"[0-9a-f]{32}")

Id = Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z")]
"""The id of a save, a pin, a removal, a run or a job."""
IdOrEmpty = Annotated[str, Meta(pattern=r"^([0-9a-f]{32})?\Z")]
Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Time = Annotated[str, Meta(pattern=r"^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}\.[0-9]{6}Z\Z")]
"""A time such as 2026-11-21T15:01:31.597454Z."""


class Document(msgspec.Struct, frozen=True, omit_defaults=True):
    """The members of the attribute ``zarrckpt`` of a document, in the order in which they are stored.

    The checksum and the format precede them. Other members of stored documents are ignored.
    """

    def to_bytes(self) -> bytes:
        """Return the stored bytes of the document."""
        return Group(_Attributes(self)).to_bytes()


D = TypeVar("D", bound=Document)


class _Attributes(msgspec.Struct, Generic[D], omit_defaults=True):
    """The attributes of a document."""

    zarrckpt: D
    zarr_conventions: Raw | UnsetType = UNSET


class _Consolidated(msgspec.Struct, forbid_unknown_fields=True):
    """The consolidated metadata of the root: the documents of all nodes by path."""

    kind: Literal["inline"]
    must_understand: bool
    metadata: dict[str, Raw]


class Group(msgspec.Struct, Generic[D], omit_defaults=True):
    """A document as a whole. ``zarr_format`` is 3 and ``node_type`` is "group"."""

    attributes: _Attributes[D]
    consolidated_metadata: _Consolidated | UnsetType = UNSET

    @classmethod
    def of_root(cls, own: D, conventions: Raw, nodes: dict[str, Raw]) -> Group[D]:
        """Return the document of a root, with the documents of its nodes by path."""
        return cls(_Attributes(own, conventions), _Consolidated("inline", False, nodes))

    def to_bytes(self) -> bytes:
        """Return the stored bytes. Raises UnsupportedValueError for a text without a UTF-8 form."""
        try:
            data = msgspec.json.encode(self)
        except UnicodeEncodeError as err:
            raise UnsupportedValueError(f"a text with a lone surrogate cannot be stored: {err.object!r:.200}") from err
        rest = data.removeprefix(b'{"attributes":{"zarrckpt":{')
        return _seal(b'%s%s","format":%d,%s' % (_SEAL, _UNSEALED, FORMAT, rest))


@functools.cache
def _decoder(kind: type[Document]) -> msgspec.json.Decoder[Group[Any]]:
    return msgspec.json.Decoder(Group[kind])  # type: ignore[valid-type]


def parse_group(kind: type[D], data: bytes, where: str) -> Group[D]:
    """Return a stored document. ``where`` is its name in errors.

    Decodes the declared members, builds the bytes that this package would write, and compares. The bytes are equal,
    unless there are other members, or another program wrote the document. Then the JSON is parsed again, so that no
    member occurs twice.

    Raises CorruptCheckpointError if the checksum differs or the document is not strict JSON, ForeignObjectsError if
    another program wrote it, and UnsupportedFormatError for an unknown version or feature.
    """
    if is_dense(data):
        raise CorruptCheckpointError(f"{where} has too many arrays and objects for a document of {len(data):,} bytes")
    error: Exception | None = None
    try:
        group: Group[D] = _decoder(kind).decode(data)
        if group.to_bytes() == data:
            return group
    except (msgspec.MsgspecError, CorruptCheckpointError, UnicodeError, RecursionError) as err:
        error = err
    try:
        _check_other_form(data, where)
    except RecursionError as err:
        error = err
    if error is not None:
        raise CorruptCheckpointError(f"{where} does not have the form of this format: {error}") from error
    return group


def parse_sealed(kind: type[D], data: bytes, where: str) -> D:
    """Return the members of a stored document. Raises the errors of :func:`parse_group`."""
    return parse_group(kind, data, where).attributes.zarrckpt


def _seal(data: bytes) -> bytes:
    """Return the bytes with the right checksum. It is computed with zeros instead of its digits."""
    rest = data[len(_SEAL) + len(_UNSEALED) :]
    return _SEAL + b"%08x" % crc32c(_SEAL + _UNSEALED + rest) + rest


def _check_other_form(data: bytes, where: str) -> None:
    """Raise the errors of :func:`parse_group` for a document in another form than this package writes."""
    sealed = data.startswith(_SEAL)
    if sealed and _seal(data) != data:
        raise CorruptCheckpointError(
            f"{where} is not what was saved: its checksum differs. It was damaged, or edited by another program"
        )
    attributes = parse_document(data, where).get("attributes")
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


def is_save_id(name: str) -> bool:
    """Whether a name is a save id."""
    return _ID.fullmatch(name) is not None


def is_tree(name: str) -> bool:
    """Whether a name is that of a tree other than the canonical one: "@" and a save id."""
    return name.startswith("@") and is_save_id(name[1:])


def now() -> str:
    """Return the current UTC time in ISO 8601 with microseconds. The texts sort in the order of time."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
