"""Connections over which the ranks of one DCP call send pieces, because DCP's collectives carry no tensors."""

from __future__ import annotations

import atexit
import contextlib
import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch

from zarrckpt._ranks import links
from zarrckpt._ranks.errors import LostPeerError
from zarrckpt._ranks.group import global_rank
from zarrckpt._ranks.links import c10d, clone_store, close_connections, create_gloo_group, default_store
from zarrckpt._ranks.pieces import MessageChannel


@dataclass(frozen=True)
class ChannelName:
    """The name and the members of the connections, which the coordinator sends to all ranks with their plans."""

    name: str
    members: tuple[int, ...]
    """The ranks in the default process group, in the order of the group that saves or loads."""

    @classmethod
    def new(cls, members: tuple[int, ...]) -> ChannelName:
        """Return a unique name."""
        return cls(f"zarrckpt/dcp/{uuid.uuid4().hex}", members)


class _Group:
    """A private gloo group of all members for :class:`MessageChannel`. All members create it. Raises LostPeerError."""

    def __init__(self, name: ChannelName) -> None:
        self._rank, self._size = name.members.index(global_rank()), len(name.members)
        # A clone of the store, so that a blocked request does not block the connection that training uses.
        store = c10d.PrefixStore(name.name, clone_store(default_store()))
        try:
            # Connect at once, because no mesh detects a missing rank here.
            self._group: Any = create_gloo_group(store, self._rank, self._size, lazy=False)
            # No rank closes its connections before all have joined. Otherwise a rank that still connects would fail,
            # and the others would wait for it until the timeout.
            if store.add("joined", 1) == self._size:
                store.set("complete", "")
            store.wait(["complete"], links.CONNECT_TIMEOUT)
        except RuntimeError as err:
            raise LostPeerError(
                f"ranks {list(name.members)} could not be connected: {str(err).splitlines()[0]}"
            ) from None

    def start_piece(self, way: str, peer: int, data: Any) -> Any:
        """Begin to send or receive a piece."""
        return getattr(self._group, way)([torch.from_numpy(data)], peer, 0)

    def close(self) -> None:
        """Close the connections. Ranks that wait for this one get an error."""
        close_connections(self._group, [peer for peer in range(self._size) if peer != self._rank])


_in_use: list[_Group] = []
"""The groups of the last calls. They are closed late, because closing cuts off pieces that are still being sent."""


_parent_groups: list[_Group] = []
"""The groups of the parent process after a fork. gloo's threads do not exist here, so they cannot be closed."""


def _forget_groups() -> None:
    _parent_groups.extend(_in_use)
    _in_use.clear()


os.register_at_fork(after_in_child=_forget_groups)


@atexit.register
def forget_channels() -> None:
    """Drop all connections, because gloo's threads must end before the interpreter does."""
    _in_use.clear()


@contextlib.contextmanager
def connect_channel(name: ChannelName | None) -> Iterator[MessageChannel | None]:
    """Connect the ranks for a block, or yield None without a name. An error closes the connections.

    Raises LostPeerError.
    """
    if name is None:
        yield None
        return
    group = _Group(name)
    _in_use[:] = [*_in_use[-1:], group]
    channel = MessageChannel(cast(Any, group), lambda: None)
    try:
        yield channel
    except BaseException:
        channel.close()
        group.close()
        raise
