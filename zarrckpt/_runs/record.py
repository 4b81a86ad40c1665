"""The document of a run. It has the run's id, and the id of the job that owns the run. No torch.

Each job replaces the document when it begins, and reads it before it commits or deletes anything. So a job that was
considered dead but still runs notices that another job has taken over the run.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from typing import Any

from msgspec.structs import replace

from zarrckpt._commit.listings import RUN_KEY
from zarrckpt._commit.marker import new_id, pin_id_of
from zarrckpt._errors import (
    CheckpointError,
    CorruptCheckpointError,
    ObjectNotFoundError,
    RunTakenOverError,
    StorageError,
    log,
    warn,
)
from zarrckpt._forks import ForkSafeLock
from zarrckpt._format.documents import join
from zarrckpt._format.metadata import RUN_METADATA
from zarrckpt._format.sealed import Document, Id, IdOrEmpty, Time, now, parse_sealed
from zarrckpt._runs.keep import Keep
from zarrckpt._store import Store


class RunRecord(Document, frozen=True, rename={"run_id": "run", "origin": "source"}):
    """The content of a run's document."""

    run_id: Id
    job: Id
    """The random id of the job that owns the run."""
    host: str
    """The host and process of that job's coordinator, for messages."""
    started: Time
    keep: Keep | None = None
    """The job's rules for the checkpoints to keep, or None if all are kept. Rules of newer versions are ignored."""
    origin: str = ""
    """The url of the checkpoint from which the run begins, until it has its own, or "". This url is never opened."""
    pin: IdOrEmpty = ""
    """The id of the pin on that checkpoint, or "". It depends on the run and the folder, so a copy has another pin."""
    committed: bool = False
    """Whether a checkpoint of the run was committed. Then a run without checkpoints is an error."""


def read_record(store: Store) -> RunRecord | None:
    """Return the record of the run in a folder, or None if there is none. One request."""
    try:
        return parse_sealed(RunRecord, store.get(RUN_KEY), f"the run's document {join(store.url, RUN_KEY)}")
    except ObjectNotFoundError:
        return None


class Ownership:
    """This job's ownership of a run. Only the coordinator has it. Its threads may share it."""

    def __init__(self, store: Store, keep: Keep | None) -> None:
        self._store = store
        self._keep = keep
        self._record: RunRecord | None = None
        self._updating = ForkSafeLock()
        """Held while the record changes, because the thread that deletes checkpoints changes it too."""

    @property
    def is_taken(self) -> bool:
        """Whether this job has taken over the run."""
        return self._record is not None

    @property
    def record(self) -> RunRecord:
        """The record that this job has put. Only after :meth:`take_over`."""
        assert self._record is not None
        return self._record

    def read(self) -> RunRecord | None:
        """Return the run's record, or None if there is none. One request.

        If this job has taken over the run, checks that it still owns it, and returns its own record. Raises
        RunTakenOverError if another job has taken over the run since, CorruptCheckpointError for a damaged record, and
        StorageError.
        """
        if self._record is not None:
            self.check()
            return self._record
        try:
            return read_record(self._store)
        except CorruptCheckpointError as err:
            raise CorruptCheckpointError(f"{err}. Restore it, or delete it: the next job creates a new one") from err

    def take_over(
        self,
        known: RunRecord | None,
        inherited: str,
        origin: str = "",
        *,
        begins: bool = False,
        committed: bool = False,
    ) -> None:
        """Take over the run from the job that owned it. One request.

        An unconditional put. If several jobs take over the run at the same time, the last one owns it. The others
        notice it, because every job reads the record before it commits or deletes anything.

        Args:
            known: the record that the caller has read, or None.
            inherited: the run of the checkpoint from which this job continues, for a folder without a record.
            origin: the url of another run's checkpoint, from ``init_from``, or "".
            begins: whether the run has no checkpoint, so that it begins from ``origin``.
            committed: whether the run has a committed checkpoint.

        Warns of a pin that an earlier job may have left and that this job does not remove. Raises StorageError, also
        if the folder is not writable.
        """
        run_id = known.run_id if known is not None else inherited or new_id()
        pin = pin_id_of(f"{run_id} {self._store.url}") if origin else ""
        if known is None or (known.origin, known.pin) != (origin, pin):
            if known is not None and known.pin:
                _warn_of_pin(self._store, known.origin, known.pin)
            if not begins:
                origin = pin = ""
        host = f"{socket.gethostname()}, process {os.getpid()}"
        committed = committed or (known is not None and known.committed)
        own = RunRecord(run_id, new_id(), host, now(), self._keep, origin, pin, committed)
        try:
            self._store.put(RUN_KEY, [own.to_bytes()])
        except StorageError as err:
            raise type(err)(
                f"{err}. A manager writes to its run when it restores or saves. To read only: "
                f"CheckpointManager({self._store.url!r}, read_only=True)"
            ) from err
        self._store.sync([RUN_KEY])
        self._record = own
        if known is not None:
            log.info("took over the run %s from the job on %s, begun %s", self._store.url, known.host, known.started)

    def forget_origin(self) -> None:
        """Record that the run's origin is no longer pinned. Two requests.

        Raises ObjectExistsError if another job takes over the run between them.
        """
        with self._updating:
            stored = self._store.get_versioned(RUN_KEY)
            if parse_sealed(RunRecord, stored.data, join(self._store.url, RUN_KEY)).job == self.record.job:
                own = replace(self.record, origin="", pin="")
                self._store.replace(RUN_KEY, own.to_bytes(), stored.version)
                self._record = own

    def record_first_commit(self) -> None:
        """Record that a checkpoint of the run was committed. Two requests at the first commit of a run, then none.

        The put is conditional, because another job may take over the run at the same time. If it fails, the next commit
        tries again.
        """
        if self.record.committed:
            return
        with self._updating, suppress(CheckpointError):
            own = replace(self.record, committed=True)
            stored = self._store.get_versioned(RUN_KEY)
            if stored.data == self.record.to_bytes():
                self._store.replace(RUN_KEY, own.to_bytes(), stored.version)
            if stored.data in (self.record.to_bytes(), own.to_bytes()):
                self._record = own

    def check(self) -> None:
        """Raise RunTakenOverError if another job has taken over the run. One request."""
        found = read_record(self._store)
        if found is None or found.job != self.record.job:
            what = "has lost its document"
            if found is not None:
                what = f"was taken over by another job, on {found.host}, at {found.started}"
            raise RunTakenOverError(
                f"the run {self._store.url} {what}. This job (on {self.record.host}, begun {self.record.started}) can "
                "no longer save or delete there. Stop it, or stop the other job and start this one again. If the other "
                "job only evaluates, use CheckpointManager(..., read_only=True) there"
            )

    def metadata(self) -> dict[str, Any]:
        """Return the members that the run adds to the metadata of its checkpoints."""
        return {RUN_METADATA: {"id": self.record.run_id, "job": self.record.job}}


def _warn_of_pin(store: Store, origin: str, pin: str) -> None:
    # These texts are read from a document, and repr escapes control characters.
    warn(
        f"the run {store.url} was begun from {origin[:1000]!r} by another job, which pinned that checkpoint. The pin "
        "stays, because this job has a different init_from or none, or the run's folder was moved or copied. If no run "
        f"needs the pin: zarrckpt.unpin({origin[:1000]!r}, {pin!r})"
    )
