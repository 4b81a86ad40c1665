"""One rank's part of a save: what it writes and sends. As objects on the rank, as columns on the way to it."""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from numpy.typing import NDArray

from zarrckpt._documents import ArrayNode, Json, group_document
from zarrckpt._grid import Box, Ints, intersect, unravel
from zarrckpt._root import parent_groups


class Part(NamedTuple):
    """A part of a chunk that this rank writes: held in one of its own items, or sent by another rank."""

    box: Box
    item: int | None
    source: int | None


class ChunkPlan(NamedTuple):
    """A chunk that this rank writes."""

    fqn: str
    cell: Ints
    parts: tuple[Part, ...]


class Sending(NamedTuple):
    """A part of one of this rank's items that another rank writes."""

    to: int
    item: int
    box: Box


@dataclass
class Round:
    """What this rank sends in one round of the exchange, and the chunks that it can write after it."""

    sends: list[Sending] = field(default_factory=list)
    chunks: list[ChunkPlan] = field(default_factory=list)


class Arrays:
    """All arrays of a save by number: sent to every rank, so packed once."""

    def __init__(self, nodes: Mapping[str, ArrayNode]) -> None:
        self.names = list(nodes)
        self.nodes = list(nodes.values())

    @cached_property
    def packed(self) -> bytes:
        """As it is sent."""
        # Grids and types are few: each is written once.
        kinds: dict[tuple[Any, ...], int] = {}
        numbers = [kinds.setdefault((n.grid, n.dtype, n.portable, n.compression), len(kinds)) for n in self.nodes]
        fields = (self.names, [node.path for node in self.nodes], numbers, list(kinds))
        return zlib.compress(pickle.dumps(fields, pickle.HIGHEST_PROTOCOL), 1)

    @classmethod
    def unpacked(cls, data: bytes) -> Arrays:
        """The arrays that packed bytes stand for."""
        names, paths, numbers, kinds = pickle.loads(zlib.decompress(data))
        arrays = cls({name: ArrayNode(p, *kinds[n]) for name, p, n in zip(names, paths, numbers, strict=True)})
        arrays.__dict__["packed"] = data
        return arrays

    def documents(self, share: int, shares: int) -> dict[str, Json]:
        """The node documents of one of equal shares: they depend on the plan only, so ranks write them side by side."""
        nodes: dict[str, ArrayNode | None] = {node.path: node for node in self.nodes}
        nodes |= dict.fromkeys(parent_groups(nodes))
        mine = {path: nodes[path] for path in sorted(nodes)[share::shares]}
        return {path: group_document() if node is None else node.document() for path, node in mine.items()}


@dataclass(frozen=True, eq=False)
class Columns:
    """The chunks that a rank writes and the pieces that it sends, a row each, in the order in which they take place.

    Items are places among those that this rank's plan has.
    """

    chunk_array: NDArray[Any]
    """The number of each chunk's array."""
    chunk_cell: NDArray[Any]
    """The number of each chunk in its array, in C order."""
    chunk_round: NDArray[Any]
    """The round after which it can be written; -1: at once."""
    chunk_parts: NDArray[Any]
    """How many parts each chunk has; those of all chunks follow each other."""
    part_source: NDArray[Any]
    """The rank that sends each part; -1: this rank has it."""
    part_item: NDArray[Any]
    """The item that has each part, where this rank has it."""
    part_bounds: NDArray[Any]
    """Offset, then shape, of each part that others send: a row each, as long as the most dimensions need."""
    send_round: NDArray[Any]
    send_to: NDArray[Any]
    send_item: NDArray[Any]
    send_cell: NDArray[Any]
    """The number of the chunk that it is sent for, in the item's array."""


class RankPlan:
    """What one rank does. DCP may cache it with the plan, so it is of no one attempt.

    Items are named by their position in the plan's, which are those that this rank writes or sends something of.
    Parts arrive in the order in which the sender's plan has them.
    """

    def __init__(
        self,
        share: tuple[int, int],
        arrays: Arrays,
        columns: Columns,
        object_paths: Mapping[str, str],
        item_arrays: NDArray[Any],
        boxes: Sequence[Box],
        item_boxes: NDArray[Any],
    ) -> None:
        self._share = share
        self._all = arrays
        self._columns = columns
        self.object_paths = object_paths
        """The node path of each value that this rank writes. Their items come first."""
        self._item_arrays = item_arrays
        self._boxes = boxes
        self._item_boxes = item_boxes

    def __reduce__(self) -> tuple[Any, ...]:
        columns = tuple(vars(self._columns).values())
        fields = (self.object_paths, self._item_arrays, tuple(map(tuple, self._boxes)), self._item_boxes)
        return (_received_plan, (self._share, self._all.packed, columns, *fields))

    @cached_property
    def arrays(self) -> dict[str, ArrayNode]:
        """The arrays that this rank writes or sends something of."""
        return {
            self._all.names[number]: self._all.nodes[number] for number in self._item_arrays.tolist() if number >= 0
        }

    def item_node(self, item: int) -> ArrayNode:
        """The array that an item is a piece of."""
        node: ArrayNode = self._all.nodes[self._item_arrays[item]]
        return node

    def item_box(self, item: int) -> Box:
        """Which piece of its array an item is. One dimension more than its tensor has, where that is in a stack."""
        box: Box = self._boxes[self._item_boxes[item]]
        return box

    @cached_property
    def documents(self) -> dict[str, Json]:
        """The node documents that this rank writes, by path."""
        return self._all.documents(*self._share)

    @property
    def chunks(self) -> Sequence[ChunkPlan]:
        """The chunks that this rank has all of."""
        return self._built[0]

    @property
    def rounds(self) -> Mapping[int, Round]:
        """What this rank does in each round of the exchange, in their order."""
        return self._built[1]

    @cached_property
    def _built(self) -> tuple[list[ChunkPlan], dict[int, Round]]:
        chunks: list[ChunkPlan] = []
        rounds: dict[int, Round] = {}
        columns = self._columns
        parts = self._parts()
        rows = (columns.chunk_array, columns.chunk_cell, columns.chunk_round, columns.chunk_parts)
        for array, number, when, count in zip(*(row.tolist() for row in rows), strict=True):
            grid = self._all.nodes[array].grid
            cell = unravel(number, grid.counts)
            whole = grid.chunk_box(cell)
            planned = ChunkPlan(self._all.names[array], cell, tuple(next(parts)(whole) for _ in range(count)))
            (chunks if when < 0 else rounds.setdefault(when, Round()).chunks).append(planned)
        sends = (columns.send_round, columns.send_to, columns.send_item, columns.send_cell)
        for when, to, item, number in zip(*(row.tolist() for row in sends), strict=True):
            grid = self.item_node(item).grid
            box = self._shared(item, grid.chunk_box(unravel(number, grid.counts)))
            rounds.setdefault(when, Round()).sends.append(Sending(to, item, box))
        return chunks, dict(sorted(rounds.items()))

    def _parts(self) -> Iterator[Callable[[Box], Part]]:
        """Each part, once its chunk's box is known."""
        foreign = iter(self._columns.part_bounds.tolist())
        for source, item in zip(self._columns.part_source.tolist(), self._columns.part_item.tolist(), strict=True):
            if source < 0:
                yield lambda whole, item=item: Part(self._shared(item, whole), item, None)  # type: ignore[misc]
            else:
                bounds = next(foreign)
                yield lambda whole, bounds=bounds, source=source: Part(  # type: ignore[misc]
                    _box_of(bounds, len(whole.shape)), None, source
                )

    def _shared(self, item: int, chunk: Box) -> Box:
        """What an item has of a chunk."""
        box = intersect(self.item_box(item), chunk)
        assert box is not None
        return box


def _box_of(bounds: Sequence[int], dims: int) -> Box:
    half = len(bounds) // 2
    return Box(tuple(bounds[:dims]), tuple(bounds[half : half + dims]))


def _received_plan(
    share: tuple[int, int], arrays: bytes, columns: Any, paths: Any, item_arrays: Any, boxes: Any, item_boxes: Any
) -> RankPlan:
    known = tuple(Box(*box) for box in boxes)
    return RankPlan(share, Arrays.unpacked(arrays), Columns(*columns), paths, item_arrays, known, item_boxes)
