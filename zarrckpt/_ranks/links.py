"""What torch gives to connect ranks: its store, and gloo."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterable, Sequence
from datetime import timedelta
from ipaddress import ip_address
from typing import Any

import torch
import torch.distributed as dist

from zarrckpt._errors import CheckpointError
from zarrckpt._ranks.torch_private import gloo_options

# torch's stubs lack what its compiled part brings; a torch built without it still imports this.
c10d: Any = dist
_Store: Any = getattr(dist, "Store", object)

CONNECT_TIMEOUT = timedelta(seconds=60)

_NEVER_SENT = 2**30
"""A tag of gloo's that no message has."""


_parent_world: Any = None
"""The default group of the process that this one was forked from."""


def _note_parent_world() -> None:
    global _parent_world
    _parent_world = c10d.group.WORLD if dist.is_available() else None


os.register_at_fork(after_in_child=_note_parent_world)


def default_store() -> Any:
    """The store that the default process group was made with: the only one that all ranks surely have.

    Raises CheckpointError in a forked child, which would use the connections of its parent.
    """
    world = c10d.group.WORLD
    if world is not None and world is _parent_world:
        raise CheckpointError(
            "this process was forked after torch.distributed was initialized, and cannot save or load with the other "
            "ranks: call from the process that initialized it, or pass no_dist=True to save or load alone"
        )
    return world.get_group_store()


def cloned(store: Any) -> Any:
    """A connection of one's own to a store: a request that waits must not hold the one that training uses."""
    try:
        return store.clone()
    except (RuntimeError, NotImplementedError) as err:
        raise CheckpointError(
            f"the default process group's store ({type(store).__name__}) cannot be used by zarrckpt to bring the ranks "
            f"together: {str(err).splitlines()[0]}. Initialize torch.distributed with an address (env://, tcp:// or "
            "file://), which the backends gloo and nccl do; the backend mpi has no such store"
        ) from err


class Addresses(_Store):  # type: ignore[misc]
    """The store as one mesh sees it: under the mesh's name, and held only as long as a call is going on.

    A mesh is kept between calls. If it held the store itself, the port of rank 0's store would stay in use after
    destroy_process_group.
    """

    def __init__(self, name: str, store: Any) -> None:
        super().__init__()
        self.name = name
        self.store = store

    def get(self, key: str) -> bytes:
        value: bytes = self._held().get(f"{self.name}/{key}")
        return value

    def set(self, key: str, value: Any) -> None:
        self._held().set(f"{self.name}/{key}", value)

    def wait(self, keys: Sequence[str], timeout: timedelta = CONNECT_TIMEOUT) -> None:
        self._held().wait([f"{self.name}/{key}" for key in keys], timeout)

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._held().check([f"{self.name}/{key}" for key in keys]))

    def _held(self) -> Any:
        if self.store is None:
            raise RuntimeError("the store was let go of")
        return self.store


def gloo_group(store: Any, rank: int, size: int, *, lazy: bool) -> Any:
    """A private gloo group, registered nowhere. The store's prefix is its own.

    It has a device (a listening socket and a thread) of its own: gloo's lazy groups cannot share one, since the first
    that goes shuts it down.

    Args:
        lazy: connect two ranks when they first need it. Otherwise all are connected on return, within
            ``CONNECT_TIMEOUT``; RuntimeError where one does not come.
    """
    if not dist.is_gloo_available():
        raise CheckpointError("this torch was built without gloo, which zarrckpt needs to connect ranks")
    gloo = c10d.ProcessGroupGloo
    return gloo(store, rank, size, gloo_options(gloo, _device(store, lazy), CONNECT_TIMEOUT))


def hang_up(group: Any, peers: Iterable[int]) -> None:
    """Close a group's connections: every rank that waits for this one is told.

    gloo has no call for it, but a receive that times out closes all pairs of its group. One from a peer that has left
    fails before that, and closes none; one from a peer that is not connected would wait for it.
    """
    for peer in peers:
        with contextlib.suppress(RuntimeError):
            group.recv([torch.zeros(1, dtype=torch.uint8, device="cpu")], peer, _NEVER_SENT).wait(
                timedelta(milliseconds=1)
            )


def _device(store: Any, lazy: bool) -> Any:
    gloo = c10d.ProcessGroupGloo
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0].strip()
    if interface:
        return gloo.create_device(interface=interface, lazy_init=lazy)
    address = local_address(store)
    if address is not None:
        return gloo.create_device(hostname=address, lazy_init=lazy)
    return gloo.create_default_device(lazy_init=lazy)


def local_address(store: Any) -> str | None:
    """This host's address towards the store's host: the others reach the store, so this network connects all of them.

    None where the store is no server (a file), or nothing tells.
    """
    while isinstance(store, Addresses | c10d.PrefixStore):
        store = store.store if isinstance(store, Addresses) else store.underlying_store
    if not isinstance(store, c10d.TCPStore):
        return None
    address = _source_towards(store.host, store.port)
    if address is None or (ip_address(address).is_loopback and not _means_loopback(store.host)):
        # On the store's own host its name may stand for a loopback address; the others need the one they can reach.
        address = _source_towards("192.0.2.1", 9) or address
    return address


def _source_towards(host: str, port: int) -> str | None:
    try:
        for family, kind, _, _, target in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
            with socket.socket(family, kind) as probe:
                probe.connect(target)  # sends nothing
                return str(probe.getsockname()[0])
    except OSError:
        return None
    return None


def _means_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host in ("localhost", "ip6-localhost", "localhost.localdomain")
