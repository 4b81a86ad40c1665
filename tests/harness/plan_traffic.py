"""The pieces of a plan that move between ranks."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from zarrckpt._plan.geometry import Numbers
from zarrckpt._plan.owners import ChunkOwners


def moves(plan: ChunkOwners) -> Iterator[tuple[Numbers, Numbers, Numbers]]:
    """Yield the owners, sources and bytes of the pieces of all chunks of which at least one piece moves.

    Each item is about one chunk of several equal tensors: the owner in each tensor, a row of sources for each tensor,
    and the size of each piece. A piece whose source is the owner does not move.
    """
    for kind, chunk, moving in plan.moving():
        if moving.any():
            found = plan.owner[kind.chunks[moving, chunk]]
            own, pieces = kind.geometry.pieces_of(chunk), kind.geometry.pieces
            sizes = pieces.size[own.start : own.stop] * (kind.nbytes[chunk] // pieces.elements[chunk])
            yield found, kind.geometry.sources(kind.tensors[moving], chunk, found), sizes


def moved_bytes(plan: ChunkOwners, hosts: Numbers | None = None) -> int:
    """Return the bytes that move between ranks, or between hosts if the host number of each rank is given."""
    host_of = np.arange(plan.world_size) if hosts is None else hosts
    return sum(
        int(((host_of[sources] != host_of[owners][:, None]) * nbytes).sum()) for owners, sources, nbytes in moves(plan)
    )


def peers(plan: ChunkOwners) -> NDArray[np.bool_]:
    """Return a symmetric matrix over ranks: whether two ranks exchange pieces."""
    found = np.zeros((plan.world_size, plan.world_size), np.bool_)
    for owners, sources, _ in moves(plan):
        found[sources, owners[:, None]] = True
    found |= found.T
    np.fill_diagonal(found, False)
    return found
