"""CRC-64/NVME, the second digest of a chunk. Two equal chunks have 96 equal bits with it and the crc32c."""

from __future__ import annotations

from typing import Any

from awscrt.checksums import crc64nvme as _crc64nvme  # type: ignore[import-untyped]


def crc64(data: Any, before: int = 0) -> int:
    """Return the CRC-64/NVME of a contiguous buffer. ``before`` is the digest of the bytes in front of it."""
    return int(_crc64nvme(data, before))
