"""A checkpoint in one ZIP archive, as a store: the entries are the objects, and a parent store has the file.

The objects that protect or describe the url itself, such as markers of unfinished saves and pins, are not in the
archive. They are in the folder ``@<name of the archive>`` beside it, which exists only as long as there are any. The
unfinished archive of a save is there too, beside its marker.
"""

from __future__ import annotations

import io
import os
import re
import zipfile
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import IO, Any, cast

from zarrckpt._errors import CorruptCheckpointError, ForeignObjectsError, ObjectNotFoundError, StorageError
from zarrckpt._store import _failures
from zarrckpt._store import _zip_format as records
from zarrckpt._store._archive import ArchivePart, Places
from zarrckpt._store._base import (
    Buffer,
    Listing,
    ObjectInfo,
    Reader,
    Store,
    VersionedObject,
    byte_views,
    is_system_file,
    version_of,
)
from zarrckpt._store._client_store import ClientStore
from zarrckpt._store._local import LocalStore
from zarrckpt._store._regular_files import MAX_WHOLE_BYTES
from zarrckpt._store._url import split_query
from zarrckpt._store._zip_format import ROOT, ZipEntry
from zarrckpt._store._zip_local import LocalArchive, LocalPart
from zarrckpt._store._zip_streamed import StreamedArchive

_TAIL_BYTES = 256 << 10
"""Size of the first read of an archive. The end of a small one has its directory and root document."""

GROUP = "@zarrckpt"
_ARCHIVE = "archive"
_SCRATCH = "scratch-"
_ATTEMPT = re.compile(rf"{GROUP}/[0-9a-f]{{32}}")
_TABLE_KEY = re.compile(rf"{GROUP}/[0-9a-f]{{32}}/[^/]+/")


class _Index:
    """The entries of an archive, and the bytes at its end."""

    def __init__(self, parent: Store, name: str, url: str) -> None:
        self._parent, self._name, self._url = parent, name, url
        self.size = parent.size(name)
        self._tail_offset = max(0, self.size - _TAIL_BYTES)
        self._tail = parent.read(name, self._tail_offset, self.size - self._tail_offset)
        found = records.read_directory(cast(IO[bytes], _IndexFile(self)), url)
        self.entries, self._ends, self.directory_offset, self.comment = found
        self.is_own: dict[str, bool] = {}
        """Whether the local header of an entry is the one that this package writes, by key, once it was compared."""

    def read(self, offset: int, nbytes: int) -> memoryview:
        """Return bytes of the archive from an offset on. One request, or none for those at the end."""
        if offset >= self._tail_offset:
            return self._tail[offset - self._tail_offset :][:nbytes]
        return self._parent.read(self._name, offset, nbytes)

    def header_bytes(self, key: str, nbytes: int) -> int:
        """Return the size of the local header if it is to be read with ``nbytes`` of an entry, otherwise 0."""
        entry = self.entries[key]
        is_new = key not in self.is_own and entry.data_offset + nbytes <= self._ends[key]
        return entry.data_offset - entry.header_offset if is_new else 0

    def accept(self, key: str, header: Buffer) -> bool:
        """Whether a local header is the one that this package writes, so that the data are where it puts them."""
        entry = self.entries[key]
        if header != records.encode_header(key, entry) or entry.data_offset + entry.size > self._ends[key]:
            return False
        self.is_own[key] = True
        return True

    def locate(self, key: str) -> ZipEntry:
        """Return an entry with the offset of its data. At the first call for an entry, it reads the local header.

        Raises CorruptCheckpointError if the header differs from the central directory.
        """
        entry = self.entries[key]
        if key not in self.is_own:
            header_bytes = self.header_bytes(key, 0)
            if not (header_bytes and self.accept(key, self.read(entry.header_offset, header_bytes))):
                begin = records.find_data(key, entry, self._ends[key], self.read, self._url)
                self.entries[key] = entry = entry._replace(data_offset=begin)
                self.is_own[key] = False
        return entry

    def read_entry(self, key: str, byte_offset: int, nbytes: int) -> memoryview:
        """Return bytes of an entry. One request, with the local header if the bytes are the first and it is new."""
        if not byte_offset and (header_bytes := self.header_bytes(key, nbytes)):
            stored = self.read(self.entries[key].header_offset, header_bytes + nbytes)
            if self.accept(key, stored[:header_bytes]):
                return stored[header_bytes:]
        return self.read(self.locate(key).data_offset + byte_offset, nbytes)


class _IndexFile(io.RawIOBase):
    """The bytes of an archive as a file, from which :mod:`zipfile` reads the directory."""

    def __init__(self, index: _Index) -> None:
        self._index = index
        self._position = 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        begin = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._index.size}[whence]
        if begin + offset < 0:
            raise OSError("a seek to before the begin of the archive")
        self._position = begin + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._index.size - self._position)
        nbytes = left if size is None or size < 0 else min(left, size)
        if nbytes > records.MAX_DIRECTORY_BYTES:
            raise zipfile.BadZipFile(f"a central directory of {nbytes:,} bytes")
        data = bytes(self._index.read(self._position, nbytes)) if nbytes else b""
        self._position += len(data)
        return data


class _OpenFile:
    """An archive that is open for reading as long as this object exists."""

    def __init__(self, parent: Store, name: str) -> None:
        self._reader = parent.reader(name)
        self.read = self._reader.__enter__()


class ZipStore(Store):
    """The objects of a checkpoint in the archive ``name`` of a parent store. Methods are those of :class:`Store`."""

    is_archive = True

    def __init__(self, parent: Store, name: str) -> None:
        above, query = split_query(parent.url)
        self.url = f"{above.rstrip('/')}/{name}{query}"
        self.is_local = parent.is_local
        self.lists_all = True
        self.secrets = parent.secrets
        self.client_errors = parent.client_errors
        self._parent = parent
        self._name = name
        self._index: _Index | None = None
        self._checks: dict[str, tuple[bool, int, int]] | None = None
        """During a check, by key: :attr:`_Index.is_own`, the CRC-32 of the first bytes that were read, their number."""
        self._opened: _OpenFile | None = None
        self._places: Places = {}
        self._part: LocalPart | StreamedArchive | None = None
        self._archive: LocalArchive | StreamedArchive | None = None
        self._save_id = ""
        """The id of the attempt whose archive this process creates."""

    @property
    def max_concurrency(self) -> int:
        # The entries of a streamed archive have the order of the calls.
        return 1 if isinstance(self._archive, StreamedArchive) else self._parent.max_concurrency

    @max_concurrency.setter
    def max_concurrency(self, number: int) -> None:
        self._parent.max_concurrency = number

    @property
    def on_repeat(self) -> Callable[[str, Exception, bool], None] | None:
        return self._parent.on_repeat

    @on_repeat.setter
    def on_repeat(self, report: Callable[[str, Exception, bool], None] | None) -> None:
        self._parent.on_repeat = report

    def useful_concurrency(self) -> int:
        self._parent.beside_training = self.beside_training
        return min(self.max_concurrency, self._parent.useful_concurrency())

    def hint(self, what: str, error: BaseException) -> str:
        return self._parent.hint(what, error)

    # -- reads

    def _read_index(self) -> _Index:
        """Read the directory of the archive. Two or three requests. Raises ObjectNotFoundError without an archive."""
        self._index = index = _Index(self._parent, self._name, self.url)
        return index

    def _find(self, key: str) -> tuple[_Index, ZipEntry] | None:
        """Return the entry of a key, or None if the object is beside the archive.

        Raises ObjectNotFoundError if it can only be in the archive and is not.
        """
        if _is_beside(key):
            return None
        index = self._index or self._read_index()
        if (entry := index.entries.get(key)) is None:
            if key == ROOT:
                raise records.damage(self.url, f"it has no entry {ROOT!r}")
            raise _failures.not_found(key, self.url)
        return index, entry

    def get(self, key: str) -> bytes:
        return self.get_bounded(key, MAX_WHOLE_BYTES)

    def get_bounded(self, key: str, max_bytes: int) -> bytes:
        """Return a whole object. The root document is always read from the present archive."""
        if key == ROOT:
            self._index = None
        found = self._find(key)
        if found is None:
            return self._parent.get_bounded(self._beside(key), max_bytes)
        if found[1].size > max_bytes:
            raise _failures.long_object(key, self.url, max_bytes)
        return bytes(self.read(key, 0, found[1].size))

    def size(self, key: str) -> int:
        found = self._find(key)
        return self._parent.size(self._beside(key)) if found is None else found[1].size

    def get_above(self, levels: int, key: str) -> bytes:
        return self._parent.get(key) if levels == 1 else self._parent.get_above(levels - 1, key)

    def get_versioned(self, key: str) -> VersionedObject:
        if key != ROOT:
            return self._parent.get_versioned(self._beside(key))
        self._parent.refuse_broken_link(self._name)
        # Read first, so that it is never newer than the data.
        version = None if self.is_local else self._parent.version(self._name)
        try:
            data = self.get(key)
        except (CorruptCheckpointError, ObjectNotFoundError) as error:
            is_folder = self.is_local and os.path.isdir(self._local().path_of(self._name))
            if isinstance(error, ObjectNotFoundError) and not is_folder:
                raise
            # A damaged archive can be replaced or removed, like a damaged root document. Other files cannot.
            size = 0 if is_folder else min(records.HEADER_BYTES, self._parent.size(self._name))
            data = bytes(self._parent.read(self._name, 0, size)) if size else b""
            if not records.is_own_header(data):
                raise ForeignObjectsError(
                    f"{self.url} is a file or a folder that no zarrckpt save wrote. Nothing was changed. Save to "
                    "another path, or delete it"
                ) from None
        return VersionedObject(data, version or version_of(data))

    def read_into(self, key: str, byte_offset: int, buffer: memoryview) -> None:
        with self.reader(key) as read:
            read(byte_offset, [buffer])

    def read(self, key: str, byte_offset: int, nbytes: int) -> memoryview:
        found = self._find(key)
        if found is None:
            return self._parent.read(self._beside(key), byte_offset, nbytes)
        index, entry = found
        self._check_range(key, entry, byte_offset, nbytes)
        data = index.read_entry(key, byte_offset, nbytes)
        if self._checks is not None:
            _, crc, end = self._checks.get(key, (False, 0, 0))
            if end == byte_offset:
                self._checks[key] = index.is_own[key], records.add_crc32([data], crc), end + len(data)
        return data

    def reader(self, key: str) -> AbstractContextManager[Reader]:
        found = self._find(key)
        if found is None:
            return self._parent.reader(self._beside(key))
        (index, entry), opened = found, self._opened or _OpenFile(self._parent, self._name)

        def read(byte_offset: int, buffers: Sequence[memoryview]) -> None:
            nbytes = sum(map(len, buffers))
            self._check_range(key, entry, byte_offset, nbytes)
            if not byte_offset and (header_bytes := index.header_bytes(key, nbytes)):
                header = bytearray(header_bytes)
                opened.read(entry.header_offset, [memoryview(header), *buffers])
                if index.accept(key, header):
                    return
            opened.read(index.locate(key).data_offset + byte_offset, buffers)

        return nullcontext(read)

    @contextmanager
    def keep_open(self) -> Iterator[None]:
        # If the archive is missing, the first read explains that.
        with suppress(ObjectNotFoundError):
            self._opened = _OpenFile(self._parent, self._name)
        try:
            yield
        finally:
            self._opened = None

    def _check_range(self, key: str, entry: ZipEntry, byte_offset: int, nbytes: int) -> None:
        if byte_offset + nbytes > entry.size:
            raise _failures.short_object(key, self.url, byte_offset + nbytes, entry.size)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        below = f"{prefix}/" if prefix else ""
        keys = set()
        for key, entry in self._fresh_entries().items():
            if key.startswith(below):
                keys.add(key)
                yield ObjectInfo(key, entry.size)
        # Web servers have no saves and pins.
        if self._parent.lists_all and (not prefix or f"{prefix}/".startswith(f"{GROUP}/")):
            beside = self._beside(prefix or GROUP)
            for info in self._parent.list(beside):
                key = info.key.removeprefix(f"@{self._name}/")
                if key not in keys and _is_beside(key):
                    yield ObjectInfo(key, info.size)

    def list_dir(self, prefix: str = "") -> Listing:
        below = f"{prefix}/" if prefix else ""
        rest = [key.removeprefix(below) for key in self._fresh_entries() if key.startswith(below)]
        objects = {name for name in rest if "/" not in name}
        folders = {name.partition("/")[0] for name in rest if "/" in name}
        if self._parent.lists_all and (not prefix or below.startswith(f"{GROUP}/")):
            more = self._parent.list_dir(self._beside(prefix))
            objects, folders = objects.union(more[0]), folders.union(more[1])
        return sorted(objects), sorted(folders)

    def _fresh_entries(self) -> dict[str, ZipEntry]:
        try:
            return self._read_index().entries
        except (ObjectNotFoundError, CorruptCheckpointError):
            return {}

    def refresh(self, folder: str) -> None:
        self._parent.refresh(self._beside(folder))

    def begin_record_checks(self) -> None:
        self._read_index()
        self._checks = {}

    def record_faults(self, keys: Collection[str]) -> Iterator[tuple[str, str]]:
        checks, self._checks = self._checks or {}, None
        index = self._index or self._read_index()
        stored = index.read(index.directory_offset, index.size - index.directory_offset)
        own = records.encode_directory(index.entries, index.directory_offset)[:-2]
        # Archives of other programs have other records, in all entries. A comment is no fault.
        is_own = any(check[0] for check in checks.values())
        if is_own and stored != own + len(index.comment).to_bytes(2, "little") + index.comment:
            fault = "its central directory is damaged, or another program has changed the archive"
            yield "", f"{fault}. If there is no other damage, zarrckpt cp makes an archive without it"
        for key, entry in index.entries.items():
            header_is_own, crc, nbytes = checks.get(key, (True, entry.crc, entry.size))
            if key not in keys and not is_system_file(key):
                yield key, "it is not an object of the checkpoint"
            elif is_own and not header_is_own:
                yield key, "its local header differs from the one that was written"
            elif nbytes == entry.size and crc != entry.crc:
                yield key, "its CRC-32 in the central directory is not that of its bytes"

    # -- writes

    def begin_archive(self, save_id: str, planned_bytes: int) -> None:
        self._save_id = save_id
        if isinstance(self._parent, ClientStore):
            self._archive = StreamedArchive(self._parent, self._name, self._unfinished(save_id)[0])
        else:
            self._archive = LocalArchive(self._local(), *self._unfinished(save_id), planned_bytes)

    def begin_part(self, save_id: str, places: Places) -> None:
        if isinstance(self._archive, StreamedArchive):
            self._part = self._archive
            return self._archive.refuse_size(sum(place.size for place in places.values()))
        self._places = places
        self._part = LocalPart(self._local(), *self._unfinished(save_id), places)

    def _unfinished(self, save_id: str) -> tuple[str, str]:
        """Return the keys of an attempt's unfinished archive and of its scratch files, without their numbers."""
        folder = self._beside(f"{GROUP}/{save_id}")
        return f"{folder}/{_ARCHIVE}", f"{folder}/{_SCRATCH}"

    def end_part(self) -> ArchivePart | None:
        return self._part.end() if isinstance(self._part, LocalPart) else None

    def close_part(self) -> None:
        if self._part is not None:
            self._part.close()

    def add_parts(self, parts: Sequence[ArchivePart], keys: Iterable[str]) -> None:
        if isinstance(self._archive, LocalArchive):
            self._archive.add_parts(parts, self._places, keys)

    def put(self, key: str, buffers: Sequence[Buffer]) -> None:
        if _is_beside(key):
            self._parent.put(self._beside(key), buffers)
        elif key in self._places or isinstance(self._archive, StreamedArchive):
            self.put_parts(key, lambda: [buffers])
        else:
            assert self._archive is not None
            self._archive.put(key, b"".join(byte_views(buffers)))

    def put_parts(self, key: str, groups: Callable[[], Iterable[Sequence[Buffer]]]) -> None:
        assert self._part is not None
        self._part.write(key, groups())

    def create(self, key: str, data: bytes) -> None:
        if key == f"{GROUP}/{ROOT}":
            return  # Each attempt has an archive of its own, so none needs a claim.
        if key != ROOT:
            return self._parent.create(self._beside(key), data)
        self._finish(data, None, lambda archive: archive.commit_new(self._name))

    def replace(self, key: str, data: bytes, version: Any) -> None:
        if key != ROOT:
            return self._parent.replace(self._beside(key), data, version)

        def is_expected() -> bool:
            try:
                return bool(self.get_versioned(ROOT).version == version)
            except ObjectNotFoundError:
                return False

        self._finish(data, version, lambda archive: archive.commit_over(self._name, is_expected))

    def _finish(self, root: bytes, version: Any, commit: Callable[[LocalArchive], bool]) -> None:
        archive = self._archive
        assert archive is not None
        self.put(ROOT, [root])
        archive.finish()
        if not (archive.commit(version) if isinstance(archive, StreamedArchive) else commit(archive)):
            # If the answer to the commit was lost, its repeat finds the archive of this save.
            committed = False
            with suppress(StorageError, CorruptCheckpointError):
                committed = self.get(ROOT) == root
            if not committed:
                raise _failures.conflict(ROOT, self.url, replacing=version is not None)
        self._archive, self._places = None, {}
        own = self._beside(f"{GROUP}/{self._save_id}")
        # The marker is the last one, so that the next clean-up can continue after a crash.
        self._parent.delete([f"{own}/{_ARCHIVE}"])
        self._parent.delete([f"{own}/{ROOT}"])

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects beside the archive, and the archive if the root document is among them.

        Other entries stay, since an archive is deleted as a whole.
        """
        if names := self._names(keys):
            self._parent.delete(names)

    def sweep(self, folders: Iterable[str]) -> None:
        """Delete what the parent deletes, and unfinished archives, of which the marker may be missing."""
        # Beside the archive are files of other checkpoints, and its entries are no folders.
        names = [folder for folder in folders if _is_beside(f"{folder}/")]
        for name in filter(_ATTEMPT.fullmatch, names):
            if name == f"{GROUP}/{self._save_id}":
                self.close_part()
            found = [info.key for info in self._parent.list(self._beside(name))]
            self._parent.delete([key for key in found if not key.endswith(ROOT)])
        self._parent.sweep(map(self._beside, names))

    def remove_folder(self, folder: str = "") -> None:
        self._parent.remove_folder(self._beside(folder))

    def sync(self, keys: Iterable[str]) -> None:
        self._parent.sync(self._names(keys))

    def _local(self) -> LocalStore:
        if not isinstance(self._parent, LocalStore):
            raise StorageError(f"{self.url} cannot be written: {type(self._parent).__name__} takes no archives")
        return self._parent

    def _names(self, keys: Iterable[str]) -> Sequence[str]:
        """Return the keys in the parent of the archive, if the root document is among the keys, and of those beside."""
        return [self._name if key == ROOT else self._beside(key) for key in keys if key == ROOT or _is_beside(key)]

    def _beside(self, key: str) -> str:
        return f"@{self._name}/{key}".rstrip("/")


def _is_beside(key: str) -> bool:
    """Whether an object belongs to the url and not to a checkpoint: all of the group but the tables of saves."""
    return key.startswith(f"{GROUP}/") and _TABLE_KEY.match(key) is None
