"""A training run under Ray Train that resumes after a worker or a node is lost.

    python examples/ray_train.py s3://bucket/run --storage s3://bucket/ray    # ray[default,train] is required

The workers save and load the checkpoints themselves, in parallel, at the url of the run. Ray gets a folder with a small
file that names a checkpoint. So Ray's retention and ``ray.train.get_checkpoint`` handle a few bytes.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import ray.train
import torch
import torch.distributed as dist
from ray.train.torch import TorchTrainer
from torch.distributed.fsdp import fully_shard

import zarrckpt

FILE = "zarrckpt.json"


def report(run: str, step: int, metrics: dict[str, Any]) -> None:
    """Report a committed checkpoint's metrics and url to Ray. All workers call it, and wait for each other."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = None
        if dist.get_rank() == 0:
            Path(folder, FILE).write_text(json.dumps({"url": f"{run}/step-{step:08d}", "step": step}))
            checkpoint = ray.train.Checkpoint.from_directory(folder)
        ray.train.report(metrics, checkpoint=checkpoint)


def reported_step(run: str) -> int:
    """Return the step of the last checkpoint that was reported to Ray, 0 at the beginning of the run.

    Anyone who can write to Ray's storage can change the file. So its url is only compared, never opened.
    """
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return 0
    with checkpoint.as_directory() as folder:
        stored = json.loads(Path(folder, FILE).read_text())
    if stored != {"url": f"{run}/step-{int(stored['step']):08d}", "step": int(stored["step"])}:
        raise ValueError(f"the checkpoint in Ray's storage names {stored!r}, expected a checkpoint of the run {run!r}")
    return int(stored["step"])


def train(config: dict[str, Any]) -> None:
    """Train on one worker. Ray calls this function on each worker, and again after a failure."""
    run, steps, every = config["run"], config["steps"], config["every"]
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 1))
    fully_shard(model)
    optim = torch.optim.AdamW(model.parameters(), lr=1e-3)
    state = {"model": model, "optim": optim}

    # signals=(): Ray runs this function in a thread, and Python handles signals only in the main thread.
    manager = zarrckpt.CheckpointManager(run, keep=zarrckpt.Keep(newest=3), signals=())
    first = manager.restore(state) or 0
    if first < reported_step(run):
        raise RuntimeError(f"{run} has no checkpoint after step {first}, but step {reported_step(run)} was reported")
    if dist.get_rank() == 0:
        print(f"The run begins after step {first}", flush=True)
    saved: tuple[int, dict[str, Any]] | None = None
    for step in range(first + 1, steps + 1):
        # The batch depends only on the step, so an interrupted run has the same batches as any other.
        inputs = torch.randn(32, 16, generator=torch.Generator().manual_seed(step))
        loss = (model(inputs).squeeze(1) - inputs.sum(1)).square().mean()
        loss.backward()
        optim.step()
        optim.zero_grad()
        if step % every == 0:
            if saved:
                manager.wait()  # afterwards the last checkpoint is committed
                report(run, *saved)
            manager.save(step, state, metrics={"loss": loss})  # in the background
            saved = step, {"step": step, "loss": loss.item()}
    manager.close()
    if saved:
        report(run, *saved)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="folder of the run's checkpoints: a path that all nodes share, or s3://bucket/run")
    parser.add_argument("--storage", required=True, help="folder for Ray's own files, also on a shared path or in S3")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--every", type=int, default=20, help="steps between two checkpoints")
    args = parser.parse_args()
    trainer = TorchTrainer(
        train,
        train_loop_config={"run": args.run.rstrip("/"), "steps": args.steps, "every": args.every},
        scaling_config=ray.train.ScalingConfig(num_workers=args.workers, use_gpu=args.gpu),
        run_config=ray.train.RunConfig(
            name="train",
            storage_path=args.storage,
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=3),
            failure_config=ray.train.FailureConfig(max_failures=3),
        ),
    )
    result = trainer.fit()
    print(f"The last checkpoint that Ray has: {result.checkpoint}, {result.metrics}")


if __name__ == "__main__":
    main()
