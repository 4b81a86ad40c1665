"""The example with torchdata's StatefulDataLoader, killed within an epoch and an accumulation of gradients."""

from __future__ import annotations

import runpy
import signal
from pathlib import Path

import torch
from launched import launch

import zarrckpt

EXAMPLE = Path(__file__).parents[2] / "examples" / "resume_mid_epoch.py"


def test_a_run_killed_mid_epoch_resumes_bit_for_bit(tmp_path: Path) -> None:
    """The batches since the last step are read again; rows, losses, weights, moments and the average are equal."""
    whole, run = str(tmp_path / "whole"), str(tmp_path / "run")
    done = launch(EXAMPLE, run, "--kill-after", "17", ranks=1, timeout=100)
    assert done.returncode == -signal.SIGKILL, done.stderr
    train = runpy.run_path(str(EXAMPLE), run_name="example")["train"]
    lines, resumed = train(whole), train(run)
    assert done.stdout.splitlines() == lines[:17]
    assert resumed == lines[15:] and len(lines) == 24
    one, other = (zarrckpt.open(f"{url}/step-00000008").load() for url in (whole, run))
    pairs = [(one[part], other[part]) for part in ("model", "average")]
    moments = one["optim"]["state"]
    pairs += [(slots, other["optim"]["state"][name]) for name, slots in moments.items()]
    assert len(pairs) == 6 and len(one["average"]) == 5
    assert all(torch.equal(value, second[name]) for first, second in pairs for name, value in first.items())
