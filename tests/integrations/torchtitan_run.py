"""A process of torchtitan's trainer with its debug model, on the CPU. It prints lines of JSON.

python torchtitan_run.py '{"folder": ..., "assets": ..., "kill_at": 7, ...}'

torchtitan trains on accelerators only. This script adds the missing parts for a CPU: the device's module, attention's
backward pass, reductions of gloo.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.nn.functional import scaled_dot_product_attention
from torchtitan.tools import utils

NOT_THERE = {
    "current_device": lambda: 0,
    "empty_cache": lambda: None,
    "get_device_name": lambda _: "cpu",
    "get_device_properties": lambda _: SimpleNamespace(total_memory=1 << 34),
    "memory_stats": lambda _: {},
    "reset_peak_memory_stats": lambda: None,
    "set_device": torch.cpu.set_device,
    "synchronize": torch.cpu.synchronize,
}
# Patched before the modules that import these names.
utils.device_type, utils.device_module = "cpu", SimpleNamespace(**NOT_THERE)

from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402
from torchtitan.distributed import utils as distributed  # noqa: E402
from torchtitan.models.common.attention import FlexAttention  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

sys.path.append(str(Path(__file__).parents[2] / "examples"))
import torchtitan_config  # noqa: E402


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, enable_gqa: bool, **_: Any) -> tuple[Any, Any]:
    return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=enable_gqa), None


FlexAttention.compiled_flex_attn = staticmethod(attend)
if not hasattr(torch.distributed, "set_timeout"):  # torch 2.13
    distributed.set_pg_timeouts = lambda **_: None


def write_assets(folder: Path) -> None:
    """Write a tokenizer and a dataset for all runs of a test."""
    words = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"w{i}": i + 3 for i in range(500)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    (folder / "texts").mkdir()
    texts = [" ".join(f"w{(37 * i + j * j) % 500}" for j in range(100)) for i in range(200)]
    rows = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (folder / "texts" / "data.json").write_text(rows)


def trainer_of(fields: dict[str, Any]) -> Trainer:
    config = torchtitan_config.llama3_debugmodel()
    config.checkpoint = dataclasses.replace(config.checkpoint, folder=fields["folder"], **fields.get("checkpoint", {}))
    config.dump_folder = fields["assets"]
    config.hf_assets_path = fields["assets"]
    config.dataloader.dataset_path = str(Path(fields["assets"]) / "texts")
    config.validator.enable = False
    config.debug.seed = fields.get("seed", 0)
    config.training.steps = fields["steps"]
    config.training.seq_len, config.training.local_batch_size = 32, fields.get("batch", 2)
    config.training.global_batch_size = 2
    config.lr_scheduler.total_steps = 20
    config.training.disable_cuda_graphs = True
    config.parallelism.spmd_backend = "partial_dtensor"  # the one that torch 2.13 has
    config.parallelism.tensor_parallel_degree = fields.get("tensor_parallel", 1)
    trainer = config.build()
    for module in trainer.model_parts[0].modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    return trainer


def digest_of(trainer: Trainer) -> str:
    """Return a digest of all parameters and moments, which is equal only if they are equal bit for bit."""
    states = {**trainer.checkpointer.states["model"].state_dict(), **trainer.optimizers.state_dict()}
    digest = hashlib.sha256()
    for name in sorted(states):
        value = states[name]
        if isinstance(value, torch.Tensor):
            whole = value.full_tensor() if hasattr(value, "full_tensor") else value
            digest.update(name.encode() + whole.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


def train(fields: dict[str, Any]) -> None:
    trainer = trainer_of(fields)
    rank = torch.distributed.get_rank()

    def say(**what: Any) -> None:
        print(json.dumps({"rank": rank, **what}) + "\n", end="", flush=True)

    def log(step: int, loss: float, *_: Any, **__: Any) -> None:
        say(step=step, loss=loss, digest=digest_of(trainer))
        if step == fields.get("kill_at"):
            os.kill(os.getpid(), signal.SIGKILL)

    load = trainer.checkpointer.load
    trainer.checkpointer.load = lambda step: (load(step), say(restored=trainer.step, digest=digest_of(trainer)))[0]
    trainer.metrics_processor.log = log
    trainer.train()
    trainer.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    train(json.loads(sys.argv[1]))
