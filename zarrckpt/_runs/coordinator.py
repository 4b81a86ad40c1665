"""What only the coordinator of a run does: look, take the run, refuse steps, remove later ones. No torch."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from zarrckpt._commit import protocol
from zarrckpt._commit.listings import list_folders
from zarrckpt._commit.marker import pin_key
from zarrckpt._commit.pins import put_pin
from zarrckpt._errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    ForeignObjectsError,
    StorageError,
    UnsupportedFormatError,
    warn,
)
from zarrckpt._format.metadata import run_of
from zarrckpt._ops.recover import remove_found
from zarrckpt._runs.keep import Keep
from zarrckpt._runs.record import Ownership
from zarrckpt._runs.retention import Retention
from zarrckpt._runs.steps import Found, newest_first, passed_over, step_of
from zarrckpt._store import StoreSpec


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
        self.retention.spare(damaged)
        chosen = newest if step is None else self._of_step(step, names)
        if chosen is None and damaged:
            raise CorruptCheckpointError(
                f"every checkpoint of the run {self._spec.url} is damaged ({', '.join(damaged)}): see "
                f"what is: zarrckpt verify {self._spec.child(names[-1]).url}"
            )
        self._take(chosen, names, newest)
        if rewind and chosen is not None:
            self._remove_after(chosen, names, progressed)
        elif chosen is not None and chosen.step < self._greatest:
            warn(
                f"the run {self._spec.url} goes on from step {chosen.step}, and has step {self._greatest}: saves up to "
                "that are refused. restore(..., rewind=True) removes the later ones"
            )
        if chosen is not None:
            return Chosen(chosen.name, chosen.step, tuple(damaged))
        return Chosen("", self._hold_source(), (), from_source=True) if self._source.url else Chosen("", None, ())

    def _folders(self) -> list[str]:
        """The folders of steps, in their order. The pages of one listing."""
        folders = [name for name in list_folders(self._spec.open()) if not name.startswith("@")]
        names = [name for name in folders if step_of(name) is not None]
        if folders and not names:
            shown = ", ".join(map(repr, folders[:3]))
            warn(f"{self._spec.url} holds no folder of a step, such as 'step-100', but {shown}: nothing is restored")
        return sorted(names, key=lambda name: (step_of(name), name))

    def _newest(self, names: list[str], unreadable: frozenset[str]) -> tuple[Found | None, list[str]]:
        """The newest sound checkpoint, and the folders of the damaged ones after it, which are warned of."""
        store = self._spec.open()
        damaged = sorted(unreadable)
        for below in newest_first(store, [name for name in names if name not in unreadable]):
            step = step_of(below.name)
            assert step is not None
            if isinstance(below.damage, UnsupportedFormatError):
                raise below.damage
            if below.root is not None:
                return Found(step, below.name, below.root), damaged
            damaged.append(below.name)
            warn(passed_over(store, below))
        return None, damaged

    def _of_step(self, step: int, names: list[str]) -> Found:
        for below in newest_first(self._spec.open(), [name for name in names if step_of(name) == step]):
            if below.damage is not None:
                raise below.damage
            assert below.root is not None
            return Found(step, below.name, below.root)
        known = ", ".join(str(step_of(name)) for name in names[-8:])
        there = f"the last steps that were begun there: {known}" if known else "no step is there"
        raise CheckpointNotFoundError(f"the run {self._spec.url} has no checkpoint of step {step}; {there}")

    def _take(self, chosen: Found | None, names: list[str], newest: Found | None) -> None:
        self._greatest = -1 if newest is None else newest.step
        if self.ownership.taken:
            self.ownership.check()
            return
        source = self._source.url if chosen is None else ""
        self.ownership.take("" if chosen is None else run_of(chosen.root.metadata), source)
        # Without rules only what a save has left is deleted: that is newer than what it was to follow.
        self.retention.found(names if self._keep else [name for name in names if _after(name, self._greatest)])

    def _remove_after(self, chosen: Found, names: list[str], progressed: Callable[[], None]) -> None:
        """Remove all checkpoints of later steps, and what saves of later steps left: the last one first."""
        later = [self._spec.child(name) for name in names if _after(name, chosen.step)]
        found = [(spec, protocol.leftovers(spec.open(), damaged=True)) for spec in later]
        run = self.ownership.record.run
        for spec, left in found:
            protocol.refuse_pinned(spec.open())
            if left.root is not None and run_of(left.root.metadata) != run:
                raise ForeignObjectsError(
                    f"{spec.url} is a later checkpoint, but not of the run {run} that goes back to step {chosen.step}. "
                    f"Nothing was removed: remove it, if it is not needed: zarrckpt rm {spec.url}"
                )
        for spec, left in reversed(found):
            progressed()
            if left.begun:
                remove_found(spec.open(), left)
            self.retention.gone(spec.url.rpartition("/")[2])
        self._greatest = chosen.step

    # -- the checkpoint of another run that this one begins from

    def _hold_source(self) -> int | None:
        """Pin the checkpoint that the run begins from; return its step, as far as it is known."""
        place = self._source.open()
        root = protocol.load_root(place)
        try:
            put_pin(place, root, self._source_pin(), f"the run {self._spec.url} begins from it")
        except StorageError as err:
            warn(f"{place.url} cannot be pinned, and may be removed before {self._spec.url} has a checkpoint: {err}")
        step = root.metadata.get("step", protocol.number_in(place.url))
        return step if type(step) is int else None

    def _source_pin(self) -> str:
        return pin_id_of(self.ownership.record.run)

    def _release_source(self) -> None:
        """Unpin it, once in each job, since the one before may have ended in between. One request."""
        url = self.ownership.record.source
        if self._released or not url:
            return
        spec = self._source if self._source.url == url else self._source.at(url)
        spec.open().delete([pin_key(self._source_pin())])
        self._released = True

    # -- to save

    def begin(self, step: int, name: str) -> str:
        """Refuse a save that may not be made; return the run's id. Three requests for the first save, then one."""
        if self.ownership.taken:
            self.ownership.check()
        else:
            names = self._folders()
            newest, _ = self._newest(names, frozenset())
            self._take(newest, names, newest)
        if step <= self._greatest:
            raise CheckpointExistsError(
                f"the run {self._spec.url} has a checkpoint of step {self._greatest}, so step {step} is not saved. To "
                "go on from an earlier step: restore(state, step=..., rewind=True); for a new run: another url"
            )
        self.retention.begun(name, step)
        return self.ownership.record.run

    def committed(self, step: int, name: str, metadata: Mapping[str, Any]) -> None:
        self._greatest = step
        self.retention.committed(name, step, metadata)


class RunSave:
    """One save of a run, as the steps of a save use it."""

    def __init__(self, coordinator: Coordinator, step: int, name: str, metadata: Mapping[str, Any]) -> None:
        self._coordinator = coordinator
        self._step = step
        self._name = name
        self._metadata = metadata

    def begin(self) -> str:
        return self._coordinator.begin(self._step, self._name)

    def metadata(self) -> Mapping[str, Any]:
        return self._coordinator.ownership.metadata()

    def check(self) -> None:
        self._coordinator.ownership.check()

    def committed(self) -> None:
        self._coordinator.committed(self._step, self._name, self._metadata)


def pin_id_of(who: str) -> str:
    """The id of the pin that somebody puts once on a checkpoint: the same at every call, in every process."""
    return hashlib.sha256(f"zarrckpt {who}".encode()).hexdigest()[:32]


def _after(name: str, step: int) -> bool:
    own = step_of(name)
    return own is not None and own > step
