"""The commit protocol under any interleaving of saves and readers, with crashes, repeated requests and lost answers.

``python tests/harness/interleaving.py`` explores more.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from harness.interleaving import Faults, explore, nothing_quiet, play_many
from harness.interleaving_reuse import CHANGES, Code, explore_reuse, play_reuse, save_again
from harness.one_at_a_time import Save, committed_first, one_thread


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


def _reversed(jobs: list[Any]) -> list[Any]:
    return jobs[::-1]


def test_two_first_saves_in_every_interleaving() -> None:
    """Also of the requests that a save makes at the same time, in either order."""
    for order in (list, _reversed):
        found = explore([Save(1), Save(2)], {}, order=order)
        assert found.complete and found.states > 10_000 and found.ends > 300
        assert found.outcomes == {("won", "lost"), ("lost", "won"), ("won", "won")}


def test_two_overwrites_in_every_interleaving() -> None:
    found = explore([Save(1), Save(2)], committed_first())
    assert found.complete and found.states > 20_000 and found.ends > 500
    assert found.outcomes == {("won", "lost"), ("lost", "won"), ("won", "won")}


@pytest.mark.parametrize("over", ["nothing", "a committed save"])
def test_three_saves_in_many_interleavings(over: str) -> None:
    base = {} if over == "nothing" else committed_first()
    found = explore([Save(1), Save(2), Save(3)], base, interruptions=1, order=_reversed)
    assert found.complete and found.states > 3_000
    assert {("won", "lost", "won"), ("lost", "won", "won"), ("won", "won", "won")} <= found.outcomes


@pytest.mark.parametrize("over", ["nothing", "a committed save"])
def test_two_saves_with_failed_lost_and_repeated_requests(over: str) -> None:
    base, faults = {}, Faults(lost_answers=1, repeated_deletes=1, failures=1)
    if over != "nothing":
        base, faults = committed_first(), Faults(failures=1)
    found = explore([Save(1), Save(2)], base, interruptions=1, faults=faults)
    assert found.complete and found.states > 3_000
    assert {("failed", "won"), ("won", "failed")} <= found.outcomes


def test_puts_of_chunks_may_arrive_again_at_any_time() -> None:
    # An object that arrives after its save's marker is gone can only be removed by hand. So no next save is tried.
    faults = Faults(repeated_puts=1)
    found = explore([Save(1), Save(2)], committed_first(), interruptions=1, faults=faults, sampled=0)
    assert found.complete and found.states > 3_000


def test_readers_during_an_overwrite() -> None:
    found = explore([Save(1)], committed_first(), readers=2, quiet=nothing_quiet)
    ends = {end for outcome in found.outcomes for end in outcome[1:]}
    assert found.complete and ends == {"read 0", "read 1", "replaced"}
    found = explore([Save(1), Save(2)], committed_first(), readers=1, interruptions=2)
    ends = {outcome[-1] for outcome in found.outcomes}
    assert found.complete and ends == {"read 0", "read 1", "read 2", "replaced"}


def test_whole_saves_in_random_schedules() -> None:
    played = play_many(range(120))
    assert played.schedules == 120 and played.operations > 6_000
    assert {"won", "lost", "dead", "failed", "nothing", "replaced", "read 0"} <= played.ends.keys()


@pytest.mark.parametrize("changes", CHANGES, ids=lambda changes: " ".join(change.__name__ for change in changes))
def test_a_base_changes_in_every_interleaving_with_its_reuse(changes: tuple[Code, ...]) -> None:
    found = explore_reuse(changes, most=12_000)
    assert found.states >= 1_500 and found.complete == (len(changes) == 1)
    assert {outcome[0] for outcome in found.outcomes} == {"saved"}


def test_reuse_with_failed_and_lost_requests() -> None:
    found = explore_reuse((save_again,), faults=Faults(lost_answers=1, failures=1), most=12_000)
    assert {outcome[0] for outcome in found.outcomes} <= {"saved", "failed", "incomplete"}


def test_reuse_in_random_schedules() -> None:
    played = play_reuse(range(100))
    assert played.schedules == 100 and played.operations > 4_000
    assert {"saved", "dead", "failed", "removed", "saved again", "pinned", "overwritten"} <= played.ends.keys()
