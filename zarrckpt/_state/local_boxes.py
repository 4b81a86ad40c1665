"""The boxes of a sharded tensor that this rank holds, and the memory of each box."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, partial
from typing import Any

import torch

from zarrckpt._errors import UnsupportedLayoutError
from zarrckpt._format.grid import Box, Ints
from zarrckpt._plan.shards import Cut, LocalBox, Sharding, held_boxes
from zarrckpt._state.tensors import plain_tensor, stride_order
from zarrckpt._state.torch_kinds import is_dtensor, is_sharded_tensor


class LocalBoxes:
    """This rank's boxes of a sharded tensor, which it replaces in a flat state. A base class."""

    shape: Ints
    """The shape of the global tensor."""
    dtype: torch.dtype
    sharding: Sharding | None = None
    """The cuts of the tensor over a mesh, if they determine the boxes of all ranks."""

    @property
    def _tensors(self) -> Sequence[tuple[Box, torch.Tensor]]:
        """The boxes of this rank and views of their memory. Boxes that overlap are all here, so that they are found."""
        raise NotImplementedError

    @property
    def boxes(self) -> list[Box]:
        """The boxes of the global tensor that this rank holds. The list can be empty."""
        return [box for box, _ in self._tensors]

    @property
    def order(self) -> Ints:
        """The dimensions of the local memory by descending stride, or () for C order and if boxes differ."""
        orders = {stride_order(tensor) for _, tensor in self._tensors}
        return orders.pop() if len(orders) == 1 else ()

    @cached_property
    def _by_offset(self) -> dict[Ints, torch.Tensor]:
        # A box without elements can have the same offset as another one.
        return {box.offset: tensor for box, tensor in sorted(self._tensors, key=lambda row: row[0].size)}

    def tensor_at(self, offset: Ints) -> torch.Tensor:
        """Return a view of the local memory of the box at a global offset."""
        return self._by_offset[offset]


class DTensorBoxes(LocalBoxes):
    """This rank's boxes of a DTensor.

    The boxes come from the placements by ``_plan.shards``, because torch's own offsets are wrong for uneven FSDP2 x TP.

    Args:
        fqn: the DTensor's name, for errors.
        local: a tensor to use instead of its local tensor, for example a copy.

    The boxes are computed at their first use. This raises UnsupportedLayoutError if the size of the local tensor does
    not fit the placements.
    """

    def __init__(self, fqn: str, tensor: Any, local: torch.Tensor | None = None) -> None:
        self._fqn = fqn
        self.shape = tuple(tensor.shape)
        self._mesh, self._placements = tensor.device_mesh, tensor.placements
        self._local = plain_tensor(tensor.to_local()) if local is None else local
        self.dtype = self._local.dtype

    @property
    def order(self) -> Ints:
        """The dimensions of the local tensor by descending stride, or () for C order. Also known without elements."""
        return stride_order(self._local)

    @cached_property
    def sharding(self) -> Sharding:  # type: ignore[override]
        cuts = tuple(
            Cut(placement.dim, int(getattr(placement, "split_factor", 1))) if hasattr(placement, "dim") else None
            for placement in self._placements
        )
        return Sharding(_ranks_of(self._mesh), tuple(self._mesh.shape), cuts)

    @cached_property
    def _tensors(self) -> Sequence[tuple[Box, torch.Tensor]]:
        coordinate = self._mesh.get_coordinate()
        if coordinate is not None and 0 in self.shape:
            return _without_elements(self.shape, self._local)
        found = held_boxes(self.shape, self.sharding.mesh, tuple(coordinate), self.sharding.cuts) if coordinate else []
        elements = sum(held.box.size for held in found)
        if elements != (self._local.numel() if coordinate is not None else 0):
            raise UnsupportedLayoutError(
                f"{self._fqn!r}: the placements {self._placements} on a mesh of {tuple(self._mesh.shape)} give this "
                f"rank {elements} elements of shape {self.shape}, but it holds {tuple(self._local.shape)}: "
                "redistribute() it, or use full_tensor()"
            )
        return _views(self._local, found)


def _without_elements(shape: Ints, local: torch.Tensor) -> list[tuple[Box, torch.Tensor]]:
    """Return the box of a tensor without elements. It has no chunks, but it is an entry, so every rank describes it."""
    return [(Box((0,) * len(shape), shape), local.new_empty(shape))]


def _views(local: torch.Tensor, found: Iterable[LocalBox]) -> list[tuple[Box, torch.Tensor]]:
    return [(box, local[Box(start, box.shape).slices()]) for box, start in found]


_rank_lists: dict[int, tuple[Any, Ints]] = {}
"""The ranks of meshes, by the id of the mesh. A cache, because thousands of tensors share one mesh."""


def _ranks_of(mesh: Any) -> Ints:
    known = _rank_lists.get(id(mesh))
    if known is None or known[0] is not mesh:
        if len(_rank_lists) > 64:
            _rank_lists.clear()
        known = _rank_lists[id(mesh)] = (mesh, tuple(mesh.mesh.flatten().tolist()))
    return known[1]


class AttributeBoxes(LocalBoxes):
    """This rank's boxes of a plain tensor with attributes that describe its boxes of a global tensor.

    torch 2.14's ``CheckpointableTensor`` has these attributes, see :func:`has_box_attributes`.

    Args:
        fqn: the tensor's name, for errors.
        local: a tensor to use instead of its memory, for example a copy.

    The first use of the boxes raises UnsupportedLayoutError if a box is outside the global or the local tensor.
    """

    def __init__(self, fqn: str, tensor: Any, local: torch.Tensor | None = None) -> None:
        self._fqn = fqn
        self.shape = global_shape(tensor)
        self._box_rows = [tensor.global_offsets, tensor.local_offsets, tensor.local_sizes]
        self._local = plain_tensor(tensor) if local is None else local
        self.dtype = self._local.dtype

    @cached_property
    def _tensors(self) -> Sequence[tuple[Box, torch.Tensor]]:
        if 0 in self.shape:
            return _without_elements(self.shape, self._local)
        found: list[LocalBox] = []
        shapes = (self.shape, tuple(self._local.shape))
        for row in itertools.zip_longest(*self._box_rows, fillvalue=()):
            offset, local, sizes = (tuple(map(int, numbers)) for numbers in row)
            for start, shape in zip((offset, local), shapes, strict=True):
                if not len(start) == len(sizes) == len(shape) or any(
                    at < 0 or n < 0 or at + n > size for at, n, size in zip(start, sizes, shape, strict=True)
                ):
                    raise UnsupportedLayoutError(
                        f"{self._fqn!r}: the box of sizes {sizes} at global offset {offset} and local offset {local} "
                        f"is not within shape {self.shape} and local shape {shapes[1]}: correct global_shape, "
                        "global_offsets, local_offsets and local_sizes of the tensor"
                    )
            # An empty box can have the same offset as a box of another rank.
            if 0 not in sizes:
                found.append(LocalBox(Box(offset, sizes), local))
        return _views(self._local, found)


class SeparateBoxes(LocalBoxes):
    """This rank's boxes of any other sharded tensor, with one tensor for each box."""

    def __init__(self, shape: Ints, dtype: torch.dtype, tensors: Iterable[tuple[Box, torch.Tensor]]) -> None:
        self.shape = shape
        self.dtype = dtype
        self._rows = [*tensors]

    @property
    def _tensors(self) -> Sequence[tuple[Box, torch.Tensor]]:
        return self._rows

    def copied(self, copy: Callable[[Box, torch.Tensor], torch.Tensor]) -> SeparateBoxes:
        """Return the same boxes with copies of the tensors, made by ``copy(box, tensor)``."""
        return SeparateBoxes(self.shape, self.dtype, [(box, copy(box, tensor)) for box, tensor in self._rows])


def to_local_boxes(fqn: str, leaf: Any) -> Any:
    """Return the LocalBoxes of a sharded tensor. Plain tensors and values are returned unchanged."""
    if isinstance(leaf, LocalBoxes):
        return leaf
    if is_dtensor(leaf) and not _has_item_hooks(leaf.to_local()):
        return DTensorBoxes(fqn, leaf)
    if is_sharded_tensor(leaf):
        return SeparateBoxes(tuple(leaf.size()), leaf.dtype, _local_shards(leaf, (0,) * leaf.dim()))
    if has_box_attributes(leaf):
        return AttributeBoxes(fqn, leaf)
    return _boxes_from_hooks(fqn, leaf) if _has_item_hooks(leaf) else leaf


def local_tensors(leaf: Any) -> Iterator[torch.Tensor]:
    """Yield the local tensors with this rank's elements of a tensor, sharded or not."""
    if is_dtensor(leaf):
        yield from local_tensors(leaf.to_local())
    elif is_sharded_tensor(leaf):
        for shard in leaf.local_shards():
            yield from local_tensors(shard.tensor)
    elif _has_item_hooks(leaf):
        yield from (leaf.__get_tensor_shard__(item.index) for item in leaf.__create_write_items__("", leaf))
    else:
        yield leaf


def _has_item_hooks(leaf: Any) -> bool:
    """Whether a value has DCP's hooks for sharded tensors, like LocalShardsWrapper and every DTensor."""
    return hasattr(leaf, "__create_write_items__")


def _local_shards(tensor: Any, origin: Ints) -> Iterator[tuple[Box, torch.Tensor]]:
    """Yield the boxes of a ShardedTensor. Two-dimensional FSDP1 nests ShardedTensors and DTensors in them."""
    for shard in tensor.local_shards():
        offset = tuple(a + b for a, b in zip(origin, shard.metadata.shard_offsets, strict=True))
        if is_sharded_tensor(shard.tensor):
            yield from _local_shards(shard.tensor, offset)
            continue
        local = shard.tensor.to_local() if is_dtensor(shard.tensor) else shard.tensor
        yield Box(offset, tuple(shard.metadata.shard_sizes)), plain_tensor(local)


def _boxes_from_hooks(fqn: str, leaf: Any) -> SeparateBoxes:
    """Return the boxes of a tensor with DCP's hooks, which create the write items and return the tensor of each."""
    items = leaf.__create_write_items__(fqn, leaf)
    shape = tuple(items[0].tensor_data.size) if items else global_shape(leaf)
    tensors = []
    for item in items:
        data = item.tensor_data
        box = Box(tuple(data.chunk.offsets), tuple(data.chunk.sizes))
        tensors.append((box, plain_tensor(leaf.__get_tensor_shard__(item.index))))
    return SeparateBoxes(shape, leaf.dtype, tensors)


_BOX_FIELDS = ("global_shape", "global_offsets", "local_offsets", "local_sizes")


def has_box_attributes(value: object) -> bool:
    """Whether a value is a tensor with the four attributes that describe its boxes of a global tensor."""
    return isinstance(value, torch.Tensor) and all(map(partial(hasattr, value), _BOX_FIELDS))


def global_shape(tensor: Any) -> Ints:
    """Return the shape of the global tensor."""
    return tuple(tensor.global_shape if has_box_attributes(tensor) else tensor.shape)
