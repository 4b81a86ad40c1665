"""The items of one rank's save plan as columns: what thousands of plans are sent as, and planned from.

A plan of DCP has an object tree for each item, which takes 15 us to unpickle: half a minute for 1,024 ranks with 2,200
tensors each. But layers are alike, and so are ranks: names, shapes and dtypes are mostly those of every other rank, and
a rank holds few different boxes. So each is kept once, and an item is three small integers.
"""

from __future__ import annotations

import pickle
import threading
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, SupportsIndex, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import ReadItem, TensorWriteData, WriteItem, WriteItemType

from zarrckpt._grid import Box, Ints

NO_BOX = -1
"""In place of a box, of items that are no tensors."""


class Form(NamedTuple):
    """What many items have in common."""

    type: WriteItemType
    shape: Ints
    """Of the global tensor."""
    properties: TensorProperties | None


@dataclass(frozen=True, eq=False)
class Schema:
    """Names and forms of a rank's items: the same on many ranks."""

    names: tuple[str, ...]
    forms: tuple[Form, ...]
    form: NDArray[np.int32]
    """The number of each item's form."""
    odd: Mapping[int, WriteItem]
    """Items, by place, that columns do not tell all about."""

    @cached_property
    def packed(self) -> bytes:
        """As it is sent: equal schemas of equal history are equal bytes."""
        return _packed((self.names, self.forms, self.form, self.odd))


@dataclass(frozen=True, eq=False)
class ItemTable:
    """The items of one rank's plan, in its order."""

    schema: Schema
    boxes: tuple[Box, ...]
    """The different boxes among them."""
    box: NDArray[np.int32]
    """The number of each item's box, or NO_BOX."""
    _made: dict[int, tuple[torch.Size, ChunkStorageMetadata]] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, items: Sequence[WriteItem]) -> ItemTable:
        """The table of some items. About 5 us an item."""
        forms: dict[object, int] = {}
        kinds: list[Form] = []
        boxes: dict[Box, int] = {}
        form, box, odd = [], [], {}
        for place, item in enumerate(items):
            key = _form_key(item)
            number = forms.setdefault(key, len(forms))
            if number == len(kinds):
                kinds.append(_form(item))
            form.append(number)
            box.append(NO_BOX if item.tensor_data is None else boxes.setdefault(_box(item), len(boxes)))
            if not _is_plain(item):
                odd[place] = item
        schema = Schema(tuple(item.index.fqn for item in items), tuple(kinds), np.array(form, np.int32), odd)
        return cls(schema, tuple(boxes), np.array(box, np.int32))

    def __len__(self) -> int:
        return len(self.box)

    def item(self, place: int) -> WriteItem:
        """One item as DCP knows it: equal to what the table was made of."""
        if place in self.schema.odd:
            return self.schema.odd[place]
        form = self.schema.forms[self.schema.form[place]]
        name = self.schema.names[place]
        if form.properties is None:
            return WriteItem(MetadataIndex(name), form.type)
        number = int(self.box[place])
        known = self._made.get(number)
        if known is None:
            box = self.boxes[number]
            chunk = ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.shape))
            known = self._made[number] = (chunk.offsets, chunk)
        data = TensorWriteData(known[1], form.properties, torch.Size(form.shape))
        return WriteItem(MetadataIndex(name, known[0]), form.type, tensor_data=data)

    def take(self, places: Sequence[int]) -> ItemTable:
        """The table of some of the items, in the order given."""
        old = self.schema
        odd = {new: old.odd[place] for new, place in enumerate(places) if place in old.odd}
        rows = np.asarray(places, np.int64)
        schema = Schema(tuple(old.names[place] for place in places), old.forms, old.form[rows], odd)
        return ItemTable(schema, self.boxes, self.box[rows])

    def __reduce__(self) -> tuple[Any, ...]:
        boxes = tuple((box.offset, box.shape) for box in self.boxes)
        return (_received_table, (self.schema.packed, boxes, zlib.compress(self.box.tobytes(), 1)))


@dataclass(frozen=True)
class RankItems:
    """What one rank has to save."""

    table: ItemTable
    digests: NDArray[np.uint64]
    """Of what each item stands for, see ``_digests``."""
    noted: bool
    """Whether digests were made: DCP's own planners make none."""
    lowest_rank_saves: bool
    """Whether replicas are all saved by the lowest rank that holds them, instead of being dealt."""


def _form_key(item: WriteItem) -> object:
    data = item.tensor_data
    if data is None:
        return item.type
    p = data.properties
    return (item.type, data.size, p.dtype, p.layout, p.requires_grad, p.memory_format, p.pin_memory)


def _form(item: WriteItem) -> Form:
    data = item.tensor_data
    return Form(item.type, (), None) if data is None else Form(item.type, tuple(data.size), data.properties)


def _box(item: WriteItem) -> Box:
    assert item.tensor_data is not None
    chunk = item.tensor_data.chunk
    return Box(tuple(chunk.offsets), tuple(chunk.sizes))


def _is_plain(item: WriteItem) -> bool:
    """Whether the columns tell all of an item."""
    index, data = item.index, item.tensor_data
    if type(item) is not WriteItem or item.bytes_io_data is not None or index.index is not None:
        return False
    if data is None:
        return index.offset is None
    return type(data) is TensorWriteData and index.offset == data.chunk.offsets


_NOTHING = ItemTable.of(())


# -- on the wire


class _Known(threading.local):
    def __init__(self) -> None:
        self.unpacked: dict[bytes, Any] = {}


_known = _Known()


def forget() -> None:
    """Let go of what was unpacked in this thread: what was gathered has been planned, or a new save begins."""
    _known.unpacked = {}


def _packed(value: object) -> bytes:
    return zlib.compress(pickle.dumps(value, pickle.HIGHEST_PROTOCOL), 1)


def _unpacked(data: bytes, make: Any) -> Any:
    """What packed bytes stand for: one object for all ranks that sent the same."""
    found = _known.unpacked.get(data)
    if found is None:
        found = _known.unpacked[data] = make(pickle.loads(zlib.decompress(data)))
    return found


def _schema_of(data: bytes) -> Schema:
    def make(fields: Any) -> Schema:
        schema = Schema(*fields)
        schema.__dict__["packed"] = data
        return schema

    schema: Schema = _unpacked(data, make)
    return schema


def _received_table(schema: bytes, boxes: Iterable[tuple[Ints, Ints]], box: bytes) -> ItemTable:
    places = np.frombuffer(zlib.decompress(box), np.int32)
    return ItemTable(_schema_of(schema), tuple(Box(*one) for one in boxes), places)


class SentItems(list[WriteItem]):
    """A rank's own items. Sent as a table; arrives as a list, or as LazyItems where our planner plans with them."""

    def __init__(self, items: Iterable[WriteItem], lazy: bool) -> None:
        super().__init__(items)
        self.table = ItemTable.of(self)
        self.lazy = lazy

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        return (LazyItems if self.lazy else ReceivedItems, (self.table,))


class ReceivedItems(list[WriteItem]):
    """Another rank's items, for planners that look at them."""

    def __init__(self, table: ItemTable) -> None:
        super().__init__(map(table.item, range(len(table))))
        self.table = table

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        return (ReceivedItems, (self.table,))


class LazyItems(Sequence[WriteItem]):
    """Another rank's items, made when they are asked for: the planner that gets them does not."""

    def __init__(self, table: ItemTable) -> None:
        self.table = table

    def __len__(self) -> int:
        return len(self.table)

    @overload
    def __getitem__(self, place: int) -> WriteItem: ...
    @overload
    def __getitem__(self, place: slice) -> list[WriteItem]: ...
    def __getitem__(self, place: int | slice) -> WriteItem | list[WriteItem]:
        found = range(len(self))[place]
        return self.table.item(found) if isinstance(found, int) else [self.table.item(one) for one in found]

    def __iter__(self) -> Iterator[WriteItem]:
        return map(self.table.item, range(len(self)))

    def __reduce__(self) -> tuple[Any, ...]:
        return (LazyItems, (self.table,))


class KnownItems(LazyItems):
    """In place of a rank's items: they are those of a plan that the coordinator keeps, see ``_kept_plans``."""

    def __init__(self, key: str, rank: int) -> None:
        super().__init__(_NOTHING)
        self.key = key
        self.rank = rank

    def __reduce__(self) -> tuple[Any, ...]:
        return (KnownItems, (self.key, self.rank))


class ChosenItems(LazyItems):
    """Some of a rank's items, on their way back to it, where they are a list again."""

    def __init__(self, table: ItemTable, places: NDArray[Any]) -> None:
        super().__init__(table)
        self.places = places

    def __len__(self) -> int:
        return len(self.places)

    def __iter__(self) -> Iterator[WriteItem]:
        return map(self.table.item, self.places.tolist())

    @overload
    def __getitem__(self, place: int) -> WriteItem: ...
    @overload
    def __getitem__(self, place: slice) -> list[WriteItem]: ...
    def __getitem__(self, place: int | slice) -> WriteItem | list[WriteItem]:
        return list(self)[place]

    def __reduce__(self) -> tuple[Any, ...]:
        return (_chosen, (self.table, self.places))


def _chosen(table: ItemTable, places: NDArray[Any]) -> list[WriteItem]:
    return list(ChosenItems(table, places))


class OwnReads(list[ReadItem]):
    """A rank's read items, which the coordinator's planner leaves as they are. Our reader lets them stay with the rank:
    what is sent is which boxes it wants, and that only where the coordinator deals what several ranks read.
    """

    stay = False
    wanted: Wanted | None = None

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        return (SentReads, (self.wanted,)) if self.stay else (list, (list(self),))


@dataclass(frozen=True, eq=False)
class Wanted:
    """The boxes of tensors that a rank is to fill, in its order."""

    names: tuple[str, ...]
    boxes: tuple[Box, ...]
    """The different ones."""
    box: NDArray[np.int32]
    """The number of each name's box."""

    @classmethod
    def of(cls, targets: Sequence[tuple[str, Box]]) -> Wanted:
        """The columns of names and boxes."""
        boxes: dict[Box, int] = {}
        box = [boxes.setdefault(one, len(boxes)) for _, one in targets]
        return cls(tuple(name for name, _ in targets), tuple(boxes), np.array(box, np.int32))

    def __iter__(self) -> Iterator[tuple[str, Box]]:
        return zip(self.names, map(self.boxes.__getitem__, self.box.tolist()), strict=True)

    def __reduce__(self) -> tuple[Any, ...]:
        boxes = tuple((box.offset, box.shape) for box in self.boxes)
        return (_received_wanted, (_packed(self.names), boxes, zlib.compress(self.box.tobytes(), 1)))


def _received_wanted(names: bytes, boxes: Iterable[tuple[Ints, Ints]], box: bytes) -> Wanted:
    places = np.frombuffer(zlib.decompress(box), np.int32)
    return Wanted(_unpacked(names, tuple), tuple(Box(*one) for one in boxes), places)


class SentReads(list[ReadItem]):
    """In place of a rank's read items, which stay with it."""

    def __init__(self, wanted: Wanted | None) -> None:
        super().__init__()
        self.wanted = wanted

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        return (SentReads, (None,))


class SentPaths(dict[Any, Any]):
    """A plan's ``planner_data``. Arrives as a plain dict, one for all ranks that sent the same."""

    @cached_property
    def packed(self) -> bytes:
        """As it is sent. Made once: the coordinator sends one to many ranks."""
        return _packed(dict(self))

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        return (_received_paths, (self.packed,))


def _received_paths(data: bytes) -> dict[Any, Any]:
    paths: dict[Any, Any] = _unpacked(data, dict)
    return paths
