"""Markers and objects that lost, failed and replaced saves leave."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from harness.crashes import all_files
from harness.faulty_store import FAIL, STOP, Call, Fault, FaultyStore, Stopped

import zarrckpt

STATE = {"w": torch.arange(4.0)}


def markers(folder: Path) -> set[str]:
    """Return the ids of the attempts that have a marker."""
    return {path.parent.name for path in folder.glob("@zarrckpt/*/zarr.json")}


def test_a_save_that_lost_leaves_no_object(tmp_path: Path) -> None:
    zarrckpt.save(STATE, tmp_path)
    committed = []

    def rule(call: Call) -> Fault | None:
        if call.verb == "replace" and not committed:
            zarrckpt.save(STATE, tmp_path, overwrite=True)
            committed.extend(path.parent.name for path in tmp_path.glob("@*/w"))
        return None

    with pytest.raises(zarrckpt.CheckpointExistsError):
        zarrckpt.save(STATE, FaultyStore(tmp_path, rule), overwrite=True)
    tops = {path.name for path in tmp_path.iterdir()}
    assert tops == {"zarr.json", "@zarrckpt", *committed}
    assert {f"@{save_id}" for save_id in markers(tmp_path)} == {*committed}


def test_a_failed_save_never_deletes_its_marker(tmp_path: Path) -> None:
    """Chunks that arrive late could not be assigned to it, not even in the moment before the marker is put again."""
    zarrckpt.save(STATE, tmp_path)
    deleted = []

    def rule(call: Call) -> Fault | None:
        if call.verb == "delete":
            deleted.extend(call.key.split(", "))
        return FAIL if call.key.endswith("checksums/c.0") else None

    with pytest.raises(zarrckpt.StorageError):
        zarrckpt.save(STATE, FaultyStore(tmp_path, rule), overwrite=True)
    assert any(key.endswith("w/c.0") for key in deleted)
    assert not any(
        key.startswith("@zarrckpt/") and key.endswith("/zarr.json") and key.count("/") == 2 for key in deleted
    )


def test_an_overwrite_needs_no_marker_of_the_old_checkpoint(tmp_path: Path) -> None:
    zarrckpt.save(STATE, tmp_path)
    (save_id,) = markers(tmp_path)
    (tmp_path / "@zarrckpt" / save_id / "zarr.json").unlink()
    zarrckpt.save(STATE, tmp_path, overwrite=True)
    assert not (tmp_path / "w").exists() and save_id not in str(all_files(tmp_path))


def test_a_removal_returns_the_number_of_deleted_objects(tmp_path: Path) -> None:
    """The objects of a save that was killed, too."""
    zarrckpt.save(STATE, tmp_path / "step-1")
    killed = FaultyStore(tmp_path / "step-1", lambda call: STOP if call.verb == "replace" else None)
    with pytest.raises(Stopped):
        zarrckpt.save(STATE, killed, overwrite=True)
    files = all_files(tmp_path)[0]
    assert zarrckpt.remove(tmp_path / "step-1") == len(files)
    assert all_files(tmp_path) == (set(), set())
