"""Send and receive pieces of data between ranks within a call, over connections that are made at their first use."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

import numpy as np

from zarrckpt._jobs import Bytes
from zarrckpt._ranks.errors import LostPeerError
from zarrckpt._ranks.mesh import FOREVER, Mesh, start_thread

_POLL_SECONDS = 0.5

_Queue = SimpleQueue[tuple[Bytes, Future[Bytes]] | None]


class Handle:
    """A piece in transfer."""

    def __init__(self, future: Future[Bytes], waiting: Callable[[float], None] = lambda seconds: None) -> None:
        self._future = future
        self._waiting = waiting

    def wait(self) -> Bytes:
        """Wait until the piece has arrived, or its memory can be used again, and return its bytes.

        Raises LostPeerError. Ctrl-C interrupts it.
        """
        began = time.monotonic()
        while True:
            try:
                return self._future.result(_POLL_SECONDS)
            except TimeoutError:
                self._waiting(time.monotonic() - began)


class MessageChannel:
    """The channel of one rank in one call. Any thread may use it. Ranks are positions in the group.

    Sender and receiver must post the pieces between them in the same order. They end in this order.
    """

    def __init__(self, mesh: Mesh | None, report_alive: Callable[[], None], patience: float = 0.0) -> None:
        """``report_alive`` is called at the end of each piece, and for ``patience`` seconds during a wait.

        Otherwise a rank that waits for a silent rank would be considered silent too. ``mesh`` is None while the ranks
        are connected again after the loss of one.
        """
        self._mesh = mesh
        self._report_alive = report_alive
        self._patience = patience
        self._lock = threading.Lock()
        self._queues: dict[tuple[str, int], _Queue] = {}
        self._open: set[Future[Bytes]] = set()
        self._closed = False

    def send(self, to: int, array: Bytes) -> Handle:
        """Begin to send flat bytes, which must not change before the end of the handle's wait. Raises LostPeerError."""
        return self._posted("send", to, array)

    def recv(self, source: int, nbytes: int) -> Handle:
        """Begin to receive a piece of ``nbytes`` bytes. Raises LostPeerError."""
        return self._posted("recv", source, np.empty(nbytes, np.uint8))

    def close(self) -> None:
        """End every wait with LostPeerError. The memory is kept until gloo has finished with it."""
        with self._lock:
            self._closed = True
            left, self._open = self._open, set()
            for queue in self._queues.values():
                queue.put(None)
            self._queues.clear()
        for future in left:
            future.set_exception(LostPeerError("another rank failed or was lost"))

    def _posted(self, way: str, peer: int, data: Bytes) -> Handle:
        future: Future[Bytes] = Future()
        with self._lock:
            if self._closed or self._mesh is None:
                raise LostPeerError("another rank failed or was lost")
            queue = self._queues.get((way, peer))
            if queue is None:
                queue = self._queues[way, peer] = SimpleQueue()
                start_thread("zarrckpt-pieces", self._move, self._mesh, way, peer, queue)
            self._open.add(future)
            queue.put((data, future))
        return Handle(future, self._waiting)

    def _waiting(self, seconds: float) -> None:
        if seconds < self._patience:
            self._report_alive()

    def _move(self, mesh: Mesh, way: str, peer: int, queue: _Queue) -> None:
        """Post the pieces of one direction between two ranks, and wait. A closed mesh ends waits in C++."""
        posted: deque[tuple[Any, Bytes, Future[Bytes]]] = deque()
        while True:
            while not posted or not queue.empty():
                entry = queue.get()
                if entry is None:
                    break
                data, future = entry
                try:
                    posted.append((mesh.start_piece(way, peer, data), data, future))
                except RuntimeError as err:
                    self._ended(future, err)
                del entry, data, future  # free their memory during the wait for the next entry
            if not posted:
                return
            work, data, future = posted.popleft()
            try:
                work.wait(FOREVER)
            except RuntimeError as err:
                self._ended(future, err)
            else:
                self._ended(future, data)
            del work, data, future

    def _ended(self, future: Future[Bytes], outcome: Bytes | RuntimeError) -> None:
        self._report_alive()
        with self._lock:
            if future not in self._open:
                return  # close() has set its error.
            self._open.discard(future)
        if isinstance(outcome, RuntimeError):
            future.set_exception(LostPeerError(str(outcome).splitlines()[0]))
        else:
            future.set_result(outcome)
