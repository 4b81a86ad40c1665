"""``latest`` and ``best``: one of the checkpoints below a prefix. Torch only if the process is one of several ranks."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from zarrckpt._commit.listings import list_below
from zarrckpt._commit.protocol import Below, checkpoints_below, newest
from zarrckpt._errors import CheckpointError, warn
from zarrckpt._format.matching import hint
from zarrckpt._format.metadata import RESERVED
from zarrckpt._runs.keep import Keep, Mode, comparable_metric
from zarrckpt._runs.steps import newest_below, passed_over, refuse_unreadable
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
    """The url of the newest checkpoint below a prefix, or None where there is none: for resuming.

    Of a ready store in place of the url: the path below it.

    The newest is the one whose folder, right below the prefix, ends in the greatest number: its step, as in
    ``<prefix>/step-100``. Unfinished saves, and what is no checkpoint, are skipped. So are damaged root documents,
    those of other programs, and missing ones beside the tables of a save: a warning names them. If no folder with a
    number has a checkpoint: the one that was committed last among the others.

    If a folder that may hold a newer checkpoint cannot be read, StorageError names it. Folders without a number only
    cause a warning if another checkpoint is found, and those whose names begin with a dot cause no more in any case.
    ``lost+found`` is not looked into.

    Under ``torch.distributed`` every rank of the group calls it; the coordinator (rank 0 of the group) looks, and tells
    the others. Costs the pages of one listing, a request for each folder that is skipped, and one for the checkpoint
    that is found.

    Args:
        prefix: the folder that holds the checkpoints.
        process_group: the ranks that call (default: all).
        no_dist: this process looks for itself, and no other rank need call.
        storage_options: as in :func:`open`.

    Raises StorageError; CheckpointError where a rank does not come.
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

    The metric is a member of the checkpoints' metadata, as :meth:`CheckpointManager.step` saves ``metrics``. The rule
    is that of :class:`Keep`: None, NaN and infinities do not count; of equal ones the newest is returned. Damaged and
    unfinished checkpoints are skipped as in :func:`latest`, and folders that cannot be read cause a warning. If there
    are checkpoints and none has a member of this name, a UserWarning lists the names that they have.

    Under ``torch.distributed`` every rank of the group calls it, as :func:`latest`. Costs the pages of one listing, and
    a request for each folder below the prefix.

    Args:
        prefix: the folder that holds the checkpoints.
        metric: the name of the metric.
        mode: whether the best is the least (``"min"``, the default: a loss) or the greatest (``"max"``: an accuracy).
        process_group: as in :func:`latest`.
        no_dist: as in :func:`latest`.
        storage_options: as in :func:`open`.

    Raises TypeError and ValueError for a metric or mode that makes no sense; StorageError, also if no checkpoint is
    found and a folder cannot be read; CheckpointError if a rank does not come.
    """
    Keep(best=1, metric=metric, mode=mode)  # raises for wrong arguments
    choose = partial(_best_below, metric=metric, mode=mode)
    return _find(prefix, "best", choose, process_group, no_dist, storage_options)


_ChooseBelow = Callable[[Store, list[str]], tuple[str | None, list[Below]]]
"""Returns the chosen one of some folders, and the damaged checkpoints among them."""


def _find(
    prefix: Url,
    caller: str,
    choose: _ChooseBelow,
    process_group: dist.ProcessGroup | None,
    no_dist: bool,
    storage_options: Mapping[str, Any] | None,
) -> str | None:
    """Choose one of the checkpoints below a prefix, on the coordinator; return its url on all ranks."""
    spec = StoreSpec(prefix, storage_options)
    distributed = sys.modules.get("torch.distributed")
    if no_dist or distributed is None or not (distributed.is_available() and distributed.is_initialized()):
        name = _look_below(spec, caller, choose)
    else:
        from zarrckpt._options import TIMEOUT
        from zarrckpt._ranks.group import Ranks
        from zarrckpt._ranks.rounds import joined

        with joined(Ranks(process_group), f"{caller}({spec.url!r})", TIMEOUT) as rounds:
            name = rounds.merge(f"the {caller} checkpoint", lambda: None, lambda _: _look_below(spec, caller, choose))
            if name is not None and (type(name) is not str or name in ("", ".", "..") or "/" in name or "\\" in name):
                raise CheckpointError(
                    f"{caller}({spec.url!r}): rank 0 names {name!r:.200}, which is no folder right there"
                )
    if name is None:
        return None
    return join_url(prefix, name) if isinstance(prefix, str | os.PathLike) else name


def _look_below(spec: StoreSpec, caller: str, choose: _ChooseBelow) -> str | None:
    store = spec.open()
    listed = list_below(store)
    if listed.has_save:
        warn(f"{caller}({store.url!r}) looks below a checkpoint: pass the folder that holds it")
    name, damaged = choose(store, listed.folders)
    for below in damaged:
        warn(passed_over(store, below))
    return name


def _best_below(store: Store, names: list[str], metric: str, mode: Mode) -> tuple[str | None, list[Below]]:
    found = checkpoints_below(store, names)
    damaged = [below for below in found if below.damage is not None]
    roots = [(below, below.root.metadata) for below in found if below.root is not None]
    if not roots:
        refuse_unreadable(store, damaged)
    elif not any(metric in metadata for _, metadata in roots):
        names = sorted({name for _, metadata in roots for name in metadata if not name.startswith(RESERVED)})
        warn(f"no checkpoint below {store.url} has {metric!r} in its metadata: {hint(metric, names)}")
    known = [(comparable_metric(metadata.get(metric)), below) for below, metadata in roots]
    finite = [(value, below) for value, below in known if value is not None and abs(value) != math.inf]
    first = (min if mode == "min" else max)((value for value, _ in finite), default=None)
    chosen = newest(below for value, below in finite if value == first)
    return None if chosen is None else chosen.name, damaged
