"""A private mesh of connections between ranks: control messages along a tree, pieces between any two ranks.

The mesh does not use the user's group, because training can be inside a collective. It is kept between calls. gloo
reports a dead peer only to a pending receive. So a thread for each edge of the tree always has a receive pending.
Ctrl-C does not interrupt gloo's waits in C++, so the caller's thread makes none.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from zarrckpt._errors import CheckpointError
from zarrckpt._format.wire import MAX_MESSAGE_BYTES
from zarrckpt._ranks.call_group import CallGroup, Tree
from zarrckpt._ranks.control_messages import UNREADABLE, Message, decode_message, encode_message
from zarrckpt._ranks.group import default_group
from zarrckpt._ranks.joining import connect_group
from zarrckpt._ranks.links import CONNECT_TIMEOUT, Addresses, close_connections, default_store

FLUSH_SECONDS = 2.0
"""Seconds that a rank waits for its last messages to be sent before it leaves."""

FOREVER = timedelta(days=3650)
"""Timeout of gloo's waits. A wait that times out closes all pairs of its group."""

_FRAME = 512
_HEAD = struct.Struct(">QQ")
"""The length of a message, and the number of messages that the sender has received on this edge."""
_CONTROL, _PIECE = 0, 1
"""gloo's tags of control messages and of pieces."""


END_SECONDS = 5.0
"""Seconds that the end of the process waits for interrupted calls and their threads."""


_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def start_thread(name: str, work: Callable[..., object], *args: Any) -> threading.Thread:
    """Start a daemon thread that calls torch. The end of the process waits for it at most ``END_SECONDS``."""
    thread = threading.Thread(target=work, args=args, name=name, daemon=True)
    _threads.add(thread)
    thread.start()
    return thread


Sink = Callable[["Mesh", int, Message | None], None]
"""Receives the messages of an edge: the mesh, the peer's position, and the message, or None for a closed connection."""


class Mesh:
    """The connections of one rank in a mesh. Positions are indices of the members."""

    def __init__(self, call_group: CallGroup, group: Any, addresses: Addresses) -> None:
        self.tree = Tree(call_group.position, len(call_group.members))
        self.calls = 0
        """The number of calls that have begun to use the mesh, the same on all ranks."""
        self._group: Any = group
        self._addresses = addresses
        self._world = default_group()
        self._pid = os.getpid()
        self._closed = False
        self._lock = threading.Lock()
        self._sink: Sink | None = None
        self._early: list[tuple[int, Message | None]] = []
        """Messages that arrived before the call that they belong to."""
        self._sending = threading.Lock()
        self._received = dict.fromkeys(self.tree.edges, 0)
        """The number of messages received from each neighbour."""
        self._numbers = dict.fromkeys(self.tree.edges, 0)
        """The number of messages sent to each neighbour."""
        self._sent: dict[int, deque[tuple[int, Any, Any]]] = {peer: deque() for peer in self.tree.edges}
        """The number, the send and the memory of each message that a neighbour has not confirmed."""
        self._threads: list[threading.Thread] = []
        self._connected: set[int] = set()
        """The neighbours in the tree whose connections are open."""
        self._reached: set[int] = set()
        """The peers of pieces."""
        began: SimpleQueue[None] = SimpleQueue()
        try:
            self._threads = [
                start_thread("zarrckpt-edge", self._read, group, peer, began.put) for peer in self.tree.edges
            ]
            # Make all connections of the tree before its first use, because the store is available now, and a send on
            # an unfinished connection would wait. Each connection is made or fails within CONNECT_TIMEOUT.
            for _ in self.tree.edges:
                began.get(timeout=2 * CONNECT_TIMEOUT.total_seconds())
        except BaseException:
            self.close()
            raise

    def is_current(self) -> bool:
        """Whether it was made in this process and with the current default group."""
        world = self._world()
        return not self._closed and self._pid == os.getpid() and world is not None and world is dist.group.WORLD

    def is_usable(self, call: str | None) -> bool:
        """Whether no rank has left it, or a rank has left it by aborting this call, which must end the call here."""
        with self._lock:
            messages = [message for _, message in self._early]
        left = [m for m in messages if m is None or m.kind in ("abort", "rejoin", UNREADABLE)]
        aborted = any(m is not None and m[:2] == ("abort", self.calls + 1) and m.body[1] == call for m in left)
        return self.is_current() and (aborted or not left)

    def attach(self, sink: Sink) -> None:
        """Pass all messages to a call, beginning with those that arrived earlier."""
        with self._lock:
            self._sink = sink
            early, self._early = self._early, []
            for peer, message in early:
                sink(self, peer, message)

    def detach(self) -> None:
        """End a call. Later messages belong to the next call."""
        with self._lock:
            self._sink = None
        self._addresses.store = None

    def begin_call(self) -> None:
        """Count a new call, and use the store during it."""
        self.calls += 1
        self._addresses.store = default_store()

    def send(self, peers: Iterable[int], message: Message) -> None:
        """Send a message along edges, without waiting. A lost peer is detected by the receives from it."""
        data = encode_message(message)
        inline = min(len(data), _FRAME - _HEAD.size)
        rest = np.frombuffer(data[inline:], np.uint8).copy()
        for peer in peers:
            with self._sending, contextlib.suppress(RuntimeError):
                if peer not in self._connected or self._group is None:
                    continue
                head = _HEAD.pack(len(data), self._received[peer]) + data[:inline]
                frame = np.frombuffer(head.ljust(_FRAME, b"\0"), np.uint8).copy()
                self._numbers[peer] += 1
                for part in (frame, rest) if len(rest) else (frame,):
                    tensor = torch.from_numpy(part)
                    # Keep the memory until the peer confirms the message, because gloo's waits can be endless.
                    work = self._group.send([tensor], peer, _CONTROL)
                    self._sent[peer].append((self._numbers[peer], work, tensor))

    def start_piece(self, way: str, peer: int, data: Any) -> Any:
        """Begin to send ('send') or receive ('recv') a piece. Raises RuntimeError if the peer was lost.

        The first piece of a peer waits for the connection.
        """
        group = self._group
        if group is None:
            raise RuntimeError("the mesh is closed")
        work = getattr(group, way)([torch.from_numpy(data)], peer, _PIECE)
        self._reached.add(peer)
        return work

    def close(self, flush: float = FLUSH_SECONDS) -> None:
        """Leave the mesh. Peers notice their closed connections."""
        if self._closed:
            return
        self._closed = True
        if self._pid != os.getpid():
            _parent_meshes.append(self)
            return
        self._flush(flush)
        with self._sending:
            group, self._group = self._group, None
        close_connections(group, [*self._connected, *self._reached])
        del group
        self._addresses.store = None
        for thread in self._threads:
            thread.join(1.0)

    def _flush(self, seconds: float) -> None:
        """Wait until the last messages are sent."""
        with self._sending:
            works = [work for sent in self._sent.values() for _, work, _ in sent]
        if works:
            # In a thread, because the wait for a stopped peer does not end.
            start_thread("zarrckpt-flush", _wait_for, works).join(seconds)

    def _read(self, group: Any, peer: int, began: Callable[[None], None]) -> None:
        """Receive the messages of an edge until it is closed. A receive is always pending."""
        frame = torch.empty(_FRAME, dtype=torch.uint8, device="cpu")
        with contextlib.suppress(RuntimeError, MemoryError):
            receive = group.recv([frame], peer, _CONTROL)
            self._connected.add(peer)
            began(None)
            while True:
                receive.wait(FOREVER)
                data = frame.numpy().tobytes()
                length, known = _HEAD.unpack_from(data)
                if length > MAX_MESSAGE_BYTES:
                    self._refuse(peer, f"a message of {length} bytes")
                    break
                self._forget_sent(peer, known)
                data = data[_HEAD.size : _HEAD.size + length]
                if len(data) < length:
                    rest = np.empty(length - len(data), np.uint8)
                    group.recv([torch.from_numpy(rest)], peer, _CONTROL).wait(FOREVER)
                    data += rest.tobytes()
                self._received[peer] += 1
                try:
                    message = decode_message(data)
                except CheckpointError as err:
                    self._refuse(peer, str(err))
                    break
                self._deliver(peer, message)
                receive = group.recv([frame], peer, _CONTROL)
        began(None)
        self._connected.discard(peer)
        self._forget_sent(peer, self._numbers[peer])
        self._deliver(peer, None)

    def _refuse(self, peer: int, reason: str) -> None:
        """Report unreadable bytes of a peer. Later bytes of it would be unreadable too."""
        self._deliver(peer, Message(UNREADABLE, self.calls, 0, reason))

    def _deliver(self, peer: int, message: Message | None) -> None:
        with self._lock:
            # A message of the next call is kept for it, and shows this call that its sender has ended.
            if self._sink is None or (message is not None and message.call > self.calls):
                self._early.append((peer, message))
            if self._sink is not None:
                self._sink(self, peer, message)

    def _forget_sent(self, peer: int, known: int) -> None:
        with self._sending:
            sent = self._sent[peer]
            while sent and sent[0][0] <= known:
                sent.popleft()


def _wait_for(works: list[Any]) -> None:
    while works:
        with contextlib.suppress(RuntimeError):
            works.pop().wait(FOREVER)


class MeshSlot:
    """Keeps the mesh of certain members between calls. One call uses it at a time."""

    def __init__(self) -> None:
        self.turn = threading.Lock()
        self.mesh: Mesh | None = None

    def clear(self) -> None:
        mesh, self.mesh = self.mesh, None
        if mesh is not None:
            mesh.close()


_slots: dict[tuple[tuple[int, ...], str], MeshSlot] = {}
_slots_lock = threading.Lock()
_ending = threading.Event()


def is_ending() -> bool:
    """Whether the process is ending, so that no call may begin."""
    return _ending.is_set()


_parent_meshes: list[Mesh] = []
"""Meshes of the parent process after a fork. They are neither used nor freed."""


def _forget_meshes() -> None:
    global _slots_lock, _ending, _threads
    _parent_meshes.extend(slot.mesh for slot in _slots.values() if slot.mesh is not None)
    _slots.clear()
    _slots_lock, _ending, _threads = threading.Lock(), threading.Event(), weakref.WeakSet()


os.register_at_fork(after_in_child=_forget_meshes)


@contextlib.contextmanager
def reserve_mesh(call_group: CallGroup) -> Iterator[MeshSlot]:
    """Reserve the kept mesh of the ranks for this call. Raises CheckpointError if another call does not end."""
    with _slots_lock:
        if _ending.is_set():
            raise CheckpointError(f"{call_group.call}: the process is ending. Save and load earlier")
        slot = _slots.setdefault((call_group.members, call_group.queue), MeshSlot())
        others = [other for other in _slots.values() if other is not slot]
    if not slot.turn.acquire(timeout=min(call_group.timeout, threading.TIMEOUT_MAX)):
        raise CheckpointError(
            f"{call_group.call}: another call of the same ranks in another thread of this process did not end within "
            f"{call_group.timeout:g} s. Wait for its end before this call, or set a larger timeout in SaveOptions or "
            "LoadOptions"
        )
    try:
        for other in others:
            _close_outdated(other)
        if slot.mesh is not None and not slot.mesh.is_usable(call_group.call):
            slot.clear()
        yield slot
    finally:
        slot.turn.release()


def connect_mesh(call_group: CallGroup, cancelled: Callable[[], bool] = lambda: False) -> Mesh:
    """Make a new mesh. Every member calls it. A member that does not call within the timeout raises CheckpointError."""
    with connect_group(call_group, lambda: cancelled() or _ending.is_set()) as (group, addresses):
        return Mesh(call_group, group, addresses)


def _close_outdated(slot: MeshSlot) -> None:
    """Close a kept mesh of an earlier default group, unless a call uses it."""
    if slot.turn.acquire(blocking=False):
        try:
            if slot.mesh is not None and not slot.mesh.is_current():
                slot.clear()
        finally:
            slot.turn.release()


def close_all_meshes() -> None:
    """Close all meshes. Calls that use one end with an error."""
    began = time.monotonic()
    for slot in [*_slots.values()]:
        mesh, slot.mesh = slot.mesh, None
        if mesh is not None:
            mesh.close(max(0.0, FLUSH_SECONDS - (time.monotonic() - began)))


@atexit.register
def _end_all() -> None:
    """End calls in daemon threads, and wait until their threads have returned from C++.

    Before Python 3.14, a thread that returns from C++ to an ended interpreter crashes the process.
    """
    with _slots_lock:
        _ending.set()
    close_all_meshes()
    until = time.monotonic() + END_SECONDS
    for slot in _slots.values():
        slot.turn.acquire(timeout=max(0.0, until - time.monotonic()))
    for thread in [*_threads]:
        thread.join(max(0.0, until - time.monotonic()))
