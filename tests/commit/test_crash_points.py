"""A crash or a failure at every single operation leaves the old checkpoint, the new one, or none.

Operations on a store (:class:`FaultyStore`) fail on local files, S3 and memory. On local files, so do the system calls
that change the disk.
"""

from __future__ import annotations

import itertools
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from harness.crashes import (
    SAVING,
    Disk,
    Event,
    InLine,
    Place,
    crashed,
    held,
    in_memory,
    needed,
    next_save_is_whole,
    state,
)
from harness.faulty_store import FAIL, FAIL_AFTER, STOP, STOP_AFTER, Call, Fault, FaultyStore, Stopped, at, never
from harness.one_at_a_time import one_thread, running
from harness.s3_server import Served, served

import zarrckpt
from zarrckpt._store import _local, _local_commit

FAULTS = [FAIL, FAIL_AFTER, STOP, STOP_AFTER]
EVERY_FAULT = os.environ.get("ZARRCKPT_CRASHES") == "all"
ROOT, REMOVAL = "zarr.json", "@zarrckpt/removed/zarr.json"


# -- the earlier checkpoint, and the action on it


def _save_on(value: int, overwrite: bool, store: FaultyStore) -> None:
    running.number = value
    zarrckpt.save(state(value), store, overwrite=overwrite, options=SAVING)


def _overwrite_with_reuse(store: FaultyStore) -> None:
    """Replace a checkpoint and reuse its chunks. The base is read without faults."""
    running.number = 2
    report = zarrckpt.save(state(2), store, overwrite=True, base=store._inner, options=SAVING)
    assert report.sent_bytes < report.nbytes


def _crash_at_the_commit(value: int, overwrite: bool, place: Place) -> None:
    """Save, but crash at the put of the root document."""

    def rule(call: Call) -> Fault | None:
        return STOP if call.verb in ("create", "replace") and call.key == ROOT else None

    assert isinstance(crashed(partial(_save_on, value, overwrite, place.faulty(rule))), Stopped)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Run operations in one order, so that a crash leaves the same objects each time."""
    with one_thread():
        yield


@cache
def _nothing() -> dict[str, bytes]:
    return {}


@cache
def _committed() -> dict[str, bytes]:
    place = in_memory()
    place.save(1)
    return place.objects()


@cache
def _committed_for_reuse() -> dict[str, bytes]:
    place = in_memory()
    place.save(1, reuse=True)
    return place.objects()


@cache
def _crashed() -> dict[str, bytes]:
    place = in_memory()
    _crash_at_the_commit(5, False, place)
    return place.objects()


@cache
def _committed_and_crashed() -> dict[str, bytes]:
    place = in_memory().fill(_committed())
    _crash_at_the_commit(5, True, place)
    return place.objects()


@dataclass(frozen=True)
class Case:
    """An action on a base of objects, and the values of the checkpoints before and after it."""

    base: Callable[[], dict[str, bytes]]
    action: Callable[[FaultyStore], object]
    before: int | None
    after: int | None


CASES = {
    "first save": Case(_nothing, partial(_save_on, 2, False), None, 2),
    "overwrite": Case(_committed, partial(_save_on, 2, True), 1, 2),
    "overwrite with reuse": Case(_committed_for_reuse, _overwrite_with_reuse, 1, 2),
    "save after a crashed one": Case(_crashed, partial(_save_on, 2, False), None, 2),
    "overwrite after a crashed one": Case(_committed_and_crashed, partial(_save_on, 2, True), 1, 2),
    "recover": Case(_committed_and_crashed, lambda store: zarrckpt.recover(store, stopped=True), 1, 1),
    "remove": Case(_committed_and_crashed, lambda store: zarrckpt.remove(store), 1, None),
}


# -- places


@pytest.fixture(scope="module")
def s3_server() -> Iterator[Served]:
    with served() as server:
        yield server


@pytest.fixture
def fresh(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Place]:
    """Return a function that makes empty places."""
    if request.param == "local":
        return lambda: Place(str(tmp_path / uuid.uuid4().hex), durable=False)
    options = request.getfixturevalue("s3_server").storage_options
    return lambda: Place(f"s3://crashes/{uuid.uuid4().hex}", storage_options=options)


# -- operations on the store


def _calls(case: Case, place: Place) -> list[Call]:
    """Return the operations of an action without faults."""
    store = place.faulty(never)
    case.action(store)
    assert held(place) == case.after
    return store.calls


def _expected(case: Case, fault: Fault, number: int, commit: int) -> int | None:
    """Return the expected checkpoint after a fault at an operation. ``commit`` is the number of the committing one."""
    done = number > commit or (number == commit and fault in (FAIL_AFTER, STOP_AFTER))
    return case.after if done else case.before


_seen: dict[tuple[str, ...], dict[Any, int | None]] = {}
"""The checkpoints found so far, by keys and root. All other bytes are the same each time."""


def _look(place: Place, kind: tuple[str, ...], removed: bool) -> int | None:
    """Return the checkpoint that opens at a place. Check that the next save or removal succeeds there."""
    stored = place.keys()
    seen, key = _seen.setdefault(kind, {}), (frozenset(stored), ROOT in stored and place.opened().get(ROOT))
    if key not in seen:
        seen[key] = held(place)
        if removed:
            _can_be_removed(place)
        else:
            next_save_is_whole(place)
    return seen[key]


def _can_be_removed(place: Place) -> None:
    """Check that another removal, or ``recover`` after a recorded one, leaves nothing, and that saves
    fail until then.
    """
    stored = place.objects()
    if REMOVAL in stored:
        other = in_memory().fill(stored)
        assert isinstance(crashed(lambda: other.save(9, overwrite=True)), zarrckpt.CheckpointRemovedError)
        assert other.objects() == stored
        zarrckpt.recover(**other.options)
        assert not other.keys()
        next_save_is_whole(other)
    else:
        next_save_is_whole(in_memory().fill(stored))
    crashed(lambda: zarrckpt.remove(**place.options))
    assert not place.keys()
    if stored and isinstance(place.url, str) and "://" not in place.url:
        assert not os.path.exists(place.url)


def _check_point(case: Case, place: Place, number: int, commit: int, fault: Fault, kind: tuple[str, ...]) -> None:
    place.fill(case.base())
    store = place.faulty(at(number, fault))
    error = crashed(partial(case.action, store))
    assert len(store.calls) > number
    # A save does not fail if it cannot read above the url. A removal does not fail if it cannot put its record.
    call = store.calls[number]
    recording = call.key == REMOVAL and call.verb in ("create", "sync")
    passed_over = (call.key.startswith("../") or recording) and fault in (FAIL, FAIL_AFTER)
    expected = case.after if passed_over else _expected(case, fault, number, commit)
    assert _look(place, kind, case.after is None) == expected, (store.calls[number], error)
    if (number < commit and not passed_over) or fault in (STOP, STOP_AFTER):
        assert error is not None, store.calls[number]


def _commit_of(calls: list[Call]) -> int:
    return next((call.number for call in calls if call.key == ROOT and call.verb != "get"), 0)


@pytest.mark.parametrize("name", CASES)
def test_every_fault_at_every_operation_in_memory(name: str) -> None:
    case = CASES[name]
    calls = _calls(case, in_memory().fill(case.base()))
    assert len(calls) > 10
    for number, fault in itertools.product(range(len(calls)), FAULTS):
        _check_point(case, in_memory(), number, _commit_of(calls), fault, ("memory", name))


ELSEWHERE = [("local", name) for name in CASES] + [
    # The others are parts of these.
    ("s3", name)
    for name in CASES
    if EVERY_FAULT or name in ("first save", "overwrite after a crashed one", "remove")
]


@pytest.mark.parametrize(("fresh", "name"), ELSEWHERE, indirect=["fresh"])
def test_a_fault_at_every_operation(fresh: Callable[[], Place], name: str, request: pytest.FixtureRequest) -> None:
    """One fault at each operation, in turn. With ``ZARRCKPT_CRASHES=all`` in the environment, all four at each."""
    case, kind = CASES[name], request.node.callspec.id
    calls = _calls(case, fresh().fill(case.base()))
    for number in range(len(calls)):
        for fault in FAULTS if EVERY_FAULT else [FAULTS[number % len(FAULTS)]]:
            _check_point(case, fresh(), number, _commit_of(calls), fault, (kind, name))


# -- system calls of local files


def _on(disk: Disk, action: Callable[[Place], object], place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run an action on local files whose system calls go through a disk."""
    with monkeypatch.context() as patch:
        patch.setattr(_local, "os", disk)
        patch.setattr(_local_commit, "os", disk)
        action(place)


FILE_ACTIONS: dict[str, Callable[[Place], object]] = {
    "first save": lambda place: place.save(2),
    "overwrite with reuse": lambda place: place.save(2, overwrite=True, reuse=True),
    "overwrite after a crashed one": lambda place: place.save(2, overwrite=True),
    "recover": lambda place: zarrckpt.recover(place.url, stopped=True),
    "remove": lambda place: zarrckpt.remove(place.url),
}


@pytest.mark.parametrize("name", FILE_ACTIONS)
def test_a_crash_at_every_system_call(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_local, "thread_pool", InLine)
    case, action = CASES[name], FILE_ACTIONS[name]

    def fresh() -> Place:
        return Place(str(tmp_path / uuid.uuid4().hex)).fill(case.base())

    whole, place = Disk(), fresh()
    _on(whole, action, place, monkeypatch)
    assert held(place) == case.after and whole.changes > 20
    changes = [event for event in whole.events if event.verb != "fsync"]
    stops = [(number, False) for number in range(len(changes))]
    stops += [(number, True) for number, event in enumerate(changes) if event.verb == "write"]
    seen = []
    for number, half in stops:
        disk, place = Disk(number, half=half), fresh()
        assert isinstance(crashed(partial(_on, disk, action, place, monkeypatch)), Stopped)
        assert disk.changes == number and disk.stopped
        seen.append(held(place))
        assert seen[-1] in (case.before, case.after), changes[number]
        if name == "remove":
            _can_be_removed(place)
        else:
            next_save_is_whole(replace(place, durable=False))
        shutil.rmtree(place.url, ignore_errors=True)
    in_order = seen[: len(changes)]
    assert in_order == sorted(in_order, key=lambda value: value == case.after)


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place(str(tmp_path / "one"))
    _on(Disk(short=True), lambda place: place.save(1), place, monkeypatch)
    _on(Disk(short=True), lambda place: place.save(2, overwrite=True), place, monkeypatch)
    assert held(place) == 2


# -- durability


class Durable:
    """The system calls of a save, and the order of its syncs."""

    def __init__(self, events: list[Event], url: str) -> None:
        self.events, self.url = events, url

    def appeared(self, key: str) -> int:
        """Return the event at which a file got its name. A file in no attempt's tree was complete then."""
        verbs = ("link", "replace", "open")
        return self._last(lambda event: event.verb in verbs and event.path == f"{self.url}/{key}")

    def is_durable(self, key: str, when: int) -> bool:
        """Whether a file's bytes, its name, and the names of its folders were synced by then."""
        path = f"{self.url}/{key}"
        named = self.appeared(key)
        temp = self.events[named].source
        if temp:
            written = self._last(lambda event: event.verb == "write" and event.path == temp, before=named)
            synced = self._synced(temp, written, when) or self._synced(path, named, when)
        else:
            written = self._last(lambda event: event.verb == "write" and event.path == path, before=when)
            synced = self._synced(path, written, when)
        return synced and self.is_named(key, when)

    def is_named(self, key: str, when: int) -> bool:
        """Whether its name was synced by then."""
        path, named = f"{self.url}/{key}", self.appeared(key)
        while named >= 0:
            path = os.path.dirname(path)
            if not self._synced(path, named, when):
                return False
            # Folders that existed before have synced names.
            named = self._made(path)
        return True

    def _made(self, folder: str) -> int:
        return self._last(lambda event: event.verb == "mkdir" and event.path == folder)

    def _synced(self, path: str, after: int, before: int) -> bool:
        return any(event == Event("fsync", path) for event in self.events[after + 1 : before])

    def _last(self, wanted: Callable[[Event], bool], before: int | None = None) -> int:
        """Return the index of the last such event, -1 if there is none."""
        found = [number for number, event in enumerate(self.events[:before]) if wanted(event)]
        return found[-1] if found else -1


@pytest.mark.parametrize(("overwrite", "reuse"), [(False, False), (True, False), (True, True)])
def test_files_are_synced_in_the_documented_order(
    overwrite: bool, reuse: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in ``docs/explanation/commit.md``: a power cut at any time leaves a whole checkpoint."""
    place = Place(str(tmp_path / "new" / "folder" / "one"))
    if overwrite:
        replace(place, durable=False).save(1, reuse=reuse)
    disk = Disk()
    _on(disk, lambda place: place.save(2, overwrite=overwrite, reuse=reuse), place, monkeypatch)
    keys, save_id = needed(place), zarrckpt.open(place.url).save_id
    linked = {event.path for event in disk.events if event.verb == "link" and "/c." in event.path}
    assert linked == ({f"{place.url}/@{save_id}/deep/b/c.0"} if reuse else set())
    order = Durable(disk.events, place.url)
    marker, commit = f"@zarrckpt/{save_id}/{ROOT}", order.appeared(ROOT)
    # The lists of the save's files, before the first of the files.
    lists = {marker} if overwrite else {marker, "@zarrckpt/zarr.json"}
    tree_document = {key for key in keys if overwrite and key == f"@{save_id}/{ROOT}"}
    rest = keys - lists - tree_document - {ROOT, "@zarrckpt/zarr.json"}
    first = min(order.appeared(key) for key in rest)
    assert len(rest) > 10 and first > 0
    for key in lists | tree_document:
        assert order.is_durable(key, first), key
    # Everything, before the root appears.
    for key in rest:
        assert first <= order.appeared(key) < commit and order.is_durable(key, commit), key
    source = disk.events[commit].source
    assert Event("fsync", source) in disk.events[:commit]
    # The root, before any file of the old checkpoint is deleted.
    deleted = [number for number, event in enumerate(disk.events) if event.verb == "unlink" and number > commit]
    gone = [number for number in deleted if ".zarrckpt-" not in disk.events[number].path]
    assert bool(gone) == overwrite
    assert order.is_named(ROOT, gone[0] if gone else len(disk.events))


def test_without_durable_chunks_are_not_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, disk = Place(str(tmp_path / "one"), durable=False), Disk()
    _on(disk, lambda place: place.save(2), place, monkeypatch)
    synced = {os.path.relpath(event.path, tmp_path) for event in disk.events if event.verb == "fsync"}
    assert held(place) == 2 and not any(os.path.basename(path).startswith("c.") for path in synced)
