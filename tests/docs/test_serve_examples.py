"""The examples for inference servers, with stubs of FastAPI, vLLM and SGLang that have the interfaces they use."""

from __future__ import annotations

import asyncio
import importlib
import pkgutil
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from harness import ROOT
from harness.bits import same

import zarrckpt


class Model(torch.nn.Sequential):
    """The network of the examples, with ``load_weights`` as the models of vLLM and SGLang have it."""

    def __init__(self) -> None:
        super().__init__(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 1))

    def load_weights(self, weights: Any) -> set[str]:
        parameters = dict(self.named_parameters())
        return {name for name, tensor in weights if parameters[name].data.copy_(tensor) is not None}


def example(monkeypatch: pytest.MonkeyPatch, name: str, stubs: dict[str, Any]) -> Any:
    monkeypatch.syspath_prepend(ROOT / "examples")
    for module, stub in stubs.items():
        monkeypatch.setitem(sys.modules, module, stub)
    return importlib.import_module(name)


def save(run: Path, step: int) -> tuple[str, Model]:
    model = Model()
    zarrckpt.save({"model": model, "optim": torch.optim.AdamW(model.parameters())}, run / f"step-{step}")
    return str(run / f"step-{step}"), model


def test_a_server_switches_to_new_checkpoints(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    routes: dict[str, Any] = {}
    stub = MagicMock(**{"FastAPI.return_value.get": lambda path: lambda call: routes.setdefault(path, call)})
    stub.FastAPI.return_value.post, stub.HTTPException = stub.FastAPI.return_value.get, RuntimeError
    serve = example(monkeypatch, "serve_fastapi", {"fastapi": stub})
    newest = serve.NewestModel(str(tmp_path), interval=0.1)
    app = serve.make_app(newest)

    async def follow() -> None:
        async with stub.FastAPI.call_args.kwargs["lifespan"](app):
            with pytest.raises(RuntimeError, match="no checkpoint"):
                routes["/checkpoint"]()
            zarrckpt.save({"model": {"0.weight": torch.ones(2)}}, tmp_path / "step-0")  # of another model
            for step in (1, 2):
                (url, model), end = save(tmp_path, step), time.monotonic() + 60
                while newest.current is None or newest.current.url != url:
                    assert time.monotonic() < end
                    await asyncio.sleep(0.02)
                answer = routes["/predict"]([[1.0] * 16])
                assert answer["predictions"] == model(torch.ones(1, 16)).squeeze(1).tolist()
                assert answer["checkpoint"] == routes["/checkpoint"]()["url"] == url

    asyncio.run(follow())


def test_the_loader_for_vllm_fills_a_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    registry: dict[str, Any] = {}
    base = type("BaseModelLoader", (), {"__init__": lambda self, config: vars(self).update(load_config=config)})
    register = SimpleNamespace(register_model_loader=lambda name: lambda cls: registry.setdefault(name, cls))
    package = "vllm.model_executor.model_loader"
    stubs = {"vllm": None, package: register, f"{package}.base_loader": SimpleNamespace(BaseModelLoader=base)}
    example(monkeypatch, "vllm_loader", stubs).register()
    url, saved = save(tmp_path, 1)
    loader = registry["zarrckpt"](SimpleNamespace(model_loader_extra_config={"url": url}))
    loaded = Model()
    loader.load_weights(loaded, SimpleNamespace(quantization=None))
    assert same(loaded.state_dict(), saved.state_dict())
    loaded.register_parameter("extra", torch.nn.Parameter(torch.ones(1)))
    with pytest.raises(ValueError, match="extra"):
        loader.load_weights(loaded, SimpleNamespace(quantization=None))


def test_the_loader_for_sglang_fills_a_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    served = Model()

    def update(named_tensors: Any, load_format: str) -> tuple[bool, str]:
        """Import and call the loader as a worker of SGLang does."""
        pkgutil.resolve_name(load_format)(served, named_tensors)
        return True, "Success"

    use_checkpoint = example(monkeypatch, "sglang_loader", {}).use_checkpoint
    for step in (1, 2):
        url, saved = save(tmp_path, step)
        use_checkpoint(SimpleNamespace(update_weights_from_tensor=update), url)
        assert same(served.state_dict(), saved.state_dict())
