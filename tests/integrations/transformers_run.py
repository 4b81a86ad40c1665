"""One training with ZarrTrainer, as a process of its own: ``transformers_run.py <options as JSON>``."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback, TrainingArguments, set_seed

from zarrckpt.integrations.transformers import ZarrTrainer


def config(**changes: Any) -> LlamaConfig:
    """A tiny model with dropout, so that generators matter."""
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 32}
    return LlamaConfig(**{**sizes, **heads, "attention_dropout": 0.1, **changes})


def dataset(rows: int = 64) -> list[dict[str, torch.Tensor]]:
    numbers = torch.randint(0, 64, (rows, 12), generator=torch.Generator().manual_seed(7))
    return [{"input_ids": row, "labels": row} for row in numbers]


class Killed(TrainerCallback):
    """Ends the process in the middle of a step."""

    def __init__(self, step: int, number: int = signal.SIGKILL) -> None:
        self.step, self.number = step, number

    def on_step_begin(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        if state.global_step == self.step:
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
    }
    return TrainingArguments(**{**own, **changes})


def losses(trainer: ZarrTrainer) -> dict[int, float]:
    return {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}


def moments(trainer: ZarrTrainer) -> dict[str, torch.Tensor]:
    """All of the optimizer's state by the names of parameters, whole."""
    names = {id(p): name for name, p in trainer.model.named_parameters()}
    found = {}
    for parameter, slots in trainer.optimizer.optimizer.state.items():
        for slot, value in slots.items():
            whole = value.full_tensor() if hasattr(value, "full_tensor") else value
            found[f"{names[id(parameter)]}.{slot}"] = whole.clone()
    return found


def main(given: dict[str, Any]) -> None:
    set_seed(1)
    model = LlamaForCausalLM(config())
    if given.get("lora"):
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.1))
    callbacks = [Killed(**given["killed"])] if "killed" in given else []
    args = arguments(**given.get("arguments", {}))
    trainer = ZarrTrainer(
        model, args, train_dataset=dataset(), eval_dataset=dataset(8), callbacks=callbacks, **given.get("trainer", {})
    )
    trainer.train(resume_from_checkpoint=given.get("resume"))
    if "result" in given:
        weights = {name: p.full_tensor() if hasattr(p, "full_tensor") else p for name, p in model.state_dict().items()}
        state = moments(trainer)
        if trainer.is_world_process_zero():
            result = {"losses": losses(trainer), "weights": weights, "moments": state, "preempted": trainer.preempted}
            torch.save(result, Path(given["result"]))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
