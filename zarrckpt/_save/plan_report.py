"""``plan_report``: a forecast of the bytes, objects and requests of a save."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch.distributed as dist

from zarrckpt._format.chunk_layout import chunk_object_bytes
from zarrckpt._format.documents import ArrayNode
from zarrckpt._format.root import parent_groups
from zarrckpt._options import SaveOptions
from zarrckpt._plan.plan import SavePlan
from zarrckpt._ranks.group import Ranks
from zarrckpt._ranks.rounds import open_rounds
from zarrckpt._reports import PlanReport
from zarrckpt._save.agree import AgreedPlan, agree
from zarrckpt._save.request import SaveRequest
from zarrckpt._save.write import blob_node, encode_value
from zarrckpt._state.local_state import LocalState
from zarrckpt._state.objects import refuse_collective_objects
from zarrckpt._store._upload_parts import put_requests

_OTHER_DOCUMENTS = 3
"""The documents that belong to no node: marker, root, and the claim (with overwrite: the group of the new tree)."""


def plan_report(
    state: Mapping[str, Any],
    *,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    options: SaveOptions | None = None,
) -> PlanReport:
    """Return a forecast of a :func:`save` without a base: bytes, objects, requests, and the bytes of the largest rank.

    Every rank of the process group calls it. It plans the save and encodes the values that are not tensors. It moves no
    tensor data, and makes no request. The arguments are those of :func:`save`. Raises the same errors for these
    arguments and for a state that cannot be saved.
    """
    request = SaveRequest.from_arguments(None, options)
    ranks = Ranks(process_group, no_dist=no_dist)
    if no_dist:
        refuse_collective_objects(state)
    with open_rounds(ranks, "plan_report", request.options.timeout) as rounds:
        read_state = partial(LocalState.from_user_state, state)
        agreed = agree(rounds, read_state, request.options.plan, lambda layout: None)
        blobs = rounds.merge("their values", on_each_rank=partial(_own_blobs, agreed), on_coordinator=list)
    return report_of(agreed.plan, [blob for own in blobs for blob in own], request.digested)


def _own_blobs(agreed: AgreedPlan[None]) -> list[ArrayNode]:
    """Return the arrays of the values that this rank would store as blobs.

    Raises UnsupportedValueError if a value cannot be saved.
    """
    paths = agreed.rank_plan.object_paths.items()
    stored = ((path, encode_value(agreed.state, fqn).blob_to_store(fqn)) for fqn, path in paths)
    return [blob_node(path, len(blob.payload)) for path, blob in stored if blob is not None]


def report_of(plan: SavePlan, blobs: Sequence[ArrayNode] = (), digested: bool = False) -> PlanReport:
    """Return the report of a plan."""
    nodes, chunk_owners = plan.layout.tensors.values(), plan.chunk_owners
    arrays = [*nodes, *blobs]
    # Tables of checksums and writers, of digests if they are stored, and of sizes if an array is compressed. Each has a
    # document, and a chunk unless the table is empty.
    compressed = [node for node in nodes if node.compression is not None]
    documents = _OTHER_DOCUMENTS + (2 + digested) * (1 + any(node.grid.num_chunks for node in arrays))
    documents += bool(compressed) + any(node.grid.num_chunks for node in compressed)
    documents += len(arrays) + len(parent_groups(node.path for node in arrays))
    return PlanReport(
        ranks=plan.layout.world_size,
        nbytes=int(chunk_owners.nbytes.sum()),
        objects=len(chunk_owners.owner),
        requests=documents + sum(node.grid.num_chunks * put_requests(chunk_object_bytes(node)) for node in arrays),
        largest_rank_bytes=max(chunk_owners.rank_bytes()),
    )
