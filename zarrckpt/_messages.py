"""Messages that are made of parts: sender and receiver have the same list of them, from the plan."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from zarrckpt._codec import RawArray

Part = tuple[int, int]
"""(the rank that it comes from, its bytes)."""


def lengths(parts: Iterable[Part]) -> dict[int, int]:
    """The bytes of each sender's message."""
    total: dict[int, int] = {}
    for source, nbytes in parts:
        total[source] = total.get(source, 0) + nbytes
    return total


def cut(messages: Mapping[int, RawArray], parts: Iterable[Part]) -> Iterator[RawArray]:
    """The parts of messages, in the order of their list: views."""
    at = dict.fromkeys(messages, 0)
    for source, nbytes in parts:
        begin, at[source] = at[source], at[source] + nbytes
        yield messages[source][begin : at[source]]
