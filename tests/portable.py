"""Checkpoints of portable arrays. They are copies, because no save makes portable arrays."""

from __future__ import annotations

import os
from typing import Any

import zarrckpt


def save_portable(
    state: Any,
    url: str | os.PathLike[str],
    *,
    storage_options: dict[str, Any] | None = None,
    options: zarrckpt.SaveOptions | None = None,
) -> zarrckpt.CopyReport:
    """Save a state with its bfloat16 and float8 tensors as unsigned integers. Remove the checkpoint that it is copied
    from.
    """
    native = f"{os.fspath(url)}-native"
    zarrckpt.save(state, native, storage_options=storage_options, options=options)
    ckpt = zarrckpt.open(native, storage_options=storage_options, allow_pickle=True)
    report = ckpt.copy_to(url, portable_dtypes=True, storage_options=storage_options)
    zarrckpt.remove(native, storage_options=storage_options)
    return report
