"""Zarr v3 node documents: encoding, parsing and validation."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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


def same_json(one: Any, other: Any) -> bool:
    """Whether two JSON values are the same. Unlike ``==``, distinguishes 1, 1.0 and true."""
    if type(one) is not type(other):
        return False
    if type(one) is dict:
        return one.keys() == other.keys() and all(same_json(value, other[name]) for name, value in one.items())
    if type(one) is list:
        return len(one) == len(other) and all(map(same_json, one, other))
    return bool(one == other)


def join(*parts: str) -> str:
    """Join node paths. Empty paths are ignored."""
    return "/".join(part for part in parts if part)


def group_document(attributes: Json | None = None) -> Json:
    """Return the document of a Zarr group."""
    return {"zarr_format": 3, "node_type": "group", "attributes": attributes or {}}


@record
@dataclass(frozen=True)
class ArrayNode:
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
        return ArrayNode(path, self.grid, self.dtype, self.portable, self.compression, self.order)

    def under(self, tree: str) -> ArrayNode:
        """Return the same array with a path relative to the checkpoint's url."""
        return self.at(join(tree, self.path)) if tree else self

    def document(self) -> Json:
        """Return the array's ``zarr.json``. Do not change it: arrays that differ only in their path share it."""
        return _document(self.grid, self.dtype, self.portable, self.compression, self.order)

    def document_bytes(self) -> bytes:
        """Return the stored bytes of the array's ``zarr.json``."""
        return _document_bytes(self.grid, self.dtype, self.portable, self.compression, self.order)


_CACHED_DOCUMENTS = 4096
"""Number of cached documents. Layers have the same shapes, and so has an optimizer's state."""


@functools.lru_cache(_CACHED_DOCUMENTS)
def _document(grid: Grid, dtype: DType, portable: bool, compression: Compression | None, order: Ints) -> Json:
    stored = dtype.portable if portable else dtype
    own: Json = ({"dtype": dtype.name} if portable else {}) | ({"order": list(order)} if order else {})
    return {
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


@functools.lru_cache(_CACHED_DOCUMENTS)
def _document_bytes(grid: Grid, dtype: DType, portable: bool, compression: Compression | None, order: Ints) -> bytes:
    return json_values.dumps(_document(grid, dtype, portable, compression, order))


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


def parse_array(path: str, document: Any) -> ArrayNode:
    """Return the array that a document describes.

    Accepts only documents as :meth:`ArrayNode.document` writes them. Raises CorruptCheckpointError for a damaged
    document and UnsupportedFormatError for features of another version. Both name ``path``.
    """
    where = f"the document of array {path!r}"
    if not isinstance(document, dict):
        raise CorruptCheckpointError(f"{where} is not a JSON object")
    shape = _extents(document.get("shape"), 0, f"shape in {where}")
    grid = _configuration(document.get("chunk_grid"), "regular")
    if grid is None:
        raise UnsupportedFormatError(
            f"{where} has no regular chunk grid. Upgrade zarrckpt, or read it with zarr-python"
        )
    chunk = _extents(grid.get("chunk_shape"), 1, f"chunk_shape in {where}")
    codecs = document.get("codecs")
    sub = _sub_shape(codecs, where)
    if len(chunk) != len(shape) or (sub is not None and len(sub) != len(shape)):
        raise CorruptCheckpointError(f"shape and chunk shapes in {where} differ in their number of dimensions")
    if sub is not None and any(c % s for c, s in zip(chunk, sub, strict=True)):
        raise CorruptCheckpointError(f"subchunks {sub} do not divide the chunks {chunk} in {where}")
    if sub is not None and not is_consecutive(chunk, sub):
        raise UnsupportedFormatError(
            f"{where} has subchunks {sub} of chunks {chunk}. This version of zarrckpt supports only subchunks of "
            "consecutive elements of the chunk. Upgrade zarrckpt, or read it with zarr-python"
        )
    attributes = document.get("attributes")
    own = attributes.get(ATTRIBUTE) if isinstance(attributes, dict) else None
    own = own if isinstance(own, dict) else {}
    dtype, portable = _parse_dtype(document, own, where)
    # For an empty array, the extents other than 0 are checked too, because numpy multiplies them.
    max_size = max(math.prod(max(n, 1) for n in shape), math.prod(chunk))
    if max_size * dtype.itemsize > _MAX_EXTENT:
        raise CorruptCheckpointError(f"{where} has a shape that is too large for an array")
    node = ArrayNode(
        path, Grid(shape, chunk, sub), dtype, portable, _parse_compression(codecs, where), _parse_order(own, len(shape))
    )
    if node.compression is not None and not compressible(node.grid, dtype):
        raise CorruptCheckpointError(
            f"{where} has subchunks too long to be compressed, expected at most {_compression.MAX_BYTES} bytes"
        )
    expected = node.document()
    if not same_json(expected, document):
        differing = sorted(
            name
            for name in {*document, *expected}
            if name not in document or name not in expected or not same_json(document[name], expected[name])
        )
        raise UnsupportedFormatError(
            f"{where} has features that this version of zarrckpt does not support, in "
            f"{', '.join(map(repr, differing))}. Upgrade zarrckpt, or read it with zarr-python"
        )
    return node


def _parse_order(own: Json, dimensions: int) -> Ints:
    """Return the order of strides, or () unless it is a permutation other than C order. Callers compare the result."""
    order = own.get("order")
    if not isinstance(order, list) or not all(type(axis) is int for axis in order):
        return ()
    in_c_order = [*range(dimensions)]
    return tuple(order) if sorted(order) == in_c_order != order else ()


def _parse_dtype(document: Json, own: Json, where: str) -> tuple[DType, bool]:
    name = own.get("dtype", document.get("data_type"))
    try:
        dtype = dtypes.by_name(name if isinstance(name, str) else repr(name))
    except CheckpointError as err:
        raise UnsupportedFormatError(f"{where} has the unknown data type {name!r}. Upgrade zarrckpt") from err
    # Core types are stored directly, so for them the attribute is an unexpected member of the document.
    return dtype, "dtype" in own and not dtype.core


def _parse_compression(codecs: Any, where: str) -> Compression | None:
    """Return the codec between elements and checksum, or None. Raises UnsupportedFormatError for an unknown codec."""
    inner = (_configuration(codecs[0], _SHARDING) or {}).get("codecs")
    chain = inner if isinstance(inner, list) else codecs
    found = None
    for codec in chain:
        name = codec.get("name") if isinstance(codec, dict) else codec
        if name in ("bytes", "crc32c", _SHARDING):
            continue
        try:
            found = _compression.parse_codec(codec)
        except (TypeError, ValueError) as err:
            raise UnsupportedFormatError(
                f"{where} has a codec that this version of zarrckpt does not support: {err}. Upgrade zarrckpt, or read "
                "it with zarr-python"
            ) from err
    return found


def _configuration(value: Any, name: str) -> Mapping[str, Any] | None:
    """Return the configuration of an extension object with this name, or None if it has another name."""
    if not isinstance(value, Mapping) or value.get("name") != name:
        return None
    found = value.get("configuration")
    return found if isinstance(found, Mapping) else {}


def _sub_shape(codecs: Any, where: str) -> Ints | None:
    if not isinstance(codecs, list) or not codecs:
        raise CorruptCheckpointError(f"{where} has no codecs")
    sharding = _configuration(codecs[0], _SHARDING)
    return None if sharding is None else _extents(sharding.get("chunk_shape"), 1, f"subchunk shape in {where}")


def _extents(value: Any, minimum: int, where: str) -> Ints:
    if not isinstance(value, list) or not all(type(n) is int and minimum <= n <= _MAX_EXTENT for n in value):
        raise CorruptCheckpointError(f"{where} is {value!r:.80}, expected a list of integers of at least {minimum}")
    if len(value) > MAX_DIMENSIONS:
        raise CorruptCheckpointError(f"{where} has {len(value)} dimensions, expected at most {MAX_DIMENSIONS}")
    if math.prod(value) > _MAX_EXTENT:
        raise CorruptCheckpointError(f"{where} is {value!r:.80}, which is too large for an array")
    return tuple(value)
