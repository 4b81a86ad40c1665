"""Files that become part of a new checkpoint by a hard link, after their bytes were compared with the memory."""

from __future__ import annotations

import contextlib
import errno
import grp
import os
import pwd
import stat
from collections.abc import Sequence
from functools import cache
from types import TracebackType
from typing import Any

import numpy as np

from zarrckpt._store._base import Buffer

COMPARED_BYTES = 1 << 19
"""Size in bytes of the memory into which a file is read for the comparison. It fits the CPU cache."""

_FIRST_BYTES = 1 << 12
"""Number of bytes that are compared first. If a whole tensor has changed, they usually show it."""


class LinkableFile:
    """An open regular file. It may be compared with the bytes of a chunk, and then linked under another name.

    Raises OSError if the file cannot be opened, is a link or is not a regular file.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        # Without O_NONBLOCK the call waits until a process writes to a FIFO. Regular files ignore the flag.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
        self._file = os.open(path, flags)
        self.found = os.fstat(self._file)
        if not stat.S_ISREG(self.found.st_mode):
            os.close(self._file)
            raise OSError(errno.EINVAL, "it is not a regular file", path)
        self._byte_offset = 0

    def __enter__(self) -> LinkableFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):
            os.close(self._file)

    @property
    def size(self) -> int:
        """The size in bytes that the file had when it was opened."""
        return self.found.st_size

    def has_next(self, buffers: Sequence[Buffer], memory: np.ndarray[Any, Any]) -> bool:
        """Whether the next bytes of the file are those of the buffers. Stops at the first difference.

        ``memory`` holds the bytes that are read, a part at a time. A failed read counts as a difference.
        """
        for buffer in buffers:
            view, done = memoryview(buffer), 0
            while done < len(view):
                most = len(memory) if self._byte_offset else min(_FIRST_BYTES, len(memory))
                part = view[done : done + most]
                read = memory[: len(part)]
                try:
                    if os.preadv(self._file, [read.data], self._byte_offset) != len(part):
                        return False
                except OSError:
                    return False
                if not _equal(np.frombuffer(part, np.uint8), read):
                    return False
                done += len(part)
                self._byte_offset += len(part)
        return True

    def may_differ_from(self, new: os.stat_result) -> str:
        """Return why the file may not stand for a new file of this user, or "".

        ``new`` describes a new file in the folder of the link. Both need the same owner, group and mode, and nobody
        else may be able to write to the file.
        """
        found = self.found
        if found.st_dev != new.st_dev:
            return "it is on another file system"
        if found.st_uid != os.geteuid() or found.st_uid != new.st_uid:
            return "another user owns it"
        if (found.st_mode, found.st_gid) != (new.st_mode, new.st_gid):
            return "it has another mode or group than new files"
        if found.st_mode & stat.S_IWOTH or (found.st_mode & stat.S_IWGRP and not self._is_private()):
            return "other users may write to it. A umask of 022 prevents that"
        return ""

    def _is_private(self) -> bool:
        """Whether the group has only the file's owner, and no access list names other users."""
        if not _is_private_group(self.found.st_uid, self.found.st_gid):
            return False
        try:
            return "system.posix_acl_access" not in os.listxattr(self._file)
        except (AttributeError, OSError):  # Only Linux has the call, and not every file system lists.
            return True


def _equal(memory: np.ndarray[Any, Any], read: np.ndarray[Any, Any]) -> bool:
    whole = len(read) & ~7
    words = np.array_equal(memory[:whole].view(np.uint64), read[:whole].view(np.uint64))
    return words and np.array_equal(memory[whole:], read[whole:])


@cache
def _is_private_group(uid: int, gid: int) -> bool:
    """Whether a group has the user's name and no other member. Distributions with a umask of 002 make such groups."""
    try:
        user, group = pwd.getpwuid(uid).pw_name, grp.getgrgid(gid)
    except KeyError:
        return False
    return group.gr_name == user and {*group.gr_mem} <= {user}
