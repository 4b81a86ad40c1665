"""The records of a ZIP archive with stored entries: encode them, and check those that are read.

An archive has the entries one after the other, without gaps, then the central directory. Each entry is a local header,
an extra field that aligns the data to 64 bytes, and the data. ``docs/reference/format.md`` describes it.
"""

from __future__ import annotations

import re
import struct
import zipfile
from collections.abc import Callable, Iterable, Mapping
from typing import IO, NamedTuple

from isal.isal_zlib import crc32

from zarrckpt._errors import CorruptCheckpointError, StorageError
from zarrckpt._store._base import Buffer

ALIGNMENT = 64
"""The data of each entry begins at a multiple of this, so that it can be mapped to memory and read directly."""

ROOT = "zarr.json"
"""The key of the root document."""

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

_ALIGNING, _ZIP64, _UNICODE_NAME = 0xD935, 1, 0x7075
"""Ids of extra fields: padding, as Android's zipalign writes it, sizes and offsets of 8 bytes, and Info-ZIP's names."""
_UTF8, _STREAMED = 1 << 11, 1 << 3
_PLAIN_FLAGS = _UTF8 | _STREAMED | 0b110
"""Flags of entries that are not encrypted: names in UTF-8, numbers behind the data, levels of compression."""
_REGULAR, _FOLDER = 0o100000, 0o040000
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


_FAULTS = (zipfile.BadZipFile, struct.error, ValueError, OverflowError, NotImplementedError, MemoryError)
"""The errors of :mod:`zipfile` if an archive is damaged."""

_UNPACK = "Unpack it with unzip, and open the folder"


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
    size, count, end = len(directory), len(entries), b""
    if size > MAX_DIRECTORY_BYTES:
        raise StorageError(f"an archive cannot have {count:,} entries. Save to a folder, or in larger chunks")
    if count >= _MAX16 or max(size, offset) > _LIMIT_OF_32_BITS:
        end = _END64.pack(b"PK\6\6", _END64.size - 12, _UNIX | 45, 45, 0, 0, count, count, size, offset)
        end += _LOCATOR.pack(b"PK\6\7", 0, offset + size, 1)
    count, size, offset = min(count, _MAX16), min(size, _MAX32), min(offset, _MAX32)
    return directory + end + _END.pack(b"PK\5\6", 0, 0, count, count, size, offset, 0)


def is_own_header(data: Buffer) -> bool:
    """Whether a file may begin with these bytes, a local header without its name, only if this package wrote it."""
    if len(data) < HEADER_BYTES:
        return False
    signature, version, flags, method, time, day, _, _, _, name_bytes, extra_bytes = _LOCAL.unpack(data[:HEADER_BYTES])
    aligned = not (HEADER_BYTES + name_bytes + extra_bytes) % ALIGNMENT
    fields = (signature, flags, method, time, day)
    return aligned and version in (20, 45) and fields == (b"PK\3\4", _UTF8, 0, 0, _FIRST_DAY)


def read_directory(file: IO[bytes], url: str) -> tuple[dict[str, ZipEntry], dict[str, int], int, bytes]:
    """Return the entries by name, the end of the bytes of each, the offset of the directory, and the comment.

    :mod:`zipfile` reads the directory, so that an archive has one content for both. Entries are in the order of their
    offsets, without those of folders. Their data offsets are those that this package writes: see :func:`find_data`.
    Raises CorruptCheckpointError unless the entries are stored (not compressed), have distinct and relative names, and
    do not overlap.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            infos, begin, comment = archive.infolist(), archive.start_dir, archive.comment
        file.seek(-_END.size - len(comment), 2)
        signature, *numbers = _END.unpack(file.read(_END.size))
        # Other programs believe these numbers, and take the end record for the last bytes of the file.
        if signature != b"PK\5\6" or numbers[:4] != [0, 0, *[min(len(infos), _MAX16)] * 2]:
            raise zipfile.BadZipFile("bytes were appended, or the end record has another number of entries")
    except _FAULTS as error:
        file.seek(-min(100, file.seek(0, 2)), 2)
        if file.read().rstrip().lower().endswith(b"</html>"):
            raise damage(url, "it is a web page. Check the url, and whether the server needs a login") from error
        raise damage(url, f"it has no directory of a ZIP archive at its end, or it was cut ({error})") from error
    infos.sort(key=lambda info: info.header_offset)
    if infos and infos[0].header_offset:
        raise damage(url, f"{infos[0].header_offset:,} bytes precede its first entry")
    if numbers[5] not in (begin, _MAX32):
        raise damage(url, "its end record and its ZIP64 end record name different directories", _UNPACK)
    entries: dict[str, ZipEntry] = {}
    ends: dict[str, int] = {}
    for info, end in zip(infos, [*(info.header_offset for info in infos[1:]), begin], strict=False):
        _check_entry(info, end, url)
        name, size, offset = info.filename, info.file_size, info.header_offset
        if name in entries:
            raise damage(url, f"its entry {name!r} exists twice", _UNPACK)
        if not info.is_dir():
            entries[name] = ZipEntry(info.CRC, size, offset, data_offset(name, size, offset))
            ends[name] = end
    return entries, ends, begin, comment


def _check_entry(info: zipfile.ZipInfo, end: int, url: str) -> None:
    """Raise CorruptCheckpointError for an entry that this package cannot read, or that programs read differently."""
    name, kind = info.filename, info.external_attr >> 16 & 0o170000
    if info.orig_filename != name or not _NAME.fullmatch(name.removesuffix("/")) or (info.is_dir() and info.file_size):
        raise damage(url, f"its entry {info.orig_filename!r:.200} has the name of no file below a folder", _UNPACK)
    if (not name.isascii() and not info.flag_bits & _UTF8) or _has_other_name(info.extra):
        raise damage(url, f"its entry {name!r} has a name that is not in UTF-8", f"{_UNPACK}. zarrckpt cp packs it")
    if info.compress_type or info.compress_size != info.file_size:
        raise damage(url, f"its entry {name!r} is compressed", f"{_UNPACK}, or pack it without compression (zip -0 -r)")
    if info.flag_bits & ~_PLAIN_FLAGS or info.volume or kind not in (0, _FOLDER if info.is_dir() else _REGULAR):
        raise damage(url, f"its entry {name!r} is encrypted, split or a link", _UNPACK)
    if not 0 <= info.header_offset <= end - _LOCAL.size - len(name.encode()) - info.file_size:
        raise damage(url, f"its entry {name!r} overlaps another one")


def find_data(name: str, entry: ZipEntry, end: int, read: Callable[[int, int], Buffer], url: str) -> int:
    """Return the offset of an entry's data, from its local header.

    ``read`` returns bytes of the archive from an offset on. Raises CorruptCheckpointError if the header is that of
    another entry, so that other programs would read something else.
    """
    stored, offset = name.encode(), entry.header_offset
    fixed = bytes(read(offset, _LOCAL.size))
    signature, _, flags, method, _, _, crc, packed, size, name_bytes, extra_bytes = _LOCAL.unpack(fixed)
    begin: int = offset + _LOCAL.size + name_bytes + extra_bytes
    if begin + entry.size > end:
        raise damage(url, f"its entry {name!r} overlaps another one")
    rest = bytes(read(offset + _LOCAL.size, name_bytes + extra_bytes))
    found, extra = rest[:name_bytes], rest[name_bytes:]
    if size == packed == _MAX32:
        wide = extra[extra.find(_FIELD.pack(_ZIP64, 16)) + _FIELD.size :][:16]
        packed, size = struct.unpack("<2Q", wide) if len(wide) == 16 else (-1, -1)
    # The numbers of a streamed entry are behind its data.
    is_right = (crc, packed, size) == (entry.crc, entry.size, entry.size) or flags & _STREAMED
    is_plain = signature == b"PK\3\4" and not method and not flags & ~_PLAIN_FLAGS
    if not is_right or not is_plain or found != stored or _has_other_name(extra):
        raise damage(url, f"the local header of its entry {name!r} differs from the central directory")
    return begin


def _has_other_name(extra: bytes) -> bool:
    """Whether extra fields contain a name, which some programs use instead of the entry's own."""
    while len(extra) >= _FIELD.size:
        kind, nbytes = _FIELD.unpack_from(extra)
        if kind == _UNICODE_NAME:
            return True
        extra = extra[_FIELD.size + nbytes :]
    return False


def damage(url: str, fault: str, step: str = "Load an earlier checkpoint") -> CorruptCheckpointError:
    return CorruptCheckpointError(f"the archive {url} is damaged: {fault}. {step}")
