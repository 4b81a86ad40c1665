"""The DCP storage reader: one method a step, in the order in which DCP calls them."""

from __future__ import annotations

import dataclasses
import io
import os
import uuid
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from zarrckpt._dcp.channel import ChannelName, pieces_connected
from zarrckpt._dcp.planner import ZarrLoadPlanner
from zarrckpt._errors import CheckpointError, CheckpointReplacedError, KeyMismatchError, UnsupportedLayoutError
from zarrckpt._format.documents import ArrayNode
from zarrckpt._format.grid import Box
from zarrckpt._format.root import Root
from zarrckpt._jobs import Progress, run_jobs
from zarrckpt._load.aliases import refuse_conflicts, separate_targets
from zarrckpt._load.fill import TensorReads, TensorTarget
from zarrckpt._load.shared_reads import Shares, plan_shares, wanted_boxes
from zarrckpt._options import LoadOptions, checked_options
from zarrckpt._ranks.errors import PeerLost
from zarrckpt._ranks.group import global_rank
from zarrckpt._read.catalog import Catalog
from zarrckpt._state.tensors import memory_fault, plain_tensor, torch_dtype
from zarrckpt._store import StoreSpec, Url


@dataclasses.dataclass(frozen=True)
class _Facts:
    """One rank, as the coordinator must know it."""

    rank: int
    save_id: str
    """Which save this rank is about to load."""


@dataclasses.dataclass(frozen=True)
class _LoadTask:
    """What the coordinator gives each rank with its plan."""

    shares: Shares
    channel: ChannelName | None


class ZarrStorageReader(StorageReader):
    """Load a checkpoint of this package with ``torch.distributed.checkpoint``, into any sharding.

    Pass it as ``dcp.load(state_dict, storage_reader=ZarrStorageReader(url))``, or give the url as
    ``checkpoint_id``. Each rank fetches what its own boxes need, less what others hand it. Pickles without clients
    and without secrets.

    Args:
        url: where the checkpoint is: a local path, ``file://``, ``s3://``, ``gs://``, ``az://``, or any fsspec url; or
            a ready zarr or obstore store, with ``zarr.storage.StorePath(store, path)`` for a path in one.
        allow_pickle: also load values that were saved pickled, which can run any code that the checkpoint holds.
        allow_cast: with planners other than :class:`ZarrLoadPlanner`, convert to the target's dtype instead of raising.
        storage_options: options of the store by name, as fsspec or obstore take them, such as ``endpoint_url``
            (``docs/how-to/stores.md``); default: what the environment says. ``credential_provider``, for tokens that
            expire: a picklable callable that returns fresh credentials. An unknown name is a StorageError.
        options: how bytes are moved, see :class:`LoadOptions`.
        progress: called as ``progress(bytes_done, bytes_total)`` while chunks are read.
    """

    def __init__(
        self,
        url: Url | None = None,
        *,
        allow_pickle: bool = False,
        allow_cast: bool = False,
        storage_options: Mapping[str, Any] | None = None,
        options: LoadOptions | None = None,
        progress: Progress | None = None,
    ) -> None:
        self._options = checked_options(options, LoadOptions)
        self._spec = StoreSpec(url, storage_options, concurrency=self._options.concurrency)
        self._allow_pickle = allow_pickle
        self._allow_cast = allow_cast
        self._progress = progress
        self._catalog: Catalog | None = None
        self.load_id = uuid.uuid4().hex
        """Names a load of this reader, in the metadata that DCP's planners and loggers get."""
        self.bytes_read = 0
        """Bytes fetched for tensors by the last load of this reader."""

    @property
    def checkpoint_id(self) -> str:
        """The url, for DCP's log records."""
        return self._spec.url

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Every path and url may be one of ours."""
        return True

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_catalog": None}

    # -- all ranks

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A new load begins."""
        if checkpoint_id is not None:
            self._spec = self._spec.at(checkpoint_id)
        self._catalog = None
        self.load_id = uuid.uuid4().hex

    def read_metadata(self) -> Metadata:
        """The checkpoint's entries, one box a tensor however many ranks saved it. One request.

        An error (CheckpointNotFoundError where nothing is committed, CorruptCheckpointError, ...) is raised when the
        returned metadata is first used: DCP would replace it by an AssertionError if it were raised here. (Without
        parameters on purpose: one named ``kwargs`` makes DCP retry in a mode without collectives, with another error.)
        """
        try:
            self._catalog = Catalog(self._spec)
        except CheckpointError as err:
            return _NoMetadata(err)
        root = self._catalog.root
        entries: dict[str, Any] = {
            fqn: _tensor_metadata(entry) if isinstance(entry, ArrayNode) else BytesStorageMetadata()
            for fqn, entry in root.entries.items()
        }
        return Metadata(
            entries,
            planner_data={fqn: root.state_path(fqn) for fqn in entries},
            storage_meta=StorageMeta(self.checkpoint_id, root.save_id, self.load_id),
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Raise what kept the metadata from being read."""
        if isinstance(metadata, _NoMetadata):
            raise metadata.error
        self.bytes_read = 0

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan as it is, each box turns into requests when it is read; with what the coordinator must know."""
        save_id = self._catalog.root.save_id if self._catalog is not None else ""
        return dataclasses.replace(plan, storage_data=_Facts(global_rank(), save_id))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """With ``share_reads``, say which rank fetches what several need. Called by the coordinator; no I/O.

        Raises CheckpointReplacedError where ranks have read the roots of different saves.
        """
        facts: list[_Facts] = [plan.storage_data for plan in plans]
        saves = {fact.save_id for fact in facts}
        if len(saves) > 1:
            raise CheckpointReplacedError(
                f"the checkpoint at {self.checkpoint_id} was replaced while the ranks opened it: some have save "
                f"{min(saves)[:8]}, others {max(saves)[:8]}; nothing was loaded, load again"
            )
        shares: dict[int, Shares] = {rank: {} for rank in range(len(plans))}
        if len(plans) > 1 and self._catalog is not None and self._options.shares(self._catalog.store.is_local):
            nodes = self._catalog.root.tensors
            targets = [_targets(plan.items) for plan in plans]
            for fqn in {fqn for own in targets for fqn, _ in own}:
                self._catalog.refuse_more_chunks_than_checksums(nodes[fqn])
            limit = max(1, self._options.max_inflight_bytes // 4)
            shares = plan_shares(range(len(plans)), nodes, wanted_boxes(targets), len(plans), limit)
        channel = ChannelName.new(tuple(fact.rank for fact in facts)) if any(shares.values()) else None
        tasks = [_LoadTask(own, channel) for own in shares.values()]
        return [dataclasses.replace(plan, storage_data=task) for plan, task in zip(plans, tasks, strict=True)]

    # -- all ranks

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill this rank's targets. Dtypes of all targets are checked before the first is written.

        Raises KeyMismatchError, CorruptCheckpointError (naming array and object), CheckpointReplacedError,
        UnsafeValueError. After damage found while reading, the targets are undefined.
        """
        if self._catalog is None:
            raise CheckpointError("read_data needs read_metadata first: load with dcp.load or zarrckpt.load")
        # A planner that makes plans anew drops the task: then this rank takes no part, and reads for itself.
        task = plan.storage_data if isinstance(plan.storage_data, _LoadTask) else _LoadTask({}, None)
        begun: tuple[TensorReads, list[tuple[ReadItem, Any]]] | None = None
        try:
            # First of all, since the others wait for it; a rank that fails from here on hangs up.
            with suppress(PeerLost), pieces_connected(task.channel) as channel:
                begun = self._begun(self._catalog, plan.items, planner)
                if channel is not None:
                    with self._catalog.explaining_damage():
                        begun[0].share(task.shares, channel)
            # What did not come from others, this rank fetches by itself.
            reads, values = begun = begun or self._begun(self._catalog, plan.items, planner)
            with self._catalog.explaining_damage():
                reads.read()
        finally:
            self.bytes_read = 0 if begun is None else begun[0].bytes_read
        for item, value in values:
            _deliver(planner, item, value)
        if isinstance(planner, ZarrLoadPlanner):
            planner.finish_load()
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _begun(
        self, catalog: Catalog, items: Sequence[ReadItem], planner: LoadPlanner
    ) -> tuple[TensorReads, list[tuple[ReadItem, Any]]]:
        """The targets, whose dtypes are checked; and the values, which are read."""
        tensors = [item for item in items if item.type != LoadItemType.BYTE_IO]
        objects = [item for item in items if item.type == LoadItemType.BYTE_IO]
        self._check_dtypes(catalog.root, tensors, planner)
        read = partial(catalog.read_object, allow_pickle=self._allow_pickle)
        # Several at once: each blob is a request.
        found = run_jobs((partial(read, item.storage_index.fqn) for item in objects), catalog.store.max_concurrency)
        with catalog.explaining_damage():
            limit = self._options.max_inflight_bytes
            targets, conflicts = separate_targets(catalog, [_target(item, planner) for item in tensors], limit)
            refuse_conflicts(conflicts)
            reads = TensorReads(catalog, targets, limit, self._progress)
        return reads, list(zip(objects, found, strict=True))

    def _check_dtypes(self, root: Root, items: list[ReadItem], planner: LoadPlanner) -> None:
        if self._allow_cast or isinstance(planner, ZarrLoadPlanner):
            return
        faults = []
        for item in items:
            saved, target = torch_dtype(root.tensors[item.storage_index.fqn]), planner.resolve_tensor(item).dtype
            if saved != target:
                faults.append(f"{item.storage_index.fqn!r} has dtype {target}, the checkpoint has {saved}")
        if faults:
            raise KeyMismatchError(
                "the dtypes of target and checkpoint differ; nothing was loaded: "
                + "; ".join(faults[:20])
                + "; pass allow_cast=True to convert"
            )


class _NoMetadata(Metadata):
    """Metadata that could not be read: raises the reason when its entries are asked for."""

    def __init__(self, error: CheckpointError) -> None:
        self.error = error

    def __getattribute__(self, name: str) -> Any:
        if name == "state_dict_metadata":
            raise self.error
        return super().__getattribute__(name)


def _item_box(item: ReadItem) -> Box:
    """The region of the stored tensor that an item asks for."""
    return Box(tuple(item.storage_offsets), tuple(item.lengths))


def _targets(items: Sequence[ReadItem]) -> Iterable[tuple[str, Box]]:
    """The boxes of tensors that a rank is to fill."""
    return [(i.storage_index.fqn, _item_box(i)) for i in items if i.type != LoadItemType.BYTE_IO]


def _target(item: ReadItem, planner: LoadPlanner) -> TensorTarget:
    fqn, box, tensor = item.storage_index.fqn, _item_box(item), planner.resolve_tensor(item)
    # What a planner cuts of a wrapper may be a temporary tensor.
    kept = planner.lookup_tensor(item.dest_index) if isinstance(planner, DefaultLoadPlanner) else tensor
    if (fault := memory_fault(kept)) is not None:
        raise KeyMismatchError(f"{fqn!r} {fault}; nothing was loaded")
    if tuple(tensor.shape) != box.shape:
        raise UnsupportedLayoutError(
            f"{fqn!r}: DCP's planner says that this rank holds a piece of shape {box.shape}, but it "
            f"holds {tuple(tensor.shape)}: load with zarrckpt.load, or with planner=zarrckpt.ZarrLoadPlanner()"
        )
    return TensorTarget(fqn, box, plain_tensor(tensor), partial(planner.commit_tensor, item, tensor))


def _tensor_metadata(node: ArrayNode) -> TensorStorageMetadata:
    shape = torch.Size(node.grid.shape)
    # pin_memory and requires_grad stay off: load_sharded_optimizer_state_dict allocates by these properties.
    properties = TensorProperties(dtype=torch_dtype(node), requires_grad=False, pin_memory=False)
    box = ChunkStorageMetadata(offsets=torch.Size([0] * len(shape)), sizes=shape)
    return TensorStorageMetadata(properties, shape, [box])


def _deliver(planner: LoadPlanner, item: ReadItem, value: object) -> None:
    if isinstance(planner, ZarrLoadPlanner):
        planner.load_value(item, value)
        return
    # DCP's planners unpickle whatever they are given: they get only bytes made here, from a value decoded safely.
    data = io.BytesIO()
    torch.save(value, data)
    data.seek(0)
    planner.load_bytes(item, data)
