"""The command line as its user meets it: in a separate process for the start, with click's runner for the rest."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from harness.faulty_store import STOP, FaultyStore, at
from harness.store_servers import S3Place, free_port

import zarrckpt
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


def test_commands_run_without_torch(saved: Path, tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None; from zarrckpt.cli import main;"
        f"main(['report', {str(saved)!r}, '-o', {str(tmp_path / 'page.html')!r}], standalone_mode=False);"
        f"main(['stats', {str(saved)!r}, 'model.w'], standalone_mode=False)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "model.w\t0\t11\t5.5\t" in found.stdout and (tmp_path / "page.html").exists()


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


def test_commands_take_archives_as_they_take_folders(saved: Path, tmp_path: Path) -> None:
    archive, copied = tmp_path / "two.zarr.zip", tmp_path / "three.zarr.zip"
    zarrckpt.save(STATE, archive)
    for command, *words in (("ls", "model"), ("tree",), ("cat", "model.w", "0:2"), ("stats",)):
        one, two = (run(command, url, *words) for url in (saved, archive))
        assert (one.exit_code, one.stdout.replace("one", "two.zarr.zip")) == (two.exit_code, two.stdout) and one.stdout
    assert as_json("info", archive)["nbytes"] == as_json("info", saved)["nbytes"]
    assert (
        run("verify", archive).exit_code
        == run("doctor", archive).exit_code
        == run("diff", saved, archive).exit_code
        == 0
    )
    assert run("report", archive, saved, "-o", tmp_path / "page.html").exit_code == 0
    assert run("export", archive, tmp_path / "two.safetensors", "model").exit_code == 0
    assert run("import", tmp_path / "two.safetensors", tmp_path / "imported.zarr.zip").exit_code == 0
    assert run("cp", archive, tmp_path / "three").exit_code == run("cp", tmp_path / "three", copied).exit_code == 0
    sizes = {row["name"]: row["nbytes"] for row in as_json("ls", tmp_path)}
    assert sizes.keys() == {"one", "two.zarr.zip", "three", "three.zarr.zip", "imported.zarr.zip"}
    assert (
        sizes["two.zarr.zip"] == sizes["three.zarr.zip"] == sizes["one"]
        and "nothing to delete" in run("recover", tmp_path).stdout
    )
    assert run("rm", archive, copied, "--yes").exit_code == 0 and not archive.exists() and not copied.exists()
    assert (
        "one.zarr.zip" in run("ls", tmp_path / "one.zarr.zip").stderr
        and "inside an archive" in run("ls", archive / "model").stderr
    )


def test_ls_of_a_run_shows_the_rule_that_keeps_each_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    keep = zarrckpt.Keep(newest=2, best=1, metric="val_loss", every_steps=3)
    manager = zarrckpt.CheckpointManager(folder, keep=keep, signals=(), background=False)
    for step, loss in enumerate((2.0, 1.0, 5.0, 4.0, 3.0), 1):
        manager.save(step, STATE, metrics={"val_loss": loss}, metadata={"lr": step})
    manager.close()
    manager.pin(3)
    zarrckpt.save(STATE, folder / "step-9")
    zarrckpt.copy(folder / "step-00000004", folder / "step-x-4")
    (folder / "step-00000007" / "@zarrckpt").mkdir(parents=True)
    (folder / "step-00000007" / "zarr.json").write_text("{")
    lines = [line.split("\t") for line in run("ls", folder, "--header").stdout.splitlines()]
    assert lines[0] == ["checkpoint", "step", "age", "size", "sent", "val_loss", "kept because"]
    every = run("ls", folder, "--header", "--all").stdout.splitlines()[0].split("\t")
    assert every == ["checkpoint", "step", "age", "size", "sent", "val_loss", "lr", "kept because"]
    assert [(line[0], line[1], line[5], line[-1]) for line in lines[1:]] == [
        ("step-00000002", "2", "1", "best"),
        ("step-00000003", "3", "5", "every 3, pinned"),
        ("step-00000004", "4", "4", "newest"),
        ("step-x-4", "4", "4", "not named by step"),
        ("step-00000005", "5", "3", "newest"),
        ("step-00000007", "", "", ""),
        ("step-9", "7", "", "not of this run"),
    ]
    found = as_json("ls", folder)
    assert [place.get("kept") for place in found][1:4] == [["every 3", "pinned"], ["newest"], ["not named by step"]]
    runs = {place["name"]: place.get("run") for place in found}
    assert runs["step-9"] is runs["step-00000007"] is None and runs["step-x-4"] == runs["step-00000002"]
    assert found[0]["metadata"] == {"step": 2, "val_loss": 1.0, "lr": 2}

    # Checkpoints that the next save deletes, a manager without rules, and a document that cannot be read.
    manager.unpin(3)
    for name in ("step-9", "step-x-4", "step-00000007"):
        zarrckpt.remove(folder / name)
    for rules, kept in ((zarrckpt.Keep(newest=1), [[], [], [], ["newest"]]), (None, [["no rules"]] * 4)):
        again = zarrckpt.CheckpointManager(folder, keep=rules, signals=(), background=False)
        assert again.restore({**STATE, "step": 0}) == 5
        again.close()
        assert [place["kept"] for place in as_json("ls", folder)] == kept
    (folder / "@run" / "zarr.json").write_text("{")
    assert "kept because" not in run("ls", folder, "--header").stdout
    # Without a manager, there is no such column, and no request for it.
    zarrckpt.save(STATE, tmp_path / "others" / "last")
    assert "kept" not in run("ls", tmp_path / "others", "--header").stdout
    assert as_json("ls", tmp_path / "others")[0]["kept"] is None


def test_info_and_the_report_name_the_run(tmp_path: Path) -> None:
    manager = zarrckpt.CheckpointManager(tmp_path / "run", signals=(), background=False)
    manager.save(1, STATE, metrics={"val_loss": 2.0})
    manager.close()
    one = tmp_path / "run" / "step-00000001"
    run_id = zarrckpt.open(one).metadata["zarrckpt.run"]["id"]
    lines = run("info", one).stdout.splitlines()
    assert f"run       {run_id}" in lines and not any("zarrckpt.run" in line for line in lines)
    found = as_json("info", one)
    assert found["run"] == run_id and found["metadata"] == {"step": 1, "val_loss": 2.0}
    zarrckpt.report(one, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert f'"{run_id}"' in page and "zarrckpt.run" not in page


def test_ls_info_and_the_report_show_reused_bytes(tmp_path: Path) -> None:
    state = {"frozen": torch.rand(100, 1000), "adapter": torch.rand(1000)}
    first = zarrckpt.save(state, tmp_path / "run" / "step-1", options=zarrckpt.SaveOptions(reuse="on"))
    state["adapter"] += 1
    two = tmp_path / "run" / "step-2"
    zarrckpt.save(state, two, base=tmp_path / "run" / "step-1")
    lines = [line.split("\t") for line in run("ls", tmp_path / "run", "--header").stdout.splitlines()]
    assert [(line[0], *line[3:5]) for line in lines] == [
        ("checkpoint", "size", "sent"),
        ("step-1", "404 KB", "404 KB"),
        ("step-2", "404 KB", "4 KB"),
    ]
    assert [(row["reused_nbytes"], row["sent_nbytes"]) for row in as_json("ls", tmp_path / "run")] == [
        (0, first.nbytes),
        (first.nbytes - 4004, 4004),
    ]
    rows = dict(line.split(maxsplit=1) for line in run("info", two).stdout.splitlines())
    assert rows["reused"] == f"400 KB of 404 KB, 1 chunk, from save {first.save_id}"
    reused = {"save_id": first.save_id, "objects": 1, "nbytes": first.nbytes - 4004, "saves": 1}
    assert as_json("info", two)["reused"] == reused
    zarrckpt.report(two, tmp_path / "page.html")
    assert json.dumps(reused, separators=(",", ":")) in (tmp_path / "page.html").read_text()
    # Sizes of compressed chunks are in another object than the one that ls reads.
    zarrckpt.save(state, tmp_path / "run" / "step-3", options=zarrckpt.SaveOptions(compression="zstd"))
    assert run("ls", tmp_path / "run").stdout.splitlines()[-1].split("\t")[3:] == ["404 KB", "-"]


def test_piped_tables_have_a_header_on_request(saved: Path, tmp_path: Path) -> None:
    zarrckpt.save({**STATE, "half": torch.zeros(1, 2)}, tmp_path / "two")
    (tmp_path / "two" / "half" / "c.0.0").unlink()
    commands: list[tuple[object, ...]] = [("ls", saved), ("stats", saved), ("diff", saved, saved, "--all")]
    for command in (*commands, ("verify", tmp_path / "two")):
        plain, headed = (run(*command, *more).stdout.splitlines() for more in ((), ("--header",)))
        assert headed[1:] == plain != [] and headed[0].count("\t") == plain[0].count("\t")
    assert run("ls", saved, "--header").stdout.splitlines()[0] == "name\tdtype\tshape or value\tsize"


@pytest.mark.parametrize(
    ("wrong", "right"), [("list", "ls"), ("dif", "diff"), ("copy", "cp"), ("delete", "rm"), ("inof", "info")]
)
def test_an_unknown_command_suggests_a_similar_one(wrong: str, right: str) -> None:
    found = run(wrong, "run/step-1")
    assert found.exit_code == 2 and wrong in found.stderr and f"Did you mean {right}?" in found.stderr
    assert "Did you mean" not in run("frobnicate").stderr


def test_the_error_for_files_of_other_libraries_names_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "x.safetensors"
    zarrckpt.save({"w": torch.ones(3)}, tmp_path / "one")
    zarrckpt.to_safetensors(tmp_path / "one", file)
    zarrckpt.to_safetensors(tmp_path / "one", tmp_path / "folder")
    zarrckpt.to_torch_save(tmp_path / "one", tmp_path / "x.pt")
    zarrckpt.to_dcp(tmp_path / "one", tmp_path / "dcp")
    for place in (file, tmp_path / "folder", tmp_path / "x.pt", tmp_path / "dcp"):
        others = (["cp", place, tmp_path / "out"], ["diff", tmp_path / "one", place], ["verify", place])
        for command in (("ls", place), ("export", place, tmp_path / "out"), *others):
            found = run(*command)
            assert found.exit_code == 3 and f"zarrckpt import {place} " in found.stderr
        doctor = run("doctor", place)
        assert doctor.exit_code and f"zarrckpt import {place} " in doctor.stdout + doctor.stderr
    with pytest.raises(zarrckpt.ForeignObjectsError, match="To save, use another path"):
        zarrckpt.save({"w": torch.ones(3)}, tmp_path / "dcp")
    shutil.make_archive(str(tmp_path / "one"), "tar", tmp_path / "one")
    assert "It is a file. A checkpoint is a folder" in run("ls", tmp_path / "one.tar").stderr
    shutil.copytree(tmp_path / "one", tmp_path / "unpacked.zarr.zip")
    assert "It is a folder. If it is a checkpoint, rename it" in run("ls", tmp_path / "unpacked.zarr.zip").stderr
    # A url never means the local path of its name.
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tmp_path / "folder", tmp_path / "memory:" / "tensors")
    found = run("ls", "memory://tensors")
    assert found.exit_code == 3 and "import" not in found.stderr
    with pytest.raises(zarrckpt.StorageError, match="is a url"):
        zarrckpt.import_checkpoint(Path("memory://tensors"), tmp_path / "new")
    with pytest.raises(zarrckpt.StorageError, match="is a url"):
        zarrckpt.to_safetensors(tmp_path / "one", Path("memory://tensors/x.safetensors"))
    assert "import" not in run("ls", tmp_path / "nothing").stderr


def test_errors_name_the_options_of_the_command(saved: Path, tmp_path: Path) -> None:
    zarrckpt.save({"x": torch.ones(2)}, tmp_path / "two")
    with pytest.warns(UserWarning, match="pickle"):
        zarrckpt.save({"date": datetime.date(2026, 1, 2)}, tmp_path / "pickled")
    (tmp_path / "x.pt").write_bytes(b"")
    for command, flag in [
        (("cp", saved, tmp_path / "two"), "pass --overwrite"),
        (("export", saved, tmp_path / "x.pt"), "pass --overwrite"),
        (("report", saved, "-o", tmp_path / "x.pt"), "pass --overwrite"),
        (("export", tmp_path / "pickled", tmp_path / "y.pt"), "--allow-pickle"),
        (("ls", "s3://bucket/run", "-o", "anon=true", "-o", "typo=1"), "--storage-option backend=fsspec"),
        (("ls", saved, "-o", "key=1"), "has no --storage-option"),
        (("cat", tmp_path / "pickled", "date"), "in Python"),
    ]:
        found = run(*command)
        assert found.exit_code == 3 and flag in found.stderr
        assert "=True)" not in found.stderr and "storage_options" not in found.stderr


def test_control_characters_in_names_are_escaped(tmp_path: Path) -> None:
    for name, number in (("one", 1), ("two", 2)):
        state = {"evil\x1b[2J": torch.full((2,), float(number)), "v\x1b[2J": number, f"{number}\x1b[2J": number}
        zarrckpt.save(state, tmp_path / name)
    one, two = tmp_path / "one", tmp_path / "two"
    for command in (["ls", one], ["tree", one], ["info", one], ["stats", one], ["diff", one, two], ["cat", one, "x"]):
        found = run(*command)
        assert "\x1b" not in found.stdout + found.stderr and "x1b[2J" in found.stdout + found.stderr, command


def test_tree_shows_nested_values(saved: Path) -> None:
    lines = run("tree", saved).stdout.splitlines()
    assert lines[1:4] == ["├── model  64 B", "│   ├── w  float32 (3, 4)  48 B", "│   └── b  float32 (4,)  16 B"]
    assert "├── model  2 entries  64 B" in run("tree", saved, "--depth", 1).stdout.splitlines()
    assert run("tree", saved, "model.b").stdout.splitlines()[1:] == ["└── model.b  float32 (4,)  16 B"]
    found = as_json("tree", saved)
    assert found["tree"]["model"]["entries"]["w"]["shape"] == [3, 4] and found["tree"]["step"]["value"] == 7


def test_tree_splits_names_at_dots(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Sequential(torch.nn.LayerNorm(3, bias=False)))
    zarrckpt.save({"step": 1, "net.model": model.state_dict(), "net": 2}, tmp_path / "one")
    assert run("tree", tmp_path / "one").stdout.splitlines()[1:] == [
        "├── step  value 1",
        "├── net.model  48 B",
        "│   ├── 0  36 B",
        "│   │   ├── weight  float32 (3, 2)  24 B",
        "│   │   └── bias  float32 (3,)  12 B",
        "│   └── 1.0.weight  float32 (3,)  12 B",
        "└── net  value 2",
    ]
    assert "│   ├── 0  2 entries  36 B" in run("tree", tmp_path / "one", "--depth", 2).stdout.splitlines()


def test_info_shows_sizes_step_and_layout(saved: Path) -> None:
    text = run("info", saved).stdout
    rows = dict(line.split(maxsplit=1) for line in text.splitlines() if not line.startswith(" "))
    assert rows["tensors"] == "3 with 18 elements, 68 B" and rows["step"] == "7"
    assert rows["values"] == "1, and 1 kept as bytes, 100 KB"
    assert "not compressed" in text and rows["layout"] == "4 chunks, 4 subchunks"
    assert rows["saved"].endswith(" UTC by 1 rank")
    assert "half" in text and "half.*" not in text
    found = as_json("info", saved)
    assert (found["step"], found["tensors"], found["blobs"], found["nbytes"]) == (7, 3, 1, 100_068)
    assert rows["size"] == "100 KB" and as_json("tree", saved)["nbytes"] == found["nbytes"] == sum(
        found["groups"].values()
    )
    assert found["dtypes"]["bfloat16"] == {"tensors": 1, "elements": 2, "nbytes": 4}


def test_info_of_a_damaged_checkpoint(tmp_path: Path) -> None:
    zarrckpt.save({"w": torch.zeros(70, 80)}, tmp_path / "one", options=zarrckpt.SaveOptions(compression="zstd"))
    assert "compressed by zstd" in run("info", tmp_path / "one").stdout
    (table,) = tmp_path.rglob("sizes/c.0")
    table.unlink()
    assert as_json("info", tmp_path / "one")["nbytes_stored"] is None
    assert "run zarrckpt verify" in run("info", tmp_path / "one").stdout


def test_cat_shows_values_slices_and_corners(saved: Path) -> None:
    assert run("cat", saved, "step").stdout == "7\n"
    assert as_json("cat", saved, "model.w", "1:3,::2")["values"] == [[4.0, 6.0], [8.0, 10.0]]
    assert as_json("cat", saved, "half")["values"] == [[1.5, -2.0]]
    text = run("cat", saved, "model.b").stdout
    assert "nan 1  inf 1  of 4" in text and "max 1" in text
    assert as_json("cat", saved, "model.w", "-1,-2:")["values"] == [10.0, 11.0]
    assert "no elements: this part has the shape (0, 4)" in run("cat", saved, "model.w", "3:").stdout
    assert "96,003 characters more" in run("cat", saved, "blob").stdout


def test_cat_shows_the_corner_of_a_large_tensor(tmp_path: Path) -> None:
    zarrckpt.save({"w": torch.arange(4 * 3 * 9 * 8).reshape(4, 3, 9, 8)}, tmp_path / "one")
    text = run("cat", tmp_path / "one", "w").stdout
    assert "[:2, :2, :6, :6]" in text and "min 0  max 863" in text


def test_integers_are_shown_exactly(tmp_path: Path) -> None:
    ids = torch.tensor([123456789, 2**63 - 1, -(2**63)])
    zarrckpt.save({"ids": ids, "u": torch.tensor([2**64 - 1], dtype=torch.uint64)}, tmp_path / "one")
    rows = [line.split("\t")[:3] for line in run("stats", tmp_path / "one").stdout.splitlines()]
    assert rows == [["ids", str(-(2**63)), str(2**63 - 1)], ["u", str(2**64 - 1), str(2**64 - 1)]]
    text = run("cat", tmp_path / "one", "ids").stdout
    assert f"max {2**63 - 1}" in text and "123456789" in text
    assert as_json("stats", tmp_path / "one")["u"]["max"] == 2**64 - 1


def test_cat_refuses_slices_of_values_and_unknown_options(saved: Path) -> None:
    assert "SLICE" in run("cat", saved, "step", "0").stderr
    for word in ("--jsn", "-q"):
        found = run("cat", saved, "model.w", word)
        assert found.exit_code == 2 and f"No such option '{word}'" in found.stderr


@pytest.mark.parametrize("slice_", ["1:2:3:4", "x", "7", "0,0,0", "1.5", "::0", "::-1", "-4"])
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


def test_a_share_is_100_percent_only_if_complete(tmp_path: Path) -> None:
    zeros = {"few": (3, 2), "most": (100_000, 99_999), "many": (10_000, 9_997), "all": (4, 4), "one": (100_000, 1)}
    state = {name: (torch.arange(size) >= part).float() for name, (size, part) in zeros.items()} | {
        "none": torch.ones(0)
    }
    zarrckpt.save(state, tmp_path / "one")
    rows = [line.split("\t") for line in run("stats", tmp_path / "one", "--sort", "zeros").stdout.splitlines()]
    assert [(row[0], row[6]) for row in rows] == [
        ("all", "100%"),
        ("most", "> 99.99%"),
        ("many", "99.97%"),
        ("few", "66.7%"),
        ("one", "< 0.01%"),
        ("none", "-"),
    ]
    zarrckpt.save({name: value + (value == 0).float() for name, value in state.items()}, tmp_path / "two")
    rows = [line.split("\t") for line in run("diff", tmp_path / "one", tmp_path / "two").stdout.splitlines()]
    unequal = {row[0]: row[1] for row in rows}
    assert (unequal["most"], unequal["many"], unequal["one"]) == ("> 99.99%", "99.97%", "< 0.01%")
    assert str(zarrckpt.plan_report({"w": torch.ones(3)})).startswith("12 B from 1 rank: 1 chunk object, ")


def test_ls_shows_no_fraction_as_a_whole_number(tmp_path: Path) -> None:
    numbers = {
        "a": 0.999999999,
        "b": 1.0000001,
        "c": 2.0,
        "d": 0.123456789,
        "e": 1234567.5,
        "f": 1e-300,
        "g": 123456789.0,
    }
    zarrckpt.save(STATE, tmp_path / "run" / "step-1", metadata=numbers)
    (line,) = run("ls", tmp_path / "run", "--all").stdout.splitlines()
    assert line.split("\t")[4:] == ["0.999999999", "1.0000001", "2", "0.123457", "1234567.5", "1e-300", "123456789"]


def test_diff_lists_differences(saved: Path, tmp_path: Path) -> None:
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
    exact = {"count": 12, "unequal": 11, "max_abs": 11.0, "max_abs_at": [2, 3], "max_rel": 0.5, "rel_norm": 1.0}
    exact |= dict.fromkeys(("not_finite", "new_nan", "gone_nan", "common_nan"), 0)
    same_dtype = {"beyond_rounding": 11, "dtypes": ["float32", "float32"]}
    assert numbers == {**exact, **same_dtype, "cosine": pytest.approx(1.0)}
    assert found.stderr == "0 tensors equal, 1 not; 2 other entries changed; 1 only in A, 1 only in B\n"


def test_diff_of_a_copy_of_another_dtype(tmp_path: Path) -> None:
    values = torch.linspace(-1, 1, 999)
    copy = values.bfloat16()
    copy[7] = 3
    zarrckpt.save({"w": values, "half": torch.ones(4), "step": 1}, tmp_path / "one")
    zarrckpt.save({"w": copy, "half": torch.ones(4).half(), "step": 1}, tmp_path / "two")
    found = run("diff", tmp_path / "one", tmp_path / "two")
    rows = {line.split("\t")[0]: line.split("\t")[1:] for line in found.stdout.splitlines()}
    assert found.exit_code == 1 and set(rows) == {"w", "half"}
    assert rows["w"][-2:] == ["float32 -> bfloat16", "1"] and rows["half"] == [
        *("0%", "0", "-", "0", "0", "0", "1.000000000", "-", "float32 -> float16", "0")
    ]
    summary = "0 tensors equal, 2 not (1 only rounded to another dtype); 0 other entries changed"
    assert found.stderr == f"{summary}; 0 only in A, 0 only in B\n"


def test_diff_sorts_and_adds_up_groups(tmp_path: Path) -> None:
    ids = torch.arange(6).reshape(2, 3) + 2**60
    half = torch.arange(4.0)
    one = {"m": {"a": torch.ones(3), "b": torch.zeros(2), "c": torch.ones(9)}, "ids": ids, "half": half}
    other = {**one, "m": {"a": torch.tensor([1.0, 1, 1.5]), "b": torch.ones(2), "c": torch.ones(9)}, "ids": ids.clone()}
    other["ids"][1, 1] += 3  # type: ignore[index]
    other["half"] = torch.where(half < 2, torch.nan, half)
    for name, state in (("one", one), ("two", other)):
        zarrckpt.save(state, tmp_path / name)
    found = run("diff", tmp_path / "one", tmp_path / "two", "--sort", "rel_norm", "--header")
    columns, *rows = [line.split("\t") for line in found.stdout.splitlines()]
    cells = {row[0]: dict(zip(columns, row, strict=True)) for row in rows}
    assert [*cells] == ["m.b", "half", "m.a", "ids"] and cells["m.b"]["rel norm"] == "inf"
    assert (cells["ids"]["max abs"], cells["ids"]["at"]) == ("3", "[1, 1]")
    half_row = {name: cells["half"][name] for name in ("nan", "rel norm", "cosine")}
    assert half_row == {"nan": "2 new", "rel norm": "-", "cosine": "-"}
    columns, *rows = [
        line.split("\t")
        for line in run("diff", tmp_path / "one", tmp_path / "two", "--groups", "--header").stdout.splitlines()
    ]
    assert [(row[0], *row[-2:]) for row in rows] == [("m", "2", "3"), ("ids", "1", "1"), ("half", "1", "1")]
    group = as_json("diff", tmp_path / "one", tmp_path / "two")["groups"]["m"]
    assert group["rel_norm"] == pytest.approx((2.25 / 12) ** 0.5) and (group["count"], group["unequal"]) == (14, 3)
    assert group["cosine"] == pytest.approx(12.5 / (12 * 15.25) ** 0.5)


@pytest.mark.parametrize(
    ("one", "other", "here", "there"),
    [
        ((0,) * 50 + ({"lr": 0.1},), (0,) * 50 + ({"lr": 0.2},), "value[50]['lr'] 0.1", "value[50]['lr'] 0.2"),
        (("x" * 99 + "a",), ("x" * 99 + "b",), "value[0][99:] 'a'", "value[0][99:] 'b'"),
        ([*range(60)], [*range(61)], "value[60] absent", "value[60] 60"),
        (
            ({"k": 1, "l": "y" * 90},),
            ({"l": "y" * 90, "k": 1},),
            "value[0].keys() ['k', 'l']",
            "value[0].keys() ['l', 'k']",
        ),
        ([0] * 50 + [1], [0] * 50 + [True], "value[50] 1", "value[50] True"),
        (b"x" * 70_000, b"x" * 70_001, "raw bytes, 70,000 bytes", "raw bytes, 70,001 bytes"),
        (torch.ones(2), 7, "float32 (2,)", "value 7"),
    ],
)
def test_diff_shows_the_first_difference_in_a_value(
    one: Any, other: Any, here: str, there: str, tmp_path: Path
) -> None:
    for name, value in (("one", one), ("two", other)):
        zarrckpt.save({"v": value}, tmp_path / name)
    found = run("diff", tmp_path / "one", tmp_path / "two")
    assert found.stdout == f"! v: {here} -> {there}\n" and found.exit_code == 1
    assert run("diff", tmp_path / "one", tmp_path / "one").exit_code == 0


def test_texts_of_unequal_values_differ(tmp_path: Path) -> None:
    pairs = {"blob": (b"x" * 70_000, b"y" * 70_000), "big": (10**5000, 10**5000 + 1), "in": ([10**5000], [10**5001])}
    for side, name in enumerate(("one", "two")):
        zarrckpt.save({key: pair[side] for key, pair in pairs.items()}, tmp_path / name)
    found = zarrckpt.diff(tmp_path / "one", tmp_path / "two")
    assert {*found.changed} == {*pairs} and all(here != there for here, there in found.changed.values())


def test_diff_takes_options_for_each_store(saved: Path, moto_bucket: S3Place) -> None:
    url, options = moto_bucket.url("one"), moto_bucket.storage_options
    zarrckpt.save(STATE, url, storage_options=options)
    words = [f"{name}={json.dumps(value)}" for name, value in options.items()]
    for_a, for_b = ([part for word in words for part in (letter, word)] for letter in ("-o", "-t"))
    assert run("diff", saved, url, *for_b).exit_code == 0
    assert run("diff", url, saved, *for_a).exit_code == 0
    assert run("diff", url, url, *for_a).exit_code == 0


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


def test_recover_fixes_the_problem_that_doctor_finds(saved: Path) -> None:
    assert run("doctor", saved).exit_code == 0
    with pytest.raises(BaseException):  # noqa: B017 - DCP wraps what stops it
        zarrckpt.save(STATE, FaultyStore(saved, at(12, STOP)), overwrite=True)
    found = run("doctor", saved)
    assert found.exit_code == 1 and "could still commit" in found.stdout and "--stopped" in found.stdout
    assert "kept" in run("recover", saved).stdout
    assert "of 1 save deleted" in run("recover", saved, "--stopped").stdout
    assert run("recover", saved).stdout == "nothing to delete\n"
    assert run("doctor", saved).exit_code == 0
    assert run("verify", saved).exit_code == 0


def test_rm_asks_and_deletes(saved: Path) -> None:
    for answer in ("n\n", ""):
        asked = CliRunner().invoke(main, ["rm", str(saved)], input=answer)
        assert asked.exit_code == 3 and "--yes" in asked.stderr and zarrckpt.open(saved).verify()
    assert run("rm", saved, "--yes").exit_code == 0
    assert not list(saved.rglob("*")) or not saved.exists()
    found = run("rm", saved)  # no checkpoint exists: no question
    assert found.exit_code == 3 and "Delete it?" not in found.output


def test_recover_and_rm_continue_after_an_error(tmp_path: Path) -> None:
    folder, names = tmp_path / "run", ("a", "b", "c", "d")
    for name in names:
        zarrckpt.save(STATE, folder / name)
    for name in names[1:]:
        with pytest.raises(BaseException):  # noqa: B017 - DCP wraps what stops it
            zarrckpt.save(STATE, FaultyStore(folder / name, at(12, STOP)), overwrite=True)
    (folder / "b" / "zarr.json").write_text("{")
    found = run("recover", folder, "--stopped")
    assert found.exit_code == 3 and found.stderr.startswith("b: ") and found.stderr.count("\n") == 1
    assert [line.split(" ", 1)[0] for line in found.stdout.splitlines()] == ["a:", "c:", "d:"]
    assert all(f"{name}: 1" in found.stdout for name in "cd")
    found = run("recover", folder, "--json")
    assert found.exit_code == 3 and found.stderr.startswith("b: ")
    assert [bool(part["error"]) for part in json.loads(found.stdout)["checkpoints"]] == [False, True, False, False]

    (folder / "c" / "notes.txt").write_text("keep me")
    zarrckpt.pin(folder / "a", "in use")
    found = run("rm", *(folder / name for name in (*names, "e")), "--yes", "--json")
    errors = {Path(item["url"]).name: item.get("error", "") for item in json.loads(found.stdout)}
    assert found.exit_code == 3 and sorted(os.listdir(folder)) == ["a", "c"]
    kinds = ("CheckpointPinnedError", "ForeignObjectsError", "CheckpointNotFoundError")
    assert [errors[name].partition(":")[0] for name in "ace"] == [*kinds] and errors["b"] == errors["d"] == ""
    assert [line.split(": ")[:2] for line in found.stderr.splitlines()] == [
        [str(folder / name), kind] for name, kind in zip("ace", kinds, strict=True)
    ]
    zarrckpt.save(STATE, folder / "f")
    asked = CliRunner().invoke(main, ["rm", str(folder / "c"), str(folder / "f")], input="y\n")
    assert asked.exit_code == 3 and "notes.txt" in asked.stderr and sorted(os.listdir(folder)) == ["a", "c"]


def test_doctor_distinguishes_damage_from_leftovers(saved: Path) -> None:
    root = saved / "zarr.json"
    root.write_bytes(root.read_bytes().replace(b"model", b"mudel", 1))
    found = as_json("doctor", saved)
    assert "damaged" in found["state"] and found["advice"] == [f"zarrckpt rm {saved}"]
    assert "save " not in " ".join(found["findings"]).replace("save again", "")


def test_urls_without_a_checkpoint_are_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("keep me")
    for command in (["rm", tmp_path, "--yes"], ["recover", tmp_path], ["ls", tmp_path], ["ls", tmp_path / "nothing"]):
        found = run(*command)
        assert found.exit_code == 3 and found.stderr.startswith("zarrckpt: ")
    assert (tmp_path / "notes.txt").read_text() == "keep me"
    assert run("ls").exit_code == 2 and run("nonsense").exit_code == 2
    assert run("ls", tmp_path, "-o", "half").exit_code == 2


def test_wrong_names_and_urls_suggest_right_ones(saved: Path) -> None:
    assert "did you mean one of ['model.w', " in run("cat", saved, "model.W").stderr
    assert "did you mean 'model.w'?" in run("ls", saved, "del.w").stderr
    assert "'model'" in run("ls", saved, "modle").stderr
    found = run("cat", saved, "model")
    assert found.exit_code == 3 and "a group with 2 entries: model.w, model.b" in found.stderr
    found = run("ls", saved / "model")
    message = f"inside the checkpoint {saved}: use that url: zarrckpt ls {saved} model"
    assert found.exit_code == 3 and message in found.stderr
    for unknown, message in {"foo://b/run": "s3, gs, az and file", "gdrive://x/y": "pip install gdrive_fsspec"}.items():
        assert message in run("ls", unknown).stderr
    assert f"the newest is {saved}" in run("tree", saved.parent).stderr


def test_an_option_of_the_wrong_store_is_named_as_typed(saved: Path) -> None:
    found = run("cp", saved, "s3://b/x", "-o", "endpoint_url=http://127.0.0.1:9")
    assert "has no --storage-option" in found.stderr and "-t for the second" in found.stderr
    for words in (["diff", saved, saved], ["cp", saved, saved.parent / "two"]):
        found = run(*words, "-t", "foo=1")
        assert found.exit_code == 3 and "has no --storage-option (got ['foo'])" in found.stderr
        assert found.stderr.endswith("-o is for the first url, -t for the second\n")


@pytest.mark.parametrize("damage", ["altered chunk", "missing chunk", "missing table"])
@pytest.mark.parametrize("compression", [None, "zstd"])
def test_errors_name_the_damaged_one_of_two_urls(damage: str, compression: Any, tmp_path: Path) -> None:
    whole, broken = tmp_path / "one", tmp_path / "two"
    for number, url in enumerate((whole, broken)):
        zarrckpt.save({"w": torch.arange(99.0) + number}, url, options=zarrckpt.SaveOptions(compression=compression))
    chunk = next(broken.glob("@zarrckpt/*/checksums/c.0")) if damage == "missing table" else broken / "w" / "c.0"
    chunk.write_bytes(b"?" * chunk.stat().st_size) if damage == "altered chunk" else chunk.unlink()
    page = tmp_path / "page.html"
    for words in (["diff", whole, broken], ["diff", broken, whole], ["report", whole, broken, "-o", page]):
        found = run(*words)
        assert found.exit_code == 3 and f"zarrckpt verify {broken}." in found.stderr
        assert f"verify {whole}" not in found.stderr
    for options in ([], ["--dtype", "bfloat16"]):
        found = run("cp", broken, tmp_path / "copy", *options)
        assert found.exit_code == 3 and "CorruptCheckpointError" in found.stderr
        assert f"zarrckpt verify {broken}." in found.stderr
    with pytest.raises(zarrckpt.CorruptCheckpointError, match=f"zarrckpt verify {broken}\\. Load"):
        zarrckpt.diff(whole, broken)


def test_a_comparison_with_a_replaced_checkpoint_names_it(tmp_path: Path) -> None:
    for name in ("one", "two"):
        zarrckpt.save({"w": torch.ones(9)}, tmp_path / name)
    one, two = zarrckpt.open(tmp_path / "one"), zarrckpt.open(tmp_path / "two")
    two.read()  # It has its tables now, so only the chunk can show that it was replaced.
    zarrckpt.save({"w": torch.zeros(9)}, tmp_path / "two", overwrite=True)
    for pair in ((one, two), (two, one)):
        with pytest.raises(zarrckpt.CheckpointReplacedError, match=f"{tmp_path / 'two'}"):
            zarrckpt.diff(*pair)


def test_errors_of_a_copy_name_the_options_of_both_urls(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise zarrckpt.StorageError(f"reading 'w' in {saved} failed: pass storage_options={{'region': 'x'}}")

    monkeypatch.setattr(zarrckpt, "copy", fail)
    found = run("cp", saved, saved.parent / "two").stderr
    assert "pass --storage-option region=x. -o is for the first url, -t for the second" in found


def test_a_copy_to_an_unreachable_server_is_an_error(saved: Path) -> None:
    options = [f"endpoint_url=http://127.0.0.1:{free_port()}", "key=x", "secret=x", "region=us-east-1"]
    found = run("cp", saved, "s3://b/x", *(part for word in options for part in ("-t", word)))
    assert found.exit_code == 3 and "refuses connections" in found.stderr


COMMANDS: dict[str, list[Any]] = {
    "verify": [],
    "cp": ["B"],
    "export": ["C"],
    "report": ["--output", "D.html"],
    "cat": ["model.b"],
    "diff": ["B"],
}


def test_every_command_has_json(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line on standard output, without the numbers that JSON lacks."""
    monkeypatch.chdir(tmp_path)
    commands = [name for name in main.list_commands(click.Context(main)) if name not in ("import", "rm")]
    lines = [[name, "one", *COMMANDS.get(name, [])] for name in sorted(commands, key=[*COMMANDS, *commands].index)]
    for words in [*lines, ["import", "C", "E"], ["rm", "B", "--yes"]]:
        found = run(*words, "--json")
        assert found.exit_code in (0, 1) and found.stdout.count("\n") == 1, (words, found.output)
        json.loads(found.stdout, parse_constant=pytest.fail)


PROGRAM = [sys.executable, "-m", "zarrckpt.cli"]


def test_an_interrupt_ends_a_wait_for_a_server() -> None:
    """The main thread is inside the client then, and cannot handle signals there."""
    with socket.create_server(("127.0.0.1", port := free_port())) as server:
        options = [f"endpoint_url=http://127.0.0.1:{port}", "key=x", "secret=x", "region=us-east-1"]
        words = [*PROGRAM, "ls", "s3://bucket/run", *(part for word in options for part in ("-o", word))]
        # A shell starts background processes with interrupts ignored, and their children inherit that.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as command:
            connection, _ = server.accept()
            assert connection.recv(4) == b"GET "
            command.send_signal(signal.SIGINT)
            try:
                _, message = command.communicate(timeout=30)
            finally:
                command.kill()
                connection.close()
    assert command.returncode == 130 and message == "zarrckpt: interrupted\n"


def test_an_interrupt_at_a_prompt_ends_the_command(saved: Path) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with subprocess.Popen(
        [*PROGRAM, "rm", saved], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as command:
        assert command.stderr is not None
        asked = b""
        while b"Delete it?" not in asked:
            asked += command.stderr.read1()
        command.send_signal(signal.SIGINT)
        assert command.wait(30) == 130 and command.stderr.read().endswith(b"zarrckpt: interrupted\n")
    assert zarrckpt.open(saved).verify()


def test_a_closed_pipe_is_not_an_error(saved: Path) -> None:
    for words in (["ls", saved], ["--help"]):
        with subprocess.Popen([*PROGRAM, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as command:
            assert command.stdout is not None and command.stderr is not None
            command.stdout.close()
            assert command.stderr.read() == "" and command.wait(20) == 0


NAMES = {"modèle": {"ü": torch.ones(2), "ü2": 1}, "漢字": 1}
ENCODINGS: list[tuple[dict[str, str], str, list[str]]] = [
    ({"PYTHONIOENCODING": "latin-1"}, "latin-1", ["|-- modèle  8 B", "|   |-- ü  float32 (2,)  8 B"]),
    (
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        "ascii",
        ["|-- mod\\xe8le  8 B", "|   |-- \\xfc  float32 (2,)  8 B"],
    ),
    (
        {"PYTHONIOENCODING": "utf-8"},
        "utf-8",
        ["├── modèle  8 B", "│   ├── ü  float32 (2,)  8 B", "│   └── ü2  value 1"],
    ),
]


@pytest.mark.parametrize(("variables", "encoding", "lines"), ENCODINGS)
def test_output_uses_the_configured_encoding(
    variables: dict[str, str], encoding: str, lines: list[str], tmp_path: Path
) -> None:
    zarrckpt.save(NAMES, tmp_path / "ünï")
    environment = {**os.environ, **variables}
    found = subprocess.run([*PROGRAM, "tree", tmp_path / "ünï"], capture_output=True, env=environment)
    text = found.stdout.decode(encoding).splitlines()
    assert (found.returncode, found.stderr, text[1 : 1 + len(lines)]) == (0, b"", lines)
    # Names of files and patterns are UTF-8 all the same.
    words = ["stats", tmp_path / "ünï", "modèle.ü", "漢字", "nö"]
    found = subprocess.run([*PROGRAM, *words], capture_output=True, env=environment)
    assert found.returncode == 3 and found.stderr.startswith(b"zarrckpt: KeyMismatchError: ")
    assert "'n\\xf6'" in found.stderr.decode(encoding) or "'nö'" in found.stderr.decode(encoding)


@pytest.mark.parametrize(
    ("redirection", "status", "message"),
    [
        (">/dev/full", 3, "standard output failed: No space left"),
        (">&-", 1, "1 damaged"),
        ("<&- >&- 2>&-", 1, ""),
        ("2>/dev/full", 1, ""),
    ],
)
def test_closed_streams_do_not_change_the_exit_code(redirection: str, status: int, message: str, saved: Path) -> None:
    """A result that cannot be written is an error. Messages that cannot be written are left out."""
    (saved / "half" / "c.0.0").unlink()
    found = subprocess.run(
        ["sh", "-c", f'"$@" {redirection}', "sh", *PROGRAM, "verify", saved], capture_output=True, text=True
    )
    assert found.returncode == status and message in found.stderr and found.stderr.count("\n") <= 1
    if message.startswith("standard"):
        helped = subprocess.run(["sh", "-c", f'"$@" {redirection}', "sh", *PROGRAM, "-h"], capture_output=True)
        assert helped.returncode == status and helped.stderr.count(b"\n") == 1


def test_an_unexpected_error_has_its_own_exit_code(saved: Path) -> None:
    """Also for an error that is no Exception, such as panics of clients."""
    code = (
        "import sys, zarrckpt.cli, zarrckpt._ops.recover as module\n"
        "class Panic(BaseException): ...\n"
        "def examine(*arguments, **options): raise Panic('b\x1b[2J')\n"
        "module.examine = examine; sys.argv[0] = 'zarrckpt'; zarrckpt.cli.main()"
    )
    words = [sys.executable, "-c", code, "doctor", saved]
    found = subprocess.run(words, capture_output=True, text=True)
    assert found.returncode == 70 and "Panic: b\\x1b[2J (" in found.stderr and "report it" in found.stderr
    assert "Traceback" not in found.stderr and found.stdout == ""
    traced = subprocess.run(words, capture_output=True, text=True, env={**os.environ, "ZARRCKPT_TRACEBACK": "1"})
    assert traced.returncode == 70 and "Traceback" in traced.stderr and ", in examine" in traced.stderr


def on_a_terminal(*words: str, **environment: str) -> str:
    """Return the output of a command on a terminal."""
    ours, theirs = os.openpty()
    with subprocess.Popen([*PROGRAM, *words], stdout=theirs, env={**os.environ, **environment}) as command:
        os.close(theirs)
        text = b""
        with contextlib.suppress(OSError):  # the terminal is gone when the command has ended
            while part := os.read(ours, 4096):
                text += part
        assert command.wait(20) == 0
    os.close(ours)
    return text.decode()


def test_tables_fit_narrow_terminals_and_need_no_colour(tmp_path: Path) -> None:
    zarrckpt.save({"weights": torch.ones(2, 3), "words": "long " * 12, "ünï✓漢字": 7}, tmp_path / "one")
    plain = on_a_terminal("ls", str(tmp_path / "one"), NO_COLOR="1", COLUMNS="44").split("\r\n")
    assert plain[0] == "name      dtype    shape or value       size"
    assert plain[1] == "weights   float32  (2, 3)               24 B"
    assert plain[2].rstrip() == "words     value    'long long long lo…"
    assert plain[3].startswith("ünï✓漢字  value")  # two cells a character
    assert on_a_terminal("ls", str(tmp_path / "one"), NO_COLOR="").startswith("\x1b[2mname")


def test_integers_beyond_pythons_digit_limit_are_shown(tmp_path: Path) -> None:
    url, other = str(tmp_path / "a"), str(tmp_path / "b")
    zarrckpt.save({"big": 10**5000, "in a list": [1, 10**5000]}, url)
    zarrckpt.save({"big": 10**5000 + 1, "in a list": [1, 10**5000]}, other)
    for command in ("ls", "tree", "info", "report"):
        arguments = ["-o", str(tmp_path / "page.html")] if command == "report" else []
        assert run(command, url, *arguments).exit_code == 0
    assert "4,300 digits" in run("cat", url, "big").stdout
    assert int(json.loads(run("cat", url, "big", "--json").stdout), 16) == 10**5000
    assert [*zarrckpt.diff(url, other).changed] == ["big"]
    assert "4,300 digits" in zarrckpt.open(url)._repr_html_()
