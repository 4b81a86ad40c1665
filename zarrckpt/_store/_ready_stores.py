"""Describe a caller's ready store by a url and options, so that urls and ready stores share the same code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from zarrckpt._errors import StorageError
from zarrckpt._store._base import Store
from zarrckpt._store._url import has_protocol, join_url

_ACCEPTED = (
    "a zarr store (zarr.storage.LocalStore, ObjectStore, FsspecStore, MemoryStore or another zarr.abc.store.Store), "
    "or an obstore store"
)


@dataclass(frozen=True)
class ReadyStore:
    """A caller's store: the url and the options that describe it, or itself if there are none."""

    root: str = ""
    """The url that describes the store, or the path in ``store``."""
    options: Mapping[str, Any] = field(default_factory=dict)
    provider: Callable[..., Any] | None = None
    """The ``credential_provider``."""
    store: Any = None
    """A store that no url describes, or None."""
    in_memory: bool = False
    read_only: bool = False


def describe_store(store: Any) -> ReadyStore:
    """Return the description of a store of this package, of zarr or of obstore. Raises StorageError for others."""
    if isinstance(store, Store):
        return ReadyStore(store=store, in_memory=True)

    import obstore.store as clients
    from zarr import storage
    from zarr.abc.store import Store as ZarrStore

    path = ""
    if isinstance(store, storage.StorePath):
        store, path = store.store, store.path
    read_only = isinstance(store, ZarrStore) and store.read_only
    client = store.store if isinstance(store, storage.ObjectStore) else store
    if isinstance(store, storage.LocalStore):
        return ReadyStore(join_url(store.root, path), read_only=read_only)
    if isinstance(client, clients.LocalStore):
        if client.prefix is None:
            raise StorageError("this obstore LocalStore has no folder: make it with LocalStore(prefix)")
        return ReadyStore(join_url(client.prefix, path), read_only=read_only)
    if isinstance(client, clients.S3Store | clients.GCSStore | clients.AzureStore):
        root, options = _describe_client(client)
        return ReadyStore(join_url(root, path), options, client.credential_provider, read_only=read_only)
    if isinstance(store, storage.FsspecStore):
        root, options = _describe_filesystem(store)
        return ReadyStore(join_url(root, path), options, read_only=read_only)
    if isinstance(client, clients.MemoryStore):
        return ReadyStore(path, store=storage.ObjectStore(client), in_memory=True, read_only=read_only)
    if isinstance(store, ZarrStore) and client is store:
        return ReadyStore(path, store=store, in_memory=isinstance(store, storage.MemoryStore), read_only=read_only)
    if isinstance(client, clients.ObjectStore):
        kind = type(client).__name__
        raise StorageError(f"an obstore {kind} cannot hold checkpoints: expected {_ACCEPTED}, or a url")
    raise StorageError(
        f"the url is a {type(store).__module__}.{type(store).__name__}: expected a url, a path, {_ACCEPTED}"
    )


def _describe_client(client: Any) -> tuple[str, dict[str, Any]]:
    protocol = {"S3Store": "s3", "GCSStore": "gs"}.get(type(client).__name__, "az")
    config = dict(client.config)
    bucket = config.pop("container_name" if protocol == "az" else "bucket")
    if "endpoint_url_s3" in config:
        # It takes precedence over ``endpoint``.
        config["endpoint"] = config.pop("endpoint_url_s3")
    options = {**config, "client_options": client.client_options, "retry_config": client.retry_config}
    return f"{protocol}://{bucket}/{client.prefix or ''}".rstrip("/"), options


def _describe_filesystem(store: Any) -> tuple[str, dict[str, Any]]:
    import fsspec
    from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper

    fs = store.fs.sync_fs if isinstance(store.fs, AsyncFileSystemWrapper) else store.fs
    protocol = fs.protocol if isinstance(fs.protocol, str) else fs.protocol[0]
    if fs.storage_args or fsspec.get_filesystem_class(protocol) is not type(fs):
        raise StorageError(
            f"the filesystem {type(fs).__name__} of this FsspecStore cannot be opened again by a url: pass the url "
            "and storage_options instead"
        )
    options = {name: value for name, value in fs.storage_options.items() if name not in ("asynchronous", "loop")}
    # The paths of an HTTP filesystem are urls.
    root = store.path if has_protocol(store.path) else f"{protocol}://{store.path.lstrip('/')}"
    return root, {**options, "backend": "fsspec"}
