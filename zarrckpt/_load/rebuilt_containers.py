"""Containers that a load rebuilds as they were saved, with more, fewer or other entries than the targets have.

A load fills the entries that its targets name. Some containers need more: the state of a Stateful or a PerRank is
loaded whole, lists get the saved length, and dicts of values get the keys that they lack. No such container is inside
another one. Modules and optimizers have separate rules and are not handled here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch

from zarrckpt._format.module_versions import Versions
from zarrckpt._format.state_path import DICT, LIST, StatePath
from zarrckpt._load.containers import ContainerLocation, Rows, move_path, rebuild
from zarrckpt._state.flatten import get_leaf, is_flattened, set_leaf, stems
from zarrckpt._state.per_rank import PerRankSources
from zarrckpt._state.saved_entries import SavedTensor
from zarrckpt._state.torch_kinds import is_sharded


class ContainerKind(Enum):
    """The rule for a container."""

    STATEFUL = "the state of a Stateful: a new container that equals the saved one"
    PER_RANK = "the value of a PerRank: changed in place to equal the saved one, and its tensors must fit"
    PLAIN = "a nested dict or list of the user: gets the entries that it lacks, and keeps its tensors"


@dataclass
class RebuiltContainer:
    """One container, and the names of its entries."""

    name: str
    path: StatePath
    kind: ContainerKind
    targets: list[str] = field(default_factory=list)
    saved: list[str] = field(default_factory=list)
    changed: bool = False
    """Whether it is rebuilt after the load."""
    loaded: Rows = field(default_factory=list)
    kept: Rows = field(default_factory=list)
    """Items that were not loaded and stay in the container."""

    @property
    def is_plain(self) -> bool:
        """Whether it is a dict or list of the user, not the state of a Stateful or PerRank."""
        return self.kind is ContainerKind.PLAIN


def find_rebuilt_containers(
    state: Mapping[Any, Any], stateful: Collection[str], per_rank: Collection[str], exact: Collection[str]
) -> dict[str, RebuiltContainer]:
    """Return the containers of a plain state that a load rebuilds, by flat name.

    ``stateful``, ``per_rank`` and ``exact`` are the flat names of the states of Stateful objects, of the values of
    PerRanks, and of modules and optimizers.
    """
    kinds: dict[str, ContainerKind | None] = {
        **dict.fromkeys(per_rank, ContainerKind.PER_RANK),
        **dict.fromkeys(stateful, ContainerKind.STATEFUL),
        **dict.fromkeys(exact),
    }
    above = {stem for name in kinds for stem in stems(name) if stem != name}
    found: dict[str, RebuiltContainer] = {}

    def walk(value: Any, keys: tuple[Any, ...], containers: tuple[str, ...], kind: ContainerKind | None) -> None:
        name = ".".join(map(str, keys))
        kind = kinds.get(name, kind)
        if kind is None:
            return
        is_list = isinstance(value, list) and is_flattened(value)
        if keys and (kind is ContainerKind.STATEFUL or name not in above):
            if kind is not ContainerKind.PLAIN or is_list or isinstance(value, Mapping):
                found[name] = RebuiltContainer(name, StatePath(keys, containers), kind)
        elif isinstance(value, Mapping):
            for key, item in value.items():
                walk(item, (*keys, key), (*containers, DICT), kind)
        elif is_list:
            for position, item in enumerate(value):
                walk(item, (*keys, position), (*containers, LIST), kind)

    walk(state, (), (), ContainerKind.PLAIN)
    return found


class RebuiltContainers:
    """The containers that one load rebuilds, matched with the entries of the checkpoint.

    Args:
        containers: the result of :func:`find_rebuilt_containers`. exact, per_rank: its arguments.
        strict: remove entries that the checkpoint lacks from the state of a Stateful or PerRank. Otherwise such entries
            are unchanged.
        allow_cast: fill tensors whose dtype differs from the stored one.
        sources: the rank whose state each PerRank loads.
    """

    def __init__(
        self,
        containers: dict[str, RebuiltContainer],
        *,
        exact: Collection[str] = (),
        per_rank: Collection[str] = (),
        strict: bool = True,
        allow_cast: bool = False,
        sources: PerRankSources,
    ) -> None:
        self._containers = containers
        self.exact, self.per_rank = exact, per_rank
        self.strict, self.allow_cast = strict, allow_cast
        self.sources = sources
        self.flat: Mapping[str, Any] = {}
        """The targets by flat name, from :meth:`fit` on, like the next two."""
        self.paths: Mapping[str, StatePath] = {}
        """Their paths in the state."""
        self.saved_paths: Mapping[str, StatePath] = {}
        """The paths of the entries of the checkpoint, by name."""
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
        requested: Iterable[str],
        saved_paths: Mapping[str, StatePath],
    ) -> None:
        """Compare the targets with the entries of the checkpoint, and update ``selected``.

        ``requested`` has the names in the checkpoint that the load requests.
        """
        if not self._containers:
            return
        self.flat, self.paths, self.saved_paths = flat, paths, saved_paths
        for name in selected:
            if (container := self._container_of(name)) is not None:
                container.targets.append(name)
        for name in requested:
            if (container := self._container_of(name)) is not None:
                container.saved.append(name)
        for container in self._containers.values():
            if container.saved:
                _ContainerMatch(self, container, selected, entries).compare()
        for name in self.dropped:
            selected.pop(name, None)
        for name in self.added:
            selected.setdefault(name, None)

    def _container_of(self, name: str) -> RebuiltContainer | None:
        found = None
        for stem in stems(name):
            if stem in self.exact:
                return None
            found = found or self._containers.get(stem)
        return found

    def accept(self, names: Iterable[str]) -> dict[str, StatePath]:
        """Mark those of the names that were offered as loaded, and return their paths in the state."""
        accepted = {name: self.offered[name] for name in names if name in self.offered}
        for name in accepted:
            container = self._container_of(name)
            assert container is not None
            container.changed = True
        return accepted

    def is_rebuilt(self, name: str) -> bool:
        """Whether an entry belongs to a container that :meth:`put` rebuilds."""
        container = self._container_of(name) if self._containers else None
        return container is not None and container.changed

    def put(self, state: Any, loaded: Mapping[str, Any], paths: Mapping[str, StatePath], versions: Versions) -> None:
        """Rebuild the containers that change. ``loaded`` has their loaded items by name, in the checkpoint's order."""
        for name, value in loaded.items():
            container = self._container_of(name)
            assert container is not None
            saved = None if container.is_plain else move_path(self.saved_paths[name], container.name, container.path)
            container.loaded.append((saved or paths[name], value))
        loaded_stems = {stem for name in loaded for stem in stems(name)}
        for name, value in self.flat.items():
            outer = next((self._containers[stem] for stem in stems(name) if stem in self._containers), None)
            if outer is not None and outer.changed and name not in self.dropped and name not in loaded_stems:
                self._keep(outer, name, value, state)
        for container in self._containers.values():
            if container.changed and container.loaded:
                first, second = container.loaded, container.kept
                rows = [*second, *first] if container.is_plain else [*first, *second]
                in_place = container.kind is not ContainerKind.STATEFUL
                old = get_leaf(state, container.path)
                new = rebuild(old, rows, len(container.path), in_place, versions)
                set_leaf(state, container.path, new)

    def _keep(self, container: RebuiltContainer, name: str, value: Any, state: Any) -> None:
        """Keep an item that was not loaded. Of a module or optimizer, keep the whole state dict, once."""
        path = self.paths[name]
        exact = next((stem for stem in stems(name) if stem in self.exact), None)
        if exact is not None:
            depth = exact.count(".") + 1
            while path.stem(depth) != exact:
                depth -= 1
            path = StatePath(path.keys[:depth], path.containers[:depth])
            if any(path.keys == other.keys for other, _ in container.kept):
                return
            value = get_leaf(state, path)
        container.kept.append((path, value))


class _ContainerMatch:
    """The comparison of one container with the checkpoint."""

    def __init__(
        self,
        containers: RebuiltContainers,
        container: RebuiltContainer,
        selected: dict[str, Any],
        entries: Mapping[str, SavedTensor | None],
    ) -> None:
        self._all, self._container = containers, container
        self._selected, self._entries = selected, entries
        self._whole = not container.is_plain
        """Whether the container must equal the saved one."""
        self._targets = {name for name in container.targets if name in containers.flat}
        """The names of targets, without entries below a target that stands for a whole subtree."""
        self._locations: dict[str, ContainerLocation] = {}
        """The containers inside this one, by name."""
        self._saved_stems: set[str] = set()
        """The names of saved entries of this container, and of the containers above them."""

    def compare(self) -> None:
        """Determine the added, offered and dropped names. Tensors of a Stateful that do not fit get new memory."""
        container, entries = self._container, self._entries
        container.changed = self._whole
        if container.kind is ContainerKind.STATEFUL:
            for name in self._targets & entries.keys():
                if not self._fits(self._selected[name], entries[name]):
                    self._selected[name] = None
        extra = [name for name in container.saved if name not in self._all.flat and name not in self._selected]
        lacking = [name for name in container.targets if name not in entries]
        if not extra and not lacking:
            return
        self._find_locations()
        self._saved_stems = {stem for name in container.saved for stem in stems(name)}
        self._replace_lists()
        self._add([name for name in extra if name not in self._all.added])
        for name in lacking:
            if name not in self._all.dropped:
                self._drop_lacking(name)

    def _fits(self, target: Any, entry: SavedTensor | None) -> bool:
        if not isinstance(target, torch.Tensor) or is_sharded(target):
            return True
        is_same_form = entry is not None and tuple(target.shape) == entry.shape
        return is_same_form and (self._all.allow_cast or entry is None or target.dtype == entry.dtype)

    def _find_locations(self) -> None:
        for name in self._all.flat if self._whole else self._targets:
            if name.startswith(f"{self._container.name}.") and (path := self._all.paths.get(name)) is not None:
                for depth in range(len(self._container.path), len(path)):
                    stem = path.stem(depth)
                    self._locations[stem] = ContainerLocation(path.keys[:depth], path.containers[: depth + 1])

    def _replace_lists(self) -> None:
        """Replace dicts by saved lists, and lists by saved dicts."""
        for name in self._container.saved:
            saved = self._all.saved_paths[name]
            for stem in stems(name):
                own = self._locations.get(stem)
                path = None if own is None else move_path(saved, stem, ContainerLocation(own.keys, own.containers[:-1]))
                if own is None or path is None or len(path) == len(own.keys):
                    continue
                if (own.containers[-1] == LIST) != (path.containers[len(own.keys)] == LIST):
                    if self._drop_below(stem):
                        self._add_name(name, path)
                    break

    def _drop_below(self, stem: str) -> bool:
        """Drop all targets at and below a name, and return True. With tensors in a plain container, return False."""
        below = [name for name in self._targets if name == stem or name.startswith(f"{stem}.")]
        if not self._whole and any(isinstance(self._selected.get(name), torch.Tensor) for name in below):
            return False
        self._all.dropped.update((name, self._selected.get(name)) for name in below if name not in self._entries)
        self._container.changed = True
        return True

    def _add(self, extra: list[str]) -> None:
        gets_keys = self._whole or any(map(self._is_value, self._targets))
        items: dict[str, list[tuple[int, str, StatePath]]] = {}
        for name in extra:
            if name in self._locations:
                self._replace(name)
                continue
            above = [stem for stem in stems(name) if stem != name]
            leaf = next((stem for stem in above if stem in self._targets), None)
            if leaf is not None and self._container.kind is not ContainerKind.STATEFUL:
                continue
            stem = next((stem for stem in reversed(above) if stem in self._locations), None)
            own = self._container.path if stem is None else self._locations[stem]
            path = move_path(self._all.saved_paths[name], stem or self._container.name, own)
            if path is None:
                continue
            if leaf is not None:
                self._all.dropped[leaf] = self._selected.get(leaf)
                self._add_name(name, path)
            elif stem is not None and own.containers[-1] == LIST:
                position = path.keys[len(own.keys)]
                if isinstance(position, int):
                    items.setdefault(stem, []).append((position, name, path))
            elif gets_keys:
                self._add_name(name, path, offered=not self._all.sources.is_chosen(name))
        for stem, found in items.items():
            self._add_items(stem, found)

    def _add_name(self, name: str, path: StatePath, offered: bool = False) -> None:
        (self._all.offered if offered else self._all.added)[name] = path
        if not offered:
            self._container.changed = True

    def _add_items(self, stem: str, found: list[tuple[int, str, StatePath]]) -> None:
        depth = len(self._locations[stem].keys)
        own = {
            path.keys[depth]
            for name in self._targets
            if name.startswith(f"{stem}.")
            for path in [self._all.paths[name]]
        }
        known = len(own)
        # keys= may exclude items. Items after such a gap have no position, and are not loaded.
        for position in sorted({position for position, _, _ in found}):
            known += position == known
        for position, name, path in found:
            if position < known:
                self._add_name(name, path)

    def _replace(self, name: str) -> None:
        """Replace a container by a saved value or tensor."""
        if self._drop_below(name):
            own = self._locations[name]
            self._add_name(name, StatePath(own.keys, own.containers[:-1]))

    def _drop_lacking(self, name: str) -> None:
        """Drop a target that the checkpoint lacks, if its container must equal the saved one."""
        target = self._selected[name]
        items = self._list_items_above(name)
        gone = next((item for item in items if item not in self._saved_stems), None)
        if gone is not None:
            self._drop_below(gone)
        elif self._whole:
            is_known = all(stem in self._saved_stems for stem in stems(name) if stem in self._all.per_rank)
            if self._all.strict and is_known and not is_sharded(target) and name not in self._saved_stems:
                self._all.dropped[name] = target
                if isinstance(target, torch.Tensor):
                    self._all.lost.append(name)
        elif items and not isinstance(target, torch.Tensor):
            # A list index does not identify an item, because the saved list may have had a different item there.
            self._drop_below(name)

    def _list_items_above(self, name: str) -> list[str]:
        """Return the names of the list items that contain a target, for lists that the checkpoint has."""
        path = self._all.paths[name]
        return [
            path.stem(depth + 1)
            for depth in range(len(self._container.path), len(path))
            if path.containers[depth] == LIST and path.stem(depth) in self._saved_stems
        ]

    def _is_value(self, name: str) -> bool:
        """Whether a target is a value, not a tensor, a placeholder (None or empty) or the extra state of a module."""
        value = self._all.flat[name]
        is_empty = value is None or (isinstance(value, Mapping | list) and not value)
        return not is_empty and not isinstance(value, torch.Tensor) and not name.endswith("_extra_state")
