"""The DCP storage writer: one method a step, in the order in which DCP calls them."""

from __future__ import annotations

import dataclasses
import os
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from zarrckpt import _commit, _plan
from zarrckpt._errors import CheckpointError, CheckpointExistsError, IncompleteSaveError
from zarrckpt._finish import finish_save
from zarrckpt._grid import MAX_CHUNK_BYTES
from zarrckpt._plan import Layout, RankPlan
from zarrckpt._rank_work import RankWork
from zarrckpt._root import now
from zarrckpt._store import Store, StoreSpec
from zarrckpt._transfer import DEFAULT_CONCURRENCY, DEFAULT_MAX_INFLIGHT_BYTES, Progress, check_limits

_inbox = threading.local()


@dataclass(frozen=True)
class Ticket:
    """Which attempt a save belongs to: chosen by the coordinator, sent to all ranks with the global plan.

    A planner that caches plans may keep an earlier save's instead of what it is sent. The scatter still unpickles the
    ticket on every rank, in the thread that calls ``write_data`` a moment later: so its arrival is what counts, and
    unpickling puts it into that thread's inbox.
    """

    save_id: str
    tree: str
    base_id: str

    def __reduce__(self) -> tuple[Any, ...]:
        return (_receive, (self.save_id, self.tree, self.base_id))


def _receive(save_id: str, tree: str, base_id: str) -> Ticket:
    ticket = Ticket(save_id, tree, base_id)
    _inbox.ticket = ticket
    return ticket


class ZarrStorageWriter(StorageWriter):
    """Save with ``torch.distributed.checkpoint`` to a Zarr v3 hierarchy, on disk or in an object store.

    Pass it as ``dcp.save(state_dict, storage_writer=ZarrStorageWriter(url))``, or give the url as
    ``checkpoint_id``. One instance a rank, as DCP does; it may be used for many saves, one after the other, and
    pickles without clients and without secrets.

    Args:
        url: where the checkpoint goes: a local path, ``file://``, ``s3://``, ``gs://``, ``az://``, or any fsspec url.
        overwrite: replace a committed checkpoint at that url; the old one stays readable until the new one is
        committed. keep_replaced: with ``overwrite``, leave the replaced checkpoint's objects for readers that still
        hold it. store: a ready ``zarr.abc.store.Store`` instead of a url. storage_options: options of the store,
        under the names of fsspec or obstore (``docs/how-to/stores.md``). credential_provider: a picklable callable
        that returns fresh credentials, for tokens that expire. portable_dtypes: keep bfloat16 and float8 as
        unsigned integers, for readers that know neither. max_chunk_bytes: larger pieces become several chunks
        (default 128 MiB). concurrency: chunks and documents in transfer at once, a rank (default 16).
        max_inflight_bytes: bound on a rank's memory for chunks in transfer, beyond the state (default 512 MiB).
        durable: local files are synced to disk before the commit. progress: called on each rank as
        ``progress(bytes_done, bytes_total)`` while its chunks are written.
    """

    def __init__(
        self,
        url: str | os.PathLike[str] | None = None,
        overwrite: bool = False,
        *,
        keep_replaced: bool = False,
        store: object | None = None,
        storage_options: Mapping[str, Any] | None = None,
        credential_provider: Callable[..., Any] | None = None,
        portable_dtypes: bool = False,
        max_chunk_bytes: int = MAX_CHUNK_BYTES,
        concurrency: int = DEFAULT_CONCURRENCY,
        max_inflight_bytes: int = DEFAULT_MAX_INFLIGHT_BYTES,
        durable: bool = True,
        progress: Progress | None = None,
    ) -> None:
        check_limits(max_chunk_bytes=max_chunk_bytes, concurrency=concurrency, max_inflight_bytes=max_inflight_bytes)
        self._spec = StoreSpec(url, store, storage_options, credential_provider, durable)
        self._overwrite = overwrite
        self._keep_replaced = keep_replaced
        self._portable_dtypes = portable_dtypes
        self._max_chunk_bytes = max_chunk_bytes
        self._concurrency = concurrency
        self._max_inflight_bytes = max_inflight_bytes
        self._progress = progress
        self._attempt: _commit.Attempt | None = None
        self._layout: Layout | None = None
        self._began = 0.0

    @property
    def checkpoint_id(self) -> str:
        """The url, for DCP's log records."""
        return self._spec.url

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Every path and url may be one of ours."""
        return True

    # -- all ranks, before anything is planned

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A new save begins; a url given to ``dcp.save`` as ``checkpoint_id`` takes the place of the writer's own."""
        if checkpoint_id is not None:
            self._spec = self._spec.at(checkpoint_id)

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
        self._attempt = self._layout = None
        self._began = time.monotonic()
        _inbox.ticket = None

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Refuse what can't be saved. Raises UnsupportedValueError naming the fqn."""
        for item in plan.items:
            _plan.check_item(item)
        return plan

    # -- the coordinator

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Lay the checkpoint out, then begin the attempt: existing checkpoint, claim, marker.

        About 5 requests. Raises CheckpointExistsError, ForeignObjectsError, UnsupportedLayoutError.
        """
        plans = _whole_plans(plans)
        store = self._spec.open()
        save_id = _commit.new_id()
        self._layout, ranks = _plan.plan_save(
            plans, portable_dtypes=self._portable_dtypes, max_chunk_bytes=self._max_chunk_bytes
        )
        self._attempt = _commit.begin(store, self._layout.marker(save_id, now()), overwrite=self._overwrite)
        ticket = Ticket(save_id, self._attempt.tree, self._attempt.base_id)
        _inbox.ticket = ticket
        return [dataclasses.replace(plan, storage_data=(rank, ticket)) for plan, rank in zip(plans, ranks, strict=True)]

    # -- all ranks

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's chunks, blobs and documents, many at a time, and sync them.

        One put an object. Raises before the first put where a resolved tensor is not what was planned.
        """
        ticket: Ticket | None = getattr(_inbox, "ticket", None)
        if ticket is None:
            raise CheckpointError("this save's ticket did not arrive: was write_data called outside dcp.save?")
        rank_plan: RankPlan = plan.storage_data[0]
        store = self._spec.open()
        work = RankWork(store, ticket.tree, rank_plan, planner, self._max_inflight_bytes, self._progress)
        future: Future[list[WriteResult]] = Future()
        with _commit.losing_is_named(store, ticket.save_id, ticket.base_id):
            future.set_result(work.write(plan.items, self._concurrency))
        return future

    # -- the coordinator

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Count what was written against the plan, write the tables, commit, clean.

        Raises IncompleteSaveError where a chunk is missing, CheckpointExistsError where another save committed first.
        """
        assert self._attempt is not None and self._layout is not None
        store, attempt, layout = self._spec.open(), self._attempt, self._layout
        try:
            with _commit.losing_is_named(store, attempt.save_id, attempt.base_id):
                root, report = finish_save(store, attempt, layout, metadata, results)
                _commit.commit(store, attempt, root)
        except (IncompleteSaveError, CheckpointExistsError):
            _commit.abandon(store, attempt)
            raise
        self._clean(store, attempt)
        metadata.storage_data = dataclasses.replace(report, seconds=time.monotonic() - self._began)

    def _clean(self, store: Store, attempt: _commit.Attempt) -> None:
        replaced = attempt.base_id
        stale = [m for m in attempt.older if not (self._keep_replaced and m.attempt == replaced)]
        try:
            _commit.clean(store, stale, finished=[replaced] if replaced else [])
        except CheckpointError as err:
            # The save is committed: that must not look like a failure.
            warnings.warn(
                f"the checkpoint at {store.url} is saved, but objects of earlier ones could not be removed; the next "
                f"save there tries again: {err}",
                stacklevel=2,
            )


def _whole_plans(plans: list[SavePlan]) -> list[SavePlan]:
    """The plans of all ranks, those included that DCP's plan cache left out as unchanged.

    Such a rank would take the last plan that it got; but DCP fills its caches before a save is through, so after one
    that failed this may be the plan of another state. The coordinator has all plans in its cache and sends them all.
    Raises CheckpointError where the cache does not say which they are.
    """
    if all(plan.usable for plan in plans):
        return plans
    found = [
        cached
        for cached in SavePlanner._cached_global_plan.values()
        if len(cached) == len(plans)
        and all(whole.usable and (plan is whole or not plan.usable) for plan, whole in zip(plans, cached, strict=True))
    ]
    if len(found) != 1:
        raise CheckpointError(
            f"DCP's plan cache holds {len(found)} sets of plans for these {len(plans)} ranks, expected 1: with plan "
            "caching, use one planner class and one coordinator for all saves of a process"
        )
    return found[0]
