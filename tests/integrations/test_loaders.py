"""The example with torchdata's StatefulDataLoader: killed amid an epoch and an accumulation of gradients."""

from __future__ import annotations

import runpy
import signal
from pathlib import Path

import torch
from launched import launch

import zarrckpt

EXAMPLE = Path(__file__).parents[2] / "examples" / "resume_mid_epoch.py"


def test_a_run_killed_mid_epoch_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """The batches since the last step are read again; rows, losses, weights, moments and the average are equal."""
    whole, run = str(tmp_path / "whole"), str(tmp_path / "run")
    done = launch(EXAMPLE, run, "--kill-after", "17", ranks=1, timeout=100)
    assert done.returncode == -signal.SIGKILL, done.stderr
    train = runpy.run_path(str(EXAMPLE), run_name="example")["train"]
    lines, resumed = train(whole), train(run)
    assert done.stdout.splitlines() == lines[:17]
    assert resumed == lines[15:] and len(lines) == 24
    one, other = (zarrckpt.open(f"{url}/step-00000008") for url in (whole, run))
    assert {"average.module.0.weight", "optim.state.0.weight.exp_avg"} < {*one.tensors}
    assert {*one} == {*other} and not any("grad" in name for name in one)
    assert all(torch.equal(one[name], other[name]) for name in one.tensors)
