"""Pieces of chunks, and the ranks that supply them, in columns and one by one."""

from __future__ import annotations

import numpy as np
from harness.internals import Box, Grid

from zarrckpt._plan.geometry import BoxOnRanks, Geometry, Holders


def test_columns_of_sources_equal_those_of_single_pieces() -> None:
    """Otherwise the plan balances transfers that do not happen."""
    ranks = [(0, 1, 2), (0, 3, 4), (5,), (0, 1, 2), (0, 2, 3, 6)]
    held = [BoxOnRanks(Box((2 * number,), (2,)), held_by) for number, held_by in enumerate(ranks)]
    geometry = Geometry.of(Grid((10,), (4,)), Holders(held))
    tensors = np.arange(7)
    for chunk in range(3):
        for owner in range(7):
            found = geometry.sources(tensors, chunk, np.full(len(tensors), owner))
            pieces = geometry.pieces_of(chunk)
            assert found.tolist() == [[geometry.source(n, piece, owner) for piece in pieces] for n in tensors]
