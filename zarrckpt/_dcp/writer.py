"""The DCP storage writer: one method a step, in the order in which DCP calls them."""

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

from zarrckpt._dcp.channel import ChannelName, pieces_connected
from zarrckpt._dcp.items import Facts, Notes, PlannerSource, check_item, descriptions_of, whole_plans
from zarrckpt._dcp.planner import gives_the_states_own
from zarrckpt._errors import CheckpointError, IncompleteSaveError
from zarrckpt._jobs import Progress
from zarrckpt._options import SaveOptions
from zarrckpt._plan.holders import gather_state
from zarrckpt._plan.plan import Layout, plan_save
from zarrckpt._plan.rank_plan import RankPlan
from zarrckpt._ranks.errors import PeerLost
from zarrckpt._ranks.group import global_rank
from zarrckpt._ranks.torch_private import sent_plans
from zarrckpt._save.agree import differing_parts, warn_of
from zarrckpt._save.request import SaveRequest
from zarrckpt._save.run import AttemptName, RankSave
from zarrckpt._store import Url


@dataclasses.dataclass(frozen=True)
class _SaveTask:
    """What the coordinator gives each rank with its plan."""

    part: RankPlan
    attempt: AttemptName
    channel: ChannelName | None


@dataclasses.dataclass(frozen=True)
class _LostPeer:
    """In place of results: this rank stopped, since another one failed or is gone, whose error counts."""

    reason: str


class ZarrStorageWriter(StorageWriter):
    """Save with ``torch.distributed.checkpoint`` to a Zarr v3 hierarchy, on disk or in an object store.

    Pass it as ``dcp.save(state_dict, storage_writer=ZarrStorageWriter(url))``, or give the url as
    ``checkpoint_id``. One instance a rank, as DCP does; it may be used for many saves, one after the other, and
    pickles without clients and without secrets.

    Args:
        url: where the checkpoint goes: a local path, ``file://``, ``s3://``, ``gs://``, ``az://``, or any fsspec url;
            or a ready zarr or obstore store, with ``zarr.storage.StorePath(store, path)`` for a path in one.
        overwrite: replace a committed checkpoint at that url; the old one stays readable until the new one is
            committed.
        metadata: a dict of JSON types to keep with the checkpoint, as for :func:`zarrckpt.save`.
        storage_options: options of the store by name, as fsspec or obstore take them, such as ``endpoint_url``
            (``docs/how-to/stores.md``); default: what the environment says. ``credential_provider``, for tokens that
            expire: a picklable callable that returns fresh credentials. An unknown name is a StorageError.
        options: how bytes are laid out and moved, see :class:`SaveOptions`.
        progress: called on each rank as ``progress(bytes_done, bytes_total)`` while its chunks are written.
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
    ) -> None:
        self._request = SaveRequest.from_arguments(
            url,
            options,
            overwrite=overwrite,
            metadata=metadata,
            storage_options=storage_options,
            progress=progress,
        )
        self.save_id: str | None = None
        """The id of the save that this writer made last, as in the checkpoint's root document."""
        self._items: Sequence[WriteItem] = ()
        self._save: RankSave | None = None
        self._layout: Layout | None = None
        self._hollow: frozenset[str] = frozenset()
        self._alone = False

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_items": (), "_save": None, "_layout": None}

    @property
    def checkpoint_id(self) -> str:
        """The url, for DCP's log records."""
        return self._request.spec.url

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Every path and url may be one of ours."""
        return True

    # -- all ranks, before anything is planned

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A new save begins; a url given to ``dcp.save`` as ``checkpoint_id`` takes the place of the writer's own."""
        if checkpoint_id is not None:
            self._request = dataclasses.replace(self._request, spec=self._request.spec.at(checkpoint_id))

    def set_up_storage_writer(
        self, is_coordinator: bool, *args: Any, use_collectives: bool = True, **kwargs: Any
    ) -> None:
        """Begin anew. DCP passes ``use_collectives`` since the signature has ``kwargs``.

        Raises ValueError for ``use_collectives=False``: every rank would then finish, and no commit could be right.
        """
        if not use_collectives:
            raise ValueError(
                "use_collectives=False is not supported: zarrckpt commits once, on one rank, after all have "
                "written; leave it out"
            )
        self._save = RankSave(self._request)
        self._layout = None
        self._items = ()
        # Plans are sent whole then, with our own data in them, and this save is planned anew.
        sent_plans(SavePlanner).clear()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Refuse what can't be saved; add what the coordinator must know.

        Raises UnsupportedValueError naming the fqn.
        """
        if not plan.usable:
            raise CheckpointError(
                "DCP's plan cache has taken this plan for one that another thread has just sent: save again, or use "
                "another planner class in each thread"
            )
        for item in plan.items:
            check_item(item)
        self._items = plan.items
        notes = plan.storage_data if isinstance(plan.storage_data, Notes) else None
        return dataclasses.replace(plan, storage_data=Facts(global_rank(), plan.items, notes))

    # -- the coordinator

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Lay the checkpoint out, then begin the attempt: existing checkpoint, claim, marker.

        About 9 requests. Raises CheckpointExistsError, ForeignObjectsError, UnsupportedLayoutError. Warns of what ranks
        hold differently under one name.
        """
        assert self._save is not None
        plans = whole_plans(plans)
        gathered, digests = descriptions_of(plans)
        only, differing = differing_parts(digests)
        state = gather_state(gathered, only)
        warn_of({**state.differing, **differing})
        planned = plan_save(state, self._request.options.plan)
        self._layout, self._hollow = planned.layout, state.hollow
        members = tuple(gathered.members)
        self._alone = len(members) == 1
        name = self._save.begin(planned.layout)
        channel = ChannelName.new(members) if planned.moves else None
        tasks = [_SaveTask(planned.part(rank), name, channel) for rank in range(len(plans))]
        return [dataclasses.replace(plan, storage_data=task) for plan, task in zip(plans, tasks, strict=True)]

    # -- all ranks

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's chunks, blobs and documents, many at a time, and sync them.

        One put per object. Raises before the first put where a resolved tensor is not what was planned.
        """
        if self._save is None or not isinstance(plan.storage_data, _SaveTask):
            raise CheckpointError("this save's plan did not arrive: was write_data called outside dcp.save?")
        task, save = plan.storage_data, self._save
        self.save_id = task.attempt.save_id
        source = PlannerSource(planner, [*plan.items, *self._items], gives_the_states_own(planner))
        future: Future[list[WriteResult]] = Future()
        try:
            with pieces_connected(task.channel) as channel:
                results = save.write(lambda: task.attempt, task.part, source, channel, lambda: None)
        except PeerLost as err:
            future.set_result([WriteResult(MetadataIndex(""), 0, _LostPeer(str(err)))])
            return future
        except BaseException:
            if self._alone:
                save.abandon()  # there is no other rank that might still write
            raise
        future.set_result([WriteResult(MetadataIndex(fqn), result.nbytes, result) for fqn, result in results.items()])
        return future

    # -- the coordinator

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Count what was written against the plan, write the tables, commit, clean.

        Raises IncompleteSaveError where a chunk is missing, CheckpointExistsError where another save committed first.
        """
        assert self._save is not None and self._layout is not None
        try:
            _refuse_lost(results)
            written = [{result.index.fqn: result.storage_data for result in rank} for rank in results]
            _check_metadata(metadata, self._layout, self._hollow)
            report = self._save.finish(self._layout, written)
            metadata.storage_data = self._save.commit(report)
        except BaseException:
            self._save.abandon()
            raise


def _refuse_lost(results: Sequence[Sequence[WriteResult]]) -> None:
    lost = {
        rank: result.storage_data.reason
        for rank, rank_results in enumerate(results)
        for result in rank_results
        if isinstance(result.storage_data, _LostPeer)
    }
    if lost:
        raise IncompleteSaveError(
            f"nothing was committed: ranks {sorted(lost)} lost the connection to other ranks while pieces moved "
            f"between them ({lost[min(lost)]}); save again"
        )


def _check_metadata(metadata: Metadata, layout: Layout, hollow: frozenset[str]) -> None:
    """What DCP's planner planned and what was laid out must be one set. Raises IncompleteSaveError."""
    planned = {fqn: entry for fqn, entry in metadata.state_dict_metadata.items() if fqn not in hollow}
    odd = sorted(planned.keys() ^ layout.paths.keys())
    if odd:
        raise IncompleteSaveError(
            f"nothing was committed: {len(odd)} entries are in one of DCP's plan and this package's only "
            f"({odd[:5]}); save again, without plan caching if the state changed"
        )
    for fqn, entry in planned.items():
        node = layout.tensors.get(fqn)
        if isinstance(entry, BytesStorageMetadata) != (node is None):
            raise IncompleteSaveError(f"{fqn!r} changed between tensor and value since it was planned; save again")
        if node is not None and tuple(entry.size) != node.grid.shape:  # type: ignore[union-attr]
            raise IncompleteSaveError(f"{fqn!r} changed its shape since it was planned; save again")
