"""What only the coordinator of a run does: look, take the run, refuse steps, remove later ones. No torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from zarrckpt._commit import protocol
from zarrckpt._commit.listings import RUN_KEY, list_below
from zarrckpt._commit.marker import CLAIM_KEY, pin_key
from zarrckpt._commit.pins import put_pin
from zarrckpt._commit.protocol import Below
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
from zarrckpt._ops.recover import remove_found
from zarrckpt._runs.keep import Keep
from zarrckpt._runs.record import Ownership, RunRecord
from zarrckpt._runs.retention import Retention
from zarrckpt._runs.steps import Found, WithoutRoot, newest_first, passed_over, step_of
from zarrckpt._store import Store, StoreSpec

_FIRST_SAVES = 5
"""From so many saves with other metrics on, a save without that of the rules is refused."""


@record
@dataclass(frozen=True)
class Chosen:
    """What the ranks restore."""

    name: str
    """The folder of the checkpoint; "" for none, and for one of another run."""
    step: int | None
    damaged: tuple[str, ...]
    """The folders of damaged checkpoints: a save to one of them replaces it."""
    from_source: bool = False
    """Whether it is the checkpoint of another run that this one begins from."""
    others: bool = False
    """Whether another folder has the same step: its name has another number of zeros."""

    def __post_init__(self) -> None:
        if self.name and step_of(self.name) is None:
            raise ValueError(f"no folder of a step: {self.name!r:.100}")


class Coordinator:
    """A run as its coordinator sees it. One thread at a time; the clean-up has its own."""

    def __init__(self, spec: StoreSpec, keep: Keep | None, source: StoreSpec) -> None:
        """``source``: the checkpoint that the run begins from, or how to reach one."""
        self._spec = spec
        self._keep = keep
        self._source = source
        self.ownership = Ownership(spec.open(), keep)
        self.retention = Retention(spec, keep, self.ownership, self._release_source)
        self._released = False
        """Whether this job has removed the pin of the checkpoint that the run began from."""
        self._metric_is_known = False
        """Whether a checkpoint has the metric of the rules."""
        self._without_metric: set[int] = set()
        """The steps of saves whose metrics lacked it."""
        self._warned = False
        self._greatest = -1
        """The step of the newest sound checkpoint: no save may have this step, or an earlier one."""

    # -- to restore

    def choose(
        self,
        step: int | None,
        rewind: bool,
        unreadable: frozenset[str],
        timeout: float,
        progressed: Callable[[], None],
    ) -> Chosen:
        """The checkpoint to restore: that of a step, or the newest sound one; and take the run.

        ``unreadable`` are folders whose checkpoints are known to be damaged. Deletions under way are waited for, at
        most ``timeout`` seconds: they could be of what is chosen. ``progressed`` is called for each checkpoint that is
        removed. Costs the pages of one listing and three requests, where the newest is sound and no step is asked for.
        """
        self.retention.settle(timeout)
        names = self._folders()
        newest, damaged = self._newest(names, unreadable)
        chosen = newest if step is None else self._of_step(step, names, unreadable)
        known = self.ownership.look()
        if chosen is None:
            self._refuse_to_begin_anew(known, damaged)
        try:
            self._take(known, chosen, names, newest)
        except StorageError as err:
            if rewind:
                raise
            warn(
                f"the run {self._spec.url} cannot be taken over by this job: it reads checkpoints, and saves will fail "
                f"as long as that is so: {err}"
            )
        if rewind and chosen is not None:
            self._remove_after(chosen, names, progressed)
        elif chosen is not None and chosen.step < self._greatest:
            warn(
                f"the run {self._spec.url} goes on from step {chosen.step}, and has step {self._greatest}: saves up to "
                "that are refused. restore(..., rewind=True) removes the later ones"
            )
        if chosen is not None:
            others = any(step_of(name) == chosen.step and name not in {chosen.name, *unreadable} for name in names)
            return Chosen(chosen.name, chosen.step, tuple(below.name for below in damaged), others=others)
        return Chosen("", self._hold_source(), (), from_source=True) if self._source.url else Chosen("", None, ())

    def _folders(self) -> list[str]:
        """The folders of steps, in their order. The pages of one listing, and a few requests if there is no run yet.

        Raises ForeignObjectsError for the url of a checkpoint, or of a part of one.
        """
        store = self._spec.open()
        listed = list_below(store)
        names = [name for name in listed.folders if step_of(name) is not None]
        if listed.has_root or listed.has_save:
            _refuse_checkpoint(store, listed.has_root, bool(names) or listed.is_run)
        if not names and not listed.is_run:
            protocol.refuse_inside(store)
        if listed.folders and not names:
            shown = ", ".join(map(repr, listed.folders[:3]))
            warn(f"{self._spec.url} holds no folder of a step, such as 'step-100', but {shown}: nothing is restored")
        return sorted(names, key=lambda name: (step_of(name), name))

    def _newest(self, names: list[str], unreadable: frozenset[str]) -> tuple[Found | None, list[Below]]:
        """The newest sound checkpoint, and the damaged ones after it, which are warned of, and are not deleted."""
        store = self._spec.open()
        damage = CorruptCheckpointError("its data are damaged")
        damaged = [Below(name, damage=damage) for name in sorted(unreadable, reverse=True)]
        try:
            return self._first_sound(store, names, unreadable, damaged), damaged
        finally:
            self.retention.spare(below.name for below in damaged)

    def _first_sound(
        self, store: Store, names: list[str], unreadable: frozenset[str], damaged: list[Below]
    ) -> Found | None:
        for below in newest_first(store, [name for name in names if name not in unreadable]):
            step = step_of(below.name)
            assert step is not None
            if isinstance(below.damage, UnsupportedFormatError):
                raise below.damage
            if below.root is not None:
                return Found(step, below.name, below.root)
            damaged.append(below)
            warn(passed_over(store, below))
        return None

    def _refuse_to_begin_anew(self, known: RunRecord | None, damaged: list[Below]) -> None:
        """Raise unless nothing was ever committed in the run, as far as its record and its folders show.

        A save of the run may have been killed right before its commit, and then it is no checkpoint.
        """
        if damaged and not (
            known is not None
            and not known.committed
            and all(isinstance(below, WithoutRoot) and below.run == known.run for below in damaged)
        ):
            shown = ", ".join(below.name for below in damaged)
            url = self._spec.child(damaged[0].name).url
            raise CorruptCheckpointError(
                f"every checkpoint of the run {self._spec.url} is damaged ({shown}); the newest: {damaged[0].damage}. "
                f"See what is: zarrckpt verify {url}. To begin anew: use another url, or remove them: zarrckpt rm {url}"
            )
        if known is not None and known.committed and not damaged:
            raise CheckpointNotFoundError(
                f"the run {self._spec.url} has no checkpoint any more, and its document {RUN_KEY} records that one was "
                "committed. Check the path and the storage. To begin anew: use another url, or delete the document"
            )

    def _of_step(self, step: int, names: list[str], unreadable: frozenset[str]) -> Found:
        store, damage, unfinished = self._spec.open(), None, ""
        for below in newest_first(store, [name for name in names if step_of(name) == step and name not in unreadable]):
            if below.root is not None:
                return Found(step, below.name, below.root)
            if isinstance(below, WithoutRoot):
                unfinished = f"; {below.damage}"
            else:
                damage = damage or below.damage
        if damage is not None:
            raise damage
        known = ", ".join(str(step_of(name)) for name in names[-8:])
        there = f"the last steps that were begun there: {known}" if known else "no step is there"
        raise CheckpointNotFoundError(f"the run {self._spec.url} has no checkpoint of step {step}; {there}{unfinished}")

    def _take(self, known: RunRecord | None, chosen: Found | None, names: list[str], newest: Found | None) -> None:
        self._greatest = -1 if newest is None else newest.step
        if self.ownership.taken:
            return
        inherited = "" if chosen is None else run_of(chosen.root.metadata)
        source = self._source.url
        self.ownership.take(known, inherited, source, begins=chosen is None, committed=newest is not None)
        self.retention.found(names)

    def _remove_after(self, chosen: Found, names: list[str], progressed: Callable[[], None]) -> None:
        """Remove all checkpoints of later steps, the last one first.

        Unfinished saves stay: this job has taken the run, so those of the run fail at their commit. Their leftovers are
        deleted after the commit of a later step. The one of anybody else is refused.
        """
        later = [self._spec.child(name) for name in names if _after(name, chosen.step)]
        found = [(spec, protocol.leftovers(spec.open(), damaged=True)) for spec in later]
        run = self.ownership.record.run
        for spec, left in found:
            protocol.refuse_pinned(spec.open())
            if left.root is not None:
                foreign = run_of(left.root.metadata) != run
            else:
                foreign = left.root_bytes is not None and any(marker.run != run for marker in left.markers)
            if foreign:
                raise ForeignObjectsError(
                    f"{spec.url} is a later checkpoint, but not of the run {run} that goes back to step {chosen.step}. "
                    f"Nothing was removed: remove it, if it is not needed: zarrckpt rm {spec.url}"
                )
            others = [marker for marker in left.others if left.may_commit(marker) and marker.run != run]
            if others:
                raise ForeignObjectsError(
                    f"the run {self._spec.url} cannot go back to step {chosen.step}: the save {others[0].save_id} of "
                    f"a later step, begun {others[0].started} at {spec.url}, is not of the run {run} and may still "
                    "commit. Nothing was removed: wait for it, or, if no save there is running: "
                    f"zarrckpt recover {spec.url} --stopped"
                )
        for spec, left in reversed(found):
            progressed()
            if left.root_bytes is not None or left.removal:
                remove_found(spec.open(), left)
                self.retention.gone(spec.url.rpartition("/")[2])
        self._greatest = chosen.step

    # -- the checkpoint of another run that this one begins from

    def _hold_source(self) -> int | None:
        """Pin the checkpoint that the run begins from; return its step, as far as it is known."""
        place = self._source.open()
        root = protocol.load_root(place)
        try:
            if self.ownership.taken:
                put_pin(place, root, self.ownership.record.pin, f"the run {self._spec.url} begins from it")
        except StorageError as err:
            warn(f"{place.url} cannot be pinned, and may be removed before {self._spec.url} has a checkpoint: {err}")
        step = root.metadata.get("step", protocol.number_in(place.url))
        return step if type(step) is int else None

    def _release_source(self) -> None:
        """Unpin it, unless an earlier job has done so. Three requests.

        Only what this job's own ``init_from`` names is opened, never a url from the run's document.
        """
        if self._released or not self.ownership.record.pin:
            return
        self._source.open().delete([pin_key(self.ownership.record.pin)])
        self._released = True
        self.ownership.forget_source()

    # -- to save

    def begin(self, step: int, name: str, metric_names: Collection[str] | None) -> str:
        """Refuse a save that may not be made; return the run's id. Three requests for the first save, then one.

        ``metric_names`` are compared with the metric of the rules; None: they are not.
        """
        if self.ownership.taken:
            self.ownership.check()
        else:
            names = self._folders()
            newest, _ = self._newest(names, frozenset())
            self._take(self.ownership.look(), newest, names, newest)
        if step <= self._greatest:
            raise CheckpointExistsError(
                f"the run {self._spec.url} has a checkpoint of step {self._greatest}, so step {step} is not saved. To "
                "go on from an earlier step: restore(state, step=..., rewind=True); for a new run: another url"
            )
        if metric_names is not None:
            self._check_metric(step, metric_names)
        self.retention.begun(name, step)
        return self.ownership.record.run

    def _check_metric(self, step: int, names: Collection[str]) -> None:
        """Warn once of metrics without that of the rules; refuse the save if no checkpoint has it after some saves."""
        if self._keep is None or not self._keep.best or self._metric_is_known:
            return
        metric = self._keep.metric or ""
        if metric in names or self.retention.knows_metric(metric):
            self._metric_is_known = True
            return
        given = ", ".join(map(repr, sorted({*names} - {"step"})[:8]))
        text = (
            f"the run {self._spec.url} keeps the best by the metric {metric!r}, and the save of step {step} has only "
            f"{given}. Pass {metric!r} in metrics, as None if it is not known yet, or name another one in Keep(metric=)"
        )
        self._without_metric.add(step)
        if len(self._without_metric) >= _FIRST_SAVES:
            raise CheckpointError(f"{text}. None of the first {_FIRST_SAVES} saves has it: nothing was saved")
        if len(self._without_metric) == 1 and not self._warned:
            self._warned = True
            warn(text)

    def committed(self, step: int, name: str, metadata: Mapping[str, Any]) -> None:
        """Count a checkpoint that was committed just now. One request.

        Raises RunTakenOverError if another job has taken the run since the look before the commit: it may have seen
        no checkpoint, and delete the objects of this one.
        """
        try:
            self.ownership.check()
        except RunTakenOverError as err:
            url = self._spec.child(name).url
            raise RunTakenOverError(f"{err}. {url} was committed, and may lack objects: zarrckpt verify {url}") from err
        except StorageError:
            pass  # it is committed, and the next save looks again
        self._greatest = step
        self.ownership.note_commit()
        self.retention.committed(name, step, metadata)


class RunSave:
    """One save of a run, as the steps of a save use it."""

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
        """``patience``: how many seconds it waits for deletions at most."""
        self._coordinator = coordinator
        self._patience = patience
        self._check_metric = check_metric
        self._step = step
        self._name = name
        self._metadata = metadata

    def wait_for_room(self) -> None:
        self._coordinator.retention.wait_for_room(self._patience)

    def begin(self) -> str:
        return self._coordinator.begin(self._step, self._name, self._metadata if self._check_metric else None)

    def metadata(self) -> Mapping[str, Any]:
        return self._coordinator.ownership.metadata()

    def check(self) -> None:
        self._coordinator.ownership.check()

    def committed(self) -> None:
        self._coordinator.committed(self._step, self._name, self._metadata)


def _refuse_checkpoint(store: Store, rooted: bool, is_run: bool) -> None:
    """Raise ForeignObjectsError if a run's url is that of a checkpoint. One request at most.

    ``rooted``: a root document is there; ``is_run``: so are folders of steps, or the document of a run. A save that was
    begun by mistake in the folder of a run, and did not commit, is no obstacle.
    """
    if rooted:
        try:
            protocol.read_root(store)
        except ForeignObjectsError:
            # Beside a run, somebody's document of a group; else a checkpoint whose root another program replaced.
            if is_run or not protocol.is_stored(store, CLAIM_KEY):
                return
        except (CorruptCheckpointError, UnsupportedFormatError):
            pass
        what = "is a checkpoint"
    elif is_run:
        return
    else:
        what = "is where a save was begun"
    raise ForeignObjectsError(
        f"{store.url} {what}, and not the folder of a run: expected a folder that holds checkpoints, such as "
        f"{join(store.url, 'step-100')}. Nothing was changed; pass the folder above it, or a new one"
    )


def _after(name: str, step: int) -> bool:
    own = step_of(name)
    return own is not None and own > step
