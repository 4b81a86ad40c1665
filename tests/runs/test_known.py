"""The decisions about expired checkpoints, in every order of events: without a store, threads or time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from zarrckpt import Keep
from zarrckpt._runs.known import Deletion, KnownCheckpoints

LOSSES = st.none() | st.integers(0, 3)
RULES = st.builds(
    Keep, newest=st.integers(1, 3), best=st.integers(0, 2), metric=st.just("loss"), every_steps=st.none() | st.just(3)
)


class Folder(RuleBasedStateMachine):
    """A run's folder, in which checkpoints are committed, pinned, damaged and deleted. Steps are names."""

    def __init__(self) -> None:
        super().__init__()
        self.committed: dict[int, Mapping[str, Any]] = {}
        self.begun: set[int] = set()
        self.pinned: set[int] = set()
        self.failing: set[int] = set()
        self.damaged: set[int] = set()
        self.step = 0
        self.deletions = 0
        self.keep: Keep | None = None
        self.known = KnownCheckpoints(None)

    @initialize(keep=RULES)
    def begin_run(self, keep: Keep) -> None:
        self.begin_job(keep)

    @rule(keep=RULES | st.none())
    def begin_job(self, keep: Keep | None) -> None:
        self.keep, self.known = keep, KnownCheckpoints(keep)
        self.known.note_damaged(map(str, self.damaged))
        self.known.note_folders(map(str, [*self.committed, *self.begun]))

    @rule(loss=LOSSES, ends=st.booleans())
    def save(self, loss: int | None, ends: bool) -> None:
        self.step += 1
        self.known.note_begin(str(self.step), self.step)
        if not ends:
            self.begun.add(self.step)
            return
        self.committed[self.step] = {"step": self.step, "loss": loss}
        self.known.note_commit(str(self.step), self.step, self.committed[self.step])
        self.delete()

    @precondition(lambda self: self.committed)
    @rule(data=st.data(), kind=st.sampled_from(["pinned", "failing", "damaged"]))
    def change(self, data: st.DataObject, kind: str) -> None:
        step = data.draw(st.sampled_from(sorted(self.committed)))
        getattr(self, kind).symmetric_difference_update({step} - (self.damaged if kind == "damaged" else set()))
        if kind == "damaged":
            self.known.note_damaged([str(step)])

    def kept(self) -> set[int]:
        sound = {step: metadata for step, metadata in self.committed.items() if step not in self.damaged}
        return {*sound} if self.keep is None else {*self.keep.reasons(sound)}

    def delete(self) -> None:
        """Do what the thread does after a commit."""
        self.deletions = 0
        self.known.begin_series()
        while True:
            if (name := self.known.take_expired()) is not None:
                self.try_delete(int(name))
            elif names := self.known.take_unread():
                for name in names:
                    self.known.note_read(name)
                    if int(name) in self.begun:
                        self.known.note_begin(name, int(name))
                    elif int(name) not in self.damaged:
                        self.known.note_found(name, int(name), self.committed[int(name)])
            else:
                break
        while (name := self.known.take_blocked()) is not None and self.try_delete(int(name)):
            pass
        left = {*self.committed} - self.kept() - self.damaged | {step for step in self.begun if step < self.step}
        assert self.failing & left or left <= self.pinned

    def try_delete(self, step: int) -> bool:
        assert step not in self.kept() | self.damaged and step < max(self.committed)
        result = Deletion.PINNED if step in self.pinned else Deletion.SETTLED
        result = Deletion.FAILED if step in self.failing else result
        if result is Deletion.SETTLED:
            self.committed.pop(step, None)
            self.begun.discard(step)
            self.known.forget(str(step))
        self.known.note_deletion(str(step), result)
        self.deletions += result is Deletion.SETTLED
        assert self.known.needs_no_wait() or self.deletions < 3
        return result is not Deletion.FAILED

    @invariant()
    def a_save_may_begin_after_deletions(self) -> None:
        assert self.known.needs_no_wait() or self.failing


Folder.TestCase.settings = settings(max_examples=100, stateful_step_count=30)
test_expired_checkpoints_go_and_kept_ones_stay = Folder.TestCase
