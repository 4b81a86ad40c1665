"""The folders of a local store: those that exist, and those with entries that are not durable yet."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import takewhile

from zarrckpt._errors import StorageError
from zarrckpt._forks import ForkSafeLock


class Folders:
    """The folders below ``root``, and the root itself. Thread-safe."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._made: set[str] = set()
        """Folders that exist, unless another process has removed them."""
        self._grown: set[str] = set()
        """Folders above the root with a new entry. They are synced with the rest."""
        self._changes: dict[str, int] = {}
        """Number of times that this process has, or may have, changed each folder's entries."""
        self._synced: dict[str, int] = {}
        """The number of each folder's last durable change."""
        self._lock = ForkSafeLock()

    def above(self, path: str) -> Iterator[str]:
        """Yield the folders that contain ``path``, from the innermost up to the root."""
        while path != self._root:
            path = os.path.dirname(path)
            yield path

    def make(self, folder: str) -> None:
        """Make a folder and those above it. Raises FileNotFoundError if another process removes one meanwhile."""
        if folder in self._made:
            return
        outer = os.path.dirname(folder)
        if folder != self._root and outer in self._made:
            with suppress(FileExistsError):
                os.mkdir(folder)  # a folder that was just made is not a link
                self.note_changes([outer])
                self._made.add(folder)
                return
        new = [folder, *takewhile(lambda outer: outer not in self._made, self.above(folder))]
        refuse_links("writing", {*new} - {self._root})
        if not self._made:
            above = self._root
            while not os.path.isdir(above) and above != os.path.dirname(above):
                above = os.path.dirname(above)
                self._grown.add(above)
        try:
            os.makedirs(folder, exist_ok=True)
        except FileExistsError as error:
            if os.path.lexists(error.filename) and not os.path.isdir(error.filename):
                raise
            # A clean-up has removed it in the meantime. Another thread may have made it again.
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), folder) from error
        # Another process may have made some of them and may die before it syncs them.
        self.note_changes({os.path.dirname(inner) for inner in new} | (self._grown if self._root in new else set()))
        self._made.update(new)

    def forget(self, folder: str | None = None) -> None:
        """Look again whether a folder (default: each) exists when the next file in it is written."""
        if folder is None:
            self._made.clear()
        else:
            self._made.discard(folder)

    def note_changes(self, folders: Iterable[str]) -> None:
        """Note that the entries of these folders have changed."""
        with self._lock:
            for folder in folders:
                self._changes[folder] = self._changes.get(folder, 0) + 1

    def unsynced(self, paths: Iterable[str]) -> dict[str, int]:
        """Return the changed folders above these paths and above the root, for :meth:`note_synced` after the sync."""
        folders = {folder for path in paths for folder in self.above(path)} | {os.path.dirname(self._root)}
        with self._lock:
            counts = {folder: self._changes.get(folder, 0) for folder in folders | self._grown}
            return {folder: count for folder, count in counts.items() if self._synced.get(folder) != count}

    def note_synced(self, changes: dict[str, int]) -> None:
        """Note that these changes are durable."""
        with self._lock:
            self._synced.update(changes)


def refuse_links(verb: str, folders: Iterable[str]) -> None:
    """Raise StorageError for a link among the folders below a root, because its target may be outside the store."""
    for folder in folders:
        if os.path.islink(folder):
            raise StorageError(f"{verb} in {folder!r} is refused: it is a link, which may lead elsewhere. Remove it")
