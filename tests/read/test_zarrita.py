"""Checkpoints read by zarrita, a library for JavaScript: its table in ``docs/reference/readers.md``, and the recipe.

These tests need Node and the packages of ``tests/zarrita``, which ``make zarrita`` installs.
"""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import ROOT
from harness.s3_server import S3Server
from test_readers_table import TYPES, Case, as_table, cell, make_rows, on_the_page

import zarrckpt

pytestmark = pytest.mark.node

FOLDER = ROOT / "tests" / "zarrita"
RECIPES = ROOT / "docs" / "how-to" / "read.md"
READABLE = ["bool", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)), "float32", "float64"]
"""Data types that zarrita reads in every version of Node."""


def run_node(*arguments: str, text: str = "", folder: Path | None = None) -> str:
    done = subprocess.run(
        ["node", *arguments], input=text, capture_output=True, text=True, cwd=folder, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module", autouse=True)
def _installed() -> None:
    if not shutil.which("node"):
        pytest.skip("Node is not installed")
    if not (FOLDER / "node_modules" / "zarrita").is_dir():
        pytest.skip("zarrita is not installed: make zarrita")


def serve(stub: S3Server, folder: Path) -> None:
    """Add the files below a folder to an HTTP server."""
    for file in filter(Path.is_file, folder.rglob("*")):
        stub.put_object(file.relative_to(folder).as_posix(), file.read_bytes())


def over_http(stub: S3Server, case: Case) -> str:
    return f"{stub.endpoint}/{Path(case.url).name}"


def answers_by_row(asked: dict[str, list[tuple[str, Case]]]) -> dict[str, str]:
    """Return the table's cell for each row of (place, case). One Node process reads them all."""
    places = [item for row in asked.values() for item in row]
    parts = [{"place": place, "path": case.path} | ({"box": case.box} if case.box else {}) for place, case in places]
    answers = map(_as_probed, json.loads(run_node(str(FOLDER / "read.mjs"), text=json.dumps(parts))))
    return {row: cell([case for _, case in items], answers) for row, items in asked.items()}


def _as_probed(answer: dict[str, Any]) -> tuple[str, Any]:
    """Return an answer in the form of ``plain_readers.probe``."""
    if "error" in answer:
        return "raised", answer["error"]
    return "read", (answer["dtype"], tuple(answer["shape"]), base64.b64decode(answer["data"]))


def test_the_table_matches_zarrita(tmp_path: Path) -> None:
    rows, archive = make_rows(tmp_path), tmp_path / "large.zarr.zip"
    for row in rows.keys() - TYPES.keys():
        rows[row] = [case for case in rows[row] if case.expected[0] in READABLE]
    subchunks = rows["subchunks (`sharding_indexed`)"]
    zarrckpt.copy(tmp_path / "large", archive)
    with S3Server() as stub:
        serve(stub, tmp_path)
        asked = {
            row: [(place, case) for case in rows[row] for place in (case.url, over_http(stub, case))] for row in rows
        }
        row = "an archive, one ZIP file"
        stub.put_object("zip/x.zarr.zip", Path(rows[row][0].url).read_bytes())
        asked[row] = [(place, case) for case in rows[row] for place in (case.url, f"{stub.endpoint}/zip/x.zarr.zip")]
        asked["subchunks in an archive, one ZIP file"] = [(str(archive), case) for case in subchunks]
        found = answers_by_row(asked)
        stub.faults.ignore_ranges = True
        row = "subchunks, the server ignores `Range`"
        found |= answers_by_row({row: [(over_http(stub, case), case) for case in subchunks]})

    has_float16 = run_node("-p", "typeof Float16Array").strip() == "function"
    assert found["float16"] == ("yes" if has_float16 else "error")
    found["float16"] = "Node 24: yes; Node 22: error"
    text = as_table(["", "zarrita"], found.items())
    assert text == on_the_page("zarrita"), f"put this on the page:\n{text}"


@pytest.mark.parametrize("overwritten", [False, True])
def test_the_recipe_reads_a_tensor(overwritten: bool, tmp_path: Path) -> None:
    url = tmp_path / "run" / "step-100"
    for _ in range(1 + overwritten):
        zarrckpt.save({"model": {"norm": torch.arange(16.0)}}, url, overwrite=True)
    (recipe,) = re.findall(r"^```js\n(.*?)^```$", RECIPES.read_text(), re.DOTALL | re.MULTILINE)
    (tmp_path / "node_modules").symlink_to(FOLDER / "node_modules")
    with S3Server() as stub:
        serve(stub, tmp_path / "run")
        (tmp_path / "recipe.mjs").write_text(recipe.replace("https://example.org/run", stub.endpoint))
        printed = run_node("recipe.mjs", folder=tmp_path)
    assert printed == "float32 [ 16 ] 0 4\n"


def test_the_pinned_version_is_the_documented_one() -> None:
    version = json.loads((FOLDER / "package.json").read_text())["dependencies"]["zarrita"]
    assert f"npm install zarrita@{version}" in RECIPES.read_text()
