"""``save`` and ``load``: any state, any mesh, one call."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from functools import partial
from typing import Any

import torch.distributed as dist

from zarrckpt._errors import UnsupportedValueError
from zarrckpt._format.compression import CompressionOption
from zarrckpt._jobs import DEFAULT_MAX_INFLIGHT_BYTES, Progress
from zarrckpt._load.run import LoadRequest, run_load
from zarrckpt._plan.chunking import MAX_CHUNK_BYTES
from zarrckpt._ranks.group import TIMEOUT, Ranks, checked_timeout
from zarrckpt._reports import LoadReport, SaveReport
from zarrckpt._save.request import SaveRequest
from zarrckpt._save.run import run_save
from zarrckpt._state import objects
from zarrckpt._state.local_state import LocalState


def save(
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
    timeout: float = TIMEOUT,
    progress: Progress | None = None,
) -> SaveReport:
    """Save a state as a Zarr hierarchy at a url; return when it is committed.

    Every rank of the process group calls it with its own part of the state; without ``torch.distributed`` one
    process saves all. Each rank writes its own pieces, the coordinator (rank 0 of the group) commits last. All ranks
    pass the same arguments, ``state`` and ``progress`` apart; where they differ, the coordinator's layout counts.

    In an object store a save makes one put for each chunk, array and group, and about a dozen requests besides; an
    overwrite makes some more, and deletes what it replaced. It sends the bytes of the state, about 1 KB for each array,
    and a few bytes of checksums for each subchunk.

    Args:
        state: a nested dict of modules, optimizers, other Stateful objects, tensors, DTensors, ShardedTensors and any
            Python values. One without any entry is saved with a UserWarning.
        url: where to: a local path, ``file://``, ``s3://``, ``gs://``, ``az://``, or any fsspec url.
        overwrite: replace a committed checkpoint at that url; the old one stays readable until the new one is
            committed. False, the default: raise CheckpointExistsError.
        metadata: what to keep with the checkpoint, for people and programs that choose among several: a dict of JSON
            types such as ``{"step": 7, "val_loss": 2.1}``, at most 64 KiB. Tensors and numpy values of one element are
            taken as numbers. ``Checkpoint.metadata``, ``zarrckpt info`` and ``ls`` show it. The coordinator's counts.
        process_group: the ranks that save together (default: all); each of them calls, the others do not.
        no_dist: this process saves alone, whatever process group there is: nothing waits for other ranks, which need
            not call it. For calls on one rank, as Lightning makes them, and for a checkpoint of each rank, each at a
            url of its own. What other ranks hold a part of (a DTensor with ``Shard``, a module of FSDP1) is refused
            with its name; a :class:`PerRank` keeps this process's rank. Not together with ``process_group``.
        store: a ready ``zarr.abc.store.Store`` instead of a url.
        storage_options: options of the store by name, as fsspec or obstore take them, such as ``endpoint_url``
            (``docs/how-to/stores.md``); default: what the environment says. An unknown name is a StorageError.
        credential_provider: a picklable callable that returns fresh credentials, for tokens that expire.
        compression: None (default), ``"zstd"``, ``"blosc"``, or a mapping with options of Zarr's codec, such as
            ``{"name": "zstd", "level": 3}`` (``docs/how-to/compression.md``); tensors are compressed, values are not.
        max_chunk_bytes: larger pieces become several chunks (default 128 MiB; not more than seven eighths of
            ``max_inflight_bytes``, but for 16 MiB).
        min_piece_bytes: pieces of a tensor that are smaller than this on average move between ranks and are merged
            into chunks of about ``fill_bytes``: fewer objects, more traffic between ranks. Default: 256 KiB times the
            number of ranks, at most 16 MiB; 0: no merging, except where pieces fit no regular grid.
        fill_bytes: the size of merged chunks (default: a quarter of a rank's mean part, 4 to 32 MiB).
        concurrency: so many chunks and documents in transfer at once, a rank. Default: the store's own choice, 64 in
            object stores (``docs/how-to/speed.md``).
        max_inflight_bytes: bound on a rank's memory for chunks in transfer, beyond the state (default 512 MiB, at
            least one chunk).
        durable: local files are synced to disk before the commit (default). False is faster, and a power cut may cost
            the checkpoint. Without meaning in object stores, where a put is durable.
        timeout: the longest time in seconds without an arrival or progress of a rank (default 1800): then all that came
            raise an error that names it. After 30 s a warning (logger ``zarrckpt``) names what is waited for. Requests
            to the store have their own bounds.
        progress: called on each rank as ``progress(bytes_done, bytes_total)`` while its chunks are written.

    Returns a :class:`SaveReport`, the same on every rank: url, id, bytes, objects, bytes by rank, seconds.

    Raises CheckpointExistsError where a checkpoint is committed and ``overwrite`` is false, before any data moves, and
    where another save committed first; ForeignObjectsError where the url holds what no save of this package wrote, or
    lies inside a checkpoint; CheckpointPinnedError where a pin keeps the checkpoint that would be replaced, and
    CheckpointRemovedError where a removal has not ended; UnsupportedValueError and UnsupportedLayoutError for an entry
    that cannot be saved, by its name; StorageError where the store failed after its retries; IncompleteSaveError where
    a rank did not write what was planned: children of :class:`CheckpointError` all of them. An error on one rank is
    raised on all; nothing is committed then, and what was written is removed, unless the root document may have been
    put. Raises TypeError and ValueError for arguments that make no sense.
    """
    objects.refuse_swapped(state, url, "save")
    ranks = Ranks(process_group, no_dist)
    request = SaveRequest.checked(
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
    if no_dist:
        objects.refuse_fsdp1(state)
    return run_save(partial(LocalState.saving, state), request, ranks, checked_timeout(timeout))


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
    timeout: float = TIMEOUT,
    progress: Progress | None = None,
) -> LoadReport:
    """Load a checkpoint into a state, in place: tensors are filled where they are, values are replaced.

    Every rank of the process group calls it with its own state, in any sharding. Keys, shapes and dtypes of all
    targets are checked before the first is touched. The coordinator (rank 0 of the group) reads the root document, with
    one request; each rank reads the table of checksums, with one or two, and what its own boxes need, less what
    ``share_reads`` has others hand it: one request for neighbours in storage, of up to 16 MiB.

    Args:
        state: as for :func:`save`. A non-tensor target stands for whatever the checkpoint has under its name.
        url: where from: a local path, ``file://``, ``s3://``, ``gs://``, ``az://``, or any fsspec url.
        strict: targets that the checkpoint lacks are an error, and so are entries below a requested module or
            optimizer that find no target on any rank (default); otherwise both are only reported.
        keys: load a part: flat names, their beginnings up to a dot, or glob patterns (``"model"``, ``"optim.state"``,
            ``"*.bias"``). One that matches nothing in the checkpoint is an error, and with ``strict`` so is one that
            matches no target on any rank. Default: everything that has a target.
        process_group: the ranks that load together (default: all); each of them calls, the others do not.
        no_dist: this process loads alone, as in :func:`save`: nothing waits for other ranks. Of DTensors it fills its
            own part.
        store: a ready ``zarr.abc.store.Store`` instead of a url.
        storage_options: options of the store by name, as fsspec or obstore take them, such as ``endpoint_url``
            (``docs/how-to/stores.md``); default: what the environment says. An unknown name is a StorageError.
        credential_provider: a picklable callable that returns fresh credentials, for tokens that expire.
        allow_pickle: also load values that were saved pickled, which can run any code that the checkpoint holds.
            Default: UnsafeValueError.
        allow_cast: convert where dtypes differ, instead of raising (default False).
        share_reads: what several ranks need (replicas, small chunks) is fetched by one of them and handed on over a
            private gloo mesh; if false, each rank fetches all that it needs. The coordinator's choice counts. Default:
            in object stores yes; in local paths no, since the machine's file cache is faster than the mesh.
        concurrency: so many requests at once, a rank. Default: the store's own choice, 64 in object stores
            (``docs/how-to/speed.md``).
        max_inflight_bytes: bound on a rank's memory for chunks in transfer, beyond the targets (default 512 MiB).
        timeout: the longest time in seconds without an arrival or progress of a rank, as in :func:`save`.
        progress: called on each rank as ``progress(bytes_done, bytes_total)`` while its chunks are read.

    Returns a :class:`LoadReport` of this rank: url, id, the names that were loaded, missing and unexpected, bytes,
    seconds.

    Raises CheckpointNotFoundError where nothing is committed (saying whether a save was begun); KeyMismatchError for
    names, shapes or dtypes that do not fit (all differences at once; nothing was loaded); UnsafeValueError for a
    pickled value without ``allow_pickle``; CorruptCheckpointError for damage, CheckpointReplacedError where another
    save replaced the checkpoint meanwhile, StorageError where the store failed after its retries (after these three,
    the targets are undefined): children of :class:`CheckpointError` all of them. An error on one rank is raised on all.
    Raises TypeError and ValueError for arguments that make no sense.
    """
    objects.refuse_swapped(state, url, "load")
    if not isinstance(state, MutableMapping):
        found = type(state).__name__
        raise UnsupportedValueError(f"the state is a {found}, expected a dict such as {{'model': model}} to load into")
    ranks = Ranks(process_group, no_dist)
    if no_dist:
        objects.refuse_fsdp1(state)
    request = LoadRequest.checked(
        url,
        strict=strict,
        keys=keys,
        store=store,
        storage_options=storage_options,
        credential_provider=credential_provider,
        allow_pickle=allow_pickle,
        allow_cast=allow_cast,
        share_reads=share_reads,
        concurrency=concurrency,
        max_inflight_bytes=max_inflight_bytes,
        progress=progress,
    )
    return run_load(state, request, ranks, checked_timeout(timeout))
