"""The command line as its user meets it: a process of its own for the start, click's runner for the rest."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result

import zarrckpt
from zarrckpt import testing
from zarrckpt.cli import main

STATE = {
    "model": {"w": torch.arange(12.0).reshape(3, 4), "b": torch.tensor([1.0, float("nan"), 0.0, float("inf")])},
    "half": torch.tensor([[1.5, -2.0]], dtype=torch.bfloat16),
    "step": 7,
    "blob": b"some bytes" * 10000,
}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    zarrckpt.save(STATE, tmp_path / "one")
    return tmp_path / "one"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, list(map(str, arguments)), catch_exceptions=False)


def as_json(*arguments: object) -> Any:
    return json.loads(run(*arguments, "--json").stdout)


def test_help_needs_neither_torch_nor_zarr() -> None:
    code = (
        "import sys, click.testing; from zarrckpt.cli import main;"
        "out = click.testing.CliRunner().invoke(main, ['-h']).output; assert 'verify' in out, out;"
        "print({'torch', 'zarr', 'numpy', 'obstore', 'rich'} & {*sys.modules})"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"


@pytest.mark.parametrize("command", main.list_commands(click.Context(main)))
def test_every_command_has_examples(command: str) -> None:
    found = run(command, "-h")
    assert found.exit_code == 0 and "Example" in found.stdout


def test_commands_run_without_torch(saved: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None; from zarrckpt.cli import main;"
        f"main(['stats', {str(saved)!r}, 'model.w'], standalone_mode=False)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.startswith("model.w\t0\t11\t5.5\t")


def test_ls_lists_names_types_and_sizes(saved: Path) -> None:
    lines = [line.split("\t") for line in run("ls", saved).stdout.splitlines()]
    assert lines[0] == ["model.w", "float32", "(3, 4)", "48 B"]
    assert [line[0] for line in lines] == ["model.w", "model.b", "half", "step", "blob"]
    assert run("ls", saved, "model", "st*").stdout.split("\t")[0] == "model.w"
    found = as_json("ls", saved, "model.w", "step")
    assert found == [
        {"name": "model.w", "dtype": "float32", "shape": [3, 4], "chunks": [3, 4], "nbytes": 48},
        {"name": "step", "value": 7},
    ]


def test_names_cannot_command_the_terminal(tmp_path: Path) -> None:
    zarrckpt.save({"evil\x1b[2J": torch.ones(1)}, tmp_path / "one")
    assert "\x1b" not in run("ls", tmp_path / "one").stdout


def test_tree_shows_what_was_nested(saved: Path) -> None:
    lines = run("tree", saved).stdout.splitlines()
    assert lines[1:4] == ["├── model  64 B", "│   ├── w  float32 (3, 4)  48 B", "│   └── b  float32 (4,)  16 B"]
    assert "w  float32" not in run("tree", saved, "--depth", 1).stdout


def test_info_says_what_it_is(saved: Path) -> None:
    assert "tensors      3 with 18 elements, 68 B" in run("info", saved).stdout
    found = as_json("info", saved)
    assert (found["step"], found["tensors"], found["blobs"], found["nbytes"]) == (7, 3, 1, 68)
    assert found["dtypes"]["bfloat16"] == {"tensors": 1, "elements": 2, "nbytes": 4}


def test_cat_shows_values_slices_and_corners(saved: Path) -> None:
    assert run("cat", saved, "step").stdout == "7\n"
    assert as_json("cat", saved, "model.w", "1:3,::2")["values"] == [[4.0, 6.0], [8.0, 10.0]]
    assert as_json("cat", saved, "half")["values"] == [[1.5, -2.0]]
    text = run("cat", saved, "model.b").stdout
    assert "nan 1  inf 1  of 4" in text and "max 1" in text


@pytest.mark.parametrize("slice_", ["1:2:3:4", "x", "7", "0,0,0", "1.5"])
def test_a_wrong_slice_is_wrong_usage(saved: Path, slice_: str) -> None:
    found = run("cat", saved, "model.w", slice_)
    assert found.exit_code == 2 and "SLICE" in found.stderr


def test_stats_finds_the_broken_tensor(saved: Path) -> None:
    found = run("stats", saved, "--sort", "nan")
    assert found.exit_code == 1
    assert found.stdout.splitlines()[0].split("\t")[0] == "model.b"
    numbers = as_json("stats", saved)["model.w"]
    values = np.arange(12.0)
    assert numbers["std"] == pytest.approx(values.std()) and numbers["norm"] == pytest.approx(np.linalg.norm(values))
    assert numbers["zeros"] == 1
    assert run("stats", saved, "model.w").exit_code == 0


def test_diff_says_what_differs(saved: Path, tmp_path: Path) -> None:
    assert run("diff", saved, saved).exit_code == 0
    other = {**STATE, "model": {"w": STATE["model"]["w"] * 2, "c": torch.ones(1)}, "step": 8, "half": torch.ones(2)}  # type: ignore[index]
    zarrckpt.save(other, tmp_path / "two")
    found = run("diff", saved, tmp_path / "two")
    assert found.exit_code == 1
    lines = found.stdout.splitlines()
    assert lines[:2] == ["- model.b", "+ model.c"]
    assert any(line.startswith("! step: value 7 -> value 8") for line in lines)
    assert any(line.startswith("! half: bfloat16 (1, 2) -> float32 (2,)") for line in lines)
    numbers = as_json("diff", saved, tmp_path / "two", "model.w")["tensors"]["model.w"]
    assert numbers == {"count": 12, "unequal": 11, "max_abs": 11.0, "max_rel": 0.5, "cosine": pytest.approx(1.0)}


def test_verify_names_the_damaged_object(saved: Path) -> None:
    assert run("verify", saved).exit_code == 0
    chunk = saved / "model" / "w" / "c.0.0"
    data = bytearray(chunk.read_bytes())
    data[5] ^= 1
    chunk.write_bytes(data)
    assert run("verify", saved, "--quick").exit_code == 0
    found = run("verify", saved)
    assert found.exit_code == 1 and found.stdout.startswith("model/w/c.0.0\tmodel.w\t")
    assert [damage["key"] for damage in as_json("verify", saved)["damages"]] == ["model/w/c.0.0"]


def test_doctor_says_what_to_run_and_recover_runs_it(saved: Path) -> None:
    assert run("doctor", saved).exit_code == 0
    with pytest.raises(BaseException):  # noqa: B017 - DCP wraps what stops it
        zarrckpt.save(STATE, store=testing.FaultyStore(saved, testing.at(12, testing.STOP)), overwrite=True)
    found = run("doctor", saved)
    assert found.exit_code == 1 and "could still commit" in found.stdout and "--stopped" in found.stdout
    assert "kept" in run("recover", saved).stdout
    assert "of 1 saves removed" in run("recover", saved, "--stopped").stdout
    assert run("doctor", saved).exit_code == 0
    assert run("verify", saved).exit_code == 0


def test_rm_asks_and_deletes(saved: Path) -> None:
    asked = CliRunner().invoke(main, ["rm", str(saved)], input="n\n")
    assert asked.exit_code == 1 and zarrckpt.open(saved).verify()
    assert run("rm", saved, "--yes").exit_code == 0
    assert not list(saved.rglob("*")) or not saved.exists()
    assert run("rm", saved, "--yes").exit_code == 3


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("keep me")
    for command in (["rm", tmp_path, "--yes"], ["recover", tmp_path], ["ls", tmp_path], ["ls", tmp_path / "nothing"]):
        found = run(*command)
        assert found.exit_code == 3 and found.stderr.startswith("zarrckpt: ")
    assert (tmp_path / "notes.txt").read_text() == "keep me"
    assert run("ls").exit_code == 2 and run("nonsense").exit_code == 2
    assert run("ls", tmp_path, "-o", "half").exit_code == 2
