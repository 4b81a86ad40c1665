"""Object keys: the one check that every store makes, and the buffers that go under a key."""

from __future__ import annotations

from collections.abc import Sequence

from zarrckpt._errors import StorageError
from zarrckpt._store._base import Buffer


def check_key(key: str) -> str:
    """Return ``key`` unchanged if it names something below the url, and raise StorageError otherwise.

    Keys are read from stored documents too, so a ``..`` must never reach a filesystem.
    """
    if "\0" in key or any(part in ("", ".", "..") for part in key.split("/")):
        raise StorageError(
            f"{key!r} is not a key below the url: expected names separated by single '/', none of them "
            "empty, '.' or '..'; the document that names it is damaged or was not written by zarrckpt"
        )
    return key


def below(prefix: str, key: str) -> str:
    """``key`` below the folder ``prefix`` ("" for none), checked."""
    return f"{prefix}/{check_key(key)}" if prefix else check_key(key)


def above(prefix: str, levels: int) -> str | None:
    """The folder so many levels above the folder ``prefix``; None where there is none."""
    names = prefix.split("/") if prefix else []
    return None if levels > len(names) else "/".join(names[:-levels])


def byte_views(buffers: Sequence[Buffer]) -> list[memoryview]:
    """The buffers as flat byte views, without copying; empty ones are left out."""
    # An empty multi-dimensional view cannot be cast, and has nothing to write anyway.
    views = (memoryview(buffer) for buffer in buffers)
    return [view.cast("B") for view in views if view.nbytes]


def joined(buffers: Sequence[Buffer]) -> bytes:
    """All buffers as one ``bytes``: no copy where it is one already."""
    if len(buffers) == 1 and isinstance(buffers[0], bytes):
        return buffers[0]
    return b"".join(byte_views(buffers))
