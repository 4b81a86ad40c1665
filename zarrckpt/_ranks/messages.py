"""Messages between ranks: made of parts, with a checksum at the end that the receiver checks.

Sender and receiver have the same list of parts, from the plan. Without the checksum, a network card or a driver that is
at fault would alter what is saved, or loaded, unnoticed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import numpy as np

from zarrckpt._format.chunk_layout import CRC_BYTES, RawArray, crc_bytes, stored_crc
from zarrckpt._format.crc32c import crc32c


class Pending(Protocol):
    """A message on its way."""

    def wait(self) -> Any:
        """What has arrived, once it has; or wait until memory that is sent may be used again. Raises PeerLost."""


class Channel(Protocol):
    """Carries messages between ranks, given by their positions; those between two ranks keep their order."""

    def send(self, to: int, array: Any) -> Pending:
        """Begin to send."""

    def recv(self, source: int, nbytes: int) -> Pending:
        """Begin to receive so many bytes."""


def new_message(nbytes: int) -> RawArray:
    """Memory for so many bytes and their checksum."""
    return np.empty(nbytes + CRC_BYTES, np.uint8)


def seal(message: RawArray) -> RawArray:
    """Put the checksum of what was written into a message at its end; return the message."""
    message[-CRC_BYTES:] = np.frombuffer(crc_bytes(crc32c(message[:-CRC_BYTES])), np.uint8)
    return message


def is_intact(message: RawArray) -> bool:
    """Whether a message has arrived as it was sealed."""
    return stored_crc(message) is not None


def message_bytes(parts: Iterable[int]) -> int:
    """The size of a message with parts of so many bytes."""
    return sum(parts) + CRC_BYTES


def cut(message: RawArray, parts: Iterable[int]) -> Iterator[RawArray]:
    """The parts of a message, by their numbers of bytes: views."""
    for begin, end in itertools.pairwise(itertools.accumulate(parts, initial=0)):
        yield message[begin:end]
