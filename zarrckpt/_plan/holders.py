"""The global state: which ranks hold which entries and boxes, from the descriptions of all ranks."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, NoReturn

import numpy as np

from zarrckpt._errors import UnsupportedLayoutError, UnsupportedValueError
from zarrckpt._format import dtypes
from zarrckpt._format.documents import MAX_DIMENSIONS
from zarrckpt._format.grid import Box, Ints
from zarrckpt._format.state_path import RANKS, StatePath
from zarrckpt._plan.all_descriptions import AllDescriptions
from zarrckpt._plan.chunking import overlapping
from zarrckpt._plan.description import REPLICATED, DescribedEntry, Description
from zarrckpt._plan.owners import BoxOnRanks, Holders, Numbers
from zarrckpt._plan.shards import CutMesh, mesh_boxes

ReplicaPart = tuple[str, Ints | None]
"""A part of the state that several ranks can hold: an fqn and the offset of a box, or None for a value."""


@dataclass(frozen=True)
class GlobalTensor:
    """One tensor of the global state, and the ranks that hold its boxes."""

    fqn: str
    shape: Ints
    dtype: dtypes.DType
    held: Holders
    """The same object for all tensors with this shape, dtype and boxes."""
    whole: bool = False
    """Whether one rank must write the whole tensor, see ``owners.Spread``."""


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
    ranks: int
    """The number of ranks that save."""
    differing: Mapping[str, Sequence[int]]
    """The ranks that hold a tensor, for each tensor whose shape or dtype differs between ranks. The lowest rank's is
    saved."""
    hollow: frozenset[str] = frozenset()
    """fqns of empty dicts that are not saved, because other ranks have entries in them."""

    def replicas(self, rank: int) -> dict[bytes, list[ReplicaPart]]:
        """Return the parts of a rank that other ranks hold too, by their holders (positions as int64 bytes)."""
        found: dict[bytes, list[ReplicaPart]] = {}
        for fqn, ranks in self.compared.items():
            if len(ranks) > 1 and rank in ranks:
                found.setdefault(ranks.tobytes(), []).append((fqn, None))
        known: dict[Holders, list[tuple[bytes, Ints]]] = {}
        for tensor in self.tensors.values():
            if tensor.held.alone:
                continue
            if tensor.held not in known:
                known[tensor.held] = [*_shared_boxes(tensor.held, rank)]
            for ranks_key, offset in known[tensor.held]:
                found.setdefault(ranks_key, []).append((tensor.fqn, offset))
        return found


def _shared_boxes(held: Holders, rank: int) -> Iterator[tuple[bytes, Ints]]:
    for number in held.boxes_of(rank).tolist():
        ranks = held.ranks_of(number)
        if len(ranks) > 1:
            yield ranks.tobytes(), held.boxes[number].offset


class _Claim(NamedTuple):
    """An entry of a name in one description."""

    description: int
    entry: DescribedEntry


class _Own(NamedTuple):
    """An entry that one rank keeps for itself (PerRank)."""

    number: int
    """The number of the rank in the default process group."""
    rank: int
    entry: DescribedEntry

    @property
    def path(self) -> StatePath:
        return self.entry.path.with_rank(str(self.number))


def gather_state(gathered: AllDescriptions, only: Mapping[ReplicaPart, int] | None = None) -> GlobalState:
    """Return the state of all ranks from their descriptions. No I/O.

    ``only`` has the parts whose contents differ between ranks, and the one rank whose part is saved. Raises
    UnsupportedLayoutError with the fqn if ranks have different shapes, dtypes or kinds under one name, or if boxes
    overlap or leave gaps.
    """
    return _Gathering(gathered, only or {}).state()


class _Gathering:
    def __init__(self, gathered: AllDescriptions, only: Mapping[ReplicaPart, int]) -> None:
        self._gathered = gathered
        self._only = only
        self._only_boxes: dict[str, dict[Ints, int]] = {}
        for (fqn, offset), rank in only.items():
            if offset is not None:
                self._only_boxes.setdefault(fqn, {})[offset] = rank
        self._paths: dict[str, StatePath] = {}
        self._claims: dict[str, list[_Claim]] = {}
        self._own: dict[StatePath, list[_Own]] = {}
        """By the path, in which RANKS stands for the number of the rank."""
        self.ranks = {number: gathered.ranks_of(number) for number in gathered.in_order}
        self._position = {number: place for place, number in enumerate(gathered.members)}
        self._lowest = any(description.lowest_rank_saves for description in gathered.descriptions)
        self._differing: dict[str, list[int]] = {}
        self._known: dict[object, tuple[Holders, bool]] = {}

    def state(self) -> GlobalState:
        self._read_descriptions()
        tensors = self._tensors()
        stacks, stack_of = self._stacks()
        for rows in self._own.values():
            for own in rows:
                if own.entry.kind == "tensor" and own.path.fqn not in stack_of:
                    tensors[own.path.fqn] = self._alone(own)
        ranks_of = {fqn: self._ranks_with(rows) for fqn, rows in self._claims.items() if rows[0].entry.kind != "tensor"}
        compared = {
            fqn: ranks for fqn, ranks in ranks_of.items() if all(self._is_compared(row) for row in self._claims[fqn])
        }
        hollow = frozenset(fqn for fqn, ranks in ranks_of.items() if self._is_hollow(fqn, ranks))
        writers = {
            fqn: self._writers(fqn, ranks, fqn in compared) for fqn, ranks in ranks_of.items() if fqn not in hollow
        }
        for rows in self._own.values():
            writers |= {own.path.fqn: np.array([own.rank]) for own in rows if own.entry.kind != "tensor"}
        paths: dict[str, StatePath] = {}
        for fqn, path in self._paths.items():
            name = stack_of.get(fqn, fqn)
            if name in stacks or name in tensors or name in writers:
                paths.setdefault(name, stacks[name][0] if name in stacks else path)
        tensors |= {name: holders for name, (_, holders) in stacks.items()}
        ordered = {name: tensors[name] for name in paths if name in tensors}
        values = {name: writers[name] for name in paths if name in writers}
        return GlobalState(paths, ordered, values, compared, len(self._gathered.given), self._differing, hollow)

    def _read_descriptions(self) -> None:
        """Collect claims by name. Paths are in the order of the lowest rank's state, then paths of other ranks only."""
        for number, ranks in self.ranks.items():
            lowest = int(ranks[0])
            for entry in self._gathered.entries(number):
                if entry.path.rank_at is None:
                    self._paths.setdefault(entry.path.fqn, entry.path)
                    self._claims.setdefault(entry.path.fqn, []).append(_Claim(number, entry))
                else:
                    path = entry.path.with_rank(str(self._gathered.members[lowest]))
                    self._paths.setdefault(path.fqn, path)
        kept = [_kept_by_ranks(description) for description in self._gathered.descriptions]
        for rank, number in enumerate(self._gathered.given.tolist()):
            for entry in kept[number]:
                own = _Own(self._gathered.members[rank], rank, entry)
                self._own.setdefault(entry.path.with_rank(RANKS), []).append(own)
                self._paths.setdefault(own.path.fqn, own.path)
        both = {own.path.fqn for rows in self._own.values() for own in rows} & self._claims.keys()
        if both:
            raise UnsupportedLayoutError(
                f"{min(both)!r} is wrapped in PerRank on one rank, and is a plain entry on another: give the two "
                "entries different names"
            )

    # -- tensors

    def _tensors(self) -> dict[str, GlobalTensor]:
        found = {}
        for fqn, claims in self._claims.items():
            if any(claim.entry.kind == "tensor" for claim in claims):
                found[fqn] = self._tensor(fqn, self._of_one_form(fqn, claims))
        return found

    def _of_one_form(self, fqn: str, claims: list[_Claim]) -> list[_Claim]:
        """Return the claims with one shape and dtype.

        If plain tensors differ, only the lowest rank's claims are kept, because they need not be one tensor.
        """
        first = claims[0].entry
        odd = [claim for claim in claims if claim.entry[1:4] != first[1:4]]
        if not odd:
            return claims
        if (
            any(claim.entry[1] != first.kind for claim in odd)
            or not all(_is_plain(claim.entry) and len(claim.entry.shape) == len(first.shape) for claim in claims)
            or not all(self._gathered.descriptions[claim.description].compared for claim in claims)
        ):
            self._refuse(fqn, claims[0], odd[0])
        self._differing[fqn] = sorted(int(rank) for claim in claims for rank in self.ranks[claim.description])
        self._claims[fqn] = kept = [claim for claim in claims if claim not in odd]
        return kept

    def _refuse(self, fqn: str, known: _Claim, other: _Claim) -> NoReturn:
        rank = int(self.ranks[other.description][0])
        if known.entry.kind != other.entry.kind:
            rank = rank if other.entry.kind != "tensor" else int(self.ranks[known.description][0])
            raise UnsupportedLayoutError(
                f"{fqn!r} is a tensor on one rank and a value on rank {rank}: give the two entries different names"
            )
        raise UnsupportedLayoutError(
            f"{fqn!r} is {known.entry.dtype} {known.entry.shape} on one rank and {other.entry.dtype} "
            f"{other.entry.shape} on rank {rank}: give the two entries different names"
        )

    def _tensor(self, fqn: str, claims: Sequence[_Claim]) -> GlobalTensor:
        entry = claims[0].entry
        only = self._only_boxes.get(fqn, {})
        rows = tuple((claim.description, claim.entry.sharding, claim.entry.boxes) for claim in claims)
        key = (entry.shape, entry.dtype, rows, tuple(only.items()))
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._held(fqn, entry.shape, claims, only)
        return GlobalTensor(fqn, entry.shape, _dtype(fqn, entry.dtype), *known)

    def _held(self, fqn: str, shape: Ints, claims: Sequence[_Claim], only: Mapping[Ints, int]) -> tuple[Holders, bool]:
        """Return the holders of a tensor's boxes, and whether one rank must write the whole tensor."""
        whole = any(
            _is_plain(claim.entry) and not self._gathered.descriptions[claim.description].compared for claim in claims
        )
        tiled = len(claims) == 1 and claims[0].entry.sharding != REPLICATED
        ranks_of = self._ranks_by_box(claims)
        twice = [box for box, ranks in ranks_of.items() if len({*ranks}) < len(ranks) and box.size]
        if twice:
            raise UnsupportedLayoutError(f"shards of {fqn!r} (shape {shape}) overlap: {_shown([*twice, *twice])}")
        for box in [box for box in ranks_of if box.offset in only]:
            ranks_of[box] = [only[box.offset]]
        most = 1 if self._lowest else None
        held = Holders([BoxOnRanks(box, tuple(sorted({*ranks})[:most])) for box, ranks in ranks_of.items() if box.size])
        if sum(box.size for box in held.boxes) < Box((0,) * len(shape), shape).size:
            self._refuse_absent(fqn, claims)
        _check_cover(fqn, shape, held.boxes, tiled)
        return held, whole and not held.alone

    def _refuse_absent(self, fqn: str, claims: Sequence[_Claim]) -> None:
        """Refuse a tensor that some ranks of its mesh lack, such as optimizer state without a gradient."""
        there = {int(rank) for claim in claims for rank in self.ranks[claim.description]}
        for number, entry in claims:
            if entry.sharding == REPLICATED:
                continue
            mesh = self._gathered.descriptions[number].shardings[entry.sharding].ranks
            absent = sorted(rank for rank in mesh if rank in self._position and self._position[rank] not in there)
            if absent:
                raise UnsupportedLayoutError(
                    f"{fqn!r} is sharded over ranks {sorted(mesh)[:10]}, but ranks {absent[:10]} have no entry with "
                    "this name, so their elements are missing. Nothing was written. If it is optimizer state, its "
                    "parameter had no gradient on these ranks (an expert without tokens, for example): set "
                    "parameter.grad to zeros there before the optimizer's step"
                )

    def _ranks_by_box(self, claims: Iterable[_Claim]) -> dict[Box, list[int]]:
        found: dict[Box, list[int]] = {}
        for number, entry in claims:
            for box, rank in self._boxes(entry, self._gathered.descriptions[number], self.ranks[number]):
                found.setdefault(box, []).append(rank)
        return found

    def _boxes(self, entry: DescribedEntry, description: Description, ranks: Numbers) -> Iterator[tuple[Box, int]]:
        """Yield the boxes of a tensor on the ranks that gave a description, with the rank."""
        if entry.sharding == REPLICATED:
            own = entry.boxes if entry.boxes is not None else (Box((0,) * len(entry.shape), entry.shape),)
            yield from ((box, rank) for box in own for rank in ranks.tolist())
            return
        sharding = description.shardings[entry.sharding]
        describing = {*ranks.tolist()}
        positions = [self._position.get(number, -1) for number in sharding.ranks]
        all_boxes = mesh_boxes(entry.shape, CutMesh(sharding.mesh, sharding.cuts))
        for position, boxes in zip(positions, all_boxes, strict=True):
            if position in describing:
                yield from ((box, position) for box in boxes)

    def wanted(self, claims: Iterable[_Claim]) -> list[BoxOnRanks]:
        """Return the boxes of a tensor, each with all ranks that hold it."""
        ranks_of = self._ranks_by_box(claims)
        return [BoxOnRanks(box, tuple(sorted({*ranks}))) for box, ranks in ranks_of.items() if box.size]

    # -- entries of single ranks (PerRank)

    def _stacks(self) -> tuple[dict[str, tuple[StatePath, GlobalTensor]], dict[str, str]]:
        """Stack the tensors of several ranks into one array, if at least two ranks, or all, have one shape and dtype.

        If there are several shapes or dtypes, those of most ranks are stacked. The tensors of other ranks stay single.
        """
        made: dict[str, tuple[StatePath, GlobalTensor]] = {}
        stack_of: dict[str, str] = {}
        known: dict[object, Holders] = {}
        for path, rows in self._own.items():
            forms: dict[tuple[Ints, str], list[_Own]] = {}
            for own in rows:
                if own.entry.kind == "tensor" and len(own.entry.shape) < MAX_DIMENSIONS:
                    forms.setdefault((own.entry.shape, own.entry.dtype), []).append(own)
            if not forms:
                continue
            largest: list[_Own] = max(forms.values(), key=lambda those: len(those))
            most = sorted(largest, key=lambda own: own.number)
            if len(most) == 1 < len(forms):
                continue
            stack = StatePath(path.keys, path.containers, [own.number for own in most], path.rank_at)
            if stack.fqn in self._paths or stack.fqn in made:
                raise UnsupportedValueError(
                    f"the PerRank entries of {most[0].path.fqn!r} are saved under the name {stack.fqn!r}, but another "
                    "entry has this name: rename the other entry"
                )
            made[stack.fqn] = (stack, _stacked(stack.fqn, most, known))
            stack_of |= {own.path.fqn: stack.fqn for own in most}
        return made, stack_of

    def _alone(self, own: _Own) -> GlobalTensor:
        shape = own.entry.shape
        box = Box((0,) * len(shape), shape)
        held = Holders([BoxOnRanks(box, (own.rank,))] if box.size else [])
        return GlobalTensor(own.path.fqn, shape, _dtype(own.path.fqn, own.entry.dtype), held)

    # -- values

    def _ranks_with(self, claims: Iterable[_Claim]) -> Numbers:
        ranks: Numbers = np.sort(np.concatenate([self.ranks[claim.description] for claim in claims]))
        return ranks

    def _is_compared(self, claim: _Claim) -> bool:
        return claim.entry.kind != "opaque" and self._gathered.descriptions[claim.description].compared

    def _writers(self, fqn: str, ranks: Numbers, compared: bool) -> Numbers:
        """Return the ranks that may write a value: all holders if it is compared, otherwise the lowest one."""
        if (fqn, None) in self._only:
            return np.array([self._only[fqn, None]])
        return ranks if compared and not self._lowest else ranks[:1]

    def _is_hollow(self, fqn: str, ranks: Numbers) -> bool:
        """Whether a name is an empty dict in which other ranks have entries.

        For example, a full state dict is on rank 0 only, and is empty on other ranks.
        """
        if any(claim.entry.kind != "empty" for claim in self._claims[fqn]):
            return False
        below = [rows for name, rows in self._claims.items() if name.startswith(f"{fqn}.")]
        others = [self._ranks_with(rows) for rows in below]
        return any(not np.isin(those, ranks).all() for those in others)


def wanted(gathered: AllDescriptions) -> dict[str, list[BoxOnRanks]]:
    """Return the boxes that a load fills and their ranks, by fqn. They can overlap and need not cover the tensor.

    Tensors with equal shapes and boxes share one object.
    """
    gathering = _Gathering(gathered, {})
    claims: dict[str, list[_Claim]] = {}
    for number in gathering.ranks:
        for entry in gathered.descriptions[number].entries:
            claims.setdefault(entry.path.fqn, []).append(_Claim(number, entry))
    known: dict[object, list[BoxOnRanks]] = {}
    found = {}
    for fqn, rows in claims.items():
        key = tuple((row.description, row.entry.shape, row.entry.sharding, row.entry.boxes) for row in rows)
        if key not in known:
            known[key] = gathering.wanted(rows)
        found[fqn] = known[key]
    return found


def _kept_by_ranks(description: Description) -> list[DescribedEntry]:
    return [entry for entry in description.entries if entry.path.rank_at is not None]


def _is_plain(entry: DescribedEntry) -> bool:
    return entry.kind == "tensor" and entry.sharding == REPLICATED and entry.boxes is None


def _stacked(fqn: str, rows: Sequence[_Own], known: dict[object, Holders]) -> GlobalTensor:
    shape = rows[0].entry.shape
    ranks = tuple(own.rank for own in rows)
    dtype = _dtype(fqn, rows[0].entry.dtype)
    key = (shape, ranks)
    if key not in known:
        origin = (0,) * len(shape)
        boxes = (Box((place, *origin), (1, *shape)) for place in range(len(rows)))
        known[key] = Holders([BoxOnRanks(box, (rank,)) for box, rank in zip(boxes, ranks, strict=True) if box.size])
    return GlobalTensor(fqn, (len(rows), *shape), dtype, known[key])


@lru_cache(maxsize=256)
def _known_dtype(name: str) -> dtypes.DType:
    return dtypes.by_torch_name(name)


def _dtype(fqn: str, name: str) -> dtypes.DType:
    try:
        return _known_dtype(name)
    except UnsupportedValueError as err:
        raise UnsupportedValueError(f"{fqn!r}: {err}") from err


def _check_cover(fqn: str, shape: Ints, boxes: Sequence[Box], tiled: bool) -> None:
    """Check that the boxes tile the tensor, so that every element has one source.

    ``tiled``: the boxes come from one mesh, so they do not overlap.
    """
    for box in () if tiled else boxes:
        if any(o < 0 or o + n > s for o, n, s in zip(*box, shape, strict=True)):
            raise UnsupportedLayoutError(f"a shard of {fqn!r} is outside its shape {shape}: {_shown([box])}")
    pair = None if tiled or _side_by_side(shape, boxes) else overlapping(boxes)
    if pair is not None:
        raise UnsupportedLayoutError(f"shards of {fqn!r} (shape {shape}) overlap: {_shown(pair)}")
    size, found = Box((0,) * len(shape), shape).size, sum(box.size for box in boxes)
    if size != found:
        raise UnsupportedLayoutError(
            f"the shards of {fqn!r} hold {found} of the {size} elements of shape {shape}: {_shown(boxes)}. Check that "
            "all ranks save, and that the state dict of each has this key"
        )


def _side_by_side(shape: Ints, boxes: Sequence[Box]) -> bool:
    """Whether boxes are cut along exactly one dimension and do not overlap. False if they are cut along several."""
    cut = [dim for dim, n in enumerate(shape) if any(box.shape[dim] != n for box in boxes)]
    if len(cut) != 1:
        return False
    spans = sorted((box.offset[cut[0]], box.offset[cut[0]] + box.shape[cut[0]]) for box in boxes)
    return all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))


def _shown(boxes: Iterable[Box]) -> str:
    ordered = sorted(boxes)
    shown = [f"offset {box.offset} shape {box.shape}" for box in ordered[:6]]
    return "; ".join(shown) + ("; ..." if len(ordered) > 6 else "")
