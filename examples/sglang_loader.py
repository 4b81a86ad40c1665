"""Load a model into SGLang straight from a training checkpoint, and change to newer ones while it serves.

    PYTHONPATH=examples python examples/sglang_loader.py FOLDER s3://bucket/run "Once upon a time"

FOLDER has the model's ``config.json`` and tokenizer, and no weights. SGLang begins with random weights. Each worker
then calls :func:`load_checkpoint`, reads the weights itself, checks all bytes, and keeps its part of them. Quantized
models, whose weights SGLang converts once after loading, need an export instead (``zarrckpt export``).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch

import zarrckpt

LOADER = "sglang_loader.load_checkpoint"
"""The import path of :func:`load_checkpoint`, for SGLang's ``custom_weight_loader``."""


def load_checkpoint(model: torch.nn.Module, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Load the weights below "model" of a checkpoint. Its url is the name of the only tensor, which has no content."""
    ((url, _),) = named_tensors
    load: Any = model.load_weights  # SGLang's models take pairs of a Hugging Face name and a tensor
    load(zarrckpt.open(url).select("model").iter_tensors(rename={"model.": ""}))


def use_checkpoint(engine: Any, url: str) -> None:
    """Make all workers of an engine load the checkpoint at a url."""
    succeeded, message = engine.update_weights_from_tensor([(url, torch.zeros(1))], load_format=LOADER)
    if not succeeded:
        raise RuntimeError(f"{url} was not loaded: {message}")


if __name__ == "__main__":
    import sglang

    folder, run, prompt = sys.argv[1:]
    engine = sglang.Engine(model_path=folder, load_format="dummy", custom_weight_loader=[LOADER])
    for url in zarrckpt.watch(run, newest_only=True):  # goes on with each newer checkpoint
        use_checkpoint(engine, url)
        print(url, engine.generate(prompt)["text"])
