"""Train a tiny model with Lightning: functions that the tests call on their ranks, and a script for killed runs.

``python lightning_run.py '{"folder": "s3://bucket/run", ...}'``, with the fields of Run.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import zarrckpt
from zarrckpt.integrations import lightning as plugin

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.simplefilter("ignore")

DATA = torch.randn(32, 8, generator=torch.Generator().manual_seed(5))


@dataclass
class Run:
    """Settings of a run."""

    folder: str
    """Folder of the checkpoints."""
    strategy: str = "auto"
    """``auto``, ``ddp``, ``fsdp2``, ``fsdp1`` or ``tp``."""
    epochs: int = 4
    resume: str | None = None
    world: int = 1
    log: str | None = None
    """A file for the losses of each step, which a killed run leaves behind."""
    die_after: int | None = None
    """Steps after which the process kills itself."""
    background: bool = False
    allow_pickle: bool = False
    plain: bool = False
    """Whether to use Lightning's own plugin, strategy and ModelCheckpoint."""
    top_k: int = 1
    save_last: Any = True
    leave_out: str | None = None
    """Entries of the model with this prefix are not saved."""
    hyperparameters: dict[str, Any] = field(default_factory=dict)
    average: bool = False
    """Whether to validate with an average of the weights, which is a part of the module."""


class Tiny(LightningModule):
    """Two layers, sharded for the strategy."""

    def __init__(
        self, strategy: str, hyperparameters: dict[str, Any], leave_out: str | None = None, average: bool = False
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.strategy = strategy
        self.averages = average
        self.leave_out = leave_out
        self.strict_loading = leave_out is None
        self.net: Any = None

    def configure_model(self) -> None:
        if self.net is not None:
            return
        torch.manual_seed(1)
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 3, bias=False))
        if self.averages:  # before the network is sharded: FSDP2 cannot copy a sharded one
            self.average = AveragedModel(self.net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        if self.strategy == "fsdp2":
            for net in [self.net, *([self.average.module] if self.averages else [])]:
                fully_shard(net, mesh=self.device_mesh["data_parallel"], reshard_after_forward=True)
        if self.strategy == "tp":
            plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
            parallelize_module(self.net, self.device_mesh["tensor_parallel"], plan)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        for name in [*checkpoint["state_dict"]]:
            if self.leave_out and name.startswith(self.leave_out):
                del checkpoint["state_dict"][name]

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        return (self.net(batch) - batch[:, :3]).square().mean()

    def on_train_batch_end(self, *_: Any) -> None:
        if self.averages:
            self.average.update_parameters(self.net)

    def validation_step(self, batch: torch.Tensor, _: int) -> None:
        net = self.average if self.averages else self.net
        self.log("val_loss", (net(batch) - batch[:, :3]).square().mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.net.parameters(), lr=3e-2)
        return [optimizer], [torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 3], gamma=0.5)]


class OnCpu(plugin.ZarrFSDPStrategy):
    """Wrap the module as Lightning does, but with the device CPU, which torch uses only if it is passed."""

    def _setup_model(self, model: torch.nn.Module) -> torch.nn.Module:
        return FullyShardedDataParallel(
            module=model,
            cpu_offload=self.cpu_offload,
            mixed_precision=self.mixed_precision_config,
            sharding_strategy=self.sharding_strategy,
            device_id=torch.device("cpu"),
            **self.kwargs,
        )


class Watch(Callback):
    """Callback that records losses and the restored state, and kills the process on request. It has a state, too."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.seen = 0
        self.losses: dict[int, float] = {}
        self.restored: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "tensor": torch.full((3,), self.seen), "pair": (1, "two")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["tensor"].tolist() == [state["seen"]] * 3 and state["pair"] == (1, "two")
        self.seen = state["seen"]

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        if trainer.ckpt_path is not None:
            self.restored = restored_state(trainer)

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, outputs: Any, *_: Any) -> None:
        self.seen += 1
        loss = trainer.strategy.reduce(outputs["loss"].detach(), reduce_op="mean").item()
        self.losses[trainer.global_step] = loss
        if self.run.log and trainer.is_global_zero:
            with open(self.run.log, "a") as lines:
                lines.write(f"{trainer.global_step} {loss!r}\n")
        if trainer.global_step == self.run.die_after:
            trainer.strategy.barrier()
            os.kill(os.getpid(), signal.SIGKILL)


def restored_state(trainer: Trainer) -> dict[str, Any]:
    """Return the whole weights and moments, gathered by torch, by the names that all strategies share."""
    assert trainer.model is not None
    options = StateDictOptions(full_state_dict=True)
    weights = get_model_state_dict(trainer.model, options=options)
    state = get_optimizer_state_dict(trainer.model, trainer.optimizers[0], options=options)["state"]
    moments = {f"{name}.{slot}": value.clone() for name, slots in state.items() for slot, value in slots.items()}
    return {"weights": {name: value.clone() for name, value in weights.items()}, "moments": moments}


def saved_state(url: str, options: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the same from the checkpoint, or from a file that Lightning saved without this package."""
    found = torch.load(url) if os.path.isfile(url) else zarrckpt.open(url, storage_options=options).load()
    if "optimizer_0" in found:
        state = found["optimizer_0"]["state"]
    else:
        state = dict(zip(found["state_dict"], found["optimizer_states"][0]["state"].values(), strict=True))
    moments = {f"{name}.{slot}": value for name, slots in state.items() for slot, value in slots.items()}
    return {"weights": dict(found["state_dict"]), "moments": moments}


def strategy_of(run: Run) -> Any:
    if run.strategy == "fsdp2":
        kind = ModelParallelStrategy if run.plain else plugin.ZarrModelParallelStrategy
        return kind(data_parallel_size=run.world, tensor_parallel_size=1)
    if run.strategy == "tp":
        return plugin.ZarrModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=run.world)
    return OnCpu() if run.strategy == "fsdp1" else run.strategy


def train(run: Run) -> dict[str, Any]:
    """Run one fit. Return the values that the tests compare."""
    torch.manual_seed(0)
    kind = ModelCheckpoint if run.plain else plugin.ZarrModelCheckpoint
    checkpoints = kind(run.folder, save_top_k=run.top_k, monitor="val_loss", save_last=run.save_last)
    io = plugin.ZarrCheckpointIO(background=run.background, allow_pickle=run.allow_pickle)
    watch, stopping = Watch(run), EarlyStopping("val_loss", patience=50)
    trainer = Trainer(
        accelerator="cpu",
        devices=run.world,
        strategy=strategy_of(run),
        plugins=[] if run.plain else [io],
        callbacks=[checkpoints, watch, stopping],
        max_epochs=run.epochs,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
    )
    loader = torch.utils.data.DataLoader(DATA, batch_size=8 // (1 if run.strategy == "tp" else run.world))
    module = Tiny(run.strategy, run.hyperparameters, run.leave_out, run.average)
    trainer.fit(module, loader, loader, ckpt_path=run.resume)
    return {
        "losses": watch.losses,
        "seen": watch.seen,
        "restored": watch.restored,
        "resumed_from": trainer.ckpt_path,
        "best": checkpoints.best_model_path,
        "scores": {path: score.item() for path, score in checkpoints.best_k_models.items()},
        "stopping": float(stopping.best_score),
        "lr": trainer.optimizers[0].param_groups[0]["lr"],
        "epoch": trainer.current_epoch,
    }


def train_on_ranks(fields: dict[str, Any]) -> dict[str, Any]:
    """Call :func:`train` in a process that ``ranks.run_ranks`` started."""
    os.environ |= {"LOCAL_RANK": os.environ["RANK"], "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "tests"}
    return train(Run(world=int(os.environ["WORLD_SIZE"]), **fields))


if __name__ == "__main__":
    torch.set_num_threads(1)
    result = train(Run(world=int(os.environ.get("WORLD_SIZE", 1)), **json.loads(sys.argv[1])))
    if os.environ.get("RANK", "0") == "0":
        result = {key: value for key, value in result.items() if key != "restored"}
        Path(sys.argv[2]).write_text(json.dumps(result))
