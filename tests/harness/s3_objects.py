"""The objects of the tests' S3 server in memory, its multipart uploads, and its log of requests."""

from __future__ import annotations

import bisect
import ctypes
import mmap
import threading
import time
import weakref
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

SMALL = 64 << 10
"""Smaller buffers are plain ones."""


class Memory:
    """Memory for bodies, which is used again after its last view has ended. Safe for threads.

    On a virtual machine, new memory costs between nothing and several times the copy into it. That would disturb
    measurements.
    """

    BLOCK = 256 << 20
    PAGE = 4096

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks: list[mmap.mmap] = []
        self._free: list[tuple[int, int, int]] = []
        """(block, begin, end), sorted."""
        self._returned: deque[tuple[int, int, int]] = deque()
        """Not merged with the free ones yet. Views may end at any time, also within one of the calls here."""

    def lend(self, size: int) -> memoryview:
        """Return uninitialized memory of that many bytes. It is free again when its last view has ended."""
        need = -(-size // self.PAGE) * self.PAGE
        with self._lock:
            while self._returned:
                self._merge(*self._returned.popleft())
            block, begin = self._take(need)
        part = (ctypes.c_ubyte * size).from_buffer(self._blocks[block], begin)
        weakref.finalize(part, self._returned.append, (block, begin, begin + need))
        return memoryview(part).cast("B")

    def _take(self, need: int) -> tuple[int, int]:
        for place, (block, begin, end) in enumerate(self._free):
            if end - begin >= need:
                self._free[place : place + 1] = [(block, begin + need, end)] if end - begin > need else []
                return block, begin
        length = max(need, self.BLOCK)
        memory = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared memory has no huge pages
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        self._blocks.append(memory)
        if length > need:
            self._free.append((len(self._blocks) - 1, need, length))
        return len(self._blocks) - 1, 0

    def _merge(self, block: int, begin: int, end: int) -> None:
        """Add a part to the free ones, and to those that it touches."""
        place = bisect.bisect(self._free, (block, begin, end))
        if place < len(self._free) and self._free[place][:2] == (block, end):
            end = self._free.pop(place)[2]
        if place and self._free[place - 1][::2] == (block, begin):
            place -= 1
            begin = self._free.pop(place)[1]
        self._free.insert(place, (block, begin, end))


_memory = Memory()


def new_buffer(size: int) -> memoryview:
    """Return memory for a body of ``size`` bytes."""
    return memoryview(bytearray(size)) if size < SMALL else _memory.lend(size)


@dataclass
class Stored:
    """One object: the parts as they arrived (never joined), its e-tag and generation, and the time of its put."""

    parts: tuple[memoryview, ...]
    e_tag: str
    generation: int
    time: float = field(default_factory=time.time)

    @property
    def size(self) -> int:
        return sum(part.nbytes for part in self.parts)

    @property
    def data(self) -> bytes:
        return b"".join(self.parts)

    def views(self, begin: int, end: int) -> list[memoryview]:
        """Return the bytes from ``begin`` up to ``end``, as pieces of the parts."""
        found, at = [], 0
        for part in self.parts:
            low, high = max(begin - at, 0), min(end - at, part.nbytes)
            if low < high:
                found.append(part[low:high])
            at += part.nbytes
        return found


class Failed(Exception):
    """An error answer: HTTP status and S3's error code."""

    def __init__(self, status: int, code: str) -> None:
        super().__init__(status, code)
        self.status, self.code = status, code


class Objects:
    """All objects by bucket and key. Every bucket exists. Safe for threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.objects: dict[str, Stored] = {}
        self.folders: set[str] = set()
        """Names of all folders in which an object was ever stored."""
        self._uploads: dict[str, dict[int, Stored]] = {}
        self._number = 1000

    def _made(self, parts: tuple[memoryview, ...]) -> Stored:
        self._number += 1
        suffix = f"-{len(parts)}" if len(parts) > 1 else ""
        return Stored(parts, f'"{self._number:032x}{suffix}"', self._number)

    def buckets(self) -> list[str]:
        with self._lock:
            return sorted({path.partition("/")[0] for path in self.objects})

    def get(self, path: str) -> Stored:
        with self._lock:
            found = self.objects.get(path)
        if found is None:
            raise Failed(404, "NoSuchKey")
        return found

    def put(
        self,
        path: str,
        parts: tuple[memoryview, ...],
        create_only: bool = False,
        match: str | None = None,
        generation: int | None = None,
    ) -> Stored:
        """Store an object. Raise Failed if it exists (``create_only``), or is not of that e-tag or generation."""
        with self._lock:
            old = self.objects.get(path)
            if create_only and old is not None:
                raise Failed(412, "PreconditionFailed")
            if match is not None and old is None:
                raise Failed(404, "NoSuchKey")
            if match is not None and old is not None and old.e_tag != match:
                raise Failed(412, "PreconditionFailed")
            if generation is not None and (old is None or old.generation != generation):
                raise Failed(412, "PreconditionFailed")
            stored = self.objects[path] = self._made(parts)
            names = path.split("/")
            self.folders |= {f"{'/'.join(names[:depth])}/" for depth in range(1, len(names))}
            return stored

    def delete(self, path: str) -> None:
        with self._lock:
            self.objects.pop(path, None)

    def below(self, prefix: str) -> list[tuple[str, Stored]]:
        """Return the objects whose path begins with a prefix, in order."""
        with self._lock:
            found = [item for item in self.objects.items() if item[0].startswith(prefix)]
        return sorted(found, key=lambda item: item[0])

    def begin_upload(self) -> str:
        with self._lock:
            self._number += 1
            upload = f"upload-{self._number}"
            self._uploads[upload] = {}
            return upload

    def put_part(self, upload: str, number: int, body: memoryview) -> Stored:
        with self._lock:
            if upload not in self._uploads:
                raise Failed(404, "NoSuchUpload")
            part = self._uploads[upload][number] = self._made((body,))
            return part

    def complete(self, path: str, upload: str, numbers: list[int], **conditions: Any) -> Stored:
        with self._lock:
            parts = self._uploads.get(upload)
        if parts is None:
            raise Failed(404, "NoSuchUpload")
        if not numbers or any(number not in parts for number in numbers):
            raise Failed(400, "InvalidPart")
        stored = self.put(path, tuple(parts[number].parts[0] for number in numbers), **conditions)
        self.abort(upload)
        return stored

    def abort(self, upload: str) -> None:
        with self._lock:
            self._uploads.pop(upload, None)


class Entry(NamedTuple):
    """One request in the log: begin and end in seconds, kind and object, body bytes in and out, and status."""

    began: float
    ended: float
    kind: str
    path: str
    bytes_in: int
    bytes_out: int
    status: int


class Log:
    """All requests since the last reset, and the maxima of connections and requests at one time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.connections = self.requests = 0
        self.reset()

    def reset(self) -> None:
        with self._lock:
            self.entries: list[Entry] = []
            self.most_connections, self.most_requests = self.connections, self.requests

    def connection(self, change: int) -> None:
        with self._lock:
            self.connections += change
            self.most_connections = max(self.most_connections, self.connections)

    def begin(self) -> float:
        with self._lock:
            self.requests += 1
            self.most_requests = max(self.most_requests, self.requests)
        return time.monotonic()

    def end(self, entry: Entry) -> None:
        with self._lock:
            self.requests -= 1
            self.entries.append(entry)

    def stats(self) -> dict[str, Any]:
        """Return counts over the log."""
        deadline = time.monotonic() + 1
        while self.requests and time.monotonic() < deadline:
            time.sleep(0.001)  # a client has its answer a moment before the request is in the log
        with self._lock:
            entries = list(self.entries)
        return {
            "requests": dict(Counter(entry.kind for entry in entries)),
            "statuses": dict(Counter(str(entry.status) for entry in entries)),
            "bytes_in": sum(entry.bytes_in for entry in entries),
            "bytes_out": sum(entry.bytes_out for entry in entries),
            "most_connections": self.most_connections,
            "most_requests": self.most_requests,
            "round_trips": round_trips(entries),
        }


def round_trips(entries: list[Entry]) -> int:
    """Return the maximum number of requests of which each began after the one before had ended."""
    count, last = 0, float("-inf")
    for entry in sorted(entries, key=lambda entry: entry.ended):
        if entry.began > last:
            count, last = count + 1, entry.ended
    return count
