"""``latest``: the newest checkpoint below a prefix. No torch, but where the process is one of several ranks."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from zarrckpt._errors import warn
from zarrckpt._format.root import RESERVED_GROUP
from zarrckpt._runs.steps import newest_below, passed_over
from zarrckpt._store import StoreSpec, Url, join_url

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
    ``<prefix>/step-100``. Unfinished saves, and what is no checkpoint, are skipped; damaged root documents, too, with a
    warning. Where no folder with a number has a checkpoint: the one that was committed last among the others.

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
    spec = StoreSpec(prefix, storage_options)
    distributed = sys.modules.get("torch.distributed")
    if no_dist or distributed is None or not (distributed.is_available() and distributed.is_initialized()):
        name = _newest(spec)
    else:
        from zarrckpt._options import TIMEOUT
        from zarrckpt._ranks.group import Ranks
        from zarrckpt._ranks.rounds import joined

        with joined(Ranks(process_group), f"latest({spec.url!r})", TIMEOUT) as rounds:
            name = rounds.merge("the newest checkpoint", lambda: None, lambda _: _newest(spec))
    if name is None:
        return None
    return join_url(prefix, name) if isinstance(prefix, str | os.PathLike) else name


def _newest(spec: StoreSpec) -> str | None:
    place = spec.open()
    folders = place.list_dir()[1]
    if RESERVED_GROUP in folders:
        warn(f"latest({place.url!r}) looks below a checkpoint: pass the folder that holds it")
    name, damaged = newest_below(place, [folder for folder in folders if not folder.startswith("@")])
    for below in damaged:
        warn(passed_over(place, below))
    return name
