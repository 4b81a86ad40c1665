"""Compression by Zarr's own codecs: the option of a save, the codec in a node document, encoding and decoding.

Each subchunk is compressed separately, or the chunk if it has no subchunks. Errors name the option or the codec. The
callers add the name of the array.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

from zarrckpt._format.wire import record

if TYPE_CHECKING:
    import numpy as np

    Bytes = np.ndarray[Any, np.dtype[np.uint8]]
    """Contiguous bytes in one dimension."""

CompressionOption = str | Mapping[str, Any] | None
"""The ``compression`` of a save: None, the name of a codec, or a mapping with the name and options."""

MAX_BYTES = 2**31 - 17
"""Maximum number of bytes that blosc accepts. Larger subchunks are not compressed. So stored sizes fit in 32 bits."""

_HINT = "None, 'zstd', 'blosc', or a mapping such as {'name': 'zstd', 'level': 3}"
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_BLOSC_HEADER = 16


class DecodeError(ValueError):
    """Raised for stored bytes that do not decode to exactly the expected number of bytes."""


def max_compressed_bytes(nbytes: int) -> int:
    """Return an upper bound for the compressed size of ``nbytes`` bytes. Both codecs guarantee less."""
    return nbytes + nbytes // 256 + 64


@record
@dataclass(frozen=True)
class Zstd:
    """Zarr's ``zstd`` codec: one Zstandard frame whose header has the content size.

    The default level is the fastest. On weights and Adam's moments, levels up to 9 do not compress better.
    """

    level: int = 1
    checksum: bool = False
    name: ClassVar[str] = "zstd"

    def __post_init__(self) -> None:
        _check_int("zstd", "level", self.level, -131072, 22)
        if not isinstance(self.checksum, bool):
            raise TypeError(f"compression 'zstd': checksum must be a bool, got {self.checksum!r}")

    def codec(self, itemsize: int) -> dict[str, Any]:
        """Return the codec as in ``zarr.json``."""
        return {"name": self.name, "configuration": asdict(self)}

    def encode(self, data: Bytes, itemsize: int) -> bytes:
        """Compress. Releases the GIL."""
        from numcodecs import zstd

        return bytes(zstd.compress(data, self.level, self.checksum))

    def expect(self, stored: Bytes, nbytes: int) -> None:
        """Raise DecodeError if the header of the stored bytes has another decompressed size than ``nbytes``."""
        size = _zstd_content_size(stored)
        if size != nbytes:
            raise DecodeError(f"the zstd frame has a content size of {size} bytes, expected {nbytes}")

    def decode(self, stored: Bytes, out: Bytes) -> None:
        """Decompress to ``out``, which must have the exact size. Releases the GIL. Raises DecodeError."""
        from numcodecs import zstd

        # For a shorter content the library raises no error, and does not fill the rest of the memory.
        self.expect(stored, len(out))
        try:
            zstd.decompress(stored, out)
        except (RuntimeError, ValueError) as err:
            raise DecodeError(str(err)) from err


@record
@dataclass(frozen=True)
class Blosc:
    """Zarr's ``blosc`` codec: elements are shuffled, then compressed in blocks.

    On weights and Adam's moments, the defaults compress better than zstd alone, at more than twice its speed. The
    bit shuffle puts bits of the same significance together. Only signs and exponents have repetitions.
    """

    cname: str = "lz4"
    clevel: int = 5
    shuffle: str = "bitshuffle"
    blocksize: int = 0
    name: ClassVar[str] = "blosc"

    def __post_init__(self) -> None:
        _check_choice("blosc", "cname", self.cname, _CNAMES)
        _check_int("blosc", "clevel", self.clevel, 0, 9)
        _check_choice("blosc", "shuffle", self.shuffle, _SHUFFLES)
        _check_int("blosc", "blocksize", self.blocksize, 0, MAX_BYTES)

    def codec(self, itemsize: int) -> dict[str, Any]:
        """Return the codec as in ``zarr.json``. ``typesize`` is the size of the stored element."""
        return {"name": self.name, "configuration": {"typesize": itemsize, **asdict(self)}}

    def encode(self, data: Bytes, itemsize: int) -> bytes:
        """Compress. Releases the GIL."""
        shuffle = _SHUFFLES.index(self.shuffle)
        return bytes(_blosc().compress(data, self.cname.encode(), self.clevel, shuffle, self.blocksize, itemsize))

    def expect(self, stored: Bytes, nbytes: int) -> None:
        """Raise DecodeError if the header of the stored bytes has another decompressed size than ``nbytes``."""
        head = bytes(stored[:_BLOSC_HEADER])
        size, whole = int.from_bytes(head[4:8], "little"), int.from_bytes(head[12:16], "little")
        if len(head) < _BLOSC_HEADER or whole != len(stored) or size != nbytes:
            raise DecodeError(
                f"the blosc header has the sizes {size} and {whole} (compressed), expected {nbytes} and {len(stored)}"
            )

    def decode(self, stored: Bytes, out: Bytes) -> None:
        """Decompress to ``out``, which must have the exact size. Releases the GIL. Raises DecodeError."""
        # The library trusts the sizes in the header, because it does not get the length of the stored bytes.
        self.expect(stored, len(out))
        try:
            _blosc().decompress(stored, out)
        except (RuntimeError, ValueError) as err:
            raise DecodeError(str(err)) from err


Compression = Zstd | Blosc

_CNAMES = ("blosclz", "lz4", "lz4hc", "zlib", "zstd")
_SHUFFLES = ("noshuffle", "shuffle", "bitshuffle")
"""The order is that of the numbers in the blosc library."""
_KINDS: dict[str, type[Zstd] | type[Blosc]] = {kind.name: kind for kind in (Zstd, Blosc)}


def parse_option(option: CompressionOption) -> Compression | None:
    """Return the compression for a caller's option. The TypeError or ValueError gives the found and expected option."""
    if option is None:
        return None
    if not isinstance(option, str | Mapping):
        raise TypeError(f"compression must be {_HINT}, got {option!r} of type {type(option).__name__}")
    options = {"name": option} if isinstance(option, str) else {**option}
    kind = _kind(options.pop("name", None))
    if kind is None:
        raise ValueError(f"compression must be {_HINT}, got {option!r}")
    known = [field.name for field in fields(kind)]
    unknown = [key for key in options if key not in known]
    if unknown:
        raise ValueError(f"compression {kind.name!r} has no option {unknown[0]!r}. Its options are {', '.join(known)}")
    return kind(**options)


def parse_codec(codec: Any) -> Compression:
    """Return the compression for a codec of a node document. Raises ValueError or TypeError for an unknown codec."""
    name = codec.get("name") if isinstance(codec, Mapping) else None
    kind = _kind(name)
    if kind is None:
        raise ValueError(f"unknown codec {name!r:.40}")
    configuration = codec.get("configuration")
    if not isinstance(configuration, Mapping):
        raise ValueError(f"the codec {name!r} has no configuration")
    return kind(**{field.name: configuration[field.name] for field in fields(kind) if field.name in configuration})


def _kind(name: Any) -> type[Zstd] | type[Blosc] | None:
    return _KINDS.get(name) if isinstance(name, str) else None


def _blosc() -> Any:
    """Return the blosc library, set to run in the calling thread only, as in zarr-python.

    The callers are many threads already.
    """
    from numcodecs import blosc

    blosc.use_threads = False
    return blosc


def _check_int(codec: str, name: str, value: Any, minimum: int, maximum: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"compression {codec!r}: {name} must be an int, got {value!r}")
    if not minimum <= value <= maximum:
        raise ValueError(f"compression {codec!r}: {name} must be from {minimum} to {maximum}, got {value}")


def _check_choice(codec: str, name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"compression {codec!r}: {name} must be one of {', '.join(choices)}, got {value!r}")


def _zstd_content_size(stored: Bytes) -> int:
    """Return the content size in the header of a Zstandard frame (RFC 8878, 3.1.1). Raises DecodeError.

    Also refuses bytes after the frame, because the library would accept other frames and skippable bytes there.
    """
    head = stored[:18].tobytes()
    if len(head) < 6 or head[:4] != _ZSTD_MAGIC:
        raise DecodeError("not a zstd frame")
    has_window = not head[4] & 0x20
    width = (0 if has_window else 1, 2, 4, 8)[head[4] >> 6]
    begin = 5 + has_window + (0, 1, 2, 4)[head[4] & 3]
    if not width or len(head) < begin + width:
        raise DecodeError("the zstd frame has no content size")
    end, last = begin + width, False
    while not last:
        block = int.from_bytes(stored[end : end + 3].tobytes(), "little")
        last = bool(block & 1) or end >= len(stored)
        # A block of type 1 (RLE) stores one byte.
        end += 3 + (1 if block >> 1 & 3 == 1 else block >> 3)
    end += 4 if head[4] & 4 else 0
    if end != len(stored):
        raise DecodeError(f"the zstd frame has {end} bytes, but {len(stored)} bytes are stored")
    return int.from_bytes(head[begin : begin + width], "little") + (256 if width == 2 else 0)
