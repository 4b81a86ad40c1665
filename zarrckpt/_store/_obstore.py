"""S3, Google Cloud Storage and Azure through obstore.

A put is one request, and of a large object a multipart upload of several parts at once; neither copies its buffers.
Puts and reads may be repeated at no risk: they wait at a :class:`~zarrckpt._store._gate.Gate`, which learns from
their failures, and are repeated by :class:`~zarrckpt._store._retries.Retries`. Conditional puts, listings and deletes
are repeated by obstore alone. Until a server has answered once, all are repeated for a second at most, and all but puts
wait ten seconds for an answer: its address may be wrong. Where a server has no conditional puts,
:mod:`zarrckpt._store._guard` takes over.
"""

from __future__ import annotations

import builtins
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeVar

import obstore
from obstore import exceptions as client_errors

from zarrckpt._errors import CheckpointError, ObjectNotFoundError, StorageError
from zarrckpt._store import _failures
from zarrckpt._store._base import Buffer, Listing, ObjectInfo, Store, Upload, Versioned
from zarrckpt._store._direct import TransferError
from zarrckpt._store._fork import check_fork
from zarrckpt._store._gate import DISTANT, MOST, Gate, Slot
from zarrckpt._store._guard import Guard
from zarrckpt._store._keys import above, below, byte_views
from zarrckpt._store._obstore_client import Client

if TYPE_CHECKING:
    from zarr.abc.store import Store as ZarrStore

T = TypeVar("T")

SPLIT = 32 * 2**20
"""Objects from this size on go up in parts: a connection is seldom as fast as the line, and few fit in memory.

From half of that on, and in parts of half the size, where many connections are of use.
"""

_BESIDE = 2
"""So many more than are let through to the server make or take apart what is put or was read."""

_FEW = 2**19
"""So many bytes are read with one call to obstore: what is done around each request costs more than to copy them."""

_PIECE = 2**18
"""Answers come in pieces of about so many bytes, which stay in the processor's cache until they are copied."""

_PART = 16 * 2**20
_PARTS_AT_ONCE = 8
_LEAST_AT_ONCE = 4
_DELETES_AT_ONCE = 16
_DOUBT = 3
"""Before this attempt, or after the last one, the object's size is looked at: a range behind its end always fails."""

_FIRST_PAUSES = (0.05, 0.1, 0.2, 0.4)
"""Seconds between the attempts to reach a server that has not answered this process yet."""

_FIRST_SECONDS = 6.0
"""No attempt begins later than this: of those that get no connection, two then take ten seconds altogether."""

_BUCKET_HINT = "Check that the bucket (or container) exists and that the endpoint and the region are its own"
_ACCESS_HINT = "Check the credentials, and what they allow"
_NETWORK_HINT = "Check the endpoint, the region and the network, and after a refusal the credentials"


class ObstoreStore(Store):
    """Objects below one prefix of a bucket. Safe for many threads; of no use in a forked child."""

    def __init__(self, client: Client, url: str, concurrency: int | None = None) -> None:
        self.url = url
        self.max_concurrency = concurrency or MOST
        self._client = client
        self._bucket = client.bucket
        self._gate = Gate(concurrency)
        self._guard = Guard(self, client.honoured)

    def useful_concurrency(self) -> int:
        # A number that was asked for is kept to exactly.
        return self.max_concurrency if self._gate.fixed else min(self.max_concurrency, self._gate.limit + _BESIDE)

    def get(self, key: str) -> bytes:
        return self._read(key, 0, lambda store: obstore.get(store, self._name(key)).bytes().to_bytes())

    def get_above(self, levels: int, key: str) -> bytes:
        folder = above(self._client.prefix, levels)
        if folder is None:
            return super().get_above(levels, key)
        name = below(folder, key)
        return self._read(f"{'../' * levels}{key}", 0, lambda store: obstore.get(store, name).bytes().to_bytes())

    def get_versioned(self, key: str) -> Versioned:
        def fetch(store: Any) -> Versioned:
            answer = obstore.get(store, self._name(key))
            # None is not taken back as a part of the version.
            version = {name: answer.meta[name] for name in ("e_tag", "version") if answer.meta.get(name) is not None}
            return Versioned(answer.bytes().to_bytes(), version)

        return self._read(key, 0, fetch)

    def read_into(self, key: str, byte_offset: int, buffer: memoryview) -> None:
        if not len(buffer):
            return
        end, tries = byte_offset + len(buffer), itertools.count(1)

        def fetch(store: Any) -> int:
            # A range behind the end is an error of no kind of its own.
            if next(tries) == _DOUBT:
                self._refuse_short(key, end)
            return self._fetch(store, key, byte_offset, buffer)

        try:
            done = self._read(key, len(buffer), fetch)
        except ObjectNotFoundError:
            raise
        except StorageError:
            if next(tries) <= _DOUBT:
                with self._gate.slot(0):
                    self._refuse_short(key, end)
            raise
        if done != len(buffer):
            if not done:
                # The range begins at the end or behind it.
                self._refuse_short(key, end)
            raise _failures.short_object(key, self.url, end, byte_offset + done)

    def _fetch(self, store: Any, key: str, byte_offset: int, buffer: memoryview) -> int:
        """Fill ``buffer``; return how many of its bytes the object has. The last attempt is obstore's alone."""
        whole = (byte_offset, byte_offset + len(buffer))
        if len(buffer) <= _FEW:
            data = memoryview(obstore.get_range(store, self._name(key), start=whole[0], end=whole[1]))
            buffer[: len(data)] = data
            return len(data)
        direct = self._client.direct if store is self._bucket.once else None
        if direct is not None and direct.usable:
            done = direct.read_into(self._name(key), byte_offset, buffer)
            if done is not None:
                return done
        done = 0
        answer = obstore.get(store, self._name(key), options={"range": whole})
        if direct is not None:
            direct.give_up()
        # Piece by piece into memory that is used again: a whole answer would be put together in new memory.
        for piece in answer.stream(min_chunk_size=_PIECE):
            view = memoryview(piece)
            buffer[done : done + len(view)] = view
            done += len(view)
        return done

    def put(self, key: str, buffers: Sequence[Buffer]) -> None:
        views = byte_views(buffers) or [memoryview(b"")]
        nbytes = sum(map(len, views))
        part = self._part_bytes(nbytes)
        if part:
            with self._parts_slot(nbytes, part) as slot:
                self._put_split(key, views, part, slot)
        else:
            self._transfer(f"writing {key!r}", nbytes, lambda store: self._put(store, key, views, use_multipart=False))

    def put_parts(self, key: Callable[[], str], groups: Callable[[], Iterable[Sequence[Buffer]]]) -> None:
        with ExitStack() as stack:
            with self.makers:
                views = byte_views([buffer for group in groups() for buffer in group])
                name = key()
                nbytes = sum(map(len, views))
                part = self._part_bytes(nbytes)
                # Its turn comes before the next one is made: what waits for a connection only takes memory.
                slot = stack.enter_context(self._parts_slot(nbytes, part)) if part else None
            if slot is None:
                self.put(name, views)
            else:
                self._put_split(name, views, part, slot)

    def _part_bytes(self, nbytes: int) -> int:
        """How large the parts are in which an object goes up, 0 where it goes up whole."""
        halves = 2 if self._gate.limit >= DISTANT else 1
        return _PART // halves if nbytes >= SPLIT // halves else 0

    def _parts_slot(self, nbytes: int, part: int) -> AbstractContextManager[Slot]:
        parts = -(-nbytes // part)
        return self._gate.slot(nbytes, min(_PARTS_AT_ONCE, parts), min(_LEAST_AT_ONCE, parts))

    def _put_split(self, key: str, views: Sequence[memoryview], part: int, slot: Slot) -> None:
        # obstore takes a buffer at a time, and begins all parts that are in it at once.
        pieces = [view[at : at + part] for view in views for at in range(0, len(view), part)]
        # It begins the last part without waiting for its turn; it does wait for that of a buffer after it.
        pieces.append(memoryview(b""))
        options = {"use_multipart": True, "chunk_size": part, "max_concurrency": slot.count}

        def upload() -> None:
            try:
                self._put(self._bucket.store, key, pieces, **options)
            except (client_errors.GenericError, FileNotFoundError):
                if not self._bucket.retries.most:
                    raise
                # Parts are repeated by obstore. What is left is an end whose answer was lost: the upload is gone then.
                self._put(self._bucket.store, key, pieces, **options)

        self._run(f"writing {key!r}", upload)

    def create(self, key: str, data: bytes) -> None:
        self._guard.create(key, data)

    def replace(self, key: str, data: bytes, version: Any) -> None:
        self._guard.replace(key, data, version)

    def delete(self, keys: Iterable[str]) -> None:
        names = [self._name(key) for key in keys]
        if not names:
            return
        if self._client.bulk_delete:
            self._run(f"deleting {len(names)} objects", lambda: obstore.delete(self._bucket.store, names))
            return
        with ThreadPoolExecutor(min(_DELETES_AT_ONCE, self.max_concurrency, len(names)), "zarrckpt-delete") as pool:
            for _ in pool.map(self._delete_one, names):
                pass

    def uploads(self) -> builtins.list[Upload] | None:
        found = self._client.uploads
        if found is None:
            return None
        try:
            return self._run("listing multipart uploads", found.list)
        except StorageError as error:
            if isinstance(error.__cause__, ImportError):
                return None
            raise

    def abort(self, uploads: Iterable[Upload]) -> None:
        found = self._client.uploads
        assert found is not None
        for upload in uploads:
            self._run(f"aborting the upload of {upload.key!r}", partial(found.abort, upload))

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        what = f"listing {prefix!r}"

        def begin() -> tuple[Any, Any]:
            stream = obstore.list(self._bucket.store, self._folder(prefix))
            return stream, next(stream, None)

        stream, batch = self._run(what, begin)
        while batch:
            for item in batch:
                yield ObjectInfo(item["path"].removeprefix(f"{self._client.prefix}/"), item["size"])
            batch = self._run(what, lambda: next(stream, None))

    def list_dir(self, prefix: str = "") -> Listing:
        def fetch() -> Any:
            return obstore.list_with_delimiter(self._bucket.store, self._folder(prefix))

        found = self._run(f"listing {prefix!r}", fetch)
        objects = sorted(item["path"].rpartition("/")[2] for item in found["objects"])
        return objects, sorted(path.rpartition("/")[2] for path in found["common_prefixes"])

    def sync(self, keys: Iterable[str]) -> None:
        """Nothing to do: a put is durable when it returns."""

    def zarr_store(self) -> ZarrStore:
        check_fork()
        from zarrckpt._store._zarr_readers import ForkCheckedStore

        return ForkCheckedStore(self._at_prefix, read_only=True)

    def failure(self, what: str, error: BaseException) -> StorageError:
        return _failures.storage_error(what, self.url, error, self._client.known_secrets, _hint(error))

    # -- what the guard needs

    def read_if_any(self, key: str) -> Versioned | None:
        try:
            return self.get_versioned(key)
        except FileNotFoundError:
            return None

    def put_if_absent(self, key: str, data: bytes) -> bool:
        return self._run(f"creating {key!r}", lambda: self._put_mode(key, data, "create"))

    def put_if_version(self, key: str, data: bytes, version: Any) -> bool:
        what = f"replacing {key!r}"
        if self._run(what, lambda: self._put_mode(key, data, version)):
            return True
        e_tag = str(version.get("e_tag", ""))
        found = self.read_if_any(key)
        if found is None or found.version != version or not e_tag.startswith('"'):
            return False
        # Nothing changed, and still refused: Ceph compares the bare e-tag. The server still decides.
        return self._run(what, lambda: self._put_mode(key, data, {**version, "e_tag": e_tag.strip('"')}))

    # -- names in the bucket, whose clients serve other places, too

    def _name(self, key: str) -> str:
        return below(self._client.prefix, key)

    def _folder(self, prefix: str) -> str | None:
        return self._name(prefix) if prefix else self._client.prefix or None

    @cached_property
    def _at_prefix(self) -> Any:
        """A client of obstore that knows nothing but this place."""
        return self._bucket.make(prefix=self._client.prefix or None, retry_config=self._bucket.retry_config)

    # -- calls, with our own errors

    def _put(self, store: Any, key: str, data: Any, **options: Any) -> None:
        obstore.put(self._bucket.for_put(store), self._name(key), data, **self._client.put_options, **options)

    def _put_mode(self, key: str, data: bytes, mode: Any) -> bool:
        try:
            self._put(self._bucket.store, key, data, mode=mode, use_multipart=False)
        except (client_errors.AlreadyExistsError, client_errors.PreconditionError):
            return False
        return True

    def _delete_one(self, name: str) -> None:
        def call() -> None:
            try:
                obstore.delete(self._bucket.store, name)
            except FileNotFoundError:
                return

        self._run(f"deleting {name!r}", call)

    def _refuse_short(self, key: str, needed: int) -> None:
        """One request. Where it fails, the error of the read itself counts."""
        try:
            size = int(obstore.head(self._bucket.once, self._name(key))["size"])
        except (client_errors.BaseError, FileNotFoundError):
            return
        if size < needed:
            raise _failures.short_object(key, self.url, needed, size)

    def _read(self, key: str, nbytes: int, call: Callable[[Any], T]) -> T:
        def checked(store: Any) -> T | ObjectNotFoundError:
            try:
                return call(store)
            except FileNotFoundError as error:
                return _failures.not_found(key, self.url, error, self._client.known_secrets)

        answer = self._transfer(f"reading {key!r}", nbytes, checked)
        if isinstance(answer, ObjectNotFoundError):
            raise answer
        return answer

    def _transfer(self, what: str, nbytes: int, call: Callable[[Any], T]) -> T:
        """A request that does no harm when it is repeated: when the gate lets it, with pauses after failures."""
        return self._run(what, lambda: self._repeat(nbytes, call))

    def _repeat(self, nbytes: int, call: Callable[[Any], T]) -> T:
        pauses = self._bucket.retries.pauses()
        failure: Exception | None = None
        for store in self._bucket.turns():
            if failure is not None:
                pause = next(pauses, None)
                if pause is None:
                    break
                time.sleep(pause)
            with self._gate.slot(nbytes) as slot:
                try:
                    return call(store)
                except (client_errors.GenericError, TransferError) as error:
                    # A server that is busy, silent or gone, or a request that it will never like.
                    slot.failed = True
                    failure = error
        assert failure is not None
        raise failure

    def _run(self, what: str, call: Callable[[], T]) -> T:
        check_fork()
        try:
            return call() if self._bucket.answered else self._first(call)
        except CheckpointError:
            raise
        except Exception as error:
            failure = self.failure(what, error)
        # Outside of the handler: an exception's context would keep the client's unscrubbed text.
        raise failure

    def _first(self, call: Callable[[], T]) -> T:
        """A call to a server that has not answered yet: a wrong address is told in a second or so, silence in ten."""
        deadline = time.monotonic() + _FIRST_SECONDS
        for pause in (*_FIRST_PAUSES, None):
            try:
                result = call()
            except (client_errors.GenericError, TransferError) as error:
                if not _failures.no_answer(error):
                    break
                if pause is None or time.monotonic() > deadline:
                    raise
                time.sleep(pause)
            else:
                self._bucket.note_answer()
                return result
        # It is there, and busy: from now on as ``retry_config`` says.
        self._bucket.note_answer()
        return call()


def _hint(error: BaseException) -> str:
    if isinstance(error, client_errors.PermissionDeniedError | client_errors.UnauthenticatedError):
        return _ACCESS_HINT
    return _BUCKET_HINT if isinstance(error, FileNotFoundError) else _NETWORK_HINT
