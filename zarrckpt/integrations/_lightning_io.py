"""Lightning's plugin for checkpoints, of Trainer and Fabric."""

from __future__ import annotations

import functools
import itertools
import os
import re
import threading
from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.fabric.utilities.cloud_io import get_filesystem

import zarrckpt
from zarrckpt._errors import log
from zarrckpt._store._url import normalize
from zarrckpt.integrations._data import objects_in, refuse_objects, with_plain_parameters
from zarrckpt.integrations._values import remove_or_log

ROOT = "/zarr.json"
"""What follows a checkpoint's url in that of its root document."""
ALLOW = "save_hyperparameters(ignore=[...]) or ZarrCheckpointIO(allow_pickle=True)"
"""What a user may write to save what is no data, or to leave it out."""
FINDS_LAST = "finds_last"
"""In the state of a ModelCheckpoint: it is a ZarrModelCheckpoint."""
OPTIMIZER = re.compile(r"optimizer_\d+")
"""The key of an optimizer in a checkpoint of the Trainer, saved on all ranks."""


class ZarrCheckpointIO(CheckpointIO):  # type: ignore[misc]
    """Lightning's plugin for checkpoints: ``Trainer(plugins=[ZarrCheckpointIO()])``, and the same for ``Fabric``.

    By itself it is for one device and DDP, where Lightning saves on rank 0 alone and every rank reads all of a
    checkpoint. The strategies of this module save and load sharded models on all ranks, with its settings.

    Saves replace what is committed at their url, as Lightning's do; the old one stays readable until then. What a
    checkpoint holds beside models and optimizers must be data: numbers, strings, tensors, NumPy arrays, and dicts,
    lists, tuples and sets of them. Anything else is an UnsupportedValueError of the save that names it.

    Args:
        background: save a copy in the background (:func:`zarrckpt.async_save`). A save first waits for the one before,
            and raises its errors; so does the end of ``fit``. A checkpoint that ModelCheckpoint removes goes when the
            save that made it superfluous has committed, and stays if that failed. Default: training waits.
        allow_pickle: also save what is no data, as pickles, and load such checkpoints, which can run any code that
            they hold. Objects that have a state dict (a loss in the hyperparameters) are refused all the same.
        storage_options: options of the store, as for :func:`zarrckpt.save`. ModelCheckpoint looks at its folder with
            fsspec, which knows only the environment's.
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
        """Folders of the Trainer's callbacks: see :meth:`without_foreign_paths`."""
        self._future: zarrckpt.SaveFuture | None = None
        self._followers: list[threading.Thread] = []

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | PurePath, storage_options: Mapping[str, Any] | None = None
    ) -> None:
        """Save a checkpoint. Called on rank 0 alone. Raises what :func:`zarrckpt.save` does."""
        checkpoint, url = with_plain_parameters(checkpoint), url_of(path)
        refuse_objects(self.faults(checkpoint), ALLOW)
        warn_of_last(checkpoint)
        make_way(url)
        self.save(checkpoint, url, place_in_run(checkpoint), no_dist=True, storage_options=storage_options)

    def load_checkpoint(
        self, path: str | PurePath, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a whole checkpoint, also of a sharded strategy, or a file of Lightning's own; each rank reads all of it.

        Args:
            map_location: a device, or its name, where the tensors are to be; anything else: the CPU.
            weights_only: True refuses pickles whatever ``allow_pickle`` says.
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
        checkpoint = found.load(device=map_location if isinstance(map_location, str | torch.device) else "cpu")
        for key, value in checkpoint.items():
            if isinstance(value, dict) and value.keys() >= {"state", "param_groups"}:
                checkpoint[key] = _numbered(value)
        optimizers = sorted(filter(OPTIMIZER.fullmatch, checkpoint), key=lambda key: int(key.rpartition("_")[2]))
        if optimizers and "pytorch-lightning_version" in checkpoint:
            checkpoint["optimizer_states"] = [checkpoint.pop(key) for key in optimizers]
        return self.without_foreign_paths(checkpoint, url)

    def remove_checkpoint(self, path: str | PurePath) -> None:
        """Delete a checkpoint. Called on rank 0 alone. One that cannot be deleted, or is pinned, stays, and is logged.

        Beside a save in the background it returns at once: a thread waits for that save.
        """
        self.when_committed(lambda: _remove_or_log(url_of(path), self.storage_options))

    def when_committed(self, action: Callable[[], None]) -> None:
        """Do something once the save in the background has committed, and not at all if it fails; else now."""
        future, before = self._future, self._followers[-1:]
        if future is None:
            action()
            return

        def follow() -> None:
            if future.exception() is None:
                for one in before:  # in their order
                    one.join()
                action()

        self._followers.append(threading.Thread(target=follow, name="zarrckpt-follow"))
        self._followers[-1].start()

    def teardown(self) -> None:
        """Lightning calls it at the end of ``fit``, also where that failed: as :meth:`wait`."""
        self.wait()

    def link_checkpoint(self, path: str, link: str) -> None:
        """Make a symbolic link to a checkpoint, once that is there; what was at its place is removed."""

        def replace() -> None:
            if not os.path.islink(link):
                _remove_or_log(link, self.storage_options)
            os.symlink(os.path.relpath(path, os.path.dirname(link)), f"{link}.new")
            os.replace(f"{link}.new", link)

        self.when_committed(replace)

    def wait(self) -> None:
        """Wait for the save in the background, and raise its errors; without one return at once.

        With ``Fabric``, call it before the process ends, on every rank that saves: Fabric has no end of its own.
        """
        future, self._future = self._future, None
        followers, self._followers = self._followers, []
        if future is not None:
            future.result()
        for follower in followers:
            follower.join()

    def save(
        self,
        state: Mapping[str, Any],
        url: str,
        metadata: dict[str, Any],
        *,
        no_dist: bool,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        """Save a state with these settings, after the save in the background if there is one; for the strategies."""
        self.wait()
        own = {**(self.storage_options or {}), **(storage_options or {})} or None
        call = zarrckpt.async_save if self.background else zarrckpt.save
        made = call(
            state, url, overwrite=True, metadata=metadata, no_dist=no_dist, storage_options=own, options=self.options
        )
        self._future = made if isinstance(made, zarrckpt.SaveFuture) else None
        if PurePath(url).name.startswith("hpc_ckpt_"):  # Lightning ends the job next, for SLURM to start it again
            self.wait()

    def without_foreign_paths(self, checkpoint: Mapping[str, Any], url: str) -> dict[str, Any]:
        """Return a Trainer's checkpoint without the paths of checkpoints elsewhere, which Lightning opens and deletes.

        The state of a ModelCheckpoint may name checkpoints in the folder of the one that is loaded, and in
        :attr:`folders`. If it names others, which is logged, the best are counted anew.
        """
        folders = {folder_text(url.rpartition("/")[0]), *self.folders}
        states = checkpoint.get("callbacks") if "pytorch-lightning_version" in checkpoint else None
        cleaned = {}
        for name, state in states.items() if isinstance(states, Mapping) else ():
            if not isinstance(state, Mapping) or "best_model_path" not in state:
                continue
            top = state.get("best_k_models")
            paths = [state[key] for key in ("kth_best_model_path", "last_model_path") if state.get(key)]
            foreign = [path for path in (*paths, *(top or ())) if not _lies_below(path, folders)]
            if foreign:
                state = {key: value for key, value in state.items() if key not in _COUNTED} | {"best_model_score": None}
            if (best := state["best_model_path"]) and not _lies_below(best, folders):
                foreign.append(best)
                state = {**state, "best_model_path": ""}
            if foreign:
                log.warning(
                    "%s names the checkpoint %r, outside of the folders of this run (%s): it is ignored",
                    *(url, foreign[0], ", ".join(sorted(folders))),
                )
                cleaned[name] = state
        return {**checkpoint, **({"callbacks": {**states, **cleaned}} if cleaned and states else {})}

    def faults(self, state: Mapping[str, Any]) -> list[str]:
        """What in a state is no data, by name, as far as these settings refuse it."""
        return [*objects_in(state, allow_pickle=self.allow_pickle)]


_COUNTED = ("best_k_models", "kth_best_model_path", "kth_value", "last_model_path")
"""What a ModelCheckpoint keeps of its best and last checkpoints, all of it or nothing."""


def folder_text(folder: str) -> str:
    """A folder as text to compare: Lightning resolves the links in local ones."""
    return folder.rstrip("/") if "://" in folder else os.path.realpath(folder)


def _lies_below(path: Any, folders: set[str]) -> bool:
    if not isinstance(path, str) or ".." in path.split("/") or not (path.startswith("/") or "://" in path):
        return False
    own = f"{folder_text(path.rpartition('/')[0])}/"
    return any(own.startswith(f"{folder}/") for folder in folders)


def url_of(path: str | PurePath) -> str:
    """Return the url of a checkpoint that a user or Lightning names, also by its root document."""
    return normalize(path).removesuffix(ROOT)


def is_lightnings(path: str) -> bool:
    """Whether Lightning itself has saved what is there: a file, or the folder of a sharded strategy."""
    return os.path.isfile(path) or os.path.isfile(f"{path}/meta.pt")


def make_way(path: str) -> None:
    """Before a save to a local path: remove a link, so that what it leads to stays, and rename what is Lightning's."""
    if os.path.islink(path):
        os.unlink(path)
    elif is_lightnings(path):
        stem, suffix = os.path.splitext(path)  # "last" still finds it
        names = (f"{stem}-lightning{number or ''}{suffix}" for number in itertools.count())
        os.replace(path, next(name for name in names if not os.path.lexists(name)))


def warn_of_last(checkpoint: Mapping[str, Any]) -> None:
    """Say, once for a folder, that a run will not find its last checkpoint: while there is time to mend it."""
    for name, state in checkpoint.get("callbacks", {}).items():
        last = str(state.get("last_model_path", "")) if str(name).startswith("ModelCheckpoint{") else ""
        if "://" in last and FINDS_LAST not in state:
            _warn_once(last.rpartition("/")[0])


@functools.cache
def _warn_once(folder: str) -> None:
    log.warning(
        'fit(ckpt_path="last") will find nothing in %s, and begin anew: Lightning\'s ModelCheckpoint looks in local '
        "folders only. Use zarrckpt.integrations.lightning.ZarrModelCheckpoint, with the same arguments",
        folder,
    )


def place_in_run(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """What of a Trainer's checkpoint is to be seen without loading it."""
    names = {"global_step": "step", "epoch": "epoch"}
    return {name: checkpoint[key] for key, name in names.items() if type(checkpoint.get(key)) is int}


def _remove_or_log(url: str, storage_options: Mapping[str, Any] | None) -> None:
    if os.path.islink(url):
        os.unlink(url)
    elif is_lightnings(url):
        TorchCheckpointIO().remove_checkpoint(url)
    elif not remove_or_log(url, storage_options) and (store := get_filesystem(url)).isfile(url):
        store.rm_file(url)  # Lightning's, in a store


def _numbered(optimizer: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's state dict with numbers for its parameters, as one device has them; they had names or numbers."""
    names = [name for group in optimizer["param_groups"] for name in group["params"]]
    numbers = {name: number for number, name in enumerate(names)}
    return {
        **optimizer,
        "state": {numbers.get(name, name): slots for name, slots in optimizer["state"].items()},
        "param_groups": [
            {**group, "params": [numbers[name] for name in group["params"]]} for group in optimizer["param_groups"]
        ],
    }
