"""Operations of a run that only the coordinator does: choose checkpoints, take over, refuse steps, rewind. No torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from zarrckpt._commit.contents import read_contents
from zarrckpt._commit.discovery import CheckpointFolder, load_root, number_in, refuse_inside
from zarrckpt._commit.listings import RUN_KEY, list_below
from zarrckpt._commit.marker import CLAIM_KEY, pin_key
from zarrckpt._commit.pins import put_pin, refuse_pinned
from zarrckpt._commit.removal import remove_all
from zarrckpt._commit.stored_documents import is_stored, read_root
from zarrckpt._errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    ForeignObjectsError,
    RunTakenOverError,
    StorageError,
    UnsupportedFormatError,
    warn,
)
from zarrckpt._format.documents import join
from zarrckpt._format.metadata import run_of
from zarrckpt._format.wire import record
from zarrckpt._runs.keep import Keep
from zarrckpt._runs.record import Ownership, RunRecord
from zarrckpt._runs.retention import Retention
from zarrckpt._runs.steps import Found, WithoutRoot, newest_first, skip_warning, step_of
from zarrckpt._store import Store, StoreSpec

_MAX_SAVES_WITHOUT_METRIC = 5
"""Number of saves without the metric of the rules at which a save is refused, if no checkpoint has the metric."""


@record
@dataclass(frozen=True)
class Chosen:
    """The checkpoint that the ranks restore."""

    name: str
    """The folder of the checkpoint, or "" if there is none or it belongs to another run."""
    step: int | None
    damaged: tuple[str, ...]
    """The folders of damaged checkpoints. A save to one of them replaces it."""
    from_source: bool = False
    """Whether it is the checkpoint of another run from which this run begins."""
    others: bool = False
    """Whether another folder has the same step, with a different number of leading zeros."""

    def __post_init__(self) -> None:
        if self.name and step_of(self.name) is None:
            raise ValueError(f"the name of a step's folder was expected, got {self.name!r:.100}")


class Coordinator:
    """The coordinator's side of a run. Used by one thread at a time. Deletions run in another thread."""

    def __init__(self, spec: StoreSpec, keep: Keep | None, source: StoreSpec) -> None:
        """``source`` is the checkpoint from which the run begins. Its url is "" if ``init_from`` was not given."""
        self._spec = spec
        self._keep = keep
        self._source = source
        self.ownership = Ownership(spec.open(), keep)
        self.retention = Retention(spec, keep, self.ownership, self._unpin_source)
        self._released = False
        """Whether this job has deleted the pin of the checkpoint from which the run began."""
        self._metric_is_known = False
        """Whether a checkpoint has the metric of the rules."""
        self._without_metric: set[int] = set()
        """The steps of saves without the metric of the rules."""
        self._warned = False
        self._greatest = -1
        """The step of the newest sound checkpoint. Saves up to this step are refused."""

    # -- to restore

    def choose(
        self,
        step: int | None,
        rewind: bool,
        unreadable: frozenset[str],
        timeout: float,
        progressed: Callable[[], None],
    ) -> Chosen:
        """Choose the checkpoint of a step, or the newest sound one, and take over the run.

        ``unreadable`` are folders with checkpoints that are known to be damaged. First waits at most ``timeout``
        seconds for running deletions, which may delete the chosen checkpoint. Calls ``progressed`` for each checkpoint
        that it removes. Costs all pages of one listing and three requests if the newest checkpoint is sound and
        ``step`` is None.
        """
        self.retention.settle(timeout)
        names = self._folders()
        newest, damaged = self._newest(names, unreadable)
        chosen = newest if step is None else self._of_step(step, names, unreadable)
        known = self.ownership.read()
        if chosen is None:
            self._refuse_to_begin_anew(known, damaged)
        try:
            self._take(known, chosen, names, newest)
        except StorageError as err:
            if rewind:
                raise
            warn(
                f"this job cannot take over the run {self._spec.url}. It can read checkpoints, but its saves will fail "
                f"until this is fixed: {err}"
            )
        if rewind and chosen is not None:
            self._remove_after(chosen, names, progressed)
        elif chosen is not None and chosen.step < self._greatest:
            warn(
                f"the run {self._spec.url} continues from step {chosen.step}, but has a checkpoint of step "
                f"{self._greatest}: saves up to that step are refused. restore(..., rewind=True) removes the later "
                "checkpoints"
            )
        if chosen is not None:
            others = any(step_of(name) == chosen.step and name not in {chosen.name, *unreadable} for name in names)
            return Chosen(chosen.name, chosen.step, tuple(below.name for below in damaged), others=others)
        return Chosen("", self._pin_source(), (), from_source=True) if self._source.url else Chosen("", None, ())

    def _folders(self) -> list[str]:
        """Return the folders of steps, in the order of their steps.

        All pages of one listing, and a few requests if there is no run yet. Raises ForeignObjectsError if the url is a
        checkpoint or inside one.
        """
        store = self._spec.open()
        listed = list_below(store)
        names = [name for name in listed.folders if step_of(name) is not None]
        if listed.has_root or listed.has_save:
            _refuse_checkpoint(store, listed.has_root, bool(names) or listed.is_run)
        if not names and not listed.is_run:
            refuse_inside(store)
        if listed.folders and not names:
            shown = ", ".join(map(repr, listed.folders[:3]))
            warn(
                f"no checkpoint is restored, because {self._spec.url} has no folder of a step such as 'step-100'. It "
                f"has {shown}"
            )
        return sorted(names, key=lambda name: (step_of(name), name))

    def _newest(self, names: list[str], unreadable: frozenset[str]) -> tuple[Found | None, list[CheckpointFolder]]:
        """Return the newest sound checkpoint and the damaged ones after it. Warn of these, and never delete them."""
        store = self._spec.open()
        damage = CorruptCheckpointError("its data are damaged")
        damaged = [CheckpointFolder(name, damage=damage) for name in sorted(unreadable, reverse=True)]
        try:
            return self._first_sound(store, names, unreadable, damaged), damaged
        finally:
            self.retention.ignore(below.name for below in damaged)

    def _first_sound(
        self, store: Store, names: list[str], unreadable: frozenset[str], damaged: list[CheckpointFolder]
    ) -> Found | None:
        for below in newest_first(store, [name for name in names if name not in unreadable]):
            step = step_of(below.name)
            assert step is not None
            if isinstance(below.damage, UnsupportedFormatError):
                raise below.damage
            if below.root is not None:
                return Found(step, below.name, below.root)
            damaged.append(below)
            warn(skip_warning(store, below))
        return None

    def _refuse_to_begin_anew(self, known: RunRecord | None, damaged: list[CheckpointFolder]) -> None:
        """Raise an error if the run's record or folders show that a checkpoint was committed.

        A save of this run that was killed directly before its commit does not count as a checkpoint.
        """
        if damaged and not (
            known is not None
            and not known.committed
            and all(isinstance(below, WithoutRoot) and below.run == known.run for below in damaged)
        ):
            shown = ", ".join(below.name for below in damaged)
            url = self._spec.child(damaged[0].name).url
            raise CorruptCheckpointError(
                f"every checkpoint of the run {self._spec.url} is damaged ({shown}). The newest: {damaged[0].damage}. "
                f"List the damage: zarrckpt verify {url}. To begin anew: use another url, or remove all of them: "
                f"zarrckpt rm {url}"
            )
        if known is not None and known.committed and not damaged:
            raise CheckpointNotFoundError(
                f"the run {self._spec.url} has no checkpoint, but its document {RUN_KEY} records that one was "
                "committed. Check the path and the storage. To begin anew: use another url, or delete the document"
            )

    def _of_step(self, step: int, names: list[str], unreadable: frozenset[str]) -> Found:
        store, damage, unfinished = self._spec.open(), None, ""
        for below in newest_first(store, [name for name in names if step_of(name) == step and name not in unreadable]):
            if below.root is not None:
                return Found(step, below.name, below.root)
            if isinstance(below, WithoutRoot):
                unfinished = f". {below.damage}"
            else:
                damage = damage or below.damage
        if damage is not None:
            raise damage
        known = ", ".join(str(step_of(name)) for name in names[-8:])
        there = f"The folders of the last steps: {known}" if known else "It has no folder of a step"
        raise CheckpointNotFoundError(f"the run {self._spec.url} has no checkpoint of step {step}. {there}{unfinished}")

    def _take(self, known: RunRecord | None, chosen: Found | None, names: list[str], newest: Found | None) -> None:
        self._greatest = -1 if newest is None else newest.step
        if self.ownership.taken:
            return
        inherited = "" if chosen is None else run_of(chosen.root.metadata)
        source = self._source.url
        self.ownership.take(known, inherited, source, begins=chosen is None, committed=newest is not None)
        self.retention.note_folders(names)

    def _remove_after(self, chosen: Found, names: list[str], progressed: Callable[[], None]) -> None:
        """Remove all checkpoints of later steps, the last one first.

        Unfinished saves of this run stay: this job has taken over the run, so they fail at their commit. Their
        leftovers are deleted after the commit of a later step. Raises ForeignObjectsError for a checkpoint or an
        unfinished save that does not belong to this run, CheckpointPinnedError for a pinned checkpoint.
        """
        later = [self._spec.child(name) for name in names if _after(name, chosen.step)]
        found = [(spec, read_contents(spec.open(), damaged=True)) for spec in later]
        run = self.ownership.record.run
        for spec, left in found:
            refuse_pinned(spec.open())
            if left.root is not None:
                foreign = run_of(left.root.metadata) != run
            else:
                foreign = left.root_bytes is not None and any(marker.run != run for marker in left.markers)
            if foreign:
                raise ForeignObjectsError(
                    f"the run {self._spec.url} cannot return to step {chosen.step}: the later checkpoint {spec.url} "
                    f"does not belong to the run {run}. Nothing was removed. If you do not need it: zarrckpt rm "
                    f"{spec.url}"
                )
            others = [marker for marker in left.others if left.may_commit(marker) and marker.run != run]
            if others:
                raise ForeignObjectsError(
                    f"the run {self._spec.url} cannot return to step {chosen.step}: the save {others[0].save_id} of "
                    f"a later step, begun {others[0].started} at {spec.url}, does not belong to the run {run} and may "
                    "still commit. Nothing was removed. Wait for that save. If no save there is running: "
                    f"zarrckpt recover {spec.url} --stopped"
                )
        for spec, left in reversed(found):
            progressed()
            if left.root_bytes is not None or left.removal:
                remove_all(spec.open(), left)
                self.retention.forget(spec.url.rpartition("/")[2])
        self._greatest = chosen.step

    # -- the checkpoint of another run from which this run begins

    def _pin_source(self) -> int | None:
        """Pin the checkpoint from which the run begins. Return its step, or None if it is not known."""
        store = self._source.open()
        root = load_root(store)
        try:
            if self.ownership.taken:
                put_pin(store, root, self.ownership.record.pin, f"the run {self._spec.url} begins from it")
        except StorageError as err:
            warn(f"{store.url} cannot be pinned, and may be removed before {self._spec.url} has a checkpoint: {err}")
        step = root.metadata.get("step", number_in(store.url))
        return step if type(step) is int else None

    def _unpin_source(self) -> None:
        """Unpin the checkpoint from which the run began, unless an earlier job has done so. Three requests.

        Opens only this job's ``init_from``, never a url from the run's document.
        """
        if self._released or not self.ownership.record.pin:
            return
        self._source.open().delete([pin_key(self.ownership.record.pin)])
        self._released = True
        self.ownership.forget_source()

    # -- to save

    def begin(self, step: int, name: str, metric_names: Collection[str] | None) -> str:
        """Check that a save of a step is allowed, and return the run's id. Three requests for the first save, then one.

        ``metric_names`` are the names of the save's metrics. The metric of the rules must be among them. None disables
        this check. Raises CheckpointExistsError, RunTakenOverError, or CheckpointError for a missing metric.
        """
        if self.ownership.taken:
            self.ownership.check()
        else:
            names = self._folders()
            newest, _ = self._newest(names, frozenset())
            self._take(self.ownership.read(), newest, names, newest)
        if step <= self._greatest:
            raise CheckpointExistsError(
                f"the run {self._spec.url} has a checkpoint of step {self._greatest}, so step {step} is not saved. To "
                "continue from an earlier step: restore(state, step=..., rewind=True). For a new run, use another url"
            )
        if metric_names is not None:
            self._check_metric(step, metric_names)
        self.retention.note_begin(name, step)
        return self.ownership.record.run

    def _check_metric(self, step: int, names: Collection[str]) -> None:
        """Warn once of a save without the metric of the rules. Raises CheckpointError after several such saves."""
        if self._keep is None or not self._keep.best or self._metric_is_known:
            return
        metric = self._keep.metric or ""
        if metric in names or self.retention.knows_metric(metric):
            self._metric_is_known = True
            return
        given = ", ".join(map(repr, sorted({*names} - {"step"})[:8]))
        text = (
            f"the run {self._spec.url} keeps the best by the metric {metric!r}, but the save of step {step} has only "
            f"{given}. Pass {metric!r} in metrics (None if it is not known yet), or another name in Keep(metric=)"
        )
        self._without_metric.add(step)
        if len(self._without_metric) >= _MAX_SAVES_WITHOUT_METRIC:
            raise CheckpointError(
                f"{text}. No checkpoint has it after {_MAX_SAVES_WITHOUT_METRIC} saves, so step {step} was not saved"
            )
        if len(self._without_metric) == 1 and not self._warned:
            self._warned = True
            warn(text)

    def committed(self, step: int, name: str, metadata: Mapping[str, Any]) -> None:
        """Record a checkpoint that has just been committed. One request.

        Raises RunTakenOverError if another job has taken over the run since the check before the commit. That job may
        have listed an unfinished save here, and may delete the objects of this checkpoint.
        """
        try:
            self.ownership.check()
        except RunTakenOverError as err:
            url = self._spec.child(name).url
            raise RunTakenOverError(f"{err}. {url} was committed but may lack objects: zarrckpt verify {url}") from err
        except StorageError:
            pass  # The checkpoint is committed, and the next save checks again.
        self._greatest = step
        self.ownership.note_commit()
        self.retention.note_commit(name, step, metadata)


class RunSave:
    """The run's part in one save. It implements :class:`zarrckpt._save.request.Run`."""

    def __init__(
        self,
        coordinator: Coordinator,
        step: int,
        name: str,
        metadata: Mapping[str, Any],
        patience: float,
        *,
        check_metric: bool,
    ) -> None:
        """``patience`` is the maximum number of seconds that the save waits for deletions."""
        self._coordinator = coordinator
        self._patience = patience
        self._check_metric = check_metric
        self._step = step
        self._name = name
        self._metadata = metadata

    def wait_for_deletions(self) -> None:
        self._coordinator.retention.wait_for_deletions(self._patience)

    def begin(self) -> str:
        return self._coordinator.begin(self._step, self._name, self._metadata if self._check_metric else None)

    def metadata(self) -> Mapping[str, Any]:
        return self._coordinator.ownership.metadata()

    def check(self) -> None:
        self._coordinator.ownership.check()

    def committed(self) -> None:
        self._coordinator.committed(self._step, self._name, self._metadata)


def _refuse_checkpoint(store: Store, rooted: bool, is_run: bool) -> None:
    """Raise ForeignObjectsError if a run's url is the url of a checkpoint. At most two requests.

    ``rooted`` is true if a root document exists, ``is_run`` if folders of steps or the document of a run exist. A save
    that was begun by mistake in the folder of a run, and did not commit, raises no error.
    """
    if rooted:
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


def _after(name: str, step: int) -> bool:
    own = step_of(name)
    return own is not None and own > step
