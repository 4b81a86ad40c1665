"""Sharded PyTorch checkpoints as Zarr, directly in object stores or on disk.

``save``, ``load`` and ``async_save`` need torch; ``open``, ``latest`` and ``best`` do not. Large packages are imported
at their first use.
"""

from __future__ import annotations

import importlib

from zarrckpt._errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CheckpointPinnedError,
    CheckpointRemovedError,
    CheckpointReplacedError,
    CorruptCheckpointError,
    ForeignObjectsError,
    IncompleteSaveError,
    KeyMismatchError,
    LoadMismatchError,
    ObjectExistsError,
    ObjectNotFoundError,
    RunTakenOverError,
    StorageError,
    UnsafeValueError,
    UnsupportedFormatError,
    UnsupportedLayoutError,
    UnsupportedValueError,
)
from zarrckpt._version import __version__

TYPE_CHECKING = False  # instead of typing.TYPE_CHECKING, because typing imports slowly
if TYPE_CHECKING:
    from typing import Any

    from zarrckpt._api import load, save
    from zarrckpt._checkpoint import Checkpoint, open
    from zarrckpt._commit.pins import pin, unpin
    from zarrckpt._convert.importing import import_checkpoint
    from zarrckpt._dcp.planner import ZarrLoadPlanner, ZarrSavePlanner
    from zarrckpt._dcp.reader import ZarrStorageReader
    from zarrckpt._dcp.writer import ZarrStorageWriter
    from zarrckpt._ops.recover import RecoverReport, recover, remove
    from zarrckpt._ops.verify import Damage, VerifyReport
    from zarrckpt._options import LoadOptions, SaveOptions
    from zarrckpt._reports import LoadReport, PlanReport, SaveReport
    from zarrckpt._runs.child_signals import WorkerInit
    from zarrckpt._runs.keep import Keep
    from zarrckpt._runs.latest import best, latest
    from zarrckpt._runs.manager import CheckpointManager
    from zarrckpt._save.background import SaveFuture, async_save
    from zarrckpt._save.plan_report import plan_report
    from zarrckpt._state.per_rank import PerRank

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "CheckpointExistsError",
    "CheckpointManager",
    "CheckpointNotFoundError",
    "CheckpointPinnedError",
    "CheckpointRemovedError",
    "CheckpointReplacedError",
    "CorruptCheckpointError",
    "Damage",
    "ForeignObjectsError",
    "IncompleteSaveError",
    "Keep",
    "KeyMismatchError",
    "LoadMismatchError",
    "LoadOptions",
    "LoadReport",
    "ObjectExistsError",
    "ObjectNotFoundError",
    "PerRank",
    "PlanReport",
    "RecoverReport",
    "RunTakenOverError",
    "SaveFuture",
    "SaveOptions",
    "SaveReport",
    "StorageError",
    "UnsafeValueError",
    "UnsupportedFormatError",
    "UnsupportedLayoutError",
    "UnsupportedValueError",
    "VerifyReport",
    "WorkerInit",
    "ZarrLoadPlanner",
    "ZarrSavePlanner",
    "ZarrStorageReader",
    "ZarrStorageWriter",
    "__version__",
    "async_save",
    "best",
    "import_checkpoint",
    "latest",
    "load",
    "open",
    "pin",
    "plan_report",
    "recover",
    "remove",
    "save",
    "unpin",
]

_LAZY = {
    "Checkpoint": "_checkpoint",
    "CheckpointManager": "_runs.manager",
    "Damage": "_ops.verify",
    "Keep": "_runs.keep",
    "LoadOptions": "_options",
    "LoadReport": "_reports",
    "PerRank": "_state.per_rank",
    "PlanReport": "_reports",
    "RecoverReport": "_ops.recover",
    "SaveFuture": "_save.background",
    "SaveOptions": "_options",
    "SaveReport": "_reports",
    "VerifyReport": "_ops.verify",
    "WorkerInit": "_runs.child_signals",
    "ZarrLoadPlanner": "_dcp.planner",
    "ZarrSavePlanner": "_dcp.planner",
    "ZarrStorageReader": "_dcp.reader",
    "ZarrStorageWriter": "_dcp.writer",
    "async_save": "_save.background",
    "best": "_runs.latest",
    "import_checkpoint": "_convert.importing",
    "latest": "_runs.latest",
    "load": "_api",
    "open": "_checkpoint",
    "pin": "_commit.pins",
    "plan_report": "_save.plan_report",
    "recover": "_ops.recover",
    "remove": "_ops.recover",
    "save": "_api",
    "unpin": "_commit.pins",
}
_NEED_TORCH = {
    "_api",
    "_dcp.planner",
    "_dcp.reader",
    "_dcp.writer",
    "_convert.importing",
    "_runs.manager",
    "_state.per_rank",
    "_save.plan_report",
    "_save.background",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'zarrckpt' has no attribute {name!r}")
    try:
        module = importlib.import_module(f"zarrckpt.{_LAZY[name]}")
    except ModuleNotFoundError as err:
        if (err.name or "").partition(".")[0] == "torch" and _LAZY[name] in _NEED_TORCH:
            raise ModuleNotFoundError(
                f"zarrckpt.{name} needs PyTorch: pip install 'zarrckpt[torch]'", name="torch"
            ) from err
        raise
    value = getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
