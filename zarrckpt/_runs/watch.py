"""``watch``: wait for the next checkpoints of a run. No torch."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from zarrckpt._commit.discovery import number_in
from zarrckpt._commit.listings import list_below
from zarrckpt._errors import CheckpointNotFoundError, StorageError, warn
from zarrckpt._runs.folders import WithoutRoot, newest_first, skip_warning
from zarrckpt._store import Store, StoreSpec, Url, join_url

MIN_INTERVAL = 0.1
"""Minimum number of seconds between two listings."""

_LISTING_TRIES = 10
"""Maximum number of listings that fail one after the other."""


def watch(
    run: Url,
    *,
    existing: bool = True,
    newest_only: bool = False,
    interval: float = 30.0,
    timeout: float | None = None,
    stop: threading.Event | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Iterator[str]:
    """Yield the url of each new checkpoint of a run, as soon as a listing shows it.

    A checkpoint is new if the number at the end of its name is greater than that of the last one that was yielded.
    Folders without a number are ignored. Unfinished and damaged checkpoints are skipped as in :func:`latest`, with one
    warning for each damaged one. A missing root document counts as damage from the second listing on. If the last one
    was removed and none is newer, as after ``restore(rewind=True)``, the newest remaining one is yielded.

    Each process that calls it lists the folder itself, once per interval, plus one request for each new checkpoint and
    for each newer folder without one. The folder need not exist yet. If ``run`` is a store object instead of a url, the
    names below it are yielded. To end it, leave the loop, or set ``stop`` from another thread.

    Args:
        run: the folder that contains the checkpoints.
        existing: yield the newest checkpoint that exists at the first listing (default). If False, wait for the next.
        newest_only: if several new checkpoints are found at once, yield only the newest, as a server needs. By default
            all are yielded, in the order of their steps.
        interval: seconds between listings, at least 0.1 (default 30).
        timeout: maximum number of seconds without a new checkpoint. The default is no limit.
        stop: an event that ends the iteration when it is set, also during a wait.
        storage_options: as in :func:`open`.

    Raises CheckpointNotFoundError after ``timeout``. Raises StorageError if 10 listings in succession have failed. Each
    of the others causes a warning. Raises TypeError and ValueError for a wrong argument.
    """
    for name, value, least in (("interval", interval, MIN_INTERVAL), ("timeout", timeout, 0.0)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise TypeError(f"{name} must be a number of seconds, got {value!r} of type {type(value).__name__}")
        if value is not None and not value >= least:
            raise ValueError(f"{name} must be at least {least} seconds, got {value}")
    watcher = _RunWatcher(StoreSpec(run, storage_options), newest_only, stop or threading.Event())
    names = watcher.new_names(existing, interval, math.inf if timeout is None else timeout)
    return (join_url(run, name) if isinstance(run, str | os.PathLike) else name for name in names)


class _RunWatcher:
    """The search for new checkpoints of one run."""

    def __init__(self, spec: StoreSpec, newest_only: bool, stop: threading.Event) -> None:
        self._spec = spec
        self._newest_only = newest_only
        self._stop = stop
        self._last: str | None = None
        """The name of the last checkpoint that was yielded, or of the newest one that existed at the beginning."""
        self._damaged: set[str] = set()
        """The names of the damaged checkpoints that were warned of."""
        self._without_root: set[str] = set()
        """The names of those that had tables but no root document in an earlier listing."""

    def new_names(self, existing: bool, interval: float, timeout: float) -> Iterator[str]:
        """Yield the names of new checkpoints, see :func:`watch`."""
        is_first, failures, idle_since = True, 0, time.monotonic()
        while not self._stop.is_set():
            listed = time.monotonic()
            try:
                found = self._find_new(newest_only=is_first or self._newest_only)
                failures = 0
            except StorageError as err:
                found, failures = [], failures + 1
                if failures == _LISTING_TRIES:
                    raise
                warn(f"watch({self._spec.url!r}): listing {failures} of at most {_LISTING_TRIES} failed: {err}")
            for name in found:
                if self._stop.is_set():
                    return
                self._last = name
                if existing or not is_first:
                    yield name
                    idle_since = time.monotonic()
            is_first = is_first and failures > 0
            now = time.monotonic()
            if now - idle_since >= timeout:
                raise CheckpointNotFoundError(
                    f"watch({self._spec.url!r}) found no new checkpoint in {timeout:g} seconds, expected one after "
                    f"{self._last or 'the beginning'}: check that the training runs, or pass a longer timeout="
                )
            self._stop.wait(max(0.0, min(listed + interval, idle_since + timeout) - now))

    def _find_new(self, *, newest_only: bool) -> list[str]:
        """Return the names of new checkpoints, ascending by step, or only the newest one. One listing."""
        store = self._spec.open()
        listed = list_below(store)
        if listed.has_save:
            warn(f"watch({store.url!r}) was called with the url of a checkpoint: pass the folder that holds it")
        numbers = {name: number for name in listed.folders if (number := number_in(name)) is not None}
        last = None if self._last is None else number_in(self._last)
        newer = [name for name, number in numbers.items() if last is None or number > last]
        found = self._sound(store, newer, newest_only)
        if not found and self._last is not None and self._last not in numbers:
            found = self._sound(store, numbers, newest_only=True)
        return found

    def _sound(self, store: Store, names: Iterable[str], newest_only: bool) -> list[str]:
        found: list[str] = []
        for below in newest_first(store, names):
            if below.root is not None:
                found.append(below.name)
                if newest_only:
                    break
            elif isinstance(below, WithoutRoot) and below.name not in self._without_root:
                self._without_root.add(below.name)  # A running save may be about to commit.
            elif below.name not in self._damaged:
                self._damaged.add(below.name)
                warn(skip_warning(store, below))
        return found[::-1]
