"""What the machine can do at best: plain writes and reads of files, a copy in memory, the S3 server by raw sockets."""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from awscrt.checksums import crc32c

from benchmarks.state import PIECE, like, local, memory, pieces

Views = Sequence[memoryview]


def _parallel(call: Callable[[int], object], count: int, threads: int) -> None:
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(call, range(count)))


def write_files(state: dict[str, Any], folder: str, threads: int, sync: bool = False) -> None:
    """Each piece of the state as a file of its own, by plain writes."""
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
    """The files of :func:`write_files` back into the memory of a target."""
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


CELL = (64, 2048)
"""Rows, and bytes of a row, of the subchunks that are cut from a large matrix."""


def _bands(tensor: Any) -> list[Any]:
    """A tensor as byte matrices of at most PIECE bytes; a single row where it has other dimensions, or odd ones."""
    flat = np.frombuffer(memory(tensor), np.uint8)
    width = flat.size // tensor.shape[0] if tensor.ndim == 2 else 0
    if not width or width % CELL[1] or tensor.shape[0] % CELL[0]:
        return [flat.reshape(1, -1)]
    height = max(CELL[0], PIECE // width // CELL[0] * CELL[0])
    rows = flat.reshape(-1, width)
    return [rows[at : at + height] for at in range(0, len(rows), height)]


def _cells(band: Any) -> Iterator[Any]:
    """Stripes of subchunks of a band, in the shape (cells, rows, bytes)."""
    height, width = CELL if len(band) > 1 else band.shape
    step = max(1, BLOCK // (height * width))
    for column in range(0, band.shape[1], width):
        for row in range(0, len(band), height * step):
            yield band[row : row + height * step, column : column + width].reshape(-1, height, width)


BLOCK = 1 << 20
GROUP = 8 << 20
"""What is written at once: smaller writes get smaller pages of the file cache, which cost more."""


def write_subchunks(state: dict[str, Any], folder: str, threads: int) -> None:
    """What zarrckpt stores, by a plain loop: column stripes gathered, checksummed and written, and nothing else."""
    os.makedirs(folder, exist_ok=True)
    bands = [band for tensor in state.values() for band in _bands(local(tensor))]

    def write(number: int) -> None:
        file = os.open(f"{folder}/{number}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        scratch, used = np.empty(max(GROUP, bands[number].size) + 4 * GROUP // math.prod(CELL), np.uint8), 0
        try:
            for part in _cells(bands[number]):
                if used >= GROUP:
                    os.write(file, scratch[:used].data)
                    used = 0
                stored = scratch[used : used + part.size + 4 * len(part)].reshape(len(part), -1)
                stored[:, :-4].reshape(part.shape)[...] = part
                for row in stored:
                    row[-4:] = np.frombuffer(crc32c(row[:-4].data).to_bytes(4, "little"), np.uint8)
                used += stored.size
            os.write(file, scratch[:used].data)
        finally:
            os.close(file)

    _parallel(write, len(bands), threads)


def read_subchunks(target: dict[str, Any], folder: str, threads: int) -> None:
    """The files of :func:`write_subchunks` back, every checksum compared."""
    bands = [band for tensor in target.values() for band in _bands(local(tensor))]

    def read(number: int) -> None:
        file = os.open(f"{folder}/{number}", os.O_RDONLY)
        scratch, at = np.empty(bands[number].size + 4 * BLOCK, np.uint8), 0
        try:
            for part in _cells(bands[number]):
                stored = scratch[: part.size + 4 * len(part)].reshape(len(part), -1)
                at += os.preadv(file, [stored.data], at)
                for row in stored:
                    if crc32c(row[:-4].data) != int.from_bytes(row[-4:].tobytes(), "little"):
                        raise RuntimeError("a checksum differs")
                part[...] = stored[:, :-4].reshape(part.shape)
        finally:
            os.close(file)

    _parallel(read, len(bands), threads)


class MemoryCopy:
    """The state copied elsewhere, and from there into a target."""

    def __init__(self, state: dict[str, Any]) -> None:
        self._copy = like(state)

    def save(self, state: dict[str, Any], path: str) -> None:
        for name, tensor in state.items():
            local(self._copy[name]).copy_(local(tensor))

    def load(self, target: dict[str, Any], path: str) -> None:
        for name, tensor in target.items():
            local(tensor).copy_(local(self._copy[name]))


OBJECT = 16 << 20
"""The raw client's objects, in bytes: large enough that requests cost nothing, small enough to be dealt evenly."""


def _objects(state: dict[str, Any]) -> list[memoryview]:
    return [view[at : at + OBJECT] for view in pieces(state) for at in range(0, len(view), OBJECT)]


def _connect(endpoint: str) -> socket.socket:
    host, _, port = endpoint.removeprefix("http://").partition(":")
    connection = socket.create_connection((host, int(port)))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _answer(connection: socket.socket) -> None:
    """Read the head of an answer, and nothing behind it."""
    while True:
        seen = connection.recv(65536, socket.MSG_PEEK)
        if not seen:
            raise ConnectionError("the server hung up")
        if (end := seen.find(b"\r\n\r\n")) >= 0:
            connection.recv(end + 4)
            return


def raw_put(state: dict[str, Any], endpoint: str, prefix: str, connections: int) -> None:
    """The state as objects of 16 MiB, over that many sockets at once."""
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
    """The objects of :func:`raw_put` back into the memory of a target."""
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
