"""A few of the kills of real saves that ``tools/kill_campaign.py`` makes by the hundred."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from harness import ROOT
from harness.faulty_store import STOP, FaultyStore, Stopped
from kill_campaign import AIMS

import zarrckpt
from zarrckpt._store._local_commit import write_temp

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")


def test_killed_saves_leave_the_old_or_the_new_checkpoint_or_none(tmp_path: Path) -> None:
    # In a separate process: it forks, and this process cannot fork with its threads and clients.
    options = ["--kills=1", "--watched=0", f"--aimed={len(AIMS)}", f"--json={tmp_path}/report"]
    command = [sys.executable, "tools/kill_campaign.py", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(Path(tmp_path, "report").read_text())
    assert len(report["kills"]) == 1 + len(AIMS) and not report["wrongs"]
    # If any rank was killed after the commit, the survivors have their reports.
    aimed = [kill for kill in report["kills"] if kill["aimed"]]
    assert {(kill["found"] == "new", bool(kill["returned"])) for kill in aimed} == {(False, False), (True, True)}
    assert {kill["replaces"] for kill in report["kills"]} == {False, True}
    assert {kill["url"].partition(":")[0] == "s3" for kill in report["kills"]} == {False, True}


def test_the_next_save_removes_an_unfinished_marker(tmp_path: Path) -> None:
    """No document names the folder of an attempt that has no marker yet."""
    url = tmp_path / "one"
    zarrckpt.save({"w": torch.ones(3)}, url)
    folder = url / "@zarrckpt" / ("0" * 31 + "1")
    folder.mkdir()
    write_temp(str(folder / "zarr.json"), [[memoryview(b"half")]], unique=False, sync=False)
    zarrckpt.save({"w": torch.zeros(3)}, url, overwrite=True)
    assert not folder.exists() and not [*url.rglob(".zarrckpt-*")]


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("stopped", [True, False])
def test_recover_removes_temporary_files_of_a_dead_save(first: bool, stopped: bool, tmp_path: Path) -> None:
    """No listing shows such a file, nor folders with nothing else in them."""
    url = tmp_path / "one"
    if not first:
        zarrckpt.save({"w": torch.ones(3)}, url)
    store = FaultyStore(url, lambda call: STOP if call.key.endswith("w/c.0") else None)
    with pytest.raises(Stopped):
        zarrckpt.save({"w": torch.zeros(3), "deep": {"v": torch.ones(4)}}, store, overwrite=True)
    (folder,) = (path for path in url.rglob("w") if not (path / "c.0").exists())
    write_temp(str(folder / "c.0"), [[memoryview(b"half")]], unique=False, sync=False)
    (folder.parent / "deep" / "v").mkdir(parents=True, exist_ok=True)
    if stopped:
        zarrckpt.recover(url, stopped=True)
    else:
        zarrckpt.save({"w": torch.ones(3)}, url, overwrite=True)
    assert not [*url.rglob(".zarrckpt-*")] and not folder.exists()
    # They do not hinder later calls either when no document names them any more.
    zarrckpt.recover(url, stopped=True)
    zarrckpt.save({"w": torch.full((3,), 2.0)}, url, overwrite=True)
    assert zarrckpt.open(url)["w"][:].tolist() == [2, 2, 2]
    zarrckpt.remove(url)
    assert not [path for path in url.rglob("*") if path.is_file()]
