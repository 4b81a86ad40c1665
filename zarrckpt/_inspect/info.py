"""Compute the facts and sizes of a checkpoint and of its entries from the root document. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from zarrckpt._errors import CheckpointError
from zarrckpt._format.documents import ArrayNode
from zarrckpt._format.metadata import RESERVED, run_of
from zarrckpt._format.root import BlobEntry, ReusedChunks, Root
from zarrckpt._format.sealed import FORMAT
from zarrckpt._inspect.value_changes import shorten
from zarrckpt._read.selection import Selection, catalog_of
from zarrckpt._reports import size_text, value_text

STEPS = ("step", "global_step", "iteration")
"""Names under which training loops store their step."""

_OTHER_SUFFIXES = (".accelerate.step", ".accelerate.iteration")
"""Ends of the names of Accelerate's counts of micro-batches and of saves, which are not steps of the training."""

_LARGEST = 10


@dataclass(frozen=True)
class DTypeInfo:
    """The tensors of one data type."""

    tensors: int
    elements: int
    nbytes: int


@dataclass(frozen=True)
class CheckpointInfo:
    """The facts and sizes of a checkpoint, see ``Checkpoint.info``.

    ``nbytes``, ``nbytes_stored``, ``chunks``, ``subchunks`` and ``groups`` count tensors and blobs (values that are
    kept as bytes). The other numbers count only tensors. ``nbytes`` and ``groups`` are bytes of elements, without
    padding, checksums and compression.
    """

    url: str
    format: int
    save_id: str
    tree: str
    created: str
    software: Mapping[str, str]
    world_size: int
    replaced: tuple[str, ...]
    """The ids of all earlier saves at this url that were replaced, newest first."""
    step: int | None
    """The value of ``step``, ``global_step`` or ``iteration`` in the metadata, otherwise of an entry with such a name
    at the smallest depth. None if there is none."""
    metadata: Mapping[str, object]
    """The user's metadata. ``Checkpoint.metadata`` also has the names that the package adds."""
    tensors: int
    values: int
    blobs: int
    nbytes: int
    elements: int
    chunks: int
    subchunks: int
    compression: tuple[str, ...]
    """The names of the codecs that compress some of the tensors."""
    dtypes: Mapping[str, DTypeInfo] = field(default_factory=dict)
    groups: Mapping[str, int] = field(default_factory=dict)
    """The number of bytes by the first part of the names."""
    largest: tuple[tuple[str, tuple[int, ...], str, int], ...] = ()
    """(name, shape, dtype, bytes) of the ten largest tensors."""
    blob_nbytes: int = 0
    """Bytes of the blobs among ``nbytes``."""
    nbytes_stored: int | None = None
    """The number of bytes of the stored chunks, with padding, checksums and compression. None if the table of sizes of
    compressed chunks cannot be read."""
    run: str = ""
    """The id of its run if a :class:`~zarrckpt.CheckpointManager` saved it, otherwise ""."""
    reused: ReusedChunks | None = None
    """The chunks of the whole checkpoint that its save copied or linked from an earlier one: ``objects``, ``nbytes``
    and the ``save_id`` of that checkpoint. None if the save wrote every chunk."""


@dataclass(frozen=True)
class EntryInfo:
    """The facts of one entry, see :meth:`zarrckpt.Checkpoint.entry`.

    A tensor has a dtype and a shape, and so has the array of bytes of a blob. For a value in the root document both are
    None, ``nbytes`` is 0 and ``node_path`` is "".
    """

    fqn: str
    kind: Literal["tensor", "blob", "value"]
    keys: tuple[object, ...]
    """The keys that lead to the entry in the saved state dict."""
    dtype: str | None
    shape: tuple[int, ...] | None
    nbytes: int
    """The number of bytes, without padding and checksums."""
    node_path: str
    """The path of the array below the url, for other readers: ``zarr.open_group(url)[path]``."""
    ranks: tuple[int, ...]
    """The rank of each element of the first axis of a :class:`~zarrckpt.PerRank` tensor, numbered as in the default
    process group. Empty for other entries."""


def entry_info(root: Root, fqn: str) -> EntryInfo:
    """Return the facts of an entry."""
    entry, array, stack = root.entries[fqn], root.array(fqn), root.stacks.get(fqn)
    return EntryInfo(
        fqn=fqn,
        kind="tensor" if isinstance(entry, ArrayNode) else "blob" if isinstance(entry, BlobEntry) else "value",
        keys=tuple(root.state_path(fqn).keys),
        dtype=None if array is None else array.dtype.name,
        shape=None if array is None else array.grid.shape,
        nbytes=0 if array is None else array.nbytes,
        node_path="" if array is None else array.under(root.tree).path,
        ranks=() if stack is None else stack.ranks,
    )


def entry_texts(entries: Selection, fqn: str) -> tuple[str, str, str, str]:
    """Return the name, dtype or kind, shape or value, and size of an entry as texts. No request."""
    entry = catalog_of(entries).root.entries[fqn]
    if isinstance(entry, ArrayNode):
        return fqn, entry.dtype.name, str(entry.grid.shape), size_text(entry.nbytes)
    if isinstance(entry, BlobEntry):
        return fqn, entry.encoding, entry.kind or "", size_text(entry.array.nbytes)
    return fqn, "value", shorten(value_text(entries[fqn])), ""


def checkpoint_info(entries: Selection) -> CheckpointInfo:
    """Return the facts and sizes of an open checkpoint, see :attr:`Checkpoint.info`."""
    catalog = catalog_of(entries)
    try:
        stored = sum(catalog.stored_nbytes(node) for node in catalog.root.arrays(entries))
    except CheckpointError:
        stored = None
    return info_of(entries.url, catalog.root, entries, stored)


def info_of(url: str, root: Root, names: Iterable[str], nbytes_stored: int | None = None) -> CheckpointInfo:
    """Return the facts and sizes of some entries of a checkpoint."""
    entries = {fqn: root.entries[fqn] for fqn in names}
    tensors = {fqn: entry for fqn, entry in entries.items() if isinstance(entry, ArrayNode)}
    blobs = [entry for entry in entries.values() if isinstance(entry, BlobEntry)]
    tensor_nodes = list(tensors.values())
    arrays = {fqn: node for fqn in entries if (node := root.array(fqn)) is not None}
    largest = sorted(tensors.items(), key=lambda item: -item[1].nbytes)[:_LARGEST]
    return CheckpointInfo(
        url=url,
        format=FORMAT,
        save_id=root.save_id,
        tree=root.tree,
        created=root.created,
        software=dict(root.software),
        world_size=root.world_size,
        replaced=root.history,
        step=_training_step(root, entries),
        metadata={name: value for name, value in root.metadata.items() if not name.startswith(RESERVED)},
        tensors=len(tensors),
        values=len(entries) - len(tensors) - len(blobs),
        blobs=len(blobs),
        nbytes=sum(node.nbytes for node in arrays.values()),
        elements=sum(math.prod(node.grid.shape) for node in tensor_nodes),
        chunks=sum(node.grid.num_chunks for node in arrays.values()),
        subchunks=sum(node.grid.num_subchunks for node in arrays.values()),
        compression=tuple(sorted({node.compression.name for node in tensor_nodes if node.compression is not None})),
        dtypes=_dtypes(tensor_nodes),
        groups=_groups(arrays),
        largest=tuple((fqn, node.grid.shape, node.dtype.name, node.nbytes) for fqn, node in largest),
        blob_nbytes=sum(blob.array.nbytes for blob in blobs),
        nbytes_stored=nbytes_stored,
        run=run_of(root.metadata),
        reused=root.reused,
    )


def _training_step(root: Root, entries: Iterable[str]) -> int | None:
    for name in STEPS:
        if type(root.metadata.get(name)) is int:
            return int(root.metadata[name])
    found = []
    for fqn in entries:
        value = getattr(root.entries[fqn], "json", None)
        if fqn.rpartition(".")[2] in STEPS and type(value) is int and not f".{fqn}".endswith(_OTHER_SUFFIXES):
            found.append((fqn.count("."), value))
    return min(found)[1] if found else None


def _dtypes(arrays: list[ArrayNode]) -> dict[str, DTypeInfo]:
    found: dict[str, DTypeInfo] = {}
    for node in arrays:
        old, elements = found.get(node.dtype.name, DTypeInfo(0, 0, 0)), math.prod(node.grid.shape)
        found[node.dtype.name] = DTypeInfo(old.tensors + 1, old.elements + elements, old.nbytes + node.nbytes)
    return dict(sorted(found.items(), key=lambda item: -item[1].nbytes))


def _groups(arrays: Mapping[str, ArrayNode]) -> dict[str, int]:
    found: dict[str, int] = {}
    for fqn, node in arrays.items():
        name = fqn.partition(".")[0]
        found[name] = found.get(name, 0) + node.nbytes
    return found
