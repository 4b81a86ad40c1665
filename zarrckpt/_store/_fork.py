"""obstore in forked processes: it hangs there once the parent has used it, so we raise first."""

from __future__ import annotations

import os
import threading

from zarrckpt._errors import StorageError

_lock = threading.Lock()
_first_pid: int | None = None


def check_fork() -> None:
    """Raise StorageError in a process that was forked after its parent had used obstore through this package."""
    global _first_pid
    pid = os.getpid()
    if _first_pid is None:
        with _lock:
            if _first_pid is None:
                _first_pid = pid
    if _first_pid != pid:
        raise StorageError(
            "this process was forked after its parent had used an object store, and the client (obstore) would hang "
            "here: start workers by 'spawn' or 'forkserver' (multiprocessing_context='spawn' for a DataLoader), or "
            "open the store in the workers only"
        )
