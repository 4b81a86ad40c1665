"""Plan the arrays of a copy's tensors. No I/O."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from zarrckpt._format.compression import Compression, CompressionOption, parse_option
from zarrckpt._format.documents import ArrayNode, compressible
from zarrckpt._format.grid import Box, Grid, Ints
from zarrckpt._format.root import BlobEntry, Root, ValueEntry
from zarrckpt._jobs import check_limits
from zarrckpt._plan.chunking import choose_grid, subchunk_shape
from zarrckpt._read.casts import Casts, DTypeOption, first_patterns, plan_casts

KEEP = "keep"
"""The value of ``compression`` that keeps the compression of the source."""

ChunksOption = Sequence[int] | Mapping[str, Sequence[int]] | None


@dataclass(frozen=True)
class Changes:
    """The changes from the tensors of the source to those of a copy. Chunks and casts are by fqn."""

    chunks: Mapping[str, Ints] = field(default_factory=dict)
    casts: Casts = field(default_factory=Casts)
    max_chunk_bytes: int | None = None
    compress: bool = False
    compression: Compression | None = None
    """The compression of all tensors if ``compress``."""
    portable: bool = False
    """Whether types that few readers support become unsigned integers of the same size."""

    def node(self, fqn: str, old: ArrayNode) -> ArrayNode:
        """Return a tensor's array in the copy."""
        dtype = self.casts.dtypes.get(fqn, old.dtype)
        grid = self._grid(fqn, old.grid, dtype.itemsize)
        compression = self.compression if self.compress else old.compression
        if not compressible(grid, dtype):
            compression = None
        portable = (self.portable or old.portable) and not dtype.core
        return ArrayNode(old.path, grid, dtype, portable, compression, old.order)

    def _grid(self, fqn: str, old: Grid, itemsize: int) -> Grid:
        shape = old.shape
        if fqn in self.chunks:
            chunk = tuple(max(1, n if c == -1 else min(c, n)) for c, n in zip(self.chunks[fqn], shape, strict=True))
            return Grid(shape, chunk, subchunk_shape(chunk, itemsize))
        if self.max_chunk_bytes is None:
            return old
        whole = Box((0,) * len(shape), shape)
        return choose_grid(shape, [whole] if whole.size else [], itemsize, max_chunk_bytes=self.max_chunk_bytes)


def parse_changes(
    root: Root,
    names: Iterable[str],
    where: str,
    *,
    chunks: ChunksOption,
    max_chunk_bytes: int | None,
    dtype: DTypeOption,
    compression: CompressionOption,
    portable_dtypes: bool,
) -> Changes:
    """Parse the options of :func:`copy` for some entries. ``where`` describes them in errors.

    Raises TypeError and ValueError for wrong options, KeyMismatchError for a pattern that matches no tensor.
    """
    entries = list(names)
    tensors = {fqn: root.tensors[fqn] for fqn in entries if fqn in root.tensors}
    if max_chunk_bytes is not None:
        check_limits(max_chunk_bytes=max_chunk_bytes)
    compress = compression != KEEP
    return Changes(
        _parse_chunks(tensors, where, chunks),
        plan_casts(root, entries, where, dtype),
        max_chunk_bytes,
        compress,
        parse_option(compression) if compress else None,
        portable_dtypes,
    )


def _parse_chunks(tensors: Mapping[str, ArrayNode], where: str, option: ChunksOption) -> dict[str, Ints]:
    if option is None:
        return {}
    if isinstance(option, Mapping):
        shapes = {pattern: parse_shape(shape) for pattern, shape in option.items()}
        found = {fqn: shapes[pattern] for fqn, pattern in first_patterns(tensors, where, shapes).items()}
        odd = [fqn for fqn, shape in found.items() if len(shape) != len(tensors[fqn].grid.shape)]
        if odd:
            raise ValueError(
                f"chunks for {odd[0]!r} must have the dimensions of its shape {tensors[odd[0]].grid.shape}, got "
                f"{found[odd[0]]}"
            )
        return found
    shape = parse_shape(option)
    found = {fqn: shape for fqn, node in tensors.items() if len(node.grid.shape) == len(shape)}
    if not found:
        raise ValueError(f"chunks {shape} fit no tensor: none of the copied tensors has {len(shape)} dimensions")
    return found


def parse_shape(option: Sequence[int]) -> Ints:
    """Check a chunk shape of a caller: extents of at least 1, or -1 for the whole dimension."""
    if not isinstance(option, Sequence) or isinstance(option, str) or not all(type(n) is int for n in option):
        raise TypeError(f"chunks must be a shape such as (1024, -1), or a mapping pattern -> shape, got {option!r}")
    if not all(n == -1 or n >= 1 for n in option):
        raise ValueError(f"chunks must be at least 1, or -1 for a whole dimension, got {tuple(option)}")
    return tuple(option)


def changed(root: Root, changes: Changes) -> Root:
    """Return the root of the source with the arrays of the copy."""
    entries: dict[str, ArrayNode | ValueEntry | BlobEntry] = dict(root.entries)
    entries |= {fqn: changes.node(fqn, node) for fqn, node in root.tensors.items()}
    return dataclasses.replace(root, entries=entries)
