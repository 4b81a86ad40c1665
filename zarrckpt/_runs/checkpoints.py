"""``checkpoints``: list the checkpoints of a run, with their metrics and the reasons to keep them. No torch."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from zarrckpt._commit.discovery import CheckpointFolder, find_checkpoints, number_in
from zarrckpt._commit.listings import list_below
from zarrckpt._commit.pins import list_pins
from zarrckpt._errors import CheckpointError, UnsupportedFormatError, warn
from zarrckpt._format.chunk_layout import chunk_object_bytes
from zarrckpt._format.root import Root
from zarrckpt._inspect.info import STEPS, info_of
from zarrckpt._jobs import run_jobs
from zarrckpt._runs.folders import is_name_of, step_of
from zarrckpt._runs.keep import finite_metric
from zarrckpt._runs.record import RunRecord, read_record
from zarrckpt._store import Store, StoreSpec, Url, join_url

COUNTERS = {*STEPS, "epoch", "best_step"}
"""Names in the metadata of numbers that loops and integrations count, which are not metrics."""


@dataclass(frozen=True)
class ListedCheckpoint:
    """A checkpoint of a run, or a folder with a save that is not committed, see :func:`checkpoints`."""

    name: str
    url: str
    state: str
    """``"committed"``, ``"unfinished"``, ``"damaged"``, ``"newer format"`` or ``"not readable"``. If it is not
    ``"committed"``, the members below have their defaults, except ``error``."""
    error: str = ""
    """The reason that it cannot be opened."""
    created: str | None = None
    """The time of the commit."""
    step: int | None = None
    nbytes: int | None = None
    """The size of all tensors and blobs."""
    metrics: Mapping[str, int | float] = field(default_factory=dict)
    """The finite numbers in the metadata, without steps and epochs."""
    metadata: Mapping[str, object] = field(default_factory=dict)
    """The user's metadata."""
    run: str | None = None
    """The id of its run if a :class:`CheckpointManager` saved it."""
    reused_nbytes: int | None = None
    """The bytes of chunks that were copied or linked from an earlier checkpoint."""
    sent_nbytes: int | None = None
    """The bytes of chunks that the save sent. None if tensors are compressed."""
    kept: tuple[str, ...] | None = None
    """The reasons why the manager of this run keeps it, such as ``"newest"`` and ``"pinned"``. Without any, the next
    save deletes it. None if the folder has no manager."""


def checkpoints(run: Url, *, storage_options: Mapping[str, Any] | None = None) -> list[ListedCheckpoint]:
    """Return the checkpoints of a run by step, as ``zarrckpt ls --json`` prints them.

    If the name of one has no step, they are in the order of their commits. Unfinished saves and damaged checkpoints are
    included, see ``state``. Folders that cannot be read are last. Without checkpoints the list is empty. If ``run`` is
    a store object instead of a url, the urls are paths below it.

    Only this process reads. Costs all pages of one listing, one request for each folder, and another one for each
    folder without a checkpoint. If a :class:`CheckpointManager` has the run, also one request, and one for each
    checkpoint, to find pins.

    Args:
        run: the folder that contains the checkpoints.
        storage_options: as in :func:`open`.

    Raises StorageError if the folder cannot be listed.
    """
    found, _ = list_checkpoints(StoreSpec(run, storage_options))
    urls = [join_url(run, one.name) if isinstance(run, str | os.PathLike) else one.name for one in found]
    return [dataclasses.replace(one, url=url) for one, url in zip(found, urls, strict=True)]


def list_checkpoints(spec: StoreSpec) -> tuple[list[ListedCheckpoint], RunRecord | None]:
    """Return the checkpoints directly below a url, and the run's record if there is one that can be read."""
    store = spec.open()
    listed = list_below(store)
    found = [_describe_folder(spec, below) for below in find_checkpoints(store, listed.folders, unfinished=True)]
    if listed.has_save and not found:
        warn(f"checkpoints({store.url!r}) was called with the url of a checkpoint: pass the folder that holds it")
    record = _read_record(store) if listed.is_run else None
    if record is not None:
        found = [*_with_reasons(spec, found, record)]
    unread = [one for one in found if one.state == "not readable"]
    read = [one for one in found if one.state != "not readable"]
    if any(number_in(one.name) is None for one in read):
        read.sort(key=lambda one: (one.created is None, one.created))
    else:
        read.sort(key=lambda one: (number_in(one.name), one.name))
    return [*read, *unread], record


def _describe_folder(spec: StoreSpec, below: CheckpointFolder) -> ListedCheckpoint:
    url = spec.child(below.name).url
    if below.root is not None:
        return describe_checkpoint(below.name, url, below.root)
    if below.damage is None:
        return ListedCheckpoint(below.name, url, "unfinished")
    state = "newer format" if isinstance(below.damage, UnsupportedFormatError) else "damaged"
    return ListedCheckpoint(below.name, url, "not readable" if below.unreadable else state, str(below.damage))


def describe_checkpoint(name: str, url: str, root: Root) -> ListedCheckpoint:
    """Describe a committed checkpoint. No request."""
    info = info_of(url, root, root.entries)
    reused = 0 if info.reused is None else info.reused.nbytes
    numbers = {name: finite_metric(value) for name, value in info.metadata.items() if name not in COUNTERS}
    return ListedCheckpoint(
        name,
        url,
        "committed",
        created=info.created,
        step=info.step,
        nbytes=info.nbytes,
        metrics={name: value for name, value in numbers.items() if value is not None},
        metadata=info.metadata,
        run=info.run or None,
        reused_nbytes=reused,
        sent_nbytes=_sent_nbytes(root, reused),
    )


def _sent_nbytes(root: Root, reused: int) -> int | None:
    """Return the bytes of chunks that a save sent, or None if arrays are compressed, because the root lacks sizes."""
    arrays = root.arrays()
    if any(node.compression is not None for node in arrays):
        return None
    stored = sum(node.grid.num_chunks * chunk_object_bytes(node) for node in arrays)
    return max(0, stored - reused)


def _read_record(store: Store) -> RunRecord | None:
    try:
        return read_record(store)
    except CheckpointError as err:
        warn(f"the reasons why checkpoints are kept cannot be read: {err}")
        return None


def _with_reasons(spec: StoreSpec, found: list[ListedCheckpoint], record: RunRecord) -> Iterator[ListedCheckpoint]:
    """Yield the checkpoints with the reasons why a CheckpointManager keeps each committed one."""
    committed = [one for one in found if one.state == "committed"]
    own = {
        step: one.metadata
        for one in committed
        if one.run == record.run_id and type(step := one.metadata.get("step")) is int and is_name_of(one.name, step)
    }
    reasons = {} if record.keep is None else record.keep.reasons(own)
    looks = (partial(list_pins, spec.child(one.name).open()) for one in committed)
    pins = run_jobs(looks, spec.open().max_concurrency)
    pinned = {one.name for one, found in zip(committed, pins, strict=True) if found}
    for one in found:
        if one.state != "committed":
            yield one
            continue
        step = step_of(one.name)
        if one.run != record.run_id:
            kept = ["not of this run"]
        elif step is None:
            kept = ["not named by step"]
        elif not is_name_of(one.name, one.metadata.get("step")):
            kept = ["a copy"]
        else:
            kept = ["no rules"] if record.keep is None else reasons.get(step, [])
        yield dataclasses.replace(one, kept=(*kept, *(["pinned"] if one.name in pinned else [])))
