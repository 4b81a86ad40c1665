"""What the ways out of a checkpoint share: names, files that appear when they are whole, the report. No torch."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import BinaryIO

from zarrckpt._errors import StorageError, UnsupportedValueError
from zarrckpt._state_path import DICT, LIST, StatePath

MAX_EXPORT_BYTES = 128 << 20
"""Memory for what is on its way, unless the caller says otherwise."""


@dataclass(frozen=True)
class ExportReport:
    """What an export wrote: ``files`` are relative to ``folder``; ``nbytes`` are those of the tensors."""

    folder: str
    files: tuple[str, ...]
    tensors: int
    values: int
    nbytes: int


def stripped(paths: Mapping[str, StatePath], prefix: str) -> dict[str, StatePath]:
    """Where entries go, by fqn: their paths without a beginning that some of them have.

    Raises UnsupportedValueError where two entries would have one name, or one would be below another.
    """
    found = {fqn: _without(path, prefix) for fqn, path in paths.items()}
    above = {tuple(map(str, path[:depth])) for path in found.values() for depth in range(1, len(path))}
    taken: dict[str, str] = {}
    for fqn, path in found.items():
        other = taken.setdefault(path.fqn, fqn)
        if other != fqn or tuple(map(str, path)) in above:
            clash = f"{other!r} has, too" if other != fqn else "others are below"
            raise UnsupportedValueError(
                f"without {prefix!r} {fqn!r} has the name {path.fqn!r}, which {clash}: export a part of them"
            )
    return found


def _without(path: StatePath, prefix: str) -> StatePath:
    if not prefix or not path.fqn.startswith(f"{prefix}."):
        return path
    left = len(prefix) + 1
    for depth, part in enumerate(map(str, path)):
        if left == 0:
            return _below(path, path.keys[depth:], depth)
        if left <= len(part):  # it ends within a key that has dots
            return _below(path, (part[left:], *path.keys[depth + 1 :]), depth)
        left -= len(part) + 1
    raise AssertionError(path)


def _below(path: StatePath, keys: Sequence[object], depth: int) -> StatePath:
    containers = path.containers[depth:]
    # What is outermost is a dict.
    return StatePath(keys, (DICT if containers[0] == LIST else containers[0], *containers[1:]))


def local_path(target: str | os.PathLike[str]) -> str:
    """Where an export goes. Raises StorageError for a url, which other libraries' files are not written to."""
    path = os.fspath(target)
    if "://" in path:
        raise StorageError(f"{path} is a url; exports are written to local files: copy them there, or use copy_to")
    return path


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
