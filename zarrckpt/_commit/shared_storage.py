"""A check that the ranks of a save write to one storage: each looks for the marker that the coordinator has put.

Hosts may have a disk each at the same path, or a server each at ``localhost``. The chunks of the other hosts would then
be missing from the checkpoint, and no error would show it before a load.
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
"""Seconds for which a rank looks for the marker: network filesystems show a new file late."""

_PAUSE_SECONDS = 0.25


def host_name() -> str:
    """Return the name of this host, as other ranks show it in errors."""
    return socket.gethostname()


def refuse_separate_storage(
    store: Store, save_id: str, coordinator_host: str, progressed: Callable[[], None], stopped: Callable[[], bool]
) -> None:
    """Raise StorageError if this rank does not see what the coordinator has put at the url.

    Called on the other ranks after their own writes, which also refresh what a network filesystem has cached of the
    folder. A read of one byte on local files; on object stores the same, only for a rank on another host than the
    coordinator. Returns early, without an error, once ``stopped`` returns True: another rank has failed.
    """
    host = host_name()
    if not store.is_local and host == coordinator_host:
        return
    until = time.monotonic() + PATIENCE_SECONDS
    while not _sees(store, marker_key(save_id)):
        if stopped():
            return
        if time.monotonic() > until:
            raise StorageError(
                f"the save to {store.url} failed, and nothing was committed: a rank on host {host} finds nothing there "
                f"of what the coordinator has written from host {coordinator_host}. The url must be one storage for "
                "all ranks: save to a folder that all hosts share, or to an object store whose endpoint is the same "
                "server for all hosts"
            )
        progressed()
        time.sleep(_PAUSE_SECONDS)
        store.refresh(RESERVED_GROUP)


def _sees(store: Store, key: str) -> bool:
    try:
        store.read_into(key, 0, memoryview(bytearray(1)))
    except ObjectNotFoundError:
        return False
    return True
