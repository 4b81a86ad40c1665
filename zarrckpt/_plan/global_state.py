"""The global state: the entries of all ranks and the ranks that hold them, from the descriptions of all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, NoReturn

import numpy as np

from zarrckpt._errors import UnsupportedLayoutError, UnsupportedValueError
from zarrckpt._format import dtypes
from zarrckpt._format.documents import MAX_DIMENSIONS
from zarrckpt._format.grid import Box, Ints
from zarrckpt._format.module_versions import Versions, module_name
from zarrckpt._format.state_path import RANKS, StatePath
from zarrckpt._plan.all_descriptions import AllDescriptions
from zarrckpt._plan.description import REPLICATED, DescribedEntry, Description
from zarrckpt._plan.geometry import BoxOnRanks, Holders, Numbers
from zarrckpt._plan.shards import mesh_boxes
from zarrckpt._plan.tiling import check_tiling, format_boxes

ReplicaPart = tuple[str, Ints | None]
"""A part of the state that several ranks can hold: an fqn and the offset of a box, or None for a value."""


@dataclass(frozen=True)
class GlobalTensor:
    """One tensor of the global state, and the ranks that hold its boxes."""

    fqn: str
    shape: Ints
    dtype: dtypes.DType
    holders: Holders
    """The same object for all tensors with this shape and these boxes."""
    whole: bool = False
    """Whether one rank must write the whole tensor, see ``owners.PlannedTensor``."""
    order: Ints = ()
    """The dimensions by descending stride of every rank's memory, or () for C order and if ranks differ."""


@dataclass(frozen=True)
class GlobalState:
    """The state of all ranks. Ranks are positions in the group."""

    paths: Mapping[str, StatePath]
    """The state path of every entry, in the order of the lowest rank's state."""
    tensors: Mapping[str, GlobalTensor]
    values: Mapping[str, Numbers]
    """The ranks that may write each non-tensor entry."""
    compared: Mapping[str, Numbers]
    """The ranks that hold each non-tensor entry whose contents must be equal on all of them."""
    world_size: int
    """The number of ranks that save."""
    differing: Mapping[str, Sequence[int]]
    """The ranks that hold a tensor, for each tensor whose shape or dtype differs between ranks. The lowest rank's is
    saved."""
    hollow: frozenset[str] = frozenset()
    """fqns of empty dicts that are not saved, because other ranks have entries in them."""
    optimizers: Mapping[str, str] = field(default_factory=dict)
    """The names of the classes of optimizers, by fqn. If ranks differ, the lowest rank's."""
    versions: Versions = field(default_factory=dict)
    """The versions of the modules of all ranks."""

    def replicas(self, rank: int) -> dict[bytes, list[ReplicaPart]]:
        """Return the parts of a rank that other ranks hold too, by their holders (positions as int64 bytes)."""
        found: dict[bytes, list[ReplicaPart]] = {}
        for fqn, ranks in self.compared.items():
            if len(ranks) > 1 and rank in ranks:
                found.setdefault(ranks.tobytes(), []).append((fqn, None))
        known: dict[Holders, list[tuple[bytes, Ints]]] = {}
        for tensor in self.tensors.values():
            if tensor.holders.are_single:
                continue
            if tensor.holders not in known:
                rows = ((tensor.holders.ranks_of(box), box) for box in tensor.holders.boxes_of(rank).tolist())
                shared = [(ranks.tobytes(), tensor.holders.boxes[box].offset) for ranks, box in rows if len(ranks) > 1]
                known[tensor.holders] = shared
            for holders, offset in known[tensor.holders]:
                found.setdefault(holders, []).append((tensor.fqn, offset))
        return found


@dataclass(frozen=True, eq=False)
class _Occurrence:
    """An entry in one description, and the ranks with this description."""

    entry: DescribedEntry
    description: Description
    ranks: Numbers


class _PerRankEntry(NamedTuple):
    """An entry that one rank keeps for itself (PerRank)."""

    number: int
    """The number of the rank in the default process group."""
    rank: int
    entry: DescribedEntry

    @property
    def path(self) -> StatePath:
        return self.entry.path.with_rank(str(self.number))


def gather_state(gathered: AllDescriptions, saved_rank: Mapping[ReplicaPart, int] | None = None) -> GlobalState:
    """Return the state of all ranks from their descriptions. No I/O.

    ``saved_rank`` has the parts whose contents differ between ranks, and the one rank whose part is saved. Raises
    UnsupportedLayoutError with the fqn if ranks have different shapes, dtypes or kinds under one name, or if boxes
    overlap or leave gaps.
    """
    return _GlobalStateBuilder(gathered, saved_rank or {}).state()


class _GlobalStateBuilder:
    def __init__(self, gathered: AllDescriptions, saved_rank: Mapping[ReplicaPart, int]) -> None:
        self._gathered = gathered
        self._saved_rank = saved_rank
        self._saved_rank_of_boxes: dict[str, dict[Ints, int]] = {}
        for (fqn, offset), rank in saved_rank.items():
            if offset is not None:
                self._saved_rank_of_boxes.setdefault(fqn, {})[offset] = rank
        self._paths: dict[str, StatePath] = {}
        self._occurrences: dict[str, list[_Occurrence]] = {}
        self._per_rank: dict[StatePath, list[_PerRankEntry]] = {}
        """The entries of PerRanks, by the path in which RANKS stands for the number of the rank."""
        self._lowest = any(description.lowest_rank_saves for description in gathered.descriptions)
        self._differing: dict[str, list[int]] = {}
        self._known: dict[object, tuple[Holders, bool]] = {}

    def state(self) -> GlobalState:
        self._read_descriptions()
        tensors = {
            fqn: self._tensor(fqn, self._keep_one_form(fqn, rows))
            for fqn, rows in self._occurrences.items()
            if any(one.entry.kind == "tensor" for one in rows)
        }
        stacks, stack_of = self._stacks()
        for rows in self._per_rank.values():
            for own in rows:
                if own.entry.kind == "tensor" and own.path.fqn not in stack_of:
                    tensors[own.path.fqn] = self._single_tensor(own)
        ranks_of = {
            fqn: self._ranks_with(rows) for fqn, rows in self._occurrences.items() if rows[0].entry.kind != "tensor"
        }
        compared = {
            fqn: ranks
            for fqn, ranks in ranks_of.items()
            if all(one.entry.kind != "opaque" and one.description.compared for one in self._occurrences[fqn])
        }
        hollow = frozenset(fqn for fqn, ranks in ranks_of.items() if self._is_hollow(fqn, ranks))
        writers = {
            fqn: self._writers(fqn, ranks, fqn in compared) for fqn, ranks in ranks_of.items() if fqn not in hollow
        }
        for rows in self._per_rank.values():
            writers |= {own.path.fqn: np.array([own.rank]) for own in rows if own.entry.kind != "tensor"}
        paths: dict[str, StatePath] = {}
        for fqn, path in self._paths.items():
            name = stack_of.get(fqn, fqn)
            if name in stacks or name in tensors or name in writers:
                paths.setdefault(name, stacks[name][0] if name in stacks else path)
        tensors |= {name: holders for name, (_, holders) in stacks.items()}
        ordered = {name: tensors[name] for name in paths if name in tensors}
        values = {name: writers[name] for name in paths if name in writers}
        groups = [group for description in self._gathered.descriptions for group in description.groups]
        optimizers = {group.optimizer: group.class_name for group in reversed(groups) if group.class_name}
        shared = (len(self._gathered.numbers), self._differing, hollow, optimizers, self._merged_versions())
        return GlobalState(paths, ordered, values, compared, *shared)

    def _read_descriptions(self) -> None:
        """Collect entries by name. Paths are in the order of the lowest rank's state, then those of other ranks."""
        for number, description in enumerate(self._gathered.descriptions):
            ranks = self._gathered.ranks_of(number)
            lowest = int(ranks[0])
            for entry in self._gathered.entries(number):
                if entry.path.rank_at is None:
                    self._paths.setdefault(entry.path.fqn, entry.path)
                    self._occurrences.setdefault(entry.path.fqn, []).append(_Occurrence(entry, description, ranks))
                else:
                    path = entry.path.with_rank(str(self._gathered.members[lowest]))
                    self._paths.setdefault(path.fqn, path)
        kept = [
            [entry for entry in description.entries if entry.path.rank_at is not None]
            for description in self._gathered.descriptions
        ]
        for rank, number in enumerate(self._gathered.numbers.tolist()):
            for entry in kept[number]:
                own = _PerRankEntry(self._gathered.members[rank], rank, entry)
                self._per_rank.setdefault(entry.path.with_rank(RANKS), []).append(own)
                self._paths.setdefault(own.path.fqn, own.path)
        both = {own.path.fqn for rows in self._per_rank.values() for own in rows} & self._occurrences.keys()
        if both:
            raise UnsupportedLayoutError(
                f"{min(both)!r} is wrapped in PerRank on one rank, and is a plain entry on another: give the two "
                "entries different names"
            )

    def _merged_versions(self) -> dict[str, dict[str, int]]:
        merged: dict[str, dict[str, int]] = {}
        for number, description in enumerate(self._gathered.descriptions):
            for name, own in description.versions.items():
                known = merged.setdefault(name, {})
                for path, version in own.items():
                    if known.setdefault(path, version) != version:
                        rank = self._gathered.members[int(self._gathered.ranks_of(number)[0])]
                        raise UnsupportedLayoutError(
                            f"module {module_name(name, path)!r} has version {version} on rank {rank}, but version "
                            f"{known[path]} on a lower rank. Nothing was written. Run the same code on all ranks"
                        )
        return merged

    # -- tensors

    def _keep_one_form(self, fqn: str, occurrences: list[_Occurrence]) -> list[_Occurrence]:
        """Return the occurrences with the shape and dtype of the lowest rank's.

        If plain tensors differ, drops the other occurrences and records the difference, because they need not be one
        tensor. Raises UnsupportedLayoutError if other tensors differ.
        """
        first = occurrences[0].entry
        odd = [occurrence for occurrence in occurrences if occurrence.entry[1:4] != first[1:4]]
        if not odd:
            return occurrences
        if any(
            one.entry.kind != first.kind
            or not _is_plain(one.entry)
            or len(one.entry.shape) != len(first.shape)
            or not one.description.compared
            for one in occurrences
        ):
            self._refuse(fqn, occurrences[0], odd[0])
        self._differing[fqn] = sorted(np.concatenate([one.ranks for one in occurrences]).tolist())
        self._occurrences[fqn] = kept = [one for one in occurrences if one not in odd]
        return kept

    def _refuse(self, fqn: str, known: _Occurrence, other: _Occurrence) -> NoReturn:
        rank = int(other.ranks[0])
        if known.entry.kind != other.entry.kind:
            rank = rank if other.entry.kind != "tensor" else int(known.ranks[0])
            raise UnsupportedLayoutError(
                f"{fqn!r} is a tensor on one rank and a value on rank {rank}: give the two entries different names"
            )
        raise UnsupportedLayoutError(
            f"{fqn!r} is {known.entry.dtype} {known.entry.shape} on one rank and {other.entry.dtype} "
            f"{other.entry.shape} on rank {rank}: give the two entries different names"
        )

    def _tensor(self, fqn: str, occurrences: Sequence[_Occurrence]) -> GlobalTensor:
        entry, saved_rank = occurrences[0].entry, self._saved_rank_of_boxes.get(fqn, {})
        rows = tuple((one.description, one.entry.sharding, one.entry.boxes) for one in occurrences)
        key = (entry.shape, rows, tuple(saved_rank.items()))
        if key not in self._known:
            self._known[key] = self._find_holders(fqn, entry.shape, occurrences, saved_rank)
        order = _common_order([one.entry for one in occurrences])
        return GlobalTensor(fqn, entry.shape, dtype_of(fqn, entry.dtype), *self._known[key], order)

    def _find_holders(
        self, fqn: str, shape: Ints, occurrences: Sequence[_Occurrence], saved_rank: Mapping[Ints, int]
    ) -> tuple[Holders, bool]:
        """Return the holders of a tensor's boxes, and whether one rank must write the whole tensor."""
        whole = any(_is_plain(one.entry) and not one.description.compared for one in occurrences)
        tiled = len(occurrences) == 1 and occurrences[0].entry.sharding != REPLICATED
        ranks_of = _ranks_by_box(self._gathered, occurrences)
        twice = [box for box, ranks in ranks_of.items() if len({*ranks}) < len(ranks) and box.size]
        if twice:
            raise UnsupportedLayoutError(f"shards of {fqn!r} (shape {shape}) overlap: {format_boxes([*twice, *twice])}")
        for box in [box for box in ranks_of if box.offset in saved_rank]:
            ranks_of[box] = [saved_rank[box.offset]]
        end = 1 if self._lowest else None
        holders = Holders(
            [BoxOnRanks(box, tuple(sorted({*ranks})[:end])) for box, ranks in ranks_of.items() if box.size]
        )
        if sum(box.size for box in holders.boxes) < Box((0,) * len(shape), shape).size:
            self._refuse_absent(fqn, occurrences)
        check_tiling(fqn, shape, holders.boxes, tiled)
        return holders, whole and not holders.are_single

    def _refuse_absent(self, fqn: str, occurrences: Sequence[_Occurrence]) -> None:
        """Refuse a tensor that some ranks of its mesh lack, such as optimizer state without a gradient."""
        there, position = {*np.concatenate([one.ranks for one in occurrences]).tolist()}, self._gathered.position
        for one in occurrences:
            if one.entry.sharding == REPLICATED:
                continue
            mesh = one.description.shardings[one.entry.sharding].ranks
            absent = sorted(rank for rank in mesh if rank in position and position[rank] not in there)
            if absent:
                raise UnsupportedLayoutError(
                    f"{fqn!r} is sharded over ranks {sorted(mesh)[:10]}, but ranks {absent[:10]} have no entry with "
                    "this name, so their elements are missing. Nothing was written. If it is optimizer state, its "
                    "parameter had no gradient on these ranks (an expert without tokens, for example): set "
                    "parameter.grad to zeros there before the optimizer's step"
                )

    # -- entries of single ranks (PerRank)

    def _stacks(self) -> tuple[dict[str, tuple[StatePath, GlobalTensor]], dict[str, str]]:
        """Stack the tensors of several ranks into one array, if at least two ranks, or all, have one shape and dtype.

        If there are several shapes or dtypes, those of most ranks are stacked. The tensors of other ranks stay single.
        """
        made: dict[str, tuple[StatePath, GlobalTensor]] = {}
        stack_of: dict[str, str] = {}
        known: dict[object, Holders] = {}
        for path, rows in self._per_rank.items():
            forms: dict[tuple[Ints, str], list[_PerRankEntry]] = {}
            for own in rows:
                if own.entry.kind == "tensor" and len(own.entry.shape) < MAX_DIMENSIONS:
                    forms.setdefault((own.entry.shape, own.entry.dtype), []).append(own)
            if not forms:
                continue
            largest: list[_PerRankEntry] = max(forms.values(), key=lambda those: len(those))
            most = sorted(largest, key=lambda own: own.number)
            if len(most) == 1 < len(forms):
                continue
            stack = StatePath(path.keys, path.containers, [own.number for own in most], path.rank_at)
            if stack.fqn in self._paths or stack.fqn in made:
                raise UnsupportedValueError(
                    f"the PerRank entries of {most[0].path.fqn!r} are saved under the name {stack.fqn!r}, but another "
                    "entry has this name: rename the other entry"
                )
            made[stack.fqn] = (stack, _stack_tensors(stack.fqn, most, known))
            stack_of |= {own.path.fqn: stack.fqn for own in most}
        return made, stack_of

    def _single_tensor(self, own: _PerRankEntry) -> GlobalTensor:
        shape = own.entry.shape
        box = Box((0,) * len(shape), shape)
        holders = Holders([BoxOnRanks(box, (own.rank,))] if box.size else [])
        return GlobalTensor(
            own.path.fqn, shape, dtype_of(own.path.fqn, own.entry.dtype), holders, order=own.entry.order
        )

    # -- values

    def _ranks_with(self, occurrences: Iterable[_Occurrence]) -> Numbers:
        ranks: Numbers = np.sort(np.concatenate([one.ranks for one in occurrences]))
        return ranks

    def _writers(self, fqn: str, ranks: Numbers, compared: bool) -> Numbers:
        """Return the ranks that may write a value: all holders if it is compared, otherwise the lowest one."""
        if (fqn, None) in self._saved_rank:
            return np.array([self._saved_rank[fqn, None]])
        return ranks if compared and not self._lowest else ranks[:1]

    def _is_hollow(self, fqn: str, ranks: Numbers) -> bool:
        """Whether a name is an empty dict in which other ranks have entries.

        For example, a full state dict is on rank 0 only, and is empty on other ranks.
        """
        if any(occurrence.entry.kind != "empty" for occurrence in self._occurrences[fqn]):
            return False
        below = [rows for name, rows in self._occurrences.items() if name.startswith(f"{fqn}.")]
        others = [self._ranks_with(rows) for rows in below]
        return any(not np.isin(those, ranks).all() for those in others)


def gather_boxes(gathered: AllDescriptions) -> dict[str, list[BoxOnRanks]]:
    """Return the boxes that a load fills and their ranks, by fqn. They can overlap and need not cover the tensor.

    Tensors with equal shapes and boxes share one object.
    """
    occurrences: dict[str, list[_Occurrence]] = {}
    for number, description in enumerate(gathered.descriptions):
        ranks = gathered.ranks_of(number)
        for entry in description.entries:
            occurrences.setdefault(entry.path.fqn, []).append(_Occurrence(entry, description, ranks))
    known: dict[object, list[BoxOnRanks]] = {}
    found = {}
    for fqn, rows in occurrences.items():
        key = tuple((one.description, one.entry.shape, one.entry.sharding, one.entry.boxes) for one in rows)
        if key not in known:
            ranks_of = _ranks_by_box(gathered, rows)
            known[key] = [BoxOnRanks(box, tuple(sorted({*ranks}))) for box, ranks in ranks_of.items() if box.size]
        found[fqn] = known[key]
    return found


def _ranks_by_box(gathered: AllDescriptions, occurrences: Iterable[_Occurrence]) -> dict[Box, list[int]]:
    """Return the ranks that hold each box of a tensor. A rank that holds a box twice is listed twice."""
    found: dict[Box, list[int]] = {}
    for one in occurrences:
        entry, ranks = one.entry, one.ranks.tolist()
        if entry.sharding == REPLICATED:
            own = entry.boxes if entry.boxes is not None else (Box((0,) * len(entry.shape), entry.shape),)
            for box in own:
                found.setdefault(box, []).extend(ranks)
            continue
        sharding, describing = one.description.shardings[entry.sharding], {*ranks}
        all_boxes = mesh_boxes(entry.shape, sharding.mesh, sharding.cuts)
        for number, boxes in zip(sharding.ranks, all_boxes, strict=True):
            if (position := gathered.position.get(number, -1)) in describing:
                for box in boxes:
                    found.setdefault(box, []).append(position)
    return found


def _common_order(entries: Sequence[DescribedEntry]) -> Ints:
    order = entries[0].order
    return order if all(entry.order == order for entry in entries) else ()


def _is_plain(entry: DescribedEntry) -> bool:
    return entry.kind == "tensor" and entry.sharding == REPLICATED and entry.boxes is None


def _stack_tensors(fqn: str, rows: Sequence[_PerRankEntry], known: dict[object, Holders]) -> GlobalTensor:
    shape = rows[0].entry.shape
    ranks = tuple(own.rank for own in rows)
    dtype = dtype_of(fqn, rows[0].entry.dtype)
    key = (shape, ranks)
    if key not in known:
        origin = (0,) * len(shape)
        boxes = (Box((index, *origin), (1, *shape)) for index in range(len(rows)))
        known[key] = Holders([BoxOnRanks(box, (rank,)) for box, rank in zip(boxes, ranks, strict=True) if box.size])
    inner = _common_order([own.entry for own in rows])
    order = (0, *(axis + 1 for axis in inner)) if inner else ()
    return GlobalTensor(fqn, (len(rows), *shape), dtype, known[key], order=order)


def dtype_of(fqn: str, name: str) -> dtypes.DType:
    """Return the dtype with torch's name. Raises UnsupportedValueError with the fqn."""
    try:
        return dtypes.by_torch_name(name)
    except UnsupportedValueError as err:
        raise UnsupportedValueError(f"{fqn!r}: {err}") from err
