"""``save`` and ``load``: any state, any mesh, one call."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from functools import partial
from typing import Any, cast

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.checkpoint.state_dict_saver import _save_state_dict
from torch.distributed.checkpoint.utils import _DistWrapper

from zarrckpt import _state
from zarrckpt._chunking import MAX_CHUNK_BYTES, Subchunks
from zarrckpt._compression import CompressionOption
from zarrckpt._distributed import Ranks, from_coordinator, own_errors
from zarrckpt._errors import UnsupportedValueError
from zarrckpt._kept_plans import PlanForgottenError, PlanReuse, memory_of
from zarrckpt._object_planners import ObjectLoadPlanner, ObjectSavePlanner
from zarrckpt._reader import ZarrStorageReader
from zarrckpt._report import LoadReport, SaveReport
from zarrckpt._root import Root
from zarrckpt._transfer import DEFAULT_MAX_INFLIGHT_BYTES, Progress
from zarrckpt._writer import ZarrStorageWriter


def save(
    state: Mapping[str, Any],
    url: str | os.PathLike[str] | None = None,
    *,
    overwrite: bool = False,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    store: object | None = None,
    storage_options: Mapping[str, Any] | None = None,
    credential_provider: Callable[..., Any] | None = None,
    keep_replaced: bool = False,
    portable_dtypes: bool = False,
    compression: CompressionOption = None,
    max_chunk_bytes: int = MAX_CHUNK_BYTES,
    min_piece_bytes: int | None = None,
    fill_bytes: int | None = None,
    subchunks: Subchunks = "blocks",
    concurrency: int | None = None,
    max_inflight_bytes: int = DEFAULT_MAX_INFLIGHT_BYTES,
    durable: bool = True,
    progress: Progress | None = None,
) -> SaveReport:
    """Save a state as a Zarr hierarchy at a url; return when it is committed.

    Every rank of the process group calls it with its own part of the state; without ``torch.distributed`` one
    process saves all. Each rank writes its own pieces, the coordinator (rank 0 of the group) commits last.

    Args:
        state: a nested dict of modules, optimizers, other Stateful objects, tensors, DTensors, ShardedTensors and any
            Python values.
        url: where to: a local path, ``file://``, ``s3://``, ``gs://``, ``az://``, or any fsspec url.
        process_group: the ranks that save together (default: all).
        no_dist: this process saves alone, whatever process group there is: nothing waits for other ranks, which need
            not call it. For calls on one rank, as Lightning makes them, and for a checkpoint of each rank, each at a
            url of its own. What other ranks hold a part of (a DTensor with ``Shard``, a module of FSDP1) is refused
            with its name; a :class:`PerRank` keeps this process's rank. Not together with ``process_group``.

    The other arguments are those of :class:`ZarrStorageWriter`.

    Raises CheckpointExistsError where a checkpoint is committed and ``overwrite`` is false, before any data moves;
    other children of :class:`CheckpointError` for what can't be saved. An error on one rank is raised on all;
    nothing is committed then.
    """
    ranks = Ranks(process_group, no_dist)
    writer = ZarrStorageWriter(
        url,
        overwrite,
        keep_replaced=keep_replaced,
        store=store,
        storage_options=storage_options,
        credential_provider=credential_provider,
        portable_dtypes=portable_dtypes,
        compression=compression,
        max_chunk_bytes=max_chunk_bytes,
        min_piece_bytes=min_piece_bytes,
        fill_bytes=fill_bytes,
        subchunks=subchunks,
        concurrency=concurrency,
        max_inflight_bytes=max_inflight_bytes,
        durable=durable,
        progress=progress,
    )
    if no_dist:
        _state.refuse_fsdp1(state)
    return save_with(ObjectSavePlanner(alone=ranks.alone), state, writer, ranks)


def save_with(planner: SavePlanner, state: Mapping[str, Any], writer: ZarrStorageWriter, ranks: Ranks) -> SaveReport:
    """Save what a planner makes of a state through a writer. Collective over the ranks."""
    with own_errors(ranks):
        writer.reset()
        taken = cast("dict[str, Any]", state)  # the planner checks it
        save = partial(_save_state_dict, taken, writer, ranks.group, no_dist=ranks.alone, planner=planner)
        metadata = save() if ranks.alone else _with_kept_plan(save, writer, ranks.group)
    report: SaveReport = metadata.storage_data
    return report


def _with_kept_plan(
    save: Callable[[], Metadata], writer: ZarrStorageWriter, process_group: dist.ProcessGroup | None
) -> Metadata:
    """Save by the plan of the last save, if nothing has changed since."""
    reuse = PlanReuse(memory_of(process_group))
    writer.reuse_plans(reuse)
    try:
        return save()
    except CheckpointException as err:
        if not any(isinstance(error, PlanForgottenError) for error, _ in err.failures.values()):
            raise
    # Every rank got this error, before anything was written.
    reuse.forget()
    return save()


def load(
    state: dict[str, Any],
    url: str | os.PathLike[str] | None = None,
    *,
    strict: bool = True,
    keys: str | Iterable[str] | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    store: object | None = None,
    storage_options: Mapping[str, Any] | None = None,
    credential_provider: Callable[..., Any] | None = None,
    allow_pickle: bool = False,
    allow_cast: bool = False,
    share_reads: bool | None = None,
    concurrency: int | None = None,
    max_inflight_bytes: int = DEFAULT_MAX_INFLIGHT_BYTES,
    progress: Progress | None = None,
) -> LoadReport:
    """Load a checkpoint into a state, in place: tensors are filled where they are, values are replaced.

    Every rank of the process group calls it with its own state, in any sharding. Keys, shapes and dtypes of all
    targets are checked before the first is touched. One rank reads the root document; each fetches what its own
    boxes need, less what ``share_reads`` has others hand it.

    Args:
        state: as for :func:`save`. A non-tensor target stands for whatever the checkpoint has under its name.
        strict: targets that the checkpoint lacks are an error, and so are entries below a requested module or
            optimizer that find no target on any rank; otherwise both are only reported.
        keys: load a part: flat names, their beginnings up to a dot, or glob patterns (``"model"``, ``"optim.state"``,
            ``"*.bias"``). One that matches nothing in the checkpoint is an error, and with ``strict`` so is one that
            matches no target on any rank.
        no_dist: this process loads alone, as in :func:`save`: nothing waits for other ranks. Of DTensors it fills its
            own part.
        allow_pickle: also load values that were saved pickled, which can run any code that the checkpoint holds.
        allow_cast: convert where dtypes differ, instead of raising.

    The other arguments are those of :class:`ZarrStorageReader`.

    Raises CheckpointNotFoundError, KeyMismatchError (all differences at once; nothing was loaded), UnsafeValueError,
    CorruptCheckpointError (the targets are undefined then), CheckpointReplacedError.
    """
    if not isinstance(state, MutableMapping):
        found = type(state).__name__
        raise UnsupportedValueError(f"the state is a {found}, expected a dict such as {{'model': model}} to load into")
    began = time.monotonic()
    ranks = Ranks(process_group, no_dist)
    if no_dist:
        _state.refuse_fsdp1(state)
    reader = ZarrStorageReader(
        url,
        store=store,
        storage_options=storage_options,
        credential_provider=credential_provider,
        allow_pickle=allow_pickle,
        share_reads=share_reads,
        concurrency=concurrency,
        max_inflight_bytes=max_inflight_bytes,
        progress=progress,
    )
    root: Root = from_coordinator(reader.read_root, ranks)
    reader.use_root(root)
    planner = ObjectLoadPlanner(keys, strict=strict, allow_cast=allow_cast)
    with own_errors(ranks), planner.fresh_on_error():
        _load_state_dict(state, reader, process_group, no_dist=ranks.alone, planner=planner)
        # Gathers errors, as the steps before it do: an object that fails on one rank fails the load on all.
        gathering = _DistWrapper(process_group, not ranks.alone, coordinator_rank=0)
        gathering.all_gather("restore", partial(_restore, state, planner.plain))
    return LoadReport(
        url=reader.checkpoint_id,
        save_id=root.save_id,
        loaded=tuple(planner.loaded),
        missing=tuple(planner.missing),
        unexpected=tuple(planner.unexpected),
        nbytes=reader.bytes_read,
        seconds=time.monotonic() - began,
    )


def _restore(state: dict[str, Any], plain: _state.PlainState) -> None:
    """Objects take their loaded state dicts back, in one order on all ranks; then the user's containers the rest."""
    for restore in plain.restore:
        restore()
    for key, value in plain.state.items():
        back = _state.given_back(state[key], value)
        if back is not state[key]:
            state[key] = back
