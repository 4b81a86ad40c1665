"""Refuse obstore in forked processes: it would hang if the parent has used it."""

from __future__ import annotations

import os

from zarrckpt._errors import StorageError

_used = False
_used_before_fork = False


def check_fork() -> None:
    """Raise StorageError in a process that was forked after its parent had used obstore through this package."""
    global _used
    if _used_before_fork:
        raise StorageError(
            "this process was forked after its parent had used an object store, and the client (obstore) would hang "
            "here. Start workers by 'spawn' or 'forkserver' (multiprocessing_context='spawn' for a DataLoader), or "
            "open the store in the workers only"
        )
    _used = True


def _forbid_obstore_in_child() -> None:
    global _used_before_fork
    _used_before_fork = _used


os.register_at_fork(after_in_child=_forbid_obstore_in_child)
