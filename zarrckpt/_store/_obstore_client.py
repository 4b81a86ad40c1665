"""obstore's clients for S3, Google Cloud Storage and Azure, built from urls and options."""

from __future__ import annotations

import asyncio
import os
import random
import re
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache, cached_property, partial
from typing import Any, TypeVar

import obstore
from obstore.exceptions import BaseError, GenericError, UnknownConfigurationKeyError

from zarrckpt._errors import CheckpointError, StorageError
from zarrckpt._forks import ForkSafeLock
from zarrckpt._store import _failures, _options
from zarrckpt._store._conditional_puts import ConditionSupport, support_of
from zarrckpt._store._fork import check_fork
from zarrckpt._store._machine_account import require_azure_account, require_machine_account
from zarrckpt._store._optional import OptionalRequests
from zarrckpt._store._options import REQUEST_TIMEOUT, RETRY, ClientArguments
from zarrckpt._store._redirects import proxy_of, restrict_redirects
from zarrckpt._store._renewal import Renewal
from zarrckpt._store._secrets import redact_url, scrub, secret_values
from zarrckpt._store._url import ParsedUrl

T = TypeVar("T")

_CLIENT_KINDS = {"s3": obstore.store.S3Store, "gs": obstore.store.GCSStore, "az": obstore.store.AzureStore}

_READ_BY_OBSTORE = re.compile("aws_|ssl_cert_|(http|https|all|no)_proxy$", re.IGNORECASE)
_NO_KEY = re.compile(r"(^|/)\.{0,2}(/|$)|[\x00-\x1f\x7f]")
"""Matches parts of a path that obstore refuses in an object's key."""

_FIRST_RETRY = {
    "max_retries": 4,
    "retry_timeout": timedelta(seconds=6),
    "backoff": {"init_backoff": timedelta(milliseconds=50), "max_backoff": timedelta(milliseconds=400), "base": 3},
}
"""The retries for a server that has not answered this process yet. Its address may be wrong."""
_FIRST_ANSWER = timedelta(seconds=10)
"""Read timeout for a server that has not answered this process yet."""
_answered: set[str] = set()
"""The servers and buckets that have answered this process."""

_kept: dict[str, Bucket] = {}
"""Clients that the next store may use, by a text of all their settings."""
_MAX_KEPT = 8
_kept_lock = ForkSafeLock()


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """Return the process's event loop for obstore, in a separate thread. Callers hold the lock, so only one is made."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="zarrckpt-obstore", daemon=True).start()
    return loop


def wait_for(ask: Callable[[], Awaitable[T]], seconds: float | None = None) -> T:
    """Wait in the calling thread for the result of an asynchronous call of obstore.

    Raises TimeoutError and cancels the call if it takes longer than ``seconds``.

    Synchronous calls of obstore wake the calling thread for every 16 KiB that arrive over TLS, 60,000 times per GB.
    Each time costs a switch between threads and, if another thread runs Python, a wait for the interpreter.
    """

    return begin_call(ask, seconds).result()


def begin_call(ask: Callable[[], Awaitable[T]], seconds: float | None = None) -> Future[T]:
    """Begin an asynchronous call of obstore, which ends with TimeoutError after ``seconds``."""

    async def answer() -> T:
        return await asyncio.wait_for(ask(), seconds) if seconds is not None else await ask()

    with _kept_lock:
        loop = _loop()
    return asyncio.run_coroutine_threadsafe(answer(), loop)


def _as_seconds(value: Any) -> float:
    """Return an option of obstore in seconds. A text with units, which only obstore can read, counts as the default."""
    return (value if isinstance(value, timedelta) else REQUEST_TIMEOUT).total_seconds()


class Bucket:
    """obstore's clients of a whole bucket, and their connections.

    Args:
        kind: the kind of cloud.
        name: the bucket's name.
        out: the options of the clients.
        server: a name for the server and the bucket.
        translate: reads the credentials again from their source. None if they cannot change.
    """

    def __init__(
        self, kind: str, name: str, out: ClientArguments, server: str, translate: Callable[[], ClientArguments] | None
    ) -> None:
        self.patience = max(_as_seconds(out.retry["retry_timeout"]), _as_seconds(out.client["timeout"]))
        """Seconds after which a listing fails. A server may send pages for ever."""
        # Azure may answer when a copy has only begun, and obstore does not wait for its end.
        self.copies_at_once = kind != "az"
        """Whether the answer to a copy means that the copy has ended."""
        self._make = partial(_CLIENT_KINDS[kind], name, config=out.config)
        self._out = out
        self.kind, self.proxy = kind, proxy_of(kind, out)
        self._name = name
        self.server = server
        """A name for the server and the bucket."""
        self._provider = out.credential_provider
        self.renewal = Renewal(None if translate is None else partial(self._renew, translate))
        self._make_clients()

    def _make_clients(self) -> None:
        """Make clients with the present credentials."""
        self.unrepeated = self._made(self._out.client, {**self._out.retry, "max_retries": 0})
        """The client that makes each request once. :meth:`ask` repeats it."""
        for name in ("impatient", "persistent"):
            self.__dict__.pop(name, None)

    def _made(self, client: Mapping[str, Any], retry: Mapping[str, Any]) -> Any:
        return self._make(credential_provider=self._provider, client_options=client, retry_config=retry)

    @property
    def answered(self) -> bool:
        """Whether the server has answered this process, so that its address is right and repeats may help."""
        # A caller's own retry_config applies to the first request, too.
        return self.server in _answered or self._out.retry != RETRY

    @property
    def single_client(self) -> Any:
        """The client for calls that are one request, except puts."""
        return self.unrepeated if self.answered else self.impatient

    @property
    def series_client(self) -> Any:
        """The client for calls that may be several requests. After a failed one, a repeated call would make all again.

        So obstore repeats each request.
        """
        return self.persistent if self.answered else self.impatient

    @property
    def put_client(self) -> Any:
        """The client for puts of one request. A put is answered only when the server has received all bytes.

        So the first put to a server is not limited in time like other requests.
        """
        return self.unrepeated if self.answered else self.persistent

    @cached_property
    def persistent(self) -> Any:
        """A client that repeats failed requests by ``retry_config``, without a report."""
        return self._made(self._out.client, self._out.retry)

    @cached_property
    def impatient(self) -> Any:
        """A client that stops repeating a failed request after about a second."""
        client = dict(self._out.client)
        # A caller's own timeout is not shortened.
        if client["timeout"] == REQUEST_TIMEOUT:
            client.setdefault("read_timeout", _FIRST_ANSWER)
        return self._made(client, _FIRST_RETRY)

    def _renew(self, translate: Callable[[], ClientArguments]) -> None:
        """Read the credentials again from their source, and make new clients."""
        fresh = translate()
        if fresh.config.get("endpoint") != self._out.config.get("endpoint"):
            raise StorageError("the environment or the profile now names another endpoint")
        self._provider = fresh.credential_provider
        self._make_clients()

    def ask(self, request: Callable[[], T], report: Callable[[Exception], None]) -> T:
        """Make a request and repeat it after transient failures, and again with new credentials if they are refused.

        ``report`` is called with each transient failure before the request is repeated.
        """
        check_fork()
        return self.renewal.call(lambda: (self._send if self.answered else self._send_first)(request, report))

    def ask_optional(self, ask: Callable[[], Awaitable[T]], optional: OptionalRequests) -> T:
        """Make an asynchronous request that the caller can do without, and again with new credentials."""
        check_fork()
        result = self.renewal.call(lambda: optional.ask(partial(begin_call, ask)))
        _answered.add(self.server)
        return result

    def _send_first(self, request: Callable[[], T], report: Callable[[Exception], None]) -> T:
        """Make a request to a server that has not answered yet.

        Raises after about a second if its address is wrong, and after ten seconds if it does not answer.
        """
        require_machine_account(self.kind, self._name, self._out)
        try:
            result = request()
        except Exception as error:
            # Another thread may have received an answer in the meantime.
            if not self.answered and (_failures.no_answer(error) or _failures.is_sign_in(error)):
                raise
            _answered.add(self.server)
            if _failures.refuses_credentials(error):
                raise
            if not isinstance(error, GenericError) and not _failures.max_repeats(error):
                raise
            # The server exists and is busy. From now on retry_config applies.
            report(error)
            return self._send(request, report)
        _answered.add(self.server)
        return result

    def _send(self, request: Callable[[], T], report: Callable[[Exception], None]) -> T:
        """Make a request. Repeat it with a new signature if it failed briefly and obstore did not repeat it."""
        retry, backoff = self._out.retry, self._out.retry["backoff"]
        deadline = time.monotonic() + _as_seconds(retry["retry_timeout"])
        pause = shortest = backoff["init_backoff"].total_seconds()
        for repeat in range(retry["max_retries"]):
            try:
                return request()
            except (BaseError, FileNotFoundError) as error:
                if repeat >= _failures.max_repeats(error) or time.monotonic() > deadline:
                    raise
                report(error)
                never_sent = _failures.never_sent(error)
            # The pauses of obstore, except that the first one is random, too.
            pause = min(backoff["max_backoff"].total_seconds(), random.uniform(shortest, backoff["base"] * pause))
            time.sleep(0 if never_sent else pause)
        return request()


@dataclass(frozen=True)
class Client:
    """obstore's clients for one url, and the arguments of every call to them."""

    bucket: Bucket
    prefix: str
    """The prefix of all keys, without "/" at either end."""
    put_options: Mapping[str, Any] = field(default_factory=dict)
    conditions: ConditionSupport = field(default_factory=lambda: ConditionSupport(True, True, True))
    """The server's support of conditional puts, as far as it is known."""
    bulk_delete: bool = False
    known_secrets: Sequence[str] = ()
    fixed_credentials: str | None = None
    """The option that contains the credentials."""


def open_client(parsed: ParsedUrl, options: Mapping[str, Any], provider: Callable[..., Any] | None) -> Client:
    """Build the client of a parsed url. No request is made."""
    check_fork()
    if parsed.path and _NO_KEY.search(parsed.path):
        raise StorageError(
            f"{redact_url(parsed.address)!r} cannot be used as a prefix of keys: its path contains an empty name, '.', "
            "'..' or a control character. Remove it"
        )
    if re.search(r"[\x00-\x20\x7f]", parsed.bucket + parsed.account):
        raise StorageError(
            f"{redact_url(parsed.address)!r} names no bucket: expected a name without spaces and control characters"
        )
    known = secret_values(options)
    try:
        return _open(parsed, options, provider, known)
    except CheckpointError as error:
        if scrub(str(error), known) == str(error):
            raise
        failure = StorageError(scrub(str(error), known))
    except UnknownConfigurationKeyError as error:
        name = re.search("'([^']*)'", str(error))
        failure = _options.unknown(parsed.kind, name[1] if name else str(error))
    except BaseException as error:
        if not isinstance(error, Exception) and not _failures.is_panic(error):
            raise
        failure = _failures.storage_error("opening the store", redact_url(parsed.address), error, known)
    raise failure


def _open(parsed: ParsedUrl, options: Mapping[str, Any], provider: Any, known: Sequence[str]) -> Client:
    def translate() -> ClientArguments:
        out = _options.translate(parsed, options, provider)
        if parsed.kind == "az":
            require_azure_account(parsed.bucket, parsed.account, out)
        restrict_redirects(parsed.kind, out)
        return out

    out = translate()
    endpoint = out.config.get("base_url" if parsed.kind == "gs" else "endpoint")
    server = f"{parsed.kind} {endpoint} {parsed.account} {parsed.bucket}"
    make = partial(Bucket, parsed.kind, parsed.bucket, out, server, translate if out.renewable else None)
    if parsed.kind != "s3":
        return Client(make(), parsed.path, out.put, known_secrets=known, fixed_credentials=out.fixed_credentials)
    # Directory buckets of S3 are tested, because none was at hand to try.
    trusted = _options.is_amazon(out) and not _options.is_directory_bucket(parsed.bucket)
    conditions = ConditionSupport(True, True, True) if trusted else support_of(server)
    bulk = not out.config.get("disable_bulk_delete") and not os.environ.get("AWS_DISABLE_BULK_DELETE")
    bucket = _shared_bucket(parsed, out, make)
    return Client(bucket, parsed.path, out.put, conditions, bulk, known, out.fixed_credentials)


def _shared_bucket(parsed: ParsedUrl, out: ClientArguments, make: Callable[[], Bucket]) -> Bucket:
    """Return the clients of an earlier store with the same settings. New ones would take 25 ms each and connect again.

    If the credentials are from a profile or the caller's provider, return new clients. These credentials may change
    between stores, and clients keep credentials that do not expire.
    """
    if out.credential_provider is not None and out.keys is None:
        return make()
    environment = sorted(item for item in os.environ.items() if _READ_BY_OBSTORE.match(item[0]))
    settings = [sorted(items.items()) for items in (out.config, out.client, out.retry)]
    recipe = repr((parsed.bucket, settings, out.keys, environment))
    with _kept_lock:
        found = _kept.pop(recipe, None)
        if found is None or found.renewal.count:
            # Renewed clients have other credentials than those in the recipe.
            found = make()
        # The most recently used client is the last one.
        _kept[recipe] = found
        if len(_kept) > _MAX_KEPT:
            del _kept[next(iter(_kept))]
        return found
