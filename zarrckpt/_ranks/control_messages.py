"""Control messages between ranks: kinds, types of bodies, and encoding."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from zarrckpt._errors import CheckpointError
from zarrckpt._format.wire import decode, encode, type_check
from zarrckpt._ranks.errors import Failure

FAILED, STOPPED, RESULT = "failed", "stopped", "result"
Item = tuple[str, Any]
"""The outcome of one rank in a round: its encoded result, its failure, or that it stopped."""

Answer = tuple[str, Any, bool]
"""The answer of a round: RESULT with encoded bytes, or FAILED with failures; and whether a rank used pieces."""

UNREADABLE = "unreadable"
"""The kind of a message that cannot be decoded, with the reason as its body. Never sent."""

_SentItem = tuple[Literal["failed"], Failure] | tuple[Literal["stopped"], None] | tuple[Literal["result"], bytes]
_SentAnswer = tuple[Literal["failed"], list[Failure], bool] | tuple[Literal["result"], bytes, bool]
_is_message = type_check(
    tuple[Literal["abort"], int, int, tuple[list[Failure], str | None]]
    | tuple[Literal["answer"], int, int, _SentAnswer]
    | tuple[Literal["error"], int, int, Failure]
    | tuple[Literal["heartbeat"], int, int, list[int]]
    | tuple[Literal["results"], int, int, tuple[dict[int, _SentItem], dict[str, list[int]], bool]]
    | tuple[Literal["hello", "rejoin", "stop"], int, int, None]
)


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
    message = Message(*decode(data, _is_message))
    if message.kind in ("abort", "answer") and [] in message.body:
        raise CheckpointError("not a message of zarrckpt (a failure without a rank)")
    return message
