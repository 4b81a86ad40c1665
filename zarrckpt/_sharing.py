"""Which stored subchunks several ranks need, which of them fetches each, and in which round it hands them on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from zarrckpt import _codec
from zarrckpt._documents import ArrayNode
from zarrckpt._grid import Box, Ints
from zarrckpt._owners import Held, Numbers, Ranks, schedule
from zarrckpt._transfer import places_in

_RUN_BYTES = 8 << 20
"""Neighbouring subchunks are fetched and handed on together up to this many bytes."""

_LEAST_RUN_BYTES = 1 << 20
"""Where many ranks need the same, runs are shorter, so that all of them fetch in every round; but not below this."""


class Run(NamedTuple):
    """Neighbouring subchunks of one chunk: the first one's place in the object, and how many."""

    fqn: str
    chunk: Ints
    first: int
    cells: int

    def nbytes(self, node: ArrayNode) -> int:
        """The stored size, of the array that the run is of."""
        return self.cells * _codec.subchunk_bytes(node.grid, node.dtype.itemsize)


@dataclass
class ShareRound:
    """What one rank does in one round: runs that it fetches and sends to others, and runs that it receives."""

    reads: list[tuple[Run, Ranks]] = field(default_factory=list)
    receives: list[tuple[Run, int]] = field(default_factory=list)


Shares = Mapping[int, ShareRound]
"""One rank's rounds, by number."""


def plan_shares(
    nodes: Mapping[str, ArrayNode], wanted: Mapping[str, Sequence[Held]], world_size: int, limit: int
) -> list[Shares]:
    """Deal what several ranks want over them; return each rank's part. Called by the coordinator; no I/O.

    ``wanted`` has the boxes that ranks are to fill, by fqn. In one round no rank holds more than ``limit`` bytes.
    """
    # Runs for the same ranks lie side by side, so that a message to several of them is one buffer.
    runs = sorted(_shared_runs(nodes, wanted, limit), key=lambda row: row[1])
    loads = np.zeros(world_size, np.int64)
    columns: dict[Ranks, Numbers] = {}
    readers, needs = [], []
    for run, ranks in runs:
        nbytes = run.nbytes(nodes[run.fqn])
        column = columns.get(ranks)
        if column is None:
            column = columns[ranks] = np.array(ranks, np.int64)
        reader = ranks[int(loads[column].argmin())]
        loads[reader] += nbytes
        readers.append(reader)
        needs.append((column, nbytes))
    shares: list[dict[int, ShareRound]] = [{} for _ in range(world_size)]
    for (run, ranks), reader, number in zip(runs, readers, schedule(needs, world_size, limit), strict=True):
        others = tuple(rank for rank in ranks if rank != reader)
        shares[reader].setdefault(number, ShareRound()).reads.append((run, others))
        for rank in others:
            shares[rank].setdefault(number, ShareRound()).receives.append((run, reader))
    return [dict(sorted(own.items())) for own in shares]


def _shared_runs(
    nodes: Mapping[str, ArrayNode], wanted: Mapping[str, Sequence[Held]], limit: int
) -> Iterable[tuple[Run, Ranks]]:
    """Runs that more than one rank needs, and these ranks."""
    # Layers are alike, and an optimizer's moments: what holds for one tensor holds for all with its grid and boxes.
    known: dict[object, list[tuple[Ints, int, int, Ranks]]] = {}
    for fqn, held in wanted.items():
        node = nodes[fqn]
        key = (node.grid, node.dtype.itemsize, tuple(held))
        if key not in known:
            known[key] = list(_runs_of(node, held, limit))
        for chunk, first, count, ranks in known[key]:
            yield Run(fqn, chunk, first, count), ranks


def _runs_of(node: ArrayNode, held: Sequence[Held], limit: int) -> Iterable[tuple[Ints, int, int, Ranks]]:
    grid = node.grid
    cell_bytes = _codec.subchunk_bytes(grid, node.dtype.itemsize)
    in_chunk: dict[Ints, list[Held]] = {}
    for want in held:
        for chunk in grid.chunks_of(want.box):
            in_chunk.setdefault(chunk, []).append(want)
    for chunk, wants in in_chunk.items():
        if len(wants) == 1 and len(wants[0].ranks) == 1:
            continue
        needed_by: dict[int, set[int]] = {}
        for box, ranks in wants:
            for place in places_in(grid, chunk, box):
                needed_by.setdefault(place, set()).update(ranks)
        by_ranks: dict[Ranks, list[int]] = {}
        for place, ranks_of_place in sorted(needed_by.items()):
            if len(ranks_of_place) > 1:
                by_ranks.setdefault(tuple(sorted(ranks_of_place)), []).append(place)
        for ranks, places in by_ranks.items():
            longest = min(_RUN_BYTES, limit, max(_LEAST_RUN_BYTES, limit // len(ranks)))
            for first, count in _codec.runs(places, max(1, longest // cell_bytes)):
                yield chunk, first, count, ranks


def wanted_boxes(targets: Sequence[Iterable[tuple[str, Box]]]) -> dict[str, list[Held]]:
    """Who wants which box, by fqn, from each rank's targets."""
    ranks_of: dict[str, dict[Box, list[int]]] = {}
    for rank, own in enumerate(targets):
        for fqn, box in own:
            ranks = ranks_of.setdefault(fqn, {}).setdefault(box, [])
            if box.size and ranks[-1:] != [rank]:
                ranks.append(rank)
    return {fqn: [Held(box, tuple(ranks)) for box, ranks in boxes.items() if ranks] for fqn, boxes in ranks_of.items()}
