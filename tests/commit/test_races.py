"""Two processes save to one path at the same moment: exactly one commits, and its checkpoint is its own, whole."""

from __future__ import annotations

import os
import random
import time
import uuid
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.crashes import SAVING, Place, held, needed, state
from harness.ranks import run_ranks
from harness.s3_server import Served, served
from harness.store_servers import S3Place

import zarrckpt

Outcome = tuple[str, int]
"""The id of the save, "" if it lost, and the value that it saved."""


def _meet(folder: str, name: str) -> None:
    """Wait for the other process."""
    place = Path(folder, name)
    place.mkdir(exist_ok=True)
    (place / os.environ["RANK"]).touch()
    deadline = time.monotonic() + 60
    while len(os.listdir(place)) < 2:
        if time.monotonic() > deadline:
            raise TimeoutError(f"the other process did not come to {name}")
        time.sleep(0.0005)


def _race(folder: str, number: int, place: Place, both_begin: bool) -> Outcome:
    """Run one of two saves. With ``both_begin``, neither writes chunks before both have begun."""
    value = 10 + 2 * (number % 50) + int(os.environ["RANK"])
    waited = not both_begin
    _meet(folder, f"{number}-start")
    time.sleep(random.random() * 0.003)

    def progress(done: int, total: int) -> None:
        nonlocal waited
        if not waited:
            waited = True
            _meet(folder, f"{number}-middle")

    try:
        report = zarrckpt.save(
            state(value),
            **place.options,
            options=zarrckpt.SaveOptions(max_chunk_bytes=48),
            overwrite=both_begin,
            progress=progress,
        )
    except zarrckpt.CheckpointExistsError:
        return "", value
    return report.save_id, value


def _races(folder: str, places: list[Place], both_begin: bool) -> list[Outcome]:
    return [_race(folder, number, place, both_begin) for number, place in enumerate(places)]


def _check(folder: Path, places: list[Place], both_begin: bool) -> None:
    folder.mkdir()
    answers = run_ranks(_races, str(folder), places, both_begin, world_size=2, group=False)
    wins = [0, 0]
    for place, outcomes in zip(places, zip(*answers, strict=True), strict=True):
        winners = [index for index, (save_id, _) in enumerate(outcomes) if save_id]
        assert len(winners) == 1, outcomes
        wins[winners[0]] += 1
        save_id, value = outcomes[winners[0]]
        assert zarrckpt.open(**place.options).save_id == save_id
        zarrckpt.recover(**place.options, stopped=True)
        assert place.keys() == needed(place) and held(place) == value
    # Otherwise one of them was never in time, and the test proves no race.
    assert min(wins) > 0


WAYS = ["fresh", "fresh, both under way", "over a committed one"]


@pytest.mark.parametrize("way", WAYS)
def test_races_on_local_files(way: str, tmp_path: Path) -> None:
    places = [Place(str(tmp_path / f"{number}")) for number in range(30)]
    if way == WAYS[2]:
        for place in places:
            place.save(1)
    _check(tmp_path / "meetings", places, way != WAYS[0])


@pytest.fixture(scope="module")
def s3_server() -> Iterator[Served]:
    with served() as server:
        yield server


@pytest.mark.parametrize("way", WAYS)
def test_races_on_s3(way: str, s3_server: Served, tmp_path: Path) -> None:
    options = s3_server.storage_options
    places = [Place(f"s3://races/{uuid.uuid4().hex}", storage_options=options) for _ in range(20)]
    if way == WAYS[2]:
        for place in places:
            place.save(1)
    _check(tmp_path / "meetings", places, way != WAYS[0])


# -- a server that takes conditions and ignores them


def _save_and_count(place: Place, value: int, overwrite: bool = False) -> int:
    """Save. Return the number of "best effort" warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        zarrckpt.save(state(value), **place.options, overwrite=overwrite, options=SAVING)
    return sum("conditional puts" in str(warning.message) for warning in caught)


def test_a_server_that_ignores_conditions_is_warned_of_once(sloppy_bucket: S3Place) -> None:
    place = Place(sloppy_bucket.url("one"), storage_options=sloppy_bucket.storage_options)
    assert _save_and_count(place, 1) == 1 and held(place) == 1
    assert _save_and_count(place, 2, overwrite=True) == 1 and held(place) == 2
    with pytest.raises(zarrckpt.CheckpointExistsError):
        place.save(3)
    assert held(place) == 2


@pytest.mark.filterwarnings("ignore:.*conditional puts:UserWarning")
@pytest.mark.parametrize("overwrite", [False, True])
def test_without_conditions_saves_check_before_the_put(overwrite: bool, sloppy_bucket: S3Place) -> None:
    """Another save that committed before this one puts its root is found, and stays."""
    place = Place(sloppy_bucket.url("one"), storage_options=sloppy_bucket.storage_options)
    if overwrite:
        place.save(1)
    others: list[int] = []

    def progress(done: int, total: int) -> None:
        if not others:
            others.append(2)
            place.save(2, overwrite=overwrite)

    with pytest.raises(zarrckpt.CheckpointExistsError):
        zarrckpt.save(state(3), **place.options, overwrite=overwrite, options=SAVING, progress=progress)
    assert held(place) == 2
    zarrckpt.recover(**place.options, stopped=True)
    assert place.keys() == needed(place)
