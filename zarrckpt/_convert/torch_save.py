"""Write entries of a checkpoint as a file of ``torch.save``. All entries are in memory at once."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

from zarrckpt._convert.loading import load_nested
from zarrckpt._errors import StorageError
from zarrckpt._format.state_path import StatePath
from zarrckpt._jobs import Progress
from zarrckpt._read.catalog import Catalog
from zarrckpt._reports import ExportReport
from zarrckpt._store._whole_files import new_files, refuse_existing


def export_torch_save(
    catalog: Catalog,
    paths: Mapping[str, StatePath],
    target: str,
    *,
    overwrite: bool,
    allow_pickle: bool,
    max_inflight_bytes: int,
    progress: Progress | None,
) -> ExportReport:
    """Write entries, see ``Checkpoint.to_torch_save``. ``paths`` is fqn -> path in the file's state."""
    if not overwrite:
        refuse_existing([target])
    nodes = [catalog.root.tensors[fqn] for fqn in paths if fqn in catalog.root.tensors]
    folder, name = os.path.split(target)
    with new_files(folder, overwrite=overwrite) as part, open(os.path.join(part, name), "xb") as file:
        state = load_nested(
            catalog,
            paths,
            "cpu",
            allow_pickle=allow_pickle,
            max_inflight_bytes=max_inflight_bytes,
            progress=progress,
        )
        try:
            torch.save(state, file)
        except RuntimeError as err:  # torch raises this if a disk is full
            raise StorageError(f"writing {target} failed: {err}") from err
    total = sum(node.nbytes for node in nodes)
    return ExportReport(folder, (name,), len(nodes), len(paths) - len(nodes), total)
