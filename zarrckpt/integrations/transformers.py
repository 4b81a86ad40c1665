"""Hugging Face's Trainer with checkpoints of zarrckpt, and models of transformers from them."""

from __future__ import annotations

import copy
import json
import os
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import zarrckpt
from zarrckpt._errors import log
from zarrckpt._store._url import normalize, parse
from zarrckpt._store._whole_files import local_path
from zarrckpt.integrations import _framework, _values

_framework.require("transformers", "5.23", "6", "transformers")

from torch import nn  # noqa: E402
from transformers import Trainer, TrainerCallback, TrainingArguments  # noqa: E402

from zarrckpt.integrations._pretrained import export_pretrained, load_pretrained  # noqa: E402
from zarrckpt.integrations._trainer_state import (  # noqa: E402
    AdaptersOnly,
    RestOfTrainer,
    TotalLimit,
    enabled_scaler,
    is_finite,
    plain_optimizer,
)

__all__ = ["ZarrCheckpointMixin", "ZarrTrainer", "export_pretrained", "load_pretrained"]

_Base: Any = Trainer if TYPE_CHECKING else object

_STATE_FILE = "trainer_state.json"
_LOCAL_OUTPUT = "trainer_output"
"""The Trainer's own default, for what it writes beside checkpoints where ``output_dir`` is a url."""


class ZarrCheckpointMixin(_Base):  # type: ignore[misc]
    """Has a Trainer save, find, resume and delete checkpoints with a :class:`zarrckpt.CheckpointManager`.

    For the Trainer and its subclasses: ``class MyTrainer(ZarrCheckpointMixin, Seq2SeqTrainer)``;
    :class:`ZarrTrainer` is the one of the Trainer itself. ``save_strategy``, ``save_steps``, ``save_total_limit``,
    ``load_best_model_at_end``, ``metric_for_best_model`` and ``save_only_model`` mean what they mean there. Checkpoints
    are ``<checkpoint_dir>/step-00000500``; their metadata are the step, the epoch, and the metrics of the evaluation.

    Args:
        model, args: the Trainer's own first two arguments. Its others follow, unchanged.
        checkpoint_dir: the run's folder: a local path, or any url that :func:`zarrckpt.save` takes. Default:
            ``args.output_dir``, which may be a url then; what else the Trainer writes goes to ``trainer_output``.
        adapters_only: save of a PEFT model only the adapters, what else is trained, and the optimizer's state. To
            resume, make the same model from its base first.
        background: save with :func:`zarrckpt.async_save`: training waits for a copy in memory only. An error of a save
            is raised at the next one, or at the end of training.
        signals: names of signals, ``("SIGTERM",)``, after which all ranks save one step, and training ends;
            :attr:`preempted` is true then. The Trainer is run in the main thread. Default: none is handled.
        grace: the seconds within which that save is to have ended, see :class:`zarrckpt.CheckpointManager`.
        rewind: ``resume_from_checkpoint=<url>`` of an earlier step of the run removes all later ones. Default: such a
            url is a ValueError.
        allow_pickle: save values that only pickle keeps (of the scheduler, the optimizer, the model's extra state), and
            load them, which runs any code that the checkpoint holds. Default: UnsupportedValueError, when it is saved.
        storage_options, options: as in :func:`zarrckpt.save`.

    All ranks make the same calls. A save costs what :func:`zarrckpt.save` costs, and three requests. Raises TypeError
    and ValueError for arguments that make no sense, and for DeepSpeed.
    """

    def __init__(
        self,
        model: Any = None,
        args: Any = None,
        *others: Any,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        adapters_only: bool = False,
        background: bool = False,
        signals: Sequence[str] = (),
        grace: float = 25.0,
        rewind: bool = False,
        allow_pickle: bool = False,
        storage_options: Mapping[str, Any] | None = None,
        options: zarrckpt.SaveOptions | None = None,
        **named: Any,
    ) -> None:
        args = TrainingArguments(_LOCAL_OUTPUT) if args is None else copy.copy(args)
        self.checkpoint_dir = normalize(args.output_dir if checkpoint_dir is None else checkpoint_dir)
        place = parse(args.output_dir)
        args.output_dir = place.path if place.kind == "local" else _LOCAL_OUTPUT
        self.adapters_only = adapters_only
        self.preempted = False
        self._make_manager = partial(
            zarrckpt.CheckpointManager,
            self.checkpoint_dir,
            signals=signals,
            grace=grace,
            background=background,
            storage_options=storage_options,
            options=options,
        )
        self._watches_signals = bool(signals)
        self._storage_options = storage_options
        self._rewind = rewind
        self._allow_pickle = allow_pickle
        self._manager: zarrckpt.CheckpointManager | None = None
        self._load: Callable[[dict[str, Any]], Any] | None = None
        """What fills a state from the checkpoint that is resumed from; None for a folder of the Trainer's own."""
        self._resumed: dict[str, Any] = {}
        save_only_model = args.save_only_model
        # The Trainer refuses to save optimizers of models that were sharded as they were loaded. Its files cannot.
        args.save_only_model = save_only_model or getattr(model, "is_distributed_loading_by_transformers", False)
        super().__init__(model, args, *others, **named)
        self.args.save_only_model = save_only_model
        if self.is_deepspeed_enabled or self.is_fsdp_xla_enabled:
            raise ValueError("ZarrCheckpointMixin saves neither DeepSpeed's state nor FSDP's of XLA")
        if adapters_only and not hasattr(self.model, "peft_config"):
            raise ValueError(f"adapters_only=True needs a model of PEFT, got a {type(self.model).__name__}")
        self.add_callback(_StepEnd(self))

    # -- where the Trainer calls

    def train(self, resume_from_checkpoint: Any = None, trial: Any = None, ignore_keys_for_eval: Any = None) -> Any:
        """As ``Trainer.train``. Called on all ranks.

        Args:
            resume_from_checkpoint: True, the newest complete checkpoint of the run, an error where there is none;
                ``"auto"``, the newest one where there is any; the url of a checkpoint, of this run or another; or a
                local folder that the Trainer itself has saved. Where the newest is damaged, a warning names it, and the
                one before is resumed from; one that was named is a CorruptCheckpointError.
            trial: None: hyperparameter search is not supported.
            ignore_keys_for_eval: the Trainer's own.

        Raises ValueError where the run has checkpoints and is not resumed from the newest; what
        :meth:`zarrckpt.CheckpointManager.restore` and :func:`zarrckpt.save` raise.
        """
        if trial is not None:
            raise ValueError("hyperparameter search is not supported: use another checkpoint_dir for each trial")
        manager = self._make_manager(keep=TotalLimit.of(self.args))
        self._manager, self._load, self._resumed, self.preempted = manager, None, {}, False
        with manager, tempfile.TemporaryDirectory() as folder:
            resume = self._begin(resume_from_checkpoint, manager, folder)
            return super().train(resume, None, ignore_keys_for_eval)

    def save_model(self, output_dir: Any = None, _internal_call: bool = False) -> None:
        """As ``Trainer.save_model``: write a local folder that ``from_pretrained`` takes. Called on all ranks.

        With FSDP's ``SHARDED_STATE_DICT`` the Trainer writes nothing, which is logged. Raises StorageError for a url
        before anything is written: the Trainer would make a local folder of that name.
        """
        super().save_model(None if output_dir is None else local_path(output_dir), _internal_call)
        if self.is_fsdp_enabled and "FULL_STATE_DICT" not in str(self.accelerator.state.fsdp_plugin.state_dict_type):
            log.warning(
                "save_model wrote nothing to %s: with FSDP the Trainer writes models only if fsdp_config has "
                'state_dict_type="FULL_STATE_DICT". export_pretrained writes one from a checkpoint in %s',
                output_dir or self.args.output_dir,
                self.checkpoint_dir,
            )

    def _get_output_dir(self, trial: Any) -> str:
        # Below args.output_dir the Trainer would look for its own checkpoints, to delete some.
        return self.checkpoint_dir

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        assert self._manager is not None
        step = self.state.global_step
        best = step if self.state.best_global_step == step else None
        evaluated = [entry for entry in self.state.log_history if entry.get("step") == step]
        metrics = {name: value for entry in evaluated for name, value in entry.items() if name.startswith("eval_")}
        known = {name: value for name, value in metrics.items() if is_finite(value)}
        self._manager.save(step, self._saved(), {**known, "best_step": best}, {"epoch": self.state.epoch})

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if self._load is None:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load all at once: here the model is wrapped and sharded, the optimizer and the scheduler are made."""
        if self._load is None:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        saved = self._resumed["saved"]
        rest: dict[str, Any] = {"state": None, "saved": None}
        rest |= {name: None for name in ("scheduler", "scaler") if name in saved}
        # A rank that was not there goes on with the seed that the Trainer gave it, as the Trainer's own does.
        rest |= {"rng": zarrckpt.PerRank(new_ranks="keep")} if "rng" in saved else {}
        state: dict[str, Any] = {"model": self._module(), "optimizer": plain_optimizer(self), "trainer": rest}
        self._load({name: value for name, value in state.items() if value and name in (*saved, "trainer")})
        if rest["state"] != self._resumed["state"]:
            assert checkpoint is not None
            self._lay_out(rest, self._resumed["run"], checkpoint)
            raise _PassedOver
        if "scheduler" in saved:
            self.lr_scheduler.load_state_dict(rest["scheduler"])
        if "scaler" in saved and (scaler := enabled_scaler(self)) is not None:
            scaler.load_state_dict(rest["scaler"])
        self._resumed["rng"] = rest["rng"].value if "rng" in saved else None
        self.state.best_model_checkpoint = self._resumed["best"]

    def _inner_training_loop(self, *args: Any, **named: Any) -> Any:
        """Train. Where a damaged checkpoint was passed over, begin anew: the older one says where training goes on."""
        while True:
            try:
                return super()._inner_training_loop(*args, **named)
            except _PassedOver:
                continue

    def _load_scaler(self, checkpoint: str | None) -> None:
        if self._load is None:
            super()._load_scaler(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if self._load is None:
            super()._load_rng_state(checkpoint)
        elif self._resumed["rng"]:
            _values.set_random_state(self.args.device, self._resumed["rng"])

    def _load_best_model(self) -> None:
        assert self._manager is not None
        self._manager.wait()
        url = self.state.best_model_checkpoint
        own = os.path.join(url, _STATE_FILE)
        if os.path.dirname(os.path.abspath(url)) == self._resumed.get("folder") and os.path.isfile(own):
            super()._load_best_model()  # from before the run became one of zarrckpt
            return
        if self._step_in_run(url) is None and url != self._resumed.get("best"):
            log.warning("the best checkpoint, %r, is no checkpoint of this run: the model stays as it is", url)
            return
        try:
            zarrckpt.load({"model": self._module()}, url, storage_options=self._storage_options)
        except zarrckpt.CheckpointNotFoundError:
            log.warning("the best checkpoint, %s, is not there any more: the model stays as it is", url)

    # -- what is saved and resumed

    def _begin(self, resume: Any, manager: zarrckpt.CheckpointManager, folder: str) -> str | None:
        """Find what is resumed from, and lay out in a folder what the Trainer itself reads of it."""
        place = parse(resume) if isinstance(resume, str | os.PathLike) and resume not in ("", "auto") else None
        if place is not None and place.kind == "local" and os.path.isfile(os.path.join(place.path, _STATE_FILE)):
            self._resumed = {"folder": os.path.dirname(place.path)}
            return place.path
        newest = zarrckpt.latest(self.checkpoint_dir, storage_options=self._storage_options)
        if resume == "auto":
            resume = newest is not None
        if not resume:
            if newest is not None and self.args.save_strategy != "no":
                raise ValueError(f'{newest} is there: pass resume_from_checkpoint="auto", or another checkpoint_dir')
            return None
        if resume is True and newest is None:
            raise ValueError(f"No valid checkpoint found in output directory ({self.checkpoint_dir})")
        url = str(newest) if resume is True else normalize(resume)
        step, last = self._step_in_run(url), self._step_in_run(newest or "")
        state: dict[str, Any] = {"trainer": {"state": None, "saved": None}}
        if resume is True or step is not None:
            if step != last and not self._rewind:
                raise ValueError(f"{newest} is later than {url}: rewind=True would remove all checkpoints after that")
            chosen = None if resume is True else step
            manager.restore(state, step=chosen, rewind=step != last)
            # The newest is chosen once more when all of it is read: any of it may be damaged.
            self._load = partial(manager.restore, step=chosen, allow_pickle=self._allow_pickle)
        else:
            self._load = lambda target: zarrckpt.load(
                target, url, allow_pickle=self._allow_pickle, storage_options=self._storage_options
            )
            self._load(state)
        self._lay_out(state["trainer"], url.rpartition("/")[0], folder)
        return folder

    def _lay_out(self, found: Mapping[str, Any], run: str, folder: str) -> None:
        """Write what the Trainer itself reads of a checkpoint of a run into a folder."""
        trainer_state = json.loads(found["state"])
        saved = trainer_state["best_model_checkpoint"]
        best = _best_in_run(run, saved)
        if saved is not None and best is None:
            log.warning("the best checkpoint, %r, is no step of the run %s: the best is looked for anew", saved, run)
            trainer_state |= {"best_metric": None, "best_global_step": None}
        self._resumed = {"saved": found["saved"], "state": found["state"], "best": best, "run": run}
        trainer_state["best_model_checkpoint"] = None  # the Trainer would look for it on the disk
        Path(folder, _STATE_FILE).write_text(json.dumps(trainer_state))

    def _step_in_run(self, url: str) -> int | None:
        """The step of a checkpoint of this run; None for others."""
        match = re.fullmatch(re.escape(f"{self.checkpoint_dir}/step-") + r"(\d+)", url)
        return None if match is None else int(match[1])

    def _saved(self) -> dict[str, Any]:
        """The state to save. What takes time is done only when it is."""
        state = {"model": self._module(), "trainer": RestOfTrainer(self, self._allow_pickle)}
        return state if self.args.save_only_model else {**state, "optimizer": plain_optimizer(self)}

    def _module(self) -> nn.Module:
        model: nn.Module = self.model
        return AdaptersOnly(model) if self.adapters_only else model


def _best_in_run(run: str, saved: Any) -> str | None:
    """Return the url of the step of a run that a saved state names as its best; None for any other text.

    The text comes from the checkpoint, so it is never opened as a url. The run may have been moved.
    """
    named = isinstance(saved, str) and re.fullmatch(r"step-\d+", saved, re.ASCII)
    return f"{run}/{saved}" if named else None


class ZarrTrainer(ZarrCheckpointMixin, Trainer):  # type: ignore[misc]
    """``transformers.Trainer`` with the checkpoints of :class:`ZarrCheckpointMixin`, which has the arguments."""


class _PassedOver(Exception):
    """Another checkpoint was loaded than the one whose state the Trainer goes by."""


class _StepEnd(TrainerCallback):  # type: ignore[misc]
    """Saves before pre-emption."""

    def __init__(self, trainer: ZarrCheckpointMixin) -> None:
        self._trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        trainer = self._trainer
        if trainer._manager is not None and trainer._watches_signals:
            trainer._manager.step(state.global_step, trainer._saved())
            if trainer._manager.preempted:
                trainer.preempted = control.should_training_stop = True
                control.should_evaluate = False  # there is no time for it
