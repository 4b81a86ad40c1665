"""Compression by Zarr's own codecs: the option of a save, the codec in a node document, bytes in and out.

What is compressed at once is a subchunk (or a chunk without any). Errors name the option or the codec; callers, who
know it, name the array.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

from zarrckpt._format.wire import record

if TYPE_CHECKING:
    import numpy as np

    Bytes = np.ndarray[Any, np.dtype[np.uint8]]
    """Contiguous bytes, one dimension."""

CompressionOption = str | Mapping[str, Any] | None
"""What a caller of a save gives: None, a codec's name, or a mapping with the name and options."""

MAX_BYTES = 2**31 - 17
"""The longest data that blosc takes. Longer data is stored as it is; so stored sizes fit into 32 bits."""

_HINT = "None, 'zstd', 'blosc', or a mapping such as {'name': 'zstd', 'level': 3}"
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_BLOSC_HEADER = 16


class DecodeError(ValueError):
    """Stored bytes that do not decode to exactly as many as there should be."""


def most_stored(nbytes: int) -> int:
    """The size that ``nbytes`` of data have at most when compressed: both codecs promise less."""
    return nbytes + nbytes // 256 + 64


@record
@dataclass(frozen=True)
class Zstd:
    """Zarr's ``zstd`` codec: one Zstandard frame that names its content size.

    The default level is the fastest that gains anything: on weights and Adam's moments levels up to 9 gain no more.
    """

    level: int = 1
    checksum: bool = False
    name: ClassVar[str] = "zstd"

    def __post_init__(self) -> None:
        _check_int("zstd", "level", self.level, -131072, 22)
        if not isinstance(self.checksum, bool):
            raise TypeError(f"compression 'zstd': checksum must be a bool, got {self.checksum!r}")

    def codec(self, itemsize: int) -> dict[str, Any]:
        """The codec as ``zarr.json`` spells it."""
        return {"name": self.name, "configuration": asdict(self)}

    def encode(self, data: Bytes, itemsize: int) -> bytes:
        """Compress. Releases the interpreter's lock."""
        from numcodecs import zstd

        return bytes(zstd.compress(data, self.level, self.checksum))

    def expect(self, stored: Bytes, nbytes: int) -> None:
        """Raise DecodeError where the stored bytes do not say of themselves that they are so many when decompressed."""
        size = _zstd_content_size(stored)
        if size != nbytes:
            raise DecodeError(f"they are a zstd frame of {size} bytes, expected {nbytes}")

    def decode(self, stored: Bytes, out: Bytes) -> None:
        """Fill ``out`` exactly. Releases the interpreter's lock. Raises DecodeError."""
        from numcodecs import zstd

        # The library takes less than fits without an error, and leaves the rest of the memory as it was.
        self.expect(stored, len(out))
        try:
            zstd.decompress(stored, out)
        except (RuntimeError, ValueError) as err:
            raise DecodeError(str(err)) from err


@record
@dataclass(frozen=True)
class Blosc:
    """Zarr's ``blosc`` codec: elements shuffled, then compressed in blocks.

    The defaults gain more than zstd alone on weights and Adam's moments, at twice its speed and more: bits of one
    significance lie together, and of those only sign and exponents repeat themselves.
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
        """The codec as ``zarr.json`` spells it; ``typesize`` is the stored element's."""
        return {"name": self.name, "configuration": {"typesize": itemsize, **asdict(self)}}

    def encode(self, data: Bytes, itemsize: int) -> bytes:
        """Compress. Releases the interpreter's lock."""
        shuffle = _SHUFFLES.index(self.shuffle)
        return bytes(_blosc().compress(data, self.cname.encode(), self.clevel, shuffle, self.blocksize, itemsize))

    def expect(self, stored: Bytes, nbytes: int) -> None:
        """Raise DecodeError where the stored bytes do not say of themselves that they are so many when decompressed."""
        head = bytes(stored[:_BLOSC_HEADER])
        size, whole = int.from_bytes(head[4:8], "little"), int.from_bytes(head[12:16], "little")
        if len(head) < _BLOSC_HEADER or whole != len(stored) or size != nbytes:
            raise DecodeError(
                f"their blosc header says {size} bytes from {whole}, expected {nbytes} from {len(stored)}"
            )

    def decode(self, stored: Bytes, out: Bytes) -> None:
        """Fill ``out`` exactly. Releases the interpreter's lock. Raises DecodeError."""
        # The library believes the header: it is not told how long the stored bytes are.
        self.expect(stored, len(out))
        try:
            _blosc().decompress(stored, out)
        except (RuntimeError, ValueError) as err:
            raise DecodeError(str(err)) from err


Compression = Zstd | Blosc

_CNAMES = ("blosclz", "lz4", "lz4hc", "zlib", "zstd")
_SHUFFLES = ("noshuffle", "shuffle", "bitshuffle")
"""In the order of their numbers in the blosc library."""
_KINDS: dict[str, type[Zstd] | type[Blosc]] = {kind.name: kind for kind in (Zstd, Blosc)}


def parse_option(option: CompressionOption) -> Compression | None:
    """A caller's ``compression``. Raises TypeError and ValueError that name what was found and what is expected."""
    if option is None:
        return None
    if not isinstance(option, str | Mapping):
        raise TypeError(f"compression must be {_HINT}; got {option!r} of type {type(option).__name__}")
    options = {"name": option} if isinstance(option, str) else {**option}
    kind = _kind(options.pop("name", None))
    if kind is None:
        raise ValueError(f"compression must be {_HINT}; got {option!r}")
    known = [field.name for field in fields(kind)]
    unknown = [key for key in options if key not in known]
    if unknown:
        raise ValueError(f"compression {kind.name!r} has no option {unknown[0]!r}; it has {', '.join(known)}")
    return kind(**options)


def parse_codec(codec: Any) -> Compression:
    """The compression that a codec of a node document is. Raises ValueError or TypeError for one that is not known."""
    name = codec.get("name") if isinstance(codec, Mapping) else None
    kind = _kind(name)
    if kind is None:
        raise ValueError(f"the codec {name!r:.40} is not known")
    configuration = codec.get("configuration")
    if not isinstance(configuration, Mapping):
        raise ValueError(f"the codec {name!r} has no configuration")
    return kind(**{field.name: configuration[field.name] for field in fields(kind) if field.name in configuration})


def _kind(name: Any) -> type[Zstd] | type[Blosc] | None:
    return _KINDS.get(name) if isinstance(name, str) else None


def _blosc() -> Any:
    """The blosc library, in its callers' threads only, as zarr-python sets it too: its own would be too many."""
    from numcodecs import blosc

    blosc.use_threads = False
    return blosc


def _check_int(codec: str, name: str, value: Any, least: int, most: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"compression {codec!r}: {name} must be an int, got {value!r}")
    if not least <= value <= most:
        raise ValueError(f"compression {codec!r}: {name} must be from {least} to {most}, got {value}")


def _check_choice(codec: str, name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"compression {codec!r}: {name} must be one of {', '.join(choices)}; got {value!r}")


def _zstd_content_size(stored: Bytes) -> int:
    """The content size that the header of a Zstandard frame names (RFC 8878, 3.1.1). Raises DecodeError.

    The library would also take what follows the frame: other frames, and bytes that it skips.
    """
    head = stored[:18].tobytes()
    if len(head) < 6 or head[:4] != _ZSTD_MAGIC:
        raise DecodeError("they are no zstd frame")
    has_window = not head[4] & 0x20
    width = (0 if has_window else 1, 2, 4, 8)[head[4] >> 6]
    begin = 5 + has_window + (0, 1, 2, 4)[head[4] & 3]
    if not width or len(head) < begin + width:
        raise DecodeError("they are a zstd frame that names no content size")
    end, last = begin + width, False
    while not last:
        block = int.from_bytes(stored[end : end + 3].tobytes(), "little")
        last = bool(block & 1) or end >= len(stored)
        # A block of type 1 is one byte, to be repeated.
        end += 3 + (1 if block >> 1 & 3 == 1 else block >> 3)
    end += 4 if head[4] & 4 else 0
    if end != len(stored):
        raise DecodeError(f"they are {len(stored)} bytes, and the zstd frame in them has {end}")
    return int.from_bytes(head[begin : begin + width], "little") + (256 if width == 2 else 0)
