"""A ready store that the caller passes as ``store=``: what can be described by a url and options, is.

Then there is one path for both, which pickles without secrets and opens a client per process. What is
left are stores in memory and stores that this package does not know.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from zarrckpt._errors import StorageError
from zarrckpt._store._base import Store
from zarrckpt._store._url import join_url

_ACCEPTED = (
    "a zarr store (zarr.storage.LocalStore, ObjectStore, FsspecStore, MemoryStore or another zarr.abc.store.Store), "
    "or an obstore store"
)


@dataclass(frozen=True)
class Described:
    """A ready store as a url with options, or, where ``url`` is empty, as the object itself and a path in it."""

    url: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    credential_provider: Any = None
    store: Any = None
    path: str = ""
    in_memory: bool = False


def describe(store: Any) -> Described:
    """Take a ready store apart. Raises StorageError for an object that is none, or that cannot be used."""
    if isinstance(store, Store):
        return Described(store=store, in_memory=True)

    import obstore.store
    from zarr.abc.store import Store as ZarrStore
    from zarr.storage import FsspecStore, LocalStore, MemoryStore, ObjectStore, StorePath

    if isinstance(store, StorePath):
        return _inside(describe(store.store), store.path)
    if isinstance(store, LocalStore):
        return Described(str(store.root))
    if isinstance(store, obstore.store.ObjectStore):
        store = ObjectStore(store)
    if isinstance(store, ObjectStore):
        return _from_obstore(store)
    if isinstance(store, FsspecStore):
        return _from_fsspec(store)
    if isinstance(store, ZarrStore):
        return Described(store=store, in_memory=isinstance(store, MemoryStore))
    raise StorageError(f"store= is a {type(store).__module__}.{type(store).__name__}: expected {_ACCEPTED}")


def _inside(found: Described, path: str) -> Described:
    if not path:
        return found
    if found.url:
        return Described(join_url(found.url, path), found.options, found.credential_provider)
    return Described(store=found.store, path=f"{found.path}/{path}".strip("/"), in_memory=found.in_memory)


def _from_obstore(wrapper: Any) -> Described:
    from obstore.store import AzureStore, GCSStore, LocalStore, MemoryStore, S3Store

    store = wrapper.store
    if isinstance(store, LocalStore):
        if store.prefix is None:
            raise StorageError("this obstore LocalStore has no folder of its own: make it with LocalStore(prefix)")
        return Described(str(store.prefix))
    if isinstance(store, MemoryStore):
        return Described(store=wrapper, in_memory=True)
    for kind, protocol in ((S3Store, "s3"), (GCSStore, "gs"), (AzureStore, "az")):
        if isinstance(store, kind):
            return _from_cloud(store, protocol)
    raise StorageError(f"an obstore {type(store).__name__} cannot hold checkpoints: expected {_ACCEPTED}, or a url")


def _from_cloud(store: Any, protocol: str) -> Described:
    config = dict(store.config)
    bucket = config.pop("container_name" if protocol == "az" else "bucket")
    url = f"{protocol}://{bucket}/{store.prefix or ''}".rstrip("/")
    options = {**config, "client_options": store.client_options, "retry_config": store.retry_config}
    return Described(url, options, store.credential_provider)


def _from_fsspec(store: Any) -> Described:
    import fsspec
    from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper

    fs = store.fs.sync_fs if isinstance(store.fs, AsyncFileSystemWrapper) else store.fs
    protocol = fs.protocol if isinstance(fs.protocol, str) else fs.protocol[0]
    if fs.storage_args or fsspec.get_filesystem_class(protocol) is not type(fs):
        raise StorageError(
            f"the filesystem {type(fs).__name__} of this FsspecStore cannot be opened again by a url: pass the url "
            "and storage_options instead of store="
        )
    options = {name: value for name, value in fs.storage_options.items() if name not in ("asynchronous", "loop")}
    return Described(f"{protocol}://{store.path.lstrip('/')}", {**options, "backend": "fsspec"})
