"""Exports of models with LoRA adapters, compared with PEFT's own merge and with from_pretrained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import transformers_run
from peft import IA3Config, LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
)

import zarrckpt
from zarrckpt.integrations.transformers import ZarrTrainer, export_pretrained, load_pretrained


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    transformers.logging.set_verbosity_error()


def llama(**more: Any) -> LlamaForCausalLM:
    config = LlamaConfig(
        **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, **more},
        num_attention_heads=2,
    )
    return LlamaForCausalLM(config)


def gpt2() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2, n_positions=32))


def adapted(base: Any, dtype: torch.dtype = torch.float32, autocast: bool = True, **lora: Any) -> Any:
    """Return a PEFT model whose adapter has random values."""
    torch.manual_seed(0)
    model = get_peft_model(base.to(dtype), LoraConfig(**lora), autocast_adapter_dtype=autocast)
    for name, parameter in model.named_parameters():
        if "lora_" in name or "modules_to_save" in name or "bias" in name:
            torch.nn.init.normal_(parameter.data, std=0.3)
    return model


PATTERNS: dict[str, Any] = {"rank_pattern": {"q_proj": 3}, "alpha_pattern": {r"layers\.1\..*up_proj": 5}}
MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "linear": (llama, {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "up_proj", "down_proj"]}),
    "patterns": (llama, {"r": 4, "use_rslora": True, "target_modules": ["q_proj", "up_proj"], **PATTERNS}),
    "bias": (lambda: llama(attention_bias=True), {"target_modules": ["q_proj"], "bias": "all"}),
    "embedding": (llama, {"r": 2, "target_modules": ["embed_tokens", "lm_head"]}),
    "modules to save": (llama, {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "norm"]}),
    "pissa": (llama, {"r": 4, "target_modules": ["q_proj"], "init_lora_weights": "pissa"}),
    "Conv1D": (gpt2, {"r": 4, "target_modules": ["c_attn", "c_proj"]}),
}
CASES = [(kind, *dtype) for kind in MODELS for dtype in ((torch.float32, True), (torch.bfloat16, False))]
CASES += [(kind, dtype, True) for kind in ("linear", "embedding") for dtype in (torch.bfloat16, torch.float16)]


@pytest.mark.parametrize(("kind", "dtype", "autocast"), CASES)
def test_merged_models_are_those_of_peft(kind: str, dtype: torch.dtype, autocast: bool) -> None:
    make, lora = MODELS[kind]
    model = adapted(make(), dtype, autocast, **lora)
    config = model.get_base_model().config
    zarrckpt.save({"model": model}, "ckpt")
    # The user may pass a new configuration: PEFT sets fan_in_fan_out for Conv1D itself.
    given = LoraConfig(**lora) if kind == "Conv1D" else model.peft_config
    report = export_pretrained("ckpt", "out", config=config, peft_config=given, merge=True, max_file_bytes=15_000)
    merged = model.merge_and_unload()
    found: dict[str, torch.Tensor] = {}
    for name in report.files:
        found |= load_file(f"out/{name}") if name.endswith(".safetensors") else {}
    expected = merged.state_dict()
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    assert found.keys() == expected.keys() - tied and len(report.files) > 3
    for name, tensor in found.items():
        assert tensor.dtype is dtype and torch.equal(tensor, expected[name]), name
    read = AutoModelForCausalLM.from_pretrained("out", dtype=dtype)
    assert read.state_dict().keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in read.state_dict().items())


def test_a_trainers_checkpoint_has_all_that_a_merge_needs() -> None:
    model = adapted(llama(), target_modules=["q_proj"], r=2)
    args = transformers_run.arguments(max_steps=2, save_steps=2)
    for folder, adapters_only in (("run", False), ("adapters", True)):
        sets = {"train_dataset": transformers_run.dataset(), "adapters_only": adapters_only}
        ZarrTrainer(model, args, checkpoint_dir=folder, **sets).train()
    url = f"memory://{Path.cwd().name}"
    export_pretrained("run/step-00000002", "out", merge=True, dtype="bfloat16")
    export_pretrained("run/step-00000002", url, merge=True)
    with pytest.raises(zarrckpt.UnsupportedValueError, match=r"q_proj\.weight.*adapters_only"):
        export_pretrained("adapters/step-00000002", "none", merge=True)
    with pytest.raises(zarrckpt.KeyMismatchError, match=r"LoRA.*merge=True"):
        load_pretrained(LlamaForCausalLM, "run/step-00000002")
    saved = zarrckpt.open("run/step-00000002").load("model")["model"]
    model.load_state_dict(saved)
    merged = model.merge_and_unload()
    read = AutoModelForCausalLM.from_pretrained("out")
    assert read.dtype is torch.bfloat16 and type(read) is LlamaForCausalLM
    for name, value in merged.state_dict().items():
        assert torch.equal(read.state_dict()[name], value.bfloat16()), name


def test_adapters_of_a_plain_loop_are_exported_for_peft() -> None:
    model = adapted(llama(), target_modules=["q_proj"], r=2)
    zarrckpt.save({"model": model}, "ckpt")
    export_pretrained("ckpt", "folder", peft_config=model.peft_config["default"])
    base = llama()
    base.load_state_dict(
        {
            name.removeprefix("base_model.model.").replace(".base_layer", ""): value
            for name, value in model.state_dict().items()
            if "lora_" not in name
        }
    )
    read = PeftModel.from_pretrained(base, "folder")
    numbers = torch.arange(10)[None]
    assert torch.equal(read.eval()(numbers).logits, model.eval()(numbers).logits)


def test_prompts_are_not_exported_as_adapters() -> None:
    model = get_peft_model(llama(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    zarrckpt.save({"model": model}, "ckpt")
    with pytest.raises(zarrckpt.UnsupportedValueError, match="PROMPT_TUNING"):
        export_pretrained("ckpt", "out", peft_config=model.peft_config)


def _second_adapter(model: Any) -> Any:
    model.add_adapter("other", LoraConfig(target_modules=["up_proj"]))
    return model


def _quantised(model: Any) -> Any:
    """Return a state with the dtypes and names of bitsandbytes."""
    state = dict(model.state_dict())
    name = next(name for name in state if name.endswith("q_proj.base_layer.weight"))
    return state | {name: state[name].to(torch.int8)}


TARGET: Any = {"target_modules": ["q_proj"], "r": 2}
REFUSED: dict[str, tuple[Any, str]] = {
    "DoRA": (lambda: adapted(llama(), use_dora=True, **TARGET), "lora_magnitude_vector"),
    "two adapters": (lambda: _second_adapter(adapted(llama(), **TARGET)), "'default', 'other'"),
    "lora_bias": (lambda: adapted(llama(attention_bias=True), lora_bias=True, **TARGET), r"lora_B\.default\.bias"),
    "tied": (lambda: adapted(llama(tie_word_embeddings=True), target_modules=["lm_head"]), r"tied.*lm_head\.weight"),
    "tied embedding": (
        lambda: adapted(llama(tie_word_embeddings=True), target_modules=["embed_tokens"]),
        r"tied.*embed_tokens\.weight",
    ),
    "tied and trained": (
        lambda: adapted(llama(tie_word_embeddings=True), modules_to_save=["lm_head"], **TARGET),
        r"tied.*lm_head\.weight",
    ),
    "parameters": (
        lambda: adapted(llama(), target_parameters=["q_proj.weight"], **{**TARGET, "target_modules": []}),
        "target_parameters",
    ),
    "new tokens": (lambda: adapted(llama(), trainable_token_indices=[1], **TARGET), "token_adapter"),
    "quantised": (lambda: _quantised(adapted(llama(), **TARGET)), r"int8"),
    "IA3": (
        lambda: get_peft_model(llama(), IA3Config(target_modules=["q_proj"], feedforward_modules=[])),
        "0 adapters",
    ),
    "no adapter": (llama, "0 adapters"),
    "infinite": (lambda: adapted(llama(), lora_alpha=1e39, **TARGET), "infinite"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_merges_that_are_not_supported_are_refused_by_name(kind: str) -> None:
    make, message = REFUSED[kind]
    model = make()
    zarrckpt.save({"model": model}, "ckpt")
    config = llama(tie_word_embeddings=kind.startswith("tied"), attention_bias=kind == "lora_bias").config
    given = getattr(model, "peft_config", {"default": LoraConfig(**TARGET)})
    with pytest.raises(zarrckpt.UnsupportedValueError, match=message):
        export_pretrained("ckpt", "out", config=config, peft_config=given, merge=True)
    assert not [*Path.cwd().glob("out/*")]


def test_a_merge_needs_the_configurations() -> None:
    model = adapted(llama(), **TARGET)
    zarrckpt.save({"model": model}, "ckpt")
    config = model.get_base_model().config
    with pytest.raises(ValueError, match=r"peft_config=model\.peft_config"):
        export_pretrained("ckpt", "out", config=config, merge=True)
    given = {"default": {**json.loads(json.dumps(model.peft_config["default"].to_dict(), default=sorted)), "r": 4}}
    with pytest.raises(zarrckpt.UnsupportedValueError, match=r"factors of the shapes \[\(4, 32\)"):
        export_pretrained("ckpt", "out", config=config, peft_config=given, merge=True)
    config.architectures = ["OwnModel"]
    with pytest.raises(zarrckpt.UnsupportedValueError, match="OwnModel"):
        export_pretrained("ckpt", "out", config=config, peft_config=model.peft_config, merge=True)
    assert not Path("out").exists()


def test_exports_compare_names_with_the_model() -> None:
    lora = adapted(llama(), **TARGET)
    config = lora.get_base_model().config
    zarrckpt.save({"model": lora, "in": {"model": llama()}, "head": LlamaForSequenceClassification(config)}, "ckpt")
    for architectures in (None, ["LlamaForCausalLM"], ["OwnModel"]):
        config.architectures = architectures
        with pytest.raises(zarrckpt.KeyMismatchError, match=r"LoRA.*peft_config=.*merge=True"):
            export_pretrained("ckpt", "out", config=config)
    config.architectures = ["LlamaForCausalLM"]
    for prefix in ("in", "head"):
        with pytest.raises(zarrckpt.KeyMismatchError, match="prefix="):
            export_pretrained("ckpt", "out", config=config, prefix=prefix)
    config.architectures = None
    with pytest.raises(zarrckpt.KeyMismatchError, match="prefix="):
        export_pretrained("ckpt", "out", config=config, prefix="in")
    assert not Path("out").exists()
    export_pretrained("ckpt", "out", config=config, prefix="head")
    assert LlamaForSequenceClassification.from_pretrained("out").config.architectures is None
