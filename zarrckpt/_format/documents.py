"""Zarr v3 node documents: encoding, parsing and validation."""

from __future__ import annotations

import functools
import json
import math
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from zarrckpt._errors import CheckpointError, CorruptCheckpointError, UnsupportedFormatError
from zarrckpt._format import compression as _compression
from zarrckpt._format import dtypes, json_values
from zarrckpt._format.compression import Compression
from zarrckpt._format.dtypes import DType
from zarrckpt._format.grid import Grid, Ints, is_consecutive
from zarrckpt._format.wire import record

Json = dict[str, Any]

NODE = "zarr.json"
ATTRIBUTE = "zarrckpt"
"""The name of the package's own attribute of Zarr nodes."""

MAX_DIMENSIONS = 63
"""Maximum number of dimensions of an array. numpy allows 64, and copying needs one."""

_MAX_EXTENT = 2**62
_CRC32C = {"name": "crc32c"}
_SHARDING = "sharding_indexed"


def parse_document(data: bytes, name: str) -> Json:
    """Return the JSON object of a stored document. Raises CorruptCheckpointError with ``name`` for anything else."""
    try:
        document = json_values.loads(data)
    except CorruptCheckpointError as err:
        raise CorruptCheckpointError(f"{name} is {err}") from err
    if not isinstance(document, dict):
        raise CorruptCheckpointError(f"{name} has a JSON {type(document).__name__}, expected an object")
    return document


def different_members(data: bytes, expected: bytes) -> list[str]:
    """Return the names of the members in which two JSON objects differ. Unlike ``==``, distinguishes 1 and true."""
    if data == expected:
        return []
    found, own = (
        {(name, json.dumps(value, sort_keys=True)) for name, value in parse_document(one, "it").items()}
        for one in (data, expected)
    )
    return sorted({name for name, _ in found ^ own})


def join(*parts: str) -> str:
    """Join node paths. Empty paths are ignored."""
    return "/".join(part for part in parts if part)


GROUP_DOCUMENT = b'{"zarr_format":3,"node_type":"group","attributes":{}}'
"""The document of a Zarr group."""


@record
class ArrayNode(NamedTuple):
    """One stored array: its path, geometry and type.

    ``path`` is relative to the tree (the checkpoint's url joined with the tree's name). A ``portable`` array stores a
    type that few readers support as unsigned integers of the same size. ``compression`` applies to each subchunk.
    ``order`` has the dimensions by descending stride of the saved tensor if that is not C order. Chunks do not depend
    on it.
    """

    path: str
    grid: Grid
    dtype: DType
    portable: bool = False
    compression: Compression | None = None
    order: Ints = ()

    @property
    def nbytes(self) -> int:
        """The bytes of the array's elements, without padding."""
        return math.prod(self.grid.shape) * self.dtype.itemsize

    def chunk_key(self, index: Ints) -> str:
        """Return the key of a chunk. The separator is ".", so that there is no folder for each dimension."""
        return f"{self.path}/{'.'.join(['c', *map(str, index)])}"

    def at(self, path: str) -> ArrayNode:
        """Return the same array under another path."""
        return ArrayNode(path, *self[1:])

    def under(self, tree: str) -> ArrayNode:
        """Return the same array with a path relative to the checkpoint's url."""
        return self.at(join(tree, self.path)) if tree else self

    def document_bytes(self) -> bytes:
        """Return the stored bytes of the array's ``zarr.json``."""
        return _document(*self[1:])


_CACHED_DOCUMENTS = 4096
"""Number of cached documents. Layers have the same shapes, and so has an optimizer's state."""


@functools.lru_cache(_CACHED_DOCUMENTS)
def _document(grid: Grid, dtype: DType, portable: bool, compression: Compression | None, order: Ints) -> bytes:
    stored = dtype.portable if portable else dtype
    own: Json = ({"dtype": dtype.name} if portable else {}) | ({"order": list(order)} if order else {})
    document = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(grid.shape),
        "data_type": stored.name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(grid.chunk_shape)}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        "fill_value": stored.fill_value,
        "codecs": _codecs(grid, stored, compression),
        # xarray refuses arrays without names. Equal names mean equal sizes, so that groups open as datasets.
        "dimension_names": [f"dim{axis}_{n}" for axis, n in enumerate(grid.shape)],
        "attributes": {ATTRIBUTE: own} if own else {},
    }
    return json_values.dumps(document)


def compressible(grid: Grid, dtype: DType) -> bool:
    """Whether an array's subchunks are short enough to be compressed."""
    return grid.subchunk_size * dtype.itemsize <= _compression.MAX_BYTES


def _codecs(grid: Grid, dtype: DType, compression: Compression | None) -> list[Json]:
    compressed = [] if compression is None else [compression.codec(dtype.itemsize)]
    stored = [dtype.bytes_codec, *compressed, _CRC32C]
    if grid.subchunk_shape is None:
        return stored
    configuration = {
        "chunk_shape": list(grid.subchunk_shape),
        "codecs": stored,
        "index_codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, _CRC32C],
        "index_location": "end",
    }
    return [{"name": _SHARDING, "configuration": configuration}]


_Extents = Annotated[tuple[Annotated[int, Meta(ge=0, le=_MAX_EXTENT)], ...], Meta(max_length=MAX_DIMENSIONS)]
_ChunkExtents = Annotated[tuple[Annotated[int, Meta(ge=1, le=_MAX_EXTENT)], ...], Meta(max_length=MAX_DIMENSIONS)]


class _Codec(msgspec.Struct):
    name: str
    configuration: dict[str, Any] = {}


class _Chunks(msgspec.Struct):
    """The configuration of a grid, or of subchunks."""

    chunk_shape: _ChunkExtents
    codecs: list[_Codec] = []


class _ChunkGrid(msgspec.Struct):
    configuration: _Chunks


class _Own(msgspec.Struct):
    dtype: str | None = None
    order: Ints = ()


class _Attributes(msgspec.Struct):
    zarrckpt: _Own = msgspec.field(default_factory=_Own)


class _Array(msgspec.Struct):
    """The varying parts of an array's document."""

    shape: _Extents
    data_type: str
    chunk_grid: _ChunkGrid
    codecs: Annotated[list[_Codec], Meta(min_length=1)]
    attributes: _Attributes


_DECODER = msgspec.json.Decoder(_Array)


def parse_node(path: str, document: bytes) -> ArrayNode | None:
    """Return the array that a document describes, or None for a group.

    Builds the document from the varying parts, and compares, so only what this package writes is accepted. Raises
    UnsupportedFormatError for any other document. The message names ``path``.
    """
    try:
        if not different_members(document, GROUP_DOCUMENT):
            return None
        node = _array_of(path, _DECODER.decode(document))
        if not (different := different_members(document, node.document_bytes())):
            return node
        fault = f"unexpected {', '.join(map(repr, different))}"
    except (msgspec.MsgspecError, CheckpointError, TypeError, ValueError, RecursionError) as err:
        fault = str(err)
    raise UnsupportedFormatError(
        f"the document of array {path!r:.300} is damaged, or has features that this version of zarrckpt does not "
        f"support: {fault:.1000}. Upgrade zarrckpt, or read it with zarr-python"
    )


def _array_of(path: str, found: _Array) -> ArrayNode:
    chunk, sub, codecs, own = found.chunk_grid.configuration.chunk_shape, None, found.codecs, found.attributes.zarrckpt
    if codecs[0].name == _SHARDING:
        subchunks = msgspec.convert(codecs[0].configuration, _Chunks)
        sub, codecs = subchunks.chunk_shape, subchunks.codecs
    if not len(found.shape) == len(chunk) == len(sub or chunk):
        raise ValueError("its shapes differ in their number of dimensions")
    if sub is not None and (any(c % s for c, s in zip(chunk, sub, strict=True)) or not is_consecutive(chunk, sub)):
        raise ValueError(f"its subchunks {sub} do not have consecutive elements of the chunks {chunk}")
    dtype = dtypes.by_name(own.dtype or found.data_type)
    # For an empty array, the extents other than 0 are checked too, because numpy multiplies them.
    if max(math.prod(max(n, 1) for n in found.shape), math.prod(chunk)) * dtype.itemsize > _MAX_EXTENT:
        raise ValueError("its shape is too large for an array")
    in_c_order = tuple(range(len(chunk)))
    node = ArrayNode(
        path,
        Grid(found.shape, chunk, sub),
        dtype,
        # Core types are stored directly, so for them the attribute is an unexpected member of the document.
        own.dtype is not None and not dtype.core,
        next(
            (_compression.parse_codec(msgspec.to_builtins(c)) for c in codecs if c.name not in ("bytes", "crc32c")),
            None,
        ),
        own.order if tuple(sorted(own.order)) == in_c_order != own.order else (),
    )
    if node.compression is not None and not compressible(node.grid, dtype):
        raise ValueError(
            f"its subchunks are too long to be compressed, expected at most {_compression.MAX_BYTES} bytes"
        )
    return node
