"""What a checkpoint is, in numbers: from the root document alone. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from zarrckpt._format.documents import ArrayNode
from zarrckpt._format.metadata import RESERVED, run_of
from zarrckpt._format.root import BlobEntry, Root
from zarrckpt._format.sealed import FORMAT

STEPS = ("step", "global_step", "iteration")
"""What a training loop calls how far it has come."""

_OTHER_SUFFIXES = (".accelerate.step", ".accelerate.iteration")
"""Accelerate's own counts, of micro-batches and of saves: at any depth, no steps of the training."""

_LARGEST = 10


@dataclass(frozen=True)
class DTypeInfo:
    """The tensors of one data type."""

    tensors: int
    elements: int
    nbytes: int


@dataclass(frozen=True)
class CheckpointInfo:
    """The numbers of ``Checkpoint.info``.

    ``nbytes``, ``nbytes_stored``, ``chunks``, ``subchunks`` and ``groups`` count tensors and blobs (values that are
    kept as bytes); the other numbers count tensors alone. ``nbytes`` and ``groups`` are bytes of elements, without
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
    """The saves that this one, and those before it, replaced; newest first."""
    step: int | None
    """That of the metadata, else the value of an entry of that name, at any depth, where there is one: called step,
    global_step or iteration."""
    metadata: Mapping[str, object]
    """What the user keeps with the checkpoint. ``Checkpoint.metadata`` also has what the package adds."""
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
    """Bytes by the first part of the names."""
    largest: tuple[tuple[str, tuple[int, ...], str, int], ...] = ()
    """(name, shape, dtype, bytes) of the ten largest tensors."""
    blob_nbytes: int = 0
    """Bytes of the blobs among ``nbytes``."""
    nbytes_stored: int | None = None
    """Bytes of the chunks in the store, with padding, checksums and compression; None where the table that
    says how long compressed chunks are cannot be read."""
    run: str = ""
    """The id of the run that it belongs to, as :class:`~zarrckpt.CheckpointManager` saved it; "" for none."""


def info_of(url: str, root: Root, names: Iterable[str], nbytes_stored: int | None = None) -> CheckpointInfo:
    """Numbers of some entries of a checkpoint, and who saved it."""
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
    found: dict[str, list[int]] = {}
    for node in arrays:
        numbers = found.setdefault(node.dtype.name, [0, 0, 0])
        for place, more in enumerate((1, math.prod(node.grid.shape), node.nbytes)):
            numbers[place] += more
    return {name: DTypeInfo(*numbers) for name, numbers in sorted(found.items(), key=lambda item: -item[1][2])}


def _groups(arrays: Mapping[str, ArrayNode]) -> dict[str, int]:
    found: dict[str, int] = {}
    for fqn, node in arrays.items():
        name = fqn.partition(".")[0]
        found[name] = found.get(name, 0) + node.nbytes
    return found
