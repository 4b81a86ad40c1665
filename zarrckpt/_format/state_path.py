"""Where an entry sits in the state dict that was saved."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

from zarrckpt._format.wire import record

DICT, LIST, ORDERED_DICT = "dict", "list", "OrderedDict"
CONTAINERS = (DICT, LIST, ORDERED_DICT)


RANKS = "ranks"
"""The key that takes the place of a rank's number where the tensors of several ranks are stacked in one entry."""

KEY_BITS = 512
"""Of an integer that is a key, at most: Python refuses to show some that are much longer."""

_NANS: dict[bytes, float] = {}


def is_key(value: object) -> bool:
    """Whether a value may be a key of a dict in a state: one that Python shows in the same way in every process."""
    if type(value) is str:
        return is_unicode(value)
    if type(value) is tuple:
        return all(map(is_key, value))
    return value is None or type(value) in (bool, float) or (type(value) is int and value.bit_length() <= KEY_BITS)


def is_unicode(text: str) -> bool:
    """Whether a text has a UTF-8 form: no lone surrogates."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def one_nan(key: Any) -> Any:
    """A key in which each NaN is one object: a dict finds a NaN by its identity, since it equals nothing."""
    if type(key) is tuple:
        return tuple(map(one_nan, key))
    return _NANS.setdefault(struct.pack(">d", key), key) if type(key) is float and key != key else key


class StatePath(tuple[str | int, ...]):
    """The path of one entry: DCP's own form (a tuple of strings, and integers for list positions) that also
    remembers the original keys and the containers, which DCP's form loses.

    ``keys`` are the original keys, one a level; ``containers`` names what holds each of them, one of CONTAINERS. Being
    a tuple, it passes through DCP's planners and its metadata as the path it is.
    """

    keys: tuple[object, ...]
    containers: tuple[str, ...]
    ranks: tuple[int, ...]
    """Those whose tensors the entry stacks along its first axis; none for most entries."""
    rank_at: int | None
    """The level of the key that is a rank's number: of what that rank keeps for itself, and of stacks of it."""

    def __new__(
        cls,
        keys: Sequence[object],
        containers: Sequence[str],
        ranks: Sequence[int] = (),
        rank_at: int | None = None,
    ) -> StatePath:
        parts = (
            key if container == LIST and isinstance(key, int) else str(key)
            for key, container in zip(keys, containers, strict=True)
        )
        path = super().__new__(cls, parts)
        path.keys, path.containers, path.ranks, path.rank_at = tuple(keys), tuple(containers), tuple(ranks), rank_at
        return path

    def __reduce__(self) -> tuple[object, ...]:
        return (StatePath, (self.keys, self.containers, self.ranks, self.rank_at))

    @property
    def fqn(self) -> str:
        """The flat name that DCP gives this entry."""
        return ".".join(map(str, self))

    def with_rank(self, rank: object) -> StatePath:
        """The path with another key in the place of the rank's number."""
        assert self.rank_at is not None
        keys = (*self.keys[: self.rank_at], rank, *self.keys[self.rank_at + 1 :])
        return StatePath(keys, self.containers, (), self.rank_at)

    @classmethod
    def of(cls, path: Sequence[str | int]) -> StatePath:
        """From DCP's form, or from any tuple of strings and list positions."""
        if isinstance(path, StatePath):
            return path
        return cls(path, [LIST if isinstance(part, int) else DICT for part in path])


def _fields(path: StatePath) -> tuple[object, ...]:
    """Take a path apart for a message: mostly texts alone, which are cheap to read."""
    return (",".join(path.containers), path.rank_at, path.ranks or None, *path.keys)


def _checked_path(containers: Any, rank_at: Any, ranks: Any, *keys: Any) -> StatePath:
    """Make a path of what another rank has sent. Raises an error if it is none."""
    held_by = containers.split(",") if containers else []
    if not (
        all(map(CONTAINERS.__contains__, held_by))
        and all(map(is_key, keys))
        and (rank_at is None or (type(rank_at) is int and 0 <= rank_at < len(keys)))
        and (ranks is None or (type(ranks) is tuple and all(type(rank) is int for rank in ranks)))
    ):
        raise ValueError("a path of another form")
    return StatePath(keys, held_by, ranks or (), rank_at)


record(StatePath, _fields, _checked_path)
