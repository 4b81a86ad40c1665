"""A training of a small Llama by Hugging Face's Trainer. It can be killed at any moment, and resumes.

    python examples/transformers_run.py run                                    # end it by Ctrl-C or kill; start again
    torchrun --nproc-per-node 2 examples/transformers_run.py s3://bucket/run   # on any number of processes
    python examples/transformers_run.py run --lora                             # adapters only; needs peft

It saves every 20 steps, and keeps the newest checkpoint and the best one. On SIGTERM it saves, and ends. At its end it
writes the model or the adapters to ``folder``, for ``from_pretrained``.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

import zarrckpt
from zarrckpt.integrations.transformers import ZarrTrainer, export_pretrained


def train(url: str, steps: int, lora: bool) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model: Any = LlamaForCausalLM(LlamaConfig(vocab_size=32, num_key_value_heads=4, **sizes))
    if lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    rows = [torch.arange(start, start + 16) % 32 for start in range(256)]
    data = [{"input_ids": row, "labels": row} for row in rows]
    args = TrainingArguments(
        output_dir=url,
        max_steps=steps,
        per_device_train_batch_size=8,
        learning_rate=1e-3,
        eval_strategy="steps",
        eval_steps=20,
        save_steps=20,
        save_total_limit=2,
        load_best_model_at_end=True,
        logging_steps=20,
        report_to="none",
    )
    trainer = ZarrTrainer(
        model,
        args,
        train_dataset=data,
        eval_dataset=data[::8],
        adapters_only=lora,
        background=True,
        signals=("SIGTERM",),
    )
    trainer.train(resume_from_checkpoint="auto")
    if trainer.preempted:
        print(f"The run ends early: step {trainer.state.global_step} is saved")
    elif trainer.is_world_process_zero():
        best = trainer.state.best_model_checkpoint
        print(f"The best checkpoint is {best}: {zarrckpt.open(best).metadata}")
        export_pretrained(best, "folder", overwrite=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="folder of the run's checkpoints: a path, or s3://bucket/run")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--lora", action="store_true", help="train and save adapters only")
    options = parser.parse_args()
    train(options.url, options.steps, options.lora)
