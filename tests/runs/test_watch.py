"""``watch``: new checkpoints of a run, the end of the iteration, and failures of the store."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.faulty_store import FAIL, Call, Fault, FaultyStore

import zarrckpt

FAST = zarrckpt.SaveOptions(durable=False)


def save(run: Path, *steps: int) -> list[str]:
    """Save checkpoints, and return their urls."""
    for step in steps:
        zarrckpt.save({"w": torch.ones(3)}, run / f"step-{step}", options=FAST)
    return [str(run / f"step-{step}") for step in steps]


def watch(run: Any, **options: Any) -> Any:
    return zarrckpt.watch(run, **{"interval": 0.1, "timeout": 5.0, **options})


def test_each_new_checkpoint_is_yielded_once_in_order(tmp_path: Path) -> None:
    first = save(tmp_path, 1, 9)
    every, newest = watch(tmp_path), watch(tmp_path, newest_only=True)
    assert next(every) == next(newest) == first[1]
    (tmp_path / "step-20").mkdir()  # not committed
    threading.Timer(0.3, save, (tmp_path, 11)).start()
    assert next(watch(tmp_path, existing=False)) == str(tmp_path / "step-11")
    new = save(tmp_path, 10, 12)
    assert [next(every), next(every), next(every), next(newest)] == [new[0], str(tmp_path / "step-11"), new[1], new[1]]
    zarrckpt.remove(new[1])  # as after a rewind
    assert next(newest) == str(tmp_path / "step-11")


def test_damaged_checkpoints_are_warned_of_once(tmp_path: Path) -> None:
    urls = save(tmp_path, 1, 2)
    (tmp_path / "step-2" / "zarr.json").write_text("{")
    found = watch(tmp_path, timeout=0.5)
    with pytest.warns(UserWarning) as warned:
        assert next(found) == urls[0]
        with pytest.raises(zarrckpt.CheckpointNotFoundError, match=r"no new checkpoint in 0\.5 seconds.*step-1"):
            next(found)
    assert len(warned) == 1 and "step-2" in str(warned[0].message)


def test_failed_listings_are_repeated_and_then_raised(tmp_path: Path) -> None:
    save(tmp_path, 1)
    failing = 2

    def rule(call: Call) -> Fault | None:
        nonlocal failing
        failing -= call.verb == "list"
        return FAIL if failing >= 0 and call.verb == "list" else None

    found = watch(FaultyStore(tmp_path, rule))
    with pytest.warns(UserWarning, match="listing 2 of at most 10 failed"):
        assert next(found) == "step-1"
    failing = 10
    with pytest.warns(UserWarning, match="listing 9"), pytest.raises(zarrckpt.StorageError, match="injected"):
        next(found)


def test_an_event_ends_the_wait(tmp_path: Path) -> None:
    stop = threading.Event()
    threading.Timer(0.2, stop.set).start()
    assert [*watch(tmp_path / "none", interval=600, timeout=None, stop=stop)] == []
    for wrong in ({"interval": 0}, {"interval": "1"}, {"timeout": -1}):
        with pytest.raises((TypeError, ValueError), match=next(iter(wrong))):
            watch("run", **wrong)
