"""One save, from the state in memory to the committed checkpoint. Every rank of the group calls it."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import msgspec

from zarrckpt._commit import attempts
from zarrckpt._commit.marker import new_id
from zarrckpt._commit.shared_storage import host_name, refuse_separate_storage
from zarrckpt._commit.stored_documents import parse_root_document
from zarrckpt._errors import CheckpointError, CheckpointExistsError, StorageError, log, warn
from zarrckpt._events import EventSender
from zarrckpt._format.documents import NODE
from zarrckpt._format.grid import Ints
from zarrckpt._format.root import Root
from zarrckpt._format.sealed import now
from zarrckpt._format.wire import record
from zarrckpt._jobs import in_thread
from zarrckpt._plan.archive_places import ArchivePlan, plan_archive
from zarrckpt._plan.plan import Layout, PlanOptions
from zarrckpt._plan.rank_plan import RankPlan
from zarrckpt._ranks.calls import call_on_coordinator
from zarrckpt._ranks.group import Ranks, global_rank
from zarrckpt._ranks.messages import Channel
from zarrckpt._ranks.rounds import Rounds, open_rounds
from zarrckpt._reports import SaveReport, size_text
from zarrckpt._save.agree import SentAttempt, agree
from zarrckpt._save.base import BaseReader
from zarrckpt._save.finish import finish_save
from zarrckpt._save.items import Source
from zarrckpt._save.request import SaveRequest
from zarrckpt._save.reuse import BaseChunks, open_base
from zarrckpt._save.write import RankResults, RankWriter
from zarrckpt._state.local_state import LocalState
from zarrckpt._store._archive import Places

record(SaveReport)


def save_on_ranks(read_state: Callable[[], LocalState], request: SaveRequest, ranks: Ranks) -> SaveReport:
    """Save the states that ``read_state`` returns on the ranks, and commit. An error on one rank is raised on all."""
    events = request.begin_events(global_rank())
    with (
        events.sending_failure(),
        open_rounds(ranks, f"the save to {request.spec.url}", request.options.timeout) as rounds,
    ):
        save = RankSave(request, events)
        report = save_in_rounds(rounds, read_state, save)
    save.send_committed(report)
    return report


def save_in_rounds(rounds: Rounds, read_state: Callable[[], LocalState], save: RankSave) -> SaveReport:
    """Make a save with connected ranks, without a call to torch.distributed. The caller reports the commit."""
    # The coordinator begins the attempt in the round in which the ranks agree.
    options = save.request.options.plan if rounds.rank else save.plan_options()
    agreed = agree(rounds, read_state, options, save.begin)
    plan, attempt = agreed.plan, agreed.attempt
    try:
        channel = rounds.channel() if plan.moves_pieces else None
        report = rounds.merge(
            "what they have written",
            on_each_rank=lambda: save.write(attempt, agreed.rank_plan, agreed.state, channel, rounds.report_alive),
            on_coordinator=partial(save.finish, plan.layout),
            stop=save.stop,
        )
        return _commit_together(rounds, save, attempt, report)
    except BaseException:
        save.abandon()
        raise


def _commit_together(rounds: Rounds, save: RankSave, attempt: SentAttempt, report: SaveReport) -> SaveReport:
    """Make the last round, in which the coordinator commits.

    A rank that lost its connections in this round reads the root document, and returns the report if that was put.
    """
    try:
        return call_on_coordinator(rounds, "the commit", partial(save.commit, report))
    except CheckpointError:
        if rounds.rank != 0 and not rounds.error_is_shared and (root_sha256 := save.read_commit(attempt.save_id)):
            return dataclasses.replace(report, root_sha256=root_sha256)
        raise


class RankSave:
    """The steps of one save on one rank. The coordinator begins, finishes and commits the attempt."""

    def __init__(self, request: SaveRequest, events: EventSender, *, background: bool = False) -> None:
        self.request = request
        self.events = events
        self._store = request.spec.open()
        self._store.on_repeat = events.send_repeat
        # Leaves processors to training, unless the caller chose a concurrency.
        self._store.beside_training = background and request.options.concurrency is None
        self._started = time.monotonic()
        self._writer: RankWriter | None = None
        self._stopped = False
        self._attempt: attempts.Attempt | None = None
        """On the coordinator, from :meth:`begin` until the commit or the failure."""
        self._base = BaseReader(request, self._store)
        self._chunks: BaseChunks | None = None
        self._sent: SentAttempt | None = None
        self._layout: Layout | None = None
        """On the coordinator, the plan of the checkpoint."""
        self._root: Root | None = None

    # -- all ranks

    def write(
        self,
        attempt: SentAttempt,
        plan: RankPlan,
        source: Source,
        channel: Channel | None,
        report_alive: Callable[[], None],
    ) -> RankResults:
        """Write this rank's chunks, values and documents in parallel, and sync them. One put per object.

        Raises CheckpointError before the first put if a tensor does not match the plan. Raises StorageError if the
        coordinator writes to a different storage, and deletes the written objects first.
        """
        if attempt.base is not None:
            base = self.request.base_spec(attempt.base.name).open()
            base.on_repeat = self.events.send_repeat
            self._chunks = open_base(self._store, base, attempt.base, self._base.optional)
        self._writer = RankWriter(self._store, attempt, self._chunks, plan, source, self.request, report_alive)
        if self._stopped:
            self._writer.stop()
        try:
            with attempts.report_lost_commit(self._store, attempt):
                if self._store.is_archive:
                    self._refuse_separate_storage(attempt, report_alive)
                    self._store.begin_part(attempt.save_id, self._places(attempt, plan))
                results = self._writer.write(channel)
        except BaseException:
            self._store.close_part()
            raise
        if not self._store.is_archive:
            try:
                self._refuse_separate_storage(attempt, report_alive)
            except StorageError:
                self._writer.remove()
                self._store.remove_folder()
                raise
        self.events.send("written", nbytes=sum(result.nbytes for result in results.entries.values()))
        return results

    def _refuse_separate_storage(self, attempt: SentAttempt, report_alive: Callable[[], None]) -> None:
        if self._attempt is None:
            refuse_separate_storage(self._store, attempt.save_id, attempt.host, report_alive, lambda: self._stopped)

    def _places(self, attempt: SentAttempt, plan: RankPlan) -> Places:
        """Return the places of this rank's chunks in the archive; on the coordinator, of all chunks."""
        archive = ArchivePlan(attempt.archive)
        if self._layout is not None:
            nodes = self._layout.tensors.values()
            return dict(found for node in nodes for found in archive.places(node, node.grid.chunks_of(node.grid.whole)))
        own: dict[str, list[Ints]] = {}
        for chunk in plan.all_chunks():
            own.setdefault(chunk.fqn, []).append(chunk.chunk_index)
        return dict(found for fqn, chunks in own.items() for found in archive.places(plan.arrays[fqn], chunks))

    def send_committed(self, report: SaveReport) -> None:
        """Report the commit."""
        self.events.send("committed", nbytes=report.nbytes, report=report, metadata=self.request.metadata)

    def stop(self) -> None:
        """Make :meth:`write` end soon, with an error. Called in a different thread."""
        self._stopped = True
        if self._writer is not None:
            self._writer.stop()

    # -- the coordinator

    def plan_options(self) -> PlanOptions:
        """Return the options of the plan, with the chunk grids of the base. One request if there is a base."""
        return self._base.plan_options()

    def begin(self, layout: Layout) -> SentAttempt:
        """Check for a checkpoint, claim the url, write the marker. About 9 requests, and two to read a base.

        Raises CheckpointExistsError, ForeignObjectsError.
        """
        run_id = damaged_id = ""
        if self._store.is_archive and not self._store.is_local and layout.world_size > 1:
            raise StorageError(
                f"{self._store.url} cannot be written by {layout.world_size} ranks: only one process can write an "
                "archive to this store. Save to a folder: a url without .zarr.zip"
            )
        if self.request.run is not None:
            self.request.run.wait_for_deletions()
            run_id, damaged_id = self.request.run.begin(), self.request.run.damaged_id()
        self._layout = layout
        marker = msgspec.structs.replace(layout.marker(new_id(), now()), run_id=run_id)
        with in_thread(partial(self._base.read, layout), at_once=self._store.is_local) as base:
            archive = plan_archive(layout.tensors.values() if self._store.is_archive else ())
            attempt = self._attempt = attempts.begin(
                self._store,
                marker,
                overwrite=self.request.overwrite,
                damaged_id=damaged_id,
                planned_bytes=archive.end,
            )
            digested = self.request.digested
            ids = (attempt.save_id, attempt.tree, attempt.replaced_id)
            self._sent = SentAttempt(*ids, host_name(), digested, base(), archive.starts)
        return self._sent

    def finish(self, layout: Layout, results: Sequence[RankResults]) -> SaveReport:
        """Compare the written chunks with the plan, and write the tables (checksums, writers, stored sizes).

        Raises IncompleteSaveError if a chunk is missing, CheckpointExistsError if another save committed first.
        """
        assert self._attempt is not None and self._sent is not None
        store, attempt = self._store, self._attempt
        try:
            with attempts.report_lost_commit(store, attempt):
                of_run = {} if self.request.run is None else self.request.run.metadata()
                metadata = {**self.request.metadata, **of_run}
                self._root, report = finish_save(store, attempt, layout, results, metadata, self._sent)
                if self._root.reused is not None and self._sent.base is not None:
                    report = dataclasses.replace(report, base=self.request.base_spec(self._sent.base.name).url)
                else:
                    problem = self._base.problem or ("" if self._chunks is None else self._chunks.problem)
                    report = dataclasses.replace(report, base_problem=problem)
                if not self._root.entries:
                    # Not after the commit: a filter of warnings may make it an error.
                    warn(f"the checkpoint at {store.url} has no entries, because the state is empty")
                return report
        except CheckpointExistsError:
            self._attempt = None
            attempts.abandon(store, attempt, lost=True)
            raise

    def commit(self, report: SaveReport) -> SaveReport:
        """Put the root document, then delete the checkpoint that it replaces. Raises CheckpointExistsError."""
        assert self._attempt is not None and self._root is not None
        if self.request.run is not None:
            self.request.run.check()
        # From here on abandon() deletes nothing: the root may be in the store even if its put raises an error.
        attempt, self._attempt = self._attempt, None
        root_sha256 = attempts.commit(self._store, attempt, self._root)
        attempts.clean_up(self._store, attempt)
        if self.request.run is not None:
            self.request.run.record_commit()
        seconds = time.monotonic() - self._started
        log.info("saved %s: %s in %.2f s", self._store.url, size_text(report.nbytes), seconds)
        return dataclasses.replace(report, root_sha256=root_sha256, seconds=seconds)

    def abandon(self) -> None:
        """Delete the objects of all ranks of a failed save, unless the root document may have been put.

        Only the coordinator has an attempt, so this does nothing on other ranks. Raises no CheckpointError.
        """
        attempt, self._attempt = self._attempt, None
        # Each request to a store that does not answer takes minutes, and would delay the error of the save.
        if attempt is not None and not (self._writer is not None and self._writer.removal_failed):
            attempts.abandon(self._store, attempt)

    # -- the other ranks

    def read_commit(self, save_id: str) -> str:
        """Return the SHA-256 of the root document if it has this save id, otherwise "". One request."""
        with suppress(CheckpointError):
            document = self._store.get(NODE)
            if parse_root_document(document, self._store.url).save_id == save_id:
                return hashlib.sha256(document).hexdigest()
        return ""
