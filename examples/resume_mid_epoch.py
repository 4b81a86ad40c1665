"""A run that is killed in the middle of an epoch, and resumes with the next rows, bit for bit.

    python examples/resume_mid_epoch.py run --kill-after 17   # two batches after a step of the optimizer
    python examples/resume_mid_epoch.py run                   # resumes; prints the lines of a run without the kill
    torchrun --nproc-per-node 2 examples/resume_mid_epoch.py s3://bucket/run

Needs torchdata. Its StatefulDataLoader reads rows in two worker processes, and the optimizer takes a step after every
third batch. A checkpoint comes right after such a step, so it holds no gradients: a resumed run reads the batches since
then again. The average of the weights (EMA) is a part of the state.
"""

from __future__ import annotations

import argparse
import os
import signal
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

import zarrckpt

ACCUMULATE = 3


class Progress:
    """The epoch, as an object with a state to save."""

    epoch = 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch = state["epoch"]


def train(url: str, epochs: int = 2, kill_after: int | None = None) -> list[str]:
    """Train to the end of the last epoch. Return a line for each batch: its rows on this rank, and the loss."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(1, 16), torch.nn.GELU(), torch.nn.Linear(16, 1))
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))  # type: ignore[no-untyped-call]
    if dist.is_initialized():  # after AveragedModel has copied the model: FSDP2 cannot copy a sharded one
        fully_shard(average.module)
        fully_shard(model)
    optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rows: Any = [torch.tensor([number / 24]) for number in range(24)]
    sampler: Any = StatefulDistributedSampler(rows, ranks, rank, seed=5)
    loader: Any = StatefulDataLoader(rows, batch_size=2, sampler=sampler, num_workers=2)

    progress, lines = Progress(), []
    state = {
        "model": model,
        "average": average,
        "optim": optim,
        "progress": progress,
        "loader": zarrckpt.PerRank(loader),  # each rank has read other rows
    }
    with zarrckpt.CheckpointManager(url, keep=zarrckpt.Keep(newest=2), save_every=1) as manager:
        step = manager.restore(state) or 0
        while progress.epoch < epochs:
            sampler.set_epoch(progress.epoch)  # the order of an epoch follows from its number
            for batch in loader:
                loss = (model(batch) - batch.square()).square().mean()
                (loss / ACCUMULATE).backward()
                numbers = (batch[:, 0] * 24).round().int().tolist()
                lines.append(f"epoch {progress.epoch}, rows {numbers}, loss {loss.item()!r}")
                print(lines[-1], flush=True)
                if len(lines) % ACCUMULATE == 0:  # each run begins right after a step
                    optim.step()
                    optim.zero_grad()
                    average.update_parameters(model)
                    step += 1
                    manager.step(step, state)
                if len(lines) == kill_after:
                    manager.wait()
                    os.kill(os.getpid(), signal.SIGKILL)
            progress.epoch += 1
    return lines


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="folder of the run's checkpoints: a path, or s3://bucket/run")
    parser.add_argument("--kill-after", type=int, help="number of batches after which this process is killed")
    args = parser.parse_args()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    train(args.url, kill_after=args.kill_after)
    if dist.is_initialized():
        dist.destroy_process_group()
