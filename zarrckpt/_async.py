"""``async_save``: copy the state, return, and save the copy in the background."""

from __future__ import annotations

import copy
import logging
import os
import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, WriteItemType
from torch.distributed.distributed_c10d import _world

from zarrckpt import _state
from zarrckpt._api import save_with
from zarrckpt._distributed import in_use
from zarrckpt._errors import CheckpointError
from zarrckpt._planner import ZarrSavePlanner
from zarrckpt._report import SaveReport
from zarrckpt._writer import ZarrStorageWriter


@dataclass(frozen=True)
class _Stage:
    """A state at one moment: the plan made from it, and copies of what the plan's items resolve to."""

    plan: SavePlan
    data: Mapping[MetadataIndex, Any]


class _StagedPlanner(ZarrSavePlanner):
    """Saves a stage: plans nothing anew, and resolves items to the copies.

    An error takes the place of a stage that could not be made on this rank: raised here, it reaches all ranks.
    """

    def __init__(self, stage: _Stage | Exception) -> None:
        super().__init__()
        self._made = stage

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        if isinstance(self._made, Exception):
            raise self._made
        self._stage = self._made
        self.mappings = self._stage.plan.planner_data
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> SavePlan:
        self.plan = self._stage.plan
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self._stage.data[index]


class _Stager:
    """Copies of a state in CPU memory. Buffers are kept and used again, pinned where the source is on a GPU."""

    def __init__(self) -> None:
        self._buffers: dict[MetadataIndex, torch.Tensor] = {}

    def stage(self, state: dict[str, Any]) -> _Stage:
        planner = ZarrSavePlanner()
        planner.set_up_planner(state)
        plan = planner.create_local_plan()
        data: dict[MetadataIndex, Any] = {}
        devices: set[torch.device] = set()
        for item in plan.items:
            source = planner.lookup_object(item.index)
            if item.type == WriteItemType.BYTE_IO:
                data[item.index] = copy.deepcopy(source)
            else:
                data[item.index] = self._copy(item.index, source.detach())
                devices.add(source.device)
        for device in devices:
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()
        # Buffers of entries that are gone would be kept for ever.
        self._buffers = {index: self._buffers[index] for index in data if index in self._buffers}
        return _Stage(plan, data)

    def _copy(self, index: MetadataIndex, source: torch.Tensor) -> torch.Tensor:
        buffer = self._buffers.get(index)
        if buffer is None or buffer.shape != source.shape or buffer.dtype != source.dtype:
            pinned = source.device.type == "cuda"
            buffer = torch.empty(source.shape, dtype=source.dtype, device="cpu", pin_memory=pinned)
            self._buffers[index] = buffer
        # Only CUDA's copies are waited for.
        return buffer.copy_(source, non_blocking=source.device.type == "cuda")


class _Saver:
    """The one background save of a process at a time, with what it keeps between saves."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stager = _Stager()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="zarrckpt-async")
        self._last: Future[SaveReport] | None = None
        self._groups: dict[tuple[int, ...], tuple[object, dist.ProcessGroup]] = {}

    def save(
        self, state: Mapping[str, Any], writer: ZarrStorageWriter, process_group: dist.ProcessGroup | None
    ) -> Future[SaveReport]:
        with self._lock:
            if self._last is not None:
                wait([self._last])  # its error, if any, is its own future's
            group = self._group(process_group) if in_use() else None
            stage: _Stage | Exception
            try:
                stage = self._stager.stage(_state.for_save(state).state)
            except Exception as err:
                stage = err
            self._last = self._thread.submit(save_with, _StagedPlanner(stage), {}, writer, group)
            return self._last

    def _group(self, process_group: dist.ProcessGroup | None) -> dist.ProcessGroup:
        """A gloo group of the same ranks for the background's collectives.

        On the group that trains, they would interleave with training's own in another order on each rank, and deadlock.
        So it does not matter whether that group has a CPU backend, only whether torch has one.
        """
        members = tuple(dist.get_process_group_ranks(process_group or dist.group.WORLD))
        default = dist.group.WORLD
        known = self._groups.get(members)
        if known is None or known[0] is not default:
            self._groups[members] = known = (default, _new_gloo_group(members, process_group))
        return known[1]

    def finish(self) -> None:
        """Wait for a save under way. Its error is logged, since nobody is left to ask the future."""
        last = self._last
        if last is None or last.done():
            return
        error = last.exception()
        if error is not None:
            logging.getLogger("zarrckpt").error("the save under way at the end of the process failed: %s", error)


def _new_gloo_group(members: tuple[int, ...], like: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """A gloo group of the ranks of ``like``. Collective over them.

    Raises CheckpointError where torch was built without gloo, and where it has no common name for a group of some
    ranks: it names one that not all ranks make after the number of groups that a rank knows.
    """
    if not dist.is_gloo_available():
        raise CheckpointError(
            "a background save needs a CPU backend for its collectives, and this torch was built without gloo: use "
            "save, or a torch with gloo"
        )
    group: dist.ProcessGroup
    if len(members) == dist.get_world_size():
        group = dist.new_group(backend="gloo")
        return group
    counts: list[int] = [0] * len(members)
    dist.all_gather_object(counts, len(_world.pg_names), group=like)
    if len({*counts}) != 1:
        raise CheckpointError(
            f"the ranks {list(members)} know different numbers of process groups ({counts}), so torch cannot make a "
            "group of them for a background save: make the first async_save with this process_group before the other "
            "groups, or use save"
        )
    group = dist.new_group(list(members), backend="gloo", use_local_synchronization=True)
    return group


_savers: dict[int, _Saver] = {}


def _finish_all() -> None:
    saver = _savers.get(os.getpid())
    if saver is not None:
        saver.finish()


# Not atexit: that comes after concurrent.futures has stopped taking jobs, and a save under way has some to give.
# Registered after the hook of concurrent.futures, this one runs before it.
threading._register_atexit(_finish_all)  # type: ignore[attr-defined]


def async_save(
    state: Mapping[str, Any],
    url: str | os.PathLike[str] | None = None,
    *,
    process_group: dist.ProcessGroup | None = None,
    **options: Any,
) -> Future[SaveReport]:
    """Copy a state to CPU memory, return, and save the copy in the background.

    Takes the arguments of :func:`zarrckpt.save`. Training is held up for the copy only, and for the end of the previous
    background save if that still runs: there are never two at once. The buffers of the copy are kept for the next
    call. The collectives of the background run over a gloo group of its own, made by the first call: every rank
    must call it, and ``process_group`` needs no CPU backend.

    Returns a future of :class:`SaveReport`; its ``result()`` raises what :func:`zarrckpt.save` would. At the end of the
    process a save under way is finished.
    """
    writer = ZarrStorageWriter(url, **options)
    # By process: a forked child has neither the thread nor the group.
    saver = _savers.get(os.getpid()) or _savers.setdefault(os.getpid(), _Saver())
    return saver.save(state, writer, process_group)
