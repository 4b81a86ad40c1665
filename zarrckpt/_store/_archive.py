"""The entries of an archive that several ranks write: their planned places, and those that one rank has written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

SUFFIX = ".zarr.zip"
"""A url that ends with this is that of an archive, one file, instead of a folder."""


def is_archive_name(name: str) -> bool:
    """Whether a name, the last part of a url, is that of an archive."""
    return name.endswith(SUFFIX) and name != SUFFIX


class Place(NamedTuple):
    """The planned place of an entry: the byte offset of its local header, and the size of its data."""

    header_offset: int
    size: int


Places = Mapping[str, Place]
"""The planned places of entries, by key."""


@dataclass(frozen=True)
class ArchivePart:
    """The entries that one rank has written to an archive."""

    keys: tuple[str, ...]
    """The keys of planned entries."""
    crcs: np.ndarray[Any, Any]
    """The CRC-32 of each of them (uint32)."""
    name: str
    """A part of the names of the rank's scratch files, 32 hexadecimal digits."""
    scratch_keys: tuple[str, ...]
    """The keys of the entries in scratch files."""
    scratch: np.ndarray[Any, Any]
    """For each of these a row (int64): number of the scratch file, byte offset, size, CRC-32."""
