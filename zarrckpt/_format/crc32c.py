"""CRC-32C (Castagnoli), the checksum of every stored byte."""

from __future__ import annotations

from typing import Any

# It releases the GIL, so threads compute in parallel, and uses the CPU's instructions for CRC. It was measured at two
# to four times the speed of google_crc32c, which keeps the GIL.
from awscrt.checksums import crc32c as _crc32c  # type: ignore[import-untyped]


def crc32c(data: Any, before: int = 0) -> int:
    """Return the checksum of a contiguous buffer. ``before`` is the checksum of the bytes in front of it."""
    return int(_crc32c(data, before))
