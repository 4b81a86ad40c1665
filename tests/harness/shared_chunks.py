"""Let saves share chunks of any size, so that tests with small states are fast."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from unittest.mock import patch

from zarrckpt._save import reuse, write


@contextmanager
def sharing_small_chunks() -> Iterator[None]:
    """Reuse chunks of 1 byte or more, instead of 64 KiB, also on a busy machine that reads slowly."""
    changes = {"MIN_SHARED_BYTES": 1, "_SLOW_SECONDS": 60.0}
    with patch.multiple(reuse, **changes), patch.object(write, "MIN_SHARED_BYTES", 1):
        yield


def not_sharing_small_chunks() -> AbstractContextManager[object]:
    """Restore the minimum within :func:`sharing_small_chunks`."""
    return patch.object(reuse, "MIN_SHARED_BYTES", 64 << 10)
