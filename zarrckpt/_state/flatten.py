"""Flatten a nested state dict to fqns and rebuild it. Keeps key types and empty dicts, which DCP's flattening loses."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from zarrckpt._errors import UnsupportedValueError
from zarrckpt._format import json_values
from zarrckpt._format.hashes import MAX_EQUAL_HASHES, hashes_collide
from zarrckpt._format.module_versions import Versions, put_versions, versions_of
from zarrckpt._format.state_path import DICT, LIST, ORDERED_DICT, StatePath, is_key, with_shared_nans
from zarrckpt._format.values import EncodedValue
from zarrckpt._state.local_boxes import LocalBoxes
from zarrckpt._state.torch_kinds import FSDP1_SEGMENT, WRAPPER_SEGMENTS


class OwnRank(dict[str, Any]):
    """The state of one rank (PerRank), by the number of the rank."""


def flatten(
    state: Mapping[Any, Any],
) -> tuple[dict[str, Any], dict[str, StatePath], dict[StatePath, dict[str, int]]]:
    """Return the leaves and the state paths of a state, both by fqn, with DCP's rules for leaves.

    Also returns the versions of modules of each state dict that has some, by its path.

    Dicts are flattened, and lists if they hold tensors or dicts at any depth. Tuples are leaves. Unlike in DCP, empty
    dicts are entries, and the types of keys and OrderedDicts are kept. Raises UnsupportedValueError for two entries
    with one fqn and for keys that JSON cannot represent.
    """
    leaves: dict[str, Any] = {}
    paths: dict[str, StatePath] = {}
    versions: dict[StatePath, dict[str, int]] = {}

    def walk(value: Any, keys: tuple[object, ...], containers: tuple[str, ...], rank_at: int | None) -> None:
        if isinstance(value, torch.Tensor):  # first, because most are tensors and the check for Mapping is slower
            add_leaf(value, keys, containers, rank_at)
        elif isinstance(value, Mapping) and (value or not keys):
            if len({*map(with_shared_nans, value)}) < len(value):
                raise UnsupportedValueError(f"{'.'.join(map(str, keys))!r} has NaN as a key more than once: rename one")
            if hashes_collide(value):
                raise UnsupportedValueError(
                    f"{'.'.join(map(str, keys))!r} has more than {MAX_EQUAL_HASHES} keys with equal "
                    "hashes, and readers refuse that: use strings as keys"
                )
            # A load fills the user's own state, so the type of the outermost dict does not matter.
            inner = (*containers, ORDERED_DICT if type(value) is OrderedDict and keys else DICT)
            # A PerRank inside another one belongs to the same rank, so the outermost one counts.
            if rank_at is None and isinstance(value, OwnRank):
                rank_at = len(keys)
            if (own := versions_of(value)) is not None:
                versions[StatePath(keys, containers, (), rank_at)] = own | _unwrapped(own, value)
            for key, item in value.items():
                _check_key(key, keys)
                walk(item, (*keys, key), inner, rank_at)
        elif isinstance(value, list) and is_flattened(value):
            inner = (*containers, LIST)
            for position, item in enumerate(value):
                walk(item, (*keys, position), inner, rank_at)
        elif isinstance(value, Mapping) and type(value) is not OrderedDict:
            add_leaf({}, keys, containers, rank_at)  # an empty dict of any type, as one with entries becomes a dict too
        else:
            add_leaf(value, keys, containers, rank_at)

    def add_leaf(value: Any, keys: tuple[object, ...], containers: tuple[str, ...], rank_at: int | None) -> None:
        path = StatePath(keys, containers, (), rank_at)
        fqn = path.fqn
        if fqn in leaves:
            raise UnsupportedValueError(
                f"two entries have the name {fqn!r}, with keys {paths[fqn].keys} and {path.keys}: rename one"
            )
        leaves[fqn], paths[fqn] = value, path

    walk(state, (), (), None)
    return leaves, paths, versions


def _unwrapped(versions: Mapping[str, int], keys: Iterable[Any]) -> dict[str, int]:
    """Return the versions of wrapped modules by the paths in the keys of their state dict.

    torch's ``get_model_state_dict`` and activation checkpointing remove wrappers only from the keys.
    """
    wrapped = {path: version for path, version in versions.items() if not _WRAPPERS.isdisjoint(path.split("."))}
    if not wrapped:
        return {}
    in_keys = {"", *(stem for key in keys for stem in stems(str(key).rpartition(".")[0]))}
    path_of = {_without_wrappers(path): path for path in in_keys}
    others = {_without_wrappers(path): version for path, version in wrapped.items() if path not in in_keys}
    return {path_of[plain]: version for plain, version in others.items() if plain in path_of}


def _without_wrappers(path: str) -> str:
    return ".".join(segment for segment in path.split(".") if segment not in _WRAPPERS)


_WRAPPERS = WRAPPER_SEGMENTS | {FSDP1_SEGMENT, "module"}  # the last one is DistributedDataParallel's


def _check_key(key: object, above: tuple[object, ...]) -> None:
    if not is_key(key) or json_values.encode_json(key) is json_values.NOT_JSON:
        # Python refuses to convert very long integers to text.
        shown = f"{key!r:.200} " if isinstance(key, str) else ""
        raise UnsupportedValueError(
            f"the key {shown}below {'.'.join(map(str, above))!r:.200} is a {type(key).__name__} that cannot be stored "
            "as a key: use strings of Unicode characters, or integers"
        )


def is_flattened(items: list[Any]) -> bool:
    """Whether a list is flattened instead of kept as a leaf. DCP's rule, extended to LocalBoxes."""
    return any(
        isinstance(item, (torch.Tensor, Mapping))
        or (isinstance(item, list) and is_flattened(item))
        or hasattr(type(item), "__create_write_items__")
        or isinstance(item, LocalBoxes)
        or (isinstance(item, EncodedValue) and item.is_empty)
        for item in items
    )


def stems(name: str) -> Iterator[str]:
    """Yield the part of a flat name before each dot, shortest first, then the whole name."""
    end = name.find(".")
    while end >= 0:
        yield name[:end]
        end = name.find(".", end + 1)
    yield name


def get_leaf(state: Any, path: StatePath) -> Any:
    """Return one entry of a nested state."""
    for key in path.keys:
        state = state[key]
    return state


def set_leaf(state: Any, path: StatePath, value: Any) -> None:
    """Replace one entry of a nested state in place. Its containers must exist."""
    for key in path.keys[:-1]:
        state = state[key]
    state[path.keys[-1]] = value


def copy_containers(state: Any, path: StatePath, copied: set[tuple[Any, ...]]) -> None:
    """Replace the containers above one entry by copies, except those in ``copied``, and add them to ``copied``.

    Two paths can lead to one list. An entry that is set below one path must not appear below the other.
    """
    for depth, key in enumerate(path.keys[:-1], 1):
        if path.keys[:depth] not in copied:
            copied.add(path.keys[:depth])
            state[key] = copy.copy(state[key])
        state = state[key]


def build(entries: Iterable[tuple[StatePath, Any]], versions: Versions, depth: int = 0) -> Any:
    """Return the nested state of entries below ``depth`` of their paths. The paths are equal above this depth.

    State dicts get their versions of modules.
    """
    rows = [(path, value) for path, value in entries]
    if len(rows) == 1 and len(rows[0][0].keys) == depth:
        return rows[0][1]
    groups: dict[Any, list[tuple[StatePath, Any]]] = {}
    for path, value in rows:
        groups.setdefault(with_shared_nans(path.keys[depth]), []).append((path, value))
    children = {key: build(group, versions, depth + 1) for key, group in groups.items()}
    kind, own = rows[0][0].containers[depth], versions.get(rows[0][0].stem(depth)) if versions else None
    if kind == LIST:
        return [children[position] for position in sorted(children)]
    return new_dict(children, kind == ORDERED_DICT, own)


def new_dict(items: dict[Any, Any], is_ordered: bool, versions: Mapping[str, int] | None) -> dict[Any, Any]:
    """Return the items as an OrderedDict, or as a dict if they need none. A state dict gets its versions of modules."""
    if not is_ordered and versions is None:
        return items
    made = OrderedDict(items)
    if versions is not None:
        put_versions(made, versions)
    return made
