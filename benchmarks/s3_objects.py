"""What the benchmarks' S3 server keeps: buckets of objects in memory, multipart uploads, counts of what happened."""

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
    """Lends memory for bodies, and lends it again once nobody has it any more. Safe for threads.

    New memory costs a virtual machine between nothing and several times the copy into it, depending on what was freed
    there how long ago: whoever came first after a pause would pay for it.
    """

    BLOCK = 256 << 20
    PAGE = 4096

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks: list[mmap.mmap] = []
        self._free: list[tuple[int, int, int]] = []
        """(block, begin, end), sorted."""
        self._returned: deque[tuple[int, int, int]] = deque()
        """Not free yet: views may end at any moment, within one of the calls here too."""

    def lend(self, size: int) -> memoryview:
        """Memory of that many bytes, with whatever is in it. It comes back when the last view of it is gone."""
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
    """Memory for a body of ``size`` bytes."""
    return memoryview(bytearray(size)) if size < SMALL else _memory.lend(size)


@dataclass(frozen=True)
class Stored:
    """One object: the parts as they arrived (never joined), its etag, and when it came."""

    parts: tuple[memoryview, ...]
    etag: str
    time: float = field(default_factory=time.time)

    @property
    def size(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def views(self, begin: int, end: int) -> list[memoryview]:
        """The bytes from ``begin`` up to ``end``, as pieces of the parts."""
        found, at = [], 0
        for part in self.parts:
            low, high = max(begin - at, 0), min(end - at, part.nbytes)
            if low < high:
                found.append(part[low:high])
            at += part.nbytes
        return found


class Failed(Exception):
    """An answer that is no success: HTTP status and S3's error code."""

    def __init__(self, status: int, code: str) -> None:
        super().__init__(status, code)
        self.status, self.code = status, code


class Buckets:
    """All objects by bucket and key. A bucket exists as soon as it is named. Safe for threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._buckets: dict[str, dict[str, Stored]] = {}
        self._uploads: dict[str, dict[int, Stored]] = {}
        self._number = 0

    def _next(self) -> int:
        self._number += 1
        return self._number

    def names(self) -> list[str]:
        with self._lock:
            return sorted(self._buckets)

    def get(self, bucket: str, key: str) -> Stored:
        with self._lock:
            found = self._buckets.setdefault(bucket, {}).get(key)
        if found is None:
            raise Failed(404, "NoSuchKey")
        return found

    def put(
        self, bucket: str, key: str, parts: tuple[memoryview, ...], create_only: bool = False, match: str | None = None
    ) -> Stored:
        """Store an object; with ``create_only`` only where there is none, with ``match`` only over that etag."""
        with self._lock:
            objects = self._buckets.setdefault(bucket, {})
            old = objects.get(key)
            if create_only and old is not None:
                raise Failed(412, "PreconditionFailed")
            if match is not None and old is None:
                raise Failed(404, "NoSuchKey")
            if match is not None and old is not None and old.etag != match:
                raise Failed(412, "PreconditionFailed")
            suffix = f"-{len(parts)}" if len(parts) > 1 else ""
            objects[key] = Stored(parts, f'"{self._next():032x}{suffix}"')
            return objects[key]

    def delete(self, bucket: str, key: str) -> None:
        with self._lock:
            self._buckets.setdefault(bucket, {}).pop(key, None)

    def keys(self, bucket: str, prefix: str) -> list[tuple[str, Stored]]:
        with self._lock:
            found = [(key, item) for key, item in self._buckets.get(bucket, {}).items() if key.startswith(prefix)]
        return sorted(found, key=lambda pair: pair[0])

    def begin_upload(self) -> str:
        with self._lock:
            upload = f"upload-{self._next()}"
            self._uploads[upload] = {}
            return upload

    def put_part(self, upload: str, number: int, body: memoryview) -> Stored:
        with self._lock:
            if upload not in self._uploads:
                raise Failed(404, "NoSuchUpload")
            part = self._uploads[upload][number] = Stored((body,), f'"{self._next():032x}"')
            return part

    def complete(self, bucket: str, key: str, upload: str, numbers: list[int], **conditions: Any) -> Stored:
        with self._lock:
            parts = self._uploads.get(upload)
        if parts is None:
            raise Failed(404, "NoSuchUpload")
        if not numbers or any(number not in parts for number in numbers):
            raise Failed(400, "InvalidPart")
        stored = self.put(bucket, key, tuple(parts[number].parts[0] for number in numbers), **conditions)
        self.abort(upload)
        return stored

    def abort(self, upload: str) -> None:
        with self._lock:
            self._uploads.pop(upload, None)


class Entry(NamedTuple):
    """One request in the log: when it began and ended (seconds), what it was, body bytes in and out, the answer."""

    began: float
    ended: float
    operation: str
    key: str
    bytes_in: int
    bytes_out: int
    status: int


class Log:
    """Every request since the last reset, and the most connections and requests that there were at one time."""

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
        """Counts over the log, as the server's ``/-/stats`` gives them."""
        deadline = time.monotonic() + 1
        while self.requests and time.monotonic() < deadline:
            time.sleep(0.001)  # a client has its answer a moment before the request is in the log
        with self._lock:
            entries = list(self.entries)
        return {
            "requests": dict(Counter(entry.operation for entry in entries)),
            "statuses": dict(Counter(str(entry.status) for entry in entries)),
            "bytes_in": sum(entry.bytes_in for entry in entries),
            "bytes_out": sum(entry.bytes_out for entry in entries),
            "most_connections": self.most_connections,
            "most_requests": self.most_requests,
            "round_trips": round_trips(entries),
        }


def round_trips(entries: list[Entry]) -> int:
    """The most requests of which each began after the one before had ended: how often somebody waited in line."""
    count, last = 0, float("-inf")
    for entry in sorted(entries, key=lambda entry: entry.ended):
        if entry.began > last:
            count, last = count + 1, entry.ended
    return count
