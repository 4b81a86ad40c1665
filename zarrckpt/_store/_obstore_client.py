"""obstore's clients for S3, Google Cloud Storage and Azure, built from urls and options."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property, lru_cache, partial
from typing import Any

import obstore

from zarrckpt._errors import CheckpointError, StorageError
from zarrckpt._store import _azure_options, _failures, _gcs_options, _s3_options
from zarrckpt._store._aws_credentials import StaticCredentials
from zarrckpt._store._direct import DirectReads, direct_reads
from zarrckpt._store._fork import check_fork
from zarrckpt._store._guard import Honoured, honoured_by
from zarrckpt._store._options import RETRY, TIMEOUT, Translated
from zarrckpt._store._retries import Retries
from zarrckpt._store._s3_uploads import S3Uploads, s3_uploads
from zarrckpt._store._secrets import redact_url, secret_values
from zarrckpt._store._url import Place

_EXPIRES = timedelta(minutes=15)
"""A signed url is used at once; the clocks of the two sides may differ."""

_READ_BY_OBSTORE = re.compile("aws_|ssl_cert_|(http|https|all|no)_proxy$", re.IGNORECASE)
_NO_KEY = re.compile(r"(^|/)\.{0,2}(/|$)|[\x00-\x1f\x7f]")
"""In a path: what obstore takes in no object's key."""

_answered: set[str] = set()
"""The servers and buckets that have answered this process."""

_FIRST_ANSWER = timedelta(seconds=10)
"""So long a server that has not answered this process yet may be silent."""

_SHARED = 8
"""The clients of so many buckets, or settings, are kept for the next store."""

_NOBODY = {"access_key_id": "nobody", "secret_access_key": "nobody", "token": None, "expires_at": None}


class Bucket:
    """obstore's clients of a whole bucket, which differ in how they repeat failed requests, and their connections."""

    def __init__(
        self, make: Callable[..., Any], client: Mapping[str, Any], retry: Mapping[str, Any], server: str
    ) -> None:
        self.make = make
        """Makes another one from ``retry_config``, below ``prefix``."""
        self._persistent = make(retry_config=retry)
        self._client_options = client
        self._server = server
        # Who says how often to repeat means the first request, too.
        self._repeats_first = retry != RETRY

    @property
    def answered(self) -> bool:
        """Whether the server has answered this process: then it is there, and failures are worth repeating."""
        return self._repeats_first or self._server in _answered

    def note_answer(self) -> None:
        _answered.add(self._server)

    @property
    def store(self) -> Any:
        """Repeats failed requests as ``retry_config`` says, once the server has :attr:`answered`."""
        return self._persistent if self.answered else self.first

    @property
    def retry_config(self) -> Any:
        """All of it, with obstore's defaults."""
        return self._persistent.retry_config

    @cached_property
    def retries(self) -> Retries:
        """The rules of ``retry_config``, for :meth:`turns`."""
        return Retries.of(self.retry_config)

    def turns(self) -> Iterator[Any]:
        """A client for each attempt of a request: some that fail at once, then one that does what is left by itself.

        A single attempt where the server has not :attr:`answered` yet.
        """
        yield self.once if self.answered else self.first
        if self.answered:
            for _ in range(self.retries.quick - 1):
                yield self.once
            if self.retries.left >= 0:
                yield self._last

    @cached_property
    def once(self) -> Any:
        """Fails at once."""
        return self.make(retry_config={**self.retry_config, "max_retries": 0})

    @cached_property
    def first(self) -> Any:
        """Fails at once, and where the server is silent for :data:`_FIRST_ANSWER`, unless the caller's options say how
        long a request may take.
        """
        client = dict(self._client_options)
        if client["timeout"] == TIMEOUT:
            client.setdefault("read_timeout", _FIRST_ANSWER)
        return self.make(client_options=client, retry_config={**self.retry_config, "max_retries": 0})

    def for_put(self, store: Any) -> Any:
        """The client for a put: a server answers when it has received all, however long that takes."""
        return self.once if store is self.__dict__.get("first") else store

    @cached_property
    def _last(self) -> Any:
        return self.make(retry_config={**self.retry_config, "max_retries": self.retries.left})


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
    direct: DirectReads | None = None
    """Another way for ranged gets, where there is one."""
    uploads: S3Uploads | None = None
    """Multipart uploads that have not ended, where they can be told."""


@dataclass(frozen=True)
class _Recipe:
    """What a bucket's clients are made from; equal ones make clients that can't be told apart."""

    bucket: str
    settings: Hashable
    credentials: StaticCredentials | None
    environment: tuple[tuple[str, str], ...]
    """The variables that obstore reads, too."""
    out: Translated = field(compare=False, repr=False)


def open_client(place: Place, options: Mapping[str, Any], provider: Callable[..., Any] | None) -> Client:
    """Build the client of a parsed url. No request is made."""
    check_fork()
    if place.path and _NO_KEY.search(place.path):
        raise StorageError(
            f"{redact_url(place.address)!r} is no place for objects: its path has an empty name, '.' or '..', or a "
            "control character; write it without"
        )
    known = secret_values(options)
    try:
        return _OPENERS[place.kind](place, options, provider, known)
    except CheckpointError:
        raise
    except Exception as error:
        failure = _failures.storage_error("opening the store", redact_url(place.address), error, known)
    raise failure


def _open_s3(place: Place, options: Mapping[str, Any], provider: Any, known: Sequence[str]) -> Client:
    out = _s3_options.translate(options, place.bucket, provider)
    bulk = not out.config.get("disable_bulk_delete") and not os.environ.get("AWS_DISABLE_BULK_DELETE")
    server = f"{out.config.get('endpoint')} {place.bucket}"
    honoured = Honoured(True, True) if _s3_options.is_amazon(out) else honoured_by(server)
    bucket = _s3_bucket(place.bucket, out)
    direct = direct_reads(_signer(bucket, out), out)
    uploads = s3_uploads(out, place.bucket, place.path)
    return Client(bucket, place.path, _put_options(out), honoured, bulk, known, direct, uploads)


def _open_gcs(place: Place, options: Mapping[str, Any], provider: Any, known: Sequence[str]) -> Client:
    out = _gcs_options.translate(options, place.bucket, provider)
    bucket = _new_bucket(obstore.store.GCSStore, place.bucket, out)
    return Client(bucket, place.path, _put_options(out), known_secrets=known)


def _open_azure(place: Place, options: Mapping[str, Any], provider: Any, known: Sequence[str]) -> Client:
    out = _azure_options.translate(options, place.account, provider)
    bucket = _new_bucket(obstore.store.AzureStore, place.bucket, out)
    return Client(bucket, place.path, _put_options(out), known_secrets=known)


_OPENERS: dict[str, Callable[[Place, Mapping[str, Any], Any, Sequence[str]], Client]] = {
    "s3": _open_s3,
    "gs": _open_gcs,
    "az": _open_azure,
}


def _new_bucket(kind: Callable[..., Any], bucket: str, out: Translated) -> Bucket:
    fixed = {"config": out.config, "client_options": out.client, "credential_provider": out.credential_provider}
    server = f"{kind.__name__} {out.config.get('endpoint')} {bucket}"
    return Bucket(partial(kind, bucket, **fixed), out.client, out.retry, server)


def _s3_bucket(bucket: str, out: Translated) -> Bucket:
    """The clients that the last stores with the same settings had: new ones would take 25 ms each, and connect anew.

    Not where a profile or the caller's own provider gives the credentials: they may be others for the next store, and
    clients keep those that do not expire.
    """
    provider = out.credential_provider
    if provider is not None and not isinstance(provider, StaticCredentials):
        return _new_bucket(obstore.store.S3Store, bucket, out)
    read = (item for item in os.environ.items() if _READ_BY_OBSTORE.match(item[0]))
    settings = _frozen({"config": out.config, "client": out.client, "retry": out.retry})
    return _shared(_Recipe(bucket, settings, provider, tuple(sorted(read)), out))


@lru_cache(maxsize=_SHARED)
def _shared(recipe: _Recipe) -> Bucket:
    return _new_bucket(obstore.store.S3Store, recipe.bucket, recipe.out)


def _frozen(value: Any) -> Hashable:
    if isinstance(value, Mapping):
        return tuple(sorted((str(name), _frozen(item)) for name, item in value.items()))
    return tuple(map(_frozen, value)) if isinstance(value, list | tuple) else value


def _signer(bucket: Bucket, out: Translated) -> Callable[[str], str]:
    """The url of a key's GET, signed where requests are."""
    if not _s3_options.is_set(out, "skip_signature"):
        # The request is tried again as a whole, its credentials with it.
        return lambda key: str(obstore.sign(bucket.once, "GET", key, _EXPIRES))
    # obstore tells an url with a signature only.
    named = bucket.make(config={**out.config, "skip_signature": False}, credential_provider=lambda: dict(_NOBODY))
    return lambda key: str(obstore.sign(named, "GET", key, _EXPIRES)).partition("?")[0]


def _put_options(out: Translated) -> dict[str, Any]:
    given = {"attributes": out.attributes, "tags": out.tags}
    return {name: value for name, value in given.items() if value}
