"""The DCP storage writer. Its methods are in the order in which DCP calls them."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from zarrckpt._dcp.channel import ChannelName, connect_channel
from zarrckpt._dcp.items import (
    PlannerData,
    PlannerSource,
    RankItems,
    check_item,
    describe_states,
    restore_omitted_plans,
)
from zarrckpt._dcp.planner import returns_state_tensors
from zarrckpt._errors import CheckpointError, IncompleteSaveError
from zarrckpt._jobs import Progress
from zarrckpt._options import SaveOptions
from zarrckpt._plan.global_state import gather_state
from zarrckpt._plan.plan import Layout, plan_save
from zarrckpt._plan.rank_plan import RankPlan
from zarrckpt._ranks.errors import LostPeerError
from zarrckpt._ranks.group import global_rank
from zarrckpt._ranks.torch_private import sent_plans
from zarrckpt._save.agree import SentAttempt, differing_parts, warn_of_differing
from zarrckpt._save.request import SaveRequest
from zarrckpt._save.steps import RankSave
from zarrckpt._save.write import RankResults
from zarrckpt._store import Url
from zarrckpt._store._archive import ArchivePart


@dataclasses.dataclass(frozen=True)
class _SaveTask:
    """The data that the coordinator sends to each rank with its plan."""

    rank_plan: RankPlan
    attempt: SentAttempt
    channel: ChannelName | None


@dataclasses.dataclass(frozen=True)
class _LostPeer:
    """Sent instead of results: this rank stopped because another rank failed or was lost."""

    reason: str


class ZarrStorageWriter(StorageWriter):
    """Save with ``torch.distributed.checkpoint`` to a Zarr v3 hierarchy, on disk or in an object store.

    Pass it as ``dcp.save(state_dict, storage_writer=ZarrStorageWriter(url))``, or pass the url as
    ``checkpoint_id``. Each rank has its own instance. An instance can be used for many saves, one after the other, and
    is pickled without clients and secrets.

    Args:
        url: the url of the new checkpoint, as for :func:`zarrckpt.save`.
        overwrite: replace a committed checkpoint at this url. The old checkpoint stays readable until the commit.
        metadata: a dict of JSON types to store with the checkpoint, as for :func:`zarrckpt.save`.
        storage_options: options of the store by name, as for :func:`zarrckpt.save`.
        options: the layout and the transfer of bytes, see :class:`SaveOptions`.
        progress: as for :func:`save`.
        base: an earlier checkpoint whose unchanged chunks are reused, as for :func:`zarrckpt.save`.
    """

    def __init__(
        self,
        url: Url | None = None,
        overwrite: bool = False,
        *,
        metadata: Mapping[str, Any] | None = None,
        storage_options: Mapping[str, Any] | None = None,
        options: SaveOptions | None = None,
        progress: Progress | None = None,
        base: Url | None = None,
    ) -> None:
        self._request = SaveRequest.from_arguments(
            url,
            options,
            overwrite=overwrite,
            metadata=metadata,
            storage_options=storage_options,
            progress=progress,
            base=base,
        )
        self.save_id: str | None = None
        """The id of this writer's last save, as in the checkpoint's root document."""
        self._items: Sequence[WriteItem] = ()
        self._save: RankSave | None = None
        self._layout: Layout | None = None
        self._hollow: frozenset[str] = frozenset()
        self._alone = False

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_items": (), "_save": None, "_layout": None}

    @property
    def checkpoint_id(self) -> str:
        """The url. DCP writes it to its log."""
        return self._request.spec.url

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return True: any path or url can be a checkpoint."""
        return True

    # -- all ranks, before anything is planned

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new save. A url that is passed to ``dcp.save`` as ``checkpoint_id`` replaces the writer's url."""
        if checkpoint_id is not None:
            self._request = dataclasses.replace(self._request, spec=self._request.spec.at(checkpoint_id))

    def set_up_storage_writer(
        self, is_coordinator: bool, *args: Any, use_collectives: bool = True, **kwargs: Any
    ) -> None:
        """Prepare the save. DCP passes ``use_collectives`` because the signature has ``kwargs``.

        Raises ValueError for ``use_collectives=False``: every rank would call finish, so no commit could be correct.
        """
        if not use_collectives:
            raise ValueError(
                "use_collectives=False is not supported, because one rank commits after all ranks have written: "
                "leave it out"
            )
        events = self._request.begin_events(global_rank())
        with events.sending_failure():
            self._save = RankSave(self._request, events)
        self._layout = None
        self._items = ()
        # Without cached plans, ranks send whole plans with our data in them, and this save is planned anew.
        sent_plans(SavePlanner).clear()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Add data for the coordinator to the plan.

        Raises UnsupportedValueError with the fqn of an entry that cannot be saved.
        """
        if not plan.usable:
            raise CheckpointError(
                "DCP's plan cache confused this plan with a plan of another thread: save again, or use a different "
                "planner class in each thread"
            )
        assert self._save is not None
        with self._save.events.sending_failure():
            for item in plan.items:
                check_item(item)
        self._items = plan.items
        notes = plan.storage_data if isinstance(plan.storage_data, PlannerData) else None
        return dataclasses.replace(plan, storage_data=RankItems(global_rank(), plan.items, notes))

    # -- the coordinator

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Plan the checkpoint, then begin the attempt: check for a checkpoint, claim the url, write the marker.

        About 9 requests. Raises CheckpointExistsError, ForeignObjectsError, UnsupportedLayoutError. Warns if ranks
        have different contents under one name.
        """
        assert self._save is not None
        with self._save.events.sending_failure():
            plans = restore_omitted_plans(plans)
            gathered, digests = describe_states(plans)
            only, differing = differing_parts(digests)
            state = gather_state(gathered, only)
            warn_of_differing({**state.differing, **differing})
            planned = plan_save(state, self._save.plan_options())
            self._layout, self._hollow = planned.layout, state.hollow
            members = tuple(gathered.members)
            self._alone = len(members) == 1
            name = self._save.begin(planned.layout)
        channel = ChannelName.new(members) if planned.moves_pieces else None
        tasks = [_SaveTask(planned.rank_plan(rank), name, channel) for rank in range(len(plans))]
        return [dataclasses.replace(plan, storage_data=task) for plan, task in zip(plans, tasks, strict=True)]

    # -- all ranks

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's chunks, blobs and documents in parallel, and sync them.

        One put per object. Raises before the first put if a resolved tensor does not match the plan.
        """
        if self._save is None or not isinstance(plan.storage_data, _SaveTask):
            raise CheckpointError("write_data was called without a plan of this save: call dcp.save or zarrckpt.save")
        task, save = plan.storage_data, self._save
        self.save_id = task.attempt.save_id
        source = PlannerSource(planner, [*plan.items, *self._items], returns_state_tensors(planner))
        future: Future[list[WriteResult]] = Future()
        try:
            with save.events.sending_failure(), connect_channel(task.channel) as channel:
                results = save.write(task.attempt, task.rank_plan, source, channel, lambda: None)
        except LostPeerError as err:
            future.set_result([WriteResult(MetadataIndex(""), 0, _LostPeer(str(err)))])
            return future
        except BaseException:
            if self._alone:
                save.abandon()  # No other rank can still be writing.
            raise
        written = [WriteResult(MetadataIndex(fqn), result.nbytes, result) for fqn, result in results.entries.items()]
        if results.archive is not None:
            written.append(WriteResult(MetadataIndex(""), 0, results.archive))
        future.set_result(written)
        return future

    # -- the coordinator

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Compare the written chunks with the plan, write the tables, commit, and clean up.

        Raises IncompleteSaveError if a chunk is missing, CheckpointExistsError if another save committed first.
        """
        assert self._save is not None and self._layout is not None
        save = self._save
        try:
            with save.events.sending_failure():
                _refuse_lost(results)
                written = [_rank_results(rank) for rank in results]
                _check_metadata(metadata, self._layout, self._hollow)
                metadata.storage_data = report = save.commit(save.finish(self._layout, written))
        except BaseException:
            save.abandon()
            raise
        save.send_committed(report)


def _rank_results(results: Sequence[WriteResult]) -> RankResults:
    """Return the results of a rank from those that DCP has carried."""
    data = [(result.index.fqn, result.storage_data) for result in results]
    parts = [part for _, part in data if isinstance(part, ArchivePart)]
    return RankResults({fqn: part for fqn, part in data if not isinstance(part, ArchivePart)}, *parts)


def _refuse_lost(results: Sequence[Sequence[WriteResult]]) -> None:
    lost = {
        rank: result.storage_data.reason
        for rank, rank_results in enumerate(results)
        for result in rank_results
        if isinstance(result.storage_data, _LostPeer)
    }
    if lost:
        raise IncompleteSaveError(
            f"ranks {sorted(lost)} lost their connections while pieces moved between ranks ({lost[min(lost)]}). "
            "Nothing was committed. Save again"
        )


def _check_metadata(metadata: Metadata, layout: Layout, hollow: frozenset[str]) -> None:
    """Compare DCP's metadata with the layout. Raises IncompleteSaveError if their entries differ."""
    planned = {fqn: entry for fqn, entry in metadata.state_dict_metadata.items() if fqn not in hollow}
    odd = sorted(planned.keys() ^ layout.paths.keys())
    if odd:
        raise IncompleteSaveError(
            f"{len(odd)} entries are only in DCP's plan or only in the layout ({odd[:5]}). Nothing was committed. Save "
            "again, without plan caching if the state changed"
        )
    for fqn, entry in planned.items():
        node = layout.tensors.get(fqn)
        if isinstance(entry, BytesStorageMetadata) != (node is None):
            raise IncompleteSaveError(f"{fqn!r} changed between tensor and value after the plan was made: save again")
        if node is not None and tuple(entry.size) != node.grid.shape:  # type: ignore[union-attr]
            raise IncompleteSaveError(f"{fqn!r} changed its shape after the plan was made: save again")
