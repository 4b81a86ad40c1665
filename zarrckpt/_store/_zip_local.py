"""Write an archive to a local or shared filesystem: many threads of many processes write entries of one file.

The plan of the save has the offset of each entry of known size. All other entries are first written to scratch files.
The coordinator copies these behind the planned entries, then adds the small objects and the central directory.
"""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import NamedTuple

import numpy as np

from zarrckpt._errors import IncompleteSaveError
from zarrckpt._store import _local_commit as files
from zarrckpt._store import _zip_format as records
from zarrckpt._store._archive import ArchivePart, Places
from zarrckpt._store._base import Buffer, byte_views
from zarrckpt._store._local import LocalStore, disk_threads
from zarrckpt._store._zip_format import ROOT, ZipEntry

_SYNC_BYTES = 64 << 20
"""Number of written bytes after which a sync of the file begins, so that the disk works during the save."""


class _ScratchFile(NamedTuple):
    number: int
    file: int
    size: int


class LocalPart:
    """The entries that one process writes to an archive. Used by many threads."""

    def __init__(self, parent: LocalStore, archive: str, scratch: str, places: Places) -> None:
        """``archive`` and ``scratch`` are the keys of the archive and of the scratch files, without their numbers."""
        self._parent = parent
        self._path = parent.path_of(archive)
        self._scratch_path = parent.path_of(f"{scratch}{(name := uuid.uuid4().hex)}")
        self._name = name
        self._places = places
        self._file = parent.call(f"opening {self._path!r}", lambda: os.open(self._path, os.O_WRONLY | os.O_CLOEXEC))
        self._lock = threading.Lock()
        self._crcs: dict[str, int] = {}
        self._scratch: dict[str, tuple[int, int, int, int]] = {}
        self._free: list[_ScratchFile] = []
        self._opened: list[int] = []
        self._unsynced = 0
        self._syncs: list[Future[None]] = []

    def write(self, key: str, groups: Iterable[Sequence[Buffer]]) -> None:
        """Write an entry from groups of buffers. Raises StorageError."""
        work = self._write_placed if key in self._places else self._write_scratch
        self._parent.call(f"writing {key!r} in {self._path!r}", lambda: work(key, map(byte_views, groups)))

    def _write_placed(self, key: str, groups: Iterator[list[memoryview]]) -> None:
        header_offset, size = self._places[key]
        data_offset = records.data_offset(key, size, header_offset)
        first = next(groups, [])
        crc, done = records.add_crc32(first), sum(map(len, first))
        if done == size:
            # One system call for a small entry.
            header = records.encode_header(key, ZipEntry(crc, size, header_offset, data_offset))
            files.pwrite_all(self._file, [memoryview(header), *first], header_offset)
        else:
            files.pwrite_all(self._file, first, data_offset)
            crc, done = _write_groups(self._file, groups, data_offset, crc, done)
            header = records.encode_header(key, ZipEntry(crc, size, header_offset, data_offset))
            files.pwrite_all(self._file, [memoryview(header)], header_offset)
        if done != size:
            raise IncompleteSaveError(f"{key!r} has {done:,} bytes, but {size:,} were planned. Save again")
        with self._lock:
            self._crcs[key] = crc
            self._unsynced += size
            if self._unsynced > _SYNC_BYTES and self._parent.durable:
                self._unsynced = 0
                self._syncs.append(disk_threads().submit(os.fsync, self._file))

    def _write_scratch(self, key: str, groups: Iterator[list[memoryview]]) -> None:
        with self._scratch_file() as scratch:
            crc, size = _write_groups(scratch.file, groups, scratch.size)
            with self._lock:
                self._scratch[key] = (scratch.number, scratch.size, size, crc)
                self._free.append(scratch._replace(size=scratch.size + size))

    @contextmanager
    def _scratch_file(self) -> Iterator[_ScratchFile]:
        """Yield a scratch file that no other thread uses."""
        with self._lock:
            if self._free:
                found = self._free.pop()
            else:
                found = _ScratchFile(len(self._opened), files.open_new(f"{self._scratch_path}-{len(self._opened)}"), 0)
                self._opened.append(found.file)
        yield found

    def end(self) -> ArchivePart:
        """Sync and close the files, and return the entries that were written."""
        for sync in self._syncs:
            self._parent.call(f"syncing {self._path!r}", sync.result)
        if self._parent.durable:
            self._parent.call(f"syncing {self._path!r}", lambda: os.fsync(self._file))
        self.close()
        return ArchivePart(
            tuple(self._crcs),
            np.array([*self._crcs.values()], "<u4"),
            self._name,
            tuple(self._scratch),
            np.array([*self._scratch.values()], "<i8").reshape(-1, 4),
        )

    def close(self) -> None:
        """Close the files. Does nothing if they are closed."""
        opened, self._opened = [self._file, *self._opened] if self._file >= 0 else [], []
        self._file = -1
        for file in opened:
            with suppress(OSError):
                os.close(file)


class LocalArchive:
    """A new archive on the coordinator, from its creation to its commit."""

    def __init__(self, parent: LocalStore, archive: str, scratch: str) -> None:
        self._parent = parent
        self._path = parent.path_of(archive)
        self._scratch = scratch
        self._entries: dict[str, ZipEntry] = {}
        self._end = 0
        self._small: dict[str, bytes] = {}
        parent.call(f"creating {self._path!r}", lambda: os.close(files.open_new(self._path)))

    def add_parts(self, parts: Sequence[ArchivePart], places: Places) -> None:
        """Add the entries of all ranks. Copies the scratch entries, in the order of their keys.

        Raises IncompleteSaveError if not exactly the planned entries were written.
        """
        crcs = {key: crc for part in parts for key, crc in zip(part.keys, part.crcs.tolist(), strict=True)}
        if crcs.keys() != places.keys() or len(crcs) != sum(len(part.keys) for part in parts):
            odd = sorted(crcs.keys() ^ places.keys())[:5]
            raise IncompleteSaveError(
                f"ranks wrote {len(crcs):,} of {len(places):,} planned entries of {self._path!r} ({odd}). Save again"
            )
        for key, (header_offset, size) in sorted(places.items(), key=lambda item: item[1]):
            data_offset = records.data_offset(key, size, header_offset)
            self._entries[key] = ZipEntry(crcs[key], size, header_offset, data_offset)
            self._end = data_offset + size
        self._parent.call(f"writing {self._path!r}", lambda: self._copy_scratch(parts))

    def _copy_scratch(self, parts: Sequence[ArchivePart]) -> None:
        found = sorted(
            (key, part.name, *numbers)
            for part in parts
            for key, numbers in zip(part.scratch_keys, part.scratch.tolist(), strict=True)
        )
        sources: dict[str, int] = {}
        try:
            with files.closed_after(os.open(self._path, os.O_WRONLY | os.O_CLOEXEC)) as file:
                for key, name, number, offset, size, crc in found:
                    path = self._parent.path_of(f"{self._scratch}{name}-{number}")
                    if path not in sources:
                        sources[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                    header, entry = self._append(key, size, crc)
                    files.pwrite_all(file, [memoryview(header)], entry.header_offset)
                    files.copy_range(sources[path], file, size, offset, entry.data_offset)
        finally:
            for opened in sources.values():
                os.close(opened)
        for path in sources:
            os.unlink(path)

    def _append(self, key: str, size: int, crc: int) -> tuple[bytes, ZipEntry]:
        """Add an entry at the end of the archive. Return its header."""
        entry = ZipEntry(crc, size, self._end, records.data_offset(key, size, self._end))
        self._entries[key], self._end = entry, entry.data_offset + size
        return records.encode_header(key, entry), entry

    def put(self, key: str, data: bytes) -> None:
        """Keep a small object until :meth:`finish`."""
        self._small[key] = data

    def finish(self) -> None:
        """Write the small objects, in the order of their keys, and the central directory. Sync the file."""
        begin, written = self._end, []
        # The root document is the last one, so that one read of the end of the file often contains it.
        for key, data in sorted(self._small.items(), key=lambda item: (item[0] == ROOT, item[0])):
            written += [self._append(key, len(data), records.add_crc32([data]))[0], data]
        written.append(records.encode_directory(self._entries, self._end))

        def write() -> None:
            with files.closed_after(os.open(self._path, os.O_WRONLY | os.O_CLOEXEC)) as file:
                files.pwrite_all(file, byte_views(written), begin)
                if self._parent.durable:
                    os.fsync(file)

        self._parent.call(f"writing {self._path!r}", write)

    def commit_new(self, path: str) -> bool:
        """Give the archive its name. Return False if a file of this name exists."""

        def link() -> bool:
            with files.locked(path):
                try:
                    files.move_new(self._path, path)
                except FileExistsError:
                    # An NFS client repeats a call whose answer was lost. The repeat then finds its own link.
                    return os.path.samefile(self._path, path)
            return True

        return self._parent.call(f"creating {path!r}", link)

    def commit_over(self, path: str, is_expected: Callable[[], bool]) -> bool:
        """Replace the file of this name. Return False if it is not the expected one."""

        def replace() -> bool:
            with files.locked(path):
                if not is_expected():
                    return False
                os.replace(self._path, path)
            return True

        return self._parent.call(f"replacing {path!r}", replace)


def _write_groups(
    file: int, groups: Iterable[list[memoryview]], offset: int, crc: int = 0, done: int = 0
) -> tuple[int, int]:
    """Write groups of buffers ``done`` bytes behind an offset. Return the CRC-32 and the number of all bytes."""
    for group in groups:
        crc = records.add_crc32(group, crc)
        size = sum(map(len, group))
        files.pwrite_all(file, group, offset + done)
        done += size
    return crc, done
