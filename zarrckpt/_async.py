"""``async_save``: copy the state, return, and save the copy in the background."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.distributed_c10d import _world

from zarrckpt import _state
from zarrckpt._api import save_with
from zarrckpt._chunking import MAX_CHUNK_BYTES
from zarrckpt._compression import CompressionOption
from zarrckpt._crew import beside
from zarrckpt._distributed import Ranks, from_coordinator
from zarrckpt._errors import CheckpointError
from zarrckpt._planner import ZarrSavePlanner
from zarrckpt._report import SaveReport
from zarrckpt._staging import Stager
from zarrckpt._transfer import DEFAULT_MAX_INFLIGHT_BYTES, Progress
from zarrckpt._writer import ASYNC_THREAD, ZarrStorageWriter

_log = logging.getLogger("zarrckpt")

_BACKGROUND_COUNT = -1


class _StagedPlanner(ZarrSavePlanner):
    """Saves a copy of a state.

    An error takes the place of a copy that could not be made on this rank: raised here, it reaches all ranks.
    """

    def __init__(self, staged: dict[Any, Any] | Exception, *, alone: bool) -> None:
        super().__init__()
        self._staged = staged
        self._alone = alone

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        if isinstance(self._staged, Exception):
            raise self._staged
        super().set_up_planner(self._staged, storage_meta, is_coordinator)


class _SaveFuture(Future[SaveReport]):
    """Knows whether anybody has asked for the outcome. Can't be cancelled: the other ranks would wait."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self._url = url
        self._asked = False
        self.set_running_or_notify_cancel()

    def result(self, timeout: float | None = None) -> SaveReport:
        self.exception(timeout)
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        error = super().exception(timeout)
        self._asked = True
        return error

    def run(self, save: Callable[[], SaveReport]) -> None:
        """Make the save, in the background's thread."""
        try:
            report = save()
        except BaseException as err:
            self.set_exception(err)
        else:
            self.set_result(report)

    def end(self) -> None:
        """Wait, and log an error that nobody has asked for."""
        if not self._asked and (error := self.exception()) is not None:
            _log.error(
                "the background save to %s failed, and nothing asked its future: %s: %s",
                self._url,
                type(error).__name__,
                error,
            )


class _Saver:
    """The one background save of a process at a time, with what it keeps between saves."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stager = Stager()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=ASYNC_THREAD)
        self._last: _SaveFuture | None = None
        self._groups: dict[tuple[int, ...], tuple[object, dist.ProcessGroup]] = {}

    def save(
        self,
        state: Mapping[str, Any],
        writer: ZarrStorageWriter,
        ranks: Ranks,
        keep_buffers: bool,
    ) -> Future[SaveReport]:
        with self._lock:
            self.finish()
            if not ranks.alone:
                ranks = Ranks(self._group(ranks.group))
            look = writer.refuse_committed if ranks.number == 0 else lambda: None
            with beside(look) as looked:
                staged = self._staged(state, keep_buffers)
            from_coordinator(looked, ranks)
            planner = _StagedPlanner(staged, alone=ranks.alone)
            self._last = last = _SaveFuture(writer.checkpoint_id)
            self._thread.submit(last.run, lambda: save_with(planner, {}, writer, ranks))
            return last

    def _staged(self, state: Mapping[str, Any], keep_buffers: bool) -> dict[Any, Any] | Exception:
        """A copy of a state, or why there is none: the background tells all ranks."""
        try:
            return self._stager.stage(_state.for_save(state).state, keep=keep_buffers)
        except Exception as err:
            return err

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
        """Wait for the save under way, if any."""
        if self._last is not None:
            self._last.end()


def _new_gloo_group(members: tuple[int, ...], like: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """A gloo group of the ranks of ``like``. Collective over them.

    Raises CheckpointError where torch was built without gloo, and where torch before 2.14 has no common name for a
    group of some ranks: it names one that not all ranks make after the number of groups that a rank knows.
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
    if torch.__version__ < "2.14":  # compared as versions
        dist.all_gather_object(counts, len(_world.pg_names), group=like)
    if len({*counts}) != 1:
        raise CheckpointError(
            f"the ranks {list(members)} know different numbers of process groups ({counts}), so torch cannot make a "
            "group of them for a background save: make the first async_save with this process_group before the other "
            "groups, or use save"
        )
    # From 2.14 on torch names the group after this count instead, and raises it, on the members only: every later group
    # of all ranks would have another name on these, and hang. The number here is of no group that torch makes.
    count, _world.group_count = _world.group_count, _BACKGROUND_COUNT
    try:
        group = dist.new_group(list(members), backend="gloo", use_local_synchronization=True)
    finally:
        _world.group_count = count
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
    overwrite: bool = False,
    metadata: Mapping[str, Any] | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    store: object | None = None,
    storage_options: Mapping[str, Any] | None = None,
    credential_provider: Callable[..., Any] | None = None,
    compression: CompressionOption = None,
    max_chunk_bytes: int = MAX_CHUNK_BYTES,
    min_piece_bytes: int | None = None,
    fill_bytes: int | None = None,
    concurrency: int | None = None,
    max_inflight_bytes: int = DEFAULT_MAX_INFLIGHT_BYTES,
    durable: bool = True,
    progress: Progress | None = None,
    keep_buffers: bool = True,
) -> Future[SaveReport]:
    """Copy a state to CPU memory, return, and save the copy in the background.

    Training is held up for the copy only, and for the end of the previous background save if that still runs: there are
    never two at once. Beside its copy the coordinator asks the store whether a checkpoint is committed there (one
    request, none with ``overwrite``), and all ranks wait for its answer. The collectives of the background run over a
    gloo group of its own, made by the first call: every rank must call it, and ``process_group`` needs no CPU backend;
    with ``no_dist`` there are none. At the end of the process a save under way is finished. Requests and bytes are
    otherwise those of :func:`zarrckpt.save`; memory for the copy, as much as this rank's part of the state takes, comes
    on top.

    Args:
        state: a nested dict of modules, optimizers, other Stateful objects, tensors, DTensors, ShardedTensors and any
            Python values. It may change as soon as the call returns.
        url: where to: a local path, ``file://``, ``s3://``, ``gs://``, ``az://``, or any fsspec url.
        overwrite: replace a committed checkpoint at that url; the old one stays readable until the new one is
            committed. False, the default: CheckpointExistsError.
        metadata: what to keep with the checkpoint, for people and programs that choose among several: a dict of JSON
            types such as ``{"step": 7, "val_loss": 2.1}``, at most 64 KiB. Tensors and numpy values of one element are
            taken as numbers. ``Checkpoint.metadata``, ``zarrckpt info`` and ``ls`` show it. The coordinator's counts.
        process_group: the ranks that save together (default: all); each of them calls, the others do not.
        no_dist: this process saves alone, as in :func:`zarrckpt.save`.
        store: a ready ``zarr.abc.store.Store`` instead of a url.
        storage_options: options of the store by name, as fsspec or obstore take them, such as ``endpoint_url``
            (``docs/how-to/stores.md``); default: what the environment says. An unknown name is a StorageError.
        credential_provider: a picklable callable that returns fresh credentials, for tokens that expire.
        compression: None (default), ``"zstd"``, ``"blosc"``, or a mapping with options of Zarr's codec
            (``docs/how-to/compression.md``); tensors are compressed, values are not.
        max_chunk_bytes: larger pieces become several chunks (default 128 MiB; not more than seven eighths of
            ``max_inflight_bytes``, but for 16 MiB).
        min_piece_bytes: pieces of a tensor that are smaller than this on average move between ranks and are merged
            into chunks of about ``fill_bytes``. Default: 256 KiB times the number of ranks, at most 16 MiB; 0: no
            merging, except where pieces fit no regular grid.
        fill_bytes: the size of merged chunks (default: a quarter of a rank's mean part, 4 to 32 MiB).
        concurrency: exactly so many chunks and documents in transfer at once, a rank. Default: the store's own choice,
            which leaves one processor to training (``docs/how-to/speed.md``).
        max_inflight_bytes: bound on a rank's memory for chunks in transfer, beyond the copy (default 512 MiB, at least
            one chunk).
        durable: local files are synced to disk before the commit (default). Without meaning in object stores.
        progress: called on each rank as ``progress(bytes_done, bytes_total)``, in the background's threads.
        keep_buffers: keep the memory of the copy for the next call, which then takes about a third of the time: new
            memory is slow to touch, and slower to pin (default). False frees it, when this save is done.

    Raises CheckpointExistsError at once, on all ranks, where a checkpoint is committed and ``overwrite`` is false.

    Returns a future of :class:`SaveReport`; its ``result()`` raises what else :func:`zarrckpt.save` would, the same on
    all ranks, what cannot be saved included. An error for which no one has asked the future is logged (logger
    ``zarrckpt``) by the next call, or at the end of the process. The save cannot be cancelled.

    The call itself raises TypeError and ValueError for arguments that make no sense, StorageError for an unknown option
    of the store, and CheckpointError where this torch cannot make a process group for the background.
    """
    _state.refuse_swapped(state, url, "async_save")
    ranks = Ranks(process_group, no_dist)
    if no_dist:
        _state.refuse_fsdp1(state)
    writer = ZarrStorageWriter(
        url,
        overwrite,
        metadata=metadata,
        store=store,
        storage_options=storage_options,
        credential_provider=credential_provider,
        compression=compression,
        max_chunk_bytes=max_chunk_bytes,
        min_piece_bytes=min_piece_bytes,
        fill_bytes=fill_bytes,
        concurrency=concurrency,
        max_inflight_bytes=max_inflight_bytes,
        durable=durable,
        progress=progress,
    )
    # By process: a forked child has neither the thread nor the group.
    saver = _savers.get(os.getpid()) or _savers.setdefault(os.getpid(), _Saver())
    return saver.save(state, writer, ranks, keep_buffers)
