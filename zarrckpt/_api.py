"""``save`` and ``load``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from functools import partial
from typing import Any

import torch.distributed as dist

from zarrckpt._errors import UnsupportedValueError
from zarrckpt._jobs import Progress
from zarrckpt._load.steps import LoadRequest, load_on_ranks
from zarrckpt._options import LoadOptions, SaveOptions
from zarrckpt._ranks.group import Ranks
from zarrckpt._reports import LoadReport, SaveReport
from zarrckpt._save.request import SaveRequest
from zarrckpt._save.steps import save_on_ranks
from zarrckpt._state import objects
from zarrckpt._state.local_state import LocalState
from zarrckpt._store import Url


def save(
    state: Mapping[str, Any],
    url: Url,
    *,
    overwrite: bool = False,
    metadata: Mapping[str, Any] | None = None,
    base: Url | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    options: SaveOptions | None = None,
    progress: Progress | None = None,
) -> SaveReport:
    """Save a state as a Zarr hierarchy at a url, and return when it is committed.

    Every rank of the process group calls it with its own part of the state. Without ``torch.distributed``, one process
    saves everything. Each rank writes its own pieces. The coordinator (rank 0 of the group) commits last. All ranks
    pass the same arguments except ``state`` and ``progress``. If they differ, the coordinator's layout is used.

    In an object store, a save makes one put for each chunk, array and group, and about a dozen other requests. An
    overwrite makes a few more, and deletes the old objects. A save sends the bytes of the state, about 1 KB per array,
    and a few bytes of checksums per subchunk.

    Args:
        state: a nested dict of modules, optimizers, other Stateful objects, tensors, DTensors, ShardedTensors and any
            Python values. A state without entries is saved with a UserWarning.
        url: the url of the new checkpoint: a local path, ``file://``, ``s3://``, ``gs://``, ``az://``, or any fsspec
            url. A zarr or obstore store is accepted too, or ``zarr.storage.StorePath(store, "run/step-7")`` for a path
            in it. If it ends with ``.zarr.zip``, the checkpoint is one ZIP archive (``docs/how-to/one-file.md``).
        overwrite: replace a committed checkpoint at this url. The old checkpoint stays readable until the commit. If
            False (default), a committed checkpoint raises CheckpointExistsError.
        metadata: a dict of JSON types to store with the checkpoint, such as ``{"step": 7, "val_loss": 2.1}``, at most
            64 KiB. Tensors and numpy values with one element become numbers. ``Checkpoint.metadata``, ``zarrckpt info``
            and ``ls`` show it. If ranks pass different metadata, rank 0's is saved.
        base: an earlier checkpoint in the same store. Its unchanged chunks are copied by the store or linked, not sent
            (``docs/how-to/reuse.md``). If it cannot be read, everything is sent. ``storage_options`` apply to it, too.
        process_group: the ranks that save together (default: all). Each of them calls ``save``, other ranks do not.
        no_dist: save with this process only, and wait for no other rank. This is for calls on one rank, as in
            Lightning, and for a separate checkpoint of each rank, each at a different url. An entry of which other
            ranks hold a part (a DTensor with ``Shard``, a module of FSDP1) is refused with its name. A
            :class:`PerRank` keeps the rank of this process. Excludes ``process_group``.
        storage_options: options of the store by name, as in fsspec or obstore, such as ``endpoint_url``
            (``docs/how-to/stores.md``). The default is the environment. ``credential_provider`` is a picklable callable
            that returns fresh credentials, for tokens that expire. An unknown name raises StorageError.
        options: the layout and the transfer of bytes, see :class:`SaveOptions`.
        progress: called on each rank as ``progress(bytes_done, bytes_total)`` while its bytes are transferred.

    Returns a :class:`SaveReport`, the same on every rank: url, id, bytes, objects, bytes by rank, seconds.

    Raises:
        CheckpointExistsError: a checkpoint is committed and ``overwrite`` is false (raised before any data moves), or
            another save committed first.
        ForeignObjectsError: the url has objects that no save of this package wrote, or lies inside a checkpoint.
        CheckpointPinnedError: a pin keeps the checkpoint that would be replaced.
        CheckpointRemovedError: a removal at this url has not ended.
        UnsupportedValueError, UnsupportedLayoutError: an entry, given by its name, cannot be saved.
        StorageError: the store failed after its retries.
        IncompleteSaveError: a rank did not write its part of the plan.
        TypeError, ValueError: an argument has a wrong type or value.

    All but the last are subclasses of :class:`CheckpointError`. An error on one rank is raised on all ranks. Then
    nothing is committed, and the written objects are removed unless the root document may have been put.
    """
    objects.refuse_swapped_arguments(state, url, "save")
    ranks = Ranks(process_group, no_dist=no_dist)
    request = SaveRequest.from_arguments(
        url,
        options,
        overwrite=overwrite,
        metadata=metadata,
        storage_options=storage_options,
        progress=progress,
        base=base,
    )
    if no_dist:
        objects.refuse_collective_objects(state)
    return save_on_ranks(partial(LocalState.from_user_state, state), request, ranks)


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
    """Load a checkpoint into a state in place: fill the tensors and replace the values.

    Every rank of the process group calls it with its own state, in any sharding. Keys, shapes and dtypes of all
    targets are checked before the first target changes. The coordinator (rank 0 of the group) reads the root document
    with one request. Each rank reads the table of checksums with one or two requests, and the data of its own boxes,
    except data that other ranks send (``LoadOptions.share_reads``). One request covers neighbouring data of up to
    16 MiB.

    Args:
        state: as for :func:`save`. A non-tensor target is replaced by the entry with its name. Stateful objects and
            PerRanks get their whole saved state. Lists get the saved length. Nested dicts with values get missing keys.
            A dict of tensors only loads the tensors that it names.
        url, process_group, no_dist, storage_options, progress: as for :func:`save`. With ``no_dist``, this process
            fills its own part of DTensors.
        strict: raise an error for targets that the checkpoint lacks, and for entries below a requested module or
            optimizer without a target on any rank (default). If False, both are only reported.
        keys: the part to load: fqns, their prefixes up to a dot, or glob patterns (``"model"``, ``"optim.state"``,
            ``"*.bias"``). The default is everything that has a target. A pattern that matches no entry of the
            checkpoint is an error. With ``strict``, so is a pattern without a target on any rank.
        rename: load entries under other names: a dict from prefixes of names in the checkpoint to prefixes in the state
            (``{"model.old.": "model.new."}``; whole keys, the longest prefix is used), or a callable that returns the
            new name. Parameters of a renamed layer are renamed in the module's optimizer too. ``keys`` and the report
            use the names in the state. Equal on all ranks.
        allow_pickle: also load values that were saved as pickles. They can run any code in the checkpoint. Without it,
            they raise UnsafeValueError.
        allow_cast: convert to the target's dtype instead of raising an error (default False).
        options: the transfer of bytes, see :class:`LoadOptions`.

    After the load, the state is compared with the data that was read (``check_after`` of :class:`LoadOptions`). Pass
    the optimizer, not ``optimizer.state_dict()``. Values loaded into a dict without another reference are lost when the
    call returns, and a warning names the dict.

    Returns a :class:`LoadReport` of this rank. An error on one rank is raised on all ranks.

    Raises:
        CheckpointNotFoundError: no checkpoint is committed. The message names an unfinished save.
        KeyMismatchError: names, shapes or dtypes do not fit (all differences are listed), or ``rename`` maps two
            entries to one name or matches nothing. Nothing was loaded.
        LoadMismatchError: objects do not hold the loaded state.
        UnsafeValueError: a value is pickled, and ``allow_pickle`` is false.
        CorruptCheckpointError, CheckpointReplacedError, StorageError: the checkpoint is damaged, another save replaced
            it during the load, or the store failed after its retries. The targets are undefined.
        TypeError, ValueError: an argument has a wrong type or value.
    """
    objects.refuse_swapped_arguments(state, url, "load")
    references = sys.getrefcount(state)  # on its own line, because arguments of another call would be counted too
    unreferenced = objects.find_unreferenced_dicts(state, references)
    if not isinstance(state, MutableMapping):
        found = type(state).__name__
        raise UnsupportedValueError(f"the state is a {found}, expected a dict such as {{'model': model}} to load into")
    ranks = Ranks(process_group, no_dist=no_dist)
    if no_dist:
        objects.refuse_collective_objects(state)
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
        unreferenced=unreferenced,
    )
    return load_on_ranks(state, request, ranks)
