"""The DCP storage writer: one method a step, in the order in which DCP calls them."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from threading import current_thread
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from zarrckpt import _commit, _mail, _plan
from zarrckpt._chunking import MAX_CHUNK_BYTES
from zarrckpt._compression import CompressionOption, parse_option
from zarrckpt._crew import beside
from zarrckpt._errors import CheckpointError, CheckpointExistsError, StorageError, warn
from zarrckpt._exchange import choose
from zarrckpt._finish import finish_save
from zarrckpt._gathered import all_items, sent_paths, state_paths, whole_plans
from zarrckpt._holdings import with_facts
from zarrckpt._kept_plans import PlanReuse
from zarrckpt._mail import Facts, Ticket
from zarrckpt._metadata import checked_metadata
from zarrckpt._plan import Layout, Sizes
from zarrckpt._rank_plan import RankPlan
from zarrckpt._rank_work import RankWork
from zarrckpt._sealed import now
from zarrckpt._store import StoreSpec
from zarrckpt._transfer import DEFAULT_MAX_INFLIGHT_BYTES, Progress, check_limits

ASYNC_THREAD = "zarrckpt-async"
_BACKGROUND = (ASYNC_THREAD, "AsyncCheckpointExecutor")
"""How the threads are called in which ``zarrckpt.async_save`` and ``dcp.async_save`` write, beside training."""


class ZarrStorageWriter(StorageWriter):
    """Save with ``torch.distributed.checkpoint`` to a Zarr v3 hierarchy, on disk or in an object store.

    Pass it as ``dcp.save(state_dict, storage_writer=ZarrStorageWriter(url))``, or give the url as
    ``checkpoint_id``. One instance a rank, as DCP does; it may be used for many saves, one after the other, and
    pickles without clients and without secrets.

    Args:
        url: where the checkpoint goes: a local path, ``file://``, ``s3://``, ``gs://``, ``az://``, or any fsspec url.
        overwrite: replace a committed checkpoint at that url; the old one stays readable until the new one is
            committed.
        metadata: a dict of JSON types to keep with the checkpoint, as for :func:`zarrckpt.save`.
        store: a ready ``zarr.abc.store.Store`` instead of a url.
        storage_options: options of the store, under the names of fsspec or obstore (``docs/how-to/stores.md``).
        credential_provider: a picklable callable that returns fresh credentials, for tokens that expire.
        compression: None, ``"zstd"``, ``"blosc"``, or a mapping with options of Zarr's codec, such as
            ``{"name": "zstd", "level": 3}`` (``docs/how-to/compression.md``); tensors are compressed, values are not.
        max_chunk_bytes: larger pieces become several chunks (default 128 MiB; not more than seven eighths of
            ``max_inflight_bytes``, but for 16 MiB).
        min_piece_bytes: pieces of a tensor that are smaller than this on average move between ranks and are merged
            into chunks of about ``fill_bytes`` (default: 256 KiB times the number of ranks, at most 16 MiB; 0: no
            merging, except where pieces fit no regular grid).
        fill_bytes: see there (default: a quarter of a rank's mean part, 4 to 32 MiB).
        concurrency: so many chunks and documents in transfer at once, a rank. Default: the store's own choice, 64 in
            object stores (``docs/how-to/speed.md``).
        max_inflight_bytes: bound on a rank's memory for chunks in transfer, beyond the state (default 512 MiB, at
            least one chunk).
        durable: local files are synced to disk before the commit.
        progress: called on each rank as ``progress(bytes_done, bytes_total)`` while its chunks are written.
    """

    def __init__(
        self,
        url: str | os.PathLike[str] | None = None,
        overwrite: bool = False,
        *,
        metadata: Mapping[str, Any] | None = None,
        store: object | None = None,
        storage_options: Mapping[str, Any] | None = None,
        credential_provider: Callable[..., Any] | None = None,
        compression: CompressionOption = None,
        max_chunk_bytes: int = MAX_CHUNK_BYTES,
        min_piece_bytes: int | None = None,
        fill_bytes: int | None = None,
        concurrency: int | None = None,
        max_inflight_bytes: int = DEFAULT_MAX_INFLIGHT_BYTES,
        durable: bool = True,
        progress: Progress | None = None,
    ) -> None:
        if concurrency is not None:
            check_limits(concurrency=concurrency)
        self._sizes = Sizes.checked(max_chunk_bytes, min_piece_bytes, fill_bytes, max_inflight_bytes)
        self._spec = StoreSpec(url, store, storage_options, credential_provider, durable, concurrency)
        self._overwrite = overwrite
        self._metadata = checked_metadata(metadata)
        self._compression = parse_option(compression)
        self._max_inflight_bytes = max_inflight_bytes
        self._progress = progress
        self.save_id: str | None = None
        """The id of the save that this writer made last, as in the checkpoint's root document."""
        self._begin: Callable[[], _commit.Attempt] | None = None
        self._attempt: _commit.Attempt | None = None
        self._layout: Layout | None = None
        self._could_remove = True
        self._started = 0.0
        self._reuse: PlanReuse | None = None

    @property
    def checkpoint_id(self) -> str:
        """The url, for DCP's log records."""
        return self._spec.url

    def refuse_committed(self) -> None:
        """Raise what a save would where a checkpoint is committed that it must not overwrite. One request.

        A store that does not answer is left for the save to meet: it may be there again by then.
        """
        if not self._overwrite:
            with suppress(StorageError):
                _commit.refuse_committed(self._spec.open())

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
        self._begin = self._attempt = self._layout = None
        self._could_remove = True
        self._started = time.monotonic()
        _mail.clear()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Refuse what can't be saved; add what the coordinator must know.

        Raises UnsupportedValueError naming the fqn.
        """
        plan = with_facts(plan)
        return plan if self._reuse is None else self._reuse.shortened(plan)

    # -- the coordinator

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Lay the checkpoint out, then begin the attempt: existing checkpoint, claim, marker.

        About 9 requests. Raises CheckpointExistsError, ForeignObjectsError, UnsupportedLayoutError. Warns of what ranks
        hold differently under one name.
        """
        told = _mail.all_facts(plans)
        options = (self._compression, self._sizes)
        again = self._reuse.again(plans, told, options) if self._reuse is not None else None
        if again is not None:
            self._layout = again.layout
            ticket = self._ticket(told, again.moves)
            return [dataclasses.replace(plan, items=[], storage_data=(None, ticket, again.key)) for plan in plans]
        plans = whole_plans(plans if self._reuse is None else self._reuse.restored(plans))
        held = all_items(plans, told)
        planned = _plan.plan_save(held, state_paths(plans), compression=self._compression, sizes=self._sizes)
        _warn_of(planned.differing)
        self._layout = planned.layout
        ticket = self._ticket(told, planned.moves)
        key = "" if self._reuse is None else self._reuse.keep(plans, told, options, held, planned)
        parts = zip(plans, sent_paths(plans), planned.items, planned.ranks, strict=True)
        return [
            dataclasses.replace(
                plan,
                # They become a list on their way, which those of a process alone do not make.
                items=items if len(plans) > 1 else list(items),  # type: ignore[arg-type]
                storage_data=(rank, ticket, key),
                planner_data=paths,
            )
            for plan, paths, items, rank in parts
        ]

    def _ticket(self, told: Sequence[Facts], moves: bool) -> Ticket:
        """Begin the attempt, and make the ticket that ranks get. A process alone begins in :meth:`write_data`."""
        assert self._layout is not None
        store, save_id = self._spec.open(), _commit.new_id()
        begin = partial(_commit.begin, store, self._layout.marker(save_id, now()), overwrite=self._overwrite)
        if len(told) == 1:
            self._begin = begin
            ticket = Ticket(None, save_id)
            _mail.accept(ticket)  # nothing is sent, so nothing arrives
            return ticket
        self._attempt = begin()
        mesh = choose(tuple(fact.rank for fact in told), [fact.meshes for fact in told]) if moves else None
        return Ticket(mesh, save_id, self._attempt.tree, self._attempt.base_id)

    # -- all ranks

    def reuse_plans(self, reuse: PlanReuse | None) -> None:
        """Use the last plan again where nothing changed. Only for planners of this package."""
        self._reuse = reuse

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's chunks, blobs and documents, many at a time, and sync them.

        One put an object. Raises before the first put where a resolved tensor is not what was planned.
        """
        ticket = _mail.ticket()
        if ticket is None:
            raise CheckpointError("this save's ticket did not arrive: was write_data called outside dcp.save?")
        self.save_id = ticket.save_id
        rank_plan: RankPlan | None
        rank_plan, _, key = plan.storage_data
        items: Sequence[WriteItem] = plan.items
        if self._reuse is not None:
            rank_plan, items = self._reuse.arrived(key, rank_plan, items)
        assert rank_plan is not None
        store = self._spec.open()
        # A number of the caller's own is kept to.
        store.beside_training = self._spec.concurrency is None and current_thread().name.startswith(_BACKGROUND)
        future: Future[list[WriteResult]] = Future()
        with self._beginning(ticket) as begun:

            def tree() -> str:
                return begun().tree

            work = RankWork(store, tree, rank_plan, items, planner, self._max_inflight_bytes, self._progress)
            try:
                with _commit.losing_is_named(store, ticket.save_id, lambda: begun().base_id):
                    future.set_result(work.write(_mail.joining()))
            finally:
                self._could_remove = work.could_remove
        return future

    @contextmanager
    def _beginning(self, ticket: Ticket) -> Iterator[Callable[[], Ticket | _commit.Attempt]]:
        """Tells how the attempt has begun, or raises why it could not.

        A process alone begins now, in a thread of its own: meanwhile it makes its first chunks. Where it fails,
        there is no other rank that might still write.
        """
        if self._begin is None:
            yield lambda: ticket
            return
        with beside(self._begin) as begun:
            try:
                yield begun
                self._attempt = begun()
            except BaseException:
                with suppress(Exception):  # it could not begin: that is the error
                    self._attempt = begun()
                self.abandon()
                raise

    # -- the coordinator

    def abandon(self) -> None:
        """Remove what all ranks of a save wrote that has failed. Nothing once the root document may have been put.

        Called on every rank, when none writes any more; only the coordinator has an attempt. Raises no CheckpointError.
        """
        attempt, self._attempt = self._attempt, None
        # Each request to a store that does not answer takes minutes, and the error waits for them.
        if attempt is not None and self._could_remove:
            _commit.abandon(self._spec.open(), attempt)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Count what was written against the plan, write the tables, commit, clean.

        Raises IncompleteSaveError where a chunk is missing, CheckpointExistsError where another save committed first.
        """
        assert self._attempt is not None and self._layout is not None
        store, attempt, layout = self._spec.open(), self._attempt, self._layout
        # From here on nobody else removes anything: the root may have been put, whatever is heard of it.
        self._attempt = None
        try:
            with _commit.losing_is_named(store, attempt.save_id, lambda: attempt.base_id):
                if not metadata.state_dict_metadata:
                    _plan.describe(metadata, layout)
                root, report = finish_save(store, attempt, layout, metadata, results, self._metadata)
        except BaseException as err:
            _commit.abandon(store, attempt, lost=isinstance(err, CheckpointExistsError))
            raise
        _commit.commit(store, attempt, root)
        _commit.clean_after(store, attempt)
        metadata.storage_data = dataclasses.replace(report, seconds=time.monotonic() - self._started)
        if not root.entries:
            warn(f"the checkpoint saved to {store.url} has no entry: the state was empty")


def _warn_of(differing: Mapping[str, Sequence[int]]) -> None:
    if not differing:
        return
    shown = ", ".join(f"{fqn!r} (ranks {', '.join(map(str, ranks))})" for fqn, ranks in list(differing.items())[:10])
    more = f" and {len(differing) - 10} more" if len(differing) > 10 else ""
    warn(
        f"{len(differing)} entries differ between ranks, and each is saved once, as the lowest of these ranks has it: "
        f"{shown}{more}; to keep every rank's, wrap it: zarrckpt.PerRank(value)"
    )
