"""Operations of a run that only the coordinator does: choose checkpoints, take over, refuse steps, rewind. No torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from zarrckpt._commit.contents import UrlContents, read_contents
from zarrckpt._commit.discovery import CheckpointFolder, load_root, number_in, refuse_inside
from zarrckpt._commit.foreign_files import describe_files, names_text
from zarrckpt._commit.listings import RUN_KEY, list_below
from zarrckpt._commit.marker import CLAIM_KEY, pin_key
from zarrckpt._commit.pins import put_pin, refuse_pinned
from zarrckpt._commit.removal import remove_all
from zarrckpt._commit.stored_documents import is_stored, read_root
from zarrckpt._errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    ForeignObjectsError,
    RunTakenOverError,
    StorageError,
    UnsupportedFormatError,
    warn,
)
from zarrckpt._events import OnEvent
from zarrckpt._format.documents import join
from zarrckpt._format.metadata import run_of
from zarrckpt._format.wire import record
from zarrckpt._runs.folders import (
    RunCheckpoint,
    WithoutRoot,
    is_own,
    newest_first,
    skip_warning,
    step_folders,
    step_of,
)
from zarrckpt._runs.keep import Keep
from zarrckpt._runs.record import Ownership, RunRecord
from zarrckpt._runs.retention import Retention
from zarrckpt._store import Store, StoreSpec


@record
@dataclass(frozen=True)
class ChosenCheckpoint:
    """The checkpoint that the ranks restore."""

    name: str
    """The folder of the checkpoint, or "" if there is none or it belongs to another run."""
    step: int | None
    is_origin: bool = False
    """Whether it is the checkpoint of another run from which this run begins."""
    has_alternative: bool = False
    """Whether another folder has the same step, with a different number of leading zeros."""

    def __post_init__(self) -> None:
        if self.name and step_of(self.name) is None:
            raise ValueError(f"the name of a step's folder was expected, got {self.name!r:.100}")


class RunCoordinator:
    """The operations of a run that only the coordinator does. Every rank creates one; only rank 0's makes requests.

    Used by one thread at a time. Deletions run in another thread.
    """

    def __init__(
        self,
        spec: StoreSpec,
        keep: Keep | None,
        init_from: StoreSpec,
        on_event: OnEvent | None,
        rank: int,
        *,
        read_only: bool,
    ) -> None:
        """``init_from`` is the checkpoint from which the run begins. Its url is "" if the user gave none.

        ``rank`` is the one in the events of deletions. With ``read_only``, :meth:`choose` does not take over the run.
        """
        self.spec = spec
        self._read_only = read_only
        self._init_from = init_from
        self.ownership = Ownership(spec.open(), keep)
        self.retention = Retention(spec, keep, self.ownership, self._unpin_origin, on_event, rank)
        self.newest_step = -1
        """The step of the newest sound checkpoint. Saves up to this step are refused."""
        self.newest_name = ""
        """The folder of this checkpoint, whose chunks the next save reuses, or ""."""
        self._chosen: RunCheckpoint | None = None
        """The result of the last :meth:`choose`."""
        self._damaged: dict[str, CheckpointFolder] = {}
        """The checkpoints that were found damaged, by name. If a load found the damage, with the root."""
        self._has_unpinned = False
        """Whether this job has deleted the pin of the checkpoint from which the run began."""

    # -- to restore

    def choose(
        self,
        step: int | None,
        timeout: float,
        report_alive: Callable[[], None],
        *,
        rewind: bool,
        is_damaged: bool,
    ) -> ChosenCheckpoint:
        """Choose the checkpoint of a step, or the newest sound one, and take over the run.

        ``is_damaged``: a load has found that the checkpoint of the last call is damaged. Another one is chosen.
        First waits at most ``timeout`` seconds for running deletions, which may delete the chosen checkpoint. Calls
        ``report_alive`` for each checkpoint that it removes. Costs all pages of one listing and three requests if the
        newest checkpoint is sound and ``step`` is None.
        """
        self.retention.settle(timeout)
        if not is_damaged:
            self._damaged = {}
        elif (last := self._chosen) is not None:
            damage = CorruptCheckpointError("its data are damaged")
            self._damaged[last.name] = CheckpointFolder(last.name, last.root, damage)
        store, url = self.spec.open(), self.spec.url
        steps = _list_steps(store)
        found_by_loads = {name for name, below in self._damaged.items() if below.root is not None}
        newest = self._find_newest(steps)
        chosen = newest if step is None else _find_step(store, step, steps, found_by_loads)
        self._chosen = chosen
        stored = None if self._read_only and chosen is not None else self.ownership.read()
        if chosen is None:
            damaged = sorted(self._damaged.values(), key=lambda below: step_of(below.name) or 0, reverse=True)
            _refuse_to_begin_anew(url, stored, damaged)
        self._note_newest(newest)
        try:
            if not self._read_only:
                self._take_over(stored, chosen, steps, newest)
        except StorageError as err:
            if rewind:
                raise
            warn(
                f"this job cannot take over the run {url}. It can read checkpoints, but its saves will fail "
                f"until this is fixed: {err}"
            )
        if chosen is None:
            if not self._init_from.url:
                return ChosenCheckpoint("", None)
            return ChosenCheckpoint("", self._pin_origin(), is_origin=True)
        if rewind:
            self._remove_after(chosen, steps, report_alive)
        elif chosen.step < self.newest_step and not self._read_only:
            warn(
                f"the run {url} continues from step {chosen.step}, but has a checkpoint of step {self.newest_step}: "
                "saves up to that step are refused. restore(..., rewind=True) removes the later checkpoints"
            )
        alternative = any(steps[name] == chosen.step for name in steps.keys() - self._damaged.keys() - {chosen.name})
        return ChosenCheckpoint(chosen.name, chosen.step, has_alternative=alternative)

    def _find_newest(self, steps: Mapping[str, int]) -> RunCheckpoint | None:
        """Return the newest sound checkpoint. Damaged ones after it are recorded, so that they are never deleted.

        Warns of those that were not known to be damaged.
        """
        store = self.spec.open()
        try:
            for below in newest_first(store, steps.keys() - self._damaged.keys()):
                if isinstance(below.damage, UnsupportedFormatError):
                    raise below.damage
                if below.root is not None:
                    return RunCheckpoint(steps[below.name], below.name, below.root)
                self._damaged[below.name] = below
                warn(skip_warning(store, below))
            return None
        finally:
            with self.retention.lock_known() as known:
                known.note_damaged(self._damaged)

    def _take_over(
        self,
        stored: RunRecord | None,
        chosen: RunCheckpoint | None,
        steps: Mapping[str, int],
        newest: RunCheckpoint | None,
    ) -> None:
        """Take over the run, unless this job has done so, and record the folders of ``steps`` for retention.

        ``stored`` is the run's record, ``chosen`` the checkpoint from which the job continues, and ``newest`` the
        newest sound checkpoint. Raises StorageError.
        """
        if self.ownership.is_taken:
            return
        inherited = "" if chosen is None else run_of(chosen.root.metadata)
        origin = self._init_from.url
        self.ownership.take_over(stored, inherited, origin, begins=chosen is None, committed=newest is not None)
        with self.retention.lock_known() as known:
            known.note_folders(steps)

    def _remove_after(self, chosen: RunCheckpoint, steps: Mapping[str, int], report_alive: Callable[[], None]) -> None:
        """Remove all checkpoints of later steps, the last one first.

        Unfinished saves of this run stay: this job has taken over the run, so they fail at their commit. Their
        leftovers are deleted after the commit of a later step. Raises ForeignObjectsError for a checkpoint or an
        unfinished save that does not belong to this run, CheckpointPinnedError for a pinned checkpoint.
        """
        later = [name for name, step in steps.items() if step > chosen.step]
        found = [(name, read_contents(self.spec.child(name).open(), allow_damaged=True)) for name in later]
        for name, left in found:
            refuse_pinned(self.spec.child(name).open())
            if fault := _foreign_fault(self.spec, name, left, self.ownership.record.run_id):
                raise ForeignObjectsError(f"the run {self.spec.url} cannot return to step {chosen.step}: {fault}")
        for name, left in reversed(found):
            report_alive()
            if left.root_bytes is not None or left.removal:
                remove_all(self.spec.child(name).open(), left)
                with self.retention.lock_known() as known:
                    known.forget(name)
        self._note_newest(chosen)

    def _note_newest(self, newest: RunCheckpoint | None) -> None:
        self.newest_step, self.newest_name = (-1, "") if newest is None else (newest.step, newest.name)

    # -- the checkpoint of another run from which this run begins

    def _pin_origin(self) -> int | None:
        """Pin the checkpoint from which the run begins. Return its step, or None if it is not known."""
        store = self._init_from.open()
        root = load_root(store)
        try:
            if self.ownership.is_taken:
                put_pin(store, root, self.ownership.record.pin, f"the run {self.spec.url} begins from it")
        except StorageError as err:
            warn(f"{store.url} cannot be pinned, and may be removed before {self.spec.url} has a checkpoint: {err}")
        step = root.metadata.get("step", number_in(store.url))
        return step if type(step) is int else None

    def _unpin_origin(self) -> None:
        """Unpin the checkpoint from which the run began, unless an earlier job has done so. Three requests.

        Opens only this job's ``init_from``, never a url from the run's document.
        """
        if self._has_unpinned or not self.ownership.record.pin:
            return
        self._init_from.open().delete([pin_key(self.ownership.record.pin)])
        self._has_unpinned = True
        self.ownership.forget_origin()

    # -- to save

    def take_or_check_ownership(self) -> None:
        """Take over the run, or check that this job still owns it. Raises RunTakenOverError."""
        if self.ownership.is_taken:
            self.ownership.check()
        else:
            steps = _list_steps(self.spec.open())
            newest = self._find_newest(steps)
            stored = self.ownership.read()
            self._note_newest(newest)
            self._take_over(stored, newest, steps, newest)

    def damaged_id(self, name: str) -> str:
        """Return the id of the run's checkpoint of this name in which a load has found damage, or "". No I/O."""
        root = self._damaged[name].root if name in self._damaged else None
        is_own_root = root is not None and is_own(name, root, (), self.ownership.record.run_id)
        return root.save_id if root is not None and is_own_root else ""


@dataclass(frozen=True)
class RunSave:
    """The run's part in one save, on the coordinator. It implements :class:`zarrckpt._save.request.Run`."""

    coordinator: RunCoordinator
    step: int
    name: str
    """The folder of the checkpoint."""
    metadata_of_step: Mapping[str, Any]
    patience: float
    """Maximum number of seconds for which the save waits for deletions."""
    check_metric: bool = field(kw_only=True)
    """Whether several saves without the metric of the rules are refused."""

    def wait_for_deletions(self) -> None:
        self.coordinator.retention.wait_for_deletions(self.patience)

    def begin(self) -> str:
        """Check that the run may save this step, and return its id. Three requests for the first save, then one.

        Raises CheckpointExistsError, RunTakenOverError, or CheckpointError for a missing metric.
        """
        coordinator, url = self.coordinator, self.coordinator.spec.url
        coordinator.take_or_check_ownership()
        if self.step <= coordinator.newest_step:
            raise CheckpointExistsError(
                f"the run {url} has a checkpoint of step {coordinator.newest_step}, so step {self.step} is not saved. "
                "To continue from an earlier step: restore(state, step=..., rewind=True). For a new run, use another "
                "url"
            )
        with coordinator.retention.lock_known() as known:
            text = known.check_metric(url, self.step, self.metadata_of_step) if self.check_metric else ""
            known.note_begin(self.name, self.step)
        if text:
            warn(text)
        return coordinator.ownership.record.run_id

    def damaged_id(self) -> str:
        return self.coordinator.damaged_id(self.name)

    def base_name(self) -> str:
        return self.coordinator.newest_name

    def base_spec(self, name: str) -> StoreSpec:
        return self.coordinator.spec.child(name)

    def metadata(self) -> Mapping[str, Any]:
        return self.coordinator.ownership.metadata()

    def check(self) -> None:
        self.coordinator.ownership.check()

    def record_commit(self) -> None:
        """Record the commit and start the deletion of expired checkpoints. One request.

        Raises RunTakenOverError if another job has taken over the run since the check before the commit. That job may
        have listed an unfinished save here, and may delete the objects of this checkpoint.
        """
        coordinator = self.coordinator
        try:
            coordinator.ownership.check()
        except RunTakenOverError as err:
            url = coordinator.spec.child(self.name).url
            raise RunTakenOverError(f"{err}. {url} was committed but may lack objects: zarrckpt verify {url}") from err
        except StorageError:
            pass  # The checkpoint is committed, and the next save checks again.
        coordinator.newest_step, coordinator.newest_name = self.step, self.name
        coordinator.ownership.record_first_commit()
        coordinator.retention.delete_after_commit(self.name, self.step, self.metadata_of_step)


def _list_steps(store: Store) -> dict[str, int]:
    """Return the step of each folder of a step in a run's folder, in the order of the steps.

    All pages of one listing, and a few requests if there is no run yet. Raises ForeignObjectsError if the url is a
    checkpoint or inside one.
    """
    listed = list_below(store)
    steps = step_folders(listed.folders)
    if listed.has_root or listed.has_save:
        _refuse_checkpoint(store, has_root=listed.has_root, is_run=bool(steps) or listed.is_run)
    if not steps and not listed.is_run:
        refuse_inside(store)
    # Without objects, the search would cost a request.
    found = describe_files(store, listed) if not steps and (listed.objects or store.is_local) else ""
    if found and not listed.objects:
        raise ForeignObjectsError(f"{store.url} is not the folder of a run. {found}. Nothing was changed")
    if not steps and (found or listed.folders):
        warn(
            f"no checkpoint is restored, because {store.url} has no folder of a step such as 'step-100'. "
            f"{found or f'It has {names_text(listed.folders)}'}"
        )
    return steps


def _refuse_checkpoint(store: Store, *, has_root: bool, is_run: bool) -> None:
    """Raise ForeignObjectsError if a run's url is the url of a checkpoint. At most two requests.

    ``has_root``: whether a root document exists. ``is_run``: whether folders of steps or the document of a run exist. A
    save that was begun by mistake in the folder of a run, and did not commit, raises no error.
    """
    if has_root:
        try:
            read_root(store)
        except ForeignObjectsError:
            # In a run's folder it is a group of another program. Otherwise, if there is a claim, another program has
            # replaced the root document of a checkpoint.
            if is_run or not is_stored(store, CLAIM_KEY):
                return
        except (CorruptCheckpointError, UnsupportedFormatError):
            pass
        state = "is a checkpoint"
    elif is_run:
        return
    else:
        state = "has an unfinished save"
    raise ForeignObjectsError(
        f"{store.url} {state} and is not the folder of a run: expected a folder of checkpoints such as "
        f"{join(store.url, 'step-100')}. Nothing was changed. Pass the folder above it, or a new one"
    )


def _find_step(store: Store, step: int, steps: Mapping[str, int], unreadable: Collection[str]) -> RunCheckpoint:
    """Return the sound checkpoint of a step, outside the folders ``unreadable``. Raises the reason if there is none."""
    damage, unfinished = None, ""
    for below in newest_first(store, [name for name in steps if steps[name] == step and name not in unreadable]):
        if below.root is not None:
            return RunCheckpoint(step, below.name, below.root)
        if isinstance(below, WithoutRoot):
            unfinished = f". {below.damage}"
        else:
            damage = damage or below.damage
    if damage is not None:
        raise damage
    last = ", ".join(map(str, [*steps.values()][-8:]))
    there = f"The folders of the last steps: {last}" if last else "It has no folder of a step"
    raise CheckpointNotFoundError(f"the run {store.url} has no checkpoint of step {step}. {there}{unfinished}")


def _refuse_to_begin_anew(url: str, stored: RunRecord | None, damaged: Sequence[CheckpointFolder]) -> None:
    """Raise an error if the run's record or folders show that a checkpoint was committed. No I/O.

    A save of this run that was killed directly before its commit does not count as a checkpoint.
    """
    if damaged and not (
        stored is not None
        and not stored.committed
        and all(isinstance(below, WithoutRoot) and below.run_id == stored.run_id for below in damaged)
    ):
        shown = ", ".join(below.name for below in damaged)
        newest = join(url, damaged[0].name)
        raise CorruptCheckpointError(
            f"every checkpoint of the run {url} is damaged ({shown}). The newest: {damaged[0].damage}. List the "
            f"damage: zarrckpt verify {newest}. To begin anew: use another url, or remove all of them: "
            f"zarrckpt rm {newest}"
        )
    if stored is not None and stored.committed and not damaged:
        raise CheckpointNotFoundError(
            f"the run {url} has no checkpoint, but its document {RUN_KEY} records that one was committed. Check the "
            "path and the storage. To begin anew: use another url, or delete the document"
        )


def _foreign_fault(spec: StoreSpec, name: str, found: UrlContents, run_id: str) -> str:
    """Return the reason why a rewind must not remove a later checkpoint, or "". No I/O."""
    url = spec.child(name).url
    if found.root_bytes is not None and not is_own(name, found.root, found.markers, run_id):
        return (
            f"the later checkpoint {url} was not saved by the run {run_id} under this name. Nothing was removed. Move "
            f"it elsewhere, or if you do not need it: zarrckpt rm {url}"
        )
    for marker in found.others:
        if found.may_commit(marker) and marker.run_id != run_id:
            return (
                f"the save {marker.save_id} of a later step, begun {marker.started} at {url}, does not belong to the "
                f"run {run_id} and may still commit. Nothing was removed. Wait for that save. If no save there is "
                f"running: zarrckpt recover {url} --stopped"
            )
    return ""
