"""The connections on which the ranks of one DCP call hand each other pieces: DCP's own collectives carry no tensors."""

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
from zarrckpt._ranks.errors import PeerLost
from zarrckpt._ranks.group import global_rank
from zarrckpt._ranks.links import c10d, cloned, default_store, gloo_group, hang_up
from zarrckpt._ranks.pieces import Pieces


@dataclass(frozen=True)
class ChannelName:
    """What the coordinator tells all ranks with their plans: which connections, and whose."""

    name: str
    members: tuple[int, ...]
    """The ranks by their numbers in the default process group, in the order of the group that saves or loads."""

    @classmethod
    def new(cls, members: tuple[int, ...]) -> ChannelName:
        """A name that was never used."""
        return cls(f"zarrckpt/dcp/{uuid.uuid4().hex}", members)


class _Group:
    """A private gloo group of all members, as :class:`Pieces` uses it. Collective over them. Raises PeerLost."""

    def __init__(self, name: ChannelName) -> None:
        self._rank, self._size = name.members.index(global_rank()), len(name.members)
        # A clone: a blocked request must not hold the connection that training uses.
        store = c10d.PrefixStore(name.name, cloned(default_store()))
        try:
            # Connected at once: no mesh tells here of a rank that never comes.
            self._group: Any = gloo_group(store, self._rank, self._size, lazy=False)
            # Nobody hangs up before all have joined: whoever still connects to others would fail, and they would wait
            # for it until the timeout.
            if store.add("joined", 1) == self._size:
                store.set("complete", "")
            store.wait(["complete"], links.CONNECT_TIMEOUT)
        except RuntimeError as err:
            raise PeerLost(f"the ranks {list(name.members)} were not connected: {str(err).splitlines()[0]}") from None

    def piece(self, way: str, peer: int, data: Any) -> Any:
        """Begin to send or receive a piece."""
        return getattr(self._group, way)([torch.from_numpy(data)], peer, 0)

    def close(self) -> None:
        """Hang up: every rank that waits for this one is told."""
        hang_up(self._group, [peer for peer in range(self._size) if peer != self._rank])


_in_use: list[_Group] = []
"""Of the last calls: who hangs up early cuts off what is still on its way to others."""


_parent_groups: list[_Group] = []
"""Of the process that this one was forked from: gloo's threads do not exist here, so nothing is closed."""


def _forget_groups() -> None:
    _parent_groups.extend(_in_use)
    _in_use.clear()


os.register_at_fork(after_in_child=_forget_groups)


@atexit.register
def forget_channels() -> None:
    """Let go of all connections: gloo's threads must end before the interpreter does."""
    _in_use.clear()


@contextlib.contextmanager
def pieces_connected(name: ChannelName | None) -> Iterator[Pieces | None]:
    """The connections for a block, if there are any; a rank that fails in it hangs up. Raises PeerLost."""
    if name is None:
        yield None
        return
    group = _Group(name)
    _in_use[:] = [*_in_use[-1:], group]
    pieces = Pieces(cast(Any, group), lambda: None)
    try:
        yield pieces
    except BaseException:
        pieces.close()
        group.close()
        raise
