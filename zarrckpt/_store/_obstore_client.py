"""obstore's clients for S3, Google Cloud Storage and Azure, built from urls and options."""

from __future__ import annotations

import asyncio
import os
import random
import re
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache, cached_property, partial
from typing import Any, TypeVar

import obstore
from obstore.exceptions import BaseError, GenericError, UnknownConfigurationKeyError

from zarrckpt._errors import CheckpointError, StorageError
from zarrckpt._forks import ForkSafeLock
from zarrckpt._store import _failures, _options
from zarrckpt._store._conditional_puts import Honoured, honoured_by
from zarrckpt._store._fork import check_fork
from zarrckpt._store._options import REQUEST_TIMEOUT, RETRY, Translated
from zarrckpt._store._redirects import NO_PROXY_THERE, restrict_redirects
from zarrckpt._store._secrets import redact_url, scrub, secret_values
from zarrckpt._store._url import Place

T = TypeVar("T")

_CLIENT_KINDS = {"s3": obstore.store.S3Store, "gs": obstore.store.GCSStore, "az": obstore.store.AzureStore}

_READ_BY_OBSTORE = re.compile("aws_|ssl_cert_|(http|https|all|no)_proxy$", re.IGNORECASE)
_NO_KEY = re.compile(r"(^|/)\.{0,2}(/|$)|[\x00-\x1f\x7f]")
"""In a path: what obstore takes in no object's key."""

_FIRST_RETRY = {
    "max_retries": 4,
    "retry_timeout": timedelta(seconds=6),
    "backoff": {"init_backoff": timedelta(milliseconds=50), "max_backoff": timedelta(milliseconds=400), "base": 3},
}
"""How a server is asked that has not answered this process yet: its address may be wrong."""
_FIRST_ANSWER = timedelta(seconds=10)
"""So long it may be silent."""
_answered: set[str] = set()
"""The servers and buckets that have answered this process."""

_kept: dict[str, Bucket] = {}
"""Clients that the next store may use, by all that they are made from."""
_MOST_KEPT = 8
_keeping = ForkSafeLock()


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """An event loop in a thread of its own, where obstore tells what has come. Called with the lock: there is one."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="zarrckpt-obstore", daemon=True).start()
    return loop


def awaited(ask: Callable[[], Awaitable[T]], seconds: float | None = None) -> T:
    """Wait in the calling thread for what an asynchronous call of obstore's gives.

    Raises TimeoutError, and cancels the call, if it takes longer than ``seconds``.

    Its synchronous calls wake the calling thread for every 16 KiB that come over TLS, 60,000 times a GB: each is a
    switch between threads, and where Python works in another one a wait for the interpreter.
    """

    async def answer() -> T:
        return await asyncio.wait_for(ask(), seconds) if seconds is not None else await ask()

    with _keeping:
        loop = _loop()
    return asyncio.run_coroutine_threadsafe(answer(), loop).result()


def _as_seconds(value: Any) -> float:
    """An option of obstore's as seconds: a text with units, which it reads itself, counts as the default."""
    return (value if isinstance(value, timedelta) else REQUEST_TIMEOUT).total_seconds()


class Bucket:
    """obstore's clients of a whole bucket, and their connections.

    Args:
        kind: of the cloud.
        name: of the bucket.
        out: for the clients.
        server: a name for the server and the bucket.
        translate: reads the source of the credentials again; None if that cannot give others.
    """

    def __init__(
        self, kind: str, name: str, out: Translated, server: str, translate: Callable[[], Translated] | None
    ) -> None:
        self.patience = max(_as_seconds(out.retry["retry_timeout"]), _as_seconds(out.client["timeout"]))
        """Seconds after which a listing is given up: a server may send pages for ever."""
        self.is_proxied = out.client.get("proxy_url") not in (None, NO_PROXY_THERE)
        """Whether the caller names a proxy."""
        self.generation = 0
        """Number of times that the credentials were read again."""
        self.renewal_error: Exception | None = None
        """The reason why credentials could not be read again."""
        self._recipe = kind, name, out, server
        self._make = partial(_CLIENT_KINDS[kind], name, config=out.config)
        self.renewable = translate is not None
        self._out, self._server, self._translate = out, server, translate
        self._objects = f"{server}, objects without redirects but to {out.client.get('proxy_excludes')}"
        self._provider = out.credential_provider
        self._renewing = ForkSafeLock()
        self._begin()

    def __reduce__(self) -> Any:
        # With a reader for zarr. The other process does not renew credentials.
        return Bucket, (*self._recipe, None)

    def _begin(self) -> None:
        """Make clients with the present credentials."""
        self.persistent = self._made(self._out.client, self._out.retry)
        """Repeats failed requests as ``retry_config`` says."""
        for name in ("impatient", "unrepeated"):
            self.__dict__.pop(name, None)

    def _made(self, client: Mapping[str, Any], retry: Mapping[str, Any]) -> Any:
        return self._make(credential_provider=self._provider, client_options=client, retry_config=retry)

    @property
    def answered(self) -> bool:
        """Whether the server has answered this process: then it is there, and failures are worth repeating."""
        # Who says how often to repeat means the first request, too.
        return self._server in _answered or self._out.retry != RETRY

    @property
    def has_sent_objects(self) -> bool:
        """Whether the server has sent an object: then it does not redirect those who read to other hosts."""
        return self._objects in _answered or self._out.retry != RETRY

    def read(self, fetch: Callable[[Any], T]) -> T:
        """Call with a client to read from. A refused redirect is a lost connection to obstore, which it repeats long.

        So the first read is made with the impatient client, even if the server has answered other requests.
        """
        if self.has_sent_objects:
            return fetch(self.store)
        try:
            found = fetch(self.impatient)
        except GenericError as error:
            if not self.answered or _failures.is_redirect(error) or _failures.refuses_credentials(error):
                raise
            return fetch(self.store)
        _answered.add(self._objects)
        return found

    @property
    def store(self) -> Any:
        """The client for all but puts, which a server answers when it has received all, however long that takes."""
        return self.persistent if self.answered else self.impatient

    @cached_property
    def impatient(self) -> Any:
        """Gives a failed request up after a second or so."""
        client = dict(self._out.client)
        # Unless the caller says how long a request may take.
        if client["timeout"] == REQUEST_TIMEOUT:
            client.setdefault("read_timeout", _FIRST_ANSWER)
        return self._made(client, _FIRST_RETRY)

    def renew(self, generation: int) -> bool:
        """Take the credentials from their source again, after a server refused those of this generation.

        Requests that fail at the same time share one renewal. Returns False if the source gives none.
        """
        if self._translate is None:
            return False
        with self._renewing:
            if generation == self.generation:
                try:
                    fresh = self._translate()
                    if fresh.config.get("endpoint") != self._out.config.get("endpoint"):
                        raise StorageError("the environment or the profile names another endpoint than at first")
                    self._provider = fresh.credential_provider
                    self._begin()
                except Exception as error:
                    self.renewal_error = error
                    return False
                self.generation, self.renewal_error = generation + 1, None
        return True

    def ask(self, call: Callable[[], T]) -> T:
        """Make a call, and repeat it if it passes later; and once more with new credentials if these are refused."""
        generation = self.generation
        try:
            return self._repeat(call)
        except BaseError as error:
            if not _failures.refuses_credentials(error) or not self.renew(generation):
                raise
        return self._repeat(call)

    def _repeat(self, call: Callable[[], T]) -> T:
        return self.send(call) if self.answered else self.reach(call)

    @cached_property
    def unrepeated(self) -> Any:
        """Makes each request once."""
        return self._made(self._out.client, {**self._out.retry, "max_retries": 0})

    def reach(self, call: Callable[[], T]) -> T:
        """A call to a server that has not answered yet: a wrong address is told in a second or so, silence in ten."""
        try:
            result = call()
        except Exception as error:
            if _failures.no_answer(error):
                raise
            _answered.add(self._server)
            if _failures.refuses_credentials(error):
                raise
            if not isinstance(error, GenericError) and not _failures.most_repeats(error):
                raise
            # It is there, and busy: from now on as ``retry_config`` says.
            return self.send(call)
        _answered.add(self._server)
        return result

    def send(self, call: Callable[[], T]) -> T:
        """A call that is made again, with a new signature, after failures that pass and obstore does not repeat."""
        deadline = time.monotonic() + _as_seconds(self._out.retry["retry_timeout"])
        for repeat in range(self._out.retry["max_retries"]):
            try:
                return call()
            except (BaseError, FileNotFoundError) as error:
                if repeat >= _failures.most_repeats(error) or time.monotonic() > deadline:
                    raise
                pause = 0.0 if _failures.never_sent(error) else random.uniform(0.1, min(5.0, 0.2 * 2**repeat))
            time.sleep(pause)
        return call()


@dataclass(frozen=True)
class Client:
    """obstore's clients of one place, and what goes with every call to them."""

    bucket: Bucket
    prefix: str
    """Of all keys, with no "/" at either end."""
    put_options: Mapping[str, Any] = field(default_factory=dict)
    honoured: Honoured = field(default_factory=lambda: Honoured(True, True))
    """What is known of the server's conditional puts."""
    bulk_delete: bool = False
    known_secrets: Sequence[str] = ()
    fixed_credentials: str | None = None
    """The option that holds the credentials."""


def open_client(place: Place, options: Mapping[str, Any], provider: Callable[..., Any] | None) -> Client:
    """Build the client of a parsed url. No request is made."""
    check_fork()
    if place.path and _NO_KEY.search(place.path):
        raise StorageError(
            f"{redact_url(place.address)!r} is no place for objects: its path has an empty name, '.' or '..', or a "
            "control character; write it without"
        )
    if re.search(r"[\x00-\x20\x7f]", place.bucket + place.account):
        raise StorageError(
            f"{redact_url(place.address)!r} names no bucket: expected a name without spaces and control characters"
        )
    known = secret_values(options)
    try:
        return _open(place, options, provider, known)
    except CheckpointError as error:
        if scrub(str(error), known) == str(error):
            raise
        failure = StorageError(scrub(str(error), known))
    except UnknownConfigurationKeyError as error:
        name = re.search("'([^']*)'", str(error))
        failure = _options.unknown(place.kind, name[1] if name else str(error))
    except BaseException as error:
        if not isinstance(error, Exception) and not _failures.is_panic(error):
            raise
        failure = _failures.storage_error("opening the store", redact_url(place.address), error, known)
    raise failure


def _open(place: Place, options: Mapping[str, Any], provider: Any, known: Sequence[str]) -> Client:
    def translate() -> Translated:
        out = _options.translate(place, options, provider)
        restrict_redirects(place.kind, out)
        return out

    out = translate()
    server = f"{place.kind} {out.config.get('endpoint')} {place.bucket}"
    make = partial(Bucket, place.kind, place.bucket, out, server, translate if out.renewable else None)
    if place.kind != "s3":
        return Client(make(), place.path, out.put, known_secrets=known, fixed_credentials=out.fixed_credentials)
    honoured = Honoured(True, True) if _options.is_amazon(out) else honoured_by(server)
    bulk = not out.config.get("disable_bulk_delete") and not os.environ.get("AWS_DISABLE_BULK_DELETE")
    bucket = _shared_bucket(place, out, make)
    return Client(bucket, place.path, out.put, honoured, bulk, known, out.fixed_credentials)


def _shared_bucket(place: Place, out: Translated, make: Callable[[], Bucket]) -> Bucket:
    """The clients that the last stores with the same settings had: new ones would take 25 ms each, and connect anew.

    Not where a profile or the caller's own provider gives the credentials: they may be others for the next store, and
    clients keep those that do not expire.
    """
    if out.credential_provider is not None and out.keys is None:
        return make()
    environment = sorted(item for item in os.environ.items() if _READ_BY_OBSTORE.match(item[0]))
    settings = [sorted(items.items()) for items in (out.config, out.client, out.retry)]
    recipe = repr((place.bucket, settings, out.keys, environment))
    with _keeping:
        found = _kept.pop(recipe, None)
        if found is None or found.generation:
            # Renewed clients have other credentials than those in the recipe.
            found = make()
        # The last is the one that was used last.
        _kept[recipe] = found
        if len(_kept) > _MOST_KEPT:
            del _kept[next(iter(_kept))]
        return found
