"""Containers that a load rebuilds as they were saved, with more, fewer or other entries than the targets have.

A load fills the entries that its targets name. Some containers need more: the state of a Stateful or a PerRank is
loaded whole, lists get the saved length, and dicts of values get the keys that they lack. Each such container is a
root in this module. Roots do not overlap. Modules and optimizers have separate rules and are not handled here.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import torch

from zarrckpt._format.state_path import DICT, LIST, ORDERED_DICT, StatePath, with_shared_nans
from zarrckpt._state.flatten import entered, get_leaf, set_leaf
from zarrckpt._state.optimizers import SavedTensor
from zarrckpt._state.torch_kinds import is_dtensor, is_sharded_tensor

Rows = list[tuple[StatePath, Any]]


class ContainerKind(Enum):
    """The rule for a root."""

    STATEFUL = "the state of a Stateful: a new container that equals the saved one"
    PER_RANK = "the value of a PerRank: changed in place to equal the saved one, and its tensors must fit"
    PLAIN = "a nested dict or list of the user: gets the entries that it lacks, and keeps its tensors"


@dataclass
class WholeContainer:
    """One container, and the names of its entries."""

    path: StatePath
    kind: ContainerKind
    targets: list[str] = field(default_factory=list)
    saved: list[str] = field(default_factory=list)
    changed: bool = False
    """Whether it is rebuilt after the load."""


def find_roots(
    state: Mapping[Any, Any], stateful: Collection[str], per_rank: Collection[str], exact: Collection[str]
) -> dict[str, WholeContainer]:
    """Return the roots of a plain state by flat name.

    ``stateful``, ``per_rank`` and ``exact`` are the flat names of the states of Stateful objects, of the values of
    PerRanks, and of modules and optimizers.
    """
    kinds: dict[str, ContainerKind | None] = {
        **dict.fromkeys(per_rank, ContainerKind.PER_RANK),
        **dict.fromkeys(stateful, ContainerKind.STATEFUL),
        **dict.fromkeys(exact),
    }
    above = {stem for name in kinds for stem in stems(name) if stem != name}
    roots: dict[str, WholeContainer] = {}

    def walk(value: Any, keys: tuple[Any, ...], containers: tuple[str, ...], kind: ContainerKind | None) -> None:
        name = ".".join(map(str, keys))
        kind = kinds.get(name, kind)
        if kind is None:
            return
        is_list = isinstance(value, list) and entered(value)
        if keys and (kind is ContainerKind.STATEFUL or name not in above):
            if kind is not ContainerKind.PLAIN or is_list or isinstance(value, Mapping):
                roots[name] = WholeContainer(StatePath(keys, containers), kind)
        elif isinstance(value, Mapping):
            for key, item in value.items():
                walk(item, (*keys, key), (*containers, DICT), kind)
        elif is_list:
            for position, item in enumerate(value):
                walk(item, (*keys, position), (*containers, LIST), kind)

    walk(state, (), (), ContainerKind.PLAIN)
    return roots


def stems(name: str) -> Iterator[str]:
    """Yield the part of a flat name before each dot, shortest first, then the whole name."""
    end = name.find(".")
    while end >= 0:
        yield name[:end]
        end = name.find(".", end + 1)
    yield name


class ContainerLocation(NamedTuple):
    """The location of a container in the target: its keys and the container types above it, then its type if known."""

    keys: tuple[Any, ...]
    containers: tuple[str, ...]


def rooted(path: StatePath, stem: str, own: StatePath | ContainerLocation) -> StatePath | None:
    """Return a path whose keys up to ``stem`` are those of ``own``, or None if ``stem`` is not on the path."""
    for depth in range(1, len(path) + 1):
        if ".".join(map(str, path[:depth])) == stem:
            known = depth + len(own.containers) - len(own.keys)
            return StatePath((*own.keys, *path.keys[depth:]), (*own.containers, *path.containers[known:]))
    return None


def rebuilt(old: Any, rows: Rows, depth: int, in_place: bool) -> Any:
    """Return the container that the rows' paths describe from ``depth`` on. It has the type of the old container.

    With ``in_place``, change and return the old container, and the containers inside it.
    """
    if len(rows) == 1 and len(rows[0][0].keys) == depth:
        value = rows[0][1]
        is_emptied = isinstance(value, Mapping) and not value and isinstance(old, MutableMapping)
        return _filled(old, {}, in_place) if is_emptied else value
    groups: dict[Any, Rows] = {}
    for path, value in rows:
        groups.setdefault(with_shared_nans(path.keys[depth]), []).append((path, value))
    children = {}
    for group in groups.values():
        key: Any = group[0][0].keys[depth]
        children[key] = rebuilt(_item(old, key), group, depth + 1, in_place)
    kind = rows[0][0].containers[depth]
    if kind == LIST:
        items = [children[position] for position in sorted(children)]
        if not in_place or type(old) is not list:
            return items
        old[:] = items
        return old
    if isinstance(old, MutableMapping) and (kind == DICT or type(old) is not dict):
        return _filled(old, children, in_place)
    return OrderedDict(children) if kind == ORDERED_DICT else children


def _item(container: Any, key: Any) -> Any:
    if isinstance(container, Mapping):
        return container.get(key)
    is_inside = isinstance(container, list) and isinstance(key, int) and key < len(container)
    return container[key] if is_inside else None


def _filled(old: MutableMapping[Any, Any], children: dict[Any, Any], in_place: bool) -> MutableMapping[Any, Any]:
    # A copy keeps attributes: the factory of a defaultdict, the metadata of a module's state.
    filled = old if in_place else copy.copy(old)
    filled.clear()
    filled.update(children)
    return filled


class Roots:
    """The roots of one load, matched with the entries of the checkpoint.

    Args:
        roots: the result of :func:`find_roots`. exact, per_rank: its arguments.
        strict: remove entries that the checkpoint lacks from the state of a Stateful or PerRank. Otherwise such entries
            are unchanged.
        allow_cast: fill tensors whose dtype differs from the stored one.
        is_own: called with each name that a root lacks. Returns whether no other rank can have a target for it.
    """

    def __init__(
        self,
        roots: dict[str, WholeContainer],
        *,
        exact: Collection[str] = (),
        per_rank: Collection[str] = (),
        strict: bool = True,
        allow_cast: bool = False,
        is_own: Callable[[str], bool] = lambda name: False,
    ) -> None:
        self._roots = roots
        self.exact, self.per_rank = exact, per_rank
        self.strict, self.allow_cast = strict, allow_cast
        self.is_own = is_own
        self.flat: Mapping[str, Any] = {}
        self.paths: Mapping[str, StatePath] = {}
        self.saved_paths: Mapping[str, StatePath] = {}
        self.added: dict[str, StatePath] = {}
        """The names that are loaded without a target, with their paths in the state."""
        self.offered: dict[str, StatePath] = {}
        """The names that are loaded if no rank has a target for them, with their paths in the state."""
        self.dropped: dict[str, Any] = {}
        """The targets that the loaded state does not have, by name."""
        self.lost: list[str] = []
        """The names of dropped tensors. The checkpoint has their Stateful or PerRank, but not these tensors."""

    def fit(
        self,
        flat: Mapping[str, Any],
        paths: Mapping[str, StatePath],
        selected: dict[str, Any],
        entries: Mapping[str, SavedTensor | None],
        asked: Iterable[str],
        saved_paths: Mapping[str, StatePath],
    ) -> None:
        """Compare the targets with the entries of the checkpoint, and update ``selected``.

        ``asked`` has the names in the checkpoint that the load requests.
        """
        if not self._roots:
            return
        self.flat, self.paths, self.saved_paths = flat, paths, saved_paths
        for name in selected:
            if (root := self._root_of(name)) is not None:
                root.targets.append(name)
        for name in asked:
            if (root := self._root_of(name)) is not None:
                root.saved.append(name)
        for stem, root in self._roots.items():
            if root.saved:
                _Fit(self, stem, root, selected, entries).run()
        for name in self.dropped:
            selected.pop(name, None)
        for name in self.added:
            selected.setdefault(name, None)

    def _root_of(self, name: str) -> WholeContainer | None:
        found = None
        for stem in stems(name):
            if stem in self.exact:
                return None
            found = found or self._roots.get(stem)
        return found

    def take(self, names: Iterable[str]) -> dict[str, StatePath]:
        """Mark offered names as loaded, and return their paths in the state."""
        taken = {name: self.offered[name] for name in names if name in self.offered}
        for name in taken:
            root = self._root_of(name)
            assert root is not None
            root.changed = True
        return taken

    def is_rebuilt(self, name: str) -> bool:
        """Whether an entry belongs to a container that :meth:`put` rebuilds."""
        root = self._root_of(name) if self._roots else None
        return root is not None and root.changed

    def put(self, state: Any, loaded: Mapping[str, Any], paths: Mapping[str, StatePath]) -> None:
        """Rebuild the containers that change. ``loaded`` has the loaded items by name, in the checkpoint's order."""
        rows: dict[str, Rows] = {stem: [] for stem, root in self._roots.items() if root.changed}
        kept: dict[str, Rows] = {stem: [] for stem in rows}
        for name, value in loaded.items():
            stem = next((stem for stem in stems(name) if stem in rows), None)
            if stem is not None and self.is_rebuilt(name):
                root = self._roots[stem]
                saved = None if root.kind is ContainerKind.PLAIN else rooted(self.saved_paths[name], stem, root.path)
                rows[stem].append((saved or paths[name], value))
        loaded_stems = {stem for name in loaded for stem in stems(name)}
        for name, value in self.flat.items():
            stem = next((stem for stem in stems(name) if stem in rows), None)
            if stem is None or name in self.dropped or name in loaded_stems:
                continue
            exact = next((stem for stem in stems(name) if stem in self.exact), None)
            if exact is None:
                kept[stem].append((self.paths[name], value))
                continue
            path, depth = self.paths[name], exact.count(".") + 1
            while ".".join(map(str, path[:depth])) != exact:
                depth -= 1
            path = StatePath(path.keys[:depth], path.containers[:depth])
            if all(path.keys != other.keys for other, _ in kept[stem]):
                kept[stem].append((path, get_leaf(state, path)))
        for stem, root in self._roots.items():
            if root.changed and rows[stem]:
                both = [*kept[stem], *rows[stem]] if root.kind is ContainerKind.PLAIN else [*rows[stem], *kept[stem]]
                old = get_leaf(state, root.path)
                set_leaf(state, root.path, rebuilt(old, both, len(root.path), root.kind is not ContainerKind.STATEFUL))


class _Fit:
    """The comparison of one root with the checkpoint."""

    def __init__(
        self,
        roots: Roots,
        stem: str,
        root: WholeContainer,
        selected: dict[str, Any],
        entries: Mapping[str, SavedTensor | None],
    ) -> None:
        self._roots, self._stem, self._root = roots, stem, root
        self._selected, self._entries = selected, entries
        self._whole = root.kind is not ContainerKind.PLAIN
        self._targets = {name for name in root.targets if name in roots.flat}
        """The names of targets, without entries below a target that stands for a whole subtree."""
        self._containers: dict[str, ContainerLocation] = {}

    def run(self) -> None:
        """Determine the added, offered and dropped names. Tensors of a Stateful that do not fit get new memory."""
        root, entries = self._root, self._entries
        root.changed = self._whole
        if root.kind is ContainerKind.STATEFUL:
            for name in self._targets & entries.keys():
                if not self._fits(self._selected[name], entries[name]):
                    self._selected[name] = None
        extra = [name for name in root.saved if name not in self._roots.flat and name not in self._selected]
        lacking = [name for name in root.targets if name not in entries]
        if not extra and not lacking:
            return
        self._find_containers()
        self._saved_stems = {stem for name in root.saved for stem in stems(name)}
        self._replace_lists()
        self._add([name for name in extra if name not in self._roots.added])
        for name in lacking:
            if name not in self._roots.dropped:
                self._leave_out(name)

    def _fits(self, target: Any, entry: SavedTensor | None) -> bool:
        if not isinstance(target, torch.Tensor) or _is_sharded(target):
            return True
        is_same_form = entry is not None and tuple(target.shape) == entry.shape
        return is_same_form and (self._roots.allow_cast or entry is None or target.dtype == entry.dtype)

    def _find_containers(self) -> None:
        for name in self._roots.flat if self._whole else self._targets:
            if name.startswith(f"{self._stem}.") and (path := self._roots.paths.get(name)) is not None:
                for depth in range(len(self._root.path), len(path)):
                    stem = ".".join(map(str, path[:depth]))
                    self._containers[stem] = ContainerLocation(path.keys[:depth], path.containers[: depth + 1])

    def _replace_lists(self) -> None:
        """Replace dicts by saved lists, and lists by saved dicts."""
        for name in self._root.saved:
            saved = self._roots.saved_paths[name]
            for stem in stems(name):
                own = self._containers.get(stem)
                path = None if own is None else rooted(saved, stem, ContainerLocation(own.keys, own.containers[:-1]))
                if own is None or path is None or len(path) == len(own.keys):
                    continue
                if (own.containers[-1] == LIST) != (path.containers[len(own.keys)] == LIST):
                    if self._drop_below(stem):
                        self._note(name, path)
                    break

    def _drop_below(self, stem: str) -> bool:
        """Drop all targets at and below a name, and return True. In a plain root with tensors, only return False."""
        below = [name for name in self._targets if name == stem or name.startswith(f"{stem}.")]
        if not self._whole and any(isinstance(self._selected.get(name), torch.Tensor) for name in below):
            return False
        self._roots.dropped.update((name, self._selected.get(name)) for name in below if name not in self._entries)
        self._root.changed = True
        return True

    def _add(self, extra: list[str]) -> None:
        gets_keys = self._whole or any(map(self._is_value, self._targets))
        items: dict[str, list[tuple[int, str, StatePath]]] = {}
        for name in extra:
            if name in self._containers:
                self._replace(name)
                continue
            above = [stem for stem in stems(name) if stem != name]
            leaf = next((stem for stem in above if stem in self._targets), None)
            if leaf is not None and self._root.kind is not ContainerKind.STATEFUL:
                continue
            stem = next((stem for stem in reversed(above) if stem in self._containers), None)
            own = self._root.path if stem is None else self._containers[stem]
            path = rooted(self._roots.saved_paths[name], stem or self._stem, own)
            if path is None:
                continue
            if leaf is not None:
                self._roots.dropped[leaf] = self._selected.get(leaf)
                self._note(name, path)
            elif stem is not None and own.containers[-1] == LIST:
                position = path.keys[len(own.keys)]
                if isinstance(position, int):
                    items.setdefault(stem, []).append((position, name, path))
            elif gets_keys:
                self._note(name, path, offered=not self._roots.is_own(name))
        for stem, found in items.items():
            self._add_items(stem, found)

    def _note(self, name: str, path: StatePath, offered: bool = False) -> None:
        (self._roots.offered if offered else self._roots.added)[name] = path
        if not offered:
            self._root.changed = True

    def _add_items(self, stem: str, found: list[tuple[int, str, StatePath]]) -> None:
        depth = len(self._containers[stem].keys)
        own = {
            path.keys[depth]
            for name in self._targets
            if name.startswith(f"{stem}.")
            for path in [self._roots.paths[name]]
        }
        known = len(own)
        # keys= may exclude items. Items after such a gap have no position, and are not loaded.
        for position in sorted({position for position, _, _ in found}):
            known += position == known
        for position, name, path in found:
            if position < known:
                self._note(name, path)

    def _replace(self, name: str) -> None:
        """Replace a container by a saved value or tensor."""
        if self._drop_below(name):
            own = self._containers[name]
            self._note(name, StatePath(own.keys, own.containers[:-1]))

    def _leave_out(self, name: str) -> None:
        """Drop a target that the checkpoint lacks, if its container must equal the saved one."""
        target = self._selected[name]
        items = self._items(name)
        gone = next((item for item in items if item not in self._saved_stems), None)
        if gone is not None:
            self._drop_below(gone)
        elif self._whole:
            is_known = all(stem in self._saved_stems for stem in stems(name) if stem in self._roots.per_rank)
            if self._roots.strict and is_known and not _is_sharded(target) and name not in self._saved_stems:
                self._roots.dropped[name] = target
                if isinstance(target, torch.Tensor):
                    self._roots.lost.append(name)
        elif items and not isinstance(target, torch.Tensor):
            # A list index does not identify an item, because the saved list may have had a different item there.
            self._drop_below(name)

    def _items(self, name: str) -> list[str]:
        """Return the names of the list items that contain a target, for lists that the checkpoint has."""
        path = self._roots.paths[name]
        return [
            ".".join(map(str, path[: depth + 1]))
            for depth in range(len(self._root.path), len(path))
            if path.containers[depth] == LIST and ".".join(map(str, path[:depth])) in self._saved_stems
        ]

    def _is_value(self, name: str) -> bool:
        """Whether a target is a value, not a tensor, a placeholder (None or empty) or the extra state of a module."""
        value = self._roots.flat[name]
        is_empty = value is None or (isinstance(value, Mapping | list) and not value)
        return not is_empty and not isinstance(value, torch.Tensor) and not name.endswith("_extra_state")


def _is_sharded(value: Any) -> bool:
    return is_dtensor(value) or is_sharded_tensor(value)
