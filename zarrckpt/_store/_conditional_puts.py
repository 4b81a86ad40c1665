"""Conditional puts, create-only and compare-and-swap, on servers that honour conditions and on those that ignore them.

If a server ignores conditions, the store reads the object and then puts it. This excludes no race between processes.
"""

from __future__ import annotations

import abc
import time
import uuid
import warnings
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

from zarrckpt._errors import ObjectNotFoundError, StorageError
from zarrckpt._forks import ForkSafeLock
from zarrckpt._store import _failures
from zarrckpt._store._base import Store, VersionedObject

_PUT_TRIES = 5


class NoConditionsError(StorageError):
    """The server refuses every put with a condition because it does not support conditions (Backblaze B2)."""


@dataclass
class ConditionSupport:
    """Whether a server honours each condition. None means that this is not known yet."""

    creates: bool | None = None
    matches: bool | None = None
    copies: bool | None = None
    """Whether it refuses to copy to an object that exists."""


_known_support: dict[str, ConditionSupport] = {}


def support_of(server: str) -> ConditionSupport:
    """Return this process's record of a server. Its first save fills it in, and later saves reuse it."""
    return _known_support.setdefault(server, ConditionSupport())


class ConditionalStore(Store):
    """A store that sends conditional puts. On a server that ignores conditions it reads, then puts, and warns once.

    After a lost answer, the store reads the object to see whether its put succeeded. The first puts test whether an
    unknown server honours conditions. The first create costs one more read before it and one repeated put after it. The
    first replace costs seven small requests on a probe object. The store is thread-safe. Threads that share ``lock``
    exclude each other even if the server ignores conditions.
    """

    def __init__(self, conditions: ConditionSupport, lock: AbstractContextManager[Any] | None = None) -> None:
        self._conditions = conditions
        self._lock = lock or ForkSafeLock()
        self._warned = False

    @abc.abstractmethod
    def put_if_absent(self, key: str, data: bytes) -> bool:
        """Make one put that the server must refuse if the object exists. Return False if it was refused.

        If the server's support is not known yet, raises NoConditionsError for a server without conditions.
        """

    @abc.abstractmethod
    def put_if_version(self, key: str, data: bytes, version: Any) -> bool:
        """Make one put that the server must refuse unless the object has this version. Errors as in put_if_absent."""

    def read_if_any(self, key: str) -> VersionedObject | None:
        """Return the object, or None if it is absent."""
        try:
            return self.get_versioned(key)
        except ObjectNotFoundError:
            return None

    def create(self, key: str, data: bytes) -> None:
        with nullcontext() if self._conditions.creates else self._lock:
            if not self._conditions.creates and self._is_own(key, data):
                return
            for attempt in range(_PUT_TRIES):
                if self._conditions.creates is False:
                    self._warn()
                    return self.put(key, [data])
                try:
                    done = self.put_if_absent(key, data)
                except NoConditionsError:
                    self._conditions.creates = False
                    continue
                if done:
                    if self._conditions.creates is None:
                        # Repeat the put with the same bytes: it must be refused.
                        self._conditions.creates = not self.put_if_absent(key, data)
                        if not self._conditions.creates:
                            self._warn()
                    return
                if self._conditions.creates is None:
                    self._conditions.creates = True
                if self._is_own(key, data):
                    return
                # Refused although the object is absent: another put is in progress, or its object was deleted.
                time.sleep(0.05 * 2**attempt)
        raise StorageError(
            f"{key!r} in {self.url} cannot be created: the server refuses the put because the object exists, but does "
            "not find the object. Try again. If the error persists, the server's conditional puts are broken"
        )

    def replace(self, key: str, data: bytes, version: Any) -> None:
        if self._conditions.matches is None:
            self._conditions.matches = self._server_honours_match()
        if not self._conditions.matches:
            return self._check_and_put(key, data, version)
        for attempt in range(_PUT_TRIES):
            if self.put_if_version(key, data, version):
                return
            found = self.read_if_any(key)
            if found is not None and found.data == data:
                # This call wrote it, and the answer was lost.
                return
            if found is None or found.version != version:
                break
            # Refused although the version is unchanged: another put is in progress.
            time.sleep(0.05 * 2**attempt)
        raise _failures.conflict(key, self.url, replacing=True)

    def _check_and_put(self, key: str, data: bytes, version: Any) -> None:
        with self._lock:
            self._warn()
            found = self.read_if_any(key)
            if found is not None and found.version == version:
                self.put(key, [data])
            elif found is None or found.data != data:
                raise _failures.conflict(key, self.url, replacing=True)

    def _server_honours_match(self) -> bool:
        """Test a probe object: some servers ignore If-Match, and some always refuse it (Ceph 16 with versioning)."""
        probe = f"@zarrckpt/probe-{uuid.uuid4().hex}"
        self.put(probe, [b"1"])
        try:
            first = self.get_versioned(probe).version
            # If the client repeated the put after a lost answer, the repeat is refused.
            done = self.put_if_version(probe, b"2", first) or self.get(probe) == b"2"
            return done and not self.put_if_version(probe, b"3", first)
        except NoConditionsError:
            return False
        finally:
            # The credentials may permit puts but no deletes.
            with suppress(StorageError):
                self.delete([probe])

    def _is_own(self, key: str, data: bytes) -> bool:
        """Whether the object exists with this data, so that this caller wrote it. Raises if it has other data."""
        found = self.read_if_any(key)
        if found is not None and found.data != data:
            raise _failures.conflict(key, self.url, replacing=False)
        return found is not None

    def _warn(self) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"{self.url}: this store does not honour conditional puts, so the guard against two saves to one path "
                "is best effort. If two saves commit at the same moment, both may succeed, and one is lost. Make sure "
                "that only one save writes to a path at a time.",
                UserWarning,
                stacklevel=2,
            )
