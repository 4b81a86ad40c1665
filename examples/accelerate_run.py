"""A training run with Accelerate that can be killed at any moment, and resumes from its newest checkpoint.

    python examples/accelerate_run.py run                            # end it by Ctrl-C or kill; start it again
    torchrun --nproc-per-node 2 examples/accelerate_run.py s3://bucket/run    # on any number of processes

It saves every 20 steps, and keeps the two newest checkpoints and the best one. On SIGTERM or Ctrl-C, on any process,
all of them save the same step and end. ``zarrckpt ls run`` lists the checkpoints.
"""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed

import zarrckpt
from zarrckpt.integrations.accelerate import restoring, state_of


def train(url: str, steps: int) -> None:
    # The shuffle depends only on seed and epoch, and the batches do not depend on the number of processes.
    data = DataLoaderConfiguration(use_seedable_sampler=True, split_batches=True)
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), dataloader_config=data)
    set_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    samples = torch.utils.data.TensorDataset(torch.randn(2048, 16))
    loader = torch.utils.data.DataLoader(samples, batch_size=32, shuffle=True, generator=torch.Generator())
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)

    keep = zarrckpt.Keep(newest=2, best=1, metric="loss")
    manager = zarrckpt.CheckpointManager(url, keep=keep, save_every=20, signals=("SIGTERM", "SIGINT"))
    with restoring(accelerator) as state:
        step = manager.restore(state) or 0
    state = state_of(accelerator)
    accelerator.print(f"The run goes on from step {step}", flush=True)
    while step < steps and not manager.preempted:
        epoch, seen = divmod(step, len(loader))
        batches = accelerator.skip_first_batches(loader, seen) if seen else loader
        batches.set_epoch(epoch)
        for (batch,) in batches:
            loss = (model(batch).squeeze(1) - batch.sum(1)).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            step += 1
            if manager.step(step, state, metrics={"loss": loss}):
                accelerator.print(f"The run saves step {step}, loss {loss.item():.9f}", flush=True)
            if manager.preempted or step == steps:
                break
    manager.close()
    accelerator.print(f"The run has the checkpoints of steps {manager.steps()}", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="folder of the run's checkpoints: a path, or s3://bucket/run")
    parser.add_argument("--steps", type=int, default=400)
    args = parser.parse_args()
    train(args.url, args.steps)
