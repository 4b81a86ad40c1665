"""Dicts and lists that a load builds from saved entries and their paths."""

from __future__ import annotations

import copy
from collections.abc import Mapping, MutableMapping
from typing import Any, NamedTuple

from zarrckpt._format.module_versions import Versions, put_versions
from zarrckpt._format.state_path import DICT, LIST, ORDERED_DICT, StatePath, with_shared_nans
from zarrckpt._state.flatten import new_dict

Rows = list[tuple[StatePath, Any]]
"""Items of a container, with their paths in the state."""


class ContainerLocation(NamedTuple):
    """The location of a container in the target: its keys and the container types above it, then its type if known."""

    keys: tuple[Any, ...]
    containers: tuple[str, ...]


def move_path(path: StatePath, stem: str, start: StatePath | ContainerLocation) -> StatePath | None:
    """Return a path with ``start`` instead of its keys up to ``stem``, or None if ``stem`` is not on the path."""
    for depth in range(1, len(path) + 1):
        if path.stem(depth) == stem:
            known = depth + len(start.containers) - len(start.keys)
            return StatePath((*start.keys, *path.keys[depth:]), (*start.containers, *path.containers[known:]))
    return None


def rebuild(old: Any, rows: Rows, depth: int, in_place: bool, versions: Versions) -> Any:
    """Return the container that the rows' paths describe from ``depth`` on. It has the type of the old container.

    State dicts get their versions of modules.

    With ``in_place``, change and return the old container, and the containers inside it.
    """
    if len(rows) == 1 and len(rows[0][0].keys) == depth:
        value = rows[0][1]
        is_emptied = isinstance(value, Mapping) and not value and isinstance(old, MutableMapping)
        return _fill_container(old, {}, in_place) if is_emptied else value
    groups: dict[Any, Rows] = {}
    for path, value in rows:
        groups.setdefault(with_shared_nans(path.keys[depth]), []).append((path, value))
    children = {}
    for group in groups.values():
        key: Any = group[0][0].keys[depth]
        children[key] = rebuild(_item(old, key), group, depth + 1, in_place, versions)
    kind, own = rows[0][0].containers[depth], versions.get(rows[0][0].stem(depth)) if versions else None
    if kind == LIST:
        items = [children[position] for position in sorted(children)]
        if not in_place or type(old) is not list:
            return items
        old[:] = items
        return old
    if isinstance(old, MutableMapping) and (kind == DICT or type(old) is not dict):
        filled = _fill_container(old, children, in_place)
        if own is not None:
            put_versions(filled, own)
        return filled
    return new_dict(children, kind == ORDERED_DICT, own)


def _item(container: Any, key: Any) -> Any:
    if isinstance(container, Mapping):
        return container.get(key)
    is_inside = isinstance(container, list) and isinstance(key, int) and key < len(container)
    return container[key] if is_inside else None


def _fill_container(
    old: MutableMapping[Any, Any], children: dict[Any, Any], in_place: bool
) -> MutableMapping[Any, Any]:
    # A copy keeps attributes: the factory of a defaultdict, the metadata of a module's state.
    filled = old if in_place else copy.copy(old)
    filled.clear()
    filled.update(children)
    return filled
