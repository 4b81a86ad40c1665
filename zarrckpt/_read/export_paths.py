"""Choose the names of entries in an export: unchanged, or without a prefix. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from zarrckpt._errors import UnsupportedValueError
from zarrckpt._format.state_path import DICT, LIST, StatePath
from zarrckpt._read.selection import Selection, catalog_of

MAX_EXPORT_BYTES = 128 << 20
"""Default bound of the memory for an export's data in flight."""


def export_paths(entries: Selection, prefix: str) -> dict[str, StatePath]:
    """Return fqn -> path in the export. Paths that begin with the prefix lose it, and the others are unchanged.

    Raises UnsupportedValueError if two entries would have one name, or one entry would be below another.
    """
    found = {fqn: _without(catalog_of(entries).root.state_path(fqn), prefix) for fqn in entries}
    above = {tuple(map(str, path[:depth])) for path in found.values() for depth in range(1, len(path))}
    taken: dict[str, str] = {}
    for fqn, path in found.items():
        other = taken.setdefault(path.fqn, fqn)
        if other != fqn or tuple(map(str, path)) in above:
            clash = f"and so has {other!r}" if other != fqn else "and others are below it"
            raise UnsupportedValueError(
                f"without {prefix!r} the entry {fqn!r} has the name {path.fqn!r}, {clash}: export a part of the entries"
            )
    return found


def _without(path: StatePath, prefix: str) -> StatePath:
    if not prefix or not path.fqn.startswith(f"{prefix}."):
        return path
    left = len(prefix) + 1
    for depth, part in enumerate(map(str, path)):
        if left == 0:
            return _path_below(path, path.keys[depth:], depth)
        if left <= len(part):  # the prefix ends within a key that has dots
            return _path_below(path, (part[left:], *path.keys[depth + 1 :]), depth)
        left -= len(part) + 1
    raise AssertionError(path)


def _path_below(path: StatePath, keys: Sequence[object], depth: int) -> StatePath:
    containers = path.containers[depth:]
    # The outermost container is always a dict.
    return StatePath(keys, (DICT if containers[0] == LIST else containers[0], *containers[1:]))
