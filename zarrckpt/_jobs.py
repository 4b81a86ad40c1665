"""Run jobs side by side: no more at a time than are useful, in bounded memory; the first failure wins. No torch.

All threads of the package come from :func:`run_jobs`, for jobs, and :func:`in_thread`, for one call; but for two
executors of the standard library, where calls come one by one (the syncs of local files, background saves), the
threads of a mesh that wait in gloo, and those of a run, which wait for something to delete, or for a signal.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Generic, TypeVar

import numpy as np

T = TypeVar("T")


def run_jobs(
    jobs: Iterable[Callable[[], T]],
    concurrency: int | Callable[[], int],
    *,
    drawn_here: bool = False,
    stopping: Callable[[], None] = lambda: None,
) -> list[T]:
    """Run jobs on ``concurrency`` threads; return their results in order. The first error stops what has not begun.

    The calling thread is one of them, and whichever is free draws the next job, so that a generator never holds more
    than these alive. ``drawn_here``: the calling thread draws all of them instead, a few ahead, and does none;
    ``stopping`` is called, in any thread, when one has failed, so that the generator waits for none of them any more.

    ``concurrency`` may be a function where the number changes: threads beyond what is useful would only wait, and take
    turns with the interpreter and the processors' caches that the others need.
    """

    def limit() -> int:
        return concurrency if isinstance(concurrency, int) else concurrency()

    if drawn_here:
        return _run_drawn_here(jobs, limit, stopping)
    crew = _Crew(jobs, limit)
    crew.work()
    return crew.results()


@contextmanager
def in_thread(call: Callable[[], T], *, at_once: bool = False) -> Iterator[Callable[[], T]]:
    """Run a call in a thread of its own, until it ends. What this yields waits for the result, or raises the error.

    ``at_once``: in this thread, before anything else, where that takes no longer than the start of a thread.
    """
    if at_once:
        result = call()
        yield lambda: result
        return
    outcome: Future[T] = Future()
    raised_at: TracebackType | None = None

    def work() -> None:
        nonlocal raised_at
        try:
            outcome.set_result(call())
        except BaseException as err:
            raised_at = err.__traceback__
            outcome.set_exception(err)

    # Not a pool: pools take no work while the interpreter shuts down, when a background save may still run.
    thread = threading.Thread(target=work, name="zarrckpt-call")
    with suppress(RuntimeError):  # the system has no thread left
        thread.start()
    if thread.ident is None:
        work()

    def wait() -> T:
        error = outcome.exception()
        if error is None:
            return outcome.result()
        # Many threads may raise it, and each adds to its traceback: every one begins with the thread's own.
        raise error.with_traceback(raised_at)

    try:
        yield wait
    finally:
        if thread.ident is not None:
            thread.join()


def _run_drawn_here(jobs: Iterable[Callable[[], T]], limit: Callable[[], int], stopping: Callable[[], None]) -> list[T]:
    drawn: SimpleQueue[Callable[[], T] | None] = SimpleQueue()
    room = threading.Semaphore(limit())

    def taken() -> Iterator[Callable[[], T]]:
        while (job := drawn.get()) is not None:
            room.release()
            yield job

    def stop() -> None:
        room.release()
        stopping()

    crew = _Crew(taken(), limit, stop)
    crew.start()
    try:
        for job in jobs:
            room.acquire()
            if crew.stopped:
                break
            drawn.put(job)
    except BaseException:
        crew.stop()
        raise
    finally:
        drawn.put(None)
        crew.join()
    return crew.results()


class _Crew(Generic[T]):
    """Threads that draw jobs, one after the other, until there are none or one has failed.

    Not a pool that somebody hands jobs to: for small jobs the handing over, where threads wait for the interpreter's
    lock, takes longer than what is done.
    """

    def __init__(
        self, jobs: Iterable[Callable[[], T]], limit: Callable[[], int], stopping: Callable[[], None] | None = None
    ) -> None:
        self._jobs = enumerate(jobs)
        self._limit = limit
        self._stopping = stopping
        self._drawing = threading.Lock()
        self._working = 0
        self._threads: list[threading.Thread] = []
        self._results: dict[int, T] = {}
        self._failures: list[BaseException] = []
        self.stopped = False

    def work(self) -> None:
        """Draw jobs in this thread too, until all are done."""
        self._working += 1
        try:
            self._work()
            self.join()
        except BaseException:  # a signal's, between two jobs
            self.stop()
            self.join()
            raise

    def start(self) -> None:
        """Begin to draw jobs in other threads."""
        thread = threading.Thread(target=self._work, name="zarrckpt")
        self._working += 1
        try:
            thread.start()
        except RuntimeError:
            self._working -= 1
            raise
        self._threads.append(thread)

    def stop(self) -> None:
        """No further job is begun."""
        self.stopped = True
        if self._stopping is not None:
            self._stopping()

    def join(self) -> None:
        """Wait until what has begun is done."""
        # The list grows meanwhile: threads start others.
        for thread in self._threads:
            thread.join()

    def results(self) -> list[T]:
        """What the jobs have returned, in their order. Raises the first of their errors."""
        if self._failures:
            raise self._failures[0]
        return [self._results[number] for number in range(len(self._results))]

    def _work(self) -> None:
        while (task := self._draw()) is not None:
            try:
                self._results[task[0]] = task[1]()
            except BaseException as err:
                self._fail(err)
            # A job may hold a chunk's memory.
            del task

    def _draw(self) -> tuple[int, Callable[[], T]] | None:
        """The next job; None where this thread is to end. Another thread starts where one more is useful."""
        with self._drawing:
            task = None
            if self._working <= self._limit() and not self.stopped:
                try:
                    task = next(self._jobs, None)
                    self.stopped |= task is None
                except BaseException as err:
                    self._fail(err)
            if task is None or self.stopped:
                self._working -= 1
                return None
            if self._working < self._limit():
                with suppress(RuntimeError):  # the system has no thread left: the others do the work
                    self.start()
            return task

    def _fail(self, error: BaseException) -> None:
        self._failures.append(error)
        self.stop()


Progress = Callable[[int, int], None]
"""Called with the bytes done and the bytes in all, one call at a time."""


DEFAULT_MAX_INFLIGHT_BYTES = 512 << 20


class Tally:
    """Counts the bytes of jobs on many threads, and tells whoever follows them."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self.total = total
        self.done = 0
        self._progress = progress
        self._lock = threading.Lock()

    def add(self, nbytes: int) -> None:
        """Count bytes that are done."""
        with self._lock:
            self.done += nbytes
            if self._progress is not None:
                self._progress(self.done, self.total)


def check_limits(least: int = 1, /, **limits: int) -> None:
    """Refuse limits that are no integers, or too small. Raises TypeError and ValueError naming the argument."""
    for name, value in limits.items():
        if not isinstance(value, int):
            raise TypeError(f"{name} must be an int, got {value!r} of type {type(value).__name__}")
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")


Bytes = np.ndarray[Any, np.dtype[np.uint8]]


MAPPED = 1 << 20
"""From this many bytes on, memory is mapped from the system, not taken from the allocator."""


def plain_bytes(nbytes: int) -> Bytes:
    """Memory with any contents. The system gets large ones back as soon as they are freed.

    The allocator would keep them, for each thread.
    """
    if nbytes < MAPPED:
        return np.empty(nbytes, np.uint8)
    try:
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as err:
        # The error that the allocator raises.
        raise MemoryError(f"{nbytes} bytes cannot be allocated: {err}") from err
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # As numpy does: one page fault for 2 MiB, where the kernel has huge pages.
        with suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)


class BytesBudget:
    """A semaphore in bytes, which lends memory too. A job larger than the whole budget waits until it is alone.

    Memory that was lent before is lent again where it fits: new memory costs the system as much time, page by page, as
    copying a chunk does. What is kept for that counts as used.
    """

    def __init__(self, limit: int, allocate: Callable[[int], Bytes] = plain_bytes) -> None:
        self.limit = limit
        self.is_special = allocate is not plain_bytes
        """Whether what it lends is better than other memory: a GPU copies from it faster."""
        self._allocate = allocate
        self._held = 0
        self._free: list[Bytes] = []
        self._changed = threading.Condition()

    @contextmanager
    def hold(self, nbytes: int) -> Iterator[None]:
        """Count memory that was allocated elsewhere."""
        need = min(nbytes, self.limit)
        with self._changed:
            self._reserve(need)
            self._give_back()
        try:
            yield
        finally:
            self._release(need)

    @contextmanager
    def take(self, nbytes: int, beside: int = 0) -> Iterator[Bytes]:
        """Lend memory of that many bytes, with any contents, and count ``beside`` bytes that were allocated elsewhere.

        A job takes all that it needs at once: jobs that hold some and wait for more could wait for each other.
        """
        if not nbytes + beside:
            yield np.empty(0, np.uint8)
            return
        size = _rounded(nbytes)
        need = min(size + beside, self.limit)
        with self._changed:
            self._reserve(need)
            memory = self._kept(size)
            self._give_back()
        try:
            if memory is None:
                memory = self._allocate(size)
            yield memory[:nbytes]
        finally:
            self._release(need, memory)

    def _reserve(self, need: int) -> None:
        self._changed.wait_for(lambda: self._held + need <= self.limit)
        self._held += need

    def _release(self, need: int, memory: Bytes | None = None) -> None:
        with self._changed:
            self._held -= need
            if memory is not None:
                self._free.append(memory)
            self._give_back()
            self._changed.notify_all()

    def _kept(self, size: int) -> Bytes | None:
        for place, memory in enumerate(self._free):
            if len(memory) == size:
                return self._free.pop(place)
        return None

    def _give_back(self) -> None:
        """Return free memory to the system until what is held and kept is within the limit."""
        kept = sum(map(len, self._free))
        while self._free and self._held + kept > self.limit:
            kept -= len(self._free.pop(0))


def _rounded(nbytes: int) -> int:
    """Rounded up by at most an eighth: with few different sizes, freed memory fits again."""
    step = max(1024, 1 << max(0, nbytes.bit_length() - 4))
    return -(-nbytes // step) * step
