"""DCP planners that keep what DCP's own lose, and check all of a load before any of it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint._sharded_tensor_utils import _flatten_sharded_tensors
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.planner_helpers import _create_read_items
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from zarrckpt._digests import digests_of
from zarrckpt._distributed import in_use
from zarrckpt._documents import MAX_DIMENSIONS
from zarrckpt._errors import CheckpointError, KeyMismatchError, UnsupportedLayoutError, UnsupportedValueError
from zarrckpt._flatten import build, flatten, set_leaf
from zarrckpt._held import HeldParts, HeldTensor, global_shape, says_its_boxes
from zarrckpt._mail import Notes
from zarrckpt._per_rank import PerRank
from zarrckpt._plan_items import LazyItems, OwnReads
from zarrckpt._state_path import StatePath
from zarrckpt._tensors import META, OVERLAPS, overlaps

_LAZY = "is a parameter of a lazy module, which has no shape before its first forward pass: make one"

_PER_RANK = "is a PerRank, which zarrckpt.save, async_save and load take, and DCP's own calls do not"


_ONE_SIDED = "strict=False skips what only one side has"

_STEPS = {
    " has shape ": "shapes must match: build the model with the checkpoint's sizes, or leave these out",
    " has dtype ": "allow_cast=True converts dtypes",
    " is not in the checkpoint": _ONE_SIDED,
    " has no target": _ONE_SIDED,
}
"""What a difference between target and checkpoint says -> the next step."""


def without_target(fqn: str) -> str:
    """The difference that an entry is which nothing takes."""
    return f"{fqn!r} is in the checkpoint and has no target"


def listed(faults: Sequence[str]) -> str:
    """Differences between target and checkpoint for a message, a line each."""
    more = [f"and {len(faults) - 50} more"] if len(faults) > 50 else []
    return "".join(f"\n  {line}" for line in [*faults[:50], *more])


def resolves_as_dcp(planner: SavePlanner) -> TypeGuard[DefaultSavePlanner]:
    """Whether a planner makes nothing else of what it looks up than DCP's default one does."""
    return (
        isinstance(planner, DefaultSavePlanner)
        and type(planner).resolve_data is DefaultSavePlanner.resolve_data
        and type(planner).transform_object is DefaultSavePlanner.transform_object
    )


class ZarrSavePlanner(DefaultSavePlanner):
    """DCP's default planner that also keeps empty dicts, keys that are no strings, and OrderedDicts.

    Takes the arguments of :class:`~torch.distributed.checkpoint.DefaultSavePlanner` but ``flatten_state_dict``,
    which is always true; ``enable_plan_caching`` changes nothing. :func:`zarrckpt.save` uses it; with ``dcp.save`` pass
    it as ``planner``.
    """

    _alone = False
    """Whether this process is known to save alone: nothing to compare with other ranks, and no parts of tensors."""

    def __init__(self, *, dedup_save_to_lowest_rank: bool = False, enable_plan_caching: bool = False) -> None:
        # DCP's cache takes plans of other dtypes and containers for the same, and is one for all groups of a process.
        super().__init__(dedup_save_to_lowest_rank=dedup_save_to_lowest_rank)

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Flatten this rank's state. Raises UnsupportedValueError listing tensors that can't be saved."""
        self._take(*flatten(state_dict))
        self.is_coordinator = is_coordinator

    def _take(self, flat: Mapping[str, Any], paths: Mapping[str, StatePath]) -> None:
        """Save a state that is flat already: leaves and paths by flat name. Raises UnsupportedValueError."""
        _refuse_unsaveable(flat)
        self.mappings = dict(paths)
        self.state_dict = _with_pieces(dict(flat))

    def lookup_object(self, index: MetadataIndex) -> Any:
        """What an item of the plan stands for: of a tensor, the piece that begins at the index's offset."""
        piece = _piece(self.state_dict, index)
        return super().lookup_object(index) if piece is None else piece

    def create_local_plan(self) -> SavePlan:
        """This rank's items, with notes of what they stand for where there are other ranks to compare with.

        Raises UnsupportedLayoutError for what a process that saves alone has a part of.
        """
        plan = super().create_local_plan()
        if self._alone:
            _refuse_parts(self.state_dict, plan)
        if self._alone or not in_use():
            return plan
        notes = Notes(digests_of(self.plan, self.lookup_object), self.dedup_save_to_lowest_rank, self._leaves_merging())
        return dataclasses.replace(plan, storage_data=notes)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Merge all ranks' plans. Raises UnsupportedLayoutError where their boxes overlap or leave gaps.

        With our writer the plans stay as they are, and the writer merges them: it must know all replicas anyway. Then
        the writer also fills in the metadata, with one box a tensor, when it finishes.
        """
        if self._leaves_merging() and all(isinstance(plan.items, LazyItems) for plan in all_plans):
            self.global_plan, self.metadata = all_plans, Metadata({})
            return self.global_plan, self.metadata
        try:
            return super().create_global_plan(all_plans)
        except ValueError as err:
            raise UnsupportedLayoutError(f"the shards of some tensors overlap or leave gaps: {err}") from err

    def _leaves_merging(self) -> bool:
        """Whether nothing but a writer need look at all ranks' items: a subclass may."""
        steps = ("create_global_plan", "_create_global_plan", "_dedup_save_plans")
        return all(getattr(type(self), step) is getattr(ZarrSavePlanner, step) for step in steps)


def _refuse_parts(flat: Mapping[str, Any], plan: SavePlan) -> None:
    """Raise UnsupportedLayoutError for tensors of which a plan does not have all elements: no other rank adds them."""
    missing: dict[str, int] = {}
    for item in plan.items:
        if item.tensor_data is None:
            missing[item.index.fqn] = 0
        else:
            left = missing.get(item.index.fqn, math.prod(item.tensor_data.size))
            missing[item.index.fqn] = left - math.prod(item.tensor_data.chunk.sizes)
    # A DTensor whose mesh this process is not in has no item at all.
    parts = [f"{fqn!r} lacks {missing.get(fqn, 'all')} elements" for fqn in flat if missing.get(fqn, 1) > 0]
    if parts:
        raise UnsupportedLayoutError(
            f"{len(parts)} tensors are sharded over ranks, and this process saves alone; nothing was written:"
            f"{listed(parts)}\nsave on all ranks that hold parts, without no_dist, or save .full_tensor() of each"
        )


def _with_pieces(flat: dict[str, Any]) -> dict[str, Any]:
    """Tensors in the form that plans are made from: DTensors, and what says its boxes, as the boxes that are held here.

    ShardedTensors go through DCP's own flattening of those that hold ShardedTensors (FSDP1 in two dimensions); only
    they, since it drops empty containers.
    """
    nested = {fqn: leaf for fqn, leaf in flat.items() if isinstance(leaf, ShardedTensor)}
    held = {fqn: HeldTensor(fqn, leaf) for fqn, leaf in flat.items() if _is_cut_by_placements(leaf)}
    parts = {fqn: HeldParts(fqn, leaf) for fqn, leaf in flat.items() if says_its_boxes(leaf)}
    return {**flat, **_flatten_sharded_tensors(nested), **held, **parts}


def _is_cut_by_placements(leaf: Any) -> bool:
    """Whether a value is a DTensor whose local part is one tensor: others (LocalShardsWrapper) say what they hold."""
    return isinstance(leaf, DTensor) and not hasattr(leaf.to_local(), "__create_write_items__")


def _piece(flat: Mapping[str, Any], index: MetadataIndex) -> torch.Tensor | None:
    """The piece of a DTensor at an index; None for what is none."""
    leaf = flat.get(index.fqn)
    if not isinstance(leaf, HeldTensor):
        return None
    assert index.offset is not None
    return leaf.piece(tuple(index.offset))


def _refuse_unsaveable(flat: Mapping[str, Any]) -> None:
    bad = [f"{fqn!r} {fault}" for fqn, leaf in flat.items() if (fault := _fault_of(leaf))]
    if bad:
        raise UnsupportedValueError("; ".join(bad))


def _fault_of(leaf: Any) -> str | None:
    if isinstance(leaf, PerRank):
        return _PER_RANK
    if isinstance(leaf, DTensor):
        if any(placement.is_partial() for placement in leaf.placements):
            return f"is a DTensor with the placements {leaf.placements}: redistribute() it, partial sums are no values"
        leaf = leaf.to_local()
    if not isinstance(leaf, torch.Tensor) or isinstance(leaf, ShardedTensor):
        return None
    if is_lazy(leaf):
        return _LAZY
    if leaf.is_meta:
        return META
    if leaf.ndim > MAX_DIMENSIONS:
        return f"has {leaf.ndim} dimensions: more than {MAX_DIMENSIONS} cannot be saved; reshape it"
    if leaf.layout != torch.strided or leaf.is_nested:
        kind = "is a nested tensor" if leaf.is_nested else f"has layout {leaf.layout}"
        return f"{kind}: only strided tensors can be saved; use .to_dense(), or save its parts"
    return None


def _new_tensor(fqn: str, entry: TensorStorageMetadata) -> torch.Tensor:
    try:
        return torch.empty(entry.size, dtype=entry.properties.dtype)
    except RuntimeError as err:
        raise CheckpointError(
            f"{fqn!r} has the shape {tuple(entry.size)} in the checkpoint, more than can be allocated here: load it "
            "into a sharded tensor, or leave the key out"
        ) from err


class ZarrLoadPlanner(DefaultLoadPlanner):
    """DCP's default planner that checks every key, shape and dtype before a byte is read, and lists all that differ.

    Non-tensor targets are replaced by what was saved, whole containers included; pickled values load only where the
    reader was told so. Tensor targets are filled in place.

    Args:
        strict: a target key that the checkpoint lacks raises KeyMismatchError; otherwise that target stays as it is.
        allow_cast: convert to the target's dtype instead of raising KeyMismatchError.
        select: called with each flat name; targets for which it is false are left alone.
        required: called with each flat name in the checkpoint that has no target; true makes it an error.
    """

    def __init__(
        self,
        *,
        strict: bool = True,
        allow_cast: bool = False,
        select: Callable[[str], bool] | None = None,
        required: Callable[[str], bool] | None = None,
    ) -> None:
        super().__init__(allow_partial_load=not strict)
        self.allow_cast = allow_cast
        self._select = select or (lambda fqn: True)
        self._required = required or (lambda fqn: False)
        self.loaded: list[str] = []
        self.missing: list[str] = []
        self.unexpected: list[str] = []

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Match this rank's targets with the checkpoint's entries. Raises KeyMismatchError listing all differences."""
        assert metadata is not None
        self.original_state_dict = state_dict
        self.metadata = metadata
        self.is_coordinator = is_coordinator
        flat, paths = flatten(state_dict)
        for fqn, leaf in flat.items():
            if isinstance(leaf, PerRank):
                raise UnsupportedValueError(f"{fqn!r} {_PER_RANK}")
        selected = {fqn: leaf for fqn, leaf in flat.items() if self._select(fqn)}
        self._expand(selected, paths)
        entries = metadata.state_dict_metadata
        self.missing = sorted(selected.keys() - entries.keys())
        self.unexpected = sorted(filter(self._select, entries.keys() - flat.keys() - selected.keys()))
        self.loaded = sorted(selected.keys() & entries.keys())
        self._refuse({fqn: selected[fqn] for fqn in self.loaded})
        self.mappings: dict[str, Any] = {fqn: paths[fqn] for fqn in self.loaded}
        # In the checkpoint's order, which rebuilt dicts then have.
        self._values = [f for f in entries if f in selected and not isinstance(selected[f], torch.Tensor)]
        self.state_dict = _with_pieces({fqn: self._target(fqn, selected[fqn]) for fqn in self.loaded})

    def _expand(self, selected: dict[str, Any], paths: dict[str, StatePath]) -> None:
        """Where a non-tensor target stands for a whole subtree of the checkpoint, ask for the entries below it."""
        assert self.metadata is not None
        entries = self.metadata.state_dict_metadata
        absent = {fqn for fqn in selected if fqn not in entries and not isinstance(selected[fqn], torch.Tensor)}
        self._subtrees: dict[str, StatePath] = {}
        self._stem_of: dict[str, str] = {}
        if not absent:
            return
        for fqn in entries:
            saved = StatePath.of(self.metadata.planner_data[fqn])
            for depth in range(1, len(saved)):
                stem = ".".join(map(str, saved[:depth]))
                if stem in absent:
                    self._subtrees[stem] = paths[stem]
                    self._stem_of[fqn] = stem
                    selected[fqn] = None
                    paths[fqn] = saved
                    break
        for stem in self._subtrees:
            del selected[stem]

    def _target(self, fqn: str, leaf: Any) -> Any:
        """The memory to fill: the target itself, or a new CPU tensor where a value is to become one."""
        assert self.metadata is not None
        entry = self.metadata.state_dict_metadata[fqn]
        if isinstance(entry, TensorStorageMetadata) and not isinstance(leaf, (torch.Tensor, ShardedTensor)):
            return _new_tensor(fqn, entry)
        return leaf

    def _refuse(self, targets: Mapping[str, Any]) -> None:
        assert self.metadata is not None
        faults = [
            fault
            for fqn, leaf in targets.items()
            if (fault := self._fault(fqn, leaf, self.metadata.state_dict_metadata[fqn]))
        ]
        if not self.allow_partial_load:
            faults += [f"{fqn!r} is not in the checkpoint" for fqn in self.missing]
            faults += [without_target(fqn) for fqn in self.unexpected if self._required(fqn)]
        if faults:
            steps = {step: None for words, step in _STEPS.items() if any(words in fault for fault in faults)}
            raise KeyMismatchError(
                f"{len(faults)} entries of the target and the checkpoint differ; nothing was loaded:{listed(faults)}\n"
                f"{'; '.join([*steps, 'keys=[...] loads a part'])}"
            )

    def _fault(self, fqn: str, leaf: Any, entry: Any) -> str | None:
        if not isinstance(leaf, torch.Tensor):
            return None
        if is_lazy(leaf):
            return f"{fqn!r} {_LAZY}"
        if isinstance(entry, BytesStorageMetadata):
            return (
                f"{fqn!r} is a tensor of shape {global_shape(leaf)} in the target and a plain value in the checkpoint"
            )
        if global_shape(leaf) != tuple(entry.size):
            return f"{fqn!r} has shape {global_shape(leaf)}, the checkpoint has {tuple(entry.size)}"
        if leaf.dtype != entry.properties.dtype and not self.allow_cast:
            return f"{fqn!r} has dtype {leaf.dtype}, the checkpoint has {entry.properties.dtype}"
        if not isinstance(leaf, ShardedTensor) and leaf.is_meta:
            return f"{fqn!r} is on the meta device and has no memory to fill: materialise it (to_empty) first"
        local = leaf.to_local() if isinstance(leaf, DTensor) else leaf
        if not isinstance(local, ShardedTensor) and local.layout == torch.strided and overlaps(local):
            return f"{fqn!r} {OVERLAPS}"
        return None

    def create_local_plan(self) -> LoadPlan:
        """One read item for each of this rank's boxes; ranks outside a DTensor's mesh have none."""
        assert self.metadata is not None
        items: list[ReadItem] = []
        for fqn, target in self.state_dict.items():
            items += _create_read_items(fqn, self.metadata.state_dict_metadata[fqn], target)
        return LoadPlan(OwnReads(items) if self._leaves_items() else items)

    def _leaves_items(self) -> bool:
        """Whether no step looks at the items of a plan that was sent: a subclass may."""
        own = type(self).finish_plan is DefaultLoadPlanner.finish_plan
        return own and type(self).create_global_plan in self._steps_that_leave_items

    _steps_that_leave_items: tuple[Callable[..., Any], ...] = (DefaultLoadPlanner.create_global_plan,)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """The memory of this rank's piece that begins at the index's offset."""
        piece = _piece(self.state_dict, index)
        return super().lookup_tensor(index) if piece is None else piece

    def load_value(self, read_item: ReadItem, value: object) -> None:
        """Take a non-tensor entry as the object that it is. Called by our reader in place of ``load_bytes``."""
        self.state_dict[read_item.dest_index.fqn] = value

    def finish_load(self) -> None:
        """Put values and rebuilt subtrees into the original state, after everything was read."""
        below: dict[str, list[tuple[StatePath, Any]]] = {stem: [] for stem in self._subtrees}
        for fqn in self._values:
            path = self.mappings[fqn]
            stem = self._stem_of.get(fqn)
            if stem is None:
                set_leaf(self.original_state_dict, path, self.state_dict[fqn])
            else:
                below[stem].append((path, self.state_dict[fqn]))
        for stem, rows in below.items():
            path = self._subtrees[stem]
            set_leaf(self.original_state_dict, path, build(rows, len(path)))
