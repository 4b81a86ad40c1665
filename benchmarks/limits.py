"""Limits of the machine: plain writes and reads of files, a copy in memory, the S3 server by raw sockets."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from awscrt.checksums import crc32c

from benchmarks.state import like, local, pieces

Views = Sequence[memoryview]


def _parallel(call: Callable[[int], object], count: int, threads: int) -> None:
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(call, range(count)))


def write_files(state: dict[str, Any], folder: str, threads: int, sync: bool = False) -> None:
    """Write each piece of the state to a separate file, by plain writes."""
    views = pieces(state)
    os.makedirs(folder, exist_ok=True)

    def write(number: int) -> None:
        file = os.open(f"{folder}/{number}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            at = 0
            while at < len(views[number]):
                at += os.write(file, views[number][at:])
            if sync:
                os.fsync(file)
        finally:
            os.close(file)

    _parallel(write, len(views), threads)


def read_files(target: dict[str, Any], folder: str, threads: int) -> None:
    """Read the files of :func:`write_files` into the memory of a target."""
    views = pieces(target)

    def read(number: int) -> None:
        file = os.open(f"{folder}/{number}", os.O_RDONLY)
        try:
            at = 0
            while at < len(views[number]):
                at += os.preadv(file, [views[number][at:]], at)
        finally:
            os.close(file)

    _parallel(read, len(views), threads)


PART = 2 << 20
"""Bytes of a subchunk, which is followed by its checksum."""


def _parts(view: memoryview) -> list[memoryview]:
    return [view[at : at + PART] for at in range(0, len(view), PART)]


def write_subchunks(state: dict[str, Any], folder: str, threads: int) -> None:
    """Write the bytes that zarrckpt stores by a plain loop, which only checksums and writes subchunks."""
    views = pieces(state)
    os.makedirs(folder, exist_ok=True)

    def write(number: int) -> None:
        file = os.open(f"{folder}/{number}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            for part in _parts(views[number]):
                if os.writev(file, [part, crc32c(part).to_bytes(4, "little")]) != len(part) + 4:
                    raise RuntimeError("a short write")
        finally:
            os.close(file)

    _parallel(write, len(views), threads)


def read_subchunks(target: dict[str, Any], folder: str, threads: int) -> None:
    """Read the files of :func:`write_subchunks`, and compare every checksum."""
    views = pieces(target)

    def read(number: int) -> None:
        file, at = os.open(f"{folder}/{number}", os.O_RDONLY), 0
        try:
            for part in _parts(views[number]):
                stored = bytearray(4)
                at += os.preadv(file, [part, stored], at)
                if crc32c(part) != int.from_bytes(stored, "little"):
                    raise RuntimeError("a checksum differs")
        finally:
            os.close(file)

    _parallel(read, len(views), threads)


class SameFiles:
    """Contender that makes the folders and files of a checkpoint again, by a plain loop."""

    def __init__(self, checkpoint: str, sync: bool = False) -> None:
        self._sync = sync
        self._files: list[tuple[str, bytes]] = []
        for folder, _, names in os.walk(checkpoint):
            for name in sorted(names):
                path = os.path.join(folder, name)
                with open(path, "rb") as file:
                    self._files.append((os.path.relpath(path, checkpoint), file.read()))

    def save(self, state: dict[str, Any], path: str) -> None:
        made = set()
        written = []
        for name, data in self._files:
            whole = f"{path}/{name}"
            folder = os.path.dirname(whole)
            if folder not in made:
                os.makedirs(folder, exist_ok=True)
                made.add(folder)
            file = os.open(whole, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            try:
                if os.write(file, data) != len(data):
                    raise RuntimeError("a short write")
            finally:
                os.close(file)
            written.append(whole)
        if self._sync:
            paths = [*written, *made]
            _parallel(lambda number: _fsync(paths[number]), len(paths), 8)


def _fsync(path: str) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


class MemoryCopy:
    """Contender that copies the state, and the copy into a target."""

    def __init__(self, state: dict[str, Any]) -> None:
        self._copy = like(state)

    def save(self, state: dict[str, Any], path: str) -> None:
        for name, tensor in state.items():
            local(self._copy[name]).copy_(local(tensor))

    def load(self, target: dict[str, Any], path: str) -> None:
        for name, tensor in target.items():
            local(tensor).copy_(local(self._copy[name]))


OBJECT = 16 << 20
"""Bytes of the raw client's objects: so large that requests cost nothing, so small that all threads get equal parts."""


def _objects(state: dict[str, Any]) -> list[memoryview]:
    return [view[at : at + OBJECT] for view in pieces(state) for at in range(0, len(view), OBJECT)]


def _connect(endpoint: str) -> socket.socket:
    host, _, port = endpoint.removeprefix("http://").partition(":")
    connection = socket.create_connection((host, int(port)))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _answer(connection: socket.socket) -> None:
    """Read the head of an answer, and no byte of its body."""
    while True:
        seen = connection.recv(65536, socket.MSG_PEEK)
        if not seen:
            raise ConnectionError("the server hung up")
        if (end := seen.find(b"\r\n\r\n")) >= 0:
            connection.recv(end + 4)
            return


def raw_put(state: dict[str, Any], endpoint: str, prefix: str, connections: int) -> None:
    """Put the state as objects of 16 MiB, over several sockets at once."""
    views = _objects(state)

    def work(first: int) -> None:
        with _connect(endpoint) as connection:
            for number in range(first, len(views), connections):
                view = views[number]
                head = f"PUT /{prefix}/{number} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(view)}\r\n\r\n"
                connection.sendall(head.encode(), socket.MSG_MORE)
                connection.sendall(view)
                _answer(connection)

    _parallel(work, min(connections, len(views)), connections)


def raw_get(target: dict[str, Any], endpoint: str, prefix: str, connections: int) -> None:
    """Get the objects of :func:`raw_put` into the memory of a target."""
    views = _objects(target)

    def work(first: int) -> None:
        with _connect(endpoint) as connection:
            for number in range(first, len(views), connections):
                connection.sendall(f"GET /{prefix}/{number} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
                _answer(connection)
                at = 0
                while at < len(views[number]):
                    at += connection.recv_into(views[number][at:], 0, socket.MSG_WAITALL)

    _parallel(work, min(connections, len(views)), connections)
