"""The records of a ZIP archive with stored entries: encode them, and parse them with checks. No I/O.

An archive has the entries one after the other, without gaps, then the central directory. Each entry is a local header,
an extra field that aligns the data to 64 bytes, and the data. ``docs/reference/format.md`` describes it.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from isal.isal_zlib import crc32

from zarrckpt._errors import CorruptCheckpointError, StorageError
from zarrckpt._store._base import Buffer

ALIGNMENT = 64
"""The data of each entry begins at a multiple of this, so that it can be mapped to memory and read directly."""

ROOT = "zarr.json"
"""The key of the root document."""

END_BYTES = 22 + 20 + 56
"""Maximum size in bytes of the records after the central directory."""

HEADER_BYTES = 30
"""Size in bytes of a local header without its name."""

MAX_DIRECTORY_BYTES = 1 << 30
"""Maximum size in bytes of a central directory that is read, about 10 million entries."""

_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")
_END64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR = struct.Struct("<4sIQI")
_FIELD = struct.Struct("<2H")

_ALIGNING, _ZIP64 = 0xD935, 1
"""Ids of extra fields: padding, as Android's zipalign writes it, and sizes and offsets of 8 bytes."""
_UTF8 = 1 << 11
_FIRST_DAY = 0x21
"""1980-01-01, the first date that a ZIP archive can store."""
_UNIX, _PLAIN_FILE = 3 << 8, 0o100644 << 16
_NAME = re.compile(r"(?:(?!\.{1,2}(?:/|\Z))[^/\\:\0]+(?:/(?=.)|\Z))+", re.DOTALL)
"""Names of files below a folder, without a component that is "." or ".."."""
_MAX32, _MAX16 = 0xFFFFFFFF, 0xFFFF
_LIMIT_OF_32_BITS = _MAX32 - 1


class ZipEntry(NamedTuple):
    """One object in an archive."""

    crc: int
    """The CRC-32 of the data."""
    size: int
    header_offset: int
    data_offset: int


class Directory(NamedTuple):
    """The position of a central directory in the file, in bytes, and its number of entries."""

    offset: int
    size: int
    entries: int


def add_crc32(buffers: Iterable[Buffer], before: int = 0) -> int:
    """Return the CRC-32 of buffers, continued from the CRC of the bytes before them."""
    for buffer in buffers:
        before = crc32(buffer, before)
    return before


def header_bytes(name_bytes: int, size: int) -> int:
    """Return the size of a local header without padding, for a name of this length and data of this size."""
    return _LOCAL.size + name_bytes + 2 + _FIELD.size + (20 if size > _LIMIT_OF_32_BITS else 0)


def data_offset(name: str, size: int, header_offset: int) -> int:
    """Return the offset of the data of an entry whose header is at an offset."""
    return align(header_offset + header_bytes(len(name.encode()), size))


def align(offset: int) -> int:
    """Return the next multiple of the alignment."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


def encode_header(name: str, entry: ZipEntry) -> bytes:
    """Return the local header of an entry, with padding up to the next multiple of the alignment."""
    stored, extra = name.encode(), b""
    size = entry.size
    if size > _LIMIT_OF_32_BITS:
        extra, size = _FIELD.pack(_ZIP64, 16) + struct.pack("<2Q", size, size), _MAX32
    used = entry.header_offset + _LOCAL.size + len(stored) + len(extra) + _FIELD.size
    padding = align(used + 2) - used
    extra += _FIELD.pack(_ALIGNING, padding) + ALIGNMENT.to_bytes(padding, "little")
    fields = (45 if size == _MAX32 else 20, _UTF8, 0, 0, _FIRST_DAY, entry.crc, size, size, len(stored), len(extra))
    return _LOCAL.pack(b"PK\3\4", *fields) + stored + extra


def encode_directory(entries: Mapping[str, ZipEntry], offset: int) -> bytes:
    """Return the central directory of entries in the order of their offsets, and the records after it."""
    records: list[bytes] = []
    for name, entry in entries.items():
        large = [number for number in (entry.size, entry.size, entry.header_offset) if number > _LIMIT_OF_32_BITS]
        extra = _FIELD.pack(_ZIP64, 8 * len(large)) + struct.pack(f"<{len(large)}Q", *large) if large else b""
        size, at = min(entry.size, _MAX32), min(entry.header_offset, _MAX32)
        stored, version = name.encode(), 45 if large else 20
        fields = (_UNIX | version, version, _UTF8, 0, 0, _FIRST_DAY, entry.crc, size, size, len(stored), len(extra))
        records += [_CENTRAL.pack(b"PK\1\2", *fields, 0, 0, 0, _PLAIN_FILE, at), stored, extra]
    directory = b"".join(records)
    if len(directory) > MAX_DIRECTORY_BYTES:
        raise StorageError(f"an archive cannot have {len(entries):,} entries. Save to a folder, or in larger chunks")
    return directory + encode_end(Directory(offset, len(directory), len(entries)))


def encode_end(directory: Directory) -> bytes:
    """Return the records after a central directory."""
    offset, size, count = directory
    end = b""
    if count >= _MAX16 or max(size, offset) > _LIMIT_OF_32_BITS:
        end = _END64.pack(b"PK\6\6", _END64.size - 12, _UNIX | 45, 45, 0, 0, count, count, size, offset)
        end += _LOCATOR.pack(b"PK\6\7", 0, offset + size, 1)
    count, size, offset = min(count, _MAX16), min(size, _MAX32), min(offset, _MAX32)
    return end + _END.pack(b"PK\5\6", 0, 0, count, count, size, offset, 0)


def is_own_header(data: Buffer) -> bool:
    """Whether a file may begin with these bytes, a local header without its name, only if this package wrote it."""
    if len(data) < HEADER_BYTES:
        return False
    signature, version, flags, method, time, day, _, _, _, name_bytes, extra_bytes = _LOCAL.unpack(data[:HEADER_BYTES])
    aligned = not (HEADER_BYTES + name_bytes + extra_bytes) % ALIGNMENT
    fields = (signature, flags, method, time, day)
    return aligned and version in (20, 45) and fields == (b"PK\3\4", _UTF8, 0, 0, _FIRST_DAY)


def parse_end(tail: bytes, file_bytes: int, url: str) -> Directory:
    """Return the position of the central directory. ``tail`` has the last bytes of a file of ``file_bytes``."""
    if len(tail) < _END.size or not tail.startswith(b"PK\5\6", -_END.size):
        if tail.rstrip().lower().endswith(b"</html>"):
            raise damage(url, "it is a web page. Check the url, and whether the server needs a login")
        raise damage(url, "its last 22 bytes are no end record of a ZIP archive: it was cut, or bytes were appended")
    disk, first_disk, here, count, size, offset, comment = _END.unpack(tail[-_END.size :])[1:]
    end = _END.size
    if count == _MAX16 or size == _MAX32 or offset == _MAX32:
        end = END_BYTES
        record = tail[-end : -_END.size - _LOCATOR.size]
        if len(record) < _END64.size or not record.startswith(b"PK\6\6"):
            raise damage(url, "its ZIP64 end record is missing")
        disk, first_disk, here, count, size, offset = _END64.unpack(record)[4:]
    found = Directory(offset, size, count)
    if tail[-end:] != encode_end(found) or disk or first_disk or here != count or comment:
        raise damage(url, "its end records do not agree with each other, or have a comment")
    if offset + size + end != file_bytes:
        raise damage(url, f"it has {file_bytes:,} bytes, but its end record describes {offset + size + end:,}")
    if size > MAX_DIRECTORY_BYTES or count * _CENTRAL.size > size:
        raise damage(url, f"its central directory cannot have {count:,} entries in {size:,} bytes")
    return found


def parse_directory(data: Buffer, directory: Directory, url: str) -> dict[str, ZipEntry]:
    """Return the entries of a central directory by name, in the order of their offsets.

    Raises CorruptCheckpointError unless the entries are stored (not compressed), have distinct and relative names, and
    fill the file from its beginning to the directory without overlaps.
    """
    records: list[tuple[int, str, int, int, int]] = []
    names: set[str] = set()
    position = 0
    for _ in range(directory.entries):
        if position + _CENTRAL.size > len(data):
            raise damage(url, "its central directory ends within an entry")
        fields = _CENTRAL.unpack_from(data, position)
        signature, _, _, flags, method, _, _, crc, stored_size, size = fields[:10]
        name_bytes, extra_bytes, comment_bytes, disk, _, _, header_offset = fields[10:]
        begin = position + _CENTRAL.size
        position = begin + name_bytes + extra_bytes + comment_bytes
        if signature != b"PK\1\2" or position > len(data):
            raise damage(url, "its central directory has a damaged entry")
        name = _parse_name(bytes(data[begin : begin + name_bytes]), names, url)
        if _MAX32 in (size, stored_size, header_offset):
            extra = bytes(data[begin + name_bytes : begin + name_bytes + extra_bytes])
            size, stored_size, header_offset = _widen(extra, (size, stored_size, header_offset), name, url)
        if method or stored_size != size or flags & ~_UTF8 or disk:
            raise damage(url, f"its entry {name!r} is compressed, encrypted or split", "Unpack it and open the folder")
        records.append((header_offset, name, crc, size, name_bytes))
    if position != len(data):
        raise damage(url, "its central directory has bytes after the last entry")
    return _place_all(records, directory.offset, url)


def _parse_name(stored: bytes, names: set[str], url: str) -> str:
    name = stored.decode(errors="ignore")
    if name.encode() != stored or name in names or not _NAME.fullmatch(name):
        fault = f"its entry {stored!r:.200} has a name that is used twice, or is that of no file below a folder"
        raise damage(url, fault, "Unpack it and open the folder")
    names.add(name)
    return name


def _widen(extra: bytes, numbers: tuple[int, int, int], name: str, url: str) -> list[int]:
    """Return the size, stored size and offset of an entry, with numbers of 8 bytes from its ZIP64 field."""
    fields: dict[int, bytes] = {}
    while len(extra) >= _FIELD.size:
        kind, nbytes = _FIELD.unpack_from(extra)
        fields[kind], extra = extra[_FIELD.size : _FIELD.size + nbytes], extra[_FIELD.size + nbytes :]
    wide = fields.get(_ZIP64, b"")
    found = [int.from_bytes(wide[at : at + 8], "little") for at in range(0, len(wide) - 7, 8)]
    if sum(number == _MAX32 for number in numbers) > len(found):
        raise damage(url, f"its entry {name!r} lacks a ZIP64 field")
    return [found.pop(0) if number == _MAX32 else number for number in numbers]


def _place_all(records: list[tuple[int, str, int, int, int]], end: int, url: str) -> dict[str, ZipEntry]:
    """Return the entries with the offsets of their data: each ends where the header of the next one begins."""
    records.sort()
    if records and records[0][0] != 0:
        raise damage(url, f"{records[0][0]:,} bytes precede its first entry")
    entries: dict[str, ZipEntry] = {}
    ends = [record[0] for record in records[1:]] + [end]
    for (header_offset, name, crc, size, name_bytes), next_offset in zip(records, ends, strict=True):
        data_offset = next_offset - size
        header = data_offset - header_offset - _LOCAL.size - name_bytes
        if not 0 <= header <= _MAX16:
            raise damage(url, f"its entry {name!r} overlaps another one, or there are bytes between the entries")
        entries[name] = ZipEntry(crc, size, header_offset, data_offset)
    return entries


def damage(url: str, fault: str, step: str = "Load an earlier checkpoint") -> CorruptCheckpointError:
    return CorruptCheckpointError(f"the archive {url} is damaged: {fault}. {step}")
