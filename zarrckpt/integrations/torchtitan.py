"""A checkpoint manager for torchtitan, to be set in a training's configuration.

Its ``folder`` can be a url of any store. A :class:`zarrckpt.CheckpointManager` saves, keeps and deletes checkpoints.
torchtitan's settings keep their meaning.
"""

from __future__ import annotations

import dataclasses
import io
import pickle
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from zarrckpt.integrations._framework import require

require("torchtitan")

from torchtitan.components.checkpointer import DATALOADER, MODEL, OPTIMIZER, AsyncMode, CheckpointManager  # noqa: E402

import zarrckpt  # noqa: E402
from zarrckpt._store._archive import SUFFIX  # noqa: E402
from zarrckpt._store._url import has_protocol, normalize  # noqa: E402

__all__ = ["ZarrCheckpointManager"]


class ZarrCheckpointManager(CheckpointManager):  # type: ignore[misc]
    """torchtitan's checkpoint manager, with zarrckpt's checkpoints.

    .. code-block:: python

        config = llama3_8b()
        config.checkpoint = ZarrCheckpointManager.Config(enable=True, interval=500, folder="s3://bucket/run")

    torchtitan creates it on all ranks. Its settings:

    - ``folder``: the run's folder, as ``url`` of :class:`zarrckpt.CheckpointManager`. A relative path is below the dump
      folder. Checkpoints are named ``step-00000500`` and so on. If there are none, training resumes from a checkpoint
      that torchtitan's own manager saved in the folder.
    - ``keep_latest_k``: the number of checkpoints of this run to keep. Rank 0 deletes older ones in the background
      after each commit. Pinned checkpoints stay.
    - ``async_mode``: ``"async"`` and ``"async_with_pinned_mem"`` are the same: the state is copied to memory (pinned if
      it comes from a GPU) and written in the background.
    - ``load_step``: the step to load. If it is damaged, the load fails. Without ``load_step``, the newest checkpoint is
      loaded. If that is damaged, a warning names it and the one before is loaded. A save at a step that exists is
      refused: see ``rewind``.
    - ``initial_load_path``: a checkpoint of zarrckpt or of DCP.
    - ``last_save_in_hf``, ``initial_load_in_hf``: torchtitan writes and reads these files itself.
    - ``load_only``: do not take over the run, because another job may be training in the folder.
    - ``allow_pickle``: unpickle any state of the data loader, which can run code in the checkpoint. torchtitan pickles
      this state. By default, a state with more than plain values raises UnsafeValueError.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):  # type: ignore[misc]
        """The settings of :class:`ZarrCheckpointManager`."""

        rewind: bool = False
        """With load_step: remove all later checkpoints of the run first, so that training continues from that step."""
        allow_pickle: bool = False
        """Unpickle any state of the data loader. This runs code that the state contains."""

        def __post_init__(self) -> None:
            for name in ("folder", "initial_load_path"):
                if (text := getattr(self, name)) and text.strip():
                    setattr(self, name, _setting_url(text.strip()))
            CheckpointManager.Config.__post_init__(self)
            if self.rewind and self.load_step == -1:
                raise ValueError("rewind=True requires load_step, the step to continue from")

    save_future: Any

    def __init__(self, config: Config, **parts: Any) -> None:
        # So torchtitan starts neither its thread for deletions nor its process group for DCP.
        disabled: dict[str, Any] = {"keep_latest_k": 0, "async_mode": "disabled"}
        super().__init__(dataclasses.replace(config, **disabled), **parts)
        if not self.enable:
            return
        # The container is an Optimizer, but its state dict is flat and keyed by parameter names. Without its class,
        # zarrckpt loads it as a plain dict.
        container = self.states[OPTIMIZER]
        self.states[OPTIMIZER] = SimpleNamespace(
            state_dict=container.state_dict, load_state_dict=container.load_state_dict
        )
        loader = self.states[DATALOADER]
        if not config.allow_pickle and hasattr(loader, "load_state_dict"):
            self.states[DATALOADER] = SimpleNamespace(
                state_dict=loader.state_dict, load_state_dict=partial(_load_plain, loader)
            )
        self._rewind = config.rewind
        self.async_mode = AsyncMode(config.async_mode)
        self._run = zarrckpt.CheckpointManager(
            self.folder,
            keep=zarrckpt.Keep(newest=config.keep_latest_k) if config.keep_latest_k else None,
            read_only=self.load_only,
            signals=(),  # torchtitan's loop cannot be ended early.
            background=self.async_mode != AsyncMode.DISABLED,
        )

    @torch.no_grad()
    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        if not self._should_save(curr_step, last_step):
            return False
        self.maybe_wait_for_saving()
        if last_step:
            self._save_last_step(curr_step)
        else:
            self.save_future = self._run.save(curr_step, self._flattened_model_states_sd())
        return True

    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: AsyncMode,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> Any:
        """Save the last step with the state that torchtitan chose. Called on all ranks."""
        if to_hf:
            return super().dcp_save(state_dict, checkpoint_id, async_mode, enable_garbage_collection, to_hf)
        self._run.save(_step_of(checkpoint_id), state_dict)
        self._run.wait()
        return None

    @torch.no_grad()
    def _load(self, step: int = -1) -> bool:
        newest = zarrckpt.latest(self.folder) if step == -1 else f"{self.folder}/step-{step:08}"
        if newest is None:
            # torchtitan looks for DCP checkpoints in the folder, then for an initial load, or starts at step 0.
            return bool(super()._load(step))
        states = self._states_to_load(model_only=_step_of(newest) == 0)
        try:
            chosen, rewind = None if step == -1 else step, self._rewind and not self.load_only
            self._run.restore(states, step=chosen, rewind=rewind, keys=_top_keys(states))
        except zarrckpt.CheckpointNotFoundError:
            return bool(super()._load(step))
        self.states[MODEL].load_state_dict(states)
        return True

    def dcp_load(self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool) -> None:
        """Load ``initial_load_path``. Called on all ranks."""
        if not from_hf:
            try:
                zarrckpt.load(state_dict, checkpoint_id, keys=_top_keys(state_dict))
            except zarrckpt.CheckpointNotFoundError:
                pass
            else:
                self.states[MODEL].load_state_dict(state_dict)
                return
        super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)

    def _wait_for_saving(self) -> None:
        self.save_future = None
        self._run.wait()

    def _close(self) -> None:
        if hasattr(self, "_run"):
            self._run.close()


_PLAIN_TYPES = {"builtins": {"bytearray", "complex", "frozenset", "set"}, "collections": {"OrderedDict", "deque"}}
"""Classes whose instances are plain values, by module."""


class _PlainUnpickler(pickle.Unpickler):
    """An unpickler that raises UnsafeValueError for classes other than those of plain values."""

    def find_class(self, module: str, name: str) -> Any:
        if name not in _PLAIN_TYPES.get(module, ()):
            raise zarrckpt.UnsafeValueError(
                f"the state of the data loader needs {module}.{name}, which is not a plain value. If you trust the "
                'checkpoint, set allow_pickle=True. Otherwise leave the state out: exclude_from_loading=["dataloader"]'
            )
        return super().find_class(module, name)


def _load_plain(loader: Any, state: dict[str, Any]) -> None:
    """Load a data loader's state, which the loader unpickles. Raises UnsafeValueError for more than plain values."""
    for value in state.values():
        try:
            _PlainUnpickler(io.BytesIO(value)).load()
        except zarrckpt.UnsafeValueError:
            raise
        except Exception:  # Not bytes, or not a pickle: the loader's own error is clearer.
            continue
    loader.load_state_dict(state)


def _setting_url(text: str) -> str:
    """Return a setting's url or path in normal form. A relative path is unchanged. Raises StorageError for a bad url.

    torchtitan itself joins relative paths with its dump folder.
    """
    url = normalize(text)
    return url if text.startswith("~") or has_protocol(text) else text


def _step_of(url: str) -> int:
    return int(url.rpartition("step-")[2].removesuffix(SUFFIX))


def _top_keys(states: dict[str, Any]) -> list[str]:
    """Return the top-level keys to load: those with a target, without states that are excluded from loading."""
    return sorted({name.partition(".")[0] for name in states})
