"""The recipe for a store: what users pass, kept picklable and free of secrets where it leaves the process."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Mapping
from typing import Any

from zarrckpt._errors import StorageError
from zarrckpt._store._base import Store
from zarrckpt._store._ready import Described, describe
from zarrckpt._store._secrets import MARKER, has_marker, redact, redact_url
from zarrckpt._store._url import has_protocol, join_url, normalize, parse


def open_store(
    url: str | os.PathLike[str] | None,
    *,
    store: object | None = None,
    storage_options: Mapping[str, Any] | None = None,
    credential_provider: Callable[..., Any] | None = None,
    durable: bool = True,
    concurrency: int | None = None,
) -> Store:
    """Open the store at ``url``, or at the path ``url`` inside a ready ``store``. Makes no request.

    Args:
        url: a local path (``str`` or ``Path``), ``file://``, ``s3://``, ``gs://``, ``az://`` (``abfs(s)://``), or any
            other url that fsspec knows, such as ``memory://`` or ``sftp://``. With ``store``: a path in it, or None.
        store: a ready zarr or obstore store, instead of a url.
        storage_options: options under the names of s3fs, gcsfs, adlfs or obstore; an unknown name is an error. For
            fsspec's protocols they go to the filesystem as they are. ``{"backend": "fsspec"}`` takes fsspec's own
            filesystem (s3fs, gcsfs, adlfs) for a cloud's url, too.
        credential_provider: for ``s3://``, ``gs://`` and ``az://``: a callable that returns credentials in obstore's
            form with the time when they expire; it is asked again then. It must pickle to go to other processes.
        durable: False leaves out the fsyncs of local files. The conditional puts of a commit keep theirs.
        concurrency: exactly so many transfers at once, as :attr:`Store.max_concurrency` says then. Default: the store's
            own choice.

    Raises:
        StorageError: the url or an option is not understood, or no credentials are found.
    """
    return StoreSpec(url, store, storage_options, credential_provider, durable, concurrency).open()


class StoreSpec:
    """What :func:`open_store` takes, opened on demand, once per process. Immutable and picklable.

    A pickle holds no secret: options whose name says key, secret, token, password and the like, and
    credentials in a url, give way to a marker, and opening such a copy raises StorageError. Credentials
    from the environment, from a profile or from a picklable ``credential_provider`` need no pickling.
    ``url`` may be None until :meth:`at` gives one.
    """

    def __init__(
        self,
        url: str | os.PathLike[str] | None = None,
        store: object | None = None,
        storage_options: Mapping[str, Any] | None = None,
        credential_provider: Callable[..., Any] | None = None,
        durable: bool = True,
        concurrency: int | None = None,
    ) -> None:
        self._ready: Described | None = None
        self._options = dict(storage_options or {})
        self._provider = credential_provider
        self._durable = durable
        self.concurrency = concurrency
        if store is not None:
            if storage_options or credential_provider is not None:
                raise StorageError("storage_options and credential_provider belong to a url, not to a ready store=")
            self._ready = describe(store)
            self._options, self._provider = dict(self._ready.options), self._ready.credential_provider
        self._address = self._resolve(url)
        self._pid = os.getpid()
        self._opened: tuple[int, Store] | None = None

    @property
    def url(self) -> str:
        """The url for messages: normalised, without credentials; "" where none is given yet."""
        if self._ready is not None and not self._ready.url:
            return f"{type(self._ready.store).__name__}/{self._address}".rstrip("/")
        return redact_url(self._address.removeprefix(MARKER))

    def at(self, url: str | os.PathLike[str]) -> StoreSpec:
        """The same options at another url (or at another path of the ready store)."""
        return self._moved(self._resolve(url))

    def child(self, name: str) -> StoreSpec:
        """The same options one or more path components further down."""
        if self._ready is not None and not self._ready.url:
            return self._moved(f"{self._address}/{name.strip('/')}".strip("/"))
        return self._moved(join_url(self._address, name))

    def open(self) -> Store:
        """The store; the same one at every call in this process. Makes no request.

        Raises StorageError where secrets were left out of a pickle, where no url is given, and where a store
        in memory is opened in another process than its own.
        """
        if self._opened is None or self._opened[0] != os.getpid():
            store = self._make()
            if self.concurrency is not None:
                store.max_concurrency = self.concurrency
            self._opened = (os.getpid(), store)
        return self._opened[1]

    def __repr__(self) -> str:
        options = f", storage_options={redact(self._options)}" if self._options else ""
        return f"StoreSpec({self.url!r}{options})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StoreSpec) and self._identity() == other._identity()

    __hash__ = None  # type: ignore[assignment]

    def __copy__(self) -> StoreSpec:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> StoreSpec:
        # A copy within the process: nothing to hide, and nothing that changes.
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        ready = self._ready
        if ready is not None and ready.in_memory:
            raise StorageError(
                f"{type(ready.store).__name__} lives in this process's memory and cannot be sent to another one: "
                "use a path or a url that both can reach"
            )
        if ready is not None and ready.url:
            ready = Described(redact_url(ready.url))
        state = {
            "_ready": ready,
            "_options": redact(self._options),
            "_provider": _picklable(self._provider),
            "_durable": self._durable,
            "concurrency": self.concurrency,
            "_address": self._address if redact_url(self._address) == self._address else MARKER + self.url,
            "_pid": self._pid,
        }
        return _rebuild, (state,)

    # -- inside

    def _resolve(self, url: str | os.PathLike[str] | None) -> str:
        if self._ready is None:
            return "" if url is None else normalize(url)
        text = "" if url is None else os.fspath(url)
        if has_protocol(text):
            raise StorageError(f"with store=, the url is a path inside that store: {redact_url(text)!r} is none")
        text = text.strip("/")
        if self._ready.url:
            return join_url(self._ready.url, text)
        return f"{self._ready.path}/{text}".strip("/")

    def _moved(self, address: str) -> StoreSpec:
        moved = object.__new__(StoreSpec)
        moved.__dict__.update(self.__dict__, _address=address, _opened=None)
        return moved

    def _identity(self) -> tuple[Any, ...]:
        store = self._ready.store if self._ready is not None else None
        return self._address, id(store), self._options, self._provider, self._durable, self.concurrency

    def _make(self) -> Store:
        if has_marker(self._options) or has_marker(self._address):
            raise StorageError(
                f"{self.url}: secrets are not pickled, so this process has no credentials for it. Give them by "
                "environment variables (AWS_ACCESS_KEY_ID ...), a profile, or a picklable credential_provider"
            )
        if self._ready is not None and not self._ready.url:
            return self._from_object(self._ready)
        if not self._address:
            raise StorageError(
                "no url is given: pass one, or store=; latest() returns None where no checkpoint is committed"
            )
        return self._from_url()

    def _from_object(self, ready: Described) -> Store:
        if ready.in_memory:
            self._same_process()
        if isinstance(ready.store, Store):
            if self._address:
                raise StorageError(
                    f"a {type(ready.store).__name__} has a url of its own, and no paths ({self._address!r})"
                )
            return ready.store
        from zarrckpt._store._zarr import WrappedZarrStore

        return WrappedZarrStore(ready.store, self._address, ready.in_memory)

    def _from_url(self) -> Store:
        place = parse(self._address)
        through_fsspec = place.kind == "fsspec" or self._options.get("backend") == "fsspec"
        if self._provider is not None and (through_fsspec or place.kind == "local"):
            raise StorageError(f"{self.url}: credential_provider= serves s3://, gs:// and az:// through obstore only")
        if through_fsspec:
            return self._from_fsspec()
        if place.kind == "local":
            return self._from_path(place.path)
        from zarrckpt._store._obstore import ObstoreStore
        from zarrckpt._store._obstore_client import open_client

        return ObstoreStore(open_client(place, self._options, self._provider), self.url, self.concurrency)

    def _from_fsspec(self) -> Store:
        from zarrckpt._store._fsspec import FsspecStore

        if self._address.startswith("memory:"):
            self._same_process()
        return FsspecStore(self._address, self._options)

    def _from_path(self, path: str) -> Store:
        from zarrckpt._store._local import LocalStore

        if self._options:
            raise StorageError(f"{path!r} is a local path, which takes no storage_options (got {[*self._options]})")
        return LocalStore(path, self._durable)

    def _same_process(self) -> None:
        if self._pid != os.getpid():
            raise StorageError(
                f"{self.url} lives in the memory of another process (id {self._pid}): use a path or a url that both "
                "processes can reach"
            )


def _picklable(provider: Callable[..., Any] | None) -> Callable[..., Any] | None:
    try:
        pickle.dumps(provider)
    except Exception as error:
        raise StorageError(
            "the credential_provider cannot be pickled, and this store goes to another process: use a function or a "
            f"class of a module ({type(error).__name__}: {error})"
        ) from error
    return provider


def _rebuild(state: dict[str, Any]) -> StoreSpec:
    spec = object.__new__(StoreSpec)
    spec.__dict__.update(state, _opened=None)
    return spec
