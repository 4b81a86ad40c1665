"""Load a model into vLLM straight from a training checkpoint, in any sharding, without an export.

    python examples/vllm_loader.py FOLDER s3://bucket/run "Once upon a time"

FOLDER has the model's ``config.json`` and tokenizer, and no weights. The newest checkpoint of the run is loaded. Each
worker reads the weights itself, checks all bytes, and keeps its part of them.

For ``vllm serve``, put this module into a package, and register the loader in all processes of vLLM by an entry point::

    [project.entry-points."vllm.general_plugins"]
    zarrckpt = "vllm_loader:register"

    vllm serve FOLDER --load-format zarrckpt --model-loader-extra-config '{"url": "s3://bucket/run/step-00000500"}'
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

import zarrckpt


@register_model_loader("zarrckpt")
class ZarrModelLoader(BaseModelLoader):  # type: ignore[misc]
    """Loads the weights below ``prefix`` (default: "model") of the checkpoint at ``url``.

    Both, and ``storage_options``, are members of vLLM's ``model_loader_extra_config``.
    """

    def download_model(self, model_config: Any) -> None:
        """Do nothing, because the weights are read from the store."""

    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        extra: dict[str, Any] = dict(self.load_config.model_loader_extra_config)
        prefix = extra.get("prefix", "model")
        ckpt = zarrckpt.open(extra["url"], storage_options=extra.get("storage_options"))
        weights = ckpt.select(prefix).iter_tensors(rename={f"{prefix}.": ""})
        load: Any = model.load_weights  # vLLM's models take pairs of a Hugging Face name and a tensor
        loaded = load(weights)
        if loaded is not None and getattr(model_config, "quantization", None) is None:
            missing = {name for name, _ in model.named_parameters()} - loaded
            if missing:
                raise ValueError(f"{ckpt.url} lacks weights of the model: {sorted(missing)[:5]}. Check prefix")


def register() -> None:
    """Do nothing. The import of this module has registered the loader."""


if __name__ == "__main__":
    from vllm import LLM

    folder, run, prompt = sys.argv[1:]
    # Chosen once, so that all workers load the same checkpoint.
    extra = {"url": zarrckpt.latest(run)}
    llm = LLM(model=folder, load_format="zarrckpt", model_loader_extra_config=extra)
    print(llm.generate(prompt)[0].outputs[0].text)
