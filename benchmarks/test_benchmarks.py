"""The benchmark command, its tables, and bytes that loads on other meshes fetch. Nothing is timed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.report import write_page
from benchmarks.results import Figure, Results, Speed
from benchmarks.subchunk_rules import CHANGES, alone, together

ROOT = Path(__file__).parent.parent


def test_the_command_writes_tables_and_json(tmp_path: Path) -> None:
    page, data = tmp_path / "speed.md", tmp_path / "found.json"
    page.write_text("# Mine\n\nabove\n\n<!-- benchmarks: begin -->\nold\n<!-- benchmarks: end -->\n\nbelow\n")
    command = [sys.executable, "-m", "benchmarks", "--quick", "--gigabytes", "0.001", "--folder", str(tmp_path)]
    command += ["--only", "startup", "subchunks", "--json", str(data), "--page", str(page)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = {figure["what"]: figure for figure in json.loads(data.read_text())["figures"]}
    # The figure itself is a difference of two times, and may be anything.
    assert found["import zarrckpt, beyond an empty process"]["note"].startswith("loads none of")
    text = page.read_text()
    assert text.startswith("# Mine\n\nabove\n") and text.endswith("<!-- benchmarks: end -->\n\nbelow\n")
    assert "old" not in text and "| import zarrckpt, beyond an empty process |" in text
    assert "### Cost of subchunks" in done.stdout


def test_tables_show_missed_goals_and_missing_peers(tmp_path: Path) -> None:
    ours = Speed("a group", "zarrckpt", "ours", 10**9, [1.0, 2.0, 9.0], [0.5])
    speeds = [ours, Speed("a group", "absent", "peer", 10**9)]
    goals = [Figure("f", "high", 3.0, "x", 2.0), Figure("f", "low", 3.0, "x", 2.0, most=True), Figure("f", "none", 1.0)]
    write_page(Results(speeds, goals), "heading", tmp_path / "page.md")
    text = (tmp_path / "page.md").read_text()
    assert "| **zarrckpt** | 0.50 | 1.00x | 2.00 | 1.00x |" in text
    assert "| absent | not installed |" in text
    assert "| high | 3.00 x | at least 2.00 x | yes |" in text
    assert "| low | 3.00 x | at most 2.00 x | **no** |" in text
    assert "| none | 1.00 |  |  |" in text


MOST_ALONE = {
    "FSDP 8 to 4": 1.05,
    "FSDP 8 to 6": 1.2,
    "FSDP 8 to TP 8": 3.5,
    "TP 8 to FSDP 8": 1.3,
    "2x2 to 4": 1.05,
    "TP 8 to FSDP 64": 7,
}


@pytest.mark.parametrize("itemsize", [4, 2])
@pytest.mark.parametrize("change", CHANGES)
def test_another_mesh_reads_little_more_than_it_needs(change: str, itemsize: int) -> None:
    """The weights of a Llama 3 8B layer: together, the ranks fetch each byte once, for any earlier sharding."""
    fetched, handed = together(*CHANGES[change], itemsize)
    assert fetched <= 1.01 and handed < 1
    assert alone(*CHANGES[change], itemsize) <= MOST_ALONE[change]
