"""A committed checkpoint is whole, stays unchanged, and is replaced at once or not at all."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import zarr
from harness.crashes import undeletable
from harness.internals import StoreSpec, examine
from harness.ranks import RankError, all_ranks_raise, run_ranks
from harness.s3_server import S3Server
from harness.store_servers import S3Place
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import zarrckpt
from zarrckpt import SaveOptions, ZarrStorageReader, ZarrStorageWriter
from zarrckpt._commit import attempts

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")


def _state(value: float) -> dict[str, Any]:
    w, b = torch.full((6, 4), float(value)), torch.full((3,), float(value))
    return {"w": w, "deep": {"b": b}, "step": value, "blob": b"%d" % value}


def _holds(url: str | Path, value: float, **options: Any) -> bool:
    """Whether a checkpoint opens and holds the whole :func:`_state` of one value."""
    target = {**_state(-1), "step": None, "blob": None}
    zarrckpt.load(target, url, **options)
    same = [target["w"].eq(value).all(), target["deep"]["b"].eq(value).all()]
    return all(same) and target["step"] == value and target["blob"] == b"%d" % value


def _files(folder: Path) -> dict[str, bytes]:
    """Return every file below a folder, with its bytes."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def _folders(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


# -- a committed checkpoint already exists


def _save(url: str, value: float, overwrite: bool = False) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    sharded = distribute_tensor(torch.full((6, 4), value), mesh, [Shard(0)], src_data_rank=None)
    zarrckpt.save({**_state(value), "w": sharded}, url, overwrite=overwrite)


def test_a_second_save_is_refused_before_data_moves(tmp_path: Path) -> None:
    url = tmp_path / "one"
    run_ranks(_save, str(url), 1.0)
    before = _files(url)
    message = all_ranks_raise(zarrckpt.CheckpointExistsError, _save, str(url), 2.0)
    assert "Checkpoint already exists" in message and str(url) in message
    assert _files(url) == before and _holds(url, 1)
    run_ranks(_save, str(url), 3.0, True, world_size=2)
    assert _holds(url, 3) and zarrckpt.open(url).info.tree.startswith("@")


def test_one_of_two_saves_to_s3_commits(moto_bucket: S3Place) -> None:
    url, options = moto_bucket.url("run/one"), {"storage_options": moto_bucket.storage_options}
    run_ranks(_save, url, 1.0, env=moto_bucket.environment, world_size=2)

    def objects() -> dict[str, str]:
        listed = moto_bucket.client().list_objects_v2(Bucket=moto_bucket.bucket)
        return {entry["Key"]: entry["ETag"] for entry in listed["Contents"]}

    before = objects()
    assert "Checkpoint already exists" in all_ranks_raise(
        zarrckpt.CheckpointExistsError, _save, url, 2.0, env=moto_bucket.environment, world_size=2
    )
    assert objects() == before and _holds(url, 1, **options)
    run_ranks(_save, url, 3.0, True, env=moto_bucket.environment, world_size=2)
    assert _holds(url, 3, **options)
    assert not before.keys() & {key for key in objects() if key.startswith("run/one/w/")}


def test_overwriting_switches_in_one_step(tmp_path: Path) -> None:
    url = tmp_path / "one"
    zarrckpt.save(_state(1), url)
    seen = []
    zarrckpt.save(_state(2), url, overwrite=True, progress=lambda done, total: seen.append(_holds(url, 1)))
    assert seen and all(seen) and _holds(url, 2)
    zarrckpt.save(_state(3), url, overwrite=True)
    checkpoint = zarrckpt.open(url)
    # Only the newest checkpoint's objects are left.
    assert _folders(url) == {"zarr.json", "@zarrckpt", checkpoint.info.tree}
    assert _folders(url / "@zarrckpt") == {"zarr.json", checkpoint.save_id}
    assert _holds(url, 3)


def test_an_open_replaced_checkpoint_reads_whole_until_it_is_deleted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = tmp_path / "one"
    zarrckpt.save(_state(1), url)
    old = zarrckpt.open(url)
    zarrckpt.save(_state(2), undeletable(url), overwrite=True)
    assert "could not be removed" in caplog.text
    assert (old["w"][:] == 1).all() and old["blob"] == b"1" and old.writers("w").size and _holds(url, 2)
    zarrckpt.save(_state(3), url, overwrite=True)
    assert _holds(url, 3) and _folders(url) == {"zarr.json", "@zarrckpt", zarrckpt.open(url).info.tree}


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("what", ["file", "folder", "zarr"])
def test_foreign_objects_are_refused(what: str, overwrite: bool, tmp_path: Path) -> None:
    url = tmp_path / "one"
    if what == "zarr":
        zarr.create_group(str(url)).create_array("w", shape=(3,), dtype="f4")[:] = 1
    else:
        place = url / ("notes.txt" if what == "file" else "data/notes.txt")
        place.parent.mkdir(parents=True)
        place.write_text("mine")
    before = _files(url)
    with pytest.raises(zarrckpt.ForeignObjectsError):
        zarrckpt.save(_state(1), url, overwrite=overwrite)
    assert _files(url) == before


# -- readers of a replaced checkpoint


class OverwritingPlanner(DefaultLoadPlanner):
    """Another save replaces the checkpoint after this load has read its metadata."""

    def __init__(self, place: Any) -> None:
        super().__init__()
        self._place = place

    def finish_plan(self, new_plan: Any) -> Any:
        zarrckpt.save(_state(2), self._place, overwrite=True)
        return super().finish_plan(new_plan)


def test_a_reader_of_a_replaced_checkpoint_gets_an_error(tmp_path: Path) -> None:
    url = tmp_path / "one"
    zarrckpt.save(_state(1), url)
    old = zarrckpt.open(url)
    assert (old["w"][:] == 1).all()
    array = old["deep.b"]
    target = _state(0)
    with pytest.raises(CheckpointException) as caught:
        dcp.load(target, storage_reader=ZarrStorageReader(url), planner=OverwritingPlanner(url))
    assert isinstance(caught.value.failures[0][0], zarrckpt.CheckpointReplacedError)
    for read in (lambda: old["w"][:], lambda: array[:], lambda: old["blob"], lambda: old.writers("w")):
        with pytest.raises(zarrckpt.CheckpointReplacedError):
            read()
    assert _holds(url, 2)
    again = _state(0)
    dcp.load(again, storage_reader=ZarrStorageReader(url), planner=OverwritingPlanner(undeletable(url)))
    assert again["w"].eq(2).all() and again["blob"] == b"2"


# -- death of real processes


class DyingPlanner(DefaultSavePlanner):
    """Some ranks' processes end without notice after they have written some tensors."""

    def __init__(self, ranks: Sequence[int]) -> None:
        super().__init__()
        self._dies = dist.get_rank() in ranks
        self._left = 14  # each is requested twice: for the check of all of them, then for the write

    def resolve_data(self, write_item: Any) -> Any:
        self._left -= 1
        if self._dies and self._left < 0:
            os._exit(1)
        return super().resolve_data(write_item)


def _die_while_writing(url: str, ranks: Sequence[int]) -> None:
    state = {f"t{i}": torch.full((4,), 1.0) for i in range(20)}
    dcp.save(
        state,
        storage_writer=ZarrStorageWriter(url, options=SaveOptions(concurrency=1)),
        planner=DyingPlanner(ranks),
    )


def _die_before_the_commit(url: str) -> None:
    if dist.get_rank() == 0:
        attempts.commit = lambda *args: os._exit(1)
    _save(url, 1.0)


@pytest.mark.parametrize("who", ["everyone", "one rank", "the coordinator at the end"])
def test_killed_processes_leave_no_checkpoint_that_opens(who: str, tmp_path: Path) -> None:
    url = str(tmp_path / "one")
    with pytest.raises(RankError, match="the process died"):
        if who == "the coordinator at the end":
            run_ranks(_die_before_the_commit, url, world_size=2)
        else:
            run_ranks(_die_while_writing, url, [0, 1] if who == "everyone" else [1], world_size=2)
    leftovers = _folders(tmp_path / "one")
    assert leftovers > {"@zarrckpt"} and "zarr.json" not in leftovers
    with pytest.raises(zarrckpt.CheckpointNotFoundError, match="never committed"):
        zarrckpt.open(url)
    with pytest.raises(zarrckpt.CheckpointNotFoundError, match="never committed"):
        zarrckpt.load(_state(0), url)
    zarrckpt.save(_state(2), url)
    assert _holds(url, 2)
    tree = zarrckpt.open(url).info.tree
    assert {info.key.partition("/")[0] for info in StoreSpec(url).open().list()} == {"zarr.json", "@zarrckpt", tree}
    # A late write of the dead attempt changes no later checkpoint.
    late = tmp_path / "one" / ("w/c.0.0" if who == "the coordinator at the end" else "t3/c.0")
    late.parent.mkdir(exist_ok=True)
    late.write_bytes(b"late")
    assert _holds(url, 2)
    zarrckpt.save(_state(3), url, overwrite=True)
    assert _holds(url, 3)


# -- two at once


class MeetingPlanner(DefaultSavePlanner):
    """Both saves are under way before either writes."""

    def create_global_plan(self, all_plans: Any) -> Any:
        self._coordinates = True
        return super().create_global_plan(all_plans)

    def finish_plan(self, new_plan: Any) -> Any:
        dist.barrier()
        return super().finish_plan(new_plan)


def _race(url: str, overwrite: bool) -> str:
    """Save ones on ranks 0 and 1, and twos with one more tensor on ranks 2 and 3, all to one url."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = dist.get_rank() // 2
    state = _state(mine + 1) | ({"more": torch.ones(3)} if mine else {})
    writer = ZarrStorageWriter(url, overwrite=overwrite)
    try:
        dcp.save(state, storage_writer=writer, process_group=groups[mine], planner=MeetingPlanner())
    except CheckpointException as err:
        return repr(next(iter(err.failures.values()))[0])
    return "committed"


@pytest.mark.parametrize("overwrite", [False, True])
def test_of_two_saves_at_once_exactly_one_commits(overwrite: bool, tmp_path: Path) -> None:
    for turn in range(4):
        url = tmp_path / str(turn)
        if overwrite:
            zarrckpt.save(_state(7), url)
        answers = run_ranks(_race, str(url), overwrite)
        winner = answers.index("committed") // 2
        loser = 1 - winner
        assert answers[2 * winner : 2 * winner + 2] == ["committed"] * 2
        lost = answers[2 * loser : 2 * loser + 2]
        assert all(answer.startswith("CheckpointExistsError('Checkpoint already exists") for answer in lost), lost
        checkpoint = zarrckpt.open(url)
        assert _holds(url, winner + 1) and ("more" in checkpoint) == bool(winner)
        # The next save deletes the objects of the loser.
        zarrckpt.save(_state(9), url, overwrite=True)
        assert _holds(url, 9)
        assert _folders(url) == {"zarr.json", "@zarrckpt", zarrckpt.open(url).info.tree}


# -- folders with nothing in them


@pytest.mark.parametrize("backend", ["storage_options", "fsspec_options"])
def test_objects_for_empty_folders_are_ignored(backend: str, moto_bucket: S3Place) -> None:
    """S3's consoles put an object of no bytes, whose name ends in "/", for each folder."""
    options = {"storage_options": getattr(moto_bucket, backend)}
    run, url = moto_bucket.url("run"), moto_bucket.url("run/step-1")
    names = ["", "@zarrckpt/", "step-1/", "step-1/@zarrckpt/", "step-1/deep/", "step-1/other/x/", "step-2/", "logs/"]

    def put_names() -> None:
        for name in names:
            moto_bucket.client().put_object(Bucket=moto_bucket.bucket, Key=f"run/{name}", Body=b"")

    put_names()
    assert zarrckpt.latest(run, **options) is None and not zarrckpt.recover(run, **options).checkpoints
    for value in (1, 2, 3):
        zarrckpt.save(_state(value), url, overwrite=value > 1, **options)
        put_names()
    assert _holds(url, 3, **options) and zarrckpt.open(url, **options).verify(quick=True)
    assert examine(url, **options).findings == () and zarrckpt.recover(url, stopped=True, **options).objects == 0
    with zarrckpt.CheckpointManager(run, keep=zarrckpt.Keep(newest=1), signals=(), **options) as job:
        assert job.steps() == [1] and job.restore(_state(0)) == 1
        job.save(2, _state(2))
        job.save(3, _state(3))
    assert zarrckpt.latest(run, **options) == f"{run}/step-00000003"
    recovered = zarrckpt.recover(run, **options).checkpoints
    assert [part.url for part in recovered] == [f"{run}/step-{step}" for step in ("00000003", "1")]
    zarrckpt.remove(url, **options)
    put_names()
    zarrckpt.save(_state(4), url, **options)
    # An object of the same name without "/" belongs to another program.
    moto_bucket.client().put_object(Bucket=moto_bucket.bucket, Key="run/step-1/_SUCCESS", Body=b"")
    with pytest.raises(zarrckpt.ForeignObjectsError, match="'_SUCCESS'"):
        zarrckpt.save(_state(5), url, overwrite=True, **options)


def test_a_listed_folder_that_holds_nothing_is_not_in_the_way(s3_stub: S3Server) -> None:
    s3_stub.faults.keep_folders = True
    place = s3_stub.bucket()
    url, options = place.url("run/step-1"), {"storage_options": place.storage_options}
    for value in (1, 2, 3):
        zarrckpt.save(_state(value), url, overwrite=True, **options)
    assert _holds(url, 3, **options)
    zarrckpt.remove(url, **options)
    assert zarrckpt.latest(place.url("run"), **options) is None
    zarrckpt.save(_state(4), url, **options)
    assert _holds(url, 4, **options)
    manager = zarrckpt.CheckpointManager(place.url("many"), keep=zarrckpt.Keep(newest=1), save_every=1, **options)
    for step in (1, 2, 3):
        manager.step(step, _state(step))
    manager.close()
    assert zarrckpt.latest(place.url("many"), **options) == place.url("many/step-00000003")
