"""The names of entries in an export: their own, or without a prefix that some of them have. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from zarrckpt._errors import UnsupportedValueError
from zarrckpt._format.state_path import DICT, LIST, StatePath

MAX_EXPORT_BYTES = 128 << 20
"""Memory for what is on its way, unless the caller says otherwise."""


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
            return _path_below(path, path.keys[depth:], depth)
        if left <= len(part):  # it ends within a key that has dots
            return _path_below(path, (part[left:], *path.keys[depth + 1 :]), depth)
        left -= len(part) + 1
    raise AssertionError(path)


def _path_below(path: StatePath, keys: Sequence[object], depth: int) -> StatePath:
    containers = path.containers[depth:]
    # What is outermost is a dict.
    return StatePath(keys, (DICT if containers[0] == LIST else containers[0], *containers[1:]))
