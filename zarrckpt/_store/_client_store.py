"""Common code of the stores that use another library's client: full names of objects, and reads that are too short."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from zarrckpt._errors import ObjectNotFoundError, StorageError
from zarrckpt._jobs import run_jobs
from zarrckpt._store import _failures
from zarrckpt._store._base import Buffer, check_key
from zarrckpt._store._conditional_puts import ConditionalStore, ConditionSupport
from zarrckpt._store._regular_files import MAX_WHOLE_BYTES
from zarrckpt._store._secrets import scrub, secret_values

DELETES_AT_ONCE = 16


class ClientStore(ConditionalStore):
    """Objects whose names begin with a folder. Subclasses pass full names to their client, within :meth:`call`.

    Args:
        url: the url in messages.
        folder: the folder of all names, without "/" at the end ("" for none).
        conditions: the server's support of conditional puts, as far as it is known.
        lock: a lock for conditional puts if the server ignores conditions.
        secrets: texts that no message may contain.
    """

    lowest_levels = 0
    """Number of leading path components that are not folders (1 if the first is the bucket)."""

    def __init__(
        self,
        url: str,
        folder: str,
        conditions: ConditionSupport,
        lock: AbstractContextManager[Any] | None = None,
        secrets: Sequence[str] = (),
    ) -> None:
        super().__init__(conditions, lock)
        self.url = url
        self._folder = folder
        self.secrets = secrets

    # -- implemented by subclasses

    @abc.abstractmethod
    def get_named(self, name: str, max_bytes: int) -> bytes:
        """Return a whole object. If it is longer than ``max_bytes`` bytes, ``max_bytes + 1`` bytes are enough."""

    @abc.abstractmethod
    def fetch_named(self, name: str, start: int, end: int) -> Buffer:
        """Return a range of an object. If the object ends earlier, return less or raise an error."""

    @abc.abstractmethod
    def size_named(self, name: str) -> int:
        """Return an object's size in bytes."""

    @abc.abstractmethod
    def delete_named(self, name: str) -> None:
        """Delete an object. An absent one is no error."""

    max_upload_bytes = 0
    """Maximum size in bytes of an object that is uploaded while it is made. 0 if the store has no such uploads.

    Otherwise the store has ``open_upload(key)``, which returns a writer whose errors are the client's, and
    ``copy_new(source_key, key)``, which returns False if an object has the new key already.
    """

    def failure(self, what: str, error: BaseException) -> StorageError:
        # The environment may hold new credentials since the store was opened.
        self.secrets = [*dict.fromkeys((*self.secrets, *secret_values({})))]
        return super().failure(what, error)

    def renewal_hint(self, option: str | None, renewal_error: BaseException | None) -> str:
        """Return the next step after refused credentials. Credentials in an option cannot be read again."""
        if option is not None:
            return (
                f"Check the credentials. They were passed as the option {option} and cannot be renewed: pass new ones, "
                "or use a profile, the environment or a credential_provider, which are read again"
            )
        again = "They were read again from their source, and the new ones were refused as well"
        if renewal_error is not None:
            again = f"Reading them again failed: {renewal_error}"
        return scrub(f"Check the credentials and their permissions. {again}", self.secrets)

    # -- the store

    def name(self, key: str) -> str:
        """Return an object's full name. Raises StorageError for an invalid key."""
        return f"{self._folder}/{check_key(key)}" if self._folder else check_key(key)

    def folder(self, prefix: str) -> str:
        """Return the full name of a folder ("" is the url's own folder)."""
        return self.name(prefix) if prefix else self._folder

    def get(self, key: str) -> bytes:
        return self._get(key, self.name(key), MAX_WHOLE_BYTES)

    def size(self, key: str) -> int:
        return self.call(f"reading the size of {key!r}", lambda: self.size_named(self.name(key)), key)

    def get_bounded(self, key: str, max_bytes: int) -> bytes:
        return self._get(key, self.name(key), max_bytes)

    def _get(self, key: str, name: str, max_bytes: int) -> bytes:
        data = self.call(f"reading {key!r}", lambda: self.get_named(name, max_bytes), key)
        if len(data) > max_bytes:
            raise _failures.long_object(key, self.url, max_bytes)
        return data

    def get_above(self, levels: int, key: str) -> bytes:
        above = self._folder.split("/") if self._folder else []
        if levels > len(above) - self.lowest_levels:
            return super().get_above(levels, key)
        name = "/".join([*above[:-levels], check_key(key)])
        return self._get(f"{'../' * levels}{key}", name, MAX_WHOLE_BYTES)

    def first_bytes(self, nbytes: int) -> bytes:
        with contextlib.suppress(StorageError):
            if self._folder:
                return bytes(self.call("reading", lambda: self.fetch_named(self._folder, 0, nbytes)))
        return b""

    def read_into(self, key: str, byte_offset: int, buffer: memoryview) -> None:
        buffer[:] = self.read(key, byte_offset, len(buffer))

    def read(self, key: str, byte_offset: int, nbytes: int) -> memoryview:
        if not nbytes:
            return memoryview(b"")
        name, end = self.name(key), byte_offset + nbytes
        try:
            data = self.call(f"reading {key!r}", lambda: memoryview(self.fetch_named(name, byte_offset, end)), key)
        except ObjectNotFoundError:
            raise
        except StorageError:
            # Clients have no distinct error for a range behind the end.
            self._refuse_short(key, end)
            raise
        if len(data) != nbytes:
            if not len(data):
                # The range begins at the end or behind it.
                self._refuse_short(key, end)
            if len(data) > nbytes:
                raise _failures.ranges_ignored(key, self.url, nbytes, len(data))
            raise _failures.short_object(key, self.url, end, byte_offset + len(data))
        return data

    def delete(self, keys: Iterable[str]) -> None:
        def delete(name: str) -> None:
            self.call(f"deleting {name!r}", lambda: self.delete_named(name))

        names = [self.name(key) for key in keys]
        run_jobs((partial(delete, name) for name in names), min(DELETES_AT_ONCE, self.max_concurrency))

    def _refuse_short(self, key: str, needed: int) -> None:
        """Raise CorruptCheckpointError if the object is shorter. One request. If it fails, return without an error."""
        with contextlib.suppress(StorageError):
            size = self.size(key)
            if size < needed:
                raise _failures.short_object(key, self.url, needed, size)
