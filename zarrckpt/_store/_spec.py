"""The picklable recipe for a store: the url or store and the options that a user passes, pickled without secrets."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

from zarrckpt._errors import StorageError, one_line
from zarrckpt._store._archive import is_archive_name
from zarrckpt._store._base import Store
from zarrckpt._store._ready_stores import ReadyStore, describe_store
from zarrckpt._store._secrets import MARKER, has_marker, redact, redact_url, scrub
from zarrckpt._store._url import has_protocol, join_url, normalize, parse, split_query, text_of

if TYPE_CHECKING:
    from obstore.store import ObjectStore
    from zarr.abc.store import Store as ZarrStore
    from zarr.storage import StorePath

    Url: TypeAlias = str | os.PathLike[str] | ZarrStore | StorePath | ObjectStore | Store
    """The location of a checkpoint: a path, a url, or a ready store."""
else:
    Url = str | os.PathLike[str] | Any


def open_store(url: Url | None, **options: Any) -> Store:
    """Open the store of a :class:`StoreSpec` with these arguments. Makes no request."""
    return StoreSpec(url, **options).open()


class StoreSpec:
    """A user's description of a store, which is opened on demand, once per process. Immutable and picklable.

    Pickles contain no secrets. A marker replaces credentials in a url and options with names such as key, secret, token
    or password. Opening such a copy raises StorageError. Credentials from the environment, a profile or a picklable
    ``credential_provider`` are available in other processes without being pickled.

    Args:
        url: a local path (``str`` or ``Path``), ``file://``, ``s3://``, ``gs://``, ``az://`` (``abfs(s)://``), or any
            other url that fsspec supports, such as ``memory://`` or ``sftp://``. It can also be a ready zarr or obstore
            store, or a ``zarr.storage.StorePath``. A read-only store is never changed. If None, call :meth:`at`.
        storage_options: options of obstore, or some common names of s3fs, gcsfs and adlfs. Unknown names are an error.
            For fsspec's protocols the options are passed to the filesystem unchanged. ``{"backend": "fsspec"}`` uses
            fsspec's filesystem (s3fs, gcsfs, adlfs) also for a cloud's url. ``"allow_chains": True`` with it permits
            urls that open other urls (``simplecache::s3://...``, ``reference://``). ``credential_provider`` (for
            ``s3://``, ``gs://`` and ``az://``) is a callable that returns credentials in obstore's form with their
            expiry time. It is called again when they expire. It must be picklable if the recipe is sent to other
            processes.
        durable: if False, local files are written without fsync, except in the conditional puts of a commit.
        concurrency: maximum number of concurrent transfers. The default depends on the store
            (:attr:`Store.max_concurrency`).

    Raises:
        StorageError: the url or the store is not supported. :meth:`open` checks the options.
    """

    def __init__(
        self,
        url: Url | None = None,
        storage_options: Mapping[str, Any] | None = None,
        durable: bool = True,
        concurrency: int | None = None,
    ) -> None:
        options = {} if storage_options is None else storage_options
        if not isinstance(options, Mapping) or not all(isinstance(name, str) for name in options):
            raise StorageError("storage_options must be a dict with a str as the name of each option")
        self._options = dict(options)
        self._provider: Callable[..., Any] | None = self._options.pop("credential_provider", None)
        if self._provider is not None and not callable(self._provider):
            raise StorageError(f"credential_provider must be a callable, got a {type(self._provider).__name__}")
        self._durable = durable
        self.concurrency = concurrency
        path = url if isinstance(url, str | os.PathLike) else None
        self._ready: ReadyStore | None = None
        if url is not None and path is None:
            if storage_options:
                raise StorageError("storage_options belong to a url, not to a ready store")
            ready = describe_store(url)
            self._options, self._provider = dict(ready.options), ready.provider
            self._ready = replace(ready, options={}, provider=None)
        self._store = None if self._ready is None else self._ready.store
        """A ready store that no url can describe, or None. The address is the path in it."""
        self._address = self._resolve(path)
        self._pid = os.getpid()
        self._opened: tuple[int, Store] | None = None

    @property
    def url(self) -> str:
        """The url for messages, normalised and without credentials; "" if there is none yet."""
        if self._store is not None:
            return one_line(f"{type(self._store).__name__}/{self._address}".rstrip("/"))
        return redact_url(self._address.removeprefix(MARKER))

    @property
    def is_archive(self) -> bool:
        """Whether the url is that of an archive, one file: it ends with ".zarr.zip"."""
        return is_archive_name(split_query(self._address)[0].rpartition("/")[2]) and not isinstance(self._store, Store)

    def at(self, url: str | os.PathLike[str]) -> StoreSpec:
        """Return a recipe with the same options and another url (or another path in the ready store)."""
        return self._moved(self._resolve(url))

    def child(self, name: str) -> StoreSpec:
        """Return a recipe with the same options for one or more path components below the url."""
        if self._store is not None:
            return self._moved(f"{self._address}/{name.strip('/')}".strip("/"))
        return self._moved(join_url(self._address, name))

    def open(self) -> Store:
        """Return the store, the same one at every call in this process. Makes no request.

        Raises StorageError if an option is not supported, no credentials are found, secrets were left out of a pickle,
        there is no url, or a store in memory is opened in another process than its own.
        """
        if self._opened is None or self._opened[0] != os.getpid():
            store = self._make()
            if self.concurrency is not None:
                store.max_concurrency = self.concurrency
            if self._ready is not None and self._ready.read_only:
                store.refuse_changes()
            self._opened = (os.getpid(), store)
        return self._opened[1]

    def __repr__(self) -> str:
        options = f", storage_options={redact(self._options)}" if self._options else ""
        return f"StoreSpec({self.url!r}{options})"

    def __deepcopy__(self, memo: dict[int, Any]) -> StoreSpec:
        # A copy within the process may share secrets, and the recipe is immutable.
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        if self._ready is not None and self._ready.in_memory:
            raise StorageError(
                f"{type(self._store).__name__} lives in this process's memory and cannot be sent to another one: "
                "use a path or a url that both can reach"
            )
        try:
            pickle.dumps(self._provider)
        except Exception as error:
            raise StorageError(
                "the credential_provider cannot be pickled, but this store is sent to another process: use a function "
                f"or a class of a module ({type(error).__name__}: {error})"
            ) from error
        address = self._address if scrub(self._address) == self._address else MARKER + self.url
        ready = self._ready and replace(self._ready, root=scrub(self._ready.root))
        hidden = {"_options": redact(self._options), "_address": address, "_ready": ready}
        return _rebuild, ({**self.__dict__, **hidden, "_opened": None},)

    # -- inside

    def _resolve(self, url: str | os.PathLike[str] | None) -> str:
        if self._ready is None:
            return "" if url is None else normalize(url)
        text = "" if url is None else text_of(url)
        if has_protocol(text):
            raise StorageError(f"with a ready store, the url must be a path in that store, got {redact_url(text)!r}")
        text, root = text.strip("/"), self._ready.root
        return f"{root}/{text}".strip("/") if self._store is not None else join_url(root, text)

    def _moved(self, address: str) -> StoreSpec:
        return _rebuild({**self.__dict__, "_address": address, "_opened": None})

    def _make(self) -> Store:
        if has_marker(self._options) or has_marker(self._address):
            raise StorageError(
                f"{self.url}: secrets are not pickled, so this process has no credentials for it. Pass them by "
                "environment variables (AWS_ACCESS_KEY_ID ...), a profile, or a picklable credential_provider"
            )
        in_memory = self._ready is not None and self._ready.in_memory
        if (in_memory or self._address.startswith("memory:")) and self._pid != os.getpid():
            raise StorageError(
                f"{self.url} lives in the memory of another process (id {self._pid}): use a path or a url that both "
                "processes can reach"
            )
        address, query = split_query(self._address)
        above, _, name = address.rpartition("/")
        if any(map(is_archive_name, above.split("/"))):
            raise StorageError(
                f"{self.url} lies inside an archive, since a name that ends with '.zarr.zip' is that of one file: use "
                "the url of the archive, or a path outside of it"
            )
        if self.is_archive:
            from zarrckpt._store._zip import ZipStore

            # The root of a filesystem, or of a url without a host.
            above += "/" if not above or above.endswith("/") else ""
            return ZipStore(self._moved(above + query if self._store is None else above.strip("/")).open(), name)
        if isinstance(self._store, Store):
            if self._address:
                kind = type(self._store).__name__
                raise StorageError(f"a {kind} has one url and no paths in it, got the path {self._address!r}")
            return self._store
        if self._store is not None:
            from zarrckpt._store._zarr import WrappedZarrStore

            return WrappedZarrStore(self._store, self._address, in_memory)
        if not self._address:
            raise StorageError("there is no url: pass one. latest() returns None if no checkpoint is committed")
        return self._from_url()

    def _from_url(self) -> Store:
        parsed, options = parse(self._address), dict(self._options)
        backend = options.pop("backend", None)
        backends = ("fsspec",) if parsed.kind in ("local", "fsspec") else ("obstore", "fsspec")
        if backend is not None and backend not in backends:
            raise StorageError(f"{self.url}: the option backend is {backend!r}: expected {' or '.join(backends)}")
        through_fsspec = parsed.kind == "fsspec" or backend == "fsspec"
        if self._provider is not None and (through_fsspec or parsed.kind == "local"):
            raise StorageError(f"{self.url}: a credential_provider is only for s3://, gs:// and az:// through obstore")
        if through_fsspec:
            from zarrckpt._store._fsspec import FsspecStore

            return FsspecStore(self._address, options)
        if parsed.kind == "local":
            from zarrckpt._store._local import LocalStore

            if options:
                raise StorageError(f"{parsed.path!r} is a local path, which has no storage_options (got {[*options]})")
            return LocalStore(parsed.path, self._durable)
        from zarrckpt._store._obstore import ObstoreStore
        from zarrckpt._store._obstore_client import open_client

        return ObstoreStore(open_client(parsed, options, self._provider), self.url)


def _rebuild(state: dict[str, Any]) -> StoreSpec:
    spec = object.__new__(StoreSpec)
    spec.__dict__.update(state)
    return spec
