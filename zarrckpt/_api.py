"""``save`` and ``load``: any state, any mesh, one call."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from functools import partial
from typing import Any

import torch.distributed as dist

from zarrckpt._errors import UnsupportedValueError
from zarrckpt._jobs import Progress
from zarrckpt._load.run import LoadRequest, run_load
from zarrckpt._options import LoadOptions, SaveOptions
from zarrckpt._ranks.group import Ranks
from zarrckpt._reports import LoadReport, SaveReport
from zarrckpt._save.request import SaveRequest
from zarrckpt._save.run import run_save
from zarrckpt._state import objects
from zarrckpt._state.local_state import LocalState
from zarrckpt._store import Url


def save(
    state: Mapping[str, Any],
    url: Url,
    *,
    overwrite: bool = False,
    metadata: Mapping[str, Any] | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    options: SaveOptions | None = None,
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
        url: where to: a local path, ``file://``, ``s3://``, ``gs://``, ``az://``, or any fsspec url; or a ready zarr or
            obstore store, with ``zarr.storage.StorePath(store, "run/step-7")`` for a path in one.
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
        storage_options: options of the store by name, as fsspec or obstore take them, such as ``endpoint_url``
            (``docs/how-to/stores.md``); default: what the environment says. ``credential_provider``, for tokens that
            expire: a picklable callable that returns fresh credentials. An unknown name is a StorageError.
        options: how bytes are laid out and moved, see :class:`SaveOptions`.
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
    request = SaveRequest.from_arguments(
        url,
        options,
        overwrite=overwrite,
        metadata=metadata,
        storage_options=storage_options,
        progress=progress,
    )
    if no_dist:
        objects.refuse_objects_of_ranks(state)
    return run_save(partial(LocalState.from_user_state, state), request, ranks)


def load(
    state: dict[str, Any],
    url: Url,
    *,
    strict: bool = True,
    keys: str | Iterable[str] | None = None,
    rename: Mapping[str, str] | Callable[[str], str] | None = None,
    allow_pickle: bool = False,
    allow_cast: bool = False,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    options: LoadOptions | None = None,
    progress: Progress | None = None,
) -> LoadReport:
    """Load a checkpoint into a state, in place: tensors are filled where they are, values are replaced.

    Every rank of the process group calls it with its own state, in any sharding. Keys, shapes and dtypes of all
    targets are checked before the first is touched. The coordinator (rank 0 of the group) reads the root document, with
    one request; each rank reads the table of checksums, with one or two, and what its own boxes need, less what
    ``LoadOptions.share_reads`` has others hand it: one request for neighbours in storage, of up to 16 MiB.

    Args:
        state: as for :func:`save`. A non-tensor target stands for whatever the checkpoint has under its name. Stateful
            objects and PerRanks get all that was saved of them; lists get the saved length, and nested dicts with
            values the keys that they lack. A dict of tensors alone loads the tensors that it names.
        url: where from: a local path, ``file://``, ``s3://``, ``gs://``, ``az://``, or any fsspec url; or a ready zarr
            or obstore store, with ``zarr.storage.StorePath(store, "run/step-7")`` for a path in one.
        strict: targets that the checkpoint lacks are an error, and so are entries below a requested module or
            optimizer that find no target on any rank (default); otherwise both are only reported.
        keys: load a part: flat names, their beginnings up to a dot, or glob patterns (``"model"``, ``"optim.state"``,
            ``"*.bias"``). One that matches nothing in the checkpoint is an error, and with ``strict`` so is one that
            matches no target on any rank. Default: everything that has a target.
        rename: loads entries under other names: a dict of beginnings of names in the checkpoint -> those in the state
            (``{"model.old.": "model.new."}``; whole keys, the longest one counts), or a callable that returns the new
            name for each name. If a layer of a module is renamed, so are its parameters in the module's optimizer.
            ``keys`` and the report have the names in the state. The same on all ranks.
        allow_pickle: also load values that were saved pickled, which can run any code that the checkpoint holds.
            Default: UnsafeValueError.
        allow_cast: convert where dtypes differ, instead of raising (default False).
        process_group: the ranks that load together (default: all); each of them calls, the others do not.
        no_dist: this process loads alone, as in :func:`save`: nothing waits for other ranks. Of DTensors it fills its
            own part.
        storage_options: options of the store by name, as fsspec or obstore take them, such as ``endpoint_url``
            (``docs/how-to/stores.md``); default: what the environment says. ``credential_provider``, for tokens that
            expire: a picklable callable that returns fresh credentials. An unknown name is a StorageError.
        options: how bytes are moved, see :class:`LoadOptions`.
        progress: called on each rank as ``progress(bytes_done, bytes_total)`` while its chunks are read.

    After the last ``load_state_dict`` the state is flattened again and compared with what was read (``check_after`` of
    :class:`LoadOptions`). Pass objects: a dict such as ``optimizer.state_dict()`` that only this call holds is lost
    with it, which a warning names.

    Returns a :class:`LoadReport` of this rank: url, id, the names that were loaded, missing, unexpected and changed,
    bytes, seconds.

    Raises CheckpointNotFoundError if nothing is committed (the message names a save that was begun); KeyMismatchError
    for names, shapes or dtypes that do not fit (all differences at once; nothing was loaded), and for a
    ``rename`` that gives two entries one name or matches nothing; LoadMismatchError for objects that do not hold what
    they were given; UnsafeValueError for a pickled value without ``allow_pickle``;
    CorruptCheckpointError for damage; CheckpointReplacedError if another save replaced the checkpoint meanwhile;
    StorageError if the store failed after its retries (after these three, the targets are undefined): children of
    :class:`CheckpointError` all of them. An error on one rank is raised on all.
    Raises TypeError and ValueError for arguments that make no sense.
    """
    objects.refuse_swapped(state, url, "load")
    references = sys.getrefcount(state)
    droppable = objects.droppable_keys(state, references)
    if not isinstance(state, MutableMapping):
        found = type(state).__name__
        raise UnsupportedValueError(f"the state is a {found}, expected a dict such as {{'model': model}} to load into")
    ranks = Ranks(process_group, no_dist)
    if no_dist:
        objects.refuse_objects_of_ranks(state)
    request = LoadRequest.from_arguments(
        url,
        options,
        strict=strict,
        keys=keys,
        rename=rename,
        storage_options=storage_options,
        allow_pickle=allow_pickle,
        allow_cast=allow_cast,
        progress=progress,
    )
    return run_load(state, dataclasses.replace(request, droppable=droppable), ranks)
