"""Check that all ranks of a save write to one storage: each rank reads the marker that the coordinator has put.

Hosts may have separate disks at the same path, or separate servers at ``localhost``. The chunks of the other hosts
would then be missing from the checkpoint, and no error would be raised before a load.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from zarrckpt._commit.marker import marker_key
from zarrckpt._errors import ObjectNotFoundError, StorageError
from zarrckpt._format.root import RESERVED_GROUP

if TYPE_CHECKING:
    from zarrckpt._store import Store

PATIENCE_SECONDS = 10.0
"""Seconds for which a rank tries to read the marker: network filesystems show a new file late."""

_PAUSE_SECONDS = 0.25


def host_name() -> str:
    """Return the name of this host, as it is shown in errors of other ranks."""
    return socket.gethostname()


def refuse_separate_storage(
    store: Store, save_id: str, coordinator_host: str, report_alive: Callable[[], None], stopped: Callable[[], bool]
) -> None:
    """Raise StorageError if this rank cannot read the marker that the coordinator has put at the url.

    Called on all ranks but the coordinator after their own writes, which also make a network filesystem refresh its
    cache of the folder. Reads one byte. On an object store, a rank on the coordinator's host skips the check. Returns
    early, without an error, when ``stopped`` returns True, because another rank has failed.
    """
    host = host_name()
    if not store.is_local and host == coordinator_host:
        return
    until = time.monotonic() + PATIENCE_SECONDS
    while not _is_readable(store, marker_key(save_id)):
        if stopped():
            return
        if time.monotonic() > until:
            raise StorageError(
                f"the save to {store.url} failed, and nothing was committed: a rank on host {host} cannot read the "
                f"marker that the coordinator has written from host {coordinator_host}. All ranks must use the same "
                "storage. Save to a folder that all hosts share, or to an object store whose endpoint is the same "
                "server for all hosts"
            )
        report_alive()
        time.sleep(_PAUSE_SECONDS)
        store.refresh(RESERVED_GROUP)


def _is_readable(store: Store, key: str) -> bool:
    try:
        store.read_into(key, 0, memoryview(bytearray(1)))
    except ObjectNotFoundError:
        return False
    return True
