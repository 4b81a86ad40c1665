"""Subchunks for property tests: runs of a chunk's elements."""

from __future__ import annotations

from hypothesis import strategies as st

Ints = tuple[int, ...]


@st.composite
def subchunks_of(draw: st.DrawFn, chunk: Ints) -> Ints | None:
    """Return the shape of a chunk's subchunks, which divide it. None for none, as of arrays without dimensions."""
    if not chunk or draw(st.booleans()):
        return None
    dim = draw(st.integers(0, len(chunk) - 1))
    rows = draw(st.sampled_from([k for k in range(1, chunk[dim] + 1) if chunk[dim] % k == 0]))
    return (*(1,) * dim, rows, *chunk[dim + 1 :])
