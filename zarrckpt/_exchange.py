"""A private mesh between the ranks of one save or load, on which they hand each other pieces of chunks.

Never the user's group: one receive that times out closes every pair of a gloo group, on all ranks, and training's next
collective would fail. A mesh is made from the default group's store, and kept between saves.

A rank that fails closes its pairs, so that whoever waits for it knows at once instead of after a timeout.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import uuid
import weakref
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.utils import _DistWrapper

from zarrckpt._chunk_layout import RawArray
from zarrckpt._distributed import global_rank

JOIN_TIMEOUT = timedelta(seconds=60)
"""All ranks begin to join as soon as the plan reaches them, so one that takes this long is gone."""

SWAP_TIMEOUT = timedelta(minutes=30)
"""A peer may be held up by its store's retries. One that dies is noticed at once, by its closed connections."""

_POLL_SECONDS = 0.05


class PeerLost(Exception):
    """Another rank failed, or is gone, while this one was to hear from it. Never raised to users."""


@dataclass(frozen=True)
class MeshId:
    """Which mesh a save or load uses: its members by global rank, in the order of the process group, and its name."""

    members: tuple[int, ...]
    name: str


class Channel:
    """One rank's end of a mesh. Made by all members at the same time; used by one save or load at a time.

    Who has it, has it alone: :func:`take_idle` gives it to nobody else until it is released.
    """

    def __init__(self, mesh: MeshId) -> None:
        """Collective over the members. Raises PeerLost where not all of them join within JOIN_TIMEOUT."""
        self.mesh = mesh
        self._world = weakref.ref(dist.group.WORLD) if dist.group.WORLD is not None else None
        self._pid = os.getpid()
        self.rank = mesh.members.index(global_rank())
        """This process's position in the mesh."""
        # A clone: a blocked request must not hold the connection that training uses.
        store: Any = dist.distributed_c10d._get_default_store()
        prefixed = torch._C._distributed_c10d.PrefixStore(f"zarrckpt/{mesh.name}", store.clone())
        try:
            # torch's type stubs lack most of this class.
            self._group: Any = dist.ProcessGroupGloo(prefixed, self.rank, len(mesh.members), JOIN_TIMEOUT)
            # Nobody hangs up before all have joined: whoever still connects to others would fail, and they would wait
            # for it until the timeout.
            if prefixed.add("zarrckpt-joined", 1) == len(mesh.members):
                prefixed.set("zarrckpt-complete", "")
            prefixed.wait(["zarrckpt-complete"], JOIN_TIMEOUT)
        except RuntimeError as err:
            raise PeerLost(f"the mesh of ranks {list(mesh.members)} was not made: {err}") from None

    @property
    def usable(self) -> bool:
        """Whether it was made by this process within the process group that is in use now."""
        return self._pid == os.getpid() and self._world is not None and self._world() is dist.group.WORLD

    def swap(
        self, sends: Sequence[tuple[int, RawArray]], receives: Sequence[tuple[int, int]], tag: int
    ) -> list[RawArray]:
        """Send messages (bytes), given as (rank, message), and receive some of known lengths, given as (rank, length).

        Ranks are positions in the mesh; messages between two of them keep their order. Everything is posted before
        anything is waited for, so no order of messages can block. Raises PeerLost.
        """
        received = [np.empty(nbytes, np.uint8) for _, nbytes in receives]
        works: list[Any] = []
        try:
            for (source, _), data in zip(receives, received, strict=True):
                works.append(self._group.recv([torch.from_numpy(data)], source, tag))
            for to, data in sends:
                works.append(self._group.send([torch.from_numpy(data)], to, tag))
            while works:
                works.pop().wait(SWAP_TIMEOUT)
        except RuntimeError as err:
            # Before the memory that they point to goes.
            works.clear()
            raise PeerLost(str(err).splitlines()[0]) from None
        return received

    def release(self) -> None:
        """Keep the channel for the next save or load of the same members."""
        with _lock:
            old = _idle.get(self.mesh.members)
            _idle[self.mesh.members] = self
        if old is not None and old is not self:
            old.close()

    def close(self) -> None:
        """Leave the mesh for good: every member that waits for this rank gets PeerLost at once."""
        with _lock:
            if _idle.get(self.mesh.members) is self:
                del _idle[self.mesh.members]
        if self._pid != os.getpid():
            return
        # gloo has no call for it, but a receive that times out closes all pairs of its group. One from a peer that has
        # left already fails before that, and leaves the other pairs open.
        for peer in range(len(self.mesh.members)):
            if peer != self.rank:
                with contextlib.suppress(RuntimeError):
                    self._group.recv([torch.zeros(1)], peer, 2**30).wait(timedelta(milliseconds=1))


_idle: dict[tuple[int, ...], Channel] = {}
_lock = threading.Lock()


@atexit.register
def _forget_all() -> None:
    # gloo's threads must end before the interpreter does.
    _idle.clear()


def take_idle() -> dict[tuple[int, ...], Channel]:
    """The channels that this rank could use again, by their members: the caller's alone until it releases them.

    So another save or load of this process, in another thread, can neither use nor close what this one has offered.
    """
    with _lock:
        return {members: _idle.pop(members) for members, channel in [*_idle.items()] if channel.usable}


def choose(members: tuple[int, ...], idle: Sequence[Mapping[tuple[int, ...], str]]) -> MeshId:
    """The mesh for a save or load: one that all ranks still have, else a new one. Called by the coordinator."""
    names = {known.get(members) for known in idle}
    name = names.pop() if len(names) == 1 else None
    return MeshId(members, name or uuid.uuid4().hex)


def join(mesh: MeshId, kept: Channel | None) -> Channel:
    """This rank's end of a mesh: the one kept from an earlier save, or one made now. Raises PeerLost."""
    if kept is not None and kept.mesh == mesh:
        return kept
    if kept is not None:
        # Some other rank has left it, so it is of no more use.
        kept.close()
    return Channel(mesh)


class Joining:
    """A channel that is being joined in the background, from the moment that the plan reached this rank.

    The others will wait for this rank to take part. If its writer or reader is never called, since something failed
    before, they must know it: DCP then gathers errors in the thread that the plan came to, so this is watched for.
    """

    def __init__(self, mesh: MeshId, kept: Channel | None) -> None:
        self._caller = threading.get_ident()
        self._entered = threading.Event()
        self._channel: Future[Channel] = Future()
        threading.Thread(target=self._join, args=(mesh, kept), name="zarrckpt-join", daemon=True).start()

    def _join(self, mesh: MeshId, kept: Channel | None) -> None:
        try:
            channel = join(mesh, kept)
        except Exception as err:
            self._channel.set_exception(err)
            return
        self._channel.set_result(channel)
        while not self._entered.wait(_POLL_SECONDS):
            if _gathers(self._caller):
                channel.close()
                return

    def enter(self) -> Channel:
        """The channel, in the thread that the plan came to. Raises PeerLost."""
        self._entered.set()
        return self._channel.result()

    def abandon(self) -> None:
        """Stop watching: the save or load that this belonged to is over."""
        self._entered.set()


@contextlib.contextmanager
def entered(joining: Joining) -> Iterator[Channel]:
    """The channel for a block: kept for the next save or load if the block ends well, closed whatever else ends it.

    Raises PeerLost where the mesh was not made.
    """
    channel = joining.enter()
    try:
        yield channel
    except BaseException:
        channel.close()
        raise
    channel.release()


def _gathers(thread: int) -> bool:
    """Whether a thread is gone, or within DCP's gathering of results."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return True
    while frame is not None:
        if frame.f_code in (_DistWrapper.gather_object.__code__, _DistWrapper.all_gather_object.__code__):
            return True
        frame = frame.f_back
    return False
