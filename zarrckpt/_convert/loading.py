"""Load entries of an open checkpoint as new torch tensors and values, nested as they were saved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zarrckpt._convert.iterating import iter_tensors
from zarrckpt._format.module_versions import rename_versions
from zarrckpt._format.state_path import StatePath
from zarrckpt._jobs import Progress
from zarrckpt._read.selection import Selection, catalog_of
from zarrckpt._state.flatten import build


def load_nested(
    entries: Selection,
    paths: Mapping[str, StatePath],
    device: Any,
    max_inflight_bytes: int,
    progress: Progress | None,
) -> dict[str, Any]:
    """Read entries into a nested state with the versions of its modules, see :meth:`Checkpoint.load`.

    ``paths`` is fqn -> path in the state.
    """
    tensors = iter_tensors(entries, None, None, device, None, max_inflight_bytes, progress)
    values = {**entries.non_tensors, **dict(tensors)}
    versions = catalog_of(entries).root.module_versions
    if any(path.fqn != fqn for fqn, path in paths.items()):
        versions = rename_versions(versions, {fqn: path.fqn for fqn, path in paths.items()})
    state: dict[str, Any] = build(((path, values[fqn]) for fqn, path in paths.items()), versions) if paths else {}
    return state
