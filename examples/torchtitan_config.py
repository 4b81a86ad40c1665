"""Configurations of torchtitan whose checkpoints zarrckpt saves, in any store. To train with one, in this folder:

    torchrun --nproc-per-node 8 -m torchtitan.train --module torchtitan_config --config llama3_8b \\
        --checkpoint.folder s3://bucket/run

If it is started again with the same command, it resumes from the newest checkpoint. ``zarrckpt ls s3://bucket/run``
lists the checkpoints. torchtitan trains on accelerators.
"""

from __future__ import annotations

from torchtitan.models.llama3 import config_registry
from torchtitan.trainer import Trainer

from zarrckpt.integrations.torchtitan import ZarrCheckpointManager


def llama3_8b() -> Trainer.Config:
    config = config_registry.llama3_8b()
    config.checkpoint = ZarrCheckpointManager.Config(enable=True, interval=500, async_mode="async", keep_latest_k=3)
    return config


def llama3_debugmodel() -> Trainer.Config:
    """Return the smallest configuration, which trains within seconds."""
    config = config_registry.llama3_debugmodel()
    config.checkpoint = ZarrCheckpointManager.Config(enable=True, interval=2, last_save_model_only=False)
    return config
