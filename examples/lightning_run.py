"""A run of Lightning's Trainer that can be killed at any moment, and resumes from its newest checkpoint.

    python examples/lightning_run.py run                                    # kill it; start it again
    torchrun --nproc-per-node 2 examples/lightning_run.py s3://bucket/run   # FSDP2, on any number of processes

It keeps the two best checkpoints and the last one. ``zarrckpt ls run`` shows them.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.distributed.fsdp import fully_shard

from zarrckpt.integrations.lightning import ZarrCheckpointIO, ZarrModelCheckpoint, ZarrModelParallelStrategy

WORLD = int(os.environ.get("WORLD_SIZE", "1"))


class Model(LightningModule):  # type: ignore[misc]
    """A small network, sharded if there are several processes."""

    def __init__(self) -> None:
        super().__init__()
        self.net: Any = None

    def configure_model(self) -> None:
        if self.net is None:
            self.net = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 1))
            if WORLD > 1:
                fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
        loss: torch.Tensor = (self.net(batch).squeeze(1) - batch.sum(1)).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: torch.Tensor, number: int) -> None:
        self.log("val_loss", (self.net(batch).squeeze(1) - batch.sum(1)).square().mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def train(url: str) -> None:
    torch.manual_seed(0)
    checkpoints = ZarrModelCheckpoint(url, save_top_k=2, monitor="val_loss", save_last=True)
    trainer = Trainer(
        accelerator="cpu",
        devices=WORLD,
        strategy=ZarrModelParallelStrategy(WORLD, tensor_parallel_size=1) if WORLD > 1 else "auto",
        plugins=[ZarrCheckpointIO(background=True)],
        callbacks=[checkpoints],
        max_epochs=10,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    rows: Any = torch.randn(256, 16)
    data: Any = torch.utils.data.DataLoader(rows, batch_size=32)
    trainer.fit(Model(), data, data, ckpt_path="last")
    if trainer.is_global_zero:
        print(f"The run has ended after epoch {trainer.current_epoch}; the best is {checkpoints.best_model_path}")


if __name__ == "__main__":
    train(sys.argv[1] if len(sys.argv) > 1 else "run")
