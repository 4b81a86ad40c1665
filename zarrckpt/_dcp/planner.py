"""DCP planners that keep more of a state than DCP's own, and check a whole load before its first read."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from zarrckpt._dcp.items import make_notes, resolves_as_dcp
from zarrckpt._errors import UnsupportedLayoutError
from zarrckpt._format.grid import Box
from zarrckpt._format.module_versions import Versions
from zarrckpt._format.state_path import StatePath
from zarrckpt._load.match import StateMatch
from zarrckpt._ranks.group import has_default_group
from zarrckpt._state.flatten import flatten
from zarrckpt._state.local_boxes import LocalBoxes, to_local_boxes
from zarrckpt._state.local_state import refuse_unsaveable, shared_versions
from zarrckpt._state.saved_entries import SavedEntries, SavedTensor


class ZarrSavePlanner(DefaultSavePlanner):
    """DCP's default planner that also keeps empty dicts, the types of keys, and OrderedDicts.

    Pass it as ``planner`` to ``dcp.save``. It has the arguments of
    :class:`~torch.distributed.checkpoint.DefaultSavePlanner` except ``flatten_state_dict``, which is always true.
    ``enable_plan_caching`` has no effect.
    """

    def __init__(self, *, dedup_save_to_lowest_rank: bool = False, enable_plan_caching: bool = False) -> None:
        # DCP's cache ignores dtypes and containers, and is shared by all groups of a process.
        super().__init__(dedup_save_to_lowest_rank=dedup_save_to_lowest_rank)

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Flatten this rank's state. Raises UnsupportedValueError with a list of tensors that cannot be saved."""
        flat, paths, versions = flatten(state_dict)
        refuse_unsaveable(flat)
        self.mappings = dict(paths)
        self.module_versions = shared_versions(versions)
        held = {fqn: to_local_boxes(fqn, leaf) for fqn, leaf in flat.items()}
        self.state_dict = {fqn: DcpTensor(leaf) if isinstance(leaf, LocalBoxes) else leaf for fqn, leaf in held.items()}
        self.is_coordinator = is_coordinator

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return the value of an item, or the piece of a tensor at the index's offset."""
        piece = _piece(self.state_dict, index)
        return super().lookup_object(index) if piece is None else piece

    def create_local_plan(self) -> SavePlan:
        """Return the plan of this rank's items, with digests of their contents if there are other ranks."""
        plan = super().create_local_plan()
        notes = make_notes(plan, self, self.module_versions, compared=has_default_group())
        return dataclasses.replace(plan, storage_data=notes)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Merge the plans of all ranks. Raises UnsupportedLayoutError if their boxes overlap or leave gaps."""
        try:
            return super().create_global_plan(all_plans)
        except ValueError as err:
            raise UnsupportedLayoutError(f"the shards of some tensors overlap or leave gaps: {err}") from err


def returns_state_tensors(planner: SavePlanner) -> bool:
    """Whether a planner returns the tensors of the state themselves, not temporary tensors made from them."""
    found = (DefaultSavePlanner.lookup_object, ZarrSavePlanner.lookup_object)
    return resolves_as_dcp(planner) and getattr(type(planner), "lookup_object", None) in found


def _piece(flat: Mapping[str, Any], index: MetadataIndex) -> torch.Tensor | None:
    """Return the piece of a sharded tensor at an index, or None for other entries."""
    leaf = flat.get(index.fqn)
    if not isinstance(leaf, DcpTensor):
        return None
    assert index.offset is not None
    return leaf.held.tensor_at(tuple(index.offset))


@dataclasses.dataclass
class VersionedMetadata(Metadata):
    """DCP's metadata of a checkpoint, with the versions of its modules."""

    versions: Versions = dataclasses.field(default_factory=dict)


class ZarrLoadPlanner(DefaultLoadPlanner):
    """DCP's default planner that checks every key, shape and dtype before the first read, and lists all differences.

    Tensor targets are filled in place. Other targets, including whole containers, are replaced by the saved values.
    Pickled values load only with the reader's ``allow_pickle``.

    Args:
        strict: raise KeyMismatchError for a target key that the checkpoint lacks. Otherwise the target is unchanged.
        allow_cast: convert to the target's dtype instead of raising KeyMismatchError.
    """

    def __init__(self, *, strict: bool = True, allow_cast: bool = False) -> None:
        super().__init__(allow_partial_load=not strict)
        self.allow_cast = allow_cast
        self.loaded: list[str] = []
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self._values: dict[str, object] = {}

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Match this rank's targets with the checkpoint's entries. Raises KeyMismatchError with all differences."""
        assert metadata is not None
        self.original_state_dict = state_dict
        self.metadata = metadata
        self.is_coordinator = is_coordinator
        self._values = {}
        self._match = match = StateMatch(
            _saved(metadata), state_dict, strict=not self.allow_partial_load, allow_cast=self.allow_cast
        )
        self.loaded, self.missing, self.unexpected = match.loaded, match.missing, match.unexpected
        match.check()
        self.mappings: dict[str, Any] = match.paths
        self.state_dict = {
            fqn: DcpTensor(leaf) if isinstance(leaf, LocalBoxes) else leaf for fqn, leaf in match.leaves.items()
        }

    def create_local_plan(self) -> LoadPlan:
        """Return the plan with a read item for each box of this rank. Ranks outside a DTensor's mesh have no box."""
        assert self.metadata is not None
        items: list[ReadItem] = []
        boxes: dict[str, list[Any]] = {}
        for target in self._match.tensors():
            boxes.setdefault(target.fqn, []).append(to_chunk_metadata(target.box))
        for fqn in self.state_dict:
            entry = self.metadata.state_dict_metadata[fqn]
            if isinstance(entry, TensorStorageMetadata):
                items += create_read_items_for_chunk_list(fqn, entry, boxes.get(fqn, []))
            else:
                index, nothing = MetadataIndex(fqn), torch.Size((0,))
                items.append(ReadItem(LoadItemType.BYTE_IO, index, nothing, index, nothing, nothing))
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """Return the memory of this rank's piece at the index's offset."""
        piece = _piece(self.state_dict, index)
        return super().lookup_tensor(index) if piece is None else piece

    def load_value(self, read_item: ReadItem, value: object) -> None:
        """Accept a decoded non-tensor entry. The reader of this package calls it instead of ``load_bytes``."""
        self._values[read_item.dest_index.fqn] = value

    def finish_load(self) -> None:
        """Put values and rebuilt subtrees into the original state after all reads."""
        self._match.finish(self._values)


def _saved(metadata: Metadata) -> SavedEntries:
    entries = {
        fqn: SavedTensor(tuple(entry.size), entry.properties.dtype)
        if isinstance(entry, TensorStorageMetadata)
        else None
        for fqn, entry in metadata.state_dict_metadata.items()
    }
    versions = metadata.versions if isinstance(metadata, VersionedMetadata) else {}
    return SavedEntries(entries, {fqn: StatePath.of(metadata.planner_data[fqn]) for fqn in entries}, versions=versions)


class DcpTensor:
    """Replaces a sharded tensor in a planner's flat state. DCP gets write items and boxes from it."""

    def __init__(self, held: LocalBoxes) -> None:
        self.held = held

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.held.dtype)
        return [
            WriteItem(
                MetadataIndex(fqn, torch.Size(box.offset)),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(to_chunk_metadata(box), properties, torch.Size(self.held.shape)),
            )
            for box in self.held.boxes
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [to_chunk_metadata(box) for box in self.held.boxes]


def to_chunk_metadata(box: Box) -> ChunkStorageMetadata:
    """Return a box as DCP's ChunkStorageMetadata."""
    return ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.shape))
