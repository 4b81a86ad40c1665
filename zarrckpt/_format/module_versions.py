"""Versions of modules: the integers that torch keeps in the ``_metadata`` of a state dict. No I/O, no torch.

A module converts old entries if the version beside them differs from its own. Other members of ``_metadata`` are
neither stored nor given back, because some change how a module loads.
"""

from __future__ import annotations

import bisect
import itertools
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeGuard

from zarrckpt._errors import KeyMismatchError, warn
from zarrckpt._format.state_path import is_unicode

Versions = Mapping[str, Mapping[str, int]]
"""The version of each module by its path, by the flat name of the state dict. The paths are relative to it."""

StoredVersions = Mapping[str, Mapping[str, int | None]]
"""The versions that differ from the default, as the root document has them. None: the module has no version."""

_MAX_LEVELS = 128
"""Maximum number of levels in the flat name of a module with the default version, which bounds forged documents."""

_LIMIT = 1 << 63


def versions_of(state_dict: Any) -> dict[str, int] | None:
    """Return the versions in a state dict's ``_metadata``, or None if it has none. Warns of other than integers."""
    metadata = getattr(state_dict, "_metadata", None)
    if not isinstance(metadata, Mapping):
        return None
    found = {}
    for path, row in metadata.items():
        version = row.get("version") if isinstance(row, Mapping) else None
        if type(path) is str and is_unicode(path) and _is_version(version):
            found[path] = version
        elif version is not None:
            warn(f"module {path!r:.200} has the version {version!r:.80}, which checkpoints cannot keep: use an integer")
    return found


def put_versions(state_dict: Any, versions: Mapping[str, int]) -> None:
    """Give a state dict these versions in its ``_metadata``, if its class allows attributes. A plain dict does not.

    Other members of modules in its own ``_metadata``, which hooks add, are kept.
    """
    if hasattr(state_dict, "__dict__"):
        own = getattr(state_dict, "_metadata", None) or {}
        rows = ((path, {**own.get(path, {}), "version": version}) for path, version in versions.items())
        state_dict._metadata = OrderedDict(rows)


def flat_versions(versions: Versions) -> dict[str, int]:
    """Return the versions of modules by flat name."""
    return {module_name(above, path): version for above, own in versions.items() for path, version in own.items()}


def module_name(state_dict: str, path: str) -> str:
    """Return the flat name of a module from its path in a state dict with a flat name."""
    return f"{state_dict}.{path}" if state_dict and path else state_dict or path


def begins_one(name: str, ascending: Sequence[str]) -> bool:
    """Whether one of the sorted names of entries is below a flat name."""
    prefix = f"{name}." if name else ""
    at = bisect.bisect_left(ascending, prefix)
    return at < len(ascending) and ascending[at].startswith(prefix)


def compact(versions: Versions, names: Iterable[str]) -> dict[str, dict[str, int | None]]:
    """Return the stored form of versions. ``names`` are those of all entries. State dicts without entries are left out.

    By default each level of a name below a state dict is a module of version 1.
    """
    ascending = sorted(names)
    known = {name: own for name, own in versions.items() if begins_one(name, ascending)}
    stored = {}
    for name, default in _defaults(known, ascending).items():
        own = known[name]
        paths = {**default, **own}
        stored[name] = {path: own.get(path) for path in sorted(paths) if own.get(path) != default.get(path)}
    return stored


def expand(stored: StoredVersions, names: Iterable[str]) -> dict[str, dict[str, int]]:
    """Return the versions from their stored form. ``names`` are those of all entries."""
    return {
        name: {path: version for path, version in {**default, **stored[name]}.items() if version is not None}
        for name, default in _defaults(stored, names).items()
    }


def _defaults(state_dicts: Iterable[str], names: Iterable[str]) -> dict[str, dict[str, int]]:
    """Return the default version of each level of the names below each state dict."""
    found = {name: {"": 1} for name in state_dicts}
    parents = dict.fromkeys(name.rpartition(".")[0] for name in names) if found else {}
    for parent in parents:
        levels = parent.split(".", _MAX_LEVELS)[:_MAX_LEVELS] if parent else []
        for depth in range(len(levels)):
            if (own := found.get(".".join(levels[:depth]))) is not None:
                own.update(dict.fromkeys(itertools.accumulate(levels[depth:], "{}.{}".format), 1))
    return found


def rename_versions(versions: Versions, names: Mapping[str, str]) -> dict[str, dict[str, int]]:
    """Return versions under new names. ``names`` has the new name of each entry by its old name.

    A module gets the name above its own entries, and one without entries that of the module above it. Raises
    KeyMismatchError if modules of different versions get one name.
    """
    moved: dict[str, dict[str, int]] = {}
    """The new names of each module with entries, and the distance to the nearest entry."""
    state_dicts = set()
    for old, new in names.items():
        before, after = old.split("."), new.split(".")
        # The last key may be renamed, too. The levels above it belong together as long as their names are equal.
        equal = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(before[-2::-1], after[-2::-1], strict=False))
        found = {}
        for distance in range(1, sum(1 for _ in equal) + 2):
            name, other = ".".join(before[:-distance]), ".".join(after[:-distance])
            found[name] = other
            known = moved.setdefault(name, {})
            known[other] = min(known.get(other, distance), distance)
        above = (".".join(before[:depth]) for depth in range(len(before)))
        state_dicts |= {found.get(name, other) for name in above if name in versions}
    nearest: dict[str, tuple[int, str, int]] = {}
    """For each new name, the distance to the nearest entry, and the old name and the version of its module."""
    for name, version in flat_versions(versions).items():
        for other, distance in _moved_names(name, moved):
            known_distance, old, found_version = nearest.get(other, (distance + 1, name, version))
            if distance == known_distance and version != found_version:
                raise KeyMismatchError(
                    f"rename= gives the name {other!r} to {old!r} and {name!r}, which are modules of the versions "
                    f"{found_version} and {version}. Nothing was loaded. Load them one after the other"
                )
            if distance < known_distance:
                nearest[other] = (distance, name, version)
    return _grouped({other: version for other, (_, _, version) in nearest.items()}, state_dicts)


def _moved_names(name: str, moved: Mapping[str, Mapping[str, int]]) -> Iterator[tuple[str, int]]:
    """Yield the new names of a module, and the distance to the nearest entry."""
    levels = name.split(".") if name else []
    for depth in range(len(levels), -1, -1):
        if (others := moved.get(".".join(levels[:depth]))) is not None:
            rest = ".".join(levels[depth:])
            yield from (
                (module_name(other, rest), distance + len(levels) - depth) for other, distance in others.items()
            )
            return


def _grouped(modules: Mapping[str, int], state_dicts: Collection[str]) -> dict[str, dict[str, int]]:
    """Return the versions of modules by their path in each state dict above them."""
    grouped: dict[str, dict[str, int]] = {name: {} for name in state_dicts}
    for module, version in modules.items():
        levels = module.split(".") if module else []
        for depth in range(len(levels) + 1):
            if (own := grouped.get(".".join(levels[:depth]))) is not None:
                own[".".join(levels[depth:])] = version
    return grouped


def _is_version(version: object) -> TypeGuard[int]:
    return type(version) is int and -_LIMIT <= version < _LIMIT
