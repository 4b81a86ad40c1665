"""What a copy is to be: the arrays of its tensors. No I/O."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from zarrckpt._format.compression import Compression, CompressionOption, parse_option
from zarrckpt._format.documents import ArrayNode, compressible
from zarrckpt._format.dtypes import DType, by_torch_name
from zarrckpt._format.grid import Box, Grid, Ints
from zarrckpt._format.matching import matches, select
from zarrckpt._format.root import BlobEntry, Root, ValueEntry
from zarrckpt._jobs import check_limits
from zarrckpt._plan.chunking import choose_grid, subchunk_shape

KEEP = "keep"
"""The ``compression`` of a copy that leaves it as it is."""

ChunksOption = Sequence[int] | Mapping[str, Sequence[int]] | None
DTypeOption = str | Mapping[str, str] | None

_SCALES = "float8_e8m0fnu"
"""Powers of two that scale other tensors: no zero, no sign. Nothing is cast to it or from it."""


@dataclass(frozen=True)
class Changes:
    """What the tensors of a copy have other than those of its source, by name; the rest stays as it is."""

    chunks: Mapping[str, Ints] = field(default_factory=dict)
    dtypes: Mapping[str, DType] = field(default_factory=dict)
    max_chunk_bytes: int | None = None
    compress: bool = False
    compression: Compression | None = None
    """Of all tensors, where ``compress``."""
    portable: bool = False
    """Whether types that few readers know become unsigned integers of their size."""

    def node(self, fqn: str, old: ArrayNode) -> ArrayNode:
        """A tensor's array in the copy."""
        dtype = self.dtypes.get(fqn, old.dtype)
        grid = self._grid(fqn, old.grid, dtype.itemsize)
        compression = self.compression if self.compress else old.compression
        if not compressible(grid, dtype):
            compression = None
        portable = (self.portable or old.portable) and dtype.portable is not dtype
        return ArrayNode(old.path, grid, dtype, portable, compression)

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
    tensors: Mapping[str, ArrayNode],
    where: str,
    *,
    chunks: ChunksOption,
    max_chunk_bytes: int | None,
    dtype: DTypeOption,
    compression: CompressionOption,
    portable_dtypes: bool,
) -> Changes:
    """The options of ``Checkpoint.copy_to``, for these tensors; ``where`` says in errors whose they are.

    Raises TypeError and ValueError for options that make no sense, KeyMismatchError for a pattern that means no tensor.
    """
    if max_chunk_bytes is not None:
        check_limits(max_chunk_bytes=max_chunk_bytes)
    compress = compression != KEEP
    return Changes(
        _parse_chunks(tensors, where, chunks),
        _parse_dtypes(tensors, where, dtype),
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
        found = {fqn: shapes[pattern] for fqn, pattern in _by_pattern(tensors, where, shapes).items()}
        odd = [fqn for fqn, shape in found.items() if len(shape) != len(tensors[fqn].grid.shape)]
        if odd:
            raise ValueError(f"chunks {found[odd[0]]} for {odd[0]!r}, which has the shape {tensors[odd[0]].grid.shape}")
        return found
    shape = parse_shape(option)
    found = {fqn: shape for fqn, node in tensors.items() if len(node.grid.shape) == len(shape)}
    if not found:
        raise ValueError(f"chunks {shape}: no tensor that is copied has {len(shape)} dimensions")
    return found


def parse_shape(option: Sequence[int]) -> Ints:
    """A chunk shape as a caller gives it: extents from 1 on, -1 for the whole dimension."""
    if not isinstance(option, Sequence) or isinstance(option, str) or not all(type(n) is int for n in option):
        raise TypeError(f"chunks must be a shape such as (1024, -1), or a mapping pattern -> shape, got {option!r}")
    if not all(n == -1 or n >= 1 for n in option):
        raise ValueError(f"chunks must be extents from 1 on, or -1 for a whole dimension, got {tuple(option)}")
    return tuple(option)


def _parse_dtypes(tensors: Mapping[str, ArrayNode], where: str, option: DTypeOption) -> dict[str, DType]:
    if option is None:
        return {}
    floats = {fqn for fqn, node in tensors.items() if node.dtype.kind == "float" and node.dtype.name != _SCALES}
    if not isinstance(option, Mapping):
        dtype = parse_dtype(option)
        return {fqn: dtype for fqn in tensors if fqn in floats}
    dtypes = {pattern: parse_dtype(name) for pattern, name in option.items()}
    found = _by_pattern(tensors, where, dtypes)
    idle = [pattern for pattern in dtypes if not any(matches(fqn, pattern) for fqn in floats)]
    if idle:
        raise ValueError(f"dtype for {idle[0]!r}: only floating tensors are cast, and it means none in {where}")
    return {fqn: dtypes[pattern] for fqn, pattern in found.items() if fqn in floats}


def parse_dtype(name: object) -> DType:
    """A dtype that floating tensors can be cast to. Raises ValueError."""
    dtype = by_torch_name(str(name))
    if dtype.kind != "float" or dtype.name == _SCALES:
        raise ValueError(f"floating tensors are cast to a floating dtype such as 'bfloat16', not to {dtype.name!r}")
    return dtype


def _by_pattern(tensors: Mapping[str, ArrayNode], where: str, patterns: Mapping[str, object]) -> dict[str, str]:
    """The first pattern that means a tensor. Raises KeyMismatchError for a pattern that means none."""
    found: dict[str, str] = {}
    for pattern in patterns:
        for fqn in select(tensors, [pattern], f"the tensors of {where}"):
            found.setdefault(fqn, pattern)
    return found


def changed(root: Root, changes: Changes) -> Root:
    """The root of a copy, as far as it is known: with the arrays that it will have."""
    entries: dict[str, ArrayNode | ValueEntry | BlobEntry] = dict(root.entries)
    entries |= {fqn: changes.node(fqn, node) for fqn, node in root.tensors.items()}
    return dataclasses.replace(root, entries=entries)
