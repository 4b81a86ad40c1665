"""A crash or a failure at any step leaves the old archive, the new one, or none, and nothing else for long."""

from __future__ import annotations

import dataclasses
import os
import shutil
import uuid
import zipfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from harness.crashes import SAVING, Disk, Event, InLine, Place, all_files, crashed, held, state
from harness.faulty_store import FAIL, FAIL_AFTER, STOP, Call, Fault, FaultyStore, Stopped, at
from harness.internals import open_store
from harness.one_at_a_time import one_thread, running

import zarrckpt
from zarrckpt._store import _local, _local_commit, _zip_local
from zarrckpt._store._archive import ArchivePart
from zarrckpt._store._archive import Place as EntryPlace

EVERY_FAULT = os.environ.get("ZARRCKPT_CRASHES") == "all"
NAME = "x.zarr.zip"
Files = dict[str, bytes]
"""The files of a folder, by path."""


def _save(place: Place, value: int, overwrite: bool = False) -> None:
    """Save a state with chunks of known sizes, and with a blob and compressed chunks, which need scratch files."""
    running.number = value
    place.save(value, overwrite=overwrite)


def _crash(place: Place, value: int, overwrite: bool) -> None:
    """Save, but crash between the archive's last byte and its name."""
    store = place.faulty(lambda call: STOP if call.verb in ("create", "replace") and call.key == "zarr.json" else None)
    running.number = value
    save = partial(zarrckpt.save, state(value), store, overwrite=overwrite, options=SAVING)
    assert isinstance(crashed(save), Stopped)


BEFORE: dict[str, Callable[[Place], object]] = {
    "nothing": lambda place: None,
    "committed": lambda place: _save(place, 1),
    "crashed": lambda place: _crash(place, 5, False),
    "committed and crashed": lambda place: (_save(place, 1), _crash(place, 5, True)),
}
ACTIONS: dict[str, tuple[str, Callable[[Place], object], int | None, int | None]] = {
    "first save": ("nothing", lambda place: _save(place, 2), None, 2),
    "save after a crashed one": ("crashed", lambda place: _save(place, 2), None, 2),
    "overwrite": ("committed", lambda place: _save(place, 2, True), 1, 2),
    "overwrite after a crashed one": ("committed and crashed", lambda place: _save(place, 2, True), 1, 2),
    "recover": ("committed and crashed", lambda place: zarrckpt.recover(place.url, stopped=True), 1, 1),
    "remove": ("committed and crashed", lambda place: zarrckpt.remove(place.url), 1, None),
}
"""By name: the state before, the action, and the values of the checkpoints before and after it."""
# The others are parts of these.
NAMES = [name for name in ACTIONS if EVERY_FAULT or name not in ("overwrite", "save after a crashed one")]


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(_local, "thread_pool", InLine)
    with one_thread():
        yield


@pytest.fixture
def fresh(tmp_path: Path) -> Callable[[str], Place]:
    """Return a function that makes a place in a folder of its own, with a state before the action."""
    made: dict[str, Path] = {}

    def make(before: str) -> Place:
        if before not in made:
            made[before] = tmp_path / before
            made[before].mkdir()
            BEFORE[before](Place(str(made[before] / NAME)))
        folder = tmp_path / uuid.uuid4().hex
        shutil.copytree(made[before], folder)
        return Place(str(folder / NAME))

    return make


def _on(disk: Disk, action: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        for module in (_local, _local_commit, _zip_local):
            patch.setattr(module, "os", disk)
        action()


def _files(place: Place) -> set[str]:
    files, empty = all_files(os.path.dirname(place.url))
    return files | empty


_seen: dict[tuple[Any, ...], int | None] = {}
"""The checkpoints found so far, by the names of files and the archive. The bytes of an unfinished one are not read."""


def _look(place: Place, removed: bool = False) -> int | None:
    """Return the checkpoint that opens. Check that ``recover``, the next save, and a removal leave no other file."""
    archive = Path(place.url).read_bytes() if os.path.exists(place.url) else b""
    key = (frozenset(_files(place)), archive, removed)
    if key not in _seen:
        _seen[key] = held(place)
        _check_afterwards(place, _seen[key], removed)
    return _seen[key]


def _check_afterwards(place: Place, value: int | None, removed: bool) -> None:
    again = Path(os.path.dirname(place.url) + "-again", NAME)
    shutil.copytree(Path(place.url).parent, again.parent)
    recovered = Place(str(again), durable=False)
    zarrckpt.recover(recovered.url, stopped=True)
    found = held(recovered)
    assert found in (value, None) and _files(recovered) == ({NAME} if found is not None else set())
    running.number = 9
    error = crashed(lambda: place.save(9, overwrite=True))
    if isinstance(error, zarrckpt.CheckpointRemovedError):
        assert found is None
        zarrckpt.recover(place.url)
    else:
        if removed:  # A half-written record of the removal is not known to be dead.
            zarrckpt.recover(place.url, stopped=True)
        assert held(place) == 9 and _files(place) == {NAME}, error
        zarrckpt.remove(place.url)
    assert _files(place) == set()


@pytest.mark.parametrize("name", NAMES)
def test_a_crash_at_every_system_call(
    name: str, fresh: Callable[[str], Place], monkeypatch: pytest.MonkeyPatch
) -> None:
    before, action, old, new = ACTIONS[name]
    whole, place = Disk(), fresh(before)
    _on(whole, partial(action, place), monkeypatch)
    assert held(place) == new and _files(place) == ({NAME} if new is not None else set())
    changes = [event for event in whole.events if event.verb != "fsync"]
    stops = [(number, False) for number in range(len(changes))]
    stops += [(number, True) for number, event in enumerate(changes) if event.verb == "write"]
    seen = []
    for number, half in stops:
        disk, place = Disk(number, half=half), fresh(before)
        assert isinstance(crashed(partial(_on, disk, partial(action, place), monkeypatch)), Stopped)
        seen.append(_look(place, new is None))
    clean = seen[: len(changes)]
    assert set(seen) <= {old, new} and clean == sorted(clean, key=[old, new].index)


@pytest.mark.parametrize("name", ["first save", "overwrite after a crashed one"])
def test_a_failure_at_every_operation(name: str, fresh: Callable[[str], Place]) -> None:
    """It fails, or its answer is lost. A failed save leaves nothing and no open file; a lost answer is no failure."""
    before, _, old, new = ACTIONS[name]
    number, fault = 0, FAIL
    opened = len(os.listdir("/proc/self/fd"))
    while True:
        place = dataclasses.replace(fresh(before), durable=False)
        store, kept = place.faulty(at(number, fault)), _files(place)
        running.number = 2
        error = crashed(partial(zarrckpt.save, state(2), store, overwrite=old is not None, options=SAVING))
        if len(store.calls) <= number:
            break
        call = store.calls[number]
        # After the root was sent, nothing is deleted.
        assert _files(place) <= kept or error is None or call.key == "zarr.json", (call, error)
        found = _look(place)
        assert found == (old if error is not None else new), (call, error)
        assert len(os.listdir("/proc/self/fd")) == opened, call
        number, fault = (number, FAIL_AFTER) if fault is FAIL else (number + 1, FAIL)
    assert number > 25


def test_files_are_synced_before_and_after_the_commit(
    fresh: Callable[[str], Place], monkeypatch: pytest.MonkeyPatch
) -> None:
    for before, verb in (("nothing", "link"), ("committed", "replace")):
        place, disk = fresh(before), Disk()
        _on(disk, lambda place=place, before=before: _save(place, 2, before != "nothing"), monkeypatch)
        folder, events = os.path.dirname(place.url), disk.events
        beside = f"{folder}/@{NAME}/@zarrckpt/{3:032x}"
        marker, archive = f"{beside}/zarr.json", f"{beside}/archive"
        named = events.index(Event(verb, place.url, archive))
        written = [number for number, event in enumerate(events) if event == Event("write", archive)]
        # The list of the save's files, and their names, before the first byte.
        for path in (beside, os.path.dirname(beside), f"{folder}/@{NAME}", folder):
            assert Event("fsync", path) in events[: written[0]], path
        assert Event("fsync", marker) in events[: written[0]]
        assert Event("fsync", archive) in events[written[-1] : named]
        assert Event("fsync", folder) in events[named : events.index(Event("unlink", marker))]


@pytest.mark.parametrize("durable", [True, False])
def test_each_rank_syncs_its_part_before_it_reports(
    durable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a network filesystem, the sync of the coordinator does not write the pages of other machines."""
    store, save_id, disk = open_store(str(tmp_path / NAME), durable=durable), "1" * 32, Disk()

    def write() -> None:
        store.put(f"@zarrckpt/{save_id}/zarr.json", [b"{}"])
        store.begin_archive(save_id, 0)
        store.begin_part(save_id, {"a/c.0": EntryPlace(0, 4)})
        store.put_parts("a/c.0", lambda: [[b"data"]])
        store.end_part()

    _on(disk, write, monkeypatch)
    written = max(number for number, event in enumerate(disk.events) if event.verb == "write")
    assert (Event("fsync", disk.events[written].path) in disk.events[written:]) == durable


FOREIGN: dict[str, Callable[[Path], object]] = {
    "text": lambda path: path.write_text("mine" * 99),
    "empty file": lambda path: path.touch(),
    "zip": lambda path: _zip(path, zipfile.ZIP_STORED),
    "compressed zip": lambda path: _zip(path, zipfile.ZIP_DEFLATED),
    "zarr": lambda path: zarr.save_array(zarr.storage.ZipStore(str(path), mode="w"), np.ones(3)),
    "folder": lambda path: path.mkdir(),
    "folder of files": lambda path: (path.mkdir(), (path / "notes").write_text("mine")),
    "missing target": lambda path: path.symlink_to(path.parent / "elsewhere" / "unmounted"),
}


def _zip(path: Path, method: int) -> None:
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.writestr("notes", "mine" * 99)


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_foreign_file_is_never_replaced(kind: str, tmp_path: Path) -> None:
    url = tmp_path / NAME
    FOREIGN[kind](url)

    def seen() -> tuple[Any, ...]:
        return url.is_symlink() or url.read_bytes() if not url.is_dir() else [*url.iterdir()], os.listdir(tmp_path)

    before = seen()
    for action in (
        partial(zarrckpt.save, state(1), url),
        partial(zarrckpt.save, state(1), url, overwrite=True),
        partial(zarrckpt.remove, url),
        partial(zarrckpt.recover, url, stopped=True),
    ):
        assert isinstance(crashed(action), (zarrckpt.ForeignObjectsError, zarrckpt.StorageError)), action
        assert seen() == before


@pytest.mark.parametrize("damage", ["cut", "longer", "root"])
def test_a_damaged_archive_can_be_replaced_or_removed(damage: str, tmp_path: Path) -> None:
    place = Place(str(tmp_path / NAME))
    for value, action in ((2, lambda: _save(place, 2, True)), (None, lambda: zarrckpt.remove(place.url))):
        _save(place, 1, True)
        data = Path(place.url).read_bytes()
        changed = {"cut": data[:-99], "longer": data + b"x", "root": data.replace(b'"created"', b'"cre4ted"')}[damage]
        Path(place.url).write_bytes(changed)
        with pytest.raises(zarrckpt.CorruptCheckpointError):
            _save(place, 3)
        action()
        assert held(place) == value and _files(place) == ({NAME} if value else set())


def test_an_archive_that_is_a_link_is_replaced_and_its_target_kept(tmp_path: Path) -> None:
    place, target = Place(str(tmp_path / NAME)), Place(str(tmp_path / "y.zarr.zip"))
    _save(target, 1)
    os.symlink(target.url, place.url)
    assert held(place) == 1
    _save(place, 2, True)
    assert (held(place), held(target)) == (2, 1) and not os.path.islink(place.url)


def test_without_hard_links_an_archive_is_created_only_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(1, "no links")

    def meanwhile(call: Call) -> Fault | None:
        if call.verb == "create" and call.key == "zarr.json":
            _save(place, 4)
        return None

    monkeypatch.setattr(os, "link", refuse)
    place = Place(str(tmp_path / NAME))
    save = partial(zarrckpt.save, state(5), FaultyStore(place.url, meanwhile), options=SAVING)
    assert isinstance(crashed(save), zarrckpt.CheckpointExistsError)
    assert held(place) == 4 and _files(place) == {NAME}


_PART = ArchivePart(("a/c.0",), np.zeros(1, "<u4"), "0" * 32, ("b/c.0",), np.array([[0, 0, 4, 0]], "<i8"))


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"name": "../" * 8 + "0" * 8},
        {"name": ""},
        {"keys": ("zarr.json",)},
        {"keys": ("a/c.0", "a/c.0"), "crcs": np.zeros(2, "<u4")},
        {"crcs": np.zeros(2, "<u4")},
        {"scratch_keys": ("a/c.0",)},
        {"scratch_keys": ("../../b",)},
        {"scratch": np.array([[0, 0, -4, 0]], "<i8")},
        {"scratch": np.array([[0, 1, 4, 0]], "<i8")},
        {"scratch": np.array([[0, 0, 1 << 62, 0]], "<i8")},
        {"scratch": np.array([[1, 0, 4, 0]], "<i8")},
        {"scratch": np.zeros(4, "<i8")},
    ],
)
def test_a_part_of_another_rank_is_checked(wrong: dict[str, Any], tmp_path: Path) -> None:
    store, folder = open_store(str(tmp_path / NAME)), tmp_path / f"@{NAME}" / "@zarrckpt" / ("1" * 32)
    store.put(f"@zarrckpt/{folder.name}/zarr.json", [b"{}"])
    store.begin_archive(folder.name, 0)
    store.begin_part(folder.name, {"a/c.0": EntryPlace(0, 4)})
    store.close_part()
    (folder / f"scratch-{_PART.name}-0").write_bytes(b"1234")
    with pytest.raises(zarrckpt.CheckpointError) if wrong else nullcontext():
        store.add_parts([dataclasses.replace(_PART, **wrong)], ["a/c.0", "b/c.0"])


def test_a_late_write_changes_no_other_file(tmp_path: Path) -> None:
    """A write that runs when its save ends, because of a second signal, keeps its descriptor until its end."""
    store, save_id, late = open_store(str(tmp_path / NAME)), "1" * 32, []
    store.put(f"@zarrckpt/{save_id}/zarr.json", [b"{}"])
    store.begin_archive(save_id, 0)
    store.begin_part(save_id, {"a/c.0": EntryPlace(0, 8), "b/c.0": EntryPlace(99, 4)})

    def groups() -> Iterator[list[bytes]]:
        yield [b"late"]
        store.close_part()
        late.extend((tmp_path / str(number)).open("wb") for number in range(9))
        yield [b"late"]

    store.put_parts("a/c.0", groups)
    with pytest.raises(zarrckpt.IncompleteSaveError):
        store.put("b/c.0", [b"late"])
    for file in late:
        file.close()
        assert not (tmp_path / os.path.basename(file.name)).read_bytes()


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_a_full_disk_is_free_after_a_failed_save(compression: str | None, small_disk: Path) -> None:
    weights = {f"w{number}": torch.rand(5 << 15) for number in range(8)}
    options = zarrckpt.SaveOptions(compression=compression)
    zarrckpt.save({"w": weights["w0"][: 1 << 15]}, small_disk / NAME)
    for name in (NAME, "y.zarr.zip"):
        with pytest.raises(zarrckpt.StorageError, match="disk is full"):
            zarrckpt.save(weights, small_disk / name, overwrite=True, options=options)
        assert set(os.listdir(small_disk)) - {"lost+found"} == {NAME}
    assert zarrckpt.open(small_disk / NAME).verify()
