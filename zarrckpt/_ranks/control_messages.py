"""Control messages between ranks: kinds, types of bodies, and encoding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from zarrckpt._errors import CheckpointError
from zarrckpt._format.wire import decode, encode, type_check
from zarrckpt._ranks.errors import Failure, escape_failure

FAILED, STOPPED, RESULT = "failed", "stopped", "result"
Item = tuple[str, Any]
"""The outcome of one rank in a round: its encoded result, its failure, or that it stopped."""

Answer = tuple[str, Any, bool]
"""The answer of a round: RESULT with encoded bytes, or FAILED with failures; and whether a rank used pieces."""

UNREADABLE = "unreadable"
"""The kind of a message that cannot be decoded, with the reason as its body. Never sent."""

_Failed = Literal["failed"]
_Stopped = Literal["stopped"]
_Result = Literal["result"]
_is_body: dict[str, Callable[[Any], bool]] = {
    "abort": type_check(tuple[list[Failure], str | None]),
    "answer": type_check(tuple[_Failed, list[Failure], bool] | tuple[_Result, bytes, bool]),
    "heartbeat": type_check(list[int]),
    "error": type_check(Failure),
    "results": type_check(
        tuple[
            dict[int, tuple[_Failed, Failure] | tuple[_Stopped, None] | tuple[_Result, bytes]],
            dict[str, list[int]],
            bool,
        ]
    ),
    "hello": type_check(None),
    "rejoin": type_check(None),
    "stop": type_check(None),
}
"""Checks of the bodies' types, by kind of message."""


class Message(NamedTuple):
    """One control message."""

    kind: str
    call: int
    round: int
    body: Any


def encode_message(message: Message) -> bytes:
    """Return the bytes of a message. Raises CheckpointError if the message is too long."""
    return encode(tuple(message))


def decode_message(data: bytes) -> Message:
    """Return the message of a peer, with texts for display. Raises CheckpointError for bytes that are no message."""
    kind, call, number, body = decode(data, tuple[str, int, int, Any])
    if kind not in _is_body or not _is_body[kind](body):
        raise CheckpointError(f"not a message of zarrckpt (kind {kind!r:.100} with another body)")
    if kind == "abort":
        body = (_received(body[0]), body[1])
    elif kind == "error":
        body = escape_failure(body)
    elif kind == "answer" and body[0] == FAILED:
        body = (FAILED, _received(body[1]), body[2])
    elif kind == "results":
        items = {
            position: (outcome, escape_failure(content) if outcome == FAILED else content)
            for position, (outcome, content) in body[0].items()
        }
        body = (items, *body[1:])
    return Message(kind, call, number, body)


def _received(failures: list[Failure]) -> list[Failure]:
    if not failures:
        raise CheckpointError("not a message of zarrckpt (a failure without a rank)")
    return [*map(escape_failure, failures)]
