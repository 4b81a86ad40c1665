"""``plan_report``: a forecast of the bytes, objects and messages of a save."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch.distributed as dist

from zarrckpt._format.chunk_layout import chunk_object_bytes
from zarrckpt._format.documents import ArrayNode, join
from zarrckpt._format.root import parent_groups
from zarrckpt._format.wire import record
from zarrckpt._jobs import check_limits
from zarrckpt._options import SaveOptions
from zarrckpt._plan.geometry import Numbers
from zarrckpt._plan.plan import SavePlan
from zarrckpt._plan.rank_plan import RankPlan
from zarrckpt._ranks.call_group import FANOUT
from zarrckpt._ranks.group import Ranks
from zarrckpt._ranks.rounds import open_rounds
from zarrckpt._reports import PlanReport
from zarrckpt._save.agree import AgreedPlan, agree
from zarrckpt._save.base import BaseReader, SentBase
from zarrckpt._save.items import Items
from zarrckpt._save.request import SaveRequest
from zarrckpt._save.reuse import NumberedChunks, equals_file
from zarrckpt._save.write import blob_node, elements_of_chunk, encode_value
from zarrckpt._state.local_state import LocalState
from zarrckpt._state.objects import refuse_collective_objects
from zarrckpt._state.tensors import transfer_memory
from zarrckpt._store import Url
from zarrckpt._store._upload_parts import put_requests

_OTHER_DOCUMENTS = 3
"""The documents that belong to no node: marker, root, and the claim (with overwrite: the group of the new tree)."""

_ROUNDS = 5
"""The number of rounds of a save: digests, descriptions, plans, written chunks, commit."""


def plan_report(
    state: Mapping[str, Any],
    *,
    base: Url | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    options: SaveOptions | None = None,
    ranks_per_host: int | None = None,
) -> PlanReport:
    """Return a forecast of a :func:`save`: objects, requests, bytes per rank and between ranks, cost, interval.

    Every rank of the process group calls it. It plans the save and encodes the values that are not tensors. It moves no
    tensor data, and makes no request without a ``base``. The arguments are those of :func:`save`. Raises the same
    errors for these arguments and for a state that cannot be saved. ``ranks_per_host`` (default: torchrun's
    ``LOCAL_WORLD_SIZE``) is the number of consecutive ranks on one host.

    With a ``base``, rank 0 reads its root document and two tables, and each rank reads its tensors once to compare
    their chunks. Chunks with pieces of several ranks are not compared, and count as sent. The forecast assumes that the
    save can copy or link the chunks of the base, see ``docs/how-to/reuse.md``.
    """
    if ranks_per_host is None:
        ranks_per_host = int(os.environ.get("LOCAL_WORLD_SIZE", 0)) or None
    else:
        check_limits(ranks_per_host=ranks_per_host)
    request = SaveRequest.from_arguments(None, options, storage_options=storage_options, base=base)
    options = request.options
    ranks = Ranks(process_group, no_dist=no_dist)
    if no_dist:
        refuse_collective_objects(state)
    with open_rounds(ranks, "plan_report", options.timeout) as rounds:
        base_reader = BaseReader(request)
        planned = options.plan if rounds.rank else base_reader.plan_options()
        agreed = agree(rounds, partial(LocalState.from_user_state, state), planned, base_reader.read)
        found = rounds.merge("their values", on_each_rank=partial(_forecast, agreed, request), on_coordinator=list)
    blobs = [blob for rank in found for blob in rank.blobs]
    reused = sum(rank.reused_bytes for rank in found)
    return report_of(agreed.plan, rounds.members, ranks_per_host, blobs, reused, request.digested)


@record
@dataclass(frozen=True)
class _RankForecast:
    """The arrays of the values that a rank would store as blobs, and the bytes of tensors that it would reuse."""

    blobs: tuple[ArrayNode, ...]
    reused_bytes: int


def _forecast(agreed: AgreedPlan[SentBase | None], request: SaveRequest) -> _RankForecast:
    """Encode the values of this rank, and compare its chunks with the base.

    Raises UnsupportedValueError if a value cannot be saved.
    """
    reused = 0 if agreed.attempt is None else _reused_bytes(agreed.rank_plan, agreed.state, agreed.attempt, request)
    return _RankForecast(tuple(_own_blobs(agreed)), reused)


def _reused_bytes(plan: RankPlan, state: LocalState, base: SentBase, request: SaveRequest) -> int:
    """Return the bytes of the elements of this rank's unchanged chunks."""
    items, reused, paths = Items(plan, state), 0, frozenset(base.paths)
    budget = transfer_memory(request.options.max_inflight_bytes, items.prepare())
    numbers = None if base.tables is None else NumberedChunks(base.paths, base.tables)
    store = request.base_spec(base.name).open()
    for chunk in plan.chunks:
        node = plan.arrays[chunk.fqn]
        elements = elements_of_chunk(node, chunk, items, {})
        if numbers is not None:
            equal = numbers.encode_unchanged(node, chunk.chunk_index, elements, budget) is not None
        else:
            key = join(base.tree, node.chunk_key(chunk.chunk_index))
            equal = node.path in paths and equals_file(store, key, node, elements, budget)
        reused += node.grid.chunk_box(chunk.chunk_index).size * node.dtype.itemsize if equal else 0
    return reused


def _own_blobs(agreed: AgreedPlan[SentBase | None]) -> list[ArrayNode]:
    paths = agreed.rank_plan.object_paths.items()
    stored = ((path, encode_value(agreed.state, fqn).blob_to_store(fqn)) for fqn, path in paths)
    return [blob_node(path, len(blob.payload)) for path, blob in stored if blob is not None]


def report_of(
    plan: SavePlan,
    members: Sequence[int],
    ranks_per_host: int | None = None,
    blobs: Sequence[ArrayNode] = (),
    reused_bytes: int = 0,
    digested: bool = False,
) -> PlanReport:
    """Return the report of a plan. ``members`` are the ranks' numbers in the default process group."""
    nodes, chunk_owners = plan.layout.tensors.values(), plan.chunk_owners
    arrays = [*nodes, *blobs]
    blob_chunks = sum(node.grid.num_chunks for node in blobs)
    # Tables of checksums and writers, of digests if they are stored, and of sizes if an array is compressed. Each has a
    # document, and a chunk unless the table is empty.
    compressed = [node for node in nodes if node.compression is not None]
    other = _OTHER_DOCUMENTS + (2 + digested) * (1 + any(node.grid.num_chunks for node in arrays))
    other += bool(compressed) + any(node.grid.num_chunks for node in compressed)
    hosts = None if ranks_per_host is None else np.array(members, np.int64) // ranks_per_host
    return PlanReport(
        ranks=plan.layout.world_size,
        tensors=len(nodes),
        nbytes=int(chunk_owners.nbytes.sum()),
        objects=len(chunk_owners.owner),
        documents=len(arrays) + len(parent_groups(node.path for node in arrays)) + blob_chunks + other,
        rank_bytes=tuple(chunk_owners.rank_bytes()),
        moved_bytes=chunk_owners.moved_bytes(),
        merged=chunk_owners.count_merged(),
        bundles=len(np.unique(chunk_owners.bundle[chunk_owners.bundle >= 0])),
        control_rounds=_ROUNDS if plan.layout.world_size > 1 else 0,
        rank_connections=tuple(connections(plan).tolist()),
        host_bytes=None if hosts is None else chunk_owners.moved_bytes(hosts),
        reused_bytes=reused_bytes,
        part_requests=sum(node.grid.num_chunks * (put_requests(chunk_object_bytes(node)) - 1) for node in arrays),
    )


def connections(plan: SavePlan) -> Numbers:
    """Return the number of connections of each rank of a save: those of the tree of rounds, and those for pieces."""
    peers = plan.chunk_owners.peers()
    for rank in range(1, len(peers)):
        parent = (rank - 1) // FANOUT
        peers[rank, parent] = peers[parent, rank] = True
    found: Numbers = peers.sum(axis=1)
    return found
