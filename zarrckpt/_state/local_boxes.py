"""What this rank has of a sharded tensor: the boxes of the global tensor, and the memory of each."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import torch

from zarrckpt._errors import UnsupportedLayoutError
from zarrckpt._format.grid import Box, Ints
from zarrckpt._plan.shards import Cut, LocalBox, Sharding, held_boxes
from zarrckpt._state.tensors import plain_tensor
from zarrckpt._state.torch_kinds import is_dtensor, is_sharded_tensor


class HeldTensor:
    """Takes the place of a sharded tensor in a flat state."""

    shape: Ints
    """Of the global tensor."""
    dtype: torch.dtype
    sharding: Sharding | None = None
    """How a mesh cuts the tensor, where that tells what each of its ranks holds."""

    @property
    def boxes(self) -> list[Box]:
        """The boxes of the global tensor that this rank holds. None where it holds nothing of it."""
        raise NotImplementedError

    def piece(self, offset: Ints) -> torch.Tensor:
        """The local tensor's part that is the box at a global offset: a view."""
        raise NotImplementedError


class _HeldInOne(HeldTensor):
    """The boxes lie in one local tensor."""

    _local: torch.Tensor

    @property
    def _held(self) -> dict[Ints, LocalBox]:
        """The boxes of this rank, by their global offsets."""
        raise NotImplementedError

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        return self._local.dtype

    @property
    def boxes(self) -> list[Box]:
        return [held.box for held in self._held.values()]

    def piece(self, offset: Ints) -> torch.Tensor:
        held = self._held[offset]
        if not held.box.size:
            return self._local.new_empty(held.box.shape)
        return self._local[held.box.slices(_minus(held.box.offset, held.local))]


class HeldDTensor(_HeldInOne):
    """What this rank has of a DTensor.

    torch's own rule for the offsets of DTensors is wrong for uneven FSDP2 x TP.

    Args:
        fqn: the DTensor's name, for errors. local: what stands for its local tensor, a copy say (default: itself).

    Making one is cheap; the boxes are found when they are first asked for. Raises UnsupportedLayoutError then where the
    local tensor has not the size that the placements say.
    """

    def __init__(self, fqn: str, tensor: Any, local: torch.Tensor | None = None) -> None:
        self._fqn = fqn
        self.shape = tuple(tensor.shape)
        self._mesh, self._placements = tensor.device_mesh, tensor.placements
        self._local = plain_tensor(tensor.to_local()) if local is None else local

    @cached_property
    def sharding(self) -> Sharding:  # type: ignore[override]
        cuts = tuple(
            Cut(placement.dim, int(getattr(placement, "split_factor", 1))) if hasattr(placement, "dim") else None
            for placement in self._placements
        )
        return Sharding(_ranks_of(self._mesh), tuple(self._mesh.shape), cuts)

    @cached_property
    def _held(self) -> dict[Ints, LocalBox]:
        found = {held.box.offset: held for held in self._boxes_here()}
        elements = sum(held.box.size for held in found.values())
        if elements != (self._local.numel() if self._mesh.get_coordinate() is not None else 0):
            raise UnsupportedLayoutError(
                f"{self._fqn!r}: the placements {self._placements} on a mesh of {tuple(self._mesh.shape)} give this "
                f"rank {elements} elements of shape {self.shape}, but it holds {tuple(self._local.shape)}: "
                "redistribute() it, or use full_tensor()"
            )
        return found

    def _boxes_here(self) -> list[LocalBox]:
        coordinate = self._mesh.get_coordinate()
        if coordinate is None:
            return []
        if 0 in self.shape:
            # Nothing to write, but an entry to keep: every rank names it.
            zero = (0,) * len(self.shape)
            return [LocalBox(Box(zero, self.shape), zero)]
        return held_boxes(self.shape, self.sharding.mesh, tuple(coordinate), self.sharding.cuts)


_rank_lists: dict[int, tuple[Any, Ints]] = {}
"""By the id of a mesh, the mesh and its ranks: a model has thousands of tensors on one mesh."""


def _ranks_of(mesh: Any) -> Ints:
    known = _rank_lists.get(id(mesh))
    if known is None or known[0] is not mesh:
        if len(_rank_lists) > 64:
            _rank_lists.clear()
        known = _rank_lists[id(mesh)] = (mesh, tuple(mesh.mesh.flatten().tolist()))
    return known[1]


class HeldParts(_HeldInOne):
    """What this rank has of a plain tensor that says which boxes of a global tensor are in it.

    That is torch 2.14's ``CheckpointableTensor``, see :func:`says_its_boxes`.

    Args:
        fqn: its name, for errors. local: what stands for its memory, a copy say (default: itself).

    Raises UnsupportedLayoutError, when its boxes are first asked for, where they are not within both tensors.
    """

    def __init__(self, fqn: str, tensor: Any, local: torch.Tensor | None = None) -> None:
        self._fqn = fqn
        self.shape = global_shape(tensor)
        self._said = [tensor.global_offsets, tensor.local_offsets, tensor.local_sizes]
        self._local = plain_tensor(tensor) if local is None else local

    @cached_property
    def _held(self) -> dict[Ints, LocalBox]:
        if 0 in self.shape:
            return {(zero := (0,) * len(self.shape)): LocalBox(Box(zero, self.shape), zero)}
        found: dict[Ints, LocalBox] = {}
        shapes = (self.shape, tuple(self._local.shape))
        for row in itertools.zip_longest(*self._said, fillvalue=()):
            offset, local, sizes = (tuple(map(int, numbers)) for numbers in row)
            for start, shape in zip((offset, local), shapes, strict=True):
                if not len(start) == len(sizes) == len(shape) or any(
                    at < 0 or n < 0 or at + n > size for at, n, size in zip(start, sizes, shape, strict=True)
                ):
                    raise UnsupportedLayoutError(
                        f"{self._fqn!r}: its box of sizes {sizes} at the global offset {offset}, local offset {local}, "
                        f"is not within the shape {self.shape} and the local shape {shapes[1]}: correct global_shape, "
                        "global_offsets, local_offsets and local_sizes of the tensor"
                    )
            # An empty box may have the offset of another rank's.
            if 0 not in sizes:
                found[offset] = LocalBox(Box(offset, sizes), local)
        return found


class HeldPieces(HeldTensor):
    """What this rank has of any other sharded tensor: a tensor for each box."""

    def __init__(self, shape: Ints, dtype: torch.dtype, pieces: Sequence[tuple[Box, torch.Tensor]]) -> None:
        self.shape = shape
        self.dtype = dtype
        self._pieces = pieces
        self._by_offset = {box.offset: piece for box, piece in pieces}

    @property
    def boxes(self) -> list[Box]:
        return [box for box, _ in self._pieces]

    def piece(self, offset: Ints) -> torch.Tensor:
        return self._by_offset[offset]

    def copied(self, copy: Any) -> HeldPieces:
        """The same boxes with copies of the tensors: ``copy(box, tensor)``."""
        return HeldPieces(self.shape, self.dtype, [(box, copy(box, piece)) for box, piece in self._pieces])


def held_of(fqn: str, leaf: Any) -> Any:
    """What this rank has of a sharded tensor, as a HeldTensor; plain tensors and values as they are."""
    if isinstance(leaf, HeldTensor):
        return leaf
    if is_dtensor(leaf) and not _says_its_items(leaf.to_local()):
        return HeldDTensor(fqn, leaf)
    if is_sharded_tensor(leaf):
        pieces = [*_local_shards(leaf, (0,) * leaf.dim())]
        return HeldPieces(tuple(leaf.size()), leaf.dtype, pieces)
    if says_its_boxes(leaf):
        return HeldParts(fqn, leaf)
    return _from_its_items(fqn, leaf) if _says_its_items(leaf) else leaf


def local_tensors(leaf: Any) -> Iterator[torch.Tensor]:
    """The tensors in which this rank has its elements of a tensor, sharded or not."""
    if is_dtensor(leaf):
        yield from local_tensors(leaf.to_local())
    elif is_sharded_tensor(leaf):
        for shard in leaf.local_shards():
            yield from local_tensors(shard.tensor)
    elif _says_its_items(leaf):
        yield from (leaf.__get_tensor_shard__(item.index) for item in leaf.__create_write_items__("", leaf))
    else:
        yield leaf


def _says_its_items(leaf: Any) -> bool:
    """Whether a value has torch's hooks for sharded tensors, as LocalShardsWrapper does, and every DTensor."""
    return hasattr(leaf, "__create_write_items__")


def _local_shards(tensor: Any, origin: Ints) -> Iterator[tuple[Box, torch.Tensor]]:
    """The boxes of a ShardedTensor. FSDP1 in two dimensions makes ShardedTensors of ShardedTensors, and of DTensors."""
    for shard in tensor.local_shards():
        offset = tuple(a + b for a, b in zip(origin, shard.metadata.shard_offsets, strict=True))
        if is_sharded_tensor(shard.tensor):
            yield from _local_shards(shard.tensor, offset)
            continue
        local = shard.tensor.to_local() if is_dtensor(shard.tensor) else shard.tensor
        yield Box(offset, tuple(shard.metadata.shard_sizes)), plain_tensor(local)


def _from_its_items(fqn: str, leaf: Any) -> HeldPieces:
    """By the hooks: the value makes the items, and finds the tensor of each."""
    items = leaf.__create_write_items__(fqn, leaf)
    shape = tuple(items[0].tensor_data.size) if items else global_shape(leaf)
    pieces = []
    for item in items:
        data = item.tensor_data
        box = Box(tuple(data.chunk.offsets), tuple(data.chunk.sizes))
        pieces.append((box, plain_tensor(leaf.__get_tensor_shard__(item.index))))
    return HeldPieces(shape, leaf.dtype, pieces)


_BOX_FIELDS = ("global_shape", "global_offsets", "local_offsets", "local_sizes")


def says_its_boxes(value: object) -> bool:
    """Whether a value is a tensor that says which boxes of a global tensor are in it: it has these four attributes."""
    return isinstance(value, torch.Tensor) and all(hasattr(value, name) for name in _BOX_FIELDS)


def global_shape(tensor: Any) -> Ints:
    """The shape of a tensor; of one that says its boxes, that of the global tensor."""
    return tuple(tensor.global_shape if says_its_boxes(tensor) else tensor.shape)


def _minus(a: Ints, b: Ints) -> Ints:
    return tuple(x - y for x, y in zip(a, b, strict=True))
