"""Copies: the same bits elsewhere, committed as a save is, or not there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from store_servers import S3Place

import zarrckpt
from zarrckpt import testing
from zarrckpt.cli import main


def _state(value: float = 1.0) -> dict[str, Any]:
    torch.manual_seed(0)
    return {
        "model": {"w": torch.randn(800, 600) * value, "b": torch.randn(7).bfloat16(), "empty": torch.zeros(0, 3)},
        "list": [torch.tensor(value), {"x": 1}],
        3: "three",
        "blob": b"bytes" * 50_000,
    }


@pytest.mark.parametrize(
    "options", [{}, {"compression": "zstd"}, {"portable_dtypes": True}], ids=["", "zstd", "portable"]
)
def test_a_copy_is_what_it_is_a_copy_of(tmp_path: Path, options: dict[str, Any]) -> None:
    zarrckpt.save(_state(), tmp_path / "one", **options)
    one = zarrckpt.open(tmp_path / "one")
    seen: list[tuple[int, int]] = []
    report = one.copy_to(tmp_path / "two", progress=lambda *done: seen.append(done))
    two = zarrckpt.open(tmp_path / "two")
    assert two.verify() and one.diff(two) and list(one) == list(two)
    assert seen[-1] == (report.nbytes, report.nbytes) and two.save_id == report.save_id != one.save_id
    assert str(one.load()) == str(two.load())
    target = {**_state(0.0), "blob": None, 3: None}
    zarrckpt.load(target, tmp_path / "two")
    assert torch.equal(target["model"]["w"], _state()["model"]["w"]) and target[3] == "three"
    assert (two.writers("model.w") == one.writers("model.w")).all()


def test_a_part_and_to_s3_and_back(tmp_path: Path, moto_bucket: S3Place) -> None:
    zarrckpt.save(_state(), tmp_path / "one")
    zarrckpt.save(_state(2.0), tmp_path / "one", overwrite=True)  # a tree of its own
    url, options = moto_bucket.url("copied"), moto_bucket.storage_options
    part = zarrckpt.open(tmp_path / "one").select("model", "list", exclude=["*.b"])
    part.copy_to(url, storage_options=options)
    there = zarrckpt.open(url, storage_options=options)
    assert list(there) == ["model.w", "model.empty", "list.0", "list.1.x"] and there.verify() and part.diff(there)
    assert there.load()["list"][1] == {"x": 1}
    there.copy_to(tmp_path / "back")
    assert zarrckpt.open(tmp_path / "back").verify() and part.diff(zarrckpt.open(tmp_path / "back"))


def test_what_is_there_is_replaced_only_when_asked(tmp_path: Path) -> None:
    zarrckpt.save(_state(), tmp_path / "one")
    zarrckpt.save(_state(2.0), tmp_path / "two")
    one = zarrckpt.open(tmp_path / "one")
    with pytest.raises(zarrckpt.CheckpointExistsError):
        one.copy_to(tmp_path / "two")
    one.copy_to(tmp_path / "two", overwrite=True)
    assert one.diff(zarrckpt.open(tmp_path / "two")) and zarrckpt.open(tmp_path / "two").verify()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    with pytest.raises(zarrckpt.ForeignObjectsError):
        one.copy_to(tmp_path / "other")


def test_damage_is_not_copied(tmp_path: Path) -> None:
    zarrckpt.save(_state(), tmp_path / "one")
    chunk = tmp_path / "one" / "model" / "b" / "c.0"
    chunk.write_bytes(b"\0" * chunk.stat().st_size)
    with pytest.raises(zarrckpt.CorruptCheckpointError):
        zarrckpt.open(tmp_path / "one").copy_to(tmp_path / "two")
    with pytest.raises(zarrckpt.CheckpointNotFoundError):
        zarrckpt.open(tmp_path / "two")


def test_a_copy_that_dies_anywhere_leaves_the_old_or_the_new_one(tmp_path: Path) -> None:
    small = {"w": torch.ones(3), "b": {"c": torch.zeros(2)}}
    zarrckpt.save(small, tmp_path / "one")
    one = zarrckpt.open(tmp_path / "one")
    counted = testing.FaultyStore(tmp_path / "count")
    one.copy_to(store=counted)
    (commit,) = (call.number for call in counted.calls if (call.verb, call.key) == ("create", "zarr.json"))
    for number in range(len(counted.calls)):
        place = tmp_path / str(number)
        with pytest.raises(testing.Stopped):
            one.copy_to(store=testing.FaultyStore(place, testing.at(number, testing.STOP)))
        if number <= commit:
            with pytest.raises(zarrckpt.CheckpointNotFoundError):
                zarrckpt.open(place)
            one.copy_to(place)
        assert one.diff(zarrckpt.open(place)) and zarrckpt.open(place).verify()


def test_from_the_terminal(tmp_path: Path) -> None:
    zarrckpt.save(_state(), tmp_path / "one")
    arguments = ["cp", str(tmp_path / "one"), str(tmp_path / "two"), "--include", "model", "--exclude", "*.b", "--json"]
    found = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert json.loads(found.stdout)["objects"] == 1 and found.exit_code == 0
    assert list(zarrckpt.open(tmp_path / "two")) == ["model.w", "model.empty"]
    assert CliRunner().invoke(main, arguments).exit_code == 3
