"""``latest`` and ``best`` choose a checkpoint below a prefix. They use torch only in a process of several ranks."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from zarrckpt._commit.discovery import CheckpointFolder, find_checkpoints, find_newest
from zarrckpt._commit.foreign_files import describe_files
from zarrckpt._commit.listings import list_below
from zarrckpt._errors import CheckpointError, warn
from zarrckpt._format.matching import hint
from zarrckpt._format.metadata import RESERVED
from zarrckpt._runs.folders import newest_below, refuse_unreadable, skip_warning
from zarrckpt._runs.keep import Keep, Mode, metric_order
from zarrckpt._store import Store, StoreSpec, Url, join_url

if TYPE_CHECKING:
    import torch.distributed as dist


def latest(
    prefix: Url,
    *,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> str | None:
    """Return the url of the newest checkpoint below a prefix, or None if there is none.

    If ``prefix`` is a store object instead of a url, return the path below it.

    The newest checkpoint is in the folder directly below the prefix whose name ends with the greatest number. This
    number is its step, as in ``<prefix>/step-100``. Unfinished saves and other folders are skipped. Checkpoints whose
    root document is damaged, missing or written by another program are skipped with a warning. If no folder with a
    number has a checkpoint, the one that was committed last among the others is returned.

    If a folder that may have a newer checkpoint cannot be read, StorageError names it. If a checkpoint is found,
    unreadable folders without a number only cause a warning. ``lost+found`` and names that begin with a dot are
    ignored. If there is no checkpoint but the files of another library, a warning names them.

    Under ``torch.distributed`` every rank of the group calls it. The coordinator (rank 0 of the group) reads the
    folders, and all ranks return the same. Costs all pages of one listing, one request for each skipped folder, and one
    for the returned checkpoint.

    Args:
        prefix: the folder that contains the checkpoints.
        process_group: the ranks that call (default: all).
        no_dist: read the folders in this process only. Other ranks need not call.
        storage_options: as in :func:`open`.

    Raises StorageError, and CheckpointError if a rank does not call it.
    """
    return _find(prefix, "latest", newest_below, process_group, no_dist, storage_options)


def best(
    prefix: Url,
    metric: str,
    mode: Mode = "min",
    *,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> str | None:
    """Return the url of the checkpoint below a prefix with the best metric, or None if none has a finite one.

    The metric is a member of the checkpoints' metadata, as :meth:`CheckpointManager.step` saves ``metrics``. None, NaN
    and infinities do not count. If several checkpoints have the best value, the newest of them is returned. Damaged and
    unfinished checkpoints are skipped as in :func:`latest`, and folders that cannot be read cause a warning. If there
    are checkpoints but none has a member of this name, a UserWarning lists the names that they have.

    Under ``torch.distributed`` every rank of the group calls it, as :func:`latest`. Costs all pages of one listing, and
    one request for each folder below the prefix.

    Args:
        prefix: the folder that contains the checkpoints.
        metric: the name of the metric.
        mode: ``"min"`` if the smallest metric is the best, as for a loss (default), or ``"max"`` if the greatest is, as
            for an accuracy.
        process_group: as in :func:`latest`.
        no_dist: as in :func:`latest`.
        storage_options: as in :func:`open`.

    Raises TypeError and ValueError for an invalid metric or mode, StorageError (also if no checkpoint is found and a
    folder cannot be read), and CheckpointError if a rank does not call it.
    """
    Keep(best=1, metric=metric, mode=mode)  # Raises for invalid arguments.
    choose = partial(_best_below, metric=metric, mode=mode)
    return _find(prefix, "best", choose, process_group, no_dist, storage_options)


_ChooseBelow = Callable[[Store, list[str]], tuple[str | None, list[CheckpointFolder]]]
"""A function that returns the chosen folder and the damaged checkpoints of a list of folders."""


def _find(
    prefix: Url,
    caller: str,
    choose: _ChooseBelow,
    process_group: dist.ProcessGroup | None,
    no_dist: bool,
    storage_options: Mapping[str, Any] | None,
) -> str | None:
    """Choose a checkpoint below a prefix on the coordinator. Return its url on all ranks."""
    spec = StoreSpec(prefix, storage_options)
    distributed = sys.modules.get("torch.distributed")
    if no_dist or distributed is None or not (distributed.is_available() and distributed.is_initialized()):
        name = _choose_name(spec, caller, choose)
    else:
        from zarrckpt._options import TIMEOUT
        from zarrckpt._ranks.calls import call_on_coordinator
        from zarrckpt._ranks.group import Ranks
        from zarrckpt._ranks.rounds import open_rounds

        with open_rounds(Ranks(process_group), f"{caller}({spec.url!r})", TIMEOUT) as rounds:
            choose_name = partial(_choose_name, spec, caller, choose)
            name = call_on_coordinator(rounds, f"the {caller} checkpoint", choose_name)
            if name is not None and (type(name) is not str or name in ("", ".", "..") or "/" in name or "\\" in name):
                raise CheckpointError(
                    f"{caller}({spec.url!r}): rank 0 sent {name!r:.200}, expected the name of a folder at this url"
                )
    if name is None:
        return None
    return join_url(prefix, name) if isinstance(prefix, str | os.PathLike) else name


def _choose_name(spec: StoreSpec, caller: str, choose: _ChooseBelow) -> str | None:
    store = spec.open()
    listed = list_below(store)
    if listed.has_save:
        warn(f"{caller}({store.url!r}) was called with the url of a checkpoint: pass the folder that holds it")
    name, damaged = choose(store, listed.folders)
    # Without objects, the search would cost a request.
    if name is None and (listed.objects or store.is_local) and (found := describe_files(store, listed)):
        warn(f"{caller}({store.url!r}) found no checkpoint. {found}")
    for below in damaged:
        warn(skip_warning(store, below))
    return name


def _best_below(store: Store, names: list[str], metric: str, mode: Mode) -> tuple[str | None, list[CheckpointFolder]]:
    found = find_checkpoints(store, names)
    damaged = [below for below in found if below.damage is not None]
    roots = [(below, below.root.metadata) for below in found if below.root is not None]
    if not roots:
        refuse_unreadable(store, damaged)
    elif not any(metric in metadata for _, metadata in roots):
        names = sorted({name for _, metadata in roots for name in metadata if not name.startswith(RESERVED)})
        warn(f"no checkpoint below {store.url} has {metric!r} in its metadata: {hint(metric, names)}")
    orders = [(metric_order(metadata, metric, mode), below) for below, metadata in roots]
    first = min((order for order, _ in orders if order is not None), default=None)
    chosen = find_newest(below for order, below in orders if order is not None and order == first)
    return None if chosen is None else chosen.name, damaged
