"""Connect ranks with torch's store and gloo."""

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

# Any, because torch's stubs lack the names of its compiled part. A torch without this part can still import this.
c10d: Any = dist
_Store: Any = getattr(dist, "Store", object)

CONNECT_TIMEOUT = timedelta(seconds=60)

_NEVER_SENT = 2**30
"""A tag of gloo that no message uses."""


_parent_world: Any = None
"""The default group of the parent process after a fork."""


def _note_parent_world() -> None:
    global _parent_world
    _parent_world = c10d.group.WORLD if dist.is_available() else None


os.register_at_fork(after_in_child=_note_parent_world)


def default_store() -> Any:
    """Return the store of the default process group, the only store that all ranks have.

    Raises CheckpointError in a forked child, because it would use the connections of its parent.
    """
    world = c10d.group.WORLD
    if world is not None and world is _parent_world:
        raise CheckpointError(
            "this process was forked after torch.distributed was initialized, so it cannot save or load with the other "
            "ranks: call from the process that initialized it, or pass no_dist=True to save or load alone"
        )
    return world.get_group_store()


def clone_store(store: Any) -> Any:
    """Return a new connection to a store, so that waiting requests do not block the connection that training uses."""
    try:
        return store.clone()
    except (RuntimeError, NotImplementedError) as err:
        raise CheckpointError(
            f"zarrckpt cannot connect the ranks through the default process group's store ({type(store).__name__}): "
            f"{str(err).splitlines()[0]}. Initialize torch.distributed with an address (env://, tcp:// or file://), as "
            "with the backends gloo and nccl. The backend mpi has no such store"
        ) from err


class Addresses(_Store):  # type: ignore[misc]
    """The store for one mesh: it prefixes keys with the mesh's name, and references the store only during a call.

    A mesh is kept between calls. A permanent reference would keep the port of rank 0's store in use after
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
            raise RuntimeError("the store is used outside a call")
        return self.store


def create_gloo_group(store: Any, rank: int, size: int, *, lazy: bool) -> Any:
    """Create a private gloo group that is not registered with torch. No other group uses the prefix of the store.

    The group has a separate device (a listening socket and a thread). Lazy groups cannot share a device, because the
    first group that ends shuts it down.

    Args:
        lazy: connect two ranks at their first message. Otherwise all ranks are connected on return, within
            ``CONNECT_TIMEOUT``, and a missing rank raises RuntimeError.
    """
    if not dist.is_gloo_available():
        raise CheckpointError("this torch was built without gloo, but zarrckpt needs gloo to connect ranks")
    gloo = c10d.ProcessGroupGloo
    return gloo(store, rank, size, gloo_options(gloo, _device(store, lazy), CONNECT_TIMEOUT))


def close_connections(group: Any, peers: Iterable[int]) -> None:
    """Close a group's connections, so that ranks that wait for this one get an error.

    gloo has no call for this, but a receive that times out closes all pairs of its group. A receive from a peer that
    has left fails earlier and closes nothing. A receive from a peer that is not connected would wait.
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
    """Return this host's address in the network of the store's host, or None if it cannot be found.

    All ranks reach the store, so this network connects them. A store in a file has no host.
    """
    while isinstance(store, Addresses | c10d.PrefixStore):
        store = store.store if isinstance(store, Addresses) else store.underlying_store
    if not isinstance(store, c10d.TCPStore):
        return None
    address = _source_towards(store.host, store.port)
    if address is None or (ip_address(address).is_loopback and not _means_loopback(store.host)):
        # On the store's host, its name can resolve to a loopback address, which other hosts cannot reach.
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
