"""The log of a training run: lines on stdout, and JSON records for a program that watches it."""

from __future__ import annotations

import json
import os
import time
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

import zarrckpt


class Log:
    """The log, which rank 0 writes. The other ranks only take part in the collectives."""

    def __init__(self, path: str | None) -> None:
        self.first = dist.get_rank() == 0
        self.file = open(path, "a", buffering=1) if path and self.first else None  # noqa: SIM115 - open until the end
        self.began = time.monotonic()

    def start(self, resumed_from: str | None, model: nn.Module, text: int, state: str) -> None:
        """Log the begin of training: the size of the data, and a hash of the initial state. Collective."""
        pids: list[int] = [0] * dist.get_world_size()
        dist.all_gather_object(pids, os.getpid())
        parameters = sum(p.numel() for p in model.parameters())
        origin = f"resumed from {resumed_from}" if resumed_from else "from the start"
        self._say(f"{len(pids)} processes, {parameters:,} parameters, {origin}")
        self._record("start", pids=pids, parameters=parameters, text=text, resumed_from=resumed_from, state=state)

    def step(self, step: int, loss: Tensor) -> None:
        """Log a step, with the loss averaged over all ranks. Collective."""
        mean = loss.detach().clone()
        dist.all_reduce(mean)  # the ranks of one TP group have the same loss, so the average over all ranks is right
        value = mean.item() / dist.get_world_size()
        self._say(f"step {step:4d}   loss {value:.6f}   {time.monotonic() - self.began:6.1f} s")
        self._record("step", step=step, loss=value)

    def saving(self, step: int, state: str) -> None:
        """Log the begin of a save of this step."""
        self._record("saving", step=step, state=state)

    def saved(self, report: zarrckpt.SaveReport) -> None:
        """Log a committed checkpoint."""
        size = f"{report.nbytes / 1e6:.1f} MB in {report.objects} objects"
        self._say(f"saved {report.url}: {size}, {report.seconds:.2f} s")
        self._record(
            "saved",
            url=report.url,
            nbytes=report.nbytes,
            objects=report.objects,
            rank_bytes=report.rank_bytes,
            seconds=report.seconds,
        )

    def _say(self, text: str) -> None:
        if self.first:
            print(text, flush=True)

    def _record(self, event: str, **fields: Any) -> None:
        if self.file:
            self.file.write(json.dumps({"event": event, **fields}) + "\n")
