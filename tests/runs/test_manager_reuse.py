"""A manager's saves reuse unchanged chunks of the run's newest intact checkpoint, whatever retention deletes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.crashes import state
from harness.faulty_store import FAIL
from harness.managed import OPTIONS, damage_root, folders, manager, name, restored, sound, watched
from harness.s3_server import S3Server
from harness.shared_chunks import sharing_small_chunks

import zarrckpt
from zarrckpt import Keep

CHUNK = "deep/b/c.0"
"""The chunk that never changes."""


@pytest.fixture(autouse=True)
def _share_small_chunks() -> Iterator[None]:
    with sharing_small_chunks():
        yield


def links(run: Path, step: int) -> int:
    """Return the number of checkpoints that share the file of the unchanged chunk."""
    return (run / name(step) / CHUNK).stat().st_nlink


def test_each_save_reuses_the_newest_checkpoint(tmp_path: Path) -> None:
    with manager(tmp_path) as job:
        reports = [job.save(step, state(step)).result() for step in (1, 2, 3)]
    assert [report.linked_bytes for report in reports] == [0, 10, 10]
    assert [report.base for report in reports] == ["", *(str(tmp_path / name(step)) for step in (1, 2))]
    assert [links(tmp_path, step) for step in (1, 2, 3)] == [3, 3, 3]
    assert sound(tmp_path) == [1, 2, 3]


def test_retention_deletes_a_base_and_no_shared_byte(tmp_path: Path) -> None:
    with manager(tmp_path, keep=Keep(newest=2), background=True) as job:
        for step in range(1, 8):
            job.save(step, state(step))
    assert sound(tmp_path) == [6, 7] and folders(tmp_path) == {name(6), name(7)}
    assert links(tmp_path, 7) == 2
    with manager(tmp_path) as job:
        assert restored(job) == 7


def test_the_next_job_reuses_the_checkpoint_from_which_it_resumes(tmp_path: Path) -> None:
    with manager(tmp_path) as job:
        job.save(1, state(1))
        job.save(2, state(2))
    damage_root(tmp_path / name(2))
    with manager(tmp_path) as job:
        assert restored(job) == 1
        report = job.save(3, state(3)).result()
    assert report.base == str(tmp_path / name(1)) and report.linked_bytes == 10


def test_a_rewound_run_reuses_the_step_from_which_it_goes_on(tmp_path: Path) -> None:
    with manager(tmp_path) as job:
        for step in (1, 2, 3):
            job.save(step, state(step))
    with manager(tmp_path) as job:
        assert restored(job, step=2, rewind=True) == 2
        report = job.save(3, state(3)).result()
    assert report.base == str(tmp_path / name(2)) and sound(tmp_path) == [1, 2, 3]


def test_a_failed_save_is_not_a_base(tmp_path: Path) -> None:
    with watched(tmp_path) as watch, manager(tmp_path) as job:
        job.save(1, state(1))
        watch.rule = lambda call: FAIL if call.key == f"{name(2)}/w/c.1.0" else None
        with pytest.raises(zarrckpt.StorageError):
            job.save(2, state(2)).result()
        watch.rule = lambda _: None
        assert job.save(3, state(3)).result().base == str(tmp_path / name(1))
    assert sound(tmp_path) == [1, 3]


def test_a_removed_base_is_not_missed(tmp_path: Path) -> None:
    with manager(tmp_path) as job:
        job.save(1, state(1))
        zarrckpt.remove(tmp_path / name(1))
        assert job.save(2, state(2)).result().linked_bytes == 0
    assert sound(tmp_path) == [2]


@pytest.mark.parametrize(("changes", "linked"), [({"reuse": "off"}, [0, 0, 0]), ({"reuse_full_every": 2}, [0, 10, 0])])
def test_options_turn_reuse_off_or_limit_it(changes: dict[str, Any], linked: list[int], tmp_path: Path) -> None:
    with manager(tmp_path, options=dataclasses.replace(OPTIONS, **changes)) as job:
        assert [job.save(step, state(step)).result().linked_bytes for step in (1, 2, 3)] == linked


def test_saves_send_only_changed_chunks_to_s3(s3_stub: S3Server) -> None:
    frozen = torch.arange(1 << 16, dtype=torch.float32)
    place = s3_stub.bucket()
    sent = []
    options = {"storage_options": place.storage_options, "options": zarrckpt.SaveOptions()}
    with manager(place.url("run"), keep=Keep(newest=1), **options) as job:
        for step in (1, 2, 3):
            s3_stub.log.reset()
            job.save(step, {"frozen": frozen, "step": step})
            sent.append(s3_stub.log.stats()["bytes_in"])
    assert sent[0] > frozen.nbytes > (64 << 10) > max(sent[1:])
    assert zarrckpt.open(place.url("run/" + name(3)), storage_options=place.storage_options).verify()


def test_runs_that_begin_from_one_checkpoint_share_its_files(tmp_path: Path) -> None:
    with manager(tmp_path / "pretrained") as job:
        job.save(5, state(5))
    source = tmp_path / "pretrained" / name(5)
    for number in range(3):
        with manager(tmp_path / str(number), init_from=source) as job:
            assert restored(job) == 5
            reports = [job.save(step, state(step)).result() for step in (6, 7)]
        assert [report.linked_bytes for report in reports] == [10, 10]
        assert [report.base for report in reports] == [str(source), str(tmp_path / str(number) / name(6))]
    assert (source / CHUNK).stat().st_nlink == 7
    zarrckpt.remove(source)
    assert sound(tmp_path / "0") == [6, 7]
    # A job that does not begin from it, because its run has checkpoints, reuses these.
    with manager(tmp_path / "0", init_from=source) as job:
        assert job.save(8, state(8)).result().base == str(tmp_path / "0" / name(7))


def test_files_of_init_from_that_others_may_change_are_not_linked(tmp_path: Path) -> None:
    with manager(tmp_path / "pretrained") as job:
        job.save(5, state(5))
    source = tmp_path / "pretrained" / name(5)
    (source / CHUNK).chmod(0o666)
    with manager(tmp_path / "run", init_from=source) as job:
        restored(job)
        assert job.save(6, state(6)).result().linked_bytes == 0
    assert sound(tmp_path / "run") == [6]


@pytest.mark.parametrize("reuse", ["auto", "on"])
def test_init_from_in_an_object_store_is_a_base_only_by_option(reuse: Any, s3_stub: S3Server) -> None:
    place = s3_stub.bucket()
    options = dataclasses.replace(OPTIONS, reuse=reuse)
    arguments = {"storage_options": place.storage_options, "options": options}
    with manager(place.url("pretrained"), **arguments) as job:
        job.save(5, state(5))
    source = place.url(f"pretrained/{name(5)}")
    with manager(place.url("run"), init_from=source, **arguments) as job:
        assert restored(job) == 5
        reports = [job.save(step, state(step)).result() for step in (6, 7)]
    assert [report.copied_bytes for report in reports] == [10 if reuse == "on" else 0, 10]
