"""A process of a training run with Accelerate. It prints a line of JSON for each step.

python accelerate_run.py '{"url": ..., "steps": 8, ...}'
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import DistributedType
from accelerate.utils import DataLoaderConfiguration, set_seed

import zarrckpt
from zarrckpt.integrations.accelerate import load_state, restoring, save_state, state_of


class Ema:
    """A registered object of a class outside torch, whose state grows and has tensors and values."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}

    def update(self, model: torch.nn.Module, loss: float) -> None:
        shadow = self.state.setdefault("shadow", {})
        for name, value in model.state_dict().items():
            value = value.full_tensor() if hasattr(value, "full_tensor") else value
            shadow[name.removeprefix("module.")] = value.detach().clone()
        self.state.setdefault("losses", []).append({"loss": loss})

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def accelerator_of(fields: dict[str, Any]) -> Accelerator:
    plugin = None
    if fields.get("fsdp2"):
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="no_wrap", cpu_ram_efficient_loading=False
        )
    data = DataLoaderConfiguration(
        use_seedable_sampler=True,
        use_stateful_dataloader=fields.get("stateful", False),
        split_batches=True,
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, dataloader_config=data, step_scheduler_with_optimizer=False)
    if plugin is not None:
        # Accelerate uses FSDP2 only on accelerators, but its code also runs on the CPU.
        accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = plugin
    return accelerator


def train(fields: dict[str, Any]) -> None:
    accelerator = accelerator_of(fields)
    set_seed(fields.get("seed", 0), device_specific=True)
    torch.manual_seed(fields.get("seed", 0))
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Dropout(fields.get("dropout", 0.25)), torch.nn.Linear(16, 1)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 6])
    samples = torch.randn(32, 6, generator=torch.Generator().manual_seed(7))
    # A loader with a separate generator draws no numbers from torch's if it begins in the middle of an epoch.
    loader = torch.utils.data.DataLoader(samples, batch_size=8, shuffle=True, generator=torch.Generator())
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    torch.manual_seed(100 * fields.get("seed", 0) + accelerator.process_index)  # dropout of each rank
    ema = Ema()
    accelerator.register_for_checkpointing(ema)
    if fields.get("scaler"):
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** (3 + fields.get("seed", 0)))
    if fields.get("hooks"):
        accelerator.register_save_state_pre_hook(lambda models, weights, folder: write(accelerator, models, folder))
        accelerator.register_load_state_pre_hook(lambda models, folder: read(accelerator, folder))

    manager = None
    step = 0
    if fields.get("manager"):
        manager = zarrckpt.CheckpointManager(fields["url"], save_every=2, keep=zarrckpt.Keep(newest=2), background=True)
        with restoring(accelerator) as target:
            step = manager.restore(target) or 0
        state = state_of(accelerator)
    elif url := zarrckpt.latest(fields["url"]):
        step = int(url.rsplit("-", 1)[1])
        load_state(accelerator, url, dataloaders=fields.get("dataloaders", True))
    say(accelerator, restored=step, **seen(accelerator, ema))
    while step < fields["steps"]:
        if not fields.get("stateful"):
            loader.set_epoch(step // 4)
        batches = loader
        if step % 4 and not fields.get("stateful"):  # four batches are an epoch
            batches = accelerator.skip_first_batches(loader, step % 4)
            batches.set_epoch(step // 4)  # Accelerate before 1.15 begins with the order of epoch 0
        for batch in batches:
            step += 1
            loss = model(batch).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            loss = accelerator.gather(loss.detach()).mean().item()
            ema.update(model, loss)
            accelerator.step += 1
            drawn = [random.random(), float(np.random.rand())]
            say(accelerator, step=step, loss=loss, drawn=drawn, **seen(accelerator, ema))
            if manager is not None:
                manager.step(step, state, metrics={"loss": loss})
            elif step % 2 == 0:
                save_state(accelerator, f"{fields['url']}/step-{step}", background=fields.get("background", False))
            if step == fields.get("kill_at"):
                os.kill(os.getpid(), signal.SIGKILL)
            if step == fields["steps"]:
                break
    if manager is not None:
        manager.close()
    accelerator.end_training()


def seen(accelerator: Accelerator, ema: Ema) -> dict[str, Any]:
    """Return the accelerator's state as text, which is equal only if the state is equal bit for bit."""
    optimizer = accelerator._optimizers[0].optimizer
    moments = [
        (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).tolist()
        for slots in optimizer.state.values()
        for _, tensor in sorted(slots.items())
    ]
    return {
        "moments": str(moments),
        "lr": optimizer.param_groups[0]["lr"],
        "ema": str(ema.state),
        "own": [accelerator.step, accelerator._schedulers[0].state_dict()["last_epoch"]],
        "scaler": None if accelerator.scaler is None else accelerator.scaler.state_dict()["scale"],
    }


def write(accelerator: Accelerator, models: list[Any], folder: str) -> None:
    if accelerator.is_main_process:
        (Path(folder) / "sub").mkdir()
        (Path(folder) / "sub" / "config.json").write_text(json.dumps({"models": len(models)}))


def read(accelerator: Accelerator, folder: str) -> None:
    say(accelerator, hooked=json.loads((Path(folder) / "sub" / "config.json").read_text()))


def say(accelerator: Accelerator, **what: Any) -> None:
    print(json.dumps({"rank": accelerator.process_index, **what}) + "\n", end="", flush=True)


if __name__ == "__main__":
    train(json.loads(sys.argv[1]))
