"""The notebook runs, and its committed outputs come from one run of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from harness import ROOT
from harness.run_notebook import code_cells

NOTEBOOK = ROOT / "examples" / "analysis.ipynb"
RUNNER = ROOT / "tests" / "harness" / "run_notebook.py"


def test_every_cell_runs() -> None:
    command = [sys.executable, str(RUNNER), NOTEBOOK.name]
    environment = {**os.environ, "MPLBACKEND": "agg", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=NOTEBOOK.parent, env=environment, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "<zarrckpt.Checkpoint 's3://bucket/run/step-120'" in done.stdout
    assert "whole: True" in done.stdout


def test_the_outputs_are_small_and_of_one_run() -> None:
    """Pages show its plots. The outputs reveal nothing about the machine on which it ran."""
    cells = code_cells(NOTEBOOK)
    assert [cell["execution_count"] for cell in cells] == [*range(1, len(cells) + 1)]
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert {output["output_type"] for output in outputs} <= {"stream", "display_data", "execute_result"}
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 4
    text = json.dumps(outputs)
    assert len(text) < 300_000
    assert not [word for word in ("/tmp/", "/home/", "/root/", "127.0.0.1", '"stderr"') if word in text]
