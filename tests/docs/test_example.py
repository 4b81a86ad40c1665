"""The example's main path on a small model: train, kill, resume on 2 processes, inspect."""

from __future__ import annotations

import json
import os
import re
import runpy
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from harness import ROOT

RUN = ROOT / "examples" / "resume_run.py"
EXAMPLE = ROOT / "examples" / "train_fsdp2.py"
SMALL = ["--layers", "1", "--width", "64", "--length", "64", "--batch", "8"]
FEWER = ["--processes", "2", "--resume-on", "1"]
SHORT = ["--steps", "12", "--every", "3", "--kill-at", "5"]


def run_example(*options: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLE), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL)


def test_the_loss_curve_continues(tmp_path: Path) -> None:
    """With all options. `.ci/run` runs the demo without any."""
    summary = tmp_path / "summary.json"
    done = run_example(*SMALL, *SHORT, *FEWER, "--s3", "--async", "--tp", "2", "--json", str(summary))
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(summary.read_text())

    step = found["resumed_step"]
    assert step in (3, 6, 9)  # more than 3 if the kill came late
    assert found["resumed_from"].endswith(f"/run/step-000{step}")
    assert found["restored_exactly"]
    assert list(found["resumed"]) == [str(number) for number in range(step + 1, 13)]
    assert found["repeatable"]
    for number, loss in found["resumed"].items():
        assert loss == pytest.approx(found["uninterrupted"][number], rel=1e-5)
    assert found["largest_difference"] < 1e-5
    assert found["continues"]

    assert len(found["rank_bytes"]) == 2 and all(found["rank_bytes"])
    assert found["inside"]["step"] == step
    assert found["inside"]["xarray_variables"] == 18
    assert found["inside"]["tensors"] == 18 * 4 + 1  # parameters, their step and two moments, and torch's RNG state
    assert "continues where it was" in done.stdout
    assert done.stdout.count("\n") < 60


def run_on_two_processes(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    command += ["--nproc-per-node", "2", str(RUN), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)


def test_a_finished_run_resumes_on_fewer_processes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reaches the same loss as a run that was not ended."""
    with run_on_two_processes(str(tmp_path / "run"), "--steps", "100000") as first:
        assert first.stdout is not None
        shown = [first.stdout.readline()]
        while "saves step" not in shown[-1]:
            assert shown[-1], first.communicate()
            shown.append(first.stdout.readline())
        first.send_signal(signal.SIGTERM)
        rest, errors = first.communicate(timeout=120)
    ended = re.search(r"step (\d+) is saved", rest)
    assert ended is not None, rest + errors
    step = int(ended[1])
    last = (step // 20 + 2) * 20
    texts = []
    for url in (tmp_path / "run", tmp_path / "whole"):
        monkeypatch.setattr(sys, "argv", [str(RUN), str(url), "--steps", str(last), "--seconds", "0"])
        runpy.run_path(str(RUN), run_name="__main__")  # in this process, which has imported torch
        texts.append(capsys.readouterr().out)
    assert f"goes on from step {step}\n" in texts[0] and "The run begins\n" in texts[1]
    one, other = (float(re.findall(rf"saves step {last}, loss (\S+)", text)[0]) for text in texts)
    assert one == pytest.approx(other, rel=1e-5)
    assert f"{last}]" in texts[0] and len(re.findall(r"\d+", texts[0].splitlines()[-1])) <= 3  # two newest, one best


def test_a_failing_worker_is_shown(tmp_path: Path) -> None:
    """The output has the error of the failed rank, and names the file with the whole error."""
    folder = tmp_path / "demo"
    one = ["--processes", "1", "--resume-on", "1"]
    done = run_example(*SMALL, *SHORT, *one, "--lr", "-1", "--dir", str(folder))
    assert done.returncode == 1
    assert "ValueError: Invalid learning rate: -1.0" in done.stdout
    assert str(folder / "logs" / "uninterrupted") in done.stdout


def test_conflicting_options_are_refused(tmp_path: Path) -> None:
    assert "--worker needs --checkpoints" in run_example("--worker").stderr
    assert "can't split a batch of 7" in run_example("--batch", "7").stderr
    (tmp_path / "file").touch()
    assert "not an empty folder" in run_example("--dir", str(tmp_path)).stderr
