"""Read the state of a Hugging Face Trainer other than its model and optimizer, as data."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn
from transformers.trainer_callback import ExportableState, TrainerState

import zarrckpt
from zarrckpt._errors import log
from zarrckpt.integrations import _data, _values


class RestOfTrainer:
    """The state of a Trainer other than its model and optimizer, read at each save. Used on all ranks."""

    def __init__(self, trainer: Any, allow_pickle: bool) -> None:
        self._trainer = trainer
        self._allow_pickle = allow_pickle

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save. Raises UnsupportedValueError with the names of values that need pickle."""
        trainer = self._trainer
        trainer.store_flos()
        if (step := trainer.state.best_global_step) == trainer.state.global_step:
            trainer.state.best_model_checkpoint = f"{trainer.checkpoint_dir}/step-{step:08d}"
        checked = {"model": _data.state_to_check(trainer.model)}
        rest: dict[str, Any] = {"saved": ["model"]}
        if not trainer.args.save_only_model:
            parts = {"scheduler": trainer.lr_scheduler, "scaler": enabled_scaler(trainer)}
            rest = {name: part.state_dict() for name, part in parts.items() if part is not None}
            rest["saved"] = ["model", "optimizer", "rng", *rest]
            checked |= {"trainer": {**rest}, "optimizer": _data.state_to_check(plain_optimizer(trainer))}
            rest["rng"] = zarrckpt.PerRank(_values.random_state(trainer.args.device))
        _data.refuse_non_data(_data.find_non_data(checked, allow_pickle=self._allow_pickle))
        if trainer.is_world_process_zero():  # Times in the state differ between ranks.
            rest |= {"state": _state_text(trainer), **_descriptions(trainer.model)}
        return rest

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raise NotImplementedError: the Trainer's methods load each part themselves."""
        raise NotImplementedError


class TotalLimit(zarrckpt.Keep):
    """``save_total_limit`` as the Trainer counts it: the best checkpoint takes the place of the oldest.

    With a limit of 1, the newest is kept in addition to the best.
    """

    @classmethod
    def of(cls, args: Any) -> TotalLimit | None:
        """Return the limit in a Trainer's arguments, or None if it has none."""
        if args.save_total_limit is None or args.save_total_limit <= 0:
            return None
        # Compare the steps that the Trainer chose as its best, because it takes the first of equal metrics.
        best = int(args.metric_for_best_model is not None)
        return cls(newest=args.save_total_limit, best=best, metric="best_step", mode="max")

    def reasons(self, metadata_of: Mapping[int, Mapping[str, Any]]) -> dict[int, list[str]]:
        kept = super().reasons(metadata_of)
        if len(kept) > self.newest > 1:
            del kept[min(step for step, why in kept.items() if "newest" in why)]
        return kept


def plain_optimizer(trainer: Any) -> Any:
    """Return a Trainer's optimizer without Accelerate's wrapper."""
    return getattr(trainer.optimizer, "optimizer", trainer.optimizer)


def enabled_scaler(trainer: Any) -> Any:
    """Return a Trainer's gradient scaler, or None if it has none or it is disabled."""
    scaler = getattr(trainer.accelerator, "scaler", None)
    return scaler if scaler is not None and scaler.is_enabled() else None


def _state_text(trainer: Any) -> str:
    """Return the text that the Trainer itself writes to trainer_state.json, with its callbacks' current states."""
    state = trainer.state
    callbacks = [*trainer.callback_handler.callbacks, trainer.control]
    stateful = [callback for callback in callbacks if isinstance(callback, ExportableState)]
    state.stateful_callbacks = TrainerState(stateful_callbacks=stateful).stateful_callbacks
    fields = dataclasses.asdict(state)
    best = fields["best_model_checkpoint"]
    fields["best_model_checkpoint"] = best and best.removeprefix(f"{trainer.checkpoint_dir}/")
    for name, value in fields.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError) as err:
            raise zarrckpt.UnsupportedValueError(
                f"{name!r} of the TrainerState cannot be saved as JSON: {err}"
            ) from err
    return json.dumps(fields)


STATE_FILE = "trainer_state.json"


def restore_trainer_state(found: Mapping[str, Any], run: str, folder: str) -> dict[str, Any]:
    """Return the facts of a saved Trainer from which training resumes, and write its trainer_state.json to a folder.

    The best checkpoint is a text in the loaded checkpoint, so it is never opened as a url: it must be the name of a
    step. It has no folder, so runs can be moved.
    """
    trainer_state = json.loads(found["state"])
    saved = trainer_state["best_model_checkpoint"]
    is_step = isinstance(saved, str) and re.fullmatch(r"step-\d+", saved, re.ASCII)
    if saved is not None and not is_step:
        log.warning(
            "the best checkpoint %r is ignored, because it is not a step of the run %s. Comparison of metrics starts "
            "again",
            saved,
            run,
        )
        trainer_state |= {"best_metric": None, "best_global_step": None}
    best = f"{run}/{saved}" if is_step else None
    trainer_state["best_model_checkpoint"] = None  # The Trainer would look for a local folder.
    Path(folder, STATE_FILE).write_text(json.dumps(trainer_state))
    return {"saved": found["saved"], "state": found["state"], "best": best, "run": run}


class AdapterModel(nn.Module):
    """The adapters of a PEFT model and its other trained parameters, under their names in the model."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self._model = model

    def state_dict(self, *args: Any, **named: Any) -> Any:
        state = self._model.state_dict(*args, **named)
        variables = self._model.state_dict(keep_vars=True)
        for name in [*state]:
            if not variables[name].requires_grad and {*name.split(".")}.isdisjoint(self._model.peft_config):
                del state[name]
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        return self._model.load_state_dict(state_dict, strict=False, assign=assign)


def is_finite(value: Any) -> bool:
    """Whether a value can be a metric of a checkpoint."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _descriptions(model: Any) -> dict[str, str]:
    """Return the configurations from which a model can be built again, as JSON texts."""
    found = {}
    if (config := getattr(model, "config", None)) is not None and hasattr(config, "to_dict"):
        base = model.get_base_model() if hasattr(model, "peft_config") else model
        found["config"] = {**config.to_dict(), "architectures": [type(base).__name__.removeprefix("FSDP")]}
    if (generation := getattr(model, "generation_config", None)) is not None and hasattr(generation, "to_dict"):
        found["generation_config"] = generation.to_dict()
    if hasattr(model, "peft_config"):
        found["peft_config"] = {name: adapter.to_dict() for name, adapter in model.peft_config.items()}
    return {name: json.dumps(value, default=as_json_value) for name, value in found.items()}


def as_json_value(value: Any) -> Any:
    """Return a member of a configuration as JSON, for ``json.dumps(default=)``."""
    return sorted(value) if isinstance(value, set) else str(value)
