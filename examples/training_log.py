"""What a training run tells of itself: lines on stdout, and JSON records for a program that watches it."""

from __future__ import annotations

import json
import os
import time
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

import zarrckpt


class Log:
    """Rank 0 writes; the other ranks only take part in the collectives."""

    def __init__(self, path: str | None) -> None:
        self.first = dist.get_rank() == 0
        self.file = open(path, "a", buffering=1) if path and self.first else None  # noqa: SIM115 - open until the end
        self.began = time.monotonic()

    def start(self, resumed_from: str | None, model: nn.Module, text: int, state: str) -> None:
        """Training begins. ``text`` is the size of the data, ``state`` a hash of what it begins with. Collective."""
        pids: list[int] = [0] * dist.get_world_size()
        dist.all_gather_object(pids, os.getpid())
        parameters = sum(p.numel() for p in model.parameters())
        origin = f"resumed from {resumed_from}" if resumed_from else "from the start"
        self._say(f"{len(pids)} processes, {parameters:,} parameters, {origin}")
        self._record("start", pids=pids, parameters=parameters, text=text, resumed_from=resumed_from, state=state)

    def step(self, step: int, loss: Tensor) -> None:
        """One step is done; the loss is averaged over all ranks. Collective."""
        mean = loss.detach().clone()
        dist.all_reduce(mean)  # the ranks of one TP group hold the same loss: the average over all is still right
        value = mean.item() / dist.get_world_size()
        self._say(f"step {step:4d}   loss {value:.6f}   {time.monotonic() - self.began:6.1f} s")
        self._record("step", step=step, loss=value)

    def saving(self, step: int, state: str) -> None:
        """A checkpoint of this step begins."""
        self._record("saving", step=step, state=state)

    def saved(self, report: zarrckpt.SaveReport) -> None:
        """A checkpoint is committed."""
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
