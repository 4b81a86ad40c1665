"""The document of a run: which run a folder's checkpoints belong to, and which job goes on with it. No torch.

Each job replaces the document when it begins, and reads it before it commits or deletes anything. So a job that was
thought dead, and lives, finds that another one has taken its place.
"""

from __future__ import annotations

import dataclasses
import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from zarrckpt._commit.listings import RUN_KEY
from zarrckpt._commit.marker import pin_id_of
from zarrckpt._commit.protocol import new_id
from zarrckpt._errors import (
    CheckpointError,
    CorruptCheckpointError,
    ObjectNotFoundError,
    RunTakenOverError,
    StorageError,
    warn,
)
from zarrckpt._forks import ForkSafeLock
from zarrckpt._format.documents import Json, join
from zarrckpt._format.metadata import RUN_METADATA
from zarrckpt._format.sealed import nesting_bounded, now, parse_sealed, sealed_bytes
from zarrckpt._runs.keep import Keep
from zarrckpt._store import Store


@dataclass(frozen=True)
class RunRecord:
    """What the document of a run says."""

    run: str
    job: str
    """The job that goes on with the run: an id that it has made for itself."""
    host: str
    """Where that job's coordinator runs, for people."""
    started: str
    keep: Keep | None = None
    """Which checkpoints it keeps; None for all."""
    source: str = ""
    """The checkpoint that the run begins from, until it has its own; "" for none. A text that is never opened."""
    pin: str = ""
    """The id of the pin on it, "" for none: of this run in this folder, so a copy of the folder has another one."""
    committed: bool = False
    """Whether a checkpoint of the run was committed: afterwards the run never begins anew unnoticed."""

    def to_bytes(self) -> bytes:
        """The record as it is stored."""
        own: Json = {"run": self.run, "job": self.job, "host": self.host, "started": self.started}
        keep: Json = {} if self.keep is None else {"keep": dataclasses.asdict(self.keep)}
        source: Json = {"source": self.source, "pin": self.pin} if self.pin else {}
        return sealed_bytes(own | keep | source | ({"committed": True} if self.committed else {}))


@nesting_bounded
def parse_record(data: bytes, where: str) -> RunRecord:
    """Validate a stored record; errors as in :func:`zarrckpt._format.sealed.parse_sealed`."""
    members = parse_sealed(data, where)[1]
    keep = None
    if "keep" in members.own:
        try:
            # A newer version may have more rules: they are its jobs' own.
            known = {field.name for field in dataclasses.fields(Keep)}
            keep = Keep(**{name: rule for name, rule in members.mapping("keep").items() if name in known})
        except (TypeError, ValueError) as err:
            raise members.fail("keep", members.own["keep"], f"the rules of a run ({err})") from err
    return RunRecord(
        members.save_id("run"),
        members.save_id("job"),
        members.text("host"),
        members.time("started"),
        keep,
        members.text("source") if "source" in members.own else "",
        members.save_id("pin") if "pin" in members.own else "",
        members.own.get("committed") is True,
    )


def read_record(store: Store) -> RunRecord | None:
    """The record of the run in a folder; None where there is none. One request."""
    try:
        return parse_record(store.get(RUN_KEY), f"the run's document {join(store.url, RUN_KEY)}")
    except ObjectNotFoundError:
        return None


class Ownership:
    """This job's hold of a run. Lives on the coordinator; used from any of its threads."""

    def __init__(self, store: Store, keep: Keep | None) -> None:
        self._store = store
        self._keep = keep
        self._record: RunRecord | None = None
        self._updating = ForkSafeLock()
        """Held while the record is changed: the thread that deletes does so, too."""

    @property
    def taken(self) -> bool:
        """Whether this job has taken the run."""
        return self._record is not None

    @property
    def record(self) -> RunRecord:
        """What this job has put; after :meth:`take`."""
        assert self._record is not None
        return self._record

    def look(self) -> RunRecord | None:
        """Return the run's record, None if there is none. One request.

        Raises RunTakenOverError as :meth:`check`, once this job has taken the run; CorruptCheckpointError for a damaged
        record, StorageError.
        """
        if self._record is not None:
            self.check()
            return self._record
        try:
            return read_record(self._store)
        except CorruptCheckpointError as err:
            raise CorruptCheckpointError(f"{err}. Restore it, or delete it: the next job makes it anew") from err

    def take(
        self,
        known: RunRecord | None,
        inherited: str,
        source: str = "",
        *,
        begins: bool = False,
        committed: bool = False,
    ) -> None:
        """Go on with the run in the place of whoever did before. One request.

        A plain put: of jobs that take it at the same time the last one goes on, and the others find that when they look
        again, as they do before they commit or delete anything.

        Args:
            known: the record as it was read just now.
            inherited: the run of the checkpoint that this job goes on from, for a folder without a record.
            source: the url of the checkpoint of another run that this job was given to begin from.
            begins: whether the run has no checkpoint, so that it begins from there.
            committed: whether a checkpoint of the run was found.

        Warns of a pin that an earlier job may have left elsewhere, and that this one does not remove.

        Raises StorageError, also if the folder may only be read.
        """
        run = known.run if known is not None else inherited or new_id()
        pin = pin_id_of(f"{run} {self._store.url}") if source else ""
        left = ("", "") if known is None else (known.source, known.pin)
        if left[1] and left != (source, pin):
            _warn_of_pin(self._store, *left)
        if not begins and left != (source, pin):
            source = pin = ""
        host = f"{socket.gethostname()}, process {os.getpid()}"
        committed = committed or (known is not None and known.committed)
        own = RunRecord(run, new_id(), host, now(), self._keep, source, pin, committed)
        try:
            self._store.put(RUN_KEY, [own.to_bytes()])
        except StorageError as err:
            raise type(err)(
                f"{err}. A manager writes to its run when it restores or saves; to read it only: "
                f"zarrckpt.load(state, zarrckpt.latest({self._store.url!r}))"
            ) from err
        self._store.sync([RUN_KEY])
        self._record = own

    def forget_source(self) -> None:
        """Record that the run's source is not pinned any more. Two requests; raises ObjectExistsError after a take."""
        with self._updating:
            stored = self._store.get_versioned(RUN_KEY)
            if parse_record(stored.data, join(self._store.url, RUN_KEY)).job == self.record.job:
                own = dataclasses.replace(self.record, source="", pin="")
                self._store.replace(RUN_KEY, own.to_bytes(), stored.version)
                self._record = own

    def note_commit(self) -> None:
        """Record that a checkpoint of the run was committed. Two requests, at the first commit of a run.

        Conditional, since another job may take the run at the same moment. If it fails, the next commit tries again.
        """
        if self.record.committed:
            return
        with self._updating, suppress(CheckpointError):
            own = dataclasses.replace(self.record, committed=True)
            stored = self._store.get_versioned(RUN_KEY)
            if stored.data == self.record.to_bytes():
                self._store.replace(RUN_KEY, own.to_bytes(), stored.version)
            if stored.data in (self.record.to_bytes(), own.to_bytes()):
                self._record = own

    def check(self) -> None:
        """Raise RunTakenOverError where another job has taken the run. One request."""
        found = read_record(self._store)
        if found is None or found.job != self.record.job:
            what = "has lost its document"
            if found is not None:
                what = f"was taken over by another job, on {found.host}, at {found.started}"
            raise RunTakenOverError(
                f"the run {self._store.url} {what}. This job (on {self.record.host}, begun {self.record.started}) "
                "saves and deletes nothing there any more: stop it, or stop the other one and start this one again"
            )

    def metadata(self) -> dict[str, Any]:
        """What the metadata of the run's checkpoints has."""
        return {RUN_METADATA: {"id": self.record.run, "job": self.record.job}}


def _warn_of_pin(store: Store, source: str, pin: str) -> None:
    # Texts of a stored document: repr leaves no control characters in them.
    warn(
        f"the run {store.url} was begun from {source[:1000]!r} by another job, which pinned that checkpoint. This job "
        "was not given it as init_from, or the run's folder was moved or copied: so the pin stays. If no run needs it: "
        f"zarrckpt.unpin({source[:1000]!r}, {pin!r})"
    )
