"""obstore's clients for S3, Google Cloud Storage and Azure, built from urls and options."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property, partial
from typing import Any

import obstore

from zarrckpt._errors import CheckpointError
from zarrckpt._store import _azure_options, _failures, _gcs_options, _s3_options
from zarrckpt._store._direct import DirectReads, direct_reads
from zarrckpt._store._fork import check_fork
from zarrckpt._store._guard import Honoured, honoured_by
from zarrckpt._store._options import Translated
from zarrckpt._store._retries import Retries
from zarrckpt._store._s3_uploads import S3Uploads, s3_uploads
from zarrckpt._store._secrets import redact_url, secret_values
from zarrckpt._store._url import Place

_EXPIRES = timedelta(minutes=15)
"""A signed url is used at once; the clocks of the two sides may differ."""

_NOBODY = {"access_key_id": "nobody", "secret_access_key": "nobody", "token": None, "expires_at": None}


@dataclass(frozen=True)
class Client:
    """obstore's clients of one place, and what goes with every call to them."""

    store: Any
    """Repeats failed requests as ``retry_config`` says."""
    make: Callable[..., Any]
    """Makes another one from ``retry_config``."""
    put_options: Mapping[str, Any] = field(default_factory=dict)
    honoured: Honoured = field(default_factory=lambda: Honoured(True, True))
    """What is known of the server's conditional puts."""
    bulk_delete: bool = False
    known_secrets: Sequence[str] = ()
    direct: DirectReads | None = None
    """Another way for ranged gets, where there is one."""
    uploads: S3Uploads | None = None
    """Multipart uploads that have not ended, where they can be told."""

    @cached_property
    def retries(self) -> Retries:
        """The rules of ``retry_config``, for :meth:`turns`."""
        return Retries.of(self.store.retry_config)

    def turns(self) -> Iterator[Any]:
        """A client for each attempt of a request: some that fail at once, then one that does what is left by itself."""
        for _ in range(self.retries.quick):
            yield self.once
        if self.retries.left >= 0:
            yield self._last

    @cached_property
    def once(self) -> Any:
        """Fails at once."""
        return self.make(retry_config={**self.store.retry_config, "max_retries": 0})

    @cached_property
    def _last(self) -> Any:
        return self.make(retry_config={**self.store.retry_config, "max_retries": self.retries.left})


def open_client(place: Place, options: Mapping[str, Any], provider: Callable[..., Any] | None) -> Client:
    """Build the client of a parsed url. No request is made."""
    check_fork()
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
    make = _maker(obstore.store.S3Store, place, out)
    bulk = not out.config.get("disable_bulk_delete") and not os.environ.get("AWS_DISABLE_BULK_DELETE")
    server = f"{out.config.get('endpoint')} {place.bucket}"
    honoured = Honoured(True, True) if _s3_options.is_amazon(out) else honoured_by(server)
    store = make(retry_config=out.retry)
    direct = direct_reads(_signer(store, make, out), out)
    uploads = s3_uploads(out, place.bucket, place.path)
    return Client(store, make, _put_options(out), honoured, bulk, known, direct, uploads)


def _open_gcs(place: Place, options: Mapping[str, Any], provider: Any, known: Sequence[str]) -> Client:
    out = _gcs_options.translate(options, place.bucket, provider)
    make = _maker(obstore.store.GCSStore, place, out)
    return Client(make(retry_config=out.retry), make, _put_options(out), known_secrets=known)


def _open_azure(place: Place, options: Mapping[str, Any], provider: Any, known: Sequence[str]) -> Client:
    out = _azure_options.translate(options, place.account, provider)
    make = _maker(obstore.store.AzureStore, place, out)
    return Client(make(retry_config=out.retry), make, _put_options(out), known_secrets=known)


_OPENERS: dict[str, Callable[[Place, Mapping[str, Any], Any, Sequence[str]], Client]] = {
    "s3": _open_s3,
    "gs": _open_gcs,
    "az": _open_azure,
}


def _maker(kind: Callable[..., Any], place: Place, out: Translated) -> Callable[..., Any]:
    fixed = {"config": out.config, "client_options": out.client, "credential_provider": out.credential_provider}
    return partial(kind, place.bucket, prefix=place.path or None, **fixed)


def _signer(store: Any, make: Callable[..., Any], out: Translated) -> Callable[[str], str]:
    """The url of a key's GET, signed where requests are."""
    if not _s3_options.is_set(out, "skip_signature"):
        return lambda key: str(obstore.sign(store, "GET", key, _EXPIRES))
    # obstore tells an url with a signature only.
    named = make(config={**out.config, "skip_signature": False}, credential_provider=lambda: dict(_NOBODY))
    return lambda key: str(obstore.sign(named, "GET", key, _EXPIRES)).partition("?")[0]


def _put_options(out: Translated) -> dict[str, Any]:
    given = {"attributes": out.attributes, "tags": out.tags}
    return {name: value for name, value in given.items() if value}
