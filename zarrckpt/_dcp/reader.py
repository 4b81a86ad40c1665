"""The DCP storage reader. Its methods are in the order in which DCP calls them."""

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

from zarrckpt._dcp.channel import ChannelName, connect_channel
from zarrckpt._dcp.planner import VersionedMetadata, ZarrLoadPlanner
from zarrckpt._errors import CheckpointError, CheckpointReplacedError, KeyMismatchError, UnsupportedLayoutError
from zarrckpt._events import EventSender
from zarrckpt._format.documents import ArrayNode
from zarrckpt._format.grid import Box
from zarrckpt._format.root import Root
from zarrckpt._jobs import Progress, run_jobs
from zarrckpt._load.aliases import refuse_conflicts, separate_targets
from zarrckpt._load.fill import TensorReads, TensorTarget
from zarrckpt._load.shared_reads import Shares, boxes_of_ranks, plan_shares
from zarrckpt._options import LoadOptions, checked_options
from zarrckpt._ranks.errors import LostPeerError
from zarrckpt._ranks.group import global_rank
from zarrckpt._read.catalog import Catalog
from zarrckpt._state.tensors import memory_fault, plain_tensor, torch_dtype
from zarrckpt._store import StoreSpec, Url


@dataclasses.dataclass(frozen=True)
class _Facts:
    """Data of one rank for the coordinator."""

    rank: int
    save_id: str
    """The id of the save that this rank is about to load."""


@dataclasses.dataclass(frozen=True)
class _LoadTask:
    """The data that the coordinator sends to each rank with its plan."""

    shares: Shares
    channel: ChannelName | None


class ZarrStorageReader(StorageReader):
    """Load a checkpoint of this package with ``torch.distributed.checkpoint``, into any sharding.

    Pass it as ``dcp.load(state_dict, storage_reader=ZarrStorageReader(url))``, or pass the url as
    ``checkpoint_id``. Each rank reads the data of its own boxes, except data that other ranks send. The reader is
    pickled without clients and secrets.

    Args:
        url: the url of the checkpoint, as for :func:`zarrckpt.load`.
        allow_pickle: also load values that were saved as pickles. They can run any code in the checkpoint.
        allow_cast: with planners other than :class:`ZarrLoadPlanner`, convert to the target's dtype instead of raising.
        storage_options: options of the store by name, as for :func:`zarrckpt.load`.
        options: the transfer of bytes, see :class:`LoadOptions`.
        progress: as for :func:`save`.
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
        self._events: EventSender | None = None
        self._is_coordinator = False
        self.load_id = uuid.uuid4().hex
        """The id of the current load, in the metadata that DCP's planners and loggers get."""
        self.bytes_read = 0
        """Bytes that the last load of this reader read for tensors."""

    @property
    def checkpoint_id(self) -> str:
        """The url. DCP writes it to its log."""
        return self._spec.url

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return True: any path or url can be a checkpoint."""
        return True

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_catalog": None, "_events": None}

    # -- all ranks

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new load."""
        if checkpoint_id is not None:
            self._spec = self._spec.at(checkpoint_id)
        self._catalog = None
        self.load_id = uuid.uuid4().hex

    def read_metadata(self) -> Metadata:
        """Return the checkpoint's entries, with one box per tensor for any number of ranks that saved it. One request.

        The first use of the returned metadata raises errors such as CheckpointNotFoundError or CorruptCheckpointError,
        because DCP would replace an error here by an AssertionError. The method has no parameters, because DCP would
        retry without collectives if there were one named ``kwargs``.
        """
        self._events = EventSender.begin(self._options.on_event, "load", self.checkpoint_id, global_rank())
        try:
            with self._events.sending_failure():
                self._spec.open().on_repeat = self._events.send_repeat
                self._catalog = Catalog(self._spec)
        except CheckpointError as err:
            return _NoMetadata(err)
        root = self._catalog.root
        entries: dict[str, Any] = {
            fqn: _tensor_metadata(entry) if isinstance(entry, ArrayNode) else BytesStorageMetadata()
            for fqn, entry in root.entries.items()
        }
        return VersionedMetadata(
            entries,
            planner_data={fqn: root.state_path(fqn) for fqn in entries},
            storage_meta=StorageMeta(self.checkpoint_id, root.save_id, self.load_id),
            versions=root.module_versions,
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Raise the error that occurred while the metadata was read."""
        if isinstance(metadata, _NoMetadata):
            raise metadata.error
        self.bytes_read = 0
        self._is_coordinator = is_coordinator

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Add data for the coordinator to the plan."""
        save_id = self._catalog.root.save_id if self._catalog is not None else ""
        return dataclasses.replace(plan, storage_data=_Facts(global_rank(), save_id))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """With ``share_reads``, choose the rank that reads data for several ranks. The coordinator calls it. No I/O.

        Raises CheckpointReplacedError if ranks have read the roots of different saves.
        """
        facts: list[_Facts] = [plan.storage_data for plan in plans]
        saves = {fact.save_id for fact in facts}
        if len(saves) > 1:
            raise CheckpointReplacedError(
                f"the checkpoint at {self.checkpoint_id} was replaced while the ranks opened it: some ranks have save "
                f"{min(saves)[:8]}, others {max(saves)[:8]}. Nothing was loaded. Load again"
            )
        shares: dict[int, Shares] = {rank: {} for rank in range(len(plans))}
        if (
            len(plans) > 1
            and self._catalog is not None
            and self._options.shares_reads(is_local=self._catalog.store.is_local)
        ):
            nodes = self._catalog.root.tensors
            targets = [_targets(plan.items) for plan in plans]
            self._catalog.refuse_too_many_chunks(*(nodes[fqn] for fqn in {fqn for own in targets for fqn, _ in own}))
            limit = max(1, self._options.max_inflight_bytes // 4)
            shares = plan_shares(range(len(plans)), nodes, boxes_of_ranks(targets), len(plans), limit)
        channel = ChannelName.new(tuple(fact.rank for fact in facts)) if any(shares.values()) else None
        tasks = [_LoadTask(own, channel) for own in shares.values()]
        return [dataclasses.replace(plan, storage_data=task) for plan, task in zip(plans, tasks, strict=True)]

    # -- all ranks

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill this rank's targets. The dtypes of all targets are checked before the first one is written.

        Raises KeyMismatchError, CorruptCheckpointError (with the array and the object), CheckpointReplacedError,
        UnsafeValueError. If the read finds damage, the targets are undefined.
        """
        if self._catalog is None or self._events is None:
            raise CheckpointError("read_data needs read_metadata first: load with dcp.load or zarrckpt.load")
        with self._events.sending_failure():
            self._read_data(self._catalog, plan, planner)
        self._events.send_loaded(self.bytes_read, is_coordinator=self._is_coordinator)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read_data(self, catalog: Catalog, plan: LoadPlan, planner: LoadPlanner) -> None:
        # A planner that creates new plans drops the task. Then this rank reads everything itself.
        task = plan.storage_data if isinstance(plan.storage_data, _LoadTask) else _LoadTask({}, None)
        begun: tuple[TensorReads, list[tuple[ReadItem, Any]]] | None = None
        try:
            # Connect first, because other ranks wait for it. A rank that fails inside closes its connections.
            with suppress(LostPeerError), connect_channel(task.channel) as channel:
                begun = self._begin_reads(catalog, plan.items, planner)
                if channel is not None:
                    with catalog.explaining_damage():
                        begun[0].share(task.shares, channel)
            # This rank reads the data that it did not get from others.
            reads, values = begun = begun or self._begin_reads(catalog, plan.items, planner)
            with catalog.explaining_damage():
                reads.read()
        finally:
            self.bytes_read = 0 if begun is None else begun[0].bytes_read
        for item, value in values:
            _deliver(planner, item, value)
        if isinstance(planner, ZarrLoadPlanner):
            planner.finish_load()

    def _begin_reads(
        self, catalog: Catalog, items: Sequence[ReadItem], planner: LoadPlanner
    ) -> tuple[TensorReads, list[tuple[ReadItem, Any]]]:
        """Check the dtypes of targets, read the values, and return both."""
        tensors = [item for item in items if item.type != LoadItemType.BYTE_IO]
        objects = [item for item in items if item.type == LoadItemType.BYTE_IO]
        self._check_dtypes(catalog.root, tensors, planner)
        read = partial(catalog.read_non_tensor, allow_pickle=self._allow_pickle)
        # In parallel, because each blob needs a request.
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
                "the dtypes of target and checkpoint differ: "
                + "; ".join(faults[:20])
                + ". Nothing was loaded. Pass allow_cast=True to convert"
            )


class _NoMetadata(Metadata):
    """Metadata that could not be read. Access to its entries raises the reason."""

    def __init__(self, error: CheckpointError) -> None:
        self.error = error

    def __getattribute__(self, name: str) -> Any:
        if name == "state_dict_metadata":
            raise self.error
        return super().__getattribute__(name)


def _item_box(item: ReadItem) -> Box:
    """Return the box of the stored tensor that an item requests."""
    return Box(tuple(item.storage_offsets), tuple(item.lengths))


def _targets(items: Sequence[ReadItem]) -> Iterable[tuple[str, Box]]:
    """Return the boxes of tensors that a rank fills."""
    return [(i.storage_index.fqn, _item_box(i)) for i in items if i.type != LoadItemType.BYTE_IO]


def _target(item: ReadItem, planner: LoadPlanner) -> TensorTarget:
    fqn, box, tensor = item.storage_index.fqn, _item_box(item), planner.resolve_tensor(item)
    # A planner's view of a wrapper tensor can be a temporary tensor.
    kept = planner.lookup_tensor(item.dest_index) if isinstance(planner, DefaultLoadPlanner) else tensor
    if (fault := memory_fault(kept)) is not None:
        raise KeyMismatchError(f"{fqn!r} {fault}; nothing was loaded")
    if tuple(tensor.shape) != box.shape:
        raise UnsupportedLayoutError(
            f"{fqn!r}: DCP's planner expects a piece of shape {box.shape} on this rank, but its tensor has shape "
            f"{tuple(tensor.shape)}: load with zarrckpt.load, or with planner=zarrckpt.ZarrLoadPlanner()"
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
    # DCP's planners unpickle any bytes. So they get only bytes that are made here from a safely decoded value.
    data = io.BytesIO()
    torch.save(value, data)
    data.seek(0)
    planner.load_bytes(item, data)
