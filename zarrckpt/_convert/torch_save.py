"""``to_torch_save``: write a checkpoint as a file of ``torch.save``. All entries are in memory at once."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from zarrckpt._convert.loading import load_nested
from zarrckpt._errors import StorageError
from zarrckpt._jobs import Progress
from zarrckpt._read.export_paths import MAX_EXPORT_BYTES, export_paths
from zarrckpt._read.selection import open_selection
from zarrckpt._reports import ExportReport
from zarrckpt._store import Url
from zarrckpt._store._whole_files import local_file, new_files, refuse_existing

if TYPE_CHECKING:
    from zarrckpt._checkpoint import Checkpoint


def to_torch_save(
    source: Checkpoint | Url,
    path: str | os.PathLike[str],
    *patterns: str,
    strip: str = "",
    overwrite: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    max_inflight_bytes: int = MAX_EXPORT_BYTES,
    progress: Progress | None = None,
) -> ExportReport:
    """Write the nested state dict, or the part that matches the patterns, as a ``torch.save`` file.

    ``torch.load`` reads it with its defaults, also with ``mmap=True``. Types that ``weights_only=True`` refuses, such
    as numpy's, need ``weights_only=False``. The file gets its name when it is complete. Needs torch, and memory for all
    written data; :func:`to_safetensors` and :func:`to_dcp` need less.

    Args:
        path: a local file.
        overwrite: replace an existing file.
        max_inflight_bytes: maximum memory in bytes beyond the written data (default 128 MiB).

    The other arguments are those of :func:`to_safetensors`. Non-tensor entries are written too.

    Raises UnsafeValueError for a pickled value, unless the source was opened with ``allow_pickle=True``. Raises
    UnsupportedValueError for two entries with one name, StorageError, also if the file exists, and the errors of
    :meth:`Checkpoint.read`.
    """
    part = open_selection(source, storage_options).select(*patterns)
    paths = export_paths(part, strip)
    target = local_file(path)
    if not overwrite:
        refuse_existing([target])
    folder, name = os.path.split(target)
    with new_files(folder, overwrite=overwrite) as new, open(os.path.join(new, name), "xb") as file:
        state = load_nested(part, paths, "cpu", max_inflight_bytes, progress)
        try:
            torch.save(state, file)
        except RuntimeError as err:  # torch raises this if a disk is full
            raise StorageError(f"writing {target} failed: {err}") from err
    tensors = part.tensors
    return ExportReport(folder, (name,), len(tensors), len(part) - len(tensors), tensors.nbytes)
