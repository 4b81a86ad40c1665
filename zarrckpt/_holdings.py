"""Who holds what: the items of all ranks, by tensor and by box, before anything is decided about them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from zarrckpt import _dtypes
from zarrckpt._chunking import overlapping
from zarrckpt._digests import NO_DIGEST, as_numbers, empty_dicts
from zarrckpt._errors import UnsupportedLayoutError, UnsupportedValueError
from zarrckpt._grid import Box, Ints
from zarrckpt._mail import Notes, own_facts
from zarrckpt._owners import Held, Holders, Numbers
from zarrckpt._plan_items import NO_BOX, Form, RankItems, Schema, SentItems, SentPaths


@dataclass(frozen=True)
class TensorHolders:
    """One tensor, and who holds which of its boxes."""

    fqn: str
    shape: Ints
    dtype: _dtypes.DType
    held: Holders
    """One object for all tensors of this shape and dtype that are held alike."""
    places: Numbers
    """For each of the ranks in ``held`` the tensor's place among that rank's items."""
    whole: bool = False
    """Whether one rank must write all of it, see ``_owners.Spread``."""


@dataclass(frozen=True)
class Holdings:
    """The state of all ranks."""

    tensors: Mapping[str, TensorHolders]
    objects: Mapping[str, tuple[int, int]]
    """Non-tensor entries, with the rank that writes each, and the place among its items."""
    ranks: int
    """How many ranks save."""
    differing: Mapping[str, Sequence[int]]
    """fqns of what ranks hold differently, and these ranks: only the lowest one's counts."""
    hollow: frozenset[str] = frozenset()
    """fqns of empty dicts that are no entries, since other ranks have what is in them."""


def check_item(item: WriteItem) -> None:
    """Refuse what has no place in a checkpoint before anything is planned. Raises UnsupportedValueError."""
    if item.tensor_data is None:
        return
    properties = item.tensor_data.properties
    if properties.layout != torch.strided:
        raise UnsupportedValueError(
            f"{item.index.fqn!r} is a tensor with layout {properties.layout}; only strided (dense) tensors can be "
            "saved: convert it with .to_dense(), or save its parts"
        )
    _dtype(item.index.fqn, properties.dtype)


def with_facts(plan: SavePlan) -> SavePlan:
    """A rank's plan with what the coordinator must know. Raises UnsupportedValueError for what can't be saved."""
    for item in plan.items:
        check_item(item)
    notes = plan.storage_data if isinstance(plan.storage_data, Notes) else None
    lazy = notes is not None and notes.lazy
    if notes is not None and notes.lazy and isinstance(notes.digests, Mapping):
        notes = dataclasses.replace(notes, digests=as_numbers(notes.digests, plan.items))
    items = SentItems(plan.items, lazy)
    paths = SentPaths(plan.planner_data) if type(plan.planner_data) is dict else plan.planner_data
    return dataclasses.replace(plan, items=items, planner_data=paths, storage_data=own_facts(items, notes))


def item_box(item: WriteItem) -> Box:
    """The region of the global tensor that an item holds (DCP calls it a chunk)."""
    assert item.tensor_data is not None
    return _box(tuple(item.tensor_data.chunk.offsets), tuple(item.tensor_data.chunk.sizes))


@lru_cache(maxsize=1 << 16)
def _box(offset: Ints, shape: Ints) -> Box:
    # A coordinator sees each box once for every layer and every moment of an optimizer.
    return Box(offset, shape)


def _dtype(fqn: str, dtype: torch.dtype) -> _dtypes.DType:
    try:
        return _dtypes.by_torch_name(str(dtype))
    except UnsupportedValueError as err:
        raise UnsupportedValueError(f"{fqn!r}: {err}") from err


@dataclass
class _Entry:
    """What is saved under one name: a tensor or a value."""

    fqn: str
    rank: int
    """The first that has it."""
    form: Form
    dtype: _dtypes.DType | None
    """None: no tensor."""


class _Names:
    """The entries of all ranks, by number, in the order in which they come."""

    def __init__(self) -> None:
        self.entries: list[_Entry] = []
        self._numbers: dict[str, int] = {}
        self._known: dict[int, tuple[Numbers, list[tuple[int, Form]]]] = {}

    def of(self, schema: Schema, rank: int) -> tuple[Numbers, list[tuple[int, Form]]]:
        """The number of each of a rank's items, and the forms of those that the first rank has in another one."""
        known = self._known.get(id(schema))
        if known is None:
            forms = [schema.forms[number] for number in schema.form.tolist()]
            rows = [self._enter(fqn, form, rank) for fqn, form in zip(schema.names, forms, strict=True)]
            others = [row for row in zip(rows, forms, strict=True) if not _alike(self.entries[row[0]].form, row[1])]
            known = self._known[id(schema)] = (np.array(rows, np.int64), others)
        return known

    def _enter(self, fqn: str, form: Form, rank: int) -> int:
        number = self._numbers.setdefault(fqn, len(self.entries))
        if number == len(self.entries):
            dtype = None if form.properties is None else _dtype(fqn, form.properties.dtype)
            self.entries.append(_Entry(fqn, rank, form, dtype))
        return number


def _alike(known: Form, form: Form) -> bool:
    if known is form or known.properties is None or form.properties is None:
        return known is form or known.properties is form.properties
    return known.shape == form.shape and known.properties.dtype == form.properties.dtype


def _refuse(entry: _Entry, form: Form, rank: int) -> NoReturn:
    known = entry.form
    if known.properties is None or form.properties is None:
        where = rank if form.properties is None else entry.rank
        raise UnsupportedLayoutError(
            f"{entry.fqn!r} is a tensor on one rank and a value on rank {where}: give the two different names"
        )
    raise UnsupportedLayoutError(
        f"{entry.fqn!r} is {known.properties.dtype} {known.shape} on one rank and {form.properties.dtype} "
        f"{form.shape} on rank {rank}: give the two different names"
    )


@dataclass
class _Columns:
    """The items of all ranks, one after the other."""

    entry: Numbers
    rank: Numbers
    place: Numbers
    """Among the rank's items."""
    box: Numbers
    digest: NDArray[np.uint64]
    unsure: NDArray[np.bool_]
    """Plain tensors that nobody compared with other ranks'."""
    names: list[_Entry]
    boxes: list[Box]
    others: list[tuple[int, Form, int]]
    """Entries that a rank has in another form than the first one: entry, form, rank."""

    @classmethod
    def of(cls, ranks: Sequence[RankItems]) -> _Columns:
        names, boxes = _Names(), dict[Box, int]()
        numbers, places, boxed, unsure = [], [], [], []
        others: list[tuple[int, Form, int]] = []
        for rank, one in enumerate(ranks):
            table = one.table
            own = np.array([*(boxes.setdefault(box, len(boxes)) for box in table.boxes), NO_BOX], np.int64)
            boxed.append(own[table.box])
            rows, odd = names.of(table.schema, rank)
            numbers.append(rows)
            others += [(number, form, rank) for number, form in odd]
            places.append(np.arange(len(table)))
            unsure.append(_unsure(one))
        counts = [len(one.table) for one in ranks]
        return cls(
            np.concatenate(numbers),
            np.repeat(np.arange(len(ranks)), counts),
            np.concatenate(places),
            np.concatenate(boxed),
            np.concatenate([one.digests for one in ranks]),
            np.concatenate(unsure),
            names.entries,
            [*boxes],
            others,
        )

    def of_rows(self, rows: NDArray[np.bool_] | Numbers) -> _Columns:
        """Some of the items."""
        entry, rank, place, box = self.entry[rows], self.rank[rows], self.place[rows], self.box[rows]
        return _Columns(
            entry, rank, place, box, self.digest[rows], self.unsure[rows], self.names, self.boxes, self.others
        )


def _unsure(rank: RankItems) -> NDArray[np.bool_]:
    if rank.noted:
        return np.zeros(len(rank.table), np.bool_)
    schema = rank.table.schema
    plain = np.array([form.type == WriteItemType.TENSOR for form in schema.forms], np.bool_)
    return plain[schema.form] if len(schema.form) else np.zeros(0, np.bool_)


def hold(ranks: Sequence[RankItems]) -> Holdings:
    """Gather what all ranks hold. Called by the coordinator; no I/O.

    Raises UnsupportedLayoutError naming the fqn where ranks have another shape, dtype or kind under one name, or boxes
    that overlap or leave gaps.
    """
    items = _Columns.of(ranks)
    counts, differing = _counting(items)
    held = items.of_rows(counts)
    for number, form, rank in items.others:
        # Where ranks differ, one of them counts: then it does not matter what the others have.
        if ((held.entry == number) & (held.rank == rank)).any():
            _refuse(held.names[number], form, rank)
    # Items of one entry side by side, in the order of the ranks and of their plans.
    held = held.of_rows(np.argsort(held.entry, kind="stable"))
    bounds = np.searchsorted(held.entry, np.arange(len(held.names) + 1))
    spans = [slice(*span) for span in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)]
    hollow = _hollow(items, held, spans)
    objects: dict[str, tuple[int, int]] = {}
    tensors: dict[str, TensorHolders] = {}
    lowest = any(one.lowest_rank_saves for one in ranks)
    kinds = _Kinds(held, lowest)
    turn = 0
    for entry, span in zip(held.names, spans, strict=True):
        if entry.dtype is not None:
            tensors[entry.fqn] = kinds.tensor(entry, span)
            continue
        if entry.fqn not in hollow:
            objects[entry.fqn] = _writer_of(held, span, turn, ranks)
            turn += 1
    return Holdings(tensors, objects, len(ranks), differing, hollow)


Pairs = tuple[Numbers, Numbers]
"""Places among the items of all ranks, one rank's after the other's."""


def compared(ranks: Sequence[RankItems]) -> Pairs:
    """The items of ranks whose digests must be equal, in pairs: what is held more than once."""
    items = _Columns.of(ranks)
    return _pairs(items, _index(items))


def _index(items: _Columns) -> Numbers:
    """The same number for what is the same item on several ranks: items are the same by name and offset."""
    offsets: dict[Ints | None, int] = {}
    of_box = [offsets.setdefault(box.offset, len(offsets)) for box in items.boxes]
    of_box.append(offsets.setdefault(None, len(offsets)))  # NO_BOX is the last
    index: Numbers = items.entry * len(offsets) + np.array(of_box, np.int64)[items.box]
    return index


def _pairs(items: _Columns, index: Numbers) -> Pairs:
    noted = np.flatnonzero(items.digest != NO_DIGEST)
    order = noted[np.argsort(index[noted], kind="stable")]
    same = index[order[1:]] == index[order[:-1]]
    return order[:-1][same], order[1:][same]


def _counting(items: _Columns) -> tuple[NDArray[np.bool_], dict[str, list[int]]]:
    """Which items count, and the names of those that ranks hold differently, with these ranks.

    Of what differs, only the lowest of these ranks' counts.
    """
    index = _index(items)
    first, second = _pairs(items, index)
    differing = np.unique(index[first][items.digest[first] != items.digest[second]])
    counts = np.ones(len(items.entry), np.bool_)
    found: dict[str, set[int]] = {}
    for one in differing.tolist():
        rows = np.flatnonzero(index == one)
        noted = rows[items.digest[rows] != NO_DIGEST]
        found.setdefault(items.names[items.entry[rows[0]]].fqn, set()).update(items.rank[noted].tolist())
        # Also those whose ranks made no digest.
        counts[rows[items.rank[rows] != items.rank[noted].min()]] = False
    return counts, {fqn: sorted(ranks) for fqn, ranks in found.items()}


def _hollow(items: _Columns, held: _Columns, spans: Sequence[slice]) -> frozenset[str]:
    """Empty dicts of ranks whose share of a dict is nothing, where other ranks have its entries.

    A full state dict is rank 0's alone, and empty on the others: the same group, and no entry beside it.
    """
    empty = np.isin(held.digest, empty_dicts())
    hollow = set()
    for number, (entry, span) in enumerate(zip(held.names, spans, strict=True)):
        if entry.dtype is None and empty[span].all():
            below = [place for place, other in enumerate(held.names) if other.fqn.startswith(f"{entry.fqn}.")]
            others = items.rank[np.isin(items.entry, below)]
            if not np.isin(others, items.rank[items.entry == number]).all():
                hollow.add(entry.fqn)
    return frozenset(hollow)


def _writer_of(held: _Columns, span: slice, turn: int, ranks: Sequence[RankItems]) -> tuple[int, int]:
    """Values that are known to be alike are dealt in turn; of the others the lowest rank's is taken."""
    holders, places = held.rank[span], held.place[span]
    compared = bool((held.digest[span] != NO_DIGEST).all())
    lowest = any(ranks[rank].lowest_rank_saves for rank in {*holders.tolist()})
    row = turn % len(holders) if compared and not lowest else 0
    return int(holders[row]), int(places[row])


class _Kinds:
    """Tensors that are held alike, looked at once: layers, and the moments of an optimizer."""

    def __init__(self, held: _Columns, lowest: bool) -> None:
        self._held = held
        self._lowest = lowest
        self._known: dict[object, tuple[Holders, Numbers, bool]] = {}
        self._sizes = np.array([box.size for box in held.boxes], np.int64)

    def tensor(self, entry: _Entry, span: slice) -> TensorHolders:
        """One tensor, from its items' rows. Raises UnsupportedLayoutError where boxes overlap or leave gaps."""
        assert entry.dtype is not None
        held, form = self._held, entry.form
        columns = (held.rank[span], held.box[span], held.unsure[span])
        key = (form.shape, str(entry.dtype.name), *(column.tobytes() for column in columns))
        kind = self._known.get(key)
        if kind is None:
            kind = self._known[key] = self._kind(entry, *columns)
        holders, rows, whole = kind
        return TensorHolders(entry.fqn, form.shape, entry.dtype, holders, held.place[span][rows], whole)

    def _kind(
        self, entry: _Entry, ranks: Numbers, boxes: Numbers, unsure: NDArray[np.bool_]
    ) -> tuple[Holders, Numbers, bool]:
        """The holders; for each of the ranks in it its row; and whether one rank must write all."""
        rows_of: dict[int, dict[int, int]] = {}
        for row, (rank, box) in enumerate(zip(ranks.tolist(), boxes.tolist(), strict=True)):
            if self._sizes[box]:
                rows_of.setdefault(box, {})[rank] = row
        if self._lowest:
            rows_of = {box: {min(rows): rows[min(rows)]} for box, rows in rows_of.items()}
        held = Holders([Held(self._held.boxes[box], tuple(rows)) for box, rows in rows_of.items()])
        _check_cover(entry.fqn, entry.form.shape, held.boxes)
        rows = np.array([row for own in rows_of.values() for row in own.values()], np.int64)
        whole = any(len(own) > 1 and any(unsure[row] for row in own.values()) for own in rows_of.values())
        return held, rows, whole


def _check_cover(fqn: str, shape: Ints, boxes: Sequence[Box]) -> None:
    """The boxes must tile the tensor: every element has one place that it comes from."""
    for box in boxes:
        if any(o < 0 or o + n > s for o, n, s in zip(*box, shape, strict=True)):
            raise UnsupportedLayoutError(f"a shard of {fqn!r} is outside its shape {shape}: {_shown([box])}")
    pair = None if _side_by_side(shape, boxes) else overlapping(boxes)
    if pair is not None:
        raise UnsupportedLayoutError(f"shards of {fqn!r} (shape {shape}) overlap: {_shown(pair)}")
    size, found = Box((0,) * len(shape), shape).size, sum(box.size for box in boxes)
    if size != found:
        raise UnsupportedLayoutError(
            f"the shards of {fqn!r} hold {found} of the {size} elements of shape {shape}: {_shown(boxes)}; is a rank "
            "missing from the save, or its state dict without this key?"
        )


def _side_by_side(shape: Ints, boxes: Sequence[Box]) -> bool:
    """Whether boxes that are cut along one dimension only follow one another. Of others it is not known."""
    cut = [dim for dim, n in enumerate(shape) if any(box.shape[dim] != n for box in boxes)]
    if len(cut) != 1:
        return False
    spans = sorted((box.offset[cut[0]], box.offset[cut[0]] + box.shape[cut[0]]) for box in boxes)
    return all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))


def _shown(boxes: Iterable[Box]) -> str:
    ordered = sorted(boxes)
    shown = [f"offset {box.offset} shape {box.shape}" for box in ordered[:6]]
    return "; ".join(shown) + ("; ..." if len(ordered) > 6 else "")
