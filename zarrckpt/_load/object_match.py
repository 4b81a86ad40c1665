"""The targets of ``load`` in the user's state, including modules, optimizers and other objects."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from zarrckpt._errors import KeyMismatchError, warn
from zarrckpt._format.grid import Box
from zarrckpt._format.module_versions import put_versions
from zarrckpt._format.state_path import DICT, LIST, RANKS, StatePath
from zarrckpt._load.fill import TensorTarget
from zarrckpt._load.key_selection import KeySelection
from zarrckpt._load.match import StateMatch
from zarrckpt._load.rebuilt_containers import RebuiltContainers, find_rebuilt_containers
from zarrckpt._load.recheck import ReadEntries
from zarrckpt._plan.description import Description
from zarrckpt._plan.shards import Sharding
from zarrckpt._read.catalog import Catalog
from zarrckpt._reports import count_text
from zarrckpt._state import objects
from zarrckpt._state.local_state import tensor_entry
from zarrckpt._state.per_rank import PerRankSources, StackElement
from zarrckpt._state.saved_entries import RequestedEntries, SavedEntries, SavedTensor
from zarrckpt._state.tensors import torch_dtype


class ObjectMatch:
    """The targets of one rank in a state that may have modules, optimizers and other Stateful objects.

    It replaces the objects by their state dicts. :attr:`state_match` matches the plain state that results.

    Args:
        saved: the entries of the checkpoint, without the elements of stacks, which differ between ranks.
        keys: as for :func:`zarrckpt.load`. strict, allow_cast: as for :class:`StateMatch`.

    Raises KeyMismatchError for differences on this rank.
    """

    def __init__(
        self,
        saved: SavedEntries,
        state: Mapping[str, Any],
        keys: Sequence[str] | None,
        *,
        strict: bool,
        allow_cast: bool,
    ) -> None:
        self.saved = saved
        self.per_rank_sources = PerRankSources(saved.paths)
        """The rank whose state each PerRank loads, and the elements of stacks that this rank loads."""
        known = _with_elements(saved, self.per_rank_sources.elements)
        self.selection = KeySelection(keys, known.entries)
        requested = RequestedEntries(known, self._is_requested, everything=keys is None, allow_cast=allow_cast)
        self.plain = objects.convert_for_load(state, requested, self.per_rank_sources.choose_rank)
        """The state with state dicts instead of objects. Its leaves are the targets."""
        self.per_rank_sources.drop_other_elements()
        exact = {prefix[:-1] for prefix in self.plain.exact_prefixes}
        statefuls = {prefix[:-1] for prefix in self.plain.stateful_prefixes}
        containers = RebuiltContainers(
            find_rebuilt_containers(self.plain.state, statefuls, self.plain.per_rank, exact),
            exact=exact,
            per_rank=self.plain.per_rank,
            strict=strict,
            allow_cast=allow_cast,
            sources=self.per_rank_sources,
        )
        self.state_match = StateMatch(
            _with_elements(saved, self.per_rank_sources.elements),
            self.plain.state,
            strict=strict,
            allow_cast=allow_cast,
            select=self._is_requested,
            closed=self.plain.closed_dicts,
            containers=containers,
            sources=self.per_rank_sources,
        )
        """The targets in :attr:`plain`."""
        self._check()
        self._prepare_conversions()
        # These objects keep the tensors that they are passed. As after torch.load, these have the saved strides.
        others = self.state_match.names_with_other_strides()
        for optimizers in (False, True):
            self.replace_by_new_tensors(others, optimizers=optimizers)
        if lost := sorted(name for name in containers.lost if not self.state_match.is_converted(name)):
            warn(
                f"the checkpoint lacks {count_text(len(lost), 'tensor')} that Stateful objects and PerRanks of the "
                f"state have: {lost[:5]}. These objects get the saved state without the tensors"
            )

    def _prepare_conversions(self) -> None:
        """Give modules and Statefuls new memory for entries that they convert. Warn of such entries in other dicts."""
        modules = tuple(self.plain.exact_prefixes)
        owners = (*modules, *self.plain.stateful_prefixes)
        if self.state_match.converted:
            self.state_match.separate_converted(owners, modules)
        if others := sorted(name for name in self.state_match.converted if not f"{name}.".startswith(owners)):
            warn(
                f"the modules {others[:5]} in state dicts of the state were saved by other versions, and torch cannot "
                "convert a tensor into its own memory: pass the module itself, or clones of its tensors"
            )

    def _is_requested(self, fqn: str) -> bool:
        return fqn not in self.per_rank_sources.kept and self.selection.requests(fqn)

    def _check(self) -> None:
        """Raise KeyMismatchError for differences on this rank.

        An entry of a module or optimizer without a target on this rank is no difference, because another rank may have
        the target. But if there are differences, the error lists these entries too.
        """
        try:
            # No other rank can have the target of this rank's element of a stack.
            self.state_match.check(lambda fqn: fqn in self.per_rank_sources.elements and self.is_of_object(fqn))
        except KeyMismatchError:
            try:
                self.state_match.check(self.is_of_object)
            except KeyMismatchError as err:
                raise self.per_rank_sources.explain_missing(err, self.state_match.missing) from None

    def is_of_object(self, fqn: str) -> bool:
        """Whether an entry of the checkpoint belongs to a module or an optimizer of the state."""
        return fqn.startswith(tuple(self.plain.exact_prefixes))

    def description(self) -> Description:
        """Return the boxes that this rank is to fill. Ranks exchange these to plan shared reads.

        Excludes elements of stacks, which each rank reads itself, and offered entries.
        """
        shardings: dict[Sharding, int] = {}
        entries = []
        for fqn, leaf in self.state_match.leaves.items():
            if fqn in self.per_rank_sources.elements or self.saved.entries.get(fqn) is None:
                continue
            # Without a dtype: ranks may cast to different ones.
            path = StatePath((self.saved.stored_name(fqn),), (DICT,))
            entries.append(tensor_entry(path, leaf, "", shardings))
        return Description(tuple(entries), tuple(shardings))

    def tensors(self) -> Iterator[TensorTarget]:
        """Yield the tensors to fill, under their names in the checkpoint."""
        for target in self.state_match.tensors():
            element = self.per_rank_sources.elements.get(target.fqn)
            if element is not None:
                box = Box((element.index, *target.box.offset), (1, *target.box.shape))
                target = TensorTarget(element.stack, box, target.tensor[None], name=target.name)
            yield target._replace(fqn=self.saved.stored_name(target.fqn))

    def replace_by_new_tensors(self, names: Iterable[str], *, optimizers: bool = False) -> None:
        """Replace targets of Stateful objects (or of optimizers) by new tensors. ``restore`` passes these to them."""
        owners = [target.prefix for target in self.plain.optimizers] if optimizers else self.plain.stateful_prefixes
        self.state_match.replace_by_new_tensors(name for name in names if name.startswith(tuple(owners)))

    def record(self, read: ReadEntries, values: Mapping[str, object], catalog: Catalog) -> None:
        """Record all entries that were read. Call it before :meth:`restore`."""
        containers, paths = self.state_match.containers, self.state_match.paths
        with_gaps = _lists_with_gaps(paths[fqn] for fqn in self.state_match.leaves)
        for fqn, leaf in {**self.state_match.leaves, **values}.items():
            if with_gaps and any(paths[fqn][:depth] in with_gaps for depth in range(len(paths[fqn]))):
                continue
            # A Stateful may ignore an entry that its state does not have.
            is_new = fqn in containers.added or fqn in containers.offered
            if not (is_new and self.plain.is_of_stateful(fqn)):
                stored, node = None, catalog.root.tensors.get(self.saved.stored_name(fqn))
                is_whole = isinstance(leaf, torch.Tensor) and fqn not in self.per_rank_sources.elements
                if is_whole and node is not None and leaf.dtype == torch_dtype(node):
                    stored = catalog.checksum_of(node)
                read.record(fqn, leaf, stored)

    def list_names_stored_in(self, key: str) -> list[str]:
        """Return the names of values and new tensors that the load stores in the dict under a key of the state.

        Excludes tensors that are filled in place and entries of objects.
        """
        own = tuple(objects.prefix_of(keys) for keys, _ in self.plain.restore_calls)
        rows = ((fqn, self.state_match.paths[fqn]) for fqn in self.state_match.replaced)
        return [fqn for fqn, path in rows if path.keys[0] == key and len(path) > 1 and not f"{fqn}.".startswith(own)]

    def restore(self, state: dict[str, Any]) -> None:
        """Pass the loaded state dicts to the objects, then store the other entries in the user's state."""
        self.plain.restore_objects()
        for key, loaded in self.plain.state.items():
            back = objects.put_loaded(state[key], loaded)
            if back is not state[key]:
                state[key] = back
        if (versions := self.state_match.versions.get("")) is not None:
            put_versions(state, versions)


def _with_elements(saved: SavedEntries, elements: Mapping[str, StackElement]) -> SavedEntries:
    """Return the entries of a checkpoint, with an additional entry for each element of a stack that a rank loads.

    A rank's entries have the order of the first rank's entries. An element follows its stack.
    """
    if not elements:
        return saved
    by_stack: dict[str, list[str]] = {}
    ranks: dict[str, str] = {}
    for name, element in elements.items():
        by_stack.setdefault(element.stack, []).append(name)
        level = element.path.rank_at
        assert level is not None
        ranks["".join(f"{key}." for key in element.path[:level])] = str(element.path[level])
    entries: dict[str, SavedTensor | None] = {}
    for name, entry in saved.entries.items():
        entries.setdefault(name, entry)
        for prefix, rank in ranks.items():
            other, _, rest = name.removeprefix(prefix).partition(".")
            own = f"{prefix}{rank}.{rest}"
            if name.startswith(prefix) and other.isdecimal() and own in saved.entries:
                entries.setdefault(own, saved.entries[own])
        for own in by_stack.get(name, ()):
            assert entry is not None
            order = tuple(axis - 1 for axis in entry.order if axis)
            entries[own] = SavedTensor(entry.shape[1:], entry.dtype, order)
    paths = {**saved.paths, **{name: element.path for name, element in elements.items()}}
    versions = dict(saved.versions)
    for prefix, rank in ranks.items():
        stack = f"{prefix}{RANKS}"
        versions |= {
            f"{prefix}{rank}{name[len(stack) :]}": own
            for name, own in saved.versions.items()
            if f"{name}.".startswith(f"{stack}.")
        }
    return dataclasses.replace(saved, entries=entries, paths=paths, versions=versions)


def _lists_with_gaps(paths: Iterable[StatePath]) -> set[tuple[str | int, ...]]:
    """Return the paths of lists of which some indices are not loaded. If rebuilt, their items get other indices."""
    positions: dict[tuple[str | int, ...], set[str | int]] = {}
    for path in paths:
        for depth, container in enumerate(path.containers):
            if container == LIST:
                positions.setdefault(tuple(path[:depth]), set()).add(path[depth])
    return {path for path, found in positions.items() if found != {*range(len(found))}}
