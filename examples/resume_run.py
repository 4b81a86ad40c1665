"""A training run that can be killed at any moment, and resumes from its newest checkpoint.

    python examples/resume_run.py run                                    # end it by Ctrl-C or kill; start it again
    torchrun --nproc-per-node 2 examples/resume_run.py s3://bucket/run   # on any number of processes

It saves every 20 steps, and keeps the two newest checkpoints and the best one. On SIGTERM, SIGUSR1 or Ctrl-C, on any
process, all of them save the same step and end, with the exit status 75, so that a scheduler starts the run again.
``zarrckpt ls run`` lists the checkpoints.
"""

from __future__ import annotations

import argparse
import os
import sys
import time

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import zarrckpt


def train(url: str, steps: int, seconds: float, grace: float) -> bool:
    """Train from the newest checkpoint on. Return whether the run has made all steps."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 1))
    if dist.is_initialized():
        fully_shard(model)
    optim = torch.optim.AdamW(model.parameters(), lr=1e-3)
    state = {"model": model, "optim": optim}

    manager = zarrckpt.CheckpointManager(
        url,
        keep=zarrckpt.Keep(newest=2, best=1, metric="loss"),
        save_every=20,
        signals=("SIGTERM", "SIGUSR1", "SIGINT"),
        grace=grace,
    )
    first = manager.restore(state)
    say("begins" if first is None else f"goes on from step {first}")
    for step in range((first or 0) + 1, steps + 1):
        # The batch depends only on the step, so an interrupted run has the same batches as any other.
        inputs = torch.randn(32, 16, generator=torch.Generator().manual_seed(step))
        loss = (model(inputs).squeeze(1) - inputs.sum(1)).square().mean()
        loss.backward()
        optim.step()
        optim.zero_grad()
        time.sleep(seconds)
        if manager.step(step, state, metrics={"loss": loss}):
            say(f"saves step {step}, loss {loss.item():.9f}")
        if manager.preempted:
            say(f"ends early: step {step} is saved")
            break
    manager.close()
    say(f"has the checkpoints of steps {manager.steps()}")
    return not manager.preempted


def say(text: str) -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(f"The run {text}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="folder of the run's checkpoints: a path, or s3://bucket/run")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seconds", type=float, default=0.05, help="minimum duration of a step")
    parser.add_argument("--grace", type=float, default=25, help="seconds from a signal to the end of the last save")
    args = parser.parse_args()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    finished = train(args.url, args.steps, args.seconds, args.grace)
    if dist.is_initialized():
        dist.destroy_process_group()
    if not finished:
        sys.exit(os.EX_TEMPFAIL)  # 75. After 0, a scheduler would take the run for finished.
