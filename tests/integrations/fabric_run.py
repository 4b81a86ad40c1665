"""A tiny model in Lightning's Fabric: functions that the tests call on their ranks."""

from __future__ import annotations

import logging
import os
import warnings
from typing import Any

import torch
from lightning.fabric import Fabric
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from zarrckpt.integrations import lightning as plugin

logging.getLogger("lightning.fabric").setLevel(logging.ERROR)
warnings.simplefilter("ignore")


def set_up(strategy: str, seed: int, *, background: bool = False) -> tuple[Fabric, Any, Any, Any]:
    os.environ |= {"LOCAL_RANK": os.environ["RANK"], "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "tests"}
    world = int(os.environ["WORLD_SIZE"])
    chosen: Any = strategy
    if strategy == "fsdp2":
        chosen = plugin.ZarrFabricModelParallelStrategy(
            lambda module, mesh: fully_shard(module, mesh=mesh["data_parallel"]) or module,
            data_parallel_size=world,
            tensor_parallel_size=1,
        )
    if strategy == "fsdp1":
        chosen = plugin.ZarrFabricFSDPStrategy()
    plugins = [plugin.ZarrCheckpointIO(background=background)]
    fabric = Fabric(accelerator="cpu", devices=world, strategy=chosen, plugins=plugins)
    fabric.launch()
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 3))
    if strategy == "fsdp1":  # by hand: Lightning itself wraps on GPUs only
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    if strategy != "ddp":
        module = fabric.setup_module(model)
        optimizer = fabric.setup_optimizers(torch.optim.AdamW(module.parameters(), lr=1e-2))
    else:
        module, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    return fabric, module, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2)


def taken(module: Any, optimizer: Any, scheduler: Any) -> dict[str, Any]:
    options = StateDictOptions(full_state_dict=True)
    weights = get_model_state_dict(module._forward_module, options=options)
    state = get_optimizer_state_dict(module._forward_module, optimizer.optimizer, options=options)["state"]
    moments = {f"{name}.{slot}": value.clone() for name, slots in state.items() for slot, value in slots.items()}
    return {"weights": weights, "moments": moments, "scheduler": scheduler.state_dict()["last_epoch"]}


def save_with_fabric(strategy: str, url: str) -> dict[str, Any]:
    fabric, module, optimizer, scheduler = set_up(strategy, 1, background=True)
    for step in range(3):
        fabric.backward(module(torch.full((4, 8), float(step))).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    state = {"model": module, "optimizer": optimizer, "scheduler": scheduler, "step": 3, "notes": {"by": "a test"}}
    fabric.save(url, state)
    fabric.strategy.checkpoint_io.wait()
    return taken(module, optimizer, scheduler)


def load_with_fabric(strategy: str, url: str) -> dict[str, Any]:
    fabric, module, optimizer, scheduler = set_up(strategy, 2)
    state = {"model": module, "optimizer": optimizer, "scheduler": scheduler, "step": 0}
    remainder = fabric.load(url, state)
    return {**taken(module, optimizer, scheduler), "remainder": remainder, "step": state["step"]}


def load_raw_with_fabric(strategy: str, url: str) -> dict[str, torch.Tensor]:
    fabric, module, _, _ = set_up(strategy, 2)
    fabric.load_raw(url, module)
    return get_model_state_dict(module._forward_module, options=StateDictOptions(full_state_dict=True))
