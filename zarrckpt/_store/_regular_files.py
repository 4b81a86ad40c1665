"""Read local files that other users may have made: only regular files, and only up to a maximum size."""

from __future__ import annotations

import errno
import os
import stat

from zarrckpt._errors import CorruptCheckpointError

MAX_WHOLE_BYTES = 512 << 20
"""Maximum size in bytes of an object that is read as a whole, unless its size is known. Documents are smaller."""

_SPECIAL_KINDS = {stat.S_IFIFO: "a FIFO", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device", stat.S_IFSOCK: "a socket"}


def open_regular(path: str) -> int:
    """Open a regular file, or a link to one, for reading. Return the descriptor.

    Raises CorruptCheckpointError for a FIFO, a device or a socket, which could block or never end. Raises OSError for
    other failures.
    """
    # Without O_NONBLOCK the call waits until a process writes to a FIFO. Regular files ignore the flag.
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    mode = os.fstat(file).st_mode
    if stat.S_ISREG(mode):
        return file
    os.close(file)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    kind = _SPECIAL_KINDS.get(stat.S_IFMT(mode), "a special file")
    raise CorruptCheckpointError(f"reading {path!r} is refused: it is {kind}, expected a regular file. Remove it")


def read_regular(path: str, limit: int = MAX_WHOLE_BYTES) -> bytes:
    """Return the bytes of a regular file.

    Raises what :func:`open_regular` raises, and CorruptCheckpointError for a file of more than ``limit`` bytes.
    """
    with open(open_regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise CorruptCheckpointError(
                f"reading {path!r} is refused: it has {size:,} bytes, expected at most {limit:,}. It was damaged or "
                "replaced. Load an earlier checkpoint"
            )
        return file.read(size)
