"""zarr-python's decompressing codecs, whose failures are damage like any other.

What arrives here has its checksums already, so only somebody who forged those meets these errors.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from zarr.abc.codec import Codec
from zarr.codecs import BloscCodec, ShardingCodec, ZstdCodec
from zarr.core import codec_pipeline

from zarrckpt._errors import CorruptCheckpointError

if TYPE_CHECKING:
    from zarr.core.array import AsyncArray
    from zarr.core.array_spec import ArraySpec
    from zarr.core.buffer import Buffer

Decode = Callable[["Buffer", "ArraySpec"], "Buffer"]


def check_decoding(array: AsyncArray[Any], where: str) -> None:
    """Let a compressed array raise CorruptCheckpointError naming ``where`` for data that do not decompress."""
    if type(array.codec_pipeline).__module__ == codec_pipeline.__name__:  # others have codecs of their own
        metadata: Any = array.metadata
        codecs = [_checked(codec, where) for codec in metadata.codecs]
        object.__setattr__(array, "codec_pipeline", type(array.codec_pipeline).from_codecs(codecs))


def _checked(codec: Codec, where: str) -> Codec:
    if isinstance(codec, ShardingCodec):
        inner = tuple(_checked(one, where) for one in codec.codecs)
        own = {"index_codecs": codec.index_codecs, "index_location": codec.index_location}
        return ShardingCodec(chunk_shape=codec.chunk_shape, codecs=inner, **own)  # type: ignore[arg-type]
    if isinstance(codec, ZstdCodec | BloscCodec):
        kind = _Zstd if isinstance(codec, ZstdCodec) else _Blosc
        checked: Codec = kind.from_dict(codec.to_dict())
        object.__setattr__(checked, "where", where)
        return checked
    return codec


def _decoded(decode: Decode, stored: Buffer, spec: ArraySpec, where: str) -> Buffer:
    try:
        data = decode(stored, spec)
    except (RuntimeError, ValueError) as err:
        raise CorruptCheckpointError(f"{where} is not what was saved: a part of it does not decompress: {err}") from err
    nbytes = math.prod(spec.shape) * spec.dtype.to_native_dtype().itemsize
    if len(data) != nbytes:
        raise CorruptCheckpointError(
            f"{where} is not what was saved: a part of it decompresses to {len(data)} bytes, expected {nbytes}"
        )
    return data


class _Zstd(ZstdCodec):
    where = ""

    def _decode_sync(self, chunk_bytes: Buffer, chunk_spec: ArraySpec) -> Buffer:
        return _decoded(super()._decode_sync, chunk_bytes, chunk_spec, self.where)


class _Blosc(BloscCodec):
    where = ""

    def _decode_sync(self, chunk_bytes: Buffer, chunk_spec: ArraySpec) -> Buffer:
        return _decoded(super()._decode_sync, chunk_bytes, chunk_spec, self.where)
