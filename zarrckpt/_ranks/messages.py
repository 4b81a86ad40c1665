"""Messages between ranks that consist of parts and a checksum, which the receiver checks.

Sender and receiver have the same list of parts from the plan. Without the checksum, a faulty network card or driver
could alter saved or loaded data silently.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import numpy as np

from zarrckpt._format.chunk_layout import CRC_BYTES, RawArray, crc_bytes, stored_crc
from zarrckpt._format.crc32c import crc32c


class PendingMessage(Protocol):
    """A message in transfer."""

    def wait(self) -> Any:
        """Wait until the message has arrived and return it, or until sent memory can be used again.

        Raises LostPeerError.
        """


class Channel(Protocol):
    """Sends messages between ranks, which are given by position. Messages between two ranks keep their order."""

    def send(self, to: int, array: Any) -> PendingMessage:
        """Begin to send."""

    def recv(self, source: int, nbytes: int) -> PendingMessage:
        """Begin to receive ``nbytes`` bytes."""


def new_message(nbytes: int) -> RawArray:
    """Return memory for ``nbytes`` bytes and their checksum."""
    return np.empty(nbytes + CRC_BYTES, np.uint8)


def seal(message: RawArray) -> RawArray:
    """Write the checksum to the end of a message, and return the message."""
    message[-CRC_BYTES:] = np.frombuffer(crc_bytes(crc32c(message[:-CRC_BYTES])), np.uint8)
    return message


def is_intact(message: RawArray) -> bool:
    """Whether the checksum of a message is right."""
    return stored_crc(message) is not None


def message_bytes(parts: Iterable[int]) -> int:
    """Return the size of a message whose parts have these numbers of bytes."""
    return sum(parts) + CRC_BYTES


def cut(message: RawArray, parts: Iterable[int]) -> Iterator[RawArray]:
    """Yield views of the parts of a message, from their numbers of bytes."""
    for begin, end in itertools.pairwise(itertools.accumulate(parts, initial=0)):
        yield message[begin:end]
