"""The coordinator's last steps: check the ranks' results, write the tables, build the root document."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from zarrckpt._commit.attempts import Attempt
from zarrckpt._commit.chunks import encode_tables
from zarrckpt._errors import IncompleteSaveError, UnsupportedValueError
from zarrckpt._format.chunk_layout import RawArray
from zarrckpt._format.documents import GROUP_DOCUMENT, NODE, ArrayNode, join
from zarrckpt._format.module_versions import compact
from zarrckpt._format.root import (
    CHECKSUMS,
    DIGESTS,
    SIZES,
    WRITERS,
    BlobEntry,
    ReusedChunks,
    Root,
    Stack,
    ValueEntry,
    parent_groups,
)
from zarrckpt._format.sealed import now
from zarrckpt._format.state_path import DICT, LIST
from zarrckpt._jobs import run_jobs
from zarrckpt._plan.plan import Layout
from zarrckpt._reports import SaveReport
from zarrckpt._save.agree import SentAttempt
from zarrckpt._save.base import SentBase
from zarrckpt._save.write import ArrayResult, EntryResults, ObjectResult, RankResults
from zarrckpt._store import Store
from zarrckpt._version import __version__


def finish_save(
    store: Store,
    attempt: Attempt,
    layout: Layout,
    ranks: Sequence[RankResults],
    metadata: Mapping[str, Any],
    sent: SentAttempt,
) -> tuple[Root, SaveReport]:
    """Compare the ranks' results with the layout, write the tables and the groups of blobs, and return the root.

    The root document is returned, not written. Raises IncompleteSaveError with the fqn if an entry or chunk is missing.
    """
    results = [rank.entries for rank in ranks]
    values, blobs, written = _collect(results)
    _check_entries(layout, {*written, *values})
    _check_paths(layout, {fqn: value.path for fqn, value in values.items()})
    _check_paths(layout, {fqn: blob.array.path for fqn, blob in blobs.items()})
    entries: dict[str, ArrayNode | ValueEntry | BlobEntry] = {**layout.tensors, **values, **blobs}
    nodes = {**layout.tensors, **{fqn: blob.array for fqn, blob in blobs.items()}}
    numbers = _tables_of_results(nodes, written, sent.digested)
    planned = parent_groups(node.path for node in layout.tensors.values())
    late = parent_groups(blob.array.path for blob in blobs.values()) - planned
    arrays = [array for parts in written.values() for _, array in parts]
    tables, puts = encode_tables(attempt.save_id, numbers)
    puts |= {join(attempt.tree, path, NODE): [GROUP_DOCUMENT] for path in sorted(late)}
    if store.is_archive:
        chunks = (node.chunk_key(i) for node in nodes.values() for i in node.grid.chunks_of(node.grid.whole))
        store.add_parts([rank.archive for rank in ranks if rank.archive is not None], chunks)
        puts |= {join(path, NODE): [GROUP_DOCUMENT] for path in planned}
        puts |= {join(node.path, NODE): [node.document_bytes()] for node in nodes.values()}
    at_once = 1 if store.is_local else store.max_concurrency
    run_jobs((partial(store.put, key, buffers) for key, buffers in puts.items()), at_once)
    store.sync(puts)
    keys, containers = _keys_and_containers(layout)
    root = Root(
        save_id=attempt.save_id,
        tree=attempt.tree,
        entries={fqn: entries[fqn] for fqn in layout.paths},
        checksums=tables[CHECKSUMS],
        sizes=tables.get(SIZES),
        digests=tables.get(DIGESTS),
        reused=_reused_chunks(sent.base, arrays),
        history=attempt.history,
        created=now(),
        software={"zarrckpt": __version__, "torch": str(torch.__version__), "python": platform.python_version()},
        world_size=layout.world_size,
        keys=keys,
        containers=containers,
        stacks={
            fqn: Stack(path.ranks, path.rank_at)
            for fqn, path in layout.paths.items()
            if path.rank_at is not None and path.ranks
        },
        optimizers=layout.optimizers,
        versions=compact(layout.versions, layout.paths),
        metadata=metadata,
    )
    rank_bytes = tuple(sum(result.nbytes for result in rank.values()) for rank in results)
    report = SaveReport(
        store.url,
        attempt.save_id,
        sum(rank_bytes),
        len(numbers[WRITERS]),
        rank_bytes,
        copied_bytes=sum(array.copied for array in arrays),
        linked_bytes=sum(array.linked + array.tied for array in arrays),
    )
    return root, report


def _reused_chunks(base: SentBase | None, arrays: Sequence[ArrayResult]) -> ReusedChunks | None:
    objects = sum(array.reused for array in arrays)
    if base is None or not objects:
        return None
    nbytes = sum(array.copied + array.linked for array in arrays)
    return ReusedChunks(base.save_id, objects, nbytes, base.saves)


def _collect(
    results: Sequence[EntryResults],
) -> tuple[dict[str, ValueEntry], dict[str, BlobEntry], dict[str, list[tuple[int, ArrayResult]]]]:
    values: dict[str, ValueEntry] = {}
    blobs: dict[str, BlobEntry] = {}
    written: dict[str, list[tuple[int, ArrayResult]]] = {}
    for rank, rank_results in enumerate(results):
        for fqn, result in rank_results.items():
            array = result if isinstance(result, ArrayResult) else result.array
            if isinstance(result, ObjectResult):
                if result.value is not None:
                    values[fqn] = result.value
                if result.blob is not None:
                    blobs[fqn] = result.blob
            if array is not None:
                written.setdefault(fqn, []).append((rank, array))
    return values, blobs, written


def _check_entries(layout: Layout, written: set[str]) -> None:
    """Raise IncompleteSaveError if the planned and the written entries differ. Tensors without chunks are skipped."""
    empty = {fqn for fqn, node in layout.tensors.items() if node.grid.num_chunks == 0}
    missing = sorted(layout.paths.keys() - written - empty)
    unknown = sorted(written - layout.paths.keys())
    if missing or unknown:
        raise IncompleteSaveError(
            f"{len(missing)} planned entries were not written ({missing[:5]}) and {len(unknown)} written entries were "
            f"not planned ({unknown[:5]}). Nothing was committed. Save again"
        )


def _check_paths(layout: Layout, paths: Mapping[str, str]) -> None:
    """Raise IncompleteSaveError if a rank wrote a value or blob at a different path than planned."""
    for fqn, path in paths.items():
        if path != layout.node_paths[fqn]:
            raise IncompleteSaveError(
                f"a rank wrote {fqn!r} at {path!r:.200}, but the plan has {layout.node_paths[fqn]!r}. Nothing was "
                "committed. Install the same version of zarrckpt on all ranks"
            )


def _tables_of_results(
    nodes: dict[str, ArrayNode], written: dict[str, list[tuple[int, ArrayResult]]], digested: bool
) -> dict[str, RawArray]:
    """Return the tables: the checksum of every subchunk, the writer of every chunk, stored sizes and chunk digests.

    Arrays are sorted by path. The sizes table has the subchunks of compressed arrays, and is absent if no array is
    compressed. The digests table is absent unless ``digested``. Raises IncompleteSaveError if not exactly one rank
    wrote each chunk.
    """
    parts: dict[str, list[RawArray]] = {CHECKSUMS: [], WRITERS: [], **({DIGESTS: []} if digested else {})}
    for fqn, node in sorted(nodes.items(), key=lambda item: item[1].path):
        chunks, per_chunk = node.grid.num_chunks, node.grid.subchunks_per_chunk
        crcs = np.zeros((chunks, per_chunk), "<u4")
        ranks = np.zeros(chunks, "<u4")
        times = np.zeros(chunks, np.int64)
        sizes = np.zeros_like(crcs) if node.compression is not None else None
        digests = np.zeros(chunks, "<u8")
        for rank, result in written.get(fqn, []):
            crcs[result.chunks] = result.checksums.reshape(-1, per_chunk)
            ranks[result.chunks] = rank
            np.add.at(times, result.chunks, 1)
            if sizes is not None:
                sizes[result.chunks] = result.sizes.reshape(-1, per_chunk)
            if digested:
                digests[result.chunks] = result.digests
        if (times != 1).any():
            raise IncompleteSaveError(
                f"of the {chunks} chunks of {fqn!r}, {int((times == 0).sum())} were not written and "
                f"{int((times > 1).sum())} were written more than once. Nothing was committed. Save again"
            )
        parts[CHECKSUMS].append(crcs.reshape(-1))
        parts[WRITERS].append(ranks)
        if digested:
            parts[DIGESTS].append(digests)
        if sizes is not None:
            parts.setdefault(SIZES, []).append(sizes.reshape(-1))
    empty = {name: np.zeros(0, "<u8" if name == DIGESTS else "<u4") for name in parts}
    return {name: np.concatenate([empty[name], *arrays]) for name, arrays in parts.items()}


def _keys_and_containers(layout: Layout) -> tuple[dict[str, object], dict[str, str]]:
    """Return the keys that differ from the components of paths, and the containers other than dicts, by path.

    Raises UnsupportedValueError if containers differ between ranks.
    """
    containers: dict[str, str] = {}
    for fqn, path in layout.paths.items():
        names = layout.node_paths[fqn].split("/")
        for depth, container in enumerate(path.containers):
            parent = "/".join(names[:depth])
            if containers.setdefault(parent, container) != container:
                raise UnsupportedValueError(
                    f"{parent!r} is a {containers[parent]} on one rank and a {container} on a different rank. Use the "
                    "same container on all ranks"
                )
    keys = {}
    for node, key in layout.keys.items():
        parent, _, name = node.rpartition("/")
        if key != name and containers[parent] != LIST:
            keys[node] = key
    return keys, {path: container for path, container in sorted(containers.items()) if container != DICT}
