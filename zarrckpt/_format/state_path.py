"""The path of an entry in the saved state dict."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

from zarrckpt._format.wire import record

DICT, LIST, ORDERED_DICT = "dict", "list", "OrderedDict"
CONTAINERS = (DICT, LIST, ORDERED_DICT)


RANKS = "ranks"
"""The key instead of a rank's number, if one entry stacks the tensors of several ranks."""

KEY_BITS = 512
"""Maximum number of bits of an integer key. Python refuses to show some much larger integers."""

_NANS: dict[bytes, float] = {}


def is_key(value: object) -> bool:
    """Whether a value may be a key of a dict in a state. Such keys have the same text in every process."""
    if type(value) is str:
        return is_unicode(value)
    if type(value) is tuple:
        return all(map(is_key, value))
    return value is None or type(value) in (bool, float) or (type(value) is int and value.bit_length() <= KEY_BITS)


def is_unicode(text: str) -> bool:
    """Whether a text has a UTF-8 form, that is, no lone surrogates."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def with_shared_nans(key: Any) -> Any:
    """Return a key in which equal bits of a NaN are always the same object. Dicts find a NaN only by its identity."""
    if type(key) is tuple:
        return tuple(map(with_shared_nans, key))
    return _NANS.setdefault(struct.pack(">d", key), key) if type(key) is float and key != key else key


class StatePath(tuple[str | int, ...]):
    """The path of one entry: DCP's tuple of strings and list positions, with the original keys and containers.

    ``keys`` has the original key of each level. ``containers`` has the type of the container of each key, one of
    CONTAINERS. Because it is a tuple, DCP's planners and metadata accept it as their own path.
    """

    keys: tuple[object, ...]
    containers: tuple[str, ...]
    ranks: tuple[int, ...]
    """The ranks whose tensors the entry stacks along its first axis. Empty for most entries."""
    rank_at: int | None
    """The level of the key that is the number of a rank, for entries of one rank and stacks of them."""

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
        """The flat name of this entry in DCP."""
        return ".".join(map(str, self))

    def stem(self, depth: int) -> str:
        """Return the flat name of the container at a depth."""
        return ".".join(map(str, self[:depth]))

    def above(self, depth: int) -> StatePath:
        """Return the path of the container at a depth."""
        return StatePath(self.keys[:depth], self.containers[:depth])

    def with_rank(self, rank: object) -> StatePath:
        """Return the path with this key instead of the rank's number."""
        assert self.rank_at is not None
        keys = (*self.keys[: self.rank_at], rank, *self.keys[self.rank_at + 1 :])
        return StatePath(keys, self.containers, (), self.rank_at)

    @classmethod
    def of(cls, path: Sequence[str | int]) -> StatePath:
        """Return the path for DCP's path, or for any sequence of strings and list positions."""
        if isinstance(path, StatePath):
            return path
        return cls(path, [LIST if isinstance(part, int) else DICT for part in path])


def _fields(path: StatePath) -> tuple[object, ...]:
    """Return the fields of a path for a message. They are mostly strings, which are cheap to decode."""
    return (",".join(path.containers), path.rank_at, path.ranks or None, *path.keys)


def _checked_path(containers: Any, rank_at: Any, ranks: Any, *keys: Any) -> StatePath:
    """Return the path for the fields that another rank sent. Raises an error if they are not those of a path."""
    kinds = containers.split(",") if containers else []
    if not (
        all(map(CONTAINERS.__contains__, kinds))
        and all(map(is_key, keys))
        and (rank_at is None or (type(rank_at) is int and 0 <= rank_at < len(keys)))
        and (ranks is None or (type(ranks) is tuple and all(type(rank) is int for rank in ranks)))
    ):
        raise ValueError("malformed path")
    return StatePath(keys, kinds, ranks or (), rank_at)


record(StatePath, _fields, _checked_path)
