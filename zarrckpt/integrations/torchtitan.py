"""torchtitan: ``ZarrCheckpointManager`` in a run's configuration.

Its ``folder`` is a url of any store, checkpoints are Zarr hierarchies that a :class:`zarrckpt.CheckpointManager` keeps,
and torchtitan's own settings mean what they mean there.
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

require("torchtitan", "0.3", "0.4", "torchtitan")

from torchtitan.components.checkpointer import DATALOADER, MODEL, OPTIMIZER, AsyncMode, CheckpointManager  # noqa: E402

import zarrckpt  # noqa: E402
from zarrckpt._store._url import has_protocol, normalize  # noqa: E402

__all__ = ["ZarrCheckpointManager"]


class ZarrCheckpointManager(CheckpointManager):  # type: ignore[misc]
    """torchtitan's checkpoint manager, on zarrckpt.

    .. code-block:: python

        config = llama3_8b()
        config.checkpoint = ZarrCheckpointManager.Config(enable=True, interval=500, folder="s3://bucket/run")

    torchtitan makes it, on all ranks. Its settings:

    - ``folder``: the run's, as ``url`` of :class:`zarrckpt.CheckpointManager`; one without ``://`` is below the dump
      folder. Checkpoints are ``step-00000500`` and so on; those that torchtitan's own manager has left in the folder
      are resumed from where there is none of these.
    - ``keep_latest_k``: old checkpoints of this run are deleted after the commit of the one that makes them
      superfluous, in the background, by rank 0. Pinned ones stay.
    - ``async_mode``: ``"async"`` and ``"async_with_pinned_mem"`` both copy the state to memory (pinned, where it comes
      from a GPU), and write in the background.
    - ``load_step``: no other checkpoint is taken where that one is damaged. The newest one, without it, gives way to
      the one before, with a warning. A save at a step that is there is refused: see ``rewind``.
    - ``initial_load_path``: a checkpoint of zarrckpt, or one of DCP.
    - ``last_save_in_hf``, ``initial_load_in_hf``: torchtitan's own files.
    - ``load_only``: reads a folder that another job goes on with, and leaves it alone.
    - ``allow_pickle``: torchtitan's data loader unpickles its own state. Without it (the default) a state that holds
      more than plain values is an UnsafeValueError: unpickling it can run any code that the checkpoint holds.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):  # type: ignore[misc]
        """The settings of :class:`ZarrCheckpointManager`."""

        rewind: bool = False
        """With load_step: remove all later checkpoints of the run first, so that it goes on from there."""
        allow_pickle: bool = False
        """Unpickle any state of the data loader, which runs the code that it holds."""

        def __post_init__(self) -> None:
            for name in ("folder", "initial_load_path"):
                if (text := getattr(self, name)) and text.strip():
                    setattr(self, name, _place_of(text.strip()))
            CheckpointManager.Config.__post_init__(self)
            if self.rewind and self.load_step == -1:
                raise ValueError("rewind needs the step to go back to: load_step=...")

    save_future: Any

    def __init__(self, config: Config, **parts: Any) -> None:
        # torchtitan's own thread of deletions and its process group for DCP are not needed.
        of_ours: dict[str, Any] = {"keep_latest_k": 0, "async_mode": "disabled"}
        super().__init__(dataclasses.replace(config, **of_ours), **parts)
        if not self.enable:
            return
        # An Optimizer by its class, but its state dict is flat, by the names of parameters: no optimizer's to load.
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
            signals=(),  # torchtitan's loop does not ask whether it is to end
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
        """Save the last step, whose state torchtitan has chosen. Called on all ranks."""
        if to_hf:
            return super().dcp_save(state_dict, checkpoint_id, async_mode, enable_garbage_collection, to_hf)
        self._run.save(_step_of(checkpoint_id), state_dict)
        self._run.wait()
        return None

    @torch.no_grad()
    def _load(self, step: int = -1) -> bool:
        newest = zarrckpt.latest(self.folder) if step == -1 else f"{self.folder}/step-{step:08}"
        if newest is None:
            # Checkpoints of DCP in the folder, an initial load, or a fresh start.
            return bool(super()._load(step))
        states = self._states_to_load(model_only=_step_of(newest) == 0)
        try:
            if self.load_only:
                # The manager's restore would take the run from a job that goes on with it.
                zarrckpt.load(states, newest, keys=_top_keys(states))
            else:
                chosen = None if step == -1 else step
                self._run.restore(states, step=chosen, rewind=self._rewind, keys=_top_keys(states))
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
    """Raises UnsafeValueError for a pickle that names anything but the classes of plain values."""

    def find_class(self, module: str, name: str) -> Any:
        if name not in _PLAIN_TYPES.get(module, ()):
            raise zarrckpt.UnsafeValueError(
                f"the state of the data loader needs {module}.{name}, which is no plain value. If you trust the "
                'checkpoint, set allow_pickle=True, or leave it out: exclude_from_loading=["dataloader"]'
            )
        return super().find_class(module, name)


def _load_plain(loader: Any, state: dict[str, Any]) -> None:
    """Have a data loader load its state, which it unpickles. Raises UnsafeValueError for more than plain values."""
    for value in state.values():
        try:
            _PlainUnpickler(io.BytesIO(value)).load()
        except zarrckpt.UnsafeValueError:
            raise
        except Exception:  # no bytes, or no pickle: the loader's own error tells more
            continue
    loader.load_state_dict(state)


def _place_of(text: str) -> str:
    """Return the place that a setting names; a relative path stays one. Raises StorageError for a mistyped url."""
    place = normalize(text)
    return place if text.startswith("~") or has_protocol(text) else text


def _step_of(url: str) -> int:
    return int(url.rpartition("step-")[2])


def _top_keys(states: dict[str, Any]) -> list[str]:
    """The keys of a load that leaves out what has no target, such as the states that are excluded from loading."""
    return sorted({name.partition(".")[0] for name in states})
