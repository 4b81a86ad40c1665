"""Run trainings with ZarrTrainer, one after the other: ``transformers_run.py <list of their options as JSON>``."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from typing import Any

import numpy as np
import torch
from accelerate import DistributedType, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, GradientState
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback, TrainingArguments, set_seed
from transformers.distributed import DistributedConfig

from zarrckpt.integrations.transformers import ZarrTrainer


def config(**changes: Any) -> LlamaConfig:
    """Return a tiny model's configuration, with dropout, so that the result depends on generators."""
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 32}
    return LlamaConfig(**{**sizes, **heads, "attention_dropout": 0.1, **changes})


def dataset(rows: int = 64) -> list[dict[str, torch.Tensor]]:
    numbers = torch.randint(0, 64, (rows, 12), generator=torch.Generator().manual_seed(7))
    return [{"input_ids": row, "labels": row} for row in numbers]


class Killed(TrainerCallback):
    """Callback that sends a signal to one rank's process during training, or to its whole group as torchrun does."""

    def __init__(self, step: int, number: int = signal.SIGKILL, rank: int = 0, group: bool = False) -> None:
        self.step, self.number, self.rank, self.group = step, number, rank, group

    def on_step_begin(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        if state.global_step == self.step and args.process_index == self.rank:
            if self.group:
                os.killpg(os.getpgrp(), self.number)
            else:
                os.kill(os.getpid(), self.number)


def arguments(**changes: Any) -> TrainingArguments:
    own = {
        "output_dir": "out",
        "max_steps": 12,
        "per_device_train_batch_size": 4,
        "save_strategy": "steps",
        "save_steps": 4,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 3,
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "ddp_find_unused_parameters": False,
    }
    return TrainingArguments(**{**own, **changes})


def whole(value: torch.Tensor) -> torch.Tensor:
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()


def losses(trainer: ZarrTrainer) -> dict[int, float]:
    return {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}


def moments(model: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    """Return the optimizer's whole state by the names of parameters."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    state = getattr(optimizer, "optimizer", optimizer).state
    return {
        f"{names[id(parameter)]}.{slot}": whole(value)
        for parameter, slots in state.items()
        for slot, value in slots.items()
    }


class Loaded(TrainerCallback):
    """Callback that keeps the optimizer's state at the begin of training."""

    moments: dict[str, torch.Tensor]

    def on_train_begin(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        self.moments = moments(named["model"], named["optimizer"])


class ShardedOnCpu(ZarrTrainer):
    """A Trainer that shards by FSDP2 on the CPU. Accelerate itself does so only on accelerators."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
            cpu_ram_efficient_loading=False,
        )
        self.accelerator.state.distributed_type = DistributedType.FSDP
        self.accelerator.state.fsdp_plugin = plugin
        self.is_fsdp_enabled = True


def train(given: dict[str, Any]) -> ZarrTrainer:
    """Train once with the given options."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    set_seed(given.get("seed", 1))
    args = arguments(**given.get("arguments", {}))
    if "distributed" in given:
        sharding = DistributedConfig(**given["distributed"])
        model: Any = LlamaForCausalLM.from_pretrained("base", distributed_config=sharding)
    else:
        model = LlamaForCausalLM(config(**given.get("config", {})))
    if given.get("lora"):
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.1))
    callbacks = [Loaded(), *([Killed(**given["killed"])] if "killed" in given else [])]
    made = ShardedOnCpu if given.get("fsdp") else ZarrTrainer
    sets = {"train_dataset": dataset(), "eval_dataset": dataset(8)}
    trainer = made(model, args, callbacks=callbacks, **sets, **given.get("trainer", {}))
    trainer.train(resume_from_checkpoint=given.get("resume"))
    return trainer


def result(trainer: ZarrTrainer) -> dict[str, Any]:
    """Return the values that tests compare. Called on all ranks."""
    weights = {name: whole(value) for name, value in trainer.model.state_dict().items()}
    rng = [torch.get_rng_state(), torch.tensor(random.getstate()[1]), torch.tensor(np.random.get_state()[1].tolist())]
    return {
        "losses": losses(trainer),
        "weights": weights,
        "moments": moments(trainer.model, trainer.optimizer),
        "loaded": next(each.moments for each in trainer.callback_handler.callbacks if isinstance(each, Loaded)),
        "rng": rng,
        "step": trainer.state.global_step,
        "is_sharded": any(isinstance(value, DTensor) for value in trainer.model.parameters()),
    }


def main(trainings: list[dict[str, Any]]) -> None:
    for given in trainings:
        trainer = train(given)
        found = result(trainer)
        if "result" in given and trainer.is_world_process_zero():
            torch.save(found, given["result"])
        if "model_folder" in given:
            trainer.save_model(given["model_folder"])


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
