"""The archive of a save by one process in a remote store: entries are appended in order.

A small archive is kept in memory and put at once under a condition. A longer one is uploaded in parts beside its url
while it is made. obstore completes uploads without a condition, but copies an object under one. So the commit copies
the upload to the url.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

from zarrckpt._errors import CorruptCheckpointError, ObjectExistsError, StorageError
from zarrckpt._store import _zip_format as records
from zarrckpt._store._archive import ArchivePart, Places
from zarrckpt._store._base import Buffer, Store, byte_views
from zarrckpt._store._client_store import ClientStore

MAX_KEPT_BYTES = 64 << 20
"""Maximum size in bytes of an archive that is kept in memory."""


class StreamedArchive(records.ArchiveRecords):
    """A new archive, from its first entry to its commit. Thread-safe."""

    def __init__(self, parent: ClientStore, name: str, archive: str) -> None:
        """``archive`` is the key of the unfinished archive, ``name`` that of the committed one."""
        super().__init__()
        self._parent = parent
        self._name = name
        self._archive = archive
        self._kept: list[bytes] = []
        self._upload: Any = None
        self._lock = threading.Lock()

    def write(self, key: str, groups: Iterable[Sequence[Buffer]]) -> None:
        """Append an entry of all groups of buffers. Raises StorageError."""
        views = byte_views([buffer for group in groups for buffer in group])
        size, crc = sum(map(len, views)), records.add_crc32(views)
        with self._lock:
            self._send([memoryview(self._append(key, size, crc)[0]), *views])

    def _send(self, views: list[memoryview]) -> None:
        self.refuse_size(self._end)
        if self._upload is None and self._end <= MAX_KEPT_BYTES:
            self._kept += map(bytes, views)
            return
        if self._upload is None:
            self._upload = self._parent.open_upload(self._archive)
            views, self._kept = [*byte_views(self._kept), *views], []
        for view in views:
            self._call(self._upload.write, view)

    def _call(self, *step: Any) -> None:
        # Not the parent's call, which may repeat the step and so upload bytes twice.
        Store.call(self._parent, f"writing {self._archive!r}", lambda: step[0](*step[1:]))

    def refuse_size(self, nbytes: int) -> None:
        """Raise StorageError if an archive of this size cannot be written. One request if it is not a small one."""
        limit, where = max(MAX_KEPT_BYTES, self._parent.max_upload_bytes), f"{self._parent.url}/{self._name}"
        if nbytes > limit:
            raise StorageError(
                f"{where} cannot be written: it has at least {nbytes:,} bytes, expected at most {limit:,}. Archives of "
                f"more than {MAX_KEPT_BYTES:,} bytes need S3 or GCS, without the options storage_class, tags and "
                "backend. Save to a folder: a url without .zarr.zip"
            )
        if nbytes > MAX_KEPT_BYTES and self._upload is None and self._parent.has(self._name):
            raise StorageError(
                f"{where} cannot be replaced: the new archive has at least {nbytes:,} bytes, expected at most "
                f"{MAX_KEPT_BYTES:,}, because larger ones cannot be put under a condition. Save to another url or to a "
                "folder, or remove this archive first (zarrckpt rm)"
            )

    def end(self) -> None:
        """Return None: all entries are those of this process."""

    def add_parts(self, parts: Sequence[ArchivePart], places: Places) -> None:
        """Do nothing: the entries are written."""

    def finish(self) -> None:
        """Append the small objects and the central directory, and complete the upload."""
        self._send(byte_views(self._encode_rest()))
        if self._upload is not None:
            self._call(self._upload.close)

    def close(self) -> None:
        """End the upload after a failure. If its object is completed, it is deleted with the attempt."""
        if self._upload is not None:
            with suppress(StorageError):
                self._call(self._upload.close)

    def commit_new(self, name: str) -> bool:
        """Give the archive its name. Return False if an object of this name exists."""
        if self._parent.has(name):
            return False
        if self._upload is not None:
            return self._parent.copy_new(self._archive, name)
        return _holds(lambda: self._parent.create(name, b"".join(self._kept)))

    def commit_over(self, name: str, version: Any, is_expected: object) -> bool:
        """Replace the object of this name. Return False if it does not have the expected version."""
        return self._upload is None and _holds(lambda: self._parent.replace(name, b"".join(self._kept), version))


def _holds(put: Callable[[], None]) -> bool:
    """Make a conditional put. Return False if its condition does not hold."""
    try:
        put()
    except (ObjectExistsError, CorruptCheckpointError):
        # Another archive is there. It may be too long to be read as a whole and compared.
        return False
    return True
