"""Hugging Face's Trainer with zarrckpt's checkpoints, and conversions of these to models of transformers."""

from __future__ import annotations

import copy
import os
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import zarrckpt
from zarrckpt._errors import log
from zarrckpt._store._url import normalize, parse
from zarrckpt._store._whole_files import local_path
from zarrckpt.integrations import _framework, _values

_framework.require("transformers")

from torch import nn  # noqa: E402
from transformers import Trainer, TrainerCallback, TrainingArguments  # noqa: E402

from zarrckpt.integrations._pretrained import export_pretrained, load_pretrained  # noqa: E402
from zarrckpt.integrations._trainer_state import (  # noqa: E402
    STATE_FILE,
    AdapterModel,
    RestOfTrainer,
    TotalLimit,
    enabled_scaler,
    is_finite,
    plain_optimizer,
    restore_trainer_state,
)

__all__ = ["ZarrCheckpointMixin", "ZarrTrainer", "export_pretrained", "load_pretrained"]

_Base: Any = Trainer if TYPE_CHECKING else object

_LOCAL_OUTPUT = "trainer_output"
"""The folder for the Trainer's other files if ``output_dir`` is a url. This is also the Trainer's default."""


class ZarrCheckpointMixin(_Base):  # type: ignore[misc]
    """A mixin with which a Trainer saves, resumes and deletes through a :class:`zarrckpt.CheckpointManager`.

    It works with the Trainer and its subclasses: ``class MyTrainer(ZarrCheckpointMixin, Seq2SeqTrainer)``.
    :class:`ZarrTrainer` combines it with the Trainer itself. ``save_strategy``, ``save_steps``, ``save_total_limit``,
    ``load_best_model_at_end``, ``metric_for_best_model`` and ``save_only_model`` keep their meaning. Checkpoints are
    named ``<checkpoint_dir>/step-00000500``. Their metadata have the step, the epoch, and the evaluation's metrics.

    Args:
        model, args: the Trainer's own first two arguments. Its other arguments follow, unchanged.
        checkpoint_dir: the run's folder: a local path, or any url of :func:`zarrckpt.save`. Default:
            ``args.output_dir``. If that is a url, the Trainer's other files go to ``trainer_output``.
        adapters_only: save only the adapters of a PEFT model, its other trained parameters, and the optimizer's state.
            To resume, build the same model from its base first.
        background: save with :func:`zarrckpt.async_save`: training waits only for a copy in memory. An error of a save
            is raised by the next save, or at the end of training.
        signals: names of signals, such as ``("SIGTERM",)``. After one of them all ranks save the same step, training
            ends, and :attr:`preempted` is true. The Trainer must run in the main thread. Default: no signal is handled.
        grace: the time limit of that save in seconds, see :class:`zarrckpt.CheckpointManager`.
        rewind: if ``resume_from_checkpoint`` is the url of an earlier step of the run, remove all later checkpoints.
            Default: such a url raises ValueError.
        allow_pickle: pickle values of the scheduler, the optimizer and the model's extra state that are not data, and
            load them. Loading runs any code that the checkpoint contains. Default: the save raises
            UnsupportedValueError.
        storage_options, options: as in :func:`zarrckpt.save`.

    All ranks make the same calls. A save costs three requests more than :func:`zarrckpt.save`. Raises TypeError and
    ValueError for wrong arguments, and ValueError for DeepSpeed.
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
        output = parse(args.output_dir)
        args.output_dir = output.path if output.kind == "local" else _LOCAL_OUTPUT
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
        self._storage_options = storage_options
        self._rewind = rewind
        self._allow_pickle = allow_pickle
        self._manager: zarrckpt.CheckpointManager | None = None
        self._load: Callable[[dict[str, Any]], Any] | None = None
        """Function that loads the resumed checkpoint into a state. None if the Trainer itself saved the checkpoint."""
        self._resumed: dict[str, Any] = {}
        save_only_model = args.save_only_model
        # The Trainer's files cannot hold optimizers of models that transformers sharded while loading, so it refuses.
        args.save_only_model = save_only_model or getattr(model, "is_distributed_loading_by_transformers", False)
        super().__init__(model, args, *others, **named)
        self.args.save_only_model = save_only_model
        if self.is_deepspeed_enabled or self.is_fsdp_xla_enabled:
            raise ValueError("ZarrCheckpointMixin cannot save the state of DeepSpeed or of FSDP on XLA")
        if adapters_only and not hasattr(self.model, "peft_config"):
            raise ValueError(f"adapters_only=True requires a PEFT model, got {type(self.model).__name__}")
        if signals:
            self.add_callback(_StepEnd(self))

    # -- methods of the Trainer

    def train(self, resume_from_checkpoint: Any = None, trial: Any = None, ignore_keys_for_eval: Any = None) -> Any:
        """Train as ``Trainer.train``. Called on all ranks.

        Args:
            resume_from_checkpoint: the checkpoint to resume from. True: the newest complete one of the run, with an
                error if there is none. ``"auto"``: the newest one if there is any. Or the url of a checkpoint of this
                run or another, or a local folder that the Trainer itself saved. If the newest is damaged, a warning
                names it and the one before is used. A damaged checkpoint at a url raises CorruptCheckpointError.
            trial: None, because hyperparameter search is not supported.
            ignore_keys_for_eval: as for ``Trainer.train``.

        Raises ValueError if the run has checkpoints and training would not resume from the newest. Raises the errors of
        :meth:`zarrckpt.CheckpointManager.restore` and :func:`zarrckpt.save`.
        """
        if trial is not None:
            raise ValueError("hyperparameter search is not supported: use another checkpoint_dir for each trial")
        manager = self._make_manager(keep=TotalLimit.of(self.args))
        self._manager, self._load, self._resumed, self.preempted = manager, None, {}, False
        with manager, tempfile.TemporaryDirectory() as folder:
            resume = self._begin(resume_from_checkpoint, manager, folder)
            return super().train(resume, None, ignore_keys_for_eval)

    def save_model(self, output_dir: Any = None, _internal_call: bool = False) -> None:
        """Write a local folder for ``from_pretrained``, as ``Trainer.save_model``. Called on all ranks.

        With FSDP's ``SHARDED_STATE_DICT`` the Trainer writes no file, and a warning is logged. Raises StorageError for
        a url before writing, because the Trainer would create a local folder with that name.
        """
        super().save_model(None if output_dir is None else local_path(output_dir), _internal_call)
        if self.is_fsdp_enabled and "FULL_STATE_DICT" not in str(self.accelerator.state.fsdp_plugin.state_dict_type):
            log.warning(
                "save_model wrote no model to %s: with FSDP the Trainer writes models only if fsdp_config has "
                'state_dict_type="FULL_STATE_DICT". Use export_pretrained with a checkpoint in %s',
                output_dir or self.args.output_dir,
                self.checkpoint_dir,
            )

    def _get_output_dir(self, trial: Any) -> str:
        # In args.output_dir the Trainer would search for its own checkpoints and delete some.
        return self.checkpoint_dir

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        assert self._manager is not None
        step = self.state.global_step
        best = step if self.state.best_global_step == step else None
        evaluated = [entry for entry in self.state.log_history if entry.get("step") == step]
        metrics = {name: value for entry in evaluated for name, value in entry.items() if name.startswith("eval_")}
        finite = {name: value for name, value in metrics.items() if is_finite(value)}
        self._manager.save(step, self._saved(), {**finite, "best_step": best}, {"epoch": self.state.epoch})

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if self._load is None:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load the whole state: now the model is wrapped and sharded, and the optimizer and the scheduler exist."""
        if self._load is None:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        saved = self._resumed["saved"]
        rest: dict[str, Any] = {"state": None, "saved": None}
        rest |= {name: None for name in ("scheduler", "scaler") if name in saved}
        # A rank that did not exist at the save keeps the Trainer's seed, as in the Trainer's own checkpoints.
        rest |= {"rng": zarrckpt.PerRank(new_ranks="keep")} if "rng" in saved else {}
        state: dict[str, Any] = {"model": self._module(), "optimizer": plain_optimizer(self), "trainer": rest}
        self._load({name: value for name, value in state.items() if value and name in (*saved, "trainer")})
        if rest["state"] != self._resumed["state"]:
            assert checkpoint is not None
            self._resumed = restore_trainer_state(rest, self._resumed["run"], checkpoint)
            raise _OtherCheckpointLoaded
        if "scheduler" in saved:
            self.lr_scheduler.load_state_dict(rest["scheduler"])
        if "scaler" in saved and (scaler := enabled_scaler(self)) is not None:
            scaler.load_state_dict(rest["scaler"])
        self._resumed["rng"] = rest["rng"].value if "rng" in saved else None
        self.state.best_model_checkpoint = self._resumed["best"]

    def _inner_training_loop(self, *args: Any, **named: Any) -> Any:
        """Train. If a damaged checkpoint was skipped while loading, restart with the step of the older checkpoint."""
        while True:
            try:
                return super()._inner_training_loop(*args, **named)
            except _OtherCheckpointLoaded:
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
        own = os.path.join(url, STATE_FILE)
        if os.path.dirname(os.path.abspath(url)) == self._resumed.get("folder") and os.path.isfile(own):
            super()._load_best_model()  # The Trainer itself saved it before the run used zarrckpt.
            return
        if _step_in_run(self.checkpoint_dir, url) is None and url != self._resumed.get("best"):
            log.warning("the best model was not loaded, because its checkpoint %r is not in this run", url)
            return
        try:
            zarrckpt.load({"model": self._module()}, url, storage_options=self._storage_options)
        except zarrckpt.CheckpointNotFoundError:
            log.warning("the best model was not loaded, because its checkpoint %s does not exist any more", url)

    # -- save and resume

    def _begin(self, resume: Any, manager: zarrckpt.CheckpointManager, folder: str) -> str | None:
        """Find the checkpoint to resume from, and write the files that the Trainer itself reads into a folder.

        Returns the folder for the Trainer's own ``resume_from_checkpoint``, or None to start at step 0.
        """
        given = parse(resume) if isinstance(resume, str | os.PathLike) and resume not in ("", "auto") else None
        if given is not None and given.kind == "local" and os.path.isfile(os.path.join(given.path, STATE_FILE)):
            self._resumed = {"folder": os.path.dirname(given.path)}
            return given.path
        newest = zarrckpt.latest(self.checkpoint_dir, storage_options=self._storage_options)
        if resume == "auto":
            resume = newest is not None
        if not resume:
            if newest is not None and self.args.save_strategy != "no":
                raise ValueError(
                    f"the run already has the checkpoint {newest}, and no checkpoint is overwritten: pass "
                    'resume_from_checkpoint="auto", or another checkpoint_dir'
                )
            return None
        if resume is True and newest is None:
            raise ValueError(
                f"{self.checkpoint_dir} has no complete checkpoint, and resume_from_checkpoint=True requires one: pass "
                '"auto" to start without'
            )
        url = str(newest) if resume is True else normalize(resume)
        step, last = _step_in_run(self.checkpoint_dir, url), _step_in_run(self.checkpoint_dir, newest or "")
        state: dict[str, Any] = {"trainer": {"state": None, "saved": None}}
        if resume is True or step is not None:
            if step != last and not self._rewind:
                raise ValueError(
                    f"cannot resume from {url}, because the run has later checkpoints up to {newest}: pass rewind=True "
                    "to remove these, or resume from the newest"
                )
            chosen = None if resume is True else step
            manager.restore(state, step=chosen, rewind=step != last)
            # Only the Trainer's state was read so far. The whole load may find damage and choose an older checkpoint.
            self._load = partial(manager.restore, step=chosen, allow_pickle=self._allow_pickle)
        else:
            self._load = lambda target: zarrckpt.load(
                target, url, allow_pickle=self._allow_pickle, storage_options=self._storage_options
            )
            self._load(state)
        self._resumed = restore_trainer_state(state["trainer"], url.rpartition("/")[0], folder)
        return folder

    def _saved(self) -> dict[str, Any]:
        """Return the state to save. Slow parts are read by the save itself."""
        state = {"model": self._module(), "trainer": RestOfTrainer(self, self._allow_pickle)}
        return state if self.args.save_only_model else {**state, "optimizer": plain_optimizer(self)}

    def _module(self) -> nn.Module:
        model: nn.Module = self.model
        return AdapterModel(model) if self.adapters_only else model


def _step_in_run(run: str, url: str) -> int | None:
    """Return the step of a checkpoint of a run, or None for other urls."""
    match = re.fullmatch(re.escape(f"{run}/step-") + r"(\d+)(\.zarr\.zip)?", url)
    return None if match is None else int(match[1])


class ZarrTrainer(ZarrCheckpointMixin, Trainer):  # type: ignore[misc]
    """``transformers.Trainer`` with zarrckpt's checkpoints. For the arguments see :class:`ZarrCheckpointMixin`."""


class _OtherCheckpointLoaded(Exception):
    """Raised if the loaded checkpoint is not the one from which the Trainer's state was read before."""


class _StepEnd(TrainerCallback):  # type: ignore[misc]
    """A callback that saves and ends training after a signal."""

    def __init__(self, trainer: ZarrCheckpointMixin) -> None:
        self._trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        trainer = self._trainer
        if trainer._manager is not None:
            trainer._manager.step(state.global_step, trainer._saved())
            if trainer._manager.preempted:
                trainer.preempted = control.should_training_stop = True
                control.should_evaluate = False  # The process is killed soon.
