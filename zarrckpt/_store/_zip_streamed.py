"""The archive of a save by one process in a remote store: entries are appended in order.

A small archive is kept in memory and put at once under a condition. A longer one is uploaded in parts beside its url
while it is made. obstore completes uploads without a condition, but copies an object under one. So the commit copies
the upload to the url.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

from zarrckpt._errors import ObjectNotFoundError, StorageError
from zarrckpt._store import _zip_format as records
from zarrckpt._store._base import Buffer, Store, byte_views
from zarrckpt._store._client_store import ClientStore

MAX_KEPT_BYTES = 64 << 20
"""Maximum size in bytes of an archive that is kept in memory."""


class StreamedArchive:
    """A new archive, from its first entry to its commit. Thread-safe."""

    def __init__(self, parent: ClientStore, name: str, upload: str) -> None:
        """``name`` and ``upload`` are the keys of the archive and of its upload."""
        self._parent: Any = parent
        self._name, self._upload_key = name, upload
        self._entries: dict[str, records.ZipEntry] = {}
        self._end = 0
        self._kept: list[bytes] = []
        self._upload: Any = None
        self._lock = threading.Lock()

    def write(self, key: str, groups: Iterable[Sequence[Buffer]]) -> None:
        """Append an entry of all groups of buffers. Raises StorageError."""
        views = byte_views([buffer for group in groups for buffer in group])
        size, crc = sum(map(len, views)), records.add_crc32(views)
        with self._lock:
            entry = records.ZipEntry(crc, size, self._end, records.data_offset(key, size, self._end))
            self._entries[key] = entry
            self._send([memoryview(records.encode_header(key, entry)), *views])

    def _send(self, views: list[memoryview]) -> None:
        self._end += sum(map(len, views))
        self.refuse_size(self._end)
        if self._end <= MAX_KEPT_BYTES:
            self._kept += map(bytes, views)
            return
        if self._upload is None:
            self._upload = self._parent.open_upload(self._upload_key)
            views, self._kept = [*byte_views(self._kept), *views], []
        for view in views:
            self._call(self._upload.write, view)

    def _call(self, *step: Any) -> None:
        # Not the parent's call, which may repeat the step and so upload bytes twice.
        Store.call(self._parent, f"writing {self._upload_key!r}", lambda: step[0](*step[1:]))

    def refuse_size(self, nbytes: int) -> None:
        """Raise StorageError if an archive of this size cannot be written. At most a few requests."""
        if nbytes <= MAX_KEPT_BYTES or (self._upload and nbytes <= self._parent.max_upload_bytes):
            return
        limit = MAX_KEPT_BYTES if self._exists() else max(MAX_KEPT_BYTES, self._parent.max_upload_bytes)
        if nbytes > limit:
            raise StorageError(
                f"{self._parent.url}/{self._name} cannot be written: the new archive has at least {nbytes:,} bytes, "
                f"expected at most {limit:,} in this store, and {MAX_KEPT_BYTES:,} to replace an archive. Save to a "
                "folder: a url without .zarr.zip"
            )

    def _exists(self) -> bool:
        with suppress(ObjectNotFoundError):
            return bool(self._parent.size(self._name))
        return False

    def finish(self) -> None:
        """Append the central directory and complete the upload."""
        self._send([memoryview(records.encode_directory(self._entries, self._end))])
        if self._upload is not None:
            self._call(self._upload.close)

    def close(self) -> None:
        """End the upload after a failure. If its object is completed, it is deleted with the attempt."""
        if self._upload is not None:
            with suppress(StorageError):
                self._call(self._upload.close)

    def commit(self, version: Any) -> bool:
        """Give the archive its name: a new one, or that of the object with this version.

        Returns False or raises ObjectExistsError if there is another object.
        """
        if version is None and self._exists():
            return False
        if self._upload is not None:
            return version is None and self._parent.copy_new(self._upload_key, self._name)
        data = b"".join(self._kept)
        if version is None:
            self._parent.create(self._name, data)
        else:
            self._parent.replace(self._name, data, version)
        return True
