"""A training loop that saves with zarrckpt, and resumes on another number of processes."""

from __future__ import annotations

import argparse
import hashlib
import math
import random
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist
from tiny_transformer import Batches, TinyTransformer, python_source
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim.lr_scheduler import LambdaLR
from training_log import Log

import zarrckpt


class Rng:
    """The global random number generators of torch and Python, as an object with a state to save."""

    def state_dict(self) -> dict[str, Any]:
        return {"torch": torch.get_rng_state(), "python": random.getstate()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        torch.set_rng_state(state["torch"])
        random.setstate(state["python"])


def train(args: argparse.Namespace) -> None:
    """Train, as one of torchrun's processes."""
    dist.init_process_group("gloo")
    try:
        _train(args)
    finally:
        dist.destroy_process_group()


def _train(args: argparse.Namespace) -> None:
    random.seed(args.seed)
    torch.manual_seed(args.seed)
    mesh = make_mesh(args.tp)
    model = sharded_model(args, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    schedule = LambdaLR(optimizer, lambda step: learning_rate_factor(step, args.steps))
    batches = Batches(python_source(), args.batch, args.length, mesh["dp"].get_local_rank(), mesh["dp"].size())
    log = Log(args.records)

    # Everything that a resumed run needs. Objects with a state_dict are saved through it and restored in place.
    state: dict[str, Any] = {
        "model": model,
        "optim": optimizer,
        "schedule": schedule,
        "data": batches,
        "rng": Rng(),
        "step": 0,
    }
    resumed_from = zarrckpt.latest(args.checkpoints) if args.resume else None
    if resumed_from:
        zarrckpt.load(state, resumed_from)
    log.start(resumed_from, model, len(batches.text), fingerprint(model, optimizer))

    saving: Future[zarrckpt.SaveReport] | None = None
    for step in range(state["step"] + 1, args.steps + 1):
        inputs, targets = batches.next()
        loss = model(inputs, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        state["step"] = step
        log.step(step, loss)

        if args.every and step % args.every == 0:
            url = f"{args.checkpoints}/step-{step:04d}"
            log.saving(step, fingerprint(model, optimizer))
            if args.background:
                if saving:
                    log.saved(saving.result())
                saving = zarrckpt.async_save(state, url)  # copies the state and returns
            else:
                log.saved(zarrckpt.save(state, url))
        if saving and (saving.done() or step == args.steps):
            log.saved(saving.result())  # raises the error of a failed background save
            saving = None


def make_mesh(tp: int) -> DeviceMesh:
    """Return all processes as a mesh of data-parallel ("dp") by tensor-parallel ("tp") ranks."""
    if dist.get_world_size() % tp:
        raise SystemExit(f"--tp {tp} does not divide the number of processes, {dist.get_world_size()}")
    return init_device_mesh("cpu", (dist.get_world_size() // tp, tp), mesh_dim_names=("dp", "tp"))


def sharded_model(args: argparse.Namespace, mesh: DeviceMesh) -> nn.Module:
    """Return the model, split by FSDP2 over ``mesh["dp"]``, its blocks also by TP over ``mesh["tp"]``."""
    model = TinyTransformer(args.width, args.layers, args.length)
    for block in model.blocks:
        if mesh["tp"].size() > 1:
            plan = {
                "attention.query": ColwiseParallel(),
                "attention.key": ColwiseParallel(),
                "attention.value": ColwiseParallel(),
                "attention.out": RowwiseParallel(),
                "up": ColwiseParallel(),
                "down": RowwiseParallel(),
            }
            parallelize_module(block, mesh["tp"], plan)
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return model


def learning_rate_factor(step: int, steps: int) -> float:
    """Return the factor of the learning rate: five steps of warm-up, then half a cosine."""
    return min((step + 1) / 5, 0.5 + 0.5 * math.cos(math.pi * step / (steps + 1)))


def fingerprint(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Return a hash over every bit of the gathered parameters and optimizer state. It is equal on every mesh."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        tensors = {"": parameter, **optimizer.state[parameter]} if parameter in optimizer.state else {"": parameter}
        for key in sorted(tensors):
            value = tensors[key]
            full = value.full_tensor() if isinstance(value, DTensor) else value
            digest.update(f"{name} {key} {full.dtype} {tuple(full.shape)}".encode())
            digest.update(full.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()
