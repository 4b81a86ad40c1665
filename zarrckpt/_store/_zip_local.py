"""Write an archive to a local or shared filesystem: many threads of many processes write entries of one file.

The plan of the save has the offset of each entry of known size. All other entries are first written to scratch files.
The coordinator copies these behind the planned entries, then adds the small objects and the central directory.
"""

from __future__ import annotations

import os
import re
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import NamedTuple

import numpy as np

from zarrckpt._errors import CheckpointError, IncompleteSaveError
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
        self._name = uuid.uuid4().hex
        self._scratch_key = f"{scratch}{self._name}"
        self._places = places
        self._file = parent.call(f"opening {self._path!r}", lambda: os.open(self._path, os.O_WRONLY | os.O_CLOEXEC))
        self._lock = threading.Lock()
        self._crcs: dict[str, int] = {}
        self._scratch: dict[str, tuple[int, int, int, int]] = {}
        self._free: list[_ScratchFile] = []
        self._opened = [self._file]
        self._writes = 0
        """Number of running writes."""
        self._closed = False
        self._unsynced = 0
        self._syncs: list[Future[None]] = []

    def write(self, key: str, groups: Iterable[Sequence[Buffer]]) -> None:
        """Write an entry from groups of buffers. Raises StorageError."""
        work = self._write_placed if key in self._places else self._write_scratch
        with self._lock:
            if not self._opened:
                raise IncompleteSaveError(f"{key!r} was written after the save to {self._path!r} had ended. Save again")
            self._writes += 1
        try:
            self._parent.call(f"writing {key!r} in {self._path!r}", lambda: work(key, map(byte_views, groups)))
        finally:
            with self._lock:
                self._writes -= 1
            if self._closed:
                self.close()

    def _write_placed(self, key: str, groups: Iterator[list[memoryview]]) -> None:
        header_offset, size = self._places[key]
        data_offset = records.data_offset(key, size, header_offset)
        first = next(groups, [])
        crc, done = records.add_crc32(first), sum(map(len, first))
        whole = done == size
        if whole:
            # One system call for a small entry.
            header = records.encode_header(key, ZipEntry(crc, size, header_offset, data_offset))
            files.pwrite_all(self._file, [memoryview(header), *first], header_offset)
        else:
            files.pwrite_all(self._file, first, data_offset)
        crc, done = _write_groups(self._file, groups, data_offset, crc, done)
        if done != size:
            raise IncompleteSaveError(f"{key!r} has {done:,} bytes, but {size:,} were planned. Save again")
        if not whole:
            header = records.encode_header(key, ZipEntry(crc, size, header_offset, data_offset))
            files.pwrite_all(self._file, [memoryview(header)], header_offset)
        with self._lock:
            self._crcs[key] = crc
            self._unsynced += size
            if self._unsynced > _SYNC_BYTES and self._parent.durable:
                self._unsynced = 0
                self._syncs.append(disk_threads().submit(os.fsync, self._file))

    def _write_scratch(self, key: str, groups: Iterator[list[memoryview]]) -> None:
        with self._lock:
            if not self._free:
                number = len(self._opened)
                self._opened.append(files.open_new(self._parent.path_of(f"{self._scratch_key}-{number}")))
                self._free.append(_ScratchFile(number, self._opened[-1], 0))
            # No other thread uses it.
            scratch = self._free.pop()
        crc, size = _write_groups(scratch.file, groups, scratch.size)
        with self._lock:
            self._scratch[key] = (scratch.number, scratch.size, size, crc)
            self._free.append(scratch._replace(size=scratch.size + size))

    def end(self) -> ArchivePart:
        """Sync and close the files, and return the entries that were written."""
        for sync in self._syncs:
            self._parent.call(f"syncing {self._path!r}", sync.result)
        if self._parent.durable:
            self._parent.call(f"syncing {self._path!r}", lambda: os.fsync(self._file))
        # Network filesystems may report a failed write only on close.
        while self._opened:
            self._parent.call(f"closing {self._path!r}", lambda: os.close(self._opened.pop()))
        return ArchivePart(
            tuple(self._crcs),
            np.array([*self._crcs.values()], "<u4"),
            self._name,
            tuple(self._scratch),
            np.array([*self._scratch.values()], "<i8").reshape(-1, 4),
        )

    def close(self) -> None:
        """Close the files after a failure, and delete the scratch files. Does nothing if they are closed.

        After two signals, a write may still be running. It must not use a descriptor that another file has got, so the
        last write closes the files.
        """
        self._closed = True
        with self._lock:
            # The first one is the archive.
            opened, self._opened = ([], self._opened) if self._writes else (self._opened, [])
        for file in opened:
            with suppress(OSError):
                os.close(file)
        # The coordinator may have deleted the files of the attempt before this rank created its last one.
        with suppress(CheckpointError):
            self._parent.delete(f"{self._scratch_key}-{number}" for number in range(1, len(opened)))


class LocalArchive:
    """A new archive on the coordinator, from its creation to its commit."""

    def __init__(self, parent: LocalStore, archive: str, scratch: str, planned_bytes: int) -> None:
        self._parent = parent
        self._path = parent.path_of(archive)
        # In the group of all attempts, which exists as long as the folder of this one.
        self._lock = os.path.join(os.path.dirname(os.path.dirname(self._path)), "archive")
        self._scratch = scratch
        self._entries: dict[str, ZipEntry] = {}
        self._end = 0
        self._small: dict[str, bytes] = {}

        def create(path: str) -> None:
            with files.closed_after(files.open_new(path)) as file:
                os.ftruncate(file, planned_bytes)

        # The sync of the marker includes the folder.
        parent.put_conditionally("creating", archive, create, sync_folders=False)

    def add_parts(self, parts: Sequence[ArchivePart], places: Places, keys: Iterable[str]) -> None:
        """Add the entries of all ranks. Copies the scratch entries, in the order of their keys.

        Raises IncompleteSaveError if not exactly the entries ``keys`` were written, and those of ``places`` there.
        """
        written = sorted(key for part in parts for key in (*part.keys, *part.scratch_keys))
        crcs = {key: crc for part in parts for key, crc in zip(part.keys, part.crcs.tolist(), strict=False)}
        if written != sorted(keys) or crcs.keys() != places.keys() or not all(map(_is_valid, parts)):
            raise IncompleteSaveError(
                f"ranks wrote {len(written):,} entries of {self._path!r}, {len(crcs):,} of them at their "
                f"{len(places):,} planned places. Expected each chunk once, with its checksum. Nothing was committed. "
                "Save again"
            )
        for key, (header_offset, size) in sorted(places.items(), key=lambda item: item[1]):
            assert header_offset == self._end
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

    def commit_new(self, name: str) -> bool:
        """Give the archive its name. Return False if a file of this name exists."""

        def create(path: str) -> bool:
            try:
                files.move_new(self._path, path, self._lock)
            except FileExistsError:
                # An NFS client repeats a call whose answer was lost. The repeat then finds its own link.
                return os.path.samestat(os.lstat(self._path), os.lstat(path))
            return True

        return self._commit("creating", name, create)

    def commit_over(self, name: str, is_expected: Callable[[], bool]) -> bool:
        """Replace the file of this name. Return False if it is not the expected one."""

        def replace(path: str) -> bool:
            with files.locked(self._lock):
                if not is_expected():
                    return False
                os.replace(self._path, path)
            return True

        return self._commit("replacing", name, replace)

    def _commit(self, verb: str, name: str, work: Callable[[str], bool]) -> bool:
        done = False

        def commit(path: str) -> None:
            nonlocal done
            done = work(path)

        self._parent.put_conditionally(verb, name, commit, sync_folders=self._parent.durable)
        return done


def _is_valid(part: ArchivePart) -> bool:
    """Whether another rank's part has a checksum for each key, and names no file but a scratch file."""
    shapes = (part.crcs.shape, part.scratch.shape) == ((len(part.keys),), (len(part.scratch_keys), 4))
    return shapes and re.fullmatch("[0-9a-f]{32}", part.name) is not None and bool((part.scratch >= 0).all())


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
