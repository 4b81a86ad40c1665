"""``load(rename=...)``: give the entries of a checkpoint their names in the state."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence

from zarrckpt._errors import KeyMismatchError
from zarrckpt._format.matching import hint
from zarrckpt._format.module_versions import rename_versions
from zarrckpt._format.state_path import DICT, StatePath
from zarrckpt._state.saved_entries import KeyPattern, SavedEntries, rest_below

Rename = Mapping[str, str] | Callable[[str], str]
"""A dict from name prefixes in the checkpoint to prefixes in the state, or a function of a name."""


def rename_entries(
    saved: SavedEntries, rename: Rename, trained: Sequence[tuple[KeyPattern, KeyPattern]]
) -> SavedEntries:
    """Return the entries of a checkpoint under new names, in the same order.

    ``trained`` has, for each optimizer in the state, the keys of the optimizer and of its module. If a parameter is
    renamed in the module, its optimizer state is renamed, too.

    Raises KeyMismatchError if two entries get the same name, if modules of different versions do, or if no entry has a
    prefix.
    """
    names = new_names(saved.entries, rename)
    parameters: dict[KeyPattern, dict[str, str]] = {}
    for optimizer, module in trained:
        own = parameters[optimizer] = _new_parameters(names, module)
        names = {old: _in_optimizer(new, optimizer, own) for old, new in names.items()}
    stored = old_names(names)
    return dataclasses.replace(
        saved,
        entries={new: saved.entries[old] for new, old in stored.items()},
        paths={new: _new_path(saved.paths[old], new) for new, old in stored.items()},
        value=lambda name: saved.value(stored[name]),
        stored=stored,
        parameters=parameters,
        versions=rename_versions(saved.versions, names),
    )


def check_rename(rename: object) -> None:
    """Raise TypeError if an argument ``rename`` is neither None nor a Rename."""
    if rename is not None and not isinstance(rename, Mapping) and not callable(rename):
        raise TypeError(f"rename must be a dict of name prefixes or a callable, got a {type(rename).__name__}")


def old_names(names: Mapping[str, str]) -> dict[str, str]:
    """Return the inverse of :func:`new_names`. Raises KeyMismatchError if two entries get the same name."""
    found: dict[str, str] = {}
    for old, new in names.items():
        if (other := found.setdefault(new, old)) != old:
            raise KeyMismatchError(
                f"rename= gives two entries of the checkpoint the name {new!r}: {other!r} and {old!r}. Nothing was "
                "loaded. Give one of them a different name"
            )
    return found


def new_names(entries: Collection[str], rename: Rename) -> dict[str, str]:
    """Return the new name of each entry, by old name. Raises KeyMismatchError if no entry has a prefix."""
    if not isinstance(rename, Mapping):
        renamed = {name: rename(name) for name in entries}
        for old, new in renamed.items():
            if not isinstance(new, str) or not new:
                raise KeyMismatchError(
                    f"rename({old!r}) returned {new!r}, expected a non-empty str, the entry's name in the state"
                )
        return renamed
    longest_first = sorted(rename, key=len, reverse=True)
    used = set()
    names = {}
    for name in entries:
        prefix = next((prefix for prefix in longest_first if _has_prefix(name, prefix)), None)
        used.add(prefix)
        names[name] = name if prefix is None else f"{rename[prefix]}{name[len(prefix) :]}"
    if idle := [prefix for prefix in rename if prefix not in used]:
        raise KeyMismatchError(
            f"nothing was loaded, because no entry of the checkpoint begins with the prefixes {idle} of rename=: "
            f"{hint(idle[0].rstrip('.'), entries)}"
        )
    return names


def _has_prefix(name: str, prefix: str) -> bool:
    whole_keys = prefix if not prefix or prefix.endswith(".") else f"{prefix}."
    return name == prefix or name.startswith(whole_keys)


def _new_parameters(names: Mapping[str, str], module: KeyPattern) -> dict[str, str]:
    """Return the new names of a module's renamed parameters, by old name.

    Assumes that the module has the same number of keys above it in the checkpoint as in the state.
    """
    found = {}
    for old, new in names.items():
        own = rest_below(new, module) if old != new else None
        before = rest_below(old, (None,) * len(module))
        if own is not None and before is not None and own != before:
            found[before] = own
    return found


def _in_optimizer(name: str, optimizer: KeyPattern, parameters: Mapping[str, str]) -> str:
    rest = rest_below(name, (*optimizer, "state")) if parameters else None
    end = len(rest) if rest is not None else 0
    while rest is not None and (end := rest.rfind(".", 0, end)) > 0:
        if (new := parameters.get(rest[:end])) is not None:
            return f"{name[: len(name) - len(rest)]}{new}{rest[end:]}"
    return name


def _new_path(path: StatePath, name: str) -> StatePath:
    """Return the path for a new name. The key of a stack that has one tensor per rank is not renamed."""
    if path.fqn == name:
        return path
    level = path.rank_at
    if level is None:
        return StatePath(*_new_keys(path, name))
    above, rank, below = f".{name}.".partition(f".{path[level]}.")
    above, below = above.removeprefix("."), below.removesuffix(".")
    if not rank or bool(above) != bool(level) or bool(below) != (level + 1 < len(path)):
        raise KeyMismatchError(
            f"rename= gives {path.fqn!r} the name {name!r}, expected a name that contains the key {path[level]!r}, "
            "because the entry has one tensor per rank"
        )
    first = _new_keys(StatePath(path.keys[:level], path.containers[:level]), above) if above else ((), ())
    last = _new_keys(StatePath(path.keys[level + 1 :], path.containers[level + 1 :]), below) if below else ((), ())
    keys = (*first[0], path.keys[level], *last[0])
    return StatePath(keys, (*first[1], path.containers[level], *last[1]), path.ranks, len(first[0]))


def _new_keys(path: StatePath, name: str) -> tuple[tuple[object, ...], tuple[str, ...]]:
    """Return the keys of a new name and their container types. Equal keys at the beginning and the end are kept."""
    first = 0
    while first < len(path) - 1 and f"{name}.".startswith(f"{'.'.join(map(str, path[: first + 1]))}."):
        first += 1
    rest = name[sum(len(str(key)) + 1 for key in path[:first]) :]
    last = len(path)
    while last > first and f".{rest}".endswith(f".{'.'.join(map(str, path[last - 1 :]))}"):
        last -= 1
    tail = "".join(f".{key}" for key in path[last:])
    middle = f".{rest}"[: len(rest) + 1 - len(tail)].removeprefix(".")
    # A single key with dots stays a single key, as in the state of a module.
    is_one = last - first == 1 and "." in str(path[first])
    new = [middle] if is_one else [key for key in middle.split(".") if key]
    keys = (*path.keys[:first], *new, *path.keys[last:])
    return keys, (*path.containers[:first], *[DICT] * len(new), *path.containers[last:])
