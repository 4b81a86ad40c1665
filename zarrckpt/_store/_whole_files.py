"""Local files of other formats, which appear when they are whole."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import BinaryIO

from zarrckpt._errors import StorageError
from zarrckpt._store._base import Store
from zarrckpt._store._secrets import redact_url
from zarrckpt._store._url import has_protocol, parse


def local_path(target: str | os.PathLike[str]) -> str:
    """Return the local path of other libraries' files. Raises StorageError for a url: they are on local disks alone."""
    path = os.fspath(target)
    if not has_protocol(path):
        return path
    if (found := parse(path)).kind == "local":
        return found.path
    raise StorageError(
        f"{redact_url(path)} is a url; files of other libraries are read from and written to local files: copy them "
        "from there or to there, or use copy_to"
    )


def refuse_existing(names: Iterable[str]) -> None:
    """Raise StorageError where one of some files or folders is there."""
    found = [name for name in names if os.path.lexists(name)]
    if found:
        raise StorageError(
            f"{found[0]} exists already; nothing was written: export to another place, or pass overwrite=True"
        )


@contextmanager
def new_files(names: Sequence[str]) -> Iterator[list[str]]:
    """Names to write files under that get their own names, in order, when the block ends without an error.

    Until then none of them is there, and after an error none of what was written. Raises StorageError for an OSError.
    """
    parts = [f"{name}.part" for name in names]
    try:
        os.makedirs(os.path.dirname(names[0]) or ".", exist_ok=True)
        yield parts
        for part, name in zip(parts, names, strict=True):
            os.replace(part, name)
    except OSError as err:
        raise StorageError(
            f"writing {err.filename2 or err.filename or names[0]} failed: {err.strerror or err}"
        ) from err
    finally:
        for part in parts:
            with suppress(OSError):
                os.unlink(part)


def flush(file: BinaryIO) -> None:
    """What was written to a file is on the disk on return."""
    file.flush()
    os.fsync(file.fileno())


def upload_files(folder: str, store: Store) -> list[str]:
    """Put the files of a local folder to a store, each with one put; return their keys, in the order of the puts.

    A folder's small files come last: they make it one that others open.
    """
    paths = [os.path.join(above, name) for above, _, names in os.walk(folder) for name in names]
    keys = []
    for path in sorted(paths, key=os.path.getsize, reverse=True):
        keys.append(os.path.relpath(path, folder).replace(os.sep, "/"))
        with open(path, "rb") as file:
            # Not closed here: a client may still refer to it.
            whole = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if os.path.getsize(path) else b""
        store.put(keys[-1], [memoryview(whole)])
    return keys
