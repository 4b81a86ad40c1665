"""Create-only and compare-and-swap puts, on servers that honour conditions and on those that ignore them."""

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
from zarrckpt._store._base import Store, Versioned

_ATTEMPTS = 5


class NoConditionsError(StorageError):
    """The server refuses every put that has a condition, since it knows none (Backblaze B2)."""


@dataclass
class Honoured:
    """Whether a server honours either condition: True where that is known, False where it has none, None: find out."""

    creates: bool | None = None
    matches: bool | None = None


_found_out: dict[str, Honoured] = {}


def honoured_by(server: str) -> Honoured:
    """What this process has found out about a server: one save asks, and those after it need not."""
    return _found_out.setdefault(server, Honoured())


class ConditionalStore(Store):
    """A store whose server is asked to refuse puts; where it does not, they are check-then-put, with one warning.

    Lost answers are settled here, and what is not known of the server is found out by the first puts. That costs one
    read before and one repeated put after the first create, and seven small requests on a probe object before the first
    replace. Safe for many threads: those that share ``lock`` are exact even on a server that is not.
    """

    def __init__(self, honoured: Honoured, lock: AbstractContextManager[Any] | None = None) -> None:
        self._honoured = honoured
        self._lock = lock or ForkSafeLock()
        self._warned = False

    @abc.abstractmethod
    def put_if_absent(self, key: str, data: bytes) -> bool:
        """One put that the server is asked to refuse where an object exists. False: it was refused.

        Raises NoConditionsError, while it is not known whether they are honoured, where the server has no conditions.
        """

    @abc.abstractmethod
    def put_if_version(self, key: str, data: bytes, version: Any) -> bool:
        """One put that the server is asked to refuse where the object is absent or not ``version``; errors as above."""

    def read_if_any(self, key: str) -> Versioned | None:
        """The object, or None where there is none."""
        try:
            return self.get_versioned(key)
        except ObjectNotFoundError:
            return None

    def create(self, key: str, data: bytes) -> None:
        with nullcontext() if self._honoured.creates else self._lock:
            if not self._honoured.creates and self._is_own(key, data):
                return
            for attempt in range(_ATTEMPTS):
                if self._honoured.creates is False:
                    self._warn()
                    return self.put(key, [data])
                try:
                    done = self.put_if_absent(key, data)
                except NoConditionsError:
                    self._honoured.creates = False
                    continue
                if done:
                    if self._honoured.creates is None:
                        # Does a second one, of the same bytes, fail as it must?
                        self._honoured.creates = not self.put_if_absent(key, data)
                        if not self._honoured.creates:
                            self._warn()
                    return
                if self._honoured.creates is None:
                    self._honoured.creates = True
                if self._is_own(key, data):
                    return
                # Refused, and yet nothing is there: another put is under way, or was taken back.
                time.sleep(0.05 * 2**attempt)
        raise StorageError(
            f"{key!r} in {self.url} cannot be created: the store says that it exists, and does not find it. Try again; "
            "if it stays so, the server's conditional puts are broken"
        )

    def replace(self, key: str, data: bytes, version: Any) -> None:
        if self._honoured.matches is None:
            self._honoured.matches = self._server_honours_match()
        if not self._honoured.matches:
            return self._check_and_put(key, data, version)
        for attempt in range(_ATTEMPTS):
            if self.put_if_version(key, data, version):
                return
            found = self.read_if_any(key)
            if found is not None and found.data == data:
                # Ours already: an earlier answer was lost.
                return
            if found is None or found.version != version:
                break
            # Refused, and yet nothing changed: another put is under way.
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
        """Try on an object of our own: some servers ignore If-Match, some always refuse it (Ceph 16, versioned)."""
        probe = f"@zarrckpt/probe-{uuid.uuid4().hex}"
        self.put(probe, [b"1"])
        try:
            first = self.get_versioned(probe).version
            # A refusal may answer a repeat of the put whose answer was lost.
            done = self.put_if_version(probe, b"2", first) or self.get(probe) == b"2"
            return done and not self.put_if_version(probe, b"3", first)
        except NoConditionsError:
            return False
        finally:
            # Who may delete nothing may put all the same.
            with suppress(StorageError):
                self.delete([probe])

    def _is_own(self, key: str, data: bytes) -> bool:
        """True: the object is there and ours (an earlier answer was lost). Raises where it is another's."""
        found = self.read_if_any(key)
        if found is not None and found.data != data:
            raise _failures.conflict(key, self.url, replacing=False)
        return found is not None

    def _warn(self) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"{self.url}: this store does not honour conditional puts, so the guard against two saves to one path "
                "is best effort: of two that commit at the same moment both may succeed, and one is lost. Make sure "
                "that only one save writes to a path at a time.",
                UserWarning,
                stacklevel=2,
            )
