"""Run jobs side by side: no more at a time than are useful, the first failure wins. No torch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")


def run(
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
def beside(call: Callable[[], T], *, at_once: bool = False) -> Iterator[Callable[[], T]]:
    """Run a call in a thread of its own, until it ends. What this yields waits for the result, or raises the error.

    ``at_once``: in this thread, before anything else, where that takes no longer than the start of a thread.
    """
    if at_once:
        result = call()
        yield lambda: result
        return
    outcome: Future[T] = Future()

    def work() -> None:
        try:
            outcome.set_result(call())
        except BaseException as err:
            outcome.set_exception(err)

    # No pool: those take no work while the interpreter shuts down, when a save in the background still goes on.
    thread = threading.Thread(target=work, name="zarrckpt-beside")
    with suppress(RuntimeError):  # the system has no more
        thread.start()
    if thread.ident is None:
        work()
    try:
        yield outcome.result
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
                with suppress(RuntimeError):  # the system has no more: those that there are do the work
                    self.start()
            return task

    def _fail(self, error: BaseException) -> None:
        self._failures.append(error)
        self.stop()
