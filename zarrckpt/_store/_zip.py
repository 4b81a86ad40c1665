"""A checkpoint in one ZIP archive, as a store: the entries are the objects, and a parent store has the file.

The objects that protect or describe the url itself, such as markers of unfinished saves and pins, are not in the
archive. They are in the folder ``@<name of the archive>`` beside it, which exists only as long as there are any. The
unfinished archive of a save is there too, beside its marker.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

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
    version_of,
)
from zarrckpt._store._local import LocalStore
from zarrckpt._store._zip_format import ROOT, ZipEntry
from zarrckpt._store._zip_local import LocalArchive, LocalPart

_TAIL_BYTES = 256 << 10
"""Size of the first read of an archive. The end of a small one has its directory and root document."""

GROUP = "@zarrckpt"
_ARCHIVE = "archive"
_SCRATCH = "scratch-"
_TABLE_KEY = re.compile(rf"{GROUP}/[0-9a-f]{{32}}/[^/]+/")
_MARKER_KEY = re.compile(rf"{GROUP}/([0-9a-f]{{32}})/{re.escape(ROOT)}")


class _Index:
    """The entries of an archive, and the bytes at its end."""

    def __init__(self, parent: Store, name: str, url: str) -> None:
        size = parent.size(name)
        begin = max(0, size - _TAIL_BYTES)
        self.tail = parent.read(name, begin, size - begin)
        self.tail_offset = begin
        directory = records.parse_end(bytes(self.tail[-records.END_BYTES :]), size, url)
        if directory.offset >= begin:
            data = self.tail[directory.offset - begin :][: directory.size]
        else:
            data = parent.read(name, directory.offset, directory.size)
        self.entries = records.parse_directory(data, directory, url)
        self.directory = directory


class _OpenFile:
    """An archive that is open for reading as long as this object exists."""

    def __init__(self, parent: Store, name: str) -> None:
        self._reader = parent.reader(name)
        self.read = self._reader.__enter__()


class ZipStore(Store):
    """The objects of a checkpoint in the archive ``name`` of a parent store. Methods are those of :class:`Store`."""

    is_archive = True

    def __init__(self, parent: Store, name: str) -> None:
        self.url = f"{parent.url.rstrip('/')}/{name}"
        self.is_local = parent.is_local
        self.lists_all = True
        self.secrets = parent.secrets
        self.client_errors = parent.client_errors
        self._parent = parent
        self._name = name
        self._index: _Index | None = None
        self._opened: _OpenFile | None = None
        self._places: Places = {}
        self._part: LocalPart | None = None
        self._archive: LocalArchive | None = None
        self._save_id = ""
        """The id of the attempt whose archive this process creates."""

    @property
    def max_concurrency(self) -> int:
        return self._parent.max_concurrency

    @max_concurrency.setter
    def max_concurrency(self, number: int) -> None:
        self._parent.max_concurrency = number

    def useful_concurrency(self) -> int:
        self._parent.beside_training = self.beside_training
        return self._parent.useful_concurrency()

    def hint(self, error: BaseException) -> str:
        return self._parent.hint(error)

    # -- reads

    def _read_index(self) -> _Index:
        """Read the directory of the archive. Two or three requests. Raises ObjectNotFoundError without an archive."""
        self._index = index = _Index(self._parent, self._name, self.url)
        return index

    def _find(self, key: str) -> tuple[_Index, ZipEntry] | None:
        """Return the entry of a key, or None if the object is beside the archive.

        Raises ObjectNotFoundError if it can only be in the archive and is not.
        """
        index = None
        with suppress(ObjectNotFoundError):
            index = self._index or self._read_index()
        entry = None if index is None else index.entries.get(key)
        if index is not None and entry is not None:
            return index, entry
        if not _is_beside(key):
            raise _failures.not_found(key, self.url)
        return None

    def get(self, key: str) -> bytes:
        """Return a whole object. The root document is always read from the present archive."""
        if key == ROOT:
            self._read_index()
        found = self._find(key)
        return self._parent.get(self._beside(key)) if found is None else bytes(self.read(key, 0, found[1].size))

    def get_bounded(self, key: str, max_bytes: int) -> bytes:
        if self.size(key) > max_bytes:
            raise _failures.long_object(key, self.url, max_bytes)
        return self.get(key)

    def size(self, key: str) -> int:
        found = self._find(key)
        return self._parent.size(self._beside(key)) if found is None else found[1].size

    def get_above(self, levels: int, key: str) -> bytes:
        return self._parent.get(key) if levels == 1 else self._parent.get_above(levels - 1, key)

    def get_versioned(self, key: str) -> VersionedObject:
        if key != ROOT:
            return self._parent.get_versioned(self._beside(key))
        try:
            data = self.get(key)
        except CorruptCheckpointError:
            # A damaged archive can be replaced or removed, like a damaged root document. Other files cannot.
            data = bytes(self._parent.read(self._name, 0, min(4, self._parent.size(self._name))))
            if data != b"PK\3\4":
                raise ForeignObjectsError(
                    f"{self.url} is a file that no zarrckpt save wrote. Nothing was changed. Save to another path"
                ) from None
        return VersionedObject(data, version_of(data))

    def read_into(self, key: str, byte_offset: int, buffer: memoryview) -> None:
        with self.reader(key) as read:
            read(byte_offset, [buffer])

    def read(self, key: str, byte_offset: int, nbytes: int) -> memoryview:
        found = self._find(key)
        if found is None:
            return self._parent.read(self._beside(key), byte_offset, nbytes)
        index, entry = found
        self._check_range(key, entry, byte_offset, nbytes)
        begin = entry.data_offset + byte_offset
        if begin >= index.tail_offset:
            return index.tail[begin - index.tail_offset :][:nbytes]
        return self._parent.read(self._name, begin, nbytes)

    def reader(self, key: str) -> AbstractContextManager[Reader]:
        found = self._find(key)
        if found is None:
            return self._parent.reader(self._beside(key))
        entry, opened = found[1], self._opened or _OpenFile(self._parent, self._name)

        def read(byte_offset: int, buffers: Sequence[memoryview]) -> None:
            self._check_range(key, entry, byte_offset, sum(map(len, buffers)))
            opened.read(entry.data_offset + byte_offset, buffers)

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
        if not prefix or f"{prefix}/".startswith(f"{GROUP}/"):
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
        if not prefix or below.startswith(f"{GROUP}/"):
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

    def record_faults(self) -> Iterator[tuple[str, str]]:
        """Yield the key of each entry whose records differ from those that this package writes, and the fault.

        Reads the local header of each entry. Faults of the central directory have the key "".
        """
        index = self._index or self._read_index()
        stored = self._parent.read(self._name, index.directory.offset, index.directory.size)
        expected = records.encode_directory(index.entries, index.directory.offset)
        if bytes(stored) != expected[: index.directory.size]:
            yield "", "the central directory differs from what zarrckpt writes for its entries"
        with self._parent.reader(self._name) as read:
            for key, entry in index.entries.items():
                header = bytearray(entry.data_offset - entry.header_offset)
                read(entry.header_offset, [memoryview(header)])
                placed = entry.data_offset == records.data_offset(key, entry.size, entry.header_offset)
                if not placed or header != records.encode_header(key, entry):
                    yield key, "its local header differs from the central directory"

    # -- writes

    def begin_part(self, save_id: str, places: Places) -> None:
        folder = self._beside(f"{GROUP}/{save_id}")
        self._places = places
        self._part = LocalPart(self._local(), f"{folder}/{_ARCHIVE}", f"{folder}/{_SCRATCH}", places)

    def end_part(self) -> ArchivePart | None:
        assert self._part is not None
        return self._part.end()

    def close_part(self) -> None:
        if self._part is not None:
            self._part.close()

    def add_parts(self, parts: Sequence[ArchivePart]) -> None:
        assert self._archive is not None
        self._archive.add_parts(parts, self._places)

    def put(self, key: str, buffers: Sequence[Buffer]) -> None:
        if _is_beside(key):
            self._parent.put(self._beside(key), buffers)
            marker = _MARKER_KEY.fullmatch(key)
            if self._archive is None and marker is not None:
                save_id = marker[1]
                folder = self._beside(f"{GROUP}/{save_id}")
                self._archive = LocalArchive(self._local(), f"{folder}/{_ARCHIVE}", f"{folder}/{_SCRATCH}")
                self._save_id = save_id
        elif key in self._places:
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
        self._finish(data, lambda archive, path: archive.commit_new(path), replacing=False)

    def replace(self, key: str, data: bytes, version: Any) -> None:
        if key != ROOT:
            return self._parent.replace(self._beside(key), data, version)

        def is_expected() -> bool:
            try:
                return bool(self.get_versioned(ROOT).version == version)
            except ObjectNotFoundError:
                return False

        self._finish(data, lambda archive, path: archive.commit_over(path, is_expected), replacing=True)

    def _finish(self, root: bytes, commit: Callable[[LocalArchive, str], bool], *, replacing: bool) -> None:
        archive, parent = self._archive, self._local()
        assert archive is not None
        archive.put(ROOT, root)
        archive.finish()
        if not commit(archive, parent.path_of(self._name)):
            raise _failures.conflict(ROOT, self.url, replacing=replacing)
        if parent.durable:
            parent.sync_folders([self._name])
        own = self._beside(f"{GROUP}/{self._save_id}")
        self._parent.delete([f"{own}/{_ARCHIVE}", f"{own}/{ROOT}"])

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects beside the archive, and the archive if the root document is among them.

        Other entries stay, since an archive is deleted as a whole.
        """
        names = [self._name if key == ROOT else self._beside(key) for key in keys if key == ROOT or _is_beside(key)]
        if names:
            self._parent.delete(names)

    def sweep(self, folders: Iterable[str]) -> None:
        """Delete the unfinished archives and the scratch files of attempts, and what the parent deletes."""
        for folder in folders:
            if _MARKER_KEY.fullmatch(f"{folder}/{ROOT}") is None:
                continue
            beside = self._beside(folder)
            found = [info.key for info in self._parent.list(beside)]
            names = [key for key in found if key.removeprefix(f"{beside}/").startswith((_ARCHIVE, _SCRATCH))]
            if names:
                self._parent.delete(names)
            self._parent.sweep([beside])

    def sync(self, keys: Iterable[str]) -> None:
        self._parent.sync([self._beside(key) for key in keys if _is_beside(key)])

    def _local(self) -> LocalStore:
        if not isinstance(self._parent, LocalStore):
            raise StorageError(f"{self.url} cannot be written: an archive in an object store is written by one process")
        return self._parent

    def _beside(self, key: str) -> str:
        return f"@{self._name}/{key}".rstrip("/")


def _is_beside(key: str) -> bool:
    """Whether an object belongs to the url and not to a checkpoint: all of the group but the tables of saves."""
    return key.startswith(f"{GROUP}/") and _TABLE_KEY.match(key) is None
