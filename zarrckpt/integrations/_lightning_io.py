"""The checkpoint plugin for Lightning's Trainer and Fabric."""

from __future__ import annotations

import copy
import functools
import itertools
import os
import re
import threading
from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import Any, cast

import torch
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.fabric.utilities.cloud_io import get_filesystem

import zarrckpt
from zarrckpt._errors import log
from zarrckpt._store._archive import is_archive_name
from zarrckpt._store._url import normalize
from zarrckpt.integrations._data import find_non_data, refuse_non_data, with_plain_parameters
from zarrckpt.integrations._values import remove_or_log, with_digests

ROOT_SUFFIX = "/zarr.json"
"""The end of a root document's url, after the checkpoint's url."""
PICKLE_HINT = "save_hyperparameters(ignore=[...]) or ZarrCheckpointIO(allow_pickle=True)"
"""Text for errors: the code with which a user saves values that are not data, or leaves them out."""
FINDS_LAST = "finds_last"
"""Key in the saved state of a ZarrModelCheckpoint. Lightning's own ModelCheckpoint does not save it."""
OPTIMIZER = re.compile(r"optimizer_\d+")
"""The key of an optimizer in a Trainer checkpoint that was saved on all ranks."""


class ZarrCheckpointIO(CheckpointIO):  # type: ignore[misc]
    """A checkpoint plugin for Lightning: ``Trainer(plugins=[ZarrCheckpointIO()])``, and the same for ``Fabric``.

    The plugin alone is enough for one device and for DDP: Lightning saves on rank 0, and every rank reads the whole
    checkpoint. For sharded models, add a strategy of this module. It saves and loads on all ranks with the plugin's
    settings.

    As in Lightning, a save replaces a committed checkpoint at its url. The old one stays readable until the commit.
    Chunks that are unchanged since the last save or load are copied by the store or linked (``docs/how-to/reuse.md``).
    Except for models and optimizers, a checkpoint must be data: numbers, strings, tensors, NumPy arrays, and dicts,
    lists, tuples and sets of these. For other values the save raises UnsupportedValueError with their names.

    Args:
        background: save a copy in the background (:func:`zarrckpt.async_save`). The next save, or the end of ``fit``,
            waits for it and raises its errors. ModelCheckpoint's deletions wait for its commit, and are skipped if the
            save fails. Default: training waits for each save.
        allow_pickle: pickle values that are not data, and load such pickles. Loading runs any code that the checkpoint
            contains. Objects with a state dict, such as a loss in the hyperparameters, are still refused.
        storage_options: options of the store, as for :func:`zarrckpt.save`. ModelCheckpoint searches its folder with
            fsspec, which uses options from the environment only.
        options: a :class:`zarrckpt.SaveOptions`.
    """

    def __init__(
        self,
        *,
        background: bool = False,
        allow_pickle: bool = False,
        storage_options: Mapping[str, Any] | None = None,
        options: zarrckpt.SaveOptions | None = None,
    ) -> None:
        self.background = background
        self.allow_pickle = allow_pickle
        self.storage_options = storage_options
        self.options = options
        self.folders: set[str] = set()
        """Folders of the Trainer's callbacks. A loaded state may name checkpoints below them."""
        self.base: str | None = None
        """The url of the last checkpoint that was saved or loaded. The next save reuses its unchanged chunks."""
        self._future: zarrckpt.SaveFuture | None = None
        """The save in the background, until :meth:`wait`."""
        self._waiting_actions: list[threading.Thread] = []
        """Threads that wait for the commit of this save, each to call an action."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | PurePath, storage_options: Mapping[str, Any] | None = None
    ) -> None:
        """Save a checkpoint. Called on rank 0 only. Raises the errors of :func:`zarrckpt.save`."""
        checkpoint, url = with_plain_parameters(checkpoint), url_of(path)
        refuse_non_data(self.faults(checkpoint), PICKLE_HINT)
        warn_of_last(checkpoint)
        prepare_local_path(url)
        self.save(checkpoint, url, run_metadata(checkpoint, path), no_dist=True, storage_options=storage_options)

    def load_checkpoint(
        self, path: str | PurePath, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a whole checkpoint. Each rank that calls it reads all bytes.

        The checkpoint can be from a sharded strategy, or a file that Lightning's own plugin saved.

        Args:
            map_location: the device of the loaded tensors, or its name. For values of other types: the CPU.
            weights_only: True refuses pickles even with ``allow_pickle=True``.
        """
        self.wait()
        allow_pickle, url = self.allow_pickle and not weights_only, url_of(path)
        try:
            found = zarrckpt.open(url, storage_options=self.storage_options, allow_pickle=allow_pickle)
        except zarrckpt.CheckpointNotFoundError:
            if not get_filesystem(url).isfile(url):
                raise
            loaded = TorchCheckpointIO().load_checkpoint(url, map_location or "cpu", weights_only)
            return self.without_foreign_paths(loaded, url)
        self.base = url
        checkpoint = found.load(device=map_location if isinstance(map_location, str | torch.device) else "cpu")
        for key, value in checkpoint.items():
            if isinstance(value, dict) and value.keys() >= {"state", "param_groups"}:
                checkpoint[key] = _numbered(value)
        optimizers = sorted(filter(OPTIMIZER.fullmatch, checkpoint), key=lambda key: int(key.rpartition("_")[2]))
        if optimizers and "pytorch-lightning_version" in checkpoint:
            checkpoint["optimizer_states"] = [checkpoint.pop(key) for key in optimizers]
        return self.without_foreign_paths(checkpoint, url)

    def remove_checkpoint(self, path: str | PurePath) -> None:
        """Delete a checkpoint. Called on rank 0 only. If it is pinned or cannot be deleted, log a warning and leave it.

        During a save in the background it returns immediately. A thread deletes after the commit of that save.
        """
        if url_of(path) == self.base:
            self.base = None
        self.when_committed(lambda: _remove_saved(url_of(path), self.storage_options))

    def when_committed(self, action: Callable[[], None]) -> None:
        """Call the action after the commit of the save in the background, or now if there is no such save.

        If the save fails, the action is not called.
        """
        future, previous = self._future, self._waiting_actions[-1:]
        if future is None:
            action()
            return

        def act_after_commit() -> None:
            if future.exception() is None:
                for thread in previous:  # Actions are called in order.
                    thread.join()
                action()

        self._waiting_actions.append(threading.Thread(target=act_after_commit, name="zarrckpt-follow"))
        self._waiting_actions[-1].start()

    def teardown(self) -> None:
        """Wait as :meth:`wait`. Lightning calls it at the end of ``fit``, also after an error."""
        self.wait()

    def link_checkpoint(self, path: str, link: str) -> None:
        """Make a symbolic link to a checkpoint after its commit. The link replaces an older link or checkpoint."""

        def replace() -> None:
            if not os.path.islink(link):
                _remove_saved(link, self.storage_options)
            os.symlink(os.path.relpath(path, os.path.dirname(link)), f"{link}.new")
            os.replace(f"{link}.new", link)

        self.when_committed(replace)

    def wait(self) -> None:
        """Wait for the save in the background and raise its errors. Return immediately if there is no such save.

        With ``Fabric``, call it before the process ends, on every rank that saves. Fabric itself does not wait.
        """
        future, self._future = self._future, None
        threads, self._waiting_actions = self._waiting_actions, []
        if future is not None:
            future.result()
        for thread in threads:
            thread.join()

    def save(
        self,
        state: Mapping[str, Any],
        url: str,
        metadata: dict[str, Any],
        *,
        no_dist: bool,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        """Wait for the save in the background, then save a state with these settings.

        :meth:`save_checkpoint` calls it on rank 0, and the strategies of this module on all ranks.
        """
        self.wait()
        call = zarrckpt.async_save if self.background else zarrckpt.save
        result = call(
            state,
            url,
            overwrite=True,
            metadata=metadata,
            base=self.base,
            no_dist=no_dist,
            storage_options={**(self.storage_options or {}), **(storage_options or {})} or None,
            options=with_digests(self.options),
        )
        self.base = url
        self._future = result if isinstance(result, zarrckpt.SaveFuture) else None
        if PurePath(url).name.startswith("hpc_ckpt_"):  # After this save Lightning has SLURM requeue the job.
            self.wait()

    def without_foreign_paths(self, checkpoint: Mapping[str, Any], url: str) -> dict[str, Any]:
        """Return a Trainer's checkpoint without paths outside of the run, because Lightning opens and deletes them.

        The state of a ModelCheckpoint may name checkpoints below the loaded checkpoint's folder or below
        :attr:`folders`. If it names others, log a warning and drop its list of best checkpoints.
        """
        folders = {comparable_folder(url.rpartition("/")[0]), *self.folders}
        states = checkpoint.get("callbacks") if "pytorch-lightning_version" in checkpoint else None
        cleaned = {}
        for name, state in states.items() if isinstance(states, Mapping) else ():
            if not isinstance(state, Mapping) or "best_model_path" not in state:
                continue
            top = state.get("best_k_models")
            paths = [state[key] for key in ("kth_best_model_path", "last_model_path") if state.get(key)]
            foreign = [path for path in (*paths, *(top or ())) if not _lies_below(path, folders)]
            if foreign:
                state = {key: value for key, value in state.items() if key not in _BEST_AND_LAST} | {
                    "best_model_score": None
                }
            if (best := state["best_model_path"]) and not _lies_below(best, folders):
                foreign.append(best)
                state = {**state, "best_model_path": ""}
            if foreign:
                log.warning(
                    "%s names the checkpoint %r, which is ignored because it is outside of this run's folders (%s)",
                    *(url, foreign[0], ", ".join(sorted(folders))),
                )
                cleaned[name] = state
        found: Any = copy.copy(checkpoint)  # with the versions of modules, if it is a state dict
        if cleaned and states:
            found["callbacks"] = {**states, **cleaned}
        return cast(dict[str, Any], found)

    def faults(self, state: Mapping[str, Any]) -> list[str]:
        """Return a text for each value of a state that these settings refuse to save."""
        return [*find_non_data(state, allow_pickle=self.allow_pickle)]


_BEST_AND_LAST = ("best_k_models", "kth_best_model_path", "kth_value", "last_model_path")
"""Keys of a ModelCheckpoint's state about its best and last checkpoints. They are valid only together."""


def comparable_folder(folder: str) -> str:
    """Return a folder as a text to compare. Links in local folders are resolved, because Lightning resolves them."""
    return folder.rstrip("/") if "://" in folder else os.path.realpath(folder)


def _lies_below(path: Any, folders: set[str]) -> bool:
    if not isinstance(path, str) or ".." in path.split("/") or not (path.startswith("/") or "://" in path):
        return False
    own = f"{comparable_folder(path.rpartition('/')[0])}/"
    return any(own.startswith(f"{folder}/") for folder in folders)


def url_of(path: str | PurePath) -> str:
    """Return the url of a checkpoint from its path, or from the path of its root document."""
    return normalize(path).removesuffix(ROOT_SUFFIX)


def is_saved_by_lightning(path: str) -> bool:
    """Whether a local path has a file, or the folder that a sharded strategy of Lightning saved."""
    is_file = os.path.isfile(path) and not is_archive_name(os.path.basename(path))
    return is_file or os.path.isfile(f"{path}/meta.pt")


def prepare_local_path(path: str) -> None:
    """Prepare a local path for a save: remove a link but not its target, and rename Lightning's own checkpoint."""
    if os.path.islink(path):
        os.unlink(path)
    elif is_saved_by_lightning(path):
        stem, suffix = os.path.splitext(path)  # ckpt_path="last" still finds the new name.
        names = (f"{stem}-lightning{number or ''}{suffix}" for number in itertools.count())
        os.replace(path, next(name for name in names if not os.path.lexists(name)))


def warn_of_last(checkpoint: Mapping[str, Any]) -> None:
    """Warn, once per folder, if Lightning's own ModelCheckpoint will not find the last checkpoint of an object store.

    The first save warns, because the next start of the training would begin at step 0.
    """
    for name, state in checkpoint.get("callbacks", {}).items():
        last = str(state.get("last_model_path", "")) if str(name).startswith("ModelCheckpoint{") else ""
        if "://" in last and FINDS_LAST not in state:
            _warn_once(last.rpartition("/")[0])


@functools.cache
def _warn_once(folder: str) -> None:
    log.warning(
        'fit(ckpt_path="last") will not find checkpoints in %s and will start at step 0: Lightning\'s ModelCheckpoint '
        "searches only local folders. Use zarrckpt.integrations.lightning.ZarrModelCheckpoint with the same arguments",
        folder,
    )


def run_metadata(checkpoint: Mapping[str, Any], path: str | PurePath) -> dict[str, Any]:
    """Return the metadata of a Trainer's checkpoint: the metrics that ModelCheckpoints monitor, the step, the epoch."""
    found: dict[str, Any] = {}
    for state in checkpoint.get("callbacks", {}).values():
        # A ModelCheckpoint notes the score under the path before it saves. Its current_score may be an earlier one.
        scores = state.get("best_k_models") if isinstance(state, Mapping) else None
        if scores and str(path) in scores and isinstance(state.get("monitor"), str):
            found[state["monitor"]] = scores[str(path)]
    names = {"global_step": "step", "epoch": "epoch"}
    return found | {name: checkpoint[key] for key, name in names.items() if type(checkpoint.get(key)) is int}


def _remove_saved(url: str, storage_options: Mapping[str, Any] | None) -> None:
    if os.path.islink(url):
        os.unlink(url)
    elif is_saved_by_lightning(url):
        TorchCheckpointIO().remove_checkpoint(url)
    elif not remove_or_log(url, storage_options) and (store := get_filesystem(url)).isfile(url):
        store.rm_file(url)  # a file that Lightning's own plugin saved in an object store


def _numbered(optimizer: dict[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state dict with parameters numbered, as one device needs it, in place of their names.

    Parameters that have numbers already get new ones in the order of the groups.
    """
    names = [name for group in optimizer["param_groups"] for name in group["params"]]
    numbers = {name: number for number, name in enumerate(names)}
    return {
        **optimizer,
        "state": {numbers.get(name, name): slots for name, slots in optimizer["state"].items()},
        "param_groups": [
            {**group, "params": [numbers[name] for name in group["params"]]} for group in optimizer["param_groups"]
        ],
    }
