"""Run jobs in threads with limited concurrency and memory. The first failure ends them. No torch.

The threads of this package are started by :func:`run_jobs` for many jobs and by :func:`in_thread` for one call. There
are three exceptions: executors of the standard library for calls that arrive one by one (:func:`thread_pool`,
background saves, tensors that are read ahead), threads of a mesh that wait in gloo, and threads of a run that wait for
deletions or a signal.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Generic, TypeVar

import numpy as np

T = TypeVar("T")


def run_jobs(
    jobs: Iterable[Callable[[], T]],
    concurrency: int | Callable[[], int],
    *,
    caller_draws: bool = False,
    on_failure: Callable[[], None] = lambda: None,
) -> list[T]:
    """Run jobs on ``concurrency`` threads, and return their results in order. After an error, no further job begins.

    The calling thread is one of these threads. Each free thread draws the next job, so at most ``concurrency`` jobs of
    a generator exist at a time. ``concurrency`` can be a function, if the number changes. Superfluous threads would
    compete for the interpreter and the processor caches.

    Args:
        caller_draws: the calling thread draws all jobs, a few in advance, and runs none. This is for a generator that
            only one thread may use.
        on_failure: called in any thread after a failure, so that the generator can stop waiting.
    """

    def limit() -> int:
        return concurrency if isinstance(concurrency, int) else concurrency()

    if caller_draws:
        return _run_drawn_by_caller(jobs, limit, on_failure)
    workers = _Workers(jobs, limit)
    workers.work()
    return workers.results()


@contextmanager
def in_thread(call: Callable[[], T], *, at_once: bool = False) -> Iterator[Callable[[], T]]:
    """Run a call in a new thread, and yield a function that waits for its result or raises its error.

    The block ends after the call. With ``at_once``, the call runs first in this thread, because it is faster than the
    start of a thread.
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

    # Not a pool, because pools accept no work during interpreter shutdown, when a background save can still run.
    thread = threading.Thread(target=work, name="zarrckpt-call")
    with suppress(RuntimeError):  # The system has no thread left.
        thread.start()
    if thread.ident is None:
        work()

    def wait() -> T:
        error = outcome.exception()
        if error is None:
            return outcome.result()
        # Several threads can raise it and add to its traceback. Each begins with the traceback of the call.
        raise error.with_traceback(raised_at)

    try:
        yield wait
    finally:
        if thread.ident is not None:
            thread.join()


_pools: dict[tuple[int, str], ThreadPoolExecutor] = {}


def thread_pool(name: str, threads: int) -> ThreadPoolExecutor:
    """Return this process's pool of a name, with at most this number of threads.

    Pools are kept because starting threads takes as long as the rest of a small save. Each process has its own, because
    a forked process has none of its parent's threads.
    """
    key = os.getpid(), name
    return _pools.get(key) or _pools.setdefault(key, ThreadPoolExecutor(threads, name))


def _run_drawn_by_caller(
    jobs: Iterable[Callable[[], T]], limit: Callable[[], int], on_failure: Callable[[], None]
) -> list[T]:
    drawn: SimpleQueue[Callable[[], T] | None] = SimpleQueue()
    # The number of jobs that may be drawn before a thread takes one from the queue.
    free = threading.Semaphore(limit())

    def queued() -> Iterator[Callable[[], T]]:
        while (job := drawn.get()) is not None:
            free.release()
            yield job

    def stop() -> None:
        free.release()
        on_failure()

    workers = _Workers(queued(), limit, stop)
    workers.start()
    try:
        for job in jobs:
            free.acquire()
            if workers.stopped:
                break
            drawn.put(job)
    except BaseException:
        workers.stop()
        raise
    finally:
        drawn.put(None)
        workers.join()
    return workers.results()


class _Workers(Generic[T]):
    """Threads that draw jobs one after the other, until there are none or one has failed.

    It is not a pool with a queue, because for small jobs the transfer through a queue, with waits for the interpreter
    lock, takes longer than the job.
    """

    def __init__(
        self, jobs: Iterable[Callable[[], T]], limit: Callable[[], int], on_failure: Callable[[], None] | None = None
    ) -> None:
        self._jobs = enumerate(jobs)
        self._limit = limit
        self._on_failure = on_failure
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
        except BaseException:  # from a signal between two jobs
            self.stop()
            self.join()
            raise

    def start(self) -> None:
        """Start another thread that draws jobs."""
        thread = threading.Thread(target=self._work, name="zarrckpt")
        self._working += 1
        try:
            thread.start()
        except RuntimeError:
            self._working -= 1
            raise
        self._threads.append(thread)

    def stop(self) -> None:
        """Begin no further job."""
        self.stopped = True
        if self._on_failure is not None:
            self._on_failure()

    def join(self) -> None:
        """Wait until all jobs that have begun are done."""
        # The list can grow during the loop, because threads start other threads.
        for thread in self._threads:
            thread.join()

    def results(self) -> list[T]:
        """Return the results of the jobs in their order. Raises the first error."""
        if self._failures:
            raise self._failures[0]
        return [self._results[number] for number in range(len(self._results))]

    def _work(self) -> None:
        while (task := self._draw()) is not None:
            try:
                self._results[task[0]] = task[1]()
            except BaseException as err:
                self._fail(err)
            # A job can hold the memory of a chunk.
            del task

    def _draw(self) -> tuple[int, Callable[[], T]] | None:
        """Return the next job, or None if this thread must end. Starts another thread if one more is useful."""
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
                with suppress(RuntimeError):  # The system has no thread left, so the existing threads do the work.
                    self.start()
            return task

    def _fail(self, error: BaseException) -> None:
        self._failures.append(error)
        self.stop()


Progress = Callable[[int, int], None]
"""Called with the bytes done and the total bytes, one call at a time."""


DEFAULT_MAX_INFLIGHT_BYTES = 512 << 20


class ByteCounter:
    """Counts the bytes of jobs on many threads, and reports the progress."""

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
    """Raise TypeError or ValueError for a limit that is not an integer or is below ``least``."""
    for name, value in limits.items():
        if not isinstance(value, int):
            raise TypeError(f"{name} must be an int, got {value!r} of type {type(value).__name__}")
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")


Bytes = np.ndarray[Any, np.dtype[np.uint8]]


MAPPED = 1 << 20
"""Memory of at least this many bytes is mapped from the system instead of allocated."""


def plain_bytes(nbytes: int) -> Bytes:
    """Return uninitialised memory. The system gets large memory back when it is freed.

    The allocator would keep it for each thread.
    """
    if nbytes < MAPPED:
        return np.empty(nbytes, np.uint8)
    try:
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as err:
        # The same error as from the allocator.
        raise MemoryError(f"{nbytes} bytes cannot be allocated: {err}") from err
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # As in numpy: one page fault per 2 MiB if the kernel has huge pages.
        with suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)


class BytesBudget:
    """A semaphore in bytes that also lends memory. A job that exceeds the whole budget waits until it is alone.

    Returned memory of the same size is lent again, because new memory costs as much time as the copy of a chunk. Memory
    that is kept for this counts as used.
    """

    def __init__(self, limit: int, allocate: Callable[[int], Bytes] = plain_bytes) -> None:
        self.limit = limit
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
            self._trim()
        try:
            yield
        finally:
            self._release(need)

    def take(self, nbytes: int, elsewhere: int = 0) -> AbstractContextManager[Bytes]:
        """Lend uninitialised memory, and count ``elsewhere`` bytes that the job allocates itself.

        A job takes all its memory in one call. Jobs that hold some and wait for more could wait for each other.
        """
        return self._take(nbytes, elsewhere) if nbytes + elsewhere else nullcontext(np.empty(0, np.uint8))

    @contextmanager
    def _take(self, nbytes: int, elsewhere: int) -> Iterator[Bytes]:
        # Other memory than plain memory is pinned. Torch rounds it up to a power of two.
        size = _rounded(nbytes, 4 if self._allocate is plain_bytes else 1)
        need = min(size + elsewhere, self.limit)
        with self._changed:
            self._reserve(need)
            memory = self._kept(size)
            self._trim()
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
            self._trim()
            self._changed.notify_all()

    def _kept(self, size: int) -> Bytes | None:
        for index, memory in enumerate(self._free):
            if len(memory) == size:
                return self._free.pop(index)
        return None

    def _trim(self) -> None:
        """Free kept memory until held and kept memory are within the limit."""
        kept = sum(map(len, self._free))
        while self._free and self._held + kept > self.limit:
            kept -= len(self._free.pop(0))


def _rounded(nbytes: int, bits: int) -> int:
    """Return a size rounded up to a number of significant bits: 4 for at most 1/8 more, 1 for a power of two.

    With few different sizes, returned memory can be used again.
    """
    step = max(1024, 1 << max(0, nbytes.bit_length() - bits))
    return -(-nbytes // step) * step
