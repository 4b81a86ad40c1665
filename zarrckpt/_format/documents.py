"""Zarr v3 node documents: JSON in and out, validated in one place."""

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
from zarrckpt._format.grid import Grid, Ints, is_run
from zarrckpt._format.wire import record

Json = dict[str, Any]

NODE = "zarr.json"
ATTRIBUTE = "zarrckpt"
"""The one attribute of Zarr nodes that this package writes."""

MAX_DIMENSIONS = 63
"""Of an array: numpy has 64, and copying takes one."""

_MAX_EXTENT = 2**62
_CRC32C = {"name": "crc32c"}
_SHARDING = "sharding_indexed"


def parse_document(data: bytes, name: str) -> Json:
    """Parse a stored document; anything but one strict JSON object is damage.

    Raises CorruptCheckpointError naming ``name``.
    """
    try:
        document = json_values.loads(data)
    except CorruptCheckpointError as err:
        raise CorruptCheckpointError(f"{name} is {err}") from err
    if not isinstance(document, dict):
        raise CorruptCheckpointError(f"{name} holds a JSON {type(document).__name__}, expected an object")
    return document


def same_json(one: Any, other: Any) -> bool:
    """Whether two JSON values are the same: to Python 1, 1.0 and true are equal."""
    if type(one) is not type(other):
        return False
    if type(one) is dict:
        return one.keys() == other.keys() and all(same_json(value, other[name]) for name, value in one.items())
    if type(one) is list:
        return len(one) == len(other) and all(map(same_json, one, other))
    return bool(one == other)


def join(*parts: str) -> str:
    """Join node paths; empty ones vanish."""
    return "/".join(part for part in parts if part)


def group_document(attributes: Json | None = None) -> Json:
    """The document of a Zarr group."""
    return {"zarr_format": 3, "node_type": "group", "attributes": attributes or {}}


@record
@dataclass(frozen=True)
class ArrayNode:
    """One stored array: where it is, its geometry and its type.

    ``path`` is relative to the tree (the checkpoint's url joined with the tree's name). ``portable`` arrays hold
    types that few readers know as unsigned integers of the same size. ``compression`` is that of each subchunk.
    """

    path: str
    grid: Grid
    dtype: DType
    portable: bool = False
    compression: Compression | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the array's elements, without padding."""
        return math.prod(self.grid.shape) * self.dtype.itemsize

    def chunk_key(self, index: Ints) -> str:
        """The key of a chunk: Zarr's default encoding with separator ".", so no folder for each dimension."""
        return f"{self.path}/{'.'.join(['c', *map(str, index)])}"

    def at(self, path: str) -> ArrayNode:
        """The same array under another path."""
        return ArrayNode(path, self.grid, self.dtype, self.portable, self.compression)

    def under(self, tree: str) -> ArrayNode:
        """The same array with a path that begins at the checkpoint's url."""
        return self.at(join(tree, self.path))

    def document(self) -> Json:
        """The array's ``zarr.json``: one for all arrays that differ in nothing but their path, so not to be changed."""
        return _document(self.grid, self.dtype, self.portable, self.compression)

    def document_bytes(self) -> bytes:
        """The array's ``zarr.json`` as it is stored."""
        return _document_bytes(self.grid, self.dtype, self.portable, self.compression)


_FORMS = 4096
"""Documents that are kept: layers are alike, and so are an optimizer's moments."""


@functools.lru_cache(_FORMS)
def _document(grid: Grid, dtype: DType, portable: bool, compression: Compression | None) -> Json:
    stored = dtype.portable if portable else dtype
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(grid.shape),
        "data_type": stored.name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(grid.chunk_shape)}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        "fill_value": stored.fill_value,
        "codecs": _codecs(grid, stored, compression),
        # xarray refuses arrays without; equal names then mean equal sizes, so groups open as datasets.
        "dimension_names": [f"dim{axis}_{n}" for axis, n in enumerate(grid.shape)],
        "attributes": {ATTRIBUTE: {"dtype": dtype.name}} if portable else {},
    }


@functools.lru_cache(_FORMS)
def _document_bytes(grid: Grid, dtype: DType, portable: bool, compression: Compression | None) -> bytes:
    return json_values.dumps(_document(grid, dtype, portable, compression))


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
    """The array that a document describes.

    Accepts what :meth:`ArrayNode.document` emits and nothing else: whatever differs is either damage
    (CorruptCheckpointError) or a feature of another version (UnsupportedFormatError). Names ``path``.
    """
    where = f"the document of array {path!r}"
    if not isinstance(document, dict):
        raise CorruptCheckpointError(f"{where} is no JSON object")
    shape = _extents(document.get("shape"), 0, f"shape in {where}")
    grid = _configuration(document.get("chunk_grid"), "regular")
    if grid is None:
        raise UnsupportedFormatError(
            f"{where} has no regular chunk grid; upgrade zarrckpt, or read it with zarr-python"
        )
    chunk = _extents(grid.get("chunk_shape"), 1, f"chunk_shape in {where}")
    codecs = document.get("codecs")
    sub = _sub_shape(codecs, where)
    if len(chunk) != len(shape) or (sub is not None and len(sub) != len(shape)):
        raise CorruptCheckpointError(f"shape and chunk shapes in {where} differ in their number of dimensions")
    if sub is not None and any(c % s for c, s in zip(chunk, sub, strict=True)):
        raise CorruptCheckpointError(f"subchunks {sub} do not divide the chunks {chunk} in {where}")
    if sub is not None and not is_run(chunk, sub):
        raise UnsupportedFormatError(
            f"{where} has subchunks {sub} of chunks {chunk}: this version of zarrckpt knows only runs of a chunk's "
            "elements; upgrade zarrckpt, or read it with zarr-python"
        )
    dtype, portable = _parse_dtype(document, where)
    # An empty array's other extents count: numpy multiplies them.
    most = max(math.prod(max(n, 1) for n in shape), math.prod(chunk))
    if most * dtype.itemsize > _MAX_EXTENT:
        raise CorruptCheckpointError(f"{where} has a shape that is too large for any array")
    node = ArrayNode(path, Grid(shape, chunk, sub), dtype, portable, _parse_compression(codecs, where))
    if node.compression is not None and not compressible(node.grid, dtype):
        raise CorruptCheckpointError(f"subchunks too long to be compressed in {where}")
    expected = node.document()
    if not same_json(expected, document):
        differing = sorted(
            name
            for name in {*document, *expected}
            if name not in document or name not in expected or not same_json(document[name], expected[name])
        )
        raise UnsupportedFormatError(
            f"{where} uses what this version of zarrckpt does not know, in {', '.join(map(repr, differing))}; "
            "upgrade zarrckpt, or read it with zarr-python"
        )
    return node


def _parse_dtype(document: Json, where: str) -> tuple[DType, bool]:
    attributes = document.get("attributes")
    own = attributes.get(ATTRIBUTE) if isinstance(attributes, dict) else None
    name = own.get("dtype") if isinstance(own, dict) else document.get("data_type")
    try:
        dtype = dtypes.by_name(name if isinstance(name, str) else repr(name))
    except CheckpointError as err:
        raise UnsupportedFormatError(f"unknown data type {name!r} in {where}; upgrade zarrckpt") from err
    # Other types are stored as what they are.
    return dtype, own is not None and not dtype.core


def _parse_compression(codecs: Any, where: str) -> Compression | None:
    """The codec between elements and checksum. Raises UnsupportedFormatError naming a codec that is not known."""
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
            raise UnsupportedFormatError(f"{where} uses what this version of zarrckpt does not know: {err}") from err
    return found


def _configuration(value: Any, name: str) -> Mapping[str, Any] | None:
    """The configuration of an extension object with the given name; None for one of another name."""
    if not isinstance(value, Mapping) or value.get("name") != name:
        return None
    found = value.get("configuration")
    return found if isinstance(found, Mapping) else {}


def _sub_shape(codecs: Any, where: str) -> Ints | None:
    if not isinstance(codecs, list) or not codecs:
        raise CorruptCheckpointError(f"no codecs in {where}")
    sharding = _configuration(codecs[0], _SHARDING)
    return None if sharding is None else _extents(sharding.get("chunk_shape"), 1, f"subchunk shape in {where}")


def _extents(value: Any, least: int, where: str) -> Ints:
    if not isinstance(value, list) or not all(type(n) is int and least <= n <= _MAX_EXTENT for n in value):
        raise CorruptCheckpointError(f"{where} is {value!r:.80}, expected integers from {least} on")
    if len(value) > MAX_DIMENSIONS:
        raise CorruptCheckpointError(f"{where} has {len(value)} dimensions, expected at most {MAX_DIMENSIONS}")
    if math.prod(value) > _MAX_EXTENT:
        raise CorruptCheckpointError(f"{where} is {value!r:.80}, too large for any array")
    return tuple(value)
